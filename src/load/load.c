/* SPDX-License-Identifier: MIT
 *
 * A load from start to end: options, threads, the first failure, join. */
#include "load_private.h"

#include "alloc.h"
#include "error.h"
#include "os.h"

#include <string.h>

#define WHERE       "side_load_start"
#define TIMEOUT_S   30.0
#define ALIGN_BYTES ((size_t)16)
#define FLAGS       (SIDE_LOAD_IN_ORDER | SIDE_LOAD_GIVEN | SIDE_LOAD_CHECKSUM)

/* ---------------------------------------------------------------- failure */

side_status load_enter(const side_load *l, const char *where)
{
    if (l == NULL)
        return error_set(SIDE_INVALID, where, "load is NULL");
    return os_fork_check(l->fork_generation, where);
}

side_status load_fail_locked(side_load *l, side_status status)
{
    if (l->failure.status == SIDE_OK) {
        error_copy(&l->failure);
        l->failure.status = status;
    }
    atomic_store(&l->stop, true);
    pthread_cond_broadcast(&l->work);
    pthread_cond_broadcast(&l->changed);
    return status;
}

side_status load_fail(side_load *l, side_status status)
{
    pthread_mutex_lock(&l->mutex);
    load_fail_locked(l, status);
    pthread_mutex_unlock(&l->mutex);
    return status;
}

side_status load_failure(const side_load *l)
{
    return l->failure.status == SIDE_OK ? SIDE_OK : error_restore(&l->failure);
}

void side_load_cancel(side_load *load)
{
    side_load *l = load;
    side_error kept;

    if (l == NULL || os_fork_generation() != l->fork_generation)
        return;
    error_copy(&kept);
    pthread_mutex_lock(&l->mutex);
    if (l->driving)
        load_fail_locked(l, error_set(SIDE_CANCELLED, "side_load", "cancelled"));
    pthread_mutex_unlock(&l->mutex);
    error_restore(&kept);
}

/* ---------------------------------------------------------------- options */

static bool is_power(size_t n)
{
    return n != 0 && (n & (n - 1)) == 0;
}

static side_status check_numbers(const side_load_options *o)
{
    if ((unsigned)o->where > SIDE_MEMORY_DEVICE)
        return error_set(SIDE_INVALID, WHERE, "unknown memory kind %d; fill the struct with SIDE_LOAD_OPTIONS_INIT",
                         (int)o->where);
    if ((o->flags & ~FLAGS) != 0)
        return error_set(SIDE_UNSUPPORTED, WHERE, "flags has %#x, which this version (%s) does not know",
                         o->flags & ~FLAGS, side_version());
    if (o->align != 0 && (!is_power(o->align) || o->align > LOAD_GRAIN))
        return error_set(SIDE_INVALID, WHERE, "align is %zu; it takes a power of two to 4096, or 0 (16)", o->align);
    if (o->piece_bytes % LOAD_GRAIN != 0 || o->piece_bytes > LOAD_PIECE_MOST)
        return error_set(SIDE_INVALID, WHERE, "piece_bytes is %zu; it takes a multiple of 4096 to %zu, or 0 (2 MiB)",
                         o->piece_bytes, LOAD_PIECE_MOST);
    if (o->threads > READER_MOST_THREADS)
        return error_set(SIDE_INVALID, WHERE, "threads is %u; it takes 0 (by cores) to %u", o->threads,
                         READER_MOST_THREADS);
    if ((unsigned)o->backend > SIDE_LOAD_URING)
        return error_set(SIDE_INVALID, WHERE, "unknown backend %d", (int)o->backend);
    if (!(o->timeout_s >= 0 && o->timeout_s <= 1e6))
        return error_set(SIDE_INVALID, WHERE, "timeout_s is %g; it takes 0 (30 s) to 1e6", o->timeout_s);
    return SIDE_OK;
}

static side_status check_options(side_device *device, const side_checkpoint *ck, const side_load_options *o)
{
    side_status r = check_numbers(o);

    if (r != SIDE_OK)
        return r;
    if ((o->copy_stream != NULL && o->copy_stream->device != device) ||
        (o->memory_stream != NULL && o->memory_stream->device != device))
        return error_set(SIDE_INVALID, WHERE, "copy_stream or memory_stream is of another device");
    if (ck != NULL && (o->read != NULL || o->sources != NULL))
        return error_set(SIDE_INVALID, WHERE, "there is a checkpoint, and options.read or sources too");
    if (ck == NULL && (o->read == NULL || (o->sources == NULL && o->source_count != 0)))
        return error_set(SIDE_INVALID, WHERE, "checkpoint is NULL, and options.read or sources too");
    if (o->parts == NULL && o->count != 0)
        return error_set(SIDE_INVALID, WHERE, "count is %zu, and parts NULL", o->count);
    if (ck == NULL && o->source_count >= LOAD_NONE)
        return error_set(SIDE_TOO_LARGE, WHERE, "source_count is %zu", o->source_count);
    return SIDE_OK;
}

/* ---------------------------------------------------------------- start */

static side_status files_open(side_load *l)
{
    static const enum reader_backend backends[] = {READER_AUTO, READER_PREAD, READER_DIRECT, READER_URING};
    struct reader_options o = {.owner = l, .threads = l->options.threads, .backend = backends[l->options.backend]};
    side_status r;

    if (l->checkpoint == NULL)
        return load_sources_create(l);
    if (l->ordered) {
        o.threads = 1;
        o.backend = READER_PREAD;
    }
    o.done = load_read_done;
    reader *made = NULL;
    r = reader_create(&o, &made);
    pthread_mutex_lock(&l->mutex);
    l->reader = made;
    pthread_mutex_unlock(&l->mutex);
    load_slots_tell(l);
    for (uint32_t i = 0; r == SIDE_OK && i < l->plan.file_count; i++) {
        struct load_file *f = &l->plan.files[i];
        r = reader_file(l->reader, f->fd, f->name, f->bytes, &f->number);
    }
    return r;
}

static side_status stream_make(side_load *l)
{
    side_status r = SIDE_OK;

    l->own_copy = l->options.copy_stream == NULL;
    l->copy = l->options.copy_stream;
    if (l->own_copy)
        r = side_stream_create(l->device, &l->copy);
    if (r != SIDE_OK || l->options.memory_stream == NULL)
        return r;
    return load_order(l, l->options.memory_stream);
}

/* A matter of speed alone: without the thread the first slots do. */
static void pins_start(side_load *l)
{
    side_error kept;

    l->pinning = l->slot_count < l->slot_most;
    if (!l->pinning)
        return;
    error_copy(&kept);
    l->has_pins = os_thread_create(&l->pins, "side-pin", load_slots_thread, l) == SIDE_OK;
    if (l->has_pins)
        return;
    l->pinning = false;
    error_restore(&kept);
}

/* Pinning the first slots holds everything up. */
static side_status slots_make(side_load *l)
{
    const uint64_t begin_ns = os_now_ns();
    const side_status r = load_slots_begin(l);

    if (!l->to_host)
        l->spent_ns[SPENT_PINS] += os_now_ns() - begin_ns;
    return r;
}

static side_status plan_make(side_load *l, const side_load_options *o)
{
    side_status r = load_plan_parts(&l->plan, l->checkpoint, o);

    if (r == SIDE_OK)
        r = load_plan_arenas(&l->plan, &l->options, l->to_host);
    if (r == SIDE_OK)
        r = load_arenas_check(l);
    if (r == SIDE_OK)
        r = slots_make(l);
    if (r == SIDE_OK)
        pins_start(l); /* while the pieces are cut */
    if (r == SIDE_OK)
        r = load_plan_pieces(&l->plan, l->slot_bytes, (o->flags & SIDE_LOAD_IN_ORDER) != 0, l->to_host);
    if (r != SIDE_OK)
        return r;
    for (uint32_t i = 0; i < l->plan.part_count; i++)
        l->ready += l->plan.parts[i].left == 0;
    return SIDE_OK;
}

/* From here on others know the load. */
static side_status threads_start(side_load *l)
{
    side_status r;

    l->plan_ns = os_now_ns() - l->begin_ns;
    l->stamp_ns = os_now_ns();
    l->driving = true;
    r = os_thread_create(&l->driver, "side-load", load_driver, l);
    l->has_driver = r == SIDE_OK;
    if (r != SIDE_OK) /* else it may have ended already, and said so */
        l->driving = false;
    if (r == SIDE_OK && (l->options.flags & SIDE_LOAD_CHECKSUM) != 0)
        r = load_check_begin(l);
    return r;
}

static void choose(side_load *l, const side_load_options *o)
{
    l->options = *o;
    if (o->align == 0)
        l->options.align = ALIGN_BYTES;
    if ((o->flags & SIDE_LOAD_CHECKSUM) != 0 && l->options.align < ALIGN_BYTES) /* its kernel wants that */
        l->options.align = ALIGN_BYTES;
    if (o->timeout_s == 0)
        l->options.timeout_s = TIMEOUT_S;
    l->to_host = o->where != SIDE_MEMORY_DEVICE;
    l->ordered = os_env_flag("SIDESTREAM_DISABLE");
    l->simulated = l->device->props.simulated;
    l->begin_ns = os_now_ns();
    l->begin_clock_ns = l->done_clock_ns = l->device->ops->now(l->device->context);
}

static side_load *load_new(side_device *device, side_checkpoint *ck, const side_load_options *o)
{
    side_load *l = mem_zalloc(1, sizeof(*l));

    if (l == NULL)
        return NULL;
    l->device = device;
    l->checkpoint = ck;
    l->fork_generation = os_fork_generation();
    choose(l, o);
    pthread_mutex_init(&l->mutex, NULL);
    os_cond_init(&l->work);
    os_cond_init(&l->changed);
    return l;
}

side_status side_load_start(side_device *device, side_checkpoint *checkpoint, const side_load_options *options,
                            side_load **load)
{
    side_load_options o = SIDE_LOAD_OPTIONS_INIT;
    side_status r = device_check(device, WHERE);
    side_error cause;
    side_load *l;

    if (r == SIDE_OK && load == NULL)
        r = error_set(SIDE_INVALID, WHERE, "load is NULL");
    if (r == SIDE_OK)
        r = options_copy(&o, sizeof(o), options, sizeof(o), WHERE);
    if (r == SIDE_OK)
        r = check_options(device, checkpoint, &o);
    if (r != SIDE_OK)
        return r;
    l = load_new(device, checkpoint, &o);
    if (l == NULL)
        return SIDE_NO_MEMORY;
    r = plan_make(l, &o);
    l->options.parts = NULL; /* need not live on */
    l->next_arena = (o.flags & SIDE_LOAD_GIVEN) != 0 ? l->plan.arena_count : 0;
    if (r == SIDE_OK)
        r = stream_make(l);
    if (r == SIDE_OK)
        r = files_open(l);
    if (r == SIDE_OK)
        r = threads_start(l);
    if (r != SIDE_OK) {
        error_copy(&cause);
        side_load_destroy(l);
        return error_restore(&cause);
    }
    log_message(SIDE_LEVEL_INFO, "load", "%u parts, %llu bytes in %u pieces; %u slots of %zu bytes, %u arenas of %zu",
                l->plan.part_count, (unsigned long long)l->plan.bytes, l->plan.piece_count, l->slot_most, l->slot_bytes,
                l->plan.arena_count, l->plan.arena_bytes);
    *load = l;
    return SIDE_OK;
}

/* ---------------------------------------------------------------- the end */

/* Everything of ours ends: threads, reads, copies. SIDE_STUCK: some of it has not, and all is kept. The driver and who is interrupted by stop end by
 * themselves. */
static side_status settle(side_load *l)
{
    const uint64_t deadline = os_now_ns() + (uint64_t)(l->options.timeout_s * 1e9);
    side_status r = SIDE_OK;

    if (l->has_driver)
        pthread_join(l->driver, NULL);
    l->has_driver = false;
    if (l->has_pins)
        pthread_join(l->pins, NULL);
    l->has_pins = false;
    if (l->reader != NULL)
        r = reader_drain(l->reader, deadline);
    if (l->sources != NULL)
        r = load_sources_drain(l, deadline);
    if (r != SIDE_OK)
        return r;
    r = load_check_finish(l);
    if (r != SIDE_OK)
        return r;
    if (atomic_load(&l->stop) && l->copy != NULL && !device_stream_drain(l->copy, l->options.timeout_s))
        return error_set(SIDE_STUCK, "side_load", "the copies did not end within %g s", l->options.timeout_s);
    return SIDE_OK;
}

/* What a load needs no more once it has ended. */
static void release(side_load *l)
{
    if (l->reader != NULL) {
        reader_get_stats(l->reader, &l->reader_end);
        reader_destroy(l->reader, l->options.timeout_s); /* is drained */
        l->reader = NULL;
    }
    load_sources_finish(l);
    load_slots_finish(l);
    if (l->own_copy)
        side_stream_destroy(l->copy);
    l->own_copy = false;
    l->copy = NULL;
}

/* By one thread at a time, which has set `joining`. */
static void finish(side_load *l)
{
    side_status r = settle(l);
    side_error end = {.status = SIDE_OK, .where = ""};

    if (r == SIDE_OK && !atomic_load(&l->stop) && l->checkpoint != NULL) {
        r = side_checkpoint_check(l->checkpoint);
        if (r != SIDE_OK)
            load_fail(l, r);
        r = SIDE_OK;
    }
    if (r != SIDE_OK) {
        error_copy(&end);
        if (atomic_load(&l->stop))
            error_set(SIDE_STUCK, end.where, "%s; its memory is kept; before that: %s", end.message, l->failure.message);
        error_copy(&end);
        end.status = SIDE_STUCK;
    }
    pthread_mutex_lock(&l->mutex);
    if (r == SIDE_OK)
        release(l);
    l->stuck = r != SIDE_OK;
    l->end = r != SIDE_OK ? end : l->failure;
    l->joined = true;
    l->joining = false;
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->mutex);
}

side_status side_load_join(side_load *load, side_load_stats *stats)
{
    side_load *l = load;
    side_status r = load_enter(l, "side_load_join");

    if (r != SIDE_OK)
        return r;
    pthread_mutex_lock(&l->mutex);
    while (l->joining || (l->driving && !l->joined))
        pthread_cond_wait(&l->changed, &l->mutex);
    const bool mine = !l->joined;
    l->joining = mine;
    pthread_mutex_unlock(&l->mutex);
    if (mine)
        finish(l);
    if (stats != NULL)
        side_load_get_stats(l, stats);
    pthread_mutex_lock(&l->mutex);
    if (l->simulated)
        l->device->ops->clock_join(l->device->context, l->done_clock_ns);
    r = l->end.status != SIDE_OK ? error_restore(&l->end) : SIDE_OK;
    pthread_mutex_unlock(&l->mutex);
    return r;
}

side_status side_load_destroy(side_load *load)
{
    side_load *l = load;
    side_status r;

    if (l == NULL || os_fork_generation() != l->fork_generation)
        return SIDE_OK;
    side_load_cancel(l);
    pthread_mutex_lock(&l->mutex);
    if (l->stuck) /* perhaps it has ended since */
        l->joined = l->stuck = false;
    pthread_mutex_unlock(&l->mutex);
    r = side_load_join(l, NULL);
    if (l->stuck)
        return r;
    load_arenas_finish(l);
    load_plan_finish(&l->plan);
    mem_free(l->hashes);
    pthread_cond_destroy(&l->work);
    pthread_cond_destroy(&l->changed);
    pthread_mutex_destroy(&l->mutex);
    mem_free(l);
    return SIDE_OK;
}
