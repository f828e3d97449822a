/* SPDX-License-Identifier: MIT */
#include "alloc.h"

#include "error.h"

#include <stdint.h>
#include <stdlib.h>

#ifdef SIDE_TESTING
#include <stdatomic.h>

static atomic_ulong calls, fail_at;
static atomic_long live;

unsigned long mem_fail_at(unsigned long nth)
{
    unsigned long n = atomic_exchange(&calls, 0);
    atomic_store(&fail_at, nth);
    return n;
}

long mem_live(void)
{
    return atomic_load(&live);
}

static int scripted_failure(void)
{
    unsigned long n = atomic_fetch_add(&calls, 1) + 1;
    return n == atomic_load(&fail_at);
}
#else
static int scripted_failure(void)
{
    return 0;
}
#endif

void *mem_zalloc(size_t count, size_t bytes)
{
    void *p = NULL;

    if (!scripted_failure())
        p = calloc(count != 0 ? count : 1, bytes != 0 ? bytes : 1);
    if (p == NULL)
        error_set(SIDE_NO_MEMORY, "calloc", "out of host memory for %zu x %zu bytes", count, bytes);
#ifdef SIDE_TESTING
    else
        atomic_fetch_add(&live, 1);
#endif
    return p;
}

void mem_free(void *p)
{
#ifdef SIDE_TESTING
    if (p != NULL)
        atomic_fetch_sub(&live, 1);
#endif
    free(p);
}
