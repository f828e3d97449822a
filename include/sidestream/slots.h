/* SPDX-License-Identifier: MIT
 *
 * Slots and fences: memory that is written and read again and again without a race and without waiting for more than it must.
 *
 *              producer                                     consumer
 *    acquire   waits for the drained readers      take      waits for filled
 *    ...       writes                             ...       reads
 *    publish   records filled                     release   records drained
 *
 *         item:     0    1    2    3    4    5
 *         copy      [s0] [s1] [s0] [s1] [s0] [s1]            a ring of 2
 *         compute        [s0] [s1] [s0] [s1] [s0] [s1]
 *
 * Who reads or writes is a stream, or the host itself (stream NULL). A stream waits on the device; the host blocks. Every fence has a
 * host half too: take(i) blocks until publish(i) was called, acquire until the matching releases were. (An event that was not
 * recorded yet counts as done: without the host half the device wait would cover nothing.)
 *
 * Policies
 *   RING  items in order; item i lives in slot i % count. A slot is free for item i + count once `readers` releases of item i came,
 *         in any order. take(seq) waits for that item.
 *   LIST  any free slot, the longest-free first. Published slots stay the holder's until side_slots_give_back, in any order.
 *   TABLE slots under 64-bit keys. acquire(key) takes a free slot, else evicts the least recently used one that nobody reads.
 */
#include "../sidestream.h" /* before the guard: it includes this file, in the order the areas need */

#ifndef SIDESTREAM_SLOTS_H
#define SIDESTREAM_SLOTS_H

#ifdef __cplusplus
extern "C" {
#endif

typedef struct side_slots side_slots;

typedef enum side_policy { SIDE_RING = 0, SIDE_LIST = 1, SIDE_TABLE = 2 } side_policy;

#define SIDE_MAX_READERS 16 /* streams that read one generation of a slot at a time */

typedef struct side_slots_options {
    size_t size;
    side_policy policy;
    uint32_t count;         /* slots, 1..65535 */
    size_t slot_bytes;      /* each */
    side_memory_kind where; /* SIDE_MEMORY_DEVICE, SIDE_MEMORY_PINNED (from `pool`), SIDE_MEMORY_PAGEABLE */
    uint32_t readers;       /* RING: releases that free an item; 0: 1 */
    void *const *memory;    /* caller's own memory, `count` pointers, instead of ours; NULL: allocate */
    side_pool *pool;        /* NULL: the device's own */
    double timeout_s;       /* longest wait for the device before SIDE_STUCK; 0: 30 */
} side_slots_options;
/* clang-format off */
#define SIDE_SLOTS_OPTIONS_INIT { sizeof(side_slots_options), SIDE_RING, 0, 0, SIDE_MEMORY_DEVICE, 0, NULL, NULL, 0.0 }
/* clang-format on */

/* What acquire and take hand out: a value, to be given back by publish or release. */
typedef struct side_slot {
    void *data;
    size_t bytes;        /* capacity */
    uint64_t key;        /* RING: item number; LIST: slot number; TABLE: key */
    uint64_t generation; /* of the slot; rises with every acquire */
    uint32_t index;      /* of the slot */
    uint32_t hold;       /* internal: which reader of the generation */
} side_slot;

/* Names a generation of a slot; a value, valid as long as the slots live. */
typedef struct side_ticket {
    side_slots *slots;
    uint64_t generation;
    uint32_t index;
} side_ticket;

SIDE_API side_status side_slots_create(side_device *device, const side_slots_options *options, side_slots **slots);
/* Waits (at most timeout_s) until the device has drained every slot, then frees; SIDE_STUCK keeps memory and object. Nobody else may be inside a call, and
 * what is queued on slots that are still held (acquired and not published, taken and not released) must be done. */
SIDE_API side_status side_slots_destroy(side_slots *slots);

/* Begin to write. key: RING ignores it; TABLE: the new key (SIDE_INVALID if present). Blocks the host until the slot is free (R7), then makes
 * `writer` wait for exactly the readers of the previous generation (R1). */
SIDE_API side_status side_slots_acquire(side_slots *slots, uint64_t key, side_stream *writer, side_slot *slot);
/* SIDE_AGAIN instead of blocking; for writer NULL also where readers have not drained on the device yet. */
SIDE_API side_status side_slots_try_acquire(side_slots *slots, uint64_t key, side_stream *writer, side_slot *slot);
/* As acquire; SIDE_AGAIN where no slot became free within wait_s seconds (of the clock on the wall). Nothing has changed then. For callers that look at something
 * else in between; what the host waits for the device (writer NULL) is not counted. */
SIDE_API side_status side_slots_acquire_for(side_slots *slots, uint64_t key, side_stream *writer, double wait_s,
                                            side_slot *slot);
/* The slot is filled by what is queued on `writer` so far (NULL: now). ticket may be NULL. On failure the slots are
 * poisoned, and what was queued on `writer` is waited for. */
SIDE_API side_status side_slots_publish(side_slots *slots, const side_slot *slot, side_stream *writer,
                                        side_ticket *ticket);
/* Gives up an acquired slot without an item: RING: the number is used up and take of it returns SIDE_CANCELLED; others: it is free. What was
 * queued on `writer` for it is waited for by the next writer. */
SIDE_API side_status side_slots_abandon(side_slots *slots, const side_slot *slot, side_stream *writer);

/* Begin to read; waits for the item for ever (a thread that publishes it is the caller's). key: RING: item number; LIST: slot number; TABLE: key (SIDE_NOT_FOUND if absent). Blocks the host until published (R7), then makes
 * `reader` wait for the slot's filled event alone (R2, R3). Several streams may take the same item. */
SIDE_API side_status side_slots_take(side_slots *slots, uint64_t key, side_stream *reader, side_slot *slot);
SIDE_API side_status side_slots_try_take(side_slots *slots, uint64_t key, side_stream *reader, side_slot *slot);
/* As take; SIDE_AGAIN where the item was not published within wait_s seconds; as acquire_for. */
SIDE_API side_status side_slots_take_for(side_slots *slots, uint64_t key, side_stream *reader, double wait_s,
                                         side_slot *slot);
/* Reading ends with what is queued on `reader` so far (NULL: now): the stream that took the slot, or one that is ordered after it. */
SIDE_API side_status side_slots_release(side_slots *slots, const side_slot *slot, side_stream *reader);
/* LIST and TABLE: the holder is done with the slot; it may be rewritten once its readers drained. SIDE_STATE while reads are open. */
SIDE_API side_status side_slots_give_back(side_slots *slots, const side_slot *slot);

/* All waiting and later calls return `why` (an error). For cancelling; there is no way back. */
SIDE_API void side_slots_poison(side_slots *slots, side_status why);
/* Waits until everything recorded on the slots so far is done on the device. */
SIDE_API side_status side_slots_drain(side_slots *slots, double timeout_s);

/* A stream waits for the generation to be filled (host half included), the host asks, or the host waits. A generation that was overwritten since
 * counts as filled. */
SIDE_API side_status side_ticket_stream_wait(const side_ticket *ticket, side_stream *stream);
SIDE_API side_status side_ticket_query(const side_ticket *ticket);
SIDE_API side_status side_ticket_wait(const side_ticket *ticket, double timeout_s);

#ifdef __cplusplus
}
#endif
#endif
