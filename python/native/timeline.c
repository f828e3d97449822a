/* SPDX-License-Identifier: MIT
 *
 * Log: what ran when, as spans, sums and drawings. */
#include "native.h"

static PyTypeObject *log_type;

typedef struct log_object {
    PyObject_HEAD
    struct device_ref *device;
    side_log *log;
    PyObject *owner; /* Device */
} log_object;

static const char *const lanes[] = {"H2D", "compute", "D2H"};

static PyObject *log_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"device", "capacity", NULL};
    PyObject *owner;
    Py_ssize_t capacity = 0;
    struct device_ref *device;
    log_object *self;
    side_log *log;
    side_status s;

    if (native_enter() != 0 || !native_parse(args, kwargs, "O|n:Log", names, &owner, &capacity))
        return NULL;
    device = native_device(owner, "device");
    if (device == NULL)
        return NULL;
    if (capacity < 0)
        return PyErr_Format(PyExc_ValueError, "capacity is %zd; it takes 0 (default) and more", capacity);
    Py_BEGIN_ALLOW_THREADS
    s = side_log_create(device->device, (size_t)capacity, &log);
    Py_END_ALLOW_THREADS
    if (s != SIDE_OK)
        return native_raise(s);
    self = (log_object *)PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        side_log_destroy(log);
        return NULL;
    }
    self->log = log;
    self->device = device_hold(device);
    self->owner = Py_NewRef(owner);
    return (PyObject *)self;
}

static void log_dealloc(PyObject *object)
{
    log_object *self = (log_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    if (self->device != NULL && life_goes_on(self->device->forks)) {
        Py_BEGIN_ALLOW_THREADS
        side_log_destroy(self->log);
        Py_END_ALLOW_THREADS
        device_drop(self->device);
    }
    Py_XDECREF(self->owner);
    release(object);
    Py_DECREF(type);
    native_sweep();
}

side_log *native_log(PyObject *object, const char *what, bool *failed)
{
    log_object *self = (log_object *)object;

    *failed = false;
    if (object == NULL || object == Py_None)
        return NULL;
    *failed = true;
    if (!PyObject_TypeCheck(object, log_type)) {
        PyErr_Format(PyExc_TypeError, "%s must be a sidestream.Log, not %R", what, (PyObject *)Py_TYPE(object));
        return NULL;
    }
    if (self->device->forks != life_forks())
        return (side_log *)(void *)native_raise_text(SIDE_FORKED, "Log", "%s is from before a fork", what);
    *failed = false;
    return self->log;
}

static side_log *log_check(PyObject *object)
{
    bool failed;
    return native_enter() == 0 ? native_log(object, "log", &failed) : NULL;
}

/* ---------------------------------------------------------------- spans */

/* Spans may come while we look: again with more room, until they fit. */
static side_span *log_get(side_log *log, size_t *count)
{
    size_t capacity = 256;

    for (;;) {
        side_span *spans = malloc(capacity * sizeof(side_span));
        side_status s = SIDE_NO_MEMORY;

        *count = capacity;
        if (spans == NULL)
            return (side_span *)(void *)PyErr_NoMemory();
        Py_BEGIN_ALLOW_THREADS
        s = side_log_spans(log, spans, count);
        Py_END_ALLOW_THREADS
        if (s == SIDE_OK && *count <= capacity)
            return spans;
        free(spans);
        if (s != SIDE_OK)
            return (side_span *)(void *)native_raise(s);
        capacity = *count + *count / 8;
    }
}

static PyObject *span_dict(const side_span *s)
{
    PyObject *item = s->item == UINT64_MAX ? Py_NewRef(Py_None) : PyLong_FromUnsignedLongLong(s->item);

    return Py_BuildValue("{s:s,s:s,s:N,s:K,s:K,s:K,s:K,s:I}", "name", s->name, "lane", lanes[s->lane], "item", item,
                         "begin_ns", (unsigned long long)s->begin_ns, "end_ns", (unsigned long long)s->end_ns,
                         "queued_ns", (unsigned long long)s->queued_ns, "bytes", (unsigned long long)s->bytes, "stream",
                         (unsigned)s->stream);
}

static PyObject *log_spans(PyObject *object, PyObject *unused)
{
    side_log *log = log_check(object);
    size_t count = 0;
    side_span *spans = log == NULL ? NULL : log_get(log, &count);
    PyObject *list = spans == NULL ? NULL : PyList_New(0);
    (void)unused;

    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *dict = span_dict(&spans[i]);
        if (dict == NULL || PyList_Append(list, dict) != 0)
            Py_CLEAR(list);
        Py_XDECREF(dict);
    }
    free(spans);
    return list;
}

static PyObject *log_account(PyObject *object, PyObject *unused)
{
    side_log *log = log_check(object);
    size_t count = 0;
    side_span *spans = log == NULL ? NULL : log_get(log, &count);
    side_account a;
    side_status s;
    (void)unused;

    if (spans == NULL)
        return NULL;
    s = side_timeline_account(spans, count, &a);
    free(spans);
    if (s != SIDE_OK)
        return native_raise(s);
    return Py_BuildValue("{s:d,s:d,s:d,s:d,s:d,s:d,s:d,s:d,s:d,s:d,s:d,s:K,s:K}", "total_s", a.total_s, "compute_busy_s",
                         a.compute_busy_s, "h2d_busy_s", a.h2d_busy_s, "d2h_busy_s", a.d2h_busy_s, "copy_busy_s",
                         a.copy_busy_s, "copy_hidden_s", a.copy_hidden_s, "exposed_s", a.exposed_s, "idle_s", a.idle_s,
                         "compute_busy", a.compute_busy, "link_busy", a.link_busy, "copy_hidden", a.copy_hidden,
                         "h2d_bytes", (unsigned long long)a.h2d_bytes, "d2h_bytes", (unsigned long long)a.d2h_bytes);
}

/* ---------------------------------------------------------------- drawings */

struct text {
    char *data;
    size_t bytes, capacity;
};

static int text_write(void *user, const char *piece, size_t bytes)
{
    struct text *text = user;

    if (text->bytes + bytes > text->capacity) {
        size_t capacity = 2 * (text->bytes + bytes);
        char *data = realloc(text->data, capacity);
        if (data == NULL)
            return -1;
        text->data = data;
        text->capacity = capacity;
    }
    memcpy(text->data + text->bytes, piece, bytes);
    text->bytes += bytes;
    return 0;
}

typedef side_status draw_fn(const side_span *spans, size_t n, const side_draw *draw, side_write_fn *write, void *user);

static PyObject *log_draw(PyObject *object, const side_draw *draw, draw_fn *fn)
{
    side_log *log = log_check(object);
    size_t count = 0;
    side_span *spans = log == NULL ? NULL : log_get(log, &count);
    struct text text = {NULL, 0, 0};
    PyObject *r = NULL;
    side_status s;

    if (spans == NULL)
        return NULL;
    s = fn(spans, count, draw, text_write, &text);
    if (s == SIDE_OK)
        r = PyUnicode_DecodeUTF8(text.bytes > 0 ? text.data : "", (Py_ssize_t)text.bytes, "replace");
    else
        native_raise(s);
    free(text.data);
    free(spans);
    return r;
}

static PyObject *log_text(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"width", "ascii", "title", "device", NULL};
    side_draw draw = SIDE_DRAW_INIT;
    int ascii = 0;

    if (!native_parse(args, kwargs, "|Ipzz:text", names, &draw.width, &ascii, &draw.title, &draw.device))
        return NULL;
    draw.ascii = ascii;
    return log_draw(object, &draw, side_timeline_text);
}

static PyObject *log_svg(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"width", "title", "device", NULL};
    side_draw draw = SIDE_DRAW_INIT;

    if (!native_parse(args, kwargs, "|Izz:svg", names, &draw.width, &draw.title, &draw.device))
        return NULL;
    return log_draw(object, &draw, side_timeline_svg);
}

static PyObject *log_trace_text(PyObject *object, PyObject *unused)
{
    side_draw draw = SIDE_DRAW_INIT;
    (void)unused;
    return log_draw(object, &draw, side_timeline_trace);
}

/* ---------------------------------------------------------------- logging by hand */

static PyObject *log_begin(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"stream", "lane", "name", "item", "nbytes", NULL};
    side_log *log = log_check(object);
    PyObject *stream, *item = Py_None;
    const char *lane = "compute", *name = "compute";
    unsigned long long bytes = 0, number = UINT64_MAX;
    struct stream_ref *ref;
    uint32_t span = 0;
    side_status s;
    int at = 0;

    if (log == NULL || !native_parse(args, kwargs, "O|ssOK:begin", names, &stream, &lane, &name, &item, &bytes))
        return NULL;
    while (at < SIDE_LANE_COUNT && strcmp(lanes[at], lane) != 0)
        at++;
    if (at == SIDE_LANE_COUNT)
        return PyErr_Format(PyExc_ValueError, "lane is '%s'; it takes H2D, compute or D2H", lane);
    if (item != Py_None)
        number = PyLong_AsUnsignedLongLong(item);
    ref = PyErr_Occurred() ? NULL : native_stream(stream, "stream");
    if (ref == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    s = side_log_begin(log, ref->stream, (side_lane)at, name, number, bytes, &span);
    Py_END_ALLOW_THREADS
    return s == SIDE_OK ? PyLong_FromUnsignedLong(span) : native_raise(s);
}

static PyObject *log_end(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"stream", "span", NULL};
    side_log *log = log_check(object);
    struct stream_ref *ref;
    PyObject *stream;
    unsigned span;
    side_status s;

    if (log == NULL || !native_parse(args, kwargs, "OI:end", names, &stream, &span))
        return NULL;
    ref = native_stream(stream, "stream");
    if (ref == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    s = side_log_end(log, ref->stream, span);
    Py_END_ALLOW_THREADS
    return s == SIDE_OK ? Py_NewRef(Py_None) : native_raise(s);
}

static PyObject *log_clear(PyObject *object, PyObject *unused)
{
    side_log *log = log_check(object);
    side_status s;
    (void)unused;

    if (log == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    s = side_log_clear(log);
    Py_END_ALLOW_THREADS
    return s == SIDE_OK ? Py_NewRef(Py_None) : native_raise(s);
}

static PyObject *log_dropped(PyObject *object, void *unused)
{
    side_log *log = log_check(object);
    uint64_t dropped;
    (void)unused;

    if (log == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    dropped = side_log_dropped(log);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(dropped);
}

static PyObject *log_device(PyObject *object, void *unused)
{
    (void)unused;
    return Py_NewRef(((log_object *)object)->owner);
}

static PyObject *log_repr(PyObject *object)
{
    return PyUnicode_FromFormat("<sidestream.Log of %s>", ((log_object *)object)->device->props.spec);
}

/* clang-format off */
PyDoc_STRVAR(log_doc,
"Log(device, capacity=0)\n--\n\n"
"What ran when on the device, and what overlapped. Pipelines fill it (log=...); work of your own is put between\n"
"begin() and end(). At most `capacity` spans (0: 65536); more are counted in `dropped`. spans(), account() and\n"
"the drawings wait for the logged work, 30 s at most (Stuck).");

static PyMethodDef log_methods[] = {
    {"spans", log_spans, METH_NOARGS,
     "spans($self, /)\n--\n\n"
     "Dicts, by begin: name, lane (\"H2D\", \"compute\", \"D2H\"), item (or None), begin_ns, end_ns (on the device,\n"
     "from the log's origin), queued_ns (by the host), bytes, stream."},
    {"account", log_account, METH_NOARGS,
     "account($self, /)\n--\n\n"
     "A dict: total_s, compute_busy_s, h2d_busy_s, d2h_busy_s, copy_busy_s, copy_hidden_s, exposed_s, idle_s; the\n"
     "shares compute_busy, link_busy, copy_hidden (0..1); h2d_bytes, d2h_bytes."},
    {"text", (PyCFunction)(void (*)(void))log_text, METH_VARARGS | METH_KEYWORDS,
     "text($self, width=0, ascii=False, title=None, device=None)\n--\n\nThe lanes over time, in characters. width: columns, 24..1000; 0: 80."},
    {"svg", (PyCFunction)(void (*)(void))log_svg, METH_VARARGS | METH_KEYWORDS,
     "svg($self, width=0, title=None, device=None)\n--\n\nThe same as one SVG document. width: pixels, 240..16384; 0: 960."},
    {"trace_text", log_trace_text, METH_NOARGS, "trace_text($self, /)\n--\n\nChrome trace JSON, for chrome://tracing and Perfetto."},
    {"begin", (PyCFunction)(void (*)(void))log_begin, METH_VARARGS | METH_KEYWORDS,
     "begin($self, stream, lane=\"compute\", name=\"compute\", item=None, nbytes=0)\n--\n\nA span begins at what the stream reaches next. Returns its number."},
    {"end", (PyCFunction)(void (*)(void))log_end, METH_VARARGS | METH_KEYWORDS, "end($self, stream, span)\n--\n\nThe span ends with what is queued on the same stream so far."},
    {"clear", log_clear, METH_NOARGS, "clear($self, /)\n--\n\nForgets all, and sets a new origin."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef log_getset[] = {
    {"dropped", log_dropped, NULL, "Spans that were not kept.", NULL},
    {"device", log_device, NULL, "The Device.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
/* clang-format on */

static PyType_Slot log_slots[] = {
    {Py_tp_doc, (void *)(uintptr_t)log_doc},
    {Py_tp_new, log_new},
    {Py_tp_dealloc, log_dealloc},
    {Py_tp_repr, log_repr},
    {Py_tp_methods, log_methods},
    {Py_tp_getset, log_getset},
    {0, NULL},
};

static PyType_Spec log_type_spec = {
    .name = "sidestream._native.Log",
    .basicsize = sizeof(log_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = log_slots,
};

/* ---------------------------------------------------------------- module */

static PyObject *bound(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"n", "h2d_s", "compute_s", "d2h_s", "copy_engines", NULL};
    unsigned long long n;
    double t, c, d = 0;
    int engines = 2;
    (void)module;

    if (!native_parse(args, kwargs, "Kdd|di:bound", names, &n, &t, &c, &d, &engines))
        return NULL;
    return PyFloat_FromDouble(side_timeline_bound(n, t, c, d, engines));
}

static PyMethodDef functions[] = {
    {"bound", (PyCFunction)(void (*)(void))bound, METH_VARARGS | METH_KEYWORDS,
     "bound(n, h2d_s, compute_s, d2h_s=0.0, copy_engines=2)\n--\n\nThe least seconds in which n equal items can pass "
     "the lanes: no schedule is faster."},
    {NULL, NULL, 0, NULL},
};

int timeline_add(PyObject *module)
{
    if (log_type == NULL)
        log_type = (PyTypeObject *)PyType_FromSpec(&log_type_spec);
    return log_type == NULL || PyModule_AddType(module, log_type) != 0 ? -1 : PyModule_AddFunctions(module, functions);
}
