/* SPDX-License-Identifier: MIT
 *
 * How fast does the pool pin memory, against the driver's own cuMemHostAlloc? Both in the same run, taking turns; medians.
 *
 *     bench_pin [GiB, 4] [device, cuda]
 *
 * Exits 77 where there is no GPU. Uses the public API, and the driver by its own declarations. */
#include "sidestream.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ROUNDS = 5, SKIP = 77 };
#define GIB ((double)((size_t)1 << 30))

struct driver {
    int (*init)(unsigned flags);
    int (*retain)(void **context, int device);
    int (*set_current)(void *context);
    int (*host_alloc)(void **data, size_t bytes, unsigned flags);
    int (*host_free)(void *data);
};

struct times {
    double pin_s[ROUNDS], unpin_s[ROUNDS];
};

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(const double *values)
{
    double sorted[ROUNDS];
    memcpy(sorted, values, sizeof(sorted));
    qsort(sorted, ROUNDS, sizeof(sorted[0]), compare);
    return sorted[ROUNDS / 2];
}

static void fail(const char *what)
{
    fprintf(stderr, "bench_pin: %s: %s\n", what, side_last_error()->message);
    exit(1);
}

static bool load(struct driver *d, int ordinal)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *context;

    if (library == NULL)
        return false;
    *(void **)&d->init = dlsym(library, "cuInit");
    *(void **)&d->retain = dlsym(library, "cuDevicePrimaryCtxRetain");
    *(void **)&d->set_current = dlsym(library, "cuCtxSetCurrent");
    *(void **)&d->host_alloc = dlsym(library, "cuMemHostAlloc");
    *(void **)&d->host_free = dlsym(library, "cuMemFreeHost");
    return d->init != NULL && d->retain != NULL && d->set_current != NULL && d->host_alloc != NULL &&
           d->host_free != NULL && d->init(0) == 0 && d->retain(&context, ordinal) == 0 && d->set_current(context) == 0;
}

/* A fresh pool, default options. Its budget, a share of the machine, is raised where the block would not fit. */
static void pool_round(side_device *device, size_t bytes, double *pin_s, double *unpin_s, side_pool_stats *stats)
{
    side_pool_options options = SIDE_POOL_OPTIONS_INIT;
    side_pool *pool;
    void *data;

    if (side_pool_create(device, &options, &pool) != SIDE_OK || side_pool_get_stats(pool, stats) != SIDE_OK)
        fail("side_pool_create");
    if (stats->budget_bytes < bytes) {
        side_pool_destroy(pool);
        options.budget_bytes = bytes;
        if (side_pool_create(device, &options, &pool) != SIDE_OK)
            fail("side_pool_create");
    }
    double begin = now_s();
    if (side_pool_alloc(pool, bytes, &data) != SIDE_OK)
        fail("side_pool_alloc");
    *pin_s = now_s() - begin;
    side_pool_get_stats(pool, stats);
    side_pool_free(pool, data, NULL, 0);
    begin = now_s();
    if (side_pool_trim(pool) != bytes)
        fail("side_pool_trim");
    *unpin_s = now_s() - begin;
    side_pool_destroy(pool);
}

static void driver_round(const struct driver *driver, size_t bytes, double *pin_s, double *unpin_s)
{
    void *data = NULL;
    double begin = now_s();
    int code = driver->host_alloc(&data, bytes, 0);

    *pin_s = now_s() - begin;
    if (code != 0) {
        fprintf(stderr, "bench_pin: cuMemHostAlloc: error %d\n", code);
        exit(1);
    }
    begin = now_s();
    driver->host_free(data);
    *unpin_s = now_s() - begin;
}

static void row(const char *name, double gib, const struct times *t)
{
    double slowest = 0, fastest = t->pin_s[0];

    for (int i = 0; i < ROUNDS; i++) {
        slowest = t->pin_s[i] > slowest ? t->pin_s[i] : slowest;
        fastest = t->pin_s[i] < fastest ? t->pin_s[i] : fastest;
    }
    printf("%-16s %8.1f  (%.1f to %.1f) %14.1f\n", name, gib / median(t->pin_s), gib / slowest, gib / fastest,
           gib / median(t->unpin_s));
}

int main(int argc, char **argv)
{
    double gib = argc > 1 ? atof(argv[1]) : 4;
    size_t bytes = (size_t)(gib * GIB) / 4096 * 4096;
    struct driver driver;
    struct times pool, peer;
    side_device_props props;
    side_pool_stats stats = {0};
    side_device *device;

    if (bytes == 0) {
        fprintf(stderr, "usage: bench_pin [GiB] [device]\n");
        return 2;
    }
    if (side_device_open(argc > 2 ? argv[2] : "cuda", &device) != SIDE_OK) {
        fprintf(stderr, "bench_pin: skipped, no GPU: %s\n", side_last_error()->message);
        return SKIP;
    }
    if (side_device_get_props(device, &props) != SIDE_OK)
        fail("side_device_get_props");
    if (props.simulated || !load(&driver, props.ordinal)) {
        fprintf(stderr, "bench_pin: skipped, %s has no CUDA driver\n", props.name);
        return SKIP;
    }
    for (int i = 0; i < ROUNDS; i++) {
        pool_round(device, bytes, &pool.pin_s[i], &pool.unpin_s[i], &stats);
        driver_round(&driver, bytes, &peer.pin_s[i], &peer.unpin_s[i]);
    }
    printf("%s: pinning %.3g GiB, medians of %d, GiB/s\n\n", props.name, gib, ROUNDS);
    printf("%-16s %8s  %-14s %12s\n", "", "pin", "(range)", "unpin");
    row("side_pool", gib, &pool);
    row("cuMemHostAlloc", gib, &peer);
    printf("\n{\"bench\": \"pin\", \"device\": \"%s\", \"bytes\": %zu, \"rounds\": %d, \"simulated\": false, "
           "\"pool_gib_s\": %.2f, \"driver_gib_s\": %.2f, \"ratio\": %.2f, \"pool_unpin_gib_s\": %.2f, "
           "\"driver_unpin_gib_s\": %.2f, "
           "\"huge_pages\": %s, \"registered\": %s}\n",
           props.name, bytes, ROUNDS, gib / median(pool.pin_s), gib / median(peer.pin_s),
           median(peer.pin_s) / median(pool.pin_s), gib / median(pool.unpin_s), gib / median(peer.unpin_s),
           stats.huge_pages ? "true" : "false", stats.registered ? "true" : "false");
    side_device_close(device);
    return 0;
}
