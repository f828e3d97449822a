/* SPDX-License-Identifier: MIT
 *
 * What only a real GPU can tell about scattered blocks: what each path gives, graphs, and a pack kernel whose copies do not come. That the bytes are right for
 * all shapes is asked by conform/test_conform_blocks. T_VERBOSE=1 shows rates. */
#include "t.h"

#include "cuda.h"
#include "cuda_table.h"
#include "os.h"

#include <math.h>

#define D   cuda_device_ops
#define MIB ((size_t)1 << 20)

struct yard {
    dev_context *context;
    dev_stream *stream;
    unsigned char *device, *host, *want; /* room bytes each */
    size_t room, count;
    side_piece *pieces;
};

static struct yard yard_open(size_t room, size_t least_block)
{
    struct yard y = {.room = room};
    char why[320];

    if (D.count(why, sizeof(why)) == 0)
        T_SKIP("%s", why);
    T_OK(D.open("", &y.context));
    T_OK(D.stream_create(y.context, &y.stream));
    T_OK(D.alloc(y.context, room, (void **)&y.device));
    T_OK(D.host_alloc(y.context, room, (void **)&y.host));
    y.want = test_malloc(room);
    y.pieces = test_malloc(room / least_block * sizeof(*y.pieces));
    return y;
}

static void wait_for(struct yard *y)
{
    dev_event *e = NULL;

    T_OK(D.event_create(y->context, false, &e));
    T_OK(D.event_record(e, y->stream));
    T_OK(D.event_wait(e, 60000000000u));
    D.event_destroy(e);
}

static void yard_close(struct yard *y)
{
    wait_for(y);
    test_free(y->want);
    test_free(y->pieces);
    D.host_free(y->context, y->host);
    D.free(y->context, y->device);
    D.stream_destroy(y->stream);
    D.close(y->context);
}

/* Blocks that lie in a row on the host, and all over the device. The source holds random bytes, the destination none of them. */
static void lay(struct yard *y, side_copy_kind kind, size_t block, uint64_t seed)
{
    t_rng rng = t_rng_make(seed);
    const bool in = kind == SIDE_COPY_H2D;

    y->count = y->room / block;
    for (size_t i = 0; i < y->count; i++) {
        /* in the order of the host; the device's blocks in steps through all of them */
        unsigned char *host = y->host + i * block, *device = y->device + i * 40503 % y->count * block;
        y->pieces[i] = in ? (side_piece){device, host, block} : (side_piece){host, device, block};
    }
    t_rng_fill(&rng, y->want, y->room);
    memcpy(y->host, y->want, y->room);
    if (in) {
        T_OK(D.set(y->stream, y->device, 0, y->room));
    } else { /* `want` as the device holds it */
        T_OK(D.copy(y->stream, SIDE_COPY_H2D, y->device, y->host, y->room));
        wait_for(y);
        memset(y->host, 0, y->room);
    }
    wait_for(y);
}

static void check(struct yard *y, side_copy_kind kind, const char *what)
{
    const size_t block = y->pieces[0].bytes;
    const bool in = kind == SIDE_COPY_H2D;

    wait_for(y);
    if (in) { /* what the device holds now */
        memcpy(y->want, y->host, y->room);
        T_OK(D.copy(y->stream, SIDE_COPY_D2H, y->host, y->device, y->room));
        wait_for(y);
    }
    for (size_t i = 0; i < y->count; i++) {
        const size_t host = (size_t)((in ? (const unsigned char *)y->pieces[i].src : (unsigned char *)y->pieces[i].dst) -
                                     y->host),
                     device = (size_t)((in ? (unsigned char *)y->pieces[i].dst
                                           : (const unsigned char *)y->pieces[i].src) -
                                       y->device);
        if (memcmp(in ? y->host + device : y->host + host, in ? y->want + host : y->want + device, block) != 0)
            T_FAIL("%s: block %zu of %zu differs", what, i, y->count);
    }
}

/* No count of blocks may share a factor with the step, 40503 = 3 x 23 x 587: powers of two do not. */
T_TEST(rates)
{
    static const size_t blocks[] = {4096, 16384, 65536, MIB};
    struct yard y = yard_open(256 * MIB, 4096);
    dev_event *begin = NULL, *end = NULL;

    T_OK(D.event_create(y.context, true, &begin));
    T_OK(D.event_create(y.context, true, &end));
    for (side_copy_kind kind = SIDE_COPY_H2D; kind <= SIDE_COPY_D2H; kind++)
        for (size_t i = 0; i < sizeof(blocks) / sizeof(blocks[0]); i++)
            for (int path = SIDE_PATH_LOOP; path <= SIDE_PATH_PACK; path++) {
                double best = INFINITY, ns = 0, queued = 0;
                char what[60];
                if (path == SIDE_PATH_PACK && kind == SIDE_COPY_H2D)
                    continue;
                snprintf(what, sizeof(what), "%s %7zu B %-6s", kind == SIDE_COPY_H2D ? "H2D" : "D2H", blocks[i],
                         side_path_name((side_path)path));
                lay(&y, kind, blocks[i], i);
                for (int k = 0; k < 3; k++) {
                    const uint64_t at = os_now_ns();
                    T_OK(D.event_record(begin, y.stream));
                    T_OK(D.copy_blocks(y.stream, kind, y.pieces, y.count, (side_path)path));
                    T_OK(D.event_record(end, y.stream));
                    queued = (double)(os_now_ns() - at);
                    T_OK(D.event_wait(end, 60000000000u));
                    T_OK(D.event_elapsed(begin, end, &ns));
                    best = ns < best ? ns : best;
                }
                check(&y, kind, what);
                printf("%s %6.1f GB/s, queued in %.2f ms\n", what, (double)y.room / best, queued * 1e-6);
            }
    D.event_destroy(begin);
    D.event_destroy(end);
    yard_close(&y);
}

/* Compiled on this machine, the kernels do the same. */
T_TEST(kernels_by_nvrtc)
{
    setenv("SIDESTREAM_NO_FATBIN", "1", 1);
    struct yard y = yard_open(128 * MIB, 8192);

    lay(&y, SIDE_COPY_H2D, 8192, 1);
    const side_status status = D.copy_blocks(y.stream, SIDE_COPY_H2D, y.pieces, y.count, SIDE_PATH_GATHER);
    if (status == SIDE_UNSUPPORTED)
        T_SKIP("%s", side_last_error()->message);
    T_OK(status);
    check(&y, SIDE_COPY_H2D, "gather");
    lay(&y, SIDE_COPY_D2H, 8192, 2);
    T_OK(D.copy_blocks(y.stream, SIDE_COPY_D2H, y.pieces, y.count, SIDE_PATH_PACK));
    check(&y, SIDE_COPY_D2H, "pack");
    yard_close(&y);
}

/* ---------------------------------------------------------------- a host that is late */

static void (*at_chunk_5)(void);

static void late(uint32_t chunk)
{
    if (chunk == 5 && at_chunk_5 != NULL) {
        at_chunk_5();
        at_chunk_5 = NULL;
    }
}

static void sleep_long(void)
{
    os_sleep_ns(3500000000u);
}

static void pack_late(struct yard *y, void (*fn)(void), const char *what)
{
    lay(y, SIDE_COPY_D2H, 65536, 3);
    at_chunk_5 = fn;
    pack_test_chunk = late;
    const uint64_t at = os_now_ns();
    T_OK(D.copy_blocks(y->stream, SIDE_COPY_D2H, y->pieces, y->count, SIDE_PATH_PACK));
    check(y, SIDE_COPY_D2H, what);
    printf("%s: %.2f s\n", what, (double)(os_now_ns() - at) * 1e-9);
    assert_null(at_chunk_5);
    pack_test_chunk = NULL;
    lay(y, SIDE_COPY_D2H, 65536, 4); /* the next call is as good as any */
    T_OK(D.copy_blocks(y->stream, SIDE_COPY_D2H, y->pieces, y->count, SIDE_PATH_PACK));
    check(y, SIDE_COPY_D2H, "the call behind it");
}

/* The kernel waits for copies that are queued too late: it gives up, and the bytes are right all the same. */
T_TEST(a_kernel_that_gives_up)
{
    struct yard y = yard_open(256 * MIB, 65536);

    pack_late(&y, sleep_long, "a host that sleeps");
    yard_close(&y);
}

/* Another thread frees device memory, which may wait for the device with the driver's locks held, while half a call is queued. */
static struct {
    dev_context *context;
    void *data;
    pthread_t thread;
} freeing;

static void *free_it(void *unused)
{
    const uint64_t at = os_now_ns();

    (void)unused;
    D.free(freeing.context, freeing.data);
    printf("freeing took %.2f s\n", (double)(os_now_ns() - at) * 1e-9);
    return NULL;
}

static void free_beside(void)
{
    assert_int_equal(pthread_create(&freeing.thread, NULL, free_it, NULL), 0);
    os_sleep_ns(200000000);
}

T_TEST(a_device_wait_beside_a_pack)
{
    struct yard y = yard_open(256 * MIB, 65536);

    freeing.context = y.context;
    T_OK(D.alloc(y.context, 64 * MIB, &freeing.data));
    pack_late(&y, free_beside, "a thread that frees");
    pthread_join(freeing.thread, NULL);
    yard_close(&y);
}

/* ---------------------------------------------------------------- graphs */

T_TEST(blocks_into_a_graph)
{
    typedef struct graph *graph; /* CUgraph */
    CUresult (*begin)(CUstream, CUstreamCaptureMode), (*end)(CUstream, graph *), (*destroy)(graph);
    static const char *const names[] = {"cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphDestroy"};
    struct yard y = yard_open(MIB, 4096);
    void *library = os_library_open("libcuda.so.1", (char[8]){0}, 8), *symbols[3];
    dev_stream *other = NULL;
    graph made = NULL;

    for (int i = 0; i < 3; i++) {
        symbols[i] = os_library_symbol(library, names[i]);
        assert_non_null(symbols[i]);
    }
    memcpy(&begin, &symbols[0], sizeof(begin));
    memcpy(&end, &symbols[1], sizeof(end));
    memcpy(&destroy, &symbols[2], sizeof(destroy));
    T_OK(D.stream_create(y.context, &other));
    lay(&y, SIDE_COPY_H2D, 4096, 1);
    T_OK(cuda_enter(y.context));
    assert_int_equal(begin(D.stream_native(y.stream), 0 /* global */), CUDA_SUCCESS);
    T_STATUS(D.copy_blocks(y.stream, SIDE_COPY_H2D, y.pieces, y.count, SIDE_PATH_GATHER), SIDE_UNSUPPORTED);
    T_OK(D.copy_blocks(other, SIDE_COPY_H2D, y.pieces, y.count,
                       SIDE_PATH_GATHER)); /* beside a capture, the first call of all */
    for (size_t i = 0; i < y.count; i++) {
        void *device = y.pieces[i].dst;
        y.pieces[i] = (side_piece){y.host + i * 4096, device, 4096};
    }
    T_STATUS(D.copy_blocks(y.stream, SIDE_COPY_D2H, y.pieces, y.count, SIDE_PATH_PACK), SIDE_UNSUPPORTED);
    T_OK(D.copy_blocks(other, SIDE_COPY_D2H, y.pieces, y.count, SIDE_PATH_PACK));
    T_OK(D.copy_blocks(y.stream, SIDE_COPY_D2H, y.pieces, 4, SIDE_PATH_BATCH));
    assert_int_equal(end(D.stream_native(y.stream), &made), CUDA_SUCCESS); /* none of it broke the capture */
    assert_non_null(made);
    assert_int_equal(destroy(made), CUDA_SUCCESS);
    cuda_leave(y.context);
    dev_event *e = NULL;
    T_OK(D.event_create(y.context, false, &e));
    T_OK(D.event_record(e, other));
    T_OK(D.event_wait(e, 20000000000u));
    assert_memory_equal(y.host, y.want, y.room);
    D.event_destroy(e);
    D.stream_destroy(other);
    yard_close(&y);
}

T_MAIN(T_LONG(rates, 240), T_LONG(kernels_by_nvrtc, 120), T_LONG(a_kernel_that_gives_up, 60),
       T_LONG(a_device_wait_beside_a_pack, 60), T_LONG(blocks_into_a_graph, 60))
