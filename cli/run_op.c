/* SPDX-License-Identifier: MIT */
#include "run.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum {
    BLOCK = 1024,
    SUMS = 64,
    TAIL = BLOCK + 64,
    SHORT = 240
}; /* of XXH3: bytes; SHORT: up to here it has no blocks */
enum { DEFAULT_ITEM = 16 << 20 };

static bool type_named(const char *name, size_t length, side_type *type)
{
    for (side_type t = SIDE_F32; t <= SIDE_BF16; t++) {
        if (strlen(side_type_name(t)) == length && strncmp(side_type_name(t), name, length) == 0) {
            *type = t;
            return true;
        }
    }
    return false;
}

int run_op_parse(struct run *r)
{
    const char *op = r->args.op, *from, *colon;

    if (strcmp(op, "checksum") == 0) {
        r->checksum = true;
        if (r->args.output == NULL)
            return EXIT_DONE;
        say("checksum writes no file; leave out '%.200s'", r->args.output);
        return EXIT_USAGE;
    }
    from = op + 5;
    colon = strncmp(op, "cast:", 5) == 0 ? strchr(from, ':') : NULL;
    if (colon == NULL || !type_named(from, (size_t)(colon - from), &r->from) ||
        !type_named(colon + 1, strlen(colon + 1), &r->to) || r->from == r->to) {
        say("no operation '%.60s'; there are checksum, and cast:FROM:TO between two of f32, f16 and bf16", op);
        return EXIT_USAGE;
    }
    if (r->args.output != NULL)
        return EXIT_DONE;
    say("%s needs a file to write: sidestream run %s INPUT OUTPUT", op, op);
    return EXIT_USAGE;
}

int run_op_prepare(struct run *r)
{
    uint64_t item = r->args.chunk > 0 ? r->args.chunk : DEFAULT_ITEM;
    size_t element = r->checksum ? 1 : side_type_bytes(r->from);

    if (r->bytes % element != 0) {
        say("input '%s' has %llu bytes, which is no multiple of %zu, the size of an %s", r->args.input,
            (unsigned long long)r->bytes, element, side_type_name(r->from));
        return EXIT_FAILED;
    }
    /* XXH3 folds whole blocks but never the last byte, which belongs to the tail. */
    if (!r->checksum)
        r->source_bytes = r->bytes;
    else
        r->source_bytes = r->bytes > SHORT ? (r->bytes - 1) / BLOCK * BLOCK : 0;
    if (item > r->source_bytes)
        item = r->source_bytes;
    item = (item + BLOCK - 1) / BLOCK * BLOCK;
    r->item_bytes = (size_t)item;
    r->result_bytes = r->checksum ? (size_t)item / BLOCK * SUMS : (size_t)item / element * side_type_bytes(r->to);
    return EXIT_DONE;
}

static int compute(void *user, side_stream *stream, side_item *item)
{
    struct run *r = user;
    side_op op = SIDE_OP_INIT;

    op.in[0] = item->data;
    op.out = item->result;
    if (r->checksum) {
        op.id = SIDE_OP_XXH3_BLOCKS;
        op.dim[0] = item->bytes / BLOCK;
        op.type[0] = op.type[1] = SIDE_U8;
        item->result_bytes = (size_t)op.dim[0] * SUMS;
    } else {
        op.id = SIDE_OP_CAST;
        op.dim[0] = item->bytes / side_type_bytes(r->from);
        op.type[0] = r->from;
        op.type[1] = r->to;
        item->result_bytes = (size_t)op.dim[0] * side_type_bytes(r->to);
    }
    if (side_op_async(stream, &op) == SIDE_OK)
        return 0;
    r->kept = *side_last_error();
    return 1;
}

static int fold(void *user, uint64_t item, const void *data, size_t bytes)
{
    struct run *r = user;

    (void)item;
    side_xxh3_fold(&r->fold, data, bytes / SUMS);
    return 0;
}

void run_op_fill(struct run *r, side_pipeline_options *o)
{
    o->item_bytes = r->item_bytes;
    o->result_bytes = r->result_bytes;
    o->source = side_source_file(r->fd, 0, r->source_bytes);
    o->compute = compute;
    o->compute_user = r;
    o->sink = r->checksum ? side_sink_callback(fold, r) : side_sink_file(r->output.fd, 0);
    side_xxh3_begin(&r->fold);
}

int run_op_finish(struct run *r)
{
    unsigned char tail[TAIL];
    size_t want = r->bytes < TAIL ? (size_t)r->bytes : TAIL, have = 0;
    side_status status;

    if (!r->checksum)
        return EXIT_DONE;
    while (have < want) {
        ssize_t n = pread(r->fd, tail + have, want - have, (off_t)(r->bytes - want + have));

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            say("reading '%s': %s", r->args.input, n < 0 ? strerror(errno) : "it became shorter meanwhile");
            return EXIT_FAILED;
        }
        have += (size_t)n;
    }
    status = side_xxh3_end(&r->fold, tail, want, r->bytes, &r->hash);
    return status == SIDE_OK ? EXIT_DONE : say_status(status, "checksum of '%s'", r->args.input);
}
