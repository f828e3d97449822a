/* SPDX-License-Identifier: MIT
 * sidestream ls: the tensors that files hold. */
#include "cli.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { KEY_LENIENT = 0x100, KEY_STRICT, KEY_FORMAT, ALIGN_MOST = 4096 };

struct ls {
    struct common common;
    side_checkpoint_options open;
    char **paths;
    int path_count;
};

static const struct argp_option options[] = {
    {"lenient", KEY_LENIENT, NULL, 0, "Take what the reference implementation takes and the format forbids", 1},
    {"strict-spec", KEY_STRICT, NULL, 0, "Refuse blanks around the header that readers take", 1},
    {"format", KEY_FORMAT, "FORMAT", 0, "auto (default: by the name), safetensors, index, npy or raw", 1},
    {0},
};

static const char *const formats[] = {"auto", "safetensors", "index", "npy", "raw"};

/* ---------------------------------------------------------------- text */

/* What a terminal would act upon is escaped: ASCII's control characters, and those of ISO 8859. */
static void print_name(const char *name)
{
    for (const unsigned char *c = (const unsigned char *)name; *c != '\0'; c++)
        if (*c < 0x20 || *c == 0x7f)
            printf("\\x%02x", *c);
        else if (*c == 0xc2 && c[1] < 0xa0 && c[1] != '\0')
            printf("\\u%04x", *++c);
        else if (*c == '\\')
            fputs("\\\\", stdout);
        else
            putchar(*c);
}

static void shape_text(const side_tensor *t, char text[SIDE_RANK_MOST * 22 + 3])
{
    char *p = text;

    *p++ = '[';
    for (uint32_t i = 0; i < t->rank; i++)
        p += sprintf(p, "%s%llu", i > 0 ? ", " : "", (unsigned long long)t->dims[i]);
    strcpy(p, "]");
}

/* The largest power of two that divides the offset; of 0, and beyond it, a page. */
static unsigned alignment(uint64_t offset)
{
    const uint64_t low = offset & -offset;

    return low == 0 || low > ALIGN_MOST ? ALIGN_MOST : (unsigned)low;
}

static bool is_aligned(const side_tensor *t)
{
    const uint32_t bytes = side_dtype_bits(t->type) / 8;

    return bytes == 0 || t->offset % bytes == 0;
}

static void print_tensors(const side_checkpoint *ck, const side_checkpoint_file_info *file)
{
    char shape[SIDE_RANK_MOST * 22 + 3];
    side_tensor t;

    if (file->count > 0)
        printf("  %-11s %-22s %14s %6s  %s\n", "dtype", "shape", "bytes", "align", "name");
    for (size_t i = file->first; i < file->first + file->count; i++) {
        if (side_checkpoint_tensor(ck, i, &t) != SIDE_OK)
            return;
        shape_text(&t, shape);
        printf("  %-11s %-22s %14llu %6u  ", side_dtype_name(t.type), shape, (unsigned long long)t.bytes,
               alignment(t.offset));
        print_name(t.name);
        putchar('\n');
    }
}

static void print_file(const side_checkpoint *ck, size_t index)
{
    side_checkpoint_file_info file;
    size_t unaligned = 0;
    const char *key, *value;
    char size[32];
    side_tensor t;

    if (side_checkpoint_file(ck, index, &file) != SIDE_OK)
        return;
    for (size_t i = file.first; i < file.first + file.count; i++)
        unaligned += side_checkpoint_tensor(ck, i, &t) == SIDE_OK && !is_aligned(&t);
    print_name(file.path);
    printf(": %zu tensor%s, %s", file.count, file.count == 1 ? "" : "s", bytes_text(file.bytes, size));
    printf(", data from byte %llu", (unsigned long long)file.data);
    if (unaligned > 0)
        printf("; %zu not aligned to their dtype", unaligned);
    putchar('\n');
    for (size_t i = 0; i < side_checkpoint_metadata_count(ck, index); i++)
        if (side_checkpoint_metadata(ck, index, i, &key, &value) == SIDE_OK) {
            fputs("  metadata    ", stdout);
            print_name(key);
            fputs(" = ", stdout);
            print_name(value);
            putchar('\n');
        }
    print_tensors(ck, &file);
}

/* ---------------------------------------------------------------- JSON, written as it comes: jansson's integers have no 64 unsigned bits */

/* Paths may be anything: bytes that are not UTF-8 become '?'. */
static void put_text(const char *text)
{
    json_t *made = json_string(text);
    char *dumped = NULL;

    if (made == NULL) {
        char *plain = strdup(text);
        for (char *c = plain; c != NULL && *c != '\0'; c++)
            *c = (unsigned char)*c < 0x80 ? *c : '?';
        made = plain != NULL ? json_string(plain) : NULL;
        free(plain);
    }
    if (made != NULL)
        dumped = json_dumps(made, JSON_ENCODE_ANY);
    fputs(dumped != NULL ? dumped : "\"\"", stdout);
    free(dumped);
    json_decref(made);
}

static void put_metadata(const side_checkpoint *ck, size_t file)
{
    const char *key, *value;

    putchar('{');
    for (size_t i = 0; i < side_checkpoint_metadata_count(ck, file); i++)
        if (side_checkpoint_metadata(ck, file, i, &key, &value) == SIDE_OK) {
            fputs(i > 0 ? ", " : "", stdout);
            put_text(key);
            fputs(": ", stdout);
            put_text(value);
        }
    putchar('}');
}

static void put_tensor(const side_checkpoint *ck, size_t index, size_t file_before)
{
    side_checkpoint_file_info file;
    char shape[SIDE_RANK_MOST * 22 + 3];
    side_tensor t;

    if (side_checkpoint_tensor(ck, index, &t) != SIDE_OK || side_checkpoint_file(ck, t.file, &file) != SIDE_OK)
        return;
    shape_text(&t, shape);
    fputs("{\"name\": ", stdout);
    put_text(t.name);
    printf(", \"dtype\": \"%s\", \"shape\": %s, \"begin\": %llu, \"end\": %llu, \"bytes\": %llu, \"file\": %zu, "
           "\"offset\": %llu, "
           "\"align\": %u}",
           side_dtype_name(t.type), shape, (unsigned long long)(t.offset - file.data),
           (unsigned long long)(t.offset - file.data + t.bytes), (unsigned long long)t.bytes, file_before + t.file,
           (unsigned long long)t.offset, alignment(t.offset));
}

static void put_file(const side_checkpoint *ck, size_t index)
{
    side_checkpoint_file_info file;

    if (side_checkpoint_file(ck, index, &file) != SIDE_OK)
        return;
    fputs("{\"path\": ", stdout);
    put_text(file.path);
    printf(", \"bytes\": %llu, \"data\": %llu, \"tensors\": %zu, \"metadata\": ", (unsigned long long)file.bytes,
           (unsigned long long)file.data, file.count);
    put_metadata(ck, index);
    putchar('}');
}

/* What all arguments hold, in one object: tensors say by number in which of files they are; metadata is the first file's. */
static void put_all(side_checkpoint *const *all, const struct ls *ls, json_t *refused)
{
    const char *between = "";
    size_t files = 0;
    char *dumped = json_dumps(refused, 0);

    fputs("{\"tensors\": [", stdout);
    for (int k = 0; k < ls->path_count; files += side_checkpoint_files(all[k++]))
        for (size_t i = 0; i < side_checkpoint_count(all[k]); i++, between = ",\n ") {
            fputs(between, stdout);
            put_tensor(all[k], i, files);
        }
    fputs("],\n \"metadata\": ", stdout);
    put_metadata(all[0], 0);
    fputs(",\n \"files\": [", stdout);
    between = "";
    for (int k = 0; k < ls->path_count; k++)
        for (size_t i = 0; i < side_checkpoint_files(all[k]); i++, between = ",\n ") {
            fputs(between, stdout);
            put_file(all[k], i);
        }
    printf("],\n \"refused\": %s}\n", dumped != NULL ? dumped : "[]");
    free(dumped);
}

/* ---------------------------------------------------------------- command */

/* A file that is refused is no bad argument. */
static int refused(side_status s, const char *path)
{
    const int code = say_file(s, "cannot list", path);

    return code == EXIT_USAGE ? EXIT_FAILED : code;
}

static int list(const struct ls *ls)
{
    side_checkpoint **all = calloc((size_t)ls->path_count, sizeof(*all));
    json_t *no = json_array();
    int code = EXIT_DONE;

    if (all == NULL || no == NULL) {
        free(all);
        json_decref(no);
        say("out of host memory");
        return EXIT_MEMORY;
    }
    for (int k = 0; k < ls->path_count; k++) {
        const side_status s = side_checkpoint_open(ls->paths[k], &ls->open, &all[k]);
        if (s != SIDE_OK) {
            json_array_append_new(no, json_pack("{s:i, s:s?}", "argument", k, "why", side_last_error()->message));
            code = refused(s, ls->paths[k]);
        } else if (!ls->common.json) {
            for (size_t i = 0; i < side_checkpoint_files(all[k]); i++)
                print_file(all[k], i);
            side_checkpoint_close(all[k]);
            all[k] = NULL;
        }
    }
    if (ls->common.json)
        put_all(all, ls, no);
    for (int k = 0; k < ls->path_count; k++)
        side_checkpoint_close(all[k]);
    free(all);
    json_decref(no);
    const int printed = finish_stdout();
    return code != EXIT_DONE ? code : printed;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    struct ls *ls = state->input;

    switch (key) {
    case ARGP_KEY_INIT: state->child_inputs[0] = &ls->common; return 0;
    case KEY_LENIENT: ls->open.flags |= SIDE_CHECKPOINT_LENIENT; return 0;
    case KEY_STRICT: ls->open.flags |= SIDE_CHECKPOINT_STRICT_SPEC; return 0;
    case KEY_FORMAT:
        for (unsigned i = 0; i < sizeof(formats) / sizeof(formats[0]); i++)
            if (strcmp(arg, formats[i]) == 0) {
                ls->open.format = (side_checkpoint_format)i;
                return 0;
            }
        argp_error(state, "--format '%.40s': want auto, safetensors, index, npy or raw", arg);
        return 0;
    case ARGP_KEY_ARGS:
        ls->paths = state->argv + state->next;
        ls->path_count = state->argc - state->next;
        return 0;
    case ARGP_KEY_NO_ARGS: argp_error(state, "want the files to list"); return 0;
    case ARGP_KEY_END:
        if (ls->open.flags == (SIDE_CHECKPOINT_LENIENT | SIDE_CHECKPOINT_STRICT_SPEC))
            argp_error(state, "--lenient and --strict-spec exclude each other");
        return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

int command_ls(int argc, char **argv)
{
    static const struct argp_child children[] = {{&common_argp, 0, NULL, 0}, {0}};
    static const struct argp argp = {
        options,
        parse,
        "FILE...",
        "Lists the tensors of checkpoints: safetensors files, index files of shards, folders with them, .npy and raw "
        "files. What is malformed is refused, and "
        "why.\v" EXIT_HELP,
        children,
        NULL,
        NULL,
    };
    struct ls ls = {.open = SIDE_CHECKPOINT_OPTIONS_INIT};

    argp_parse(&argp, argc, argv, 0, NULL, &ls);
    return list(&ls);
}
