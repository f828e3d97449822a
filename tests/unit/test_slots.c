/* SPDX-License-Identifier: MIT
 *
 * Slots under the three policies: order, blocking and try forms, errors, tickets, and what a wait covers. slots_is_valid after every step. */
#include "pipe_help.h"

#include "fence.h"
#include "os.h"
#include "slots.h"

#include <math.h>
#include <pthread.h>

enum { SLOT_BYTES = 4096 };

struct fixture {
    side_device *dev;
    side_stream *s[4];
    side_slots *t;
};

static void fixture_open(struct fixture *f, side_policy policy, uint32_t count, uint32_t readers,
                         side_memory_kind where, uint64_t seed)
{
    side_slots_options o = SIDE_SLOTS_OPTIONS_INIT;

    rig_small_pool();
    f->dev = rig_device("", seed);
    for (int i = 0; i < 4; i++)
        T_OK(side_stream_create(f->dev, &f->s[i]));
    o.policy = policy;
    o.count = count;
    o.slot_bytes = SLOT_BYTES;
    o.readers = readers;
    o.where = where;
    T_OK(side_slots_create(f->dev, &o, &f->t));
    assert_true(slots_is_valid(f->t));
}

static void fixture_close(struct fixture *f)
{
    T_OK(side_slots_destroy(f->t));
    for (int i = 0; i < 4; i++)
        side_stream_destroy(f->s[i]);
    rig_close(f->dev);
}

static void spin(side_stream *s, uint64_t ns)
{
    T_OK(rig_op(s, NULL, NULL, 0, ns));
}

static uint64_t put(struct fixture *f, uint64_t key, side_stream *s)
{
    side_slot slot;

    T_OK(side_slots_acquire(f->t, key, s, &slot));
    T_OK(side_slots_publish(f->t, &slot, s, NULL));
    assert_true(slots_is_valid(f->t));
    return slot.key;
}

static void get(struct fixture *f, uint64_t key, side_stream *s)
{
    side_slot slot;

    T_OK(side_slots_take(f->t, key, s, &slot));
    assert_int_equal(slot.key, key);
    T_OK(side_slots_release(f->t, &slot, s));
    assert_true(slots_is_valid(f->t));
}

/* ---------------------------------------------------------------- ring */

T_TEST(ring_order)
{
    struct fixture f;
    side_slot w, r;

    fixture_open(&f, SIDE_RING, 3, 0, SIDE_MEMORY_DEVICE, 1);
    for (uint64_t i = 0; i < 20; i++) {
        T_STATUS(side_slots_try_take(f.t, i, f.s[1], &r), SIDE_AGAIN);
        T_OK(side_slots_acquire(f.t, 999, f.s[0], &w)); /* the key is ignored */
        assert_int_equal(w.key, i);
        assert_int_equal(w.index, i % 3);
        assert_int_equal(w.bytes, SLOT_BYTES);
        assert_int_equal(w.generation, i / 3 + 1);
        T_STATUS(side_slots_take(f.t, i, f.s[1], &r), SIDE_WOULD_DEADLOCK); /* this thread writes it */
        T_OK(side_slots_publish(f.t, &w, f.s[0], NULL));
        T_STATUS(side_slots_publish(f.t, &w, f.s[0], NULL), SIDE_STATE);
        T_OK(side_slots_take(f.t, i, f.s[1], &r));
        assert_ptr_equal(r.data, w.data);
        T_STATUS(side_slots_take(f.t, i, f.s[1], &w), SIDE_STATE); /* all its readers have come */
        T_STATUS(side_slots_give_back(f.t, &r), SIDE_STATE);
        T_OK(side_slots_release(f.t, &r, f.s[1]));
        T_STATUS(side_slots_release(f.t, &r, f.s[1]), SIDE_STATE);
        assert_true(slots_is_valid(f.t));
    }
    T_STATUS(side_slots_take(f.t, 3, f.s[1], &r), SIDE_STALE);
    T_STATUS(side_slots_try_take(f.t, 25, f.s[1], &r), SIDE_AGAIN);
    fixture_close(&f);
}

T_TEST(ring_full)
{
    struct fixture f;
    side_slot a, b, c, r0, r1;

    fixture_open(&f, SIDE_RING, 2, 0, SIDE_MEMORY_DEVICE, 1);
    T_OK(side_slots_acquire(f.t, 0, f.s[0], &a));
    T_OK(side_slots_acquire(f.t, 0, f.s[0], &b));
    T_STATUS(side_slots_try_acquire(f.t, 0, f.s[0], &c), SIDE_AGAIN);
    T_STATUS(side_slots_acquire(f.t, 0, f.s[0], &c), SIDE_WOULD_DEADLOCK); /* it writes the slot itself */
    T_OK(side_slots_publish(f.t, &b, f.s[0], NULL));                       /* out of order */
    T_OK(side_slots_publish(f.t, &a, f.s[0], NULL));
    T_OK(side_slots_take(f.t, 1, f.s[1], &r1));
    T_OK(side_slots_take(f.t, 0, f.s[1], &r0));
    T_STATUS(side_slots_acquire(f.t, 0, f.s[0], &c), SIDE_WOULD_DEADLOCK); /* it reads the slot itself */
    T_OK(side_slots_release(f.t, &r1, f.s[1]));
    T_STATUS(side_slots_try_acquire(f.t, 0, f.s[0], &c), SIDE_AGAIN); /* slot 0 comes first */
    T_OK(side_slots_release(f.t, &r0, f.s[1]));
    T_OK(side_slots_try_acquire(f.t, 0, f.s[0], &c));
    assert_int_equal(c.index, 0);
    T_STATUS(side_slots_release(f.t, &r0, f.s[1]), SIDE_STALE); /* rewritten since */
    T_OK(side_slots_publish(f.t, &c, f.s[0], NULL));
    assert_true(slots_is_valid(f.t));
    fixture_close(&f);
}

/* They leave everything as it was, and look for deadlocks as their unlimited forms do. */
T_TEST(waits_with_a_limit)
{
    struct fixture f;
    side_slot a, b, c, r0;
    uint64_t begin = os_now_ns();

    fixture_open(&f, SIDE_RING, 2, 0, SIDE_MEMORY_DEVICE, 1);
    T_STATUS(side_slots_take_for(f.t, 0, f.s[1], 0.01, &r0), SIDE_AGAIN);
    assert_true(os_now_ns() - begin >= 10000000);
    T_STATUS(side_slots_take_for(f.t, 0, f.s[1], -1, &r0), SIDE_INVALID);
    T_STATUS(side_slots_acquire_for(f.t, 0, f.s[0], NAN, &a), SIDE_INVALID);
    T_OK(side_slots_acquire_for(f.t, 0, f.s[0], 0.01, &a));
    T_OK(side_slots_acquire_for(f.t, 0, f.s[0], 1e300, &b));
    T_STATUS(side_slots_acquire_for(f.t, 0, f.s[0], 0.01, &c), SIDE_WOULD_DEADLOCK);
    T_OK(side_slots_publish(f.t, &a, f.s[0], NULL));
    T_OK(side_slots_publish(f.t, &b, f.s[0], NULL));
    begin = os_now_ns();
    T_STATUS(side_slots_acquire_for(f.t, 0, f.s[0], 0.01, &c), SIDE_AGAIN); /* nobody has read slot 0 */
    assert_true(os_now_ns() - begin >= 10000000);
    T_OK(side_slots_take_for(f.t, 0, f.s[1], 0, &r0));
    T_OK(side_slots_release(f.t, &r0, f.s[1]));
    T_OK(side_slots_acquire_for(f.t, 0, f.s[0], 0, &c));
    assert_int_equal(c.key, 2);
    T_OK(side_slots_publish(f.t, &c, f.s[0], NULL));
    side_slots_poison(f.t, SIDE_CANCELLED);
    T_STATUS(side_slots_take_for(f.t, 9, f.s[1], 100, &r0), SIDE_CANCELLED);
    assert_true(slots_is_valid(f.t));
    fixture_close(&f);
}

/* Three releases free an item, on streams of their own, in any order; several takes by one stream count as well. */
T_TEST(ring_readers)
{
    struct fixture f;
    side_slot r[3], w;

    fixture_open(&f, SIDE_RING, 1, 3, SIDE_MEMORY_DEVICE, 1);
    T_FOR_SEEDS (seed, 50) {
        t_rng rng = t_rng_make(seed);
        uint64_t item = put(&f, 0, f.s[0]);
        int order[3] = {0, 1, 2};
        for (int i = 0; i < 3; i++)
            T_OK(side_slots_take(f.t, item, f.s[1 + t_rng_below(&rng, 3)], &r[i]));
        T_STATUS(side_slots_take(f.t, item, f.s[1], &w), SIDE_STATE);
        for (int i = 2; i > 0; i--) {
            int k = (int)t_rng_below(&rng, (uint64_t)i + 1), swap = order[i];
            order[i] = order[k];
            order[k] = swap;
        }
        for (int i = 0; i < 3; i++) {
            T_STATUS(side_slots_try_acquire(f.t, 0, f.s[0], &w), SIDE_AGAIN);
            T_OK(side_slots_release(f.t, &r[order[i]], f.s[1 + t_rng_below(&rng, 3)]));
            assert_true(slots_is_valid(f.t));
        }
    }
    fixture_close(&f);
}

T_TEST(ring_abandon_close_restart)
{
    struct fixture f;
    side_slot w, r;

    fixture_open(&f, SIDE_RING, 2, 0, SIDE_MEMORY_DEVICE, 1);
    T_OK(side_slots_acquire(f.t, 0, f.s[0], &w));
    T_OK(side_slots_abandon(f.t, &w, f.s[0]));
    T_STATUS(side_slots_abandon(f.t, &w, f.s[0]), SIDE_STATE);
    T_STATUS(side_slots_take(f.t, 0, f.s[1], &r), SIDE_CANCELLED);
    put(&f, 0, f.s[0]);
    T_OK(side_slots_acquire(f.t, 0, f.s[0], &w)); /* the abandoned slot is free */
    assert_int_equal(w.key, 2);
    T_STATUS(slots_restart(f.t), SIDE_STATE);
    T_OK(side_slots_publish(f.t, &w, f.s[0], NULL));
    slots_close(f.t);
    T_STATUS(side_slots_take(f.t, 3, f.s[1], &r), SIDE_END);
    T_STATUS(side_slots_try_take(f.t, 3, f.s[1], &r), SIDE_END);
    get(&f, 1, f.s[1]);
    get(&f, 2, f.s[1]);
    T_OK(slots_restart(f.t));
    T_STATUS(side_slots_try_take(f.t, 0, f.s[1], &r), SIDE_AGAIN);
    assert_int_equal(put(&f, 0, f.s[0]), 0);
    get(&f, 0, f.s[1]);
    fixture_close(&f);
}

/* try_ for the host: not before the device is done. */
T_TEST(host_try_waits_for_the_device)
{
    struct fixture f;
    side_slot w, r;

    fixture_open(&f, SIDE_RING, 1, 0, SIDE_MEMORY_PINNED, 1);
    T_OK(side_slots_acquire(f.t, 0, f.s[0], &w));
    spin(f.s[0], 100000);
    T_OK(side_slots_publish(f.t, &w, f.s[0], NULL));
    T_STATUS(side_slots_try_take(f.t, 0, NULL, &r), SIDE_AGAIN);
    T_OK(side_slots_take(f.t, 0, NULL, &r));
    assert_true(side_device_now_ns(f.dev) >= 100000);
    T_OK(side_slots_release(f.t, &r, NULL));
    T_OK(side_slots_try_acquire(f.t, 0, NULL, &w));
    T_OK(side_slots_publish(f.t, &w, NULL, NULL));
    T_OK(side_slots_take(f.t, 1, f.s[1], &r));
    spin(f.s[1], 100000);
    T_OK(side_slots_release(f.t, &r, f.s[1]));
    T_STATUS(side_slots_try_acquire(f.t, 0, NULL, &w), SIDE_AGAIN);
    T_OK(side_slots_acquire(f.t, 0, NULL, &w));
    T_OK(side_slots_abandon(f.t, &w, NULL));
    fixture_close(&f);
}

/* ---------------------------------------------------------------- several compute streams, right for every order of effects */

T_TEST(ring_over_several_streams)
{
    enum { ITEMS = 24, COUNT = 3 };
    T_FOR_SEEDS (seed, 150) {
        t_rng rng = t_rng_make(seed);
        struct fixture f;
        side_slot w, r;
        void *host, *seen;

        fixture_open(&f, SIDE_RING, COUNT, 2, SIDE_MEMORY_DEVICE, seed);
        T_OK(f.dev->ops->host_alloc(f.dev->context, (size_t)ITEMS * SLOT_BYTES, &host));
        T_OK(f.dev->ops->host_alloc(f.dev->context, 2 * (size_t)ITEMS * SLOT_BYTES, &seen));
        t_rng_fill(&rng, host, (size_t)ITEMS * SLOT_BYTES);
        for (uint64_t i = 0; i < ITEMS; i++) {
            T_OK(side_slots_acquire(f.t, 0, f.s[0], &w));
            T_OK(side_copy_async(f.s[0], SIDE_COPY_H2D, w.data, (char *)host + i * SLOT_BYTES, SLOT_BYTES));
            T_OK(side_slots_publish(f.t, &w, f.s[0], NULL));
            for (uint64_t k = 0; k < 2; k++) {
                side_stream *s = f.s[1 + t_rng_below(&rng, 3)];
                T_OK(side_slots_take(f.t, i, s, &r));
                spin(s, t_rng_below(&rng, 20000) + 1);
                T_OK(side_copy_async(s, SIDE_COPY_D2H, (char *)seen + (2 * i + k) * SLOT_BYTES, r.data, SLOT_BYTES));
                T_OK(side_slots_release(f.t, &r, s));
            }
        }
        T_OK(side_slots_drain(f.t, 0));
        for (uint64_t i = 0; i < 2 * ITEMS; i++)
            assert_memory_equal((char *)seen + i * SLOT_BYTES, (char *)host + i / 2 * SLOT_BYTES, SLOT_BYTES);
        f.dev->ops->host_free(f.dev->context, host);
        f.dev->ops->host_free(f.dev->context, seen);
        fixture_close(&f);
    }
}

/* R3. Copy i+1 queued after compute i, as textbooks do: a wait on the tail would cover compute i and nothing would overlap. A slot's own fences
 * make it exact. */
T_TEST(copy_queued_after_compute_overlaps)
{
    enum { ITEMS = 30, COMPUTE_NS = 8000 };
    for (uint32_t count = 2; count <= 4; count++) {
        struct fixture f;
        side_slot w, r;
        void *host;

        fixture_open(&f, SIDE_RING, count, 0, SIDE_MEMORY_DEVICE, 1);
        T_OK(f.dev->ops->host_alloc(f.dev->context, SLOT_BYTES, &host));
        T_OK(side_slots_acquire(f.t, 0, f.s[0], &w));
        T_OK(side_copy_async(f.s[0], SIDE_COPY_H2D, w.data, host, SLOT_BYTES));
        T_OK(side_slots_publish(f.t, &w, f.s[0], NULL));
        T_OK(side_stream_sync(f.s[0], 0));
        uint64_t copy_ns = side_device_now_ns(f.dev);
        for (uint64_t i = 0; i < ITEMS; i++) {
            T_OK(side_slots_take(f.t, i, f.s[1], &r));
            spin(f.s[1], COMPUTE_NS);
            T_OK(side_slots_release(f.t, &r, f.s[1]));
            if (i + 1 == ITEMS)
                break;
            T_OK(side_slots_acquire(f.t, 0, f.s[0], &w));
            T_OK(side_copy_async(f.s[0], SIDE_COPY_H2D, w.data, host, SLOT_BYTES));
            T_OK(side_slots_publish(f.t, &w, f.s[0], NULL));
        }
        T_OK(side_stream_sync(f.s[1], 0));
        double bound = side_timeline_bound(ITEMS, (double)copy_ns * 1e-9, COMPUTE_NS * 1e-9, 0, 2);
        assert_int_equal(side_device_now_ns(f.dev), llround(bound * 1e9));
        f.dev->ops->host_free(f.dev->context, host);
        fixture_close(&f);
    }
}

/* ---------------------------------------------------------------- tickets */

T_TEST(tickets)
{
    struct fixture f;
    side_ticket old, now, bad;
    side_slot w;

    fixture_open(&f, SIDE_RING, 1, 0, SIDE_MEMORY_DEVICE, 1);
    T_OK(side_slots_acquire(f.t, 0, f.s[0], &w));
    spin(f.s[0], 50000);
    T_OK(side_slots_publish(f.t, &w, f.s[0], &old));
    T_STATUS(side_ticket_query(&old), SIDE_AGAIN);
    T_STATUS(side_ticket_wait(&old, 1e-6), SIDE_STUCK); /* 1 us of 50 */
    T_OK(side_ticket_stream_wait(&old, f.s[2]));
    T_OK(side_stream_sync(f.s[2], 0)); /* after the spin */
    assert_true(side_device_now_ns(f.dev) >= 50000);
    T_OK(side_ticket_query(&old));
    T_OK(side_ticket_wait(&old, 0));
    get(&f, 0, f.s[1]);
    T_OK(side_slots_acquire(f.t, 0, f.s[0], &w));
    T_OK(side_ticket_query(&old)); /* overwritten: it was filled */
    T_OK(side_ticket_wait(&old, 0));
    T_OK(side_ticket_stream_wait(&old, f.s[2]));
    spin(f.s[0], 50000);
    now = (side_ticket){f.t, w.generation, w.index};
    T_STATUS(side_ticket_query(&now), SIDE_AGAIN); /* not published yet */
    T_OK(side_slots_publish(f.t, &w, f.s[0], &now));
    assert_int_equal(now.generation, old.generation + 1);
    T_OK(side_ticket_wait(&now, 0));
    bad = now;
    bad.generation++;
    T_STATUS(side_ticket_query(&bad), SIDE_INVALID);
    bad = now;
    bad.index = 1;
    T_STATUS(side_ticket_wait(&bad, 0), SIDE_INVALID);
    bad = now;
    bad.generation = 0;
    T_STATUS(side_ticket_query(&bad), SIDE_INVALID);
    T_STATUS(side_ticket_query(NULL), SIDE_INVALID);
    T_STATUS(side_ticket_wait(NULL, 0), SIDE_INVALID);
    T_STATUS(side_ticket_stream_wait(NULL, f.s[0]), SIDE_INVALID);
    T_STATUS(side_ticket_stream_wait(&now, NULL), SIDE_INVALID);
    fixture_close(&f);
}

/* ---------------------------------------------------------------- list */

T_TEST(list_oldest_free_first)
{
    struct fixture f;
    side_slot w[3], r, x;

    fixture_open(&f, SIDE_LIST, 3, 0, SIDE_MEMORY_DEVICE, 1);
    T_STATUS(side_slots_take(f.t, 0, f.s[1], &r), SIDE_NOT_FOUND);
    T_STATUS(side_slots_take(f.t, 3, f.s[1], &r), SIDE_NOT_FOUND);
    for (uint32_t i = 0; i < 3; i++) {
        T_OK(side_slots_acquire(f.t, 0, f.s[0], &w[i]));
        assert_int_equal(w[i].index, i);
        assert_int_equal(w[i].key, i);
    }
    T_STATUS(side_slots_try_acquire(f.t, 0, f.s[0], &x), SIDE_AGAIN);
    T_STATUS(side_slots_acquire(f.t, 0, f.s[0], &x), SIDE_WOULD_DEADLOCK);
    T_STATUS(side_slots_give_back(f.t, &w[0]), SIDE_STATE); /* being written */
    for (int i = 0; i < 3; i++)
        T_OK(side_slots_publish(f.t, &w[i], f.s[0], NULL));
    T_OK(side_slots_take(f.t, 1, f.s[1], &r));
    T_STATUS(side_slots_give_back(f.t, &w[1]), SIDE_STATE); /* being read */
    T_OK(side_slots_release(f.t, &r, f.s[1]));
    T_OK(side_slots_give_back(f.t, &w[1]));
    T_STATUS(side_slots_give_back(f.t, &w[1]), SIDE_STATE);
    T_OK(side_slots_give_back(f.t, &w[2]));
    T_OK(side_slots_give_back(f.t, &w[0]));
    assert_true(slots_is_valid(f.t));
    T_OK(side_slots_acquire(f.t, 0, f.s[0], &x));
    assert_int_equal(x.index, 1);
    T_STATUS(side_slots_give_back(f.t, &w[1]), SIDE_STALE);
    T_OK(side_slots_abandon(f.t, &x, f.s[0])); /* goes to the end */
    T_OK(side_slots_acquire(f.t, 0, f.s[0], &x));
    assert_int_equal(x.index, 2);
    T_OK(side_slots_acquire(f.t, 0, f.s[0], &x));
    assert_int_equal(x.index, 0);
    T_OK(side_slots_acquire(f.t, 0, f.s[0], &x));
    assert_int_equal(x.index, 1);
    fixture_close(&f);
}

/* A write that nobody read, or that was given up, comes before the next one all the same: by the filled fence, where there are no readers. */
T_TEST(write_after_unread_write)
{
    static const side_policy policies[] = {SIDE_RING, SIDE_LIST, SIDE_TABLE};

    T_FOR_SEEDS (seed, 60) {
        struct fixture f;
        side_slot w, r;
        void *host;
        char seen[SLOT_BYTES];

        fixture_open(&f, policies[seed % 3], 1, 0, SIDE_MEMORY_DEVICE, seed);
        T_OK(f.dev->ops->host_alloc(f.dev->context, 20 * (size_t)SLOT_BYTES, &host));
        for (uint64_t i = 0; i < 20; i++) {
            memset((char *)host + i * SLOT_BYTES, (int)i + 1, SLOT_BYTES);
            T_OK(side_slots_acquire(f.t, i, f.s[i % 3], &w));
            T_OK(side_copy_async(f.s[i % 3], SIDE_COPY_H2D, w.data, (char *)host + i * SLOT_BYTES, SLOT_BYTES));
            if (i + 1 == 20)
                break;
            if (seed % 3 == 0 || i % 2 == 0) {
                T_OK(side_slots_abandon(f.t, &w, f.s[i % 3]));
            } else {
                T_OK(side_slots_publish(f.t, &w, f.s[i % 3], NULL));
                if (seed % 3 == 1 || i % 3 == 0)
                    T_OK(side_slots_give_back(f.t, &w));
            }
        }
        T_OK(side_slots_publish(f.t, &w, f.s[19 % 3], NULL));
        T_OK(side_slots_take(f.t, w.key, f.s[3], &r));
        T_OK(side_copy_async(f.s[3], SIDE_COPY_D2H, seen, r.data, SLOT_BYTES));
        T_OK(side_slots_release(f.t, &r, f.s[3]));
        T_OK(side_slots_drain(f.t, 0));
        assert_memory_equal(seen, (char *)host + 19 * (size_t)SLOT_BYTES, SLOT_BYTES);
        f.dev->ops->host_free(f.dev->context, host);
        fixture_close(&f);
    }
}

/* ---------------------------------------------------------------- table */

T_TEST(table_evicts_the_least_recently_used)
{
    struct fixture f;
    side_slot w, r, x;

    fixture_open(&f, SIDE_TABLE, 3, 0, SIDE_MEMORY_DEVICE, 1);
    T_STATUS(side_slots_take(f.t, 10, f.s[1], &r), SIDE_NOT_FOUND);
    put(&f, 10, f.s[0]);
    put(&f, 20, f.s[0]);
    put(&f, 30, f.s[0]);
    T_STATUS(side_slots_acquire(f.t, 20, f.s[0], &w), SIDE_INVALID);
    get(&f, 10, f.s[1]); /* used: 20 is the oldest now */
    put(&f, 40, f.s[0]);
    T_STATUS(side_slots_take(f.t, 20, f.s[1], &r), SIDE_NOT_FOUND);
    T_OK(side_slots_take(f.t, 30, f.s[1], &r)); /* read: not evicted, though next but for that */
    put(&f, 50, f.s[0]);                        /* evicts 10 */
    T_STATUS(side_slots_take(f.t, 10, f.s[1], &x), SIDE_NOT_FOUND);
    put(&f, 60, f.s[0]); /* evicts 40 */
    T_STATUS(side_slots_take(f.t, 40, f.s[1], &x), SIDE_NOT_FOUND);
    T_STATUS(side_slots_give_back(f.t, &r), SIDE_STATE);
    T_OK(side_slots_release(f.t, &r, f.s[1]));
    T_OK(side_slots_give_back(f.t, &r));
    T_STATUS(side_slots_take(f.t, 30, f.s[1], &x), SIDE_NOT_FOUND);
    assert_true(slots_is_valid(f.t));
    T_OK(side_slots_acquire(f.t, 70, f.s[0], &w)); /* the free slot, no eviction */
    get(&f, 50, f.s[1]);
    get(&f, 60, f.s[1]);
    T_OK(side_slots_abandon(f.t, &w, f.s[0]));
    T_STATUS(side_slots_take(f.t, 70, f.s[1], &x), SIDE_NOT_FOUND);
    fixture_close(&f);
}

T_TEST(table_full_of_readers)
{
    struct fixture f;
    side_slot r[2], w;

    fixture_open(&f, SIDE_TABLE, 2, 0, SIDE_MEMORY_DEVICE, 1);
    put(&f, 1, f.s[0]);
    put(&f, 2, f.s[0]);
    T_OK(side_slots_take(f.t, 1, f.s[1], &r[0]));
    T_OK(side_slots_take(f.t, 2, f.s[1], &r[1]));
    T_STATUS(side_slots_try_acquire(f.t, 3, f.s[0], &w), SIDE_AGAIN);
    T_STATUS(side_slots_acquire(f.t, 3, f.s[0], &w), SIDE_WOULD_DEADLOCK);
    T_OK(side_slots_release(f.t, &r[0], f.s[1]));
    T_OK(side_slots_acquire(f.t, 3, f.s[0], &w));
    assert_int_equal(w.index, r[0].index);
    T_STATUS(side_slots_release(f.t, &r[0], f.s[1]), SIDE_STALE);
    fixture_close(&f);
}

/* 17 streams read one slot: entries of readers that have drained are used again, else the 17th is refused. */
T_TEST(more_streams_than_reader_entries)
{
    side_stream *s[SIDE_MAX_READERS + 2];
    struct fixture f;
    side_slot r[SIDE_MAX_READERS + 2];

    fixture_open(&f, SIDE_LIST, 1, 0, SIDE_MEMORY_DEVICE, 1);
    put(&f, 0, f.s[0]);
    for (int i = 0; i < SIDE_MAX_READERS + 2; i++)
        T_OK(side_stream_create(f.dev, &s[i]));
    for (int i = 0; i < SIDE_MAX_READERS; i++)
        T_OK(side_slots_take(f.t, 0, s[i], &r[i]));
    T_STATUS(side_slots_take(f.t, 0, s[16], &r[16]), SIDE_TOO_LARGE);
    spin(s[3], 1000);
    T_OK(side_slots_release(f.t, &r[3], s[3]));
    T_STATUS(side_slots_take(f.t, 0, s[16], &r[16]), SIDE_TOO_LARGE); /* not drained on the device yet */
    T_OK(side_stream_sync(s[3], 0));
    T_OK(side_slots_take(f.t, 0, s[16], &r[16]));
    assert_true(slots_is_valid(f.t));
    for (int i = 0; i < SIDE_MAX_READERS + 1; i++)
        if (i != 3)
            T_OK(side_slots_release(f.t, &r[i], s[i]));
    for (int i = 0; i < SIDE_MAX_READERS + 2; i++)
        side_stream_destroy(s[i]);
    fixture_close(&f);
}

/* ---------------------------------------------------------------- table against a model */

enum { MODEL_SLOTS = 7, MODEL_KEYS = 12, MODEL_OPEN = 6 };

struct model {
    uint64_t order[MODEL_SLOTS]; /* filled keys, least recently used first */
    uint32_t filled;
    uint32_t reads[MODEL_KEYS];
    bool writing[MODEL_KEYS];
    side_slot slot[MODEL_KEYS]; /* as acquired */
    side_slot open[MODEL_OPEN];
    side_stream *open_by[MODEL_OPEN];
    uint32_t opened;
};

static int model_find(const struct model *m, uint64_t key)
{
    for (uint32_t i = 0; i < m->filled; i++)
        if (m->order[i] == key)
            return (int)i;
    return -1;
}

static void model_remove(struct model *m, int at)
{
    memmove(&m->order[at], &m->order[at + 1], (m->filled - (uint32_t)at - 1) * sizeof(m->order[0]));
    m->filled--;
}

static void model_acquire(struct fixture *f, struct model *m, uint64_t key, side_stream *s)
{
    uint32_t taken = m->filled;
    int victim = -1;
    side_status want = SIDE_OK;

    for (int k = 0; k < MODEL_KEYS; k++)
        taken += m->writing[k];
    for (uint32_t i = 0; i < m->filled && victim < 0; i++)
        victim = m->reads[m->order[i]] == 0 ? (int)i : -1;
    if (m->writing[key] || model_find(m, key) >= 0)
        want = SIDE_INVALID;
    else if (taken == MODEL_SLOTS && victim < 0)
        want = SIDE_AGAIN;
    T_STATUS(side_slots_try_acquire(f->t, key, s, &m->slot[key]), want);
    if (want != SIDE_OK)
        return;
    m->writing[key] = true;
    if (taken == MODEL_SLOTS) {
        assert_int_equal(m->slot[key].index, m->slot[m->order[victim]].index);
        model_remove(m, victim);
    }
}

static void model_write_end(struct fixture *f, struct model *m, uint64_t key, side_stream *s, bool publish)
{
    if (!m->writing[key])
        return;
    T_OK((publish ? side_slots_publish(f->t, &m->slot[key], s, NULL) : side_slots_abandon(f->t, &m->slot[key], s)));
    m->writing[key] = false;
    if (publish)
        m->order[m->filled++] = key;
}

static void model_take(struct fixture *f, struct model *m, uint64_t key, side_stream *s)
{
    int at = model_find(m, key);
    side_slot r;

    if (m->opened == MODEL_OPEN)
        return;
    T_STATUS(side_slots_try_take(f->t, key, s, &r), m->writing[key] ? SIDE_WOULD_DEADLOCK
                                                    : at < 0        ? SIDE_NOT_FOUND
                                                                    : SIDE_OK);
    if (at < 0)
        return;
    assert_ptr_equal(r.data, m->slot[key].data);
    m->open_by[m->opened] = s;
    m->open[m->opened++] = r;
    m->reads[key]++;
    model_remove(m, at);
    m->order[m->filled++] = key;
}

static void model_release(struct fixture *f, struct model *m, uint64_t pick)
{
    if (m->opened == 0)
        return;
    uint32_t i = (uint32_t)(pick % m->opened);
    m->reads[m->open[i].key]--;
    T_OK(side_slots_release(f->t, &m->open[i], m->open_by[i]));
    m->open[i] = m->open[--m->opened];
    m->open_by[i] = m->open_by[m->opened];
}

static void model_give_back(struct fixture *f, struct model *m, uint64_t key)
{
    int at = model_find(m, key);

    if (at < 0)
        return;
    T_STATUS(side_slots_give_back(f->t, &m->slot[key]), m->reads[key] != 0 ? SIDE_STATE : SIDE_OK);
    if (m->reads[key] == 0)
        model_remove(m, at);
}

T_TEST(table_is_its_model)
{
    T_FOR_SEEDS (seed, 60) {
        t_rng rng = t_rng_make(seed);
        struct model m = {0};
        struct fixture f;

        fixture_open(&f, SIDE_TABLE, MODEL_SLOTS, 0, SIDE_MEMORY_DEVICE, seed);
        for (int step = 0; step < 600; step++) {
            uint64_t key = t_rng_below(&rng, MODEL_KEYS);
            side_stream *s = f.s[t_rng_below(&rng, 4)];
            switch (t_rng_below(&rng, 7)) {
            case 0:
            case 1: model_acquire(&f, &m, key, s); break;
            case 2:
            case 3: model_write_end(&f, &m, key, s, !t_rng_chance(&rng, 5)); break;
            case 4: model_take(&f, &m, key, s); break;
            case 5: model_release(&f, &m, t_rng_next(&rng)); break;
            default: model_give_back(&f, &m, key); break;
            }
            assert_true(slots_is_valid(f.t));
        }
        fixture_close(&f);
    }
}

T_MAIN(T(ring_order), T(ring_full), T(waits_with_a_limit), T(ring_readers), T(ring_abandon_close_restart),
       T(host_try_waits_for_the_device), T(ring_over_several_streams), T(copy_queued_after_compute_overlaps),
       T(tickets), T(list_oldest_free_first), T(write_after_unread_write), T(table_evicts_the_least_recently_used),
       T(table_full_of_readers), T(more_streams_than_reader_entries), T(table_is_its_model))
