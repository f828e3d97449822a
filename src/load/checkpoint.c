/* SPDX-License-Identifier: MIT */
#include "checkpoint.h"

#include "alloc.h"
#include "error.h"
#include "os.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char where[] = "side_checkpoint_open";

static uint64_t in_ns(struct timespec t)
{
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---------------------------------------------------------------- files */

/* Not blocking, or a FIFO of that name would hold up the caller. */
static side_status file_open(struct ck_file *file)
{
    struct stat there;

    file->fd = open(file->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (file->fd < 0)
        return error_set_errno(errno == ENOENT || errno == ENOTDIR ? SIDE_NOT_FOUND : SIDE_IO, where, errno,
                               errno == EMFILE ? "cannot open %s; raise the limit of open files (ulimit -n)"
                                               : "cannot open %s",
                               ck_shown(file->path));
    if (fstat(file->fd, &there) != 0)
        return error_set_errno(SIDE_IO, where, errno, "cannot read %s", ck_shown(file->path));
    if (!S_ISREG(there.st_mode))
        return error_set(SIDE_INVALID, where, "%s is no regular file", ck_shown(file->path));
    file->bytes = (uint64_t)there.st_size;
    file->device = there.st_dev;
    file->inode = there.st_ino;
    file->mtime_ns = in_ns(there.st_mtim);
    file->ctime_ns = in_ns(there.st_ctim);
    return SIDE_OK;
}

static side_status file_check(const struct ck_file *file, const char *call)
{
    struct stat there;

    if (fstat(file->fd, &there) != 0)
        return error_set_errno(SIDE_IO, call, errno, "cannot look at %s", ck_shown(file->path));
    if ((uint64_t)there.st_size != file->bytes || in_ns(there.st_mtim) != file->mtime_ns)
        return error_set(SIDE_IO, call, "%s was changed since it was opened: %llu bytes then, %llu now; load it again",
                         ck_shown(file->path), (unsigned long long)file->bytes, (unsigned long long)there.st_size);
    return SIDE_OK;
}

/* Reads text_bytes at `offset` into file->text. */
static side_status read_text(struct ck_file *file, uint64_t offset, size_t bytes)
{
    size_t done = 0;
    side_status s;

    file->text = mem_zalloc(1, bytes + CK_TEXT_SPARE);
    if (file->text == NULL)
        return SIDE_NO_MEMORY;
    file->text_bytes = bytes;
    s = os_pread_all(file->fd, file->text, bytes, offset, &done);
    if (s != SIDE_OK) {
        side_error e;
        error_copy(&e);
        return error_set_errno(s, where, e.os_errno, "cannot read %zu bytes at offset %llu of %s", bytes,
                               (unsigned long long)offset, ck_shown(file->path));
    }
    return done == bytes ? SIDE_OK
                         : error_set(SIDE_IO, where, "%s ends at offset %llu; it was changed while it was read",
                                     ck_shown(file->path), (unsigned long long)(offset + done));
}

static side_status read_header(struct ck_file *file)
{
    unsigned char head[8];
    uint64_t n = 0;
    size_t done = 0;
    side_status s = os_pread_all(file->fd, head, sizeof(head), 0, &done);

    if (s != SIDE_OK) {
        side_error e;
        error_copy(&e);
        return error_set_errno(s, where, e.os_errno, "cannot read 8 bytes at offset 0 of %s", ck_shown(file->path));
    }
    if (done < sizeof(head))
        return error_set(SIDE_INVALID, where, "%s, offset 0: the file has %zu bytes; a safetensors file has at least 8",
                         ck_shown(file->path), done);
    for (int i = 7; i >= 0; i--)
        n = n << 8 | head[i];
    if (n > CK_HEADER_MOST)
        return error_set(SIDE_INVALID, where,
                         "%s, offset 0: a header of %llu bytes; %u are possible. This is no safetensors file",
                         ck_shown(file->path), (unsigned long long)n, CK_HEADER_MOST);
    if (n > file->bytes - 8)
        return error_set(
            SIDE_INVALID, where,
            "%s, offset 0: a header of %llu bytes, but the file ends %llu bytes behind its length; it was cut off",
            ck_shown(file->path), (unsigned long long)n, (unsigned long long)file->bytes - 8);
    file->data = 8 + n;
    return read_text(file, 8, (size_t)n);
}

static side_status add_safetensors(side_checkpoint *ck, const char *path)
{
    struct ck_file *file;
    void *files = ck->files;
    side_status s = ck_reserve(&files, &ck->file_most, ck->file_count, 1, sizeof(*ck->files));

    ck->files = files;
    if (s != SIDE_OK)
        return s;
    file = &ck->files[ck->file_count];
    *file = (struct ck_file){.fd = -1, .first = ck->row_count};
    ck->file_count++;
    file->path = mem_zalloc(1, strlen(path) + 1);
    if (file->path == NULL)
        return SIDE_NO_MEMORY;
    strcpy(file->path, path);
    s = file_open(file);
    if (s == SIDE_OK)
        s = read_header(file);
    if (s == SIDE_OK)
        s = st_parse(ck, file);
    if (s == SIDE_OK)
        s = ck_file_finish(ck, file);
    return s == SIDE_OK ? file_check(file, where) : s;
}

/* ---------------------------------------------------------------- open and close */

side_status side_checkpoint_open(const char *path, const side_checkpoint_options *options, side_checkpoint **checkpoint)
{
    side_checkpoint_options o = SIDE_CHECKPOINT_OPTIONS_INIT;
    side_checkpoint *ck;
    side_status s = options_copy(&o, sizeof(o), options, sizeof(o), where);

    if (s != SIDE_OK)
        return s;
    if (path == NULL || *path == '\0' || checkpoint == NULL)
        return error_set(SIDE_INVALID, where, checkpoint == NULL ? "checkpoint is NULL" : "path is NULL or empty");
    if ((o.flags & ~(SIDE_CHECKPOINT_LENIENT | SIDE_CHECKPOINT_STRICT_SPEC)) != 0 ||
        o.flags == (SIDE_CHECKPOINT_LENIENT | SIDE_CHECKPOINT_STRICT_SPEC))
        return error_set(SIDE_INVALID, where, "flags 0x%x: unknown ones, or LENIENT together with STRICT_SPEC", o.flags);
    ck = mem_zalloc(1, sizeof(*ck));
    if (ck == NULL)
        return SIDE_NO_MEMORY;
    ck->flags = o.flags;
    ck->seed = (uintptr_t)ck * UINT64_C(0x9e3779b97f4a7c15) ^ os_now_ns();
    s = add_safetensors(ck, path);
    if (s != SIDE_OK) {
        side_checkpoint_close(ck);
        return s;
    }
    *checkpoint = ck;
    return SIDE_OK;
}

void side_checkpoint_close(side_checkpoint *checkpoint)
{
    if (checkpoint == NULL)
        return;
    for (size_t i = 0; i < checkpoint->file_count; i++) {
        struct ck_file *file = &checkpoint->files[i];
        if (file->fd >= 0)
            close(file->fd);
        mem_free(file->text);
        mem_free(file->pairs);
        mem_free(file->path);
    }
    mem_free(checkpoint->files);
    mem_free(checkpoint->buckets);
    mem_free(checkpoint->dims);
    mem_free(checkpoint->rows);
    mem_free(checkpoint);
}

/* ---------------------------------------------------------------- asking */

size_t side_checkpoint_count(const side_checkpoint *checkpoint)
{
    return checkpoint != NULL ? checkpoint->row_count : 0;
}

static side_status out_of_range(const char *call, const char *what, size_t index, size_t count)
{
    return error_set(SIDE_INVALID, call, "%s %zu is out of range; there are %zu, from 0 on", what, index, count);
}

side_status side_checkpoint_tensor(const side_checkpoint *checkpoint, size_t index, side_tensor *tensor)
{
    static const char call[] = "side_checkpoint_tensor";
    const struct ck_row *row;

    if (checkpoint == NULL || tensor == NULL)
        return error_set(SIDE_INVALID, call, "%s is NULL", checkpoint == NULL ? "checkpoint" : "tensor");
    if (index >= checkpoint->row_count)
        return out_of_range(call, "tensor", index, checkpoint->row_count);
    row = &checkpoint->rows[index];
    tensor->name = ck_row_name(checkpoint, row);
    tensor->name_bytes = strlen(tensor->name);
    tensor->type = (side_dtype)row->type;
    tensor->rank = row->rank;
    tensor->dims = checkpoint->dims + row->dims;
    (void)ck_sizes(tensor->dims, row->rank, side_dtype_bits(tensor->type), &tensor->elements, &tensor->bytes);
    tensor->file = row->file;
    tensor->offset = checkpoint->files[row->file].data + row->begin;
    return SIDE_OK;
}

side_status side_checkpoint_find(const side_checkpoint *checkpoint, const char *name, size_t name_bytes, size_t *index)
{
    static const char call[] = "side_checkpoint_find";
    char shown[CK_NAME_SHOWN];
    size_t found;

    if (checkpoint == NULL || name == NULL || index == NULL)
        return error_set(SIDE_INVALID, call, "%s is NULL",
                         checkpoint == NULL ? "checkpoint"
                         : name == NULL     ? "name"
                                            : "index");
    found = ck_find(checkpoint, name, name_bytes);
    if (found == 0)
        return error_set(SIDE_NOT_FOUND, call, "no tensor is named \"%s\"", ck_escaped(name, name_bytes, shown));
    *index = found - 1;
    return SIDE_OK;
}

size_t side_checkpoint_files(const side_checkpoint *checkpoint)
{
    return checkpoint != NULL ? checkpoint->file_count : 0;
}

/* The file of that number; NULL, with the error set. */
static const struct ck_file *file_of(const side_checkpoint *checkpoint, size_t index, const char *call)
{
    if (checkpoint == NULL) {
        error_set(SIDE_INVALID, call, "checkpoint is NULL");
        return NULL;
    }
    if (index >= checkpoint->file_count) {
        out_of_range(call, "file", index, checkpoint->file_count);
        return NULL;
    }
    return &checkpoint->files[index];
}

side_status side_checkpoint_file(const side_checkpoint *checkpoint, size_t index, side_checkpoint_file_info *file)
{
    static const char call[] = "side_checkpoint_file";
    const struct ck_file *f = file_of(checkpoint, index, call);

    if (f == NULL)
        return SIDE_INVALID;
    if (file == NULL)
        return error_set(SIDE_INVALID, call, "file is NULL");
    *file = (side_checkpoint_file_info){.path = f->path,
                                        .fd = f->fd,
                                        .bytes = f->bytes,
                                        .data = f->data,
                                        .first = f->first,
                                        .count = f->count,
                                        .device = f->device,
                                        .inode = f->inode,
                                        .mtime_ns = f->mtime_ns,
                                        .ctime_ns = f->ctime_ns};
    return SIDE_OK;
}

side_status side_checkpoint_check(const side_checkpoint *checkpoint)
{
    static const char call[] = "side_checkpoint_check";
    side_status s = checkpoint != NULL ? SIDE_OK : error_set(SIDE_INVALID, call, "checkpoint is NULL");

    for (size_t i = 0; s == SIDE_OK && i < checkpoint->file_count; i++)
        s = file_check(&checkpoint->files[i], call);
    return s;
}

size_t side_checkpoint_metadata_count(const side_checkpoint *checkpoint, size_t file)
{
    return checkpoint != NULL && file < checkpoint->file_count ? checkpoint->files[file].pair_count : 0;
}

side_status side_checkpoint_metadata(const side_checkpoint *checkpoint, size_t file, size_t index, const char **key,
                                     const char **value)
{
    static const char call[] = "side_checkpoint_metadata";
    const struct ck_file *f = file_of(checkpoint, file, call);

    if (f == NULL)
        return SIDE_INVALID;
    if (key == NULL || value == NULL)
        return error_set(SIDE_INVALID, call, "%s is NULL", key == NULL ? "key" : "value");
    if (index >= f->pair_count)
        return out_of_range(call, "pair", index, f->pair_count);
    *key = f->text + f->pairs[index].key;
    *value = f->text + f->pairs[index].value;
    return SIDE_OK;
}
