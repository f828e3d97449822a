/* SPDX-License-Identifier: MIT
 *
 * Pieces on their way. A slot is pinned memory for one piece, input and then result: its copy back comes after its copy in by the streams' order.
 *
 * Threads: the driver (who called run) queues all that the device does, and takes results back; the reader's threads fill slots; writers empty them, and ask for the next
 * piece's reads; `sync` writes the journal. A slot belongs to whom its state says; states, lists and counts are under `mutex`, all else is outside of it.
 * Whoever meets a failure says so (fail); the others then end by themselves. */
#include "cast_private.h"

#include "alloc.h"
#include "error.h"
#include "io.h"
#include "os.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define LOOK_NS  20000u    /* between two looks at the device */
#define SLICE_NS 20000000u /* between two looks at cancel */
#define SYNC_NS  2000000000u

static const char where[] = "side_cast_run";

enum { READING, READ, DEVICE, WRITING, STATES };

struct mover;

struct slot {
    struct mover *mover;
    unsigned char *data;
    size_t piece; /* number */
    int state;
    uint32_t left; /* extents that are still read */
    bool cached;   /* all of them came from memory */
    struct slot *next;
    struct reader_piece reads[CAST_EXTENTS];
};

struct list {
    struct slot *first, **last;
};

/* On the device: one item. */
struct stage {
    void *in, *out;
    side_event *copied, *cast, *back;
    struct slot *slot; /* NULL: free */
};

struct mover {
    side_cast *cast;
    side_device *device;
    bool simulated;
    double timeout_s;

    side_pool *pool;
    unsigned char *memory;
    struct slot *slots;
    uint32_t slot_count;
    uint32_t *numbers; /* of files, with the reader */
    reader *reader;

    /* The driver's. */
    side_stream *in, *compute, *out;
    struct stage stages[CAST_STAGES];
    uint64_t queued, returned; /* items */
    uint64_t waits_ns;         /* since when the oldest is waited for */

    pthread_mutex_t mutex;
    pthread_cond_t changed; /* for the driver */
    pthread_cond_t work;    /* for writers */
    pthread_cond_t due;     /* for sync */
    struct list read, to_write;
    size_t next_piece;
    size_t left; /* pieces that are not written */
    bool stop, failed;
    side_error error;
    uint64_t unsynced, bytes_done, read_bytes, cached_bytes;
    uint32_t count[STATES]; /* slots in each */
    uint64_t area[STATES];  /* slots x ns */
    uint64_t stamp_ns;
    double sync_busy_s;

    pthread_t writers[CAST_THREADS_MOST], sync;
    uint32_t writer_count;
    bool syncing;
};

/* ---------------------------------------------------------------- states. All locked */

static void list_put(struct list *list, struct slot *s)
{
    s->next = NULL;
    *list->last = s;
    list->last = &s->next;
}

static struct slot *list_take(struct list *list)
{
    struct slot *s = list->first;

    if (s != NULL) {
        list->first = s->next;
        if (list->first == NULL)
            list->last = &list->first;
    }
    return s;
}

/* to STATES: free. */
static void move_to(struct slot *s, int to)
{
    struct mover *m = s->mover;
    const uint64_t now = os_now_ns();

    for (int i = 0; i < STATES; i++)
        m->area[i] += m->count[i] * (now - m->stamp_ns);
    m->stamp_ns = now;
    if (s->state < STATES)
        m->count[s->state]--;
    if (to < STATES)
        m->count[to]++;
    s->state = to;
}

/* The first cause, of the calling thread; the others end. */
static void fail(struct mover *m)
{
    pthread_mutex_lock(&m->mutex);
    if (!m->failed)
        error_copy(&m->error);
    m->failed = m->stop = true;
    pthread_cond_signal(&m->changed);
    pthread_cond_broadcast(&m->work);
    pthread_cond_signal(&m->due);
    pthread_mutex_unlock(&m->mutex);
}

/* ---------------------------------------------------------------- reading */

static const struct cast_piece *piece_of(const struct slot *s)
{
    return &s->mover->cast->plan.pieces[s->piece];
}

/* The next piece that is not done, into this slot; false: there is none. Not locked: the slot is the caller's. */
static bool refill(struct slot *s)
{
    struct mover *m = s->mover;
    const struct cast_plan *plan = &m->cast->plan;
    const struct cast_piece *p;
    unsigned char *at = s->data;

    pthread_mutex_lock(&m->mutex);
    while (m->next_piece < plan->piece_count && m->cast->done[m->next_piece])
        m->next_piece++;
    if (m->stop || m->next_piece == plan->piece_count) {
        move_to(s, STATES);
        pthread_mutex_unlock(&m->mutex);
        return false;
    }
    s->piece = m->next_piece++;
    p = piece_of(s);
    s->left = p->count;
    s->cached = true;
    move_to(s, READING);
    pthread_mutex_unlock(&m->mutex);
    for (uint32_t i = 0; i < p->count; i++) { /* at the last one the slot may be gone to the next */
        const struct cast_extent *e = &plan->extents[p->first + i];
        struct reader_piece *r = &s->reads[i];
        const size_t room = reader_room(e->bytes);
        memset(r, 0, sizeof(*r));
        r->file = m->numbers[p->file];
        r->offset = e->offset;
        r->bytes = e->bytes;
        r->buffer = at;
        r->buffer_bytes = room;
        r->user = s;
        at += room;
    }
    for (uint32_t i = 0, n = p->count; i < n; i++)
        if (reader_submit(m->reader, &s->reads[i]) != SIDE_OK) {
            fail(m);
            return false;
        }
    return true;
}

static void read_done(void *owner, struct reader_piece *r)
{
    struct mover *m = owner;
    struct slot *s = r->user;
    const bool cached = r->why == READER_WHY_CACHED || r->why == READER_WHY_MEMORY;

    if (r->status != SIDE_OK) {
        if (r->status != SIDE_CANCELLED)
            fail(m);
        return;
    }
    pthread_mutex_lock(&m->mutex);
    m->read_bytes += r->bytes;
    m->cached_bytes += cached ? r->bytes : 0;
    if (--s->left == 0) {
        if (piece_of(s)->kept) {
            move_to(s, WRITING);
            list_put(&m->to_write, s);
            pthread_cond_signal(&m->work);
        } else {
            move_to(s, READ);
            list_put(&m->read, s);
            pthread_cond_signal(&m->changed);
        }
    }
    pthread_mutex_unlock(&m->mutex);
}

/* ---------------------------------------------------------------- writing */

/* Files in memory are written through a mapping, a page's faults beside another's: their write calls wait for each other, file by file. The pages are
 * allocated first, so that a full file system is an error here and no signal. SIDE_UNSUPPORTED: not this file; nothing was written. */
static side_status write_mapped(int fd, const unsigned char *data, size_t bytes, uint64_t at)
{
    const uint64_t begin = at & ~(uint64_t)(READER_ALIGN - 1);
    const size_t lead = (size_t)(at - begin);
    unsigned char *map;

    if (fallocate(fd, 0, (off_t)at, (off_t)bytes) != 0)
        return errno == ENOSPC ? error_set_errno(SIDE_IO, where, errno, "no room") : SIDE_UNSUPPORTED;
    map = mmap(NULL, lead + bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)begin);
    if (map == MAP_FAILED)
        return SIDE_UNSUPPORTED;
    memcpy(map + lead, data, bytes);
    munmap(map, lead + bytes);
    return SIDE_OK;
}

static side_status write_some(const struct cast_file *file, const void *data, size_t bytes, uint64_t at, size_t *done)
{
    side_status r = SIDE_UNSUPPORTED;

    *done = 0;
    if (file->memory && bytes > 0)
        r = write_mapped(file->fd, data, bytes, at);
    return r == SIDE_UNSUPPORTED ? os_pwrite_all(file->fd, data, bytes, at, done) : r;
}

static side_status write_out(const struct slot *s)
{
    const struct cast_piece *p = piece_of(s);
    const struct cast_plan *plan = &s->mover->cast->plan;
    const struct cast_file *file = &plan->files[p->file];
    uint64_t at = p->out_offset;
    side_status r = SIDE_OK;
    size_t done = 0;

    if (!p->kept)
        r = write_some(file, s->data, p->out_bytes, at, &done);
    for (uint32_t i = 0; r == SIDE_OK && p->kept && i < p->count; i++) {
        r = write_some(file, s->reads[i].data, s->reads[i].bytes, at, &done);
        at += s->reads[i].bytes;
    }
    if (r == SIDE_OK)
        return r;
    return error_set_errno(r, where, side_last_error()->os_errno, "cannot write at offset %llu of %s, file %.100s",
                           (unsigned long long)at + done, ck_shown(s->mover->cast->part), file->name);
}

static void *writer_main(void *arg)
{
    struct mover *m = arg;

    for (;;) {
        struct slot *s = NULL;
        pthread_mutex_lock(&m->mutex);
        while (!m->stop && (s = list_take(&m->to_write)) == NULL)
            pthread_cond_wait(&m->work, &m->mutex);
        pthread_mutex_unlock(&m->mutex);
        if (s == NULL)
            return NULL;
        if (write_out(s) != SIDE_OK) {
            fail(m);
            return NULL;
        }
        pthread_mutex_lock(&m->mutex);
        m->cast->done[s->piece] = 1;
        m->unsynced += piece_of(s)->out_bytes;
        m->bytes_done += piece_of(s)->in_bytes;
        if (m->unsynced >= m->cast->options.sync_bytes)
            pthread_cond_signal(&m->due);
        if (--m->left == 0)
            m->stop = true;
        if (m->left % 16 == 0) /* the driver tells how far it is */
            pthread_cond_signal(&m->changed);
        if (m->stop)
            pthread_cond_broadcast(&m->work);
        pthread_mutex_unlock(&m->mutex);
        refill(s);
    }
}

/* ---------------------------------------------------------------- journal */

/* Every so many bytes, and every two seconds where there is anything. `copy`: done as it was, since what comes meanwhile is not synced. */
static void *sync_main(void *arg)
{
    struct mover *m = arg;
    const size_t count = m->cast->plan.piece_count;
    unsigned char *copy = mem_zalloc(1, count);
    side_status s = copy != NULL ? SIDE_OK : SIDE_NO_MEMORY;

    while (s == SIDE_OK) {
        const uint64_t deadline = os_now_ns() + SYNC_NS;
        uint64_t begin;
        pthread_mutex_lock(&m->mutex);
        while (!m->stop && m->unsynced < m->cast->options.sync_bytes && os_cond_wait_until(&m->due, &m->mutex, deadline))
            ;
        if (m->stop) {
            pthread_mutex_unlock(&m->mutex);
            break;
        }
        memcpy(copy, m->cast->done, count);
        m->unsynced = 0;
        pthread_mutex_unlock(&m->mutex);
        begin = os_now_ns();
        s = cast_journal_note(m->cast, copy);
        m->sync_busy_s += (double)(os_now_ns() - begin) * 1e-9; /* read when this thread has ended */
    }
    mem_free(copy);
    if (s != SIDE_OK)
        fail(m);
    return NULL;
}

/* ---------------------------------------------------------------- the device */

static side_type type_to(side_dtype to)
{
    side_type type = SIDE_F32;

    (void)cast_source(to, &type);
    return type;
}

static side_status queue_copy_in(struct mover *m, const struct slot *s, const struct stage *g)
{
    const struct cast_piece *p = piece_of(s);
    side_piece pieces[CAST_EXTENTS];
    unsigned char *at = g->in;

    if (p->count == 1)
        return side_copy_async(m->in, SIDE_COPY_H2D, g->in, s->reads[0].data, p->in_bytes);
    for (uint32_t i = 0; i < p->count; i++) {
        pieces[i] = (side_piece){.dst = at, .src = s->reads[i].data, .bytes = s->reads[i].bytes};
        at += s->reads[i].bytes;
    }
    return side_copy_batch(m->in, SIDE_COPY_H2D, pieces, p->count);
}

/* In, cast, back; the stage is free. What is queued before a failure is drained by whoever stops. */
static side_status queue_item(struct mover *m, struct slot *s)
{
    struct stage *g = &m->stages[m->queued % CAST_STAGES];
    const struct cast_piece *p = piece_of(s);
    side_op op = SIDE_OP_INIT;
    side_status r = queue_copy_in(m, s, g);

    op.id = SIDE_OP_CAST;
    op.in[0] = g->in;
    op.out = g->out;
    op.dim[0] = p->in_bytes / side_type_bytes(p->from);
    op.type[0] = p->from;
    op.type[1] = type_to(m->cast->options.to);
    if (r == SIDE_OK)
        r = side_event_record(g->copied, m->in);
    if (r == SIDE_OK)
        r = side_stream_wait(m->compute, g->copied);
    if (r == SIDE_OK)
        r = side_op_async(m->compute, &op);
    if (r == SIDE_OK)
        r = side_event_record(g->cast, m->compute);
    if (r == SIDE_OK)
        r = side_stream_wait(m->out, g->cast);
    if (r == SIDE_OK)
        r = side_copy_async(m->out, SIDE_COPY_D2H, s->data, g->out, p->out_bytes);
    if (r == SIDE_OK)
        r = side_event_record(g->back, m->out);
    if (r == SIDE_OK) {
        g->slot = s;
        m->queued++;
        m->waits_ns = m->queued - m->returned == 1 ? os_now_ns() : m->waits_ns;
    }
    return r;
}

/* The oldest item, if it is back. SIDE_AGAIN: it is not. Software devices go on only while they are waited for. */
static side_status take_back(struct mover *m)
{
    struct stage *g = &m->stages[m->returned % CAST_STAGES];
    side_status r = m->simulated ? side_event_wait(g->back, (double)SLICE_NS * 1e-9) : side_event_query(g->back);
    struct slot *s = g->slot;

    if (r == SIDE_AGAIN || (m->simulated && r == SIDE_STUCK)) {
        if ((double)(os_now_ns() - m->waits_ns) * 1e-9 > m->timeout_s)
            return error_set(SIDE_STUCK, where, "the device did not finish a piece in %g s", m->timeout_s);
        return SIDE_AGAIN;
    }
    if (r != SIDE_OK)
        return r;
    g->slot = NULL;
    m->returned++;
    m->waits_ns = os_now_ns();
    pthread_mutex_lock(&m->mutex);
    move_to(s, WRITING);
    list_put(&m->to_write, s);
    pthread_cond_signal(&m->work);
    pthread_mutex_unlock(&m->mutex);
    return SIDE_OK;
}

/* One turn: takes back what is there, queues what there is room for, and waits where there is neither. */
static side_status drive_once(struct mover *m)
{
    const uint64_t in_flight = m->queued - m->returned;
    side_status r = in_flight > 0 ? take_back(m) : SIDE_AGAIN;
    struct slot *s = NULL;

    if (r != SIDE_AGAIN)
        return r;
    pthread_mutex_lock(&m->mutex);
    if (in_flight < CAST_STAGES)
        s = list_take(&m->read);
    if (s != NULL)
        move_to(s, DEVICE);
    else if (!m->stop)
        (void)os_cond_wait_until(&m->changed, &m->mutex, os_now_ns() + (in_flight > 0 ? LOOK_NS : SLICE_NS));
    pthread_mutex_unlock(&m->mutex);
    return s != NULL ? queue_item(m, s) : SIDE_OK;
}

static void drive(struct mover *m)
{
    const side_cast_options *o = &m->cast->options;
    uint64_t told = UINT64_MAX, done = 0;
    bool stop = false;

    while (!stop) {
        if (atomic_load(&m->cast->cancelled)) {
            (void)error_set(SIDE_CANCELLED, where, "cancelled");
            fail(m);
        } else if (drive_once(m) != SIDE_OK) {
            fail(m);
        }
        pthread_mutex_lock(&m->mutex);
        stop = m->stop;
        done = m->bytes_done;
        pthread_mutex_unlock(&m->mutex);
        if (o->progress != NULL && done != told)
            o->progress(o->progress_user, done, m->cast->plan.bytes_in);
        told = done;
    }
}

/* ---------------------------------------------------------------- making and ending */

/* All slots in one block; fewer where the pool has less. */
static side_status make_slots(struct mover *m)
{
    const struct cast_plan *plan = &m->cast->plan;
    const size_t bytes = plan->slot_bytes;
    size_t count = m->cast->options.pinned_bytes / bytes;
    side_status s = side_device_pool(m->device, &m->pool);

    count = count < 2 ? 2 : count < m->left ? count : m->left;
    for (; s == SIDE_OK; count = count / 2 > 2 ? count / 2 : 2) {
        void *memory = NULL;
        s = side_pool_alloc(m->pool, count * bytes, &memory);
        m->memory = memory;
        if (s == SIDE_OK || count <= 2)
            break;
        if (s == SIDE_OVER_BUDGET || s == SIDE_NO_MEMORY)
            s = SIDE_OK;
    }
    if (s != SIDE_OK)
        return s;
    m->slots = mem_zalloc(count, sizeof(*m->slots));
    if (m->slots == NULL)
        return SIDE_NO_MEMORY;
    m->slot_count = (uint32_t)count;
    for (size_t i = 0; i < count; i++) {
        m->slots[i].mover = m;
        m->slots[i].state = STATES;
        m->slots[i].data = m->memory + i * bytes;
    }
    return SIDE_OK;
}

static side_status make_stages(struct mover *m)
{
    const struct cast_plan *plan = &m->cast->plan;
    side_status s = SIDE_OK;

    if (plan->stage_in == 0)
        return SIDE_OK;
    s = side_stream_create(m->device, &m->in);
    if (s == SIDE_OK)
        s = side_stream_create(m->device, &m->compute);
    if (s == SIDE_OK)
        s = side_stream_create(m->device, &m->out);
    for (size_t i = 0; s == SIDE_OK && i < CAST_STAGES; i++) {
        struct stage *g = &m->stages[i];
        s = side_device_alloc(m->device, plan->stage_in, &g->in);
        if (s == SIDE_OK)
            s = side_device_alloc(m->device, plan->stage_out, &g->out);
        if (s == SIDE_OK)
            s = side_event_create(m->device, false, &g->copied);
        if (s == SIDE_OK)
            s = side_event_create(m->device, false, &g->cast);
        if (s == SIDE_OK)
            s = side_event_create(m->device, false, &g->back);
    }
    return s;
}

static side_status make_reader(struct mover *m)
{
    const struct cast_plan *plan = &m->cast->plan;
    const struct reader_options o = {.done = read_done, .owner = m, .threads = m->cast->options.threads};
    side_checkpoint_file_info info;
    side_status s;

    s = reader_create(&o, &m->reader);
    if (s == SIDE_OK)
        reader_region(m->reader, m->memory, m->slot_count * plan->slot_bytes);

    m->numbers = mem_zalloc(plan->file_count, sizeof(*m->numbers));
    if (s == SIDE_OK && m->numbers == NULL)
        s = SIDE_NO_MEMORY;
    for (size_t i = 0; s == SIDE_OK && i < plan->file_count; i++) {
        s = side_checkpoint_file(m->cast->checkpoint, i, &info);
        if (s == SIDE_OK)
            s = reader_file(m->reader, info.fd, info.path, info.bytes, &m->numbers[i]);
    }
    return s;
}

static side_status start(struct mover *m)
{
    const uint32_t wanted = m->cast->options.writers;
    side_status s = make_slots(m);

    if (s == SIDE_OK)
        s = make_stages(m);
    if (s == SIDE_OK)
        s = make_reader(m);
    while (s == SIDE_OK && m->writer_count < wanted) {
        s = os_thread_create(&m->writers[m->writer_count], "side-cast-write", writer_main, m);
        m->writer_count += s == SIDE_OK;
    }
    if (s == SIDE_OK) {
        s = os_thread_create(&m->sync, "side-cast-sync", sync_main, m);
        m->syncing = s == SIDE_OK;
    }
    m->stamp_ns = os_now_ns();
    for (uint32_t i = 0; s == SIDE_OK && i < m->slot_count; i++)
        (void)refill(&m->slots[i]);
    if (s != SIDE_OK)
        fail(m);
    return s;
}

/* Nothing is in flight any more: SIDE_OK, or SIDE_STUCK, and then all is kept. */
static side_status drain(struct mover *m)
{
    side_stream *const streams[] = {m->in, m->compute, m->out};
    side_status r = SIDE_OK;

    pthread_mutex_lock(&m->mutex);
    m->stop = true;
    pthread_cond_broadcast(&m->work);
    pthread_cond_signal(&m->due);
    pthread_mutex_unlock(&m->mutex);
    while (m->writer_count > 0) /* before the reader goes: they give it pieces */
        pthread_join(m->writers[--m->writer_count], NULL);
    if (m->syncing)
        pthread_join(m->sync, NULL);
    m->syncing = false;
    if (m->reader != NULL) {
        struct reader_stats stats;
        reader_get_stats(m->reader, &stats);
        m->cast->stats.threads = stats.threads;
        r = reader_destroy(m->reader, m->timeout_s);
    }
    if (r != SIDE_OK)
        return r;
    m->reader = NULL;
    for (size_t i = 0; i < 3; i++)
        if (streams[i] != NULL && side_stream_sync(streams[i], m->timeout_s) == SIDE_STUCK)
            return SIDE_STUCK;
    return SIDE_OK;
}

static void release(struct mover *m)
{
    for (size_t i = 0; i < CAST_STAGES; i++) {
        struct stage *g = &m->stages[i];
        side_event_destroy(g->copied);
        side_event_destroy(g->cast);
        side_event_destroy(g->back);
        if (g->in != NULL)
            side_device_free(m->device, g->in);
        if (g->out != NULL)
            side_device_free(m->device, g->out);
    }
    side_stream_destroy(m->in);
    side_stream_destroy(m->compute);
    side_stream_destroy(m->out);
    if (m->memory != NULL)
        (void)side_pool_free(m->pool, m->memory, NULL, 0);
    if (m->pool != NULL)
        (void)side_pool_trim(m->pool);
    mem_free(m->slots);
    mem_free(m->numbers);
    pthread_cond_destroy(&m->changed);
    pthread_cond_destroy(&m->work);
    pthread_cond_destroy(&m->due);
    pthread_mutex_destroy(&m->mutex);
    mem_free(m);
}

static void sum_up(const struct mover *m, uint64_t ns)
{
    static const char *const names[] = {"reading", "device", "writing"};
    side_cast_stats *t = &m->cast->stats;
    double means[3] = {(double)m->area[READING], (double)(m->area[READ] + m->area[DEVICE]), (double)m->area[WRITING]};
    size_t most = 0;

    for (size_t i = 0; i < 3; i++) {
        means[i] /= ns > 0 ? (double)ns : 1;
        most = means[i] > means[most] ? i : most;
    }
    t->reading = means[0];
    t->on_device = means[1];
    t->writing = means[2];
    t->read_bytes = m->read_bytes;
    t->cached_bytes = m->cached_bytes;
    t->slots = m->slot_count;
    t->pinned_bytes = m->slot_count * m->cast->plan.slot_bytes;
    t->device_bytes = CAST_STAGES * (m->cast->plan.stage_in + m->cast->plan.stage_out);
    t->sync_busy_s = m->sync_busy_s;
    if (means[most] > 0)
        snprintf(t->bottleneck, sizeof(t->bottleneck), "%s", names[most]);
}

side_status cast_move(side_cast *cast, side_device *device)
{
    struct mover *m = mem_zalloc(1, sizeof(*m));
    side_device_props props;
    side_status s = SIDE_OK, drained, noted;
    uint64_t begin;

    if (m == NULL)
        return SIDE_NO_MEMORY;
    m->cast = cast;
    m->device = device;
    m->timeout_s = cast->options.timeout_s;
    m->read.last = &m->read.first;
    m->to_write.last = &m->to_write.first;
    pthread_mutex_init(&m->mutex, NULL);
    os_cond_init(&m->changed);
    os_cond_init(&m->work);
    os_cond_init(&m->due);
    for (size_t i = 0; i < cast->plan.piece_count; i++) {
        m->left += cast->done[i] == 0;
        m->bytes_done += cast->done[i] != 0 ? cast->plan.pieces[i].in_bytes : 0;
    }
    if (m->left == 0) {
        release(m);
        return SIDE_OK;
    }
    s = side_device_get_props(device, &props);
    m->simulated = s == SIDE_OK && props.simulated;
    begin = os_now_ns();
    if (s == SIDE_OK)
        s = start(m);
    if (s == SIDE_OK)
        drive(m);
    else
        fail(m);
    drained = drain(m);
    if (drained != SIDE_OK) /* memory is kept: somebody may still write to it */
        return drained;
    sum_up(m, os_now_ns() - begin);
    begin = os_now_ns();
    noted = cast_journal_note(cast, cast->done); /* after a failure too: that much is saved */
    cast->stats.sync_busy_s += (double)(os_now_ns() - begin) * 1e-9;
    s = m->failed ? error_restore(&m->error) : noted;
    release(m);
    return s;
}
