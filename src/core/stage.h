/* SPDX-License-Identifier: MIT
 *
 * Staging, shared by pipelines (feed.c) and feeders (feeder_move.c): host memory -> [pinned ring] -> H2D, in order.
 *
 * The owner's source is cut into pieces, in order. Fill threads pop a piece and a staging slot together (under `pop`, so that slots are granted in the order
 * of the pieces and the oldest piece can always go on), fill it in parallel, and put it into the window of ready pieces. Whoever completes the next
 * piece in order becomes the issuer and queues all that are ready. So the copies of one item lie together on the copy stream, and the item's filled
 * event covers nothing of the next one.
 *
 *     cut --pop, a slot with it--> fill, n threads --window, any order--> issue, in order, one thread at a time
 */
#ifndef CORE_STAGE_H
#define CORE_STAGE_H

#include "slots.h"

#define STAGE_MAX_THREADS       64
#define STAGE_DEFAULT_TIMEOUT_S 30.0
#define STAGE_DIRECT_FROM_BYTES ((size_t)256 << 10) /* pinned blocks below this are packed with their neighbours */

/* A run of an item's bytes that travels as one copy. */
struct piece {
    uint64_t item;
    uint64_t number; /* of the piece, from the start of the pass */
    size_t offset;   /* in the item */
    size_t bytes;
    uint64_t block; /* the owner's: where its cursor stood */
    size_t block_offset;
    uint64_t position;
    bool last;      /* of its item */
    bool direct;    /* has no staging slot: read from pinned caller memory, or not wanted any more */
    side_slot slot; /* staging */
};

struct stager_ops {
    /* True: the pass is broken off here, so there are no more pieces. Under `pop`, as cut. NULL: never. */
    bool (*is_over)(void *owner);
    /* The next piece, but for number and slot; SIDE_END: there are no more. May block. Under `pop`. */
    side_status (*cut)(void *owner, struct piece *piece);
    /* Fills piece->slot.data; several threads at once. NULL with cut_fills. */
    side_status (*fill)(void *owner, const struct piece *piece);
    /* Queues the copy; in order of the pieces, one call at a time, under no lock. `staged`: the filled bytes; NULL for direct ones. */
    side_status (*issue)(void *owner, const struct piece *piece, const void *staged);
    /* SIDE_OK, or why nobody may go on. */
    side_status (*check)(void *owner);
    /* cut has said SIDE_END, and all pieces before were issued. Under `issue`. NULL where cut never does. */
    void (*ended)(void *owner);
};

struct stager {
    const struct stager_ops *ops;
    void *owner;
    side_stream *stream; /* that copies */
    side_slots *host;    /* the pinned ring; NULL: only direct pieces come */
    bool cut_fills;      /* cut fills piece->slot, which is acquired before */
    pthread_mutex_t
        pop; /* guards number, ended, the owner's cursor; held while a staging slot is acquired, so that slots go out in order */
    uint64_t number;       /* of the next piece */
    bool ended;            /* no more pieces in this pass */
    pthread_mutex_t issue; /* guards what follows */
    pthread_cond_t issued_some;
    struct piece *ready; /* window of filled pieces by number % ready_count */
    bool *is_ready;
    uint32_t ready_count;
    uint64_t issued; /* pieces */
    uint64_t total;  /* pieces in the pass, once known; UINT64_MAX before */
    bool issuing;    /* some thread is in the issue loop */
    atomic_ullong fill_ns;
};

/* Cannot fail; stager_finish undoes it, with the window and the ring. */
void stager_init(struct stager *st, const struct stager_ops *ops, void *owner);
void stager_finish(struct stager *st);
/* Room for `count` pieces between fill and issue: as many as there are staging slots and threads. Before the first thread works. */
side_status stager_window(struct stager *st, uint32_t count);
/* From the first piece again. No thread is at work. */
void stager_restart(struct stager *st);
/* A fill thread's work: SIDE_END once there are no more pieces, or the failure. The thread blocks in acquires of the ring, which the owner can interrupt by the
 * ring's cancel flag: the piece at hand, of which only the owner's issue hears then, is one that it does not want any more. */
side_status stager_work(struct stager *st);

/* ---------------------------------------------------------------- pinned memory for it */

struct staging {
    const char *where, *component; /* for errors and messages */
    double timeout_s;
    uint32_t count;     /* in: slots wanted; out: got */
    size_t bytes;       /* each, in and out */
    size_t limit_bytes; /* of all slots; 0: none */
    bool whole;         /* slots may not get smaller */
};

/* Chunks of chunk_bytes (0: the default), at most as large as an item of item_bytes. Two slots a thread, so that threads that finish together leave the copy
 * engine work while they start again. */
struct staging staging_for(uint32_t threads, size_t chunk_bytes, size_t item_bytes);
/* A pinned ring; fewer slots (down to 2), then smaller ones, where limit_bytes, the pool's budget or memory are short. */
side_status staging_create(side_device *device, struct staging *want, side_slots **slots);

/* Threads that copy memory to memory, for an option `threads` (0: default). */
uint32_t staging_threads(uint32_t threads);
/* Host memory that is pinned at both ends (SIDE_INVALID where it is device memory). */
side_status staging_is_pinned(side_device *device, const void *data, size_t bytes, const char *where, const char *what,
                              uint64_t number, bool *pinned);

#endif
