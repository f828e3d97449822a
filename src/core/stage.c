/* SPDX-License-Identifier: MIT
 *
 * Fill threads, staging slots granted in order, the window of ready pieces, the issuer. The picture is in stage.h. */
#include "stage.h"

#include "alloc.h"
#include "error.h"
#include "os.h"

#include <string.h>

#define CHUNK_BYTES     ((size_t)4 << 20)  /* measured, 8 threads: 1 MiB 48, 2 MiB 51.6, 4 MiB 53.2 GB/s */
#define MIN_CHUNK_BYTES ((size_t)64 << 10) /* smaller copies are all latency */
#define POLL_NS         20000000u

/* ---------------------------------------------------------------- issuing, in order */

static side_status issue(struct stager *st, const struct piece *piece)
{
    side_slot staged;
    side_status r;

    if (piece->direct)
        return st->ops->issue(st->owner, piece, NULL);
    r = side_slots_take(st->host, piece->slot.key, st->stream, &staged);
    if (r == SIDE_OK)
        r = st->ops->issue(st->owner, piece, staged.data);
    return r == SIDE_OK ? side_slots_release(st->host, &staged, st->stream) : r;
}

/* Puts a filled piece into the window; issues what is next in order, unless another thread is at it. */
static side_status hand_over(struct stager *st, const struct piece *piece)
{
    side_status r = SIDE_OK;

    pthread_mutex_lock(&st->issue);
    st->ready[piece->number % st->ready_count] = *piece;
    st->is_ready[piece->number % st->ready_count] = true;
    if (!st->issuing) {
        st->issuing = true;
        while (r == SIDE_OK && st->is_ready[st->issued % st->ready_count]) {
            struct piece next = st->ready[st->issued % st->ready_count];
            pthread_mutex_unlock(&st->issue);
            r = issue(st, &next);
            pthread_mutex_lock(&st->issue);
            st->is_ready[st->issued % st->ready_count] = false;
            st->issued++;
            pthread_cond_broadcast(&st->issued_some);
        }
        st->issuing = r != SIDE_OK; /* after a failure nobody goes on: the owner's slot may be of the item before */
        if (r == SIDE_OK && st->issued == st->total)
            st->ops->ended(st->owner);
    }
    pthread_mutex_unlock(&st->issue);
    return r;
}

/* ---------------------------------------------------------------- filling, in parallel */

/* Keeps the window of ready pieces from running over: pinned pieces take no staging slot that would. */
static side_status wait_room(struct stager *st)
{
    side_status r = SIDE_OK;

    pthread_mutex_lock(&st->issue);
    while (r == SIDE_OK && st->number - st->issued >= st->ready_count) {
        os_cond_wait_until(&st->issued_some, &st->issue, os_now_ns() + POLL_NS);
        r = st->ops->check(st->owner);
    }
    pthread_mutex_unlock(&st->issue);
    return r;
}

/* The slot first: cut fills it. */
static side_status pop_filled(struct stager *st, struct piece *out)
{
    side_status r = side_slots_acquire(st->host, 0, NULL, &out->slot);

    if (r != SIDE_OK)
        return r;
    uint64_t t = os_now_ns();
    r = st->ops->cut(st->owner, out);
    atomic_fetch_add(&st->fill_ns, os_now_ns() - t);
    if (r == SIDE_END) {
        side_status a = side_slots_abandon(st->host, &out->slot, NULL);
        r = a == SIDE_OK ? r : a;
    }
    return r;
}

static side_status pop_staged(struct stager *st, struct piece *out)
{
    side_status r;

    if (st->cut_fills)
        return pop_filled(st, out);
    r = st->ops->cut(st->owner, out);
    if (r != SIDE_OK || out->direct)
        return r;
    r = side_slots_acquire(st->host, 0, NULL, &out->slot);
    if (r == SIDE_CANCELLED && st->ops->check(st->owner) == SIDE_OK) {
        out->direct = true; /* interrupted, since the owner wants what is cut no more: only its place in the order counts */
        r = SIDE_OK;
    }
    return r;
}

/* There are no pieces after those popped: whoever issues the last of them tells the owner; if that is done, we do. */
static side_status end(struct stager *st)
{
    pthread_mutex_lock(&st->issue);
    st->total = st->number;
    if (st->issued == st->total)
        st->ops->ended(st->owner);
    pthread_mutex_unlock(&st->issue);
    return SIDE_END;
}

/* The next piece with its staging slot; SIDE_END once there are no more. */
static side_status pop(struct stager *st, struct piece *out)
{
    side_status r;

    pthread_mutex_lock(&st->pop);
    r = st->ended || (st->ops->is_over != NULL && st->ops->is_over(st->owner)) ? SIDE_END : wait_room(st);
    if (r == SIDE_OK)
        r = pop_staged(st, out);
    if (r == SIDE_OK)
        out->number = st->number++;
    if (r == SIDE_END && !st->ended) {
        st->ended = true;
        r = end(st);
    } else if (r != SIDE_OK) {
        st->ended = true; /* the cursor may have passed a piece that nobody has: what comes after it must not go out */
    }
    pthread_mutex_unlock(&st->pop);
    return r;
}

static side_status fill(struct stager *st, const struct piece *piece)
{
    side_status r = SIDE_OK;

    if (piece->direct)
        return SIDE_OK;
    if (!st->cut_fills) {
        uint64_t t = os_now_ns();
        r = st->ops->fill(st->owner, piece);
        atomic_fetch_add(&st->fill_ns, os_now_ns() - t);
    }
    return r == SIDE_OK ? side_slots_publish(st->host, &piece->slot, NULL, NULL) : r;
}

side_status stager_work(struct stager *st)
{
    struct piece piece = {0};
    side_status r;

    while ((r = pop(st, &piece)) == SIDE_OK) {
        r = fill(st, &piece);
        if (r == SIDE_OK)
            r = hand_over(st, &piece);
        if (r != SIDE_OK)
            break;
    }
    return r;
}

/* ---------------------------------------------------------------- making and unmaking */

void stager_init(struct stager *st, const struct stager_ops *ops, void *owner)
{
    st->ops = ops;
    st->owner = owner;
    st->total = UINT64_MAX;
    pthread_mutex_init(&st->pop, NULL);
    pthread_mutex_init(&st->issue, NULL);
    os_cond_init(&st->issued_some);
}

void stager_finish(struct stager *st)
{
    side_slots_destroy(st->host);
    mem_free(st->ready);
    mem_free(st->is_ready);
    pthread_cond_destroy(&st->issued_some);
    pthread_mutex_destroy(&st->issue);
    pthread_mutex_destroy(&st->pop);
}

side_status stager_window(struct stager *st, uint32_t count)
{
    st->ready_count = count;
    st->ready = mem_zalloc(count, sizeof(*st->ready));
    st->is_ready = mem_zalloc(count, sizeof(*st->is_ready));
    return st->ready != NULL && st->is_ready != NULL ? SIDE_OK : SIDE_NO_MEMORY;
}

void stager_restart(struct stager *st)
{
    st->number = st->issued = 0;
    st->total = UINT64_MAX;
    st->ended = false;
}

/* ---------------------------------------------------------------- pinned memory */

struct staging staging_for(uint32_t threads, size_t chunk_bytes, size_t item_bytes)
{
    size_t bytes = chunk_bytes != 0 ? chunk_bytes : CHUNK_BYTES;

    return (struct staging){.count = 2 * threads, .bytes = bytes < item_bytes ? bytes : item_bytes};
}

/* Within limit_bytes, if it can be. */
static side_status fit_limit(const struct staging *want, size_t min_bytes, side_slots_options *o)
{
    size_t limit = want->limit_bytes;

    if (limit == 0)
        return SIDE_OK;
    while (o->count > 2 && slots_stride(o->slot_bytes) > limit / o->count)
        o->count = o->count / 2 > 2 ? o->count / 2 : 2;
    while (slots_stride(o->slot_bytes) > limit / o->count && o->slot_bytes / 2 >= min_bytes)
        o->slot_bytes /= 2;
    if (slots_stride(o->slot_bytes) > limit / o->count)
        return error_set(SIDE_OVER_BUDGET, want->where,
                         "staging needs 2 pinned slots of %zu bytes at least; pinned_bytes allows %zu in all: raise it",
                         slots_stride(o->slot_bytes), limit);
    return SIDE_OK;
}

side_status staging_create(side_device *device, struct staging *want, side_slots **slots)
{
    side_slots_options o = SIDE_SLOTS_OPTIONS_INIT;
    size_t min_bytes = want->whole || want->bytes < MIN_CHUNK_BYTES ? want->bytes : MIN_CHUNK_BYTES;
    side_status r;

    o.where = SIDE_MEMORY_PINNED;
    o.timeout_s = want->timeout_s;
    o.count = want->count;
    o.slot_bytes = want->bytes;
    r = fit_limit(want, min_bytes, &o);
    if (r != SIDE_OK)
        return r;
    for (;;) {
        r = side_slots_create(device, &o, slots);
        if (r != SIDE_OVER_BUDGET && r != SIDE_NO_MEMORY)
            break;
        if (o.count > 2)
            o.count = o.count / 2 > 2 ? o.count / 2 : 2;
        else if (o.slot_bytes / 2 >= min_bytes)
            o.slot_bytes /= 2;
        else
            break;
    }
    if (r != SIDE_OK)
        return r;
    if (o.count != want->count || o.slot_bytes != want->bytes)
        log_message(SIDE_LEVEL_WARN, want->component,
                    "staging uses %u slots of %zu bytes instead of %u of %zu: pinned memory is short", o.count,
                    o.slot_bytes, want->count, want->bytes);
    want->count = o.count;
    want->bytes = o.slot_bytes;
    return SIDE_OK;
}

uint32_t staging_threads(uint32_t threads)
{
    return threads != 0 ? threads : side_default_threads();
}

side_status staging_is_pinned(side_device *device, const void *data, size_t bytes, const char *where, const char *what,
                              uint64_t number, bool *pinned)
{
    side_memory_kind first, last;
    side_status r = side_memory_get_kind(device, data, &first);

    if (r == SIDE_OK)
        r = side_memory_get_kind(device, (const char *)data + bytes - 1, &last);
    if (r != SIDE_OK)
        return r;
    if (first == SIDE_MEMORY_DEVICE || last == SIDE_MEMORY_DEVICE)
        return error_set(SIDE_INVALID, where, "%s %llu is device memory", what, (unsigned long long)number);
    *pinned = first == SIDE_MEMORY_PINNED && last == SIDE_MEMORY_PINNED;
    return SIDE_OK;
}
