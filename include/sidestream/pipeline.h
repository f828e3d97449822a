/* SPDX-License-Identifier: MIT
 *
 * Pipelines: source -> [host ring] -> H2D -> [device ring] -> compute -> [device ring] -> D2H -> [host ring] -> sink
 *
 * Absent stages take no ring: pinned sources need no host ring, a pipeline without results no D2H.
 *
 * Push: give source, compute and sink, call side_pipeline_run: returns when everything has arrived.
 * Pull: give a source, write the loop yourself:
 *
 *     while ((s = side_pipeline_next(p, stream, &item)) == SIDE_OK) {
 *         my_kernel<<<..., stream>>>(item.data, item.bytes);      // item is ready on `stream`
 *         side_pipeline_done(p, &item, stream);                   // what is queued on `stream` so far has read it
 *     }                                                           // SIDE_END: no more
 *
 * Copies run `depth` items ahead on a stream of their own in both cases.
 */
#include "../sidestream.h" /* before the guard: it includes this file, in the order the areas need */

#ifndef SIDESTREAM_PIPELINE_H
#define SIDESTREAM_PIPELINE_H

#ifdef __cplusplus
extern "C" {
#endif

typedef struct side_pipeline side_pipeline;

typedef struct side_block {
    void *data; /* host memory; a source only reads it */
    size_t bytes;
} side_block;

/* Fills `data` with item number `item`, at most `capacity` bytes, and sets *bytes. Returns 0, or any other number to stop with SIDE_CALLBACK
 * (kept in the error's os_errno). Set *bytes = SIDE_NO_MORE for "no more items". Called in order, one call at a time, on a thread of the library's. */
typedef int side_source_fn(void *user, uint64_t item, void *data, size_t capacity, size_t *bytes);
#define SIDE_NO_MORE SIZE_MAX
/* Takes result number `item`; the memory is the library's again on return. Called in order, one at a time, on a thread of the library's. */
typedef int side_sink_fn(void *user, uint64_t item, const void *data, size_t bytes);

typedef enum side_end_kind {
    SIDE_END_NONE = 0,
    SIDE_END_BLOCKS = 1,
    SIDE_END_CALLBACK = 2,
    SIDE_END_FILE = 3
} side_end_kind;

/* One end of a pipeline. Use the makers below. */
typedef struct side_source {
    side_end_kind kind;
    const side_block *blocks; /* BLOCKS: item i is pieces[i] consecutive blocks (one each where pieces is NULL), packed in order */
    const uint32_t *pieces;
    uint64_t items;     /* BLOCKS: how many */
    side_source_fn *fn; /* CALLBACK */
    void *user;
    int fd;                  /* FILE: read with pread; stays the caller's; may be at any position */
    uint64_t offset, length; /* FILE: which part; items are item_bytes each, the last one may be shorter */
} side_source;

typedef struct side_sink {
    side_end_kind kind;
    const side_block *blocks; /* BLOCKS: result i goes to blocks[i]; SIDE_TOO_LARGE if it does not fit */
    uint64_t items;
    side_sink_fn *fn;
    void *user;
    int fd; /* FILE: written with pwrite, result after result from offset on */
    uint64_t offset;
} side_sink;

static inline side_source side_source_blocks(const side_block *blocks, uint64_t items)
{
    side_source s = {SIDE_END_BLOCKS, blocks, NULL, items, NULL, NULL, -1, 0, 0};
    return s;
}
static inline side_source side_source_items(const side_block *blocks, const uint32_t *pieces, uint64_t items)
{
    side_source s = {SIDE_END_BLOCKS, blocks, pieces, items, NULL, NULL, -1, 0, 0};
    return s;
}
static inline side_source side_source_callback(side_source_fn *fn, void *user)
{
    side_source s = {SIDE_END_CALLBACK, NULL, NULL, 0, fn, user, -1, 0, 0};
    return s;
}
static inline side_source side_source_file(int fd, uint64_t offset, uint64_t length)
{
    side_source s = {SIDE_END_FILE, NULL, NULL, 0, NULL, NULL, fd, offset, length};
    return s;
}
static inline side_sink side_sink_blocks(const side_block *blocks, uint64_t items)
{
    side_sink s = {SIDE_END_BLOCKS, blocks, items, NULL, NULL, -1, 0};
    return s;
}
static inline side_sink side_sink_callback(side_sink_fn *fn, void *user)
{
    side_sink s = {SIDE_END_CALLBACK, NULL, 0, fn, user, -1, 0};
    return s;
}
static inline side_sink side_sink_file(int fd, uint64_t offset)
{
    side_sink s = {SIDE_END_FILE, NULL, 0, NULL, NULL, fd, offset};
    return s;
}

/* One item at the compute stage. */
typedef struct side_item {
    uint64_t number;
    const void *data; /* device memory, filled as far as `stream` can see */
    size_t bytes;
    void *result;        /* device memory for the result; NULL without results */
    size_t result_bytes; /* in: capacity; set it to what the result takes (left: all of it; 0: no result for this item) */
    uint32_t lane;       /* which compute stream: number % streams */
    side_slot slot, result_slot; /* internal */
} side_item;

/* Queues the item's work on `stream`; must not block for the device, nor call this pipeline but to cancel it (SIDE_STATE). Returns 0, or any other number to stop with SIDE_CALLBACK. Called on the thread
 * that runs the pipeline, in order. May change item->result_bytes. */
typedef int side_compute_fn(void *user, side_stream *stream, side_item *item);

typedef struct side_pipeline_options {
    size_t size;
    size_t item_bytes;   /* largest item: size of a device slot. Needed */
    size_t result_bytes; /* largest result; 0: no results */
    uint32_t depth; /* slots in each device ring, 1..64; 0: chosen from the machine's figures (machine.h), 2..8; at least 3 for side_pipeline_next */
    uint32_t window;                     /* items that may be queued and unfinished; 0: 2 * depth, at least 4 */
    uint32_t streams;                    /* compute streams, 1..16; 0: 1 */
    side_stream *const *compute_streams; /* the caller's own, `streams` of them; NULL: made here */
    side_source source;
    side_compute_fn *compute; /* push only */
    void *compute_user;
    side_sink sink;
    size_t chunk_bytes; /* staging piece for pageable memory and files; 0: 4 MiB, or the item if that is smaller */
    size_t pinned_bytes; /* limit on pinned staging; 0: what depth and threads call for. Fewer and smaller pieces are used to stay below */
    uint32_t threads; /* that stage, 1..64; 0: side_default_threads() */
    double timeout_s; /* longest wait for the device before SIDE_STUCK; 0: 30 */
    side_log *log;    /* NULL: off */
    void (*progress)(void *user, uint64_t items_done, uint64_t bytes_in,
                     uint64_t bytes_out); /* from the running thread; NULL: none */
    void *progress_user;
    double compute_s; /* a hint for depth 0: device time of one item's compute, alone; 0: not known, a depth for any */
} side_pipeline_options;
/* clang-format off */
#define SIDE_PIPELINE_OPTIONS_INIT { .size = sizeof(side_pipeline_options) }
/* clang-format on */

typedef struct side_pipeline_stats {
    uint64_t items, bytes_in, bytes_out;
    double time_s;        /* host clock (virtual on sim) from run, or first next, to everything finished */
    double source_wait_s; /* the run waited for source or staging */
    double sink_wait_s;   /* ... for the sink to give a host slot back */
    double device_wait_s; /* ... for the device: window or host slot in flight */
    double stage_busy_s;  /* threads: filling, summed over threads */
    double drain_busy_s;  /* threads: sinking, summed */
    uint32_t depth, window, streams, threads; /* as used */
    uint32_t staging_slots;                   /* pinned pieces, both directions */
    size_t chunk_bytes;
    size_t pinned_bytes, device_bytes; /* taken by this pipeline */
    bool disabled;                     /* SIDESTREAM_DISABLE was set: ordered copies */
} side_pipeline_stats;

/* From cores and LOCAL_WORLD_SIZE: max(1, min(12, cores / LOCAL_WORLD_SIZE - 1)). */
SIDE_API uint32_t side_default_threads(void);

/* Takes its memory now. SIDE_NO_DEVICE_MEMORY and SIDE_OVER_BUDGET say how much was needed, how much there is, and what to lower. Blocks, buffers and
 * user pointers in the options must live until destroy; the struct itself need not. */
SIDE_API side_status side_pipeline_create(side_device *device, const side_pipeline_options *options,
                                          side_pipeline **pipeline);
/* Runs everything; returns when all results have arrived and nothing is in flight. May be called again: sources start anew (callback sources see
 * item 0 again). On an error or cancel it drains first (R5), and every later call returns that error: make a new pipeline. stats may be NULL and are set also on failure. */
SIDE_API side_status side_pipeline_run(side_pipeline *pipeline, side_pipeline_stats *stats);

/* Pull: the next item, ready on `stream` (NULL is not allowed). SIDE_END after the last; SIDE_WOULD_DEADLOCK while item number - depth is held
 * (SIDE_END, if it is known that there is no such item):
 * slots go round, so the next item needs that one's. The loop goes on after it. After SIDE_END, or after side_pipeline_rewind, a new pass may start. (Where items are
 * still held at SIDE_END the pass ends once they are done, with another next or with rewind: results may be on their way until then.) */
SIDE_API side_status side_pipeline_next(side_pipeline *pipeline, side_stream *stream, side_item *item);
/* The item has been read by what is queued on `stream`; any order. With results: its result is written by what is queued, and is sent to the sink. */
SIDE_API side_status side_pipeline_done(side_pipeline *pipeline, side_item *item, side_stream *stream);
/* Blocks until all results are in the sink and nothing is in flight; then starts from the beginning. Items must be done. */
SIDE_API side_status side_pipeline_rewind(side_pipeline *pipeline);
SIDE_API side_status side_pipeline_get_stats(side_pipeline *pipeline, side_pipeline_stats *stats);

/* From any thread, also a signal handler: the run, or the pulling loop, ends with SIDE_CANCELLED once the callbacks under way have returned and all is drained. */
SIDE_API void side_pipeline_cancel(side_pipeline *pipeline);
/* Drains and frees. What the caller has queued on pulled items that are not done must have finished before. SIDE_STUCK: the device did not finish;
 * memory and object are kept. */
SIDE_API side_status side_pipeline_destroy(side_pipeline *pipeline);

#ifdef __cplusplus
}
#endif
#endif
