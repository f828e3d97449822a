/* SPDX-License-Identifier: MIT
 *
 * Loads that cannot be: the nth allocation, device call or read fails, the device is lost or hangs, files shrink or change, memory is short, somebody cancels. After
 * each: an error with a message, or every byte right; nothing leaked, and nothing in flight: the caller's memory is freed at once, so that ASan and the device's own
 * check would see a late copy. */
#include "load_help.h"

#include <errno.h>
#include <sys/stat.h>

enum fault { NO_HOST_MEMORY, DEVICE_ERROR, DEVICE_LOST, NO_DEVICE_MEMORY, READ_ERROR };

static const struct way {
    bool file;
    side_memory_kind where;
    uint32_t flags;
    bool own; /* slices, some to the caller's memory */
} ways[] = {
    {true, SIDE_MEMORY_DEVICE, 0, false},
    {true, SIDE_MEMORY_DEVICE, SIDE_LOAD_GIVEN, false},
    {false, SIDE_MEMORY_DEVICE, SIDE_LOAD_CHECKSUM, false},
    {true, SIDE_MEMORY_DEVICE, SIDE_LOAD_IN_ORDER, true},
    {true, SIDE_MEMORY_PAGEABLE, SIDE_LOAD_CHECKSUM, false},
    {false, SIDE_MEMORY_PINNED, SIDE_LOAD_GIVEN, true},
};
enum { WAYS = sizeof(ways) / sizeof(ways[0]) };

static void prepare(struct load_rig *r, side_device *dev, const struct way *way, uint64_t seed)
{
    t_rng rng = t_rng_make(seed);

    load_rig_init(r, dev, way->file, 9, &rng);
    r->o.where = way->where;
    r->o.flags = way->flags;
    r->o.timeout_s = 5;
    r->o.backend = SIDE_LOAD_PREAD;
    if (way->own)
        load_parts(r, 12, true, &rng);
}

static void check_error(side_status status)
{
    if (status >= 0)
        T_FAIL("%s is no error", side_status_name(status));
    if (side_last_error()->message[0] == '\0' || side_last_error()->status != status)
        T_FAIL("%s, but the detail says %s: '%s'", side_status_name(status),
               side_status_name(side_last_error()->status), side_last_error()->message);
}

/* Start to join. */
static side_status try_load(struct load_rig *r)
{
    side_status s = side_load_start(r->dev, r->ck, &r->o, &r->load);

    if (s != SIDE_OK) {
        assert_null(r->load);
        return s;
    }
    if ((r->o.flags & SIDE_LOAD_GIVEN) != 0)
        s = load_give(r);
    if (s == SIDE_OK)
        return side_load_join(r->load, NULL);
    check_error(s);
    side_load_cancel(r->load);
    side_status end = side_load_join(r->load, NULL);
    return end != SIDE_OK ? end : s; /* it may have been done: no part had bytes */
}

/* ---------------------------------------------------------------- the nth of something fails */

static atomic_ulong reads;
static unsigned long bad_read;

static bool is_read(enum io_call call)
{
    return call == IO_PREAD || call == IO_PREAD_NOWAIT || call == IO_PREAD_DIRECT;
}

static int fail_read(enum io_call call, int fd, uint64_t offset, size_t *bytes)
{
    (void)fd;
    (void)offset;
    (void)bytes;
    return is_read(call) && atomic_fetch_add(&reads, 1) + 1 == bad_read ? -EIO : 0;
}

static void arm(struct load_rig *r, enum fault fault, uint64_t n)
{
    static const side_status statuses[] = {SIDE_NO_MEMORY, SIDE_DEVICE_ERROR, SIDE_DEVICE_LOST, SIDE_NO_DEVICE_MEMORY};

    if (fault == NO_HOST_MEMORY) {
        mem_fail_at(n);
    } else if (fault == READ_ERROR) {
        atomic_store(&reads, 0);
        bad_read = r->fail_call = (unsigned)n;
        io_test = fail_read;
    } else {
        sim_fail_at(r->dev->context, n, statuses[fault]);
    }
}

static bool disarm(struct load_rig *r, enum fault fault, uint64_t n, uint64_t calls)
{
    io_test = NULL;
    sim_fault_clear(r->dev->context);
    r->fail_call = 0;
    if (fault == NO_HOST_MEMORY)
        return mem_fail_at(0) >= n;
    if (fault == READ_ERROR)
        return atomic_load(&reads) >= n || atomic_load(&r->calls) >= n;
    return sim_calls(r->dev->context) - calls >= n;
}

/* False: there are fewer than n. */
static bool attempt(const struct way *way, enum fault fault, uint64_t n)
{
    long live = mem_live();
    side_device *dev = load_device("", n);
    t_rng rng = t_rng_make(n);
    struct load_rig r;

    prepare(&r, dev, way, 3); /* the same file each time */
    uint64_t calls = sim_calls(dev->context);
    arm(&r, fault, n);
    side_status status = try_load(&r);
    if (status != SIDE_OK)
        check_error(status);
    if (status != SIDE_OK && r.load != NULL) { /* no part is handed out any more */
        side_status again = side_load_wait(r.load, 0, NULL);
        if (again >= 0)
            T_FAIL("%s, then wait says %s", side_status_name(status), side_status_name(again));
    }
    bool fired = disarm(&r, fault, n, calls);
    if (status == SIDE_OK && (fault != DEVICE_LOST || !fired))
        T_OK(load_look(&r, &rng));
    if (!fired)
        T_OK(status);
    if (fired && fault == READ_ERROR)
        assert_true(status == SIDE_IO || status == SIDE_CALLBACK);
    load_rig_finish(&r);
    load_close(dev);
    if (mem_live() != live)
        T_FAIL("%ld blocks leaked after failure %llu: %s", mem_live() - live, (unsigned long long)n,
               side_status_name(status));
    return fired;
}

static void fault_loop(enum fault fault, uint64_t least)
{
    const uint64_t stride = T_TSAN ? 5 : T_ASAN ? 3 : 1;

    for (int i = 0; i < WAYS; i++) {
        if ((fault == DEVICE_ERROR || fault == DEVICE_LOST || fault == NO_DEVICE_MEMORY) &&
            ways[i].where != SIDE_MEMORY_DEVICE)
            continue;
        uint64_t n = 1;
        while (t_seed_note(n) && attempt(&ways[i], fault, n))
            n += stride;
        printf("way %d: %llu places\n", i, (unsigned long long)n);
        assert_true(n > least);
    }
}

T_TEST(every_allocation_fails)
{
    fault_loop(NO_HOST_MEMORY, 8);
}

T_TEST(every_device_call_fails)
{
    fault_loop(DEVICE_ERROR, 20);
}

T_TEST(device_memory_ends_at_every_call)
{
    fault_loop(NO_DEVICE_MEMORY, 20);
}

T_TEST(device_lost_at_every_call)
{
    fault_loop(DEVICE_LOST, 20);
}

T_TEST(every_read_fails)
{
    fault_loop(READ_ERROR, 5);
}

/* ---------------------------------------------------------------- files that change */

static struct load_rig *disturbed;
static unsigned long disturb_at;
static enum { SHRINK, GROW, TOUCH, CANCEL } disturbance;

static void disturb(void)
{
    struct stat st;
    struct timespec times[2] = {{.tv_sec = 1000}, {.tv_sec = 1000}};

    if (atomic_fetch_add(&reads, 1) + 1 != disturb_at)
        return;
    if (disturbance == CANCEL) {
        side_load_cancel(disturbed->load);
        return;
    }
    assert_int_equal(stat(disturbed->path, &st), 0);
    if (disturbance == TOUCH)
        assert_int_equal(utimensat(AT_FDCWD, disturbed->path, times, 0), 0);
    else
        assert_int_equal(truncate(disturbed->path, disturbance == SHRINK ? st.st_size / 2 : st.st_size + 1), 0);
}

static int disturb_read(enum io_call call, int fd, uint64_t offset, size_t *bytes)
{
    (void)fd;
    (void)offset;
    (void)bytes;
    if (is_read(call))
        disturb();
    return 0;
}

/* At each read in turn. */
static void disturb_all(const struct way *way, int what, side_status want, uint64_t seed)
{
    for (unsigned long n = 1;; n++) {
        side_device *dev = load_device("", seed + n);
        struct load_rig r;

        prepare(&r, dev, way, 3);
        disturbed = &r;
        disturb_at = n;
        disturbance = what;
        atomic_store(&reads, 0);
        io_test = disturb_read;
        side_status s = side_load_start(dev, r.ck, &r.o, &r.load);
        T_OK(s);
        if ((way->flags & SIDE_LOAD_GIVEN) != 0)
            s = load_give(&r);
        s = side_load_join(r.load, NULL);
        io_test = NULL;
        bool fired = atomic_load(&reads) >= n;
        if (s != (fired ? want : SIDE_OK) && !(what == CANCEL && s == SIDE_OK)) /* the last one comes too late */
            T_FAIL("read %lu disturbed: %s: %s", n, side_status_name(s), side_last_error()->message);
        if (s != SIDE_OK) {
            check_error(s);
            T_STATUS(side_load_wait(r.load, 0, NULL), s);
            T_STATUS(side_load_query(r.load, 1), s);
        }
        load_rig_finish(&r);
        load_close(dev);
        if (!fired)
            break;
        assert_true(n < 1000);
    }
}

T_TEST(files_that_change)
{
    for (int i = 0; i < WAYS; i++)
        if (ways[i].file)
            for (int what = SHRINK; what <= TOUCH; what++)
                disturb_all(&ways[i], what, SIDE_IO, 100 * (uint64_t)i);
}

/* start may be cancelled before it has said where the load is: not from a callback. */
T_TEST(cancel_at_every_read)
{
    for (int i = 0; i < WAYS; i++) {
        if ((ways[i].flags & SIDE_LOAD_GIVEN) != 0 || !ways[i].file)
            continue;
        for (int k = 0; k < 12; k++) {
            side_device *dev = load_device("", (uint64_t)k);
            struct load_rig r;
            side_load_stats stats;

            prepare(&r, dev, &ways[i], 3);
            T_OK(side_load_start(dev, r.ck, &r.o, &r.load));
            while (k > 0) { /* k pieces in, or all */
                T_OK(side_load_get_stats(r.load, &stats));
                if (stats.read_bytes >= stats.bytes * (uint64_t)k / 12)
                    break;
            }
            side_load_cancel(r.load);
            side_status s = side_load_join(r.load, NULL);
            if (s != SIDE_OK && s != SIDE_CANCELLED)
                T_FAIL("%s: %s", side_status_name(s), side_last_error()->message);
            load_rig_finish(&r);
            load_close(dev);
        }
    }
}

/* Many threads wait, ask and look at once, one cancels: each is told the same, and nobody hangs. */
struct waiter {
    struct load_rig *r;
    side_stream *stream;
    uint64_t seed;
    side_status worst;
};

static void *wait_for_all(void *waiter)
{
    struct waiter *w = waiter;
    t_rng rng = t_rng_make(w->seed);
    const size_t count = side_load_count(w->r->load), first = t_rng_below(&rng, count);
    side_load_stats stats;

    for (size_t k = 0; k < count && w->worst == SIDE_OK; k++) {
        const size_t part = (first + k) % count;
        if (t_rng_chance(&rng, 8))
            T_OK(side_load_get_stats(w->r->load, &stats));
        w->worst = t_rng_chance(&rng, 4) ? side_load_query(w->r->load, part)
                                         : side_load_wait(w->r->load, part, t_rng_chance(&rng, 3) ? NULL : w->stream);
        if (w->worst == SIDE_AGAIN)
            w->worst = SIDE_OK;
    }
    if (w->worst == SIDE_OK)
        w->worst = side_load_wait(w->r->load, SIDE_LOAD_ALL, w->stream);
    return NULL;
}

T_TEST(waiters_on_many_threads)
{
    enum { WAITERS = 4 };

    T_FOR_SEEDS (seed, 60) {
        side_device *dev = load_device("", seed);
        t_rng rng = t_rng_make(seed);
        struct waiter w[WAITERS];
        pthread_t threads[WAITERS];
        struct load_rig r;
        const bool cancels = seed % 2 == 0;

        prepare(&r, dev, &ways[seed / 2 % 3], seed);
        T_OK(side_load_start(dev, r.ck, &r.o, &r.load));
        if ((r.o.flags & SIDE_LOAD_GIVEN) != 0)
            T_OK(load_give(&r));
        for (int i = 0; i < WAITERS; i++) {
            w[i] = (struct waiter){.r = &r, .seed = seed * WAITERS + (uint64_t)i};
            T_OK(side_stream_create(dev, &w[i].stream));
            assert_int_equal(pthread_create(&threads[i], NULL, wait_for_all, &w[i]), 0);
        }
        if (cancels)
            side_load_cancel(r.load);
        side_status s = side_load_join(r.load, NULL);
        for (int i = 0; i < WAITERS; i++) {
            assert_int_equal(pthread_join(threads[i], NULL), 0);
            if (w[i].worst != s && !(cancels && w[i].worst == SIDE_OK)) /* it may have had all before */
                T_FAIL("a waiter says %s, join %s", side_status_name(w[i].worst), side_status_name(s));
            T_OK(side_stream_sync(w[i].stream, 0));
            side_stream_destroy(w[i].stream);
        }
        if (s != SIDE_OK && !(cancels && s == SIDE_CANCELLED))
            T_FAIL("%s: %s", side_status_name(s), side_last_error()->message);
        if (s == SIDE_OK)
            T_OK(load_look(&r, &rng));
        load_rig_finish(&r);
        load_close(dev);
    }
}

/* ---------------------------------------------------------------- the device never finishes */

static struct kept {
    struct load_rig rig;
    struct kept *next;
} * kept; /* what the library keeps is no leak as long as somebody points to it */

static bool hang_at(const struct way *way, uint64_t n)
{
    struct kept *k = calloc(1, sizeof(*k));
    char keys[32];

    k->next = kept;
    kept = k;
    snprintf(keys, sizeof(keys), "hang=%llu", (unsigned long long)n);
    side_device *dev = load_device(keys, n);
    prepare(&k->rig, dev, way, 3);
    k->rig.o.timeout_s = 0.02;
    side_status s = try_load(&k->rig);
    if (s == SIDE_OK) {
        load_rig_finish(&k->rig);
        load_close(dev);
        kept = k->next;
        free(k);
        return false;
    }
    T_STATUS(s, SIDE_STUCK);
    check_error(s);
    T_STATUS(side_load_destroy(k->rig.load), SIDE_STUCK);
    T_STATUS(side_load_destroy(k->rig.load), SIDE_STUCK); /* the object is still there */
    return true;
}

T_TEST(device_hangs_at_every_operation)
{
    for (int i = 0; i < WAYS; i++) {
        if (ways[i].where != SIDE_MEMORY_DEVICE)
            continue;
        uint64_t n = 1;
        while (t_seed_note(n) && hang_at(&ways[i], n))
            n += T_SANITIZED ? 3 : 1;
        assert_true(n > 4);
    }
}

/* ---------------------------------------------------------------- memory that is short */

static void refused(struct load_rig *r, side_status want, const char *word)
{
    T_STATUS(side_load_start(r->dev, r->ck, &r->o, &r->load), want);
    assert_null(r->load);
    if (strstr(side_last_error()->message, word) == NULL)
        T_FAIL("'%s' says nothing of %s", side_last_error()->message, word);
    assert_int_equal(atomic_load(&r->calls), 0); /* before anything was read */
}

T_TEST(memory_is_short)
{
    side_device *dev = load_device("memory=8192", 1);
    t_rng rng = t_rng_make(5);
    struct load_rig r;
    side_load_stats s;

    load_rig_init(&r, dev, false, 30, &rng);
    refused(&r, SIDE_NO_DEVICE_MEMORY, "choose fewer");
    r.o.where = SIDE_MEMORY_PINNED;
    r.o.arena_bytes = 5000;
    refused(&r, SIDE_TOO_LARGE, "arena_bytes");
    load_rig_finish(&r);
    load_close(dev);

    dev = load_device("", 1);
    load_rig_init(&r, dev, false, 30, &rng);
    r.o.pinned_bytes = 4096;
    refused(&r, SIDE_OVER_BUDGET, "raise pinned_bytes");
    r.o.piece_bytes = 0; /* 4 MiB, which two slots of 64 KiB replace */
    r.o.pinned_bytes = 128 << 10;
    T_OK(side_load_start(dev, NULL, &r.o, &r.load));
    T_OK(side_load_join(r.load, &s));
    assert_int_equal(s.piece_bytes, 64 << 10);
    assert_int_equal(s.slots, 2);
    assert_int_equal(s.pinned_bytes, 128 << 10);
    T_OK(load_look(&r, &rng));
    load_rig_finish(&r);
    load_close(dev);
}

/* The pool has little left: fewer slots, smaller ones, at last an error that says what to do. */
T_TEST(pinned_memory_is_short)
{
    unsigned smaller = 0, none = 0;

    for (size_t leave = 0; leave < (size_t)2 << 20; leave += 96 << 10) {
        side_device *dev = load_device("", 1);
        t_rng rng = t_rng_make(5);
        struct load_rig r;
        side_pool *pool;
        side_pool_stats stats;
        side_load_stats s;
        void *rest = NULL;

        load_rig_init(&r, dev, false, 30, &rng);
        r.o.piece_bytes = 1 << 20;
        r.o.pinned_bytes = 0;
        T_OK(side_device_pool(dev, &pool));
        T_OK(side_pool_get_stats(pool, &stats));
        T_OK(side_pool_alloc(pool, (stats.budget_bytes - leave) / 4096 * 4096, &rest));
        side_status status = side_load_start(dev, NULL, &r.o, &r.load);
        if (status == SIDE_OK) {
            T_OK(side_load_join(r.load, &s));
            assert_true(s.pinned_bytes <= leave + 4096 && s.slots >= 2);
            smaller += s.piece_bytes < r.o.piece_bytes;
            T_OK(load_look(&r, &rng));
        } else {
            T_STATUS(status, SIDE_OVER_BUDGET);
            check_error(status);
            none++;
        }
        load_rig_finish(&r);
        T_OK(side_pool_free(pool, rest, NULL, 0));
        load_close(dev);
    }
    assert_true(smaller > 0 && none > 0);
}

T_MAIN(T_LONG(every_allocation_fails, 60), T_LONG(every_device_call_fails, 60),
       T_LONG(device_memory_ends_at_every_call, 60), T_LONG(device_lost_at_every_call, 60), T(every_read_fails),
       T(files_that_change), T(cancel_at_every_read), T(waiters_on_many_threads),
       T_LONG(device_hangs_at_every_operation, 60), T(memory_is_short), T(pinned_memory_is_short))
