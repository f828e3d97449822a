/* SPDX-License-Identifier: MIT
 *
 * Making and unmaking a feeder: options, memory, threads, the first failure. */
#include "feeder.h"

#include "alloc.h"
#include "error.h"
#include "log.h"
#include "os.h"

#include <string.h>

#define WHERE         "side_feeder_create"
#define MAX_SLOTS     4096u
#define DEFAULT_QUEUE 2u
#define RUN_AHEAD \
    16u /* batches that may be taken while the device has not copied them: keeps the host from running ahead without end */

/* ---------------------------------------------------------------- failure */

side_status feeder_enter(const side_feeder *f, const char *where)
{
    if (f == NULL)
        return error_set(SIDE_INVALID, where, "feeder is NULL");
    return os_fork_check(f->fork_generation, where);
}

side_status feeder_check(side_feeder *f)
{
    if (f->failure.status != SIDE_OK)
        return error_restore(&f->failure);
    return atomic_load(&f->cancelled) ? error_set(SIDE_CANCELLED, "side_feeder", "cancelled") : SIDE_OK;
}

side_status feeder_check_unlocked(void *feeder)
{
    side_feeder *f = feeder;
    side_status r;

    if (!atomic_load(&f->failed) && !atomic_load(&f->cancelled))
        return SIDE_OK;
    pthread_mutex_lock(&f->mutex);
    r = feeder_check(f);
    pthread_mutex_unlock(&f->mutex);
    return r;
}

/* Locked. */
static void wake_all(side_feeder *f)
{
    pthread_cond_broadcast(&f->work);
    pthread_cond_broadcast(&f->arrived);
    pthread_cond_broadcast(&f->room);
}

side_status feeder_fail(side_feeder *f, side_status status)
{
    side_slots *host;

    pthread_mutex_lock(&f->mutex);
    const bool cancelled = status == SIDE_CANCELLED && atomic_load(&f->cancelled);
    if (!cancelled && f->failure.status == SIDE_OK) {
        error_copy(&f->failure);
        f->failure.status = status;
        atomic_store(&f->failed, true);
    }
    wake_all(f);
    host = f->stager.host;
    pthread_mutex_unlock(&f->mutex);
    if (!cancelled) {
        side_slots_poison(f->slots, status);
        side_slots_poison(host, status);
    }
    return status;
}

/* No thread is at work any more, nor anything of ours queued: false, if that is not known within timeout_s. All threads end by themselves, since the check
 * fails. */
static bool settle(side_feeder *f)
{
    bool stuck;

    pthread_mutex_lock(&f->mutex);
    while (f->live > 0 || f->inline_busy || f->settling)
        pthread_cond_wait(&f->room, &f->mutex);
    if (!f->settled) {
        f->settling = true;
        pthread_mutex_unlock(&f->mutex);
        stuck = !device_stream_drain(f->copy, f->options.timeout_s);
        pthread_mutex_lock(&f->mutex);
        f->settling = false;
        f->settled = true;
        f->stuck = stuck;
        pthread_cond_broadcast(&f->room);
    }
    stuck = f->stuck;
    pthread_mutex_unlock(&f->mutex);
    return !stuck;
}

side_status feeder_return(side_feeder *f, side_status status)
{
    side_error cause;

    if (status >= 0 || (!atomic_load(&f->failed) && !atomic_load(&f->cancelled)))
        return status;
    error_copy(&cause);
    if (!settle(f))
        return error_set(SIDE_STUCK, cause.where,
                         "the device did not drain within %g s, its memory is kept; before that: %s",
                         f->options.timeout_s, cause.message);
    return error_restore(&cause);
}

void side_feeder_cancel(side_feeder *feeder)
{
    side_feeder *f = feeder;
    side_slots *host;

    if (f == NULL || os_fork_generation() != f->fork_generation)
        return;
    pthread_mutex_lock(&f->mutex);
    atomic_store(&f->cancelled, true);
    atomic_store(&f->interrupted, true);
    wake_all(f);
    host = f->stager.host;
    pthread_mutex_unlock(&f->mutex);
    slots_wake(f->slots);
    if (host != NULL)
        slots_wake(host);
}

/* ---------------------------------------------------------------- threads */

static void *fill_thread(void *feeder)
{
    side_feeder *f = feeder;

    side_status r = stager_work(&f->stager);

    if (r != SIDE_END) /* else another thread has met the failure, and says so */
        feeder_fail(f, r);
    pthread_mutex_lock(&f->mutex);
    f->live--;
    pthread_cond_broadcast(&f->room);
    pthread_mutex_unlock(&f->mutex);
    return NULL;
}

side_status feeder_threads(side_feeder *f, uint32_t count)
{
    side_error kept;

    error_copy(&kept);
    while (f->thread_count < count) {
        side_status r = os_thread_create(&f->threads[f->thread_count], "side-feed", fill_thread, f);
        if (r != SIDE_OK && f->thread_count == 0)
            return r;
        if (r != SIDE_OK) { /* fewer will do */
            error_restore(&kept);
            return SIDE_OK;
        }
        f->thread_count++;
        f->live++;
    }
    return SIDE_OK;
}

/* ---------------------------------------------------------------- create */

static side_status check_options(side_device *device, const side_feeder_options *o)
{
    if (o->slots == 0 || o->slots > MAX_SLOTS || o->queue > MAX_SLOTS)
        return error_set(SIDE_INVALID, WHERE, "slots is %u, queue %u; slots takes 1 to %u, queue 0 (2) to %u", o->slots,
                         o->queue, MAX_SLOTS, MAX_SLOTS);
    if (o->slot_bytes == 0 || o->slot_bytes > SIZE_MAX / 2 / o->slots)
        return error_set(SIDE_INVALID, WHERE, "slot_bytes is %zu", o->slot_bytes);
    if (o->threads > STAGE_MAX_THREADS)
        return error_set(SIDE_INVALID, WHERE, "threads is %u; it takes 0 (default) to %d", o->threads,
                         STAGE_MAX_THREADS);
    if (!(o->timeout_s >= 0 && o->timeout_s <= 1e6))
        return error_set(SIDE_INVALID, WHERE, "timeout_s is %g; it takes 0 (30 s) to 1e6", o->timeout_s);
    for (uint32_t i = 0; o->memory != NULL && i < o->slots; i++)
        if (o->memory[i] == NULL || (uintptr_t)o->memory[i] % 16 != 0)
            return error_set(SIDE_INVALID, WHERE, "memory[%u] is %p; it takes device memory aligned to 16 bytes", i,
                             o->memory[i]);
    if ((o->memory_stream != NULL && o->memory_stream->device != device) ||
        (o->copy_stream != NULL && o->copy_stream->device != device))
        return error_set(SIDE_INVALID, WHERE, "memory_stream or copy_stream is of another device");
    if (o->log != NULL && log_device(o->log) != device)
        return error_set(SIDE_INVALID, WHERE, "options.log is of another device");
    return SIDE_OK;
}

static side_status slots_make(side_feeder *f)
{
    side_slots_options o = SIDE_SLOTS_OPTIONS_INIT;
    side_status r;
    side_slot slot;

    o.policy = SIDE_LIST;
    o.count = f->options.slots;
    o.slot_bytes = f->options.slot_bytes;
    o.memory = f->options.memory;
    o.timeout_s = f->options.timeout_s;
    r = side_slots_create(f->device, &o, &f->slots);
    if (r != SIDE_OK)
        return r;
    slots_configure(f->slots, SITE_FEED_DEVICE, &f->interrupted);
    slots_drain_own(f->slots); /* releases are of the caller's streams */
    /* As if memory_stream had written each: whoever writes first waits for it. */
    for (uint32_t i = 0; r == SIDE_OK && f->options.memory_stream != NULL && i < o.count; i++) {
        r = side_slots_acquire(f->slots, 0, f->options.memory_stream, &slot);
        if (r == SIDE_OK)
            r = side_slots_abandon(f->slots, &slot, f->options.memory_stream);
    }
    return r;
}

static side_status parts_make(side_feeder *f)
{
    side_status r = SIDE_OK;

    f->own_copy = f->options.copy_stream == NULL;
    f->copy = f->options.copy_stream;
    if (f->own_copy)
        r = side_stream_create(f->device, &f->copy);
    f->stager.stream = f->copy;
    if (r == SIDE_OK)
        r = slots_make(f);
    f->batch_count = 2 * f->options.slots + f->options.queue + RUN_AHEAD + 2; /* record_wait says why */
    f->batches = r == SIDE_OK ? mem_zalloc(f->batch_count, sizeof(*f->batches)) : NULL;
    if (r == SIDE_OK && f->batches == NULL)
        r = SIDE_NO_MEMORY;
    return r == SIDE_OK ? stager_window(&f->stager, 3 * f->options.threads)
                        : r; /* two slots a thread, and the threads */
}

/* Nothing is queued, no thread runs, the device slots are gone. */
static void feeder_free(side_feeder *f)
{
    stager_finish(&f->stager);
    timing_finish(f);
    for (uint32_t i = 0; f->batches != NULL && i < f->batch_count; i++) {
        fence_finish(&f->batches[i].copied, f->device);
        mem_free(f->batches[i].parts.at);
    }
    mem_free(f->batches);
    mem_free(f->scratch.at);
    if (f->own_copy)
        side_stream_destroy(f->copy);
    pthread_cond_destroy(&f->work);
    pthread_cond_destroy(&f->arrived);
    pthread_cond_destroy(&f->room);
    pthread_mutex_destroy(&f->mutex);
    mem_free(f);
}

static void choose(side_feeder *f, const side_feeder_options *o)
{
    f->options = *o;
    f->options.threads = staging_threads(o->threads);
    if (o->queue == 0)
        f->options.queue = DEFAULT_QUEUE;
    if (o->timeout_s == 0)
        f->options.timeout_s = STAGE_DEFAULT_TIMEOUT_S;
}

side_status side_feeder_create(side_device *device, const side_feeder_options *options, side_feeder **feeder)
{
    side_feeder_options o = SIDE_FEEDER_OPTIONS_INIT;
    side_status r = device_check(device, WHERE);
    side_feeder *f;
    side_error cause;

    if (r == SIDE_OK && (options == NULL || feeder == NULL))
        r = error_set(SIDE_INVALID, WHERE, "options or feeder is NULL");
    if (r == SIDE_OK)
        r = options_copy(&o, sizeof(o), options, sizeof(o), WHERE);
    if (r == SIDE_OK)
        r = check_options(device, &o);
    if (r != SIDE_OK)
        return r;
    f = mem_zalloc(1, sizeof(*f));
    if (f == NULL)
        return SIDE_NO_MEMORY;
    f->device = device;
    f->fork_generation = os_fork_generation();
    choose(f, &o);
    pthread_mutex_init(&f->mutex, NULL);
    os_cond_init(&f->work);
    os_cond_init(&f->arrived);
    os_cond_init(&f->room);
    stager_init(&f->stager, &feeder_stager_ops, f);
    r = parts_make(f);
    if (r != SIDE_OK) {
        error_copy(&cause);
        if (side_slots_destroy(f->slots) == SIDE_OK) /* else memory_stream is stuck: what it uses is kept */
            feeder_free(f);
        return error_restore(&cause);
    }
    f->options.memory = NULL; /* need not live on */
    f->stats.slots = f->options.slots;
    f->stats.device_bytes = o.memory == NULL ? o.slots * slots_stride(o.slot_bytes) : 0;
    log_message(SIDE_LEVEL_INFO, "feeder", "%u slots of %zu bytes%s, queue %u, up to %u threads", o.slots, o.slot_bytes,
                o.memory != NULL ? " of the caller's" : "", f->options.queue, f->options.threads);
    *feeder = f;
    return SIDE_OK;
}

side_status side_feeder_destroy(side_feeder *feeder)
{
    side_feeder *f = feeder;
    side_status r;

    if (f == NULL || os_fork_generation() != f->fork_generation)
        return SIDE_OK;
    side_feeder_cancel(f);
    for (uint32_t i = 0; i < f->thread_count; i++)
        pthread_join(f->threads[i], NULL);
    f->thread_count = 0;
    if (!settle(f))
        return error_set(SIDE_STUCK, "side_feeder_destroy", "the device did not drain; the feeder's memory is kept");
    r = side_slots_destroy(f->slots);
    if (r != SIDE_OK)
        return r;
    feeder_free(f);
    return SIDE_OK;
}

/* ---------------------------------------------------------------- the rest */

side_slots *side_feeder_slots(side_feeder *feeder)
{
    return feeder != NULL ? feeder->slots : NULL;
}

side_status side_feeder_get_stats(side_feeder *feeder, side_feeder_stats *stats)
{
    side_feeder *f = feeder;
    side_status r = feeder_enter(f, "side_feeder_get_stats");

    if (r == SIDE_OK && stats == NULL)
        r = error_set(SIDE_INVALID, "side_feeder_get_stats", "stats is NULL");
    if (r != SIDE_OK)
        return r;
    pthread_mutex_lock(&f->mutex);
    timing_sum(f, f->taken, false);
    f->stats.stage_busy_s = (double)atomic_load(&f->stager.fill_ns) * 1e-9;
    f->stats.threads = f->thread_count;
    f->stats.copies = atomic_load(&f->copies);
    f->stats.direct_bytes = atomic_load(&f->direct_bytes);
    *stats = f->stats;
    pthread_mutex_unlock(&f->mutex);
    return SIDE_OK;
}
