/* SPDX-License-Identifier: MIT
 *
 * What the examples share: their one option, and how they tell a failure. */
#ifndef EXAMPLE_H
#define EXAMPLE_H

#include <sidestream.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* "--device SPEC", by default "auto": the first GPU, else the software device. */
static inline const char *example_device(int argc, char **argv)
{
    if (argc == 1)
        return "auto";
    if (argc == 3 && strcmp(argv[1], "--device") == 0)
        return argv[2];
    fprintf(stderr, "usage: %s [--device SPEC]\n", argv[0]);
    exit(2);
}

/* The exit code for `status`; says on stderr what failed and why. */
static inline int example_end(const char *name, side_status status)
{
    const side_error *e = side_last_error();

    if (status == SIDE_OK)
        return 0;
    if (e->status == status)
        fprintf(stderr, "%s: %s: %s\n", name, e->where, e->message);
    else
        fprintf(stderr, "%s: %s\n", name, side_status_text(status));
    return 1;
}

/* Queues out[i] = scale * in[i] + bias over `bytes` of float32. Stands for your own kernel, which is launched the same way:
 *     my_kernel<<<grid, block, 0, (cudaStream_t)side_stream_native(stream)>>>(...); */
static inline side_status example_kernel(side_stream *stream, const void *in, void *out, size_t bytes, float scale,
                                         float bias)
{
    side_op op = SIDE_OP_INIT;

    op.id = SIDE_OP_AFFINE;
    op.in[0] = in;
    op.out = out;
    op.dim[0] = bytes / sizeof(float);
    op.scale = scale;
    op.bias = bias;
    return side_op_async(stream, &op);
}

#endif
