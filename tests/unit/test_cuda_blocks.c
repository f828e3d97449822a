/* SPDX-License-Identifier: MIT
 *
 * Scattered blocks on a CUDA driver that is not there: that tables say what kernels need, that chunks are used again when they are released and not before, that
 * whatever fails leaves nothing behind and hangs nobody. */
#include "fake_cuda.h"

#include "cuda.h"
#include "error.h"
#include "os.h"

#define D   cuda_device_ops
#define MIB ((size_t)1 << 20)

struct bench {
    dev_context *context;
    dev_stream *stream;
    unsigned char *device, *host, *want; /* room bytes each; `want` is ours */
    size_t room;
    side_piece *pieces;
};

static struct bench bench_open(size_t room)
{
    struct bench b = {.room = room};

    T_OK(D.open("", &b.context));
    T_OK(D.stream_create(b.context, &b.stream));
    T_OK(D.alloc(b.context, room, (void **)&b.device));
    T_OK(D.host_alloc(b.context, room, (void **)&b.host));
    b.want = malloc(room);
    b.pieces = malloc(200000 * sizeof(*b.pieces));
    assert_true(b.want != NULL && b.pieces != NULL);
    return b;
}

static void bench_close(struct bench *b)
{
    free(b->want);
    free(b->pieces);
    D.host_free(b->context, b->host);
    D.free(b->context, b->device);
    D.stream_destroy(b->stream);
    D.close(b->context);
    fake_clean();
}

static void message_has(const char *text)
{
    if (strstr(side_last_error()->message, text) == NULL)
        T_FAIL("\"%s\" does not say \"%s\"", side_last_error()->message, text);
}

/* Pieces of 0 to `most` bytes all over the room, destinations in order but for every third, which swaps places with its neighbour. */
static size_t cut(struct bench *b, side_copy_kind kind, size_t most, bool equal, uint64_t seed)
{
    t_rng rng = t_rng_make(seed);
    unsigned char *dst = kind == SIDE_COPY_D2H ? b->host : b->device, *src = kind == SIDE_COPY_H2D ? b->host : b->device;
    const size_t half = b->room / 2;
    size_t at = 0, n = 0;

    if (kind == SIDE_COPY_D2D)
        dst += half; /* apart from the sources */
    t_rng_fill(&rng, src, half);
    memset(dst + (kind == SIDE_COPY_D2D ? 0 : half), 0x77, half);
    if (kind != SIDE_COPY_D2D)
        dst += half;
    memset(b->want, 0x77, half);
    for (; n < 200000; n++) {
        const size_t bytes = equal ? most : t_rng_below(&rng, most + 1);
        if (at + bytes > half)
            break;
        const size_t from = equal ? (half - at - bytes) / 16 * 16 : t_rng_below(&rng, half - bytes + 1);
        b->pieces[n] = (side_piece){dst + at, src + from, bytes};
        memcpy(b->want + at, src + from, bytes);
        at += bytes;
        if (!equal && t_rng_below(&rng, 5) == 0)
            at += t_rng_below(&rng, 100);
    }
    for (size_t i = 3; i < n; i += 3) {
        const side_piece p = b->pieces[i];
        b->pieces[i] = b->pieces[i - 1];
        b->pieces[i - 1] = p;
    }
    return n;
}

static void check(const struct bench *b, side_copy_kind kind, const char *what)
{
    const unsigned char *got = (kind == SIDE_COPY_D2H ? b->host : b->device) + b->room / 2;

    for (size_t i = 0; i < b->room / 2 && memcmp(got, b->want, b->room / 2) != 0; i++)
        if (got[i] != b->want[i])
            T_FAIL("%s: byte %zu is %02x, not %02x", what, i, got[i], b->want[i]);
}

/* ---------------------------------------------------------------- what arrives */

T_TEST(blocks_arrive)
{
    T_ONE_THREAD();
    static const size_t most[] = {1, 40, 4095, 4096, 4097, 70000, 3 * MIB};

    fake_begin();
    struct bench b = bench_open(16 * MIB);
    for (int path = SIDE_PATH_LOOP; path <= SIDE_PATH_PACK; path++)
        for (int kind = SIDE_COPY_H2D; kind <= SIDE_COPY_D2D; kind++)
            for (size_t i = 0; i < sizeof(most) / sizeof(most[0]); i++) {
                if (path == SIDE_PATH_PACK && kind != SIDE_COPY_D2H)
                    continue;
                const size_t n = cut(&b, (side_copy_kind)kind, most[i], i % 3 == 2, i + 1);
                char what[80];
                snprintf(what, sizeof(what), "path %s, kind %d, %zu pieces of %zu", side_path_name((side_path)path),
                         kind, n, most[i]);
                T_OK(D.copy_blocks(b.stream, (side_copy_kind)kind, b.pieces, n, (side_path)path));
                check(&b, (side_copy_kind)kind, what);
            }
    assert_true(fake_kernels.gathers > 20 && fake_kernels.packs > 6);
    T_STATUS(D.copy_blocks(b.stream, SIDE_COPY_H2D, b.pieces, 1, SIDE_PATH_PACK), SIDE_UNSUPPORTED);
    bench_close(&b);
}

/* A kernel a call, of few thread blocks, and the driver is asked about each allocation once. */
T_TEST(gather_asks_little)
{
    T_ONE_THREAD();
    fake_begin();
    struct bench b = bench_open(16 * MIB);
    const size_t n = cut(&b, SIDE_COPY_H2D, 4096, true, 1);
    assert_int_equal(n, 2048);
    fake.pointer_queries = 0;
    T_OK(D.copy_blocks(b.stream, SIDE_COPY_H2D, b.pieces, n, SIDE_PATH_GATHER));
    assert_int_equal(fake_kernels.gathers, 1);
    assert_int_equal(fake.pointer_queries, 2);
    assert_true(fake.grid == 4 && fake.block == 1024);
    const int tables = fake.live[FAKE_HOST];
    for (int i = 0; i < 10; i++) /* the table is used again */
        T_OK(D.copy_blocks(b.stream, SIDE_COPY_H2D, b.pieces, n, SIDE_PATH_GATHER));
    assert_int_equal(fake.live[FAKE_HOST], tables);
    /* more than a table holds: several launches */
    const size_t many = cut(&b, SIDE_COPY_H2D, 32, true, 2);
    assert_int_equal(many, 200000);
    fake_kernels.gathers = 0;
    memset(b.want + 200000 * 32, 0x77, b.room / 2 - 200000 * 32);
    for (size_t i = 0; i < many; i++) /* and twice as many, by repeating them */
        assert_int_equal(b.pieces[i].bytes, 32);
    T_OK(D.copy_blocks(b.stream, SIDE_COPY_H2D, b.pieces, many, SIDE_PATH_GATHER));
    assert_int_equal(fake_kernels.gathers, 1);
    check(&b, SIDE_COPY_H2D, "many");
    bench_close(&b);
}

/* Several launches where a table is not enough: pieces end in the middle of one. */
T_TEST(tables_have_an_end)
{
    T_ONE_THREAD();
    enum { N = 700000 };
    fake_begin();
    struct bench b = bench_open(2 * N);
    side_piece *pieces = malloc(N * sizeof(*pieces));

    assert_non_null(pieces);
    for (side_copy_kind kind = SIDE_COPY_H2D; kind <= SIDE_COPY_D2H; kind++) {
        unsigned char *dst = kind == SIDE_COPY_H2D ? b.device : b.host, *src = kind == SIDE_COPY_H2D ? b.host : b.device;
        t_rng rng = t_rng_make(3);
        t_rng_fill(&rng, src, N);
        memset(dst + N, 0, N);
        for (size_t i = 0; i < N; i++) {
            pieces[i] = (side_piece){dst + N + i, src + (i * 3) % N, 1};
            b.want[i] = src[(i * 3) % N];
        }
        fake_kernels.gathers = fake_kernels.packs = 0;
        T_OK(D.copy_blocks(b.stream, kind, pieces, N, kind == SIDE_COPY_H2D ? SIDE_PATH_GATHER : SIDE_PATH_PACK));
        check(&b, kind, "single bytes");
        assert_true(fake_kernels.gathers + fake_kernels.packs > 2);
    }
    free(pieces);
    bench_close(&b);
}

/* ---------------------------------------------------------------- tables */

/* Tables in flight are not written again, and there are so many of them at most. */
T_TEST(tables_are_bounded)
{
    T_ONE_THREAD();
    fake_begin();
    struct bench b = bench_open(2 * MIB);
    const size_t n = cut(&b, SIDE_COPY_H2D, 4096, true, 1);
    const int before = fake.live[FAKE_HOST];

    fake.pending = -1; /* nothing comes to an end */
    for (int i = 0; i < 64; i++)
        T_OK(D.copy_blocks(b.stream, SIDE_COPY_H2D, b.pieces, n, SIDE_PATH_GATHER));
    assert_int_equal(fake.live[FAKE_HOST] - before, 64);
    fake.pending = 1000; /* the 65th waits */
    T_OK(D.copy_blocks(b.stream, SIDE_COPY_H2D, b.pieces, n, SIDE_PATH_GATHER));
    assert_int_equal(fake.live[FAKE_HOST] - before, 64);
    fake.pending = 0;
    /* a larger one takes the place of one that is done */
    static side_piece many[3000];
    for (size_t i = 0; i < 3000; i++)
        many[i] = (side_piece){b.device + MIB + i, b.host + i, 1};
    T_OK(D.copy_blocks(b.stream, SIDE_COPY_H2D, many, 3000, SIDE_PATH_GATHER));
    assert_int_equal(fake.live[FAKE_HOST] - before, 64);
    bench_close(&b);
}

/* No memory for tables: another path is to be taken, and told so. */
T_TEST(no_memory_for_tables)
{
    fake_begin();
    struct bench b = bench_open(2 * MIB);
    const size_t n = cut(&b, SIDE_COPY_H2D, 4096, true, 1);

    fake.fail_name = "cuMemHostAlloc";
    fake.code = CUDA_ERROR_OUT_OF_MEMORY;
    T_STATUS(D.copy_blocks(b.stream, SIDE_COPY_H2D, b.pieces, n, SIDE_PATH_GATHER), SIDE_UNSUPPORTED);
    message_has("no pinned memory");
    assert_int_equal(side_last_error()->status, SIDE_UNSUPPORTED);
    fake.fail_name = NULL;
    T_OK(D.copy_blocks(b.stream, SIDE_COPY_H2D, b.pieces, n, SIDE_PATH_GATHER));
    fake.fail_name = "cuMemHostAlloc"; /* there is one, which is in flight for a while */
    fake.pending = 20;
    T_OK(D.copy_blocks(b.stream, SIDE_COPY_H2D, b.pieces, n, SIDE_PATH_GATHER));
    fake.fail_name = NULL;
    fake.pending = 0;
    bench_close(&b);
}

/* ---------------------------------------------------------------- pack */

/* What lies together on the host leaves as one copy; what does not, as a batch. */
T_TEST(runs_leave_together)
{
    T_ONE_THREAD();
    fake_begin();
    struct bench b = bench_open(16 * MIB);
    size_t n = 0;

    for (; n < 256; n++) /* scattered on the device, in a row on the host */
        b.pieces[n] = (side_piece){b.host + n * 4096, b.device + n * 37 % 256 * 4096, 4096};
    fake.singles = fake.batches = 0;
    T_OK(D.copy_blocks(b.stream, SIDE_COPY_D2H, b.pieces, n, SIDE_PATH_PACK));
    assert_true(fake.singles == 1 && fake.batches == 0);
    for (n = 0; n < 256; n++)
        b.pieces[n].dst = b.host + n * 8192;
    T_OK(D.copy_blocks(b.stream, SIDE_COPY_D2H, b.pieces, n, SIDE_PATH_PACK));
    assert_true(fake.singles == 1 && fake.batches == 1 && fake.longest == 256);
    assert_int_equal(fake.priority, -5);
    assert_true(fake.grid == 2 && fake.block == 1024);
    bench_close(&b);
}

static size_t pack_pieces(struct bench *b, size_t bytes, size_t piece, uint64_t seed)
{
    t_rng rng = t_rng_make(seed);
    const size_t n = bytes / piece;

    t_rng_fill(&rng, b->device, bytes);
    memset(b->host, 0x11, bytes);
    for (size_t i = 0; i < n; i++) {
        const size_t from = (n - 1 - i) * piece;
        b->pieces[i] = (side_piece){b->host + i * piece, b->device + from, piece};
        memcpy(b->want + i * piece, b->device + from, piece);
    }
    return n;
}

/* Many times round the chunks, in one call and over many; numbers pass 2^32. */
T_TEST(chunks_go_round)
{
    T_ONE_THREAD();
    const size_t bytes = (T_ASAN ? 100 : 260) * MIB;
    fake_begin();
    struct bench b = bench_open(bytes);

    for (int k = 0; k < 3; k++) {
        const size_t n = pack_pieces(&b, bytes, MIB - 4096 * (size_t)k, (uint64_t)k);
        T_OK(D.copy_blocks(b.stream, SIDE_COPY_D2H, b.pieces, n, SIDE_PATH_PACK));
        assert_memory_equal(b.host, b.want, n * b.pieces[0].bytes);
        assert_int_equal(fake_kernels.rests, k + 1);
        if (k == 0)
            b.context->pack.number = 0xfffffffe; /* the counters are brought there by the next kernel, as a real one's are */
        if (k == 0)
            for (int i = 0; i < 4; i++)
                fake_pack.state->ready[i] = fake_pack.state->released[i] = 0xfffffffe;
    }
    assert_true(b.context->pack.number < 1000);
    for (int k = 0; k < 20; k++) { /* the small chunks: at most 8 MiB */
        const size_t n = pack_pieces(&b, MIB * (size_t)(k % 8 + 1), 5000, (uint64_t)k);
        T_OK(D.copy_blocks(b.stream, SIDE_COPY_D2H, b.pieces, n, SIDE_PATH_PACK));
        assert_memory_equal(b.host, b.want, n * 5000);
    }
    bench_close(&b);
}

/* A kernel that gave up leaves chunks with other bytes in them: all is stored again, behind them. */
T_TEST(a_kernel_that_gives_up)
{
    T_ONE_THREAD();
    fake_begin();
    struct bench b = bench_open(100 * MIB);

    for (int k = 0; k < 4; k++) {
        const size_t n = pack_pieces(&b, b.room, 300000, (uint64_t)k);
        fake_pack.gives_up = k % 2 == 0;
        T_OK(D.copy_blocks(b.stream, SIDE_COPY_D2H, b.pieces, n, SIDE_PATH_PACK));
        assert_memory_equal(b.host, b.want, n * 300000);
    }
    bench_close(&b);
}

/* Chunks are memory of the device: large ones where there is some, else small ones, else another path. */
T_TEST(little_memory_for_chunks)
{
    T_ONE_THREAD();
    fake_begin();
    struct bench b = bench_open(20 * MIB);
    const size_t n = pack_pieces(&b, b.room, MIB, 1);

    fake.fail_name = "cuMemAlloc";
    fake.code = CUDA_ERROR_OUT_OF_MEMORY;
    T_STATUS(D.copy_blocks(b.stream, SIDE_COPY_D2H, b.pieces, n, SIDE_PATH_PACK), SIDE_UNSUPPORTED);
    message_has("path pack");
    fake.fail_name = NULL;
    const int before = fake.live[FAKE_MEMORY];
    T_OK(D.copy_blocks(b.stream, SIDE_COPY_D2H, b.pieces, 1, SIDE_PATH_PACK));
    assert_int_equal(fake.live[FAKE_MEMORY] - before, 2); /* the counters, four chunks */
    fake.fail_name = "cuMemAlloc";
    T_OK(D.copy_blocks(b.stream, SIDE_COPY_D2H, b.pieces, n, SIDE_PATH_PACK));
    assert_memory_equal(b.host, b.want, n * MIB);
    fake.fail_name = NULL;
    T_OK(D.copy_blocks(b.stream, SIDE_COPY_D2H, b.pieces, n, SIDE_PATH_PACK));
    assert_int_equal(fake.live[FAKE_MEMORY] - before, 3);
    bench_close(&b);
}

T_TEST(no_stream_memory_operations)
{
    static struct cu_api old;

    for (int how = 0; how < 3; how++) {
        fake_begin();
        old = fake_cu;
        if (how == 0)
            old.cuStreamWaitValue32 = NULL;
        if (how == 1)
            old.cuStreamWriteValue32 = NULL;
        cu_test_api(&old);
        struct bench b = bench_open(MIB);
        const size_t n = pack_pieces(&b, MIB, 4096, 1);
        fake.fail_name = how == 2 ? "cuStreamWaitValue32" : NULL;
        fake.code = CUDA_ERROR_NOT_SUPPORTED;
        T_STATUS(D.copy_blocks(b.stream, SIDE_COPY_D2H, b.pieces, n, SIDE_PATH_PACK), SIDE_UNSUPPORTED);
        fake.fail_name = NULL;
        T_STATUS(D.copy_blocks(b.stream, SIDE_COPY_D2H, b.pieces, n, SIDE_PATH_PACK), SIDE_UNSUPPORTED);
        message_has("no stream memory operations");
        T_OK(D.copy_blocks(b.stream, SIDE_COPY_D2H, b.pieces, n, SIDE_PATH_GATHER));
        bench_close(&b);
    }
}

/* ---------------------------------------------------------------- what is refused */

T_TEST(what_kernels_cannot_reach)
{
    static unsigned char pageable[64];
    dev_stream *legacy = NULL;

    fake_begin();
    struct bench b = bench_open(MIB);
    side_piece in[3] = {{b.device, b.host, 16}, {b.device + 16, NULL, 0}, {b.device + 32, pageable, 16}};
    side_piece out[2] = {{b.host, b.device, 16}, {pageable, b.device + 16, 16}};
    T_STATUS(D.copy_blocks(b.stream, SIDE_COPY_H2D, in, 3, SIDE_PATH_GATHER), SIDE_INVALID);
    message_has("piece 2");
    message_has("side_memory_pin");
    T_STATUS(D.copy_blocks(b.stream, SIDE_COPY_D2H, out, 2, SIDE_PATH_PACK), SIDE_INVALID);
    message_has("piece 1");
    in[2].src = b.host + MIB - 8; /* begins in pinned memory and ends elsewhere */
    T_STATUS(D.copy_blocks(b.stream, SIDE_COPY_H2D, in, 3, SIDE_PATH_GATHER), SIDE_INVALID);
    message_has("piece 2");
    in[2] = (side_piece){pageable, b.host, 16};
    T_STATUS(D.copy_blocks(b.stream, SIDE_COPY_H2D, in, 3, SIDE_PATH_GATHER), SIDE_INVALID);
    message_has("is not memory of cuda:0");
    T_OK(D.copy_blocks(b.stream, SIDE_COPY_H2D, in, 2, SIDE_PATH_GATHER));
    T_OK(D.copy_blocks(b.stream, SIDE_COPY_H2D, in + 1, 1, SIDE_PATH_GATHER)); /* nothing to do */
    assert_int_equal(fake_kernels.gathers, 1);

    fake.capturing = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    T_STATUS(D.copy_blocks(b.stream, SIDE_COPY_H2D, in, 1, SIDE_PATH_GATHER), SIDE_UNSUPPORTED);
    message_has("captured");
    T_STATUS(D.copy_blocks(b.stream, SIDE_COPY_D2H, out, 1, SIDE_PATH_PACK), SIDE_UNSUPPORTED);
    T_OK(D.copy_blocks(b.stream, SIDE_COPY_H2D, in, 1, SIDE_PATH_BATCH));
    fake.capturing = 0;
    T_OK(D.stream_wrap(b.context, NULL, &legacy));
    T_STATUS(D.copy_blocks(legacy, SIDE_COPY_H2D, in, 1, SIDE_PATH_GATHER), SIDE_UNSUPPORTED);
    message_has("legacy");
    T_STATUS(D.copy_blocks(legacy, SIDE_COPY_D2H, out, 1, SIDE_PATH_PACK), SIDE_UNSUPPORTED);
    D.stream_destroy(legacy);
    bench_close(&b);

    fake_begin(); /* no kernels */
    setenv("SIDESTREAM_NO_FATBIN", "1", 1);
    fake_libraries(NULL, NULL, NULL);
    b = bench_open(MIB);
    in[0] = (side_piece){b.device, b.host, 16};
    out[0] = (side_piece){b.host, b.device, 16};
    T_STATUS(D.copy_blocks(b.stream, SIDE_COPY_H2D, in, 1, SIDE_PATH_GATHER), SIDE_UNSUPPORTED);
    assert_string_equal(side_last_error()->where, "side_copy_blocks");
    T_STATUS(D.copy_blocks(b.stream, SIDE_COPY_D2H, out, 1, SIDE_PATH_PACK), SIDE_UNSUPPORTED);
    bench_close(&b);
}

/* ---------------------------------------------------------------- threads */

struct worker {
    dev_context *context;
    unsigned char *device, *host;
    int number;
};

static void *work(void *p)
{
    enum { N = 40, PIECE = 60000 };
    const struct worker *w = p;
    dev_stream *s = NULL;
    side_piece pieces[N];
    unsigned char *host = w->host + w->number * N * PIECE * 2, *device = w->device + w->number * N * PIECE;

    T_OK(D.stream_create(w->context, &s));
    for (int round = 0; round < 10; round++) {
        for (size_t i = 0; i < (size_t)N * PIECE; i++)
            host[i] = (unsigned char)(i / PIECE * 7 + i + (size_t)round + (size_t)w->number);
        for (size_t i = 0; i < N; i++)
            pieces[i] = (side_piece){device + i * PIECE, host + (N - 1 - i) * PIECE, PIECE};
        T_OK(D.copy_blocks(s, SIDE_COPY_H2D, pieces, N, SIDE_PATH_GATHER));
        for (size_t i = 0; i < N; i++)
            pieces[i] = (side_piece){host + (2 * N - 1 - i) * PIECE, device + i * PIECE, PIECE};
        T_OK(D.copy_blocks(s, SIDE_COPY_D2H, pieces, N, SIDE_PATH_PACK));
        assert_memory_equal(host, host + N * PIECE, N * PIECE);
    }
    D.stream_destroy(s);
    return NULL;
}

T_TEST(threads)
{
    pthread_t thread[4];
    struct worker workers[4];

    fake_begin();
    struct bench b = bench_open(20 * MIB);
    for (int i = 0; i < 4; i++) {
        workers[i] = (struct worker){b.context, b.device, b.host, i};
        assert_int_equal(pthread_create(&thread[i], NULL, work, &workers[i]), 0);
    }
    for (int i = 0; i < 4; i++)
        pthread_join(thread[i], NULL);
    assert_true(fake_kernels.gathers == 40 && fake_kernels.packs == 40);
    bench_close(&b);
}

/* ---------------------------------------------------------------- what fails */

enum {
    FAULT_PIECES = 90,
    FAULT_PIECE = 150000
}; /* 13 MB: more chunks than slots, of the large and, where those fail, of the small kind */

/* Both paths, twice, so that what the first call left is used by the second; then all is given back. */
static side_status session(unsigned char *want)
{
    dev_context *c = NULL;
    dev_stream *s = NULL;
    void *device = NULL, *host = NULL;
    static side_piece in[FAULT_PIECES], out[FAULT_PIECES];
    const size_t bytes = (size_t)FAULT_PIECES * FAULT_PIECE;
    side_status status = D.open("", &c);

    if (status != SIDE_OK)
        return status;
    status = D.stream_create(c, &s);
    if (status == SIDE_OK)
        status = D.alloc(c, bytes, &device);
    if (status == SIDE_OK)
        status = D.host_alloc(c, bytes, &host);
    for (size_t i = 0; i < FAULT_PIECES && status == SIDE_OK; i++) {
        memset((char *)host + i * FAULT_PIECE, (int)i, FAULT_PIECE);
        in[i] = (side_piece){(char *)device + i * FAULT_PIECE, (char *)host + i * FAULT_PIECE, FAULT_PIECE};
        out[i] = (side_piece){(char *)host + (FAULT_PIECES - 1 - i) * FAULT_PIECE, (char *)device + i * FAULT_PIECE,
                              FAULT_PIECE};
    }
    if (status == SIDE_OK)
        memcpy(want, host, bytes);
    for (int k = 0; k < 2 && status == SIDE_OK; k++) {
        status = D.copy_blocks(s, SIDE_COPY_H2D, in, FAULT_PIECES, SIDE_PATH_GATHER);
        if (status == SIDE_OK)
            status = D.copy_blocks(s, SIDE_COPY_D2H, out, FAULT_PIECES, SIDE_PATH_PACK);
    }
    if (status == SIDE_OK)
        assert_memory_equal(host, want, bytes); /* there and back, turned over twice */
    if (fake_pack.runs)
        T_FAIL("a kernel runs on after %s failed", fake.failed);
    D.host_free(c, host);
    D.free(c, device);
    D.stream_destroy(s);
    D.close(c);
    return status;
}

T_TEST(each_call_fails_once)
{
    T_ONE_THREAD();
    static const int codes[] = {CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_ILLEGAL_ADDRESS,
                                CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_NOT_READY};
    unsigned char *want = malloc((size_t)FAULT_PIECES * FAULT_PIECE);

    assert_non_null(want);
    for (size_t i = 0; i < sizeof(codes) / sizeof(codes[0]); i += T_ASAN ? 2 : 1) {
        unsigned long n = 0, statuses = 0;
        for (bool failed = true; failed;) {
            fake_begin();
            fake.code = codes[i];
            fake.fail_at = ++n;
            const side_status status = session(want);
            failed = fake.failed != NULL;
            statuses += status != SIDE_OK;
            assert_true(failed || status == SIDE_OK);
            fake_clean();
        }
        if (n < 130 || statuses < n / 3)
            T_FAIL("code %d: %lu calls, %lu failures told", codes[i], n, statuses);
    }
    free(want);
}

/* For good: there is nothing to hang on, nor to loop for. */
T_TEST(each_function_fails_always)
{
    T_ONE_THREAD();
    static const struct {
        const char *name;
        side_status status;
    } cases[] = {
        {"cuPointerGetAttributes", SIDE_DEVICE_ERROR}, {"cuMemHostAlloc", SIDE_DEVICE_ERROR}, /* of the test itself */
        {"cuEventCreate", SIDE_UNSUPPORTED},           {"cuEventRecord", SIDE_DEVICE_ERROR},
        {"cuStreamWaitEvent", SIDE_DEVICE_ERROR},      {"cuLaunchKernel", SIDE_DEVICE_ERROR},
        {"cuStreamWaitValue32", SIDE_UNSUPPORTED}, /* when they are tried */
        {"cuStreamWriteValue32", SIDE_UNSUPPORTED},    {"cuMemcpyBatchAsync", SIDE_DEVICE_ERROR},
        {"cuStreamIsCapturing", SIDE_DEVICE_ERROR},    {"cuStreamCreateWithPriority", SIDE_UNSUPPORTED},
        {"cuMemsetD8Async", SIDE_UNSUPPORTED},         {"cuModuleGetFunction", SIDE_DEVICE_ERROR},
        {"cuCtxGetStreamPriorityRange", SIDE_OK}};
    unsigned char *want = malloc((size_t)FAULT_PIECES * FAULT_PIECE);

    assert_non_null(want);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        fake_begin();
        fake.fail_name = cases[i].name;
        fake.code = CUDA_ERROR_NOT_PERMITTED;
        const side_status status = session(want);
        if (status != cases[i].status)
            T_FAIL("%s: %s, %s", cases[i].name, side_status_name(status), side_last_error()->message);
        fake_clean();
    }
    free(want);
}

T_TEST(each_allocation_fails)
{
    T_ONE_THREAD();
    unsigned char *want = malloc((size_t)FAULT_PIECES * FAULT_PIECE);

    assert_non_null(want);
    for (unsigned long n = 1;; n++) {
        fake_begin();
        mem_fail_at(n);
        const side_status status = session(want);
        const unsigned long calls = mem_fail_at(0);
        fake_clean();
        if (calls < n) {
            T_OK(status);
            assert_true(n > 3);
            break;
        }
        T_STATUS(status, SIDE_NO_MEMORY);
    }
    free(want);
}

/* Behind the launch a copy fails: the kernel has ended when the caller hears of it, and the next call is as good as any. */
T_TEST(a_call_after_one_that_failed)
{
    T_ONE_THREAD();
    fake_begin();
    struct bench b = bench_open(100 * MIB);
    static const char *const names[] = {"cuMemcpyDtoHAsync", "cuStreamWriteValue32"};

    for (int k = 0; k < 2; k++) {
        size_t n = pack_pieces(&b, b.room, MIB, 1);
        T_OK(D.copy_blocks(b.stream, SIDE_COPY_D2H, b.pieces, n, SIDE_PATH_PACK));
        fake.fail_name = names[k];
        fake.code = CUDA_ERROR_NOT_PERMITTED;
        T_STATUS(D.copy_blocks(b.stream, SIDE_COPY_D2H, b.pieces, n, SIDE_PATH_PACK), SIDE_DEVICE_ERROR);
        assert_false(fake_pack.runs);
        fake.fail_name = NULL;
        n = pack_pieces(&b, b.room, MIB, 2);
        T_OK(D.copy_blocks(b.stream, SIDE_COPY_D2H, b.pieces, n, SIDE_PATH_PACK));
        assert_memory_equal(b.host, b.want, n * MIB);
    }
    bench_close(&b);
}

T_MAIN(T_LONG(blocks_arrive, 60), T(gather_asks_little), T_LONG(tables_have_an_end, 60), T_LONG(tables_are_bounded, 60),
       T(no_memory_for_tables), T(runs_leave_together), T_LONG(chunks_go_round, 120), T_LONG(a_kernel_that_gives_up, 60),
       T(little_memory_for_chunks), T(no_stream_memory_operations), T(what_kernels_cannot_reach), T_LONG(threads, 60),
       T_LONG(each_call_fails_once, 300), T_LONG(each_function_fails_always, 60), T_LONG(each_allocation_fails, 60),
       T_LONG(a_call_after_one_that_failed, 60))
