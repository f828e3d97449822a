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

/* A handler of the program's own may mean anything but "stop". */
static bool default_handler(void)
{
    PyObject *module = PyImport_ImportModule("signal"), *now = NULL, *usual = NULL;
    bool same;

    if (module != NULL)
        now = PyObject_CallMethod(module, "getsignal", "i", SIGINT);
    if (now != NULL)
        usual = PyObject_GetAttrString(module, "default_int_handler");
    same = usual != NULL && now == usual;
    Py_XDECREF(usual);
    Py_XDECREF(now);
    Py_XDECREF(module);
    PyErr_Clear();
    return same;
}

bool interrupt_begin(side_pipeline *pipeline)
{
    struct sigaction ours = {.sa_sigaction = on_interrupt, .sa_flags = SA_SIGINFO | SA_ONSTACK};

    if (gettid() != getpid() || depth == MOST_NESTED)
        return false;
    if (depth == 0) {
        if (!default_handler() || sigaction(SIGINT, NULL, &before) != 0)
            return false;
        if ((before.sa_flags & SA_SIGINFO) == 0 && (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN))
            return false;
    }
    running[depth] = pipeline;
    depth++;
    if (depth == 1)
        sigaction(SIGINT, &ours, NULL);
    return true;
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
