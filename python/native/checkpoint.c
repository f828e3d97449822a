/* SPDX-License-Identifier: MIT
 *
 * Checkpoint: what files of tensors hold. */
#include "load.h"

#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct checkpoint_object {
    PyObject_HEAD
    struct checkpoint_ref *ref; /* NULL once closed */
} checkpoint_object;

static PyTypeObject *checkpoint_type;

/* ---------------------------------------------------------------- handle */

struct checkpoint_ref *checkpoint_hold(struct checkpoint_ref *ref)
{
    atomic_fetch_add_explicit(&ref->refs, 1, memory_order_relaxed);
    return ref;
}

void checkpoint_drop(struct checkpoint_ref *ref)
{
    if (ref == NULL || !life_goes_on(ref->forks))
        return;
    if (atomic_fetch_sub_explicit(&ref->refs, 1, memory_order_acq_rel) != 1)
        return;
    side_checkpoint_close(ref->checkpoint);
    free(ref);
}

struct checkpoint_ref *native_checkpoint(PyObject *object, const char *what)
{
    struct checkpoint_ref *ref;

    if (!PyObject_TypeCheck(object, checkpoint_type)) {
        PyErr_Format(PyExc_TypeError, "%s must be a Checkpoint, not %R", what, (PyObject *)Py_TYPE(object));
        return NULL;
    }
    ref = ((checkpoint_object *)object)->ref;
    if (ref == NULL)
        native_raise_text(SIDE_STATE, "Checkpoint", "%s: the checkpoint was closed", what);
    return ref;
}

static PyObject *checkpoint_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"path", "lenient", NULL};
    side_checkpoint_options options = SIDE_CHECKPOINT_OPTIONS_INIT;
    struct checkpoint_ref *ref;
    checkpoint_object *self;
    PyObject *path_arg, *path = NULL;
    int lenient = 0;
    side_status s;

    if (native_enter() != 0 || !native_parse(args, kwargs, "O|$p:Checkpoint", names, &path_arg, &lenient) ||
        !PyUnicode_FSConverter(path_arg, &path))
        return NULL;
    self = (checkpoint_object *)PyType_GenericAlloc(type, 0);
    ref = calloc(1, sizeof(*ref));
    if (self == NULL || ref == NULL) {
        Py_XDECREF((PyObject *)self);
        Py_DECREF(path);
        free(ref);
        return PyErr_NoMemory();
    }
    options.flags = lenient ? SIDE_CHECKPOINT_LENIENT : 0;
    Py_BEGIN_ALLOW_THREADS
    s = side_checkpoint_open(PyBytes_AsString(path), &options, &ref->checkpoint);
    Py_END_ALLOW_THREADS
    Py_DECREF(path);
    if (s != SIDE_OK) {
        native_raise(s);
        free(ref);
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    ref->refs = 1;
    ref->forks = life_forks();
    self->ref = ref;
    return (PyObject *)self;
}

static PyObject *checkpoint_close(PyObject *object, PyObject *unused)
{
    checkpoint_object *self = (checkpoint_object *)object;
    struct checkpoint_ref *ref = self->ref;
    (void)unused;

    self->ref = NULL;
    checkpoint_drop(ref);
    Py_RETURN_NONE;
}

static void checkpoint_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);

    checkpoint_drop(((checkpoint_object *)object)->ref);
    PyObject_Free(object);
    Py_DECREF(type);
}

/* ---------------------------------------------------------------- shapes */

static PyObject *tuple_of(const uint64_t *numbers, uint32_t count)
{
    PyObject *tuple = PyTuple_New((Py_ssize_t)count);

    for (uint32_t i = 0; tuple != NULL && i < count; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(numbers[i]);
        if (number == NULL || PyTuple_SetItem(tuple, (Py_ssize_t)i, number) != 0)
            Py_CLEAR(tuple);
    }
    return tuple;
}

int shape_make(const side_tensor *t, side_dtype *as, PyObject **shape, PyObject **strides)
{
    uint64_t dims[SIDE_RANK_MOST], steps[SIDE_RANK_MOST], step = 1;
    uint32_t rank = t->rank, bits = side_dtype_bits(t->type);

    *as = t->type;
    for (uint32_t i = 0; i < rank; i++)
        dims[i] = t->dims[i];
    if (bits < 8 && rank > 0 && dims[rank - 1] % 8 * bits % 8 == 0) {
        dims[rank - 1] = dims[rank - 1] / 8 * bits + dims[rank - 1] % 8 * bits / 8;
    } else if (bits < 8) {
        rank = 1;
        dims[0] = t->bytes;
        *as = SIDE_DTYPE_U8;
    }
    for (uint32_t i = rank; i-- > 0;) { /* as PyTorch: an empty dimension counts as one */
        steps[i] = step;
        step *= dims[i] > 0 ? dims[i] : 1;
    }
    *shape = tuple_of(dims, rank);
    *strides = *shape == NULL ? NULL : tuple_of(steps, rank);
    if (*strides != NULL)
        return 0;
    Py_CLEAR(*shape);
    return -1;
}

/* The place of a shape, or the one that it takes. */
static size_t shape_place(const struct shapes *shapes, const side_tensor *t, bool *known)
{
    const size_t bytes = t->rank * sizeof(uint64_t);
    uint64_t hash = (uint64_t)t->type * 31 + t->rank;
    size_t first;

    for (uint32_t i = 0; i < t->rank; i++)
        hash = (hash ^ t->dims[i]) * 0x9E3779B97F4A7C15u;
    first = (size_t)(hash >> 32) % SHAPES_KEPT;
    for (size_t i = 0; i < SHAPES_TRIED; i++) {
        const size_t at = (first + i) % SHAPES_KEPT;
        *known = shapes->kept[at].shape != NULL && shapes->kept[at].type == t->type &&
                 shapes->kept[at].rank == t->rank && (bytes == 0 || memcmp(shapes->kept[at].dims, t->dims, bytes) == 0);
        if (*known || shapes->kept[at].shape == NULL)
            return at;
    }
    return first;
}

int shapes_get(struct shapes *shapes, const side_tensor *t, side_dtype *as, PyObject **shape, PyObject **strides)
{
    bool known;
    const size_t at = shape_place(shapes, t, &known);

    if (!known) {
        if (shape_make(t, as, shape, strides) != 0)
            return -1;
        Py_XDECREF(shapes->kept[at].shape);
        Py_XDECREF(shapes->kept[at].strides);
        shapes->kept[at].type = t->type;
        shapes->kept[at].as = *as;
        shapes->kept[at].rank = t->rank;
        if (t->rank > 0)
            memcpy(shapes->kept[at].dims, t->dims, t->rank * sizeof(uint64_t));
        shapes->kept[at].shape = *shape;
        shapes->kept[at].strides = *strides;
    }
    *as = shapes->kept[at].as;
    *shape = shapes->kept[at].shape;
    *strides = shapes->kept[at].strides;
    return 0;
}

void shapes_end(struct shapes *shapes)
{
    for (size_t i = 0; i < SHAPES_KEPT; i++) {
        Py_XDECREF(shapes->kept[i].shape);
        Py_XDECREF(shapes->kept[i].strides);
    }
}

/* ---------------------------------------------------------------- what it holds */

static Py_ssize_t checkpoint_length(PyObject *object)
{
    struct checkpoint_ref *ref = native_checkpoint(object, "len()");

    return ref == NULL ? -1 : (Py_ssize_t)side_checkpoint_count(ref->checkpoint);
}

static PyObject *checkpoint_names(PyObject *object, PyObject *unused)
{
    struct checkpoint_ref *ref = native_checkpoint(object, "names()");
    size_t count = ref == NULL ? 0 : side_checkpoint_count(ref->checkpoint);
    PyObject *list = ref == NULL ? NULL : PyList_New((Py_ssize_t)count);
    side_tensor t;
    (void)unused;

    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *name;
        side_checkpoint_tensor(ref->checkpoint, i, &t);
        name = PyUnicode_DecodeUTF8(t.name, (Py_ssize_t)t.name_bytes, NULL);
        if (name == NULL || PyList_SetItem(list, (Py_ssize_t)i, name) != 0)
            Py_CLEAR(list);
    }
    return list;
}

/* Takes an index; false with IndexError. */
static bool tensor_of(const struct checkpoint_ref *ref, Py_ssize_t index, side_tensor *t)
{
    size_t count = side_checkpoint_count(ref->checkpoint);

    if (index >= 0 && (size_t)index < count && side_checkpoint_tensor(ref->checkpoint, (size_t)index, t) == SIDE_OK)
        return true;
    PyErr_Format(PyExc_IndexError, "tensor %zd: the checkpoint has %zu", index, count);
    return false;
}

static PyObject *checkpoint_info(PyObject *object, PyObject *arg)
{
    struct checkpoint_ref *ref = native_checkpoint(object, "info()");
    Py_ssize_t index = ref == NULL ? -1 : PyLong_AsSsize_t(arg);
    PyObject *shape, *strides;
    side_dtype as;
    side_tensor t;

    if (ref == NULL || PyErr_Occurred() || !tensor_of(ref, index, &t))
        return NULL;
    if (shape_make(&t, &as, &shape, &strides) != 0)
        return NULL;
    return Py_BuildValue("(s#siNNNKnK)", t.name, (Py_ssize_t)t.name_bytes, side_dtype_name(t.type), (int)as,
                         tuple_of(t.dims, t.rank), shape, strides, (unsigned long long)t.bytes, (Py_ssize_t)t.file,
                         (unsigned long long)t.offset);
}

static PyObject *checkpoint_find(PyObject *object, PyObject *arg)
{
    struct checkpoint_ref *ref = native_checkpoint(object, "find()");
    Py_ssize_t bytes;
    const char *name;
    size_t index;

    if (ref == NULL)
        return NULL;
    name = PyUnicode_AsUTF8AndSize(arg, &bytes);
    if (name == NULL)
        return NULL;
    if (side_checkpoint_find(ref->checkpoint, name, (size_t)bytes, &index) != SIDE_OK)
        return PyLong_FromLong(-1);
    return PyLong_FromSize_t(index);
}

static PyObject *checkpoint_files(PyObject *object, PyObject *unused)
{
    struct checkpoint_ref *ref = native_checkpoint(object, "files()");
    size_t count = ref == NULL ? 0 : side_checkpoint_files(ref->checkpoint);
    PyObject *list = ref == NULL ? NULL : PyList_New((Py_ssize_t)count);
    side_checkpoint_file_info f;
    (void)unused;

    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *one;
        side_checkpoint_file(ref->checkpoint, i, &f);
        one = Py_BuildValue("(NKnn)", PyUnicode_DecodeFSDefault(f.path), (unsigned long long)f.bytes,
                            (Py_ssize_t)f.first, (Py_ssize_t)f.count);
        if (one == NULL || PyList_SetItem(list, (Py_ssize_t)i, one) != 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *checkpoint_metadata(PyObject *object, PyObject *arg)
{
    struct checkpoint_ref *ref = native_checkpoint(object, "metadata()");
    size_t file = ref == NULL ? 0 : PyLong_AsSize_t(arg), count;
    PyObject *dict;

    if (ref == NULL || PyErr_Occurred())
        return NULL;
    count = side_checkpoint_metadata_count(ref->checkpoint, file);
    dict = PyDict_New();
    for (size_t i = 0; dict != NULL && i < count; i++) {
        const char *key, *value;
        PyObject *text = NULL;
        if (side_checkpoint_metadata(ref->checkpoint, file, i, &key, &value) == SIDE_OK)
            text = PyUnicode_FromString(value);
        if (text == NULL || PyDict_SetItemString(dict, key, text) != 0)
            Py_CLEAR(dict);
        Py_XDECREF(text);
    }
    return dict;
}

/* ---------------------------------------------------------------- small reads */

/* Fills `to`; SIDE_OK once the file is still what it was when it was opened. */
static side_status read_whole(const side_checkpoint_file_info *file, uint64_t offset, char *to, size_t bytes, int *error)
{
    struct stat now;

    for (size_t done = 0; done < bytes;) {
        ssize_t n = pread(file->fd, to + done, bytes - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        *error = n < 0 ? errno : 0;
        if (n <= 0)
            return SIDE_IO;
        done += (size_t)n;
    }
    *error = 0;
    if (fstat(file->fd, &now) != 0 || (uint64_t)now.st_size != file->bytes ||
        (uint64_t)now.st_mtim.tv_sec * 1000000000u + (uint64_t)now.st_mtim.tv_nsec != file->mtime_ns)
        return SIDE_IO;
    return SIDE_OK;
}

static PyObject *checkpoint_read(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"index", "begin", "bytes", "address", NULL};
    unsigned long long begin, bytes, address;
    struct checkpoint_ref *ref = native_checkpoint(object, "read()");
    side_checkpoint_file_info file;
    Py_ssize_t index;
    side_tensor t;
    side_status s;
    int error;

    if (ref == NULL || !native_parse(args, kwargs, "nKKK:read", names, &index, &begin, &bytes, &address) ||
        !tensor_of(ref, index, &t))
        return NULL;
    if (begin > t.bytes || bytes > t.bytes - begin)
        return native_raise_text(SIDE_INVALID, "read", "%llu bytes from byte %llu on: tensor %zd has %llu", bytes,
                                 begin, index, (unsigned long long)t.bytes);
    side_checkpoint_file(ref->checkpoint, t.file, &file);
    checkpoint_hold(ref); /* close() may come meanwhile */
    Py_BEGIN_ALLOW_THREADS
    s = read_whole(&file, t.offset + begin, (char *)(uintptr_t)address, (size_t)bytes, &error);
    Py_END_ALLOW_THREADS
    if (s != SIDE_OK && error != 0)
        native_raise_text(s, "pread", "%s: bytes from %llu on: %s", file.path, (unsigned long long)t.offset + begin,
                          strerror(error));
    else if (s != SIDE_OK)
        native_raise_text(s, "read", "%s was changed since it was opened; open it again", file.path);
    checkpoint_drop(ref);
    return s == SIDE_OK ? Py_NewRef(Py_None) : NULL;
}

/* ---------------------------------------------------------------- class */

/* clang-format off */
PyDoc_STRVAR(checkpoint_doc,
"Checkpoint(path, *, lenient=False)\n--\n\n"
"The tensors of a safetensors file, of the shards of an index file or folder, or of a .npy or .raw file; headers\n"
"alone are read. Numbers count tensors by file and offset. lenient: takes what the reference implementation\n"
"takes and the format forbids. Raises NotFound, InvalidArgument (malformed), IOFailed.");

static PyMethodDef checkpoint_methods[] = {
    {"names", checkpoint_names, METH_NOARGS, "names($self, /)\n--\n\nOf all tensors, by number."},
    {"info", checkpoint_info, METH_O,
     "info($self, index, /)\n--\n\n(name, dtype as in the header, its number, shape as in the header, shape and strides as PyTorch has them,\n"
     "bytes, file, offset in it)."},
    {"find", checkpoint_find, METH_O, "find($self, name, /)\n--\n\nThe number of the tensor of that name; -1: there is none."},
    {"files", checkpoint_files, METH_NOARGS, "files($self, /)\n--\n\n(path, bytes, first tensor, tensors) of each."},
    {"metadata", checkpoint_metadata, METH_O, "metadata($self, file, /)\n--\n\nThe __metadata__ of a file, as a dict."},
    {"read", (PyCFunction)(void (*)(void))checkpoint_read, METH_VARARGS | METH_KEYWORDS,
     "read($self, index, begin, bytes, address)\n--\n\n"
     "Fills host memory with a part of a tensor, from page cache or disk, in this thread. Raises IOFailed, also\n"
     "where the file was changed since it was opened."},
    {"close", checkpoint_close, METH_NOARGS, "close($self, /)\n--\n\nLoads that run keep it open. May be called again."},
    {NULL, NULL, 0, NULL},
};
/* clang-format on */

static PyType_Slot checkpoint_slots[] = {
    {Py_tp_doc, (void *)(uintptr_t)checkpoint_doc},
    {Py_tp_new, checkpoint_new},
    {Py_tp_dealloc, checkpoint_dealloc},
    {Py_tp_methods, checkpoint_methods},
    {Py_sq_length, checkpoint_length},
    {0, NULL},
};

static PyType_Spec checkpoint_type_spec = {
    .name = "sidestream._native.Checkpoint",
    .basicsize = sizeof(checkpoint_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = checkpoint_slots,
};

int checkpoint_add(PyObject *module)
{
    if (checkpoint_type == NULL)
        checkpoint_type = (PyTypeObject *)PyType_FromSpec(&checkpoint_type_spec);
    return checkpoint_type == NULL ? -1 : PyModule_AddType(module, checkpoint_type);
}
