/* SPDX-License-Identifier: MIT
 *
 * The named operations on the host: what they read and write, and a C twin of each. The twins are the oracle: a device's CAST, XXH3_BLOCKS and
 * AFFINE (two roundings, not fused) give the same bits, its MATMUL sums in another order. */
#ifndef BASE_OPS_H
#define BASE_OPS_H

#include "sidestream.h"

#define OPS_SPIN_MAX_NS 60000000000ull /* a longer SPIN is SIDE_TOO_LARGE */
#define OPS_DIM_MAX     0x7fffffffull  /* MATMUL: each dim, because BLAS counts in int */

/* What `op` reads of in[0], in[1] and writes to out. SIDE_INVALID: id, dims, types or math do not go together; SIDE_TOO_LARGE: more bytes than
 * size_t holds, or a limit above. The outputs are set only on SIDE_OK. Looks at no pointer. */
side_status ops_bytes(const side_op *op, size_t in_bytes[2], size_t *out_bytes);

/* ops_bytes, and the pointers: not NULL where they are used, aligned to `align` (0: to their element), out not overlapping an input
 * (AFFINE: equal is fine). SIDE_INVALID otherwise. */
side_status ops_check(const side_op *op, size_t align);

/* Runs `op` now on host memory; SPIN does nothing. Checks it first. SIDE_NO_MEMORY: MATMUL had no room for its blocks. */
side_status ops_run_host(const side_op *op);

/* One element, for whoever needs a single one. Round to nearest even; a NaN keeps its sign and the top of its payload, and gets quiet. */
uint16_t ops_f32_to_f16(uint32_t bits);
uint16_t ops_f32_to_bf16(uint32_t bits);
uint32_t ops_f16_to_f32(uint16_t bits);
uint32_t ops_bf16_to_f32(uint16_t bits);
/* As PyTorch has it (2.15): past 464 an E4M3 gets 448, infinity too, and past 61440 an E5M2 infinity; a NaN gets 0x7f and its sign. */
uint8_t ops_f32_to_f8e4m3(uint32_t bits);
uint8_t ops_f32_to_f8e5m2(uint32_t bits);
uint32_t ops_f8e4m3_to_f32(uint8_t bits);
uint32_t ops_f8e5m2_to_f32(uint8_t bits);
uint32_t ops_f64_to_f32(uint64_t bits);

/* CAST of n elements, checked already. */
void ops_cast(void *out, const void *in, size_t n, side_type from, side_type to);

/* sums[8 * i ...]: the eight partial sums of the i-th KiB of data. */
void xxh3_block_sums(uint64_t *sums, const void *data, size_t blocks);

#endif
