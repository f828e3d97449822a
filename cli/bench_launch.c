/* SPDX-License-Identifier: MIT
 *
 * bench launch: what calls cost the host and the device, and what a pipeline adds to the work that it is given.
 *
 *     call       host: the loop that queues them, while a spin holds the stream: nothing else happens
 *                in a row: device time of many, a call; alone: of one between two events; known: from the call until the host knows that it is done
 *     hand-over  copy and operation in turn on two streams that wait for each other, less both in a row: what is left, a wait
 *     item       a pipeline's own time between two of its compute calls, where nothing makes it wait
 *     in turn    the same of a pipeline of depth 1, whose events and waits are those of slots: what plans reckon with
 *     run        a pipeline of one item, less the item's copy, work and hand-over
 */
#include "bench.h"
#include "signals.h"

#include <stdlib.h>
#include <string.h>

enum { BYTES = 4096, CALLS = 100, TURNS = 30, ITEMS = 64, WORK_NS = 20000 };

enum call { COPY, RECORD, WAIT, OP, QUERY_BUSY, QUERY_DONE, CALL_KINDS };

struct row {
    struct bench_samples host, device, alone, known; /* seconds a call */
};

struct launch {
    struct bench *bench;
    side_stream *stream, *other;
    side_event *event, *done, *back;
    void *host, *device;
    enum call call; /* under way */
    size_t calls;
    double issue_s;
    struct row rows[CALL_KINDS];
    struct bench_samples copy_to_op, op_to_op, item, single, in_turn, run; /* seconds */
    /* Of the pipeline under way. */
    uint64_t first_ns, last_ns, seen, work_ns;
    bool disabled; /* by SIDESTREAM_DISABLE: it tells nothing of pipelines */
};

static const char *const names[CALL_KINDS] = {"copy of 4 KiB", "event record", "stream wait",
                                              "operation",     "query, busy",  "query, done"};

/* ---------------------------------------------------------------- calls */

static side_status spin(side_stream *stream, uint64_t ns)
{
    side_op op = SIDE_OP_INIT;

    op.id = SIDE_OP_SPIN;
    op.dim[0] = ns;
    return side_op_async(stream, &op);
}

static side_status one(struct launch *l, side_stream *stream)
{
    side_status status;

    switch (l->call) {
    case COPY: return side_copy_async(stream, SIDE_COPY_H2D, l->device, l->host, BYTES);
    case RECORD: return side_event_record(l->event, stream);
    case WAIT: return side_stream_wait(stream, l->back);
    case OP: return spin(stream, 1);
    default: status = side_event_query(l->call == QUERY_DONE ? l->done : l->event); break;
    }
    return status == SIDE_AGAIN ? SIDE_OK : status;
}

static side_status queue_calls(void *user, side_stream *stream)
{
    struct launch *l = user;
    side_status status = SIDE_OK;
    uint64_t began;

    if (l->call == QUERY_BUSY)
        status = side_event_record(l->event, stream);
    if (l->call == WAIT) { /* for what is held back too: a wait for what is done is left out by drivers */
        status = side_stream_wait(l->other, l->bench->gate_open);
        if (status == SIDE_OK)
            status = side_event_record(l->back, l->other);
    }
    began = side_device_now_ns(l->bench->device);
    for (size_t i = 0; i < l->calls && status == SIDE_OK; i++)
        status = one(l, stream);
    l->issue_s = (double)(side_device_now_ns(l->bench->device) - began) / 1e9;
    return status;
}

/* A copy, for the begin event to lie where the calls will be. */
static side_status lead(void *user, side_stream *stream)
{
    const struct launch *l = user;

    if (l->call == OP)
        return spin(stream, 1);
    return side_copy_async(stream, SIDE_COPY_H2D, l->device, l->host, BYTES);
}

static side_status time_calls(struct launch *l, enum call call, size_t calls, bool with_lead, double *seconds)
{
    struct bench_lane lane = {l->stream, with_lead ? lead : NULL, queue_calls, l, 0, 0};
    side_status status;

    l->call = call;
    l->calls = calls;
    status = bench_time(l->bench, &lane, 1);
    *seconds = (lane.end_s - lane.begin_s) / (double)calls;
    return status;
}

static side_status until_known(struct launch *l, enum call call, double *seconds)
{
    uint64_t began = side_device_now_ns(l->bench->device);
    side_status status;

    l->call = call;
    status = one(l, l->stream);
    if (status == SIDE_OK && call != RECORD)
        status = side_event_record(l->event, l->stream);
    if (status == SIDE_OK)
        status = side_event_wait(l->event, l->bench->timeout_s);
    *seconds = (double)(side_device_now_ns(l->bench->device) - began) / 1e9;
    return status;
}

/* Operations need kernels. */
static bool has(const struct launch *l, enum call call)
{
    return call != OP || l->bench->props.kernels;
}

static side_status measure_call(struct launch *l, enum call call)
{
    struct row *row = &l->rows[call];
    double seconds;
    side_status status = time_calls(l, call, CALLS, true, &seconds);

    if (status == SIDE_OK)
        bench_add(&row->host, l->issue_s / CALLS);
    if (status != SIDE_OK || call == QUERY_BUSY || call == QUERY_DONE)
        return status;
    bench_add(&row->device, seconds);
    status = time_calls(l, call, 1, call == WAIT, &seconds); /* its event may come a little after the gate */
    if (status != SIDE_OK)
        return status;
    bench_add(&row->alone, seconds);
    status = until_known(l, call, &seconds);
    if (status == SIDE_OK)
        bench_add(&row->known, seconds);
    return status;
}

/* ---------------------------------------------------------------- from one stream to another */

/* The first of a pair on one stream, the second on the other, and each waits for the one before. */
static side_status queue_turns(void *user, side_stream *stream)
{
    struct launch *l = user;
    side_status status = SIDE_OK;

    for (int i = 0; i < TURNS && status == SIDE_OK; i++) {
        status = l->call == COPY ? one(l, stream) : spin(stream, WORK_NS);
        if (status == SIDE_OK)
            status = side_event_record(l->event, stream);
        if (status == SIDE_OK)
            status = side_stream_wait(l->other, l->event);
        if (status == SIDE_OK)
            status = spin(l->other, WORK_NS);
        if (status == SIDE_OK)
            status = side_event_record(l->back, l->other);
        if (status == SIDE_OK)
            status = side_stream_wait(stream, l->back);
    }
    return status;
}

static side_status queue_work(void *user, side_stream *stream)
{
    side_status status = SIDE_OK;

    (void)user;
    for (int i = 0; i < TURNS && status == SIDE_OK; i++)
        status = spin(stream, WORK_NS);
    return status;
}

static side_status time_work(struct launch *l, double *seconds)
{
    struct bench_lane lane = {l->stream, lead, queue_work, l, 0, 0};
    side_status status;

    l->call = OP;
    status = bench_time(l->bench, &lane, 1);
    *seconds = (lane.end_s - lane.begin_s) / TURNS;
    return status;
}

static side_status measure_turns(struct launch *l, enum call first, double work_s, struct bench_samples *samples)
{
    const double first_s = first == COPY ? bench_median(&l->rows[COPY].device) : work_s;
    struct bench_lane lane = {l->stream, lead, queue_turns, l, 0, 0};
    side_status status;
    double gap;

    l->call = first;
    status = bench_time(l->bench, &lane, 1);
    if (status == SIDE_OK)
        status = bench_sync(l->bench, l->other);
    gap = ((lane.end_s - lane.begin_s) / TURNS - first_s - work_s) / 2;
    if (status == SIDE_OK)
        bench_add(samples, gap);
    return status;
}

/* ---------------------------------------------------------------- pipelines */

static int compute(void *user, side_stream *stream, side_item *item)
{
    struct launch *l = user;

    l->last_ns = side_device_now_ns(l->bench->device);
    if (l->seen++ == 0)
        l->first_ns = l->last_ns;
    (void)item;
    return l->bench->props.kernels && spin(stream, l->work_ns) != SIDE_OK;
}

static side_status make_pipeline(struct launch *l, const side_block *blocks, uint64_t items, uint32_t depth,
                                 side_pipeline **pipeline)
{
    side_pipeline_options o = SIDE_PIPELINE_OPTIONS_INIT;

    o.item_bytes = BYTES;
    o.depth = depth;
    o.window = depth > 1 ? (uint32_t)items : 0; /* no item waits for another to be finished; one in turn, as ever */
    o.source = side_source_blocks(blocks, items);
    o.compute = compute;
    o.compute_user = l;
    o.timeout_s = l->bench->timeout_s;
    return side_pipeline_create(l->bench->device, &o, pipeline);
}

/* Seconds of the call. */
static side_status run(struct launch *l, side_pipeline *pipeline, uint64_t work_ns, double *seconds)
{
    side_pipeline_stats stats = {.disabled = false};
    uint64_t began;
    side_status status;

    l->seen = 0;
    l->work_ns = work_ns;
    signals_watch(pipeline);
    began = side_device_now_ns(l->bench->device);
    status = side_pipeline_run(pipeline, &stats);
    *seconds = (double)(side_device_now_ns(l->bench->device) - began) / 1e9;
    signals_watch(NULL);
    l->disabled = stats.disabled;
    return status;
}

/* The first run warms up. */
static side_status measure_items(struct launch *l, side_pipeline *pipeline)
{
    side_status status = SIDE_OK;
    double seconds;

    for (size_t i = 0; i <= l->bench->samples && status == SIDE_OK; i++) {
        status = run(l, pipeline, 1, &seconds);
        if (status == SIDE_OK && i > 0)
            bench_add(&l->item, (double)(l->last_ns - l->first_ns) / 1e9 / (ITEMS - 1));
    }
    return status;
}

static side_status measure_singles(struct launch *l, side_pipeline *pipeline)
{
    side_status status = SIDE_OK;
    double seconds;

    for (size_t i = 0; i <= l->bench->samples && status == SIDE_OK; i++) {
        status = run(l, pipeline, WORK_NS, &seconds);
        if (status == SIDE_OK && i > 0)
            bench_add(&l->single, seconds);
    }
    return status;
}

/* Of depth 1: each copy waits for the work before it, and each work for its copy. */
static side_status measure_in_turn(struct launch *l, side_pipeline *pipeline, double work_s)
{
    const double copy_s = bench_median(&l->rows[COPY].device), single_s = bench_median(&l->single);
    side_status status = SIDE_OK;
    double seconds;

    for (size_t i = 0; i <= l->bench->samples && status == SIDE_OK; i++) {
        status = run(l, pipeline, WORK_NS, &seconds);
        if (status == SIDE_OK && i > 0)
            bench_add(&l->in_turn, ((seconds - single_s) / (ITEMS - 1) - copy_s - work_s) / 2);
    }
    return status;
}

/* The copy, the operation and the hand-over between them are no part of what a run costs by itself. */
static void runs_from_singles(struct launch *l, double work_s)
{
    double parts = bench_median(&l->rows[COPY].device);

    if (l->in_turn.count > 0)
        parts += work_s + bench_median(&l->in_turn);
    for (size_t i = 0; i < l->single.count; i++)
        bench_add(&l->run, l->single.value[i] - parts);
}

enum what { QUEUEING, SINGLE, IN_TURN };

static side_status with_pipeline(struct launch *l, enum what what, double work_s)
{
    const uint64_t items = what == SINGLE ? 1 : ITEMS;
    side_block *blocks = calloc(items, sizeof(*blocks));
    side_pipeline *pipeline = NULL;
    side_status status, destroyed;

    if (blocks == NULL) {
        say("out of host memory");
        l->bench->said = true;
        return SIDE_NO_MEMORY;
    }
    for (uint64_t i = 0; i < items; i++)
        blocks[i] = (side_block){l->host, BYTES};
    status = make_pipeline(l, blocks, items, what == IN_TURN ? 1 : 3, &pipeline);
    if (status == SIDE_OK && what == QUEUEING)
        status = measure_items(l, pipeline);
    else if (status == SIDE_OK)
        status = what == SINGLE ? measure_singles(l, pipeline) : measure_in_turn(l, pipeline, work_s);
    destroyed = side_pipeline_destroy(pipeline);
    if (destroyed == SIDE_STUCK)
        l->bench->stuck = true; /* and the blocks stay */
    else
        free(blocks);
    return status != SIDE_OK ? status : destroyed;
}

/* ---------------------------------------------------------------- the course of events */

/* What the timed copies took there must be there. */
static side_status check_bytes(struct launch *l, bool before)
{
    unsigned char *from = l->host, *to = from + BYTES;
    side_status status;

    if (before) {
        for (size_t i = 0; i < BYTES; i++)
            from[i] = (unsigned char)(i * 7 + i / 256 + l->rows[COPY].host.count);
        status = side_memset_async(l->stream, l->device, BENCH_POISON, BYTES);
    } else {
        memset(to, BENCH_POISON, BYTES);
        status = side_copy_async(l->stream, SIDE_COPY_D2H, to, l->device, BYTES);
    }
    if (status == SIDE_OK)
        status = bench_sync(l->bench, l->stream);
    if (status == SIDE_OK && !before && memcmp(from, to, BYTES) != 0)
        bench_error(l->bench, EXIT_FAILED, "launch: a copy of %d bytes came out wrong", BYTES);
    return status;
}

static side_status measure_calls(struct launch *l)
{
    side_status status = SIDE_OK;

    for (size_t sample = 0; sample < l->bench->samples && status == SIDE_OK; sample++) {
        status = check_bytes(l, true);
        for (int call = 0; call < CALL_KINDS && status == SIDE_OK; call++)
            if (has(l, (enum call)call))
                status = measure_call(l, (enum call)call);
        if (status == SIDE_OK)
            status = check_bytes(l, false);
    }
    return status;
}

static side_status measure(struct launch *l)
{
    double work_s = 0;
    side_status status = measure_calls(l);

    for (size_t sample = 0; sample < l->bench->samples && status == SIDE_OK && l->bench->props.kernels; sample++) {
        status = time_work(l, &work_s);
        if (status == SIDE_OK)
            status = measure_turns(l, COPY, work_s, &l->copy_to_op);
        if (status == SIDE_OK)
            status = measure_turns(l, OP, work_s, &l->op_to_op);
    }
    if (status == SIDE_OK)
        status = check_bytes(l, false);
    if (status == SIDE_OK)
        status = with_pipeline(l, QUEUEING, work_s);
    if (status == SIDE_OK)
        status = with_pipeline(l, SINGLE, work_s);
    if (status == SIDE_OK && l->bench->props.kernels)
        status = with_pipeline(l, IN_TURN, work_s);
    if (status == SIDE_OK)
        runs_from_singles(l, work_s);
    return status;
}

static side_status prepare(struct launch *l)
{
    side_device *device = l->bench->device;
    side_status status = bench_pinned_take(l->bench, 2 * BYTES, &l->host);

    if (status == SIDE_OK)
        status = bench_device_take(l->bench, BYTES, &l->device);
    if (status == SIDE_OK)
        status = side_stream_create(device, &l->stream);
    if (status == SIDE_OK)
        status = side_stream_create(device, &l->other);
    if (status == SIDE_OK)
        status = side_event_create(device, false, &l->event);
    if (status == SIDE_OK)
        status = side_event_create(device, false, &l->done);
    if (status == SIDE_OK)
        status = side_event_create(device, false, &l->back);
    if (status == SIDE_OK)
        status = side_event_record(l->done, l->stream);
    return status == SIDE_OK ? bench_sync(l->bench, l->stream) : status;
}

static void clean_up(struct launch *l)
{
    if (l->bench->stuck)
        return;
    side_event_destroy(l->event);
    side_event_destroy(l->done);
    side_event_destroy(l->back);
    side_stream_destroy(l->stream);
    side_stream_destroy(l->other);
    bench_pinned_free(l->bench, l->host, 2 * BYTES);
    bench_device_free(l->bench, l->device, BYTES);
}

/* ---------------------------------------------------------------- report */

/* Differences of times may come out a little under zero, or rounded, where there is nothing. */
static double not_negative(double value)
{
    return value > 1e-12 ? value : 0;
}

static void keep(struct launch *l)
{
    side_machine *m = &l->bench->machine;

    if (l->disabled) {
        say("SIDESTREAM_DISABLE is set: what pipelines cost is not kept");
        return;
    }
    if (l->in_turn.count > 0)
        m->handover_s = not_negative(bench_median(&l->in_turn));
    m->queue_s = bench_median(&l->item);
    m->start_s = not_negative(bench_median(&l->run));
}

static void print_calls(const struct launch *l)
{
    const struct bench *b = l->bench;
    char text[16];

    bench_print(b, "\nlaunch: what a call costs the host, and on the device: one of many in a row, one alone between "
                   "two events; and from the call "
                   "until the host knows that it is done\n");
    bench_print(b, "%-15s %10s %10s %10s %10s\n", "", "host", "in a row", "alone", "known");
    for (int i = 0; i < CALL_KINDS; i++) {
        const struct row *row = &l->rows[i];

        if (!has(l, (enum call)i))
            continue;
        bench_print(b, "%-15s %10s", names[i], bench_seconds_text(bench_median(&row->host), text));
        bench_print(b, " %10s", bench_seconds_text(bench_median(&row->device), text));
        bench_print(b, " %10s", bench_seconds_text(bench_median(&row->alone), text));
        bench_print(b, " %10s\n", bench_seconds_text(bench_median(&row->known), text));
    }
}

static void print_one(const struct launch *l, const char *name, const struct bench_samples *s)
{
    char median[16], least[16], most[16];

    if (s->count == 0)
        return;
    bench_print(l->bench, "%-58s %10s (%s to %s)\n", name, bench_seconds_text(bench_median(s), median),
                bench_seconds_text(bench_least(s), least), bench_seconds_text(bench_most(s), most));
}

static json_t *to_json(const struct launch *l)
{
    static const char *const keys[CALL_KINDS] = {"copy", "record", "wait", "op", "query_busy", "query_done"};
    json_t *calls = json_object();

    for (int i = 0; i < CALL_KINDS; i++)
        if (has(l, (enum call)i))
            json_object_set_new(calls, keys[i],
                                json_pack("{s:o, s:o, s:o, s:o}", "host_s", bench_samples_json(&l->rows[i].host),
                                          "in_a_row_s", bench_samples_json(&l->rows[i].device), "alone_s",
                                          bench_samples_json(&l->rows[i].alone), "known_s",
                                          bench_samples_json(&l->rows[i].known)));
    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:o}", "calls", calls, "handover_copy_s",
                     bench_samples_json(&l->copy_to_op), "handover_op_s", bench_samples_json(&l->op_to_op),
                     "handover_pipeline_s", bench_samples_json(&l->in_turn), "queue_s", bench_samples_json(&l->item),
                     "start_s", bench_samples_json(&l->run));
}

static void report(struct launch *l)
{
    print_calls(l);
    print_one(l, "hand-over between streams, copy and operation", &l->copy_to_op);
    print_one(l, "hand-over between streams, operations", &l->op_to_op);
    print_one(l, "hand-over between a pipeline's streams", &l->in_turn);
    print_one(l, "a pipeline's own time on the host, an item", &l->item);
    print_one(l, "a pipeline run, besides its items", &l->run);
    bench_json(l->bench, "launch", to_json(l));
}

int bench_launch(struct bench *b)
{
    struct launch *l = calloc(1, sizeof(*l));
    side_status status;
    int code = EXIT_DONE;

    if (l == NULL) {
        say("out of host memory");
        return EXIT_MEMORY;
    }
    l->bench = b;
    status = prepare(l);
    if (status == SIDE_OK)
        status = measure(l);
    if (status == SIDE_OK) {
        keep(l);
        report(l);
    } else {
        code = bench_failed(b, status, "launch");
    }
    clean_up(l);
    free(l);
    return code;
}
