/* SPDX-License-Identifier: MIT
 *
 * What only a real GPU can tell about the CUDA device and the conformance suite does not ask: kernels against the host twins from either source,
 * batches, the caller's streams and graphs, matmul on many streams. Skipped where there is none. T_VERBOSE=1 shows rates. */
#include "t.h"

#include "cu_load.h"
#include "cuda.h"
#include "cuda_impl.h"
#include "error.h"
#include "ops.h"
#include "os.h"

#define D cuda_device_ops

static dev_context *open_gpu(void)
{
    dev_context *c = NULL;
    char why[320];

    if (D.count(why, sizeof(why)) == 0)
        T_SKIP("%s", why);
    T_OK(D.open("", &c));
    return c;
}

static void wait_for(dev_context *c, dev_stream *s)
{
    dev_event *e = NULL;

    T_OK(D.event_create(c, false, &e));
    T_OK(D.event_record(e, s));
    T_OK(D.event_wait(e, 60000000000u));
    D.event_destroy(e);
}

/* Best of some runs, in seconds. */
static double time_op(dev_context *c, dev_stream *s, const side_op *op)
{
    dev_event *begin = NULL, *end = NULL;
    double best = 1e30, ns = 0;

    T_OK(D.event_create(c, true, &begin));
    T_OK(D.event_create(c, true, &end));
    for (int i = 0; i < 5; i++) {
        T_OK(D.event_record(begin, s));
        T_OK(D.op(s, op));
        T_OK(D.event_record(end, s));
        T_OK(D.event_wait(end, 60000000000u));
        T_OK(D.event_elapsed(begin, end, &ns));
        best = ns < best ? ns : best;
    }
    D.event_destroy(begin);
    D.event_destroy(end);
    return best * 1e-9;
}

/* Runs the op on the device over `in` and compares with the twin, bit for bit; guard bytes after the output must stay. */
static void check_op(dev_context *c, dev_stream *s, side_op op, const void *in)
{
    size_t in_bytes[2], out_bytes;
    void *device_in = NULL, *device_out = NULL;

    T_OK(ops_bytes(&op, in_bytes, &out_bytes));
    unsigned char *got = test_malloc(out_bytes + 64), *expected = test_malloc(out_bytes + 64);
    memset(expected, 0xa5, out_bytes + 64);
    T_OK(D.alloc(c, in_bytes[0] + 1, &device_in));
    T_OK(D.alloc(c, out_bytes + 64, &device_out));
    T_OK(D.copy(s, SIDE_COPY_H2D, device_in, in, in_bytes[0]));
    T_OK(D.set(s, device_out, 0xa5, out_bytes + 64));
    op.in[0] = device_in;
    op.out = device_out;
    T_OK(D.op(s, &op));
    T_OK(D.copy(s, SIDE_COPY_D2H, got, device_out, out_bytes + 64));
    wait_for(c, s);
    op.in[0] = in;
    op.out = expected;
    T_OK(ops_run_host(&op));
    for (size_t i = 0; i < out_bytes + 64; i++)
        if (got[i] != expected[i])
            T_FAIL("%s %s -> %s of %llu: byte %zu of %zu is %02x, not %02x", side_op_name(op.id),
                   side_type_name(op.type[0]), side_type_name(op.type[1]), (unsigned long long)op.dim[0], i, out_bytes,
                   got[i], expected[i]);
    D.free(c, device_in);
    D.free(c, device_out);
    test_free(got);
    test_free(expected);
}

static void check_kernels(const char *source)
{
    enum { MOST = (1 << 24) + 77 };
    static const uint64_t counts[] = {0, 1, 3, 4, 5, 255, 1023, 1027, 65536, 1081344, 4325379, MOST};
    dev_context *c = open_gpu();
    dev_stream *s = NULL;
    side_device_props props;
    side_op op = SIDE_OP_INIT;
    t_rng rng = t_rng_make(1);

    T_OK(D.props(c, &props));
    if (!props.kernels || strncmp(props.kernels_from, source, strlen(source)) != 0)
        T_SKIP("kernels: %s", props.kernels_from);
    T_OK(D.stream_create(c, &s));
    uint32_t *in = test_malloc(MOST * sizeof(*in));
    t_rng_fill(&rng, in, MOST * sizeof(*in)); /* any bits: NaNs, subnormals and all */
    for (uint32_t i = 0; i < 65536; i++)
        in[i] = i | i << 16; /* every 16-bit pattern */
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        op.dim[0] = counts[i];
        op.id = SIDE_OP_CAST;
        for (int pair = 0; pair < 9; pair++) {
            op.type[0] = (side_type)(pair / 3);
            op.type[1] = (side_type)(pair % 3);
            check_op(c, s, op, in);
        }
        op.type[0] = op.type[1] = SIDE_F32;
        op.id = SIDE_OP_XXH3_BLOCKS;
        op.dim[0] = counts[i] / 256;
        check_op(c, s, op, in);
    }
    float *numbers = test_malloc(MOST * sizeof(*numbers));
    for (size_t i = 0; i < MOST; i++)
        numbers[i] = (float)((int32_t)in[i]) * 1e-3f;
    op.id = SIDE_OP_AFFINE;
    op.scale = 1.7f;
    op.bias = -0.3f;
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        op.dim[0] = counts[i];
        check_op(c, s, op, numbers);
    }
    test_free(in);
    test_free(numbers);
    D.stream_destroy(s);
    D.close(c);
}

T_TEST(kernels_fatbin)
{
    check_kernels("fatbin");
}

T_TEST(kernels_nvrtc)
{
    setenv("SIDESTREAM_NO_FATBIN", "1", 1);
    check_kernels("NVRTC");
}

T_TEST(rates)
{
    const size_t bytes = (size_t)1 << 30;
    dev_context *c = open_gpu();
    dev_stream *s = NULL;
    side_device_props props;
    side_link link;
    void *in = NULL, *out = NULL;
    side_op op = SIDE_OP_INIT;

    T_OK(D.props(c, &props));
    T_OK(D.link(c, &link));
    printf("%s, driver %d, cc %d.%d, %s, numa %d, copy engines %d, kernels from %s\n", props.name, props.driver_version,
           props.compute_major, props.compute_minor, props.uuid, props.numa_node, props.copy_engines,
           props.kernels_from);
    printf("%s gen %d x%d now, gen %d x%d at most, %.1f GB/s, at %s\n", link.kind, link.generation, link.width,
           link.max_generation, link.max_width, link.peak_gbps, props.pci);
    if (!props.kernels)
        T_SKIP("%s", props.kernels_from);
    T_OK(D.stream_create(c, &s));
    T_OK(D.alloc(c, bytes, &in));
    T_OK(D.alloc(c, bytes, &out));
    T_OK(D.set(s, in, 0x3c, bytes));
    op.in[0] = in;
    op.out = out;
    op.id = SIDE_OP_CAST;
    for (int pair = 0; pair < 9; pair++) {
        op.type[0] = (side_type)(pair / 3);
        op.type[1] = (side_type)(pair % 3);
        op.dim[0] = bytes / 4;
        const double s_cast = time_op(c, s, &op);
        printf("cast %s -> %s: %.0f GB/s read and written\n", side_type_name(op.type[0]), side_type_name(op.type[1]),
               (double)op.dim[0] * (double)(side_type_bytes(op.type[0]) + side_type_bytes(op.type[1])) / s_cast / 1e9);
    }
    op.type[0] = op.type[1] = SIDE_F32;
    op.id = SIDE_OP_XXH3_BLOCKS;
    op.dim[0] = bytes / 1024;
    printf("xxh3: %.0f GB/s read\n", (double)bytes / time_op(c, s, &op) / 1e9);
    op.id = SIDE_OP_AFFINE;
    op.dim[0] = bytes / 4;
    printf("affine: %.0f GB/s read and written\n", 2 * (double)bytes / time_op(c, s, &op) / 1e9);
    for (uint64_t ns = 1000; ns <= 100000000; ns *= 10) {
        op.id = SIDE_OP_SPIN;
        op.dim[0] = ns;
        const double took = time_op(c, s, &op);
        printf("spin of %.0f us: %.1f us\n", (double)ns / 1e3, took * 1e6);
        if (took < (double)ns * 0.99e-9 - 2e-6 || took > (double)ns * 1.5e-9 + 1e-3)
            T_FAIL("a spin of %llu ns took %.0f", (unsigned long long)ns, took * 1e9);
    }
    D.free(c, in);
    D.free(c, out);
    D.stream_destroy(s);
    D.close(c);
}

/* Many pieces in each direction, pinned and pageable, on our stream and on the legacy one. */
T_TEST(batches)
{
    enum { COUNT = 1500, MOST = 70000 };
    dev_context *c = open_gpu();
    const size_t bytes = (size_t)COUNT * MOST;
    void *device = NULL, *pinned = NULL;
    static side_piece in[COUNT], out[COUNT];
    t_rng rng = t_rng_make(4);

    T_OK(D.alloc(c, bytes, &device));
    T_OK(D.host_alloc(c, 2 * bytes, &pinned));
    unsigned char *pageable = test_malloc(2 * bytes);
    printf("cuMemcpyBatchAsync: %s\n", c->cu->cuMemcpyBatchAsync != NULL ? "yes" : "no");
    for (int which = 0; which < 4; which++) {
        unsigned char *host = which / 2 == 0 ? pinned : pageable, *back = host + bytes;
        dev_stream *s = NULL;
        T_OK(which % 2 == 0 ? D.stream_create(c, &s) : D.stream_wrap(c, NULL, &s));
        t_rng_fill(&rng, host, bytes);
        memset(back, 0, bytes);
        for (size_t i = 0; i < COUNT; i++) {
            const size_t n = t_rng_below(&rng, i % 50 == 0 ? MOST : 5000);
            in[i] = (side_piece){(char *)device + i * MOST, host + i * MOST, n};
            out[COUNT - 1 - i] = (side_piece){back + i * MOST, (char *)device + i * MOST, n};
        }
        T_OK(D.copy_blocks(s, SIDE_COPY_H2D, in, COUNT, SIDE_PATH_BATCH));
        T_OK(D.copy_blocks(s, SIDE_COPY_D2H, out, COUNT, SIDE_PATH_BATCH));
        wait_for(c, s);
        for (size_t i = 0; i < COUNT; i++)
            assert_memory_equal(host + i * MOST, back + i * MOST, in[i].bytes);
        D.stream_destroy(s);
    }
    if (c->cu->cuMemcpyBatchAsync != NULL && atomic_load(&c->no_batch))
        T_FAIL("the driver has batches and refuses them");
    test_free(pageable);
    D.host_free(c, pinned);
    D.free(c, device);
    D.close(c);
}

T_TEST(memory_kinds)
{
    dev_context *c = open_gpu();
    void *device = NULL, *pinned = NULL, *pages = NULL;
    side_memory_kind kind;
    int local = 0;

    T_OK(D.alloc(c, 1 << 20, &device));
    T_OK(D.host_alloc(c, 1 << 20, &pinned));
    assert_int_equal(posix_memalign(&pages, 4096, 1 << 20), 0);
    memset(pages, 1, 1 << 20);
    T_OK(D.memory_kind(c, (char *)device + 1000, &kind));
    assert_int_equal(kind, SIDE_MEMORY_DEVICE);
    T_OK(D.memory_kind(c, (char *)pinned + 1000, &kind));
    assert_int_equal(kind, SIDE_MEMORY_PINNED);
    T_OK(D.memory_kind(c, pages, &kind));
    assert_int_equal(kind, SIDE_MEMORY_PAGEABLE);
    T_OK(D.memory_kind(c, &local, &kind));
    assert_int_equal(kind, SIDE_MEMORY_PAGEABLE);
    T_OK(D.memory_kind(c, (void *)8, &kind));
    assert_int_equal(kind, SIDE_MEMORY_PAGEABLE);
    for (int read_only = 0; read_only < 2; read_only++) {
        T_OK(D.host_register(c, pages, 1 << 20, read_only != 0));
        T_OK(D.memory_kind(c, (char *)pages + 5000, &kind));
        assert_int_equal(kind, SIDE_MEMORY_PINNED);
        T_STATUS(D.host_register(c, pages, 1 << 20, false), SIDE_DEVICE_ERROR);
        T_OK(D.host_unregister(c, pages));
    }
    T_OK(D.memory_kind(c, pages, &kind));
    assert_int_equal(kind, SIDE_MEMORY_PAGEABLE);
    T_STATUS(D.host_unregister(c, pages), SIDE_DEVICE_ERROR);
    T_STATUS(D.alloc(c, (size_t)1 << 44, &device), SIDE_NO_DEVICE_MEMORY);
    printf("%s\n", side_last_error()->message);
    free(pages);
    D.host_free(c, pinned);
    D.free(c, device);
    D.close(c);
}

/* ---------------------------------------------------------------- matmul */

enum { DIM_M = 96, DIM_N = 160, DIM_K = 200 };

/* Where the device's product is off the twin's by more than `tolerance` of the largest. */
static void check_product(const float *got, const float *expected, size_t n, double tolerance)
{
    double largest = 0, worst = 0;

    for (size_t i = 0; i < n; i++) {
        const double off = (double)got[i] - (double)expected[i];
        largest = expected[i] > largest ? expected[i] : -expected[i] > largest ? -expected[i] : largest;
        worst = off > worst ? off : -off > worst ? -off : worst;
    }
    printf("off by %.3g of %.3g\n", worst, largest);
    if (!(worst <= tolerance * largest))
        T_FAIL("a product is off by %g of %g", worst, largest);
}

static void matmul_once(dev_context *c, dev_stream *s, side_math math, side_type out_type, double tolerance)
{
    const bool half = math == SIDE_MATH_BF16;
    enum { MOST = DIM_N * DIM_K };
    static float a[MOST], b[MOST], got[MOST], expected[MOST];
    static uint16_t ah[MOST], bh[MOST];
    void *device[3] = {NULL, NULL, NULL};
    side_op op = SIDE_OP_INIT;
    t_rng rng = t_rng_make(7);
    size_t in_bytes[2], out_bytes;

    for (size_t i = 0; i < MOST; i++) {
        a[i] = (float)((double)t_rng_below(&rng, 2001) / 1000 - 1);
        b[i] = (float)((double)t_rng_below(&rng, 2001) / 1000 - 1);
        uint32_t bits[2];
        memcpy(&bits[0], &a[i], 4);
        memcpy(&bits[1], &b[i], 4);
        ah[i] = ops_f32_to_bf16(bits[0]);
        bh[i] = ops_f32_to_bf16(bits[1]);
    }
    op.id = SIDE_OP_MATMUL;
    op.math = math;
    op.type[0] = half ? SIDE_BF16 : SIDE_F32;
    op.type[1] = out_type;
    op.dim[0] = DIM_M;
    op.dim[1] = DIM_N;
    op.dim[2] = DIM_K;
    op.in[0] = half ? (void *)ah : (void *)a;
    op.in[1] = half ? (void *)bh : (void *)b;
    op.out = expected;
    T_OK(ops_bytes(&op, in_bytes, &out_bytes));
    T_OK(ops_run_host(&op));
    for (int i = 0; i < 2; i++) {
        T_OK(D.alloc(c, in_bytes[i], &device[i]));
        T_OK(D.copy(s, SIDE_COPY_H2D, device[i], op.in[i], in_bytes[i]));
        op.in[i] = device[i];
    }
    T_OK(D.alloc(c, out_bytes, &device[2]));
    op.out = device[2];
    T_OK(D.op(s, &op));
    T_OK(D.copy(s, SIDE_COPY_D2H, got, device[2], out_bytes));
    wait_for(c, s);
    if (out_type == SIDE_BF16)
        for (size_t i = DIM_M * DIM_N; i-- > 0;) { /* in place, from the end: each is widened */
            const uint32_t x = ops_bf16_to_f32(((uint16_t *)(void *)got)[i]),
                           y = ops_bf16_to_f32(((uint16_t *)(void *)expected)[i]);
            memcpy(&got[i], &x, 4);
            memcpy(&expected[i], &y, 4);
        }
    check_product(got, expected, DIM_M * DIM_N, tolerance);
    for (int i = 0; i < 3; i++)
        D.free(c, device[i]);
}

T_TEST(matmul)
{
    const struct cublas_api *blas;
    dev_context *c = open_gpu();
    dev_stream *s = NULL;

    if (cu_cublas(c->props.driver_version, &blas) != SIDE_OK)
        T_SKIP("%s", side_last_error()->message);
    T_OK(D.stream_create(c, &s));
    matmul_once(c, s, SIDE_MATH_FP32, SIDE_F32, 1e-5);
    matmul_once(c, s, SIDE_MATH_TF32, SIDE_F32, 5e-3);
    matmul_once(c, s, SIDE_MATH_BF16, SIDE_F32, 1e-4);
    matmul_once(c, s, SIDE_MATH_BF16, SIDE_BF16, 1e-2);
    D.stream_destroy(s);
    D.close(c);
}

/* The same product on many streams from several threads, streams coming and going: each result is that of the first. */
struct worker {
    dev_context *context;
    const side_op *op;
    const void *expected;
    size_t bytes;
};

static void *multiply(void *p)
{
    const struct worker *w = p;
    side_op op = *w->op;
    dev_stream *s = NULL;
    void *out = NULL;
    char *got = malloc(w->bytes);
    T_OK(D.alloc(w->context, w->bytes, &out));
    op.out = out;
    for (int round = 0; round < 20; round++) {
        T_OK(D.stream_create(w->context, &s));
        for (int i = 0; i < 5; i++) {
            T_OK(D.set(s, out, 0xff, w->bytes));
            T_OK(D.op(s, &op));
        }
        T_OK(D.copy(s, SIDE_COPY_D2H, got, out, w->bytes));
        wait_for(w->context, s);
        if (memcmp(got, w->expected, w->bytes) != 0)
            T_FAIL("a product differs from the same product before");
        D.stream_destroy(s);
    }
    D.free(w->context, out);
    free(got);
    return NULL;
}

T_TEST(matmul_threads)
{
    enum { DIM = 1024, THREADS = 4 };
    const struct cublas_api *blas;
    dev_context *c = open_gpu();
    const size_t bytes = (size_t)DIM * DIM * 4;
    void *in = NULL, *out = NULL;
    dev_stream *s = NULL;
    side_op op = SIDE_OP_INIT;
    pthread_t threads[THREADS];
    t_rng rng = t_rng_make(8);

    if (cu_cublas(c->props.driver_version, &blas) != SIDE_OK)
        T_SKIP("%s", side_last_error()->message);
    float *a = test_malloc(bytes);
    void *first = test_malloc(bytes);
    for (size_t i = 0; i < bytes / 4; i++)
        a[i] = (float)t_rng_below(&rng, 1000) / 1000;
    T_OK(D.stream_create(c, &s));
    T_OK(D.alloc(c, bytes, &in));
    T_OK(D.alloc(c, bytes, &out));
    T_OK(D.copy(s, SIDE_COPY_H2D, in, a, bytes));
    op.id = SIDE_OP_MATMUL;
    op.dim[0] = op.dim[1] = op.dim[2] = DIM;
    op.in[0] = op.in[1] = in;
    op.out = out;
    T_OK(D.op(s, &op));
    T_OK(D.copy(s, SIDE_COPY_D2H, first, out, bytes));
    wait_for(c, s);
    struct worker w = {c, &op, first, bytes};
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, multiply, &w), 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    test_free(a);
    test_free(first);
    D.free(c, in);
    D.free(c, out);
    D.stream_destroy(s);
    D.close(c);
}

/* ---------------------------------------------------------------- beside other users of the driver */

/* Every call leaves the thread's context as it was, here: none. */
T_TEST(context_stays)
{
    CUresult (*get)(CUcontext *);
    dev_context *c = open_gpu();
    void *data = NULL, *library = os_library_open("libcuda.so.1", (char[8]){0}, 8),
         *symbol = os_library_symbol(library, "cuCtxGetCurrent");
    CUcontext current = (CUcontext)&data;

    memcpy(&get, &symbol, sizeof(get));
    assert_int_equal(get(&current), CUDA_SUCCESS);
    assert_null(current);
    T_OK(D.alloc(c, 4096, &data));
    T_STATUS(D.host_unregister(c, &get), SIDE_DEVICE_ERROR);
    assert_int_equal(get(&current), CUDA_SUCCESS);
    assert_null(current);
    D.free(c, data);
    D.close(c);
}

/* Another thread of ours works while this one captures a graph in the strictest mode; and ops can be captured. */
static void *work_relaxed(void *context)
{
    dev_stream *s = NULL;
    void *data = NULL;
    T_OK(D.stream_create(context, &s));
    T_OK(D.alloc(context, 1 << 20, &data));
    T_OK(D.set(s, data, 1, 1 << 20));
    wait_for(context, s);
    D.free(context, data);
    D.stream_destroy(s);
    return NULL;
}

T_TEST(graph_capture)
{
    typedef struct graph *graph; /* CUgraph */
    CUresult (*begin)(CUstream, CUstreamCaptureMode), (*end)(CUstream, graph *), (*destroy)(graph);
    void *library = os_library_open("libcuda.so.1", (char[8]){0}, 8), *symbols[3], *data = NULL;
    static const char *const names[] = {"cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphDestroy"};
    dev_context *c = open_gpu();
    dev_stream *s = NULL;
    const struct cublas_api *blas;
    graph made = NULL;
    dev_stream *blocking = NULL, *legacy = NULL;
    side_op op = SIDE_OP_INIT;
    CUstream native = NULL;
    bool capturing = true;
    pthread_t thread;

    for (int i = 0; i < 3; i++) {
        symbols[i] = os_library_symbol(library, names[i]);
        assert_non_null(symbols[i]);
    }
    memcpy(&begin, &symbols[0], sizeof(begin));
    memcpy(&end, &symbols[1], sizeof(end));
    memcpy(&destroy, &symbols[2], sizeof(destroy));
    T_OK(D.stream_create(c, &s));
    T_OK(D.alloc(c, 3 << 20, &data));
    op.in[0] = op.in[1] = data;
    op.out = (char *)data + (2 << 20);
    op.dim[0] = op.dim[1] = op.dim[2] = 256;
    T_OK(D.stream_wrap(c, NULL, &legacy));
    T_OK(D.stream_is_capturing(s, &capturing));
    assert_false(capturing);
    T_OK(cuda_enter(c));
    assert_int_equal(begin(D.stream_native(s), 0 /* global */), CUDA_SUCCESS);
    T_OK(D.stream_is_capturing(s, &capturing));
    assert_true(capturing);
    assert_int_equal(pthread_create(&thread, NULL, work_relaxed, c), 0);
    pthread_join(thread, NULL);
    side_piece pieces[2] = {{data, (char *)data + 8192, 4096}, {(char *)data + 4096, (char *)data + 16384, 4096}};
    T_OK(D.copy_blocks(s, SIDE_COPY_D2D, pieces, 2, SIDE_PATH_BATCH));
    if (cu_cublas(c->props.driver_version, &blas) == SIDE_OK) {
        op.id = SIDE_OP_MATMUL; /* the first: makes the handle and a workspace while capturing */
        T_OK(D.op(s, &op));
    }
    op.id = SIDE_OP_CAST; /* may load or compile while capturing */
    op.type[1] = SIDE_F16;
    T_OK(D.op(s, &op));
    assert_int_equal(end(D.stream_native(s), &made), CUDA_SUCCESS);
    assert_non_null(made);
    assert_int_equal(destroy(made), CUDA_SUCCESS);
    T_OK(D.stream_is_capturing(s, &capturing));
    assert_false(capturing);
    /* One that synchronises with the legacy stream: asked, that says so too, and the capture goes on. */
    assert_int_equal(c->cu->cuStreamCreate(&native, 0), CUDA_SUCCESS);
    T_OK(D.stream_wrap(c, native, &blocking));
    T_OK(D.stream_is_capturing(legacy, &capturing));
    assert_false(capturing);
    assert_int_equal(begin(native, 0), CUDA_SUCCESS);
    T_OK(D.stream_is_capturing(legacy, &capturing));
    assert_true(capturing);
    T_OK(D.set(blocking, data, 1, 4096));
    assert_int_equal(end(native, &made), CUDA_SUCCESS);
    assert_int_equal(destroy(made), CUDA_SUCCESS);
    D.stream_destroy(blocking);
    D.stream_destroy(legacy);
    assert_int_equal(c->cu->cuStreamDestroy(native), CUDA_SUCCESS);
    cuda_leave(c);
    T_OK(D.op(s, &op));
    wait_for(c, s);
    D.free(c, data);
    D.stream_destroy(s);
    D.close(c);
}

/* A fault of a kernel is told as a lost device by what comes after, and closing still works. */
T_TEST(lost_device)
{
    dev_context *c = open_gpu();
    dev_stream *s = NULL;
    dev_event *e = NULL;
    side_op op = SIDE_OP_INIT;
    void *data = NULL;

    T_OK(D.stream_create(c, &s));
    T_OK(D.event_create(c, false, &e));
    op.id = SIDE_OP_AFFINE;
    op.in[0] = op.out = (void *)((uintptr_t)1 << 46); /* mapped nowhere */
    op.dim[0] = 1024;
    T_OK(D.op(s, &op));
    side_status status = D.event_record(e, s);
    if (status == SIDE_OK)
        status = D.event_wait(e, 10000000000u);
    T_STATUS(status, SIDE_DEVICE_LOST);
    printf("%s\n", side_last_error()->message);
    T_STATUS(D.alloc(c, 4096, &data), SIDE_DEVICE_LOST);
    D.event_destroy(e);
    D.stream_destroy(s);
    D.close(c);
}

T_MAIN(T_LONG(kernels_fatbin, 120), T_LONG(kernels_nvrtc, 120), T_LONG(rates, 60), T_LONG(batches, 60), T(memory_kinds),
       T_LONG(matmul, 60), T_LONG(matmul_threads, 60), T(context_stays), T_LONG(graph_capture, 60), T(lost_device))
