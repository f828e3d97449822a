/* SPDX-License-Identifier: MIT
 *
 * The caller's own loop over a pipeline: next and done, and an iterator that says done by itself. */
#include "pipeline.h"

static PyTypeObject *pull_type;

static side_status item_done(struct pipeline_ref *ref, PyObject *object, struct stream_ref *stream)
{
    side_item item = *item_get(object, ref);
    side_status s;

    item.result_bytes = item_end(object);
    Py_BEGIN_ALLOW_THREADS
    s = side_pipeline_done(ref->pipeline, &item, stream->stream);
    Py_END_ALLOW_THREADS
    return s;
}

/* NULL without an exception: no more items. */
static PyObject *next_item(struct pipeline_ref *ref, struct stream_ref *stream)
{
    PyObject *object;
    struct visit visit;
    side_item item;
    side_status s;

    if (visit_begin(&visit, ref) != 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    s = side_pipeline_next(ref->pipeline, stream->stream, &item);
    Py_END_ALLOW_THREADS
    if (visit_end(&visit, s) != 0 || s == SIDE_END)
        return NULL;
    object = item_new(ref, &item);
    if (object == NULL) {
        Py_BEGIN_ALLOW_THREADS
        side_pipeline_done(ref->pipeline, &item, stream->stream);
        Py_END_ALLOW_THREADS
    }
    return object;
}

PyObject *pipeline_next(PyObject *object, PyObject *arg)
{
    struct pipeline_ref *ref = pipeline_of(object);
    struct stream_ref *stream = ref == NULL ? NULL : native_stream(arg, "stream");
    PyObject *item = stream == NULL ? NULL : next_item(ref, stream);

    if (item == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return item;
}

PyObject *pipeline_done(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"item", "stream", NULL};
    struct pipeline_ref *ref = pipeline_of(object);
    struct stream_ref *stream;
    PyObject *item, *given;
    side_status s;

    if (ref == NULL || !native_parse(args, kwargs, "OO:done", names, &item, &given))
        return NULL;
    stream = native_stream(given, "stream");
    if (stream == NULL || item_get(item, ref) == NULL)
        return NULL;
    s = item_done(ref, item, stream);
    if (s != SIDE_OK)
        return pipeline_raise_kept(ref) ? NULL : native_raise(s);
    Py_RETURN_NONE;
}

typedef struct pull_object {
    PyObject_HEAD
    PyObject *pipeline;
    PyObject *stream;
    PyObject *item; /* handed out last; done when the next is asked for */
    bool ended;
} pull_object;

PyObject *pipeline_pull(PyObject *object, PyObject *stream)
{
    pull_object *self;

    if (pipeline_of(object) == NULL || native_stream(stream, "stream") == NULL)
        return NULL;
    self = (pull_object *)PyType_GenericAlloc(pull_type, 0);
    if (self == NULL)
        return NULL;
    self->pipeline = Py_NewRef(object);
    self->stream = Py_NewRef(stream);
    return (PyObject *)self;
}

static side_status pull_done(pull_object *self)
{
    struct pipeline_ref *ref = ((pipeline_object *)self->pipeline)->ref;
    PyObject *item = self->item;
    side_status s = SIDE_OK;

    self->item = NULL;
    if (item != NULL && !item_is_over(item) && ref->pipeline != NULL && life_goes_on(ref->forks))
        s = item_done(ref, item, ((stream_object *)self->stream)->ref);
    Py_XDECREF(item);
    return s;
}

static PyObject *pull_next(PyObject *object)
{
    pull_object *self = (pull_object *)object;
    struct pipeline_ref *ref = pipeline_of(self->pipeline);
    side_status s;

    if (ref == NULL || self->ended)
        return NULL;
    s = pull_done(self);
    if (s != SIDE_OK)
        return pipeline_raise_kept(ref) ? NULL : native_raise(s);
    self->item = next_item(ref, ((stream_object *)self->stream)->ref);
    self->ended = self->item == NULL;
    return Py_XNewRef(self->item);
}

static void pull_dealloc(PyObject *object)
{
    pull_object *self = (pull_object *)object;
    PyTypeObject *type = Py_TYPE(object);

    if (self->pipeline != NULL)
        pull_done(self);
    Py_XDECREF(self->pipeline);
    Py_XDECREF(self->stream);
    PyObject_Free(object);
    Py_DECREF(type);
    native_sweep();
}

static PyType_Slot pull_slots[] = {
    {Py_tp_dealloc, pull_dealloc},
    {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, pull_next},
    {0, NULL},
};

static PyType_Spec pull_type_spec = {
    .name = "sidestream.Pull",
    .basicsize = sizeof(pull_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = pull_slots,
};

int pull_add(void)
{
    if (pull_type == NULL)
        pull_type = (PyTypeObject *)PyType_FromSpec(&pull_type_spec);
    return pull_type == NULL ? -1 : 0;
}
