/* SPDX-License-Identifier: MIT */
#include "bench_copy.h"

#include <string.h>

enum { PAGE = 4096, PIECE = 32 << 20, LEAD = 256 << 10 };

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

/* ---------------------------------------------------------------- the arena */

/* In pieces: a signal must be seen in time. */
static side_status fill_pattern(const struct bench_arena *a)
{
    for (size_t at = 0; at < a->bytes; at += PIECE) {
        const size_t left = a->bytes - at;

        bench_fill(a->src + at, left < PIECE ? left : PIECE, at / PIECE + 1);
        if (bench_check(a->bench) != SIDE_OK)
            return SIDE_CANCELLED;
    }
    return SIDE_OK;
}

side_status bench_arena_make(struct bench *b, size_t bytes, struct bench_arena *a)
{
    void *memory[5] = {NULL};
    side_status status;

    memset(a, 0, sizeof(*a));
    a->bench = b;
    a->bytes = bytes;
    status = bench_pinned_take(b, bytes, &memory[0]);
    if (status == SIDE_OK)
        status = bench_pinned_take(b, bytes, &memory[1]);
    if (status == SIDE_OK)
        status = bench_pageable_take(b, bytes, &memory[2]);
    if (status == SIDE_OK)
        status = bench_device_take(b, bytes, &memory[3]);
    if (status == SIDE_OK)
        status = bench_device_take(b, bytes, &memory[4]);
    a->src = memory[0];
    a->dst = memory[1];
    a->pageable = memory[2];
    a->in = memory[3];
    a->out = memory[4];
    if (status == SIDE_OK)
        status = side_stream_create(b->device, &a->up);
    if (status == SIDE_OK)
        status = side_stream_create(b->device, &a->down);
    if (status != SIDE_OK)
        return status;
    memset(a->dst, BENCH_POISON, bytes); /* the pageable one is poison too */
    return fill_pattern(a);
}

void bench_arena_free(struct bench_arena *a)
{
    struct bench *b = a->bench;

    if (b->stuck)
        return;
    side_stream_destroy(a->up);
    side_stream_destroy(a->down);
    bench_pinned_free(b, a->src, a->bytes);
    bench_pinned_free(b, a->dst, a->bytes);
    bench_pageable_free(b, a->pageable, a->bytes);
    bench_device_free(b, a->in, a->bytes);
    bench_device_free(b, a->out, a->bytes);
}

/* ---------------------------------------------------------------- before and after a sample */

static size_t window(const struct bench_arena *a)
{
    return a->copy_bytes * a->copies;
}

/* A word of every page of the window tells the sample. */
static void stamp(const struct bench_arena *a, char *memory)
{
    for (size_t at = 0; at < window(a); at += PAGE) {
        uint64_t word = mix(a->stamp + at);

        memcpy(memory + a->offset + at, &word, 8);
    }
}

static side_status compare(const struct bench_arena *a, const char *want, const char *got, const char *what)
{
    const size_t bytes = window(a);

    for (size_t at = 0; at < bytes; at += PIECE) {
        size_t n = bytes - at < PIECE ? bytes - at : PIECE, first = at;

        if (memcmp(want + a->offset + at, got + a->offset + at, n) == 0) {
            if (bench_check(a->bench) != SIDE_OK)
                return SIDE_CANCELLED;
            continue;
        }
        while (want[a->offset + first] == got[a->offset + first])
            first++;
        bench_error(a->bench, EXIT_FAILED, "%s: byte %zu of %zu copies of %zu bytes is wrong", what, first, a->copies,
                    a->copy_bytes);
        break;
    }
    return SIDE_OK;
}

static void poison(const struct bench_arena *a, char *memory)
{
    memset(memory + a->offset, BENCH_POISON, window(a));
}

static side_status to_pattern(struct bench_arena *a)
{
    if (!a->pageable_is_pattern)
        memcpy(a->pageable, a->src, a->bytes);
    a->pageable_is_pattern = true;
    return bench_check(a->bench);
}

static side_status to_poison(struct bench_arena *a)
{
    if (a->pageable_is_pattern)
        memset(a->pageable, BENCH_POISON, a->bytes);
    a->pageable_is_pattern = false;
    return bench_check(a->bench);
}

static side_status before(struct bench_arena *a, enum bench_way way)
{
    const size_t n = window(a);
    side_status status = SIDE_OK;

    if (a->offset + n > a->bytes)
        a->offset = 0;
    a->stamp += a->bytes;
    if (way == BENCH_PAGEABLE_H2D)
        status = to_pattern(a);
    else if (way == BENCH_PAGEABLE_D2H)
        status = to_poison(a);
    stamp(a, way == BENCH_PAGEABLE_H2D ? a->pageable : a->src);
    if (status == SIDE_OK && way != BENCH_D2H && way != BENCH_PAGEABLE_D2H)
        status = side_memset_async(a->up, a->in + a->offset, BENCH_POISON, n);
    if (status == SIDE_OK && way != BENCH_H2D && way != BENCH_PAGEABLE_H2D)
        status = side_copy_async(a->up, SIDE_COPY_H2D, a->out + a->offset, a->src + a->offset, n);
    return status == SIDE_OK ? bench_sync(a->bench, a->up) : status;
}

/* Leaves `dst`, or the pageable side of D2H, as poison: the next user of the window finds it cold. */
static side_status after(struct bench_arena *a, enum bench_way way)
{
    side_status status = SIDE_OK;

    if (way == BENCH_D2H || way == BENCH_BOTH) {
        status = compare(a, a->src, a->dst, "D2H");
        poison(a, a->dst);
    } else if (way == BENCH_PAGEABLE_D2H) {
        status = compare(a, a->src, a->pageable, "pageable D2H");
        poison(a, a->pageable);
    }
    if (way == BENCH_D2H || way == BENCH_PAGEABLE_D2H || status != SIDE_OK)
        return status;
    status = side_copy_async(a->down, SIDE_COPY_D2H, a->dst + a->offset, a->in + a->offset, window(a));
    if (status == SIDE_OK)
        status = bench_sync(a->bench, a->down);
    if (status != SIDE_OK)
        return status;
    status = way == BENCH_PAGEABLE_H2D ? compare(a, a->pageable, a->dst, "pageable H2D")
                                       : compare(a, a->src, a->dst, "H2D");
    poison(a, a->dst);
    return status;
}

/* ---------------------------------------------------------------- the sample */

static side_status one_in(const struct bench_arena *a, side_stream *stream, const char *from, size_t at, size_t bytes)
{
    return side_copy_async(stream, SIDE_COPY_H2D, a->in + a->offset + at, from + a->offset + at, bytes);
}

static side_status one_out(const struct bench_arena *a, side_stream *stream, char *to, size_t at, size_t bytes)
{
    return side_copy_async(stream, SIDE_COPY_D2H, to + a->offset + at, a->out + a->offset + at, bytes);
}

static size_t lead_bytes(const struct bench_arena *a)
{
    return a->copy_bytes < LEAD ? a->copy_bytes : LEAD;
}

static side_status lead_in(void *user, side_stream *stream)
{
    const struct bench_arena *a = user;

    return one_in(a, stream, a->src, 0, lead_bytes(a));
}

static side_status lead_out(void *user, side_stream *stream)
{
    const struct bench_arena *a = user;

    return one_out(a, stream, a->dst, 0, lead_bytes(a));
}

static side_status queue_in(void *user, side_stream *stream)
{
    const struct bench_arena *a = user;
    side_status status = SIDE_OK;

    for (size_t i = 0; i < a->copies && status == SIDE_OK; i++)
        status = one_in(a, stream, a->src, i * a->copy_bytes, a->copy_bytes);
    return status;
}

static side_status queue_out(void *user, side_stream *stream)
{
    const struct bench_arena *a = user;
    side_status status = SIDE_OK;

    for (size_t i = 0; i < a->copies && status == SIDE_OK; i++)
        status = one_out(a, stream, a->dst, i * a->copy_bytes, a->copy_bytes);
    return status;
}

/* A copy of pageable memory blocks the host, so nothing can be held back: the host's clock. */
static side_status time_pageable(struct bench_arena *a, bool in, double *seconds)
{
    side_stream *stream = in ? a->up : a->down;
    side_status status = SIDE_OK, synced;
    uint64_t began = side_device_now_ns(a->bench->device);

    for (size_t i = 0; i < a->copies && status == SIDE_OK; i++)
        status = in ? one_in(a, stream, a->pageable, i * a->copy_bytes, a->copy_bytes)
                    : one_out(a, stream, a->pageable, i * a->copy_bytes, a->copy_bytes);
    synced = bench_sync(a->bench, stream);
    *seconds = (double)(side_device_now_ns(a->bench->device) - began) / 1e9 / (double)a->copies;
    return status != SIDE_OK ? status : synced;
}

/* The rates of both while both ran. They begin together, but one may end first: what the other moves then, alone, does not count. */
static void both_rates(const struct bench_arena *a, const struct bench_lane lanes[2], const struct bench_copied *alone,
                       struct bench_copied *copied)
{
    const double begin = lanes[0].begin_s > lanes[1].begin_s ? lanes[0].begin_s : lanes[1].begin_s;
    const bool first_in = lanes[0].end_s < lanes[1].end_s;
    const double ended = lanes[!first_in].end_s, rest = lanes[first_in].end_s - ended;
    const double rate = (double)a->copy_bytes / (first_in ? alone->d2h_s : alone->h2d_s), all = (double)window(a);

    copied->both_gbps = (2 * all - rest * rate) / (ended - begin) / 1e9;
    copied->both_h2d_gbps = (first_in ? all : all - rest * rate) / (ended - begin) / 1e9;
}

static side_status time_copies(struct bench_arena *a, enum bench_way way, const struct bench_copied *alone,
                               struct bench_copied *copied)
{
    struct bench_lane lanes[2] = {{a->up, lead_in, queue_in, a, 0, 0}, {a->down, lead_out, queue_out, a, 0, 0}};
    const double n = (double)a->copies;
    side_status status;

    if (way == BENCH_PAGEABLE_H2D)
        return time_pageable(a, true, &copied->h2d_s);
    if (way == BENCH_PAGEABLE_D2H)
        return time_pageable(a, false, &copied->d2h_s);
    status = bench_time(a->bench, way == BENCH_D2H ? &lanes[1] : lanes, way == BENCH_BOTH ? 2 : 1);
    if (status != SIDE_OK)
        return status;
    copied->h2d_s = (lanes[0].end_s - lanes[0].begin_s) / n;
    copied->d2h_s = (lanes[1].end_s - lanes[1].begin_s) / n;
    if (way == BENCH_BOTH)
        both_rates(a, lanes, alone, copied);
    return SIDE_OK;
}

/* The theoretical rate of the link is a hard limit: what is faster was measured wrongly. */
static void check_rate(struct bench_arena *a, double seconds, const char *what)
{
    const double gbps = (double)a->copy_bytes / seconds / 1e9, most = a->bench->link.peak_gbps;

    if (most <= 0 || seconds <= 0 || gbps <= most || a->too_fast)
        return;
    a->too_fast = true; /* one tells enough */
    bench_error(
        a->bench, EXIT_MEASURING,
        "measuring error: %s of %zu bytes at %.1f GB/s, faster than the %.1f that the link can do; run it again", what,
        a->copy_bytes, gbps, most);
}

side_status bench_arena_sample(struct bench_arena *a, enum bench_way way, size_t bytes, size_t copies,
                               const struct bench_copied *alone, struct bench_copied *copied)
{
    side_status status = bench_check(a->bench);

    *copied = (struct bench_copied){0};
    a->copy_bytes = bytes;
    a->copies = copies;
    if (status == SIDE_OK)
        status = before(a, way);
    if (status == SIDE_OK)
        status = time_copies(a, way, alone, copied);
    if (status == SIDE_OK)
        status = after(a, way);
    if (status != SIDE_OK)
        return status;
    check_rate(a, copied->h2d_s, "H2D");
    check_rate(a, copied->d2h_s, "D2H");
    a->offset += window(a);
    return SIDE_OK;
}
