/* SPDX-License-Identifier: MIT
 *
 * Casts of one element: integer code without branches where it is hot, so that every machine gives the same bits. kernels.cu has the same once more. */
#ifndef BASE_OPS_CAST_H
#define BASE_OPS_CAST_H

#include <stdint.h>

/* A format that keeps `kept` bits after the point and whose least exponent is that of float's biased `least`. Rounds what is below the largest value.
 * a: without its sign. */
static inline uint32_t cast_round(uint32_t a, uint32_t kept, uint32_t least)
{
    const uint32_t drop = 23u - kept;
    /* from the least exponent up: rounding carries into the exponent, also into that of infinity */
    const uint32_t normal = (a - ((least - 1u) << 23) + (1u << (drop - 1u)) - 1u + (a >> drop & 1u)) >> drop;
    /* below more bits go; with 25 nothing is left */
    const uint32_t less = drop + least - (a >> 23), shift = less > 25u ? 25u : less < drop + 1u ? drop + 1u : less;
    const uint32_t m = (a & 0x7fffffu) | 0x800000u, small = (m + (1u << (shift - 1)) - 1u + (m >> shift & 1u)) >> shift;

    return a < least << 23 ? small : normal;
}

static inline uint16_t cast_f32_to_f16(uint32_t u)
{
    const uint32_t sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu, nan = 0x7e00u | (a >> 13 & 0x3ffu);

    return (uint16_t)(sign | (a > 0x7f800000u ? nan : a >= 0x47800000u ? 0x7c00u : cast_round(a, 10, 113)));
}

static inline uint16_t cast_f32_to_bf16(uint32_t u)
{
    const uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? u >> 16 | 0x40u : rounded);
}

static inline uint8_t cast_f32_to_f8e4m3(uint32_t u)
{
    const uint32_t sign = u >> 24 & 0x80u, a = u & 0x7fffffffu;

    return (uint8_t)(sign | (a > 0x7f800000u ? 0x7fu : a >= 0x43e00000u ? 0x7eu : cast_round(a, 3, 121)));
}

static inline uint8_t cast_f32_to_f8e5m2(uint32_t u)
{
    const uint32_t sign = u >> 24 & 0x80u, a = u & 0x7fffffffu;

    return (uint8_t)(sign | (a > 0x7f800000u ? 0x7fu : a >= 0x47800000u ? 0x7cu : cast_round(a, 2, 113)));
}

static inline uint32_t cast_f16_to_f32(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, a = h & 0x7fffu;

    if (a >= 0x7c00u)
        return sign | 0x7f800000u | (a & 0x3ffu) << 13 | (a > 0x7c00u ? 0x400000u : 0u);
    if (a >= 0x400u)
        return sign | ((a << 13) + 0x38000000u);
    if (a == 0)
        return sign;
    const uint32_t up = (uint32_t)__builtin_clz(a) - 21u; /* shifts the top bit to where the implicit one stands */
    return sign | (113u - up) << 23 | (a << (up + 13) & 0x7fffffu);
}

static inline uint32_t cast_bf16_to_f32(uint16_t h)
{
    const uint32_t u = (uint32_t)h << 16;
    return (h & 0x7fffu) > 0x7f80u ? u | 0x400000u : u;
}

static inline uint32_t cast_f8e4m3_to_f32(uint8_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x80u) << 24, a = h & 0x7fu;

    if (a == 0x7fu)
        return sign | 0x7ff00000u;
    if (a >= 8u)
        return sign | ((a << 20) + 0x3c000000u);
    if (a == 0)
        return sign;
    const uint32_t up = (uint32_t)__builtin_clz(a) - 28u;
    return sign | (121u - up) << 23 | (a << (up + 20) & 0x7fffffu);
}

static inline uint32_t cast_f8e5m2_to_f32(uint8_t h)
{
    return cast_f16_to_f32((uint16_t)((uint32_t)h << 8));
}

/* Rounds; what follows rounds again, as PyTorch does. */
static inline uint32_t cast_f64_to_f32(uint64_t u)
{
    const uint32_t sign = (uint32_t)(u >> 32) & 0x80000000u;
    const uint64_t a = u & 0x7fffffffffffffffull;
    const uint64_t normal = (a - 0x3800000000000000ull + 0xfffffffull + (a >> 29 & 1u)) >> 29;
    const uint64_t less = 926u - (a >> 52), shift = less > 54u ? 54u : less < 30u ? 30u : less;
    const uint64_t m = (a & 0xfffffffffffffull) | 0x10000000000000ull;
    const uint64_t small = (m + (1ull << (shift - 1)) - 1u + (m >> shift & 1u)) >> shift;
    const uint32_t finite = (uint32_t)(a < 0x3810000000000000ull ? small : normal);
    const uint32_t nan = 0x7fc00000u | (uint32_t)(a >> 29 & 0x3fffffu);

    return sign | (a > 0x7ff0000000000000ull ? nan : a >= 0x47f0000000000000ull ? 0x7f800000u : finite);
}

#endif
