/* SPDX-License-Identifier: MIT
 *
 * The named operations as methods of Stream. Shapes and types come from the operands. */
#include "native.h"

struct call {
    struct stream_ref *ref;
    struct operand out, in[2];
    int inputs;
};

static void call_end(struct call *call)
{
    operand_drop(&call->out);
    for (int i = 0; i < call->inputs; i++)
        operand_drop(&call->in[i]);
}

static int on_device(const struct operand *operand, const char *what)
{
    if (operand->kind == SIDE_MEMORY_DEVICE)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s must be device memory; copy it there first", what);
    return -1;
}

static int call_begin(struct call *call, PyObject *stream, PyObject *out, PyObject *in0, PyObject *in1)
{
    PyObject *in[2] = {in0, in1};
    static const char *const names[] = {"the first input", "the second input"};

    memset(call, 0, sizeof(*call));
    call->ref = native_enter() == 0 ? native_stream(stream, "stream") : NULL;
    if (call->ref == NULL || operand_get(&call->out, out, call->ref, true, "out") != 0)
        return -1;
    for (int i = 0; i < 2 && in[i] != NULL; i++) {
        if (operand_get(&call->in[i], in[i], call->ref, false, names[i]) != 0)
            goto fail;
        call->inputs = i + 1;
        if (on_device(&call->in[i], names[i]) != 0)
            goto fail;
    }
    if (on_device(&call->out, "out") == 0)
        return 0;
fail:
    call_end(call);
    return -1;
}

/* The operands must be as large as the operation reads and writes. */
static side_status check_bytes(const struct call *call, const side_op *op)
{
    size_t in[2], out;
    side_status s = side_op_bytes(op, in, &out);

    if (s != SIDE_OK) {
        native_raise(s);
        return s;
    }
    for (int i = 0; i < call->inputs; i++) {
        if (call->in[i].bytes < in[i]) {
            native_raise_text(SIDE_TOO_LARGE, side_op_name(op->id), "input %d has %zu bytes; the operation reads %zu",
                              i, call->in[i].bytes, in[i]);
            return SIDE_TOO_LARGE;
        }
    }
    if (call->out.bytes < out) {
        native_raise_text(SIDE_TOO_LARGE, side_op_name(op->id), "out has %zu bytes; the operation writes %zu",
                          call->out.bytes, out);
        return SIDE_TOO_LARGE;
    }
    return SIDE_OK;
}

static PyObject *call_run(struct call *call, side_op *op)
{
    side_status s;

    op->out = call->out.data;
    for (int i = 0; i < call->inputs; i++)
        op->in[i] = call->in[i].data;
    s = check_bytes(call, op);
    if (s == SIDE_OK) {
        Py_BEGIN_ALLOW_THREADS
        s = side_op_async(call->ref->stream, op);
        Py_END_ALLOW_THREADS
        if (s != SIDE_OK)
            native_raise(s);
        operand_used(&call->out, call->ref, true);
        for (int i = 0; i < call->inputs; i++)
            operand_used(&call->in[i], call->ref, false);
    }
    call_end(call);
    return s == SIDE_OK ? Py_NewRef(Py_None) : NULL;
}

static size_t elements(const struct operand *operand)
{
    return operand->dtype == NULL ? 0 : operand->bytes / dtype_bytes(operand->dtype);
}

static int math_of(const char *name, side_math *math)
{
    static const char *const names[] = {"fp32", "tf32", "bf16"};

    for (int i = 0; i < 3; i++) {
        if (strcmp(name, names[i]) == 0) {
            *math = (side_math)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "math is '%s'; it takes fp32, tf32 or bf16", name);
    return -1;
}

static int matmul_dims(const struct call *call, side_op *op)
{
    const struct operand *a = &call->in[0], *b = &call->in[1], *out = &call->out;

    if (a->ndim != 2 || b->ndim != 2 || out->ndim != 2 || a->shape[1] != b->shape[0] || out->shape[0] != a->shape[0] ||
        out->shape[1] != b->shape[1]) {
        PyErr_SetString(PyExc_ValueError,
                        "matmul: shapes must be out (m, n), a (m, k), b (k, n); give them with view(shape=...)");
        return -1;
    }
    if (a->dtype != b->dtype) {
        PyErr_SetString(PyExc_ValueError, "matmul: a and b must have one dtype");
        return -1;
    }
    op->dim[0] = (uint64_t)a->shape[0];
    op->dim[1] = (uint64_t)b->shape[1];
    op->dim[2] = (uint64_t)a->shape[1];
    return dtype_side(a->dtype, "a", &op->type[0]) != 0 || dtype_side(out->dtype, "out", &op->type[1]) != 0 ? -1 : 0;
}

PyObject *stream_matmul(PyObject *stream, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"out", "a", "b", "math", NULL};
    PyObject *out, *a, *b;
    const char *math = "fp32";
    side_op op = SIDE_OP_INIT;
    struct call call;

    op.id = SIDE_OP_MATMUL;
    if (!native_parse(args, kwargs, "OOO|s:matmul", names, &out, &a, &b, &math) || math_of(math, &op.math) != 0 ||
        call_begin(&call, stream, out, a, b) != 0)
        return NULL;
    if (matmul_dims(&call, &op) == 0)
        return call_run(&call, &op);
    call_end(&call);
    return NULL;
}

PyObject *stream_cast(PyObject *stream, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"out", "data", NULL};
    PyObject *out, *data;
    side_op op = SIDE_OP_INIT;
    struct call call;

    op.id = SIDE_OP_CAST;
    if (!native_parse(args, kwargs, "OO:cast", names, &out, &data) || call_begin(&call, stream, out, data, NULL) != 0)
        return NULL;
    op.dim[0] = elements(&call.in[0]);
    if (dtype_side(call.in[0].dtype, "data", &op.type[0]) == 0 && dtype_side(call.out.dtype, "out", &op.type[1]) == 0)
        return call_run(&call, &op);
    call_end(&call);
    return NULL;
}

PyObject *stream_affine(PyObject *stream, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"out", "data", "scale", "bias", NULL};
    PyObject *out, *data;
    side_op op = SIDE_OP_INIT;
    side_type type = SIDE_F32;
    struct call call;

    op.id = SIDE_OP_AFFINE;
    if (!native_parse(args, kwargs, "OO|ff:affine", names, &out, &data, &op.scale, &op.bias) ||
        call_begin(&call, stream, out, data, NULL) != 0)
        return NULL;
    op.dim[0] = elements(&call.in[0]);
    if (dtype_side(call.in[0].dtype, "data", &type) == 0 && type == SIDE_F32)
        return call_run(&call, &op);
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "affine: data must be float32");
    call_end(&call);
    return NULL;
}

PyObject *stream_xxh3_blocks(PyObject *stream, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"out", "data", NULL};
    PyObject *out, *data;
    side_op op = SIDE_OP_INIT;
    struct call call;

    op.id = SIDE_OP_XXH3_BLOCKS;
    if (!native_parse(args, kwargs, "OO:xxh3_blocks", names, &out, &data) ||
        call_begin(&call, stream, out, data, NULL) != 0)
        return NULL;
    op.dim[0] = call.in[0].bytes / 1024;
    return call_run(&call, &op);
}

PyObject *stream_spin(PyObject *stream, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"seconds", NULL};
    struct stream_ref *ref = native_enter() == 0 ? native_stream(stream, "stream") : NULL;
    side_op op = SIDE_OP_INIT;
    double seconds;
    side_status s;

    op.id = SIDE_OP_SPIN;
    if (ref == NULL || !native_parse(args, kwargs, "d:spin", names, &seconds))
        return NULL;
    if (!(seconds >= 0 && seconds < 3600))
        return PyErr_Format(PyExc_ValueError, "seconds takes 0..3600");
    op.dim[0] = (uint64_t)(seconds * 1e9);
    Py_BEGIN_ALLOW_THREADS
    s = side_op_async(ref->stream, &op);
    Py_END_ALLOW_THREADS
    return s == SIDE_OK ? Py_NewRef(Py_None) : native_raise(s);
}

/* ---------------------------------------------------------------- folding of checksums */

/* Bytes of Python's lie anywhere; the sums are numbers. */
static void fold_bytes(side_xxh3 *state, const char *bytes, size_t blocks)
{
    enum { BLOCKS = 16 };
    uint64_t sums[BLOCKS * 8];

    for (size_t n; blocks > 0; blocks -= n, bytes += n * 64) {
        n = blocks < BLOCKS ? blocks : BLOCKS;
        memcpy(sums, bytes, n * 64);
        side_xxh3_fold(state, sums, n);
    }
}

static PyObject *xxh3_digest(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"sums", "tail", "total", NULL};
    Py_buffer sums, tail;
    unsigned long long total;
    side_xxh3 state;
    uint64_t hash = 0;
    side_status s = SIDE_OK;
    (void)module;

    if (!native_parse(args, kwargs, "y*y*K:xxh3_digest", names, &sums, &tail, &total))
        return NULL;
    if (sums.len % 64 != 0) {
        PyErr_Format(PyExc_ValueError, "sums: 64 bytes a block; %zd are no whole number of blocks", sums.len);
        s = SIDE_INVALID;
    } else {
        Py_BEGIN_ALLOW_THREADS
        side_xxh3_begin(&state);
        fold_bytes(&state, sums.buf, (size_t)sums.len / 64);
        s = side_xxh3_end(&state, tail.buf, (size_t)tail.len, total, &hash);
        Py_END_ALLOW_THREADS
        if (s != SIDE_OK)
            native_raise(s);
    }
    PyBuffer_Release(&sums);
    PyBuffer_Release(&tail);
    return s == SIDE_OK ? PyLong_FromUnsignedLongLong(hash) : NULL;
}

static PyMethodDef functions[] = {
    {"xxh3_digest", (PyCFunction)(void (*)(void))xxh3_digest, METH_VARARGS | METH_KEYWORDS,
     "xxh3_digest(sums, tail, total)\n--\n\n"
     "XXH3 (64 bits) of `total` bytes, from the sums that Stream.xxh3_blocks made of the first (total - 1) // 1024\n"
     "blocks of 1 KiB, in order (none where total is under 241), and the last min(total, 1088) bytes."},
    {NULL, NULL, 0, NULL},
};

int ops_add(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
