/* SPDX-License-Identifier: MIT
 *
 * What the tests of the pinned pool share. */
#ifndef POOL_HELP_H
#define POOL_HELP_H

#include "t.h"

#include "alloc.h"
#include "device.h"
#include "error.h"
#include "os.h"
#include "pool.h"
#include "pool_private.h"
#include "sim.h"

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

static inline side_device *open_device(const char *spec)
{
    side_device *device = NULL;
    T_OK(side_device_open(spec, &device));
    return device;
}

/* No huge pages, so that small pools cost only what they say. */
static inline side_pool *make_pool(side_device *device, size_t budget, size_t region)
{
    side_pool_options o = SIDE_POOL_OPTIONS_INIT;
    side_pool *pool = NULL;

    o.budget_bytes = budget;
    o.region_bytes = region;
    o.threads = 2;
    o.flags = SIDE_POOL_NO_HUGE_PAGES;
    T_OK(side_pool_create(device, &o, &pool));
    return pool;
}

static inline side_pool_stats stats_of(side_pool *pool)
{
    side_pool_stats s;
    T_OK(side_pool_get_stats(pool, &s));
    return s;
}

static inline void *take(side_pool *pool, size_t bytes)
{
    void *p = NULL;
    T_OK(side_pool_alloc(pool, bytes, &p));
    return p;
}

static inline void put(side_pool *pool, void *p)
{
    T_OK(side_pool_free(pool, p, NULL, 0));
}

static inline void put_after(side_pool *pool, void *p, side_stream *stream)
{
    T_OK(side_pool_free(pool, p, &stream, 1));
}

static inline void spin(side_stream *stream, uint64_t ns)
{
    side_op op = SIDE_OP_INIT;

    op.id = SIDE_OP_SPIN;
    op.dim[0] = ns;
    T_OK(side_op_async(stream, &op));
}

#define FOR_EVER_NS ((uint64_t)1000000 * 1000000000u)

/* Keeps the warnings. */
struct talk {
    unsigned warnings;
    char last[512];
};

static inline void talk_fn(void *user, side_level level, const char *component, const char *message)
{
    struct talk *talk = user;

    if (strcmp(component, "pool") != 0)
        return;
    talk->warnings += level == SIDE_LEVEL_WARN;
    snprintf(talk->last, sizeof(talk->last), "%s", message);
}

#endif
