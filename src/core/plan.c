/* SPDX-License-Identifier: MIT
 *
 * side_plan_make: checks, choices, the result. The model is in plan_run.c. */
#include "plan.h"

#include "error.h"
#include "pipeline.h"

#include <string.h>

#define WHERE "side_plan_make"

const char *side_bound_name(side_bound bound)
{
    static const char *const names[] = {"compute", "h2d", "d2h", "link", "stage", "source", "host", "latency", "depth"};

    return (unsigned)bound < sizeof(names) / sizeof(names[0]) ? names[bound] : "unknown";
}

const char *side_verdict_name(side_verdict verdict)
{
    static const char *const names[] = {"pays", "hardly", "not", "harms"};

    return (unsigned)verdict < sizeof(names) / sizeof(names[0]) ? names[verdict] : "unknown";
}

/* ---------------------------------------------------------------- checks */

struct range {
    const char *name;
    double value, least, most;
    bool zero; /* it may also be 0: not known */
};

/* Written so that what is not a number is out of range. */
static side_status check_ranges(const struct range *ranges, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const struct range *r = &ranges[i];
        if (!(r->value >= r->least && r->value <= r->most) && !(r->zero && r->value == 0))
            return error_set(SIDE_INVALID, WHERE, "%s is %g; it takes %s%g to %g", r->name, r->value,
                             r->zero ? "0 (not known), or " : "", r->least, r->most);
    }
    return SIDE_OK;
}

#define MOST_S    1e9
#define MOST_GBPS 1e6
#define TINY_GBPS 1e-6 /* less is nothing that copies: a mistaken unit */

static side_status check_machine(const side_machine *m, const side_plan_work *w)
{
    const struct range ranges[] = {
        {"machine.copy_engines", m->copy_engines, 1, 64, false},
        {"machine.h2d.gbps", m->h2d.gbps, TINY_GBPS, MOST_GBPS, false},
        {"machine.h2d.latency_s", m->h2d.latency_s, 0, MOST_S, false},
        {"machine.d2h.gbps", m->d2h.gbps, TINY_GBPS, MOST_GBPS, w->result_bytes == 0},
        {"machine.d2h.latency_s", m->d2h.latency_s, 0, MOST_S, false},
        {"machine.both_gbps", m->both_gbps, TINY_GBPS, 2 * MOST_GBPS, true},
        {"machine.both_h2d_gbps", m->both_h2d_gbps, TINY_GBPS, MOST_GBPS, true},
        {"machine.pageable_h2d.gbps", m->pageable_h2d.gbps, TINY_GBPS, MOST_GBPS, true},
        {"machine.pageable_h2d.latency_s", m->pageable_h2d.latency_s, 0, MOST_S, false},
        {"machine.pageable_d2h.gbps", m->pageable_d2h.gbps, TINY_GBPS, MOST_GBPS, true},
        {"machine.pageable_d2h.latency_s", m->pageable_d2h.latency_s, 0, MOST_S, false},
        {"machine.stage_gbps", m->stage_gbps, TINY_GBPS, MOST_GBPS, true},
        {"machine.queue_s", m->queue_s, 0, MOST_S, false},
        {"machine.handover_s", m->handover_s, 0, MOST_S, false},
        {"machine.start_s", m->start_s, 0, MOST_S, false},
    };

    return check_ranges(ranges, sizeof(ranges) / sizeof(ranges[0]));
}

static side_status check_work(const side_plan_work *w)
{
    const struct range ranges[] = {
        {"work.compute_s", w->compute_s, 0, MOST_S, false},
        {"work.source_s", w->source_s, 0, MOST_S, false},
        {"work.jitter", w->jitter, 0, 2, false},
        {"work.streams", w->streams, 0, PIPELINE_MAX_STREAMS, false},
        {"work.depth", w->depth, 0, PLAN_MAX_DEPTH, false},
    };

    if (w->items == 0)
        return error_set(SIDE_INVALID, WHERE, "work.items is 0; it takes 1 and more");
    if (w->item_bytes == 0 || w->item_bytes > SIZE_MAX / 256)
        return error_set(SIDE_INVALID, WHERE, "work.item_bytes is %zu; it takes 1 to %zu", w->item_bytes,
                         SIZE_MAX / 256);
    if (w->result_bytes > SIZE_MAX / 256)
        return error_set(SIDE_INVALID, WHERE, "work.result_bytes is %zu; it takes 0 to %zu", w->result_bytes,
                         SIZE_MAX / 256);
    return check_ranges(ranges, sizeof(ranges) / sizeof(ranges[0]));
}

side_status plan_check(const side_machine *machine, const side_plan_work *work)
{
    side_status r = check_work(work);

    return r == SIDE_OK ? check_machine(machine, work) : r;
}

/* ---------------------------------------------------------------- choices */

struct planner {
    const side_machine *machine;
    side_plan_work work;
    struct plan_jitter jitter;
    size_t chunk_bytes; /* 0: the pipeline's default */
    uint32_t threads;
};

static struct plan_lanes lanes_of(const struct planner *p, uint32_t depth)
{
    struct plan_lanes l;

    plan_lanes_make(&l, p->machine, &p->work, depth, p->chunk_bytes, p->threads);
    l.jitter = p->work.jitter > 0 ? &p->jitter : NULL;
    return l;
}

static double time_of(const struct planner *p, uint32_t depth)
{
    struct plan_lanes l = lanes_of(p, depth);

    return plan_time(&l, p->work.items, NULL);
}

#define ENOUGH 1.005 /* within 0.5 % of the best */
#define SAFE   1.02

static uint32_t least_enough(const double *times, uint32_t count, double enough)
{
    double best = times[0];
    uint32_t i = 0;

    for (uint32_t k = 1; k < count; k++)
        best = times[k] < best ? times[k] : best;
    while (times[i] > best * enough)
        i++;
    return i;
}

/* The least chunk within 0.5 % of the best. Small ones lose each copy's latency, large ones keep the first copy waiting while all threads fill theirs.
 * Up to 4 MiB: more was slower on every machine so far, since what the threads wrote is then not in the processor's cache when the copy engine reads it. */
static size_t choose_chunk(struct planner *p, uint32_t depth)
{
    enum { CHUNKS = 5, LEAST = 256 << 10 };
    size_t item = p->work.item_bytes;
    double times[CHUNKS];
    uint32_t count = 0;

    if (!p->work.pageable)
        return staging_for(1, 0, item).bytes;
    for (size_t bytes = LEAST; count < CHUNKS; bytes *= 2) {
        p->chunk_bytes = bytes;
        times[count++] = time_of(p, depth);
        if (bytes >= item)
            break;
    }
    p->chunk_bytes = (size_t)LEAST << least_enough(times, count, ENOUGH);
    p->chunk_bytes = p->chunk_bytes < item ? p->chunk_bytes : item;
    return p->chunk_bytes;
}

static size_t slot_bytes(const side_plan_work *w)
{
    return slots_stride(w->item_bytes) + (w->result_bytes > 0 ? slots_stride(w->result_bytes) : 0);
}

static size_t staging_bytes(const struct planner *p)
{
    const side_plan_work *w = &p->work;
    struct staging in = staging_for(p->threads, p->chunk_bytes, w->item_bytes), out;
    size_t bytes = 0;

    if (!w->pageable)
        return 0;
    bytes = in.count * slots_stride(in.bytes);
    if (w->result_bytes == 0)
        return bytes;
    out = staging_for(pipeline_drain_threads(p->threads), p->chunk_bytes, w->result_bytes);
    return bytes + out.count * slots_stride(out.bytes);
}

/* How many slots the budget takes; the depth that was asked for must be among them. */
static side_status fit_budget(const side_plan_work *w, uint32_t *most)
{
    size_t slot = slot_bytes(w);

    *most = w->depth > SIDE_PLAN_DEPTHS ? w->depth : SIDE_PLAN_DEPTHS;
    if (w->budget_bytes == 0)
        return SIDE_OK;
    if (w->budget_bytes / slot < *most)
        *most = (uint32_t)(w->budget_bytes / slot);
    if (*most == 0)
        return error_set(SIDE_TOO_LARGE, WHERE,
                         "one slot takes %zu bytes, work.budget_bytes is %zu: use smaller items, or raise it", slot,
                         w->budget_bytes);
    if (w->depth > *most)
        return error_set(SIDE_TOO_LARGE, WHERE,
                         "depth %u takes %zu bytes, work.budget_bytes is %zu: use depth %u, or raise it", w->depth,
                         w->depth * slot, w->budget_bytes, *most);
    return SIDE_OK;
}

/* ---------------------------------------------------------------- the result */

static double larger(double a, double b)
{
    return a > b ? a : b;
}

#define RETURNS_AT_ONCE \
    (64 << 10) /* a plain copy of no more from pageable memory: the driver keeps the bytes with the command */

/* Larger plain copies of pageable memory return once they are done, so the host prepares nothing beside them; 0: not known. */
static double pageable_serial(const struct planner *p, uint64_t items)
{
    const side_machine *m = p->machine;
    const side_plan_work *w = &p->work;
    double n = (double)items, in, out, beside, host = m->queue_s;

    if (m->pageable_h2d.gbps <= 0 || (w->result_bytes > 0 && m->pageable_d2h.gbps <= 0))
        return 0;
    in = m->pageable_h2d.latency_s + (double)w->item_bytes / (m->pageable_h2d.gbps * 1e9);
    if (w->item_bytes <= RETURNS_AT_ONCE)
        host = larger(m->queue_s - in - m->handover_s, PLAN_COPY_PART * m->queue_s);
    if (w->result_bytes > 0) {
        out = m->pageable_d2h.latency_s + (double)w->result_bytes / (m->pageable_d2h.gbps * 1e9);
        return m->start_s + n * (w->source_s + in + w->compute_s + out + 3 * m->handover_s + host) - m->handover_s;
    }
    /* The loader runs beside the compute, to which nobody waits but the next copy. */
    beside = larger(w->source_s, w->compute_s);
    return m->start_s + w->source_s + (n - 1) * (in + beside) + in + w->compute_s + n * (2 * m->handover_s + host) -
           m->handover_s;
}

static side_verdict verdict_of(double speedup)
{
    if (speedup >= 1.10)
        return SIDE_OVERLAP_PAYS;
    if (speedup >= 1.02)
        return SIDE_OVERLAP_HARDLY;
    return speedup >= 0.99 ? SIDE_OVERLAP_NOT : SIDE_OVERLAP_HARMS;
}

static double bound_of(const struct planner *p, const side_plan *plan)
{
    const side_machine *m = p->machine;
    const side_plan_work *w = &p->work;
    double t = plan->h2d_s, c = plan->compute_s, d = plan->d2h_s;
    double most = m->h2d.gbps > m->d2h.gbps ? m->h2d.gbps : m->d2h.gbps;

    most = m->both_gbps > most ? m->both_gbps
                               : most; /* where both together are slower than one, they need not be together */
    if (w->result_bytes == 0 || m->copy_engines == 1 || m->both_gbps <= 0)
        return side_timeline_bound(w->items, t, c, d, m->copy_engines);
    return side_timeline_bound_shared(w->items, t, c, d,
                                      ((double)w->item_bytes + (double)w->result_bytes) / (most * 1e9));
}

static void fill_serial(struct planner *p, side_plan *plan)
{
    const side_plan_work *w = &p->work;
    struct planner pinned = *p;
    struct plan_lanes l, endless = lanes_of(p, PLAN_MAX_DEPTH);
    double per_item, alone, one = 0;

    pinned.work.pageable = false;
    l = lanes_of(&pinned, 1);
    plan->h2d_s = l.in.latency_s + l.in.bytes_s;
    plan->compute_s = w->compute_s;
    plan->d2h_s = l.out.latency_s + l.out.bytes_s;
    if (w->pageable && p->machine->stage_gbps > 0)
        plan->stage_s = (double)w->item_bytes / (p->machine->stage_gbps * 1e9);
    plan->serial_s = plan_serial(&l, w->items);
    plan->pageable_s = pageable_serial(p, w->items);
    if (l.jitter != NULL && w->source_s > 0)
        plan_time(&l, w->items, &one);
    l.jitter = NULL;
    alone = larger(plan_serial(&l, 2) - plan_serial(&l, 1), one);
    if (w->pageable && plan->pageable_s > 0)
        alone = pageable_serial(p, 2) - pageable_serial(p, 1);
    plan_time(&endless, w->items, &per_item);
    plan->speedup_most = alone / per_item;
}

/* The least depth that is enough; and within 2 % of the best where hand-overs take half as long again, since a slot too few costs more than one too many: on an
 * H200 they took 3 to 4.5 us from one run to the next. */
static uint32_t choose_depth(const struct planner *p, const double *times, uint32_t fit)
{
    side_machine slow = *p->machine;
    struct planner cautious = *p;
    double late[SIDE_PLAN_DEPTHS] = {0};
    uint32_t least = least_enough(times, fit, ENOUGH), safe;

    slow.handover_s *= 1.5;
    cautious.machine = &slow;
    for (uint32_t d = 1; d <= fit; d++)
        late[d - 1] = time_of(&cautious, d);
    safe = least_enough(late, fit, SAFE);
    return (least > safe ? least : safe) + 1;
}

static void fill_plan(struct planner *p, uint32_t most, side_plan *plan)
{
    const side_plan_work *w = &p->work;
    uint32_t fit = most < SIDE_PLAN_DEPTHS ? most : SIDE_PLAN_DEPTHS;
    struct plan_lanes l;
    double best;

    plan->chunk_bytes = choose_chunk(p, w->depth != 0 ? w->depth : fit);
    for (uint32_t d = 1; d <= SIDE_PLAN_DEPTHS; d++)
        plan->depth_s[d - 1] = time_of(p, d);
    plan->depth_most = fit;
    plan->depth = w->depth != 0 ? w->depth : choose_depth(p, plan->depth_s, fit);
    l = lanes_of(p, plan->depth);
    plan->overlapped_s = plan->depth <= SIDE_PLAN_DEPTHS ? plan->depth_s[plan->depth - 1]
                                                         : plan_time(&l, w->items, NULL);
    fill_serial(p, plan);
    plan->bound_s = bound_of(p, plan);
    plan->speedup = (w->pageable && plan->pageable_s > 0 ? plan->pageable_s : plan->serial_s) / plan->overlapped_s;
    plan->verdict = verdict_of(plan->speedup);
    plan->compute_busy = (double)w->items * w->compute_s / plan->overlapped_s;
    plan->compute_busy = plan->compute_busy < 1 ? plan->compute_busy : 1;
    best = plan->overlapped_s;
    for (uint32_t d = plan->depth; d < SIDE_PLAN_DEPTHS; d++)
        best = plan->depth_s[d] < best ? plan->depth_s[d] : best;
    plan->bound = plan_bound(&l, w->items, plan->overlapped_s, best);
    plan->device_bytes = plan->depth * slot_bytes(w);
    plan->pinned_bytes = staging_bytes(p);
}

side_status side_plan_make(const side_machine *machine, const side_plan_work *work, side_plan *plan)
{
    side_machine m = SIDE_MACHINE_INIT;
    struct planner p = {.machine = &m, .work = SIDE_PLAN_WORK_INIT};
    side_plan made = SIDE_PLAN_INIT;
    side_status r = SIDE_OK;
    uint32_t most = 0;

    if (machine == NULL || work == NULL || plan == NULL)
        r = error_set(SIDE_INVALID, WHERE, "machine, work or plan is NULL");
    if (r == SIDE_OK && plan->size != sizeof(*plan))
        r = error_set(SIDE_INVALID, WHERE, "plan.size is %zu; fill the struct with SIDE_PLAN_INIT (%zu)", plan->size,
                      sizeof(*plan));
    if (r == SIDE_OK)
        r = options_copy(&m, sizeof(m), machine, sizeof(m), WHERE);
    if (r == SIDE_OK)
        r = options_copy(&p.work, sizeof(p.work), work, sizeof(p.work), WHERE);
    if (r == SIDE_OK)
        r = plan_check(&m, &p.work);
    if (r == SIDE_OK)
        r = fit_budget(&p.work, &most);
    if (r != SIDE_OK)
        return r;
    p.threads = side_default_threads();
    if (p.work.jitter > 0)
        plan_jitter_make(&p.jitter, p.work.jitter);
    fill_plan(&p, most, &made);
    *plan = made;
    return SIDE_OK;
}
