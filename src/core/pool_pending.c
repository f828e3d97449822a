/* SPDX-License-Identifier: MIT
 *
 * Blocks that were freed while the device may still use them. Each waits for one fence a stream; fences are recycled. */
#include "pool_private.h"

#include "alloc.h"
#include "error.h"
#include "os.h"

static struct pool_fence *fence_get(struct side_pool *pool)
{
    struct pool_fence *f = pool->fences_idle;

    if (f == NULL)
        return mem_zalloc(1, sizeof(*f));
    pool->fences_idle = f->next;
    return f;
}

static void fence_put(struct side_pool *pool, struct pool_fence *fence)
{
    fence->next = pool->fences_idle;
    pool->fences_idle = fence;
}

static void pending_append(struct side_pool *pool, struct pool_chunk *chunk)
{
    chunk->state = CHUNK_PENDING;
    chunk->prev = pool->pending_last;
    chunk->next = NULL;
    if (chunk->prev != NULL)
        chunk->prev->next = chunk;
    else
        pool->pending_first = chunk;
    pool->pending_last = chunk;
}

static void pending_remove(struct side_pool *pool, struct pool_chunk *chunk)
{
    if (chunk->prev != NULL)
        chunk->prev->next = chunk->next;
    else
        pool->pending_first = chunk->next;
    if (chunk->next != NULL)
        chunk->next->prev = chunk->prev;
    else
        pool->pending_last = chunk->prev;
    chunk->prev = chunk->next = NULL;
}

side_status pending_block(struct side_pool *pool, struct pool_chunk *chunk, side_stream *const *streams, size_t count)
{
    side_status s = SIDE_OK;
    struct pool_fence *f;

    pool->pending += chunk->bytes;
    for (size_t i = 0; i < count && s == SIDE_OK; i++) {
        f = fence_get(pool);
        if (f == NULL) {
            s = SIDE_NO_MEMORY;
            break;
        }
        f->next = chunk->fences;
        chunk->fences = f;
        s = fence_record(&f->fence, pool->device, streams[i]);
    }
    if (s == SIDE_OK) {
        pending_append(pool, chunk);
        return SIDE_OK;
    }
    /* Work may be queued that nothing will tell us the end of. */
    while ((f = chunk->fences) != NULL) {
        chunk->fences = f->next;
        fence_put(pool, f);
    }
    chunk->state = CHUNK_LOST;
    pool->lost += chunk->bytes;
    return s;
}

enum { BUSY_MOST = 32 };

/* Streams of which an event was found not done: later ones of the same stream need not be asked for. Only a saving: it may overflow. */
struct busy {
    uint32_t stream[BUSY_MOST];
    unsigned count;
};

static bool is_busy(const struct busy *busy, uint32_t stream)
{
    for (unsigned i = 0; i < busy->count; i++)
        if (busy->stream[i] == stream)
            return true;
    return false;
}

/* Drops the block's fences that are done; true when none is left. */
static bool fences_done(struct side_pool *pool, struct pool_chunk *chunk, struct busy *busy)
{
    struct pool_fence **at = &chunk->fences, *f;

    while ((f = *at) != NULL) {
        if (!is_busy(busy, f->fence.stream)) {
            /* An error says nothing about the copies: the block waits on. */
            if (fence_query(&f->fence, pool->device) == SIDE_OK) {
                *at = f->next;
                fence_put(pool, f);
                continue;
            }
            if (busy->count < BUSY_MOST)
                busy->stream[busy->count++] = f->fence.stream;
        }
        at = &f->next;
    }
    return chunk->fences == NULL;
}

static void pending_done(struct side_pool *pool, struct pool_chunk *chunk)
{
    pending_remove(pool, chunk);
    pool->pending -= chunk->bytes;
    chunk_release(pool, chunk);
}

void pending_harvest(struct side_pool *pool, size_t patience)
{
    struct busy busy = {.count = 0};
    struct pool_chunk *next;
    side_error kept;

    if (pool->pending_first == NULL)
        return;
    error_copy(&kept);
    for (struct pool_chunk *c = pool->pending_first; c != NULL && patience > 0; c = next) {
        next = c->next;
        if (fences_done(pool, c, &busy))
            pending_done(pool, c);
        else
            patience--;
    }
    error_restore(&kept);
}

void pending_drain(struct side_pool *pool, uint64_t deadline_ns)
{
    struct pool_chunk *next;
    struct pool_fence *f;

    for (struct pool_chunk *c = pool->pending_first; c != NULL; c = next) {
        next = c->next;
        while ((f = c->fences) != NULL) {
            uint64_t now = os_now_ns();
            double left_s = now < deadline_ns ? (double)(deadline_ns - now) * 1e-9 : 1e-9;
            if (fence_wait(&f->fence, pool->device, NULL, left_s, SITE_NONE) != SIDE_OK)
                break;
            c->fences = f->next;
            fence_put(pool, f);
        }
        if (c->fences == NULL)
            pending_done(pool, c);
    }
}

static void fences_destroy(struct side_pool *pool, struct pool_fence *first)
{
    for (struct pool_fence *f = first, *next; f != NULL; f = next) {
        next = f->next;
        fence_finish(&f->fence, pool->device);
        mem_free(f);
    }
}

void pending_finish(struct side_pool *pool)
{
    fences_destroy(pool, pool->fences_idle);
    pool->fences_idle = NULL;
    for (struct pool_chunk *c = pool->pending_first; c != NULL; c = c->next) {
        fences_destroy(pool, c->fences);
        c->fences = NULL;
    }
}
