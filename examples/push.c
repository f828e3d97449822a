/* SPDX-License-Identifier: MIT
 *
 * Push: the library runs the loop. Give it a source, a compute callback and a sink; side_pipeline_run returns when every result has arrived.
 *
 * Here both ends are plain malloc memory: threads of the library's stage it through pinned memory while earlier pieces are in flight.
 */
#include "example.h"

enum { ITEMS = 8, FLOATS = 1 << 18, BYTES = FLOATS * 4 };

/* Called once an item, in order. Queues work and returns; the item is ready as far as `stream` is concerned. A callback that fails tells the
 * cause itself: the pipeline only hears that it failed. */
static int compute(void *user, side_stream *stream, side_item *item)
{
    (void)user;
    return example_end("push", example_kernel(stream, item->data, item->result, item->bytes, 2.0f, 1.0f));
}

static side_status run(side_device *device, const side_block *inputs, const side_block *outputs,
                       side_pipeline_stats *stats)
{
    side_pipeline_options o = SIDE_PIPELINE_OPTIONS_INIT;
    side_pipeline *pipeline;
    side_status s, d;

    o.item_bytes = o.result_bytes = BYTES;
    o.source = side_source_blocks(inputs, ITEMS);
    o.compute = compute;
    o.sink = side_sink_blocks(outputs, ITEMS);
    s = side_pipeline_create(device, &o, &pipeline);
    if (s != SIDE_OK)
        return s;
    s = side_pipeline_run(pipeline, stats);
    d = side_pipeline_destroy(pipeline);
    return s != SIDE_OK ? s : d;
}

static uint64_t count_wrong(const float *in, const float *out)
{
    uint64_t wrong = 0;

    for (size_t i = 0; i < (size_t)ITEMS * FLOATS; i++)
        wrong += out[i] != 2.0f * in[i] + 1.0f;
    return wrong;
}

int main(int argc, char **argv)
{
    const char *spec = example_device(argc, argv);
    float *in = malloc((size_t)ITEMS * BYTES), *out = calloc(ITEMS, BYTES);
    side_block inputs[ITEMS], outputs[ITEMS];
    side_device *device = NULL;
    side_pipeline_stats stats;
    uint64_t wrong = 0;
    side_status s = in != NULL && out != NULL ? SIDE_OK : SIDE_NO_MEMORY;

    for (size_t i = 0; s == SIDE_OK && i < (size_t)ITEMS * FLOATS; i++)
        in[i] = (float)(i % 4096); /* small whole numbers: the result is exact */
    for (size_t i = 0; s == SIDE_OK && i < ITEMS; i++) {
        inputs[i] = (side_block){in + i * FLOATS, BYTES};
        outputs[i] = (side_block){out + i * FLOATS, BYTES};
    }
    if (s == SIDE_OK)
        s = side_device_open(spec, &device);
    if (s == SIDE_OK)
        s = run(device, inputs, outputs, &stats);
    if (s == SIDE_OK) {
        wrong = count_wrong(in, out);
        printf("push: %llu items, %.1f MB in, %.1f MB out, %.3f ms, %llu values wrong\n",
               (unsigned long long)stats.items, (double)stats.bytes_in / 1e6, (double)stats.bytes_out / 1e6,
               stats.time_s * 1e3, (unsigned long long)wrong);
    }
    int code = example_end("push", s);
    if (s == SIDE_STUCK)
        return code; /* the device may still use what is ours: the end of the process frees it */
    side_device_close(device);
    free(in);
    free(out);
    return code != 0 || wrong != 0;
}
