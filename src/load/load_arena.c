/* SPDX-License-Identifier: MIT
 *
 * Memory of arenas. Ours are allocated by the driver, one by one, while reading has begun: device memory of some GB takes the driver of a GPU milliseconds. */
#include "load_private.h"

#include "alloc.h"
#include "error.h"
#include "pages.h"

#define WHERE "side_load_start"

static side_status short_of(side_status status, const side_load *l, const char *what, uint64_t has)
{
    return error_set(status, WHERE, "the parts take %zu bytes, and %s %llu; choose fewer, or give them memory",
                     l->plan.arena_bytes, what, (unsigned long long)has);
}

side_status load_arenas_check(side_load *l)
{
    const size_t need = l->plan.arena_bytes;
    side_pool_stats pool;
    size_t available;
    side_status r;

    if (l->options.arena_bytes != 0 && need > l->options.arena_bytes)
        return error_set(SIDE_TOO_LARGE, WHERE, "the parts take %zu bytes of arenas; options.arena_bytes is %zu", need,
                         l->options.arena_bytes);
    if ((l->options.flags & SIDE_LOAD_GIVEN) != 0 || need == 0)
        return SIDE_OK;
    if (l->options.where == SIDE_MEMORY_DEVICE) {
        r = side_device_get_memory(l->device, &available, NULL);
        if (r == SIDE_OK && need > available)
            r = short_of(SIDE_NO_DEVICE_MEMORY, l, "the device has free", available);
        return r;
    }
    if (l->options.where == SIDE_MEMORY_PAGEABLE) {
        const uint64_t has = pages_available(NULL, 0);
        return need > has ? short_of(SIDE_NO_MEMORY, l, "this process may use", has) : SIDE_OK;
    }
    r = side_device_pool(l->device, &l->pool);
    if (r == SIDE_OK)
        r = side_pool_get_stats(l->pool, &pool);
    if (r == SIDE_OK && need > pool.budget_bytes - (pool.pinned_bytes - pool.slack_bytes))
        r = short_of(SIDE_OVER_BUDGET, l, "the pool has left",
                     pool.budget_bytes - (pool.pinned_bytes - pool.slack_bytes));
    return r;
}

/* What the allocators give by themselves: of device memory 256, of small pinned blocks 64; pageable arenas begin on a page, for direct reads. */
static size_t extra(const side_load *l)
{
    if (l->options.where == SIDE_MEMORY_PAGEABLE)
        return LOAD_GRAIN;
    return l->options.align > (l->options.where == SIDE_MEMORY_DEVICE ? 256u : 64u) ? l->options.align : 0;
}

/* Pageable memory is not touched here: readers' first touch spreads it, and nothing is written twice. */
static side_status take(side_load *l, struct load_arena *a, void **base, void **data)
{
    const size_t more = extra(l), grain = more != 0 ? more : 1;
    side_status r = SIDE_OK;

    if (l->options.where == SIDE_MEMORY_DEVICE)
        r = side_device_alloc(l->device, a->bytes + more, base);
    else if (l->options.where == SIDE_MEMORY_PINNED)
        r = side_pool_alloc(l->pool, a->bytes + more, base);
    else {
        *base = mem_zalloc(1, a->bytes + more);
        r = *base != NULL ? SIDE_OK : SIDE_NO_MEMORY;
    }
    if (r == SIDE_OK)
        *data = (char *)*base + (grain - (uintptr_t)*base % grain) % grain;
    return r;
}

/* Its memory is there. Locked. */
static side_status set(side_load *l, struct load_arena *a, void *base, void *data)
{
    a->base = base;
    a->data = data;
    if (l->simulated)
        a->clock_ns = l->device->ops->now(l->device->context);
    pthread_cond_broadcast(&l->work);
    pthread_cond_broadcast(&l->changed);
    return load_unpark(l);
}

side_status load_arena_make(side_load *l)
{
    struct load_arena *a = &l->plan.arenas[l->next_arena];
    void *base = NULL, *data = NULL;
    side_status r = take(l, a, &base, &data);

    if (r != SIDE_OK)
        return r;
    pthread_mutex_lock(&l->mutex);
    l->next_arena++;
    r = set(l, a, base, data);
    if (r != SIDE_OK) /* before anybody else gathers */
        load_fail_locked(l, r);
    pthread_mutex_unlock(&l->mutex);
    return r;
}

void load_arenas_finish(side_load *l)
{
    for (uint32_t i = 0; i < l->plan.arena_count; i++) {
        struct load_arena *a = &l->plan.arenas[i];
        if (a->base == NULL)
            continue;
        if (l->options.where == SIDE_MEMORY_DEVICE)
            side_device_free(l->device, a->base);
        else if (l->options.where == SIDE_MEMORY_PINNED)
            side_pool_free(l->pool, a->base, NULL, 0);
        else
            mem_free(a->base);
    }
}

/* ---------------------------------------------------------------- the caller's */

size_t side_load_arenas(const side_load *load)
{
    return load != NULL ? load->plan.arena_count : 0;
}

static side_status arena_check(const side_load *l, size_t arena, const char *where)
{
    side_status r = load_enter(l, where);

    if (r == SIDE_OK && arena >= l->plan.arena_count)
        return error_set(SIDE_INVALID, where, "arena %zu; there are %u", arena, l->plan.arena_count);
    return r;
}

side_status side_load_get_arena(side_load *load, size_t arena, side_load_arena *info)
{
    side_status r = arena_check(load, arena, "side_load_get_arena");

    if (r == SIDE_OK && info == NULL)
        return error_set(SIDE_INVALID, "side_load_get_arena", "info is NULL");
    if (r != SIDE_OK)
        return r;
    const struct load_arena *a = &load->plan.arenas[arena];
    pthread_mutex_lock(&load->mutex);
    *info = (side_load_arena){.data = a->data, .bytes = a->bytes, .file = a->file};
    pthread_mutex_unlock(&load->mutex);
    return SIDE_OK;
}

side_status load_order(side_load *l, side_stream *stream)
{
    struct fence before = {.event = NULL};
    side_status r = fence_record(&before, l->device, stream);

    if (r == SIDE_OK)
        r = fence_wait(&before, l->device, l->to_host ? NULL : l->copy, l->options.timeout_s, SITE_NONE);
    fence_finish(&before, l->device);
    return r;
}

side_status side_load_give_arena(side_load *load, size_t arena, void *data, side_stream *stream)
{
    static const char where[] = "side_load_give_arena";
    side_load *l = load;
    side_status r = arena_check(l, arena, where);

    if (r != SIDE_OK)
        return r;
    if ((l->options.flags & SIDE_LOAD_GIVEN) == 0)
        return error_set(SIDE_STATE, where, "arenas are the load's own; SIDE_LOAD_GIVEN makes them the caller's");
    if (data == NULL || (uintptr_t)data % l->options.align != 0)
        return error_set(SIDE_INVALID, where, "data is %p; it takes memory aligned to %zu", data, l->options.align);
    if (stream != NULL && stream->device != l->device)
        return error_set(SIDE_INVALID, where, "the stream is of another device");
    if (stream != NULL && l->to_host)
        r = load_order(l, stream);
    if (r != SIDE_OK)
        return r;
    pthread_mutex_lock(&l->mutex);
    struct load_arena *a = &l->plan.arenas[arena];
    r = load_failure(l);
    if (r == SIDE_OK && a->data != NULL)
        r = error_set(SIDE_STATE, where, "arena %zu has its memory", arena);
    else if (r == SIDE_OK) {
        if (stream != NULL && !l->to_host)
            r = load_order(l, stream);
        if (r == SIDE_OK)
            r = set(l, a, NULL, data);
        if (r != SIDE_OK)
            load_fail_locked(l, r);
    }
    pthread_mutex_unlock(&l->mutex);
    return r;
}
