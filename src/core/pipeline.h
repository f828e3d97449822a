/* SPDX-License-Identifier: MIT
 *
 * The inside of a pipeline, shared by its files:
 *   pipeline.c  create and destroy, memory, threads
 *   feed.c      source -> [host ring] -> H2D -> [device ring], by a stager (stage.h); feed_cut.c cuts the source into pieces
 *   drain.c     [device ring] -> D2H -> [host ring] -> sink
 *   run.c       the driver: window, compute, push and pull
 *
 * Who does what
 *   driver (the caller's thread)  takes items, calls compute, releases; issues H2D and D2H itself where source or sink are pinned blocks
 *   fill threads                  pageable, file and callback sources: fill a staging slot each, in parallel; H2D is issued in order by whichever thread
 *                                 completes the next piece
 *   d2h thread                    pageable, file and callback sinks: issues D2H into staging slots, in order
 *   drain threads                 wait for a staging slot, give it to the sink
 *
 *   source --fill--> [host_in] --H2D--> [in] --compute--> [out] --D2H--> [host_out] --drain--> sink
 *             n threads    in order     driver      driver  d2h thread    n threads
 *
 * All ordering is in the four rings. The rest is bookkeeping: which bytes a slot holds.
 */
#ifndef CORE_PIPELINE_H
#define CORE_PIPELINE_H

#include "fence.h"
#include "slots.h"
#include "stage.h"

#define PIPELINE_MAX_DEPTH   64
#define PIPELINE_MAX_STREAMS 16
#define PIPELINE_MAX_WINDOW  1024
#define PIPELINE_MAX_THREADS STAGE_MAX_THREADS

/* Walks a source from its first byte to its last. */
struct cursor {
    uint64_t item, block, position;
    size_t block_offset, item_offset, item_bytes;
    uint32_t item_blocks; /* left in this item */
};

struct meta {
    uint64_t item;
    size_t bytes;      /* HOST_OUT: of the piece */
    size_t offset;     /* HOST_OUT: in the result */
    uint64_t position; /* HOST_OUT: in the file */
    bool last;
};

struct finished {
    struct fence fence;
    uint64_t order; /* in which they were recorded */
};

struct feed {
    struct stager stager; /* its host ring is NULL: direct */
    size_t chunk_bytes;
    unsigned char *pinned; /* one flag a block */
    struct cursor cursor;  /* staged: under the stager's `pop`; direct: the driver's */
    atomic_bool stop; /* end at the next item: the pass is broken off. Not under `pop`, which is held while waiting for what the stop brings on */
    side_slot slot;   /* the issuer's: device slot of the item whose pieces are being issued */
    side_piece *batch; /* direct: the pieces of one item */
    uint32_t batch_count;
    uint64_t items_issued; /* driver, direct */
};

struct drain {
    side_slots *host_out; /* NULL: direct, or no results */
    size_t chunk_bytes;
    struct meta *meta; /* one a slot of host_out */
    pthread_mutex_t pop;
    uint64_t next; /* piece */
};

struct side_pipeline {
    side_device *device;
    unsigned fork_generation;
    side_pipeline_options options;
    bool disabled;
    uint32_t depth, window, stream_count, fill_threads, drain_threads;
    side_stream *h2d, *d2h;
    side_stream *compute[PIPELINE_MAX_STREAMS];
    bool own_copy_streams, own_compute_streams;
    side_slots *in, *out;
    struct meta *in_meta, *out_meta;
    struct finished *finished; /* window of them: compute of item i in i % window */
    uint64_t finish_order;
    struct fence tail; /* of a copy stream, at the end of a pass */
    struct feed feed;
    struct drain drain;
    size_t pinned_bytes, device_bytes;
    uint32_t staging_slots;

    atomic_bool cancelled; /* set by side_pipeline_cancel alone; every blocking call of ours looks at it */
    atomic_bool failed;    /* `failure` is set */
    pthread_mutex_t mutex; /* guards what follows */
    pthread_cond_t changed;
    side_error failure; /* the first; status SIDE_OK: none */
    uint64_t pass;      /* raised to start the threads */
    uint32_t busy;      /* threads that have not finished the pass */
    bool quit;
    uint64_t start_ns; /* host clock at the start of the pass */
    pthread_t threads[2 * PIPELINE_MAX_THREADS + 1];
    uint32_t thread_count;

    /* driver only */
    bool in_pass, stuck, pulled, running;
    uint64_t next_item; /* to be taken */
    uint64_t done_items;
    uint32_t held;                        /* pull: handed out, not done */
    uint64_t held_by[PIPELINE_MAX_DEPTH]; /* pull: number + 1 of the item that is held in a slot of the ring; 0: none */
    uint64_t bytes_out;
    side_pipeline_stats stats;
    atomic_ullong bytes_in, drain_ns;
};

/* The first failure wins; poisons all rings so that nobody waits for what will not come. Takes the calling thread's error detail. Returns status. */
side_status pipeline_fail(side_pipeline *p, side_status status);
/* A callback returned rc, after error_clear(): SIDE_CALLBACK with what the callback's own last failing call left as the cause. */
side_status pipeline_callback_failed(const char *stage, uint64_t item, int rc);
/* SIDE_OK, the failure of another thread, or SIDE_CANCELLED. */
side_status pipeline_check(side_pipeline *p);
/* Ends a pass that is under way, as a failure: SIDE_CANCELLED, or SIDE_STUCK. */
side_status pipeline_abort(side_pipeline *p);
void *pipeline_fill_thread(void *pipeline);
void *pipeline_d2h_thread(void *pipeline);
void *pipeline_drain_thread(void *pipeline);
/* A thread's wait for the next pass: false when it is to quit. */
bool pipeline_thread_start(side_pipeline *p, uint64_t *pass);
void pipeline_thread_done(side_pipeline *p);

/* The next piece, but for its number; a callback source fills out->slot, which is acquired before. SIDE_END: there is none. */
side_status cut_next(const side_pipeline *p, struct cursor *c, struct piece *out);
/* Between two items: here a pass can be broken off. */
bool cut_at_item(const side_pipeline *p, const struct cursor *c);
/* Of `count` blocks from `block` on. */
size_t cut_item_bytes(const side_source *s, uint64_t block, uint32_t count);

void feed_init(side_pipeline *p); /* what feed_destroy expects in any case */
side_status feed_create(side_pipeline *p);
void feed_destroy(side_pipeline *p);
void feed_restart(side_pipeline *p);
/* No new items: what is under way comes to its end. */
void feed_stop(side_pipeline *p);
/* Is it known by now that there is no such item? */
bool feed_is_past(side_pipeline *p, uint64_t item);
/* Direct source: queues copies of as many items as there are free slots, at least up to item `need` (blocking); SIDE_END past the last one. */
side_status feed_pump(side_pipeline *p, uint64_t need);

void drain_init(side_pipeline *p);
side_status drain_create(side_pipeline *p);
void drain_destroy(side_pipeline *p);
void drain_restart(side_pipeline *p);
/* Does the result fit its slot and its block? Before anything of it is queued. */
side_status drain_check(const side_pipeline *p, uint64_t item, size_t bytes);
/* Direct sink: queues the copy of result `item`, which is published. */
side_status drain_direct(side_pipeline *p, uint64_t item);

/* Defaults that plans (plan.h) know of: items that may be queued and unfinished; threads that empty staging, of so many that fill it. */
uint32_t pipeline_window(uint32_t depth);
uint32_t pipeline_drain_threads(uint32_t threads);

/* Staging ring for items (or results) of item_bytes, filled (or emptied) by `threads`: chunks of options.chunk_bytes, or `whole` items; less where limit_bytes (0: none)
 * or memory are short. */
side_status pipeline_staging(side_pipeline *p, uint32_t threads, size_t item_bytes, bool whole, size_t limit_bytes,
                             int site, side_slots **slots, uint32_t *got, size_t *got_bytes);

#endif
