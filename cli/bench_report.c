/* SPDX-License-Identifier: MIT
 * Samples and what is said of them. */
#include "bench.h"
#include "progress.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>

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
                     "s:{s:i, s:I, s:I, s:I, s:I}, s:s?, s:o, s:o}",
                     "device", b->props.spec, "name", b->props.name, "simulated", b->props.simulated, "uuid",
                     b->props.uuid, "version", side_version(), "driver_version", b->props.driver_version, "link",
                     "kind", l->kind, "generation", l->generation, "width", l->width, "max_generation",
                     l->max_generation, "max_width", l->max_width, "peak_gbps", json_number(l->peak_gbps), "quick",
                     b->args.quick, "samples", (int)b->samples, "clock", b->props.kernels ? "device" : "host",
                     "held_too_short", (int)b->too_short, "memory", "share_percent", (int)b->args.share,
                     "host_limit_bytes", (json_int_t)b->host_limit, "host_peak_bytes", (json_int_t)b->host_peak,
                     "device_limit_bytes", (json_int_t)b->device_limit, "device_peak_bytes", (json_int_t)b->device_peak,
                     "saved", b->saved ? b->save_path : NULL, "suites", suites, "errors", errors);
}
