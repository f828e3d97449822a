/* SPDX-License-Identifier: MIT
 *
 * The driver: one thread of the caller's takes items in order and queues compute, by side_pipeline_run (push) or by the caller's own loop (pull). Both go through
 * item_begin and item_end.
 */
#include "pipeline.h"

#include "error.h"
#include "log.h"
#include "os.h"

#include <string.h>

static uint64_t now(side_pipeline *p)
{
    return p->device->ops->now(p->device->context);
}

/* ---------------------------------------------------------------- passes */

static side_status pass_begin(side_pipeline *p)
{
    side_status r = slots_restart(p->in);

    if (r == SIDE_OK && p->out != NULL)
        r = slots_restart(p->out);
    if (r == SIDE_OK && p->feed.stager.host != NULL)
        r = slots_restart(p->feed.stager.host);
    if (r == SIDE_OK && p->drain.host_out != NULL)
        r = slots_restart(p->drain.host_out);
    if (r != SIDE_OK)
        return r;
    feed_restart(p);
    drain_restart(p);
    p->next_item = p->done_items = p->bytes_out = 0;
    p->held = 0;
    p->pulled = false;
    memset(p->held_by, 0, sizeof(p->held_by));
    atomic_store(&p->bytes_in, 0);
    atomic_store(&p->feed.stager.fill_ns, 0);
    atomic_store(&p->drain_ns, 0);
    p->stats.source_wait_s = p->stats.sink_wait_s = p->stats.device_wait_s = 0;
    p->in_pass = true;
    pthread_mutex_lock(&p->mutex);
    p->start_ns = now(p);
    p->busy = p->thread_count;
    p->pass++;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->mutex);
    return SIDE_OK;
}

/* No more results will come; the d2h thread ends the rest. */
static void pass_close(side_pipeline *p)
{
    if (p->out != NULL)
        slots_close(p->out);
}

static void threads_wait(side_pipeline *p)
{
    pthread_mutex_lock(&p->mutex);
    while (p->busy > 0)
        pthread_cond_wait(&p->changed, &p->mutex);
    pthread_mutex_unlock(&p->mutex);
}

#define STREAMS_SEEN 32

/* Waits for the compute of the items first..last: for the fence that each stream recorded last, which stands for the ones before it. (Items may be done out of
 * order, so that is not the one of the highest item.) */
static side_status wait_finished(side_pipeline *p, uint64_t first, uint64_t last)
{
    struct finished *latest[STREAMS_SEEN];
    uint32_t n = 0, k;
    side_status r = SIDE_OK;

    for (uint64_t i = first; i <= last && r == SIDE_OK; i++) {
        struct finished *f = &p->finished[i % p->window];
        for (k = 0; k < n && latest[k]->fence.stream != f->fence.stream; k++)
            ;
        if (k < n && f->order > latest[k]->order)
            latest[k] = f;
        else if (k == n && n < STREAMS_SEEN)
            latest[n++] = f;
        else if (k == n)
            r = fence_wait(&f->fence, p->device, NULL, p->options.timeout_s, SITE_WINDOW);
    }
    for (k = 0; k < n && r == SIDE_OK; k++)
        r = fence_wait(&latest[k]->fence, p->device, NULL, p->options.timeout_s, SITE_WINDOW);
    return r;
}

/* Everything that the pass has queued is done. On success our own copy streams hold nothing else, so their tails cover nothing else; compute, which may
 * run on the caller's streams, has its fences: in a push pass those of the last window, since the window waited for the others; a pulling loop may have
 * been late with any item, so there the slots' own fences are asked too. */
static side_status wait_fences(side_pipeline *p)
{
    side_status r = SIDE_OK;

    if (p->done_items > 0)
        r = wait_finished(p, p->done_items > p->window ? p->done_items - p->window : 0, p->done_items - 1);
    if (r == SIDE_OK && p->pulled)
        r = side_slots_drain(p->in, p->options.timeout_s);
    if (r == SIDE_OK)
        r = fence_record(&p->tail, p->device, p->d2h != NULL ? p->d2h : p->h2d);
    if (r == SIDE_OK)
        r = fence_wait(&p->tail, p->device, NULL, p->options.timeout_s, SITE_NONE);
    return r;
}

/* A failed call may have queued what no fence covers: wait for the streams themselves. Pulled items were done on streams that only the fences of the rings
 * know. `pulled`: the caller's stream of the call that failed, NULL where there is none. */
static bool drain_streams(side_pipeline *p, side_stream *pulled)
{
    double timeout_s = p->options.timeout_s;
    bool drained = p->h2d == NULL || device_stream_drain(p->h2d, timeout_s);

    for (uint32_t i = 0; i < p->stream_count && drained; i++)
        drained = device_stream_drain(p->compute[i], timeout_s);
    drained = drained && (pulled == NULL || device_stream_drain(pulled, timeout_s));
    drained = drained && (p->d2h == NULL || device_stream_drain(p->d2h, timeout_s));
    return drained && slots_are_drained(p->in) && (p->out == NULL || slots_are_drained(p->out));
}

static void set_stats(side_pipeline *p)
{
    side_pipeline_stats *s = &p->stats;

    s->items = p->done_items;
    s->bytes_in = atomic_load(&p->bytes_in);
    s->bytes_out = p->bytes_out;
    s->time_s = (double)(now(p) - p->start_ns) * 1e-9;
    s->stage_busy_s = (double)atomic_load(&p->feed.stager.fill_ns) * 1e-9;
    s->drain_busy_s = (double)atomic_load(&p->drain_ns) * 1e-9;
}

/* Waits for threads and device. On a failure drains (R5) and returns it, or SIDE_STUCK. */
static side_status pass_finish(side_pipeline *p, side_status r, side_stream *pulled)
{
    side_error cause;

    if (r != SIDE_OK)
        pipeline_fail(p, r);
    else
        pass_close(p);
    threads_wait(p);
    p->in_pass = false;
    r = pipeline_check(p);
    if (r == SIDE_OK) {
        r = wait_fences(p);
        if (r != SIDE_OK)
            pipeline_fail(p, r);
    }
    if (r == SIDE_OK)
        return SIDE_OK;
    error_copy(&cause);
    if (!drain_streams(p, pulled)) {
        p->stuck = true;
        log_message(SIDE_LEVEL_WARN, "pipeline", "the device did not drain; its memory is kept");
        return error_set(SIDE_STUCK, cause.where,
                         "the device did not drain within %g s, its memory is kept; before that: %s",
                         p->options.timeout_s, cause.message);
    }
    return error_restore(&cause);
}

/* Ends the pass, for good or for the failure r. */
static side_status pass_end(side_pipeline *p, side_status r, side_stream *pulled)
{
    r = pass_finish(p, r, pulled);
    set_stats(p);
    return r;
}

side_status pipeline_abort(side_pipeline *p)
{
    return pass_end(p, error_set(SIDE_CANCELLED, "side_pipeline", "cancelled"), NULL);
}

/* ---------------------------------------------------------------- one item */

/* Blocks while more than `window` items would be queued and unfinished (R4, R6). Looks twice a window and not at every item, since asking the driver costs
 * as much as queueing a copy. */
static side_status window_wait(side_pipeline *p, uint64_t item)
{
    uint64_t half = p->window / 2 != 0 ? p->window / 2 : 1, t;
    side_status r;

    if (item % half != 0 || item + half <= p->window)
        return SIDE_OK;
    t = now(p);
    r = wait_finished(p, item > p->window ? item - p->window : 0, item + half - p->window - 1);
    p->stats.device_wait_s += (double)(now(p) - t) * 1e-9;
    return r;
}

/* Makes item number p->next_item ready on `stream`, with room for its result. SIDE_END: there is none. */
static side_status item_begin(side_pipeline *p, side_stream *stream, side_item *item)
{
    uint64_t number = p->next_item;
    side_status r = pipeline_check(p);
    uint64_t t;

    if (r == SIDE_OK)
        r = window_wait(p, number);
    if (r == SIDE_OK)
        r = feed_pump(p, number);
    memset(item, 0, sizeof(*item));
    t = p->feed.stager.host != NULL ? now(p) : 0; /* the direct kinds never block here */
    if (r == SIDE_OK)
        r = side_slots_take(p->in, number, stream, &item->slot);
    if (p->feed.stager.host != NULL)
        p->stats.source_wait_s += (double)(now(p) - t) * 1e-9;
    if (r != SIDE_OK)
        return r;
    item->number = number;
    item->data = item->slot.data;
    item->bytes = p->in_meta[item->slot.index].bytes;
    item->lane = (uint32_t)(number % p->stream_count);
    if (p->out != NULL) {
        t = p->drain.host_out != NULL ? now(p) : 0;
        r = side_slots_acquire(p->out, 0, stream, &item->result_slot);
        if (p->drain.host_out != NULL)
            p->stats.sink_wait_s += (double)(now(p) - t) * 1e-9;
        item->result = item->result_slot.data;
        item->result_bytes = p->options.result_bytes;
    }
    p->next_item += r == SIDE_OK;
    return r;
}

/* What is queued on `stream` has read the item and written its result. */
static side_status item_end(side_pipeline *p, side_stream *stream, const side_item *item)
{
    side_status r;

    r = p->out != NULL ? drain_check(p, item->number, item->result_bytes) : SIDE_OK;
    if (r != SIDE_OK)
        return r;
    r = side_slots_release(p->in, &item->slot, stream);
    if (r == SIDE_OK && p->out != NULL) {
        p->out_meta[item->result_slot.index] = (struct meta){.item = item->number, .bytes = item->result_bytes};
        p->bytes_out += item->result_bytes;
        r = side_slots_publish(p->out, &item->result_slot, stream, NULL);
        if (r == SIDE_OK && p->drain.host_out == NULL)
            r = drain_direct(p, item->number);
    }
    if (r == SIDE_OK) /* D2H is bounded by its ring: item number + depth cannot be computed before */
        r = fence_record(&p->finished[item->number % p->window].fence, p->device, stream);
    p->finished[item->number % p->window].order = ++p->finish_order;
    p->done_items += r == SIDE_OK;
    return r;
}

/* ---------------------------------------------------------------- push */

static side_status compute(side_pipeline *p, side_stream *stream, side_item *item)
{
    struct log_ranges ranges = {item->data, item->result, item->bytes, item->result_bytes};
    uint32_t span = log_begin(p->options.log, stream, SIDE_LANE_COMPUTE, "compute", item->number, item->bytes, &ranges);
    side_error kept;

    error_copy(&kept);
    error_clear();
    int rc = p->options.compute(p->options.compute_user, stream, item);
    log_end(p->options.log, stream, span);
    if (rc != 0)
        return pipeline_callback_failed("compute", item->number, rc);
    if (side_last_error()->status == SIDE_OK) /* nothing failed in the callback */
        error_restore(&kept);
    return SIDE_OK;
}

static side_status usable(side_pipeline *p, const char *where)
{
    side_status r = p != NULL ? os_fork_check(p->fork_generation, where)
                              : error_set(SIDE_INVALID, where, "pipeline is NULL");

    if (r == SIDE_OK && p->running)
        r = error_set(SIDE_STATE, where, "the pipeline is in side_pipeline_run: its callbacks may only cancel it");
    if (r == SIDE_OK && p->stuck)
        r = error_set(SIDE_STUCK, where, "the device did not drain in an earlier pass");
    return r == SIDE_OK ? pipeline_check(p) : r;
}

side_status side_pipeline_run(side_pipeline *pipeline, side_pipeline_stats *stats)
{
    side_pipeline *p = pipeline;
    side_status r = usable(p, "side_pipeline_run");
    side_item item;

    if (r == SIDE_OK && p->options.compute == NULL)
        r = error_set(SIDE_STATE, "side_pipeline_run",
                      "options.compute is NULL: this pipeline is for side_pipeline_next");
    if (r == SIDE_OK && p->in_pass)
        r = error_set(SIDE_STATE, "side_pipeline_run", "a pulling loop is under way; rewind first");
    if (r == SIDE_OK)
        r = pass_begin(p);
    if (r != SIDE_OK) {
        if (stats != NULL && p != NULL)
            *stats = p->stats;
        return r;
    }
    p->running = true;
    for (;;) {
        side_stream *stream = p->compute[p->next_item % p->stream_count];
        r = item_begin(p, stream, &item);
        if (r == SIDE_OK)
            r = compute(p, stream, &item);
        if (r == SIDE_OK)
            r = item_end(p, stream, &item);
        if (r != SIDE_OK)
            break;
        if (p->options.progress != NULL)
            p->options.progress(p->options.progress_user, p->done_items, atomic_load(&p->bytes_in), p->bytes_out);
    }
    p->running = false;
    r = pass_end(p, r == SIDE_END ? SIDE_OK : r, NULL);
    if (stats != NULL)
        *stats = p->stats;
    return r;
}

/* ---------------------------------------------------------------- pull */

/* A failure of another thread, or a cancel, ends the pass here: the caller hears of it once it is drained (R5). stream: the call's, or NULL. */
static side_status usable_drained(side_pipeline *p, side_stream *stream, const char *where)
{
    side_status r = usable(p, where);

    if (r == SIDE_OK || p == NULL || r == SIDE_FORKED || !p->in_pass || p->running)
        return r;
    return pass_end(p, r, stream != NULL && stream->device == p->device ? stream : NULL);
}

side_status side_pipeline_next(side_pipeline *pipeline, side_stream *stream, side_item *item)
{
    side_pipeline *p = pipeline;
    side_status r = usable_drained(p, stream, "side_pipeline_next");
    side_item got;

    if (r == SIDE_OK && (stream == NULL || item == NULL || stream->device != p->device))
        r = error_set(SIDE_INVALID, "side_pipeline_next", "item or stream is NULL, or stream is of another device");
    if (r == SIDE_OK && !p->in_pass)
        r = pass_begin(p);
    /* Slots go round in a ring: the item that is held longest stands in the way before all of them are held. */
    uint64_t *holder = p != NULL ? &p->held_by[p->next_item % p->depth] : NULL;
    if (r == SIDE_OK && *holder != 0 && feed_is_past(p, p->next_item))
        return SIDE_END;
    if (r == SIDE_OK && *holder != 0)
        return error_set(
            SIDE_WOULD_DEADLOCK, "side_pipeline_next",
            "item %llu is held in the slot that item %llu needs (depth %u): call side_pipeline_done for it first",
            (unsigned long long)(*holder - 1), (unsigned long long)p->next_item, p->depth);
    if (r != SIDE_OK)
        return r;
    r = item_begin(p, stream, &got);
    if (r == SIDE_OK) {
        p->held++;
        p->pulled = true;
        *holder = got.number + 1;
        *item = got;
    } else if (r != SIDE_END) {
        r = pass_end(p, r, stream);
    } else if (p->held == 0) {
        r = pass_end(p, SIDE_OK, stream);
        r = r == SIDE_OK ? SIDE_END : r;
    }
    return r;
}

side_status side_pipeline_done(side_pipeline *pipeline, side_item *item, side_stream *stream)
{
    side_pipeline *p = pipeline;
    side_status r = usable_drained(p, stream, "side_pipeline_done");

    if (r == SIDE_OK && (stream == NULL || item == NULL || stream->device != p->device))
        r = error_set(SIDE_INVALID, "side_pipeline_done", "item or stream is NULL, or stream is of another device");
    if (r == SIDE_OK && (item->slot.data == NULL || p->held_by[item->number % p->depth] != item->number + 1))
        r = error_set(SIDE_STATE, "side_pipeline_done", "the item is not held");
    if (r != SIDE_OK)
        return r;
    r = item_end(p, stream, item);
    if (r == SIDE_TOO_LARGE || r == SIDE_STALE || r == SIDE_STATE)
        return r; /* refused before anything was queued */
    p->held--;
    p->held_by[item->number % p->depth] = 0;
    item->slot.data = NULL;
    return r == SIDE_OK ? SIDE_OK : pass_end(p, r, stream);
}

/* Takes what was copied ahead, so that the feeding side can end; the H2D stream is its reader, so nothing waits for compute. */
static side_status skip_rest(side_pipeline *p)
{
    side_slot slot;
    side_status r = SIDE_OK;

    feed_stop(p);
    for (uint64_t i = p->next_item; r == SIDE_OK; i++) {
        r = side_slots_take(p->in, i, p->h2d, &slot);
        if (r == SIDE_OK)
            r = side_slots_release(p->in, &slot, p->h2d);
    }
    return r == SIDE_END ? SIDE_OK : r;
}

side_status side_pipeline_rewind(side_pipeline *pipeline)
{
    side_pipeline *p = pipeline;
    side_status r = usable_drained(p, NULL, "side_pipeline_rewind");

    if (r != SIDE_OK || !p->in_pass)
        return r;
    if (p->held != 0)
        return error_set(SIDE_STATE, "side_pipeline_rewind", "%u items are not done", p->held);
    r = skip_rest(p);
    r = pass_end(p, r, NULL);
    return r;
}

side_status side_pipeline_get_stats(side_pipeline *pipeline, side_pipeline_stats *stats)
{
    side_status r = pipeline != NULL ? os_fork_check(pipeline->fork_generation, "side_pipeline_get_stats")
                                     : error_set(SIDE_INVALID, "side_pipeline_get_stats", "pipeline is NULL");
    if (r == SIDE_OK && stats == NULL)
        r = error_set(SIDE_INVALID, "side_pipeline_get_stats", "stats is NULL");
    if (r != SIDE_OK)
        return r;
    if (pipeline->in_pass)
        set_stats(pipeline);
    *stats = pipeline->stats;
    return SIDE_OK;
}
