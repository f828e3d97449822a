/* SPDX-License-Identifier: MIT
 *
 * Making slots, and unmaking them once nothing that was queued on them runs any more. */
#include "slots_private.h"

#include "alloc.h"
#include "error.h"
#include "os.h"
#include "pool.h"

#include <string.h>

#define DEFAULT_TIMEOUT_S 30.0

/* ---------------------------------------------------------------- create */

static side_status options_check(const side_slots_options *o)
{
    const char *where = "side_slots_create";
    if ((unsigned)o->policy > SIDE_TABLE)
        return error_set(SIDE_INVALID, where, "unknown policy %d", (int)o->policy);
    if (o->count == 0 || o->count > 65535)
        return error_set(SIDE_INVALID, where, "count is %u; it takes 1 to 65535 slots", o->count);
    if (o->slot_bytes == 0 || o->slot_bytes > SIZE_MAX / 2 / o->count)
        return error_set(SIDE_INVALID, where, "slot_bytes is %zu", o->slot_bytes);
    if ((unsigned)o->where > SIDE_MEMORY_DEVICE)
        return error_set(SIDE_INVALID, where, "unknown memory kind %d", (int)o->where);
    if (o->readers > SIDE_MAX_READERS)
        return error_set(SIDE_INVALID, where, "readers is %u; at most %d", o->readers, SIDE_MAX_READERS);
    if (!(o->timeout_s >= 0 && o->timeout_s <= 1e6))
        return error_set(SIDE_INVALID, where, "timeout_s is %g; it takes 0 (30 s) to 1e6", o->timeout_s);
    for (uint32_t i = 0; o->memory != NULL && i < o->count; i++)
        if (o->memory[i] == NULL)
            return error_set(SIDE_INVALID, where, "memory[%u] is NULL", i);
    return SIDE_OK;
}

size_t slots_stride(size_t slot_bytes)
{
    size_t align = slot_bytes >= 4096 ? 4096 : 256;
    return (slot_bytes + align - 1) / align * align;
}

static side_status slab_take(side_slots *t, const side_slots_options *o)
{
    size_t bytes = slots_stride(t->slot_bytes) * t->count;
    side_status s = SIDE_OK;

    if (o->memory != NULL)
        return SIDE_OK;
    if (o->pool != NULL && pool_device(o->pool) != t->device)
        return error_set(SIDE_INVALID, "side_slots_create", "the pool is of another device");
    if (t->where == SIDE_MEMORY_DEVICE)
        return side_device_alloc(t->device, bytes, &t->slab);
    if (t->where == SIDE_MEMORY_PAGEABLE) {
        t->slab = mem_zalloc(1, bytes);
        return t->slab != NULL ? SIDE_OK : SIDE_NO_MEMORY;
    }
    t->pool = o->pool;
    if (t->pool == NULL)
        s = side_device_pool(t->device, &t->pool);
    return s == SIDE_OK ? side_pool_alloc(t->pool, bytes, &t->slab) : s;
}

static void slab_give(side_slots *t)
{
    if (t->slab == NULL)
        return;
    if (t->where == SIDE_MEMORY_DEVICE)
        side_device_free(t->device, t->slab);
    else if (t->where == SIDE_MEMORY_PINNED)
        side_pool_free(t->pool, t->slab, NULL, 0);
    else
        mem_free(t->slab);
}

static side_status table_create(side_slots *t)
{
    uint32_t n = 4;
    if (t->policy != SIDE_TABLE)
        return SIDE_OK;
    while (n < 2 * t->count)
        n *= 2;
    t->buckets = mem_zalloc(n, sizeof(*t->buckets));
    if (t->buckets == NULL)
        return SIDE_NO_MEMORY;
    memset(t->buckets, 0xff, n * sizeof(*t->buckets));
    t->bucket_count = n;
    return SIDE_OK;
}

static void slots_free(side_slots *t)
{
    for (uint32_t i = 0; t->slots != NULL && i < t->count; i++) {
        fence_finish(&t->slots[i].filled, t->device);
        for (uint32_t r = 0; r < SIDE_MAX_READERS; r++)
            fence_finish(&t->slots[i].readers[r].drained, t->device);
    }
    slab_give(t);
    mem_free(t->buckets);
    mem_free(t->slots);
    pthread_cond_destroy(&t->changed);
    pthread_mutex_destroy(&t->mutex);
    mem_free(t);
}

side_status side_slots_create(side_device *device, const side_slots_options *options, side_slots **slots)
{
    side_slots_options o = SIDE_SLOTS_OPTIONS_INIT;
    side_status s = device_check(device, "side_slots_create");
    side_slots *t;

    if (s == SIDE_OK && slots == NULL)
        s = error_set(SIDE_INVALID, "side_slots_create", "slots is NULL");
    if (s == SIDE_OK)
        s = options_copy(&o, sizeof(o), options, sizeof(o), "side_slots_create");
    if (s == SIDE_OK)
        s = options_check(&o);
    if (s != SIDE_OK)
        return s;
    t = mem_zalloc(1, sizeof(*t));
    if (t == NULL)
        return SIDE_NO_MEMORY;
    t->device = device;
    t->fork_generation = os_fork_generation();
    t->policy = o.policy;
    t->count = o.count;
    t->expected = o.readers != 0 ? o.readers : 1;
    t->slot_bytes = o.slot_bytes;
    t->where = o.where;
    t->timeout_s = o.timeout_s > 0 ? o.timeout_s : DEFAULT_TIMEOUT_S;
    t->site = SITE_NONE;
    t->drains_own = true;
    t->validate = os_env_flag("SIDESTREAM_VALIDATE");
    t->end = UINT64_MAX;
    t->free.head = t->free.tail = t->recent.head = t->recent.tail = NO_SLOT;
    pthread_mutex_init(&t->mutex, NULL);
    os_cond_init(&t->changed);
    t->slots = mem_zalloc(t->count, sizeof(*t->slots));
    s = t->slots != NULL ? table_create(t) : SIDE_NO_MEMORY;
    if (s == SIDE_OK)
        s = slab_take(t, &o);
    if (s != SIDE_OK) {
        slots_free(t);
        return s;
    }
    for (uint32_t i = 0; i < t->count; i++) {
        t->slots[i].data = o.memory != NULL ? o.memory[i] : (char *)t->slab + slots_stride(t->slot_bytes) * i;
        if (t->policy != SIDE_RING)
            chain_append(t, &t->free, i);
    }
    *slots = t;
    return SIDE_OK;
}

void slots_configure(side_slots *slots, int site, const atomic_bool *cancel)
{
    slots->site = site;
    slots->cancel = cancel;
    slots->drains_own = cancel == NULL;
}

void slots_drain_own(side_slots *slots)
{
    slots->drains_own = true;
}

/* ---------------------------------------------------------------- drain and destroy */

/* Waits for all fences of a slot; for copies of them, since the slot goes on. */
static side_status drain_slot(side_slots *t, struct slot *s, double timeout_s)
{
    struct fence fences[1 + SIDE_MAX_READERS];
    side_status r = SIDE_OK;
    uint32_t n = 0;

    pthread_mutex_lock(&t->mutex);
    fences[n++] = s->filled;
    for (uint32_t i = 0; i < SIDE_MAX_READERS; i++)
        if (s->readers[i].drained.recorded || s->readers[i].drained.clock_ns != 0)
            fences[n++] = s->readers[i].drained;
    pthread_mutex_unlock(&t->mutex);
    for (uint32_t i = 0; i < n && r != SIDE_STUCK; i++) {
        side_status e = fence_wait(&fences[i], t->device, NULL, timeout_s, SITE_NONE);
        r = e != SIDE_OK ? e : r;
    }
    return r;
}

side_status side_slots_drain(side_slots *slots, double timeout_s)
{
    side_status r = SIDE_OK;

    if (slots == NULL)
        return error_set(SIDE_INVALID, "side_slots_drain", "slots is NULL");
    r = os_fork_check(slots->fork_generation, "side_slots_drain");
    /* A fence that fails for another reason than time is of a dead context: nothing runs there any more. Look at the rest all the same. */
    for (uint32_t i = 0; i < slots->count && r != SIDE_STUCK && r != SIDE_FORKED; i++) {
        side_status e = drain_slot(slots, &slots->slots[i], timeout_s);
        r = e != SIDE_OK && (r == SIDE_OK || e == SIDE_STUCK) ? e : r;
    }
    return r;
}

bool slots_are_drained(side_slots *slots)
{
    side_status r = side_slots_drain(slots, slots->timeout_s);

    /* A wait that failed, but not for time, says nothing: once more. */
    if (r != SIDE_OK && r != SIDE_STUCK && r != SIDE_DEVICE_LOST)
        r = side_slots_drain(slots, slots->timeout_s);
    return !slots->uncovered && (r == SIDE_OK || r == SIDE_DEVICE_LOST);
}

side_status side_slots_destroy(side_slots *slots)
{
    size_t bytes;

    if (slots == NULL || os_fork_generation() != slots->fork_generation)
        return SIDE_OK;
    if (!slots_are_drained(slots)) {
        bytes = slots_stride(slots->slot_bytes) * slots->count;
        log_message(SIDE_LEVEL_WARN, "slots", "%zu bytes are kept: the device may still use them", bytes);
        return error_set(SIDE_STUCK, "side_slots_destroy", "the device did not drain; %zu bytes are kept", bytes);
    }
    slots_free(slots);
    return SIDE_OK;
}
