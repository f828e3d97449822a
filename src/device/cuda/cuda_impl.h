/* SPDX-License-Identifier: MIT
 *
 * The CUDA device inside. Each op: pushes the primary context, calls the driver, pops it, so that the calling thread's own context (PyTorch's)
 * is as it was, on failure too. What the driver says goes through cuda_status(), the one place where a CUresult becomes a side_status.
 *
 *      cuda_device.c   open, close, props, memory      cuda_stream.c   streams, events, waiting
 *      cuda_memory.c   allocate, pin, kinds            cuda_copy.c     copies, set, host functions
 *      cuda_link.c     PCIe, NUMA                      cuda_kernels.c  the named ops' kernels
 *      cuda_error.c    enter, leave, cuda_status       cuda_blas.c     matmul
 *      cuda_blocks.c   scattered blocks, gathered      cuda_pack.c     and packed; cuda_table.c: what their kernels read
 */
#ifndef CUDA_IMPL_H
#define CUDA_IMPL_H

#include "cu_abi.h"
#include "cu_libs.h"
#include "sidestream_device.h"

#include <pthread.h>
#include <stdatomic.h>

enum cuda_kernel {
    KERNEL_CAST_F32_F16,
    KERNEL_CAST_F32_BF16,
    KERNEL_CAST_F16_F32,
    KERNEL_CAST_F16_BF16,
    KERNEL_CAST_BF16_F32,
    KERNEL_CAST_BF16_F16,
    KERNEL_CAST_ANY, /* all other pairs */
    KERNEL_XXH3_BLOCKS,
    KERNEL_AFFINE,
    KERNEL_SPIN,
    KERNEL_GATHER,
    KERNEL_PACK,
    KERNEL_PACK_REST,
    KERNEL_COUNT
};

struct cuda_kernels {
    pthread_mutex_t mutex; /* guards what follows; held while loading and compiling */
    enum { KERNELS_UNKNOWN, KERNELS_TO_COMPILE, KERNELS_READY, KERNELS_NONE } state;
    CUmodule module; /* READY */
    CUfunction function[KERNEL_COUNT];
    char from[96]; /* as props.kernels_from; NONE: the reason */
};

/* Scratch memory that cuBLAS uses on one stream. An idle one may still be in use by the stream that had it, up to `last_use`. */
struct cuda_workspace {
    struct cuda_workspace *next; /* among the idle or the kept */
    CUdeviceptr data;
    size_t bytes;
    CUevent last_use;
    bool in_graph; /* a captured graph may use it whenever it is launched: never for another stream */
};

struct cuda_blas {
    pthread_mutex_t mutex; /* guards what follows, and the handle's use: it has one stream and one workspace at a time */
    const struct cublas_api *api;
    cublasHandle_t handle;       /* NULL until the first matmul */
    struct cuda_workspace *idle; /* of streams that are gone; freed at close, because freeing waits for the device */
    struct cuda_workspace *kept; /* likewise, in graphs */
};

/* Tables for kernels that copy blocks: pinned memory, each with the event of its last use. */
struct cuda_tables {
    pthread_mutex_t mutex;    /* guards what follows */
    struct cuda_table *first; /* the one used longest ago first; without those that are taken */
    size_t count, bytes;      /* taken ones included */
};

struct cuda_pack_buffer {
    CUdeviceptr data; /* 0 until needed: SLOTS slots of slot_bytes */
    size_t slot_bytes;
};

struct cuda_pack {
    pthread_mutex_t mutex; /* guards what follows; held while a call is queued: calls follow each other on `stream` */
    bool ready, refused;   /* what follows is made; there is nothing to be made of it */
    CUstream stream;       /* of the kernel: the highest priority */
    CUevent fork, tail;    /* the caller's stream so far, before and behind a call */
    CUdeviceptr state;     /* struct pack_state of kernels.cu */
    struct cuda_pack_buffer small, large;
    uint32_t number; /* of the next call's first chunk; cyclic */
};

struct dev_context {
    const struct cu_api *cu;
    CUdevice device;
    CUcontext context;       /* primary, retained */
    side_device_props props; /* without the kernels; constant */
    bool can_register_read_only, coherent;
    atomic_bool no_batch; /* the driver refused one */
    struct cuda_kernels kernels;
    struct cuda_blas blas;
    struct cuda_tables tables;
    struct cuda_pack pack;
};

struct dev_stream {
    dev_context *context;
    CUstream handle;
    bool owned;
    struct cuda_workspace *workspace; /* NULL until the stream's first matmul; guarded by context->blas.mutex */
};

struct dev_event {
    dev_context *context;
    CUevent handle;
    bool timing;
};

/* ---- cuda_error.c */

/* Makes the primary context current on this thread, and the thread's calls harmless to any graph capture; every success needs a cuda_leave. */
side_status cuda_enter(dev_context *context);
/* The same for calls that only queue on `stream`, or ask whether it captures: no capture minds those, so this costs one driver call, and no more where the
 * context is current already (PyTorch's threads). */
side_status cuda_enter_to_queue(dev_context *context, CUstream stream);
void cuda_leave(dev_context *context);

/* SIDE_OK for success, SIDE_AGAIN (no detail) for NOT_READY; else the error detail with `call`, the formatted arguments, the driver's words.
 * Out of memory: SIDE_NO_DEVICE_MEMORY and what is free. A fault that leaves the context unusable: SIDE_DEVICE_LOST. */
side_status cuda_status(dev_context *context, CUresult result, const char *call, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* After these no call on the context can succeed. */
bool cuda_is_lost(CUresult result);

/* ---- cuda_kernels.c */

void kernels_init(dev_context *context);
void kernels_finish(dev_context *context); /* entered */
/* Whether there are kernels and whence. Loads the fatbin, or looks for NVRTC without compiling. Blocks for some ms at first. Not entered. */
bool kernels_resolve(dev_context *context, char *from, size_t from_bytes);
side_status kernels_op(dev_stream *stream, const side_op *op); /* all but MATMUL; entered */
/* SIDE_UNSUPPORTED with `where` and the reason where there are none. May load or compile, which may wait for the device. Entered. */
side_status kernels_get(dev_context *context, enum cuda_kernel id, const char *where, CUfunction *function);

/* ---- cuda_blas.c */

void blas_init(dev_context *context);
void blas_finish(dev_context *context);                         /* entered */
void blas_stream_finish(dev_stream *stream);                    /* entered; keeps its workspace for another stream */
side_status blas_matmul(dev_stream *stream, const side_op *op); /* entered */

/* ---- cuda_copy.c */

/* Paths LOOP and BATCH. Entered. */
side_status cuda_copy_queue(dev_stream *stream, side_copy_kind kind, const side_piece *pieces, size_t count,
                            side_path path);

/* ---- cuda_blocks.c */

void blocks_init(dev_context *context);
void blocks_finish(dev_context *context, bool entered);

/* ---- cuda_link.c */

side_status cuda_link(dev_context *context, side_link *link);
int cuda_numa_node(const char *pci); /* -1 unknown */
#ifdef SIDE_TESTING
extern const char *cuda_test_sysfs; /* instead of "/sys" where set */
#endif

/* ---- the other files' ops, for the table */

side_status cuda_alloc(dev_context *context, size_t bytes, void **data);
void cuda_free(dev_context *context, void *data);
side_status cuda_host_register(dev_context *context, void *data, size_t bytes, bool read_only);
side_status cuda_host_unregister(dev_context *context, void *data);
side_status cuda_host_alloc(dev_context *context, size_t bytes, void **data);
void cuda_host_free(dev_context *context, void *data);
side_status cuda_memory_kind(dev_context *context, const void *data, side_memory_kind *kind);

side_status cuda_stream_create(dev_context *context, dev_stream **stream);
side_status cuda_stream_wrap(dev_context *context, void *native, dev_stream **stream);
void cuda_stream_destroy(dev_stream *stream);
void *cuda_stream_native(dev_stream *stream);
side_status cuda_stream_wait(dev_stream *stream, dev_event *event);
side_status cuda_stream_query(dev_stream *stream);
side_status cuda_stream_is_capturing(dev_stream *stream, bool *capturing);
side_status cuda_event_create(dev_context *context, bool timing, dev_event **event);
void cuda_event_destroy(dev_event *event);
side_status cuda_event_record(dev_event *event, dev_stream *stream);
side_status cuda_event_query(dev_event *event);
side_status cuda_event_wait(dev_event *event, uint64_t timeout_ns);
side_status cuda_event_elapsed(dev_event *begin, dev_event *end, double *ns);

side_status cuda_copy(dev_stream *stream, side_copy_kind kind, void *dst, const void *src, size_t bytes);
side_status cuda_copy_blocks(dev_stream *stream, side_copy_kind kind, const side_piece *pieces, size_t count,
                             side_path path);
side_status cuda_set(dev_stream *stream, void *dst, int value, size_t bytes);
side_status cuda_host_fn(dev_stream *stream, side_host_fn *fn, void *user, uint64_t sim_ns);

#endif
