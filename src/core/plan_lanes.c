/* SPDX-License-Identifier: MIT
 *
 * From machine and work to lanes; what limits them. */
#include "plan.h"
#include "pipeline.h"

#include <string.h>

#define GB 1e9

static double larger(double a, double b)
{
    return a > b ? a : b;
}

static double smaller(double a, double b)
{
    return a < b ? a : b;
}

static struct plan_way way(side_rate rate, size_t bytes)
{
    struct plan_way w = {.pieces = 1};

    if (bytes > 0) {
        w.latency_s = rate.latency_s;
        w.bytes_s = (double)bytes / (rate.gbps * GB);
    }
    return w;
}

/* Staging as pipeline_staging makes it. `stage_gbps` is of `all_threads` together, and what each of them has of it is the same with fewer: they share the memory. */
static void stage(struct plan_way *w, size_t bytes, size_t chunk_bytes, uint32_t threads, uint32_t all_threads,
                  double stage_gbps)
{
    struct staging s = staging_for(threads, chunk_bytes, bytes);
    uint64_t pieces, together;
    double piece_s;

    if (bytes == 0)
        return;
    pieces = (bytes - 1) / s.bytes + 1;
    together = (pieces - 1) / PLAN_MAX_PIECES + 1;
    piece_s = stage_gbps > 0 ? (double)bytes / (double)pieces * all_threads / (stage_gbps * GB) : 0;
    w->latency_s *= (double)pieces;
    w->pieces = (uint32_t)((pieces - 1) / together + 1);
    w->threads = threads / together > 0 ? (uint32_t)(threads / together) : 1;
    w->slots = s.count / together > 2 ? (uint32_t)(s.count / together) : 2;
    /* Taken together they must pass as fast. */
    w->stage_s = piece_s * (double)pieces / w->pieces * w->threads / threads;
}

static double at_most_1(double share)
{
    return share < 1 ? share : 1;
}

static void set_shares(struct plan_lanes *l, const side_machine *m)
{
    const double both = m->both_gbps, in = m->both_h2d_gbps;

    l->share_in = l->share_out = both > 0 ? at_most_1(both / (m->h2d.gbps + m->d2h.gbps)) : 1;
    if (both > 0 && in > 0 && in < both && m->d2h.gbps > 0) {
        l->share_in = at_most_1(in / m->h2d.gbps);
        l->share_out = at_most_1((both - in) / m->d2h.gbps);
    }
}

void plan_lanes_make(struct plan_lanes *lanes, const side_machine *machine, const side_plan_work *work, uint32_t depth,
                     size_t chunk_bytes, uint32_t threads)
{
    struct plan_lanes l = {
        .source_s = work->source_s,
        .compute_s = work->compute_s,
        .in = way(machine->h2d, work->item_bytes),
        .out = way(machine->d2h, work->result_bytes),
        .one_engine = machine->copy_engines == 1,
        .queue_copy_s = machine->queue_s * PLAN_COPY_PART,
        .queue_compute_s = machine->queue_s * (1 - PLAN_COPY_PART),
        .handover_s = machine->handover_s,
        .start_s = machine->start_s,
        .depth = depth,
        .window = pipeline_window(depth),
    };

    set_shares(&l, machine);
    if (work->pageable) {
        stage(&l.in, work->item_bytes, chunk_bytes, threads, threads, machine->stage_gbps);
        stage(&l.out, work->result_bytes, chunk_bytes, pipeline_drain_threads(threads), threads, machine->stage_gbps);
    }
    *lanes = l;
}

double plan_serial(const struct plan_lanes *lanes, uint64_t items)
{
    struct plan_lanes one = *lanes;
    double out_s = one.out.latency_s + one.out.bytes_s;
    double item = one.in.latency_s + one.in.bytes_s + one.compute_s + out_s;
    double queue = one.queue_copy_s + one.queue_compute_s + (out_s > 0 ? one.queue_copy_s : 0), all;

    item += (out_s > 0 ? 3 : 2) * one.handover_s; /* from one engine to the next, on one stream too */
    one.jitter = NULL;
    /* The first is a pipeline's of one item, queueing included: the host queues compute while the copy is under way, here as there. After it
     * loader and host run beside the device here too; the slowest of the three sets the pace. */
    all = plan_run(&one, 1, 0, NULL) + (double)(items - 1) * larger(item, larger(queue, one.source_s));
    /* Where times vary, loader and device wait for each other as at depth 1. */
    return lanes->jitter != NULL && one.source_s > 0 ? larger(all, plan_time(lanes, items, NULL)) : all;
}

/* ---------------------------------------------------------------- what limits */

enum part { COMPUTE, LINK, IN, OUT, STAGE, SOURCE, HOST, FIXED };

static void scale(struct plan_lanes *l, enum part part, double by)
{
    double *const parts[][5] = {
        [COMPUTE] = {&l->compute_s},
        [LINK] = {&l->in.bytes_s, &l->out.bytes_s},
        [IN] = {&l->in.bytes_s},
        [OUT] = {&l->out.bytes_s},
        [STAGE] = {&l->in.stage_s, &l->out.stage_s},
        [SOURCE] = {&l->source_s},
        [HOST] = {&l->queue_copy_s, &l->queue_compute_s},
        [FIXED] = {&l->in.latency_s, &l->out.latency_s, &l->handover_s, &l->start_s},
    };

    for (size_t i = 0; i < 5 && parts[part][i] != NULL; i++)
        *parts[part][i] *= by;
}

#define STEP 0.01

/* What part of the whole time goes with this part of it: 1 where 1 % of it is 1 % of the whole. With `faster`, how much of it could be gained, which is nothing
 * where another lane is as slow. */
static double weight(const struct plan_lanes *lanes, uint64_t items, double time_s, enum part part, bool faster)
{
    struct plan_lanes l = *lanes;
    double t;

    scale(&l, part, faster ? 1 - STEP : 1 + STEP);
    t = plan_time(&l, items, NULL);
    return (faster ? time_s - t : t - time_s) / (STEP * time_s);
}

/* Of one item, of the lane that takes longest: what endless items would take each if nothing but bytes and computing took time. */
static double busiest_s(const struct plan_lanes *l)
{
    double in = l->in.bytes_s, out = l->out.bytes_s;
    double together = smaller(in / l->share_in, out / l->share_out); /* then the longer one has the link to itself */
    double rest = larger(in - together * l->share_in, out - together * l->share_out);
    double link = l->one_engine ? in + out : together + rest;
    double stage_in = l->in.threads > 0 ? l->in.stage_s * l->in.pieces / l->in.threads : 0;
    double stage_out = l->out.threads > 0 ? l->out.stage_s * l->out.pieces / l->out.threads : 0;
    double queue = l->queue_copy_s + l->queue_compute_s + (out > 0 ? l->queue_copy_s : 0);

    return larger(larger(larger(link, l->compute_s), larger(stage_in, stage_out)), larger(l->source_s, queue));
}

#define DEPTH_GAIN 1.02 /* a deeper ring would gain as much */
#define ENDS_PART \
    1.5              /* of the busiest lane's time: a third of the whole is neither that lane's nor for want of slots */
#define ONE_WAY 0.75 /* of what could be gained on the link is one direction's */

side_bound plan_bound(const struct plan_lanes *lanes, uint64_t items, double time_s, double best_s)
{
    static const struct {
        enum part part;
        side_bound bound;
    } lane[] = {/* the first of equals: where computing is as long as copying, there is nothing to gain */
                {COMPUTE, SIDE_BOUND_COMPUTE}, {LINK, SIDE_BOUND_LINK}, {STAGE, SIDE_BOUND_STAGE},
                {SOURCE, SIDE_BOUND_SOURCE},   {HOST, SIDE_BOUND_HOST}, {FIXED, SIDE_BOUND_LATENCY}};
    struct plan_lanes even = *lanes;
    double most = 0, link;
    side_bound bound = SIDE_BOUND_LATENCY;

    if (time_s > DEPTH_GAIN * best_s)
        return SIDE_BOUND_DEPTH;
    even.jitter = NULL; /* what lanes wait for each other on its account is not the ends' */
    if (plan_time(&even, items, NULL) >= ENDS_PART * (double)items * busiest_s(lanes))
        return SIDE_BOUND_LATENCY;
    for (size_t i = 0; i < sizeof(lane) / sizeof(lane[0]); i++) {
        double w = weight(lanes, items, time_s, lane[i].part, false);
        if (w > most * 1.001) {
            most = w;
            bound = lane[i].bound;
        }
    }
    if (bound != SIDE_BOUND_LINK)
        return bound;
    if (lanes->out.bytes_s <= 0)
        return SIDE_BOUND_H2D;
    link = weight(lanes, items, time_s, LINK, true);
    if (link > 0 && weight(lanes, items, time_s, IN, true) >= ONE_WAY * link)
        return SIDE_BOUND_H2D;
    if (link > 0 && weight(lanes, items, time_s, OUT, true) >= ONE_WAY * link)
        return SIDE_BOUND_D2H;
    return SIDE_BOUND_LINK;
}
