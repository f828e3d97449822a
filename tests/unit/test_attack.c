/* SPDX-License-Identifier: MIT
 *
 * Calls in the wrong place, at the wrong moment, with the wrong things: what they leave behind, and what they must refuse. */
#include "pipe_help.h"

#include "error.h"
#include "fence.h"
#include "os.h"
#include "slots.h"

#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <sys/wait.h>

enum { SLOT_BYTES = 4096 };

struct fixture {
    side_device *dev;
    side_stream *s[2];
    side_slots *t;
};

static void fixture_open(struct fixture *f, side_policy policy, uint32_t count, uint64_t seed)
{
    side_slots_options o = SIDE_SLOTS_OPTIONS_INIT;

    rig_small_pool();
    f->dev = rig_device("", seed);
    for (int i = 0; i < 2; i++)
        T_OK(side_stream_create(f->dev, &f->s[i]));
    o.policy = policy;
    o.count = count;
    o.slot_bytes = SLOT_BYTES;
    T_OK(side_slots_create(f->dev, &o, &f->t));
}

static void fixture_close(struct fixture *f)
{
    for (int i = 0; i < 2; i++)
        side_stream_destroy(f->s[i]);
    rig_close(f->dev);
}

/* Asking for an item that is not ready yet leaves nothing behind: the next writer still waits for the one before it. */
T_TEST(try_take_in_vain_keeps_the_order_of_writers)
{
    static unsigned char seen[SLOT_BYTES];

    T_FOR_SEEDS (seed, 40) {
        struct fixture f;
        side_slot slot;

        fixture_open(&f, SIDE_TABLE, 1, seed);
        for (uint64_t key = 0; key < 2; key++) {
            T_OK(side_slots_acquire(f.t, key, f.s[key], &slot));
            T_OK(rig_op(f.s[key], NULL, NULL, 0, key == 0 ? 1000000 : 10));
            T_OK(side_memset_async(f.s[key], slot.data, 0x10 + (int)key, SLOT_BYTES));
            T_OK(side_slots_publish(f.t, &slot, f.s[key], NULL));
            if (key == 0)
                T_STATUS(side_slots_try_take(f.t, 0, NULL, &slot), SIDE_AGAIN);
        }
        void *data = slot.data;
        T_OK(side_slots_drain(f.t, 0));
        T_OK(side_copy_async(f.s[1], SIDE_COPY_D2H, seen, data, SLOT_BYTES));
        T_OK(side_stream_sync(f.s[1], 0));
        T_OK(side_stream_sync(f.s[0], 0));
        T_OK(side_copy_async(f.s[1], SIDE_COPY_D2H, seen, data, SLOT_BYTES));
        T_OK(side_stream_sync(f.s[1], 0));
        for (size_t i = 0; i < SLOT_BYTES; i++)
            assert_int_equal(seen[i], 0x11);
        T_OK(side_slots_destroy(f.t));
        fixture_close(&f);
    }
}

/* A copy into a slot, published or not quite: whichever call fails from then on, the memory is not freed under the copy. */
static void fail_at(uint64_t seed, uint64_t nth, side_status status, bool *failed)
{
    struct fixture f;
    side_slot slot;
    static _Alignas(4096) unsigned char data[SLOT_BYTES];

    fixture_open(&f, SIDE_RING, 2, seed);
    T_OK(f.dev->ops->host_register(f.dev->context, data, sizeof(data), false));
    T_OK(side_slots_acquire(f.t, 0, f.s[0], &slot));
    T_OK(rig_op(f.s[0], NULL, NULL, 0, 1000000));
    T_OK(side_copy_async(f.s[0], SIDE_COPY_H2D, slot.data, data, SLOT_BYTES));
    uint64_t before = sim_calls(f.dev->context);
    sim_fail_at(f.dev->context, nth, status);
    side_status r = side_slots_publish(f.t, &slot, f.s[0], NULL);
    if (r == SIDE_OK)
        r = side_slots_take(f.t, 0, f.s[1], &slot);
    if (r == SIDE_OK && rig_op(f.s[1], NULL, NULL, 0, 1000000) == SIDE_OK)
        r = side_slots_release(f.t, &slot, f.s[1]);
    if (r != SIDE_OK) {
        assert_int_equal(r, status);
        assert_int_equal(side_last_error()->status, status);
    }
    T_OK(side_slots_destroy(f.t));
    *failed = sim_calls(f.dev->context) - before >= nth;
    sim_fault_clear(f.dev->context);
    (void)f.dev->ops->host_unregister(f.dev->context, data);
    fixture_close(&f);
}

T_TEST(slots_are_not_freed_under_a_copy)
{
    static const side_status with[] = {SIDE_DEVICE_ERROR, SIDE_NO_MEMORY, SIDE_DEVICE_LOST};

    T_FOR_SEEDS (seed, 100) {
        for (size_t i = 0; i < sizeof(with) / sizeof(with[0]); i++) {
            bool failed = true;
            for (uint64_t nth = 1; failed; nth++)
                fail_at(seed, nth, with[i], &failed);
        }
    }
}

/* A poisoned slot does not take the end of an access any more; what was queued for it is waited for. */
T_TEST(poison_does_not_free_under_a_copy)
{
    T_FOR_SEEDS (seed, 100) {
        struct fixture f;
        side_slot slot;

        fixture_open(&f, SIDE_RING, 2, seed);
        T_OK(side_slots_acquire(f.t, 0, f.s[0], &slot));
        if (seed % 2 == 0) {
            T_OK(side_slots_publish(f.t, &slot, f.s[0], NULL));
            T_OK(side_slots_take(f.t, 0, f.s[0], &slot));
        }
        T_OK(rig_op(f.s[0], NULL, NULL, 0, 1000000));
        T_OK(side_memset_async(f.s[0], slot.data, 1, SLOT_BYTES));
        side_slots_poison(f.t, SIDE_CANCELLED);
        T_STATUS(seed % 2 == 0 ? side_slots_release(f.t, &slot, f.s[0]) : side_slots_publish(f.t, &slot, f.s[0], NULL),
                 SIDE_CANCELLED);
        T_OK(side_slots_destroy(f.t));
        fixture_close(&f);
    }
}

static const char *round_trips(struct fixture *f)
{
    for (int i = 0; i < 2000; i++) {
        side_slot slot;
        T_OK(side_slots_acquire(f->t, 0, f->s[0], &slot));
        T_OK(side_slots_publish(f->t, &slot, f->s[0], NULL));
        T_OK(side_slots_take(f->t, (uint64_t)i, f->s[1], &slot));
        T_OK(side_slots_release(f->t, &slot, f->s[1]));
    }
    return "done";
}

static void *round_trips_thread(void *fixture)
{
    return (void *)(uintptr_t)round_trips(fixture);
}

/* For ThreadSanitizer: slots may be used by any thread at once, draining included. */
T_TEST(drain_beside_other_threads)
{
    struct fixture f;
    pthread_t thread;

    fixture_open(&f, SIDE_RING, 3, 1);
    T_OK(os_thread_create(&thread, "t", round_trips_thread, &f));
    for (int i = 0; i < 200; i++)
        T_OK(side_slots_drain(f.t, 0));
    pthread_join(thread, NULL);
    T_OK(side_slots_destroy(f.t));
    fixture_close(&f);
}

/* ---------------------------------------------------------------- of another device */

T_TEST(streams_of_another_device)
{
    side_device *other = rig_device("", 2);
    side_stream *foreign, *number_two;
    side_ticket ticket;
    struct fixture f;
    side_slot slot, taken;

    fixture_open(&f, SIDE_RING, 2, 1);
    T_OK(side_stream_create(other, &foreign));
    T_OK(side_stream_create(other, &number_two));
    T_STATUS(side_slots_acquire(f.t, 0, foreign, &slot), SIDE_INVALID);
    T_STATUS(side_slots_try_acquire(f.t, 0, foreign, &slot), SIDE_INVALID);
    T_OK(side_slots_acquire(f.t, 0, f.s[0], &slot));
    T_STATUS(side_slots_publish(f.t, &slot, foreign, NULL), SIDE_INVALID);
    T_STATUS(side_slots_abandon(f.t, &slot, foreign), SIDE_INVALID);
    T_OK(side_slots_publish(f.t, &slot, f.s[0], &ticket));
    T_STATUS(side_ticket_stream_wait(&ticket, number_two), SIDE_INVALID);
    T_STATUS(side_slots_take(f.t, 0, number_two, &taken), SIDE_INVALID);
    T_STATUS(side_slots_try_take(f.t, 0, number_two, &taken), SIDE_INVALID);
    T_OK(side_slots_take(f.t, 0, f.s[1], &taken));
    T_STATUS(side_slots_release(f.t, &taken, number_two), SIDE_INVALID);
    T_OK(side_slots_release(f.t, &taken, f.s[1])); /* refused, not poisoned */
    assert_true(slots_is_valid(f.t));
    T_OK(side_slots_destroy(f.t));
    side_stream_destroy(foreign);
    side_stream_destroy(number_two);
    fixture_close(&f);
    rig_close(other);
}

static int no_compute(void *user, side_stream *stream, side_item *item)
{
    (void)user;
    (void)stream;
    (void)item;
    return 0;
}

static unsigned char one_item[1024];
static const side_block one_block = {one_item, sizeof(one_item)};

static side_pipeline_options one_item_options(void)
{
    side_pipeline_options o = SIDE_PIPELINE_OPTIONS_INIT;

    rig_small_pool();
    o.item_bytes = sizeof(one_item);
    o.source = side_source_blocks(&one_block, 1);
    o.compute = no_compute;
    return o;
}

T_TEST(pool_and_log_of_another_device)
{
    side_pipeline_options o = one_item_options();
    side_slots_options t = SIDE_SLOTS_OPTIONS_INIT;
    side_device *dev = rig_device("", 1), *other = rig_device("", 2);
    side_pipeline *p;
    side_slots *slots;
    side_pool *pool;

    T_OK(side_device_pool(other, &pool));
    t.count = 1;
    t.slot_bytes = 64;
    t.where = SIDE_MEMORY_PINNED;
    t.pool = pool;
    T_STATUS(side_slots_create(dev, &t, &slots), SIDE_INVALID);
    T_OK(side_log_create(other, 0, &o.log));
    T_STATUS(side_pipeline_create(dev, &o, &p), SIDE_INVALID);
    side_log_destroy(o.log);
    rig_close(other);
    rig_close(dev);
}

/* ---------------------------------------------------------------- numbers */

T_TEST(blocks_whose_sum_overflows)
{
    const side_block blocks[] = {{one_item, SIZE_MAX - 100}, {one_item, 101 + sizeof(one_item)}};
    const uint32_t pieces[] = {2};
    side_pipeline_options o = one_item_options();
    side_device *dev = rig_device("", 1);
    side_pipeline *p;

    o.source = side_source_items(blocks, pieces, 1);
    T_STATUS(side_pipeline_create(dev, &o, &p), SIDE_TOO_LARGE);
    rig_close(dev);
}

T_TEST(file_ranges_past_the_end_of_files)
{
    side_pipeline_options o = one_item_options();
    side_device *dev = rig_device("", 1);
    side_pipeline *p;

    o.source = side_source_file(0, (uint64_t)INT64_MAX, 1);
    T_STATUS(side_pipeline_create(dev, &o, &p), SIDE_INVALID);
    o.source = side_source_file(0, UINT64_MAX, 2);
    T_STATUS(side_pipeline_create(dev, &o, &p), SIDE_INVALID);
    o.source = side_source_blocks(&one_block, 1);
    o.result_bytes = 64;
    o.sink = side_sink_file(1, (uint64_t)INT64_MAX + 1);
    T_STATUS(side_pipeline_create(dev, &o, &p), SIDE_INVALID);
    rig_close(dev);
}

/* Times that went negative, as deadlines do that have passed, must not mean "for ever". */
T_TEST(times_that_are_none)
{
    static const double bad[] = {-1e-9, -1e300, -(double)INFINITY, (double)NAN};
    side_slots_options o = SIDE_SLOTS_OPTIONS_INIT;
    side_event *event;
    side_ticket ticket;
    struct fixture f;
    side_slots *t;
    side_slot slot;

    fixture_open(&f, SIDE_RING, 2, 1);
    T_OK(side_event_create(f.dev, false, &event));
    T_OK(side_slots_acquire(f.t, 0, f.s[0], &slot));
    T_OK(rig_op(f.s[0], NULL, NULL, 0, 1000));
    T_OK(side_event_record(event, f.s[0]));
    T_OK(side_slots_publish(f.t, &slot, f.s[0], &ticket));
    o.count = 1;
    o.slot_bytes = 64;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        T_STATUS(side_event_wait(event, bad[i]), SIDE_INVALID);
        T_STATUS(side_stream_sync(f.s[0], bad[i]), SIDE_INVALID);
        T_STATUS(side_slots_drain(f.t, bad[i]), SIDE_INVALID);
        T_STATUS(side_ticket_wait(&ticket, bad[i]), SIDE_INVALID);
        o.timeout_s = bad[i];
        T_STATUS(side_slots_create(f.dev, &o, &t), SIDE_INVALID);
    }
    T_OK(side_event_wait(event, (double)INFINITY));
    T_OK(side_slots_drain(f.t, 1e300));
    side_event_destroy(event);
    T_OK(side_slots_destroy(f.t));
    fixture_close(&f);
}

/* "0: no result for this item" needs no block either. */
static int first_alone(void *user, side_stream *stream, side_item *item)
{
    (void)user;
    item->result_bytes = item->number == 0 ? item->result_bytes : 0;
    return side_memset_async(stream, item->result, 7, item->result_bytes) == SIDE_OK ? 0 : 1;
}

T_TEST(no_result_needs_no_block)
{
    const side_block in[] = {one_block, one_block, one_block};
    unsigned char result[64] = {0};
    const side_block out = {result, sizeof(result)};
    side_pipeline_options o = one_item_options();
    side_device *dev = rig_device("", 1);
    side_pipeline *p;

    o.source = side_source_blocks(in, 3);
    o.result_bytes = sizeof(result);
    o.sink = side_sink_blocks(&out, 1);
    o.compute = first_alone;
    T_OK(side_pipeline_create(dev, &o, &p));
    T_OK(side_pipeline_run(p, NULL));
    assert_int_equal(result[0], 7);
    T_OK(side_pipeline_destroy(p));
    rig_close(dev);
}

T_TEST(options_of_an_absurd_size)
{
    side_pool_options *o = calloc(1, sizeof(*o));
    side_device *dev = rig_device("", 1);
    side_pool *pool;

    o->size = (size_t)1 << 40;
    T_STATUS(side_pool_create(dev, o, &pool), SIDE_INVALID);
    o->size = SIZE_MAX;
    T_STATUS(side_pool_create(dev, o, &pool), SIDE_INVALID);
    free(o);
    rig_close(dev);
}

/* One byte for two ends leaves none for either; none must not mean "no limit". */
T_TEST(smallest_limit_of_pinned_bytes)
{
    static unsigned char out[sizeof(one_item)];
    const side_block result = {out, sizeof(out)};
    side_pipeline_options o = one_item_options();
    side_device *dev = rig_device("", 1);
    side_pipeline *p;

    o.result_bytes = sizeof(out);
    o.sink = side_sink_blocks(&result, 1);
    for (o.pinned_bytes = 1; o.pinned_bytes < 4; o.pinned_bytes++)
        T_STATUS(side_pipeline_create(dev, &o, &p), SIDE_OVER_BUDGET);
    rig_close(dev);
}

/* Also of a run that an earlier failure refuses. */
T_TEST(stats_of_a_run_that_is_refused)
{
    side_pipeline_options o = one_item_options();
    side_device *dev = rig_device("", 1);
    side_pipeline_stats stats = {.depth = 77};
    side_pipeline *p;

    T_OK(side_pipeline_create(dev, &o, &p));
    side_pipeline_cancel(p);
    T_STATUS(side_pipeline_run(p, &stats), SIDE_CANCELLED);
    assert_int_equal(stats.depth, 2);
    T_OK(side_pipeline_destroy(p));
    rig_close(dev);
}

/* ---------------------------------------------------------------- fork */

static atomic_bool enough;

static void slow_log(void *user, side_level level, const char *component, const char *message)
{
    (void)user;
    (void)level;
    (void)component;
    (void)message;
    os_sleep_ns(100000);
}

static void *opens(void *unused)
{
    while (!atomic_load(&enough)) {
        side_device *dev;
        T_OK(side_device_open("sim", &dev));
        side_device_close(dev);
    }
    return unused;
}

/* A child opens a device of its own, whatever the parent's other threads were in the middle of. */
T_TEST(fork_while_another_thread_logs)
{
    pthread_t thread;

    if (T_SANITIZED)
        T_SKIP("the allocators of sanitizers do not survive a fork beside other threads");
    side_log_callback(slow_log, NULL, SIDE_LEVEL_DEBUG);
    T_OK(os_thread_create(&thread, "opens", opens, NULL));
    for (int i = 0; i < 50; i++) {
        int status = 0;
        os_sleep_ns(300000);
        pid_t child = fork();
        if (child == 0) {
            side_device *dev;
            alarm(5);
            side_log_callback(NULL, NULL, SIDE_LEVEL_DEBUG);
            _exit(side_device_open("sim", &dev) == SIDE_OK ? 0 : 1);
        }
        assert_true(child > 0);
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_int_equal(status, 0);
    }
    atomic_store(&enough, true);
    pthread_join(thread, NULL);
    side_log_callback(NULL, NULL, SIDE_LEVEL_DEBUG);
}

/* ---------------------------------------------------------------- error detail */

/* Logging that fails on the way out must not tell its own cause for the call's. */
T_TEST(log_keeps_the_cause)
{
    side_device *dev = rig_device("", 1);
    side_log *log;
    uint32_t span;
    side_stream *s;

    T_OK(side_log_create(dev, 0, &log));
    T_OK(side_stream_create(dev, &s));
    T_STATUS(side_event_record(NULL, s), SIDE_INVALID);
    for (int i = 0; i < 4; i++) {
        sim_fail_at(dev->context, (uint64_t)i + 1, SIDE_DEVICE_ERROR);
        T_OK(side_log_begin(log, s, SIDE_LANE_H2D, "x", 0, 0, &span));
        T_OK(side_log_end(log, s, span));
        assert_int_equal(side_last_error()->status, SIDE_INVALID);
        sim_fault_clear(dev->context);
    }
    assert_int_equal(side_log_dropped(log), 4);
    side_stream_destroy(s);
    side_log_destroy(log);
    rig_close(dev);
}

/* The cause of the last call that failed is there until the next one fails: what succeeds, by whatever detours, leaves it alone. */
T_TEST(success_keeps_the_cause)
{
    side_pipeline_options o = one_item_options();
    side_device *dev = rig_device("memory=5K", 1);
    side_pipeline_stats stats;
    side_pipeline *p;

    o.depth = 8;
    T_STATUS(side_event_record(NULL, NULL), SIDE_INVALID);
    const side_error before = *side_last_error();
    T_OK(side_pipeline_create(dev, &o, &p));
    T_OK(side_pipeline_run(p, &stats));
    assert_true(stats.depth < 8);
    T_OK(side_pipeline_destroy(p));
    assert_memory_equal(&before, side_last_error(), sizeof(before));
    rig_close(dev);
}

/* ---------------------------------------------------------------- a device that has only errors for an answer */

static atomic_long good_answers;

static side_status answer(void)
{
    if (atomic_fetch_sub(&good_answers, 1) > 0)
        return SIDE_OK;
    return error_set(SIDE_DEVICE_ERROR, "answer", "no answer");
}

static side_status answer_record(dev_event *event, dev_stream *stream)
{
    side_status s = answer();
    return s == SIDE_OK ? sim_device_ops.event_record(event, stream) : s;
}

static side_status answer_query(dev_event *event)
{
    side_status s = answer();
    return s == SIDE_OK ? sim_device_ops.event_query(event) : s;
}

static side_status answer_wait(dev_event *event, uint64_t timeout_ns)
{
    side_status s = answer();
    return s == SIDE_OK ? sim_device_ops.event_wait(event, timeout_ns) : s;
}

static side_status answer_stream_query(dev_stream *stream)
{
    side_status s = answer();
    return s == SIDE_OK ? sim_device_ops.stream_query(stream) : s;
}

/* What is kept is no leak as long as somebody points to it. */
static struct unanswered {
    struct rig rig;
    side_pipeline *p;
    struct unanswered *next;
} * unanswered;

/* Work is queued that nobody can ask about: whatever fails, no memory is freed under it. False: nothing failed. */
static bool answers_end_after(long n, enum rig_source source, enum rig_sink sink)
{
    static struct side_device_ops ops;
    struct unanswered *u = calloc(1, sizeof(*u));
    side_device *dev = rig_device("", (uint64_t)n);
    t_rng rng = t_rng_make(1);

    u->next = unanswered;
    unanswered = u;
    ops = sim_device_ops;
    ops.event_record = answer_record;
    ops.event_query = answer_query;
    ops.event_wait = answer_wait;
    ops.stream_query = answer_stream_query;
    atomic_store(&good_answers, LONG_MAX);
    dev->ops = &ops;
    rig_init(&u->rig);
    u->rig.source = source;
    u->rig.sink = sink;
    u->rig.n = 5;
    u->rig.item_max = 700;
    u->rig.result_max = 300;
    u->rig.o.timeout_s = 0.01;
    u->rig.o.threads = 2;
    rig_build(&u->rig, dev, &rng);
    T_OK(side_pipeline_create(dev, &u->rig.o, &u->p));
    atomic_store(&good_answers, n);
    side_status status = side_pipeline_run(u->p, NULL);
    if (status != SIDE_OK)
        T_STATUS(side_pipeline_destroy(u->p), status == SIDE_STUCK ? SIDE_STUCK : SIDE_OK);
    assert_int_equal(sim_violations(dev->context), 0);
    if (status == SIDE_OK) {
        atomic_store(&good_answers, LONG_MAX);
        T_OK(side_pipeline_destroy(u->p));
        rig_finish(&u->rig);
        rig_close(dev);
        unanswered = u->next;
        free(u);
    }
    return status != SIDE_OK;
}

T_TEST(device_that_only_fails)
{
    static const enum rig_source sources[] = {FROM_PINNED, FROM_CALLBACK, FROM_PAGEABLE};
    static const enum rig_sink sinks[] = {TO_PINNED, TO_NONE, TO_PAGEABLE};

    rig_small_pool();
    for (int i = 0; i < 3; i++)
        for (long n = 0; t_seed_note((uint64_t)n) && answers_end_after(n, sources[i], sinks[i]); n++)
            ;
}

/* ---------------------------------------------------------------- pulling, as wildly as is allowed */

struct puller {
    struct rig r;
    side_pipeline *p;
    side_stream *s[3];
    side_item held[64];
    uint32_t count;
};

static void puller_done(struct puller *u, t_rng *rng)
{
    uint32_t i = (uint32_t)t_rng_below(rng, u->count);
    side_item item = u->held[i];

    T_OK(side_pipeline_done(u->p, &item, u->s[item.number % 3]));
    u->held[i] = u->held[--u->count];
}

/* A pass up to `stop` items. Items are done in any order, as late as the ring allows. */
static void puller_pass(struct puller *u, t_rng *rng, uint64_t stop)
{
    for (uint64_t n = 0; n < stop;) {
        side_stream *s = u->s[n % 3];
        side_item item;
        side_status status = side_pipeline_next(u->p, s, &item);
        if (status == SIDE_END && u->count == 0)
            break;
        if (status == SIDE_END || status == SIDE_WOULD_DEADLOCK) {
            puller_done(u, rng);
            continue;
        }
        T_OK(status);
        assert_int_equal(item.number, n);
        T_OK(rig_work(&u->r, s, &item));
        u->held[u->count++] = item;
        n++;
        while (u->count > 0 && t_rng_chance(rng, 3))
            puller_done(u, rng);
    }
    while (u->count > 0)
        puller_done(u, rng);
}

static void puller_options(struct rig *r, t_rng *rng)
{
    rig_init(r);
    r->source = (enum rig_source)t_rng_below(rng, FROM_COUNT);
    r->sink = (enum rig_sink)t_rng_below(rng, TO_COUNT);
    r->n = t_rng_below(rng, 40);
    r->item_max = 1 + t_rng_below(rng, t_rng_chance(rng, 4) ? 600000 : 5000);
    r->result_max = 1 + t_rng_below(rng, 5000);
    r->o.depth = (uint32_t)(1 + t_rng_below(rng, t_rng_chance(rng, 4) ? 20 : 4));
    r->o.window = (uint32_t)t_rng_below(rng, 6);
    r->o.threads = (uint32_t)(1 + t_rng_below(rng, t_rng_chance(rng, 8) ? 64 : 4));
    r->o.chunk_bytes = 1 + t_rng_below(rng, 2 * r->item_max) / (t_rng_chance(rng, 2) ? 1 : 7);
    if (r->o.chunk_bytes < r->item_max / 50)
        r->o.chunk_bytes = r->item_max / 50;
}

T_TEST(pull_wildly)
{
    T_FOR_SEEDS (seed, 300) {
        t_rng rng = t_rng_make(seed);
        side_device *dev = rig_device(seed % 3 == 0 ? "copy_engines=1" : "", seed);
        struct puller u = {.count = 0};

        rig_small_pool();
        if (t_rng_chance(&rng, 5))
            setenv("SIDESTREAM_DISABLE", "1", 1);
        else
            unsetenv("SIDESTREAM_DISABLE");
        puller_options(&u.r, &rng);
        rig_build(&u.r, dev, &rng);
        for (int i = 0; i < 3; i++)
            T_OK(side_stream_create(dev, &u.s[i]));
        T_OK(side_pipeline_create(dev, &u.r.o, &u.p));
        for (int pass = 0; pass < 3; pass++) {
            uint64_t stop = t_rng_chance(&rng, 2) ? UINT64_MAX : t_rng_below(&rng, u.r.n + 2);
            rig_reset(&u.r);
            puller_pass(&u, &rng, stop);
            T_OK(side_pipeline_rewind(u.p));
            RIG_IS_RIGHT(&u.r, stop < u.r.n ? stop : u.r.n);
        }
        rig_reset(&u.r);
        if (t_rng_chance(&rng, 2))
            T_OK(side_pipeline_run(u.p, NULL));
        else
            puller_pass(&u, &rng, t_rng_below(&rng, u.r.n + 2));
        T_OK(side_pipeline_destroy(u.p));
        for (int i = 0; i < 3; i++)
            side_stream_destroy(u.s[i]);
        rig_finish(&u.r);
        rig_close(dev);
    }
}

/* ---------------------------------------------------------------- a thread whose clock is behind the log's */

struct logger {
    side_log *log;
    side_stream *s;
};

static void *log_one(void *logger)
{
    struct logger *l = logger;
    uint32_t span;

    T_OK(side_log_begin(l->log, l->s, SIDE_LANE_COMPUTE, "late", 0, 0, &span));
    T_OK(side_log_end(l->log, l->s, span));
    return NULL;
}

T_TEST(log_of_a_thread_that_is_behind)
{
    side_device *dev = rig_device("", 1);
    struct logger l;
    side_span span;
    size_t count = 1;
    pthread_t thread;

    T_OK(side_stream_create(dev, &l.s));
    T_OK(rig_op(l.s, NULL, NULL, 0, 3000000));
    T_OK(side_stream_sync(l.s, 0)); /* 3 ms have passed for this thread; none for the other */
    T_OK(side_log_create(dev, 0, &l.log));
    T_OK(os_thread_create(&thread, "log", log_one, &l));
    pthread_join(thread, NULL);
    T_OK(side_log_spans(l.log, &span, &count));
    assert_int_equal(count, 1);
    assert_int_equal(span.queued_ns, 0);
    side_log_destroy(l.log);
    side_stream_destroy(l.s);
    rig_close(dev);
}

/* ---------------------------------------------------------------- everything at once */

struct canceller {
    side_pipeline *p;
    uint64_t after_ns;
};

static void *cancels(void *canceller)
{
    struct canceller *c = canceller;
    os_sleep_ns(c->after_ns);
    side_pipeline_cancel(c->p);
    return NULL;
}

static uint64_t some_item(t_rng *rng, const struct rig *r)
{
    return t_rng_chance(rng, 2) ? RIG_NEVER : t_rng_below(rng, r->n + 1);
}

/* Callbacks of all stages that fail, a device call that fails, a cancel, in any combination: the run ends, and the caller's memory is free at once. */
T_TEST(everything_fails_at_once)
{
    T_FOR_SEEDS (seed, 400) {
        t_rng rng = t_rng_make(seed);
        side_device *dev = rig_device("", seed);
        struct canceller c = {.after_ns = t_rng_below(&rng, 3000000)};
        bool cancel = t_rng_chance(&rng, 3);
        pthread_t thread;
        struct rig r;

        rig_small_pool();
        puller_options(&r, &rng);
        r.o.streams = (uint32_t)(1 + t_rng_below(&rng, t_rng_chance(&rng, 3) ? 16 : 2));
        rig_build(&r, dev, &rng);
        r.source_stop = some_item(&rng, &r);
        r.compute_stop = some_item(&rng, &r);
        r.sink_stop = some_item(&rng, &r);
        T_OK(side_pipeline_create(dev, &r.o, &c.p));
        if (t_rng_chance(&rng, 2))
            sim_fail_at(dev->context, 1 + t_rng_below(&rng, 400), SIDE_DEVICE_ERROR);
        if (cancel)
            T_OK(os_thread_create(&thread, "cancel", cancels, &c));
        rig_reset(&r);
        side_status status = side_pipeline_run(c.p, NULL);
        sim_fault_clear(dev->context);
        if (status == SIDE_OK)
            RIG_IS_RIGHT(&r, r.n);
        else if (status != SIDE_CALLBACK && status != SIDE_DEVICE_ERROR && status != SIDE_CANCELLED)
            T_FAIL("%s: %s", side_status_name(status), side_last_error()->message);
        if (status != SIDE_OK)
            assert_int_equal(side_last_error()->status, status);
        if (cancel)
            pthread_join(thread, NULL);
        T_OK(side_pipeline_destroy(c.p));
        rig_finish(&r);
        rig_close(dev);
    }
}

T_MAIN(T(try_take_in_vain_keeps_the_order_of_writers), T(slots_are_not_freed_under_a_copy),
       T(poison_does_not_free_under_a_copy), T(drain_beside_other_threads), T(streams_of_another_device),
       T(pool_and_log_of_another_device), T(blocks_whose_sum_overflows), T(file_ranges_past_the_end_of_files),
       T(times_that_are_none), T(no_result_needs_no_block), T(options_of_an_absurd_size),
       T(fork_while_another_thread_logs), T(log_keeps_the_cause), T_LONG(pull_wildly, 120),
       T_LONG(device_that_only_fails, 60), T(log_of_a_thread_that_is_behind), T(success_keeps_the_cause),
       T_LONG(everything_fails_at_once, 120), T(smallest_limit_of_pinned_bytes), T(stats_of_a_run_that_is_refused))
