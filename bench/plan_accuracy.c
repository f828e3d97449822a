/* SPDX-License-Identifier: MIT
 *
 * How far off is a plan? The machine profile was measured by another process (`sidestream bench --save`); here each case's compute is measured alone, as a user would
 * for `sidestream plan --compute`, and the pipeline runs, in passes over all cases; the plan is made of the median of the former and compared with that of the
 * latter. Which cases there are is printed first, and none is left out.
 *
 *     bench_plan_accuracy [--seconds 180] [--profile FILE] and what bench.h names
 *
 * --profile: instead of the one that the library reads. On a software device few and small cases run, to see that it works. Exits 1 where a target is missed:
 * |predicted - measured| / measured of 5 % at the median and 10 % at the worst; the depth that the plan chooses within 2 % of the best of depths 1..4. */
#include "bench.h"

#include <math.h>

enum { DEPTHS = 4, CASES = 5, GROUPS = 128, ITEMS = 4096, RING = 8, REPEATS_MOST = 16, DIMS = 6, ALONE = 3 };
#define WARM_S 0.06 /* as long as a run: by then products are at the clock that their power leaves them */

enum kind { SPIN, PRODUCTS };
static const char *const kind_names[] = {"spin", "products"};

struct one_case {
    uint32_t depth;
    double predicted, measured, samples[REPEATS_MOST];
    side_pipeline *pipeline;
};

/* Cases that differ in depth alone; they take turns. cases[DEPTHS] is the depth that the plan chooses, where that is none of the others. */
struct group {
    enum kind kind;
    size_t item_bytes, result_bytes;
    double ratio;
    unsigned depths; /* bit d: depth d is run */
    uint64_t items, spin_ns;
    int dim;                               /* PRODUCTS: which */
    size_t times;                          /* products an item */
    double alone[REPEATS_MOST], compute_s; /* its median */
    uint32_t chosen;
    struct one_case cases[CASES];
    size_t count, passes;
};

struct accuracy {
    struct bench b;
    side_machine machine;
    double until_s;
    struct group groups[GROUPS];
    size_t group_count, group_done; /* so many have been run, in the first passes at least */
    size_t most_bytes;
    char *in, *out; /* pinned, RING items each */
    side_block blocks[ITEMS], results[ITEMS];
    side_stream *stream, *gate;
    side_event *open, *begin, *end;
    void *matrix[3];
    uint64_t dims[DIMS];
    double product_s[DIMS];
    const struct group *running;
};

/* ---------------------------------------------------------------- compute */

static int queue_compute(struct accuracy *a, const struct group *g, side_stream *stream)
{
    side_op op = SIDE_OP_INIT;
    side_status status = SIDE_OK;

    op.id = g->kind == SPIN ? SIDE_OP_SPIN : SIDE_OP_MATMUL;
    op.dim[0] = g->spin_ns;
    if (g->kind == PRODUCTS) {
        op.dim[0] = op.dim[1] = op.dim[2] = a->dims[g->dim];
        op.in[0] = a->matrix[0];
        op.in[1] = a->matrix[1];
        op.out = a->matrix[2];
        op.type[0] = op.type[1] = SIDE_BF16;
        op.math = SIDE_MATH_BF16;
    }
    for (size_t i = 0; i < g->times && status == SIDE_OK; i++)
        status = side_op_async(stream, &op);
    return status == SIDE_OK ? 0 : 1;
}

static int compute(void *user, side_stream *stream, side_item *item)
{
    struct accuracy *a = user;

    (void)item;
    return queue_compute(a, a->running, stream);
}

/* One time of `count` computes one behind the other, queued behind a spin so that the host's queueing is no part of it. */
static bool time_computes(struct accuracy *a, const struct group *g, size_t count, uint64_t hold_ns, double *seconds)
{
    side_op spin = SIDE_OP_INIT;
    side_status held;

    spin.id = SIDE_OP_SPIN;
    spin.dim[0] = hold_ns;
    OK(side_op_async(a->gate, &spin));
    OK(side_event_record(a->open, a->gate));
    OK(side_stream_wait(a->stream, a->open));
    OK(side_event_record(a->begin, a->stream));
    for (size_t i = 0; i < count; i++)
        if (queue_compute(a, g, a->stream) != 0)
            bench_die("compute");
    OK(side_event_record(a->end, a->stream));
    held = side_event_query(a->open);
    OK(side_stream_sync(a->stream, 60));
    OK(side_event_elapsed(a->begin, a->end, seconds));
    *seconds /= (double)count;
    return held == SIDE_AGAIN;
}

static void warm_up(struct accuracy *a, const struct group *g, double about_s)
{
    const double computes = fmax(1, WARM_S / about_s);

    for (size_t i = 0; i < (size_t)computes; i++)
        if (queue_compute(a, g, a->stream) != 0)
            bench_die("compute");
    OK(side_stream_sync(a->stream, 60));
}

/* Seconds of one compute, alone: the median of three. */
static double compute_alone(struct accuracy *a, const struct group *g, double about_s)
{
    const double most = fmin(200.0 / (double)g->times, 0.03 / about_s);
    const size_t count = most < 4 ? 4 : most > 32 ? 32 : (size_t)most;
    double samples[ALONE];
    uint64_t hold_ns = 500000;

    for (size_t i = 0; i < ALONE;) {
        if (g->kind == PRODUCTS)
            warm_up(a, g, about_s);
        if (time_computes(a, g, count, hold_ns, &samples[i]))
            i++;
        else if (hold_ns > 200000000)
            bench_wrong("the host cannot queue %zu computes in %g s", count, (double)hold_ns * 1e-9);
        else
            hold_ns *= 2;
    }
    return quantile(samples, ALONE, 0.5);
}

/* ---------------------------------------------------------------- the cases, stated beforehand */

static void add_group(struct accuracy *a, enum kind kind, size_t bytes, bool results, double ratio, unsigned depths)
{
    struct group *g;

    if (a->group_count == GROUPS)
        bench_wrong("more than %d groups", GROUPS);
    g = &a->groups[a->group_count++];
    g->kind = kind;
    g->item_bytes = bytes;
    g->result_bytes = results ? bytes : 0;
    g->ratio = ratio;
    g->depths = depths;
    g->times = 1;
    a->most_bytes = bytes > a->most_bytes ? bytes : a->most_bytes;
}

static void choose_groups(struct accuracy *a)
{
    static const double all[] = {0.1, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10}, few[] = {0.3, 1, 3};
    static const size_t large[] = {1, 8, 64};
    const bool simulated = a->b.props.simulated;
    const double *ratios = simulated ? few : all;
    const size_t ratio_count = simulated ? 3 : 10;
    size_t cases = 0;

    for (size_t s = 0; s < 3; s++) {
        const size_t bytes = simulated ? MIB / 4 * large[s] / (s < 2 ? 1 : 4) : large[s] * MIB;

        for (size_t r = 0; r < ratio_count; r++) {
            add_group(a, SPIN, bytes, false, ratios[r], 0x1E);
            add_group(a, SPIN, bytes, true, ratios[r], 0x0C);
            if (!simulated && s > 0)
                add_group(a, PRODUCTS, bytes, r % 3 == 2, ratios[r], 0x0C);
        }
    }
    for (size_t i = 0; i < a->group_count; i++)
        for (uint32_t d = 1; d <= DEPTHS; d++)
            cases += a->groups[i].depths >> d & 1;
    printf("%zu cases: three sizes x %zu ratios x depth 1..4, compute that spins; the same with results as large, "
           "depth 2 and 3",
           cases, ratio_count);
    if (!simulated)
        printf(";\nthe two larger sizes with bf16 products as compute, depth 2 and 3, every third with results");
    printf(". And, for each, the depth that the plan chooses.\n");
}

/* ---------------------------------------------------------------- memory */

static void fill_matrix(struct accuracy *a, void *matrix, size_t bytes)
{
    uint16_t *host = pinned_block(&a->b, bytes);

    random_fill(host, bytes, 3);
    for (size_t i = 0; i < bytes / 2; i++) /* 0.5 to 2: products of real numbers draw real power */
        host[i] = (uint16_t)((host[i] & 0x80FFu) | 0x3F00u);
    OK(side_copy_async(a->stream, SIDE_COPY_H2D, matrix, host, bytes));
    OK(side_stream_sync(a->stream, 60));
    pinned_done(&a->b, host);
}

/* Of each dim what one product takes, so that a compute of any length is a few of them. */
static void products_make(struct accuracy *a)
{
    const size_t bytes = (size_t)8192 * 8192 * 2;

    for (int i = 0; i < 3; i++) {
        OK(side_device_alloc(a->b.device, bytes, &a->matrix[i]));
        if (i < 2)
            fill_matrix(a, a->matrix[i], bytes);
    }
    for (int i = 0; i < DIMS; i++) {
        struct group g = {.kind = PRODUCTS, .dim = i, .times = 1};

        a->dims[i] = (uint64_t)256 << i;
        compute_alone(a, &g, 1e-4); /* the first one loads */
        a->product_s[i] = compute_alone(a, &g, 1e-4);
    }
}

static void take(struct accuracy *a)
{
    a->in = pinned_block(&a->b, RING * a->most_bytes);
    a->out = pinned_block(&a->b, RING * a->most_bytes);
    random_fill(a->in, RING * a->most_bytes, 1);
    memset(a->out, 0, RING * a->most_bytes);
    OK(side_stream_create(a->b.device, &a->stream));
    OK(side_stream_create(a->b.device, &a->gate));
    OK(side_event_create(a->b.device, true, &a->open));
    OK(side_event_create(a->b.device, true, &a->begin));
    OK(side_event_create(a->b.device, true, &a->end));
    if (!a->b.props.simulated)
        products_make(a);
}

static void give_back(struct accuracy *a)
{
    for (int i = 0; i < 3; i++)
        side_device_free(a->b.device, a->matrix[i]);
    side_event_destroy(a->open);
    side_event_destroy(a->begin);
    side_event_destroy(a->end);
    side_stream_destroy(a->gate);
    side_stream_destroy(a->stream);
    pinned_done(&a->b, a->in);
    pinned_done(&a->b, a->out);
}

/* ---------------------------------------------------------------- a group */

static double copy_s(const struct accuracy *a, const struct group *g)
{
    return a->machine.h2d.latency_s + (double)g->item_bytes / (a->machine.h2d.gbps * 1e9);
}

static void prepare(struct accuracy *a, struct group *g)
{
    const double t = copy_s(a, g), c = g->ratio * t;
    const double longest = fmax(t * (g->result_bytes > 0 ? 1.1 : 1), c),
                 items = (a->b.props.simulated ? 0 : 0.06) / longest;

    g->spin_ns = (uint64_t)(c * 1e9);
    if (g->kind == PRODUCTS) {
        for (int i = 1; i < DIMS; i++)
            g->dim = a->product_s[i] <= c ? i : g->dim;
        g->times = (size_t)fmax(1, round(c / a->product_s[g->dim]));
    }
    g->items = items < 8 ? 8 : items > ITEMS ? ITEMS : (uint64_t)items;
}

static double predicted(struct accuracy *a, const struct group *g, uint32_t depth, uint32_t *chosen)
{
    side_plan_work work = SIDE_PLAN_WORK_INIT;
    side_plan plan = SIDE_PLAN_INIT;

    work.items = g->items;
    work.item_bytes = g->item_bytes;
    work.result_bytes = g->result_bytes;
    work.compute_s = g->compute_s;
    work.depth = depth;
    OK(side_plan_make(&a->machine, &work, &plan));
    if (chosen != NULL)
        *chosen = plan.depth;
    return plan.overlapped_s;
}

static void choose_cases(struct accuracy *a, struct group *g)
{
    predicted(a, g, 0, &g->chosen);
    for (uint32_t depth = 1; depth <= SIDE_PLAN_DEPTHS; depth++)
        if ((g->depths >> depth & 1) != 0 || depth == g->chosen)
            g->cases[g->count++].depth = depth;
}

static void pipeline_make(struct accuracy *a, const struct group *g, struct one_case *one)
{
    side_pipeline_options o = SIDE_PIPELINE_OPTIONS_INIT;

    o.item_bytes = g->item_bytes;
    o.result_bytes = g->result_bytes;
    o.depth = one->depth;
    o.source = side_source_blocks(a->blocks, g->items);
    o.compute = compute;
    o.compute_user = a;
    if (g->result_bytes > 0)
        o.sink = side_sink_blocks(a->results, g->items);
    OK(side_pipeline_create(a->b.device, &o, &one->pipeline));
}

/* One pass over a group: its compute alone, then each case, warmed up and timed. */
static void run_group(struct accuracy *a, struct group *g)
{
    const size_t pass = g->passes;

    a->running = g;
    if (pass == 0)
        prepare(a, g);
    g->alone[pass] = compute_alone(a, g, g->ratio * copy_s(a, g));
    g->passes++;
    g->compute_s = quantile(g->alone, g->passes, 0.5);
    if (pass == 0)
        choose_cases(a, g);
    for (size_t i = 0; i < g->items; i++) {
        a->blocks[i] = (side_block){a->in + i % RING * g->item_bytes, g->item_bytes};
        a->results[i] = (side_block){a->out + i % RING * g->item_bytes, g->item_bytes};
    }
    for (size_t i = 0; i < g->count; i++) {
        struct one_case *one = &g->cases[(i + pass) % g->count];

        pipeline_make(a, g, one);
        for (int round = 0; round < 2; round++) {
            double begin = device_s(&a->b);

            OK(side_pipeline_run(one->pipeline, NULL));
            one->samples[pass] = device_s(&a->b) - begin;
        }
        OK(side_pipeline_destroy(one->pipeline));
    }
}

/* Passes over all groups, so that a spell in which the host is busy falls on one sample of each of few cases. */
static void run_all(struct accuracy *a)
{
    for (size_t pass = 0; pass < a->b.repeats; pass++)
        for (size_t i = 0; i < a->group_count && host_s() < a->until_s; i++) {
            run_group(a, &a->groups[i]);
            a->group_done = i + 1 > a->group_done ? i + 1 : a->group_done;
        }
    for (size_t i = 0; i < a->group_done; i++)
        for (size_t k = 0; k < a->groups[i].count; k++) {
            struct one_case *one = &a->groups[i].cases[k];

            one->predicted = predicted(a, &a->groups[i], one->depth, NULL);
            one->measured = quantile(one->samples, a->groups[i].passes, 0.5);
        }
}

/* ---------------------------------------------------------------- what came out */

static double error_of(const struct one_case *one)
{
    return one->predicted / one->measured - 1;
}

/* What the chosen depth takes, over the least that any of depths 1..4 takes. 0: not all of them were run. */
static double choice_of(const struct group *g)
{
    double best = INFINITY, chosen = 0;

    if (g->depths != 0x1E)
        return 0;
    for (size_t i = 0; i < g->count; i++) {
        best = g->cases[i].depth <= DEPTHS ? fmin(best, g->cases[i].measured) : best;
        chosen = g->cases[i].depth == g->chosen ? g->cases[i].measured : chosen;
    }
    return chosen / best;
}

static void print_group(struct accuracy *a, const struct group *g, bool first)
{
    for (size_t i = 0; i < g->count; i++) {
        const struct one_case *one = &g->cases[i];

        printf("%-8s %6.2f MiB %8.2f MiB %6.2f %6llu %10.1f %5u%s %12.1f %12.1f %+7.2f %%\n", kind_names[g->kind],
               (double)g->item_bytes / MIB, (double)g->result_bytes / MIB, g->ratio, (unsigned long long)g->items,
               g->compute_s * 1e6, one->depth, one->depth == g->chosen ? "*" : " ", one->predicted * 1e6,
               one->measured * 1e6, 100 * error_of(one));
        fprintf(a->b.json, "%s{\"compute\": \"%s\"", first && i == 0 ? "" : ", ", kind_names[g->kind]);
        json_number(&a->b, "item_bytes", (double)g->item_bytes);
        json_number(&a->b, "result_bytes", (double)g->result_bytes);
        json_number(&a->b, "ratio", g->ratio);
        json_number(&a->b, "items", (double)g->items);
        json_number(&a->b, "compute_s", g->compute_s);
        json_number(&a->b, "depth", one->depth);
        json_number(&a->b, "chosen_depth", g->chosen);
        json_number(&a->b, "predicted_s", one->predicted);
        json_number(&a->b, "measured_s", one->measured);
        json_samples(&a->b, "samples_s", one->samples, g->passes);
        json_samples(&a->b, "alone_s", g->alone, g->passes);
        fputc('}', a->b.json);
    }
    fflush(stdout);
}

/* Median and worst of |error| over the cases of one kind (or all: -1), and how many there are. */
static size_t errors(const struct accuracy *a, int kind, double *median, double *worst)
{
    static double values[GROUPS * CASES];
    size_t count = 0;

    for (size_t i = 0; i < a->group_done; i++)
        for (size_t k = 0; k < a->groups[i].count; k++)
            if (kind < 0 || (int)a->groups[i].kind == kind)
                values[count++] = fabs(error_of(&a->groups[i].cases[k]));
    *median = quantile(values, count, 0.5);
    *worst = quantile(values, count, 1);
    return count;
}

/* Whether the targets are met. */
static bool summary(struct accuracy *a)
{
    double median, worst, kind_median, kind_worst, choice = 0;
    size_t count = errors(a, -1, &median, &worst), choices = 0, good = 0;

    printf("\n|predicted - measured| / measured of %zu cases: median %.2f %%, worst %.2f %% (targets 5 and 10)\n",
           count, 100 * median, 100 * worst);
    for (int kind = SPIN; kind <= PRODUCTS; kind++) {
        size_t n = errors(a, kind, &kind_median, &kind_worst);

        if (n > 0)
            printf("  %-8s %zu cases: median %.2f %%, worst %.2f %%\n", kind_names[kind], n, 100 * kind_median,
                   100 * kind_worst);
    }
    for (size_t i = 0; i < a->group_done; i++) {
        double over = choice_of(&a->groups[i]);

        choices += over > 0;
        good += over > 0 && over <= 1.02;
        choice = fmax(choice, over);
    }
    printf("the depth that the plan chooses is within 2 %% of the best of depths 1..4 in %zu of %zu; at worst %.2f %% "
           "over it\n",
           good, choices, 100 * (choice - 1));
    if (a->b.props.simulated)
        printf("simulated: a model agrees with another one; that says nothing of hardware\n");
    if (a->group_done < a->group_count)
        printf("NOT RUN: %zu of %zu groups, no time was left (--seconds)\n", a->group_count - a->group_done,
               a->group_count);
    fputc(']', a->b.json);
    json_number(&a->b, "cases", (double)count);
    json_number(&a->b, "median_error", median);
    json_number(&a->b, "worst_error", worst);
    json_number(&a->b, "choices", (double)choices);
    json_number(&a->b, "choices_good", (double)good);
    json_number(&a->b, "worst_choice", choice);
    json_number(&a->b, "groups_not_run", (double)(a->group_count - a->group_done));
    return median <= 0.05 && worst <= 0.10 && good == choices && a->group_done == a->group_count;
}

static void profile_read(struct accuracy *a)
{
    const char *path = bench_text(&a->b, "--profile", NULL);

    a->machine = (side_machine)SIDE_MACHINE_INIT;
    if (path != NULL)
        OK(side_machine_load(path, &a->machine));
    else
        OK(side_machine_get(a->b.device, &a->machine));
    if (a->machine.from == SIDE_MACHINE_ESTIMATED) {
        fprintf(
            stderr,
            "bench_plan_accuracy: there is no measured profile of this machine; run sidestream bench --save first\n");
        exit(2);
    }
    printf("profile: %s, taken %s: H2D %.2f GB/s + %.2f us, D2H %.2f GB/s + %.2f us, both %.1f GB/s; an item's "
           "queueing %.2f us, "
           "hand-over %.2f us, start %.1f us\n",
           a->machine.gpu, a->machine.taken[0] != '\0' ? a->machine.taken : "(a model)", a->machine.h2d.gbps,
           a->machine.h2d.latency_s * 1e6, a->machine.d2h.gbps, a->machine.d2h.latency_s * 1e6, a->machine.both_gbps,
           a->machine.queue_s * 1e6, a->machine.handover_s * 1e6, a->machine.start_s * 1e6);
    json_text(&a->b, "profile_taken", a->machine.taken);
}

int main(int argc, char **argv)
{
    struct accuracy *a = calloc(1, sizeof(*a));
    bool met;

    if (a == NULL)
        return 1;
    a->b = bench_begin("plan_accuracy", argc, argv, 3);
    if (a->b.repeats > REPEATS_MOST)
        bench_wrong("--repeats takes %d at most", REPEATS_MOST);
    a->until_s = host_s() + (double)bench_number(&a->b, "--seconds", 180);
    profile_read(a);
    choose_groups(a);
    take(a);
    fprintf(a->b.json, ", \"rows\": [");
    printf("\n%-8s %10s %12s %6s %6s %10s %6s %12s %12s %9s\n", "compute", "item", "result", "ratio", "items",
           "alone us", "depth", "predicted us", "measured us", "error");
    run_all(a);
    for (size_t i = 0; i < a->group_done; i++)
        print_group(a, &a->groups[i], i == 0);
    met = summary(a);
    give_back(a);
    bench_end(&a->b);
    free(a);
    return met ? 0 : 1;
}
