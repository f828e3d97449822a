/* SPDX-License-Identifier: MIT
 *
 * The libraries beside the driver, each optional and loaded at first use: NVRTC (compiles the kernels where there is no fatbin), cuBLAS (matmul),
 * NVML (the link). The rules are those of cu_abi.h: one list a library, tables passed by pointer, compared with the toolkit's headers by the same check.
 * Their own result types are ints here. */
#ifndef CU_LIBS_H
#define CU_LIBS_H

#include "cu_abi.h"
#include "sidestream.h"

#ifndef CU_ABI_CHECK
typedef int nvrtcResult, cublasStatus_t, cublasOperation_t, cudaDataType, cublasComputeType_t, cublasGemmAlgo_t;
typedef struct _nvrtcProgram *nvrtcProgram;
typedef struct cublasContext *cublasHandle_t;
typedef CUstream cudaStream_t;
#endif

/* X(needed, name, arguments) */
#define NVRTC_FUNCTIONS(X)                                                                                         \
    X(1, nvrtcVersion, (int *major, int *minor))                                                                   \
    X(1, nvrtcGetNumSupportedArchs, (int *count))                                                                  \
    X(1, nvrtcGetSupportedArchs, (int *archs))                                                                     \
    X(1, nvrtcCreateProgram,                                                                                       \
      (nvrtcProgram * program, const char *source, const char *name, int header_count, const char *const *headers, \
       const char *const *include_names))                                                                          \
    X(1, nvrtcCompileProgram, (nvrtcProgram program, int option_count, const char *const *options))                \
    X(1, nvrtcGetCUBINSize, (nvrtcProgram program, size_t * bytes))                                                \
    X(1, nvrtcGetCUBIN, (nvrtcProgram program, char *cubin))                                                       \
    X(1, nvrtcGetPTXSize, (nvrtcProgram program, size_t * bytes))                                                  \
    X(1, nvrtcGetPTX, (nvrtcProgram program, char *ptx))                                                           \
    X(1, nvrtcGetProgramLogSize, (nvrtcProgram program, size_t * bytes))                                           \
    X(1, nvrtcGetProgramLog, (nvrtcProgram program, char *log))                                                    \
    X(1, nvrtcDestroyProgram, (nvrtcProgram * program))

#define CUBLAS_FUNCTIONS(X)                                                                                           \
    X(1, cublasCreate_v2, (cublasHandle_t * handle))                                                                  \
    X(1, cublasDestroy_v2, (cublasHandle_t handle))                                                                   \
    X(1, cublasSetStream_v2, (cublasHandle_t handle, cudaStream_t stream))                                            \
    X(1, cublasSetWorkspace_v2, (cublasHandle_t handle, void *workspace, size_t bytes))                               \
    X(1, cublasGemmEx,                                                                                                \
      (cublasHandle_t handle, cublasOperation_t a_op, cublasOperation_t b_op, int m, int n, int k, const void *alpha, \
       const void *a, cudaDataType a_type, int a_stride, const void *b, cudaDataType b_type, int b_stride,            \
       const void *beta, void *c, cudaDataType c_type, int c_stride, cublasComputeType_t compute,                     \
       cublasGemmAlgo_t algorithm))

/* NVML has no header in the toolkit; handles are opaque pointers and results ints. */
#define NVML_FUNCTIONS(X)                                                               \
    X(1, nvmlInit_v2, (void))                                                           \
    X(1, nvmlShutdown, (void))                                                          \
    X(1, nvmlDeviceGetHandleByPciBusId_v2, (const char *id, void **device))             \
    X(1, nvmlDeviceGetCurrPcieLinkGeneration, (void *device, unsigned int *generation)) \
    X(1, nvmlDeviceGetCurrPcieLinkWidth, (void *device, unsigned int *width))           \
    X(1, nvmlDeviceGetMaxPcieLinkGeneration, (void *device, unsigned int *generation))  \
    X(1, nvmlDeviceGetMaxPcieLinkWidth, (void *device, unsigned int *width))            \
    X(0, nvmlDeviceGetC2cModeInfoV, (void *device, unsigned int *enabled))

/* X(ours, the header's, value) */
#define CU_LIBS_CONSTANTS(X)                                        \
    X(NVRTC_OK, NVRTC_SUCCESS, 0)                                   \
    X(NVRTC_OUT_OF_MEMORY, NVRTC_ERROR_OUT_OF_MEMORY, 1)            \
    X(BLAS_OK, CUBLAS_STATUS_SUCCESS, 0)                            \
    X(BLAS_NOT_INITIALIZED, CUBLAS_STATUS_NOT_INITIALIZED, 1)       \
    X(BLAS_ALLOC_FAILED, CUBLAS_STATUS_ALLOC_FAILED, 3)             \
    X(BLAS_ARCH_MISMATCH, CUBLAS_STATUS_ARCH_MISMATCH, 8)           \
    X(BLAS_EXECUTION_FAILED, CUBLAS_STATUS_EXECUTION_FAILED, 13)    \
    X(BLAS_NOT_SUPPORTED, CUBLAS_STATUS_NOT_SUPPORTED, 15)          \
    X(BLAS_OP_N, CUBLAS_OP_N, 0)                                    \
    X(BLAS_ALGORITHM_DEFAULT, CUBLAS_GEMM_DEFAULT, -1)              \
    X(BLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F, 68)                     \
    X(BLAS_COMPUTE_32F_FAST_TF32, CUBLAS_COMPUTE_32F_FAST_TF32, 77) \
    X(BLAS_R_32F, CUDA_R_32F, 0)                                    \
    X(BLAS_R_16BF, CUDA_R_16BF, 14)

#define CU_LIBS_ENUM(ours, theirs, value) ours = value,
enum cu_libs_constant { CU_LIBS_CONSTANTS(CU_LIBS_ENUM) };
#undef CU_LIBS_ENUM

struct nvrtc_api {
#define CU_LIBS_MEMBER(needed, name, arguments) nvrtcResult(*name) arguments;
    NVRTC_FUNCTIONS(CU_LIBS_MEMBER)
#undef CU_LIBS_MEMBER
};
struct cublas_api {
#define CU_LIBS_MEMBER(needed, name, arguments) cublasStatus_t(*name) arguments;
    CUBLAS_FUNCTIONS(CU_LIBS_MEMBER)
#undef CU_LIBS_MEMBER
};
struct nvml_api {
#define CU_LIBS_MEMBER(needed, name, arguments) int(*name) arguments;
    NVML_FUNCTIONS(CU_LIBS_MEMBER)
#undef CU_LIBS_MEMBER
};

/* The libraries of the toolkit are looked for under the majors that this driver runs, newest first: already loaded in the process (whatever
 * its major), on the loader's path, in $CUDA_HOME, $CUDA_PATH and /usr/local/cuda, then in the `nvidia` wheels of a Python installation.
 * Loaded once, kept. SIDE_NO_LIBRARY: not found; the message says where was looked and what to install. Any thread. */
side_status cu_nvrtc(int driver_version, const struct nvrtc_api **api);
side_status cu_cublas(int driver_version, const struct cublas_api **api);
side_status cu_nvml(const struct nvml_api **api);

#ifdef SIDE_TESTING
/* Tables to give instead; with `only` a NULL one is SIDE_NO_LIBRARY, else it is the real library again. */
struct cu_libs_test {
    const struct nvrtc_api *nvrtc;
    const struct cublas_api *cublas;
    const struct nvml_api *nvml;
    bool only;
};
void cu_libs_test(const struct cu_libs_test *tables); /* NULL: the real ones */
#endif

#endif
