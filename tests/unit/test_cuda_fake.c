/* SPDX-License-Identifier: MIT
 *
 * The whole CUDA device over a driver that is not there (fake_cuda.h): what errors become, what is undone when a call fails, that the thread's
 * context is always as it was. What a GPU makes of it is for the conformance suite on a real one. */
#include "fake_cuda.h"

#include "cuda.h"
#include "error.h"
#include "os.h"

#include <sys/stat.h>

#define D cuda_device_ops

static dev_context *open_fake(void)
{
    dev_context *c = NULL;
    T_OK(D.open("", &c));
    return c;
}

static void message_has(const char *text)
{
    if (strstr(side_last_error()->message, text) == NULL)
        T_FAIL("\"%s\" does not say \"%s\"", side_last_error()->message, text);
}

/* ---------------------------------------------------------------- loading the driver */

static const char *absent; /* the symbol that this driver lacks */
static CUresult absent_result;

static CUresult get_address(const char *symbol, void **function, int version, uint64_t flags,
                            CUdriverProcAddressQueryResult *found)
{
    static const struct {
        const char *name;
        size_t offset;
    } all[] = {
#define ENTRY(needed, name, version, arguments) {#name, offsetof(struct cu_api, name)},
        CU_FUNCTIONS(ENTRY)
#undef ENTRY
    };

    assert_true(version >= 2000 && version <= 12080 && flags == CU_GET_PROC_ADDRESS_LEGACY_STREAM && found != NULL);
    *function = NULL;
    if (absent != NULL && strcmp(symbol, absent) == 0)
        return absent_result;
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        if (strcmp(all[i].name, symbol) == 0)
            memcpy(function, (const char *)&fake_cu + all[i].offset, sizeof(*function));
    assert_non_null(*function);
    return CUDA_SUCCESS;
}

T_TEST(load_symbols)
{
    struct cu_api api;
    static const struct {
        const char *name;
        int needed;
    } all[] = {
#define ENTRY(needed, name, version, arguments) {#name, needed},
        CU_FUNCTIONS(ENTRY)
#undef ENTRY
    };

    T_OK(cu_resolve(get_address, &api));
    assert_memory_equal(&api, &fake_cu, sizeof(api));
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        for (int how = 0; how < 2; how++) {
            memset(&api, 0x55, sizeof(api));
            absent = all[i].name;
            absent_result = how == 0 ? CUDA_SUCCESS
                                     : CUDA_ERROR_INVALID_VALUE; /* success and NULL; or "newer than I am" */
            if (all[i].needed) {
                T_STATUS(cu_resolve(get_address, &api), SIDE_DRIVER_TOO_OLD);
                message_has(absent);
                message_has("535");
                assert_int_equal(*(unsigned char *)&api, 0x55); /* outputs only on success */
            } else {
                T_OK(cu_resolve(get_address, &api));
            }
        }
    absent = "cuMemcpyBatchAsync";
    T_OK(cu_resolve(get_address, &api));
    assert_true(api.cuMemcpyBatchAsync == NULL && api.cuMemcpyHtoDAsync == fake_cu.cuMemcpyHtoDAsync);
}

T_TEST(load_failures)
{
    static const struct {
        int code;
        const char *says;
    } inits[] = {{CUDA_ERROR_NO_DEVICE, "no GPU"},
                 {CUDA_ERROR_STUB_LIBRARY, "stub"},
                 {CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "different versions"},
                 {CUDA_ERROR_SYSTEM_NOT_READY, "fabric"},
                 {CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE, "compatibility"},
                 {CUDA_ERROR_UNKNOWN, "kernel module"},
                 {12321, "does not start"}};
    char why[200];
    dev_context *c = NULL;

    fake_begin();
    for (size_t i = 0; i < sizeof(inits) / sizeof(inits[0]); i++) {
        fake.fail_name = "cuInit";
        fake.code = inits[i].code;
        T_STATUS(D.open("", &c), SIDE_NO_DEVICE);
        message_has(inits[i].says);
        assert_int_equal(side_last_error()->device_code, inits[i].code);
        assert_int_equal(D.count(why, sizeof(why)), 0);
        assert_non_null(strstr(why, inits[i].says));
    }
    fake_begin();
    fake.version = 12010;
    T_STATUS(D.open("0", &c), SIDE_DRIVER_TOO_OLD);
    message_has("CUDA 12.1");
    message_has("CUDA 12.2");
    message_has("535");
    fake_begin();
    fake.major = 7;
    fake.name = "Tesla V100";
    T_STATUS(D.open("0", &c), SIDE_DRIVER_TOO_OLD);
    message_has("Tesla V100");
    message_has("7.0");
    fake_begin();
    fake.devices = 0;
    assert_int_equal(D.count(why, sizeof(why)), 0);
    assert_non_null(strstr(why, "no GPU"));
    T_STATUS(D.open("", &c), SIDE_NO_DEVICE);
    assert_null(c);
    fake_clean();
}

T_TEST(open_arguments)
{
    static const char *const bad[] = {"x", "-1", "1x", "0,seed=1", "99999999999", " 1", "GPU-0"};
    dev_context *c = NULL;
    side_device_props props;
    char why[100];

    fake_begin();
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        T_STATUS(D.open(bad[i], &c), SIDE_INVALID);
    T_STATUS(D.open("2", &c), SIDE_NO_DEVICE);
    message_has("cuda:2");
    fake.fail_name = "cuDevicePrimaryCtxRetain";
    fake.code = CUDA_ERROR_DEVICE_UNAVAILABLE;
    T_STATUS(D.open("1", &c), SIDE_NO_DEVICE);
    message_has("exclusive");
    fake_begin();
    assert_int_equal(D.count(why, sizeof(why)), 2);
    T_OK(D.open("1", &c));
    T_OK(D.props(c, &props));
    assert_string_equal(props.spec, "cuda:1");
    assert_string_equal(props.name, "NVIDIA H200");
    assert_string_equal(props.pci, "0000:0a:00.0");
    assert_string_equal(props.uuid, "GPU-00112233-4455-6677-8899-aabbccddeeff");
    assert_true(props.ordinal == 1 && props.driver_version == 13000 && props.compute_major == 9 &&
                props.compute_minor == 0);
    assert_true(props.copy_engines == 2 && props.multiprocessors == 132 && props.can_register && !props.integrated &&
                !props.simulated);
    assert_true(props.memory_bytes == (size_t)139 << 30 && props.kernels);
    D.close(c);
    fake_clean();
}

/* ---------------------------------------------------------------- errors */

T_TEST(error_mapping)
{
    static const int lost[] = {214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719};
    void *data = &fake;

    fake_begin();
    dev_context *c = open_fake();
    fake.fail_name = "cuMemAlloc";
    for (size_t i = 0; i < sizeof(lost) / sizeof(lost[0]); i++) {
        fake.code = lost[i];
        T_STATUS(D.alloc(c, 100, &data), SIDE_DEVICE_LOST);
        message_has("restart the process");
        assert_int_equal(side_last_error()->device_code, lost[i]);
        assert_string_equal(side_last_error()->where, "cuMemAlloc");
    }
    fake.code = CUDA_ERROR_ILLEGAL_ADDRESS;
    T_STATUS(D.alloc(c, 100, &data), SIDE_DEVICE_LOST);
    message_has("CUDA_ERROR_ILLEGAL_ADDRESS");
    message_has("words of the driver");
    fake.code = CUDA_ERROR_OUT_OF_MEMORY;
    T_STATUS(D.alloc(c, 4096, &data), SIDE_NO_DEVICE_MEMORY);
    message_has("4096 bytes");
    message_has("12345 of 67890 bytes are free");
    fake.code = 201;
    T_STATUS(D.alloc(c, 100, &data), SIDE_DEVICE_ERROR);
    fake.code = 54321;
    T_STATUS(D.alloc(c, 100, &data), SIDE_DEVICE_ERROR);
    assert_ptr_equal(data, &fake);

    fake.fail_name = "cuMemHostAlloc";
    fake.code = CUDA_ERROR_OUT_OF_MEMORY;
    T_STATUS(D.host_alloc(c, 4096, &data), SIDE_NO_MEMORY);
    fake.fail_name = "cuMemHostRegister";
    T_STATUS(D.host_register(c, &fake, 4096, false), SIDE_DEVICE_ERROR);
    fake.code = CUDA_ERROR_NOT_SUPPORTED;
    T_STATUS(D.host_register(c, &fake, 4096, false), SIDE_UNSUPPORTED);
    fake.code = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    T_STATUS(D.host_register(c, &fake, 4096, false), SIDE_DEVICE_ERROR);
    fake.code = CUDA_ERROR_LAUNCH_FAILED;
    T_STATUS(D.host_register(c, &fake, 4096, false), SIDE_DEVICE_LOST);
    D.close(c);
    fake_clean();
}

T_TEST(memory_kinds)
{
    static const struct {
        unsigned type, managed;
        side_memory_kind kind;
    } cases[] = {{0, 0, SIDE_MEMORY_PAGEABLE}, {1, 0, SIDE_MEMORY_PINNED}, {2, 0, SIDE_MEMORY_DEVICE},
                 {2, 1, SIDE_MEMORY_DEVICE},   {1, 1, SIDE_MEMORY_DEVICE}, {4, 0, SIDE_MEMORY_PAGEABLE}};
    side_memory_kind kind = SIDE_MEMORY_DEVICE;

    fake_begin();
    dev_context *c = open_fake();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        fake.pointer_type = cases[i].type;
        fake.pointer_managed = cases[i].managed;
        T_OK(D.memory_kind(c, &fake, &kind));
        assert_int_equal(kind, cases[i].kind);
    }
    fake.fail_name = "cuPointerGetAttributes";
    kind = SIDE_MEMORY_DEVICE;
    T_OK(D.memory_kind(c, &fake, &kind)); /* INVALID_VALUE: not a pointer of CUDA's */
    assert_int_equal(kind, SIDE_MEMORY_PAGEABLE);
    fake.fail_name = NULL;
    T_OK(D.host_register(c, &fake, 4096, false));
    assert_int_equal(fake.register_flags, CU_REGISTER_PORTABLE | CU_REGISTER_DEVICEMAP);
    T_OK(D.host_unregister(c, &fake));
    T_OK(D.host_register(c, &fake, 4096, true));
    assert_int_equal(fake.register_flags, CU_REGISTER_PORTABLE | CU_REGISTER_DEVICEMAP | CU_REGISTER_READ_ONLY);
    T_OK(D.host_unregister(c, &fake));
    D.close(c);
    fake.can_register = 0;
    c = open_fake();
    T_STATUS(D.host_register(c, &fake, 4096, true), SIDE_UNSUPPORTED);
    D.close(c);
    fake_clean();
}

/* ---------------------------------------------------------------- streams, events */

T_TEST(stream_wrap)
{
    dev_stream *s = NULL;
    bool capturing = true;

    fake_begin();
    dev_context *c = open_fake();
    T_OK(D.stream_wrap(c, NULL, &s));
    assert_null(D.stream_native(s));
    T_OK(D.stream_query(s));
    for (fake.capturing = 2; fake.capturing >= 0; fake.capturing--) { /* broken and not ended, active, none */
        T_OK(D.stream_is_capturing(s, &capturing));
        assert_int_equal(capturing, fake.capturing != 0);
    }
    fake.fail_name = "cuStreamIsCapturing"; /* the legacy stream's answer while another is captured */
    fake.code = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    T_OK(D.stream_is_capturing(s, &capturing));
    assert_true(capturing);
    fake.code = CUDA_ERROR_INVALID_VALUE;
    T_STATUS(D.stream_is_capturing(s, &capturing), SIDE_DEVICE_ERROR);
    fake.fail_name = NULL;
    D.stream_destroy(s);
    T_STATUS(D.stream_wrap(c, (void *)CU_HANDLE_PER_THREAD, &s), SIDE_INVALID);
    message_has("per-thread");
    fake.alien = &fake.devices;
    T_STATUS(D.stream_wrap(c, fake.alien, &s), SIDE_INVALID);
    message_has("primary context");
    void *native = make(FAKE_STREAM);
    T_OK(D.stream_wrap(c, native, &s));
    assert_ptr_equal(D.stream_native(s), native);
    D.stream_destroy(s);
    live(native, FAKE_STREAM);         /* the caller's still */
    fake.fail_name = "cuStreamGetCtx"; /* a stream of a green context */
    T_OK(D.stream_wrap(c, native, &s));
    D.stream_destroy(s);
    unmake(native, FAKE_STREAM);
    D.stream_destroy(NULL);
    D.close(c);
    fake_clean();
}

T_TEST(event_waiting)
{
    dev_event *e = NULL, *timed[2];
    dev_stream *s = NULL;
    double ns = 0;

    fake_begin();
    dev_context *c = open_fake();
    T_OK(D.event_create(c, false, &e));
    T_OK(D.stream_create(c, &s));
    fake.pending = 3;
    T_STATUS(D.event_query(e), SIDE_AGAIN);
    T_STATUS(D.stream_query(s), SIDE_AGAIN);
    assert_int_equal(depth, 0);
    fake.pending = 500; /* past the spinning */
    T_OK(D.event_wait(e, UINT64_MAX));
    fake.pending = -1;
    for (uint64_t timeout = 0; timeout <= 20000000; timeout = timeout * 20 + 1000) {
        const uint64_t begin = os_now_ns();
        T_STATUS(D.event_wait(e, timeout), SIDE_AGAIN);
        const uint64_t took = os_now_ns() - begin;
        if (took < timeout || took > timeout + 2000000000)
            T_FAIL("a wait of at most %llu ns took %llu", (unsigned long long)timeout, (unsigned long long)took);
        assert_int_equal(depth, 0);
    }
    fake.pending = 0;
    fake.fail_name = "cuEventQuery";
    fake.code = CUDA_ERROR_LAUNCH_FAILED;
    T_STATUS(D.event_wait(e, UINT64_MAX), SIDE_DEVICE_LOST);
    fake.fail_name = NULL;

    T_STATUS(D.event_elapsed(e, e, &ns), SIDE_STATE);
    message_has("without timing");
    T_OK(D.event_create(c, true, &timed[0]));
    T_OK(D.event_create(c, true, &timed[1]));
    T_STATUS(D.event_elapsed(timed[0], timed[1], &ns), SIDE_STATE);
    message_has("recorded");
    T_OK(D.event_record(timed[0], s));
    T_OK(D.event_record(timed[1], s));
    fake.pending = 1;
    T_STATUS(D.event_elapsed(timed[0], timed[1], &ns), SIDE_STATE);
    message_has("done");
    assert_true(ns == 0);
    T_OK(D.event_elapsed(timed[0], timed[1], &ns));
    assert_true(ns == 1.5e6);
    D.event_destroy(timed[0]);
    D.event_destroy(timed[1]);
    D.event_destroy(e);
    D.stream_destroy(s);
    D.close(c);
    fake_clean();
}

/* ---------------------------------------------------------------- copies */

enum { PIECES = 1300, PIECE = 40 };
static unsigned char from[PIECES * PIECE], to[PIECES * PIECE];

/* Copies all pieces, of which every seventh is empty; they must all have arrived, once. */
static void check_batch(dev_stream *s, size_t batched, size_t singles)
{
    static side_piece pieces[PIECES];
    static unsigned char expected[sizeof(to)];

    memset(to, 0, sizeof(to));
    memset(expected, 0, sizeof(expected));
    for (size_t i = 0; i < PIECES; i++) {
        const size_t bytes = i % 7 == 0 ? 0 : 1 + i % PIECE;
        pieces[i] = (side_piece){to + i * PIECE, from + (PIECES - 1 - i) * PIECE, bytes};
        memcpy(expected + i * PIECE, from + (PIECES - 1 - i) * PIECE, bytes);
    }
    fake.batches = fake.batched = fake.singles = 0;
    T_OK(D.copy_blocks(s, SIDE_COPY_H2D, pieces, PIECES, SIDE_PATH_BATCH));
    assert_memory_equal(to, expected, sizeof(to));
    assert_int_equal(fake.batched, batched);
    assert_int_equal(fake.singles, singles);
}

T_TEST(copy_batches)
{
    const size_t full = PIECES - (PIECES + 6) / 7; /* pieces that are not empty */
    dev_stream *s = NULL, *legacy = NULL;
    t_rng rng = t_rng_make(9);

    t_rng_fill(&rng, from, sizeof(from));
    fake_begin();
    dev_context *c = open_fake();
    T_OK(D.stream_create(c, &s));
    T_OK(D.stream_wrap(c, NULL, &legacy));
    check_batch(s, full, 0);
    assert_true(fake.batches == 3); /* of at most 512 */
    check_batch(legacy, 0, full);
    fake.capturing = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    check_batch(s, 0, full);
    fake.capturing = 0;
    T_OK(D.copy_blocks(s, SIDE_COPY_D2H, NULL, 0, SIDE_PATH_BATCH));
    side_piece one = {to, from, 4};
    fake.batches = 0;
    T_OK(D.copy_blocks(s, SIDE_COPY_D2D, &one, 1, SIDE_PATH_BATCH));
    assert_int_equal(fake.batches, 0);
    /* refused in the middle: the rest one by one, and no batch from then on */
    side_piece two[2] = {{to, from, 4}, {to + 4, from + 4, 4}};
    fake.fail_name = "cuMemcpyBatchAsync";
    fake.code = CUDA_ERROR_NOT_PERMITTED;
    T_STATUS(D.copy_blocks(s, SIDE_COPY_H2D, two, 2, SIDE_PATH_BATCH), SIDE_DEVICE_ERROR);
    fake.code = CUDA_ERROR_INVALID_VALUE; /* perhaps a piece in two registrations: one by one, this time */
    T_OK(D.copy_blocks(s, SIDE_COPY_H2D, two, 2, SIDE_PATH_BATCH));
    fake.code = CUDA_ERROR_NOT_SUPPORTED;
    T_OK(D.copy_blocks(s, SIDE_COPY_H2D, two, 2, SIDE_PATH_BATCH));
    fake.fail_name = NULL;
    check_batch(s, 0, full);
    D.stream_destroy(s);
    D.stream_destroy(legacy);
    D.close(c);

    static struct cu_api old; /* a driver before 12.8 */
    old = fake_cu;
    old.cuMemcpyBatchAsync = NULL;
    cu_test_api(&old);
    c = open_fake();
    T_OK(D.stream_create(c, &s));
    check_batch(s, 0, full);
    D.stream_destroy(s);
    D.close(c);
    fake_clean();
}

/* ---------------------------------------------------------------- kernels and matmul */

static _Alignas(16) float numbers[3][64];

static side_op cast_op(void)
{
    side_op op = SIDE_OP_INIT;
    op.id = SIDE_OP_CAST;
    op.type[1] = SIDE_F16;
    op.in[0] = numbers[0];
    op.out = numbers[1];
    op.dim[0] = 64;
    return op;
}

T_TEST(kernel_sources)
{
    T_ONE_THREAD();
    dev_stream *s = NULL;
    side_op op = cast_op();
    side_device_props props;

    fake_begin();
    setenv("SIDESTREAM_NO_FATBIN", "1", 1);
    dev_context *c = open_fake();
    T_OK(D.props(c, &props));
    assert_true(props.kernels);
    assert_string_equal(props.kernels_from, "NVRTC 13.0");
    assert_int_equal(fake.live[FAKE_MODULE], 0); /* not compiled before it is needed */
    T_OK(D.stream_create(c, &s));
    T_OK(D.op(s, &op));
    assert_string_equal(fake.target, "sm_90");
    assert_int_equal(fake.live[FAKE_MODULE], 1);
    T_OK(D.op(s, &op));
    assert_true(fake.launches == 2 && fake.block == 256 && fake.grid == 1);
    op.type[1] = SIDE_F32; /* the same type: a copy */
    T_OK(D.op(s, &op));
    assert_true(fake.launches == 2);
    op.out = numbers[1] + 1;
    T_STATUS(D.op(s, &op), SIDE_INVALID); /* not aligned */
    D.stream_destroy(s);
    D.close(c);
    fake_clean();

    fake_begin(); /* a GPU newer than NVRTC: PTX of the newest that it knows */
    fake.major = 12;
    c = open_fake();
    T_OK(D.stream_create(c, &s));
    op = cast_op();
    T_OK(D.op(s, &op));
    assert_string_equal(fake.target, "compute_100");
    D.stream_destroy(s);
    D.close(c);
    fake_clean();

    fake_begin(); /* the source does not compile: said at the first op, and from then on in the properties */
    fake.fail_name = "nvrtcCompileProgram";
    c = open_fake();
    T_OK(D.stream_create(c, &s));
    T_STATUS(D.op(s, &op), SIDE_UNSUPPORTED);
    message_has("bad line");
    fake.fail_name = NULL;
    T_STATUS(D.op(s, &op), SIDE_UNSUPPORTED);
    T_OK(D.props(c, &props));
    assert_true(!props.kernels && strstr(props.kernels_from, "NVRTC") != NULL);
    D.stream_destroy(s);
    D.close(c);
    fake_clean();

    fake_begin(); /* neither */
    fake_libraries(NULL, NULL, NULL);
    c = open_fake();
    T_OK(D.props(c, &props));
    assert_true(!props.kernels && strstr(props.kernels_from, "no NVRTC") != NULL);
    T_OK(D.stream_create(c, &s));
    T_STATUS(D.op(s, &op), SIDE_UNSUPPORTED);
    D.stream_destroy(s);
    D.close(c);
    fake_clean();
}

/* A fatbin that the driver does not take gives way to NVRTC; where the build has none this is the same. */
T_TEST(kernel_fatbin)
{
    T_ONE_THREAD();
    side_device_props props;

    unsetenv("SIDESTREAM_NO_FATBIN");
    fake_begin();
    dev_context *c = open_fake();
    T_OK(D.props(c, &props));
    assert_true(props.kernels);
    const bool built = strcmp(props.kernels_from, "fatbin") == 0;
    D.close(c);
    fake.module_refusals = 1;
    c = open_fake();
    T_OK(D.props(c, &props));
    assert_true(props.kernels);
    assert_string_equal(props.kernels_from, "NVRTC 13.0");
    D.close(c);
    fake_clean();
    if (!built)
        T_SKIP("the build has no fatbin");
}

/* The real NVRTC, where there is one, compiles the embedded source. */
T_TEST(kernel_nvrtc)
{
    T_ONE_THREAD();
    const struct nvrtc_api *nvrtc = NULL;
    const struct cu_libs_test real = {NULL, &fake_cublas, &fake_nvml, false};
    dev_stream *s = NULL;
    side_op op = cast_op();

    fake_begin();
    cu_libs_test(&real);
    if (cu_nvrtc(fake.version, &nvrtc) != SIDE_OK) {
        message_has("libnvrtc");
        T_SKIP("no NVRTC here");
    }
    setenv("SIDESTREAM_NO_FATBIN", "1", 1);
    dev_context *c = open_fake();
    T_OK(D.stream_create(c, &s));
    T_OK(D.op(s, &op));
    assert_int_equal(fake.launches, 1);
    D.stream_destroy(s);
    D.close(c);
    fake_clean();
}

static side_op matmul_op(void)
{
    side_op op = SIDE_OP_INIT;
    op.id = SIDE_OP_MATMUL;
    op.in[0] = numbers[0];
    op.in[1] = numbers[1];
    op.out = numbers[2];
    op.dim[0] = 3;
    op.dim[1] = 5;
    op.dim[2] = 7;
    return op;
}

T_TEST(matmul)
{
    T_ONE_THREAD();
    dev_stream *a = NULL, *b = NULL;
    side_op op = matmul_op();
    static _Alignas(16) float expected[64];
    t_rng rng = t_rng_make(2);

    for (int i = 0; i < 64; i++) {
        numbers[0][i] = (float)t_rng_below(&rng, 100);
        numbers[1][i] = (float)t_rng_below(&rng, 100);
    }
    fake_begin();
    dev_context *c = open_fake();
    T_OK(D.stream_create(c, &a));
    T_OK(D.stream_create(c, &b));
    T_OK(D.op(a, &op));
    void *of_a = fake.workspace;
    assert_ptr_equal(fake.gemm_stream, D.stream_native(a));
    op.out = expected;
    T_OK(side_op_host(&op));
    assert_memory_equal(numbers[2], expected, 3 * 5 * sizeof(float));
    op.out = numbers[2];
    T_OK(D.op(b, &op));
    void *of_b = fake.workspace;
    assert_ptr_not_equal(of_a, of_b);
    T_OK(D.op(a, &op));
    assert_ptr_equal(fake.workspace, of_a);

    /* a stream that goes leaves its workspace to the next one, which waits for what was done with it */
    D.stream_destroy(a);
    T_OK(D.stream_create(c, &a));
    fake.stream_waits = 0;
    T_OK(D.op(a, &op));
    assert_ptr_equal(fake.workspace, of_a);
    assert_int_equal(fake.stream_waits, 1);

    /* what a graph may use nobody else gets */
    fake.capturing = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    T_OK(D.op(a, &op));
    D.stream_destroy(a);
    fake.capturing = 0;
    T_OK(D.stream_create(c, &a));
    T_OK(D.op(a, &op));
    assert_ptr_not_equal(fake.workspace, of_a);
    D.stream_destroy(a);
    D.stream_destroy(b);
    D.close(c);
    fake_clean();

    fake_begin();
    fake_libraries(&fake_nvrtc, NULL, &fake_nvml);
    c = open_fake();
    T_OK(D.stream_create(c, &a));
    T_STATUS(D.op(a, &op), SIDE_NO_LIBRARY);
    fake_libraries(&fake_nvrtc, &fake_cublas, &fake_nvml);
    fake.fail_name = "cublasGemmEx";
    T_STATUS(D.op(a, &op), SIDE_DEVICE_ERROR);
    message_has("cuBLAS status 13");
    fake.fail_name = NULL;
    T_OK(D.op(a, &op));
    D.stream_destroy(a);
    D.close(c);
    fake_clean();
}

/* Threads that queue products and kernels at once, each on its stream. */
static void *queue_all(void *context)
{
    dev_stream *s = NULL;
    side_op product = matmul_op(), cast = cast_op();
    static _Thread_local _Alignas(16) float out[64];
    product.out = out;
    for (int round = 0; round < 20; round++) {
        T_OK(D.stream_create(context, &s));
        for (int i = 0; i < 5; i++) {
            T_OK(D.op(s, &product));
            T_OK(D.op(s, &cast));
        }
        D.stream_destroy(s);
    }
    assert_int_equal(depth, 0);
    return NULL;
}

T_TEST(threads)
{
    pthread_t thread[4];

    fake_begin();
    dev_context *c = open_fake();
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, queue_all, c), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(thread[i], NULL);
    assert_int_equal(fake.gemms, 4 * 20 * 5);
    assert_int_equal(fake.launches, 4 * 20 * 5);
    D.close(c);
    fake_clean();
}

/* ---------------------------------------------------------------- link */

static void write_file(const char *name, const char *text)
{
    char path[600];
    snprintf(path, sizeof(path), "%s/bus/pci/devices/0000:0a:00.0/%s", cuda_test_sysfs, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void make_sysfs(void)
{
    static const char *const folders[] = {"bus", "bus/pci", "bus/pci/devices", "bus/pci/devices/0000:0a:00.0"};
    char path[600];

    cuda_test_sysfs = t_tmpdir();
    for (size_t i = 0; i < 4; i++) {
        snprintf(path, sizeof(path), "%s/%s", cuda_test_sysfs, folders[i]);
        assert_int_equal(mkdir(path, 0755), 0);
    }
    write_file("current_link_speed", "2.5 GT/s PCIe\n");
    write_file("current_link_width", "4\n");
    write_file("max_link_speed", "16.0 GT/s PCIe\n");
    write_file("max_link_width", "16\n");
    write_file("numa_node", "1\n");
}

T_TEST(link)
{
    T_ONE_THREAD();
    side_link l;
    side_device_props props;

    make_sysfs();
    fake_begin();
    dev_context *c = open_fake();
    T_OK(D.props(c, &props));
    assert_int_equal(props.numa_node, 1);
    T_OK(D.link(c, &l)); /* NVML */
    assert_string_equal(l.kind, "PCIe");
    assert_true(l.generation == 1 && l.width == 8 && l.max_generation == 5 && l.max_width == 16);
    assert_true(l.peak_gbps > 63.0 && l.peak_gbps < 63.1);
    fake.fail_name = "nvmlDeviceGetMaxPcieLinkWidth"; /* gives way to sysfs as a whole */
    T_OK(D.link(c, &l));
    assert_true(l.generation == 1 && l.width == 4 && l.max_generation == 4 && l.max_width == 16);
    assert_true(l.peak_gbps > 31.4 && l.peak_gbps < 31.6);
    fake_libraries(NULL, NULL, NULL);
    write_file("max_link_speed", "Unknown\n");
    write_file("max_link_width", "255\n");
    T_OK(D.link(c, &l));
    assert_true(l.max_generation == 0 && l.max_width == 0 && l.peak_gbps == 0);
    D.close(c);
    write_file("numa_node", "-1\n");
    assert_int_equal(cuda_numa_node("0000:0a:00.0"), -1);
    assert_int_equal(cuda_numa_node("ffff:0a:00.0"), -1);

    fake_begin();
    fake.c2c = 1;
    fake.name = "NVIDIA GH200 480GB";
    c = open_fake();
    T_OK(D.link(c, &l));
    assert_string_equal(l.kind, "NVLink-C2C");
    assert_true(l.peak_gbps == 450);
    D.close(c);
    fake.c2c = 0;
    fake.coherent = 1; /* an NVML that does not tell */
    fake.name = "NVIDIA GB200";
    c = open_fake();
    T_OK(D.link(c, &l));
    assert_string_equal(l.kind, "NVLink-C2C");
    D.close(c);
    fake_clean();
}

/* ---------------------------------------------------------------- fault loops */

static void mark(void *user)
{
    *(int *)user = 1;
}

/* Streams, events, copies and ops on an open device; everything that was made is given back whatever fails. */
static side_status use_streams(dev_context *c, void *data)
{
    dev_stream *s = NULL, *wrapped = NULL;
    dev_event *e[2] = {NULL, NULL};
    side_piece pieces[2] = {{data, numbers[0], 16}, {(char *)data + 16, numbers[1], 16}};
    side_op cast = cast_op(), product = matmul_op();
    int called = 0;
    double ns;

    side_status status = D.stream_create(c, &s);
    if (status == SIDE_OK)
        status = D.stream_wrap(c, D.stream_native(s), &wrapped);
    for (int i = 0; i < 2; i++)
        if (status == SIDE_OK)
            status = D.event_create(c, true, &e[i]);
    if (status == SIDE_OK)
        status = D.event_record(e[0], s);
    if (status == SIDE_OK)
        status = D.stream_wait(s, e[0]);
    if (status == SIDE_OK)
        status = D.copy(s, SIDE_COPY_H2D, data, numbers[0], 64);
    if (status == SIDE_OK)
        status = D.copy_blocks(s, SIDE_COPY_H2D, pieces, 2, SIDE_PATH_BATCH);
    if (status == SIDE_OK)
        status = D.set(s, data, 1, 64);
    if (status == SIDE_OK)
        status = D.op(s, &cast);
    if (status == SIDE_OK)
        status = D.op(wrapped, &product);
    if (status == SIDE_OK)
        status = D.host_fn(s, mark, &called, 0);
    if (status == SIDE_OK)
        status = D.event_record(e[1], s);
    if (status == SIDE_OK)
        status = D.stream_query(s);
    if (status == SIDE_OK)
        status = D.event_query(e[1]);
    if (status == SIDE_OK)
        status = D.event_wait(e[1], UINT64_MAX);
    if (status == SIDE_OK)
        status = D.event_elapsed(e[0], e[1], &ns);
    assert_true(status != SIDE_OK || called == 1);
    D.event_destroy(e[0]);
    D.event_destroy(e[1]);
    D.stream_destroy(wrapped);
    D.stream_destroy(s);
    return status;
}

static side_status session(void)
{
    dev_context *c = NULL;
    void *data = NULL, *host = NULL;
    size_t free_bytes, total_bytes;
    side_device_props props;
    side_memory_kind kind;
    side_link link;
    char why[200];

    if (D.count(why, sizeof(why)) == 0)
        return side_last_error()->status;
    side_status status = D.open("1", &c);
    if (status != SIDE_OK) {
        assert_null(c);
        return status;
    }
    status = D.props(c, &props);
    if (status == SIDE_OK)
        status = D.link(c, &link);
    if (status == SIDE_OK)
        status = D.memory(c, &free_bytes, &total_bytes);
    if (status == SIDE_OK)
        status = D.alloc(c, 4096, &data);
    if (status == SIDE_OK)
        status = D.host_alloc(c, 4096, &host);
    if (status == SIDE_OK)
        status = D.memory_kind(c, host, &kind);
    if (status == SIDE_OK)
        status = D.host_register(c, &fake, 4096, true);
    if (status == SIDE_OK) {
        status = use_streams(c, data);
        const side_status undone = D.host_unregister(c, &fake);
        if (undone != SIDE_OK && fake.registered > 0)
            fake.registered--; /* it could not be tried: the push failed */
        status = status == SIDE_OK ? undone : status;
    }
    D.host_free(c, host);
    D.free(c, data);
    D.close(c);
    return status;
}

static void fault_loop(void)
{
    static const int codes[] = {CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_ILLEGAL_ADDRESS,
                                CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_NOT_FOUND};

    for (size_t i = 0; i < sizeof(codes) / sizeof(codes[0]); i++) {
        bool failed = true;
        unsigned long n = 0, statuses = 0;
        while (failed) {
            fake_begin();
            fake.code = codes[i];
            fake.fail_at = ++n;
            const side_status status = session();
            failed = fake.failed != NULL;
            statuses += status != SIDE_OK;
            assert_true(failed || status == SIDE_OK);
            assert_true(status <= SIDE_OK);
            fake_clean();
        }
        /* most calls matter to the one who called; the others have a second way (names, NVML, ...) or only clean up */
        if (n < 80 || statuses < n / 3)
            T_FAIL("%lu calls, %lu failures told", n, statuses);
    }
}

T_TEST(faults)
{
    T_ONE_THREAD();
    fault_loop();
}

T_TEST(faults_nvrtc)
{
    T_ONE_THREAD();
    setenv("SIDESTREAM_NO_FATBIN", "1", 1);
    fault_loop();
}

T_TEST(faults_memory)
{
    T_ONE_THREAD();
    setenv("SIDESTREAM_NO_FATBIN", "1", 1);
    for (unsigned long n = 1;; n++) {
        fake_begin();
        mem_fail_at(n);
        const side_status status = session();
        const unsigned long calls = mem_fail_at(0);
        fake_clean();
        if (calls < n) {
            T_OK(status);
            assert_true(n > 5);
            return;
        }
        T_STATUS(status, SIDE_NO_MEMORY);
    }
}

T_MAIN(T(load_symbols), T(load_failures), T(open_arguments), T(error_mapping), T(memory_kinds), T(stream_wrap),
       T(event_waiting), T(copy_batches), T(kernel_sources), T(kernel_fatbin), T_LONG(kernel_nvrtc, 60), T(matmul),
       T(threads), T(link), T(faults), T(faults_nvrtc), T(faults_memory))
