/* SPDX-License-Identifier: MIT
 *
 * The path PACK: scattered blocks to the host. Stores of a kernel to host memory at link rate starve all that runs beside it, and kernels launched chunk by
 * chunk wait, each, for a GPU that is full. So one kernel of two thread blocks packs the whole call, into chunks of device memory that go round, and the copy
 * engine sends them. The kernel and the caller's stream hand chunks over by numbers in device memory, without the host:
 *
 *     caller's stream   fork--- ready[0]>=b+1? copies  released[0]=b+1   ready[1]>=b+2? copies ...                --tail----(wait)->
 *                         |         ^                      |                 ^                                       |      ^
 *     ours                +--side_pack: pack chunk 0       | chunk 1 --------+  ...  chunk 4 -> waits for it <-------+      |
 *                         (the highest priority)                                                                   +-- side_pack_rest
 *
 * Numbers: chunk k of a call has the number b + k; b goes on from call to call, cyclic, so that nothing is reset while a stream may still look at it. When
 * the kernel ends it brings all counters to the call's end: none is older than a call, and cyclic comparison holds.
 *
 * Calls, of any streams and threads, follow each other on our stream: each kernel waits for the call's own stream (fork) and, through the tail, for the copies of the
 * call before. The mutex is held while a call is queued.
 *
 * No deadlock. The kernel is queued before anything that waits for it, and the only thing that waits for what is queued later is the kernel itself, for
 * `released`. The mutex, and the tail after everything else, make the order of submission one in which each command needs earlier ones alone, kernels
 * that run apart; so streams that share a hardware queue do not harm, nor does a copy engine that takes copies in their order: what lies in front of our
 * copies was queued before them, and nothing that was queued before waits for us. Whatever may wait for the whole device (allocating, loading) is done
 * before the launch.
 *
 * There is one case left: another thread waits for the whole device, inside the driver and with its locks (freeing memory does), between our launch and our last
 * copy; then the kernel waits for copies that cannot be queued. So it never waits for long: after two seconds without a chunk released it gives up and
 * lets the stream through, which then copies what the chunks hold, and side_pack_rest, behind all copies, stores all pieces to the host itself. The bytes
 * are right, late. It is queued where a call has more chunks than there are slots; others never wait.
 *
 * When queueing fails behind the launch, the host tells the kernel to give up (`stop`), waits for it, and reports the failure.
 */
#include "cuda_table.h"

#include "error.h"

#include <stdio.h>

enum {
    SLOTS = 4,          /* SLOTS in kernels.cu */
    CHUNKS_MOST = 1024, /* a launch */
    RUNS_MOST = 512,    /* a driver call's batch */
    PACK_GRID = 2,      /* thread blocks: they pack faster than the link takes */
    STATE_BYTES = 512,  /* struct pack_state in kernels.cu, and where its counters are */
    STATE_READY = 256,
    STATE_RELEASED = 384
};
#define SMALL_SLOT  ((size_t)1 << 20)
#define LARGE_SLOT  ((size_t)16 << 20)
#define FIRST_CHUNK ((size_t)1 << 20) /* and each twice the one before, up to the slot: the copy engine begins soon */
#define PATIENCE_NS UINT64_C(2000000000)

static const char where[] = "side_copy_blocks";

#ifdef SIDE_TESTING
void (*pack_test_chunk)(uint32_t chunk);
#define TEST_CHUNK(k) (pack_test_chunk != NULL ? pack_test_chunk(k) : (void)0)
#else
#define TEST_CHUNK(k) ((void)0)
#endif

void pack_init(dev_context *context)
{
    pthread_mutex_init(&context->pack.mutex, NULL);
    context->pack.small.slot_bytes = SMALL_SLOT;
    context->pack.large.slot_bytes = LARGE_SLOT;
}

/* ---------------------------------------------------------------- what it needs */

static void memory_free(dev_context *context, CUdeviceptr *data)
{
    CUresult r = *data != 0 ? context->cu->cuMemFree(*data) : CUDA_SUCCESS;

    if (r != CUDA_SUCCESS)
        log_message(SIDE_LEVEL_WARN, "cuda", "cuMemFree(%p): error %d", (void *)(uintptr_t)*data, (int)r);
    *data = 0;
}

static void unmake(dev_context *context)
{
    struct cuda_pack *p = &context->pack;

    memory_free(context, &p->small.data);
    memory_free(context, &p->large.data);
    memory_free(context, &p->state);
    if (p->fork != NULL)
        context->cu->cuEventDestroy(p->fork);
    if (p->tail != NULL)
        context->cu->cuEventDestroy(p->tail);
    if (p->stream != NULL)
        context->cu->cuStreamDestroy(p->stream);
    p->fork = p->tail = NULL;
    p->stream = NULL;
    p->ready = false;
}

void pack_finish(dev_context *context, bool entered)
{
    struct cuda_pack *p = &context->pack;

    if (p->stream != NULL && entered && !blocks_drain(context, p->stream))
        log_message(SIDE_LEVEL_WARN, "cuda", "the memory of path pack is kept: its kernel does not come to an end");
    else
        unmake(context);
    pthread_mutex_destroy(&p->mutex);
}

static CUresult make_calls(dev_context *context, const char **call)
{
    const struct cu_api *cu = context->cu;
    struct cuda_pack *p = &context->pack;
    int least = 0, greatest = 0;
    CUresult r;

    if (cu->cuCtxGetStreamPriorityRange(&least, &greatest) != CUDA_SUCCESS)
        greatest = 0;
    *call = "cuStreamCreateWithPriority";
    r = cu->cuStreamCreateWithPriority(&p->stream, CU_STREAM_NON_BLOCKING, greatest);
    for (int i = 0; i < 2 && r == CUDA_SUCCESS; i++) {
        *call = "cuEventCreate";
        r = cu->cuEventCreate(i == 0 ? &p->fork : &p->tail, CU_EVENT_DISABLE_TIMING);
    }
    if (r == CUDA_SUCCESS) {
        *call = "cuMemAlloc";
        r = cu->cuMemAlloc(&p->state, STATE_BYTES);
    }
    if (r == CUDA_SUCCESS) {
        *call = "cuMemsetD8Async";
        r = cu->cuMemsetD8Async(p->state, 0, STATE_BYTES, p->stream);
    }
    /* Tried where nothing depends on it. */
    if (r == CUDA_SUCCESS) {
        *call = "cuStreamWriteValue32";
        r = cu->cuStreamWriteValue32(p->stream, p->state + STATE_READY, 0, CU_STREAM_WRITE_VALUE_DEFAULT);
    }
    if (r == CUDA_SUCCESS) {
        *call = "cuStreamWaitValue32";
        r = cu->cuStreamWaitValue32(p->stream, p->state + STATE_READY, 0, CU_STREAM_WAIT_VALUE_GEQ);
    }
    return r;
}

/* `status` is why there is no packing now: not an error of the call's, since there are other paths. */
static side_status cannot(side_status status)
{
    char cause[200];

    if (status == SIDE_DEVICE_LOST)
        return status;
    snprintf(cause, sizeof(cause), "%.199s", side_last_error()->message);
    return error_set(SIDE_UNSUPPORTED, where, "path pack: %s", cause);
}

/* Locked, entered. */
static side_status make(dev_context *context)
{
    struct cuda_pack *p = &context->pack;
    const char *call = "";

    if (p->ready)
        return SIDE_OK;
    if (context->cu->cuStreamWaitValue32 == NULL || context->cu->cuStreamWriteValue32 == NULL)
        p->refused = true;
    if (p->refused)
        return error_set(SIDE_UNSUPPORTED, where, "path pack: the driver has no stream memory operations here");
    CUresult r = make_calls(context, &call);
    if (r == CUDA_SUCCESS) {
        p->ready = true;
        return SIDE_OK;
    }
    side_status status = cuda_status(context, r, call, "for path pack");
    unmake(context);
    p->refused = r == CUDA_ERROR_NOT_SUPPORTED || r == CUDA_ERROR_NOT_PERMITTED;
    return cannot(status);
}

/* The chunks for so many bytes: small ones for little, and where there is no memory for large ones. Locked, entered. */
static side_status buffer_get(dev_context *context, uint64_t bytes, const struct cuda_pack_buffer **buffer)
{
    struct cuda_pack *p = &context->pack;
    side_status status = SIDE_OK;

    for (int i = bytes > 2 * SLOTS * SMALL_SLOT ? 0 : 1; i < 2; i++) {
        struct cuda_pack_buffer *b = i == 0 ? &p->large : &p->small;
        if (b->data == 0)
            status = cuda_status(context, context->cu->cuMemAlloc(&b->data, SLOTS * b->slot_bytes), "cuMemAlloc",
                                 "%zu bytes for path pack", SLOTS * b->slot_bytes);
        if (b->data != 0) {
            *buffer = b;
            return SIDE_OK;
        }
    }
    return cannot(status);
}

/* ---------------------------------------------------------------- a call */

struct call {
    dev_context *context;
    CUstream stream; /* the caller's */
    dev_stream *of;
    const struct cuda_pack_buffer *buffer;
    struct cuda_table *table;
    uint32_t base;                   /* number of the first chunk */
    uint32_t first[CHUNKS_MOST + 1]; /* piece of each chunk, and behind the last */
};

static uint64_t chunk_bytes(const struct call *c, uint32_t chunk)
{
    const uint64_t bytes = chunk < 8 ? (uint64_t)FIRST_CHUNK << chunk : c->buffer->slot_bytes;

    return bytes < c->buffer->slot_bytes ? bytes : c->buffer->slot_bytes;
}

/* Fills a chunk: pieces one behind another. Where a piece goes on on the host where the one before ended, it does so in the chunk too, and both leave as one copy; else
 * it lies as its source does, so that it is packed in words of 16 bytes. */
static void chunk_write(struct call *c, struct blocks_cursor *cursor)
{
    const uint32_t chunk = c->table->chunks;
    const uint64_t to = c->buffer->data + chunk % SLOTS * c->buffer->slot_bytes, most = chunk_bytes(c, chunk);
    uint64_t at = 0, run = 0, room; /* run: where the host side of the last piece ends */

    c->first[chunk] = c->table->pieces;
    while (blocks_next(cursor) && (room = table_room(c->table)) > 0) {
        const side_piece *p = &cursor->pieces[cursor->index];
        const uint64_t from = (uintptr_t)p->src + cursor->offset, out = (uintptr_t)p->dst + cursor->offset;
        if (at == 0 || out != run)
            at += (from - at) & 15; /* slots are aligned */
        if (at >= most)
            break;
        uint64_t part = p->bytes - cursor->offset;
        if (part > most - at)
            part = most - at;
        if (part > room)
            part = room;
        table_add(c->table, to + at, from, part, out);
        cursor->offset += part;
        at += part;
        run = out + part;
    }
    table_close_chunk(c->table);
}

/* As many chunks as table and launch hold. */
static void chunks_write(struct call *c, struct blocks_cursor *cursor)
{
    while (blocks_next(cursor) && table_room(c->table) > 0 && c->table->chunks < CHUNKS_MOST)
        chunk_write(c, cursor);
    c->first[c->table->chunks] = c->table->pieces;
}

static side_status chunk_send(const struct call *c, uint32_t chunk)
{
    const struct block_piece *pieces = table_pieces(c->table);
    side_piece runs[RUNS_MOST];
    side_status status = SIDE_OK;
    size_t n = 0;

    for (uint32_t i = c->first[chunk]; i < c->first[chunk + 1] && status == SIDE_OK; i++) {
        side_piece *last = n > 0 ? &runs[n - 1] : NULL;
        char *out = (char *)(uintptr_t)pieces[i].out;
        const char *from = (const char *)(uintptr_t)pieces[i].to;
        if (last != NULL && (char *)last->dst + last->bytes == out && (const char *)last->src + last->bytes == from) {
            last->bytes += pieces[i].bytes;
            continue;
        }
        if (n == RUNS_MOST) {
            status = cuda_copy_queue(c->of, SIDE_COPY_D2H, runs, n, SIDE_PATH_BATCH);
            n = 0;
        }
        runs[n++] = (side_piece){out, from, pieces[i].bytes};
    }
    return status == SIDE_OK ? cuda_copy_queue(c->of, SIDE_COPY_D2H, runs, n, SIDE_PATH_BATCH) : status;
}

/* All chunks, on the caller's stream. */
static side_status chunks_send(const struct call *c)
{
    const struct cu_api *cu = c->context->cu;
    const CUdeviceptr state = c->context->pack.state;
    const uint32_t chunks = c->table->chunks;
    side_status status = SIDE_OK;

    for (uint32_t k = 0; k < chunks && status == SIDE_OK; k++) {
        const CUdeviceptr slot = k % SLOTS * sizeof(uint32_t);
        TEST_CHUNK(k);
        status = cuda_status(
            c->context,
            cu->cuStreamWaitValue32(c->stream, state + STATE_READY + slot, c->base + k + 1, CU_STREAM_WAIT_VALUE_GEQ),
            "cuStreamWaitValue32", "stream %p", (void *)c->stream);
        if (status == SIDE_OK)
            status = chunk_send(c, k);
        if (status == SIDE_OK && k + SLOTS < chunks)
            status = cuda_status(c->context,
                                 cu->cuStreamWriteValue32(c->stream, state + STATE_RELEASED + slot, c->base + k + 1,
                                                          CU_STREAM_WRITE_VALUE_DEFAULT),
                                 "cuStreamWriteValue32", "stream %p", (void *)c->stream);
    }
    return status;
}

/* `waiter` waits for all that is queued on `stream` so far. */
static side_status follow(dev_context *context, CUevent event, CUstream stream, CUstream waiter)
{
    const struct cu_api *cu = context->cu;
    side_status status = cuda_status(context, cu->cuEventRecord(event, stream), "cuEventRecord", "stream %p",
                                     (void *)stream);

    if (status == SIDE_OK)
        status = cuda_status(context, cu->cuStreamWaitEvent(waiter, event, 0), "cuStreamWaitEvent", "stream %p",
                             (void *)waiter);
    return status;
}

struct functions {
    CUfunction pack, rest;
};

static side_status pack_launch(struct call *c, const struct functions *f)
{
    struct cuda_pack *p = &c->context->pack;
    struct cuda_table *t = c->table;
    CUdeviceptr units = (CUdeviceptr)(uintptr_t)table_units(t), pieces = (CUdeviceptr)(uintptr_t)table_pieces(t),
                stop = (CUdeviceptr)(uintptr_t)t->data;
    uint32_t end = c->base + t->chunks;
    uint64_t patience = PATIENCE_NS;
    void *arguments[] = {&p->state, &units, &t->units, &pieces, &c->base, &end, &stop, &patience};
    side_status status = follow(c->context, p->fork, c->stream, p->stream);

    if (status == SIDE_OK)
        status = blocks_launch(c->context, p->stream, f->pack, "side_pack", PACK_GRID, arguments);
    return status;
}

/* Behind all copies: what our stream does next comes after them; and where the kernel may have given up, the caller's comes after the rest. */
static side_status pack_join(struct call *c, const struct functions *f)
{
    struct cuda_pack *p = &c->context->pack;
    struct cuda_table *t = c->table;
    CUdeviceptr units = (CUdeviceptr)(uintptr_t)table_units(t), pieces = (CUdeviceptr)(uintptr_t)table_pieces(t);
    uint32_t end = c->base + t->chunks;
    void *arguments[] = {&p->state, &end, &units, &t->units, &pieces};
    side_status status = follow(c->context, p->tail, c->stream, p->stream);

    if (status != SIDE_OK || t->chunks <= SLOTS)
        return status;
    status = blocks_launch(c->context, p->stream, f->rest, "side_pack_rest", PACK_GRID, arguments);
    if (status == SIDE_OK)
        status = follow(c->context, p->tail, p->stream, c->stream);
    return status;
}

/* Queueing failed behind the launch: the kernel is to end, and to have ended, before the caller hears of it. */
static void pack_abort(struct call *c)
{
    struct cuda_pack *p = &c->context->pack;

    atomic_store_explicit(table_stop(c->table), 1, memory_order_release);
    /* What of the call is queued on the caller's stream goes before the next call's kernel, or there is no next call. */
    if (follow(c->context, p->tail, c->stream, p->stream) != SIDE_OK)
        p->refused = true;
    if (blocks_drain(c->context, p->stream)) {
        table_drop(c->context, c->table);
    } else {
        p->refused = true;
        table_lose(c->context, c->table);
    }
}

/* Pieces up to what a table holds. Locked, entered. */
static side_status pack_some(struct call *c, struct blocks_cursor *cursor, const struct functions *f)
{
    struct cuda_pack *p = &c->context->pack;
    const uint32_t unit_tiles = c->buffer->slot_bytes >= LARGE_SLOT ? TABLE_UNIT_MOST : 2;
    const uint64_t chunks = cursor->bytes / c->buffer->slot_bytes + 16; /* the first ones are smaller */
    side_status status = table_take(c->context, cursor->full + cursor->tiles / unit_tiles + 3 * chunks + 4, unit_tiles,
                                    &c->table);

    if (status != SIDE_OK)
        return status;
    chunks_write(c, cursor);
    c->base = p->number;
    status = pack_launch(c, f);
    if (status != SIDE_OK) {
        table_drop(c->context, c->table);
        return status;
    }
    p->number += c->table->chunks;
    status = chunks_send(c);
    if (status == SIDE_OK)
        status = pack_join(c, f);
    if (status != SIDE_OK) {
        side_error error;
        error_copy(&error);
        pack_abort(c);
        return error_restore(&error);
    }
    return table_put(c->context, c->table, p->stream);
}

side_status pack_queue(dev_stream *stream, struct blocks_cursor *cursor)
{
    struct call c = {.context = stream->context, .stream = stream->handle, .of = stream};
    struct cuda_pack *p = &c.context->pack;
    struct functions f;
    side_status status = kernels_get(c.context, KERNEL_PACK, where, &f.pack);

    if (status == SIDE_OK)
        status = kernels_get(c.context, KERNEL_PACK_REST, where, &f.rest);
    if (status != SIDE_OK)
        return status;
    pthread_mutex_lock(&p->mutex);
    status = make(c.context);
    if (status == SIDE_OK)
        status = buffer_get(c.context, cursor->bytes, &c.buffer);
    while (status == SIDE_OK && blocks_next(cursor))
        status = pack_some(&c, cursor, &f);
    pthread_mutex_unlock(&p->mutex);
    return status;
}
