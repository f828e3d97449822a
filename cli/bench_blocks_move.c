/* SPDX-License-Identifier: MIT */
#include "bench_blocks.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FILL = 4 << 20, EDGE = 64, MOST_COUNT = 8192, MOST_CALLS = 512, MOST_PRODUCTS = 200 };

/* ---------------------------------------------------------------- memory */

side_status blocks_take(struct blocks *b)
{
    struct bench *bench = b->bench;
    side_status status = bench_pinned_take(bench, b->region_bytes, (void **)&b->pattern);

    if (status == SIDE_OK)
        status = bench_pinned_take(bench, 2 * b->most_bytes, (void **)&b->check);
    if (status == SIDE_OK)
        status = bench_device_take(bench, b->region_bytes, (void **)&b->device);
    if (status == SIDE_OK)
        status = side_stream_create(bench->device, &b->copy);
    if (status == SIDE_OK)
        status = side_stream_create(bench->device, &b->compute);
    if (status == SIDE_OK)
        status = side_event_create(bench->device, true, &b->origin);
    for (int i = 0; i < 2 && status == SIDE_OK; i++) {
        status = side_event_create(bench->device, true, &b->begin[i]);
        if (status == SIDE_OK)
            status = side_event_create(bench->device, true, &b->end[i]);
    }
    b->pieces = calloc(MOST_COUNT, sizeof(*b->pieces));
    b->order = calloc(2 * (size_t)MOST_COUNT, sizeof(*b->order));
    if (status == SIDE_OK && (b->pieces == NULL || b->order == NULL))
        status = SIDE_NO_MEMORY;
    for (size_t at = 0; at < b->region_bytes && status == SIDE_OK;
         at += FILL) { /* by parts: a signal must be seen in time */
        bench_fill(b->pattern + at, FILL, at + 1);
        status = bench_check(bench);
    }
    return status;
}

void blocks_free(struct blocks *b)
{
    if (b->bench->stuck)
        return;
    for (int i = 0; i < 2; i++) {
        side_event_destroy(b->begin[i]);
        side_event_destroy(b->end[i]);
    }
    side_event_destroy(b->origin);
    side_stream_destroy(b->copy);
    side_stream_destroy(b->compute);
    bench_gemm_free(&b->gemm);
    bench_device_free(b->bench, b->device, b->region_bytes);
    bench_pinned_free(b->bench, b->check, 2 * b->most_bytes);
    bench_pinned_free(b->bench, b->pattern, b->region_bytes);
    free(b->pieces);
    free(b->order);
    free(b->shapes);
    free(b);
}

/* ---------------------------------------------------------------- one call */

static size_t bytes_of(const struct blocks_shape *shape)
{
    return (size_t)shape->block_bytes * shape->count;
}

/* The first `count` of a shuffle of 2 * count places. */
static void shuffle(struct blocks *b, uint32_t count, uint64_t seed)
{
    uint64_t random[2 * MOST_COUNT];

    bench_fill(random, 2 * (size_t)count * sizeof(random[0]), seed);
    for (uint32_t i = 0; i < 2 * count; i++)
        b->order[i] = i;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t k = i + (uint32_t)(random[i] % (2 * count - i)), kept = b->order[i];

        b->order[i] = b->order[k];
        b->order[k] = kept;
    }
}

/* A window that was not touched for as long as possible; caches hold the last ones. */
static size_t next_window(struct blocks *b, const struct blocks_shape *shape)
{
    size_t window = 2 * bytes_of(shape), at = b->base;

    if (at + window > b->region_bytes)
        at = 0;
    b->base = at + window;
    return at;
}

static void place(struct blocks *b, const struct blocks_shape *shape, size_t window, uint64_t seed)
{
    const size_t size = shape->block_bytes;

    shuffle(b, shape->count, seed);
    for (uint32_t i = 0; i < shape->count; i++) {
        size_t scattered = window + b->order[i] * size,
               other = window + (2 * (size_t)shape->count - 1 - b->order[i]) * size;

        if (shape->kind == SIDE_COPY_H2D)
            b->pieces[i] = (side_piece){b->device + scattered, b->pattern + other, size};
        else
            b->pieces[i] = (side_piece){b->check + i * size, b->device + scattered, size};
    }
}

/* Of what lies behind the last block of a D2H call, how much is looked at. */
static size_t behind(const struct blocks_shape *shape)
{
    return bytes_of(shape) < 64 * EDGE ? bytes_of(shape) : 64 * EDGE;
}

static side_status poison(struct blocks *b, const struct blocks_shape *shape, size_t window)
{
    side_status status = SIDE_OK;

    if (shape->kind == SIDE_COPY_H2D) {
        b->device_is_pattern = false;
        status = side_memset_async(b->copy, b->device + window, BENCH_POISON, 2 * bytes_of(shape));
    } else {
        memset(b->check, BENCH_POISON, bytes_of(shape) + behind(shape));
        if (!b->device_is_pattern)
            status = side_copy_async(b->copy, SIDE_COPY_H2D, b->device, b->pattern, b->region_bytes);
        b->device_is_pattern = true;
    }
    return status == SIDE_OK ? bench_sync(b->bench, b->copy) : status;
}

static side_status call(struct blocks *b, const struct blocks_shape *shape, side_path path, size_t window)
{
    if (path != BLOCKS_PLAIN)
        return side_copy_blocks(b->copy, shape->kind, b->pieces, shape->count, path);
    if (shape->kind == SIDE_COPY_H2D)
        return side_copy_async(b->copy, SIDE_COPY_H2D, b->device + window, b->pattern + window, bytes_of(shape));
    return side_copy_async(b->copy, SIDE_COPY_D2H, b->check, b->device + window, bytes_of(shape));
}

/* ---------------------------------------------------------------- what it left */

static bool all_poison(const char *data, size_t bytes)
{
    return data[0] == (char)BENCH_POISON && memcmp(data, data + 1, bytes - 1) == 0;
}

/* A place without a block: whoever writes too far does so at an edge. */
static bool is_gap(const char *data, size_t bytes)
{
    return all_poison(data, EDGE) && all_poison(data + bytes - EDGE, EDGE);
}

/* Every block is where it belongs, and nothing was written behind the last one, or between them. */
static bool is_right(const struct blocks *b, const struct blocks_shape *shape, side_path path, size_t window)
{
    const size_t size = shape->block_bytes, total = bytes_of(shape);

    if (path == BLOCKS_PLAIN)
        return memcmp(b->check, b->pattern + window, total) == 0 && is_gap(b->check + total, behind(shape));
    for (uint32_t i = 0; i < 2 * shape->count; i++) {
        size_t place = b->order[i] * size, mirror = 2 * total - size - place;

        if (i >= shape->count) {
            if (shape->kind == SIDE_COPY_H2D && !is_gap(b->check + place, size))
                return false;
        } else if (shape->kind == SIDE_COPY_H2D) {
            if (memcmp(b->check + place, b->pattern + window + mirror, size) != 0)
                return false;
        } else if (memcmp(b->check + i * size, b->pattern + window + place, size) != 0) {
            return false;
        }
    }
    return shape->kind == SIDE_COPY_H2D || is_gap(b->check + total, behind(shape));
}

static side_status verify(struct blocks *b, const struct blocks_shape *shape, side_path path, size_t window)
{
    side_status status = SIDE_OK;

    if (shape->kind == SIDE_COPY_H2D) {
        status = side_copy_async(b->copy, SIDE_COPY_D2H, b->check, b->device + window, 2 * bytes_of(shape));
        if (status == SIDE_OK)
            status = bench_sync(b->bench, b->copy);
    }
    if (status == SIDE_OK && !is_right(b, shape, path, window))
        bench_error(b->bench, EXIT_FAILED, "blocks: %s, %u blocks of %u bytes %s: other bytes arrived than were sent",
                    path == BLOCKS_PLAIN ? "plain copy" : side_path_name(path), shape->count, shape->block_bytes,
                    shape->kind == SIDE_COPY_H2D ? "H2D" : "D2H");
    return status;
}

/* ---------------------------------------------------------------- samples */

/* After a call that failed: what was queued of it must be done before memory is touched again. */
static side_status not_supported(struct blocks *b, struct blocks_cell *cell, side_status status)
{
    if (status != SIDE_UNSUPPORTED && status != SIDE_NO_LIBRARY)
        return status;
    snprintf(cell->unsupported, sizeof(cell->unsupported), "%.159s", side_last_error()->message);
    return bench_sync(b->bench, b->copy);
}

side_status blocks_alone(struct blocks *b, struct blocks_shape *shape, side_path path, bool keep)
{
    struct blocks_cell *cell = &shape->cells[path];
    const size_t window = next_window(b, shape);
    side_status status = bench_check(b->bench), ended;
    double seconds = 0;

    if (status != SIDE_OK || cell->unsupported[0] != '\0')
        return status;
    cell->tried = true;
    place(b, shape, window, window + path);
    status = poison(b, shape, window);
    if (status == SIDE_OK)
        status = side_event_record(b->begin[0], b->copy);
    if (status != SIDE_OK)
        return status;
    status = call(b, shape, path, window);
    if (status != SIDE_OK)
        return not_supported(b, cell, status);
    status = side_event_record(b->end[0], b->copy);
    ended = bench_sync(b->bench, b->copy);
    status = status == SIDE_OK ? ended : status;
    if (status == SIDE_OK)
        status = side_event_elapsed(b->begin[0], b->end[0], &seconds);
    if (status == SIDE_OK && keep)
        bench_add(&cell->gbps, (double)bytes_of(shape) / seconds / 1e9);
    return status == SIDE_OK ? verify(b, shape, path, window) : status;
}

struct spans {
    double begin[2], end[2]; /* 0: the copies; 1: the products */
};

static side_status run_both(struct blocks *b, const struct blocks_shape *shape, side_path path, size_t window,
                            const size_t times[2])
{
    side_status status = side_event_record(b->origin, b->compute);

    if (status == SIDE_OK)
        status = side_stream_wait(b->copy, b->origin);
    if (status == SIDE_OK)
        status = side_event_record(b->begin[1], b->compute);
    if (status == SIDE_OK)
        status = bench_gemm_queue(&b->gemm, b->compute, times[1]);
    if (status == SIDE_OK)
        status = side_event_record(b->end[1], b->compute);
    if (status == SIDE_OK)
        status = side_event_record(b->begin[0], b->copy);
    for (size_t i = 0; i < times[0] && status == SIDE_OK; i++)
        status = call(b, shape, path, window);
    return status == SIDE_OK ? side_event_record(b->end[0], b->copy) : status;
}

static side_status read_spans(const struct blocks *b, struct spans *s)
{
    side_status status = SIDE_OK;

    for (int i = 0; i < 2 && status == SIDE_OK; i++) {
        status = side_event_elapsed(b->origin, b->begin[i], &s->begin[i]);
        if (status == SIDE_OK)
            status = side_event_elapsed(b->origin, b->end[i], &s->end[i]);
    }
    return status;
}

/* While both ran, each at its own speed; before and after, one had the device for itself and was as fast as it is alone. Kept where most of it was beside
 * the other. */
static void keep_beside(struct blocks *b, const struct blocks_shape *shape, struct blocks_cell *cell,
                        const size_t times[2], const struct spans *s)
{
    const double from = fmax(s->begin[0], s->begin[1]), to = fmin(s->end[0], s->end[1]), both = to - from;
    const double copies_s = s->end[0] - s->begin[0], products_s = s->end[1] - s->begin[1];
    const double alone = bench_median(&cell->gbps) * 1e9;
    const double bytes = (double)bytes_of(shape) * (double)times[0] - (copies_s - both) * alone;
    const double products = (double)times[1] - (products_s - both) / b->gemm.seconds;

    if (both > 0.3 * copies_s && bytes > 0)
        bench_add(&cell->beside_gbps, bytes / both / 1e9);
    if (both > 0.3 * products_s && products > 0.1 * (double)times[1])
        bench_add(&cell->gemm_s, both / products);
}

side_status blocks_beside(struct blocks *b, struct blocks_shape *shape, side_path path)
{
    struct blocks_cell *cell = &shape->cells[path];
    const size_t window = next_window(b, shape);
    const double call_s = (double)bytes_of(shape) / bench_median(&cell->gbps) / 1e9, gemm_s = b->gemm.seconds;
    const double length_s = fmax(call_s, (b->bench->args.quick ? 2 : 3) * gemm_s);
    side_status status = bench_check(b->bench), ended;
    struct spans spans;
    size_t times[2];

    if (status != SIDE_OK || cell->gbps.count == 0)
        return status;
    times[0] = (size_t)fmin(fmax(round(length_s / call_s), 1), MOST_CALLS);
    times[1] = (size_t)fmin(fmax(ceil(length_s / gemm_s), 2), MOST_PRODUCTS);
    place(b, shape, window, window + path);
    status = poison(b, shape, window);
    if (status == SIDE_OK)
        status = run_both(b, shape, path, window, times);
    ended = bench_sync(b->bench, b->copy);
    status = status == SIDE_OK ? ended : status;
    ended = bench_sync(b->bench, b->compute);
    status = status == SIDE_OK ? ended : status;
    if (status == SIDE_OK)
        status = read_spans(b, &spans);
    if (status != SIDE_OK)
        return status;
    keep_beside(b, shape, cell, times, &spans);
    return verify(b, shape, path, window);
}
