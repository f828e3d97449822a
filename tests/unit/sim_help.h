/* SPDX-License-Identifier: MIT
 *
 * Short forms for tests that drive the software device through its op table. */
#ifndef SIM_HELP_H
#define SIM_HELP_H

#include "t.h"

#include "alloc.h"
#include "sim.h"

#define D sim_device_ops

static inline dev_context *open_sim(const char *args)
{
    dev_context *c = NULL;

    T_OK(D.open(args, &c));
    return c;
}

static inline void close_sim(dev_context *c)
{
    D.close(c);
}

static inline dev_context *open_seed(const char *args, uint64_t seed)
{
    char text[200];

    snprintf(text, sizeof(text), "%s%sseed=%llu", args, args[0] != '\0' ? "," : "", (unsigned long long)seed);
    return open_sim(text);
}

static inline dev_stream *make_stream(dev_context *c)
{
    dev_stream *s = NULL;

    T_OK(D.stream_create(c, &s));
    return s;
}

static inline dev_event *make_event(dev_context *c)
{
    dev_event *e = NULL;

    T_OK(D.event_create(c, true, &e));
    return e;
}

static inline void *host_memory(dev_context *c, size_t bytes)
{
    void *p = NULL;

    T_OK(D.host_alloc(c, bytes, &p));
    return p;
}

static inline void *device_memory(dev_context *c, size_t bytes)
{
    void *p = NULL;

    T_OK(D.alloc(c, bytes, &p));
    return p;
}

static inline side_op spin(uint64_t ns)
{
    side_op op = SIDE_OP_INIT;

    op.id = SIDE_OP_SPIN;
    op.dim[0] = ns;
    return op;
}

static inline void sync_stream(dev_context *c, dev_stream *s)
{
    dev_event *e = make_event(c);

    T_OK(D.event_record(e, s));
    T_OK(D.event_wait(e, UINT64_MAX));
    D.event_destroy(e);
}

#endif
