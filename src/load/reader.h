/* SPDX-License-Identifier: MIT
 *
 * Reader: extents of many files into the caller's buffers, all through one pool of reads in flight.
 *
 *     struct reader_options o = {.done = my_done, .owner = my_load};
 *     reader_create(&o, &reader);
 *     reader_file(reader, -1, "model-00001.safetensors", READER_ANY_SIZE, &file);
 *     piece->file = file; piece->offset = begin; piece->bytes = n; piece->buffer = slot; piece->buffer_bytes = reader_room(n);
 *     reader_submit(reader, piece);               // at any time, from any thread, from my_done too
 *     ... my_done(my_load, piece) on one of the reader's threads: piece->status, piece->data, piece->backend, piece->why
 *     reader_drain(reader, deadline);             // nothing is in flight any more
 *     reader_file_check(reader, file);            // SIDE_IO where the file was changed meanwhile
 *     reader_destroy(reader, 30);
 *
 *                        +-- in the page cache ----> preadv2(RWF_NOWAIT), on the thread that asked
 *     submit --> queue --+-- not, O_DIRECT goes ---> ring thread (io_uring), or pread of O_DIRECT on the thread
 *       FIFO    threads  +-- else -----------------> pread, on the thread
 *
 * Which way is decided piece by piece, and each piece says at its end which it was and why. No lock is held while anything is read or called back.
 * A file is never mapped, so one that shrinks is an error, not a SIGBUS.
 */
#ifndef LOAD_READER_H
#define LOAD_READER_H

#include "sidestream.h"

/* How bytes are read. AUTO decides by piece; any other as an option forces it. Forced CACHE and PREAD are page cache alone; forced DIRECT and URING read
 * every piece past the cache, but for what O_DIRECT cannot do: see reader_piece.why. */
/* clang-format off */
#define READER_BACKEND_MAP(X)                                                             \
    X(READER_AUTO, "auto", "the best one for each piece")                                 \
    X(READER_CACHE, "cache", "buffered pread that found everything in the page cache")    \
    X(READER_PREAD, "pread", "buffered pread")                                            \
    X(READER_DIRECT, "direct", "pread with O_DIRECT, a read a thread")                    \
    X(READER_URING, "uring", "io_uring with O_DIRECT")
/* Why a piece was read as it was. */
#define READER_WHY_MAP(X)                                                                 \
    X(READER_WHY_NONE, "it was not read")                                                 \
    X(READER_WHY_FORCED, "it was asked for")                                              \
    X(READER_WHY_CACHED, "it was in the page cache")                                      \
    X(READER_WHY_COLD, "it was not in the page cache")                                    \
    X(READER_WHY_PARTLY, "only a part of it was in the page cache")                      \
    X(READER_WHY_MEMORY, "the file system is in memory")                                  \
    X(READER_WHY_NO_DIRECT, "the file system refuses O_DIRECT")                           \
    X(READER_WHY_NO_NOWAIT, "the file system cannot tell what is in the page cache")      \
    X(READER_WHY_NO_URING, "it was not in the page cache, and io_uring is not available") \
    X(READER_WHY_NO_ROOM, "its buffer is not aligned, or has no room for an aligned read") \
    X(READER_WHY_REST, "direct reads did not get to its end")
/* clang-format on */

#define READER_X(name, ...) name,
enum reader_backend { READER_BACKEND_MAP(READER_X) READER_BACKENDS };
enum reader_why { READER_WHY_MAP(READER_X) READER_WHYS };
#undef READER_X

/* "uring"; and a phrase for a report: "it was not in the page cache". */
const char *reader_backend_name(enum reader_backend backend);
const char *reader_backend_text(enum reader_backend backend);
const char *reader_why_text(enum reader_why why);
/* SIDE_INVALID, naming those that there are. */
side_status reader_backend_parse(const char *name, enum reader_backend *backend);

#define READER_ALIGN \
    4096u /* of buffers and file offsets, for direct reads; a file system that wants more gets no direct reads */
#define READER_ANY_SIZE     UINT64_MAX
#define READER_MOST_THREADS 64u
#define READER_MOST_DEPTH   1024u

/* Bytes of an aligned buffer that suffice to read `bytes` at any offset past the cache. No more than `bytes` are needed where offset and bytes are multiples
 * of READER_ALIGN. */
size_t reader_room(size_t bytes);

typedef struct reader reader;

/* One read. The caller's struct, usually part of a slot: the reader's from submit until `done` is called with it; then the caller's again, and
 * done may submit it again. */
struct reader_piece {
    /* In. */
    uint32_t file; /* of reader_file */
    uint64_t offset;
    size_t bytes;        /* 0 is answered with SIDE_OK */
    void *buffer;        /* any; multiples of READER_ALIGN allow direct reads */
    size_t buffer_bytes; /* >= bytes; reader_room(bytes) allows direct reads at any offset */
    void *user;

    /* Out. On failure the cause is the thread's side_last_error() while done runs: file, offset, errno. */
    side_status status; /* SIDE_IO: with file and offset. SIDE_CANCELLED */
    void *data; /* the bytes: at buffer + offset % READER_ALIGN after direct reads, so inside the buffer. NULL on failure; buffer's bytes are then undefined */
    enum reader_backend backend; /* that read its last byte */
    enum reader_why why;
    uint64_t submitted_ns, read_ns; /* os_now_ns: when it was submitted; when a read of it first began */

    /* The reader's. */
    struct reader_piece *next;
    struct reader_entry *entry;
    size_t lead;   /* where data begins in the buffer */
    size_t filled; /* bytes there so far */
    uint32_t retries;
    bool aligned; /* its buffer takes direct reads */
};

/* On a thread of the reader, several at once, under no lock. May submit and cancel; must not drain or destroy, nor block for long: the thread reads nothing
 * meanwhile, and of the ring's there is one. */
typedef void reader_done_fn(void *owner, struct reader_piece *piece);

/* Zero means default. */
struct reader_options {
    reader_done_fn *done; /* required */
    void *owner;
    enum reader_backend backend;
    uint32_t threads; /* 1..READER_MOST_THREADS; 0: three of four cores, 4 at least and 16 at most */
    uint32_t depth;   /* reads that the ring has in flight, 1..READER_MOST_DEPTH; 0: 64 */
};

/* Starts the threads. io_uring is set up at the first piece that wants it; at once where it is forced. SIDE_INVALID; SIDE_NO_MEMORY; SIDE_SYSTEM: no thread;
 * SIDE_UNSUPPORTED: io_uring was forced and is refused, with its errno. */
side_status reader_create(const struct reader_options *options, reader **out);

/* Memory that buffers lie in, any time: registered with the ring, if there is one, which saves it work a read. Not required; beyond 64 of them, or where the kernel refuses, reads
 * do without. It must stay until destroy. */
void reader_region(reader *reader, void *base, size_t bytes);

/* Adds a file; any time. fd stays the caller's and open until destroy; -1: path is opened here (symbolic links are followed). path: for messages, and to open it.
 * size: what the caller believes; SIDE_IO where it is another one. SIDE_INVALID: a directory, FIFO, device or socket, which are never opened for real.
 * SIDE_IO: cannot be opened. SIDE_UNSUPPORTED: a direct back-end is forced and refused for this file. *number counts from 0. */
side_status reader_file(reader *reader, int fd, const char *path, uint64_t size, uint32_t *number);
/* SIDE_IO, saying what changed, where size, time of change or identity are not those of reader_file; the path is not looked at, so a file that was
 * replaced by rename reads on unharmed. Not during reads: after them. */
side_status reader_file_check(reader *reader, uint32_t number);

struct reader_file_info {
    const char *path; /* until destroy */
    uint64_t size;
    bool memory;   /* tmpfs, ramfs */
    bool direct;   /* O_DIRECT goes */
    char why[128]; /* where it does not: what refused it */
};
side_status reader_file_info(reader *reader, uint32_t number, struct reader_file_info *info);

/* Queues; never blocks, never reads. SIDE_INVALID, SIDE_TOO_LARGE (buffer), SIDE_NOT_FOUND (file), SIDE_FORKED: nothing was queued, and done is not called. SIDE_OK: done is
 * called exactly once, also after cancel. An extent past the file's end is SIDE_INVALID; one that ends early since the file shrank is done with SIDE_IO. */
side_status reader_submit(reader *reader, struct reader_piece *piece);

/* What waits is done with SIDE_CANCELLED, what is being read is read to the end of its system call; so are later submits. For good. Any thread, not signal handlers. */
void reader_cancel(reader *reader);
/* Waits until every submitted piece is done and its callback has returned. SIDE_STUCK: not by then (os_now_ns terms; UINT64_MAX: for ever); a dead network
 * file system, say. Buffers of pieces that are not done must stay. */
side_status reader_drain(reader *reader, uint64_t deadline_ns);
/* Cancels, drains, ends the threads, closes what was opened here, frees. SIDE_STUCK: not drained in wait_s; everything is kept, and the call may be repeated. NULL and
 * forked children: nothing. */
side_status reader_destroy(reader *reader, double wait_s);

struct reader_sum {
    uint64_t pieces, bytes;
    uint64_t busy_ns; /* in reads, summed over threads; of the ring: while any read was in flight */
};
struct reader_stats {
    struct reader_sum backend[READER_BACKENDS]; /* pieces: by who read the last byte; bytes and times: by who read them */
    struct reader_sum why[READER_WHYS];         /* pieces and bytes */
    uint64_t submitted, done, failed, cancelled; /* pieces */
    uint64_t short_reads, retries; /* reads continued after less than asked; repeated after EINTR or EAGAIN */
    uint32_t threads, depth;
    uint32_t most_in_flight; /* pieces in reads at one time */
    char uring[160]; /* "not needed so far", "ready, 2 buffers registered", "refused: io_uring_setup: Operation not permitted" */
};
void reader_get_stats(reader *reader, struct reader_stats *stats);

#endif
