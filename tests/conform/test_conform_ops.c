/* SPDX-License-Identifier: MIT
 *
 * Every device: the named ops against their twins on the host, and matmul against doubles. */
#include "conform.h"

#include <math.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

/* Runs `op`, whose pointers are host memory, on the device; `in_place`: the result over the input. */
static void run_on_device(struct rig *r, const side_op *op, void *out, bool in_place)
{
    size_t in_bytes[2] = {0, 0}, out_bytes = 0;
    side_op o = *op;
    void *data[3] = {NULL, NULL, NULL};

    T_OK(side_op_bytes(op, in_bytes, &out_bytes));
    for (int i = 0; i < 2; i++) {
        if (in_bytes[i] == 0)
            continue;
        o.in[i] = data[i] = device_make(r->device, in_bytes[i]);
        T_OK(side_copy_async(r->stream, SIDE_COPY_H2D, data[i], op->in[i], in_bytes[i]));
    }
    if (in_place) {
        o.out = data[0];
    } else {
        o.out = data[2] = device_make(r->device, out_bytes + 64);
        T_OK(side_memset_async(r->stream, data[2], 0x3c, out_bytes + 64));
    }
    T_OK(side_op_async(r->stream, &o));
    T_OK(side_copy_async(r->stream, SIDE_COPY_D2H, out, o.out, out_bytes));
    if (!in_place) { /* and nothing behind it */
        unsigned char behind[64];
        T_OK(side_copy_async(r->stream, SIDE_COPY_D2H, behind, (char *)o.out + out_bytes, 64));
        sync_stream(r->stream);
        for (int i = 0; i < 64; i++)
            assert_int_equal(behind[i], 0x3c);
    }
    sync_stream(r->stream);
    for (int i = 0; i < 3; i++)
        side_device_free(r->device, data[i]);
}

/* ---------------------------------------------------------------- casts */

/* Every pattern of 16 or 8 bits; of f32 and f64 every upper half with the lower halves at which rounding turns. */
static void *cast_input(side_type type, size_t *count)
{
    static const uint16_t low[] = {0,      1,      0x0fff, 0x1000, 0x1001, 0x2000,
                                   0x7fff, 0x8000, 0x8001, 0xefff, 0xf000, 0xffff};
    enum { LOWS = sizeof(low) / sizeof(low[0]) };
    const size_t width = side_type_bytes(type), n = width >= 4 ? (size_t)65536 * LOWS : 65536;
    unsigned char *p = host_make(n * width);

    for (uint64_t i = 0; i < n; i++) {
        const uint64_t half = low[i % LOWS], f32 = i / LOWS << 16 | half;
        const uint64_t value = width == 8 ? f32 << 32 | half << 16 | (i & 1) : width == 4 ? f32 : i;
        memcpy(p + i * width, &value, width);
    }
    *count = n;
    return p;
}

static void check_cast(struct rig *r, side_type from, side_type to, const void *in, size_t count)
{
    const size_t bytes = count * side_type_bytes(to);
    unsigned char *got = host_make(bytes), *expected = host_make(bytes);
    side_op op = SIDE_OP_INIT;

    op.id = SIDE_OP_CAST;
    op.type[0] = from;
    op.type[1] = to;
    op.dim[0] = count;
    op.in[0] = in;
    op.out = expected;
    T_OK(side_op_host(&op));
    run_on_device(r, &op, got, false);
    for (size_t i = 0; i < count; i++) {
        const size_t n = side_type_bytes(to), m = side_type_bytes(from);
        uint32_t a = 0, b = 0;
        uint64_t x = 0;
        memcpy(&a, got + i * n, n);
        memcpy(&b, expected + i * n, n);
        memcpy(&x, (const unsigned char *)in + i * m, m);
        if (a != b)
            T_FAIL("%s -> %s, %zu elements: number %zu, %llx, gives %x, not %x", side_type_name(from),
                   side_type_name(to), count, i, (unsigned long long)x, a, b);
    }
    free(got);
    free(expected);
}

T_TEST(casts_are_bit_exact)
{
    struct rig r = rig_open();
    static const side_type types[] = {SIDE_F32, SIDE_F16, SIDE_BF16, SIDE_F8E4M3, SIDE_F8E5M2, SIDE_F64};

    for (int i = 0; i < 6; i++) {
        size_t count = 0;
        void *in = cast_input(types[i], &count);
        for (int k = 0; k < 5; k++) {
            check_cast(&r, types[i], types[k], in, count);
            for (size_t n = 1; n <= 9; n++) /* ends that are no whole vector */
                check_cast(&r, types[i], types[k], in, n);
            check_cast(&r, types[i], types[k], in, 1027);
        }
        free(in);
    }
    rig_close(&r);
}

/* The known values, so that device and host cannot be wrong together. */
T_TEST(casts_of_known_values)
{
    struct rig r = rig_open();
    static const uint32_t in[] = {0x3f800000, 0x80000000, 0x7f800000, 0xff800001, 0x477fe000, 0x477ff000,
                                  0x33800000, 0x33000000, 0x33000001, 0x00000001, 0x3f808000, 0x3f818000};
    static const uint16_t f16[] = {0x3c00, 0x8000, 0x7c00, 0xfe00, 0x7bff, 0x7c00,
                                   0x0001, 0x0000, 0x0001, 0x0000, 0x3c04, 0x3c0c};
    static const uint16_t bf16[] = {0x3f80, 0x8000, 0x7f80, 0xffc0, 0x4780, 0x4780,
                                    0x3380, 0x3300, 0x3300, 0x0000, 0x3f80, 0x3f82};
    enum { COUNT = sizeof(in) / sizeof(in[0]) };
    uint16_t out[COUNT];
    side_op op = SIDE_OP_INIT;

    op.id = SIDE_OP_CAST;
    op.dim[0] = COUNT;
    op.in[0] = in;
    op.type[1] = SIDE_F16;
    run_on_device(&r, &op, out, false);
    for (int i = 0; i < COUNT; i++)
        if (out[i] != f16[i])
            T_FAIL("%08x as f16 is %04x, not %04x", in[i], out[i], f16[i]);
    op.type[1] = SIDE_BF16;
    run_on_device(&r, &op, out, false);
    for (int i = 0; i < COUNT; i++)
        if (out[i] != bf16[i])
            T_FAIL("%08x as bf16 is %04x, not %04x", in[i], out[i], bf16[i]);
    rig_close(&r);
}

/* ---------------------------------------------------------------- affine */

static void check_affine(struct rig *r, const float *in, size_t count, float scale, float bias, bool in_place)
{
    float *got = host_make(count * sizeof(float)), *expected = host_make(count * sizeof(float));
    side_op op = affine_op(expected, in, count * sizeof(float), scale, bias);

    T_OK(side_op_host(&op));
    run_on_device(r, &op, got, in_place);
    for (size_t i = 0; i < count; i++)
        if (memcmp(&got[i], &expected[i], sizeof(float)) != 0 && !(isnan(got[i]) && isnan(expected[i])))
            T_FAIL("%g * %a + %g is %a, not %a", (double)scale, (double)in[i], (double)bias, (double)got[i],
                   (double)expected[i]);
    free(got);
    free(expected);
}

T_TEST(affine_is_bit_exact)
{
    struct rig r = rig_open();
    enum { COUNT = 300001 };
    uint32_t *bits = host_make(COUNT * sizeof(*bits));
    float *in = host_make(COUNT * sizeof(*in));

    fill(bits, COUNT * sizeof(*bits), 9); /* any pattern: subnormals, infinities, NaN */
    memcpy(in, bits, COUNT * sizeof(*in));
    check_affine(&r, in, COUNT, 1.7f, -3.25f, false);
    check_affine(&r, in, COUNT, 1e-30f, 1e-40f, true);
    fill_floats(in, COUNT, 3);
    check_affine(&r, in, COUNT, 3.1415927f, 2.7182817f, false); /* two roundings: a fused one differs in many */
    check_affine(&r, in, COUNT, 3.1415927f, 2.7182817f, true);
    for (size_t n = 1; n <= 9; n++)
        check_affine(&r, in, n, 0.1f, 0.7f, n % 2 == 0);
    free(bits);
    free(in);
    rig_close(&r);
}

/* ---------------------------------------------------------------- XXH3 */

/* The whole hash by block sums made on the device, folded in uneven portions. */
static uint64_t hash_on_device(struct rig *r, const unsigned char *data, uint64_t total)
{
    const size_t blocks = total < 241 ? 0 : (size_t)((total - 1) / 1024);
    const size_t tail = total < 1024 + 64 ? (size_t)total : 1024 + 64;
    uint64_t *sums = host_make(blocks * 64 + 64), hash = 0;
    side_xxh3 state;

    if (blocks > 0) {
        side_op op = SIDE_OP_INIT;
        uint64_t *expected = host_make(blocks * 64);
        op.id = SIDE_OP_XXH3_BLOCKS;
        op.dim[0] = blocks;
        op.in[0] = data;
        op.out = expected;
        T_OK(side_op_host(&op));
        run_on_device(r, &op, sums, false);
        check_equal(sums, expected, blocks * 64, "block sums");
        free(expected);
    }
    side_xxh3_begin(&state);
    for (size_t at = 0, n; at < blocks; at += n) {
        n = 1 + at * 7 % 100;
        n = n < blocks - at ? n : blocks - at;
        side_xxh3_fold(&state, sums + at * 8, n);
    }
    T_OK(side_xxh3_end(&state, data + total - tail, tail, total, &hash));
    free(sums);
    return hash;
}

T_TEST(block_sums_fold_to_the_hash)
{
    struct rig r = rig_open();
    static const uint64_t totals[] = {0,    1,     8,     16,    128,   200,   240,   241,     512,
                                      1023, 1024,  1025,  1087,  1088,  1089,  2047,  2048,    2049,
                                      3072, 16383, 16384, 16385, 17408, 65536, 99999, 1 << 20, 3000001};
    const size_t room = 3000001;
    unsigned char *data = host_make(room);

    fill(data, room, 21);
    for (size_t i = 0; i < sizeof(totals) / sizeof(totals[0]); i++) {
        const uint64_t got = hash_on_device(&r, data, totals[i]), expected = XXH3_64bits(data, (size_t)totals[i]);
        if (got != expected)
            T_FAIL("%llu bytes: %016llx, not %016llx", (unsigned long long)totals[i], (unsigned long long)got,
                   (unsigned long long)expected);
    }
    memset(data, 0xff, room);
    assert_true(hash_on_device(&r, data, room) == XXH3_64bits(data, room));
    free(data);
    rig_close(&r);
}

/* ---------------------------------------------------------------- spin */

T_TEST(spins_take_their_time)
{
    struct rig r = rig_open();
    static const uint64_t ns[] = {1000, 50000, 1000000, 20000000};
    side_event *a = event_make(r.device, true), *b = event_make(r.device, true);

    spin_async(r.stream, 1000); /* loads the kernel */
    sync_stream(r.stream);
    for (size_t i = 0; i < sizeof(ns) / sizeof(ns[0]); i++) {
        double s = 0;
        T_OK(side_event_record(a, r.stream));
        spin_async(r.stream, ns[i]);
        T_OK(side_event_record(b, r.stream));
        sync_stream(r.stream);
        T_OK(side_event_elapsed(a, b, &s));
        /* not less, but for the resolution of events and of the GPU's timer (1 us on most, 32 ns on new ones) */
        if (s * 1e9 < (double)ns[i] - (r.gpu ? 1500 : 0.5) || s * 1e9 > (double)ns[i] + (r.gpu ? 5e6 : 0.5))
            T_FAIL("a spin of %llu ns took %.0f", (unsigned long long)ns[i], s * 1e9);
    }
    side_event_destroy(a);
    side_event_destroy(b);
    rig_close(&r);
}

/* ---------------------------------------------------------------- matmul */

struct product {
    side_math math;
    side_type out;
    double most; /* of the error, relative */
};

/* Why these. fp32: sums of up to 1024 products, each rounding 2^-24: worst case k * 2^-24 = 6e-5 of the sum of magnitudes, 1e-6 in practice. tf32: both
 * factors lose up to 2^-10 (hardware may cut off instead of rounding): 2 * 2^-10 = 1.95e-3. bf16: the inputs are exact; a bf16 result rounds to 2^-9. */
static const struct product products[] = {{SIDE_MATH_FP32, SIDE_F32, 1e-5},
                                          {SIDE_MATH_TF32, SIDE_F32, 2e-3},
                                          {SIDE_MATH_BF16, SIDE_F32, 1e-2},
                                          {SIDE_MATH_BF16, SIDE_BF16, 1e-2}};
enum { PRODUCTS = sizeof(products) / sizeof(products[0]) };

static float bf16_value(uint16_t h)
{
    const uint32_t u = (uint32_t)h << 16;
    float x;

    memcpy(&x, &u, sizeof(x));
    return x;
}

/* Elements of either type as floats. */
static float value_at(const void *data, size_t i, side_type type)
{
    float x;
    uint16_t h;

    if (type == SIDE_BF16) {
        memcpy(&h, (const unsigned char *)data + 2 * i, sizeof(h));
        return bf16_value(h);
    }
    memcpy(&x, (const unsigned char *)data + 4 * i, sizeof(x));
    return x;
}

/* Matrices of the type that the math takes; whole: small integers, of which every product and sum is exact in all of them. */
static void *matrix_make(const struct product *p, size_t count, uint64_t seed, bool whole)
{
    float *f = host_make(count * sizeof(float));
    t_rng rng = t_rng_make(seed);

    fill_floats(f, count, seed);
    for (size_t i = 0; whole && i < count; i++)
        f[i] = (float)((int)t_rng_below(&rng, 9) - 4);
    if (p->math != SIDE_MATH_BF16)
        return f;
    uint16_t *h = host_make(count * sizeof(*h));
    side_op op = SIDE_OP_INIT;
    op.id = SIDE_OP_CAST;
    op.type[1] = SIDE_BF16;
    op.dim[0] = count;
    op.in[0] = f;
    op.out = h;
    T_OK(side_op_host(&op));
    free(f);
    return h;
}

static side_op matmul_op(const struct product *p, const uint64_t dim[3], const void *a, const void *b, void *out)
{
    side_op op = SIDE_OP_INIT;

    op.id = SIDE_OP_MATMUL;
    op.math = p->math;
    op.type[0] = p->math == SIDE_MATH_BF16 ? SIDE_BF16 : SIDE_F32;
    op.type[1] = p->out;
    memcpy(op.dim, dim, sizeof(op.dim));
    op.in[0] = a;
    op.in[1] = b;
    op.out = out;
    return op;
}

static void check_product(const side_op *op, const void *got, double most)
{
    const size_t m = (size_t)op->dim[0], n = (size_t)op->dim[1], k = (size_t)op->dim[2];
    double error2 = 0, sum2 = 0;

    for (size_t i = 0; i < m; i++) {
        for (size_t j = 0; j < n; j++) {
            double sum = 0, size = 0;
            for (size_t x = 0; x < k; x++) {
                const double term = (double)value_at(op->in[0], i * k + x, op->type[0]) *
                                    (double)value_at(op->in[1], x * n + j, op->type[0]);
                sum += term;
                size += fabs(term);
            }
            const double error = fabs((double)value_at(got, i * n + j, op->type[1]) - sum);
            if (!(error <= most * size))
                T_FAIL("math %d, %zu x %zu x %zu: (%zu, %zu) is off by %g of %g", (int)op->math, m, n, k, i, j, error,
                       size);
            error2 += error * error;
            sum2 += sum * sum;
        }
    }
    if (!(sqrt(error2) <= most * sqrt(sum2)))
        T_FAIL("math %d, %zu x %zu x %zu: relative error %g, over %g", (int)op->math, m, n, k, sqrt(error2 / sum2),
               most);
}

static void skip_without_blas(struct rig *r)
{
    struct product p = products[0];
    const uint64_t dim[3] = {16, 16, 16};
    void *data = device_make(r->device, 4096);
    side_op op = matmul_op(&p, dim, data, (char *)data + 1024, (char *)data + 2048);

    T_OK(side_memset_async(r->stream, data, 0, 4096));
    if (side_op_async(r->stream, &op) == SIDE_NO_LIBRARY)
        T_SKIP("no cuBLAS: %s", side_last_error()->message);
    sync_stream(r->stream);
    side_device_free(r->device, data);
}

static const uint64_t shapes[][3] = {{1, 1, 1},
                                     {1, 64, 37},
                                     {64, 1, 100},
                                     {5, 7, 3},
                                     {33, 129, 65},
                                     {128, 96, 256},
                                     {T_TSAN ? 20 : 100, T_TSAN ? 40 : 200, 1024}};
enum { SHAPES = sizeof(shapes) / sizeof(shapes[0]) };

T_TEST(matmul_is_as_exact_as_its_math)
{
    struct rig r = rig_open();

    skip_without_blas(&r);
    for (int i = 0; i < PRODUCTS; i++) {
        for (int s = 0; s < SHAPES; s++) {
            const uint64_t *dim = shapes[s];
            void *a = matrix_make(&products[i], dim[0] * dim[2], 2 * (uint64_t)s + 1, false);
            void *b = matrix_make(&products[i], dim[2] * dim[1], 2 * (uint64_t)s + 2, false);
            void *out = host_make(dim[0] * dim[1] * sizeof(float));
            side_op op = matmul_op(&products[i], dim, a, b, out);
            run_on_device(&r, &op, out, false);
            check_product(&op, out, products[i].most);
            T_OK(side_op_host(&op)); /* the twin keeps to it, too */
            check_product(&op, out, products[i].most);
            free(a);
            free(b);
            free(out);
        }
    }
    rig_close(&r);
}

/* With whole numbers nothing rounds: rows, columns and strides are where they should be, bit for bit. */
T_TEST(matmul_of_whole_numbers_is_exact)
{
    struct rig r = rig_open();

    skip_without_blas(&r);
    for (int i = 0; i < PRODUCTS; i++) {
        for (int s = 0; s < SHAPES; s++) {
            const uint64_t dim[3] = {shapes[s][0], shapes[s][1], products[i].out == SIDE_BF16 ? 8 : shapes[s][2]};
            const size_t bytes = dim[0] * dim[1] * side_type_bytes(products[i].out);
            void *a = matrix_make(&products[i], dim[0] * dim[2], 2 * (uint64_t)s + 3, true);
            void *b = matrix_make(&products[i], dim[2] * dim[1], 2 * (uint64_t)s + 4, true);
            void *got = host_make(bytes), *expected = host_make(bytes);
            side_op op = matmul_op(&products[i], dim, a, b, expected);
            T_OK(side_op_host(&op));
            run_on_device(&r, &op, got, false);
            for (size_t k = 0; k < dim[0] * dim[1]; k++) /* by value: a sum of zero may have either sign */
                if (value_at(got, k, products[i].out) != value_at(expected, k, products[i].out))
                    T_FAIL("math %d, %d x %d x %d: element %zu is %g, not %g", (int)products[i].math, (int)dim[0],
                           (int)dim[1], (int)dim[2], k, (double)value_at(got, k, products[i].out),
                           (double)value_at(expected, k, products[i].out));
            free(a);
            free(b);
            free(got);
            free(expected);
        }
    }
    rig_close(&r);
}

/* Two streams multiply at once: neither uses the other's scratch memory. */
T_TEST(matmuls_on_two_streams)
{
    struct rig r = rig_open();
    enum { N = 192, ROUNDS = T_TSAN ? 6 : 30 };
    const uint64_t dim[3] = {N, N, N};
    const size_t bytes = N * N * sizeof(float);
    side_stream *streams[2] = {r.stream, stream_make(r.device)};
    float *host[2][2], *device[2][3], *got = host_make(bytes), *expected[2];

    skip_without_blas(&r);
    for (int i = 0; i < 2; i++) {
        expected[i] = host_make(bytes);
        for (int k = 0; k < 2; k++) {
            host[i][k] = matrix_make(&products[0], (size_t)N * N, (uint64_t)(2 * i + k + 1), true);
            device[i][k] = device_make(r.device, bytes);
            T_OK(side_copy_async(streams[i], SIDE_COPY_H2D, device[i][k], host[i][k], bytes));
        }
        device[i][2] = device_make(r.device, ROUNDS * bytes);
        side_op op = matmul_op(&products[0], dim, host[i][0], host[i][1], expected[i]);
        T_OK(side_op_host(&op));
    }
    for (size_t k = 0; k < ROUNDS; k++)
        for (int i = 0; i < 2; i++) {
            side_op op = matmul_op(&products[0], dim, device[i][0], device[i][1], device[i][2] + k * N * N);
            T_OK(side_op_async(streams[i], &op));
        }
    for (int i = 0; i < 2; i++) {
        for (size_t k = 0; k < ROUNDS; k++) {
            T_OK(side_copy_async(streams[i], SIDE_COPY_D2H, got, device[i][2] + k * N * N, bytes));
            sync_stream(streams[i]);
            for (size_t x = 0; x < (size_t)N * N; x++)
                assert_true(got[x] == expected[i][x]);
        }
        for (int k = 0; k < 3; k++)
            side_device_free(r.device, device[i][k]);
        free(host[i][0]);
        free(host[i][1]);
        free(expected[i]);
    }
    free(got);
    side_stream_destroy(streams[1]);
    rig_close(&r);
}

/* ---------------------------------------------------------------- refusals */

T_TEST(bad_ops_are_refused)
{
    struct rig r = rig_open();
    float *device = device_make(r.device, 4096);
    side_op op = SIDE_OP_INIT;

    T_STATUS(side_op_async(r.stream, NULL), SIDE_INVALID);
    T_STATUS(side_op_async(r.stream, &op), SIDE_INVALID); /* no id */
    op = affine_op(device, device, 1024, 1, 0);
    T_STATUS(side_op_async(NULL, &op), SIDE_INVALID);
    op.out = NULL;
    T_STATUS(side_op_async(r.stream, &op), SIDE_INVALID);
    op.out = device + 1; /* misaligned */
    op.in[0] = device + 257;
    T_STATUS(side_op_async(r.stream, &op), SIDE_INVALID);
    op = affine_op(device, device, 1024, 1, 0);
    op.dim[0] = UINT64_MAX / 2;
    T_STATUS(side_op_async(r.stream, &op), SIDE_TOO_LARGE);
    op.dim[0] = 0; /* nothing to do is done */
    T_OK(side_op_async(r.stream, &op));
    sync_stream(r.stream);
    side_device_free(r.device, device);
    rig_close(&r);
}

T_MAIN(EVERY(casts_are_bit_exact), EVERY(casts_of_known_values), EVERY(affine_is_bit_exact),
       EVERY(block_sums_fold_to_the_hash), EVERY(spins_take_their_time), EVERY(matmul_is_as_exact_as_its_math),
       EVERY(matmul_of_whole_numbers_is_exact), EVERY(matmuls_on_two_streams), EVERY(bad_ops_are_refused))
