/* SPDX-License-Identifier: MIT
 *
 * Pageable memory through a pipeline, by how many threads stage it, against the link: pinned copies of the same size, measured in turn with it.
 * Each item is hashed on the device as it arrives, and the hashes are checked after every run.
 *
 *     bench_stage [--total-mib 4096] [--item-mib 64] and what bench.h names
 */
#include "bench.h"

enum { CONFIGS = 6, LINK_BLOCKS = 8 };
static const uint32_t threads[CONFIGS] = {1, 2, 4, 8, 12, 0};

struct stage {
    struct bench b;
    size_t item_bytes, items, sum_bytes; /* sum_bytes: hashes of one item */
    side_block *blocks;
    char *expected, *got; /* got: pinned */
    char *sums;           /* device */
    void *link[LINK_BLOCKS], *link_device;
    side_stream *stream;
    side_pipeline *pipelines[CONFIGS];
    double *gbps[CONFIGS], *link_gbps;
};

static side_op hash_op(const struct stage *s, const void *in, void *out)
{
    side_op op = SIDE_OP_INIT;

    op.id = SIDE_OP_XXH3_BLOCKS;
    op.dim[0] = s->item_bytes / 1024;
    op.in[0] = in;
    op.out = out;
    return op;
}

static int compute(void *user, side_stream *stream, side_item *item)
{
    struct stage *s = user;
    side_op op = hash_op(s, item->data, s->sums + item->number * s->sum_bytes);

    return side_op_async(stream, &op) == SIDE_OK ? 0 : 1;
}

static void data_make(struct stage *s)
{
    s->blocks = host_block(s->items * sizeof(*s->blocks));
    s->expected = host_block(s->items * s->sum_bytes);
    for (size_t i = 0; i < s->items; i++) {
        s->blocks[i] = (side_block){host_block(s->item_bytes), s->item_bytes};
        random_fill(s->blocks[i].data, s->item_bytes, i + 1);
        side_op op = hash_op(s, s->blocks[i].data, s->expected + i * s->sum_bytes);
        OK(side_op_host(&op));
    }
    s->got = pinned_block(&s->b, s->items * s->sum_bytes);
    OK(side_device_alloc(s->b.device, s->items * s->sum_bytes, (void **)&s->sums));
    OK(side_device_alloc(s->b.device, s->item_bytes, &s->link_device));
    for (int i = 0; i < LINK_BLOCKS; i++) {
        s->link[i] = pinned_block(&s->b, s->item_bytes);
        random_fill(s->link[i], s->item_bytes, 1000 + (uint64_t)i);
    }
    OK(side_stream_create(s->b.device, &s->stream));
}

static void pipelines_make(struct stage *s)
{
    for (int k = 0; k < CONFIGS; k++) {
        side_pipeline_options o = SIDE_PIPELINE_OPTIONS_INIT;
        o.item_bytes = s->item_bytes;
        o.source = side_source_blocks(s->blocks, s->items);
        o.compute = compute;
        o.compute_user = s;
        o.threads = threads[k];
        OK(side_pipeline_create(s->b.device, &o, &s->pipelines[k]));
        s->gbps[k] = host_block(s->b.repeats * sizeof(double));
    }
    s->link_gbps = host_block(s->b.repeats * sizeof(double));
}

static double run_one(struct stage *s, int k)
{
    side_pipeline_stats stats;

    OK(side_memset_async(s->stream, s->sums, 0, s->items * s->sum_bytes));
    OK(side_stream_sync(s->stream, 60));
    OK(side_pipeline_run(s->pipelines[k], &stats));
    OK(side_copy_async(s->stream, SIDE_COPY_D2H, s->got, s->sums, s->items * s->sum_bytes));
    OK(side_stream_sync(s->stream, 60));
    if (memcmp(s->got, s->expected, s->items * s->sum_bytes) != 0)
        bench_wrong("%u threads", threads[k]);
    return (double)stats.bytes_in / stats.time_s * 1e-9;
}

static void report(struct stage *s)
{
    const double link = quantile(s->link_gbps, s->b.repeats, 0.5);

    printf("%zu items of %zu MiB from pageable memory; pinned link %.1f GB/s\n", s->items, s->item_bytes / MIB, link);
    printf("%10s %10s %8s\n", "threads", "GB/s", "of link");
    json_number(&s->b, "item_bytes", (double)s->item_bytes);
    json_number(&s->b, "items", (double)s->items);
    json_number(&s->b, "link_gbps", link);
    json_samples(&s->b, "link_samples_gbps", s->link_gbps, s->b.repeats);
    fprintf(s->b.json, ", \"rows\": [");
    for (int k = 0; k < CONFIGS; k++) {
        side_pipeline_stats stats;
        const double rate = quantile(s->gbps[k], s->b.repeats, 0.5);
        OK(side_pipeline_get_stats(s->pipelines[k], &stats));
        fprintf(s->b.json, "%s{\"threads\": %u, \"threads_used\": %u", k > 0 ? ", " : "", threads[k], stats.threads);
        json_number(&s->b, "gbps", rate);
        json_number(&s->b, "of_link", rate / link);
        json_number(&s->b, "chunk_bytes", (double)stats.chunk_bytes);
        json_number(&s->b, "staging_slots", stats.staging_slots);
        json_samples(&s->b, "samples_gbps", s->gbps[k], s->b.repeats);
        fputc('}', s->b.json);
        printf("%6u%s %10.1f %8.3f\n", stats.threads, threads[k] == 0 ? " def" : "    ", rate, rate / link);
    }
    fputc(']', s->b.json);
}

int main(int argc, char **argv)
{
    struct stage s = {.b = bench_begin("stage", argc, argv, 7)};

    s.item_bytes = bench_number(&s.b, "--item-mib", 64) * MIB;
    s.items = bench_number(&s.b, "--total-mib", 4096) * MIB / s.item_bytes;
    s.sum_bytes = s.item_bytes / 1024 * 64;
    data_make(&s);
    pipelines_make(&s);
    for (size_t r = 0; r < s.b.repeats + 1; r++) { /* the first one warms up */
        const size_t at = r > 0 ? r - 1 : 0;
        s.link_gbps[at] = link_gbps(&s.b, s.stream, s.link_device, s.link, LINK_BLOCKS, s.item_bytes, s.items);
        for (int k = 0; k < CONFIGS; k++)
            s.gbps[k][at] = run_one(&s, k);
    }
    report(&s);
    for (int k = 0; k < CONFIGS; k++) {
        OK(side_pipeline_destroy(s.pipelines[k]));
        free(s.gbps[k]);
    }
    for (size_t i = 0; i < s.items; i++)
        free(s.blocks[i].data);
    for (int i = 0; i < LINK_BLOCKS; i++)
        pinned_done(&s.b, s.link[i]);
    pinned_done(&s.b, s.got);
    side_device_free(s.b.device, s.sums);
    side_device_free(s.b.device, s.link_device);
    side_stream_destroy(s.stream);
    free(s.blocks);
    free(s.expected);
    free(s.link_gbps);
    bench_end(&s.b);
    return 0;
}
