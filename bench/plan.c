/* SPDX-License-Identifier: MIT
 *
 * What the model of plans says of runs that were measured: reads one a line from stdin, prints its times beside them. bench/plan_published.py makes the lines of
 * the results of `sidestream demo --json`.
 *
 *     items item_bytes result_bytes compute_s pinned_s N depth_1 time_1 ... depth_N time_N name
 *
 *     bench_plan [--gbps 55.3] [--latency-us 3.0] [--both 101] [--queue-us 8] [--handover-us 2] [--start-us 15]
 *
 * The defaults are an H200's on PCIe 5.0 x16, taken from the same results: copies queued one behind the other have a latency of 3 us. */
#include "bench.h"

enum { MOST = 8, CASES = 1000 };

struct seen {
    double ratio[CASES];
    size_t count;
};

static double argument(int argc, char **argv, const char *key, double otherwise)
{
    for (int i = 1; i + 1 < argc; i++)
        if (strcmp(argv[i], key) == 0)
            return strtod(argv[i + 1], NULL);
    return otherwise;
}

static side_machine machine_from(int argc, char **argv)
{
    side_machine m = SIDE_MACHINE_INIT;

    m.copy_engines = 3;
    m.h2d.gbps = m.d2h.gbps = argument(argc, argv, "--gbps", 55.3);
    m.h2d.latency_s = m.d2h.latency_s = argument(argc, argv, "--latency-us", 3.0) * 1e-6;
    m.both_gbps = argument(argc, argv, "--both", 101);
    m.queue_s = argument(argc, argv, "--queue-us", 8) * 1e-6;
    m.handover_s = argument(argc, argv, "--handover-us", 2) * 1e-6;
    m.start_s = argument(argc, argv, "--start-us", 15) * 1e-6;
    return m;
}

static void compare(const char *name, const char *what, double predicted, double measured, struct seen *seen)
{
    double off = predicted / measured - 1;

    printf("%-34s %-8s %10.1f %10.1f %+7.2f %%\n", name, what, predicted * 1e6, measured * 1e6, off * 100);
    if (seen->count < CASES)
        seen->ratio[seen->count++] = off < 0 ? -off : off;
}

static void summary(const char *what, const struct seen *seen)
{
    printf("%s: %zu cases, |predicted - measured| / measured: median %.2f %%, worst %.2f %%\n", what, seen->count,
           quantile(seen->ratio, seen->count, 0.5) * 100, quantile(seen->ratio, seen->count, 1) * 100);
}

int main(int argc, char **argv)
{
    static struct seen pipelines, serial;
    const side_machine machine = machine_from(argc, argv);
    unsigned long long items, item, result;
    double compute, pinned, times[MOST];
    unsigned count, depths[MOST];
    char name[200], what[20];

    printf("%-34s %-8s %10s %10s\n", "", "", "plan us", "measured");
    while (scanf("%llu %llu %llu %lf %lf %u", &items, &item, &result, &compute, &pinned, &count) == 6) {
        side_plan_work work = SIDE_PLAN_WORK_INIT;
        side_plan plan = SIDE_PLAN_INIT;
        for (unsigned i = 0; i < count && i < MOST; i++)
            if (scanf("%u %lf", &depths[i], &times[i]) != 2)
                return 2;
        if (count > MOST || scanf("%199s", name) != 1)
            return 2;
        work.items = items;
        work.item_bytes = item;
        work.result_bytes = result;
        work.compute_s = compute;
        OK(side_plan_make(&machine, &work, &plan));
        compare(name, "serial", plan.serial_s, pinned, &serial);
        for (unsigned i = 0; i < count; i++) {
            snprintf(what, sizeof(what), "depth %u", depths[i]);
            if (depths[i] >= 1 && depths[i] <= SIDE_PLAN_DEPTHS)
                compare(name, what, plan.depth_s[depths[i] - 1], times[i], &pipelines);
        }
        printf("%-34s bound %.1f us, %s, %s, depth %u, at most %.2fx\n", name, plan.bound_s * 1e6,
               side_bound_name(plan.bound), side_verdict_name(plan.verdict), plan.depth, plan.speedup_most);
    }
    summary("serial", &serial);
    summary("pipelines", &pipelines);
    return 0;
}
