/* SPDX-License-Identifier: MIT
 *
 * .npy files, versions 1 to 3: a magic, a length, and a Python literal
 *
 *     {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
 *
 * with exactly these keys, in any order, and blanks up to the data. */
#include "checkpoint.h"

#include "error.h"

#include <string.h>

#define HEADER_MOST 10000 /* as NumPy */

static const char where[] = "side_checkpoint_open";

struct npy {
    const struct ck_file *file;
    const char *text;
    size_t pos, bytes;
    size_t before; /* bytes of the file before the text */
};

static side_status bad(const struct npy *n, const char *what)
{
    return error_set(SIDE_INVALID, where, "%s, offset %zu: %s", ck_shown(n->file->path), n->before + n->pos, what);
}

static void blanks(struct npy *n)
{
    while (n->pos < n->bytes && (n->text[n->pos] == ' ' || n->text[n->pos] == '\n' || n->text[n->pos] == '\t'))
        n->pos++;
}

/* The next character but blanks is c: passes it. */
static bool passes(struct npy *n, char c)
{
    blanks(n);
    if (n->pos >= n->bytes || n->text[n->pos] != c)
        return false;
    n->pos++;
    return true;
}

static bool word(struct npy *n, const char *text)
{
    const size_t m = strlen(text);

    blanks(n);
    if (n->bytes - n->pos < m || memcmp(n->text + n->pos, text, m) != 0)
        return false;
    n->pos += m;
    return true;
}

/* A text in quotes, without escapes; *at and its bytes. */
static bool quoted(struct npy *n, const char **at, size_t *bytes)
{
    const char *end;
    char quote;

    blanks(n);
    quote = n->pos < n->bytes ? n->text[n->pos] : '\0';
    if (quote != '\'' && quote != '"')
        return false;
    *at = n->text + n->pos + 1;
    end = memchr(*at, quote, n->bytes - n->pos - 1);
    if (end == NULL || memchr(*at, '\\', (size_t)(end - *at)) != NULL)
        return false;
    *bytes = (size_t)(end - *at);
    n->pos += *bytes + 2;
    return true;
}

/* '<f4' and its like. Big-endian and unsized types cannot be moved as they are. */
static side_status descr(struct npy *n, struct ck_row *row)
{
    static const struct {
        const char *code;
        side_dtype type;
    } types[] = {{"b1", SIDE_DTYPE_BOOL}, {"i1", SIDE_DTYPE_I8},  {"u1", SIDE_DTYPE_U8},  {"i2", SIDE_DTYPE_I16},
                 {"u2", SIDE_DTYPE_U16},  {"f2", SIDE_DTYPE_F16}, {"i4", SIDE_DTYPE_I32}, {"u4", SIDE_DTYPE_U32},
                 {"f4", SIDE_DTYPE_F32},  {"c8", SIDE_DTYPE_C64}, {"f8", SIDE_DTYPE_F64}, {"i8", SIDE_DTYPE_I64},
                 {"u8", SIDE_DTYPE_U64}};
    const char *text = NULL;
    size_t bytes = 0;

    blanks(n);
    const size_t at = n->pos;
    if (!quoted(n, &text, &bytes))
        return bad(n, "descr is not a text; structured types cannot be loaded: save each field by itself");
    n->pos = at;
    if (bytes == 3 && (text[0] == '<' || text[0] == '|' || text[0] == '=' || text[0] == '>'))
        for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++)
            if (memcmp(text + 1, types[i].code, 2) == 0) {
                if (text[0] == '>' && text[2] != '1')
                    return bad(n, "big-endian data; save it as array.astype(array.dtype.newbyteorder('<'))");
                row->type = (uint8_t)types[i].type;
                n->pos = at + bytes + 2;
                return SIDE_OK;
            }
    if (bytes > 1 && strchr("<>=|", text[0]) != NULL && text[1] == 'O')
        return bad(n, "an array of Python objects, which is a pickle and is not loaded");
    return bad(n, "descr is no type that can be loaded: b1, i1 to i8, u1 to u8, f2 to f8 and c8 are");
}

static side_status shape(struct npy *n, side_checkpoint *ck, struct ck_row *row)
{
    side_status s = SIDE_OK;
    bool comma = true;

    row->dims = (uint32_t)ck->dim_count;
    row->rank = 0;
    if (!passes(n, '('))
        return bad(n, "shape is not a tuple");
    while (s == SIDE_OK && !passes(n, ')')) {
        uint64_t dim = 0;
        size_t first;
        if (!comma)
            return bad(n, "expected ',' or ')'");
        blanks(n);
        first = n->pos;
        for (; n->pos < n->bytes && n->text[n->pos] >= '0' && n->text[n->pos] <= '9'; n->pos++)
            if (__builtin_mul_overflow(dim, 10, &dim) ||
                __builtin_add_overflow(dim, (uint64_t)(n->text[n->pos] - '0'), &dim))
                return bad(n, "a dimension that more than 64 bits hold");
        if (n->pos == first || (n->text[first] == '0' && n->pos > first + 1))
            return bad(n, "a dimension is not a whole number");
        if (n->pos < n->bytes && n->text[n->pos] == 'L') /* Python 2 */
            n->pos++;
        if (row->rank == SIDE_RANK_MOST)
            return bad(n, "more than 64 dimensions");
        s = ck_dim_add(ck, dim);
        row->rank++;
        comma = passes(n, ',');
    }
    if (s == SIDE_OK && row->rank == 1 && !comma)
        return bad(n, "shape is a number in brackets, not a tuple");
    return s;
}

/* What key names: 0 descr, 1 fortran_order, 2 shape; 3 none. */
static unsigned which(const char *key, size_t bytes)
{
    static const char *const names[] = {"descr", "fortran_order", "shape"};
    unsigned i = 0;

    while (i < 3 && (strlen(names[i]) != bytes || memcmp(names[i], key, bytes) != 0))
        i++;
    return i;
}

static side_status literal(struct npy *n, side_checkpoint *ck, struct ck_row *row, bool *fortran)
{
    unsigned seen = 0;
    side_status s = SIDE_OK;

    if (!passes(n, '{'))
        return bad(n, "the header is not a dictionary");
    while (s == SIDE_OK && !passes(n, '}')) {
        const char *key = NULL;
        size_t bytes = 0;
        if (!quoted(n, &key, &bytes))
            return bad(n, "expected a key in quotes, or '}'");
        const unsigned i = which(key, bytes);
        if (i == 3 || (seen >> i & 1) != 0)
            return bad(n, i == 3 ? "an unknown key; there are descr, fortran_order and shape" : "the key stands twice");
        seen |= 1u << i;
        if (!passes(n, ':'))
            return bad(n, "expected ':'");
        if (i == 1) {
            *fortran = word(n, "True");
            s = *fortran || word(n, "False") ? SIDE_OK : bad(n, "fortran_order is neither True nor False");
        } else
            s = i == 0 ? descr(n, row) : shape(n, ck, row);
        if (s == SIDE_OK && !passes(n, ',') && n->pos < n->bytes && n->text[n->pos] != '}')
            return bad(n, "expected ',' or '}'");
    }
    if (s == SIDE_OK && seen != 7)
        return bad(n, "the header lacks one of descr, fortran_order and shape");
    blanks(n);
    return s != SIDE_OK || n->pos == n->bytes ? s : bad(n, "something stands behind the header's dictionary");
}

/* Where the literal begins and how long it is. */
static side_status preface(struct npy *n, struct ck_file *file)
{
    unsigned char head[12] = {0};
    size_t done = 0;
    side_status s = ck_read_head(file, head, sizeof(head), &done);

    if (s != SIDE_OK)
        return s;
    if (done < 10 || memcmp(head, "\x93NUMPY", 6) != 0)
        return bad(n, "no .npy file: it does not begin with \\x93NUMPY and its version");
    n->pos = 6;
    if (head[6] < 1 || head[6] > 3 || head[7] != 0)
        return error_set(SIDE_INVALID, where, "%s, offset 6: version %u.%u; 1.0, 2.0 and 3.0 can be read",
                         ck_shown(file->path), head[6], head[7]);
    n->before = head[6] == 1 ? 10 : 12;
    n->bytes = head[8] | (size_t)head[9] << 8;
    if (head[6] > 1)
        n->bytes |= (size_t)head[10] << 16 | (size_t)head[11] << 24;
    n->pos = 0;
    if (done < n->before || n->bytes > file->bytes - n->before)
        return error_set(SIDE_INVALID, where,
                         "%s, offset 8: a header of %zu bytes, but the file ends before; it was cut off",
                         ck_shown(file->path), n->bytes);
    if (n->bytes > HEADER_MOST)
        return error_set(SIDE_INVALID, where, "%s, offset 8: a header of %zu bytes; %d are possible",
                         ck_shown(file->path), n->bytes, HEADER_MOST);
    return SIDE_OK;
}

side_status npy_parse(side_checkpoint *ck, struct ck_file *file, struct ck_row *row)
{
    struct npy n = {.file = file};
    uint64_t elements = 0, bytes = 0;
    bool fortran = false;
    unsigned wide = 0;
    side_status s = preface(&n, file);

    if (s == SIDE_OK)
        s = ck_read_text(file, n.before, n.bytes, strlen(file->path) + 1);
    if (s != SIDE_OK)
        return s;
    n.text = file->text;
    file->data = n.before + n.bytes;
    s = literal(&n, ck, row, &fortran);
    if (s != SIDE_OK)
        return s;
    n.pos = 0;
    for (uint32_t i = 0; i < row->rank; i++)
        wide += ck->dims[row->dims + i] != 1;
    if (fortran && wide > 1)
        return bad(&n, "the array is in Fortran order; save numpy.ascontiguousarray(array)");
    if (!ck_sizes(ck_dims(ck, row->dims), row->rank, side_dtype_bits((side_dtype)row->type), &elements, &bytes))
        return bad(&n, "the product of shape and type is more than 64 bits hold");
    return SIDE_OK;
}
