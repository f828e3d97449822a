/* SPDX-License-Identifier: MIT
 *
 * Feeders: host memory of any kind comes in batch by batch, each batch lands in one device slot, and whoever takes it keeps it as long as he likes.
 *
 *     side_feeder_submit(f, pieces, n, &number);         // producer: returns once the batch is queued; threads copy it
 *     side_feeder_next(f, stream, &item);                // consumer: the batches in order, ready on `stream`
 *     my_kernel<<<..., stream>>>(item.slot.data);
 *     side_slots_release(side_feeder_slots(f), &item.slot, stream);      // any thread, any order
 *     side_slots_give_back(side_feeder_slots(f), &item.slot);
 *
 *     submit -> [queue] --fill, n threads--> [host ring] --H2D, in order--> [device slots, a free list] -> next -> release, give_back
 *
 * A pipeline's items go round in a ring and its source is known beforehand; a feeder's come when they come, and its slots come back in any order.
 *
 * All pieces of a batch are packed and travel together: pageable and small pieces through pinned staging (one copy for a batch of up to chunk_bytes, else
 * copies of chunk_bytes, filled by threads while earlier ones are in DMA; gaps of less than 4 KiB are copied along); pinned pieces of 256 KiB and more go from where they lie.
 *
 * Threads: one thread at a time submits, one at a time takes next (they may be different ones); releases come from any. No call holds a lock while it
 * waits for the device, for another thread's batch or for a free slot, so release and give_back never block for long.
 */
#include "../sidestream.h" /* before the guard: it includes this file, in the order the areas need */

#ifndef SIDESTREAM_FEEDER_H
#define SIDESTREAM_FEEDER_H

#ifdef __cplusplus
extern "C" {
#endif

typedef struct side_feeder side_feeder;

/* `bytes` of host memory that go to `offset` in the slot. Bytes of the slot between pieces keep no defined content. */
typedef struct side_feed_piece {
    const void *data;
    size_t bytes;
    size_t offset;
} side_feed_piece;

typedef struct side_feed_item {
    uint64_t number; /* of the batch, from 0 */
    size_t bytes;    /* end of its last piece */
    side_slot slot;  /* taken; slot.data is the device memory, slot.key what side_slots_take of further streams needs */
} side_feed_item;

typedef struct side_feeder_options {
    size_t size;
    uint32_t slots;      /* device slots, 1..4096. Needed */
    uint32_t queue;      /* batches that submit lets in and that have no slot yet, 1..4096; 0: 2 */
    size_t slot_bytes;   /* largest batch. Needed */
    void *const *memory; /* the caller's device memory, `slots` pointers, 16-byte aligned; NULL: allocated here */
    side_stream *memory_stream; /* the first writers wait for what is queued on it so far; NULL: nobody uses the memory */
    side_stream *copy_stream;   /* the caller's, must outlive the feeder; NULL: made here */
    size_t chunk_bytes;         /* as in side_pipeline_options */
    size_t pinned_bytes;
    uint32_t threads;
    bool timing;      /* measure copies and stalls with timing events: of the first 16 batches, then of 3 in 16 */
    double timeout_s; /* longest wait for the device before SIDE_STUCK; 0: 30 */
    side_log *log;    /* NULL: off */
} side_feeder_options;
/* clang-format off */
#define SIDE_FEEDER_OPTIONS_INIT { .size = sizeof(side_feeder_options) }
/* clang-format on */

/* Sums since create. Device times need options.timing, and are of the batches whose events are done. */
typedef struct side_feeder_stats {
    uint64_t submitted, taken; /* batches */
    uint64_t timed; /* batches that copy_s, stall_s and compute_s are of: measured ones (see options.timing) whose events were done in time */
    uint64_t bytes, direct_bytes; /* copied; of them from where they lay, without staging */
    uint64_t copies;              /* H2D operations queued */
    double stage_busy_s;          /* threads: filling staging slots, summed over threads */
    double copy_s;                /* device: from the first copy of a batch to the end of its last, summed */
    double compute_s; /* reader's stream: from a batch being ready on it to what it had queued when it asked for the next */
    double stall_s; /* reader's stream: from there until the next batch was ready on it. Of this were lost waiting ... */
    double lost_source_s;                   /* ... for the batch to be submitted */
    double lost_slot_s;                     /* ... for a slot to come free */
    double lost_stage_s;                    /* ... for staging */
    double lost_link_s;                     /* ... for the copy itself */
    double submit_wait_s;                   /* submit was blocked: the queue was full, so the source is ahead */
    uint32_t slots, threads, staging_slots; /* as used; threads are started when the first piece needs staging */
    size_t chunk_bytes, pinned_bytes, device_bytes; /* taken by this feeder: none of the caller's */
} side_feeder_stats;

/* Takes its memory now; threads and staging at first need. Errors as side_pipeline_create. */
SIDE_API side_status side_feeder_create(side_device *device, const side_feeder_options *options, side_feeder **feeder);

/* Queues one batch: 1 piece or more, not overlapping, within slot_bytes (SIDE_TOO_LARGE). The array may be reused at once; what the pieces point to
 * must live, unchanged, until side_feeder_copied says more than `number`. Blocks while `queue` batches wait for a slot; where all pieces go direct and a slot is free
 * the copy is queued right here. After cancel: SIDE_CANCELLED. number may be NULL. */
SIDE_API side_status side_feeder_submit(side_feeder *feeder, const side_feed_piece *pieces, size_t count,
                                        uint64_t *number);
/* SIDE_AGAIN where submit would block. */
SIDE_API side_status side_feeder_try_submit(side_feeder *feeder, const side_feed_piece *pieces, size_t count,
                                            uint64_t *number);
/* Nothing more will be submitted: next returns SIDE_END after the last. */
SIDE_API side_status side_feeder_close(side_feeder *feeder);
/* The pieces of batches 0 .. *count - 1 have been read for good. Asks the device; does not block. */
SIDE_API side_status side_feeder_copied(side_feeder *feeder, uint64_t *count);

/* The next batch in order, taken by `reader` (NULL: the host, which then waits until the copy is done). Blocks until it was submitted, has its slot and is
 * queued. SIDE_END: closed, and all taken. SIDE_STATE: the stream is being captured. Does not look at who holds the slots: where all are held and the thread that asks holds them, it waits for ever; count what
 * you hold. */
SIDE_API side_status side_feeder_next(side_feeder *feeder, side_stream *reader, side_feed_item *item);
/* SIDE_AGAIN where next would block (for the host also while the copy runs). */
SIDE_API side_status side_feeder_try_next(side_feeder *feeder, side_stream *reader, side_feed_item *item);
/* As next; SIDE_AGAIN where no batch was queued within wait_s seconds (of the clock on the wall). None is lost then: the next call gives it. */
SIDE_API side_status side_feeder_next_for(side_feeder *feeder, side_stream *reader, double wait_s, side_feed_item *item);
/* For the thread that takes: drops batches that were submitted and not taken: their sources may be reused, their slots are free once their copies, if any began, are
 * done. Blocks until no thread reads the sources any more and the copies of direct pieces are done. Numbers are used up. Batches that are submitted meanwhile wait for
 * the end of this call and are kept. */
SIDE_API side_status side_feeder_discard(side_feeder *feeder);

/* The device slots, a SIDE_LIST: take (further readers of item.slot.key), release and give_back of items; nothing else. Lives as long as the feeder. */
SIDE_API side_slots *side_feeder_slots(side_feeder *feeder);

/* From any thread: blocking calls, now and later, return SIDE_CANCELLED. release and give_back go on working. (After a failure they do not: slots are poisoned.)
 * Once a call has returned SIDE_CANCELLED or a failure that ended the feeder, no thread of it reads sources, and its copies are done; else it is SIDE_STUCK. */
SIDE_API void side_feeder_cancel(side_feeder *feeder);
SIDE_API side_status side_feeder_get_stats(side_feeder *feeder, side_feeder_stats *stats);
/* Ends the threads, waits for copies and recorded readers, frees. Items that are still held: what is queued on them must be done. SIDE_STUCK keeps memory
 * and object. NULL is fine. */
SIDE_API side_status side_feeder_destroy(side_feeder *feeder);

#ifdef __cplusplus
}
#endif
#endif
