/* SPDX-License-Identifier: MIT
 *
 * What the library says goes to logging.getLogger("sidestream"), at the next entry point.
 *
 * The library may speak while it holds a lock, on any thread, so its callback must not take the GIL: it puts the text into a bounded queue. Messages
 * that find the queue full are counted, and the count is logged. */
#include "native.h"

#include <pthread.h>
#include <stdio.h>
#include <time.h>

enum { QUEUE = 64, TEXT = 360 };

struct message {
    side_level level;
    char text[TEXT];
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards all below; held for the copy of one message */
static struct message queue[QUEUE];
static unsigned first;
static atomic_uint count; /* read without the lock to see whether there is anything */
static unsigned lost;
static bool draining; /* GIL: a log handler that calls us does not drain again */

static void on_message(void *user, side_level level, const char *component, const char *text)
{
    (void)user;
    pthread_mutex_lock(&mutex);
    if (count < QUEUE) {
        struct message *m = &queue[(first + count) % QUEUE];
        m->level = level;
        snprintf(m->text, TEXT, "%s: %s", component, text);
        count++;
    } else {
        lost++;
    }
    pthread_mutex_unlock(&mutex);
}

static void in_child(void)
{
    pthread_mutex_init(&mutex, NULL);
    first = count = lost = 0;
}

static bool pop(struct message *m, unsigned *missed)
{
    bool any;

    pthread_mutex_lock(&mutex);
    any = count > 0;
    if (any) {
        *m = queue[first];
        first = (first + 1) % QUEUE;
        count--;
    }
    *missed = lost;
    lost = 0;
    pthread_mutex_unlock(&mutex);
    return any;
}

/* logging's numbers. */
static int level_number(side_level level)
{
    return level == SIDE_LEVEL_WARN ? 30 : level == SIDE_LEVEL_INFO ? 20 : 10;
}

/* The caller's call is no place for an exception of a log handler. A Ctrl-C that came meanwhile is not the handler's: it is put back. */
static void settle_exception(void)
{
    if (!PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
        PyErr_WriteUnraisable(NULL);
        return;
    }
    PyErr_Clear();
    PyErr_SetInterrupt();
}

/* With a handler that does nothing, so that nothing is printed where the program set up no logging. */
static PyObject *make_logger(void)
{
    PyObject *logging = PyImport_ImportModule("logging"), *null = NULL, *r = NULL;
    PyObject *logger = logging == NULL ? NULL : PyObject_CallMethod(logging, "getLogger", "s", "sidestream");

    if (logger != NULL)
        null = PyObject_CallMethod(logging, "NullHandler", NULL);
    if (null != NULL)
        r = PyObject_CallMethod(logger, "addHandler", "O", null);
    if (r == NULL)
        Py_CLEAR(logger);
    Py_XDECREF(r);
    Py_XDECREF(null);
    Py_XDECREF(logging);
    return logger;
}

static void log_one(PyObject *logger, int level, const char *text)
{
    char words[TEXT + 32];
    PyObject *message, *r;

    native_words(words, sizeof(words), text);
    message = PyUnicode_DecodeUTF8(words, (Py_ssize_t)strlen(words), "replace");
    r = message == NULL ? NULL : PyObject_CallMethod(logger, "log", "isO", level, "%s", message);

    if (r == NULL)
        settle_exception();
    Py_XDECREF(r);
    Py_XDECREF(message);
}

static void drain(void)
{
    static PyObject *logger;
    struct message m;
    unsigned missed;

    if (logger == NULL)
        logger = make_logger();
    if (logger == NULL) {
        settle_exception(); /* the messages wait */
        return;
    }
    while (pop(&m, &missed)) {
        if (missed > 0) {
            char text[64];
            snprintf(text, sizeof(text), "%u messages were lost: the queue was full", missed);
            log_one(logger, 30, text);
        }
        log_one(logger, level_number(m.level), m.text);
    }
}

void native_drain_log(void)
{
    PyObject *type, *value, *trace;

    if (atomic_load_explicit(&count, memory_order_relaxed) == 0 || draining)
        return;
    draining = true;
    PyErr_Fetch(&type, &value, &trace);
    drain();
    PyErr_Restore(type, value, trace);
    draining = false;
}

int messages_begin(void)
{
    if (pthread_atfork(NULL, NULL, in_child) != 0) {
        PyErr_NoMemory();
        return -1;
    }
    side_log_callback(on_message, NULL, SIDE_LEVEL_INFO);
    return 0;
}

int native_enter(void)
{
    if (life_is_over()) {
        PyErr_SetString(PyExc_RuntimeError, "sidestream: the interpreter is exiting");
        return -1;
    }
    native_sweep();
    native_drain_log();
    return 0;
}

static _Thread_local int callbacks; /* that this thread is in */

void native_callback_begin(void)
{
    callbacks++;
}

void native_callback_end(void)
{
    callbacks--;
}

void native_sweep(void)
{
    if (callbacks == 0)
        life_sweep();
}

void native_sleep(double seconds)
{
    struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};

    nanosleep(&t, NULL);
}
