/* SPDX-License-Identifier: MIT */
#include "ops_cast.h"
#include "ops.h"

#include <string.h>

uint16_t ops_f32_to_f16(uint32_t bits)
{
    return cast_f32_to_f16(bits);
}

uint16_t ops_f32_to_bf16(uint32_t bits)
{
    return cast_f32_to_bf16(bits);
}

uint32_t ops_f16_to_f32(uint16_t bits)
{
    return cast_f16_to_f32(bits);
}

uint32_t ops_bf16_to_f32(uint16_t bits)
{
    return cast_bf16_to_f32(bits);
}

uint8_t ops_f32_to_f8e4m3(uint32_t bits)
{
    return cast_f32_to_f8e4m3(bits);
}

uint8_t ops_f32_to_f8e5m2(uint32_t bits)
{
    return cast_f32_to_f8e5m2(bits);
}

uint32_t ops_f8e4m3_to_f32(uint8_t bits)
{
    return cast_f8e4m3_to_f32(bits);
}

uint32_t ops_f8e5m2_to_f32(uint8_t bits)
{
    return cast_f8e5m2_to_f32(bits);
}

uint32_t ops_f64_to_f32(uint64_t bits)
{
    return cast_f64_to_f32(bits);
}

/* A loop each; memcpy because the caller's elements may be of any type. The way to float is exact but from f64: one rounding. */
#define CAST_LOOP(name, from, to, expr)                                                       \
    static void name(unsigned char *restrict out, const unsigned char *restrict in, size_t n) \
    {                                                                                         \
        for (size_t i = 0; i < n; i++) {                                                      \
            from x;                                                                           \
            to y;                                                                             \
            memcpy(&x, in + i * sizeof(x), sizeof(x));                                        \
            y = (expr);                                                                       \
            memcpy(out + i * sizeof(y), &y, sizeof(y));                                       \
        }                                                                                     \
    }
#define CAST_LOOPS(name, from, wide)                                        \
    CAST_LOOP(name##_f32, from, uint32_t, wide)                             \
    CAST_LOOP(name##_f16, from, uint16_t, cast_f32_to_f16(wide))            \
    CAST_LOOP(name##_bf16, from, uint16_t, cast_f32_to_bf16(wide))          \
    CAST_LOOP(name##_f8e4m3, from, unsigned char, cast_f32_to_f8e4m3(wide)) \
    CAST_LOOP(name##_f8e5m2, from, unsigned char, cast_f32_to_f8e5m2(wide))
CAST_LOOPS(f64, uint64_t, cast_f64_to_f32(x))
CAST_LOOPS(f32, uint32_t, x)
CAST_LOOPS(f16, uint16_t, cast_f16_to_f32(x))
CAST_LOOPS(bf16, uint16_t, cast_bf16_to_f32(x))
CAST_LOOPS(f8e4m3, unsigned char, cast_f8e4m3_to_f32(x))
CAST_LOOPS(f8e5m2, unsigned char, cast_f8e5m2_to_f32(x))

void ops_cast(void *out, const void *in, size_t n, side_type from, side_type to)
{
#define ROW(name)                                                                                                   \
    {                                                                                                               \
        [SIDE_F32] = name##_f32, [SIDE_F16] = name##_f16, [SIDE_BF16] = name##_bf16, [SIDE_F8E4M3] = name##_f8e4m3, \
        [SIDE_F8E5M2] = name##_f8e5m2                                                                               \
    }
    static void (*const loops[][SIDE_F8E5M2 + 1])(unsigned char *restrict, const unsigned char *restrict, size_t) = {
        [SIDE_F64] = ROW(f64),   [SIDE_F32] = ROW(f32),       [SIDE_F16] = ROW(f16),
        [SIDE_BF16] = ROW(bf16), [SIDE_F8E4M3] = ROW(f8e4m3), [SIDE_F8E5M2] = ROW(f8e5m2),
    };
#undef ROW

    if (from == to)
        memcpy(out, in, n * side_type_bytes(from));
    else
        loops[from][to](out, in, n);
}
