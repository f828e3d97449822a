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

/* ---------------------------------------------------------------- real pipelines on the software device */

struct real {
    side_device *dev;
    unsigned char *pinned, *pageable;
    side_block *in, *out;
    uint64_t n;
    size_t item, result;
    uint64_t *cost_ns;
    double hint_s; /* of the pipeline's options */
};

static inline int spin(void *user, side_stream *stream, side_item *item)
{
    const struct real *r = user;
    side_op op = SIDE_OP_INIT;

    op.id = SIDE_OP_SPIN;
    op.dim[0] = r->cost_ns[item->number];
    return side_op_async(stream, &op);
}

static inline void real_open(struct real *r, const char *keys, size_t most_bytes)
{
    char spec[200];
    side_pool *pool;
    void *p;

    snprintf(spec, sizeof(spec), "sim:h200,h2d_gbps=1,d2h_gbps=2,copy_latency_ns=%s", keys);
    T_OK(side_device_open(spec, &r->dev));
    T_OK(side_device_pool(r->dev, &pool));
    T_OK(side_pool_alloc(pool, most_bytes, &p));
    r->pinned = p;
    r->pageable = malloc(most_bytes);
    memset(r->pageable, 1, most_bytes);
}

static inline void real_close(struct real *r)
{
    side_pool *pool;

    T_OK(side_device_pool(r->dev, &pool));
    T_OK(side_pool_free(pool, r->pinned, NULL, 0));
    free(r->pageable);
    side_device_close(r->dev);
}

/* Every item is the same memory: nobody looks at the results. */
static inline double real_run(struct real *r, uint32_t depth, uint32_t streams, bool pageable, side_pipeline_stats *used)
{
    side_pipeline_options o = SIDE_PIPELINE_OPTIONS_INIT;
    side_block *in = calloc(r->n, sizeof(*in)), *out = calloc(r->n, sizeof(*out));
    side_pipeline_stats stats;
    side_pipeline *p;

    for (uint64_t i = 0; i < r->n; i++) {
        in[i] = (side_block){pageable ? r->pageable : r->pinned, r->item};
        out[i] = (side_block){r->pinned, r->result};
    }
    o.item_bytes = r->item;
    o.result_bytes = r->result;
    o.depth = depth;
    o.compute_s = r->hint_s;
    o.streams = streams;
    o.source = side_source_blocks(in, r->n);
    o.compute = spin;
    o.compute_user = r;
    if (r->result > 0)
        o.sink = side_sink_blocks(out, r->n);
    T_OK(side_pipeline_create(r->dev, &o, &p));
    T_OK(side_pipeline_run(p, &stats));
    T_OK(side_pipeline_destroy(p));
    free(in);
    free(out);
    if (used != NULL)
        *used = stats;
    return stats.time_s;
}

static inline double normal(t_rng *rng)
{
    return sqrt(-2 * log(uniform(rng, 1e-12, 1))) * cos(6.283185307179586 * uniform(rng, 0, 1));
}

#endif
