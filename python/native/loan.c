/* SPDX-License-Identifier: MIT */
#include "loan.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>

/* ---------------------------------------------------------------- lenders */

bool lender_rest(struct lender *l)
{
    if (!life_goes_on(l->forks) || side_feeder_destroy(l->feeder) != SIDE_OK)
        return false;
    for (struct lent_stream *s = atomic_load(&l->streams); s != NULL; s = s->next)
        if (s->wrapped)
            side_stream_destroy(s->stream);
    return true;
}

struct lender *lender_make(side_device *device, void (*bury)(struct grave *))
{
    struct lender *l = calloc(1, sizeof(*l));
    pthread_condattr_t monotonic;

    if (l == NULL)
        return NULL;
    l->grave.bury = bury;
    l->device = device;
    l->forks = life_forks();
    atomic_init(&l->refs, 1);
    pthread_mutex_init(&l->table, NULL);
    pthread_mutex_init(&l->gate, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&l->ended, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return l;
}

side_status lender_open(struct lender *l, const side_feeder_options *options)
{
    side_device_props props;
    side_status s = side_device_get_props(l->device, &props);

    if (s == SIDE_OK)
        s = side_feeder_create(l->device, options, &l->feeder);
    if (s != SIDE_OK)
        return s;
    l->slots = side_feeder_slots(l->feeder);
    l->slot_bytes = options->slot_bytes;
    l->place.type = props.simulated ? DL_CPU : DL_CUDA;
    l->place.id = props.simulated ? 0 : props.ordinal;
    return SIDE_OK;
}

void lender_free(struct lender *l)
{
    struct lent_stream *next;

    for (struct lent_stream *s = atomic_load(&l->streams); s != NULL; s = next) {
        next = s->next;
        free(s);
    }
    pthread_cond_destroy(&l->ended);
    pthread_mutex_destroy(&l->gate);
    pthread_mutex_destroy(&l->table);
    free(l);
}

void lender_unref(struct lender *l)
{
    if (atomic_fetch_sub(&l->refs, 1) == 1)
        life_bury(&l->grave);
}

side_status lender_stop(struct lender *l)
{
    side_status r;

    if (l->feeder == NULL)
        return SIDE_OK;
    side_feeder_cancel(l->feeder);
    /* Any call that returns because of the cancel, or of an earlier failure, waits for the threads and for what is queued. */
    r = side_feeder_discard(l->feeder);
    return r == SIDE_STUCK || r == SIDE_FORKED ? r : SIDE_OK;
}

struct lent_stream *lender_find(struct lender *l, side_stream *stream, void *native)
{
    struct lent_stream *s = atomic_load_explicit(&l->streams, memory_order_acquire);

    while (s != NULL && (stream != NULL ? s->stream != stream : !s->wrapped || s->native != native))
        s = s->next;
    return s;
}

side_status lender_stream(struct lender *l, side_stream *stream, void *native, void *object, struct lent_stream **lent,
                          bool *added)
{
    side_status r = SIDE_OK;
    struct lent_stream *s;
    bool add;

    pthread_mutex_lock(&l->table);
    s = lender_find(l, stream, native);
    add = s == NULL;
    if (add && (s = calloc(1, sizeof(*s))) == NULL)
        r = SIDE_NO_MEMORY;
    else if (add && stream == NULL)
        r = side_stream_wrap(l->device, native, &s->stream);
    if (r == SIDE_OK && add) {
        s->wrapped = stream == NULL;
        s->native = native;
        s->object = object;
        if (stream != NULL)
            s->stream = stream;
        s->next = atomic_load_explicit(&l->streams, memory_order_relaxed);
        atomic_store_explicit(&l->streams, s, memory_order_release);
    }
    pthread_mutex_unlock(&l->table);
    if (r != SIDE_OK) {
        free(s);
        return r;
    }
    if (added != NULL)
        *added = add;
    *lent = s;
    return SIDE_OK;
}

bool lender_wait(struct lender *l, unsigned below, uint64_t ns)
{
    struct timespec until;
    bool fewer;
    int e = 0;

    clock_gettime(CLOCK_MONOTONIC, &until);
    ns += (uint64_t)until.tv_nsec;
    until.tv_sec += (time_t)(ns / 1000000000u);
    until.tv_nsec = (long)(ns % 1000000000u);
    /* Before `held` is looked at: a loan that ends later sees the waiter (loan_end has these two the other way round). */
    atomic_fetch_add(&l->waiters, 1);
    pthread_mutex_lock(&l->gate);
    while (!(fewer = atomic_load(&l->held) < below) && e != ETIMEDOUT)
        e = pthread_cond_timedwait(&l->ended, &l->gate, &until);
    pthread_mutex_unlock(&l->gate);
    atomic_fetch_sub(&l->waiters, 1);
    return fewer;
}

/* ---------------------------------------------------------------- capture */

static bool asks_device(side_stream *stream)
{
    bool capturing = true;

    return side_stream_is_capturing(stream, &capturing) != SIDE_OK || capturing;
}

_Atomic(loan_capturing_fn *) loan_capturing = asks_device;

/* A record in a captured stream becomes part of the graph and marks nothing now, so the slot could never be known to be free. */
static bool ends_in_capture(struct loan *loan)
{
    loan_capturing_fn *capturing = atomic_load_explicit(&loan_capturing, memory_order_relaxed);
    struct lent_stream *s = atomic_load_explicit(&loan->lender->streams, memory_order_acquire);

    if (loan->stream != NULL && capturing(loan->stream))
        return true;
    for (struct hold *h = atomic_load_explicit(&loan->holds, memory_order_acquire); h != NULL; h = h->next)
        if (capturing(h->stream))
            return true;
    for (; s != NULL; s = s->next)
        if (s->stream != loan->stream && atomic_load_explicit(&s->watched, memory_order_relaxed) && capturing(s->stream))
            return true;
    return false;
}

/* ---------------------------------------------------------------- loans */

/* Slot, memory and all that belongs to them stay until the process ends: here, so that they can be found. */
static void loan_retire(struct loan *loan)
{
    static _Atomic(struct loan *) all;

    loan->next = atomic_load_explicit(&all, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&all, &loan->next, loan, memory_order_release, memory_order_relaxed))
        ;
    atomic_fetch_add(&loan->lender->retired, 1);
}

/* False: it is kept. */
static bool loan_end(struct loan *loan)
{
    struct lender *l = loan->lender;
    bool retire = ends_in_capture(loan);
    side_status r = SIDE_OK;

    if (!retire) {
        for (struct hold *h = atomic_load_explicit(&loan->holds, memory_order_acquire); h != NULL; h = h->next)
            r = side_slots_release(l->slots, &h->slot, h->stream) == SIDE_OK ? r : SIDE_DEVICE_ERROR;
        r = side_slots_release(l->slots, &loan->item.slot, loan->stream) == SIDE_OK ? r : SIDE_DEVICE_ERROR;
        /* Refused while a release is missing: then the slot stays away, and the engine says why at its next call. */
        if (r != SIDE_OK || side_slots_give_back(l->slots, &loan->item.slot) != SIDE_OK)
            atomic_fetch_add(&l->failed, 1);
    } else {
        loan_retire(loan);
    }
    atomic_fetch_sub(&l->held, 1);
    if (atomic_load(&l->waiters) > 0) {
        pthread_mutex_lock(&l->gate);
        pthread_cond_broadcast(&l->ended);
        pthread_mutex_unlock(&l->gate);
    }
    if (!retire)
        lender_unref(l); /* last: it may be gone after this */
    return !retire;
}

static void deleter(dl_managed *self)
{
    loan_done(self->context);
}

struct loan *loan_make(struct lender *l, size_t count, size_t dims)
{
    struct loan *loan = calloc(1, sizeof(*loan) + count * sizeof(loan->tensors[0]) + dims * sizeof(int64_t));

    if (loan == NULL)
        return NULL;
    loan->lender = l;
    loan->count = count;
    loan->dims = dims;
    atomic_init(&loan->uses, 1);
    atomic_init(&loan->names, 2);
    for (size_t i = 0; i < count; i++) {
        loan->tensors[i].context = loan;
        loan->tensors[i].deleter = deleter;
        loan->tensors[i].tensor.device = l->place;
        loan->tensors[i].tensor.dtype.lanes = 1;
    }
    return loan;
}

int64_t *loan_numbers(struct loan *loan)
{
    return (int64_t *)(void *)(loan->tensors + loan->count);
}

side_status loan_take(struct loan *loan, side_stream *reader, double wait_s)
{
    struct lender *l = loan->lender;
    side_status r = wait_s > 0 ? side_feeder_next_for(l->feeder, reader, wait_s, &loan->item)
                               : side_feeder_try_next(l->feeder, reader, &loan->item);

    if (r != SIDE_OK)
        return r;
    for (size_t i = 0; i < loan->count; i++) {
        dl_tensor *t = &loan->tensors[i].tensor;
        t->data = (char *)loan->item.slot.data + t->byte_offset;
        t->byte_offset = 0;
    }
    loan->stream = reader;
    loan->taken = true;
    atomic_fetch_add(&l->refs, 1);
    atomic_fetch_add(&l->held, 1);
    return SIDE_OK;
}

dl_managed *loan_tensor(struct loan *loan, size_t i)
{
    atomic_fetch_add_explicit(&loan->uses, 1, memory_order_relaxed);
    return &loan->tensors[i];
}

bool loan_hold(struct loan *loan)
{
    unsigned n = atomic_load(&loan->uses);

    while (n > 0 && !atomic_compare_exchange_weak(&loan->uses, &n, n + 1))
        ;
    return n > 0;
}

void loan_done(struct loan *loan)
{
    if (!life_goes_on(loan->lender->forks) || atomic_fetch_sub(&loan->uses, 1) > 1)
        return;
    if (loan->taken && !loan_end(loan))
        return;
    loan_unname(loan);
}

void loan_unname(struct loan *loan)
{
    struct hold *next;

    if (atomic_fetch_sub(&loan->names, 1) > 1)
        return;
    for (struct hold *h = atomic_load(&loan->holds); h != NULL; h = next) {
        next = h->next;
        free(h);
    }
    free(loan);
}

side_status loan_use(struct loan *loan, side_stream *stream)
{
    struct hold *h = atomic_load_explicit(&loan->holds, memory_order_acquire);
    side_status r;

    while (h != NULL && h->stream != stream)
        h = h->next;
    if (h != NULL || stream == loan->stream) /* what it queues until the loan ends is waited for already */
        return SIDE_OK;
    h = calloc(1, sizeof(*h));
    if (h == NULL)
        return SIDE_NO_MEMORY;
    h->stream = stream;
    r = side_slots_take(loan->lender->slots, loan->item.slot.key, stream, &h->slot);
    if (r != SIDE_OK) {
        free(h);
        return r;
    }
    h->next = atomic_load_explicit(&loan->holds, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&loan->holds, &h->next, h, memory_order_release, memory_order_relaxed))
        ;
    return SIDE_OK;
}
