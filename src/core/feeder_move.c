/* SPDX-License-Identifier: MIT
 *
 * A feeder's side of the stager: which bytes travel as one copy, filling them, queueing the copies of a batch into its slot. */
#include "feeder.h"

#include "error.h"
#include "log.h"

#include <string.h>

/* ---------------------------------------------------------------- cut */

/* The next run of a batch that has one: a direct part, or neighbours packed up to a chunk, small gaps between them included. */
static void cut_run(side_feeder *f, const struct batch *b, struct piece *out)
{
    struct feeder_cursor *c = &f->cursor;
    const struct part *p = &b->parts.at[c->part];
    size_t begin = p->offset + c->skip, end = begin, limit = begin + f->chunk_bytes;

    *out = (struct piece){.item = b->number, .offset = begin, .block = c->part, .block_offset = c->skip};
    if (p->direct) {
        out->direct = true;
        end = p->offset + p->bytes;
        c->part++;
    }
    for (; !out->direct && c->part < b->parts.count && end < limit; c->part++, c->skip = 0) {
        p = &b->parts.at[c->part];
        size_t from = p->offset + c->skip;
        if (p->direct || from >= limit || from - end >= FEEDER_GAP_BYTES)
            break;
        end = p->offset + p->bytes;
        if (end > limit) { /* the rest is the next piece's */
            c->skip += limit - from;
            end = limit;
            break;
        }
    }
    out->bytes = end - begin;
    out->last = c->part == b->parts.count;
}

static side_status cut(void *feeder, struct piece *out)
{
    side_feeder *f = feeder;
    side_status r;

    pthread_mutex_lock(&f->mutex);
    while ((r = feeder_check(f)) == SIDE_OK && (f->discarding || f->cursor.batch == f->submitted))
        pthread_cond_wait(&f->work, &f->mutex);
    if (r == SIDE_OK) {
        struct batch *b = feeder_batch(f, f->cursor.batch);
        f->device->ops->clock_join(f->device->context, b->submitted_ns);
        cut_run(f, b, out);
        f->in_hand++;
        b->unfilled += !out->direct;
        b->is_cut = out->last;
        if (out->last)
            f->cursor = (struct feeder_cursor){.batch = f->cursor.batch + 1};
    }
    pthread_mutex_unlock(&f->mutex);
    return r;
}

/* ---------------------------------------------------------------- fill */

static void fill_parts(const struct parts *parts, const struct piece *piece)
{
    size_t at = piece->offset, end = piece->offset + piece->bytes, skip = piece->block_offset;

    for (size_t i = piece->block; at < end; i++, skip = 0) {
        const struct part *p = &parts->at[i];
        size_t from = p->offset + skip, to = p->offset + p->bytes < end ? p->offset + p->bytes : end;
        memcpy((char *)piece->slot.data + (from - piece->offset), p->data + skip, to - from);
        at = to;
    }
}

static side_status fill(void *feeder, const struct piece *piece)
{
    side_feeder *f = feeder;
    struct batch *b = feeder_batch(f, piece->item);
    bool wanted;

    pthread_mutex_lock(&f->mutex);
    wanted = piece->item >= f->dropped;
    pthread_mutex_unlock(&f->mutex);
    if (wanted)
        fill_parts(&b->parts, piece);
    pthread_mutex_lock(&f->mutex);
    b->unfilled--;
    pthread_mutex_unlock(&f->mutex);
    return SIDE_OK;
}

/* ---------------------------------------------------------------- issue */

void feeder_begin(side_feeder *f, struct batch *b, const side_slot *slot, uint64_t asked_ns)
{
    uint64_t now = feeder_now(f);

    timing_begin(f, b);
    pthread_mutex_lock(&f->mutex);
    b->slot = *slot;
    b->slot_asked_ns = asked_ns;
    b->slot_got_ns = now;
    f->slotted++;
    f->open = true;
    pthread_cond_broadcast(&f->room);
    pthread_mutex_unlock(&f->mutex);
}

side_status feeder_copy(side_feeder *f, const struct batch *b, size_t offset, const void *src, size_t bytes, bool direct)
{
    char *dst = (char *)b->slot.data + offset;
    struct log_ranges ranges = {src, dst, bytes, bytes};
    uint32_t span = log_begin(f->options.log, f->copy, SIDE_LANE_H2D, "H2D", b->number, bytes, &ranges);
    side_status r = side_copy_async(f->copy, SIDE_COPY_H2D, dst, src, bytes);
    log_end(f->options.log, f->copy, span);
    atomic_fetch_add(&f->copies, 1);
    atomic_fetch_add(&f->direct_bytes, direct ? bytes : 0);
    return r;
}

side_status feeder_publish(side_feeder *f, struct batch *b)
{
    side_status r = SIDE_OK;

    if (b->parts.direct != 0 || b->has_begun)
        r = fence_record(&b->copied, f->device, f->copy);
    if (r == SIDE_OK)
        r = side_slots_publish(f->slots, &b->slot, f->copy, NULL);
    if (r != SIDE_OK)
        return r;
    uint64_t now = feeder_now(f);
    pthread_mutex_lock(&f->mutex);
    b->fenced = true;
    b->issued_ns = now;
    f->open = false;
    f->issued++;
    f->stats.bytes += b->parts.sum;
    pthread_cond_broadcast(&f->arrived);
    pthread_mutex_unlock(&f->mutex);
    return SIDE_OK;
}

/* The batch's slot, at its first piece. SIDE_AGAIN: discard wants the batch no more. */
static side_status begin(side_feeder *f, struct batch *b)
{
    uint64_t asked_ns = feeder_now(f);
    side_slot slot;
    side_status r = side_slots_acquire(f->slots, 0, f->copy, &slot);

    if (r == SIDE_CANCELLED && feeder_check_unlocked(f) == SIDE_OK)
        return SIDE_AGAIN;
    if (r == SIDE_OK)
        feeder_begin(f, b, &slot, asked_ns);
    return r;
}

static side_status issue(void *feeder, const struct piece *piece, const void *staged)
{
    side_feeder *f = feeder;
    struct batch *b = feeder_batch(f, piece->item);
    const void *src = staged != NULL ? staged : b->parts.at[piece->block].data;
    side_status r = SIDE_OK;
    bool wanted, first;

    pthread_mutex_lock(&f->mutex);
    wanted = piece->item >= f->dropped;
    first = f->slotted == piece->item;
    pthread_mutex_unlock(&f->mutex);
    if (wanted && first)
        r = begin(f, b);
    wanted = wanted && r != SIDE_AGAIN;
    if (wanted && r == SIDE_OK)
        r = feeder_copy(f, b, piece->offset, src, piece->bytes, staged == NULL);
    if (wanted && r == SIDE_OK && piece->last)
        r = feeder_publish(f, b);
    pthread_mutex_lock(&f->mutex);
    f->in_hand--;
    if (f->discarding && f->in_hand == 0)
        pthread_cond_broadcast(&f->room);
    pthread_mutex_unlock(&f->mutex);
    return r == SIDE_AGAIN ? SIDE_OK : r;
}

const struct stager_ops feeder_stager_ops = {
    .cut = cut,
    .fill = fill,
    .issue = issue,
    .check = feeder_check_unlocked,
};
