/* SPDX-License-Identifier: MIT
 *
 * Pipelines that leave their depth to the library: against all depths that it could have chosen; what memory, hints and the caller's own loop do to it. */
#include "plan_help.h"

#include <stdlib.h>

static side_status create(side_device *dev, side_pipeline_options *o, uint32_t *depth)
{
    side_pipeline_stats stats;
    side_pipeline *p = NULL;
    side_status s = side_pipeline_create(dev, o, &p);

    if (s != SIDE_OK)
        return s;
    T_OK(side_pipeline_get_stats(p, &stats));
    *depth = stats.depth;
    T_OK(side_pipeline_destroy(p));
    return SIDE_OK;
}

static int nothing(void *user, side_stream *stream, side_item *item)
{
    (void)user;
    (void)stream;
    (void)item;
    return 0;
}

/* A source of 100 files' worth: no memory is needed for it. */
static side_pipeline_options options(size_t item)
{
    side_pipeline_options o = SIDE_PIPELINE_OPTIONS_INIT;

    o.item_bytes = item;
    o.source = side_source_file(0, 0, 100 * (uint64_t)item);
    o.compute = nothing;
    return o;
}

/* ---------------------------------------------------------------- within 2 % of the best of the grid */

static const double ratios[] = {0.1, 0.2, 0.5, 0.8, 1, 1.25, 2, 5, 10};
enum { RATIOS = sizeof(ratios) / sizeof(ratios[0]) };

static void compare(struct real *r, double ratio, double deviation, double *worst)
{
    double copy_ns = 7700 + (double)r->item, width = sqrt(log(1 + deviation * deviation)), best = INFINITY;
    t_rng rng = t_rng_make(7);
    side_pipeline_stats used;

    for (uint64_t i = 0; i < r->n; i++)
        r->cost_ns[i] = (uint64_t)(1 + ratio * copy_ns * exp(width * normal(&rng) - width * width / 2));
    for (uint32_t depth = 1; depth <= 8; depth++)
        best = fmin(best, real_run(r, depth, 1, false, NULL));
    for (int known = 0; known < 2; known++) {
        r->hint_s = known ? ratio * copy_ns * 1e-9 : 0;
        double time = real_run(r, 0, 1, false, &used);
        *worst = fmax(*worst, time / best);
        if (time > 1.02 * best)
            T_FAIL("%zu bytes, %zu back, ratio %g, deviation %g, %s: depth %u takes %.0f ns, the best %.0f", r->item,
                   r->result, ratio, deviation, known ? "known" : "not known", used.depth, time * 1e9, best * 1e9);
        assert_true(used.depth >= 2 && used.depth <= 8);
    }
    r->hint_s = 0;
}

T_TEST(chosen_depths_are_within_two_percent_of_the_best)
{
    static const size_t sizes[] = {256, 8192, 65536};
    struct real r = {.n = T_SANITIZED ? 40 : 150};
    double worst = 0;

    r.cost_ns = calloc(r.n, sizeof(*r.cost_ns));
    for (int engines = 1; engines <= 2; engines++) {
        real_open(&r, engines == 1 ? "7700,copy_engines=1" : "7700,copy_engines=2", 65536);
        for (size_t s = 0; s < 3; s++)
            for (int back = 0; back < 3; back++)
                for (size_t i = 0; i < RATIOS; i += T_SANITIZED ? 4 : 1) { /* 0.1, 1 and 10 */
                    r.item = sizes[s];
                    r.result = back == 0 ? 0 : back == 1 ? r.item / 2 : r.item;
                    compare(&r, ratios[i], 0, &worst);
                    compare(&r, ratios[i], 0.1, &worst);
                }
        real_close(&r);
    }
    printf("worst %.4f of the best\n", worst);
    free(r.cost_ns);
}

/* ---------------------------------------------------------------- what changes it */

T_TEST(hints_save_slots)
{
    side_pipeline_options o = options(64 << 10);
    uint32_t any = 0, depth = 0;
    side_device *dev;

    T_OK(side_device_open("sim", &dev));
    T_OK(create(dev, &o, &any));
    assert_true(any >= 2 && any <= 8);
    for (double s = 1e-7; s < 1; s *= 3) {
        o.compute_s = s;
        T_OK(create(dev, &o, &depth));
        assert_true(depth >= 2 && depth <= any);
    }
    assert_int_equal(depth, 2); /* a second an item: nothing to wait for */
    side_device_close(dev);
}

/* The loop is the caller's: it may hold an item while it asks for the next. */
T_TEST(pulled_pipelines_have_three_slots)
{
    side_pipeline_options o = options(64 << 10);
    uint32_t depth = 0;
    side_device *dev;

    T_OK(side_device_open("sim", &dev));
    o.compute = NULL;
    o.compute_s = 1;
    T_OK(create(dev, &o, &depth));
    assert_int_equal(depth, 3);
    side_device_close(dev);
}

T_TEST(memory_is_not_filled)
{
    side_pipeline_options o = options(64 << 10);
    uint32_t full = 0, depth = 0;
    side_device *dev;
    char spec[64];

    T_OK(side_device_open("sim", &dev));
    T_OK(create(dev, &o, &full));
    side_device_close(dev);
    assert_true(full > 2);
    for (uint32_t slots = 2; slots <= 8 * 8; slots++) { /* of 64 KiB, in all of the memory */
        snprintf(spec, sizeof(spec), "sim:memory=%uK", slots * 64);
        T_OK(side_device_open(spec, &dev));
        T_OK(create(dev, &o, &depth));
        uint32_t share = slots / 4, want = share > full ? full : share;
        if (depth != (want > 2 ? want : 2))
            T_FAIL("%u slots of memory: depth %u", slots, depth);
        side_device_close(dev);
    }
    T_OK(side_device_open("sim:memory=96K", &dev)); /* not even two */
    T_STATUS(create(dev, &o, &depth), SIDE_NO_DEVICE_MEMORY);
    side_device_close(dev);
}

T_TEST(asked_for_is_asked_for)
{
    side_pipeline_options o = options(64 << 10);
    uint32_t depth = 0;
    side_device *dev;

    T_OK(side_device_open("sim", &dev));
    for (o.depth = 1; o.depth <= 64; o.depth += 21) {
        T_OK(create(dev, &o, &depth));
        assert_int_equal(depth, o.depth);
    }
    o.depth = 0;
    setenv("SIDESTREAM_DISABLE", "1", 1);
    T_OK(create(dev, &o, &depth));
    assert_int_equal(depth, 1);
    unsetenv("SIDESTREAM_DISABLE");
    side_device_close(dev);
}

T_TEST(bad_hints_are_named)
{
    const double bad[] = {-1, NAN, INFINITY, 1e10};
    side_pipeline_options o = options(1000);
    uint32_t depth = 0;
    side_device *dev;

    T_OK(side_device_open("sim", &dev));
    for (size_t i = 0; i < 4; i++) {
        o.compute_s = bad[i];
        T_STATUS(create(dev, &o, &depth), SIDE_INVALID);
        assert_non_null(strstr(side_last_error()->message, "compute_s"));
    }
    o.compute_s = 0;
    o.size = offsetof(side_pipeline_options, compute_s); /* a program that does not know of hints */
    T_OK(create(dev, &o, &depth));
    o.size--;
    T_STATUS(create(dev, &o, &depth), SIDE_INVALID);
    side_device_close(dev);
}

static char told[4096];

static void keep(void *user, side_level level, const char *component, const char *message)
{
    (void)user;
    (void)level;
    (void)component;
    if (strstr(message, "chosen") != NULL)
        snprintf(told, sizeof(told), "%s", message);
}

T_TEST(the_log_says_what_and_why)
{
    side_pipeline_options o = options(64 << 10);
    uint32_t depth = 0;
    side_device *dev;
    char want[32];

    side_log_callback(keep, NULL, SIDE_LEVEL_INFO);
    T_OK(side_device_open("sim", &dev));
    T_OK(create(dev, &o, &depth));
    snprintf(want, sizeof(want), "depth %u chosen", depth);
    assert_non_null(strstr(told, want));
    assert_non_null(strstr(told, "simulated"));
    o.compute_s = 3e-3;
    T_OK(create(dev, &o, &depth));
    assert_non_null(strstr(told, "3 ms"));
    side_device_close(dev);
    side_log_callback(NULL, NULL, SIDE_LEVEL_INFO);
}

/* Sources of all kinds and sizes, on machines of all kinds. */
T_TEST(any_pipeline_gets_a_depth)
{
    static const char *const specs[] = {"sim",         "sim:t4",        "sim:gh200", "sim:one-copy-engine",
                                        "sim:rtx4090", "sim:a100-pcie4"};

    T_FOR_SEEDS (seed, 60) {
        t_rng rng = t_rng_make(seed);
        side_pipeline_options o = options((size_t)2 << t_rng_below(&rng, 24));
        uint32_t depth = 0;
        side_device *dev;
        T_OK(side_device_open(specs[t_rng_below(&rng, 6)], &dev));
        o.source.length = t_rng_below(&rng, 1 << 30);
        if (t_rng_chance(&rng, 2)) {
            o.result_bytes = (size_t)2 << t_rng_below(&rng, 24);
            o.sink = side_sink_file(1, 0);
        }
        o.compute_s = t_rng_chance(&rng, 2) ? 0 : pow(10, -9 + (double)t_rng_below(&rng, 12));
        T_OK(create(dev, &o, &depth));
        assert_true(depth >= 2 && depth <= 8);
        side_device_close(dev);
    }
}

T_MAIN(T_LONG(chosen_depths_are_within_two_percent_of_the_best, 120), T(hints_save_slots),
       T(pulled_pipelines_have_three_slots), T(memory_is_not_filled), T(asked_for_is_asked_for), T(bad_hints_are_named),
       T(the_log_says_what_and_why), T(any_pipeline_gets_a_depth))
