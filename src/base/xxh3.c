/* SPDX-License-Identifier: MIT
 *
 * XXH3 (64 bits, no seed, default secret) cut in two. Its long-input loop takes 1 KiB blocks of 16 stripes; a stripe adds to eight accumulators
 * what depends on the input alone, and each block ends with a scramble of the accumulators. So a block's contribution can be summed anywhere, in
 * any order (a GPU: SIDE_OP_XXH3_BLOCKS), and only the scrambles, 64 bytes a KiB, are left to be done in order here.
 *
 * Inputs that are too short for that loop have other forms; they are here too, so that the library builds without xxHash's header.
 *
 * The algorithm, the primes and the default secret are those of xxHash by Yann Collet (https://github.com/Cyan4973/xxHash, BSD 2-Clause). */
#include "error.h"
#include "ops.h"

#include <endian.h>
#include <string.h>

#define BLOCK     1024
#define STRIPE    64
#define SHORT_MAX 240 /* up to here XXH3 has other, non-streaming forms */
#define MIDDLE    128 /* up to here one of them takes the input from both ends */

#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87u
#define PRIME64_2 0xC2B2AE3D27D4EB4Fu
#define PRIME64_3 0x165667B19E3779F9u
#define PRIME64_4 0x85EBCA77C2B2AE63u
#define PRIME64_5 0x27D4EB2F165667C5u
#define PRIME_MX1 0x165667919E3779F9u
#define PRIME_MX2 0x9FB21C651E98DF25u

/* The default secret's 192 bytes as little-endian words; kernels.cu holds the same. */
static const uint64_t secret[24] = {
    0xbe4ba423396cfeb8u, 0x1cad21f72c81017cu, 0xdb979083e96dd4deu, 0x1f67b3b7a4a44072u, 0x78e5c0cc4ee679cbu,
    0x2172ffcc7dd05a82u, 0x8e2443f7744608b8u, 0x4c263a81e69035e0u, 0xcb00c391bb52283cu, 0xa32e531b8b65d088u,
    0x4ef90da297486471u, 0xd8acdea946ef1938u, 0x3f349ce33f76faa8u, 0x1d4f0bc7c7bbdcf9u, 0x3159b4cd4be0518au,
    0x647378d9c97e9fc8u, 0xc3ebd33483acc5eau, 0xeb6313faffa081c5u, 0x49daf0b751dd0d17u, 0x9e68d429265516d3u,
    0xfca1477d58be162bu, 0xce31d07ad1b8f88fu, 0x280416958f3acb45u, 0x7e404bbbcafbd7afu,
};

static uint64_t load64(const unsigned char *p)
{
    uint64_t v;
    memcpy(&v, p, sizeof(v));
    return le64toh(v);
}

static uint32_t load32(const unsigned char *p)
{
    uint32_t v;
    memcpy(&v, p, sizeof(v));
    return le32toh(v);
}

/* The secret from byte `at`. */
static uint64_t secret64(size_t at)
{
    size_t word = at / 8;
    unsigned shift = (unsigned)(at % 8) * 8;
    return shift == 0 ? secret[word] : secret[word] >> shift | secret[word + 1] << (64 - shift);
}

/* key: eight words of secret. */
static void stripe_add(uint64_t acc[8], const unsigned char *p, const uint64_t key[8])
{
    for (size_t i = 0; i < 8; i++) {
        uint64_t value = load64(p + 8 * i), mixed = value ^ key[i];
        acc[i ^ 1] += value;
        acc[i] += (mixed & 0xffffffffu) * (mixed >> 32);
    }
}

void xxh3_block_sums(uint64_t *sums, const void *data, size_t blocks)
{
    const unsigned char *p = data;

    for (size_t block = 0; block < blocks; block++, p += BLOCK) {
        uint64_t acc[8] = {0};
        for (size_t stripe = 0; stripe < BLOCK / STRIPE; stripe++)
            stripe_add(acc, p + stripe * STRIPE, secret + stripe);
        memcpy(sums + 8 * block, acc, sizeof(acc));
    }
}

void side_xxh3_begin(side_xxh3 *state)
{
    static const uint64_t first[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                      PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    memcpy(state->acc, first, sizeof(first));
    state->blocks = 0;
}

void side_xxh3_fold(side_xxh3 *state, const uint64_t *sums, size_t blocks)
{
    for (size_t block = 0; block < blocks; block++)
        for (size_t i = 0; i < 8; i++) {
            uint64_t a = state->acc[i] + sums[8 * block + i];
            state->acc[i] = (a ^ a >> 47 ^ secret[16 + i]) * PRIME32_1;
        }
    state->blocks += blocks;
}

/* Both halves of the product, folded. */
static uint64_t multiply(uint64_t a, uint64_t b)
{
    __extension__ unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t avalanche(uint64_t h)
{
    h ^= h >> 37;
    h *= PRIME_MX1;
    return h ^ h >> 32;
}

/* XXH64's, which the shortest inputs end with. */
static uint64_t avalanche64(uint64_t h)
{
    h ^= h >> 33;
    h *= PRIME64_2;
    h ^= h >> 29;
    h *= PRIME64_3;
    return h ^ h >> 32;
}

static uint64_t merge(const uint64_t acc[8], uint64_t total)
{
    uint64_t h = total * PRIME64_1;

    for (size_t i = 0; i < 4; i++)
        h += multiply(acc[2 * i] ^ secret64(11 + 16 * i), acc[2 * i + 1] ^ secret64(19 + 16 * i));
    return avalanche(h);
}

/* 0..16 bytes. */
static uint64_t hash_tiny(const unsigned char *p, size_t bytes)
{
    if (bytes == 0)
        return avalanche64(secret64(56) ^ secret64(64));
    if (bytes <= 3) {
        const uint32_t word = (uint32_t)p[0] << 16 | (uint32_t)p[bytes / 2] << 24 | p[bytes - 1] | (uint32_t)bytes << 8;
        return avalanche64(word ^ (uint32_t)(secret[0] ^ secret[0] >> 32));
    }
    if (bytes <= 8) {
        uint64_t h = ((uint64_t)load32(p) << 32) + load32(p + bytes - 4);
        h ^= secret64(8) ^ secret64(16);
        h ^= (h << 49 | h >> 15) ^ (h << 24 | h >> 40);
        h *= PRIME_MX2;
        h ^= (h >> 35) + bytes;
        h *= PRIME_MX2;
        return h ^ h >> 28;
    }
    const uint64_t low = load64(p) ^ secret64(24) ^ secret64(32),
                   high = load64(p + bytes - 8) ^ secret64(40) ^ secret64(48);
    return avalanche(bytes + __builtin_bswap64(low) + high + multiply(low, high));
}

/* 16 bytes with those of the secret from byte `at`. */
static uint64_t mix(const unsigned char *p, size_t at)
{
    return multiply(load64(p) ^ secret64(at), load64(p + 8) ^ secret64(at + 8));
}

static uint64_t hash_short(const unsigned char *p, size_t bytes)
{
    uint64_t h = bytes * PRIME64_1;

    if (bytes <= 16)
        return hash_tiny(p, bytes);
    if (bytes <= MIDDLE) {
        for (size_t i = 0; i <= (bytes - 1) / 32; i++)
            h += mix(p + 16 * i, 32 * i) + mix(p + bytes - 16 * (i + 1), 32 * i + 16);
        return avalanche(h);
    }
    for (size_t i = 0; i < 8; i++)
        h += mix(p + 16 * i, 16 * i);
    h = avalanche(h);
    for (size_t i = 8; i < bytes / 16; i++)
        h += mix(p + 16 * i, 16 * (i - 8) + 3);
    return avalanche(h + mix(p + bytes - 16, 136 - 17));
}

side_status side_xxh3_end(const side_xxh3 *state, const void *tail, size_t tail_bytes, uint64_t total, uint64_t *hash)
{
    const size_t want = total < BLOCK + STRIPE ? (size_t)total : BLOCK + STRIPE;
    const uint64_t blocks = total == 0 ? 0 : (total - 1) / BLOCK;
    const unsigned char *p = tail;
    uint64_t acc[8], key[8];

    if (state == NULL || hash == NULL || (tail == NULL && want != 0))
        return error_set(SIDE_INVALID, "side_xxh3_end", "state, tail or hash is NULL");
    if (tail_bytes != want)
        return error_set(SIDE_INVALID, "side_xxh3_end", "the tail of %llu bytes is their last %zu, not %zu",
                         (unsigned long long)total, want, tail_bytes);
    if (state->blocks != blocks)
        return error_set(SIDE_STATE, "side_xxh3_end", "%llu blocks were folded, %llu bytes have %llu before the tail",
                         (unsigned long long)state->blocks, (unsigned long long)total, (unsigned long long)blocks);
    if (total <= SHORT_MAX) {
        *hash = hash_short(tail, (size_t)total);
        return SIDE_OK;
    }
    const size_t rest = (size_t)(total - blocks * BLOCK); /* 1..1024, after the last folded block */
    const unsigned char *end = p + tail_bytes;
    memcpy(acc, state->acc, sizeof(acc));
    for (size_t stripe = 0; stripe < (rest - 1) / STRIPE; stripe++)
        stripe_add(acc, end - rest + stripe * STRIPE, secret + stripe);
    for (size_t i = 0; i < 8; i++)
        key[i] = secret64(192 - STRIPE - 7 + 8 * i);
    stripe_add(acc, end - STRIPE, key);
    *hash = merge(acc, total);
    return SIDE_OK;
}
