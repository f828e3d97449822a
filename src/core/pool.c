/* SPDX-License-Identifier: MIT
 *
 * The pinned pool: public calls. */
#include "pool_private.h"

#include "alloc.h"
#include "error.h"
#include "os.h"

#include <assert.h>
#include <string.h>

#define DRAIN_NS ((uint64_t)30 * 1000000000u)

enum { HASH_FIRST = 64, PATIENCE = 16 };

static side_status pool_check(const side_pool *pool, const char *where)
{
    if (pool == NULL)
        return error_set(SIDE_INVALID, where, "pool is NULL");
    return os_fork_check(pool->fork_generation, where);
}

side_device *pool_device(const side_pool *pool)
{
    return pool->device;
}

/* Tests see every invariant after every call, as long as that is quick. */
static void self_check(side_pool *pool)
{
#ifdef SIDE_TESTING
    pool->ops++;
    if (pool->used_count < 256 || pool->ops % 256 == 0)
        assert(pool_is_valid(pool));
#else
    (void)pool;
#endif
}

/* ---------------------------------------------------------------- create, destroy */

#ifdef SIDE_TESTING
size_t pool_test_region_bytes;
#endif

static void set_budget(side_pool *pool, const side_pool_options *options)
{
    size_t small;

    pool->budget = options->budget_bytes;
    if (pool->budget == 0) {
        char why[160];
        uint64_t available = pages_available(why, sizeof(why));
        pool->budget = (size_t)(available / 4 / os_local_world()) / PAGES_BYTES * PAGES_BYTES;
        log_message(SIDE_LEVEL_INFO, "pool",
                    "budget of pinned memory: %zu bytes, a quarter of the %llu that are available (%s) / %u processes",
                    pool->budget, (unsigned long long)available, why, os_local_world());
    }
    if (pool->budget > SIZE_MAX / 2)
        pool->budget = SIZE_MAX / 2; /* so that rounding cannot overflow */

    /* A sixteenth of a small budget, so that small blocks leave room for large ones. */
    pool->region_bytes = options->region_bytes;
    if (pool->region_bytes == 0) {
        small = pool->budget / 16 / PAGES_HUGE_BYTES * PAGES_HUGE_BYTES;
        small = small > PAGES_HUGE_BYTES ? small : PAGES_HUGE_BYTES;
        pool->region_bytes = small < POOL_REGION ? small : POOL_REGION;
#ifdef SIDE_TESTING
        pool->region_bytes = pool_test_region_bytes != 0 ? pool_test_region_bytes : pool->region_bytes;
#endif
    }
    if (pool->region_bytes > SIZE_MAX / 2)
        pool->region_bytes = SIZE_MAX / 2;
    pool->region_bytes = pool_round(pool->region_bytes, PAGES_BYTES);
}

side_status side_pool_create(side_device *device, const side_pool_options *options, side_pool **pool)
{
    side_pool_options o = SIDE_POOL_OPTIONS_INIT;
    side_status s = device_check(device, "side_pool_create");
    side_pool *p;

    if (s == SIDE_OK && pool == NULL)
        s = error_set(SIDE_INVALID, "side_pool_create", "pool is NULL");
    if (s == SIDE_OK)
        s = options_copy(&o, sizeof(o), options, sizeof(o), "side_pool_create");
    if (s == SIDE_OK && (o.flags & ~(SIDE_POOL_NO_HUGE_PAGES | SIDE_POOL_DRIVER)) != 0)
        s = error_set(SIDE_UNSUPPORTED, "side_pool_create",
                      "flags 0x%x: only SIDE_POOL_NO_HUGE_PAGES and SIDE_POOL_DRIVER are known", o.flags);
    if (s != SIDE_OK)
        return s;

    p = mem_zalloc(1, sizeof(*p));
    if (p == NULL)
        return SIDE_NO_MEMORY;
    p->hash = mem_zalloc(HASH_FIRST, sizeof(struct pool_chunk *));
    if (p->hash == NULL) {
        mem_free(p);
        return SIDE_NO_MEMORY;
    }
    p->hash_size = HASH_FIRST;
    p->device = device;
    p->fork_generation = device->fork_generation;
    p->threads = o.threads;
    p->huge = (o.flags & SIDE_POOL_NO_HUGE_PAGES) == 0;
    p->validate = os_env_flag("SIDESTREAM_VALIDATE");
    p->by_choice = (o.flags & SIDE_POOL_DRIVER) != 0;
    p->refused = p->by_choice || !device->props.can_register;
    p->registered_last = !p->refused;
    set_budget(p, &o);
    pthread_mutex_init(&p->mutex, NULL);
    pthread_cond_init(&p->changed, NULL);
    *pool = p;
    return SIDE_OK;
}

void side_pool_destroy(side_pool *pool)
{
    if (pool == NULL || os_fork_generation() != pool->fork_generation)
        return;
    pthread_mutex_lock(&pool->mutex);
    pending_drain(pool, os_now_ns() + DRAIN_NS);
    if (pool->used_count > 0)
        log_message(SIDE_LEVEL_WARN, "pool",
                    "destroyed with %llu blocks (%zu bytes) not freed: their regions stay pinned",
                    (unsigned long long)pool->used_count, pool->asked);
    if (pool->pending > 0)
        log_message(SIDE_LEVEL_WARN, "pool",
                    "destroyed with %zu bytes that the device is not known to be done with: their regions stay pinned",
                    pool->pending);
    region_trim(pool);
    pending_finish(pool);
    while (pool->regions != NULL)
        region_abandon(pool, pool->regions);
    pthread_mutex_unlock(&pool->mutex);
    pthread_mutex_destroy(&pool->mutex);
    pthread_cond_destroy(&pool->changed);
    mem_free(pool->hash);
    mem_free(pool);
}

side_status side_device_pool(side_device *device, side_pool **pool)
{
    side_status s = device_check(device, "side_device_pool");

    if (s != SIDE_OK)
        return s;
    if (pool == NULL)
        return error_set(SIDE_INVALID, "side_device_pool", "pool is NULL");
    pthread_mutex_lock(&device->mutex);
    if (device->pool == NULL)
        s = side_pool_create(device, NULL, &device->pool);
    if (s == SIDE_OK)
        *pool = device->pool;
    pthread_mutex_unlock(&device->mutex);
    return s;
}

/* ---------------------------------------------------------------- alloc, free */

static void need_set(struct pool_need *need, const side_pool *pool, size_t bytes)
{
    need->asked = bytes;
    need->bytes = pool_round(bytes, bytes >= POOL_LARGE ? PAGES_BYTES : POOL_GRAIN);
    need->align = need->bytes >= PAGES_BYTES ? PAGES_BYTES : POOL_GRAIN;
    need->own = bytes >= POOL_LARGE || need->bytes > pool->region_bytes;
    need->spare[0] = need->spare[1] = NULL;
}

static side_status need_fill(struct pool_need *need)
{
    for (int i = 0; i < 2; i++) {
        need->spare[i] = mem_zalloc(1, sizeof(struct pool_chunk));
        if (need->spare[i] == NULL)
            return SIDE_NO_MEMORY;
    }
    return SIDE_OK;
}

/* With the mutex held, which region_grow releases while it pins. */
static side_status alloc_locked(side_pool *pool, struct pool_need *need, struct pool_chunk **chunk)
{
    side_status s;

    pending_harvest(pool, PATIENCE);
    while ((*chunk = chunk_find(pool, need)) == NULL) {
        pending_harvest(pool, SIZE_MAX);
        *chunk = chunk_find(pool, need);
        if (*chunk != NULL)
            return SIDE_OK;
        s = region_grow(pool, need);
        if (s == SIDE_OVER_BUDGET && need->own)
            *chunk = chunk_find_shared(pool, need);
        if (*chunk != NULL)
            return SIDE_OK;
        if (s != SIDE_OK)
            return s;
    }
    return SIDE_OK;
}

side_status side_pool_alloc(side_pool *pool, size_t bytes, void **data)
{
    side_status s = pool_check(pool, "side_pool_alloc");
    struct pool_chunk *chunk = NULL;
    struct pool_need need;
    side_error kept;

    if (s != SIDE_OK)
        return s;
    if (bytes == 0 || data == NULL)
        return error_set(SIDE_INVALID, "side_pool_alloc", bytes == 0 ? "bytes is 0" : "data is NULL");
    if (bytes > pool->budget)
        return error_set(SIDE_OVER_BUDGET, "side_pool_alloc",
                         "%zu bytes are more than the whole budget of %zu; raise budget_bytes", bytes, pool->budget);
    error_copy(&kept);
    need_set(&need, pool, bytes);
    s = need_fill(&need);
    if (s == SIDE_OK) {
        pthread_mutex_lock(&pool->mutex);
        s = alloc_locked(pool, &need, &chunk);
        self_check(pool);
        if (s == SIDE_OK)
            *data = chunk_data(chunk);
        pthread_mutex_unlock(&pool->mutex);
    }
    mem_free(need.spare[0]);
    mem_free(need.spare[1]);
    if (s == SIDE_OK)
        error_restore(&kept); /* what was tried in vain on the way is not the caller's error */
    return s;
}

/* With the mutex held. Tells a second free from a stranger, as far as can be told. */
static side_status unknown_block(const side_pool *pool, const void *data)
{
    for (const struct pool_region *r = pool->regions; r != NULL; r = r->next) {
        uintptr_t begin = (uintptr_t)r->pages.data;
        if ((uintptr_t)data >= begin && (uintptr_t)data - begin < r->pages.bytes)
            return error_set(SIDE_INVALID, "side_pool_free",
                             "%p is this pool's memory but no block begins there: freed twice?", data);
    }
    return error_set(SIDE_INVALID, "side_pool_free", "%p is not a block of this pool", data);
}

side_status side_pool_free(side_pool *pool, void *data, side_stream *const *streams, size_t count)
{
    side_status s = pool_check(pool, "side_pool_free");
    struct pool_chunk *chunk;

    if (s != SIDE_OK || data == NULL)
        return s;
    if (count > 0 && streams == NULL)
        return error_set(SIDE_INVALID, "side_pool_free", "streams is NULL with a count of %zu", count);
    for (size_t i = 0; i < count; i++)
        if (streams[i] == NULL || streams[i]->device != pool->device)
            return error_set(SIDE_INVALID, "side_pool_free", "stream %zu is %s", i,
                             streams[i] == NULL ? "NULL" : "of another device");

    pthread_mutex_lock(&pool->mutex);
    chunk = chunk_lookup(pool, data);
    if (chunk == NULL) {
        s = unknown_block(pool, data);
    } else {
        chunk_retire(pool, chunk);
        if (count == 0)
            chunk_release(pool, chunk);
        else
            s = pending_block(pool, chunk, streams, count);
    }
    self_check(pool);
    pthread_mutex_unlock(&pool->mutex);
    return s;
}

size_t side_pool_trim(side_pool *pool)
{
    size_t n;

    if (pool_check(pool, "side_pool_trim") != SIDE_OK)
        return 0;
    pthread_mutex_lock(&pool->mutex);
    pending_harvest(pool, SIZE_MAX);
    n = region_trim(pool);
    self_check(pool);
    pthread_mutex_unlock(&pool->mutex);
    return n;
}

side_status side_pool_get_stats(side_pool *pool, side_pool_stats *stats)
{
    side_status s = pool_check(pool, "side_pool_get_stats");

    if (s != SIDE_OK)
        return s;
    if (stats == NULL)
        return error_set(SIDE_INVALID, "side_pool_get_stats", "stats is NULL");
    pthread_mutex_lock(&pool->mutex);
    pending_harvest(pool, SIZE_MAX);
    *stats = (side_pool_stats){
        .budget_bytes = pool->budget,
        .pinned_bytes = pool_pinned(pool),
        .granted_bytes = pool->granted,
        .asked_bytes = pool->asked,
        .pending_bytes = pool->pending,
        .slack_bytes = pool->region_total - pool->granted - pool->pending,
        .peak_pinned_bytes = pool->peak,
        .blocks = pool->used_count,
        .regions = pool->region_count,
        .pin_s = pool->pin_s,
        .huge_pages = pool->huge_last,
        .registered = pool->registered_last,
    };
    pthread_mutex_unlock(&pool->mutex);
    return SIDE_OK;
}
