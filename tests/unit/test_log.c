/* SPDX-License-Identifier: MIT
 *
 * The op log: what holds of its spans whatever was logged. */
#include "pipe_help.h"

#include "os.h"

#include <math.h>
#include <pthread.h>

enum { MOST = 4096 };

/* Sorted, none ends before it begins, none begins before it was queued, spans of one stream do not overlap. */
static void check_spans(const side_span *spans, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const side_span *s = &spans[i];
        assert_true(s->begin_ns <= s->end_ns);
        assert_true(s->queued_ns <= s->begin_ns);
        assert_true(i == 0 || spans[i - 1].begin_ns <= s->begin_ns);
        for (size_t k = i + 1; k < n; k++)
            if (spans[k].stream == s->stream)
                assert_true(spans[k].begin_ns >= s->end_ns);
    }
}

static size_t read_log(side_log *log, side_span *spans)
{
    size_t n = 0, again = MOST;

    T_OK(side_log_spans(log, NULL, &n));
    T_OK(side_log_spans(log, spans, &again));
    assert_int_equal(again, n);
    assert_true(n <= MOST);
    check_spans(spans, n);
    return n;
}

/* ---------------------------------------------------------------- of pipelines */

static void check_pipeline(const struct rig *r, const side_span *spans, size_t n, const side_pipeline_stats *stats)
{
    uint64_t bytes[SIDE_LANE_COUNT] = {0}, items[SIDE_LANE_COUNT] = {0};
    uint64_t *of_item = calloc(r->n + 1, sizeof(*of_item));
    side_account account;

    for (size_t i = 0; i < n; i++) {
        const side_span *s = &spans[i];
        assert_true(s->item < r->n);
        bytes[s->lane] += s->bytes;
        items[s->lane]++;
        if (s->lane == SIDE_LANE_H2D)
            of_item[s->item] += s->bytes;
        if (s->lane == SIDE_LANE_COMPUTE)
            assert_int_equal(s->bytes, r->in_bytes[s->item]);
        assert_string_equal(s->name, s->lane == SIDE_LANE_H2D       ? "H2D"
                                     : s->lane == SIDE_LANE_COMPUTE ? "compute"
                                                                    : "D2H");
        if (s->lane != SIDE_LANE_COMPUTE)
            assert_int_equal(s->write_end - s->write_begin, s->bytes);
    }
    for (uint64_t i = 0; i < r->n; i++)
        assert_int_equal(of_item[i], r->in_bytes[i]);
    assert_int_equal(bytes[SIDE_LANE_H2D], stats->bytes_in);
    assert_int_equal(bytes[SIDE_LANE_D2H], stats->bytes_out);
    assert_int_equal(items[SIDE_LANE_COMPUTE], r->n);
    T_OK(side_timeline_account(spans, n, &account));
    assert_int_equal(account.h2d_bytes, stats->bytes_in);
    assert_int_equal(account.d2h_bytes, stats->bytes_out);
    assert_true(account.total_s <= stats->time_s + 1e-12);
    free(of_item);
}

T_TEST(every_byte_of_a_pipeline_is_in_the_log)
{
    static side_span spans[MOST];

    rig_small_pool();
    T_FOR_SEEDS (seed, 150) {
        side_device *dev = rig_device(seed % 2 ? "copy_engines=1" : "copy_engines=2", seed);
        t_rng rng = t_rng_make(seed);
        side_pipeline_stats stats;
        side_pipeline *p;
        side_log *log;
        struct rig r;

        rig_init(&r);
        r.source = (enum rig_source)t_rng_below(&rng, FROM_COUNT);
        r.sink = (enum rig_sink)t_rng_below(&rng, TO_COUNT);
        r.n = t_rng_below(&rng, 15);
        r.item_max = 1 + t_rng_below(&rng, 2000);
        r.result_max = 1 + t_rng_below(&rng, 2000);
        r.o.depth = 1 + (uint32_t)t_rng_below(&rng, 4);
        r.o.streams = 1 + (uint32_t)t_rng_below(&rng, 3);
        r.o.threads = 2;
        r.o.chunk_bytes = 100 + t_rng_below(&rng, 500);
        rig_build(&r, dev, &rng);
        T_OK(side_log_create(dev, 0, &log));
        r.o.log = log;
        T_OK(side_pipeline_create(dev, &r.o, &p));
        for (int pass = 0; pass < 2; pass++) {
            rig_reset(&r);
            T_OK(side_log_clear(log));
            T_OK(side_pipeline_run(p, &stats));
            RIG_IS_RIGHT(&r, r.n);
            check_pipeline(&r, spans, read_log(log, spans), &stats);
            assert_int_equal(side_log_dropped(log), 0);
        }
        T_OK(side_pipeline_destroy(p));
        side_log_destroy(log);
        rig_finish(&r);
        rig_close(dev);
    }
}

/* Logging takes no virtual time, and its account is that of the formula. */
T_TEST(account_of_a_uniform_pipeline)
{
    static side_span spans[MOST];
    side_device *dev = rig_device("copy_engines=2", 1);
    t_rng rng = t_rng_make(1);
    side_pipeline_stats stats;
    side_account account;
    side_pipeline *p;
    side_log *log;
    struct rig r;

    rig_init(&r);
    r.uniform = true;
    r.sink = TO_PINNED;
    r.n = 20;
    r.item_max = r.result_max = 40000;
    r.cost_ns = 30000;
    r.o.depth = 2;
    rig_build(&r, dev, &rng);
    T_OK(side_log_create(dev, 0, &log));
    r.o.log = log;
    T_OK(side_pipeline_create(dev, &r.o, &p));
    T_OK(side_pipeline_run(p, &stats));
    size_t n = read_log(log, spans);
    assert_int_equal(n, 60);
    T_OK(side_timeline_account(spans, n, &account));
    double t = account.h2d_busy_s / 20;
    assert_int_equal(llround(account.compute_busy_s * 1e9), 20 * 30000);
    assert_int_equal(llround(account.total_s * 1e9), llround(stats.time_s * 1e9));
    assert_int_equal(llround(account.total_s * 1e9), llround(side_timeline_bound(20, t, 30e-6, t, 2) * 1e9));
    T_OK(side_pipeline_destroy(p));
    side_log_destroy(log);
    rig_finish(&r);
    rig_close(dev);
}

/* ---------------------------------------------------------------- spans of the caller's */

static void log_spin(side_log *log, side_stream *s, uint64_t item, uint64_t ns)
{
    uint32_t span;

    T_OK(side_log_begin(log, s, SIDE_LANE_COMPUTE, "spin", item, 0, &span));
    T_OK(rig_op(s, NULL, NULL, 0, ns));
    T_OK(side_log_end(log, s, span));
}

T_TEST(capacity_and_clear)
{
    side_device *dev = rig_device("", 1);
    side_span spans[16];
    side_stream *s;
    side_log *log;
    uint32_t a, b;
    size_t n;

    T_OK(side_stream_create(dev, &s));
    T_OK(side_log_create(dev, 5, &log));
    for (uint64_t i = 0; i < 8; i++)
        log_spin(log, s, i, 100);
    assert_int_equal(side_log_dropped(log), 3);
    n = 16;
    T_OK(side_log_spans(log, spans, &n));
    assert_int_equal(n, 5);
    for (uint64_t i = 0; i < 5; i++) {
        assert_int_equal(spans[i].item, i);
        assert_int_equal(spans[i].begin_ns, 100 * i);
        assert_int_equal(spans[i].end_ns, 100 * i + 100);
    }
    n = 2; /* less room than spans: filled as far as it goes, and told how many there are */
    memset(spans, 0, sizeof(spans));
    T_OK(side_log_spans(log, spans, &n));
    assert_int_equal(n, 5);
    assert_int_equal(spans[1].item, 1);
    assert_int_equal(spans[2].end_ns, 0);
    T_OK(side_log_clear(log));
    assert_int_equal(side_log_dropped(log), 0);
    n = 16;
    T_OK(side_log_spans(log, spans, &n));
    assert_int_equal(n, 0);

    T_OK(side_log_begin(log, s, SIDE_LANE_H2D, "old", 1, 0, &a));
    n = 16;
    T_OK(side_log_spans(log, spans, &n)); /* not ended: not shown */
    assert_int_equal(n, 0);
    T_OK(side_log_clear(log));
    T_OK(side_log_begin(log, s, SIDE_LANE_D2H, "a name that is longer than the field", 2, 7, &b));
    T_OK(rig_op(s, NULL, NULL, 0, 1000));
    T_OK(side_log_end(log, s, a)); /* of before: does not end the new one */
    T_OK(rig_op(s, NULL, NULL, 0, 1000));
    T_OK(side_log_end(log, s, b));
    n = 16;
    T_OK(side_log_spans(log, spans, &n));
    assert_int_equal(n, 1);
    assert_int_equal(spans[0].end_ns - spans[0].begin_ns, 2000);
    assert_string_equal(spans[0].name, "a name that is longer t");
    assert_int_equal(spans[0].bytes, 7);
    side_log_destroy(log);
    side_stream_destroy(s);
    rig_close(dev);
}

/* Times are placed by an anchor a second: exact over many seconds, for spans that are longer than that, and for those queued long before. */
T_TEST(times_over_many_seconds)
{
    enum { SPANS = 12 };
    const uint64_t ns = 700000001;
    side_device *dev = rig_device("", 1);
    side_span spans[2 * SPANS];
    side_stream *s, *other;
    side_log *log;
    size_t n = 2 * SPANS;

    T_OK(side_stream_create(dev, &s));
    T_OK(side_stream_create(dev, &other));
    T_OK(rig_op(s, NULL, NULL, 0, 12345)); /* the origin is not 0 */
    T_OK(side_stream_sync(s, 0));
    T_OK(side_log_create(dev, 0, &log));
    for (uint64_t i = 0; i < SPANS; i++) {
        log_spin(log, s, i, ns * (1 + i % 3));
        if (i % 2 == 0)
            T_OK(side_stream_sync(s, 0)); /* the host's clock goes on */
    }
    T_OK(side_log_spans(log, spans, &n));
    assert_int_equal(n, SPANS);
    check_spans(spans, n);
    uint64_t at = 0;
    for (uint64_t i = 0; i < SPANS; i++) {
        assert_int_equal(spans[i].item, i);
        assert_int_equal(spans[i].begin_ns, at);
        at += ns * (1 + i % 3);
        assert_int_equal(spans[i].end_ns, at);
    }
    side_log_destroy(log);
    side_stream_destroy(s);
    side_stream_destroy(other);
    rig_close(dev);
}

T_TEST(arguments_are_checked)
{
    side_device *dev = rig_device("", 1), *other = rig_device("", 1);
    side_stream *s, *foreign;
    side_span span[1];
    side_log *log;
    uint32_t id;
    size_t n = 1;

    T_STATUS(side_log_create(NULL, 0, &log), SIDE_INVALID);
    T_STATUS(side_log_create(dev, 0, NULL), SIDE_INVALID);
    T_OK(side_log_create(dev, 0, &log));
    T_OK(side_stream_create(dev, &s));
    T_OK(side_stream_create(other, &foreign));
    T_STATUS(side_log_begin(NULL, s, SIDE_LANE_H2D, "x", 0, 0, &id), SIDE_INVALID);
    T_STATUS(side_log_begin(log, NULL, SIDE_LANE_H2D, "x", 0, 0, &id), SIDE_INVALID);
    T_STATUS(side_log_begin(log, foreign, SIDE_LANE_H2D, "x", 0, 0, &id), SIDE_INVALID);
    T_STATUS(side_log_begin(log, s, SIDE_LANE_COUNT, "x", 0, 0, &id), SIDE_INVALID);
    T_STATUS(side_log_begin(log, s, SIDE_LANE_H2D, NULL, 0, 0, &id), SIDE_INVALID);
    T_STATUS(side_log_begin(log, s, SIDE_LANE_H2D, "x", 0, 0, NULL), SIDE_INVALID);
    T_STATUS(side_log_end(NULL, s, 0), SIDE_INVALID);
    T_STATUS(side_log_end(log, foreign, 0), SIDE_INVALID);
    T_STATUS(side_log_spans(NULL, span, &n), SIDE_INVALID);
    T_STATUS(side_log_spans(log, span, NULL), SIDE_INVALID);
    T_STATUS(side_log_spans(log, NULL, &n), SIDE_INVALID);
    T_STATUS(side_log_clear(NULL), SIDE_INVALID);
    assert_int_equal(side_log_dropped(NULL), 0);
    side_log_destroy(NULL);
    side_log_destroy(log);
    side_stream_destroy(s);
    side_stream_destroy(foreign);
    rig_close(dev);
    rig_close(other);
}

/* ---------------------------------------------------------------- threads */

struct logger {
    side_log *log;
    side_stream *stream;
    uint64_t first;
};

static void *logger_run(void *arg)
{
    struct logger *l = arg;

    for (uint64_t i = 0; i < 200; i++)
        log_spin(l->log, l->stream, l->first + i, 10 + i);
    return NULL;
}

T_TEST(threads)
{
    static side_span spans[MOST];
    side_device *dev = rig_device("", 1);
    struct logger l[4];
    pthread_t threads[4];
    side_log *log;
    bool seen[800] = {false};

    T_OK(side_log_create(dev, 0, &log));
    for (uint64_t i = 0; i < 4; i++) {
        l[i] = (struct logger){log, NULL, 200 * i};
        T_OK(side_stream_create(dev, &l[i].stream));
        assert_int_equal(pthread_create(&threads[i], NULL, logger_run, &l[i]), 0);
    }
    for (int i = 0; i < 20; i++) { /* read while it is written */
        size_t n = MOST;
        T_OK(side_log_spans(log, spans, &n));
    }
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    size_t n = read_log(log, spans);
    assert_int_equal(n, 800);
    for (size_t i = 0; i < n; i++) {
        assert_false(seen[spans[i].item]);
        seen[spans[i].item] = true;
        assert_true(spans[i].stream < 4);
        assert_int_equal(spans[i].end_ns - spans[i].begin_ns >= 10 + spans[i].item % 200, true);
    }
    assert_int_equal(side_log_dropped(log), 0);
    side_log_destroy(log);
    for (int i = 0; i < 4; i++)
        side_stream_destroy(l[i].stream);
    rig_close(dev);
}

/* What cannot be logged is counted, and what is logged goes on. */
T_TEST(failures_are_counted)
{
    side_device *dev = rig_device("", 1);
    side_stream *s;
    side_log *log;
    size_t n = 0;

    T_OK(side_stream_create(dev, &s));
    T_OK(side_log_create(dev, 0, &log));
    for (uint64_t k = 1; k <= 5; k++) {
        sim_fail_at(dev->context, k, SIDE_DEVICE_ERROR);
        uint32_t span;
        T_OK(side_log_begin(log, s, SIDE_LANE_COMPUTE, "x", k, 0, &span));
        T_OK(side_log_end(log, s, span));
        sim_fault_clear(dev->context);
    }
    assert_int_equal(side_log_dropped(log), 4); /* begin and end make two calls each */
    T_OK(side_log_spans(log, NULL, &n));
    assert_int_equal(n, 1);
    side_log_destroy(log);
    side_stream_destroy(s);
    rig_close(dev);
}

T_MAIN(T(every_byte_of_a_pipeline_is_in_the_log), T(account_of_a_uniform_pipeline), T(capacity_and_clear),
       T(times_over_many_seconds), T(arguments_are_checked), T(threads), T(failures_are_counted))
