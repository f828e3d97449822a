/* SPDX-License-Identifier: MIT
 *
 * Inside the pinned pool. pool.c: the public calls; pool_region.c: pinning, the budget; pool_chunk.c: cutting regions into blocks;
 * pool_pending.c: blocks that wait for the device; pool_pin.c: the caller's own memory.
 *
 *     region (pinned)     | used | free | used | pending |        free           |
 *     chunks (heap)          o <--> o <--> o <-----> o <-----------> o              in address order; two free ones never touch
 *                                   |                                |
 *     bins, by size                 o                                o              free chunks of shared regions
 *
 * Nothing of ours lies in pinned memory. Blocks under 16 MiB are cut from shared regions; larger ones have a region of their own, which stays
 * pinned after the free and serves the next request that wastes little of it. A block is 64-byte aligned and rounded to 64 bytes; from a
 * page up it begins on a page, and what is left behind its end is free for small blocks; from 16 MiB up it is whole pages.
 */
#ifndef CORE_POOL_PRIVATE_H
#define CORE_POOL_PRIVATE_H

#include "fence.h"
#include "pages.h"
#include "pool.h"

#define POOL_GRAIN  ((size_t)64)
#define POOL_LARGE  ((size_t)16 << 20)
#define POOL_REGION ((size_t)64 << 20)

enum { POOL_BINS_LOG = 3, POOL_BINS = 64 + ((64 - 12) << POOL_BINS_LOG), POOL_BIN_WORDS = (POOL_BINS + 63) / 64 };

enum chunk_state {
    CHUNK_FREE,
    CHUNK_USED,
    CHUNK_PENDING, /* freed, waiting for its fences */
    CHUNK_LOST     /* freed, but a fence could not be recorded: never reused, nobody knows when it could be */
};

struct pool_fence { /* recorded where a block was freed; those of one stream get done in order */
    struct pool_fence *next;
    struct fence fence;
};

struct pool_chunk {
    struct pool_region *region;
    size_t offset, bytes;
    size_t asked; /* USED */
    enum chunk_state state;
    struct pool_chunk *before, *after; /* in the region */
    struct pool_chunk *prev, *next;    /* FREE and shared: its bin; PENDING: older, newer */
    struct pool_chunk *hash_next;      /* USED */
    struct pool_fence *fences;         /* PENDING */
};

struct pool_region {
    struct pool_region *prev, *next;
    struct pages pages; /* data, bytes; mapped by us where `registered` */
    bool registered;    /* false: from the driver's allocator */
    bool own;           /* holds one large block or none */
    size_t blocks;      /* chunks that are not free */
    struct pool_chunk *first;
};

struct side_pool {
    side_device *device;
    unsigned fork_generation;
    size_t budget, region_bytes;
    unsigned threads;
    bool huge, validate;
    bool by_choice; /* SIDE_POOL_DRIVER: nothing is registered, and that is no news */

    pthread_mutex_t mutex;  /* guards all below; never held while pages are touched, pinned or unpinned */
    pthread_cond_t changed; /* `growing` or `leaving` went down */
    struct pool_region *regions;
    struct pool_chunk *bins[POOL_BINS];
    uint64_t bin_bits[POOL_BIN_WORDS];
    struct pool_chunk **hash; /* USED blocks by address */
    size_t hash_size;         /* a power of two */
    struct pool_chunk *pending_first, *pending_last;
    struct pool_fence *fences_idle;

    size_t region_total; /* bytes in regions */
    size_t in_place;     /* bytes pinned by side_memory_pin */
    size_t stranded;     /* bytes that could not be unpinned: kept mapped, unused */
    size_t moving;       /* bytes being pinned or unpinned right now: they count against the budget */
    size_t leaving;      /* of those, being unpinned: worth waiting for */
    bool growing;        /* a shared region is being pinned: who needs one waits for it */
    bool refused;        /* registering is refused for good, or not wanted */
    bool refusal_logged, huge_last, registered_last;
    size_t granted, asked, pending, lost; /* `pending` includes `lost` */
    size_t peak;
    uint64_t used_count, region_count, ops;
    double pin_s;
};

static inline size_t pool_round(size_t bytes, size_t to)
{
    return (bytes + to - 1) / to * to;
}

static inline size_t pool_pinned(const struct side_pool *pool)
{
    return pool->region_total + pool->in_place + pool->stranded;
}

/* Bytes that may still be pinned, in whole pages. */
static inline size_t pool_left(const struct side_pool *pool)
{
    size_t counted = pool_pinned(pool) + pool->moving;
    return counted < pool->budget ? (pool->budget - counted) / PAGES_BYTES * PAGES_BYTES : 0;
}

struct pool_need {
    size_t asked, bytes; /* rounded */
    size_t align;
    bool own;
    struct pool_chunk *spare[2]; /* for the cuts, made before anything changes; left ones are freed by the caller */
};

/* pool_chunk.c; all with the mutex held. */
/* A free chunk becomes a USED block of need's; NULL where none fits. */
struct pool_chunk *chunk_find(struct side_pool *pool, struct pool_need *need);
/* The same from shared regions alone, whatever the size: the last resort of large blocks. */
struct pool_chunk *chunk_find_shared(struct side_pool *pool, struct pool_need *need);
struct pool_chunk *chunk_lookup(struct side_pool *pool, const void *data);
/* Takes a USED block out of the books; its state is the caller's to set. */
void chunk_retire(struct side_pool *pool, struct pool_chunk *chunk);
/* Any block becomes free and joins its neighbours. */
void chunk_release(struct side_pool *pool, struct pool_chunk *chunk);
/* One free chunk as large as the region. `spare` becomes it. */
void chunk_start(struct side_pool *pool, struct pool_region *region, struct pool_chunk *spare);
/* The opposite: an empty region's chunk leaves the bins and is freed. */
void chunk_finish(struct side_pool *pool, struct pool_region *region);
/* Every invariant. Slow. */
bool pool_is_valid(struct side_pool *pool);

static inline void *chunk_data(const struct pool_chunk *chunk)
{
    return (char *)chunk->region->pages.data + chunk->offset;
}

/* pool_pending.c; mutex held. */
/* A retired block waits for all that is queued on the streams so far. On failure it is lost. */
side_status pending_block(struct side_pool *pool, struct pool_chunk *chunk, side_stream *const *streams, size_t count);
/* Releases blocks whose fences are done. Gives up after `patience` blocks that are not (SIZE_MAX: looks at all). */
void pending_harvest(struct side_pool *pool, size_t patience);
/* Waits for the pending blocks; those that are not done by the deadline stay pending. For destroy: nobody else uses the pool. */
void pending_drain(struct side_pool *pool, uint64_t deadline_ns);
/* Destroys the idle events, and those of blocks still pending. */
void pending_finish(struct side_pool *pool);

/* pool_region.c; mutex held on entry and on return, released while pages move. */
/* Makes room for the need: SIDE_OK: look again. SIDE_OVER_BUDGET and what pinning may return otherwise. */
side_status region_grow(struct side_pool *pool, const struct pool_need *need);
/* Counts bytes that somebody else pins. */
side_status region_reserve(struct side_pool *pool, size_t bytes);
void region_unreserve(struct side_pool *pool, size_t bytes);
/* Unpins every empty region; returns how many bytes that gave back. */
size_t region_trim(struct side_pool *pool);
/* For destroy: forgets a region that holds blocks, and leaves it pinned. */
void region_abandon(struct side_pool *pool, struct pool_region *region);

#endif
