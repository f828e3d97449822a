/* SPDX-License-Identifier: MIT
 *
 * The inside of a cast, shared by its files:
 *   cast.c          options, create, run, cancel, destroy
 *   cast_plan.c     which tensors are cast, the layout of the new files, pieces. Pure but for memory
 *   cast_out.c      the output's name: what is there already, and what is refused
 *   cast_files.c    the unfinished output: its files and its index
 *   cast_part.c     what lies in the unfinished output, whose it is, and taking it away
 *   cast_commit.c   the end: rights, syncing, renaming
 *   cast_journal.c  what of it is on disk
 *   cast_move.c     pieces on their way: slots, threads
 *
 *     output   | header |     tensor 0     | 1 |2|3|   tensor 4    |     in the order of the new file
 *     pieces            |    0    |   1    |    2    |      3      |     neighbours of one source type; one write each
 *     extents           |    0    |   1    |  2  | 3 |      4      |     of a piece: what lies in a row in the input, one read each
 *
 *     slot     FREE --next piece--> READING --last extent read--> READ --driver--> DEVICE --driver, copied back--> WRITING --writer--> FREE
 *                                      +------------------------------ kept as it is ------------------------------------^
 */
#ifndef LOAD_CAST_PRIVATE_H
#define LOAD_CAST_PRIVATE_H

#include "checkpoint.h"
#include "reader.h"

#include <limits.h>
#include <sys/types.h>
#include <pthread.h>
#include <stdatomic.h>

#define CAST_EXTENTS      64u /* of a piece */
#define CAST_STAGES       4u  /* items on the device at a time */
#define CAST_PIECE        ((size_t)8 << 20)
#define CAST_PINNED       ((size_t)128 << 20)
#define CAST_SYNC         ((size_t)256 << 20)
#define CAST_PATH         (PATH_MAX + 32)
#define CAST_THREADS_MOST 64u

struct cast_extent {
    uint64_t offset; /* in the input file */
    size_t bytes;
};

struct cast_piece {
    uint32_t file;
    uint32_t first, count; /* extents */
    bool kept;
    side_type from;      /* unless kept */
    uint64_t out_offset; /* in the output file; its bytes lie in a row there */
    size_t in_bytes, out_bytes;
};

/* What of the input's rights its copy may have. */
struct cast_rights {
    mode_t bits;
    gid_t group;
    bool everybody; /* may read the input */
    bool listed;    /* it has a list of rights, of which the group's bits are but the mask */
};

struct cast_file {
    const char *name; /* in the folder; of a single file its own */
    struct cast_rights rights;
    struct st_layout layout; /* header NULL: the file is copied as it is */
    uint64_t bytes;          /* of the output */
    int fd;                  /* -1: not open */
    size_t first, count;     /* pieces */
    bool fresh;              /* there was nothing of it */
    bool memory;             /* the file system is in memory */
    bool moved;              /* lies under its name already; not open */
};

struct cast_plan {
    struct cast_file *files;
    size_t file_count;
    struct cast_piece *pieces;
    size_t piece_count, piece_most;
    struct cast_extent *extents;
    size_t extent_count, extent_most;
    uint64_t tensors, cast_tensors, bytes_in, bytes_out, cast_bytes_in,
        data_bytes;             /* data_bytes: of all output tensors */
    uint64_t choice;            /* hash over what becomes of each tensor */
    size_t slot_bytes;          /* that any piece needs */
    size_t stage_in, stage_out; /* that any cast piece needs; 0: none is cast */
};

struct side_cast {
    side_cast_options options;
    side_checkpoint *checkpoint;
    unsigned fork_generation;
    bool ran, stuck;
    atomic_bool cancelled;

    /* Paths. */
    bool folder;
    bool fill;          /* the folder is there: what is unfinished lies in it, and is moved to its names there */
    char out[PATH_MAX]; /* links followed */
    char part[CAST_PATH], journal[CAST_PATH];
    mode_t mode;              /* of the file that is replaced, with its S_IFREG; 0: none */
    uint64_t moving;          /* inode of what was about to get OUT's name; 0: nothing was */
    bool there, in_the_way;   /* something of that name; it may not be replaced */
    char other[NAME_MAX + 1]; /* an entry of the folder that is there; "": it is empty but for what is ours */
    char *index;              /* text of the new index file; NULL: none */
    const char *index_name;   /* in the folder */
    struct cast_rights index_rights;
    bool index_moved;
    size_t index_bytes;
    uint64_t index_hash; /* of the old one */

    struct cast_plan plan;
    unsigned char *done; /* a byte a piece: written. Guarded by the run's mutex while it runs */

    /* The journal. */
    int journal_fd; /* -1: not open */
    char *identity;
    size_t identity_bytes;
    uint64_t identity_hash, journal_end;
    unsigned char *synced; /* a byte a piece: stands in the journal */
    bool ours;             /* the journal is of these inputs and options, or new */
    bool finished;         /* it was renamed already; but for the journal all is done */

    side_cast_stats stats;
};

static inline uint64_t cast_hash(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *p = data; /* FNV-1a: tells changes, not attacks */

    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ p[i]) * UINT64_C(0x100000001b3);
    return hash;
}
#define CAST_HASH UINT64_C(0xcbf29ce484222325)

/* ---- plan */

/* From options and checkpoint. On failure cast_plan_free still is to be called. */
side_status cast_plan_make(side_cast *cast);
void cast_plan_free(struct cast_plan *plan);
/* False: nothing is cast from this one. */
bool cast_source(side_dtype type, side_type *from);

/* ---- output (cast_out.c) */

/* out, part, journal, folder, fill, mode; refuses what cannot become the output. */
side_status cast_paths(side_cast *cast, const char *in, const char *out);
/* That there is something: `what` of it; "" all. */
side_status cast_in_the_way(const side_cast *cast, const char *what);
bool cast_exists(const char *path); /* links are not followed */

/* ---- files (cast_files.c) */

/* The name of a checkpoint's file in its folder. */
const char *cast_file_name(const side_cast *cast, size_t file);
/* The index file with the new total_size, where there is one. */
side_status cast_index(side_cast *cast);
/* `folder`/`name`; of a single file `folder` itself. */
side_status cast_path(const side_cast *cast, const char *folder, const char *name, char path[CAST_PATH]);
/* Opens what is there and makes what is not, header included; notes which are fresh. After cast_journal_open. */
side_status cast_files_open(side_cast *cast);
void cast_files_close(side_cast *cast);

/* ---- what is unfinished (cast_part.c) */

/* Something is there under that name. */
bool cast_part_exists(const side_cast *cast);
/* A file of that size and header: what we make, or would. */
bool cast_file_is(const struct cast_file *file, const char *path);
/* Notes which files lie under their names already; true: all, index included. */
bool cast_find_moved(side_cast *cast);
/* Takes it away. `journal`: the text of one that was begun there; NULL: there is none, and only what this cast would have made is its own. Refuses where there is
 * anything else, and names it. */
side_status cast_part_remove(side_cast *cast, const char *journal);
/* Of this cast, but for what others put there. */
void cast_part_clear(side_cast *cast);

/* ---- the end (cast_commit.c) */

/* Of what is open there; `replaced`: the mode of what gives way to the copy, or 0. */
struct cast_rights cast_rights_of(int fd, mode_t replaced);
/* Gives them, syncs, and renames to `out`. */
side_status cast_commit(side_cast *cast);

/* ---- journal */

/* Opens and locks it, and reads which pieces are done; sets `finished`. One that is empty, or that was never begun, is begun. */
side_status cast_journal_open(side_cast *cast);
/* Begins it again, with nothing done. */
side_status cast_journal_begin(side_cast *cast);
/* The pieces that are in `done` but not in `synced`: syncs their files, then notes them. Both are the caller's copies, or nobody writes them. */
side_status cast_journal_note(side_cast *cast, const unsigned char *done);
/* What is unfinished is whole, and about to be renamed. */
side_status cast_journal_moving(side_cast *cast);

/* ---- moving */

side_status cast_move(side_cast *cast, side_device *device);

#endif
