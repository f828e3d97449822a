/* SPDX-License-Identifier: MIT
 *
 * The calls of the op table that queue or wait (calls.c; copies.c), and how each call begins and ends (sim.c). */
#ifndef DEVICE_SIM_CALLS_H
#define DEVICE_SIM_CALLS_H

#include "sidestream_device.h"

/* Counts the call and takes the lock; on a scripted fault returns it without the lock. */
side_status sim_enter(dev_context *context, const char *where);
/* Drops the lock; returns `status`. */
side_status sim_leave(dev_context *context, side_status status);

side_status sim_stream_create(dev_context *context, dev_stream **stream);
side_status sim_stream_wrap(dev_context *context, void *native, dev_stream **stream);
void sim_stream_destroy(dev_stream *stream);
void *sim_stream_native(dev_stream *stream);
side_status sim_stream_wait(dev_stream *stream, dev_event *event);
side_status sim_stream_query(dev_stream *stream);
side_status sim_stream_is_capturing(dev_stream *stream, bool *capturing);

side_status sim_event_create(dev_context *context, bool timing, dev_event **event);
void sim_event_destroy(dev_event *event);
side_status sim_event_record(dev_event *event, dev_stream *stream);
side_status sim_event_query(dev_event *event);
side_status sim_event_wait(dev_event *event, uint64_t timeout_ns);
side_status sim_event_elapsed(dev_event *begin, dev_event *end, double *ns);

side_status sim_copy(dev_stream *stream, side_copy_kind kind, void *dst, const void *src, size_t bytes);
side_status sim_copy_blocks(dev_stream *stream, side_copy_kind kind, const side_piece *pieces, size_t count,
                            side_path path);
side_status sim_set(dev_stream *stream, void *dst, int value, size_t bytes);
side_status sim_op(dev_stream *stream, const side_op *op);
side_status sim_host_fn(dev_stream *stream, side_host_fn *fn, void *user, uint64_t sim_ns);

#endif
