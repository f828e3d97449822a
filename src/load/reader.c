/* SPDX-License-Identifier: MIT
 * The reader's life, its queue, and the ends of pieces. */
#include "reader_private.h"

#include "alloc.h"
#include "error.h"

#include <stdio.h>
#include <string.h>

#define DEFAULT_LEAST_THREADS 4u
#define DEFAULT_MOST_THREADS  16u
#define DEFAULT_DEPTH         64u

static const struct {
    const char *name, *text;
} backends[READER_BACKENDS] = {
#define X(id, name, text) [id] = {name, text},
    READER_BACKEND_MAP(X)
#undef X
};

static const char *const whys[READER_WHYS] = {
#define X(id, text) [id] = text,
    READER_WHY_MAP(X)
#undef X
};

const char *reader_backend_name(enum reader_backend backend)
{
    return backend < READER_BACKENDS ? backends[backend].name : "?";
}

const char *reader_backend_text(enum reader_backend backend)
{
    return backend < READER_BACKENDS ? backends[backend].text : "?";
}

const char *reader_why_text(enum reader_why why)
{
    return why < READER_WHYS ? whys[why] : "?";
}

side_status reader_backend_parse(const char *name, enum reader_backend *backend)
{
    for (int i = 0; i < READER_BACKENDS; i++)
        if (strcmp(backends[i].name, name) == 0) {
            *backend = (enum reader_backend)i;
            return SIDE_OK;
        }
    return error_set(SIDE_INVALID, "reader_backend_parse",
                     "no back-end '%.40s'; there are auto, cache, pread, direct and uring", name);
}

size_t reader_room(size_t bytes)
{
    const size_t more = 2 * (READER_ALIGN - 1);
    return bytes <= SIZE_MAX - more ? (bytes + more) & ~(size_t)(READER_ALIGN - 1) : SIZE_MAX;
}

/* ---------------------------------------------------------------- queue */

void reader_list_put(struct reader_list *list, struct reader_piece *piece)
{
    piece->next = NULL;
    if (list->last != NULL)
        list->last->next = piece;
    else
        list->first = piece;
    list->last = piece;
}

struct reader_piece *reader_list_take(struct reader_list *list)
{
    struct reader_piece *piece = list->first;
    if (piece != NULL) {
        list->first = piece->next;
        if (list->first == NULL)
            list->last = NULL;
    }
    return piece;
}

static side_status piece_check(reader *r, const struct reader_piece *piece, struct reader_entry **entry)
{
    static const char where[] = "reader_submit";
    struct reader_entry *e = NULL;

    pthread_mutex_lock(&r->mutex);
    if (piece->file < r->entry_count)
        e = r->entries[piece->file];
    pthread_mutex_unlock(&r->mutex);
    if (e == NULL)
        return error_set(SIDE_NOT_FOUND, where, "no file %u; reader_file gives the numbers", piece->file);
    if (piece->offset > e->size || piece->bytes > e->size - piece->offset)
        return error_set(SIDE_INVALID, where, "'%.120s': %zu bytes at offset %llu reach past its end at %llu", e->path,
                         piece->bytes, (unsigned long long)piece->offset, (unsigned long long)e->size);
    if (piece->bytes > piece->buffer_bytes)
        return error_set(SIDE_TOO_LARGE, where, "a piece of %zu bytes for a buffer of %zu", piece->bytes,
                         piece->buffer_bytes);
    if (piece->buffer == NULL && piece->bytes > 0)
        return error_set(SIDE_INVALID, where, "the piece's buffer is NULL");
    *entry = e;
    return SIDE_OK;
}

/* Direct reads begin and end at multiples of READER_ALIGN in file and memory, so data lies as far behind one in the buffer as in the file. */
static void piece_place(struct reader_piece *piece, struct reader_entry *e)
{
    size_t lead = (size_t)(piece->offset % READER_ALIGN);

    piece->aligned = atomic_load(&e->direct) && (uintptr_t)piece->buffer % READER_ALIGN == 0 &&
                     reader_room(piece->bytes) != SIZE_MAX &&
                     (lead + piece->bytes + READER_ALIGN - 1) / READER_ALIGN * READER_ALIGN <= piece->buffer_bytes;
    piece->lead = piece->aligned ? lead : 0;
    piece->entry = e;
    piece->filled = 0;
    piece->retries = 0;
    piece->data = NULL;
    piece->status = SIDE_OK;
    piece->backend = READER_AUTO;
    piece->why = READER_WHY_NONE;
    piece->read_ns = 0;
    piece->submitted_ns = os_now_ns();
}

side_status reader_submit(reader *r, struct reader_piece *piece)
{
    struct reader_entry *e;
    side_status s = os_fork_check(r->fork_generation, "reader_submit");

    if (s == SIDE_OK)
        s = piece_check(r, piece, &e);
    if (s != SIDE_OK)
        return s;
    piece_place(piece, e);
    pthread_mutex_lock(&r->mutex);
    reader_list_put(&r->queue, piece);
    r->live++;
    r->stats.submitted++;
    pthread_cond_signal(&r->work);
    pthread_mutex_unlock(&r->mutex);
    return SIDE_OK;
}

void reader_tally_add(reader *r, const struct reader_tally *tally)
{
    for (int i = 0; i < READER_BACKENDS; i++) {
        r->stats.backend[i].bytes += tally->sum[i].bytes;
        r->stats.backend[i].busy_ns += tally->sum[i].busy_ns;
    }
    r->stats.short_reads += tally->short_reads;
    r->stats.retries += tally->retries;
}

void reader_tally_note(reader *r, const struct reader_tally *tally)
{
    pthread_mutex_lock(&r->mutex);
    reader_tally_add(r, tally);
    pthread_mutex_unlock(&r->mutex);
}

void reader_give_back(reader *r, struct reader_piece *piece, const struct reader_tally *tally)
{
    pthread_mutex_lock(&r->mutex);
    reader_tally_add(r, tally);
    r->in_flight--;
    piece->next = r->queue.first;
    r->queue.first = piece;
    if (r->queue.last == NULL)
        r->queue.last = piece;
    pthread_cond_signal(&r->work);
    pthread_mutex_unlock(&r->mutex);
}

void reader_end(reader *r, struct reader_piece *piece, side_status status, const struct reader_tally *tally)
{
    piece->status = status;
    piece->data = status == SIDE_OK ? (char *)piece->buffer + piece->lead : NULL;
    pthread_mutex_lock(&r->mutex);
    reader_tally_add(r, tally);
    r->in_flight--;
    r->stats.done++;
    r->stats.cancelled += status == SIDE_CANCELLED;
    r->stats.failed += status != SIDE_OK && status != SIDE_CANCELLED;
    if (status == SIDE_OK) {
        r->stats.backend[piece->backend].pieces++;
        r->stats.why[piece->why].pieces++;
        r->stats.why[piece->why].bytes += piece->bytes;
    }
    pthread_mutex_unlock(&r->mutex);

    r->options.done(r->options.owner, piece);

    pthread_mutex_lock(&r->mutex);
    if (--r->live == 0)
        pthread_cond_broadcast(&r->idle);
    pthread_mutex_unlock(&r->mutex);
}

/* ---------------------------------------------------------------- life */

static side_status options_check(struct reader_options *o)
{
    static const char where[] = "reader_create";
    /* Three of four cores: with all, what takes slots back and the caller's own threads would wait for one. */
    unsigned threads = os_cores() / os_local_world() * 3 / 4;

    if (o->done == NULL)
        return error_set(SIDE_INVALID, where, "options.done is NULL; it is called with each piece that is read");
    if ((unsigned)o->backend >= READER_BACKENDS)
        return error_set(SIDE_INVALID, where, "options.backend is %d; take one of enum reader_backend", (int)o->backend);
    if (o->threads > READER_MOST_THREADS)
        return error_set(SIDE_INVALID, where, "options.threads is %u; at most %u", o->threads, READER_MOST_THREADS);
    if (o->depth > READER_MOST_DEPTH)
        return error_set(SIDE_INVALID, where, "options.depth is %u; at most %u", o->depth, READER_MOST_DEPTH);
    if (o->threads == 0)
        o->threads = threads < DEFAULT_LEAST_THREADS  ? DEFAULT_LEAST_THREADS
                     : threads > DEFAULT_MOST_THREADS ? DEFAULT_MOST_THREADS
                                                      : threads;
    if (o->depth == 0)
        o->depth = DEFAULT_DEPTH;
    return SIDE_OK;
}

/* No thread is left. */
static void reader_free(reader *r)
{
    for (uint32_t i = 0; i < r->entry_count; i++)
        reader_entry_free(r->entries[i]);
    mem_free(r->entries);
    pthread_cond_destroy(&r->idle);
    pthread_cond_destroy(&r->work);
    pthread_mutex_destroy(&r->ring_setup);
    pthread_mutex_destroy(&r->mutex);
    mem_free(r);
}

static void threads_end(reader *r)
{
    pthread_mutex_lock(&r->mutex);
    r->stopping = true;
    pthread_cond_broadcast(&r->work);
    pthread_mutex_unlock(&r->mutex);
    while (r->thread_count > 0)
        pthread_join(r->threads[--r->thread_count], NULL);
    reader_ring_stop(r);
}

side_status reader_create(const struct reader_options *options, reader **out)
{
    struct reader_options o = *options;
    side_status s = options_check(&o);
    reader *r = s == SIDE_OK ? mem_zalloc(1, sizeof(*r)) : NULL;

    if (r == NULL)
        return s != SIDE_OK ? s : SIDE_NO_MEMORY;
    r->options = o;
    r->fork_generation = os_fork_generation();
    r->stats.threads = o.threads;
    r->stats.depth = o.depth;
    pthread_mutex_init(&r->mutex, NULL);
    pthread_mutex_init(&r->ring_setup, NULL);
    pthread_cond_init(&r->work, NULL);
    os_cond_init(&r->idle);
    snprintf(r->stats.uring, sizeof(r->stats.uring), "not needed so far");
    while (s == SIDE_OK && r->thread_count < o.threads) {
        s = os_thread_create(&r->threads[r->thread_count], "side-read", reader_thread_main, r);
        r->thread_count += s == SIDE_OK;
    }
    if (s == SIDE_OK && o.backend == READER_URING && !reader_ring_start(r))
        s = error_set(SIDE_UNSUPPORTED, "reader_create", "io_uring was asked for and is %s; take 'auto'",
                      r->stats.uring);
    if (s != SIDE_OK) {
        threads_end(r);
        reader_free(r);
        return s;
    }
    *out = r;
    return SIDE_OK;
}

void reader_cancel(reader *r)
{
    atomic_store(&r->cancelled, true);
}

side_status reader_drain(reader *r, uint64_t deadline_ns)
{
    side_status s = os_fork_check(r->fork_generation, "reader_drain");
    bool in_time = true;

    if (s != SIDE_OK)
        return s;
    pthread_mutex_lock(&r->mutex);
    while (r->live > 0 && in_time) {
        if (deadline_ns == UINT64_MAX)
            pthread_cond_wait(&r->idle, &r->mutex);
        else
            in_time = os_cond_wait_until(&r->idle, &r->mutex, deadline_ns);
    }
    uint64_t live = r->live;
    pthread_mutex_unlock(&r->mutex);
    if (live == 0)
        return SIDE_OK;
    return error_set(SIDE_STUCK, "reader_drain",
                     "%llu reads did not end in time; does the file system answer? Their buffers are kept",
                     (unsigned long long)live);
}

side_status reader_destroy(reader *r, double wait_s)
{
    uint64_t deadline;
    side_status s;

    if (r == NULL || os_fork_generation() != r->fork_generation)
        return SIDE_OK;
    s = os_deadline(wait_s, "reader_destroy", &deadline);
    if (s != SIDE_OK)
        return s;
    reader_cancel(r);
    s = reader_drain(r, deadline);
    if (s != SIDE_OK)
        return s;
    threads_end(r);
    reader_free(r);
    return SIDE_OK;
}

void reader_get_stats(reader *r, struct reader_stats *stats)
{
    pthread_mutex_lock(&r->mutex);
    *stats = r->stats;
    pthread_mutex_unlock(&r->mutex);
}
