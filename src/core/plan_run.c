/* SPDX-License-Identifier: MIT
 *
 * The recurrence of a pipeline (run.c, feed.c, drain.c), with rings of `depth` slots:
 *
 *     source k      after source k-1, once a buffer is free               (depth + 1 of them)
 *     fill p        after source, a thread, a staging slot is free        pageable memory, piece by piece
 *     host i        the host queues one item after the other, and waits at every half window for compute i - half window - 1
 *     copy in p     queued, after copy p-1; the first of item i after compute i-depth, which frees its slot
 *     compute i     queued, after compute i-1, copy in i, and copy out i-depth where there are results
 *     copy out p    queued, after copy p-1 and compute i, once a staging slot is free
 *     drain p       after copy out p, a thread                            pageable memory
 *
 * Whoever waits for another stream begins handover_s after it. Computes on several streams take turns in the order in which their items arrive, which is that of
 * one stream: a kernel that fills the device leaves no room, and the device starts blocks of the kernel that came first, first. So the number of streams changes nothing here.
 *
 * All lanes but the two copy lanes are known as soon as what they wait for is: their ends are computed ahead (the step functions), into rings of the last RING
 * ends. The copy lanes share the link, so that their ends depend on each other: they run event by event. A copy is first `latency`, in which no bytes
 * move, and then bytes, at its share of the rate while the other direction moves bytes too.
 */
#include "plan.h"

#include <math.h>
#include <string.h>

#define RING 256u /* more than any lane looks back: twice the greatest depth, all staging slots */

struct lane {
    uint64_t known; /* so many have their time */
    double last;
    double at[RING];
};

struct mover {
    bool active;
    double latency, bytes; /* left; of bytes, seconds at the full rate */
};

struct run {
    const struct plan_lanes *l;
    uint64_t n, first_draw;
    bool fed; /* not the driver queues the copies, but whoever fills */
    bool results;
    struct lane source, fill, issue, in, arrive, host, compute, back, out, result,
        drain; /* ends; issue and back: queued */
    struct mover move_in, move_out;
    double now;
    struct plan_marks *marks;
};

static double later(double a, double b)
{
    return a > b ? a : b;
}

static void put(struct lane *lane, double t)
{
    lane->at[lane->known++ % RING] = lane->last = t;
}

/* When `k` was; it must be known. */
static double when(const struct lane *lane, uint64_t k)
{
    return lane->at[k % RING];
}

/* The last lane is done with an item. */
static void item_done(struct run *r, uint64_t item, double t)
{
    for (int m = 0; r->marks != NULL && m < 2; m++)
        if (r->marks->item[m] == item)
            r->marks->at[m] = t;
}

/* ---------------------------------------------------------------- lanes that are computed ahead */

static double draw(const struct run *r, int of, uint64_t item)
{
    return r->l->jitter != NULL ? plan_jitter_factor(r->l->jitter, of, r->first_draw + item) : 1.0;
}

static bool source_step(struct run *r)
{
    uint64_t k = r->source.known, buffers = r->l->depth + 1;
    double t = r->source.last;

    if (r->l->source_s <= 0 || k == r->n || (k >= buffers && r->arrive.known <= k - buffers))
        return false;
    if (k >= buffers)
        t = later(t, when(&r->arrive, k - buffers));
    put(&r->source, t + r->l->source_s * draw(r, PLAN_OF_SOURCE, k));
    return true;
}

static bool fill_step(struct run *r)
{
    const struct plan_way *w = &r->l->in;
    uint64_t k = r->fill.known, item = k / w->pieces;
    double t = 0;

    if (w->threads == 0 || item >= r->n || (r->l->source_s > 0 && r->source.known <= item) ||
        (k >= w->slots && r->in.known <= k - w->slots))
        return false;
    if (r->l->source_s > 0)
        t = when(&r->source, item);
    if (k >= w->threads)
        t = later(t, when(&r->fill, k - w->threads));
    if (k >= w->slots)
        t = later(t, when(&r->in, k - w->slots));
    put(&r->fill, t + w->stage_s);
    return true;
}

/* The next copy in, queued by who filled it. */
static bool issue_step(struct run *r)
{
    const struct plan_way *w = &r->l->in;
    uint64_t k = r->issue.known, item = k / w->pieces;
    bool first = k % w->pieces == 0 && item >= r->l->depth;
    double t = r->issue.last;

    if (!r->fed || item >= r->n || (w->threads > 0 ? r->fill.known <= k : r->source.known <= item) ||
        (first && r->host.known <= item - r->l->depth))
        return false;
    t = later(t, w->threads > 0 ? when(&r->fill, k) : when(&r->source, item));
    if (first)
        t = later(t, when(&r->host, item - r->l->depth));
    put(&r->issue, t + r->l->queue_copy_s);
    return true;
}

/* Which compute the host waits for before it queues item i; false: none. As window_wait in run.c. */
static bool gate(const struct run *r, uint64_t i, uint64_t *compute)
{
    uint64_t window = r->l->window, half = window / 2 != 0 ? window / 2 : 1;

    if (i % half != 0 || i + half <= window)
        return false;
    *compute = i + half - window - 1;
    return true;
}

static bool host_step(struct run *r)
{
    const struct plan_lanes *l = r->l;
    uint64_t i = r->host.known, g, last = (i + 1) * l->in.pieces - 1;
    bool waits = gate(r, i, &g);
    double t = r->host.last;

    if (i == r->n || (waits && r->compute.known <= g) || (r->fed && r->issue.known <= last))
        return false;
    if (r->results && l->out.threads == 0 && i > 0)
        t = later(t, r->back.last);
    if (waits)
        t = later(t, when(&r->compute, g));
    if (r->fed)
        t = later(t, when(&r->issue, last));
    while (!r->fed && r->issue.known < r->n && r->issue.known < i + l->depth)
        put(&r->issue, t += l->queue_copy_s);
    put(&r->host, t + l->queue_compute_s);
    if (r->results && l->out.threads == 0)
        put(&r->back, r->host.last + l->queue_copy_s);
    return true;
}

static bool compute_step(struct run *r)
{
    const struct plan_lanes *l = r->l;
    uint64_t i = r->compute.known;
    bool waits = r->results && i >= l->depth;
    double t;

    if (i == r->n || r->host.known <= i || r->arrive.known <= i || (waits && r->result.known <= i - l->depth))
        return false;
    t = later(r->compute.last, when(&r->host, i));
    t = later(t, when(&r->arrive, i) + l->handover_s);
    if (waits)
        t = later(t, when(&r->result, i - l->depth) + l->handover_s);
    put(&r->compute, t + l->compute_s * draw(r, PLAN_OF_COMPUTE, i));
    if (!r->results)
        item_done(r, i, r->compute.last);
    return true;
}

/* The next copy out into staging, queued by the D2H thread. */
static bool back_step(struct run *r)
{
    const struct plan_way *w = &r->l->out;
    uint64_t k = r->back.known, item = k / w->pieces;
    double t = r->back.last;

    if (!r->results || w->threads == 0 || item >= r->n || r->host.known <= item ||
        (k >= w->slots && r->drain.known <= k - w->slots))
        return false;
    t = later(t, when(&r->host, item));
    if (k >= w->slots)
        t = later(t, when(&r->drain, k - w->slots));
    put(&r->back, t + r->l->queue_copy_s);
    return true;
}

static bool drain_step(struct run *r)
{
    const struct plan_way *w = &r->l->out;
    uint64_t k = r->drain.known;
    double t;

    if (w->threads == 0 || r->out.known <= k)
        return false;
    t = when(&r->out, k);
    if (k >= w->threads)
        t = later(t, when(&r->drain, k - w->threads));
    put(&r->drain, t + w->stage_s);
    if ((k + 1) % w->pieces == 0)
        item_done(r, k / w->pieces, r->drain.last);
    return true;
}

static void compute_ahead(struct run *r)
{
    bool more = true;

    while (more) {
        more = source_step(r);
        more = fill_step(r) || more;
        more = issue_step(r) || more;
        more = host_step(r) || more;
        more = compute_step(r) || more;
        more = back_step(r) || more;
        more = drain_step(r) || more;
    }
}

/* ---------------------------------------------------------------- copies */

/* When the next copy may begin; INFINITY: not before something else ends. */
static double in_ready(const struct run *r)
{
    const struct plan_lanes *l = r->l;
    uint64_t k = r->in.known, item = k / l->in.pieces;

    if (item >= r->n || r->issue.known <= k)
        return INFINITY;
    if (k % l->in.pieces != 0 || item < l->depth)
        return later(when(&r->issue, k), r->in.last);
    if (r->compute.known <= item - l->depth)
        return INFINITY;
    return later(later(when(&r->issue, k), r->in.last), when(&r->compute, item - l->depth) + l->handover_s);
}

static double out_ready(const struct run *r)
{
    const struct plan_lanes *l = r->l;
    uint64_t k = r->out.known, item = k / l->out.pieces;

    if (!r->results || item >= r->n || r->back.known <= k || r->compute.known <= item)
        return INFINITY;
    return later(later(when(&r->back, k), r->out.last), when(&r->compute, item) + l->handover_s);
}

static void begin(struct mover *m, const struct plan_way *w)
{
    m->active = true;
    m->latency = w->latency_s / w->pieces;
    m->bytes = w->bytes_s / w->pieces;
}

/* Begins what may begin now; returns when the next copy may that does not yet. */
static double begin_copies(struct run *r)
{
    double in = r->move_in.active ? INFINITY : in_ready(r), out = r->move_out.active ? INFINITY : out_ready(r);

    if (r->l->one_engine && (r->move_in.active || r->move_out.active))
        return INFINITY;
    if (r->l->one_engine && later(in, out) <= r->now) { /* both: who was ready first; then who was queued first */
        uint64_t i = r->in.known / r->l->in.pieces, o = r->out.known / r->l->out.pieces;
        if (in < out || (in == out && i < o + r->l->depth))
            out = INFINITY;
        else
            in = INFINITY;
    }
    if (in <= r->now) {
        begin(&r->move_in, &r->l->in);
        in = INFINITY;
    }
    if (out <= r->now) {
        begin(&r->move_out, &r->l->out);
        out = INFINITY;
    }
    return in < out ? in : out;
}

static bool moves(const struct mover *m)
{
    return m->active && m->latency <= 0;
}

static double phase_s(const struct mover *m, double rate)
{
    if (!m->active)
        return INFINITY;
    return m->latency > 0 ? m->latency : m->bytes / rate;
}

/* `ends`: the phase does, whatever rounding says. */
static void pass_time(struct mover *m, double rate, double dt, bool ends)
{
    double *left = m->latency > 0 ? &m->latency : &m->bytes;

    if (!m->active)
        return;
    *left -= m->latency > 0 ? dt : dt * rate;
    if (ends || *left < 0)
        *left = 0;
}

/* True where an item's last piece ended. */
static bool end_copy(struct run *r, struct mover *m, const struct plan_way *w, struct lane *piece, struct lane *item)
{
    if (!m->active || m->latency > 0 || m->bytes > 0)
        return false;
    m->active = false;
    put(piece, r->now);
    if (piece->known % w->pieces != 0)
        return false;
    put(item, r->now);
    return true;
}

/* The next event of the link; false: there is none. */
static bool step(struct run *r)
{
    double next = begin_copies(r), rate_in = 1, rate_out = 1, a, b, dt;

    if (moves(&r->move_in) && moves(&r->move_out)) {
        rate_in = r->l->share_in;
        rate_out = r->l->share_out;
    }
    a = phase_s(&r->move_in, rate_in);
    b = phase_s(&r->move_out, rate_out);
    dt = a < b ? a : b;
    if (next - r->now < dt) {
        dt = next - r->now;
        a = b = INFINITY;
    }
    if (dt == INFINITY)
        return false;
    pass_time(&r->move_in, rate_in, dt, a <= dt);
    pass_time(&r->move_out, rate_out, dt, b <= dt);
    r->now = a < INFINITY || b < INFINITY ? r->now + dt : next;
    end_copy(r, &r->move_in, &r->l->in, &r->in, &r->arrive);
    if (end_copy(r, &r->move_out, &r->l->out, &r->out, &r->result) && r->l->out.threads == 0)
        item_done(r, r->result.known - 1, r->now);
    return true;
}

double plan_run(const struct plan_lanes *lanes, uint64_t items, uint64_t first_draw, struct plan_marks *marks)
{
    struct run r;

    memset(&r, 0, sizeof(r));
    r.l = lanes;
    r.n = items;
    r.first_draw = first_draw;
    r.marks = marks;
    r.fed = lanes->in.threads > 0 || lanes->source_s > 0;
    r.results = lanes->out.bytes_s > 0;
    do
        compute_ahead(&r);
    while (step(&r));
    return lanes->start_s + later(later(r.compute.last, r.host.last), later(r.out.last, r.drain.last));
}

/* ---------------------------------------------------------------- any number of items */

static uint64_t ceiling(uint64_t a, uint64_t b)
{
    return (a + b - 1) / b;
}

static uint64_t common_multiple(uint64_t a, uint64_t b)
{
    uint64_t x = a, y = b;

    while (y != 0) {
        uint64_t rest = x % y;
        x = y;
        y = rest;
    }
    return a / x * b;
}

/* Items by whose number the steady state repeats: whole rounds of the rings. (Threads end their pieces together, so items come in bursts.) */
static uint64_t round_of(const struct plan_lanes *l)
{
    uint64_t n = l->depth;

    n = common_multiple(n, l->in.slots > 0 ? l->in.slots : 1);
    n = n <= 512 ? common_multiple(n, l->out.slots > 0 ? l->out.slots : 1) : n;
    return n <= 512 ? n : l->depth; /* then the fraction of a round is small, as against the span */
}

/* The steady state is looked at over `span` items, after `warm` others. */
static double many(const struct plan_lanes *l, uint64_t n, double *per_item)
{
    uint64_t pieces = l->in.pieces > l->out.pieces ? l->in.pieces : l->out.pieces;
    uint64_t span = l->jitter != NULL ? 4 * PLAN_STRATA : ceiling(384, pieces), round = round_of(l);
    uint64_t warm, tail = 4 * l->depth + 8, simulated;
    struct plan_marks marks = {{0, 0}, {0, 0}};
    double t, slope;

    span = l->jitter != NULL ? span : ceiling(span > 48 ? span : 48, round) * round;
    warm = l->jitter != NULL ? 2 * l->depth : span;
    simulated = warm + span + tail;
    marks.item[0] = warm - 1;
    marks.item[1] = warm + span - 1;
    if (n > simulated)
        simulated += (n - simulated) % round;
    else if (per_item == NULL)
        simulated = n;
    t = plan_run(l, simulated, 0, &marks);
    slope = (marks.at[1] - marks.at[0]) / (double)span;
    if (per_item != NULL)
        *per_item = slope;
    return n > simulated ? t + (double)(n - simulated) * slope : t;
}

#define JITTER_ITEMS  2048u /* at least so many, so that the mean of few items is one of many runs */
#define JITTER_PASSES 256u  /* of one item: each value once */

double plan_time(const struct plan_lanes *lanes, uint64_t items, double *per_item)
{
    uint64_t passes = lanes->jitter != NULL ? ceiling(JITTER_ITEMS, items) : 1;
    double sum = 0;

    if (per_item != NULL) /* the time of as many as it takes is not wanted */
        many(lanes, UINT64_MAX / 2, per_item);
    if (passes <= 1)
        return many(lanes, items, NULL);
    passes = passes < JITTER_PASSES ? passes : JITTER_PASSES;
    for (uint64_t i = 0; i < passes; i++)
        sum += plan_run(lanes, items, i * items, NULL);
    return sum / (double)passes;
}
