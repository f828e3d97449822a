/* SPDX-License-Identifier: MIT
 *
 * Device buffers allocated for each item, against slots allocated once. The same loop over three streams (H2D, op, D2H, `depth` items in flight) with
 * four sources of memory:
 *     slots       two rings, allocated before
 *     pool        cuMemAllocAsync and cuMemFreeAsync in the item's streams, from a pool that keeps what it has
 *     pool, 0     the same as the driver sets it up: the pool gives memory back whenever somebody synchronises
 *     alloc       side_device_alloc and side_device_free: cuMemAlloc, and cuMemFree, which waits for the device
 *
 *     bench_alloc [--items 100] [--most-mib 16] and what bench.h names
 */
#include "bench.h"

#include <dlfcn.h>

enum { DEPTH = 3, KINDS = 4, MOST_SIZES = 3 };
enum kind { SLOTS, POOL, POOL_0, ALLOC };
static const char *const kinds[KINDS] = {"slots", "pool", "pool, 0", "alloc"};

/* The driver's own pool, by its own declarations. */
struct driver {
    int (*init)(unsigned);
    int (*get_pool)(void **pool, int device);
    int (*set_attribute)(void *pool, int attribute, void *value);
    int (*alloc_async)(unsigned long long *data, size_t bytes, void *stream);
    int (*free_async)(unsigned long long data, void *stream);
    int (*retain)(void **context, int device);
    int (*set_current)(void *context);
};
enum { RELEASE_THRESHOLD = 4 };

struct alloc {
    struct bench b;
    struct driver driver;
    bool have_pool;
    void *mempool;
    size_t bytes, items;
    side_stream *h2d, *compute, *d2h;
    side_slots *in, *out;
    side_event *filled[DEPTH], *done[DEPTH], *sent[DEPTH];
    void *data[DEPTH][2];   /* not SLOTS: of the item in flight there */
    float *source, *result; /* pinned, items * bytes */
    double *us[KINDS], *total_s[KINDS];
};

static bool driver_load(struct driver *d, int ordinal)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *context;

    if (library == NULL)
        return false;
    *(void **)&d->init = dlsym(library, "cuInit");
    *(void **)&d->get_pool = dlsym(library, "cuDeviceGetDefaultMemPool");
    *(void **)&d->set_attribute = dlsym(library, "cuMemPoolSetAttribute");
    *(void **)&d->alloc_async = dlsym(library, "cuMemAllocAsync");
    *(void **)&d->free_async = dlsym(library, "cuMemFreeAsync");
    *(void **)&d->retain = dlsym(library, "cuDevicePrimaryCtxRetain");
    *(void **)&d->set_current = dlsym(library, "cuCtxSetCurrent");
    return d->init != NULL && d->get_pool != NULL && d->set_attribute != NULL && d->alloc_async != NULL &&
           d->free_async != NULL && d->retain != NULL && d->set_current != NULL && d->init(0) == 0 &&
           d->retain(&context, ordinal) == 0 && d->set_current(context) == 0;
}

static void driver_ok(int result, const char *what)
{
    if (result == 0)
        return;
    fprintf(stderr, "bench_alloc: %s: CUresult %d\n", what, result);
    exit(1);
}

/* ---------------------------------------------------------------- memory of one item */

static void memory_get(struct alloc *a, enum kind kind, size_t k)
{
    for (int i = 0; i < 2; i++) {
        if (kind == ALLOC) {
            OK(side_device_alloc(a->b.device, a->bytes, &a->data[k][i]));
        } else {
            unsigned long long p = 0;
            driver_ok(a->driver.alloc_async(&p, a->bytes, side_stream_native(a->h2d)), "cuMemAllocAsync");
            a->data[k][i] = (void *)(uintptr_t)p;
        }
    }
}

/* The item at k has left: its results are on the host (ALLOC waits for that first), or will be. */
static void memory_put(struct alloc *a, enum kind kind, size_t k)
{
    if (a->data[k][0] == NULL)
        return;
    if (kind == ALLOC)
        OK(side_event_wait(a->sent[k], 60));
    for (int i = 0; i < 2; i++) {
        if (kind == ALLOC)
            side_device_free(a->b.device, a->data[k][i]);
        else
            driver_ok(a->driver.free_async((unsigned long long)(uintptr_t)a->data[k][i], side_stream_native(a->d2h)),
                      "cuMemFreeAsync");
        a->data[k][i] = NULL;
    }
}

/* ---------------------------------------------------------------- one item */

static void op_queue(struct alloc *a, void *out, const void *in)
{
    side_op op = SIDE_OP_INIT;

    op.id = SIDE_OP_AFFINE;
    op.in[0] = in;
    op.out = out;
    op.dim[0] = a->bytes / sizeof(float);
    op.scale = 2.0f;
    op.bias = 1.0f;
    OK(side_op_async(a->compute, &op));
}

static void item_by_slots(struct alloc *a, size_t i)
{
    char *source = (char *)a->source + i * a->bytes, *result = (char *)a->result + i * a->bytes;
    side_slot in, out;

    OK(side_event_wait(a->sent[i % DEPTH], 60)); /* as the others: at most DEPTH items ahead of the host */
    OK(side_slots_acquire(a->in, 0, a->h2d, &in));
    OK(side_copy_async(a->h2d, SIDE_COPY_H2D, in.data, source, a->bytes));
    OK(side_slots_publish(a->in, &in, a->h2d, NULL));
    OK(side_slots_take(a->in, in.key, a->compute, &in));
    OK(side_slots_acquire(a->out, 0, a->compute, &out));
    op_queue(a, out.data, in.data);
    OK(side_slots_release(a->in, &in, a->compute));
    OK(side_slots_publish(a->out, &out, a->compute, NULL));
    OK(side_slots_take(a->out, out.key, a->d2h, &out));
    OK(side_copy_async(a->d2h, SIDE_COPY_D2H, result, out.data, a->bytes));
    OK(side_slots_release(a->out, &out, a->d2h));
    OK(side_event_record(a->sent[i % DEPTH], a->d2h));
}

static void item_by_memory(struct alloc *a, enum kind kind, size_t i)
{
    const size_t k = i % DEPTH;
    char *source = (char *)a->source + i * a->bytes, *result = (char *)a->result + i * a->bytes;

    OK(side_event_wait(a->sent[k], 60));
    memory_put(a, kind, k);
    memory_get(a, kind, k);
    OK(side_copy_async(a->h2d, SIDE_COPY_H2D, a->data[k][0], source, a->bytes));
    OK(side_event_record(a->filled[k], a->h2d));
    OK(side_stream_wait(a->compute, a->filled[k]));
    op_queue(a, a->data[k][1], a->data[k][0]);
    OK(side_event_record(a->done[k], a->compute));
    OK(side_stream_wait(a->d2h, a->done[k]));
    OK(side_copy_async(a->d2h, SIDE_COPY_D2H, result, a->data[k][1], a->bytes));
    OK(side_event_record(a->sent[k], a->d2h));
}

static void check(const struct alloc *a, const char *kind)
{
    for (size_t i = 0; i < a->items * a->bytes / sizeof(float); i++) {
        const float two = 2.0f * a->source[i];
        if (a->result[i] != two + 1.0f)
            bench_wrong("%s: element %zu", kind, i);
    }
}

static void pass(struct alloc *a, enum kind kind, size_t repeat)
{
    double *us = a->us[kind] + repeat * a->items;

    memset(a->result, 0, a->items * a->bytes);
    const double begin = device_s(&a->b);
    double last = begin;
    for (size_t i = 0; i < a->items; i++) {
        if (kind == SLOTS)
            item_by_slots(a, i);
        else
            item_by_memory(a, kind, i);
        const double now = device_s(&a->b);
        us[i] = (now - last) * 1e6;
        last = now;
    }
    OK(side_stream_sync(a->d2h, 60));
    a->total_s[kind][repeat] = device_s(&a->b) - begin;
    for (size_t k = 0; kind != SLOTS && k < DEPTH; k++)
        memory_put(a, kind, k);
    OK(side_stream_sync(a->d2h, 60));
    check(a, kinds[kind]);
}

static bool kind_runs(const struct alloc *a, enum kind kind)
{
    return a->have_pool || (kind != POOL && kind != POOL_0);
}

static void pool_threshold(struct alloc *a, enum kind kind)
{
    uint64_t keep = kind == POOL ? UINT64_MAX : 0;

    if (kind == POOL || kind == POOL_0)
        driver_ok(a->driver.set_attribute(a->mempool, RELEASE_THRESHOLD, &keep), "cuMemPoolSetAttribute");
}

/* ---------------------------------------------------------------- all of one size */

static void size_begin(struct alloc *a)
{
    side_slots_options o = SIDE_SLOTS_OPTIONS_INIT;

    o.count = DEPTH;
    o.slot_bytes = a->bytes;
    OK(side_slots_create(a->b.device, &o, &a->in));
    OK(side_slots_create(a->b.device, &o, &a->out));
    for (int k = 0; k < KINDS; k++) {
        a->us[k] = host_block(a->b.repeats * a->items * sizeof(double));
        a->total_s[k] = host_block(a->b.repeats * sizeof(double));
    }
}

static void size_report(struct alloc *a, bool first)
{
    for (int k = 0; k < KINDS; k++) {
        if (!kind_runs(a, (enum kind)k))
            continue;
        const size_t n = a->b.repeats * a->items;
        const double median = quantile(a->us[k], n, 0.5), p99 = quantile(a->us[k], n, 0.99);
        const double mean = quantile(a->total_s[k], a->b.repeats, 0.5) / (double)a->items * 1e6;
        fprintf(a->b.json, "%s{\"bytes\": %zu", first && k == 0 ? "" : ", ", a->bytes);
        json_text(&a->b, "kind", kinds[k]);
        json_number(&a->b, "mean_us", mean);
        json_number(&a->b, "median_us", median);
        json_number(&a->b, "p99_us", p99);
        json_number(&a->b, "most_us", quantile(a->us[k], n, 1.0));
        json_samples(&a->b, "samples_total_s", a->total_s[k], a->b.repeats);
        fputc('}', a->b.json);
        printf("%8zu %-8s %10.1f %10.1f %10.1f %8.2f\n", a->bytes / 1024, kinds[k], mean, median, p99,
               mean / (quantile(a->total_s[SLOTS], a->b.repeats, 0.5) / (double)a->items * 1e6));
    }
}

static void size_end(struct alloc *a)
{
    OK(side_slots_destroy(a->in));
    OK(side_slots_destroy(a->out));
    for (int k = 0; k < KINDS; k++) {
        free(a->us[k]);
        free(a->total_s[k]);
    }
}

static void size_run(struct alloc *a, size_t bytes, bool first)
{
    a->bytes = bytes;
    size_begin(a);
    for (size_t r = 0; r < a->b.repeats + 1; r++) /* the first one warms up */
        for (int k = 0; k < KINDS; k++)
            if (kind_runs(a, (enum kind)k)) {
                pool_threshold(a, (enum kind)k);
                pass(a, (enum kind)k, r > 0 ? r - 1 : 0);
            }
    size_report(a, first);
    size_end(a);
}

int main(int argc, char **argv)
{
    static struct alloc a;
    static const size_t sizes[MOST_SIZES] = {256 * 1024, 4 * MIB, 16 * MIB};

    a.b = bench_begin("alloc", argc, argv, 5);
    a.items = bench_number(&a.b, "--items", 100);
    a.have_pool = !a.b.props.simulated && driver_load(&a.driver, a.b.props.ordinal) &&
                  a.driver.get_pool(&a.mempool, a.b.props.ordinal) == 0;
    OK(side_stream_create(a.b.device, &a.h2d));
    OK(side_stream_create(a.b.device, &a.compute));
    OK(side_stream_create(a.b.device, &a.d2h));
    for (int k = 0; k < DEPTH; k++) {
        OK(side_event_create(a.b.device, false, &a.filled[k]));
        OK(side_event_create(a.b.device, false, &a.done[k]));
        OK(side_event_create(a.b.device, false, &a.sent[k]));
    }
    size_t most = bench_number(&a.b, "--most-mib", 16) * MIB;
    a.source = pinned_block(&a.b, a.items * most);
    a.result = pinned_block(&a.b, a.items * most);
    random_floats(a.source, a.items * most / sizeof(float), 1);
    printf("us an item; %zu items, %d in flight%s\n", a.items, DEPTH, a.have_pool ? "" : "; no driver pool here");
    printf("%8s %-8s %10s %10s %10s %8s\n", "KiB", "", "mean", "median", "p99", "x slots");
    json_number(&a.b, "items", (double)a.items);
    fprintf(a.b.json, ", \"rows\": [");
    for (int i = 0; i < MOST_SIZES; i++)
        if (sizes[i] <= most)
            size_run(&a, sizes[i], i == 0);
    fputc(']', a.b.json);
    for (int k = 0; k < DEPTH; k++) {
        side_event_destroy(a.filled[k]);
        side_event_destroy(a.done[k]);
        side_event_destroy(a.sent[k]);
    }
    pinned_done(&a.b, a.source);
    pinned_done(&a.b, a.result);
    side_stream_destroy(a.h2d);
    side_stream_destroy(a.compute);
    side_stream_destroy(a.d2h);
    bench_end(&a.b);
    return 0;
}
