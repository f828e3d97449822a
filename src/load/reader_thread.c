/* SPDX-License-Identifier: MIT
 * What the reader's threads do: choose a way for a piece, and read it there. */
#include "reader_private.h"

#include "error.h"

#include <errno.h>
#include <sched.h>

side_status reader_failed(const struct reader_piece *piece, const char *where, int os_errno)
{
    return error_set_errno(SIDE_IO, where, os_errno, "'%.120s': reading %zu bytes at offset %llu failed",
                           piece->entry->path, piece->bytes - piece->filled,
                           (unsigned long long)(piece->offset + piece->filled));
}

static side_status truncated(const struct reader_piece *piece)
{
    return error_set(SIDE_IO, "pread",
                     "'%.120s' ends at byte %llu now, and had %llu: it was truncated while it was read; load it again "
                     "when it is whole",
                     piece->entry->path, (unsigned long long)(piece->offset + piece->filled),
                     (unsigned long long)piece->entry->size);
}

static bool is_cancelled(const reader *r)
{
    return atomic_load_explicit(&r->cancelled, memory_order_relaxed);
}

/* Whether a call that failed so is made again. */
static bool try_again(struct reader_piece *piece, ssize_t result, struct reader_tally *tally)
{
    if (result != -EINTR && (result != -EAGAIN || piece->retries >= READER_RETRIES))
        return false;
    piece->retries += result == -EAGAIN;
    tally->retries++;
    if (result == -EAGAIN)
        sched_yield();
    return true;
}

/* ---------------------------------------------------------------- buffered */

static char *place(const struct reader_piece *piece)
{
    return (char *)piece->buffer + piece->lead + piece->filled;
}

static side_status read_buffered(reader *r, struct reader_piece *piece, struct reader_tally *tally)
{
    struct reader_sum *sum = &tally->sum[READER_PREAD];
    side_status s = SIDE_OK;

    piece->backend = READER_PREAD;
    while (s == SIDE_OK && piece->filled < piece->bytes) {
        if (is_cancelled(r))
            return SIDE_CANCELLED;
        uint64_t began = os_now_ns();
        size_t left = piece->bytes - piece->filled;
        ssize_t got = io_pread(piece->entry->fd, place(piece), left, piece->offset + piece->filled);
        sum->busy_ns += os_now_ns() - began;
        if (got > 0) {
            piece->filled += (size_t)got;
            sum->bytes += (uint64_t)got;
            tally->short_reads += (size_t)got < left;
        } else if (got == 0)
            s = truncated(piece);
        else if (!try_again(piece, got, tally))
            s = reader_failed(piece, "pread", (int)-got);
    }
    return s;
}

/* As much of the piece as the page cache gives, from its beginning. `sure`: it is probably there; else one page is tried first, since the kernel starts reading
 * ahead what a call asked for in vain, and all of that would be read twice. */
static void read_cached(struct reader_piece *piece, bool sure, struct reader_tally *tally)
{
    struct reader_sum *sum = &tally->sum[READER_CACHE];
    struct reader_entry *e = piece->entry;
    uint64_t began = os_now_ns();
    ssize_t got = 1;

    while (got > 0 && piece->filled < piece->bytes) {
        size_t left = piece->bytes - piece->filled;
        uint64_t offset = piece->offset + piece->filled;
        size_t to_page = READER_ALIGN - (size_t)(offset % READER_ALIGN);
        size_t ask = sure || left < to_page ? left : to_page;
        do
            got = io_pread_nowait(e->fd, place(piece), ask, offset);
        while (got < 0 && got != -EAGAIN && try_again(piece, got, tally));
        if (got > 0) {
            piece->filled += (size_t)got;
            sum->bytes += (uint64_t)got;
        }
        sure = true;
    }
    sum->busy_ns += os_now_ns() - began;
    if (got == -EOPNOTSUPP || got == -ENOSYS || got == -EINVAL)
        atomic_store(&e->nowait, false);
    atomic_store_explicit(&e->hot, piece->filled == piece->bytes, memory_order_relaxed);
}

/* ---------------------------------------------------------------- direct */

struct reader_span reader_span_next(const struct reader_piece *piece)
{
    uint64_t first = piece->offset - piece->lead; /* where the buffer begins */
    uint64_t begin = (piece->offset + piece->filled) / READER_ALIGN * READER_ALIGN;
    uint64_t end = (piece->offset + piece->bytes + READER_ALIGN - 1) / READER_ALIGN * READER_ALIGN;

    if (end - begin > IO_READ_MOST)
        end = begin + IO_READ_MOST;
    return (struct reader_span){(char *)piece->buffer + (begin - first), begin, (size_t)(end - begin)};
}

bool reader_span_got(struct reader_piece *piece, const struct reader_span *span, size_t got)
{
    uint64_t at = piece->offset + piece->filled, end = span->offset + got;
    uint64_t last = piece->offset + piece->bytes;

    if (end <= at)
        return false;
    piece->filled = (size_t)((end < last ? end : last) - piece->offset);
    return true;
}

/* Reads that end before the file does, or that are refused after all, are finished through the page cache: that knows of every end. */
static side_status read_direct(reader *r, struct reader_piece *piece, struct reader_tally *tally)
{
    struct reader_sum *sum = &tally->sum[READER_DIRECT];

    piece->backend = READER_DIRECT;
    while (piece->filled < piece->bytes) {
        struct reader_span span = reader_span_next(piece);
        size_t before = piece->filled;
        if (is_cancelled(r))
            return SIDE_CANCELLED;
        uint64_t began = os_now_ns();
        ssize_t got = io_pread_direct(piece->entry->direct_fd, span.data, span.bytes, span.offset);
        sum->busy_ns += os_now_ns() - began;
        if (got >= 0) {
            bool more = reader_span_got(piece, &span, (size_t)got);
            sum->bytes += piece->filled - before;
            tally->short_reads += piece->filled < piece->bytes;
            if (more)
                continue;
            piece->why = READER_WHY_REST;
            return read_buffered(r, piece, tally);
        }
        if (got == -EINVAL || got == -EOPNOTSUPP) {
            atomic_store(&piece->entry->direct, false);
            piece->why = READER_WHY_NO_DIRECT;
            return read_buffered(r, piece, tally);
        }
        if (!try_again(piece, got, tally))
            return reader_failed(piece, "pread", (int)-got);
    }
    return SIDE_OK;
}

/* ---------------------------------------------------------------- choice */

/* Past the cache, or, where that does not go, through it. */
static enum reader_backend choose_direct(reader *r, struct reader_piece *piece)
{
    if (!atomic_load(&piece->entry->direct))
        piece->why = READER_WHY_NO_DIRECT;
    else if (!piece->aligned)
        piece->why = READER_WHY_NO_ROOM;
    else if (reader_ring_start(r))
        return READER_URING;
    else {
        piece->why = READER_WHY_NO_URING;
        return READER_DIRECT;
    }
    return READER_PREAD;
}

/* A hint that costs next to nothing, where pieces before were cached: a vain RWF_NOWAIT read makes the kernel read ahead, in each thread that comes to the end of
 * what is cached. */
static bool edges_cached(const struct reader_piece *piece)
{
    int fd = piece->entry->fd;
    return io_cached(fd, piece->offset, 1) != 0 && io_cached(fd, piece->offset + piece->bytes - 1, 1) != 0;
}

/* AUTO and CACHE: what is in the page cache is read here. READER_CACHE: all of it was. */
static enum reader_backend choose_by_cache(reader *r, struct reader_piece *piece, struct reader_tally *tally)
{
    struct reader_entry *e = piece->entry;
    bool goes_direct = atomic_load(&e->direct) && piece->aligned;
    bool sure = !goes_direct || (atomic_load_explicit(&e->hot, memory_order_relaxed) && edges_cached(piece));

    if (!sure) {
        int64_t cached = io_cached(e->fd, piece->offset, piece->bytes);
        if (cached >= 0 && (uint64_t)cached < (piece->bytes + 1) / 2) {
            piece->why = cached == 0 ? READER_WHY_COLD : READER_WHY_PARTLY;
            return choose_direct(r, piece);
        }
        sure = cached >= 0;
    }
    read_cached(piece, sure, tally);
    if (piece->filled == piece->bytes) {
        piece->why = READER_WHY_CACHED;
        return READER_CACHE;
    }
    piece->why = piece->filled > 0 ? READER_WHY_PARTLY : READER_WHY_COLD;
    if (!atomic_load(&e->nowait)) {
        piece->why = READER_WHY_NO_NOWAIT;
        return READER_PREAD;
    }
    return r->options.backend == READER_CACHE ? READER_PREAD : choose_direct(r, piece);
}

static enum reader_backend choose(reader *r, struct reader_piece *piece, struct reader_tally *tally)
{
    struct reader_entry *e = piece->entry;
    enum reader_backend forced = r->options.backend;

    piece->why = READER_WHY_FORCED;
    if (piece->bytes == 0)
        return READER_CACHE;
    if (forced == READER_PREAD)
        return READER_PREAD;
    if (forced == READER_DIRECT || forced == READER_URING) {
        if (atomic_load(&e->direct) && piece->aligned)
            return forced;
        piece->why = piece->aligned || !atomic_load(&e->direct) ? READER_WHY_NO_DIRECT : READER_WHY_NO_ROOM;
        return READER_PREAD;
    }
    if (e->memory || !atomic_load(&e->nowait)) {
        piece->why = e->memory ? READER_WHY_MEMORY : READER_WHY_NO_NOWAIT;
        return READER_PREAD;
    }
    return choose_by_cache(r, piece, tally);
}

static void piece_read(reader *r, struct reader_piece *piece)
{
    struct reader_tally tally = {.retries = 0};
    side_status s = is_cancelled(r) ? SIDE_CANCELLED : SIDE_OK;

    if (s == SIDE_OK) {
        if (piece->backend == READER_AUTO) { /* else the ring has sent it here */
            piece->read_ns = os_now_ns();
            piece->backend = choose(r, piece, &tally);
        }
        if (piece->backend == READER_URING) {
            if (reader_ring_push(r, piece, &tally))
                return;
            piece->backend = READER_DIRECT;
            piece->why = READER_WHY_NO_URING;
        }
        if (piece->backend == READER_PREAD)
            s = read_buffered(r, piece, &tally);
        else if (piece->backend == READER_DIRECT)
            s = read_direct(r, piece, &tally);
    }
    if (s == SIDE_CANCELLED)
        error_set(s, "reader", "the read was cancelled");
    reader_end(r, piece, s, &tally);
}

void *reader_thread_main(void *arg)
{
    reader *r = arg;

    for (;;) {
        pthread_mutex_lock(&r->mutex);
        while (r->queue.first == NULL && !r->stopping)
            pthread_cond_wait(&r->work, &r->mutex);
        struct reader_piece *piece = reader_list_take(&r->queue);
        if (piece != NULL && ++r->in_flight > r->stats.most_in_flight)
            r->stats.most_in_flight = r->in_flight;
        pthread_mutex_unlock(&r->mutex);
        if (piece == NULL)
            return NULL;
        piece_read(r, piece);
    }
}
