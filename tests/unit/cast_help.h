/* SPDX-License-Identifier: MIT
 *
 * For tests of casts: an input of every type, what it becomes, and casts of it on the software device. */
#ifndef CAST_HELP_H
#define CAST_HELP_H

#include "alloc.h"
#include "checkpoint_help.h"
#include "ops.h"
#include "os.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---------------------------------------------------------------- inputs, and what they become */

struct tensor {
    const char *name, *type; /* as in a header */
    size_t elements, width;
    size_t at; /* in the input's data */
    bool kept;
};

/* Given as they lie in the input: neither by type nor by name, at odd places, since the first is of 3 bytes. f64 to f8, none, one and many. */
static struct tensor tensors[] = {
    {"u", "U8", 3, 1, 0, true},        {"z\\\"\\n", "F32", 3001, 4, 0, false}, {"none", "F32", 0, 4, 0, false},
    {"one", "F32", 1, 4, 0, false},    {"a", "F32", 2049, 4, 0, false},        {"b", "F16", 1500, 2, 0, false},
    {"i", "I64", 1025, 8, 0, true},    {"c", "F64", 700, 8, 0, false},         {"s0", "F32", 7, 4, 0, false},
    {"s1", "F32", 5, 4, 0, false},     {"k", "BF16", 5000, 2, 0, false},       {"d", "F8_E4M3", 900, 1, 0, false},
    {"e", "F8_E5M2", 11, 1, 0, false}, {"y", "BOOL", 2, 1, 0, true},           {"m", "F32", 9000, 4, 0, false},
};
enum { TENSORS = sizeof(tensors) / sizeof(tensors[0]) };

static const char *const order[] = {"BOOL", "U8", "F8_E5M2", "F8_E4M3", "F16", "BF16", "F32", "F64", "I64"};
enum { ORDER = sizeof(order) / sizeof(order[0]) };

static inline int rank_of(const char *type)
{
    for (int i = 0; i < ORDER; i++)
        if (strcmp(type, order[i]) == 0)
            return i;
    T_FAIL("type %s", type);
}

static inline side_type type_of(const char *type)
{
    return strcmp(type, "F64") == 0       ? SIDE_F64
           : strcmp(type, "F32") == 0     ? SIDE_F32
           : strcmp(type, "F16") == 0     ? SIDE_F16
           : strcmp(type, "BF16") == 0    ? SIDE_BF16
           : strcmp(type, "F8_E4M3") == 0 ? SIDE_F8E4M3
                                          : SIDE_F8E5M2;
}

struct image {
    unsigned char *data;
    size_t bytes;
};

/* A file of `count` tensors in that order, whose data is `data`, one after another. `pad`: the header ends at any byte. */
static inline struct image make_file(const struct tensor *const *list, const char *const *types,
                                     unsigned char *const *data, const size_t *bytes, size_t count,
                                     const char *metadata, int pad)
{
    char *text = calloc(1, 8192);
    struct image image;
    size_t n = 8, at = 0;

    n += (size_t)sprintf(text + n, "{%s", metadata);
    for (size_t i = 0; i < count; i++) {
        n += (size_t)sprintf(text + n, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%zu],\"data_offsets\":[%zu,%zu]}",
                             i > 0 || *metadata != '\0' ? "," : "", list[i]->name, types[i], list[i]->elements, at,
                             at + bytes[i]);
        at += bytes[i];
    }
    n += (size_t)sprintf(text + n, "}");
    while (pad < 0 ? n % 8 != 0 : n % 8 != (size_t)pad)
        text[n++] = ' ';
    for (int i = 0; i < 8; i++)
        text[i] = (char)((n - 8) >> (8 * i));
    image.data = malloc(n + at);
    image.bytes = n + at;
    memcpy(image.data, text, n);
    free(text);
    for (size_t i = 0; i < count; i++) {
        memcpy(image.data + n, data[i], bytes[i]);
        n += bytes[i];
    }
    return image;
}

static unsigned char *values; /* of the input, tensor after tensor */

static inline struct image make_input(int pad)
{
    const struct tensor *list[TENSORS];
    const char *types[TENSORS];
    unsigned char *data[TENSORS];
    size_t bytes[TENSORS], at = 0;
    t_rng rng = t_rng_make(11);

    values = malloc(1 << 20);
    t_rng_fill(&rng, values, 1 << 20);
    for (size_t i = 0; i < TENSORS; i++) {
        tensors[i].at = at;
        list[i] = &tensors[i];
        types[i] = tensors[i].type;
        data[i] = values + at;
        bytes[i] = tensors[i].elements * tensors[i].width;
        at += bytes[i];
    }
    return make_file(list, types, data, bytes, TENSORS, "\"__metadata__\":{\"b\":\"1\",\"a\\n\":\"2\"}", pad);
}

/* By type and name, each cast by the host. `only`: the one tensor that is; NULL: all that can be. */
static inline struct image make_expected(const char *to, const char *only)
{
    const struct tensor *list[TENSORS];
    const char *types[TENSORS];
    unsigned char *data[TENSORS];
    size_t bytes[TENSORS];
    struct image image;
    size_t count = 0;

    for (size_t i = 0; i < TENSORS; i++) { /* by insertion */
        const struct tensor *t = &tensors[i];
        const bool is_cast = !t->kept && strcmp(t->type, to) != 0 && (only == NULL || strcmp(only, t->name) == 0);
        const char *type = is_cast ? to : t->type;
        size_t k = count++;
        for (; k > 0 && (rank_of(types[k - 1]) < rank_of(type) ||
                         (rank_of(types[k - 1]) == rank_of(type) && strcmp(list[k - 1]->name, t->name) > 0));
             k--) {
            list[k] = list[k - 1];
            types[k] = types[k - 1];
            data[k] = data[k - 1];
            bytes[k] = bytes[k - 1];
        }
        list[k] = t;
        types[k] = type;
        data[k] = malloc(t->elements * 8 + 1);
        bytes[k] = t->elements * (is_cast ? side_type_bytes(type_of(to)) : t->width);
        if (is_cast)
            ops_cast(data[k], values + t->at, t->elements, type_of(t->type), type_of(to));
        else
            memcpy(data[k], values + t->at, bytes[k]);
    }
    image = make_file(list, types, data, bytes, TENSORS, "\"__metadata__\":{\"b\":\"1\",\"a\\n\":\"2\"}", -1);
    for (size_t i = 0; i < TENSORS; i++)
        free(data[i]);
    return image;
}

static inline bool is_file(const char *path, const struct image *image)
{
    unsigned char *data = malloc(image->bytes + 1);
    FILE *f = fopen(path, "rb");
    size_t n = f != NULL ? fread(data, 1, image->bytes + 1, f) : 0;
    bool same = n == image->bytes && memcmp(data, image->data, n) == 0;

    if (f != NULL)
        fclose(f);
    for (size_t i = 0; !same && f != NULL && i < n && i < image->bytes; i++)
        if (data[i] != image->data[i]) {
            printf("%s: byte %zu of %zu is %02x, not %02x\n", path, i, n, data[i], image->data[i]);
            break;
        }
    free(data);
    return same;
}

static inline bool exists(const char *path)
{
    return access(path, F_OK) == 0;
}

/* ---------------------------------------------------------------- rig */

struct rig {
    side_device *dev;
    side_cast_options o;
    char in[300], out[300], part[320], journal[320];
    struct image expected;
};

static inline struct rig rig_make(int pad)
{
    struct rig r = {.o = SIDE_CAST_OPTIONS_INIT};
    struct image input = make_input(pad);

    setenv("LOCAL_WORLD_SIZE", "512", 1); /* a small pool */
    T_OK(side_device_open("sim:h200,check=1", &r.dev));
    snprintf(r.in, sizeof(r.in), "%s/in.safetensors", t_tmpdir());
    snprintf(r.out, sizeof(r.out), "%s/out.safetensors", t_tmpdir());
    snprintf(r.part, sizeof(r.part), "%s.cast-part", r.out);
    snprintf(r.journal, sizeof(r.journal), "%s.cast-journal", r.out);
    write_bytes(r.in, input.data, input.bytes);
    free(input.data);
    r.o.to = SIDE_DTYPE_BF16;
    r.o.piece_bytes = 4096;
    r.o.sync_bytes = 1;
    r.o.threads = r.o.writers = 2;
    r.expected = make_expected("BF16", NULL);
    return r;
}

static inline void rig_free(struct rig *r)
{
    side_device_close(r->dev);
    free(r->expected.data);
    free(values);
}

static inline side_status cast_once(struct rig *r, side_cast_stats *stats)
{
    side_cast *cast = NULL;
    side_status s = side_cast_create(r->in, r->out, &r->o, &cast);

    if (s == SIDE_OK)
        s = side_cast_run(cast, r->dev, stats);
    const side_error kept = *side_last_error();
    side_cast_destroy(cast);
    if (s != SIDE_OK) /* destroying must not have lost it */
        assert_int_equal(kept.status, s);
    return s;
}

static inline void expect_whole(struct rig *r)
{
    assert_true(is_file(r->out, &r->expected));
    assert_false(exists(r->part));
    assert_false(exists(r->journal));
    assert_int_equal(unlink(r->out), 0);
}

struct cancelling {
    side_cast *cast;
    uint64_t after;
};

static inline void cancel_after(void *user, uint64_t done, uint64_t total)
{
    struct cancelling *c = user;

    (void)total;
    if (done >= c->after)
        side_cast_cancel(c->cast);
}

/* Leaves an unfinished output of about half. */
static inline void leave_half(struct rig *r)
{
    struct cancelling c = {NULL, 60000};

    r->o.progress = cancel_after;
    r->o.progress_user = &c;
    for (int i = 0; i < 100 && !exists(r->part); i++) {
        unlink(r->out);
        T_OK(side_cast_create(r->in, r->out, &r->o, &c.cast));
        const side_status s = side_cast_run(c.cast, r->dev, NULL);
        assert_true(s == SIDE_CANCELLED || s == SIDE_OK); /* it may be through before it hears */
        side_cast_destroy(c.cast);
    }
    r->o.progress = NULL;
    assert_true(exists(r->part) && exists(r->journal));
}

static inline struct image read_file(const char *path)
{
    struct image image = {malloc(1 << 20), 0};
    FILE *f = fopen(path, "rb");

    assert_non_null(f);
    image.bytes = fread(image.data, 1, 1 << 20, f);
    fclose(f);
    return image;
}

static inline void expect_refused(struct rig *r, side_status status, const char *why)
{
    T_STATUS(cast_once(r, NULL), status);
    if (strstr(side_last_error()->message, why) == NULL)
        T_FAIL("'%s' says not '%s'", side_last_error()->message, why);
}

#endif
