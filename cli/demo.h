/* SPDX-License-Identifier: MIT
 *
 * The demo: x @ w over a list of host matrices under schedules that differ in nothing but order and waits.
 *
 *     demo.c            arguments and the course of events
 *     demo_memory.c     what must fit, matrices, poison, checksums
 *     demo_schedules.c  the schedules, each a function that queues everything and waits for the end
 *     demo_measure.c    t, c and d alone; the interleaved timed runs; one logged run a schedule
 *     demo_report.c     table, timelines, JSON, SVG, trace
 */
#ifndef CLI_DEMO_H
#define CLI_DEMO_H

#include "cli.h"
#include "output.h"
#include "parse.h"

enum { DEMO_REPEATS = 100, DEMO_ROWS = 4 + 2 * PARSE_LIST, DEMO_ERRORS = 8 };

struct demo_args {
    struct common common;
    uint64_t items, dim, repeats; /* dim, repeats 0: by device */
    side_math math;
    uint32_t depth[PARSE_LIST], streams[PARSE_LIST];
    size_t depths, stream_counts;
    bool results;
    const char *svg, *trace; /* NULL: none */
};

struct demo;

/* Queues the whole schedule and returns when all of it is done. */
typedef side_status demo_schedule(struct demo *demo, side_pipeline *pipeline);

struct demo_row {
    char name[48];
    demo_schedule *schedule;
    uint32_t depth, streams; /* of a pipeline; 0 for schedules written by hand */
    side_pipeline *pipeline; /* NULL for those */
    double times[DEMO_REPEATS];
    double time_s, speedup, bound_ratio;
    side_account account;
    side_span *spans; /* of the logged run */
    size_t span_count;
    uint64_t checksum;
};

struct demo {
    struct demo_args args;
    side_device *device;
    side_device_props props;
    side_link link;
    side_pool *pool;
    side_log *log;            /* NULL but in logged runs */
    side_error kept;          /* of a compute callback */
    struct output svg, trace; /* open from the start: a name that cannot be written shows before the work is done */
    size_t item_bytes, result_bytes;

    /* Host: n inputs, pinned and as pageable copies; with --results, where the results go. */
    side_block *pinned, *pageable, *pinned_out, *pageable_out;
    side_block *host_out; /* the pair's one that the running schedule fills */
    void *staging;        /* pinned, one result: for checksums */
    /* Device: w, the two buffers of the hand-written schedules, n results. */
    void *weight, *in[2], **out;

    side_stream *transfer, *compute, *back;
    side_event *filled, *computed; /* for wait_stream */
    side_event *begin[2], *end[2]; /* timing */

    double t, c, d, bound_s; /* seconds an item: H2D, compute, D2H; t and d with both directions at once */
    double t_alone, d_alone; /* and with one */
    struct demo_row rows[DEMO_ROWS];
    size_t row_count;
    char errors[DEMO_ERRORS][200]; /* what makes the outcome worthless; also said */
    size_t error_count;
    int code;            /* that they lead to */
    uint64_t steps_done; /* of the progress bar */
    bool disabled;       /* by SIDESTREAM_DISABLE */
};

/* ---- memory: exit codes, having said what is wrong */
int demo_memory_take(struct demo *demo);
void demo_memory_free(struct demo *demo);
side_status demo_poison(struct demo *demo);
/* Of all results of the schedule that just ran, in order. */
side_status demo_checksum(struct demo *demo, uint64_t *checksum);

/* ---- schedules */
demo_schedule demo_pageable, demo_pinned, demo_textbook, demo_reordered, demo_sidestream;
/* `log`: NULL, or the log that this pipeline writes. */
side_status demo_pipeline_create(struct demo *demo, const struct demo_row *row, side_log *log, side_pipeline **pipeline);
side_status demo_matmul(struct demo *demo, side_stream *stream, const void *x, void *out);
side_status demo_sync(struct demo *demo);

/* ---- measuring: exit codes */
int demo_measure(struct demo *demo);
void demo_error(struct demo *demo, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* ---- report: exit codes */
int demo_report(struct demo *demo);

#endif
