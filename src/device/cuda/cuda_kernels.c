/* SPDX-License-Identifier: MIT
 *
 * Where the kernels come from. The fatbin that the build made, if it made one and the driver takes it; else the source, by NVRTC. Looking is done
 * when somebody asks for the properties; compiling, which takes a good part of a second, waits for the first op that needs a kernel. */
#include "cuda_impl.h"

#include "alloc.h"
#include "cuda_kernels_source.h"
#include "error.h"
#include "os.h"

#include <stdio.h>
#include <string.h>

#if SIDE_HAVE_FATBIN
#include "cuda_kernels_fatbin.h"
#endif

static const char *const names[KERNEL_COUNT] = {[KERNEL_CAST_F32_F16] = "side_cast_f32_f16",
                                                [KERNEL_CAST_F32_BF16] = "side_cast_f32_bf16",
                                                [KERNEL_CAST_F16_F32] = "side_cast_f16_f32",
                                                [KERNEL_CAST_F16_BF16] = "side_cast_f16_bf16",
                                                [KERNEL_CAST_BF16_F32] = "side_cast_bf16_f32",
                                                [KERNEL_CAST_BF16_F16] = "side_cast_bf16_f16",
                                                [KERNEL_CAST_ANY] = "side_cast_any",
                                                [KERNEL_XXH3_BLOCKS] = "side_xxh3_blocks",
                                                [KERNEL_AFFINE] = "side_affine",
                                                [KERNEL_SPIN] = "side_spin",
                                                [KERNEL_GATHER] = "side_gather",
                                                [KERNEL_PACK] = "side_pack",
                                                [KERNEL_PACK_REST] = "side_pack_rest"};

/* ---------------------------------------------------------------- loading */

/* The image is not for this GPU or driver: another one may be. */
static bool is_refused(CUresult r)
{
    return r == CUDA_ERROR_INVALID_IMAGE || r == CUDA_ERROR_NO_BINARY_FOR_GPU || r == CUDA_ERROR_INVALID_PTX ||
           r == CUDA_ERROR_UNSUPPORTED_PTX_VERSION || r == CUDA_ERROR_JIT_COMPILER_NOT_FOUND ||
           r == CUDA_ERROR_JIT_COMPILATION_DISABLED || r == CUDA_ERROR_INVALID_SOURCE || r == CUDA_ERROR_NOT_FOUND;
}

/* SIDE_OK: READY. SIDE_UNSUPPORTED: refused. Else the driver failed and nothing is decided. Locked, entered. */
static side_status image_load(dev_context *context, const void *image, const char *from)
{
    struct cuda_kernels *k = &context->kernels;
    CUfunction function[KERNEL_COUNT];
    CUmodule module = NULL;
    const char *call = "cuModuleLoadData";

    CUresult r = context->cu->cuModuleLoadData(&module, image);
    const bool made = r == CUDA_SUCCESS;
    for (int i = 0; i < KERNEL_COUNT && r == CUDA_SUCCESS; i++) {
        call = "cuModuleGetFunction";
        r = context->cu->cuModuleGetFunction(&function[i], module, names[i]);
    }
    if (r != CUDA_SUCCESS && made)
        context->cu->cuModuleUnload(module);
    side_status status = cuda_status(context, r, call, "kernels from %s", from);
    if (r != CUDA_SUCCESS)
        return is_refused(r) ? SIDE_UNSUPPORTED : status;
    k->module = module;
    memcpy(k->function, function, sizeof(function));
    if (from != k->from)
        snprintf(k->from, sizeof(k->from), "%s", from);
    k->state = KERNELS_READY;
    log_message(SIDE_LEVEL_INFO, "cuda", "kernels from %s", k->from);
    return SIDE_OK;
}

static side_status fatbin_load(dev_context *context)
{
    if (os_env_flag("SIDESTREAM_NO_FATBIN"))
        return SIDE_UNSUPPORTED;
#if SIDE_HAVE_FATBIN
    return image_load(context, cuda_kernels_fatbin, "fatbin");
#else
    (void)context;
    return SIDE_UNSUPPORTED;
#endif
}

/* ---------------------------------------------------------------- compiling */

/* "sm_90" where this NVRTC knows the GPU; else "compute_XX", the newest below it that it knows, whose PTX the driver compiles. */
static bool target_choose(const dev_context *context, const struct nvrtc_api *api, char *target, size_t bytes)
{
    const int wanted = context->props.compute_major * 10 + context->props.compute_minor;
    int archs[256], count = 0, best = 0;

    if (api->nvrtcGetNumSupportedArchs(&count) != NVRTC_OK || count < 1 || count > 256 ||
        api->nvrtcGetSupportedArchs(archs) != NVRTC_OK)
        return false;
    for (int i = 0; i < count; i++)
        if (archs[i] <= wanted && archs[i] > best)
            best = archs[i];
    snprintf(target, bytes, "%s_%d", best == wanted ? "sm" : "compute", best);
    return best != 0;
}

/* The compiled image, to be freed; NULL with the error detail. */
static char *image_get(const struct nvrtc_api *api, nvrtcProgram program, bool binary, const char *target)
{
    char option[64], log[160] = "", *image = NULL, *text = NULL;
    const char *const options[] = {option, "--std=c++14"};
    size_t bytes = 0;

    snprintf(option, sizeof(option), "--gpu-architecture=%s", target);
    nvrtcResult r = api->nvrtcCompileProgram(program, 2, options);
    if (r != NVRTC_OK) {
        if (api->nvrtcGetProgramLogSize(program, &bytes) == NVRTC_OK && bytes > 0)
            text = mem_zalloc(1, bytes + 1);
        if (text != NULL && api->nvrtcGetProgramLog(program, text) == NVRTC_OK)
            snprintf(log, sizeof(log), "%.*s", (int)strcspn(text, "\n"), text);
        mem_free(text);
        error_set_device(SIDE_UNSUPPORTED, "nvrtcCompileProgram", r, "NVRTC does not compile the kernels for %s: %s",
                         target, log);
        return NULL;
    }
    r = binary ? api->nvrtcGetCUBINSize(program, &bytes) : api->nvrtcGetPTXSize(program, &bytes);
    if (r == NVRTC_OK && bytes > 0)
        image = mem_zalloc(1, bytes + 1);
    else
        error_set_device(SIDE_UNSUPPORTED, "nvrtcGetCUBINSize", r, "NVRTC gave no image for %s", target);
    if (image == NULL)
        return NULL;
    r = binary ? api->nvrtcGetCUBIN(program, image) : api->nvrtcGetPTX(program, image);
    if (r == NVRTC_OK)
        return image;
    mem_free(image);
    error_set_device(SIDE_UNSUPPORTED, "nvrtcGetCUBIN", r, "NVRTC gave no image for %s", target);
    return NULL;
}

/* TO_COMPILE becomes READY, or NONE where it cannot work. Locked, entered. */
static side_status compile(dev_context *context)
{
    struct cuda_kernels *k = &context->kernels;
    const struct nvrtc_api *api;
    nvrtcProgram program = NULL;
    char target[24], *image;
    side_status status = cu_nvrtc(context->props.driver_version, &api);

    if (status != SIDE_OK)
        return status;
    if (!target_choose(context, api, target, sizeof(target)))
        return error_set(SIDE_UNSUPPORTED, "nvrtcGetSupportedArchs", "NVRTC does not know this GPU's architecture");
    const uint64_t begin = os_now_ns();
    nvrtcResult r = api->nvrtcCreateProgram(&program, (const char *)cuda_kernels_source, "sidestream_kernels.cu", 0,
                                            NULL, NULL);
    if (r != NVRTC_OK)
        return error_set_device(r == NVRTC_OUT_OF_MEMORY ? SIDE_NO_MEMORY : SIDE_UNSUPPORTED, "nvrtcCreateProgram", r,
                                "NVRTC does not take the kernels' source");
    image = image_get(api, program, target[0] == 's', target);
    if (image == NULL) {
        status = side_last_error()->status; /* set just above, on this thread */
    } else {
        log_message(SIDE_LEVEL_INFO, "cuda", "%s compiled the kernels for %s in %.0f ms", k->from, target,
                    (double)(os_now_ns() - begin) / 1e6);
        status = image_load(context, image, k->from);
        mem_free(image);
    }
    api->nvrtcDestroyProgram(&program);
    if (status == SIDE_UNSUPPORTED) {
        k->state = KERNELS_NONE;
        snprintf(k->from, sizeof(k->from), "%.95s", side_last_error()->message);
    }
    return status;
}

/* UNKNOWN becomes something else, but where the driver itself fails. Locked, entered. */
static side_status look(dev_context *context)
{
    struct cuda_kernels *k = &context->kernels;
    const struct nvrtc_api *api;
    char target[24];
    int major = 0, minor = 0;
    side_status status = fatbin_load(context);

    if (status != SIDE_UNSUPPORTED)
        return status;
    if (cu_nvrtc(context->props.driver_version, &api) != SIDE_OK || api->nvrtcVersion(&major, &minor) != NVRTC_OK) {
        k->state = KERNELS_NONE;
        snprintf(k->from, sizeof(k->from), "no fatbin for this GPU and driver, and no NVRTC (libnvrtc) to compile with");
    } else if (!target_choose(context, api, target, sizeof(target))) {
        k->state = KERNELS_NONE;
        snprintf(k->from, sizeof(k->from), "no fatbin for this GPU and driver, and NVRTC %d.%d does not know it", major,
                 minor);
    } else {
        k->state = KERNELS_TO_COMPILE;
        snprintf(k->from, sizeof(k->from), "NVRTC %d.%d", major, minor);
    }
    return SIDE_OK;
}

void kernels_init(dev_context *context)
{
    pthread_mutex_init(&context->kernels.mutex, NULL);
}

void kernels_finish(dev_context *context)
{
    if (context->kernels.state == KERNELS_READY)
        context->cu->cuModuleUnload(context->kernels.module);
    context->kernels.state = KERNELS_NONE;
    pthread_mutex_destroy(&context->kernels.mutex);
}

bool kernels_resolve(dev_context *context, char *from, size_t from_bytes)
{
    struct cuda_kernels *k = &context->kernels;
    side_status status = cuda_enter(context);

    if (status == SIDE_OK) {
        pthread_mutex_lock(&k->mutex);
        if (k->state == KERNELS_UNKNOWN)
            status = look(context);
        snprintf(from, from_bytes, "%.95s", status == SIDE_OK ? k->from : side_last_error()->message);
        const bool have = status == SIDE_OK && k->state != KERNELS_NONE;
        pthread_mutex_unlock(&k->mutex);
        cuda_leave(context);
        return have;
    }
    snprintf(from, from_bytes, "%.95s", side_last_error()->message);
    return false;
}

side_status kernels_get(dev_context *context, enum cuda_kernel id, const char *where, CUfunction *function)
{
    struct cuda_kernels *k = &context->kernels;
    side_status status = SIDE_OK;

    pthread_mutex_lock(&k->mutex);
    if (k->state == KERNELS_UNKNOWN)
        status = look(context);
    if (status == SIDE_OK && k->state == KERNELS_TO_COMPILE)
        status = compile(context);
    if (status == SIDE_OK && k->state == KERNELS_NONE)
        status = error_set(SIDE_UNSUPPORTED, where, "no kernels: %s", k->from);
    if (status == SIDE_OK)
        *function = k->function[id];
    pthread_mutex_unlock(&k->mutex);
    return status;
}

/* ---------------------------------------------------------------- launching */

#define THREADS                   256
#define BLOCKS_PER_MULTIPROCESSOR 8 /* 2048 threads: as many as any has room for */

/* `work` threads are enough. */
static side_status launch(dev_stream *stream, enum cuda_kernel id, uint64_t work, void **arguments)
{
    dev_context *context = stream->context;
    const uint64_t most = (uint64_t)context->props.multiprocessors * BLOCKS_PER_MULTIPROCESSOR;
    const uint64_t wanted = (work + THREADS - 1) / THREADS;
    const unsigned blocks = (unsigned)(wanted < most ? wanted : most), threads = id == KERNEL_SPIN ? 1 : THREADS;
    CUfunction function;
    side_status status = kernels_get(context, id, "side_op_async", &function);

    if (status != SIDE_OK)
        return status;
    return cuda_status(context,
                       context->cu->cuLaunchKernel(function, blocks != 0 ? blocks : 1, 1, 1, threads, 1, 1, 0,
                                                   stream->handle, arguments, NULL),
                       "cuLaunchKernel", "%s, %u x %u, stream %p", names[id], blocks, threads, (void *)stream->handle);
}

static side_status cast(dev_stream *stream, const side_op *op)
{
    static const enum cuda_kernel kernels[3][3] = {
        [SIDE_F32] = {[SIDE_F16] = KERNEL_CAST_F32_F16, [SIDE_BF16] = KERNEL_CAST_F32_BF16},
        [SIDE_F16] = {[SIDE_F32] = KERNEL_CAST_F16_F32, [SIDE_BF16] = KERNEL_CAST_F16_BF16},
        [SIDE_BF16] = {[SIDE_F32] = KERNEL_CAST_BF16_F32, [SIDE_F16] = KERNEL_CAST_BF16_F16},
    };
    CUdeviceptr out = (CUdeviceptr)(uintptr_t)op->out, in = (CUdeviceptr)(uintptr_t)op->in[0];
    uint64_t n = op->dim[0];
    uint32_t from = op->type[0], to = op->type[1];

    if (from != to && from < 3 && to < 3)
        return launch(stream, kernels[from][to], (n + 3) / 4, (void *[]){&out, &in, &n});
    if (from != to)
        return launch(stream, KERNEL_CAST_ANY, n, (void *[]){&out, &in, &n, &from, &to});
    return cuda_status(stream->context,
                       stream->context->cu->cuMemcpyDtoDAsync(out, in, n * side_type_bytes(op->type[0]), stream->handle),
                       "cuMemcpyDtoDAsync", "stream %p", (void *)stream->handle);
}

side_status kernels_op(dev_stream *stream, const side_op *op)
{
    CUdeviceptr out = (CUdeviceptr)(uintptr_t)op->out, in = (CUdeviceptr)(uintptr_t)op->in[0];
    uint64_t n = op->dim[0];
    float scale = op->scale, bias = op->bias;

    if (n == 0)
        return SIDE_OK;
    switch (op->id) {
    case SIDE_OP_CAST: return cast(stream, op);
    case SIDE_OP_XXH3_BLOCKS: return launch(stream, KERNEL_XXH3_BLOCKS, n * 16, (void *[]){&out, &in, &n});
    case SIDE_OP_AFFINE: return launch(stream, KERNEL_AFFINE, (n + 3) / 4, (void *[]){&out, &in, &n, &scale, &bias});
    case SIDE_OP_SPIN: return launch(stream, KERNEL_SPIN, 1, (void *[]){&n});
    case SIDE_OP_MATMUL:
    case SIDE_OP_COUNT:
    default: return error_set(SIDE_UNSUPPORTED, "side_op_async", "no kernel for op %s", side_op_name(op->id));
    }
}
