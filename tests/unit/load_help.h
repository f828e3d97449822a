/* SPDX-License-Identifier: MIT
 *
 * A rig: loads on the software device from a safetensors file of random tensors, or from sources in memory, and what each part must be. */
#ifndef LOAD_HELP_H
#define LOAD_HELP_H

#include "t.h"

#include "alloc.h"
#include "device.h"
#include "fence.h"
#include "io.h"
#include "os.h"
#include "pool.h"
#include "sim.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#define TENSORS_MOST 64
#define PARTS_MOST   128
#define IMAGE_MOST   ((size_t)1 << 20)

struct load_rig {
    side_device *dev;
    side_stream *stream; /* that reads parts */
    side_checkpoint *ck; /* NULL: sources */
    side_load *load;
    side_load_options o;
    char path[300];
    unsigned char *image[TENSORS_MOST]; /* of each tensor or source */
    size_t bytes[TENSORS_MOST];
    size_t tensors;
    side_load_part parts[PARTS_MOST];
    side_load_source sources[TENSORS_MOST];
    void *given[TENSORS_MOST]; /* arenas of ours */
    size_t given_count;
    unsigned char *own;  /* memory for parts with `data` */
    unsigned char *seen; /* pinned: what the stream saw */
    size_t seen_bytes;
    atomic_uint calls;  /* of the callback */
    unsigned fail_call; /* that fails; 0: none */
};

static inline side_device *load_device(const char *keys, uint64_t seed)
{
    char spec[128];
    side_device *dev = NULL;

    setenv("LOCAL_WORLD_SIZE", "512", 1); /* a small pool, of small regions: new pages must be zeroed */
    pool_test_region_bytes = (size_t)256 << 10;
    snprintf(spec, sizeof(spec), "sim:h200,check=1,seed=%llu%s%s", (unsigned long long)seed, keys[0] != '\0' ? "," : "",
             keys);
    T_OK(side_device_open(spec, &dev));
    return dev;
}

static inline int load_read(void *user, uint64_t source, uint64_t offset, void *buffer, size_t bytes)
{
    struct load_rig *r = user;
    unsigned call = atomic_fetch_add(&r->calls, 1) + 1;

    if (source >= r->tensors || offset + bytes > r->bytes[source])
        T_FAIL("source %llu, %zu bytes at %llu", (unsigned long long)source, bytes, (unsigned long long)offset);
    if (call == r->fail_call)
        return 7;
    memcpy(buffer, r->image[source] + offset, bytes);
    return 0;
}

/* Sizes of all kinds: none, odd, of pages, of many pieces. */
static inline size_t load_size(t_rng *rng)
{
    switch (t_rng_below(rng, 6)) {
    case 0: return 0;
    case 1: return t_rng_below(rng, 100);
    case 2: return 16 * t_rng_below(rng, 200);
    case 3: return 4096 * t_rng_below(rng, 5);
    case 4: return 1000 + t_rng_below(rng, 30000);
    default: return t_rng_below(rng, 3000);
    }
}

static inline void load_images(struct load_rig *r, size_t tensors, t_rng *rng)
{
    r->tensors = tensors;
    for (size_t i = 0; i < tensors; i++) {
        r->bytes[i] = load_size(rng);
        r->image[i] = malloc(r->bytes[i] + 1);
        t_rng_fill(rng, r->image[i], r->bytes[i]);
    }
}

/* All of them as one file, header and all; `pad` shifts the data. */
static inline void load_file_write(struct load_rig *r, size_t pad)
{
    char *header = calloc(1, 200 * (r->tensors + 1));
    size_t n = 1, at = 0;

    header[0] = '{';
    for (size_t i = 0; i < r->tensors; i++) {
        n += (size_t)sprintf(header + n, "%s\"t%zu\":{\"dtype\":\"U8\",\"shape\":[%zu],\"data_offsets\":[%zu,%zu]}",
                             i > 0 ? "," : "", i, r->bytes[i], at, at + r->bytes[i]);
        at += r->bytes[i];
    }
    header[n++] = '}';
    memset(header + n, ' ', pad);
    n += pad;
    snprintf(r->path, sizeof(r->path), "%s/load.safetensors", t_tmpdir());
    FILE *f = fopen(r->path, "wb");
    const uint64_t length = n;
    assert_non_null(f);
    assert_int_equal(fwrite(&length, 8, 1, f), 1);
    assert_int_equal(fwrite(header, 1, n, f), n);
    for (size_t i = 0; i < r->tensors; i++)
        assert_int_equal(fwrite(r->image[i], 1, r->bytes[i], f), r->bytes[i]);
    assert_int_equal(fclose(f), 0);
    free(header);
}

/* Tensor i of the checkpoint is image i: they are sorted by offset, but empty ones may stand in another order. */
static inline void load_rig_init(struct load_rig *r, side_device *dev, bool file, size_t tensors, t_rng *rng)
{
    memset(r, 0, sizeof(*r));
    r->dev = dev;
    r->o = (side_load_options)SIDE_LOAD_OPTIONS_INIT;
    r->o.piece_bytes = 4096;
    r->o.pinned_bytes = 4 * 4096;
    r->o.threads = 2;
    load_images(r, tensors, rng);
    if (file) {
        load_file_write(r, t_rng_below(rng, 20));
        T_OK(side_checkpoint_open(r->path, NULL, &r->ck));
        assert_int_equal(side_checkpoint_count(r->ck), tensors);
    } else {
        for (size_t i = 0; i < tensors; i++)
            r->sources[i] = (side_load_source){"memory", r->bytes[i]};
        r->o.sources = r->sources;
        r->o.source_count = tensors;
        r->o.read = load_read;
        r->o.read_user = r;
    }
    r->seen_bytes = IMAGE_MOST;
    void *seen = NULL;
    T_OK(dev->ops->host_alloc(dev->context, r->seen_bytes, &seen));
    r->seen = seen;
    T_OK(side_stream_create(dev, &r->stream));
}

static inline bool load_on_device(const struct load_rig *r)
{
    return r->o.where == SIDE_MEMORY_DEVICE;
}

static inline side_status load_memory_get(struct load_rig *r, size_t bytes, void **data)
{
    if (load_on_device(r))
        return side_device_alloc(r->dev, bytes + 4096, data);
    *data = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    assert_non_null(*data);
    return SIDE_OK;
}

static inline void load_memory_free(struct load_rig *r, void *p)
{
    if (load_on_device(r))
        side_device_free(r->dev, p);
    else
        free(p);
}

/* Random slices of random tensors, some of them to memory of the caller's. */
static inline void load_parts(struct load_rig *r, size_t count, bool own, t_rng *rng)
{
    size_t at = 0;

    r->o.parts = r->parts;
    r->o.count = count;
    if (own) {
        void *memory = NULL;
        T_OK(load_memory_get(r, IMAGE_MOST, &memory));
        r->own = memory;
    }
    for (size_t i = 0; i < count; i++) {
        side_load_part *p = &r->parts[i];
        p->tensor = t_rng_below(rng, r->tensors);
        if (t_rng_chance(rng, 2)) {
            p->begin = t_rng_below(rng, r->bytes[p->tensor] + 1);
            p->bytes = t_rng_below(rng, r->bytes[p->tensor] - p->begin + 1);
        }
        size_t bytes = p->bytes != 0 ? p->bytes : r->bytes[p->tensor] - p->begin;
        if (own && t_rng_chance(rng, 2) && at + bytes < IMAGE_MOST) {
            p->data = r->own + at;
            at += bytes + t_rng_below(rng, 3) * 8;
        }
    }
}

static inline side_status load_give(struct load_rig *r)
{
    for (size_t i = 0; i < side_load_arenas(r->load); i++) {
        side_load_arena a;
        T_OK(side_load_get_arena(r->load, i, &a));
        assert_null(a.data);
        side_status given = load_memory_get(r, a.bytes, &r->given[i]);
        if (given != SIDE_OK)
            return given;
        r->given_count = i + 1;
        uintptr_t at = ((uintptr_t)r->given[i] + 4095) / 4096 * 4096;
        side_status s = side_load_give_arena(r->load, i, (void *)at, i % 2 == 0 ? NULL : r->stream);
        if (s != SIDE_OK)
            return s;
    }
    return SIDE_OK;
}

/* What part i must be. */
static inline const unsigned char *load_want(const struct load_rig *r, size_t i, size_t *bytes)
{
    if (r->o.parts == NULL) {
        *bytes = r->bytes[i];
        return r->image[i];
    }
    const side_load_part *p = &r->parts[i];
    *bytes = p->bytes != 0 ? p->bytes : r->bytes[p->tensor] - p->begin;
    return r->image[p->tensor] + p->begin;
}

/* Waits for each part in a random order, and looks at it on the stream. */
static inline side_status load_look(struct load_rig *r, t_rng *rng)
{
    size_t count = side_load_count(r->load), first = count > 0 ? t_rng_below(rng, count) : 0, at[PARTS_MOST], end = 0;

    for (size_t k = 0; k < count; k++) {
        size_t i = (first + k) % count, bytes;
        side_load_place place;
        side_status s = side_load_wait(r->load, i, load_on_device(r) ? r->stream : NULL);
        if (s != SIDE_OK)
            return s;
        T_OK(side_load_get_place(r->load, i, &place));
        (void)load_want(r, i, &bytes);
        assert_int_equal(place.bytes, bytes);
        if (place.arena != SIZE_MAX)
            assert_int_equal(place.offset % (r->o.align != 0 ? r->o.align : 16), 0);
        assert_true(bytes == 0 || place.data != NULL);
        at[i] = end;
        end += bytes;
        assert_true(end <= r->seen_bytes);
        if (load_on_device(r) && bytes > 0)
            T_OK(side_copy_async(r->stream, SIDE_COPY_D2H, r->seen + at[i], place.data, bytes));
        else if (bytes > 0)
            memcpy(r->seen + at[i], place.data, bytes);
    }
    T_OK(side_stream_sync(r->stream, 0));
    for (size_t i = 0; i < count; i++) {
        size_t bytes;
        const unsigned char *want = load_want(r, i, &bytes);
        if (memcmp(r->seen + at[i], want, bytes) != 0)
            return SIDE_STALE; /* no status of a load's */
    }
    return SIDE_OK;
}

static inline void load_rig_finish(struct load_rig *r)
{
    T_OK(side_load_destroy(r->load));
    if (r->ck != NULL)
        side_checkpoint_close(r->ck);
    for (size_t i = 0; i < r->given_count; i++)
        load_memory_free(r, r->given[i]);
    if (r->own != NULL)
        load_memory_free(r, r->own);
    for (size_t i = 0; i < r->tensors; i++)
        free(r->image[i]);
    side_stream_destroy(r->stream);
    r->dev->ops->host_free(r->dev->context, r->seen);
    if (r->path[0] != '\0')
        unlink(r->path);
}

static inline void load_close(side_device *dev)
{
    if (sim_violations(dev->context) != 0)
        T_FAIL("%llu times memory was freed under queued work", (unsigned long long)sim_violations(dev->context));
    side_device_close(dev);
}

#endif
