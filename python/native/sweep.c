/* SPDX-License-Identifier: MIT
 *
 * The Python side of life.h: the graveyard is swept, and the exit hook ends what runs. */
#include "sweep.h"

enum { MOST_HOOKS = 8 };

static void (*hooks[MOST_HOOKS])(void); /* GIL */
static int hook_count;                  /* GIL */

void life_sweep(void)
{
    PyObject *type, *value, *trace;
    struct grave *grave = life_is_over() ? NULL : life_exhume(), *next;

    if (grave == NULL)
        return;
    PyErr_Fetch(&type, &value, &trace);
    /* A burial may drop the last reference to something else: until nothing comes after. */
    for (; grave != NULL; grave = life_exhume()) {
        for (; grave != NULL; grave = next) {
            next = grave->next;
            grave->bury(grave);
        }
    }
    PyErr_Restore(type, value, trace);
}

void life_add_exit(void (*fn)(void))
{
    if (hook_count < MOST_HOOKS)
        hooks[hook_count++] = fn;
}

static PyObject *at_exit(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    for (int i = 0; i < hook_count && !life_is_over(); i++)
        hooks[i]();
    life_sweep();
    life_end();
    Py_RETURN_NONE;
}

static PyMethodDef at_exit_method = {"_at_exit", at_exit, METH_NOARGS, "Ends what runs; deleters do nothing after."};

int life_begin(void)
{
    PyObject *atexit = PyImport_ImportModule("atexit"), *function = NULL, *r = NULL;

    if (atexit != NULL)
        function = PyCFunction_New(&at_exit_method, NULL);
    if (function != NULL)
        r = PyObject_CallMethod(atexit, "register", "O", function);
    Py_XDECREF(function);
    Py_XDECREF(atexit);
    if (r == NULL)
        return -1;
    Py_DECREF(r);
    if (life_watch_forks() != 0) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}
