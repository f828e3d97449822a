/* SPDX-License-Identifier: MIT
 *
 * One suite, every device: what the callers' header promises, through the public API alone. A test takes its device from t_arg(); where there is
 * no GPU the "cuda" runs are skipped with the reason.
 *
 *     T_TEST(streams_keep_order)
 *     {
 *         struct rig r = rig_open();
 *         ...
 *         rig_close(&r);
 *     }
 *     T_MAIN(EVERY(streams_keep_order), EVERY_LONG(ring, 60))
 */
#ifndef CONFORM_H
#define CONFORM_H

#include "t.h"

#include <time.h>

/* clang-format off */
#if T_TSAN /* the threads are the same on every software device, and slow */
#define EVERY(name) T_ARG(name, "sim"), T_ARG(name, "cuda")
#define EVERY_LONG(name, seconds) T_LONG_ARG(name, seconds, "sim"), T_LONG_ARG(name, seconds, "cuda")
#else
#define EVERY(name) T_ARG(name, "sim"), T_ARG(name, "sim:one-copy-engine"), T_ARG(name, "sim:gh200"), T_ARG(name, "cuda")
#define EVERY_LONG(name, seconds)                                                                                \
    T_LONG_ARG(name, seconds, "sim"), T_LONG_ARG(name, seconds, "sim:one-copy-engine"),                          \
    T_LONG_ARG(name, seconds, "sim:gh200"), T_LONG_ARG(name, seconds, "cuda")
#endif
/* clang-format on */

#define KIB         ((size_t)1 << 10)
#define MIB         ((size_t)1 << 20)
#define MS          UINT64_C(1000000) /* ns */
#define LONG_WAIT_S 20.0              /* more than any test's work takes */

struct rig {
    side_device *device;
    side_stream *stream;
    side_device_props props;
    bool gpu;
};

static inline side_device *device_open_or_skip(const char *spec)
{
    side_device *device = NULL;

    if (strncmp(spec, "cuda", 4) == 0) {
        char specs[32][64], why[256] = "";
        size_t count = 32;
        T_OK(side_device_list(specs, &count, why, sizeof(why)));
        if (count == 0 || strncmp(specs[0], "cuda", 4) != 0)
            T_SKIP("no GPU: %s", why);
    }
    T_OK(side_device_open(spec, &device));
    return device;
}

static inline struct rig rig_open(void)
{
    struct rig r = {0};

    r.device = device_open_or_skip(t_arg());
    T_OK(side_device_get_props(r.device, &r.props));
    T_OK(side_stream_create(r.device, &r.stream));
    r.gpu = !r.props.simulated;
    return r;
}

static inline void rig_close(struct rig *r)
{
    T_OK(side_stream_sync(r->stream, LONG_WAIT_S));
    side_stream_destroy(r->stream);
    side_device_close(r->device);
}

static inline side_stream *stream_make(side_device *device)
{
    side_stream *s = NULL;

    T_OK(side_stream_create(device, &s));
    return s;
}

static inline side_event *event_make(side_device *device, bool timing)
{
    side_event *e = NULL;

    T_OK(side_event_create(device, timing, &e));
    return e;
}

static inline void *device_make(side_device *device, size_t bytes)
{
    void *p = NULL;

    T_OK(side_device_alloc(device, bytes, &p));
    return p;
}

/* From the device's own pool. */
static inline void *pinned_make(side_device *device, size_t bytes)
{
    side_pool *pool = NULL;
    void *p = NULL;

    T_OK(side_device_pool(device, &pool));
    T_OK(side_pool_alloc(pool, bytes, &p));
    return p;
}

/* All work on it is done. */
static inline void pinned_free(side_device *device, void *data)
{
    side_pool *pool = NULL;

    T_OK(side_device_pool(device, &pool));
    T_OK(side_pool_free(pool, data, NULL, 0));
}

static inline void *host_make(size_t bytes)
{
    void *p = malloc(bytes);

    if (p == NULL)
        T_FAIL("malloc of %zu bytes", bytes);
    return p;
}

/* Random bytes; fast also for tens of MiB. */
static inline void fill(void *data, size_t bytes, uint64_t seed)
{
    t_rng rng = t_rng_make(seed);

    t_rng_fill(&rng, data, bytes);
}

/* Floats in [-1, 1), in steps of 2^-20: scaled by a power of two and shifted by one they stay exact. */
static inline void fill_floats(float *data, size_t count, uint64_t seed)
{
    t_rng rng = t_rng_make(seed);

    for (size_t i = 0; i < count; i++)
        data[i] = (float)((int32_t)(t_rng_next(&rng) & 0x1fffff) - 0x100000) / 1048576.0f;
}

static inline void check_equal(const void *got, const void *expected, size_t bytes, const char *what)
{
    const unsigned char *a = got, *b = expected;

    if (memcmp(a, b, bytes) == 0)
        return;
    for (size_t i = 0; i < bytes; i++)
        if (a[i] != b[i])
            T_FAIL("%s: byte %zu of %zu is %02x, not %02x", what, i, bytes, a[i], b[i]);
}

static inline void sync_stream(side_stream *stream)
{
    T_OK(side_stream_sync(stream, LONG_WAIT_S));
}

static inline void spin_async(side_stream *stream, uint64_t ns)
{
    side_op op = SIDE_OP_INIT;

    op.id = SIDE_OP_SPIN;
    op.dim[0] = ns;
    T_OK(side_op_async(stream, &op));
}

/* out = scale * in + bias */
static inline side_op affine_op(void *out, const void *in, size_t bytes, float scale, float bias)
{
    side_op op = SIDE_OP_INIT;

    op.id = SIDE_OP_AFFINE;
    op.in[0] = in;
    op.out = out;
    op.dim[0] = bytes / sizeof(float);
    op.scale = scale;
    op.bias = bias;
    return op;
}

static inline void affine_async(side_stream *stream, void *out, const void *in, size_t bytes, float scale, float bias)
{
    side_op op = affine_op(out, in, bytes, scale, bias);

    T_OK(side_op_async(stream, &op));
}

/* Real time, whatever the device's clock. */
static inline double wall_s(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

static inline void sleep_ms(long ms)
{
    struct timespec ts = {ms / 1000, ms % 1000 * 1000000};

    nanosleep(&ts, NULL);
}

#endif
