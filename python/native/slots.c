/* SPDX-License-Identifier: MIT
 *
 * Slots: rings and lists of memory with fences. What they hand out is in slot.c. */
#include "native.h"

static PyTypeObject *slots_type;

typedef struct slots_object {
    PyObject_HEAD
    struct slots_ref *ref;
    PyObject *owner; /* Device */
    side_policy policy;
    size_t slot_bytes;
    uint32_t count;
} slots_object;

static const char *const policies[] = {"ring", "list", "table"};
static const char *const places[] = {"pageable", "pinned", "device"};

struct slots_ref *slots_hold(struct slots_ref *ref)
{
    atomic_fetch_add_explicit(&ref->refs, 1, memory_order_relaxed);
    return ref;
}

/* Waits for what reads and writes them; if that does not end, the memory is kept. */
static void slots_bury(struct grave *grave)
{
    struct slots_ref *ref = (struct slots_ref *)(void *)((char *)grave - offsetof(struct slots_ref, grave));

    Py_BEGIN_ALLOW_THREADS
    side_slots_destroy(ref->slots);
    Py_END_ALLOW_THREADS
    device_drop(ref->device);
    free(ref);
}

void slots_drop(void *parent)
{
    struct slots_ref *ref = parent;

    if (ref == NULL || !life_goes_on(ref->forks))
        return;
    if (atomic_fetch_sub_explicit(&ref->refs, 1, memory_order_acq_rel) == 1)
        life_bury(&ref->grave);
}

static int find_name(const char *what, const char *name, const char *const *names)
{
    for (int i = 0; i < 3; i++) {
        if (strcmp(names[i], name) == 0)
            return i;
    }
    PyErr_Format(PyExc_ValueError, "%s is '%s'; it takes %s, %s or %s", what, name, names[0], names[1], names[2]);
    return -1;
}

static PyObject *slots_make(PyTypeObject *type, PyObject *owner, const side_slots_options *options)
{
    struct device_ref *device = native_device(owner, "device");
    struct slots_ref *ref = device == NULL ? NULL : calloc(1, sizeof(*ref));
    slots_object *self;
    side_status s;

    if (ref == NULL)
        return device == NULL ? NULL : PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    s = side_slots_create(device->device, options, &ref->slots);
    Py_END_ALLOW_THREADS
    if (s != SIDE_OK) {
        free(ref);
        return native_raise(s);
    }
    ref->refs = 1;
    ref->device = device_hold(device);
    ref->kind = options->where;
    ref->forks = life_forks();
    ref->grave.bury = slots_bury;
    self = (slots_object *)PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        slots_drop(ref);
        return NULL;
    }
    self->ref = ref;
    self->owner = Py_NewRef(owner);
    self->policy = options->policy;
    self->slot_bytes = options->slot_bytes;
    self->count = options->count;
    return (PyObject *)self;
}

static PyObject *slots_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"device", "policy", "count", "slot_bytes", "where", "readers", "timeout", NULL};
    side_slots_options o = SIDE_SLOTS_OPTIONS_INIT;
    const char *policy = "ring", *where = "device";
    Py_ssize_t bytes = 0;
    PyObject *device;
    int p, w;

    if (native_enter() != 0 || !native_parse(args, kwargs, "O|s$InsId:Slots", names, &device, &policy, &o.count, &bytes,
                                             &where, &o.readers, &o.timeout_s))
        return NULL;
    p = find_name("policy", policy, policies);
    w = p < 0 ? -1 : find_name("where", where, places);
    if (w < 0)
        return NULL;
    if (bytes <= 0)
        return PyErr_Format(PyExc_ValueError, "slot_bytes is %zd; it takes 1 and more", bytes);
    o.policy = (side_policy)p;
    o.where = (side_memory_kind)w;
    o.slot_bytes = (size_t)bytes;
    return slots_make(type, device, &o);
}

static void slots_dealloc(PyObject *object)
{
    slots_object *self = (slots_object *)object;
    PyTypeObject *type = Py_TYPE(object);

    slots_drop(self->ref);
    Py_XDECREF(self->owner);
    PyObject_Free(object);
    Py_DECREF(type);
    native_sweep();
}

static struct slots_ref *slots_check(PyObject *object)
{
    struct slots_ref *ref = ((slots_object *)object)->ref;

    if (native_enter() != 0)
        return NULL;
    if (ref->forks != life_forks())
        return (struct slots_ref *)(void *)native_raise_text(SIDE_FORKED, "Slots", "the slots are from before a fork");
    return ref;
}

typedef side_status try_fn(side_slots *slots, uint64_t key, side_stream *stream, side_slot *slot);
typedef side_status wait_fn(side_slots *slots, uint64_t key, side_stream *stream, double wait_s, side_slot *slot);

/* A call that waits does so in slices, between which signals are looked at. SIDE_AGAIN: not now (`try`), or a signal's handler has raised. */
static side_status ask(side_slots *slots, uint64_t key, side_stream *stream, try_fn *try, wait_fn *wait, side_slot *slot)
{
    side_status s;

    do {
        Py_BEGIN_ALLOW_THREADS
        s = try != NULL ? try(slots, key, stream, slot) : wait(slots, key, stream, NATIVE_SLICE_S, slot);
        Py_END_ALLOW_THREADS
    } while (s == SIDE_AGAIN && try == NULL && PyErr_CheckSignals() == 0);
    return s;
}

static PyObject *get(PyObject *object, uint64_t key, PyObject *stream, bool writes, bool block)
{
    try_fn *try = writes ? side_slots_try_acquire : side_slots_try_take;
    wait_fn *wait = writes ? side_slots_acquire_for : side_slots_take_for;
    struct slots_ref *ref = slots_check(object);
    struct stream_ref *user;
    side_slot slot;
    side_status s;
    bool failed;

    if (ref == NULL)
        return NULL;
    user = native_stream_or_none(stream, writes ? "writer" : "reader", &failed);
    if (failed)
        return NULL;
    s = ask(ref->slots, key, user != NULL ? user->stream : NULL, block ? NULL : try, wait, &slot);
    if (s == SIDE_AGAIN && block)
        return NULL;
    if (s == SIDE_AGAIN)
        Py_RETURN_NONE;
    return s == SIDE_OK ? slot_new(ref, object, &slot, user, writes) : native_raise(s);
}

static PyObject *slots_acquire(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"writer", "key", "block", NULL};
    PyObject *writer = Py_None;
    unsigned long long key = 0;
    int block = 1;

    if (!native_parse(args, kwargs, "|OKp:acquire", names, &writer, &key, &block))
        return NULL;
    return get(object, key, writer, true, block);
}

static PyObject *slots_take(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"key", "reader", "block", NULL};
    PyObject *reader = Py_None;
    unsigned long long key;
    int block = 1;

    if (!native_parse(args, kwargs, "K|Op:take", names, &key, &reader, &block))
        return NULL;
    return get(object, key, reader, false, block);
}

static PyObject *slots_cancel(PyObject *object, PyObject *unused)
{
    struct slots_ref *ref = slots_check(object);
    (void)unused;

    if (ref == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    side_slots_poison(ref->slots, SIDE_CANCELLED);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *slots_drain(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"timeout", NULL};
    struct slots_ref *ref = slots_check(object);
    double timeout = 30, left;
    side_status s;

    if (ref == NULL || !native_parse(args, kwargs, "|d:drain", names, &timeout))
        return NULL;
    if (!(timeout >= 0))
        return PyErr_Format(PyExc_ValueError, "timeout takes seconds, 0 (for ever) and more");
    for (left = timeout;; left -= NATIVE_SLICE_S) {
        bool last = timeout > 0 && left <= NATIVE_SLICE_S;
        Py_BEGIN_ALLOW_THREADS
        s = side_slots_drain(ref->slots, last ? left : NATIVE_SLICE_S);
        Py_END_ALLOW_THREADS
        if (s == SIDE_OK)
            Py_RETURN_NONE;
        if (s != SIDE_STUCK || last)
            return native_raise(s);
        if (PyErr_CheckSignals() != 0)
            return NULL;
    }
}

static PyObject *slots_device(PyObject *object, void *unused)
{
    (void)unused;
    return Py_NewRef(((slots_object *)object)->owner);
}

static PyObject *slots_policy(PyObject *object, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(policies[((slots_object *)object)->policy]);
}

static PyObject *slots_where(PyObject *object, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(places[((slots_object *)object)->ref->kind]);
}

static PyObject *slots_count(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLong(((slots_object *)object)->count);
}

static PyObject *slots_slot_bytes(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(((slots_object *)object)->slot_bytes);
}

static PyObject *slots_repr(PyObject *object)
{
    slots_object *self = (slots_object *)object;

    return PyUnicode_FromFormat("<sidestream.Slots: %s of %u x %zu bytes, %s memory of %s>", policies[self->policy],
                                self->count, self->slot_bytes, places[self->ref->kind], self->ref->device->props.spec);
}

/* clang-format off */
PyDoc_STRVAR(slots_doc,
"Slots(device, policy=\"ring\", *, count, slot_bytes, where=\"device\", readers=1, timeout=0.0)\n--\n\n"
"Memory that is written and read again and again without a race, and without waiting for more than it must. A\n"
"writer waits for the readers of what lay there before, a reader for the slot's filling alone; on the device\n"
"where a stream writes or reads, on the host where none is given.\n\n"
"policy: \"ring\" (item i lies in slot i % count, and makes room after `readers` releases), \"list\" (any free\n"
"slot; its holder gives it back), \"table\" (slots under keys, the least recently used goes first). where:\n"
"\"device\", \"pinned\" or \"pageable\". timeout: seconds that the device may take before Stuck; 0: 30.\n\n"
"    with slots.acquire(copy_stream) as slot: copy_stream.copy(slot.buffer, array)     # published at the end\n"
"    with slots.take(0, stream) as slot: stream.affine(out, slot.view(\"float32\"), 2)   # released at the end\n\n"
"Any thread may use them. Calls that wait release the GIL; Ctrl-C and cancel() from another thread end them. A\n"
"wait for the device alone, where no stream is given, goes on to its end, at most `timeout` seconds.");

static PyMethodDef slots_methods[] = {
    {"acquire", (PyCFunction)(void (*)(void))slots_acquire, METH_VARARGS | METH_KEYWORDS,
     "acquire($self, writer=None, key=0, block=True)\n--\n\n"
     "A Slot to write: `writer` (a Stream) waits for the readers of what lay there before; None: the host does.\n"
     "Blocks until a slot is free; block=False: None instead. key: of tables. Raises WouldDeadlock, Cancelled,\n"
     "Stuck."},
    {"take", (PyCFunction)(void (*)(void))slots_take, METH_VARARGS | METH_KEYWORDS,
     "take($self, key, reader=None, block=True)\n--\n\n"
     "A Slot to read: item number (ring), slot number (list) or key (table). Blocks until it was published, and\n"
     "makes `reader` (a Stream; None: the host) wait until it is filled. Raises NotFound, Cancelled, Stuck."},
    {"cancel", slots_cancel, METH_NOARGS, "cancel($self, /)\n--\n\nAll waiting and later calls raise Cancelled; there is no way back."},
    {"drain", (PyCFunction)(void (*)(void))slots_drain, METH_VARARGS | METH_KEYWORDS,
     "drain($self, timeout=30.0)\n--\n\nBlocks until all that was published and released so far is done on the device; Stuck after `timeout` seconds."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef slots_getset[] = {
    {"device", slots_device, NULL, "The Device.", NULL},
    {"policy", slots_policy, NULL, "\"ring\", \"list\" or \"table\".", NULL},
    {"where", slots_where, NULL, "\"device\", \"pinned\" or \"pageable\".", NULL},
    {"count", slots_count, NULL, "Slots.", NULL},
    {"slot_bytes", slots_slot_bytes, NULL, "Bytes of each.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
/* clang-format on */

static PyType_Slot slots_slots[] = {
    {Py_tp_doc, (void *)(uintptr_t)slots_doc},
    {Py_tp_new, slots_new},
    {Py_tp_dealloc, slots_dealloc},
    {Py_tp_repr, slots_repr},
    {Py_tp_methods, slots_methods},
    {Py_tp_getset, slots_getset},
    {0, NULL},
};

static PyType_Spec slots_type_spec = {
    .name = "sidestream.Slots",
    .basicsize = sizeof(slots_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots_slots,
};

int slots_add(PyObject *module)
{
    if (slots_type == NULL)
        slots_type = (PyTypeObject *)PyType_FromSpec(&slots_type_spec);
    return slots_type == NULL ? -1 : PyModule_AddType(module, slots_type);
}
