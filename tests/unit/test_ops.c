/* SPDX-License-Identifier: MIT
 *
 * The named ops on the host. Casts are compared with arithmetic in double, which knows nothing of bits but the encodings' definition; XXH3 with
 * xxHash itself; matmul with the plain triple loop, bit for bit. */
#include "alloc.h"
#include "ops.h"
#include "t.h"

#include <math.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

/* ---------------------------------------------------------------- casts */

/* A small binary format by its definition: `digits` after the point, exponents from `least`, `most` its largest finite value. */
struct format {
    int digits, least;
    double most;
};
static const struct format f16 = {10, -14, 65504.0};
static const struct format bf16 = {7, -126, 0x1.fep127};

static double format_value(const struct format *f, uint16_t bits)
{
    const int exponent = (bits & 0x7fff) >> f->digits, fraction = bits & ((1 << f->digits) - 1);
    const int top = (1 << (15 - f->digits)) - 1;
    double value;

    if (exponent == top)
        value = fraction != 0 ? (double)NAN : HUGE_VAL;
    else
        value = exponent == 0 ? ldexp(fraction, f->least - f->digits)
                              : ldexp(fraction + (1 << f->digits), exponent - 1 + f->least - f->digits);
    return bits & 0x8000 ? -value : value;
}

/* The nearest of the format's values, ties to the even fraction; infinity from half a step past the largest on. */
static double format_round(const struct format *f, double x)
{
    int exponent;

    if (x == 0 || isinf(x))
        return x;
    frexp(x, &exponent);
    exponent = exponent - 1 < f->least ? f->least : exponent - 1;
    const double step = ldexp(1, exponent - f->digits);
    const double y = rint(x / step) * step; /* both exact in double; rint takes the even one of two */
    return fabs(y) > f->most ? copysign(HUGE_VAL, x) : y;
}

static float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

static bool same(double a, double b)
{
    return a == b && !signbit(a) == !signbit(b);
}

static void check_narrow(uint32_t bits)
{
    const uint16_t h = ops_f32_to_f16(bits), b = ops_f32_to_bf16(bits);

    if ((bits & 0x7fffffffu) > 0x7f800000u) { /* NaN: sign, quiet bit, the top of the payload */
        const uint32_t sign = bits >> 16 & 0x8000u;
        if (h != (sign | 0x7e00u | (bits >> 13 & 0x1ffu)) || b != (sign | 0x7fc0u | (bits >> 16 & 0x3fu)))
            T_FAIL("NaN %08x gives f16 %04x, bf16 %04x", bits, h, b);
        return;
    }
    const double x = float_of(bits);
    if (!same(format_value(&f16, h), format_round(&f16, x)))
        T_FAIL("%08x (%a) gives f16 %04x", bits, x, h);
    if (!same(format_value(&bf16, b), format_round(&bf16, x)))
        T_FAIL("%08x (%a) gives bf16 %04x", bits, x, b);
}

T_TEST(cast_from_f32)
{
    t_rng rng = t_rng_make(1);
    const uint64_t count = T_SANITIZED ? 1 << 20 : 1 << 23;

    for (uint64_t i = 0; i < count; i++)
        check_narrow((uint32_t)t_rng_next(&rng));
    /* around every value of either format, around every middle between two, and their NaNs: the low half decides the rounding */
    static const uint16_t lows[] = {0,      1,      0x0fff, 0x1000, 0x1001, 0x1fff, 0x2000,
                                    0x3000, 0x7fff, 0x8000, 0x8001, 0xefff, 0xf000, 0xffff};
    for (uint32_t high = 0; high < 65536; high++)
        for (size_t i = 0; i < sizeof(lows) / sizeof(lows[0]); i++)
            check_narrow(high << 16 | lows[i]);
    /* where f16 is subnormal every bit can be the half */
    for (uint32_t exponent = 100; exponent <= 114; exponent++)
        for (uint32_t bit = 0; bit < 23; bit++)
            for (int around = -1; around <= 1; around++)
                for (uint32_t top = 0; top < 2; top++)
                    check_narrow((exponent << 23 | top << 22 | 1u << bit) + (uint32_t)around);
}

T_TEST(cast_to_f32)
{
    for (uint32_t i = 0; i < 65536; i++) {
        const uint16_t bits = (uint16_t)i;
        const uint32_t h = ops_f16_to_f32(bits), b = ops_bf16_to_f32(bits);
        if (isnan(format_value(&f16, bits)))
            assert_int_equal(h, (uint32_t)(bits & 0x8000u) << 16 | 0x7fc00000u | (uint32_t)(bits & 0x1ffu) << 13);
        else
            assert_true(same(float_of(h), format_value(&f16, bits)));
        if (isnan(format_value(&bf16, bits)))
            assert_int_equal(b, i << 16 | 0x400000u);
        else
            assert_true(same(float_of(b), format_value(&bf16, bits)));
        if (!isnan(format_value(&f16, bits))) /* there and back */
            assert_int_equal(ops_f32_to_f16(h), bits);
        if (!isnan(format_value(&bf16, bits)))
            assert_int_equal(ops_f32_to_bf16(b), bits);
    }
}

/* The f8 by their definition, and by trying all values: the nearest, of two the even one. Too large: 448 in E4M3, infinity from half a step past 57344 in E5M2. */
static double f8_value(bool e4m3, uint32_t bits)
{
    const int digits = e4m3 ? 3 : 2, least = e4m3 ? -6 : -14;
    const int a = (int)(bits & 0x7f), exponent = a >> digits, fraction = a & ((1 << digits) - 1);
    double value = exponent == 0 ? ldexp(fraction, least - digits)
                                 : ldexp(fraction + (1 << digits), exponent - 1 + least - digits);

    if (e4m3 ? a == 0x7f : a >= 0x7c)
        value = !e4m3 && a == 0x7c ? HUGE_VAL : (double)NAN;
    return bits & 0x80 ? -value : value;
}

static uint32_t f8_nearest(bool e4m3, double x)
{
    const uint32_t most = e4m3 ? 0x7e : 0x7b;
    const double a = fabs(x);
    uint32_t low = 0, high = most;

    if (isnan(x))
        return signbit(x) ? 0xff : 0x7f;
    while (low < high) { /* the largest that is not above a */
        const uint32_t middle = (low + high + 1) / 2;
        if (f8_value(e4m3, middle) <= a)
            low = middle;
        else
            high = middle - 1;
    }
    if (low == most) {
        if (!e4m3 && a >= 57344 + 4096)
            low = 0x7c;
    } else {
        const double down = a - f8_value(e4m3, low), up = f8_value(e4m3, low + 1) - a;
        if (up < down || (up == down && low % 2 == 1))
            low++;
    }
    return low | (signbit(x) ? 0x80 : 0);
}

static void check_f8(uint32_t bits)
{
    const double x = float_of(bits);

    if (ops_f32_to_f8e4m3(bits) != f8_nearest(true, x) || ops_f32_to_f8e5m2(bits) != f8_nearest(false, x))
        T_FAIL("%08x (%a) gives e4m3 %02x, e5m2 %02x", bits, x, ops_f32_to_f8e4m3(bits), ops_f32_to_f8e5m2(bits));
}

T_TEST(cast_f8)
{
    t_rng rng = t_rng_make(2);
    const uint64_t count = T_SANITIZED ? 1 << 17 : 1 << 20;

    for (uint64_t i = 0; i < count; i++)
        check_f8((uint32_t)t_rng_next(&rng));
    for (uint32_t i = 0; i < 256; i++)
        for (int e4m3 = 0; e4m3 < 2; e4m3++) {
            const uint8_t bits = (uint8_t)i;
            const uint32_t wide = e4m3 ? ops_f8e4m3_to_f32(bits) : ops_f8e5m2_to_f32(bits);
            const double value = f8_value(e4m3, i);
            if (isnan(value) ? !isnan(float_of(wide)) : !same(float_of(wide), value))
                T_FAIL("%02x gives %08x", i, wide);
            assert_int_equal(wide >> 31, i >> 7);
            if (isnan(value))
                continue;
            assert_int_equal(e4m3 ? ops_f32_to_f8e4m3(wide) : ops_f32_to_f8e5m2(wide), bits);
            /* the middle to the next, and what is just beside it */
            const double next = isnan(f8_value(e4m3, i + 1)) || isinf(value) ? value : f8_value(e4m3, i + 1);
            for (int around = -1; around <= 1 && isfinite(next); around++)
                check_f8(bits_of((float)((value + next) / 2)) + (uint32_t)around);
        }
    static const double ends[] = {448,   463.9, 464,   464.1,    480, 1e30,    57344,
                                  61439, 61440, 65536, HUGE_VAL, NAN, 0x1p-10, 0x1p-17};
    for (size_t i = 0; i < sizeof(ends) / sizeof(ends[0]); i++)
        for (int sign = -1; sign <= 1; sign += 2)
            check_f8(bits_of((float)(sign * ends[i])));
    assert_int_equal(ops_f32_to_f8e4m3(0x7f800000), 0x7e);
    assert_int_equal(ops_f32_to_f8e5m2(0x7f800000), 0x7c);
}

T_TEST(cast_from_f64)
{
    t_rng rng = t_rng_make(3);
    const uint64_t count = T_SANITIZED ? 1 << 18 : 1 << 21;

    for (uint64_t i = 0; i < count; i++) {
        /* exponents of float, a bit beyond, and the rounding bits at their turning points */
        uint64_t u = t_rng_next(&rng), exponent = 860 + t_rng_next(&rng) % 300;
        if (i % 4 != 0)
            u = (u & 0x800fffffe0000000ull) | exponent << 52 |
                (i % 4 == 1   ? 0x10000000u
                 : i % 4 == 2 ? 0x0fffffffu
                              : 0x10000001u);
        if (i % 16 == 4) /* a single bit more: halves of subnormals */
            u = (u & 0x8000000000000000ull) | exponent << 52 | 1ull << (i / 16 % 52);
        double x;
        memcpy(&x, &u, sizeof(x));
        const uint32_t got = ops_f64_to_f32(u);
        if (isnan(x) ? !isnan(float_of(got)) || got >> 31 != u >> 63 : got != bits_of((float)x))
            T_FAIL("%016llx (%a) gives %08x", (unsigned long long)u, x, got);
    }
}

static side_op cast_op(side_type from, side_type to, const void *in, void *out, uint64_t n)
{
    side_op op = SIDE_OP_INIT;
    op.id = SIDE_OP_CAST;
    op.type[0] = from;
    op.type[1] = to;
    op.in[0] = in;
    op.out = out;
    op.dim[0] = n;
    return op;
}

/* Element i of an array of `type`, by the single functions. */
static uint32_t widened(side_type type, const void *data, size_t i)
{
    switch (type) {
    case SIDE_F64: return ops_f64_to_f32(((const uint64_t *)data)[i]);
    case SIDE_F32: return ((const uint32_t *)data)[i];
    case SIDE_F16: return ops_f16_to_f32(((const uint16_t *)data)[i]);
    case SIDE_BF16: return ops_bf16_to_f32(((const uint16_t *)data)[i]);
    case SIDE_F8E4M3: return ops_f8e4m3_to_f32(((const uint8_t *)data)[i]);
    default: return ops_f8e5m2_to_f32(((const uint8_t *)data)[i]);
    }
}

static uint32_t narrowed(side_type type, uint32_t bits)
{
    switch (type) {
    case SIDE_F32: return bits;
    case SIDE_F16: return ops_f32_to_f16(bits);
    case SIDE_BF16: return ops_f32_to_bf16(bits);
    case SIDE_F8E4M3: return ops_f32_to_f8e4m3(bits);
    default: return ops_f32_to_f8e5m2(bits);
    }
}

/* The public call, all pairs: each element as by the single functions, nothing past the end. */
T_TEST(cast_pairs)
{
    enum { N = 65536, TYPES = 6 };
    static const side_type types[TYPES] = {SIDE_F64, SIDE_F32, SIDE_F16, SIDE_BF16, SIDE_F8E4M3, SIDE_F8E5M2};
    static uint64_t in[N], out[N + 1];

    for (int a = 0; a < TYPES; a++)
        for (int b = 0; b < TYPES; b++) {
            const side_type from = types[a], to = types[b];
            const size_t width = side_type_bytes(from), end = N * side_type_bytes(to);
            side_op op = cast_op(from, to, in, out, N);
            for (uint64_t i = 0; i < N; i++) { /* all of 16 bits; f32 and f64 have them at their top */
                const uint64_t value = width == 8   ? (i << 48 | i * 7919 << 20)
                                       : width == 4 ? (i << 16 | (i * 7919 & 0xffff))
                                                    : i;
                memcpy((unsigned char *)in + i * width, &value, width);
            }
            memset(out, 0x3c, sizeof(out));
            if (to == SIDE_F64 && from != to) {
                T_STATUS(side_op_host(&op), SIDE_INVALID);
                continue;
            }
            T_OK(side_op_host(&op));
            for (size_t i = end; i < sizeof(out); i++)
                assert_int_equal(((unsigned char *)out)[i], 0x3c);
            if (from == to)
                assert_memory_equal(out, in, end);
            for (size_t i = 0; i < N && from != to; i++) {
                uint32_t got = 0;
                memcpy(&got, (unsigned char *)out + i * side_type_bytes(to), side_type_bytes(to));
                if (got != narrowed(to, widened(from, in, i)))
                    T_FAIL("%s -> %s of element %zu", side_type_name(from), side_type_name(to), i);
            }
        }
}

/* ---------------------------------------------------------------- xxh3 */

static void check_hash(const unsigned char *data, size_t bytes, size_t pieces, uint64_t *sums)
{
    const size_t blocks = bytes == 0 ? 0 : (bytes - 1) / 1024, tail = bytes < 1088 ? bytes : 1088;
    side_xxh3 state;
    uint64_t hash = 0;
    side_op op = SIDE_OP_INIT;

    op.id = SIDE_OP_XXH3_BLOCKS;
    op.in[0] = data;
    op.out = sums;
    op.dim[0] = blocks;
    T_OK(side_op_host(&op));
    side_xxh3_begin(&state);
    for (size_t i = 0; i < pieces; i++) {
        const size_t first = blocks * i / pieces, last = blocks * (i + 1) / pieces;
        side_xxh3_fold(&state, sums + 8 * first, last - first);
    }
    T_OK(side_xxh3_end(&state, data + bytes - tail, tail, bytes, &hash));
    if (hash != XXH3_64bits(data, bytes))
        T_FAIL("%zu bytes in %zu pieces", bytes, pieces);
}

T_TEST(xxh3_lengths)
{
    enum { MOST = 4 << 20 };
    unsigned char *data = test_malloc(MOST);
    uint64_t *sums = test_malloc(MOST / 16);
    t_rng rng = t_rng_make(3);

    t_rng_fill(&rng, data, MOST);
    for (size_t bytes = 0; bytes <= 5000; bytes++)
        check_hash(data, bytes, 1, sums);
    for (int i = 0; i < 200; i++)
        check_hash(data, (size_t)t_rng_below(&rng, i < 180 ? 100000 : MOST), 1 + (size_t)t_rng_below(&rng, 4), sums);
    memset(data, 0, MOST);
    for (size_t bytes = 0; bytes <= 3000; bytes += 7)
        check_hash(data, bytes, 2, sums);
    test_free(sums);
    test_free(data);
}

T_TEST(xxh3_misuse)
{
    unsigned char data[4096] = {1};
    uint64_t sums[8 * 4], hash = 77;
    side_xxh3 state;

    xxh3_block_sums(sums, data, 4);
    side_xxh3_begin(&state);
    T_STATUS(side_xxh3_end(&state, data, 1088, 4096, &hash), SIDE_STATE); /* 3 blocks are missing */
    side_xxh3_fold(&state, sums, 4);
    T_STATUS(side_xxh3_end(&state, data, 1088, 4096, &hash), SIDE_STATE); /* one too many: the last is the tail's */
    side_xxh3_begin(&state);
    side_xxh3_fold(&state, sums, 3);
    T_STATUS(side_xxh3_end(&state, data, 1024, 4096, &hash), SIDE_INVALID);
    T_STATUS(side_xxh3_end(&state, NULL, 1088, 4096, &hash), SIDE_INVALID);
    T_STATUS(side_xxh3_end(&state, data, 1088, 4096, NULL), SIDE_INVALID);
    assert_int_equal(hash, 77);
    T_OK(side_xxh3_end(&state, data + 4096 - 1088, 1088, 4096, &hash));
    assert_true(hash == XXH3_64bits(data, 4096));
}

/* ---------------------------------------------------------------- matmul */

static float tf32(float x)
{
    double step;
    int exponent;

    if (x == 0 || !isfinite(x))
        return x;
    frexp(x, &exponent);
    step = ldexp(1, (exponent - 1 < -126 ? -126 : exponent - 1) - 10);
    return (float)(round(x / step) * step); /* ties away from zero */
}

static void check_matmul(size_t m, size_t n, size_t k, side_math math, side_type out_type, t_rng *rng)
{
    const bool half = math == SIDE_MATH_BF16;
    float *a = test_malloc(m * k * 4), *b = test_malloc(k * n * 4), *c = test_malloc(m * n * 4);
    uint16_t *ah = test_malloc(m * k * 2), *bh = test_malloc(k * n * 2);
    side_op op = SIDE_OP_INIT;

    for (size_t i = 0; i < m * k; i++) {
        a[i] = (float)((double)t_rng_below(rng, 1 << 20) / (1 << 19) - 1);
        ah[i] = ops_f32_to_bf16(bits_of(a[i]));
        a[i] = half ? float_of(ops_bf16_to_f32(ah[i])) : a[i];
    }
    for (size_t i = 0; i < k * n; i++) {
        b[i] = (float)((double)t_rng_below(rng, 1 << 20) / (1 << 19) - 1);
        bh[i] = ops_f32_to_bf16(bits_of(b[i]));
        b[i] = half ? float_of(ops_bf16_to_f32(bh[i])) : b[i];
    }
    op.id = SIDE_OP_MATMUL;
    op.in[0] = half ? (void *)ah : (void *)a;
    op.in[1] = half ? (void *)bh : (void *)b;
    op.out = c;
    op.dim[0] = m;
    op.dim[1] = n;
    op.dim[2] = k;
    op.math = math;
    op.type[0] = half ? SIDE_BF16 : SIDE_F32;
    op.type[1] = out_type;
    T_OK(side_op_host(&op));
    for (size_t i = 0; i < m; i++)
        for (size_t j = 0; j < n; j++) {
            float sum = 0;
            for (size_t p = 0; p < k; p++) {
                const float x = a[i * k + p], y = b[p * n + j];
                const float product = math == SIDE_MATH_TF32 ? tf32(x) * tf32(y) : x * y;
                sum += product;
            }
            uint16_t narrow;
            memcpy(&narrow, (char *)c + (i * n + j) * 2, 2);
            if (out_type == SIDE_BF16 ? narrow != ops_f32_to_bf16(bits_of(sum)) : bits_of(c[i * n + j]) != bits_of(sum))
                T_FAIL("%zu x %zu x %zu: element %zu, %zu", m, n, k, i, j);
        }
    test_free(a);
    test_free(b);
    test_free(c);
    test_free(ah);
    test_free(bh);
}

T_TEST(matmul_shapes)
{
    t_rng rng = t_rng_make(5);
    static const size_t shapes[][3] = {{1, 1, 1},      {4, 8, 1},     {5, 9, 3},   {64, 256, 256},
                                       {65, 257, 257}, {3, 300, 520}, {130, 7, 33}};

    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        const size_t *s = shapes[i];
        check_matmul(s[0], s[1], s[2], SIDE_MATH_FP32, SIDE_F32, &rng);
        check_matmul(s[0], s[1], s[2], SIDE_MATH_TF32, SIDE_F32, &rng);
        check_matmul(s[0], s[1], s[2], SIDE_MATH_BF16, SIDE_F32, &rng);
        check_matmul(s[0], s[1], s[2], SIDE_MATH_BF16, SIDE_BF16, &rng);
    }
    T_FOR_SEEDS (seed, 10) {
        t_rng r = t_rng_make(seed);
        check_matmul(1 + t_rng_below(&r, 80), 1 + t_rng_below(&r, 80), 1 + t_rng_below(&r, 300), SIDE_MATH_FP32,
                     SIDE_F32, &r);
    }
}

T_TEST(matmul_no_memory)
{
    float a = 2, b = 3, c = 7;
    side_op op = SIDE_OP_INIT;

    op.id = SIDE_OP_MATMUL;
    op.in[0] = &a;
    op.in[1] = &b;
    op.out = &c;
    op.dim[0] = op.dim[1] = op.dim[2] = 1;
    mem_fail_at(1);
    T_STATUS(side_op_host(&op), SIDE_NO_MEMORY);
    assert_true(c == 7);
    mem_fail_at(0);
    T_OK(side_op_host(&op));
    assert_true(c == 6);
    assert_int_equal(mem_live(), 0);
}

/* ---------------------------------------------------------------- the rest */

T_TEST(affine_and_spin)
{
    float x[7] = {0, 1, -1, 0.1f, 1e30f, -HUGE_VALF, 3}, y[7];
    side_op op = SIDE_OP_INIT;

    op.id = SIDE_OP_AFFINE;
    op.in[0] = x;
    op.out = y;
    op.dim[0] = 7;
    op.scale = 3.3f;
    op.bias = -0.7f;
    T_OK(side_op_host(&op));
    for (int i = 0; i < 7; i++) {
        const volatile float product = 3.3f * x[i]; /* rounded before the sum */
        assert_int_equal(bits_of(y[i]), bits_of(product + -0.7f));
    }
    op.out = x; /* in place */
    T_OK(side_op_host(&op));
    assert_memory_equal(x, y, sizeof(x));
    op.out = x + 1;
    T_STATUS(side_op_host(&op), SIDE_INVALID);
    side_op spin = SIDE_OP_INIT;
    spin.id = SIDE_OP_SPIN;
    spin.dim[0] = OPS_SPIN_MAX_NS;
    T_OK(side_op_host(&spin));
    spin.dim[0]++;
    T_STATUS(side_op_host(&spin), SIDE_TOO_LARGE);
}

static void expect(side_op op, side_status status)
{
    size_t in[2] = {1, 2}, out = 3;
    T_STATUS(side_op_bytes(&op, in, &out), status);
    if (status != SIDE_OK)
        assert_true(in[0] == 1 && in[1] == 2 && out == 3);
}

T_TEST(bytes_and_checks)
{
    size_t in[2], out;
    side_op op = SIDE_OP_INIT;

    expect(op, SIDE_INVALID); /* no id */
    op.id = (side_op_id)-1;
    expect(op, SIDE_INVALID);
    op.id = SIDE_OP_MATMUL;
    op.dim[0] = 3;
    op.dim[1] = 5;
    expect(op, SIDE_INVALID); /* k is 0 */
    op.dim[2] = 7;
    T_OK(side_op_bytes(&op, in, &out));
    assert_true(in[0] == 3 * 7 * 4 && in[1] == 7 * 5 * 4 && out == 3 * 5 * 4);
    op.math = SIDE_MATH_BF16;
    expect(op, SIDE_INVALID);
    op.type[0] = SIDE_BF16;
    T_OK(side_op_bytes(&op, in, &out));
    assert_true(in[0] == 3 * 7 * 2 && out == 3 * 5 * 4);
    op.math = SIDE_MATH_FP32;
    expect(op, SIDE_INVALID);
    op.type[0] = SIDE_F32;
    op.dim[0] = 1ull << 31;
    expect(op, SIDE_TOO_LARGE);
    op.dim[0] = op.dim[1] = op.dim[2] = OPS_DIM_MAX;
    expect(op, SIDE_TOO_LARGE); /* 2^64 bytes */

    op = cast_op(SIDE_F32, SIDE_U8, NULL, NULL, 1);
    expect(op, SIDE_INVALID);
    op = cast_op((side_type)9, SIDE_F32, NULL, NULL, 1);
    expect(op, SIDE_INVALID);
    op = cast_op(SIDE_F32, SIDE_F64, NULL, NULL, 1);
    expect(op, SIDE_INVALID);
    op = cast_op(SIDE_F32, SIDE_F16, NULL, NULL, 1ull << 62);
    expect(op, SIDE_TOO_LARGE);
    op = cast_op(SIDE_F32, SIDE_F16, NULL, NULL, 10);
    T_OK(side_op_bytes(&op, in, &out));
    assert_true(in[0] == 40 && in[1] == 0 && out == 20);
    T_STATUS(side_op_host(&op), SIDE_INVALID); /* NULL */
    op.dim[0] = 0;
    T_OK(side_op_host(&op));
    op.id = SIDE_OP_XXH3_BLOCKS;
    op.dim[0] = 1ull << 54;
    expect(op, SIDE_TOO_LARGE);
    op.dim[0] = 3;
    T_OK(side_op_bytes(&op, in, &out));
    assert_true(in[0] == 3072 && out == 192);

    _Alignas(16) float buffer[64];
    op = cast_op(SIDE_F32, SIDE_F16, buffer, buffer + 8, 16);
    T_STATUS(side_op_host(&op), SIDE_INVALID); /* overlaps */
    op = cast_op(SIDE_F32, SIDE_F16, buffer + 1, buffer + 32, 4);
    T_OK(ops_check(&op, 0));
    T_STATUS(ops_check(&op, 16), SIDE_INVALID);
    op.size = 8;
    T_STATUS(side_op_host(&op), SIDE_INVALID);
    T_STATUS(side_op_host(NULL), SIDE_INVALID);
    T_STATUS(side_op_bytes(&op, NULL, &out), SIDE_INVALID);
}

T_TEST(names)
{
    assert_string_equal(side_op_name(SIDE_OP_MATMUL), "matmul");
    assert_string_equal(side_op_name(SIDE_OP_SPIN), "spin");
    assert_string_equal(side_op_name(SIDE_OP_COUNT), "unknown op");
    assert_string_equal(side_type_name(SIDE_BF16), "bf16");
    assert_string_equal(side_type_name((side_type)77), "unknown type");
    assert_int_equal(side_type_bytes(SIDE_F32), 4);
    assert_int_equal(side_type_bytes(SIDE_U8), 1);
    assert_int_equal(side_type_bytes((side_type)77), 0);
}

T_MAIN(T_LONG(cast_from_f32, 60), T(cast_to_f32), T(cast_f8), T(cast_from_f64), T(cast_pairs), T_LONG(xxh3_lengths, 60),
       T(xxh3_misuse), T(matmul_shapes), T(matmul_no_memory), T(affine_and_spin), T(bytes_and_checks), T(names))
