/* SPDX-License-Identifier: MIT
 * What the reader's files share. Threads: reader_thread.c; io_uring: reader_ring.c; the queue, ends of pieces and life: reader.c; files: reader_file.c. */
#ifndef LOAD_READER_PRIVATE_H
#define LOAD_READER_PRIVATE_H

#include "io.h"
#include "os.h"
#include "reader.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/uio.h>
#include <time.h>

#define READER_RETRIES 64u /* of EAGAIN, a piece */
#define READER_BUFFERS 64u /* that are registered with the ring */

/* A file; stays where it is until destroy. */
struct reader_entry {
    char *path;
    int fd, direct_fd; /* -1: none */
    bool fd_is_ours;
    uint64_t size;
    dev_t device;
    ino_t inode;
    struct timespec modified; /* not the time of change: a link that is made to the file changes that */
    bool memory;
    atomic_bool direct; /* becomes false where a direct read is refused */
    atomic_bool nowait; /* becomes false where preadv2 does not know */
    atomic_bool hot;    /* the last piece was in the page cache: the next one is tried without asking first */
    char why[128];      /* no direct reads; written before the file is known */
};

/* What one thread did for one piece, added up at its end. */
struct reader_tally {
    struct reader_sum sum[READER_BACKENDS]; /* bytes and busy_ns */
    uint64_t short_reads, retries;
};

struct reader_list {
    struct reader_piece *first, *last;
};

struct reader {
    struct reader_options options;
    unsigned fork_generation;
    atomic_bool cancelled;
    pthread_mutex_t ring_setup; /* one thread sets the ring up, or adds to its buffers, the others wait; before mutex */
    struct iovec buffers[READER_BUFFERS]; /* entries before a count that the ring has seen are constant */
    uint32_t buffer_count;                /* guarded by ring_setup */
    atomic_bool ring_tried;
    struct reader_ring *ring; /* written before ring_tried; NULL: refused */

    pthread_mutex_t mutex; /* guards what follows */
    pthread_cond_t work;   /* a piece was queued, or the end is near */
    pthread_cond_t idle;   /* live is 0 */
    struct reader_list queue;
    uint64_t live; /* submitted, and the callback has not returned */
    uint32_t in_flight;
    bool stopping;
    struct reader_entry **entries;
    uint32_t entry_count, entry_room;
    struct reader_stats stats;

    pthread_t threads[READER_MOST_THREADS];
    uint32_t thread_count; /* started */
};

/* The piece's end: statistics, callback, and then it is the caller's. On failure the thread's error detail is set. Under no lock. */
void reader_end(reader *r, struct reader_piece *piece, side_status status, const struct reader_tally *tally);
/* To the threads once more, before all others: what the ring could not finish. piece->backend says how it goes on. */
void reader_give_back(reader *r, struct reader_piece *piece, const struct reader_tally *tally);
/* Into the statistics; the first form under the lock, the second without it. */
void reader_tally_add(reader *r, const struct reader_tally *tally);
void reader_tally_note(reader *r, const struct reader_tally *tally);
void reader_list_put(struct reader_list *list, struct reader_piece *piece);
struct reader_piece *reader_list_take(struct reader_list *list);

/* Sets io_uring up where that was not tried yet. False: it is refused. */
bool reader_ring_start(reader *r);
/* To the ring, after reader_ring_start. False: it takes nothing any more, and the piece and the tally are the caller's still. */
bool reader_ring_push(reader *r, struct reader_piece *piece, const struct reader_tally *tally);
void reader_ring_stop(reader *r);

void *reader_thread_main(void *reader);

/* The aligned read that comes next for the piece: up to its end, or as much as one call takes. */
struct reader_span {
    char *data;
    uint64_t offset;
    size_t bytes;
};
struct reader_span reader_span_next(const struct reader_piece *piece);
/* A direct read of the span gave `got` bytes: notes it. False: it got the piece no further. */
bool reader_span_got(struct reader_piece *piece, const struct reader_span *span, size_t got);
side_status reader_failed(const struct reader_piece *piece, const char *where, int os_errno);

void reader_entry_free(struct reader_entry *entry);

#endif
