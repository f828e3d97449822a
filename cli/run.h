/* SPDX-License-Identifier: MIT
 *
 * A file through an operation on the device.
 *
 *     run.c         arguments, files, and the course of events
 *     run_op.c      the operations: what goes in, what comes out, what the device does between
 *     run_report.c  link rate, bottleneck, summary, JSON, drawings
 */
#ifndef CLI_RUN_H
#define CLI_RUN_H

#include "cli.h"
#include "output.h"

struct run_args {
    struct common common;
    const char *op, *input, *output; /* output NULL: none given */
    const char *trace, *svg;
    uint64_t chunk, depth, threads; /* 0: default */
};

struct run {
    struct run_args args;
    bool checksum; /* else a cast */
    side_type from, to;
    int fd;
    struct stat stat;      /* of the input */
    uint64_t bytes;        /* of the input */
    uint64_t source_bytes; /* that go through the device */
    size_t item_bytes, result_bytes;
    struct output output, trace, svg;

    side_device *device;
    side_device_props props;
    side_log *log; /* NULL: off */
    side_span *spans;
    size_t span_count;
    side_account account;
    side_error kept; /* of a compute callback */

    double link_gbps; /* measured, pinned, H2D; 0: not known */
    side_pipeline_stats stats;
    side_xxh3 fold;
    uint64_t hash;
};

/* ---- operations: exit codes, having said what is wrong */
int run_op_parse(struct run *run);
/* Sizes, once the input's is known. */
int run_op_prepare(struct run *run);
/* source, sink, compute of the options */
void run_op_fill(struct run *run, side_pipeline_options *options);
/* What the host must add at the end. */
int run_op_finish(struct run *run);

/* ---- report */
/* Fills link_gbps. An exit code: of all failures only a stuck device is one, the rest leave the rate unknown. */
int run_link_measure(struct run *run);
/* The drawings, then the summary. */
int run_report(struct run *run);

#endif
