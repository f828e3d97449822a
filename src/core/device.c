/* SPDX-License-Identifier: MIT
 *
 * Public calls on devices, streams, events and copies: check the arguments, call the op table, nothing else. */
#include "device.h"
#include "machine.h"

#include "alloc.h"
#include "error.h"
#include "os.h"

#include <string.h>

side_status device_check(const side_device *device, const char *where)
{
    if (device == NULL)
        return error_set(SIDE_INVALID, where, "device is NULL");
    return os_fork_check(device->fork_generation, where);
}

static side_status stream_check(const side_stream *stream, const char *where)
{
    if (stream == NULL)
        return error_set(SIDE_INVALID, where, "stream is NULL");
    return device_check(stream->device, where);
}

static side_status event_check(const side_event *event, const char *where)
{
    if (event == NULL)
        return error_set(SIDE_INVALID, where, "event is NULL");
    return device_check(event->device, where);
}

side_status side_device_get_props(side_device *device, side_device_props *props)
{
    side_status s = device_check(device, "side_device_get_props");
    if (s != SIDE_OK)
        return s;
    if (props == NULL)
        return error_set(SIDE_INVALID, "side_device_get_props", "props is NULL");
    *props = device->props;
    return SIDE_OK;
}

side_status side_device_get_link(side_device *device, side_link *link)
{
    side_status s = device_check(device, "side_device_get_link");
    if (s != SIDE_OK)
        return s;
    if (link == NULL)
        return error_set(SIDE_INVALID, "side_device_get_link", "link is NULL");
    return device->ops->link(device->context, link);
}

side_status side_device_get_memory(side_device *device, size_t *free_bytes, size_t *total_bytes)
{
    size_t available, total;
    side_status s = device_check(device, "side_device_get_memory");

    if (s == SIDE_OK)
        s = device->ops->memory(device->context, &available, &total);
    if (s != SIDE_OK)
        return s;
    if (free_bytes != NULL)
        *free_bytes = available;
    if (total_bytes != NULL)
        *total_bytes = total;
    return SIDE_OK;
}

uint64_t side_device_now_ns(side_device *device)
{
    bool usable = device != NULL && device->fork_generation == os_fork_generation();
    return usable ? device->ops->now(device->context) : os_now_ns();
}

/* ---------------------------------------------------------------- streams */

static side_status stream_make(side_device *device, bool wrap, void *native, side_stream **stream, const char *where)
{
    side_status s = device_check(device, where);
    side_stream *q;

    if (s != SIDE_OK)
        return s;
    if (stream == NULL)
        return error_set(SIDE_INVALID, where, "stream is NULL");
    q = mem_zalloc(1, sizeof(*q));
    if (q == NULL)
        return SIDE_NO_MEMORY;
    s = wrap ? device->ops->stream_wrap(device->context, native, &q->handle)
             : device->ops->stream_create(device->context, &q->handle);
    if (s != SIDE_OK) {
        mem_free(q);
        return s;
    }
    q->device = device;
    q->number = atomic_fetch_add(&device->streams_made, 1) + 1; /* 0 means the host */
    *stream = q;
    return SIDE_OK;
}

side_status side_stream_create(side_device *device, side_stream **stream)
{
    return stream_make(device, false, NULL, stream, "side_stream_create");
}

side_status side_stream_wrap(side_device *device, void *native, side_stream **stream)
{
    return stream_make(device, true, native, stream, "side_stream_wrap");
}

void side_stream_destroy(side_stream *stream)
{
    if (stream == NULL || os_fork_generation() != stream->device->fork_generation)
        return;
    stream->device->ops->stream_destroy(stream->handle);
    mem_free(stream);
}

void *side_stream_native(side_stream *stream)
{
    return stream != NULL ? stream->device->ops->stream_native(stream->handle) : NULL;
}

side_device *side_stream_device(side_stream *stream)
{
    return stream != NULL ? stream->device : NULL;
}

side_status side_stream_wait(side_stream *stream, side_event *event)
{
    side_status s = stream_check(stream, "side_stream_wait");
    if (s == SIDE_OK)
        s = event_check(event, "side_stream_wait");
    if (s != SIDE_OK)
        return s;
    if (stream->device != event->device)
        return error_set(SIDE_INVALID, "side_stream_wait", "stream and event are of different devices");
    return stream->device->ops->stream_wait(stream->handle, event->handle);
}

side_status side_stream_is_capturing(side_stream *stream, bool *capturing)
{
    side_status s = stream_check(stream, "side_stream_is_capturing");
    if (s != SIDE_OK)
        return s;
    if (capturing == NULL)
        return error_set(SIDE_INVALID, "side_stream_is_capturing", "capturing is NULL");
    return stream->device->ops->stream_is_capturing(stream->handle, capturing);
}

side_status side_stream_sync(side_stream *stream, double timeout_s)
{
    side_status s = stream_check(stream, "side_stream_sync");
    dev_event *tail;

    if (s != SIDE_OK)
        return s;
    /* An event and not the driver's own synchronise: that one cannot give up. */
    s = stream->device->ops->event_create(stream->device->context, false, &tail);
    if (s != SIDE_OK)
        return s;
    s = stream->device->ops->event_record(tail, stream->handle);
    if (s == SIDE_OK)
        s = device_event_wait(stream->device, tail, timeout_s);
    stream->device->ops->event_destroy(tail);
    return s;
}

side_status side_stream_host_fn(side_stream *stream, side_host_fn *fn, void *user, uint64_t sim_ns)
{
    side_status s = stream_check(stream, "side_stream_host_fn");
    if (s != SIDE_OK)
        return s;
    if (fn == NULL)
        return error_set(SIDE_INVALID, "side_stream_host_fn", "fn is NULL");
    return stream->device->ops->host_fn(stream->handle, fn, user, sim_ns);
}

/* ---------------------------------------------------------------- events */

side_status side_event_create(side_device *device, bool timing, side_event **event)
{
    side_status s = device_check(device, "side_event_create");
    side_event *e;

    if (s != SIDE_OK)
        return s;
    if (event == NULL)
        return error_set(SIDE_INVALID, "side_event_create", "event is NULL");
    e = mem_zalloc(1, sizeof(*e));
    if (e == NULL)
        return SIDE_NO_MEMORY;
    s = device->ops->event_create(device->context, timing, &e->handle);
    if (s != SIDE_OK) {
        mem_free(e);
        return s;
    }
    e->device = device;
    *event = e;
    return SIDE_OK;
}

void side_event_destroy(side_event *event)
{
    if (event == NULL || os_fork_generation() != event->device->fork_generation)
        return;
    event->device->ops->event_destroy(event->handle);
    mem_free(event);
}

side_status side_event_record(side_event *event, side_stream *stream)
{
    side_status s = event_check(event, "side_event_record");
    if (s == SIDE_OK)
        s = stream_check(stream, "side_event_record");
    if (s != SIDE_OK)
        return s;
    if (stream->device != event->device)
        return error_set(SIDE_INVALID, "side_event_record", "stream and event are of different devices");
    return event->device->ops->event_record(event->handle, stream->handle);
}

side_status side_event_query(side_event *event)
{
    side_status s = event_check(event, "side_event_query");
    return s == SIDE_OK ? event->device->ops->event_query(event->handle) : s;
}

side_status device_event_wait(side_device *device, dev_event *event, double timeout_s)
{
    side_status s;

    if (!(timeout_s >= 0)) /* a deadline that has passed, perhaps: not "for ever" */
        return error_set(SIDE_INVALID, "event_wait", "timeout_s is %g; it takes 0 (for ever) and more", timeout_s);
    s = device->ops->event_wait(event, timeout_s == 0 || timeout_s > 1e9 ? UINT64_MAX : (uint64_t)(timeout_s * 1e9));
    if (s == SIDE_AGAIN)
        return error_set(SIDE_STUCK, "event_wait", "%s did not finish queued work within %g s", device->props.spec,
                         timeout_s);
    return s;
}

bool device_stream_drain(side_stream *stream, double timeout_s)
{
    const struct side_device_ops *ops = stream->device->ops;
    uint64_t deadline = os_now_ns() + (uint64_t)(timeout_s * 1e9);
    side_status s = side_stream_sync(stream, timeout_s);

    if (s == SIDE_OK || s == SIDE_STUCK || s == SIDE_DEVICE_LOST)
        return s != SIDE_STUCK;
    /* No event to be had: ask. An error says nothing about what is queued. */
    while ((s = ops->stream_query(stream->handle)) != SIDE_OK && s != SIDE_DEVICE_LOST && os_now_ns() < deadline)
        os_sleep_ns(10000);
    return s == SIDE_OK || s == SIDE_DEVICE_LOST;
}

side_status side_event_wait(side_event *event, double timeout_s)
{
    side_status s = event_check(event, "side_event_wait");
    return s == SIDE_OK ? device_event_wait(event->device, event->handle, timeout_s) : s;
}

side_status side_event_elapsed(side_event *begin, side_event *end, double *seconds)
{
    double ns;
    side_status s = event_check(begin, "side_event_elapsed");

    if (s == SIDE_OK)
        s = event_check(end, "side_event_elapsed");
    if (s == SIDE_OK && seconds == NULL)
        return error_set(SIDE_INVALID, "side_event_elapsed", "seconds is NULL");
    if (s == SIDE_OK && begin->device != end->device)
        return error_set(SIDE_INVALID, "side_event_elapsed", "the events are of different devices");
    if (s == SIDE_OK)
        s = begin->device->ops->event_elapsed(begin->handle, end->handle, &ns);
    if (s == SIDE_OK)
        *seconds = ns * 1e-9;
    return s;
}

/* ---------------------------------------------------------------- memory and work */

side_status side_device_alloc(side_device *device, size_t bytes, void **data)
{
    side_status s = device_check(device, "side_device_alloc");
    if (s != SIDE_OK)
        return s;
    if (data == NULL || bytes == 0)
        return error_set(SIDE_INVALID, "side_device_alloc", data == NULL ? "data is NULL" : "bytes is 0");
    return device->ops->alloc(device->context, bytes, data);
}

void side_device_free(side_device *device, void *data)
{
    if (device == NULL || data == NULL || os_fork_generation() != device->fork_generation)
        return;
    device->ops->free(device->context, data);
}

side_status side_memory_get_kind(side_device *device, const void *data, side_memory_kind *kind)
{
    side_status s = device_check(device, "side_memory_get_kind");
    if (s != SIDE_OK)
        return s;
    if (data == NULL || kind == NULL)
        return error_set(SIDE_INVALID, "side_memory_get_kind", "data or kind is NULL");
    return device->ops->memory_kind(device->context, data, kind);
}

side_status side_copy_async(side_stream *stream, side_copy_kind kind, void *dst, const void *src, size_t bytes)
{
    side_status s = stream_check(stream, "side_copy_async");
    if (s != SIDE_OK || bytes == 0)
        return s;
    if (dst == NULL || src == NULL || (unsigned)kind > SIDE_COPY_D2D)
        return error_set(SIDE_INVALID, "side_copy_async",
                         dst == NULL || src == NULL ? "dst or src is NULL" : "unknown kind");
    return stream->device->ops->copy(stream->handle, kind, dst, src, bytes);
}

const char *side_path_name(side_path path)
{
    static const char *const names[SIDE_PATH_COUNT] = {
        [SIDE_PATH_AUTO] = "auto",     [SIDE_PATH_LOOP] = "loop", [SIDE_PATH_BATCH] = "batch",
        [SIDE_PATH_GATHER] = "gather", [SIDE_PATH_PACK] = "pack",
    };
    return (unsigned)path < SIDE_PATH_COUNT ? names[path] : "unknown path";
}

/* *bytes: of all pieces. Empty ones are allowed where the call skips them. */
static side_status pieces_check(side_stream *stream, side_copy_kind kind, const side_piece *pieces, size_t count,
                                bool empty, size_t *bytes, const char *where)
{
    side_status s = stream_check(stream, where);

    *bytes = 0;
    if (s != SIDE_OK || count == 0)
        return s;
    if (pieces == NULL || (unsigned)kind > SIDE_COPY_D2D)
        return error_set(SIDE_INVALID, where, pieces == NULL ? "pieces is NULL" : "unknown kind");
    for (size_t i = 0; i < count; i++) {
        if (pieces[i].bytes == 0 && empty)
            continue;
        if (pieces[i].dst == NULL || pieces[i].src == NULL || pieces[i].bytes == 0)
            return error_set(SIDE_INVALID, where, "piece %zu has no dst, no src or no bytes", i);
        *bytes += pieces[i].bytes;
    }
    return SIDE_OK;
}

side_status side_copy_batch(side_stream *stream, side_copy_kind kind, const side_piece *pieces, size_t count)
{
    size_t bytes;
    side_status s = pieces_check(stream, kind, pieces, count, false, &bytes, "side_copy_batch");

    if (s != SIDE_OK || count == 0)
        return s;
    return stream->device->ops->copy_blocks(stream->handle, kind, pieces, count, SIDE_PATH_BATCH);
}

/* By the path that the machine profile names. Where the device refuses it for this memory or stream, nothing was queued, and a batch goes everywhere. */
static side_status copy_auto(side_stream *stream, side_copy_kind kind, const side_piece *pieces, size_t count,
                             size_t bytes)
{
    const side_machine *machine = machine_of(stream->device);
    const side_path path = side_machine_path_for(machine, kind, bytes / count, count);
    side_status s = SIDE_UNSUPPORTED;

    if (path != SIDE_PATH_BATCH)
        s = stream->device->ops->copy_blocks(stream->handle, kind, pieces, count, path);
    if (s != SIDE_UNSUPPORTED && s != SIDE_INVALID)
        return s;
    return stream->device->ops->copy_blocks(stream->handle, kind, pieces, count, SIDE_PATH_BATCH);
}

side_status side_copy_blocks(side_stream *stream, side_copy_kind kind, const side_piece *pieces, size_t count,
                             side_path path)
{
    size_t bytes;
    side_status s = pieces_check(stream, kind, pieces, count, true, &bytes, "side_copy_blocks");

    if (s == SIDE_OK && (unsigned)path >= SIDE_PATH_COUNT)
        return error_set(SIDE_INVALID, "side_copy_blocks", "unknown path %d", (int)path);
    if (s != SIDE_OK || bytes == 0)
        return s;
    if (path == SIDE_PATH_AUTO)
        return copy_auto(stream, kind, pieces, count, bytes);
    return stream->device->ops->copy_blocks(stream->handle, kind, pieces, count, path);
}

side_status side_memset_async(side_stream *stream, void *dst, int value, size_t bytes)
{
    side_status s = stream_check(stream, "side_memset_async");
    if (s != SIDE_OK || bytes == 0)
        return s;
    if (dst == NULL)
        return error_set(SIDE_INVALID, "side_memset_async", "dst is NULL");
    return stream->device->ops->set(stream->handle, dst, value, bytes);
}

side_status side_op_async(side_stream *stream, const side_op *op)
{
    size_t in_bytes[2], out_bytes;
    side_status s = stream_check(stream, "side_op_async");
    side_op o = SIDE_OP_INIT;

    if (s == SIDE_OK)
        s = op != NULL ? options_copy(&o, sizeof(o), op, sizeof(o), "side_op_async")
                       : error_set(SIDE_INVALID, "side_op_async", "op is NULL");
    if (s == SIDE_OK)
        s = side_op_bytes(&o, in_bytes, &out_bytes);
    if (s != SIDE_OK)
        return s;
    if ((in_bytes[0] != 0 && o.in[0] == NULL) || (in_bytes[1] != 0 && o.in[1] == NULL) ||
        (out_bytes != 0 && o.out == NULL))
        return error_set(SIDE_INVALID, "side_op_async", "%s: a pointer that the op needs is NULL", side_op_name(o.id));
    if (in_bytes[0] == 0 && out_bytes == 0 && o.id != SIDE_OP_SPIN)
        return SIDE_OK;
    return stream->device->ops->op(stream->handle, &o);
}
