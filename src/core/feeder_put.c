/* SPDX-License-Identifier: MIT
 *
 * Submit: a batch is checked and packed before anything of it counts; then it is queued for the fill threads, or its copies are queued right here. */
#include "feeder.h"

#include "alloc.h"
#include "error.h"

#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------------------------- the pieces */

static side_status reserve(struct parts *parts, size_t count)
{
    struct part *at;

    if (count <= parts->capacity)
        return SIDE_OK;
    at = mem_zalloc(count, sizeof(*at));
    if (at == NULL)
        return SIDE_NO_MEMORY;
    mem_free(parts->at);
    parts->at = at;
    parts->capacity = count;
    return SIDE_OK;
}

static side_status check_piece(side_feeder *f, const side_feed_piece *p, size_t i, const char *where, bool *direct)
{
    size_t most = f->options.slot_bytes;

    if (p->data == NULL)
        return error_set(SIDE_INVALID, where, "pieces[%zu].data is NULL", i);
    if (p->offset > most || p->bytes > most - p->offset)
        return error_set(SIDE_TOO_LARGE, where, "pieces[%zu] ends at offset %zu + %zu; a slot takes slot_bytes = %zu",
                         i, p->offset, p->bytes, most);
    *direct = false;
    /* Asking costs a driver call or two: more than copying a small piece. */
    return p->bytes >= STAGE_DIRECT_FROM_BYTES
               ? staging_is_pinned(f->device, p->data, p->bytes, where, "piece", i, direct)
               : SIDE_OK;
}

static int by_offset(const void *a, const void *b)
{
    const struct part *x = a, *y = b;
    return x->offset != y->offset ? (x->offset < y->offset ? -1 : 1) : 0;
}

/* Into f->scratch: the pieces that are not empty, by offset. */
static side_status pack(side_feeder *f, const side_feed_piece *pieces, size_t count, const char *where)
{
    struct parts *q = &f->scratch;
    bool sorted = true;
    side_status r;

    if (pieces == NULL || count == 0)
        return error_set(SIDE_INVALID, where, pieces == NULL ? "pieces is NULL" : "count is 0");
    r = reserve(q, count);
    q->count = q->end = q->sum = q->direct = 0;
    for (size_t i = 0; r == SIDE_OK && i < count; i++) {
        const side_feed_piece *p = &pieces[i];
        struct part *part = &q->at[q->count];
        if (p->bytes == 0)
            continue;
        *part = (struct part){.data = p->data, .bytes = p->bytes, .offset = p->offset};
        r = check_piece(f, p, i, where, &part->direct);
        sorted = sorted && (q->count == 0 || part[-1].offset <= part->offset);
        q->direct += part->direct;
        q->sum += p->bytes;
        q->count++;
    }
    if (r != SIDE_OK)
        return r;
    if (q->count == 0)
        return error_set(SIDE_INVALID, where, "all %zu pieces are empty; a batch has 1 byte at least", count);
    if (!sorted)
        qsort(q->at, q->count, sizeof(*q->at), by_offset);
    for (size_t i = 1; i < q->count; i++)
        if (q->at[i].offset < q->at[i - 1].offset + q->at[i - 1].bytes)
            return error_set(SIDE_INVALID, where, "two pieces overlap at offset %zu of the slot", q->at[i].offset);
    q->end = q->at[q->count - 1].offset + q->at[q->count - 1].bytes;
    return SIDE_OK;
}

/* The pinned ring, at the first batch that needs it. What fails here leaves the feeder as it was. */
static side_status ring_make(side_feeder *f, const char *where)
{
    struct staging want = staging_for(f->options.threads, f->options.chunk_bytes, f->options.slot_bytes);
    side_slots *ring;
    side_error kept;
    side_status r;

    if (f->stager.host != NULL || f->scratch.direct == f->scratch.count)
        return SIDE_OK;
    want.where = where;
    want.component = "feeder";
    want.timeout_s = f->options.timeout_s;
    want.limit_bytes = f->options.pinned_bytes;
    error_copy(&kept);
    r = staging_create(f->device, &want, &ring);
    if (r != SIDE_OK)
        return r;
    error_restore(&kept); /* sizes that were tried in vain are not the caller's error */
    slots_configure(ring, SITE_FEED_HOST, &f->interrupted);
    pthread_mutex_lock(&f->mutex);
    f->chunk_bytes = f->stats.chunk_bytes = want.bytes;
    f->stats.staging_slots = want.count;
    f->stats.pinned_bytes = want.count * slots_stride(want.bytes);
    f->stager.host = ring;
    pthread_mutex_unlock(&f->mutex);
    return SIDE_OK;
}

/* ---------------------------------------------------------------- room */

/* The device is not too far behind, so the next batch's record is its own: the batch before in it is read and summed up. SIDE_AGAIN: waited, or would have to.
 * Locked.
 *
 * Batch n - far is copied, then. Of it and the `slots` before it two had the same slot, so what read the batch n - far - slots is done too, on one reader's stream: the
 * events of the record, and of the one after it, which is measured from this one's end. */
static side_status record_wait(side_feeder *f, bool try)
{
    uint64_t n = f->submitted, far = f->batch_count - f->options.slots - 2;
    side_status r;

    if (n < far)
        return SIDE_OK;
    struct batch *old = feeder_batch(f, n - far);
    r = old->reads || f->options.timing ? fence_query(&old->copied, f->device) : SIDE_OK;
    if (r == SIDE_OK)
        r = feeder_advance(f); /* it looks at records */
    if (r == SIDE_OK && n >= f->batch_count)
        timing_sum(f, n - f->batch_count + 2, true);
    if (r != SIDE_AGAIN || try)
        return r;
    pthread_mutex_unlock(&f->mutex);
    r = feeder_wait_copied(f, old);
    pthread_mutex_lock(&f->mutex);
    return r == SIDE_OK ? SIDE_AGAIN : r;
}

/* Until the next batch may come in. Locked. *fatal: a failure that is not the caller's alone. */
static side_status room_wait(side_feeder *f, bool try, const char *where, bool *fatal)
{
    uint64_t begin = feeder_now(f);
    side_status r;

    *fatal = false;
    while ((r = feeder_check(f)) == SIDE_OK) {
        if (f->closed)
            return error_set(SIDE_STATE, where, "the feeder is closed");
        if (f->discarding || f->submitted - f->slotted >= f->options.queue) {
            if (try)
                return SIDE_AGAIN;
            pthread_cond_wait(&f->room, &f->mutex);
            continue;
        }
        r = record_wait(f, try);
        *fatal = r < 0;
        if (r != SIDE_AGAIN || try)
            break;
    }
    if (r == SIDE_OK && f->submitted >= f->options.queue) /* whose slot made room; virtual clocks must hear when */
        f->device->ops->clock_join(f->device->context, feeder_batch(f, f->submitted - f->options.queue)->slot_got_ns);
    f->stats.submit_wait_s += (double)(feeder_now(f) - begin) * 1e-9;
    return r;
}

/* ---------------------------------------------------------------- in */

/* f->scratch becomes the next batch. Locked; what it was stays with the scratch. */
static struct batch *take_record(side_feeder *f)
{
    struct batch *b = feeder_batch(f, f->submitted);
    struct parts spare = b->parts;

    b->parts = f->scratch;
    f->scratch = spare;
    b->number = f->submitted;
    b->is_cut = b->fenced = b->measured = b->has_begun = false;
    b->reads = b->parts.direct != 0;
    b->unfilled = 0;
    b->submitted_ns = feeder_now(f);
    return b;
}

/* The copies of a batch of direct parts, into a slot that was acquired. */
static side_status move_direct(side_feeder *f, struct batch *b, const side_slot *slot)
{
    side_status r = SIDE_OK;

    feeder_begin(f, b, slot, b->submitted_ns);
    for (size_t i = 0; r == SIDE_OK && i < b->parts.count; i++) {
        const struct part *p = &b->parts.at[i];
        r = feeder_copy(f, b, p->offset, p->data, p->bytes, true);
    }
    return r == SIDE_OK ? feeder_publish(f, b) : r;
}

/* Nothing is before it, all is direct: straight into a slot, if one is free. SIDE_AGAIN: none is. Locked; not while it queues. */
static side_status submit_inline(side_feeder *f)
{
    struct batch *b;
    side_slot slot;
    side_status r;

    f->inline_busy = true;
    pthread_mutex_unlock(&f->mutex);
    r = side_slots_try_acquire(f->slots, 0, f->copy, &slot);
    pthread_mutex_lock(&f->mutex);
    if (r == SIDE_OK) {
        b = take_record(f);
        b->is_cut = true;
        f->submitted++;
        f->cursor.batch = f->submitted;
        f->stats.submitted++;
        pthread_mutex_unlock(&f->mutex);
        r = move_direct(f, b, &slot);
        pthread_mutex_lock(&f->mutex);
    }
    f->inline_busy = false;
    pthread_cond_broadcast(&f->room);
    return r;
}

/* For the fill threads. Locked. */
static side_status submit_queued(side_feeder *f)
{
    bool direct = f->scratch.direct == f->scratch.count;
    side_status r = feeder_threads(f, direct ? 1 : f->options.threads);

    if (r != SIDE_OK)
        return r;
    take_record(f);
    f->submitted++;
    f->stats.submitted++;
    pthread_cond_signal(&f->work); /* one waits at most: it holds the stager's `pop` */
    return SIDE_OK;
}

static side_status submit(side_feeder *f, const side_feed_piece *pieces, size_t count, bool try, uint64_t *number,
                          const char *where)
{
    side_status r = feeder_enter(f, where);
    uint64_t n = 0;
    bool fatal;

    if (r != SIDE_OK)
        return r;
    r = feeder_check_unlocked(f);
    if (r == SIDE_OK)
        r = pack(f, pieces, count, where);
    if (r == SIDE_OK)
        r = ring_make(f, where);
    if (r != SIDE_OK)
        return feeder_return(f, r);
    pthread_mutex_lock(&f->mutex);
    r = room_wait(f, try, where, &fatal);
    if (r == SIDE_OK) {
        n = f->submitted;
        r = f->scratch.direct == f->scratch.count && f->issued == n ? submit_inline(f) : SIDE_AGAIN;
        fatal = r < 0;
        if (r == SIDE_AGAIN)
            r = submit_queued(f);
    }
    pthread_mutex_unlock(&f->mutex);
    if (fatal)
        feeder_fail(f, r);
    if (r == SIDE_OK && number != NULL)
        *number = n;
    return feeder_return(f, r);
}

side_status side_feeder_submit(side_feeder *feeder, const side_feed_piece *pieces, size_t count, uint64_t *number)
{
    return submit(feeder, pieces, count, false, number, "side_feeder_submit");
}

side_status side_feeder_try_submit(side_feeder *feeder, const side_feed_piece *pieces, size_t count, uint64_t *number)
{
    return submit(feeder, pieces, count, true, number, "side_feeder_try_submit");
}

side_status side_feeder_close(side_feeder *feeder)
{
    side_feeder *f = feeder;
    side_status r = feeder_enter(f, "side_feeder_close");

    if (r != SIDE_OK)
        return r;
    pthread_mutex_lock(&f->mutex);
    r = feeder_check(f);
    if (r == SIDE_OK) {
        f->closed = true;
        pthread_cond_broadcast(&f->arrived);
        pthread_cond_broadcast(&f->room);
    }
    pthread_mutex_unlock(&f->mutex);
    return feeder_return(f, r);
}
