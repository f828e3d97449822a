/* SPDX-License-Identifier: MIT
 *
 * Element types under the names that NumPy and torch give them. */
#include "native.h"

/* Aliases come after the name that we show. */
static const struct dtype dtypes[] = {
    {"uint8", "B", {DL_UINT, 8, 1}},
    {"int8", "b", {DL_INT, 8, 1}},
    {"uint16", "H", {DL_UINT, 16, 1}},
    {"int16", "h", {DL_INT, 16, 1}},
    {"uint32", "I", {DL_UINT, 32, 1}},
    {"int32", "i", {DL_INT, 32, 1}},
    {"uint64", "Q", {DL_UINT, 64, 1}},
    {"int64", "q", {DL_INT, 64, 1}},
    {"float16", "e", {DL_FLOAT, 16, 1}},
    {"bfloat16", NULL, {DL_BFLOAT, 16, 1}},
    {"float32", "f", {DL_FLOAT, 32, 1}},
    {"float64", "d", {DL_FLOAT, 64, 1}},
    {"complex64", "Zf", {DL_COMPLEX, 64, 1}},
    {"complex128", "Zd", {DL_COMPLEX, 128, 1}},
    {"bool", "?", {DL_BOOL, 8, 1}},
    {"u8", "B", {DL_UINT, 8, 1}},
    {"f16", "e", {DL_FLOAT, 16, 1}},
    {"bf16", NULL, {DL_BFLOAT, 16, 1}},
    {"f32", "f", {DL_FLOAT, 32, 1}},
    {"half", "e", {DL_FLOAT, 16, 1}},
    {"bool_", "?", {DL_BOOL, 8, 1}},
    {"float", "d", {DL_FLOAT, 64, 1}},
    {"int", "q", {DL_INT, 64, 1}},
    {"complex", "Zd", {DL_COMPLEX, 128, 1}},
};

enum { DTYPES = sizeof(dtypes) / sizeof(dtypes[0]) };

const struct dtype *dtype_of_dl(dl_type type)
{
    for (size_t i = 0; i < DTYPES; i++) {
        if (memcmp(&dtypes[i].type, &type, sizeof(type)) == 0)
            return &dtypes[i];
    }
    return NULL;
}

size_t dtype_bytes(const struct dtype *dtype)
{
    return dtype->type.bits / 8u;
}

/* A string itself, the name of a NumPy dtype or of a class, or what str() says ("torch.float32"). */
static PyObject *name_of(PyObject *object)
{
    static const char *const attributes[] = {"name", "__name__"};

    if (PyUnicode_Check(object))
        return Py_NewRef(object);
    for (size_t i = 0; i < 2; i++) {
        PyObject *name = PyObject_GetAttrString(object, attributes[i]);
        if (name != NULL && PyUnicode_Check(name))
            return name;
        Py_XDECREF(name);
        PyErr_Clear();
    }
    return PyObject_Str(object);
}

const struct dtype *native_dtype(PyObject *object)
{
    PyObject *name;
    const struct dtype *found = NULL;
    const char *text;

    if (object == NULL || object == Py_None)
        return &dtypes[0];
    name = name_of(object);
    text = name == NULL ? NULL : PyUnicode_AsUTF8AndSize(name, NULL);
    if (text != NULL) {
        text = strncmp(text, "torch.", 6) == 0 ? text + 6 : text;
        for (size_t i = 0; i < DTYPES && found == NULL; i++)
            found = strcmp(dtypes[i].name, text) == 0 ? dtype_of_dl(dtypes[i].type) : NULL;
        if (found == NULL)
            PyErr_Format(PyExc_ValueError,
                         "dtype %R is not one of bool, uint8..uint64, int8..int64, float16, bfloat16, float32, "
                         "float64, complex64, "
                         "complex128",
                         object);
    }
    Py_XDECREF(name);
    return found;
}

int dtype_side(const struct dtype *dtype, const char *what, side_type *type)
{
    static const struct {
        const char *name;
        side_type type;
    } known[] = {{"float32", SIDE_F32}, {"float16", SIDE_F16}, {"bfloat16", SIDE_BF16}, {"uint8", SIDE_U8}};

    for (size_t i = 0; dtype != NULL && i < 4; i++) {
        if (strcmp(known[i].name, dtype->name) == 0) {
            *type = known[i].type;
            return 0;
        }
    }
    native_raise_text(SIDE_INVALID, what, "%s is of dtype %s; it takes float32, float16, bfloat16 or uint8", what,
                      dtype != NULL ? dtype->name : "unknown");
    return -1;
}
