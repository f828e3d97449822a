/* SPDX-License-Identifier: MIT
 *
 * The pinned pool: its rules on size, alignment, waste and budget, against a model and one by one. The device's part is in test_pool_device.c. */
#include "pool_help.h"

#include <sys/wait.h>
#include <unistd.h>

/* ---------------------------------------------------------------- against a model */

enum { SLOTS = 100 };

struct block {
    unsigned char *data;
    size_t asked;
    uint64_t mark;
};

/* Marks both ends, so that an overlap with any other block shows. */
static void mark(struct block *b, uint64_t mark)
{
    size_t n = b->asked < 8 ? b->asked : 8;
    b->mark = mark;
    memcpy(b->data, &b->mark, n);
    memcpy(b->data + b->asked - n, &b->mark, n);
}

static void check_mark(const struct block *b)
{
    size_t n = b->asked < 8 ? b->asked : 8;
    assert_memory_equal(b->data + b->asked - n, &b->mark, n);
    if (b->asked >= 16)
        assert_memory_equal(b->data, &b->mark, n);
}

static void check_rules(side_pool *pool, const struct block *b, size_t granted)
{
    size_t waste = granted - b->asked;

    assert_true(granted >= b->asked);
    assert_int_equal((uintptr_t)b->data % (b->asked >= 4 * KIB ? 4 * KIB : 64), 0);
    if (b->asked >= 4 * KIB)
        assert_true(waste * 8 <= b->asked);
    else
        assert_true(waste < 64);
    if (b->asked >= 16 * MIB)
        assert_int_equal(granted, (b->asked + 4095) / 4096 * 4096);
    side_memory_kind kind;
    T_OK(side_memory_get_kind(pool->device, b->data + b->asked - 1, &kind));
    assert_int_equal(kind, SIDE_MEMORY_PINNED);
}

static size_t random_size(t_rng *rng, size_t most)
{
    uint64_t limit = (uint64_t)1 << t_rng_below(rng, 26);
    size_t n = 1 + (size_t)t_rng_below(rng, limit);
    if (t_rng_chance(rng, 8))
        n = 4096 * (1 + n / 4096) - (size_t)t_rng_below(rng, 2);
    return n < most ? n : most;
}

static void no_overlap(const struct block *blocks, const struct block *b)
{
    for (int i = 0; i < SLOTS; i++)
        if (blocks[i].data != NULL && &blocks[i] != b)
            assert_true(blocks[i].data + blocks[i].asked <= b->data || b->data + b->asked <= blocks[i].data);
}

static void one_step(side_pool *pool, t_rng *rng, struct block *blocks, size_t *asked, uint64_t *count)
{
    struct block *b = &blocks[t_rng_below(rng, SLOTS)];
    side_pool_stats before = stats_of(pool), after;
    void *data = NULL;

    if (b->data != NULL) {
        check_mark(b);
        put(pool, b->data);
        *asked -= b->asked;
        (*count)--;
        b->data = NULL;
    } else {
        b->asked = random_size(rng, before.budget_bytes);
        side_status s = side_pool_alloc(pool, b->asked, &data);
        after = stats_of(pool);
        if (s == SIDE_OK) {
            b->data = data;
            *asked += b->asked;
            (*count)++;
            check_rules(pool, b, after.granted_bytes - before.granted_bytes);
            no_overlap(blocks, b);
            mark(b, t_rng_next(rng));
        } else {
            assert_int_equal(s, SIDE_OVER_BUDGET);
            assert_null(data);
            /* Not with more than fragmentation explains: the largest request is 1/4 of this budget and always fits an empty pool. */
            assert_true(after.granted_bytes > 0);
        }
    }
    after = stats_of(pool);
    assert_true(after.pinned_bytes <= after.budget_bytes && after.peak_pinned_bytes <= after.budget_bytes);
    assert_int_equal(after.asked_bytes, *asked);
    assert_int_equal(after.blocks, *count);
    assert_int_equal(after.slack_bytes, after.pinned_bytes - after.granted_bytes);
}

T_TEST(random_sequences_keep_the_rules)
{
    T_FOR_SEEDS (seed, 12) {
        static const size_t budgets[] = {20 * KIB, 3 * MIB, 40 * MIB, 128 * MIB};
        static const size_t regions[] = {4 * KIB, 1 * MIB, 0, 8 * MIB};
        t_rng rng = t_rng_make(seed);
        side_device *device = open_device("sim");
        side_pool *pool = make_pool(device, budgets[seed % 4], regions[seed / 4 % 4]);
        struct block blocks[SLOTS] = {{NULL, 0, 0}};
        size_t asked = 0;
        uint64_t count = 0;

        for (int i = 0; i < 400; i++) {
            one_step(pool, &rng, blocks, &asked, &count);
            if (t_rng_chance(&rng, 50))
                side_pool_trim(pool);
        }
        for (int i = 0; i < SLOTS; i++)
            if (blocks[i].data != NULL)
                put(pool, blocks[i].data);
        side_pool_stats s = stats_of(pool);
        assert_int_equal(s.granted_bytes, 0);
        assert_int_equal(side_pool_trim(pool), s.pinned_bytes);
        s = stats_of(pool);
        assert_int_equal(s.pinned_bytes, 0);
        assert_int_equal(s.regions, 0);
        side_pool_destroy(pool);
        side_device_close(device);
    }
    assert_int_equal(mem_live(), 0);
}

/* ---------------------------------------------------------------- one by one */

T_TEST(waste_at_every_size)
{
    side_device *device = open_device("sim");
    side_pool *pool = make_pool(device, 64 * MIB, 4 * MIB);

    for (size_t n = 1; n < 40 * MIB; n += n / 7 + 1) {
        struct block b = {.data = take(pool, n), .asked = n};
        check_rules(pool, &b, stats_of(pool).granted_bytes);
        put(pool, b.data);
    }
    side_pool_destroy(pool);
    side_device_close(device);
}

T_TEST(neighbours_join)
{
    side_device *device = open_device("sim");
    side_pool *pool = make_pool(device, 1 * MIB, 1 * MIB);
    void *p[16];

    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 16; i++)
            p[i] = take(pool, 64 * KIB);
        assert_int_equal(stats_of(pool).regions, 1);
        for (int i = 0; i < 16; i++)
            put(pool, p[(i * 7 + round) % 16]); /* in some order */
        put(pool, take(pool, 1 * MIB));         /* all of it as one block again */
        assert_int_equal(stats_of(pool).regions, 1);
    }
    side_pool_destroy(pool);
    side_device_close(device);
}

/* What a block of odd size leaves of its last page serves small ones. */
T_TEST(page_tails_are_used)
{
    side_device *device = open_device("sim");
    side_pool *pool = make_pool(device, 8 * KIB, 8 * KIB);

    take(pool, 5000);
    for (int i = 0; i < (8192 - 5056) / 64; i++)
        take(pool, 64);
    void *p = NULL;
    T_STATUS(side_pool_alloc(pool, 1, &p), SIDE_OVER_BUDGET);
    assert_int_equal(stats_of(pool).slack_bytes, 0);
    side_pool_destroy(pool);
    side_device_close(device);
}

T_TEST(regions_shrink_to_the_budget)
{
    side_device *device = open_device("sim");
    side_pool *pool = make_pool(device, 10 * KIB, 64 * MIB);

    void *a = take(pool, 100);
    assert_int_equal(stats_of(pool).pinned_bytes, 8 * KIB); /* whole pages, under the budget */
    void *b = take(pool, 4 * KIB);
    void *c = NULL;
    T_STATUS(side_pool_alloc(pool, 5 * KIB, &c), SIDE_OVER_BUDGET);
    assert_non_null(strstr(side_last_error()->message, "10240"));
    assert_non_null(strstr(side_last_error()->message, "8192"));
    assert_non_null(strstr(side_last_error()->message, "budget_bytes"));
    put(pool, a);
    put(pool, b);
    put(pool, take(pool, 8 * KIB));
    T_STATUS(side_pool_alloc(pool, 8 * KIB + 1, &c), SIDE_OVER_BUDGET);
    T_STATUS(side_pool_alloc(pool, SIZE_MAX, &c), SIDE_OVER_BUDGET);
    side_pool_destroy(pool);

    pool = make_pool(device, 1, 0); /* not even a page */
    T_STATUS(side_pool_alloc(pool, 1, &c), SIDE_OVER_BUDGET);
    side_pool_destroy(pool);
    pool = make_pool(device, SIZE_MAX, 0);
    T_STATUS(side_pool_alloc(pool, SIZE_MAX, &c), SIDE_OVER_BUDGET);
    T_STATUS(side_pool_alloc(pool, SIZE_MAX / 2 - 5, &c), SIDE_OVER_BUDGET);
    T_STATUS(side_pool_alloc(pool, (size_t)1 << 60, &c), SIDE_NO_MEMORY);
    assert_null(c);
    put(pool, take(pool, 1));
    side_pool_destroy(pool);
    side_device_close(device);
}

T_TEST(cached_regions)
{
    side_device *device = open_device("sim");
    side_pool *pool = make_pool(device, 100 * MIB, 1 * MIB);

    void *a = take(pool, 32 * MIB);
    put(pool, a);
    double pinned_s = stats_of(pool).pin_s;
    assert_true(pinned_s > 0);
    void *b = take(pool, 30 * MIB); /* wastes 2 of 30: the cached one will do */
    assert_ptr_equal(a, b);
    assert_int_equal(stats_of(pool).granted_bytes, 30 * MIB);
    assert_int_equal(stats_of(pool).slack_bytes, 2 * MIB);
    put(pool, b);
    void *c = take(pool, 20 * MIB); /* 12 of 20: not */
    assert_int_equal(stats_of(pool).pinned_bytes, 52 * MIB);
    void *d = take(pool, 60 * MIB); /* 52 + 60 > 100: the empty one goes */
    assert_int_equal(stats_of(pool).pinned_bytes, 80 * MIB);
    void *e = NULL;
    T_STATUS(side_pool_alloc(pool, 21 * MIB, &e), SIDE_OVER_BUDGET);
    put(pool, c);
    /* Nothing is unpinned for what would not fit anyway. */
    T_STATUS(side_pool_alloc(pool, 41 * MIB, &e), SIDE_OVER_BUDGET);
    assert_int_equal(stats_of(pool).pinned_bytes, 80 * MIB);
    put(pool, d);
    assert_int_equal(side_pool_trim(pool), 80 * MIB);
    side_pool_destroy(pool);
    side_device_close(device);
}

/* The shared region has room for it, and there is no budget for another. */
T_TEST(large_block_in_a_shared_region)
{
    side_device *device = open_device("sim");
    side_pool *pool = make_pool(device, 32 * MIB, 32 * MIB);

    void *a = take(pool, 1), *b = take(pool, 20 * MIB + 1);
    assert_int_equal((uintptr_t)b % (4 * KIB), 0);
    assert_int_equal(stats_of(pool).regions, 1);
    put(pool, a);
    put(pool, b);
    side_pool_destroy(pool);
    side_device_close(device);
}

T_TEST(strangers_are_refused)
{
    side_device *device = open_device("sim");
    side_pool *pool = make_pool(device, 8 * MIB, 0), *other = make_pool(device, 8 * MIB, 0);
    char *a = take(pool, 100), *b = take(other, 100);
    int local = 0;

    T_STATUS(side_pool_free(pool, a + 64, NULL, 0), SIDE_INVALID);
    T_STATUS(side_pool_free(pool, &local, NULL, 0), SIDE_INVALID);
    T_STATUS(side_pool_free(pool, b, NULL, 0), SIDE_INVALID);
    T_STATUS(side_pool_free(NULL, a, NULL, 0), SIDE_INVALID);
    T_STATUS(side_pool_free(pool, a, NULL, 1), SIDE_INVALID);
    assert_int_equal(stats_of(pool).blocks, 1);
    put(pool, a);
    T_STATUS(side_pool_free(pool, a, NULL, 0), SIDE_INVALID);
    assert_non_null(strstr(side_last_error()->message, "twice"));
    T_OK(side_pool_free(pool, NULL, NULL, 0));

    void *p = &local;
    T_STATUS(side_pool_alloc(pool, 0, &p), SIDE_INVALID);
    T_STATUS(side_pool_alloc(pool, 1, NULL), SIDE_INVALID);
    T_STATUS(side_pool_alloc(NULL, 1, &p), SIDE_INVALID);
    assert_ptr_equal(p, &local);
    T_STATUS(side_pool_get_stats(pool, NULL), SIDE_INVALID);
    assert_int_equal(side_pool_trim(NULL), 0);
    side_pool_destroy(NULL);
    put(other, b);
    side_pool_destroy(pool);
    side_pool_destroy(other);
    side_device_close(device);
}

T_TEST(options)
{
    side_device *device = open_device("sim");
    side_pool_options o = SIDE_POOL_OPTIONS_INIT;
    side_pool *pool = NULL;

    o.flags = 4;
    T_STATUS(side_pool_create(device, &o, &pool), SIDE_UNSUPPORTED);
    o.flags = 0;
    o.size = 4;
    T_STATUS(side_pool_create(device, &o, &pool), SIDE_INVALID);
    T_STATUS(side_pool_create(NULL, NULL, &pool), SIDE_INVALID);
    T_STATUS(side_pool_create(device, NULL, NULL), SIDE_INVALID);
    assert_null(pool);
    side_device_close(device);
}

T_TEST(default_budget)
{
    side_device *device = open_device("sim");
    side_pool *alone = NULL, *one_of_four = NULL, *same = NULL;

    unsetenv("LOCAL_WORLD_SIZE");
    T_OK(side_device_pool(device, &alone));
    T_OK(side_device_pool(device, &same));
    assert_ptr_equal(alone, same);
    uint64_t available = pages_available(NULL, 0);
    double share = (double)stats_of(alone).budget_bytes / (double)available;
    assert_true(share > 0.2 && share < 0.3);
    setenv("LOCAL_WORLD_SIZE", "4", 1);
    T_OK(side_pool_create(device, NULL, &one_of_four));
    double ratio = (double)stats_of(alone).budget_bytes / (double)stats_of(one_of_four).budget_bytes;
    assert_true(ratio > 3.5 && ratio < 4.5);
    side_pool_destroy(one_of_four);
    side_device_close(device);
}

T_TEST(blocks_left_are_reported_and_kept)
{
    struct talk talk = {0};
    side_device *device = open_device("sim");
    side_pool *pool = make_pool(device, 64 * MIB, 1 * MIB);
    char *kept = take(pool, 1000), *gone = take(pool, 20 * MIB);

    put(pool, gone);
    side_log_callback(talk_fn, &talk, SIDE_LEVEL_WARN);
    side_pool_destroy(pool);
    side_log_callback(NULL, NULL, SIDE_LEVEL_WARN);
    assert_int_equal(talk.warnings, 1);
    assert_non_null(strstr(talk.last, "1 blocks (1000 bytes)"));
    kept[0] = kept[999] = 1;
    side_memory_kind kind;
    T_OK(side_memory_get_kind(device, kept, &kind));
    assert_int_equal(kind, SIDE_MEMORY_PINNED);
    T_OK(side_memory_get_kind(device, gone, &kind));
    assert_int_equal(kind, SIDE_MEMORY_PAGEABLE);
    side_device_close(device);
    assert_int_equal(mem_live(), 0);
}

T_TEST(freed_blocks_are_poisoned)
{
    setenv("SIDESTREAM_VALIDATE", "1", 1);
    side_device *device = open_device("sim");
    side_pool *pool = make_pool(device, 8 * MIB, 0);
    unsigned char *p = take(pool, 10000);

    memset(p, 1, 10000);
    put(pool, p);
    for (int i = 0; i < 10000; i++)
        assert_int_equal(p[i], 0xDB);
    side_pool_destroy(pool);
    unsetenv("SIDESTREAM_VALIDATE");
    pool = make_pool(device, 8 * MIB, 0);
    p = take(pool, 10000);
    memset(p, 1, 10000);
    put(pool, p);
    assert_int_equal(p[0], 1);
    assert_int_equal(p[9999], 1);
    side_pool_destroy(pool);
    side_device_close(device);
}

static int in_child(side_device *device, side_pool *pool, void *data)
{
    side_pool_stats stats;
    side_pool *made = NULL;
    void *p = NULL;
    bool ok = side_pool_alloc(pool, 1, &p) == SIDE_FORKED && side_pool_free(pool, data, NULL, 0) == SIDE_FORKED &&
              side_pool_get_stats(pool, &stats) == SIDE_FORKED && side_pool_trim(pool) == 0 &&
              side_pool_create(device, NULL, &made) == SIDE_FORKED && side_device_pool(device, &made) == SIDE_FORKED &&
              side_memory_pin(device, &p, 8) == SIDE_FORKED && side_memory_unpin(device, &p) == SIDE_FORKED &&
              p == NULL && made == NULL;
    side_pool_destroy(pool);
    pool_device_finish(device);
    return ok ? 0 : 1;
}

T_TEST(forked_child)
{
    side_device *device = open_device("sim");
    side_pool *pool = make_pool(device, 8 * MIB, 0);
    void *data = take(pool, 5000);
    int status;

    pid_t child = fork();
    if (child == 0)
        _exit(in_child(device, pool, data));
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    put(pool, data);
    side_pool_destroy(pool);
    side_device_close(device);
}

/* A check that never fails checks nothing. */
T_TEST(validity_sees_damage)
{
    side_device *device = open_device("sim");
    side_pool *pool = make_pool(device, 8 * MIB, 0);
    void *a = take(pool, 100), *b = take(pool, 5000);

    put(pool, a);
    assert_true(pool_is_valid(pool));
    size_t *counters[] = {&pool->granted,
                          &pool->asked,
                          &pool->pending,
                          &pool->region_total,
                          &pool->regions->blocks,
                          &pool->regions->first->bytes,
                          &pool->regions->first->after->offset};
    for (size_t i = 0; i < sizeof(counters) / sizeof(counters[0]); i++) {
        *counters[i] += 64;
        assert_false(pool_is_valid(pool));
        *counters[i] -= 64;
    }
    pool->bin_bits[0] ^= 1;
    assert_false(pool_is_valid(pool));
    pool->bin_bits[0] ^= 1;
    pool->budget = 4096;
    assert_false(pool_is_valid(pool));
    pool->budget = 8 * MIB;
    assert_true(pool_is_valid(pool));
    put(pool, b);
    side_pool_destroy(pool);
    side_device_close(device);
}

T_MAIN(T_LONG(random_sequences_keep_the_rules, 120), T(waste_at_every_size), T(neighbours_join), T(page_tails_are_used),
       T(regions_shrink_to_the_budget), T(cached_regions), T(large_block_in_a_shared_region), T(strangers_are_refused),
       T(options), T(default_budget), T(blocks_left_are_reported_and_kept), T(freed_blocks_are_poisoned),
       T(forked_child), T(validity_sees_damage))
