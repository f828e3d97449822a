/* SPDX-License-Identifier: MIT
 *
 * Op log: a begin and an end event around each operation, resolved to device times when somebody asks.
 *
 * Times: an event pair gives a float of milliseconds on CUDA, coarse after a second. So an anchor event is recorded on the log's own idle stream every
 * second; a span is placed by its distance to the anchor before it, anchors by their distances to each other.
 *
 * Lock: mutex guards the records and the spare events. Event calls for a record that is being written run outside of it: a record
 * belongs to the thread that began it until it ended.
 */
#include "log.h"

#include "alloc.h"
#include "device.h"
#include "error.h"
#include "os.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_CAPACITY 65536u
#define PATIENCE_NS      30000000000u
#define ANCHOR_NS        1000000000u
#define MAX_ANCHORS      86400u /* a day; later spans hang on the last one */

struct record {
    side_span span;
    dev_event *begin, *end;
    uint32_t anchor;
    bool complete;
};

struct anchor {
    dev_event *event;
    uint64_t host_ns; /* when it was recorded */
};

struct side_log {
    side_device *device;
    unsigned fork_generation;
    pthread_mutex_t mutex;
    pthread_cond_t read; /* reading fell */
    int reading;         /* threads in side_log_spans that wait for events */
    dev_stream *anchor_stream;
    struct anchor *anchors;
    uint32_t anchor_count, anchor_capacity;
    struct record *records; /* grows by doubling up to capacity; begun ones stay in place by number, not by address */
    size_t count, allocated, capacity;
    uint32_t first;     /* number of records[0]: a clear begins new numbers, so that a late end ends nothing else */
    uint64_t origin_ns; /* host clock */
    uint64_t dropped;
    uint32_t streams[64]; /* side_stream numbers in order of first use */
    uint32_t stream_count;
};

/* Locked. A new anchor where the last one is old; failure keeps the old one. */
static side_status anchor_renew(side_log *g, uint64_t now)
{
    const struct side_device_ops *ops = g->device->ops;
    dev_event *e;
    side_status s;

    if (g->anchor_count > 0 &&
        (now < g->anchors[g->anchor_count - 1].host_ns + ANCHOR_NS || g->anchor_count >= MAX_ANCHORS))
        return SIDE_OK;
    if (g->anchor_count == g->anchor_capacity) {
        uint32_t n = g->anchor_capacity != 0 ? 2 * g->anchor_capacity : 16;
        struct anchor *a = mem_zalloc(n, sizeof(*a));
        if (a == NULL)
            return SIDE_NO_MEMORY;
        if (g->anchor_count > 0)
            memcpy(a, g->anchors, g->anchor_count * sizeof(*a));
        mem_free(g->anchors);
        g->anchors = a;
        g->anchor_capacity = n;
    }
    s = ops->event_create(g->device->context, true, &e);
    if (s != SIDE_OK)
        return s;
    s = ops->event_record(e, g->anchor_stream);
    if (s != SIDE_OK) {
        ops->event_destroy(e);
        return s;
    }
    g->anchors[g->anchor_count++] = (struct anchor){e, now};
    return SIDE_OK;
}

side_device *log_device(const side_log *log)
{
    return log->device;
}

static void forget(side_log *g)
{
    const struct side_device_ops *ops = g->device->ops;

    for (size_t i = 0; i < g->count; i++) {
        if (g->records[i].begin != NULL)
            ops->event_destroy(g->records[i].begin);
        if (g->records[i].end != NULL)
            ops->event_destroy(g->records[i].end);
    }
    for (uint32_t i = 0; i < g->anchor_count; i++)
        ops->event_destroy(g->anchors[i].event);
    g->first += (uint32_t)g->count;
    if (g->first >= LOG_NONE / 2)
        g->first = 0;
    g->count = 0;
    g->anchor_count = 0;
    g->stream_count = 0;
    g->dropped = 0;
}

static void log_free(side_log *g)
{
    if (g->anchor_stream != NULL)
        g->device->ops->stream_destroy(g->anchor_stream);
    mem_free(g->anchors);
    mem_free(g->records);
    pthread_cond_destroy(&g->read);
    pthread_mutex_destroy(&g->mutex);
    mem_free(g);
}

side_status side_log_create(side_device *device, size_t capacity, side_log **log)
{
    side_status s = device_check(device, "side_log_create");
    side_log *g;

    if (s == SIDE_OK && log == NULL)
        s = error_set(SIDE_INVALID, "side_log_create", "log is NULL");
    if (s != SIDE_OK)
        return s;
    g = mem_zalloc(1, sizeof(*g));
    if (g == NULL)
        return SIDE_NO_MEMORY;
    g->device = device;
    g->fork_generation = os_fork_generation();
    g->capacity = capacity != 0 ? capacity : DEFAULT_CAPACITY;
    pthread_mutex_init(&g->mutex, NULL);
    os_cond_init(&g->read);
    s = device->ops->stream_create(device->context, &g->anchor_stream);
    if (s == SIDE_OK) {
        g->origin_ns = device->ops->now(device->context);
        s = anchor_renew(g, g->origin_ns);
    }
    if (s != SIDE_OK) {
        log_free(g);
        return s;
    }
    *log = g;
    return SIDE_OK;
}

void side_log_destroy(side_log *log)
{
    if (log == NULL || os_fork_generation() != log->fork_generation)
        return;
    forget(log);
    log_free(log);
}

/* Locked. */
static uint32_t stream_index(side_log *g, const side_stream *stream)
{
    for (uint32_t i = 0; i < g->stream_count; i++)
        if (g->streams[i] == stream->number)
            return i;
    if (g->stream_count < sizeof(g->streams) / sizeof(g->streams[0]))
        g->streams[g->stream_count++] = stream->number;
    return g->stream_count - 1;
}

/* Locked. Room for one more record; false: full or out of memory. */
static bool records_grow(side_log *g)
{
    if (g->count < g->allocated)
        return true;
    size_t n = g->allocated != 0 ? 2 * g->allocated : 256;
    n = n < g->capacity ? n : g->capacity;
    if (n <= g->count)
        return false;
    struct record *r = mem_zalloc(n, sizeof(*r));
    if (r == NULL)
        return false;
    if (g->count > 0)
        memcpy(r, g->records, g->count * sizeof(*r));
    mem_free(g->records);
    g->records = r;
    g->allocated = n;
    return true;
}

static void ranges_set(side_span *span, const struct log_ranges *ranges)
{
    if (ranges == NULL)
        return;
    if (ranges->read_bytes != 0) {
        span->read_begin = (uint64_t)(uintptr_t)ranges->read;
        span->read_end = span->read_begin + ranges->read_bytes;
    }
    if (ranges->write_bytes != 0) {
        span->write_begin = (uint64_t)(uintptr_t)ranges->write;
        span->write_end = span->write_begin + ranges->write_bytes;
    }
}

static uint32_t span_begin(side_log *g, side_stream *stream, side_lane lane, const char *name, uint64_t item,
                           uint64_t bytes, const struct log_ranges *ranges)
{
    const struct side_device_ops *ops = g->device->ops;
    dev_event *e = NULL;
    side_error kept; /* what fails here is not the logged call's cause */
    struct record *r;
    uint64_t now;
    uint32_t i;

    error_copy(&kept);
    if (ops->event_create(g->device->context, true, &e) != SIDE_OK || ops->event_record(e, stream->handle) != SIDE_OK)
        goto drop;
    now = ops->now(g->device->context);
    pthread_mutex_lock(&g->mutex);
    if (g->count >= LOG_NONE / 2 || !records_grow(g) || anchor_renew(g, now) != SIDE_OK) {
        pthread_mutex_unlock(&g->mutex);
        goto drop;
    }
    i = (uint32_t)g->count++;
    r = &g->records[i];
    *r = (struct record){.begin = e, .anchor = g->anchor_count - 1};
    /* `now` may be of before a clear, or of a thread whose clock is behind. */
    r->span.queued_ns = now > g->origin_ns ? now - g->origin_ns : 0;
    r->span.bytes = bytes;
    r->span.item = item;
    r->span.lane = lane;
    r->span.stream = stream_index(g, stream);
    strncpy(r->span.name, name, sizeof(r->span.name) - 1);
    ranges_set(&r->span, ranges);
    i += g->first;
    pthread_mutex_unlock(&g->mutex);
    return i;

drop:
    if (e != NULL)
        ops->event_destroy(e);
    pthread_mutex_lock(&g->mutex);
    g->dropped++;
    pthread_mutex_unlock(&g->mutex);
    error_restore(&kept);
    return LOG_NONE;
}

static void span_end(side_log *g, side_stream *stream, uint32_t span)
{
    const struct side_device_ops *ops = g->device->ops;
    dev_event *e = NULL;
    side_error kept;
    bool ok;

    error_copy(&kept);
    ok = ops->event_create(g->device->context, true, &e) == SIDE_OK && ops->event_record(e, stream->handle) == SIDE_OK;
    pthread_mutex_lock(&g->mutex);
    uint32_t i = span - g->first;
    if (ok && i < g->count && g->records[i].end == NULL) {
        g->records[i].end = e;
        g->records[i].complete = true;
        e = NULL;
    } else {
        g->dropped++;
    }
    pthread_mutex_unlock(&g->mutex);
    if (e != NULL)
        ops->event_destroy(e);
    error_restore(&kept);
}

uint32_t log_begin(side_log *log, side_stream *stream, side_lane lane, const char *name, uint64_t item, uint64_t bytes,
                   const struct log_ranges *ranges)
{
    return log != NULL ? span_begin(log, stream, lane, name, item, bytes, ranges) : LOG_NONE;
}

void log_end(side_log *log, side_stream *stream, uint32_t span)
{
    if (log != NULL && span != LOG_NONE)
        span_end(log, stream, span);
}

static side_status log_check(const side_log *log, const side_stream *stream, const char *where)
{
    if (log == NULL || stream == NULL)
        return error_set(SIDE_INVALID, where, log == NULL ? "log is NULL" : "stream is NULL");
    if (log->device != stream->device)
        return error_set(SIDE_INVALID, where, "log and stream are of different devices");
    return os_fork_check(log->fork_generation, where);
}

side_status side_log_begin(side_log *log, side_stream *stream, side_lane lane, const char *name, uint64_t item,
                           uint64_t bytes, uint32_t *span)
{
    side_status s = log_check(log, stream, "side_log_begin");

    if (s == SIDE_OK && ((unsigned)lane >= SIDE_LANE_COUNT || name == NULL || span == NULL))
        s = error_set(SIDE_INVALID, "side_log_begin", "unknown lane, or name or span is NULL");
    if (s == SIDE_OK)
        *span = span_begin(log, stream, lane, name, item, bytes, NULL);
    return s;
}

side_status side_log_end(side_log *log, side_stream *stream, uint32_t span)
{
    side_status s = log_check(log, stream, "side_log_end");
    if (s == SIDE_OK && span != LOG_NONE)
        span_end(log, stream, span);
    return s;
}

/* ---------------------------------------------------------------- reading */

static int by_begin(const void *a, const void *b)
{
    const side_span *x = a, *y = b;
    if (x->begin_ns != y->begin_ns)
        return x->begin_ns < y->begin_ns ? -1 : 1;
    return x->lane != y->lane ? (x->lane < y->lane ? -1 : 1) : 0;
}

/* At most PATIENCE_NS. */
static side_status wait_done(side_log *g, dev_event *event)
{
    side_status s = g->device->ops->event_wait(event, PATIENCE_NS);
    return s == SIDE_AGAIN ? error_set(SIDE_STUCK, "side_log_spans", "logged work did not finish in time") : s;
}

/* Waits for what is logged so far, without the lock: others go on logging. `reading` keeps the events. */
static side_status wait_logged(side_log *g)
{
    side_status s = SIDE_OK;

    for (size_t i = 0; s == SIDE_OK; i++) {
        pthread_mutex_lock(&g->mutex);
        const bool more = i < g->count;
        dev_event *end = more && g->records[i].complete ? g->records[i].end : NULL;
        pthread_mutex_unlock(&g->mutex);
        if (!more)
            break;
        if (end != NULL)
            s = wait_done(g, end);
    }
    return s;
}

static void reading(side_log *g, int change)
{
    pthread_mutex_lock(&g->mutex);
    g->reading += change;
    pthread_cond_broadcast(&g->read);
    pthread_mutex_unlock(&g->mutex);
}

/* Locked. Places a complete record on the device's time line. */
static side_status resolve(side_log *g, struct record *r, double anchor_ns)
{
    const struct side_device_ops *ops = g->device->ops;
    double from, length;
    side_status s = wait_done(g, r->end);

    if (s == SIDE_OK)
        s = ops->event_elapsed(g->anchors[r->anchor].event, r->begin, &from);
    if (s == SIDE_OK)
        s = ops->event_elapsed(r->begin, r->end, &length);
    if (s != SIDE_OK)
        return s;
    from += anchor_ns;
    r->span.begin_ns = from > 0 ? (uint64_t)llround(from) : 0;
    r->span.end_ns = r->span.begin_ns + (length > 0 ? (uint64_t)llround(length) : 0);
    return SIDE_OK;
}

side_status side_log_spans(side_log *log, side_span *spans, size_t *count)
{
    side_status s = log != NULL ? os_fork_check(log->fork_generation, "side_log_spans")
                                : error_set(SIDE_INVALID, "side_log_spans", "log is NULL");
    double anchor_ns = 0, step;
    uint32_t anchor = 0;
    size_t n = 0;

    if (s == SIDE_OK && (count == NULL || (spans == NULL && *count != 0)))
        s = error_set(SIDE_INVALID, "side_log_spans", "count or spans is NULL");
    if (s != SIDE_OK)
        return s;
    reading(log, 1);
    s = wait_logged(log);
    reading(log, -1);
    pthread_mutex_lock(&log->mutex);
    for (uint32_t i = 0; s == SIDE_OK && i < log->anchor_count; i++)
        s = wait_done(log, log->anchors[i].event);
    for (size_t i = 0; s == SIDE_OK && i < log->count; i++) {
        struct record *r = &log->records[i];
        if (!r->complete)
            continue;
        for (; s == SIDE_OK && anchor < r->anchor; anchor++) { /* anchors never go back from record to record */
            s = log->device->ops->event_elapsed(log->anchors[anchor].event, log->anchors[anchor + 1].event, &step);
            anchor_ns += s == SIDE_OK ? step : 0;
        }
        if (n < *count && s == SIDE_OK) {
            s = resolve(log, r, anchor_ns);
            if (s == SIDE_OK)
                spans[n] = r->span;
        }
        n++;
    }
    if (s == SIDE_OK) {
        if (spans != NULL)
            qsort(spans, n < *count ? n : *count, sizeof(*spans), by_begin);
        *count = n;
    }
    pthread_mutex_unlock(&log->mutex);
    return s;
}

side_status side_log_clear(side_log *log)
{
    side_status s = log != NULL ? os_fork_check(log->fork_generation, "side_log_clear")
                                : error_set(SIDE_INVALID, "side_log_clear", "log is NULL");
    if (s != SIDE_OK)
        return s;
    pthread_mutex_lock(&log->mutex);
    while (log->reading > 0)
        pthread_cond_wait(&log->read, &log->mutex);
    forget(log); /* events may be destroyed while pending: nothing else to wait for */
    log->origin_ns = log->device->ops->now(log->device->context);
    s = anchor_renew(log, log->origin_ns);
    pthread_mutex_unlock(&log->mutex);
    return s;
}

uint64_t side_log_dropped(side_log *log)
{
    uint64_t n;

    if (log == NULL || os_fork_generation() != log->fork_generation)
        return 0;
    pthread_mutex_lock(&log->mutex);
    n = log->dropped;
    pthread_mutex_unlock(&log->mutex);
    return n;
}
