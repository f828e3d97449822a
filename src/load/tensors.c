/* SPDX-License-Identifier: MIT
 *
 * The table of tensors: rows in order of their bytes, and names by hash. */
#include "checkpoint.h"

#include "alloc.h"
#include "error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PATH_END 120 /* bytes of a long path that a message shows: its end */

static const char where[] = "side_checkpoint_open";

const char *ck_shown(const char *path)
{
    const size_t n = strlen(path);

    return path + (n > PATH_END ? n - PATH_END : 0);
}

const char *ck_escaped(const char *name, size_t bytes, char shown[CK_NAME_SHOWN])
{
    size_t used = 0, i;

    for (i = 0; i < bytes && used + 8 < CK_NAME_SHOWN; i++) {
        const unsigned char c = (unsigned char)name[i];
        if (c == '"' || c == '\\')
            used += (size_t)snprintf(shown + used, CK_NAME_SHOWN - used, "\\%c", c);
        else if (c >= 0x20 && c < 0x7f)
            shown[used++] = (char)c;
        else
            used += (size_t)snprintf(shown + used, CK_NAME_SHOWN - used, "\\x%02x", c);
    }
    strcpy(shown + used, i < bytes ? "..." : "");
    return shown;
}

side_status ck_reserve(void **items, size_t *most, size_t count, size_t more, size_t bytes)
{
    size_t want = *most * 2;
    void *made;

    if (count + more <= *most)
        return SIDE_OK;
    if (want < count + more)
        want = count + more;
    made = mem_zalloc(want, bytes);
    if (made == NULL)
        return SIDE_NO_MEMORY;
    if (count != 0)
        memcpy(made, *items, count * bytes);
    mem_free(*items);
    *items = made;
    *most = want;
    return SIDE_OK;
}

static side_status trim(void **items, size_t *most, size_t count, size_t bytes)
{
    void *made;

    if (*most - count <= *most / 16)
        return SIDE_OK;
    made = mem_zalloc(count, bytes);
    if (made == NULL)
        return SIDE_NO_MEMORY;
    if (count != 0)
        memcpy(made, *items, count * bytes);
    mem_free(*items);
    *items = made;
    *most = count;
    return SIDE_OK;
}

side_status ck_trim(side_checkpoint *ck)
{
    void *rows = ck->rows, *dims = ck->dims;
    side_status s = trim(&rows, &ck->row_most, ck->row_count, sizeof(*ck->rows));

    ck->rows = rows;
    if (s == SIDE_OK)
        s = trim(&dims, &ck->dim_most, ck->dim_count, sizeof(*ck->dims));
    ck->dims = dims;
    return s;
}

bool ck_sizes(const uint64_t *dims, uint32_t rank, uint32_t bits, uint64_t *elements, uint64_t *bytes)
{
    uint64_t n = 1, all;

    for (uint32_t i = 0; i < rank; i++)
        if (__builtin_mul_overflow(n, dims[i], &n))
            return false;
    if (__builtin_mul_overflow(n, (uint64_t)bits, &all))
        return false;
    *elements = n;
    *bytes = all % 8 == 0 ? all / 8 : UINT64_MAX;
    return true;
}

uint64_t ck_row_bytes(const side_checkpoint *ck, const struct ck_row *row)
{
    uint64_t elements = 0, bytes = 0;

    (void)ck_sizes(ck_dims(ck, row->dims), row->rank, side_dtype_bits((side_dtype)row->type), &elements, &bytes);
    return bytes;
}

const char *ck_row_name(const side_checkpoint *ck, const struct ck_row *row)
{
    return ck->files[row->file].text + row->name;
}

/* ---------------------------------------------------------------- names */

static uint64_t mix(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;

    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Seeded with an address, so that a file cannot be made whose names all fall into one bucket. */
static size_t bucket_of(const side_checkpoint *ck, const char *name, size_t bytes)
{
    uint64_t h = ck->seed ^ bytes, word;

    for (; bytes >= 8; name += 8, bytes -= 8) {
        memcpy(&word, name, 8);
        h = mix(h ^ word, UINT64_C(0x94d049bb133111eb));
    }
    word = 0;
    memcpy(&word, name, bytes);
    h = mix(h ^ word, UINT64_C(0xe7037ed1a0b428db));
    return (size_t)(((unsigned __int128)h * ck->bucket_count) >> 64);
}

/* The name has no NUL in it: so the other one is read no further than to its own. */
static size_t find_in(const side_checkpoint *ck, size_t bucket, const char *name, size_t bytes)
{
    for (size_t i = ck->buckets[bucket]; i != 0; i = ck->rows[i - 1].next) {
        const char *other = ck_row_name(ck, &ck->rows[i - 1]);
        if (strncmp(other, name, bytes) == 0 && other[bytes] == '\0')
            return i;
    }
    return 0;
}

size_t ck_find(const side_checkpoint *ck, const char *name, size_t bytes)
{
    return ck->bucket_count != 0 && memchr(name, '\0', bytes) == NULL
               ? find_in(ck, bucket_of(ck, name, bytes), name, bytes)
               : 0;
}

static void enter(side_checkpoint *ck, size_t bucket, size_t index)
{
    ck->rows[index].next = ck->buckets[bucket];
    ck->buckets[bucket] = (uint32_t)(index + 1);
}

/* The first `count` rows, whose names differ. */
static void enter_again(side_checkpoint *ck, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const char *name = ck_row_name(ck, &ck->rows[i]);
        enter(ck, bucket_of(ck, name, strlen(name)), i);
    }
}

/* Buckets for all rows, with those before `entered` in them. */
static side_status buckets_reserve(side_checkpoint *ck, size_t entered)
{
    const size_t want = ck->row_most; /* of a header its tensors, of an index all; and grows as rows do */

    if (ck->row_count <= ck->bucket_count)
        return SIDE_OK;
    mem_free(ck->buckets);
    ck->bucket_count = 0;
    ck->buckets = mem_zalloc(want, sizeof(*ck->buckets));
    if (ck->buckets == NULL)
        return SIDE_NO_MEMORY;
    ck->bucket_count = want;
    enter_again(ck, entered);
    return SIDE_OK;
}

static side_status twice(const side_checkpoint *ck, const struct ck_file *file, size_t old, size_t new)
{
    const struct ck_row *a = &ck->rows[old], *b = &ck->rows[new];
    const char *name = ck_row_name(ck, b);
    char shown[CK_NAME_SHOWN];

    ck_escaped(name, strlen(name), shown);
    if (a->file != b->file)
        return error_set(SIDE_INVALID, where,
                         "%s, offset %u: tensor \"%s\" is in %.60s too; name one file, or a folder without one of them",
                         ck_shown(file->path), b->name + 8, shown, ck_shown(ck->files[a->file].path));
    return error_set(SIDE_INVALID, where, "%s, offset %u: tensor \"%s\" stands twice, at offset %u too",
                     ck_shown(file->path), (a->name > b->name ? a : b)->name + 8, shown,
                     (a->name > b->name ? b : a)->name + 8);
}

#define DROPPED 255 /* rank of a row that goes */

static void drop_marked(side_checkpoint *ck, const struct ck_file *file)
{
    size_t kept = file->first;

    for (size_t i = file->first; i < ck->row_count; i++)
        if (ck->rows[i].rank != DROPPED)
            ck->rows[kept++] = ck->rows[i];
    ck->row_count = kept;
    memset(ck->buckets, 0, ck->bucket_count * sizeof(*ck->buckets));
    enter_again(ck, kept);
}

/* Lenient: of the rows of one name the one that comes last in the header stays. A bucket's latest is found first, so a dropped one is not found again. */
static side_status enter_file(side_checkpoint *ck, struct ck_file *file)
{
    side_status s = buckets_reserve(ck, file->first);
    bool dropped = false;

    for (size_t i = file->first; s == SIDE_OK && i < ck->row_count; i++) {
        const char *name = ck_row_name(ck, &ck->rows[i]);
        const size_t bytes = strlen(name), bucket = bucket_of(ck, name, bytes);
        const size_t old = find_in(ck, bucket, name, bytes);
        if (old != 0 && ((ck->flags & SIDE_CHECKPOINT_LENIENT) == 0 || ck->rows[old - 1].file != ck->rows[i].file))
            return twice(ck, file, old - 1, i);
        dropped |= old != 0;
        if (old != 0 && ck->rows[old - 1].name > ck->rows[i].name) {
            ck->rows[i].rank = DROPPED;
            continue;
        }
        if (old != 0)
            ck->rows[old - 1].rank = DROPPED;
        enter(ck, bucket, i);
    }
    if (s == SIDE_OK && dropped)
        drop_marked(ck, file);
    return s;
}

/* ---------------------------------------------------------------- order and cover */

static int by_place(const void *a, const void *b, void *of)
{
    const struct ck_row *x = a, *y = b;
    const side_checkpoint *ck = of;

    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    const uint64_t m = ck_row_bytes(ck, x), n = ck_row_bytes(ck, y);
    if (m != n)
        return m < n ? -1 : 1;
    return x->name < y->name ? -1 : x->name > y->name;
}

static side_status not_covered(const side_checkpoint *ck, const struct ck_file *file, size_t i, uint64_t end)
{
    const struct ck_row *row = &ck->rows[i];
    const char *name = ck_row_name(ck, row);
    char shown[CK_NAME_SHOWN], before[CK_NAME_SHOWN];
    const unsigned long long at = row->begin, had = end;

    ck_escaped(name, strlen(name), shown);
    if (at > had)
        return error_set(
            SIDE_INVALID, where,
            "%s, offset %u: tensor \"%s\" begins at %llu of the data; the %llu bytes before it belong to none",
            ck_shown(file->path), row->name + 8, shown, at, at - had);
    name = ck_row_name(ck, row - 1);
    ck_escaped(name, strlen(name) < 40 ? strlen(name) : 40, before);
    return error_set(SIDE_INVALID, where,
                     "%s, offset %u: tensor \"%s\" begins at %llu of the data, within \"%s\", which ends at %llu",
                     ck_shown(file->path), row->name + 8, shown, at, before, had);
}

static side_status check_cover(const side_checkpoint *ck, const struct ck_file *file)
{
    const uint64_t data = file->bytes - file->data;
    uint64_t end = 0;

    for (size_t i = file->first; i < ck->row_count; i++) {
        if (ck->rows[i].begin != end)
            return not_covered(ck, file, i, end);
        end += ck_row_bytes(ck, &ck->rows[i]); /* begin + bytes was checked */
    }
    if (end > data) {
        const char *name = ck_row_name(ck, &ck->rows[ck->row_count - 1]);
        char shown[CK_NAME_SHOWN];
        return error_set(
            SIDE_INVALID, where,
            "%s, offset %llu: the file ends within tensor \"%s\": %llu bytes of data are missing; it was cut off",
            ck_shown(file->path), (unsigned long long)file->bytes, ck_escaped(name, strlen(name), shown),
            (unsigned long long)(end - data));
    }
    if (end < data)
        return error_set(SIDE_INVALID, where, "%s, offset %llu: %llu bytes behind the last tensor belong to none",
                         ck_shown(file->path), (unsigned long long)(file->data + end), (unsigned long long)(data - end));
    return SIDE_OK;
}

side_status ck_file_finish(side_checkpoint *ck, struct ck_file *file)
{
    bool sorted = true;
    side_status s;

    for (size_t i = file->first + 1; sorted && i < ck->row_count; i++)
        sorted = by_place(&ck->rows[i - 1], &ck->rows[i], ck) <= 0;
    if (!sorted)
        qsort_r(ck->rows + file->first, ck->row_count - file->first, sizeof(*ck->rows), by_place, ck);
    s = enter_file(ck, file);
    if (s == SIDE_OK)
        s = check_cover(ck, file);
    file->count = ck->row_count - file->first;
    return s;
}
