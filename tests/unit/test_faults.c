/* SPDX-License-Identifier: MIT
 *
 * Fault loops over pipelines of every source and sink, pushed and pulled: the nth allocation fails, the nth device call fails, the device is lost at the nth
 * call, for n = 1, 2, ... until nothing fails any more. After each: an error with a message, or the right output; nothing leaked, and nothing in
 * flight: the caller's memory is freed at once, so that ASan and the device's own check would see a late copy. */
#include "pipe_help.h"

#include "os.h"

#include <errno.h>
#include <pthread.h>

static const struct pair {
    enum rig_source source;
    enum rig_sink sink;
} pairs[] = {{FROM_PINNED, TO_PINNED}, {FROM_PAGEABLE, TO_PAGEABLE},  {FROM_MIXED, TO_MIXED},
             {FROM_PIECES, TO_FILE},   {FROM_PINNED_PIECES, TO_NONE}, {FROM_CALLBACK, TO_CALLBACK},
             {FROM_FILE, TO_FILE},     {FROM_FILE, TO_NONE}};
enum { PAIRS = sizeof(pairs) / sizeof(pairs[0]) };

static void prepare(struct rig *r, const struct pair *pair)
{
    rig_init(r);
    r->source = pair->source;
    r->sink = pair->sink;
    r->n = 6;
    r->item_max = 700;
    r->result_max = 600;
    r->o.depth = 2;
    r->o.threads = 2;
    r->o.streams = 2;
    r->o.chunk_bytes = 300;
    r->o.timeout_s = 5;
}

/* The caller's loop, as push does it. */
static side_status pull(struct rig *r, side_pipeline *p, side_stream *s)
{
    side_item item;
    side_status status;

    while ((status = side_pipeline_next(p, s, &item)) == SIDE_OK) {
        status = rig_work(r, s, &item);
        if (status == SIDE_OK)
            status = side_pipeline_done(p, &item, s);
        if (status != SIDE_OK)
            return status;
    }
    return status == SIDE_END ? SIDE_OK : status;
}

static void check_error(side_status status)
{
    if (status >= 0)
        T_FAIL("%s is no error", side_status_name(status));
    if (side_last_error()->message[0] == '\0' || side_last_error()->status != status)
        T_FAIL("%s, but the detail says %s: '%s'", side_status_name(status),
               side_status_name(side_last_error()->status), side_last_error()->message);
}

/* Create and one pass, with a stream for pulling made before. What was created is in *p. */
static side_status try_pass(struct rig *r, bool pulls, side_stream *s, side_pipeline **p)
{
    side_pipeline_stats stats;
    side_status status;

    *p = NULL;
    status = side_pipeline_create(r->dev, &r->o, p);
    if (status != SIDE_OK) {
        assert_null(*p);
        return status;
    }
    return pulls ? pull(r, *p, s) : side_pipeline_run(*p, &stats);
}

/* ---------------------------------------------------------------- the nth of something fails */

enum fault { NO_HOST_MEMORY, DEVICE_ERROR, DEVICE_LOST, NO_DEVICE_MEMORY };

/* False: there are fewer than n. */
static bool attempt(const struct pair *pair, bool pulls, bool logs, enum fault fault, uint64_t n)
{
    static const side_status statuses[] = {SIDE_NO_MEMORY, SIDE_DEVICE_ERROR, SIDE_DEVICE_LOST, SIDE_NO_DEVICE_MEMORY};
    long live = mem_live();
    side_device *dev = rig_device("", n);
    t_rng rng = t_rng_make(n);
    side_log *log = NULL;
    side_pipeline *p;
    side_stream *s;
    struct rig r;
    bool fired;

    prepare(&r, pair);
    rig_build(&r, dev, &rng);
    T_OK(side_stream_create(dev, &s));
    if (logs)
        T_OK(side_log_create(dev, 0, &log));
    r.o.log = log;
    rig_reset(&r);
    uint64_t before = sim_calls(dev->context);
    if (fault == NO_HOST_MEMORY)
        mem_fail_at(n);
    else
        sim_fail_at(dev->context, n, statuses[fault]);
    side_status status = try_pass(&r, pulls, s, &p);
    if (status != SIDE_OK)
        check_error(status);
    if (pulls) { /* what we have queued on an item that was not done is ours to wait for */
        sim_fault_clear(dev->context);
        (void)side_stream_sync(s, 0);
    }
    side_status ended = side_pipeline_destroy(p);
    if (ended != SIDE_OK)
        T_FAIL("destroy is %s after %s", side_status_name(ended), side_status_name(status));
    if (fault == NO_HOST_MEMORY)
        fired = mem_fail_at(0) >= n;
    else
        fired = sim_calls(dev->context) - before >= n;
    sim_fault_clear(dev->context);
    if (status == SIDE_OK && (fault != DEVICE_LOST || !fired))
        RIG_IS_RIGHT(&r, r.n);
    if (!fired)
        T_OK(status);
    side_log_destroy(log);
    side_stream_destroy(s);
    rig_finish(&r);
    rig_close(dev);
    if (mem_live() != live)
        T_FAIL("%ld blocks leaked after failure %llu: %s", mem_live() - live, (unsigned long long)n,
               side_status_name(status));
    return fired;
}

static void fault_loop(enum fault fault, uint64_t least)
{
    uint64_t stride = (T_TSAN ? 5 : T_ASAN ? 2 : 1) * (fault == NO_DEVICE_MEMORY ? 3 : 1);

    rig_small_pool();
    for (int i = 0; i < PAIRS; i++)
        for (int how = 0; how < 3; how++) { /* push; pull, every other pair; push with a log, every fourth */
            if ((how == 1 && i % 2 != 0) || (how == 2 && i % 4 != 0))
                continue;
            uint64_t n = 1 + (uint64_t)how % stride;
            while (t_seed_note(n) && attempt(&pairs[i], how == 1, how == 2, fault, n))
                n += stride;
            printf("source %d, sink %d, way %d: %llu places\n", pairs[i].source, pairs[i].sink, how,
                   (unsigned long long)n);
            assert_true(n > least);
        }
}

T_TEST(every_allocation_fails)
{
    fault_loop(NO_HOST_MEMORY, 40);
}

T_TEST(every_device_call_fails)
{
    fault_loop(DEVICE_ERROR, 40);
}

T_TEST(device_memory_ends_at_every_call)
{
    fault_loop(NO_DEVICE_MEMORY, 40);
}

T_TEST(device_lost_at_every_call)
{
    fault_loop(DEVICE_LOST, 40);
}

T_TEST(open_runs_out_of_memory)
{
    long live = mem_live();

    for (unsigned long n = 1;; n++) {
        side_device *dev = NULL;
        mem_fail_at(n);
        side_status s = side_device_open("sim", &dev);
        bool fired = mem_fail_at(0) >= n;
        if (s != SIDE_OK) {
            check_error(s);
            assert_null(dev);
        }
        side_device_close(dev);
        assert_int_equal(mem_live(), live);
        if (!fired)
            break;
        assert_int_equal(s, SIDE_NO_MEMORY);
    }
}

/* ---------------------------------------------------------------- the device never finishes */

/* The objects stay: what the library keeps is no leak as long as somebody points to it. */
static struct kept {
    struct rig rig;
    side_pipeline *p;
    side_stream *s;
    struct kept *next;
} * kept;

/* False: nothing hung. */
static bool hang_at(const struct pair *pair, bool pulls, uint64_t n)
{
    struct kept *k = calloc(1, sizeof(*k));
    t_rng rng = t_rng_make(n);
    uint64_t t = os_now_ns();
    char keys[32];

    k->next = kept;
    kept = k;
    snprintf(keys, sizeof(keys), "hang=%llu", (unsigned long long)n);
    side_device *dev = rig_device(keys, n);
    prepare(&k->rig, pair);
    k->rig.n = 4;
    k->rig.o.timeout_s = 0.05;
    rig_build(&k->rig, dev, &rng);
    T_OK(side_stream_create(dev, &k->s));
    rig_reset(&k->rig);
    side_status status = try_pass(&k->rig, pulls, k->s, &k->p);
    if (status == SIDE_OK) {
        if (pair->sink != TO_NONE) /* looking at the trace would be the operation that hangs */
            RIG_IS_RIGHT(&k->rig, k->rig.n);
        T_OK(side_pipeline_destroy(k->p));
        side_stream_destroy(k->s);
        rig_finish(&k->rig);
        rig_close(dev);
        kept = k->next;
        free(k);
        return false;
    }
    if (status != SIDE_STUCK)
        T_FAIL("hang %llu: %s: %s", (unsigned long long)n, side_status_name(status), side_last_error()->message);
    check_error(status);
    T_STATUS(side_pipeline_destroy(k->p), SIDE_STUCK);
    T_STATUS(side_pipeline_destroy(k->p), SIDE_STUCK); /* the object is still there */
    if (os_now_ns() - t > UINT64_C(10000000000))
        T_FAIL("hang %llu took %.1f s", (unsigned long long)n, (double)(os_now_ns() - t) * 1e-9);
    return true;
}

T_TEST(device_hangs_at_every_operation)
{
    rig_small_pool();
    for (int i = 0; i < PAIRS; i++)
        for (int pulls = 0; pulls < 2; pulls++) {
            uint64_t n = 1;
            while (t_seed_note(n) && hang_at(&pairs[i], pulls, n))
                n += T_SANITIZED ? 2 : 1;
            assert_true(n > 8);
        }
}

/* ---------------------------------------------------------------- a done that fails, with work on streams that only the caller has */

/* Item 0 is done on one stream, item 1 on another; the nth device call of the second done fails. False: there are fewer. Nothing is waited for by us. */
static bool done_fails(enum rig_sink sink, uint64_t n, uint64_t seed)
{
    const struct pair pair = {FROM_PINNED, sink};
    side_device *dev = rig_device("", seed);
    t_rng rng = t_rng_make(n);
    side_stream *s[2];
    side_item item[2];
    side_pipeline *p;
    struct rig r;

    prepare(&r, &pair);
    r.uniform = true;
    r.cost_ns = 100000;
    rig_build(&r, dev, &rng);
    for (int i = 0; i < 2; i++)
        T_OK(side_stream_create(dev, &s[i]));
    T_OK(side_pipeline_create(dev, &r.o, &p));
    T_OK(side_pipeline_next(p, s[0], &item[0]));
    T_OK(rig_work(&r, s[0], &item[0]));
    T_OK(side_pipeline_done(p, &item[0], s[0]));
    T_OK(side_pipeline_next(p, s[1], &item[1]));
    T_OK(rig_work(&r, s[1], &item[1]));
    sim_fail_at(dev->context, n, SIDE_DEVICE_ERROR);
    side_status status = side_pipeline_done(p, &item[1], s[1]);
    sim_fault_clear(dev->context);
    if (status == SIDE_OK) /* nothing failed, or it was the call of another thread */
        status = side_pipeline_rewind(p);
    if (status != SIDE_OK) {
        T_STATUS(status, SIDE_DEVICE_ERROR);
        for (int i = 0; i < 2; i++) /* drained, not only asked to */
            T_OK(dev->ops->stream_query(s[i]->handle));
    }
    T_OK(side_pipeline_destroy(p));
    for (int i = 0; i < 2; i++)
        side_stream_destroy(s[i]);
    rig_finish(&r);
    rig_close(dev);
    return status != SIDE_OK;
}

T_TEST(done_that_fails_drains)
{
    static const enum rig_sink sinks[] = {TO_NONE, TO_PINNED, TO_PAGEABLE};

    rig_small_pool();
    for (int i = 0; i < 3; i++)
        for (uint64_t seed = 1; seed <= 8; seed++) {
            uint64_t n = 1;
            while (done_fails(sinks[i], n, seed))
                n++;
            assert_true(n > 2);
        }
}

/* The work of an item that was done hangs on a stream of the caller's; another item's done fails. That stream is none of the pipeline's, its fence tells. */
T_TEST(failure_while_a_stream_of_the_caller_s_hangs)
{
    static const struct pair pair = {FROM_PINNED, TO_NONE};
    side_device *dev = rig_device("hang=3", 1);
    static side_stream *s[2];
    static side_pipeline *p;
    t_rng rng = t_rng_make(1);
    static struct rig r;
    side_item item[2];

    prepare(&r, &pair);
    r.uniform = true;
    r.o.timeout_s = 0.05;
    rig_build(&r, dev, &rng);
    for (int i = 0; i < 2; i++)
        T_OK(side_stream_create(dev, &s[i]));
    T_OK(side_pipeline_create(dev, &r.o, &p));
    T_OK(side_pipeline_next(p, s[0], &item[0])); /* two copies are queued: the third operation is ours */
    T_OK(rig_work(&r, s[0], &item[0]));
    T_OK(side_pipeline_done(p, &item[0], s[0]));
    T_OK(side_pipeline_next(p, s[1], &item[1]));
    sim_fail_at(dev->context, 1, SIDE_DEVICE_ERROR);
    T_STATUS(side_pipeline_done(p, &item[1], s[1]), SIDE_STUCK);
    check_error(SIDE_STUCK);
    T_STATUS(side_pipeline_destroy(p), SIDE_STUCK);
}

/* ---------------------------------------------------------------- memory that is too small */

T_TEST(device_memory_too_small)
{
    uint32_t least = 8, most = 0;

    rig_small_pool();
    for (int i = 0; i < PAIRS; i++) {
        if (pairs[i].sink == TO_NONE)
            continue; /* the test itself would need device memory */
        for (size_t bytes = 1024; bytes < 24 * 1024; bytes += 1024) {
            char keys[40];
            side_pipeline_stats stats;
            t_rng rng = t_rng_make(bytes);
            side_pipeline *p = NULL;
            struct rig r;

            snprintf(keys, sizeof(keys), "memory=%zu", bytes);
            side_device *dev = rig_device(keys, bytes);
            prepare(&r, &pairs[i]);
            r.o.depth = 8;
            rig_build(&r, dev, &rng);
            rig_reset(&r);
            side_status s = side_pipeline_create(dev, &r.o, &p);
            if (s == SIDE_OK) {
                T_OK(side_pipeline_run(p, &stats));
                assert_true(stats.depth >= 2 && stats.depth <= 8 && stats.device_bytes <= bytes);
                assert_true(stats.depth == 8 || (stats.depth + 1) * (stats.device_bytes / stats.depth) > bytes);
                least = stats.depth < least ? stats.depth : least;
                most = stats.depth > most ? stats.depth : most;
                RIG_IS_RIGHT(&r, r.n);
                T_OK(side_pipeline_destroy(p));
            } else {
                assert_int_equal(s, SIDE_NO_DEVICE_MEMORY);
                check_error(s);
                assert_true(bytes < 2 * (768 + 768));
            }
            rig_finish(&r);
            rig_close(dev);
        }
    }
    assert_int_equal(least, 2);
    assert_int_equal(most, 8);
}

T_TEST(pinned_bytes_too_small)
{
    rig_small_pool();
    for (int i = 0; i < PAIRS; i++) {
        unsigned refused = 0, fewer = 0;
        for (size_t bytes = 256; bytes < 16384; bytes += 256) {
            side_device *dev = rig_device("", bytes);
            side_pipeline_stats stats;
            t_rng rng = t_rng_make(bytes);
            side_pipeline *p = NULL;
            struct rig r;

            prepare(&r, &pairs[i]);
            r.o.pinned_bytes = bytes;
            rig_build(&r, dev, &rng);
            rig_reset(&r);
            side_status s = side_pipeline_create(dev, &r.o, &p);
            if (s == SIDE_OK) {
                T_OK(side_pipeline_run(p, &stats));
                assert_true(stats.pinned_bytes <= bytes);
                fewer += stats.staging_slots == 2 || stats.staging_slots == 4;
                RIG_IS_RIGHT(&r, r.n);
                T_OK(side_pipeline_destroy(p));
            } else {
                assert_int_equal(s, SIDE_OVER_BUDGET);
                check_error(s);
                refused++;
            }
            rig_finish(&r);
            rig_close(dev);
        }
        bool staged = pairs[i].source != FROM_PINNED && pairs[i].source != FROM_PINNED_PIECES;
        assert_int_equal(refused > 0, staged);
        assert_int_equal(fewer > 0, staged);
    }
}

/* The budget of the device's pool is 1.4 MiB or so here: pieces get fewer and smaller; whole items, as callbacks need them, are refused. */
T_TEST(pinned_budget_too_small)
{
    setenv("LOCAL_WORLD_SIZE", "4096", 1);
    for (int i = 0; i < PAIRS; i++) {
        long live = mem_live();
        side_device *dev = rig_device("", 1);
        side_pipeline_stats stats;
        side_pool_stats pool;
        t_rng rng = t_rng_make(1);
        side_pool *device_pool;
        side_pipeline *p = NULL;
        struct rig r;

        T_OK(side_device_pool(dev, &device_pool));
        T_OK(side_pool_get_stats(device_pool, &pool));
        prepare(&r, &pairs[i]);
        r.n = 3;
        r.item_max = r.result_max = pool.budget_bytes;
        r.o.chunk_bytes = 0;
        rig_build(&r, dev, &rng);
        rig_reset(&r);
        side_status s = side_pipeline_create(dev, &r.o, &p);
        if (r.source == FROM_CALLBACK || r.sink == TO_CALLBACK) {
            assert_int_equal(s, SIDE_OVER_BUDGET);
            check_error(s);
        } else if (s != SIDE_OK) { /* what one end has taken is missing at the other */
            assert_int_equal(s, SIDE_OVER_BUDGET);
            check_error(s);
            assert_true(r.source != FROM_PINNED && r.source != FROM_PINNED_PIECES && r.sink != TO_NONE);
        } else {
            T_OK(side_pipeline_run(p, &stats));
            assert_true(stats.pinned_bytes <= pool.budget_bytes);
            RIG_IS_RIGHT(&r, r.n);
        }
        T_OK(side_pool_get_stats(device_pool, &pool));
        assert_true(pool.peak_pinned_bytes <= pool.budget_bytes);
        T_OK(side_pipeline_destroy(p));
        rig_finish(&r);
        rig_close(dev);
        assert_int_equal(mem_live(), live);
    }
}

T_TEST(pinning_refused)
{
    static const char *const keys[] = {"refuse_register=1", "refuse_pinning=1"};

    rig_small_pool();
    for (int i = 0; i < PAIRS; i++)
        for (int k = 0; k < 2; k++) {
            long live = mem_live();
            side_device *dev = rig_device(keys[k], 3);
            t_rng rng = t_rng_make(3);
            side_pipeline *p = NULL;
            struct rig r;

            prepare(&r, &pairs[i]);
            rig_build(&r, dev, &rng); /* what should be pinned is pageable here */
            rig_reset(&r);
            side_status s = side_pipeline_create(dev, &r.o, &p);
            if (k == 0) { /* pinned memory from the driver's own allocator */
                T_OK(s);
                T_OK(side_pipeline_run(p, NULL));
                RIG_IS_RIGHT(&r, r.n);
            } else {
                check_error(s);
            }
            T_OK(side_pipeline_destroy(p));
            rig_finish(&r);
            rig_close(dev);
            assert_int_equal(mem_live(), live);
        }
}

/* ---------------------------------------------------------------- callbacks that fail */

T_TEST(callbacks_fail_at_every_item)
{
    rig_small_pool();
    for (int i = 0; i < PAIRS; i++)
        for (int which = 0; which < 3; which++)
            for (uint64_t item = 0; item < 6; item++) {
                long live = mem_live();
                side_device *dev = rig_device("", item + 1);
                t_rng rng = t_rng_make(item);
                side_pipeline_stats stats;
                side_pipeline *p;
                struct rig r;

                prepare(&r, &pairs[i]);
                r.uniform = true; /* no result is empty */
                *(which == 0 ? &r.source_stop : which == 1 ? &r.compute_stop : &r.sink_stop) = item;
                rig_build(&r, dev, &rng);
                rig_reset(&r);
                T_OK(side_pipeline_create(dev, &r.o, &p));
                side_status s = side_pipeline_run(p, &stats);
                if ((which == 0 && r.source != FROM_CALLBACK) || (which == 2 && r.sink != TO_CALLBACK)) {
                    T_OK(s);
                } else {
                    T_STATUS(s, SIDE_CALLBACK);
                    assert_int_equal(side_last_error()->os_errno, 77);
                    check_error(s);
                    assert_true(stats.items <= (which == 2 ? 6 : item));
                    T_STATUS(side_pipeline_run(p, NULL), SIDE_CALLBACK); /* broken for good */
                    T_STATUS(side_pipeline_rewind(p), SIDE_CALLBACK);
                }
                T_OK(side_pipeline_destroy(p));
                rig_finish(&r);
                rig_close(dev);
                assert_int_equal(mem_live(), live);
            }
}

/* ---------------------------------------------------------------- files */

enum file_fault { SHORT_AND_EINTR, FAIL_AT, END_AT };
static enum file_fault file_fault;
static atomic_ulong file_calls;
static unsigned long file_fault_at;

static bool file_is_bad(void)
{
    return file_fault != SHORT_AND_EINTR && atomic_fetch_add(&file_calls, 1) + 1 == file_fault_at;
}

static ssize_t scripted_pread(int fd, void *data, size_t bytes, off_t offset)
{
    if (file_is_bad()) {
        errno = EIO;
        return file_fault == END_AT ? 0 : -1;
    }
    unsigned long n = atomic_fetch_add(&file_calls, file_fault == SHORT_AND_EINTR);
    if (file_fault == SHORT_AND_EINTR && n % 3 == 0) {
        errno = EINTR;
        return -1;
    }
    return pread(fd, data, file_fault == SHORT_AND_EINTR && bytes > 7 ? 1 + n % 7 : bytes, offset);
}

static ssize_t scripted_pwrite(int fd, const void *data, size_t bytes, off_t offset)
{
    if (file_is_bad()) {
        errno = ENOSPC;
        return file_fault == END_AT ? 0 : -1;
    }
    unsigned long n = atomic_fetch_add(&file_calls, file_fault == SHORT_AND_EINTR);
    if (file_fault == SHORT_AND_EINTR && n % 3 == 0) {
        errno = EINTR;
        return -1;
    }
    return pwrite(fd, data, file_fault == SHORT_AND_EINTR && bytes > 7 ? 1 + n % 7 : bytes, offset);
}

/* False: there were fewer calls. */
static bool file_attempt(bool reads, enum file_fault fault, unsigned long at)
{
    static const struct pair both = {FROM_FILE, TO_FILE};
    long live = mem_live();
    side_device *dev = rig_device("", at + 1);
    t_rng rng = t_rng_make(at);
    side_pipeline *p;
    struct rig r;

    prepare(&r, &both);
    rig_build(&r, dev, &rng);
    rig_reset(&r);
    T_OK(side_pipeline_create(dev, &r.o, &p));
    file_fault = fault;
    file_fault_at = at;
    atomic_store(&file_calls, 0);
    if (reads)
        os_test_pread = scripted_pread;
    else
        os_test_pwrite = scripted_pwrite;
    side_status s = side_pipeline_run(p, NULL);
    os_test_pread = NULL;
    os_test_pwrite = NULL;
    bool fired = fault != SHORT_AND_EINTR && atomic_load(&file_calls) >= at;
    if (fired) {
        T_STATUS(s, SIDE_IO);
        check_error(s);
        if (fault == FAIL_AT || !reads)
            assert_int_equal(side_last_error()->os_errno, reads ? EIO : ENOSPC);
    } else {
        T_OK(s);
        RIG_IS_RIGHT(&r, r.n);
    }
    T_OK(side_pipeline_destroy(p));
    rig_finish(&r);
    rig_close(dev);
    assert_int_equal(mem_live(), live);
    return fired;
}

T_TEST(files_fail_at_every_call)
{
    rig_small_pool();
    for (int reads = 0; reads < 2; reads++)
        for (int fault = FAIL_AT; fault <= END_AT; fault++) {
            unsigned long n = 1;
            while (file_attempt(reads, (enum file_fault)fault, n))
                n++;
            assert_true(n > 6);
        }
}

T_TEST(short_transfers_and_interrupts_are_continued)
{
    rig_small_pool();
    for (unsigned long i = 0; i < 10; i++) {
        file_attempt(true, SHORT_AND_EINTR, i);
        file_attempt(false, SHORT_AND_EINTR, i);
    }
}

/* The file is shorter than the options say. */
T_TEST(file_ends_early)
{
    static const struct pair from_file = {FROM_FILE, TO_PINNED};

    rig_small_pool();
    for (uint64_t cut = 1; cut < 3000; cut += 97) {
        side_device *dev = rig_device("", cut);
        t_rng rng = t_rng_make(1);
        side_pipeline *p;
        struct rig r;

        prepare(&r, &from_file);
        rig_build(&r, dev, &rng);
        assert_int_equal(ftruncate(r.in_fd, (off_t)(r.in_offset + r.o.source.length - cut)), 0);
        T_OK(side_pipeline_create(dev, &r.o, &p));
        T_STATUS(side_pipeline_run(p, NULL), SIDE_IO);
        check_error(SIDE_IO);
        T_OK(side_pipeline_destroy(p));
        rig_finish(&r);
        rig_close(dev);
    }
}

T_MAIN(T_LONG(every_allocation_fails, 60), T_LONG(every_device_call_fails, 60),
       T_LONG(device_memory_ends_at_every_call, 60), T_LONG(device_lost_at_every_call, 60), T(open_runs_out_of_memory),
       T_LONG(device_hangs_at_every_operation, 60), T(done_that_fails_drains),
       T(failure_while_a_stream_of_the_caller_s_hangs), T(device_memory_too_small), T(pinned_bytes_too_small),
       T(pinned_budget_too_small), T(pinning_refused), T(callbacks_fail_at_every_item), T(files_fail_at_every_call),
       T(short_transfers_and_interrupts_are_continued), T(file_ends_early))
