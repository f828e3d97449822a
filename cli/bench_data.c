/* SPDX-License-Identifier: MIT
 * Bytes to copy. */
#include "bench.h"

/* splitmix64 of the position: any part can be told from any other, and a shifted block is a wrong one. */
void bench_fill(void *data, size_t bytes, uint64_t seed)
{
    uint64_t *word = data;

    for (size_t i = 0; i < bytes / 8; i++) {
        uint64_t z = (seed << 32) + (i + 1) * 0x9E3779B97F4A7C15u;

        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
        z = (z ^ z >> 27) * 0x94D049BB133111EBu;
        word[i] = z ^ z >> 31;
    }
}
