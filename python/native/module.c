/* SPDX-License-Identifier: MIT
 *
 * The extension module sidestream._native: CPython's limited API (3.11) over the public C API. One interpreter a process: types and lists are
 * the process's. */
#include "load.h"
#include "native.h"
#include "pipeline.h"

static PyObject *native_version(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyUnicode_FromString(side_version());
}

static PyMethodDef native_methods[] = {
    {"version", native_version, METH_NOARGS, "version()\n--\n\nThe library's version."},
    {NULL, NULL, 0, NULL},
};

/* What each area adds, in an order that its types need. */
static int (*const areas[])(PyObject *module) = {
    errors_add,   device_add, stream_add,   event_add,  buffer_add, pool_add,       ops_add,  slots_add, slot_add,
    timeline_add, item_add,   pipeline_add, feeder_add, host_add,   checkpoint_add, load_add, words_add};

static struct PyModuleDef native_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "sidestream._native",
    .m_doc = "The C library as the package sees it; the package's own modules are the interface.",
    .m_size = -1,
    .m_methods = native_methods,
};

PyMODINIT_FUNC PyInit__native(void)
{
    static bool begun;
    PyObject *module = PyModule_Create(&native_module);
    bool ok = module != NULL;

    if (ok && !begun)
        ok = begun = life_begin() == 0 && messages_begin() == 0;
    for (size_t i = 0; ok && i < sizeof(areas) / sizeof(areas[0]); i++)
        ok = areas[i](module) == 0;
    if (!ok)
        Py_CLEAR(module);
    return module;
}
