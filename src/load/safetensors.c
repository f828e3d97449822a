/* SPDX-License-Identifier: MIT
 *
 * The header of a safetensors file: JSON of a fixed grammar, read in one pass and refused at the first byte that is wrong.
 *
 *     { "__metadata__": {"key": "text", ...}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ... }
 *
 * Pure but for the table's allocations. */
#include "checkpoint.h"

#include "alloc.h"
#include "error.h"
#include "json.h"

#include <stdlib.h>
#include <string.h>

static const char where[] = "side_checkpoint_open";

#ifdef SIDE_TESTING
bool st_test_by_tokens;
#else
enum { st_test_by_tokens = 0 };
#endif

/* The least that an entry takes: "":{"dtype":"U8","shape":[],"data_offsets":[0,0]} and a comma. */
#define ENTRY_LEAST 50

struct st {
    side_checkpoint *ck;
    struct ck_file *file;
    jread r;
    bool lenient;
    bool metadata; /* was there */
};

/* What is known of the tensor that is read. */
struct entry {
    bool has_type, has_shape, has_offsets;
    side_dtype type;
    uint32_t rank;
    size_t dims; /* in the pool */
    uint64_t begin, end;
    size_t type_at, shape_at, offsets_at; /* for messages */
};

/* The string or key that was read last, unescaped where it lies, NUL-terminated over its closing quote or before. */
static side_status in_place(struct st *st, uint32_t *at)
{
    char *text = st->file->text + st->r.at;
    const size_t bytes = st->r.end - st->r.at;

    *at = (uint32_t)st->r.at;
    if (st->r.escaped)
        return jread_text(&st->r, text, bytes + 1, NULL);
    text[bytes] = '\0';
    return SIDE_OK;
}

/* The error is of a byte of the header; `at` in the header. */
static side_status fail_at(struct st *st, size_t at, const char *what)
{
    st->r.at = at;
    return jread_fail(&st->r, "%s", what);
}

/* Adds the tensor to the error of its entry. */
static side_status name_error(const struct st *st, uint32_t name, side_status s)
{
    char shown[CK_NAME_SHOWN];
    const char *text = st->file->text + name;
    side_error e;

    if (s != SIDE_INVALID)
        return s;
    error_copy(&e);
    return error_set(s, where, "%.190s; tensor \"%s\"", e.message, ck_escaped(text, strlen(text), shown));
}

/* ---------------------------------------------------------------- metadata */

struct pair_at {
    const char *key;
    size_t pair;
};

static int by_key(const void *a, const void *b)
{
    const struct pair_at *x = a, *y = b;
    const int order = strcmp(x->key, y->key);

    return order != 0 ? order : x->pair < y->pair ? -1 : 1;
}

/* A key that stands twice is an error at the second; lenient: the last counts. */
static side_status check_keys(struct st *st)
{
    struct ck_file *file = st->file;
    const size_t n = file->pair_count;
    struct pair_at *sorted = mem_zalloc(n, sizeof(*sorted));
    size_t kept = 0;
    side_status s = sorted != NULL ? SIDE_OK : SIDE_NO_MEMORY;

    for (size_t i = 0; s == SIDE_OK && i < n; i++)
        sorted[i] = (struct pair_at){file->text + file->pairs[i].key, i};
    if (s == SIDE_OK)
        qsort(sorted, n, sizeof(*sorted), by_key);
    for (size_t i = 1; s == SIDE_OK && i < n; i++)
        if (strcmp(sorted[i - 1].key, sorted[i].key) == 0) {
            if (!st->lenient)
                s = fail_at(st, file->pairs[sorted[i].pair].key, "the key stands twice in __metadata__");
            file->pairs[sorted[i - 1].pair].value = 0; /* no value lies there */
        }
    for (size_t i = 0; s == SIDE_OK && i < n; i++)
        if (file->pairs[i].value != 0)
            file->pairs[kept++] = file->pairs[i];
    file->pair_count = kept;
    mem_free(sorted);
    return s;
}

static side_status metadata_pairs(struct st *st)
{
    struct ck_file *file = st->file;
    void *pairs;
    jread_token token;
    side_status s = SIDE_OK;

    while (s == SIDE_OK && (token = jread_next(&st->r)) == JREAD_KEY) {
        struct ck_pair pair;
        pairs = file->pairs;
        s = ck_reserve(&pairs, &file->pair_most, file->pair_count, 1, sizeof(*file->pairs));
        file->pairs = pairs;
        if (s == SIDE_OK)
            s = in_place(st, &pair.key);
        if (s == SIDE_OK)
            s = jread_expect(&st->r, JREAD_STRING);
        if (s == SIDE_OK)
            s = in_place(st, &pair.value);
        if (s == SIDE_OK)
            file->pairs[file->pair_count++] = pair;
    }
    if (s != SIDE_OK || token != JREAD_OBJECT_END)
        return s != SIDE_OK ? s : SIDE_INVALID;
    return check_keys(st);
}

static side_status metadata(struct st *st)
{
    jread_token token;

    if (st->metadata)
        return jread_fail(&st->r, "__metadata__ stands twice");
    st->metadata = true;
    token = jread_next(&st->r);
    if (token == JREAD_ERROR || (token == JREAD_NULL && st->lenient))
        return token == JREAD_ERROR ? SIDE_INVALID : SIDE_OK;
    if (token != JREAD_OBJECT)
        return jread_fail(&st->r, "__metadata__ is not an object of texts");
    return metadata_pairs(st);
}

/* ---------------------------------------------------------------- a tensor */

static side_status type_name(struct st *st, struct entry *e)
{
    char text[64];
    size_t bytes = 0;
    side_status s = SIDE_OK;

    e->type_at = st->r.at;
    if (st->r.escaped)
        s = jread_text(&st->r, text, sizeof(text), &bytes);
    if (s == SIDE_OK && !dtype_of(st->r.escaped ? text : st->r.text + st->r.at,
                                  st->r.escaped ? bytes : st->r.end - st->r.at, &e->type)) {
        char shown[CK_NAME_SHOWN];
        ck_escaped(st->r.text + st->r.at, st->r.end - st->r.at, shown);
        s = jread_fail(&st->r, "\"%.40s\" is no dtype that there is", shown);
    }
    e->has_type = s == SIDE_OK;
    return s;
}

/* "F32"; lenient: also {"F32": null}. */
static side_status read_type(struct st *st, struct entry *e)
{
    const jread_token token = jread_next(&st->r);
    side_status s;

    if (token == JREAD_STRING)
        return type_name(st, e);
    if (token != JREAD_OBJECT || !st->lenient)
        return jread_fail(&st->r, "dtype is not a text");
    if (jread_next(&st->r) != JREAD_KEY)
        return jread_fail(&st->r, "dtype is not a text");
    s = type_name(st, e);
    if (s == SIDE_OK)
        s = jread_expect(&st->r, JREAD_NULL);
    return s == SIDE_OK ? jread_expect(&st->r, JREAD_OBJECT_END) : s;
}

static side_status read_shape(struct st *st, struct entry *e)
{
    side_checkpoint *ck = st->ck;
    jread_token token;
    side_status s = jread_expect(&st->r, JREAD_ARRAY);
    uint64_t dim = 0;

    e->shape_at = st->r.at;
    e->dims = ck->dim_count;
    e->rank = 0;
    while (s == SIDE_OK && (token = jread_next(&st->r)) != JREAD_ARRAY_END) {
        if (token != JREAD_NUMBER_VALUE)
            return jread_fail(&st->r, "a dimension is not a number");
        if (e->rank == SIDE_RANK_MOST)
            return jread_fail(&st->r, "more than %d dimensions", SIDE_RANK_MOST);
        s = jread_whole(&st->r, 0, UINT64_MAX, &dim);
        if (s == SIDE_OK)
            s = ck_dim_add(ck, dim);
        e->rank++;
    }
    e->has_shape = s == SIDE_OK;
    return s;
}

static side_status read_offsets(struct st *st, struct entry *e)
{
    side_status s = jread_expect(&st->r, JREAD_ARRAY);

    e->offsets_at = st->r.at;
    if (s == SIDE_OK)
        s = jread_u64(&st->r, 0, UINT64_MAX, &e->begin);
    if (s == SIDE_OK)
        s = jread_u64(&st->r, 0, UINT64_MAX, &e->end);
    if (s == SIDE_OK)
        s = jread_expect(&st->r, JREAD_ARRAY_END);
    e->has_offsets = s == SIDE_OK;
    return s;
}

static side_status read_field(struct st *st, struct entry *e)
{
    const bool type = jread_is(&st->r, "dtype"), shape = jread_is(&st->r, "shape");
    const bool offsets = !type && !shape && jread_is(&st->r, "data_offsets");

    if ((type && e->has_type) || (shape && e->has_shape) || (offsets && e->has_offsets))
        return jread_fail(&st->r, "%s stands twice", type ? "dtype" : shape ? "shape" : "data_offsets");
    if (type)
        return read_type(st, e);
    if (shape)
        return read_shape(st, e);
    if (offsets)
        return read_offsets(st, e);
    if (st->lenient)
        return jread_skip(&st->r);
    return jread_fail(&st->r,
                      "an unknown field; a tensor has dtype, shape and data_offsets alone (lenient passes over it)");
}

static side_status check_entry(struct st *st, const struct entry *e)
{
    uint64_t elements, bytes;

    if (!e->has_type || !e->has_shape || !e->has_offsets)
        return jread_fail(&st->r, "the tensor has no %s",
                          !e->has_type    ? "dtype"
                          : !e->has_shape ? "shape"
                                          : "data_offsets");
    if (e->end < e->begin)
        return fail_at(st, e->offsets_at, "data_offsets end before they begin");
    if (!ck_sizes(ck_dims(st->ck, e->dims), e->rank, side_dtype_bits(e->type), &elements, &bytes))
        return fail_at(st, e->shape_at, "the product of the shape and the dtype's bits is more than 64 bits hold");
    if (bytes == UINT64_MAX) {
        st->r.at = e->shape_at;
        return jread_fail(&st->r, "%llu elements of %u bits fill no whole number of bytes",
                          (unsigned long long)elements, side_dtype_bits(e->type));
    }
    if (bytes != e->end - e->begin) {
        st->r.at = e->offsets_at;
        return jread_fail(&st->r, "shape and dtype make %llu bytes, data_offsets span %llu", (unsigned long long)bytes,
                          (unsigned long long)(e->end - e->begin));
    }
    return SIDE_OK;
}

/* ---------------------------------------------------------------- the usual form */

struct scan {
    const char *at, *end;
};

static bool scan_text(struct scan *s, const char *text, size_t bytes)
{
    if ((size_t)(s->end - s->at) < bytes || memcmp(s->at, text, bytes) != 0)
        return false;
    s->at += bytes;
    return true;
}

/* Of up to 19 digits, which 64 bits hold. */
static bool scan_whole(struct scan *s, uint64_t *value)
{
    const char *first = s->at;

    for (*value = 0; s->at < s->end && *s->at >= '0' && *s->at <= '9' && s->at - first < 20; s->at++)
        *value = *value * 10 + (uint64_t)(*s->at - '0');
    return s->at > first && s->at - first < 20 && (*first != '0' || s->at == first + 1);
}

static bool scan_type(struct scan *s, struct entry *e)
{
    const char *first = s->at;

    while (s->at < s->end && *s->at != '"' && s->at - first < 16)
        s->at++;
    return dtype_of(first, (size_t)(s->at - first), &e->type);
}

static bool scan_shape(struct st *st, struct scan *s, struct entry *e)
{
    uint64_t dim;

    if (s->at < s->end && *s->at == ']')
        return true;
    do {
        if (e->rank == SIDE_RANK_MOST || !scan_whole(s, &dim) || ck_dim_add(st->ck, dim) != SIDE_OK)
            return false;
        e->rank++;
    } while (scan_text(s, ",", 1));
    return true;
}

/* As the reference implementation writes tensors, and so nearly every file: without blanks, the fields in this order. A third of the time of the way through
 * tokens. Whatever is different in any way is left to that, which knows what may be, and the errors. */
static bool entry_usual(struct st *st, struct entry *e)
{
    static const char type[] = "{\"dtype\":\"", shape[] = "\",\"shape\":[", offsets[] = "],\"data_offsets\":[";
    size_t left;
    const char *text = jread_rest(&st->r, &left), *header = st->r.text;
    struct scan s = {text, text + left};
    const size_t dims = st->ck->dim_count;

    e->dims = dims;
    e->type_at = (size_t)(s.at - header) + sizeof(type) - 1;
    if (scan_text(&s, type, sizeof(type) - 1) && scan_type(&s, e) && scan_text(&s, shape, sizeof(shape) - 1)) {
        e->shape_at = (size_t)(s.at - header) - 1;
        if (scan_shape(st, &s, e) && scan_text(&s, offsets, sizeof(offsets) - 1)) {
            e->offsets_at = (size_t)(s.at - header) - 1;
            if (scan_whole(&s, &e->begin) && scan_text(&s, ",", 1) && scan_whole(&s, &e->end) && scan_text(&s, "]}", 2)) {
                e->has_type = e->has_shape = e->has_offsets = true;
                jread_passed(&st->r, (size_t)(s.at - text));
                return true;
            }
        }
    }
    st->ck->dim_count = dims;
    *e = (struct entry){.type = SIDE_DTYPE_U8};
    return false;
}

static side_status entry_fields(struct st *st, struct entry *e)
{
    jread_token token = jread_next(&st->r);
    side_status s = SIDE_OK;

    if (token == JREAD_ARRAY && st->lenient) {
        s = read_type(st, e);
        s = s == SIDE_OK ? read_shape(st, e) : s;
        s = s == SIDE_OK ? read_offsets(st, e) : s;
        return s == SIDE_OK ? jread_expect(&st->r, JREAD_ARRAY_END) : s;
    }
    if (token != JREAD_OBJECT)
        return jread_fail(&st->r, "the value is not an object with dtype, shape and data_offsets");
    while (s == SIDE_OK && (token = jread_next(&st->r)) == JREAD_KEY)
        s = read_field(st, e);
    return s != SIDE_OK || token == JREAD_OBJECT_END ? s : SIDE_INVALID;
}

static side_status tensor(struct st *st)
{
    side_checkpoint *ck = st->ck;
    struct entry e = {.type = SIDE_DTYPE_U8};
    uint32_t name = 0;
    side_status s = in_place(st, &name);

    if (s != SIDE_OK)
        return s;
    if (st_test_by_tokens || !entry_usual(st, &e))
        s = entry_fields(st, &e);
    if (s == SIDE_OK)
        s = check_entry(st, &e);
    if (s != SIDE_OK)
        return name_error(st, name, s);
    return ck_row_add(
        ck, st->file,
        (struct ck_row){
            .begin = e.begin, .name = name, .dims = (uint32_t)e.dims, .type = (uint8_t)e.type, .rank = (uint8_t)e.rank});
}

/* ---------------------------------------------------------------- the header */

static side_status reserve(struct st *st)
{
    side_checkpoint *ck = st->ck;
    const char *text = st->file->text, *end = text + st->file->text_bytes;
    size_t braces = 0, most = st->file->text_bytes / ENTRY_LEAST + 1;
    void *rows = ck->rows;
    side_status s;

    for (; (text = memchr(text, '{', (size_t)(end - text))) != NULL; text++)
        braces++;
    s = ck_reserve(&rows, &ck->row_most, ck->row_count, braces < most ? braces : most, sizeof(*ck->rows));
    ck->rows = rows;
    return s;
}

/* The format allows no blank before the object, and spaces alone behind it. */
static side_status strict_blanks(struct st *st, size_t end)
{
    const char *text = st->file->text;
    size_t i;

    if (st->file->text_bytes != 0 && text[0] != '{')
        return fail_at(st, 0, "the header does not begin with '{'");
    for (i = end; i < st->file->text_bytes; i++)
        if (text[i] != ' ')
            return fail_at(st, i, "behind the header's '}' stands something else than a space");
    return SIDE_OK;
}

side_status st_parse(side_checkpoint *ck, struct ck_file *file)
{
    struct st st = {.ck = ck, .file = file, .lenient = (ck->flags & SIDE_CHECKPOINT_LENIENT) != 0};
    jread_token token = JREAD_ERROR;
    side_status s = reserve(&st);
    size_t end;

    jread_begin(&st.r, file->path, file->text, file->text_bytes, NULL, 0);
    jread_within(&st.r, 8);
    if (s == SIDE_OK && (ck->flags & SIDE_CHECKPOINT_STRICT_SPEC) != 0)
        s = strict_blanks(&st, file->text_bytes);
    if (s == SIDE_OK)
        s = jread_expect(&st.r, JREAD_OBJECT);
    while (s == SIDE_OK && (token = jread_next(&st.r)) == JREAD_KEY)
        s = jread_is(&st.r, "__metadata__") ? metadata(&st) : tensor(&st);
    if (s != SIDE_OK || token != JREAD_OBJECT_END)
        return s != SIDE_OK ? s : SIDE_INVALID;
    end = st.r.end;
    s = jread_expect(&st.r, JREAD_END);
    if (s == SIDE_OK && (ck->flags & SIDE_CHECKPOINT_STRICT_SPEC) != 0)
        s = strict_blanks(&st, end);
    return s;
}
