/* SPDX-License-Identifier: MIT
 *
 * Loans: a batch of a feeder, handed out as tensors that end it by dying. No Python here: deleters run in any thread, with the GIL or without.
 *
 *     lender 1 ----- n loan 1 ----- n dl_managed  --capsule--> a tensor
 *       |               |
 *       side_feeder     a taken slot on the stream that reads it, and one more hold of the slot for each further stream (loan_use)
 *
 *     loan_make (uses 1) -> loan_take -> loan_tensor, n x (uses 1 + n) -> loan_done (uses n) ... deleter, n x -> uses 0: the loan ends:
 *     each hold is released on its stream, the slot is given back, the lender loses a reference. The last one buries it.
 *
 * Two counts a loan: `uses` keep the slot, `names` keep the struct. All uses together are one name; so is the Loan object.
 *
 * Deleters take no lock of ours. They call side_slots_release and side_slots_give_back, which take
 *   side_slots.mutex   its holders look at states and ask the driver about events; they wait for nothing, call nothing of the caller's: never for the GIL
 *   the driver's own   (event record, on CUDA) its holders are in driver calls; we make those that may wait without the GIL, and others that hold the GIL return by
 *                      themselves. A caller's host function that takes the GIL runs on a driver thread that holds none of these
 * and malloc's, whose holders call nothing. Where waiting for a slot is announced (lender_wait), a deleter also takes `gate`, held to look at one number.
 * On a failed release the slots are poisoned, and the library waits for that stream (at most its time limit): slow, once, and free of the GIL as well. */
#ifndef NATIVE_LOAN_H
#define NATIVE_LOAN_H

#include <sidestream.h>

#include "dlpack.h"
#include "life.h"

#include <pthread.h>
#include <stdatomic.h>

/* A stream that a feeder knows; lives as long as the lender. */
struct lent_stream {
    struct lent_stream *next;
    side_stream *stream;
    void *native;
    bool wrapped;        /* made here from `native`; else the caller's, kept by `object` */
    atomic_bool watched; /* capturing on it retires what dies meanwhile */
    void *object;        /* a Python reference, or NULL; for who drops the lender */
};

struct lender {
    struct grave grave; /* buried with the last reference; what it does is set by who made the lender: lender_rest, objects, lender_free */
    side_device *device;
    side_feeder *feeder;
    side_slots *slots;
    size_t slot_bytes;
    unsigned forks; /* life_forks() at birth */
    dl_device place;
    atomic_uint refs;                      /* who made it, and each loan that has not ended; a retired one for ever */
    atomic_uint held;                      /* loans that have not ended */
    atomic_uint retired;                   /* loans that ended during a capture */
    atomic_uint failed;                    /* loans whose slot could not be released */
    _Atomic(struct lent_stream *) streams; /* pushed to under `table`, read by anybody */
    pthread_mutex_t table;                 /* held while a stream is wrapped: taken without the GIL only */
    atomic_uint waiters;
    pthread_mutex_t gate;
    pthread_cond_t ended;
    void *objects[4]; /* Python references, for who drops the lender */
};

struct hold {
    struct hold *next;
    side_stream *stream;
    side_slot slot;
};

struct loan {
    struct lender *lender;
    side_feed_item item;
    side_stream *stream; /* that took it; NULL: the host */
    bool taken;          /* item is a batch; set before anybody else knows the loan */
    struct loan *next;   /* of retired ones */
    atomic_uint uses, names;
    _Atomic(struct hold *) holds; /* pushed to by whoever has a use */
    size_t count, dims;           /* of tensors[] and of the numbers behind */
    dl_managed tensors[];         /* then the shapes and strides */
};

/* ---------------------------------------------------------------- lenders */

/* refs is 1. NULL: no memory. */
struct lender *lender_make(side_device *device, void (*bury)(struct grave *));
/* Makes the feeder. */
side_status lender_open(struct lender *lender, const side_feeder_options *options);
/* Of a buried lender, without the GIL: destroys the feeder and the wraps. May block. False: the device did not finish, or all is over: everything that the
 * feeder uses stays for ever, and lender_free must not follow. */
bool lender_rest(struct lender *lender);
void lender_free(struct lender *lender);
/* The last one buries it. */
void lender_unref(struct lender *lender);
/* Cancels, and waits until no thread and no copy reads a source; loans live on. May block. SIDE_STUCK: copies may still read. */
side_status lender_stop(struct lender *lender);

/* Lock-free; NULL: not seen yet. `stream` NULL: by its native handle. */
struct lent_stream *lender_find(struct lender *lender, side_stream *stream, void *native);
/* Finds, or adds: a wrap of `native`, or (stream not NULL) the caller's, with `object`. May wait for the driver. *added may be NULL. */
side_status lender_stream(struct lender *lender, side_stream *stream, void *native, void *object,
                          struct lent_stream **lent, bool *added);
/* Blocks until fewer than `below` loans are held, at most `ns`. False: time is up. */
bool lender_wait(struct lender *lender, unsigned below, uint64_t ns);

/* Whether `stream` is part of a CUDA graph capture; where that cannot be told, yes. Tests put their own in its place. */
typedef bool loan_capturing_fn(side_stream *stream);
extern _Atomic(loan_capturing_fn *) loan_capturing;

/* ---------------------------------------------------------------- loans */

/* With room for `count` tensors with `dims` numbers of shape and strides in all. uses and names are 1. NULL: no memory. */
struct loan *loan_make(struct lender *lender, size_t count, size_t dims);
/* The numbers: `dims` of them, the caller's to share out. */
int64_t *loan_numbers(struct loan *loan);
/* Takes the next batch. The caller has set each tensor's byte_offset in the slot; they become addresses. SIDE_AGAIN only if not `wait`. On failure nothing was
 * taken; it may be tried again. */
side_status loan_take(struct loan *loan, side_stream *reader, double wait_s);
/* Its number i, counted as a use until its deleter has run. */
dl_managed *loan_tensor(struct loan *loan, size_t i);
/* One use more, unless there is none left. */
bool loan_hold(struct loan *loan);
/* One use less; the last one ends the loan. Does nothing once all is over (life.h). */
void loan_done(struct loan *loan);
void loan_unname(struct loan *loan);
/* `stream` reads too: it waits until the slot is filled, and the next writer waits for what it has queued when the loan ends. The caller has a use. */
side_status loan_use(struct loan *loan, side_stream *stream);

#endif
