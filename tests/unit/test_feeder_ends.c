/* SPDX-License-Identifier: MIT
 *
 * How feeders end: cancelled at any moment and in any call, with the nth allocation or device call failing, with a device that is lost or hangs, in a forked child.
 * After each the sources are freed at once, as the header allows, so that ASan and the device's own check would see a late read; nothing is leaked. */
#include "feed_help.h"

#include "os.h"
#include "slots.h"

#include <sys/wait.h>
#include <unistd.h>

static void check_error(side_status status)
{
    if (status >= 0)
        T_FAIL("%s is no error", side_status_name(status));
    if (side_last_error()->message[0] == '\0' || side_last_error()->status != status)
        T_FAIL("%s, but the detail says %s: '%s'", side_status_name(status),
               side_status_name(side_last_error()->status), side_last_error()->message);
}

/* ---------------------------------------------------------------- cancel */

struct side {
    struct feed_rig *r;
    side_status status;
    size_t count;
};

static void *submit_all(void *arg)
{
    struct side *t = arg;

    for (t->count = 0; t->status == SIDE_OK && t->count < t->r->made; t->count += t->status == SIDE_OK)
        t->status = feed_submit(t->r, t->count);
    if (t->status != SIDE_OK)
        check_error(t->status);
    else
        t->status = side_feeder_close(t->r->f);
    return NULL;
}

static void *take_all(void *arg)
{
    struct side *t = arg;
    side_feed_item item;

    for (t->count = 0; t->status == SIDE_OK; t->count++) {
        t->status = side_feeder_next(t->r->f, t->r->reader, &item);
        if (t->status != SIDE_OK)
            break;
        feed_read(t->r, &item, t->r->reader, 10000);
        feed_give_back(t->r, &item, t->r->reader); /* goes on working when cancelled */
        FEED_IS_RIGHT(t->r, t->count, t->count + 1);
    }
    if (t->status != SIDE_END)
        check_error(t->status);
    return NULL;
}

/* True: it was not through yet. */
static bool cancel_once(uint64_t seed)
{
    t_rng rng = t_rng_make(seed);
    long live = mem_live();
    side_device *dev = feed_device("", seed);
    struct feed_rig r;
    pthread_t threads[2];
    side_feed_item item;

    feed_init(&r, dev, DIRECT_BYTES + 20000, 1 + (uint32_t)t_rng_below(&rng, 3));
    r.o.chunk_bytes = 5000;
    r.o.timing = t_rng_chance(&rng, 2);
    feed_start(&r);
    for (size_t i = 0; i < 12; i++)
        feed_random(&r, (enum feed_source)t_rng_below(&rng, 3), &rng);
    struct side in = {.r = &r}, out = {.r = &r};
    assert_int_equal(pthread_create(&threads[0], NULL, submit_all, &in), 0);
    assert_int_equal(pthread_create(&threads[1], NULL, take_all, &out), 0);
    os_sleep_ns(t_rng_below(&rng, 2500000));
    side_feeder_cancel(r.f);
    pthread_join(threads[0], NULL);
    pthread_join(threads[1], NULL);
    if ((in.status != SIDE_OK && in.status != SIDE_CANCELLED) ||
        (out.status != SIDE_END && out.status != SIDE_CANCELLED))
        T_FAIL("submit: %s, next: %s: %s", side_status_name(in.status), side_status_name(out.status),
               side_last_error()->message);
    T_STATUS(side_feeder_discard(r.f), SIDE_CANCELLED);
    feed_free_sources(&r, r.made);
    T_STATUS(side_feeder_next(r.f, r.reader, &item), SIDE_CANCELLED); /* for good */
    T_STATUS(side_feeder_try_next(r.f, r.reader, &item), SIDE_CANCELLED);
    T_STATUS(side_feeder_submit(r.f, r.batches[0].pieces, 1, NULL), SIDE_CANCELLED);
    T_STATUS(side_feeder_close(r.f), SIDE_CANCELLED);
    uint64_t count;
    T_STATUS(side_feeder_copied(r.f, &count), SIDE_CANCELLED);
    bool early = out.status != SIDE_END;
    feed_finish(&r);
    feed_close(dev);
    assert_int_equal(mem_live(), live);
    return early;
}

T_TEST(cancel_at_any_moment)
{
    uint64_t early = 0, times = 0;

    T_FOR_SEEDS (seed, 150) {
        early += cancel_once(seed);
        times++;
    }
    printf("%llu of %llu cancelled early\n", (unsigned long long)early, (unsigned long long)times);
    assert_true(times < 10 || early > times / 10);
}

/* Each call that blocks, for certain: cancel wakes it at once. */
T_TEST(cancel_wakes_what_is_blocked)
{
    for (int submits = 0; submits < 2; submits++) {
        side_device *dev = feed_device("", 1);
        t_rng rng = t_rng_make(1);
        struct feed_rig r;
        side_feed_item held;
        pthread_t thread;

        feed_init(&r, dev, 5000, 1);
        r.o.queue = 1;
        feed_start(&r);
        for (size_t i = 0; i < 4; i++)
            feed_piece(&r, feed_batch_new(&r), 0, 5000, false, &rng);
        struct side t = {.r = &r};
        assert_int_equal(pthread_create(&thread, NULL, submits ? submit_all : take_all, &t), 0);
        if (submits) /* of the others one waits for the slot, and the queue is full */
            T_OK(side_feeder_next(r.f, r.reader, &held));
        os_sleep_ns(300000000); /* however busy the machine, it blocks by then */
        uint64_t began = os_now_ns();
        side_feeder_cancel(r.f);
        pthread_join(thread, NULL);
        if (os_now_ns() - began > UINT64_C(5000000000))
            T_FAIL("waking took %.1f ms", (double)(os_now_ns() - began) * 1e-6);
        assert_int_equal(t.status, SIDE_CANCELLED);
        assert_int_equal(t.count, submits ? 2 : 0);
        if (submits) {
            feed_read(&r, &held, r.reader, 0);
            feed_give_back(&r, &held, r.reader);
            FEED_IS_RIGHT(&r, 0, 1);
        }
        feed_finish(&r);
        feed_close(dev);
    }
}

/* ---------------------------------------------------------------- the nth of something fails */

enum fault { NO_HOST_MEMORY, DEVICE_ERROR, DEVICE_LOST, NO_DEVICE_MEMORY };

static const struct way {
    enum feed_source source;
    size_t slot_bytes;
    bool timing, caller_memory, host;
} ways[] = {{PAGEABLE, 4000, false, false, false},
            {MIXED, 4000, true, true, false},
            {PINNED, DIRECT_BYTES, false, true, false},
            {MIXED, DIRECT_BYTES + 3000, true, false, false},
            {MIXED, 5000, true, false, true}};
enum { WAYS = sizeof(ways) / sizeof(ways[0]), ROUNDS = 5 };

static side_status one_round(struct feed_rig *r, size_t i, bool host)
{
    side_feed_item item;
    side_stream *reader = host ? NULL : r->reader;
    side_slots *slots = side_feeder_slots(r->f);
    uint64_t count;
    side_status s = feed_submit(r, i);

    if (s == SIDE_OK)
        s = side_feeder_next(r->f, reader, &item);
    if (s != SIDE_OK)
        return s;
    assert_int_equal(item.number, i);
    if (host)
        memcpy(r->batches[i].seen, item.slot.data, item.bytes);
    else
        s = side_copy_async(reader, SIDE_COPY_D2H, r->batches[i].seen, item.slot.data, item.bytes);
    if (s == SIDE_OK)
        s = side_slots_release(slots, &item.slot, reader);
    if (s == SIDE_OK)
        s = side_slots_give_back(slots, &item.slot);
    if (s == SIDE_OK)
        s = side_feeder_copied(r->f, &count);
    if (s == SIDE_OK)
        feed_free_sources(r, count);
    if (s == SIDE_OK && i == 2)
        s = side_feeder_discard(r->f);
    return s;
}

/* False: there are fewer than n. */
static bool attempt(const struct way *way, enum fault fault, uint64_t n)
{
    static const side_status statuses[] = {SIDE_NO_MEMORY, SIDE_DEVICE_ERROR, SIDE_DEVICE_LOST, SIDE_NO_DEVICE_MEMORY};
    long live = mem_live();
    side_device *dev = feed_device("", n);
    t_rng rng = t_rng_make(n);
    struct feed_rig r;
    void *block = NULL, *memory[2];
    bool fired;

    feed_init(&r, dev, way->slot_bytes, 2);
    r.o.chunk_bytes = 1500;
    r.o.timing = way->timing;
    r.o.timeout_s = 5;
    T_OK(side_device_alloc(dev, 2 * (way->slot_bytes + 16), &block));
    for (int i = 0; i < 2; i++)
        memory[i] = (char *)block + (size_t)i * ((way->slot_bytes + 15) / 16 * 16);
    if (way->caller_memory) {
        r.o.memory = memory;
        r.o.memory_stream = r.reader;
    }
    for (size_t i = 0; i < ROUNDS; i++)
        feed_random(&r, way->source, &rng);
    uint64_t before = sim_calls(dev->context);
    if (fault == NO_HOST_MEMORY)
        mem_fail_at(n);
    else
        sim_fail_at(dev->context, n, statuses[fault]);
    side_status status = side_feeder_create(dev, &r.o, &r.f);
    if (status != SIDE_OK)
        assert_null(r.f);
    for (size_t i = 0; status == SIDE_OK && i < ROUNDS; i++)
        status = one_round(&r, i, way->host);
    if (status != SIDE_OK)
        check_error(status);
    fired = fault == NO_HOST_MEMORY ? mem_fail_at(0) >= n : sim_calls(dev->context) - before >= n;
    if (status != SIDE_OK && r.f != NULL) { /* nothing may read the sources once it is said to have ended */
        side_feeder_cancel(r.f);
        side_status ended = side_feeder_discard(r.f);
        check_error(ended);
        feed_free_sources(&r, r.made);
    }
    sim_fault_clear(dev->context);
    if (status == SIDE_OK && fault != DEVICE_LOST)
        FEED_IS_RIGHT(&r, 0, ROUNDS);
    else
        (void)side_stream_sync(r.reader, 0); /* what we have queued on a batch that we hold */
    if (!fired)
        T_OK(status);
    feed_finish(&r);
    side_device_free(dev, block);
    feed_close(dev);
    if (mem_live() != live)
        T_FAIL("%ld blocks leaked after failure %llu: %s", mem_live() - live, (unsigned long long)n,
               side_status_name(status));
    return fired;
}

static void fault_loop(enum fault fault)
{
    uint64_t stride = (T_TSAN ? 5 : T_ASAN ? 2 : 1) * (fault == NO_DEVICE_MEMORY ? 3 : 1);

    for (int i = 0; i < WAYS; i++) {
        uint64_t n = 1;
        while (t_seed_note(n) && attempt(&ways[i], fault, n))
            n += stride;
        printf("way %d: %llu places\n", i, (unsigned long long)n);
        assert_true(n > 25);
    }
}

T_TEST(every_allocation_fails)
{
    fault_loop(NO_HOST_MEMORY);
}

T_TEST(every_device_call_fails)
{
    fault_loop(DEVICE_ERROR);
}

T_TEST(device_memory_ends_at_every_call)
{
    fault_loop(NO_DEVICE_MEMORY);
}

T_TEST(device_lost_at_every_call)
{
    fault_loop(DEVICE_LOST);
}

/* ---------------------------------------------------------------- the device never finishes */

/* The objects stay: what the library keeps is no leak as long as somebody points to it. */
static struct kept {
    struct feed_rig rig;
    struct kept *next;
} * kept;

/* False: nothing hung. */
static bool hang_at(const struct way *way, uint64_t n)
{
    struct kept *k = calloc(1, sizeof(*k));
    t_rng rng = t_rng_make(n);
    char keys[32];
    side_status status = SIDE_OK;

    snprintf(keys, sizeof(keys), "hang=%llu", (unsigned long long)n);
    side_device *dev = feed_device(keys, n);
    feed_init(&k->rig, dev, way->slot_bytes, 2);
    k->rig.o.chunk_bytes = 1500;
    k->rig.o.timing = way->timing;
    k->rig.o.timeout_s = 0.05;
    feed_start(&k->rig);
    for (size_t i = 0; i < 30; i++) {
        struct feed_batch *b = feed_batch_new(&k->rig);
        feed_piece(&k->rig, b, 0, way->slot_bytes, way->source == PINNED, &rng);
    }
    for (size_t i = 0; status == SIDE_OK && i < 30; i++)
        status = one_round(&k->rig, i, way->host);
    if (status == SIDE_OK && device_stream_drain(k->rig.reader, 0.05)) {
        feed_finish(&k->rig);
        feed_close(dev);
        free(k);
        return false;
    }
    k->next = kept;
    kept = k;
    if (status != SIDE_OK)
        check_error(status);
    if (status != SIDE_OK && status != SIDE_STUCK)
        T_FAIL("hang %llu: %s: %s", (unsigned long long)n, side_status_name(status), side_last_error()->message);
    T_STATUS(side_feeder_destroy(k->rig.f), SIDE_STUCK);
    T_STATUS(side_feeder_destroy(k->rig.f), SIDE_STUCK); /* the object is still there */
    return true;
}

T_TEST(device_hangs_at_every_operation)
{
    static const struct way some[] = {{PAGEABLE, 4000, false, false, false},
                                      {PINNED, DIRECT_BYTES, true, false, false},
                                      {PAGEABLE, 4000, true, false, true}};

    for (int i = 0; i < 3; i++) {
        uint64_t n = 1;
        while (t_seed_note(n) && hang_at(&some[i], n))
            n += T_SANITIZED ? 11 : 3;
        assert_true(n > 20);
    }
}

/* ---------------------------------------------------------------- held batches, poison, fork */

/* A release that cannot be recorded waits for its stream and ends the feeder: nobody would know when the slot can be rewritten. */
T_TEST(a_release_that_fails_ends_the_feeder)
{
    side_device *dev = feed_device("", 1);
    t_rng rng = t_rng_make(1);
    struct feed_rig r;
    side_feed_item item;

    feed_init(&r, dev, 5000, 2);
    feed_start(&r);
    for (size_t i = 0; i < 3; i++)
        feed_piece(&r, feed_batch_new(&r), 0, 5000, false, &rng);
    T_OK(feed_submit(&r, 0));
    T_OK(side_feeder_next(r.f, r.reader, &item));
    feed_read(&r, &item, r.reader, 1000000);
    sim_fail_at(dev->context, 1, SIDE_DEVICE_ERROR);
    T_STATUS(side_slots_release(side_feeder_slots(r.f), &item.slot, r.reader), SIDE_DEVICE_ERROR);
    T_OK(dev->ops->stream_query(r.reader->handle)); /* drained, not only asked to */
    side_status s = feed_submit(&r, 1);
    if (s == SIDE_OK) /* a thread hears of it */
        s = side_feeder_next(r.f, r.reader, &item);
    check_error(s);
    assert_int_equal(s, SIDE_DEVICE_ERROR);
    T_STATUS(side_feeder_next(r.f, r.reader, &item), SIDE_DEVICE_ERROR);
    T_STATUS(side_feeder_discard(r.f), SIDE_DEVICE_ERROR);
    feed_free_sources(&r, 3);
    feed_finish(&r);
    feed_close(dev);
}

T_TEST(destroy_with_everything_under_way)
{
    T_FOR_SEEDS (seed, 60) {
        t_rng rng = t_rng_make(seed);
        side_device *dev = feed_device("", seed);
        struct feed_rig r;
        side_feed_item item;
        size_t taken = t_rng_below(&rng, 3);

        feed_init(&r, dev, DIRECT_BYTES, 3);
        r.o.chunk_bytes = 5000;
        feed_start(&r);
        for (size_t i = 0; i < 5; i++)
            feed_random(&r, MIXED, &rng);
        for (size_t i = 0; i < 5; i++)
            T_OK(feed_submit(&r, i));
        for (size_t i = 0; i < taken; i++) {
            T_OK(side_feeder_next(r.f, r.reader, &item)); /* nothing is queued on it */
            assert_int_equal(item.number, i);
        }
        feed_finish(&r);
        feed_close(dev);
    }
}

#define CHILD(condition)               \
    do {                               \
        if (!(condition))              \
            _exit(__LINE__ % 200 + 1); \
    } while (0)

static void in_child(struct feed_rig *r, const side_feed_item *held)
{
    side_feeder_stats stats;
    side_feed_item item;
    uint64_t count;
    bool capturing;

    CHILD(side_feeder_submit(r->f, r->batches[0].pieces, 1, NULL) == SIDE_FORKED);
    CHILD(side_last_error()->message[0] != '\0');
    CHILD(side_feeder_try_submit(r->f, r->batches[0].pieces, 1, NULL) == SIDE_FORKED);
    CHILD(side_feeder_next(r->f, r->reader, &item) == SIDE_FORKED);
    CHILD(side_feeder_try_next(r->f, NULL, &item) == SIDE_FORKED);
    CHILD(side_feeder_copied(r->f, &count) == SIDE_FORKED);
    CHILD(side_feeder_close(r->f) == SIDE_FORKED);
    CHILD(side_feeder_discard(r->f) == SIDE_FORKED);
    CHILD(side_feeder_get_stats(r->f, &stats) == SIDE_FORKED);
    CHILD(side_stream_is_capturing(r->reader, &capturing) == SIDE_FORKED);
    CHILD(side_slots_release(side_feeder_slots(r->f), &held->slot, r->reader) == SIDE_FORKED);
    CHILD(side_slots_give_back(side_feeder_slots(r->f), &held->slot) == SIDE_FORKED);
    side_feeder_cancel(r->f);
    CHILD(side_feeder_destroy(r->f) == SIDE_OK);
    _exit(0);
}

T_TEST(after_fork)
{
    side_device *dev = feed_device("", 1);
    t_rng rng = t_rng_make(1);
    struct feed_rig r;
    side_feed_item item;
    int status;

    feed_init(&r, dev, 5000, 2);
    feed_start(&r);
    for (size_t i = 0; i < 4; i++) {
        feed_piece(&r, feed_batch_new(&r), 0, 5000, false, &rng);
        T_OK(feed_submit(&r, i));
        T_OK(side_feeder_next(r.f, r.reader, &item));
        fflush(NULL);
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0)
            in_child(&r, &item);
        assert_int_equal(waitpid(child, &status, 0), child);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
            T_FAIL("the child ended with %#x (line %d, or 200 or 400 more)", status, WEXITSTATUS(status) - 1);
        feed_read(&r, &item, r.reader, 0); /* the parent goes on */
        feed_give_back(&r, &item, r.reader);
    }
    FEED_IS_RIGHT(&r, 0, 4);
    feed_finish(&r);
    feed_close(dev);
}

T_MAIN(T_LONG(cancel_at_any_moment, 60), T(cancel_wakes_what_is_blocked), T_LONG(every_allocation_fails, 60),
       T_LONG(every_device_call_fails, 60), T_LONG(device_memory_ends_at_every_call, 60),
       T_LONG(device_lost_at_every_call, 60), T_LONG(device_hangs_at_every_operation, 60),
       T(a_release_that_fails_ends_the_feeder), T_LONG(destroy_with_everything_under_way, 60), T(after_fork))
