/* SPDX-License-Identifier: MIT */
#include "bench_overlap.h"
#include "signals.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { HASHED = 1024, HASH = 64, ALONE = 32 };

/* ---------------------------------------------------------------- memory */

side_status overlap_take(struct overlap *o)
{
    struct bench *b = o->bench;
    side_status status = bench_pinned_take(b, o->ring * o->item_bytes, (void **)&o->data);

    if (status == SIDE_OK)
        status = bench_pinned_take(b, OVERLAP_ITEMS * HASH, (void **)&o->got);
    if (status == SIDE_OK)
        status = bench_device_take(b, OVERLAP_ITEMS * HASH, (void **)&o->sums);
    if (status == SIDE_OK)
        status = bench_device_take(b, o->item_bytes, &o->item);
    if (status == SIDE_OK)
        status = side_stream_create(b->device, &o->stream);
    if (status == SIDE_OK)
        bench_fill(o->data, o->ring * o->item_bytes, 5);
    for (size_t i = 0; i < OVERLAP_ITEMS && status == SIDE_OK; i++)
        o->blocks[i] = (side_block){o->data + i % o->ring * o->item_bytes, o->item_bytes};
    return status;
}

void overlap_free(struct overlap *o)
{
    if (o->bench->stuck)
        return;
    side_stream_destroy(o->stream);
    bench_gemm_free(&o->gemm);
    bench_device_free(o->bench, o->item, o->item_bytes);
    bench_device_free(o->bench, o->sums, OVERLAP_ITEMS * HASH);
    bench_pinned_free(o->bench, o->got, OVERLAP_ITEMS * HASH);
    bench_pinned_free(o->bench, o->data, o->ring * o->item_bytes);
    free(o);
}

/* ---------------------------------------------------------------- an item's compute */

/* Which KiB of an item is looked at: over the rounds, all parts of it. */
static size_t offset_of(const struct overlap *o, uint64_t number)
{
    return (size_t)((number * 37 + o->round * 101) % (o->item_bytes / HASHED)) * HASHED;
}

static side_op hash_op(const void *in, void *out)
{
    side_op op = SIDE_OP_INIT;

    op.id = SIDE_OP_XXH3_BLOCKS;
    op.dim[0] = 1;
    op.in[0] = in;
    op.out = out;
    return op;
}

/* The hash is a part of the compute, also where that is measured alone. */
static side_status queue_compute(struct overlap *o, side_stream *stream, const void *data, uint64_t number)
{
    side_op hash = hash_op((const char *)data + offset_of(o, number), o->sums + number * HASH), spin = SIDE_OP_INIT;
    side_status status;

    spin.id = SIDE_OP_SPIN;
    spin.dim[0] = o->group->spin_ns;
    status = o->group->products ? bench_gemm_queue(&o->gemm, stream, o->group->times) : side_op_async(stream, &spin);
    return status == SIDE_OK ? side_op_async(stream, &hash) : status;
}

static int compute(void *user, side_stream *stream, side_item *item)
{
    struct overlap *o = user;

    if (queue_compute(o, stream, item->data, item->number) == SIDE_OK)
        return 0;
    o->kept = *side_last_error();
    return 1;
}

/* ---------------------------------------------------------------- alone */

static side_status queue_copies(void *user, side_stream *stream)
{
    struct overlap *o = user;
    side_status status = SIDE_OK;

    for (size_t i = 0; i < o->queued && status == SIDE_OK; i++)
        status = side_copy_async(stream, SIDE_COPY_H2D, o->item, o->blocks[i].data, o->item_bytes);
    return status;
}

static side_status queue_computes(void *user, side_stream *stream)
{
    struct overlap *o = user;
    side_status status = SIDE_OK;

    for (size_t i = 0; i < o->queued && status == SIDE_OK; i++)
        status = queue_compute(o, stream, o->item, i);
    return status;
}

/* As long as a run: by then products are at the clock that their power leaves them. */
static side_status warm_up(struct overlap *o, double about_s)
{
    const size_t queued = o->queued;
    side_status status;

    o->queued = (size_t)fmin(fmax(0.06 / about_s, 1), OVERLAP_ITEMS);
    status = queue_computes(o, o->stream);
    o->queued = queued;
    return status == SIDE_OK ? bench_sync(o->bench, o->stream) : status;
}

/* The median of a few. `warm_s` above 0: computes of so many seconds come before each. */
static side_status time_alone(struct overlap *o, bench_queue_fn *queue, double warm_s, double *seconds)
{
    struct bench_samples samples = {.count = 0};
    const size_t rounds = o->bench->props.simulated ? 1 : 5;
    side_status status = SIDE_OK;

    for (size_t i = 0; i < rounds && status == SIDE_OK; i++) {
        struct bench_lane lane = {.stream = o->stream, .queue = queue, .user = o};

        if (warm_s > 0)
            status = warm_up(o, warm_s);
        if (status == SIDE_OK)
            status = bench_time(o->bench, &lane, 1);
        bench_add(&samples, (lane.end_s - lane.begin_s) / (double)o->queued);
    }
    *seconds = bench_median(&samples);
    return status;
}

/* So many as are held back at most, and as take 50 ms at most. */
static size_t how_many(double seconds, size_t operations)
{
    size_t most = BENCH_HELD / (operations + 1);

    most = most < ALONE ? most : ALONE;
    return (size_t)fmin((double)(most > 1 ? most : 1), fmax(4, 0.05 / seconds));
}

side_status overlap_alone(struct overlap *o, struct overlap_group *g)
{
    const struct bench *b = o->bench;
    double longest, wanted_s;
    side_status status;

    o->group = g;
    o->queued = ALONE / 2;
    status = time_alone(o, queue_copies, 0, &g->t);
    if (status != SIDE_OK)
        return status;
    wanted_s = g->ratio * g->t;
    g->spin_ns = (uint64_t)(wanted_s * 1e9);
    g->times = g->products ? (size_t)fmax(1, round(wanted_s / o->gemm.seconds)) : 1;
    o->queued = how_many(wanted_s, g->times + 1);
    status = time_alone(o, queue_computes, g->products ? wanted_s : 0, &g->c);
    longest = fmax(g->t, g->c);
    g->items = b->props.simulated ? 12 : (uint64_t)fmin(fmax((b->args.quick ? 0.03 : 0.06) / longest, 8), OVERLAP_ITEMS);
    g->bound_s = side_timeline_bound(g->items, g->t, g->c, 0, b->props.copy_engines);
    return status;
}

/* ---------------------------------------------------------------- runs */

static void predict(struct overlap *o, const struct overlap_group *g, struct overlap_case *one)
{
    side_plan_work work = SIDE_PLAN_WORK_INIT;
    side_plan plan = SIDE_PLAN_INIT;

    work.items = g->items;
    work.item_bytes = o->item_bytes;
    work.compute_s = g->c;
    work.depth = one->depth;
    work.streams = one->streams;
    one->plan_s = side_plan_make(&o->bench->machine, &work, &plan) == SIDE_OK ? plan.overlapped_s : NAN;
}

side_status overlap_create(struct overlap *o, struct overlap_group *g, struct overlap_case *one)
{
    side_pipeline_options options = SIDE_PIPELINE_OPTIONS_INIT;
    side_status status;

    if (!bench_device_count(o->bench, one->depth * o->item_bytes))
        return SIDE_NO_DEVICE_MEMORY;
    options.item_bytes = o->item_bytes;
    options.depth = one->depth;
    options.streams = one->streams;
    options.source = side_source_blocks(o->blocks, g->items);
    options.compute = compute;
    options.compute_user = o;
    options.timeout_s = o->bench->timeout_s;
    status = side_pipeline_create(o->bench->device, &options, &one->pipeline);
    if (status != SIDE_OK) {
        bench_device_uncount(o->bench, one->depth * o->item_bytes);
        return status;
    }
    predict(o, g, one);
    return SIDE_OK;
}

static side_status verify(struct overlap *o, const struct overlap_group *g, const struct overlap_case *one)
{
    side_status status = side_copy_async(o->stream, SIDE_COPY_D2H, o->got, o->sums, (size_t)g->items * HASH);

    if (status == SIDE_OK)
        status = bench_sync(o->bench, o->stream);
    for (size_t i = 0; i < g->items && status == SIDE_OK; i++) {
        char expected[HASH];
        side_op op = hash_op((const char *)o->blocks[i].data + offset_of(o, i), expected);

        status = side_op_host(&op);
        if (status == SIDE_OK && memcmp(expected, o->got + i * HASH, HASH) != 0) {
            bench_error(o->bench, EXIT_FAILED, "overlap: depth %u, %u streams: item %zu arrived with other bytes",
                        one->depth, one->streams, i);
            break;
        }
    }
    return status;
}

side_status overlap_run(struct overlap *o, struct overlap_group *g, struct overlap_case *one, bool keep)
{
    uint64_t begin, end;
    side_status status;

    o->group = g;
    status = g->products ? warm_up(o, g->c) : SIDE_OK; /* it writes hashes, too */
    if (status == SIDE_OK)
        status = side_memset_async(o->stream, o->sums, BENCH_POISON, OVERLAP_ITEMS * HASH);
    if (status == SIDE_OK)
        status = bench_sync(o->bench, o->stream);
    if (status != SIDE_OK)
        return status;
    o->round++;
    signals_watch(one->pipeline);
    begin = side_device_now_ns(o->bench->device);
    status = side_pipeline_run(one->pipeline, NULL);
    end = side_device_now_ns(o->bench->device);
    signals_watch(NULL);
    if (status != SIDE_OK)
        return status;
    if (keep)
        bench_add(&one->time_s, (double)(end - begin) / 1e9);
    status = verify(o, g, one);
    return status == SIDE_OK ? bench_check(o->bench) : status;
}

side_status overlap_destroy(struct overlap *o, struct overlap_case *one)
{
    side_status status;

    if (one->pipeline == NULL)
        return SIDE_OK;
    status = side_pipeline_destroy(one->pipeline);
    one->pipeline = NULL;
    bench_device_uncount(o->bench, one->depth * o->item_bytes);
    o->bench->stuck = o->bench->stuck || status == SIDE_STUCK;
    return status;
}
