/* SPDX-License-Identifier: MIT
 *
 * A matrix product that keeps the whole device busy, to run beside copies. bf16, square; on a software device, where a CPU multiplies, a tiny one that is
 * said to take as long.
 */
#ifndef CLI_BENCH_GEMM_H
#define CLI_BENCH_GEMM_H

#include "bench.h"

struct bench_gemm {
    struct bench *bench;
    uint64_t dim; /* 0: there is none, and `why` tells why */
    void *in[2], *out;
    side_op op;
    double seconds; /* of one, alone */
    char why[320];
};

/* At most most_dim a side, less where memory is short. Where the device has no matrix products that is no failure: dim is 0. Measures `seconds`. sim_s: what
 * one takes on a software device. */
side_status bench_gemm_make(struct bench *bench, uint64_t most_dim, double sim_s, struct bench_gemm *gemm);
void bench_gemm_free(struct bench_gemm *gemm);
side_status bench_gemm_queue(const struct bench_gemm *gemm, side_stream *stream, size_t times);
/* Of one, alone, again: clocks drift. */
side_status bench_gemm_time(struct bench_gemm *gemm);

#endif
