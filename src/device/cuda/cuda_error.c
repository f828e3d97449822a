/* SPDX-License-Identifier: MIT */
#include "cuda_impl.h"

#include "error.h"

#include <stdarg.h>
#include <stdio.h>

/* How deep this thread has entered, and what each entry is to undo. */
#define DEPTH_MOST 4
static _Thread_local unsigned depth;
static _Thread_local struct entry {
    bool pushed, exchanged;
    CUstreamCaptureMode kept;
} entries[DEPTH_MOST];

static side_status push(dev_context *context)
{
    return cuda_status(context, context->cu->cuCtxPushCurrent(context->context), "cuCtxPushCurrent", "device %d",
                       context->props.ordinal);
}

side_status cuda_enter(dev_context *context)
{
    side_status status = push(context);

    if (status != SIDE_OK)
        return status;
    /* While any thread captures a graph in the global mode (the default), the driver forbids queries and allocations, of all threads, and breaks that
     * capture when one is tried. Ours have nothing to do with it: let them through. */
    if (depth < DEPTH_MOST) {
        entries[depth] = (struct entry){.pushed = true, .exchanged = true, .kept = CU_STREAM_CAPTURE_MODE_RELAXED};
        context->cu->cuThreadExchangeStreamCaptureMode(&entries[depth].kept);
    }
    depth++;
    return SIDE_OK;
}

side_status cuda_enter_to_queue(dev_context *context, CUstream stream)
{
    CUcontext current = NULL;
    side_status status = SIDE_OK;

    /* The legacy stream waits for others, which makes its every use a question to a capture; deep down it does not matter. */
    if (depth >= DEPTH_MOST || stream == NULL || (uintptr_t)stream == CU_HANDLE_LEGACY)
        return cuda_enter(context);
    const bool is_current = context->cu->cuCtxGetCurrent(&current) == CUDA_SUCCESS && current == context->context;
    if (!is_current)
        status = push(context);
    if (status != SIDE_OK)
        return status;
    entries[depth++] = (struct entry){.pushed = !is_current};
    return SIDE_OK;
}

void cuda_leave(dev_context *context)
{
    CUcontext popped;

    depth--;
    if (depth < DEPTH_MOST && entries[depth].exchanged)
        context->cu->cuThreadExchangeStreamCaptureMode(&entries[depth].kept);
    if (depth >= DEPTH_MOST || entries[depth].pushed)
        context->cu->cuCtxPopCurrent(&popped);
}

bool cuda_is_lost(CUresult result)
{
    switch (result) {
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_MPS_RPC_FAILURE:
    case CUDA_ERROR_MPS_CLIENT_TERMINATED: return true;
    default: return false;
    }
}

side_status cuda_status(dev_context *context, CUresult result, const char *call, const char *format, ...)
{
    const char *name = NULL, *text = NULL;
    char arguments[120];
    size_t free_bytes, total_bytes;
    va_list list;

    if (result == CUDA_SUCCESS)
        return SIDE_OK;
    if (result == CUDA_ERROR_NOT_READY)
        return SIDE_AGAIN;
    va_start(list, format);
    vsnprintf(arguments, sizeof(arguments), format, list);
    va_end(list);
    if (context->cu->cuGetErrorName(result, &name) != CUDA_SUCCESS || name == NULL)
        name = "unknown error";
    if (context->cu->cuGetErrorString(result, &text) != CUDA_SUCCESS || text == NULL)
        text = "";
    if (cuda_is_lost(result))
        return error_set_device(SIDE_DEVICE_LOST, call, result,
                                "%s(%s): %s, %s; the fault may be of earlier work; restart the process", call,
                                arguments, name, text);
    if (result != CUDA_ERROR_OUT_OF_MEMORY)
        return error_set_device(SIDE_DEVICE_ERROR, call, result, "%s(%s): %s, %s", call, arguments, name, text);
    if (context->cu->cuMemGetInfo(&free_bytes, &total_bytes) != CUDA_SUCCESS)
        return error_set_device(SIDE_NO_DEVICE_MEMORY, call, result, "%s(%s): %s", call, arguments, name);
    return error_set_device(SIDE_NO_DEVICE_MEMORY, call, result, "%s(%s): %s; %zu of %zu bytes are free", call,
                            arguments, name, free_bytes, total_bytes);
}
