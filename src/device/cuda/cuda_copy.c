/* SPDX-License-Identifier: MIT */
#include "cuda_impl.h"

#include "error.h"

static CUdeviceptr address(const void *data)
{
    return (CUdeviceptr)(uintptr_t)data;
}

static CUresult copy_call(dev_stream *stream, side_copy_kind kind, void *dst, const void *src, size_t bytes)
{
    const struct cu_api *cu = stream->context->cu;

    if (kind == SIDE_COPY_H2D)
        return cu->cuMemcpyHtoDAsync(address(dst), src, bytes, stream->handle);
    if (kind == SIDE_COPY_D2H)
        return cu->cuMemcpyDtoHAsync(dst, address(src), bytes, stream->handle);
    return cu->cuMemcpyDtoDAsync(address(dst), address(src), bytes, stream->handle);
}

/* How much of the `bytes` at `host` lies in the registration that `host` is in; 0: it is in none. */
static size_t registered_bytes(const dev_context *context, const void *host, size_t bytes)
{
    CUdeviceptr start = 0;
    size_t size = 0;
    CUpointer_attribute attributes[2] = {CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE};
    void *values[2] = {&start, &size};

    if (context->cu->cuPointerGetAttributes(2, attributes, values, address(host)) != CUDA_SUCCESS)
        return 0;
    if (start > address(host) || start + size <= address(host))
        return 0;
    size -= (size_t)(address(host) - start);
    return size < bytes ? size : bytes;
}

/* The driver refuses a copy whose host side lies in several registrations (memory that was pinned in overlapping parts, say), though all of it is
 * pinned. Then it goes registration by registration. CUDA_ERROR_INVALID_VALUE where that is not the reason; nothing is queued then. */
static CUresult copy_split(dev_stream *stream, side_copy_kind kind, void *dst, const void *src, size_t bytes)
{
    const char *host = kind == SIDE_COPY_H2D ? src : dst;
    CUresult r = CUDA_SUCCESS;
    size_t part, parts = 0;

    for (size_t done = 0; done < bytes; done += part, parts++) {
        part = registered_bytes(stream->context, host + done, bytes - done);
        if (part == 0)
            return CUDA_ERROR_INVALID_VALUE;
    }
    if (parts < 2)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t done = 0; done < bytes && r == CUDA_SUCCESS; done += part) {
        part = registered_bytes(stream->context, host + done, bytes - done);
        r = part != 0 ? copy_call(stream, kind, (char *)dst + done, (const char *)src + done, part)
                      : CUDA_ERROR_INVALID_VALUE;
    }
    return r;
}

/* Entered. */
static side_status copy_one(dev_stream *stream, side_copy_kind kind, void *dst, const void *src, size_t bytes)
{
    static const char *const calls[] = {"cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync"};
    CUresult r;

    if (bytes == 0)
        return SIDE_OK;
    r = copy_call(stream, kind, dst, src, bytes);
    if (r == CUDA_ERROR_INVALID_VALUE && kind != SIDE_COPY_D2D)
        r = copy_split(stream, kind, dst, src, bytes);
    return cuda_status(stream->context, r, calls[kind], "%p <- %p, %zu bytes, stream %p", dst, src, bytes,
                       (void *)stream->handle);
}

side_status cuda_copy(dev_stream *stream, side_copy_kind kind, void *dst, const void *src, size_t bytes)
{
    side_status status = cuda_enter(stream->context);

    if (status != SIDE_OK)
        return status;
    status = copy_one(stream, kind, dst, src, bytes);
    cuda_leave(stream->context);
    return status;
}

/* ---------------------------------------------------------------- batches */

#define BATCH_MOST 512 /* pieces a driver call: three arrays of it on the stack */

/* The driver takes a batch on any stream but the legacy one, and not into a graph. Entered. */
static bool can_batch(dev_stream *stream)
{
    const dev_context *context = stream->context;
    CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;

    if (context->cu->cuMemcpyBatchAsync == NULL || atomic_load_explicit(&context->no_batch, memory_order_relaxed))
        return false;
    if (stream->handle == NULL || (uintptr_t)stream->handle == CU_HANDLE_LEGACY)
        return false;
    return context->cu->cuStreamIsCapturing(stream->handle, &capture) == CUDA_SUCCESS &&
           capture == CU_STREAM_CAPTURE_STATUS_NONE;
}

/* Queues the first pieces, at most BATCH_MOST that are not empty, as one driver call; *used: how many pieces that took. */
static CUresult batch_some(dev_stream *stream, side_copy_kind kind, const side_piece *pieces, size_t count, size_t *used)
{
    CUdeviceptr dst[BATCH_MOST], src[BATCH_MOST];
    size_t bytes[BATCH_MOST], n = 0, i = 0, first = 0, failed = SIZE_MAX;
    const struct cu_mem_location host = {CU_MEM_LOCATION_TYPE_HOST, 0};
    const struct cu_mem_location device = {CU_MEM_LOCATION_TYPE_DEVICE, stream->context->device};
    CUmemcpyAttributes attributes = {CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, kind == SIDE_COPY_H2D ? host : device,
                                     kind == SIDE_COPY_D2H ? host : device, 0};

    for (; i < count && n < BATCH_MOST; i++) {
        if (pieces[i].bytes == 0)
            continue; /* the driver takes them for an error */
        dst[n] = address(pieces[i].dst);
        src[n] = address(pieces[i].src);
        bytes[n++] = pieces[i].bytes;
    }
    *used = i;
    if (n == 0)
        return CUDA_SUCCESS;
    return stream->context->cu->cuMemcpyBatchAsync(dst, src, bytes, n, &attributes, &first, 1, &failed, stream->handle);
}

side_status cuda_copy_queue(dev_stream *stream, side_copy_kind kind, const side_piece *pieces, size_t count,
                            side_path path)
{
    dev_context *context = stream->context;
    side_status status = SIDE_OK;
    size_t done = 0, used = 0;

    if (path == SIDE_PATH_BATCH && count > 1 && can_batch(stream))
        while (done < count && status == SIDE_OK) {
            CUresult r = batch_some(stream, kind, pieces + done, count - done, &used);
            if (r == CUDA_ERROR_NOT_SUPPORTED) {
                /* Nothing of this call was queued: the rest goes one by one. */
                atomic_store_explicit(&context->no_batch, true, memory_order_relaxed);
                log_message(SIDE_LEVEL_INFO, "cuda", "the driver does not batch copies here; they go one by one");
                break;
            }
            if (r == CUDA_ERROR_INVALID_VALUE)
                break; /* a piece may lie in several registrations: one by one, again from here on, which changes nothing */
            status = cuda_status(context, r, "cuMemcpyBatchAsync", "%zu of %zu pieces, stream %p", used, count,
                                 (void *)stream->handle);
            done += used;
        }
    for (; done < count && status == SIDE_OK; done++)
        status = copy_one(stream, kind, pieces[done].dst, pieces[done].src, pieces[done].bytes);
    return status;
}

/* ---------------------------------------------------------------- the rest of a stream's queue */

side_status cuda_set(dev_stream *stream, void *dst, int value, size_t bytes)
{
    dev_context *context = stream->context;
    side_status status = bytes != 0 ? cuda_enter(context) : SIDE_OK;

    if (status != SIDE_OK || bytes == 0)
        return status;
    status = cuda_status(context,
                         context->cu->cuMemsetD8Async(address(dst), (unsigned char)value, bytes, stream->handle),
                         "cuMemsetD8Async", "%p, %zu bytes, stream %p", dst, bytes, (void *)stream->handle);
    cuda_leave(context);
    return status;
}

side_status cuda_host_fn(dev_stream *stream, side_host_fn *fn, void *user, uint64_t sim_ns)
{
    dev_context *context = stream->context;
    side_status status = cuda_enter(context);

    (void)sim_ns;
    if (status != SIDE_OK)
        return status;
    status = cuda_status(context, context->cu->cuLaunchHostFunc(stream->handle, fn, user), "cuLaunchHostFunc",
                         "stream %p", (void *)stream->handle);
    cuda_leave(context);
    return status;
}
