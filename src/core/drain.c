/* SPDX-License-Identifier: MIT
 *
 * The draining side: [device ring] -> D2H -> [host ring] -> sink.
 *
 * The D2H of results that go through staging is queued by a thread of its own: it blocks for free staging slots, and the driver must not, or compute would
 * wait for the sink. Drain threads take staging slots in order; blocks and files are then written in parallel, a callback sees one result at a time.
 */
#include "pipeline.h"

#include "alloc.h"
#include "error.h"
#include "log.h"
#include "os.h"

#include <string.h>

static side_status copy_out(side_pipeline *p, uint64_t item, void *dst, const void *src, size_t bytes)
{
    struct log_ranges ranges = {src, dst, bytes, bytes};
    uint32_t span = log_begin(p->options.log, p->d2h, SIDE_LANE_D2H, "D2H", item, bytes, &ranges);
    side_status r = side_copy_async(p->d2h, SIDE_COPY_D2H, dst, src, bytes);
    log_end(p->options.log, p->d2h, span);
    return r;
}

side_status drain_check(const side_pipeline *p, uint64_t item, size_t bytes)
{
    const side_sink *s = &p->options.sink;

    if (bytes > p->options.result_bytes)
        return error_set(SIDE_TOO_LARGE, "side_pipeline", "result %llu is said to have %zu bytes; a slot takes %zu",
                         (unsigned long long)item, bytes, p->options.result_bytes);
    if (s->kind != SIDE_END_BLOCKS || bytes == 0)
        return SIDE_OK;
    if (item >= s->items)
        return error_set(SIDE_TOO_LARGE, "sink", "there is no block for result %llu; the sink has %llu",
                         (unsigned long long)item, (unsigned long long)s->items);
    if (bytes > s->blocks[item].bytes)
        return error_set(SIDE_TOO_LARGE, "sink", "result %llu has %zu bytes; its block takes %zu",
                         (unsigned long long)item, bytes, s->blocks[item].bytes);
    return SIDE_OK;
}

side_status drain_direct(side_pipeline *p, uint64_t item)
{
    side_slot slot;
    side_status r = side_slots_take(p->out, item, p->d2h, &slot);

    if (r != SIDE_OK)
        return r;
    size_t bytes = p->out_meta[slot.index].bytes;
    if (bytes != 0)
        r = copy_out(p, item, p->options.sink.blocks[item].data, slot.data, bytes);
    if (r == SIDE_OK)
        r = side_slots_release(p->out, &slot, p->d2h);
    return r;
}

/* ---------------------------------------------------------------- D2H thread */

static side_status stage_out(side_pipeline *p, const side_slot *result, uint64_t item, size_t bytes, uint64_t *position)
{
    side_status r = SIDE_OK;

    for (size_t offset = 0; r == SIDE_OK && offset < bytes;) {
        size_t n = bytes - offset < p->drain.chunk_bytes ? bytes - offset : p->drain.chunk_bytes;
        side_slot staged;
        r = side_slots_acquire(p->drain.host_out, 0, p->d2h, &staged);
        if (r == SIDE_OK)
            r = copy_out(p, item, staged.data, (const char *)result->data + offset, n);
        if (r != SIDE_OK)
            return r;
        p->drain.meta[staged.index] = (struct meta){item, n, offset, *position, offset + n == bytes};
        r = side_slots_publish(p->drain.host_out, &staged, p->d2h, NULL);
        offset += n;
        *position += n;
    }
    return r;
}

static side_status d2h_pass(side_pipeline *p)
{
    uint64_t position = p->options.sink.offset;
    side_status r = SIDE_OK;
    uint64_t item;

    for (item = 0; r == SIDE_OK; item++) {
        side_slot slot;
        r = side_slots_take(p->out, item, p->d2h, &slot);
        if (r != SIDE_OK)
            break;
        size_t bytes = p->out_meta[slot.index].bytes;
        r = stage_out(p, &slot, item, bytes, &position);
        if (r == SIDE_OK)
            r = side_slots_release(p->out, &slot, p->d2h);
    }
    return r;
}

void *pipeline_d2h_thread(void *pipeline)
{
    side_pipeline *p = pipeline;
    uint64_t pass = 0;

    while (pipeline_thread_start(p, &pass)) {
        side_status r = d2h_pass(p);
        if (r == SIDE_END)
            slots_close(p->drain.host_out);
        else
            pipeline_fail(p, r);
        pipeline_thread_done(p);
    }
    return NULL;
}

/* ---------------------------------------------------------------- drain threads */

static side_status sink_piece(side_pipeline *p, const struct meta *m, const void *data)
{
    const side_sink *s = &p->options.sink;
    size_t done;

    if (s->kind == SIDE_END_FILE)
        return os_pwrite_all(s->fd, data, m->bytes, m->position, &done);
    if (s->kind == SIDE_END_BLOCKS) {
        memcpy((char *)s->blocks[m->item].data + m->offset, data, m->bytes);
        return SIDE_OK;
    }
    error_clear();
    int rc = s->fn(s->user, m->item, data, m->bytes);
    return rc == 0 ? SIDE_OK : pipeline_callback_failed("sink", m->item, rc);
}

static side_status timed_sink_piece(side_pipeline *p, const side_slot *slot)
{
    uint64_t t = os_now_ns();
    side_status r = sink_piece(p, &p->drain.meta[slot->index], slot->data);
    atomic_fetch_add(&p->drain_ns, os_now_ns() - t);
    return r;
}

static side_status drain_one(side_pipeline *p)
{
    struct drain *d = &p->drain;
    bool serial = p->options.sink.kind == SIDE_END_CALLBACK;
    side_slot slot;
    side_status r;

    pthread_mutex_lock(&d->pop);
    r = side_slots_take(d->host_out, d->next, NULL, &slot);
    d->next += r == SIDE_OK;
    if (r == SIDE_OK && serial)
        r = timed_sink_piece(p, &slot);
    pthread_mutex_unlock(&d->pop);
    if (r == SIDE_OK && !serial)
        r = timed_sink_piece(p, &slot);
    return r == SIDE_OK ? side_slots_release(d->host_out, &slot, NULL) : r;
}

void *pipeline_drain_thread(void *pipeline)
{
    side_pipeline *p = pipeline;
    uint64_t pass = 0;

    while (pipeline_thread_start(p, &pass)) {
        side_status r;
        do
            r = drain_one(p);
        while (r == SIDE_OK);
        if (r != SIDE_END)
            pipeline_fail(p, r);
        pipeline_thread_done(p);
    }
    return NULL;
}

/* ---------------------------------------------------------------- create */

static side_status check_sink_blocks(side_pipeline *p, bool *all_pinned)
{
    const side_sink *s = &p->options.sink;
    side_status r = SIDE_OK;

    *all_pinned = true;
    for (uint64_t i = 0; r == SIDE_OK && i < s->items; i++) {
        const side_block *b = &s->blocks[i];
        bool pinned = true;
        if (b->bytes == 0)
            continue;
        if (b->data == NULL)
            return error_set(SIDE_INVALID, "side_pipeline_create", "sink block %llu is NULL", (unsigned long long)i);
        r = staging_is_pinned(p->device, b->data, b->bytes, "side_pipeline_create", "sink block", i, &pinned);
        *all_pinned = *all_pinned && pinned;
    }
    return r;
}

void drain_init(side_pipeline *p)
{
    pthread_mutex_init(&p->drain.pop, NULL);
}

side_status drain_create(side_pipeline *p)
{
    struct drain *d = &p->drain;
    const side_pipeline_options *o = &p->options;
    bool whole = o->sink.kind == SIDE_END_CALLBACK, direct = false;
    side_status r = SIDE_OK;
    uint32_t got = 0;

    if (o->sink.kind == SIDE_END_BLOCKS)
        r = check_sink_blocks(p, &direct);
    if (r != SIDE_OK)
        return r;
    if (direct || o->sink.kind == SIDE_END_NONE) {
        p->drain_threads = 0;
        return SIDE_OK;
    }
    if (whole)
        p->drain_threads = 1;
    r = pipeline_staging(p, p->drain_threads, o->result_bytes, whole,
                         p->feed.stager.host != NULL ? (o->pinned_bytes + 1) / 2 : o->pinned_bytes, SITE_HOST_OUT,
                         &d->host_out, &got, &d->chunk_bytes);
    if (r != SIDE_OK)
        return r;
    d->meta = mem_zalloc(got, sizeof(*d->meta));
    return d->meta != NULL ? SIDE_OK : SIDE_NO_MEMORY;
}

void drain_destroy(side_pipeline *p)
{
    side_slots_destroy(p->drain.host_out);
    mem_free(p->drain.meta);
    pthread_mutex_destroy(&p->drain.pop);
}

void drain_restart(side_pipeline *p)
{
    p->drain.next = 0;
}
