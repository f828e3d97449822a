/* SPDX-License-Identifier: MIT
 *
 * One producer, several readers: every item of a ring is read by three streams, each driven by a thread of its own. A slot is written again once the
 * three of them have read it; the copy stream waits for exactly those three reads and for nothing else that is queued behind them.
 *
 *     copy      [item 0][item 1]        [item 2][item 3]
 *     reader 0          [0][1]                  [2][3]
 *     reader 1          [ 0 ][ 1 ]              [ 2 ][ 3 ]
 *     reader 2          [  0  ][  1  ]          [  2  ]...
 */
#include "example.h"

#include <pthread.h>

enum { READERS = 3, SLOTS = 2, ITEMS = 16, FLOATS = 1 << 14, BYTES = FLOATS * 4 };

struct reader {
    side_slots *ring;
    float *out;   /* pinned, ITEMS * BYTES: the results */
    void *result; /* device, BYTES */
    side_stream *stream;
    float scale;
    side_status status;
    pthread_t thread;
};

static side_status read_item(struct reader *r, uint64_t item)
{
    side_slot slot;
    side_status s = side_slots_take(r->ring, item, r->stream, &slot); /* the stream waits for the copy of this item */

    if (s != SIDE_OK)
        return s;
    s = example_kernel(r->stream, slot.data, r->result, BYTES, r->scale, 0.0f);
    if (s == SIDE_OK) /* reading ends here: the slot need not wait for the copy out */
        s = side_slots_release(r->ring, &slot, r->stream);
    if (s == SIDE_OK)
        s = side_copy_async(r->stream, SIDE_COPY_D2H, r->out + item * FLOATS, r->result, BYTES);
    return s;
}

static void *read_all(void *arg)
{
    struct reader *r = arg;

    for (uint64_t i = 0; r->status == SIDE_OK && i < ITEMS; i++)
        r->status = read_item(r, i);
    if (r->status == SIDE_OK)
        r->status = side_stream_sync(r->stream, 30.0);
    if (r->status != SIDE_OK) { /* nobody may wait for a release that will not come */
        example_end("readers", r->status);
        side_slots_poison(r->ring, r->status);
    }
    return NULL;
}

static side_status produce(side_slots *ring, side_stream *copy, const float *in)
{
    side_slot slot;
    side_status s = SIDE_OK;

    for (uint64_t i = 0; s == SIDE_OK && i < ITEMS; i++) {
        s = side_slots_acquire(ring, 0, copy, &slot); /* the stream waits for the readers of item i - SLOTS */
        if (s == SIDE_OK)
            s = side_copy_async(copy, SIDE_COPY_H2D, slot.data, in + i * FLOATS, BYTES);
        if (s == SIDE_OK)
            s = side_slots_publish(ring, &slot, copy, NULL);
    }
    if (s != SIDE_OK)
        side_slots_poison(ring, s);
    return s;
}

static side_status reader_init(struct reader *r, side_device *device, side_pool *pool, float scale)
{
    void *out = NULL;
    side_status s = side_stream_create(device, &r->stream);

    r->scale = scale;
    if (s == SIDE_OK)
        s = side_device_alloc(device, BYTES, &r->result);
    if (s == SIDE_OK)
        s = side_pool_alloc(pool, (size_t)ITEMS * BYTES, &out);
    r->out = out;
    return s;
}

static void reader_finish(struct reader *r, side_device *device, side_pool *pool)
{
    if (r->out != NULL)
        side_pool_free(pool, r->out, NULL, 0);
    side_device_free(device, r->result);
    side_stream_destroy(r->stream);
}

/* Starts the readers, produces, and waits for them. The first failure counts. */
static side_status run(side_slots *ring, struct reader *readers, side_stream *copy, const float *in)
{
    int started = 0;
    side_status s = SIDE_OK;

    for (; s == SIDE_OK && started < READERS; started++) {
        readers[started].ring = ring;
        if (pthread_create(&readers[started].thread, NULL, read_all, &readers[started]) != 0) {
            s = SIDE_SYSTEM;
            side_slots_poison(ring, s);
            break;
        }
    }
    if (s == SIDE_OK)
        s = produce(ring, copy, in);
    for (int r = 0; r < started; r++) {
        pthread_join(readers[r].thread, NULL);
        s = s == SIDE_OK ? readers[r].status : s;
    }
    return s;
}

static uint64_t count_wrong(const struct reader *readers, const float *in)
{
    uint64_t wrong = 0;

    for (int r = 0; r < READERS; r++)
        for (size_t i = 0; i < (size_t)ITEMS * FLOATS; i++)
            wrong += readers[r].out[i] != readers[r].scale * in[i];
    return wrong;
}

int main(int argc, char **argv)
{
    side_slots_options o = SIDE_SLOTS_OPTIONS_INIT;
    struct reader readers[READERS] = {{0}};
    side_device *device = NULL;
    side_stream *copy = NULL;
    side_slots *ring = NULL;
    side_pool *pool = NULL;
    void *in = NULL;
    uint64_t wrong = 0;
    side_status d, s = side_device_open(example_device(argc, argv), &device);

    o.policy = SIDE_RING;
    o.count = SLOTS;
    o.slot_bytes = BYTES;
    o.where = SIDE_MEMORY_DEVICE;
    o.readers = READERS; /* releases that free an item */
    if (s == SIDE_OK)
        s = side_stream_create(device, &copy);
    if (s == SIDE_OK)
        s = side_device_pool(device, &pool);
    if (s == SIDE_OK)
        s = side_pool_alloc(pool, (size_t)ITEMS * BYTES, &in);
    for (int r = 0; s == SIDE_OK && r < READERS; r++)
        s = reader_init(&readers[r], device, pool, (float)(r + 1));
    if (s == SIDE_OK)
        s = side_slots_create(device, &o, &ring);
    for (size_t i = 0; s == SIDE_OK && i < (size_t)ITEMS * FLOATS; i++)
        ((float *)in)[i] = (float)(i % 5000);
    if (s == SIDE_OK)
        s = run(ring, readers, copy, in);
    d = side_slots_destroy(ring); /* drains: afterwards nothing of the ring is in flight */
    s = s == SIDE_OK ? d : s;
    if (s == SIDE_OK) {
        wrong = count_wrong(readers, in);
        printf("readers: %d items read by %d streams through %d slots, %llu values wrong\n", ITEMS, READERS, SLOTS,
               (unsigned long long)wrong);
    }

    int code = example_end("readers", s);
    if (s != SIDE_OK)
        return code; /* streams may still use what is ours: the end of the process frees it */
    for (int r = 0; r < READERS; r++)
        reader_finish(&readers[r], device, pool);
    side_pool_free(pool, in, NULL, 0);
    side_stream_destroy(copy);
    side_device_close(device);
    return wrong != 0;
}
