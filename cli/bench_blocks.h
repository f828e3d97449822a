/* SPDX-License-Identifier: MIT
 *
 * Scattered blocks by every path.
 *
 *     bench_blocks.c       the shapes, the course of events, the table, the profile
 *     bench_blocks_move.c  memory, one call and what it left, one call beside products
 *
 *     H2D  pattern  .[5].[2]..[0]...     two windows of twice the bytes; blocks at random in both
 *          device   [0]..[5]....[2].
 *     D2H  device   .[5].[2]..[0]...     host sides lie together, as whoever swaps blocks out would choose them
 *          check    [0][1][2]...
 *
 * Timed is the whole call by events of an idle stream: what the host takes to queue it is a part of what a path costs, so nothing is held back here.
 */
#ifndef CLI_BENCH_BLOCKS_H
#define CLI_BENCH_BLOCKS_H

#include "bench_gemm.h"

#define BLOCKS_PLAIN SIDE_PATH_AUTO /* the place of the one plain copy of as many bytes, beside those of the paths */

struct blocks_cell {
    bool tried;
    char unsupported[160];            /* why there are no samples; "": there are */
    struct bench_samples gbps;        /* alone */
    struct bench_samples beside_gbps; /* while products run */
    struct bench_samples gemm_s;      /* one product, while this runs */
};

struct blocks_shape {
    side_copy_kind kind;
    uint32_t block_bytes, count;
    struct blocks_cell cells[SIDE_PATH_COUNT];
};

struct blocks {
    struct bench *bench;
    size_t region_bytes, most_bytes; /* of pattern and device; the largest call */
    char *pattern, *check;           /* pinned; check: twice the largest call */
    char *device;
    bool device_is_pattern;
    side_piece *pieces;
    uint32_t *order; /* places of the blocks in a window */
    size_t base;     /* of the next window */
    side_stream *copy, *compute;
    side_event *origin, *begin[2], *end[2];
    struct bench_gemm gemm;
    struct blocks_shape *shapes;
    size_t shape_count;
};

side_status blocks_take(struct blocks *blocks);
void blocks_free(struct blocks *blocks);
/* One sample into the cell; a path that the device has not makes the cell say so. `keep` false: to warm up. */
side_status blocks_alone(struct blocks *blocks, struct blocks_shape *shape, side_path path, bool keep);
/* The same call, and products, for as long as each other. Comes after samples alone. */
side_status blocks_beside(struct blocks *blocks, struct blocks_shape *shape, side_path path);

#endif
