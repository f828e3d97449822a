/* SPDX-License-Identifier: MIT
 *
 * The depth of pipelines that leave it to us: the least that the model finds enough. */
#include "plan.h"

#include "error.h"
#include "machine.h"
#include "pipeline.h"

#include <string.h>

#define DEVIATION \
    0.1 /* of compute times over their mean: real ones are not all the same, and what a third slot is for is that */
#define ENOUGH      1.005
#define MODEL_ITEMS 256u /* each value of the jitter once */
#define MOST_TURNS  2048u
#define SHARE       4 /* of the free device memory, nobody having asked for it */

static double larger(double a, double b)
{
    return a > b ? a : b;
}

struct chooser {
    const side_machine *machine;
    side_plan_work work;
    struct plan_jitter jitter;
    uint32_t threads;
};

static double time_of(const struct chooser *c, uint32_t depth)
{
    struct plan_lanes l;
    uint64_t items = c->work.items < MODEL_ITEMS ? c->work.items : MODEL_ITEMS, pieces;

    plan_lanes_make(&l, c->machine, &c->work, depth, 0, c->threads);
    l.jitter = &c->jitter;
    pieces = l.in.pieces > l.out.pieces ? l.in.pieces : l.out.pieces;
    return plan_run(&l, items * pieces <= MOST_TURNS ? items : MOST_TURNS / pieces, 0, NULL);
}

static uint32_t depth_for(struct chooser *c, double compute_s)
{
    double best;
    uint32_t depth = 1;

    c->work.compute_s = compute_s;
    best = time_of(c, SIDE_PLAN_DEPTHS);
    while (depth < SIDE_PLAN_DEPTHS && time_of(c, depth) > best * ENOUGH)
        depth++;
    return depth;
}

/* Of the slowest lane beside compute, an item. */
static double copies_s(const struct chooser *c)
{
    struct plan_lanes l;
    double in, out;

    plan_lanes_make(&l, c->machine, &c->work, 1, 0, c->threads);
    in = l.in.latency_s + l.in.bytes_s;
    out = l.out.latency_s + l.out.bytes_s;
    if (c->work.pageable && c->machine->stage_gbps > 0)
        in = larger(in, (double)c->work.item_bytes / (c->machine->stage_gbps * 1e9));
    return l.one_engine ? in + out : larger(in, out);
}

static uint32_t deepest(struct chooser *c, double compute_s, const double *factors, size_t count)
{
    uint32_t most = 1;

    for (size_t i = 0; i < count; i++) {
        uint32_t depth = depth_for(c, factors[i] * compute_s);
        most = depth > most ? depth : most;
    }
    return most;
}

static uint32_t depth_of(struct chooser *c, double hint_s)
{
    static const double near[] = {
        0.95, 1, 1.05}; /* a hint is not exact, and where computes are as long as copies a little decides much */
    /* Not known: a depth for the times that ask for the most, which are those near the copies'. */
    static const double any[] = {0.5, 0.8, 0.95, 1, 1.05, 1.25, 2};

    if (hint_s > 0)
        return deepest(c, hint_s, near, sizeof(near) / sizeof(near[0]));
    return deepest(c, copies_s(c), any, sizeof(any) / sizeof(any[0]));
}

static uint64_t items_of(const side_pipeline_options *o)
{
    if (o->source.kind == SIDE_END_BLOCKS)
        return o->source.items > 0 ? o->source.items : 1;
    if (o->source.kind == SIDE_END_FILE)
        return o->source.length > 0 ? (o->source.length - 1) / o->item_bytes + 1 : 1;
    return MODEL_ITEMS; /* nobody knows */
}

/* Slots that a share of the free device memory takes. */
static side_status fits(side_device *device, const side_pipeline_options *o, uint32_t *depth)
{
    size_t free_bytes = 0;
    size_t slot = slots_stride(o->item_bytes) + (o->result_bytes != 0 ? slots_stride(o->result_bytes) : 0);
    side_status r = side_device_get_memory(device, &free_bytes, NULL);

    *depth = free_bytes / SHARE / slot < SIDE_PLAN_DEPTHS ? (uint32_t)(free_bytes / SHARE / slot) : SIDE_PLAN_DEPTHS;
    return r;
}

static uint32_t choose(struct chooser *c, const side_pipeline_options *o)
{
    uint32_t depth, other = 1;

    /* Whether blocks are pinned shows later: enough for both. */
    c->work.pageable = o->source.kind == SIDE_END_FILE;
    depth = depth_of(c, o->compute_s);
    if (o->source.kind == SIDE_END_BLOCKS) {
        c->work.pageable = true;
        other = depth_of(c, o->compute_s);
    }
    return depth > other ? depth : other;
}

side_status plan_pipeline_depth(side_device *device, const side_pipeline_options *o, uint32_t threads, uint32_t *depth)
{
    static const char *const from[] = {"estimated", "measured", "simulated"};
    const uint32_t least = o->compute != NULL ? 2 : 3; /* a pulling loop may hold an item while it asks for the next */
    const side_machine *m = machine_of(device);
    struct chooser c = {.machine = m, .work = SIDE_PLAN_WORK_INIT, .threads = threads};
    uint32_t wanted, room = 0;
    side_status r = m != NULL ? SIDE_OK : side_last_error()->status;

    if (r == SIDE_OK)
        r = fits(device, o, &room);
    if (r != SIDE_OK)
        return r;
    c.work.items = items_of(o);
    c.work.item_bytes = o->item_bytes;
    c.work.result_bytes = o->result_bytes;
    if (plan_check(m, &c.work) != SIDE_OK) {
        log_message(SIDE_LEVEL_WARN, "pipeline", "depth 3: the machine's figures are of no use: %s",
                    side_last_error()->message);
        *depth = 3;
        return SIDE_OK;
    }
    plan_jitter_make(&c.jitter, DEVIATION);
    wanted = choose(&c, o);
    *depth = wanted > room ? room : wanted;
    *depth = *depth > least ? *depth : least;
    log_message(SIDE_LEVEL_INFO, "pipeline", "depth %u chosen: %u is enough for %s of %.4g ms, by %s figures%s", *depth,
                wanted, o->compute_s > 0 ? "computes" : "any compute time beside copies",
                (o->compute_s > 0 ? o->compute_s : copies_s(&c)) * 1e3,
                m->from <= SIDE_MACHINE_SIMULATED ? from[m->from] : "unknown",
                wanted > room ? "; a quarter of the free device memory takes no more" : "");
    return SIDE_OK;
}
