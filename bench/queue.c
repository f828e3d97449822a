/* SPDX-License-Identifier: MIT
 *
 * What it costs the host to queue one item: H2D, op, D2H and every fence between them, through the pull API, from pinned blocks to pinned
 * blocks. The device is held back by a spin while the measured items are queued, so that nothing waits for it and nothing is waited for; the
 * ring has been round once before. The log off and on by turns; once with the device running free; and the same work queued by hand, with an
 * event and a wait for each hand-over and nothing else: the floor that the driver sets. Sizes and kinds take turns, since a processor's clock drifts.
 *
 *     bench_queue [--spin-us 5000] and what bench.h names
 */
#include "bench.h"

enum {
    DEPTH = 64,
    WARM = 64,
    MEASURED = 50,
    AHEAD = 64,
    ITEMS = WARM + MEASURED + AHEAD,
    WARM_ROUNDS = 5,
    SIZES = 3,
    KINDS = 4,
    BY_HAND = 3
};
static const size_t sizes[SIZES] = {4096, 16384, 65536};
static const char *const kinds[KINDS] = {"log off", "log on", "log off, device free", "by hand, log off"};

struct queue {
    struct bench b;
    side_stream *stream;
    side_log *log;
    side_pipeline *pipelines[SIZES][2]; /* without and with log */
    side_stream *h2d, *d2h;             /* by hand */
    side_event *filled[DEPTH], *read[DEPTH], *made[DEPTH], *sent[DEPTH];
    char *device_in, *device_out; /* DEPTH slots of the largest size */
    side_block in[ITEMS], out[ITEMS];
    uint64_t spin_ns;
    double *mean[SIZES][KINDS]; /* us an item, one a repeat */
    double *each[SIZES][KINDS]; /* MEASURED a repeat */
    size_t held[SIZES];         /* repeats at whose end the spin still ran */
};

static void pipelines_make(struct queue *q, int size)
{
    for (int log = 0; log < 2; log++) {
        side_pipeline_options o = SIDE_PIPELINE_OPTIONS_INIT;
        o.item_bytes = o.result_bytes = sizes[size];
        o.depth = DEPTH;
        o.window = 1024;
        o.source = side_source_blocks(q->in, ITEMS);
        o.sink = side_sink_blocks(q->out, ITEMS);
        o.log = log != 0 ? q->log : NULL;
        OK(side_pipeline_create(q->b.device, &o, &q->pipelines[size][log]));
    }
}

/* The blocks of all pipelines are the same; how much of each is an item differs. */
static void blocks_set(struct queue *q, size_t bytes)
{
    for (int i = 0; i < ITEMS; i++)
        q->in[i].bytes = q->out[i].bytes = bytes;
}

static void one(struct queue *q, side_pipeline *p)
{
    side_item item;
    side_op op = SIDE_OP_INIT;

    OK(side_pipeline_next(p, q->stream, &item));
    op.id = SIDE_OP_AFFINE;
    op.in[0] = item.data;
    op.out = item.result;
    op.dim[0] = item.bytes / sizeof(float);
    op.scale = 2.0f;
    op.bias = 1.0f;
    OK(side_op_async(q->stream, &op));
    OK(side_pipeline_done(p, &item, q->stream));
}

/* What an expert writes: four records, four waits, two copies, one op. */
static void one_by_hand(struct queue *q, int size, int i)
{
    const int k = i % DEPTH;
    const size_t bytes = sizes[size];
    side_op op = SIDE_OP_INIT;

    op.id = SIDE_OP_AFFINE;
    op.in[0] = q->device_in + (size_t)k * sizes[SIZES - 1];
    op.out = q->device_out + (size_t)k * sizes[SIZES - 1];
    op.dim[0] = bytes / sizeof(float);
    op.scale = 2.0f;
    op.bias = 1.0f;
    OK(side_stream_wait(q->h2d, q->read[k]));
    OK(side_copy_async(q->h2d, SIDE_COPY_H2D, q->device_in + (size_t)k * sizes[SIZES - 1], q->in[i].data, bytes));
    OK(side_event_record(q->filled[k], q->h2d));
    OK(side_stream_wait(q->stream, q->filled[k]));
    OK(side_stream_wait(q->stream, q->sent[k]));
    OK(side_op_async(q->stream, &op));
    OK(side_event_record(q->read[k], q->stream));
    OK(side_event_record(q->made[k], q->stream));
    OK(side_stream_wait(q->d2h, q->made[k]));
    OK(side_copy_async(q->d2h, SIDE_COPY_D2H, q->out[i].data, op.out, bytes));
    OK(side_event_record(q->sent[k], q->d2h));
}

static void check(const struct queue *q, size_t bytes)
{
    for (size_t i = 0; i < ITEMS; i++)
        for (size_t k = 0; k < bytes / sizeof(float); k++) {
            const float x = ((const float *)q->in[i].data)[k], y = ((const float *)q->out[i].data)[k], two = 2.0f * x;
            if (y != two + 1.0f)
                bench_wrong("item %zu, element %zu: %g of %g", i, k, (double)y, (double)x);
        }
}

static void pass(struct queue *q, int size, int kind, size_t repeat, bool keep)
{
    side_pipeline *p = q->pipelines[size][kind == 1];
    double *each = q->each[size][kind] + repeat * MEASURED, last;
    side_event *spun;
    side_item item;
    side_op spin = SIDE_OP_INIT;

    for (int i = 0; i < ITEMS; i++)
        memset(q->out[i].data, 0, sizes[size]);
    if (kind == 1)
        OK(side_log_clear(q->log));
    OK(side_event_create(q->b.device, false, &spun));
    for (int i = 0; i < WARM; i++)
        kind == BY_HAND ? one_by_hand(q, size, i) : one(q, p);
    OK(side_stream_sync(q->stream, 60));
    spin.id = SIDE_OP_SPIN;
    spin.dim[0] = q->spin_ns;
    if (kind != 2)
        OK(side_op_async(q->stream, &spin));
    OK(side_event_record(spun, q->stream));
    const double begin = last = host_s();
    for (int i = 0; i < MEASURED; i++) {
        kind == BY_HAND ? one_by_hand(q, size, WARM + i) : one(q, p);
        const double now = host_s();
        each[i] = (now - last) * 1e6;
        last = now;
    }
    if (keep && kind == 0)
        q->held[size] += side_event_query(spun) == SIDE_AGAIN;
    q->mean[size][kind][repeat] = (last - begin) / MEASURED * 1e6;
    for (int i = 0; i < AHEAD; i++)
        kind == BY_HAND ? one_by_hand(q, size, WARM + MEASURED + i) : one(q, p);
    OK(side_stream_sync(q->d2h, 60));
    if (kind != BY_HAND && side_pipeline_next(p, q->stream, &item) != SIDE_END)
        bench_die("the pass does not end");
    check(q, sizes[size]);
    side_event_destroy(spun);
}

static void by_hand_make(struct queue *q)
{
    void *memory;

    OK(side_stream_create(q->b.device, &q->h2d));
    OK(side_stream_create(q->b.device, &q->d2h));
    for (int i = 0; i < DEPTH; i++) {
        OK(side_event_create(q->b.device, false, &q->filled[i]));
        OK(side_event_create(q->b.device, false, &q->read[i]));
        OK(side_event_create(q->b.device, false, &q->made[i]));
        OK(side_event_create(q->b.device, false, &q->sent[i]));
    }
    OK(side_device_alloc(q->b.device, DEPTH * sizes[SIZES - 1], &memory));
    q->device_in = memory;
    OK(side_device_alloc(q->b.device, DEPTH * sizes[SIZES - 1], &memory));
    q->device_out = memory;
}

static void by_hand_done(struct queue *q)
{
    OK(side_stream_sync(q->d2h, 60));
    for (int i = 0; i < DEPTH; i++) {
        side_event_destroy(q->filled[i]);
        side_event_destroy(q->read[i]);
        side_event_destroy(q->made[i]);
        side_event_destroy(q->sent[i]);
    }
    side_device_free(q->b.device, q->device_in);
    side_device_free(q->b.device, q->device_out);
    side_stream_destroy(q->h2d);
    side_stream_destroy(q->d2h);
}

static void report(struct queue *q)
{
    printf("us an item (H2D + op + D2H); the median of %zu passes of %d items\n", q->b.repeats, MEASURED);
    printf("%8s %-22s %8s %8s %8s\n", "bytes", "", "mean", "median", "p99");
    json_number(&q->b, "measured_items", MEASURED);
    json_number(&q->b, "spin_ns", (double)q->spin_ns);
    fprintf(q->b.json, ", \"rows\": [");
    for (int size = 0; size < SIZES; size++) {
        for (int kind = 0; kind < KINDS; kind++) {
            const size_t n = q->b.repeats * MEASURED;
            const double mean = quantile(q->mean[size][kind], q->b.repeats, 0.5);
            const double median = quantile(q->each[size][kind], n, 0.5), p99 = quantile(q->each[size][kind], n, 0.99);
            fprintf(q->b.json, "%s{\"bytes\": %zu", size + kind > 0 ? ", " : "", sizes[size]);
            json_text(&q->b, "kind", kinds[kind]);
            json_number(&q->b, "mean_us", mean);
            json_number(&q->b, "median_us", median);
            json_number(&q->b, "p99_us", p99);
            json_number(&q->b, "held_back", kind == 0 ? (double)q->held[size] : -1);
            json_samples(&q->b, "samples_mean_us", q->mean[size][kind], q->b.repeats);
            fputc('}', q->b.json);
            printf("%8zu %-22s %8.2f %8.2f %8.2f\n", sizes[size], kinds[kind], mean, median, p99);
        }
        if (!q->b.props.simulated && q->held[size] < q->b.repeats)
            printf("%8zu: in %zu of %zu passes the spin had ended before: raise --spin-us\n", sizes[size],
                   q->b.repeats - q->held[size], q->b.repeats);
    }
    fputc(']', q->b.json);
}

int main(int argc, char **argv)
{
    static struct queue q;

    q.b = bench_begin("queue", argc, argv, 21);
    q.spin_ns = bench_number(&q.b, "--spin-us", 5000) * 1000;
    OK(side_stream_create(q.b.device, &q.stream));
    OK(side_log_create(q.b.device, 0, &q.log));
    by_hand_make(&q);
    for (int i = 0; i < ITEMS; i++) {
        q.in[i].data = pinned_block(&q.b, sizes[SIZES - 1]);
        q.out[i].data = pinned_block(&q.b, sizes[SIZES - 1]);
        random_floats(q.in[i].data, sizes[SIZES - 1] / sizeof(float), (uint64_t)i + 1);
    }
    for (int size = 0; size < SIZES; size++)
        for (int kind = 0; kind < KINDS; kind++) {
            q.mean[size][kind] = host_block(q.b.repeats * sizeof(double));
            q.each[size][kind] = host_block(q.b.repeats * MEASURED * sizeof(double));
        }
    for (int size = 0; size < SIZES; size++) {
        blocks_set(&q, sizes[size]);
        pipelines_make(&q, size);
    }
    for (size_t r = 0; r < q.b.repeats + WARM_ROUNDS; r++)
        for (int size = 0; size < SIZES; size++)
            for (int kind = 0; kind < KINDS; kind++) {
                const size_t keep = r >= WARM_ROUNDS ? r - WARM_ROUNDS : 0;
                blocks_set(&q, sizes[size]);
                pass(&q, size, kind, keep, r >= WARM_ROUNDS);
            }
    for (int size = 0; size < SIZES; size++)
        for (int log = 0; log < 2; log++)
            OK(side_pipeline_destroy(q.pipelines[size][log]));
    by_hand_done(&q);
    report(&q);
    for (int size = 0; size < SIZES; size++) {
        for (int kind = 0; kind < KINDS; kind++) {
            free(q.mean[size][kind]);
            free(q.each[size][kind]);
        }
    }
    for (int i = 0; i < ITEMS; i++) {
        pinned_done(&q.b, q.in[i].data);
        pinned_done(&q.b, q.out[i].data);
    }
    side_log_destroy(q.log);
    side_stream_destroy(q.stream);
    bench_end(&q.b);
    return 0;
}
