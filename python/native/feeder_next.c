/* SPDX-License-Identifier: MIT
 *
 * Batches handed out: leaves become DLPack capsules, capsules become the caller's tensors, and the Loan is their common name. */
#include "feeder.h"

/* ---------------------------------------------------------------- leaves */

/* Shapes and strides of all leaves; fails where `leaves` is no list of tuples that begin as leaves do. */
static bool leaves_count(PyObject *leaves, size_t *count, size_t *dims)
{
    *count = *dims = 0;
    if (leaves == Py_None)
        return true;
    if (!PyList_Check(leaves)) {
        PyErr_Format(PyExc_TypeError, "leaves must be a list or None, not %R", (PyObject *)Py_TYPE(leaves));
        return false;
    }
    *count = (size_t)PyList_Size(leaves);
    for (size_t i = 0; i < *count; i++) {
        PyObject *leaf = PyList_GetItem(leaves, (Py_ssize_t)i);
        PyObject *shape = PyTuple_Check(leaf) && PyTuple_Size(leaf) == 5 ? PyTuple_GetItem(leaf, 3) : NULL;
        if (shape == NULL || !PyTuple_Check(shape) || PyTuple_Size(shape) > 64) {
            PyErr_Format(PyExc_TypeError,
                         "leaves[%zu] must be a tuple (offset, dtype code, dtype bits, shape, strides) with at most 64 "
                         "dimensions, not %R",
                         i, leaf);
            return false;
        }
        *dims += 2 * (size_t)PyTuple_Size(shape);
    }
    return true;
}

/* A tuple of `count` numbers from 0 up. */
static bool numbers_parse(PyObject *tuple, size_t leaf, Py_ssize_t count, int64_t *to)
{
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != count) {
        PyErr_Format(PyExc_TypeError, "leaves[%zu]: strides must be None or a tuple as long as the shape, not %R", leaf,
                     tuple);
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        long long v = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
        if (v < 0) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_ValueError, "leaves[%zu]: %lld in shape or strides; they are 0 or more", leaf, v);
            return false;
        }
        to[i] = v;
    }
    return true;
}

/* Bytes from the first element to the end of the last; false: more than can be. */
static bool leaf_extent(const dl_tensor *t, size_t *bytes)
{
    uint64_t last = 0, compact = 1, step;
    size_t item = ((size_t)t->dtype.bits * t->dtype.lanes + 7) / 8;

    for (int32_t d = t->ndim - 1; d >= 0; d--) {
        uint64_t n = (uint64_t)t->shape[d];
        if (n == 0) {
            *bytes = 0;
            return true;
        }
        if (__builtin_mul_overflow(n - 1, t->strides != NULL ? (uint64_t)t->strides[d] : compact, &step) ||
            __builtin_add_overflow(last, step, &last) || __builtin_mul_overflow(compact, n, &compact))
            return false;
    }
    return !__builtin_mul_overflow(last + 1, item, bytes);
}

/* Leaf i into its tensor; takes its numbers from *numbers. */
static bool leaf_parse(PyObject *leaf, size_t i, size_t slot_bytes, dl_tensor *t, int64_t **numbers)
{
    PyObject *shape = PyTuple_GetItem(leaf, 3), *strides = PyTuple_GetItem(leaf, 4);
    Py_ssize_t dims = PyTuple_Size(shape);
    size_t offset = PyLong_AsSize_t(PyTuple_GetItem(leaf, 0)), bytes = 0;
    long code = PyErr_Occurred() ? -1 : PyLong_AsLong(PyTuple_GetItem(leaf, 1));
    long bits = PyErr_Occurred() ? -1 : PyLong_AsLong(PyTuple_GetItem(leaf, 2));

    if (PyErr_Occurred())
        return false;
    if (code < 0 || code > 255 || bits < 1 || bits > 255) {
        PyErr_Format(PyExc_ValueError, "leaves[%zu]: no dtype has code %ld and %ld bits", i, code, bits);
        return false;
    }
    t->dtype.code = (uint8_t)code;
    t->dtype.bits = (uint8_t)bits;
    t->ndim = (int32_t)dims;
    t->byte_offset = offset;
    t->shape = *numbers;
    if (!numbers_parse(shape, i, dims, t->shape))
        return false;
    *numbers += dims;
    if (strides != Py_None) {
        t->strides = *numbers;
        if (!numbers_parse(strides, i, dims, t->strides))
            return false;
        *numbers += dims;
    }
    if (leaf_extent(t, &bytes) && offset <= slot_bytes && bytes <= slot_bytes - offset)
        return true;
    PyErr_Format(PyExc_ValueError, "leaves[%zu] reaches past the slot's %zu bytes", i, slot_bytes);
    return false;
}

static struct loan *loan_parse(struct lender *l, PyObject *leaves)
{
    size_t count, dims;
    struct loan *loan;
    int64_t *numbers;

    if (!leaves_count(leaves, &count, &dims))
        return NULL;
    loan = loan_make(l, count, dims);
    if (loan == NULL)
        return (struct loan *)(void *)PyErr_NoMemory();
    numbers = loan_numbers(loan);
    for (size_t i = 0; i < count; i++) {
        if (!leaf_parse(PyList_GetItem(leaves, (Py_ssize_t)i), i, l->slot_bytes, &loan->tensors[i].tensor, &numbers)) {
            loan_done(loan);
            loan_unname(loan);
            return NULL;
        }
    }
    return loan;
}

/* ---------------------------------------------------------------- capsules */

/* Of a capsule that no consumer took; one that did renamed it. */
static void capsule_end(PyObject *capsule)
{
    dl_managed *tensor;

    if (!PyCapsule_IsValid(capsule, DL_CAPSULE))
        return;
    tensor = PyCapsule_GetPointer(capsule, DL_CAPSULE);
    tensor->deleter(tensor);
}

static PyObject *tensor_make(struct loan *loan, size_t i, PyObject *convert)
{
    dl_managed *managed = loan_tensor(loan, i);
    PyObject *capsule = PyCapsule_New(managed, DL_CAPSULE, capsule_end), *tensor;

    if (capsule == NULL) {
        managed->deleter(managed);
        return NULL;
    }
    tensor = PyObject_CallFunctionObjArgs(convert, capsule, NULL);
    Py_DECREF(capsule);
    return tensor;
}

/* ---------------------------------------------------------------- next */

static PyTypeObject *loan_type;

/* Takes the batch, or sets an exception, of a signal's handler too: then no batch is lost. Without the GIL only where it must wait: to get it back can take as long as another thread's turn, 5 ms. What does not
 * wait holds locks for moments, and nobody who has them waits for the GIL. (The call that finds that the device has failed waits for what is queued, at most
 * the time limit, and does it with the GIL; nothing that it waits for needs it.) */
static bool take(struct intake *n, struct loan *loan, struct lent_stream *lent)
{
    side_stream *stream = lent != NULL ? lent->stream : NULL;
    bool stopped = false;
    side_status r;

    if (n->taking) {
        native_raise_text(SIDE_STATE, "Feeder.next", "another thread is in next; one at a time takes");
        return false;
    }
    r = n->cancelled ? SIDE_AGAIN : loan_take(loan, stream, 0);
    n->taking = r == SIDE_AGAIN;
    while (r == SIDE_AGAIN && !stopped) {
        Py_BEGIN_ALLOW_THREADS;
        r = loan_take(loan, stream, NATIVE_SLICE_S);
        Py_END_ALLOW_THREADS;
        stopped = r == SIDE_AGAIN && PyErr_CheckSignals() != 0;
    }
    n->taking = false;
    if (r == SIDE_OK)
        n->taken = loan->item.number + 1;
    else if (!stopped)
        native_raise(r);
    return r == SIDE_OK;
}

/* A loan that has its batch, as (Loan, tensors). Takes over `object`, which has the loan. */
static PyObject *hand_out(struct loan *loan, loan_object *object, PyObject *convert)
{
    PyObject *tensors = PyList_New((Py_ssize_t)loan->count), *pair = NULL;
    bool ok = tensors != NULL;

    object->uses = loan->count == 0;
    for (size_t i = 0; ok && i < loan->count; i++) {
        PyObject *tensor = tensor_make(loan, i, convert);
        ok = tensor != NULL && PyList_SetItem(tensors, (Py_ssize_t)i, tensor) == 0;
    }
    if (ok)
        pair = PyTuple_Pack(2, (PyObject *)object, tensors);
    if (loan->count > 0)
        loan_done(loan);
    Py_XDECREF(tensors);
    Py_DECREF((PyObject *)object);
    return pair;
}

PyObject *feeder_next(PyObject *self, PyObject *args)
{
    struct intake *n = intake_enter(self, "Feeder.next");
    PyObject *stream, *leaves, *convert;
    struct lent_stream *lent;
    loan_object *object;
    struct loan *loan;

    if (n == NULL || !PyArg_ParseTuple(args, "OOO:next", &stream, &leaves, &convert))
        return NULL;
    if (n->stopped)
        return native_raise_text(SIDE_CANCELLED, "Feeder.next", "the feeder was closed");
    intake_reap(n);
    if (lender_stream_of(n->lender, stream, &lent) != 0)
        return NULL;
    loan = loan_parse(n->lender, leaves);
    if (loan == NULL)
        return NULL;
    object = PyObject_New(loan_object, loan_type);
    if (object == NULL) {
        loan_done(loan);
        loan_unname(loan);
        return NULL;
    }
    object->loan = loan;
    object->uses = false;
    if (take(n, loan, lent))
        return hand_out(loan, object, convert);
    loan_done(loan);
    Py_DECREF((PyObject *)object);
    return NULL;
}

/* ---------------------------------------------------------------- Loan */

static void loan_dealloc(PyObject *self)
{
    loan_object *object = (loan_object *)self;
    PyTypeObject *type = Py_TYPE(self);

    if (object->uses)
        loan_done(object->loan);
    loan_unname(object->loan);
    PyObject_Free(self);
    Py_DECREF(type);
    life_sweep();
}

static PyObject *loan_use_on(PyObject *self, PyObject *stream)
{
    struct loan *loan = ((loan_object *)self)->loan;
    struct lent_stream *lent;
    side_status r = SIDE_OK;
    bool ok;

    if (native_enter() != 0)
        return NULL;
    if (!life_goes_on(loan->lender->forks))
        return native_raise_text(SIDE_FORKED, "Loan.use", "the batch is from before a fork");
    /* The use keeps slot and lender while the GIL is away. */
    if (!loan_hold(loan))
        return native_raise_text(SIDE_STATE, "Loan.use", "the loan has ended: all its tensors are gone");
    ok = lender_stream_of(loan->lender, stream, &lent) == 0;
    if (ok && lent != NULL && atomic_load(&loan_capturing)(lent->stream)) {
        native_raise_text(
            SIDE_STATE, "Loan.use",
            "the stream is being captured, and a wait for a copy would end that: call use() before the capture");
        ok = false;
    }
    if (ok && lent != NULL) {
        Py_BEGIN_ALLOW_THREADS;
        r = loan_use(loan, lent->stream);
        Py_END_ALLOW_THREADS;
    }
    if (r != SIDE_OK)
        native_raise(r);
    loan_done(loan);
    if (!ok || r != SIDE_OK)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *loan_number(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(((loan_object *)self)->loan->item.number);
}

static PyObject *loan_data(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromVoidPtr(((loan_object *)self)->loan->item.slot.data);
}

static PyObject *loan_nbytes(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(((loan_object *)self)->loan->item.bytes);
}

static PyObject *loan_index(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLong(((loan_object *)self)->loan->item.slot.index);
}

static PyObject *loan_alive(PyObject *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(atomic_load(&((loan_object *)self)->loan->uses) > 0);
}

static PyMethodDef loan_methods[] = {
    {"use", loan_use_on, METH_O,
     "use($self, stream, /)\n--\n\n"
     "`stream` (native handle or Stream) reads too: it waits until the batch is there, and the slot is rewritten\n"
     "only after what it has queued when the loan ends. Raises WrongState, a RuntimeError, if the loan has ended."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef loan_getset[] = {
    {"number", loan_number, NULL, "Of the batch, from 0.", NULL},
    {"data", loan_data, NULL, "Address of the slot.", NULL},
    {"nbytes", loan_nbytes, NULL, "End of the batch's last piece.", NULL},
    {"index", loan_index, NULL, "Of the slot.", NULL},
    {"alive", loan_alive, NULL, "A tensor of it lives.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* clang-format off */
static const char loan_doc[] =
    "A batch that Feeder.next handed out. Only its name: the loan ends when its last tensor dies, on whatever\n"
    "thread, and not with this object.";
/* clang-format on */

static PyType_Slot loan_slots[] = {
    {Py_tp_doc, (void *)(uintptr_t)loan_doc},
    {Py_tp_dealloc, loan_dealloc},
    {Py_tp_methods, loan_methods},
    {Py_tp_getset, loan_getset},
    {0, NULL},
};

static PyType_Spec loan_spec = {
    .name = "sidestream._native.Loan",
    .basicsize = sizeof(loan_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = loan_slots,
};

/* ---------------------------------------------------------------- tests */

static bool always_capturing(side_stream *stream)
{
    (void)stream;
    return true;
}

/* A capture on a machine without a GPU. */
static PyObject *test_capturing(PyObject *module, PyObject *on)
{
    static loan_capturing_fn *own;
    int yes = PyObject_IsTrue(on);
    (void)module;

    if (yes < 0)
        return NULL;
    if (own == NULL)
        own = atomic_load(&loan_capturing);
    atomic_store(&loan_capturing, yes ? always_capturing : own);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"_test_capturing", test_capturing, METH_O,
     "_test_capturing($module, on, /)\n--\n\nFor tests: every stream counts as one that captures a graph."},
    {NULL, NULL, 0, NULL},
};

int loan_add(PyObject *module)
{
    if (loan_type == NULL)
        loan_type = (PyTypeObject *)PyType_FromSpec(&loan_spec);
    if (loan_type == NULL || PyModule_AddType(module, loan_type) != 0)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
