/* SPDX-License-Identifier: MIT
 *
 * Item: one item at the compute stage, and the memory of its data and result as Buffers. */
#include "pipeline.h"

static PyTypeObject *item_type;

typedef struct item_object {
    PyObject_HEAD
    struct pipeline_ref *ref;
    side_item item;
    size_t capacity; /* of the result */
    bool over;
    PyObject *data, *result; /* Buffers; made when they are asked for */
} item_object;

PyObject *item_new(struct pipeline_ref *ref, const side_item *item)
{
    item_object *self = (item_object *)PyType_GenericAlloc(item_type, 0);

    if (self == NULL)
        return NULL;
    self->ref = pipeline_hold(ref);
    self->item = *item;
    self->capacity = item->result_bytes;
    return (PyObject *)self;
}

const side_item *item_get(PyObject *object, const struct pipeline_ref *ref)
{
    item_object *self = (item_object *)object;

    if (PyObject_TypeCheck(object, item_type) && self->over)
        native_raise_text(SIDE_STATE, "Pipeline.done", "item %llu is done already",
                          (unsigned long long)self->item.number);
    else if (!PyObject_TypeCheck(object, item_type) || self->ref != ref)
        PyErr_SetString(PyExc_TypeError, "item must be an Item of this pipeline");
    else
        return &self->item;
    return NULL;
}

bool item_is_over(PyObject *object)
{
    return ((item_object *)object)->over;
}

static void end_buffer(PyObject **buffer)
{
    if (*buffer != NULL)
        ((buffer_object *)*buffer)->memory->ended = true;
    Py_CLEAR(*buffer);
}

size_t item_end(PyObject *object)
{
    item_object *self = (item_object *)object;

    if (!self->over) {
        self->over = true;
        end_buffer(&self->data);
        end_buffer(&self->result);
        pipeline_drop(self->ref);
        self->ref = NULL;
    }
    return self->item.result_bytes;
}

static void item_dealloc(PyObject *object)
{
    item_object *self = (item_object *)object;
    PyTypeObject *type = Py_TYPE(object);

    Py_XDECREF(self->data);
    Py_XDECREF(self->result);
    pipeline_drop(self->ref);
    PyObject_Free(object);
    Py_DECREF(type);
    native_sweep();
}

static PyObject *make_buffer(item_object *self, void *data, size_t bytes)
{
    struct memory *memory;

    if (self->over)
        return native_raise_text(SIDE_STATE, "Item", "item %llu is over; its memory went back",
                                 (unsigned long long)self->item.number);
    memory = memory_make(self->ref->device, SIDE_MEMORY_DEVICE, data, bytes);
    if (memory == NULL)
        return NULL;
    memory->lent = true;
    memory->parent = pipeline_hold(self->ref);
    memory->parent_drop = pipeline_drop;
    return native_buffer_new(memory, self->ref->owner, 0, bytes, native_dtype(NULL), 1, NULL);
}

static PyObject *item_data(PyObject *object, void *unused)
{
    item_object *self = (item_object *)object;
    (void)unused;

    if (self->data == NULL)
        self->data = make_buffer(self, (void *)(uintptr_t)self->item.data, self->item.bytes);
    return Py_XNewRef(self->data);
}

static PyObject *item_result(PyObject *object, void *unused)
{
    item_object *self = (item_object *)object;
    (void)unused;

    if (self->item.result == NULL && !self->over)
        Py_RETURN_NONE;
    if (self->result == NULL)
        self->result = make_buffer(self, self->item.result, self->capacity);
    return Py_XNewRef(self->result);
}

static PyObject *item_number(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(((item_object *)object)->item.number);
}

static PyObject *item_nbytes(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(((item_object *)object)->item.bytes);
}

static PyObject *item_lane(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLong(((item_object *)object)->item.lane);
}

static PyObject *item_result_nbytes(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(((item_object *)object)->item.result_bytes);
}

static int item_set_result_nbytes(PyObject *object, PyObject *value, void *unused)
{
    item_object *self = (item_object *)object;
    Py_ssize_t bytes = value == NULL ? -1 : PyNumber_AsSsize_t(value, PyExc_OverflowError);
    (void)unused;

    if (bytes < 0 || (size_t)bytes > self->capacity) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "result_nbytes is %zd; it takes 0..%zu (result_bytes)", bytes,
                         self->capacity);
        return -1;
    }
    self->item.result_bytes = (size_t)bytes;
    return 0;
}

static PyObject *item_repr(PyObject *object)
{
    item_object *self = (item_object *)object;

    return PyUnicode_FromFormat("<sidestream.Item %llu: %zu bytes%s>", (unsigned long long)self->item.number,
                                self->item.bytes, self->over ? ", done" : "");
}

/* clang-format off */
PyDoc_STRVAR(item_doc,
"One item of a pipeline. data and result (None without results) are device memory that goes back when compute\n"
"returns, or when the item is done; use them on the stream that belongs to the item, and only until then.");

static PyGetSetDef item_getset[] = {
    {"number", item_number, NULL, "Number of the item, from 0.", NULL},
    {"nbytes", item_nbytes, NULL, "Bytes of data.", NULL},
    {"data", item_data, NULL, "The item on the device: a Buffer of bytes, filled as far as the stream can see.", NULL},
    {"result", item_result, NULL, "Device memory for the result: a Buffer of bytes, result_bytes long; None without results.", NULL},
    {"result_nbytes", item_result_nbytes, item_set_result_nbytes, "Bytes that the result takes; left: all of it. 0: no result for this item.", NULL},
    {"lane", item_lane, NULL, "Which compute stream: number % streams.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
/* clang-format on */

static PyType_Slot item_slots[] = {
    {Py_tp_doc, (void *)(uintptr_t)item_doc},
    {Py_tp_dealloc, item_dealloc},
    {Py_tp_repr, item_repr},
    {Py_tp_getset, item_getset},
    {0, NULL},
};

static PyType_Spec item_type_spec = {
    .name = "sidestream.Item",
    .basicsize = sizeof(item_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = item_slots,
};

int item_add(PyObject *module)
{
    if (item_type == NULL)
        item_type = (PyTypeObject *)PyType_FromSpec(&item_type_spec);
    return item_type == NULL ? -1 : PyModule_AddType(module, item_type);
}
