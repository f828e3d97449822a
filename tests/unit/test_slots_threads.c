/* SPDX-License-Identifier: MIT
 *
 * Slots between threads: the host half of the fences (R7), waking by poison and cancel; and options, the caller's own memory, poisoned contents. */
#include "pipe_help.h"

#include "fence.h"
#include "os.h"
#include "slots.h"

#include <pthread.h>

struct team {
    side_slots *t;
    side_device *dev;
    uint64_t items;
    atomic_ulong taken;
    atomic_ulong wrong;
};

static side_slots *make_slots(side_device *dev, side_policy policy, uint32_t count, size_t bytes, uint32_t readers,
                              side_memory_kind where)
{
    side_slots_options o = SIDE_SLOTS_OPTIONS_INIT;
    side_slots *t;

    o.policy = policy;
    o.count = count;
    o.slot_bytes = bytes;
    o.readers = readers;
    o.where = where;
    T_OK(side_slots_create(dev, &o, &t));
    return t;
}

static pthread_t start(void *(*fn)(void *), void *arg)
{
    pthread_t thread;

    assert_int_equal(pthread_create(&thread, NULL, fn, arg), 0);
    return thread;
}

/* ---------------------------------------------------------------- host to host: TSan sees every unordered access */

static void *ring_producer(void *arg)
{
    struct team *team = arg;
    side_slot s;

    for (uint64_t i = 0; i < team->items; i++) {
        T_OK(side_slots_acquire(team->t, 0, NULL, &s));
        for (int k = 0; k < 16; k++)
            ((uint64_t *)s.data)[k] = s.key * 16 + (uint64_t)k;
        T_OK(side_slots_publish(team->t, &s, NULL, NULL));
    }
    return NULL;
}

static void *ring_consumer(void *arg)
{
    struct team *team = arg;
    side_slot s;
    uint64_t i;

    for (i = 0;; i++) {
        side_status r = side_slots_take(team->t, i, NULL, &s);
        if (r == SIDE_END)
            break;
        T_OK(r);
        for (int k = 0; k < 16; k++)
            if (((const uint64_t *)s.data)[k] != i * 16 + (uint64_t)k)
                atomic_fetch_add(&team->wrong, 1);
        T_OK(side_slots_release(team->t, &s, NULL));
        atomic_fetch_add(&team->taken, 1);
    }
    return NULL;
}

T_TEST(ring_producer_and_readers)
{
    side_device *dev = rig_device("", 1);

    for (uint32_t count = 1; count <= 4; count++)
        for (uint32_t readers = 1; readers <= 4; readers += 3) {
            struct team team = {.dev = dev, .items = t_seeds(400)};
            pthread_t threads[4], producer;
            team.t = make_slots(dev, SIDE_RING, count, 128, readers, SIDE_MEMORY_PAGEABLE);
            for (uint32_t i = 0; i < readers; i++)
                threads[i] = start(ring_consumer, &team);
            producer = start(ring_producer, &team);
            pthread_join(producer, NULL);
            slots_close(team.t);
            for (uint32_t i = 0; i < readers; i++)
                pthread_join(threads[i], NULL);
            assert_int_equal(atomic_load(&team.taken), team.items * readers);
            assert_int_equal(atomic_load(&team.wrong), 0);
            assert_true(slots_is_valid(team.t));
            T_OK(side_slots_destroy(team.t));
        }
    rig_close(dev);
}

/* Several producers of one ring: numbers are given out once each, all items arrive. */
T_TEST(ring_several_producers)
{
    side_device *dev = rig_device("", 1);
    struct team team = {.dev = dev, .items = t_seeds(400)};
    pthread_t producers[3], consumer;

    team.t = make_slots(dev, SIDE_RING, 4, 128, 1, SIDE_MEMORY_PAGEABLE);
    consumer = start(ring_consumer, &team);
    for (int i = 0; i < 3; i++)
        producers[i] = start(ring_producer, &team);
    for (int i = 0; i < 3; i++)
        pthread_join(producers[i], NULL);
    slots_close(team.t);
    pthread_join(consumer, NULL);
    assert_int_equal(atomic_load(&team.taken), 3 * team.items);
    assert_int_equal(atomic_load(&team.wrong), 0);
    T_OK(side_slots_destroy(team.t));
    rig_close(dev);
}

/* Each thread acquires, fills, reads back and gives back; nobody else may touch the slot meanwhile. */
static void *list_user(void *arg)
{
    struct team *team = arg;
    side_slot s, r;

    for (uint64_t i = 0; i < team->items; i++) {
        T_OK(side_slots_acquire(team->t, 0, NULL, &s));
        uint64_t mark = s.generation * 1000 + s.index;
        for (int k = 0; k < 16; k++)
            ((uint64_t *)s.data)[k] = mark;
        T_OK(side_slots_publish(team->t, &s, NULL, NULL));
        T_OK(side_slots_take(team->t, s.key, NULL, &r));
        for (int k = 0; k < 16; k++)
            if (((const uint64_t *)r.data)[k] != mark)
                atomic_fetch_add(&team->wrong, 1);
        T_OK(side_slots_release(team->t, &r, NULL));
        T_OK(side_slots_give_back(team->t, &s));
    }
    return NULL;
}

T_TEST(list_several_users)
{
    side_device *dev = rig_device("", 1);
    struct team team = {.dev = dev, .items = t_seeds(500)};
    pthread_t threads[5];

    team.t = make_slots(dev, SIDE_LIST, 3, 128, 0, SIDE_MEMORY_PAGEABLE);
    for (int i = 0; i < 5; i++)
        threads[i] = start(list_user, &team);
    for (int i = 0; i < 5; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(atomic_load(&team.wrong), 0);
    assert_true(slots_is_valid(team.t));
    T_OK(side_slots_destroy(team.t));
    rig_close(dev);
}

static void *table_user(void *arg)
{
    struct team *team = arg;
    t_rng rng = t_rng_make((uint64_t)(uintptr_t)pthread_self());
    side_slot s;

    for (uint64_t i = 0; i < team->items; i++) {
        uint64_t key = t_rng_below(&rng, 9);
        side_status r = side_slots_take(team->t, key, NULL, &s);
        if (r == SIDE_OK) {
            for (int k = 0; k < 16; k++)
                if (((const uint64_t *)s.data)[k] != key)
                    atomic_fetch_add(&team->wrong, 1);
            T_OK(side_slots_release(team->t, &s, NULL));
            continue;
        }
        T_STATUS(r, SIDE_NOT_FOUND);
        r = side_slots_acquire(team->t, key, NULL, &s);
        if (r == SIDE_INVALID)
            continue; /* another thread was first */
        T_OK(r);
        for (int k = 0; k < 16; k++)
            ((uint64_t *)s.data)[k] = key;
        T_OK(side_slots_publish(team->t, &s, NULL, NULL));
    }
    return NULL;
}

T_TEST(table_several_users)
{
    side_device *dev = rig_device("", 1);
    struct team team = {.dev = dev, .items = t_seeds(1000)};
    pthread_t threads[4];

    team.t = make_slots(dev, SIDE_TABLE, 5, 128, 0, SIDE_MEMORY_PAGEABLE);
    for (int i = 0; i < 4; i++)
        threads[i] = start(table_user, &team);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(atomic_load(&team.wrong), 0);
    assert_true(slots_is_valid(team.t));
    T_OK(side_slots_destroy(team.t));
    rig_close(dev);
}

/* ---------------------------------------------------------------- host half between device streams: take before publish is queued */

struct relay {
    side_slots *t;
    side_stream *copy, *compute;
    unsigned char *host, *seen;
    uint64_t items;
};

static void *relay_copy(void *arg)
{
    struct relay *l = arg;
    side_slot s;

    for (uint64_t i = 0; i < l->items; i++) {
        T_OK(side_slots_acquire(l->t, 0, l->copy, &s));
        T_OK(side_copy_async(l->copy, SIDE_COPY_H2D, s.data, l->host + i * 64, 64));
        if (i % 7 == 0)
            os_sleep_ns(100000); /* the other thread asks first */
        T_OK(side_slots_publish(l->t, &s, l->copy, NULL));
    }
    return NULL;
}

T_TEST(host_half_of_take)
{
    T_FOR_SEEDS (seed, 20) {
        struct relay l = {.items = 40};
        side_device *dev = rig_device("", seed);
        t_rng rng = t_rng_make(seed);
        void *host, *seen;
        side_slot s;

        T_OK(dev->ops->host_alloc(dev->context, l.items * 64, &host));
        T_OK(dev->ops->host_alloc(dev->context, l.items * 64, &seen));
        t_rng_fill(&rng, host, l.items * 64);
        l.host = host;
        l.t = make_slots(dev, SIDE_RING, 2, 64, 1, SIDE_MEMORY_DEVICE);
        T_OK(side_stream_create(dev, &l.copy));
        T_OK(side_stream_create(dev, &l.compute));
        pthread_t thread = start(relay_copy, &l);
        for (uint64_t i = 0; i < l.items; i++) {
            T_OK(side_slots_take(l.t, i, l.compute, &s));
            T_OK(side_copy_async(l.compute, SIDE_COPY_D2H, (char *)seen + i * 64, s.data, 64));
            T_OK(side_slots_release(l.t, &s, l.compute));
        }
        pthread_join(thread, NULL);
        T_OK(side_stream_sync(l.compute, 0));
        assert_memory_equal(host, seen, l.items * 64);
        T_OK(side_slots_destroy(l.t));
        side_stream_destroy(l.copy);
        side_stream_destroy(l.compute);
        dev->ops->host_free(dev->context, host);
        dev->ops->host_free(dev->context, seen);
        rig_close(dev);
    }
}

/* ---------------------------------------------------------------- waking */

struct sleeper {
    side_slots *t;
    int what;
    side_status got;
    atomic_bool asleep;
};

static void *sleeper_run(void *arg)
{
    struct sleeper *s = arg;
    side_ticket ticket = {s->t, 1, 0};
    side_slot slot;

    atomic_store(&s->asleep, true);
    if (s->what == 0)
        s->got = side_slots_acquire(s->t, 0, NULL, &slot);
    else if (s->what == 1)
        s->got = side_slots_take(s->t, 1, NULL, &slot);
    else
        s->got = side_ticket_wait(&ticket, 0);
    if (s->got != SIDE_OK && side_last_error()->message[0] == '\0')
        T_FAIL("no message");
    return NULL;
}

static void wake(int what, bool by_flag)
{
    side_device *dev = rig_device("", 1);
    atomic_bool cancel = false;
    struct sleeper s = {.what = what, .got = SIDE_OK};
    side_slot held;

    s.t = make_slots(dev, SIDE_RING, 1, 64, 1, SIDE_MEMORY_PAGEABLE);
    slots_configure(s.t, SITE_NONE, by_flag ? &cancel : NULL);
    T_OK(side_slots_acquire(s.t, 0, NULL, &held));
    pthread_t thread = start(sleeper_run, &s);
    while (!atomic_load(&s.asleep))
        os_sleep_ns(100000);
    os_sleep_ns(5000000);
    if (by_flag)
        atomic_store(&cancel, true);
    else
        side_slots_poison(s.t, SIDE_IO);
    pthread_join(thread, NULL);
    assert_int_equal(s.got, by_flag ? SIDE_CANCELLED : SIDE_IO);
    if (!by_flag) { /* no way back */
        T_STATUS(side_slots_publish(s.t, &held, NULL, NULL), SIDE_IO);
        side_slots_poison(s.t, SIDE_CANCELLED);
        T_STATUS(side_slots_try_take(s.t, 0, NULL, &held), SIDE_IO); /* the first cause stays */
        T_STATUS(slots_restart(s.t), SIDE_IO);
    }
    T_OK(side_slots_destroy(s.t));
    rig_close(dev);
}

T_TEST(poison_and_cancel_wake)
{
    for (int what = 0; what < 3; what++) {
        wake(what, false);
        wake(what, true);
    }
}

/* A failed device call poisons: what it queued is under no fence. */
T_TEST(failed_device_call_poisons)
{
    for (int what = 0; what < 4; what++) {
        side_device *dev = rig_device("", 1);
        side_slots *t = make_slots(dev, SIDE_RING, 2, 64, 1, SIDE_MEMORY_DEVICE);
        side_stream *a, *b;
        side_slot w, r;

        T_OK(side_stream_create(dev, &a));
        T_OK(side_stream_create(dev, &b));
        T_OK(side_slots_acquire(t, 0, a, &w));
        if (what > 0)
            T_OK(side_slots_publish(t, &w, a, NULL));
        if (what > 1)
            T_OK(side_slots_take(t, 0, b, &r));
        if (what > 2) {
            T_OK(side_slots_release(t, &r, b));
            T_OK(side_slots_acquire(t, 0, a, &w));
            T_OK(side_slots_publish(t, &w, a, NULL));
        }
        sim_fail_at(dev->context, 1, SIDE_DEVICE_ERROR);
        if (what == 0)
            T_STATUS(side_slots_publish(t, &w, a, NULL), SIDE_DEVICE_ERROR);
        else if (what == 1)
            T_STATUS(side_slots_take(t, 0, b, &r), SIDE_DEVICE_ERROR);
        else if (what == 2)
            T_STATUS(side_slots_release(t, &r, b), SIDE_DEVICE_ERROR);
        else
            T_STATUS(side_slots_acquire(t, 0, a, &w), SIDE_DEVICE_ERROR);
        T_STATUS(side_slots_try_acquire(t, 0, a, &w), SIDE_DEVICE_ERROR);
        T_STATUS(side_slots_try_take(t, 1, b, &w), SIDE_DEVICE_ERROR);
        T_OK(side_slots_destroy(t));
        side_stream_destroy(a);
        side_stream_destroy(b);
        rig_close(dev);
    }
}

/* ---------------------------------------------------------------- options */

T_TEST(options_are_checked)
{
    struct {
        side_slots_options o;
        uint64_t tail;
    } longer = {SIDE_SLOTS_OPTIONS_INIT, 0};
    side_slots_options good = SIDE_SLOTS_OPTIONS_INIT, o;
    side_device *dev = rig_device("", 1);
    void *memory[2] = {NULL, NULL};
    side_slots *t = NULL;

    good.count = 2;
    good.slot_bytes = 100;
    T_STATUS(side_slots_create(NULL, &good, &t), SIDE_INVALID);
    T_STATUS(side_slots_create(dev, &good, NULL), SIDE_INVALID);
    T_STATUS(side_slots_create(dev, NULL, &t), SIDE_INVALID);
#define REFUSED(field, value)                                   \
    do {                                                        \
        o = good;                                               \
        o.field = value;                                        \
        T_STATUS(side_slots_create(dev, &o, &t), SIDE_INVALID); \
        assert_null(t);                                         \
    } while (0)
    REFUSED(size, 0);
    REFUSED(policy, (side_policy)3);
    REFUSED(count, 0);
    REFUSED(count, 65536);
    REFUSED(slot_bytes, 0);
    REFUSED(slot_bytes, SIZE_MAX / 2);
    REFUSED(where, (side_memory_kind)3);
    REFUSED(readers, SIDE_MAX_READERS + 1);
    REFUSED(memory, memory);
#undef REFUSED
    longer.o = good;
    longer.o.size = sizeof(longer);
    longer.tail = 1;
    T_STATUS(side_slots_create(dev, &longer.o, &t), SIDE_UNSUPPORTED);
    longer.tail = 0;
    T_OK(side_slots_create(dev, &longer.o, &t));
    T_OK(side_slots_destroy(t));
    T_OK(side_slots_destroy(NULL));
    T_STATUS(side_slots_drain(NULL, 0), SIDE_INVALID);
    T_STATUS(side_slots_acquire(NULL, 0, NULL, NULL), SIDE_INVALID);
    side_slots_poison(NULL, SIDE_IO);
    rig_close(dev);
}

T_TEST(memory_of_the_callers)
{
    side_device *dev = rig_device("", 1);
    side_slots_options o = SIDE_SLOTS_OPTIONS_INIT;
    char a[64], b[64];
    void *memory[2] = {a, b};
    side_slots *t;
    side_slot s;

    o.count = 2;
    o.slot_bytes = 64;
    o.where = SIDE_MEMORY_PAGEABLE;
    o.memory = memory;
    T_OK(side_slots_create(dev, &o, &t));
    T_OK(side_slots_acquire(t, 0, NULL, &s));
    assert_ptr_equal(s.data, a);
    T_OK(side_slots_acquire(t, 0, NULL, &s));
    assert_ptr_equal(s.data, b);
    T_STATUS(side_slots_acquire(t, 0, NULL, NULL), SIDE_INVALID);
    T_STATUS(side_slots_publish(t, NULL, NULL, NULL), SIDE_INVALID);
    s.index = 2;
    T_STATUS(side_slots_publish(t, &s, NULL, NULL), SIDE_INVALID);
    T_OK(side_slots_destroy(t));
    rig_close(dev);
}

/* SIDESTREAM_VALIDATE=1: what is acquired holds nothing of before. */
T_TEST(validate_poisons)
{
    setenv("SIDESTREAM_VALIDATE", "1", 1);
    rig_small_pool();
    side_device *dev = rig_device("", 1);
    side_slots *host = make_slots(dev, SIDE_RING, 1, 64, 1, SIDE_MEMORY_PINNED);
    side_slots *device = make_slots(dev, SIDE_RING, 1, 64, 1, SIDE_MEMORY_DEVICE);
    unsigned char seen[64];
    side_stream *s;
    side_slot w;

    T_OK(side_stream_create(dev, &s));
    T_OK(side_slots_acquire(host, 0, NULL, &w));
    for (int i = 0; i < 64; i++)
        assert_int_equal(((unsigned char *)w.data)[i], 0xDB);
    T_OK(side_slots_acquire(device, 0, s, &w));
    T_OK(side_copy_async(s, SIDE_COPY_D2H, seen, w.data, 64));
    T_OK(side_stream_sync(s, 0));
    for (int i = 0; i < 64; i++)
        assert_int_equal(seen[i], 0xDB);
    T_OK(side_slots_destroy(host));
    T_OK(side_slots_destroy(device));
    side_stream_destroy(s);
    rig_close(dev);
}

T_MAIN(T(ring_producer_and_readers), T(ring_several_producers), T(list_several_users), T(table_several_users),
       T(host_half_of_take), T(poison_and_cancel_wake), T(failed_device_call_poisons), T(options_are_checked),
       T(memory_of_the_callers), T(validate_poisons))
