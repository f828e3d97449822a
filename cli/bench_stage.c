/* SPDX-License-Identifier: MIT
 *
 * Staging: pageable memory into pinned slots by 1..N threads, with nothing beside; then a whole pipeline, pageable -> staged -> device, by as many, where the
 * copy engine reads the slots at the same time. Both against the link, measured by turns with them. What arrived is hashed on the device.
 */
#include "bench.h"
#include "signals.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    ROWS = 12,
    THREADS_MOST = 64,
    SLOTS = 2,
    SLOT_BYTES = 4 << 20,
    DEPTH = 3,
    ITEMS = 16,
    HASH_BLOCK = 1024,
    HASH_BYTES = 64
};
#define MIB        ((size_t)1 << 20)
#define LINK_BYTES (256 * MIB)

struct stage_row {
    uint32_t threads; /* asked for; 0: default */
    uint32_t used;
    struct bench_samples memory, path; /* GB/s: memcpy alone; pageable to the device */
};

struct stage {
    struct bench *bench;
    size_t item_bytes, items;
    char *source; /* pageable, items * item_bytes */
    char *slots;  /* pinned, THREADS_MOST * SLOTS at most */
    size_t slots_bytes, link_piece;
    side_block *blocks;
    char *expected, *got, *hashes; /* of all items: pageable, pinned, on the device */
    void *device;                  /* one item, for the link and, without kernels, to keep one */
    uint64_t kept_item;
    side_stream *stream;
    struct stage_row rows[ROWS];
    size_t row_count;
    struct bench_samples link;
    side_error kept; /* of the compute callback */
};

/* ---------------------------------------------------------------- memcpy by threads, nothing beside */

struct worker {
    const struct stage *stage;
    pthread_t thread;
    pthread_barrier_t *start;
    uint32_t number, count;
    size_t last[SLOTS]; /* offset in the source of what a slot holds; SIZE_MAX: nothing */
};

/* Pieces by turns, each into the next of the thread's own slots. */
static void *work(void *arg)
{
    struct worker *w = arg;
    const struct stage *s = w->stage;
    size_t pieces = s->items * s->item_bytes / SLOT_BYTES, slot = 0;

    pthread_barrier_wait(w->start);
    for (size_t i = w->number; i < pieces; i += w->count) {
        memcpy(s->slots + (w->number * SLOTS + slot) * SLOT_BYTES, s->source + i * SLOT_BYTES, SLOT_BYTES);
        w->last[slot] = i * SLOT_BYTES;
        slot = (slot + 1) % SLOTS;
    }
    return NULL;
}

static bool slots_are_right(const struct worker *workers, uint32_t count)
{
    bool right = true;

    for (uint32_t i = 0; i < count; i++)
        for (size_t k = 0; k < SLOTS; k++)
            right = right && (workers[i].last[k] == SIZE_MAX ||
                              memcmp(workers[i].stage->slots + (i * SLOTS + k) * SLOT_BYTES,
                                     workers[i].stage->source + workers[i].last[k], SLOT_BYTES) == 0);
    return right;
}

static side_status sample_memory(struct stage *s, uint32_t threads, double *gbps)
{
    struct worker workers[THREADS_MOST];
    pthread_barrier_t start;
    uint32_t started = 0;
    double begin;

    pthread_barrier_init(&start, NULL, threads + 1);
    memset(s->slots, BENCH_POISON, (size_t)threads * SLOTS * SLOT_BYTES);
    for (; started < threads; started++) {
        struct worker *w = &workers[started];

        *w = (struct worker){
            .stage = s, .start = &start, .number = started, .count = threads, .last = {SIZE_MAX, SIZE_MAX}};
        if (pthread_create(&w->thread, NULL, work, w) != 0)
            break;
    }
    if (started < threads) { /* those that started wait at the barrier for ever; the process is about to end */
        say("stage: cannot start %u threads; started %u", threads, started);
        s->bench->said = s->bench->stuck = true;
        return SIDE_NO_MEMORY;
    }
    pthread_barrier_wait(&start);
    begin = clock_s();
    for (uint32_t i = 0; i < threads; i++)
        pthread_join(workers[i].thread, NULL);
    *gbps = (double)(s->items * s->item_bytes) / (clock_s() - begin) / 1e9;
    pthread_barrier_destroy(&start);
    if (!slots_are_right(workers, threads))
        bench_error(s->bench, EXIT_FAILED, "stage: %u threads copied other bytes than were there", threads);
    return SIDE_OK;
}

/* ---------------------------------------------------------------- the whole path */

static side_op hash_op(const struct stage *s, const void *in, void *out)
{
    side_op op = SIDE_OP_INIT;

    op.id = SIDE_OP_XXH3_BLOCKS;
    op.dim[0] = s->item_bytes / HASH_BLOCK;
    op.in[0] = in;
    op.out = out;
    return op;
}

static size_t hash_bytes(const struct stage *s)
{
    return s->item_bytes / HASH_BLOCK * HASH_BYTES;
}

/* Without kernels one item a run is kept, another one each time. */
static int compute(void *user, side_stream *stream, side_item *item)
{
    struct stage *s = user;
    side_status status = SIDE_OK;

    if (s->bench->props.kernels) {
        side_op op = hash_op(s, item->data, s->hashes + item->number * hash_bytes(s));

        status = side_op_async(stream, &op);
    } else if (item->number == s->kept_item) {
        status = side_copy_async(stream, SIDE_COPY_D2D, s->device, item->data, s->item_bytes);
    }
    if (status != SIDE_OK)
        s->kept = *side_last_error();
    return status == SIDE_OK ? 0 : 1;
}

static side_status verify(struct stage *s, uint32_t threads)
{
    bool kernels = s->bench->props.kernels;
    size_t bytes = kernels ? s->items * hash_bytes(s) : s->item_bytes;
    const char *want = kernels ? s->expected : s->source + s->kept_item * s->item_bytes;
    side_status status = side_copy_async(s->stream, SIDE_COPY_D2H, s->got, kernels ? s->hashes : s->device, bytes);

    if (status == SIDE_OK)
        status = bench_sync(s->bench, s->stream);
    if (status == SIDE_OK && memcmp(s->got, want, bytes) != 0)
        bench_error(s->bench, EXIT_FAILED, "stage: with %u threads other bytes arrived than were sent", threads);
    s->kept_item = (s->kept_item + 1) % s->items;
    return status;
}

/* The staging is the device's own pool's: it is counted here and given back at once. */
static side_status run_pipeline(struct stage *s, struct stage_row *row, double *gbps)
{
    side_pipeline_options o = SIDE_PIPELINE_OPTIONS_INIT;
    side_pipeline *pipeline;
    side_pipeline_stats stats;
    side_pool *pool;
    side_status status, ended;

    if (!bench_device_count(s->bench, DEPTH * s->item_bytes))
        return SIDE_NO_DEVICE_MEMORY;
    o.item_bytes = s->item_bytes;
    o.depth = DEPTH;
    o.source = side_source_blocks(s->blocks, s->items);
    o.compute = compute;
    o.compute_user = s;
    o.threads = row->threads;
    o.pinned_bytes = bench_host_room(s->bench);
    o.timeout_s = s->bench->timeout_s;
    status = side_pipeline_create(s->bench->device, &o, &pipeline);
    bench_device_uncount(s->bench, DEPTH * s->item_bytes);
    if (status != SIDE_OK)
        return status;
    signals_watch(pipeline);
    status = side_pipeline_run(pipeline, &stats);
    signals_watch(NULL);
    ended = side_pipeline_get_stats(pipeline, &stats);
    row->used = stats.threads;
    if (ended == SIDE_OK && bench_host_count(s->bench, stats.pinned_bytes)) /* for the peak that is reported */
        bench_host_uncount(s->bench, stats.pinned_bytes);
    *gbps = (double)stats.bytes_in / stats.time_s / 1e9;
    ended = side_pipeline_destroy(pipeline);
    s->bench->stuck = s->bench->stuck || ended == SIDE_STUCK;
    if (ended == SIDE_OK && side_device_pool(s->bench->device, &pool) == SIDE_OK)
        side_pool_trim(pool);
    return status == SIDE_OK ? ended : status;
}

static side_status sample_path(struct stage *s, struct stage_row *row, double *gbps)
{
    size_t bytes = s->items * hash_bytes(s);
    side_status status = s->bench->props.kernels ? side_memset_async(s->stream, s->hashes, BENCH_POISON, bytes)
                                                 : side_memset_async(s->stream, s->device, BENCH_POISON, s->item_bytes);

    if (status == SIDE_OK)
        status = bench_sync(s->bench, s->stream);
    if (status == SIDE_OK)
        status = run_pipeline(s, row, gbps);
    return status == SIDE_OK ? verify(s, row->used) : status;
}

/* ---------------------------------------------------------------- the link beside */

/* Over all of the slots, again and again. */
static side_status queue_link(void *user, side_stream *stream)
{
    struct stage *s = user;
    size_t copies = LINK_BYTES / s->link_piece, places = s->slots_bytes / s->link_piece;
    side_status status = SIDE_OK;

    for (size_t i = 0; i < copies && status == SIDE_OK; i++)
        status = side_copy_async(stream, SIDE_COPY_H2D, s->device, s->slots + i % places * s->link_piece, s->link_piece);
    return status;
}

static side_status sample_link(struct stage *s, double *gbps)
{
    struct bench_lane lane = {.stream = s->stream, .queue = queue_link, .user = s};
    side_status status = bench_time(s->bench, &lane, 1);

    *gbps = (double)(LINK_BYTES / s->link_piece * s->link_piece) / (lane.end_s - lane.begin_s) / 1e9;
    return status;
}

/* ---------------------------------------------------------------- the suite */

static side_status take(struct stage *s)
{
    struct bench *b = s->bench;
    size_t total = s->items * s->item_bytes, hashes = s->items * hash_bytes(s);
    side_status status = bench_pageable_take(b, total, (void **)&s->source);

    if (status == SIDE_OK)
        status = bench_pinned_take(b, s->slots_bytes, (void **)&s->slots);
    if (status == SIDE_OK)
        status = bench_pinned_take(b, hashes > s->item_bytes ? hashes : s->item_bytes, (void **)&s->got);
    if (status == SIDE_OK)
        status = bench_pageable_take(b, hashes, (void **)&s->expected);
    if (status == SIDE_OK)
        status = bench_device_take(b, hashes, (void **)&s->hashes);
    if (status == SIDE_OK)
        status = bench_device_take(b, s->item_bytes, &s->device);
    if (status == SIDE_OK)
        status = side_stream_create(b->device, &s->stream);
    s->blocks = calloc(s->items, sizeof(*s->blocks));
    if (status == SIDE_OK && s->blocks == NULL)
        status = SIDE_NO_MEMORY;
    for (size_t i = 0; i < s->items && status == SIDE_OK; i++) {
        side_op op;

        s->blocks[i] = (side_block){s->source + i * s->item_bytes, s->item_bytes};
        bench_fill(s->blocks[i].data, s->item_bytes, i + 1);
        op = hash_op(s, s->blocks[i].data, s->expected + i * hash_bytes(s));
        status = side_op_host(&op);
        if (status == SIDE_OK)
            status = bench_check(b);
    }
    return status;
}

static void give_back(struct stage *s)
{
    struct bench *b = s->bench;
    size_t total = s->items * s->item_bytes, hashes = s->items * hash_bytes(s);

    if (b->stuck)
        return;
    side_stream_destroy(s->stream);
    bench_device_free(b, s->device, s->item_bytes);
    bench_device_free(b, s->hashes, hashes);
    bench_pageable_free(b, s->expected, hashes);
    bench_pinned_free(b, s->got, hashes > s->item_bytes ? hashes : s->item_bytes);
    bench_pinned_free(b, s->slots, s->slots_bytes);
    bench_pageable_free(b, s->source, total);
    free(s->blocks);
    free(s);
}

static side_status measure(struct stage *s)
{
    const struct bench *b = s->bench;
    const size_t most = b->args.samples > 0 ? b->samples : b->samples < 5 ? b->samples : 5;
    side_status status = take(s);

    for (size_t round = 0; round <= most && status == SIDE_OK; round++) { /* the first one warms up */
        double gbps = 0;

        status = sample_link(s, &gbps);
        if (round > 0)
            bench_add(&s->link, gbps);
        for (size_t i = 0; i < s->row_count && status == SIDE_OK; i++) {
            struct stage_row *row = &s->rows[i];

            status = sample_path(s, row, &gbps);
            if (status == SIDE_OK && round > 0)
                bench_add(&row->path, gbps);
            if (status == SIDE_OK)
                status = bench_check(b);
            if (status == SIDE_OK)
                status = sample_memory(s, row->used, &gbps);
            if (status == SIDE_OK && round > 0)
                bench_add(&row->memory, gbps);
        }
    }
    return status;
}

static void report(struct stage *s)
{
    const double link = bench_median(&s->link);
    json_t *rows = json_array();
    char size[32], a[16], c[16];

    bench_print(s->bench, "\nstage: %s of pageable memory, GB/s; pinned H2D alone %s GB/s\n",
                bytes_text(s->items * s->item_bytes, size), bench_gbps_text(link, a));
    bench_print(s->bench, "  %8s %14s %14s %9s %12s\n", "threads", "memcpy alone", "to the device", "of link", "spread");
    for (size_t i = 0; i < s->row_count; i++) {
        struct stage_row *row = &s->rows[i];
        const double path = bench_median(&row->path);

        bench_print(s->bench, "  %8u %14s %14s %7.0f %% %10.1f %%%s\n", row->used,
                    bench_gbps_text(bench_median(&row->memory), a), bench_gbps_text(path, c), 100 * path / link,
                    100 * bench_spread(&row->path), row->threads == 0 ? "  default" : "");
        json_array_append_new(rows,
                              json_pack("{s:i, s:b, s:o, s:o, s:o}", "threads", (int)row->used, "default",
                                        row->threads == 0, "memcpy_gbps", bench_samples_json(&row->memory), "path_gbps",
                                        bench_samples_json(&row->path), "of_link", json_number(path / link)));
    }
    bench_json(s->bench, "stage",
               json_pack("{s:I, s:I, s:o, s:o}", "item_bytes", (json_int_t)s->item_bytes, "items", (json_int_t)s->items,
                         "link_gbps", bench_samples_json(&s->link), "rows", rows));
}

/* 1, 2, 4, 8, 12, 16, 24 ... threads up to what there are, then the default. */
static void choose_rows(struct stage *s)
{
    static const uint32_t counts[] = {1, 2, 4, 8, 12, 16, 24, 32, 48, 64};
    long cores = sysconf(_SC_NPROCESSORS_ONLN);

    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++)
        if ((long)counts[i] <= cores && (!s->bench->args.quick || counts[i] <= 12))
            s->rows[s->row_count++].threads = counts[i];
    s->rows[s->row_count++].threads = 0;
}

/* Sizes that fit the share: three quarters of the host's for the source, the rest for slots, staging and hashes. */
static bool choose_sizes(struct stage *s)
{
    const struct bench *b = s->bench;
    size_t total = b->props.simulated ? 64 * MIB
                   : b->args.quick    ? 512 * MIB
                                      : 1024 * MIB,
           threads = side_default_threads();

    for (size_t i = 0; i < s->row_count; i++)
        threads = s->rows[i].threads > threads ? s->rows[i].threads : threads;
    s->slots_bytes = threads * SLOTS * SLOT_BYTES;
    s->item_bytes = total / ITEMS;
    while (total > SLOT_BYTES &&
           (total + 3 * s->slots_bytes > bench_host_room(b) || (DEPTH + 2) * s->item_bytes > bench_device_room(b))) {
        total /= 2;
        s->item_bytes = total / ITEMS;
    }
    s->items = ITEMS;
    s->link_piece = s->item_bytes < s->slots_bytes ? s->item_bytes : s->slots_bytes;
    return total > SLOT_BYTES;
}

int bench_stage(struct bench *b)
{
    struct stage *s = calloc(1, sizeof(*s));
    side_status status;

    if (s == NULL)
        return bench_failed(b, SIDE_NO_MEMORY, "stage");
    s->bench = b;
    choose_rows(s);
    if (!choose_sizes(s)) {
        free(s);
        say("stage needs more memory than --share leaves");
        return EXIT_MEMORY;
    }
    status = measure(s);
    if (status == SIDE_OK) {
        report(s);
        b->machine.stage_gbps = bench_median(&s->rows[s->row_count - 1].path);
    } else if (status == SIDE_CALLBACK && s->kept.status != SIDE_OK) {
        (void)say_kept(&s->kept, status, "stage");
        b->said = true;
    }
    give_back(s);
    return status == SIDE_OK ? EXIT_DONE : bench_failed(b, status, "stage");
}
