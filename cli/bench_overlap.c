/* SPDX-License-Identifier: MIT */
#include "bench_overlap.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEPTHS = 4, MOST_GROUPS = 24 };
#define MIB           ((size_t)1 << 20)
#define LENGTH(array) (sizeof(array) / sizeof((array)[0]))
static const double ratios[] = {0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10}, quick_ratios[] = {0.3, 1, 3};
static const double product_ratios[] = {0.3, 1, 3};
/* What a run may seem to be faster than is possible by, before that is called a measuring error: t and c have errors of their own. */
static const double slack = 0.03;

/* ---------------------------------------------------------------- a group */

static bool is_streams(const struct overlap_group *g)
{
    return g->cases[0].streams > 0;
}

static side_status measure_group(struct overlap *o, struct overlap_group *g)
{
    const struct bench *b = o->bench;
    const size_t most = b->args.samples > 0 || b->samples < 3 ? b->samples : 3;
    side_status status = overlap_alone(o, g), ended;

    for (size_t i = 0; i < g->count && status == SIDE_OK; i++)
        status = overlap_create(o, g, &g->cases[i]);
    for (size_t round = b->props.simulated ? 1 : 0; round <= most && status == SIDE_OK; round++)
        for (size_t i = 0; i < g->count && status == SIDE_OK; i++)
            status = overlap_run(o, g, &g->cases[i], round > 0); /* the first one warms up */
    for (size_t i = 0; i < g->count; i++) {
        ended = overlap_destroy(o, &g->cases[i]);
        status = status == SIDE_OK ? ended : status;
    }
    return status;
}

static void check_bound(struct overlap *o, const struct overlap_group *g)
{
    for (size_t i = 0; i < g->count; i++) {
        double over = bench_median(&g->cases[i].time_s) / g->bound_s;

        /* Computes on several streams may share the device, and products run at a clock of their own. */
        if (over < 1 - slack && g->cases[i].streams <= 1 && !g->products)
            bench_error(o->bench, EXIT_MEASURING,
                        "overlap: ratio %g, depth %u took %.3f of the least time that is possible; run it again",
                        g->ratio, g->cases[i].depth, over);
    }
}

/* ---------------------------------------------------------------- which groups */

static void add_depths(struct overlap_group *groups, size_t *count, double ratio, bool products)
{
    struct overlap_group *g = &groups[(*count)++];

    g->ratio = ratio;
    g->products = products;
    for (uint32_t depth = 1; depth <= DEPTHS; depth++)
        g->cases[g->count++].depth = depth;
}

/* One stream more or less needs one slot more or less. */
static void add_streams(const struct bench *b, struct overlap_group *groups, size_t *count, double ratio, bool products)
{
    struct overlap_group *g = &groups[(*count)++];

    g->ratio = ratio;
    g->products = products;
    for (size_t i = 0; i < b->args.stream_counts && g->count < OVERLAP_CASES; i++) {
        g->cases[g->count].streams = b->args.streams[i];
        g->cases[g->count++].depth = b->args.streams[i] + 1;
    }
}

static size_t choose_groups(struct overlap *o, struct overlap_group *groups)
{
    const struct bench *b = o->bench;
    const double *list = b->args.quick ? quick_ratios : ratios;
    const size_t length = b->args.quick ? LENGTH(quick_ratios) : LENGTH(ratios);
    const bool products = !b->props.simulated && o->gemm.dim > 0;
    size_t count = 0;

    for (size_t i = 0; i < length; i++)
        add_depths(groups, &count, list[i], false);
    for (size_t i = 0; products && i < LENGTH(product_ratios); i++)
        add_depths(groups, &count, product_ratios[i], true);
    for (size_t i = 0; b->args.stream_counts > 0 && i < LENGTH(product_ratios); i++)
        add_streams(b, groups, &count, product_ratios[i], products);
    return count;
}

/* ---------------------------------------------------------------- report */

static void print_group(const struct overlap *o, const struct overlap_group *g)
{
    char t[16], c[16], plan[16];

    bench_print(o->bench, "  %-8s %5.3g  %8s %8s", g->products ? "products" : "spin", g->c / g->t,
                bench_seconds_text(g->t, t), bench_seconds_text(g->c, c));
    for (size_t i = 0; i < g->count; i++) {
        const struct overlap_case *one = &g->cases[i];
        const double time_s = bench_median(&one->time_s);

        snprintf(plan, sizeof(plan), isfinite(one->plan_s) ? "%+.1f %%" : "-", 100 * (one->plan_s / time_s - 1));
        bench_print(o->bench, "   %6.3f %8s", time_s / g->bound_s, plan);
    }
    bench_print(o->bench, "\n");
}

static void print_head(const struct overlap *o, const struct overlap_group *g)
{
    bench_print(o->bench, "  %-8s %5s  %8s %8s", "compute", "ratio", "copy", "compute");
    for (size_t i = 0; i < g->count; i++)
        bench_print(o->bench, "   %8s %-6u", is_streams(g) ? "streams" : "depth",
                    is_streams(g) ? g->cases[i].streams : g->cases[i].depth);
    bench_print(o->bench, "\n");
}

static void print(const struct overlap *o, const struct overlap_group *groups, size_t count)
{
    static const char *const from[] = {
        [SIDE_MACHINE_ESTIMATED] = "an estimate", [SIDE_MACHINE_MEASURED] = "measured", [SIDE_MACHINE_SIMULATED] = "the model's own"};
    char size[32];

    bench_print(
        o->bench,
        "\noverlap: pipelines of %s items, time over the bound, and how far off the plan is (its profile: %s)\n",
        bytes_text(o->item_bytes, size), from[o->bench->machine.from]);
    for (size_t i = 0; i < count; i++) {
        if (i == 0 || is_streams(&groups[i]) != is_streams(&groups[i - 1]))
            print_head(o, &groups[i]);
        print_group(o, &groups[i]);
    }
}

static void report(struct overlap *o, const struct overlap_group *groups, size_t count)
{
    json_t *rows = json_array();

    print(o, groups, count);
    for (size_t i = 0; i < count; i++)
        for (size_t k = 0; k < groups[i].count; k++) {
            const struct overlap_group *g = &groups[i];
            const struct overlap_case *one = &g->cases[k];

            json_array_append_new(rows, json_pack("{s:s, s:o, s:I, s:o, s:o, s:i, s:i, s:o, s:o, s:o}", "compute",
                                                  g->products ? "products" : "spin", "ratio", json_number(g->ratio),
                                                  "items", (json_int_t)g->items, "copy_s", json_number(g->t),
                                                  "compute_s", json_number(g->c), "depth", (int)one->depth, "streams",
                                                  (int)(one->streams > 0 ? one->streams : 1), "bound_s",
                                                  json_number(g->bound_s), "plan_s", json_number(one->plan_s), "time_s",
                                                  bench_samples_json(&one->time_s)));
        }
    bench_json(o->bench, "overlap", json_pack("{s:I, s:o}", "item_bytes", (json_int_t)o->item_bytes, "rows", rows));
}

/* ---------------------------------------------------------------- the suite */

static side_status measure(struct overlap *o, struct overlap_group *groups, size_t *count)
{
    side_status status = overlap_take(o);

    if (status == SIDE_OK && !o->bench->props.simulated)
        status = bench_gemm_make(o->bench, 2048, 0, &o->gemm);
    *count = choose_groups(o, groups);
    for (size_t i = 0; i < *count && status == SIDE_OK; i++) {
        status = measure_group(o, &groups[i]);
        if (status == SIDE_OK)
            check_bound(o, &groups[i]);
    }
    return status;
}

/* Items of 16 MiB, 16 of them on the host; less where the share is small. */
static void choose_sizes(struct overlap *o)
{
    const struct bench *b = o->bench;

    o->ring = 16;
    o->item_bytes = (b->props.simulated ? 4 : 16) * MIB;
    while (o->item_bytes > 64 * 1024 &&
           (2 * o->ring * o->item_bytes > bench_host_room(b) || 48 * o->item_bytes > bench_device_room(b)))
        o->item_bytes /= 2;
}

int bench_overlap(struct bench *b)
{
    struct overlap *o = calloc(1, sizeof(*o));
    struct overlap_group *groups = calloc(MOST_GROUPS, sizeof(*groups));
    size_t count = 0;
    side_status status = SIDE_NO_MEMORY;

    if (o == NULL || groups == NULL)
        goto done;
    o->bench = b;
    if (!b->props.kernels) {
        bench_print(b, "\noverlap: not measured, the device has no kernels: %s\n", b->props.kernels_from);
        bench_json(b, "overlap", json_pack("{s:s}", "not_measured", b->props.kernels_from));
        free(groups);
        free(o);
        return EXIT_DONE;
    }
    choose_sizes(o);
    status = measure(o, groups, &count);
    if (status == SIDE_OK)
        report(o, groups, count);
    else if (status == SIDE_CALLBACK && o->kept.status != SIDE_OK) {
        (void)say_kept(&o->kept, status, "overlap");
        b->said = true;
    }
    overlap_free(o);
    o = NULL;
done:
    free(o);
    free(groups);
    return status == SIDE_OK ? EXIT_DONE : bench_failed(b, status, "overlap");
}
