/* SPDX-License-Identifier: MIT
 *
 * The verdict in words, and what would help. Each suggestion is the work changed in one way and planned again; it is given with the time that comes
 * out, and only where that is at least WORTH faster. */
#include "plan.h"
#include "signals.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WORTH       1.02
#define ENOUGH      1.005     /* a larger change that gains less than that is not proposed */
#define MOST_MERGED (1 << 30) /* bytes of an item that others were merged into */
#define LEAST_CUT   (64 << 10)

/* Seconds for the changed work; infinite where there is no plan for it, or no time. */
static double try(const struct planning *p, const side_plan_work *work)
{
    side_plan plan = SIDE_PLAN_INIT;

    return !signals_interrupted() && side_plan_make(&p->machine, work, &plan) == SIDE_OK ? plan.overlapped_s : INFINITY;
}

__attribute__((format(printf, 4, 5))) static void propose(struct planning *p, const char *id, double time_s,
                                                          const char *format, ...)
{
    const double faster = p->plan.overlapped_s / time_s;
    struct plan_advice *a = &p->advice[p->advice_count];
    va_list args;

    if (!(faster >= WORTH) || p->advice_count == PLAN_ADVICE)
        return;
    a->id = id;
    a->time_s = time_s;
    a->faster = faster;
    va_start(args, format);
    vsnprintf(a->text, sizeof(a->text), format, args);
    va_end(args);
    p->advice_count++;
}

/* ---------------------------------------------------------------- changes */

static void fewer_bytes(struct planning *p)
{
    side_plan_work w = p->work;

    w.item_bytes = (w.item_bytes + 1) / 2;
    w.result_bytes = (w.result_bytes + 1) / 2;
    propose(p, "dtype", try(p, &w), "half the bytes (bf16 instead of fp32, uint8 instead of bf16)");
    if (p->work.result_bytes == 0)
        return;
    w = p->work;
    w.result_bytes = 0;
    propose(p, "results", try(p, &w), "results that stay on the device, or are summed up there");
}

static void pinned(struct planning *p)
{
    side_plan_work w = p->work;

    if (!w.pageable)
        return;
    w.pageable = false;
    propose(p, "pin", try(p, &w), "pinned memory instead of pageable");
}

/* k items as one: k times the bytes, compute and source, whose deviation averages out. */
static side_plan_work merged(const side_plan_work *work, uint64_t k)
{
    side_plan_work w = *work;

    w.items = (work->items + k - 1) / k;
    w.item_bytes *= k;
    w.result_bytes *= k;
    w.compute_s *= (double)k;
    w.source_s *= (double)k;
    w.jitter /= sqrt((double)k);
    return w;
}

static side_plan_work cut(const side_plan_work *work, uint64_t k)
{
    side_plan_work w = *work;

    w.items *= k;
    w.item_bytes = (work->item_bytes + k - 1) / k;
    w.result_bytes = (work->result_bytes + k - 1) / k;
    w.compute_s /= (double)k;
    w.source_s /= (double)k;
    return w;
}

static void larger_items(struct planning *p)
{
    const side_plan_work *w = &p->work;
    double best = INFINITY;
    uint64_t chosen = 0;

    for (uint64_t k = 2; k <= w->items / 2 && w->item_bytes <= MOST_MERGED / k && w->result_bytes <= MOST_MERGED / k;
         k *= 2) {
        const side_plan_work many = merged(w, k);
        const double time_s = try(p, &many);
        if (time_s * ENOUGH < best) {
            best = time_s;
            chosen = k;
        }
    }
    char bytes[32];
    propose(p, "larger", best, "larger items: %llu as one, %s each", (unsigned long long)chosen,
            bytes_text(w->item_bytes * chosen, bytes));
}

static void smaller_items(struct planning *p)
{
    const side_plan_work *w = &p->work;
    double best = INFINITY;
    uint64_t chosen = 0;

    for (uint64_t k = 2; k <= 64 && w->item_bytes / k >= LEAST_CUT; k *= 2) {
        const side_plan_work small = cut(w, k);
        const double time_s = try(p, &small);
        if (time_s * ENOUGH < best) {
            best = time_s;
            chosen = k;
        }
    }
    char bytes[32];
    propose(p, "smaller", best, "smaller items: each cut into %llu, %s each, if compute can be cut so too",
            (unsigned long long)chosen, bytes_text(w->item_bytes / (chosen > 0 ? chosen : 1), bytes));
}

static void other_compute(struct planning *p)
{
    side_plan_work w = p->work;

    w.compute_s *= 2; /* twice the work: half of the time is what one pass takes */
    propose(p, "reuse", try(p, &w) / 2,
            "more compute per byte: two passes over each item while it is there (time of one)");
    w = p->work;
    w.compute_s /= 2;
    propose(p, "compute", try(p, &w), "half the compute (tf32 or bf16 products, a better kernel)");
}

static void source_and_jitter(struct planning *p)
{
    side_plan_work w = p->work;

    w.source_s /= 2;
    if (w.source_s > 0)
        propose(p, "source", try(p, &w), "a source twice as fast (more loader workers, less work in it)");
    w = p->work;
    w.jitter = 0;
    if (p->work.jitter > 0)
        propose(p, "jitter", try(p, &w), "items that take equal times (sorted or padded batches)");
}

static void more_buffers(struct planning *p)
{
    const side_plan *plan = &p->plan;
    const size_t slot = plan->device_bytes / plan->depth;
    uint32_t best = 0;
    char bytes[32];

    for (uint32_t d = 1; d < SIDE_PLAN_DEPTHS; d++)
        if (plan->depth_s[d] * ENOUGH < plan->depth_s[best])
            best = d;
    if (best + 1 <= plan->depth)
        return;
    if (best + 1 > plan->depth_most)
        propose(p, "budget", plan->depth_s[best], "%u buffers, which take %s of device memory", best + 1,
                bytes_text(slot * (best + 1), bytes));
    else
        propose(p, "depth", plan->depth_s[best], "%u buffers instead of %u", best + 1, plan->depth);
}

static int by_gain(const void *a, const void *b)
{
    const struct plan_advice *x = a, *y = b;

    return x->faster > y->faster ? -1 : x->faster < y->faster;
}

/* ---------------------------------------------------------------- the verdict */

static const char *reason(const struct planning *p)
{
    const double share = planning_share(&p->plan, &p->work);

    if (p->work.items == 1)
        return "one item has nothing to overlap with but its own end";
    if (p->plan.bound == SIDE_BOUND_DEPTH)
        return "with so few buffers the lanes wait for each other";
    if (p->plan.bound == SIDE_BOUND_SOURCE)
        return "all wait for the source";
    if (p->plan.bound == SIDE_BOUND_LATENCY || p->plan.bound == SIDE_BOUND_HOST)
        return "the items are too small or too few: what comes with each costs as much as is hidden";
    if (share < 0.15)
        return "there is little to hide: nearly all of the time is compute";
    if (share > 0.85)
        return "there is little to hide it under: nearly all of the time is transfer";
    return "what is hidden is as much as what comes with it";
}

static void word_verdict(struct planning *p)
{
    const side_plan *plan = &p->plan;

    switch (plan->verdict) {
    case SIDE_OVERLAP_PAYS:
        snprintf(p->verdict, sizeof(p->verdict),
                 p->work.items > 1 ? "Overlap pays: %.2fx."
                                   : "Staging by threads pays: %.2fx; one item has nothing else to overlap with.",
                 plan->speedup);
        break;
    case SIDE_OVERLAP_HARDLY:
        snprintf(p->verdict, sizeof(p->verdict), "Overlap hardly pays: %.2fx; %s.", plan->speedup, reason(p));
        break;
    case SIDE_OVERLAP_NOT:
        snprintf(p->verdict, sizeof(p->verdict), "Overlap does not pay: %.2fx; %s.", plan->speedup, reason(p));
        break;
    case SIDE_OVERLAP_HARMS:
        snprintf(p->verdict, sizeof(p->verdict), "Overlap harms: %.2fx; %s. Copy and compute on one stream instead.",
                 plan->speedup, reason(p));
        break;
    }
}

void planning_advise(struct planning *p)
{
    word_verdict(p);
    fewer_bytes(p);
    pinned(p);
    larger_items(p);
    smaller_items(p);
    other_compute(p);
    source_and_jitter(p);
    more_buffers(p);
    qsort(p->advice, p->advice_count, sizeof(p->advice[0]), by_gain);
}
