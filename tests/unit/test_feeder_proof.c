/* SPDX-License-Identifier: MIT
 *
 * Proof that the tests would notice a wait of a feeder's that is left out, and exact times: what copies and stalls take, and what stalls are laid to. */
#include "feed_help.h"

#include "fence.h"

#include <math.h>

enum { SEEDS = 200, N = 12 };

/* ---------------------------------------------------------------- dropped waits */

/* Readers are slow and take all slots in turn. True: each saw its batch. */
static bool run_is_right(enum feed_source source, uint64_t seed, int drop)
{
    side_device *dev = feed_device("", seed);
    t_rng rng = t_rng_make(seed);
    size_t bytes = source == PINNED ? DIRECT_BYTES : 3000;
    struct feed_rig r;
    side_feed_item item;

    feed_init(&r, dev, bytes, 3);
    r.o.threads = 1;
    r.o.chunk_bytes = 1000;
    feed_start(&r);
    for (size_t i = 0; i < N; i++)
        feed_piece(&r, feed_batch_new(&r), 0, bytes, source == PINNED, &rng);
    fence_mutate(drop != SITE_NONE ? MUTATE_DROP : MUTATE_NONE, drop);
    for (size_t i = 0; i < N; i++) {
        T_OK(feed_submit(&r, i));
        T_OK(side_feeder_next(r.f, r.reader, &item));
        feed_read(&r, &item, r.reader, 20000);
        feed_give_back(&r, &item, r.reader);
    }
    fence_mutate(MUTATE_NONE, SITE_NONE);
    bool right = feed_first_wrong(&r, 0, N) == N;
    feed_finish(&r);
    feed_close(dev);
    return right;
}

static void seen(enum feed_source source, int drop)
{
    for (uint64_t seed = 1; seed <= SEEDS; seed++)
        if (!run_is_right(source, seed, drop)) {
            printf("site %d dropped, source %d: seen at seed %llu\n", drop, source, (unsigned long long)seed);
            return;
        }
    T_FAIL("site %d dropped, source %d: not seen in %d seeds", drop, source, SEEDS);
}

T_TEST(unmutated_is_right)
{
    T_FOR_SEEDS (seed, 60)
        assert_true(run_is_right(seed % 2 == 0 ? PINNED : PAGEABLE, seed, SITE_NONE));
}

T_TEST(device_acquire_dropped)
{
    seen(PINNED, SITE_FEED_DEVICE); /* the copy does not wait for readers */
    if (!T_TSAN)
        seen(PAGEABLE, SITE_FEED_DEVICE);
}

T_TEST(device_take_dropped)
{
    seen(PINNED, SITE_FEED_DEVICE + 1); /* the reader does not wait for the copy */
    if (!T_TSAN)
        seen(PAGEABLE, SITE_FEED_DEVICE + 1);
}

T_TEST(host_acquire_dropped)
{
    if (T_TSAN)
        T_SKIP("a host wait left out is a data race, which this build ends at");
    seen(PAGEABLE, SITE_FEED_HOST); /* staging is filled again before its copy is done */
}

/* Batches that are being copied are discarded and their sources go at once. How often the device saw one go that it was still to read. */
static uint64_t discard_early(uint64_t seed, bool drop)
{
    side_device *dev = feed_device("", seed);
    t_rng rng = t_rng_make(seed);
    struct feed_rig r;
    void *source;

    feed_init(&r, dev, DIRECT_BYTES, 3);
    feed_start(&r);
    source = feed_pinned(&r, DIRECT_BYTES);
    t_rng_fill(&rng, source, DIRECT_BYTES);
    side_feed_piece piece = {source, DIRECT_BYTES, 0};
    for (int i = 0; i < 3; i++)
        T_OK(side_feeder_submit(r.f, &piece, 1, NULL));
    fence_mutate(drop ? MUTATE_DROP : MUTATE_NONE, drop ? SITE_FEED_COPIED : SITE_NONE);
    T_OK(side_feeder_discard(r.f));
    fence_mutate(MUTATE_NONE, SITE_NONE);
    T_OK(dev->ops->host_unregister(dev->context, source));
    uint64_t violations = sim_violations(dev->context);
    feed_finish(&r);
    free(source); /* where it went too early, the copy has read it until now */
    side_device_close(dev);
    return violations;
}

T_TEST(discard_wait_dropped)
{
    T_FOR_SEEDS (seed, 30)
        assert_int_equal(discard_early(seed, false), 0);
    for (uint64_t seed = 1; discard_early(seed, true) == 0; seed++)
        assert_true(seed < SEEDS);
}

/* ---------------------------------------------------------------- times */

enum { MS = 1000000 };

static void near_ns(double seconds, double ns, const char *what, int line)
{
    if (fabs(seconds * 1e9 - ns) > 0.5)
        T_FAIL("line %d: %s is %.0f ns, not %.0f", line, what, seconds * 1e9, ns);
}
#define NEAR(seconds, ns) near_ns(seconds, (double)(ns), #seconds, __LINE__)

static side_feeder_stats stats_of(struct feed_rig *r)
{
    side_feeder_stats s;

    T_OK(side_stream_sync(r->reader, 0)); /* or not all events are done */
    T_OK(side_feeder_get_stats(r->f, &s));
    NEAR(s.lost_source_s + s.lost_slot_s + s.lost_stage_s + s.lost_link_s, s.stall_s * 1e9);
    return s;
}

static uint64_t copy_ns(size_t bytes)
{
    side_device *dev = feed_device("", 1);
    struct feed_rig r;

    feed_init(&r, dev, bytes, 1);
    void *host = feed_pinned(&r, bytes), *to;
    T_OK(side_device_alloc(dev, bytes, &to));
    T_OK(side_copy_async(r.reader, SIDE_COPY_H2D, to, host, bytes));
    T_OK(side_stream_sync(r.reader, 0));
    uint64_t ns = side_device_now_ns(dev);
    side_device_free(dev, to);
    feed_unpin(&r, host);
    feed_finish(&r);
    feed_close(dev);
    return ns;
}

static void spin(side_stream *stream, uint64_t ns)
{
    side_op op = SIDE_OP_INIT;

    op.id = SIDE_OP_SPIN;
    op.dim[0] = ns;
    T_OK(side_op_async(stream, &op));
}

static void rig_timed(struct feed_rig *r, side_device *dev, size_t bytes, uint32_t slots, size_t batches, bool pinned)
{
    t_rng rng = t_rng_make(1);

    feed_init(r, dev, bytes, slots);
    r->o.timing = true;
    r->o.threads = 1;
    feed_start(r);
    for (size_t i = 0; i < batches; i++)
        feed_piece(r, feed_batch_new(r), 0, bytes, pinned, &rng);
}

/* How many of the first `batches` are measured: 16, then the second and third of each 16, and the very first of those, which has the last of the 16 before it. */
static uint64_t timed_of(size_t batches)
{
    uint64_t timed = 0;

    for (size_t i = 0; i < batches; i++)
        timed += i <= 16 || i % 16 == 1 || i % 16 == 2;
    return timed;
}

/* One thread submits pinned batches and takes them; each is computed on for compute_ns. */
static side_feeder_stats steady(uint64_t compute_ns, size_t batches, bool host)
{
    side_device *dev = feed_device("", 1);
    struct feed_rig r;
    side_feed_item item;

    rig_timed(&r, dev, DIRECT_BYTES, 3, batches, true);
    for (size_t i = 0; i < batches; i++) {
        T_OK(feed_submit(&r, i));
        T_OK(side_feeder_next(r.f, host ? NULL : r.reader, &item));
        if (host)
            dev->ops->clock_join(dev->context, side_device_now_ns(dev) + compute_ns);
        else
            spin(r.reader, compute_ns);
        feed_give_back(&r, &item, host ? NULL : r.reader);
    }
    side_feeder_stats s = stats_of(&r);
    assert_int_equal(s.timed, timed_of(batches));
    assert_int_equal(s.taken, batches);
    assert_int_equal(s.submitted, batches);
    assert_int_equal(s.bytes, batches * DIRECT_BYTES);
    feed_finish(&r);
    feed_close(dev);
    return s;
}

T_TEST(copies_hide_behind_compute)
{
    uint64_t c = copy_ns(DIRECT_BYTES);
    side_feeder_stats s = steady(2 * c, N, false);

    NEAR(s.copy_s, N * c);
    NEAR(s.compute_s, (N - 1) * 2 * c); /* when the last one ends nobody has asked */
    NEAR(s.stall_s, c);                 /* the first has nothing to hide behind */
    NEAR(s.lost_link_s, c);
    NEAR(s.submit_wait_s, 0);
}

T_TEST(the_link_is_the_bound)
{
    uint64_t c = copy_ns(DIRECT_BYTES), compute = c / 3;
    side_feeder_stats s = steady(compute, N, false);

    NEAR(s.copy_s, N * c);
    NEAR(s.compute_s, (N - 1) * compute);
    NEAR(s.stall_s, c + (N - 1) * (c - compute));
    NEAR(s.lost_link_s, s.stall_s * 1e9);
}

/* The host copies and computes in turn. More batches than records: those are summed up as they are used again. */
T_TEST(the_host_reads)
{
    uint64_t c = copy_ns(DIRECT_BYTES);
    side_feeder_stats s = steady(3 * c, 60, true);

    NEAR(s.copy_s, timed_of(60) * c);
    NEAR(s.stall_s, timed_of(60) * c);
    NEAR(s.lost_link_s, timed_of(60) * c);
    NEAR(s.compute_s, (timed_of(60) - 1) * 3 * c);
}

/* Records are used again while the reader is far behind: what is not done by then is left out, and nothing is counted twice. */
T_TEST(a_reader_far_behind)
{
    uint64_t c = copy_ns(DIRECT_BYTES);
    side_feeder_stats s = steady(2 * c, 60, false);

    NEAR(s.copy_s, timed_of(60) * c);
    NEAR(s.compute_s, (timed_of(60) - 1) * 2 * c);
    NEAR(s.stall_s, c);
}

struct late {
    struct feed_rig *r;
    side_slot *slot; /* read on `stream`, and the last to be released; NULL: submits batch `number` */
    side_stream *stream;
    size_t number;
    uint64_t at_ns;
};

/* On a thread of its own, at its virtual time. */
static void *come_late(void *arg)
{
    struct late *l = arg;

    l->r->dev->ops->clock_join(l->r->dev->context, l->at_ns);
    if (l->slot == NULL) {
        T_OK(feed_submit(l->r, l->number));
        return NULL;
    }
    T_OK(side_slots_release(side_feeder_slots(l->r->f), l->slot, l->stream));
    T_OK(side_slots_give_back(side_feeder_slots(l->r->f), l->slot));
    return NULL;
}

/* The item is read on a stream of its own, until at_ns. */
static struct late read_until(struct feed_rig *r, const side_feed_item *item, side_slot *slot, uint64_t at_ns)
{
    struct late l = {.r = r, .slot = slot, .at_ns = at_ns};

    T_OK(side_stream_create(r->dev, &l.stream));
    T_OK(side_slots_take(side_feeder_slots(r->f), item->slot.key, l.stream, slot));
    T_OK(side_slots_release(side_feeder_slots(r->f), &item->slot, r->reader));
    return l;
}

static void start_late(struct late *l, pthread_t *thread)
{
    assert_int_equal(pthread_create(thread, NULL, come_late, l), 0);
}

T_TEST(waiting_for_the_source)
{
    uint64_t c = copy_ns(DIRECT_BYTES);
    side_device *dev = feed_device("", 1);
    struct feed_rig r;
    side_feed_item item;
    pthread_t thread;

    rig_timed(&r, dev, DIRECT_BYTES, 2, 2, true);
    struct late l = {.r = &r, .at_ns = 2 * MS};
    start_late(&l, &thread);
    T_OK(side_feeder_next(r.f, r.reader, &item));
    pthread_join(thread, NULL);
    side_feeder_stats s = stats_of(&r);
    NEAR(s.stall_s, 2 * MS + c);
    NEAR(s.lost_source_s, 2 * MS);
    NEAR(s.lost_link_s, c);
    /* The next one comes after 3 ms more, of which the reader computes for 1. */
    uint64_t ready = 2 * MS + c, now = side_device_now_ns(dev);
    assert_int_equal(now, ready); /* synced */
    spin(r.reader, MS);
    l = (struct late){.r = &r, .number = 1, .at_ns = ready + 3 * MS};
    feed_give_back(&r, &item, r.reader);
    start_late(&l, &thread);
    T_OK(side_feeder_next(r.f, r.reader, &item));
    pthread_join(thread, NULL);
    s = stats_of(&r);
    NEAR(s.compute_s, MS);
    NEAR(s.stall_s, 2 * MS + c + 2 * MS + c);
    NEAR(s.lost_source_s,
         2 * MS + 2 * MS + c); /* blocked for longer than the reader stalled: all of it is the source's */
    NEAR(s.lost_link_s, c);
    feed_give_back(&r, &item, r.reader);
    feed_finish(&r);
    feed_close(dev);
}

T_TEST(waiting_for_a_slot)
{
    uint64_t c = copy_ns(DIRECT_BYTES);
    side_device *dev = feed_device("", 1);
    struct feed_rig r;
    side_feed_item held, item;
    pthread_t thread;
    side_slot slot;

    rig_timed(&r, dev, DIRECT_BYTES, 1, 4, true);
    T_OK(feed_submit(&r, 0));
    T_OK(side_feeder_next(r.f, r.reader, &held));
    T_OK(side_stream_sync(r.reader, 0)); /* at c */
    T_OK(feed_submit(&r, 1));            /* a thread waits with it */
    struct late l = read_until(&r, &held, &slot, 2 * MS);
    start_late(&l, &thread);
    T_OK(side_feeder_next(r.f, r.reader, &item));
    pthread_join(thread, NULL);
    side_feeder_stats s = stats_of(&r);
    NEAR(s.stall_s, c + 2 * MS - c + c);
    NEAR(s.lost_slot_s, 2 * MS - c);
    NEAR(s.lost_link_s, 2 * c);
    NEAR(s.lost_source_s, 0);
    feed_give_back(&r, &item, r.reader);
    T_OK(side_feeder_destroy(r.f));
    r.f = NULL;
    side_stream_destroy(l.stream);
    feed_finish(&r);
    feed_close(dev);
}

/* Two staging slots: chunk i is filled when the copy of chunk i - 2 is done. */
T_TEST(waiting_for_staging)
{
    enum { CHUNK = 100000, CHUNKS = 6 };
    uint64_t c = copy_ns(CHUNK);
    side_device *dev = feed_device("", 1);
    struct feed_rig r;
    side_feed_item item;
    t_rng rng = t_rng_make(1);

    feed_init(&r, dev, CHUNKS * CHUNK, 2);
    r.o.timing = true;
    r.o.threads = 1;
    r.o.chunk_bytes = CHUNK;
    feed_start(&r);
    feed_piece(&r, feed_batch_new(&r), 0, CHUNKS * CHUNK, false, &rng);
    T_OK(feed_submit(&r, 0));
    T_OK(side_feeder_next(r.f, r.reader, &item));
    side_feeder_stats s = stats_of(&r);
    assert_int_equal(s.staging_slots, 2);
    assert_int_equal(s.copies, CHUNKS);
    NEAR(s.copy_s, CHUNKS * c);
    NEAR(s.stall_s, CHUNKS * c);
    NEAR(s.lost_stage_s, (CHUNKS - 2) * c);
    NEAR(s.lost_link_s, 2 * c);
    assert_true(s.stage_busy_s > 0);
    feed_give_back(&r, &item, r.reader);
    feed_finish(&r);
    feed_close(dev);
}

/* The queue is full until a slot comes back. */
T_TEST(submit_waits)
{
    side_device *dev = feed_device("", 1);
    struct feed_rig r;
    side_feed_item held;
    pthread_t thread;
    side_slot slot;

    t_rng rng = t_rng_make(1);
    feed_init(&r, dev, DIRECT_BYTES, 1);
    r.o.queue = 1;
    feed_start(&r);
    for (size_t i = 0; i < 3; i++)
        feed_piece(&r, feed_batch_new(&r), 0, DIRECT_BYTES, true, &rng);
    T_OK(feed_submit(&r, 0));
    T_OK(side_feeder_next(r.f, r.reader, &held));
    T_OK(feed_submit(&r, 1));
    struct late l = read_until(&r, &held, &slot, 5 * MS);
    start_late(&l, &thread);
    T_OK(feed_submit(&r, 2));
    pthread_join(thread, NULL);
    side_feeder_stats s = stats_of(&r);
    NEAR(s.submit_wait_s, 5 * MS);
    assert_int_equal(s.timed, 0); /* not asked for */
    NEAR(s.stall_s + s.copy_s + s.compute_s, 0);
    T_OK(side_feeder_destroy(r.f));
    r.f = NULL;
    side_stream_destroy(l.stream);
    feed_finish(&r);
    feed_close(dev);
}

T_MAIN(T_LONG(unmutated_is_right, 60), T_LONG(device_acquire_dropped, 60), T_LONG(device_take_dropped, 60),
       T_LONG(host_acquire_dropped, 60), T_LONG(discard_wait_dropped, 60), T(copies_hide_behind_compute),
       T(the_link_is_the_bound), T(the_host_reads), T(a_reader_far_behind), T(waiting_for_the_source),
       T(waiting_for_a_slot), T(waiting_for_staging), T(submit_waits))
