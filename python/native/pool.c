/* SPDX-License-Identifier: MIT
 *
 * PinnedPool: pinned host memory as Buffers. */
#include "native.h"

static PyTypeObject *pool_type;

/* Counted apart from the Python object: its blocks hold it. */
struct pool_ref {
    atomic_size_t refs;
    struct device_ref *device;
    side_pool *pool;
    bool own; /* the device's: closed with it */
    unsigned forks;
    struct grave grave;
};

typedef struct pool_object {
    PyObject_HEAD
    struct pool_ref *ref;
    PyObject *owner; /* Device */
} pool_object;

static void pool_bury(struct grave *grave)
{
    struct pool_ref *ref = (struct pool_ref *)(void *)((char *)grave - offsetof(struct pool_ref, grave));

    if (!ref->own) {
        Py_BEGIN_ALLOW_THREADS
        side_pool_destroy(ref->pool);
        Py_END_ALLOW_THREADS
    }
    device_drop(ref->device);
    free(ref);
}

static void pool_drop(void *parent)
{
    struct pool_ref *ref = parent;

    if (ref == NULL || !life_goes_on(ref->forks))
        return;
    if (atomic_fetch_sub_explicit(&ref->refs, 1, memory_order_acq_rel) == 1)
        life_bury(&ref->grave);
}

static PyObject *pool_make(PyTypeObject *type, PyObject *owner, const side_pool_options *options)
{
    struct device_ref *device = native_device(owner, "device");
    struct pool_ref *ref = device == NULL ? NULL : calloc(1, sizeof(*ref));
    pool_object *self;
    side_status s;

    if (ref == NULL)
        return device == NULL ? NULL : PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    s = options != NULL ? side_pool_create(device->device, options, &ref->pool)
                        : side_device_pool(device->device, &ref->pool);
    Py_END_ALLOW_THREADS
    if (s != SIDE_OK) {
        free(ref);
        return native_raise(s);
    }
    ref->refs = 1;
    ref->device = device_hold(device);
    ref->own = options == NULL;
    ref->forks = life_forks();
    ref->grave.bury = pool_bury;
    self = (pool_object *)PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        pool_drop(ref);
        return NULL;
    }
    self->ref = ref;
    self->owner = Py_NewRef(owner);
    return (PyObject *)self;
}

PyObject *device_pool(PyObject *device, void *unused)
{
    (void)unused;
    return native_enter() == 0 ? pool_make(pool_type, device, NULL) : NULL;
}

static int set_size(const char *name, Py_ssize_t value, size_t *to)
{
    *to = (size_t)value;
    if (value >= 0)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s is %zd; it takes 0 (default) and more", name, value);
    return -1;
}

static PyObject *pool_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"device", "budget_bytes", "region_bytes", "threads", "huge_pages", NULL};
    side_pool_options o = SIDE_POOL_OPTIONS_INIT;
    Py_ssize_t budget = 0, region = 0;
    PyObject *device;
    unsigned threads = 0;
    int huge = 1;

    if (native_enter() != 0 ||
        !native_parse(args, kwargs, "O|$nnIp:PinnedPool", names, &device, &budget, &region, &threads, &huge) ||
        set_size("budget_bytes", budget, &o.budget_bytes) != 0 || set_size("region_bytes", region, &o.region_bytes) != 0)
        return NULL;
    o.threads = threads;
    o.flags = huge ? 0 : SIDE_POOL_NO_HUGE_PAGES;
    return pool_make(type, device, &o);
}

static void pool_dealloc(PyObject *object)
{
    pool_object *self = (pool_object *)object;
    PyTypeObject *type = Py_TYPE(object);

    pool_drop(self->ref);
    Py_XDECREF(self->owner);
    PyObject_Free(object);
    Py_DECREF(type);
    native_sweep();
}

static struct pool_ref *pool_check(PyObject *object)
{
    struct pool_ref *ref = ((pool_object *)object)->ref;

    if (native_enter() != 0)
        return NULL;
    if (ref->forks != life_forks())
        return (struct pool_ref *)(void *)native_raise_text(SIDE_FORKED, "PinnedPool", "the pool is from before a fork");
    return ref;
}

static PyObject *pool_get(PyObject *object, PyObject *shape, const struct dtype *dtype)
{
    struct pool_ref *ref = pool_check(object);
    Py_ssize_t dims[MOST_DIMS];
    struct memory *memory;
    size_t bytes;
    void *data = NULL;
    side_status s;
    int ndim;

    if (ref == NULL || native_shape(shape, dtype, &ndim, dims, &bytes) != 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    s = side_pool_alloc(ref->pool, bytes > 0 ? bytes : 1, &data);
    Py_END_ALLOW_THREADS
    if (s != SIDE_OK)
        return native_raise(s);
    memory = memory_make(ref->device, SIDE_MEMORY_PINNED, data, bytes);
    if (memory == NULL) {
        side_pool_free(ref->pool, data, NULL, 0);
        return NULL;
    }
    memory->pool = ref->pool;
    memory->parent = ref;
    memory->parent_drop = pool_drop;
    atomic_fetch_add_explicit(&ref->refs, 1, memory_order_relaxed);
    return native_buffer_new(memory, ((pool_object *)object)->owner, 0, bytes, dtype, ndim, dims);
}

static PyObject *pool_alloc(PyObject *object, PyObject *nbytes)
{
    if (PyIndex_Check(nbytes))
        return pool_get(object, nbytes, native_dtype(NULL));
    PyErr_SetString(PyExc_TypeError, "nbytes must be a number; for a shape use empty()");
    return NULL;
}

static PyObject *pool_empty(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"shape", "dtype", NULL};
    PyObject *shape, *type = NULL;
    const struct dtype *dtype;

    if (!native_parse(args, kwargs, "O|O:empty", names, &shape, &type))
        return NULL;
    dtype = native_dtype(type);
    return dtype == NULL ? NULL : pool_get(object, shape, dtype);
}

static PyObject *pool_trim(PyObject *object, PyObject *unused)
{
    struct pool_ref *ref = pool_check(object);
    size_t bytes;
    (void)unused;

    if (ref == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    bytes = side_pool_trim(ref->pool);
    Py_END_ALLOW_THREADS
    return PyLong_FromSize_t(bytes);
}

static PyObject *pool_stats(PyObject *object, PyObject *unused)
{
    struct pool_ref *ref = pool_check(object);
    side_pool_stats s;
    side_status status;
    (void)unused;

    if (ref == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = side_pool_get_stats(ref->pool, &s);
    Py_END_ALLOW_THREADS
    if (status != SIDE_OK)
        return native_raise(status);
    return Py_BuildValue("{s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:K,s:K,s:d,s:N,s:N}", "budget_bytes", s.budget_bytes,
                         "pinned_bytes", s.pinned_bytes, "granted_bytes", s.granted_bytes, "asked_bytes", s.asked_bytes,
                         "pending_bytes", s.pending_bytes, "slack_bytes", s.slack_bytes, "peak_pinned_bytes",
                         s.peak_pinned_bytes, "blocks", (unsigned long long)s.blocks, "regions",
                         (unsigned long long)s.regions, "pin_s", s.pin_s, "huge_pages", PyBool_FromLong(s.huge_pages),
                         "registered", PyBool_FromLong(s.registered));
}

static PyObject *pool_device(PyObject *object, void *unused)
{
    (void)unused;
    return Py_NewRef(((pool_object *)object)->owner);
}

static PyObject *pool_repr(PyObject *object)
{
    return PyUnicode_FromFormat("<sidestream.PinnedPool of %s>", ((pool_object *)object)->ref->device->props.spec);
}

/* clang-format off */
PyDoc_STRVAR(pool_doc,
"PinnedPool(device, *, budget_bytes=0, region_bytes=0, threads=0, huge_pages=True)\n--\n\n"
"Pinned host memory: copies from and to it run beside compute and at the full rate of the link.\n\n"
"budget_bytes: hard limit on what is pinned; 0: a quarter of what this process may use. region_bytes: what is\n"
"pinned at once for blocks under 16 MiB; 0: 64 MiB.\n"
"threads: that touch pages; 0: default. Device.pool is the device's own, with defaults.");

static PyMethodDef pool_methods[] = {
    {"alloc", pool_alloc, METH_O, "alloc($self, nbytes, /)\n--\n\nA Buffer of bytes. Raises OverBudget, OutOfHostMemory."},
    {"empty", (PyCFunction)(void (*)(void))pool_empty, METH_VARARGS | METH_KEYWORDS,
     "empty($self, shape, dtype=\"uint8\")\n--\n\n"
     "A Buffer, not initialised; numpy.asarray(b) is its array. The memory goes back to the pool when the buffer,\n"
     "its views and its exports are gone, and is handed out again once the copies on it are done. May block while\n"
     "pages are pinned. Raises OverBudget, OutOfHostMemory."},
    {"trim", pool_trim, METH_NOARGS, "trim($self, /)\n--\n\nUnpins what holds no block. Returns the bytes given back."},
    {"stats", pool_stats, METH_NOARGS,
     "stats($self, /)\n--\n\n"
     "A dict: budget_bytes, pinned_bytes (registered now), granted_bytes (handed out, rounding included),\n"
     "asked_bytes, pending_bytes (freed, waiting for copies), slack_bytes, peak_pinned_bytes, blocks, regions,\n"
     "pin_s, huge_pages, registered."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef pool_getset[] = {
    {"device", pool_device, NULL, "The Device.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
/* clang-format on */

static PyType_Slot pool_slots[] = {
    {Py_tp_doc, (void *)(uintptr_t)pool_doc},
    {Py_tp_new, pool_new},
    {Py_tp_dealloc, pool_dealloc},
    {Py_tp_repr, pool_repr},
    {Py_tp_methods, pool_methods},
    {Py_tp_getset, pool_getset},
    {0, NULL},
};

static PyType_Spec pool_type_spec = {
    .name = "sidestream.PinnedPool",
    .basicsize = sizeof(pool_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = pool_slots,
};

int pool_add(PyObject *module)
{
    if (pool_type == NULL)
        pool_type = (PyTypeObject *)PyType_FromSpec(&pool_type_spec);
    return pool_type == NULL ? -1 : PyModule_AddType(module, pool_type);
}
