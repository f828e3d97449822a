/* SPDX-License-Identifier: MIT
 *
 * The type Feeder: batches come in here. They go out in feeder_next.c. */
#include "feeder.h"

static void feeder_dealloc(PyObject *self)
{
    struct intake *n = ((feeder_object *)self)->intake;
    PyTypeObject *type = Py_TYPE(self);

    PyObject_Free(self);
    Py_DECREF(type);
    if (n == NULL || !life_goes_on(n->lender->forks))
        return;
    life_bury(&n->grave);
    life_sweep();
}

/* ---------------------------------------------------------------- making */

struct feeder_args {
    Py_ssize_t slots, slot_bytes, stride, queue, threads, chunk_bytes, pinned_bytes;
    unsigned long long memory;
    long long memory_stream;
    PyObject *device, *owner, *copy_stream;
    int timing;
    double timeout;
};

/* `value` of the argument `name` is within [least, most]. */
static bool in_range(const char *name, Py_ssize_t value, Py_ssize_t least, Py_ssize_t most)
{
    if (value >= least && value <= most)
        return true;
    PyErr_Format(PyExc_ValueError, "%s is %zd; it takes %zd to %zd", name, value, least, most);
    return false;
}

static bool args_parse(PyObject *args, PyObject *kwargs, struct feeder_args *a)
{
    static const char *const names[] = {"device",        "slots",        "slot_bytes",  "memory",  "stride",
                                        "memory_stream", "owner",        "copy_stream", "queue",   "threads",
                                        "chunk_bytes",   "pinned_bytes", "timing",      "timeout", NULL};
    const Py_ssize_t most = PY_SSIZE_T_MAX;

    *a = (struct feeder_args){.memory_stream = -1, .timing = 1};
    if (!native_parse(args, kwargs, "O|$nnKnLOOnnnnpd:Feeder", names, &a->device, &a->slots, &a->slot_bytes, &a->memory,
                      &a->stride, &a->memory_stream, &a->owner, &a->copy_stream, &a->queue, &a->threads,
                      &a->chunk_bytes, &a->pinned_bytes, &a->timing, &a->timeout) ||
        !in_range("slots", a->slots, 1, 4096) || !in_range("slot_bytes", a->slot_bytes, 1, most / 4096) ||
        !in_range("queue", a->queue, 0, 4096) || !in_range("threads", a->threads, 0, 4096) ||
        !in_range("chunk_bytes", a->chunk_bytes, 0, most) || !in_range("pinned_bytes", a->pinned_bytes, 0, most))
        return false;
    if (a->memory != 0 && a->stride == 0)
        a->stride = a->slot_bytes;
    if (a->memory != 0 && !in_range("stride", a->stride, a->slot_bytes, most / 4096))
        return false;
    if (a->timeout >= 0 && a->timeout <= 1e6)
        return true;
    PyErr_SetString(PyExc_ValueError, "timeout is in seconds, 0 (which is 30 s) to 1e6");
    return false;
}

/* The engine, in a lender that has its references already. -1 with an exception. */
static int engine_open(struct lender *l, const struct feeder_args *a, side_stream *copy_stream)
{
    side_feeder_options o = SIDE_FEEDER_OPTIONS_INIT;
    struct lent_stream *last = NULL;
    void **memory = NULL;
    side_status r = SIDE_OK;

    o.slots = (uint32_t)a->slots;
    o.queue = (uint32_t)a->queue;
    o.slot_bytes = (size_t)a->slot_bytes;
    o.copy_stream = copy_stream;
    o.chunk_bytes = (size_t)a->chunk_bytes;
    o.pinned_bytes = (size_t)a->pinned_bytes;
    o.threads = (uint32_t)a->threads;
    o.timing = a->timing != 0;
    o.timeout_s = a->timeout;
    if (a->memory != 0) {
        memory = calloc(o.slots, sizeof(*memory));
        if (memory == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        for (uint32_t i = 0; i < o.slots; i++)
            memory[i] = (void *)(uintptr_t)(a->memory + i * (unsigned long long)a->stride);
        o.memory = memory;
    }
    Py_BEGIN_ALLOW_THREADS;
    if (a->memory_stream != -1)
        r = lender_stream(l, NULL, (void *)(uintptr_t)a->memory_stream, NULL, &last, NULL);
    o.memory_stream = last != NULL ? last->stream : NULL;
    if (r == SIDE_OK)
        r = lender_open(l, &o);
    Py_END_ALLOW_THREADS;
    free(memory);
    if (r != SIDE_OK)
        native_raise(r);
    return r == SIDE_OK ? 0 : -1;
}

static PyObject *feeder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    struct feeder_args a;
    struct device_ref *device;
    struct stream_ref *copy_stream = NULL;
    struct lender *l;
    feeder_object *self;
    bool failed = false;

    if (native_enter() != 0 || !args_parse(args, kwargs, &a))
        return NULL;
    device = native_device(a.device, "device");
    if (device != NULL && a.copy_stream != NULL)
        copy_stream = native_stream_or_none(a.copy_stream, "copy_stream", &failed);
    if (device == NULL || failed)
        return NULL;
    l = lender_make(device->device, lender_bury);
    if (l == NULL)
        return PyErr_NoMemory();
    l->objects[DEVICE] = device_hold(device);
    l->objects[COPY_STREAM] = copy_stream != NULL ? stream_hold(copy_stream) : NULL;
    l->objects[OWNER] = Py_XNewRef(a.owner);
    if (engine_open(l, &a, copy_stream != NULL ? copy_stream->stream : NULL) != 0) {
        lender_unref(l);
        life_sweep();
        return NULL;
    }
    self = PyObject_New(feeder_object, type);
    if (self == NULL) {
        lender_unref(l);
        return NULL;
    }
    self->intake = intake_make(l);
    if (self->intake == NULL)
        Py_CLEAR(self);
    native_drain_log();
    return (PyObject *)self;
}

/* ---------------------------------------------------------------- what all entry points need */

struct intake *intake_enter(PyObject *self, const char *where)
{
    struct intake *n = ((feeder_object *)self)->intake;

    if (native_enter() != 0)
        return NULL;
    if (!life_goes_on(n->lender->forks))
        return (struct intake *)(void *)native_raise_text(SIDE_FORKED, where,
                                                          "the feeder was made before a fork; make one in the child");
    return n;
}

/* For calls that a closed feeder refuses. */
static struct intake *enter_open(PyObject *self, const char *where)
{
    struct intake *n = intake_enter(self, where);

    if (n != NULL && n->stopped)
        return (struct intake *)(void *)native_raise_text(SIDE_CANCELLED, where, "the feeder was closed");
    return n;
}

int lender_stream_of(struct lender *l, PyObject *object, struct lent_stream **lent)
{
    struct stream_ref *ref = NULL;
    long long native = -1;
    bool added = false;
    side_status r;

    *lent = NULL;
    if (PyLong_Check(object)) {
        native = PyLong_AsLongLong(object);
        if (native == -1)
            return PyErr_Occurred() ? -1 : 0;
    } else {
        ref = native_stream(object, "stream");
        if (ref == NULL)
            return -1;
    }
    *lent = lender_find(l, ref != NULL ? ref->stream : NULL, (void *)(uintptr_t)native);
    if (*lent != NULL)
        return 0;
    if (ref != NULL)
        stream_hold(ref);
    Py_BEGIN_ALLOW_THREADS;
    r = lender_stream(l, ref != NULL ? ref->stream : NULL, (void *)(uintptr_t)native, ref, lent, &added);
    Py_END_ALLOW_THREADS;
    if (!added)
        stream_drop(ref);
    if (r != SIDE_OK)
        native_raise(r);
    return r == SIDE_OK ? 0 : -1;
}

/* ---------------------------------------------------------------- submit */

static bool piece_parse(PyObject *tuple, Py_ssize_t number, side_feed_piece *piece)
{
    unsigned long long v[3];

    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != 3) {
        PyErr_Format(PyExc_TypeError, "pieces[%zd] must be a tuple (address, bytes, offset), not %R", number, tuple);
        return false;
    }
    for (int i = 0; i < 3; i++) {
        v[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(tuple, i));
        if (v[i] == (unsigned long long)-1 && PyErr_Occurred())
            return false;
    }
    *piece = (side_feed_piece){(const void *)(uintptr_t)v[0], (size_t)v[1], (size_t)v[2]};
    return true;
}

static PyObject *feeder_submit(PyObject *self, PyObject *args)
{
    struct intake *n = enter_open(self, "Feeder.submit");
    PyObject *list, *keep;
    Py_ssize_t count;
    uint64_t number;
    side_status r;

    if (n == NULL || !PyArg_ParseTuple(args, "O!O:submit", &PyList_Type, &list, &keep))
        return NULL;
    intake_reap(n);
    if (n->submitting)
        return native_raise_text(SIDE_STATE, "Feeder.submit", "another thread is in submit; one at a time submits");
    count = PyList_Size(list);
    if (!intake_reserve(n, (size_t)count))
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++)
        if (!piece_parse(PyList_GetItem(list, i), i, &n->pieces[i]))
            return NULL;
    n->submitting = true;
    Py_BEGIN_ALLOW_THREADS;
    r = side_feeder_submit(n->lender->feeder, n->pieces, (size_t)count, &number);
    Py_END_ALLOW_THREADS;
    n->submitting = false;
    if (r != SIDE_OK)
        return native_raise(r);
    n->kept[(n->first + n->count++) % n->capacity] = (struct kept){number, Py_NewRef(keep)};
    return PyLong_FromUnsignedLongLong(number);
}

/* ---------------------------------------------------------------- the other methods */

static PyObject *feeder_discard(PyObject *self, PyObject *unused)
{
    struct intake *n = enter_open(self, "Feeder.discard");
    side_status r;
    (void)unused;

    if (n == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    r = side_feeder_discard(n->lender->feeder);
    Py_END_ALLOW_THREADS;
    if (r != SIDE_OK)
        return native_raise(r);
    intake_reap(n);
    Py_RETURN_NONE;
}

static PyObject *feeder_copied(PyObject *self, PyObject *unused)
{
    struct intake *n = intake_enter(self, "Feeder.copied");
    uint64_t copied;
    side_status r;
    (void)unused;

    if (n == NULL)
        return NULL;
    intake_reap(n);
    r = intake_copied(n, &copied);
    return r == SIDE_OK ? PyLong_FromUnsignedLongLong(copied) : native_raise(r);
}

static PyObject *feeder_sweep(PyObject *self, PyObject *unused)
{
    struct intake *n = intake_enter(self, "Feeder.sweep");
    (void)unused;

    if (n == NULL)
        return NULL;
    intake_reap(n);
    Py_RETURN_NONE;
}

static PyObject *feeder_held(PyObject *self, PyObject *unused)
{
    struct intake *n = intake_enter(self, "Feeder.held");
    (void)unused;

    return n == NULL ? NULL : PyLong_FromUnsignedLong(atomic_load(&n->lender->held));
}

static PyObject *feeder_taken(PyObject *self, PyObject *unused)
{
    struct intake *n = intake_enter(self, "Feeder.taken");
    (void)unused;

    return n == NULL ? NULL : PyLong_FromUnsignedLongLong(n->taken);
}

static PyObject *feeder_retired(PyObject *self, PyObject *unused)
{
    struct intake *n = intake_enter(self, "Feeder.retired");
    (void)unused;

    return n == NULL ? NULL : PyLong_FromUnsignedLong(atomic_load(&n->lender->retired));
}

static PyObject *feeder_watch(PyObject *self, PyObject *stream)
{
    struct intake *n = enter_open(self, "Feeder.watch");
    struct lent_stream *lent;

    if (n == NULL || lender_stream_of(n->lender, stream, &lent) != 0)
        return NULL;
    if (lent != NULL)
        atomic_store(&lent->watched, true);
    Py_RETURN_NONE;
}

static PyObject *feeder_wait_given_back(PyObject *self, PyObject *args)
{
    struct intake *n = intake_enter(self, "Feeder.wait_given_back");
    double timeout, slice = NATIVE_SLICE_S;
    Py_ssize_t below;
    bool fewer;

    if (n == NULL || !PyArg_ParseTuple(args, "nd:wait_given_back", &below, &timeout))
        return NULL;
    if (below < 1 || below > 4097 || !(timeout >= 0)) {
        PyErr_SetString(PyExc_ValueError,
                        below < 1 || below > 4097 ? "held_below takes 1 to 4097" : "timeout is in seconds, 0 or more");
        return NULL;
    }
    /* In slices, between which signals are looked at: Ctrl-C ends it. */
    for (;; timeout -= slice) {
        double now = timeout < slice ? timeout : slice;
        Py_BEGIN_ALLOW_THREADS;
        fewer = lender_wait(n->lender, (unsigned)below, (uint64_t)(now * 1e9));
        Py_END_ALLOW_THREADS;
        if (fewer || timeout <= slice)
            return PyBool_FromLong(fewer);
        if (PyErr_CheckSignals() != 0)
            return NULL;
    }
}

static PyObject *feeder_cancel(PyObject *self, PyObject *unused)
{
    struct intake *n = intake_enter(self, "Feeder.cancel");
    (void)unused;

    if (n == NULL)
        return NULL;
    n->cancelled = true;
    side_feeder_cancel(n->lender->feeder);
    Py_RETURN_NONE;
}

static PyObject *feeder_close(PyObject *self, PyObject *unused)
{
    struct intake *n = intake_enter(self, "Feeder.close");
    side_status r;
    (void)unused;

    if (n == NULL)
        return NULL;
    if (n->stopped)
        Py_RETURN_NONE;
    r = intake_stop(n);
    if (r != SIDE_OK)
        return native_raise(r);
    life_sweep();
    Py_RETURN_NONE;
}

/* ---------------------------------------------------------------- stats */

#define SUM(name)                                     \
    {                                                 \
#name, offsetof(side_feeder_stats, name), 'd' \
    }
#define NUMBER(name)                                  \
    {                                                 \
#name, offsetof(side_feeder_stats, name), 'u' \
    }
#define BYTES(name)                                   \
    {                                                 \
#name, offsetof(side_feeder_stats, name), 'z' \
    }
#define COUNT(name)                                   \
    {                                                 \
#name, offsetof(side_feeder_stats, name), 'i' \
    }

static const struct {
    const char *name;
    size_t offset;
    char type; /* double, uint64_t, size_t, uint32_t */
} fields[] = {
    NUMBER(submitted),   NUMBER(taken),     NUMBER(timed),        NUMBER(bytes),      NUMBER(direct_bytes),
    NUMBER(copies),      SUM(stage_busy_s), SUM(copy_s),          SUM(compute_s),     SUM(stall_s),
    SUM(lost_source_s),  SUM(lost_slot_s),  SUM(lost_stage_s),    SUM(lost_link_s),   SUM(submit_wait_s),
    COUNT(slots),        COUNT(threads),    COUNT(staging_slots), BYTES(chunk_bytes), BYTES(pinned_bytes),
    BYTES(device_bytes),
};

static PyObject *field_value(const side_feeder_stats *stats, size_t i)
{
    const char *at = (const char *)stats + fields[i].offset;

    switch (fields[i].type) {
    case 'd': return PyFloat_FromDouble(*(const double *)(const void *)at);
    case 'u': return PyLong_FromUnsignedLongLong(*(const uint64_t *)(const void *)at);
    case 'z': return PyLong_FromSize_t(*(const size_t *)(const void *)at);
    default: return PyLong_FromUnsignedLong(*(const uint32_t *)(const void *)at);
    }
}

/* Takes over `value`. */
static bool put(PyObject *dict, const char *name, PyObject *value)
{
    bool ok = value != NULL && PyDict_SetItemString(dict, name, value) == 0;

    Py_XDECREF(value);
    return ok;
}

static PyObject *feeder_stats(PyObject *self, PyObject *unused)
{
    struct intake *n = intake_enter(self, "Feeder.stats");
    side_feeder_stats stats;
    PyObject *dict;
    side_status r;
    bool ok = true;
    (void)unused;

    if (n == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    r = side_feeder_get_stats(n->lender->feeder, &stats);
    Py_END_ALLOW_THREADS;
    if (r != SIDE_OK)
        return native_raise(r);
    dict = PyDict_New();
    if (dict == NULL)
        return NULL;
    for (size_t i = 0; ok && i < sizeof(fields) / sizeof(fields[0]); i++)
        ok = put(dict, fields[i].name, field_value(&stats, i));
    ok = ok && put(dict, "held", PyLong_FromUnsignedLong(atomic_load(&n->lender->held))) &&
         put(dict, "retired", PyLong_FromUnsignedLong(atomic_load(&n->lender->retired))) &&
         put(dict, "failed", PyLong_FromUnsignedLong(atomic_load(&n->lender->failed))) &&
         put(dict, "sources_held", PyLong_FromSize_t(n->count));
    if (!ok)
        Py_CLEAR(dict);
    return dict;
}

/* ---------------------------------------------------------------- type */

/* clang-format off */
static PyMethodDef feeder_methods[] = {
    {"submit", feeder_submit, METH_VARARGS,
     "submit($self, pieces, keep, /)\n--\n\n"
     "Queues one batch: a list of (address, bytes, offset in the slot). `keep` is held until the batch is copied.\n"
     "Returns its number. Blocks, without the GIL, while the queue is full."},
    {"next", feeder_next, METH_VARARGS,
     "next($self, stream, leaves, convert, /)\n--\n\n"
     "The next batch, ready on `stream`: (Loan, list of convert(capsule)), one for each leaf (offset, dtype code,\n"
     "bits, shape, strides or None). With no leaves (or None) the loan ends with the Loan object."},
    {"discard", feeder_discard, METH_NOARGS, "discard($self, /)\n--\n\nDrops what was submitted and not taken."},
    {"copied", feeder_copied, METH_NOARGS, "copied($self, /)\n--\n\nBatches 0 .. n - 1 have been copied: n. Lets go of their sources."},
    {"sweep", feeder_sweep, METH_NOARGS, "sweep($self, /)\n--\n\nLets go of all that is done with."},
    {"taken", feeder_taken, METH_NOARGS, "taken($self, /)\n--\n\nThe number behind that of the last batch that next() took."},
    {"held", feeder_held, METH_NOARGS, "held($self, /)\n--\n\nLoans that have not ended."},
    {"retired", feeder_retired, METH_NOARGS, "retired($self, /)\n--\n\nSlots that will not come back: their loans ended during a graph capture."},
    {"watch", feeder_watch, METH_O, "watch($self, stream, /)\n--\n\nLoans that end while `stream` captures a graph retire their slot too. It must outlive the feeder."},
    {"wait_given_back", feeder_wait_given_back, METH_VARARGS,
     "wait_given_back($self, held_below, timeout, /)\n--\n\nWaits, without the GIL, until fewer loans are held. False: `timeout` seconds are over."},
    {"stats", feeder_stats, METH_NOARGS, "stats($self, /)\n--\n\nCounts, bytes and seconds since the feeder was made."},
    {"cancel", feeder_cancel, METH_NOARGS, "cancel($self, /)\n--\n\nBlocked and later calls of submit and next raise Cancelled."},
    {"close", feeder_close, METH_NOARGS,
     "close($self, /)\n--\n\n"
     "Ends the threads and lets go of the sources. Loans live on; the slots' memory goes with the last of them and\n"
     "this object."},
    {NULL, NULL, 0, NULL},
};

static const char feeder_doc[] =
    "Feeder(device, *, slots, slot_bytes, memory=0, stride=0, memory_stream=-1, owner=None, copy_stream=None, queue=0, threads=0, "
    "chunk_bytes=0, pinned_bytes=0, timing=True, timeout=0.0)\n--\n\n"
    "Batches from host memory into device slots, handed out as loans. `owner` is held while `memory`, which slot 0\n"
    "begins at, is used.";
/* clang-format on */

static PyType_Slot feeder_slots[] = {
    {Py_tp_doc, (void *)(uintptr_t)feeder_doc},
    {Py_tp_new, feeder_new},
    {Py_tp_dealloc, feeder_dealloc},
    {Py_tp_methods, feeder_methods},
    {0, NULL},
};

static PyType_Spec feeder_spec = {
    .name = "sidestream._native.Feeder",
    .basicsize = sizeof(feeder_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = feeder_slots,
};

int feeder_add(PyObject *module)
{
    static PyTypeObject *type;

    if (type == NULL) {
        type = (PyTypeObject *)PyType_FromSpec(&feeder_spec);
        life_add_exit(intake_stop_all);
    }
    return type == NULL || PyModule_AddType(module, type) != 0 ? -1 : loan_add(module);
}
