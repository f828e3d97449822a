/* SPDX-License-Identifier: MIT
 *
 * Intakes: the sources of a feeder's batches, held until they have been copied; and the ends of feeders.
 *
 * The Feeder dies -> its intake is buried -> the sweep stops the threads, then lets go of the sources -> the lender loses a reference;
 * the last loan has died too -> the lender is buried -> the sweep destroys the feeder, then lets go of the caller's memory. */
#include "feeder.h"

static struct intake *all; /* GIL */

/* ---------------------------------------------------------------- ends */

void lender_bury(struct grave *grave)
{
    struct lender *l = (struct lender *)grave;
    bool done;

    Py_BEGIN_ALLOW_THREADS;
    done = lender_rest(l);
    Py_END_ALLOW_THREADS;
    if (!done)
        return;
    for (struct lent_stream *s = atomic_load(&l->streams); s != NULL; s = s->next)
        stream_drop(s->object);
    stream_drop(l->objects[COPY_STREAM]);
    device_drop(l->objects[DEVICE]);
    Py_XDECREF((PyObject *)l->objects[OWNER]);
    lender_free(l);
}

static void intake_unref(struct intake *n)
{
    if (--n->refs > 0)
        return;
    if (n->prev != NULL)
        n->prev->next = n->next;
    else
        all = n->next;
    if (n->next != NULL)
        n->next->prev = n->prev;
    lender_unref(n->lender);
    free(n->kept);
    free(n->pieces);
    free(n);
}

static PyObject *pop_kept(struct intake *n)
{
    PyObject *object = n->kept[n->first].object;

    n->first = (n->first + 1) % n->capacity;
    n->count--;
    return object;
}

/* The sources stay for ever where a copy may still read them. */
side_status intake_stop(struct intake *n)
{
    side_status r;

    n->stopped = true;
    Py_BEGIN_ALLOW_THREADS;
    r = lender_stop(n->lender);
    Py_END_ALLOW_THREADS;
    while (r == SIDE_OK && n->count > 0)
        Py_DECREF(pop_kept(n));
    return r;
}

static void intake_bury(struct grave *grave)
{
    struct intake *n = (struct intake *)grave;

    if (n->stopped || intake_stop(n) == SIDE_OK)
        intake_unref(n);
}

void intake_stop_all(void)
{
    struct intake *n;

    do {
        for (n = all; n != NULL && (n->stopped || !life_goes_on(n->lender->forks)); n = n->next)
            ;
        if (n != NULL) {
            n->refs++;
            (void)intake_stop(n);
            intake_unref(n);
        }
    } while (n != NULL);
}

/* ---------------------------------------------------------------- sources */

struct intake *intake_make(struct lender *l)
{
    struct intake *n = calloc(1, sizeof(*n));

    if (n == NULL) {
        lender_unref(l);
        return (struct intake *)(void *)PyErr_NoMemory();
    }
    n->grave.bury = intake_bury;
    n->lender = l;
    n->refs = 1;
    n->next = all;
    if (all != NULL)
        all->prev = n;
    all = n;
    return n;
}

side_status intake_copied(struct intake *n, uint64_t *copied)
{
    side_status r;

    if (!n->cancelled)
        return side_feeder_copied(n->lender->feeder, copied);
    Py_BEGIN_ALLOW_THREADS; /* it waits until all that was begun has ended */
    r = side_feeder_copied(n->lender->feeder, copied);
    Py_END_ALLOW_THREADS;
    return r;
}

void intake_reap(struct intake *n)
{
    uint64_t copied;

    if (n->count == 0 || intake_copied(n, &copied) != SIDE_OK)
        return;
    while (n->count > 0 && n->kept[n->first].number < copied)
        Py_DECREF(pop_kept(n)); /* may run anything, this function too */
}

bool intake_reserve(struct intake *n, size_t count)
{
    if (n->count == n->capacity) {
        size_t more = n->capacity == 0 ? 8 : 2 * n->capacity;
        struct kept *kept = malloc(more * sizeof(*kept));
        if (kept == NULL)
            return false;
        for (size_t i = 0; i < n->count; i++)
            kept[i] = n->kept[(n->first + i) % n->capacity];
        free(n->kept);
        n->kept = kept;
        n->first = 0;
        n->capacity = more;
    }
    if (count > n->piece_capacity) {
        side_feed_piece *pieces = realloc(n->pieces, count * sizeof(*pieces));
        if (pieces == NULL)
            return false;
        n->pieces = pieces;
        n->piece_capacity = count;
    }
    return true;
}
