/* SPDX-License-Identifier: MIT
 *
 * What pinned memory costs, by each way to get it: fresh memory for every sample, all ways by turns, the host's clock. The software device registers for
 * nothing, so that there it is the touching of this host's pages that is seen. */
#include "bench.h"
#include "signals.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { WAYS = 6, PROBES = 8, PROBE_BYTES = 4096 };
#define MIB ((size_t)1 << 20)
#define GIB ((double)((size_t)1 << 30))

struct way {
    const char *name, *text;
    uint32_t threads, flags; /* of a pool */
    bool in_place, touched;  /* side_memory_pin on memory of ours */
};

static const struct way ways[WAYS] = {
    {"pool", "pool, default threads", 0, 0, false, false},
    {"pool-1-thread", "pool, one thread", 1, 0, false, false},
    {"pool-small-pages", "pool, no huge pages", 0, SIDE_POOL_NO_HUGE_PAGES, false, false},
    {"driver", "the driver's allocator", 0, SIDE_POOL_DRIVER, false, false},
    {"in-place-touched", "pinned in place, touched", 0, 0, true, true},
    {"in-place-untouched", "pinned in place, untouched", 0, 0, true, false},
};

struct pin_row {
    struct bench_samples pin, unpin; /* seconds a GiB */
    bool huge, registered;           /* of a pool */
    char refused[320];               /* why there are no samples */
};

struct pin {
    struct bench *bench;
    size_t bytes;
    side_stream *stream;
    void *device, *back; /* PROBES * PROBE_BYTES each; back is pinned */
    struct pin_row rows[WAYS];
};

/* ---------------------------------------------------------------- what was pinned is pinned, and copies reach it */

static char *probe_at(const struct pin *p, char *data, size_t i)
{
    return data + (p->bytes - PROBE_BYTES) / (PROBES - 1) / PROBE_BYTES * PROBE_BYTES * i;
}

static side_status verify(struct pin *p, char *data, const char *name)
{
    side_memory_kind first = SIDE_MEMORY_PAGEABLE, last = SIDE_MEMORY_PAGEABLE;
    side_status status = side_memory_get_kind(p->bench->device, data, &first);
    bool same = true;

    if (status == SIDE_OK)
        status = side_memory_get_kind(p->bench->device, data + p->bytes - 1, &last);
    memset(p->back, BENCH_POISON, (size_t)PROBES * PROBE_BYTES);
    for (size_t i = 0; i < PROBES && status == SIDE_OK; i++) {
        bench_fill(probe_at(p, data, i), PROBE_BYTES, i);
        status = side_copy_async(p->stream, SIDE_COPY_H2D, (char *)p->device + i * PROBE_BYTES, probe_at(p, data, i),
                                 PROBE_BYTES);
    }
    if (status == SIDE_OK)
        status = side_copy_async(p->stream, SIDE_COPY_D2H, p->back, p->device, (size_t)PROBES * PROBE_BYTES);
    if (status == SIDE_OK)
        status = bench_sync(p->bench, p->stream);
    if (status != SIDE_OK)
        return status;
    for (size_t i = 0; i < PROBES; i++)
        same = same && memcmp(probe_at(p, data, i), (char *)p->back + i * PROBE_BYTES, PROBE_BYTES) == 0;
    if (first != SIDE_MEMORY_PINNED || last != SIDE_MEMORY_PINNED || !same)
        bench_error(p->bench, EXIT_FAILED, "pin: %s: %s", name,
                    same ? "the memory is not pinned" : "copies gave other bytes than were there");
    return SIDE_OK;
}

/* ---------------------------------------------------------------- one sample */

/* The device may still use what is left behind: then nothing is given back. */
static side_status sample_pool(struct pin *p, const struct way *way, struct pin_row *row, double seconds[2])
{
    side_pool_options o = SIDE_POOL_OPTIONS_INIT;
    side_pool_stats stats;
    side_pool *pool;
    void *data;
    side_status status;
    double begin;

    o.budget_bytes = p->bytes;
    o.threads = way->threads;
    o.flags = way->flags;
    status = side_pool_create(p->bench->device, &o, &pool);
    if (status != SIDE_OK)
        return status;
    begin = clock_s();
    status = side_pool_alloc(pool, p->bytes, &data);
    seconds[0] = clock_s() - begin;
    if (status == SIDE_OK) {
        status = side_pool_get_stats(pool, &stats);
        row->huge = stats.huge_pages;
        row->registered = stats.registered;
        if (status == SIDE_OK)
            status = verify(p, data, way->name);
        if (p->bench->stuck)
            return status;
        side_pool_free(pool, data, NULL, 0);
    }
    begin = clock_s();
    side_pool_trim(pool);
    seconds[1] = clock_s() - begin;
    side_pool_destroy(pool);
    return status;
}

static side_status sample_in_place(struct pin *p, const struct way *way, double seconds[2])
{
    void *data = mmap(NULL, p->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    side_status status;
    double begin;

    if (data == MAP_FAILED)
        return SIDE_NO_MEMORY;
    for (size_t at = 0; way->touched && at < p->bytes; at += PROBE_BYTES)
        ((volatile char *)data)[at] = 1;
    begin = clock_s();
    status = side_memory_pin(p->bench->device, data, p->bytes);
    seconds[0] = clock_s() - begin;
    if (status == SIDE_OK) {
        status = verify(p, data, way->name);
        if (p->bench->stuck)
            return status;
        begin = clock_s();
        side_status undone = side_memory_unpin(p->bench->device, data);
        seconds[1] = clock_s() - begin;
        if (undone != SIDE_OK) /* the device may still reach these pages */
            return status == SIDE_OK ? undone : status;
    }
    munmap(data, p->bytes);
    return status;
}

/* A way that this machine refuses is a row that says so. */
static side_status sample(struct pin *p, size_t w, bool keep)
{
    struct pin_row *row = &p->rows[w];
    double seconds[2] = {0, 0};
    side_status status = bench_check(p->bench);

    if (status != SIDE_OK || row->refused[0] != '\0')
        return status;
    if (!bench_host_count(p->bench, p->bytes))
        return SIDE_OVER_BUDGET;
    status = ways[w].in_place ? sample_in_place(p, &ways[w], seconds) : sample_pool(p, &ways[w], row, seconds);
    if (!p->bench->stuck)
        bench_host_uncount(p->bench, p->bytes);
    if (status == SIDE_UNSUPPORTED || status == SIDE_NO_MEMORY || status == SIDE_OVER_BUDGET) {
        snprintf(row->refused, sizeof(row->refused), "%s", side_last_error()->message);
        return SIDE_OK;
    }
    if (status == SIDE_OK && keep) {
        bench_add(&row->pin, seconds[0] / ((double)p->bytes / GIB));
        bench_add(&row->unpin, seconds[1] / ((double)p->bytes / GIB));
    }
    return status;
}

/* ---------------------------------------------------------------- the suite */

static void report(struct pin *p)
{
    char size[32], range[40], back[16];
    json_t *rows = json_array();

    bench_print(p->bench, "\npin: seconds per GiB, %s at a time%s; median, least to most\n", bytes_text(p->bytes, size),
                p->bench->props.simulated ? ", by this host's clock" : "");
    bench_print(p->bench, "  %-28s %10s   %-20s %10s\n", "", "to pin", "", "give back");
    for (size_t w = 0; w < WAYS; w++) {
        struct pin_row *row = &p->rows[w];

        if (row->pin.count == 0) {
            bench_print(p->bench, "  %-28s refused: %s\n", ways[w].text, row->refused);
            json_array_append_new(rows, json_pack("{s:s, s:s}", "way", ways[w].name, "refused", row->refused));
            continue;
        }
        snprintf(range, sizeof(range), "%.3g to %.3g", bench_least(&row->pin), bench_most(&row->pin));
        snprintf(back, sizeof(back), "%.3g", bench_median(&row->unpin));
        bench_print(p->bench, "  %-28s %10.3g   %-20s %10s%s\n", ways[w].text, bench_median(&row->pin), range, back,
                    !ways[w].in_place && (ways[w].flags & SIDE_POOL_DRIVER) == 0 && !row->registered
                        ? "  (registering is refused: the driver's allocator)"
                        : "");
        json_array_append_new(rows, json_pack("{s:s, s:o, s:o, s:b, s:b}", "way", ways[w].name, "pin_s_per_gib",
                                              bench_samples_json(&row->pin), "unpin_s_per_gib",
                                              bench_samples_json(&row->unpin), "huge_pages", row->huge, "registered",
                                              ways[w].in_place || row->registered));
    }
    bench_json(p->bench, "pin", json_pack("{s:I, s:o}", "bytes", (json_int_t)p->bytes, "rows", rows));
}

static side_status measure(struct pin *p)
{
    struct bench *b = p->bench;
    const size_t most = b->args.samples > 0 ? b->samples : b->samples < 5 ? b->samples : 5;
    side_status status = side_stream_create(b->device, &p->stream);

    if (status == SIDE_OK)
        status = bench_device_take(b, (size_t)PROBES * PROBE_BYTES, &p->device);
    if (status == SIDE_OK)
        status = bench_pinned_take(b, (size_t)PROBES * PROBE_BYTES, &p->back);
    /* The first round warms up: some hosts give memory slowly the first time. */
    for (size_t round = 0; round <= most && status == SIDE_OK; round++)
        for (size_t w = 0; w < WAYS && status == SIDE_OK; w++)
            status = sample(p, w, round > 0);
    return status;
}

/* A power of two that fits half of the share, beside what the other suites keep. */
static size_t choose_bytes(const struct bench *b)
{
    size_t bytes = b->props.simulated ? 64 * MIB : b->args.quick ? 128 * MIB : 512 * MIB;

    while (bytes > MIB && bytes > bench_host_room(b) / 2)
        bytes /= 2;
    return bytes;
}

int bench_pin(struct bench *b)
{
    struct pin *p = calloc(1, sizeof(*p));
    side_status status;

    if (p == NULL)
        return bench_failed(b, SIDE_NO_MEMORY, "pin");
    p->bench = b;
    p->bytes = choose_bytes(b);
    status = measure(p);
    if (status == SIDE_OK) {
        report(p);
        if (p->rows[0].pin.count > 0)
            b->machine.pin_s_per_gib = bench_median(&p->rows[0].pin);
    }
    if (!b->stuck) {
        bench_device_free(b, p->device, (size_t)PROBES * PROBE_BYTES);
        bench_pinned_free(b, p->back, (size_t)PROBES * PROBE_BYTES);
        side_stream_destroy(p->stream);
        free(p);
    }
    return status == SIDE_OK ? EXIT_DONE : bench_failed(b, status, "pin");
}
