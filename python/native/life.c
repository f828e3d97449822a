/* SPDX-License-Identifier: MIT */
#include "life.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

static _Atomic(struct grave *) graves; /* a stack that is only pushed to and emptied as a whole: no ABA */
static atomic_uint forks;
static atomic_ulong forks_made;
static atomic_bool over;

void life_bury(struct grave *grave)
{
    struct grave *top = atomic_load_explicit(&graves, memory_order_relaxed);

    do
        grave->next = top;
    while (!atomic_compare_exchange_weak_explicit(&graves, &top, grave, memory_order_release, memory_order_relaxed));
}

struct grave *life_exhume(void)
{
    if (atomic_load_explicit(&graves, memory_order_relaxed) == NULL)
        return NULL;
    return atomic_exchange_explicit(&graves, NULL, memory_order_acquire);
}

unsigned life_forks(void)
{
    return atomic_load_explicit(&forks, memory_order_relaxed);
}

unsigned long life_forks_made(void)
{
    return atomic_load_explicit(&forks_made, memory_order_relaxed);
}

bool life_is_over(void)
{
    return atomic_load_explicit(&over, memory_order_acquire);
}

bool life_goes_on(unsigned of)
{
    return life_forks() == of && !life_is_over();
}

void life_end(void)
{
    atomic_store_explicit(&over, true, memory_order_release);
}

/* ---------------------------------------------------------------- forks */

static void in_parent(void)
{
    atomic_fetch_add_explicit(&forks_made, 1, memory_order_relaxed);
}

/* What lay in the graveyard at the fork is the parent's, and stays so. */
static void in_child(void)
{
    atomic_store_explicit(&graves, NULL, memory_order_relaxed);
    atomic_fetch_add_explicit(&forks, 1, memory_order_relaxed);
    in_parent();
}

static int watching;

static void watch(void)
{
    watching = pthread_atfork(NULL, in_parent, in_child);
}

int life_watch_forks(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, watch);
    return watching;
}
