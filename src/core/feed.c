/* SPDX-License-Identifier: MIT
 *
 * The feeding side: source -> [host ring] -> H2D -> [device ring].
 *
 * A source is cut into pieces, in order. Fill threads pop a piece and a staging slot together (under `pop`, so that slots are granted in the order of the
 * pieces and the oldest piece can always go on), fill it in parallel, and put it into the window of ready pieces. Whoever completes the next piece in
 * order becomes the issuer and queues all that are ready. So the copies of one item lie together on the H2D stream, and the item's filled event
 * covers nothing of the next one.
 */
#include "pipeline.h"

#include "alloc.h"
#include "error.h"
#include "log.h"
#include "os.h"

#include <string.h>

/* ---------------------------------------------------------------- issuing, in order */

static side_status issue_first(side_pipeline *p, const struct piece *piece)
{
    side_status r = side_slots_acquire(p->in, 0, p->h2d, &p->feed.slot);
    if (r == SIDE_OK)
        p->in_meta[p->feed.slot.index] = (struct meta){.item = piece->item};
    return r;
}

static side_status copy_piece(side_pipeline *p, const struct piece *piece, const void *src)
{
    char *dst = (char *)p->feed.slot.data + piece->offset;
    struct log_ranges ranges = {src, dst, piece->bytes, piece->bytes};
    uint32_t span = log_begin(p->options.log, p->h2d, SIDE_LANE_H2D, "H2D", piece->item, piece->bytes, &ranges);
    side_status r = side_copy_async(p->h2d, SIDE_COPY_H2D, dst, src, piece->bytes);
    log_end(p->options.log, p->h2d, span);
    return r;
}

static side_status issue(side_pipeline *p, const struct piece *piece)
{
    const side_source *s = &p->options.source;
    side_status r = piece->offset == 0 ? issue_first(p, piece) : SIDE_OK;

    if (r != SIDE_OK)
        return r;
    if (piece->direct) {
        r = copy_piece(p, piece, (const char *)s->blocks[piece->block].data + piece->block_offset);
    } else {
        side_slot staged;
        r = side_slots_take(p->feed.host_in, piece->slot.key, p->h2d, &staged);
        if (r == SIDE_OK)
            r = copy_piece(p, piece, staged.data);
        if (r == SIDE_OK)
            r = side_slots_release(p->feed.host_in, &staged, p->h2d);
    }
    if (r != SIDE_OK)
        return r;
    p->in_meta[p->feed.slot.index].bytes += piece->bytes;
    atomic_fetch_add(&p->bytes_in, piece->bytes);
    return piece->last ? side_slots_publish(p->in, &p->feed.slot, p->h2d, NULL) : SIDE_OK;
}

/* Puts a filled piece into the window; issues what is next in order, unless another thread is at it. */
static side_status hand_over(side_pipeline *p, const struct piece *piece)
{
    struct feed *f = &p->feed;
    side_status r = SIDE_OK;

    pthread_mutex_lock(&f->issue);
    f->ready[piece->number % f->ready_count] = *piece;
    f->is_ready[piece->number % f->ready_count] = true;
    if (!f->issuing) {
        f->issuing = true;
        while (r == SIDE_OK && f->is_ready[f->issued % f->ready_count]) {
            struct piece next = f->ready[f->issued % f->ready_count];
            pthread_mutex_unlock(&f->issue);
            r = issue(p, &next);
            pthread_mutex_lock(&f->issue);
            f->is_ready[f->issued % f->ready_count] = false;
            f->issued++;
            pthread_cond_broadcast(&f->issued_some);
        }
        f->issuing = r != SIDE_OK; /* after a failure nobody goes on: `slot` may be of the item before */
        if (r == SIDE_OK && f->issued == f->total)
            slots_close(p->in);
    }
    pthread_mutex_unlock(&f->issue);
    return r;
}

/* ---------------------------------------------------------------- filling, in parallel */

/* Keeps the window of ready pieces from running over: pinned pieces take no staging slot that would. */
static side_status wait_room(side_pipeline *p, uint64_t number)
{
    struct feed *f = &p->feed;
    side_status r = SIDE_OK;

    pthread_mutex_lock(&f->issue);
    while (r == SIDE_OK && number - f->issued >= f->ready_count) {
        os_cond_wait_until(&f->issued_some, &f->issue, os_now_ns() + 20000000u);
        r = pipeline_check(p);
    }
    pthread_mutex_unlock(&f->issue);
    return r;
}

static side_status pop_staged(side_pipeline *p, struct piece *out)
{
    struct feed *f = &p->feed;
    struct cursor *c = &f->cursor;
    side_status r;

    if (p->options.source.kind == SIDE_END_CALLBACK) {
        r = side_slots_acquire(f->host_in, 0, NULL, &out->slot);
        if (r != SIDE_OK)
            return r;
        uint64_t t = os_now_ns();
        r = cut_next(p, c, out);
        atomic_fetch_add(&p->fill_ns, os_now_ns() - t);
        if (r == SIDE_END) {
            side_status a = side_slots_abandon(f->host_in, &out->slot, NULL);
            r = a == SIDE_OK ? r : a;
        }
        return r;
    }
    r = cut_next(p, c, out);
    if (r == SIDE_OK && !out->direct)
        r = side_slots_acquire(f->host_in, 0, NULL, &out->slot);
    return r;
}

void feed_stop(side_pipeline *p)
{
    struct feed *f = &p->feed;

    atomic_store(&f->stop, true);
    if (f->host_in == NULL)
        slots_close(p->in);
}

bool feed_is_past(side_pipeline *p, uint64_t item)
{
    if (p->options.source.kind == SIDE_END_BLOCKS)
        return item >= p->options.source.items;
    return slots_is_past(p->in, item);
}

/* There are no pieces after those popped: whoever issues the last of them closes the device ring; if that is done, we do. */
static side_status end(side_pipeline *p)
{
    struct feed *f = &p->feed;

    pthread_mutex_lock(&f->issue);
    f->total = f->cursor.number;
    if (f->issued == f->total)
        slots_close(p->in);
    pthread_mutex_unlock(&f->issue);
    return SIDE_END;
}

/* The next piece with its staging slot; SIDE_END once there are no more. */
static side_status pop(side_pipeline *p, struct piece *out)
{
    struct feed *f = &p->feed;
    side_status r;

    pthread_mutex_lock(&f->pop);
    if (f->ended || (atomic_load(&f->stop) && cut_at_item(p, &f->cursor)))
        r = SIDE_END;
    else
        r = wait_room(p, f->cursor.number);
    if (r == SIDE_OK)
        r = pop_staged(p, out);
    if (r == SIDE_OK)
        out->number = f->cursor.number++;
    if (r == SIDE_END && !f->ended) {
        f->ended = true;
        r = end(p);
    } else if (r != SIDE_OK) {
        f->ended = true; /* the cursor may have passed a piece that nobody has: what comes after it must not go out */
    }
    pthread_mutex_unlock(&f->pop);
    return r;
}

static void fill_blocks(const side_pipeline *p, const struct piece *piece)
{
    const side_source *s = &p->options.source;
    uint64_t block = piece->block;
    size_t skip = piece->block_offset;
    char *dst = piece->slot.data;

    for (size_t left = piece->bytes, n; left > 0; left -= n, dst += n, block++, skip = 0) {
        n = s->blocks[block].bytes - skip;
        n = n < left ? n : left;
        if (n != 0) /* an empty block may be NULL */
            /* Not streaming stores: they copy faster alone, but the copy engine then reads memory instead of the cache (measured 49 against 53 GB/s). */
            memcpy(dst, (const char *)s->blocks[block].data + skip, n);
    }
}

static side_status fill_file(const side_pipeline *p, const struct piece *piece)
{
    size_t done;
    side_status r = os_pread_all(p->options.source.fd, piece->slot.data, piece->bytes, piece->position, &done);

    if (r == SIDE_OK && done < piece->bytes)
        r = error_set(SIDE_IO, "pread", "the input ended at offset %llu while it was read: it shrank from %llu bytes",
                      (unsigned long long)(piece->position + done),
                      (unsigned long long)(p->options.source.offset + p->options.source.length));
    return r;
}

static side_status fill(side_pipeline *p, const struct piece *piece)
{
    side_status r = SIDE_OK;
    uint64_t t = os_now_ns();

    if (piece->direct)
        return SIDE_OK;
    if (p->options.source.kind == SIDE_END_BLOCKS)
        fill_blocks(p, piece);
    else if (p->options.source.kind == SIDE_END_FILE)
        r = fill_file(p, piece);
    atomic_fetch_add(&p->fill_ns, os_now_ns() - t);
    return r == SIDE_OK ? side_slots_publish(p->feed.host_in, &piece->slot, NULL, NULL) : r;
}

void *pipeline_fill_thread(void *pipeline)
{
    side_pipeline *p = pipeline;
    uint64_t pass = 0;

    while (pipeline_thread_start(p, &pass)) {
        struct piece piece = {0};
        side_status r;
        while ((r = pop(p, &piece)) == SIDE_OK) {
            r = fill(p, &piece);
            if (r == SIDE_OK)
                r = hand_over(p, &piece);
            if (r != SIDE_OK)
                break;
        }
        if (r != SIDE_END)
            pipeline_fail(p, r);
        pipeline_thread_done(p);
    }
    return NULL;
}

/* ---------------------------------------------------------------- direct: the driver queues copies from pinned blocks itself */

static side_status copy_direct(side_pipeline *p, const side_slot *slot, uint64_t item)
{
    const side_source *s = &p->options.source;
    struct cursor *c = &p->feed.cursor;
    uint32_t n = 0, blocks = s->pieces != NULL ? s->pieces[item] : 1;
    size_t bytes = 0;

    for (uint32_t i = 0; i < blocks; i++, c->block++) {
        const side_block *b = &s->blocks[c->block];
        if (b->bytes != 0)
            p->feed.batch[n++] = (side_piece){(char *)slot->data + bytes, b->data, b->bytes};
        bytes += b->bytes;
    }
    struct log_ranges ranges = {p->feed.batch[0].src, slot->data, n == 1 ? bytes : 0, bytes};
    uint32_t span = log_begin(p->options.log, p->h2d, SIDE_LANE_H2D, "H2D", item, bytes, &ranges);
    side_status r = n == 1 ? side_copy_async(p->h2d, SIDE_COPY_H2D, p->feed.batch[0].dst, p->feed.batch[0].src, bytes)
                           : side_copy_batch(p->h2d, SIDE_COPY_H2D, p->feed.batch, n);
    log_end(p->options.log, p->h2d, span);
    p->in_meta[slot->index] = (struct meta){.item = item, .bytes = bytes};
    atomic_fetch_add(&p->bytes_in, bytes);
    return r;
}

side_status feed_pump(side_pipeline *p, uint64_t need)
{
    struct feed *f = &p->feed;
    side_status r = SIDE_OK;
    side_slot slot;

    if (f->host_in != NULL)
        return SIDE_OK; /* the fill threads do it */
    if (need >= p->options.source.items)
        return SIDE_END;
    while (r == SIDE_OK && f->items_issued < p->options.source.items) {
        bool must = f->items_issued <= need;
        if (!must && p->disabled)
            break;
        r = must ? side_slots_acquire(p->in, 0, p->h2d, &slot) : side_slots_try_acquire(p->in, 0, p->h2d, &slot);
        if (r == SIDE_OK)
            r = copy_direct(p, &slot, f->items_issued);
        if (r == SIDE_OK)
            r = side_slots_publish(p->in, &slot, p->h2d, NULL);
        f->items_issued += r == SIDE_OK;
    }
    return r == SIDE_AGAIN ? SIDE_OK : r;
}

/* ---------------------------------------------------------------- create */

static side_status check_block(side_pipeline *p, uint64_t i, bool *all_pinned)
{
    const side_block *b = &p->options.source.blocks[i];
    side_memory_kind first = SIDE_MEMORY_PINNED, last = SIDE_MEMORY_PINNED;
    side_status r = SIDE_OK;

    if (b->bytes != 0 && b->data == NULL)
        return error_set(SIDE_INVALID, "side_pipeline_create", "source block %llu is NULL", (unsigned long long)i);
    if (b->bytes != 0) {
        r = side_memory_get_kind(p->device, b->data, &first);
        if (r == SIDE_OK)
            r = side_memory_get_kind(p->device, (const char *)b->data + b->bytes - 1, &last);
    }
    if (r == SIDE_OK && (first == SIDE_MEMORY_DEVICE || last == SIDE_MEMORY_DEVICE))
        r = error_set(SIDE_INVALID, "side_pipeline_create", "source block %llu is device memory", (unsigned long long)i);
    p->feed.pinned[i] = first == SIDE_MEMORY_PINNED && last == SIDE_MEMORY_PINNED;
    *all_pinned = *all_pinned && p->feed.pinned[i];
    return r;
}

static side_status check_blocks(side_pipeline *p, bool *all_pinned)
{
    const side_source *s = &p->options.source;
    uint64_t blocks = 0;
    side_status r = SIDE_OK;

    for (uint64_t i = 0; i < s->items; i++) {
        uint32_t n = s->pieces != NULL ? s->pieces[i] : 1;
        size_t bytes = cut_item_bytes(s, blocks, n);
        if (bytes == 0 || bytes > p->options.item_bytes)
            return error_set(bytes == 0 ? SIDE_INVALID : SIDE_TOO_LARGE, "side_pipeline_create",
                             "source item %llu has %zu bytes; it takes 1 to item_bytes = %zu", (unsigned long long)i,
                             bytes, p->options.item_bytes);
        blocks += n;
        p->feed.batch_count = n > p->feed.batch_count ? n : p->feed.batch_count;
    }
    p->feed.pinned = mem_zalloc(blocks, 1);
    if (p->feed.pinned == NULL)
        return SIDE_NO_MEMORY;
    *all_pinned = true;
    for (uint64_t i = 0; r == SIDE_OK && i < blocks; i++)
        r = check_block(p, i, all_pinned);
    return r;
}

static side_status staged_create(side_pipeline *p)
{
    struct feed *f = &p->feed;
    const side_pipeline_options *o = &p->options;
    bool whole = o->source.kind == SIDE_END_CALLBACK;
    size_t limit = o->pinned_bytes != 0 && o->sink.kind != SIDE_END_NONE ? (o->pinned_bytes + 1) / 2
                                                                         : o->pinned_bytes; /* 0 is no limit */
    uint32_t got = 0;
    side_status r;

    r = pipeline_staging(p, p->fill_threads, o->item_bytes, whole, limit, SITE_HOST_IN, &f->host_in, &got,
                         &f->chunk_bytes);
    if (r != SIDE_OK)
        return r;
    f->ready_count = got + p->fill_threads;
    f->ready = mem_zalloc(f->ready_count, sizeof(*f->ready));
    f->is_ready = mem_zalloc(f->ready_count, sizeof(*f->is_ready));
    return f->ready != NULL && f->is_ready != NULL ? SIDE_OK : SIDE_NO_MEMORY;
}

void feed_init(side_pipeline *p)
{
    pthread_mutex_init(&p->feed.pop, NULL);
    pthread_mutex_init(&p->feed.issue, NULL);
    os_cond_init(&p->feed.issued_some);
}

side_status feed_create(side_pipeline *p)
{
    struct feed *f = &p->feed;
    bool direct = false;
    side_status r = SIDE_OK;

    if (p->options.source.kind == SIDE_END_BLOCKS)
        r = check_blocks(p, &direct);
    if (r != SIDE_OK)
        return r;
    if (!direct)
        return staged_create(p);
    p->fill_threads = 0;
    f->batch = mem_zalloc(f->batch_count, sizeof(*f->batch));
    return f->batch != NULL ? SIDE_OK : SIDE_NO_MEMORY;
}

void feed_destroy(side_pipeline *p)
{
    struct feed *f = &p->feed;
    side_slots_destroy(f->host_in);
    mem_free(f->pinned);
    mem_free(f->ready);
    mem_free(f->is_ready);
    mem_free(f->batch);
    pthread_cond_destroy(&f->issued_some);
    pthread_mutex_destroy(&f->issue);
    pthread_mutex_destroy(&f->pop);
}

void feed_restart(side_pipeline *p)
{
    struct feed *f = &p->feed;
    memset(&f->cursor, 0, sizeof(f->cursor));
    f->ended = false;
    atomic_store(&f->stop, false);
    f->issued = 0;
    f->items_issued = 0;
    f->total = UINT64_MAX;
}
