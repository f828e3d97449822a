/* SPDX-License-Identifier: MIT
 *
 * The software device's memory, scripted faults and specs. */
#include "sim_help.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---------------------------------------------------------------- specs */

T_TEST(specs_that_do_not_parse_say_where)
{
    static const struct {
        const char *args, *says[3];
    } cases[] = {
        {"h300", {"'h300'", "character 5 ", "a100-pcie4"}},
        {"h200,sed=1", {"'sed'", "character 10 ", "refuse_pinning"}},
        {"h200,seed", {"seed", "character 14 ", "bad number"}},
        {"seed=", {"seed", "character 10 ", "bad number"}},
        {"seed=1,seed=-1", {"'-1'", "character 17 ", "bad number"}},
        {"seed=99999999999999999999", {"'99999999999999999999'", "character 10 ", "bad number"}},
        {"copy_engines=3", {"'3'", "character 18 ", "1 to 2"}},
        {"copy_engines=1 ", {"'1 '", "character 18 ", "1 to 2"}},
        {"h2d_gbps=0", {"'0'", "h2d_gbps", "0.001 to"}},
        {"h2d_gbps=1.2345", {"'1.2345'", "h2d_gbps", "3 decimals"}},
        {"h2d_gbps=1..2", {"'1..2'", "h2d_gbps", "3 decimals"}},
        {"memory=2X", {"'2X'", "memory", "K M G T"}},
        {"memory=2GB", {"'2GB'", "memory", "K M G T"}},
        {"memory=99999999T", {"memory", "character 12 ", "K M G T"}},
        {"fail_status=ok", {"'ok'", "fail_status", "device_error"}},
        {"fail_status=again", {"'again'", "fail_status", "lost"}},
        {"h200,", {"no key ''", "character 10 ", "copy_engines"}},
        {"h200,,seed=1", {"no key ''", "character 10 ", "copy_engines"}},
        {"seed=1,h200", {"'h200'", "character 12 ", "copy_engines"}},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        dev_context *c = NULL;
        T_STATUS(D.open(cases[i].args, &c), SIDE_INVALID);
        assert_null(c);
        for (int k = 0; k < 3; k++)
            if (strstr(side_last_error()->message, cases[i].says[k]) == NULL)
                T_FAIL("'%s': '%s' not in: %s", cases[i].args, cases[i].says[k], side_last_error()->message);
        assert_true(strlen(side_last_error()->message) < 319); /* not cut off */
    }
    assert_int_equal(mem_live(), 0);
}

T_TEST(specs_reopen_the_device)
{
    static const char *const specs[][2] = {
        {"", "sim:h200"},
        {"t4", "sim:t4"},
        {"seed=7", "sim:h200,seed=7"},
        {",seed=7", "sim:h200,seed=7"},
        {"gh200,copy_engines=1", "sim:gh200,copy_engines=1"},
        {"gh200,copy_engines=1,h2d_gbps=1.25,d2h_gbps=1.25,pageable_gbps=0.5", "sim:gh200"},
    };

    for (size_t i = 0; i < sizeof(specs) / sizeof(specs[0]); i++) {
        dev_context *c = open_sim(specs[i][0]);
        side_device_props p;
        T_OK(D.props(c, &p));
        assert_string_equal(p.spec, specs[i][1]);
        close_sim(c);
        c = open_sim(p.spec + strlen("sim:"));
        close_sim(c);
    }
    setenv("SIDESTREAM_SIM_SEED", "12x", 1);
    dev_context *c = NULL;
    T_STATUS(D.open("", &c), SIDE_INVALID);
    setenv("SIDESTREAM_SIM_SEED", "12", 1);
    close_sim(open_sim(""));
}

T_TEST(profiles_say_that_they_are_simulated)
{
    static const char *const names[] = {"h200", "a100-pcie4", "rtx4090", "t4", "gh200", "one-copy-engine"};
    char why[8] = "x";

    assert_int_equal(D.count(why, sizeof(why)), 1);
    assert_int_equal(D.abi, SIDE_DEVICE_ABI);
    assert_string_equal(D.kind, "sim");
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        dev_context *c = open_sim(names[i]);
        side_device_props p;
        side_link l;
        size_t free_bytes, total_bytes;
        T_OK(D.props(c, &p));
        assert_true(strncmp(p.name, "simulated ", 10) == 0);
        assert_true(p.simulated && p.kernels && p.can_register);
        assert_int_equal(p.copy_engines, strcmp(names[i], "one-copy-engine") == 0 ? 1 : 2);
        T_OK(D.link(c, &l));
        assert_string_equal(l.kind, strcmp(names[i], "gh200") == 0 ? "NVLink-C2C" : "PCIe");
        assert_true(l.peak_gbps > 10);
        T_OK(D.memory(c, &free_bytes, &total_bytes));
        assert_true(free_bytes == total_bytes && total_bytes == p.memory_bytes);
        close_sim(c);
    }
}

/* ---------------------------------------------------------------- memory */

T_TEST(device_memory_has_a_limit)
{
    dev_context *c = open_sim("memory=2M");
    size_t free_bytes, total_bytes;
    void *a = device_memory(c, 1 << 20), *b = NULL;

    assert_true((uintptr_t)a % 256 == 0);
    T_STATUS(D.alloc(c, (1 << 20) + 1, &b), SIDE_NO_DEVICE_MEMORY);
    assert_null(b);
    assert_non_null(strstr(side_last_error()->message, "1048577"));
    assert_non_null(strstr(side_last_error()->message, "1048576 of 2097152"));
    b = device_memory(c, 1 << 20);
    T_OK(D.memory(c, &free_bytes, &total_bytes));
    assert_int_equal(free_bytes, 0);
    D.free(c, a);
    D.free(c, NULL);
    T_OK(D.memory(c, &free_bytes, &total_bytes));
    assert_int_equal(free_bytes, 1 << 20);
    close_sim(c); /* b goes with the context */
    assert_int_equal(mem_live(), 0);
}

static size_t resident_bytes(void)
{
    FILE *f = fopen("/proc/self/statm", "r");
    unsigned long size = 0, resident = 0;

    assert_non_null(f);
    assert_int_equal(fscanf(f, "%lu %lu", &size, &resident), 2);
    fclose(f);
    return resident * (size_t)sysconf(_SC_PAGESIZE);
}

T_TEST(large_device_memory_costs_what_is_written)
{
    dev_context *c = open_sim("");
    size_t bytes = (size_t)64 << 30, before = resident_bytes();
    unsigned char *p = device_memory(c, bytes);
    unsigned char first = p[0];

    assert_true(first >= 0xc1 && first <= 0xd8);
    for (size_t at = 0; at < bytes; at += (size_t)1 << 30)
        assert_int_equal(p[at + 12345], first);
    assert_int_equal(p[bytes - 1], first);
    p[5] = 1;
    assert_int_equal(p[5 + (16 << 20)], first);
    if (!T_SANITIZED)
        assert_true(resident_bytes() - before < (size_t)128 << 20);
    D.free(c, p);
    close_sim(c);
}

T_TEST(new_memory_is_never_zero)
{
    dev_context *c = open_seed("", 3);
    unsigned char *p = device_memory(c, 4097);

    for (int i = 0; i < 4097; i++)
        assert_true(p[i] >= 0xc1 && p[i] <= 0xd8);
    close_sim(c);
}

static int warnings;

static void count_warnings(void *user, side_level level, const char *component, const char *message)
{
    (void)user;
    (void)component;
    (void)message;
    warnings += level == SIDE_LEVEL_WARN;
}

/* Until the seed leaves the copy queued; then frees under it. Small memory, and mapped, which takes long to poison. */
static void free_under_copy(size_t bytes, bool check)
{
    const uint64_t seeds = bytes < 1 << 20 ? 50 : 10;
    bool queued = false;

    for (uint64_t seed = 1; seed <= seeds; seed++) {
        dev_context *c = open_seed(check ? "check=1" : "check=0", seed);
        dev_stream *s = make_stream(c);
        unsigned char *device = device_memory(c, bytes), *keep = device_memory(c, 16), *host = host_memory(c, 16);
        size_t free_bytes, total_bytes;
        T_OK(D.set(s, keep, 3, 16));
        T_OK(D.copy(s, SIDE_COPY_D2H, host, device, 16));
        T_OK(D.set(s, device, 3, 16));
        uint64_t before = sim_violations(c);
        D.free(c, device);
        T_OK(D.memory(c, &free_bytes, &total_bytes));
        assert_int_equal(total_bytes - free_bytes, 16); /* gone at once */
        bool caught = sim_violations(c) > before;
        sync_stream(c, s);
        if (host[0] == 0xdb) {
            queued = true; /* the late read shows */
            assert_int_equal(caught, check);
        }
        D.stream_destroy(s);
        close_sim(c);
        assert_int_equal(mem_live(), 0);
    }
    assert_true(queued);
}

T_TEST(freeing_under_queued_work_shows)
{
    side_log_callback(count_warnings, NULL, SIDE_LEVEL_WARN);
    free_under_copy(64, false);
    free_under_copy((size_t)33 << 20, false);
    assert_int_equal(warnings, 0);
    free_under_copy(64, true);
    free_under_copy((size_t)33 << 20, true);
    assert_true(warnings > 0);
}

T_TEST(what_a_copy_touches_must_be_of_its_kind)
{
    dev_context *c = open_sim("");
    dev_stream *s = make_stream(c);
    char *device = device_memory(c, 64), *host = host_memory(c, 64);
    side_piece bad[2] = {{device, host, 8}, {device + 60, host + 8, 8}};
    side_op op = SIDE_OP_INIT;

    T_STATUS(D.copy(s, SIDE_COPY_H2D, host, host, 8), SIDE_INVALID);
    T_STATUS(D.copy(s, SIDE_COPY_H2D, device, device, 8), SIDE_INVALID);
    T_STATUS(D.copy(s, SIDE_COPY_H2D, device, host, 65), SIDE_INVALID);
    T_STATUS(D.copy(s, SIDE_COPY_D2H, host, host, 8), SIDE_INVALID);
    T_STATUS(D.copy(s, SIDE_COPY_D2D, device, host, 8), SIDE_INVALID);
    T_STATUS(D.copy_blocks(s, SIDE_COPY_H2D, bad, 2, SIDE_PATH_BATCH), SIDE_INVALID);
    assert_non_null(strstr(side_last_error()->message, "piece 1"));
    T_STATUS(D.set(s, device + 60, 0, 8), SIDE_INVALID);
    op.id = SIDE_OP_AFFINE;
    op.dim[0] = 16;
    op.in[0] = device;
    op.out = host;
    T_STATUS(D.op(s, &op), SIDE_INVALID);
    op.dim[0] = 17;
    op.out = device;
    T_STATUS(D.op(s, &op), SIDE_INVALID);
    T_OK(D.copy(s, SIDE_COPY_H2D, device, host, 0));
    T_OK(D.copy_blocks(s, SIDE_COPY_H2D, bad, 0, SIDE_PATH_BATCH));
    T_OK(D.copy(s, SIDE_COPY_D2D, device, device + 32, 32));
    sync_stream(c, s);
    D.stream_destroy(s);
    close_sim(c);
}

T_TEST(registering)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    dev_context *c = open_sim("pageable_gbps=1,h2d_gbps=10,copy_latency_ns=0"), *other = open_sim("");
    dev_stream *s = make_stream(c);
    char *map = mmap(NULL, 4 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *device = device_memory(c, 2 * page);
    side_memory_kind kind;

    assert_true(map != MAP_FAILED);
    munmap(map + 3 * page, page);
    T_STATUS(D.host_register(c, map + 1, page, false), SIDE_INVALID);
    T_STATUS(D.host_register(c, map + 2 * page, 2 * page, false), SIDE_DEVICE_ERROR); /* not mapped */
    T_OK(D.host_register(c, map, page, false));
    T_STATUS(D.host_register(c, map, page, false), SIDE_DEVICE_ERROR);
    assert_int_equal(side_last_error()->device_code, 712);
    T_STATUS(D.host_register(c, map, 2 * page, false), SIDE_DEVICE_ERROR);
    T_OK(D.host_register(c, map + 2 * page, page, true));
    T_STATUS(D.host_register(c, map + page, 2 * page, false), SIDE_DEVICE_ERROR);
    T_OK(D.memory_kind(c, map + page - 1, &kind));
    assert_int_equal(kind, SIDE_MEMORY_PINNED);
    T_OK(D.memory_kind(c, map + page, &kind));
    assert_int_equal(kind, SIDE_MEMORY_PAGEABLE);
    T_OK(D.memory_kind(other, map, &kind));
    assert_int_equal(kind, SIDE_MEMORY_PAGEABLE);
    T_OK(D.memory_kind(c, device + 1, &kind));
    assert_int_equal(kind, SIDE_MEMORY_DEVICE);
    T_STATUS(D.copy(s, SIDE_COPY_D2H, map + 2 * page, device, 8), SIDE_INVALID); /* read-only */

    T_OK(D.copy(s, SIDE_COPY_H2D, device, map, 2 * page)); /* half of it pageable: synchronous */
    assert_int_equal(D.now(c), 2 * page);
    T_OK(D.host_register(c, map + page, page, false));
    T_OK(D.copy(s, SIDE_COPY_H2D, device, map, 2 * page)); /* over the seam of two registrations */
    assert_int_equal(D.now(c), 2 * page);
    sync_stream(c, s);
    T_STATUS(D.host_unregister(c, map + 1), SIDE_DEVICE_ERROR);
    assert_int_equal(side_last_error()->device_code, 713);
    for (size_t i = 0; i < 3; i++)
        T_OK(D.host_unregister(c, map + i * page));
    T_STATUS(D.host_unregister(c, map), SIDE_DEVICE_ERROR);
    munmap(map, 3 * page);
    D.stream_destroy(s);
    close_sim(c);
    close_sim(other);
}

T_TEST(many_ranges)
{
    enum { N = 3000 };
    static void *p[N];
    dev_context *c = open_sim("");
    t_rng rng = t_rng_make(1);
    side_memory_kind kind;

    for (int i = 0; i < N; i++)
        p[i] = i % 3 == 0 ? host_memory(c, 100) : device_memory(c, 100);
    for (int i = N - 1; i > 0; i--) {
        int k = (int)t_rng_below(&rng, (uint64_t)i + 1);
        void *t = p[i];
        p[i] = p[k];
        p[k] = t;
    }
    for (int i = 0; i < N; i++) {
        T_OK(D.memory_kind(c, (char *)p[i] + 99, &kind));
        if (kind == SIDE_MEMORY_PINNED)
            D.host_free(c, p[i]);
        else
            D.free(c, p[i]);
        T_OK(D.memory_kind(c, p[i], &kind));
        assert_int_equal(kind, SIDE_MEMORY_PAGEABLE);
    }
    assert_int_equal(sim_violations(c), 0);
    D.free(c, &kind); /* not ours */
    assert_int_equal(sim_violations(c), 1);
    close_sim(c);
    assert_int_equal(mem_live(), 0);
}

/* ---------------------------------------------------------------- faults */

static void bump(void *user)
{
    ++*(int *)user;
}

/* Every call that can fail, with clean-up; returns the first failure. */
static side_status scenario(dev_context *c)
{
    dev_stream *s = NULL;
    dev_event *e = NULL, *f = NULL;
    void *device = NULL, *host = NULL;
    side_piece piece;
    side_op op = spin(10);
    side_memory_kind kind;
    bool capturing;
    int calls = 0;
    double ns;
    side_status st = D.alloc(c, 64, &device);

    st = st != SIDE_OK ? st : D.host_alloc(c, 64, &host);
    st = st != SIDE_OK ? st : D.memory_kind(c, host, &kind);
    st = st != SIDE_OK ? st : D.stream_create(c, &s);
    st = st != SIDE_OK ? st : D.event_create(c, true, &e);
    st = st != SIDE_OK ? st : D.event_create(c, true, &f);
    st = st != SIDE_OK ? st : D.event_record(e, s);
    st = st != SIDE_OK ? st : D.copy(s, SIDE_COPY_H2D, device, host, 64);
    piece = (side_piece){device, host, 64};
    for (int path = SIDE_PATH_LOOP; path <= SIDE_PATH_GATHER; path++)
        st = st != SIDE_OK ? st : D.copy_blocks(s, SIDE_COPY_H2D, &piece, 1, (side_path)path);
    piece = (side_piece){host, device, 64};
    st = st != SIDE_OK ? st : D.copy_blocks(s, SIDE_COPY_D2H, &piece, 1, SIDE_PATH_PACK);
    st = st != SIDE_OK ? st : D.set(s, device, 0, 64);
    st = st != SIDE_OK ? st : D.op(s, &op);
    st = st != SIDE_OK ? st : D.host_fn(s, bump, &calls, 0);
    st = st != SIDE_OK ? st : D.stream_wait(s, e);
    st = st != SIDE_OK ? st : D.event_record(f, s);
    st = st != SIDE_OK ? st : D.event_wait(f, UINT64_MAX);
    st = st != SIDE_OK ? st : D.event_elapsed(e, f, &ns);
    st = st != SIDE_OK ? st : D.stream_is_capturing(s, &capturing);
    st = st != SIDE_OK ? st : D.stream_query(s);
    if (st == SIDE_OK)
        assert_int_equal(calls, 1);
    else if (s != NULL) /* `calls` is about to go */
        while (D.stream_query(s) == SIDE_AGAIN)
            ;
    D.event_destroy(e);
    D.event_destroy(f);
    D.stream_destroy(s);
    D.host_free(c, host);
    D.free(c, device);
    return st;
}

T_TEST(each_call_can_fail)
{
    uint64_t n = 0;
    side_status st = SIDE_DEVICE_ERROR;

    while (st != SIDE_OK) {
        dev_context *c = open_sim("");
        sim_fail_at(c, ++n, SIDE_DEVICE_ERROR);
        st = scenario(c);
        if (st != SIDE_OK) {
            assert_int_equal(st, SIDE_DEVICE_ERROR);
            assert_non_null(strstr(side_last_error()->message, "scripted"));
            assert_true(strncmp(side_last_error()->where, "sim.", 4) == 0);
            assert_true(sim_calls(c) >= n);
            T_OK(scenario(c)); /* it fails once */
        }
        close_sim(c);
        assert_int_equal(mem_live(), 0);
    }
    assert_int_equal(n, 22);
}

T_TEST(each_allocation_can_fail)
{
    for (unsigned long n = 1;; n++) {
        dev_context *c = NULL;
        mem_fail_at(n);
        side_status st = D.open("", &c);
        if (st == SIDE_OK)
            st = scenario(c);
        mem_fail_at(0);
        if (c != NULL)
            close_sim(c);
        assert_int_equal(mem_live(), 0);
        if (st == SIDE_OK)
            break;
        assert_int_equal(st, SIDE_NO_MEMORY);
        assert_true(n < 100);
    }
}

T_TEST(the_nth_call_fails_as_the_spec_says)
{
    dev_context *c = open_sim("fail=2,fail_status=no_device_memory");
    void *p = NULL;

    T_OK(D.alloc(c, 16, &p));
    T_STATUS(D.alloc(c, 16, &p), SIDE_NO_DEVICE_MEMORY);
    assert_string_equal(side_last_error()->where, "sim.alloc");
    T_OK(D.alloc(c, 16, &p));
    close_sim(c);
    c = open_sim("fail=1");
    sim_fault_clear(c);
    T_OK(D.alloc(c, 16, &p));
    close_sim(c);
    c = open_sim("fail=1,fail_status=LOST");
    T_STATUS(D.alloc(c, 16, &p), SIDE_DEVICE_LOST);
    T_STATUS(D.alloc(c, 16, &p), SIDE_DEVICE_LOST); /* for good */
    close_sim(c);
}

T_TEST(a_lost_device_stays_lost)
{
    T_FOR_SEEDS (seed, 20) {
        dev_context *c = open_seed("", seed);
        dev_stream *s = make_stream(c);
        dev_event *e = make_event(c);
        unsigned char *device = device_memory(c, 16), *host = host_memory(c, 16);
        int calls = 0;
        T_OK(D.host_fn(s, bump, &calls, 0));
        T_OK(D.set(s, device, 5, 16));
        T_OK(D.event_record(e, s));
        sim_fail_at(c, 1, SIDE_DEVICE_LOST);
        T_STATUS(D.event_wait(e, UINT64_MAX), SIDE_DEVICE_LOST);
        T_STATUS(D.event_wait(e, 10), SIDE_DEVICE_LOST);
        T_STATUS(D.event_query(e), SIDE_DEVICE_LOST);
        T_STATUS(D.copy(s, SIDE_COPY_H2D, device, host, 16), SIDE_DEVICE_LOST);
        assert_int_equal(calls, 0);
        assert_true(device[0] != 5);
        D.free(c, device);
        D.host_free(c, host);
        D.event_destroy(e);
        D.stream_destroy(s);
        close_sim(c);
        assert_int_equal(mem_live(), 0);
    }
    dev_context *c = open_sim("lose=3");
    dev_stream *s = make_stream(c);
    T_OK(D.stream_query(s));
    T_STATUS(D.stream_query(s), SIDE_DEVICE_LOST);
    T_STATUS(D.stream_query(s), SIDE_DEVICE_LOST);
    D.stream_destroy(s);
    close_sim(c);
}

/* A thread that waits for a host function on another thread learns of the loss. */
struct lost_wait {
    dev_event *e;
    side_status got;
};

static void *wait_lost(void *arg)
{
    struct lost_wait *w = arg;

    w->got = D.event_wait(w->e, UINT64_MAX);
    return NULL;
}

struct gate {
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    bool entered, open;
};

static void gate_fn(void *user)
{
    struct gate *g = user;

    pthread_mutex_lock(&g->mutex);
    g->entered = true;
    pthread_cond_broadcast(&g->cond);
    while (!g->open)
        pthread_cond_wait(&g->cond, &g->mutex);
    pthread_mutex_unlock(&g->mutex);
}

T_TEST(the_lock_is_free_while_a_host_function_runs)
{
    dev_context *c = open_sim("");
    dev_stream *s = make_stream(c), *other = make_stream(c);
    dev_event *e = make_event(c);
    struct gate g = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false, false};
    struct lost_wait w[2] = {{e, SIDE_OK}, {e, SIDE_OK}};
    pthread_t thread[2];
    side_op op = spin(5);

    T_OK(D.host_fn(s, gate_fn, &g, 10));
    T_OK(D.op(s, &op));
    T_OK(D.event_record(e, s));
    for (int i = 0; i < 2; i++)
        pthread_create(&thread[i], NULL, wait_lost, &w[i]);
    pthread_mutex_lock(&g.mutex);
    while (!g.entered)
        pthread_cond_wait(&g.cond, &g.mutex);
    pthread_mutex_unlock(&g.mutex);
    T_OK(D.op(other, &op));
    sync_stream(c, other);
    sim_fail_at(c, 1, SIDE_DEVICE_LOST);
    T_STATUS(D.stream_query(other), SIDE_DEVICE_LOST);
    pthread_mutex_lock(&g.mutex);
    g.open = true;
    pthread_cond_broadcast(&g.cond);
    pthread_mutex_unlock(&g.mutex);
    for (int i = 0; i < 2; i++) {
        pthread_join(thread[i], NULL);
        assert_int_equal(w[i].got, SIDE_DEVICE_LOST);
    }
    D.event_destroy(e);
    D.stream_destroy(s);
    D.stream_destroy(other);
    close_sim(c);
}

T_TEST(a_hung_operation_hangs_nothing_else)
{
    T_FOR_SEEDS (seed, 20) {
        dev_context *c = open_seed("hang=2,query_ns=3", seed);
        dev_stream *s = make_stream(c), *free_stream = make_stream(c), *behind = make_stream(c);
        dev_event *before = make_event(c), *after = make_event(c);
        unsigned char *device = device_memory(c, 16), host[16];
        side_op op = spin(100);
        int calls = 0;
        T_OK(D.op(s, &op));
        T_OK(D.event_record(before, s));
        T_OK(D.set(s, device, 5, 16)); /* the second */
        T_OK(D.event_record(after, s));
        T_OK(D.stream_wait(behind, after));
        T_OK(D.host_fn(behind, bump, &calls, 0));
        T_OK(D.op(free_stream, &op));
        sync_stream(c, free_stream);
        T_OK(D.event_wait(before, UINT64_MAX));
        uint64_t now = D.now(c);
        assert_int_equal(D.event_wait(after, UINT64_MAX), SIDE_AGAIN);
        assert_int_equal(D.now(c), now);
        assert_int_equal(D.event_wait(after, 5000000000), SIDE_AGAIN);
        assert_int_equal(D.now(c), now + 5000000000);
        assert_int_equal(D.stream_query(behind), SIDE_AGAIN);
        assert_int_equal(D.event_query(after), SIDE_AGAIN);
        T_OK(D.copy(behind, SIDE_COPY_D2H, host, device, 16)); /* pageable: would wait for ever */
        assert_int_equal(calls, 0);
        assert_true(device[0] != 5);
        D.event_destroy(before);
        D.event_destroy(after);
        D.stream_destroy(s);
        D.stream_destroy(free_stream);
        D.stream_destroy(behind);
        close_sim(c);
        assert_int_equal(mem_live(), 0);
    }
}

T_TEST(pinning_can_be_refused)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *map = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    dev_context *c = open_sim("refuse_register=1");
    side_device_props p;
    void *host = NULL;

    T_STATUS(D.host_register(c, map, page, false), SIDE_DEVICE_ERROR);
    T_OK(D.props(c, &p));
    assert_false(p.can_register);
    T_OK(D.host_alloc(c, page, &host));
    D.host_free(c, host);
    close_sim(c);
    c = open_sim("refuse_pinning=1");
    T_STATUS(D.host_register(c, map, page, false), SIDE_DEVICE_ERROR);
    T_STATUS(D.host_alloc(c, page, &host), SIDE_DEVICE_ERROR);
    close_sim(c);
    munmap(map, page);
}

/* Without kernels, and into a graph, there are the driver's own copies alone. */
T_TEST(paths_can_be_missing)
{
    for (int how = 0; how < 3; how++) {
        dev_context *c = open_sim(how == 0 ? "kernels=0" : "");
        dev_stream *s = make_stream(c);
        char *device = device_memory(c, 64), *host = host_memory(c, 64);
        const side_piece in = {device, host, 64}, out = {host, device, 64};
        const side_status status = how < 2 ? SIDE_UNSUPPORTED : SIDE_OK;

        sim_capture(s, how == 1);
        T_OK(D.copy_blocks(s, SIDE_COPY_H2D, &in, 1, SIDE_PATH_LOOP));
        T_OK(D.copy_blocks(s, SIDE_COPY_H2D, &in, 1, SIDE_PATH_BATCH));
        T_STATUS(D.copy_blocks(s, SIDE_COPY_H2D, &in, 1, SIDE_PATH_GATHER), status);
        T_STATUS(D.copy_blocks(s, SIDE_COPY_D2H, &out, 1, SIDE_PATH_PACK), status);
        T_STATUS(D.copy_blocks(s, SIDE_COPY_H2D, &in, 1, SIDE_PATH_PACK), SIDE_UNSUPPORTED);
        sync_stream(c, s);
        D.stream_destroy(s);
        close_sim(c);
    }
}

T_TEST(kernels_can_be_missing)
{
    dev_context *c = open_sim("kernels=0");
    dev_stream *s = make_stream(c), *wrapped = NULL;
    side_device_props p;
    side_op op = spin(1);

    T_STATUS(D.op(s, &op), SIDE_UNSUPPORTED);
    T_OK(D.props(c, &p));
    assert_false(p.kernels);
    T_STATUS(D.stream_wrap(c, &op, &wrapped), SIDE_INVALID);
    T_OK(D.stream_wrap(c, NULL, &wrapped));
    assert_null(D.stream_native(wrapped));
    D.stream_destroy(wrapped);
    D.stream_destroy(s);
    close_sim(c);
}

T_MAIN(T(specs_that_do_not_parse_say_where), T(specs_reopen_the_device), T(profiles_say_that_they_are_simulated),
       T(device_memory_has_a_limit), T(large_device_memory_costs_what_is_written), T(new_memory_is_never_zero),
       T(freeing_under_queued_work_shows), T(what_a_copy_touches_must_be_of_its_kind), T(registering), T(many_ranges),
       T(each_call_can_fail), T(each_allocation_can_fail), T(the_nth_call_fails_as_the_spec_says),
       T(a_lost_device_stays_lost), T(the_lock_is_free_while_a_host_function_runs),
       T(a_hung_operation_hangs_nothing_else), T(pinning_can_be_refused), T(paths_can_be_missing),
       T(kernels_can_be_missing))
