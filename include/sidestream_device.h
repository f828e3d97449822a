/* SPDX-License-Identifier: MIT
 *
 * Implementers' API: the op table of a device. Unstable; SIDE_DEVICE_ABI changes with it.
 *
 * A device is one const, complete table; an operation it lacks returns SIDE_UNSUPPORTED. Handles are the implementer's; core checks arguments
 * (non-NULL, ranges, fork) before it calls, so an implementation asserts instead. All ops may be called from any thread. Failures leave their
 * cause with error_set() (src/base/error.h). No op calls back into core. "Queues" means: returns without waiting for the device.
 */
#ifndef SIDESTREAM_DEVICE_H
#define SIDESTREAM_DEVICE_H

#include "sidestream.h"

#define SIDE_DEVICE_ABI 3

typedef struct dev_stream dev_stream; /* defined by each device */
typedef struct dev_event dev_event;
typedef struct dev_context dev_context; /* an opened device */

struct side_device_ops {
    uint32_t abi;
    const char *kind; /* "cuda", "sim": the spec's prefix */

    /* How many devices there are; 0 with the reason in why. Makes no context. */
    unsigned (*count)(char *why, size_t why_bytes);
    /* `args`: what follows "kind:" in the spec, "" where nothing does. Blocks. Opening one device twice gives two contexts that share memory. */
    side_status (*open)(const char *args, dev_context **context);
    /* All handles made from it are gone. */
    void (*close)(dev_context *context);
    side_status (*props)(dev_context *context, side_device_props *props);
    side_status (*link)(dev_context *context, side_link *link);
    side_status (*memory)(dev_context *context, size_t *free_bytes, size_t *total_bytes);
    /* The numbers that a device of software works by; sets those alone, not whose they are. SIDE_UNSUPPORTED: hardware, which is measured. */
    side_status (*model)(dev_context *context, side_machine *machine);

    /* Host clock in ns. sim: the calling thread's virtual clock. clock_join: the calling thread learnt of something that happened at `ns`
     * (handed over by another thread): a virtual clock moves there if it is behind; real clocks do nothing. */
    uint64_t (*now)(dev_context *context);
    void (*clock_join)(dev_context *context, uint64_t ns);

    side_status (*alloc)(dev_context *context, size_t bytes, void **data);
    void (*free)(dev_context *context, void *data); /* may block for the device */
    /* Pins mapped host memory in place. SIDE_INVALID: the device insists on whole pages; SIDE_UNSUPPORTED: it cannot; SIDE_DEVICE_ERROR: refused. */
    side_status (*host_register)(dev_context *context, void *data, size_t bytes, bool read_only);
    side_status (*host_unregister)(dev_context *context, void *data);
    /* Pinned memory from the driver's own allocator: the fall-back where registering is refused. */
    side_status (*host_alloc)(dev_context *context, size_t bytes, void **data);
    void (*host_free)(dev_context *context, void *data);
    side_status (*memory_kind)(dev_context *context, const void *data, side_memory_kind *kind);

    side_status (*stream_create)(dev_context *context, dev_stream **stream);
    side_status (*stream_wrap)(dev_context *context, void *native, dev_stream **stream);
    void (*stream_destroy)(dev_stream *stream); /* queued work goes on */
    void *(*stream_native)(dev_stream *stream);
    side_status (*stream_wait)(dev_stream *stream, dev_event *event); /* queues; captures the event's state now */
    /* SIDE_AGAIN while work is queued or running. */
    side_status (*stream_query)(dev_stream *stream);
    /* Into a graph, or about to be refused because of one; asking ends no capture. Devices without graphs say false. */
    side_status (*stream_is_capturing)(dev_stream *stream, bool *capturing);

    side_status (*event_create)(dev_context *context, bool timing, dev_event **event);
    void (*event_destroy)(dev_event *event); /* also while recorded and pending */
    side_status (*event_record)(dev_event *event, dev_stream *stream);
    side_status (*event_query)(dev_event *event); /* SIDE_AGAIN; never-recorded is done */
    /* Blocks at most timeout_ns (UINT64_MAX: for ever): SIDE_AGAIN on time-out. sim: in virtual time, at once. */
    side_status (*event_wait)(dev_event *event, uint64_t timeout_ns);
    side_status (*event_elapsed)(dev_event *begin, dev_event *end, double *ns);

    side_status (*copy)(dev_stream *stream, side_copy_kind kind, void *dst, const void *src, size_t bytes);
    /* `path`: LOOP to PACK, never AUTO. Pieces may be empty. SIDE_UNSUPPORTED: not this way on this device or stream; SIDE_INVALID: not with this memory
     * (GATHER and PACK want it pinned). Nothing is queued after either, so that core may take another path. The array is the caller's again on return. */
    side_status (*copy_blocks)(dev_stream *stream, side_copy_kind kind, const side_piece *pieces, size_t count,
                               side_path path);
    side_status (*set)(dev_stream *stream, void *dst, int value, size_t bytes);
    side_status (*op)(dev_stream *stream,
                      const side_op *op); /* sizes are checked; SIDE_UNSUPPORTED where there is no kernel */
    side_status (*host_fn)(dev_stream *stream, side_host_fn *fn, void *user, uint64_t sim_ns);
};

#endif
