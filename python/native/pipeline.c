/* SPDX-License-Identifier: MIT
 *
 * Pipeline: making, running and ending one. What the caller pulls is in pull.c. */
#include "pipeline.h"

static PyTypeObject *pipeline_type;

/* ---------------------------------------------------------------- handle */

static struct pipeline_ref *live; /* GIL: pipelines that are not buried */

struct pipeline_ref *pipeline_hold(struct pipeline_ref *ref)
{
    atomic_fetch_add_explicit(&ref->refs, 1, memory_order_relaxed);
    return ref;
}

bool pipeline_hold_living(struct pipeline_ref *ref)
{
    size_t refs = atomic_load_explicit(&ref->refs, memory_order_relaxed);

    while (refs > 0) {
        if (atomic_compare_exchange_weak_explicit(&ref->refs, &refs, refs + 1, memory_order_relaxed,
                                                  memory_order_relaxed))
            return true;
    }
    return false;
}

static void unlink_live(struct pipeline_ref *ref)
{
    struct pipeline_ref **at = &live;

    while (*at != NULL && *at != ref)
        at = &(*at)->next;
    if (*at != NULL)
        *at = ref->next;
}

/* Ends the threads and waits for what is in flight. `cancel`: without running to the end. */
static side_status destroy(struct pipeline_ref *ref, bool cancel)
{
    side_pipeline *pipeline = ref->pipeline;
    side_status s;

    ref->pipeline = NULL;
    Py_BEGIN_ALLOW_THREADS
    if (cancel)
        side_pipeline_cancel(pipeline);
    s = side_pipeline_destroy(pipeline);
    Py_END_ALLOW_THREADS
    return s == SIDE_CANCELLED ? SIDE_OK : s;
}

/* Of what only a pipeline that runs needs. */
static void let_go(struct pipeline_ref *ref)
{
    Py_CLEAR(ref->source);
    Py_CLEAR(ref->sink);
    Py_CLEAR(ref->compute);
    Py_CLEAR(ref->progress);
    Py_CLEAR(ref->holds);
    for (uint32_t i = 0; i < ref->stream_count; i++)
        Py_CLEAR(ref->streams[i]);
}

static void release(struct pipeline_ref *ref)
{
    let_go(ref);
    for (int i = 0; i < 3; i++)
        Py_CLEAR(ref->error[i]);
    Py_CLEAR(ref->owner);
    free(ref->blocks_in);
    free(ref->blocks_out);
    free(ref->pieces);
    device_drop(ref->device);
    free(ref);
}

/* If the device does not finish, what it may touch is kept, and so is all that is held. */
static void pipeline_bury(struct grave *grave)
{
    struct pipeline_ref *ref = (struct pipeline_ref *)(void *)((char *)grave - offsetof(struct pipeline_ref, grave));

    unlink_live(ref);
    if (ref->pipeline == NULL || destroy(ref, true) == SIDE_OK)
        release(ref);
}

void pipeline_drop(void *parent)
{
    struct pipeline_ref *ref = parent;

    if (ref == NULL || !life_goes_on(ref->forks))
        return;
    if (atomic_fetch_sub_explicit(&ref->refs, 1, memory_order_acq_rel) == 1)
        life_bury(&ref->grave);
}

/* Cancels, gives the threads that are in calls time to leave them, and stops the library's threads: after this no callback comes. */
static void end_all_at_exit(void)
{
    struct pipeline_ref *ref, *next;

    for (ref = live; ref != NULL; ref = ref->next) {
        if (ref->pipeline != NULL && ref->forks == life_forks())
            side_pipeline_cancel(ref->pipeline);
    }
    for (ref = live; ref != NULL; ref = next) {
        if (!pipeline_hold_living(ref)) {
            next = ref->next; /* in the graveyard */
            continue;
        }
        for (int tries = 0; ref->inside > 0 && tries < 1000; tries++) {
            Py_BEGIN_ALLOW_THREADS
            native_sleep(0.01);
            Py_END_ALLOW_THREADS
        }
        if (ref->pipeline != NULL && ref->inside == 0 && ref->forks == life_forks())
            destroy(ref, true);
        next = ref->next;
        pipeline_drop(ref);
    }
}

/* ---------------------------------------------------------------- making */

static int add_streams(struct pipeline_ref *ref, PyObject *given, unsigned count, side_stream **streams)
{
    Py_ssize_t n = given == Py_None ? (Py_ssize_t)(count > 0 ? count : 1) : PySequence_Size(given);

    if (n < 0)
        return -1;
    if (n < 1 || n > MOST_STREAMS || (given != Py_None && count != 0 && (Py_ssize_t)count != n)) {
        PyErr_Format(PyExc_ValueError, "streams and compute_streams: 1..%d, and one number", (int)MOST_STREAMS);
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *stream = given == Py_None ? native_stream_new(ref->owner) : PySequence_GetItem(given, i);
        struct stream_ref *handle = stream == NULL ? NULL : native_stream(stream, "compute_streams");
        if (handle == NULL) {
            Py_XDECREF(stream);
            return -1;
        }
        ref->streams[i] = stream;
        ref->stream_count = (uint32_t)i + 1;
        streams[i] = handle->stream;
    }
    return 0;
}

static int callable_or_none(PyObject *object, const char *what, PyObject **to)
{
    if (object == Py_None)
        return 0;
    if (PyCallable_Check(object)) {
        *to = Py_NewRef(object);
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "%s must be callable", what);
    return -1;
}

struct arguments {
    PyObject *device, *source, *compute, *sink, *compute_streams, *log, *progress;
    Py_ssize_t item_bytes, result_bytes, chunk_bytes, pinned_bytes;
    unsigned depth, window, streams, threads;
    double timeout, compute_s;
};

static int parse(PyObject *args, PyObject *kwargs, struct arguments *a)
{
    static const char *const names[] = {"device",       "source",       "compute", "sink",    "item_bytes",
                                        "result_bytes", "depth",        "window",  "streams", "compute_streams",
                                        "chunk_bytes",  "pinned_bytes", "threads", "timeout", "log",
                                        "progress",     "compute_s",    NULL};

    a->compute = a->sink = a->compute_streams = a->log = a->progress = Py_None;
    if (!native_parse(args, kwargs, "OO|OO$nnIIIOnnIdOOd:Pipeline", names, &a->device, &a->source, &a->compute, &a->sink,
                      &a->item_bytes, &a->result_bytes, &a->depth, &a->window, &a->streams, &a->compute_streams,
                      &a->chunk_bytes, &a->pinned_bytes, &a->threads, &a->timeout, &a->log, &a->progress, &a->compute_s))
        return -1;
    if (a->item_bytes < 0 || a->result_bytes < 0 || a->chunk_bytes < 0 || a->pinned_bytes < 0) {
        PyErr_SetString(PyExc_ValueError, "item_bytes, result_bytes, chunk_bytes and pinned_bytes take 0 and more");
        return -1;
    }
    if (a->depth > INT_MAX || a->window > INT_MAX || a->streams > INT_MAX || a->threads > INT_MAX) {
        PyErr_SetString(PyExc_ValueError, "depth, window, streams and threads take 0 and more");
        return -1;
    }
    return 0;
}

static int fill_options(struct pipeline_ref *ref, const struct arguments *a, side_pipeline_options *o,
                        side_stream **streams)
{
    size_t largest_in = 0, largest_out = 0;
    bool failed;

    if (source_parse(ref, a->source, &o->source, &largest_in) != 0 ||
        sink_parse(ref, a->sink, &o->sink, &largest_out) != 0 ||
        callable_or_none(a->compute, "compute", &ref->compute) != 0 ||
        callable_or_none(a->progress, "progress", &ref->progress) != 0)
        return -1;
    o->log = native_log(a->log, "log", &failed);
    if (failed || (o->log != NULL && PyList_Append(ref->holds, a->log) != 0))
        return -1;
    o->item_bytes = a->item_bytes > 0 ? (size_t)a->item_bytes : largest_in;
    o->result_bytes = a->result_bytes > 0 ? (size_t)a->result_bytes : largest_out;
    if (o->item_bytes == 0 && o->source.kind != SIDE_END_BLOCKS) {
        PyErr_SetString(PyExc_ValueError, "item_bytes: needed where the source is a callable or a file");
        return -1;
    }
    if (o->item_bytes == 0)
        o->item_bytes = 1; /* no items, or empty ones */
    if (o->result_bytes == 0 && ref->sink != NULL) {
        PyErr_SetString(PyExc_ValueError, "result_bytes: needed where the sink is a callable");
        return -1;
    }
    if (ref->compute != NULL && add_streams(ref, a->compute_streams, a->streams, streams) != 0)
        return -1;
    if (ref->compute != NULL) {
        o->compute = compute_call;
        o->compute_user = ref;
        o->compute_streams = streams;
        o->streams = ref->stream_count;
    }
    if (ref->progress != NULL) {
        o->progress = progress_call;
        o->progress_user = ref;
    }
    o->depth = a->depth;
    o->window = a->window;
    o->threads = a->threads;
    o->chunk_bytes = (size_t)a->chunk_bytes;
    o->pinned_bytes = (size_t)a->pinned_bytes;
    o->timeout_s = a->timeout;
    o->compute_s = a->compute_s;
    return 0;
}

static struct pipeline_ref *ref_make(PyObject *owner)
{
    struct device_ref *device = native_device(owner, "device");
    struct pipeline_ref *ref = device == NULL ? NULL : calloc(1, sizeof(*ref));

    if (ref == NULL) {
        if (device != NULL)
            PyErr_NoMemory();
        return NULL;
    }
    ref->refs = 1;
    ref->forks = life_forks();
    ref->device = device_hold(device);
    ref->owner = Py_NewRef(owner);
    ref->grave.bury = pipeline_bury;
    ref->next = live;
    live = ref;
    ref->holds = PyList_New(0);
    if (ref->holds == NULL) {
        pipeline_drop(ref);
        return NULL;
    }
    return ref;
}

static PyObject *pipeline_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    side_pipeline_options o = SIDE_PIPELINE_OPTIONS_INIT;
    side_stream *streams[MOST_STREAMS];
    struct arguments a = {0};
    struct pipeline_ref *ref;
    pipeline_object *self;
    side_status s;

    if (native_enter() != 0 || parse(args, kwargs, &a) != 0)
        return NULL;
    ref = ref_make(a.device);
    if (ref == NULL)
        return NULL;
    if (fill_options(ref, &a, &o, streams) != 0)
        goto fail;
    Py_BEGIN_ALLOW_THREADS
    s = side_pipeline_create(ref->device->device, &o, &ref->pipeline);
    Py_END_ALLOW_THREADS
    native_drain_log();
    if (s != SIDE_OK) {
        ref->pipeline = NULL;
        native_raise(s);
        goto fail;
    }
    self = (pipeline_object *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        goto fail;
    self->ref = ref;
    return (PyObject *)self;
fail:
    pipeline_drop(ref);
    native_sweep();
    return NULL;
}

/* ---------------------------------------------------------------- calls */

struct pipeline_ref *pipeline_of(PyObject *object)
{
    struct pipeline_ref *ref = ((pipeline_object *)object)->ref;

    if (native_enter() != 0)
        return NULL;
    if (ref->forks != life_forks())
        return (struct pipeline_ref *)(void *)native_raise_text(SIDE_FORKED, "Pipeline",
                                                                "the pipeline is from before a fork");
    if (ref->pipeline == NULL || ref->closed)
        return (struct pipeline_ref *)(void *)native_raise_text(SIDE_STATE, "Pipeline", "the pipeline was closed");
    return ref;
}

int visit_begin(struct visit *visit, struct pipeline_ref *ref)
{
    if (interrupt_begin(ref->pipeline, &visit->interrupt) != 0)
        return -1;
    ref->inside++;
    visit->ref = pipeline_hold(ref);
    return 0;
}

bool pipeline_raise_kept(struct pipeline_ref *ref)
{
    if (ref->error[0] == NULL)
        return false;
    PyErr_Restore(ref->error[0], ref->error[1], ref->error[2]);
    memset(ref->error, 0, sizeof(ref->error));
    return true;
}

int visit_end(struct visit *visit, side_status s)
{
    struct pipeline_ref *ref = visit->ref;
    side_error error = *side_last_error(); /* before Python code of a signal handler runs */
    int r = 0;

    interrupt_end(visit->interrupt);
    ref->inside--;
    if (s < 0 && pipeline_raise_kept(ref)) {
        r = -1;
    } else if (PyErr_CheckSignals() != 0) {
        r = -1;
    } else if (s < 0) {
        if (error.status == s)
            native_raise_error(&error);
        else
            native_raise(s);
        r = -1;
    }
    if (r == 0)
        native_drain_log();
    pipeline_drop(ref);
    return r;
}

static PyObject *stats_dict(const side_pipeline_stats *s)
{
    return Py_BuildValue("{s:K,s:K,s:K,s:d,s:d,s:d,s:d,s:d,s:d,s:I,s:I,s:I,s:I,s:I,s:n,s:n,s:n,s:N}", "items",
                         (unsigned long long)s->items, "bytes_in", (unsigned long long)s->bytes_in, "bytes_out",
                         (unsigned long long)s->bytes_out, "time_s", s->time_s, "source_wait_s", s->source_wait_s,
                         "sink_wait_s", s->sink_wait_s, "device_wait_s", s->device_wait_s, "stage_busy_s",
                         s->stage_busy_s, "drain_busy_s", s->drain_busy_s, "depth", s->depth, "window", s->window,
                         "streams", s->streams, "threads", s->threads, "staging_slots", s->staging_slots, "chunk_bytes",
                         s->chunk_bytes, "pinned_bytes", s->pinned_bytes, "device_bytes", s->device_bytes, "disabled",
                         PyBool_FromLong(s->disabled));
}

static PyObject *pipeline_run(PyObject *object, PyObject *unused)
{
    struct pipeline_ref *ref = pipeline_of(object);
    side_pipeline_stats stats;
    struct visit visit;
    side_status s;
    (void)unused;

    if (ref == NULL || visit_begin(&visit, ref) != 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    s = side_pipeline_run(ref->pipeline, &stats);
    Py_END_ALLOW_THREADS
    return visit_end(&visit, s) == 0 ? stats_dict(&stats) : NULL;
}

static PyObject *pipeline_stats(PyObject *object, PyObject *unused)
{
    struct pipeline_ref *ref = pipeline_of(object);
    side_pipeline_stats stats;
    side_status s;
    (void)unused;

    if (ref == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    s = side_pipeline_get_stats(ref->pipeline, &stats);
    Py_END_ALLOW_THREADS
    return s == SIDE_OK ? stats_dict(&stats) : native_raise(s);
}

static PyObject *pipeline_cancel(PyObject *object, PyObject *unused)
{
    struct pipeline_ref *ref = ((pipeline_object *)object)->ref;
    (void)unused;

    if (ref->pipeline != NULL && ref->forks == life_forks())
        side_pipeline_cancel(ref->pipeline); /* one atomic store */
    Py_RETURN_NONE;
}

static PyObject *pipeline_close(PyObject *object, PyObject *unused)
{
    struct pipeline_ref *ref = ((pipeline_object *)object)->ref;
    side_status s;
    (void)unused;

    if (ref->pipeline == NULL || ref->closed || !life_goes_on(ref->forks))
        Py_RETURN_NONE;
    if (ref->inside > 0)
        return native_raise_text(SIDE_STATE, "Pipeline.close",
                                 "the pipeline runs; cancel() it and let run() return first");
    ref->closed = true;
    /* Somebody has memory of an item, or of a callback's view: what is left is done when he lets go. */
    if (atomic_load_explicit(&ref->refs, memory_order_acquire) > 1) {
        side_pipeline_cancel(ref->pipeline);
        Py_RETURN_NONE;
    }
    s = destroy(ref, true);
    if (s != SIDE_OK) {
        pipeline_hold(ref); /* for ever: what the device may touch is kept */
        return native_raise(s);
    }
    let_go(ref);
    Py_RETURN_NONE;
}

static PyObject *pipeline_rewind(PyObject *object, PyObject *unused)
{
    struct pipeline_ref *ref = pipeline_of(object);
    struct visit visit;
    side_status s;
    (void)unused;

    if (ref == NULL || visit_begin(&visit, ref) != 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    s = side_pipeline_rewind(ref->pipeline);
    Py_END_ALLOW_THREADS
    return visit_end(&visit, s) == 0 ? Py_NewRef(Py_None) : NULL;
}

/* ---------------------------------------------------------------- class */

static int pipeline_traverse(PyObject *object, visitproc visit, void *arg)
{
    struct pipeline_ref *ref = ((pipeline_object *)object)->ref;

    Py_VISIT(Py_TYPE(object));
    if (ref == NULL || atomic_load_explicit(&ref->refs, memory_order_relaxed) != 1)
        return 0; /* items or exports hold it, too: then nothing is garbage */
    Py_VISIT(ref->source);
    Py_VISIT(ref->sink);
    Py_VISIT(ref->compute);
    Py_VISIT(ref->progress);
    Py_VISIT(ref->holds);
    return 0;
}

static void pipeline_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);

    PyObject_GC_UnTrack(object);
    pipeline_drop(((pipeline_object *)object)->ref);
    PyObject_GC_Del(object);
    Py_DECREF(type);
    native_sweep();
}

static PyObject *pipeline_enter(PyObject *object, PyObject *unused)
{
    (void)unused;
    return pipeline_of(object) == NULL ? NULL : Py_NewRef(object);
}

static PyObject *pipeline_exit(PyObject *object, PyObject *args)
{
    PyObject *r = pipeline_close(object, NULL), *type;

    /* What the block raised is the cause of what the close met. */
    if (r == NULL && PyTuple_Size(args) > 0 && (type = PyTuple_GetItem(args, 0)) != Py_None) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    return r;
}

static PyObject *pipeline_repr(PyObject *object)
{
    struct pipeline_ref *ref = ((pipeline_object *)object)->ref;
    const char *state = ref->pipeline == NULL || ref->closed ? ", closed" : ref->inside > 0 ? ", at work" : "";

    return PyUnicode_FromFormat("<sidestream.Pipeline on %s%s>", ref->device->props.spec, state);
}

/* clang-format off */
PyDoc_STRVAR(pipeline_doc,
"Pipeline(device, source, compute=None, sink=None, *, item_bytes=0, result_bytes=0, depth=0, window=0, streams=0, compute_streams=None, "
"chunk_bytes=0, pinned_bytes=0, threads=0, timeout=0.0, log=None, progress=None, compute_s=0.0)\n--\n\n"
"source -> H2D -> compute -> D2H -> sink, all at the same time, with bounded memory.\n\n"
"source: a list of arrays (an item may be a list of arrays, which are packed; contiguous; the buffer protocol\n"
"or DLPack; any host memory, best pinned), a callable source(number, view) that fills the writable memoryview\n"
"and returns its bytes, or None for no more; an open binary file, or (file, offset, length), where file may be\n"
"a descriptor, too.\n"
"compute: compute(stream, item) queues the item's work on `stream` and returns; called in order on the thread\n"
"that runs the pipeline. See Item.\n"
"sink: a list of writable arrays, a callable sink(number, view) that reads the memoryview, an open binary file,\n"
"or (file, offset). Source and sink callables run on threads of the library's, in order, one call at a time\n"
"each; views end with the call.\n"
"item_bytes, result_bytes: the largest item and result; 0: from the arrays. depth: slots in each device ring;\n"
"0: 2 to 8, chosen from the machine's figures, 3 to 8 where you pull; compute_s, the seconds that the device\n"
"takes for one item alone, helps to choose. window: items queued and unfinished; 0: 2 * depth.\n"
"streams: compute streams, made here; compute_streams: Streams of yours. chunk_bytes, pinned_bytes, threads: of\n"
"staging; 0: default. timeout: seconds that the device may take before Stuck; 0: 30. log: a Log.\n"
"progress(items, bytes_in, bytes_out): from the running thread.\n\n"
"Arrays, files and callables are held until the pipeline is closed or dropped. An exception in a callback ends\n"
"the run, and is raised by it. Raises OutOfDeviceMemory, OverBudget.");

static PyMethodDef pipeline_methods[] = {
    {"run", pipeline_run, METH_NOARGS,
     "run($self, /)\n--\n\n"
     "Runs everything; returns when all results have arrived and nothing is in flight: a dict (see stats). May be\n"
     "called again: sources start anew. On an error or cancel it drains first, and the pipeline cannot be used any\n"
     "more. Ctrl-C ends it. Raises Cancelled, Stuck, DeviceLost and what callbacks raised."},
    {"pull", pipeline_pull, METH_O,
     "pull($self, stream, /)\n--\n\n"
     "Iterates over the items, each ready on `stream`. Asking for the next one says that what is queued on `stream`\n"
     "so far has read (and its result written) the one before; it goes on where an earlier pull stopped (see\n"
     "rewind), and after the last item with the first."},
    {"next", pipeline_next, METH_O, "next($self, stream, /)\n--\n\n"
     "The next Item, ready on `stream`; None after the last, and then a new pass begins. Several may be held, fewer\n"
     "than depth (WouldDeadlock)."},
    {"done", (PyCFunction)(void (*)(void))pipeline_done, METH_VARARGS | METH_KEYWORDS,
     "done($self, item, stream)\n--\n\nWhat is queued on `stream` so far has read the item, and written its result. Any order."},
    {"rewind", pipeline_rewind, METH_NOARGS, "rewind($self, /)\n--\n\nBlocks until all results are in the sink; then the next item is the first. Items must be done."},
    {"stats", pipeline_stats, METH_NOARGS,
     "stats($self, /)\n--\n\n"
     "A dict: items, bytes_in, bytes_out, time_s (virtual on sim), source_wait_s, sink_wait_s, device_wait_s,\n"
     "stage_busy_s, drain_busy_s; as used: depth, window, streams, threads, staging_slots, chunk_bytes,\n"
     "pinned_bytes, device_bytes, disabled."},
    {"cancel", pipeline_cancel, METH_NOARGS, "cancel($self, /)\n--\n\nFrom any thread: the run, or the pulling loop, raises Cancelled once callbacks have returned and all is drained."},
    {"close", pipeline_close, METH_NOARGS, "close($self, /)\n--\n\nStops, waits for what is in flight, and lets go of arrays and callables. May be called again. Raises Stuck."},
    {"__enter__", pipeline_enter, METH_NOARGS, NULL},
    {"__exit__", pipeline_exit, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
/* clang-format on */

static PyType_Slot pipeline_slots[] = {
    {Py_tp_doc, (void *)(uintptr_t)pipeline_doc},
    {Py_tp_new, pipeline_new},
    {Py_tp_dealloc, pipeline_dealloc},
    {Py_tp_repr, pipeline_repr},
    {Py_tp_traverse, pipeline_traverse},
    {Py_tp_methods, pipeline_methods},
    {0, NULL},
};

static PyType_Spec pipeline_type_spec = {
    .name = "sidestream.Pipeline",
    .basicsize = sizeof(pipeline_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = pipeline_slots,
};

int pipeline_add(PyObject *module)
{
    if (pipeline_type == NULL) {
        pipeline_type = (PyTypeObject *)PyType_FromSpec(&pipeline_type_spec);
        life_add_exit(end_all_at_exit);
    }
    return pipeline_type == NULL || pull_add() != 0 ? -1 : PyModule_AddType(module, pipeline_type);
}
