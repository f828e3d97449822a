/* SPDX-License-Identifier: MIT
 *
 * Every device: what it says of itself, its memory, pinned memory, many users at once. */
#include "conform.h"

#include <pthread.h>

/* ---------------------------------------------------------------- facts */

T_TEST(properties_are_sane)
{
    struct rig r = rig_open();
    const side_device_props *p = &r.props;
    side_link link;
    size_t free_bytes = 0, total = 0;

    assert_int_equal(p->simulated, strncmp(t_arg(), "sim", 3) == 0);
    assert_int_equal(strncmp(p->spec, p->simulated ? "sim" : "cuda:", p->simulated ? 3 : 5), 0);
    assert_int_equal(strncmp(p->name, "simulated", 9) == 0, p->simulated);
    assert_true(strlen(p->name) > 3);
    assert_true(p->ordinal >= 0);
    assert_true(p->copy_engines == 1 || p->copy_engines == 2);
    assert_true(p->multiprocessors > 0);
    assert_true(p->compute_major * 10 + p->compute_minor >= 75);
    assert_true(p->memory_bytes >= ((size_t)1 << 30));
    assert_true(p->numa_node >= -1);
    assert_true(p->kernels_from[0] != '\0');
    if (r.gpu) {
        assert_true(p->driver_version >= 12020);
        assert_int_equal(strncmp(p->uuid, "GPU-", 4), 0);
        assert_int_equal(strlen(p->uuid), 40);
        assert_int_equal(strlen(p->pci), strlen("0000:0a:00.0"));
    } else {
        assert_int_equal(p->driver_version, 0);
        assert_true(p->kernels);
    }
    if (strcmp(t_arg(), "sim:one-copy-engine") == 0)
        assert_int_equal(p->copy_engines, 1);

    T_OK(side_device_get_link(r.device, &link));
    assert_true(link.kind[0] != '\0');
    assert_true(link.peak_gbps >= 0);
    assert_true(link.generation <= link.max_generation || link.max_generation == 0);
    assert_true(link.width <= link.max_width || link.max_width == 0);
    if (strcmp(t_arg(), "sim:gh200") == 0)
        assert_string_equal(link.kind, "NVLink-C2C");

    T_OK(side_device_get_memory(r.device, &free_bytes, &total));
    assert_true(free_bytes > 0 && free_bytes <= total);
    assert_true(total <= p->memory_bytes + p->memory_bytes / 16 && total >= p->memory_bytes / 2);
    T_OK(side_device_get_memory(r.device, NULL, NULL));

    uint64_t then = side_device_now_ns(r.device);
    assert_true(side_device_now_ns(r.device) >= then);
    T_STATUS(side_device_get_props(r.device, NULL), SIDE_INVALID);
    T_STATUS(side_device_get_props(NULL, &r.props), SIDE_INVALID);
    T_STATUS(side_device_get_link(r.device, NULL), SIDE_INVALID);
    rig_close(&r);
}

T_TEST(the_spec_reopens_the_device)
{
    struct rig r = rig_open();
    side_device *again = NULL;
    side_device_props props;

    T_OK(side_device_open(r.props.spec, &again));
    T_OK(side_device_get_props(again, &props));
    assert_string_equal(props.spec, r.props.spec);
    assert_string_equal(props.name, r.props.name);
    assert_int_equal(props.copy_engines, r.props.copy_engines);
    side_device_close(again);
    rig_close(&r);
}

T_TEST(bad_specs_are_refused)
{
    side_device *device = NULL;
    const char *spec = t_arg();
    char text[80];

    side_device_close(device_open_or_skip(spec)); /* skips where there is no GPU */
    snprintf(text, sizeof(text), "%s%s", spec, strncmp(spec, "cuda", 4) == 0 ? ":x" : strchr(spec, ':') ? ",x" : ":x");
    T_STATUS(side_device_open(text, &device), SIDE_INVALID);
    assert_null(device);
    assert_true(strlen(side_last_error()->message) > 10);
    if (strncmp(spec, "cuda", 4) == 0)
        T_STATUS(side_device_open("cuda:9999", &device), SIDE_NO_DEVICE);
    T_STATUS(side_device_open("gpu", &device), SIDE_INVALID);
    assert_null(device);
    side_device_close(NULL);
}

/* What one handle does is no business of the other's. */
T_TEST(a_device_opens_twice)
{
    struct rig r = rig_open();
    enum { BYTES = 1 << 20 };
    side_device *second = NULL;
    void *first_data = device_make(r.device, BYTES);
    unsigned char *host = host_make(BYTES);

    T_OK(side_device_open(t_arg(), &second));
    side_stream *stream = stream_make(second);
    void *data = device_make(second, BYTES);
    side_event *foreign = event_make(r.device, false);
    T_OK(side_memset_async(stream, data, 3, BYTES));
    T_OK(side_memset_async(r.stream, first_data, 4, BYTES));
    T_STATUS(side_stream_wait(stream, foreign), SIDE_INVALID);
    T_STATUS(side_event_record(foreign, stream), SIDE_INVALID);
    sync_stream(stream);
    side_event_destroy(foreign);
    side_device_free(second, data);
    side_stream_destroy(stream);
    side_device_close(second);

    T_OK(side_copy_async(r.stream, SIDE_COPY_D2H, host, first_data, BYTES));
    sync_stream(r.stream);
    assert_int_equal(host[BYTES - 1], 4);
    side_device_free(r.device, first_data);
    free(host);
    rig_close(&r);
}

/* ---------------------------------------------------------------- device memory */

T_TEST(memory_kinds_are_told)
{
    struct rig r = rig_open();
    side_memory_kind kind = SIDE_MEMORY_DEVICE;
    char *pageable = host_make(64 * KIB), *pinned = pinned_make(r.device, 64 * KIB),
         *device = device_make(r.device, 64 * KIB);

    T_OK(side_memory_get_kind(r.device, pageable, &kind));
    assert_int_equal(kind, SIDE_MEMORY_PAGEABLE);
    T_OK(side_memory_get_kind(r.device, pinned, &kind));
    assert_int_equal(kind, SIDE_MEMORY_PINNED);
    T_OK(side_memory_get_kind(r.device, pinned + 64 * KIB - 1, &kind));
    assert_int_equal(kind, SIDE_MEMORY_PINNED);
    T_OK(side_memory_get_kind(r.device, device, &kind));
    assert_int_equal(kind, SIDE_MEMORY_DEVICE);
    T_OK(side_memory_get_kind(r.device, device + 64 * KIB - 1, &kind));
    assert_int_equal(kind, SIDE_MEMORY_DEVICE);
    T_OK(side_memory_get_kind(r.device, &kind, &kind));
    assert_int_equal(kind, SIDE_MEMORY_PAGEABLE);
    T_STATUS(side_memory_get_kind(r.device, NULL, &kind), SIDE_INVALID);
    free(pageable);
    pinned_free(r.device, pinned);
    side_device_free(r.device, device);
    rig_close(&r);
}

T_TEST(allocations_are_aligned_and_apart)
{
    struct rig r = rig_open();
    enum { COUNT = 24 };
    unsigned char *data[COUNT], host[64];
    size_t bytes[COUNT];

    for (size_t i = 0; i < COUNT; i++) {
        bytes[i] = i % 3 == 0 ? i + 1 : i % 3 == 1 ? i * 1000 : i * 100 * KIB;
        data[i] = device_make(r.device, bytes[i]);
        assert_int_equal((uintptr_t)data[i] % 256, 0);
        T_OK(side_memset_async(r.stream, data[i], (int)i + 1, bytes[i]));
    }
    for (size_t i = 0; i < COUNT; i++) {
        T_OK(side_copy_async(r.stream, SIDE_COPY_D2H, host, data[i], 1));
        T_OK(side_copy_async(r.stream, SIDE_COPY_D2H, host + 1, data[i] + bytes[i] - 1, 1));
        sync_stream(r.stream);
        assert_int_equal(host[0], i + 1);
        assert_int_equal(host[1], i + 1);
    }
    for (size_t i = 0; i < COUNT; i++)
        side_device_free(r.device, data[i]);
    side_device_free(r.device, NULL);
    T_STATUS(side_device_alloc(r.device, 0, (void **)&data[0]), SIDE_INVALID);
    T_STATUS(side_device_alloc(r.device, 1, NULL), SIDE_INVALID);
    rig_close(&r);
}

static void check_usable(struct rig *r)
{
    enum { BYTES = 256 * 1024 };
    unsigned char *host = pinned_make(r->device, BYTES);
    float *device = device_make(r->device, BYTES);

    T_OK(side_memset_async(r->stream, device, 0, BYTES));
    affine_async(r->stream, device, device, BYTES, 1.0f, 2.0f);
    T_OK(side_copy_async(r->stream, SIDE_COPY_D2H, host, device, BYTES));
    sync_stream(r->stream);
    assert_true(((float *)(void *)host)[BYTES / sizeof(float) - 1] == 2.0f);
    pinned_free(r->device, host);
    side_device_free(r->device, device);
}

T_TEST(out_of_device_memory_is_survived)
{
    struct rig r = rig_open();
    size_t free_bytes = 0, total = 0, after = 0;
    void *data = NULL, *half = NULL;
    side_pipeline_options o = SIDE_PIPELINE_OPTIONS_INIT;
    side_pipeline *p = NULL;
    char text[8];
    side_block block = {text, sizeof(text)};

    check_usable(&r);
    T_OK(side_device_get_memory(r.device, &free_bytes, &total));
    for (int i = 0; i < 3; i++) {
        T_STATUS(side_device_alloc(r.device, total * 2, &data), SIDE_NO_DEVICE_MEMORY);
        assert_null(data);
        assert_true(strpbrk(side_last_error()->message, "0123456789") != NULL); /* how much is free */
    }
    /* really full, not only asked for too much */
    T_OK(side_device_alloc(r.device, free_bytes / 8 * 5, &half));
    T_STATUS(side_device_alloc(r.device, free_bytes / 8 * 5, &data), SIDE_NO_DEVICE_MEMORY);
    assert_null(data);
    check_usable(&r);
    /* a pipeline that does not fit says so and leaves nothing behind */
    o.item_bytes = free_bytes / 4;
    o.source = side_source_blocks(&block, 1);
    T_STATUS(side_pipeline_create(r.device, &o, &p), SIDE_NO_DEVICE_MEMORY);
    assert_null(p);
    side_device_free(r.device, half);
    T_OK(side_device_get_memory(r.device, &after, NULL));
    assert_true(after + 512 * MIB > free_bytes); /* other processes may use the GPU, too */
    check_usable(&r);
    rig_close(&r);
}

/* ---------------------------------------------------------------- pinned memory */

T_TEST(the_pool_gives_pinned_memory)
{
    struct rig r = rig_open();
    side_pool *pool = NULL;
    side_pool_stats stats;
    enum { COUNT = 40 };
    unsigned char *blocks[COUNT];
    size_t bytes[COUNT];
    side_memory_kind kind;
    side_pool_options o = SIDE_POOL_OPTIONS_INIT;
    unsigned char *device = device_make(r.device, 20 * MIB);

    o.budget_bytes = 192 * MIB;
    T_OK(side_pool_create(r.device, &o, &pool));
    for (size_t i = 0; i < COUNT; i++) {
        bytes[i] = i == 7       ? 20 * MIB
                   : i % 4 == 0 ? 1 + i
                   : i % 4 == 1 ? 4 * KIB * i
                   : i % 4 == 2 ? 100 * i
                                : 300 * KIB + i;
        T_OK(side_pool_alloc(pool, bytes[i], (void **)&blocks[i]));
        assert_int_equal((uintptr_t)blocks[i] % (bytes[i] >= 4096 ? 4096 : 64), 0);
        T_OK(side_memory_get_kind(r.device, blocks[i], &kind));
        assert_int_equal(kind, SIDE_MEMORY_PINNED);
        T_OK(side_memory_get_kind(r.device, blocks[i] + bytes[i] - 1, &kind));
        assert_int_equal(kind, SIDE_MEMORY_PINNED);
        memset(blocks[i], (int)i, bytes[i]);
    }
    for (size_t i = 0; i < COUNT; i++) {
        T_OK(side_copy_async(r.stream, SIDE_COPY_H2D, device, blocks[i], bytes[i]));
        T_OK(side_memset_async(r.stream, device, 0x77, 1));
        T_OK(side_copy_async(r.stream, SIDE_COPY_D2H, blocks[i], device, bytes[i]));
    }
    sync_stream(r.stream);
    for (size_t i = 0; i < COUNT; i++) {
        assert_int_equal(blocks[i][0], 0x77);
        if (bytes[i] > 1)
            assert_int_equal(blocks[i][bytes[i] - 1], i);
    }
    T_OK(side_pool_get_stats(pool, &stats));
    assert_int_equal(stats.blocks, COUNT);
    assert_true(stats.pinned_bytes <= stats.budget_bytes);
    assert_true(stats.granted_bytes >= stats.asked_bytes);
    for (size_t i = 0; i < COUNT; i++)
        T_OK(side_pool_free(pool, blocks[i], &r.stream, 1));
    side_pool_destroy(pool);
    side_device_free(r.device, device);
    rig_close(&r);
}

/* The copy out of a freed block is behind a spin; whoever gets its memory next writes to it at once. */
T_TEST(a_freed_block_is_not_reused_too_early)
{
    struct rig r = rig_open();
    side_pool *pool = NULL;
    side_pool_options o = SIDE_POOL_OPTIONS_INIT;
    const size_t bytes = 64 * KIB;
    enum { ROUNDS = 40 };
    unsigned char *device = device_make(r.device, ROUNDS * bytes), *back = pinned_make(r.device, ROUNDS * bytes);

    o.budget_bytes = 32 * MIB;
    o.region_bytes = 2 * MIB;
    T_OK(side_pool_create(r.device, &o, &pool));
    for (int i = 0; i < ROUNDS; i++) {
        unsigned char *block = NULL;
        T_OK(side_pool_alloc(pool, bytes, (void **)&block));
        memset(block, i + 1, bytes);
        spin_async(r.stream, MS / 2);
        T_OK(side_copy_async(r.stream, SIDE_COPY_H2D, device + (size_t)i * bytes, block, bytes));
        T_OK(side_pool_free(pool, block, &r.stream, 1));
    }
    T_OK(side_copy_async(r.stream, SIDE_COPY_D2H, back, device, ROUNDS * bytes));
    sync_stream(r.stream);
    for (size_t i = 0; i < ROUNDS * bytes; i++)
        if (back[i] != i / bytes + 1)
            T_FAIL("block %zu: byte %zu is %u", i / bytes, i % bytes, back[i]);
    side_pool_destroy(pool);
    pinned_free(r.device, back);
    side_device_free(r.device, device);
    rig_close(&r);
}

static side_memory_kind kind_of(struct rig *r, const void *data)
{
    side_memory_kind kind = SIDE_MEMORY_DEVICE;

    T_OK(side_memory_get_kind(r->device, data, &kind));
    return kind;
}

T_TEST(memory_is_pinned_in_place)
{
    struct rig r = rig_open();
    const size_t bytes = 5 * MIB + 123;
    unsigned char *host = host_make(bytes + 77), *at = host + 77, *device = device_make(r.device, bytes);
    unsigned char *expected = host_make(bytes);

    if (!r.props.can_register)
        T_SKIP("%s does not register host memory", r.props.name);
    fill(at, bytes, 11);
    memcpy(expected, at, bytes);
    T_OK(side_memory_pin(r.device, at, bytes));
    assert_int_equal(kind_of(&r, at), SIDE_MEMORY_PINNED);
    assert_int_equal(kind_of(&r, at + bytes - 1), SIDE_MEMORY_PINNED);
    check_equal(at, expected, bytes, "pinned memory"); /* pinning touches nothing */
    T_OK(side_copy_async(r.stream, SIDE_COPY_H2D, device, at, bytes));
    T_OK(side_stream_sync(r.stream, LONG_WAIT_S));
    memset(at, 0, bytes);
    T_OK(side_copy_async(r.stream, SIDE_COPY_D2H, at, device, bytes));
    sync_stream(r.stream);
    check_equal(at, expected, bytes, "pinned in place, there and back");
    T_OK(side_memory_unpin(r.device, at));
    assert_int_equal(kind_of(&r, at + bytes / 2), SIDE_MEMORY_PAGEABLE);
    check_equal(at, expected, bytes, "after unpinning");
    assert_true(side_memory_unpin(r.device, at) < 0);
    assert_true(side_memory_pin(r.device, NULL, 1) < 0);
    free(host);
    free(expected);
    side_device_free(r.device, device);
    rig_close(&r);
}

/* While a copy runs the host goes on: that is what pinning is for. */
T_TEST(copies_from_pinned_memory_do_not_block)
{
    struct rig r = rig_open();
    const size_t bytes = 4 * MIB;
    unsigned char *host = host_make(bytes), *device = device_make(r.device, bytes);
    side_event *e = event_make(r.device, false);

    if (!r.props.can_register)
        T_SKIP("%s does not register host memory", r.props.name);
    memset(host, 1, bytes);
    T_OK(side_memory_pin(r.device, host, bytes));
    spin_async(r.stream, 1);
    sync_stream(r.stream);
    spin_async(r.stream, 200 * MS);
    T_OK(side_copy_async(r.stream, SIDE_COPY_H2D, device, host, bytes));
    T_OK(side_copy_async(r.stream, SIDE_COPY_D2H, host, device, bytes));
    T_OK(side_event_record(e, r.stream));
    T_STATUS(side_event_query(e), SIDE_AGAIN);
    sync_stream(r.stream);
    T_OK(side_memory_unpin(r.device, host));
    side_event_destroy(e);
    free(host);
    side_device_free(r.device, device);
    rig_close(&r);
}

T_TEST(pins_share_pages)
{
    struct rig r = rig_open();
    const size_t bytes = 2 * MIB, cut = MIB + 100; /* the cut is inside a page */
    unsigned char *host = host_make(bytes), *expected = host_make(bytes), *device = device_make(r.device, bytes);

    if (!r.props.can_register)
        T_SKIP("%s does not register host memory", r.props.name);
    fill(host, bytes, 5);
    memcpy(expected, host, bytes);
    T_OK(side_memory_pin(r.device, host, cut));
    T_OK(side_memory_pin(r.device, host + cut, bytes - cut));
    /* one copy across both */
    T_OK(side_copy_async(r.stream, SIDE_COPY_H2D, device, host, bytes));
    sync_stream(r.stream);
    memset(host, 0, bytes);
    T_OK(side_copy_async(r.stream, SIDE_COPY_D2H, host, device, bytes));
    sync_stream(r.stream);
    check_equal(host, expected, bytes, "across two pins");
    T_OK(side_memory_unpin(r.device, host));
    assert_int_equal(kind_of(&r, host + cut), SIDE_MEMORY_PINNED); /* the shared page stays with the other */
    assert_int_equal(kind_of(&r, host + bytes - 1), SIDE_MEMORY_PINNED);
    T_OK(side_copy_async(r.stream, SIDE_COPY_H2D, device, host + cut, bytes - cut));
    sync_stream(r.stream);
    T_OK(side_memory_unpin(r.device, host + cut));
    assert_int_equal(kind_of(&r, host + cut), SIDE_MEMORY_PAGEABLE);
    free(host);
    free(expected);
    side_device_free(r.device, device);
    rig_close(&r);
}

/* ---------------------------------------------------------------- many threads, one device */

struct worker {
    side_device *device;
    uint64_t seed;
    pthread_t thread;
    int rounds;
};

static void worker_round(struct worker *w, t_rng *rng, side_stream *stream, side_pool *pool)
{
    const size_t bytes = 64 + t_rng_below(rng, 256 * KIB) / 64 * 64, count = bytes / sizeof(float);
    float *in = NULL, *out = NULL, *device = device_make(w->device, bytes);
    const float scale = (float)(1 + t_rng_below(rng, 4)), bias = (float)t_rng_below(rng, 100);
    side_event *done = event_make(w->device, false);

    T_OK(side_pool_alloc(pool, bytes, (void **)&in));
    T_OK(side_pool_alloc(pool, bytes, (void **)&out));
    for (size_t i = 0; i < count; i++)
        in[i] = (float)(i % 1000);
    T_OK(side_copy_async(stream, SIDE_COPY_H2D, device, in, bytes));
    affine_async(stream, device, device, bytes, scale, bias);
    T_OK(side_copy_async(stream, SIDE_COPY_D2H, out, device, bytes));
    T_OK(side_event_record(done, stream));
    T_OK(side_pool_free(pool, in, &stream, 1));
    T_OK(side_event_wait(done, LONG_WAIT_S));
    for (size_t i = 0; i < count; i++)
        if (out[i] != scale * (float)(i % 1000) + bias)
            T_FAIL("worker %d: element %zu of %zu is %g", (int)w->seed, i, count, (double)out[i]);
    T_OK(side_pool_free(pool, out, &stream, 1));
    side_event_destroy(done);
    side_device_free(w->device, device);
}

static void *worker_run(void *arg)
{
    struct worker *w = arg;
    t_rng rng = t_rng_make(w->seed);
    side_stream *stream = stream_make(w->device);
    side_pool *pool = NULL;

    T_OK(side_device_pool(w->device, &pool));
    for (int i = 0; i < w->rounds; i++)
        worker_round(w, &rng, stream, pool);
    side_stream_destroy(stream);
    return NULL;
}

T_TEST(threads_share_a_device)
{
    struct rig r = rig_open();
    enum { THREADS = 8 };
    struct worker workers[THREADS];

    for (int i = 0; i < THREADS; i++) {
        workers[i] = (struct worker){r.device, (uint64_t)i + 1, 0, T_SANITIZED ? 6 : 40};
        assert_int_equal(pthread_create(&workers[i].thread, NULL, worker_run, &workers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(workers[i].thread, NULL);
    rig_close(&r);
}

T_MAIN(EVERY(properties_are_sane), EVERY(the_spec_reopens_the_device), EVERY(bad_specs_are_refused),
       EVERY(a_device_opens_twice), EVERY(memory_kinds_are_told), EVERY(allocations_are_aligned_and_apart),
       EVERY(out_of_device_memory_is_survived), EVERY(the_pool_gives_pinned_memory),
       EVERY(a_freed_block_is_not_reused_too_early), EVERY(memory_is_pinned_in_place),
       EVERY(copies_from_pinned_memory_do_not_block), EVERY(pins_share_pages), EVERY(threads_share_a_device))
