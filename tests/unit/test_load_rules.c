/* SPDX-License-Identifier: MIT
 *
 * What a load promises besides the right bytes: order, layout, what it costs the device, what it refuses and how it says so. */
#include "load_help.h"
#include "load_private.h"

#include <errno.h>
#include <sys/wait.h>

/* ---------------------------------------------------------------- order */

static uint64_t order[256];
static atomic_uint order_count;

static int read_noted(void *user, uint64_t source, uint64_t offset, void *buffer, size_t bytes)
{
    if (offset == 0)
        order[atomic_fetch_add(&order_count, 1)] = source;
    return load_read(user, source, offset, buffer, bytes);
}

T_TEST(order_is_the_caller_s)
{
    for (int in_order = 0; in_order < 2; in_order++) {
        side_device *dev = load_device("", 1);
        t_rng rng = t_rng_make(1);
        struct load_rig r;
        const uint64_t given[] = {5, 2, 7, 0, 3}, sorted[] = {0, 2, 3, 5, 7};

        load_rig_init(&r, dev, false, 8, &rng);
        for (size_t i = 0; i < 8; i++) { /* all have bytes */
            r.image[i] = realloc(r.image[i], 3000);
            r.bytes[i] = r.sources[i].bytes = 3000;
            t_rng_fill(&rng, r.image[i], 3000);
        }
        for (size_t i = 0; i < 5; i++)
            r.parts[i] = (side_load_part){.tensor = given[i]};
        r.o.parts = r.parts;
        r.o.count = 5;
        r.o.threads = 1;
        r.o.read = read_noted;
        r.o.flags = in_order ? SIDE_LOAD_IN_ORDER : 0;
        atomic_store(&order_count, 0);
        T_OK(side_load_start(dev, NULL, &r.o, &r.load));
        T_OK(side_load_wait(r.load, SIDE_LOAD_ALL, r.stream));
        T_OK(load_look(&r, &rng));
        assert_int_equal(atomic_load(&order_count), 5);
        assert_memory_equal(order, in_order ? given : sorted, sizeof(given));
        load_rig_finish(&r);
        load_close(dev);
    }
}

/* ---------------------------------------------------------------- batches */

/* Sixteen slots are full before there is memory for them: five go at once, each while it or the link alone has too little to do, then eight as one batch, then
 * the rest. Where slots may not wait for each other, each goes alone. */
T_TEST(full_slots_go_together)
{
    for (int ordered = 0; ordered < 2; ordered++) {
        side_device *dev = load_device("", 1);
        t_rng rng = t_rng_make(7);
        const size_t bytes = (size_t)16 * 4096;
        void *memory = NULL;
        struct load_rig r;
        side_load_stats s;

        setenv("SIDESTREAM_DISABLE", ordered ? "1" : "0", 1);
        load_rig_init(&r, dev, false, 1, &rng);
        r.image[0] = realloc(r.image[0], bytes);
        r.bytes[0] = r.sources[0].bytes = bytes;
        t_rng_fill(&rng, r.image[0], bytes);
        r.o.flags = SIDE_LOAD_GIVEN;
        r.o.piece_bytes = 4096;
        r.o.pinned_bytes = bytes;
        T_OK(side_device_alloc(dev, bytes, &memory));
        T_OK(side_load_start(dev, NULL, &r.o, &r.load));
        do {
            os_sleep_ns(100000);
            T_OK(side_load_get_stats(r.load, &s));
        } while (s.read_bytes < (ordered ? 4096 : bytes));
        assert_int_equal(s.copies, 0);
        T_OK(side_load_give_arena(r.load, 0, memory, r.stream));
        T_OK(load_look(&r, &rng));
        T_OK(side_load_join(r.load, &s));
        assert_int_equal(s.pieces, 16);
        assert_int_equal(s.copies, ordered ? 16 : 7);
        T_OK(side_load_destroy(r.load));
        r.load = NULL;
        side_device_free(dev, memory);
        load_rig_finish(&r);
        load_close(dev);
        unsetenv("SIDESTREAM_DISABLE");
    }
}

/* ---------------------------------------------------------------- layout */

struct expected {
    uint64_t moved, copies;
    size_t arena;
};

/* A file of these tensors, whose data begin at `remainder` mod 16. */
static void layout_is(const size_t *sizes, size_t count, size_t remainder, const bool *wanted, struct expected e)
{
    side_device *dev = load_device("", 1);
    t_rng rng = t_rng_make(1);
    struct load_rig r;
    side_load_stats s;
    side_load_arena arena;
    side_tensor t;

    load_rig_init(&r, dev, true, 1, &rng);
    side_checkpoint_close(r.ck);
    for (size_t i = 0; i < count; i++) {
        r.bytes[i] = sizes[i];
        r.image[i] = realloc(r.image[i], sizes[i] + 1);
        t_rng_fill(&rng, r.image[i], sizes[i]);
    }
    r.tensors = count;
    for (size_t pad = 0;; pad++) {
        load_file_write(&r, pad);
        T_OK(side_checkpoint_open(r.path, NULL, &r.ck));
        T_OK(side_checkpoint_tensor(r.ck, 0, &t));
        if (t.offset % 16 == remainder)
            break;
        side_checkpoint_close(r.ck);
    }
    for (size_t i = 0; i < count; i++)
        if (wanted == NULL || wanted[i])
            r.parts[r.o.count++] = (side_load_part){.tensor = i};
    r.o.parts = r.parts;
    r.o.piece_bytes = 1 << 20;
    r.o.pinned_bytes = 2 << 20;
    T_OK(side_load_start(dev, r.ck, &r.o, &r.load));
    T_OK(load_look(&r, &rng));
    T_OK(side_load_join(r.load, &s));
    assert_int_equal(side_load_arenas(r.load), 1);
    T_OK(side_load_get_arena(r.load, 0, &arena));
    if (s.moved_bytes != e.moved || s.copies != e.copies || arena.bytes != e.arena)
        T_FAIL("%llu bytes moved, %llu copies, arena %zu; want %llu, %llu, %zu", (unsigned long long)s.moved_bytes,
               (unsigned long long)s.copies, arena.bytes, (unsigned long long)e.moved, (unsigned long long)e.copies,
               e.arena);
    load_rig_finish(&r);
    load_close(dev);
}

T_TEST(layout_follows_the_file)
{
    static const size_t even[] = {64, 160, 1600, 32}, odd[] = {64, 3, 61, 64, 5}, far[] = {64, 20000, 64, 160};
    static const bool ends[] = {true, false, true, true};

    for (size_t remainder = 0; remainder < 16; remainder++) /* all alike: the arena is shifted, and one copy takes all */
        layout_is(even, 4, remainder, NULL, (struct expected){0, 1, 64 + 160 + 1600 + 32});
    /* 61 bytes at 67 are placed behind the rest, which is one copy across their gap: two commands in one batch. */
    layout_is(odd, 5, 8, NULL, (struct expected){61, 1, 64 + 64 + 64 + 16 + 64});
    /* A tensor that is not wanted takes no room, and two copies. */
    layout_is(far, 4, 0, ends, (struct expected){0, 1, 64 + 64 + 160});
}

/* ---------------------------------------------------------------- what it costs the device */

T_TEST(tensors_cost_no_events)
{
    side_device *dev = load_device("", 1);
    struct load_rig r;
    t_rng rng = t_rng_make(1);
    uint64_t calls[2];

    for (int many = 0; many < 2; many++) {
        load_rig_init(&r, dev, true, 64, &rng);
        r.o.piece_bytes = 1 << 20;
        r.o.pinned_bytes = 2 << 20;
        r.o.parts = r.parts;
        r.o.count = many ? 64 : 1;
        for (size_t i = 0; i < 64; i++)
            r.parts[i].tensor = i;
        calls[many] = sim_calls(dev->context);
        T_OK(side_load_start(dev, r.ck, &r.o, &r.load));
        for (size_t i = 0; i < r.o.count; i++)
            T_OK(side_load_wait(r.load, i, NULL));
        T_OK(side_load_join(r.load, NULL));
        calls[many] = sim_calls(dev->context) - calls[many];
        load_rig_finish(&r);
    }
    if (calls[1] > calls[0] + 20) /* looks at the copies vary */
        T_FAIL("%llu device calls for 64 tensors, %llu for one", (unsigned long long)calls[1],
               (unsigned long long)calls[0]);
    load_close(dev);
}

/* ---------------------------------------------------------------- refusals */

static void refuse(struct load_rig *r, side_status want, const char *words)
{
    side_load *load = NULL;

    T_STATUS(side_load_start(r->dev, r->ck, &r->o, &load), want);
    assert_null(load);
    if (strstr(side_last_error()->message, words) == NULL)
        T_FAIL("'%s' says nothing of '%s'", side_last_error()->message, words);
}

T_TEST(bad_options)
{
    side_device *dev = load_device("", 1), *other = load_device("", 2);
    t_rng rng = t_rng_make(3);
    struct load_rig r;
    side_load_options good;
    side_stream *strange;

    load_rig_init(&r, dev, true, 5, &rng);
    T_OK(side_stream_create(other, &strange));
    good = r.o;
#define REFUSE(change, status, words) \
    do {                              \
        r.o = good;                   \
        change;                       \
        refuse(&r, status, words);    \
    } while (0)
    REFUSE(r.o.size = 4, SIDE_INVALID, "_INIT");
    REFUSE(r.o.where = (side_memory_kind)9, SIDE_INVALID, "memory kind 9");
    REFUSE(r.o.flags = 64, SIDE_UNSUPPORTED, "0x40");
    REFUSE(r.o.align = 24, SIDE_INVALID, "align is 24");
    REFUSE(r.o.align = 8192, SIDE_INVALID, "align is 8192");
    REFUSE(r.o.piece_bytes = 5000, SIDE_INVALID, "piece_bytes is 5000");
    REFUSE(r.o.piece_bytes = (size_t)1 << 30, SIDE_INVALID, "piece_bytes is");
    REFUSE(r.o.threads = 65, SIDE_INVALID, "threads is 65");
    REFUSE(r.o.backend = (side_load_backend)7, SIDE_INVALID, "backend 7");
    REFUSE(r.o.timeout_s = -1, SIDE_INVALID, "timeout_s is -1");
    REFUSE(r.o.copy_stream = strange, SIDE_INVALID, "another device");
    REFUSE(r.o.memory_stream = strange, SIDE_INVALID, "another device");
    REFUSE(r.o.read = load_read, SIDE_INVALID, "options.read");
    REFUSE(r.o.count = 1, SIDE_INVALID, "parts NULL");
    REFUSE((r.o.parts = r.parts, r.o.count = 1, r.parts[0].tensor = 5), SIDE_INVALID,
           "part 0 is of tensor 5; there are 5");
    REFUSE((r.o.parts = r.parts, r.o.count = 1, r.parts[0] = (side_load_part){.tensor = 1, .begin = 1u << 20}),
           SIDE_INVALID, "part 0 is bytes 1048576");
    REFUSE((r.o.parts = r.parts, r.o.count = 1,
            r.parts[0] = (side_load_part){.tensor = 1, .begin = 1, .bytes = UINT64_MAX}),
           SIDE_INVALID, "part 0 is bytes");
    r.o = good;
    T_STATUS(side_load_start(dev, NULL, &r.o, &r.load), SIDE_INVALID);
    T_STATUS(side_load_start(dev, NULL, NULL, &r.load), SIDE_INVALID);
    T_STATUS(side_load_start(NULL, r.ck, NULL, &r.load), SIDE_INVALID);
    T_STATUS(side_load_start(dev, r.ck, NULL, NULL), SIDE_INVALID);
    assert_null(r.load);
    side_stream_destroy(strange);
    load_rig_finish(&r);
    load_close(dev);
    load_close(other);
}

T_TEST(states)
{
    side_device *dev = load_device("", 1);
    t_rng rng = t_rng_make(3);
    struct load_rig r;
    side_load_place place;
    side_load_arena arena;
    uint64_t hash;
    void *memory = NULL;

    load_rig_init(&r, dev, true, 30, &rng);
    r.o.flags = SIDE_LOAD_GIVEN;
    T_OK(side_load_start(dev, r.ck, &r.o, &r.load));
    size_t part = 0;
    while (r.bytes[part] == 0)
        part++;
    T_OK(side_load_get_place(r.load, part, &place));
    assert_null(place.data);
    assert_int_equal(place.arena, 0);
    T_STATUS(side_load_wait(r.load, part, NULL), SIDE_STATE);
    T_STATUS(side_load_wait(r.load, SIDE_LOAD_ALL, r.stream), SIDE_STATE);
    T_STATUS(side_load_query(r.load, part), SIDE_AGAIN);
    T_STATUS(side_load_wait_count(r.load, 30, 0), SIDE_AGAIN);
    T_STATUS(side_load_wait_count(r.load, 30, -1), SIDE_INVALID);
    T_STATUS(side_load_wait_count(r.load, 31, 0), SIDE_INVALID);
    T_STATUS(side_load_wait(r.load, 30, NULL), SIDE_INVALID);
    T_STATUS(side_load_query(r.load, 30), SIDE_INVALID);
    T_STATUS(side_load_get_place(r.load, 30, &place), SIDE_INVALID);
    T_STATUS(side_load_get_arena(r.load, 1, &arena), SIDE_INVALID);
    T_STATUS(side_load_get_checksum(r.load, 0, &hash), SIDE_STATE);
    T_OK(side_load_get_arena(r.load, 0, &arena));
    T_OK(side_device_alloc(dev, arena.bytes, &memory));
    T_STATUS(side_load_give_arena(r.load, 1, memory, NULL), SIDE_INVALID);
    T_STATUS(side_load_give_arena(r.load, 0, NULL, NULL), SIDE_INVALID);
    T_STATUS(side_load_give_arena(r.load, 0, (char *)memory + 1, NULL), SIDE_INVALID);
    T_OK(side_load_give_arena(r.load, 0, memory, r.stream));
    T_STATUS(side_load_give_arena(r.load, 0, memory, NULL), SIDE_STATE);
    sim_capture(r.stream->handle, true);
    T_STATUS(side_load_wait(r.load, part, r.stream), SIDE_STATE);
    sim_capture(r.stream->handle, false);
    T_OK(side_load_wait(r.load, SIDE_LOAD_ALL, NULL));
    T_OK(side_load_query(r.load, part));
    T_OK(load_look(&r, &rng));
    T_OK(side_load_join(r.load, NULL));
    side_load_cancel(r.load); /* too late, which is fine */
    T_OK(side_load_join(r.load, NULL));
    T_STATUS(side_load_wait(NULL, 0, NULL), SIDE_INVALID);
    assert_int_equal(side_load_count(NULL), 0);
    side_load_cancel(NULL);
    T_OK(side_load_destroy(NULL));
    T_OK(side_load_destroy(r.load));
    r.load = NULL;
    side_device_free(dev, memory);
    load_rig_finish(&r);
    load_close(dev);
}

/* What was queued on memory_stream before reads the old bytes; the load's copies come behind it. */
T_TEST(memory_is_written_after_its_stream)
{
    T_FOR_SEEDS (seed, 40) {
        side_device *dev = load_device("", seed);
        t_rng rng = t_rng_make(seed);
        struct load_rig r;
        side_op spin = SIDE_OP_INIT;
        const bool give = seed % 2 == 0;
        side_load_arena arena;
        void *memory = NULL, *old = NULL;
        const size_t bytes = 20000;

        load_rig_init(&r, dev, false, 1, &rng);
        r.bytes[0] = r.sources[0].bytes = bytes;
        r.image[0] = realloc(r.image[0], bytes);
        t_rng_fill(&rng, r.image[0], bytes);
        T_OK(side_device_alloc(dev, bytes + 16, &memory));
        T_OK(dev->ops->host_alloc(dev->context, bytes, &old));
        T_OK(side_memset_async(r.stream, memory, 0x5a, bytes));
        spin.id = SIDE_OP_SPIN;
        spin.dim[0] = 1000000;
        T_OK(side_op_async(r.stream, &spin));
        T_OK(side_copy_async(r.stream, SIDE_COPY_D2H, old, memory, bytes));
        r.parts[0] = (side_load_part){.data = memory};
        r.o.parts = give ? NULL : r.parts;
        r.o.count = !give;
        r.o.memory_stream = give ? NULL : r.stream;
        r.o.flags = give ? SIDE_LOAD_GIVEN : 0;
        T_OK(side_load_start(dev, NULL, &r.o, &r.load));
        if (give) {
            T_OK(side_load_get_arena(r.load, 0, &arena));
            assert_true(arena.bytes <= bytes + 16);
            T_OK(side_load_give_arena(r.load, 0, memory, r.stream));
        }
        T_OK(side_load_join(r.load, NULL));
        T_OK(load_look(&r, &rng));
        for (size_t i = 0; i < bytes; i++)
            if (((unsigned char *)old)[i] != 0x5a)
                T_FAIL("byte %zu was overwritten before it was read", i);
        T_OK(side_load_destroy(r.load));
        r.load = NULL;
        side_device_free(dev, memory);
        dev->ops->host_free(dev->context, old);
        load_rig_finish(&r);
        load_close(dev);
    }
}

T_TEST(forked_children_may_not)
{
    side_device *dev = load_device("", 1);
    t_rng rng = t_rng_make(3);
    struct load_rig r;
    int status;

    load_rig_init(&r, dev, true, 3, &rng);
    T_OK(side_load_start(dev, r.ck, &r.o, &r.load));
    T_OK(side_load_join(r.load, NULL));
    pid_t child = fork();
    if (child == 0)
        _exit(side_load_wait(r.load, 0, NULL) == SIDE_FORKED && side_load_join(r.load, NULL) == SIDE_FORKED &&
                      side_load_destroy(r.load) == SIDE_OK
                  ? 0
                  : 1);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    load_rig_finish(&r);
    load_close(dev);
}

/* ---------------------------------------------------------------- what limits */

struct limit_row {
    const char *limit;
    unsigned mib, ms, spent_ms[4]; /* copying, reads, memory, pins */
    unsigned starved;              /* of 100 pieces */
    bool cold;
};

static const struct limit_row limits[] = {
    {"link", 1000, 20, {15, 4, 0, 1}, 50, false},      {"page cache", 1000, 20, {15, 4, 0, 1}, 51, false},
    {"page cache", 1000, 20, {9, 10, 0, 1}, 0, false}, {"memory", 1000, 20, {6, 2, 7, 5}, 0, false},
    {"pins", 1000, 20, {6, 2, 5, 7}, 0, false},        {"too small", 1000, 9, {9, 0, 0, 0}, 0, false},
    {"too small", 63, 20, {9, 8, 1, 2}, 0, false},     {"link", 64, 20, {9, 8, 1, 2}, 0, false},
    {"too small", 63, 20, {12, 6, 1, 1}, 0, false},    {"too small", 63, 20, {4, 14, 1, 1}, 100, false},
    {"pins", 1, 291, {0, 1, 0, 290}, 0, false},        {"pins", 1, 20, {1, 2, 3, 12}, 100, false},
    {"memory", 1, 20, {3, 5, 12, 0}, 100, false},      {"too small", 1, 20, {2, 5, 9, 0}, 100, false},
    {"disk", 1, 20, {8, 12, 0, 0}, 100, true},         {"too small", 1, 20, {7, 9, 2, 1}, 100, true},
};

T_TEST(limits_are_told_where_they_can_be)
{
    side_device *dev = load_device("", 1);

    for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++) {
        const struct limit_row *row = &limits[i];
        struct side_load l = {.device = dev, .fork_generation = os_fork_generation(), .begin_ns = 5};
        side_load_stats s;
        pthread_mutex_init(&l.mutex, NULL);
        l.checkpoint = (void *)&l; /* files, not callbacks; no more is asked of it */
        l.plan.bytes = (uint64_t)row->mib << 20;
        l.plan.piece_count = l.done_pieces = 100;
        l.starved = row->starved;
        l.routes[READER_URING][row->cold ? READER_WHY_COLD : READER_WHY_CACHED].bytes = l.plan.bytes;
        l.end_ns = l.begin_ns + row->ms * UINT64_C(1000000);
        for (int k = 0; k < 4; k++)
            l.spent_ns[k] = row->spent_ms[k] * UINT64_C(1000000);
        T_OK(side_load_get_stats(&l, &s));
        if (strcmp(s.bottleneck, row->limit) != 0)
            T_FAIL("row %zu: '%s', not '%s'", i, s.bottleneck, row->limit);
        pthread_mutex_destroy(&l.mutex);
    }
    side_device_close(dev);
}

static const struct side_device_ops *fast_ops;

static side_status slow_register(dev_context *c, void *data, size_t bytes, bool read_only)
{
    usleep(50000);
    return fast_ops->host_register(c, data, bytes, read_only);
}

/* The first slots are pinned while the load is planned; the time counts. */
T_TEST(pinning_within_the_plan_counts)
{
    side_device *dev = load_device("", 1);
    t_rng rng = t_rng_make(1);
    struct side_device_ops slow = *dev->ops;
    side_load_stats s;
    struct load_rig r;

    fast_ops = dev->ops;
    slow.host_register = slow_register;
    dev->ops = &slow;
    load_rig_init(&r, dev, true, 20, &rng);
    T_OK(side_load_start(dev, r.ck, &r.o, &r.load));
    T_OK(side_load_join(r.load, &s));
    assert_true(s.wait_pins_s >= 0.05 && s.plan_s >= s.wait_pins_s && s.time_s >= s.plan_s);
    dev->ops = fast_ops;
    load_rig_finish(&r);
    load_close(dev);
}

T_MAIN(T(limits_are_told_where_they_can_be), T(pinning_within_the_plan_counts), T(order_is_the_caller_s),
       T(full_slots_go_together), T(layout_follows_the_file), T(tensors_cost_no_events), T(bad_options), T(states),
       T(memory_is_written_after_its_stream), T(forked_children_may_not))
