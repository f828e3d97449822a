/* SPDX-License-Identifier: MIT
 *
 * Every device: batches of pieces of all kinds through a feeder, read by slow work on a stream, by the host and by CUDA's legacy stream; slots that are held. Every
 * float says which batch it is of, so what comes too early or too late shows. */
#include "conform.h"

#include <pthread.h>
#include <sched.h>

enum { SLOT_BYTES = 1024 * 1024, SLOT_FLOATS = SLOT_BYTES / 4, LARGE = 320 * 1024, PIECES = 24 };

struct run {
    struct rig rig;
    side_feeder *f;
    side_feeder_options o;
    side_stream *reader;
    size_t batches;
    float *results, *back; /* device, pinned: of each batch its first and last KiB */
    uint64_t *ends;
    float *pageable[PIECES], *pinned[PIECES];
    uint32_t seed;
};

/* Batch i in pieces: sizes, kinds and gaps by a formula; the first begins at 0. All floats of a piece are i. The memory is used again for the next batch. */
static size_t batch_make(struct run *r, size_t i, side_feed_piece *pieces)
{
    t_rng rng = t_rng_make(i + r->seed);
    size_t at = 0, n = 0;

    while (n < PIECES) {
        bool pinned = t_rng_chance(&rng, 2), large = t_rng_chance(&rng, 4);
        size_t floats = large ? LARGE / 4 : 1 + t_rng_below(&rng, 2000);
        if (at + floats > SLOT_FLOATS)
            break;
        float *p = pinned ? r->pinned[n] : r->pageable[n];
        for (size_t k = 0; k < floats; k++)
            p[k] = (float)i;
        pieces[n++] = (side_feed_piece){p, floats * 4, at * 4};
        at += floats + (t_rng_chance(&rng, 3) ? t_rng_below(&rng, 3000) : 0);
    }
    r->ends[i] = pieces[n - 1].offset + pieces[n - 1].bytes;
    return n;
}

static struct run run_make(size_t batches)
{
    struct run r = {.rig = rig_open(), .batches = batches, .o = SIDE_FEEDER_OPTIONS_INIT, .seed = 17};

    r.o.slots = 3;
    r.o.slot_bytes = SLOT_BYTES;
    r.o.chunk_bytes = 200 * 1000;
    r.o.threads = 2;
    r.reader = stream_make(r.rig.device);
    r.results = device_make(r.rig.device, batches * 2048);
    r.back = pinned_make(r.rig.device, batches * 2048);
    r.ends = host_make(batches * sizeof(*r.ends));
    for (size_t i = 0; i < PIECES; i++) {
        r.pageable[i] = host_make(LARGE);
        r.pinned[i] = pinned_make(r.rig.device, LARGE);
    }
    return r;
}

static void feeder_end(struct run *r)
{
    T_OK(side_feeder_destroy(r->f));
    r->f = NULL;
}

static void run_free(struct run *r)
{
    feeder_end(r);
    side_stream_destroy(r->reader);
    side_device_free(r->rig.device, r->results);
    pinned_free(r->rig.device, r->back);
    for (size_t i = 0; i < PIECES; i++) {
        free(r->pageable[i]);
        pinned_free(r->rig.device, r->pinned[i]);
    }
    free(r->ends);
    rig_close(&r->rig);
}

/* The sources are used again at once: copied must not say so too early. */
static void submit_one(struct run *r, size_t i)
{
    side_feed_piece pieces[PIECES];
    uint64_t number, count = 0;

    T_OK(side_feeder_submit(r->f, pieces, batch_make(r, i, pieces), &number));
    assert_int_equal(number, i);
    while (count <= i) {
        T_OK(side_feeder_copied(r->f, &count));
        if (count <= i)
            sched_yield(); /* a model's clock goes on a little at each look: none of them may sleep */
    }
}

static void *submit_all(void *arg)
{
    struct run *r = arg;

    for (size_t i = 0; i < r->batches; i++)
        submit_one(r, i);
    T_OK(side_feeder_close(r->f));
    return NULL;
}

/* Slow, then the first and the last KiB (of a short batch: what there is, in floats): out = in + 0.5. */
static void read_one(struct run *r, const side_feed_item *item, side_stream *stream)
{
    size_t i = item->number, most = item->bytes / 4 < 256 ? item->bytes / 4 : 256,
           last = (item->bytes / 4 - most) / 4 * 4;

    assert_int_equal(item->bytes, r->ends[i]);
    spin_async(stream, 30000);
    affine_async(stream, r->results + i * 512, item->slot.data, most * 4, 1.0f, 0.5f);
    affine_async(stream, r->results + i * 512 + 256, (char *)item->slot.data + last * 4, most * 4, 1.0f, 0.5f);
}

static void give_back(struct run *r, const side_feed_item *item, side_stream *stream)
{
    T_OK(side_slots_release(side_feeder_slots(r->f), &item->slot, stream));
    T_OK(side_slots_give_back(side_feeder_slots(r->f), &item->slot));
}

/* Where the batch has no piece there is no content: looked at is what a piece covers. */
static void check_one(struct run *r, size_t i)
{
    side_feed_piece pieces[PIECES];
    size_t n = batch_make(r, i, pieces), end = r->ends[i] / 4, most = end < 256 ? end : 256, last = (end - most) / 4 * 4;

    for (size_t p = 0; p < n; p++)
        for (size_t k = pieces[p].offset / 4; k < (pieces[p].offset + pieces[p].bytes) / 4; k++) {
            if (k < most && r->back[i * 512 + k] != (float)i + 0.5f)
                T_FAIL("batch %zu: float %zu is %g", i, k, (double)r->back[i * 512 + k]);
            if (k >= last && k < last + most && r->back[i * 512 + 256 + k - last] != (float)i + 0.5f)
                T_FAIL("batch %zu: float %zu is %g", i, k, (double)r->back[i * 512 + 256 + k - last]);
        }
}

static void check_all(struct run *r)
{
    T_OK(side_copy_async(r->reader, SIDE_COPY_D2H, r->back, r->results, r->batches * 2048));
    sync_stream(r->reader);
    for (size_t i = 0; i < r->batches; i++)
        check_one(r, i);
}

T_TEST(batches_of_all_kinds_arrive)
{
    struct run r = run_make(T_SANITIZED ? 40 : 200);
    side_feeder_stats s;
    side_feed_item item;
    pthread_t thread;
    side_status status;

    r.o.timing = true;
    T_OK(side_feeder_create(r.rig.device, &r.o, &r.f));
    assert_int_equal(pthread_create(&thread, NULL, submit_all, &r), 0);
    while ((status = side_feeder_next(r.f, r.reader, &item)) == SIDE_OK) {
        read_one(&r, &item, r.reader);
        give_back(&r, &item, r.reader);
    }
    T_STATUS(status, SIDE_END);
    pthread_join(thread, NULL);
    check_all(&r);
    T_OK(side_feeder_get_stats(r.f, &s));
    assert_int_equal(s.taken, r.batches);
    assert_true(s.timed > 16 && s.timed <= 16 + r.batches / 8); /* a sample: the first, then two of each 16 */
    assert_true(s.copies >= r.batches && s.direct_bytes > 0 && s.direct_bytes < s.bytes);
    assert_true(s.copy_s > 0 && s.stall_s > 0 && s.compute_s > 0);
    double lost = s.lost_source_s + s.lost_slot_s + s.lost_stage_s + s.lost_link_s;
    assert_true(lost > s.stall_s * 0.999 && lost < s.stall_s * 1.001);
    run_free(&r);
}

/* Memory of the caller's, that something still writes to when the feeder is made; one stream of the caller's for the copies. */
T_TEST(memory_and_stream_of_the_caller_s)
{
    struct run r = run_make(12);
    side_stream *before = stream_make(r.rig.device), *copy = stream_make(r.rig.device);
    void *memory[3], *block = device_make(r.rig.device, 3 * SLOT_BYTES);
    side_feed_item item;

    for (int i = 0; i < 3; i++)
        memory[i] = (char *)block + (size_t)i * SLOT_BYTES;
    spin_async(before, 20 * MS);
    T_OK(side_memset_async(before, block, 0xff, 3 * SLOT_BYTES));
    r.o.memory = memory;
    r.o.memory_stream = before;
    r.o.copy_stream = copy;
    T_OK(side_feeder_create(r.rig.device, &r.o, &r.f));
    for (size_t i = 0; i < r.batches; i++) {
        submit_one(&r, i);
        T_OK(side_feeder_next(r.f, r.reader, &item));
        assert_true((char *)item.slot.data >= (char *)block && (char *)item.slot.data < (char *)block + 3 * SLOT_BYTES);
        read_one(&r, &item, r.reader);
        give_back(&r, &item, r.reader);
    }
    check_all(&r);
    feeder_end(&r);
    sync_stream(before);
    side_stream_destroy(before);
    side_stream_destroy(copy);
    side_device_free(r.rig.device, block);
    run_free(&r);
}

/* Two of three slots are held, in turn; another stream reads what is held, long after. */
T_TEST(held_batches_stay)
{
    struct run r = run_make(T_SANITIZED ? 30 : 100);
    side_feed_item items[3];
    side_stream *late = stream_make(r.rig.device);
    side_slot slot;

    T_OK(side_feeder_create(r.rig.device, &r.o, &r.f));
    for (size_t i = 0; i < r.batches + 2; i++) {
        if (i < r.batches) {
            submit_one(&r, i);
            T_OK(side_feeder_next(r.f, r.reader, &items[i % 3]));
        }
        if (i >= 2) {
            const side_feed_item *old = &items[(i - 2) % 3];
            T_OK(side_slots_take(side_feeder_slots(r.f), old->slot.key, late, &slot));
            read_one(&r, old, late);
            T_OK(side_slots_release(side_feeder_slots(r.f), &slot, late));
            give_back(&r, old, r.reader);
        }
    }
    sync_stream(late);
    check_all(&r);
    feeder_end(&r);
    side_stream_destroy(late);
    run_free(&r);
}

/* The host computes on its own copy of what it sees; on a GPU it may not look at device memory, so it asks for it. */
T_TEST(the_host_and_the_legacy_stream_take)
{
    struct run r = run_make(20);
    side_stream *legacy = NULL;
    side_feed_item item;
    bool capturing = true;

    T_OK(side_stream_wrap(r.rig.device, NULL, &legacy));
    T_OK(side_stream_is_capturing(legacy, &capturing));
    assert_false(capturing);
    T_OK(side_feeder_create(r.rig.device, &r.o, &r.f));
    for (size_t i = 0; i < r.batches; i++) {
        side_stream *reader = i % 2 == 0 ? NULL : legacy;
        submit_one(&r, i);
        T_OK(side_feeder_next(r.f, reader, &item));
        read_one(&r, &item, legacy); /* after the host's take the copy is done: any stream may read */
        if (reader == NULL)
            sync_stream(legacy);
        give_back(&r, &item, reader);
    }
    sync_stream(legacy);
    check_all(&r);
    feeder_end(&r);
    side_stream_destroy(legacy);
    run_free(&r);
}

/* Batches that nobody takes go, sources and all; what comes after them is whole. */
T_TEST(discarded_batches_are_gone)
{
    struct run r = run_make(40);
    side_feed_piece pieces[PIECES];
    side_feed_item item;
    uint64_t count;

    T_OK(side_feeder_create(r.rig.device, &r.o, &r.f));
    for (size_t i = 0; i < r.batches; i++) {
        if (i % 4 != 0) {
            size_t n = batch_make(&r, i, pieces);
            T_OK(side_feeder_submit(r.f, pieces, n, NULL));
            T_OK(side_feeder_discard(r.f));
            T_OK(side_feeder_copied(r.f, &count));
            assert_int_equal(count, i + 1);
            T_OK(side_memset_async(r.reader, r.results + i * 512, 0, 2048));
            continue;
        }
        submit_one(&r, i);
        T_OK(side_feeder_next(r.f, r.reader, &item));
        assert_int_equal(item.number, i);
        read_one(&r, &item, r.reader);
        give_back(&r, &item, r.reader);
    }
    T_OK(side_copy_async(r.reader, SIDE_COPY_D2H, r.back, r.results, r.batches * 2048));
    sync_stream(r.reader);
    for (size_t i = 0; i < r.batches; i += 4)
        check_one(&r, i);
    run_free(&r);
}

/* Destroyed with batches in every state. */
T_TEST(a_feeder_is_left_in_the_middle)
{
    for (int round = 0; round < (T_SANITIZED ? 5 : 20); round++) {
        struct run r = run_make(4);
        side_feed_piece pieces[PIECES];
        side_feed_item item;

        T_OK(side_feeder_create(r.rig.device, &r.o, &r.f));
        submit_one(&r, 0);
        T_OK(side_feeder_next(r.f, r.reader, &item));
        T_OK(side_feeder_submit(r.f, pieces, batch_make(&r, 1, pieces), NULL));
        if (round % 2 == 0)
            side_feeder_cancel(r.f);
        side_status s = side_feeder_try_next(r.f, NULL, &item);
        assert_true(round % 2 == 0 ? s == SIDE_CANCELLED : s == SIDE_OK || s == SIDE_AGAIN);
        run_free(&r);
    }
}

/* clang-format off */
#define EVERY_DRAW(name, seconds)                                                                                \
    EVERY_LONG(name, seconds), T_LONG_ARG(name, seconds, "sim:seed=2"), T_LONG_ARG(name, seconds, "sim:seed=6"), \
    T_LONG_ARG(name, seconds, "sim:seed=7")
/* clang-format on */

T_MAIN(EVERY_DRAW(batches_of_all_kinds_arrive, 60), EVERY_DRAW(memory_and_stream_of_the_caller_s, 30),
       EVERY_DRAW(held_batches_stay, 60), EVERY_LONG(the_host_and_the_legacy_stream_take, 30),
       EVERY_LONG(discarded_batches_are_gone, 30), EVERY_LONG(a_feeder_is_left_in_the_middle, 60))
