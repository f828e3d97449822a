/* SPDX-License-Identifier: MIT
 * bench link: copies of all sizes both ways, what a small one waits for, and how the link runs meanwhile. */
#include "bench_copy.h"
#include "progress.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SIZES = 16,
    SMALL = 4 << 10,
    COPIES = 120
};                                             /* two lanes of them, their leads and events are held back together */
enum { LARGE = 256 << 20, LARGE_SAMPLES = 3 }; /* such copies vary little, and checking them takes long */
enum { LATENCIES = 4 };                        /* H2D, D2H; each alone and behind a large copy */

static const size_t window_bytes = 128 << 20, pageable_bytes = 32 << 20; /* of one sample, unless one copy is larger */
static const double look_s = 0.05,
                    look_most_s = 0.2; /* copies run for so long before the link is looked at, and meanwhile */

struct row {
    size_t bytes, copies, pageable_copies;
    struct bench_samples h2d, d2h;                          /* seconds a copy */
    struct bench_samples both, both_in, both_h2d, both_d2h; /* GB/s in total, H2D; seconds a copy */
    struct bench_samples pageable_h2d, pageable_d2h;        /* seconds a copy */
};

struct latency {
    struct bench_samples device, host; /* seconds */
};

struct link {
    struct bench *bench;
    struct bench_arena arena;
    struct row rows[SIZES];
    size_t row_count;
    side_rate h2d, d2h, pageable_h2d, pageable_d2h;
    double both_gbps, both_h2d_gbps;
    struct latency latency[LATENCIES];
    size_t large_bytes; /* of the copy that a small one comes behind */
    side_event *started, *done;
    side_copy_kind kind; /* of the latency under way */
    bool behind;
    side_link in_use; /* as it ran under load */
    uint64_t steps;
};

/* ---------------------------------------------------------------- what is measured */

/* The largest power of two that the room allows, five arenas that is; 0: too little for anything. */
static size_t arena_bytes(const struct bench *b, size_t wanted)
{
    while (wanted > bench_host_room(b) / 3 || wanted > bench_device_room(b) / 2)
        wanted /= 2;
    return wanted >= 64 * SMALL ? wanted : 0;
}

static size_t at_least(size_t value, size_t least)
{
    return value > least ? value : least;
}

static int make_rows(struct link *l)
{
    struct bench *b = l->bench;
    const size_t step = b->args.quick ? 8 : 4;
    const size_t most = b->props.simulated ? (b->args.quick ? 2u << 20 : 16u << 20)
                                           : (b->args.quick ? 128u << 20 : 1u << 30);
    size_t wanted = b->props.simulated ? most : at_least(most, 512u << 20), bytes;
    char text[32];
    side_status status;

    bytes = arena_bytes(b, wanted);
    if (bytes == 0) {
        say("link needs %s of host and of device memory; --share=%llu leaves less", bytes_text(3 * 64 * SMALL, text),
            (unsigned long long)b->args.share);
        return EXIT_MEMORY;
    }
    for (size_t n = SMALL; n <= most && n <= bytes; n *= step) {
        struct row *row = &l->rows[l->row_count++];
        size_t window = bytes < window_bytes ? bytes : window_bytes;

        row->bytes = n;
        row->copies = n < window / COPIES ? COPIES : at_least(window / n, 1);
        row->pageable_copies = at_least(row->copies * n > pageable_bytes ? pageable_bytes / n : row->copies, 1);
    }
    l->large_bytes = l->rows[l->row_count - 1].bytes;
    if (bytes < most)
        bench_print(b, "\nWithin --share=%llu copies of at most %s fit.\n", (unsigned long long)b->args.share,
                    bytes_text(l->large_bytes, text));
    status = bench_arena_make(b, bytes, &l->arena);
    if (status == SIDE_OK)
        status = side_event_create(b->device, false, &l->started);
    if (status == SIDE_OK)
        status = side_event_create(b->device, false, &l->done);
    return status == SIDE_OK ? EXIT_DONE : bench_failed(b, status, "memory to copy from and to");
}

static size_t samples_of(const struct link *l, const struct row *row)
{
    const size_t n = l->bench->samples;

    return row->bytes >= LARGE && l->bench->args.samples == 0 && n > LARGE_SAMPLES ? LARGE_SAMPLES : n;
}

static void keep(struct row *row, enum bench_way way, const struct bench_copied *copied)
{
    switch (way) {
    case BENCH_H2D: bench_add(&row->h2d, copied->h2d_s); break;
    case BENCH_D2H: bench_add(&row->d2h, copied->d2h_s); break;
    case BENCH_BOTH:
        bench_add(&row->both, copied->both_gbps);
        bench_add(&row->both_in, copied->both_h2d_gbps);
        bench_add(&row->both_h2d, copied->h2d_s);
        bench_add(&row->both_d2h, copied->d2h_s);
        break;
    case BENCH_PAGEABLE_H2D: bench_add(&row->pageable_h2d, copied->h2d_s); break;
    default: bench_add(&row->pageable_d2h, copied->d2h_s); break;
    }
}

/* Way by way, and in each the sizes take turns, so that a drift meets all of them. */
static side_status measure_way(struct link *l, enum bench_way way)
{
    side_status status = SIDE_OK;

    for (size_t sample = 0; sample < l->bench->samples && status == SIDE_OK; sample++) {
        for (size_t i = 0; i < l->row_count && status == SIDE_OK; i++) {
            struct row *row = &l->rows[i];
            struct bench_copied alone = {0}, copied;

            if (sample >= samples_of(l, row))
                continue;
            if (way == BENCH_BOTH)
                alone = (struct bench_copied){bench_median(&row->h2d), bench_median(&row->d2h), 0, 0};
            status = bench_arena_sample(&l->arena, way, row->bytes,
                                        way < BENCH_PAGEABLE_H2D ? row->copies : row->pageable_copies, &alone, &copied);
            if (status == SIDE_OK)
                keep(row, way, &copied);
            progress_update(++l->steps);
        }
    }
    return status;
}

/* ---------------------------------------------------------------- a small copy, alone and behind a large one */

static side_status copy(const struct link *l, side_stream *stream, size_t bytes)
{
    const struct bench_arena *a = &l->arena;

    if (l->kind == SIDE_COPY_H2D)
        return side_copy_async(stream, SIDE_COPY_H2D, a->in, a->src, bytes);
    return side_copy_async(stream, SIDE_COPY_D2H, a->dst, a->out, bytes);
}

static side_status queue_lead(void *user, side_stream *stream)
{
    return copy(user, stream, SMALL);
}

/* The large copy begins at this event, which is the lane's begin event too ... */
static side_status queue_large(void *user, side_stream *stream)
{
    const struct link *l = user;
    side_status status = side_event_record(l->started, stream);

    return status == SIDE_OK ? copy(l, stream, l->large_bytes) : status;
}

/* ... and the small one is queued behind it. */
static side_status queue_small(void *user, side_stream *stream)
{
    const struct link *l = user;
    side_status status = l->behind ? side_stream_wait(stream, l->started) : SIDE_OK;

    return status == SIDE_OK ? copy(l, stream, SMALL) : status;
}

static side_status latency_device(struct link *l, struct latency *latency)
{
    struct bench_lane lanes[2] = {{l->arena.up, queue_lead, queue_large, l, 0, 0},
                                  {l->arena.down, NULL, queue_small, l, 0, 0}};
    side_status status = bench_time(l->bench, l->behind ? lanes : &lanes[1], l->behind ? 2 : 1);

    if (status == SIDE_OK)
        bench_add(&latency->device, lanes[1].end_s - (l->behind ? lanes[0].begin_s : lanes[1].begin_s));
    return status;
}

static side_status latency_host(struct link *l, struct latency *latency)
{
    side_stream *stream = l->arena.down;
    side_status status = SIDE_OK, synced;
    uint64_t began;

    if (l->behind) {
        status = copy(l, l->arena.up, SMALL);
        if (status == SIDE_OK)
            status = queue_large(l, l->arena.up);
        if (status == SIDE_OK)
            status = side_event_wait(l->started, l->bench->timeout_s);
    }
    began = side_device_now_ns(l->bench->device);
    if (status == SIDE_OK)
        status = copy(l, stream, SMALL);
    if (status == SIDE_OK)
        status = side_event_record(l->done, stream);
    if (status == SIDE_OK)
        status = side_event_wait(l->done, l->bench->timeout_s);
    if (status == SIDE_OK)
        bench_add(&latency->host, (double)(side_device_now_ns(l->bench->device) - began) / 1e9);
    synced = bench_sync(l->bench, stream);
    status = status == SIDE_OK ? synced : status;
    synced = bench_sync(l->bench, l->arena.up);
    return status == SIDE_OK ? synced : status;
}

static side_status measure_latency(struct link *l)
{
    side_status status = SIDE_OK;

    for (size_t sample = 0; sample < l->bench->samples && status == SIDE_OK; sample++) {
        for (size_t i = 0; i < LATENCIES && status == SIDE_OK; i++) {
            l->kind = i / 2 == 0 ? SIDE_COPY_H2D : SIDE_COPY_D2H;
            l->behind = i % 2 == 1;
            status = latency_device(l, &l->latency[i]);
            if (status == SIDE_OK)
                status = latency_host(l, &l->latency[i]);
        }
    }
    return status;
}

/* ---------------------------------------------------------------- the link under load */

/* Idle links may run slower until used; so look while copies run, and let them run for as long as looking takes. */
static side_status look_at_link(struct link *l)
{
    const double copy_s = bench_median(&l->rows[l->row_count - 1].h2d), began = clock_s();
    side_status status = side_device_get_link(l->bench->device, &l->in_use), synced;
    const double takes_s = clock_s() - began < look_most_s ? clock_s() - began : look_most_s;
    const size_t before = l->bench->props.simulated ? 1 : (size_t)(look_s / copy_s) + 1;
    const size_t meanwhile = l->bench->props.simulated ? 1 : (size_t)(2 * takes_s / copy_s) + 2;

    l->kind = SIDE_COPY_H2D;
    for (size_t i = 0; i < before + meanwhile && status == SIDE_OK && bench_check(l->bench) == SIDE_OK; i++) {
        status = copy(l, l->arena.up, l->large_bytes);
        if (status == SIDE_OK && i + 1 == before)
            status = side_event_record(l->started, l->arena.up);
    }
    if (status == SIDE_OK)
        status = side_event_wait(l->started, l->bench->timeout_s);
    if (status == SIDE_OK)
        status = side_device_get_link(l->bench->device, &l->in_use);
    synced = bench_sync(l->bench, l->arena.up);
    return status == SIDE_OK ? synced : status;
}

/* ---------------------------------------------------------------- what follows */

static double gbps(const struct row *row, const struct bench_samples *seconds)
{
    return (double)row->bytes / bench_median(seconds) / 1e9;
}

static bool fit(const struct link *l, size_t member, side_rate *rate)
{
    double bytes[SIZES], seconds[SIZES];

    for (size_t i = 0; i < l->row_count; i++) {
        bytes[i] = (double)l->rows[i].bytes;
        seconds[i] = bench_median((const struct bench_samples *)((const char *)&l->rows[i] + member));
    }
    return bench_fit(bytes, seconds, l->row_count, rate);
}

/* What of both directions' rates alone is left together, and H2D's part of that: of the larger half of the sizes, where the link is what limits. */
static double both_share(const struct link *l, double *in_part)
{
    struct bench_samples shares = {.count = 0}, parts = {.count = 0};

    for (size_t i = l->row_count / 2; i < l->row_count; i++) {
        const struct row *row = &l->rows[i];

        bench_add(&shares, bench_median(&row->both) / (gbps(row, &row->h2d) + gbps(row, &row->d2h)));
        bench_add(&parts, bench_median(&row->both_in) / bench_median(&row->both));
    }
    *in_part = bench_median(&parts);
    return bench_median(&shares);
}

static int conclude(struct link *l)
{
    side_machine *m = &l->bench->machine;
    double in_part;

    if (!fit(l, offsetof(struct row, h2d), &l->h2d) || !fit(l, offsetof(struct row, d2h), &l->d2h) ||
        !fit(l, offsetof(struct row, pageable_h2d), &l->pageable_h2d) ||
        !fit(l, offsetof(struct row, pageable_d2h), &l->pageable_d2h)) {
        bench_error(l->bench, EXIT_MEASURING, "measuring error: larger copies do not take longer; run it again");
        return EXIT_DONE;
    }
    l->both_gbps = both_share(l, &in_part) * (l->h2d.gbps + l->d2h.gbps);
    l->both_h2d_gbps = in_part * l->both_gbps;
    m->h2d = l->h2d;
    m->d2h = l->d2h;
    m->pageable_h2d = l->pageable_h2d;
    m->pageable_d2h = l->pageable_d2h;
    m->both_gbps = l->both_gbps;
    m->both_h2d_gbps = l->both_h2d_gbps;
    return EXIT_DONE;
}

/* ---------------------------------------------------------------- report */

/* "55.3  88%  0.1%": rate, share of the theoretical one, spread */
static void print_rate(const struct link *l, const struct row *row, const struct bench_samples *seconds)
{
    const double rate = gbps(row, seconds), most = l->bench->link.peak_gbps;
    char text[16], share[16] = "-";

    if (most > 0)
        snprintf(share, sizeof(share), "%.0f%%", 100 * rate / most);
    bench_print(l->bench, "%8s %5s %6.1f%%", bench_gbps_text(rate, text), share, 100 * bench_spread(seconds));
}

static void print_rows(const struct link *l)
{
    const struct bench *b = l->bench;
    char text[32], most[16];

    bench_print(b, "\nlink: GB/s of copies, one after the other");
    if (b->link.peak_gbps > 0)
        bench_print(b, "; share of the %s GB/s that the link can do in theory",
                    bench_gbps_text(b->link.peak_gbps, most));
    bench_print(b, "; spread is (most - least) / median\n");
    bench_print(b, "%-9s %8s %5s %7s %8s %5s %7s %8s %12s %8s\n", "pinned", "H2D", "share", "spread", "D2H", "share",
                "spread", "both", "pageable H2D", "D2H");
    for (size_t i = 0; i < l->row_count; i++) {
        const struct row *row = &l->rows[i];

        bench_print(b, "%-9s ", bytes_text(row->bytes, text));
        print_rate(l, row, &row->h2d);
        bench_print(b, " ");
        print_rate(l, row, &row->d2h);
        bench_print(b, " %8s", bench_gbps_text(bench_median(&row->both), text));
        bench_print(b, " %12s", bench_gbps_text(gbps(row, &row->pageable_h2d), text));
        bench_print(b, " %8s\n", bench_gbps_text(gbps(row, &row->pageable_d2h), text));
    }
}

static void print_fit(const struct link *l, const char *name, const side_rate *rate)
{
    char latency[16], text[16];

    bench_print(l->bench, "%-12s %s a copy, and its bytes at %s GB/s\n", name,
                bench_seconds_text(rate->latency_s, latency), bench_gbps_text(rate->gbps, text));
}

static void print_latency(const struct link *l)
{
    static const char *const names[LATENCIES] = {"H2D, alone", "H2D, behind", "D2H, alone", "D2H, behind"};
    char large[32], device[16], host[16];

    bench_print(l->bench, "A copy of 4 KiB, alone and behind one of %s on another stream:\n",
                bytes_text(l->large_bytes, large));
    for (size_t i = 0; i < LATENCIES; i++)
        bench_print(l->bench, "%-12s %s on the device, %s until the host knows\n", names[i],
                    bench_seconds_text(bench_median(&l->latency[i].device), device),
                    bench_seconds_text(bench_median(&l->latency[i].host), host));
}

static bool link_is_less(const side_link *link)
{
    return (link->generation > 0 && link->generation < link->max_generation) ||
           (link->width > 0 && link->width < link->max_width);
}

static void print_link(const struct link *l)
{
    const side_link *u = &l->in_use;
    const size_t cache = l->bench->cache_bytes;
    char text[32], arena[32];

    if (link_is_less(u))
        bench_print(l->bench,
                    "The link is slower than it could be: %s gen %d x%d while copies ran, and card and slot can do gen "
                    "%d x%d.\n"
                    "Look at the slot, a riser, or the BIOS.\n",
                    u->kind, u->generation, u->width, u->max_generation, u->max_width);
    if (!l->bench->props.simulated && cache > 0)
        bench_print(l->bench, "Buffers went round in %s of memory, %s than the %s of the CPU's cache.\n",
                    bytes_text(l->arena.bytes, arena), l->arena.bytes > cache ? "more" : "less",
                    bytes_text(cache, text));
}

static json_t *rate_json(const side_rate *rate)
{
    return json_pack("{s:o, s:o}", "latency_s", json_number(rate->latency_s), "gbps", json_number(rate->gbps));
}

static json_t *row_json(const struct row *row)
{
    return json_pack("{s:I, s:i, s:i, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "bytes",
                     (json_int_t)row->bytes, "copies", (int)row->copies, "pageable_copies", (int)row->pageable_copies,
                     "h2d_gbps", json_number(gbps(row, &row->h2d)), "d2h_gbps", json_number(gbps(row, &row->d2h)),
                     "both_gbps", bench_samples_json(&row->both), "pageable_h2d_gbps",
                     json_number(gbps(row, &row->pageable_h2d)), "pageable_d2h_gbps",
                     json_number(gbps(row, &row->pageable_d2h)), "h2d_s", bench_samples_json(&row->h2d), "d2h_s",
                     bench_samples_json(&row->d2h), "both_h2d_s", bench_samples_json(&row->both_h2d), "both_d2h_s",
                     bench_samples_json(&row->both_d2h), "pageable_h2d_s", bench_samples_json(&row->pageable_h2d),
                     "pageable_d2h_s", bench_samples_json(&row->pageable_d2h));
}

static json_t *to_json(const struct link *l)
{
    static const char *const names[LATENCIES] = {"h2d_alone", "h2d_behind", "d2h_alone", "d2h_behind"};
    json_t *rows = json_array(), *latency = json_object();

    for (size_t i = 0; i < l->row_count; i++)
        json_array_append_new(rows, row_json(&l->rows[i]));
    json_object_set_new(latency, "bytes", json_integer(SMALL));
    json_object_set_new(latency, "behind_bytes", json_integer((json_int_t)l->large_bytes));
    for (size_t i = 0; i < LATENCIES; i++)
        json_object_set_new(latency, names[i],
                            json_pack("{s:o, s:o}", "device_s", bench_samples_json(&l->latency[i].device), "host_s",
                                      bench_samples_json(&l->latency[i].host)));
    return json_pack("{s:o, s:{s:o, s:o, s:o, s:o, s:o, s:o}, s:o, s:{s:s, s:i, s:i, s:b}, s:I, s:I}", "rows", rows,
                     "fit", "h2d", rate_json(&l->h2d), "d2h", rate_json(&l->d2h), "pageable_h2d",
                     rate_json(&l->pageable_h2d), "pageable_d2h", rate_json(&l->pageable_d2h), "both_gbps",
                     json_number(l->both_gbps), "both_h2d_gbps", json_number(l->both_h2d_gbps), "latency", latency,
                     "link_in_use", "kind", l->in_use.kind, "generation", l->in_use.generation, "width",
                     l->in_use.width, "slower_than_possible", link_is_less(&l->in_use), "arena_bytes",
                     (json_int_t)l->arena.bytes, "cache_bytes", (json_int_t)l->bench->cache_bytes);
}

static void report(struct link *l)
{
    char text[16], in[16];

    print_rows(l);
    print_fit(l, "H2D", &l->h2d);
    print_fit(l, "D2H", &l->d2h);
    print_fit(l, "pageable H2D", &l->pageable_h2d);
    print_fit(l, "pageable D2H", &l->pageable_d2h);
    bench_print(l->bench, "%-12s %s GB/s together, %s of it H2D\n", "H2D and D2H", bench_gbps_text(l->both_gbps, text),
                bench_gbps_text(l->both_h2d_gbps, in));
    print_latency(l);
    print_link(l);
    bench_json(l->bench, "link", to_json(l));
}

static int measure(struct link *l)
{
    size_t steps = 0;
    side_status status = SIDE_OK;

    for (size_t i = 0; i < l->row_count; i++)
        steps += BENCH_WAYS * samples_of(l, &l->rows[i]);
    progress_begin("link", steps, 0);
    for (int way = 0; way < BENCH_WAYS && status == SIDE_OK; way++)
        status = measure_way(l, (enum bench_way)way);
    if (status == SIDE_OK)
        status = measure_latency(l);
    if (status == SIDE_OK)
        status = look_at_link(l);
    progress_end();
    return status == SIDE_OK ? EXIT_DONE : bench_failed(l->bench, status, "link");
}

int bench_link(struct bench *b)
{
    struct link *l = calloc(1, sizeof(*l));
    int code;

    if (l == NULL) {
        say("out of host memory");
        return EXIT_MEMORY;
    }
    l->bench = l->arena.bench = b;
    code = make_rows(l);
    if (code == EXIT_DONE)
        code = measure(l);
    if (code == EXIT_DONE)
        code = conclude(l);
    if (code == EXIT_DONE)
        report(l);
    bench_arena_free(&l->arena);
    if (!b->stuck) {
        side_event_destroy(l->started);
        side_event_destroy(l->done);
    }
    free(l);
    return code;
}
