/* SPDX-License-Identifier: MIT
 *
 * What the kernels that copy scattered blocks read: which bytes go where, and which warp takes which of them. A table is pinned memory that a kernel
 * reads over the link; it is written before the launch and not again before the kernel is through.
 *
 *     | head | piece 0 | piece 1 | ...  -->        free        <--  ... | unit 1 | unit 0 |
 *
 * A piece is what the caller gave, or a part of it where a chunk ends. A unit is up to TABLE_UNIT_MOST tiles in a row, within a chunk, of a piece or of several: a warp's
 * share of the work.
 */
#ifndef CUDA_TABLE_H
#define CUDA_TABLE_H

#include "cuda_impl.h"

enum {
    TABLE_HEAD = 64,      /* bytes; the first word is `stop` */
    TABLE_TILE = 4096,    /* TILE in kernels.cu */
    TABLE_UNIT_MOST = 16, /* tiles; a warp has lanes for so many pieces */
};
#define TABLE_MOST ((size_t)8 << 20) /* bytes; what needs more goes in several launches */

/* As in kernels.cu. */
struct block_piece {
    uint64_t to, from, bytes, out;
};
struct block_unit {
    uint32_t piece, pieces, tile, tiles, chunk, units, unused[2];
};
_Static_assert(sizeof(struct block_piece) == 32 && sizeof(struct block_unit) == 32, "kernels.cu");

struct cuda_table {
    struct cuda_table *next;
    void *data;
    size_t bytes;
    CUevent done; /* behind the last kernel that read it */
    bool busy;    /* `done` was recorded, and is not known to be reached */

    uint32_t pieces, units, chunks; /* written so far; chunks: closed ones */
    uint32_t open;                  /* first piece of the chunk that is not closed */
    uint32_t unit_tiles;            /* tiles a unit */
    uint64_t tiles;                 /* in all pieces */
};

void tables_init(dev_context *context);
/* All kernels are through, or `entered` is false and the context is gone. What is not through within some seconds is kept. */
void tables_finish(dev_context *context, bool entered);

/* An empty table with room for `entries` pieces and units, or of TABLE_MOST. Waits for the table that was used longest ago where there are too many.
 * SIDE_UNSUPPORTED: there is no pinned memory to be had; SIDE_STUCK: the device does not come to an end. Entered. */
side_status table_take(dev_context *context, uint64_t entries, uint32_t unit_tiles, struct cuda_table **table);
/* Nothing reads it. */
void table_drop(dev_context *context, struct cuda_table *table);
/* What is queued on `stream` so far reads it. On failure this waits for the stream, and keeps the table for good where that does not come to an end.
 * Entered. */
side_status table_put(dev_context *context, struct cuda_table *table, CUstream stream);
/* Nobody knows who reads it: never used again, nor freed. */
void table_lose(dev_context *context, struct cuda_table *table);

/* How many bytes the next piece may have; 0: the table is full. */
uint64_t table_room(const struct cuda_table *table);
void table_add(struct cuda_table *table, uint64_t to, uint64_t from, uint64_t bytes, uint64_t out);
/* Cuts the pieces since the last chunk's end into units. */
void table_close_chunk(struct cuda_table *table);

/* As the kernels take them. */
static inline struct block_piece *table_pieces(const struct cuda_table *table)
{
    return (struct block_piece *)((char *)table->data + TABLE_HEAD);
}
static inline struct block_unit *table_units(const struct cuda_table *table) /* unit 0; unit 1 lies before it */
{
    return (struct block_unit *)((char *)table->data + table->bytes) - 1;
}
static inline _Atomic uint32_t *table_stop(const struct cuda_table *table)
{
    return table->data;
}

/* ---- cuda_blocks.c, for cuda_pack.c */

/* The caller's array, and how far it is done. */
struct blocks_cursor {
    const side_piece *pieces;
    size_t count, index;         /* the next one */
    uint64_t offset;             /* of it that is done */
    uint64_t full, bytes, tiles; /* of all: pieces with bytes, their bytes, tiles */
};
/* Skips empty pieces. False at the end. */
bool blocks_next(struct blocks_cursor *cursor);
/* Kernels of BLOCKS_THREADS threads, `grid` of them. Entered. */
side_status blocks_launch(dev_context *context, CUstream stream, CUfunction function, const char *name, unsigned grid,
                          void **arguments);
enum { BLOCKS_THREADS = 1024 };

/* Waits, some seconds at most, until the stream is through, or the device is lost. False: it is not. Entered. */
bool blocks_drain(dev_context *context, CUstream stream);

/* ---- cuda_pack.c */

void pack_init(dev_context *context);
void pack_finish(dev_context *context, bool entered);
/* The pieces are checked, and so is the stream. Entered. */
side_status pack_queue(dev_stream *stream, struct blocks_cursor *cursor);
#ifdef SIDE_TESTING
/* Called, where set, before a chunk's copies are queued: a host that is late. */
extern void (*pack_test_chunk)(uint32_t chunk);
#endif

#endif
