/* SPDX-License-Identifier: MIT
 * sidestream cast IN OUT: whole checkpoints to another type. */
#include "cli.h"
#include "parse.h"
#include "progress.h"
#include "signals.h"

#include <fnmatch.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    KEY_TO = 256,
    KEY_SELECT,
    KEY_EXCEPT,
    KEY_FORCE,
    KEY_RESTART,
    KEY_LENIENT,
    KEY_PIECE,
    KEY_PINNED,
    KEY_SYNC,
    KEY_THREADS
};
enum { GLOBS = 32 };

static const struct argp_option options[] = {
    {"to", KEY_TO, "TYPE", 0, "bf16, f16, f8e4m3, f8e5m2 or f32. Needed", 1},
    {"select", KEY_SELECT, "GLOB", 0, "Cast tensors of such names alone; may be given several times", 1},
    {"except", KEY_EXCEPT, "GLOB", 0, "Do not cast tensors of such names; may be given several times", 1},
    {"force", KEY_FORCE, NULL, 0, "Replace an output file that is there", 2},
    {"restart", KEY_RESTART, NULL, 0, "Take a cast's unfinished output away and begin anew", 2},
    {"lenient", KEY_LENIENT, NULL, 0, "Take what the reference implementation takes and the format forbids", 2},
    {"piece", KEY_PIECE, "SIZE", 0, "Bytes that travel together, a power of two from 4K to 64M (8M)", 3},
    {"pinned", KEY_PINNED, "SIZE", 0, "Most pinned memory (128M)", 3},
    {"sync", KEY_SYNC, "SIZE", 0, "Bytes written between two entries of the journal (256M)", 3},
    {"threads", KEY_THREADS, "N", 0, "Threads that read, 1 to 64 (by cores)", 3},
    {0},
};

struct globs {
    const char *items[GLOBS];
    bool matched[GLOBS]; /* any tensor */
    size_t count;
};

struct cast {
    struct common common;
    side_cast_options options;
    struct globs selected, excepted;
    const char *in, *out;
    side_cast *cast;
    side_device *device;
    side_device_props props;
    side_cast_stats stats;
};

/* ---------------------------------------------------------------- arguments */

static const struct {
    const char *name;
    side_dtype type;
} types[] = {{"bf16", SIDE_DTYPE_BF16},
             {"f16", SIDE_DTYPE_F16},
             {"f8e4m3", SIDE_DTYPE_F8_E4M3},
             {"f8e5m2", SIDE_DTYPE_F8_E5M2},
             {"f32", SIDE_DTYPE_F32}};

static bool any_matches(struct globs *globs, const char *name)
{
    bool any = false;

    for (size_t i = 0; i < globs->count; i++)
        if (fnmatch(globs->items[i], name, 0) == 0)
            any = globs->matched[i] = true;
    return any;
}

static bool is_selected(void *user, const side_tensor *tensor)
{
    struct cast *c = user;

    const bool selected = c->selected.count == 0 || any_matches(&c->selected, tensor->name);
    const bool excepted = any_matches(&c->excepted, tensor->name); /* both, since matches are noted */

    return selected && !excepted;
}

static void want_type(struct cast *c, const char *arg, struct argp_state *state)
{
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++)
        if (strcmp(arg, types[i].name) == 0) {
            c->options.to = types[i].type;
            return;
        }
    argp_error(state, "--to '%.40s': want bf16, f16, f8e4m3, f8e5m2 or f32", arg);
}

static void want_glob(struct globs *globs, const char *arg, const char *name, struct argp_state *state)
{
    if (globs->count == GLOBS)
        argp_error(state, "--%s is given over %d times", name, GLOBS);
    globs->items[globs->count++] = arg;
}

static size_t want_bytes(const char *name, const char *arg, uint64_t least, uint64_t most, struct argp_state *state)
{
    char why[PARSE_WHY];
    uint64_t bytes = 0;

    if (!parse_bytes(arg, least, most, &bytes, why))
        argp_error(state, "--%s: %s", name, why);
    return (size_t)bytes;
}

static error_t parse_argument(struct cast *c, const char *arg, struct argp_state *state)
{
    if (state->arg_num >= 2)
        argp_error(state, "'%.60s' is too much; want IN OUT", arg);
    if (*arg == '\0')
        argp_error(state, "%s is empty", state->arg_num == 0 ? "IN" : "OUT");
    if (strcmp(arg, "-") == 0)
        argp_error(state, "%s is '-': a cast reads and writes files, no pipes; name a file ('./-' for one of that name)",
                   state->arg_num == 0 ? "IN" : "OUT");
    *(state->arg_num == 0 ? &c->in : &c->out) = arg;
    return 0;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    struct cast *c = state->input;
    char why[PARSE_WHY];
    uint64_t count = 0;

    switch (key) {
    case ARGP_KEY_INIT: state->child_inputs[0] = &c->common; return 0;
    case KEY_TO: want_type(c, arg, state); return 0;
    case KEY_SELECT: want_glob(&c->selected, arg, "select", state); return 0;
    case KEY_EXCEPT: want_glob(&c->excepted, arg, "except", state); return 0;
    case KEY_FORCE: c->options.flags |= SIDE_CAST_REPLACE; return 0;
    case KEY_RESTART: c->options.flags |= SIDE_CAST_RESTART; return 0;
    case KEY_LENIENT: c->options.open |= SIDE_CHECKPOINT_LENIENT; return 0;
    case KEY_PIECE:
        c->options.piece_bytes = want_bytes("piece", arg, 4096, 64 << 20, state);
        if ((c->options.piece_bytes & (c->options.piece_bytes - 1)) != 0)
            argp_error(state, "--piece: '%.40s' is no power of two", arg);
        return 0;
    case KEY_PINNED: c->options.pinned_bytes = want_bytes("pinned", arg, 1, UINT64_C(1) << 40, state); return 0;
    case KEY_SYNC: c->options.sync_bytes = want_bytes("sync", arg, 1, UINT64_C(1) << 50, state); return 0;
    case KEY_THREADS:
        if (!parse_count(arg, 1, 64, &count, why))
            argp_error(state, "--threads: %s", why);
        c->options.threads = (uint32_t)count;
        return 0;
    case ARGP_KEY_ARG: return parse_argument(c, arg, state);
    case ARGP_KEY_END:
        if (state->arg_num < 2)
            argp_error(state, "want IN OUT");
        if (c->options.to == 0)
            argp_error(state, "want --to: bf16, f16, f8e4m3, f8e5m2 or f32");
        return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

/* ---------------------------------------------------------------- report */

/* Through the disks and the device: what was there already is not counted. */
static double rate(const struct cast *c)
{
    const side_cast_stats *t = &c->stats;

    return t->time_s > 0 ? (double)(t->bytes_in - t->resumed_bytes) / 1e9 / t->time_s : 0;
}

static void print_summary(const struct cast *c)
{
    const side_cast_stats *t = &c->stats;
    char in[32], out[32], resumed[32];

    fprintf(stderr, "%llu of %llu tensors cast, %s to %s in %.3f s, %.2f GB/s", (unsigned long long)t->cast_tensors,
            (unsigned long long)t->tensors, bytes_text(t->bytes_in, in), bytes_text(t->bytes_out, out), t->time_s,
            rate(c));
    if (t->resumed_bytes > 0)
        fprintf(stderr, "; %s were there already", bytes_text(t->resumed_bytes, resumed));
    if (*t->bottleneck != '\0')
        fprintf(stderr, "; bottleneck: %s", t->bottleneck);
    fprintf(stderr, "%s\n", c->props.simulated && t->cast_bytes_in > 0 ? " (simulated device)" : "");
}

static int print_object(const struct cast *c)
{
    const side_cast_stats *t = &c->stats;
    json_t *slots = json_pack("{s:f, s:f, s:f}", "reading", t->reading, "device", t->on_device, "writing", t->writing);

    return print_json(json_pack(
        "{s:s, s:s, s:s, s:s, s:b, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:o, s:o, s:I, s:I, s:I, s:s, "
        "s:o}",
        "input", c->in, "output", c->out, "to", side_dtype_name(c->options.to), "device", c->props.spec, "simulated",
        c->props.simulated, "files", (json_int_t)t->files, "tensors", (json_int_t)t->tensors, "cast_tensors",
        (json_int_t)t->cast_tensors, "bytes_in", (json_int_t)t->bytes_in, "bytes_out", (json_int_t)t->bytes_out,
        "cast_bytes_in", (json_int_t)t->cast_bytes_in, "resumed_bytes", (json_int_t)t->resumed_bytes, "read_bytes",
        (json_int_t)t->read_bytes, "cached_bytes", (json_int_t)t->cached_bytes, "time_s", json_number(t->time_s),
        "gbps", json_number(t->time_s > 0 ? rate(c) : NAN), "sync_busy_s", json_number(t->sync_busy_s), "pieces",
        (json_int_t)t->pieces, "pinned_bytes", (json_int_t)t->pinned_bytes, "device_bytes", (json_int_t)t->device_bytes,
        "bottleneck", t->bottleneck, "slots", slots));
}

/* ---------------------------------------------------------------- the run */

static void progress(void *user, uint64_t done, uint64_t total)
{
    (void)user;
    (void)total;
    progress_update(done);
}

/* What is left there, and what to do about it. In a folder that was there before it lies in that. */
static void say_rest(const struct cast *c)
{
    const side_cast_stats *t = &c->stats;
    char inside[PATH_MAX + 16];
    size_t n = strlen(c->out);

    if (t->pieces_done == 0 || t->pieces_done >= t->pieces)
        return;
    while (n > 1 && c->out[n - 1] == '/')
        n--;
    snprintf(inside, sizeof(inside), "%.*s/.cast-part", (int)n, c->out);
    if (access(inside, F_OK) != 0)
        snprintf(inside, sizeof(inside), "%.*s.cast-part", (int)n, c->out);
    say("%llu of %llu pieces are in %s; the same command goes on there, --restart begins anew",
        (unsigned long long)t->pieces_done, (unsigned long long)t->pieces, inside);
}

static int run_cast(struct cast *c)
{
    side_status status;
    int code = EXIT_DONE;

    progress_begin("cast", c->stats.bytes_in, 1);
    signals_watch_cast(c->cast);
    status = side_cast_run(c->cast, c->device, &c->stats);
    signals_watch_cast(NULL);
    progress_end();
    if (status == SIDE_CANCELLED && signals_interrupted()) {
        say("interrupted");
        code = EXIT_INTERRUPTED;
    } else if (status != SIDE_OK) {
        code = say_status(status, "cast of '%s' to '%s'", c->in, c->out);
    }
    if (code != EXIT_DONE)
        say_rest(c);
    return code;
}

/* A pattern that matches nothing is a mistyped one: what it was to keep would be cast. */
static int check_globs(const struct cast *c, const struct globs *globs, const char *option)
{
    for (size_t i = 0; i < globs->count; i++)
        if (!globs->matched[i]) {
            say("no tensor of '%s' matches --%s '%s'; 'sidestream ls' lists them", c->in, option, globs->items[i]);
            return EXIT_USAGE;
        }
    return EXIT_DONE;
}

/* Names, before any work: patterns without a tensor, and tensors of 8 bits that are cast up without their scales. What cannot be read is said by the cast. */
static int look_at_names(struct cast *c)
{
    side_checkpoint_options o = SIDE_CHECKPOINT_OPTIONS_INIT;
    bool quantised = false, scales = false;
    side_checkpoint *checkpoint;
    side_tensor t;
    int code;

    o.flags = c->options.open;
    if (fnmatch("*.npy", c->in, 0) == 0 || fnmatch("*.raw", c->in, 0) == 0) /* as the cast takes them */
        o.format = SIDE_FORMAT_SAFETENSORS;
    if (side_checkpoint_open(c->in, &o, &checkpoint) != SIDE_OK)
        return EXIT_DONE;
    for (size_t i = 0; side_checkpoint_tensor(checkpoint, i, &t) == SIDE_OK; i++) {
        const bool f8 = t.type == SIDE_DTYPE_F8_E4M3 || t.type == SIDE_DTYPE_F8_E5M2;
        const bool selected = is_selected(c, &t);
        quantised |= f8 && selected && t.type != c->options.to;
        scales |= !f8 && strstr(t.name, "scale") != NULL;
    }
    side_checkpoint_close(checkpoint);
    code = check_globs(c, &c->selected, "select");
    if (code == EXIT_DONE)
        code = check_globs(c, &c->excepted, "except");
    if (code == EXIT_DONE && quantised && scales)
        say("warning: F8 tensors are cast without the scales that lie beside them: their values are not the model's");
    return code;
}

static int run(struct cast *c)
{
    side_status status;
    int code = look_at_names(c);

    if (code != EXIT_DONE)
        return code;
    c->options.select = is_selected;
    c->options.select_user = c;
    c->options.progress = progress;
    status = side_cast_create(c->in, c->out, &c->options, &c->cast);
    if (status != SIDE_OK) {
        code = say_status(status, "cast of '%s' to '%s'", c->in, c->out);
        return code == EXIT_USAGE ? EXIT_FAILED : code; /* the files, not the arguments */
    }
    side_cast_get_stats(c->cast, &c->stats);
    if (c->stats.cast_tensors == 0)
        say("warning: no tensor is cast: none is %s and of a floating-point type other than %s; files are copied",
            c->selected.count + c->excepted.count > 0 ? "selected" : "there", side_dtype_name(c->options.to));
    code = open_device(&c->common, &c->device);
    if (code != EXIT_DONE)
        return code;
    status = side_device_get_props(c->device, &c->props);
    if (status != SIDE_OK)
        return say_status(status, "cannot ask the device what it is");
    if (c->props.simulated && c->common.device == NULL && getenv("SIDESTREAM_DEVICE") == NULL &&
        c->stats.cast_bytes_in > 0)
        say("no usable GPU: the software device casts, on the CPU; '-d cuda' insists on one");
    code = run_cast(c);
    if (code != EXIT_DONE)
        return code;
    print_summary(c);
    return c->common.json ? print_object(c) : finish_stdout();
}

int command_cast(int argc, char **argv)
{
    static const struct argp_child children[] = {{&common_argp, 0, NULL, 0}, {0}};
    static const struct argp argp = {
        options,
        parse,
        "IN OUT",
        "Casts a checkpoint of any size to another type: disk to device to disk, all at once, in bounded memory.\n"
        "\n"
        "IN is a safetensors file, an index file of shards, or a folder of them; OUT is a file for a file, else a "
        "folder, in "
        "which shards keep their names. Metadata, tensors that are not selected and those of other types are kept as "
        "they are.\n"
        "\v"
        "OUT appears under its name when it is whole, or not at all. What was interrupted goes on with the same "
        "command. Without a usable GPU the CPU casts; -d cuda insists. "
        "Sizes take a unit: 4096B, 64K, 8M or 8MiB, 1.5G.\n\n" EXIT_HELP,
        children,
        NULL,
        NULL,
    };
    struct cast *c = calloc(1, sizeof(*c));
    int code;

    if (c == NULL) {
        say("out of host memory");
        return EXIT_MEMORY;
    }
    c->options.size = sizeof(c->options);
    argp_parse(&argp, argc, argv, 0, NULL, c);
    code = run(c);
    if (code == EXIT_STUCK) /* nothing is freed under a device that does not answer */
        return code;
    side_cast_destroy(c->cast);
    if (c->device != NULL)
        side_device_close(c->device);
    free(c);
    return code;
}
