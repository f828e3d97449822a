/* SPDX-License-Identifier: MIT
 *
 * What we use of the CUDA driver's ABI, declared by ourselves: the library builds without a toolkit and starts without a driver. One list of the
 * functions, one of the constants. tools/check-cuda-abi compiles both beside the toolkit's cuda.h (CU_ABI_CHECK) and compares. */
#ifndef CU_ABI_H
#define CU_ABI_H

#include <stddef.h>
#include <stdint.h>

/* X(name, value) */
#define CU_CONSTANTS(X)                                                      \
    X(CUDA_SUCCESS, 0)                                                       \
    X(CUDA_ERROR_INVALID_VALUE, 1)                                           \
    X(CUDA_ERROR_OUT_OF_MEMORY, 2)                                           \
    X(CUDA_ERROR_NOT_INITIALIZED, 3)                                         \
    X(CUDA_ERROR_DEINITIALIZED, 4)                                           \
    X(CUDA_ERROR_STUB_LIBRARY, 34)                                           \
    X(CUDA_ERROR_DEVICE_UNAVAILABLE, 46)                                     \
    X(CUDA_ERROR_NO_DEVICE, 100)                                             \
    X(CUDA_ERROR_INVALID_DEVICE, 101)                                        \
    X(CUDA_ERROR_INVALID_IMAGE, 200)                                         \
    X(CUDA_ERROR_INVALID_CONTEXT, 201)                                       \
    X(CUDA_ERROR_NO_BINARY_FOR_GPU, 209)                                     \
    X(CUDA_ERROR_ECC_UNCORRECTABLE, 214)                                     \
    X(CUDA_ERROR_INVALID_PTX, 218)                                           \
    X(CUDA_ERROR_NVLINK_UNCORRECTABLE, 220)                                  \
    X(CUDA_ERROR_JIT_COMPILER_NOT_FOUND, 221)                                \
    X(CUDA_ERROR_UNSUPPORTED_PTX_VERSION, 222)                               \
    X(CUDA_ERROR_JIT_COMPILATION_DISABLED, 223)                              \
    X(CUDA_ERROR_INVALID_SOURCE, 300)                                        \
    X(CUDA_ERROR_INVALID_HANDLE, 400)                                        \
    X(CUDA_ERROR_NOT_FOUND, 500)                                             \
    X(CUDA_ERROR_NOT_READY, 600)                                             \
    X(CUDA_ERROR_ILLEGAL_ADDRESS, 700)                                       \
    X(CUDA_ERROR_LAUNCH_TIMEOUT, 702)                                        \
    X(CUDA_ERROR_CONTEXT_IS_DESTROYED, 709)                                  \
    X(CUDA_ERROR_ASSERT, 710)                                                \
    X(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, 712)                        \
    X(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, 713)                            \
    X(CUDA_ERROR_HARDWARE_STACK_ERROR, 714)                                  \
    X(CUDA_ERROR_ILLEGAL_INSTRUCTION, 715)                                   \
    X(CUDA_ERROR_MISALIGNED_ADDRESS, 716)                                    \
    X(CUDA_ERROR_INVALID_ADDRESS_SPACE, 717)                                 \
    X(CUDA_ERROR_INVALID_PC, 718)                                            \
    X(CUDA_ERROR_LAUNCH_FAILED, 719)                                         \
    X(CUDA_ERROR_NOT_PERMITTED, 800)                                         \
    X(CUDA_ERROR_NOT_SUPPORTED, 801)                                         \
    X(CUDA_ERROR_SYSTEM_NOT_READY, 802)                                      \
    X(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, 803)                                \
    X(CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE, 804)                        \
    X(CUDA_ERROR_MPS_RPC_FAILURE, 806)                                       \
    X(CUDA_ERROR_MPS_CLIENT_TERMINATED, 810)                                 \
    X(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 900)                            \
    X(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, 906)                               \
    X(CUDA_ERROR_UNKNOWN, 999)                                               \
    X(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 16)                          \
    X(CU_DEVICE_ATTRIBUTE_INTEGRATED, 18)                                    \
    X(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 40)                            \
    X(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 75)                      \
    X(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 76)                      \
    X(CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 99)                       \
    X(CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES, 100) \
    X(CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED, 113)            \
    X(CU_STREAM_NON_BLOCKING, 1)                                             \
    X(CU_STREAM_CAPTURE_MODE_RELAXED, 2)                                     \
    X(CU_STREAM_CAPTURE_STATUS_NONE, 0)                                      \
    X(CU_STREAM_CAPTURE_STATUS_ACTIVE, 1)                                    \
    X(CU_EVENT_DEFAULT, 0)                                                   \
    X(CU_EVENT_DISABLE_TIMING, 2)                                            \
    X(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 2)                                   \
    X(CU_POINTER_ATTRIBUTE_DEVICE_POINTER, 3)                                \
    X(CU_POINTER_ATTRIBUTE_IS_MANAGED, 8)                                    \
    X(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, 9)                                \
    X(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, 11)                             \
    X(CU_POINTER_ATTRIBUTE_RANGE_SIZE, 12)                                   \
    X(CU_MEMORYTYPE_HOST, 1)                                                 \
    X(CU_MEMORYTYPE_DEVICE, 2)                                               \
    X(CU_STREAM_WAIT_VALUE_GEQ, 0)                                           \
    X(CU_STREAM_WRITE_VALUE_DEFAULT, 0)                                      \
    X(CU_MEM_LOCATION_TYPE_DEVICE, 1)                                        \
    X(CU_MEM_LOCATION_TYPE_HOST, 2)                                          \
    X(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, 1)                                  \
    X(CU_GET_PROC_ADDRESS_LEGACY_STREAM, 1)

/* Preprocessor constants of cuda.h; under other names, or they could not be compared. X(ours, cuda.h's, value) */
#define CU_FLAGS(X)                                           \
    X(CU_ALLOC_PORTABLE, CU_MEMHOSTALLOC_PORTABLE, 1)         \
    X(CU_ALLOC_DEVICEMAP, CU_MEMHOSTALLOC_DEVICEMAP, 2)       \
    X(CU_REGISTER_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE, 1)   \
    X(CU_REGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_DEVICEMAP, 2) \
    X(CU_REGISTER_READ_ONLY, CU_MEMHOSTREGISTER_READ_ONLY, 8)

#define CU_FLAG_ENUM(ours, theirs, value) ours = value,
enum cu_flag { CU_FLAGS(CU_FLAG_ENUM) };
#undef CU_FLAG_ENUM

/* Stream handles with a meaning of their own. */
#define CU_HANDLE_LEGACY     0x1
#define CU_HANDLE_PER_THREAD 0x2

struct cu_uuid {
    char bytes[16];
};
struct cu_mem_location {
    int type, id;
};
struct cu_memcpy_attributes {
    int order;
    struct cu_mem_location source, destination;
    unsigned flags;
};

#ifndef CU_ABI_CHECK
#define CU_CONSTANT_ENUM(name, value) name = value,
enum cu_constant { CU_CONSTANTS(CU_CONSTANT_ENUM) };
#undef CU_CONSTANT_ENUM

typedef int CUresult, CUdevice; /* enums are int-sized in this ABI */
typedef int CUdevice_attribute, CUpointer_attribute, CUstreamCaptureMode, CUstreamCaptureStatus;
typedef int CUdriverProcAddressQueryResult;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef void (*CUhostFn)(void *user);
typedef struct cu_uuid CUuuid;
typedef struct cu_memcpy_attributes CUmemcpyAttributes;
#endif

/* X(needed, name, version, arguments): `version` is the CUDA version whose ABI of the function the arguments are; a newer driver hands out that
 * one. Not needed: NULL where the driver is older. Functions are needed only if the oldest supported driver (CU_DRIVER_LEAST) has them.
 * cuMemcpyBatchAsync is taken at 12.8, with failed; 13.0 dropped that argument and still answers for 12.8. */
#define CU_FUNCTIONS(X)                                                                                          \
    X(1, cuInit, 2000, (unsigned int flags))                                                                     \
    X(1, cuDriverGetVersion, 2020, (int *version))                                                               \
    X(1, cuGetErrorName, 6000, (CUresult result, const char **text))                                             \
    X(1, cuGetErrorString, 6000, (CUresult result, const char **text))                                           \
    X(1, cuDeviceGetCount, 2000, (int *count))                                                                   \
    X(1, cuDeviceGet, 2000, (CUdevice * device, int ordinal))                                                    \
    X(1, cuDeviceGetName, 2000, (char *name, int bytes, CUdevice device))                                        \
    X(1, cuDeviceGetUuid, 11040, (CUuuid * uuid, CUdevice device))                                               \
    X(1, cuDeviceTotalMem, 3020, (size_t * bytes, CUdevice device))                                              \
    X(1, cuDeviceGetAttribute, 2000, (int *value, CUdevice_attribute attribute, CUdevice device))                \
    X(1, cuDeviceGetPCIBusId, 4010, (char *id, int bytes, CUdevice device))                                      \
    X(1, cuDevicePrimaryCtxRetain, 7000, (CUcontext * context, CUdevice device))                                 \
    X(1, cuDevicePrimaryCtxRelease, 11000, (CUdevice device))                                                    \
    X(1, cuCtxPushCurrent, 4000, (CUcontext context))                                                            \
    X(1, cuCtxPopCurrent, 4000, (CUcontext * context))                                                           \
    X(1, cuCtxGetCurrent, 4000, (CUcontext * context))                                                           \
    X(1, cuThreadExchangeStreamCaptureMode, 10010, (CUstreamCaptureMode * mode))                                 \
    X(1, cuMemGetInfo, 3020, (size_t * free_bytes, size_t * total_bytes))                                        \
    X(1, cuMemAlloc, 3020, (CUdeviceptr * data, size_t bytes))                                                   \
    X(1, cuMemFree, 3020, (CUdeviceptr data))                                                                    \
    X(1, cuMemHostAlloc, 2020, (void **data, size_t bytes, unsigned int flags))                                  \
    X(1, cuMemFreeHost, 2000, (void *data))                                                                      \
    X(1, cuMemHostRegister, 6050, (void *data, size_t bytes, unsigned int flags))                                \
    X(1, cuMemHostUnregister, 4000, (void *data))                                                                \
    X(1, cuPointerGetAttributes, 7000,                                                                           \
      (unsigned int count, CUpointer_attribute *attributes, void **values, CUdeviceptr pointer))                 \
    X(1, cuStreamCreate, 2000, (CUstream * stream, unsigned int flags))                                          \
    X(1, cuCtxGetStreamPriorityRange, 5050, (int *least, int *greatest))                                         \
    X(1, cuStreamCreateWithPriority, 5050, (CUstream * stream, unsigned int flags, int priority))                \
    X(1, cuStreamDestroy, 4000, (CUstream stream))                                                               \
    X(1, cuStreamGetCtx, 9020, (CUstream stream, CUcontext * context))                                           \
    X(1, cuStreamIsCapturing, 10000, (CUstream stream, CUstreamCaptureStatus * status))                          \
    X(1, cuStreamQuery, 2000, (CUstream stream))                                                                 \
    X(1, cuStreamWaitEvent, 3020, (CUstream stream, CUevent event, unsigned int flags))                          \
    X(0, cuStreamWaitValue32, 11070, (CUstream stream, CUdeviceptr data, uint32_t value, unsigned int flags))    \
    X(0, cuStreamWriteValue32, 11070, (CUstream stream, CUdeviceptr data, uint32_t value, unsigned int flags))   \
    X(1, cuEventCreate, 2000, (CUevent * event, unsigned int flags))                                             \
    X(1, cuEventDestroy, 4000, (CUevent event))                                                                  \
    X(1, cuEventRecord, 2000, (CUevent event, CUstream stream))                                                  \
    X(1, cuEventQuery, 2000, (CUevent event))                                                                    \
    X(1, cuEventElapsedTime, 2000, (float *ms, CUevent begin, CUevent end))                                      \
    X(1, cuMemcpyHtoDAsync, 3020, (CUdeviceptr dst, const void *src, size_t bytes, CUstream stream))             \
    X(1, cuMemcpyDtoHAsync, 3020, (void *dst, CUdeviceptr src, size_t bytes, CUstream stream))                   \
    X(1, cuMemcpyDtoDAsync, 3020, (CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream))             \
    X(0, cuMemcpyBatchAsync, 12080,                                                                              \
      (CUdeviceptr * dst, CUdeviceptr * src, size_t * bytes, size_t count, CUmemcpyAttributes * attributes,      \
       size_t * first, size_t attribute_count, size_t * failed, CUstream stream))                                \
    X(1, cuMemsetD8Async, 3020, (CUdeviceptr dst, unsigned char value, size_t bytes, CUstream stream))           \
    X(1, cuLaunchHostFunc, 10000, (CUstream stream, CUhostFn fn, void *user))                                    \
    X(1, cuModuleLoadData, 2000, (CUmodule * module, const void *image))                                         \
    X(1, cuModuleUnload, 2000, (CUmodule module))                                                                \
    X(1, cuModuleGetFunction, 2000, (CUfunction * function, CUmodule module, const char *name))                  \
    X(1, cuLaunchKernel, 4000,                                                                                   \
      (CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, unsigned int block_x, \
       unsigned int block_y, unsigned int block_z, unsigned int shared_bytes, CUstream stream, void **arguments, \
       void **extra))

#define CU_DRIVER_LEAST  12020 /* CUDA 12.2: driver 535 */
#define CU_COMPUTE_LEAST 75    /* compute capability 7.5 */

/* cuGetProcAddress itself, as of 12.0; found by its exported name cuGetProcAddress_v2. */
typedef CUresult cu_get_proc_address(const char *symbol, void **function, int version, uint64_t flags,
                                     CUdriverProcAddressQueryResult *found);

/* The driver. Passed by pointer to whatever calls it, so that a test can put another one in its place. */
struct cu_api {
#define CU_MEMBER(needed, name, version, arguments) CUresult(*name) arguments;
    CU_FUNCTIONS(CU_MEMBER)
#undef CU_MEMBER
};

#endif
