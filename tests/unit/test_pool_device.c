/* SPDX-License-Identifier: MIT
 *
 * The pinned pool and its device: blocks that wait for streams, refusals, faults one by one, threads. */
#include "pool_help.h"

#include <semaphore.h>

static side_stream *make_stream(side_device *device)
{
    side_stream *stream = NULL;
    T_OK(side_stream_create(device, &stream));
    return stream;
}

static void nothing(void *user)
{
    (void)user;
}

/* ---------------------------------------------------------------- reuse after the device is done */

T_TEST(not_before_the_stream_got_there)
{
    T_FOR_SEEDS (seed, 20) {
        char spec[64];
        snprintf(spec, sizeof(spec), "sim:check=1,seed=%llu", (unsigned long long)seed);
        side_device *device = open_device(spec);
        side_pool *pool = make_pool(device, 2 * MIB, 2 * MIB);
        side_stream *stream = make_stream(device);
        unsigned char *a = take(pool, 1 * MIB), *seen = test_malloc(1 * MIB);
        void *on_device = NULL;

        T_OK(side_device_alloc(device, 1 * MIB, &on_device));
        memset(a, 7, 1 * MIB);
        spin(stream, 1000000000);
        T_OK(side_copy_async(stream, SIDE_COPY_H2D, on_device, a, 1 * MIB));
        put_after(pool, a, stream);
        side_pool_stats s = stats_of(pool);
        assert_int_equal(s.pending_bytes, 1 * MIB);
        assert_int_equal(s.blocks, 0);
        assert_int_equal(s.slack_bytes, 1 * MIB);
        void *b = take(pool, 1 * MIB), *c = NULL;
        assert_ptr_not_equal(a, b);
        memset(b, 9, 1 * MIB);
        T_STATUS(side_pool_alloc(pool, 1 * MIB, &c), SIDE_OVER_BUDGET);
        assert_non_null(strstr(side_last_error()->message, "1048576 waiting for the device"));
        assert_int_equal(side_pool_trim(pool), 0);
        T_STATUS(side_pool_free(pool, a, NULL, 0), SIDE_INVALID);
        T_OK(side_stream_sync(stream, 0));
        assert_ptr_equal(take(pool, 1 * MIB), a);
        memset(a, 9, 1 * MIB);
        T_OK(side_copy_async(stream, SIDE_COPY_D2H, seen, on_device, 1 * MIB));
        T_OK(side_stream_sync(stream, 0));
        for (size_t i = 0; i < 1 * MIB; i++)
            assert_int_equal(seen[i], 7);
        put(pool, a);
        put(pool, b);
        assert_int_equal(side_pool_trim(pool), 2 * MIB);
        assert_int_equal(sim_violations(device->context), 0);
        side_device_free(device, on_device);
        test_free(seen);
        side_stream_destroy(stream);
        side_pool_destroy(pool);
        side_device_close(device);
    }
    assert_int_equal(mem_live(), 0);
}

T_TEST(a_stuck_stream_blocks_nobody_else)
{
    side_device *device = open_device("sim");
    side_pool *pool = make_pool(device, 1 * MIB, 1 * MIB);
    side_stream *stuck = make_stream(device), *good = make_stream(device);

    /* The host function's stream waits, but no engine does. */
    T_OK(side_stream_host_fn(stuck, nothing, NULL, FOR_EVER_NS));
    for (int i = 0; i < 60; i++)
        put_after(pool, take(pool, 16 * KIB), stuck);
    void *a[4];
    for (int i = 0; i < 4; i++)
        a[i] = take(pool, 16 * KIB);
    spin(good, 1000);
    for (int i = 0; i < 4; i++)
        put_after(pool, a[i], good);
    T_OK(side_stream_sync(good, 0));
    for (int i = 0; i < 4; i++)
        take(pool, 16 * KIB);
    void *p = NULL;
    T_STATUS(side_pool_alloc(pool, 16 * KIB, &p), SIDE_OVER_BUDGET);
    /* One question a stuck stream, not one a block. */
    uint64_t calls = sim_calls(device->context);
    assert_int_equal(stats_of(pool).pending_bytes, 60 * 16 * KIB);
    assert_int_equal(sim_calls(device->context), calls + 1);

    struct talk talk = {0};
    side_log_callback(talk_fn, &talk, SIDE_LEVEL_WARN);
    side_pool_destroy(pool); /* does not hang: the device has 30 s, which are over at once in virtual time */
    side_log_callback(NULL, NULL, SIDE_LEVEL_WARN);
    assert_int_equal(talk.warnings, 2); /* four blocks out, sixty pending */
    side_stream_destroy(stuck);
    side_stream_destroy(good);
    side_device_close(device);
    assert_int_equal(mem_live(), 0);
}

T_TEST(several_streams)
{
    side_device *device = open_device("sim");
    side_pool *pool = make_pool(device, 4 * KIB, 4 * KIB);
    side_stream *streams[3];
    void *q = NULL;

    for (int i = 0; i < 3; i++)
        streams[i] = make_stream(device);
    void *p = take(pool, 4 * KIB);
    for (int i = 0; i < 3; i++)
        T_OK(side_stream_host_fn(streams[i], nothing, NULL, 1000000u * (uint64_t)(i + 1)));
    T_OK(side_pool_free(pool, p, streams, 3));
    for (int i = 0; i < 3; i++) {
        T_STATUS(side_pool_alloc(pool, 4 * KIB, &q), SIDE_OVER_BUDGET);
        T_OK(side_stream_sync(streams[i], 0));
    }
    assert_ptr_equal(take(pool, 4 * KIB), p);
    side_stream *twice[2] = {streams[0], streams[0]};
    T_OK(side_pool_free(pool, p, twice, 2));
    assert_ptr_equal(take(pool, 4 * KIB), p);

    /* Arguments that are wrong harm nothing. */
    side_device *other = open_device("sim");
    side_stream *foreign = make_stream(other), *none = NULL;
    T_STATUS(side_pool_free(pool, p, &foreign, 1), SIDE_INVALID);
    T_STATUS(side_pool_free(pool, p, &none, 1), SIDE_INVALID);
    side_stream_destroy(foreign);
    side_device_close(other);
    put(pool, p);
    for (int i = 0; i < 3; i++)
        side_stream_destroy(streams[i]);
    side_pool_destroy(pool);
    side_device_close(device);
}

/* Events are recycled: a loop of many frees makes no more of them than are pending at a time. */
T_TEST(events_are_recycled)
{
    side_device *device = open_device("sim");
    side_pool *pool = make_pool(device, 1 * MIB, 1 * MIB);
    side_stream *stream = make_stream(device);
    long live = 0;

    for (int i = 0; i < 1000; i++) {
        spin(stream, 10);
        put_after(pool, take(pool, 1 + (size_t)i * 8), stream);
        T_OK(side_stream_sync(stream, 0));
        if (i == 10)
            live = mem_live();
    }
    assert_true(mem_live() <= live + 4);
    side_stream_destroy(stream);
    side_pool_destroy(pool);
    side_device_close(device);
}

T_TEST(poisoned_only_when_reusable)
{
    setenv("SIDESTREAM_VALIDATE", "1", 1);
    side_device *device = open_device("sim");
    side_pool *pool = make_pool(device, 1 * MIB, 1 * MIB);
    side_stream *stream = make_stream(device);
    unsigned char *p = take(pool, 4096);

    memset(p, 3, 4096);
    spin(stream, 1000000000);
    put_after(pool, p, stream);
    stats_of(pool);
    assert_int_equal(p[4095], 3);
    T_OK(side_stream_sync(stream, 0));
    stats_of(pool);
    assert_int_equal(p[4095], 0xDB);
    side_stream_destroy(stream);
    side_pool_destroy(pool);
    side_device_close(device);
}

/* ---------------------------------------------------------------- refusals */

T_TEST(register_refused)
{
    struct talk talk = {0};
    side_log_callback(talk_fn, &talk, SIDE_LEVEL_INFO);
    side_device *device = open_device("sim:refuse_register=1");
    side_pool *pool = make_pool(device, 64 * MIB, 1 * MIB);
    side_memory_kind kind;

    assert_false(stats_of(pool).registered);
    void *a = take(pool, 5000), *b = take(pool, 20 * MIB + 1);
    assert_non_null(strstr(talk.last, "driver's allocator"));
    snprintf(talk.last, sizeof(talk.last), "once");
    assert_false(stats_of(pool).registered);
    assert_false(stats_of(pool).huge_pages);
    assert_int_equal(stats_of(pool).granted_bytes, 5056 + 20 * MIB + 4096);
    T_OK(side_memory_get_kind(device, b, &kind));
    assert_int_equal(kind, SIDE_MEMORY_PINNED);
    put(pool, a);
    put(pool, b);
    assert_int_equal(side_pool_trim(pool), 21 * MIB + 4096);
    assert_string_equal(talk.last, "once");
    side_pool_destroy(pool);
    side_device_close(device);
    side_log_callback(NULL, NULL, SIDE_LEVEL_INFO);
}

/* The first registration fails: its memory comes from the driver, the next is registered again. */
T_TEST(register_refused_once)
{
    side_device *device = open_device("sim");
    side_pool *pool = make_pool(device, 64 * MIB, 1 * MIB);

    T_STATUS(side_pool_alloc(pool, 0, NULL), SIDE_INVALID);
    sim_fail_at(device->context, 1, SIDE_DEVICE_ERROR);
    void *a = take(pool, 100);
    assert_int_equal(side_last_error()->status, SIDE_INVALID); /* the refusal was nobody's error */
    assert_false(stats_of(pool).registered);
    void *b = take(pool, 16 * MIB);
    assert_true(stats_of(pool).registered);
    put(pool, a);
    put(pool, b);
    assert_int_equal(side_pool_trim(pool), 17 * MIB);
    side_pool_destroy(pool);
    side_device_close(device);
}

T_TEST(pinning_refused)
{
    side_device *device = open_device("sim:refuse_pinning=1");
    side_pool *pool = make_pool(device, 64 * MIB, 0);
    void *p = NULL;

    for (int i = 0; i < 3; i++) {
        T_STATUS(side_pool_alloc(pool, i == 1 ? 20 * MIB : 10, &p), SIDE_NO_MEMORY);
        assert_non_null(strstr(side_last_error()->message, "registering: "));
        assert_non_null(strstr(side_last_error()->message, "allocator: pinned memory is refused"));
        assert_int_equal(stats_of(pool).pinned_bytes, 0);
    }
    side_pool_destroy(pool);
    side_device_close(device);
    assert_int_equal(mem_live(), 0);
}

/* By choice: nothing is registered, and nobody is told of a refusal. */
T_TEST(the_drivers_allocator_by_choice)
{
    struct talk talk = {.last = "nothing"};
    side_device *device = open_device("sim");
    side_pool_options o = SIDE_POOL_OPTIONS_INIT;
    side_pool *pool = NULL;
    side_memory_kind kind;
    void *p = NULL;

    o.budget_bytes = 64 * MIB;
    o.region_bytes = 1 * MIB;
    o.flags = SIDE_POOL_DRIVER;
    side_log_callback(talk_fn, &talk, SIDE_LEVEL_INFO);
    T_OK(side_pool_create(device, &o, &pool));
    assert_false(stats_of(pool).registered);
    uint64_t calls = sim_calls(device->context);
    void *a = take(pool, 20 * MIB);
    assert_int_equal(sim_calls(device->context), calls + 1); /* no try to register */
    void *b = take(pool, 100);
    assert_false(stats_of(pool).registered);
    assert_false(stats_of(pool).huge_pages);
    T_OK(side_memory_get_kind(device, a, &kind));
    assert_int_equal(kind, SIDE_MEMORY_PINNED);
    memset(a, 1, 20 * MIB);
    sim_fail_at(device->context, 1, SIDE_NO_MEMORY);
    T_STATUS(side_pool_alloc(pool, 17 * MIB, &p), SIDE_NO_MEMORY);
    assert_non_null(strstr(side_last_error()->message, "SIDE_POOL_DRIVER"));
    assert_null(strstr(side_last_error()->message, "registering"));
    put(pool, a);
    put(pool, b);
    assert_int_equal(side_pool_trim(pool), 21 * MIB);
    assert_string_equal(talk.last, "nothing");
    side_log_callback(NULL, NULL, SIDE_LEVEL_INFO);
    side_pool_destroy(pool);
    side_device_close(device);
    assert_int_equal(mem_live(), 0);
}

/* Megabytes of address space that this process has. */
static long mapped_mib(void)
{
    long pages = 0;
    FILE *f = fopen("/proc/self/statm", "re");

    assert_non_null(f);
    assert_int_equal(fscanf(f, "%ld", &pages), 1);
    fclose(f);
    return pages / 256;
}

T_TEST(refusals_leave_no_pages)
{
    side_device *device = open_device("sim");
    side_pool *pool = make_pool(device, 64 * MIB, 0);
    void *p = NULL;

    put(pool, take(pool, 32 * MIB)); /* warm */
    side_pool_trim(pool);
    long before = mapped_mib();
    for (int i = 0; i < 5; i++) {
        sim_fail_at(device->context, 1, SIDE_NO_MEMORY);
        T_STATUS(side_pool_alloc(pool, 32 * MIB, &p), SIDE_NO_MEMORY);
    }
    for (int i = 0; i < 5; i++) {
        sim_fail_at(device->context, 1, SIDE_DEVICE_ERROR);
        put(pool, take(pool, 32 * MIB));
        side_pool_trim(pool);
    }
    assert_true(mapped_mib() < before + 32);
    side_pool_destroy(pool);
    side_device_close(device);
}

T_TEST(unregister_refused)
{
    struct talk talk = {0};
    side_device *device = open_device("sim");
    side_pool *pool = make_pool(device, 40 * MIB, 1 * MIB);
    char *p = take(pool, 20 * MIB);
    void *q = NULL;

    put(pool, p);
    side_log_callback(talk_fn, &talk, SIDE_LEVEL_WARN);
    sim_fail_at(device->context, 1, SIDE_DEVICE_ERROR);
    assert_int_equal(side_pool_trim(pool), 0);
    side_log_callback(NULL, NULL, SIDE_LEVEL_WARN);
    assert_int_equal(talk.warnings, 1);
    p[0] = 1; /* still mapped: the device might write to it */
    /* and still counted */
    assert_int_equal(stats_of(pool).pinned_bytes, 20 * MIB);
    T_STATUS(side_pool_alloc(pool, 21 * MIB, &q), SIDE_OVER_BUDGET);
    side_pool_destroy(pool);
    side_device_close(device);
}

T_TEST(an_event_that_is_not_recorded_loses_the_block)
{
    side_device *device = open_device("sim");
    side_pool *pool = make_pool(device, 64 * KIB, 64 * KIB);
    side_stream *stream = make_stream(device);

    for (int nth = 1; nth <= 2; nth++) { /* event_create, event_record */
        void *p = take(pool, 16 * KIB);
        sim_fail_at(device->context, (uint64_t)nth, SIDE_DEVICE_ERROR);
        T_STATUS(side_pool_free(pool, p, &stream, 1), SIDE_DEVICE_ERROR);
        assert_int_equal(stats_of(pool).pending_bytes, (size_t)nth * 16 * KIB);
        T_STATUS(side_pool_free(pool, p, NULL, 0), SIDE_INVALID);
    }
    T_OK(side_stream_sync(stream, 0));
    void *a = take(pool, 32 * KIB), *b = NULL;
    T_STATUS(side_pool_alloc(pool, 64, &b), SIDE_OVER_BUDGET);
    put(pool, a);
    side_stream_destroy(stream);
    side_pool_destroy(pool);
    side_device_close(device);
    assert_int_equal(mem_live(), 0);
}

/* ---------------------------------------------------------------- every failure in turn */

static side_status first_error(side_status a, side_status b)
{
    return a != SIDE_OK ? a : b;
}

/* A bit of everything; whatever fails, goes on. */
static side_status exercise(side_device *device, side_stream *stream)
{
    side_pool_options o = SIDE_POOL_OPTIONS_INIT;
    side_pool *pool = NULL;
    side_status worst;

    o.budget_bytes = 24 * MIB;
    o.region_bytes = 64 * KIB;
    o.threads = 1;
    worst = side_pool_create(device, &o, &pool);
    if (worst != SIDE_OK)
        return worst;
    static const size_t sizes[] = {100, 5000, 64 * KIB, 16 * MIB, 70 * KIB, 300, 20 * MIB, 6000};
    enum { COUNT = sizeof(sizes) / sizeof(sizes[0]) };
    for (int round = 0; round < 2; round++) {
        void *p[COUNT] = {NULL};
        for (int i = 0; i < COUNT; i++) {
            side_status s = side_pool_alloc(pool, sizes[i], &p[i]);
            if (s != SIDE_OK && s != SIDE_OVER_BUDGET)
                worst = first_error(worst, s);
            assert_true((s == SIDE_OK) == (p[i] != NULL));
            if (p[i] != NULL)
                memset(p[i], 1, sizes[i] < 100000 ? sizes[i] : 100000);
        }
        for (int i = 0; i < COUNT; i++)
            if (p[i] != NULL)
                worst = first_error(worst, side_pool_free(pool, p[i], &stream, i % 3 == 0 ? 1 : 0));
        if (round == 0)
            side_pool_trim(pool);
    }
    static char own[3 * 4096];
    side_status s = side_memory_pin(device, own + 10, 5000);
    if (s == SIDE_OK)
        s = first_error(side_memory_pin(device, own + 5000, 6000), side_memory_unpin(device, own + 10));
    worst = first_error(worst, s);
    side_pool_destroy(pool);
    return worst;
}

T_TEST(every_allocation_fails_once)
{
    bool done = false;

    for (unsigned long n = 1; !done; n++) {
        side_device *device = open_device("sim");
        side_stream *stream = make_stream(device);
        mem_fail_at(n);
        side_status s = exercise(device, stream);
        done = mem_fail_at(0) < n;
        assert_true(s == SIDE_OK || s == SIDE_NO_MEMORY);
        assert_true(!done || s == SIDE_OK);
        side_stream_destroy(stream);
        side_device_close(device);
        assert_int_equal(mem_live(), 0);
        assert_true(n < 1000);
    }
}

T_TEST(every_device_call_fails_once)
{
    static const side_status statuses[] = {SIDE_DEVICE_ERROR, SIDE_NO_MEMORY, SIDE_UNSUPPORTED, SIDE_DEVICE_LOST};
    const uint64_t stride = T_TSAN ? 4 : 1;

    for (size_t k = 0; k < sizeof(statuses) / sizeof(statuses[0]); k++) {
        bool done = false;
        for (uint64_t n = 1 + k % stride; !done; n += stride) {
            side_device *device = open_device("sim:check=1");
            side_stream *stream = make_stream(device);
            uint64_t before = sim_calls(device->context);
            sim_fail_at(device->context, n, statuses[k]);
            side_status s = exercise(device, stream);
            done = sim_calls(device->context) - before < n;
            assert_true(!done || s == SIDE_OK);
            sim_fault_clear(device->context);
            assert_int_equal(sim_violations(device->context), 0);
            side_stream_destroy(stream);
            side_device_close(device);
            assert_int_equal(mem_live(), 0);
            assert_true(n < 1000);
        }
    }
}

/* ---------------------------------------------------------------- threads */

enum { THREADS = 8, HELD = 8 };

struct job {
    side_pool *pool;
    side_device *device;
    uint64_t seed;
    int steps;
};

static void *work(void *arg)
{
    struct job *job = arg;
    t_rng rng = t_rng_make(job->seed);
    side_stream *stream = make_stream(job->device);
    struct {
        unsigned char *data;
        size_t bytes;
    } held[HELD] = {{NULL, 0}};

    for (int i = 0; i < job->steps; i++) {
        size_t k = (size_t)t_rng_below(&rng, HELD);
        if (held[k].data != NULL) {
            assert_int_equal(held[k].data[0], (unsigned char)job->seed);
            assert_int_equal(held[k].data[held[k].bytes - 1], (unsigned char)job->seed);
            if (t_rng_chance(&rng, 2))
                spin(stream, 100);
            T_OK(side_pool_free(job->pool, held[k].data, &stream, (size_t)t_rng_below(&rng, 2)));
            held[k].data = NULL;
        } else {
            void *p = NULL;
            held[k].bytes = 1 + (size_t)t_rng_below(&rng, t_rng_chance(&rng, 20) ? 18 * MIB : 200 * KIB);
            side_status s = side_pool_alloc(job->pool, held[k].bytes, &p);
            assert_true(s == SIDE_OK || s == SIDE_OVER_BUDGET);
            held[k].data = p;
            if (p != NULL)
                held[k].data[0] = held[k].data[held[k].bytes - 1] = (unsigned char)job->seed;
        }
        if (t_rng_chance(&rng, 40))
            side_pool_trim(job->pool);
        if (t_rng_chance(&rng, 10))
            T_OK(side_stream_sync(stream, 0));
    }
    for (size_t k = 0; k < HELD; k++)
        if (held[k].data != NULL)
            put_after(job->pool, held[k].data, stream);
    T_OK(side_stream_sync(stream, 0));
    side_stream_destroy(stream);
    return NULL;
}

T_TEST(threads_at_random)
{
    side_device *device = open_device("sim");
    side_pool *pool = make_pool(device, 40 * MIB, 1 * MIB);
    pthread_t threads[THREADS];
    struct job jobs[THREADS];

    for (int i = 0; i < THREADS; i++) {
        jobs[i] = (struct job){pool, device, (uint64_t)i + 1, T_SANITIZED ? 150 : 600};
        T_OK(os_thread_create(&threads[i], "work", work, &jobs[i]));
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    side_pool_stats s = stats_of(pool);
    for (int i = 0; i < 1000000 && s.pending_bytes > 0; i++)
        s = stats_of(pool); /* each query moves this thread's virtual clock on */
    assert_int_equal(s.granted_bytes, 0);
    assert_int_equal(s.pending_bytes, 0);
    assert_int_equal(side_pool_trim(pool), s.pinned_bytes);
    assert_int_equal(stats_of(pool).pinned_bytes, 0);
    side_pool_destroy(pool);
    side_device_close(device);
    assert_int_equal(mem_live(), 0);
}

/* While a large block is being pinned, small ones come and go. Here the pinning ends only after they did. */
static sem_t pinning, go_on;
static struct side_device_ops slow_ops;
static const struct side_device_ops *real_ops;

static side_status slow_register(dev_context *context, void *data, size_t bytes, bool read_only)
{
    if (bytes >= 16 * MIB) {
        sem_post(&pinning);
        sem_wait(&go_on);
    }
    return real_ops->host_register(context, data, bytes, read_only);
}

static void *take_large(void *arg)
{
    struct job *job = arg;
    put(job->pool, take(job->pool, 16 * MIB));
    return NULL;
}

T_TEST(small_blocks_do_not_wait_for_large_pins)
{
    side_device *device = open_device("sim");
    side_pool *pool = make_pool(device, 20 * MIB, 1 * MIB);
    struct job job = {.pool = pool};
    pthread_t thread;
    void *p = NULL;

    real_ops = device->ops;
    slow_ops = *device->ops;
    slow_ops.host_register = slow_register;
    device->ops = &slow_ops;
    sem_init(&pinning, 0, 0);
    sem_init(&go_on, 0, 0);
    T_OK(os_thread_create(&thread, "take", take_large, &job));
    sem_wait(&pinning);
    put(pool, take(pool, 100));
    put(pool, take(pool, 2 * MIB));
    /* What is being pinned counts already. */
    T_STATUS(side_pool_alloc(pool, 5 * MIB, &p), SIDE_OVER_BUDGET);
    side_pool_trim(pool);
    sem_post(&go_on);
    pthread_join(thread, NULL);
    assert_true(stats_of(pool).peak_pinned_bytes <= 20 * MIB);
    side_pool_destroy(pool);
    side_device_close(device);
}

/* Eight threads that all need a first region: one pins it for all. */
static void *take_one(void *arg)
{
    struct job *job = arg;
    take(job->pool, 4096);
    return NULL;
}

T_TEST(one_region_for_many_threads)
{
    side_device *device = open_device("sim");
    side_pool *pool = make_pool(device, 512 * MIB, 64 * MIB);
    struct job job = {.pool = pool};
    pthread_t threads[THREADS];

    for (int i = 0; i < THREADS; i++)
        T_OK(os_thread_create(&threads[i], "take", take_one, &job));
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(stats_of(pool).regions, 1);
    side_pool_destroy(pool);
    side_device_close(device);
}

T_MAIN(T(not_before_the_stream_got_there), T(a_stuck_stream_blocks_nobody_else), T(several_streams),
       T(events_are_recycled), T(poisoned_only_when_reusable), T(register_refused), T(register_refused_once),
       T(the_drivers_allocator_by_choice), T(pinning_refused), T(refusals_leave_no_pages), T(unregister_refused),
       T(an_event_that_is_not_recorded_loses_the_block), T_LONG(every_allocation_fails_once, 60),
       T_LONG(every_device_call_fails_once, 120), T_LONG(threads_at_random, 60),
       T(small_blocks_do_not_wait_for_large_pins), T(one_region_for_many_threads))
