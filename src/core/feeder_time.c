/* SPDX-License-Identifier: MIT
 *
 * What the copies take, what the reader computes, where it stalls and why.
 *
 *     copy stream   ---- begun [ H2D ][ H2D ] copied ----
 *     reader        --[ work of batch n-1 ] asked ........ ready [ work of batch n ] asked ...
 *                                           <-- stall -->        <---- compute ---->
 *
 * All four are timing events of the batch's record. They are read when the record is used again, by when they are done as a rule, or when statistics are asked for;
 * a reader that is the host is measured by its clock.
 *
 * While next blocks the host, the clocks of the others say why: no batch was submitted, then no slot was free, then it was being staged. The reader's stall is as
 * long as that or shorter, where it was still busy, or longer: then it is the copy itself.
 */
#include "feeder.h"

#include "error.h"

/* Which batches are measured: the first ones, then three in a row of each sixteen. A timing event holds up what comes behind it until all before it is done,
 * and then some: measuring every batch costs a step of 3 ms 2 % where copy and compute are as long as each other. */
#define MEASURE_FIRST 16u
#define MEASURE_OF    16u
#define MEASURE_RUN   3u

static bool is_sampled(uint64_t number)
{
    return number < MEASURE_FIRST || number % MEASURE_OF < MEASURE_RUN;
}

/* The event, made at first use, records the stream. */
static bool stamp(side_feeder *f, dev_event **event, side_stream *stream)
{
    const struct side_device_ops *ops = f->device->ops;
    side_error kept;
    bool ok;

    error_copy(&kept);
    ok = *event != NULL || ops->event_create(f->device->context, true, event) == SIDE_OK;
    ok = ok && ops->event_record(*event, stream->handle) == SIDE_OK;
    if (!ok)
        error_restore(&kept); /* not what the caller's call failed of */
    return ok;
}

void timing_begin(side_feeder *f, struct batch *b)
{
    side_error kept;

    if (!f->options.timing)
        return;
    error_copy(&kept);
    /* The fence's own event keeps time: one that is not made here is made without, and this batch is not measured. */
    b->has_begun = (b->copied.event != NULL ||
                    f->device->ops->event_create(f->device->context, true, &b->copied.event) == SIDE_OK);
    b->has_begun = b->has_begun && is_sampled(b->number) && stamp(f, &b->begun, f->copy);
    error_restore(&kept);
}

void timing_ask(side_feeder *f, side_stream *reader)
{
    uint32_t by = reader != NULL ? reader->number : 0;

    if (!f->options.timing || (f->has_asked && f->asked_by == by)) /* asked again for the same batch */
        return;
    f->asked_ns = feeder_now(f);
    f->asked_by = by;
    f->has_asked = true;
    f->asked_is_recorded = is_sampled(f->taken) && (reader == NULL || stamp(f, &f->asked, reader));
}

bool timing_ready(side_feeder *f, struct batch *b, side_stream *reader)
{
    return f->options.timing && is_sampled(b->number) && (reader == NULL || stamp(f, &b->ready, reader));
}

/* How long the host was blocked in next, and for want of what. */
static void blame(struct batch *b, uint64_t asked, uint64_t now)
{
    uint64_t *lost = b->lost_ns;
    uint64_t from = b->slot_asked_ns > asked ? b->slot_asked_ns : asked;

    lost[LOST_SOURCE] = lost[LOST_SLOT] = lost[LOST_STAGE] = 0;
    if (b->issued_ns <= asked)
        return;
    if (b->submitted_ns > asked)
        lost[LOST_SOURCE] = b->submitted_ns - asked;
    if (b->slot_got_ns > from)
        lost[LOST_SLOT] = b->slot_got_ns - from;
    uint64_t rest = b->issued_ns - asked, known = lost[LOST_SOURCE] + lost[LOST_SLOT];
    lost[LOST_STAGE] = rest > known ? rest - known : 0;
    /* Waking up came late: for whatever it slept. */
    int most = lost[LOST_SOURCE] >= lost[LOST_SLOT] ? LOST_SOURCE : LOST_SLOT;
    most = lost[LOST_STAGE] > lost[most] ? LOST_STAGE : most;
    lost[most] += now > b->issued_ns ? now - b->issued_ns : 0;
}

void timing_taken(side_feeder *f, struct batch *b, side_stream *reader, bool stamped)
{
    dev_event *spare = b->asked;

    b->measured = stamped && f->asked_is_recorded && b->has_begun;
    f->has_asked = false;
    if (!f->options.timing)
        return;
    b->reader = reader != NULL ? reader->number : 0;
    b->asked = f->asked;
    f->asked = spare;
    b->asked_ns = f->asked_ns;
    b->ready_ns = feeder_now(f);
    blame(b, b->asked_ns, b->ready_ns);
}

/* ---------------------------------------------------------------- adding up */

/* ns from one to the other; 0 where it cannot be told. */
static double between(side_feeder *f, dev_event *from, dev_event *to)
{
    double ns = 0;

    return f->device->ops->event_elapsed(from, to, &ns) == SIDE_OK && ns > 0 ? ns : 0;
}

static void add(side_feeder *f, const struct batch *b)
{
    side_feeder_stats *s = &f->stats;
    const struct batch *before = b->number > 0 ? feeder_batch(f, b->number - 1) : NULL;
    double stall = b->reader != 0 ? between(f, b->asked, b->ready) : (double)(b->ready_ns - b->asked_ns);
    double blocked = (double)(b->lost_ns[LOST_SOURCE] + b->lost_ns[LOST_SLOT] + b->lost_ns[LOST_STAGE]);
    double share = blocked > stall ? stall / blocked : 1; /* the reader was still busy with the rest */

    s->timed++;
    s->copy_s += between(f, b->begun, b->copied.event) * 1e-9;
    s->stall_s += stall * 1e-9;
    s->lost_source_s += (double)b->lost_ns[LOST_SOURCE] * share * 1e-9;
    s->lost_slot_s += (double)b->lost_ns[LOST_SLOT] * share * 1e-9;
    s->lost_stage_s += (double)b->lost_ns[LOST_STAGE] * share * 1e-9;
    s->lost_link_s += (stall - blocked * share) * 1e-9;
    if (before != NULL && before->number + 1 == b->number && before->measured && before->reader == b->reader)
        s->compute_s += (b->reader != 0 ? between(f, before->ready, b->asked)
                                        : (double)(b->asked_ns - before->ready_ns)) *
                        1e-9;
}

void timing_sum(side_feeder *f, uint64_t end, bool drop)
{
    const struct side_device_ops *ops = f->device->ops;
    side_error kept;

    error_copy(&kept);
    for (; f->timed < end; f->timed++) {
        const struct batch *b = feeder_batch(f, f->timed);
        side_status r = SIDE_OK;
        if (!b->measured || !is_sampled(b->number > 0 ? b->number - 1 : 0)) /* the first of a run only begins it */
            continue;
        if (r == SIDE_OK)
            r = fence_query(&b->copied, f->device);
        if (r == SIDE_OK && b->reader != 0)
            r = ops->event_query(b->ready);
        if (r == SIDE_AGAIN && !drop)
            break;
        if (r == SIDE_OK)
            add(f, b);
    }
    error_restore(&kept);
}

void timing_finish(side_feeder *f)
{
    const struct side_device_ops *ops = f->device->ops;

    for (uint32_t i = 0; f->batches != NULL && i < f->batch_count; i++) {
        const struct batch *b = &f->batches[i];
        dev_event *events[3] = {b->begun, b->asked, b->ready};
        for (int k = 0; k < 3; k++)
            if (events[k] != NULL)
                ops->event_destroy(events[k]);
    }
    if (f->asked != NULL)
        ops->event_destroy(f->asked);
}
