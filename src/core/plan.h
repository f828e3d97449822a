/* SPDX-License-Identifier: MIT
 *
 * The model behind side_plan_make, as its files share it:
 *   plan.c         the public call: checks, choices, the result
 *   plan_lanes.c   from machine and work to what each lane takes for an item; which lane limits
 *   plan_run.c     the model itself: a pipeline's recurrence, event by event
 *   plan_jitter.c  a fixed sequence of unequal times
 *   plan_depth.c   the depth of pipelines that leave it to us
 *
 * All but the last is pure: no clock, no threads, no device, no heap. A run of the model has some 30 KiB of state, on the stack.
 */
#ifndef CORE_PLAN_H
#define CORE_PLAN_H

#include "sidestream.h"

#define PLAN_MAX_DEPTH 64u
/* Of queue_s a copy's: on an H200 2.0 of 5.9 us of driver calls, and its event and wait. A result's copy comes on top. */
#define PLAN_COPY_PART  0.35
#define PLAN_MAX_PIECES 32u /* an item's, in the model; more are taken together */

/* Copies of one direction. */
struct plan_way {
    double latency_s,
        bytes_s; /* of an item, all pieces: what the engine takes besides its bytes, and for them at the full rate. Both 0: no such lane */
    uint32_t pieces;         /* of an item, at least 1 */
    double stage_s;          /* of a piece: one thread between pageable and pinned memory */
    uint32_t threads, slots; /* 0: pinned, no staging */
};

/* What one item takes of each lane, in seconds, and how lanes depend on each other. */
struct plan_lanes {
    double source_s, compute_s;
    struct plan_way in, out;
    double share_in,
        share_out; /* rate of each direction while both move bytes, over its rate alone: more than 0, up to 1 */
    bool one_engine;
    double queue_copy_s, queue_compute_s; /* of the host */
    double handover_s, start_s;
    uint32_t depth, window;
    const struct plan_jitter *jitter; /* NULL: none */
};

#define PLAN_STRATA 256u

struct plan_jitter {
    double factor[PLAN_STRATA]; /* rising; mean 1 */
    uint8_t order[2][PLAN_STRATA];
};
enum { PLAN_OF_COMPUTE = 0, PLAN_OF_SOURCE = 1 };

/* deviation: over the mean, 0 < deviation <= 2. */
void plan_jitter_make(struct plan_jitter *jitter, double deviation);
double plan_jitter_factor(const struct plan_jitter *jitter, int of, uint64_t item);

/* When two items had gone through all lanes. */
struct plan_marks {
    uint64_t item[2];
    double at[2];
};

/* Seconds from the call to the return for `items` items, each of them simulated. `first_draw`: of the jitter. `marks` may be NULL. */
double plan_run(const struct plan_lanes *lanes, uint64_t items, uint64_t first_draw, struct plan_marks *marks);
/* The same for any number: of many items the steady state is simulated, and continued. per_item (may be NULL): seconds an item in the steady state. */
double plan_time(const struct plan_lanes *lanes, uint64_t items, double *per_item);

/* SIDE_INVALID names the field that is out of range. */
side_status plan_check(const side_machine *machine, const side_plan_work *work);
/* A depth for options.depth 0, 2 to 8 (3 and more where the loop is the caller's), within a quarter of the free device memory where that takes as many. */
side_status plan_pipeline_depth(side_device *device, const side_pipeline_options *options, uint32_t threads,
                                uint32_t *depth);

/* side_pipeline's own numbers, for a depth and default threads. */
void plan_lanes_make(struct plan_lanes *lanes, const side_machine *machine, const side_plan_work *work, uint32_t depth,
                     size_t chunk_bytes, uint32_t threads);
/* Copy, compute, copy back on one stream. `lanes`: of depth 1, without staging. */
double plan_serial(const struct plan_lanes *lanes, uint64_t items);
/* Which lane limits; `best_s`: the least of this time and those of greater depths. */
side_bound plan_bound(const struct plan_lanes *lanes, uint64_t items, double time_s, double best_s);

#endif
