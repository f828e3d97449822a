/* SPDX-License-Identifier: MIT
 *
 * Devices, streams and events as the rest of core sees them: thin, checked calls through the op table. Core makes every device call through this
 * file, so that fork checks, poisoning and logging stand in one place.
 */
#ifndef CORE_DEVICE_H
#define CORE_DEVICE_H

#include "sidestream_device.h"

#include <pthread.h>
#include <stdatomic.h>

struct side_device {
    const struct side_device_ops *ops;
    dev_context *context;
    unsigned fork_generation;
    side_device_props props; /* as of open; constant */
    pthread_mutex_t mutex;   /* guards pool (made at first use) */
    side_pool *pool;
    _Atomic(struct pin_table *) pins; /* of side_memory_pin; made at first use */
    atomic_uint streams_made;         /* numbers for logs */
    pthread_mutex_t machine_mutex;    /* held while the profile is read, so that it is read once */
    _Atomic(side_machine *) machine;  /* made at first use, then constant */
};

struct side_stream {
    side_device *device;
    dev_stream *handle;
    uint32_t number;
};

struct side_event {
    side_device *device;
    dev_event *handle;
};

/* SIDE_INVALID for NULL, SIDE_FORKED in a child; else SIDE_OK. */
side_status device_check(const side_device *device, const char *where);

/* Waits on the host for an event of this device: SIDE_STUCK after timeout_s (0: for ever). */
side_status device_event_wait(side_device *device, dev_event *event, double timeout_s);

/* Waits on the host for all that is queued on the stream, events or not. False: after timeout_s it is not known to be done, nor the device to be lost. */
bool device_stream_drain(side_stream *stream, double timeout_s);

#endif
