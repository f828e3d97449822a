/* SPDX-License-Identifier: MIT
 *
 * Ctrl-C during a pipeline. Python's own handler only sets a flag, which is looked at when bytecode runs; a pipeline that waits for its source or for the device
 * runs none. So while the main thread is in a call, a handler of ours cancels the pipeline (one atomic store) and then calls Python's. */
#include "pipeline.h"

#include <errno.h>
#include <signal.h>
#include <unistd.h>

enum { MOST_NESTED = 8 };

static side_pipeline *volatile running[MOST_NESTED];
static volatile sig_atomic_t depth;
static struct sigaction before; /* while depth > 0 */

static void on_interrupt(int signal, siginfo_t *info, void *context)
{
    int saved = errno;

    for (int i = 0; i < depth; i++)
        side_pipeline_cancel(running[i]);
    if ((before.sa_flags & SA_SIGINFO) != 0)
        before.sa_sigaction(signal, info, context);
    else
        before.sa_handler(signal);
    errno = saved;
}

/* A handler of the program's own may mean anything but "stop". 1, 0, or -1 with an exception, which may be a KeyboardInterrupt. */
static int default_handler(void)
{
    static PyObject *get, *usual; /* C functions, so that no bytecode runs */
    PyObject *module, *now;
    int same;

    if (usual == NULL) {
        module = PyImport_ImportModule("_signal");
        get = module == NULL ? NULL : PyObject_GetAttrString(module, "getsignal");
        usual = get == NULL ? NULL : PyObject_GetAttrString(module, "default_int_handler");
        Py_XDECREF(module);
        if (usual == NULL)
            return -1;
    }
    now = PyObject_CallFunction(get, "i", SIGINT);
    same = now == NULL ? -1 : now == usual;
    Py_XDECREF(now);
    return same;
}

int interrupt_begin(side_pipeline *pipeline, bool *begun)
{
    struct sigaction ours = {.sa_sigaction = on_interrupt, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    int usual;

    *begun = false;
    if (gettid() != getpid() || depth == MOST_NESTED)
        return 0;
    if (depth == 0) {
        usual = default_handler();
        if (usual <= 0)
            return usual;
        if (sigaction(SIGINT, NULL, &before) != 0)
            return 0;
        if ((before.sa_flags & SA_SIGINFO) == 0 && (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN))
            return 0;
    }
    running[depth] = pipeline;
    depth++;
    *begun = true;
    if (depth == 1)
        sigaction(SIGINT, &ours, NULL);
    /* What came before ours was there would wait until the pipeline ends. */
    if (PyErr_CheckSignals() == 0)
        return 0;
    interrupt_end(true);
    *begun = false;
    return -1;
}

void interrupt_end(bool begun)
{
    struct sigaction now;

    if (!begun)
        return;
    /* What a callback installed meanwhile stays. */
    if (depth == 1 && sigaction(SIGINT, NULL, &now) == 0 && (now.sa_flags & SA_SIGINFO) != 0 &&
        now.sa_sigaction == on_interrupt)
        sigaction(SIGINT, &before, NULL);
    depth--;
}
