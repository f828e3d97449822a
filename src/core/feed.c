/* SPDX-License-Identifier: MIT
 *
 * The feeding side: source -> [host ring] -> H2D -> [device ring].
 *
 * Staged sources go through the stager (stage.h): fill threads of the pipeline's cut and fill, whoever completes the next piece in order issues it. Where all blocks
 * are pinned, the driver queues the copies itself. */
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

static side_status issue(void *owner, const struct piece *piece, const void *staged)
{
    side_pipeline *p = owner;
    const side_source *s = &p->options.source;
    side_status r = piece->offset == 0 ? issue_first(p, piece) : SIDE_OK;

    if (r == SIDE_OK)
        r = copy_piece(p, piece,
                       staged != NULL ? staged : (const char *)s->blocks[piece->block].data + piece->block_offset);
    if (r != SIDE_OK)
        return r;
    p->in_meta[p->feed.slot.index].bytes += piece->bytes;
    atomic_fetch_add(&p->bytes_in, piece->bytes);
    return piece->last ? side_slots_publish(p->in, &p->feed.slot, p->h2d, NULL) : SIDE_OK;
}

/* ---------------------------------------------------------------- filling, in parallel */

static side_status cut(void *owner, struct piece *out)
{
    side_pipeline *p = owner;
    return cut_next(p, &p->feed.cursor, out);
}

static bool is_over(void *owner)
{
    side_pipeline *p = owner;
    return atomic_load(&p->feed.stop) && cut_at_item(p, &p->feed.cursor);
}

static side_status check(void *owner)
{
    return pipeline_check(owner);
}

static void ended(void *owner)
{
    side_pipeline *p = owner;
    slots_close(p->in);
}

void feed_stop(side_pipeline *p)
{
    atomic_store(&p->feed.stop, true);
    if (p->feed.stager.host == NULL)
        slots_close(p->in);
}

bool feed_is_past(side_pipeline *p, uint64_t item)
{
    if (p->options.source.kind == SIDE_END_BLOCKS)
        return item >= p->options.source.items;
    return slots_is_past(p->in, item);
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

static side_status fill(void *owner, const struct piece *piece)
{
    const side_pipeline *p = owner;

    if (p->options.source.kind == SIDE_END_FILE)
        return fill_file(p, piece);
    fill_blocks(p, piece);
    return SIDE_OK;
}

static const struct stager_ops stager_ops = {
    .is_over = is_over,
    .cut = cut,
    .fill = fill,
    .issue = issue,
    .check = check,
    .ended = ended,
};

void *pipeline_fill_thread(void *pipeline)
{
    side_pipeline *p = pipeline;
    uint64_t pass = 0;

    while (pipeline_thread_start(p, &pass)) {
        side_status r = stager_work(&p->feed.stager);
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

    if (f->stager.host != NULL)
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
    bool pinned = true;
    side_status r = SIDE_OK;

    if (b->bytes != 0 && b->data == NULL)
        return error_set(SIDE_INVALID, "side_pipeline_create", "source block %llu is NULL", (unsigned long long)i);
    if (b->bytes != 0)
        r = staging_is_pinned(p->device, b->data, b->bytes, "side_pipeline_create", "source block", i, &pinned);
    p->feed.pinned[i] = pinned;
    *all_pinned = *all_pinned && pinned;
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

    r = pipeline_staging(p, p->fill_threads, o->item_bytes, whole, limit, SITE_HOST_IN, &f->stager.host, &got,
                         &f->chunk_bytes);
    f->stager.stream = p->h2d;
    f->stager.cut_fills = whole;
    return r == SIDE_OK ? stager_window(&f->stager, got + p->fill_threads) : r;
}

void feed_init(side_pipeline *p)
{
    stager_init(&p->feed.stager, &stager_ops, p);
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
    stager_finish(&f->stager);
    mem_free(f->pinned);
    mem_free(f->batch);
}

void feed_restart(side_pipeline *p)
{
    struct feed *f = &p->feed;
    stager_restart(&f->stager);
    memset(&f->cursor, 0, sizeof(f->cursor));
    atomic_store(&f->stop, false);
    f->items_issued = 0;
}
