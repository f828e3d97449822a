/* SPDX-License-Identifier: MIT */
#include "cuda_impl.h"

#include "error.h"

static CUdeviceptr address(const void *data)
{
    return (CUdeviceptr)(uintptr_t)data;
}

side_status cuda_alloc(dev_context *context, size_t bytes, void **data)
{
    CUdeviceptr p = 0;
    side_status status = cuda_enter(context);

    if (status != SIDE_OK)
        return status;
    status = cuda_status(context, context->cu->cuMemAlloc(&p, bytes != 0 ? bytes : 1), "cuMemAlloc", "%zu bytes", bytes);
    cuda_leave(context);
    if (status == SIDE_OK)
        *data = (void *)(uintptr_t)p;
    return status;
}

void cuda_free(dev_context *context, void *data)
{
    if (data == NULL)
        return;
    const bool entered = cuda_enter(context) == SIDE_OK;
    CUresult r = context->cu->cuMemFree(address(data));
    if (r != CUDA_SUCCESS)
        log_message(SIDE_LEVEL_WARN, "cuda", "cuMemFree(%p): error %d", data, (int)r);
    if (entered)
        cuda_leave(context);
}

/* Refusals that another try cannot mend are SIDE_UNSUPPORTED. Out of memory means the host's here, or its limit on pinned memory. */
static side_status pin_status(dev_context *context, CUresult r, const char *call, const void *data, size_t bytes)
{
    if (r == CUDA_ERROR_NOT_SUPPORTED || r == CUDA_ERROR_NOT_PERMITTED)
        return error_set_device(SIDE_UNSUPPORTED, call, r, "%s(%p, %zu bytes): the driver does not pin this memory",
                                call, data, bytes);
    if (r == CUDA_ERROR_OUT_OF_MEMORY)
        return error_set_device(SIDE_DEVICE_ERROR, call, r, "%s(%p, %zu bytes): out of memory that can be pinned", call,
                                data, bytes);
    return cuda_status(context, r, call, "%p, %zu bytes", data, bytes);
}

side_status cuda_host_register(dev_context *context, void *data, size_t bytes, bool read_only)
{
    /* Portable: usable from every context. Mapped: kernels may read and write it. */
    unsigned flags = CU_REGISTER_PORTABLE | CU_REGISTER_DEVICEMAP;
    side_status status;

    if (!context->props.can_register)
        return error_set(SIDE_UNSUPPORTED, "cuMemHostRegister", "%s cannot register host memory", context->props.name);
    if (read_only && context->can_register_read_only)
        flags |= CU_REGISTER_READ_ONLY;
    status = cuda_enter(context);
    if (status != SIDE_OK)
        return status;
    status = pin_status(context, context->cu->cuMemHostRegister(data, bytes, flags), "cuMemHostRegister", data, bytes);
    cuda_leave(context);
    return status;
}

side_status cuda_host_unregister(dev_context *context, void *data)
{
    side_status status = cuda_enter(context);

    if (status != SIDE_OK)
        return status;
    status = cuda_status(context, context->cu->cuMemHostUnregister(data), "cuMemHostUnregister", "%p", data);
    cuda_leave(context);
    return status;
}

side_status cuda_host_alloc(dev_context *context, size_t bytes, void **data)
{
    void *p = NULL;
    side_status status = cuda_enter(context);

    if (status != SIDE_OK)
        return status;
    CUresult r = context->cu->cuMemHostAlloc(&p, bytes != 0 ? bytes : 1, CU_ALLOC_PORTABLE | CU_ALLOC_DEVICEMAP);
    if (r == CUDA_ERROR_OUT_OF_MEMORY)
        status = error_set_device(SIDE_NO_MEMORY, "cuMemHostAlloc", r, "out of pinned host memory for %zu bytes", bytes);
    else
        status = cuda_status(context, r, "cuMemHostAlloc", "%zu bytes", bytes);
    cuda_leave(context);
    if (status == SIDE_OK)
        *data = p;
    return status;
}

void cuda_host_free(dev_context *context, void *data)
{
    if (data == NULL)
        return;
    const bool entered = cuda_enter(context) == SIDE_OK;
    CUresult r = context->cu->cuMemFreeHost(data);
    if (r != CUDA_SUCCESS)
        log_message(SIDE_LEVEL_WARN, "cuda", "cuMemFreeHost(%p): error %d", data, (int)r);
    if (entered)
        cuda_leave(context);
}

side_status cuda_memory_kind(dev_context *context, const void *data, side_memory_kind *kind)
{
    unsigned type = 0, managed = 0; /* what the driver does not know stays 0 */
    CUpointer_attribute attributes[2] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED};
    void *values[2] = {&type, &managed};
    side_status status = cuda_enter(context);

    if (status != SIDE_OK)
        return status;
    CUresult r = context->cu->cuPointerGetAttributes(2, attributes, values, address(data));
    status = r == CUDA_ERROR_INVALID_VALUE ? SIDE_OK : cuda_status(context, r, "cuPointerGetAttributes", "%p", data);
    cuda_leave(context);
    if (status != SIDE_OK)
        return status;
    if (r != CUDA_SUCCESS)
        *kind = SIDE_MEMORY_PAGEABLE;
    else if (managed != 0 || type == CU_MEMORYTYPE_DEVICE)
        *kind = SIDE_MEMORY_DEVICE;
    else
        *kind = type == CU_MEMORYTYPE_HOST ? SIDE_MEMORY_PINNED : SIDE_MEMORY_PAGEABLE;
    return SIDE_OK;
}
