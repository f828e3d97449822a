/* SPDX-License-Identifier: MIT
 * sidestream load FILE|INDEX|DIR: arguments, which tensors, the loads. */
#include "load.h"
#include "parse.h"
#include "progress.h"
#include "signals.h"

#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    KEY_SELECT = 256,
    KEY_VERIFY,
    KEY_TO,
    KEY_PIECE,
    KEY_PINNED,
    KEY_THREADS,
    KEY_BACKEND,
    KEY_REPEAT,
    KEY_LENIENT,
    KEY_FORMAT
};

#define LOOK_S 0.05 /* at signals and progress */

static const struct argp_option options[] = {
    {"select", KEY_SELECT, "GLOB", 0, "Only tensors whose name matches; several: any of them", 1},
    {"verify", KEY_VERIFY, NULL, 0, "Read everything back and compare it with the files", 1},
    {"to", KEY_TO, "WHERE", 0, "device (default) or host", 1},
    {"repeat", KEY_REPEAT, "N", 0, "Load N times, 1 to 1000 (1): the first one pins memory", 1},
    {"backend", KEY_BACKEND, "NAME", 0, "auto (default), pread, direct or uring", 2},
    {"piece", KEY_PIECE, "SIZE", 0, "Bytes of a read, a multiple of 4 KiB to 64M (2M)", 2},
    {"pinned", KEY_PINNED, "SIZE", 0, "Most pinned memory, 8K to 4G (80M)", 2},
    {"threads", KEY_THREADS, "N", 0, "Threads that read, 1 to 64 (by cores)", 2},
    {"lenient", KEY_LENIENT, NULL, 0, "Take what the reference implementation takes and the format forbids", 3},
    {"format", KEY_FORMAT, "FORMAT", 0, "auto (default: by the name), safetensors, index, npy or raw", 3},
    {0},
};

static const char *const backends[] = {"auto", "pread", "direct", "uring"};
static const char *const formats[] = {"auto", "safetensors", "index", "npy", "raw"};

static size_t one_of(struct argp_state *state, const char *option, const char *arg, const char *const *names,
                     size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (strcmp(arg, names[i]) == 0)
            return i;
    argp_error(state, "--%s '%.40s': see --help for what it takes", option, arg);
    return 0;
}

static void want_bytes(struct argp_state *state, const char *name, const char *text, uint64_t least, uint64_t most,
                       uint64_t *value)
{
    char why[PARSE_WHY];

    if (!parse_bytes(text, least, most, value, why))
        argp_error(state, "--%s: %s", name, why);
    if (*value % 4096 != 0)
        argp_error(state, "--%s: '%.40s' is not a multiple of 4 KiB", name, text);
}

static void want_count(struct argp_state *state, const char *name, const char *text, uint64_t most, uint64_t *value)
{
    char why[PARSE_WHY];

    if (!parse_count(text, 1, most, value, why))
        argp_error(state, "--%s: %s", name, why);
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    struct load_args *a = state->input;

    switch (key) {
    case ARGP_KEY_INIT: state->child_inputs[0] = &a->common; return 0;
    case KEY_SELECT:
        if (a->selects == LOAD_SELECTS)
            argp_error(state, "--select: at most %d", LOAD_SELECTS);
        a->select[a->selects++] = arg;
        return 0;
    case KEY_VERIFY: a->verify = true; return 0;
    case KEY_TO: a->host = one_of(state, "to", arg, (const char *const[]){"device", "host"}, 2) == 1; return 0;
    case KEY_REPEAT: want_count(state, "repeat", arg, 1000, &a->repeat); return 0;
    case KEY_BACKEND: a->backend = (side_load_backend)one_of(state, "backend", arg, backends, 4); return 0;
    case KEY_PIECE: want_bytes(state, "piece", arg, 4096, UINT64_C(64) << 20, &a->piece); return 0;
    case KEY_PINNED: want_bytes(state, "pinned", arg, 8192, UINT64_C(4) << 30, &a->pinned); return 0;
    case KEY_THREADS: want_count(state, "threads", arg, 64, &a->threads); return 0;
    case KEY_LENIENT: a->lenient = true; return 0;
    case KEY_FORMAT: a->format = formats[one_of(state, "format", arg, formats, 5)]; return 0;
    case ARGP_KEY_ARG:
        if (state->arg_num > 0)
            argp_error(state, "'%.60s' is too much; want one FILE, INDEX or DIR", arg);
        if (*arg == '\0')
            argp_error(state, "the path is empty");
        a->path = arg;
        return 0;
    case ARGP_KEY_END:
        if (a->path == NULL)
            argp_error(state, "want a FILE, an INDEX of shards, or a DIR");
        return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

/* ---------------------------------------------------------------- which tensors */

static int open_checkpoint(struct load_run *r)
{
    side_checkpoint_options o = SIDE_CHECKPOINT_OPTIONS_INIT;
    const double begin = clock_s();

    for (size_t i = 0; r->args.format != NULL && i < sizeof(formats) / sizeof(formats[0]); i++)
        if (strcmp(r->args.format, formats[i]) == 0)
            o.format = (side_checkpoint_format)i;
    o.flags = r->args.lenient ? SIDE_CHECKPOINT_LENIENT : 0;
    side_status status = side_checkpoint_open(r->args.path, &o, &r->checkpoint);
    r->open_s = clock_s() - begin;
    if (status == SIDE_OK)
        return EXIT_DONE;
    const int code = say_file(status, "cannot load", r->args.path);
    return status == SIDE_INVALID ? EXIT_FAILED : code; /* the file is at fault, not an argument */
}

static bool is_selected(const struct load_args *a, const char *name)
{
    for (size_t i = 0; i < a->selects; i++)
        if (fnmatch(a->select[i], name, 0) == 0)
            return true;
    return a->selects == 0;
}

static int choose_parts(struct load_run *r)
{
    const size_t count = side_checkpoint_count(r->checkpoint);
    side_tensor t;

    r->parts = calloc(count + 1, sizeof(*r->parts));
    if (r->parts == NULL) {
        say("out of host memory");
        return EXIT_MEMORY;
    }
    for (size_t i = 0; i < count; i++) {
        if (side_checkpoint_tensor(r->checkpoint, i, &t) != SIDE_OK || !is_selected(&r->args, t.name))
            continue;
        r->parts[r->part_count++] = (side_load_part){.tensor = i};
        r->bytes += t.bytes;
    }
    if (r->part_count == 0 && count > 0) {
        say("no tensor of '%s' matches --select '%s'%s; 'sidestream ls' lists them", r->args.path, r->args.select[0],
            r->args.selects > 1 ? " or the others" : "");
        return EXIT_USAGE;
    }
    return EXIT_DONE;
}

/* ---------------------------------------------------------------- the loads */

/* Until it is there, fails, or is interrupted. */
static side_status watch(struct load_run *r, side_load *load)
{
    side_load_stats stats;
    side_status status;

    progress_begin("load", r->bytes, 1);
    while ((status = side_load_wait_count(load, r->part_count, LOOK_S)) == SIDE_AGAIN) {
        if (signals_interrupted())
            side_load_cancel(load);
        else if (side_load_get_stats(load, &stats) == SIDE_OK)
            progress_update(stats.copied_bytes);
    }
    status = side_load_join(load, &r->stats);
    progress_end();
    return status;
}

static int failed(struct load_run *r, side_status status)
{
    if (status == SIDE_CANCELLED && signals_interrupted()) {
        say("interrupted");
        return EXIT_INTERRUPTED;
    }
    return say_file(status, "loading", r->args.path);
}

static int load_once(struct load_run *r, uint64_t number)
{
    side_load_options o = SIDE_LOAD_OPTIONS_INIT;
    side_load *load = NULL;
    int code = EXIT_DONE;

    o.parts = r->parts;
    o.count = r->part_count;
    o.where = r->args.host ? SIDE_MEMORY_PAGEABLE : SIDE_MEMORY_DEVICE;
    o.piece_bytes = (size_t)r->args.piece;
    o.pinned_bytes = (size_t)r->args.pinned;
    o.threads = (uint32_t)r->args.threads;
    o.backend = r->args.backend;
    side_status status = side_load_start(r->device, r->checkpoint, &o, &load);
    if (status == SIDE_OK)
        status = watch(r, load);
    if (status != SIDE_OK)
        code = failed(r, status);
    r->time_s[number] = r->stats.time_s;
    if (code == EXIT_DONE && r->args.verify && number + 1 == r->args.repeat)
        code = load_verify(r, load);
    status = side_load_destroy(load);
    return code == EXIT_DONE && status != SIDE_OK ? failed(r, status) : code;
}

/* Device memory that was given back is cleared by the driver behind our back, on the engine that the next load's copies want: 2.3 ms a GiB on an H200
 * (docs/load-a-checkpoint.md). The next load is not to be timed with it. */
static void settle(const struct load_run *r)
{
    const uint64_t ns = 20000000 + r->bytes / 100; /* at 100 GB/s */
    const struct timespec pause = {.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};

    if (!r->args.host && !r->props.simulated)
        nanosleep(&pause, NULL);
}

static int run(struct load_run *r)
{
    int code = open_checkpoint(r);

    if (code == EXIT_DONE)
        code = choose_parts(r);
    if (code == EXIT_DONE)
        code = open_device(&r->args.common, &r->device);
    if (code != EXIT_DONE)
        return code;
    if (side_device_get_props(r->device, &r->props) != SIDE_OK || side_machine_get(r->device, &r->machine) != SIDE_OK)
        return say_status(side_last_error()->status, "cannot ask the device what it is");
    r->args.repeat = r->args.repeat != 0 ? r->args.repeat : 1;
    r->time_s = calloc(r->args.repeat, sizeof(*r->time_s));
    if (r->time_s == NULL) {
        say("out of host memory");
        return EXIT_MEMORY;
    }
    for (uint64_t i = 0; code == EXIT_DONE && i < r->args.repeat; i++) {
        if (i > 0)
            settle(r);
        code = load_once(r, i);
    }
    return code == EXIT_DONE ? load_report(r) : code;
}

int command_load(int argc, char **argv)
{
    static const struct argp_child children[] = {{&common_argp, 0, NULL, 0}, {0}};
    static const struct argp argp = {
        options,
        parse,
        "FILE|INDEX|DIR",
        "Loads the tensors of safetensors files (one, a folder, or shards through their index file), .npy or raw "
        "files, "
        "to the device, and says how fast that was and what limited it.\v"
        "The memory is given back at the end: this is for measuring and for checking files. Programs load with "
        "side_load_start or sidestream.torch. Sizes take a unit: 64K, 8M or 8MiB, 1.5G.\n\n" EXIT_HELP,
        children,
        NULL,
        NULL,
    };
    struct load_run r = {.machine = SIDE_MACHINE_INIT};
    int code;

    argp_parse(&argp, argc, argv, 0, NULL, &r.args);
    code = run(&r);
    if (code == EXIT_STUCK) /* nothing is freed under a device that does not answer */
        return code;
    free(r.parts);
    free(r.time_s);
    side_checkpoint_close(r.checkpoint);
    if (r.device != NULL)
        side_device_close(r.device);
    return code;
}
