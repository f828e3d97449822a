/* SPDX-License-Identifier: MIT
 *
 * Events, and waiting without the GIL in a way that Ctrl-C ends. */
#include "native.h"

#include <math.h>
#include <structmember.h>

static PyTypeObject *event_type;

/* ---------------------------------------------------------------- waiting */

int native_wait_event(side_event *event, double timeout_s)
{
    double left = timeout_s;
    side_status s;

    if (!(timeout_s >= 0)) {
        PyErr_Format(PyExc_ValueError, "timeout takes 0 (for ever) and more");
        return -1;
    }
    for (;;) {
        double slice = timeout_s > 0 && left < NATIVE_SLICE_S ? left : NATIVE_SLICE_S;
        Py_BEGIN_ALLOW_THREADS
        s = side_event_wait(event, slice);
        Py_END_ALLOW_THREADS
        if (s == SIDE_OK)
            return 0;
        left -= slice;
        if (s != SIDE_STUCK || (timeout_s > 0 && left <= 0)) {
            native_raise(s);
            return -1;
        }
        if (PyErr_CheckSignals() != 0)
            return -1;
    }
}

int native_wait_stream(side_stream *stream, double timeout_s)
{
    side_event *tail = NULL;
    side_status s;
    int r;

    Py_BEGIN_ALLOW_THREADS
    s = side_event_create(side_stream_device(stream), false, &tail);
    if (s == SIDE_OK)
        s = side_event_record(tail, stream);
    Py_END_ALLOW_THREADS
    if (s != SIDE_OK)
        native_raise(s);
    r = s == SIDE_OK ? native_wait_event(tail, timeout_s) : -1;
    side_event_destroy(tail);
    return r;
}

/* ---------------------------------------------------------------- class */

PyObject *native_event_new(struct device_ref *device, side_event *event, bool timing)
{
    event_object *self = (event_object *)PyType_GenericAlloc(event_type, 0);

    if (self == NULL) {
        side_event_destroy(event);
        return NULL;
    }
    self->device = device_hold(device);
    self->event = event;
    self->timing = timing;
    return (PyObject *)self;
}

event_object *native_event(PyObject *object, const char *what)
{
    event_object *self = (event_object *)object;

    if (!PyObject_TypeCheck(object, event_type)) {
        PyErr_Format(PyExc_TypeError, "%s must be a sidestream.Event, not %R", what, (PyObject *)Py_TYPE(object));
        return NULL;
    }
    if (self->device->forks != life_forks())
        return (event_object *)(void *)native_raise_text(SIDE_FORKED, "Event", "%s is from before a fork", what);
    return self;
}

static PyObject *event_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"device", "timing", NULL};
    PyObject *device;
    int timing = 0;
    struct device_ref *ref;
    side_event *event;
    side_status s;
    (void)type;

    if (native_enter() != 0 || !native_parse(args, kwargs, "O|p:Event", names, &device, &timing))
        return NULL;
    ref = native_device(device, "device");
    if (ref == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    s = side_event_create(ref->device, timing, &event);
    Py_END_ALLOW_THREADS
    return s == SIDE_OK ? native_event_new(ref, event, timing) : native_raise(s);
}

static void event_dealloc(PyObject *object)
{
    event_object *self = (event_object *)object;
    PyTypeObject *type = Py_TYPE(object);

    if (self->weakrefs != NULL)
        PyObject_ClearWeakRefs(object);
    if (self->device != NULL && life_goes_on(self->device->forks)) {
        side_event_destroy(self->event);
        device_drop(self->device);
    }
    PyObject_Free(object);
    Py_DECREF(type);
    native_sweep();
}

static PyObject *event_record(PyObject *object, PyObject *arg)
{
    event_object *self = native_enter() == 0 ? native_event(object, "event") : NULL;
    struct stream_ref *stream = self == NULL ? NULL : native_stream(arg, "stream");
    side_status s;

    if (stream == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    s = side_event_record(self->event, stream->stream);
    Py_END_ALLOW_THREADS
    return s == SIDE_OK ? Py_NewRef(object) : native_raise(s);
}

static PyObject *event_query(PyObject *object, PyObject *unused)
{
    event_object *self = native_enter() == 0 ? native_event(object, "event") : NULL;
    side_status s;
    (void)unused;

    if (self == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    s = side_event_query(self->event);
    Py_END_ALLOW_THREADS
    return s == SIDE_OK || s == SIDE_AGAIN ? PyBool_FromLong(s == SIDE_OK) : native_raise(s);
}

static PyObject *event_wait(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"timeout", NULL};
    event_object *self = native_enter() == 0 ? native_event(object, "event") : NULL;
    double timeout = 0;

    if (self == NULL || !native_parse(args, kwargs, "|d:wait", names, &timeout) ||
        native_wait_event(self->event, timeout) != 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *event_elapsed(PyObject *object, PyObject *arg)
{
    event_object *self = native_enter() == 0 ? native_event(object, "event") : NULL;
    event_object *end = self == NULL ? NULL : native_event(arg, "end");
    double seconds;
    side_status s;

    if (end == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    s = side_event_elapsed(self->event, end->event, &seconds);
    Py_END_ALLOW_THREADS
    return s == SIDE_OK ? PyFloat_FromDouble(seconds) : native_raise(s);
}

static PyObject *event_timing(PyObject *object, void *unused)
{
    (void)unused;
    return PyBool_FromLong(((event_object *)object)->timing);
}

static PyObject *event_repr(PyObject *object)
{
    event_object *self = (event_object *)object;

    return PyUnicode_FromFormat("<sidestream.Event of %s%s>", self->device->props.spec, self->timing ? ", timing" : "");
}

/* clang-format off */
PyDoc_STRVAR(event_doc,
"Event(device, timing=False)\n--\n\n"
"A point in a stream. Recording again moves the point; earlier waits keep the old one. An event that was never\n"
"recorded counts as done.");

static PyMethodDef event_methods[] = {
    {"record", event_record, METH_O, "record($self, stream, /)\n--\n\nThe event is what is queued on `stream` so far. Does not block. Returns the event."},
    {"query", event_query, METH_NOARGS, "query($self, /)\n--\n\nTrue once it is done. Does not block."},
    {"wait", (PyCFunction)(void (*)(void))event_wait, METH_VARARGS | METH_KEYWORDS,
     "wait($self, timeout=0)\n--\n\n"
     "Blocks the host until it is done, at most `timeout` seconds (0: for ever), else raises Stuck. Other threads\n"
     "run meanwhile; Ctrl-C ends it."},
    {"elapsed", event_elapsed, METH_O, "elapsed($self, end, /)\n--\n\nSeconds on the device from this event to `end`. Both with timing, recorded and done, else raises WrongState."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef event_getset[] = {
    {"timing", event_timing, NULL, "It was made with timing.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
/* clang-format on */

static PyMemberDef event_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(event_object, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot event_slots[] = {
    {Py_tp_doc, (void *)(uintptr_t)event_doc},
    {Py_tp_new, event_new},
    {Py_tp_dealloc, event_dealloc},
    {Py_tp_repr, event_repr},
    {Py_tp_methods, event_methods},
    {Py_tp_getset, event_getset},
    {Py_tp_members, event_members},
    {0, NULL},
};

static PyType_Spec event_type_spec = {
    .name = "sidestream.Event",
    .basicsize = sizeof(event_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = event_slots,
};

int event_add(PyObject *module)
{
    if (event_type == NULL)
        event_type = (PyTypeObject *)PyType_FromSpec(&event_type_spec);
    return event_type == NULL ? -1 : PyModule_AddType(module, event_type);
}
