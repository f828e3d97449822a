/* SPDX-License-Identifier: MIT
 *
 * Virtual time: list scheduling in order of start. A node whose predecessors are placed knows its ready time and lies in its engine's heap; the
 * engine's next start is max(free, ready of the heap's first). The earliest start of all engines is placed next, which is final: what it makes ready
 * begins later, and what is submitted later is ready no earlier than the clock of the thread that asked. Nodes without an engine (waits,
 * records, host functions) start when ready; they go first among equals, since they take no time and may make an older operation ready.
 */
#include "model.h"

#include "alloc.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>

uint64_t sim_add(uint64_t a, uint64_t b)
{
    return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

static uint64_t divide_up(unsigned __int128 a, uint64_t b)
{
    unsigned __int128 q = a / b + (a % b != 0);

    return q > UINT64_MAX ? UINT64_MAX : (uint64_t)q;
}

uint64_t sim_cost(uint64_t amount, uint64_t rate)
{
    return divide_up((unsigned __int128)amount * 1000, rate);
}

uint64_t sim_matmul_cost(const uint64_t dim[3], uint64_t rate)
{
    /* m * n fits in 64 bits, or the output would not fit in memory */
    return divide_up((unsigned __int128)(dim[0] * dim[1]) * dim[2] * 2, rate);
}

/* ---------------------------------------------------------------- clocks */

static uint64_t thread_number(void)
{
    static atomic_uint_fast64_t next = 1;
    static _Thread_local uint64_t number;

    if (number == 0)
        number = atomic_fetch_add(&next, 1);
    return number;
}

uint64_t *sim_clock(dev_context *c)
{
    static _Thread_local struct {
        uint64_t context;
        size_t index;
    } last;
    uint64_t self = thread_number();

    if (last.context == c->id)
        return &c->clocks[last.index].ns;
    size_t i = 0;
    while (i < c->clock_count && c->clocks[i].thread != self)
        i++;
    if (i == c->clock_capacity) {
        size_t n = c->clock_capacity != 0 ? c->clock_capacity * 2 : 16;
        struct sim_clock *clocks = mem_zalloc(n, sizeof(*clocks));
        if (clocks == NULL)
            return &c->spare_clock.ns;
        if (i > 0)
            memcpy(clocks, c->clocks, i * sizeof(*clocks));
        mem_free(c->clocks);
        c->clocks = clocks;
        c->clock_capacity = n;
    }
    if (i == c->clock_count) {
        c->clocks[i] = (struct sim_clock){self, 0};
        c->clock_count++;
    }
    last.context = c->id;
    last.index = i;
    return &c->clocks[i].ns;
}

/* ---------------------------------------------------------------- placing */

static bool before(const struct sim_node *a, const struct sim_node *b)
{
    return a->ready_ns != b->ready_ns ? a->ready_ns < b->ready_ns : a->seq < b->seq;
}

static void heap_push(struct sim_nodes *heap, struct sim_node *node)
{
    assert(heap->count < heap->capacity);
    size_t i = heap->count++;
    while (i > 0 && before(node, heap->at[(i - 1) / 2])) {
        heap->at[i] = heap->at[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    heap->at[i] = node;
}

static struct sim_node *heap_pop(struct sim_nodes *heap)
{
    struct sim_node *first = heap->at[0];
    struct sim_node *moved = heap->at[--heap->count];
    size_t i = 0;

    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= heap->count)
            break;
        if (child + 1 < heap->count && before(heap->at[child + 1], heap->at[child]))
            child++;
        if (!before(heap->at[child], moved))
            break;
        heap->at[i] = heap->at[child];
        i = child;
    }
    heap->at[i] = moved;
    return first;
}

void sim_time_push(dev_context *c, struct sim_node *node)
{
    heap_push(&c->heap[node->engine], node);
}

/* The engine whose next start is the earliest; SIM_ENGINES where nothing is ready. */
static int next_engine(const dev_context *c, uint64_t *start)
{
    int best = SIM_ENGINES;

    for (int e = SIM_ENGINES - 1; e >= 0; e--) { /* SIM_NO_ENGINE first */
        if (c->heap[e].count == 0)
            continue;
        uint64_t ready = c->heap[e].at[0]->ready_ns;
        uint64_t s = e != SIM_NO_ENGINE && c->free_ns[e] > ready ? c->free_ns[e] : ready;
        if (best == SIM_ENGINES || s < *start) {
            best = e;
            *start = s;
        }
    }
    return best;
}

static void place(dev_context *c, int engine, uint64_t start)
{
    struct sim_node *node = heap_pop(&c->heap[engine]);

    assert(!node->hung && !node->placed);
    c->unplaced[engine]--;
    node->end_ns = sim_add(start, node->cost_ns);
    node->placed = true;
    if (engine != SIM_NO_ENGINE)
        c->free_ns[engine] = node->end_ns;
    for (struct sim_edge *e = node->out; e != NULL; e = e->next) {
        struct sim_node *to = e->to;
        if (to->ready_ns < node->end_ns)
            to->ready_ns = node->end_ns;
        if (--to->time_waits == 0 && !(to->hung))
            sim_time_push(c, to);
    }
    sim_node_through(c, node);
}

void sim_time_place(dev_context *c, const struct sim_node *target, uint64_t limit)
{
    uint64_t start = 0;

    while (target == NULL || !target->placed) {
        int engine = next_engine(c, &start);
        if (engine == SIM_ENGINES || start > limit)
            return;
        place(c, engine, start);
    }
}

bool sim_time_reached(dev_context *c, const struct sim_node *node)
{
    uint64_t now = *sim_clock(c);

    sim_time_place(c, node, now);
    return node->placed && node->end_ns <= now;
}
