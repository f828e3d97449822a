/* SPDX-License-Identifier: MIT
 *
 * Pull: the caller owns the loop, as a training loop does. The library copies batches ahead on a stream of its own; the loop takes one, queues its step
 * on its own stream, and hands the batch back. No call in the loop waits for the device, but for the bound on what may be queued ahead.
 *
 * Two traps are shown avoided: the step runs on a batch that its stream has waited for, and the losses are read once an epoch and not once a step.
 */
#include "example.h"

enum { EPOCHS = 2, STEPS = 12, FLOATS = 1 << 16, BYTES = FLOATS * 4 };

/* The source: called in order on a thread of the library's, straight into pinned memory. */
static int load_batch(void *user, uint64_t item, void *data, size_t capacity, size_t *bytes)
{
    float *out = data;
    (void)user;
    (void)capacity; /* item_bytes */

    if (item == STEPS) {
        *bytes = SIDE_NO_MORE;
        return 0;
    }
    for (size_t i = 0; i < FLOATS; i++)
        out[i] = (float)(item * 100 + i % 100);
    *bytes = BYTES;
    return 0;
}

/* What the loop owns. */
struct model {
    side_stream *stream;
    float *activations; /* device; one is enough, since the steps are in order on one stream */
    float *losses;      /* pinned host memory, one a step */
};

static side_status step(const struct model *m, const side_item *batch)
{
    side_status s = example_kernel(m->stream, batch->data, m->activations, batch->bytes, 0.5f, 3.0f);

    if (s == SIDE_OK)
        s = side_copy_async(m->stream, SIDE_COPY_D2H, m->losses + batch->number, m->activations, sizeof(float));
    return s;
}

static side_status epoch(side_pipeline *pipeline, const struct model *m)
{
    side_status s;
    side_item batch;

    while ((s = side_pipeline_next(pipeline, m->stream, &batch)) == SIDE_OK) {
        s = step(m, &batch);
        if (s == SIDE_OK)
            s = side_pipeline_done(pipeline, &batch, m->stream);
        if (s != SIDE_OK)
            return s; /* destroying the pipeline drains it */
    }
    if (s != SIDE_END)
        return s;
    return side_stream_sync(m->stream, 30.0); /* once an epoch: now the losses can be read */
}

static side_status train(side_device *device, const struct model *m, uint64_t *wrong)
{
    side_pipeline_options o = SIDE_PIPELINE_OPTIONS_INIT;
    side_pipeline *pipeline;
    side_status s, d;

    o.item_bytes = BYTES;
    o.source = side_source_callback(load_batch, NULL);
    s = side_pipeline_create(device, &o, &pipeline);
    if (s != SIDE_OK)
        return s;
    for (int e = 0; s == SIDE_OK && e < EPOCHS; e++) { /* after SIDE_END the next call of next begins a new pass */
        memset(m->losses, 0, STEPS * sizeof(float));
        s = epoch(pipeline, m);
        for (int i = 0; s == SIDE_OK && i < STEPS; i++)
            *wrong += m->losses[i] != 0.5f * (float)(i * 100) + 3.0f;
    }
    d = side_pipeline_destroy(pipeline);
    return s != SIDE_OK ? s : d;
}

int main(int argc, char **argv)
{
    side_device *device = NULL;
    side_pool *pool = NULL;
    struct model m = {0};
    void *activations = NULL, *losses = NULL;
    uint64_t wrong = 0;
    side_status s = side_device_open(example_device(argc, argv), &device);

    if (s == SIDE_OK)
        s = side_stream_create(device, &m.stream);
    if (s == SIDE_OK)
        s = side_device_alloc(device, BYTES, &activations);
    if (s == SIDE_OK)
        s = side_device_pool(device, &pool);
    if (s == SIDE_OK)
        s = side_pool_alloc(pool, STEPS * sizeof(float), &losses);
    m.activations = activations;
    m.losses = losses;
    if (s == SIDE_OK)
        s = train(device, &m, &wrong);
    if (s == SIDE_OK)
        printf("pull: %d epochs of %d steps, %llu losses wrong\n", EPOCHS, STEPS, (unsigned long long)wrong);

    int code = example_end("pull", s);
    if (s == SIDE_STUCK)
        return code; /* the device may still use what is ours */
    if (losses != NULL)
        side_pool_free(pool, losses, NULL, 0);
    side_device_free(device, activations);
    side_stream_destroy(m.stream);
    side_device_close(device);
    return code != 0 || wrong != 0;
}
