/* SPDX-License-Identifier: MIT
 *
 * The consumer's calls: next and discard; and which sources have been read. */
#include "feeder.h"

#include "error.h"
#include "os.h"

#define SLICE_S  0.02   /* waits in virtual time look at cancel this often */
#define LOOK_NS  100000 /* real ones at both */
#define NO_WAIT  0u
#define FOR_EVER UINT64_MAX

/* ---------------------------------------------------------------- sources */

side_status feeder_advance(side_feeder *f)
{
    for (; f->copied < f->submitted; f->copied++) {
        struct batch *b = feeder_batch(f, f->copied);
        side_status r;
        if (!b->is_cut || b->unfilled != 0 || (b->reads && !b->fenced))
            return SIDE_OK;
        r = b->reads ? fence_query(&b->copied, f->device) : SIDE_OK;
        if (r != SIDE_OK)
            return r == SIDE_AGAIN ? SIDE_OK : r;
    }
    return SIDE_OK;
}

/* Waits for a copy at leisure: the caller's own thread launches kernels meanwhile, and each look at an event takes the driver's lock from it. (Waits
 * that spin made a step of 13 ms 5 % longer.) A model's time goes on in waits alone. */
static side_status look(side_feeder *f, struct batch *b)
{
    side_status r;

    if (f->device->props.simulated)
        return fence_wait(&b->copied, f->device, NULL, SLICE_S, SITE_FEED_COPIED);
    r = fence_query(&b->copied, f->device);
    if (r == SIDE_AGAIN)
        os_sleep_ns(LOOK_NS);
    return r == SIDE_AGAIN ? SIDE_STUCK : r;
}

side_status feeder_wait_copied(side_feeder *f, struct batch *b)
{
    const uint64_t begin = os_now_ns(), most = (uint64_t)(f->options.timeout_s * 1e9);
    side_status r;

    while ((r = look(f, b)) == SIDE_STUCK) {
        if (os_now_ns() - begin >= most)
            return error_set(SIDE_STUCK, "side_feeder", "a copy was not done within %g s", f->options.timeout_s);
        r = feeder_check_unlocked(f);
        if (r != SIDE_OK)
            return r;
    }
    return r;
}

side_status side_feeder_copied(side_feeder *feeder, uint64_t *count)
{
    side_feeder *f = feeder;
    side_status r = feeder_enter(f, "side_feeder_copied");
    uint64_t n = 0;

    if (r == SIDE_OK && count == NULL)
        r = error_set(SIDE_INVALID, "side_feeder_copied", "count is NULL");
    if (r != SIDE_OK)
        return r;
    pthread_mutex_lock(&f->mutex);
    r = feeder_check(f);
    if (r == SIDE_OK) {
        r = feeder_advance(f);
        n = f->copied;
    }
    pthread_mutex_unlock(&f->mutex);
    if (r < 0)
        return feeder_return(f, feeder_fail(f, r));
    *count = n;
    return SIDE_OK;
}

/* ---------------------------------------------------------------- next */

/* Until the next batch is published, or `until_ns`. Locked. */
static side_status arrival_wait(side_feeder *f, uint64_t until_ns)
{
    side_status r;

    while ((r = feeder_check(f)) == SIDE_OK && f->issued == f->taken) {
        if (f->closed && f->submitted == f->taken)
            return SIDE_END;
        if (until_ns == NO_WAIT || (until_ns != FOR_EVER && os_now_ns() >= until_ns))
            return SIDE_AGAIN;
        if (until_ns == FOR_EVER)
            pthread_cond_wait(&f->arrived, &f->mutex);
        else
            os_cond_wait_until(&f->arrived, &f->mutex, until_ns);
    }
    return r;
}

static side_status check_reader(side_feeder *f, side_stream *reader, const char *where)
{
    bool capturing = false;
    side_status r = SIDE_OK;

    if (reader != NULL && reader->device != f->device)
        return error_set(SIDE_INVALID, where, "the stream is of another device than the feeder");
    if (reader != NULL)
        r = side_stream_is_capturing(reader, &capturing);
    if (r == SIDE_OK && capturing)
        return error_set(SIDE_STATE, where,
                         "the stream is being captured, and a wait for a copy would end that: "
                         "take batches outside of the capture");
    return r;
}

static side_status next(side_feeder *f, side_stream *reader, uint64_t until_ns, side_feed_item *item, const char *where)
{
    side_status r = feeder_enter(f, where);
    bool stamped = false;
    struct batch *b;
    side_slot slot;

    if (r == SIDE_OK && item == NULL)
        r = error_set(SIDE_INVALID, where, "item is NULL");
    if (r != SIDE_OK)
        return r;
    r = feeder_check_unlocked(f);
    if (r == SIDE_OK)
        r = check_reader(f, reader, where);
    if (r != SIDE_OK)
        return feeder_return(f, r);
    timing_ask(f, reader);
    pthread_mutex_lock(&f->mutex);
    r = arrival_wait(f, until_ns);
    b = feeder_batch(f, f->taken);
    pthread_mutex_unlock(&f->mutex);
    if (r != SIDE_OK)
        return feeder_return(f, r);
    f->device->ops->clock_join(f->device->context, b->issued_ns);
    r = (until_ns == NO_WAIT ? side_slots_try_take : side_slots_take)(f->slots, b->slot.key, reader, &slot);
    if (r == SIDE_OK)
        stamped = timing_ready(f, b, reader);
    if (r != SIDE_OK)
        return r < 0 ? feeder_return(f, feeder_fail(f, r)) : r;
    pthread_mutex_lock(&f->mutex);
    timing_taken(f, b, reader, stamped);
    f->taken++;
    f->stats.taken++;
    pthread_mutex_unlock(&f->mutex);
    *item = (side_feed_item){.number = b->number, .bytes = b->parts.end, .slot = slot};
    return SIDE_OK;
}

side_status side_feeder_next(side_feeder *feeder, side_stream *reader, side_feed_item *item)
{
    return next(feeder, reader, FOR_EVER, item, "side_feeder_next");
}

side_status side_feeder_try_next(side_feeder *feeder, side_stream *reader, side_feed_item *item)
{
    return next(feeder, reader, NO_WAIT, item, "side_feeder_try_next");
}

side_status side_feeder_next_for(side_feeder *feeder, side_stream *reader, double wait_s, side_feed_item *item)
{
    uint64_t until_ns = NO_WAIT;
    side_status r = os_deadline(wait_s, "side_feeder_next_for", &until_ns);

    return r == SIDE_OK ? next(feeder, reader, until_ns, item, "side_feeder_next_for") : r;
}

/* ---------------------------------------------------------------- discard */

/* Waits, with submits held off, until no piece of a batch is in hand; what was submitted so far is not wanted from here on. Locked. */
static side_status quiesce(side_feeder *f)
{
    side_slots *host = f->stager.host;
    side_status r;

    f->discarding = true;
    while (f->inline_busy)
        pthread_cond_wait(&f->room, &f->mutex);
    f->dropped = f->submitted;
    atomic_store(&f->interrupted, true);
    pthread_mutex_unlock(&f->mutex);
    slots_wake(f->slots);
    if (host != NULL)
        slots_wake(host);
    pthread_mutex_lock(&f->mutex);
    while ((r = feeder_check(f)) == SIDE_OK && f->in_hand > 0)
        pthread_cond_wait(&f->room, &f->mutex);
    return r;
}

/* The slots of batches taken .. slotted - 1 go back. No piece is in hand, and none comes: all is ours. */
static side_status give_slots_back(side_feeder *f)
{
    side_status r = SIDE_OK;

    for (uint64_t n = f->taken; r == SIDE_OK && n < f->issued; n++)
        r = side_slots_give_back(f->slots, &feeder_batch(f, n)->slot);
    if (r == SIDE_OK && f->open) { /* begun, and broken off */
        struct batch *b = feeder_batch(f, f->issued);
        r = fence_record(&b->copied, f->device, f->copy);
        if (r == SIDE_OK)
            r = side_slots_abandon(f->slots, &b->slot, f->copy);
        b->fenced = r == SIDE_OK;
    }
    return r;
}

/* The last batch that the device reads itself stands for those before it: one stream. */
static side_status wait_read(side_feeder *f)
{
    for (uint64_t n = f->slotted; n > f->taken; n--)
        if (feeder_batch(f, n - 1)->reads)
            return feeder_wait_copied(f, feeder_batch(f, n - 1));
    return SIDE_OK;
}

/* Nothing of the dropped batches is left. Locked. */
static void forget_dropped(side_feeder *f)
{
    for (uint64_t n = f->taken; n < f->dropped; n++) {
        struct batch *b = feeder_batch(f, n);
        b->is_cut = true;
        b->unfilled = 0;
        b->reads = b->measured = false;
    }
    f->taken = f->issued = f->slotted = f->dropped;
    f->cursor = (struct feeder_cursor){.batch = f->dropped};
    f->open = false;
    f->has_asked = false;
}

side_status side_feeder_discard(side_feeder *feeder)
{
    side_feeder *f = feeder;
    side_status r = feeder_enter(f, "side_feeder_discard");

    if (r != SIDE_OK)
        return r;
    pthread_mutex_lock(&f->mutex);
    r = quiesce(f);
    pthread_mutex_unlock(&f->mutex);
    if (r == SIDE_OK) {
        r = give_slots_back(f);
        if (r == SIDE_OK)
            r = wait_read(f);
        if (r != SIDE_OK)
            feeder_fail(f, r);
    }
    pthread_mutex_lock(&f->mutex);
    if (r == SIDE_OK)
        forget_dropped(f);
    f->discarding = false;
    if (!atomic_load(&f->cancelled))
        atomic_store(&f->interrupted, false);
    pthread_cond_broadcast(&f->work);
    pthread_cond_broadcast(&f->room);
    pthread_mutex_unlock(&f->mutex);
    return feeder_return(f, r);
}
