/* SPDX-License-Identifier: MIT
 *
 * A fence: "everything queued so far by whoever used this memory", recorded by a stream or by the host, waited for by a stream or by the host.
 * The only place where one access is ordered after another: slots, windows and rings all wait through fence_wait.
 *
 * A fence is owned by one user at a time (the slot's state machine sees to that), so it needs no lock of its own.
 */
#ifndef CORE_FENCE_H
#define CORE_FENCE_H

#include "device.h"

struct fence {
    dev_event *event;  /* made at first use, kept */
    uint32_t stream;   /* number of the stream that recorded; 0: the host, whose work is done when it records */
    bool recorded;     /* event covers something that may be pending */
    uint64_t clock_ns; /* host clock at the record: handed to whoever waits (virtual clocks) */
#ifdef SIDE_TESTING
    side_stream *tail; /* that recorded, for widened waits */
#endif
};

/* Names a wait in the tests: ring * 2 + (1: take, 0: acquire). */
enum fence_site {
    SITE_NONE = -1,
    SITE_HOST_IN = 0, /* host ring of the source: acquire = fill waits for H2D; take = H2D waits for fill (host work: nothing to wait for) */
    SITE_DEVICE_IN = 2,    /* device ring of items: acquire = H2D waits for compute; take = compute waits for H2D */
    SITE_DEVICE_OUT = 4,   /* device ring of results: acquire = compute waits for D2H; take = D2H waits for compute */
    SITE_HOST_OUT = 6,     /* host ring of results: acquire = D2H waits for the sink; take = sink waits for D2H */
    SITE_WINDOW = 8,       /* the host's bound on what is queued ahead */
    SITE_FEED_HOST = 10,   /* a feeder's host ring: as SITE_HOST_IN */
    SITE_FEED_DEVICE = 12, /* a feeder's device slots: acquire = H2D waits for readers, or for who used the memory before; take = a reader waits for H2D */
    SITE_FEED_COPIED = 14, /* the host waits until the device has read the caller's memory */
    SITE_LOAD_SLOT = 16,   /* a load's slot: read into again, waits for its copy */
    SITE_LOAD_READY = 17,  /* whoever uses a part waits for the copy that was queued last of it */
    SITE_COUNT = 18
};

/* stream NULL: the host, now. On failure the fence is as before: the caller must drain, since what was queued is not covered. */
side_status fence_record(struct fence *fence, side_device *device, side_stream *stream);
/* `stream` (NULL: the host, at most timeout_s, then SIDE_STUCK) goes on after the fence. Nothing is queued where the same stream recorded it. */
side_status fence_wait(struct fence *fence, side_device *device, side_stream *stream, double timeout_s, int site);
/* SIDE_OK or SIDE_AGAIN. */
side_status fence_query(const struct fence *fence, side_device *device);
void fence_finish(struct fence *fence, side_device *device);

#ifdef SIDE_TESTING
/* Proof that the tests see every wait: drop it, or widen it to the tail of the stream that it waits for. */
enum fence_mutation { MUTATE_NONE, MUTATE_DROP, MUTATE_WIDEN };
void fence_mutate(enum fence_mutation mutation, int site);
#endif

#endif
