/* SPDX-License-Identifier: MIT
 *
 * Devices: the counted handle that everything made from a device holds, and the Python class. */
#include "native.h"

#include <structmember.h>

static PyTypeObject *device_type;

/* ---------------------------------------------------------------- handle */

struct device_ref *device_hold(struct device_ref *ref)
{
    atomic_fetch_add_explicit(&ref->refs, 1, memory_order_relaxed);
    return ref;
}

static void device_bury(struct grave *grave)
{
    struct device_ref *ref = (struct device_ref *)(void *)((char *)grave - offsetof(struct device_ref, grave));

    Py_BEGIN_ALLOW_THREADS
    side_device_close(ref->device);
    Py_END_ALLOW_THREADS
    free(ref);
}

void device_drop(struct device_ref *ref)
{
    if (ref == NULL || !life_goes_on(ref->forks))
        return;
    if (atomic_fetch_sub_explicit(&ref->refs, 1, memory_order_acq_rel) == 1)
        life_bury(&ref->grave);
}

static struct device_ref *device_open(const char *spec)
{
    struct device_ref *ref = calloc(1, sizeof(*ref));
    side_status s;

    if (ref == NULL)
        return (struct device_ref *)(void *)PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    s = side_device_open(spec, &ref->device);
    if (s == SIDE_OK) {
        s = side_device_get_props(ref->device, &ref->props);
        if (s != SIDE_OK)
            side_device_close(ref->device);
    }
    Py_END_ALLOW_THREADS
    if (s != SIDE_OK) {
        free(ref);
        return (struct device_ref *)(void *)native_raise(s);
    }
    ref->refs = 1;
    ref->forks = life_forks();
    ref->grave.bury = device_bury;
    return ref;
}

struct device_ref *native_device(PyObject *object, const char *what)
{
    struct device_ref *ref;

    if (!PyObject_TypeCheck(object, device_type)) {
        PyErr_Format(PyExc_TypeError, "%s must be a sidestream.Device, not %R", what, (PyObject *)Py_TYPE(object));
        return NULL;
    }
    ref = ((device_object *)object)->ref;
    if (ref == NULL)
        native_raise_text(SIDE_STATE, "Device", "%s: the device was closed", what);
    else if (ref->forks != life_forks())
        ref = (struct device_ref *)(void *)native_raise_text(
            SIDE_FORKED, "Device", "%s was opened before a fork; open devices in the child", ref->props.spec);
    return ref;
}

/* ---------------------------------------------------------------- class */

static PyObject *device_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"spec", NULL};
    const char *spec = "auto";
    device_object *self;
    struct device_ref *ref;

    if (native_enter() != 0 || !native_parse(args, kwargs, "|s:Device", names, &spec))
        return NULL;
    ref = device_open(spec);
    native_drain_log();
    if (ref == NULL)
        return NULL;
    self = (device_object *)PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        device_drop(ref);
        return NULL;
    }
    self->ref = ref;
    return (PyObject *)self;
}

static void device_dealloc(PyObject *object)
{
    device_object *self = (device_object *)object;
    PyTypeObject *type = Py_TYPE(object);

    if (self->weakrefs != NULL)
        PyObject_ClearWeakRefs(object);
    device_drop(self->ref);
    PyObject_Free(object);
    Py_DECREF(type);
    native_sweep();
}

static PyObject *device_close(PyObject *object, PyObject *unused)
{
    device_object *self = (device_object *)object;
    struct device_ref *ref = self->ref;
    (void)unused;

    self->ref = NULL;
    device_drop(ref);
    if (!life_is_over())
        native_streams_reap();
    native_sweep();
    Py_RETURN_NONE;
}

static PyObject *device_enter(PyObject *object, PyObject *unused)
{
    (void)unused;
    if (native_device(object, "with") == NULL)
        return NULL;
    return Py_NewRef(object);
}

static PyObject *device_exit(PyObject *object, PyObject *args)
{
    (void)args;
    return device_close(object, NULL);
}

static PyObject *device_memory(PyObject *object, PyObject *unused)
{
    struct device_ref *ref = native_enter() == 0 ? native_device(object, "memory()") : NULL;
    size_t free_bytes = 0, total = 0;
    side_status s;
    (void)unused;

    if (ref == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    s = side_device_get_memory(ref->device, &free_bytes, &total);
    Py_END_ALLOW_THREADS
    return s == SIDE_OK ? Py_BuildValue("(nn)", (Py_ssize_t)free_bytes, (Py_ssize_t)total) : native_raise(s);
}

static PyObject *device_now_ns(PyObject *object, PyObject *unused)
{
    struct device_ref *ref = native_device(object, "now_ns()");
    (void)unused;

    return ref == NULL ? NULL : PyLong_FromUnsignedLongLong(side_device_now_ns(ref->device));
}

static PyObject *device_props(PyObject *object, void *unused)
{
    struct device_ref *ref = native_device(object, "props");
    const side_device_props *p;
    (void)unused;

    if (ref == NULL)
        return NULL;
    p = &ref->props;
    return Py_BuildValue("{s:s,s:s,s:N,s:i,s:i,s:(ii),s:i,s:i,s:N,s:N,s:i,s:n,s:s,s:s,s:N,s:s}", "spec", p->spec,
                         "name", p->name, "simulated", PyBool_FromLong(p->simulated), "ordinal", p->ordinal,
                         "driver_version", p->driver_version, "compute_capability", p->compute_major, p->compute_minor,
                         "copy_engines", p->copy_engines, "multiprocessors", p->multiprocessors, "can_register",
                         PyBool_FromLong(p->can_register), "integrated", PyBool_FromLong(p->integrated), "numa_node",
                         p->numa_node, "memory_bytes", (Py_ssize_t)p->memory_bytes, "uuid", p->uuid, "pci", p->pci,
                         "kernels", PyBool_FromLong(p->kernels), "kernels_from", p->kernels_from);
}

static PyObject *device_link(PyObject *object, void *unused)
{
    struct device_ref *ref = native_device(object, "link");
    side_link link;
    side_status s;
    (void)unused;

    if (ref == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    s = side_device_get_link(ref->device, &link);
    Py_END_ALLOW_THREADS
    if (s != SIDE_OK)
        return native_raise(s);
    return Py_BuildValue("{s:s,s:i,s:i,s:i,s:i,s:d}", "kind", link.kind, "generation", link.generation, "width",
                         link.width, "max_generation", link.max_generation, "max_width", link.max_width, "peak_gbps",
                         link.peak_gbps);
}

static PyObject *device_spec(PyObject *object, void *unused)
{
    struct device_ref *ref = native_device(object, "spec");
    (void)unused;
    return ref == NULL ? NULL : PyUnicode_FromString(ref->props.spec);
}

static PyObject *device_name(PyObject *object, void *unused)
{
    struct device_ref *ref = native_device(object, "name");
    (void)unused;
    return ref == NULL ? NULL : PyUnicode_FromString(ref->props.name);
}

static PyObject *device_simulated(PyObject *object, void *unused)
{
    struct device_ref *ref = native_device(object, "simulated");
    (void)unused;
    return ref == NULL ? NULL : PyBool_FromLong(ref->props.simulated);
}

static PyObject *device_ordinal(PyObject *object, void *unused)
{
    struct device_ref *ref = native_device(object, "ordinal");
    (void)unused;
    return ref == NULL ? NULL : PyLong_FromLong(ref->props.ordinal);
}

static PyObject *device_closed(PyObject *object, void *unused)
{
    (void)unused;
    return PyBool_FromLong(((device_object *)object)->ref == NULL);
}

static PyObject *device_repr(PyObject *object)
{
    device_object *self = (device_object *)object;

    if (self->ref == NULL)
        return PyUnicode_FromString("<sidestream.Device, closed>");
    return PyUnicode_FromFormat("<sidestream.Device %s: %s>", self->ref->props.spec, self->ref->props.name);
}

/* clang-format off */
PyDoc_STRVAR(device_doc,
"Device(spec=\"auto\")\n--\n\n"
"A GPU, or the software device.\n\n"
"spec: \"auto\" (the first GPU, else \"sim\"; the environment's SIDESTREAM_DEVICE overrides), \"cuda\",\n"
"\"cuda:N\", \"sim\", \"sim:PROFILE[,key=value...]\".\n"
"Blocks while the context is made (a second or so at the first use of a GPU). Raises NoDevice, DriverTooOld,\n"
"InvalidArgument (a spec that does not parse).\n"
"Streams, buffers and all else made from it keep it open; close() only ends the use of this object.");

static PyMethodDef device_methods[] = {
    {"alloc", (PyCFunction)(void (*)(void))device_alloc, METH_VARARGS | METH_KEYWORDS,
     "alloc($self, nbytes)\n--\n\nDevice memory: a Buffer of bytes, at least 256-byte aligned, not initialised. Raises OutOfDeviceMemory."},
    {"empty", (PyCFunction)(void (*)(void))device_empty, METH_VARARGS | METH_KEYWORDS,
     "empty($self, shape, dtype=\"uint8\")\n--\n\n"
     "Device memory with a shape (a number or a sequence) and a dtype (a name, or NumPy's or torch's). Raises\n"
     "OutOfDeviceMemory."},
    {"close", device_close, METH_NOARGS, "close($self, /)\n--\n\n"
     "Nothing more is made from it. The device is closed for good once all that was made from it is gone. May be\n"
     "called again."},
    {"memory", device_memory, METH_NOARGS, "memory($self, /)\n--\n\n(free, total) bytes of device memory."},
    {"now_ns", device_now_ns, METH_NOARGS, "now_ns($self, /)\n--\n\nThe host clock to measure this device's work by, in ns: monotonic, or the calling thread's virtual clock on sim."},
    {"__enter__", device_enter, METH_NOARGS, NULL},
    {"__exit__", device_exit, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef device_getset[] = {
    {"pool", device_pool, NULL, "The device's own PinnedPool, with default options.", NULL},
    {"spec", device_spec, NULL, "What opens this device again, as \"cuda:0\".", NULL},
    {"name", device_name, NULL, "As \"NVIDIA H200\"; software devices say \"simulated\".", NULL},
    {"simulated", device_simulated, NULL, "Times are of a model, not of hardware; device memory is host memory.", NULL},
    {"ordinal", device_ordinal, NULL, "Number among the devices of its kind.", NULL},
    {"props", device_props, NULL, "All properties, as a dict.", NULL},
    {"link", device_link, NULL, "The link to the host, as a dict: kind, generation, width (as it runs now), max_generation, max_width,\n"
     "peak_gbps (1e9 bytes/s, one direction).", NULL},
    {"closed", device_closed, NULL, "close() was called.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
/* clang-format on */

static PyMemberDef device_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(device_object, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot device_slots[] = {
    {Py_tp_doc, (void *)(uintptr_t)device_doc},
    {Py_tp_new, device_new},
    {Py_tp_dealloc, device_dealloc},
    {Py_tp_repr, device_repr},
    {Py_tp_methods, device_methods},
    {Py_tp_getset, device_getset},
    {Py_tp_members, device_members},
    {0, NULL},
};

static PyType_Spec device_type_spec = {
    .name = "sidestream.Device",
    .basicsize = sizeof(device_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = device_slots,
};

/* ---------------------------------------------------------------- module */

enum { MOST_SPECS = 64 };

static PyObject *list_devices(PyObject *module, PyObject *unused)
{
    char specs[MOST_SPECS][64];
    size_t count = MOST_SPECS;
    PyObject *list;
    side_status s;
    (void)module, (void)unused;

    if (native_enter() != 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    s = side_device_list(specs, &count, NULL, 0);
    Py_END_ALLOW_THREADS
    if (s != SIDE_OK)
        return native_raise(s);
    list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < count && i < MOST_SPECS; i++) {
        PyObject *spec = PyUnicode_FromString(specs[i]);
        if (spec == NULL || PyList_Append(list, spec) != 0)
            Py_CLEAR(list);
        Py_XDECREF(spec);
    }
    return list;
}

static PyMethodDef functions[] = {
    {"list_devices", list_devices,
     METH_NOARGS, "list_devices()\n--\n\nSpecs that would open, in order of preference, as [\"cuda:0\", \"sim\"]. Makes no context."},
    {NULL, NULL, 0, NULL},
};

int device_add(PyObject *module)
{
    if (device_type == NULL)
        device_type = (PyTypeObject *)PyType_FromSpec(&device_type_spec);
    if (device_type == NULL || PyModule_AddType(module, device_type) != 0)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
