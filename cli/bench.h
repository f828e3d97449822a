/* SPDX-License-Identifier: MIT
 *
 * sidestream bench: what this machine can do.
 *
 *     bench.c         arguments, the device, memory within the share, the course of events
 *     bench_time.c    the measuring primitive: device work that is held back, then timed by the device's own events
 *     bench_stats.c   samples, their median and spread; latency and rate of copies
 *     bench_report.c  tables, the JSON object
 *     bench_save.c    what was measured as a machine profile
 *     bench_NAME.c    a suite each: bench_link ... bench_overlap
 *
 * A suite measures, checks the bytes, prints its table (not with --json), adds its object to the JSON, and fills in its fields of the machine.
 */
#ifndef CLI_BENCH_H
#define CLI_BENCH_H

#include "cli.h"
#include "output.h"
#include "parse.h"

enum {
    BENCH_SAMPLES = 100, /* most samples of one figure */
    BENCH_HELD = 256,    /* most operations that are held back: a stream takes so many without blocking the host */
    BENCH_LANES = 4,     /* that are timed together */
    BENCH_POISON = 0xA5
};

struct bench_args {
    struct common common;
    uint32_t suites; /* bit n: suite number n of bench.c's table */
    bool quick, save;
    const char *save_file; /* NULL: where side_machine_path says */
    uint64_t share; /* percent of free device memory, and of the host memory that this process may use, that may be taken */
    uint64_t samples;             /* of each figure; 0: by device */
    uint32_t streams[PARSE_LIST]; /* of the suite `overlap` */
    size_t stream_counts;
};

struct bench {
    struct bench_args args;
    side_device *device;
    side_device_props props;
    side_link link;
    side_pool *pool;      /* of the bench; its budget is the share of host memory */
    size_t samples;       /* of each figure, 1..BENCH_SAMPLES */
    size_t cache_bytes;   /* the host's last-level cache; 0: not known */
    double timeout_s;     /* longest wait for the device */
    side_machine machine; /* to be saved: suites overwrite what they measured */
    side_machine_from machine_was;
    bool begun_from_file;     /* that of --save=FILE, not the one of plans */
    char save_path[PATH_MAX]; /* of --save, else "" */
    bool saved;
    bool measured[8]; /* by suite number: it ran to its end */
    json_t *suites,
        *errors; /* an object, a member each suite; what makes figures worthless, as texts. NULL without --json */
    int code;    /* of measuring errors that were said and did not end the run */

    /* Limits of the share, and what is and was taken at most. Host: what the pool has pinned, and all else in host_taken. */
    size_t device_limit, device_taken, device_peak;
    size_t host_limit, host_taken, host_peak;

    /* The measuring primitive's own (bench_time.c). */
    side_stream *gate;
    side_event *gate_open, *led[BENCH_LANES], *begin[BENCH_LANES], *end[BENCH_LANES];
    uint64_t hold_ns;   /* how long the next sample's work is held back */
    uint64_t too_short; /* samples thrown away because the host queued slower than that */
    bool stuck;         /* the device may still use what was taken: nothing is freed */
    bool said;          /* the cause of the status that was returned last has been said */
};

/* ---- suites. Exit codes, having said what is wrong. EXIT_INTERRUPTED once signals_interrupted(), within half a second or so. */

int bench_link(struct bench *bench);
int bench_pin(struct bench *bench);
int bench_stage(struct bench *bench);
int bench_blocks(struct bench *bench);
int bench_launch(struct bench *bench);
int bench_overlap(struct bench *bench);

/* ---- memory within the share (bench.c) */

/* What may still be taken. */
size_t bench_device_room(const struct bench *bench);
size_t bench_host_room(const struct bench *bench);
/* SIDE_NO_DEVICE_MEMORY or SIDE_OVER_BUDGET beyond the share, which has been said; else as the library has it. free takes NULL. */
side_status bench_device_take(struct bench *bench, size_t bytes, void **data);
void bench_device_free(struct bench *bench, void *data, size_t bytes);
side_status bench_pinned_take(struct bench *bench, size_t bytes, void **data);
void bench_pinned_free(struct bench *bench, void *data, size_t bytes);
/* Pageable, touched, on huge pages where the system gives them; page-aligned. */
side_status bench_pageable_take(struct bench *bench, size_t bytes, void **data);
void bench_pageable_free(struct bench *bench, void *data, size_t bytes);
/* Counts memory that a suite takes in another way (a pool or a pipeline of its own); false, having said so, where it does not fit. */
bool bench_host_count(struct bench *bench, size_t bytes);
void bench_host_uncount(struct bench *bench, size_t bytes);
bool bench_device_count(struct bench *bench, size_t bytes);
void bench_device_uncount(struct bench *bench, size_t bytes);

/* Bytes that look random, the same for the same seed; `bytes` a multiple of 8, data 8-byte aligned (bench_data.c). */
void bench_fill(void *data, size_t bytes, uint64_t seed);

/* ---- measuring (bench_time.c) */

/* Queues at most BENCH_HELD operations; called again where the hold was too short, so it must queue the same each time. */
typedef side_status bench_queue_fn(void *user, side_stream *stream);

struct bench_lane {
    side_stream *stream;
    bench_queue_fn *lead; /* queued before the begin event, so that it lies on the engine that is measured; NULL: none */
    bench_queue_fn *queue; /* what is timed */
    void *user;
    double begin_s, end_s; /* set: since the gate opened */
};

/* Streams, events, and one operation to load what loads lazily. */
side_status bench_time_begin(struct bench *bench);
void bench_time_end(struct bench *bench);

/* One sample: the lanes' work is queued while a spin holds it back, begins together once all leads are done, and is timed by device events. The spin ends by itself; if it ended
 * before the host had finished queueing, the sample is thrown away and the spin made longer. Where the device has no kernels: by the host's clock, begin_s 0
 * and end_s the same for all lanes. Returns when all is done. SIDE_CANCELLED: interrupted. Not for copies of pageable memory: they block the host. */
side_status bench_time(struct bench *bench, struct bench_lane *lanes, size_t count);
/* "device events", or "host clock: no kernels to hold work back with". */
const char *bench_clock(const struct bench *bench);
/* Waits; like side_stream_sync with the bench's time-out, but comes back with SIDE_CANCELLED soon after Ctrl-C. Sets bench->stuck where work may go on. */
side_status bench_sync(struct bench *bench, side_stream *stream);
/* For loops: SIDE_CANCELLED once a signal came. */
side_status bench_check(const struct bench *bench);
/* Says "interrupted" or "WHAT: cause"; the exit code. */
int bench_failed(struct bench *bench, side_status status, const char *what);

/* ---- samples (bench_stats.c) and tables (bench_report.c) */

struct bench_samples {
    double value[BENCH_SAMPLES];
    size_t count;
};

void bench_add(struct bench_samples *samples, double value);
double bench_median(const struct bench_samples *samples);
double bench_least(const struct bench_samples *samples);
double bench_most(const struct bench_samples *samples);
/* (most - least) / median; 0 for one sample. */
double bench_spread(const struct bench_samples *samples);
/* {"median": ..., "least": ..., "most": ..., "samples": [...]}, in SI units without rounding. */
json_t *bench_samples_json(const struct bench_samples *samples);
/* "55.3", "7.41", "0.052": three digits and more. */
const char *bench_gbps_text(double gbps, char text[16]);
/* "1.2 ms", "7.70 us" */
const char *bench_seconds_text(double seconds, char text[16]);
/* A printf to stdout that is silent with --json. */
void bench_print(const struct bench *bench, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The suite's object; takes it over. Nothing without --json. */
void bench_json(struct bench *bench, const char *suite, json_t *object);
/* The whole JSON object; takes the suites and errors over. */
json_t *bench_root(struct bench *bench);
/* A measuring error, a wrong byte: said, kept for the JSON, and the exit code of the whole. The run goes on. */
void bench_error(struct bench *bench, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* time = latency + bytes / rate through `count` points, so that relative errors are least; outliers count less. False: fewer than two sizes. */
bool bench_fit(const double *bytes, const double *seconds, size_t count, side_rate *rate);

/* ---- the profile (bench_save.c) */

/* bench->machine: the saved profile, else the estimate. With --save: whether the file could be written. An exit code. */
int bench_machine_begin(struct bench *bench);
/* not_measured: suites whose fields stay as they were, for the user. An exit code. */
int bench_machine_save(struct bench *bench, bool link_measured, const char *not_measured);

#endif
