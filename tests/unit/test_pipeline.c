/* SPDX-License-Identifier: MIT
 *
 * Pipelines on the software device: whatever the sizes, costs, depths and orders, the output is that of a plain loop, memory stays within what the
 * stats say, and uniform items take exactly the time that the formula gives. */
#include "pipe_help.h"

#include <math.h>

/* ---------------------------------------------------------------- drawing a pipeline */

static void draw(struct rig *r, t_rng *rng)
{
    bool large = t_rng_chance(rng, 40); /* pinned blocks from 256 KiB on travel without staging */

    rig_init(r);
    r->source = (enum rig_source)t_rng_below(rng, FROM_COUNT);
    r->sink = (enum rig_sink)t_rng_below(rng, TO_COUNT);
    r->n = large ? 5 : t_rng_below(rng, 25);
    r->item_max = large ? (size_t)(300 << 10) + t_rng_below(rng, 300 << 10) : 1 + t_rng_below(rng, 3000);
    r->result_max = t_rng_chance(rng, 2) ? 1 + t_rng_below(rng, 6000) : r->item_max;
    r->o.depth = 1 + (uint32_t)t_rng_below(rng, 8);
    r->o.window = (uint32_t)t_rng_below(rng, 2 * r->o.depth + 4);
    r->o.streams = 1 + (uint32_t)t_rng_below(rng, 4);
    r->o.threads = 1 + (uint32_t)t_rng_below(rng, 3);
    if (t_rng_chance(rng, 2))
        r->o.chunk_bytes = large ? 65536 + t_rng_below(rng, 400000) : 1 + t_rng_below(rng, r->item_max);
    if (t_rng_chance(rng, 3)) /* 2 slots each side fit */
        r->o.pinned_bytes = 4 * (r->item_max + r->result_max + 4096) + t_rng_below(rng, 20000);
}

static void draw_device(t_rng *rng, uint64_t seed, side_device **dev)
{
    *dev = rig_device(t_rng_chance(rng, 2) ? "copy_engines=1" : "copy_engines=2", seed);
}

/* ---------------------------------------------------------------- bounds */

static size_t device_used(const struct rig *r)
{
    size_t available, total;

    T_OK(side_device_get_memory(r->dev, &available, &total));
    return total - available;
}

static void pool_stats(const struct rig *r, side_pool_stats *s)
{
    side_pool *pool;

    T_OK(side_device_pool(r->dev, &pool));
    T_OK(side_pool_get_stats(pool, s));
}

static void check_bounds(const struct rig *r, const side_pipeline_stats *s, size_t used_before)
{
    side_pool_stats pool;

    assert_true(r->o.depth != 0 ? s->depth == r->o.depth : s->depth >= 2 && s->depth <= 8);
    assert_int_equal(s->streams, r->o.streams != 0 ? r->o.streams : 1);
    if (r->o.window != 0)
        assert_int_equal(s->window, r->o.window);
    assert_int_equal(r->device_used - used_before, s->device_bytes);
    assert_true(s->device_bytes >= s->depth * (r->o.item_bytes + r->o.result_bytes));
    pool_stats(r, &pool);
    assert_true(pool.asked_bytes == s->pinned_bytes);
    assert_true(pool.peak_pinned_bytes <= pool.budget_bytes);
    if (r->o.pinned_bytes != 0)
        assert_true(s->pinned_bytes <= r->o.pinned_bytes);
    if (s->staging_slots == 0)
        assert_int_equal(s->pinned_bytes, 0);
    if (r->o.chunk_bytes != 0 && r->source != FROM_CALLBACK)
        assert_true(s->chunk_bytes <= r->o.chunk_bytes);
}

static void create(struct rig *r, side_pipeline **p)
{
    size_t before = device_used(r);
    side_pipeline_stats s;

    T_OK(side_pipeline_create(r->dev, &r->o, p));
    r->device_used = device_used(r);
    r->watch_memory = true;
    T_OK(side_pipeline_get_stats(*p, &s));
    check_bounds(r, &s, before);
}

static void check_stats(const struct rig *r, const side_pipeline_stats *s)
{
    uint64_t in = 0, out = 0;

    for (uint64_t i = 0; i < r->n; i++) {
        in += r->in_bytes[i];
        out += r->out_bytes[i];
    }
    assert_int_equal(s->items, r->n);
    assert_int_equal(s->bytes_in, in);
    assert_int_equal(s->bytes_out, out);
    assert_false(s->disabled);
}

/* ---------------------------------------------------------------- push */

struct progress {
    uint64_t items, bytes_in, bytes_out;
    bool fell;
};

static void note_progress(void *user, uint64_t items, uint64_t bytes_in, uint64_t bytes_out)
{
    struct progress *n = user;

    n->fell = n->fell || items != n->items + 1 || bytes_in < n->bytes_in || bytes_out < n->bytes_out;
    n->items = items;
    n->bytes_in = bytes_in;
    n->bytes_out = bytes_out;
}

static void push_any(t_rng *rng, uint64_t seed)
{
    side_stream *own[4] = {NULL};
    struct progress seen;
    side_pipeline_stats s;
    side_device *dev;
    side_pipeline *p;
    struct rig r;
    unsigned passes = t_rng_chance(rng, 4) ? 3 : 1;

    draw(&r, rng);
    draw_device(rng, seed, &dev);
    rig_build(&r, dev, rng);
    r.o.progress = note_progress;
    r.o.progress_user = &seen;
    if (t_rng_chance(rng, 3)) {
        for (uint32_t i = 0; i < r.o.streams; i++)
            T_OK(side_stream_create(dev, &own[i]));
        r.o.compute_streams = own;
    }
    create(&r, &p);
    while (passes-- > 0) {
        rig_reset(&r);
        memset(&seen, 0, sizeof(seen));
        T_OK(side_pipeline_run(p, &s));
        check_stats(&r, &s);
        assert_false(seen.fell);
        assert_int_equal(seen.items, r.n);
        assert_int_equal(seen.bytes_out, s.bytes_out);
        RIG_IS_RIGHT(&r, r.n);
        assert_int_equal(device_used(&r), r.device_used);
    }
    T_OK(side_pipeline_destroy(p));
    for (int i = 0; i < 4; i++)
        side_stream_destroy(own[i]);
    rig_finish(&r);
    rig_close(dev);
}

T_TEST(push_is_a_plain_loop)
{
    rig_small_pool();
    T_FOR_SEEDS (seed, 1200) {
        t_rng rng = t_rng_make(seed);
        push_any(&rng, seed);
    }
}

/* With recycled slots poisoned: nothing is read that was not written for this item. */
T_TEST(push_with_poisoned_slots)
{
    rig_small_pool();
    setenv("SIDESTREAM_VALIDATE", "1", 1);
    T_FOR_SEEDS (seed, 200) {
        t_rng rng = t_rng_make(seed + 3000000);
        push_any(&rng, seed);
    }
}

/* A callback may give an item of no bytes: it is an item all the same. */
static int fill_odd(void *user, uint64_t item, void *data, size_t capacity, size_t *bytes)
{
    (void)user;
    *bytes = item == 9 ? SIDE_NO_MORE : item % 2 == 1 ? 0 : capacity;
    memset(data, (int)item, *bytes == capacity ? capacity : 0);
    return 0;
}

static int compute_odd(void *user, side_stream *stream, side_item *item)
{
    uint64_t *seen = user;

    seen[item->number] = item->bytes;
    item->result_bytes = item->bytes;
    return side_copy_async(stream, SIDE_COPY_D2D, item->result, item->data, item->bytes) != SIDE_OK;
}

static int sink_odd(void *user, uint64_t item, const void *data, size_t bytes)
{
    uint64_t *sunk = user;

    sunk[item] += bytes;
    for (size_t i = 0; i < bytes; i++)
        if (((const unsigned char *)data)[i] != item)
            return 1;
    return 0;
}

T_TEST(empty_items)
{
    rig_small_pool();
    T_FOR_SEEDS (seed, 50) {
        side_device *dev = rig_device("", seed);
        side_pipeline_options o = SIDE_PIPELINE_OPTIONS_INIT;
        uint64_t seen[9], sunk[9] = {0};
        side_pipeline_stats s;
        side_pipeline *p;

        memset(seen, 0xff, sizeof(seen));
        o.item_bytes = o.result_bytes = 300;
        o.depth = 1 + (uint32_t)(seed % 4);
        o.source = side_source_callback(fill_odd, NULL);
        o.compute = compute_odd;
        o.compute_user = seen;
        o.sink = side_sink_callback(sink_odd, sunk);
        T_OK(side_pipeline_create(dev, &o, &p));
        T_OK(side_pipeline_run(p, &s));
        assert_int_equal(s.items, 9);
        assert_int_equal(s.bytes_in, 5 * 300);
        for (uint64_t i = 0; i < 9; i++) {
            assert_int_equal(seen[i], i % 2 == 1 ? 0 : 300);
            assert_int_equal(sunk[i], i % 2 == 1 ? 0 : 300);
        }
        T_OK(side_pipeline_destroy(p));
        rig_close(dev);
    }
}

/* ---------------------------------------------------------------- pull */

struct held {
    side_item item;
    side_stream *stream;
};

/* Items in turn on several streams, held and given back in any order. Returns how many were done before `stop`, or the end. */
static uint64_t pull_pass(struct rig *r, side_pipeline *p, side_stream *const *streams, uint32_t count, uint64_t stop,
                          t_rng *rng)
{
    struct held held[64];
    uint32_t n = 0, depth = r->o.depth;
    uint64_t next = 0, oldest;
    side_status s = SIDE_OK;

    while (n > 0 || (s == SIDE_OK && next < stop)) {
        oldest = next;
        for (uint32_t i = 0; i < n; i++)
            oldest = held[i].item.number < oldest ? held[i].item.number : oldest;
        if (s == SIDE_OK && next < stop && (n == 0 || !t_rng_chance(rng, 3))) {
            held[n].stream = streams[t_rng_below(rng, count)];
            s = side_pipeline_next(p, held[n].stream, &held[n].item);
            if (next - oldest >= depth && s != SIDE_END) { /* its slot is still held */
                assert_int_equal(s, SIDE_WOULD_DEADLOCK);
                s = SIDE_OK;
            } else if (s == SIDE_OK) {
                assert_int_equal(held[n].item.number, next);
                assert_int_equal(held[n].item.bytes, r->in_bytes[next]);
                next++;
                n++;
                continue;
            } else {
                T_STATUS(s, SIDE_END);
                assert_int_equal(next, r->n);
            }
        }
        if (n == 0)
            continue;
        uint32_t k = (uint32_t)t_rng_below(rng, n);
        T_OK(rig_work(r, held[k].stream, &held[k].item));
        T_OK(side_pipeline_done(p, &held[k].item, held[k].stream));
        held[k] = held[--n];
    }
    return next;
}

static void pull_any(t_rng *rng, uint64_t seed)
{
    side_stream *streams[3];
    side_pipeline_stats s;
    side_device *dev;
    side_pipeline *p;
    side_item item;
    struct rig r;

    draw(&r, rng);
    draw_device(rng, seed, &dev);
    rig_build(&r, dev, rng);
    if (t_rng_chance(rng, 2))
        r.o.compute = NULL;
    create(&r, &p);
    for (int i = 0; i < 3; i++)
        T_OK(side_stream_create(dev, &streams[i]));
    for (uint64_t passes = 1 + t_rng_below(rng, 3); passes > 0; passes--) {
        uint64_t stop = t_rng_chance(rng, 2) ? RIG_NEVER : t_rng_below(rng, r.n + 1);
        rig_reset(&r);
        uint64_t done = pull_pass(&r, p, streams, 1 + (uint32_t)t_rng_below(rng, 3), stop, rng);
        if (stop ==
            RIG_NEVER) { /* the end: another next would begin a new pass, so only where items were held at the end */
            assert_int_equal(done, r.n);
        }
        T_OK(side_pipeline_rewind(p));
        T_OK(side_pipeline_get_stats(p, &s));
        if (done == r.n && stop == RIG_NEVER)
            check_stats(&r, &s);
        RIG_IS_RIGHT(&r, done);
    }
    if (r.n > 0 && t_rng_chance(rng, 2)) /* left in the middle */
        T_OK(side_pipeline_next(p, streams[0], &item));
    T_OK(side_pipeline_destroy(p));
    for (int i = 0; i < 3; i++)
        side_stream_destroy(streams[i]);
    rig_finish(&r);
    rig_close(dev);
}

T_TEST(pull_is_a_plain_loop)
{
    rig_small_pool();
    T_FOR_SEEDS (seed, 800) {
        t_rng rng = t_rng_make(seed + 1000000);
        pull_any(&rng, seed);
    }
}

/* Every source: the calls that are refused change nothing, and the loop goes on. */
T_TEST(pull_refuses_and_goes_on)
{
    rig_small_pool();
    for (int source = 0; source < FROM_COUNT; source++) {
        side_device *dev = rig_device("", 7), *other = rig_device("", 8);
        side_item a, b, c, twice;
        side_pipeline_stats stats;
        side_stream *s, *foreign;
        t_rng rng = t_rng_make(7);
        side_pipeline *p;
        struct rig r;

        rig_init(&r);
        r.source = (enum rig_source)source;
        r.sink = TO_PINNED;
        r.uniform = true;
        r.n = 5;
        r.item_max = r.result_max = 1000;
        r.o.depth = 2;
        rig_build(&r, dev, &rng);
        r.o.compute = NULL;
        T_OK(side_pipeline_create(dev, &r.o, &p));
        T_OK(side_stream_create(dev, &s));
        T_OK(side_stream_create(other, &foreign));
        T_STATUS(side_pipeline_run(p, NULL), SIDE_STATE); /* no compute callback */
        T_STATUS(side_pipeline_next(p, NULL, &a), SIDE_INVALID);
        T_STATUS(side_pipeline_next(p, s, NULL), SIDE_INVALID);
        T_STATUS(side_pipeline_next(p, foreign, &a), SIDE_INVALID);
        T_STATUS(side_pipeline_next(NULL, s, &a), SIDE_INVALID);
        T_OK(side_pipeline_next(p, s, &a));
        T_OK(side_pipeline_next(p, s, &b));
        T_STATUS(side_pipeline_next(p, s, &c), SIDE_WOULD_DEADLOCK);
        T_STATUS(side_pipeline_rewind(p), SIDE_STATE);
        T_OK(rig_work(&r, s, &b));
        T_OK(side_pipeline_done(p, &b, s));
        T_STATUS(side_pipeline_next(p, s, &c), SIDE_WOULD_DEADLOCK); /* item 2 needs the slot of item 0 */
        T_OK(rig_work(&r, s, &a));
        a.result_bytes = 1001;
        T_STATUS(side_pipeline_done(p, &a, s), SIDE_TOO_LARGE);
        a.result_bytes = 1000;
        twice = a;
        T_OK(side_pipeline_done(p, &a, s));
        T_STATUS(side_pipeline_done(p, &a, s), SIDE_STATE);
        T_STATUS(side_pipeline_done(p, &twice, s), SIDE_STATE);
        for (uint64_t i = 2; i < 5; i++) {
            T_OK(side_pipeline_next(p, s, &c));
            assert_int_equal(c.number, i);
            T_OK(rig_work(&r, s, &c));
            T_OK(side_pipeline_done(p, &c, s));
        }
        T_STATUS(side_pipeline_next(p, s, &c), SIDE_END);
        RIG_IS_RIGHT(&r, 5);
        T_OK(side_pipeline_get_stats(p, &stats));
        check_stats(&r, &stats);
        T_OK(side_pipeline_next(p, s, &c)); /* a new pass */
        assert_int_equal(c.number, 0);
        T_OK(rig_work(&r, s, &c));
        T_OK(side_pipeline_done(p, &c, s));
        T_OK(side_pipeline_rewind(p));
        T_OK(side_pipeline_rewind(p));
        T_OK(side_pipeline_destroy(p));
        side_stream_destroy(s);
        side_stream_destroy(foreign);
        rig_finish(&r);
        rig_close(dev);
        rig_close(other);
    }
}

/* A loop that is left with items held, after every number of items, from every source: destroy drains. */
T_TEST(pull_left_in_the_middle)
{
    rig_small_pool();
    for (int source = 0; source < FROM_COUNT; source++)
        for (uint64_t leave = 0; leave < 8; leave++) {
            side_device *dev = rig_device("", leave + 1);
            t_rng rng = t_rng_make(leave);
            side_pipeline *p;
            side_stream *s;
            side_item item[4];
            struct rig r;

            rig_init(&r);
            r.source = (enum rig_source)source;
            r.sink = (enum rig_sink)(leave % TO_COUNT);
            r.n = 20;
            r.item_max = r.result_max = 500;
            r.o.depth = 3;
            rig_build(&r, dev, &rng);
            T_OK(side_pipeline_create(dev, &r.o, &p));
            T_OK(side_stream_create(dev, &s));
            for (uint64_t i = 0; i < leave; i++) {
                if (i >= 2) { /* 2 stay held */
                    T_OK(rig_work(&r, s, &item[i % 2]));
                    T_OK(side_pipeline_done(p, &item[i % 2], s));
                }
                T_OK(side_pipeline_next(p, s, &item[i % 2]));
            }
            T_OK(side_pipeline_destroy(p));
            side_stream_destroy(s);
            rig_finish(&r);
            rig_close(dev);
        }
}

/* ---------------------------------------------------------------- time */

/* What one copy and the compute cost on this device, measured alone. */
static double copy_cost(side_device *dev, struct rig *r, side_copy_kind kind, size_t bytes)
{
    side_event *a, *b;
    side_stream *s;
    double seconds;
    void *d, *h = r->arena + r->arena_used; /* past all blocks */

    T_OK(side_stream_create(dev, &s));
    T_OK(side_event_create(dev, true, &a));
    T_OK(side_event_create(dev, true, &b));
    T_OK(side_device_alloc(dev, bytes, &d));
    T_OK(side_event_record(a, s));
    T_OK(side_copy_async(s, kind, kind == SIDE_COPY_H2D ? d : h, kind == SIDE_COPY_H2D ? h : d, bytes));
    T_OK(side_event_record(b, s));
    T_OK(side_event_wait(b, 0));
    T_OK(side_event_elapsed(a, b, &seconds));
    side_device_free(dev, d);
    side_event_destroy(a);
    side_event_destroy(b);
    side_stream_destroy(s);
    return seconds;
}

static void uniform_any(t_rng *rng, uint64_t seed)
{
    bool two = t_rng_chance(rng, 2);
    side_pipeline_stats s;
    side_device *dev;
    side_pipeline *p;
    struct rig r;

    rig_init(&r);
    r.uniform = true;
    r.source = FROM_PINNED;
    r.sink = t_rng_chance(rng, 2) ? TO_PINNED : TO_NONE;
    r.n = 1 + t_rng_below(rng, 40);
    r.item_max = 4 * (1 + t_rng_below(rng, 20000));
    r.result_max = 4 * (1 + t_rng_below(rng, r.item_max / 4)); /* whole floats: one op an item */
    r.cost_ns = 1 + t_rng_below(rng, 30000);
    r.o.depth = 2 + (uint32_t)t_rng_below(rng, 7);
    r.o.streams = 1 + (uint32_t)t_rng_below(rng, 4);
    dev = rig_device(two ? "copy_engines=2" : "copy_engines=1", seed);
    rig_build(&r, dev, rng);
    double t = copy_cost(dev, &r, SIDE_COPY_H2D, r.item_max), c = (double)r.cost_ns * 1e-9;
    double d = r.sink == TO_NONE ? 0 : copy_cost(dev, &r, SIDE_COPY_D2H, r.result_max);
    double bound = side_timeline_bound(r.n, t, c, d, two ? 2 : 1);
    T_OK(side_pipeline_create(dev, &r.o, &p));
    for (int pass = 0; pass < 2; pass++) {
        rig_reset(&r);
        T_OK(side_pipeline_run(p, &s));
        RIG_IS_RIGHT(&r, r.n);
        if (two || r.sink == TO_NONE) {
            if (llround(s.time_s * 1e9) != llround(bound * 1e9))
                T_FAIL("n %llu, t %.0f, c %.0f, d %.0f ns, depth %u: %.0f ns instead of %.0f", (unsigned long long)r.n,
                       t * 1e9, c * 1e9, d * 1e9, r.o.depth, s.time_s * 1e9, bound * 1e9);
        } else {
            assert_true(llround(s.time_s * 1e9) >= llround(bound * 1e9));
        }
    }
    T_OK(side_pipeline_destroy(p));
    rig_finish(&r);
    rig_close(dev);
}

T_TEST(uniform_items_take_exactly_the_formula)
{
    rig_small_pool();
    T_FOR_SEEDS (seed, 600) {
        t_rng rng = t_rng_make(seed + 2000000);
        uniform_any(&rng, seed);
    }
}

/* Depth 1 overlaps nothing but the end of one item with nothing: exactly the sum. The formula above is not what any pipeline would give. */
T_TEST(depth_one_does_not_overlap_copy_and_compute)
{
    side_pipeline_stats s;
    side_device *dev = rig_device("", 1);
    t_rng rng = t_rng_make(1);
    side_pipeline *p;
    struct rig r;

    rig_init(&r);
    r.uniform = true;
    r.n = 10;
    r.item_max = 40000;
    r.cost_ns = 9000;
    r.o.depth = 1;
    rig_build(&r, dev, &rng);
    double t = copy_cost(dev, &r, SIDE_COPY_H2D, r.item_max);
    T_OK(side_pipeline_create(dev, &r.o, &p));
    T_OK(side_pipeline_run(p, &s));
    assert_int_equal(llround(s.time_s * 1e9), llround(10 * (t * 1e9 + 9000)));
    T_OK(side_pipeline_destroy(p));
    rig_finish(&r);
    rig_close(dev);
}

T_MAIN(T(pull_refuses_and_goes_on), T(pull_left_in_the_middle), T_LONG(push_is_a_plain_loop, 60),
       T(push_with_poisoned_slots), T(empty_items), T_LONG(pull_is_a_plain_loop, 60),
       T_LONG(uniform_items_take_exactly_the_formula, 60), T(depth_one_does_not_overlap_copy_and_compute))
