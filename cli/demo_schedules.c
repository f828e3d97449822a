/* SPDX-License-Identifier: MIT
 *
 * The schedules. The two textbooks make the same calls; all that differs is whether copy i+1 is queued before or after compute i. A wait for a
 * stream covers what is queued on it so far:
 *
 *     textbook    transfer waits for compute i   -> copy i+1 runs after compute i: serial
 *     reordered   transfer waits for compute i-1 -> copy i+1 runs beside compute i
 */
#include "demo.h"

enum { TIMEOUT_S = 60 };

side_status demo_sync(struct demo *d)
{
    side_stream *const all[] = {d->transfer, d->compute, d->back};
    side_status first = SIDE_OK;

    for (size_t i = 0; i < 3;
         i++) { /* all of them, also after a failure: nothing may be in flight when memory is freed */
        side_status status = side_stream_sync(all[i], TIMEOUT_S);

        if (first == SIDE_OK)
            first = status;
    }
    return first;
}

side_status demo_matmul(struct demo *d, side_stream *stream, const void *x, void *out)
{
    const side_type type = d->args.math == SIDE_MATH_BF16 ? SIDE_BF16 : SIDE_F32;
    side_op op = SIDE_OP_INIT;

    op.id = SIDE_OP_MATMUL;
    op.in[0] = x;
    op.in[1] = d->weight;
    op.out = out;
    op.dim[0] = op.dim[1] = op.dim[2] = d->args.dim;
    op.type[0] = op.type[1] = type;
    op.math = d->args.math;
    return side_op_async(stream, &op);
}

/* Where a log is kept, a span around the one operation that `queue` is about to be given. */
static side_status span_begin(struct demo *d, side_stream *stream, side_lane lane, uint64_t item, uint32_t *span)
{
    static const char *const names[] = {"H2D", "matmul", "D2H"};
    const size_t bytes[] = {d->item_bytes, 0, d->result_bytes};

    if (d->log == NULL)
        return SIDE_OK;
    return side_log_begin(d->log, stream, lane, names[lane], item, bytes[lane], span);
}

static side_status span_end(struct demo *d, side_stream *stream, uint32_t span)
{
    return d->log != NULL ? side_log_end(d->log, stream, span) : SIDE_OK;
}

static side_status copy_in(struct demo *d, side_stream *stream, const side_block *from, uint64_t item, void *to)
{
    uint32_t span = 0;
    side_status status = span_begin(d, stream, SIDE_LANE_H2D, item, &span);

    if (status == SIDE_OK)
        status = side_copy_async(stream, SIDE_COPY_H2D, to, from[item].data, d->item_bytes);
    return status == SIDE_OK ? span_end(d, stream, span) : status;
}

static side_status compute(struct demo *d, uint64_t item, const void *x)
{
    uint32_t span = 0;
    side_status status = span_begin(d, d->compute, SIDE_LANE_COMPUTE, item, &span);

    if (status == SIDE_OK)
        status = demo_matmul(d, d->compute, x, d->out[item]);
    return status == SIDE_OK ? span_end(d, d->compute, span) : status;
}

/* Nothing without --results. */
static side_status copy_out(struct demo *d, side_stream *stream, uint64_t item)
{
    uint32_t span = 0;
    side_status status;

    if (!d->args.results)
        return SIDE_OK;
    status = span_begin(d, stream, SIDE_LANE_D2H, item, &span);
    if (status == SIDE_OK)
        status = side_copy_async(stream, SIDE_COPY_D2H, d->host_out[item].data, d->out[item], d->result_bytes);
    return status == SIDE_OK ? span_end(d, stream, span) : status;
}

/* torch's waiter.wait_stream(other): a wait for the tail that `other` has now. */
static side_status wait_stream(side_stream *waiter, side_stream *other, side_event *event)
{
    side_status status = side_event_record(event, other);

    return status == SIDE_OK ? side_stream_wait(waiter, event) : status;
}

/* Nothing may be in flight when a schedule returns, failed or not. */
static side_status finish(struct demo *d, side_status status)
{
    side_status synced = demo_sync(d);

    return status != SIDE_OK ? status : synced;
}

static side_status serial(struct demo *d, const side_block *from)
{
    side_status status = SIDE_OK;

    for (uint64_t i = 0; i < d->args.items && status == SIDE_OK; i++) {
        status = copy_in(d, d->compute, from, i, d->in[0]);
        if (status == SIDE_OK)
            status = compute(d, i, d->in[0]);
        if (status == SIDE_OK)
            status = copy_out(d, d->compute, i);
    }
    return finish(d, status);
}

side_status demo_pageable(struct demo *d, side_pipeline *pipeline)
{
    (void)pipeline;
    d->host_out = d->pageable_out;
    return serial(d, d->pageable);
}

side_status demo_pinned(struct demo *d, side_pipeline *pipeline)
{
    (void)pipeline;
    d->host_out = d->pinned_out;
    return serial(d, d->pinned);
}

/* Copy i+1 into the buffer that compute i-1 read. What the wait covers depends on when this is called. */
static side_status copy_next(struct demo *d, uint64_t i)
{
    side_status status;

    if (i + 1 == d->args.items)
        return SIDE_OK;
    status = wait_stream(d->transfer, d->compute, d->computed);
    return status == SIDE_OK ? copy_in(d, d->transfer, d->pinned, i + 1, d->in[(i + 1) % 2]) : status;
}

static side_status send_result(struct demo *d, uint64_t i)
{
    side_status status;

    if (!d->args.results)
        return SIDE_OK;
    status = wait_stream(d->back, d->compute, d->computed);
    return status == SIDE_OK ? copy_out(d, d->back, i) : status;
}

static side_status textbook(struct demo *d, bool copy_first)
{
    side_status status = copy_in(d, d->transfer, d->pinned, 0, d->in[0]);

    d->host_out = d->pinned_out;
    for (uint64_t i = 0; i < d->args.items && status == SIDE_OK; i++) {
        status = wait_stream(d->compute, d->transfer, d->filled); /* copy i, the last that is queued */
        if (status == SIDE_OK && copy_first)
            status = copy_next(d, i);
        if (status == SIDE_OK)
            status = compute(d, i, d->in[i % 2]);
        if (status == SIDE_OK)
            status = send_result(d, i);
        if (status == SIDE_OK && !copy_first)
            status = copy_next(d, i);
    }
    return finish(d, status);
}

side_status demo_textbook(struct demo *d, side_pipeline *pipeline)
{
    (void)pipeline;
    return textbook(d, false);
}

side_status demo_reordered(struct demo *d, side_pipeline *pipeline)
{
    (void)pipeline;
    return textbook(d, true);
}

/* ---------------------------------------------------------------- ours */

static int multiply(void *user, side_stream *stream, side_item *item)
{
    struct demo *d = user;
    void *out = d->args.results ? item->result : d->out[item->number];

    if (demo_matmul(d, stream, item->data, out) == SIDE_OK)
        return 0;
    d->kept = *side_last_error();
    return 1;
}

side_status demo_pipeline_create(struct demo *d, const struct demo_row *row, side_log *log, side_pipeline **pipeline)
{
    side_pipeline_options o = SIDE_PIPELINE_OPTIONS_INIT;

    o.item_bytes = d->item_bytes;
    o.depth = row->depth;
    o.streams = row->streams;
    o.source = side_source_blocks(d->pinned, d->args.items);
    o.compute = multiply;
    o.compute_user = d;
    if (d->args.results) {
        o.result_bytes = d->result_bytes;
        o.sink = side_sink_blocks(d->pinned_out, d->args.items);
    }
    o.timeout_s = TIMEOUT_S;
    o.log = log;
    return side_pipeline_create(d->device, &o, pipeline);
}

side_status demo_sidestream(struct demo *d, side_pipeline *pipeline)
{
    d->host_out = d->pinned_out;
    return side_pipeline_run(pipeline, NULL);
}
