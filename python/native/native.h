/* SPDX-License-Identifier: MIT
 *
 * What the files of the extension module share: the counted handles behind the Python objects, and the helpers that every entry point needs.
 *
 * Ownership
 *   A Python object holds a handle (device_ref, stream_ref, memory); handles hold each other, and are counted apart from Python objects, since a DLPack
 *   tensor may die on any thread, with or without the GIL. `*_drop` may be called anywhere: what would block or needs the GIL goes to
 *   the graveyard (life_bury), and is done by the next entry point (life_sweep), or at exit.
 *
 *       Stream ----> stream_ref --> device_ref <--- Device
 *       Buffer ----> memory ------> device_ref, and the stream_refs that used it
 *       DLPack ----> memory
 *
 * The GIL and locks
 *   Every call into the library that may wait, or that takes a lock which somebody may hold while he waits, is made with the GIL released. No callback
 *   from the library takes the GIL while it holds a lock that a deleter needs; log callbacks never take it (messages.c).
 *
 * Fork and exit
 *   A handle notes life_forks() at birth. In a forked child, and once life_is_over(), drops do nothing: the memory belongs to the parent, or to the end
 *   of the process.
 */
#ifndef NATIVE_H
#define NATIVE_H

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "dlpack.h"
#include "sweep.h"
#include "sidestream.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------------------------- errors.c */

/* Sets the exception that belongs to `status`, with the detail of side_last_error() where that is about the same status. Returns NULL. */
PyObject *native_raise(side_status status);
/* The same from a detail that was kept. */
PyObject *native_raise_error(const side_error *error);
/* Sets an exception of the class that belongs to `status`, with a message of our own. Returns NULL. */
PyObject *native_raise_text(side_status status, const char *where, const char *format, ...);
/* The class that belongs to a status; borrowed. */
PyObject *native_exception(side_status status);
int errors_add(PyObject *module);

/* ---------------------------------------------------------------- messages.c */

/* With the GIL: hands what the library said to logging.getLogger("sidestream"). Keeps a pending exception. Cheap where nothing is. */
void native_drain_log(void);
int messages_begin(void);

/* What every entry point does first: sweeps and drains. Returns -1 with an exception once the interpreter finalises. */
int native_enter(void);
/* PyArg_ParseTupleAndKeywords, of constant strings. */
int native_parse(PyObject *args, PyObject *kwargs, const char *format, const char *const *names, ...);

/* ---------------------------------------------------------------- device.c */

struct device_ref {
    atomic_size_t refs;
    side_device *device;
    side_device_props props;
    unsigned forks;
    struct grave grave;
};

struct device_ref *device_hold(struct device_ref *ref);
/* Any thread; NULL is fine. The last one closes the device, later. */
void device_drop(struct device_ref *ref);

typedef struct device_object {
    PyObject_HEAD
    struct device_ref *ref; /* NULL once closed */
    PyObject *weakrefs;
} device_object;

/* The handle in a Device, borrowed; NULL with TypeError, Error (closed) or Forked. `what` names the argument. */
struct device_ref *native_device(PyObject *object, const char *what);
int device_add(PyObject *module);

/* ---------------------------------------------------------------- stream.c */

/* A stream of the library's, and what must live until its work is done. `keeps` is guarded by the GIL; while there are some, the list of busy streams
 * holds a reference. */
struct stream_ref {
    atomic_size_t refs;
    struct device_ref *device;
    side_stream *stream;
    unsigned forks;
    bool wrapped;            /* native stream of the caller's */
    struct keep *open;       /* objects that are covered by no event yet */
    struct keep *covered;    /* objects that `event` covers */
    side_event *event;       /* NULL until needed */
    struct stream_ref *busy; /* next in the list of busy streams */
    unsigned kept;           /* since the last look at what is done */
    bool is_busy, reaping;
};

struct stream_ref *stream_hold(struct stream_ref *ref);
void stream_drop(struct stream_ref *ref); /* any thread; NULL is fine */

typedef struct stream_object {
    PyObject_HEAD
    struct stream_ref *ref;
    PyObject *owner; /* Device; for the attribute */
    PyObject *weakrefs;
} stream_object;

/* The handle in a Stream, borrowed; NULL with an exception. native_stream_or_none: None gives NULL and no exception; `failed` tells the two apart. */
struct stream_ref *native_stream(PyObject *object, const char *what);
struct stream_ref *native_stream_or_none(PyObject *object, const char *what, bool *failed);
/* With the GIL: holds `object` until what is queued on the stream so far is done on the device. Out of memory: waits for the stream. Keeps a pending
 * exception. */
void native_stream_keep(struct stream_ref *ref, PyObject *object);
/* With the GIL, which it may release: lets go of what is done. Keeps a pending exception. */
void native_streams_reap(void);
/* Waits for the stream, as native_wait_stream, and lets go of what it held. */
int native_stream_finish(struct stream_ref *ref, double timeout_s);
/* With the GIL, which it releases: waits for streams that hold objects, at most timeout_s each; objects of a stream that does not finish are kept. */
void native_streams_finish(double timeout_s);
int stream_add(PyObject *module);

/* ---------------------------------------------------------------- event.c */

typedef struct event_object {
    PyObject_HEAD
    struct device_ref *device;
    side_event *event;
    bool timing;
    PyObject *weakrefs;
} event_object;

/* Takes over `event`, also on failure (NULL with an exception). */
PyObject *native_event_new(struct device_ref *device, side_event *event, bool timing);
event_object *native_event(PyObject *object, const char *what);
int event_add(PyObject *module);

/* ---------------------------------------------------------------- waiting */

/* Waits without the GIL in pieces, between which signals are looked at: -1 with an exception (KeyboardInterrupt, Stuck). timeout_s 0: for ever. */
int native_wait_stream(side_stream *stream, double timeout_s);
int native_wait_event(side_event *event, double timeout_s);

#endif
