/* SPDX-License-Identifier: MIT
 *
 * Results on their way back: pinned memory that tensors own, copies into it behind a stream's work; and pinning in place. */
#include "native.h"

#include "loan.h"

#define STUCK_S 30.0 /* longest wait for a copy that no event covers */

/* Pinned memory; the HostBuffer and each capsule of it hold a reference. */
struct host_block {
    atomic_uint refs;
    struct device_ref *device;
    side_pool *pool; /* the device's own: lives as long as it */
    void *data;
    size_t bytes;
    /* That copies were queued on. Added to by copy_d2h, which has a reference and the GIL; read by whoever drops the last one. */
    struct stream_ref **streams;
    size_t count;
};

typedef struct host_object {
    PyObject_HEAD
    struct host_block *block;
} host_object;

static PyTypeObject *host_type;

/* ---------------------------------------------------------------- blocks */

/* Any thread, with or without the GIL: side_pool_free records events and takes side_pool.mutex, which nobody holds while he waits for memory or the GIL. Copies
 * that are still queued are waited for by the pool, not here. */
static void block_drop(struct host_block *b)
{
    side_stream *streams[16];
    size_t n = b->count < 16 ? b->count : 16;

    if (!life_goes_on(b->device->forks) || atomic_fetch_sub_explicit(&b->refs, 1, memory_order_acq_rel) > 1)
        return;
    for (size_t i = 0; i < n; i++)
        streams[i] = b->streams[i]->stream;
    (void)side_pool_free(b->pool, b->data, streams, n);
    for (size_t i = 0; i < b->count; i++)
        stream_drop(b->streams[i]);
    device_drop(b->device);
    free(b->streams);
    free(b);
}

/* Notes that `stream` will write to the block. False with an exception. */
static bool block_note(struct host_block *b, struct stream_ref *stream)
{
    struct stream_ref **more;

    for (size_t i = 0; i < b->count; i++)
        if (b->streams[i] == stream)
            return true;
    if (b->count == 16) {
        native_raise_text(SIDE_TOO_LARGE, "copy_d2h", "copies of 16 streams went to this buffer already; make another");
        return false;
    }
    more = realloc(b->streams, (b->count + 1) * sizeof(*more));
    if (more == NULL) {
        PyErr_NoMemory();
        return false;
    }
    b->streams = more;
    b->streams[b->count++] = stream_hold(stream);
    return true;
}

static PyObject *host_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"device", "nbytes", NULL};
    PyObject *device_arg;
    struct device_ref *device;
    struct host_block *b;
    host_object *self;
    Py_ssize_t bytes;
    side_status r;

    if (native_enter() != 0 || !native_parse(args, kwargs, "On:HostBuffer", names, &device_arg, &bytes))
        return NULL;
    if (bytes < 1)
        return native_raise_text(SIDE_INVALID, "HostBuffer", "nbytes is %zd; it takes 1 and more", bytes);
    device = native_device(device_arg, "device");
    if (device == NULL)
        return NULL;
    self = (host_object *)PyType_GenericAlloc(type, 0);
    b = calloc(1, sizeof(*b));
    if (self == NULL || b == NULL) {
        Py_XDECREF((PyObject *)self);
        free(b);
        return PyErr_NoMemory();
    }
    b->device = device_hold(device);
    Py_BEGIN_ALLOW_THREADS;
    r = side_device_pool(device->device, &b->pool);
    if (r == SIDE_OK)
        r = side_pool_alloc(b->pool, (size_t)bytes, &b->data);
    Py_END_ALLOW_THREADS;
    if (r != SIDE_OK) {
        native_raise(r);
        device_drop(device);
        free(b);
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    b->refs = 1;
    b->bytes = (size_t)bytes;
    self->block = b;
    return (PyObject *)self;
}

static void host_dealloc(PyObject *object)
{
    host_object *self = (host_object *)object;
    PyTypeObject *type = Py_TYPE(object);

    if (self->block != NULL)
        block_drop(self->block);
    PyObject_Free(object);
    Py_DECREF(type);
    life_sweep();
}

/* ---------------------------------------------------------------- capsules */

struct host_tensor {
    dl_managed managed; /* context: the block */
    int64_t shape[];
};

static void host_deleter(dl_managed *self)
{
    struct host_block *b = self->context;

    if (!life_goes_on(b->device->forks))
        return;
    free((struct host_tensor *)self);
    block_drop(b);
}

static void capsule_end(PyObject *capsule)
{
    dl_managed *managed;

    if (!PyCapsule_IsValid(capsule, DL_CAPSULE))
        return;
    managed = PyCapsule_GetPointer(capsule, DL_CAPSULE);
    managed->deleter(managed);
}

/* The shape of a C-ordered tensor that fits into the block. False with an exception. */
static bool shape_parse(const struct host_block *b, PyObject *shape, int bits, struct host_tensor *t)
{
    Py_ssize_t dims = PyTuple_Size(shape);
    size_t bytes = ((size_t)bits + 7) / 8;

    for (Py_ssize_t i = 0; i < dims; i++) {
        long long v = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
        if (v < 0 && PyErr_Occurred())
            return false;
        if (v < 0 || __builtin_mul_overflow(bytes, (size_t)v, &bytes))
            bytes = SIZE_MAX;
        t->shape[i] = v;
        if (bytes == SIZE_MAX)
            break;
    }
    if (bytes <= b->bytes)
        return true;
    native_raise_text(SIDE_TOO_LARGE, "HostBuffer.capsule", "shape and dtype do not fit into the buffer's %zu bytes",
                      b->bytes);
    return false;
}

static PyObject *host_capsule(PyObject *object, PyObject *args)
{
    struct host_block *b = ((host_object *)object)->block;
    struct host_tensor *t;
    PyObject *shape, *capsule;
    int code, bits;

    if (native_enter() != 0 || !PyArg_ParseTuple(args, "iiO!:capsule", &code, &bits, &PyTuple_Type, &shape))
        return NULL;
    if (code < 0 || code > 255 || bits < 1 || bits > 255 || PyTuple_Size(shape) > 64)
        return native_raise_text(SIDE_INVALID, "HostBuffer.capsule",
                                 "no tensor has dtype code %d, %d bits and %zd dimensions", code, bits,
                                 PyTuple_Size(shape));
    t = calloc(1, sizeof(*t) + (size_t)PyTuple_Size(shape) * sizeof(t->shape[0]));
    if (t == NULL)
        return PyErr_NoMemory();
    if (!shape_parse(b, shape, bits, t)) {
        free(t);
        return NULL;
    }
    t->managed.tensor = (dl_tensor){
        .data = b->data, .device = {DL_CPU, 0}, .ndim = (int32_t)PyTuple_Size(shape), .shape = t->shape};
    t->managed.tensor.dtype = (dl_type){(uint8_t)code, (uint8_t)bits, 1};
    t->managed.context = b;
    t->managed.deleter = host_deleter;
    atomic_fetch_add_explicit(&b->refs, 1, memory_order_relaxed);
    capsule = PyCapsule_New(&t->managed, DL_CAPSULE, capsule_end);
    if (capsule == NULL)
        host_deleter(&t->managed);
    return capsule;
}

static PyObject *host_data(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromVoidPtr(((host_object *)object)->block->data);
}

static PyObject *host_nbytes(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(((host_object *)object)->block->bytes);
}

/* ---------------------------------------------------------------- copies */

/* `to` waits for what `after` has queued so far. */
static side_status order_after(side_device *device, side_stream *to, side_stream *after)
{
    side_event *point;
    side_status r = side_event_create(device, false, &point);

    if (r != SIDE_OK)
        return r;
    r = side_event_record(point, after);
    if (r == SIDE_OK)
        r = side_stream_wait(to, point);
    side_event_destroy(point);
    return r;
}

/* Queues the copy; *done is recorded behind it. Without the GIL. A copy that no event can cover is waited for before the failure is told. */
static side_status copy_queue(side_stream *stream, void *dst, const void *src, size_t bytes, side_event **done)
{
    side_status r = side_event_create(side_stream_device(stream), false, done);

    if (r != SIDE_OK)
        return r;
    r = side_copy_async(stream, SIDE_COPY_D2H, dst, src, bytes);
    if (r == SIDE_OK)
        r = side_event_record(*done, stream);
    if (r == SIDE_OK)
        return r;
    (void)side_stream_sync(stream, STUCK_S);
    side_event_destroy(*done);
    return r;
}

/* SIDE_STATE with *captured: `after` captures a graph, and what is recorded there orders nothing. */
static side_status copy_d2h(side_stream *stream, long long after, const struct host_block *dst, const void *src,
                            size_t bytes, side_event **done, bool *captured)
{
    side_device *device = side_stream_device(stream);
    side_stream *wrapped;
    side_status r = SIDE_OK;

    *captured = false;
    if (after != -1) {
        r = side_stream_wrap(device, (void *)(uintptr_t)after, &wrapped);
        if (r != SIDE_OK)
            return r;
        *captured = atomic_load(&loan_capturing)(wrapped);
        r = *captured ? SIDE_STATE : order_after(device, stream, wrapped);
        side_stream_destroy(wrapped);
    }
    return r == SIDE_OK ? copy_queue(stream, dst->data, src, bytes, done) : r;
}

static PyObject *host_copy(PyObject *module, PyObject *args)
{
    PyObject *device_arg, *stream_arg, *dst_arg;
    struct device_ref *device;
    struct stream_ref *stream;
    struct host_block *dst;
    unsigned long long src;
    side_event *done = NULL;
    bool captured;
    long long after;
    Py_ssize_t bytes;
    side_status r;
    (void)module;

    if (native_enter() != 0 || !PyArg_ParseTuple(args, "OOLO!Kn:copy_d2h", &device_arg, &stream_arg, &after, host_type,
                                                 &dst_arg, &src, &bytes))
        return NULL;
    device = native_device(device_arg, "device");
    stream = device != NULL ? native_stream(stream_arg, "copy_stream") : NULL;
    if (stream == NULL)
        return NULL;
    dst = ((host_object *)dst_arg)->block;
    if (bytes < 1 || (size_t)bytes > dst->bytes)
        return native_raise_text(SIDE_TOO_LARGE, "copy_d2h", "nbytes is %zd; dst takes 1 to %zu", bytes, dst->bytes);
    if (stream->device != device || dst->device != device)
        return native_raise_text(SIDE_INVALID, "copy_d2h", "%s is of another device",
                                 stream->device != device ? "copy_stream" : "dst");
    if (!block_note(dst, stream))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    r = copy_d2h(stream->stream, after, dst, (const void *)(uintptr_t)src, (size_t)bytes, &done, &captured);
    Py_END_ALLOW_THREADS;
    if (captured)
        return native_raise_text(SIDE_STATE, "copy_d2h",
                                 "after_stream is capturing a graph: copy outside of the capture");
    return r == SIDE_OK ? native_event_new(device, done, false) : native_raise(r);
}

/* ---------------------------------------------------------------- pins */

static PyObject *host_pin(PyObject *module, PyObject *args)
{
    struct device_ref *device;
    unsigned long long address;
    PyObject *device_arg;
    Py_ssize_t bytes;
    side_status r;
    (void)module;

    if (native_enter() != 0 || !PyArg_ParseTuple(args, "OKn:pin", &device_arg, &address, &bytes))
        return NULL;
    if (bytes < 1)
        return native_raise_text(SIDE_INVALID, "pin", "nbytes is %zd; it takes 1 and more", bytes);
    device = native_device(device_arg, "device");
    if (device == NULL)
        return NULL;
    device_hold(device); /* another thread may close the Device meanwhile */
    Py_BEGIN_ALLOW_THREADS;
    r = side_memory_pin(device->device, (const void *)(uintptr_t)address, (size_t)bytes);
    Py_END_ALLOW_THREADS;
    device_drop(device);
    if (r != SIDE_OK)
        return native_raise(r);
    Py_RETURN_NONE;
}

static PyObject *host_unpin(PyObject *module, PyObject *args)
{
    struct device_ref *device;
    unsigned long long address;
    PyObject *device_arg;
    side_status r;
    (void)module;

    if (native_enter() != 0 || !PyArg_ParseTuple(args, "OK:unpin", &device_arg, &address))
        return NULL;
    device = native_device(device_arg, "device");
    if (device == NULL)
        return NULL;
    device_hold(device);
    Py_BEGIN_ALLOW_THREADS;
    r = side_memory_unpin(device->device, (const void *)(uintptr_t)address);
    Py_END_ALLOW_THREADS;
    device_drop(device);
    if (r != SIDE_OK)
        return native_raise(r);
    Py_RETURN_NONE;
}

static PyObject *host_fork_count(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyLong_FromUnsignedLong(life_forks_made());
}

/* ---------------------------------------------------------------- module */

/* clang-format off */
static PyMethodDef host_functions[] = {
    {"copy_d2h", host_copy, METH_VARARGS,
     "copy_d2h($module, device, copy_stream, after_stream, dst, src, nbytes, /)\n--\n\n"
     "Queues a copy from device memory at `src` to the start of `dst` on `copy_stream`, after what `after_stream`\n"
     "(native handle; -1: nothing) has queued so far. Returns the Event behind it. `src` must live until that is\n"
     "done; `dst` looks after itself."},
    {"pin", host_pin, METH_VARARGS,
     "pin($module, device, address, nbytes, /)\n--\n\nPins memory in place. It must stay mapped until unpin. Raises OverBudget over the pinned budget."},
    {"unpin", host_unpin, METH_VARARGS, "unpin($module, device, address, /)\n--\n\nUndoes pin of that address. Copies on it must be done."},
    {"fork_count", host_fork_count, METH_NOARGS,
     "fork_count($module, /)\n--\n\nCalls of fork() since the module was loaded, by this process and those it was forked from."},
    {NULL, NULL, 0, NULL},
};

static const char host_doc[] =
    "HostBuffer(device, nbytes)\n--\n\n"
    "Pinned memory from the device's pool. It goes back there once this object and all tensors made of its capsules\n"
    "are gone, and copies into it are done. Raises OverBudget where that much may not be pinned.";

static PyMethodDef host_methods[] = {
    {"capsule", host_capsule, METH_VARARGS,
     "capsule($self, dtype_code, dtype_bits, shape, /)\n--\n\nA DLPack capsule of a C-ordered CPU tensor at the start of the buffer; it holds the memory."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef host_getset[] = {
    {"data", host_data, NULL, "Address.", NULL},
    {"nbytes", host_nbytes, NULL, "As asked for.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
/* clang-format on */

static PyType_Slot host_slots[] = {
    {Py_tp_doc, (void *)(uintptr_t)host_doc},
    {Py_tp_new, host_new},
    {Py_tp_dealloc, host_dealloc},
    {Py_tp_methods, host_methods},
    {Py_tp_getset, host_getset},
    {0, NULL},
};

static PyType_Spec host_spec = {
    .name = "sidestream._native.HostBuffer",
    .basicsize = sizeof(host_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = host_slots,
};

int host_add(PyObject *module)
{
    if (host_type == NULL)
        host_type = (PyTypeObject *)PyType_FromSpec(&host_spec);
    if (host_type == NULL || PyModule_AddType(module, host_type) != 0)
        return -1;
    return PyModule_AddFunctions(module, host_functions);
}
