/* SPDX-License-Identifier: MIT
 *
 * Checkpoints of several files: through an index file
 *
 *     {"metadata": {...}, "weight_map": {"name": "model-00001-of-00002.safetensors", ...}}
 *
 * or as the files of a folder. */
#include "checkpoint.h"

#include "alloc.h"
#include "error.h"
#include "json.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char where[] = "side_checkpoint_open";

/* ---------------------------------------------------------------- names of files, sorted, each once */

struct names {
    const char **items;
    size_t count, most;
};

/* The place of a name: where it is, or where it would be. */
static size_t place_of(const struct names *names, const char *name, bool *there)
{
    size_t low = 0, high = names->count;

    *there = false;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        const int order = strcmp(name, names->items[middle]);
        if (order == 0) {
            *there = true;
            return middle;
        }
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static side_status names_add(struct names *names, const char *name, const char *path)
{
    bool there;
    const size_t at = place_of(names, name, &there);
    void *items = names->items;
    side_status s;

    if (there)
        return SIDE_OK;
    if (names->count == CK_FILES_MOST)
        return error_set(SIDE_TOO_LARGE, where, "%s: more than %u files", ck_shown(path), CK_FILES_MOST);
    s = ck_reserve(&items, &names->most, names->count, 1, sizeof(*names->items));
    names->items = items;
    if (s != SIDE_OK)
        return s;
    memmove(names->items + at + 1, names->items + at, (names->count - at) * sizeof(*names->items));
    names->items[at] = name;
    names->count++;
    return SIDE_OK;
}

/* Opens all of them, in `folder_bytes` of `folder`. */
static side_status add_files(side_checkpoint *ck, const char *folder, size_t folder_bytes, const struct names *names)
{
    char path[PATH_MAX];
    side_status s = SIDE_OK;

    for (size_t i = 0; s == SIDE_OK && i < names->count; i++) {
        const int n = snprintf(path, sizeof(path), "%.*s%s", (int)folder_bytes, folder, names->items[i]);
        s = n > 0 && (size_t)n < sizeof(path)
                ? ck_add_file(ck, path, SIDE_FORMAT_SAFETENSORS)
                : error_set(SIDE_INVALID, where, "a path of over %d bytes: %.100s", PATH_MAX - 1, names->items[i]);
    }
    return s;
}

/* ---------------------------------------------------------------- index */

struct entry {
    uint32_t name, shard; /* in the text */
};

struct index {
    struct ck_file file; /* the index itself */
    jread r;
    struct entry *entries;
    size_t count, most;
    struct names shards;
    bool mapped;
};

static side_status entry_text(struct index *x, uint32_t *at)
{
    char *text = x->file.text + x->r.at;
    const size_t bytes = x->r.end - x->r.at;

    *at = (uint32_t)x->r.at;
    if (x->r.escaped)
        return jread_text(&x->r, text, bytes + 1, NULL);
    text[bytes] = '\0';
    return SIDE_OK;
}

/* Below the index's folder, whatever links there are. */
static bool stays_below(const char *name)
{
    if (*name == '\0' || *name == '/')
        return false;
    for (const char *part = name; part != NULL; part = strchr(part, '/')) {
        part += *part == '/';
        if (strcmp(part, "..") == 0 || strncmp(part, "../", 3) == 0)
            return false;
    }
    return true;
}

static side_status read_map(struct index *x)
{
    jread_token token = JREAD_ERROR;
    side_status s = x->mapped ? jread_fail(&x->r, "weight_map stands twice") : jread_expect(&x->r, JREAD_OBJECT);

    x->mapped = true;
    while (s == SIDE_OK && (token = jread_next(&x->r)) == JREAD_KEY) {
        struct entry e = {0};
        void *entries = x->entries;
        s = ck_reserve(&entries, &x->most, x->count, 1, sizeof(*x->entries));
        x->entries = entries;
        if (s == SIDE_OK)
            s = entry_text(x, &e.name);
        if (s == SIDE_OK)
            s = jread_expect(&x->r, JREAD_STRING);
        if (s == SIDE_OK)
            s = entry_text(x, &e.shard);
        if (s == SIDE_OK && !stays_below(x->file.text + e.shard))
            s = jread_fail(&x->r, "a shard outside the index file's folder, or without a name");
        if (s == SIDE_OK)
            s = names_add(&x->shards, x->file.text + e.shard, x->file.path);
        if (s == SIDE_OK)
            x->entries[x->count++] = e;
    }
    return s != SIDE_OK || token == JREAD_OBJECT_END ? s : SIDE_INVALID;
}

static side_status read_index(struct index *x)
{
    jread_token token = JREAD_ERROR;
    side_status s = ck_file_open(&x->file);

    if (s == SIDE_OK && x->file.bytes > CK_HEADER_MOST)
        s = error_set(SIDE_INVALID, where, "%s has %llu bytes; an index file has at most %u", ck_shown(x->file.path),
                      (unsigned long long)x->file.bytes, CK_HEADER_MOST);
    if (s == SIDE_OK)
        s = ck_read_text(&x->file, 0, (size_t)x->file.bytes, 0);
    if (s != SIDE_OK)
        return s;
    jread_begin(&x->r, x->file.path, x->file.text, x->file.text_bytes, NULL, 0);
    jread_within(&x->r, 0); /* what was read is overwritten: lines can no longer be told */
    s = jread_expect(&x->r, JREAD_OBJECT);
    while (s == SIDE_OK && (token = jread_next(&x->r)) == JREAD_KEY)
        s = jread_is(&x->r, "weight_map") ? read_map(x) : jread_skip(&x->r);
    if (s != SIDE_OK || token != JREAD_OBJECT_END)
        return s != SIDE_OK ? s : SIDE_INVALID;
    if (!x->mapped)
        return jread_fail(&x->r, "no weight_map; this is no index of a checkpoint");
    return jread_expect(&x->r, JREAD_END);
}

/* What the index says of a name is so, and it says it once. */
static side_status check_entry(const side_checkpoint *ck, const struct index *x, const struct entry *e,
                               unsigned char *listed)
{
    const char *name = x->file.text + e->name, *shard = x->file.text + e->shard;
    const size_t row = ck_find(ck, name, strlen(name));
    char shown[CK_NAME_SHOWN] = "";
    bool there;

    const bool right = row != 0 && ck->rows[row - 1].file == place_of(&x->shards, shard, &there);
    if (!right || listed[row - 1])
        ck_escaped(name, strlen(name), shown);
    if (!right)
        return error_set(SIDE_INVALID, where, "%s, offset %u: weight_map has tensor \"%s\" in %.80s, but %s%.80s",
                         ck_shown(x->file.path), e->name, shown, shard, row == 0 ? "no shard has it" : "it is in ",
                         row == 0 ? "" : ck_shown(ck->files[ck->rows[row - 1].file].path));
    if (listed[row - 1])
        return error_set(SIDE_INVALID, where, "%s, offset %u: tensor \"%s\" stands twice in weight_map",
                         ck_shown(x->file.path), e->name, shown);
    listed[row - 1] = 1;
    return SIDE_OK;
}

static side_status check_index(const side_checkpoint *ck, const struct index *x)
{
    unsigned char *listed = mem_zalloc(ck->row_count, 1);
    char shown[CK_NAME_SHOWN];
    side_status s = listed != NULL ? SIDE_OK : SIDE_NO_MEMORY;

    for (size_t i = 0; s == SIDE_OK && i < x->count; i++)
        s = check_entry(ck, x, &x->entries[i], listed);
    for (size_t i = 0; s == SIDE_OK && (ck->flags & SIDE_CHECKPOINT_LENIENT) == 0 && i < ck->row_count; i++)
        if (!listed[i]) {
            const char *name = ck_row_name(ck, &ck->rows[i]);
            s = error_set(SIDE_INVALID, where, "%s: tensor \"%s\" of %.100s is not in weight_map (lenient takes it)",
                          ck_shown(x->file.path), ck_escaped(name, strlen(name), shown),
                          ck_shown(ck->files[ck->rows[i].file].path));
        }
    mem_free(listed);
    return s;
}

side_status ck_add_index(side_checkpoint *ck, const char *path)
{
    struct index x = {.file = {.fd = -1}};
    const char *slash = strrchr(path, '/');
    side_status s;

    x.file.path = mem_zalloc(1, strlen(path) + 1);
    if (x.file.path == NULL)
        return SIDE_NO_MEMORY;
    strcpy(x.file.path, path);
    s = read_index(&x);
    if (s == SIDE_OK) {
        void *rows = ck->rows;
        s = ck_reserve(&rows, &ck->row_most, 0, x.count, sizeof(*ck->rows));
        ck->rows = rows;
    }
    if (s == SIDE_OK)
        s = add_files(ck, path, slash != NULL ? (size_t)(slash + 1 - path) : 0, &x.shards);
    if (s == SIDE_OK)
        s = check_index(ck, &x);
    if (x.file.fd >= 0)
        close(x.file.fd);
    mem_free(x.file.text);
    if (s == SIDE_OK)
        ck->index = x.file.path;
    else
        mem_free(x.file.path);
    mem_free(x.entries);
    mem_free(x.shards.items);
    return s;
}

/* ---------------------------------------------------------------- folder */

#define INDEX_ENDING ".safetensors.index.json"

struct folder {
    struct names files, indices; /* the names are copies */
};

static side_status note(struct folder *f, const char *name, const char *path)
{
    const bool index = ck_ends(name, INDEX_ENDING);
    char *copy;
    side_status s;

    if (strcmp(name, ".cast-journal") == 0) /* some of its files may be there already */
        return error_set(SIDE_STATE, where, "%s holds an unfinished cast; give its command again", ck_shown(path));
    if (name[0] == '.' || (!index && !ck_ends(name, ".safetensors")))
        return SIDE_OK;
    copy = mem_zalloc(1, strlen(name) + 1);
    if (copy == NULL)
        return SIDE_NO_MEMORY;
    strcpy(copy, name);
    s = names_add(index ? &f->indices : &f->files, copy, path);
    if (s != SIDE_OK)
        mem_free(copy);
    return s;
}

static side_status list_folder(const char *path, struct folder *f)
{
    DIR *dir = opendir(path);
    const struct dirent *entry;
    side_status s = SIDE_OK;

    if (dir == NULL)
        return error_set_errno(SIDE_IO, where, errno, "cannot list the folder %s", ck_shown(path));
    while (s == SIDE_OK && (errno = 0, entry = readdir(dir)) != NULL)
        s = note(f, entry->d_name, path);
    if (s == SIDE_OK && errno != 0)
        s = error_set_errno(SIDE_IO, where, errno, "cannot list the folder %s", ck_shown(path));
    closedir(dir);
    return s;
}

/* The files that are the model, of all there are: see side_checkpoint_open. */
static side_status take_folder(side_checkpoint *ck, const char *path, const struct folder *f)
{
    const struct names one = {.items = (const char *[]){"model.safetensors"}, .count = 1};
    char inside[PATH_MAX];
    bool model, index;
    const char *slash = ck_ends(path, "/") ? "" : "/";

    place_of(&f->indices, "model" INDEX_ENDING, &index);
    place_of(&f->files, one.items[0], &model);
    if (!index && f->indices.count > 1)
        return error_set(SIDE_INVALID, where, "%s: %zu index files, %.60s and others; name the one to open",
                         ck_shown(path), f->indices.count, f->indices.items[0]);
    if (snprintf(inside, sizeof(inside), "%s%s%s", path, slash,
                 index                   ? "model" INDEX_ENDING
                 : f->indices.count != 0 ? f->indices.items[0]
                                         : "") >= (int)sizeof(inside))
        return error_set(SIDE_INVALID, where, "a path of over %d bytes", PATH_MAX - 1);
    if (f->indices.count != 0)
        return ck_add_index(ck, inside);
    if (f->files.count == 0)
        return error_set(SIDE_NOT_FOUND, where, "no *.safetensors in the folder %s", ck_shown(path));
    return add_files(ck, inside, strlen(inside), model ? &one : &f->files);
}

static void names_free(struct names *names)
{
    for (size_t i = 0; i < names->count; i++) {
        union {
            const char *in;
            void *out;
        } name = {.in = names->items[i]};
        mem_free(name.out);
    }
    mem_free(names->items);
}

side_status ck_add_folder(side_checkpoint *ck, const char *path)
{
    struct folder f = {{0}, {0}};
    side_status s = list_folder(path, &f);

    if (s == SIDE_OK)
        s = take_folder(ck, path, &f);
    names_free(&f.files);
    names_free(&f.indices);
    return s;
}
