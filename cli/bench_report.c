/* SPDX-License-Identifier: MIT
 * Samples and what is said of them. */
#include "bench.h"
#include "progress.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void bench_add(struct bench_samples *s, double value)
{
    if (s->count < BENCH_SAMPLES)
        s->value[s->count++] = value;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

/* The samples stay in the order in which they were taken. */
static size_t sorted(const struct bench_samples *s, double values[BENCH_SAMPLES])
{
    memcpy(values, s->value, s->count * sizeof(values[0]));
    qsort(values, s->count, sizeof(values[0]), by_value);
    return s->count;
}

double bench_median(const struct bench_samples *s)
{
    double v[BENCH_SAMPLES];
    size_t n = sorted(s, v);

    if (n == 0)
        return NAN;
    return n % 2 == 1 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

double bench_least(const struct bench_samples *s)
{
    double v[BENCH_SAMPLES];

    return sorted(s, v) > 0 ? v[0] : NAN;
}

double bench_most(const struct bench_samples *s)
{
    double v[BENCH_SAMPLES];
    size_t n = sorted(s, v);

    return n > 0 ? v[n - 1] : NAN;
}

double bench_spread(const struct bench_samples *s)
{
    return s->count > 1 ? (bench_most(s) - bench_least(s)) / bench_median(s) : 0;
}

json_t *bench_samples_json(const struct bench_samples *s)
{
    json_t *list = json_array();

    for (size_t i = 0; i < s->count; i++)
        json_array_append_new(list, json_number(s->value[i]));
    return json_pack("{s:o, s:o, s:o, s:o}", "median", json_number(bench_median(s)), "least",
                     json_number(bench_least(s)), "most", json_number(bench_most(s)), "samples", list);
}

const char *bench_gbps_text(double gbps, char text[16])
{
    if (!isfinite(gbps) || gbps < 0)
        snprintf(text, 16, "-");
    else
        snprintf(text, 16, "%.*f", gbps >= 99.95 ? 0 : gbps >= 9.995 ? 1 : gbps >= 0.9995 ? 2 : 3, gbps);
    return text;
}

const char *bench_seconds_text(double seconds, char text[16])
{
    static const char *const units[] = {"s", "ms", "us", "ns"};
    size_t unit = 0;
    bool none;

    if (!isfinite(seconds)) {
        snprintf(text, 16, "-");
        return text;
    }
    none = fabs(seconds) < 5e-12; /* what subtraction leaves of nothing */
    while (unit < 3 && fabs(seconds) < 0.9995) {
        seconds *= 1000;
        unit++;
    }
    if (none)
        snprintf(text, 16, "0");
    else
        snprintf(text, 16, "%.*f %s",
                 fabs(seconds) >= 99.95   ? 0
                 : fabs(seconds) >= 9.995 ? 1
                                          : 2,
                 seconds, units[unit]);
    return text;
}

void bench_print(const struct bench *b, const char *format, ...)
{
    va_list args;

    if (b->args.common.json)
        return;
    progress_clear();
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
}

void bench_json(struct bench *b, const char *suite, json_t *object)
{
    if (b->suites != NULL)
        json_object_set_new(b->suites, suite, object);
    else
        json_decref(object);
}

void bench_error(struct bench *b, int code, const char *format, ...)
{
    char text[256];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    say("%s", text);
    if (b->errors != NULL)
        json_array_append_new(b->errors, json_string(text));
    if (b->code == EXIT_DONE || code == EXIT_FAILED)
        b->code = code;
}

json_t *bench_root(struct bench *b)
{
    const side_link *l = &b->link;
    json_t *suites = b->suites, *errors = b->errors;

    b->suites = b->errors = NULL;
    return json_pack("{s:s, s:s, s:b, s:s, s:s, s:i, s:{s:s, s:i, s:i, s:i, s:i, s:o}, s:b, s:i, s:s, s:i, "
                     "s:{s:i, s:I, s:I, s:I, s:I}, s:o, s:o}",
                     "device", b->props.spec, "name", b->props.name, "simulated", b->props.simulated, "uuid",
                     b->props.uuid, "version", side_version(), "driver_version", b->props.driver_version, "link",
                     "kind", l->kind, "generation", l->generation, "width", l->width, "max_generation",
                     l->max_generation, "max_width", l->max_width, "peak_gbps", json_number(l->peak_gbps), "quick",
                     b->args.quick, "samples", (int)b->samples, "clock", b->props.kernels ? "device" : "host",
                     "held_too_short", (int)b->too_short, "memory", "share_percent", (int)b->args.share,
                     "host_limit_bytes", (json_int_t)b->host_limit, "host_peak_bytes", (json_int_t)b->host_peak,
                     "device_limit_bytes", (json_int_t)b->device_limit, "device_peak_bytes", (json_int_t)b->device_peak,
                     "suites", suites, "errors", errors);
}

/* Least squares of relative errors, that is with weights 1/t^2; a point that is off by more than three times the median error then counts less and less (Huber).
 * A negative latency means that there is none to be seen. */
static bool solve(const double *x, const double *t, const double *weight, size_t n, double *latency, double *per_byte)
{
    double w = 0, wx = 0, wt = 0, wxx = 0, wxt = 0, det;

    for (size_t i = 0; i < n; i++) {
        double k = weight[i] / (t[i] * t[i]);

        w += k;
        wx += k * x[i];
        wt += k * t[i];
        wxx += k * x[i] * x[i];
        wxt += k * x[i] * t[i];
    }
    det = w * wxx - wx * wx;
    if (!(det > 0))
        return false;
    *per_byte = (w * wxt - wx * wt) / det;
    *latency = (wt - *per_byte * wx) / w;
    if (*latency < 0) {
        *latency = 0;
        *per_byte = wxt / wxx;
    }
    return *per_byte > 0;
}

enum { FIT_POINTS = 64, FIT_ROUNDS = 20 };

static double off(double x, double t, double latency, double per_byte)
{
    return fabs(latency + per_byte * x - t) / t;
}

bool bench_fit(const double *bytes, const double *seconds, size_t count, side_rate *rate)
{
    double weight[FIT_POINTS], latency = 0, per_byte = 0;

    if (count < 2 || count > FIT_POINTS)
        return false;
    for (size_t i = 0; i < count; i++)
        weight[i] = 1;
    for (int round = 0; round < FIT_ROUNDS; round++) {
        struct bench_samples errors = {.count = 0};
        double most;

        if (!solve(bytes, seconds, weight, count, &latency, &per_byte))
            return false;
        for (size_t i = 0; i < count; i++)
            bench_add(&errors, off(bytes[i], seconds[i], latency, per_byte));
        most = 3 * bench_median(&errors) + 1e-9;
        for (size_t i = 0; i < count; i++) {
            double error = off(bytes[i], seconds[i], latency, per_byte);

            weight[i] = error > most ? most / error : 1;
        }
    }
    rate->latency_s = latency;
    rate->gbps = 1 / per_byte / 1e9;
    return true;
}
