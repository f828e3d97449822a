/* SPDX-License-Identifier: MIT
 *
 * The extension module sidestream._native: CPython's limited API (3.11) over the public C API. */
#include <Python.h>

#include <sidestream.h>

static PyObject *native_version(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyUnicode_FromString(side_version());
}

static PyMethodDef native_methods[] = {
    {"version", native_version, METH_NOARGS, "version() -> str: the library's version."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot native_slots[] = {
    {0, NULL},
};

static struct PyModuleDef native_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "sidestream._native",
    .m_doc = "The C library as the package sees it; the package's own modules are the interface.",
    .m_methods = native_methods,
    .m_slots = native_slots,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&native_module);
}
