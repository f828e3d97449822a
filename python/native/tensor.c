/* SPDX-License-Identifier: MIT
 *
 * Memory out through DLPack, and in from Buffers, the buffer protocol and DLPack. */
#include "native.h"

/* ---------------------------------------------------------------- out */

/* One allocation holds the struct that the consumer gets, and the numbers that it points to. */
struct export
{
    union {
        dl_managed plain;
        dl_managed_versioned versioned;
    } as;
    struct memory *memory;
    int64_t numbers[]; /* shape, strides */
};

/* Any thread, with or without the GIL. */
static void export_delete(struct export *export)
{
    if (!life_goes_on(export->memory->forks))
        return;
    memory_drop(export->memory);
    free(export);
}

static void delete_plain(dl_managed *managed)
{
    export_delete(managed->context);
}

static void delete_versioned(dl_managed_versioned *managed)
{
    export_delete(managed->context);
}

/* Nobody took it. */
static void capsule_dies(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, DL_CAPSULE)) {
        dl_managed *plain = PyCapsule_GetPointer(capsule, DL_CAPSULE);
        plain->deleter(plain);
    } else if (PyCapsule_IsValid(capsule, DL_CAPSULE_VERSIONED)) {
        dl_managed_versioned *versioned = PyCapsule_GetPointer(capsule, DL_CAPSULE_VERSIONED);
        versioned->deleter(versioned);
    }
}

static void fill_tensor(dl_tensor *tensor, const buffer_object *buffer, dl_device device, int64_t *numbers)
{
    for (int i = 0; i < buffer->ndim; i++) {
        numbers[i] = buffer->shape[i];
        numbers[buffer->ndim + i] = buffer->strides[i] / (Py_ssize_t)dtype_bytes(buffer->dtype);
    }
    tensor->data = buffer->data;
    tensor->device = device;
    tensor->ndim = buffer->ndim;
    tensor->dtype = buffer->dtype->type;
    tensor->shape = numbers;
    tensor->strides = numbers + buffer->ndim;
    tensor->byte_offset = 0;
}

static PyObject *export_capsule(buffer_object *buffer, dl_device device, bool versioned)
{
    struct export *export = calloc(1, sizeof(*export) + 2 * (size_t)buffer->ndim * sizeof(int64_t));
    PyObject *capsule;

    if (export == NULL)
        return PyErr_NoMemory();
    export->memory = memory_hold(buffer->memory);
    if (versioned) {
        fill_tensor(&export->as.versioned.tensor, buffer, device, export->numbers);
        export->as.versioned.major = 1;
        export->as.versioned.context = export;
        export->as.versioned.deleter = delete_versioned;
        capsule = PyCapsule_New(&export->as.versioned, DL_CAPSULE_VERSIONED, capsule_dies);
    } else {
        fill_tensor(&export->as.plain.tensor, buffer, device, export->numbers);
        export->as.plain.context = export;
        export->as.plain.deleter = delete_plain;
        capsule = PyCapsule_New(&export->as.plain, DL_CAPSULE, capsule_dies);
    }
    if (capsule == NULL)
        export_delete(export);
    return capsule;
}

static dl_device device_of(const struct memory *memory)
{
    if (memory_on_host(memory))
        return (dl_device){DL_CPU, 0};
    return (dl_device){DL_CUDA, memory->device->props.ordinal};
}

PyObject *buffer_dlpack_device(PyObject *object, PyObject *unused)
{
    dl_device device = device_of(((buffer_object *)object)->memory);
    (void)unused;
    return Py_BuildValue("(ii)", (int)device.type, (int)device.id);
}

/* The consumer's stream waits for what wrote the memory. */
static int stream_waits(struct memory *memory, long long native)
{
    side_stream *consumer;
    side_status s;

    if (memory->written == NULL)
        return 0;
    memory_hold(memory);
    Py_BEGIN_ALLOW_THREADS
    s = side_stream_wrap(memory->device->device, (void *)(uintptr_t)native, &consumer);
    if (s == SIDE_OK) {
        s = side_stream_wait(consumer, memory->written);
        side_stream_destroy(consumer);
    }
    Py_END_ALLOW_THREADS
    if (s != SIDE_OK)
        native_raise(s);
    memory_drop(memory);
    return s == SIDE_OK ? 0 : -1;
}

/* None is CUDA's legacy stream, which is 1; 2 is the thread's own; -1 asks for no order. */
static int order_consumer(buffer_object *buffer, PyObject *stream)
{
    long long native = 1;

    if (stream != Py_None) {
        native = PyLong_AsLongLong(stream);
        if (native == -1 && PyErr_Occurred())
            return -1;
    }
    if (memory_on_host(buffer->memory)) {
        if (stream == Py_None)
            return memory_wait_written(buffer->memory);
        PyErr_SetString(PyExc_ValueError, "stream: memory that the host reaches takes None");
        return -1;
    }
    if (native == 0 || native < -1) {
        PyErr_SetString(PyExc_ValueError,
                        "stream: 1 is CUDA's legacy stream, 2 the thread's own, -1 asks for no order; 0 is ambiguous");
        return -1;
    }
    return native == -1 ? 0 : stream_waits(buffer->memory, native);
}

/* What the consumer wants it as: the device itself, or CUDA's pinned memory for pinned memory of a GPU. */
static int wanted_device(const buffer_object *buffer, PyObject *wanted, dl_device *device)
{
    int type, id;

    *device = device_of(buffer->memory);
    if (wanted == Py_None)
        return 0;
    if (!PyArg_Parse(wanted, "(ii)", &type, &id))
        return -1;
    if (type == device->type && id == device->id)
        return 0;
    if (type == DL_CUDA_HOST && buffer->memory->kind == SIDE_MEMORY_PINNED && !buffer->memory->device->props.simulated) {
        *device = (dl_device){DL_CUDA_HOST, 0};
        return 0;
    }
    PyErr_Format(PyExc_BufferError, "dl_device: the memory is on (%d, %d) and is not copied", (int)device->type,
                 (int)device->id);
    return -1;
}

PyObject *buffer_dlpack(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"stream", "max_version", "dl_device", "copy", NULL};
    buffer_object *self = (buffer_object *)object;
    PyObject *stream = Py_None, *version = Py_None, *wanted = Py_None, *copy = Py_None;
    dl_device device;
    int major = 0, minor = 0;

    if (native_enter() != 0 ||
        !native_parse(args, kwargs, "|$OOOO:__dlpack__", names, &stream, &version, &wanted, &copy))
        return NULL;
    if (version != Py_None && !PyArg_Parse(version, "(ii)", &major, &minor))
        return NULL;
    if (copy != Py_None && PyObject_IsTrue(copy) != 0) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_BufferError, "copy: the memory is shared, never copied; copy what you get");
        return NULL;
    }
    if (memory_check(self->memory) != 0 || wanted_device(self, wanted, &device) != 0 ||
        order_consumer(self, stream) != 0)
        return NULL;
    return export_capsule(self, device, major >= 1);
}

/* ---------------------------------------------------------------- in */

static const struct dtype *format_dtype(const Py_buffer *view)
{
    static const char letters[] = "bBhHiIlLqQ";
    const char *format = view->format != NULL ? view->format : "B";
    dl_type type = {DL_UINT, (uint8_t)(view->itemsize * 8), 1};
    const char *letter;

    if (*format == '@' || *format == '=' || *format == '<')
        format++;
    letter = strchr(letters, *format);
    if (*format == 0 || (format[1] != 0 && *format != 'Z'))
        return NULL;
    if (letter != NULL)
        type.code = (letter - letters) % 2 == 0 ? DL_INT : DL_UINT;
    else if (*format == 'e' || *format == 'f' || *format == 'd')
        type.code = DL_FLOAT;
    else if (*format == '?')
        type.code = DL_BOOL;
    else if (*format == 'Z')
        type.code = DL_COMPLEX;
    else
        return NULL;
    return dtype_of_dl(type);
}

static int set_dims(struct operand *operand, int ndim, const Py_ssize_t *shape, const char *what)
{
    if (ndim > MOST_DIMS) {
        PyErr_Format(PyExc_ValueError, "%s: %d dimensions, over %d", what, ndim, (int)MOST_DIMS);
        return -1;
    }
    operand->ndim = ndim;
    for (int i = 0; i < ndim; i++)
        operand->shape[i] = shape[i];
    return 0;
}

/* The memory view keeps the export open, and so the memory where it is, for as long as it is kept. */
static int from_view(struct operand *operand, PyObject *object, bool writes, const char *what)
{
    int flags = PyBUF_C_CONTIGUOUS | (writes ? PyBUF_WRITABLE : 0), r;
    Py_buffer view;

    operand->keep = PyMemoryView_FromObject(object);
    if (operand->keep == NULL)
        return -1;
    if (PyObject_GetBuffer(operand->keep, &view, flags | PyBUF_FORMAT) != 0) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s must be contiguous%s; copy it first (numpy.ascontiguousarray)", what,
                     writes ? " and writable" : "");
        return -1;
    }
    operand->data = view.buf;
    operand->bytes = (size_t)view.len;
    operand->dtype = format_dtype(&view);
    r = set_dims(operand, view.ndim, view.shape, what);
    PyBuffer_Release(&view);
    return r;
}

static int from_tensor(struct operand *operand, const dl_tensor *tensor, const struct device_ref *device,
                       const char *what)
{
    int64_t expected = 1;
    Py_ssize_t shape[MOST_DIMS];
    bool dense = tensor->ndim <= MOST_DIMS;

    for (int i = tensor->ndim; dense && i-- > 0;) {
        dense = tensor->strides == NULL || tensor->shape[i] <= 1 || tensor->strides[i] == expected;
        expected *= tensor->shape[i];
        shape[i] = (Py_ssize_t)tensor->shape[i];
    }
    if (!dense && expected != 0) {
        PyErr_Format(PyExc_ValueError, "%s must be contiguous; call contiguous() first", what);
        return -1;
    }
    if (tensor->device.type == DL_CUDA && (device->props.simulated || tensor->device.id != device->props.ordinal)) {
        PyErr_Format(PyExc_ValueError, "%s is on CUDA device %d, the stream on %s", what, (int)tensor->device.id,
                     device->props.spec);
        return -1;
    }
    operand->kind = tensor->device.type == DL_CUDA ? SIDE_MEMORY_DEVICE : SIDE_MEMORY_PAGEABLE;
    operand->data = (char *)tensor->data + tensor->byte_offset;
    operand->dtype = dtype_of_dl(tensor->dtype);
    operand->bytes = (size_t)expected * (((size_t)tensor->dtype.bits * tensor->dtype.lanes + 7) / 8);
    return set_dims(operand, tensor->ndim, shape, what);
}

/* A producer on a GPU is told our stream, which it makes wait for its own. */
static PyObject *ask_capsule(PyObject *object, struct stream_ref *stream, const char *what)
{
    PyObject *device = PyObject_CallMethod(object, "__dlpack_device__", NULL), *method, *kwargs, *args, *capsule = NULL;
    uintptr_t native = stream == NULL ? 0 : (uintptr_t)side_stream_native(stream->stream);
    int type, id;

    if (device == NULL || !PyArg_Parse(device, "(ii)", &type, &id)) {
        Py_XDECREF(device);
        return NULL;
    }
    Py_DECREF(device);
    if (stream == NULL && type == DL_CUDA) {
        PyErr_Format(PyExc_ValueError, "%s must be host memory", what);
        return NULL;
    }
    method = PyObject_GetAttrString(object, "__dlpack__");
    args = PyTuple_New(0);
    kwargs = type == DL_CUDA ? Py_BuildValue("{s:K}", "stream", (unsigned long long)(native != 0 ? native : 1))
                             : PyDict_New();
    if (method != NULL && args != NULL && kwargs != NULL)
        capsule = PyObject_Call(method, args, kwargs);
    Py_XDECREF(method);
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    return capsule;
}

static int from_dlpack(struct operand *operand, PyObject *object, struct device_ref *device, struct stream_ref *stream,
                       bool writes, const char *what)
{
    const dl_managed_versioned *versioned;
    const dl_managed *plain;

    operand->keep = ask_capsule(object, stream, what);
    if (operand->keep == NULL)
        return -1;
    if (PyCapsule_IsValid(operand->keep, DL_CAPSULE)) {
        plain = PyCapsule_GetPointer(operand->keep, DL_CAPSULE);
        return from_tensor(operand, &plain->tensor, device, what);
    }
    versioned = PyCapsule_GetPointer(operand->keep, DL_CAPSULE_VERSIONED);
    if (versioned == NULL)
        return -1;
    if (writes && (versioned->flags & DL_READ_ONLY) != 0) {
        PyErr_Format(PyExc_ValueError, "%s is read-only", what);
        return -1;
    }
    return from_tensor(operand, &versioned->tensor, device, what);
}

static int from_buffer(struct operand *operand, buffer_object *buffer, struct device_ref *device, const char *what)
{
    if (memory_check(buffer->memory) != 0)
        return -1;
    if (buffer->memory->device != device) {
        PyErr_Format(PyExc_ValueError, "%s belongs to another opening of a device", what);
        return -1;
    }
    operand->keep = Py_NewRef((PyObject *)buffer);
    operand->memory = buffer->memory;
    operand->data = buffer->data;
    operand->bytes = buffer->bytes;
    operand->kind = buffer->memory->kind;
    operand->dtype = buffer->dtype;
    return set_dims(operand, buffer->ndim, buffer->shape, what);
}

/* Memory of the software device is host memory for everybody else. */
static int look_up_kind(struct operand *operand, struct stream_ref *stream)
{
    side_status s = SIDE_OK;

    if (operand->kind == SIDE_MEMORY_DEVICE || operand->bytes == 0 || !stream->device->props.simulated)
        return 0;
    Py_BEGIN_ALLOW_THREADS
    s = side_memory_get_kind(stream->device->device, operand->data, &operand->kind);
    Py_END_ALLOW_THREADS
    if (s != SIDE_OK)
        native_raise(s);
    return s == SIDE_OK ? 0 : -1;
}

static int get_any(struct operand *operand, PyObject *object, struct device_ref *device, struct stream_ref *stream,
                   bool writes, const char *what)
{
    memset(operand, 0, sizeof(*operand));
    if (native_is_buffer(object))
        return from_buffer(operand, (buffer_object *)object, device, what);
    if (PyObject_CheckBuffer(object))
        return from_view(operand, object, writes, what);
    if (PyObject_HasAttrString(object, "__dlpack__"))
        return from_dlpack(operand, object, device, stream, writes, what);
    PyErr_Format(PyExc_TypeError, "%s must be a Buffer, or have the buffer protocol or DLPack, not %R", what,
                 (PyObject *)Py_TYPE(object));
    return -1;
}

int operand_get(struct operand *operand, PyObject *object, struct stream_ref *stream, bool writes, const char *what)
{
    if (get_any(operand, object, stream->device, stream, writes, what) == 0 && look_up_kind(operand, stream) == 0)
        return 0;
    operand_drop(operand);
    return -1;
}

int operand_get_host(struct operand *operand, PyObject *object, struct device_ref *device, bool writes, const char *what)
{
    int r = get_any(operand, object, device, NULL, writes, what);

    if (r == 0 && operand->kind == SIDE_MEMORY_DEVICE) {
        PyErr_Format(PyExc_ValueError, "%s must be host memory", what);
        r = -1;
    }
    if (r == 0 && operand->memory != NULL)
        r = memory_wait_written(operand->memory);
    if (r != 0)
        operand_drop(operand);
    return r;
}

void operand_used(struct operand *operand, struct stream_ref *stream, bool writes)
{
    if (operand->memory != NULL)
        memory_use(operand->memory, stream, writes);
    else if (operand->keep != NULL)
        native_stream_keep(stream, operand->keep);
}

void operand_drop(struct operand *operand)
{
    Py_CLEAR(operand->keep);
    operand->memory = NULL;
}
