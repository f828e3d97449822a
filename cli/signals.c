/* SPDX-License-Identifier: MIT */
#include "signals.h"
#include "exit.h"

#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

enum { PLACES = 4 };

/* Draining may take as long as what is queued. \r and erase: over ^C and a progress bar. */
#define STOPPING "\r\033[Ksidestream: finishing what is in flight; Ctrl-C again leaves at once\n"

/* All that the handler touches is atomic: it may run on a thread of the driver's. */
static atomic_int came, handling;
static bool watching; /* somebody is: set before the handler is there */
static _Atomic(side_pipeline *) watched;
static _Atomic(side_cast *) watched_cast;
static struct {
    atomic_bool used;
    char path[PATH_MAX]; /* constant while used */
} doomed[PLACES];

static void handle(int number)
{
    int keep = errno;
    side_pipeline *pipeline;
    side_cast *cast;

    (void)number;
    atomic_fetch_add(&handling, 1);
    if (atomic_fetch_add(&came, 1) > 0) {
        for (size_t i = 0; i < PLACES; i++)
            if (atomic_load(&doomed[i].used))
                unlink(doomed[i].path);
        _exit(EXIT_INTERRUPTED);
    }
    if (watching && write(STDERR_FILENO, STOPPING, sizeof(STOPPING) - 1) < 0) {
        /* nobody to tell */
    }
    pipeline = atomic_load(&watched);
    if (pipeline != NULL)
        side_pipeline_cancel(pipeline);
    cast = atomic_load(&watched_cast);
    if (cast != NULL)
        side_cast_cancel(cast);
    atomic_fetch_sub(&handling, 1);
    errno = keep;
}

void signals_install(void)
{
    struct sigaction action;

    watching = isatty(STDERR_FILENO);
    memset(&action, 0, sizeof(action));
    sigemptyset(&action.sa_mask);
    action.sa_handler = handle;
    action.sa_flags = SA_RESTART | SA_NODEFER; /* a second signal must get through while the first is handled */
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    action.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &action, NULL); /* a write error, so that unfinished files are taken away */
    sigaction(SIGXFSZ, &action, NULL); /* likewise */
}

bool signals_interrupted(void)
{
    return atomic_load(&came) > 0;
}

void signals_watch(side_pipeline *pipeline)
{
    atomic_store(&watched, pipeline);
    if (pipeline != NULL && signals_interrupted())
        side_pipeline_cancel(pipeline);
    while (pipeline == NULL && atomic_load(&handling) > 0)
        sched_yield();
}

void signals_watch_cast(side_cast *cast)
{
    atomic_store(&watched_cast, cast);
    if (cast != NULL && signals_interrupted())
        side_cast_cancel(cast);
    while (cast == NULL && atomic_load(&handling) > 0)
        sched_yield();
}

int signals_unlink_add(const char *path)
{
    size_t bytes = strlen(path) + 1;

    if (bytes > sizeof(doomed[0].path))
        return -1;
    for (int i = 0; i < PLACES; i++) {
        if (atomic_load(&doomed[i].used))
            continue;
        memcpy(doomed[i].path, path, bytes);
        atomic_store(&doomed[i].used, true);
        return i;
    }
    return -1;
}

void signals_unlink_drop(int place)
{
    if (place >= 0)
        atomic_store(&doomed[place].used, false);
}
