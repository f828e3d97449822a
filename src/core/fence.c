/* SPDX-License-Identifier: MIT */
#include "fence.h"

#include <stdatomic.h>

#ifdef SIDE_TESTING
static atomic_int mutation = MUTATE_NONE, mutated_site = SITE_NONE;

void fence_mutate(enum fence_mutation m, int site)
{
    atomic_store(&mutation, m);
    atomic_store(&mutated_site, site);
}

/* Returns true where the wait is to be left out. */
static bool mutate(struct fence *fence, int site)
{
    if (site == SITE_NONE || site != atomic_load(&mutated_site))
        return false;
    if (atomic_load(&mutation) == MUTATE_WIDEN && fence->tail != NULL)
        fence->tail->device->ops->event_record(fence->event, fence->tail->handle);
    return atomic_load(&mutation) == MUTATE_DROP;
}
#else
static bool mutate(struct fence *fence, int site)
{
    (void)fence;
    (void)site;
    return false;
}
#endif

side_status fence_record(struct fence *fence, side_device *device, side_stream *stream)
{
    side_status s = SIDE_OK;

    if (stream != NULL && fence->event == NULL)
        s = device->ops->event_create(device->context, false, &fence->event);
    if (s == SIDE_OK && stream != NULL)
        s = device->ops->event_record(fence->event, stream->handle);
    if (s != SIDE_OK)
        return s;
    fence->stream = stream != NULL ? stream->number : 0;
    fence->recorded = stream != NULL;
    if (device->props.simulated) /* real clocks need no handing over */
        fence->clock_ns = device->ops->now(device->context);
#ifdef SIDE_TESTING
    fence->tail = stream;
#endif
    return SIDE_OK;
}

side_status fence_wait(struct fence *fence, side_device *device, side_stream *stream, double timeout_s, int site)
{
    side_status s;

    if (fence->clock_ns != 0)
        device->ops->clock_join(device->context, fence->clock_ns);
    if (!fence->recorded || mutate(fence, site))
        return SIDE_OK;
    if (stream != NULL) /* a stream is in order with itself */
        return stream->number == fence->stream ? SIDE_OK : device->ops->stream_wait(stream->handle, fence->event);
    s = device_event_wait(device, fence->event, timeout_s);
    return s;
}

side_status fence_query(const struct fence *fence, side_device *device)
{
    return fence->recorded ? device->ops->event_query(fence->event) : SIDE_OK;
}

void fence_finish(struct fence *fence, side_device *device)
{
    if (fence->event != NULL)
        device->ops->event_destroy(fence->event);
    fence->event = NULL;
    fence->recorded = false;
}
