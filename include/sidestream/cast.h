/* SPDX-License-Identifier: MIT
 *
 * Casts of whole checkpoints: disk -> device -> disk, all at once, in bounded memory, and resumable.
 *
 *     side_cast_options o = SIDE_CAST_OPTIONS_INIT;
 *     side_cast *cast;
 *     o.to = SIDE_DTYPE_BF16;
 *     if (side_cast_create("model", "model-bf16", &o, &cast) != SIDE_OK) ...      // plans; what is in the way is said now
 *     if (side_cast_run(cast, device, &stats) != SIDE_OK) ...                     // only now there is a model-bf16
 *     side_cast_destroy(cast);
 *
 *     file --pieces--> read, n threads --> [pinned slot] --H2D--> cast --D2H--> [the same slot] --> written, n threads --> file.cast-part
 *                                               |                                                       ^
 *                                               +--- what is kept as it is -----------------------------+
 *
 * A large tensor is cut into pieces; small ones of one type travel together. Which piece is on disk, and synced, stands in a journal beside the output: a cast that was
 * killed goes on there when it is created again with the same inputs and options, and the output is the same, byte for byte.
 *
 * What is cast: tensors of F64, F32, F16, BF16, F8_E4M3 and F8_E5M2 that `select` takes and that are not of the type already. All others, and the metadata, are kept
 * byte for byte; a file of which nothing is cast is copied as it is. Values as SIDE_OP_CAST has them: nearest even; what is too large becomes
 * infinity, in F8_E4M3 448. Nothing is scaled.
 *
 * A file of which something is cast is laid out anew, as the reference implementation does it: by type, then by name, so that every tensor is aligned to its type.
 * It is the file that one gets by loading, casting and saving with that.
 */
#include "../sidestream.h" /* before the guard: it includes this file, in the order the areas need */

#ifndef SIDESTREAM_CAST_H
#define SIDESTREAM_CAST_H

#ifdef __cplusplus
extern "C" {
#endif

typedef struct side_cast side_cast;

/* Whether a tensor of a type that can be cast is. Called by side_cast_create, on its thread, in the order of the checkpoint. */
typedef bool side_cast_select_fn(void *user, const side_tensor *tensor);

#define SIDE_CAST_REPLACE 1u /* an output file that is there is replaced, once the new one is whole */
#define SIDE_CAST_RESTART \
    2u /* an unfinished output is taken away first, whichever cast's it is; refused where anything else lies in it */

typedef struct side_cast_options {
    size_t size;
    side_dtype to;               /* F32, F16, BF16, F8_E4M3 or F8_E5M2. Needed */
    uint32_t flags;              /* SIDE_CAST_* */
    uint32_t open;               /* SIDE_CHECKPOINT_*: how the input is read */
    side_cast_select_fn *select; /* NULL: every tensor */
    void *select_user;
    size_t piece_bytes;  /* of input or output, whichever is more: a power of two from 4 KiB to 64 MiB; 0: 8 MiB */
    size_t pinned_bytes; /* most staging; 0: 128 MiB. Less is used where the pool has less, down to two slots */
    size_t sync_bytes;   /* written between two entries of the journal; 0: 256 MiB */
    uint32_t threads;    /* that read, 1 to 64; 0: by cores */
    uint32_t writers;    /* threads that write, 1 to 64; 0: by cores, at most 8 */
    double timeout_s;    /* longest wait for the device before SIDE_STUCK; 0: 30 */
    void (*progress)(void *user, uint64_t done, uint64_t total); /* bytes of input; from the running thread. NULL: none */
    void *progress_user;
} side_cast_options;
/* clang-format off */
#define SIDE_CAST_OPTIONS_INIT { .size = sizeof(side_cast_options) }
/* clang-format on */

/* in: a safetensors file, an index file of shards, or a folder, as side_checkpoint_open takes them. out: a file for a file, else a folder, in which shards
 * and index keep their names; the index has the new total_size. Nothing else is copied from a folder.
 * Reads the headers, lays out, opens `out`.cast-part and `out`.cast-journal (of a folder that is there: .cast-part and .cast-journal in it), and goes on with
 * them if they are there. They are the user's alone; what appears as `out` has the input's permission bits, less the umask.
 * SIDE_INVALID: an option; no safetensors; out is an input, a link to nothing, or a file that is a mount point. SIDE_STATE: out exists (a file:
 * SIDE_CAST_REPLACE; a folder must be empty); what is unfinished there is of other inputs or options (the message says which; SIDE_CAST_RESTART), or is nobody's
 * that is known; or another process is at it. SIDE_NOT_FOUND, SIDE_IO: input or
 * output cannot be opened, or there is less space than the output takes. */
SIDE_API side_status side_cast_create(const char *in, const char *out, const side_cast_options *options,
                                      side_cast **cast);

typedef struct side_cast_stats {
    uint64_t files, tensors, cast_tensors; /* of the input; that are cast */
    uint64_t pieces, pieces_done;          /* resumed ones too */
    uint64_t bytes_in, bytes_out;          /* of all pieces */
    uint64_t cast_bytes_in;                /* of them: through the device */
    uint64_t resumed_bytes;                /* of bytes_in: were there already */
    uint64_t read_bytes, cached_bytes; /* read by this run; of them: from the page cache, or a file system in memory */
    size_t pinned_bytes, device_bytes, piece_bytes;
    uint32_t slots, threads, writers;
    double time_s;      /* of the clock on the wall, of run */
    double sync_busy_s; /* syncing, beside all else, and at the end */
    /* Mean number of slots in each place while it ran: where they pile up is what holds the others up. */
    double reading, on_device, writing;
    char bottleneck[16]; /* "reading", "device", "writing"; "" where nothing moved */
} side_cast_stats;

/* Moves everything, syncs, renames to `out`: at once; in a folder that was there one file after another, its index last. Blocks. Once; stats may be NULL, and are set also on failure.
 * On failure, and on SIDE_CANCELLED, what is done stays in `out`.cast-part for the next time, unless nothing is. SIDE_IO: reading or writing failed, or an
 * input was changed meanwhile. SIDE_STUCK: the device did not finish; memory is kept. */
SIDE_API side_status side_cast_run(side_cast *cast, side_device *device, side_cast_stats *stats);
/* The plan, and how much of it is there already: before run, too. */
SIDE_API side_status side_cast_get_stats(const side_cast *cast, side_cast_stats *stats);
/* From any thread, also a signal handler: run ends with SIDE_CANCELLED. */
SIDE_API void side_cast_cancel(side_cast *cast);
/* Not while it runs. An unfinished output of which nothing is done is taken away. NULL is fine. */
SIDE_API void side_cast_destroy(side_cast *cast);

#ifdef __cplusplus
}
#endif
#endif
