/* SPDX-License-Identifier: MIT
 *
 * NVRTC, cuBLAS and NVML that are not there: the libraries beside the driver of fake_cuda.h. */
#ifndef FAKE_LIBS_H
#define FAKE_LIBS_H

#include "fake_state.h"

static nvrtcResult f_nvrtcVersion(int *major, int *minor)
{
    *major = 13;
    *minor = 0;
    return fails("nvrtcVersion");
}

static nvrtcResult f_nvrtcGetNumSupportedArchs(int *archs)
{
    *archs = 3;
    return fails("nvrtcGetNumSupportedArchs");
}

static nvrtcResult f_nvrtcGetSupportedArchs(int *archs)
{
    memcpy(archs, fake.archs, sizeof(fake.archs));
    return fails("nvrtcGetSupportedArchs");
}

static nvrtcResult f_nvrtcCreateProgram(nvrtcProgram *program, const char *source, const char *name, int header_count,
                                        const char *const *headers, const char *const *include_names)
{
    (void)headers;
    (void)include_names;
    if (fails("nvrtcCreateProgram"))
        return 1;
    assert_true(strstr(source, "side_xxh3_blocks") != NULL && name != NULL && header_count == 0);
    *program = make(FAKE_PROGRAM);
    return 0;
}

static nvrtcResult f_nvrtcCompileProgram(nvrtcProgram program, int option_count, const char *const *options)
{
    live(program, FAKE_PROGRAM);
    assert_true(option_count >= 1);
    snprintf(fake.target, sizeof(fake.target), "%s", strchr(options[0], '=') + 1);
    return fails("nvrtcCompileProgram") ? 6 : 0;
}

static nvrtcResult size_of(nvrtcProgram program, size_t *bytes, const char *name)
{
    live(program, FAKE_PROGRAM);
    *bytes = 8;
    return fails(name);
}

static nvrtcResult text_of(nvrtcProgram program, char *text, const char *name)
{
    live(program, FAKE_PROGRAM);
    memcpy(text, "bad line", 8);
    return fails(name);
}

static nvrtcResult f_nvrtcGetCUBINSize(nvrtcProgram program, size_t *bytes)
{
    assert_memory_equal(fake.target, "sm_", 3);
    return size_of(program, bytes, "nvrtcGetCUBINSize");
}

static nvrtcResult f_nvrtcGetCUBIN(nvrtcProgram program, char *cubin)
{
    return text_of(program, cubin, "nvrtcGetCUBIN");
}

static nvrtcResult f_nvrtcGetPTXSize(nvrtcProgram program, size_t *bytes)
{
    assert_memory_equal(fake.target, "compute_", 8);
    return size_of(program, bytes, "nvrtcGetPTXSize");
}

static nvrtcResult f_nvrtcGetPTX(nvrtcProgram program, char *ptx)
{
    return text_of(program, ptx, "nvrtcGetPTX");
}

static nvrtcResult f_nvrtcGetProgramLogSize(nvrtcProgram program, size_t *bytes)
{
    return size_of(program, bytes, "nvrtcGetProgramLogSize");
}

static nvrtcResult f_nvrtcGetProgramLog(nvrtcProgram program, char *log)
{
    return text_of(program, log, "nvrtcGetProgramLog");
}

static nvrtcResult f_nvrtcDestroyProgram(nvrtcProgram *program)
{
    unmake(*program, FAKE_PROGRAM);
    return fails("nvrtcDestroyProgram");
}

static cublasStatus_t f_cublasCreate_v2(cublasHandle_t *handle)
{
    entered();
    if (fails("cublasCreate"))
        return BLAS_NOT_INITIALIZED;
    *handle = make(FAKE_BLAS);
    return BLAS_OK;
}

static cublasStatus_t f_cublasDestroy_v2(cublasHandle_t handle)
{
    unmake(handle, FAKE_BLAS);
    return fails("cublasDestroy") ? BLAS_NOT_INITIALIZED : BLAS_OK;
}

static cublasStatus_t f_cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream)
{
    live(handle, FAKE_BLAS);
    is_stream(stream);
    if (fails("cublasSetStream"))
        return BLAS_NOT_INITIALIZED;
    fake.gemm_stream = stream;
    fake.workspace = NULL; /* as documented: back to cuBLAS's own */
    return BLAS_OK;
}

static cublasStatus_t f_cublasSetWorkspace_v2(cublasHandle_t handle, void *workspace, size_t bytes)
{
    live(handle, FAKE_BLAS);
    if (fails("cublasSetWorkspace"))
        return BLAS_NOT_INITIALIZED;
    assert_true(bytes == (size_t)(fake.major >= 9 ? 32 : 4) << 20);
    fake.workspace = workspace;
    return BLAS_OK;
}

static cublasStatus_t f_cublasGemmEx(cublasHandle_t handle, cublasOperation_t a_op, cublasOperation_t b_op, int m,
                                     int n, int k, const void *alpha, const void *a, cudaDataType a_type, int a_stride,
                                     const void *b, cudaDataType b_type, int b_stride, const void *beta, void *c,
                                     cudaDataType c_type, int c_stride, cublasComputeType_t compute,
                                     cublasGemmAlgo_t algorithm)
{
    entered();
    live(handle, FAKE_BLAS);
    if (fails("cublasGemmEx"))
        return BLAS_EXECUTION_FAILED;
    assert_non_null(fake.workspace);
    assert_true(a_op == BLAS_OP_N && b_op == BLAS_OP_N && algorithm == BLAS_ALGORITHM_DEFAULT && a_type == b_type);
    assert_true(compute == BLAS_COMPUTE_32F || compute == BLAS_COMPUTE_32F_FAST_TF32);
    assert_true(a_stride == m && b_stride == k && c_stride == m);
    if (a_type == BLAS_R_32F && c_type == BLAS_R_32F)
        for (int j = 0; j < n; j++) /* column-major */
            for (int i = 0; i < m; i++) {
                float sum = 0;
                for (int p = 0; p < k; p++)
                    sum += ((const float *)a)[i + (size_t)p * (size_t)m] * ((const float *)b)[p + (size_t)j * (size_t)k];
                ((float *)c)[i + (size_t)j * (size_t)m] = *(const float *)alpha * sum + *(const float *)beta;
            }
    fake.gemms++;
    return BLAS_OK;
}

static int f_nvmlInit_v2(void)
{
    if (fails("nvmlInit"))
        return 1;
    count(&fake.live[FAKE_NVML], 1);
    return 0;
}

static int f_nvmlShutdown(void)
{
    count(&fake.live[FAKE_NVML], -1);
    return fails("nvmlShutdown");
}

static int f_nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device)
{
    assert_string_equal(id, "0000:0a:00.0");
    *device = &fake;
    return fails("nvmlDeviceGetHandleByPciBusId");
}

static int f_nvmlDeviceGetCurrPcieLinkGeneration(void *device, unsigned int *generation)
{
    assert_ptr_equal(device, &fake);
    *generation = 1;
    return fails("nvmlDeviceGetCurrPcieLinkGeneration");
}

static int f_nvmlDeviceGetCurrPcieLinkWidth(void *device, unsigned int *width)
{
    assert_ptr_equal(device, &fake);
    *width = 8;
    return fails("nvmlDeviceGetCurrPcieLinkWidth");
}

static int f_nvmlDeviceGetMaxPcieLinkGeneration(void *device, unsigned int *generation)
{
    assert_ptr_equal(device, &fake);
    *generation = 5;
    return fails("nvmlDeviceGetMaxPcieLinkGeneration");
}

static int f_nvmlDeviceGetMaxPcieLinkWidth(void *device, unsigned int *width)
{
    assert_ptr_equal(device, &fake);
    *width = 16;
    return fails("nvmlDeviceGetMaxPcieLinkWidth");
}

static int f_nvmlDeviceGetC2cModeInfoV(void *device, unsigned int *enabled)
{
    assert_ptr_equal(device, &fake);
    *enabled = fake.c2c;
    return fails("nvmlDeviceGetC2cModeInfo");
}

#define FAKE_MEMBER(needed, name, arguments) .name = f_##name,
static const struct nvrtc_api fake_nvrtc = {NVRTC_FUNCTIONS(FAKE_MEMBER)};
static const struct cublas_api fake_cublas = {CUBLAS_FUNCTIONS(FAKE_MEMBER)};
static const struct nvml_api fake_nvml = {NVML_FUNCTIONS(FAKE_MEMBER)};
#undef FAKE_MEMBER

#endif
