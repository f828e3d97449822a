/* SPDX-License-Identifier: MIT */
#include "cuda_impl.h"

#include "alloc.h"
#include "error.h"
#include "os.h"

/* ---------------------------------------------------------------- streams */

static dev_stream *stream_new(dev_context *context, CUstream handle, bool owned)
{
    dev_stream *s = mem_zalloc(1, sizeof(*s));

    if (s != NULL) {
        s->context = context;
        s->handle = handle;
        s->owned = owned;
    }
    return s;
}

side_status cuda_stream_create(dev_context *context, dev_stream **stream)
{
    CUstream handle = NULL;
    dev_stream *s = NULL;
    side_status status = cuda_enter(context);

    if (status != SIDE_OK)
        return status;
    status = cuda_status(context, context->cu->cuStreamCreate(&handle, CU_STREAM_NON_BLOCKING), "cuStreamCreate",
                         "non-blocking");
    if (status == SIDE_OK) {
        s = stream_new(context, handle, true);
        if (s == NULL) {
            context->cu->cuStreamDestroy(handle);
            status = SIDE_NO_MEMORY;
        }
    }
    cuda_leave(context);
    if (status == SIDE_OK)
        *stream = s;
    return status;
}

static bool is_legacy(CUstream handle)
{
    return handle == NULL || (uintptr_t)handle == CU_HANDLE_LEGACY;
}

side_status cuda_stream_wrap(dev_context *context, void *native, dev_stream **stream)
{
    CUcontext of_stream = NULL;
    side_status status;

    if ((uintptr_t)native == CU_HANDLE_PER_THREAD)
        return error_set(SIDE_INVALID, "side_stream_wrap",
                         "the per-thread default stream is another one in each thread; pass a stream of its own");
    if (!is_legacy(native)) {
        status = cuda_enter(context);
        if (status != SIDE_OK)
            return status;
        CUresult r = context->cu->cuStreamGetCtx(native, &of_stream);
        cuda_leave(context);
        /* It fails for streams of green contexts, which are usable. */
        if (cuda_is_lost(r))
            return cuda_status(context, r, "cuStreamGetCtx", "%p", native);
        if (r == CUDA_SUCCESS && of_stream != context->context)
            return error_set(SIDE_INVALID, "side_stream_wrap",
                             "stream %p is not of device %d's primary context; open the device that it belongs to",
                             native, context->props.ordinal);
    }
    dev_stream *s = stream_new(context, native, false);
    if (s == NULL)
        return SIDE_NO_MEMORY;
    *stream = s;
    return SIDE_OK;
}

void cuda_stream_destroy(dev_stream *stream)
{
    if (stream == NULL)
        return;
    dev_context *context = stream->context;
    const bool entered = cuda_enter(context) == SIDE_OK; /* a lost context: the driver still forgets its handles */
    blas_stream_finish(stream);
    if (stream->owned)
        context->cu->cuStreamDestroy(stream->handle);
    if (entered)
        cuda_leave(context);
    mem_free(stream);
}

void *cuda_stream_native(dev_stream *stream)
{
    return stream->handle;
}

side_status cuda_stream_wait(dev_stream *stream, dev_event *event)
{
    dev_context *context = stream->context;
    side_status status = cuda_enter_to_queue(context, stream->handle);

    if (status != SIDE_OK)
        return status;
    status = cuda_status(context, context->cu->cuStreamWaitEvent(stream->handle, event->handle, 0), "cuStreamWaitEvent",
                         "stream %p, event %p", (void *)stream->handle, (void *)event->handle);
    cuda_leave(context);
    return status;
}

side_status cuda_stream_query(dev_stream *stream)
{
    dev_context *context = stream->context;
    side_status status = cuda_enter(context);

    if (status != SIDE_OK)
        return status;
    status = cuda_status(context, context->cu->cuStreamQuery(stream->handle), "cuStreamQuery", "stream %p",
                         (void *)stream->handle);
    cuda_leave(context);
    return status;
}

side_status cuda_stream_is_capturing(dev_stream *stream, bool *capturing)
{
    dev_context *context = stream->context;
    CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
    side_status status = cuda_enter_to_queue(context, stream->handle);

    if (status != SIDE_OK)
        return status;
    CUresult r = context->cu->cuStreamIsCapturing(stream->handle, &capture);
    /* The legacy stream's answer while a stream that synchronises with it is captured; that capture goes on. */
    const bool implicit = r == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    if (!implicit)
        status = cuda_status(context, r, "cuStreamIsCapturing", "stream %p", (void *)stream->handle);
    cuda_leave(context);
    if (status == SIDE_OK)
        *capturing = implicit || capture != CU_STREAM_CAPTURE_STATUS_NONE;
    return status;
}

/* ---------------------------------------------------------------- events */

side_status cuda_event_create(dev_context *context, bool timing, dev_event **event)
{
    dev_event *e = mem_zalloc(1, sizeof(*e));
    side_status status = e != NULL ? cuda_enter(context) : SIDE_NO_MEMORY;

    if (status == SIDE_OK) {
        e->context = context;
        e->timing = timing;
        status = cuda_status(context,
                             context->cu->cuEventCreate(&e->handle, timing ? CU_EVENT_DEFAULT : CU_EVENT_DISABLE_TIMING),
                             "cuEventCreate", "timing %d", timing);
        cuda_leave(context);
    }
    if (status == SIDE_OK)
        *event = e;
    else
        mem_free(e);
    return status;
}

void cuda_event_destroy(dev_event *event)
{
    if (event == NULL)
        return;
    const bool entered = cuda_enter(event->context) == SIDE_OK;
    event->context->cu->cuEventDestroy(event->handle);
    if (entered)
        cuda_leave(event->context);
    mem_free(event);
}

side_status cuda_event_record(dev_event *event, dev_stream *stream)
{
    dev_context *context = event->context;
    side_status status = cuda_enter_to_queue(context, stream->handle);

    if (status != SIDE_OK)
        return status;
    status = cuda_status(context, context->cu->cuEventRecord(event->handle, stream->handle), "cuEventRecord",
                         "event %p, stream %p", (void *)event->handle, (void *)stream->handle);
    cuda_leave(context);
    return status;
}

static side_status query(dev_event *event)
{
    return cuda_status(event->context, event->context->cu->cuEventQuery(event->handle), "cuEventQuery", "event %p",
                       (void *)event->handle);
}

side_status cuda_event_query(dev_event *event)
{
    side_status status = cuda_enter(event->context);

    if (status != SIDE_OK)
        return status;
    status = query(event);
    cuda_leave(event->context);
    return status;
}

/* Polled: cuEventSynchronize knows no time limit. Spun on for as long as a wait for a copy or a step takes as a rule, since waking from a sleep comes up to
 * 100 us late (timer slack); after that the sleeps grow with the time waited, so that waking late costs a few percent at most. */
#define SPIN_NS       1000000
#define SLEEP_MOST_NS 500000

side_status cuda_event_wait(dev_event *event, uint64_t timeout_ns)
{
    const uint64_t begin = os_now_ns();
    side_status status = cuda_enter(event->context);

    if (status != SIDE_OK)
        return status;
    while ((status = query(event)) == SIDE_AGAIN) {
        const uint64_t spent = os_now_ns() - begin;
        uint64_t sleep_ns = spent / 64 < SLEEP_MOST_NS ? spent / 64 : SLEEP_MOST_NS;
        if (spent >= timeout_ns)
            break;
        if (spent < SPIN_NS)
            os_relax();
        else
            os_sleep_ns(sleep_ns < timeout_ns - spent ? sleep_ns : timeout_ns - spent);
    }
    cuda_leave(event->context);
    return status;
}

side_status cuda_event_elapsed(dev_event *begin, dev_event *end, double *ns)
{
    dev_context *context = begin->context;
    float ms = 0;

    if (!begin->timing || !end->timing)
        return error_set(SIDE_STATE, "side_event_elapsed", "an event was made without timing");
    side_status status = cuda_enter(context);
    if (status != SIDE_OK)
        return status;
    CUresult r = context->cu->cuEventElapsedTime(&ms, begin->handle, end->handle);
    if (r == CUDA_ERROR_NOT_READY || r == CUDA_ERROR_INVALID_HANDLE)
        status = error_set_device(SIDE_STATE, "cuEventElapsedTime", r, "an event is not %s yet",
                                  r == CUDA_ERROR_NOT_READY ? "done" : "recorded");
    else
        status = cuda_status(context, r, "cuEventElapsedTime", "%p, %p", (void *)begin->handle, (void *)end->handle);
    cuda_leave(context);
    if (status == SIDE_OK)
        *ns = (double)ms * 1e6;
    return status;
}
