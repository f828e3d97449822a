/* SPDX-License-Identifier: MIT
 *
 * Machines, work and comparisons for tests of plans. */
#ifndef PLAN_HELP_H
#define PLAN_HELP_H

#include "t.h"

#include "plan.h"

#include <math.h>

#define US 1e-6

/* A link of 1 GB/s in and 2 GB/s out, so that a byte is a whole number of nanoseconds or half of one, and nothing else takes time. */
static inline side_machine plain_machine(void)
{
    side_machine m = SIDE_MACHINE_INIT;

    m.from = SIDE_MACHINE_SIMULATED;
    m.copy_engines = 2;
    m.h2d.gbps = 1;
    m.d2h.gbps = 2;
    m.both_gbps = 3;
    return m;
}

/* An H200 on PCIe 5.0 x16, from published runs. */
static inline side_machine real_machine(void)
{
    side_machine m = plain_machine();

    m.from = SIDE_MACHINE_MEASURED;
    m.h2d = m.d2h = (side_rate){3 * US, 55.3};
    m.both_gbps = 101;
    m.pageable_h2d = m.pageable_d2h = (side_rate){10 * US, 8};
    m.stage_gbps = 50;
    m.queue_s = 8 * US;
    m.handover_s = 2 * US;
    m.start_s = 15 * US;
    return m;
}

static inline side_plan_work work_of(uint64_t items, size_t item, size_t result, double compute_s)
{
    side_plan_work w = SIDE_PLAN_WORK_INIT;

    w.items = items;
    w.item_bytes = item;
    w.result_bytes = result;
    w.compute_s = compute_s;
    return w;
}

static inline side_plan made(const side_machine *m, const side_plan_work *w)
{
    side_plan plan = SIDE_PLAN_INIT;

    T_OK(side_plan_make(m, w, &plan));
    return plan;
}

#define NEAR(a, b, relative) near_to((a), (b), (relative), #a, __LINE__)
static inline void near_to(double a, double b, double relative, const char *what, int line)
{
    if (!(fabs(a - b) <= relative * fabs(b) + 1e-15))
        T_FAIL("line %d: %s is %.12g instead of %.12g", line, what, a, b);
}

static inline double uniform(t_rng *rng, double low, double high)
{
    return low + (high - low) * (double)(t_rng_next(rng) >> 11) * 0x1p-53;
}

static inline double logarithmic(t_rng *rng, double low, double high)
{
    return exp(uniform(rng, log(low), log(high)));
}

#endif
