/* SPDX-License-Identifier: MIT
 *
 * Checksums of parts, of what lies at the destination: a thread that waits for part after part, in the order in which they are read. On a device the sums of each
 * KiB are computed there, on a stream of their own, and folded here: a 16th of the bytes comes back. Two rounds: one is computed while the other is folded.
 *
 *     round    | sums of part 7 | sums of 8 | 9 |  ...  first sums of 12 |   and of each part that ends in it its last bytes */
#include "load_private.h"

#include "alloc.h"
#include "error.h"
#include "ops.h"
#include "os.h"

#include <string.h>

#define ROUND_BLOCKS 16384u /* of 1 KiB */
#define ROUND_ITEMS  256u
#define SUM_BYTES    ((size_t)64)
#define TAIL_BYTES   ((size_t)1088)
#define ROUND_BYTES  (ROUND_BLOCKS * SUM_BYTES + ROUND_ITEMS * TAIL_BYTES)
#define HOST_BLOCKS  64u

struct item {
    uint32_t part;
    uint32_t at, blocks; /* sums in the round */
    bool last;           /* the part ends here */
};

struct round {
    void *sums;            /* device */
    unsigned char *pinned; /* sums, then tails by item */
    struct fence done;
    struct item items[ROUND_ITEMS];
    uint32_t count, used;
};

struct load_check {
    side_load *load;
    pthread_t thread;
    bool has_thread;
    side_stream *stream;
    side_pool *pool;
    struct round rounds[2];
    /* The thread's. */
    uint32_t next;   /* in the order */
    uint64_t cursor; /* blocks of that part that are queued */
    side_xxh3 state; /* of the part that is folded */
};

static uint64_t blocks_of(const struct load_part *p)
{
    return p->bytes > 0 ? (p->bytes - 1) / 1024 : 0;
}

static size_t tail_of(const struct load_part *p)
{
    return p->bytes < TAIL_BYTES ? (size_t)p->bytes : TAIL_BYTES;
}

static uint32_t part_at(const side_load *l, uint32_t i)
{
    return (l->options.flags & SIDE_LOAD_IN_ORDER) != 0 ? i : l->plan.order[i];
}

/* A part without bytes is there before its arena is. */
static char *data_of(const side_load *l, const struct load_part *p)
{
    static char nothing[1];

    return p->bytes > 0 ? load_part_data(&l->plan, p) : nothing;
}

/* ---------------------------------------------------------------- host memory */

static side_status sum_host(side_load *l, uint32_t part)
{
    const struct load_part *p = &l->plan.parts[part];
    const char *data = data_of(l, p);
    const uint64_t blocks = blocks_of(p);
    uint64_t sums[HOST_BLOCKS * 8];
    side_xxh3 state;

    side_xxh3_begin(&state);
    for (uint64_t at = 0, n; at < blocks; at += n) {
        n = blocks - at < HOST_BLOCKS ? blocks - at : HOST_BLOCKS;
        xxh3_block_sums(sums, data + at * 1024, (size_t)n);
        side_xxh3_fold(&state, sums, (size_t)n);
    }
    return side_xxh3_end(&state, data + p->bytes - tail_of(p), tail_of(p), p->bytes, &l->hashes[part]);
}

/* ---------------------------------------------------------------- the device's */

/* Queues what of the part fits into the round. */
static side_status add(struct load_check *c, struct round *r, uint32_t part)
{
    const struct load_part *p = &c->load->plan.parts[part];
    char *data = data_of(c->load, p);
    const uint64_t left = blocks_of(p) - c->cursor;
    struct item *item = &r->items[r->count];
    side_op op = SIDE_OP_INIT;
    side_status s = SIDE_OK;

    *item = (struct item){.part = part, .at = r->used};
    item->blocks = left < ROUND_BLOCKS - r->used ? (uint32_t)left : ROUND_BLOCKS - r->used;
    item->last = item->blocks == left;
    op.id = SIDE_OP_XXH3_BLOCKS;
    op.in[0] = data + c->cursor * 1024;
    op.out = (char *)r->sums + r->used * SUM_BYTES;
    op.dim[0] = item->blocks;
    if (item->blocks > 0)
        s = side_op_async(c->stream, &op);
    if (s == SIDE_OK && item->last)
        s = side_copy_async(c->stream, SIDE_COPY_D2H, r->pinned + ROUND_BLOCKS * SUM_BYTES + r->count * TAIL_BYTES,
                            data + p->bytes - tail_of(p), tail_of(p));
    r->used += item->blocks;
    r->count++;
    c->cursor = item->last ? 0 : c->cursor + item->blocks;
    c->next += item->last;
    return s;
}

/* Waits for parts, queues their sums. count 0: there was nothing more. */
static side_status compute(struct load_check *c, struct round *r)
{
    side_load *l = c->load;
    side_status s = SIDE_OK;

    r->count = r->used = 0;
    while (s == SIDE_OK && c->next < l->plan.part_count && r->count < ROUND_ITEMS && r->used < ROUND_BLOCKS) {
        const uint32_t part = part_at(l, c->next);
        if (c->cursor == 0)
            s = load_wait_part(l, part, c->stream, true);
        if (s == SIDE_OK)
            s = add(c, r, part);
    }
    if (s == SIDE_OK && r->used > 0)
        s = side_copy_async(c->stream, SIDE_COPY_D2H, r->pinned, r->sums, r->used * SUM_BYTES);
    return s == SIDE_OK && r->count > 0 ? fence_record(&r->done, l->device, c->stream) : s;
}

static side_status fold(struct load_check *c, struct round *r)
{
    side_load *l = c->load;
    side_status s = SIDE_OK;

    if (r->count > 0)
        s = fence_wait(&r->done, l->device, NULL, l->options.timeout_s, SITE_NONE);
    for (uint32_t i = 0; s == SIDE_OK && i < r->count; i++) {
        const struct item *item = &r->items[i];
        const struct load_part *p = &l->plan.parts[item->part];
        side_xxh3_fold(&c->state, (const uint64_t *)(const void *)(r->pinned + item->at * SUM_BYTES), item->blocks);
        if (!item->last)
            continue;
        s = side_xxh3_end(&c->state, r->pinned + ROUND_BLOCKS * SUM_BYTES + i * TAIL_BYTES, tail_of(p), p->bytes,
                          &l->hashes[item->part]);
        side_xxh3_begin(&c->state);
    }
    return s;
}

static side_status sum_all(struct load_check *c)
{
    side_load *l = c->load;
    side_status s = SIDE_OK;

    side_xxh3_begin(&c->state);
    if (l->to_host) {
        for (uint32_t i = 0; s == SIDE_OK && i < l->plan.part_count; i++) {
            s = load_wait_part(l, part_at(l, i), NULL, true);
            if (s == SIDE_OK)
                s = sum_host(l, part_at(l, i));
        }
        return s;
    }
    s = compute(c, &c->rounds[0]);
    for (uint32_t i = 0; s == SIDE_OK && c->rounds[i].count > 0; i ^= 1) {
        s = compute(c, &c->rounds[i ^ 1]);
        if (s == SIDE_OK)
            s = fold(c, &c->rounds[i]);
    }
    return s;
}

static void *check_thread(void *check)
{
    struct load_check *c = check;
    side_status s = sum_all(c);

    if (s != SIDE_OK)
        load_fail(c->load, s);
    return NULL;
}

/* ---------------------------------------------------------------- begin and end */

static side_status device_parts(struct load_check *c)
{
    side_device *device = c->load->device;
    side_status s = side_stream_create(device, &c->stream);

    if (s == SIDE_OK)
        s = side_device_pool(device, &c->pool);
    for (int i = 0; s == SIDE_OK && i < 2; i++) {
        void *pinned = NULL;
        s = side_device_alloc(device, ROUND_BLOCKS * SUM_BYTES, &c->rounds[i].sums);
        if (s == SIDE_OK)
            s = side_pool_alloc(c->pool, ROUND_BYTES, &pinned);
        c->rounds[i].pinned = pinned;
    }
    return s;
}

side_status load_check_begin(side_load *l)
{
    struct load_check *c;
    side_status s = SIDE_OK;

    if (!l->to_host && !l->device->props.kernels)
        return error_set(SIDE_UNSUPPORTED, "side_load_start", "SIDE_LOAD_CHECKSUM needs kernels: %s",
                         l->device->props.kernels_from);
    for (uint32_t i = 0; !l->to_host && i < l->plan.part_count; i++)
        if (l->plan.parts[i].arena == LOAD_NONE && (uintptr_t)l->plan.parts[i].data % 16 != 0)
            return error_set(SIDE_INVALID, "side_load_start",
                             "SIDE_LOAD_CHECKSUM takes data aligned to 16; that of part %u is %p", i,
                             l->plan.parts[i].data);
    c = mem_zalloc(1, sizeof(*c));
    if (c == NULL)
        return SIDE_NO_MEMORY;
    c->load = l;
    l->check = c;
    l->hashes = mem_zalloc(l->plan.part_count, sizeof(*l->hashes));
    if (l->hashes == NULL)
        return SIDE_NO_MEMORY;
    if (!l->to_host)
        s = device_parts(c);
    if (s == SIDE_OK)
        s = os_thread_create(&c->thread, "side-check", check_thread, c);
    c->has_thread = s == SIDE_OK;
    return s;
}

side_status load_check_finish(side_load *l)
{
    struct load_check *c = l->check;

    if (c == NULL)
        return SIDE_OK;
    if (c->has_thread)
        pthread_join(c->thread, NULL);
    c->has_thread = false;
    if (c->stream != NULL && !device_stream_drain(c->stream, l->options.timeout_s))
        return error_set(SIDE_STUCK, "side_load", "the checksums did not end within %g s", l->options.timeout_s);
    for (int i = 0; i < 2; i++) {
        fence_finish(&c->rounds[i].done, l->device);
        side_device_free(l->device, c->rounds[i].sums);
        if (c->rounds[i].pinned != NULL)
            side_pool_free(c->pool, c->rounds[i].pinned, NULL, 0);
    }
    side_stream_destroy(c->stream);
    mem_free(c);
    l->check = NULL;
    return SIDE_OK;
}

side_status side_load_get_checksum(side_load *load, size_t part, uint64_t *hash)
{
    static const char where[] = "side_load_get_checksum";
    side_status r = load_enter(load, where);

    if (r == SIDE_OK && (part >= load->plan.part_count || hash == NULL))
        return error_set(SIDE_INVALID, where, "part %zu of %u, hash %p", part, load->plan.part_count, (void *)hash);
    if (r != SIDE_OK)
        return r;
    pthread_mutex_lock(&load->mutex);
    const bool is_there = load->joined && load->end.status == SIDE_OK && load->hashes != NULL;
    pthread_mutex_unlock(&load->mutex);
    if (!is_there)
        return error_set(SIDE_STATE, where, "checksums are there after side_load_join, with SIDE_LOAD_CHECKSUM");
    *hash = load->hashes[part];
    return SIDE_OK;
}
