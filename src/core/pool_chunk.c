/* SPDX-License-Identifier: MIT
 *
 * Cutting regions into blocks: segregated fits. Free chunks hang in bins by size (exact up to a page, eight a power of two above) with a bitmap
 * of the bins that are not empty; neighbours are joined at once, which the address-ordered list makes a constant-time job. */
#include "pool_private.h"

#include "alloc.h"

#include <string.h>

/* The bin whose chunks have `bytes` or more, up to the next bin's least. */
static unsigned bin_of(size_t bytes)
{
    size_t units = bytes / POOL_GRAIN;
    if (units < 64)
        return (unsigned)units;
    unsigned log = 63u - (unsigned)__builtin_clzll(bytes); /* 12 and up */
    return 64 + ((log - 12) << POOL_BINS_LOG) +
           (unsigned)((bytes >> (log - POOL_BINS_LOG)) & ((1u << POOL_BINS_LOG) - 1));
}

/* The first bin from `bin` on that holds something; POOL_BINS where none does. */
static unsigned bin_next(const struct side_pool *pool, unsigned bin)
{
    for (unsigned word = bin / 64; word < POOL_BIN_WORDS; word++) {
        uint64_t bits = pool->bin_bits[word];
        if (word == bin / 64)
            bits &= ~(uint64_t)0 << (bin % 64);
        if (bits != 0)
            return word * 64 + (unsigned)__builtin_ctzll(bits);
    }
    return POOL_BINS;
}

static void bin_insert(struct side_pool *pool, struct pool_chunk *chunk)
{
    unsigned bin = bin_of(chunk->bytes);

    if (chunk->region->own)
        return;
    chunk->prev = NULL;
    chunk->next = pool->bins[bin];
    if (chunk->next != NULL)
        chunk->next->prev = chunk;
    pool->bins[bin] = chunk;
    pool->bin_bits[bin / 64] |= (uint64_t)1 << (bin % 64);
}

static void bin_remove(struct side_pool *pool, struct pool_chunk *chunk)
{
    unsigned bin = bin_of(chunk->bytes);

    if (chunk->region->own)
        return;
    if (chunk->next != NULL)
        chunk->next->prev = chunk->prev;
    if (chunk->prev != NULL)
        chunk->prev->next = chunk->next;
    else
        pool->bins[bin] = chunk->next;
    if (pool->bins[bin] == NULL)
        pool->bin_bits[bin / 64] &= ~((uint64_t)1 << (bin % 64));
    chunk->prev = chunk->next = NULL;
}

/* ---------------------------------------------------------------- used blocks by address */

static size_t hash_slot(const struct side_pool *pool, const void *data)
{
    return (size_t)(((uintptr_t)data / POOL_GRAIN * 0x9e3779b97f4a7c15u) >> 20) & (pool->hash_size - 1);
}

/* Doubles the table; where there is no memory for it the chains get longer instead. */
static void hash_expand(struct side_pool *pool)
{
    size_t old_size = pool->hash_size;
    struct pool_chunk **old = pool->hash, **grown = mem_zalloc(old_size * 2, sizeof(struct pool_chunk *));

    if (grown == NULL)
        return;
    pool->hash = grown;
    pool->hash_size = old_size * 2;
    for (size_t i = 0; i < old_size; i++)
        for (struct pool_chunk *c = old[i], *next; c != NULL; c = next) {
            size_t slot = hash_slot(pool, chunk_data(c));
            next = c->hash_next;
            c->hash_next = grown[slot];
            grown[slot] = c;
        }
    mem_free(old);
}

static void hash_insert(struct side_pool *pool, struct pool_chunk *chunk)
{
    if (pool->used_count > pool->hash_size)
        hash_expand(pool);
    size_t slot = hash_slot(pool, chunk_data(chunk));
    chunk->hash_next = pool->hash[slot];
    pool->hash[slot] = chunk;
}

static void hash_remove(struct side_pool *pool, struct pool_chunk *chunk)
{
    struct pool_chunk **p = &pool->hash[hash_slot(pool, chunk_data(chunk))];
    while (*p != chunk)
        p = &(*p)->hash_next;
    *p = chunk->hash_next;
    chunk->hash_next = NULL;
}

struct pool_chunk *chunk_lookup(struct side_pool *pool, const void *data)
{
    struct pool_chunk *c = pool->hash[hash_slot(pool, data)];
    while (c != NULL && chunk_data(c) != data)
        c = c->hash_next;
    return c;
}

/* ---------------------------------------------------------------- cutting and joining */

/* Cuts `chunk` at `bytes`: `rest` becomes what lies behind, in the same state, in no bin. */
static void cut(struct pool_chunk *chunk, size_t bytes, struct pool_chunk *rest)
{
    rest->region = chunk->region;
    rest->offset = chunk->offset + bytes;
    rest->bytes = chunk->bytes - bytes;
    rest->state = chunk->state;
    rest->before = chunk;
    rest->after = chunk->after;
    if (rest->after != NULL)
        rest->after->before = rest;
    chunk->after = rest;
    chunk->bytes = bytes;
}

/* `chunk` swallows the one behind it, which is in no bin. */
static void join(struct pool_chunk *chunk)
{
    struct pool_chunk *rest = chunk->after;

    chunk->bytes += rest->bytes;
    chunk->after = rest->after;
    if (chunk->after != NULL)
        chunk->after->before = chunk;
    mem_free(rest);
}

static size_t front_gap(const struct pool_chunk *chunk, size_t align)
{
    return pool_round(chunk->offset, align) - chunk->offset;
}

static bool fits(const struct pool_chunk *chunk, const struct pool_need *need)
{
    size_t gap = front_gap(chunk, need->align);
    return chunk->bytes >= need->bytes && chunk->bytes - need->bytes >= gap;
}

static struct pool_chunk *use(struct side_pool *pool, struct pool_chunk *chunk, struct pool_need *need)
{
    size_t gap = front_gap(chunk, need->align);

    bin_remove(pool, chunk);
    if (gap > 0) {
        struct pool_chunk *front = chunk;
        chunk = need->spare[0];
        need->spare[0] = NULL;
        cut(front, gap, chunk);
        bin_insert(pool, front);
    }
    if (chunk->bytes > need->bytes) {
        cut(chunk, need->bytes, need->spare[1]);
        bin_insert(pool, need->spare[1]);
        need->spare[1] = NULL;
    }
    chunk->state = CHUNK_USED;
    chunk->asked = need->asked;
    chunk->region->blocks++;
    pool->used_count++;
    pool->granted += chunk->bytes;
    pool->asked += chunk->asked;
    hash_insert(pool, chunk);
    return chunk;
}

struct pool_chunk *chunk_find_shared(struct side_pool *pool, struct pool_need *need)
{
    /* Below `sure` a chunk may be too short once its start is aligned: each is looked at. */
    unsigned bin = bin_of(need->bytes), sure = bin; /* under a page: bins of one size, no alignment */

    if (need->align > POOL_GRAIN)
        sure = bin_of(need->bytes + need->align - POOL_GRAIN) + 1;
    for (bin = bin_next(pool, bin); bin < POOL_BINS; bin = bin_next(pool, bin + 1)) {
        if (bin >= sure)
            return use(pool, pool->bins[bin], need);
        for (struct pool_chunk *c = pool->bins[bin]; c != NULL; c = c->next)
            if (fits(c, need))
                return use(pool, c, need);
    }
    return NULL;
}

/* The smallest empty region that holds the block and at most an eighth more. */
static struct pool_chunk *find_own(struct side_pool *pool, struct pool_need *need)
{
    size_t least = pool_round(need->bytes, PAGES_BYTES), most = least + need->bytes / 8;
    struct pool_region *best = NULL;

    for (struct pool_region *r = pool->regions; r != NULL; r = r->next)
        if (r->own && r->blocks == 0 && r->pages.bytes >= least && r->pages.bytes <= most &&
            (best == NULL || r->pages.bytes < best->pages.bytes))
            best = r;
    return best != NULL ? use(pool, best->first, need) : NULL;
}

struct pool_chunk *chunk_find(struct side_pool *pool, struct pool_need *need)
{
    return need->own ? find_own(pool, need) : chunk_find_shared(pool, need);
}

void chunk_retire(struct side_pool *pool, struct pool_chunk *chunk)
{
    hash_remove(pool, chunk);
    pool->used_count--;
    pool->granted -= chunk->bytes;
    pool->asked -= chunk->asked;
    chunk->asked = 0;
}

void chunk_release(struct side_pool *pool, struct pool_chunk *chunk)
{
    if (pool->validate)
        memset(chunk_data(chunk), 0xDB, chunk->bytes);
    chunk->state = CHUNK_FREE;
    chunk->region->blocks--;
    if (chunk->after != NULL && chunk->after->state == CHUNK_FREE) {
        bin_remove(pool, chunk->after);
        join(chunk);
    }
    if (chunk->before != NULL && chunk->before->state == CHUNK_FREE) {
        chunk = chunk->before;
        bin_remove(pool, chunk);
        join(chunk);
    }
    bin_insert(pool, chunk);
}

void chunk_start(struct side_pool *pool, struct pool_region *region, struct pool_chunk *spare)
{
    spare->region = region;
    spare->bytes = region->pages.bytes;
    region->first = spare;
    bin_insert(pool, spare);
}

void chunk_finish(struct side_pool *pool, struct pool_region *region)
{
    bin_remove(pool, region->first);
    mem_free(region->first);
    region->first = NULL;
}

/* ---------------------------------------------------------------- invariants */

struct sums {
    size_t regions, granted, asked, pending, lost, used, shared_free;
};

static bool region_is_valid(struct side_pool *pool, const struct pool_region *region, struct sums *sums)
{
    size_t at = 0, blocks = 0;
    const struct pool_chunk *before = NULL;

    for (const struct pool_chunk *c = region->first; c != NULL; before = c, c = c->after) {
        if (c->region != region || c->before != before || c->offset != at || c->bytes == 0 || c->bytes % POOL_GRAIN != 0)
            return false;
        if (c->state == CHUNK_FREE && before != NULL && before->state == CHUNK_FREE)
            return false;
        if (c->state == CHUNK_USED && (chunk_lookup(pool, chunk_data(c)) != c || c->asked > c->bytes ||
                                       (c->bytes >= PAGES_BYTES && at % PAGES_BYTES != 0)))
            return false;
        if ((c->state == CHUNK_PENDING) != (c->fences != NULL))
            return false;
        at += c->bytes;
        blocks += c->state != CHUNK_FREE;
        sums->used += c->state == CHUNK_USED;
        sums->granted += c->state == CHUNK_USED ? c->bytes : 0;
        sums->asked += c->asked;
        sums->pending += c->state == CHUNK_PENDING || c->state == CHUNK_LOST ? c->bytes : 0;
        sums->lost += c->state == CHUNK_LOST ? c->bytes : 0;
        sums->shared_free += c->state == CHUNK_FREE && !region->own;
    }
    sums->regions++;
    return at == region->pages.bytes && blocks == region->blocks && !(region->own && blocks > 1);
}

static bool bins_are_valid(const struct side_pool *pool, size_t expected)
{
    size_t found = 0;

    for (unsigned bin = 0; bin < POOL_BINS; bin++) {
        bool bit = (pool->bin_bits[bin / 64] >> (bin % 64) & 1) != 0;
        const struct pool_chunk *prev = NULL;
        if (bit != (pool->bins[bin] != NULL))
            return false;
        for (const struct pool_chunk *c = pool->bins[bin]; c != NULL; prev = c, c = c->next, found++)
            if (c->state != CHUNK_FREE || c->prev != prev || c->region->own || bin_of(c->bytes) != bin)
                return false;
    }
    return found == expected;
}

bool pool_is_valid(struct side_pool *pool)
{
    struct sums sums = {0};
    size_t total = 0, waiting = 0;

    for (const struct pool_region *r = pool->regions; r != NULL; r = r->next) {
        total += r->pages.bytes;
        if (!region_is_valid(pool, r, &sums) || (r->next != NULL && r->next->prev != r))
            return false;
    }
    for (const struct pool_chunk *c = pool->pending_first; c != NULL; c = c->next) {
        waiting += c->bytes;
        if (c->state != CHUNK_PENDING || (c->next == NULL) != (c == pool->pending_last))
            return false;
    }
    return bins_are_valid(pool, sums.shared_free) && total == pool->region_total && sums.regions == pool->region_count &&
           sums.granted == pool->granted && sums.asked == pool->asked && sums.pending == pool->pending &&
           sums.lost == pool->lost && waiting == pool->pending - pool->lost && sums.used == pool->used_count &&
           pool_pinned(pool) + pool->moving <= pool->budget && pool->peak <= pool->budget;
}
