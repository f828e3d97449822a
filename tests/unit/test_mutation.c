/* SPDX-License-Identifier: MIT
 *
 * Proof that the tests would notice. Each wait of a pipeline is left out: the output is wrong for some order of effects, within 200 seeds. Each wait on the
 * device is widened to the tail of the stream that it waits for: the output stays right and the time does not. Where the pipeline's own order of
 * issue hides a widened wait (with copies queued before compute a tail wait covers no more), the order that shows it is written by hand.
 *
 * Waits that cover nothing, so that leaving them out changes nothing:
 *   SITE_HOST_IN take     H2D after fill: the host fills and then queues the copy, in this order. Host work is done when it is recorded.
 *   SITE_HOST_OUT acquire D2H after the sink: the host queues the copy after the sink has returned. Likewise.
 * Both are the host half of the fence alone (R7), which no device wait stands for. */
#include "pipe_help.h"

#include "fence.h"
#include "slots.h"

#include <math.h>

enum { SEEDS = 200 };

/* ---------------------------------------------------------------- dropped: wrong output */

/* n > 2N, window > N, items distinct. True: the output was right. */
static bool run_is_right(enum rig_source source, enum rig_sink sink, uint32_t streams, uint64_t seed, int drop)
{
    side_device *dev = rig_device("", seed);
    t_rng rng = t_rng_make(seed);
    side_pipeline *p;
    struct rig r;

    rig_init(&r);
    r.source = source;
    r.sink = sink;
    r.uniform = true;
    r.n = 24;
    r.item_max = r.result_max = 256;
    r.cost_ns = 20000;
    r.o.depth = 3;
    r.o.window = 8;
    r.o.streams = streams;
    r.o.threads = 1;
    rig_build(&r, dev, &rng);
    T_OK(side_pipeline_create(dev, &r.o, &p));
    rig_reset(&r);
    fence_mutate(drop != SITE_NONE ? MUTATE_DROP : MUTATE_NONE, drop);
    T_OK(side_pipeline_run(p, NULL));
    fence_mutate(MUTATE_NONE, SITE_NONE);
    bool right = rig_first_wrong(&r, r.n) == RIG_NEVER;
    T_OK(side_pipeline_destroy(p));
    rig_finish(&r);
    rig_close(dev);
    return right;
}

/* How many seeds it takes; 0: not seen. */
static uint64_t seeds_to_see(enum rig_source source, enum rig_sink sink, uint32_t streams, int drop)
{
    for (uint64_t seed = 1; seed <= SEEDS; seed++)
        if (!run_is_right(source, sink, streams, seed, drop))
            return seed;
    return 0;
}

#define SEEN(source, sink, streams, site)                                                                             \
    do {                                                                                                              \
        uint64_t seen_ = seeds_to_see(source, sink, streams, site);                                                   \
        printf("%s dropped, source %d, sink %d, %d streams: seen at seed %llu\n", #site, source, sink, streams,       \
               (unsigned long long)seen_);                                                                            \
        if (seen_ == 0)                                                                                               \
            T_FAIL("%s dropped (source %d, sink %d, %d streams): not seen in %d seeds", #site, source, sink, streams, \
                   SEEDS);                                                                                            \
    } while (0)

T_TEST(unmutated_is_right)
{
    rig_small_pool();
    T_FOR_SEEDS (seed, 40) {
        for (int source = 0; source < FROM_COUNT; source++)
            assert_true(run_is_right((enum rig_source)source, (enum rig_sink)(seed % TO_COUNT),
                                     1 + (uint32_t)(seed % 4), seed, SITE_NONE));
    }
}

T_TEST(host_in_acquire_dropped)
{
    if (T_TSAN)
        T_SKIP("a host wait left out is a data race, which this build ends at");
    rig_small_pool();
    SEEN(FROM_CALLBACK, TO_PINNED, 1, SITE_HOST_IN);
    SEEN(FROM_PAGEABLE, TO_NONE, 1, SITE_HOST_IN);
    SEEN(FROM_FILE, TO_PAGEABLE, 2, SITE_HOST_IN);
}

T_TEST(device_in_acquire_dropped)
{
    rig_small_pool();
    SEEN(FROM_PINNED, TO_PINNED, 1, SITE_DEVICE_IN);
    SEEN(FROM_PINNED, TO_NONE, 3, SITE_DEVICE_IN);
    if (!T_TSAN)
        SEEN(FROM_PAGEABLE, TO_PAGEABLE, 1, SITE_DEVICE_IN);
}

T_TEST(device_in_take_dropped)
{
    rig_small_pool();
    SEEN(FROM_PINNED, TO_PINNED, 1, SITE_DEVICE_IN + 1);
    SEEN(FROM_PINNED, TO_NONE, 3, SITE_DEVICE_IN + 1);
    if (!T_TSAN)
        SEEN(FROM_FILE, TO_CALLBACK, 1, SITE_DEVICE_IN + 1);
}

T_TEST(device_out_acquire_dropped)
{
    rig_small_pool();
    SEEN(FROM_PINNED, TO_PINNED, 1, SITE_DEVICE_OUT);
    SEEN(FROM_PINNED, TO_PINNED, 3, SITE_DEVICE_OUT);
    SEEN(FROM_PINNED, TO_PINNED, 4, SITE_DEVICE_OUT);
}

T_TEST(device_out_take_dropped)
{
    rig_small_pool();
    SEEN(FROM_PINNED, TO_PINNED, 1, SITE_DEVICE_OUT + 1);
    SEEN(FROM_PINNED, TO_PINNED, 3, SITE_DEVICE_OUT + 1);
    if (!T_TSAN)
        SEEN(FROM_PAGEABLE, TO_FILE, 1, SITE_DEVICE_OUT + 1);
}

T_TEST(host_out_take_dropped)
{
    if (T_TSAN)
        T_SKIP("a host wait left out is a data race, which this build ends at");
    rig_small_pool();
    SEEN(FROM_PINNED, TO_PAGEABLE, 1, SITE_HOST_OUT + 1);
    SEEN(FROM_PINNED, TO_CALLBACK, 1, SITE_HOST_OUT + 1);
    SEEN(FROM_CALLBACK, TO_FILE, 2, SITE_HOST_OUT + 1);
}

/* The two that cover nothing. */
T_TEST(host_halves_need_no_device_wait)
{
    rig_small_pool();
    T_FOR_SEEDS (seed, SEEDS) {
        static const enum rig_source staged[] = {FROM_PAGEABLE, FROM_CALLBACK, FROM_FILE};
        static const enum rig_sink sunk[] = {TO_PAGEABLE, TO_CALLBACK, TO_FILE};
        assert_true(run_is_right(staged[seed % 3], TO_PINNED, 1, seed, SITE_HOST_IN + 1));
        assert_true(run_is_right(FROM_PINNED, sunk[seed % 3], 1, seed, SITE_HOST_OUT));
    }
}

/* ---------------------------------------------------------------- the window bounds what is queued, not what is computed */

struct ahead {
    struct rig rig;
    side_event *done[64];
    uint32_t window;
    uint64_t over; /* items that were queued with more than `window` unfinished */
};

static int compute_ahead(void *user, side_stream *stream, side_item *item)
{
    struct ahead *a = user;

    if (item->number >= a->window && side_event_query(a->done[item->number - a->window]) != SIDE_OK)
        a->over++;
    if (rig_work(&a->rig, stream, item) != SIDE_OK)
        return 1;
    return side_event_record(a->done[item->number], stream) != SIDE_OK;
}

static uint64_t items_over_window(uint32_t depth, uint32_t window, bool drop)
{
    side_device *dev = rig_device("", 1);
    t_rng rng = t_rng_make(1);
    struct ahead a = {.window = window};
    side_pipeline *p;

    rig_init(&a.rig);
    a.rig.uniform = true;
    a.rig.sink = TO_PINNED;
    a.rig.n = 40;
    a.rig.item_max = a.rig.result_max = 1024;
    a.rig.cost_ns = 50000;
    a.rig.o.depth = depth;
    a.rig.o.window = window;
    rig_build(&a.rig, dev, &rng);
    a.rig.o.compute = compute_ahead;
    a.rig.o.compute_user = &a;
    for (int i = 0; i < 64; i++)
        T_OK(side_event_create(dev, false, &a.done[i]));
    T_OK(side_pipeline_create(dev, &a.rig.o, &p));
    fence_mutate(drop ? MUTATE_DROP : MUTATE_NONE, drop ? SITE_WINDOW : SITE_NONE);
    T_OK(side_pipeline_run(p, NULL));
    fence_mutate(MUTATE_NONE, SITE_NONE);
    RIG_IS_RIGHT(&a.rig, a.rig.n);
    T_OK(side_pipeline_destroy(p));
    for (int i = 0; i < 64; i++)
        side_event_destroy(a.done[i]);
    rig_finish(&a.rig);
    rig_close(dev);
    return a.over;
}

T_TEST(window_dropped)
{
    static const uint32_t depths[] = {1, 2, 3, 8}, windows[] = {1, 2, 5, 12};

    for (int d = 0; d < 4; d++)
        for (int w = 0; w < 4; w++) {
            assert_int_equal(items_over_window(depths[d], windows[w], false), 0);
            assert_true(items_over_window(depths[d], windows[w], true) > 0);
        }
}

/* ---------------------------------------------------------------- widened: too slow */

/* Three lanes by hand over two rings of N slots; steps in the order that the host takes them. */
enum { N = 2, ITEMS = 12, BYTES = 64 << 10 };

struct lanes {
    side_device *dev;
    side_stream *h2d, *compute, *d2h;
    side_slots *in, *out;
    unsigned char *host; /* pinned */
    uint64_t copied, computed, sent, cost_ns;
};

static side_slots *make_ring(side_device *dev, int site)
{
    side_slots_options o = SIDE_SLOTS_OPTIONS_INIT;
    side_slots *s;

    o.count = N;
    o.slot_bytes = BYTES;
    T_OK(side_slots_create(dev, &o, &s));
    slots_configure(s, site, NULL);
    return s;
}

static void step_copy(struct lanes *l)
{
    side_slot s;

    T_OK(side_slots_acquire(l->in, 0, l->h2d, &s));
    T_OK(side_copy_async(l->h2d, SIDE_COPY_H2D, s.data, l->host + l->copied++ * BYTES, BYTES));
    T_OK(side_slots_publish(l->in, &s, l->h2d, NULL));
}

static void step_compute(struct lanes *l)
{
    side_slot in, out;

    T_OK(side_slots_take(l->in, l->computed++, l->compute, &in));
    T_OK(side_slots_acquire(l->out, 0, l->compute, &out));
    T_OK(rig_op(l->compute, in.data, out.data, BYTES / 4, l->cost_ns));
    T_OK(side_slots_release(l->in, &in, l->compute));
    T_OK(side_slots_publish(l->out, &out, l->compute, NULL));
}

static void step_send(struct lanes *l)
{
    side_slot s;

    T_OK(side_slots_take(l->out, l->sent, l->d2h, &s));
    T_OK(side_copy_async(l->d2h, SIDE_COPY_D2H, l->host + (ITEMS + l->sent++) * BYTES, s.data, BYTES));
    T_OK(side_slots_release(l->out, &s, l->d2h));
}

/* `order` is repeated: c copy, k compute, d D2H; steps past the last item are left out. Returns the makespan in ns. */
static uint64_t run_order(const char *first, const char *order, uint64_t cost_ns, enum fence_mutation m, int site)
{
    struct lanes l = {.dev = rig_device("copy_engines=2", 3), .cost_ns = cost_ns};
    void *host;

    T_OK(l.dev->ops->host_alloc(l.dev->context, 2 * ITEMS * BYTES, &host));
    l.host = host;
    for (size_t i = 0; i < ITEMS * BYTES / 4; i++)
        ((float *)host)[i] = (float)(i % 10007);
    T_OK(side_stream_create(l.dev, &l.h2d));
    T_OK(side_stream_create(l.dev, &l.compute));
    T_OK(side_stream_create(l.dev, &l.d2h));
    l.in = make_ring(l.dev, SITE_DEVICE_IN);
    l.out = make_ring(l.dev, SITE_DEVICE_OUT);
    fence_mutate(m, site);
    for (const char *at = first; l.sent < ITEMS; at = at[1] != '\0' ? at + 1 : order) {
        if (*at == 'c' && l.copied < ITEMS)
            step_copy(&l);
        else if (*at == 'k' && l.computed < ITEMS)
            step_compute(&l);
        else if (*at == 'd')
            step_send(&l);
    }
    fence_mutate(MUTATE_NONE, SITE_NONE);
    T_OK(side_stream_sync(l.d2h, 0));
    uint64_t ns = side_device_now_ns(l.dev);
    for (size_t i = 0; i < ITEMS * BYTES / 4; i++)
        assert_true(((float *)host)[ITEMS * BYTES / 4 + i] == rig_affine(((float *)host)[i]));
    T_OK(side_slots_destroy(l.in));
    T_OK(side_slots_destroy(l.out));
    side_stream_destroy(l.h2d);
    side_stream_destroy(l.compute);
    side_stream_destroy(l.d2h);
    l.dev->ops->host_free(l.dev->context, host);
    rig_close(l.dev);
    return ns;
}

static uint64_t copy_ns(void)
{
    side_device *dev = rig_device("", 1);
    side_stream *s;
    void *host, *d;

    T_OK(dev->ops->host_alloc(dev->context, BYTES, &host));
    T_OK(side_stream_create(dev, &s));
    T_OK(side_device_alloc(dev, BYTES, &d));
    uint64_t t = side_device_now_ns(dev);
    T_OK(side_copy_async(s, SIDE_COPY_H2D, d, host, BYTES));
    T_OK(side_stream_sync(s, 0));
    t = side_device_now_ns(dev) - t;
    side_device_free(dev, d);
    side_stream_destroy(s);
    dev->ops->host_free(dev->context, host);
    rig_close(dev);
    return t;
}

static uint64_t formula(uint64_t cost_ns)
{
    double t = (double)copy_ns() * 1e-9;
    return (uint64_t)llround(side_timeline_bound(ITEMS, t, (double)cost_ns * 1e-9, t, 2) * 1e9);
}

/* Under this order every other wait may be widened too: does this site's show, and is the unmutated time exact? */
static void widened(const char *first, const char *order, int site, bool shows)
{
    uint64_t cost = copy_ns(); /* all lanes as long: any bubble shows */
    uint64_t exact = run_order(first, order, cost, MUTATE_NONE, SITE_NONE);
    uint64_t wide = run_order(first, order, cost, MUTATE_WIDEN, site);

    printf("%s%s..., site %d: %llu ns, widened %llu\n", first, order, site, (unsigned long long)exact,
           (unsigned long long)wide);
    assert_int_equal(exact, formula(cost));
    if (shows)
        assert_true(wide > exact);
    else
        assert_int_equal(wide, exact);
}

/* R3: what a wait covers depends on what is queued before it, not on which call it is. */

T_TEST(device_in_acquire_widened)
{
    widened("cckkdd", "cckkdd", SITE_DEVICE_IN, true); /* acquire of 2 after compute 1 is queued: the tail covers it */
    widened("cckd", "ckd", SITE_DEVICE_IN, false);     /* copy queued before the next compute: the tail is exact */
}

T_TEST(device_in_take_widened)
{
    widened("cckd", "ckd", SITE_DEVICE_IN + 1, true); /* copies go ahead: the tail of H2D covers the next item */
    widened("c", "kdc", SITE_DEVICE_IN + 1, false);   /* nothing ahead: exact */
}

T_TEST(device_out_acquire_widened)
{
    widened("cckd", "ckd", SITE_DEVICE_OUT, true); /* D2H of i-1 is queued when compute i asks for the slot of i-2 */
    widened("cck", "ckd", SITE_DEVICE_OUT, false); /* D2H one behind: the tail is that of i-2 */
}

T_TEST(device_out_take_widened)
{
    widened("cckck", "dck", SITE_DEVICE_OUT + 1, true); /* D2H i queued after compute i+1 */
    widened("cckd", "ckd", SITE_DEVICE_OUT + 1, false); /* right after its own: exact */
}

/* The pipeline's own order, with the sites that it shows. */
static uint64_t pipeline_ns(uint64_t cost_ns, enum fence_mutation m, int site)
{
    side_device *dev = rig_device("copy_engines=2", 5);
    t_rng rng = t_rng_make(5);
    side_pipeline_stats s;
    side_pipeline *p;
    struct rig r;

    rig_init(&r);
    r.uniform = true;
    r.sink = TO_PINNED;
    r.n = ITEMS;
    r.item_max = r.result_max = BYTES;
    r.cost_ns = cost_ns;
    r.o.depth = N;
    rig_build(&r, dev, &rng);
    T_OK(side_pipeline_create(dev, &r.o, &p));
    fence_mutate(m, site);
    T_OK(side_pipeline_run(p, &s));
    fence_mutate(MUTATE_NONE, SITE_NONE);
    RIG_IS_RIGHT(&r, r.n);
    T_OK(side_pipeline_destroy(p));
    rig_finish(&r);
    rig_close(dev);
    return (uint64_t)llround(s.time_s * 1e9);
}

T_TEST(pipeline_widened)
{
    uint64_t cost = copy_ns();

    assert_int_equal(pipeline_ns(cost, MUTATE_NONE, SITE_NONE), formula(cost));
    assert_true(pipeline_ns(cost, MUTATE_WIDEN, SITE_DEVICE_IN + 1) > formula(cost));
    assert_true(pipeline_ns(cost, MUTATE_WIDEN, SITE_DEVICE_OUT) > formula(cost));
    /* Copies are queued before compute, and a result's copy right after it: here the tail is exact. */
    assert_int_equal(pipeline_ns(cost, MUTATE_WIDEN, SITE_DEVICE_IN), formula(cost));
    assert_int_equal(pipeline_ns(cost, MUTATE_WIDEN, SITE_DEVICE_OUT + 1), formula(cost));
}

T_MAIN(T_LONG(unmutated_is_right, 60), T(host_in_acquire_dropped), T(device_in_acquire_dropped),
       T(device_in_take_dropped), T(device_out_acquire_dropped), T(device_out_take_dropped), T(host_out_take_dropped),
       T_LONG(host_halves_need_no_device_wait, 60), T(window_dropped), T(device_in_acquire_widened),
       T(device_in_take_widened), T(device_out_acquire_widened), T(device_out_take_widened), T(pipeline_widened))
