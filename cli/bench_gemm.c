/* SPDX-License-Identifier: MIT */
#include "bench_gemm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LEAST_DIM = 1024, SIM_DIM = 32, TIMED = 8, WARM = 3 };
#define CHUNK ((size_t)1 << 20)

static size_t matrix_bytes(const struct bench_gemm *g)
{
    return (size_t)g->dim * g->dim * side_type_bytes(SIDE_BF16);
}

/* Numbers from 0.5 to 2 of either sign: products of zeros would draw less power, and so run at a higher clock than real ones. */
static side_status fill(struct bench_gemm *g, side_stream *stream)
{
    size_t bytes = matrix_bytes(g), chunk = bytes < CHUNK ? bytes : CHUNK;
    uint16_t *host = malloc(chunk);
    side_status status = host != NULL ? SIDE_OK : SIDE_NO_MEMORY;

    if (host == NULL)
        return status;
    bench_fill(host, chunk, 77);
    for (size_t i = 0; i < chunk / 2; i++)
        host[i] = (uint16_t)((host[i] & 0x80FFu) | 0x3F00u);
    for (int k = 0; k < 2; k++)
        for (size_t at = 0; at < bytes && status == SIDE_OK; at += chunk)
            status = side_copy_async(stream, SIDE_COPY_H2D, (char *)g->in[k] + at, host,
                                     bytes - at < chunk ? bytes - at : chunk);
    if (status == SIDE_OK)
        status = bench_sync(g->bench, stream);
    if (!g->bench->stuck)
        free(host);
    return status;
}

static side_status queue_timed(void *user, side_stream *stream)
{
    return bench_gemm_queue(user, stream, TIMED);
}

static side_status queue_warm(void *user, side_stream *stream)
{
    return bench_gemm_queue(user, stream, WARM);
}

side_status bench_gemm_time(struct bench_gemm *g)
{
    struct bench_lane lane = {.lead = queue_warm, .queue = queue_timed, .user = g};
    side_status status = side_stream_create(g->bench->device, &lane.stream);

    if (status == SIDE_OK)
        status = bench_time(g->bench, &lane, 1);
    if (status == SIDE_OK)
        g->seconds = (lane.end_s - lane.begin_s) / TIMED;
    if (!g->bench->stuck)
        side_stream_destroy(lane.stream);
    return status;
}

static side_status take(struct bench_gemm *g)
{
    side_status status = SIDE_OK;

    for (int k = 0; k < 2 && status == SIDE_OK; k++)
        status = bench_device_take(g->bench, matrix_bytes(g), &g->in[k]);
    return status == SIDE_OK ? bench_device_take(g->bench, matrix_bytes(g), &g->out) : status;
}

static void prepare_op(struct bench_gemm *g, double sim_s)
{
    g->op = (side_op)SIDE_OP_INIT;
    g->op.id = SIDE_OP_MATMUL;
    g->op.in[0] = g->in[0];
    g->op.in[1] = g->in[1];
    g->op.out = g->out;
    g->op.dim[0] = g->op.dim[1] = g->op.dim[2] = g->dim;
    g->op.type[0] = g->op.type[1] = SIDE_BF16;
    g->op.math = SIDE_MATH_BF16;
    g->op.sim_ns = (uint64_t)(sim_s * 1e9);
}

/* The first product loads libraries, and shows whether there are any. */
static side_status first(struct bench_gemm *g)
{
    side_stream *stream;
    side_status status = side_stream_create(g->bench->device, &stream);

    if (status != SIDE_OK)
        return status;
    status = fill(g, stream);
    if (status == SIDE_OK) {
        status = bench_gemm_queue(g, stream, 1);
        if (status == SIDE_UNSUPPORTED || status == SIDE_NO_LIBRARY) {
            snprintf(g->why, sizeof(g->why), "%s", side_last_error()->message);
            status = SIDE_OK;
        } else if (status == SIDE_OK) {
            status = bench_sync(g->bench, stream);
        }
    }
    if (!g->bench->stuck)
        side_stream_destroy(stream);
    return status;
}

side_status bench_gemm_make(struct bench *b, uint64_t most_dim, double sim_s, struct bench_gemm *g)
{
    side_status status;

    memset(g, 0, sizeof(*g));
    g->bench = b;
    if (!b->props.kernels) {
        snprintf(g->why, sizeof(g->why), "%s", b->props.kernels_from);
        return SIDE_OK;
    }
    g->dim = b->props.simulated ? SIM_DIM : most_dim;
    while (g->dim > LEAST_DIM && 3 * matrix_bytes(g) > bench_device_room(b))
        g->dim /= 2;
    status = take(g);
    prepare_op(g, sim_s);
    if (status == SIDE_OK)
        status = first(g);
    if (status == SIDE_OK && g->why[0] == '\0')
        status = bench_gemm_time(g);
    if (status == SIDE_OK && g->why[0] != '\0')
        bench_gemm_free(g);
    return status;
}

void bench_gemm_free(struct bench_gemm *g)
{
    if (g->bench == NULL || g->bench->stuck)
        return;
    for (int k = 0; k < 2; k++)
        bench_device_free(g->bench, g->in[k], matrix_bytes(g));
    bench_device_free(g->bench, g->out, matrix_bytes(g));
    g->in[0] = g->in[1] = g->out = NULL;
    g->dim = 0;
}

side_status bench_gemm_queue(const struct bench_gemm *g, side_stream *stream, size_t times)
{
    side_status status = SIDE_OK;

    for (size_t i = 0; i < times && status == SIDE_OK; i++)
        status = side_op_async(stream, &g->op);
    return status;
}
