/* SPDX-License-Identifier: MIT
 *
 * Slot: what acquire and take hand out, as a context manager. A slot that is dropped unfinished goes back by itself. */
#include "native.h"

static PyTypeObject *slot_type;

/*            publish, abandon            release
 *   WRITING ------------------> DONE <------------- READING        give_back (list and table): from DONE, once */
enum state { WRITING, READING, DONE };

typedef struct slot_object {
    PyObject_HEAD
    struct slots_ref *ref;
    struct stream_ref *stream; /* of acquire or take; NULL: the host */
    PyObject *owner;           /* Slots */
    PyObject *buffer;
    side_slot slot;
    enum state state;
    bool returned;
} slot_object;

/* Ends the writing or reading, by what was queued on `stream`. */
static side_status finish(slot_object *self, struct stream_ref *stream, bool good)
{
    side_stream *by = stream != NULL ? stream->stream : NULL;
    enum state was = self->state;
    side_status s;

    self->state = DONE;
    if (self->buffer != NULL)
        ((buffer_object *)self->buffer)->memory->ended = true;
    Py_BEGIN_ALLOW_THREADS
    if (was == READING)
        s = side_slots_release(self->ref->slots, &self->slot, by);
    else if (good)
        s = side_slots_publish(self->ref->slots, &self->slot, by, NULL);
    else
        s = side_slots_abandon(self->ref->slots, &self->slot, by);
    Py_END_ALLOW_THREADS
    return s;
}

PyObject *slot_new(struct slots_ref *ref, PyObject *owner, const side_slot *slot, struct stream_ref *stream, bool writes)
{
    slot_object *self = (slot_object *)PyType_GenericAlloc(slot_type, 0);
    struct memory *memory;
    PyObject *device;

    if (self == NULL) {
        slot_object bare = {.ref = ref, .slot = *slot, .state = writes ? WRITING : READING};
        finish(&bare, stream, false);
        return NULL;
    }
    self->ref = slots_hold(ref);
    self->stream = stream != NULL ? stream_hold(stream) : NULL;
    self->owner = Py_NewRef(owner);
    self->slot = *slot;
    self->state = writes ? WRITING : READING;
    memory = memory_make(ref->device, ref->kind, slot->data, slot->bytes);
    if (memory == NULL)
        goto fail;
    memory->lent = true;
    memory->parent = slots_hold(ref);
    memory->parent_drop = slots_drop;
    device = PyObject_GetAttrString(owner, "device");
    if (device == NULL) {
        memory_drop(memory);
        goto fail;
    }
    self->buffer = native_buffer_new(memory, device, 0, slot->bytes, native_dtype(NULL), 1, NULL);
    Py_DECREF(device);
    if (self->buffer != NULL)
        return (PyObject *)self;
fail:
    Py_DECREF((PyObject *)self); /* gives the slot back */
    return NULL;
}

static void slot_dealloc(PyObject *object)
{
    slot_object *self = (slot_object *)object;
    PyTypeObject *type = Py_TYPE(object);

    if (self->ref != NULL && life_goes_on(self->ref->forks)) {
        if (self->state != DONE)
            finish(self, self->stream, false);
        slots_drop(self->ref);
        stream_drop(self->stream);
    }
    Py_XDECREF(self->buffer);
    Py_XDECREF(self->owner);
    PyObject_Free(object);
    Py_DECREF(type);
    native_sweep();
}

static int slot_check(slot_object *self, enum state state, const char *what)
{
    if (native_enter() != 0)
        return -1;
    if (self->ref->forks != life_forks())
        native_raise_text(SIDE_FORKED, "Slot", "the slot is from before a fork");
    else if (self->state != state)
        native_raise_text(SIDE_STATE, what, "%s: the slot %s", what,
                          self->state == DONE      ? "was published, abandoned or released already"
                          : self->state == WRITING ? "is being written: publish or abandon it"
                                                   : "is being read: release it");
    else
        return 0;
    return -1;
}

/* `given`: the stream argument; left out: the stream that acquired or took the slot. */
static PyObject *slot_end(PyObject *object, PyObject *args, PyObject *kwargs, enum state state, const char *format,
                          bool good)
{
    static const char *const names[] = {"stream", NULL};
    slot_object *self = (slot_object *)object;
    PyObject *given = NULL;
    struct stream_ref *stream;
    side_status s;
    bool failed;

    if (slot_check(self, state, strchr(format, ':') + 1) != 0 || !native_parse(args, kwargs, format, names, &given))
        return NULL;
    stream = native_stream_or_none(given, "stream", &failed);
    if (failed)
        return NULL;
    s = finish(self, given == NULL ? self->stream : stream, good);
    return s == SIDE_OK ? Py_NewRef(Py_None) : native_raise(s);
}

static PyObject *slot_publish(PyObject *object, PyObject *args, PyObject *kwargs)
{
    return slot_end(object, args, kwargs, WRITING, "|O:publish", true);
}

static PyObject *slot_abandon(PyObject *object, PyObject *args, PyObject *kwargs)
{
    return slot_end(object, args, kwargs, WRITING, "|O:abandon", false);
}

static PyObject *slot_release(PyObject *object, PyObject *args, PyObject *kwargs)
{
    return slot_end(object, args, kwargs, READING, "|O:release", true);
}

static PyObject *slot_give_back(PyObject *object, PyObject *unused)
{
    slot_object *self = (slot_object *)object;
    side_status s;
    (void)unused;

    if (slot_check(self, DONE, "give_back") != 0)
        return NULL;
    if (self->returned)
        return native_raise_text(SIDE_STATE, "give_back", "give_back: the slot was given back already");
    Py_BEGIN_ALLOW_THREADS
    s = side_slots_give_back(self->ref->slots, &self->slot);
    Py_END_ALLOW_THREADS
    self->returned = s == SIDE_OK;
    return s == SIDE_OK ? Py_NewRef(Py_None) : native_raise(s);
}

static PyObject *slot_enter(PyObject *object, PyObject *unused)
{
    (void)unused;
    return Py_NewRef(object);
}

/* What was ended by hand stays as it is; an exception abandons what was being written. */
static PyObject *slot_exit(PyObject *object, PyObject *args)
{
    slot_object *self = (slot_object *)object;
    PyObject *type, *value, *trace;
    side_status s;

    if (!PyArg_ParseTuple(args, "OOO", &type, &value, &trace))
        return NULL;
    if (self->state == DONE || self->ref->forks != life_forks())
        Py_RETURN_FALSE;
    s = finish(self, self->stream, type == Py_None);
    return s == SIDE_OK || type != Py_None ? Py_NewRef(Py_False) : native_raise(s);
}

static PyObject *slot_view(PyObject *object, PyObject *args, PyObject *kwargs)
{
    PyObject *method = PyObject_GetAttrString(((slot_object *)object)->buffer, "view");
    PyObject *r = method == NULL ? NULL : PyObject_Call(method, args, kwargs);

    Py_XDECREF(method);
    return r;
}

static PyObject *slot_dlpack(PyObject *object, PyObject *args, PyObject *kwargs)
{
    return buffer_dlpack(((slot_object *)object)->buffer, args, kwargs);
}

static PyObject *slot_dlpack_device(PyObject *object, PyObject *unused)
{
    return buffer_dlpack_device(((slot_object *)object)->buffer, unused);
}

static PyObject *slot_buffer(PyObject *object, void *unused)
{
    (void)unused;
    return Py_NewRef(((slot_object *)object)->buffer);
}

static PyObject *slot_key(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(((slot_object *)object)->slot.key);
}

static PyObject *slot_index(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLong(((slot_object *)object)->slot.index);
}

static PyObject *slot_generation(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(((slot_object *)object)->slot.generation);
}

static PyObject *slot_repr(PyObject *object)
{
    slot_object *self = (slot_object *)object;

    return PyUnicode_FromFormat("<sidestream.Slot %u: key %llu, %zu bytes, %s>", self->slot.index,
                                (unsigned long long)self->slot.key, self->slot.bytes,
                                self->state == WRITING   ? "being written"
                                : self->state == READING ? "being read"
                                : self->returned         ? "given back"
                                                         : "done");
}

/* clang-format off */
PyDoc_STRVAR(slot_doc,
"What Slots.acquire and Slots.take hand out. As a context manager it is published (written) or released (read)\n"
"at the end of the block, by what was queued on the stream that it was made for; an exception abandons what was\n"
"being written. A slot that is dropped unfinished goes back in the same way.\n\n"
"buffer and its views and exports are for the time in between; use them after, and the next item is read or\n"
"overwritten.");

static PyMethodDef slot_methods[] = {
    {"publish", (PyCFunction)(void (*)(void))slot_publish, METH_VARARGS | METH_KEYWORDS,
     "publish($self, stream=...)\n--\n\nThe slot is filled by what is queued on `stream` so far (None: now; left out: the stream that acquired it)."},
    {"abandon", (PyCFunction)(void (*)(void))slot_abandon, METH_VARARGS | METH_KEYWORDS,
     "abandon($self, stream=...)\n--\n\nGives up an acquired slot without an item. In a ring its number is used up: take() of it raises Cancelled."},
    {"release", (PyCFunction)(void (*)(void))slot_release, METH_VARARGS | METH_KEYWORDS,
     "release($self, stream=...)\n--\n\nReading ends with what is queued on `stream` so far (None: now; left out: the stream that took it)."},
    {"give_back", slot_give_back, METH_NOARGS,
     "give_back($self, /)\n--\n\n"
     "Lists and tables: after publish or release; the slot is free once its readers are done. Raises WrongState\n"
     "while others read it."},
    {"view", (PyCFunction)(void (*)(void))slot_view, METH_VARARGS | METH_KEYWORDS, "view($self, dtype=None, shape=None, offset=0)\n--\n\nAs buffer.view."},
    {"__dlpack__", (PyCFunction)(void (*)(void))slot_dlpack, METH_VARARGS | METH_KEYWORDS,
     "__dlpack__($self, *, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\nAs the buffer's."},
    {"__dlpack_device__", slot_dlpack_device, METH_NOARGS, "__dlpack_device__($self, /)\n--\n\nAs the buffer's."},
    {"__enter__", slot_enter, METH_NOARGS, NULL},
    {"__exit__", slot_exit, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef slot_getset[] = {
    {"buffer", slot_buffer, NULL, "The memory: a Buffer of bytes.", NULL},
    {"key", slot_key, NULL, "Item number (ring), slot number (list) or key (table).", NULL},
    {"index", slot_index, NULL, "Number of the slot.", NULL},
    {"generation", slot_generation, NULL, "Rises each time the slot is acquired.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
/* clang-format on */

static PyType_Slot slot_slots[] = {
    {Py_tp_doc, (void *)(uintptr_t)slot_doc},
    {Py_tp_dealloc, slot_dealloc},
    {Py_tp_repr, slot_repr},
    {Py_tp_methods, slot_methods},
    {Py_tp_getset, slot_getset},
    {0, NULL},
};

static PyType_Spec slot_type_spec = {
    .name = "sidestream.Slot",
    .basicsize = sizeof(slot_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slot_slots,
};

int slot_add(PyObject *module)
{
    if (slot_type == NULL)
        slot_type = (PyTypeObject *)PyType_FromSpec(&slot_type_spec);
    return slot_type == NULL ? -1 : PyModule_AddType(module, slot_type);
}
