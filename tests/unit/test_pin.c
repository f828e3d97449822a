/* SPDX-License-Identifier: MIT
 *
 * Pinning the caller's memory in place. The table works to the byte where the device does, and in whole pages where it does not: the software
 * device wants whole pages, so a table of ops that takes bytes, as drivers do, stands in for those. */
#include "pool_help.h"

#include <sys/mman.h>

#define PAGE ((size_t)4096)

/* ---------------------------------------------------------------- a device that takes bytes */

enum { MOST = 256 };

struct registration {
    uintptr_t begin, end;
    bool read_only;
};

static struct fake {
    struct registration at[MOST];
    int count;
    uintptr_t read_only_begin, read_only_end; /* memory that only registers read-only */
    int fail_in;                              /* the nth registration from now fails */
    int refuse_unpin;
    const struct side_device_ops *sim;
} fake;

static side_status fake_register(dev_context *context, void *data, size_t bytes, bool read_only)
{
    struct registration r = {(uintptr_t)data, (uintptr_t)data + bytes, read_only};

    (void)context;
    if (fake.fail_in > 0 && --fake.fail_in == 0)
        return error_set(SIDE_NO_MEMORY, "fake", "scripted");
    for (int i = 0; i < fake.count; i++)
        if (fake.at[i].begin < r.end && r.begin < fake.at[i].end)
            return error_set(SIDE_DEVICE_ERROR, "fake", "already registered");
    if (!read_only && r.begin < fake.read_only_end && fake.read_only_begin < r.end)
        return error_set(SIDE_INVALID, "fake", "read-only mapping");
    assert_true(fake.count < MOST);
    fake.at[fake.count++] = r;
    return SIDE_OK;
}

static side_status fake_unregister(dev_context *context, void *data)
{
    (void)context;
    if (fake.refuse_unpin > 0) {
        fake.refuse_unpin--;
        return error_set(SIDE_DEVICE_ERROR, "fake", "scripted");
    }
    for (int i = 0; i < fake.count; i++)
        if (fake.at[i].begin == (uintptr_t)data) {
            fake.at[i] = fake.at[--fake.count];
            return SIDE_OK;
        }
    T_FAIL("unregister of %p, which is not registered", data);
}

static side_status fake_kind(dev_context *context, const void *data, side_memory_kind *kind)
{
    (void)context;
    *kind = SIDE_MEMORY_PAGEABLE;
    for (int i = 0; i < fake.count; i++)
        if ((uintptr_t)data >= fake.at[i].begin && (uintptr_t)data < fake.at[i].end)
            *kind = SIDE_MEMORY_PINNED;
    return SIDE_OK;
}

static struct side_device_ops fake_ops;

static side_device *open_fake(void)
{
    side_device *device = open_device("sim");
    fake_ops = *device->ops;
    fake_ops.host_register = fake_register;
    fake_ops.host_unregister = fake_unregister;
    fake_ops.memory_kind = fake_kind;
    device->ops = &fake_ops;
    return device;
}

static size_t fake_bytes(void)
{
    size_t n = 0;
    for (int i = 0; i < fake.count; i++)
        n += fake.at[i].end - fake.at[i].begin;
    return n;
}

static size_t in_place(side_device *device)
{
    side_pool *pool = NULL;
    T_OK(side_device_pool(device, &pool));
    return stats_of(pool).pinned_bytes;
}

/* ---------------------------------------------------------------- tests */

static char memory[64 * 4096] __attribute__((aligned(4096)));

T_TEST(exact_to_the_byte)
{
    side_device *device = open_fake();

    T_OK(side_memory_pin(device, memory + 100, 1000));
    T_OK(side_memory_pin(device, memory + 2000, 50)); /* the same page */
    assert_int_equal(fake_bytes(), 1050);
    assert_int_equal(pool_copy_span(device, memory + 100, 1000), 1000);
    assert_int_equal(pool_copy_span(device, memory, 200), 100);
    assert_int_equal(pool_copy_span(device, memory + 600, 1000), 500);
    T_OK(side_memory_unpin(device, memory + 100));
    assert_int_equal(fake_bytes(), 50);
    T_STATUS(side_memory_unpin(device, memory + 100), SIDE_INVALID);
    T_OK(side_memory_unpin(device, memory + 2000));
    assert_int_equal(fake.count, 0);
    assert_int_equal(in_place(device), 0);
    side_device_close(device);
    assert_int_equal(mem_live(), 0);
}

T_TEST(overlapping_pins_share)
{
    side_device *device = open_fake();
    char *m = memory;

    T_OK(side_memory_pin(device, m + 1000, 1000));
    T_OK(side_memory_pin(device, m + 500, 3000)); /* around it: two gaps */
    assert_int_equal(fake.count, 3);
    assert_int_equal(fake_bytes(), 3000);
    assert_int_equal(pool_copy_span(device, m + 500, 3000), 500);
    assert_int_equal(pool_copy_span(device, m + 1000, 2500), 1000);
    T_OK(side_memory_pin(device, m + 1000, 10)); /* within: nothing new; the latest of that address goes first */
    assert_int_equal(fake_bytes(), 3000);
    T_OK(side_memory_unpin(device, m + 1000));
    T_OK(side_memory_unpin(device, m + 1000));
    assert_int_equal(fake_bytes(), 3000);
    T_OK(side_memory_unpin(device, m + 500));
    assert_int_equal(fake.count, 0);
    side_device_close(device);
}

T_TEST(random_pins_against_a_model)
{
    enum { UNITS = 60, PINS = 20 };
    T_FOR_SEEDS (seed, 60) {
        side_device *device = open_fake();
        t_rng rng = t_rng_make(seed);
        size_t begin[PINS], length[PINS] = {0};
        size_t unit = seed % 2 == 0 ? 1000 : PAGE;

        for (int step = 0; step < 200; step++) {
            size_t i = (size_t)t_rng_below(&rng, PINS);
            if (length[i] != 0) {
                T_OK(side_memory_unpin(device, memory + begin[i] * unit));
                /* Of pins with one address the latest goes; any of them does for the model if it has the same length. */
                length[i] = 0;
            } else {
                begin[i] = (size_t)t_rng_below(&rng, UNITS);
                bool taken = false;
                for (size_t k = 0; k < PINS; k++)
                    taken = taken || (length[k] != 0 && begin[k] == begin[i]);
                if (taken)
                    continue;
                length[i] = 1 + (size_t)t_rng_below(&rng, UNITS - begin[i]);
                T_OK(side_memory_pin(device, memory + begin[i] * unit, length[i] * unit));
            }
            for (size_t u = 0; u < UNITS; u++) {
                bool wanted = false;
                side_memory_kind kind;
                for (size_t k = 0; k < PINS; k++)
                    wanted = wanted || (length[k] != 0 && begin[k] <= u && u < begin[k] + length[k]);
                T_OK(fake_kind(NULL, memory + u * unit, &kind));
                if (wanted) /* more may be pinned: a segment goes as a whole */
                    assert_int_equal(kind, SIDE_MEMORY_PINNED);
            }
        }
        for (size_t k = 0; k < PINS; k++)
            if (length[k] != 0)
                T_OK(side_memory_unpin(device, memory + begin[k] * unit));
        assert_int_equal(fake.count, 0);
        assert_int_equal(in_place(device), 0);
        side_device_close(device);
    }
}

T_TEST(somebody_elses_pins)
{
    side_device *device = open_fake();

    T_OK(fake_register(NULL, memory, 5 * PAGE, false));
    T_OK(side_memory_pin(device, memory + 10, 3 * PAGE));
    assert_int_equal(in_place(device), 0);
    T_OK(side_memory_unpin(device, memory + 10));
    assert_int_equal(fake.count, 1);
    /* Partly theirs: where theirs ends is not for us to know. */
    T_STATUS(side_memory_pin(device, memory + 4 * PAGE, 3 * PAGE), SIDE_DEVICE_ERROR);
    assert_int_equal(fake.count, 1);
    assert_int_equal(in_place(device), 0);
    T_OK(fake_unregister(NULL, memory));
    side_device_close(device);
}

T_TEST(read_only_memory)
{
    side_device *device = open_fake();

    fake.read_only_begin = (uintptr_t)memory;
    fake.read_only_end = fake.read_only_begin + 2 * PAGE;
    T_OK(side_memory_pin(device, memory, 100));
    assert_true(fake.at[0].read_only);
    T_OK(side_memory_pin(device, memory + 2 * PAGE, 100));
    assert_false(fake.at[1].read_only);
    side_device_close(device); /* unpins them */
    assert_int_equal(fake.count, 0);
}

T_TEST(failures_leave_nothing)
{
    side_device *device = open_fake();

    T_OK(side_memory_pin(device, memory + 2 * PAGE, PAGE));
    T_OK(side_memory_pin(device, memory + 4 * PAGE, PAGE));
    for (int n = 1; n <= 3; n++) {
        fake.fail_in = n;
        T_STATUS(side_memory_pin(device, memory, 6 * PAGE), SIDE_NO_MEMORY);
        assert_int_equal(fake_bytes(), 2 * PAGE);
        assert_int_equal(in_place(device), 2 * PAGE);
    }
    /* One that does not unpin keeps its budget, and is used again. */
    fake.refuse_unpin = 1;
    T_STATUS(side_memory_unpin(device, memory + 2 * PAGE), SIDE_DEVICE_ERROR);
    assert_int_equal(in_place(device), 2 * PAGE);
    T_OK(side_memory_pin(device, memory + 2 * PAGE, PAGE));
    T_OK(side_memory_unpin(device, memory + 2 * PAGE));
    assert_int_equal(in_place(device), PAGE);
    side_device_close(device);
    assert_int_equal(fake.count, 0);
}

T_TEST(no_host_memory_for_the_table)
{
    side_device *device = open_fake();
    bool done = false;

    for (unsigned long n = 1; !done; n++) {
        mem_fail_at(n);
        side_status s = side_memory_pin(device, memory + n, 1);
        mem_fail_at(0);
        done = s == SIDE_OK;
        if (!done) {
            assert_int_equal(s, SIDE_NO_MEMORY);
            assert_int_equal(fake.count, 0);
        }
    }
    side_device_close(device);
    assert_int_equal(mem_live(), 0);
}

T_TEST(whole_pages_where_the_device_wants_them)
{
    side_device *device = open_device("sim");
    side_memory_kind kind;

    T_OK(side_memory_pin(device, memory + 100, 1000));
    assert_int_equal(in_place(device), PAGE);
    T_OK(side_memory_pin(device, memory + 2000, PAGE)); /* shares the first page */
    assert_int_equal(in_place(device), 2 * PAGE);
    T_OK(side_memory_unpin(device, memory + 100));
    T_OK(side_memory_get_kind(device, memory, &kind));
    assert_int_equal(kind, SIDE_MEMORY_PINNED);
    T_OK(side_memory_unpin(device, memory + 2000));
    T_OK(side_memory_get_kind(device, memory, &kind));
    assert_int_equal(kind, SIDE_MEMORY_PAGEABLE);
    assert_int_equal(in_place(device), 0);
    side_device_close(device);
    assert_int_equal(mem_live(), 0);
}

T_TEST(counts_against_the_budget)
{
    side_device *device = open_device("sim");
    side_pool *pool = NULL;

    T_OK(side_device_pool(device, &pool));
    pool->budget = 20 * PAGE;
    pool->region_bytes = 16 * PAGE;
    void *p = take(pool, 100);
    T_STATUS(side_memory_pin(device, memory, 5 * PAGE), SIDE_OVER_BUDGET);
    T_OK(side_memory_pin(device, memory, 4 * PAGE));
    put(pool, p);
    T_OK(side_memory_pin(device, memory + 8 * PAGE, 5 * PAGE)); /* the empty region goes */
    assert_int_equal(stats_of(pool).regions, 0);
    assert_int_equal(stats_of(pool).pinned_bytes, 9 * PAGE);
    assert_int_equal(stats_of(pool).slack_bytes, 0);
    side_device_close(device);
}

T_TEST(arguments)
{
    side_device *device = open_device("sim"), *cannot = open_device("sim:refuse_register=1");

    T_STATUS(side_memory_pin(device, NULL, 1), SIDE_INVALID);
    T_STATUS(side_memory_pin(device, memory, 0), SIDE_INVALID);
    T_STATUS(side_memory_pin(device, memory, SIZE_MAX), SIDE_INVALID);
    T_STATUS(side_memory_pin(NULL, memory, 1), SIDE_INVALID);
    T_STATUS(side_memory_unpin(device, memory), SIDE_INVALID);
    T_STATUS(side_memory_unpin(NULL, memory), SIDE_INVALID);
    T_STATUS(side_memory_pin(cannot, memory, 1), SIDE_UNSUPPORTED);
    assert_int_equal(pool_copy_span(device, memory, 10), 10);
    /* Not mapped. */
    void *gone = mmap(NULL, 4 * PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    munmap(gone, 4 * PAGE);
    T_STATUS(side_memory_pin(device, gone, PAGE), SIDE_DEVICE_ERROR);
    side_device_close(cannot);
    side_device_close(device);
}

T_MAIN(T(exact_to_the_byte), T(overlapping_pins_share), T(random_pins_against_a_model), T(somebody_elses_pins),
       T(read_only_memory), T(failures_leave_nothing), T(no_host_memory_for_the_table),
       T(whole_pages_where_the_device_wants_them), T(counts_against_the_budget), T(arguments))
