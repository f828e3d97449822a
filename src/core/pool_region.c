/* SPDX-License-Identifier: MIT
 *
 * Pinning and unpinning regions within the budget. A region is registered by one call, whatever its size: drivers refuse copies that cross from
 * one registration into the next. */
#include "pool_private.h"

#include "alloc.h"
#include "error.h"
#include "os.h"

static void wait_changed(struct side_pool *pool)
{
    pthread_cond_wait(&pool->changed, &pool->mutex);
}

/* ---------------------------------------------------------------- pages; without the mutex */

/* Our own pages, registered. SIDE_UNSUPPORTED and SIDE_DEVICE_ERROR: the device refused. */
static side_status pin_own(const struct side_pool *pool, size_t bytes, struct pages *pages)
{
    struct pages_how how = {.numa_node = pool->device->props.numa_node, .threads = pool->threads, .huge = pool->huge};
    side_status s = pages_map(bytes, &how, pages);

    if (s != SIDE_OK)
        return s;
    s = pool->device->ops->host_register(pool->device->context, pages->data, bytes, false);
    if (s != SIDE_OK)
        pages_unmap(pages);
    return s;
}

/* The driver's. */
static side_status pin_driver(const struct side_pool *pool, size_t bytes, struct pages *pages)
{
    void *data = NULL;
    side_status s = pool->device->ops->host_alloc(pool->device->context, bytes, &data);

    if (s != SIDE_OK)
        return s;
    if ((uintptr_t)data % PAGES_BYTES != 0) {
        pool->device->ops->host_free(pool->device->context, data);
        return error_set(SIDE_DEVICE_ERROR, "host_alloc", "the driver's pinned memory is not page-aligned");
    }
    *pages = (struct pages){.data = data, .bytes = bytes};
    return SIDE_OK;
}

static side_status both_refused(const struct side_pool *pool, size_t bytes, side_status s, const side_error *registering)
{
    side_error allocating;

    error_copy(&allocating);
    if (s != SIDE_NO_MEMORY && s != SIDE_UNSUPPORTED && s != SIDE_DEVICE_ERROR)
        return s;
    if (pool->by_choice)
        return error_set_device(SIDE_NO_MEMORY, allocating.where, allocating.device_code,
                                "%zu bytes cannot be pinned by the driver's allocator (SIDE_POOL_DRIVER): %.120s",
                                bytes, allocating.message);
    return error_set_device(SIDE_NO_MEMORY, allocating.where, allocating.device_code,
                            "%zu bytes cannot be pinned: registering: %.90s; the driver's allocator: %.90s", bytes,
                            registering->message, allocating.message);
}

/* `refused`: do not try to register. Sets region->pages and region->registered; `why` tells why it is not registered. */
static side_status pin(const struct side_pool *pool, size_t bytes, bool refused, struct pool_region *region,
                       side_error *why)
{
    side_status s = SIDE_UNSUPPORTED;

    if (refused) {
        *why = (side_error){.status = s, .message = "not supported by this device"};
    } else {
        s = pin_own(pool, bytes, &region->pages);
        region->registered = s == SIDE_OK;
        if (s != SIDE_UNSUPPORTED && s != SIDE_DEVICE_ERROR)
            return s;
        error_copy(why);
    }
    s = pin_driver(pool, bytes, &region->pages);
    return s != SIDE_OK ? both_refused(pool, bytes, s, why) : SIDE_OK;
}

static bool unpin(const struct side_pool *pool, const struct pool_region *region)
{
    const struct side_device_ops *ops = pool->device->ops;

    if (!region->registered) {
        ops->host_free(pool->device->context, region->pages.data);
        return true;
    }
    if (ops->host_unregister(pool->device->context, region->pages.data) != SIDE_OK) {
        /* The device may still reach these pages: they must not become somebody else's. */
        log_message(SIDE_LEVEL_WARN, "pool", "%zu bytes stay pinned: %s", region->pages.bytes,
                    side_last_error()->message);
        return false;
    }
    pages_unmap(&region->pages);
    return true;
}

/* ---------------------------------------------------------------- the list of regions */

static void insert(struct side_pool *pool, struct pool_region *region, struct pool_chunk *chunk)
{
    region->next = pool->regions;
    if (region->next != NULL)
        region->next->prev = region;
    pool->regions = region;
    pool->region_count++;
    pool->region_total += region->pages.bytes;
    if (pool_pinned(pool) > pool->peak)
        pool->peak = pool_pinned(pool);
    pool->huge_last = region->pages.huge;
    pool->registered_last = region->registered;
    chunk_start(pool, region, chunk);
}

static void take_out(struct side_pool *pool, struct pool_region *region)
{
    if (region->prev != NULL)
        region->prev->next = region->next;
    else
        pool->regions = region->next;
    if (region->next != NULL)
        region->next->prev = region->prev;
    region->prev = region->next = NULL;
    pool->region_count--;
    pool->region_total -= region->pages.bytes;
}

/* An empty region leaves the pool but still counts against the budget until unpin_detached. */
static void detach(struct side_pool *pool, struct pool_region *region)
{
    chunk_finish(pool, region);
    take_out(pool, region);
    pool->moving += region->pages.bytes;
    pool->leaving += region->pages.bytes;
}

/* Unpins a list of detached regions; releases the mutex meanwhile. Returns the bytes given back. */
static size_t unpin_detached(struct side_pool *pool, struct pool_region *list)
{
    size_t total = 0, given_back = 0;
    side_error kept;

    pthread_mutex_unlock(&pool->mutex);
    error_copy(&kept);
    for (struct pool_region *r = list, *next; r != NULL; r = next) {
        next = r->next;
        total += r->pages.bytes;
        given_back += unpin(pool, r) ? r->pages.bytes : 0;
        mem_free(r);
    }
    error_restore(&kept);
    pthread_mutex_lock(&pool->mutex);
    pool->moving -= total;
    pool->leaving -= total;
    pool->stranded += total - given_back;
    pthread_cond_broadcast(&pool->changed);
    return given_back;
}

size_t region_trim(struct side_pool *pool)
{
    struct pool_region *list = NULL;

    for (struct pool_region *r = pool->regions, *next; r != NULL; r = next) {
        next = r->next;
        if (r->blocks == 0) {
            detach(pool, r);
            r->next = list;
            list = r;
        }
    }
    return list != NULL ? unpin_detached(pool, list) : 0;
}

void region_abandon(struct side_pool *pool, struct pool_region *region)
{
    for (struct pool_chunk *c = region->first, *next; c != NULL; c = next) {
        next = c->after;
        mem_free(c);
    }
    take_out(pool, region);
    mem_free(region);
}

/* ---------------------------------------------------------------- the budget */

/* Unpins one empty region, if with all empty ones gone `least` bytes would be left: the smallest that makes `wanted` bytes free, else the
 * largest. True: look again, something changed. */
static bool reclaim(struct side_pool *pool, size_t least, size_t wanted)
{
    struct pool_region *best = NULL;
    size_t left = pool_left(pool), empty = 0, missing = wanted - left;

    for (struct pool_region *r = pool->regions; r != NULL; r = r->next) {
        size_t n = r->pages.bytes;
        if (r->blocks != 0)
            continue;
        empty += n;
        if (best == NULL ||
            (n >= missing ? best->pages.bytes < missing || n < best->pages.bytes : n > best->pages.bytes))
            best = r;
    }
    if (best != NULL && left + empty >= least) {
        detach(pool, best);
        unpin_detached(pool, best);
        return true;
    }
    if (pool->leaving == 0)
        return false;
    wait_changed(pool);
    return true;
}

static side_status over_budget(const struct side_pool *pool, size_t asked)
{
    return error_set(SIDE_OVER_BUDGET, "side_pool_alloc",
                     "%zu bytes more would pass the budget: %zu of %zu are pinned (%zu in blocks, %zu waiting for the "
                     "device, %zu in place); "
                     "raise budget_bytes, or use fewer or smaller buffers",
                     asked, pool_pinned(pool) + pool->moving, pool->budget, pool->granted, pool->pending,
                     pool->in_place);
}

/* Pins `bytes`, which are within the budget; releases the mutex meanwhile. */
static side_status add(struct side_pool *pool, size_t bytes, bool own)
{
    struct pool_region *region = mem_zalloc(1, sizeof(*region));
    struct pool_chunk *chunk = mem_zalloc(1, sizeof(*chunk));
    bool refused = pool->refused, tell = false;
    side_error why = {.status = SIDE_OK};
    side_status s = SIDE_NO_MEMORY;
    uint64_t begin;

    if (region == NULL || chunk == NULL)
        goto free_metadata;
    pool->moving += bytes;
    pool->growing = pool->growing || !own;
    pthread_mutex_unlock(&pool->mutex);
    begin = os_now_ns();
    s = pin(pool, bytes, refused, region, &why);
    pthread_mutex_lock(&pool->mutex);
    pool->pin_s += (double)(os_now_ns() - begin) * 1e-9;
    pool->moving -= bytes;
    pool->growing = pool->growing && own;
    pthread_cond_broadcast(&pool->changed);
    pool->refused = pool->refused || why.status == SIDE_UNSUPPORTED;
    if (s != SIDE_OK)
        goto free_metadata;
    region->own = own;
    tell = !region->registered && !pool->by_choice && !pool->refusal_logged;
    pool->refusal_logged = pool->refusal_logged || tell;
    insert(pool, region, chunk);
    if (tell)
        log_message(SIDE_LEVEL_INFO, "pool", "pinned memory comes from the driver's allocator; registering: %s",
                    why.message);
    return SIDE_OK;

free_metadata:
    mem_free(chunk);
    mem_free(region);
    return s;
}

side_status region_grow(struct side_pool *pool, const struct pool_need *need)
{
    size_t least = pool_round(need->bytes, PAGES_BYTES), wanted = least, enough = least;

    if (!need->own) {
        if (pool->growing) { /* by another thread: what it pins will do for us, most likely */
            wait_changed(pool);
            return SIDE_OK;
        }
        wanted = pool->region_bytes > least ? pool->region_bytes : least;
        /* A region cut short by the budget is fine, a tiny one is the last resort. */
        enough = wanted < PAGES_HUGE_BYTES ? wanted : PAGES_HUGE_BYTES > least ? PAGES_HUGE_BYTES : least;
    }
    if (pool_left(pool) < enough && reclaim(pool, least, wanted))
        return SIDE_OK;
    if (pool_left(pool) < least)
        return over_budget(pool, need->asked);
    return add(pool, pool_left(pool) < wanted ? pool_left(pool) : wanted, need->own);
}

side_status region_reserve(struct side_pool *pool, size_t bytes)
{
    while (pool_left(pool) < bytes)
        if (!reclaim(pool, bytes, bytes))
            return over_budget(pool, bytes);
    pool->in_place += bytes;
    if (pool_pinned(pool) > pool->peak)
        pool->peak = pool_pinned(pool);
    return SIDE_OK;
}

void region_unreserve(struct side_pool *pool, size_t bytes)
{
    pool->in_place -= bytes;
}
