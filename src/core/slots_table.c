/* SPDX-License-Identifier: MIT
 *
 * Where slots stand: in a list, and under a key. */
#include "slots_private.h"

void chain_append(side_slots *t, struct chain *c, uint32_t i)
{
    t->slots[i].prev = c->tail;
    t->slots[i].next = NO_SLOT;
    if (c->tail != NO_SLOT)
        t->slots[c->tail].next = i;
    else
        c->head = i;
    c->tail = i;
}

void chain_remove(side_slots *t, struct chain *c, uint32_t i)
{
    struct slot *s = &t->slots[i];
    if (s->prev != NO_SLOT)
        t->slots[s->prev].next = s->next;
    else
        c->head = s->next;
    if (s->next != NO_SLOT)
        t->slots[s->next].prev = s->prev;
    else
        c->tail = s->prev;
}

static uint32_t bucket_of(const side_slots *t, uint64_t key)
{
    return (uint32_t)((key * 0x9E3779B97F4A7C15u) >> 32) & (t->bucket_count - 1);
}

uint32_t table_find(const side_slots *t, uint64_t key)
{
    for (uint32_t b = bucket_of(t, key); t->buckets[b] != NO_SLOT; b = (b + 1) & (t->bucket_count - 1))
        if (t->slots[t->buckets[b]].key == key)
            return t->buckets[b];
    return NO_SLOT;
}

void table_insert(side_slots *t, uint64_t key, uint32_t i)
{
    uint32_t b = bucket_of(t, key);
    while (t->buckets[b] != NO_SLOT)
        b = (b + 1) & (t->bucket_count - 1);
    t->buckets[b] = i;
}

/* Backward-shift deletion: no tombstones, so look-ups stay short for ever. */
void table_erase(side_slots *t, uint64_t key)
{
    uint32_t mask = t->bucket_count - 1, hole = bucket_of(t, key);

    while (t->slots[t->buckets[hole]].key != key)
        hole = (hole + 1) & mask;
    for (uint32_t b = (hole + 1) & mask; t->buckets[b] != NO_SLOT; b = (b + 1) & mask) {
        uint32_t home = bucket_of(t, t->slots[t->buckets[b]].key);
        if (((b - home) & mask) >= ((b - hole) & mask)) {
            t->buckets[hole] = t->buckets[b];
            hole = b;
        }
    }
    t->buckets[hole] = NO_SLOT;
}
