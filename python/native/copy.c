/* SPDX-License-Identifier: MIT
 *
 * Stream.copy and Stream.fill: what is copied from where is seen from the memory itself. */
#include "native.h"

static int copy_kind(const struct operand *dst, const struct operand *src, side_copy_kind *kind)
{
    bool to = dst->kind == SIDE_MEMORY_DEVICE, from = src->kind == SIDE_MEMORY_DEVICE;

    *kind = to && from ? SIDE_COPY_D2D : to ? SIDE_COPY_H2D : SIDE_COPY_D2H;
    if (to || from)
        return 0;
    PyErr_SetString(PyExc_ValueError, "copy: neither dst nor src is device memory");
    return -1;
}

static int copy_range(const char *what, size_t bytes, Py_ssize_t offset, Py_ssize_t nbytes)
{
    if (offset >= 0 && nbytes >= 0 && (size_t)offset <= bytes && (size_t)nbytes <= bytes - (size_t)offset)
        return 0;
    native_raise_text(SIDE_TOO_LARGE, "Stream.copy", "%s has %zu bytes; %zd from offset %zd do not fit", what, bytes,
                      nbytes, offset);
    return -1;
}

static PyObject *copy_operands(struct stream_ref *ref, struct operand *dst, struct operand *src, Py_ssize_t nbytes,
                               Py_ssize_t to, Py_ssize_t from)
{
    side_copy_kind kind;
    side_status s = SIDE_OK;

    if (nbytes < 0 && from >= 0 && (size_t)from <= src->bytes)
        nbytes = (Py_ssize_t)src->bytes - from;
    if (copy_range("src", src->bytes, from, nbytes) != 0 || copy_range("dst", dst->bytes, to, nbytes) != 0)
        return NULL;
    if (nbytes == 0)
        return Py_NewRef(Py_None);
    if (copy_kind(dst, src, &kind) != 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    s = side_copy_async(ref->stream, kind, dst->data + to, src->data + from, (size_t)nbytes);
    Py_END_ALLOW_THREADS
    if (s != SIDE_OK)
        native_raise(s);
    operand_used(dst, ref, true);
    operand_used(src, ref, false);
    return s == SIDE_OK ? Py_NewRef(Py_None) : NULL;
}

PyObject *stream_copy(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"dst", "src", "nbytes", "dst_offset", "src_offset", NULL};
    struct stream_ref *ref = native_enter() == 0 ? native_stream(object, "stream") : NULL;
    PyObject *to, *from, *count = Py_None, *r = NULL;
    struct operand dst, src;
    Py_ssize_t nbytes = -1, dst_offset = 0, src_offset = 0;

    if (ref == NULL || !native_parse(args, kwargs, "OO|Onn:copy", names, &to, &from, &count, &dst_offset, &src_offset))
        return NULL;
    if (count != Py_None) {
        if (!PyIndex_Check(count))
            return PyErr_Format(PyExc_TypeError, "nbytes is %R; it takes a whole number, or None", count);
        nbytes = PyNumber_AsSsize_t(count, PyExc_OverflowError);
        if (nbytes < 0)
            return PyErr_Occurred() ? NULL
                                    : PyErr_Format(PyExc_ValueError, "nbytes is %zd; it takes 0 and more", nbytes);
    }
    if (operand_get(&dst, to, ref, true, "dst") != 0)
        return NULL;
    if (operand_get(&src, from, ref, false, "src") == 0) {
        r = copy_operands(ref, &dst, &src, nbytes, dst_offset, src_offset);
        operand_drop(&src);
    }
    operand_drop(&dst);
    return r;
}

PyObject *stream_fill(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"dst", "value", NULL};
    struct stream_ref *ref = native_enter() == 0 ? native_stream(object, "stream") : NULL;
    PyObject *to;
    struct operand dst;
    side_status s = SIDE_OK;
    int value = 0;

    if (ref == NULL || !native_parse(args, kwargs, "O|i:fill", names, &to, &value))
        return NULL;
    if (value < 0 || value > 255)
        return PyErr_Format(PyExc_ValueError, "value is %d; it takes a byte, 0..255", value);
    if (operand_get(&dst, to, ref, true, "dst") != 0)
        return NULL;
    if (dst.kind != SIDE_MEMORY_DEVICE) {
        PyErr_SetString(PyExc_ValueError, "dst must be device memory");
        s = SIDE_INVALID;
    } else if (dst.bytes > 0) {
        Py_BEGIN_ALLOW_THREADS
        s = side_memset_async(ref->stream, dst.data, value, dst.bytes);
        Py_END_ALLOW_THREADS
        if (s != SIDE_OK)
            native_raise(s);
        operand_used(&dst, ref, true);
    }
    operand_drop(&dst);
    return s == SIDE_OK ? Py_NewRef(Py_None) : NULL;
}
