/* SPDX-License-Identifier: MIT
 *
 * Calls that queue something, ask whether it is done, or wait for it. */
#include "calls.h"

#include "model.h"
#include "sim.h"

#include "alloc.h"
#include "error.h"
#include "ops.h"

#include <string.h>

/* ---------------------------------------------------------------- waiting */

side_status sim_wait_for(dev_context *c, struct sim_node *node, uint64_t timeout_ns)
{
    uint64_t *clock = sim_clock(c);

    if (node->hung && timeout_ns == UINT64_MAX)
        return SIDE_AGAIN; /* for ever */
    uint64_t limit = sim_add(*clock, timeout_ns);
    sim_time_place(c, node, limit);
    if (!node->placed || node->end_ns > limit) {
        *clock = timeout_ns == 0 ? sim_add(*clock, c->config.query_ns) : limit;
        return SIDE_AGAIN;
    }
    if (*clock < node->end_ns)
        *clock = node->end_ns;
    node->refs++;
    side_status s = sim_effects_until(c, node);
    sim_unref(node);
    return s;
}

/* As a wait of 0 ns. */
static side_status query(dev_context *c, struct sim_node *node)
{
    return node == NULL ? SIDE_OK : sim_wait_for(c, node, 0);
}

/* ---------------------------------------------------------------- streams */

side_status sim_stream_create(dev_context *c, dev_stream **stream)
{
    side_status s = sim_enter(c, "sim.stream_create");

    if (s != SIDE_OK)
        return s;
    dev_stream *made = mem_zalloc(1, sizeof(*made));
    if (made == NULL)
        return sim_leave(c, SIDE_NO_MEMORY);
    made->context = c;
    made->number = c->next_stream++;
    *stream = made;
    return sim_leave(c, SIDE_OK);
}

side_status sim_stream_wrap(dev_context *c, void *native, dev_stream **stream)
{
    if (native != NULL)
        return error_set(SIDE_INVALID, "sim.stream_wrap",
                         "the simulated device has no streams of the caller's; pass NULL for a new one");
    return sim_stream_create(c, stream);
}

void sim_stream_destroy(dev_stream *stream)
{
    if (stream == NULL)
        return;
    dev_context *c = stream->context;
    pthread_mutex_lock(&c->mutex);
    sim_unref(stream->tail);
    mem_free(stream);
    pthread_mutex_unlock(&c->mutex);
}

void *sim_stream_native(dev_stream *stream)
{
    (void)stream;
    return NULL;
}

side_status sim_stream_wait(dev_stream *stream, dev_event *event)
{
    dev_context *c = stream->context;
    side_status s = sim_enter(c, "sim.stream_wait");

    if (s != SIDE_OK)
        return s;
    struct sim_node *awaited = event->record;
    if (awaited == NULL)
        return sim_leave(c, SIDE_OK);
    struct sim_node *node = sim_node_make(c, SIM_WAIT, SIM_NO_ENGINE);
    if (node == NULL)
        return sim_leave(c, SIDE_NO_MEMORY);
    sim_submit(stream, node, awaited);
    return sim_leave(c, SIDE_OK);
}

side_status sim_stream_query(dev_stream *stream)
{
    dev_context *c = stream->context;
    side_status s = sim_enter(c, "sim.stream_query");

    return s != SIDE_OK ? s : sim_leave(c, query(c, stream->tail));
}

side_status sim_stream_is_capturing(dev_stream *stream, bool *capturing)
{
    dev_context *c = stream->context;
    side_status s = sim_enter(c, "sim.stream_is_capturing");

    if (s != SIDE_OK)
        return s;
    *capturing = stream->capturing;
    return sim_leave(c, SIDE_OK);
}

void sim_capture(dev_stream *stream, bool capturing)
{
    dev_context *c = stream->context;

    pthread_mutex_lock(&c->mutex);
    stream->capturing = capturing;
    pthread_mutex_unlock(&c->mutex);
}

/* ---------------------------------------------------------------- events */

side_status sim_event_create(dev_context *c, bool timing, dev_event **event)
{
    side_status s = sim_enter(c, "sim.event_create");

    if (s != SIDE_OK)
        return s;
    dev_event *made = mem_zalloc(1, sizeof(*made));
    if (made == NULL)
        return sim_leave(c, SIDE_NO_MEMORY);
    made->context = c;
    made->timing = timing;
    *event = made;
    return sim_leave(c, SIDE_OK);
}

void sim_event_destroy(dev_event *event)
{
    if (event == NULL)
        return;
    dev_context *c = event->context;
    pthread_mutex_lock(&c->mutex);
    sim_unref(event->record);
    mem_free(event);
    pthread_mutex_unlock(&c->mutex);
}

side_status sim_event_record(dev_event *event, dev_stream *stream)
{
    dev_context *c = stream->context;
    side_status s = sim_enter(c, "sim.event_record");

    if (s != SIDE_OK)
        return s;
    struct sim_node *node = sim_node_make(c, SIM_RECORD, SIM_NO_ENGINE);
    if (node == NULL)
        return sim_leave(c, SIDE_NO_MEMORY);
    node->refs++;
    sim_submit(stream, node, NULL);
    sim_unref(event->record);
    event->record = node;
    return sim_leave(c, SIDE_OK);
}

side_status sim_event_query(dev_event *event)
{
    dev_context *c = event->context;
    side_status s = sim_enter(c, "sim.event_query");

    return s != SIDE_OK ? s : sim_leave(c, query(c, event->record));
}

side_status sim_event_wait(dev_event *event, uint64_t timeout_ns)
{
    dev_context *c = event->context;
    side_status s = sim_enter(c, "sim.event_wait");

    if (s != SIDE_OK || event->record == NULL)
        return s != SIDE_OK ? s : sim_leave(c, SIDE_OK);
    return sim_leave(c, sim_wait_for(c, event->record, timeout_ns));
}

side_status sim_event_elapsed(dev_event *begin, dev_event *end, double *ns)
{
    static const char where[] = "sim.event_elapsed";
    dev_context *c = begin->context;
    side_status s = sim_enter(c, where);

    if (s != SIDE_OK)
        return s;
    if (!begin->timing || !end->timing)
        return sim_leave(c, error_set(SIDE_STATE, where, "made without timing"));
    if (begin->record == NULL || end->record == NULL)
        return sim_leave(c, error_set(SIDE_STATE, where, "never recorded"));
    if (!sim_time_reached(c, begin->record) || !sim_time_reached(c, end->record))
        return sim_leave(c, error_set(SIDE_STATE, where, "not done yet"));
    *ns = (double)(int64_t)(end->record->end_ns - begin->record->end_ns);
    return sim_leave(c, SIDE_OK);
}

/* ---------------------------------------------------------------- operations */

side_status sim_set(dev_stream *stream, void *dst, int value, size_t bytes)
{
    dev_context *c = stream->context;
    side_status s = sim_enter(c, "sim.set");

    if (s != SIDE_OK)
        return s;
    if (bytes > 0 && !sim_is_device(c, dst, bytes))
        return sim_leave(c, error_set(SIDE_INVALID, "sim.set", "%p + %zu bytes is not device memory", dst, bytes));
    struct sim_node *node = sim_node_make(c, SIM_SET, SIM_COMPUTE);
    if (node == NULL)
        return sim_leave(c, SIDE_NO_MEMORY);
    node->move.dst = dst;
    node->move.value = value;
    node->move.bytes = bytes;
    node->cost_ns = sim_add(c->config.launch_ns, sim_cost(bytes, c->config.memory_rate));
    sim_submit(stream, node, NULL);
    return sim_leave(c, SIDE_OK);
}

static uint64_t op_cost(const dev_context *c, const side_op *op, size_t bytes)
{
    uint64_t work;

    if (op->sim_ns != 0)
        return op->sim_ns;
    if (op->id == SIDE_OP_SPIN)
        return op->dim[0];
    if (op->id == SIDE_OP_MATMUL)
        work = sim_matmul_cost(op->dim, c->config.flops[op->math]);
    else
        work = sim_cost(bytes, c->config.memory_rate);
    return sim_add(c->config.launch_ns, work);
}

static side_status check_op(const dev_context *c, const side_op *op, size_t *bytes)
{
    static const char where[] = "sim.op";
    size_t in[2] = {0, 0}, out = 0;
    side_status s = ops_check(op, 16);

    if (s == SIDE_OK)
        s = ops_bytes(op, in, &out);
    if (s != SIDE_OK)
        return s;
    for (int i = 0; i < 2; i++)
        if (in[i] > 0 && !sim_is_device(c, op->in[i], in[i]))
            return error_set(SIDE_INVALID, where, "%s: in[%d] %p + %zu bytes is not device memory",
                             side_op_name(op->id), i, op->in[i], in[i]);
    if (out > 0 && !sim_is_device(c, op->out, out))
        return error_set(SIDE_INVALID, where, "%s: out %p + %zu bytes is not device memory", side_op_name(op->id),
                         op->out, out);
    *bytes = in[0] + in[1] + out;
    return SIDE_OK;
}

side_status sim_op(dev_stream *stream, const side_op *op)
{
    dev_context *c = stream->context;
    size_t bytes = 0;
    side_status s = sim_enter(c, "sim.op");

    if (s != SIDE_OK)
        return s;
    if (!c->config.kernels)
        return sim_leave(c, error_set(SIDE_UNSUPPORTED, "sim.op", "%s: kernels are switched off by kernels=0",
                                      side_op_name(op->id)));
    s = check_op(c, op, &bytes);
    if (s != SIDE_OK)
        return sim_leave(c, s);
    struct sim_node *node = sim_node_make(c, SIM_OP, SIM_COMPUTE);
    if (node == NULL)
        return sim_leave(c, SIDE_NO_MEMORY);
    node->op = *op;
    node->cost_ns = op_cost(c, op, bytes);
    sim_submit(stream, node, NULL);
    return sim_leave(c, SIDE_OK);
}

side_status sim_host_fn(dev_stream *stream, side_host_fn *fn, void *user, uint64_t sim_ns)
{
    dev_context *c = stream->context;
    side_status s = sim_enter(c, "sim.host_fn");

    if (s != SIDE_OK)
        return s;
    struct sim_node *node = sim_node_make(c, SIM_HOST_FN, SIM_NO_ENGINE);
    if (node == NULL)
        return sim_leave(c, SIDE_NO_MEMORY);
    node->call.fn = fn;
    node->call.user = user;
    node->cost_ns = sim_ns;
    sim_submit(stream, node, NULL);
    return sim_leave(c, SIDE_OK);
}
