/* SPDX-License-Identifier: MIT
 * The reader's io_uring: one thread that submits direct reads and hears of their ends. It sleeps in the kernel until a read is done or a piece was pushed: pushes
 * write to an eventfd, of which the ring always has a read in flight. */
#include "reader_private.h"

#include "alloc.h"
#include "error.h"
#include "ring.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define REGISTER_MOST ((size_t)1 << 30) /* the kernel's limit of one registered buffer */
#define ENTER_RETRIES 1000u             /* a millisecond each, while the kernel has no memory for requests */
#define WAKE          0u                /* user of the eventfd's read; pieces are pointers */

struct reader_ring {
    reader *reader;
    struct ring ring;
    bool table;               /* buffers may be added */
    atomic_uint buffer_count; /* of the reader's: registered */
    pthread_t thread;
    int wake_fd;

    /* Guarded by reader.mutex. */
    struct reader_list cold;
    bool broken; /* takes nothing any more */

    /* The thread's. */
    uint64_t wake_value;
    bool wake_armed;
    int wake_code; /* < 0: the ring cannot be woken any more */
    uint32_t in_flight;
    uint32_t refusals; /* of ring_enter, in a row */
    uint64_t busy_since;
    uint64_t busy_ns; /* not yet in a tally */
};

/* ---------------------------------------------------------------- set up */

/* Those of the reader's buffers that the kernel does not have. Under ring_setup. */
static void buffers_register(struct reader_ring *rr, char *text, size_t text_bytes)
{
    reader *r = rr->reader;
    const uint32_t have = atomic_load(&rr->buffer_count), more = r->buffer_count - have;
    int code = 0;

    if (more > 0 && rr->table)
        code = ring_table_set(&rr->ring, have, &r->buffers[have], more);
    else if (more > 0 && have == 0)
        code = ring_register(&rr->ring, r->buffers, more);
    else if (more > 0)
        code = -EBUSY;
    if (code == 0)
        atomic_store(&rr->buffer_count, r->buffer_count);
    else
        rr->table = false;
    const uint32_t n = atomic_load(&rr->buffer_count);
    if (code == 0)
        snprintf(text, text_bytes, "ready, %u buffer%s registered", n, n == 1 ? "" : "s");
    else
        snprintf(text, text_bytes, "ready, %u of %u buffers registered: %s%s", n, r->buffer_count, strerror(-code),
                 code == -ENOMEM ? " (ulimit -l is too low)" : "");
}

void reader_region(reader *r, void *base, size_t bytes)
{
    char text[sizeof(r->stats.uring)];

    pthread_mutex_lock(&r->ring_setup);
    for (size_t at = 0; at < bytes && r->buffer_count < READER_BUFFERS; at += REGISTER_MOST)
        r->buffers[r->buffer_count++] = (struct iovec){(char *)base + at,
                                                       bytes - at < REGISTER_MOST ? bytes - at : REGISTER_MOST};
    if (r->ring != NULL && r->ring->table) {
        buffers_register(r->ring, text, sizeof(text));
        pthread_mutex_lock(&r->mutex);
        if (!r->ring->broken)
            memcpy(r->stats.uring, text, sizeof(text));
        pthread_mutex_unlock(&r->mutex);
    }
    pthread_mutex_unlock(&r->ring_setup);
}

static void ring_free(struct reader_ring *rr)
{
    if (rr->wake_fd >= 0)
        close(rr->wake_fd);
    mem_free(rr);
}

static void *ring_main(void *arg);

/* NULL, and why in text. */
static struct reader_ring *ring_make(reader *r, char *text, size_t text_bytes)
{
    struct reader_ring *rr = mem_zalloc(1, sizeof(*rr));
    const char *what;

    if (rr == NULL) {
        snprintf(text, text_bytes, "refused: out of memory");
        return NULL;
    }
    rr->reader = r;
    rr->wake_fd = eventfd(0, EFD_CLOEXEC);
    if (rr->wake_fd < 0) {
        snprintf(text, text_bytes, "refused: no descriptor");
        ring_free(rr);
        return NULL;
    }
    int code = ring_open(&rr->ring, r->options.depth + 1, &what);
    if (code != 0) {
        snprintf(text, text_bytes, "refused: %s: %s%s", what, strerror(-code),
                 code == -EPERM ? " (a container's filter, or /proc/sys/kernel/io_uring_disabled)" : "");
        ring_free(rr);
        return NULL;
    }
    rr->table = ring_table(&rr->ring, READER_BUFFERS) == 0;
    buffers_register(rr, text, text_bytes);
    if (os_thread_create(&rr->thread, "side-ring", ring_main, rr) != SIDE_OK) {
        snprintf(text, text_bytes, "refused: no thread");
        ring_close(&rr->ring);
        ring_free(rr);
        return NULL;
    }
    return rr;
}

bool reader_ring_start(reader *r)
{
    char text[sizeof(r->stats.uring)];
    struct reader_ring *rr;

    if (!atomic_load(&r->ring_tried)) {
        pthread_mutex_lock(&r->ring_setup);
        if (!atomic_load(&r->ring_tried)) {
            rr = ring_make(r, text, sizeof(text));
            pthread_mutex_lock(&r->mutex);
            memcpy(r->stats.uring, text, sizeof(text));
            r->ring = rr;
            pthread_mutex_unlock(&r->mutex);
            atomic_store(&r->ring_tried, true);
        }
        pthread_mutex_unlock(&r->ring_setup);
    }
    return r->ring != NULL;
}

/* ---------------------------------------------------------------- from other threads */

static void ring_wake(struct reader_ring *rr)
{
    uint64_t one = 1;
    ssize_t n;
    do
        n = write(rr->wake_fd, &one, sizeof(one));
    while (n < 0 && errno == EINTR);
}

bool reader_ring_push(reader *r, struct reader_piece *piece, const struct reader_tally *tally)
{
    struct reader_ring *rr = r->ring;

    pthread_mutex_lock(&r->mutex);
    bool taken = !rr->broken;
    if (taken) {
        reader_tally_add(r, tally);
        r->in_flight--;
        reader_list_put(&rr->cold, piece);
    }
    pthread_mutex_unlock(&r->mutex);
    if (taken)
        ring_wake(rr);
    return taken;
}

/* Nothing is live, and r->stopping is set. */
void reader_ring_stop(reader *r)
{
    struct reader_ring *rr = r->ring;

    if (rr == NULL)
        return;
    ring_wake(rr);
    pthread_join(rr->thread, NULL);
    ring_close(&rr->ring);
    ring_free(rr);
    r->ring = NULL;
}

/* ---------------------------------------------------------------- its thread */

/* The piece leaves the ring: what the ring was busy so far goes into its tally. */
static void ring_leave(struct reader_ring *rr, struct reader_tally *tally)
{
    uint64_t now = os_now_ns();

    if (--rr->in_flight == 0)
        rr->busy_ns += now - rr->busy_since;
    tally->sum[READER_URING].busy_ns += rr->busy_ns;
    rr->busy_ns = 0;
}

static int buffer_of(const struct reader_ring *rr, const struct reader_span *span)
{
    const struct iovec *buffers = rr->reader->buffers;
    const uint32_t count = atomic_load_explicit(&rr->buffer_count, memory_order_acquire);

    for (uint32_t i = 0; i < count; i++) {
        const char *base = buffers[i].iov_base;
        if (span->data >= base && span->data + span->bytes <= base + buffers[i].iov_len)
            return (int)i;
    }
    return -1;
}

/* The caller has seen that there is room. */
static void read_put(struct reader_ring *rr, struct reader_piece *piece)
{
    struct reader_span span = reader_span_next(piece);
    struct ring_sqe *sqe = ring_next(&rr->ring);
    int buffer = buffer_of(rr, &span);

    sqe->opcode = buffer >= 0 ? RING_READ_FIXED : RING_READ;
    sqe->fd = piece->entry->direct_fd;
    sqe->offset = span.offset;
    sqe->address = (uintptr_t)span.data;
    sqe->bytes = (uint32_t)span.bytes;
    sqe->buffer = buffer >= 0 ? (uint16_t)buffer : 0;
    sqe->user = (uintptr_t)piece;
    piece->backend = READER_URING;
}

static void wake_put(struct reader_ring *rr)
{
    struct ring_sqe *sqe = ring_next(&rr->ring);

    sqe->opcode = RING_READ;
    sqe->fd = rr->wake_fd;
    sqe->address = (uintptr_t)&rr->wake_value;
    sqe->bytes = sizeof(rr->wake_value);
    sqe->user = WAKE;
    rr->wake_armed = true;
}

/* Waiting pieces, as far as depth goes; they count as in flight. Returns whether the reader is at its end. */
static bool cold_take(struct reader_ring *rr, struct reader_list *take)
{
    reader *r = rr->reader;
    struct reader_piece *piece;

    pthread_mutex_lock(&r->mutex);
    while (rr->in_flight < r->options.depth && (piece = reader_list_take(&rr->cold)) != NULL) {
        reader_list_put(take, piece);
        if (rr->in_flight++ == 0)
            rr->busy_since = os_now_ns();
        if (++r->in_flight > r->stats.most_in_flight)
            r->stats.most_in_flight = r->in_flight;
    }
    bool stopping = r->stopping;
    pthread_mutex_unlock(&r->mutex);
    return stopping;
}

/* Fills the queue. Pieces that are cancelled make room for more, so it looks again until it found none: nobody wakes the ring for those. False: the reader is at
 * its end. */
static bool ring_fill(struct reader_ring *rr)
{
    struct reader_list take = {NULL, NULL};
    bool stopping = cold_take(rr, &take);

    while (take.first != NULL) {
        struct reader_piece *piece = reader_list_take(&take);
        if (!atomic_load(&rr->reader->cancelled))
            read_put(rr, piece);
        else {
            struct reader_tally tally = {.retries = 0};
            ring_leave(rr, &tally);
            reader_end(rr->reader, piece, error_set(SIDE_CANCELLED, "reader", "the read was cancelled"), &tally);
        }
        if (take.first == NULL)
            stopping = cold_take(rr, &take);
    }
    if (!rr->wake_armed && !stopping)
        wake_put(rr);
    return !stopping || rr->in_flight > 0 || rr->wake_armed;
}

static void to_threads(struct reader_ring *rr, struct reader_piece *piece, enum reader_backend how, enum reader_why why,
                       struct reader_tally *tally)
{
    piece->backend = how;
    piece->why = why;
    ring_leave(rr, tally);
    reader_give_back(rr->reader, piece, tally);
}

static void piece_over(struct reader_ring *rr, struct reader_piece *piece, side_status s, struct reader_tally *tally)
{
    ring_leave(rr, tally);
    reader_end(rr->reader, piece, s, tally);
}

/* A read of the piece ended with `result`. */
static void read_ended(struct reader_ring *rr, struct reader_piece *piece, int result)
{
    struct reader_tally tally = {.retries = 0};
    struct reader_span span = reader_span_next(piece); /* as it was when it was submitted */
    size_t before = piece->filled;
    bool further = true;

    if (result >= 0) {
        further = reader_span_got(piece, &span, (size_t)result);
        tally.sum[READER_URING].bytes += piece->filled - before;
        tally.short_reads += piece->filled < piece->bytes;
        if (piece->filled == piece->bytes) {
            piece_over(rr, piece, SIDE_OK, &tally);
            return;
        }
    } else if (result == -EINTR || result == -EAGAIN) {
        further = piece->retries++ < READER_RETRIES;
        tally.retries++;
    } else if (result == -EINVAL || result == -EOPNOTSUPP) {
        atomic_store(&piece->entry->direct, false);
        to_threads(rr, piece, READER_PREAD, READER_WHY_NO_DIRECT, &tally);
        return;
    } else {
        piece_over(rr, piece, reader_failed(piece, "io_uring read", -result), &tally);
        return;
    }

    if (atomic_load(&rr->reader->cancelled))
        piece_over(rr, piece, error_set(SIDE_CANCELLED, "reader", "the read was cancelled"), &tally);
    else if (!further)
        to_threads(rr, piece, READER_PREAD, READER_WHY_REST, &tally);
    else {
        reader_tally_note(rr->reader, &tally);
        read_put(rr, piece);
    }
}

static bool ring_reap_all(struct reader_ring *rr)
{
    struct ring_cqe cqe;
    bool any = false;

    while (ring_reap(&rr->ring, &cqe)) {
        any = true;
        if (cqe.user == WAKE) {
            size_t woken = 0;
            int code = io_script(IO_RING_WAKE, rr->wake_fd, 0, &woken);
            rr->wake_armed = false;
            code = code != 0 ? code : cqe.result;
            if (code < 0 && code != -EINTR && code != -EAGAIN)
                rr->wake_code = code;
            continue;
        }
        struct reader_piece *piece = (struct reader_piece *)(uintptr_t)cqe.user;
        size_t told = cqe.result > 0 ? (size_t)cqe.result : 0;
        int scripted = io_script(IO_RING_READ, piece->entry->direct_fd, piece->offset + piece->filled, &told);
        read_ended(rr, piece, scripted != 0 ? scripted : cqe.result > 0 ? (int)told : cqe.result);
    }
    return any;
}

/* The kernel takes no submissions any more. What it has not seen and what waits goes to the threads; of what it has, the ends are waited for, since it writes into
 * buffers until then. */
static void ring_give_up(struct reader_ring *rr, const char *what, int code)
{
    reader *r = rr->reader;
    struct reader_tally none = {.retries = 0};
    struct reader_piece *piece;

    pthread_mutex_lock(&r->mutex);
    rr->broken = true;
    snprintf(r->stats.uring, sizeof(r->stats.uring), "given up: %s: %s", what, strerror(-code));
    struct reader_list cold = rr->cold;
    rr->cold = (struct reader_list){NULL, NULL};
    for (piece = cold.first; piece != NULL; piece = piece->next)
        r->in_flight++; /* as give_back takes it */
    pthread_mutex_unlock(&r->mutex);

    while (ring_unsubmitted(&rr->ring) > 0) {
        uint64_t user = ring_take_back(&rr->ring);
        if (user == WAKE)
            rr->wake_armed = false;
        else
            to_threads(rr, (struct reader_piece *)(uintptr_t)user, READER_DIRECT, READER_WHY_NO_URING, &none);
        none = (struct reader_tally){.retries = 0};
    }
    while ((piece = reader_list_take(&cold)) != NULL) {
        piece->backend = READER_DIRECT;
        piece->why = READER_WHY_NO_URING;
        reader_give_back(r, piece, &none);
    }
    ring_wake(rr);
}

/* Ends are heard of without system calls: the kernel writes them into the queue, at the latest when this thread sleeps. */
static void ring_wait_out(struct reader_ring *rr)
{
    while (rr->in_flight > 0 || rr->wake_armed) {
        if (!ring_reap_all(rr))
            os_sleep_ns(1000000);
        while (ring_unsubmitted(&rr->ring) > 0) { /* continued reads */
            struct reader_tally none = {.retries = 0};
            struct reader_piece *piece = (struct reader_piece *)(uintptr_t)ring_take_back(&rr->ring);
            to_threads(rr, piece, READER_DIRECT, READER_WHY_NO_URING, &none);
        }
    }
}

static void *ring_main(void *arg)
{
    struct reader_ring *rr = arg;

    while (ring_fill(rr)) {
        int code = ring_enter(&rr->ring, 1);
        bool any = ring_reap_all(rr);
        if (rr->wake_code < 0) {
            ring_give_up(rr, "read of an eventfd", rr->wake_code);
            break;
        }
        if (code == 0 || any)
            rr->refusals = 0;
        else if (code != -EINTR && (++rr->refusals > ENTER_RETRIES || (code != -EAGAIN && code != -EBUSY))) {
            ring_give_up(rr, "io_uring_enter", code);
            break;
        } else if (code != -EINTR)
            os_sleep_ns(1000000);
    }
    ring_wait_out(rr);
    return NULL;
}
