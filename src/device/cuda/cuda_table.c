/* SPDX-License-Identifier: MIT */
#include "cuda_table.h"

#include "alloc.h"
#include "error.h"
#include "os.h"

#include <assert.h>
#include <stdio.h>

enum {
    TABLES_MOST = 64, /* in flight; beyond, a call waits for the one that was queued longest ago */
    LOOK_MOST = 4     /* tables that a call asks the driver about before it makes another one */
};
#define TABLE_LEAST    ((size_t)16 << 10)
#define TABLES_BYTES   ((size_t)64 << 20)
#define TABLE_WAIT_NS  UINT64_C(30000000000)
#define TABLE_SLEEP_NS 20000

void tables_init(dev_context *context)
{
    pthread_mutex_init(&context->tables.mutex, NULL);
}

/* ---------------------------------------------------------------- the pool */

static void table_free(dev_context *context, struct cuda_table *table)
{
    CUresult r;

    if (table->done != NULL)
        context->cu->cuEventDestroy(table->done);
    if (table->data != NULL && (r = context->cu->cuMemFreeHost(table->data)) != CUDA_SUCCESS)
        log_message(SIDE_LEVEL_WARN, "cuda", "cuMemFreeHost(%p): error %d", table->data, (int)r);
    mem_free(table);
}

/* Is it known that nothing reads it? Locked, entered. */
static bool is_through(dev_context *context, struct cuda_table *table)
{
    if (table->busy) {
        const CUresult r = context->cu->cuEventQuery(table->done);
        table->busy = r != CUDA_SUCCESS && !cuda_is_lost(r);
    }
    return !table->busy;
}

static void unlink_table(struct cuda_tables *pool, struct cuda_table *table)
{
    struct cuda_table **at = &pool->first;

    while (*at != table)
        at = &(*at)->next;
    *at = table->next;
    table->next = NULL;
}

/* One that is through and has room, among the first that are not; else, in *spare, one that is through and has not. Locked, entered. */
static struct cuda_table *find(dev_context *context, size_t bytes, unsigned look, struct cuda_table **spare)
{
    *spare = NULL;
    for (struct cuda_table *t = context->tables.first; t != NULL; t = t->next) {
        if (t->busy && look == 0)
            continue;
        if (t->busy)
            look--;
        if (!is_through(context, t))
            continue;
        if (t->bytes >= bytes)
            return t;
        *spare = t;
    }
    return NULL;
}

static side_status table_make(dev_context *context, size_t bytes, struct cuda_table **table)
{
    struct cuda_table *t = mem_zalloc(1, sizeof(*t));
    const char *call = "cuMemHostAlloc";

    if (t == NULL)
        return SIDE_NO_MEMORY;
    t->bytes = bytes;
    CUresult r = context->cu->cuMemHostAlloc(&t->data, bytes, CU_ALLOC_PORTABLE | CU_ALLOC_DEVICEMAP);
    if (r == CUDA_SUCCESS) {
        call = "cuEventCreate";
        r = context->cu->cuEventCreate(&t->done, CU_EVENT_DISABLE_TIMING);
    } else {
        t->data = NULL;
    }
    side_status status = cuda_status(context, r, call, "%zu bytes for a table of blocks", bytes);
    if (status == SIDE_OK)
        *table = t;
    else
        table_free(context, t);
    return status;
}

static bool has_larger(const struct cuda_tables *pool, size_t bytes)
{
    const struct cuda_table *t = pool->first;

    while (t != NULL && t->bytes < bytes)
        t = t->next;
    return t != NULL;
}

static void forget(dev_context *context, struct cuda_table *table)
{
    unlink_table(&context->tables, table);
    context->tables.count--;
    context->tables.bytes -= table->bytes;
    table_free(context, table);
}

/* A new one, within the bounds; `spare`, which is too small, makes way for it where it must. SIDE_AGAIN: what is in flight must come back first.
 * Locked, entered. */
static side_status replace(dev_context *context, size_t bytes, struct cuda_table *spare, struct cuda_table **table)
{
    struct cuda_tables *pool = &context->tables;
    const bool full = pool->count >= TABLES_MOST || pool->bytes + bytes > TABLES_BYTES;
    char cause[200];

    if (full) {
        if (spare != NULL)
            forget(context, spare); /* and look again */
        return SIDE_AGAIN;
    }
    side_status status = table_make(context, bytes, table);
    if (status == SIDE_OK) {
        pool->count++;
        pool->bytes += bytes;
        return SIDE_OK;
    }
    if (status == SIDE_DEVICE_LOST || status == SIDE_NO_MEMORY)
        return status;
    if (spare != NULL || has_larger(pool, bytes)) {
        if (spare != NULL)
            forget(context, spare);
        return SIDE_AGAIN;
    }
    snprintf(cause, sizeof(cause), "%.199s", side_last_error()->message);
    return error_set(SIDE_UNSUPPORTED, "side_copy_blocks", "no pinned memory for the kernel's table: %s", cause);
}

static size_t size_for(uint64_t entries)
{
    size_t bytes = TABLE_LEAST;

    while (bytes < TABLE_MOST && (bytes - TABLE_HEAD) / sizeof(struct block_piece) < entries)
        bytes *= 2;
    return bytes;
}

side_status table_take(dev_context *context, uint64_t entries, uint32_t unit_tiles, struct cuda_table **table)
{
    struct cuda_tables *pool = &context->tables;
    const size_t bytes = size_for(entries);
    struct cuda_table *t = NULL, *spare;
    side_status status = SIDE_AGAIN;

    for (uint64_t begin = os_now_ns(), turn = 0; status == SIDE_AGAIN; turn++) {
        pthread_mutex_lock(&pool->mutex);
        t = find(context, bytes, turn == 0 && pool->count < TABLES_MOST ? LOOK_MOST : TABLES_MOST, &spare);
        if (t != NULL)
            unlink_table(pool, t);
        status = t != NULL ? SIDE_OK : replace(context, bytes, spare, &t);
        pthread_mutex_unlock(&pool->mutex);
        if (status == SIDE_AGAIN && os_now_ns() - begin > TABLE_WAIT_NS)
            return error_set(SIDE_STUCK, "side_copy_blocks", "%d calls are queued, and none came to an end within 30 s",
                             TABLES_MOST);
        if (status == SIDE_AGAIN && turn > 0)
            os_sleep_ns(TABLE_SLEEP_NS);
    }
    if (status != SIDE_OK)
        return status;
    t->pieces = t->units = t->chunks = t->open = 0;
    t->tiles = 0;
    t->unit_tiles = unit_tiles;
    atomic_store_explicit(table_stop(t), 0, memory_order_relaxed); /* the launch makes it seen */
    *table = t;
    return SIDE_OK;
}

void table_drop(dev_context *context, struct cuda_table *table)
{
    struct cuda_tables *pool = &context->tables;

    pthread_mutex_lock(&pool->mutex);
    table->next = pool->first; /* its memory is warm, and it is free */
    pool->first = table;
    pthread_mutex_unlock(&pool->mutex);
}

void table_lose(dev_context *context, struct cuda_table *table)
{
    log_message(SIDE_LEVEL_WARN, "cuda", "%zu bytes of pinned memory are kept: a kernel may still read them",
                table->bytes);
    pthread_mutex_lock(&context->tables.mutex);
    context->tables.count--;
    context->tables.bytes -= table->bytes;
    pthread_mutex_unlock(&context->tables.mutex);
    mem_free(table);
}

side_status table_put(dev_context *context, struct cuda_table *table, CUstream stream)
{
    struct cuda_tables *pool = &context->tables;
    struct cuda_table **at = &pool->first;
    side_status status = cuda_status(context, context->cu->cuEventRecord(table->done, stream), "cuEventRecord",
                                     "event %p, stream %p", (void *)table->done, (void *)stream);

    if (status != SIDE_OK) {
        if (blocks_drain(context, stream))
            table_drop(context, table);
        else
            table_lose(context, table);
        return status;
    }
    pthread_mutex_lock(&pool->mutex);
    table->busy = true;
    while (*at != NULL)
        at = &(*at)->next;
    *at = table;
    pthread_mutex_unlock(&pool->mutex);
    return SIDE_OK;
}

void tables_finish(dev_context *context, bool entered)
{
    struct cuda_tables *pool = &context->tables;
    const uint64_t deadline = os_now_ns() + TABLE_WAIT_NS;
    struct cuda_table *t;

    while ((t = pool->first) != NULL) {
        pool->first = t->next;
        while (entered && !is_through(context, t) && os_now_ns() < deadline)
            os_sleep_ns(TABLE_SLEEP_NS);
        if (entered && t->busy)
            table_lose(context, t);
        else
            table_free(context, t);
    }
    pthread_mutex_destroy(&pool->mutex);
}

/* ---------------------------------------------------------------- writing one */

uint64_t table_room(const struct cuda_table *table)
{
    const uint64_t entries = (table->bytes - TABLE_HEAD) / sizeof(struct block_piece);
    /* Each chunk's last unit may be a short one; so may that of the chunk that is open. One more is for the piece itself. */
    const uint64_t used = table->pieces + table->tiles / table->unit_tiles + table->chunks + 2;

    return used < entries ? (entries - used) * table->unit_tiles * TABLE_TILE : 0;
}

void table_add(struct cuda_table *table, uint64_t to, uint64_t from, uint64_t bytes, uint64_t out)
{
    assert(bytes > 0 && bytes <= table_room(table));
    table_pieces(table)[table->pieces++] = (struct block_piece){to, from, bytes, out};
    table->tiles += (bytes - 1) / TABLE_TILE + 1;
}

void table_close_chunk(struct cuda_table *table)
{
    const struct block_piece *pieces = table_pieces(table);
    struct block_unit *units = table_units(table);
    const uint32_t first = table->units;
    struct block_unit unit = {.piece = table->open, .chunk = table->chunks};

    for (uint32_t i = table->open; i < table->pieces; i++) {
        const uint64_t tiles = (pieces[i].bytes - 1) / TABLE_TILE + 1;
        for (uint64_t tile = 0; tile < tiles;) {
            if (unit.tiles == 0) {
                unit.piece = i;
                unit.tile = (uint32_t)tile;
            }
            const uint64_t room = table->unit_tiles - unit.tiles, left = tiles - tile;
            const uint32_t here = (uint32_t)(left < room ? left : room);
            unit.tiles += here;
            unit.pieces = i + 1 - unit.piece;
            tile += here;
            if (unit.tiles == table->unit_tiles || (i + 1 == table->pieces && tile == tiles)) {
                *(units - table->units++) = unit;
                unit.tiles = 0;
            }
        }
    }
    for (uint32_t u = first; u < table->units; u++)
        (units - u)->units = table->units - first;
    assert((const void *)(units - table->units + 1) >= (const void *)(pieces + table->pieces));
    table->open = table->pieces;
    table->chunks++;
}
