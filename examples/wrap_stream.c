/* SPDX-License-Identifier: MIT
 *
 * A program that has streams of its own: wrap one, and a pipeline computes on it. Nothing else of that program changes: what it queues on its stream
 * afterwards runs after the pipeline's kernels, and no device-wide synchronise is needed.
 *
 * In a CUDA program `theirs` is a cudaStream_t or CUstream, in PyTorch torch.cuda.current_stream().cuda_stream. This file must build without CUDA,
 * so it borrows the CUstream of a stream that the library made. The software device has no native streams: NULL makes one there.
 */
#include "example.h"

enum { ITEMS = 6, FLOATS = 1 << 16, BYTES = FLOATS * 4 };

static int compute(void *user, side_stream *stream, side_item *item)
{
    const float *bias = user;
    return example_end("wrap_stream", example_kernel(stream, item->data, item->result, item->bytes, 1.0f, *bias));
}

/* in and out: ITEMS * BYTES of pinned memory, so no staging thread is needed. */
static side_status run_on(side_device *device, void *theirs, float *in, float *out, float bias)
{
    side_pipeline_options o = SIDE_PIPELINE_OPTIONS_INIT;
    side_block inputs[ITEMS], outputs[ITEMS];
    side_pipeline *pipeline = NULL;
    side_stream *wrapped;
    side_status d, s = side_stream_wrap(device, theirs, &wrapped);

    if (s != SIDE_OK)
        return s;
    for (size_t i = 0; i < ITEMS; i++) {
        inputs[i] = (side_block){in + i * FLOATS, BYTES};
        outputs[i] = (side_block){out + i * FLOATS, BYTES};
    }
    o.item_bytes = o.result_bytes = BYTES;
    o.streams = 1;
    o.compute_streams = &wrapped;
    o.source = side_source_blocks(inputs, ITEMS);
    o.sink = side_sink_blocks(outputs, ITEMS);
    o.compute = compute;
    o.compute_user = &bias;
    s = side_pipeline_create(device, &o, &pipeline);
    if (s == SIDE_OK)
        s = side_pipeline_run(pipeline, NULL);
    d = side_pipeline_destroy(pipeline);
    side_stream_destroy(wrapped); /* the wrapper; `theirs` stays */
    return s != SIDE_OK ? s : d;
}

int main(int argc, char **argv)
{
    side_device *device = NULL;
    side_stream *owner = NULL;
    side_pool *pool = NULL;
    void *in = NULL, *out = NULL;
    uint64_t wrong = 0;
    side_status s = side_device_open(example_device(argc, argv), &device);

    if (s == SIDE_OK)
        s = side_stream_create(device, &owner);
    if (s == SIDE_OK)
        s = side_device_pool(device, &pool);
    if (s == SIDE_OK)
        s = side_pool_alloc(pool, (size_t)ITEMS * BYTES, &in);
    if (s == SIDE_OK)
        s = side_pool_alloc(pool, (size_t)ITEMS * BYTES, &out);
    for (size_t i = 0; s == SIDE_OK && i < (size_t)ITEMS * FLOATS; i++)
        ((float *)in)[i] = (float)(i % 1000);
    if (s == SIDE_OK)
        s = run_on(device, side_stream_native(owner), in, out, 7.0f);
    for (size_t i = 0; s == SIDE_OK && i < (size_t)ITEMS * FLOATS; i++)
        wrong += ((float *)out)[i] != (float)(i % 1000) + 7.0f;
    if (s == SIDE_OK)
        printf("wrap_stream: %d items on %s stream, %llu values wrong\n", ITEMS,
               side_stream_native(owner) != NULL ? "the caller's" : "a simulated", (unsigned long long)wrong);

    int code = example_end("wrap_stream", s);
    if (s == SIDE_STUCK)
        return code; /* the device may still use what is ours */
    if (in != NULL)
        side_pool_free(pool, in, NULL, 0);
    if (out != NULL)
        side_pool_free(pool, out, NULL, 0);
    side_stream_destroy(owner);
    side_device_close(device);
    return code != 0 || wrong != 0;
}
