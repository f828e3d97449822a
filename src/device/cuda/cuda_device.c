/* SPDX-License-Identifier: MIT */
#include "cuda.h"

#include "alloc.h"
#include "cu_load.h"
#include "cuda_impl.h"
#include "error.h"
#include "ops.h"
#include "os.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* cuda_status wants a context; before there is one this stands in. */
static side_status early_status(const struct cu_api *cu, CUresult result, const char *call, int ordinal)
{
    dev_context none = {.cu = cu};
    return cuda_status(&none, result, call, "device %d", ordinal);
}

static unsigned device_count(char *why, size_t why_bytes)
{
    const struct cu_api *cu;
    int count = 0;
    side_status status = cu_load(&cu);

    if (status == SIDE_OK)
        status = early_status(cu, cu->cuDeviceGetCount(&count), "cuDeviceGetCount", 0);
    if (status == SIDE_OK && count <= 0)
        status = error_set(SIDE_NO_DEVICE, "cuDeviceGetCount", "the driver sees no GPU");
    if (status != SIDE_OK) {
        snprintf(why, why_bytes, "%s", side_last_error()->message);
        return 0;
    }
    return (unsigned)count;
}

/* ---------------------------------------------------------------- open and close */

static side_status ordinal_parse(const struct cu_api *cu, const char *args, int *ordinal)
{
    int count = 0;
    char *end;

    for (const char *p = args; *p != '\0'; p++)
        if (!isdigit((unsigned char)*p) || p - args > 4)
            return error_set(SIDE_INVALID, "side_device_open", "\"cuda:%s\": a number is expected at \"%s\"", args, p);
    const long n = strtol(args, &end, 10); /* "" is 0 */
    side_status status = early_status(cu, cu->cuDeviceGetCount(&count), "cuDeviceGetCount", 0);
    if (status != SIDE_OK)
        return status;
    if (n >= count)
        return error_set(SIDE_NO_DEVICE, "side_device_open", "there is no cuda:%ld; the driver sees %d GPU%s", n, count,
                         count == 1 ? "" : "s");
    *ordinal = (int)n;
    return SIDE_OK;
}

static int attribute(const dev_context *context, CUdevice_attribute which)
{
    int value = 0;
    return context->cu->cuDeviceGetAttribute(&value, which, context->device) == CUDA_SUCCESS ? value : 0;
}

static void names_read(dev_context *context, side_device_props *p)
{
    CUuuid uuid;

    if (context->cu->cuDeviceGetName(p->name, sizeof(p->name), context->device) != CUDA_SUCCESS)
        snprintf(p->name, sizeof(p->name), "unknown GPU");
    if (context->cu->cuDeviceGetPCIBusId(p->pci, sizeof(p->pci), context->device) != CUDA_SUCCESS)
        p->pci[0] = '\0';
    for (char *c = p->pci; *c != '\0'; c++) /* sysfs writes it so */
        *c = (char)tolower((unsigned char)*c);
    if (context->cu->cuDeviceGetUuid(&uuid, context->device) == CUDA_SUCCESS) {
        size_t at = (size_t)snprintf(p->uuid, sizeof(p->uuid), "GPU");
        for (int i = 0; i < 16; i++)
            at += (size_t)snprintf(p->uuid + at, sizeof(p->uuid) - at, "%s%02x",
                                   i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "",
                                   (unsigned char)uuid.bytes[i]);
    }
}

static side_status props_read(dev_context *context, int ordinal)
{
    side_device_props *p = &context->props;
    const int engines = attribute(context, CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT);

    names_read(context, p);
    snprintf(p->spec, sizeof(p->spec), "cuda:%d", ordinal);
    p->ordinal = ordinal;
    p->compute_major = attribute(context, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    p->compute_minor = attribute(context, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    if (p->compute_major * 10 + p->compute_minor < CU_COMPUTE_LEAST)
        return error_set(SIDE_DRIVER_TOO_OLD, "cuDeviceGetAttribute",
                         "cuda:%d, %s, has compute capability %d.%d; %d.%d or newer is needed", ordinal, p->name,
                         p->compute_major, p->compute_minor, CU_COMPUTE_LEAST / 10, CU_COMPUTE_LEAST % 10);
    p->copy_engines = engines >= 2 ? 2 : 1; /* more serve peers and graphics; host copies go one a direction */
    p->multiprocessors = attribute(context, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    p->can_register = attribute(context, CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED) != 0;
    p->integrated = attribute(context, CU_DEVICE_ATTRIBUTE_INTEGRATED) != 0;
    p->numa_node = cuda_numa_node(p->pci);
    context->can_register_read_only = attribute(context, CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED) != 0;
    context->coherent = attribute(context, CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES) != 0;
    side_status status = early_status(context->cu, context->cu->cuDriverGetVersion(&p->driver_version),
                                      "cuDriverGetVersion", ordinal);
    if (status == SIDE_OK)
        status = early_status(context->cu, context->cu->cuDeviceTotalMem(&p->memory_bytes, context->device),
                              "cuDeviceTotalMem", ordinal);
    return status;
}

static side_status device_open(const char *args, dev_context **context)
{
    const struct cu_api *cu;
    int ordinal = 0;
    dev_context *c;
    side_status status = cu_load(&cu);

    if (status == SIDE_OK)
        status = ordinal_parse(cu, args, &ordinal);
    if (status != SIDE_OK)
        return status;
    c = mem_zalloc(1, sizeof(*c));
    if (c == NULL)
        return SIDE_NO_MEMORY;
    c->cu = cu;
    atomic_init(&c->no_batch, false);
    status = early_status(cu, cu->cuDeviceGet(&c->device, ordinal), "cuDeviceGet", ordinal);
    if (status == SIDE_OK)
        status = props_read(c, ordinal);
    if (status == SIDE_OK) {
        CUresult r = cu->cuDevicePrimaryCtxRetain(&c->context, c->device);
        status = early_status(cu, r, "cuDevicePrimaryCtxRetain", ordinal);
        if (r == CUDA_ERROR_DEVICE_UNAVAILABLE)
            status = error_set_device(SIDE_NO_DEVICE, "cuDevicePrimaryCtxRetain", r,
                                      "cuda:%d is taken by another process (exclusive compute mode)", ordinal);
    }
    if (status != SIDE_OK) {
        mem_free(c);
        return status;
    }
    kernels_init(c);
    blas_init(c);
    blocks_init(c);
    *context = c;
    return SIDE_OK;
}

static void device_close(dev_context *context)
{
    if (context == NULL)
        return;
    const bool entered = cuda_enter(context) == SIDE_OK;
    blocks_finish(context, entered);
    blas_finish(context);
    kernels_finish(context);
    if (entered)
        cuda_leave(context);
    context->cu->cuDevicePrimaryCtxRelease(context->device);
    mem_free(context);
}

/* ---------------------------------------------------------------- facts */

static side_status device_props(dev_context *context, side_device_props *props)
{
    side_device_props p = context->props;

    p.kernels = kernels_resolve(context, p.kernels_from, sizeof(p.kernels_from));
    *props = p;
    return SIDE_OK;
}

static side_status device_memory(dev_context *context, size_t *free_bytes, size_t *total_bytes)
{
    size_t available = 0, total = 0;
    side_status status = cuda_enter(context);

    if (status != SIDE_OK)
        return status;
    status = cuda_status(context, context->cu->cuMemGetInfo(&available, &total), "cuMemGetInfo", "device %d",
                         context->props.ordinal);
    cuda_leave(context);
    if (status == SIDE_OK) {
        *free_bytes = available;
        *total_bytes = total;
    }
    return status;
}

static uint64_t device_now(dev_context *context)
{
    (void)context;
    return os_now_ns();
}

static void device_clock_join(dev_context *context, uint64_t ns)
{
    (void)context;
    (void)ns;
}

static side_status device_model(dev_context *context, side_machine *machine)
{
    (void)context;
    (void)machine;
    return error_set(SIDE_UNSUPPORTED, "cuda.model", "hardware has no model; measure it: sidestream bench --save");
}

static side_status device_op(dev_stream *stream, const side_op *op)
{
    side_status status = ops_check(op, 16); /* a misaligned access would cost the context */

    if (status == SIDE_OK)
        status = cuda_enter(stream->context);
    if (status != SIDE_OK)
        return status;
    status = op->id == SIDE_OP_MATMUL ? blas_matmul(stream, op) : kernels_op(stream, op);
    cuda_leave(stream->context);
    return status;
}

const struct side_device_ops cuda_device_ops = {
    .abi = SIDE_DEVICE_ABI,
    .kind = "cuda",
    .count = device_count,
    .open = device_open,
    .close = device_close,
    .props = device_props,
    .link = cuda_link,
    .memory = device_memory,
    .model = device_model,
    .now = device_now,
    .clock_join = device_clock_join,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .host_register = cuda_host_register,
    .host_unregister = cuda_host_unregister,
    .host_alloc = cuda_host_alloc,
    .host_free = cuda_host_free,
    .memory_kind = cuda_memory_kind,
    .stream_create = cuda_stream_create,
    .stream_wrap = cuda_stream_wrap,
    .stream_destroy = cuda_stream_destroy,
    .stream_native = cuda_stream_native,
    .stream_wait = cuda_stream_wait,
    .stream_query = cuda_stream_query,
    .stream_is_capturing = cuda_stream_is_capturing,
    .event_create = cuda_event_create,
    .event_destroy = cuda_event_destroy,
    .event_record = cuda_event_record,
    .event_query = cuda_event_query,
    .event_wait = cuda_event_wait,
    .event_elapsed = cuda_event_elapsed,
    .copy = cuda_copy,
    .copy_blocks = cuda_copy_blocks,
    .set = cuda_set,
    .op = device_op,
    .host_fn = cuda_host_fn,
};
