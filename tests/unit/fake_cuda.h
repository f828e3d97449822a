/* SPDX-License-Identifier: MIT
 *
 * A CUDA driver that is not there: each function does what a caller can see of it (memory is malloc'ed, copies happen at once, handles are
 * counted), checks that it is called as the real one wants (a context is current, handles are live), and can be told to fail. */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include "fake_blocks.h"
#include "fake_libs.h"
#include "fake_state.h"

#include "alloc.h"
#include "cu_load.h"

static CUresult f_cuInit(unsigned int flags)
{
    assert_int_equal(flags, 0);
    return fails("cuInit") ? fake.code : CUDA_SUCCESS;
}

static CUresult f_cuDriverGetVersion(int *version)
{
    if (fails("cuDriverGetVersion"))
        return fake.code;
    *version = fake.version;
    return CUDA_SUCCESS;
}

static CUresult f_cuGetErrorName(CUresult result, const char **text)
{
    *text = result == CUDA_ERROR_OUT_OF_MEMORY     ? "CUDA_ERROR_OUT_OF_MEMORY"
            : result == CUDA_ERROR_ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                                   : NULL;
    return *text != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult f_cuGetErrorString(CUresult result, const char **text)
{
    *text = "words of the driver";
    return result == CUDA_ERROR_ILLEGAL_ADDRESS ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult f_cuDeviceGetCount(int *devices)
{
    if (fails("cuDeviceGetCount"))
        return fake.code;
    *devices = fake.devices;
    return CUDA_SUCCESS;
}

static CUresult f_cuDeviceGet(CUdevice *device, int ordinal)
{
    if (fails("cuDeviceGet"))
        return fake.code;
    *device = ordinal;
    return CUDA_SUCCESS;
}

static CUresult f_cuDeviceGetName(char *name, int bytes, CUdevice device)
{
    (void)device;
    if (fails("cuDeviceGetName"))
        return fake.code;
    snprintf(name, (size_t)bytes, "%s", fake.name);
    return CUDA_SUCCESS;
}

static CUresult f_cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    (void)device;
    if (fails("cuDeviceGetUuid"))
        return fake.code;
    for (int i = 0; i < 16; i++)
        uuid->bytes[i] = (char)(i * 17);
    return CUDA_SUCCESS;
}

static CUresult f_cuDeviceTotalMem(size_t *bytes, CUdevice device)
{
    (void)device;
    if (fails("cuDeviceTotalMem"))
        return fake.code;
    *bytes = (size_t)139 << 30;
    return CUDA_SUCCESS;
}

static CUresult f_cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    (void)device;
    if (fails("cuDeviceGetAttribute"))
        return fake.code;
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = fake.major; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = fake.minor; break;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: *value = fake.engines; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED: *value = fake.can_register; break;
    case CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED: *value = 1; break;
    case CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES: *value = fake.coherent; break;
    default: *value = 0; break;
    }
    return CUDA_SUCCESS;
}

static CUresult f_cuDeviceGetPCIBusId(char *id, int bytes, CUdevice device)
{
    (void)device;
    if (fails("cuDeviceGetPCIBusId"))
        return fake.code;
    snprintf(id, (size_t)bytes, "0000:0A:00.0");
    return CUDA_SUCCESS;
}

static CUresult f_cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    fake_device = device;
    if (fails("cuDevicePrimaryCtxRetain"))
        return fake.code;
    count(&fake.live[FAKE_CONTEXT], 1);
    *context = (CUcontext)&primary;
    return CUDA_SUCCESS;
}

static CUresult f_cuDevicePrimaryCtxRelease(CUdevice device)
{
    (void)device;
    count(&fake.live[FAKE_CONTEXT], -1);
    return fails("cuDevicePrimaryCtxRelease") ? fake.code : CUDA_SUCCESS;
}

static CUresult f_cuCtxPushCurrent(CUcontext context)
{
    if (fails("cuCtxPushCurrent"))
        return fake.code;
    assert_ptr_equal(context, &primary);
    depth++;
    return CUDA_SUCCESS;
}

/* It never fails where something was pushed; nothing could be done about it. */
static CUresult f_cuCtxPopCurrent(CUcontext *context)
{
    entered();
    depth--;
    *context = (CUcontext)&primary;
    return CUDA_SUCCESS;
}

static CUresult f_cuCtxGetCurrent(CUcontext *context)
{
    if (fails("cuCtxGetCurrent"))
        return fake.code;
    *context = depth > 0 ? (CUcontext)&primary : NULL;
    return CUDA_SUCCESS;
}

static CUresult f_cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    static _Thread_local CUstreamCaptureMode now; /* global */
    const CUstreamCaptureMode before = now;

    if (fails("cuThreadExchangeStreamCaptureMode"))
        return fake.code;
    if (*mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        count(&fake.relaxed, 1);
    now = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

static CUresult f_cuMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    if (fails("cuMemGetInfo"))
        return fake.code;
    *free_bytes = 12345;
    *total_bytes = 67890;
    return depth > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult f_cuMemAlloc(CUdeviceptr *data, size_t bytes)
{
    entered();
    if (fails("cuMemAlloc"))
        return fake.code;
    void *p = aligned_alloc(256, (bytes + 255) / 256 * 256);
    assert_non_null(p);
    count(&fake.live[FAKE_MEMORY], 1);
    range_add(p, bytes, CU_MEMORYTYPE_DEVICE);
    *data = (CUdeviceptr)(uintptr_t)p;
    return CUDA_SUCCESS;
}

/* Destroying tells of earlier faults but destroys all the same; so in the rest. */
static CUresult f_cuMemFree(CUdeviceptr data)
{
    range_remove((void *)(uintptr_t)data);
    free((void *)(uintptr_t)data);
    count(&fake.live[FAKE_MEMORY], -1);
    return fails("cuMemFree") ? fake.code : CUDA_SUCCESS;
}

static CUresult f_cuMemHostAlloc(void **data, size_t bytes, unsigned int flags)
{
    entered();
    assert_int_equal(flags, CU_ALLOC_PORTABLE | CU_ALLOC_DEVICEMAP);
    if (fails("cuMemHostAlloc"))
        return fake.code;
    *data = aligned_alloc(64, (bytes + 63) / 64 * 64);
    assert_non_null(*data);
    count(&fake.live[FAKE_HOST], 1);
    range_add(*data, bytes, CU_MEMORYTYPE_HOST);
    return CUDA_SUCCESS;
}

static CUresult f_cuMemFreeHost(void *data)
{
    range_remove(data);
    free(data);
    count(&fake.live[FAKE_HOST], -1);
    return fails("cuMemFreeHost") ? fake.code : CUDA_SUCCESS;
}

static CUresult f_cuMemHostRegister(void *data, size_t bytes, unsigned int flags)
{
    entered();
    assert_true(data != NULL && bytes > 0);
    if (fails("cuMemHostRegister"))
        return fake.code;
    fake.register_flags = flags;
    count(&fake.registered, 1);
    range_add(data, bytes, CU_MEMORYTYPE_HOST);
    return CUDA_SUCCESS;
}

static CUresult f_cuMemHostUnregister(void *data)
{
    entered();
    assert_non_null(data);
    count(&fake.registered, -1);
    range_remove(data);
    return fails("cuMemHostUnregister") ? fake.code : CUDA_SUCCESS;
}

static CUresult f_cuPointerGetAttributes(unsigned int n, CUpointer_attribute *attributes, void **values,
                                         CUdeviceptr pointer)
{
    entered();
    if (fails("cuPointerGetAttributes"))
        return fake.code;
    const struct fake_range range = range_find(pointer);
    fake.pointer_queries++;
    for (unsigned i = 0; i < n; i++)
        switch (attributes[i]) {
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)values[i] = range.type; break;
        case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned *)values[i] = fake.pointer_managed; break;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)values[i] = fake_device; break;
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)values[i] = pointer; break;
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)values[i] = range.begin; break;
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)values[i] = range.bytes; break;
        default: T_FAIL("attribute %d is asked for", (int)attributes[i]);
        }
    return CUDA_SUCCESS;
}

static CUresult f_cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    entered();
    *least = 0;
    *greatest = -5;
    return fails("cuCtxGetStreamPriorityRange") ? fake.code : CUDA_SUCCESS;
}

static CUresult f_cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority)
{
    entered();
    assert_int_equal(flags, CU_STREAM_NON_BLOCKING);
    if (fails("cuStreamCreateWithPriority"))
        return fake.code;
    fake.priority = priority;
    *stream = make(FAKE_STREAM);
    return CUDA_SUCCESS;
}

static CUresult f_cuStreamWaitValue32(CUstream stream, CUdeviceptr data, uint32_t value, unsigned int flags)
{
    entered();
    is_stream(stream);
    assert_true(flags == CU_STREAM_WAIT_VALUE_GEQ && data % 4 == 0);
    if (fails("cuStreamWaitValue32"))
        return fake.code;
    pack_advance();
    if ((int32_t)(*(uint32_t *)(uintptr_t)data - value) < 0)
        T_FAIL("a stream waits for a chunk that will not come");
    return CUDA_SUCCESS;
}

static CUresult f_cuStreamWriteValue32(CUstream stream, CUdeviceptr data, uint32_t value, unsigned int flags)
{
    entered();
    is_stream(stream);
    assert_true(flags == CU_STREAM_WRITE_VALUE_DEFAULT && data % 4 == 0);
    if (fails("cuStreamWriteValue32"))
        return fake.code;
    *(uint32_t *)(uintptr_t)data = value;
    pack_advance();
    return CUDA_SUCCESS;
}

static CUresult f_cuStreamCreate(CUstream *stream, unsigned int flags)
{
    entered();
    assert_int_equal(flags, CU_STREAM_NON_BLOCKING);
    if (fails("cuStreamCreate"))
        return fake.code;
    *stream = make(FAKE_STREAM);
    return CUDA_SUCCESS;
}

static CUresult f_cuStreamDestroy(CUstream stream)
{
    unmake(stream, FAKE_STREAM);
    return fails("cuStreamDestroy") ? fake.code : CUDA_SUCCESS;
}

static CUresult f_cuStreamGetCtx(CUstream stream, CUcontext *context)
{
    entered();
    if (fails("cuStreamGetCtx"))
        return fake.code;
    *context = (void *)stream == fake.alien ? (CUcontext)&fake : (CUcontext)&primary;
    return CUDA_SUCCESS;
}

static CUresult f_cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status)
{
    entered();
    is_stream(stream);
    if (fails("cuStreamIsCapturing"))
        return fake.code;
    *status = fake.capturing;
    return CUDA_SUCCESS;
}

static CUresult ready(void)
{
    if (fake.pending > 0)
        fake.pending--;
    else if (fake.pending == 0)
        return CUDA_SUCCESS;
    return CUDA_ERROR_NOT_READY;
}

static CUresult f_cuStreamQuery(CUstream stream)
{
    entered();
    is_stream(stream);
    if (fails("cuStreamQuery"))
        return fake.code;
    if (fake_pack.runs && stream == fake_pack.stream)
        pack_advance();
    return fake_pack.runs && stream == fake_pack.stream ? CUDA_ERROR_NOT_READY : ready();
}

static CUresult f_cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags)
{
    entered();
    is_stream(stream);
    live(event, FAKE_EVENT);
    assert_int_equal(flags, 0);
    fake.stream_waits++;
    return fails("cuStreamWaitEvent") ? fake.code : CUDA_SUCCESS;
}

static CUresult f_cuEventCreate(CUevent *event, unsigned int flags)
{
    entered();
    assert_true(flags == CU_EVENT_DEFAULT || flags == CU_EVENT_DISABLE_TIMING);
    if (fails("cuEventCreate"))
        return fake.code;
    *event = make(FAKE_EVENT);
    live(*event, FAKE_EVENT)->timing = flags == CU_EVENT_DEFAULT;
    return CUDA_SUCCESS;
}

static CUresult f_cuEventDestroy(CUevent event)
{
    unmake(event, FAKE_EVENT);
    return fails("cuEventDestroy") ? fake.code : CUDA_SUCCESS;
}

static CUresult f_cuEventRecord(CUevent event, CUstream stream)
{
    entered();
    is_stream(stream);
    if (fails("cuEventRecord"))
        return fake.code;
    live(event, FAKE_EVENT)->recorded = true;
    return CUDA_SUCCESS;
}

static CUresult f_cuEventQuery(CUevent event)
{
    entered();
    live(event, FAKE_EVENT);
    return fails("cuEventQuery") ? fake.code : ready();
}

static CUresult f_cuEventElapsedTime(float *ms, CUevent begin, CUevent end)
{
    entered();
    if (fails("cuEventElapsedTime"))
        return fake.code;
    assert_true(live(begin, FAKE_EVENT)->timing && live(end, FAKE_EVENT)->timing);
    if (!live(begin, FAKE_EVENT)->recorded || !live(end, FAKE_EVENT)->recorded)
        return CUDA_ERROR_INVALID_HANDLE;
    if (ready() != CUDA_SUCCESS)
        return CUDA_ERROR_NOT_READY;
    *ms = 1.5f;
    return CUDA_SUCCESS;
}

static CUresult copy_now(void *dst, const void *src, size_t bytes, CUstream stream, const char *name)
{
    entered();
    is_stream(stream);
    assert_true(bytes > 0);
    if (fails(name))
        return fake.code;
    memcpy(dst, src, bytes);
    fake.singles++;
    return CUDA_SUCCESS;
}

static CUresult f_cuMemcpyHtoDAsync(CUdeviceptr dst, const void *src, size_t bytes, CUstream stream)
{
    return copy_now((void *)(uintptr_t)dst, src, bytes, stream, "cuMemcpyHtoDAsync");
}

static CUresult f_cuMemcpyDtoHAsync(void *dst, CUdeviceptr src, size_t bytes, CUstream stream)
{
    return copy_now(dst, (const void *)(uintptr_t)src, bytes, stream, "cuMemcpyDtoHAsync");
}

static CUresult f_cuMemcpyDtoDAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream)
{
    return copy_now((void *)(uintptr_t)dst, (const void *)(uintptr_t)src, bytes, stream, "cuMemcpyDtoDAsync");
}

static CUresult f_cuMemcpyBatchAsync(CUdeviceptr *dst, CUdeviceptr *src, size_t *bytes, size_t n,
                                     CUmemcpyAttributes *attributes, size_t *first, size_t attribute_count,
                                     size_t *failed, CUstream stream)
{
    entered();
    assert_true((uintptr_t)stream > CU_HANDLE_PER_THREAD);
    is_stream(stream);
    assert_true(n > 0 && attribute_count == 1 && first[0] == 0 && failed != NULL && fake.capturing == 0);
    assert_int_equal(attributes->order, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
    if (fails("cuMemcpyBatchAsync"))
        return fake.code;
    for (size_t i = 0; i < n; i++) {
        assert_true(bytes[i] > 0);
        memcpy((void *)(uintptr_t)dst[i], (const void *)(uintptr_t)src[i], bytes[i]);
    }
    fake.batches++;
    fake.batched += n;
    fake.longest = n > fake.longest ? n : fake.longest;
    return CUDA_SUCCESS;
}

static CUresult f_cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t bytes, CUstream stream)
{
    entered();
    is_stream(stream);
    if (fails("cuMemsetD8Async"))
        return fake.code;
    memset((void *)(uintptr_t)dst, value, bytes);
    return CUDA_SUCCESS;
}

static CUresult f_cuLaunchHostFunc(CUstream stream, CUhostFn fn, void *user)
{
    entered();
    is_stream(stream);
    if (fails("cuLaunchHostFunc"))
        return fake.code;
    fn(user);
    return CUDA_SUCCESS;
}

static CUresult f_cuModuleLoadData(CUmodule *module, const void *image)
{
    entered();
    assert_non_null(image);
    if (fails("cuModuleLoadData"))
        return fake.code;
    if (fake.module_refusals > 0) {
        fake.module_refusals--;
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    }
    *module = make(FAKE_MODULE);
    return CUDA_SUCCESS;
}

static CUresult f_cuModuleUnload(CUmodule module)
{
    unmake(module, FAKE_MODULE);
    return fails("cuModuleUnload") ? fake.code : CUDA_SUCCESS;
}

static CUresult f_cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    entered();
    live(module, FAKE_MODULE);
    if (fails("cuModuleGetFunction"))
        return fake.code;
    *function = (CUfunction)(uintptr_t)name;
    return CUDA_SUCCESS;
}

static CUresult f_cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                                 unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared,
                                 CUstream stream, void **arguments, void **extra)
{
    entered();
    is_stream(stream);
    assert_true(function != NULL && arguments != NULL && extra == NULL && shared == 0);
    assert_true(grid_x > 0 && grid_x <= 132 * 8 && grid_y == 1 && grid_z == 1 && block_x > 0 && block_y == 1 &&
                block_z == 1);
    if (fails("cuLaunchKernel"))
        return fake.code;
    pthread_mutex_lock(&fake_mutex);
    fake.launches++;
    fake.grid = grid_x;
    fake.block = block_x;
    pthread_mutex_unlock(&fake_mutex);
    fake_launch((const char *)function, stream, arguments);
    return CUDA_SUCCESS;
}

static const struct cu_api fake_cu = {
#define FAKE_MEMBER(needed, name, version, arguments) .name = f_##name,
    CU_FUNCTIONS(FAKE_MEMBER)
#undef FAKE_MEMBER
};

/* ---------------------------------------------------------------- */

static void fake_libraries(const struct nvrtc_api *nvrtc, const struct cublas_api *cublas, const struct nvml_api *nvml)
{
    const struct cu_libs_test tables = {nvrtc, cublas, nvml, true};
    cu_libs_test(&tables);
}

/* A healthy H200 with a driver of CUDA 13.0, and the library told to use it. */
static void fake_begin(void)
{
    fake = (struct fake){.code = CUDA_ERROR_INVALID_VALUE,
                         .version = 13000,
                         .devices = 2,
                         .major = 9,
                         .engines = 3,
                         .can_register = 1,
                         .name = "NVIDIA H200",
                         .archs = {75, 90, 100}};
    fake_range_count = 0;
    fake_pack = (struct fake_pack){0};
    memset(&fake_kernels, 0, sizeof(fake_kernels));
    fake_libraries(&fake_nvrtc, &fake_cublas, &fake_nvml);
    cu_test_api(&fake_cu);
}

/* This thread's context stack is as it was, nothing is left of the driver's and none of our memory. */
static void fake_clean(void)
{
    assert_int_equal(depth, 0);
    for (int kind = 0; kind < FAKE_KINDS; kind++)
        if (fake.live[kind] != 0)
            T_FAIL("%d handles of kind %d are left; %s was the call that failed", fake.live[kind], kind,
                   fake.failed != NULL ? fake.failed : "none");
    assert_int_equal(fake.registered, 0);
    assert_int_equal(mem_live(), 0);
}

#endif
