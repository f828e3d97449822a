/* SPDX-License-Identifier: MIT
 *
 * Load: tensors on their way from files to memory. The threads that read and copy are the library's and never take the GIL. */
#include "load.h"

/* A load that was started. What its copies write to lives until it was destroyed: `owners`, and for ever where the device is stuck. */
struct run {
    struct run *next, **before; /* in the list of all that were not buried; GIL */
    side_load *load;
    struct device_ref *device;
    PyObject *owners;                 /* a list */
    struct stream_ref *memory_stream; /* NULL: none */
    size_t users;                     /* GIL: calls that are under way without it */
    struct load_parts parts;
    unsigned forks;
    struct grave grave;
};

typedef struct load_object {
    PyObject_HEAD
    struct run *run; /* NULL once closed */
} load_object;

static PyTypeObject *load_type;
static struct run *runs; /* GIL */

/* ---------------------------------------------------------------- life */

static void run_free(struct run *run)
{
    stream_drop(run->memory_stream);
    shapes_end(&run->parts.shapes);
    checkpoint_drop(run->parts.checkpoint);
    device_drop(run->device);
    Py_XDECREF(run->owners);
    free(run->parts.whole);
    free(run->parts.tensors);
    free(run);
}

static void run_bury(struct grave *grave)
{
    struct run *run = (struct run *)(void *)((char *)grave - offsetof(struct run, grave));
    side_status s;

    if (run->users > 0) /* the exit hook waits for it: it stays */
        return;
    Py_BEGIN_ALLOW_THREADS
    s = side_load_destroy(run->load);
    Py_END_ALLOW_THREADS
    *run->before = run->next;
    if (run->next != NULL)
        run->next->before = run->before;
    if (s != SIDE_STUCK) /* else it may go on to read its files and to write to its memory, for ever */
        run_free(run);
}

static void run_list(struct run *run)
{
    run->next = runs;
    run->before = &runs;
    if (runs != NULL)
        runs->before = &run->next;
    runs = run;
}

/* Threads that still write to memory of Python's end before the interpreter does. */
static void end_all_at_exit(void)
{
    for (struct run *run = runs; run != NULL; run = run->next) {
        side_load *load = run->load;
        if (run->forks != life_forks() || run->users > 0)
            continue;
        run->users++; /* stays in the list */
        side_load_cancel(load);
        Py_BEGIN_ALLOW_THREADS
        side_load_join(load, NULL);
        Py_END_ALLOW_THREADS
        run->users--;
    }
}

/* ---------------------------------------------------------------- start */

/* A part as (tensor, begin, bytes, address); 0 as bytes: all from there on; 0 as address: in an arena. */
static int part_of(struct run *run, size_t i, PyObject *tuple, side_load_part *part)
{
    unsigned long long tensor, begin, bytes, address;
    side_tensor t;

    if (!PyTuple_Check(tuple) || !PyArg_ParseTuple(tuple, "KKKK", &tensor, &begin, &bytes, &address)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "parts are tuples (tensor, begin, bytes, address)");
        return -1;
    }
    if (side_checkpoint_tensor(run->parts.checkpoint->checkpoint, tensor, &t) != SIDE_OK) {
        PyErr_Format(PyExc_IndexError, "part %zu: tensor %llu: the checkpoint has %zu", i, tensor,
                     side_checkpoint_count(run->parts.checkpoint->checkpoint));
        return -1;
    }
    part->tensor = tensor;
    part->begin = begin;
    part->bytes = bytes;
    part->data = (void *)(uintptr_t)address;
    run->parts.tensors[i] = tensor;
    run->parts.whole[i] = address == 0 && begin == 0 && (bytes == 0 || bytes == t.bytes);
    return 0;
}

/* NULL with an exception. `*parts` stays NULL where all are loaded. */
static struct run *run_make(struct device_ref *device, struct checkpoint_ref *checkpoint, PyObject *list,
                            side_load_part **parts)
{
    struct run *run = calloc(1, sizeof(*run));
    size_t count = list == Py_None ? side_checkpoint_count(checkpoint->checkpoint) : (size_t)PyList_Size(list);
    bool good;

    if (run == NULL)
        return (struct run *)(void *)PyErr_NoMemory();
    run->device = device_hold(device);
    run->parts.checkpoint = checkpoint_hold(checkpoint);
    run->forks = life_forks();
    run->grave.bury = run_bury;
    run->parts.count = count;
    run->owners = PyList_New(0);
    run->parts.whole = calloc(count + 1, sizeof(*run->parts.whole));
    run->parts.tensors = calloc(count + 1, sizeof(*run->parts.tensors));
    if (list != Py_None)
        *parts = calloc(count + 1, sizeof(**parts));
    good = run->owners != NULL && run->parts.whole != NULL && run->parts.tensors != NULL &&
           (list == Py_None || *parts != NULL);
    if (!good && !PyErr_Occurred())
        PyErr_NoMemory();
    for (size_t i = 0; good && i < count; i++) {
        run->parts.whole[i] = true;
        run->parts.tensors[i] = i;
        if (list != Py_None)
            good = part_of(run, i, PyList_GetItem(list, (Py_ssize_t)i), &(*parts)[i]) == 0;
    }
    if (good)
        return run;
    run_free(run);
    return NULL;
}

static int backend_of(const char *name, side_load_backend *backend)
{
    static const char *const names[] = {"auto", "pread", "direct", "uring"};

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (strcmp(name, names[i]) == 0) {
            *backend = (side_load_backend)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "backend is '%s'; it takes auto, pread, direct or uring", name);
    return -1;
}

struct wishes {
    PyObject *device, *checkpoint, *parts, *keep, *stream;
    const char *where, *backend;
    int in_order, given, checksum;
    Py_ssize_t pinned, piece;
};

static int options_of(const struct wishes *w, struct stream_ref *stream, side_load_options *o)
{
    bool host = strcmp(w->where, "host") == 0;

    if (!host && strcmp(w->where, "device") != 0) {
        PyErr_Format(PyExc_ValueError, "where is '%s'; it takes device or host", w->where);
        return -1;
    }
    if (w->pinned < 0 || w->piece < 0) {
        PyErr_Format(PyExc_ValueError, "pinned_bytes and piece_bytes take 0 (the default) and more");
        return -1;
    }
    o->where = host ? SIDE_MEMORY_PAGEABLE : SIDE_MEMORY_DEVICE;
    o->flags = (w->in_order ? SIDE_LOAD_IN_ORDER : 0) | (w->given ? SIDE_LOAD_GIVEN : 0) |
               (w->checksum ? SIDE_LOAD_CHECKSUM : 0);
    o->pinned_bytes = (size_t)w->pinned;
    o->piece_bytes = (size_t)w->piece;
    o->memory_stream = stream != NULL ? stream->stream : NULL;
    return backend_of(w->backend, &o->backend);
}

static PyObject *start(PyTypeObject *type, const struct wishes *w, side_load_options *o)
{
    struct device_ref *device = native_device(w->device, "device");
    struct checkpoint_ref *checkpoint = device == NULL ? NULL : native_checkpoint(w->checkpoint, "checkpoint");
    struct stream_ref *stream;
    side_load_part *parts = NULL;
    struct run *run;
    load_object *self;
    side_status s;
    bool failed;

    if (checkpoint == NULL)
        return NULL;
    stream = native_stream_or_none(w->stream, "memory_stream", &failed);
    if (failed || options_of(w, stream, o) != 0)
        return NULL;
    if (w->parts != Py_None && !PyList_Check(w->parts))
        return PyErr_Format(PyExc_TypeError, "parts must be a list or None, not %R", (PyObject *)Py_TYPE(w->parts));
    if (w->parts != Py_None && PyList_Size(w->parts) == 0)
        return native_raise_text(SIDE_INVALID, "Load", "parts is empty");
    self = (load_object *)PyType_GenericAlloc(type, 0);
    run = self == NULL ? NULL : run_make(device, checkpoint, w->parts, &parts);
    if (run == NULL || (w->keep != Py_None && PyList_Append(run->owners, w->keep) != 0)) {
        free(parts);
        if (run != NULL)
            run_free(run);
        Py_XDECREF((PyObject *)self);
        return NULL;
    }
    run->memory_stream = stream == NULL ? NULL : stream_hold(stream);
    o->parts = parts;
    o->count = parts == NULL ? 0 : run->parts.count;
    Py_BEGIN_ALLOW_THREADS
    s = side_load_start(device->device, checkpoint->checkpoint, o, &run->load);
    Py_END_ALLOW_THREADS
    free(parts);
    if (s != SIDE_OK) {
        native_raise(s);
        run_free(run);
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    run_list(run);
    self->run = run;
    return (PyObject *)self;
}

static PyObject *load_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"device",   "checkpoint", "parts",         "keep",         "where",
                                        "in_order", "given",      "checksum",      "pinned_bytes", "piece_bytes",
                                        "threads",  "backend",    "memory_stream", "timeout",      NULL};
    struct wishes w = {.parts = Py_None, .keep = Py_None, .stream = Py_None, .where = "device", .backend = "auto"};
    side_load_options o = SIDE_LOAD_OPTIONS_INIT;

    if (native_enter() != 0 || !native_parse(args, kwargs, "OO|$OOspppnnIsOd:Load", names, &w.device, &w.checkpoint,
                                             &w.parts, &w.keep, &w.where, &w.in_order, &w.given, &w.checksum, &w.pinned,
                                             &w.piece, &o.threads, &w.backend, &w.stream, &o.timeout_s))
        return NULL;
    return start(type, &w, &o);
}

static PyObject *load_close(PyObject *object, PyObject *unused)
{
    load_object *self = (load_object *)object;
    struct run *run = self->run;
    (void)unused;

    if (run != NULL && run->users > 0)
        return native_raise_text(SIDE_STATE, "close", "another thread waits for the load; cancel() ends that");
    self->run = NULL;
    if (run != NULL && life_goes_on(run->forks)) {
        side_load_cancel(run->load);
        life_bury(&run->grave);
    }
    native_sweep();
    Py_RETURN_NONE;
}

static void load_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    struct run *run = ((load_object *)object)->run;

    if (run != NULL && life_goes_on(run->forks)) {
        side_load_cancel(run->load);
        life_bury(&run->grave);
    }
    PyObject_Free(object);
    Py_DECREF(type);
    native_sweep();
}

/* The run, which stays while `users` counts the caller; NULL with an exception. */
static struct run *run_of(PyObject *object)
{
    struct run *run = ((load_object *)object)->run;

    if (native_enter() != 0)
        return NULL;
    if (run == NULL)
        return (struct run *)(void *)native_raise_text(SIDE_STATE, "Load", "the load was closed");
    if (run->forks != life_forks())
        return (struct run *)(void *)native_raise_text(SIDE_FORKED, "Load", "the load is from before a fork");
    return run;
}

/* ---------------------------------------------------------------- memory */

static PyObject *load_arenas(PyObject *object, PyObject *unused)
{
    struct run *run = run_of(object);
    size_t count = run == NULL ? 0 : side_load_arenas(run->load);
    PyObject *list = run == NULL ? NULL : PyList_New((Py_ssize_t)count);
    side_load_arena arena;
    (void)unused;

    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *one = NULL;
        if (side_load_get_arena(run->load, i, &arena) == SIDE_OK)
            one = Py_BuildValue("(nK)", (Py_ssize_t)arena.bytes, (unsigned long long)arena.file);
        else
            native_raise(SIDE_STATE);
        if (one == NULL || PyList_SetItem(list, (Py_ssize_t)i, one) != 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *load_give(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"arena", "address", "owner", "stream", NULL};
    struct run *run = run_of(object);
    PyObject *owner, *stream_arg = Py_None;
    unsigned long long address;
    struct stream_ref *stream;
    Py_ssize_t arena;
    side_status s;
    bool failed;

    if (run == NULL || !native_parse(args, kwargs, "nKO|O:give", names, &arena, &address, &owner, &stream_arg))
        return NULL;
    stream = native_stream_or_none(stream_arg, "stream", &failed);
    if (failed || PyList_Append(run->owners, owner) != 0)
        return NULL;
    run->users++;
    Py_BEGIN_ALLOW_THREADS
    s = side_load_give_arena(run->load, (size_t)arena, (void *)(uintptr_t)address,
                             stream != NULL ? stream->stream : NULL);
    Py_END_ALLOW_THREADS
    run->users--;
    return s == SIDE_OK ? Py_NewRef(Py_None) : native_raise(s);
}

static PyObject *load_get_spec(PyObject *object, PyObject *arg)
{
    struct run *run = run_of(object);
    Py_ssize_t part = run == NULL ? -1 : PyLong_AsSsize_t(arg);

    if (run == NULL || PyErr_Occurred())
        return NULL;
    if (part < 0 || (size_t)part >= run->parts.count)
        return PyErr_Format(PyExc_IndexError, "part %zd: the load has %zu", part, run->parts.count);
    return load_spec(run->load, &run->parts, (size_t)part);
}

static PyObject *load_get_columns(PyObject *object, PyObject *unused)
{
    struct run *run = run_of(object);
    (void)unused;

    return run == NULL ? NULL : load_columns(run->load, &run->parts);
}

static PyObject *load_offsets(PyObject *object, PyObject *unused)
{
    struct run *run = run_of(object);
    PyObject *list = run == NULL ? NULL : PyList_New((Py_ssize_t)run->parts.count);
    side_load_place place;
    (void)unused;

    for (size_t i = 0; list != NULL && i < run->parts.count; i++) {
        PyObject *offset = NULL;
        if (side_load_get_place(run->load, i, &place) == SIDE_OK)
            offset = PyLong_FromSize_t(place.arena == SIZE_MAX ? 0 : place.offset);
        else
            native_raise(SIDE_STATE);
        if (offset == NULL || PyList_SetItem(list, (Py_ssize_t)i, offset) != 0)
            Py_CLEAR(list);
    }
    return list;
}

/* ---------------------------------------------------------------- waiting */

static PyObject *load_ready(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"parts", "seconds", NULL};
    struct run *run = run_of(object);
    Py_ssize_t parts;
    double seconds = 0;
    side_status s;

    if (run == NULL || !native_parse(args, kwargs, "n|d:ready", names, &parts, &seconds))
        return NULL;
    if (parts < 0 || (size_t)parts > run->parts.count)
        return PyErr_Format(PyExc_ValueError, "parts is %zd; the load has %zu", parts, run->parts.count);
    run->users++;
    Py_BEGIN_ALLOW_THREADS
    s = side_load_wait_count(run->load, (size_t)parts, seconds);
    Py_END_ALLOW_THREADS
    run->users--;
    return s == SIDE_OK || s == SIDE_AGAIN ? PyBool_FromLong(s == SIDE_OK) : native_raise(s);
}

static PyObject *load_wait(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"part", "stream", NULL};
    struct run *run = run_of(object);
    PyObject *stream_arg = Py_None;
    struct stream_ref *stream;
    Py_ssize_t part;
    side_status s;
    bool failed;

    if (run == NULL || !native_parse(args, kwargs, "n|O:wait", names, &part, &stream_arg))
        return NULL;
    stream = native_stream_or_none(stream_arg, "stream", &failed);
    if (failed)
        return NULL;
    run->users++;
    Py_BEGIN_ALLOW_THREADS
    s = side_load_wait(run->load, (size_t)part, stream != NULL ? stream->stream : NULL);
    Py_END_ALLOW_THREADS
    run->users--;
    return s == SIDE_OK ? Py_NewRef(Py_None) : native_raise(s);
}

static PyObject *routes_of(const side_load_stats *stats)
{
    PyObject *list = PyList_New(0);

    for (uint32_t i = 0; list != NULL && i < stats->route_count; i++) {
        const side_load_route *route = &stats->routes[i];
        PyObject *one = Py_BuildValue("{s:s,s:s,s:K,s:K}", "name", route->name, "why", route->why, "pieces",
                                      (unsigned long long)route->pieces, "bytes", (unsigned long long)route->bytes);
        if (one == NULL || PyList_Append(list, one) != 0)
            Py_CLEAR(list);
        Py_XDECREF(one);
    }
    return list;
}

static PyObject *stats_of(const side_load_stats *s)
{
    return Py_BuildValue(
        "{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:n,s:n,s:I,s:I,s:d,s:d,s:d,s:d,s:d,s:d,s:d,s:d,s:d,s:d,s:d,s:s,s:N}",
        "bytes", (unsigned long long)s->bytes, "read_bytes", (unsigned long long)s->read_bytes, "copied_bytes",
        (unsigned long long)s->copied_bytes, "moved_bytes", (unsigned long long)s->moved_bytes, "parts",
        (unsigned long long)s->parts, "ready", (unsigned long long)s->ready, "pieces", (unsigned long long)s->pieces,
        "copies", (unsigned long long)s->copies, "pinned_bytes", (Py_ssize_t)s->pinned_bytes, "piece_bytes",
        (Py_ssize_t)s->piece_bytes, "slots", s->slots, "threads", s->threads, "time_s", s->time_s, "plan_s", s->plan_s,
        "first_s", s->first_s, "pins_s", s->pins_s, "read_busy_s", s->read_busy_s, "copying_s", s->copying_s,
        "wait_read_s", s->wait_read_s, "wait_memory_s", s->wait_memory_s, "wait_pins_s", s->wait_pins_s, "gbps",
        s->gbps, "link_gbps", s->link_gbps, "bottleneck", s->bottleneck, "routes", routes_of(s));
}

static PyObject *load_stats(PyObject *object, PyObject *unused)
{
    struct run *run = run_of(object);
    side_load_stats stats;
    side_status s;
    (void)unused;

    if (run == NULL)
        return NULL;
    s = side_load_get_stats(run->load, &stats);
    return s == SIDE_OK ? stats_of(&stats) : native_raise(s);
}

/* Waits in slices, between which signals are looked at; a signal's exception cancels. */
static PyObject *load_join(PyObject *object, PyObject *unused)
{
    struct run *run = run_of(object);
    side_load_stats stats;
    PyObject *type, *value, *trace;
    bool stopped = false;
    side_status s;
    (void)unused;

    if (run == NULL)
        return NULL;
    run->users++;
    do {
        Py_BEGIN_ALLOW_THREADS
        s = side_load_wait_count(run->load, run->parts.count, NATIVE_SLICE_S);
        Py_END_ALLOW_THREADS
        stopped = PyErr_CheckSignals() != 0;
    } while (s == SIDE_AGAIN && !stopped);
    PyErr_Fetch(&type, &value, &trace);
    if (stopped)
        side_load_cancel(run->load);
    Py_BEGIN_ALLOW_THREADS
    s = side_load_join(run->load, &stats);
    Py_END_ALLOW_THREADS
    run->users--;
    PyErr_Restore(type, value, trace);
    if (stopped)
        return NULL;
    return s == SIDE_OK ? stats_of(&stats) : native_raise(s);
}

static PyObject *load_cancel(PyObject *object, PyObject *unused)
{
    struct run *run = run_of(object);
    (void)unused;

    if (run == NULL)
        return NULL;
    side_load_cancel(run->load);
    Py_RETURN_NONE;
}

static PyObject *load_checksum(PyObject *object, PyObject *arg)
{
    struct run *run = run_of(object);
    size_t part = run == NULL ? 0 : PyLong_AsSize_t(arg);
    uint64_t hash;
    side_status s;

    if (run == NULL || PyErr_Occurred())
        return NULL;
    s = side_load_get_checksum(run->load, part, &hash);
    return s == SIDE_OK ? PyLong_FromUnsignedLongLong(hash) : native_raise(s);
}

/* ---------------------------------------------------------------- class */

/* clang-format off */
PyDoc_STRVAR(load_doc,
"Load(device, checkpoint, *, parts=None, keep=None, where=\"device\", in_order=False, given=False, checksum=False,\n"
"     pinned_bytes=0, piece_bytes=0, threads=0, backend=\"auto\", memory_stream=None, timeout=0.0)\n--\n\n"
"Tensors on their way from files to memory, by threads of the library's, which need no GIL. Returns at once.\n\n"
"parts: a list of (tensor, first byte, bytes, address): 0 bytes are all from there on, address 0 is in an arena;\n"
"None: all tensors. keep: lives until nothing is written any more, as do owners. where: \"device\" or \"host\".\n"
"given: arenas come by give(), one for each file that arenas() has; reading goes on before. memory_stream: parts\n"
"with an address are written after what is queued there. Sizes of 0 are the defaults.");

static PyMethodDef load_methods[] = {
    {"arenas", load_arenas, METH_NOARGS, "arenas($self, /)\n--\n\n(bytes, file) of each."},
    {"give", (PyCFunction)(void (*)(void))load_give, METH_VARARGS | METH_KEYWORDS,
     "give($self, arena, address, owner, stream=None)\n--\n\n"
     "The memory of an arena, which `owner` keeps; written after what is queued on `stream`."},
    {"spec", load_get_spec, METH_O,
     "spec($self, part, /)\n--\n\n"
     "(name, number of its dtype, shape, strides, offset in elements, arena; -1: it is empty), None for one with an\n"
     "address. What is a part of a tensor counts as bytes."},
    {"columns", load_get_columns, METH_NOARGS,
     "columns($self, /)\n--\n\n"
     "What spec() says of all that have no address, as (names, groups). A group is of an arena and a dtype:\n"
     "(arena, number of the dtype, first element, names, elements, shapes, strides). Each begins where the one before\n"
     "it ends; what lies between two has None as a name, and ()."},
    {"offsets", load_offsets, METH_NOARGS, "offsets($self, /)\n--\n\nOf each part in its arena, in bytes."},
    {"ready", (PyCFunction)(void (*)(void))load_ready, METH_VARARGS | METH_KEYWORDS,
     "ready($self, parts, seconds=0.0)\n--\n\n"
     "Whether so many parts can be waited for without blocking, after `seconds` at most. Raises what the load failed\n"
     "with."},
    {"wait", (PyCFunction)(void (*)(void))load_wait, METH_VARARGS | METH_KEYWORDS,
     "wait($self, part, stream=None)\n--\n\n"
     "What is queued on `stream` (None: the host) from here on comes after the part's copies. Blocks until these\n"
     "are queued. Raises what the load failed with."},
    {"stats", load_stats, METH_NOARGS, "stats($self, /)\n--\n\nsize_load_stats of the C library, as a dict; any time."},
    {"join", load_join, METH_NOARGS,
     "join($self, /)\n--\n\n"
     "Waits until all is there, and looks whether files were changed meanwhile; stats(). Raises what the load\n"
     "failed with; Ctrl-C cancels it. Then nothing is in flight any more, but after Stuck."},
    {"cancel", load_cancel, METH_NOARGS, "cancel($self, /)\n--\n\nAny thread. What is not queued will not come; join() waits for the rest."},
    {"checksum", load_checksum, METH_O, "checksum($self, part, /)\n--\n\nXXH3 of a part, after join(), where it was asked for."},
    {"close", load_close, METH_NOARGS, "close($self, /)\n--\n\nCancels what runs, waits for the rest, lets go of memory. May be called again."},
    {NULL, NULL, 0, NULL},
};
/* clang-format on */

static PyType_Slot load_slots[] = {
    {Py_tp_doc, (void *)(uintptr_t)load_doc},
    {Py_tp_new, load_new},
    {Py_tp_dealloc, load_dealloc},
    {Py_tp_methods, load_methods},
    {0, NULL},
};

static PyType_Spec load_type_spec = {
    .name = "sidestream._native.Load",
    .basicsize = sizeof(load_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = load_slots,
};

int load_add(PyObject *module)
{
    if (load_type == NULL) {
        load_type = (PyTypeObject *)PyType_FromSpec(&load_type_spec);
        life_add_exit(end_all_at_exit);
    }
    return load_type == NULL ? -1 : PyModule_AddType(module, load_type);
}
