/* SPDX-License-Identifier: MIT
 *
 * Every device, every path: scattered blocks arrive as memcpy would bring them, in the order of their stream. */
#include "conform.h"

#include <pthread.h>

static const side_path paths[] = {SIDE_PATH_AUTO, SIDE_PATH_LOOP, SIDE_PATH_BATCH, SIDE_PATH_GATHER, SIDE_PATH_PACK};
enum { PATHS = sizeof(paths) / sizeof(paths[0]) };

static bool has_path(const struct rig *r, side_copy_kind kind, side_path path)
{
    if (path == SIDE_PATH_PACK && kind != SIDE_COPY_D2H)
        return false;
    return r->props.kernels || (path != SIDE_PATH_GATHER && path != SIDE_PATH_PACK);
}

/* ---------------------------------------------------------------- what goes where */

struct shape {
    size_t count, most;   /* pieces; bytes of each: 1 to `most` */
    size_t align;         /* of all addresses and sizes; 1: anything */
    size_t gap;           /* between destinations, at most; 0: they lie one behind another */
    unsigned empty;       /* one in so many has no bytes; 0: none */
    bool equal, shuffled; /* all of `most` bytes; in no order */
};

/* Three places of `room` bytes, the same on the device and twice on the host: what the device does, and what memcpy does. */
struct stage {
    size_t room;
    unsigned char *a, *b;       /* device */
    unsigned char *in, *out;    /* pinned */
    unsigned char *from, *want; /* pageable: what the source holds, what the destination should */
    side_piece *pieces;
    size_t capacity;
};

static struct stage stage_open(struct rig *r, size_t room, size_t capacity)
{
    struct stage s = {.room = room, .capacity = capacity};

    s.a = device_make(r->device, room);
    s.b = device_make(r->device, room);
    s.in = pinned_make(r->device, room);
    s.out = pinned_make(r->device, room);
    s.from = host_make(room);
    s.want = host_make(room);
    s.pieces = host_make((capacity + 1) * sizeof(*s.pieces));
    return s;
}

static void stage_close(struct rig *r, struct stage *s)
{
    side_device_free(r->device, s->a);
    side_device_free(r->device, s->b);
    pinned_free(r->device, s->in);
    pinned_free(r->device, s->out);
    free(s->from);
    free(s->want);
    free(s->pieces);
}

/* Offsets for now: destinations apart from each other, sources anywhere. Stops where the room ends. */
static size_t cut(t_rng *rng, const struct shape *f, size_t room, side_piece *pieces)
{
    size_t at = f->align > 1 ? 0 : t_rng_below(rng, 17), n = 0;

    for (; n < f->count; n++) {
        size_t bytes = f->equal ? f->most : 1 + t_rng_below(rng, f->most);
        bytes = (bytes + f->align - 1) / f->align * f->align;
        if (f->empty != 0 && t_rng_below(rng, f->empty) == 0)
            bytes = 0;
        if (at + bytes > room)
            break;
        const size_t from = t_rng_below(rng, (room - bytes) / f->align + 1) * f->align;
        pieces[n] = (side_piece){(void *)(uintptr_t)at, (void *)(uintptr_t)from, bytes};
        at += bytes;
        if (f->gap > 0)
            at += t_rng_below(rng, f->gap / f->align + 1) * f->align;
    }
    for (size_t i = n; f->shuffled && i > 1; i--) {
        const size_t k = t_rng_below(rng, i);
        const side_piece p = pieces[i - 1];
        pieces[i - 1] = pieces[k];
        pieces[k] = p;
    }
    return n;
}

/* From offsets to addresses; and what memcpy makes of it. Empty pieces may say NULL. */
static void aim(struct stage *s, size_t n, void *dst, const void *src)
{
    for (size_t i = 0; i < n; i++) {
        side_piece *p = &s->pieces[i];
        const size_t to = (uintptr_t)p->dst, from = (uintptr_t)p->src;
        memcpy(s->want + to, s->from + from, p->bytes);
        p->dst = p->bytes == 0 && i % 2 == 0 ? NULL : (char *)dst + to;
        p->src = p->bytes == 0 && i % 3 == 0 ? NULL : (const char *)src + from;
    }
}

static void check_shape(struct rig *r, struct stage *s, side_copy_kind kind, side_path path, const struct shape *f,
                        uint64_t seed)
{
    char what[120];
    t_rng rng = t_rng_make(seed);
    const size_t n = cut(&rng, f, s->room, s->pieces);
    unsigned char *src = kind == SIDE_COPY_H2D ? s->in : s->a, *dst = kind == SIDE_COPY_D2H ? s->out : s->b;

    snprintf(what, sizeof(what), "path %s, kind %d, %zu pieces of at most %zu bytes, seed %llu", side_path_name(path),
             (int)kind, n, f->most, (unsigned long long)seed);
    fill(s->from, s->room, seed);
    memset(s->want, 0x33, s->room);
    memcpy(s->in, s->from, s->room);
    if (kind != SIDE_COPY_H2D)
        T_OK(side_copy_async(r->stream, SIDE_COPY_H2D, s->a, s->in, s->room));
    memset(s->out, 0x33, s->room);
    if (kind != SIDE_COPY_D2H)
        T_OK(side_memset_async(r->stream, s->b, 0x33, s->room));
    aim(s, n, dst, src);
    const side_status status = side_copy_blocks(r->stream, kind, s->pieces, n, path);
    if (status != SIDE_OK)
        T_FAIL("%s: %s, %s", what, side_status_name(status), side_last_error()->message);
    memset(s->pieces, 0xee, (n + 1) * sizeof(*s->pieces)); /* the array is ours again */
    if (kind != SIDE_COPY_D2H)
        T_OK(side_copy_async(r->stream, SIDE_COPY_D2H, s->out, s->b, s->room));
    sync_stream(r->stream);
    check_equal(s->out, s->want, s->room, what);
}

static void check_all(struct rig *r, struct stage *s, const struct shape *shapes, size_t count, uint64_t seeds)
{
    for (size_t i = 0; i < count; i++)
        for (int kind = SIDE_COPY_H2D; kind <= SIDE_COPY_D2D; kind++)
            for (int p = 0; p < PATHS; p++)
                T_FOR_SEEDS (seed, seeds)
                    if (has_path(r, (side_copy_kind)kind, paths[p]))
                        check_shape(r, s, (side_copy_kind)kind, paths[p], &shapes[i], seed);
}

/* ---------------------------------------------------------------- shapes */

T_TEST(small_blocks)
{
    if (T_TSAN)
        T_SKIP("one thread; threads_with_a_stream_each has all paths");
    static const struct shape shapes[] = {
        {0, 1, 1, 0, 0, false, false},       {1, 1, 1, 0, 0, false, false},       {1, 100000, 1, 0, 0, false, false},
        {7, 40, 1, 0, 2, false, false},      {40, 300, 1, 30, 5, false, true},    {500, 1, 1, 3, 0, true, true},
        {500, 17, 1, 1, 3, false, false},    {300, 4096, 1, 0, 9, false, false},  {300, 4097, 1, 50, 0, true, true},
        {200, 4096, 16, 0, 0, true, false},  {100, 4096, 512, 0, 0, true, true},  {100, 9000, 2, 100, 0, false, true},
        {100, 9000, 4, 100, 4, false, true}, {100, 9000, 8, 1000, 0, false, true}};
    struct rig r = rig_open();
    struct stage s = stage_open(&r, MIB, 500);

    check_all(&r, &s, shapes, sizeof(shapes) / sizeof(shapes[0]), r.gpu ? 3 : 1);
    stage_close(&r, &s);
    rig_close(&r);
}

T_TEST(many_blocks)
{
    if (T_TSAN)
        T_SKIP("one thread; threads_with_a_stream_each has all paths");
    static const struct shape shapes[] = {
        {3000, 3000, 1, 200, 20, false, true}, {3000, 2048, 256, 0, 0, true, true}, {3000, 4000, 1, 0, 0, false, false}};
    struct rig r = rig_open();
    struct stage s = stage_open(&r, 8 * MIB, 3000);

    check_all(&r, &s, shapes, sizeof(shapes) / sizeof(shapes[0]), r.gpu ? 4 : 1);
    stage_close(&r, &s);
    rig_close(&r);
}

T_TEST(large_blocks)
{
    if (T_TSAN)
        T_SKIP("one thread; threads_with_a_stream_each has all paths");
    static const struct shape shapes[] = {{9, 5 * MIB, 1, 100, 0, false, true},
                                          {100, 300 * KIB, 1, 0, 0, false, false},
                                          {6, 5 * MIB, 4096, 0, 0, true, true}};
    struct rig r = rig_open();
    struct stage s = stage_open(&r, 32 * MIB, 100);

    check_all(&r, &s, shapes, sizeof(shapes) / sizeof(shapes[0]), r.gpu ? 4 : 1);
    stage_close(&r, &s);
    rig_close(&r);
}

/* More than all chunks hold that a device packs into: each is used several times in a call, and again by the next. */
T_TEST(more_than_the_chunks)
{
    if (T_TSAN)
        T_SKIP("one thread; threads_with_a_stream_each has all paths");
    const struct shape shapes[] = {{8192, 64 * KIB, 4096, 0, 0, true, true}, {40, 11 * MIB, 1, 1000, 0, false, false}};
    struct rig r = rig_open();
    struct stage s = stage_open(&r, (!r.gpu ? 16 : T_SANITIZED ? 64 : 300) * MIB, 8192);

    for (size_t i = 0; i < 2; i++)
        for (int p = 0; p < PATHS; p++)
            T_FOR_SEEDS (seed, r.gpu ? 3 : 1)
                if (has_path(&r, SIDE_COPY_D2H, paths[p]))
                    check_shape(&r, &s, SIDE_COPY_D2H, paths[p], &shapes[i], seed);
    stage_close(&r, &s);
    rig_close(&r);
}

/* Memory that was pinned in parts: one block may lie in several. */
T_TEST(blocks_across_registrations)
{
    struct rig r = rig_open();
    enum { PAGES = 12, PAGE = 4096 };
    unsigned char *host = NULL, *device = device_make(r.device, PAGES * PAGE), *want = host_make(PAGES * PAGE);

    if (!r.props.can_register)
        T_SKIP("the device does not register memory");
    assert_int_equal(posix_memalign((void **)&host, PAGE, PAGES * PAGE), 0);
    fill(want, PAGES * PAGE, 5);
    memcpy(host, want, PAGES * PAGE);
    for (size_t i = 0; i < PAGES; i += 3)
        T_OK(side_memory_pin(r.device, host + i * PAGE, 3 * PAGE));
    for (int p = 0; p < PATHS; p++) {
        side_piece pieces[2] = {{device, host, 5 * PAGE + 100},
                                {device + 5 * PAGE + 100, host + 5 * PAGE + 100, 7 * PAGE - 100}};
        if (!has_path(&r, SIDE_COPY_D2H, paths[p]))
            continue;
        T_OK(side_memset_async(r.stream, device, 0, PAGES * PAGE));
        T_OK(side_copy_blocks(r.stream, SIDE_COPY_H2D, pieces, 2,
                              paths[p] == SIDE_PATH_PACK ? SIDE_PATH_GATHER : paths[p]));
        sync_stream(r.stream);
        memset(host, 0, PAGES * PAGE);
        for (int i = 0; i < 2; i++)
            pieces[i] = (side_piece){host + (pieces[i].src - (const void *)host), pieces[i].dst, pieces[i].bytes};
        T_OK(side_copy_blocks(r.stream, SIDE_COPY_D2H, pieces, 2, paths[p]));
        sync_stream(r.stream);
        check_equal(host, want, PAGES * PAGE, side_path_name(paths[p]));
    }
    for (size_t i = 0; i < PAGES; i += 3)
        T_OK(side_memory_unpin(r.device, host + i * PAGE));
    free(host);
    free(want);
    side_device_free(r.device, device);
    rig_close(&r);
}

/* ---------------------------------------------------------------- order */

enum { BLOCKS = 64, BLOCK = 4096, AREA = BLOCKS * BLOCK, ROUNDS = 20 };

/* A writer before and a reader after, on the same stream; each round overwrites what the one before read and wrote. */
static void check_order(side_device *device, side_stream *stream, side_path path, bool out, int salt)
{
    unsigned char *host = pinned_make(device, ROUNDS * AREA), *back = pinned_make(device, ROUNDS * AREA);
    unsigned char *x = device_make(device, AREA), *y = device_make(device, AREA);
    side_piece pieces[BLOCKS];

    for (size_t i = 0; i < ROUNDS * AREA; i++)
        host[i] = (unsigned char)(i / AREA + i / BLOCK * 3 + (size_t)salt);
    memset(back, 0, ROUNDS * AREA);
    for (size_t k = 0; k < ROUNDS; k++) {
        unsigned char *from = host + k * AREA, *to = back + k * AREA;
        for (size_t i = 0; i < BLOCKS; i++) {
            const size_t j = (i * 29 + k) % BLOCKS;
            pieces[i] = out ? (side_piece){to + j * BLOCK, y + i * BLOCK, BLOCK}
                            : (side_piece){x + i * BLOCK, from + j * BLOCK, BLOCK};
        }
        if (out)
            T_OK(side_copy_async(stream, SIDE_COPY_H2D, x, from, AREA));
        else
            T_OK(side_copy_blocks(stream, SIDE_COPY_H2D, pieces, BLOCKS, path));
        T_OK(side_copy_async(stream, SIDE_COPY_D2D, y, x, AREA));
        if (out)
            T_OK(side_copy_blocks(stream, SIDE_COPY_D2H, pieces, BLOCKS, path));
        else
            T_OK(side_copy_async(stream, SIDE_COPY_D2H, to, y, AREA));
        T_OK(side_memset_async(stream, y, 0xee, AREA)); /* what was read goes at once */
    }
    sync_stream(stream);
    for (size_t k = 0; k < ROUNDS; k++)
        for (size_t i = 0; i < BLOCKS; i++) {
            const size_t j = (i * 29 + k) % BLOCKS;
            const unsigned char *got = back + k * AREA + (out ? j : i) * BLOCK;
            if (memcmp(got, host + k * AREA + (out ? i : j) * BLOCK, BLOCK) != 0)
                T_FAIL("path %s, %s, round %zu: block %zu holds %02x", side_path_name(path), out ? "out" : "in", k, i,
                       got[0]);
        }
    pinned_free(device, host);
    pinned_free(device, back);
    side_device_free(device, x);
    side_device_free(device, y);
}

T_TEST(blocks_keep_the_stream_s_order)
{
    struct rig r = rig_open();

    for (int p = 0; p < PATHS; p++) {
        if (has_path(&r, SIDE_COPY_H2D, paths[p]))
            check_order(r.device, r.stream, paths[p], false, p);
        if (has_path(&r, SIDE_COPY_D2H, paths[p]))
            check_order(r.device, r.stream, paths[p], true, p);
    }
    rig_close(&r);
}

/* Threads with a stream each, all paths at once. */
struct worker {
    const struct rig *rig;
    int number;
};

static void *work(void *p)
{
    const struct worker *w = p;
    side_stream *stream = stream_make(w->rig->device);

    for (int k = 0; k < PATHS; k++) {
        const side_path path = paths[(k + w->number) % PATHS];
        if (has_path(w->rig, SIDE_COPY_H2D, path))
            check_order(w->rig->device, stream, path, false, w->number);
        if (has_path(w->rig, SIDE_COPY_D2H, path))
            check_order(w->rig->device, stream, path, true, w->number);
    }
    side_stream_destroy(stream);
    return NULL;
}

T_TEST(threads_with_a_stream_each)
{
    enum { THREADS = 4 };
    struct rig r = rig_open();
    struct worker workers[THREADS];
    pthread_t threads[THREADS];

    for (int i = 0; i < THREADS; i++) {
        workers[i] = (struct worker){&r, i};
        assert_int_equal(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    rig_close(&r);
}

/* Two streams of one thread, each queued far ahead of the device; one packs while the other packs, gathers, or waits for it. */
T_TEST(two_streams_at_once)
{
    enum { DEEP = 12 };
    struct rig r = rig_open();
    side_stream *streams[2] = {r.stream, stream_make(r.device)};
    side_event *done = event_make(r.device, false);
    unsigned char *in[2], *out[2], *data[2];
    const side_path out_path = r.props.kernels ? SIDE_PATH_PACK : SIDE_PATH_BATCH;
    const side_path in_path = r.props.kernels ? SIDE_PATH_GATHER : SIDE_PATH_BATCH;
    static side_piece pieces[BLOCKS * 16];
    const size_t count = BLOCKS * 16, bytes = count * BLOCK;

    for (int i = 0; i < 2; i++) {
        in[i] = pinned_make(r.device, bytes);
        out[i] = pinned_make(r.device, bytes);
        data[i] = device_make(r.device, bytes);
        fill(in[i], bytes, 7 + (uint64_t)i);
    }
    for (int k = 0; k < DEEP; k++)
        for (int i = 0; i < 2; i++) {
            for (size_t b = 0; b < count; b++)
                pieces[b] = (side_piece){data[i] + b * BLOCK, in[i] + (b * 37 % count) * BLOCK, BLOCK};
            T_OK(side_copy_blocks(streams[i], SIDE_COPY_H2D, pieces, count, in_path));
            for (size_t b = 0; b < count; b++)
                pieces[b] = (side_piece){out[i] + (b * 37 % count) * BLOCK, data[i] + b * BLOCK, BLOCK};
            T_OK(side_copy_blocks(streams[i], SIDE_COPY_D2H, pieces, count, out_path));
            T_OK(side_event_record(done, streams[i]));
            if (k % 3 == 2) /* and now in turns */
                T_OK(side_stream_wait(streams[1 - i], done));
        }
    for (int i = 0; i < 2; i++) {
        sync_stream(streams[i]);
        check_equal(out[i], in[i], bytes, "there and back");
        pinned_free(r.device, in[i]);
        pinned_free(r.device, out[i]);
        side_device_free(r.device, data[i]);
    }
    side_event_destroy(done);
    side_stream_destroy(streams[1]);
    rig_close(&r);
}

/* A ring of slots: the copy stream fills slots by blocks, the other one takes them and copies them out by blocks. */
T_TEST(blocks_through_slots)
{
    enum { ITEMS = 10 };
    struct rig r = rig_open();
    side_stream *reader = stream_make(r.device);
    unsigned char *in = pinned_make(r.device, ITEMS * AREA), *out = pinned_make(r.device, ITEMS * AREA);
    side_slots_options o = SIDE_SLOTS_OPTIONS_INIT;
    side_slots *ring = NULL;
    side_slot slot;
    side_piece pieces[BLOCKS];

    o.count = 2;
    o.slot_bytes = AREA;
    T_OK(side_slots_create(r.device, &o, &ring));
    fill(in, ITEMS * AREA, 11);
    for (size_t k = 0; k < ITEMS; k++) {
        T_OK(side_slots_acquire(ring, k, r.stream, &slot));
        for (size_t i = 0; i < BLOCKS; i++)
            pieces[i] = (side_piece){(char *)slot.data + i * BLOCK, in + k * AREA + (BLOCKS - 1 - i) * BLOCK, BLOCK};
        T_OK(side_copy_blocks(r.stream, SIDE_COPY_H2D, pieces, BLOCKS,
                              r.props.kernels ? SIDE_PATH_GATHER : SIDE_PATH_BATCH));
        T_OK(side_slots_publish(ring, &slot, r.stream, NULL));
        T_OK(side_slots_take(ring, k, reader, &slot));
        for (size_t i = 0; i < BLOCKS; i++)
            pieces[i] = (side_piece){out + k * AREA + (BLOCKS - 1 - i) * BLOCK, (char *)slot.data + i * BLOCK, BLOCK};
        T_OK(side_copy_blocks(reader, SIDE_COPY_D2H, pieces, BLOCKS, r.props.kernels ? SIDE_PATH_PACK : SIDE_PATH_BATCH));
        T_OK(side_slots_release(ring, &slot, reader));
    }
    sync_stream(reader);
    check_equal(out, in, ITEMS * AREA, "through the ring");
    side_slots_destroy(ring);
    pinned_free(r.device, in);
    pinned_free(r.device, out);
    side_stream_destroy(reader);
    rig_close(&r);
}

/* ---------------------------------------------------------------- what is refused */

T_TEST(bad_blocks_are_refused)
{
    struct rig r = rig_open();
    char *device = device_make(r.device, 64), *host = pinned_make(r.device, 64);
    side_piece pieces[2] = {{device, host, 16}, {device + 16, NULL, 16}};

    T_OK(side_copy_blocks(r.stream, SIDE_COPY_H2D, NULL, 0, SIDE_PATH_LOOP));
    T_STATUS(side_copy_blocks(NULL, SIDE_COPY_H2D, pieces, 1, SIDE_PATH_LOOP), SIDE_INVALID);
    T_STATUS(side_copy_blocks(r.stream, SIDE_COPY_H2D, NULL, 1, SIDE_PATH_LOOP), SIDE_INVALID);
    T_STATUS(side_copy_blocks(r.stream, (side_copy_kind)3, pieces, 1, SIDE_PATH_LOOP), SIDE_INVALID);
    T_STATUS(side_copy_blocks(r.stream, SIDE_COPY_H2D, pieces, 1, SIDE_PATH_COUNT), SIDE_INVALID);
    T_STATUS(side_copy_blocks(r.stream, SIDE_COPY_H2D, pieces, 1, (side_path)-1), SIDE_INVALID);
    T_STATUS(side_copy_blocks(r.stream, SIDE_COPY_H2D, pieces, 2, SIDE_PATH_AUTO), SIDE_INVALID);
    assert_non_null(strstr(side_last_error()->message, "piece 1"));
    pieces[1].bytes = 0;
    T_OK(side_copy_blocks(r.stream, SIDE_COPY_H2D, pieces, 2, SIDE_PATH_AUTO));
    T_STATUS(side_copy_blocks(r.stream, SIDE_COPY_H2D, pieces, 1, SIDE_PATH_PACK), SIDE_UNSUPPORTED);
    T_STATUS(side_copy_blocks(r.stream, SIDE_COPY_D2D, pieces, 1, SIDE_PATH_PACK), SIDE_UNSUPPORTED);
    assert_string_equal(side_path_name(SIDE_PATH_LOOP), "loop");
    assert_string_equal(side_path_name(SIDE_PATH_PACK), "pack");
    assert_string_equal(side_path_name(SIDE_PATH_COUNT), "unknown path");
    sync_stream(r.stream);
    side_device_free(r.device, device);
    pinned_free(r.device, host);
    rig_close(&r);
}

/* Kernels do not reach pageable memory, or not at a price worth it: told by piece; AUTO takes another way. */
T_TEST(pageable_blocks)
{
    struct rig r = rig_open();
    enum { N = 5, BYTES = 5000 };
    unsigned char *device = device_make(r.device, N * BYTES), *pinned = pinned_make(r.device, N * BYTES);
    unsigned char *pageable = host_make(BYTES), *want = host_make(N * BYTES);
    side_piece in[N], out[N];

    fill(want, N * BYTES, 1);
    memcpy(pinned, want, N * BYTES);
    memcpy(pageable, want + 3 * BYTES, BYTES);
    for (size_t i = 0; i < N; i++) {
        unsigned char *host = i == 3 ? pageable : pinned + i * BYTES;
        in[i] = (side_piece){device + i * BYTES, host, BYTES};
        out[i] = (side_piece){host, device + i * BYTES, BYTES};
    }
    if (r.props.kernels) {
        T_STATUS(side_copy_blocks(r.stream, SIDE_COPY_H2D, in, N, SIDE_PATH_GATHER), SIDE_INVALID);
        assert_non_null(strstr(side_last_error()->message, "piece 3"));
        T_STATUS(side_copy_blocks(r.stream, SIDE_COPY_D2H, out, N, SIDE_PATH_GATHER), SIDE_INVALID);
        T_STATUS(side_copy_blocks(r.stream, SIDE_COPY_D2H, out, N, SIDE_PATH_PACK), SIDE_INVALID);
        assert_non_null(strstr(side_last_error()->message, "piece 3"));
    }
    for (int p = 0; p < 3; p++) { /* AUTO, LOOP, BATCH */
        T_OK(side_memset_async(r.stream, device, 0, N * BYTES));
        T_OK(side_copy_blocks(r.stream, SIDE_COPY_H2D, in, N, paths[p]));
        sync_stream(r.stream);
        memset(pageable, 0, BYTES);
        memset(pinned, 0, N * BYTES);
        T_OK(side_copy_blocks(r.stream, SIDE_COPY_D2H, out, N, paths[p]));
        sync_stream(r.stream);
        memcpy(pinned + 3 * BYTES, pageable, BYTES);
        check_equal(pinned, want, N * BYTES, side_path_name(paths[p]));
    }
    pinned_free(r.device, pinned);
    side_device_free(r.device, device);
    free(pageable);
    free(want);
    rig_close(&r);
}

/* The legacy stream of a GPU waits for others, and a capture minds it: no kernels of ours there. */
T_TEST(blocks_on_a_wrapped_stream)
{
    struct rig r = rig_open();
    side_stream *wrapped = NULL;
    char *device = device_make(r.device, 64), *host = pinned_make(r.device, 64);
    side_piece piece = {device, host, 64};

    T_OK(side_stream_wrap(r.device, NULL, &wrapped));
    for (int p = 0; p < PATHS; p++)
        if (has_path(&r, SIDE_COPY_H2D, paths[p]))
            T_STATUS(side_copy_blocks(wrapped, SIDE_COPY_H2D, &piece, 1, paths[p]),
                     r.gpu && paths[p] == SIDE_PATH_GATHER ? SIDE_UNSUPPORTED : SIDE_OK);
    sync_stream(wrapped);
    side_stream_destroy(wrapped);
    side_device_free(r.device, device);
    pinned_free(r.device, host);
    rig_close(&r);
}

T_MAIN(EVERY_LONG(small_blocks, 60), EVERY_LONG(many_blocks, 120), EVERY_LONG(large_blocks, 120),
       EVERY_LONG(more_than_the_chunks, 120), EVERY(blocks_across_registrations), EVERY(blocks_keep_the_stream_s_order),
       EVERY_LONG(threads_with_a_stream_each, 120), EVERY_LONG(two_streams_at_once, 60), EVERY(blocks_through_slots),
       EVERY(bad_blocks_are_refused), EVERY(pageable_blocks), EVERY(blocks_on_a_wrapped_stream))
