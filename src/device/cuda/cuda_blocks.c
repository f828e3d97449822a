/* SPDX-License-Identifier: MIT
 *
 * Scattered blocks, and the path GATHER: one kernel of few thread blocks on the caller's stream. Loads from host memory at link rate cost the rest of the
 * GPU little, where few warps issue them with much in flight each; stores to host memory at link rate cost it much, whoever issues them. */
#include "cuda_table.h"

#include "error.h"
#include "os.h"

enum {
    GATHER_GRID = 4,  /* thread blocks: they fill the link, and more of them take more from what runs beside */
    GATHER_UNITS = 4, /* a warp, at the least, where there is so much */
    WARPS = BLOCKS_THREADS / 32
};
#define DRAIN_NS UINT64_C(10000000000)

void blocks_init(dev_context *context)
{
    tables_init(context);
    pack_init(context);
}

void blocks_finish(dev_context *context, bool entered)
{
    pack_finish(context, entered);
    tables_finish(context, entered);
}

bool blocks_drain(dev_context *context, CUstream stream)
{
    const uint64_t deadline = os_now_ns() + DRAIN_NS;
    CUresult r;

    /* An error for an answer is no answer. */
    while ((r = context->cu->cuStreamQuery(stream)) != CUDA_SUCCESS && !cuda_is_lost(r) && os_now_ns() < deadline)
        os_sleep_ns(20000);
    return r == CUDA_SUCCESS || cuda_is_lost(r);
}

bool blocks_next(struct blocks_cursor *cursor)
{
    while (cursor->index < cursor->count && cursor->offset == cursor->pieces[cursor->index].bytes) {
        cursor->index++;
        cursor->offset = 0;
    }
    return cursor->index < cursor->count;
}

side_status blocks_launch(dev_context *context, CUstream stream, CUfunction function, const char *name, unsigned grid,
                          void **arguments)
{
    return cuda_status(
        context, context->cu->cuLaunchKernel(function, grid, 1, 1, BLOCKS_THREADS, 1, 1, 0, stream, arguments, NULL),
        "cuLaunchKernel", "%s, %u x %d, stream %p", name, grid, (int)BLOCKS_THREADS, (void *)stream);
}

/* ---------------------------------------------------------------- what kernels may touch */

/* The allocation or registration that was asked about last: blocks mostly lie in few. */
struct known {
    uintptr_t begin, end;
};

struct asked {
    unsigned type, managed;
    int ordinal;
    CUdeviceptr address, start;
    size_t bytes;
};

static side_status ask(dev_context *context, uintptr_t at, struct asked *a)
{
    CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE,      CU_POINTER_ATTRIBUTE_IS_MANAGED,
                                        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,   CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
                                        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE};
    void *values[] = {&a->type, &a->managed, &a->ordinal, &a->address, &a->start, &a->bytes};

    *a = (struct asked){.ordinal = -1};
    CUresult r = context->cu->cuPointerGetAttributes(6, attributes, values, at);
    if (r == CUDA_ERROR_INVALID_VALUE) {
        *a = (struct asked){.ordinal = -1}; /* not a pointer of CUDA's */
        return SIDE_OK;
    }
    return cuda_status(context, r, "cuPointerGetAttributes", "%p", (void *)at);
}

/* A kernel can reach the whole side of piece `index`, at the address that it has on the host. Entered. */
static side_status check_side(dev_context *context, uintptr_t at, size_t bytes, bool host, side_path path, size_t index,
                              struct known *known)
{
    static const char where[] = "side_copy_blocks";
    const uintptr_t end = at + bytes;

    while (at < end) {
        struct asked a;
        if (at >= known->begin && at < known->end) {
            at = known->end;
            continue;
        }
        side_status status = ask(context, at, &a);
        if (status != SIDE_OK)
            return status;
        if (host && (a.type != CU_MEMORYTYPE_HOST || a.managed != 0))
            return error_set(SIDE_INVALID, where,
                             "piece %zu: path %s wants pinned memory, and %p is not; pin it with side_memory_pin, or "
                             "take it from a pool",
                             index, side_path_name(path), (void *)at);
        if (!host && a.managed == 0 && (a.type != CU_MEMORYTYPE_DEVICE || a.ordinal != context->props.ordinal))
            return error_set(SIDE_INVALID, where, "piece %zu: %p is not memory of cuda:%d", index, (void *)at,
                             context->props.ordinal);
        if (host && a.address != at)
            return error_set(SIDE_UNSUPPORTED, where, "piece %zu: kernels see %p at another address", index, (void *)at);
        if (a.bytes == 0 || a.start > at || a.start + a.bytes <= at) {
            /* The driver does not say how far it reaches: look at the last byte too, and take it that what lies between is like both. */
            *known = (struct known){at, at == end - 1 ? end : end - 1};
        } else {
            *known = (struct known){a.start, a.start + a.bytes};
        }
    }
    return SIDE_OK;
}

/* Fills in the cursor's sums. Entered. */
static side_status check_pieces(dev_context *context, side_copy_kind kind, side_path path, struct blocks_cursor *cursor)
{
    struct known to = {0, 0}, from = {0, 0};
    side_status status = SIDE_OK;

    for (size_t i = 0; i < cursor->count && status == SIDE_OK; i++) {
        const side_piece *p = &cursor->pieces[i];
        if (p->bytes == 0)
            continue;
        status = check_side(context, (uintptr_t)p->dst, p->bytes, kind == SIDE_COPY_D2H, path, i, &to);
        if (status == SIDE_OK)
            status = check_side(context, (uintptr_t)p->src, p->bytes, kind == SIDE_COPY_H2D, path, i, &from);
        cursor->full++;
        cursor->bytes += p->bytes;
        cursor->tiles += (p->bytes - 1) / TABLE_TILE + 1;
    }
    return status;
}

/* Not into a graph, which would read the table whenever it is launched; nor on the legacy stream, which a capture elsewhere minds. Entered. */
static side_status check_stream(dev_stream *stream, side_path path)
{
    static const char where[] = "side_copy_blocks";
    CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;

    if (stream->handle == NULL || (uintptr_t)stream->handle == CU_HANDLE_LEGACY)
        return error_set(SIDE_UNSUPPORTED, where, "path %s is not for the legacy stream; make one",
                         side_path_name(path));
    side_status status = cuda_status(stream->context, stream->context->cu->cuStreamIsCapturing(stream->handle, &capture),
                                     "cuStreamIsCapturing", "stream %p", (void *)stream->handle);
    if (status == SIDE_OK && capture != CU_STREAM_CAPTURE_STATUS_NONE)
        return error_set(SIDE_UNSUPPORTED, where, "path %s does not go into a captured stream", side_path_name(path));
    return status;
}

/* ---------------------------------------------------------------- gather */

/* As much as a table holds. */
static void gather_write(struct blocks_cursor *cursor, struct cuda_table *table)
{
    uint64_t room;

    while (blocks_next(cursor) && (room = table_room(table)) > 0) {
        const side_piece *p = &cursor->pieces[cursor->index];
        const uint64_t left = p->bytes - cursor->offset, part = left < room ? left : room;
        table_add(table, (uintptr_t)p->dst + cursor->offset, (uintptr_t)p->src + cursor->offset, part, 0);
        cursor->offset += part;
    }
    table_close_chunk(table);
}

static side_status gather_queue(dev_stream *stream, side_copy_kind kind, struct blocks_cursor *cursor)
{
    dev_context *context = stream->context;
    /* Within the device there is no link to fill: a quarter of the multiprocessors. */
    const unsigned wide = (unsigned)context->props.multiprocessors / 4,
                   grid = kind == SIDE_COPY_D2D && wide > GATHER_GRID ? wide : GATHER_GRID;
    const uint64_t share = cursor->tiles / (grid * WARPS * GATHER_UNITS);
    const uint32_t unit_tiles = share < 1 ? 1 : share < TABLE_UNIT_MOST ? (uint32_t)share : TABLE_UNIT_MOST;
    const uint64_t entries = cursor->full + cursor->tiles / unit_tiles + 4;
    CUfunction function;
    side_status status = kernels_get(context, KERNEL_GATHER, "side_copy_blocks", &function);

    while (status == SIDE_OK && blocks_next(cursor)) {
        struct cuda_table *table;
        status = table_take(context, entries, unit_tiles, &table);
        if (status != SIDE_OK)
            break;
        gather_write(cursor, table);
        CUdeviceptr units = (CUdeviceptr)(uintptr_t)table_units(table),
                    pieces = (CUdeviceptr)(uintptr_t)table_pieces(table);
        void *arguments[] = {&units, &table->units, &pieces};
        status = blocks_launch(context, stream->handle, function, "side_gather", grid, arguments);
        if (status == SIDE_OK)
            status = table_put(context, table, stream->handle);
        else
            table_drop(context, table);
    }
    return status;
}

side_status cuda_copy_blocks(dev_stream *stream, side_copy_kind kind, const side_piece *pieces, size_t count,
                             side_path path)
{
    dev_context *context = stream->context;
    struct blocks_cursor cursor = {.pieces = pieces, .count = count};
    side_status status;

    if (path == SIDE_PATH_PACK && kind != SIDE_COPY_D2H)
        return error_set(SIDE_UNSUPPORTED, "side_copy_blocks", "path pack goes from device to host alone");
    status = cuda_enter(context);
    if (status != SIDE_OK)
        return status;
    if (path == SIDE_PATH_LOOP || path == SIDE_PATH_BATCH) {
        status = cuda_copy_queue(stream, kind, pieces, count, path);
    } else {
        status = check_stream(stream, path);
        if (status == SIDE_OK)
            status = check_pieces(context, kind, path, &cursor);
        if (status == SIDE_OK && cursor.full > 0)
            status = path == SIDE_PATH_PACK ? pack_queue(stream, &cursor) : gather_queue(stream, kind, &cursor);
    }
    cuda_leave(context);
    return status;
}
