/* SPDX-License-Identifier: MIT
 *
 * A feeder: batches of many small arrays, in ordinary memory, come from a thread of the program's; the loop takes them in order on its own stream. Of every fourth
 * batch it wants something later, so it keeps that one while it goes on: slots come back in any order.
 *
 * Traps avoided: the arrays of a batch live until the feeder says that it has read them; the loop counts what it keeps, since next waits for a free slot.
 */
#include "example.h"

#include <pthread.h>

enum {
    BATCHES = 24,
    ARRAYS = 50,
    FLOATS = 1000,
    ARRAY_BYTES = FLOATS * 4,
    BATCH_BYTES = ARRAYS * ARRAY_BYTES,
    SLOTS = 4
};

struct loader {
    side_feeder *feeder;
    float *data[BATCHES]; /* one block a batch here; an array each would do as well */
    side_status status;
};

/* The arrays that the feeder has read for good go. */
static side_status sweep(struct loader *l)
{
    uint64_t count;
    side_status s = side_feeder_copied(l->feeder, &count);

    for (uint64_t i = 0; s == SIDE_OK && i < count; i++) {
        free(l->data[i]);
        l->data[i] = NULL;
    }
    return s;
}

static void *load(void *arg)
{
    struct loader *l = arg;
    side_feed_piece pieces[ARRAYS];
    side_status s = SIDE_OK;

    for (uint64_t b = 0; s == SIDE_OK && b < BATCHES; b++) {
        float *p = malloc(BATCH_BYTES);
        l->data[b] = p;
        for (size_t i = 0; p != NULL && i < ARRAYS * FLOATS; i++)
            p[i] = (float)b;
        for (size_t i = 0; i < ARRAYS; i++) /* the last comes first in the slot */
            pieces[i] = (side_feed_piece){p + (ARRAYS - 1 - i) * FLOATS, ARRAY_BYTES, i * ARRAY_BYTES};
        s = p != NULL ? side_feeder_submit(l->feeder, pieces, ARRAYS, NULL) : SIDE_NO_MEMORY;
        if (s == SIDE_OK)
            s = sweep(l);
    }
    if (s == SIDE_OK)
        s = side_feeder_close(l->feeder);
    else
        side_feeder_cancel(l->feeder); /* or the loop would wait for what does not come */
    l->status = s;
    return NULL;
}

static side_status give_back(side_feeder *f, const side_feed_item *item, side_stream *stream)
{
    side_status s = side_slots_release(side_feeder_slots(f), &item->slot, stream);
    return s == SIDE_OK ? side_slots_give_back(side_feeder_slots(f), &item->slot) : s;
}

/* A step reads the batch and, of the one that is kept, an old value; results: pinned. */
static side_status loop(side_feeder *f, side_stream *stream, float *scratch, float *results)
{
    side_feed_item item, kept = {0};
    bool keeps = false;
    side_status s;

    while ((s = side_feeder_next(f, stream, &item)) == SIDE_OK) {
        s = example_kernel(stream, item.slot.data, scratch, item.bytes, 2.0f, 1.0f);
        if (s == SIDE_OK)
            s = side_copy_async(stream, SIDE_COPY_D2H, results + item.number, scratch, sizeof(float));
        if (s == SIDE_OK && item.number % 4 == 0) {
            side_feed_item old = kept;
            kept = item;
            s = keeps ? give_back(f, &old, stream) : SIDE_OK;
            keeps = true;
        } else if (s == SIDE_OK) {
            s = give_back(f, &item, stream);
        }
        if (s != SIDE_OK)
            return s;
    }
    if (s == SIDE_END)
        s = keeps ? give_back(f, &kept, stream) : SIDE_OK;
    return s == SIDE_OK ? side_stream_sync(stream, 30.0) : s;
}

static side_status run(side_device *device, side_stream *stream, float *scratch, float *results)
{
    side_feeder_options o = SIDE_FEEDER_OPTIONS_INIT;
    struct loader l = {.status = SIDE_OK};
    side_feeder *f = NULL;
    pthread_t thread;
    side_status s, d;

    o.slots = SLOTS;
    o.slot_bytes = BATCH_BYTES;
    s = side_feeder_create(device, &o, &f);
    if (s != SIDE_OK)
        return s;
    l.feeder = f;
    if (pthread_create(&thread, NULL, load, &l) != 0)
        return SIDE_SYSTEM;
    s = loop(f, stream, scratch, results);
    side_feeder_cancel(f); /* the loader, if the loop has failed */
    pthread_join(thread, NULL);
    if (s == SIDE_OK)
        s = l.status;
    d = side_feeder_destroy(f);
    for (int i = 0; d == SIDE_OK && i < BATCHES; i++)
        free(l.data[i]);
    return s != SIDE_OK ? s : d;
}

int main(int argc, char **argv)
{
    side_device *device = NULL;
    side_stream *stream = NULL;
    side_pool *pool = NULL;
    void *scratch = NULL, *results = NULL;
    int wrong = 0;
    side_status s = side_device_open(example_device(argc, argv), &device);

    if (s == SIDE_OK)
        s = side_stream_create(device, &stream);
    if (s == SIDE_OK)
        s = side_device_alloc(device, BATCH_BYTES, &scratch);
    if (s == SIDE_OK)
        s = side_device_pool(device, &pool);
    if (s == SIDE_OK)
        s = side_pool_alloc(pool, BATCHES * sizeof(float), &results);
    if (s == SIDE_OK)
        s = run(device, stream, scratch, results);
    for (int i = 0; s == SIDE_OK && i < BATCHES; i++)
        wrong += ((const float *)results)[i] != 2.0f * (float)i + 1.0f;
    if (s == SIDE_OK)
        printf("feeder: %d batches of %d arrays, %d wrong\n", BATCHES, ARRAYS, wrong);

    int code = example_end("feeder", s);
    if (s == SIDE_STUCK)
        return code; /* the device may still use what is ours */
    if (results != NULL)
        side_pool_free(pool, results, NULL, 0);
    side_device_free(device, scratch);
    side_stream_destroy(stream);
    side_device_close(device);
    return code != 0 || wrong != 0;
}
