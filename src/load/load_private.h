/* SPDX-License-Identifier: MIT
 *
 * The inside of a load, shared by its files:
 *   load.c         options, start, the first failure, cancel, join, destroy
 *   load_plan.c    what is to be read: parts, their places in arenas, pieces. Pure but for allocation
 *   load_slots.c   pinned slots, made in steps
 *   load_move.c    pieces on their way: asking for reads, queueing copies, slots that come back; the driver's loop
 *   load_arena.c   memory of arenas: ours, or the caller's
 *   load_wait.c    readiness of parts
 *   load_source.c  sources that are callbacks: threads that call them, in the place of a reader
 *   load_check.c   checksums of parts, from where they lie
 *   load_stats.c   sums, and the bottleneck
 *
 *     parts   |  part 0  | 1 |     part 2 (a slice)     |          what the caller wants; each in its arena or in memory of the caller's
 *     units   |    0    |1|2|      3      |      4      |          of a part what lies in one piece
 *     pieces  |    0    |         1       |      2      |  gap     of one file; begin and end on a grid of piece_bytes, so that a slot holds them even if
 *                                                                  direct reads round to 4096. Small gaps are read along
 *
 *     slot    FREE --next piece--> READING ---------------> GATHERED --by whoever sends--> COPYING --driver, copy done--> FREE
 *                                     |                       ^
 *                                     +--> PARKED ------------+ once its arena has memory              host memory: READING --> FREE
 *
 * Pieces are read in order and copied as they come: the link does not wait for a late one. While the link has enough to do, filled slots are gathered and go
 * as one batch (a copy of its own costs the link 3 us, as much as 160 KiB do); when it has not, each goes at once. All copies are on one stream, so copies
 * are done in the order in which they were queued (`sequence`), and a part is there once the copy that was queued last of its units' is. So there is an
 * event a batch, and none a part: a part's sequence is either done, or that of a slot which is COPYING, and what its readers wait for is the fence of its
 * `cover`, the last slot of the batch.
 *
 * Lock: mutex guards all that is not said to be constant or somebody's. Copies are queued and fences recorded and waited for by streams under it: a few
 * microseconds a piece, and no call there waits for the device. Reading, pinning, allocating, the driver's own wait for a copy and calls of the
 * caller's are outside of it. Order: this, then what pools and devices lock.
 *
 * Threads: the driver (one a load) asks for reads, allocates arenas and takes slots back; `pins` makes the slots behind the first; reader threads queue the copies of
 * what they have read; `check` sums up parts. Whoever meets a failure says so (load_fail), the others then end by themselves.
 */
#ifndef LOAD_PRIVATE_H
#define LOAD_PRIVATE_H

#include "fence.h"
#include "reader.h"

#define LOAD_NONE        UINT32_MAX
#define LOAD_GRAIN       ((size_t)4096)     /* of files, for direct reads */
#define LOAD_GAP         ((size_t)64 << 10) /* between two parts: read along */
#define LOAD_COPY_GAP    ((size_t)4096)     /* within an arena: copied along */
#define LOAD_SLOTS_MOST  1024u
#define LOAD_PIECE_LEAST ((size_t)64 << 10)
#define LOAD_PIECE_MOST  ((size_t)64 << 20)
#define LOAD_BATCH       128u /* copies that go as one call */
#define LOAD_GATHER      8u   /* slots that do */

struct load_part {
    uint64_t at, bytes; /* in the file */
    uint32_t file;
    uint32_t arena; /* LOAD_NONE: `data` is the caller's */
    void *data;
    size_t offset; /* in the arena */
    bool moved;
    /* Guarded. */
    uint32_t left;     /* units whose copies are not queued */
    uint64_t sequence; /* of the copy that was queued last; 0: none, or in host memory */
};

struct load_unit {
    uint64_t skip; /* in the part */
    uint32_t part;
    uint32_t at, bytes; /* in the piece */
};

struct load_piece {
    uint64_t at; /* in the file */
    uint32_t bytes, file;
    uint32_t unit, units; /* the first, how many */
    uint32_t arena;       /* that units go to; LOAD_NONE: none */
};

struct load_arena {
    size_t bytes;
    uint32_t file;
    /* Guarded. */
    void *data; /* NULL: not there yet */
    void *base; /* ours: what is freed */
    uint64_t clock_ns;
};

struct load_file {
    const char *name;
    uint64_t bytes;
    int fd;          /* -1: a source */
    uint32_t number; /* the reader's */
    uint32_t arena;  /* LOAD_NONE: none */
};

/* Made once, then constant, but for what is said to be guarded. */
struct load_plan {
    struct load_file *files;
    struct load_part *parts;
    struct load_unit *units;
    struct load_piece *pieces;
    struct load_arena *arenas;
    uint32_t *order; /* parts by file and offset */
    uint32_t file_count, part_count, unit_count, piece_count, arena_count;
    uint64_t bytes, moved_bytes;
    size_t arena_bytes;
};

enum load_slot_state { LOAD_FREE, LOAD_READING, LOAD_PARKED, LOAD_GATHERED, LOAD_COPYING };

struct load_slot {
    struct reader_piece read;
    side_load *load;
    void *memory; /* NULL: pieces are read to where they go */
    struct load_piece *piece;
    enum load_slot_state state;
    struct load_slot *next;  /* FREE, PARKED: the list */
    char *filled;            /* PARKED, GATHERED, COPYING: the piece's first byte */
    uint64_t sequence;       /* COPYING */
    struct load_slot *cover; /* COPYING: the last of its batch */
    struct fence copied; /* of a cover: its batch. The sender's while COPYING begins; waited for by the driver and, under the lock, by streams */
    uint64_t clock_ns; /* the driver's, when it came back */
};

struct load_block { /* slots that were pinned together */
    void *data;
    size_t bytes;
};

struct load_source_pool;
struct load_check;

struct side_load {
    side_device *device;
    unsigned fork_generation;
    side_load_options options; /* defaults filled in; parts and sources are not the caller's any more */
    side_checkpoint *checkpoint;
    bool to_host, simulated, ordered; /* ordered: SIDESTREAM_DISABLE */
    struct load_plan plan;
    side_stream *copy;
    bool own_copy;
    side_pool *pool;
    reader *reader;                   /* set once, guarded while blocks may come; or */
    struct load_source_pool *sources; /* callbacks */
    size_t slot_bytes;
    uint32_t slot_most;      /* to be made */
    uint64_t begin_ns;       /* os_now_ns at start */
    uint64_t begin_clock_ns; /* the device's host clock */

    pthread_mutex_t mutex;  /* guards what follows */
    pthread_cond_t work;    /* for the driver: something to do, without a copy in flight */
    pthread_cond_t changed; /* for callers: a part, a failure, the end */
    atomic_bool stop;       /* failed or cancelled: read without the lock too */
    side_error failure;     /* the first; status SIDE_OK: none. SIDE_CANCELLED too */
    struct load_slot *slots;
    struct load_block *blocks;
    uint32_t slot_count, block_count;
    uint32_t known_blocks; /* to the reader */
    struct load_slot *free, *parked;
    struct load_slot **copying; /* by sequence % slot_most */
    struct load_slot *gathered[LOAD_GATHER];
    uint32_t gathered_count;
    uint32_t batches; /* queued, and not known to be done */
    uint32_t reading; /* slots */
    uint32_t parked_count;
    uint32_t next_piece; /* to be read */
    uint32_t done_pieces;
    uint64_t queued, done; /* sequences: the last given, the last known to be done */
    uint64_t done_clock_ns;
    uint32_t waited_stream; /* number of the stream that was made to wait last, and for which sequence: what is before needs no call */
    uint64_t waited;
    uint32_t ready;      /* parts */
    uint32_t next_arena; /* ours, to be allocated */
    bool pinning;        /* the thread that makes slots is at it */
    bool driving;        /* the driver has not ended */
    bool joining, joined, stuck;
    side_error end; /* of join */
    pthread_t driver, pins;
    bool has_driver, has_pins;
    struct load_check *check;
    uint64_t *hashes; /* of parts */

    /* Sums. */
    struct load_route {
        uint64_t pieces, bytes;
    } routes[READER_BACKENDS][READER_WHYS];
    uint64_t read_bytes, copied_bytes, copies, starved, end_ns, first_ns, pins_ns, plan_ns;
    uint64_t spent_ns[4];
    uint64_t stamp_ns;              /* up to here spent_ns counts */
    struct reader_stats reader_end; /* once the reader is gone */
};

enum load_spent { SPENT_COPYING, SPENT_READ, SPENT_MEMORY, SPENT_PINS };

/* ---- load.c */

/* SIDE_INVALID for NULL, SIDE_FORKED in a child. */
side_status load_enter(const side_load *l, const char *where);
/* The first failure stays, with the thread's error detail. Wakes whoever waits. Not locked. Returns status. */
side_status load_fail(side_load *l, side_status status);
side_status load_fail_locked(side_load *l, side_status status);
/* SIDE_OK, or the failure, as the thread's error too. Locked. */
side_status load_failure(const side_load *l);

/* ---- load_plan.c */

/* Parts and files of the checkpoint or the sources, as the options have them. SIDE_INVALID names the part. */
side_status load_plan_parts(struct load_plan *plan, const side_checkpoint *checkpoint, const side_load_options *o);
/* Where parts without a destination go. */
side_status load_plan_arenas(struct load_plan *plan, const side_load_options *o, bool to_host);
/* Pieces of piece_bytes at most, in the order to be read. */
side_status load_plan_pieces(struct load_plan *plan, size_t piece_bytes, bool in_order, bool to_host);
void load_plan_finish(struct load_plan *plan);
/* Where a unit's part begins. Guarded: the arena's data. NULL: it has no memory yet. */
static inline char *load_part_data(const struct load_plan *plan, const struct load_part *part)
{
    if (part->arena == LOAD_NONE)
        return part->data;
    return plan->arenas[part->arena].data != NULL ? (char *)plan->arenas[part->arena].data + part->offset : NULL;
}

/* ---- load_slots.c */

/* Chooses how many slots there will be and how large, and makes the first. Before the pieces are cut, since pinned memory may be short: slot_bytes is what
 * they may have. `bytes`: of all parts. */
side_status load_slots_begin(side_load *l);
/* Tells the reader of blocks that are new to it. Not locked. */
void load_slots_tell(side_load *l);
/* The others, on a thread of their own: fewer, with a warning, where pinned memory ends. */
void *load_slots_thread(void *load);
/* Nothing is queued or read. */
void load_slots_finish(side_load *l);

/* ---- load_move.c */

void *load_driver(void *load);
/* A read has ended, on whatever thread; slot->read says how. */
void load_filled(struct load_slot *slot);
/* The same, of a reader. */
void load_read_done(void *load, struct reader_piece *piece);
/* Copies of parked slots whose arena has memory now. Locked. */
side_status load_unpark(side_load *l);

/* ---- load_arena.c */

/* Before anything starts: does it fit? */
side_status load_arenas_check(side_load *l);
/* The next one of ours; blocks. Driver alone, not locked. */
side_status load_arena_make(side_load *l);
/* Behind what is queued on `stream`: the copies, or in host memory the reads, which this waits for. */
side_status load_order(side_load *l, side_stream *stream);
void load_arenas_finish(side_load *l);

/* ---- load_wait.c */

/* As side_load_wait. patient: also for an arena's memory. */
side_status load_wait_part(side_load *l, size_t part, side_stream *stream, bool patient);

/* ---- load_source.c */

side_status load_sources_create(side_load *l);
/* Threads, and nanoseconds in calls, summed over them. */
void load_sources_stats(const side_load *l, uint32_t *threads, uint64_t *busy_ns);
void load_sources_submit(side_load *l, struct load_slot *slot);
/* Waiting reads end with SIDE_CANCELLED. */
void load_sources_cancel(side_load *l);
/* Until no read is waiting or in a call. SIDE_STUCK: not by then (os_now_ns). */
side_status load_sources_drain(side_load *l, uint64_t deadline_ns);
/* Ends the threads, frees. Drained. */
void load_sources_finish(side_load *l);

/* ---- load_check.c */

/* Starts the thread that sums up parts as they come. */
side_status load_check_begin(side_load *l);
/* The thread has ended. SIDE_STUCK: not all that it queued has, and its memory is kept. */
side_status load_check_finish(side_load *l);

/* ---- load_stats.c */

/* What the time since the last call went to. Locked; the driver's. */
void load_spent(side_load *l, enum load_spent what);

#endif
