/* SPDX-License-Identifier: MIT
 *
 * Cancelling at any moment and from any place, use after fork, SIDESTREAM_DISABLE: what ends a pipeline from outside. */
#include "pipe_help.h"

#include "os.h"

#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

static void prepare(struct rig *r, t_rng *rng)
{
    rig_init(r);
    r->source = (enum rig_source)t_rng_below(rng, FROM_COUNT);
    r->sink = (enum rig_sink)t_rng_below(rng, TO_COUNT);
    r->n = 60;
    r->item_max = 2000;
    r->result_max = 1500;
    r->o.depth = 1 + (uint32_t)t_rng_below(rng, 4);
    r->o.threads = 2;
    r->o.streams = 2;
    r->o.chunk_bytes = 700;
}

/* ---------------------------------------------------------------- from another thread */

struct canceller {
    side_pipeline *p;
    uint64_t delay_ns;
    atomic_bool go;
};

static void *cancel_later(void *arg)
{
    struct canceller *c = arg;

    while (!atomic_load(&c->go))
        os_sleep_ns(1000);
    os_sleep_ns(c->delay_ns);
    side_pipeline_cancel(c->p);
    return NULL;
}

static int slow_fill(void *user, uint64_t item, void *data, size_t capacity, size_t *bytes)
{
    os_sleep_ns(300000);
    return rig_fill(user, item, data, capacity, bytes);
}

static int slow_sink(void *user, uint64_t item, const void *data, size_t bytes)
{
    os_sleep_ns(300000);
    return rig_sunk(user, item, data, bytes);
}

/* True: it was cancelled before it was through. */
static bool cancel_once(t_rng *rng, uint64_t seed)
{
    long live = mem_live();
    side_device *dev = rig_device("", seed);
    struct canceller c = {.delay_ns = t_rng_below(rng, 1500000)};
    side_pipeline_stats stats;
    side_stream *stream;
    pthread_t thread;
    side_item item;
    side_status s;
    struct rig r;
    bool pulls = t_rng_chance(rng, 3);

    prepare(&r, rng);
    rig_build(&r, dev, rng);
    if (r.source == FROM_CALLBACK)
        r.o.source.fn = slow_fill;
    if (r.sink == TO_CALLBACK)
        r.o.sink.fn = slow_sink;
    T_OK(side_stream_create(dev, &stream));
    T_OK(side_pipeline_create(dev, &r.o, &c.p));
    assert_int_equal(pthread_create(&thread, NULL, cancel_later, &c), 0);
    atomic_store(&c.go, true);
    if (pulls) {
        while ((s = side_pipeline_next(c.p, stream, &item)) == SIDE_OK) {
            T_OK(rig_work(&r, stream, &item));
            s = side_pipeline_done(c.p, &item, stream);
            if (s != SIDE_OK)
                break;
        }
        s = s == SIDE_END ? SIDE_OK : s;
    } else {
        s = side_pipeline_run(c.p, &stats);
    }
    if (s != SIDE_OK) {
        if (s != SIDE_CANCELLED)
            T_FAIL("%s at %s: %s (source %d, sink %d, depth %u, pulls %d)", side_status_name(s),
                   side_last_error()->where, side_last_error()->message, r.source, r.sink, r.o.depth, pulls);
        assert_true(side_last_error()->message[0] != '\0');
    } else {
        RIG_IS_RIGHT(&r, r.n);
    }
    if (atomic_load(&r.wrong) != 0) /* what came before the cancel came right */
        T_FAIL("%u callbacks saw something wrong", atomic_load(&r.wrong));
    bool early = s != SIDE_OK;
    pthread_join(thread, NULL);
    T_STATUS(side_pipeline_run(c.p, NULL), SIDE_CANCELLED); /* for good */
    if (pulls)                                              /* what we queued on an item that was not done */
        T_OK(side_stream_sync(stream, 0));
    T_OK(side_pipeline_destroy(c.p));
    side_stream_destroy(stream);
    rig_finish(&r);
    rig_close(dev);
    assert_int_equal(mem_live(), live);
    return early;
}

T_TEST(cancel_at_any_moment)
{
    uint64_t early = 0, times = 0;

    rig_small_pool();
    T_FOR_SEEDS (seed, 200) {
        t_rng rng = t_rng_make(seed);
        early += cancel_once(&rng, seed);
        times++;
    }
    printf("%llu of %llu cancelled early\n", (unsigned long long)early, (unsigned long long)times);
    assert_true(times < 10 || early > times / 10);
}

/* ---------------------------------------------------------------- from inside: every callback, and a signal handler */

static side_pipeline *victim;
static uint64_t victim_at;
static int victim_where;

static int cancel_in_fill(void *user, uint64_t item, void *data, size_t capacity, size_t *bytes)
{
    if (victim_where == 0 && item == victim_at)
        side_pipeline_cancel(victim);
    return rig_fill(user, item, data, capacity, bytes);
}

static int cancel_in_compute(void *user, side_stream *stream, side_item *item)
{
    if (victim_where == 1 && item->number == victim_at)
        side_pipeline_cancel(victim);
    if (victim_where == 3 && item->number == victim_at)
        raise(SIGUSR1);
    return rig_compute(user, stream, item);
}

static int cancel_in_sink(void *user, uint64_t item, const void *data, size_t bytes)
{
    if (victim_where == 2 && item == victim_at)
        side_pipeline_cancel(victim);
    return rig_sunk(user, item, data, bytes);
}

static void on_signal(int signal_number)
{
    (void)signal_number;
    side_pipeline_cancel(victim);
}

T_TEST(cancel_from_inside)
{
    rig_small_pool();
    signal(SIGUSR1, on_signal);
    for (victim_where = 0; victim_where < 4; victim_where++)
        for (victim_at = 0; victim_at < 20; victim_at += 3) {
            side_device *dev = rig_device("", victim_at + 1);
            t_rng rng = t_rng_make(victim_at);
            side_pipeline_stats stats;
            struct rig r;

            prepare(&r, &rng);
            r.uniform = true;
            r.source = FROM_CALLBACK;
            r.sink = TO_CALLBACK;
            rig_build(&r, dev, &rng);
            r.o.source.fn = cancel_in_fill;
            r.o.compute = cancel_in_compute;
            r.o.sink.fn = cancel_in_sink;
            T_OK(side_pipeline_create(dev, &r.o, &victim));
            T_STATUS(side_pipeline_run(victim, &stats), SIDE_CANCELLED);
            assert_true(stats.items < r.n);
            T_OK(side_pipeline_destroy(victim));
            rig_finish(&r);
            rig_close(dev);
        }
    side_pipeline_cancel(NULL);
}

/* R5: whoever hears of the cancel first, hears of it when everything is through, whatever stream it was on. */
T_TEST(cancelled_pull_is_drained)
{
    rig_small_pool();
    for (int call = 0; call < 3; call++)
        for (int source = 0; source < FROM_COUNT; source++) {
            side_device *dev = rig_device("", 1);
            t_rng rng = t_rng_make(1);
            side_stream *s[2];
            side_item item[2];
            side_pipeline *p;
            side_status status;
            struct rig r;

            prepare(&r, &rng);
            r.uniform = true;
            r.cost_ns = 10000000;
            r.source = (enum rig_source)source;
            r.sink = TO_PINNED;
            r.o.depth = 3;
            rig_build(&r, dev, &rng);
            for (int i = 0; i < 2; i++)
                T_OK(side_stream_create(dev, &s[i]));
            T_OK(side_pipeline_create(dev, &r.o, &p));
            for (int i = 0; i < 2; i++) {
                T_OK(side_pipeline_next(p, s[i], &item[i]));
                T_OK(rig_work(&r, s[i], &item[i]));
                if (i == 0 || call != 1)
                    T_OK(side_pipeline_done(p, &item[i], s[i]));
            }
            T_STATUS(dev->ops->stream_query(s[0]->handle), SIDE_AGAIN);
            side_pipeline_cancel(p);
            status = call == 0   ? side_pipeline_next(p, s[1], &item[1])
                     : call == 1 ? side_pipeline_done(p, &item[1], s[1])
                                 : side_pipeline_rewind(p);
            T_STATUS(status, SIDE_CANCELLED);
            for (int i = 0; i < 2; i++)
                T_OK(dev->ops->stream_query(s[i]->handle));
            T_OK(side_pipeline_destroy(p));
            for (int i = 0; i < 2; i++)
                side_stream_destroy(s[i]);
            rig_finish(&r);
            rig_close(dev);
        }
}

/* ---------------------------------------------------------------- fork */

#define CHILD(condition)               \
    do {                               \
        if (!(condition))              \
            _exit(__LINE__ % 200 + 1); \
    } while (0)

struct all {
    side_device *dev;
    side_pool *pool;
    side_stream *stream;
    side_event *event;
    side_slots *slots;
    side_log *log;
    side_pipeline *p;
    void *memory, *block;
};

static void in_child(struct all *a)
{
    side_pipeline_stats stats;
    side_memory_kind kind;
    side_device_props props;
    side_ticket ticket = {a->slots, 1, 0};
    side_pool_stats pool_stats;
    side_item item = {0};
    side_slot slot;
    size_t count = 0;
    void *p;

    CHILD(side_pipeline_run(a->p, NULL) == SIDE_FORKED);
    CHILD(side_last_error()->message[0] != '\0');
    CHILD(side_pipeline_next(a->p, a->stream, &item) == SIDE_FORKED);
    CHILD(side_pipeline_done(a->p, &item, a->stream) == SIDE_FORKED);
    CHILD(side_pipeline_rewind(a->p) == SIDE_FORKED);
    CHILD(side_pipeline_get_stats(a->p, &stats) == SIDE_FORKED);
    CHILD(side_slots_acquire(a->slots, 0, NULL, &slot) == SIDE_FORKED);
    CHILD(side_slots_drain(a->slots, 0) == SIDE_FORKED);
    CHILD(side_ticket_query(&ticket) == SIDE_FORKED);
    CHILD(side_log_spans(a->log, NULL, &count) == SIDE_FORKED);
    CHILD(side_log_clear(a->log) == SIDE_FORKED);
    CHILD(side_stream_sync(a->stream, 0) == SIDE_FORKED);
    CHILD(side_event_record(a->event, a->stream) == SIDE_FORKED);
    CHILD(side_event_query(a->event) == SIDE_FORKED);
    CHILD(side_device_alloc(a->dev, 1, &p) == SIDE_FORKED);
    CHILD(side_device_get_props(a->dev, &props) == SIDE_FORKED);
    CHILD(side_memory_get_kind(a->dev, a->block, &kind) == SIDE_FORKED);
    CHILD(side_pool_alloc(a->pool, 1, &p) == SIDE_FORKED);
    CHILD(side_pool_get_stats(a->pool, &pool_stats) == SIDE_FORKED);
    CHILD(side_memory_pin(a->dev, a->block, 1) == SIDE_FORKED);
    side_pipeline_cancel(a->p);
    side_slots_poison(a->slots, SIDE_IO);
    CHILD(side_pipeline_destroy(a->p) == SIDE_OK);
    CHILD(side_slots_destroy(a->slots) == SIDE_OK);
    side_log_destroy(a->log);
    side_event_destroy(a->event);
    side_stream_destroy(a->stream);
    side_device_free(a->dev, a->memory);
    side_pool_destroy(a->pool);
    side_device_close(a->dev);
    CHILD(side_device_open("sim", &a->dev) == SIDE_OK); /* a device of the child's own */
    CHILD(side_device_alloc(a->dev, 100, &p) == SIDE_OK);
    side_device_free(a->dev, p);
    side_device_close(a->dev);
    _exit(0);
}

T_TEST(after_fork)
{
    side_slots_options slots = SIDE_SLOTS_OPTIONS_INIT;
    t_rng rng = t_rng_make(1);
    struct all a;
    int status;
    struct rig r;

    rig_small_pool();
    a.dev = rig_device("", 1);
    prepare(&r, &rng);
    r.source = FROM_PAGEABLE;
    r.sink = TO_PAGEABLE;
    rig_build(&r, a.dev, &rng);
    slots.count = 2;
    slots.slot_bytes = 64;
    T_OK(side_pool_create(a.dev, NULL, &a.pool));
    T_OK(side_pool_alloc(a.pool, 100, &a.block));
    T_OK(side_stream_create(a.dev, &a.stream));
    T_OK(side_event_create(a.dev, false, &a.event));
    T_OK(side_slots_create(a.dev, &slots, &a.slots));
    T_OK(side_log_create(a.dev, 0, &a.log));
    T_OK(side_device_alloc(a.dev, 100, &a.memory));
    T_OK(side_pipeline_create(a.dev, &r.o, &a.p));
    for (int i = 0; i < 3; i++) {
        rig_reset(&r);
        T_OK(side_pipeline_run(a.p, NULL));
        RIG_IS_RIGHT(&r, r.n);
        fflush(NULL);
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0)
            in_child(&a);
        assert_int_equal(waitpid(child, &status, 0), child);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
            T_FAIL("the child ended with %#x (line %d, or 200 or 400 more)", status, WEXITSTATUS(status) - 1);
    }
    rig_reset(&r);
    T_OK(side_pipeline_run(a.p, NULL)); /* the parent goes on */
    RIG_IS_RIGHT(&r, r.n);
    T_OK(side_pipeline_destroy(a.p));
    T_OK(side_slots_destroy(a.slots));
    T_OK(side_pool_free(a.pool, a.block, NULL, 0));
    side_log_destroy(a.log);
    side_event_destroy(a.event);
    side_stream_destroy(a.stream);
    side_device_free(a.dev, a.memory);
    side_pool_destroy(a.pool);
    rig_finish(&r);
    rig_close(a.dev);
}

/* ---------------------------------------------------------------- SIDESTREAM_DISABLE */

/* Same output, nothing overlaps: the sum of all costs. */
T_TEST(disable_is_ordered_copies)
{
    rig_small_pool();
    setenv("SIDESTREAM_DISABLE", "1", 1);
    T_FOR_SEEDS (seed, 100) {
        side_device *dev = rig_device("", seed);
        t_rng rng = t_rng_make(seed);
        side_pipeline_stats stats;
        side_log *log;
        side_pipeline *p;
        struct rig r;

        prepare(&r, &rng);
        rig_build(&r, dev, &rng);
        T_OK(side_log_create(dev, 0, &log));
        r.o.log = log;
        T_OK(side_pipeline_create(dev, &r.o, &p));
        rig_reset(&r);
        T_OK(side_pipeline_run(p, &stats));
        RIG_IS_RIGHT(&r, r.n);
        assert_true(stats.disabled);
        assert_int_equal(stats.depth, 1);
        side_span spans[1024];
        side_account account;
        size_t n = 1024;
        T_OK(side_log_spans(log, spans, &n));
        T_OK(side_timeline_account(spans, n, &account));
        assert_true(account.copy_hidden_s == 0);
        T_OK(side_pipeline_destroy(p));
        side_log_destroy(log);
        rig_finish(&r);
        rig_close(dev);
    }
}

T_MAIN(T(cancel_at_any_moment), T(cancel_from_inside), T(cancelled_pull_is_drained), T(after_fork),
       T(disable_is_ordered_copies))
