/* SPDX-License-Identifier: MIT
 *
 * The software device's effects: every order that the declared dependencies allow happens for some seed, no other ever does, and forgotten waits
 * show. */
#include "sim_help.h"

#include <pthread.h>

/* ---------------------------------------------------------------- orders */

enum { MOST_OPS = 48 };

/* Host functions that note the order in which they ran. */
struct trace {
    int ran[MOST_OPS], count;
};

struct mark {
    struct trace *trace;
    int number;
};

static void note(void *user)
{
    struct mark *m = user;

    m->trace->ran[m->trace->count++] = m->number;
}

T_TEST(every_order_of_a_small_graph_and_no_other)
{
    /* a0 a1 on one stream, b0 b1 b2 on another, b1 after a0, a1 after b0:
     * {a0,b0} in either order, then a1 anywhere among b1 b2, or one of a1 / b1 still to come ... */
    enum { A0, A1, B0, B1, B2, OPS };
    bool seen[100000] = {false};
    int orders = 0, all = 0;

    for (int code = 0; code < 100000; code++) { /* permutations as five digits; count those allowed */
        int at[OPS] = {-1, -1, -1, -1, -1}, rest = code, valid = 1;
        for (int i = OPS - 1; i >= 0; i--, rest /= 10) {
            if (rest % 10 >= OPS || at[rest % 10] >= 0)
                valid = 0;
            else
                at[rest % 10] = i;
        }
        all += valid && at[A0] < at[A1] && at[B0] < at[B1] && at[B1] < at[B2] && at[A0] < at[B1] && at[B0] < at[A1];
    }
    for (uint64_t seed = 1; seed <= 2000; seed++) {
        dev_context *c = open_seed("", seed);
        dev_stream *a = make_stream(c), *b = make_stream(c);
        dev_event *ea = make_event(c), *eb = make_event(c);
        struct trace t = {.count = 0};
        struct mark m[OPS];
        for (int i = 0; i < OPS; i++)
            m[i] = (struct mark){&t, i};
        T_OK(D.host_fn(b, note, &m[B0], 0));
        T_OK(D.event_record(eb, b));
        T_OK(D.host_fn(a, note, &m[A0], 0));
        T_OK(D.event_record(ea, a));
        T_OK(D.stream_wait(a, eb));
        T_OK(D.stream_wait(b, ea));
        T_OK(D.host_fn(a, note, &m[A1], 0));
        T_OK(D.host_fn(b, note, &m[B1], 0));
        T_OK(D.host_fn(b, note, &m[B2], 0));
        sync_stream(c, a);
        sync_stream(c, b);
        assert_int_equal(t.count, OPS);
        int at[OPS], code = 0;
        for (int i = 0; i < OPS; i++) {
            at[t.ran[i]] = i;
            code = code * 10 + t.ran[i];
        }
        assert_true(at[A0] < at[A1] && at[B0] < at[B1] && at[B1] < at[B2] && at[A0] < at[B1] && at[B0] < at[A1]);
        orders += !seen[code];
        seen[code] = true;
        D.event_destroy(ea);
        D.event_destroy(eb);
        D.stream_destroy(a);
        D.stream_destroy(b);
        close_sim(c);
    }
    assert_int_equal(all, 6);
    assert_int_equal(orders, all);
}

/* Random programs: whatever runs, everything it depends on ran before. Dependencies as sets of operations. */
static void random_program(uint64_t seed)
{
    enum { STREAMS = 4, EVENTS = 4 };
    dev_context *c = open_seed("", seed);
    t_rng rng = t_rng_make(seed);
    dev_stream *stream[STREAMS];
    dev_event *event[EVENTS];
    uint64_t past[STREAMS] = {0}, recorded[EVENTS] = {0}, needs[MOST_OPS];
    struct trace t = {.count = 0};
    struct mark m[MOST_OPS];

    for (int i = 0; i < STREAMS; i++)
        stream[i] = make_stream(c);
    for (int i = 0; i < EVENTS; i++)
        event[i] = make_event(c);
    for (int n = 0; n < MOST_OPS;) {
        uint64_t s = t_rng_below(&rng, STREAMS), e = t_rng_below(&rng, EVENTS);
        switch (t_rng_below(&rng, 8)) {
        case 0:
        case 1:
            T_OK(D.event_record(event[e], stream[s]));
            recorded[e] = past[s];
            break;
        case 2:
        case 3:
            T_OK(D.stream_wait(stream[s], event[e]));
            past[s] |= recorded[e];
            break;
        case 4: /* events and streams may go at any time */
            D.event_destroy(event[e]);
            event[e] = make_event(c);
            recorded[e] = 0;
            break;
        case 5:
            T_OK(D.event_wait(event[e], UINT64_MAX));
            for (int i = 0; i < t.count; i++)
                recorded[e] &= ~(UINT64_C(1) << t.ran[i]);
            assert_true(recorded[e] == 0);
            break;
        default:
            m[n] = (struct mark){&t, n};
            needs[n] = past[s];
            T_OK(D.host_fn(stream[s], note, &m[n], t_rng_below(&rng, 100)));
            past[s] |= UINT64_C(1) << n++;
        }
    }
    for (int i = 0; i < STREAMS; i++) {
        sync_stream(c, stream[i]);
        D.stream_destroy(stream[i]);
    }
    assert_int_equal(t.count, MOST_OPS);
    uint64_t ran = 0;
    for (int i = 0; i < t.count; i++) {
        assert_true((needs[t.ran[i]] & ~ran) == 0);
        ran |= UINT64_C(1) << t.ran[i];
    }
    for (int i = 0; i < EVENTS; i++)
        D.event_destroy(event[i]);
    assert_int_equal(sim_pending(c), 0);
    close_sim(c);
    assert_int_equal(mem_live(), 0);
}

T_TEST(random_programs_keep_their_dependencies)
{
    T_FOR_SEEDS (seed, 1000)
        random_program(seed);
}

T_TEST(one_seed_one_order)
{
    int first[16];

    for (int round = 0; round < 2; round++) {
        dev_context *c = open_seed("", 42);
        dev_stream *s[4];
        struct trace t = {.count = 0};
        struct mark m[16];
        for (int i = 0; i < 4; i++)
            s[i] = make_stream(c);
        for (int i = 0; i < 16; i++) {
            m[i] = (struct mark){&t, i};
            T_OK(D.host_fn(s[i % 4], note, &m[i], 0));
        }
        for (int i = 0; i < 4; i++) {
            sync_stream(c, s[i]);
            D.stream_destroy(s[i]);
        }
        if (round == 0)
            memcpy(first, t.ran, sizeof(first));
        else
            assert_memory_equal(first, t.ran, sizeof(first));
        close_sim(c);
    }
}

/* ---------------------------------------------------------------- forgotten waits */

enum forgot { NOTHING, FILLED, DRAINED, RESULT, SENT, EARLY_RECORD };

/* n items through rings of `depth`: out = 2 * in + 1. Returns how many results are wrong. */
static int wrong_results(uint64_t seed, enum forgot forgot, int depth)
{
    enum { N = 24, FLOATS = 4, MOST_DEPTH = 8 };
    dev_context *c = open_seed("", seed);
    dev_stream *in = make_stream(c), *compute = make_stream(c), *out = make_stream(c);
    dev_event *filled[MOST_DEPTH], *drained[MOST_DEPTH], *sent[MOST_DEPTH];
    float *host = host_memory(c, sizeof(float) * 2 * N * FLOATS),
          *device = device_memory(c, sizeof(float) * 16 * FLOATS);
    side_op op = SIDE_OP_INIT;

    op.id = SIDE_OP_AFFINE;
    op.dim[0] = FLOATS;
    op.scale = 2.0f;
    op.bias = 1.0f;
    for (int i = 0; i < N * FLOATS; i++)
        host[i] = (float)i;
    for (int k = 0; k < depth; k++) {
        filled[k] = make_event(c);
        drained[k] = make_event(c);
        sent[k] = make_event(c);
    }
    for (int i = 0; i < N; i++) {
        int k = i % depth;
        float *from = device + k * FLOATS, *to = device + (8 + k) * FLOATS;
        if (forgot != DRAINED)
            T_OK(D.stream_wait(in, drained[k]));
        if (forgot == EARLY_RECORD)
            T_OK(D.event_record(filled[k], in));
        T_OK(D.copy(in, SIDE_COPY_H2D, from, host + i * FLOATS, sizeof(float) * FLOATS));
        if (forgot != EARLY_RECORD)
            T_OK(D.event_record(filled[k], in));
        if (forgot != FILLED)
            T_OK(D.stream_wait(compute, filled[k]));
        if (forgot != SENT)
            T_OK(D.stream_wait(compute, sent[k]));
        op.in[0] = from;
        op.out = to;
        T_OK(D.op(compute, &op));
        T_OK(D.event_record(drained[k], compute));
        if (forgot != RESULT)
            T_OK(D.stream_wait(out, drained[k]));
        T_OK(D.copy(out, SIDE_COPY_D2H, host + (N + i) * FLOATS, to, sizeof(float) * FLOATS));
        T_OK(D.event_record(sent[k], out));
    }
    sync_stream(c, out);
    int wrong = 0;
    for (int i = 0; i < N * FLOATS; i++)
        wrong += host[N * FLOATS + i] != 2.0f * (float)i + 1.0f;
    for (int k = 0; k < depth; k++) {
        D.event_destroy(filled[k]);
        D.event_destroy(drained[k]);
        D.event_destroy(sent[k]);
    }
    D.stream_destroy(in);
    D.stream_destroy(compute);
    D.stream_destroy(out);
    close_sim(c);
    return wrong;
}

T_TEST(forgotten_waits_show)
{
    static const int depths[] = {2, 3, 8};
    static const enum forgot ways[] = {FILLED, DRAINED, RESULT, SENT, EARLY_RECORD};

    for (size_t d = 0; d < 3; d++) {
        for (size_t w = 0; w < 5; w++) {
            int caught = 0;
            for (uint64_t seed = 1; seed <= 200; seed++)
                caught += wrong_results(seed, ways[w], depths[d]) > 0;
            printf("depth %d, wait %d forgotten: seen with %d of 200 seeds\n", depths[d], (int)ways[w], caught);
            assert_true(caught > 0);
        }
        for (uint64_t seed = 1; seed <= 200; seed++)
            assert_int_equal(wrong_results(seed, NOTHING, depths[d]), 0);
    }
}

T_TEST(pieces_run_in_any_order)
{
    unsigned seen = 0;

    for (uint64_t seed = 1; seed <= 50; seed++) {
        dev_context *c = open_seed("", seed);
        dev_stream *s = make_stream(c);
        unsigned char *device = device_memory(c, 1), *host = host_memory(c, 3);
        side_piece same[3] = {{device, host, 1}, {device, host + 1, 1}, {device, host + 2, 1}}; /* the caller's bug */
        for (unsigned char i = 0; i < 3; i++)
            host[i] = i;
        T_OK(D.copy_blocks(s, SIDE_COPY_H2D, same, 3, SIDE_PATH_BATCH));
        sync_stream(c, s);
        seen |= 1u << device[0];
        D.stream_destroy(s);
        close_sim(c);
    }
    assert_int_equal(seen, 7);
}

T_TEST(a_destroyed_stream_s_work_goes_on)
{
    T_FOR_SEEDS (seed, 50) {
        dev_context *c = open_seed("", seed);
        dev_stream *s = make_stream(c), *other = make_stream(c);
        dev_event *e = make_event(c);
        unsigned char *device = device_memory(c, 16), *host = host_memory(c, 16);
        T_OK(D.set(s, device, 7, 16));
        T_OK(D.event_record(e, s));
        D.stream_destroy(s);
        T_OK(D.stream_wait(other, e));
        D.event_destroy(e);
        T_OK(D.copy(other, SIDE_COPY_D2H, host, device, 16));
        sync_stream(c, other);
        assert_int_equal(host[15], 7);
        D.stream_destroy(other);
        close_sim(c);
        assert_int_equal(mem_live(), 0);
    }
}

T_TEST(work_queued_at_close_never_runs)
{
    T_FOR_SEEDS (seed, 50) {
        dev_context *c = open_seed("", seed);
        dev_stream *s = make_stream(c), *t = make_stream(c);
        dev_event *e = make_event(c);
        unsigned char *device = device_memory(c, 16);
        struct trace trace = {.count = 0};
        struct mark m = {&trace, 0};
        T_OK(D.host_fn(s, note, &m, 0)); /* never runs at submission, so the rest cannot */
        T_OK(D.set(s, device, 7, 16));
        T_OK(D.event_record(e, s));
        T_OK(D.stream_wait(t, e));
        T_OK(D.set(t, device, 7, 16));
        D.event_destroy(e);
        D.stream_destroy(s);
        D.stream_destroy(t);
        close_sim(c);
        assert_int_equal(trace.count, 0);
        assert_int_equal(mem_live(), 0);
    }
}

T_TEST(a_query_that_says_done_ran_it)
{
    T_FOR_SEEDS (seed, 50) {
        dev_context *c = open_seed("", seed);
        dev_stream *s = make_stream(c);
        unsigned char *device = device_memory(c, 16), *host = host_memory(c, 16);
        memset(host, 9, 16);
        T_OK(D.copy(s, SIDE_COPY_H2D, device, host, 16));
        while (D.stream_query(s) == SIDE_AGAIN)
            ;
        assert_int_equal(device[15], 9);
        D.stream_destroy(s);
        close_sim(c);
    }
}

/* ---------------------------------------------------------------- long runs */

T_TEST(a_hundred_thousand_items_in_bounded_memory)
{
    enum { N = 100000, WINDOW = 8 };
    dev_context *c = open_sim("");
    dev_stream *in = make_stream(c), *compute = make_stream(c);
    dev_event *filled[WINDOW], *drained[WINDOW];
    char *device = device_memory(c, 64), *host = host_memory(c, 64);
    side_op op = spin(10000);
    size_t peak = 0;

    for (int k = 0; k < WINDOW; k++) {
        filled[k] = make_event(c);
        drained[k] = make_event(c);
    }
    for (int i = 0; i < N; i++) {
        int k = i % WINDOW;
        T_OK(D.event_wait(drained[k], UINT64_MAX));
        T_OK(D.copy(in, SIDE_COPY_H2D, device, host, 64));
        T_OK(D.event_record(filled[k], in));
        T_OK(D.stream_wait(compute, filled[k]));
        T_OK(D.op(compute, &op));
        T_OK(D.event_record(drained[k], compute));
        peak = sim_pending(c) > peak ? sim_pending(c) : peak;
    }
    sync_stream(c, compute);
    assert_true(peak <= 6 * (WINDOW + 1));
    assert_true(mem_live() < 200);
    assert_int_equal(D.now(c), 7700 + 2 + (uint64_t)N * 10000);
    for (int k = 0; k < WINDOW; k++) {
        D.event_destroy(filled[k]);
        D.event_destroy(drained[k]);
    }
    D.stream_destroy(in);
    D.stream_destroy(compute);
    close_sim(c);
    assert_int_equal(mem_live(), 0);
}

T_TEST(a_hundred_thousand_queued_at_once)
{
    enum { N = 100000 };

    for (uint64_t seed = 1; seed <= 4; seed++) {
        dev_context *c = open_seed("", seed);
        dev_stream *s[8];
        side_op op = spin(3);
        for (int i = 0; i < 8; i++)
            s[i] = make_stream(c);
        for (int i = 0; i < N; i++)
            T_OK(D.op(s[i % 8], &op));
        for (int i = 0; i < 8; i++) {
            sync_stream(c, s[i]);
            D.stream_destroy(s[i]);
        }
        assert_int_equal(D.now(c), 3 * N);
        assert_int_equal(sim_pending(c), 0);
        close_sim(c);
    }
}

T_TEST(a_stream_nobody_waits_for_is_retired_too)
{
    for (uint64_t seed = 1; seed <= 12; seed++) {
        dev_context *c = open_seed("", seed);
        dev_stream *watched = make_stream(c), *ignored = make_stream(c);
        unsigned char *device = device_memory(c, 16), *host = host_memory(c, 16);
        side_op op = spin(30000);
        size_t peak = 0;
        for (int i = 0; i < 3000; i++) {
            for (int k = 0; k < 3; k++)
                T_OK(D.copy(ignored, SIDE_COPY_H2D, device, host, 16));
            T_OK(D.op(watched, &op));
            sync_stream(c, watched);
            peak = sim_pending(c) > peak ? sim_pending(c) : peak;
        }
        assert_true(peak < 1200); /* the lag that effects may have */
        D.stream_destroy(watched);
        D.stream_destroy(ignored);
        close_sim(c);
    }
}

/* ---------------------------------------------------------------- threads */

enum { THREADS = 4, ROUNDS = 300 };

struct worker {
    dev_context *c;
    dev_stream *shared;
    dev_event *common; /* recorded by all */
    int number, calls;
    unsigned char *device;
};

static void count_call(void *user)
{
    ++*(int *)user;
}

static void *work(void *arg)
{
    struct worker *w = arg;
    dev_stream *own = make_stream(w->c);
    dev_event *e = make_event(w->c);
    unsigned char *host = host_memory(w->c, 64);

    for (int i = 0; i < ROUNDS; i++) {
        memset(host, i & 255, 64);
        T_OK(D.copy(own, SIDE_COPY_H2D, w->device, host, 64));
        T_OK(D.host_fn(own, count_call, &w->calls, 10));
        T_OK(D.event_record(w->common, own));
        T_OK(D.stream_wait(w->shared, w->common));
        T_OK(D.copy(own, SIDE_COPY_D2H, host, w->device, 64));
        T_OK(D.event_record(e, own));
        if (i % 3 == 0)
            while (D.event_query(e) == SIDE_AGAIN)
                ;
        else
            T_OK(D.event_wait(e, UINT64_MAX));
        assert_int_equal(host[63], i & 255);
        assert_int_equal(w->calls, i + 1);
        uint64_t now = D.now(w->c);
        T_OK(D.event_wait(w->common, UINT64_MAX));
        assert_true(D.now(w->c) >= now);
    }
    D.event_destroy(e);
    D.stream_destroy(own);
    D.host_free(w->c, host);
    return NULL;
}

T_TEST(threads)
{
    for (uint64_t seed = 1; seed <= 4; seed++) {
        dev_context *c = open_seed("", seed);
        dev_stream *shared = make_stream(c);
        dev_event *common = make_event(c);
        struct worker w[THREADS];
        pthread_t thread[THREADS];
        for (int i = 0; i < THREADS; i++) {
            w[i] = (struct worker){c, shared, common, i, 0, device_memory(c, 64)};
            pthread_create(&thread[i], NULL, work, &w[i]);
        }
        for (int i = 0; i < THREADS; i++)
            pthread_join(thread[i], NULL);
        sync_stream(c, shared);
        D.event_destroy(common);
        D.stream_destroy(shared);
        close_sim(c);
        assert_int_equal(mem_live(), 0);
    }
}

T_MAIN(T(every_order_of_a_small_graph_and_no_other), T(random_programs_keep_their_dependencies), T(one_seed_one_order),
       T(forgotten_waits_show), T(pieces_run_in_any_order), T(a_destroyed_stream_s_work_goes_on),
       T(work_queued_at_close_never_runs), T(a_query_that_says_done_ran_it),
       T(a_hundred_thousand_items_in_bounded_memory), T(a_hundred_thousand_queued_at_once),
       T(a_stream_nobody_waits_for_is_retired_too), T(threads))
