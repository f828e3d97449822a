/* SPDX-License-Identifier: MIT
 *
 * Effects: operations run in a random order that the declared dependencies allow, so that a program that relies on more than it declared computes
 * something wrong for some seed. `ready` holds the operations whose predecessors have run, at most one a stream; any may be next.
 */
#include "model.h"

#include "alloc.h"
#include "error.h"
#include "ops.h"

#include <assert.h>
#include <string.h>

/* Effects lag behind submission without bound where nobody waits; beyond this many nodes, submitting catches up. */
enum { MOST_LAG = 1024 };

static uint64_t random_64(dev_context *c) /* splitmix64 */
{
    uint64_t z = c->rng += 0x9e3779b97f4a7c15u;

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

uint64_t sim_random(dev_context *c, uint64_t bound)
{
    return (uint64_t)(((unsigned __int128)random_64(c) * bound) >> 64);
}

void sim_effects_open(dev_context *c)
{
    static const uint32_t favours[] = {0, 0, 4, 7};

    c->rng = c->config.seed;
    c->pattern = (uint8_t)(0xc1 + sim_random(c, 24)); /* 0xc1..0xd8 */
    c->eager = (uint32_t)sim_random(c, 4);
    c->favour = favours[sim_random(c, 4)];
}

static void run_pieces(dev_context *c, struct sim_node *node)
{
    side_piece *p = node->move.pieces;

    for (size_t n = node->move.bytes; n > 0; n--) {
        size_t i = sim_random(c, n);
        side_piece chosen = p[i];
        p[i] = p[n - 1];
        if (chosen.bytes > 0)
            memmove(chosen.dst, chosen.src, chosen.bytes);
    }
}

static void run_op(const side_op *op)
{
    if (ops_run_host(op) != SIDE_OK)
        log_message(SIDE_LEVEL_WARN, "sim", "operation '%s' failed: %s", side_op_name(op->id),
                    side_last_error()->message);
}

/* The node and what it makes ready. Waits and records run the moment they can: they have no effect that an order could show. */
static void finish(dev_context *c, struct sim_node *node)
{
    node->settle = NULL;
    for (struct sim_node *stack = node; stack != NULL;) {
        node = stack;
        stack = node->settle;
        node->ran = true;
        *(node->prev != NULL ? &node->prev->next : &c->unrun_first) = node->next;
        *(node->next != NULL ? &node->next->prev : &c->unrun_last) = node->prev;
        c->unrun--;
        for (struct sim_edge *e = node->out; e != NULL; e = e->next) {
            struct sim_node *to = e->to;
            if (--to->run_waits > 0 || to->hung)
                continue;
            if (to->kind == SIM_WAIT || to->kind == SIM_RECORD) {
                to->settle = stack;
                stack = to;
            } else {
                c->ready.at[c->ready.count++] = to;
            }
        }
        sim_node_through(c, node);
    }
    assert(c->ready.count <= c->ready.capacity);
    sim_graveyard_sweep(c);
}

void sim_effects_push(dev_context *c, struct sim_node *node)
{
    if (node->kind == SIM_WAIT || node->kind == SIM_RECORD)
        finish(c, node);
    else
        c->ready.at[c->ready.count++] = node;
}

static void run(dev_context *c, struct sim_node *node)
{
    enum sim_kind kind = (enum sim_kind)node->kind;

    switch (kind) {
    case SIM_COPY:
        if (node->move.bytes > 0)
            memmove(node->move.dst, node->move.src, node->move.bytes);
        break;
    case SIM_PIECES: run_pieces(c, node); break;
    case SIM_SET:
        if (node->move.bytes > 0)
            memset(node->move.dst, node->move.value, node->move.bytes);
        break;
    case SIM_OP: run_op(&node->op); break;
    case SIM_HOST_FN:
        c->running++;
        pthread_mutex_unlock(&c->mutex);
        node->call.fn(node->call.user);
        pthread_mutex_lock(&c->mutex);
        c->running--;
        break;
    case SIM_WAIT:
    case SIM_RECORD: break;
    }
    finish(c, node); /* may free it */
    if (kind == SIM_HOST_FN)
        pthread_cond_broadcast(&c->ran);
}

/* False where the choice fell on a host function and those may not run here. */
static bool run_any(dev_context *c, bool host_fns)
{
    size_t i = c->ready.count - 1; /* a stream that just ran puts its next operation last */

    if (c->ready.at[i]->stream != c->favourite || sim_random(c, 8) >= c->favour)
        i = sim_random(c, c->ready.count);
    struct sim_node *node = c->ready.at[i];
    if (node->kind == SIM_HOST_FN && !host_fns)
        return false;
    c->ready.at[i] = c->ready.at[--c->ready.count];
    c->favourite = node->stream;
    run(c, node);
    return true;
}

void sim_effects_some(dev_context *c)
{
    uint64_t n = c->eager == 3 ? UINT64_MAX : c->eager == 0 ? 0 : sim_random(c, c->eager + 1);

    if (c->unrun > MOST_LAG && n < 4)
        n = 4;
    while (n-- > 0 && c->ready.count > 0 && !c->lost)
        if (!run_any(c, false))
            break;
}

side_status sim_effects_until(dev_context *c, const struct sim_node *node)
{
    while (!node->ran) {
        if (c->lost)
            return error_set(SIDE_DEVICE_LOST, "sim.event_wait",
                             "the simulated device is lost (scripted); its queued work never runs");
        if (c->ready.count > 0)
            run_any(c, true);
        else if (c->running > 0)
            pthread_cond_wait(&c->ran, &c->mutex);
        else
            return SIDE_AGAIN;
    }
    return SIDE_OK;
}
