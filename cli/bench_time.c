/* SPDX-License-Identifier: MIT
 *
 *     gate     [spin......]|open
 *     lane 0               wait |lead     |begin  work work work  end
 *     lane 1               wait |lead wait|begin  work work       end
 *     host     queue queue queue | is `open` done? then the work began before all of it was queued: throw away, longer spin
 *
 * The times are the device's own, so the host's queueing is no part of them; and nothing can hang: the spin ends by itself.
 */
#include "bench.h"
#include "signals.h"

#include <stdio.h>
#include <string.h>

static const uint64_t least_hold_ns = 100000, most_hold_ns = 200000000; /* under the second in which Ctrl-C must end */
static const double slice_s = 0.2;                                      /* of a wait, between looks for a signal */
enum { TRIES = 20 };

side_status bench_check(const struct bench *b)
{
    (void)b;
    return signals_interrupted() ? SIDE_CANCELLED : SIDE_OK;
}

int bench_failed(struct bench *b, side_status status, const char *what)
{
    if (status == SIDE_CANCELLED && signals_interrupted())
        say("interrupted");
    else if (!b->said)
        (void)say_status(status, "%s", what);
    if (status == SIDE_STUCK)
        b->stuck = true;
    b->said = false;
    return exit_for(status);
}

side_status bench_sync(struct bench *b, side_stream *stream)
{
    double waited = 0;
    side_status status;

    do {
        status = side_stream_sync(stream, slice_s);
        waited += slice_s;
    } while (status == SIDE_STUCK && waited < b->timeout_s && !signals_interrupted());
    if (status != SIDE_STUCK)
        return status;
    b->stuck = true;
    return signals_interrupted() ? SIDE_CANCELLED : SIDE_STUCK;
}

const char *bench_clock(const struct bench *b)
{
    return b->props.kernels ? "device events" : "the host's clock: there are no kernels to hold work back with";
}

static side_status spin(struct bench *b, uint64_t ns)
{
    side_op op = SIDE_OP_INIT;

    op.id = SIDE_OP_SPIN;
    op.dim[0] = ns;
    return side_op_async(b->gate, &op);
}

side_status bench_time_begin(struct bench *b)
{
    side_status status = side_stream_create(b->device, &b->gate);

    if (status == SIDE_OK)
        status = side_event_create(b->device, true, &b->gate_open);
    for (size_t i = 0; i < BENCH_LANES && status == SIDE_OK; i++) {
        status = side_event_create(b->device, true, &b->begin[i]);
        if (status == SIDE_OK)
            status = side_event_create(b->device, true, &b->end[i]);
        if (status == SIDE_OK)
            status = side_event_create(b->device, false, &b->led[i]);
    }
    b->hold_ns = 2 * least_hold_ns;
    if (status == SIDE_OK && b->props.kernels)
        status = spin(b, 1000);
    return status == SIDE_OK ? bench_sync(b, b->gate) : status;
}

void bench_time_end(struct bench *b)
{
    for (size_t i = 0; i < BENCH_LANES; i++) {
        side_event_destroy(b->begin[i]);
        side_event_destroy(b->end[i]);
        side_event_destroy(b->led[i]);
    }
    side_event_destroy(b->gate_open);
    side_stream_destroy(b->gate);
}

/* All lanes, also after a failure: nothing may be in flight when memory is freed or looked at. */
static side_status sync_all(struct bench *b, const struct bench_lane *lanes, size_t count, side_status first)
{
    side_status status = bench_sync(b, b->gate);

    first = first == SIDE_OK ? status : first;
    for (size_t i = 0; i < count; i++) {
        status = bench_sync(b, lanes[i].stream);
        first = first == SIDE_OK ? status : first;
    }
    return first;
}

static side_status queue_lead(struct bench *b, const struct bench_lane *lane, size_t number)
{
    side_status status = side_stream_wait(lane->stream, b->gate_open);

    if (status != SIDE_OK || lane->lead == NULL)
        return status;
    status = lane->lead(lane->user, lane->stream);
    return status == SIDE_OK ? side_event_record(b->led[number], lane->stream) : status;
}

/* Behind the leads of all lanes, so that they begin together. */
static side_status queue_lane(struct bench *b, const struct bench_lane *lanes, size_t count, size_t number)
{
    const struct bench_lane *lane = &lanes[number];
    side_status status = SIDE_OK;

    for (size_t i = 0; i < count && status == SIDE_OK; i++)
        if (i != number && lanes[i].lead != NULL)
            status = side_stream_wait(lane->stream, b->led[i]);
    if (status == SIDE_OK)
        status = side_event_record(b->begin[number], lane->stream);
    if (status == SIDE_OK)
        status = lane->queue(lane->user, lane->stream);
    return status == SIDE_OK ? side_event_record(b->end[number], lane->stream) : status;
}

/* One try. *held: the host had queued everything before the gate opened. */
static side_status try_once(struct bench *b, struct bench_lane *lanes, size_t count, bool *held)
{
    double began = clock_s(), queued_s;
    side_status status = spin(b, b->hold_ns), open;

    if (status == SIDE_OK)
        status = side_event_record(b->gate_open, b->gate);
    for (size_t i = 0; i < count && status == SIDE_OK; i++)
        status = queue_lead(b, &lanes[i], i);
    for (size_t i = 0; i < count && status == SIDE_OK; i++)
        status = queue_lane(b, lanes, count, i);
    open = status == SIDE_OK ? side_event_query(b->gate_open) : SIDE_AGAIN;
    queued_s = clock_s() - began;
    status = sync_all(b, lanes, count, status);
    if (status != SIDE_OK)
        return status;
    if (open != SIDE_OK && open != SIDE_AGAIN)
        return open;
    *held = open == SIDE_AGAIN;
    if (*held) { /* what comes next is likely to be alike; a hiccup must not slow down all the rest */
        uint64_t next = (uint64_t)(queued_s * 3e9);

        b->hold_ns = next > b->hold_ns ? b->hold_ns : next < least_hold_ns ? least_hold_ns : next;
    }
    return SIDE_OK;
}

static side_status read_times(struct bench *b, struct bench_lane *lanes, size_t count)
{
    side_status status = SIDE_OK;

    for (size_t i = 0; i < count && status == SIDE_OK; i++) {
        status = side_event_elapsed(b->gate_open, b->begin[i], &lanes[i].begin_s);
        if (status == SIDE_OK)
            status = side_event_elapsed(b->gate_open, b->end[i], &lanes[i].end_s);
    }
    return status;
}

static side_status time_by_host(struct bench *b, struct bench_lane *lanes, size_t count)
{
    side_status status = SIDE_OK;
    uint64_t began;
    double seconds;

    for (size_t i = 0; i < count && status == SIDE_OK; i++)
        if (lanes[i].lead != NULL)
            status = lanes[i].lead(lanes[i].user, lanes[i].stream);
    status = sync_all(b, lanes, count, status);
    if (status != SIDE_OK)
        return status;
    began = side_device_now_ns(b->device);
    for (size_t i = 0; i < count && status == SIDE_OK; i++)
        status = lanes[i].queue(lanes[i].user, lanes[i].stream);
    status = sync_all(b, lanes, count, status);
    seconds = (double)(side_device_now_ns(b->device) - began) / 1e9;
    for (size_t i = 0; i < count; i++) {
        lanes[i].begin_s = 0;
        lanes[i].end_s = seconds;
    }
    return status;
}

side_status bench_time(struct bench *b, struct bench_lane *lanes, size_t count)
{
    side_status status = bench_check(b);

    if (status == SIDE_OK && !b->props.kernels)
        return time_by_host(b, lanes, count);
    for (int i = 0; i < TRIES && status == SIDE_OK; i++) {
        bool held = false;

        status = try_once(b, lanes, count, &held);
        if (status == SIDE_OK && held)
            return read_times(b, lanes, count);
        if (status != SIDE_OK)
            break;
        b->too_short++;
        b->hold_ns = b->hold_ns > most_hold_ns / 2 ? most_hold_ns : 2 * b->hold_ns;
        status = bench_check(b);
    }
    if (status == SIDE_OK) {
        say("measuring error: in %d tries the host could not queue a sample's work within %g s; is the machine "
            "overloaded?",
            TRIES, (double)most_hold_ns / 1e9);
        b->said = true;
        b->code = EXIT_MEASURING;
        status = SIDE_STATE;
    }
    return status;
}
