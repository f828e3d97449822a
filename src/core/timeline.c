/* SPDX-License-Identifier: MIT
 *
 * Accounts of a timeline. Busy time is the length of a union of spans; spans come sorted by begin, so each union is walked once, in order,
 * without storing it, and the intersection of two unions is two such walks side by side.
 */
#include "draw.h"
#include "error.h"

#include <string.h>

side_status timeline_check(const side_span *spans, size_t n, const char *where)
{
    if (spans == NULL && n > 0)
        return error_set(SIDE_INVALID, where, "spans is NULL but count is %zu", n);
    for (size_t i = 0; i < n; i++) {
        if ((unsigned)spans[i].lane >= SIDE_LANE_COUNT)
            return error_set(SIDE_INVALID, where, "spans[%zu].lane is %d; lanes are 0..%d", i, (int)spans[i].lane,
                             SIDE_LANE_COUNT - 1);
        if (spans[i].end_ns < spans[i].begin_ns)
            return error_set(SIDE_INVALID, where, "spans[%zu] ends before it begins", i);
        if (i > 0 && spans[i].begin_ns < spans[i - 1].begin_ns)
            return error_set(SIDE_INVALID, where, "spans[%zu] begins before spans[%zu]; sort them by begin_ns", i,
                             i - 1);
    }
    return SIDE_OK;
}

/* A walk over the maximal intervals that the spans of some lanes cover. */
typedef struct cover {
    const side_span *spans;
    size_t n, next;
    unsigned lanes;            /* bit set */
    uint64_t begin_ns, end_ns; /* the current interval */
} cover;

static bool cover_next(cover *c)
{
    size_t i = c->next;

    while (i < c->n && (c->lanes >> c->spans[i].lane & 1u) == 0)
        i++;
    if (i == c->n) {
        c->next = i;
        return false;
    }
    c->begin_ns = c->spans[i].begin_ns;
    c->end_ns = c->spans[i].end_ns;
    for (i++; i < c->n && c->spans[i].begin_ns <= c->end_ns; i++)
        if ((c->lanes >> c->spans[i].lane & 1u) != 0 && c->spans[i].end_ns > c->end_ns)
            c->end_ns = c->spans[i].end_ns;
    c->next = i;
    return true;
}

static uint64_t covered_ns(const side_span *spans, size_t n, unsigned lanes)
{
    cover c = {.spans = spans, .n = n, .lanes = lanes};
    uint64_t sum = 0;

    while (cover_next(&c))
        sum += c.end_ns - c.begin_ns;
    return sum;
}

/* Time that both sets of lanes cover. */
static uint64_t shared_ns(const side_span *spans, size_t n, unsigned lanes_a, unsigned lanes_b)
{
    cover a = {.spans = spans, .n = n, .lanes = lanes_a};
    cover b = {.spans = spans, .n = n, .lanes = lanes_b};
    bool more = cover_next(&a) && cover_next(&b);
    uint64_t sum = 0;

    while (more) {
        uint64_t begin = a.begin_ns > b.begin_ns ? a.begin_ns : b.begin_ns;
        uint64_t end = a.end_ns < b.end_ns ? a.end_ns : b.end_ns;

        if (end > begin)
            sum += end - begin;
        more = a.end_ns < b.end_ns ? cover_next(&a) : cover_next(&b);
    }
    return sum;
}

static double seconds(uint64_t ns)
{
    return (double)ns / 1e9;
}

side_status side_timeline_account(const side_span *spans, size_t n, side_account *account)
{
    enum { H2D = 1u << SIDE_LANE_H2D, COMPUTE = 1u << SIDE_LANE_COMPUTE, D2H = 1u << SIDE_LANE_D2H };
    side_status status = timeline_check(spans, n, "side_timeline_account");
    side_account a;
    uint64_t last = 0, total, compute, copy, hidden;

    if (status != SIDE_OK)
        return status;
    if (account == NULL)
        return error_set(SIDE_INVALID, "side_timeline_account", "account is NULL");
    memset(&a, 0, sizeof(a));
    for (size_t i = 0; i < n; i++) {
        if (spans[i].end_ns > last)
            last = spans[i].end_ns;
        if (spans[i].lane == SIDE_LANE_H2D)
            a.h2d_bytes += spans[i].bytes;
        else if (spans[i].lane == SIDE_LANE_D2H)
            a.d2h_bytes += spans[i].bytes;
    }
    total = n > 0 ? last - spans[0].begin_ns : 0;
    compute = covered_ns(spans, n, COMPUTE);
    copy = covered_ns(spans, n, H2D | D2H);
    hidden = shared_ns(spans, n, H2D | D2H, COMPUTE);

    a.total_s = seconds(total);
    a.compute_busy_s = seconds(compute);
    a.h2d_busy_s = seconds(covered_ns(spans, n, H2D));
    a.d2h_busy_s = seconds(covered_ns(spans, n, D2H));
    a.copy_busy_s = seconds(copy);
    a.copy_hidden_s = seconds(hidden);
    a.exposed_s = seconds(copy - hidden);
    a.idle_s = seconds(total - (compute + (copy - hidden)));
    if (total > 0) {
        a.compute_busy = (double)compute / (double)total;
        a.link_busy = (double)copy / (double)total;
    }
    if (copy > 0)
        a.copy_hidden = (double)hidden / (double)copy;
    *account = a;
    return SIDE_OK;
}

static double larger(double a, double b)
{
    return a > b ? a : b;
}

/* One copy engine: H2D and D2H take turns, and while the last item is computed on, results of others can leave. So (n-1)*max + sum would be more
 * than is needed: 2 items with t = c = d = 1 pass in 4, not 5. What no schedule can beat is each of
 *   n*(t+d)        the copy engine's work
 *   t + n*c + d    the compute engine's, after the first copy in and before the last copy out
 *   n*t + c + d    the last item, copied in after all others
 *   t + c + n*d    the first result, sent out before all others
 * With d = 0 the largest of them is (n-1)*max(t,c) + t + c again. */
static double bound_one_engine(double n, double t, double c, double d)
{
    double copies = larger(n * (t + d), larger(n * t + c + d, t + c + n * d));

    return larger(copies, t + n * c + d);
}

double side_timeline_bound(uint64_t n, double t, double c, double d, int copy_engines)
{
    if (n == 0)
        return 0.0;
    t = larger(t, 0.0);
    c = larger(c, 0.0);
    d = larger(d, 0.0);
    if (copy_engines == 1)
        return bound_one_engine((double)n, t, c, d);
    return (double)(n - 1) * larger(t, larger(c, d)) + t + c + d;
}

/* (n-1)*max + sum, but for what two directions at once do to it: they slow each other, yet not while the first item comes in and the last goes out; and run
 * freely, one may take more than its half, where a schedule keeps them in step. So the steady state is bounded by the bytes that the link moves in both
 * directions together, and the ends by each direction alone. */
double side_timeline_bound_shared(uint64_t n, double t, double c, double d, double both)
{
    double longest, steady, sum;

    t = larger(t, 0.0);
    c = larger(c, 0.0);
    d = larger(d, 0.0);
    longest = larger(t, d);
    if (n == 0)
        return 0.0;
    both = both < t + d ? larger(both, longest) : t + d;
    steady = larger(both, c);
    sum = (double)(n - 1) * steady + t + c + d;
    /* While the first item is computed, more items come in, at the speed of one direction. */
    return both > c && n > 1 && longest > 0 ? sum - c * (both / longest - 1) : sum;
}
