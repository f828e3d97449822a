/* SPDX-License-Identifier: MIT
 * What the bench makes of its samples: medians and spreads, and latency and rate of copies through noise and outliers. */
#include "t.h"

#include "bench.h"

#include <math.h>

enum { SIZES = 10 };

/* 4 KiB, 16 KiB, ... 1 GiB by a known latency and rate; `noise`: relative, to both sides. */
static void copies(t_rng *rng, double latency, double gbps, double noise, double bytes[SIZES], double seconds[SIZES])
{
    for (size_t i = 0; i < SIZES; i++) {
        double by = noise * ((double)t_rng_below(rng, 2001) / 1000 - 1);

        bytes[i] = (double)((size_t)4096 << 2 * i);
        seconds[i] = (latency + bytes[i] / (gbps * 1e9)) * (1 + by);
    }
}

static double off(double got, double want)
{
    return fabs(got / want - 1);
}

T_TEST(samples)
{
    struct bench_samples s = {.count = 0};

    assert_true(isnan(bench_median(&s)) && isnan(bench_least(&s)) && isnan(bench_most(&s)));
    bench_add(&s, 3);
    assert_true(bench_median(&s) == 3 && bench_spread(&s) == 0);
    bench_add(&s, 1);
    assert_true(bench_median(&s) == 2 && bench_least(&s) == 1 && bench_most(&s) == 3 && bench_spread(&s) == 1);
    bench_add(&s, 100);
    assert_true(bench_median(&s) == 3 && bench_spread(&s) == 33);
    assert_true(s.value[0] == 3 && s.value[1] == 1 && s.value[2] == 100); /* as they were taken */
    for (int i = 0; i < 2 * BENCH_SAMPLES; i++)
        bench_add(&s, 7);
    assert_int_equal(s.count, BENCH_SAMPLES);
    assert_true(bench_median(&s) == 7);
}

T_TEST(fit_exact)
{
    double bytes[SIZES], seconds[SIZES];
    t_rng rng = t_rng_make(1);
    side_rate rate;

    copies(&rng, 7.7e-6, 55.3, 0, bytes, seconds);
    for (size_t n = 2; n <= SIZES; n++) {
        assert_true(bench_fit(bytes, seconds, n, &rate));
        assert_true(off(rate.latency_s, 7.7e-6) < 1e-6 && off(rate.gbps, 55.3) < 1e-6);
    }
    copies(&rng, 0, 400, 0, bytes, seconds);
    assert_true(bench_fit(bytes, seconds, SIZES, &rate) && rate.latency_s < 1e-12 && off(rate.gbps, 400) < 1e-6);
}

/* Every size counts the same, relative to its time: the small ones for the latency, the large ones for the rate. */
T_TEST(fit_noise)
{
    double bytes[SIZES], seconds[SIZES];
    side_rate rate;

    for (uint64_t seed = 1; seed <= 200; seed++) {
        t_rng rng = t_rng_make(seed);

        copies(&rng, 1.5e-6, 25, 0.02, bytes, seconds);
        assert_true(bench_fit(bytes, seconds, SIZES, &rate));
        assert_true(off(rate.latency_s, 1.5e-6) < 0.04 && off(rate.gbps, 25) < 0.03);
    }
}

T_TEST(fit_outlier)
{
    double bytes[SIZES], seconds[SIZES];
    side_rate rate;

    for (size_t bad = 0; bad < SIZES; bad++) {
        for (int way = 0; way < 2; way++) {
            t_rng rng = t_rng_make(bad);

            copies(&rng, 5e-6, 50, 0.005, bytes, seconds);
            seconds[bad] *= way == 0 ? 3 : 1.4;
            assert_true(bench_fit(bytes, seconds, SIZES, &rate));
            assert_true(off(rate.latency_s, 5e-6) < 0.05 && off(rate.gbps, 50) < 0.05);
        }
    }
}

T_TEST(fit_none)
{
    const double bytes[] = {4096, 16384, 65536}, equal[] = {4096, 4096, 4096}, down[] = {3e-6, 2e-6, 1e-6},
                 up[] = {1e-6, 2e-6, 3e-6};
    double many[100];
    side_rate rate = {1, 2};

    assert_false(bench_fit(bytes, up, 1, &rate));
    assert_false(bench_fit(equal, up, 3, &rate));
    assert_false(bench_fit(bytes, down, 3, &rate));
    for (size_t i = 0; i < 100; i++)
        many[i] = (double)(i + 1);
    assert_false(bench_fit(many, many, 100, &rate));
    assert_true(rate.latency_s == 1 && rate.gbps == 2);
    assert_true(bench_fit(bytes, up, 3, &rate));
}

T_MAIN(T(samples), T(fit_exact), T(fit_noise), T(fit_outlier), T(fit_none))
