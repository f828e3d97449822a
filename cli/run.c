/* SPDX-License-Identifier: MIT
 * sidestream run OP INPUT [OUTPUT]: arguments, files, and the course of events. */
#include "run.h"
#include "parse.h"
#include "progress.h"
#include "signals.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { KEY_CHUNK = 256, KEY_DEPTH, KEY_THREADS, KEY_TRACE, KEY_SVG };

static const struct argp_option options[] = {
    {"chunk", KEY_CHUNK, "SIZE", 0, "Bytes an item, a multiple of 1 KiB from 1K to 4G (16M)", 1},
    {"depth", KEY_DEPTH, "N", 0, "Device buffers, 1 to 64 (3)", 1},
    {"threads", KEY_THREADS, "N", 0, "Threads that read and write, 1 to 64 (by cores)", 1},
    {"trace", KEY_TRACE, "FILE", 0, "Write what ran when, for Perfetto or chrome://tracing", 2},
    {"svg", KEY_SVG, "FILE", 0, "Draw what ran when", 2},
    {0},
};

static void want_count(struct argp_state *state, const char *name, const char *text, uint64_t most, uint64_t *value)
{
    char why[PARSE_WHY];

    if (!parse_count(text, 1, most, value, why))
        argp_error(state, "--%s: %s", name, why);
}

static error_t parse_argument(struct run_args *a, char *arg, struct argp_state *state)
{
    const char **const places[] = {&a->op, &a->input, &a->output};
    static const char *const names[] = {"OP", "INPUT", "OUTPUT"};

    if (state->arg_num >= 3)
        argp_error(state, "'%.60s' is too much; want OP INPUT [OUTPUT]", arg);
    if (*arg == '\0')
        argp_error(state, "%s is empty", names[state->arg_num]);
    *places[state->arg_num] = arg;
    return 0;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    struct run_args *a = state->input;
    char why[PARSE_WHY];

    switch (key) {
    case ARGP_KEY_INIT: state->child_inputs[0] = &a->common; return 0;
    case KEY_CHUNK:
        if (!parse_bytes(arg, 1024, UINT64_C(4) << 30, &a->chunk, why))
            argp_error(state, "--chunk: %s", why);
        if (a->chunk % 1024 != 0)
            argp_error(state, "--chunk: '%.40s' is not a multiple of 1 KiB", arg);
        return 0;
    case KEY_DEPTH: want_count(state, "depth", arg, 64, &a->depth); return 0;
    case KEY_THREADS: want_count(state, "threads", arg, 64, &a->threads); return 0;
    case KEY_TRACE:
    case KEY_SVG:
        if (*arg == '\0')
            argp_error(state, "--%s: the name is empty; want a file to write", key == KEY_SVG ? "svg" : "trace");
        *(key == KEY_SVG ? &a->svg : &a->trace) = arg;
        return 0;
    case ARGP_KEY_ARG: return parse_argument(a, arg, state);
    case ARGP_KEY_END:
        if (state->arg_num < 2)
            argp_error(state, "want OP INPUT [OUTPUT]; OP is checksum or cast:FROM:TO");
        return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

/* ---------------------------------------------------------------- files */

/* A pipe would block in open, hence O_NONBLOCK; on regular files it does nothing. */
static int open_input(struct run *r)
{
    const char *name = r->args.input, *not = NULL;

    r->fd = open(name, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
    if (r->fd < 0 || fstat(r->fd, &r->stat) != 0) {
        say("cannot read input '%s': %s", name, strerror(errno));
        return EXIT_FAILED;
    }
    if (S_ISDIR(r->stat.st_mode))
        not = "a directory";
    else if (S_ISFIFO(r->stat.st_mode))
        not = "a pipe";
    else if (!S_ISREG(r->stat.st_mode))
        not = "a device or socket";
    if (not != NULL) {
        say("input '%s' is %s; want a regular file, whose size is known", name, not );
        return EXIT_FAILED;
    }
    r->bytes = (uint64_t)r->stat.st_size;
    return EXIT_DONE;
}

static int open_outputs(struct run *r)
{
    int code = EXIT_DONE;

    if (r->args.output != NULL)
        code = output_open(&r->output, r->args.output, &r->stat);
    if (code == EXIT_DONE && r->args.svg != NULL)
        code = output_open(&r->svg, r->args.svg, &r->stat);
    if (code == EXIT_DONE && r->args.trace != NULL)
        code = output_open(&r->trace, r->args.trace, &r->stat);
    if (code == EXIT_DONE)
        code = output_apart(&r->output, &r->svg);
    if (code == EXIT_DONE)
        code = output_apart(&r->output, &r->trace);
    if (code == EXIT_DONE)
        code = output_apart(&r->svg, &r->trace);
    return code;
}

/* ---------------------------------------------------------------- the run */

static void progress(void *user, uint64_t items, uint64_t bytes_in, uint64_t bytes_out)
{
    (void)user;
    (void)items;
    (void)bytes_out;
    progress_update(bytes_in);
}

static side_status keep_spans(struct run *r)
{
    size_t count = 0;
    side_status status = side_log_spans(r->log, NULL, &count);

    if (status != SIDE_OK)
        return status;
    r->spans = calloc(count + 1, sizeof(*r->spans));
    if (r->spans == NULL)
        return SIDE_NO_MEMORY;
    r->span_count = count;
    status = side_log_spans(r->log, r->spans, &r->span_count);
    if (side_log_dropped(r->log) > 0)
        say("the drawings lack the last %llu operations; a larger --chunk makes fewer",
            (unsigned long long)side_log_dropped(r->log));
    return status == SIDE_OK ? side_timeline_account(r->spans, r->span_count, &r->account) : status;
}

static int failed(struct run *r, side_status status)
{
    if (status == SIDE_CANCELLED && signals_interrupted()) {
        say("interrupted%s", r->args.output != NULL ? "; nothing was written" : "");
        return EXIT_INTERRUPTED;
    }
    if (r->args.output != NULL)
        return say_kept(&r->kept, status, "%s of '%s' to '%s'", r->args.op, r->args.input, r->args.output);
    return say_kept(&r->kept, status, "%s of '%s'", r->args.op, r->args.input);
}

static int run_pipeline(struct run *r)
{
    side_pipeline_options o = SIDE_PIPELINE_OPTIONS_INIT;
    side_pipeline *pipeline = NULL;
    side_status status = SIDE_OK, destroyed;

    run_op_fill(r, &o);
    if (r->source_bytes == 0)
        return EXIT_DONE;
    if (r->args.svg != NULL || r->args.trace != NULL)
        status = side_log_create(r->device, 0, &r->log);
    o.depth = (uint32_t)r->args.depth;
    o.threads = (uint32_t)r->args.threads;
    o.log = r->log;
    o.progress = progress;
    if (status == SIDE_OK)
        status = side_pipeline_create(r->device, &o, &pipeline);
    if (status != SIDE_OK)
        return failed(r, status);
    progress_begin(r->args.op, r->source_bytes, 1);
    signals_watch(pipeline);
    status = side_pipeline_run(pipeline, &r->stats);
    signals_watch(NULL);
    progress_end();
    if (status == SIDE_OK && r->log != NULL)
        status = keep_spans(r);
    if (status != SIDE_OK) {
        int code = failed(r, status);

        if (status != SIDE_STUCK)
            side_pipeline_destroy(pipeline);
        return code;
    }
    destroyed = side_pipeline_destroy(pipeline);
    return destroyed == SIDE_OK ? EXIT_DONE : failed(r, destroyed);
}

static int run_device(struct run *r)
{
    side_status status = side_device_get_props(r->device, &r->props);
    int code = EXIT_DONE;

    if (status != SIDE_OK)
        return say_status(status, "cannot ask the device what it is");
    if (r->source_bytes > 0)
        code = run_link_measure(r);
    if (code == EXIT_DONE)
        code = run_pipeline(r);
    if (code == EXIT_DONE)
        code = run_op_finish(r);
    if (code == EXIT_DONE && signals_interrupted()) {
        say("interrupted%s", r->args.output != NULL ? "; nothing was written" : "");
        code = EXIT_INTERRUPTED;
    }
    if (code == EXIT_DONE && r->args.output != NULL)
        code = output_commit(&r->output);
    return code == EXIT_DONE ? run_report(r) : code;
}

static int run(struct run *r)
{
    int code = run_op_parse(r);

    if (code == EXIT_DONE)
        code = open_input(r);
    if (code == EXIT_DONE)
        code = run_op_prepare(r);
    if (code == EXIT_DONE)
        code = open_outputs(r);
    if (code == EXIT_DONE)
        code = open_device(&r->args.common, &r->device);
    if (code == EXIT_DONE)
        code = run_device(r);
    output_abort(&r->output);
    output_abort(&r->svg);
    output_abort(&r->trace);
    if (code == EXIT_STUCK) /* nothing is freed under a device that does not answer */
        return code;
    side_log_destroy(r->log);
    free(r->spans);
    if (r->device != NULL)
        side_device_close(r->device);
    if (r->fd >= 0)
        close(r->fd);
    return code;
}

int command_run(int argc, char **argv)
{
    static const struct argp_child children[] = {{&common_argp, 0, NULL, 0}, {0}};
    static const struct argp argp = {
        options,
        parse,
        "OP INPUT [OUTPUT]",
        "Streams a file of any size through an operation on the device: reading, copying in, computing, copying out "
        "and writing all at once.\n"
        "\n"
        "OP is one of\n"
        "  checksum      XXH3 (64 bits) of INPUT, printed as xxhsum -H3 does\n"
        "  cast:FROM:TO  f32, f16 or bf16 to another of these; needs OUTPUT\n"
        "\v"
        "OUTPUT appears under its name when it is whole, or not at all. Sizes take a unit: 4096B, 64K, 8M or 8MiB, "
        "1.5G.\n\n" EXIT_HELP,
        children,
        NULL,
        NULL,
    };
    struct run *r = calloc(1, sizeof(*r));
    int code;

    if (r == NULL) {
        say("out of host memory");
        return EXIT_MEMORY;
    }
    r->fd = -1;
    r->output.fd = r->output.place = r->svg.fd = r->svg.place = r->trace.fd = r->trace.place = -1;
    argp_parse(&argp, argc, argv, 0, NULL, &r->args);
    code = run(r);
    if (code != EXIT_STUCK)
        free(r);
    return code;
}
