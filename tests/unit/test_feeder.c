/* SPDX-License-Identifier: MIT
 *
 * Feeders: what arrives where, in which order, how many copies it takes, and what the calls say when there is nothing to be had. */
#include "feed_help.h"

#include "os.h"

/* ---------------------------------------------------------------- batches arrive */

struct producer {
    struct feed_rig *r;
    size_t first, count;
};

static void *produce(void *arg)
{
    struct producer *p = arg;

    for (size_t i = p->first; i < p->first + p->count; i++) {
        T_OK(feed_submit(p->r, i));
        feed_sweep(p->r);
    }
    return NULL;
}

/* Everything that was made goes through; sources go as soon as they are read. */
static void run_all(struct feed_rig *r, t_rng *rng, bool host)
{
    struct producer p = {r, 0, r->made};
    side_feed_item item;
    pthread_t thread;

    assert_int_equal(pthread_create(&thread, NULL, produce, &p), 0);
    for (size_t i = 0; i < r->made; i++) {
        side_stream *reader = host ? NULL : r->reader;
        T_OK(side_feeder_next(r->f, reader, &item));
        assert_int_equal(item.number, i);
        if (host)
            memcpy(r->batches[i].seen, item.slot.data, item.bytes);
        else
            feed_read(r, &item, reader, t_rng_below(rng, 3) * 30000);
        assert_int_equal(item.bytes, r->batches[i].end);
        feed_give_back(r, &item, reader);
        feed_sweep(r);
    }
    pthread_join(thread, NULL);
    FEED_IS_RIGHT(r, 0, r->made);
    feed_sweep(r);
    assert_int_equal(r->freed, r->made);
}

static void arrive(enum feed_source source, size_t slot_bytes, size_t chunk_bytes, size_t batches, uint64_t seeds)
{
    T_FOR_SEEDS (seed, seeds) {
        t_rng rng = t_rng_make(seed);
        long live = mem_live();
        side_device *dev = feed_device("", seed);
        struct feed_rig r;

        feed_init(&r, dev, slot_bytes, 1 + (uint32_t)t_rng_below(&rng, 4));
        r.o.chunk_bytes = chunk_bytes;
        r.o.threads = 1 + (uint32_t)t_rng_below(&rng, 3);
        r.o.queue = (uint32_t)t_rng_below(&rng, 4);
        r.o.timing = t_rng_chance(&rng, 2);
        feed_start(&r);
        for (size_t i = 0; i < batches; i++)
            feed_random(&r, source, &rng);
        run_all(&r, &rng, t_rng_chance(&rng, 4));
        feed_finish(&r);
        feed_close(dev);
        assert_int_equal(mem_live(), live);
    }
}

T_TEST(pageable_batches_arrive)
{
    arrive(PAGEABLE, 1 << 20, 0, 12, 25);
}

T_TEST(pinned_batches_arrive)
{
    arrive(PINNED, 1 << 20, 0, 12, 25);
}

T_TEST(mixed_batches_arrive)
{
    arrive(MIXED, 1 << 20, 100000, 12, 25);
}

T_TEST(small_chunks_arrive)
{
    arrive(MIXED, 20000, 700, 40, 40);
}

T_TEST(one_byte_arrives)
{
    side_device *dev = feed_device("", 1);
    t_rng rng = t_rng_make(1);
    struct feed_rig r;

    feed_init(&r, dev, 10, 2);
    feed_start(&r);
    for (size_t i = 0; i < 10; i++)
        feed_piece(&r, feed_batch_new(&r), i, 1, i % 2 != 0, &rng);
    run_all(&r, &rng, false);
    feed_finish(&r);
    feed_close(dev);
}

/* ---------------------------------------------------------------- how many copies */

static side_feeder_stats stats_of(struct feed_rig *r)
{
    side_feeder_stats s;

    T_OK(side_feeder_get_stats(r->f, &s));
    return s;
}

static void submit_and_take(struct feed_rig *r, size_t i)
{
    side_feed_item item;

    T_OK(feed_submit(r, i));
    T_OK(side_feeder_next(r->f, r->reader, &item));
    feed_read(r, &item, r->reader, 0);
    feed_give_back(r, &item, r->reader);
    FEED_IS_RIGHT(r, i, i + 1);
}

/* A batch of `pieces` pieces of `bytes`, `gap` bytes apart, takes so many copies. */
static void copies_taken(size_t pieces, size_t bytes, size_t gap, size_t chunk_bytes, bool pinned, uint64_t copies)
{
    side_device *dev = feed_device("", 3);
    t_rng rng = t_rng_make(3);
    struct feed_rig r;

    feed_init(&r, dev, pieces * (bytes + gap), 2);
    r.o.chunk_bytes = chunk_bytes;
    feed_start(&r);
    struct feed_batch *b = feed_batch_new(&r);
    for (size_t i = 0; i < pieces; i++)
        feed_piece(&r, b, i * (bytes + gap), bytes, pinned, &rng);
    submit_and_take(&r, 0);
    side_feeder_stats s = stats_of(&r);
    if (s.copies != copies)
        T_FAIL("%zu pieces of %zu bytes, %zu apart: %llu copies, not %llu", pieces, bytes, gap,
               (unsigned long long)s.copies, (unsigned long long)copies);
    assert_int_equal(s.bytes, pieces * bytes);
    assert_int_equal(s.direct_bytes, pinned && bytes >= DIRECT_BYTES ? pieces * bytes : 0);
    feed_finish(&r);
    feed_close(dev);
}

T_TEST(small_pieces_travel_together)
{
    copies_taken(PIECES_MOST, 4096, 0, 0, false, 1);
    copies_taken(PIECES_MOST, 4096, 64, 0, false, 1);
    copies_taken(PIECES_MOST, 100, 4095, 0, false, 1);
    copies_taken(PIECES_MOST, 100, 4096, 0, false, PIECES_MOST);
    copies_taken(PIECES_MOST, 4096, 0, 0, true, 1);
    copies_taken(1, 10000, 0, 1000, false, 10);
    copies_taken(2, 10001, 500, 1000, false, 21); /* the eleventh has the gap in it */
    copies_taken(1, 10001, 0, 1000, false, 11);
    copies_taken(3, 100, 900, 1000, false, 3);
}

T_TEST(large_pinned_pieces_go_by_themselves)
{
    copies_taken(3, DIRECT_BYTES, 0, 0, true, 3);
    copies_taken(2, DIRECT_BYTES + 1, 64, 100000, true, 2);
    copies_taken(2, DIRECT_BYTES - 1, 0, 0, true, 1);
    copies_taken(2, DIRECT_BYTES, 0, 0, false, 1);
}

/* Half of a piece is pinned: it is staged. */
T_TEST(a_piece_that_is_pinned_in_part_is_staged)
{
    side_device *dev = feed_device("", 4);
    t_rng rng = t_rng_make(4);
    struct feed_rig r;
    unsigned char *p = aligned_alloc(4096, 2 * DIRECT_BYTES);

    feed_init(&r, dev, 2 * DIRECT_BYTES, 2);
    feed_start(&r);
    t_rng_fill(&rng, p, 2 * DIRECT_BYTES);
    T_OK(dev->ops->host_register(dev->context, p, DIRECT_BYTES, false));
    side_feed_piece piece = {p, 2 * DIRECT_BYTES, 0};
    side_feed_item item;
    T_OK(side_feeder_submit(r.f, &piece, 1, NULL));
    T_OK(side_feeder_next(r.f, NULL, &item));
    assert_memory_equal(item.slot.data, p, 2 * DIRECT_BYTES);
    feed_give_back(&r, &item, NULL);
    assert_int_equal(stats_of(&r).direct_bytes, 0);
    feed_finish(&r);
    feed_unpin(&r, p);
    feed_close(dev);
}

/* ---------------------------------------------------------------- threads and memory come when they are needed */

T_TEST(direct_batches_need_no_thread)
{
    side_device *dev = feed_device("", 5);
    t_rng rng = t_rng_make(5);
    struct feed_rig r;
    uint64_t count;

    feed_init(&r, dev, 2 * DIRECT_BYTES, 2);
    feed_start(&r);
    for (size_t i = 0; i < 6; i++)
        feed_piece(&r, feed_batch_new(&r), i * 64, DIRECT_BYTES, true, &rng);
    for (size_t i = 0; i < 4; i++)
        submit_and_take(&r, i);
    assert_int_equal(stats_of(&r).threads, 0);
    assert_int_equal(stats_of(&r).staging_slots, 0);
    /* No slot is free: somebody has to wait for one. */
    side_feed_item held[2];
    for (size_t i = 0; i < 2; i++) {
        T_OK(feed_submit(&r, 4 + i));
        T_OK(side_feeder_next(r.f, r.reader, &held[i]));
        feed_read(&r, &held[i], r.reader, 0);
    }
    feed_piece(&r, feed_batch_new(&r), 0, DIRECT_BYTES, true, &rng);
    T_OK(feed_submit(&r, 6));
    assert_int_equal(stats_of(&r).threads, 1);
    assert_int_equal(stats_of(&r).staging_slots, 0);
    feed_give_back(&r, &held[1], r.reader);
    side_feed_item item;
    T_OK(side_feeder_next(r.f, r.reader, &item));
    assert_int_equal(item.slot.index, held[1].slot.index);
    feed_read(&r, &item, r.reader, 0);
    feed_give_back(&r, &item, r.reader);
    feed_give_back(&r, &held[0], r.reader);
    FEED_IS_RIGHT(&r, 4, 7);
    T_OK(side_feeder_copied(r.f, &count));
    assert_int_equal(count, 7);
    feed_finish(&r);
    feed_close(dev);
}

/* Where staging cannot be had the batch is refused, and the feeder is as it was. */
T_TEST(no_memory_for_staging)
{
    side_device *dev = feed_device("", 6);
    t_rng rng = t_rng_make(6);
    struct feed_rig r;

    feed_init(&r, dev, 2 * DIRECT_BYTES, 2);
    r.o.pinned_bytes = 100;
    feed_start(&r);
    feed_piece(&r, feed_batch_new(&r), 0, DIRECT_BYTES, false, &rng);
    T_STATUS(side_feeder_submit(r.f, r.batches[0].pieces, 1, NULL), SIDE_OVER_BUDGET);
    feed_free_sources(&r, 1);
    r.made = 0;
    r.freed = 0;
    feed_unpin(&r, r.batches[0].seen);
    free(r.batches[0].image);
    free(r.batches[0].mask);
    feed_piece(&r, feed_batch_new(&r), 0, DIRECT_BYTES, true, &rng);
    submit_and_take(&r, 0);
    feed_finish(&r);
    feed_close(dev);
}

T_TEST(pinned_bytes_limits_staging)
{
    side_device *dev = feed_device("", 7);
    t_rng rng = t_rng_make(7);
    struct feed_rig r;

    feed_init(&r, dev, 1 << 20, 2);
    r.o.threads = 4;
    r.o.pinned_bytes = 300000;
    feed_start(&r);
    feed_piece(&r, feed_batch_new(&r), 0, 1 << 20, false, &rng);
    submit_and_take(&r, 0);
    assert_true(stats_of(&r).pinned_bytes <= 300000);
    assert_int_equal(stats_of(&r).pinned_bytes, stats_of(&r).staging_slots * stats_of(&r).chunk_bytes);
    feed_finish(&r);
    feed_close(dev);
}

/* ---------------------------------------------------------------- what is refused */

T_TEST(bad_options)
{
    side_device *dev = feed_device("", 1), *other = feed_device("", 2);
    side_feeder *f = NULL;
    side_stream *stream;
    char memory[64];
    void *slots[2] = {memory, NULL};
    side_feeder_options good = SIDE_FEEDER_OPTIONS_INIT, o;

    T_OK(side_stream_create(other, &stream));
    good.slots = 2;
    good.slot_bytes = 100;
    T_STATUS(side_feeder_create(NULL, &good, &f), SIDE_INVALID);
    T_STATUS(side_feeder_create(dev, NULL, &f), SIDE_INVALID);
    T_STATUS(side_feeder_create(dev, &good, NULL), SIDE_INVALID);
#define BAD(field, value)                                    \
    o = good;                                                \
    o.field = value;                                         \
    T_STATUS(side_feeder_create(dev, &o, &f), SIDE_INVALID); \
    assert_true(strstr(side_last_error()->message, #field) != NULL)
    BAD(slots, 0);
    BAD(slots, 4097);
    BAD(queue, 4097);
    BAD(slot_bytes, 0);
    BAD(slot_bytes, SIZE_MAX / 2);
    BAD(threads, 65);
    BAD(timeout_s, -1);
    BAD(memory, slots);
    slots[1] = memory + 1 + (uintptr_t)memory % 2;
    BAD(memory, slots);
    BAD(memory_stream, stream);
    BAD(copy_stream, stream);
#undef BAD
    o = good;
    o.slot_bytes = SIZE_MAX / 8;
    T_STATUS(side_feeder_create(dev, &o, &f), SIDE_NO_DEVICE_MEMORY);
    assert_null(f);
    T_OK(side_feeder_destroy(NULL));
    side_feeder_cancel(NULL);
    assert_null(side_feeder_slots(NULL));
    side_stream_destroy(stream);
    side_device_close(other);
    side_device_close(dev);
}

T_TEST(bad_batches)
{
    side_device *dev = feed_device("", 1);
    struct feed_rig r;
    char *data = malloc(DIRECT_BYTES);
    void *on_device;
    side_feed_item item;
    uint64_t count;

    feed_init(&r, dev, DIRECT_BYTES, 2);
    feed_start(&r);
    T_OK(side_device_alloc(dev, DIRECT_BYTES, &on_device));
    side_feed_piece p[3] = {{data, 10, 0}, {data, 10, 20}, {data, 10, 40}};
    T_STATUS(side_feeder_submit(NULL, p, 3, NULL), SIDE_INVALID);
    T_STATUS(side_feeder_submit(r.f, NULL, 3, NULL), SIDE_INVALID);
    T_STATUS(side_feeder_submit(r.f, p, 0, NULL), SIDE_INVALID);
    p[1].data = NULL;
    T_STATUS(side_feeder_submit(r.f, p, 3, NULL), SIDE_INVALID);
    assert_non_null(strstr(side_last_error()->message, "pieces[1]"));
    p[1] = (side_feed_piece){data, 11, 30};
    T_STATUS(side_feeder_submit(r.f, p, 3, NULL), SIDE_INVALID);
    assert_non_null(strstr(side_last_error()->message, "overlap at offset 40"));
    p[1] = (side_feed_piece){data, 10, 0};
    T_STATUS(side_feeder_submit(r.f, p, 3, NULL), SIDE_INVALID);
    p[1] = (side_feed_piece){data, 10, DIRECT_BYTES - 9};
    T_STATUS(side_feeder_submit(r.f, p, 3, NULL), SIDE_TOO_LARGE);
    p[1].offset = SIZE_MAX - 4;
    T_STATUS(side_feeder_submit(r.f, p, 3, NULL), SIDE_TOO_LARGE);
    p[0] = (side_feed_piece){NULL, 0, 7};
    T_STATUS(side_feeder_submit(r.f, p, 1, NULL), SIDE_INVALID);
    p[0] = (side_feed_piece){on_device, DIRECT_BYTES, 0};
    T_STATUS(side_feeder_submit(r.f, p, 1, NULL), SIDE_INVALID);
    assert_non_null(strstr(side_last_error()->message, "device memory"));
    T_STATUS(side_feeder_next(NULL, NULL, &item), SIDE_INVALID);
    T_STATUS(side_feeder_next(r.f, NULL, NULL), SIDE_INVALID);
    T_STATUS(side_feeder_copied(r.f, NULL), SIDE_INVALID);
    T_STATUS(side_feeder_copied(NULL, &count), SIDE_INVALID);
    T_STATUS(side_feeder_close(NULL), SIDE_INVALID);
    T_STATUS(side_feeder_discard(NULL), SIDE_INVALID);
    T_STATUS(side_feeder_get_stats(r.f, NULL), SIDE_INVALID);
    T_STATUS(side_feeder_try_next(r.f, r.reader, &item), SIDE_AGAIN);
    /* None of that counts. */
    memset(data, 7, 10);
    p[0] = (side_feed_piece){data, 10, 5};
    T_OK(side_feeder_submit(r.f, p, 1, &count));
    assert_int_equal(count, 0);
    T_OK(side_feeder_next(r.f, NULL, &item));
    assert_int_equal(item.bytes, 15);
    assert_memory_equal((char *)item.slot.data + 5, data, 10);
    feed_give_back(&r, &item, NULL);
    side_device_free(dev, on_device);
    free(data);
    feed_finish(&r);
    feed_close(dev);
}

/* A wait for a copy would end the capture of a graph. */
T_TEST(a_captured_stream_is_refused)
{
    side_device *dev = feed_device("", 1);
    t_rng rng = t_rng_make(1);
    struct feed_rig r;
    side_feed_item item;
    bool capturing = true;

    feed_init(&r, dev, 100, 2);
    feed_start(&r);
    T_OK(side_stream_is_capturing(r.reader, &capturing));
    assert_false(capturing);
    T_STATUS(side_stream_is_capturing(NULL, &capturing), SIDE_INVALID);
    T_STATUS(side_stream_is_capturing(r.reader, NULL), SIDE_INVALID);
    feed_piece(&r, feed_batch_new(&r), 0, 100, false, &rng);
    T_OK(feed_submit(&r, 0));
    sim_capture(r.reader->handle, true);
    T_OK(side_stream_is_capturing(r.reader, &capturing));
    assert_true(capturing);
    T_STATUS(side_feeder_next(r.f, r.reader, &item), SIDE_STATE);
    T_STATUS(side_feeder_try_next(r.f, r.reader, &item), SIDE_STATE);
    sim_capture(r.reader->handle, false);
    T_OK(side_feeder_next(r.f, r.reader, &item));
    assert_int_equal(item.number, 0);
    feed_give_back(&r, &item, r.reader);
    feed_finish(&r);
    feed_close(dev);
}

T_MAIN(T_LONG(pageable_batches_arrive, 60), T_LONG(pinned_batches_arrive, 60), T_LONG(mixed_batches_arrive, 60),
       T_LONG(small_chunks_arrive, 60), T(one_byte_arrives), T(small_pieces_travel_together),
       T(large_pinned_pieces_go_by_themselves), T(a_piece_that_is_pinned_in_part_is_staged),
       T(direct_batches_need_no_thread), T(no_memory_for_staging), T(pinned_bytes_limits_staging), T(bad_options),
       T(bad_batches), T(a_captured_stream_is_refused))
