/* SPDX-License-Identifier: MIT
 *
 * A rig: a pipeline on the software device with everything around it, and the plain loop that says what it must give.
 *
 * The caller's memory comes from malloc, not from the library's seam, and is freed by rig_finish right after the run: a copy still in flight would then be a
 * use after free that ASan reports. Pinned memory is registered in place for the same reason. */
#ifndef PIPE_HELP_H
#define PIPE_HELP_H

#include "t.h"

#include "alloc.h"
#include "device.h"
#include "pool.h"
#include "sim.h"

#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

enum rig_source {
    FROM_PINNED,
    FROM_PAGEABLE,
    FROM_MIXED,
    FROM_PIECES,
    FROM_PINNED_PIECES,
    FROM_CALLBACK,
    FROM_FILE,
    FROM_COUNT
};
enum rig_sink { TO_NONE, TO_PINNED, TO_PAGEABLE, TO_MIXED, TO_CALLBACK, TO_FILE, TO_COUNT };
#define RIG_NEVER     UINT64_MAX
#define RIG_MAX_PARTS 6

struct rig {
    /* set by the test before rig_build */
    enum rig_source source;
    enum rig_sink sink;
    uint64_t n;
    size_t item_max, result_max;
    bool uniform; /* every item and result as large as it may be, every cost the same */
    uint64_t cost_ns;
    side_pipeline_options o;
    uint64_t source_stop, compute_stop, sink_stop; /* at this item the callback returns 77 */

    /* made by rig_build */
    side_device *dev;
    size_t *in_bytes, *out_bytes;
    uint64_t *costs;
    unsigned char *data; /* all items, packed */
    size_t *at;          /* where item i begins in it */
    side_block *blocks, *out_blocks;
    uint32_t *pieces;
    uint64_t block_count;
    unsigned char *arena; /* pinned */
    size_t arena_bytes, arena_used;
    void *trace; /* device: what compute saw, where there are no results */
    int in_fd, out_fd;
    uint64_t in_offset, out_offset;

    /* what happened */
    uint64_t computed, sunk;
    size_t device_used; /* after create */
    bool watch_memory;
    atomic_uint wrong; /* callbacks that saw something wrong */
};

static inline dev_context *rig_context(const struct rig *r)
{
    return r->dev->context;
}

/* Of an item in `trace`: ops want 16-byte aligned memory. */
static inline size_t rig_stride(const struct rig *r)
{
    return (r->item_max + 15) / 16 * 16;
}

static inline void rig_init(struct rig *r)
{
    memset(r, 0, sizeof(*r));
    r->o = (side_pipeline_options)SIDE_PIPELINE_OPTIONS_INIT;
    r->source_stop = r->compute_stop = r->sink_stop = RIG_NEVER;
    r->in_fd = r->out_fd = -1;
}

/* ---------------------------------------------------------------- the oracle */

static inline float rig_affine(float x)
{
    return 2.0f * x + 1.0f;
}

/* Byte j of result i: the item through affine, then the item again as it is, as often as it takes. */
static inline void rig_expect(const struct rig *r, uint64_t i, unsigned char *out, size_t bytes)
{
    const unsigned char *in = r->data + r->at[i];
    size_t first = bytes < r->in_bytes[i] ? bytes : r->in_bytes[i];

    for (size_t j = 0; j < bytes; j++)
        out[j] = in[j % r->in_bytes[i]];
    for (size_t j = 0; j + 4 <= first; j += 4) {
        float x;
        memcpy(&x, in + j, 4);
        x = rig_affine(x);
        memcpy(out + j, &x, 4);
    }
}

static inline bool rig_is_expected(const struct rig *r, uint64_t i, const void *data, size_t bytes)
{
    unsigned char *want = malloc(bytes + 1);
    rig_expect(r, i, want, bytes);
    bool same = memcmp(want, data, bytes) == 0;
    free(want);
    return same;
}

/* ---------------------------------------------------------------- callbacks */

static inline int rig_fill(void *user, uint64_t item, void *data, size_t capacity, size_t *bytes)
{
    struct rig *r = user;

    if (item == r->source_stop)
        return 77;
    if (capacity != r->item_max)
        atomic_fetch_add(&r->wrong, 1);
    *bytes = item < r->n ? r->in_bytes[item] : SIDE_NO_MORE;
    if (item < r->n)
        memcpy(data, r->data + r->at[item], r->in_bytes[item]);
    return 0;
}

static inline int rig_sunk(void *user, uint64_t item, const void *data, size_t bytes)
{
    struct rig *r = user;

    if (item == r->sink_stop)
        return 77;
    while (r->sunk < r->n && r->out_bytes[r->sunk] == 0) /* no result, no call */
        r->sunk++;
    if (item != r->sunk || item >= r->n || bytes != r->out_bytes[item] || !rig_is_expected(r, item, data, bytes))
        atomic_fetch_add(&r->wrong, 1);
    r->sunk = item + 1;
    return 0;
}

static inline side_status rig_op(side_stream *stream, const void *in, void *out, size_t floats, uint64_t ns)
{
    side_op op = SIDE_OP_INIT;

    op.id = floats != 0 ? SIDE_OP_AFFINE : SIDE_OP_SPIN;
    op.in[0] = floats != 0 ? in : NULL;
    op.out = floats != 0 ? out : NULL;
    op.dim[0] = floats != 0 ? floats : ns;
    op.scale = 2.0f;
    op.bias = 1.0f;
    op.sim_ns = ns;
    return side_op_async(stream, &op);
}

/* Queues what rig_expect does. */
static inline side_status rig_work(struct rig *r, side_stream *stream, side_item *item)
{
    uint64_t i = item->number;
    unsigned char *out = item->result;
    size_t want = r->out_bytes[i], bytes = item->bytes;
    side_status s;

    if (r->sink == TO_NONE) {
        out = (unsigned char *)r->trace + i * rig_stride(r);
        want = r->in_bytes[i];
    } else {
        item->result_bytes = want;
    }
    size_t first = bytes < want ? bytes : want;
    s = rig_op(stream, item->data, out, first / 4, r->costs[i]);
    for (size_t j = first / 4 * 4; s == SIDE_OK && j < want;) {
        size_t k = j % bytes, m = bytes - k < want - j ? bytes - k : want - j;
        s = side_copy_async(stream, SIDE_COPY_D2D, out + j, (const unsigned char *)item->data + k, m);
        j += m;
    }
    return s;
}

static inline int rig_compute(void *user, side_stream *stream, side_item *item)
{
    struct rig *r = user;
    size_t available, total;

    if (item->number == r->compute_stop)
        return 77;
    if (item->number != r->computed || item->bytes != r->in_bytes[item->number] ||
        item->result_bytes != r->o.result_bytes)
        atomic_fetch_add(&r->wrong, 1);
    r->computed++;
    if (r->watch_memory && side_device_get_memory(r->dev, &available, &total) == SIDE_OK &&
        total - available != r->device_used)
        atomic_fetch_add(&r->wrong, 1);
    return rig_work(r, stream, item) == SIDE_OK ? 0 : 78;
}

/* ---------------------------------------------------------------- build */

static inline void *rig_pinned(struct rig *r, size_t bytes)
{
    void *p = r->arena + r->arena_used;
    r->arena_used += (bytes + 15) / 16 * 16;
    assert_true(r->arena_used <= r->arena_bytes);
    return p;
}

static inline void rig_arena(struct rig *r, size_t bytes)
{
    r->arena_bytes = (bytes + 4095) / 4096 * 4096 + 4096;
    r->arena = aligned_alloc(4096, r->arena_bytes);
    /* Refused: then the memory is pageable, which must work as well. */
    (void)r->dev->ops->host_register(rig_context(r), r->arena, r->arena_bytes, false);
}

static inline void rig_sizes(struct rig *r, t_rng *rng)
{
    size_t total = 0;

    r->in_bytes = calloc(r->n + 1, sizeof(*r->in_bytes));
    r->out_bytes = calloc(r->n + 1, sizeof(*r->out_bytes));
    r->costs = calloc(r->n + 1, sizeof(*r->costs));
    r->at = calloc(r->n + 1, sizeof(*r->at));
    for (uint64_t i = 0; i < r->n; i++) {
        bool whole = r->uniform || (r->source == FROM_FILE && i + 1 < r->n) || t_rng_chance(rng, 3);
        r->in_bytes[i] = whole ? r->item_max : 1 + t_rng_below(rng, r->item_max);
        if (r->sink != TO_NONE)
            r->out_bytes[i] = r->uniform || t_rng_chance(rng, 3) ? r->result_max
                              : t_rng_chance(rng, 6)             ? 0
                                                                 : 1 + t_rng_below(rng, r->result_max);
        r->costs[i] = r->uniform ? r->cost_ns : 1 + t_rng_below(rng, 60000);
        r->at[i] = total;
        total += r->in_bytes[i];
    }
    r->data = malloc(total + 1);
    for (uint64_t i = 0; i < r->n; i++) {
        unsigned char *p = r->data + r->at[i];
        t_rng_fill(rng, p, r->in_bytes[i]);
        for (size_t j = 0; j + 4 <= r->in_bytes[i]; j += 4) {
            float x = (float)((i * 4099 + j) % 65536);
            memcpy(p + j, &x, 4);
        }
    }
}

static inline void rig_block(struct rig *r, const unsigned char *from, size_t bytes, bool pinned)
{
    side_block *b = &r->blocks[r->block_count++];
    b->bytes = bytes;
    b->data = bytes == 0 ? NULL : pinned ? rig_pinned(r, bytes) : malloc(bytes);
    if (bytes != 0)
        memcpy(b->data, from, bytes);
}

static inline bool rig_is_arena(const struct rig *r, const void *p)
{
    return (uintptr_t)p - (uintptr_t)r->arena < r->arena_bytes;
}

static inline void rig_blocks(struct rig *r, t_rng *rng)
{
    bool many = r->source == FROM_PIECES || r->source == FROM_PINNED_PIECES;

    r->blocks = calloc(r->n * RIG_MAX_PARTS + 1, sizeof(*r->blocks));
    r->pieces = calloc(r->n + 1, sizeof(*r->pieces));
    for (uint64_t i = 0; i < r->n; i++) {
        size_t left = r->in_bytes[i];
        uint32_t parts = many ? 1 + (uint32_t)t_rng_below(rng, RIG_MAX_PARTS) : 1;
        r->pieces[i] = parts;
        for (uint32_t k = 0; k < parts; k++) {
            bool pinned = r->source == FROM_PINNED || r->source == FROM_PINNED_PIECES ||
                          (r->source != FROM_PAGEABLE && t_rng_chance(rng, 2));
            size_t bytes = k + 1 == parts ? left : t_rng_chance(rng, 4) ? 0 : t_rng_below(rng, left + 1);
            rig_block(r, r->data + r->at[i] + r->in_bytes[i] - left, bytes, pinned);
            left -= bytes;
        }
    }
    r->o.source = many ? side_source_items(r->blocks, r->pieces, r->n) : side_source_blocks(r->blocks, r->n);
}

static inline int rig_file(void)
{
    int fd = memfd_create("rig", MFD_CLOEXEC);
    assert_true(fd >= 0);
    return fd;
}

static inline void rig_make_source(struct rig *r, t_rng *rng)
{
    size_t total = r->n > 0 ? r->at[r->n - 1] + r->in_bytes[r->n - 1] : 0;

    if (r->source == FROM_CALLBACK) {
        r->o.source = side_source_callback(rig_fill, r);
    } else if (r->source == FROM_FILE) {
        r->in_offset = t_rng_below(rng, 100);
        r->in_fd = rig_file();
        assert_int_equal(pwrite(r->in_fd, r->data, total, (off_t)r->in_offset), total);
        r->o.source = side_source_file(r->in_fd, r->in_offset, total);
    } else {
        rig_blocks(r, rng);
    }
}

static inline void rig_make_sink(struct rig *r, t_rng *rng)
{
    if (r->sink == TO_CALLBACK) {
        r->o.sink = side_sink_callback(rig_sunk, r);
    } else if (r->sink == TO_FILE) {
        r->out_offset = t_rng_below(rng, 100);
        r->out_fd = rig_file();
        r->o.sink = side_sink_file(r->out_fd, r->out_offset);
    } else if (r->sink != TO_NONE) {
        r->out_blocks = calloc(r->n + 1, sizeof(*r->out_blocks));
        for (uint64_t i = 0; i < r->n; i++) {
            bool pinned = r->sink == TO_PINNED || (r->sink == TO_MIXED && t_rng_chance(rng, 2));
            size_t bytes = r->out_bytes[i];
            void *p = bytes == 0 ? NULL : pinned ? rig_pinned(r, bytes) : malloc(bytes);
            r->out_blocks[i] = (side_block){p, bytes};
        }
        r->o.sink = side_sink_blocks(r->out_blocks, r->n);
    }
}

/* Memory and options for the device; no pipeline yet. */
static inline void rig_build(struct rig *r, side_device *dev, t_rng *rng)
{
    r->dev = dev;
    rig_sizes(r, rng);
    rig_arena(r, (r->n + 1) * (r->item_max + r->result_max + 32 * RIG_MAX_PARTS));
    rig_make_source(r, rng);
    rig_make_sink(r, rng);
    r->o.item_bytes = r->item_max;
    r->o.result_bytes = r->sink == TO_NONE ? 0 : r->result_max;
    r->o.compute = rig_compute;
    r->o.compute_user = r;
    if (r->sink == TO_NONE)
        T_OK(side_device_alloc(dev, r->n * rig_stride(r) + 1, &r->trace));
}

/* What a pass begins with. */
static inline void rig_reset(struct rig *r)
{
    r->computed = r->sunk = 0;
    for (uint64_t i = 0; r->out_blocks != NULL && i < r->n; i++)
        if (r->out_blocks[i].bytes != 0)
            memset(r->out_blocks[i].data, 0xA5, r->out_blocks[i].bytes);
    if (r->out_fd >= 0)
        assert_int_equal(ftruncate(r->out_fd, 0), 0);
}

/* ---------------------------------------------------------------- check */

static inline void rig_read_trace(const struct rig *r, unsigned char *to, size_t bytes)
{
    side_stream *s;

    T_OK(side_stream_create(r->dev, &s));
    T_OK(side_copy_async(s, SIDE_COPY_D2H, to, r->trace, bytes));
    T_OK(side_stream_sync(s, 0));
    side_stream_destroy(s);
}

/* The first of results 0..count-1 that is not what the plain loop gives; RIG_NEVER: all are. */
static inline uint64_t rig_first_wrong(struct rig *r, uint64_t count)
{
    uint64_t bad = RIG_NEVER, position = r->out_offset;
    unsigned char *seen = malloc((r->n + 1) * (rig_stride(r) + r->result_max) + 1);

    if (r->sink == TO_NONE && r->n > 0)
        rig_read_trace(r, seen, r->n * rig_stride(r));
    for (uint64_t i = 0; i < count && bad == RIG_NEVER; i++) {
        const unsigned char *got = seen;
        size_t bytes = r->out_bytes[i];
        if (r->sink == TO_CALLBACK)
            continue; /* looked at it itself */
        if (r->sink == TO_NONE) {
            got = seen + i * rig_stride(r);
            bytes = r->in_bytes[i];
        } else if (r->sink == TO_FILE) {
            if (pread(r->out_fd, seen, bytes, (off_t)position) != (ssize_t)bytes)
                bad = i;
            position += bytes;
        } else {
            got = r->out_blocks[i].data;
        }
        if (bad == RIG_NEVER && bytes != 0 && !rig_is_expected(r, i, got, bytes))
            bad = i;
    }
    if (r->sink == TO_CALLBACK && bad == RIG_NEVER) {
        while (r->sunk < count && r->out_bytes[r->sunk] == 0)
            r->sunk++;
        bad = r->sunk < count ? r->sunk : RIG_NEVER;
    }
    free(seen);
    return bad != RIG_NEVER ? bad : atomic_load(&r->wrong) != 0 ? 0 : RIG_NEVER;
}

#define RIG_IS_RIGHT(r, count)                                                                            \
    do {                                                                                                  \
        uint64_t bad_ = rig_first_wrong(r, count);                                                        \
        if (bad_ != RIG_NEVER)                                                                            \
            T_FAIL("result %llu of %llu is wrong (source %d, sink %d, %u callbacks saw something wrong)", \
                   (unsigned long long)bad_, (unsigned long long)(r)->n, (r)->source, (r)->sink,          \
                   atomic_load(&(r)->wrong));                                                             \
    } while (0)

/* Frees the caller's memory, at once: nothing may be in flight. */
static inline void rig_finish(struct rig *r)
{
    if (r->arena != NULL)
        (void)r->dev->ops->host_unregister(rig_context(r), r->arena);
    side_device_free(r->dev, r->trace);
    for (uint64_t i = 0; i < r->block_count; i++)
        if (!rig_is_arena(r, r->blocks[i].data))
            free(r->blocks[i].data);
    for (uint64_t i = 0; r->out_blocks != NULL && i < r->n; i++)
        if (!rig_is_arena(r, r->out_blocks[i].data))
            free(r->out_blocks[i].data);
    free(r->arena);
    free(r->blocks);
    free(r->out_blocks);
    free(r->pieces);
    free(r->data);
    free(r->at);
    free(r->in_bytes);
    free(r->out_bytes);
    free(r->costs);
    if (r->in_fd >= 0)
        close(r->in_fd);
    if (r->out_fd >= 0)
        close(r->out_fd);
}

/* Staging comes from the device's pool. New pages must be zeroed, so small regions (and few threads) keep the time of a device's life small. */
static inline void rig_small_pool(void)
{
    setenv("LOCAL_WORLD_SIZE", "512", 1);
    pool_test_region_bytes = (size_t)128 << 10;
}

static inline side_device *rig_device(const char *keys, uint64_t seed)
{
    char spec[160];
    side_device *dev;

    snprintf(spec, sizeof(spec), "sim:h200,check=1,seed=%llu%s%s", (unsigned long long)seed, keys[0] != '\0' ? "," : "",
             keys);
    T_OK(side_device_open(spec, &dev));
    return dev;
}

static inline void rig_close(side_device *dev)
{
    if (sim_violations(dev->context) != 0)
        T_FAIL("%llu blocks were freed or unpinned under queued work", (unsigned long long)sim_violations(dev->context));
    side_device_close(dev);
}

#endif
