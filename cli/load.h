/* SPDX-License-Identifier: MIT
 *
 * A checkpoint's tensors to the device.
 *
 *     load.c         arguments, which tensors, the loads
 *     load_verify.c  what lies at the destination against the files
 *     load_report.c  summary and JSON
 */
#ifndef CLI_LOAD_H
#define CLI_LOAD_H

#include "cli.h"

enum { LOAD_SELECTS = 64 };

struct load_args {
    struct common common;
    const char *path, *select[LOAD_SELECTS];
    size_t selects;
    bool lenient, verify, host;
    uint64_t piece, pinned, threads, repeat; /* 0: default */
    side_load_backend backend;
    const char *format;
};

struct load_run {
    struct load_args args;
    side_checkpoint *checkpoint;
    side_device *device;
    side_device_props props;
    side_machine machine;
    side_load_part *parts;
    size_t part_count;
    uint64_t bytes;
    double open_s;         /* reading the headers */
    double *time_s;        /* of each load */
    side_load_stats stats; /* of the last */
    bool verified;
};

/* Every byte of the last load, which was joined. An exit code, having said what differs. */
int load_verify(struct load_run *run, side_load *load);
int load_report(const struct load_run *run);

#endif
