/* SPDX-License-Identifier: MIT
 *
 * Feeder and Loan: what the Python objects hold, shared by feeder.c (the object), intake.c (sources, ends) and feeder_next.c
 * (batches handed out). */
#ifndef NATIVE_FEEDER_H
#define NATIVE_FEEDER_H

#include "native.h"

#include "loan.h"

/* A source: held until its batch has been copied. */
struct kept {
    uint64_t number;
    PyObject *object;
};

/* The Python side of a lender. Outlives the Feeder until no thread reads a source any more. All fields are guarded by the GIL. */
struct intake {
    struct grave grave; /* stops the threads, lets go of the sources and of the lender */
    struct lender *lender;
    unsigned refs;     /* the Feeder (then the graveyard), and the exit hook while it stops this */
    struct kept *kept; /* ring: the oldest batch first */
    size_t first, count, capacity;
    side_feed_piece *pieces; /* of the submit that runs */
    size_t piece_capacity;
    uint64_t taken;             /* the number behind that of the last batch that was taken */
    bool submitting, taking;    /* a thread is inside: a second one is refused */
    bool cancelled, stopped;    /* stopped: no source is read any more, or that is not known */
    struct intake *prev, *next; /* all of them; for the exit hook */
};

typedef struct feeder_object {
    PyObject_HEAD
    struct intake *intake;
} feeder_object;

typedef struct loan_object {
    PyObject_HEAD
    struct loan *loan;
    bool uses; /* there are no tensors: the loan ends with this object */
} loan_object;

enum { OWNER, DEVICE, COPY_STREAM }; /* lender.objects: PyObject, device_ref, stream_ref */

/* ---------------------------------------------------------------- intake.c */

/* lender.grave.bury: destroys the feeder, lets go of all that it used. */
void lender_bury(struct grave *grave);
/* Takes over the caller's reference to the lender, also on failure: NULL with an exception. */
struct intake *intake_make(struct lender *lender);
/* Room for one more source, and for `count` pieces. False: no memory. */
bool intake_reserve(struct intake *intake, size_t count);
/* side_feeder_copied; may release the GIL. */
side_status intake_copied(struct intake *intake, uint64_t *copied);
/* Lets go of the sources of batches that have been copied. May run anything. */
void intake_reap(struct intake *intake);
/* With the GIL, which it releases: ends the threads, lets go of the sources. */
side_status intake_stop(struct intake *intake);
/* At exit: no thread of ours may read sources, or be inside the device, when the interpreter and then the process take both away. */
void intake_stop_all(void);

/* ---------------------------------------------------------------- feeder.c */

/* The stream that `object` names (a Stream, a native handle; -1: the host, *lent is NULL). May release the GIL for one that is new. -1 with an exception. */
int lender_stream_of(struct lender *lender, PyObject *object, struct lent_stream **lent);
/* The intake, with the graveyard swept; NULL with an exception: closed, or the process has forked. */
struct intake *intake_enter(PyObject *self, const char *where);

/* ---------------------------------------------------------------- feeder_next.c */

PyObject *feeder_next(PyObject *self, PyObject *args);
int loan_add(PyObject *module);

#endif
