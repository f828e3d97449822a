/* SPDX-License-Identifier: MIT
 *
 * What the benchmarks share. Each is one program on the public API: it prints a short table and appends one line of JSON with everything,
 * raw samples included, to the file named by --out. Where there is no GPU it says why and exits 77; --device sim runs the model instead and
 * says "simulated".
 *
 *     --out FILE   --device SPEC   --repeats N   --commit TEXT   --date TEXT   and what each program names itself
 */
#ifndef BENCH_H
#define BENCH_H

#include "sidestream.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MIB ((size_t)1 << 20)
enum { BENCH_SKIP = 77 };

struct bench {
    const char *name;
    int argc;
    char **argv;
    side_device *device;
    side_device_props props;
    FILE *json;
    size_t repeats;
};

static inline _Noreturn void bench_die(const char *what)
{
    fprintf(stderr, "%s: %s: %s\n", what, side_status_name(side_last_error()->status), side_last_error()->message);
    exit(1);
}

static inline void bench_ok(side_status status, const char *what)
{
    if (status != SIDE_OK)
        bench_die(what);
}
#define OK(expr) bench_ok((expr), #expr)

static inline _Noreturn void bench_wrong(const char *format, ...) __attribute__((format(printf, 1, 2)));
static inline _Noreturn void bench_wrong(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    fprintf(stderr, "wrong results: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    exit(1);
}

/* ---------------------------------------------------------------- arguments */

static inline const char *bench_text(const struct bench *b, const char *key, const char *otherwise)
{
    for (int i = 1; i + 1 < b->argc; i++)
        if (strcmp(b->argv[i], key) == 0)
            return b->argv[i + 1];
    return otherwise;
}

static inline size_t bench_number(const struct bench *b, const char *key, size_t otherwise)
{
    const char *text = bench_text(b, key, NULL);

    return text != NULL ? (size_t)strtoull(text, NULL, 10) : otherwise;
}

/* ---------------------------------------------------------------- JSON */

static inline void json_text(struct bench *b, const char *key, const char *value)
{
    fprintf(b->json, ", \"%s\": \"", key);
    for (; *value != '\0'; value++)
        if ((unsigned char)*value >= ' ' && *value != '"' && *value != '\\')
            fputc(*value, b->json);
    fputc('"', b->json);
}

static inline void json_number(struct bench *b, const char *key, double value)
{
    fprintf(b->json, ", \"%s\": %.9g", key, value);
}

static inline void json_samples(struct bench *b, const char *key, const double *values, size_t count)
{
    fprintf(b->json, ", \"%s\": [", key);
    for (size_t i = 0; i < count; i++)
        fprintf(b->json, "%s%.6g", i > 0 ? ", " : "", values[i]);
    fputc(']', b->json);
}

/* ---------------------------------------------------------------- begin and end */

static inline struct bench bench_begin(const char *name, int argc, char **argv, size_t repeats)
{
    struct bench b = {.name = name, .argc = argc, .argv = argv};
    char specs[32][64], why[256] = "";
    size_t count = 32;
    const char *spec = bench_text(&b, "--device", "cuda"), *out = bench_text(&b, "--out", "/dev/null");

    b.repeats = bench_number(&b, "--repeats", repeats);
    if (b.repeats < 1 || b.repeats > 10000) {
        fprintf(stderr, "bench_%s: --repeats takes 1 to 10000\n", name);
        exit(2);
    }
    OK(side_device_list(specs, &count, why, sizeof(why)));
    if (strncmp(spec, "cuda", 4) == 0 && (count == 0 || strncmp(specs[0], "cuda", 4) != 0)) {
        printf("bench_%s: skipped, no GPU: %s\n", name, why);
        exit(BENCH_SKIP);
    }
    OK(side_device_open(spec, &b.device));
    OK(side_device_get_props(b.device, &b.props));
    if (!b.props.kernels) {
        printf("bench_%s: skipped, no kernels: %s\n", name, b.props.kernels_from);
        exit(BENCH_SKIP);
    }
    b.json = fopen(out, "a");
    if (b.json == NULL) {
        fprintf(stderr, "bench_%s: cannot write %s\n", name, out);
        exit(2);
    }
    fprintf(b.json, "{\"bench\": \"%s\"", name);
    json_text(&b, "version", side_version());
    json_text(&b, "commit", bench_text(&b, "--commit", ""));
    json_text(&b, "date", bench_text(&b, "--date", ""));
    json_text(&b, "device", b.props.spec);
    json_text(&b, "device_name", b.props.name);
    json_text(&b, "kernels", b.props.kernels_from);
    fprintf(b.json, ", \"simulated\": %s", b.props.simulated ? "true" : "false");
    json_number(&b, "driver", b.props.driver_version);
    json_number(&b, "repeats", (double)b.repeats);
    printf("%s on %s%s\n", name, b.props.name, b.props.simulated ? " (simulated: times are of a model)" : "");
    return b;
}

static inline void bench_end(struct bench *b)
{
    fprintf(b->json, "}\n");
    if (fclose(b->json) != 0) {
        fprintf(stderr, "bench_%s: the result was not written\n", b->name);
        exit(1);
    }
    side_device_close(b->device);
}

/* ---------------------------------------------------------------- clocks and numbers */

/* The device's: virtual on software devices. */
static inline double device_s(const struct bench *b)
{
    return (double)side_device_now_ns(b->device) * 1e-9;
}

/* The host's own. */
static inline double host_s(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static inline int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* share 0.5: the median. */
static inline double quantile(const double *values, size_t count, double share)
{
    double *sorted, value;

    if (count == 0 || count > ((size_t)1 << 30))
        return 0;
    sorted = malloc(count * sizeof(*sorted));
    if (sorted == NULL)
        return 0;
    memcpy(sorted, values, count * sizeof(*sorted));
    qsort(sorted, count, sizeof(*sorted), compare_doubles);
    size_t at = (size_t)(share * (double)count);
    value = sorted[at < count ? at : count - 1];
    free(sorted);
    return value;
}

static inline void *host_block(size_t bytes)
{
    void *p = malloc(bytes);

    if (p == NULL) {
        fprintf(stderr, "no memory for %zu bytes\n", bytes);
        exit(1);
    }
    return p;
}

static inline void *pinned_block(struct bench *b, size_t bytes)
{
    side_pool *pool;
    void *p;

    OK(side_device_pool(b->device, &pool));
    OK(side_pool_alloc(pool, bytes, &p));
    return p;
}

static inline void pinned_done(struct bench *b, void *data)
{
    side_pool *pool;

    OK(side_device_pool(b->device, &pool));
    OK(side_pool_free(pool, data, NULL, 0));
}

/* xorshift64*: bytes that do not compress; `bytes` a multiple of 8. */
static inline void random_fill(void *data, size_t bytes, uint64_t seed)
{
    uint64_t *p = data, x = seed * 0x9e3779b97f4a7c15u + 1;

    for (size_t i = 0; i < bytes / 8; i++) {
        x ^= x >> 12;
        x ^= x << 25;
        x ^= x >> 27;
        p[i] = x * 0x2545f4914f6cdd1du;
    }
}

/* Floats in [-1, 1). */
static inline void random_floats(float *data, size_t count, uint64_t seed)
{
    uint64_t x = seed * 0x9e3779b97f4a7c15u + 1;

    for (size_t i = 0; i < count; i++) {
        x ^= x >> 12;
        x ^= x << 25;
        x ^= x >> 27;
        data[i] = (float)(int32_t)(x >> 32) * 0x1p-31f;
    }
}

#endif
