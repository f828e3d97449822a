/* SPDX-License-Identifier: MIT
 *
 * Feeders: slots that are held and come back in any order, what blocks and what does not, discard, close, whose memory is used when, and exact times. */
#include "feed_help.h"

#include "os.h"

static void make_batches(struct feed_rig *r, size_t n, size_t bytes, bool pinned, t_rng *rng)
{
    for (size_t i = 0; i < n; i++)
        feed_piece(r, feed_batch_new(r), 0, bytes, pinned, rng);
}

static side_feeder_stats stats_of(struct feed_rig *r)
{
    side_feeder_stats s;

    T_OK(side_feeder_get_stats(r->f, &s));
    return s;
}

static void take(struct feed_rig *r, uint64_t number, side_feed_item *item)
{
    T_OK(side_feeder_next(r->f, r->reader, item));
    assert_int_equal(item->number, number);
    feed_read(r, item, r->reader, 0);
}

/* ---------------------------------------------------------------- holding */

struct returner {
    struct feed_rig *r;
    side_feed_item items[BATCHES_MOST];
    atomic_size_t given; /* items that the thread may give back */
    size_t total, order;
};

static void *give_later(void *arg)
{
    struct returner *t = arg;
    side_stream *stream;

    T_OK(side_stream_create(t->r->dev, &stream));
    for (size_t i = 0; i < t->total; i += t->order) {
        size_t last = i + t->order < t->total ? i + t->order : t->total;
        while (atomic_load(&t->given) < last)
            os_sleep_ns(20000);
        for (size_t k = last; k > i; k--) { /* in groups, backwards; by a stream of its own, which takes it too */
            side_feed_item *item = &t->items[k - 1];
            side_slot mine;
            T_OK(side_slots_take(side_feeder_slots(t->r->f), item->slot.key, stream, &mine));
            T_OK(side_slots_release(side_feeder_slots(t->r->f), &mine, stream));
            feed_give_back(t->r, item, t->r->reader);
        }
    }
    side_stream_destroy(stream);
    return NULL;
}

T_TEST(slots_come_back_out_of_order_from_other_threads)
{
    T_FOR_SEEDS (seed, 30) {
        t_rng rng = t_rng_make(seed);
        side_device *dev = feed_device("", seed);
        struct returner t = {.total = 30, .order = 1 + t_rng_below(&rng, 3)};
        struct feed_rig r;
        pthread_t thread;

        feed_init(&r, dev, 5000, 4);
        feed_start(&r);
        t.r = &r;
        for (size_t i = 0; i < t.total; i++)
            feed_random(&r, MIXED, &rng);
        assert_int_equal(pthread_create(&thread, NULL, give_later, &t), 0);
        for (size_t i = 0, submitted = 0; i < t.total; i++) {
            while (submitted < t.total && submitted < i + 2)
                T_OK(feed_submit(&r, submitted++));
            T_OK(side_feeder_next(r.f, r.reader, &t.items[i]));
            feed_read(&r, &t.items[i], r.reader, 20000);
            atomic_store(&t.given, i + 1);
        }
        pthread_join(thread, NULL);
        FEED_IS_RIGHT(&r, 0, t.total);
        feed_finish(&r);
        feed_close(dev);
    }
}

/* One batch is kept for good: the others go on around it, and it stays as it was. */
T_TEST(a_held_batch_is_not_rewritten)
{
    side_device *dev = feed_device("", 2);
    t_rng rng = t_rng_make(2);
    struct feed_rig r;
    side_feed_item kept, item;

    feed_init(&r, dev, 5000, 3);
    feed_start(&r);
    make_batches(&r, 40, 5000, false, &rng);
    T_OK(feed_submit(&r, 0));
    T_OK(side_feeder_next(r.f, r.reader, &kept));
    for (size_t i = 1; i < 40; i++) {
        T_OK(feed_submit(&r, i));
        take(&r, i, &item);
        feed_give_back(&r, &item, r.reader);
    }
    feed_read(&r, &kept, r.reader, 0);
    FEED_IS_RIGHT(&r, 0, 40);
    feed_finish(&r); /* still held */
    feed_close(dev);
}

/* ---------------------------------------------------------------- blocking and not */

T_TEST(the_queue_is_bounded)
{
    for (int pinned = 0; pinned < 2; pinned++) {
        side_device *dev = feed_device("", 3);
        t_rng rng = t_rng_make(3);
        struct feed_rig r;
        side_feed_item item;
        uint64_t number;
        size_t in = 0;

        feed_init(&r, dev, DIRECT_BYTES, 2);
        r.o.queue = 3;
        feed_start(&r);
        make_batches(&r, 10, DIRECT_BYTES, pinned != 0, &rng);
        /* Two get slots, three wait. The fill threads may be behind. */
        for (int patience = 0; patience < 2000 && in < 6; patience++) {
            side_status s = side_feeder_try_submit(r.f, r.batches[in].pieces, 1, &number);
            if (s == SIDE_OK)
                assert_int_equal(number, in++);
            else
                assert_int_equal(s, SIDE_AGAIN);
            if (s == SIDE_AGAIN && in == 5)
                patience += 100;
            os_sleep_ns(100000);
        }
        assert_int_equal(in, 5);
        take(&r, 0, &item);
        assert_int_equal(side_feeder_try_submit(r.f, r.batches[in].pieces, 1, &number),
                         SIDE_AGAIN); /* taking frees nothing */
        feed_give_back(&r, &item, r.reader);
        T_OK(feed_submit(&r, in++)); /* blocks until a thread has seen the slot */
        for (size_t i = 1; i < in; i++) {
            take(&r, i, &item);
            feed_give_back(&r, &item, r.reader);
        }
        FEED_IS_RIGHT(&r, 0, in);
        feed_finish(&r);
        feed_close(dev);
    }
}

T_TEST(close_ends_the_batches)
{
    side_device *dev = feed_device("", 4);
    t_rng rng = t_rng_make(4);
    struct feed_rig r;
    side_feed_item item;

    feed_init(&r, dev, 5000, 2);
    feed_start(&r);
    make_batches(&r, 2, 5000, false, &rng);
    T_STATUS(side_feeder_try_next(r.f, NULL, &item), SIDE_AGAIN);
    uint64_t begin = os_now_ns();
    T_STATUS(side_feeder_next_for(r.f, r.reader, 0.01, &item), SIDE_AGAIN);
    assert_true(os_now_ns() - begin >= 10000000);
    T_STATUS(side_feeder_next_for(r.f, r.reader, -1, &item), SIDE_INVALID);
    T_OK(feed_submit(&r, 0));
    T_OK(side_feeder_close(r.f));
    T_OK(side_feeder_close(r.f));
    T_STATUS(side_feeder_submit(r.f, r.batches[1].pieces, 1, NULL), SIDE_STATE);
    T_STATUS(side_feeder_try_submit(r.f, r.batches[1].pieces, 1, NULL), SIDE_STATE);
    take(&r, 0, &item);
    T_STATUS(side_feeder_next(r.f, r.reader, &item), SIDE_END);
    T_STATUS(side_feeder_next(r.f, NULL, &item), SIDE_END);
    T_STATUS(side_feeder_next_for(r.f, NULL, 100, &item), SIDE_END);
    T_STATUS(side_feeder_try_next(r.f, r.reader, &item), SIDE_END);
    feed_give_back(&r, &item, r.reader);
    FEED_IS_RIGHT(&r, 0, 1);
    feed_finish(&r);
    feed_close(dev);
}

/* For the host a batch is there when its copy is done. */
T_TEST(try_next_of_the_host_does_not_wait_for_the_copy)
{
    side_device *dev = feed_device("", 5);
    t_rng rng = t_rng_make(5);
    struct feed_rig r;
    side_feed_item item;
    side_stream *copy;
    side_op op = SIDE_OP_INIT;

    feed_init(&r, dev, DIRECT_BYTES, 2);
    T_OK(side_stream_create(dev, &copy));
    r.o.copy_stream = copy;
    feed_start(&r);
    make_batches(&r, 2, DIRECT_BYTES, true, &rng);
    op.id = SIDE_OP_SPIN;
    op.dim[0] = 1000000;
    T_OK(side_op_async(copy, &op));
    T_OK(feed_submit(&r, 0));
    T_STATUS(side_feeder_try_next(r.f, NULL, &item), SIDE_AGAIN);
    uint64_t count;
    T_OK(side_feeder_copied(r.f, &count));
    assert_int_equal(count, 0); /* the device still has to read it */
    T_OK(side_feeder_next(r.f, NULL, &item));
    assert_memory_equal(item.slot.data, r.batches[0].image, DIRECT_BYTES);
    assert_true(side_device_now_ns(dev) > 1000000);
    T_OK(side_feeder_copied(r.f, &count));
    assert_int_equal(count, 1);
    feed_give_back(&r, &item, NULL);
    T_OK(feed_submit(&r, 1));
    T_OK(side_feeder_try_next(r.f, r.reader, &item)); /* a stream waits by itself */
    feed_give_back(&r, &item, r.reader);
    feed_finish(&r);
    side_stream_destroy(copy);
    feed_close(dev);
}

/* The host may not run ahead of the device without end: its sources would pile up. */
T_TEST(sources_do_not_pile_up)
{
    side_device *dev = feed_device("", 6);
    t_rng rng = t_rng_make(6);
    struct feed_rig r;
    side_feed_item item;
    uint64_t count, most = 0;

    feed_init(&r, dev, DIRECT_BYTES, 2);
    feed_start(&r);
    make_batches(&r, 60, DIRECT_BYTES, true, &rng);
    for (size_t i = 0; i < 60; i++) {
        T_OK(feed_submit(&r, i));
        T_OK(side_feeder_copied(r.f, &count));
        most = i + 1 - count > most ? i + 1 - count : most;
        T_OK(side_feeder_next(r.f, r.reader, &item));
        feed_read(&r, &item, r.reader, 100000);
        feed_give_back(&r, &item, r.reader);
    }
    assert_true(most <= 2 + 2 + 16);
    feed_free_sources(&r, count);
    FEED_IS_RIGHT(&r, 0, 60);
    feed_finish(&r);
    feed_close(dev);
}

/* ---------------------------------------------------------------- discard */

struct feeding {
    struct feed_rig *r;
    size_t first, end;
    atomic_size_t in;
};

static void *feed_on(void *arg)
{
    struct feeding *t = arg;

    for (size_t i = t->first; i < t->end; i++) {
        T_OK(feed_submit(t->r, i));
        atomic_store(&t->in, i + 1);
    }
    return NULL;
}

/* At any moment, with `held` slots of `slots` held, while another thread submits. */
static void discard_once(uint64_t seed)
{
    t_rng rng = t_rng_make(seed);
    side_device *dev = feed_device("", seed);
    uint32_t slots = 1 + (uint32_t)t_rng_below(&rng, 3);
    size_t held = t_rng_below(&rng, slots + 1), at = 0, total = 24;
    struct feed_rig r;
    struct feeding t = {.r = &r, .end = total};
    side_feed_item items[4], item;
    pthread_t thread;
    uint64_t count;

    feed_init(&r, dev, DIRECT_BYTES + 20000, slots);
    r.o.chunk_bytes = 3000;
    r.o.timing = t_rng_chance(&rng, 2);
    feed_start(&r);
    for (size_t i = 0; i < total; i++)
        feed_random(&r, seed % 3 == 0 ? PINNED : MIXED, &rng);
    assert_int_equal(pthread_create(&thread, NULL, feed_on, &t), 0);
    for (; at < held; at++)
        take(&r, at, &items[at]);
    for (int round = 0; round < 4; round++) {
        os_sleep_ns(t_rng_below(&rng, 400000));
        size_t before = atomic_load(&t.in);
        T_OK(side_feeder_discard(r.f));
        T_OK(side_feeder_copied(r.f, &count)); /* what was held may not be read yet; what was dropped is */
        if (held == 0)
            assert_true(count >= before);
        feed_free_sources(&r, count);
    }
    for (size_t i = 0; i < held; i++)
        feed_give_back(&r, &items[i], r.reader);
    FEED_IS_RIGHT(&r, 0, held);
    /* What comes now arrives. */
    uint64_t last = 0;
    do {
        T_OK(side_feeder_next(r.f, r.reader, &item));
        assert_true(item.number >= held && (last == 0 || item.number == last + 1));
        last = item.number;
        feed_read(&r, &item, r.reader, 0);
        feed_give_back(&r, &item, r.reader);
        FEED_IS_RIGHT(&r, last, last + 1);
    } while (last + 1 < total && !(atomic_load(&t.in) == total && stats_of(&r).submitted == last + 1));
    pthread_join(thread, NULL);
    feed_finish(&r);
    feed_close(dev);
}

T_TEST(discard_at_any_moment)
{
    T_FOR_SEEDS (seed, 150)
        discard_once(seed);
}

/* Exactly: numbers are used up, slots are free, also one that waits for a slot while all are held. */
T_TEST(discard_frees_all_slots)
{
    side_device *dev = feed_device("", 8);
    t_rng rng = t_rng_make(8);
    struct feed_rig r;
    side_feed_item held[2], item;
    uint64_t count;

    feed_init(&r, dev, DIRECT_BYTES, 2);
    feed_start(&r);
    make_batches(&r, 12, 5000, false, &rng);
    T_OK(side_feeder_discard(r.f)); /* nothing there */
    for (size_t i = 0; i < 2; i++) {
        T_OK(feed_submit(&r, i));
        take(&r, i, &held[i]);
    }
    T_OK(feed_submit(&r, 2));
    T_OK(feed_submit(&r, 3)); /* both wait for a slot */
    T_OK(side_feeder_discard(r.f));
    T_OK(side_feeder_copied(r.f, &count));
    assert_int_equal(count, 4);
    feed_free_sources(&r, 4);
    for (size_t i = 0; i < 2; i++)
        feed_give_back(&r, &held[i], r.reader);
    FEED_IS_RIGHT(&r, 0, 2);
    T_OK(feed_submit(&r, 4));
    T_OK(feed_submit(&r, 5));
    T_OK(feed_submit(&r, 6));
    T_OK(side_feeder_discard(r.f));
    T_STATUS(side_feeder_try_next(r.f, r.reader, &item), SIDE_AGAIN);
    for (size_t i = 7; i < 12; i++) { /* both slots are there */
        T_OK(feed_submit(&r, i));
        take(&r, i, &item);
        if (i != 7)
            feed_give_back(&r, &item, r.reader);
    }
    FEED_IS_RIGHT(&r, 7, 12);
    T_OK(side_feeder_close(r.f));
    T_OK(side_feeder_discard(r.f));
    T_STATUS(side_feeder_next(r.f, r.reader, &item), SIDE_END);
    feed_finish(&r);
    feed_close(dev);
}

/* ---------------------------------------------------------------- the caller's memory */

/* What memory_stream still does with the memory comes first: a write that is queued there must not land on a batch. */
static bool memory_is_waited_for(uint64_t seed, bool told)
{
    side_device *dev = feed_device("", seed);
    t_rng rng = t_rng_make(seed);
    struct feed_rig r;
    side_feed_item item;
    side_stream *before;
    void *memory[3], *block;

    feed_init(&r, dev, 4096, 3);
    T_OK(side_stream_create(dev, &before));
    T_OK(side_device_alloc(dev, 3 * 4096, &block));
    for (int i = 0; i < 3; i++)
        memory[i] = (char *)block + 4096 * i;
    T_OK(side_memset_async(before, block, 0x11, 3 * 4096));
    r.o.memory = memory;
    r.o.memory_stream = told ? before : NULL;
    feed_start(&r);
    memset(memory, 0, sizeof(memory)); /* the array was copied */
    make_batches(&r, 5, 4096, false, &rng);
    for (size_t i = 0; i < 5; i++) {
        T_OK(feed_submit(&r, i));
        take(&r, i, &item);
        assert_ptr_equal(item.slot.data, (char *)block + 4096 * (i % 3));
        feed_give_back(&r, &item, r.reader);
    }
    bool right = feed_first_wrong(&r, 0, 5) == 5;
    assert_int_equal(stats_of(&r).device_bytes, 0);
    T_OK(side_stream_sync(before, 0));
    feed_finish(&r);
    side_stream_destroy(before);
    side_device_free(dev, block);
    feed_close(dev);
    return right;
}

T_TEST(the_first_writers_wait_for_memory_stream)
{
    bool seen = false;

    T_FOR_SEEDS (seed, 60) {
        assert_true(memory_is_waited_for(seed, true));
        seen = seen || !memory_is_waited_for(seed, false);
    }
    assert_true(seen || t_seeds(60) < 20); /* the test would notice */
}

T_TEST(validate_poisons_slots)
{
    setenv("SIDESTREAM_VALIDATE", "1", 1);
    side_device *dev = feed_device("", 10);
    t_rng rng = t_rng_make(10);
    struct feed_rig r;
    side_feed_item item;

    feed_init(&r, dev, 20000, 2);
    feed_start(&r);
    for (size_t i = 0; i < 6; i++) {
        struct feed_batch *b = feed_batch_new(&r);
        feed_piece(&r, b, 100, 50, false, &rng);
        feed_piece(&r, b, 19000, 1000, false, &rng);
        T_OK(feed_submit(&r, i));
        T_OK(side_feeder_next(r.f, NULL, &item));
        assert_int_equal(((unsigned char *)item.slot.data)[10000], 0xDB);
        memcpy(b->seen, item.slot.data, item.bytes);
        feed_give_back(&r, &item, NULL);
    }
    FEED_IS_RIGHT(&r, 0, 6);
    feed_finish(&r);
    feed_close(dev);
}

T_TEST(a_log_has_every_copy)
{
    side_device *dev = feed_device("", 11);
    t_rng rng = t_rng_make(11);
    struct feed_rig r;
    side_feed_item item;
    side_log *log;
    side_span spans[16];
    size_t n = 16;

    T_OK(side_log_create(dev, 0, &log));
    feed_init(&r, dev, DIRECT_BYTES + 10000, 2);
    r.o.log = log;
    feed_start(&r);
    for (size_t i = 0; i < 3; i++) {
        struct feed_batch *b = feed_batch_new(&r);
        feed_piece(&r, b, 0, DIRECT_BYTES, true, &rng);
        feed_piece(&r, b, DIRECT_BYTES + 10, 5000, false, &rng);
        T_OK(feed_submit(&r, i));
        take(&r, i, &item);
        feed_give_back(&r, &item, r.reader);
    }
    FEED_IS_RIGHT(&r, 0, 3);
    T_OK(side_log_spans(log, spans, &n));
    assert_int_equal(n, 6);
    for (size_t i = 0; i < 6; i++) {
        assert_int_equal(spans[i].lane, SIDE_LANE_H2D);
        assert_int_equal(spans[i].item, i / 2);
        assert_int_equal(spans[i].bytes, i % 2 == 0 ? DIRECT_BYTES : 5000);
    }
    feed_finish(&r);
    side_log_destroy(log);
    feed_close(dev);
}

T_MAIN(T_LONG(slots_come_back_out_of_order_from_other_threads, 60), T(a_held_batch_is_not_rewritten),
       T(the_queue_is_bounded), T(close_ends_the_batches), T(try_next_of_the_host_does_not_wait_for_the_copy),
       T(sources_do_not_pile_up), T_LONG(discard_at_any_moment, 60), T(discard_frees_all_slots),
       T_LONG(the_first_writers_wait_for_memory_stream, 60), T(validate_poisons_slots), T(a_log_has_every_copy))
