/* SPDX-License-Identifier: MIT
 *
 * Streams: the counted handle with what must outlive queued work, and the Python class. Copies and named operations are in copy.c and ops.c. */
#include "native.h"

#include <structmember.h>

static PyTypeObject *stream_type;

/* ---------------------------------------------------------------- handle */

struct keep {
    struct keep *next;
    PyObject *object;
};

enum {
    MOST_BUSY = 64,  /* streams that one reap looks at */
    REAP_EVERY = 16, /* keeps; each look asks the device */
};

static struct stream_ref *busy; /* GIL; each holds a reference */

struct stream_ref *stream_hold(struct stream_ref *ref)
{
    atomic_fetch_add_explicit(&ref->refs, 1, memory_order_relaxed);
    return ref;
}

void stream_drop(struct stream_ref *ref)
{
    if (ref == NULL || !life_goes_on(ref->forks))
        return;
    if (atomic_fetch_sub_explicit(&ref->refs, 1, memory_order_acq_rel) != 1)
        return;
    side_event_destroy(ref->event);
    side_stream_destroy(ref->stream);
    device_drop(ref->device);
    free(ref);
}

static struct stream_ref *stream_make(struct device_ref *device, bool wrap, void *native)
{
    struct stream_ref *ref = calloc(1, sizeof(*ref));
    side_status s;

    if (ref == NULL)
        return (struct stream_ref *)(void *)PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    s = wrap ? side_stream_wrap(device->device, native, &ref->stream) : side_stream_create(device->device, &ref->stream);
    Py_END_ALLOW_THREADS
    if (s != SIDE_OK) {
        free(ref);
        return (struct stream_ref *)(void *)native_raise(s);
    }
    ref->refs = 1;
    ref->device = device_hold(device);
    ref->forks = life_forks();
    ref->wrapped = wrap;
    return ref;
}

/* ---------------------------------------------------------------- what queued work needs */

static void free_keeps(struct keep *keep)
{
    struct keep *next;

    for (; keep != NULL; keep = next) {
        next = keep->next;
        Py_DECREF(keep->object);
        free(keep);
    }
}

static struct keep *join_keeps(struct keep *a, struct keep *b)
{
    struct keep **end = &a;

    while (*end != NULL)
        end = &(*end)->next;
    *end = b;
    return a;
}

static void busy_add(struct stream_ref *ref)
{
    if (ref->is_busy)
        return;
    ref->is_busy = true;
    ref->busy = busy;
    busy = stream_hold(ref);
}

static void busy_check(struct stream_ref *ref)
{
    struct stream_ref **at = &busy;

    if (!ref->is_busy || ref->open != NULL || ref->covered != NULL || ref->reaping)
        return;
    while (*at != ref)
        at = &(*at)->busy;
    *at = ref->busy;
    ref->is_busy = false;
    stream_drop(ref);
}

static side_status cover(struct stream_ref *ref)
{
    side_status s = SIDE_OK;

    if (ref->event == NULL)
        s = side_event_create(ref->device->device, false, &ref->event);
    return s == SIDE_OK ? side_event_record(ref->event, ref->stream) : s;
}

/* The lists change while the GIL is released: `reaping` keeps others from this stream's event. An error for an answer is no answer: then all
 * stays. */
static void reap(struct stream_ref *ref)
{
    struct keep *done = NULL, *moved;
    side_status s = SIDE_OK;

    if (ref->reaping || ref->forks != life_forks())
        return;
    stream_hold(ref);
    ref->reaping = true;
    ref->kept = 0;
    if (ref->covered != NULL) {
        Py_BEGIN_ALLOW_THREADS
        s = side_event_query(ref->event);
        Py_END_ALLOW_THREADS
        if (s == SIDE_OK || s == SIDE_DEVICE_LOST) {
            done = ref->covered;
            ref->covered = NULL;
        }
    }
    if (ref->covered == NULL && ref->open != NULL) {
        moved = ref->open;
        ref->open = NULL;
        Py_BEGIN_ALLOW_THREADS
        s = cover(ref);
        Py_END_ALLOW_THREADS
        if (s == SIDE_OK)
            ref->covered = moved;
        else
            ref->open = join_keeps(moved, ref->open);
    }
    ref->reaping = false;
    busy_check(ref);
    free_keeps(done);
    stream_drop(ref);
}

void native_streams_reap(void)
{
    struct stream_ref *all[MOST_BUSY];
    PyObject *type, *value, *trace;
    size_t n = 0;

    if (busy == NULL)
        return;
    PyErr_Fetch(&type, &value, &trace);
    for (struct stream_ref *s = busy; s != NULL && n < MOST_BUSY; s = s->busy)
        all[n++] = stream_hold(s);
    for (size_t i = 0; i < n; i++) {
        reap(all[i]);
        stream_drop(all[i]);
    }
    PyErr_Restore(type, value, trace);
}

int native_stream_finish(struct stream_ref *ref, double timeout_s)
{
    struct keep *mine;
    int r;

    stream_hold(ref);
    mine = ref->reaping ? NULL : ref->covered; /* else the event is in use */
    if (mine != NULL)
        ref->covered = NULL;
    mine = join_keeps(mine, ref->open);
    ref->open = NULL;
    r = native_wait_stream(ref->stream, timeout_s);
    if (r != 0) {
        ref->open = join_keeps(mine, ref->open);
        mine = NULL;
    }
    busy_check(ref);
    free_keeps(mine);
    stream_drop(ref);
    return r;
}

void native_streams_finish(double timeout_s)
{
    struct stream_ref *all[MOST_BUSY];
    size_t n = 0;

    for (struct stream_ref *s = busy; s != NULL && n < MOST_BUSY; s = s->busy) {
        if (s->forks == life_forks())
            all[n++] = stream_hold(s);
    }
    for (size_t i = 0; i < n; i++) {
        if (native_stream_finish(all[i], timeout_s) != 0)
            PyErr_Clear();
        stream_drop(all[i]);
    }
}

void native_stream_keep(struct stream_ref *ref, PyObject *object)
{
    struct keep *keep = malloc(sizeof(*keep));
    PyObject *type, *value, *trace;

    if (keep == NULL) {
        PyErr_Fetch(&type, &value, &trace);
        if (native_wait_stream(ref->stream, 30) != 0) {
            PyErr_Clear();
            Py_INCREF(object); /* leaked rather than freed under a copy */
        }
        PyErr_Restore(type, value, trace);
        return;
    }
    keep->object = Py_NewRef(object);
    keep->next = ref->open;
    ref->open = keep;
    busy_add(ref);
    if (++ref->kept >= REAP_EVERY) {
        PyErr_Fetch(&type, &value, &trace);
        ref->kept = 0;
        native_streams_reap();
        PyErr_Restore(type, value, trace);
    }
}

/* ---------------------------------------------------------------- unwrapping */

struct stream_ref *native_stream(PyObject *object, const char *what)
{
    struct stream_ref *ref;

    if (!PyObject_TypeCheck(object, stream_type)) {
        PyErr_Format(PyExc_TypeError, "%s must be a sidestream.Stream, not %R", what, (PyObject *)Py_TYPE(object));
        return NULL;
    }
    ref = ((stream_object *)object)->ref;
    if (ref->forks != life_forks())
        return (struct stream_ref *)(void *)native_raise_text(SIDE_FORKED, "Stream", "%s is from before a fork", what);
    return ref;
}

struct stream_ref *native_stream_or_none(PyObject *object, const char *what, bool *failed)
{
    struct stream_ref *ref = object == NULL || object == Py_None ? NULL : native_stream(object, what);

    *failed = ref == NULL && object != NULL && object != Py_None;
    return ref;
}

/* ---------------------------------------------------------------- class */

static PyObject *stream_object_new(PyTypeObject *type, PyObject *device, bool wrap, void *native)
{
    struct device_ref *owner = native_device(device, "device");
    struct stream_ref *ref = owner == NULL ? NULL : stream_make(owner, wrap, native);
    stream_object *self;

    if (ref == NULL)
        return NULL;
    self = (stream_object *)PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        stream_drop(ref);
        return NULL;
    }
    self->ref = ref;
    self->owner = Py_NewRef(device);
    return (PyObject *)self;
}

PyObject *native_stream_new(PyObject *device)
{
    return stream_object_new(stream_type, device, false, NULL);
}

static PyObject *stream_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"device", NULL};
    PyObject *device;

    if (native_enter() != 0 || !native_parse(args, kwargs, "O:Stream", names, &device))
        return NULL;
    return stream_object_new(type, device, false, NULL);
}

static PyObject *stream_wrap(PyObject *type, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"device", "native", NULL};
    PyObject *device;
    unsigned long long native = 0;

    if (native_enter() != 0 || !native_parse(args, kwargs, "O|K:wrap", names, &device, &native))
        return NULL;
    return stream_object_new((PyTypeObject *)type, device, true, (void *)(uintptr_t)native);
}

static void stream_dealloc(PyObject *object)
{
    stream_object *self = (stream_object *)object;
    PyTypeObject *type = Py_TYPE(object);

    if (self->weakrefs != NULL)
        PyObject_ClearWeakRefs(object);
    stream_drop(self->ref);
    Py_XDECREF(self->owner);
    PyObject_Free(object);
    Py_DECREF(type);
    native_sweep();
}

static PyObject *stream_record(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"timing", NULL};
    struct stream_ref *ref = native_enter() == 0 ? native_stream(object, "stream") : NULL;
    side_event *event = NULL;
    side_status s;
    int timing = 0;

    if (ref == NULL || !native_parse(args, kwargs, "|p:record", names, &timing))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    s = side_event_create(ref->device->device, timing, &event);
    if (s == SIDE_OK) {
        s = side_event_record(event, ref->stream);
        if (s != SIDE_OK)
            side_event_destroy(event);
    }
    Py_END_ALLOW_THREADS
    return s == SIDE_OK ? native_event_new(ref->device, event, timing) : native_raise(s);
}

/* Another stream's tail, as it is now. */
static side_status wait_tail(struct stream_ref *ref, struct stream_ref *other)
{
    side_event *tail;
    side_status s = side_event_create(other->device->device, false, &tail);

    if (s != SIDE_OK)
        return s;
    s = side_event_record(tail, other->stream);
    if (s == SIDE_OK)
        s = side_stream_wait(ref->stream, tail);
    side_event_destroy(tail);
    return s;
}

static PyObject *stream_wait(PyObject *object, PyObject *arg)
{
    struct stream_ref *ref = native_enter() == 0 ? native_stream(object, "stream") : NULL, *other = NULL;
    event_object *event = NULL;
    side_status s;

    if (ref == NULL)
        return NULL;
    if (PyObject_TypeCheck(arg, stream_type))
        other = native_stream(arg, "event");
    else
        event = native_event(arg, "event");
    if (other == NULL && event == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    s = other != NULL ? wait_tail(ref, other) : side_stream_wait(ref->stream, event->event);
    Py_END_ALLOW_THREADS
    if (s != SIDE_OK)
        return native_raise(s);
    Py_RETURN_NONE;
}

static PyObject *stream_synchronize(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"timeout", NULL};
    struct stream_ref *ref = native_enter() == 0 ? native_stream(object, "stream") : NULL;
    double timeout = 0;

    if (ref == NULL || !native_parse(args, kwargs, "|d:synchronize", names, &timeout) ||
        native_stream_finish(ref, timeout) != 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *stream_native(PyObject *object, void *unused)
{
    struct stream_ref *ref = native_stream(object, "stream");
    (void)unused;
    return ref == NULL ? NULL : PyLong_FromVoidPtr(side_stream_native(ref->stream));
}

static PyObject *stream_device(PyObject *object, void *unused)
{
    (void)unused;
    return Py_NewRef(((stream_object *)object)->owner);
}

static PyObject *stream_wrapped(PyObject *object, void *unused)
{
    (void)unused;
    return PyBool_FromLong(((stream_object *)object)->ref->wrapped);
}

static PyObject *stream_repr(PyObject *object)
{
    struct stream_ref *ref = ((stream_object *)object)->ref;

    return PyUnicode_FromFormat("<sidestream.Stream of %s%s>", ref->device->props.spec,
                                ref->wrapped ? ", the caller's" : "");
}

/* clang-format off */
PyDoc_STRVAR(stream_doc,
"Stream(device)\n--\n\n"
"A queue of operations in order. It never synchronises with CUDA's legacy stream. Dropping it does not block:\n"
"queued work goes on.\n\n"
"Objects that are given to copy() and to the named operations are held until the work on them is done. Whether\n"
"it is, is looked at by synchronize(), by Event.wait()\n"
"and by every few further copies; so an idle stream may hold its last few objects for longer.");

static PyMethodDef stream_methods[] = {
    {"wrap", (PyCFunction)(void (*)(void))stream_wrap, METH_VARARGS | METH_KEYWORDS | METH_CLASS,
     "wrap($type, device, native=0)\n--\n\n"
     "A stream of the caller's: `native` is the number of a CUstream, as torch.cuda.Stream.cuda_stream (0: CUDA's\n"
     "legacy stream). It must outlive the wrapper, which does not destroy it. On sim: 0 makes a new stream, all else\n"
     "raises InvalidArgument."},
    {"record", (PyCFunction)(void (*)(void))stream_record, METH_VARARGS | METH_KEYWORDS,
     "record($self, timing=False)\n--\n\nA new Event: what is queued so far. Does not block."},
    {"wait", stream_wait, METH_O,
     "wait($self, event, /)\n--\n\n"
     "What is queued after this runs after the event, or after what is queued so far on another Stream. Does not\n"
     "block the host."},
    {"synchronize", (PyCFunction)(void (*)(void))stream_synchronize, METH_VARARGS | METH_KEYWORDS,
     "synchronize($self, timeout=0)\n--\n\n"
     "Blocks the host until all that was queued is done, at most `timeout` seconds (0: for ever), else raises Stuck.\n"
     "Other threads run meanwhile; Ctrl-C ends it."},
    {"copy", (PyCFunction)(void (*)(void))stream_copy, METH_VARARGS | METH_KEYWORDS,
     "copy($self, dst, src, nbytes=None, dst_offset=0, src_offset=0)\n--\n\n"
     "Queues one copy; at least one side is device memory. dst and src: Buffers, or contiguous objects with the\n"
     "buffer protocol or DLPack; both are held until the copy is done. nbytes (None: to the end of src) and offsets\n"
     "are bytes. From and to pageable host memory the driver may block (other threads run). Raises TooLarge,\n"
     "ValueError."},
    {"fill", (PyCFunction)(void (*)(void))stream_fill, METH_VARARGS | METH_KEYWORDS,
     "fill($self, dst, value=0)\n--\n\nSets every byte of device memory to `value` (0..255)."},
    {"matmul", (PyCFunction)(void (*)(void))stream_matmul, METH_VARARGS | METH_KEYWORDS,
     "matmul($self, out, a, b, math=\"fp32\")\n--\n\n"
     "out (m, n) = a (m, k) @ b (k, n), row-major device memory. math: fp32, tf32, bf16. Raises NoLibrary without\n"
     "cuBLAS."},
    {"cast", (PyCFunction)(void (*)(void))stream_cast, METH_VARARGS | METH_KEYWORDS,
     "cast($self, out, data)\n--\n\nout[i] = data[i], between float32, float16, bfloat16 and uint8, to the nearest even."},
    {"affine", (PyCFunction)(void (*)(void))stream_affine, METH_VARARGS | METH_KEYWORDS,
     "affine($self, out, data, scale=1.0, bias=0.0)\n--\n\nout[i] = scale * data[i] + bias, float32, for all of data; out may be longer, or data itself."},
    {"spin", (PyCFunction)(void (*)(void))stream_spin, METH_VARARGS | METH_KEYWORDS,
     "spin($self, seconds)\n--\n\nKeeps the compute engine busy, and touches no memory."},
    {"xxh3_blocks", (PyCFunction)(void (*)(void))stream_xxh3_blocks, METH_VARARGS | METH_KEYWORDS,
     "xxh3_blocks($self, out, data)\n--\n\nout (64 bytes a block): for each whole 1 KiB of data its XXH3 partial sums; see xxh3_digest."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef stream_getset[] = {
    {"native", stream_native, NULL, "The CUstream as a number, for launches of your own; 0 on sim.", NULL},
    {"device", stream_device, NULL, "The Device.", NULL},
    {"wrapped", stream_wrapped, NULL, "It is a stream of the caller's.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
/* clang-format on */

static PyMemberDef stream_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(stream_object, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot stream_slots[] = {
    {Py_tp_doc, (void *)(uintptr_t)stream_doc},
    {Py_tp_new, stream_new},
    {Py_tp_dealloc, stream_dealloc},
    {Py_tp_repr, stream_repr},
    {Py_tp_methods, stream_methods},
    {Py_tp_getset, stream_getset},
    {Py_tp_members, stream_members},
    {0, NULL},
};

static PyType_Spec stream_type_spec = {
    .name = "sidestream.Stream",
    .basicsize = sizeof(stream_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = stream_slots,
};

static void finish_at_exit(void)
{
    native_streams_finish(10);
}

int stream_add(PyObject *module)
{
    if (stream_type == NULL) {
        stream_type = (PyTypeObject *)PyType_FromSpec(&stream_type_spec);
        life_add_exit(finish_at_exit);
    }
    return stream_type == NULL ? -1 : PyModule_AddType(module, stream_type);
}
