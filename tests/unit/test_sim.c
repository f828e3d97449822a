/* SPDX-License-Identifier: MIT
 *
 * The software device, through its op table: virtual time, to the nanosecond. Effects: test_sim_effects.c. Faults, memory, specs:
 * test_sim_faults.c. */
#include "sim_help.h"

#include <pthread.h>

/* ---------------------------------------------------------------- lanes */

struct lanes {
    uint64_t n, depth, t, c, d; /* ns an item; d 0: no results */
    bool textbook;              /* copy i+1 queued after compute i, waiting for the compute stream's tail */
};

enum { LANE_BYTES = 64, MOST_DEPTH = 8 };

/* A ring of `depth` on each side of compute, as slots.c drives it. Costs come from sim_ns, or from the profile for the copies: rates of 1 GB/s
 * and no latency make bytes and ns the same. Returns the makespan. */
static uint64_t run_lanes(dev_context *c, const struct lanes *l)
{
    dev_stream *in = make_stream(c), *compute = make_stream(c), *out = make_stream(c);
    dev_event *filled[MOST_DEPTH], *drained[MOST_DEPTH], *result[MOST_DEPTH], *sent[MOST_DEPTH];
    size_t in_bytes = l->t, out_bytes = l->d;
    char *host = host_memory(c, in_bytes + out_bytes), *device = device_memory(c, MOST_DEPTH * (in_bytes + out_bytes));
    side_op op = spin(l->c);

    for (uint64_t k = 0; k < l->depth; k++) {
        filled[k] = make_event(c);
        drained[k] = make_event(c);
        result[k] = make_event(c);
        sent[k] = make_event(c);
    }
    uint64_t begin = D.now(c);
    for (uint64_t i = 0; i < l->n; i++) {
        uint64_t k = i % l->depth;
        char *slot = device + k * (in_bytes + out_bytes);
        T_OK(D.stream_wait(in, drained[k]));
        T_OK(D.copy(in, SIDE_COPY_H2D, slot, host, in_bytes));
        T_OK(D.event_record(filled[k], in));
        T_OK(D.stream_wait(compute, filled[k]));
        T_OK(D.stream_wait(compute, sent[k]));
        T_OK(D.op(compute, &op));
        T_OK(D.event_record(drained[k], compute));
        if (l->d > 0) {
            T_OK(D.event_record(result[k], compute));
            T_OK(D.stream_wait(out, result[k]));
            T_OK(D.copy(out, SIDE_COPY_D2H, host + in_bytes, slot + in_bytes, out_bytes));
            T_OK(D.event_record(sent[k], out));
        }
    }
    sync_stream(c, l->d > 0 ? out : compute);
    uint64_t end = D.now(c);
    for (uint64_t k = 0; k < l->depth; k++) {
        D.event_destroy(filled[k]);
        D.event_destroy(drained[k]);
        D.event_destroy(result[k]);
        D.event_destroy(sent[k]);
    }
    D.stream_destroy(in);
    D.stream_destroy(compute);
    D.stream_destroy(out);
    D.host_free(c, host);
    D.free(c, device);
    return end - begin;
}

static uint64_t most(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

T_TEST(makespans_are_exact)
{
    static const uint64_t costs[][3] = {{1000, 1000, 0},  {1000, 700, 0},   {333, 1001, 0}, {1000, 1000, 1000},
                                        {1000, 400, 700}, {300, 1000, 999}, {17, 23, 4096}, {1, 1000000, 1}};

    for (size_t i = 0; i < sizeof(costs) / sizeof(costs[0]); i++) {
        for (uint64_t depth = 2; depth <= 8; depth++) {
            for (uint64_t n = 1; n <= 33; n += 8) {
                struct lanes l = {n, depth, costs[i][0], costs[i][1], costs[i][2], false};
                dev_context *c = open_sim("copy_latency_ns=0,h2d_gbps=1,d2h_gbps=1");
                uint64_t bound = (n - 1) * most(most(l.t, l.c), l.d) + l.t + l.c + l.d;
                assert_int_equal(run_lanes(c, &l), bound);
                /* and once more on the same context: nothing lingers */
                assert_int_equal(run_lanes(c, &l), bound);
                close_sim(c);
            }
        }
    }
}

T_TEST(one_copy_engine_shares_the_lane)
{
    /* t + d on the copy engine are the bottleneck; queued far ahead, it never pauses but at the ends */
    struct lanes l = {16, 4, 1000, 500, 1000, false};
    dev_context *two = open_sim("copy_latency_ns=0,h2d_gbps=1,d2h_gbps=1");
    dev_context *one = open_sim("one-copy-engine,copy_latency_ns=0,h2d_gbps=1,d2h_gbps=1");
    uint64_t both = run_lanes(two, &l), shared = run_lanes(one, &l);

    assert_int_equal(both, 15 * 1000 + 2500);
    assert_true(shared >= 16 * 2000); /* the engine's work */
    assert_true(shared <= 16 * 2000 + 500 + 1000);
    close_sim(two);
    close_sim(one);
}

/* The lesson: a wait on a stream's tail covers what is queued so far. Same calls, other order. */
static uint64_t double_buffer(bool reordered, uint64_t n)
{
    enum { T = 1000, C = 1000 };
    dev_context *c = open_sim("copy_latency_ns=0,h2d_gbps=1");
    dev_stream *copy = make_stream(c), *compute = make_stream(c);
    dev_event *tail = make_event(c), *filled[2] = {make_event(c), make_event(c)};
    char *host = host_memory(c, T), *device = device_memory(c, 2 * (size_t)T);
    side_op op = spin(C);

    T_OK(D.copy(copy, SIDE_COPY_H2D, device, host, T));
    T_OK(D.event_record(filled[0], copy));
    for (uint64_t i = 0; i < n; i++) {
        for (int step = 0; step < 2; step++) {
            if ((step == 0) != reordered) {
                T_OK(D.stream_wait(compute, filled[i % 2]));
                T_OK(D.op(compute, &op));
            } else if (i + 1 < n) {
                T_OK(D.event_record(tail, compute)); /* as wait_stream does */
                T_OK(D.stream_wait(copy, tail));
                T_OK(D.copy(copy, SIDE_COPY_H2D, device + (i + 1) % 2 * T, host, T));
                T_OK(D.event_record(filled[(i + 1) % 2], copy));
            }
        }
    }
    sync_stream(c, compute);
    uint64_t end = D.now(c);
    D.event_destroy(tail);
    D.event_destroy(filled[0]);
    D.event_destroy(filled[1]);
    D.stream_destroy(copy);
    D.stream_destroy(compute);
    close_sim(c);
    return end;
}

T_TEST(textbook_order_is_serial_and_reordered_overlaps)
{
    assert_int_equal(double_buffer(false, 10), 10 * 2000);
    assert_int_equal(double_buffer(true, 10), 9 * 1000 + 2000);
}

/* ---------------------------------------------------------------- costs */

static uint64_t copy_ns(dev_context *c, side_copy_kind kind, size_t bytes)
{
    dev_stream *s = make_stream(c);
    char *host = host_memory(c, bytes), *device = device_memory(c, bytes);
    uint64_t begin = D.now(c);

    T_OK(kind == SIDE_COPY_H2D ? D.copy(s, kind, device, host, bytes) : D.copy(s, kind, host, device, bytes));
    assert_int_equal(D.now(c), begin); /* submitting is free */
    sync_stream(c, s);
    D.stream_destroy(s);
    D.host_free(c, host);
    D.free(c, device);
    return D.now(c) - begin;
}

T_TEST(costs_come_from_the_profile)
{
    dev_context *c = open_sim("");
    dev_stream *s = make_stream(c);
    float *m = device_memory(c, 3 * 64 * 64 * sizeof(float));
    side_op op = SIDE_OP_INIT;

    /* latency + bytes / 55.3 GB/s, rounded up: 7.4 and 39 GB/s */
    assert_int_equal(copy_ns(c, SIDE_COPY_H2D, 64 << 10), 7700 + 1186);
    assert_int_equal(copy_ns(c, SIDE_COPY_D2H, 1 << 20), 7700 + 18962);
    uint64_t at = D.now(c);
    op.id = SIDE_OP_MATMUL;
    op.in[0] = m;
    op.in[1] = m + 64 * 64;
    op.out = m + 2 * 64 * 64;
    op.dim[0] = op.dim[1] = op.dim[2] = 64;
    T_OK(D.op(s, &op));
    sync_stream(c, s);
    assert_int_equal(D.now(c) - at, 2500 + 11); /* 524288 / 50900 */
    op.sim_ns = 123;
    at = D.now(c);
    T_OK(D.op(s, &op));
    sync_stream(c, s);
    assert_int_equal(D.now(c) - at, 123);
    op = spin(77);
    at = D.now(c);
    T_OK(D.op(s, &op));
    T_OK(D.set(s, m, 1, 48000)); /* 4800 GB/s */
    sync_stream(c, s);
    assert_int_equal(D.now(c) - at, 77 + 2500 + 10);
    D.stream_destroy(s);
    close_sim(c);
}

T_TEST(batches_cost_one_latency_and_a_bit_a_piece)
{
    dev_context *c = open_sim("h2d_gbps=1,copy_latency_ns=1000,piece_ns=10");
    dev_stream *s = make_stream(c);
    char *host = host_memory(c, 300), *device = device_memory(c, 300);
    side_piece pieces[3] = {{device, host + 200, 100}, {device + 100, host, 100}, {device + 200, host + 100, 100}};

    memset(host, 'a', 100);
    memset(host + 100, 'b', 100);
    memset(host + 200, 'c', 100);
    T_OK(D.copy_blocks(s, SIDE_COPY_H2D, pieces, 3, SIDE_PATH_BATCH));
    memset(pieces, 0, sizeof(pieces)); /* the array may be reused */
    sync_stream(c, s);
    assert_int_equal(D.now(c), 1000 + 20 + 300);
    assert_int_equal(device[0], 'c');
    assert_int_equal(device[199], 'a');
    assert_int_equal(device[299], 'b');
    D.stream_destroy(s);
    close_sim(c);
}

/* What each path of three pieces costs: 100, 5000 and 100 bytes, the last two of which lie one behind another. */
T_TEST(each_path_has_its_price)
{
    static const struct {
        side_copy_kind kind;
        side_path path;
        uint64_t ns;
    } prices[] = {{SIDE_COPY_H2D, SIDE_PATH_LOOP, 3 * 1000 + 5200},
                  {SIDE_COPY_H2D, SIDE_PATH_BATCH, 1000 + 2 * 10 + 5200},
                  {SIDE_COPY_H2D, SIDE_PATH_GATHER, 7 + 5592}, /* 5200 / 0.93 */
                  {SIDE_COPY_D2H, SIDE_PATH_GATHER, 7 + 5592},
                  {SIDE_COPY_D2H, SIDE_PATH_PACK, 7 + 1000 + 5592 + 10}, /* two runs */
                  {SIDE_COPY_D2D, SIDE_PATH_LOOP, 3 * 7 + 2 * 2},        /* 4800 GB/s, read and written */
                  {SIDE_COPY_D2D, SIDE_PATH_GATHER, 7 + 4 * 16}};        /* four tiles */
    dev_context *c = open_sim("h2d_gbps=1,d2h_gbps=1,copy_latency_ns=1000,piece_ns=10,launch_ns=7,query_ns=1");
    dev_stream *s = make_stream(c);
    char *host = host_memory(c, 6000), *device = device_memory(c, 12000);

    for (size_t i = 0; i < sizeof(prices) / sizeof(prices[0]); i++) {
        char *to = prices[i].kind == SIDE_COPY_D2H ? host : device;
        const char *from = prices[i].kind == SIDE_COPY_H2D ? host : device + 6000;
        const side_piece pieces[3] = {{to, from, 100}, {to + 200, from + 200, 5000}, {to + 5200, from + 5200, 100}};
        const uint64_t at = D.now(c);
        T_OK(D.copy_blocks(s, prices[i].kind, pieces, 3, prices[i].path));
        sync_stream(c, s);
        if (D.now(c) - at != prices[i].ns)
            T_FAIL("%s, kind %d: %llu ns, not %llu", side_path_name(prices[i].path), (int)prices[i].kind,
                   (unsigned long long)(D.now(c) - at), (unsigned long long)prices[i].ns);
    }
    D.stream_destroy(s);
    close_sim(c);
}

/* Small blocks: what a gather is for. */
T_TEST(a_gather_runs_near_the_link_s_rate)
{
    enum { COUNT = 4096, BLOCK = 4096 };
    dev_context *c = open_sim("h200");
    dev_stream *s = make_stream(c);
    char *host = host_memory(c, COUNT * BLOCK), *device = device_memory(c, COUNT * BLOCK);
    static side_piece in[COUNT], out[COUNT];
    double gbps[SIDE_PATH_COUNT][2];

    for (size_t i = 0; i < COUNT; i++) {
        in[i] = (side_piece){device + i * BLOCK, host + (COUNT - 1 - i) * BLOCK, BLOCK};
        out[i] = (side_piece){host + i * BLOCK, device + (COUNT - 1 - i) * BLOCK, BLOCK};
    }
    for (int path = SIDE_PATH_LOOP; path < SIDE_PATH_COUNT; path++)
        for (int back = path == SIDE_PATH_PACK ? 1 : 0; back < 2; back++) {
            const uint64_t at = D.now(c);
            T_OK(D.copy_blocks(s, back ? SIDE_COPY_D2H : SIDE_COPY_H2D, back ? out : in, COUNT, (side_path)path));
            sync_stream(c, s);
            gbps[path][back] = (double)COUNT * BLOCK / (double)(D.now(c) - at);
        }
    assert_true(gbps[SIDE_PATH_LOOP][0] < 1 && gbps[SIDE_PATH_BATCH][0] < 10);
    assert_true(gbps[SIDE_PATH_GATHER][0] > 48 && gbps[SIDE_PATH_GATHER][0] < 55.3);
    assert_true(gbps[SIDE_PATH_PACK][1] > 48 && gbps[SIDE_PATH_PACK][1] < 55.3);
    D.stream_destroy(s);
    close_sim(c);
}

T_TEST(pageable_copies_are_synchronous)
{
    dev_context *c = open_sim("h2d_gbps=10,d2h_gbps=10,pageable_gbps=1,copy_latency_ns=5,query_ns=1");
    dev_stream *s = make_stream(c);
    char *device = device_memory(c, 1000), *pinned = host_memory(c, 1000), host[1000];
    side_op op = spin(100);

    memset(host, 1, sizeof(host));
    T_OK(D.op(s, &op));
    T_OK(D.copy(s, SIDE_COPY_H2D, device, host, sizeof(host)));
    assert_int_equal(D.now(c), 100 + 5 + 1000); /* the stream's earlier work, too */
    memset(host, 2, sizeof(host));
    T_OK(D.copy(s, SIDE_COPY_D2H, host, device, sizeof(host)));
    assert_int_equal(D.now(c), 100 + 2 * 1005);
    assert_int_equal(host[999], 1);
    T_OK(D.copy(s, SIDE_COPY_H2D, device, pinned, 1000));
    assert_int_equal(D.now(c), 100 + 2 * 1005); /* pinned: asynchronous */
    assert_int_equal(D.stream_query(s), SIDE_AGAIN);
    sync_stream(c, s);
    assert_int_equal(D.now(c), 100 + 2 * 1005 + 105);
    D.stream_destroy(s);
    close_sim(c);
}

/* ---------------------------------------------------------------- engines, events, clocks */

T_TEST(an_engine_takes_the_first_ready)
{
    dev_context *c = open_sim("launch_ns=0,copy_latency_ns=0,h2d_gbps=1");
    dev_stream *copy = make_stream(c), *late = make_stream(c), *early = make_stream(c);
    dev_event *filled = make_event(c), *a = make_event(c), *b = make_event(c);
    char *host = host_memory(c, 100), *device = device_memory(c, 100);
    side_op op = spin(500);
    double ns;

    T_OK(D.copy(copy, SIDE_COPY_H2D, device, host, 100));
    T_OK(D.event_record(filled, copy));
    T_OK(D.stream_wait(late, filled));
    T_OK(D.op(late, &op)); /* submitted first, ready at 100 */
    T_OK(D.event_record(a, late));
    T_OK(D.op(early, &op)); /* ready at 0 */
    T_OK(D.event_record(b, early));
    T_OK(D.event_wait(b, UINT64_MAX));
    assert_int_equal(D.now(c), 500);
    T_OK(D.event_wait(a, UINT64_MAX));
    assert_int_equal(D.now(c), 1000);
    T_OK(D.event_elapsed(b, a, &ns));
    assert_true(ns == 500.0);
    T_OK(D.event_elapsed(a, b, &ns));
    assert_true(ns == -500.0);
    /* ties by submission */
    T_OK(D.op(late, &op));
    T_OK(D.op(early, &op));
    T_OK(D.event_record(a, late));
    T_OK(D.event_wait(a, UINT64_MAX));
    assert_int_equal(D.now(c), 1500);
    D.event_destroy(filled);
    D.event_destroy(a);
    D.event_destroy(b);
    D.stream_destroy(copy);
    D.stream_destroy(late);
    D.stream_destroy(early);
    close_sim(c);
}

static void nothing(void *user)
{
    ++*(int *)user;
}

T_TEST(host_functions_hold_the_stream_alone)
{
    dev_context *c = open_sim("");
    dev_stream *a = make_stream(c), *b = make_stream(c);
    side_op op = spin(100);
    int calls = 0;

    T_OK(D.host_fn(a, nothing, &calls, 1000));
    T_OK(D.op(a, &op));
    T_OK(D.op(b, &op));
    sync_stream(c, b);
    assert_int_equal(D.now(c), 100);
    sync_stream(c, a);
    assert_int_equal(D.now(c), 1100);
    assert_int_equal(calls, 1);
    D.stream_destroy(a);
    D.stream_destroy(b);
    close_sim(c);
}

T_TEST(events_are_cuda_s)
{
    dev_context *c = open_sim("query_ns=10");
    dev_stream *a = make_stream(c), *b = make_stream(c);
    dev_event *e = make_event(c), *plain, *first = make_event(c);
    side_op op = spin(100), large = spin(1000);
    double ns;

    T_OK(D.event_create(c, false, &plain));
    T_OK(D.event_query(e)); /* never recorded counts as done */
    T_OK(D.event_wait(e, 0));
    T_OK(D.stream_wait(b, e));
    T_STATUS(D.event_elapsed(e, e, &ns), SIDE_STATE);
    T_OK(D.stream_query(b));

    T_OK(D.event_record(first, a));
    T_OK(D.op(a, &op));
    T_OK(D.event_record(e, a));
    T_OK(D.stream_wait(b, e)); /* captures the record at 100 */
    T_OK(D.op(a, &large));
    T_OK(D.event_record(e, a)); /* at 1100; on the compute engine before b's */
    T_OK(D.host_fn(b, nothing, &(int){0}, 7));
    T_OK(D.event_record(plain, b));
    T_STATUS(D.event_elapsed(first, e, &ns), SIDE_STATE); /* not done */
    T_OK(D.event_wait(plain, UINT64_MAX));
    assert_int_equal(D.now(c), 107);
    assert_int_equal(D.event_query(e), SIDE_AGAIN);
    assert_int_equal(D.event_wait(e, 50), SIDE_AGAIN);
    assert_int_equal(D.now(c), 107 + 10 + 50); /* the query's price and the time-out */
    T_OK(D.event_wait(e, 1000));
    T_OK(D.event_query(e));
    assert_int_equal(D.now(c), 1100);
    T_OK(D.event_elapsed(first, e, &ns));
    assert_true(ns == 1100.0);
    T_STATUS(D.event_elapsed(first, plain, &ns), SIDE_STATE);
    D.event_destroy(e);
    D.event_destroy(first);
    D.event_destroy(plain);
    D.stream_destroy(a);
    D.stream_destroy(b);
    D.event_destroy(NULL);
    D.stream_destroy(NULL);
    close_sim(c);
}

T_TEST(polling_ends)
{
    dev_context *c = open_sim("query_ns=250");
    dev_stream *s = make_stream(c);
    dev_event *e = make_event(c);
    side_op op = spin(1000);
    int polls = 0;

    T_OK(D.op(s, &op));
    T_OK(D.event_record(e, s));
    while (D.event_query(e) == SIDE_AGAIN)
        polls++;
    assert_int_equal(polls, 4);
    assert_int_equal(D.now(c), 1000);
    T_OK(D.op(s, &op));
    for (polls = 0; D.stream_query(s) == SIDE_AGAIN; polls++)
        ;
    assert_int_equal(polls, 4);
    T_OK(D.op(s, &op));
    T_OK(D.event_record(e, s));
    for (polls = 0; D.event_wait(e, 0) == SIDE_AGAIN; polls++)
        ;
    assert_int_equal(polls, 4);
    D.event_destroy(e);
    D.stream_destroy(s);
    close_sim(c);
}

struct clock_test {
    dev_context *c;
    dev_event *e;
};

static void *other_thread(void *arg)
{
    struct clock_test *t = arg;

    assert_int_equal(D.now(t->c), 0);
    D.clock_join(t->c, 300);
    D.clock_join(t->c, 200);
    assert_int_equal(D.now(t->c), 300);
    T_OK(D.event_wait(t->e, UINT64_MAX));
    assert_int_equal(D.now(t->c), 1000);
    return NULL;
}

T_TEST(each_thread_and_context_has_a_clock)
{
    struct clock_test t = {open_sim(""), NULL};
    dev_context *other = open_sim("");
    dev_stream *s = make_stream(t.c);
    side_op op = spin(1000);
    pthread_t thread;

    t.e = make_event(t.c);
    T_OK(D.op(s, &op));
    T_OK(D.event_record(t.e, s));
    pthread_create(&thread, NULL, other_thread, &t);
    pthread_join(thread, NULL);
    assert_int_equal(D.now(t.c), 0);
    D.clock_join(other, 5);
    assert_int_equal(D.now(t.c), 0);
    assert_int_equal(D.now(other), 5);
    T_OK(D.event_wait(t.e, UINT64_MAX));
    assert_int_equal(D.now(t.c), 1000);
    D.event_destroy(t.e);
    D.stream_destroy(s);
    close_sim(t.c);
    close_sim(other);
}

/* ---------------------------------------------------------------- against a slow and plain model */

/* The reference knows the whole program, with submission times, and steps from instant to instant. The device learns it call by call, with waits and
 * queries in between. */
enum { STREAMS = 4, EVENTS = 5, MOST_STEPS = 120, NO_STEP = -1 };

struct step {
    int engine; /* SIM_ENGINES of model.h: 0 compute, 1 H2D, 2 D2H, 3 none */
    uint64_t cost, submitted, ready, end;
    int before, awaited; /* steps */
    bool done;
};

struct program {
    struct step step[MOST_STEPS];
    int steps, tail[STREAMS], record[EVENTS];
};

static int add_step(struct program *p, int stream, int engine, uint64_t cost, uint64_t now, int awaited)
{
    p->step[p->steps] = (struct step){engine, cost, now, 0, 0, p->tail[stream], awaited, false};
    p->tail[stream] = p->steps;
    return p->steps++;
}

/* Time at which step i is ready, or UINT64_MAX where that is not known yet. */
static uint64_t ready_at(const struct program *p, int i)
{
    const struct step *s = &p->step[i];
    uint64_t ready = s->submitted;
    int needs[2] = {s->before, s->awaited};

    for (int k = 0; k < 2; k++) {
        if (needs[k] == NO_STEP)
            continue;
        if (!p->step[needs[k]].done)
            return UINT64_MAX;
        ready = most(ready, p->step[needs[k]].end);
    }
    return ready;
}

static void solve(struct program *p)
{
    uint64_t free_at[4] = {0};

    for (int left = p->steps; left > 0; left--) {
        int best = NO_STEP;
        uint64_t best_start = 0, best_ready = 0;
        for (int i = 0; i < p->steps; i++) {
            uint64_t ready = p->step[i].done ? UINT64_MAX : ready_at(p, i);
            if (ready == UINT64_MAX)
                continue;
            int engine = p->step[i].engine;
            uint64_t start = engine == 3 ? ready : most(ready, free_at[engine]);
            bool instant = engine == 3, best_instant = best != NO_STEP && p->step[best].engine == 3;
            if (best == NO_STEP || start < best_start || (start == best_start && instant && !best_instant) ||
                (start == best_start && instant == best_instant && ready < best_ready)) {
                best = i;
                best_start = start;
                best_ready = ready;
            }
        }
        struct step *s = &p->step[best];
        s->end = best_start + s->cost;
        s->done = true;
        if (s->engine != 3)
            free_at[s->engine] = s->end;
    }
}

/* One random call, noted in the program. Returns the event that was waited for or found done, or -1. */
static int random_call(dev_context *c, struct program *p, t_rng *rng, dev_stream **stream, dev_event **event,
                       char *device, char *host)
{
    int s = (int)t_rng_below(rng, STREAMS), e = (int)t_rng_below(rng, EVENTS);
    uint64_t now = D.now(c), ns = 1 + t_rng_below(rng, 50);
    side_op op = spin(ns);

    switch (t_rng_below(rng, 12)) {
    case 0:
    case 1:
    case 2:
        T_OK(D.op(stream[s], &op));
        add_step(p, s, 0, ns, now, NO_STEP);
        break;
    case 3:
    case 4:
        T_OK(D.copy(stream[s], SIDE_COPY_H2D, device, host, ns));
        add_step(p, s, 1, ns, now, NO_STEP);
        break;
    case 5:
        T_OK(D.copy(stream[s], SIDE_COPY_D2H, host, device, ns));
        add_step(p, s, 2, ns, now, NO_STEP);
        break;
    case 6:
    case 7:
        T_OK(D.event_record(event[e], stream[s]));
        p->record[e] = add_step(p, s, 3, 0, now, NO_STEP);
        break;
    case 8:
    case 9:
        T_OK(D.stream_wait(stream[s], event[e]));
        if (p->record[e] != NO_STEP)
            add_step(p, s, 3, 0, now, p->record[e]);
        break;
    case 10: T_OK(D.event_wait(event[e], UINT64_MAX)); return e;
    default:
        if (D.event_query(event[e]) == SIDE_OK)
            return e;
    }
    return -1;
}

static void compare_once(uint64_t seed)
{
    dev_context *c = open_seed("copy_latency_ns=0,h2d_gbps=1,d2h_gbps=1,query_ns=7", seed);
    t_rng rng = t_rng_make(seed);
    struct program p = {.steps = 0};
    dev_stream *stream[STREAMS];
    dev_event *event[EVENTS], *zero = make_event(c);
    char *device = device_memory(c, 4096), *host = host_memory(c, 4096);
    struct {
        int step;
        uint64_t at;
    } seen[MOST_STEPS];
    int seens = 0;

    for (int i = 0; i < STREAMS; i++) {
        stream[i] = make_stream(c);
        p.tail[i] = NO_STEP;
    }
    for (int i = 0; i < EVENTS; i++) {
        event[i] = make_event(c);
        p.record[i] = NO_STEP;
    }
    T_OK(D.event_record(zero, stream[0]));
    add_step(&p, 0, 3, 0, 0, NO_STEP);
    while (p.steps < MOST_STEPS - 1 && seens < MOST_STEPS) {
        int e = random_call(c, &p, &rng, stream, event, device, host);
        if (e >= 0 && p.record[e] != NO_STEP) {
            seen[seens].step = p.record[e];
            seen[seens++].at = D.now(c);
        }
    }
    solve(&p);
    for (int i = 0; i < seens; i++)
        assert_true(p.step[seen[i].step].end <= seen[i].at);
    for (int i = 0; i < EVENTS; i++) {
        double ns;
        T_OK(D.event_wait(event[i], UINT64_MAX));
        if (p.record[i] == NO_STEP)
            continue;
        T_OK(D.event_elapsed(zero, event[i], &ns));
        assert_int_equal((uint64_t)ns, p.step[p.record[i]].end);
    }
    for (int i = 0; i < STREAMS; i++) {
        sync_stream(c, stream[i]);
        assert_true(p.tail[i] == NO_STEP || D.now(c) >= p.step[p.tail[i]].end);
        D.stream_destroy(stream[i]);
    }
    for (int i = 0; i < EVENTS; i++)
        D.event_destroy(event[i]);
    D.event_destroy(zero);
    close_sim(c);
}

T_TEST(lazy_times_equal_a_plain_model)
{
    T_FOR_SEEDS (seed, 2000)
        compare_once(seed);
}

T_MAIN(T(makespans_are_exact), T(one_copy_engine_shares_the_lane), T(textbook_order_is_serial_and_reordered_overlaps),
       T(costs_come_from_the_profile), T(batches_cost_one_latency_and_a_bit_a_piece), T(each_path_has_its_price),
       T(a_gather_runs_near_the_link_s_rate), T(pageable_copies_are_synchronous), T(an_engine_takes_the_first_ready),
       T(host_functions_hold_the_stream_alone), T(events_are_cuda_s), T(polling_ends),
       T(each_thread_and_context_has_a_clock), T(lazy_times_equal_a_plain_model))
