/* SPDX-License-Identifier: MIT
 *
 * Pipelines, timed against what no schedule can beat.
 *
 *     bench_overlap.c      which cases, the table
 *     bench_overlap_run.c  memory, copy and compute alone, one timed run
 */
#ifndef CLI_BENCH_OVERLAP_H
#define CLI_BENCH_OVERLAP_H

#include "bench_gemm.h"

enum { OVERLAP_CASES = 8, OVERLAP_ITEMS = 1000 };

/* One way to run the items of a group. */
struct overlap_case {
    uint32_t depth, streams;
    side_pipeline *pipeline;
    struct bench_samples time_s;
    double plan_s; /* predicted; NAN: the profile does not say */
};

/* Cases that differ in depth or streams alone, and take turns. */
struct overlap_group {
    bool products; /* compute is matrix products; else it keeps the device busy for a set time */
    double ratio;  /* compute to copy that was asked for */
    uint64_t items;
    double t, c, bound_s; /* an item's copy and compute, alone */
    uint64_t spin_ns;
    size_t times; /* products an item */
    struct overlap_case cases[OVERLAP_CASES];
    size_t count;
};

struct overlap {
    struct bench *bench;
    size_t item_bytes, ring; /* host items; a run of more goes round */
    char *data, *got;        /* pinned */
    char *sums;              /* on the device, 64 bytes an item: the hash of one KiB of it, another one each time */
    void *item;              /* one, on the device */
    side_block blocks[OVERLAP_ITEMS];
    side_stream *stream;
    struct bench_gemm gemm;
    side_error kept; /* of a compute callback */
    /* The run under way. */
    const struct overlap_group *group;
    uint64_t round;
    size_t queued; /* items of a measurement alone */
};

side_status overlap_take(struct overlap *overlap);
void overlap_free(struct overlap *overlap);
/* Sets t, c, items and the bound; decides what an item's compute is. */
side_status overlap_alone(struct overlap *overlap, struct overlap_group *group);
side_status overlap_create(struct overlap *overlap, struct overlap_group *group, struct overlap_case *one);
side_status overlap_run(struct overlap *overlap, struct overlap_group *group, struct overlap_case *one, bool keep);
side_status overlap_destroy(struct overlap *overlap, struct overlap_case *one);

#endif
