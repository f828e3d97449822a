/* SPDX-License-Identifier: MIT
 *
 * Matmul by cuBLAS. One handle a context: creating one takes long and much memory. A handle has one stream and one workspace at a time and cuBLAS
 * would use its own workspace on every stream, which is a race between streams; so each of our streams has a workspace of its own, and both are
 * set before each product, under the context's lock. Queueing a product takes microseconds, so the lock is not felt. */
#include "cuda_impl.h"

#include "alloc.h"
#include "error.h"

/* What NVIDIA recommends: 32 MiB from Hopper on, 4 MiB before. */
static size_t workspace_bytes(const dev_context *context)
{
    return context->props.compute_major >= 9 ? (size_t)32 << 20 : (size_t)4 << 20;
}

static side_status blas_status(dev_context *context, cublasStatus_t result, const char *call, const side_op *op)
{
    side_status status = SIDE_DEVICE_ERROR;

    if (result == BLAS_OK)
        return SIDE_OK;
    if (result == BLAS_ALLOC_FAILED)
        status = SIDE_NO_DEVICE_MEMORY;
    else if (result == BLAS_ARCH_MISMATCH || result == BLAS_NOT_SUPPORTED)
        status = SIDE_UNSUPPORTED;
    else if (result == BLAS_EXECUTION_FAILED || result == BLAS_NOT_INITIALIZED) {
        /* it hides the driver's error; a lost context would show again here */
        size_t free_bytes, total_bytes;
        CUresult r = context->cu->cuMemGetInfo(&free_bytes, &total_bytes);
        if (r != CUDA_SUCCESS)
            return cuda_status(context, r, call, "cuBLAS status %d", (int)result);
    }
    return error_set_device(status, call, result, "%s(%llu x %llu x %llu): cuBLAS status %d", call,
                            (unsigned long long)op->dim[0], (unsigned long long)op->dim[1],
                            (unsigned long long)op->dim[2], (int)result);
}

void blas_init(dev_context *context)
{
    pthread_mutex_init(&context->blas.mutex, NULL);
}

static void workspace_free(dev_context *context, struct cuda_workspace *w)
{
    if (w == NULL)
        return;
    if (w->data != 0)
        context->cu->cuMemFree(w->data);
    if (w->last_use != NULL)
        context->cu->cuEventDestroy(w->last_use);
    mem_free(w);
}

static void workspaces_free(dev_context *context, struct cuda_workspace *w)
{
    while (w != NULL) {
        struct cuda_workspace *next = w->next;
        workspace_free(context, w);
        w = next;
    }
}

void blas_finish(dev_context *context)
{
    struct cuda_blas *b = &context->blas;

    workspaces_free(context, b->idle);
    workspaces_free(context, b->kept);
    b->idle = b->kept = NULL;
    if (b->handle != NULL)
        b->api->cublasDestroy_v2(b->handle);
    b->handle = NULL;
    pthread_mutex_destroy(&b->mutex);
}

void blas_stream_finish(dev_stream *stream)
{
    dev_context *context = stream->context;
    struct cuda_workspace *w = stream->workspace;

    if (w == NULL)
        return;
    pthread_mutex_lock(&context->blas.mutex);
    struct cuda_workspace **list = w->in_graph ? &context->blas.kept : &context->blas.idle;
    w->next = *list;
    *list = w;
    stream->workspace = NULL;
    pthread_mutex_unlock(&context->blas.mutex);
}

/* Locked, entered; allocating is let through while a graph is captured. */
static side_status workspace_new(dev_context *context, struct cuda_workspace **workspace)
{
    struct cuda_workspace *w = mem_zalloc(1, sizeof(*w));

    if (w == NULL)
        return SIDE_NO_MEMORY;
    w->bytes = workspace_bytes(context);
    side_status status = cuda_status(context, context->cu->cuEventCreate(&w->last_use, CU_EVENT_DISABLE_TIMING),
                                     "cuEventCreate", "matmul");
    if (status == SIDE_OK)
        status = cuda_status(context, context->cu->cuMemAlloc(&w->data, w->bytes), "cuMemAlloc",
                             "%zu bytes of workspace for matmul", w->bytes);
    if (status != SIDE_OK)
        workspace_free(context, w);
    if (status == SIDE_OK)
        *workspace = w;
    return status;
}

/* Also when the driver does not tell: the safe side. */
static bool is_capturing(dev_stream *stream)
{
    CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
    return stream->context->cu->cuStreamIsCapturing(stream->handle, &capture) != CUDA_SUCCESS ||
           capture != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* Gives the stream a workspace. One that another stream had is waited for, in the stream; a graph cannot wait for what is outside of it. */
static side_status workspace_take(dev_stream *stream, bool capturing)
{
    dev_context *context = stream->context;
    struct cuda_workspace *w = context->blas.idle;

    if (stream->workspace != NULL)
        return SIDE_OK;
    if (w == NULL || capturing)
        return workspace_new(context, &stream->workspace);
    side_status status = cuda_status(context, context->cu->cuStreamWaitEvent(stream->handle, w->last_use, 0),
                                     "cuStreamWaitEvent", "stream %p, matmul", (void *)stream->handle);
    if (status == SIDE_OK) {
        context->blas.idle = w->next;
        stream->workspace = w;
    }
    return status;
}

static side_status handle_make(dev_context *context, const side_op *op)
{
    struct cuda_blas *b = &context->blas;
    cublasHandle_t handle = NULL;

    if (b->handle != NULL)
        return SIDE_OK;
    side_status status = cu_cublas(context->props.driver_version, &b->api);
    if (status != SIDE_OK)
        return status;
    status = blas_status(context, b->api->cublasCreate_v2(&handle), "cublasCreate", op);
    if (status == SIDE_OK)
        b->handle = handle;
    return status;
}

/* Row-major out[m,n] = a[m,k] @ b[k,n] is column-major out' [n,m] = b' @ a', with the same bytes. */
static side_status gemm(dev_stream *stream, const side_op *op)
{
    struct cuda_blas *b = &stream->context->blas;
    const float one = 1.0f, zero = 0.0f;
    const cudaDataType in = op->type[0] == SIDE_BF16 ? BLAS_R_16BF : BLAS_R_32F;
    const cudaDataType out = op->type[1] == SIDE_BF16 ? BLAS_R_16BF : BLAS_R_32F;
    const cublasComputeType_t compute = op->math == SIDE_MATH_TF32 ? BLAS_COMPUTE_32F_FAST_TF32 : BLAS_COMPUTE_32F;
    const int m = (int)op->dim[0], n = (int)op->dim[1], k = (int)op->dim[2];
    const char *call = "cublasSetStream";

    cublasStatus_t r = b->api->cublasSetStream_v2(b->handle, stream->handle);
    if (r == BLAS_OK) {
        call = "cublasSetWorkspace"; /* after the stream: setting that takes the workspace away */
        r = b->api->cublasSetWorkspace_v2(b->handle, (void *)(uintptr_t)stream->workspace->data,
                                          stream->workspace->bytes);
    }
    if (r == BLAS_OK) {
        call = "cublasGemmEx";
        r = b->api->cublasGemmEx(b->handle, BLAS_OP_N, BLAS_OP_N, n, m, k, &one, op->in[1], in, n, op->in[0], in, k,
                                 &zero, op->out, out, n, compute, BLAS_ALGORITHM_DEFAULT);
    }
    return blas_status(stream->context, r, call, op);
}

side_status blas_matmul(dev_stream *stream, const side_op *op)
{
    dev_context *context = stream->context;

    pthread_mutex_lock(&context->blas.mutex);
    side_status status = handle_make(context, op);
    const bool capturing = status == SIDE_OK && is_capturing(stream);
    if (status == SIDE_OK)
        status = workspace_take(stream, capturing);
    if (status == SIDE_OK) {
        struct cuda_workspace *w = stream->workspace;
        status = gemm(stream, op);
        /* Whoever gets the workspace next waits for this, also where a failed call queued a part; with no point to wait for nobody gets it. */
        w->in_graph = w->in_graph || capturing;
        if (!w->in_graph && context->cu->cuEventRecord(w->last_use, stream->handle) != CUDA_SUCCESS)
            w->in_graph = true;
    }
    pthread_mutex_unlock(&context->blas.mutex);
    return status;
}
