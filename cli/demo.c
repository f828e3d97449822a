/* SPDX-License-Identifier: MIT
 * sidestream demo: the exercise of the textbooks, and whether it overlaps. */
#include "demo.h"
#include "signals.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { KEY_ITEMS = 256, KEY_DIM, KEY_MATH, KEY_DEPTH, KEY_STREAMS, KEY_RESULTS, KEY_REPEATS, KEY_SVG, KEY_TRACE };

static const struct argp_option options[] = {
    {"items", KEY_ITEMS, "N", 0, "Matrices: 1 to 10000 (10)", 1},
    {"dim", KEY_DIM, "N", 0, "Each is N x N: a multiple of 16 up to 65536 (4096; 1024 on sim, where a CPU multiplies)",
     1},
    {"math", KEY_MATH, "KIND", 0, "fp32 (default), tf32, or bf16, which also halves the bytes", 1},
    {"depth", KEY_DEPTH, "LIST", 0, "Device buffers of the sidestream rows, 1 to 64 each (2,3,4)", 1},
    {"streams", KEY_STREAMS, "LIST", 0, "Also try these numbers of compute streams, 1 to 16 each, at the first depth", 1},
    {"results", KEY_RESULTS, NULL, 0, "Copy the results back to the host as well", 1},
    {"repeats", KEY_REPEATS, "N", 0, "Timed runs of each schedule, 1 to 100; the median counts (5; always 1 on sim)", 1},
    {"svg", KEY_SVG, "FILE", 0, "Draw both textbooks and sidestream", 2},
    {"trace", KEY_TRACE, "FILE", 0, "Write the sidestream run for Perfetto or chrome://tracing", 2},
    {0},
};

static void want_count(struct argp_state *state, const char *name, const char *text, uint64_t most, uint64_t *value)
{
    char why[PARSE_WHY];

    if (!parse_count(text, 1, most, value, why))
        argp_error(state, "--%s: %s", name, why);
}

static void want_list(struct argp_state *state, const char *name, const char *text, uint64_t most, uint32_t *list,
                      size_t *count)
{
    char why[PARSE_WHY];

    if (!parse_list(text, 1, most, list, count, why))
        argp_error(state, "--%s: %s", name, why);
}

static void want_math(struct argp_state *state, const char *text, side_math *math)
{
    static const char *const names[] = {"fp32", "tf32", "bf16"};

    for (size_t i = 0; i < 3; i++) {
        if (strcmp(text, names[i]) == 0) {
            *math = (side_math)i;
            return;
        }
    }
    argp_error(state, "--math: '%.40s' is not fp32, tf32 or bf16", text);
}

static const char *want_file(struct argp_state *state, const char *name, const char *text)
{
    if (*text == '\0')
        argp_error(state, "--%s: the name is empty; want a file to write", name);
    return text;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    struct demo_args *a = state->input;

    switch (key) {
    case ARGP_KEY_INIT: state->child_inputs[0] = &a->common; return 0;
    case KEY_ITEMS: want_count(state, "items", arg, 10000, &a->items); return 0;
    case KEY_DIM:
        want_count(state, "dim", arg, 65536, &a->dim);
        if (a->dim % 16 != 0)
            argp_error(state, "--dim: %.20s is not a multiple of 16; %llu is", arg,
                       (unsigned long long)(a->dim + 15) / 16 * 16);
        return 0;
    case KEY_MATH: want_math(state, arg, &a->math); return 0;
    case KEY_DEPTH: want_list(state, "depth", arg, 64, a->depth, &a->depths); return 0;
    case KEY_STREAMS: want_list(state, "streams", arg, 16, a->streams, &a->stream_counts); return 0;
    case KEY_RESULTS: a->results = true; return 0;
    case KEY_REPEATS: want_count(state, "repeats", arg, DEMO_REPEATS, &a->repeats); return 0;
    case KEY_SVG: a->svg = want_file(state, "svg", arg); return 0;
    case KEY_TRACE: a->trace = want_file(state, "trace", arg); return 0;
    case ARGP_KEY_ARG: argp_error(state, "'%.60s' is too much; demo takes options only", arg); return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static void add_row(struct demo *d, demo_schedule *schedule, uint32_t depth, uint32_t streams, const char *name)
{
    struct demo_row *row = &d->rows[d->row_count++];

    row->schedule = schedule;
    row->depth = depth;
    row->streams = streams;
    if (streams > 1)
        snprintf(row->name, sizeof(row->name), "%s-%u, %u streams", name, depth, streams);
    else if (depth > 0)
        snprintf(row->name, sizeof(row->name), "%s-%u", name, depth);
    else
        snprintf(row->name, sizeof(row->name), "%s", name);
}

static void add_rows(struct demo *d)
{
    const struct demo_args *a = &d->args;

    add_row(d, demo_pageable, 0, 0, "pageable");
    add_row(d, demo_pinned, 0, 0, "pinned");
    add_row(d, demo_textbook, 0, 0, "textbook");
    add_row(d, demo_reordered, 0, 0, "textbook-reordered");
    for (size_t i = 0; i < a->depths; i++)
        add_row(d, demo_sidestream, a->depth[i], 1, "sidestream");
    for (size_t i = 0; i < a->stream_counts; i++)
        if (a->streams[i] > 1)
            add_row(d, demo_sidestream, a->depth[0], a->streams[i], "sidestream");
}

/* What depends on the device: defaults and sizes. */
static int prepare(struct demo *d)
{
    side_status status = side_device_get_props(d->device, &d->props);
    side_op op = SIDE_OP_INIT;

    if (status == SIDE_OK)
        status = side_device_get_link(d->device, &d->link);
    if (status != SIDE_OK)
        return say_status(status, "cannot ask the device what it is");
    if (d->args.dim == 0)
        d->args.dim = d->props.simulated ? 1024 : 4096;
    if (d->args.repeats == 0 || d->props.simulated)
        d->args.repeats = d->props.simulated ? 1 : 5;
    op.id = SIDE_OP_MATMUL;
    op.dim[0] = op.dim[1] = op.dim[2] = d->args.dim;
    op.math = d->args.math;
    op.type[0] = op.type[1] = d->args.math == SIDE_MATH_BF16 ? SIDE_BF16 : SIDE_F32;
    d->item_bytes = (size_t)d->args.dim * d->args.dim * side_type_bytes(op.type[0]);
    d->result_bytes = (size_t)d->args.dim * d->args.dim * side_type_bytes(op.type[1]);
    add_rows(d);
    return EXIT_DONE;
}

static int open_outputs(struct demo *d)
{
    int code = EXIT_DONE;

    if (d->args.svg != NULL)
        code = output_open(&d->svg, d->args.svg, NULL);
    if (code == EXIT_DONE && d->args.trace != NULL)
        code = output_open(&d->trace, d->args.trace, NULL);
    if (code == EXIT_DONE)
        code = output_apart(&d->svg, &d->trace);
    return code;
}

/* Nothing is freed under a device that does not answer: the process ends, and the driver cleans up after it. */
static void clean_up(struct demo *d)
{
    for (size_t i = 0; i < d->row_count; i++) {
        if (d->rows[i].pipeline != NULL && side_pipeline_destroy(d->rows[i].pipeline) == SIDE_STUCK)
            return;
        free(d->rows[i].spans);
    }
    demo_memory_free(d);
    side_device_close(d->device);
    free(d);
}

int command_demo(int argc, char **argv)
{
    static const struct argp_child children[] = {{&common_argp, 0, NULL, 0}, {0}};
    static const struct argp argp = {
        options,
        parse,
        NULL,
        "Multiplies a list of host matrices by one matrix on the device, under schedules that differ only in order and "
        "waits: from "
        "pageable memory, from pinned memory, the textbook double buffer, the same with two statements swapped, and "
        "sidestream. Checks "
        "that all give the same bits, and compares each with the bound that copies and computes alone set.\v" EXIT_HELP,
        children,
        NULL,
        NULL,
    };
    struct demo *d = calloc(1, sizeof(*d));
    int code;

    if (d == NULL) {
        say("out of host memory");
        return EXIT_MEMORY;
    }
    d->svg.fd = d->svg.place = d->trace.fd = d->trace.place = -1;
    d->args.items = 10;
    d->args.depths = 3;
    for (uint32_t i = 0; i < 3; i++)
        d->args.depth[i] = 2 + i;
    argp_parse(&argp, argc, argv, 0, NULL, &d->args);
    code = open_device(&d->args.common, &d->device);
    if (code != EXIT_DONE) {
        free(d);
        return code;
    }
    code = prepare(d);
    if (code == EXIT_DONE)
        code = open_outputs(d);
    if (code == EXIT_DONE)
        code = demo_memory_take(d);
    if (code == EXIT_DONE)
        code = demo_measure(d);
    if (code == EXIT_DONE)
        code = demo_report(d);
    output_abort(&d->svg);
    output_abort(&d->trace);
    if (code != EXIT_STUCK)
        clean_up(d);
    return code;
}
