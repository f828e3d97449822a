/* SPDX-License-Identifier: MIT
 *
 * One exception class a status; each is an Error, which is a RuntimeError. Where the argument is at fault it is a ValueError too. */
#include "native.h"

#include <stdarg.h>
#include <stdio.h>

struct kind {
    side_status status;
    const char *name;
    const char *doc;
    int parent;      /* index in this table */
    PyObject **also; /* a second base of Python's own; NULL: none */
};

/* clang-format off */
static const struct kind kinds[] = {
    {SIDE_OK, "Error", "A call of the library failed; the message says what, which argument, and the fix.\n\n"
                       "`status` (number), `status_name` (\"SIDE_STUCK\"), `where` (the call that failed, as \"cuMemHostRegister\"),\n"
                       "`os_errno` and `device_code` (the driver's own number; both 0 where there is none).", 0, NULL},
    {SIDE_INVALID, "InvalidArgument", "An argument is at fault; the message names it.", 0, &PyExc_ValueError},
    {SIDE_TOO_LARGE, "TooLarge", "Larger than the slot or the limit.", 0, &PyExc_ValueError},
    {SIDE_NO_MEMORY, "OutOfHostMemory", "The system gave no memory.", 0, &PyExc_MemoryError},
    {SIDE_NO_DEVICE_MEMORY, "OutOfDeviceMemory", "The device has not that much memory free; the message says how much is.", 0, NULL},
    {SIDE_OVER_BUDGET, "OverBudget", "More pinned memory than the pool's budget; the message has both numbers.", 0, NULL},
    {SIDE_NO_DEVICE, "NoDevice", "No driver, or no such device.", 0, NULL},
    {SIDE_DRIVER_TOO_OLD, "DriverTooOld", "Driver or device are older than supported.", 6, NULL},
    {SIDE_UNSUPPORTED, "Unsupported", "Not supported by this device or version.", 0, NULL},
    {SIDE_NO_LIBRARY, "NoLibrary", "A library that this call needs (cuBLAS, NVRTC) is missing.", 8, NULL},
    {SIDE_DEVICE_ERROR, "DeviceError", "A call of the driver's failed; `where` and `device_code` say which and why.", 0, NULL},
    {SIDE_DEVICE_LOST, "DeviceLost", "The device's context is dead: restart the process.", 10, NULL},
    {SIDE_STUCK, "Stuck", "The device did not finish in time. What it may still touch is kept, not freed.", 0, NULL},
    {SIDE_CANCELLED, "Cancelled", "Somebody cancelled it.", 0, NULL},
    {SIDE_WOULD_DEADLOCK, "WouldDeadlock", "This thread would wait for itself.", 0, NULL},
    {SIDE_FORKED, "Forked", "The object is from before a fork; open devices after it.", 0, NULL},
    {SIDE_IO, "IOFailed", "Reading or writing a file failed; `os_errno` says why.", 0, NULL},
    {SIDE_CALLBACK, "CallbackFailed", "A callback failed without an exception.", 0, NULL},
    {SIDE_STALE, "Stale", "The slot was rewritten since.", 0, NULL},
    {SIDE_NOT_FOUND, "NotFound", "No such key.", 0, &PyExc_LookupError},
    {SIDE_STATE, "WrongState", "The call does not fit the object's state.", 0, NULL},
    {SIDE_SYSTEM, "SystemFailed", "A call of the operating system's failed; `os_errno` says why.", 0, NULL},
    {SIDE_AGAIN, "NotReady", "It would have to wait.", 0, NULL},
    {SIDE_END, "NoMoreItems", "There are no more items.", 0, NULL},
};
/* clang-format on */

enum { KINDS = sizeof(kinds) / sizeof(kinds[0]) };

static PyObject *classes[KINDS]; /* for the process's life */

PyObject *native_exception(side_status status)
{
    for (size_t i = 1; i < KINDS; i++) {
        if (kinds[i].status == status)
            return classes[i];
    }
    return classes[0];
}

const char *native_exception_name(const char *status, size_t length)
{
    for (size_t i = 1; i < KINDS; i++) {
        const char *name = side_status_name(kinds[i].status);
        if (strlen(name) == length && memcmp(name, status, length) == 0)
            return kinds[i].name;
    }
    return NULL;
}

static int set_attribute(PyObject *object, const char *name, PyObject *value)
{
    int r = value == NULL ? -1 : PyObject_SetAttrString(object, name, value);

    Py_XDECREF(value);
    return r;
}

PyObject *native_raise_error(const side_error *error)
{
    PyObject *type = native_exception(error->status);
    char text[sizeof(error->message) + 32], where[96];
    PyObject *message, *exception;

    native_words(text, sizeof(text), error->message[0] != 0 ? error->message : side_status_text(error->status));
    native_words(where, sizeof(where), error->where != NULL ? error->where : "");
    message = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    exception = message == NULL ? NULL : PyObject_CallFunctionObjArgs(type, message, NULL);
    Py_XDECREF(message);
    if (exception == NULL)
        return NULL;
    if (set_attribute(exception, "status", PyLong_FromLong(error->status)) == 0 &&
        set_attribute(exception, "status_name", PyUnicode_FromString(side_status_name(error->status))) == 0 &&
        set_attribute(exception, "where", PyUnicode_FromString(where)) == 0 &&
        set_attribute(exception, "os_errno", PyLong_FromLong(error->os_errno)) == 0 &&
        set_attribute(exception, "device_code", PyLong_FromLong(error->device_code)) == 0)
        PyErr_SetObject(type, exception);
    Py_DECREF(exception);
    return NULL;
}

PyObject *native_raise(side_status status)
{
    const side_error *last = side_last_error();
    side_error error = {.status = status, .where = ""};

    return native_raise_error(last->status == status ? last : &error);
}

PyObject *native_raise_text(side_status status, const char *where, const char *format, ...)
{
    side_error error = {.status = status, .where = where};
    va_list args;

    va_start(args, format);
    vsnprintf(error.message, sizeof(error.message), format, args);
    va_end(args);
    return native_raise_error(&error);
}

/* The attributes that an exception raised by hand has as well. */
static PyObject *base_attributes(void)
{
    return Py_BuildValue("{s:i,s:s,s:s,s:i,s:i}", "status", 0, "status_name", "", "where", "", "os_errno", 0,
                         "device_code", 0);
}

static PyObject *make_class(const struct kind *kind)
{
    char name[64];
    PyObject *bases, *made, *dict = NULL;

    snprintf(name, sizeof(name), "sidestream.%s", kind->name);
    if (kind == kinds) {
        dict = base_attributes();
        if (dict == NULL)
            return NULL;
        bases = PyTuple_Pack(1, PyExc_RuntimeError);
    } else if (kind->also != NULL) {
        bases = PyTuple_Pack(2, classes[kind->parent], *kind->also);
    } else {
        bases = PyTuple_Pack(1, classes[kind->parent]);
    }
    made = bases == NULL ? NULL : PyErr_NewExceptionWithDoc(name, kind->doc, bases, dict);
    Py_XDECREF(bases);
    Py_XDECREF(dict);
    return made;
}

int errors_add(PyObject *module)
{
    for (size_t i = 0; i < KINDS; i++) {
        if (classes[i] == NULL)
            classes[i] = make_class(&kinds[i]);
        if (classes[i] == NULL || PyModule_AddObjectRef(module, kinds[i].name, classes[i]) != 0)
            return -1;
    }
    return 0;
}
