/* SPDX-License-Identifier: MIT
 *
 * The Python side of life.h. All calls with the GIL. */
#ifndef NATIVE_SWEEP_H
#define NATIVE_SWEEP_H

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "life.h"

/* Does what is due; may release the GIL for a while. Cheap where nothing is. Keeps a pending exception. */
void life_sweep(void);
/* Called at exit, before the last sweep, in the order they were added; at most 8. For module init. */
void life_add_exit(void (*fn)(void));
/* Once, from module init: notes forks, registers the exit hook. -1 with an exception. */
int life_begin(void);

#endif
