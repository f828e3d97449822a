/* SPDX-License-Identifier: MIT
 *
 * Buffer: device or pinned memory with a shape and a type, for DLPack and the buffer protocol. */
#include "native.h"

#include <structmember.h>

static PyTypeObject *buffer_type;

bool native_is_buffer(PyObject *object)
{
    return PyObject_TypeCheck(object, buffer_type);
}

/* ---------------------------------------------------------------- making */

static void set_shape(buffer_object *self, int ndim, const Py_ssize_t *shape)
{
    Py_ssize_t stride = (Py_ssize_t)dtype_bytes(self->dtype);

    self->ndim = shape == NULL ? 1 : ndim;
    for (int i = self->ndim; i-- > 0;) {
        self->shape[i] = shape == NULL ? (Py_ssize_t)self->bytes / stride : shape[i];
        self->strides[i] = stride;
        stride *= self->shape[i] > 0 ? self->shape[i] : 1;
    }
}

PyObject *native_buffer_new(struct memory *memory, PyObject *owner, size_t offset, size_t bytes,
                            const struct dtype *dtype, int ndim, const Py_ssize_t *shape)
{
    buffer_object *self = (buffer_object *)PyType_GenericAlloc(buffer_type, 0);

    if (self == NULL) {
        memory_drop(memory);
        return NULL;
    }
    self->memory = memory;
    self->owner = Py_NewRef(owner);
    self->dtype = dtype;
    self->data = (char *)memory->data + offset;
    self->bytes = bytes;
    set_shape(self, ndim, shape);
    return (PyObject *)self;
}

static int add_dim(PyObject *number, int *ndim, Py_ssize_t shape[MOST_DIMS], size_t *bytes)
{
    Py_ssize_t n = number == NULL ? -1 : PyNumber_AsSsize_t(number, PyExc_OverflowError);

    if (number != NULL && !PyIndex_Check(number))
        PyErr_Format(PyExc_TypeError, "shape has %R in it; it takes a whole number, or a sequence of such", number);
    if (n == -1 && PyErr_Occurred())
        return -1;
    if (n < 0 || *ndim == MOST_DIMS || __builtin_mul_overflow(*bytes, (size_t)n, bytes) || *bytes > PY_SSIZE_T_MAX) {
        PyErr_Format(PyExc_ValueError, "shape: %d dimensions at most, each 0 or more, and less than 2**63 bytes in all",
                     (int)MOST_DIMS);
        return -1;
    }
    shape[(*ndim)++] = n;
    return 0;
}

int native_shape(PyObject *object, const struct dtype *dtype, int *ndim, Py_ssize_t shape[MOST_DIMS], size_t *bytes)
{
    Py_ssize_t n;

    *ndim = 0;
    *bytes = dtype_bytes(dtype);
    if (PyIndex_Check(object))
        return add_dim(object, ndim, shape, bytes);
    n = PySequence_Size(object);
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *number = PySequence_GetItem(object, i);
        int r = add_dim(number, ndim, shape, bytes);
        Py_XDECREF(number);
        if (r != 0)
            return -1;
    }
    return n < 0 ? -1 : 0;
}

static PyObject *device_make(PyObject *device, PyObject *shape, const struct dtype *dtype)
{
    struct device_ref *ref = native_enter() == 0 ? native_device(device, "device") : NULL;
    Py_ssize_t dims[MOST_DIMS];
    struct memory *memory;
    size_t bytes;
    void *data = NULL;
    side_status s;
    int ndim;

    if (ref == NULL || native_shape(shape, dtype, &ndim, dims, &bytes) != 0)
        return NULL;
    native_streams_reap();
    Py_BEGIN_ALLOW_THREADS
    s = side_device_alloc(ref->device, bytes > 0 ? bytes : 1, &data);
    Py_END_ALLOW_THREADS
    if (s != SIDE_OK)
        return native_raise(s);
    memory = memory_make(ref, SIDE_MEMORY_DEVICE, data, bytes);
    if (memory == NULL) {
        side_device_free(ref->device, data);
        return NULL;
    }
    return native_buffer_new(memory, device, 0, bytes, dtype, ndim, dims);
}

PyObject *device_alloc(PyObject *device, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"nbytes", NULL};
    PyObject *nbytes;

    if (!native_parse(args, kwargs, "O:alloc", names, &nbytes))
        return NULL;
    if (!PyIndex_Check(nbytes)) {
        PyErr_SetString(PyExc_TypeError, "nbytes must be a number; for a shape use empty()");
        return NULL;
    }
    return device_make(device, nbytes, native_dtype(NULL));
}

PyObject *device_empty(PyObject *device, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"shape", "dtype", NULL};
    PyObject *shape, *type = NULL;
    const struct dtype *dtype;

    if (!native_parse(args, kwargs, "O|O:empty", names, &shape, &type))
        return NULL;
    dtype = native_dtype(type);
    return dtype == NULL ? NULL : device_make(device, shape, dtype);
}

/* ---------------------------------------------------------------- class */

static void buffer_dealloc(PyObject *object)
{
    buffer_object *self = (buffer_object *)object;
    PyTypeObject *type = Py_TYPE(object);

    if (self->weakrefs != NULL)
        PyObject_ClearWeakRefs(object);
    memory_drop(self->memory);
    Py_XDECREF(self->owner);
    PyObject_Free(object);
    Py_DECREF(type);
    native_sweep();
}

static int buffer_getbuffer(PyObject *object, Py_buffer *view, int flags)
{
    buffer_object *self = (buffer_object *)object;

    view->obj = NULL;
    if (memory_check(self->memory) != 0)
        return -1;
    if (!memory_on_host(self->memory)) {
        PyErr_SetString(PyExc_BufferError, "the host cannot reach device memory; copy it with Stream.copy first");
        return -1;
    }
    if (self->dtype->format == NULL && (flags & PyBUF_FORMAT) != 0) {
        PyErr_Format(PyExc_BufferError, "%s has no buffer format; use view(\"uint16\") or DLPack", self->dtype->name);
        return -1;
    }
    if (memory_wait_written(self->memory) != 0)
        return -1;
    memset(view, 0, sizeof(*view));
    view->buf = self->data;
    view->obj = Py_NewRef(object);
    view->len = (Py_ssize_t)self->bytes;
    view->itemsize = (Py_ssize_t)dtype_bytes(self->dtype);
    view->ndim = 1;
    if ((flags & PyBUF_FORMAT) != 0)
        view->format = (char *)(uintptr_t)self->dtype->format; /* the struct lacks the const */
    if ((flags & PyBUF_ND) == PyBUF_ND) {
        view->ndim = self->ndim;
        view->shape = self->shape;
    }
    if ((flags & PyBUF_STRIDES) == PyBUF_STRIDES)
        view->strides = self->strides;
    return 0;
}

/* What numpy.asarray comes to where the buffer protocol refused: without this it would make an array of one object. */
static PyObject *buffer_array(PyObject *object, PyObject *args, PyObject *kwargs)
{
    buffer_object *self = (buffer_object *)object;
    (void)args, (void)kwargs;

    if (memory_check(self->memory) == 0)
        PyErr_Format(PyExc_TypeError, "%s",
                     memory_on_host(self->memory)
                         ? "this dtype has no buffer format; use view(\"uint16\") or DLPack"
                         : "the host cannot reach device memory; copy it with Stream.copy first");
    return NULL;
}

static PyObject *buffer_view(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"dtype", "shape", "offset", NULL};
    buffer_object *self = (buffer_object *)object;
    PyObject *type = Py_None, *shape = Py_None;
    const struct dtype *dtype;
    Py_ssize_t offset = 0, dims[MOST_DIMS];
    size_t bytes, start;
    int ndim;

    if (!native_parse(args, kwargs, "|OOn:view", names, &type, &shape, &offset) || memory_check(self->memory) != 0)
        return NULL;
    dtype = type == Py_None ? self->dtype : native_dtype(type);
    if (dtype == NULL)
        return NULL;
    if (offset < 0 || (size_t)offset > self->bytes || (size_t)offset % dtype_bytes(dtype) != 0)
        return PyErr_Format(PyExc_ValueError, "offset: 0..%zu bytes, a multiple of the element's %zu", self->bytes,
                            dtype_bytes(dtype));
    bytes = self->bytes - (size_t)offset;
    if (shape != Py_None && native_shape(shape, dtype, &ndim, dims, &bytes) != 0)
        return NULL;
    if ((size_t)offset + bytes > self->bytes || bytes % dtype_bytes(dtype) != 0)
        return PyErr_Format(PyExc_ValueError, "shape: takes %zu bytes from offset %zd; the buffer has %zu%s", bytes,
                            offset, self->bytes, shape == Py_None ? ", not a whole number of elements" : "");
    start = (size_t)(self->data - (char *)self->memory->data) + (size_t)offset;
    return native_buffer_new(memory_hold(self->memory), self->owner, start, bytes, dtype, ndim,
                             shape == Py_None ? NULL : dims);
}

static PyObject *buffer_used_on(PyObject *object, PyObject *arg)
{
    buffer_object *self = (buffer_object *)object;
    struct stream_ref *stream = native_enter() == 0 ? native_stream(arg, "stream") : NULL;

    if (stream == NULL || memory_check(self->memory) != 0)
        return NULL;
    memory_use(self->memory, stream, false);
    Py_RETURN_NONE;
}

static PyObject *buffer_data(PyObject *object, void *unused)
{
    buffer_object *self = (buffer_object *)object;
    (void)unused;
    return memory_check(self->memory) == 0 ? PyLong_FromVoidPtr(self->data) : NULL;
}

static PyObject *buffer_nbytes(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(((buffer_object *)object)->bytes);
}

static PyObject *buffer_shape(PyObject *object, void *unused)
{
    buffer_object *self = (buffer_object *)object;
    PyObject *shape = PyTuple_New(self->ndim);
    (void)unused;

    for (int i = 0; shape != NULL && i < self->ndim; i++) {
        PyObject *n = PyLong_FromSsize_t(self->shape[i]);
        if (n == NULL || PyTuple_SetItem(shape, i, n) != 0)
            Py_CLEAR(shape);
    }
    return shape;
}

static PyObject *buffer_dtype(PyObject *object, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(((buffer_object *)object)->dtype->name);
}

static PyObject *buffer_kind(PyObject *object, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(((buffer_object *)object)->memory->kind == SIDE_MEMORY_DEVICE ? "device" : "pinned");
}

static PyObject *buffer_device(PyObject *object, void *unused)
{
    (void)unused;
    return Py_NewRef(((buffer_object *)object)->owner);
}

static Py_ssize_t buffer_length(PyObject *object)
{
    buffer_object *self = (buffer_object *)object;

    if (self->ndim > 0)
        return self->shape[0];
    PyErr_SetString(PyExc_TypeError, "a buffer of no dimensions has no length");
    return -1;
}

static PyObject *buffer_repr(PyObject *object)
{
    buffer_object *self = (buffer_object *)object;
    PyObject *shape = buffer_shape(object, NULL), *text;

    if (shape == NULL)
        return NULL;
    text = PyUnicode_FromFormat("<sidestream.Buffer %R %s, %s memory of %s>", shape, self->dtype->name,
                                self->memory->kind == SIDE_MEMORY_DEVICE ? "device" : "pinned",
                                self->memory->device->props.spec);
    Py_DECREF(shape);
    return text;
}

/* clang-format off */
PyDoc_STRVAR(buffer_doc,
"Device or pinned memory with a shape and a dtype, in C order. Made by Device.alloc and .empty,\n"
"PinnedPool.alloc and .empty, and as the memory of slots and items.\n\n"
"Exports DLPack, and the buffer protocol where the host can reach it (pinned memory, and all memory of the\n"
"software device): numpy.asarray(b), numpy.from_dlpack(b), torch.from_dlpack(b). An export waits for what\n"
"copies and operations of this package queued to write it: the host blocks, a CUDA consumer's stream waits.\n\n"
"The memory lives as long as the buffer, its views and its exports. Then it is freed once what was queued on\n"
"the streams that used it is done; used_on() names streams that this package does not know of. Memory of slots\n"
"and items ends with them: later use raises WrongState, and exports must not be used any more.");

static PyMethodDef buffer_methods[] = {
    {"view", (PyCFunction)(void (*)(void))buffer_view, METH_VARARGS | METH_KEYWORDS,
     "view($self, dtype=None, shape=None, offset=0)\n--\n\n"
     "The same memory from `offset` (bytes) on, with another dtype or shape; one dimension over the rest where no\n"
     "shape is given."},
    {"used_on", buffer_used_on, METH_O,
     "used_on($self, stream, /)\n--\n\n"
     "Work of your own on `stream` uses the memory: it is not reused before what is queued there when the buffer\n"
     "dies is done."},
    {"__dlpack__", (PyCFunction)(void (*)(void))buffer_dlpack, METH_VARARGS | METH_KEYWORDS,
     "__dlpack__($self, *, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\nA DLPack capsule, as the array API says."},
    {"__dlpack_device__", buffer_dlpack_device, METH_NOARGS, "__dlpack_device__($self, /)\n--\n\n(type, number) of the device, as DLPack has them."},
    {"__array__", (PyCFunction)(void (*)(void))buffer_array, METH_VARARGS | METH_KEYWORDS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef buffer_getset[] = {
    {"data", buffer_data, NULL, "The address, as a number.", NULL},
    {"nbytes", buffer_nbytes, NULL, "Bytes.", NULL},
    {"shape", buffer_shape, NULL, "Elements in each dimension.", NULL},
    {"dtype", buffer_dtype, NULL, "As \"float32\".", NULL},
    {"kind", buffer_kind, NULL, "\"device\" or \"pinned\".", NULL},
    {"device", buffer_device, NULL, "The Device.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
/* clang-format on */

static PyMemberDef buffer_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(buffer_object, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot buffer_slots[] = {
    {Py_tp_doc, (void *)(uintptr_t)buffer_doc},
    {Py_tp_dealloc, buffer_dealloc},
    {Py_tp_repr, buffer_repr},
    {Py_tp_methods, buffer_methods},
    {Py_tp_getset, buffer_getset},
    {Py_tp_members, buffer_members},
    {Py_sq_length, buffer_length},
    {Py_bf_getbuffer, buffer_getbuffer},
    {0, NULL},
};

static PyType_Spec buffer_type_spec = {
    .name = "sidestream.Buffer",
    .basicsize = sizeof(buffer_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = buffer_slots,
};

int buffer_add(PyObject *module)
{
    if (buffer_type == NULL)
        buffer_type = (PyTypeObject *)PyType_FromSpec(&buffer_type_spec);
    return buffer_type == NULL ? -1 : PyModule_AddType(module, buffer_type);
}
