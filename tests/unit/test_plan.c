/* SPDX-License-Identifier: MIT
 *
 * Plans: closed forms where there are any, what limits, what is chosen, and bad input. */
#include "plan_help.h"

/* ---------------------------------------------------------------- closed forms */

T_TEST(two_slots_take_the_formula)
{
    side_machine m = plain_machine();

    T_FOR_SEEDS (seed, 200) {
        t_rng rng = t_rng_make(seed);
        uint64_t n = 1 + t_rng_below(&rng, 3000);
        size_t item = 1 + t_rng_below(&rng, 1 << 20),
               result = t_rng_chance(&rng, 2) ? 0 : 1 + t_rng_below(&rng, 1 << 20);
        double t = (double)item * 1e-9, d = (double)result * 0.5e-9, c = logarithmic(&rng, 0.1, 10) * t;
        side_plan_work w = work_of(n, item, result, c);
        side_plan plan = made(&m, &w);
        double longest = fmax(t, fmax(c, d));

        NEAR(plan.serial_s, (double)n * (t + c + d), 1e-9);
        NEAR(plan.bound_s, (double)(n - 1) * longest + t + c + d, 1e-9);
        for (int depth = 2; depth <= SIDE_PLAN_DEPTHS; depth++)
            NEAR(plan.depth_s[depth - 1], plan.bound_s, 1e-9);
        if (result == 0)
            NEAR(plan.depth_s[0], plan.serial_s, 1e-9);
        NEAR(plan.speedup_most, (t + c + d) / longest, 1e-9);
        assert_true(plan.depth <= 2);
        NEAR(plan.compute_busy, (double)n * c / plan.overlapped_s, 1e-12);
    }
}

/* The item of depth 1: the next copy in waits for compute, the next compute for the copy out. */
T_TEST(one_slot_overlaps_copies_of_both_directions)
{
    side_machine m = plain_machine();
    side_plan_work w = work_of(100, 1000, 4000, 3e-6); /* t 1, c 3, d 2 us */
    side_plan plan = made(&m, &w);

    NEAR(plan.depth_s[0], 99 * (3e-6 + 2e-6) + 6e-6, 1e-9);
}

T_TEST(one_engine_takes_turns)
{
    side_machine m = plain_machine();
    side_plan_work w = work_of(1000, 10000, 20000, 1e-6);
    side_plan plan;

    m.copy_engines = 1;
    plan = made(&m, &w);
    NEAR(plan.overlapped_s, 1000 * 20e-6, 0.002); /* t + d, and the first compute */
    assert_int_equal(plan.bound, SIDE_BOUND_LINK);
    NEAR(plan.bound_s, side_timeline_bound(1000, 10e-6, 1e-6, 10e-6, 1), 1e-12);
}

/* Both directions at 1 GB/s alone, 2/1.1 in total: by hand. */
T_TEST(both_directions_share_the_link)
{
    static const struct {
        uint64_t n;
        double c, time; /* in items' copy times */
    } cases[] = {{1, 0.5, 2.5}, {2, 0.5, 3.55}, {3, 0.5, 4.65}, {2, 1, 4}, {2, 1.05, 4.1}, {2, 0, 3.1}};
    side_machine m = plain_machine();

    m.d2h.gbps = 1;
    m.both_gbps = 2 / 1.1;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        side_plan_work w = work_of(cases[i].n, 1000000, 1000000, cases[i].c * 1e-3);
        side_plan plan = made(&m, &w);
        NEAR(plan.depth_s[3], cases[i].time * 1e-3, 1e-9);
    }
    side_plan_work w = work_of(10000, 1000000, 1000000, 0.5e-3);
    side_plan plan = made(&m, &w);
    NEAR(plan.overlapped_s, 10000 * 1.1e-3, 1e-3);
    assert_int_equal(plan.bound, SIDE_BOUND_LINK);
    w.result_bytes = 100000; /* a tenth: it slows the other direction for 0.11 of the time, by 0.01 in all */
    plan = made(&m, &w);
    NEAR(plan.overlapped_s, 10000 * 1.01e-3, 1e-3);
    assert_int_equal(plan.bound, SIDE_BOUND_H2D);
    m.both_gbps = 1.5; /* D2H goes first and keeps its rate: H2D moves half as fast beside it, and fast for the rest */
    m.both_h2d_gbps = 0.5;
    w.result_bytes = 500000;
    plan = made(&m, &w);
    NEAR(plan.overlapped_s, 10000 * 1.25e-3, 1e-3);
    assert_int_equal(plan.bound, SIDE_BOUND_H2D);
    w.item_bytes = 250000; /* and the other way round: nothing for D2H to wait for */
    w.result_bytes = 1000000;
    plan = made(&m, &w);
    NEAR(plan.overlapped_s, 10000 * 1e-3, 2e-3);
    assert_int_equal(plan.bound, SIDE_BOUND_D2H);
    w = work_of(10000, 1000000, 100000, 0.5e-3);
    m.both_h2d_gbps = 0;
    m.both_gbps = 0; /* not known: as if each were alone */
    plan = made(&m, &w);
    NEAR(plan.overlapped_s, 10000 * 1e-3, 1e-3);
}

T_TEST(overheads_are_counted)
{
    side_machine m = plain_machine();
    side_plan_work w = work_of(50, 10000, 0, 10e-6);
    side_plan plan;

    m.start_s = 7e-6;
    m.h2d.latency_s = 1e-6;
    plan = made(&m, &w);
    NEAR(plan.serial_s, 7e-6 + 50 * 21e-6, 1e-9);
    NEAR(plan.depth_s[1], 7e-6 + 49 * 11e-6 + 21e-6, 1e-9);
    NEAR(plan.depth_s[0], plan.serial_s, 1e-9);
    m.handover_s = 2e-6; /* one slot: there and back for each item; two: a slot's round of 25 for two items */
    plan = made(&m, &w);
    NEAR(plan.depth_s[0], 7e-6 + 50 * 21e-6 + 99 * 2e-6, 1e-9);
    NEAR(plan.serial_s, plan.depth_s[0], 1e-9);
    NEAR(plan.depth_s[1], 7e-6 + 49 * 12.5e-6 + 23e-6, 0.01);
    NEAR(plan.depth_s[2], 7e-6 + 49 * 11e-6 + 23e-6, 1e-9);
    m.queue_s = 40e-6; /* more than anything else */
    plan = made(&m, &w);
    assert_true(plan.overlapped_s >= 50 * 40e-6 && plan.overlapped_s < 50 * 40e-6 + 60e-6);
    assert_int_equal(plan.bound, SIDE_BOUND_HOST);
    assert_int_equal(plan.verdict, SIDE_OVERLAP_NOT);
}

/* What the host takes to queue it is in both times. */
T_TEST(one_item_is_no_gain)
{
    T_FOR_SEEDS (seed, 300) {
        t_rng rng = t_rng_make(seed);
        side_machine m = real_machine();
        side_plan_work w = work_of(1, (size_t)logarithmic(&rng, 1, 1e9), (size_t)logarithmic(&rng, 1, 1e9),
                                   logarithmic(&rng, 1e-9, 1));
        side_plan plan;

        w.result_bytes *= t_rng_chance(&rng, 2);
        w.source_s = t_rng_chance(&rng, 2) ? logarithmic(&rng, 1e-9, 1) : 0;
        w.jitter = t_rng_chance(&rng, 2) ? uniform(&rng, 0, 2) : 0;
        m.queue_s = logarithmic(&rng, 1e-7, 1e-4);
        m.handover_s = logarithmic(&rng, 1e-7, 1e-4);
        plan = made(&m, &w);
        NEAR(plan.speedup, 1, w.jitter > 0 ? 0.01 : 1e-9);
        assert_int_equal(plan.verdict, SIDE_OVERLAP_NOT);
    }
    side_machine m = real_machine();
    side_plan_work w = work_of(1, 4096, 0, 1 * US);
    m.pageable_h2d = m.h2d;
    w.pageable = true; /* the driver takes so few bytes with the command */
    side_plan plan = made(&m, &w);
    assert_int_equal(plan.verdict, SIDE_OVERLAP_NOT);
}

/* As long as the loader and the device wait for each other, one stream does too: no harm of overlap's. */
T_TEST(uneven_loaders_are_no_harm)
{
    side_machine m = real_machine();

    for (uint64_t n = 1; n <= 4096; n *= 2) {
        side_plan_work w = work_of(n, 16 << 20, 0, 300 * US);
        w.source_s = 600 * US;
        w.jitter = 2;
        w.depth = 1;
        side_plan plan = made(&m, &w);
        assert_true(plan.speedup >= 0.999);
    }
}

T_TEST(more_slots_than_are_best_are_not_too_few)
{
    side_machine m = real_machine();
    side_plan_work w = work_of(3, 8192, 0, 33 * US); /* the host queues all copies before the first compute */
    w.depth = 64;
    side_plan plan = made(&m, &w);

    assert_true(plan.overlapped_s > 1.02 * plan.depth_s[1]);
    assert_true(plan.bound != SIDE_BOUND_DEPTH);
}

T_TEST(loader_and_staging_are_lanes)
{
    side_machine m = real_machine();
    side_plan_work w = work_of(500, 16 << 20, 0, 100 * US);
    side_plan plan;

    w.source_s = 2000 * US;
    plan = made(&m, &w);
    NEAR(plan.overlapped_s, 500 * 2000 * US, 0.005);
    assert_int_equal(plan.bound, SIDE_BOUND_SOURCE);
    assert_int_equal(plan.verdict, SIDE_OVERLAP_NOT);
    w.source_s = 0;
    w.pageable = true;
    m.stage_gbps = 20;
    plan = made(&m, &w);
    NEAR(plan.overlapped_s, 500 * (double)(16 << 20) / 20e9, 0.01);
    assert_int_equal(plan.bound, SIDE_BOUND_STAGE);
    NEAR(plan.stage_s, (double)(16 << 20) / 20e9, 1e-9);
    NEAR(plan.pageable_s, 15 * US + 500 * ((double)(16 << 20) / 8e9 + (10 + 100 + 2 * 2 + 8) * US) - 2 * US, 1e-9);
    NEAR(plan.speedup, plan.pageable_s / plan.overlapped_s, 1e-12);
    m.stage_gbps = 1000; /* no limit: the link is */
    plan = made(&m, &w);
    NEAR(plan.overlapped_s, 500 * (double)(16 << 20) / 55.3e9, 0.05);
    assert_int_equal(plan.bound, SIDE_BOUND_H2D);
    m.pageable_h2d.gbps = 0; /* not known */
    plan = made(&m, &w);
    NEAR(plan.pageable_s, 0, 0);
    NEAR(plan.speedup, plan.serial_s / plan.overlapped_s, 1e-12);
}

/* ---------------------------------------------------------------- what limits, what is chosen */

T_TEST(bound_is_the_lane_that_limits)
{
    const size_t mib = 1 << 20;
    static const struct {
        uint64_t items;
        size_t item, result; /* KiB */
        double compute_s;
        uint32_t depth;
        side_bound bound;
    } cases[] = {
        {1000, 16 << 10, 0, 1000 * US, 0, SIDE_BOUND_COMPUTE},   {1000, 16 << 10, 0, 310 * US, 0, SIDE_BOUND_COMPUTE},
        {1000, 16 << 10, 0, 295 * US, 0, SIDE_BOUND_H2D},        {1000, 16 << 10, 0, 30 * US, 0, SIDE_BOUND_H2D},
        {1000, 16 << 10, 16 << 10, 30 * US, 0, SIDE_BOUND_LINK}, {1000, 1 << 10, 16 << 10, 30 * US, 0, SIDE_BOUND_D2H},
        {1000, 16 << 10, 1 << 10, 30 * US, 0, SIDE_BOUND_H2D},   {1000, 16 << 10, 0, 300 * US, 1, SIDE_BOUND_DEPTH},
        {1000, 16 << 10, 0, 30000 * US, 1, SIDE_BOUND_COMPUTE}, /* one slot costs 1 % */
        {1, 16 << 10, 0, 300 * US, 0, SIDE_BOUND_LATENCY},      /* a single item */
        {1, 16 << 10, 0, 30000 * US, 0, SIDE_BOUND_COMPUTE},     {1000, 4, 0, 1 * US, 0, SIDE_BOUND_HOST},
    };
    side_machine m = real_machine();

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        side_plan_work w = work_of(cases[i].items, cases[i].item * mib / 1024, cases[i].result * mib / 1024,
                                   cases[i].compute_s);
        w.depth = cases[i].depth;
        side_plan plan = made(&m, &w);
        if (plan.bound != cases[i].bound)
            T_FAIL("case %zu: %s instead of %s", i, side_bound_name(plan.bound), side_bound_name(cases[i].bound));
    }
    m.queue_s = 0;
    side_plan_work w = work_of(1000, 16 << 10, 0, 1 * US); /* copies that are all latency */
    assert_int_equal(made(&m, &w).bound, SIDE_BOUND_LATENCY);
}

T_TEST(depth_is_the_least_that_is_enough)
{
    side_machine m = real_machine(), slow = m;

    slow.handover_s *= 1.5; /* then it must be within 2 % of the best, still */
    T_FOR_SEEDS (seed, 200) {
        t_rng rng = t_rng_make(seed);
        size_t item = (size_t)logarithmic(&rng, 4096, 64 << 20);
        side_plan_work w = work_of(1 + t_rng_below(&rng, 300), item, t_rng_chance(&rng, 2) ? 0 : item / 2,
                                   logarithmic(&rng, 0.1, 10) * (double)item / 55.3e9);
        w.jitter = t_rng_chance(&rng, 3) ? uniform(&rng, 0.01, 1) : 0;
        w.budget_bytes = t_rng_chance(&rng, 2) ? 0
                                               : (size_t)(uniform(&rng, 1, 9) * (double)(item + w.result_bytes + 1024));
        side_plan plan = made(&m, &w), late = made(&slow, &w);
        double best = plan.depth_s[0], best_late = late.depth_s[0];
        for (uint32_t d = 1; d <= plan.depth_most; d++) {
            best = fmin(best, plan.depth_s[d - 1]);
            best_late = fmin(best_late, late.depth_s[d - 1]);
        }
        assert_true(plan.depth >= 1 && plan.depth <= plan.depth_most);
        assert_true(plan.depth_s[plan.depth - 1] <= best * 1.005);
        assert_true(late.depth_s[plan.depth - 1] <= best_late * 1.02);
        for (uint32_t d = 1; d < plan.depth; d++)
            assert_true(plan.depth_s[d - 1] > best * 1.005 || late.depth_s[d - 1] > best_late * 1.02);
        NEAR(plan.overlapped_s, plan.depth_s[plan.depth - 1], 0);
        assert_true(w.budget_bytes == 0 || plan.device_bytes <= w.budget_bytes);
        side_plan_work asked = w;
        for (asked.depth = 1; asked.depth <= plan.depth_most; asked.depth++)
            NEAR(made(&m, &asked).overlapped_s, plan.depth_s[asked.depth - 1], 0.001);
    }
}

/* What pipelines take is what the plan says. */
T_TEST(memory_is_what_pipelines_take)
{
    side_machine m = real_machine();
    side_device *dev;

    T_OK(side_device_open("sim", &dev));
    T_FOR_SEEDS (seed, 20) {
        t_rng rng = t_rng_make(seed);
        size_t item = 1 + t_rng_below(&rng, 6 << 20),
               result = t_rng_chance(&rng, 2) ? 0 : 1 + t_rng_below(&rng, 6 << 20);
        void *host = malloc(item), *back = malloc(result + 1);
        side_block in = {host, item}, out = {back, result};
        side_pipeline_options o = SIDE_PIPELINE_OPTIONS_INIT;
        side_plan_work w = work_of(1, item, result, 0);
        side_pipeline_stats stats;
        side_pipeline *p;
        w.pageable = true;
        w.depth = o.depth = 1 + (uint32_t)t_rng_below(&rng, 5);
        side_plan plan = made(&m, &w);
        o.item_bytes = item;
        o.result_bytes = result;
        o.source = side_source_blocks(&in, 1);
        if (result > 0)
            o.sink = side_sink_blocks(&out, 1);
        o.chunk_bytes = plan.chunk_bytes;
        T_OK(side_pipeline_create(dev, &o, &p));
        T_OK(side_pipeline_get_stats(p, &stats));
        assert_int_equal(plan.device_bytes, stats.device_bytes);
        assert_int_equal(plan.pinned_bytes, stats.pinned_bytes);
        T_OK(side_pipeline_destroy(p));
        w.pageable = false;
        assert_int_equal(made(&m, &w).pinned_bytes, 0);
        free(host);
        free(back);
    }
    side_device_close(dev);
}

T_TEST(chunks_are_neither_small_nor_large)
{
    side_machine m = real_machine();
    side_plan_work w = work_of(64, 64 << 20, 0, 100 * US);
    side_plan plan;

    w.pageable = true;
    plan = made(&m, &w);
    assert_true(plan.chunk_bytes >= 1 << 20 && plan.chunk_bytes <= 4 << 20);
    m.h2d.latency_s = 40 * US; /* a high price for each copy */
    assert_int_equal(made(&m, &w).chunk_bytes, 4 << 20);
    m.h2d.latency_s = m.queue_s = 0;
    assert_int_equal(made(&m, &w).chunk_bytes, 256 << 10);
    w.item_bytes = 1000;
    assert_int_equal(made(&m, &w).chunk_bytes, 1000);
    w.pageable = false;
    assert_int_equal(made(&m, &w).chunk_bytes, 1000);
    w.item_bytes = 64 << 20;
    assert_int_equal(made(&m, &w).chunk_bytes, 4 << 20);
}

T_TEST(verdicts_follow_the_speedup)
{
    side_machine m = plain_machine();

    T_FOR_SEEDS (seed, 300) {
        t_rng rng = t_rng_make(seed);
        side_plan_work w = work_of(1 + t_rng_below(&rng, 50), 1000, 0, logarithmic(&rng, 1e-8, 1e-4));
        w.depth = 1 + (uint32_t)t_rng_below(&rng, 3);
        m.start_s = logarithmic(&rng, 1e-9, 1e-5);
        side_plan plan = made(&m, &w);
        side_verdict want = plan.speedup >= 1.1    ? SIDE_OVERLAP_PAYS
                            : plan.speedup >= 1.02 ? SIDE_OVERLAP_HARDLY
                            : plan.speedup >= 0.99 ? SIDE_OVERLAP_NOT
                                                   : SIDE_OVERLAP_HARMS;
        assert_int_equal(plan.verdict, want);
        NEAR(plan.speedup, plan.serial_s / plan.overlapped_s, 1e-12);
        assert_true(plan.speedup_most >= plan.speedup * 0.999);
    }
    assert_string_equal(side_verdict_name(SIDE_OVERLAP_PAYS), "pays");
    assert_string_equal(side_verdict_name(SIDE_OVERLAP_HARMS), "harms");
    assert_string_equal(side_verdict_name((side_verdict)99), "unknown");
    assert_string_equal(side_bound_name(SIDE_BOUND_COMPUTE), "compute");
    assert_string_equal(side_bound_name(SIDE_BOUND_DEPTH), "depth");
    assert_string_equal(side_bound_name((side_bound)-1), "unknown");
}

/* ---------------------------------------------------------------- jitter */

T_TEST(jitter_has_its_mean_and_deviation)
{
    static const double deviations[] = {0.01, 0.1, 0.5, 1, 2};

    for (size_t i = 0; i < sizeof(deviations) / sizeof(deviations[0]); i++) {
        struct plan_jitter j;
        plan_jitter_make(&j, deviations[i]);
        for (int of = 0; of < 2; of++) {
            double sum = 0, squares = 0, product = 0;
            for (uint64_t k = 512; k < 1024; k++) {
                double f = plan_jitter_factor(&j, of, k);
                assert_true(f > 0);
                sum += f;
                squares += (f - 1) * (f - 1);
                product += (f - 1) * (plan_jitter_factor(&j, of, k + 1) - 1);
            }
            NEAR(sum / 512, 1, 1e-9);
            NEAR(sqrt(squares / 512), deviations[i], 1e-6);
            assert_true(fabs(product / squares) < 0.2); /* neighbours have nothing to do with each other */
        }
    }
}

T_TEST(jitter_costs_and_slots_help)
{
    side_machine m = real_machine();
    side_plan_work w = work_of(2000, 16 << 20, 0, 307 * US); /* as long as the copy */
    side_plan even = made(&m, &w), uneven;

    w.jitter = 0.5;
    uneven = made(&m, &w);
    assert_true(uneven.depth_s[1] > 1.1 * even.depth_s[1]);
    assert_true(uneven.depth_s[7] < uneven.depth_s[3] && uneven.depth_s[3] < uneven.depth_s[1]);
    assert_true(uneven.depth > even.depth);
    w.depth = 2;
    assert_int_equal(made(&m, &w).bound, SIDE_BOUND_DEPTH);
}

/* ---------------------------------------------------------------- budget and bad input */

T_TEST(budget_is_kept)
{
    side_machine m = real_machine();
    side_plan_work w = work_of(100, 1 << 20, 0, 1 * US);
    side_plan plan = SIDE_PLAN_INIT;

    w.jitter = 1; /* wants many */
    w.budget_bytes = 3 << 20;
    plan = made(&m, &w);
    assert_int_equal(plan.depth_most, 3);
    assert_true(plan.device_bytes <= w.budget_bytes && plan.depth <= 3);
    assert_true(plan.depth_s[7] > 0);
    w.budget_bytes = (1 << 20) - 1;
    T_STATUS(side_plan_make(&m, &w, &plan), SIDE_TOO_LARGE);
    assert_non_null(strstr(side_last_error()->message, "1048575"));
    w.budget_bytes = 3 << 20;
    w.depth = 4;
    T_STATUS(side_plan_make(&m, &w, &plan), SIDE_TOO_LARGE);
    assert_non_null(strstr(side_last_error()->message, "use depth 3"));
    w.budget_bytes = 40 << 20;
    w.depth = 40;
    assert_int_equal(made(&m, &w).depth, 40);
    assert_int_equal(made(&m, &w).device_bytes, 40 << 20);
    assert_int_equal(made(&m, &w).depth_most, 8);
    w.depth = 0;
    w.budget_bytes = 0;
    assert_int_equal(made(&m, &w).depth_most, 8);
}

static void refuses(const side_machine *m, const side_plan_work *w, const char *name)
{
    side_plan plan = SIDE_PLAN_INIT;

    plan.depth = 77;
    T_STATUS(side_plan_make(m, w, &plan), SIDE_INVALID);
    assert_int_equal(plan.depth, 77);
    if (strstr(side_last_error()->message, name) == NULL)
        T_FAIL("%s is not named: %s", name, side_last_error()->message);
}

T_TEST(bad_input_is_named)
{
    const side_plan_work good = work_of(10, 1000, 1000, 1e-6);
    const double bad[] = {-1, -1e-300, 1e10, INFINITY, -INFINITY, NAN};
    side_machine m = real_machine();
    side_plan_work w = good;
    side_plan plan = SIDE_PLAN_INIT;

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct {
            const char *name;
            double *field;
        } fields[] = {{"work.compute_s", &w.compute_s},
                      {"work.source_s", &w.source_s},
                      {"work.jitter", &w.jitter},
                      {"machine.h2d.gbps", &m.h2d.gbps},
                      {"machine.h2d.latency_s", &m.h2d.latency_s},
                      {"machine.d2h.gbps", &m.d2h.gbps},
                      {"machine.d2h.latency_s", &m.d2h.latency_s},
                      {"machine.both_gbps", &m.both_gbps},
                      {"machine.pageable_h2d.gbps", &m.pageable_h2d.gbps},
                      {"machine.pageable_h2d.latency_s", &m.pageable_h2d.latency_s},
                      {"machine.pageable_d2h.gbps", &m.pageable_d2h.gbps},
                      {"machine.pageable_d2h.latency_s", &m.pageable_d2h.latency_s},
                      {"machine.stage_gbps", &m.stage_gbps},
                      {"machine.queue_s", &m.queue_s},
                      {"machine.handover_s", &m.handover_s},
                      {"machine.start_s", &m.start_s}};
        for (size_t f = 0; f < sizeof(fields) / sizeof(fields[0]); f++) {
            double kept = *fields[f].field;
            *fields[f].field = bad[i];
            refuses(&m, &w, fields[f].name);
            *fields[f].field = kept;
        }
    }
    w.jitter = 2.1, refuses(&m, &w, "work.jitter"), w = good;
    w.items = 0, refuses(&m, &w, "work.items"), w = good;
    w.item_bytes = 0, refuses(&m, &w, "work.item_bytes"), w = good;
    w.item_bytes = SIZE_MAX, refuses(&m, &w, "work.item_bytes"), w = good;
    w.result_bytes = SIZE_MAX, refuses(&m, &w, "work.result_bytes"), w = good;
    w.streams = 17, refuses(&m, &w, "work.streams"), w = good;
    w.depth = 65, refuses(&m, &w, "work.depth"), w = good;
    w.size = 8, refuses(&m, &w, "size"), w = good;
    m.copy_engines = 0, refuses(&m, &w, "machine.copy_engines"), m = real_machine();
    m.h2d.gbps = 0, refuses(&m, &w, "machine.h2d.gbps"), m = real_machine();
    m.d2h.gbps = 0, refuses(&m, &w, "machine.d2h.gbps");
    w.result_bytes = 0; /* then it is not asked for */
    T_OK(side_plan_make(&m, &w, &plan));
    m.size = 0, refuses(&m, &w, "size"), m = real_machine();
    plan.size = 0;
    T_STATUS(side_plan_make(&m, &w, &plan), SIDE_INVALID);
    T_STATUS(side_plan_make(NULL, &w, &plan), SIDE_INVALID);
    T_STATUS(side_plan_make(&m, NULL, &plan), SIDE_INVALID);
    T_STATUS(side_plan_make(&m, &w, NULL), SIDE_INVALID);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* Pipelines that were measured on an H200 at depth 2, 3 and 4 (bench/results, 591c466; bench/plan_published.py shows all). The machine is fitted to them, so this
 * says that nothing gets worse, not how well another machine is met. */
T_TEST(published_runs_are_met)
{
    static const struct {
        uint64_t items;
        size_t mib;
        bool results;
        double compute_us, time_us[3];
    } runs[] = {
        {10, 4, true, 61.54, {1013.3, 1015.7, 1018.0}},        {10, 4, false, 61.13, {870.2, 870.6, 870.5}},
        {100, 4, false, 57.84, {7993.4, 7949.6, 7955.2}},      {10, 4, true, 23.38, {1017.6, 1006.2, 1008.3}},
        {10, 4, false, 23.87, {825.1, 824.4, 823.9}},          {100, 4, false, 20.29, {7960.8, 7929.3, 7912.3}},
        {10, 16, true, 349.98, {4141.1, 4075.1, 4071.0}},      {10, 16, false, 351.02, {3750.8, 3773.5, 3787.4}},
        {100, 16, false, 341.86, {34370.1, 34417.7, 34384.0}}, {10, 16, true, 66.10, {3720.3, 3719.1, 3726.5}},
        {10, 16, false, 63.01, {3139.8, 3192.2, 3214.7}},      {100, 16, false, 50.82, {30791.1, 30788.7, 30768.7}},
        {10, 64, true, 2686.36, {29297.3, 29284.1, 29234.0}},  {10, 64, false, 2686.98, {28102.3, 28140.9, 28031.5}},
        {10, 64, true, 357.05, {15313.9, 15102.3, 15363.0}},   {10, 64, false, 351.00, {12586.9, 12577.6, 12616.0}},
    };
    enum { RUNS = sizeof(runs) / sizeof(runs[0]) };
    side_machine m = real_machine();
    double off[3 * RUNS];

    for (size_t i = 0; i < RUNS; i++) {
        size_t bytes = runs[i].mib << 20;
        side_plan_work w = work_of(runs[i].items, bytes, runs[i].results ? bytes : 0, runs[i].compute_us * US);
        side_plan plan = made(&m, &w);
        for (size_t k = 0; k < 3; k++)
            off[3 * i + k] = fabs(plan.depth_s[k + 1] / (runs[i].time_us[k] * US) - 1);
    }
    qsort(off, 3 * RUNS, sizeof(*off), by_value);
    printf("median %.4f, worst %.4f\n", off[3 * RUNS / 2], off[3 * RUNS - 1]);
    assert_true(off[3 * RUNS / 2] < 0.01 && off[3 * RUNS - 1] < 0.05);
}

T_MAIN(T(published_runs_are_met), T(two_slots_take_the_formula), T(one_slot_overlaps_copies_of_both_directions),
       T(one_engine_takes_turns), T(both_directions_share_the_link), T(overheads_are_counted), T(one_item_is_no_gain),
       T(uneven_loaders_are_no_harm), T(more_slots_than_are_best_are_not_too_few), T(loader_and_staging_are_lanes),
       T(bound_is_the_lane_that_limits), T(depth_is_the_least_that_is_enough), T(memory_is_what_pipelines_take),
       T(chunks_are_neither_small_nor_large), T(verdicts_follow_the_speedup), T(jitter_has_its_mean_and_deviation),
       T(jitter_costs_and_slots_help), T(budget_is_kept), T(bad_input_is_named))
