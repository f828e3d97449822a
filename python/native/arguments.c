/* SPDX-License-Identifier: MIT
 *
 * Arguments: what CPython's own parser leaves unsaid. It does not name the argument that is no number, and takes -1 for a large unsigned one. */
#include "native.h"

#include <limits.h>

static int refuse(const char *name, PyObject *given, const char *takes)
{
    PyErr_Format(PyExc_TypeError, "%s is %R; it takes %s", name, given, takes);
    return -1;
}

static int check_unsigned(const char *name, PyObject *given, unsigned long long most)
{
    PyObject *number = PyNumber_Index(given);
    unsigned long long value = number == NULL ? 0 : PyLong_AsUnsignedLongLong(number);

    Py_XDECREF(number);
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_OverflowError))
        return -1;
    if (!PyErr_Occurred() && value <= most)
        return 0;
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "%s is %R; it takes 0 and more, at most %llu", name, given, most);
    return -1;
}

/* One argument by its unit of the format. */
static int check(char unit, const char *name, PyObject *given)
{
    switch (unit) {
    case 'd':
    case 'f': return PyNumber_Check(given) ? 0 : refuse(name, given, "a number");
    case 'n':
    case 'i': return PyIndex_Check(given) ? 0 : refuse(name, given, "a whole number");
    case 'I':
        return PyIndex_Check(given) ? check_unsigned(name, given, UINT_MAX) : refuse(name, given, "a whole number");
    case 'K':
        return PyIndex_Check(given) ? check_unsigned(name, given, ULLONG_MAX) : refuse(name, given, "a whole number");
    case 's': return PyUnicode_Check(given) ? 0 : refuse(name, given, "text");
    case 'z': return PyUnicode_Check(given) || given == Py_None ? 0 : refuse(name, given, "text or None");
    default: return 0;
    }
}

/* Argument i, borrowed; NULL: left out, or an exception. */
static PyObject *argument(PyObject *args, PyObject *kwargs, Py_ssize_t i, const char *name)
{
    PyObject *key, *value;

    if (i < PyTuple_Size(args))
        return PyTuple_GetItem(args, i);
    if (kwargs == NULL || PyDict_Size(kwargs) == 0)
        return NULL;
    key = PyUnicode_FromString(name);
    value = key == NULL ? NULL : PyDict_GetItemWithError(kwargs, key);
    Py_XDECREF(key);
    return value;
}

static int check_all(PyObject *args, PyObject *kwargs, const char *format, const char *const *names)
{
    Py_ssize_t i = 0;

    for (const char *unit = format; *unit != 0 && *unit != ':'; unit++) {
        PyObject *given;
        if (*unit == '|' || *unit == '$' || *unit == '*')
            continue;
        given = argument(args, kwargs, i, names[i]);
        if ((given == NULL && PyErr_Occurred()) || (given != NULL && check(*unit, names[i], given) != 0))
            return -1;
        i++;
    }
    return 0;
}

int native_parse(PyObject *args, PyObject *kwargs, const char *format, const char *const *names, ...)
{
    va_list list;
    int r;

    if (check_all(args, kwargs, format, names) != 0)
        return 0;
    va_start(list, names);
    /* The older headers' parameter lacks the const; nothing is written. */
    r = PyArg_VaParseTupleAndKeywords(args, kwargs, format, (char **)(uintptr_t)names, list);
    va_end(list);
    return r;
}
