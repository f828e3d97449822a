/* SPDX-License-Identifier: MIT
 *
 * Pieces on their way: reads are asked for, copies queued by whoever read or takes back, slots taken back when their copies are done. */
#include "load_private.h"

#include "error.h"
#include "os.h"

#include <string.h>

#define LOOK_NS \
    50000 /* between looks at a copy that is in flight: some of them are, so the link does not wait for us */
#define LOW_SLOTS \
    4u /* in flight: no more of them, or of batches, and the link might run dry before the driver looks again */
#define LOW_BATCHES 1u
#define SLICE_S     0.02 /* waits in a model's time look at cancel this often */

/* ---------------------------------------------------------------- reads */

/* Of a piece for host memory: where its first byte goes. Locked. */
static char *piece_target(const side_load *l, const struct load_piece *piece)
{
    const struct load_unit *u = &l->plan.units[piece->unit];
    char *data = load_part_data(&l->plan, &l->plan.parts[u->part]);

    return data != NULL ? data + u->skip : NULL;
}

/* There are a piece to be read, a slot for it, and in host memory its place. Locked. */
static bool can_read(const side_load *l)
{
    if (l->free == NULL || l->next_piece == l->plan.piece_count || atomic_load(&l->stop))
        return false;
    if (l->ordered && l->reading + l->parked_count + l->gathered_count + (l->queued - l->done) > 0)
        return false;
    return !l->to_host || piece_target(l, &l->plan.pieces[l->next_piece]) != NULL;
}

/* Takes the next piece and a slot for it; NULL where can_read says no. Locked. */
static struct load_slot *next_read(side_load *l)
{
    struct load_slot *s = l->free;
    struct load_piece *piece = &l->plan.pieces[l->next_piece];

    if (!can_read(l))
        return NULL;
    l->free = s->next;
    l->next_piece++;
    l->reading++;
    s->state = LOAD_READING;
    s->piece = piece;
    memset(&s->read, 0, sizeof(s->read));
    s->read.file = l->plan.files[piece->file].number;
    s->read.offset = piece->at;
    s->read.bytes = piece->bytes;
    s->read.buffer = l->to_host ? piece_target(l, piece) : s->memory;
    s->read.buffer_bytes = l->to_host ? piece->bytes : l->slot_bytes;
    s->read.user = s;
    return s;
}

/* Asks for as much as there are slots for. */
static side_status pump(side_load *l)
{
    side_status r = SIDE_OK;

    while (r == SIDE_OK) {
        pthread_mutex_lock(&l->mutex);
        struct load_slot *s = next_read(l);
        pthread_mutex_unlock(&l->mutex);
        if (s == NULL)
            break;
        if (l->sources != NULL)
            load_sources_submit(l, s);
        else
            r = reader_submit(l->reader, &s->read);
        if (r != SIDE_OK) {
            pthread_mutex_lock(&l->mutex);
            l->reading--;
            pthread_mutex_unlock(&l->mutex);
        }
    }
    return r;
}

/* ---------------------------------------------------------------- copies */

struct batch {
    side_piece at[LOAD_BATCH];
    size_t count;
};

static side_status flush(side_load *l, struct batch *b)
{
    side_status r = SIDE_OK;

    if (b->count == 1)
        r = side_copy_async(l->copy, SIDE_COPY_H2D, b->at[0].dst, b->at[0].src, b->at[0].bytes);
    else if (b->count > 1)
        r = side_copy_batch(l->copy, SIDE_COPY_H2D, b->at, b->count);
    l->copies += b->count != 0;
    b->count = 0;
    return r;
}

/* Units of a piece that lie behind one another at both ends are one copy, if both ends are one block of memory each: drivers refuse copies that cross from one
 * allocation into the next, and what the caller gave may be many that happen to be neighbours. Small gaps in an arena are copied along: nothing is there. (In
 * the caller's order something may be, and be in use.) */
static bool joins(const side_load *l, const side_piece *last, const void *dst, const void *src)
{
    const size_t behind = (size_t)((const char *)src - (const char *)last->src);

    if ((size_t)((const char *)dst - (const char *)last->dst) != behind)
        return false;
    return behind == last->bytes ||
           ((l->options.flags & SIDE_LOAD_IN_ORDER) == 0 && behind - last->bytes <= LOAD_COPY_GAP);
}

/* Adds the copies of a filled slot's piece; what there is no room for goes at once. Locked. */
static side_status add_units(side_load *l, const struct load_slot *s, struct batch *b)
{
    const struct load_piece *piece = s->piece;
    bool was_arena = false; /* the unit before, of this slot */
    side_status r = SIDE_OK;

    for (uint32_t i = 0; r == SIDE_OK && i < piece->units; i++) {
        const struct load_unit *u = &l->plan.units[piece->unit + i];
        const struct load_part *p = &l->plan.parts[u->part];
        char *dst = load_part_data(&l->plan, p) + u->skip, *src = s->filled + u->at;
        side_piece *last = b->count > 0 ? &b->at[b->count - 1] : NULL;

        const bool in_arena = p->arena != LOAD_NONE, both = in_arena && was_arena;
        was_arena = in_arena;
        if (both && last != NULL && joins(l, last, dst, src)) {
            last->bytes = (size_t)(src - (const char *)last->src) + u->bytes;
            continue;
        }
        if (b->count == LOAD_BATCH)
            r = flush(l, b);
        b->at[b->count++] = (side_piece){dst, src, u->bytes};
    }
    return r;
}

/* The piece's units count as queued. Locked. */
static void units_done(side_load *l, const struct load_piece *piece, uint64_t sequence)
{
    for (uint32_t i = 0; i < piece->units; i++) {
        struct load_part *p = &l->plan.parts[l->plan.units[piece->unit + i].part];

        p->sequence = sequence;
        if (--p->left == 0)
            l->ready++;
    }
    pthread_cond_broadcast(&l->changed);
}

/* Whether the link had nothing to do, which says that readers are slower. Asked of hardware alone: a model's time is not that of the readers. Locked. */
static bool is_starved(const side_load *l)
{
    if (l->simulated)
        return false;
    return l->queued == l->done ||
           fence_query(&l->copying[l->queued % l->slot_most]->cover->copied, l->device) == SIDE_OK;
}

/* What was gathered goes as one batch. On failure what was queued is for the stream's drain. Locked. */
static side_status send(side_load *l)
{
    const uint32_t count = l->gathered_count;
    struct load_slot *cover = l->gathered[count - 1];
    struct batch b;
    side_status r = SIDE_OK;

    b.count = 0;
    l->starved += is_starved(l) ? count : 0;
    for (uint32_t i = 0; r == SIDE_OK && i < count; i++) {
        const struct load_slot *s = l->gathered[i];
        if (l->simulated) {
            l->device->ops->clock_join(l->device->context, s->clock_ns);
            if (s->piece->arena != LOAD_NONE)
                l->device->ops->clock_join(l->device->context, l->plan.arenas[s->piece->arena].clock_ns);
        }
        r = add_units(l, s, &b);
    }
    if (r == SIDE_OK)
        r = flush(l, &b);
    if (r == SIDE_OK)
        r = fence_record(&cover->copied, l->device, l->copy);
    if (r != SIDE_OK)
        return r;
    for (uint32_t i = 0; i < count; i++) {
        struct load_slot *s = l->gathered[i];
        s->state = LOAD_COPYING;
        s->sequence = ++l->queued;
        s->cover = cover;
        l->copying[s->sequence % l->slot_most] = s;
        units_done(l, s->piece, s->sequence);
    }
    l->gathered_count = 0;
    l->batches++;
    pthread_cond_signal(&l->work);
    return SIDE_OK;
}

/* Sends what there is, unless the link has enough to do until more is there. Locked. */
static side_status send_some(side_load *l)
{
    if (l->gathered_count == 0)
        return SIDE_OK;
    if (l->gathered_count == LOAD_GATHER || l->batches <= LOW_BATCHES || l->queued - l->done <= LOW_SLOTS)
        return send(l);
    return SIDE_OK;
}

/* A filled slot whose destination is there. Locked. */
static side_status queue_copy(side_load *l, struct load_slot *s)
{
    s->state = LOAD_GATHERED;
    l->gathered[l->gathered_count++] = s;
    return send_some(l);
}

side_status load_unpark(side_load *l)
{
    struct load_slot **at = &l->parked;
    side_status r = SIDE_OK;

    while (r == SIDE_OK && *at != NULL && !atomic_load(&l->stop)) {
        struct load_slot *s = *at;
        if (l->plan.arenas[s->piece->arena].data == NULL) {
            at = &s->next;
            continue;
        }
        *at = s->next;
        l->parked_count--;
        r = queue_copy(l, s);
    }
    return r;
}

/* ---------------------------------------------------------------- a read has ended */

/* Locked. */
static void slot_free(side_load *l, struct load_slot *s)
{
    s->state = LOAD_FREE;
    s->next = l->free;
    l->free = s;
}

static side_status filled(side_load *l, struct load_slot *s)
{
    const struct load_piece *piece = s->piece;
    struct load_route *route = &l->routes[s->read.backend][s->read.why];

    route->pieces++;
    route->bytes += piece->bytes;
    l->read_bytes += piece->bytes;
    if (l->first_ns == 0)
        l->first_ns = os_now_ns();
    if (atomic_load(&l->stop))
        return SIDE_OK;
    if (l->to_host) {
        units_done(l, piece, 0);
        l->copied_bytes += piece->bytes;
        l->done_pieces++;
        l->end_ns = os_now_ns();
        slot_free(l, s);
        pthread_cond_signal(&l->work);
        return SIDE_OK;
    }
    s->filled = s->read.data;
    if (piece->arena == LOAD_NONE || l->plan.arenas[piece->arena].data != NULL)
        return queue_copy(l, s);
    s->state = LOAD_PARKED;
    s->next = l->parked;
    l->parked = s;
    l->parked_count++;
    return SIDE_OK;
}

void load_filled(struct load_slot *s)
{
    side_load *l = s->load;
    side_status r = s->read.status;

    if (r == SIDE_OK && l->to_host && s->read.data != s->read.buffer)
        memmove(s->read.buffer, s->read.data, s->read.bytes);
    pthread_mutex_lock(&l->mutex);
    l->reading--;
    if (r == SIDE_OK)
        r = filled(l, s);
    if (r != SIDE_OK)
        load_fail_locked(l, r);
    else if (l->stop)
        pthread_cond_signal(&l->work);
    pthread_mutex_unlock(&l->mutex);
    if (r == SIDE_OK && l->to_host) {
        r = pump(l);
        if (r != SIDE_OK)
            load_fail(l, r);
    }
}

void load_read_done(void *load, struct reader_piece *piece)
{
    (void)load;
    load_filled(piece->user);
}

/* ---------------------------------------------------------------- the driver */

/* The oldest copy: SIDE_OK done, SIDE_AGAIN not yet, after a pause. Not locked: nobody but the driver takes a slot out of COPYING. */
static side_status look(side_load *l, struct load_slot *s)
{
    side_status r;

    if (l->simulated) {
        r = fence_wait(&s->cover->copied, l->device, NULL, SLICE_S, SITE_LOAD_SLOT);
        return r == SIDE_STUCK ? SIDE_AGAIN : r;
    }
    r = fence_query(&s->cover->copied, l->device);
    if (r == SIDE_AGAIN)
        os_sleep_ns(LOOK_NS);
    return r;
}

/* Locked. */
static void take_back(side_load *l, struct load_slot *s)
{
    const struct load_piece *piece = s->piece;

    l->done++;
    l->done_pieces++;
    l->batches -= s->cover == s;
    for (uint32_t i = 0; i < piece->units; i++)
        l->copied_bytes += l->plan.units[piece->unit + i].bytes;
    l->end_ns = os_now_ns();
    if (l->simulated)
        s->clock_ns = l->done_clock_ns = l->device->ops->now(l->device->context);
    slot_free(l, s);
    pthread_cond_broadcast(&l->changed);
}

/* While copies are in flight: waits for the oldest, at most timeout_s since it was the oldest. Locked, but for the wait. */
static side_status drive_copies(side_load *l, uint64_t *since_ns)
{
    struct load_slot *s = l->copying[(l->done + 1) % l->slot_most];
    side_status r;

    pthread_mutex_unlock(&l->mutex);
    r = look(l, s);
    pthread_mutex_lock(&l->mutex);
    load_spent(l, SPENT_COPYING);
    if (r == SIDE_OK) {
        for (const uint64_t last = s->cover->sequence; l->done < last;)
            take_back(l, l->copying[(l->done + 1) % l->slot_most]);
        *since_ns = os_now_ns();
        return send_some(l);
    }
    if (r == SIDE_AGAIN && (double)(os_now_ns() - *since_ns) * 1e-9 > l->options.timeout_s)
        return error_set(SIDE_STUCK, "side_load", "a copy of %u bytes was not done within %g s", s->piece->bytes,
                         l->options.timeout_s);
    return r == SIDE_AGAIN ? SIDE_OK : r;
}

/* What nobody is doing anything about, the link apart. Locked. */
static enum load_spent waits_for(const side_load *l)
{
    if (l->parked_count > 0 || (l->reading == 0 && l->free != NULL))
        return SPENT_MEMORY;
    return l->reading == 0 && l->pinning ? SPENT_PINS : SPENT_READ;
}

/* Locked. */
static side_status drive(side_load *l)
{
    uint64_t since_ns = os_now_ns();
    side_status r = SIDE_OK;

    while (r == SIDE_OK && !atomic_load(&l->stop) && l->done_pieces < l->plan.piece_count) {
        pthread_mutex_unlock(&l->mutex);
        r = pump(l);
        if (r == SIDE_OK && l->next_arena < l->plan.arena_count)
            r = load_arena_make(l);
        pthread_mutex_lock(&l->mutex);
        if (r != SIDE_OK || atomic_load(&l->stop))
            break;
        if (l->next_arena < l->plan.arena_count) {
            load_spent(l, l->queued != l->done ? SPENT_COPYING : SPENT_MEMORY);
            since_ns = os_now_ns(); /* copies were not looked at meanwhile */
            continue;
        }
        if (l->queued != l->done) {
            r = drive_copies(l, &since_ns);
            continue;
        }
        const enum load_spent what = waits_for(l);
        if (l->done_pieces < l->plan.piece_count && !can_read(l))
            pthread_cond_wait(&l->work, &l->mutex);
        load_spent(l, what);
        since_ns = os_now_ns();
    }
    return r;
}

void *load_driver(void *load)
{
    side_load *l = load;
    side_status r;

    if (l->simulated)
        l->device->ops->clock_join(l->device->context, l->done_clock_ns);
    pthread_mutex_lock(&l->mutex);
    r = drive(l);
    if (r != SIDE_OK)
        load_fail_locked(l, r);
    const bool stop = atomic_load(&l->stop);
    pthread_mutex_unlock(&l->mutex);
    if (stop && l->reader != NULL)
        reader_cancel(l->reader);
    if (stop && l->sources != NULL)
        load_sources_cancel(l);
    pthread_mutex_lock(&l->mutex);
    l->driving = false;
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->mutex);
    return NULL;
}
