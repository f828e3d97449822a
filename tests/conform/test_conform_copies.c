/* SPDX-License-Identifier: MIT
 *
 * Every device: copies of all kinds, sizes and alignments; batches; filling. */
#include "conform.h"

static const size_t sizes[] = {1,    2,    3,    7,     16,    63,    64,      255,
                               4095, 4096, 4097, 65535, 65536, 65537, 1 << 20, (4 << 20) + 13};

enum { GUARD = 64 };

/* `bytes` from `src` to the device at +to, on the device to another place at +move, and back to `dst`; nothing beside them changes. */
struct trip {
    size_t bytes, to, move;
    const unsigned char *src;
    unsigned char *dst; /* dst - GUARD to dst + bytes + GUARD are ours */
};

static void travel(struct rig *r, unsigned char *a, unsigned char *b, const struct trip *t)
{
    memset(t->dst - GUARD, 0x5a, t->bytes + 2 * GUARD);
    T_OK(side_memset_async(r->stream, a, 0xa5, t->to + t->bytes + GUARD));
    T_OK(side_copy_async(r->stream, SIDE_COPY_H2D, a + t->to, t->src, t->bytes));
    T_OK(side_copy_async(r->stream, SIDE_COPY_D2D, b + t->move, a + t->to, t->bytes));
    T_OK(side_copy_async(r->stream, SIDE_COPY_D2H, t->dst, b + t->move, t->bytes));
    sync_stream(r->stream);
    check_equal(t->dst, t->src, t->bytes, "there and back");
    for (size_t i = 0; i < GUARD; i++) {
        assert_int_equal(t->dst[-1 - (ptrdiff_t)i], 0x5a);
        assert_int_equal(t->dst[t->bytes + i], 0x5a);
    }
    /* the neighbours on the device */
    T_OK(side_copy_async(r->stream, SIDE_COPY_D2H, t->dst, a + t->to + t->bytes, GUARD));
    sync_stream(r->stream);
    for (size_t i = 0; i < GUARD; i++)
        assert_int_equal(t->dst[i], 0xa5);
}

static void check_trips(struct rig *r, unsigned char *src, unsigned char *dst, size_t room, uint64_t seed)
{
    unsigned char *a = device_make(r->device, room), *b = device_make(r->device, room);
    t_rng rng = t_rng_make(seed);

    fill(src, room, seed);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct trip t = {sizes[i], 0, 0, src, dst + GUARD};
        travel(r, a, b, &t);
        for (int k = 0; k < 4; k++) { /* all four addresses odd */
            t.to = t_rng_below(&rng, 300);
            t.move = t_rng_below(&rng, 300);
            t.src = src + t_rng_below(&rng, 300);
            t.dst = dst + GUARD + t_rng_below(&rng, 300);
            travel(r, a, b, &t);
        }
    }
    side_device_free(r->device, a);
    side_device_free(r->device, b);
}

#define ROOM ((4 << 20) + 13 + 300 + 2 * GUARD + 300)

T_TEST(pinned_copies_of_all_sizes)
{
    struct rig r = rig_open();
    unsigned char *src = pinned_make(r.device, ROOM), *dst = pinned_make(r.device, ROOM);

    check_trips(&r, src, dst, ROOM, 1);
    pinned_free(r.device, src);
    pinned_free(r.device, dst);
    rig_close(&r);
}

T_TEST(pageable_copies_of_all_sizes)
{
    struct rig r = rig_open();
    unsigned char *src = host_make(ROOM), *dst = host_make(ROOM);

    check_trips(&r, src, dst, ROOM, 2);
    free(src);
    free(dst);
    rig_close(&r);
}

/* H2D from pageable memory has read its source when the call returns, or else the source must stay: overwritten after a sync only. */
T_TEST(large_copies)
{
    struct rig r = rig_open();
    const size_t bytes = (T_SANITIZED ? 16 : 64) * MIB;
    unsigned char *pinned = pinned_make(r.device, bytes), *pageable = host_make(bytes);
    unsigned char *a = device_make(r.device, bytes), *b = device_make(r.device, bytes);

    fill(pageable, bytes, 3);
    memset(pinned, 0, bytes);
    T_OK(side_copy_async(r.stream, SIDE_COPY_H2D, a, pageable, bytes));
    T_OK(side_copy_async(r.stream, SIDE_COPY_D2D, b, a, bytes));
    T_OK(side_copy_async(r.stream, SIDE_COPY_D2H, pinned, b, bytes));
    sync_stream(r.stream);
    check_equal(pinned, pageable, bytes, "pageable in, pinned out");
    fill(pinned, bytes, 4);
    T_OK(side_copy_async(r.stream, SIDE_COPY_H2D, a, pinned, bytes));
    T_OK(side_copy_async(r.stream, SIDE_COPY_D2D, b + 1, a, bytes - 1));
    T_OK(side_memset_async(r.stream, b, 0xcc, 1));
    T_OK(side_copy_async(r.stream, SIDE_COPY_D2H, pageable, b, bytes));
    sync_stream(r.stream);
    assert_int_equal(pageable[0], 0xcc);
    check_equal(pageable + 1, pinned, bytes - 1, "pinned in, pageable out");
    pinned_free(r.device, pinned);
    free(pageable);
    side_device_free(r.device, a);
    side_device_free(r.device, b);
    rig_close(&r);
}

T_TEST(bad_copies_are_refused)
{
    struct rig r = rig_open();
    char host[16] = "";
    char *device = device_make(r.device, 16);
    side_piece piece = {device, host, 0};

    T_OK(side_copy_async(r.stream, SIDE_COPY_H2D, device, host, 0));
    T_STATUS(side_copy_async(NULL, SIDE_COPY_H2D, device, host, 1), SIDE_INVALID);
    T_STATUS(side_copy_async(r.stream, SIDE_COPY_H2D, NULL, host, 1), SIDE_INVALID);
    T_STATUS(side_copy_async(r.stream, SIDE_COPY_H2D, device, NULL, 1), SIDE_INVALID);
    T_STATUS(side_copy_async(r.stream, (side_copy_kind)7, device, host, 1), SIDE_INVALID);
    T_STATUS(side_copy_batch(r.stream, SIDE_COPY_H2D, &piece, 1), SIDE_INVALID);
    T_STATUS(side_copy_batch(r.stream, SIDE_COPY_H2D, NULL, 1), SIDE_INVALID);
    T_OK(side_copy_batch(r.stream, SIDE_COPY_H2D, NULL, 0));
    T_STATUS(side_memset_async(r.stream, NULL, 0, 1), SIDE_INVALID);
    T_OK(side_memset_async(r.stream, device, 0, 0));
    side_device_free(r.device, device);
    rig_close(&r);
}

/* ---------------------------------------------------------------- batches */

/* Cuts `room` bytes into at most `most` pieces with gaps, sources in another order than destinations. */
static size_t cut(t_rng *rng, side_piece *pieces, size_t most, unsigned char *dst, const unsigned char *src,
                  size_t room, size_t piece)
{
    size_t n = 0, at = 0;

    while (n < most) {
        const size_t gap = t_rng_below(rng, 20), bytes = 1 + t_rng_below(rng, piece);
        if (at + gap + bytes > room)
            break;
        at += gap;
        pieces[n++] = (side_piece){dst + at, src + at, bytes};
        at += bytes;
    }
    for (size_t i = n; i > 1; i--) { /* any order */
        const size_t k = t_rng_below(rng, i);
        const side_piece p = pieces[i - 1];
        pieces[i - 1] = pieces[k];
        pieces[k] = p;
    }
    return n;
}

struct batch {
    unsigned char *from, *to; /* host views of both sides before and after */
    side_piece *pieces;
    size_t most, room;
};

/* What `to` must hold after the copies. */
static void apply(const struct batch *b, size_t n, const unsigned char *dst, const unsigned char *src)
{
    for (size_t i = 0; i < n; i++)
        memcpy(b->to + ((const unsigned char *)b->pieces[i].dst - dst),
               b->from + ((const unsigned char *)b->pieces[i].src - src), b->pieces[i].bytes);
}

static void check_batches(struct rig *r, unsigned char *host, size_t most, size_t piece, uint64_t seed)
{
    const size_t room = 3 * MIB;
    struct batch b = {host_make(room), host_make(room), host_make(most * sizeof(side_piece)), most, room};
    unsigned char *x = device_make(r->device, room), *y = device_make(r->device, room), *back = host_make(room);
    t_rng rng = t_rng_make(seed);

    /* H2D into x, which holds 0x11 */
    fill(host, room, seed);
    memcpy(b.from, host, room);
    memset(b.to, 0x11, room);
    T_OK(side_memset_async(r->stream, x, 0x11, room));
    size_t n = cut(&rng, b.pieces, most, x, host, room, piece);
    T_OK(side_copy_batch(r->stream, SIDE_COPY_H2D, b.pieces, n));
    apply(&b, n, x, host);
    memset(b.pieces, 0xff, n * sizeof(side_piece)); /* the array may be reused */
    T_OK(side_copy_async(r->stream, SIDE_COPY_D2H, back, x, room));
    sync_stream(r->stream);
    check_equal(back, b.to, room, "H2D batch");

    /* D2D into y, then D2H over host */
    memcpy(b.from, b.to, room);
    memset(b.to, 0x22, room);
    T_OK(side_memset_async(r->stream, y, 0x22, room));
    n = cut(&rng, b.pieces, most, y, x, room, piece);
    T_OK(side_copy_batch(r->stream, SIDE_COPY_D2D, b.pieces, n));
    apply(&b, n, y, x);
    memcpy(b.from, b.to, room);
    memset(b.to, 0x33, room);
    memset(host, 0x33, room);
    n = cut(&rng, b.pieces, most, host, y, room, piece);
    T_OK(side_copy_batch(r->stream, SIDE_COPY_D2H, b.pieces, n));
    apply(&b, n, host, y);
    sync_stream(r->stream);
    check_equal(host, b.to, room, "D2D and D2H batch");
    free(b.from);
    free(b.to);
    free(b.pieces);
    free(back);
    side_device_free(r->device, x);
    side_device_free(r->device, y);
}

T_TEST(batches_of_all_shapes)
{
    struct rig r = rig_open();
    unsigned char *host = pinned_make(r.device, 3 * MIB);

    T_FOR_SEEDS (seed, 4) {
        check_batches(&r, host, 1, 100, seed);
        check_batches(&r, host, 2, 100 * KIB, seed);
        check_batches(&r, host, 500, 5000, seed);
        check_batches(&r, host, 2000, 300, seed); /* more than one call of the driver's takes */
        check_batches(&r, host, 20, 300 * KIB, seed);
    }
    pinned_free(r.device, host);
    rig_close(&r);
}

T_TEST(batches_of_pageable_memory)
{
    struct rig r = rig_open();
    unsigned char *host = host_make(3 * MIB);

    check_batches(&r, host, 3, 100 * KIB, 1);
    check_batches(&r, host, 300, 5000, 2);
    free(host);
    rig_close(&r);
}

/* One batch takes from pinned, pinned in place and pageable memory. */
T_TEST(batches_mix_kinds_of_memory)
{
    struct rig r = rig_open();
    const size_t bytes = 100 * KIB;
    unsigned char *pinned = pinned_make(r.device, bytes), *pageable = host_make(bytes), *in_place = host_make(bytes);
    unsigned char *device = device_make(r.device, 3 * bytes), *back = host_make(3 * bytes);
    side_piece pieces[3] = {
        {device, pinned, bytes}, {device + bytes, pageable, bytes}, {device + 2 * bytes, in_place, bytes}};

    fill(pinned, bytes, 1);
    fill(pageable, bytes, 2);
    fill(in_place, bytes, 3);
    if (r.props.can_register)
        T_OK(side_memory_pin(r.device, in_place, bytes));
    T_OK(side_copy_batch(r.stream, SIDE_COPY_H2D, pieces, 3));
    T_OK(side_copy_async(r.stream, SIDE_COPY_D2H, back, device, 3 * bytes));
    sync_stream(r.stream);
    check_equal(back, pinned, bytes, "the pinned piece");
    check_equal(back + bytes, pageable, bytes, "the pageable piece");
    check_equal(back + 2 * bytes, in_place, bytes, "the piece pinned in place");
    if (r.props.can_register)
        T_OK(side_memory_unpin(r.device, in_place));
    pinned_free(r.device, pinned);
    free(pageable);
    free(in_place);
    free(back);
    side_device_free(r.device, device);
    rig_close(&r);
}

/* A batch is one operation of its stream: after what is before it, before what is after it. */
T_TEST(batches_keep_the_stream_s_order)
{
    struct rig r = rig_open();
    enum { PIECES = 64, BYTES = 4096, ROUNDS = 20 };
    unsigned char *host = pinned_make(r.device, PIECES * BYTES), *device = device_make(r.device, PIECES * BYTES);
    unsigned char *back = pinned_make(r.device, ROUNDS * PIECES * BYTES);
    side_piece pieces[PIECES];

    memset(host, 0xab, PIECES * BYTES);
    for (size_t i = 0; i < PIECES; i++)
        pieces[i] = (side_piece){device + i * BYTES, host + i * BYTES, BYTES / 2};
    for (int k = 0; k < ROUNDS; k++) {
        T_OK(side_memset_async(r.stream, device, k, PIECES * BYTES));
        T_OK(side_copy_batch(r.stream, SIDE_COPY_H2D, pieces, PIECES));
        T_OK(side_copy_async(r.stream, SIDE_COPY_D2H, back + (size_t)k * PIECES * BYTES, device, PIECES * BYTES));
    }
    sync_stream(r.stream);
    for (size_t i = 0; i < (size_t)ROUNDS * PIECES * BYTES; i++) {
        const int expected = i % BYTES < BYTES / 2 ? 0xab : (int)(i / (PIECES * BYTES));
        if (back[i] != expected)
            T_FAIL("round %zu: byte %zu is %02x, not %02x", i / (PIECES * BYTES), i % (PIECES * BYTES), back[i],
                   expected);
    }
    pinned_free(r.device, host);
    pinned_free(r.device, back);
    side_device_free(r.device, device);
    rig_close(&r);
}

/* ---------------------------------------------------------------- filling */

T_TEST(memset_fills_what_it_should)
{
    struct rig r = rig_open();
    const size_t room = MIB + 1000;
    unsigned char *device = device_make(r.device, room), *host = host_make(room);

    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]) && sizes[i] <= MIB; i++) {
        const size_t at = i * 37 % 500;
        T_OK(side_memset_async(r.stream, device, 0x100 + 9, room)); /* only the low byte counts */
        T_OK(side_memset_async(r.stream, device + at, 0xf0 + (int)i % 16, sizes[i]));
        T_OK(side_copy_async(r.stream, SIDE_COPY_D2H, host, device, room));
        sync_stream(r.stream);
        for (size_t k = 0; k < room; k++)
            if (host[k] != (k >= at && k < at + sizes[i] ? 0xf0 + (int)i % 16 : 9))
                T_FAIL("%zu bytes at %zu: byte %zu is %02x", sizes[i], at, k, host[k]);
    }
    free(host);
    side_device_free(r.device, device);
    rig_close(&r);
}

T_MAIN(EVERY(pinned_copies_of_all_sizes), EVERY(pageable_copies_of_all_sizes), EVERY(large_copies),
       EVERY(bad_copies_are_refused), EVERY(batches_of_all_shapes), EVERY(batches_of_pageable_memory),
       EVERY(batches_mix_kinds_of_memory), EVERY(batches_keep_the_stream_s_order), EVERY(memset_fills_what_it_should))
