/* SPDX-License-Identifier: MIT
 *
 * What the files of Pipeline share.
 *
 * pipeline_ref holds all that the library's threads may reach between create and destroy: the callables, the arrays, the open files. They are let go only
 * after destroy said that nothing runs any more. */
#ifndef NATIVE_PIPELINE_H
#define NATIVE_PIPELINE_H

#include "native.h"

enum { MOST_STREAMS = 16 };

struct pipeline_ref {
    atomic_size_t refs;
    struct device_ref *device;
    side_pipeline *pipeline; /* GIL; NULL before create and after destroy */
    unsigned forks;
    bool closed;               /* GIL */
    unsigned inside;           /* GIL: threads in a call of the pipeline's */
    struct pipeline_ref *next; /* GIL: all that live, for the exit */
    struct grave grave;

    PyObject *owner;  /* Device */
    PyObject *holds;  /* list: what must live until destroy */
    PyObject *source; /* callables; NULL: another kind of end */
    PyObject *sink;
    PyObject *compute;
    PyObject *progress;
    PyObject *streams[MOST_STREAMS]; /* Streams that compute runs on */
    uint32_t stream_count;
    PyObject *error[3]; /* GIL: the first exception of a callback: type, value, traceback */

    side_block *blocks_in, *blocks_out;
    uint32_t *pieces;
};

struct pipeline_ref *pipeline_hold(struct pipeline_ref *ref);
/* The same from where the handle may be buried already: false, if it is. */
bool pipeline_hold_living(struct pipeline_ref *ref);
void pipeline_drop(void *parent); /* any thread; NULL is fine */

/* ends.c: from Python objects to the options; -1 with an exception. Largest item (or result) into *largest, 0 where it cannot be told. */
int source_parse(struct pipeline_ref *ref, PyObject *source, side_source *to, size_t *largest);
int sink_parse(struct pipeline_ref *ref, PyObject *sink, side_sink *to, size_t *largest);
int compute_call(void *user, side_stream *stream, side_item *item);
void progress_call(void *user, uint64_t items, uint64_t bytes_in, uint64_t bytes_out);
/* Keeps the pending exception, if it is the first. */
void pipeline_keep_error(struct pipeline_ref *ref);

/* item.c */
PyObject *item_new(struct pipeline_ref *ref, const side_item *item);
/* The item in an Item of this pipeline that is not over; NULL with an exception. */
const side_item *item_get(PyObject *object, const struct pipeline_ref *ref);
bool item_is_over(PyObject *object);
/* The memory goes back. Returns the bytes of the result, as the caller set them. */
size_t item_end(PyObject *object);
int item_add(PyObject *module);

/* interrupt.c: while the main thread is in a call, Ctrl-C cancels the pipeline. With the GIL; calls nest. Nothing is done in other threads, and where Python's
 * default handler is not the one. begin: -1 with an exception, a KeyboardInterrupt mostly. */
int interrupt_begin(side_pipeline *pipeline, bool *begun);
void interrupt_end(bool begun);

/* pipeline.c */

typedef struct pipeline_object {
    PyObject_HEAD
    struct pipeline_ref *ref;
} pipeline_object;

/* The handle of a Pipeline that is open, borrowed; NULL with an exception. */
struct pipeline_ref *pipeline_of(PyObject *object);
/* A call that may wait. begin: -1 with an exception. end: what stopped it: an exception of a callback, a signal, or the status; -1 with an exception set.
 * SIDE_END counts as success. */
struct visit {
    struct pipeline_ref *ref;
    bool interrupt;
};
int visit_begin(struct visit *visit, struct pipeline_ref *ref);
int visit_end(struct visit *visit, side_status s);
/* The exception that a callback raised, if that is why the pipeline failed; false where there is none. */
bool pipeline_raise_kept(struct pipeline_ref *ref);
int pipeline_add(PyObject *module);

/* pull.c: methods of Pipeline */
PyObject *pipeline_next(PyObject *pipeline, PyObject *stream);
PyObject *pipeline_done(PyObject *pipeline, PyObject *args, PyObject *kwargs);
PyObject *pipeline_pull(PyObject *pipeline, PyObject *stream);
int pull_add(void);

#endif
