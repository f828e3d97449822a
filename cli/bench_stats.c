/* SPDX-License-Identifier: MIT
 * Medians, spreads, and the line through copies of several sizes. Pure. */
#include "bench.h"

#include <math.h>
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
