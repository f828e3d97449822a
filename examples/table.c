/* SPDX-License-Identifier: MIT
 *
 * A cache of layers: the model has more layers than fit the device, so a table of slots keeps the ones used last, under the layer's number. While a layer
 * computes, the next one is copied. A layer that is in use is never evicted, and its slot is overwritten only after the device has read it.
 *
 * The order of the calls matters. prefetch() queues the copy of layer i + 1 first, then compute of layer i is queued; and compute takes a layer (which makes
 * its stream wait for that layer's copy) only when it needs it.
 */
#include "example.h"

enum { LAYERS = 8, SLOTS = 3, PASSES = 4, FLOATS = 1 << 14, BYTES = FLOATS * 4 };

struct cache {
    side_slots *table;
    side_stream *copy; /* H2D */
    side_stream *compute;
    const float *weights; /* pinned, all layers */
    float *state;         /* device: what the layers work on; overwritten by each */
    float *out;           /* pinned: state after each layer of the last pass */
    unsigned hits, misses;
};

/* Makes sure that the layer is in the table or on its way there. Waits for nothing. */
static side_status prefetch(struct cache *c, uint64_t layer)
{
    side_slot slot;
    side_status s = side_slots_take(c->table, layer, c->copy,
                                    &slot); /* is it there? a read by the stream that wrote it costs no wait */

    if (s == SIDE_OK) {
        c->hits++;
        return side_slots_release(c->table, &slot, c->copy);
    }
    if (s != SIDE_NOT_FOUND)
        return s;
    c->misses++;
    s = side_slots_acquire(c->table, layer, c->copy, &slot); /* a free slot, else the least recently used */
    if (s != SIDE_OK)
        return s;
    s = side_copy_async(c->copy, SIDE_COPY_H2D, slot.data, c->weights + layer * FLOATS, BYTES);
    if (s == SIDE_OK)
        return side_slots_publish(c->table, &slot, c->copy, NULL);
    side_slots_abandon(c->table, &slot, c->copy);
    return s;
}

static side_status compute(struct cache *c, uint64_t layer)
{
    side_slot slot;
    side_status s = side_slots_take(c->table, layer, c->compute, &slot);

    if (s != SIDE_OK)
        return s;
    s = example_kernel(c->compute, slot.data, c->state, BYTES, 3.0f, 1.0f);
    if (s == SIDE_OK)
        s = side_slots_release(c->table, &slot, c->compute);
    if (s == SIDE_OK)
        s = side_copy_async(c->compute, SIDE_COPY_D2H, c->out + layer * FLOATS, c->state, BYTES);
    return s;
}

/* Up through the layers and down again: the layers near the turn are still there. */
static side_status run(struct cache *c)
{
    side_status s = prefetch(c, 0);

    for (int i = 0; s == SIDE_OK && i < PASSES * LAYERS; i++) {
        int at = i % (2 * LAYERS), next = (i + 1) % (2 * LAYERS);
        if (i + 1 < PASSES * LAYERS)
            s = prefetch(c, (uint64_t)(next < LAYERS ? next : 2 * LAYERS - 1 - next));
        if (s == SIDE_OK)
            s = compute(c, (uint64_t)(at < LAYERS ? at : 2 * LAYERS - 1 - at));
    }
    return s == SIDE_OK ? side_stream_sync(c->compute, 30.0) : s;
}

static side_status cache_create(struct cache *c, side_device *device, side_pool *pool)
{
    side_slots_options o = SIDE_SLOTS_OPTIONS_INIT;
    void *weights = NULL, *state = NULL, *out = NULL;
    side_status s = side_stream_create(device, &c->copy);

    o.policy = SIDE_TABLE;
    o.count = SLOTS;
    o.slot_bytes = BYTES;
    o.where = SIDE_MEMORY_DEVICE;
    if (s == SIDE_OK)
        s = side_stream_create(device, &c->compute);
    if (s == SIDE_OK)
        s = side_slots_create(device, &o, &c->table);
    if (s == SIDE_OK)
        s = side_device_alloc(device, BYTES, &state);
    if (s == SIDE_OK)
        s = side_pool_alloc(pool, (size_t)LAYERS * BYTES, &weights);
    if (s == SIDE_OK)
        s = side_pool_alloc(pool, (size_t)LAYERS * BYTES, &out);
    for (size_t i = 0; s == SIDE_OK && i < (size_t)LAYERS * FLOATS; i++)
        ((float *)weights)[i] = (float)(i % 3000);
    c->weights = weights;
    c->state = state;
    c->out = out;
    return s;
}

int main(int argc, char **argv)
{
    struct cache c = {0};
    side_device *device = NULL;
    side_pool *pool = NULL;
    uint64_t wrong = 0;
    side_status d, s = side_device_open(example_device(argc, argv), &device);

    if (s == SIDE_OK)
        s = side_device_pool(device, &pool);
    if (s == SIDE_OK)
        s = cache_create(&c, device, pool);
    if (s == SIDE_OK)
        s = run(&c);
    d = side_slots_destroy(c.table);
    s = s == SIDE_OK ? d : s;
    for (size_t i = 0; s == SIDE_OK && i < (size_t)LAYERS * FLOATS; i++)
        wrong += c.out[i] != 3.0f * (float)(i % 3000) + 1.0f;
    if (s == SIDE_OK)
        printf("table: %d layers through %d slots, %u hits, %u misses, %llu values wrong\n", LAYERS, SLOTS, c.hits,
               c.misses, (unsigned long long)wrong);

    int code = example_end("table", s);
    if (s != SIDE_OK)
        return code; /* streams may still use what is ours: the end of the process frees it */
    side_pool_free(pool, c.out, NULL, 0);
    side_pool_free(pool, (void *)(uintptr_t)c.weights, NULL, 0);
    side_device_free(device, c.state);
    side_stream_destroy(c.compute);
    side_stream_destroy(c.copy);
    side_device_close(device);
    return wrong != 0 || c.hits == 0 || c.misses < LAYERS;
}
