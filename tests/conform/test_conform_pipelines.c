/* SPDX-License-Identifier: MIT
 *
 * Every device: pipelines of each kind of source and sink give what a plain loop gives; cancelling; the op log. */
#include "conform.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

enum { ITEMS = T_TSAN ? 9 : 17, ITEM_BYTES = 600 * 1024, CUTS = 5 };

enum source_kind { PINNED, PAGEABLE, MIXED, PIECES, CALLBACK, FROM_FILE, SOURCES };
enum sink_kind { TO_PINNED, TO_PAGEABLE, TO_CALLBACK, TO_FILE, SINKS };

static const char *const source_names[] = {"pinned", "pageable", "mixed", "pieces", "callback", "file"};
static const char *const sink_names[] = {"pinned", "pageable", "callback", "file"};

/* Inputs, outputs, and what must come out: items lie one behind the other in each. */
struct data {
    struct rig rig;
    float *in_pageable, *in_pinned, *out_pageable, *out_pinned, *expected;
    size_t at[ITEMS + 1]; /* bytes */
    side_block blocks[ITEMS * CUTS], results[ITEMS];
    uint32_t pieces[ITEMS];
    int in_file, out_file;
    uint64_t spin_ns;
};

static size_t item_bytes(const struct data *d, uint64_t i)
{
    return d->at[i + 1] - d->at[i];
}

/* The plain loop: one stream, in order, pageable memory. */
static void plain_loop(struct data *d)
{
    float *in = device_make(d->rig.device, ITEM_BYTES), *out = device_make(d->rig.device, ITEM_BYTES);

    for (size_t i = 0; i < ITEMS; i++) {
        T_OK(side_copy_async(d->rig.stream, SIDE_COPY_H2D, in, (char *)d->in_pageable + d->at[i], item_bytes(d, i)));
        affine_async(d->rig.stream, out, in, item_bytes(d, i), 1.7f, -0.3f);
        T_OK(side_copy_async(d->rig.stream, SIDE_COPY_D2H, (char *)d->expected + d->at[i], out, item_bytes(d, i)));
        sync_stream(d->rig.stream);
    }
    side_device_free(d->rig.device, in);
    side_device_free(d->rig.device, out);
}

static void data_make(struct data *d)
{
    char path[4200];

    memset(d, 0, sizeof(*d));
    d->rig = rig_open();
    for (size_t i = 0; i < ITEMS; i++) /* files have items of one size, but for the last; so have all here */
        d->at[i + 1] = d->at[i] + (i == ITEMS - 1 ? 100 * KIB + 12 : ITEM_BYTES);
    const size_t bytes = d->at[ITEMS];
    d->in_pageable = host_make(bytes);
    d->out_pageable = host_make(bytes);
    d->expected = host_make(bytes);
    d->in_pinned = pinned_make(d->rig.device, bytes);
    d->out_pinned = pinned_make(d->rig.device, bytes);
    fill_floats(d->in_pageable, bytes / sizeof(float), 77);
    memcpy(d->in_pinned, d->in_pageable, bytes);
    snprintf(path, sizeof(path), "%s/in", t_tmpdir());
    d->in_file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    assert_true(d->in_file >= 0);
    assert_int_equal(pwrite(d->in_file, d->in_pageable, bytes, 100), bytes);
    snprintf(path, sizeof(path), "%s/out", t_tmpdir());
    d->out_file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    assert_true(d->out_file >= 0);
    plain_loop(d);
}

static void data_free(struct data *d)
{
    free(d->in_pageable);
    free(d->out_pageable);
    free(d->expected);
    pinned_free(d->rig.device, d->in_pinned);
    pinned_free(d->rig.device, d->out_pinned);
    close(d->in_file);
    close(d->out_file);
    rig_close(&d->rig);
}

static int give(void *user, uint64_t item, void *data, size_t capacity, size_t *bytes)
{
    const struct data *d = user;

    if (item >= ITEMS) {
        *bytes = SIDE_NO_MORE;
        return 0;
    }
    if (capacity < item_bytes(d, item))
        return 1;
    memcpy(data, (char *)d->in_pageable + d->at[item], item_bytes(d, item));
    *bytes = item_bytes(d, item);
    return 0;
}

static int get(void *user, uint64_t item, const void *data, size_t bytes)
{
    struct data *d = user;

    if (item >= ITEMS || bytes != item_bytes(d, item))
        return 2;
    memcpy((char *)d->out_pageable + d->at[item], data, bytes);
    return 0;
}

static side_source source_make(struct data *d, enum source_kind kind)
{
    uint64_t n = 0;

    if (kind == CALLBACK)
        return side_source_callback(give, d);
    if (kind == FROM_FILE)
        return side_source_file(d->in_file, 100, d->at[ITEMS]);
    for (size_t i = 0; i < ITEMS; i++) {
        char *from = (char *)(kind == PAGEABLE || (kind == MIXED && i % 3 == 0) ? d->in_pageable : d->in_pinned);
        if (kind != PIECES) {
            d->blocks[n++] = (side_block){from + d->at[i], item_bytes(d, i)};
            continue;
        }
        d->pieces[i] = 1 + (uint32_t)i % CUTS;
        for (uint32_t k = 0; k < d->pieces[i]; k++) { /* uneven, some pageable, one of each large item over 256 KiB */
            const size_t begin = item_bytes(d, i) * k * k / (d->pieces[i] * d->pieces[i]) / 4 * 4;
            const size_t end = item_bytes(d, i) * (k + 1) * (k + 1) / (d->pieces[i] * d->pieces[i]) / 4 * 4;
            char *of = (char *)((i + k) % 4 == 3 ? d->in_pageable : d->in_pinned);
            d->blocks[n++] = (side_block){of + d->at[i] + begin, end - begin};
        }
    }
    return kind == PIECES ? side_source_items(d->blocks, d->pieces, ITEMS) : side_source_blocks(d->blocks, ITEMS);
}

static side_sink sink_make(struct data *d, enum sink_kind kind)
{
    if (kind == TO_CALLBACK)
        return side_sink_callback(get, d);
    if (kind == TO_FILE)
        return side_sink_file(d->out_file, 50);
    for (size_t i = 0; i < ITEMS; i++)
        d->results[i] = (side_block){(char *)(kind == TO_PINNED ? d->out_pinned : d->out_pageable) + d->at[i],
                                     item_bytes(d, i)};
    return side_sink_blocks(d->results, ITEMS);
}

static int affine(void *user, side_stream *stream, side_item *item)
{
    const struct data *d = user;
    side_op op = affine_op(item->result, item->data, item->bytes, 1.7f, -0.3f);

    item->result_bytes = item->bytes;
    if (d->spin_ns != 0)
        spin_async(stream, d->spin_ns);
    return side_op_async(stream, &op) == SIDE_OK ? 0 : 1;
}

static void outputs_clear(struct data *d)
{
    memset(d->out_pageable, 0, d->at[ITEMS]);
    memset(d->out_pinned, 0, d->at[ITEMS]);
    assert_int_equal(ftruncate(d->out_file, 0), 0);
}

static void outputs_check(struct data *d, enum sink_kind kind, const char *what)
{
    const size_t bytes = d->at[ITEMS];

    if (kind == TO_FILE)
        assert_int_equal(pread(d->out_file, d->out_pageable, bytes, 50), bytes);
    check_equal(kind == TO_PINNED ? d->out_pinned : d->out_pageable, d->expected, bytes, what);
}

static side_pipeline_options options_make(struct data *d, enum source_kind source, enum sink_kind sink)
{
    side_pipeline_options o = SIDE_PIPELINE_OPTIONS_INIT;

    o.item_bytes = o.result_bytes = ITEM_BYTES;
    o.source = source_make(d, source);
    o.sink = sink_make(d, sink);
    o.compute = affine;
    o.compute_user = d;
    o.threads = 3;
    return o;
}

/* Two passes over every pair of ends; shapes vary with the pair. */
T_TEST(pipelines_give_what_a_plain_loop_gives)
{
    struct data d;

    data_make(&d);
    for (int source = 0; source < SOURCES; source++) {
        for (int sink = 0; sink < SINKS; sink++) {
            side_pipeline_options o = options_make(&d, (enum source_kind)source, (enum sink_kind)sink);
            side_pipeline_stats stats;
            side_pipeline *p = NULL;
            char what[64];

            snprintf(what, sizeof(what), "%s -> %s", source_names[source], sink_names[sink]);
            o.depth = 1 + (uint32_t)(source + sink) % 4;
            o.streams = 1 + (uint32_t)sink % 3;
            o.chunk_bytes = source % 2 == 0 ? 0 : 200 * KIB + 4;
            d.spin_ns = sink % 2 == 0 ? 0 : 30000;
            T_OK(side_pipeline_create(d.rig.device, &o, &p));
            for (int pass = 0; pass < 2; pass++) {
                outputs_clear(&d);
                side_status s = side_pipeline_run(p, &stats);
                if (s != SIDE_OK)
                    T_FAIL("%s: %s: %s", what, side_status_name(s), side_last_error()->message);
                outputs_check(&d, (enum sink_kind)sink, what);
                assert_int_equal(stats.items, ITEMS);
                assert_int_equal(stats.bytes_in, d.at[ITEMS]);
                assert_int_equal(stats.bytes_out, d.at[ITEMS]);
                assert_true(stats.time_s > 0);
            }
            T_OK(side_pipeline_destroy(p));
        }
    }
    data_free(&d);
}

/* No results: the compute stage keeps them on the device. */
static int keep(void *user, side_stream *stream, side_item *item)
{
    float *kept = ((void **)user)[0];
    side_op op = affine_op((char *)kept + item->number * ITEM_BYTES, item->data, item->bytes, 1.7f, -0.3f);

    return side_op_async(stream, &op) == SIDE_OK ? 0 : 1;
}

T_TEST(pipelines_without_results)
{
    struct data d;

    data_make(&d);
    float *kept = device_make(d.rig.device, ITEMS * (size_t)ITEM_BYTES);
    void *user[1] = {kept};
    for (int source = 0; source < SOURCES; source++) {
        side_pipeline_options o = options_make(&d, (enum source_kind)source, TO_PINNED);
        side_pipeline *p = NULL;
        o.result_bytes = 0;
        o.sink = (side_sink){0};
        o.compute = keep;
        o.compute_user = user;
        T_OK(side_memset_async(d.rig.stream, kept, 0, ITEMS * (size_t)ITEM_BYTES));
        sync_stream(d.rig.stream);
        T_OK(side_pipeline_create(d.rig.device, &o, &p));
        T_OK(side_pipeline_run(p, NULL));
        T_OK(side_pipeline_destroy(p));
        T_OK(side_copy_async(d.rig.stream, SIDE_COPY_D2H, d.out_pinned, kept, d.at[ITEMS]));
        sync_stream(d.rig.stream);
        check_equal(d.out_pinned, d.expected, d.at[ITEMS], source_names[source]);
    }
    side_device_free(d.rig.device, kept);
    data_free(&d);
}

/* The caller's loop and the caller's streams. */
T_TEST(pulling_gives_the_same)
{
    struct data d;

    data_make(&d);
    for (int source = 0; source < SOURCES; source++) {
        for (int sink = 0; sink < SINKS; sink++) {
            side_pipeline_options o = options_make(&d, (enum source_kind)source, (enum sink_kind)sink);
            side_stream *streams[2] = {d.rig.stream, stream_make(d.rig.device)};
            side_pipeline *p = NULL;
            side_item item;
            side_status s;

            o.compute = NULL;
            o.depth = 3;
            outputs_clear(&d);
            T_OK(side_pipeline_create(d.rig.device, &o, &p));
            for (int i = 0; (s = side_pipeline_next(p, streams[i % 2], &item)) == SIDE_OK; i++) {
                assert_int_equal(item.number, i);
                assert_int_equal(affine(&d, streams[i % 2], &item), 0);
                T_OK(side_pipeline_done(p, &item, streams[i % 2]));
            }
            T_STATUS(s, SIDE_END);
            outputs_check(&d, (enum sink_kind)sink, source_names[source]);
            T_OK(side_pipeline_destroy(p));
            side_stream_destroy(streams[1]);
        }
    }
    data_free(&d);
}

/* A pass that is left in the middle: copies ahead of the loop are dropped, the next pass begins with item 0. */
T_TEST(a_pass_left_in_the_middle_rewinds)
{
    struct data d;

    data_make(&d);
    for (int source = 0; source < SOURCES; source++) {
        const enum sink_kind sink = (enum sink_kind)(source % SINKS);
        side_pipeline_options o = options_make(&d, (enum source_kind)source, sink);
        side_pipeline *p = NULL;
        side_item item;

        o.compute = NULL;
        o.depth = 3;
        T_OK(side_pipeline_create(d.rig.device, &o, &p));
        for (int pass = 0; pass < 3; pass++) {
            for (int i = 0; i < 5; i++) {
                T_OK(side_pipeline_next(p, d.rig.stream, &item));
                assert_int_equal(item.number, i);
                assert_int_equal(affine(&d, d.rig.stream, &item), 0);
                T_OK(side_pipeline_done(p, &item, d.rig.stream));
            }
            T_OK(side_pipeline_rewind(p));
        }
        T_OK(side_pipeline_next(p, d.rig.stream, &item));
        assert_int_equal(item.number, 0);
        T_OK(side_pipeline_done(p, &item, d.rig.stream));
        T_OK(side_pipeline_destroy(p)); /* as good as a rewind */
    }
    data_free(&d);
}

/* SIDESTREAM_DISABLE: the same results. */
T_TEST(disabled_pipelines_give_the_same)
{
    struct data d;

    setenv("SIDESTREAM_DISABLE", "1", 1);
    data_make(&d);
    for (int source = 0; source < SOURCES; source++) {
        const enum sink_kind sink = (enum sink_kind)(source % SINKS);
        side_pipeline_options o = options_make(&d, (enum source_kind)source, sink);
        side_pipeline_stats stats;
        side_pipeline *p = NULL;
        outputs_clear(&d);
        T_OK(side_pipeline_create(d.rig.device, &o, &p));
        T_OK(side_pipeline_run(p, &stats));
        assert_true(stats.disabled);
        T_OK(side_pipeline_destroy(p));
        outputs_check(&d, sink, source_names[source]);
    }
    data_free(&d);
}

/* ---------------------------------------------------------------- ending early */

static int endless(void *user, uint64_t item, void *data, size_t capacity, size_t *bytes)
{
    (void)item;
    memset(data, 1, capacity);
    atomic_fetch_add((atomic_int *)user, 1);
    *bytes = capacity;
    return 0;
}

static int slow(void *user, side_stream *stream, side_item *item)
{
    (void)user;
    spin_async(stream, MS);
    if (item->result != NULL)
        affine_async(stream, item->result, item->data, item->bytes, 1, 0);
    return 0;
}

struct canceller {
    side_pipeline *pipeline;
    atomic_int given;
};

static void *cancel_later(void *arg)
{
    struct canceller *c = arg;

    while (atomic_load(&c->given) < 12)
        sleep_ms(1);
    side_pipeline_cancel(c->pipeline);
    return NULL;
}

static int drop(void *user, uint64_t item, const void *data, size_t bytes)
{
    (void)item;
    (void)bytes;
    return *(const unsigned char *)data == 1 ? 0 : *(int *)user;
}

T_TEST(a_cancelled_run_drains)
{
    struct rig r = rig_open();
    side_pipeline_options o = SIDE_PIPELINE_OPTIONS_INIT;
    struct canceller c = {NULL, 0};
    side_pipeline_stats stats;
    pthread_t thread;
    int bad = 9;

    o.item_bytes = o.result_bytes = 256 * KIB;
    o.source = side_source_callback(endless, &c.given);
    o.sink = side_sink_callback(drop, &bad);
    o.compute = slow;
    T_OK(side_pipeline_create(r.device, &o, &c.pipeline));
    assert_int_equal(pthread_create(&thread, NULL, cancel_later, &c), 0);
    T_STATUS(side_pipeline_run(c.pipeline, &stats), SIDE_CANCELLED);
    pthread_join(thread, NULL);
    assert_true(stats.items > 0);
    T_OK(side_pipeline_destroy(c.pipeline));
    spin_async(r.stream, 1000); /* the device is as good as before */
    rig_close(&r);
}

/* A device that takes longer than the time-out: STUCK says so, and nothing was freed under the copies. */
static int very_slow(void *user, side_stream *stream, side_item *item)
{
    (void)user;
    (void)item;
    spin_async(stream, 1500 * MS);
    return 0;
}

T_TEST(a_device_that_does_not_finish_is_told)
{
    struct rig r = rig_open();
    side_pipeline_options o = SIDE_PIPELINE_OPTIONS_INIT;
    side_pipeline *p = NULL;
    unsigned char *data = pinned_make(r.device, 64 * KIB);
    side_block blocks[8];

    for (int i = 0; i < 8; i++)
        blocks[i] = (side_block){data, 64 * KIB};
    o.item_bytes = 64 * KIB;
    o.source = side_source_blocks(blocks, 8);
    o.compute = very_slow;
    o.timeout_s = 0.1;
    o.compute_streams = &r.stream;
    o.streams = 1;
    T_OK(side_pipeline_create(r.device, &o, &p));
    T_STATUS(side_pipeline_run(p, NULL), SIDE_STUCK);
    T_STATUS(side_pipeline_destroy(p), SIDE_STUCK); /* kept: leaked on purpose */
    sync_stream(r.stream);
    fflush(NULL);
    _exit(0); /* not by return: the leak is meant */
}

static int fails_at(void *user, side_stream *stream, side_item *item)
{
    slow(NULL, stream, item);
    return item->number == *(uint64_t *)user ? 42 : 0;
}

T_TEST(a_failed_callback_ends_the_run)
{
    struct data d;
    uint64_t at = 5;

    data_make(&d);
    for (int source = 0; source < SOURCES; source++) {
        const enum sink_kind sink = (enum sink_kind)((source + 1) % SINKS);
        side_pipeline_options o = options_make(&d, (enum source_kind)source, sink);
        side_pipeline *p = NULL;
        o.compute = fails_at;
        o.compute_user = &at;
        T_OK(side_pipeline_create(d.rig.device, &o, &p));
        T_STATUS(side_pipeline_run(p, NULL), SIDE_CALLBACK);
        assert_int_equal(side_last_error()->os_errno, 42);
        T_OK(side_pipeline_destroy(p));
    }
    data_free(&d);
}

/* ---------------------------------------------------------------- the log */

struct found {
    const side_span *span[SIDE_LANE_COUNT];
};

static void check_spans(const side_span *spans, size_t n, bool gpu)
{
    const uint64_t slack = gpu ? 5000 : 0; /* events resolve about 0.5 us, through floats */
    struct found items[ITEMS] = {{{NULL}}};

    for (size_t i = 0; i < n; i++) {
        assert_true(spans[i].end_ns >= spans[i].begin_ns);
        assert_true(i == 0 || spans[i].begin_ns >= spans[i - 1].begin_ns);
        assert_true(spans[i].item < ITEMS && (unsigned)spans[i].lane < SIDE_LANE_COUNT);
        assert_null(items[spans[i].item].span[spans[i].lane]);
        items[spans[i].item].span[spans[i].lane] = &spans[i];
    }
    for (size_t i = 0; i < ITEMS; i++) {
        const side_span *h2d = items[i].span[SIDE_LANE_H2D], *compute = items[i].span[SIDE_LANE_COMPUTE];
        const side_span *d2h = items[i].span[SIDE_LANE_D2H];
        assert_true(h2d != NULL && compute != NULL && d2h != NULL);
        if (compute->begin_ns + slack < h2d->end_ns || d2h->begin_ns + slack < compute->end_ns)
            T_FAIL("item %zu: H2D ends %llu, compute %llu to %llu, D2H begins %llu", i, (unsigned long long)h2d->end_ns,
                   (unsigned long long)compute->begin_ns, (unsigned long long)compute->end_ns,
                   (unsigned long long)d2h->begin_ns);
        assert_true(h2d->end_ns - h2d->begin_ns > 1000);
        assert_true(compute->end_ns - compute->begin_ns + slack >= 300000);
    }
}

T_TEST(the_log_shows_the_order_and_the_overlap)
{
    struct data d;
    side_log *log = NULL;
    side_pipeline *p = NULL;
    side_span *spans = host_make(3 * ITEMS * sizeof(*spans));
    side_account account;
    size_t n = 0;

    data_make(&d);
    T_OK(side_log_create(d.rig.device, 0, &log));
    side_pipeline_options o = options_make(&d, PINNED, TO_PINNED);
    o.log = log;
    d.spin_ns = 300000;
    T_OK(side_pipeline_create(d.rig.device, &o, &p));
    for (int pass = 0; pass < 2; pass++) {
        T_OK(side_log_clear(log));
        T_OK(side_pipeline_run(p, NULL));
        n = 0;
        T_OK(side_log_spans(log, NULL, &n));
        assert_int_equal(n, 3 * ITEMS);
        T_OK(side_log_spans(log, spans, &n));
        assert_int_equal(n, 3 * ITEMS);
        assert_int_equal(side_log_dropped(log), 0);
        check_spans(spans, n, d.rig.gpu);
        T_OK(side_timeline_account(spans, n, &account));
        assert_int_equal(account.h2d_bytes, d.at[ITEMS]);
        assert_int_equal(account.d2h_bytes, d.at[ITEMS]);
        assert_true(account.total_s > 0.3e-3 * ITEMS * 0.99);
        /* compute rules (300 us against some 12): most of the copying is under it, on any device */
        assert_true(account.compute_busy > 0.6);
        assert_true(account.copy_hidden > 0.5);
    }
    outputs_check(&d, TO_PINNED, "logged");
    T_OK(side_pipeline_destroy(p));
    side_log_destroy(log);
    free(spans);
    data_free(&d);
}

T_MAIN(EVERY_LONG(pipelines_give_what_a_plain_loop_gives, 90), EVERY(pipelines_without_results),
       EVERY_LONG(pulling_gives_the_same, 60), EVERY_LONG(a_pass_left_in_the_middle_rewinds, 15),
       EVERY(disabled_pipelines_give_the_same), EVERY(a_cancelled_run_drains),
       EVERY(a_device_that_does_not_finish_is_told), EVERY(a_failed_callback_ends_the_run),
       EVERY(the_log_shows_the_order_and_the_overlap))
