/* SPDX-License-Identifier: MIT
 *
 * Pinned slots. The first ones are made before the pieces are cut, because their size depends on how much pinned memory there is; the others while the first
 * bytes move. */
#include "load_private.h"

#include "alloc.h"
#include "error.h"
#include "os.h"

#define WHERE "side_load_start"
/* Measured on an H200 (docs/design.md, "Filled slots go together"): larger pieces, or more of them, are out of the processor's caches before they are copied, which takes
 * memory bandwidth twice. */
#define PIECE_BYTES  ((size_t)2 << 20)
#define PINNED_BYTES ((size_t)80 << 20)
#define STEP_BYTES   ((size_t)16 << 20) /* the pool pins that much at once, and no more */
#define HOST_SLOTS   64u                /* reads in flight that need no slot */

/* At most `count` slots in a block of their own. */
static side_status block_make(side_load *l, uint32_t count)
{
    const size_t bytes = l->slot_bytes;
    void *data;
    side_status r = side_pool_alloc(l->pool, bytes * count, &data);

    if (r != SIDE_OK)
        return r;
    pthread_mutex_lock(&l->mutex);
    l->blocks[l->block_count++] = (struct load_block){data, bytes * count};
    for (uint32_t i = 0; i < count; i++) {
        struct load_slot *s = &l->slots[l->slot_count++];
        s->load = l;
        s->memory = (char *)data + i * bytes;
        s->clock_ns = l->begin_clock_ns;
        s->next = l->free;
        l->free = s;
    }
    l->pins_ns = os_now_ns();
    pthread_cond_signal(&l->work);
    pthread_mutex_unlock(&l->mutex);
    load_slots_tell(l);
    return SIDE_OK;
}

void load_slots_tell(side_load *l)
{
    pthread_mutex_lock(&l->mutex);
    while (l->reader != NULL && l->known_blocks < l->block_count) {
        const struct load_block block = l->blocks[l->known_blocks++];
        pthread_mutex_unlock(&l->mutex);
        reader_region(l->reader, block.data, block.bytes);
        pthread_mutex_lock(&l->mutex);
    }
    pthread_mutex_unlock(&l->mutex);
}

static uint32_t step_slots(const side_load *l)
{
    const size_t fit = l->slot_bytes < STEP_BYTES ? STEP_BYTES / l->slot_bytes : 1;
    const uint32_t left = l->slot_most - l->slot_count;

    return fit < left ? (uint32_t)fit : left;
}

static side_status slots_alloc(side_load *l)
{
    l->slots = mem_zalloc(l->slot_most, sizeof(*l->slots));
    l->blocks = l->slots != NULL ? mem_zalloc(l->slot_most, sizeof(*l->blocks)) : NULL;
    l->copying = l->blocks != NULL ? mem_zalloc(l->slot_most, sizeof(struct load_slot *)) : NULL;
    return l->copying != NULL ? SIDE_OK : SIDE_NO_MEMORY;
}

static side_status begin_host(side_load *l)
{
    l->slot_most = l->ordered ? 1 : HOST_SLOTS;
    side_status r = slots_alloc(l);

    for (uint32_t i = 0; r == SIDE_OK && i < l->slot_most; i++) {
        struct load_slot *s = &l->slots[l->slot_count++];
        s->load = l;
        s->next = l->free;
        l->free = s;
    }
    return r;
}

/* What options and pool leave for staging. */
static side_status limit_find(side_load *l, size_t *limit)
{
    const size_t asked = l->options.pinned_bytes != 0 ? l->options.pinned_bytes : PINNED_BYTES;
    side_pool_stats s;
    side_status r = side_device_pool(l->device, &l->pool);

    if (r == SIDE_OK)
        r = side_pool_get_stats(l->pool, &s);
    if (r != SIDE_OK)
        return r;
    const size_t used = s.pinned_bytes - s.slack_bytes, has = s.budget_bytes > used ? s.budget_bytes - used : 0;
    *limit = asked < has ? asked : has;
    return SIDE_OK;
}

static bool is_short(side_status status)
{
    return status == SIDE_OVER_BUDGET || status == SIDE_NO_MEMORY || status == SIDE_DEVICE_ERROR;
}

/* The first block: as many slots as a step takes, else two. */
static side_status first_block(side_load *l, size_t limit)
{
    const uint64_t pieces = l->plan.bytes / l->slot_bytes + 2 * (uint64_t)l->plan.file_count + 1;
    size_t most = limit / l->slot_bytes < LOAD_SLOTS_MOST ? limit / l->slot_bytes : LOAD_SLOTS_MOST;
    side_status r = SIDE_OK;

    l->slot_most = l->ordered ? 1 : pieces < most ? (uint32_t)pieces : (uint32_t)most;
    if (l->slots == NULL) /* large enough for all later tries, which want fewer */
        r = slots_alloc(l);
    if (r != SIDE_OK)
        return r;
    r = block_make(l, step_slots(l));
    return is_short(r) && l->slot_most > 2 ? block_make(l, 2) : r;
}

side_status load_slots_begin(side_load *l)
{
    size_t limit = 0, least;
    side_status r;
    side_error why;

    l->slot_bytes = l->options.piece_bytes != 0 ? l->options.piece_bytes : PIECE_BYTES;
    if (l->to_host)
        return begin_host(l);
    r = limit_find(l, &limit);
    if (r != SIDE_OK)
        return r;
    least = l->slot_bytes < LOAD_PIECE_LEAST ? l->slot_bytes : LOAD_PIECE_LEAST;
    while (l->slot_bytes / 2 >= least && limit < 2 * l->slot_bytes)
        l->slot_bytes = l->slot_bytes / 2 / LOAD_GRAIN * LOAD_GRAIN;
    if (limit < 2 * l->slot_bytes)
        return error_set(
            SIDE_OVER_BUDGET, WHERE,
            "staging takes two pieces of %zu bytes, and %zu bytes may be pinned; raise pinned_bytes or the "
            "pool's budget, or lower piece_bytes",
            l->slot_bytes, limit);
    while (is_short(r = first_block(l, limit)) && l->slots != NULL && l->slot_bytes / 2 >= least) {
        l->slot_bytes = l->slot_bytes / 2 / LOAD_GRAIN * LOAD_GRAIN;
        limit = 2 * l->slot_bytes;
    }
    if (!is_short(r) || l->slots == NULL)
        return r;
    error_copy(&why);
    return error_set(r, WHERE, "two pieces of %zu bytes cannot be pinned (give the pool more, or lower piece_bytes): %s",
                     l->slot_bytes, why.message);
}

void *load_slots_thread(void *load)
{
    side_load *l = load;
    side_status r = SIDE_OK;

    while (r == SIDE_OK && l->slot_count < l->slot_most && !atomic_load(&l->stop))
        r = block_make(l, step_slots(l));
    if (r != SIDE_OK)
        log_message(SIDE_LEVEL_WARN, "load", "staging uses %u slots of %zu bytes instead of %u: %s", l->slot_count,
                    l->slot_bytes, l->slot_most, side_last_error()->message);
    pthread_mutex_lock(&l->mutex);
    l->pinning = false;
    pthread_cond_broadcast(&l->work);
    pthread_mutex_unlock(&l->mutex);
    return NULL;
}

void load_slots_finish(side_load *l)
{
    for (uint32_t i = 0; l->slots != NULL && i < l->slot_count; i++)
        fence_finish(&l->slots[i].copied, l->device);
    for (uint32_t i = 0; l->blocks != NULL && i < l->block_count; i++)
        side_pool_free(l->pool, l->blocks[i].data, NULL, 0);
    mem_free(l->copying);
    mem_free(l->blocks);
    mem_free(l->slots);
    l->slots = NULL;
    l->blocks = NULL;
    l->copying = NULL;
    l->free = l->parked = NULL;
}
