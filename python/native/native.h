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
/* "SIDE_STUCK" -> "Stuck"; NULL: no status of that name. */
const char *native_exception_name(const char *status, size_t length);
int errors_add(PyObject *module);

/* ---------------------------------------------------------------- words.c */

/* A text of the library's, in Python's words: names of calls, statuses, options; None. Cut off where there is no room. */
void native_words(char *to, size_t room, const char *text);
int words_add(PyObject *module);

/* ---------------------------------------------------------------- messages.c */

/* With the GIL: hands what the library said to logging.getLogger("sidestream"). Keeps a pending exception. Cheap where nothing is. */
void native_drain_log(void);
int messages_begin(void);

/* life_sweep, but in a callback of the library's: a burial there could wait for the very thread that it runs on. */
void native_sweep(void);
void native_callback_begin(void);
void native_callback_end(void);
/* Without the GIL. */
void native_sleep(double seconds);
/* What every entry point does first: sweeps and drains. Returns -1 with an exception once the interpreter finalises. */
int native_enter(void);

/* ---------------------------------------------------------------- arguments.c */

/* PyArg_ParseTupleAndKeywords, of constant strings and units of one letter (y* too); an argument that it does not take is named. */
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
/* A Stream of a Device; NULL with an exception. */
PyObject *native_stream_new(PyObject *device);
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

/* ---------------------------------------------------------------- dtype.c */

struct dtype {
    const char *name;   /* NumPy's: "float32" */
    const char *format; /* of the struct module; NULL: it has none */
    dl_type type;
};

/* From a name, a NumPy or torch dtype, or a scalar class; NULL with TypeError or ValueError. None and NULL: uint8. */
const struct dtype *native_dtype(PyObject *object);
/* NULL where it is not in our table; no exception. */
const struct dtype *dtype_of_dl(dl_type type);
size_t dtype_bytes(const struct dtype *dtype);
/* 0; -1 with InvalidArgument where a named operation does not take it. */
int dtype_side(const struct dtype *dtype, const char *what, side_type *type);

/* ---------------------------------------------------------------- memory.c */

enum { MOST_DIMS = 16 };

/* Memory that Buffers, views of them and DLPack tensors share. What dies last frees it: device memory later, after its users' streams; pinned memory at once,
 * to be reused after its users' streams; lent memory (an item, a slot) not at all. */
struct memory {
    atomic_size_t refs;
    struct device_ref *device;
    side_memory_kind kind; /* DEVICE or PINNED */
    bool lent;
    bool ended; /* GIL: lent memory that went back: nothing may be done with it any more */
    unsigned forks;
    void *data;
    size_t bytes;
    side_pool *pool; /* PINNED, not lent */
    void *parent;    /* what the memory lies in, and how to let go of it; NULL: nothing */
    void (*parent_drop)(void *parent);
    side_event *written;       /* GIL: what last wrote it; NULL: nothing of ours did */
    struct stream_ref **users; /* GIL */
    size_t user_count;
    struct grave grave;
};

/* A reference for the caller; NULL with MemoryError. Takes over nothing but, on success, the parent's reference. */
struct memory *memory_make(struct device_ref *device, side_memory_kind kind, void *data, size_t bytes);
struct memory *memory_hold(struct memory *memory);
void memory_drop(struct memory *memory); /* any thread; NULL is fine */
/* With the GIL: queued work on `stream` uses the memory, and writes it if `writes`. */
void memory_use(struct memory *memory, struct stream_ref *stream, bool writes);
/* 0, or -1 with WrongState (the item or slot went back) or Forked. */
int memory_check(const struct memory *memory);
/* The host may read: 0 once what was queued through us has written it. */
int memory_wait_written(struct memory *memory);
/* The host can reach it. */
bool memory_on_host(const struct memory *memory);

/* ---------------------------------------------------------------- buffer.c */

typedef struct buffer_object {
    PyObject_HEAD
    struct memory *memory;
    PyObject *owner; /* Device; for the attribute */
    const struct dtype *dtype;
    char *data; /* in the memory */
    size_t bytes;
    int ndim;
    Py_ssize_t shape[MOST_DIMS], strides[MOST_DIMS]; /* elements; bytes. C order */
    PyObject *weakrefs;
} buffer_object;

/* Takes over the reference on `memory`, also on failure. shape NULL: one dimension over all `bytes`. */
PyObject *native_buffer_new(struct memory *memory, PyObject *owner, size_t offset, size_t bytes,
                            const struct dtype *dtype, int ndim, const Py_ssize_t *shape);
bool native_is_buffer(PyObject *object);
/* A number or a sequence of numbers. Sets the bytes that they take, too. -1 with an exception. */
int native_shape(PyObject *object, const struct dtype *dtype, int *ndim, Py_ssize_t shape[MOST_DIMS], size_t *bytes);
PyObject *device_alloc(PyObject *device, PyObject *args, PyObject *kwargs);
PyObject *device_empty(PyObject *device, PyObject *args, PyObject *kwargs);
int buffer_add(PyObject *module);

/* ---------------------------------------------------------------- tensor.c */

/* Buffer.__dlpack__ and __dlpack_device__. */
PyObject *buffer_dlpack(PyObject *buffer, PyObject *args, PyObject *kwargs);
PyObject *buffer_dlpack_device(PyObject *buffer, PyObject *unused);

/* One side of a copy or an operation. */
struct operand {
    char *data;
    size_t bytes;
    side_memory_kind kind;
    const struct dtype *dtype; /* NULL: unknown */
    int ndim;
    Py_ssize_t shape[MOST_DIMS];
    struct memory *memory; /* ours: borrowed from `keep`; else NULL */
    PyObject *keep;        /* what must live while it is in use */
};

/* From a Buffer, an object with the buffer protocol, or one with DLPack; contiguous. `stream` is where it will be used: the operand is ready there.
 * -1 with an exception that names `what`. */
int operand_get(struct operand *operand, PyObject *object, struct stream_ref *stream, bool writes, const char *what);
/* The same of memory that the host reaches, now. */
int operand_get_host(struct operand *operand, PyObject *object, struct device_ref *device, bool writes,
                     const char *what);
/* The work is queued (or failed, perhaps half-way). */
void operand_used(struct operand *operand, struct stream_ref *stream, bool writes);
void operand_drop(struct operand *operand);

/* ---------------------------------------------------------------- copy.c, ops.c: methods of Stream */

PyObject *stream_copy(PyObject *stream, PyObject *args, PyObject *kwargs);
PyObject *stream_fill(PyObject *stream, PyObject *args, PyObject *kwargs);
PyObject *stream_matmul(PyObject *stream, PyObject *args, PyObject *kwargs);
PyObject *stream_cast(PyObject *stream, PyObject *args, PyObject *kwargs);
PyObject *stream_affine(PyObject *stream, PyObject *args, PyObject *kwargs);
PyObject *stream_spin(PyObject *stream, PyObject *args, PyObject *kwargs);
PyObject *stream_xxh3_blocks(PyObject *stream, PyObject *args, PyObject *kwargs);
int ops_add(PyObject *module);

/* ---------------------------------------------------------------- pool.c */

PyObject *device_pool(PyObject *device, void *unused);
int pool_add(PyObject *module);

/* ---------------------------------------------------------------- slots.c, slot.c */

/* Counted apart from the Python object: slots that are held, and exports of their memory, hold it. */
struct slots_ref {
    atomic_size_t refs;
    struct device_ref *device;
    side_slots *slots;
    side_memory_kind kind;
    unsigned forks;
    struct grave grave;
};

struct slots_ref *slots_hold(struct slots_ref *ref);
void slots_drop(void *parent); /* any thread; NULL is fine */
/* A Slot that acquire (`writes`) or take gave; NULL with an exception, and then the slot went back. */
PyObject *slot_new(struct slots_ref *ref, PyObject *owner, const side_slot *slot, struct stream_ref *stream,
                   bool writes);
int slots_add(PyObject *module);
int slot_add(PyObject *module);

/* ---------------------------------------------------------------- timeline.c */

/* The log in a Log, borrowed; None and NULL give NULL and no exception. */
side_log *native_log(PyObject *object, const char *what, bool *failed);
int timeline_add(PyObject *module);

/* ---------------------------------------------------------------- waiting */

/* Seconds between two looks at signals. Above a millisecond, so that a wait spins first as it would alone. */
#define NATIVE_SLICE_S 0.05
/* Waits without the GIL in pieces, between which signals are looked at: -1 with an exception (KeyboardInterrupt, Stuck). timeout_s 0: for ever. */
int native_wait_stream(side_stream *stream, double timeout_s);
int native_wait_event(side_event *event, double timeout_s);

/* ---------------------------------------------------------------- feeder.c, host.c */

int feeder_add(PyObject *module); /* Feeder, Loan */
int host_add(PyObject *module);   /* HostBuffer, copies to the host, pins */

#endif
