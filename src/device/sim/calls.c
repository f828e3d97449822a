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

/* The caller's clock goes to the node's end, and its effects are done. The node is kept alive by a reference of its own: the lock may be dropped. */
static side_status wait_for(dev_context *c, struct sim_node *node, uint64_t timeout_ns)
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
    return node == NULL ? SIDE_OK : wait_for(c, node, 0);
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
    return sim_leave(c, wait_for(c, event->record, timeout_ns));
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

static enum sim_engine engine_for(const dev_context *c, side_copy_kind kind)
{
    if (kind == SIDE_COPY_D2D)
        return SIM_COMPUTE;
    return kind == SIDE_COPY_D2H && c->config.copy_engines == 2 ? SIM_COPY_1 : SIM_COPY_0;
}

/* Which side lies where. *pageable is set where the host side is not pinned. */
static side_status check_piece(const dev_context *c, side_copy_kind kind, const side_piece *p, size_t index,
                               bool *pageable)
{
    static const char where[] = "sim.copy";

    if (p->bytes == 0)
        return SIDE_OK;
    if (kind != SIDE_COPY_D2H && !sim_is_device(c, p->dst, p->bytes))
        return error_set(SIDE_INVALID, where, "piece %zu: destination %p + %zu bytes is not device memory", index,
                         p->dst, p->bytes);
    if (kind != SIDE_COPY_H2D && !sim_is_device(c, p->src, p->bytes))
        return error_set(SIDE_INVALID, where, "piece %zu: source %p + %zu bytes is not device memory", index, p->src,
                         p->bytes);
    if (kind == SIDE_COPY_D2D)
        return SIDE_OK;
    const void *host = kind == SIDE_COPY_H2D ? p->src : p->dst;
    if (sim_memory_kind(c, host) == SIDE_MEMORY_DEVICE)
        return error_set(SIDE_INVALID, where, "piece %zu: host side %p is device memory", index, host);
    if (kind == SIDE_COPY_D2H && sim_is_read_only(c, host))
        return error_set(SIDE_INVALID, where, "piece %zu: destination %p was registered read-only", index, host);
    *pageable = !sim_is_pinned(c, host, p->bytes);
    return SIDE_OK;
}

static uint64_t copy_cost(const dev_context *c, side_copy_kind kind, size_t bytes, bool pageable)
{
    const struct sim_config *f = &c->config;

    if (kind == SIDE_COPY_D2D) /* read and written */
        return sim_add(sim_cost(bytes, f->memory_rate), sim_cost(bytes, f->memory_rate));
    uint64_t link = kind == SIDE_COPY_H2D ? f->h2d_rate : f->d2h_rate;
    return sim_cost(bytes, pageable && f->pageable_rate < link ? f->pageable_rate : link);
}

/* Queues; copies that touch pageable memory are over on return, as the driver stages them through its own buffer. */
static side_status submit_copy(dev_stream *stream, struct sim_node *node, bool pageable)
{
    dev_context *c = stream->context;

    if (!pageable) {
        sim_submit(stream, node, NULL);
        return SIDE_OK;
    }
    node->refs++;
    sim_submit(stream, node, NULL);
    side_status s = wait_for(c, node, UINT64_MAX);
    sim_unref(node);
    return s == SIDE_AGAIN ? SIDE_OK : s; /* hung: a driver would not return at all */
}

side_status sim_copy(dev_stream *stream, side_copy_kind kind, void *dst, const void *src, size_t bytes)
{
    dev_context *c = stream->context;
    side_piece piece = {dst, src, bytes};
    bool pageable = false;
    side_status s = sim_enter(c, "sim.copy");

    if (s != SIDE_OK)
        return s;
    s = check_piece(c, kind, &piece, 0, &pageable);
    if (s != SIDE_OK)
        return sim_leave(c, s);
    struct sim_node *node = sim_node_make(c, SIM_COPY, engine_for(c, kind));
    if (node == NULL)
        return sim_leave(c, SIDE_NO_MEMORY);
    node->move.dst = dst;
    node->move.src = src;
    node->move.bytes = bytes;
    node->cost_ns = sim_add(kind == SIDE_COPY_D2D ? c->config.launch_ns : c->config.copy_latency_ns,
                            copy_cost(c, kind, bytes, pageable));
    return sim_leave(c, submit_copy(stream, node, pageable));
}

static side_status price_pieces(const dev_context *c, side_copy_kind kind, const side_piece *pieces, size_t count,
                                uint64_t *cost, bool *pageable)
{
    size_t pinned_bytes = 0, pageable_bytes = 0;

    for (size_t i = 0; i < count; i++) {
        bool slow = false;
        side_status s = check_piece(c, kind, &pieces[i], i, &slow);
        if (s != SIDE_OK)
            return s;
        *(slow ? &pageable_bytes : &pinned_bytes) += pieces[i].bytes;
        *pageable = *pageable || slow;
    }
    *cost = kind == SIDE_COPY_D2D ? c->config.launch_ns : c->config.copy_latency_ns;
    if (count > 1)
        *cost = sim_add(*cost, (count - 1) * c->config.piece_ns);
    *cost = sim_add(*cost, copy_cost(c, kind, pinned_bytes, false));
    if (pageable_bytes > 0)
        *cost = sim_add(*cost, copy_cost(c, kind, pageable_bytes, true));
    return SIDE_OK;
}

side_status sim_copy_batch(dev_stream *stream, side_copy_kind kind, const side_piece *pieces, size_t count)
{
    dev_context *c = stream->context;
    uint64_t cost = 0;
    bool pageable = false;
    side_status s = sim_enter(c, "sim.copy_batch");

    if (s != SIDE_OK || count == 0)
        return s != SIDE_OK ? s : sim_leave(c, SIDE_OK);
    s = price_pieces(c, kind, pieces, count, &cost, &pageable);
    if (s != SIDE_OK)
        return sim_leave(c, s);
    struct sim_node *node = sim_node_make(c, SIM_PIECES, engine_for(c, kind));
    if (node == NULL)
        return sim_leave(c, SIDE_NO_MEMORY);
    node->cost_ns = cost;
    node->move.pieces = mem_zalloc(count, sizeof(*pieces));
    if (node->move.pieces == NULL) {
        sim_node_discard(node);
        return sim_leave(c, SIDE_NO_MEMORY);
    }
    memcpy(node->move.pieces, pieces, count * sizeof(*pieces));
    node->move.bytes = count;
    return sim_leave(c, submit_copy(stream, node, pageable));
}

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
