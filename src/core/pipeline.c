/* SPDX-License-Identifier: MIT
 *
 * Making and unmaking a pipeline: options, memory, threads, the first failure. */
#include "pipeline.h"

#include "alloc.h"
#include "error.h"
#include "log.h"
#include "os.h"
#include "plan.h"

#include <stdio.h>
#include <string.h>

#define WHERE               "side_pipeline_create"
#define MAX_DEFAULT_THREADS 12u

uint32_t side_default_threads(void)
{
    unsigned share = os_cores() / os_local_world();
    unsigned n = share > 1 ? share - 1 : 1;
    return n < MAX_DEFAULT_THREADS ? n : MAX_DEFAULT_THREADS;
}

/* ---------------------------------------------------------------- failure */

side_status pipeline_fail(side_pipeline *p, side_status status)
{
    pthread_mutex_lock(&p->mutex);
    if (p->failure.status == SIDE_OK) {
        error_copy(&p->failure);
        p->failure.status = status;
        atomic_store(&p->failed, true);
    }
    pthread_mutex_unlock(&p->mutex);
    side_slots_poison(p->in, status);
    side_slots_poison(p->out, status);
    side_slots_poison(p->feed.stager.host, status);
    side_slots_poison(p->drain.host_out, status);
    return status;
}

side_status pipeline_callback_failed(const char *stage, uint64_t item, int rc)
{
    side_error cause;

    error_copy(&cause);
    error_set(SIDE_CALLBACK, stage, "the %s callback returned %d for item %llu%s%s", stage, rc, (unsigned long long)item,
              cause.status != SIDE_OK ? ": " : "", cause.status != SIDE_OK ? cause.message : "");
    error_copy(&cause);
    cause.os_errno = rc;
    return error_restore(&cause);
}

side_status pipeline_check(side_pipeline *p)
{
    side_status r;

    if (!atomic_load(&p->failed))
        return atomic_load(&p->cancelled) ? error_set(SIDE_CANCELLED, "side_pipeline", "cancelled") : SIDE_OK;
    pthread_mutex_lock(&p->mutex);
    r = error_restore(&p->failure);
    pthread_mutex_unlock(&p->mutex);
    return r;
}

void side_pipeline_cancel(side_pipeline *pipeline)
{
    if (pipeline != NULL)
        atomic_store(&pipeline->cancelled, true); /* all that a signal handler may do; waits look at it every 20 ms */
}

/* ---------------------------------------------------------------- threads */

bool pipeline_thread_start(side_pipeline *p, uint64_t *pass)
{
    bool go;

    pthread_mutex_lock(&p->mutex);
    while (p->pass == *pass && !p->quit)
        pthread_cond_wait(&p->changed, &p->mutex);
    go = !p->quit;
    *pass = p->pass;
    p->device->ops->clock_join(p->device->context, p->start_ns);
    pthread_mutex_unlock(&p->mutex);
    return go;
}

void pipeline_thread_done(side_pipeline *p)
{
    pthread_mutex_lock(&p->mutex);
    p->busy--;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->mutex);
}

static side_status thread_add(side_pipeline *p, const char *name, void *(*fn)(void *))
{
    side_status r = os_thread_create(&p->threads[p->thread_count], name, fn, p);
    p->thread_count += r == SIDE_OK;
    return r;
}

static side_status threads_create(side_pipeline *p)
{
    side_status r = SIDE_OK;

    for (uint32_t i = 0; r == SIDE_OK && p->feed.stager.host != NULL && i < p->fill_threads; i++)
        r = thread_add(p, "side-fill", pipeline_fill_thread);
    if (r == SIDE_OK && p->drain.host_out != NULL)
        r = thread_add(p, "side-d2h", pipeline_d2h_thread);
    for (uint32_t i = 0; r == SIDE_OK && p->drain.host_out != NULL && i < p->drain_threads; i++)
        r = thread_add(p, "side-drain", pipeline_drain_thread);
    return r;
}

static void threads_join(side_pipeline *p)
{
    pthread_mutex_lock(&p->mutex);
    p->quit = true;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->mutex);
    for (uint32_t i = 0; i < p->thread_count; i++)
        pthread_join(p->threads[i], NULL);
    p->thread_count = 0;
}

/* ---------------------------------------------------------------- options */

static bool fits_a_file(uint64_t offset, uint64_t length)
{
    return offset <= INT64_MAX && length <= INT64_MAX - offset;
}

static side_status check_ends(const side_pipeline_options *o)
{
    if (o->source.kind == SIDE_END_NONE || (unsigned)o->source.kind > SIDE_END_FILE ||
        (unsigned)o->sink.kind > SIDE_END_FILE)
        return error_set(
            SIDE_INVALID, WHERE,
            "options.source is missing, or an end is of an unknown kind; use side_source_... and side_sink_...");
    if ((o->result_bytes == 0) != (o->sink.kind == SIDE_END_NONE))
        return error_set(SIDE_INVALID, WHERE, "result_bytes is %zu but %s sink is given; results need both",
                         o->result_bytes, o->sink.kind == SIDE_END_NONE ? "no" : "a");
    if ((o->source.kind == SIDE_END_BLOCKS && o->source.items != 0 && o->source.blocks == NULL) ||
        (o->sink.kind == SIDE_END_BLOCKS && o->sink.items != 0 && o->sink.blocks == NULL))
        return error_set(SIDE_INVALID, WHERE, "blocks is NULL");
    if ((o->source.kind == SIDE_END_CALLBACK && o->source.fn == NULL) ||
        (o->sink.kind == SIDE_END_CALLBACK && o->sink.fn == NULL))
        return error_set(SIDE_INVALID, WHERE, "a callback is NULL");
    if ((o->source.kind == SIDE_END_FILE && o->source.fd < 0) || (o->sink.kind == SIDE_END_FILE && o->sink.fd < 0))
        return error_set(SIDE_INVALID, WHERE, "a file descriptor is negative");
    if ((o->source.kind == SIDE_END_FILE && !fits_a_file(o->source.offset, o->source.length)) ||
        (o->sink.kind == SIDE_END_FILE && !fits_a_file(o->sink.offset, 0)))
        return error_set(SIDE_INVALID, WHERE, "a file's offset, or offset + length, is over 2^63 - 1");
    return SIDE_OK;
}

static side_status check_numbers(const side_pipeline_options *o)
{
    if (o->item_bytes == 0 || o->item_bytes > SIZE_MAX / 256 || o->result_bytes > SIZE_MAX / 256)
        return error_set(SIDE_INVALID, WHERE, "item_bytes is %zu, result_bytes %zu", o->item_bytes, o->result_bytes);
    if (o->depth > PIPELINE_MAX_DEPTH || o->streams > PIPELINE_MAX_STREAMS || o->window > PIPELINE_MAX_WINDOW ||
        o->threads > PIPELINE_MAX_THREADS)
        return error_set(SIDE_INVALID, WHERE, "depth %u, streams %u, window %u or threads %u is over %d, %d, %d, %d",
                         o->depth, o->streams, o->window, o->threads, PIPELINE_MAX_DEPTH, PIPELINE_MAX_STREAMS,
                         PIPELINE_MAX_WINDOW, PIPELINE_MAX_THREADS);
    if (!(o->timeout_s >= 0 && o->timeout_s <= 1e6))
        return error_set(SIDE_INVALID, WHERE, "timeout_s is %g; it takes 0 (30 s) to 1e6", o->timeout_s);
    if (!(o->compute_s >= 0 && o->compute_s <= 1e9))
        return error_set(SIDE_INVALID, WHERE, "compute_s is %g; it takes 0 (not known) to 1e9", o->compute_s);
    return SIDE_OK;
}

uint32_t pipeline_window(uint32_t depth)
{
    return depth > 1 ? 2 * depth : 4;
}

/* Reading costs more than writing results, which are smaller as a rule. */
uint32_t pipeline_drain_threads(uint32_t threads)
{
    return threads > 1 ? (threads + 1) / 2 : 1;
}

static side_status choose(side_pipeline *p)
{
    side_pipeline_options *o = &p->options;
    uint32_t threads = o->source.kind == SIDE_END_BLOCKS ? staging_threads(o->threads)
                       : o->threads != 0                 ? o->threads
                                                         : side_default_threads();
    side_status r = SIDE_OK;

    p->disabled = os_env_flag("SIDESTREAM_DISABLE");
    p->depth = p->disabled ? 1 : o->depth;
    if (p->depth == 0)
        r = plan_pipeline_depth(p->device, o, threads, &p->depth);
    p->window = p->disabled ? 1 : o->window != 0 ? o->window : pipeline_window(p->depth);
    p->stream_count = p->disabled ? 1 : o->streams != 0 ? o->streams : 1;
    threads = p->disabled ? 1 : threads;
    p->fill_threads = o->source.kind == SIDE_END_CALLBACK ? 1 : threads; /* it is called by one thread at a time */
    p->drain_threads = pipeline_drain_threads(threads);
    if (o->timeout_s == 0)
        o->timeout_s = STAGE_DEFAULT_TIMEOUT_S;
    return r;
}

/* ---------------------------------------------------------------- memory */

side_status pipeline_staging(side_pipeline *p, uint32_t threads, size_t item_bytes, bool whole, size_t limit_bytes,
                             int site, side_slots **slots, uint32_t *got, size_t *got_bytes)
{
    struct staging want = staging_for(threads, whole ? item_bytes : p->options.chunk_bytes, item_bytes);
    side_status r;

    want.where = WHERE;
    want.component = "pipeline";
    want.timeout_s = p->options.timeout_s;
    want.limit_bytes = limit_bytes;
    want.whole = whole;
    if (whole)
        want.count = p->depth + 1;
    r = staging_create(p->device, &want, slots);
    if (r != SIDE_OK)
        return r;
    slots_configure(*slots, site, &p->cancelled);
    p->pinned_bytes += want.count * slots_stride(want.bytes);
    p->staging_slots += want.count;
    *got = want.count;
    *got_bytes = want.bytes;
    return SIDE_OK;
}

static side_status ring_create(side_pipeline *p, size_t bytes, int site, side_slots **slots)
{
    side_slots_options o = SIDE_SLOTS_OPTIONS_INIT;
    side_status r;

    o.count = p->depth;
    o.slot_bytes = bytes;
    o.timeout_s = p->options.timeout_s;
    r = side_slots_create(p->device, &o, slots);
    if (r == SIDE_OK)
        slots_configure(*slots, site, &p->cancelled);
    return r;
}

/* Both device rings at the wanted depth, or at the greatest depth from 2 on that fits. */
static side_status rings_create(side_pipeline *p)
{
    uint32_t want = p->depth;
    size_t free_bytes = 0;
    side_status r;

    for (;; p->depth--) {
        r = ring_create(p, p->options.item_bytes, SITE_DEVICE_IN, &p->in);
        if (r == SIDE_OK && p->options.result_bytes != 0)
            r = ring_create(p, p->options.result_bytes, SITE_DEVICE_OUT, &p->out);
        if (r != SIDE_NO_DEVICE_MEMORY || p->depth <= 2)
            break;
        side_slots_destroy(p->in);
        p->in = NULL;
    }
    if (r == SIDE_NO_DEVICE_MEMORY) {
        side_device_get_memory(p->device, &free_bytes, NULL);
        return error_set(
            r, WHERE, "%u slots of %zu + %zu bytes do not fit the %zu bytes of free device memory: use smaller items",
            p->depth, p->options.item_bytes, p->options.result_bytes, free_bytes);
    }
    if (r != SIDE_OK)
        return r;
    if (p->depth != want)
        log_message(SIDE_LEVEL_WARN, "pipeline", "depth %u instead of %u: device memory is short", p->depth, want);
    p->device_bytes = p->depth * (slots_stride(p->options.item_bytes) +
                                  (p->options.result_bytes != 0 ? slots_stride(p->options.result_bytes) : 0));
    p->in_meta = mem_zalloc(p->depth, sizeof(*p->in_meta));
    p->out_meta = mem_zalloc(p->depth, sizeof(*p->out_meta));
    p->finished = mem_zalloc(p->window, sizeof(*p->finished));
    return p->in_meta != NULL && p->out_meta != NULL && p->finished != NULL ? SIDE_OK : SIDE_NO_MEMORY;
}

static side_status streams_create(side_pipeline *p)
{
    side_status r = SIDE_OK;

    p->own_compute_streams = p->options.compute_streams == NULL;
    for (uint32_t i = 0; r == SIDE_OK && i < p->stream_count; i++) {
        if (p->own_compute_streams)
            r = side_stream_create(p->device, &p->compute[i]);
        else if (p->options.compute_streams[i] == NULL || p->options.compute_streams[i]->device != p->device)
            r = error_set(SIDE_INVALID, WHERE, "compute_streams[%u] is NULL or of another device", i);
        else
            p->compute[i] = p->options.compute_streams[i];
    }
    p->own_copy_streams = !p->disabled;
    if (r == SIDE_OK && p->disabled)
        p->h2d = p->d2h = p->compute[0]; /* one stream, in order */
    if (r == SIDE_OK && p->own_copy_streams)
        r = side_stream_create(p->device, &p->h2d);
    if (r == SIDE_OK && p->own_copy_streams && p->options.result_bytes != 0)
        r = side_stream_create(p->device, &p->d2h);
    return r;
}

static void streams_destroy(side_pipeline *p)
{
    if (p->own_copy_streams) {
        side_stream_destroy(p->h2d);
        side_stream_destroy(p->d2h);
    }
    for (uint32_t i = 0; p->own_compute_streams && i < p->stream_count; i++)
        side_stream_destroy(p->compute[i]);
}

/* ---------------------------------------------------------------- create and destroy */

static void pipeline_free(side_pipeline *p)
{
    threads_join(p);
    feed_destroy(p);
    drain_destroy(p);
    side_slots_destroy(p->in);
    side_slots_destroy(p->out);
    for (uint32_t i = 0; p->finished != NULL && i < p->window; i++)
        fence_finish(&p->finished[i].fence, p->device);
    fence_finish(&p->tail, p->device);
    streams_destroy(p);
    mem_free(p->in_meta);
    mem_free(p->out_meta);
    mem_free(p->finished);
    pthread_cond_destroy(&p->changed);
    pthread_mutex_destroy(&p->mutex);
    mem_free(p);
}

static void describe(side_pipeline *p)
{
    side_pipeline_stats *s = &p->stats;

    s->depth = p->depth;
    s->window = p->window;
    s->streams = p->stream_count;
    s->threads = p->thread_count;
    s->staging_slots = p->staging_slots;
    s->chunk_bytes = p->feed.chunk_bytes;
    s->pinned_bytes = p->pinned_bytes;
    s->device_bytes = p->device_bytes;
    s->disabled = p->disabled;
    log_message(
        SIDE_LEVEL_INFO, "pipeline",
        "depth %u, window %u, %u compute streams, %u threads, %u staging slots, %zu bytes pinned, %zu on the device%s",
        p->depth, p->window, p->stream_count, p->thread_count, p->staging_slots, p->pinned_bytes, p->device_bytes,
        p->disabled ? "; SIDESTREAM_DISABLE: no overlap" : "");
}

side_status side_pipeline_create(side_device *device, const side_pipeline_options *options, side_pipeline **pipeline)
{
    side_pipeline_options o = SIDE_PIPELINE_OPTIONS_INIT;
    side_status r = device_check(device, WHERE);
    side_pipeline *p;
    side_error kept;

    if (r == SIDE_OK && (pipeline == NULL || options == NULL))
        r = error_set(SIDE_INVALID, WHERE, "options or pipeline is NULL");
    if (r == SIDE_OK)
        r = options_copy(&o, sizeof(o), options, offsetof(side_pipeline_options, compute_s), WHERE);
    if (r == SIDE_OK)
        r = check_ends(&o);
    if (r == SIDE_OK)
        r = check_numbers(&o);
    if (r == SIDE_OK && o.log != NULL && log_device(o.log) != device)
        r = error_set(SIDE_INVALID, WHERE, "options.log is of another device");
    if (r != SIDE_OK)
        return r;
    p = mem_zalloc(1, sizeof(*p));
    if (p == NULL)
        return SIDE_NO_MEMORY;
    error_copy(&kept);
    p->device = device;
    p->fork_generation = os_fork_generation();
    p->options = o;
    pthread_mutex_init(&p->mutex, NULL);
    os_cond_init(&p->changed);
    feed_init(p);
    drain_init(p);
    r = choose(p);
    if (r == SIDE_OK)
        r = streams_create(p);
    if (r == SIDE_OK)
        r = rings_create(p);
    if (r == SIDE_OK)
        r = feed_create(p);
    if (r == SIDE_OK)
        r = drain_create(p);
    if (r == SIDE_OK)
        r = threads_create(p);
    if (r != SIDE_OK) {
        error_copy(&kept);
        pipeline_free(p);
        error_restore(&kept);
        return r;
    }
    error_restore(&kept); /* sizes that were tried in vain are not the caller's error */
    describe(p);
    *pipeline = p;
    return SIDE_OK;
}

side_status side_pipeline_destroy(side_pipeline *pipeline)
{
    side_pipeline *p = pipeline;

    if (p == NULL || os_fork_generation() != p->fork_generation)
        return SIDE_OK;
    if (p->running)
        return error_set(SIDE_STATE, "side_pipeline_destroy",
                         "the pipeline is in side_pipeline_run: its callbacks may only cancel it");
    if (p->in_pass) { /* a pulling loop that was left: what it holds is its own */
        atomic_store(&p->cancelled, true);
        p->stuck = pipeline_abort(p) == SIDE_STUCK;
    }
    if (p->stuck)
        return error_set(SIDE_STUCK, "side_pipeline_destroy", "the device did not drain; the pipeline's memory is kept");
    pipeline_free(p);
    return SIDE_OK;
}
