/* SPDX-License-Identifier: MIT
 *
 * A rig: a feeder on the software device, batches of pieces that lie in memory of their own, and what each must look like in its slot.
 *
 * Sources come from malloc, or are registered in place, one by one: they are scribbled over and freed as soon as the feeder says that it has read them, so that a late
 * read is wrong data, and a use after free that ASan reports. */
#ifndef FEED_HELP_H
#define FEED_HELP_H

#include "t.h"

#include "alloc.h"
#include "device.h"
#include "pool.h"
#include "sim.h"

#include <pthread.h>
#include <stdatomic.h>

#define PIECES_MOST  40
#define BATCHES_MOST 64
#define DIRECT_BYTES ((size_t)256 << 10)

enum feed_source { PAGEABLE, PINNED, MIXED };

struct feed_batch {
    side_feed_piece pieces[PIECES_MOST];
    bool pinned[PIECES_MOST];
    size_t count, end;
    unsigned char *image, *mask; /* of the slot: what it holds, and where that is said */
    unsigned char *seen;         /* pinned: what the reader saw */
};

struct feed_rig {
    side_device *dev;
    side_feeder *f;
    side_stream *reader;
    side_feeder_options o;
    struct feed_batch batches[BATCHES_MOST];
    size_t made;
    uint64_t freed;        /* batches whose sources are gone */
    pthread_mutex_t mutex; /* guards freed */
};

static inline side_device *feed_device(const char *keys, uint64_t seed)
{
    char spec[128];
    side_device *dev = NULL;

    setenv("LOCAL_WORLD_SIZE", "512", 1); /* a small pool, of small regions: new pages must be zeroed */
    pool_test_region_bytes = (size_t)128 << 10;
    snprintf(spec, sizeof(spec), "sim:h200,check=1,seed=%llu%s%s", (unsigned long long)seed, keys[0] != '\0' ? "," : "",
             keys);
    T_OK(side_device_open(spec, &dev));
    return dev;
}

/* Options may be changed before feed_start. */
static inline void feed_init(struct feed_rig *r, side_device *dev, size_t slot_bytes, uint32_t slots)
{
    memset(r, 0, sizeof(*r));
    r->dev = dev;
    r->o = (side_feeder_options)SIDE_FEEDER_OPTIONS_INIT;
    r->o.slot_bytes = slot_bytes;
    r->o.slots = slots;
    r->o.threads = 2;
    pthread_mutex_init(&r->mutex, NULL);
    T_OK(side_stream_create(dev, &r->reader));
}

static inline void feed_start(struct feed_rig *r)
{
    T_OK(side_feeder_create(r->dev, &r->o, &r->f));
}

static inline void *feed_pinned(struct feed_rig *r, size_t bytes)
{
    size_t whole = bytes / 4096 * 4096 + 4096;
    void *p = aligned_alloc(4096, whole);

    assert_non_null(p);
    memset(p, 0, whole);
    T_OK(r->dev->ops->host_register(r->dev->context, p, whole, false));
    return p;
}

static inline void feed_unpin(struct feed_rig *r, void *p)
{
    (void)r->dev->ops->host_unregister(r->dev->context, p); /* a lost device refuses */
    free(p);
}

/* One more piece of the batch, at `offset` of the slot. */
static inline void feed_piece(struct feed_rig *r, struct feed_batch *b, size_t offset, size_t bytes, bool pinned,
                              t_rng *rng)
{
    unsigned char *p = pinned ? feed_pinned(r, bytes) : malloc(bytes + (bytes == 0));

    assert_true(b->count < PIECES_MOST && offset + bytes <= r->o.slot_bytes);
    t_rng_fill(rng, p, bytes);
    b->pieces[b->count] = (side_feed_piece){p, bytes, offset};
    b->pinned[b->count++] = pinned;
    memcpy(b->image + offset, p, bytes);
    memset(b->mask + offset, 1, bytes);
    if (bytes != 0 && b->end < offset + bytes)
        b->end = offset + bytes;
}

static inline struct feed_batch *feed_batch_new(struct feed_rig *r)
{
    struct feed_batch *b = &r->batches[r->made++];

    assert_true(r->made <= BATCHES_MOST);
    memset(b, 0, sizeof(*b));
    b->image = calloc(1, r->o.slot_bytes);
    b->mask = calloc(1, r->o.slot_bytes);
    b->seen = feed_pinned(r, r->o.slot_bytes);
    return b;
}

/* Pieces of random sizes, gaps, kinds and order; large ones where the slot takes them. */
static inline struct feed_batch *feed_random(struct feed_rig *r, enum feed_source source, t_rng *rng)
{
    struct feed_batch *b = feed_batch_new(r);
    size_t at = 0, most = r->o.slot_bytes;

    while (b->count < PIECES_MOST && (b->end == 0 || !t_rng_chance(rng, 12))) {
        size_t gap = t_rng_chance(rng, 8) ? t_rng_below(rng, 9000) : t_rng_chance(rng, 2) ? t_rng_below(rng, 64) : 0;
        size_t bytes = t_rng_chance(rng, 3) ? DIRECT_BYTES + t_rng_below(rng, 9000) : t_rng_below(rng, 3000);
        at = b->end == 0 && gap >= most ? 0 : at + gap;
        if (at >= most)
            break;
        bytes = bytes < most - at ? bytes : most - at;
        bytes += bytes == 0 && b->end == 0;
        feed_piece(r, b, at, bytes, source == PINNED || (source == MIXED && t_rng_chance(rng, 2)), rng);
        at += bytes;
    }
    for (size_t i = 1; i < b->count && t_rng_chance(rng, 2); i++) { /* in any order */
        size_t k = t_rng_below(rng, i + 1);
        side_feed_piece piece = b->pieces[i];
        bool pinned = b->pinned[i];
        b->pieces[i] = b->pieces[k];
        b->pinned[i] = b->pinned[k];
        b->pieces[k] = piece;
        b->pinned[k] = pinned;
    }
    return b;
}

/* Sources of batches below `count`: gone. */
static inline void feed_free_sources(struct feed_rig *r, uint64_t count)
{
    pthread_mutex_lock(&r->mutex);
    for (; r->freed < count && r->freed < r->made; r->freed++) {
        struct feed_batch *b = &r->batches[r->freed];
        for (size_t i = 0; i < b->count; i++) {
            union {
                const void *from;
                void *to;
            } p = {b->pieces[i].data};
            memset(p.to, 0xEE, b->pieces[i].bytes);
            if (b->pinned[i])
                feed_unpin(r, p.to);
            else
                free(p.to);
        }
    }
    pthread_mutex_unlock(&r->mutex);
}

static inline side_status feed_submit(struct feed_rig *r, size_t i)
{
    uint64_t number = UINT64_MAX;
    side_status s = side_feeder_submit(r->f, r->batches[i].pieces, r->batches[i].count, &number);

    if (s == SIDE_OK)
        assert_int_equal(number, i);
    return s;
}

static inline void feed_sweep(struct feed_rig *r)
{
    uint64_t count;

    T_OK(side_feeder_copied(r->f, &count));
    feed_free_sources(r, count);
}

/* The reader's work: `ns` of computing, then a look at the whole slot. */
static inline void feed_read(struct feed_rig *r, const side_feed_item *item, side_stream *reader, uint64_t ns)
{
    struct feed_batch *b = &r->batches[item->number];
    side_op op = SIDE_OP_INIT;

    assert_int_equal(item->bytes, b->end);
    op.id = SIDE_OP_SPIN;
    op.dim[0] = ns;
    if (ns != 0)
        T_OK(side_op_async(reader, &op));
    T_OK(side_copy_async(reader, SIDE_COPY_D2H, b->seen, item->slot.data, item->bytes));
}

static inline void feed_give_back(struct feed_rig *r, const side_feed_item *item, side_stream *reader)
{
    T_OK(side_slots_release(side_feeder_slots(r->f), &item->slot, reader));
    T_OK(side_slots_give_back(side_feeder_slots(r->f), &item->slot));
}

static inline bool feed_is_right(const struct feed_batch *b)
{
    for (size_t i = 0; i < b->end; i++)
        if (b->mask[i] && b->seen[i] != b->image[i])
            return false;
    return true;
}

/* The first of batches first .. end - 1 that its reader saw wrong; `end`: none. */
static inline size_t feed_first_wrong(struct feed_rig *r, size_t first, size_t end)
{
    T_OK(side_stream_sync(r->reader, 0));
    while (first < end && feed_is_right(&r->batches[first]))
        first++;
    return first;
}

static inline void feed_right(struct feed_rig *r, size_t first, size_t end, int line)
{
    size_t bad = feed_first_wrong(r, first, end);

    if (bad < end)
        T_FAIL("line %d: batch %zu of %zu arrived wrong (%zu pieces, %zu bytes)", line, bad, end, r->batches[bad].count,
               r->batches[bad].end);
}
#define FEED_IS_RIGHT(rig, first, end) feed_right(rig, first, end, __LINE__)

/* All but the device; the feeder, if it is still there, must go without complaint. */
static inline void feed_finish(struct feed_rig *r)
{
    T_OK(side_feeder_destroy(r->f));
    feed_free_sources(r, r->made);
    side_stream_destroy(r->reader);
    for (size_t i = 0; i < r->made; i++) {
        feed_unpin(r, r->batches[i].seen);
        free(r->batches[i].image);
        free(r->batches[i].mask);
    }
    pthread_mutex_destroy(&r->mutex);
}

static inline void feed_close(side_device *dev)
{
    if (sim_violations(dev->context) != 0)
        T_FAIL("%llu times memory was freed under queued work", (unsigned long long)sim_violations(dev->context));
    side_device_close(dev);
}

#endif
