/* SPDX-License-Identifier: MIT
 * io_uring by its system calls: as much of it as reading files takes. One thread owns a ring, but for the one that opens it.
 * Own declarations, since headers of the build machine may be older than the kernel that runs; test_ring compares them. */
#ifndef LOAD_RING_H
#define LOAD_RING_H

#include "sidestream.h"

#include <sys/uio.h>

enum ring_op { RING_NOP = 0, RING_READ_FIXED = 4, RING_READ = 22 };
enum ring_what { RING_BUFFERS = 0, RING_PROBE = 8, RING_TABLE = 15, RING_TABLE_UPDATE = 16 };
#define RING_TABLE_SPARSE 1u

struct ring_sqe {
    uint8_t opcode, flags;
    uint16_t priority;
    int32_t fd;
    uint64_t offset, address;
    uint32_t bytes, rw_flags;
    uint64_t user;
    uint16_t buffer, personality;
    int32_t splice_fd;
    uint64_t unused[2];
};

struct ring_table_make {
    uint32_t count, flags;
    uint64_t reserved, data, tags;
};

struct ring_table_update {
    uint32_t first, reserved;
    uint64_t data, tags;
    uint32_t count, reserved2;
};

struct ring_cqe {
    uint64_t user;
    int32_t result;
    uint32_t flags;
};

struct ring {
    int fd;
    void *rings; /* submission and completion indices, and completions */
    size_t rings_bytes;
    struct ring_sqe *sqes;
    size_t sqes_bytes;
    uint32_t entries;
    uint32_t *sq_head, *sq_tail, *sq_array, sq_mask;
    uint32_t *cq_head, *cq_tail, cq_mask;
    struct ring_cqe *cqes;
};

/* 0, or a negative errno and, in *what, the call or feature that is refused (static storage). After one round trip, so that filters which let
 * io_uring_setup pass but not io_uring_enter are found out. */
int ring_open(struct ring *ring, uint32_t entries, const char **what);
/* Nothing is in flight. */
void ring_close(struct ring *ring);
/* Of fixed buffers. 0, or a negative errno: then reads are made without. Any thread, one at a time.
 * A table of `count` that are not there yet (Linux 5.19), */
int ring_table(struct ring *ring, uint32_t count);
/* and those from `first` on. */
int ring_table_set(struct ring *ring, uint32_t first, const struct iovec *buffers, uint32_t count);
/* Or all that there will be. */
int ring_register(struct ring *ring, const struct iovec *buffers, uint32_t count);
/* The next submission, zeroed; NULL: the queue is full. It goes with the next ring_enter. */
struct ring_sqe *ring_next(struct ring *ring);
uint32_t ring_unsubmitted(const struct ring *ring);
/* Takes back the newest submission that the kernel has not seen, and returns its user. */
uint64_t ring_take_back(struct ring *ring);
/* Submits, and waits for `wait` completions. 0 or a negative errno. */
int ring_enter(struct ring *ring, uint32_t wait);
/* False: none is there. */
bool ring_reap(struct ring *ring, struct ring_cqe *out);

#endif
