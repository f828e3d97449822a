/* SPDX-License-Identifier: MIT
 *
 * The model of plans against the software device, whose virtual time is exact, running real pipelines; and what must hold for any numbers. That model and
 * software device agree says that both have the same idea of a pipeline, not what hardware does. */
#include "plan_help.h"

/* ---------------------------------------------------------------- what must hold for any numbers */

static side_machine any_machine(t_rng *rng)
{
    side_machine m = real_machine();

    m.copy_engines = 1 + (int)t_rng_below(rng, 3);
    m.h2d = (side_rate){t_rng_chance(rng, 3) ? 0 : logarithmic(rng, 1e-7, 1e-4), logarithmic(rng, 1, 400)};
    m.d2h = (side_rate){t_rng_chance(rng, 3) ? 0 : logarithmic(rng, 1e-7, 1e-4), logarithmic(rng, 1, 400)};
    m.both_gbps = t_rng_chance(rng, 3) ? 0 : (m.h2d.gbps + m.d2h.gbps) * uniform(rng, 0.5, 1.2);
    m.stage_gbps = t_rng_chance(rng, 4) ? 0 : logarithmic(rng, 1, 100);
    m.queue_s = t_rng_chance(rng, 2) ? 0 : logarithmic(rng, 1e-7, 1e-4);
    m.handover_s = t_rng_chance(rng, 2) ? 0 : logarithmic(rng, 1e-7, 1e-4);
    m.start_s = t_rng_chance(rng, 2) ? 0 : logarithmic(rng, 1e-7, 1e-4);
    return m;
}

static side_plan_work any_work(t_rng *rng)
{
    size_t item = (size_t)logarithmic(rng, 1, 1e9);
    side_plan_work w = work_of((uint64_t)logarithmic(rng, 1, 1e5), item,
                               t_rng_chance(rng, 2) ? 0 : (size_t)logarithmic(rng, 1, 1e9),
                               logarithmic(rng, 1e-7, 1e-1));

    w.source_s = t_rng_chance(rng, 3) ? logarithmic(rng, 1e-7, 1e-1) : 0;
    w.pageable = t_rng_chance(rng, 3);
    w.streams = (uint32_t)t_rng_below(rng, 17);
    return w;
}

static void show(const side_machine *m, const side_plan_work *w)
{
    printf("engines %d, h2d %.3g s + %.4g GB/s, d2h %.3g s + %.4g, both %.4g, stage %.4g, queue %.3g, handover %.3g, "
           "start %.3g\n"
           "items %llu, %zu in, %zu out, compute %.4g, source %.4g, jitter %g, depth %u, pageable %d\n",
           m->copy_engines, m->h2d.latency_s, m->h2d.gbps, m->d2h.latency_s, m->d2h.gbps, m->both_gbps, m->stage_gbps,
           m->queue_s, m->handover_s, m->start_s, (unsigned long long)w->items, w->item_bytes, w->result_bytes,
           w->compute_s, w->source_s, w->jitter, w->depth, w->pageable);
}

static void is_sane(const side_plan *p, const side_plan_work *w)
{
    const double numbers[] = {p->h2d_s,        p->compute_s, p->d2h_s,   p->stage_s,      p->serial_s,    p->pageable_s,
                              p->overlapped_s, p->bound_s,   p->speedup, p->speedup_most, p->compute_busy};

    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++)
        if (!(numbers[i] >= 0 && numbers[i] < INFINITY))
            T_FAIL("number %zu is %g", i, numbers[i]);
    assert_true(p->compute_busy <= 1 && p->speedup > 0 && p->overlapped_s > 0);
    assert_true(p->depth >= 1 && (unsigned)p->bound <= SIDE_BOUND_DEPTH && (unsigned)p->verdict <= SIDE_OVERLAP_HARMS);
    assert_true(p->chunk_bytes >= 1 && p->chunk_bytes <= w->item_bytes);
    for (int d = 0; d < SIDE_PLAN_DEPTHS; d++)
        assert_true(p->depth_s[d] > 0 && p->depth_s[d] < INFINITY);
}

T_TEST(no_schedule_beats_the_bound)
{
    T_FOR_SEEDS (seed, 400) {
        t_rng rng = t_rng_make(seed);
        side_machine m = any_machine(&rng);
        side_plan_work w = any_work(&rng);
        side_plan plan = made(&m, &w);
        is_sane(&plan, &w);
        for (int d = 0; d < SIDE_PLAN_DEPTHS; d++)
            if (plan.depth_s[d] < plan.bound_s * (1 - 1e-6)) {
                show(&m, &w);
                T_FAIL("seed %llu, depth %d: %.9g, bound %.9g, ratio %.6f", (unsigned long long)seed, d + 1,
                       plan.depth_s[d], plan.bound_s, plan.depth_s[d] / plan.bound_s);
            }
    }
}

/* A deeper ring only takes waits away, but for the copies that the host queues before the first compute, and for copies in that begin earlier and then share the
 * link, or an engine, with copies out. Without those it is never slower; with them hardly. */
T_TEST(deeper_is_never_slower)
{
    T_FOR_SEEDS (seed, 400) {
        t_rng rng = t_rng_make(seed);
        side_machine m = any_machine(&rng);
        side_plan_work w = any_work(&rng);
        bool alone = w.result_bytes == 0 ||
                     (m.copy_engines > 1 && (m.both_gbps <= 0 || m.both_gbps >= m.h2d.gbps + m.d2h.gbps));
        side_plan plan = made(&m, &w);
        for (int d = 1; d < SIDE_PLAN_DEPTHS; d++) {
            double slack = (w.pageable || w.source_s > 0 ? 0 : m.queue_s) + (alone ? 1e-6 : 0.05) * plan.depth_s[d - 1];
            if (plan.depth_s[d] > plan.depth_s[d - 1] + slack) {
                show(&m, &w);
                T_FAIL("seed %llu: depth %d takes %.9g, depth %d %.9g", (unsigned long long)seed, d,
                       plan.depth_s[d - 1], d + 1, plan.depth_s[d]);
            }
        }
    }
}

static void is_more(const side_machine *m, const side_plan_work *w, const side_plan_work *more, double tolerance)
{
    double before = made(m, w).overlapped_s, after = made(m, more).overlapped_s;

    if (after * tolerance >= before)
        return;
    show(m, w);
    show(m, more);
    T_FAIL("%.9g before, %.9g after", before, after);
}

T_TEST(more_work_is_never_shorter)
{
    T_FOR_SEEDS (seed, 250) {
        t_rng rng = t_rng_make(seed);
        side_machine m = any_machine(&rng);
        side_plan_work w = any_work(&rng), more = w;
        bool alone = w.result_bytes == 0 ||
                     (m.copy_engines > 1 && (m.both_gbps <= 0 || m.both_gbps >= m.h2d.gbps + m.d2h.gbps));
        double tolerance = 1 + (w.pageable ? 0.006 : 1e-6) +
                           (alone ? 0 : 0.03); /* pageable: another chunk, within 0.5 % */
        w.depth = more.depth = 1 + (uint32_t)t_rng_below(&rng, 8);
        is_more(&m, &w, &w, tolerance);
        more.compute_s *= uniform(&rng, 1, 3);
        is_more(&m, &w, &more, tolerance);
        more = w;
        more.items += 1 + t_rng_below(&rng, 20);
        is_more(&m, &w, &more, tolerance);
        if (w.source_s <= 0) /* with a loader another thread queues the copies, which can be a gain */
            continue;
        more = w;
        more.source_s += logarithmic(&rng, 1e-7, 1e-2);
        is_more(&m, &w, &more, tolerance);
    }
}

/* Long runs are continued from the steady state: against every item. */
T_TEST(long_runs_continue_the_steady_state)
{
    double worst = 0;

    T_FOR_SEEDS (seed, 100) {
        t_rng rng = t_rng_make(seed);
        side_machine m = any_machine(&rng);
        side_plan_work w = any_work(&rng);
        struct plan_lanes l;
        uint64_t n = 2000 + t_rng_below(&rng, 6000);
        w.item_bytes = w.item_bytes % (64 << 20) + 1;
        w.result_bytes %= 64 << 20;
        if (t_rng_chance(&rng, 3)) /* lanes that are nearly as long as each other settle late */
            w.compute_s = (double)w.item_bytes / (m.h2d.gbps * 1e9) * uniform(&rng, 0.99, 1.01);
        plan_lanes_make(&l, &m, &w, 1 + (uint32_t)t_rng_below(&rng, t_rng_chance(&rng, 5) ? 64 : 8), 4 << 20, 8);
        double all = plan_run(&l, n, 0, NULL), some = plan_time(&l, n, NULL);
        worst = fmax(worst, fabs(some / all - 1));
        if (fabs(some / all - 1) > 0.002) {
            show(&m, &w);
            T_FAIL("seed %llu: %llu items take %.9g, continued %.9g (%.5f)", (unsigned long long)seed,
                   (unsigned long long)n, all, some, some / all);
        }
    }
    printf("worst %.6f\n", worst);
}

T_TEST(absurd_numbers_overflow_nothing)
{
    static const double extremes[] = {0, 1e-300, 1e-9, 1, 1e9};

    T_FOR_SEEDS (seed, 100) {
        t_rng rng = t_rng_make(seed);
        side_machine m = plain_machine();
        side_plan_work w = work_of(UINT64_MAX >> t_rng_below(&rng, 64), (SIZE_MAX / 256) >> t_rng_below(&rng, 56),
                                   (SIZE_MAX / 256) >> t_rng_below(&rng, 57), extremes[t_rng_below(&rng, 5)]);
        w.source_s = extremes[t_rng_below(&rng, 5)];
        w.pageable = t_rng_chance(&rng, 2);
        w.jitter = t_rng_chance(&rng, 4) ? uniform(&rng, 0, 2) : 0;
        w.depth = (uint32_t)t_rng_below(&rng, 65);
        m.h2d.gbps = t_rng_chance(&rng, 2) ? 1e-6 : 1e6;
        m.d2h.gbps = t_rng_chance(&rng, 2) ? 1e-6 : 1e6;
        m.both_gbps = t_rng_chance(&rng, 2) ? 1e-6 : 2e6;
        m.stage_gbps = t_rng_chance(&rng, 2) ? 1e-6 : 1e6;
        m.queue_s = extremes[t_rng_below(&rng, 5)];
        m.handover_s = extremes[t_rng_below(&rng, 5)];
        side_plan plan = SIDE_PLAN_INIT;
        side_status s = side_plan_make(&m, &w, &plan);
        if (s == SIDE_OK)
            is_sane(&plan, &w);
        else
            assert_int_equal(s, SIDE_INVALID);
    }
}

T_TEST(the_same_twice)
{
    side_machine m = real_machine();
    side_plan_work w = work_of(777, 5 << 20, 3 << 20, 90 * US);
    side_plan a, b;

    w.jitter = 0.3;
    w.source_s = 50 * US;
    a = made(&m, &w);
    b = made(&m, &w);
    assert_memory_equal(a.depth_s, b.depth_s, sizeof(a.depth_s));
    assert_true(a.overlapped_s == b.overlapped_s && a.bound == b.bound && a.speedup_most == b.speedup_most);
}

/* ---------------------------------------------------------------- real pipelines on the software device */

/* Drawn cases, to the nanosecond that each copy of an odd size is rounded up to. */
T_TEST(pipelines_take_what_is_planned)
{
    T_FOR_SEEDS (seed, 400) {
        t_rng rng = t_rng_make(seed);
        struct real r = {0};
        side_machine m = plain_machine();
        m.copy_engines = 1 + (int)t_rng_below(&rng, 2);
        uint64_t latency = t_rng_chance(&rng, 3) ? 0 : t_rng_below(&rng, 3000);
        uint32_t depth = 1 + (uint32_t)t_rng_below(&rng, t_rng_chance(&rng, 10) ? 64 : 8),
                 streams = 1 + (uint32_t)t_rng_below(&rng, 4);
        char keys[60];
        snprintf(keys, sizeof(keys), "%llu,copy_engines=%d", (unsigned long long)latency, m.copy_engines);
        m.h2d.latency_s = m.d2h.latency_s = (double)latency * 1e-9;
        r.n = t_rng_chance(&rng, 20) ? 2000 + t_rng_below(&rng, 500) : 1 + t_rng_below(&rng, 80);
        r.item = 2 * (1 + t_rng_below(&rng, 5000));
        r.result = t_rng_chance(&rng, 2) ? 0 : 2 * (1 + t_rng_below(&rng, 8000));
        uint64_t cost = (uint64_t)(logarithmic(&rng, 0.1, 10) * (double)r.item) + 1;
        r.cost_ns = calloc(r.n, sizeof(*r.cost_ns));
        for (uint64_t i = 0; i < r.n; i++)
            r.cost_ns[i] = cost;
        real_open(&r, keys, 20000);
        double time = real_run(&r, depth, streams, false, NULL);
        real_close(&r);
        side_plan_work w = work_of(r.n, r.item, r.result, (double)cost * 1e-9);
        w.depth = depth;
        w.streams = streams;
        side_plan plan = made(&m, &w);
        if (fabs(plan.overlapped_s - time) > 1e-7 * time + 2e-9)
            T_FAIL("seed %llu: n %llu, t %zu, c %llu, d %zu, latency %llu ns, depth %u, %d engines: %.0f planned, %.0f "
                   "ns taken",
                   (unsigned long long)seed, (unsigned long long)r.n, r.item, (unsigned long long)cost, r.result / 2,
                   (unsigned long long)latency, depth, m.copy_engines, plan.overlapped_s * 1e9, time * 1e9);
        free(r.cost_ns);
    }
}

/* Threads hand pieces over, and filling takes no virtual time: copies, piece by piece. Which of the threads queues is chance, so that times are near, not exact. */
T_TEST(staged_pipelines_take_what_is_planned)
{
    T_FOR_SEEDS (seed, 20) {
        t_rng rng = t_rng_make(seed);
        struct real r = {.n = 1 + t_rng_below(&rng, 12), .item = (1 << 20) + t_rng_below(&rng, 8 << 20)};
        side_machine m = plain_machine();
        uint64_t cost = (uint64_t)(logarithmic(&rng, 0.1, 10) * (double)r.item);
        uint32_t depth = 1 + (uint32_t)t_rng_below(&rng, 4);
        r.cost_ns = calloc(r.n, sizeof(*r.cost_ns));
        for (uint64_t i = 0; i < r.n; i++)
            r.cost_ns[i] = cost;
        real_open(&r, "100000", r.item);
        double time = real_run(&r, depth, 1, true, NULL);
        real_close(&r);
        m.h2d.latency_s = m.d2h.latency_s = 1e-4;
        struct plan_lanes l;
        side_plan_work w = work_of(r.n, r.item, 0, (double)cost * 1e-9);
        w.pageable = true;
        plan_lanes_make(&l, &m, &w, depth, 0, side_default_threads());
        NEAR(plan_time(&l, r.n, NULL), time, 0.02);
        free(r.cost_ns);
    }
}

/* Times drawn by chance, of another distribution: the mean of many runs. */
T_TEST(jitter_is_that_of_chance)
{
    static const struct {
        uint64_t n;
        double ratio, deviation;
        uint32_t depth;
    } cases[] = {{400, 1, 0.3, 2},   {400, 1, 0.3, 4}, {400, 0.7, 0.5, 2}, {400, 1, 0.1, 3},
                 {400, 1.5, 0.5, 3}, {20, 1, 0.4, 3},  {8, 1, 0.5, 2}};
    side_machine m = plain_machine();
    t_rng rng = t_rng_make(1);
    struct real r = {.item = 10000};

    real_open(&r, "0", 20000);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        double mean = 0, width = sqrt(log(1 + cases[i].deviation * cases[i].deviation));
        uint64_t runs = 6000 / cases[i].n;
        r.n = cases[i].n;
        r.cost_ns = calloc(r.n, sizeof(*r.cost_ns));
        for (uint64_t run = 0; run < runs; run++) {
            for (uint64_t k = 0; k < r.n; k++)
                r.cost_ns[k] = (uint64_t)(1 + 10000 * cases[i].ratio * exp(width * normal(&rng) - width * width / 2));
            mean += real_run(&r, cases[i].depth, 1, false, NULL) / (double)runs;
        }
        side_plan_work w = work_of(r.n, r.item, 0, cases[i].ratio * 10000e-9);
        w.depth = cases[i].depth;
        w.jitter = cases[i].deviation;
        double planned = made(&m, &w).overlapped_s;
        printf("n %llu, c/t %g, deviation %g, depth %u: %.1f planned, %.1f us taken\n", (unsigned long long)r.n,
               cases[i].ratio, cases[i].deviation, cases[i].depth, planned * 1e6, mean * 1e6);
        NEAR(planned, mean, 0.03);
        free(r.cost_ns);
    }
    real_close(&r);
}

T_MAIN(T_LONG(no_schedule_beats_the_bound, 60), T_LONG(deeper_is_never_slower, 60),
       T_LONG(more_work_is_never_shorter, 60), T_LONG(long_runs_continue_the_steady_state, 60),
       T(absurd_numbers_overflow_nothing), T(the_same_twice), T_LONG(pipelines_take_what_is_planned, 60),
       T(staged_pipelines_take_what_is_planned), T_LONG(jitter_is_that_of_chance, 60))
