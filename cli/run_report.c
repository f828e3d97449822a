/* SPDX-License-Identifier: MIT */
#include "run.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* A model's rate is as exact with less, and a CPU copies what it moves. */
enum { PROBE_BYTES = 64 << 20, PROBE_BYTES_SIMULATED = 16 << 20, PROBE_COPIES = 4, TIMEOUT_S = 30 };

/* ---------------------------------------------------------------- link */

static side_status time_copies(struct run *r, side_stream *stream, void *host, void *device, size_t bytes,
                               side_event *begin, side_event *end)
{
    double seconds = 0;
    side_status status = side_copy_async(stream, SIDE_COPY_H2D, device, host, bytes); /* warms up */

    if (status == SIDE_OK)
        status = side_event_record(begin, stream);
    for (int i = 0; i < PROBE_COPIES && status == SIDE_OK; i++)
        status = side_copy_async(stream, SIDE_COPY_H2D, device, host, bytes);
    if (status == SIDE_OK)
        status = side_event_record(end, stream);
    if (side_stream_sync(stream, TIMEOUT_S) == SIDE_STUCK)
        return SIDE_STUCK;
    if (status == SIDE_OK)
        status = side_event_elapsed(begin, end, &seconds);
    if (status == SIDE_OK && seconds > 0)
        r->link_gbps = (double)bytes * PROBE_COPIES / 1e9 / seconds;
    return status;
}

/* Four copies from pinned memory. The rate is something to compare with, so where there is no memory for it the run goes on. */
int run_link_measure(struct run *r)
{
    const size_t bytes = r->props.simulated ? PROBE_BYTES_SIMULATED : PROBE_BYTES;
    side_pool *pool = NULL;
    side_stream *stream = NULL;
    side_event *begin = NULL, *end = NULL;
    void *host = NULL, *device = NULL;
    side_status status = side_device_pool(r->device, &pool);

    if (status == SIDE_OK)
        status = side_pool_alloc(pool, bytes, &host);
    if (status == SIDE_OK)
        status = side_device_alloc(r->device, bytes, &device);
    if (status == SIDE_OK)
        status = side_stream_create(r->device, &stream);
    if (status == SIDE_OK)
        status = side_event_create(r->device, true, &begin);
    if (status == SIDE_OK)
        status = side_event_create(r->device, true, &end);
    if (status == SIDE_OK)
        status = time_copies(r, stream, host, device, bytes, begin, end);
    if (status == SIDE_STUCK) /* a copy is in flight still: keep the memory */
        return say_status(status, "measuring the link");
    side_event_destroy(begin);
    side_event_destroy(end);
    side_stream_destroy(stream);
    if (device != NULL)
        side_device_free(r->device, device);
    if (host != NULL)
        side_pool_free(pool, host, NULL, 0);
    if (pool != NULL)
        side_pool_trim(pool);
    return EXIT_DONE;
}

/* ---------------------------------------------------------------- where the time went */

struct stage {
    const char *name;
    double busy; /* share of the time; NAN unknown */
};

enum { SOURCE, H2D, COMPUTE, D2H, SINK, STAGES };

static double share(double part, double whole)
{
    double value = whole > 0 ? part / whole : NAN;

    return value > 1 ? 1 : value;
}

static void find_stages(const struct run *r, struct stage stages[STAGES])
{
    const side_pipeline_stats *s = &r->stats;
    double threads = s->threads > 0 ? s->threads : 1, link = r->link_gbps * 1e9;

    stages[SOURCE] = (struct stage){"source", share(s->stage_busy_s, s->time_s * threads)};
    stages[SINK] = (struct stage){"sink", share(s->drain_busy_s, s->time_s * (r->checksum ? 1 : threads))};
    stages[COMPUTE] = (struct stage){"compute", NAN};
    stages[H2D] = (struct stage){"h2d", link > 0 ? share((double)s->bytes_in / link, s->time_s) : NAN};
    stages[D2H] = (struct stage){"d2h", link > 0 ? share((double)s->bytes_out / link, s->time_s) : NAN};
    if (r->props.simulated) /* threads work in real time, the device in the model's */
        stages[SOURCE].busy = stages[SINK].busy = NAN;
    if (r->span_count > 0) {
        stages[H2D].busy = share(r->account.h2d_busy_s, s->time_s);
        stages[COMPUTE].busy = share(r->account.compute_busy_s, s->time_s);
        stages[D2H].busy = share(r->account.d2h_busy_s, s->time_s);
    }
}

/* What the run waited for most; a wait for the device is one for the link where that was busy nearly all the time. */
static const char *find_bottleneck(const struct run *r, const struct stage stages[STAGES])
{
    const side_pipeline_stats *s = &r->stats;
    double link = fmax(isnan(stages[H2D].busy) ? 0 : stages[H2D].busy, isnan(stages[D2H].busy) ? 0 : stages[D2H].busy);

    if (s->items == 0)
        return "none";
    if (link >= 0.8)
        return "link";
    if (s->source_wait_s >= s->device_wait_s && s->source_wait_s >= s->sink_wait_s)
        return "source";
    if (s->sink_wait_s >= s->device_wait_s)
        return "sink";
    return isnan(stages[COMPUTE].busy) || stages[COMPUTE].busy >= link ? "compute" : "link";
}

/* ---------------------------------------------------------------- output */

static int draw(struct run *r)
{
    side_draw options = SIDE_DRAW_INIT;
    side_status status = SIDE_OK;
    char title[300];
    int code = EXIT_DONE;

    snprintf(title, sizeof(title), "%s %.200s", r->args.op, r->args.input);
    options.title = title;
    options.device = r->props.name;
    if (r->args.svg != NULL) {
        status = side_timeline_svg(r->spans, r->span_count, &options, output_write, &r->svg);
        if (status != SIDE_OK)
            return output_failed(&r->svg, status);
        code = output_commit(&r->svg);
    }
    if (r->args.trace != NULL && code == EXIT_DONE) {
        status = side_timeline_trace(r->spans, r->span_count, &options, output_write, &r->trace);
        if (status != SIDE_OK)
            return output_failed(&r->trace, status);
        code = output_commit(&r->trace);
    }
    return code;
}

static int print_object(const struct run *r, const struct stage stages[STAGES], const char *bottleneck)
{
    const side_pipeline_stats *s = &r->stats;
    json_t *list = json_array();
    double gbps = s->time_s > 0 ? (double)r->bytes / 1e9 / s->time_s : NAN;
    char hash[17];

    snprintf(hash, sizeof(hash), "%016llx", (unsigned long long)r->hash);
    for (size_t i = 0; i < STAGES; i++)
        json_array_append_new(list,
                              json_pack("{s:s, s:o}", "name", stages[i].name, "busy", json_number(stages[i].busy)));
    return print_json(json_pack("{s:s, s:s, s:s?, s:s, s:b, s:I, s:I, s:o, s:o, s:o, s:o, s:s, s:o, s:s?}", "op",
                                r->args.op, "input", r->args.input, "output", r->args.output, "device", r->props.spec,
                                "simulated", r->props.simulated, "bytes_in", (json_int_t)r->bytes, "bytes_out",
                                (json_int_t)(r->checksum ? 0 : s->bytes_out), "time_s", json_number(s->time_s), "gbps",
                                json_number(gbps), "link_gbps", json_number(r->link_gbps > 0 ? r->link_gbps : NAN),
                                "link_share", json_number(r->link_gbps > 0 ? gbps / r->link_gbps : NAN), "bottleneck",
                                bottleneck, "stages", list, "checksum", r->checksum ? hash : NULL));
}

static void print_summary(const struct run *r, const char *bottleneck)
{
    const side_pipeline_stats *s = &r->stats;
    double gbps = s->time_s > 0 ? (double)r->bytes / 1e9 / s->time_s : 0;
    char bytes[32];

    if (s->items == 0)
        return;
    fprintf(stderr, "%s in %.3f %s, %.2f GB/s", bytes_text(r->bytes, bytes), s->time_s * (s->time_s < 0.1 ? 1e3 : 1),
            s->time_s < 0.1 ? "ms" : "s", gbps);
    if (r->link_gbps > 0)
        fprintf(stderr, ", %.0f %% of the link (%.1f GB/s measured from pinned memory)", 100 * gbps / r->link_gbps,
                r->link_gbps);
    fprintf(stderr, "; bottleneck: %s%s%s\n", bottleneck,
            s->disabled ? "; SIDESTREAM_DISABLE is set: nothing overlaps" : "",
            r->props.simulated ? " (simulated)" : "");
}

int run_report(struct run *r)
{
    struct stage stages[STAGES];
    const char *bottleneck;
    int code = draw(r);

    if (code != EXIT_DONE)
        return code;
    find_stages(r, stages);
    bottleneck = find_bottleneck(r, stages);
    print_summary(r, bottleneck);
    if (r->args.common.json)
        return print_object(r, stages, bottleneck);
    if (r->checksum) /* as xxhsum -H3 prints it, and as xxhsum --check reads it */
        printf("XXH3 (%s) = %016llx\n", r->args.input, (unsigned long long)r->hash);
    return finish_stdout();
}
