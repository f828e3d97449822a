/* SPDX-License-Identifier: MIT
 *
 * The layout and the header of a safetensors file, byte for byte as the reference implementation makes them. What is made is read again by our own
 * strict reader before anybody gets it: so whatever is written can be read. */
#include "checkpoint.h"

#include "alloc.h"
#include "error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char where[] = "side_writer_create";

/* ---------------------------------------------------------------- order */

static int by_type_and_name(const void *a, const void *b, void *of)
{
    const side_tensor *tensors = of, *x = &tensors[*(const size_t *)a], *y = &tensors[*(const size_t *)b];
    const size_t least = x->name_bytes < y->name_bytes ? x->name_bytes : y->name_bytes;
    int order;

    if (x->type != y->type)
        return x->type > y->type ? -1 : 1;
    order = memcmp(x->name, y->name, least);
    return order != 0 ? order : x->name_bytes < y->name_bytes ? -1 : x->name_bytes > y->name_bytes;
}

static side_status check_tensor(const side_tensor *t, size_t index, uint64_t *bytes)
{
    char shown[CK_NAME_SHOWN];
    uint64_t elements;

    if (t->name == NULL || (t->dims == NULL && t->rank != 0))
        return error_set(SIDE_INVALID, where, "tensor %zu: %s is NULL", index, t->name == NULL ? "name" : "dims");
    ck_escaped(t->name, t->name_bytes, shown);
    if ((unsigned)t->type >= SIDE_DTYPE_COUNT)
        return error_set(SIDE_INVALID, where, "tensor %zu \"%s\": dtype %u is unknown", index, shown, (unsigned)t->type);
    if (t->rank > SIDE_RANK_MOST)
        return error_set(SIDE_INVALID, where, "tensor %zu \"%s\": %u dimensions; %d are possible", index, shown,
                         t->rank, SIDE_RANK_MOST);
    if (t->name_bytes == 12 && memcmp(t->name, "__metadata__", 12) == 0)
        return error_set(SIDE_INVALID, where, "tensor %zu: a tensor cannot be named __metadata__", index);
    if (!ck_sizes(t->dims, t->rank, side_dtype_bits(t->type), &elements, bytes))
        return error_set(SIDE_INVALID, where, "tensor %zu \"%s\": more bytes than 64 bits hold", index, shown);
    if (*bytes == UINT64_MAX)
        return error_set(SIDE_INVALID, where,
                         "tensor %zu \"%s\": %llu elements of %u bits fill no whole number of bytes", index, shown,
                         (unsigned long long)elements, side_dtype_bits(t->type));
    return SIDE_OK;
}

/* ---------------------------------------------------------------- text */

struct text {
    char *data;
    size_t bytes, most;
    side_status status; /* the first error; what follows is dropped */
};

static void put(struct text *t, const char *data, size_t bytes)
{
    void *items = t->data;

    if (t->status == SIDE_OK && t->bytes + bytes > (size_t)CK_HEADER_MOST + 8)
        t->status = error_set(SIDE_TOO_LARGE, where, "a header of over %u bytes; write several files", CK_HEADER_MOST);
    if (t->status != SIDE_OK)
        return;
    t->status = ck_reserve(&items, &t->most, t->bytes, bytes + CK_TEXT_SPARE, 1);
    t->data = items;
    if (t->status == SIDE_OK) {
        memcpy(t->data + t->bytes, data, bytes);
        t->bytes += bytes;
    }
}

static void put_plain(struct text *t, const char *text)
{
    put(t, text, strlen(text));
}

/* Escapes as serde_json: the short forms where there are any, else \u00xx; all else as it is. */
static void put_quoted(struct text *t, const char *text, size_t bytes)
{
    static const char *const shorts[32] = {
        ['\b'] = "\\b", ['\t'] = "\\t", ['\n'] = "\\n", ['\f'] = "\\f", ['\r'] = "\\r"};
    size_t plain = 0;

    put_plain(t, "\"");
    for (size_t i = 0; i < bytes; i++) {
        const unsigned char c = (unsigned char)text[i];
        char escaped[8];
        if (c >= 0x20 && c != '"' && c != '\\')
            continue;
        put(t, text + plain, i - plain);
        plain = i + 1;
        if (c >= 0x20)
            snprintf(escaped, sizeof(escaped), "\\%c", c);
        else if (shorts[c] != NULL)
            snprintf(escaped, sizeof(escaped), "%s", shorts[c]);
        else
            snprintf(escaped, sizeof(escaped), "\\u%04x", c);
        put_plain(t, escaped);
    }
    put(t, text + plain, bytes - plain);
    put_plain(t, "\"");
}

static void put_number(struct text *t, uint64_t value)
{
    char text[24];

    snprintf(text, sizeof(text), "%llu", (unsigned long long)value);
    put_plain(t, text);
}

static void put_metadata(struct text *t, const side_writer_options *o)
{
    put_plain(t, "\"__metadata__\":{");
    for (size_t i = 0; i < o->metadata_count; i++) {
        const char *key = o->metadata[2 * i], *value = o->metadata[2 * i + 1];
        put_plain(t, i > 0 ? "," : "");
        put_quoted(t, key, strlen(key));
        put_plain(t, ":");
        put_quoted(t, value, strlen(value));
    }
    put_plain(t, "}");
}

static void put_tensor(struct text *t, const side_tensor *tensor, uint64_t begin, uint64_t end)
{
    put_quoted(t, tensor->name, tensor->name_bytes);
    put_plain(t, ":{\"dtype\":\"");
    put_plain(t, side_dtype_name(tensor->type));
    put_plain(t, "\",\"shape\":[");
    for (uint32_t i = 0; i < tensor->rank; i++) {
        put_plain(t, i > 0 ? "," : "");
        put_number(t, tensor->dims[i]);
    }
    put_plain(t, "],\"data_offsets\":[");
    put_number(t, begin);
    put_plain(t, ",");
    put_number(t, end);
    put_plain(t, "]}");
}

/* ---------------------------------------------------------------- layout */

/* Reads a copy, since reading changes it. */
static side_status check_by_reading(const struct st_layout *layout, const char *path)
{
    side_checkpoint *ck = mem_zalloc(1, sizeof(*ck));
    struct ck_file *file = mem_zalloc(1, sizeof(*file));
    const size_t bytes = layout->header_bytes - 8;
    side_status s = SIDE_NO_MEMORY;

    if (ck != NULL && file != NULL) {
        char *own = mem_zalloc(1, strlen(path) + 1);
        *file = (struct ck_file){.path = own, .fd = -1, .bytes = layout->file_bytes, .data = layout->header_bytes};
        ck->files = file;
        ck->file_count = 1;
        file->text = mem_zalloc(1, bytes + CK_TEXT_SPARE);
        file->text_bytes = bytes;
        if (own != NULL && file->text != NULL) {
            strcpy(own, path);
            memcpy(file->text, layout->header + 8, bytes);
            s = st_parse(ck, file);
            s = s == SIDE_OK ? ck_file_finish(ck, file) : s;
        }
        side_checkpoint_close(ck);
        return s;
    }
    mem_free(ck);
    mem_free(file);
    return s;
}

/* The text in order, with its length before it and padded; and where each tensor lies in the data. */
static side_status make_header(struct st_layout *layout, const side_tensor *tensors, const size_t *order, size_t count,
                               const side_writer_options *o)
{
    struct text t = {.status = SIDE_OK};
    uint64_t at = 0;

    put(&t, "\0\0\0\0\0\0\0\0{", 9);
    if (o->metadata != NULL)
        put_metadata(&t, o);
    for (size_t k = 0; t.status == SIDE_OK && k < count; k++) {
        const size_t i = order[k];
        layout->begin[i] = at;
        if (__builtin_add_overflow(at, layout->bytes[i], &at) || at > INT64_MAX - CK_HEADER_MOST - 16)
            t.status = error_set(SIDE_INVALID, where, "tensor %zu: all together have more bytes than a file can", i);
        put_plain(&t, k > 0 || o->metadata != NULL ? "," : "");
        put_tensor(&t, &tensors[i], layout->begin[i], at);
    }
    put_plain(&t, "}");
    while (t.status == SIDE_OK && t.bytes % 8 != 0)
        put_plain(&t, " ");
    for (int i = 0; t.status == SIDE_OK && i < 8; i++)
        t.data[i] = (char)((t.bytes - 8) >> (8 * i));
    layout->header = t.data;
    layout->header_bytes = t.bytes;
    layout->file_bytes = t.bytes + at;
    for (size_t i = 0; i < count; i++)
        layout->begin[i] += t.bytes;
    return t.status;
}

static side_status check_metadata(const side_writer_options *o)
{
    if (o->metadata_count != 0 && o->metadata == NULL)
        return error_set(SIDE_INVALID, where, "metadata is NULL");
    for (size_t i = 0; i < 2 * o->metadata_count; i++)
        if (o->metadata[i] == NULL)
            return error_set(SIDE_INVALID, where, "metadata %zu: the %s is NULL", i / 2, i % 2 == 0 ? "key" : "value");
    return SIDE_OK;
}

side_status st_layout_make(struct st_layout *layout, const char *path, const side_tensor *tensors, size_t count,
                           const side_writer_options *options)
{
    size_t *order = mem_zalloc(count, sizeof(*order));
    side_status s = check_metadata(options);

    *layout = (struct st_layout){.begin = mem_zalloc(count, sizeof(uint64_t)),
                                 .bytes = mem_zalloc(count, sizeof(uint64_t))};
    if (s == SIDE_OK && (order == NULL || layout->begin == NULL || layout->bytes == NULL))
        s = SIDE_NO_MEMORY;
    for (size_t i = 0; s == SIDE_OK && i < count; i++) {
        order[i] = i;
        s = check_tensor(&tensors[i], i, &layout->bytes[i]);
    }
    if (s == SIDE_OK) {
        union {
            const side_tensor *in;
            void *out;
        } of = {.in = tensors};
        qsort_r(order, count, sizeof(*order), by_type_and_name, of.out);
        s = make_header(layout, tensors, order, count, options);
    }
    if (s == SIDE_OK)
        s = check_by_reading(layout, path);
    mem_free(order);
    if (s != SIDE_OK)
        st_layout_free(layout);
    return s;
}

void st_layout_free(struct st_layout *layout)
{
    mem_free(layout->begin);
    mem_free(layout->bytes);
    mem_free(layout->header);
    *layout = (struct st_layout){0};
}
