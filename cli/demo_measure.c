/* SPDX-License-Identifier: MIT
 *
 * t, c and d come from runs of the copies alone and of the computes alone, never from an overlapped run. Schedules are timed by the host's
 * clock from the first call to everything finished; they take turns within each repeat, so that a drift of clocks or of other users meets all.
 * A software device has no noise: one run says it all, and it is logged too.
 */
#include "demo.h"
#include "progress.h"
#include "signals.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TIMEOUT_S = 60 };

void demo_error(struct demo *d, int code, const char *format, ...)
{
    char text[200];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    say("%s", text);
    if (d->error_count < DEMO_ERRORS)
        memcpy(d->errors[d->error_count++], text, sizeof(text));
    if (d->code == EXIT_DONE || code == EXIT_FAILED)
        d->code = code;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

/* Sorts the values. */
static double median(double *values, size_t n)
{
    qsort(values, n, sizeof(*values), by_value);
    return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

/* ---------------------------------------------------------------- lanes alone */

enum { IN = 1, OUT = 2, COMPUTE = 4 };

static side_status queue_lane(struct demo *d, unsigned lane, side_stream *stream, size_t events)
{
    side_status status = side_event_record(d->begin[events], stream);

    for (size_t i = 0; i < d->args.items && status == SIDE_OK; i++) {
        if (lane == IN)
            status = side_copy_async(stream, SIDE_COPY_H2D, d->in[i % 2], d->pinned[i].data, d->item_bytes);
        else if (lane == OUT)
            status = side_copy_async(stream, SIDE_COPY_D2H, d->pinned_out[i].data, d->out[i], d->result_bytes);
        else
            status = demo_matmul(d, stream, d->in[0], d->out[i]);
    }
    return status == SIDE_OK ? side_event_record(d->end[events], stream) : status;
}

/* Seconds an item for up to two lanes that run at once. */
static side_status time_lanes(struct demo *d, unsigned first, unsigned second, double *first_s, double *second_s)
{
    side_status status = queue_lane(d, first,
                                    first == COMPUTE ? d->compute
                                    : first == IN    ? d->transfer
                                                     : d->back,
                                    0),
                synced;

    if (status == SIDE_OK && second != 0)
        status = queue_lane(d, second, d->back, 1);
    synced = demo_sync(d);
    if (status == SIDE_OK)
        status = synced;
    if (status == SIDE_OK)
        status = side_event_elapsed(d->begin[0], d->end[0], first_s);
    if (status == SIDE_OK && second != 0)
        status = side_event_elapsed(d->begin[1], d->end[1], second_s);
    *first_s /= (double)d->args.items;
    *second_s /= (double)d->args.items;
    return status;
}

/* Seconds an item of each lane. t and out: with both directions at once where that is what the schedules do, else as the *_alone. */
struct lanes {
    double t, c, out, t_alone, out_alone;
};

static side_status measure_lanes(struct demo *d, struct lanes *l)
{
    double none = 0;
    side_status status;

    *l = (struct lanes){0};
    status = time_lanes(d, IN, 0, &l->t_alone, &none);
    if (status == SIDE_OK && d->args.results)
        status = time_lanes(d, OUT, 0, &l->out_alone, &none);
    l->t = l->t_alone;
    l->out = l->out_alone;
    if (status == SIDE_OK && d->args.results && d->props.copy_engines > 1) /* one engine: they would wait for each other */
        status = time_lanes(d, IN, OUT, &l->t, &l->out);
    return status == SIDE_OK ? time_lanes(d, COMPUTE, 0, &l->c, &none) : status;
}

/* The least time for all items. Two directions at once slow each other; how many bytes they move together says what that costs. */
static double bound(const struct demo *d, const struct lanes *l)
{
    double in = (double)d->item_bytes, out = (double)d->result_bytes;

    if (!d->args.results || d->props.copy_engines < 2)
        return side_timeline_bound(d->args.items, l->t, l->c, l->out, d->props.copy_engines);
    return side_timeline_bound_shared(d->args.items, l->t_alone, l->c, l->out_alone,
                                      (in + out) / (in / l->t + out / l->out));
}

/* ---------------------------------------------------------------- schedules */

static void step(struct demo *d)
{
    progress_update(++d->steps_done);
}

static void check(struct demo *d, struct demo_row *row, uint64_t checksum, bool first)
{
    if (first)
        row->checksum = checksum;
    if (checksum != row->checksum)
        demo_error(d, EXIT_FAILED, "%s: two runs gave different results (%016llx, %016llx)", row->name,
                   (unsigned long long)row->checksum, (unsigned long long)checksum);
    if (first && checksum != d->rows[0].checksum)
        demo_error(d, EXIT_FAILED, "%s: results differ from those of %s (%016llx, %016llx)", row->name, d->rows[0].name,
                   (unsigned long long)checksum, (unsigned long long)d->rows[0].checksum);
}

static side_status run_once(struct demo *d, struct demo_row *row, side_pipeline *pipeline, bool first, double *seconds)
{
    side_status status = demo_poison(d);
    uint64_t begin, end, checksum;

    if (status != SIDE_OK)
        return status;
    signals_watch(pipeline);
    begin = side_device_now_ns(d->device);
    status = row->schedule(d, pipeline);
    end = side_device_now_ns(d->device);
    signals_watch(NULL);
    if (status == SIDE_OK && signals_interrupted())
        status = SIDE_CANCELLED;
    if (status == SIDE_OK)
        status = demo_checksum(d, &checksum);
    if (status != SIDE_OK)
        return status;
    check(d, row, checksum, first);
    step(d);
    *seconds = (double)(end - begin) / 1e9;
    return SIDE_OK;
}

static side_status keep_spans(struct demo_row *row, side_log *log)
{
    size_t count = 0;
    side_status status = side_log_spans(log, NULL, &count);

    if (status != SIDE_OK)
        return status;
    row->spans = calloc(count + 1, sizeof(*row->spans));
    if (row->spans == NULL)
        return SIDE_NO_MEMORY;
    row->span_count = count;
    status = side_log_spans(log, row->spans, &row->span_count);
    return status == SIDE_OK ? side_timeline_account(row->spans, row->span_count, &row->account) : status;
}

/* One run under the log; a pipeline is told of its log when it is made, so this takes a pipeline of its own. */
static side_status run_logged(struct demo *d, struct demo_row *row, side_log *log, bool first, double *seconds)
{
    side_pipeline *pipeline = NULL;
    side_pipeline_stats stats;
    side_status status = side_log_clear(log);

    if (status == SIDE_OK && row->depth > 0)
        status = demo_pipeline_create(d, row, log, &pipeline);
    if (status != SIDE_OK)
        return status;
    d->log = log;
    status = run_once(d, row, pipeline, first, seconds);
    d->log = NULL;
    if (status == SIDE_OK && pipeline != NULL && (status = side_pipeline_get_stats(pipeline, &stats)) == SIDE_OK)
        d->disabled = stats.disabled;
    if (status == SIDE_OK)
        status = keep_spans(row, log);
    if (status == SIDE_OK && side_log_dropped(log) > 0)
        demo_error(d, EXIT_FAILED, "%s: the log lost %llu operations, so what was busy is not known", row->name,
                   (unsigned long long)side_log_dropped(log));
    if (pipeline != NULL) {
        side_status destroyed = side_pipeline_destroy(pipeline);

        status = status == SIDE_OK ? destroyed : status;
    }
    return status;
}

static int failed(struct demo *d, side_status status, const char *what)
{
    progress_end();
    if (status == SIDE_CANCELLED && signals_interrupted()) {
        say("interrupted");
        return EXIT_INTERRUPTED;
    }
    return say_kept(&d->kept, status, "%s", what);
}

/* Repeats with the schedules taking turns; the first round warms up. */
static int timed_rounds(struct demo *d, struct lanes *lanes)
{
    for (size_t round = 0; round <= d->args.repeats; round++) {
        size_t keep = round > 0 ? round - 1 : 0;
        side_status status = measure_lanes(d, &lanes[keep]);

        if (status != SIDE_OK)
            return failed(d, status, "measuring copies and computes alone");
        for (size_t i = 0; i < d->row_count; i++) {
            struct demo_row *row = &d->rows[i];

            if (row->depth > 0 && row->pipeline == NULL)
                status = demo_pipeline_create(d, row, NULL, &row->pipeline);
            if (status == SIDE_OK)
                status = run_once(d, row, row->pipeline, round == 0, &row->times[keep]);
            if (status != SIDE_OK)
                return failed(d, status, row->name);
        }
    }
    return EXIT_DONE;
}

static int logged_round(struct demo *d, bool timed)
{
    side_log *log;
    side_status status = side_log_create(d->device, 0, &log);

    if (status != SIDE_OK)
        return failed(d, status, "the op log");
    for (size_t i = 0; i < d->row_count && status == SIDE_OK; i++) {
        double seconds = 0;

        status = run_logged(d, &d->rows[i], log, timed, &seconds);
        if (status != SIDE_OK) {
            int code = failed(d, status, d->rows[i].name);

            if (status != SIDE_STUCK)
                side_log_destroy(log);
            return code;
        }
        if (timed)
            d->rows[i].times[0] = seconds;
    }
    side_log_destroy(log);
    return EXIT_DONE;
}

static void conclude(struct demo *d)
{
    double serial = 0;

    for (size_t i = 0; i < d->row_count; i++) {
        d->rows[i].time_s = median(d->rows[i].times, d->args.repeats);
        if (d->rows[i].schedule == demo_pinned)
            serial = d->rows[i].time_s;
    }
    for (size_t i = 0; i < d->row_count; i++) {
        struct demo_row *row = &d->rows[i];

        row->speedup = serial / row->time_s;
        row->bound_ratio = row->time_s / d->bound_s;
        /* Computes on several streams may share the device and pass faster than back to back: no bound for them. */
        if (row->bound_ratio < 0.98 && row->streams <= 1)
            demo_error(d, EXIT_MEASURING,
                       "measuring error: %s took %.3f of the least time that is possible; run it again", row->name,
                       row->bound_ratio);
    }
}

/* The median of each, and the bound that they give. */
static void keep_lanes(struct demo *d, const struct lanes *lanes)
{
    double values[5][DEMO_REPEATS];
    const size_t n = d->args.repeats;
    struct lanes l;

    for (size_t i = 0; i < n; i++) {
        values[0][i] = lanes[i].t;
        values[1][i] = lanes[i].c;
        values[2][i] = lanes[i].out;
        values[3][i] = lanes[i].t_alone;
        values[4][i] = lanes[i].out_alone;
    }
    l = (struct lanes){median(values[0], n), median(values[1], n), median(values[2], n), median(values[3], n),
                       median(values[4], n)};
    d->t = l.t;
    d->c = l.c;
    d->d = l.out;
    d->t_alone = l.t_alone;
    d->d_alone = l.out_alone;
    d->bound_s = bound(d, &l);
}

int demo_measure(struct demo *d)
{
    struct lanes lanes[DEMO_REPEATS];
    int code;

    d->steps_done = 0;
    progress_begin("measuring", d->row_count * (d->props.simulated ? 1 : d->args.repeats + 2), 0);
    if (d->props.simulated) {
        side_status status = measure_lanes(d, &lanes[0]);

        code = status == SIDE_OK ? logged_round(d, true) : failed(d, status, "measuring copies and computes alone");
    } else {
        code = timed_rounds(d, lanes);
        if (code == EXIT_DONE)
            code = logged_round(d, false);
    }
    progress_end();
    if (code != EXIT_DONE)
        return code;
    keep_lanes(d, lanes);
    conclude(d);
    return EXIT_DONE;
}
