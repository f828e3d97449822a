/* SPDX-License-Identifier: MIT
 *
 * Plans: what overlap will give, before any code is written. Pure: no clock, no threads, no device; figures come from the machine profile (machine.h).
 *
 *     side_machine machine = SIDE_MACHINE_INIT;  side_machine_get(dev, &machine);
 *     side_plan_work work = SIDE_PLAN_WORK_INIT;
 *     work.items = 100; work.item_bytes = 64 << 20; work.compute_s = 1.2e-3;
 *     side_plan plan = SIDE_PLAN_INIT;  side_plan_make(&machine, &work, &plan);
 *     printf("%.2fx, bound by %s\n", plan.speedup, side_bound_name(plan.bound));
 */
#include "../sidestream.h" /* before the guard: it includes this file, in the order the areas need */

#ifndef SIDESTREAM_PLAN_H
#define SIDESTREAM_PLAN_H

#ifdef __cplusplus
extern "C" {
#endif

#define SIDE_PLAN_DEPTHS 8 /* depths that are looked at: 1..8 */

/* What is to be done: `items` times H2D of item_bytes, compute, D2H of result_bytes. */
typedef struct side_plan_work {
    size_t size;
    uint64_t items;      /* at least 1 */
    size_t item_bytes;   /* at least 1 */
    size_t result_bytes; /* 0: no results */
    double compute_s;    /* of one item, on the device, alone; 0 is allowed */
    double source_s;     /* host time until the source has the next item; 0: it is there */
    double jitter; /* standard deviation of compute and source over their mean, 0..2. Drawn from a fixed sequence: the plan stays a function */
    uint32_t streams; /* compute streams, 1..16; 0: 1. An item is taken to fill the device: items on several streams take turns, so this changes nothing */
    uint32_t depth;   /* device slots a ring, 1..64; 0: the plan chooses */
    size_t budget_bytes; /* device memory for the rings; 0: no limit */
    bool pageable;       /* host memory is pageable: staged by threads */
} side_plan_work;
/* clang-format off */
#define SIDE_PLAN_WORK_INIT { .size = sizeof(side_plan_work) }
/* clang-format on */

typedef enum side_bound {
    SIDE_BOUND_COMPUTE = 0,
    SIDE_BOUND_H2D = 1,
    SIDE_BOUND_D2H = 2,
    SIDE_BOUND_LINK = 3,    /* both directions share it */
    SIDE_BOUND_STAGE = 4,   /* pageable memory into pinned */
    SIDE_BOUND_SOURCE = 5,  /* the loader */
    SIDE_BOUND_HOST = 6,    /* queueing items */
    SIDE_BOUND_LATENCY = 7, /* hand-overs and the first and last item: too few or too small items */
    SIDE_BOUND_DEPTH = 8    /* too few slots: lanes wait for each other */
} side_bound;
SIDE_API const char *side_bound_name(side_bound bound); /* "compute", "h2d", "d2h", "link", ... */

typedef enum side_verdict {
    SIDE_OVERLAP_PAYS = 0,   /* speedup of 1.10 and more */
    SIDE_OVERLAP_HARDLY = 1, /* 1.02 to 1.10 */
    SIDE_OVERLAP_NOT = 2,    /* less */
    SIDE_OVERLAP_HARMS = 3   /* under 0.99 */
} side_verdict;
SIDE_API const char *side_verdict_name(side_verdict verdict); /* "pays", "hardly", "not", "harms" */

typedef struct side_plan {
    size_t size;
    /* One item, alone, in seconds. */
    double h2d_s, compute_s, d2h_s, stage_s;
    /* The whole. */
    double serial_s;     /* from pinned memory: copy, compute, copy back, one after the other */
    double pageable_s;   /* the same with plain copies of pageable memory; 0 where the profile does not say */
    double overlapped_s; /* a pipeline of `depth` */
    double bound_s;      /* what no schedule can beat on this link */
    double speedup;      /* serial_s / overlapped_s; against pageable_s / overlapped_s where the work is pageable */
    double speedup_most; /* with endless items and slots */
    double compute_busy; /* 0..1, of overlapped_s */
    side_bound bound;
    side_verdict verdict;
    uint32_t depth; /* the least whose time is within 0.5 % of the best under the budget, or the one that was asked for */
    size_t chunk_bytes;               /* staging piece that a pipeline should use */
    size_t device_bytes;              /* of the rings at `depth` */
    size_t pinned_bytes;              /* of staging at `depth`, default threads; 0 for pinned sources */
    uint32_t depth_most;              /* how many of depth_s fit the budget */
    double depth_s[SIDE_PLAN_DEPTHS]; /* whole time at depth 1..8, whether they fit or not */
} side_plan;
/* clang-format off */
#define SIDE_PLAN_INIT { .size = sizeof(side_plan) }
/* clang-format on */

/* SIDE_INVALID names the field that is out of range, and the range. SIDE_TOO_LARGE: one slot, or the depth that was asked for, does not fit budget_bytes. plan->size
 * must be set; the plan is written on success alone. Staging is counted with side_default_threads() threads. Takes some 10 ms; a tenth of a second
 * or two where memory is pageable and times vary. */
SIDE_API side_status side_plan_make(const side_machine *machine, const side_plan_work *work, side_plan *plan);

#ifdef __cplusplus
}
#endif
#endif
