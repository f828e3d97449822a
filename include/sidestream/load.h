/* SPDX-License-Identifier: MIT
 *
 * Load: from files to the device (or to host memory), reading and copying at once, in bounded memory. Which tensors, which part of them, where to and in
 * which order is the caller's choice; each can be used as soon as it is there, while others are still on disk.
 *
 *     side_checkpoint *ck;
 *     side_load *load;
 *     if (side_checkpoint_open("model.safetensors.index.json", NULL, &ck) != SIDE_OK) ...
 *     if (side_load_start(dev, ck, NULL, &load) != SIDE_OK) ...      // all tensors, into memory of the load's; returns at once
 *     for (i = 0; i < side_checkpoint_count(ck); i++) {
 *         side_load_place at;
 *         if (side_load_wait(load, i, stream) != SIDE_OK) ...        // what is queued on `stream` from here on may read tensor i
 *         side_load_get_place(load, i, &at);                         // at.data
 *         ...
 *     }
 *     if (side_load_join(load, &stats) != SIDE_OK) ...               // all there, whole; no file has changed meanwhile
 *     ...                                                            // the memory lives as long as the load
 *     side_load_destroy(load);
 *     side_checkpoint_close(ck);
 *
 *     file --pieces--> read, n threads --> [pinned slots] --H2D, a side stream--> destination            host memory: read straight there
 *
 * A piece is a run of one file's bytes, at most piece_bytes long. Its copy is queued by the thread that read it; its slot is used again when that is done.
 * There is no device staging. Neighbours in a file that are neighbours at the destination travel as one copy.
 *
 * Arenas. Parts without a destination of the caller's lie in arenas, one for each file. An arena's layout follows the file; only parts that would not be
 * aligned there are placed anew, behind the others. Arenas are the load's memory, or (SIDE_LOAD_GIVEN) the caller's: then reading begins before
 * the caller has allocated, and side_load_give_arena says where to.
 *
 * Nothing is handed out in part: side_load_wait fails once the load has failed, and join says whether all of it is right. Memory of the caller's is
 * written until join or destroy has returned, whatever else has failed.
 */
#include "../sidestream.h" /* before the guard: it includes this file, in the order the areas need */

#ifndef SIDESTREAM_LOAD_H
#define SIDESTREAM_LOAD_H

#ifdef __cplusplus
extern "C" {
#endif

typedef struct side_load side_load;

/* What to load. `tensor` is its number in the checkpoint, or that of a source. A tensor may be in several parts, and a part several times. */
typedef struct side_load_part {
    uint64_t tensor;
    uint64_t begin; /* byte of the tensor to begin with: rows of a slice are neighbours */
    uint64_t bytes; /* 0: all from there on */
    void *data;     /* the caller's memory, of the kind options.where; NULL: in an arena */
} side_load_part;

/* Sources that are no files: fills `buffer` with `bytes` from `offset` of the source on, for another number than 0 the load fails. Called by several threads at
 * once, in any order. */
typedef int side_load_read_fn(void *user, uint64_t source, uint64_t offset, void *buffer, size_t bytes);
typedef struct side_load_source {
    const char *name; /* for messages; NULL: "source N" */
    uint64_t bytes;
} side_load_source;

/* How files are read. AUTO decides for each piece, by what is in the page cache and what the file system takes, and the statistics say why. */
typedef enum side_load_backend {
    SIDE_LOAD_AUTO = 0,
    SIDE_LOAD_PREAD = 1,  /* threads with pread, through the page cache */
    SIDE_LOAD_DIRECT = 2, /* threads with pread, O_DIRECT */
    SIDE_LOAD_URING = 3   /* io_uring, O_DIRECT */
} side_load_backend;

#define SIDE_LOAD_IN_ORDER 1u /* parts are read as they stand; else by file and offset, which disks like better */
#define SIDE_LOAD_GIVEN    2u /* arenas are the caller's: side_load_give_arena */
#define SIDE_LOAD_CHECKSUM 4u /* XXH3 of each part, from where it lies at the end */

typedef struct side_load_options {
    size_t size;
    const side_load_part *parts; /* need not outlive the call; NULL: every tensor or source, whole, part i being tensor i */
    size_t count;                /* of parts */
    uint32_t flags;              /* SIDE_LOAD_* */
    side_memory_kind where;      /* of arenas, and of the parts' data */
    size_t align;                /* of parts in arenas, a power of two to 4096; 0: 16 */
    size_t piece_bytes;          /* a multiple of 4096, to 64 MiB; 0: 2 MiB */
    size_t pinned_bytes; /* most staging; 0: 80 MiB. Less is used where the pool has less, down to two slots of 64 KiB */
    size_t arena_bytes;  /* most in arenas; 0: what there is */
    uint32_t threads;    /* that read, 1 to 64; 0: by cores */
    side_load_backend backend;
    side_stream *copy_stream;   /* the caller's, must outlive the load; NULL: made here */
    side_stream *memory_stream; /* parts' data is written after what is queued on it so far; NULL: nobody uses it */
    double timeout_s;           /* longest wait for the device before SIDE_STUCK; 0: 30 */

    const side_load_source *sources; /* instead of a checkpoint, with `read`; the names must live as long as that */
    size_t source_count;
    side_load_read_fn *read; /* must be callable until the load was joined or destroyed */
    void *read_user;
} side_load_options;
/* clang-format off */
#define SIDE_LOAD_OPTIONS_INIT { .size = sizeof(side_load_options), .where = SIDE_MEMORY_DEVICE }
/* clang-format on */

/* Plans, starts the threads, returns: reading goes on behind it. The checkpoint (NULL: options.sources) must stay open until the load was joined or
 * destroyed. options NULL: defaults.
 * SIDE_INVALID names the part that does not fit its tensor. SIDE_NO_DEVICE_MEMORY, SIDE_NO_MEMORY, SIDE_TOO_LARGE (arena_bytes): the arenas do not fit; nothing
 * was read then. */
SIDE_API side_status side_load_start(side_device *device, side_checkpoint *checkpoint, const side_load_options *options,
                                     side_load **load);

/* Where a part goes; known from the start, but for `data` of arenas whose memory is not there yet (NULL until then). */
typedef struct side_load_place {
    void *data;
    uint64_t bytes;
    size_t arena;  /* SIZE_MAX: the caller's own data */
    size_t offset; /* in the arena */
    bool moved;    /* placed anew, for alignment */
} side_load_place;
SIDE_API size_t side_load_count(const side_load *load);
SIDE_API side_status side_load_get_place(side_load *load, size_t part, side_load_place *place);

typedef struct side_load_arena {
    void *data;    /* NULL: not there yet */
    size_t bytes;  /* never 0 */
    uint64_t file; /* of the checkpoint; a source's number */
} side_load_arena;
/* Arenas are numbered by file; a file without parts has none. */
SIDE_API size_t side_load_arenas(const side_load *load);
SIDE_API side_status side_load_get_arena(side_load *load, size_t arena, side_load_arena *info);
/* SIDE_LOAD_GIVEN: its memory, of the kind options.where, aligned to options.align (better: to 4096, where it is host memory), once. It is written after what is
 * queued on `stream` so far (NULL: nobody uses it). */
SIDE_API side_status side_load_give_arena(side_load *load, size_t arena, void *data, side_stream *stream);

#define SIDE_LOAD_ALL SIZE_MAX /* as a part: all of them */
/* Blocks until all of the part is read and its copies are queued, then makes `stream` wait for exactly these (NULL: the host waits until they are done). What
 * was read is as the file was then; that the file has not been changed meanwhile is known after join. Any thread.
 * SIDE_STATE: its arena (of SIDE_LOAD_ALL: any) has no memory, or the stream is being captured. Give all arenas before you wait: pieces for one that has no memory
 * keep their slots. The load's first failure, or SIDE_CANCELLED, where it did not get so far. */
SIDE_API side_status side_load_wait(side_load *load, size_t part, side_stream *stream);
/* SIDE_OK: there, for the host and for every stream; SIDE_AGAIN: not yet. Does not block. */
SIDE_API side_status side_load_query(side_load *load, size_t part);
/* Until `parts` of them can be waited for without blocking the host, at most wait_s seconds (SIDE_AGAIN). */
SIDE_API side_status side_load_wait_count(side_load *load, size_t parts, double wait_s);

/* From any thread: what is not queued yet will not come. */
SIDE_API void side_load_cancel(side_load *load);

/* What read a part of the bytes, and why that. */
typedef struct side_load_route {
    char name[16]; /* "cache", "pread", "direct", "uring", "source" */
    char why[96];  /* "it was in the page cache" */
    uint64_t pieces, bytes;
} side_load_route;

typedef struct side_load_stats {
    uint64_t bytes;                    /* of all parts */
    uint64_t read_bytes, copied_bytes; /* so far: by readers, gaps included; known to be at the destination */
    uint64_t moved_bytes;              /* of parts that are placed anew, for alignment */
    uint64_t parts, ready;             /* ready: side_load_wait would not block the host */
    uint64_t pieces, copies;           /* pieces in all; H2D operations queued, a batch counting as one */
    size_t arena_bytes;                /* the load's own */
    size_t pinned_bytes, piece_bytes;  /* staging as used */
    uint32_t slots, threads;
    double time_s;      /* of the clock on the wall, from start to the last byte or until now */
    double plan_s;      /* of it: before the first read was asked for */
    double first_s;     /* until the first piece was queued for the device, or was in host memory */
    double pins_s;      /* until the last slot was made */
    double read_busy_s; /* reading, summed over threads */
    /* time_s, by what went on. A copy counts before all else, so the last three are what the link stood still for. */
    double copying_s;     /* copies in flight */
    double wait_read_s;   /* nothing to copy: waiting for readers */
    double wait_memory_s; /* for arenas: their allocation, or the caller */
    double wait_pins_s;   /* for pinned memory, that of the first slots before anything is read included */
    double gbps;          /* copied_bytes / time_s / 1e9 */
    double link_gbps;     /* of the machine profile, pinned H2D; 0 for host memory */
    /* "link", "disk", "page cache", "reading" (either of these two), "source", "memory", "pins"; "too small" to tell: less than
     * 10 ms, or less than 64 MiB and neither disk, source, memory nor pins took half the time; "" before the end */
    char bottleneck[16];
    uint32_t route_count;
    side_load_route routes[8];
} side_load_stats;
/* Any time. */
SIDE_API side_status side_load_get_stats(side_load *load, side_load_stats *stats);

/* Waits for all parts, then checks that no file was changed since it was opened (SIDE_IO), ends the threads and gives staging back. stats may be NULL. Its answer stays:
 * a second call gives the same. After a failure or a cancel nothing is in flight any more, or it is SIDE_STUCK. */
SIDE_API side_status side_load_join(side_load *load, side_load_stats *stats);
/* SIDE_LOAD_CHECKSUM, after a join that was SIDE_OK: XXH3 (64 bits, xxhsum -H3) of the part. */
SIDE_API side_status side_load_get_checksum(side_load *load, size_t part, uint64_t *hash);
/* Cancels what still runs, waits for it, frees, arenas of the load's too: what is queued on them by others must be done. SIDE_STUCK keeps memory and object. NULL is
 * fine. */
SIDE_API side_status side_load_destroy(side_load *load);

#ifdef __cplusplus
}
#endif
#endif
