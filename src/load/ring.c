/* SPDX-License-Identifier: MIT */
#include "ring.h"

#include "io.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define SETUP_CLAMP         (1u << 4)
#define FEATURE_SINGLE_MMAP (1u << 0) /* Linux 5.4 */
#define ENTER_GETEVENTS     (1u << 0)
#define MMAP_RINGS          0
#define MMAP_SQES           0x10000000
#define PROBE_OPS           32u
#define PROBE_SUPPORTED     1u

struct params {
    uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, reserved[3];
    struct {
        uint32_t head, tail, mask, entries, flags, dropped, array, reserved;
        uint64_t address;
    } sq;
    struct {
        uint32_t head, tail, mask, entries, overflow, cqes, flags, reserved;
        uint64_t address;
    } cq;
};
_Static_assert(sizeof(struct params) == 120, "the kernel's struct io_uring_params");
_Static_assert(sizeof(struct ring_sqe) == 64 && sizeof(struct ring_cqe) == 16, "the kernel's entries");

/* The kernel is the other side of these indices. */
static uint32_t load(const uint32_t *index)
{
    return __atomic_load_n(index, __ATOMIC_ACQUIRE);
}

static void store(uint32_t *index, uint32_t value)
{
    __atomic_store_n(index, value, __ATOMIC_RELEASE);
}

static int ring_map(struct ring *ring, const struct params *p)
{
    size_t sq_bytes = p->sq.array + p->sq_entries * sizeof(uint32_t);
    size_t cq_bytes = p->cq.cqes + p->cq_entries * sizeof(struct ring_cqe);

    ring->rings_bytes = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
    ring->sqes_bytes = p->sq_entries * sizeof(struct ring_sqe);
    ring->entries = p->sq_entries;
    void *rings = mmap(NULL, ring->rings_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring->fd, MMAP_RINGS);
    if (rings == MAP_FAILED)
        return -errno;
    ring->rings = rings;
    void *sqes = mmap(NULL, ring->sqes_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring->fd, MMAP_SQES);
    if (sqes == MAP_FAILED)
        return -errno;
    ring->sqes = sqes;
    /* A child of a fork must not share the queues. */
    madvise(rings, ring->rings_bytes, MADV_DONTFORK);
    madvise(sqes, ring->sqes_bytes, MADV_DONTFORK);

    char *base = rings;
    ring->sq_head = (uint32_t *)(void *)(base + p->sq.head);
    ring->sq_tail = (uint32_t *)(void *)(base + p->sq.tail);
    ring->sq_array = (uint32_t *)(void *)(base + p->sq.array);
    ring->sq_mask = *(uint32_t *)(void *)(base + p->sq.mask);
    ring->cq_head = (uint32_t *)(void *)(base + p->cq.head);
    ring->cq_tail = (uint32_t *)(void *)(base + p->cq.tail);
    ring->cq_mask = *(uint32_t *)(void *)(base + p->cq.mask);
    ring->cqes = (struct ring_cqe *)(void *)(base + p->cq.cqes);
    return 0;
}

static int ring_knows(struct ring *ring)
{
    struct {
        uint8_t last_op, count;
        uint16_t reserved;
        uint32_t reserved2[3];
        struct {
            uint8_t op, reserved;
            uint16_t flags;
            uint32_t reserved2;
        } ops[PROBE_OPS];
    } probe;

    memset(&probe, 0, sizeof(probe));
    int r = io_ring_register(ring->fd, RING_PROBE, &probe, PROBE_OPS);
    if (r < 0)
        return r;
    return (probe.ops[RING_READ].flags & probe.ops[RING_READ_FIXED].flags & PROBE_SUPPORTED) != 0 ? 0 : -EOPNOTSUPP;
}

static int ring_try(struct ring *ring)
{
    struct ring_sqe *sqe = ring_next(ring);
    struct ring_cqe cqe;
    int r, tries = 100;

    sqe->opcode = RING_NOP;
    do
        r = ring_enter(ring, 1);
    while (r == -EINTR || (r == 0 && ring_unsubmitted(ring) > 0 && --tries > 0));
    if (r != 0)
        return r;
    return ring_reap(ring, &cqe) ? cqe.result : -EIO;
}

int ring_open(struct ring *ring, uint32_t entries, const char **what)
{
    struct params p;
    int r;

    memset(&p, 0, sizeof(p));
    p.flags = SETUP_CLAMP;
    *ring = (struct ring){.fd = -1};
    *what = "io_uring_setup";
    r = io_ring_setup(entries, &p);
    if (r < 0)
        return r;
    ring->fd = r;
    *what = "io_uring of before Linux 5.6";
    r = (p.features & FEATURE_SINGLE_MMAP) != 0 ? 0 : -EOPNOTSUPP;
    if (r == 0) {
        *what = "io_uring's memory";
        r = ring_map(ring, &p);
    }
    if (r == 0) {
        *what = "io_uring's reads";
        r = ring_knows(ring);
    }
    if (r == 0) {
        *what = "io_uring_enter";
        r = ring_try(ring);
    }
    if (r != 0)
        ring_close(ring);
    return r;
}

void ring_close(struct ring *ring)
{
    if (ring->sqes != NULL)
        munmap(ring->sqes, ring->sqes_bytes);
    if (ring->rings != NULL)
        munmap(ring->rings, ring->rings_bytes);
    if (ring->fd >= 0)
        close(ring->fd);
    *ring = (struct ring){.fd = -1};
}

int ring_table(struct ring *ring, uint32_t count)
{
    const struct ring_table_make make = {.count = count, .flags = RING_TABLE_SPARSE};
    int r = io_ring_register(ring->fd, RING_TABLE, &make, sizeof(make));
    return r < 0 ? r : 0;
}

int ring_table_set(struct ring *ring, uint32_t first, const struct iovec *buffers, uint32_t count)
{
    const struct ring_table_update update = {.first = first, .data = (uintptr_t)buffers, .count = count};
    int r = io_ring_register(ring->fd, RING_TABLE_UPDATE, &update, sizeof(update));
    return r < 0 ? r : r == (int)count ? 0 : -ENOMEM;
}

int ring_register(struct ring *ring, const struct iovec *buffers, uint32_t count)
{
    int r = io_ring_register(ring->fd, RING_BUFFERS, buffers, count);
    return r < 0 ? r : 0;
}

struct ring_sqe *ring_next(struct ring *ring)
{
    uint32_t tail = *ring->sq_tail;

    if (tail - load(ring->sq_head) >= ring->entries)
        return NULL;
    struct ring_sqe *sqe = &ring->sqes[tail & ring->sq_mask];
    memset(sqe, 0, sizeof(*sqe));
    ring->sq_array[tail & ring->sq_mask] = tail & ring->sq_mask;
    /* The kernel looks at the queue in ring_enter alone, on this thread: the caller may still fill the entry. */
    store(ring->sq_tail, tail + 1);
    return sqe;
}

uint32_t ring_unsubmitted(const struct ring *ring)
{
    return *ring->sq_tail - load(ring->sq_head);
}

uint64_t ring_take_back(struct ring *ring)
{
    uint32_t tail = *ring->sq_tail - 1;

    store(ring->sq_tail, tail);
    return ring->sqes[tail & ring->sq_mask].user;
}

int ring_enter(struct ring *ring, uint32_t wait)
{
    int r = io_ring_enter(ring->fd, ring_unsubmitted(ring), wait, ENTER_GETEVENTS);
    return r < 0 ? r : 0;
}

bool ring_reap(struct ring *ring, struct ring_cqe *out)
{
    uint32_t head = *ring->cq_head;

    if (head == load(ring->cq_tail))
        return false;
    *out = ring->cqes[head & ring->cq_mask];
    store(ring->cq_head, head + 1);
    return true;
}
