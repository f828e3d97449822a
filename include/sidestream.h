/* SPDX-License-Identifier: MIT
 *
 * Sidestream: move data between host and GPU on a side stream while the GPU computes.
 *
 * What it is
 *   A device (a GPU, or the software device "sim" where there is none), streams and events on it,
 *   pinned host memory, and on top of them
 *     slots      memory with a "filled" fence and "drained" fences: race-free reuse   sidestream/slots.h
 *     pipelines  source -> H2D -> compute -> D2H -> sink, all lanes at once          sidestream/pipeline.h
 *     feeders    batches that come when they come, and are kept as long as one likes sidestream/feeder.h
 *     timelines  what overlapped, what did not, and what the bound is               sidestream/timeline.h
 *     checkpoints  the tensors that files hold: safetensors, shards, .npy             sidestream/checkpoint.h
 *     loads      files to the device at the speed of link or disk, part by part      sidestream/load.h
 *     casts      whole checkpoints to another type, from disk to disk                 sidestream/cast.h
 *
 * Ten lines
 *     side_device *dev;
 *     side_pipeline *p;
 *     side_device_open("auto", &dev);
 *     side_pipeline_options o = SIDE_PIPELINE_OPTIONS_INIT;
 *     o.item_bytes = o.result_bytes = 64 << 20;
 *     o.source = side_source_blocks(inputs, n);           // caller's memory: pinned, pageable or mixed
 *     o.compute = my_compute;                             // queues kernels on the stream it is given
 *     o.sink = side_sink_blocks(outputs, n);
 *     if (side_pipeline_create(dev, &o, &p) == SIDE_OK && side_pipeline_run(p, NULL) == SIDE_OK) ...
 *     side_pipeline_destroy(p); side_device_close(dev);
 *
 * Rules that hold everywhere
 *   Status   Calls return side_status: SIDE_OK is 0, errors are < 0. Outputs are set only after success.
 *            The cause (errno, driver code, argument, fix) is in side_last_error() of the calling thread.
 *   Threads  Devices, streams, pools, slots and logs may be used by any thread at once. A pipeline is
 *            driven by one thread; side_pipeline_cancel may come from any.
 *   Memory   What the caller passes to an asynchronous call stays the caller's and must live until the
 *            work on it is done. destroy() takes NULL; it waits for what it must, and if the device does not
 *            finish in time it keeps (leaks) the memory rather than free it under a copy in flight.
 *   Fork     A child of fork() may not use anything from before: destroys do nothing, other calls return
 *            SIDE_FORKED. Fork first, open after.
 *   Options  Structs whose first field is `size` are filled by their *_INIT macro; zero means default. A larger
 *            struct from a newer header is taken if the tail is zero, else SIDE_UNSUPPORTED.
 *   Silence  The library prints nothing. side_log_callback tells what was chosen and why.
 *   Units    Bytes are size_t, times are seconds (double, _s) or nanoseconds (uint64_t, _ns), GB/s is 1e9 bytes/s.
 *            A time-out below zero is SIDE_INVALID, not "for ever": it may be a deadline that has passed.
 *
 * Environment
 *   SIDESTREAM_DEVICE     the device that "auto" opens
 *   SIDESTREAM_DISABLE=1  pipelines do plain ordered copies on one stream, for bisecting
 *   SIDESTREAM_VALIDATE=1 recycled slots are poisoned and fences checked
 *   SIDESTREAM_MACHINE    the file of the machine profile; else it is in $XDG_CACHE_HOME/sidestream or $HOME/.cache/sidestream
 *   LOCAL_WORLD_SIZE      processes on this machine: default threads and pinned budget are divided by it
 */
#ifndef SIDESTREAM_H
#define SIDESTREAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__) && !defined(SIDE_API)
#define SIDE_API __attribute__((visibility("default")))
#elif !defined(SIDE_API)
#define SIDE_API
#endif

#define SIDE_VERSION_MAJOR 0
#define SIDE_VERSION_MINOR 1
#define SIDE_VERSION_PATCH 0

/* "0.1.0"; static storage. */
SIDE_API const char *side_version(void);

/* ---------------------------------------------------------------- status */

/* X(name, value, text). Values never change; new ones are appended. */
/* clang-format off */
#define SIDE_STATUS_MAP(X)                                                        \
    X(SIDE_AGAIN, 1, "not ready yet")                                             \
    X(SIDE_END, 2, "no more items")                                               \
    X(SIDE_INVALID, -1, "invalid argument")                                       \
    X(SIDE_NO_MEMORY, -2, "out of host memory")                                   \
    X(SIDE_NO_DEVICE_MEMORY, -3, "out of device memory")                          \
    X(SIDE_OVER_BUDGET, -4, "over the pinned memory budget")                      \
    X(SIDE_NO_DEVICE, -5, "no usable device or driver")                           \
    X(SIDE_DRIVER_TOO_OLD, -6, "the driver or the device is older than supported") \
    X(SIDE_UNSUPPORTED, -7, "not supported by this device or version")            \
    X(SIDE_NO_LIBRARY, -8, "a library that this call needs is missing")           \
    X(SIDE_DEVICE_ERROR, -9, "a device call failed")                              \
    X(SIDE_DEVICE_LOST, -10, "the device context is unusable; restart the process") \
    X(SIDE_STUCK, -11, "the device did not finish in time; its memory is kept")   \
    X(SIDE_CANCELLED, -12, "cancelled")                                           \
    X(SIDE_WOULD_DEADLOCK, -13, "this thread would wait for itself")              \
    X(SIDE_FORKED, -14, "used in a forked child")                                 \
    X(SIDE_IO, -15, "input or output failed")                                     \
    X(SIDE_CALLBACK, -16, "a callback of the caller's returned an error")         \
    X(SIDE_STALE, -17, "the slot was rewritten since")                            \
    X(SIDE_NOT_FOUND, -18, "no such thing")                                       \
    X(SIDE_STATE, -19, "the call does not fit the object's state")                \
    X(SIDE_TOO_LARGE, -20, "larger than the slot or limit")                       \
    X(SIDE_SYSTEM, -21, "an operating system call failed")
/* clang-format on */

typedef enum side_status {
    SIDE_OK = 0,
#define SIDE_X(name, value, text) name = value,
    SIDE_STATUS_MAP(SIDE_X)
#undef SIDE_X
} side_status;

/* "SIDE_INVALID"; a constant string for unknown codes. Never NULL. */
SIDE_API const char *side_status_name(side_status status);
/* "invalid argument"; likewise. */
SIDE_API const char *side_status_text(side_status status);

/* The cause behind the last error that a call returned on this thread. Valid until the next failing call of the thread. */
typedef struct side_error {
    side_status status;
    int os_errno;      /* 0 where none */
    int device_code;   /* the driver's own number (CUresult, cublasStatus_t, ...), 0 where none */
    const char *where; /* the call that failed, e.g. "cuMemHostRegister"; static storage */
    char message[320]; /* one sentence: what, which argument or file, the fix */
} side_error;

/* Never NULL; status SIDE_OK where nothing failed yet on this thread. */
SIDE_API const side_error *side_last_error(void);

typedef enum side_level { SIDE_LEVEL_WARN = 1, SIDE_LEVEL_INFO = 2, SIDE_LEVEL_DEBUG = 3 } side_level;

/* Called from any thread that is in the library, several at once; must not call into the library. Setting waits for callbacks that run.
 * fn NULL (the default) switches messages off. Messages above `most` are not formatted. */
typedef void side_log_fn(void *user, side_level level, const char *component, const char *message);
SIDE_API void side_log_callback(side_log_fn *fn, void *user, side_level most);

/* ---------------------------------------------------------------- devices */

typedef struct side_device side_device;
typedef struct side_stream side_stream;
typedef struct side_event side_event;

typedef struct side_device_props {
    char spec[64];      /* reopens this device: "cuda:0", "sim:h200" */
    char name[96];      /* "NVIDIA H200"; software devices say "simulated ..." */
    bool simulated;     /* true: times are of a model, not of hardware */
    int ordinal;        /* among devices of the kind */
    int driver_version; /* 12020 = CUDA 12.2; 0 for sim */
    int compute_major, compute_minor;
    int copy_engines; /* 1: H2D and D2H exclude each other; 2: both directions at once */
    int multiprocessors;
    bool can_register; /* pageable memory can be pinned in place */
    bool integrated;   /* shares its memory with the host */
    int numa_node;     /* of the device; -1 unknown */
    size_t memory_bytes;
    char uuid[48];         /* "GPU-..." */
    char pci[20];          /* "0000:0a:00.0"; "" where it does not apply */
    bool kernels;          /* named ops run (fatbin or NVRTC); false: copies only */
    char kernels_from[96]; /* "fatbin", "NVRTC 13.0", or the reason why there are none */
} side_device_props;

typedef struct side_link {
    char kind[16];         /* "PCIe", "NVLink-C2C", "none" */
    int generation, width; /* as the link runs now; idle links may downshift. 0 unknown */
    int max_generation, max_width;
    double peak_gbps; /* theoretical, one direction, at max generation and width; 0 unknown */
} side_link;

/* SPEC: "auto" (the first GPU, else "sim"; SIDESTREAM_DEVICE overrides), "cuda", "cuda:N", "sim", "sim:PROFILE[,key=value...]".
 * sim profiles: h200 (default), a100-pcie4, rtx4090, t4, gh200, one-copy-engine; keys in sidestream-device(7).
 * Blocks while the context is made (first use of a GPU: a second or so). Every successful open needs a close.
 * SIDE_NO_DEVICE: no driver or no such device. SIDE_DRIVER_TOO_OLD: below driver 535 or compute capability 7.5.
 * SIDE_INVALID: the spec does not parse; the error says where. */
SIDE_API side_status side_device_open(const char *spec, side_device **device);
/* Unpins what is still pinned, then frees. Streams, events, pools, slots, logs and pipelines made from it must be destroyed before. */
SIDE_API void side_device_close(side_device *device);

/* Specs that would open, in order of preference: cuda:0, cuda:1, ..., sim. `count` in: capacity, out: how many there are (may
 * exceed capacity). Each spec is at most 63 characters. Opens no context. `why` (may be NULL) tells why there is no GPU. */
SIDE_API side_status side_device_list(char (*specs)[64], size_t *count, char *why, size_t why_bytes);
SIDE_API side_status side_device_get_props(side_device *device, side_device_props *props);
SIDE_API side_status side_device_get_link(side_device *device, side_link *link);
SIDE_API side_status side_device_get_memory(side_device *device, size_t *free_bytes, size_t *total_bytes);
/* Host clock to measure this device's work by, in ns: CLOCK_MONOTONIC, or the calling thread's virtual clock on sim. */
SIDE_API uint64_t side_device_now_ns(side_device *device);

/* ---------------------------------------------------------------- streams and events */

/* A queue of operations in order. Made streams never synchronise with CUDA's legacy stream. */
SIDE_API side_status side_stream_create(side_device *device, side_stream **stream);
/* Take a stream of the caller's: `native` is a CUstream/cudaStream_t (NULL is CUDA's legacy stream). Not destroyed with the wrapper;
 * must outlive it. On sim: NULL makes a new stream, anything else is SIDE_INVALID. */
SIDE_API side_status side_stream_wrap(side_device *device, void *native, side_stream **stream);
/* Does not block; queued work goes on. NULL is fine. */
SIDE_API void side_stream_destroy(side_stream *stream);
/* The CUstream, for the caller's own kernel launches; NULL on sim. */
SIDE_API void *side_stream_native(side_stream *stream);
SIDE_API side_device *side_stream_device(side_stream *stream);
/* A stream whose work goes into a CUDA graph instead of to the device: events recorded there tell nothing about the work, and waits from outside end the capture.
 * Asking does not. True also for the legacy stream while any stream that synchronises with it is captured. False on sim. */
SIDE_API side_status side_stream_is_capturing(side_stream *stream, bool *capturing);
/* Everything queued on `stream` after this runs after what `event` recorded last, at the time of this call. Does not block the host.
 * A never-recorded event counts as done. */
SIDE_API side_status side_stream_wait(side_stream *stream, side_event *event);
/* Blocks until all that was queued is done; at most timeout_s (0: for ever). SIDE_STUCK on time-out. */
SIDE_API side_status side_stream_sync(side_stream *stream, double timeout_s);
/* `fn(user)` runs on a thread of the device's after all earlier work of the stream; it must not call into the library or the driver.
 * On sim it holds the stream (not an engine) for sim_ns. */
typedef void side_host_fn(void *user);
SIDE_API side_status side_stream_host_fn(side_stream *stream, side_host_fn *fn, void *user, uint64_t sim_ns);

/* A point in a stream. Re-recording replaces the point; earlier waits keep the old one. */
SIDE_API side_status side_event_create(side_device *device, bool timing, side_event **event);
SIDE_API void side_event_destroy(side_event *event);
SIDE_API side_status side_event_record(side_event *event, side_stream *stream);
/* SIDE_OK done (or never recorded), SIDE_AGAIN not yet. */
SIDE_API side_status side_event_query(side_event *event);
/* Blocks until done, at most timeout_s (0: for ever). SIDE_STUCK on time-out. */
SIDE_API side_status side_event_wait(side_event *event, double timeout_s);
/* Both recorded with timing and done, else SIDE_STATE. Resolution about 0.5 us; coarser for spans over a second. */
SIDE_API side_status side_event_elapsed(side_event *begin, side_event *end, double *seconds);

/* ---------------------------------------------------------------- memory */

typedef enum side_memory_kind {
    SIDE_MEMORY_PAGEABLE = 0,
    SIDE_MEMORY_PINNED = 1,
    SIDE_MEMORY_DEVICE = 2
} side_memory_kind;

/* Device memory, at least 256-byte aligned. SIDE_NO_DEVICE_MEMORY says how much is free. */
SIDE_API side_status side_device_alloc(side_device *device, size_t bytes, void **data);
/* May block until the device is idle (cuMemFree does). The caller has made sure that nothing in flight uses it. */
SIDE_API void side_device_free(side_device *device, void *data);
/* Looks at the first byte only. */
SIDE_API side_status side_memory_get_kind(side_device *device, const void *data, side_memory_kind *kind);

/* Pinned host memory comes from a pool: regions first touched by several threads on the device's NUMA node, on huge pages where
 * allowed, then registered. Blocks are 64-byte aligned (page-aligned from 1 page up). */
typedef struct side_pool side_pool;

typedef struct side_pool_options {
    size_t size;
    size_t budget_bytes; /* hard limit on pinned bytes; 0: a quarter of what this process may use / LOCAL_WORLD_SIZE */
    size_t region_bytes; /* what is pinned at once for blocks under 16 MiB; 0: 64 MiB, less under a small budget */
    uint32_t threads;    /* that touch pages; 0: default */
    uint32_t flags;      /* SIDE_POOL_* */
} side_pool_options;
#define SIDE_POOL_NO_HUGE_PAGES 1u /* for tests and for hosts where compaction stalls */
#define SIDE_POOL_DRIVER \
    2u /* regions from the driver's own allocator, as where registering is refused: slower to get; for comparison */
/* clang-format off */
#define SIDE_POOL_OPTIONS_INIT { sizeof(side_pool_options), 0, 0, 0, 0 }
/* clang-format on */

typedef struct side_pool_stats {
    size_t budget_bytes;  /* limit */
    size_t pinned_bytes;  /* registered now: regions and, in the device's own pool, pins in place; never over budget */
    size_t granted_bytes; /* in blocks handed out and not yet freed, rounding included */
    size_t asked_bytes;   /* what callers asked for, of the same blocks */
    size_t pending_bytes; /* freed, waiting for their events */
    size_t slack_bytes;   /* in regions, neither granted nor pending: free to be handed out */
    size_t peak_pinned_bytes;
    uint64_t blocks, regions;
    double pin_s;    /* time spent on mapping, touching and registering, in total */
    bool huge_pages; /* the last region got them */
    bool registered; /* false: the device refused registering and pinned memory comes from the driver's allocator */
} side_pool_stats;

SIDE_API side_status side_pool_create(side_device *device, const side_pool_options *options, side_pool **pool);
/* Blocks still out are reported through the log and stay pinned (leaked); pending ones are waited for. */
SIDE_API void side_pool_destroy(side_pool *pool);
/* The device's own pool, made at first use with default options; lives until the device is closed. Do not destroy it. */
SIDE_API side_status side_device_pool(side_device *device, side_pool **pool);
/* SIDE_OVER_BUDGET when pinning more would pass the budget (the message gives both numbers); SIDE_NO_MEMORY when the system refuses. */
SIDE_API side_status side_pool_alloc(side_pool *pool, size_t bytes, void **data);
/* The block becomes reusable once all work queued so far on the `count` streams is done; nothing blocks. */
SIDE_API side_status side_pool_free(side_pool *pool, void *data, side_stream *const *streams, size_t count);
/* Unpins regions that hold no block. Returns bytes given back. */
SIDE_API size_t side_pool_trim(side_pool *pool);
SIDE_API side_status side_pool_get_stats(side_pool *pool, side_pool_stats *stats);

/* Pin what the caller has, in place: no copy. Pages shared by two pins stay pinned until the last unpin. The memory must stay mapped until
 * side_memory_unpin, which must come after all copies on it are done. Counts against the device pool's budget. */
SIDE_API side_status side_memory_pin(side_device *device, const void *data, size_t bytes);
SIDE_API side_status side_memory_unpin(side_device *device, const void *data);

/* ---------------------------------------------------------------- copies and named operations */

typedef enum side_copy_kind { SIDE_COPY_H2D = 0, SIDE_COPY_D2H = 1, SIDE_COPY_D2D = 2 } side_copy_kind;

/* One asynchronous copy, ordered in `stream`. From or to pageable host memory the driver may block the host and not overlap (pin it,
 * or use a pipeline, which stages). Both sides must live until the copy is done. */
SIDE_API side_status side_copy_async(side_stream *stream, side_copy_kind kind, void *dst, const void *src, size_t bytes);

typedef struct side_piece {
    void *dst;
    const void *src;
    size_t bytes;
} side_piece;
/* `count` copies of one kind as one call; the pieces must not overlap and run in any order among themselves. The array may be reused after. */
SIDE_API side_status side_copy_batch(side_stream *stream, side_copy_kind kind, const side_piece *pieces, size_t count);
/* How scattered blocks are copied. All give the same bytes; they differ in speed and in what they cost the work beside them (`sidestream bench blocks`). */
typedef enum side_path {
    SIDE_PATH_AUTO = 0,  /* what the machine profile says is best; BATCH without one */
    SIDE_PATH_LOOP = 1,  /* one copy call a block */
    SIDE_PATH_BATCH = 2, /* one driver call for many blocks, where the driver has it; else LOOP */
    SIDE_PATH_GATHER = 3, /* one kernel of few thread blocks that reads or writes pinned memory itself. D2H at link rate slows all else down */
    SIDE_PATH_PACK = 4, /* D2H: one kernel packs on the device, the copy engine sends. Blocks whose host sides lie one behind another leave as one copy */
    SIDE_PATH_COUNT
} side_path;
SIDE_API const char *side_path_name(side_path path); /* "loop" */
/* side_copy_batch by a path of choice; pieces without bytes are skipped. GATHER and PACK: host sides must be pinned (SIDE_INVALID names the piece that is
 * not); SIDE_UNSUPPORTED where the device has no kernels, or cannot go this way in this direction, or the stream is captured or the legacy one. AUTO takes
 * another path then. `pieces` may be reused after; the memory may not before the copies are done. */
SIDE_API side_status side_copy_blocks(side_stream *stream, side_copy_kind kind, const side_piece *pieces, size_t count,
                                      side_path path);
/* Fills device memory with a byte. */
SIDE_API side_status side_memset_async(side_stream *stream, void *dst, int value, size_t bytes);

typedef enum side_type {
    SIDE_F32 = 0,
    SIDE_F16 = 1,
    SIDE_BF16 = 2,
    SIDE_U8 = 3,
    SIDE_F64 = 4,
    SIDE_F8E4M3 = 5, /* no infinities; PyTorch's float8_e4m3fn */
    SIDE_F8E5M2 = 6
} side_type;
SIDE_API size_t side_type_bytes(side_type type);
SIDE_API const char *side_type_name(side_type type); /* "f32" */

typedef enum side_op_id {
    SIDE_OP_MATMUL = 0, /* out[m,n] = in0[m,k] @ in1[k,n], row-major; m,n,k in dim[0..2]; types of in and out in `type` */
    SIDE_OP_CAST = 1, /* out[i] = in0[i]; dim[0] elements, type[0] -> type[1]; nearest even, NaN keeps sign and gets quiet. From f64 by way of f32, to all but
                         f64. What is too large becomes infinity, in F8E4M3 (infinity too) the largest value, 448 */
    SIDE_OP_XXH3_BLOCKS = 2, /* out: for each whole 1 KiB of in0 its eight uint64 XXH3 partial sums; dim[0] = blocks */
    SIDE_OP_AFFINE = 3,      /* out[i] = scale * in0[i] + bias over dim[0] float32; may run in place */
    SIDE_OP_SPIN = 4,        /* keeps the compute engine busy for dim[0] ns, then ends by itself; touches no memory */
    SIDE_OP_COUNT
} side_op_id;

typedef enum side_math { SIDE_MATH_FP32 = 0, SIDE_MATH_TF32 = 1, SIDE_MATH_BF16 = 2 } side_math;

typedef struct side_op {
    size_t size;
    side_op_id id;
    const void *in[2];
    void *out;
    uint64_t dim[3];
    side_type type[2]; /* input, output */
    side_math math;    /* MATMUL: how the products are formed */
    float scale, bias; /* AFFINE */
    uint64_t sim_ns;   /* cost on a software device; 0: from its profile */
} side_op;
/* clang-format off */
#define SIDE_OP_INIT { sizeof(side_op), SIDE_OP_COUNT, {NULL, NULL}, NULL, {0, 0, 0}, {SIDE_F32, SIDE_F32}, SIDE_MATH_FP32, 1.0f, 0.0f, 0 }
/* clang-format on */

SIDE_API const char *side_op_name(side_op_id id); /* "matmul" */
/* Bytes that the op reads of in[0], in[1] and writes to out; checks dims and types. SIDE_TOO_LARGE on overflow. */
SIDE_API side_status side_op_bytes(const side_op *op, size_t in_bytes[2], size_t *out_bytes);
/* Queues the op on the stream; returns at once. Pointers are device memory, 16-byte aligned. SIDE_NO_LIBRARY: cuBLAS (matmul) missing;
 * SIDE_UNSUPPORTED: the device has no kernels (props.kernels_from says why). */
SIDE_API side_status side_op_async(side_stream *stream, const side_op *op);
/* The same on host memory, now, by the CPU: the oracle. */
SIDE_API side_status side_op_host(const side_op *op);

/* Folding of SIDE_OP_XXH3_BLOCKS: equal to XXH3_64bits (xxhsum -H3) of all bytes. */
typedef struct side_xxh3 {
    uint64_t acc[8];
    uint64_t blocks; /* folded so far */
} side_xxh3;
SIDE_API void side_xxh3_begin(side_xxh3 *state);
SIDE_API void side_xxh3_fold(side_xxh3 *state, const uint64_t *sums, size_t blocks);
/* `tail`: the last min(total, 1024 + 64) bytes of the whole input. All whole blocks but the last 1..1024 bytes must have been folded:
 * floor((total - 1) / 1024) blocks; total under 241 needs no blocks at all (the tail is the whole input). SIDE_STATE otherwise. */
SIDE_API side_status side_xxh3_end(const side_xxh3 *state, const void *tail, size_t tail_bytes, uint64_t total_bytes,
                                   uint64_t *hash);

#ifdef __cplusplus
}
#endif

#include "sidestream/slots.h"
#include "sidestream/machine.h"
#include "sidestream/plan.h"
#include "sidestream/timeline.h"
#include "sidestream/pipeline.h"
#include "sidestream/feeder.h"
#include "sidestream/checkpoint.h"
#include "sidestream/load.h"
#include "sidestream/cast.h"

#endif
