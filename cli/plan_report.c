/* SPDX-License-Identifier: MIT */
#include "plan.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { SHOWN_ADVICE = 5 };

const char *planning_time_text(double seconds, char text[32])
{
    static const char *const units[] = {"s", "ms", "us", "ns"};
    const double day_s = 86400;
    size_t unit = 0;

    if (seconds >= 2 * day_s) {
        snprintf(text, 32, "%.3g days", seconds / day_s);
        return text;
    }
    while (unit < 3 && seconds < 0.9995) {
        seconds *= 1000;
        unit++;
    }
    snprintf(text, 32, seconds < 9.995 ? "%.2f %s" : seconds < 99.95 ? "%.1f %s" : "%.0f %s", seconds, units[unit]);
    return text;
}

/* ---------------------------------------------------------------- text */

#define MOSTLY \
    0.8 /* of what is not compute; less of it is copies where the host's queueing or the source takes the rest */

static void print_work(const struct planning *p)
{
    const side_plan_work *w = &p->work;
    const side_plan *plan = &p->plan;
    const double share = planning_share(plan, w), other = share * planning_serial(plan, w);
    const double copies = (double)w->items * (plan->h2d_s + plan->d2h_s);
    char in[32], out[32], compute[32], copy_in[32], copy_out[32], source[32];

    printf("machine     %s\n", p->name);
    printf("figures     %s\n", p->source);
    printf("work        %llu x (%s%s in, %s compute%s%s%s)", (unsigned long long)w->items, bytes_text(w->item_bytes, in),
           w->pageable ? " pageable" : "", planning_time_text(w->compute_s, compute), w->result_bytes > 0 ? ", " : "",
           w->result_bytes > 0 ? bytes_text(w->result_bytes, out) : "", w->result_bytes > 0 ? " back" : "");
    if (w->source_s > 0)
        printf(", source %s", planning_time_text(w->source_s, source));
    if (w->jitter > 0)
        printf(", jitter %g %%", w->jitter * 100);
    if (w->streams > 1)
        printf(", %u compute streams", w->streams);
    printf("\nan item     copy in %s, compute %s", planning_time_text(plan->h2d_s, copy_in), compute);
    if (w->result_bytes > 0)
        printf(", copy out %s", planning_time_text(plan->d2h_s, copy_out));
    printf("; %.0f %% of the serial time is %s\n\n", share * 100,
           !w->pageable && copies < MOSTLY * other ? "not compute" : "transfer");
}

static const char *bound_words(side_bound bound)
{
    switch (bound) {
    case SIDE_BOUND_COMPUTE: return "compute";
    case SIDE_BOUND_H2D: return "copies to the device";
    case SIDE_BOUND_D2H: return "copies back to the host";
    case SIDE_BOUND_LINK: return "copies both ways, which share the link";
    case SIDE_BOUND_STAGE: return "threads that copy pageable memory into pinned";
    case SIDE_BOUND_SOURCE: return "the source";
    case SIDE_BOUND_HOST: return "the host, which queues the items";
    case SIDE_BOUND_LATENCY: return "latency: hand-overs, and the first and the last item";
    case SIDE_BOUND_DEPTH: return "too few buffers";
    }
    return "unknown";
}

static void print_times(const struct planning *p)
{
    const side_plan *plan = &p->plan;
    char text[32];

    printf("serial      %-8s  one after the other, from pinned memory\n", planning_time_text(plan->serial_s, text));
    if (p->work.pageable && plan->pageable_s > 0)
        printf("pageable    %-8s  the same with plain copies of pageable memory\n",
               planning_time_text(plan->pageable_s, text));
    printf("overlapped  %-8s  %.2fx with %u buffer%s", planning_time_text(plan->overlapped_s, text), plan->speedup,
           plan->depth, plan->depth > 1 ? "s" : "");
    if (p->work.pageable && plan->pageable_s > 0)
        printf("; %.2fx against pinned", plan->serial_s / plan->overlapped_s);
    if (plan->speedup_most > plan->speedup * 1.01)
        printf("; %.2fx with endless items", plan->speedup_most);
    printf("\nbound       %-8s  no schedule on this link can be faster\n", planning_time_text(plan->bound_s, text));
    if (p->trace.total_s > 0)
        printf("trace       %-8s  the run that the figures are from\n", planning_time_text(p->trace.total_s, text));
    printf("limited by  %s; the device computes %.0f %% of the time\n\n", bound_words(plan->bound),
           plan->compute_busy * 100);
}

/* As many as matter: up to one more than is enough, and those that were asked for. */
static uint32_t rows(const side_plan *plan)
{
    uint32_t n = plan->depth + 1 > 4 ? plan->depth + 1 : 4;

    return n < SIDE_PLAN_DEPTHS ? n : SIDE_PLAN_DEPTHS;
}

static void print_row(const struct planning *p, uint32_t depth, double time_s, double before_s)
{
    const side_plan *plan = &p->plan;
    const size_t slot = plan->device_bytes / plan->depth;
    char time[32], all[32], one[32];

    printf("%7u  %9s  %8.2fx  %13s", depth, planning_time_text(time_s, time), planning_serial(plan, &p->work) / time_s,
           bytes_text(slot * depth, all));
    if (before_s > 0) {
        const double gain = (before_s / time_s - 1) * 100;
        printf("  %+.1f %% speed for %s", gain > -0.05 && gain < 0 ? 0 : gain, bytes_text(slot, one));
    }
    if (depth == plan->depth)
        printf("  <- planned");
    else if (depth > plan->depth_most)
        printf("  over the budget");
    putchar('\n');
}

static void print_depths(const struct planning *p)
{
    const side_plan *plan = &p->plan;
    const uint32_t n = rows(plan);

    printf("buffers       time   speed-up  device memory  one more\n");
    for (uint32_t d = 1; d <= n; d++)
        print_row(p, d, plan->depth_s[d - 1], d > 1 ? plan->depth_s[d - 2] : 0);
    if (plan->depth > SIDE_PLAN_DEPTHS)
        print_row(p, plan->depth, plan->overlapped_s, 0);
    if (p->work.pageable) {
        char pinned[32], chunk[32];
        printf("and %s of pinned memory to stage through, in pieces of %s\n", bytes_text(plan->pinned_bytes, pinned),
               bytes_text(plan->chunk_bytes, chunk));
    }
    putchar('\n');
}

static void print_advice(const struct planning *p)
{
    char text[32];

    printf("%s\n", p->verdict);
    if (p->advice_count == 0)
        printf("No change of bytes, items or memory makes it more than 2 %% faster.\n");
    else
        printf("What would make it faster:\n");
    for (size_t i = 0; i < p->advice_count && i < SHOWN_ADVICE; i++)
        printf("  %5.2fx  %-8s  %s\n", p->advice[i].faster, planning_time_text(p->advice[i].time_s, text),
               p->advice[i].text);
    if (p->work.streams > 1)
        printf("Several compute streams change nothing here: kernels that fill the device run one after the other.\n");
}

/* ---------------------------------------------------------------- JSON */

static json_t *depths_json(const struct planning *p)
{
    const side_plan *plan = &p->plan;
    const size_t slot = plan->device_bytes / plan->depth;
    json_t *list = json_array();

    for (uint32_t d = 1; d <= SIDE_PLAN_DEPTHS; d++) {
        const double time_s = plan->depth_s[d - 1];
        json_array_append_new(list,
                              json_pack("{s:i, s:o, s:o, s:I, s:b}", "depth", (int)d, "time_s", json_number(time_s),
                                        "speedup", json_number(planning_serial(plan, &p->work) / time_s),
                                        "device_bytes", (json_int_t)(slot * d), "fits", d <= plan->depth_most));
    }
    return list;
}

static json_t *advice_json(const struct planning *p)
{
    json_t *list = json_array();

    for (size_t i = 0; i < p->advice_count; i++)
        json_array_append_new(list, json_pack("{s:s, s:s, s:o, s:o}", "id", p->advice[i].id, "text", p->advice[i].text,
                                              "time_s", json_number(p->advice[i].time_s), "faster",
                                              json_number(p->advice[i].faster)));
    return list;
}

static json_t *machine_json(const struct planning *p)
{
    static const char *const from[] = {"estimated", "measured", "simulated"};
    const side_machine *m = &p->machine;

    return json_pack("{s:s, s:s, s:s, s:s, s:o, s:o, s:o, s:o}", "name", m->gpu, "uuid", m->uuid, "figures",
                     from[m->from], "taken", m->taken, "h2d_gbps", json_number(m->h2d.gbps), "d2h_gbps",
                     json_number(m->d2h.gbps), "both_gbps", json_number(m->both_gbps), "both_h2d_gbps",
                     json_number(m->both_h2d_gbps));
}

static json_t *work_json(const side_plan_work *w, size_t budget)
{
    return json_pack("{s:I, s:I, s:I, s:o, s:o, s:o, s:i, s:b, s:I}", "items", (json_int_t)w->items, "item_bytes",
                     (json_int_t)w->item_bytes, "result_bytes", (json_int_t)w->result_bytes, "compute_s",
                     json_number(w->compute_s), "source_s", json_number(w->source_s), "jitter", json_number(w->jitter),
                     "streams", w->streams > 0 ? (int)w->streams : 1, "pageable", w->pageable, "budget_bytes",
                     (json_int_t)budget);
}

static int print_object(const struct planning *p)
{
    const side_plan *plan = &p->plan;
    json_t *root = json_pack(
        "{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:s, s:s, s:s, s:o, s:i, s:I, s:I, s:I, "
        "s:o, "
        "s:o}",
        "machine", machine_json(p), "work", work_json(&p->work, p->work.budget_bytes), "h2d_s",
        json_number(plan->h2d_s), "compute_s", json_number(plan->compute_s), "d2h_s", json_number(plan->d2h_s),
        "stage_s", json_number(plan->stage_s), "serial_s", json_number(plan->serial_s), "pageable_s",
        plan->pageable_s > 0 ? json_number(plan->pageable_s) : json_null(), "overlapped_s",
        json_number(plan->overlapped_s), "bound_s", json_number(plan->bound_s), "speedup", json_number(plan->speedup),
        "speedup_most", json_number(plan->speedup_most), "transfer_share", json_number(planning_share(plan, &p->work)),
        "bound", side_bound_name(plan->bound), "verdict", side_verdict_name(plan->verdict), "verdict_text", p->verdict,
        "compute_busy", json_number(plan->compute_busy), "depth", (int)plan->depth, "chunk_bytes",
        (json_int_t)plan->chunk_bytes, "device_bytes", (json_int_t)plan->device_bytes, "pinned_bytes",
        (json_int_t)plan->pinned_bytes, "depths", depths_json(p), "advice", advice_json(p));

    if (root != NULL && p->trace.items > 0)
        json_object_set_new(root, "trace_s", json_number(p->trace.total_s));
    return print_json(root);
}

int planning_report(const struct planning *p)
{
    if (p->args.common.json)
        return print_object(p);
    print_work(p);
    print_times(p);
    print_depths(p);
    print_advice(p);
    return finish_stdout();
}
