/* SPDX-License-Identifier: MIT
 *
 * Nodes: their edges, their lifetime. */
#include "model.h"

#include "alloc.h"

#include <assert.h>
#include <string.h>

bool sim_nodes_reserve(struct sim_nodes *nodes, size_t capacity)
{
    if (capacity <= nodes->capacity)
        return true;
    size_t n = nodes->capacity * 2 > capacity ? nodes->capacity * 2 : capacity + 16;
    struct sim_node **at = mem_zalloc(n, sizeof(struct sim_node *));
    if (at == NULL)
        return false;
    if (nodes->count > 0)
        memcpy(at, nodes->at, nodes->count * sizeof(struct sim_node *));
    mem_free(nodes->at);
    nodes->at = at;
    nodes->capacity = n;
    return true;
}

struct sim_node *sim_node_make(dev_context *c, enum sim_kind kind, enum sim_engine engine)
{
    if (!sim_nodes_reserve(&c->heap[engine], c->unplaced[engine] + 1) || !sim_nodes_reserve(&c->ready, c->unrun + 1))
        return NULL;
    struct sim_node *node = mem_zalloc(1, sizeof(*node));
    if (node == NULL)
        return NULL;
    node->kind = (uint8_t)kind;
    node->engine = (uint8_t)engine;
    node->refs = 1;
    return node;
}

void sim_node_discard(struct sim_node *node)
{
    if (node->kind == SIM_PIECES)
        mem_free(node->move.pieces);
    mem_free(node);
}

void sim_unref(struct sim_node *node)
{
    if (node != NULL && --node->refs == 0)
        sim_node_discard(node);
}

void sim_node_through(dev_context *c, struct sim_node *node)
{
    if (!node->ran || !node->placed)
        return;
    node->out = NULL;
    c->nodes--;
    sim_unref(node);
}

static void link_after(struct sim_node *node, struct sim_node *before, struct sim_edge *edge)
{
    if (before == NULL)
        return;
    node->hung = node->hung || before->hung;
    if (!before->placed)
        node->time_waits++;
    else if (before->end_ns > node->ready_ns)
        node->ready_ns = before->end_ns;
    if (!before->ran)
        node->run_waits++;
    if (!before->placed || !before->ran) {
        edge->to = node;
        edge->next = before->out;
        before->out = edge;
    }
}

void sim_submit(dev_stream *stream, struct sim_node *node, struct sim_node *awaited)
{
    dev_context *c = stream->context;

    node->seq = c->next_seq++;
    node->stream = stream->number;
    node->ready_ns = *sim_clock(c);
    if (node->kind != SIM_WAIT && node->kind != SIM_RECORD)
        node->hung = ++c->queued == c->config.hang;
    bool hangs = node->hung;
    link_after(node, stream->tail, &node->in[0]);
    link_after(node, awaited, &node->in[1]);

    node->prev = c->unrun_last;
    if (c->unrun_last != NULL)
        c->unrun_last->next = node;
    else
        c->unrun_first = node;
    c->unrun_last = node;
    c->unrun++;
    c->nodes++;
    c->unplaced[node->engine]++;

    sim_unref(stream->tail);
    stream->tail = node;
    node->refs++;
    if (!hangs && node->time_waits == 0)
        sim_time_push(c, node);
    if (!hangs && node->run_waits == 0)
        sim_effects_push(c, node);
    sim_effects_some(c);
}
