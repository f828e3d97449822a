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

/* Not blocking, or a FIFO of that name would hold up the caller; but blocking from then on, since io_uring makes a difference for regular files too. */
side_status ck_file_open(struct ck_file *file)
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
    (void)fcntl(file->fd, F_SETFL, O_RDONLY);
    file->bytes = (uint64_t)there.st_size;
    file->device = there.st_dev;
    file->inode = there.st_ino;
    file->mtime_ns = in_ns(there.st_mtim);
    file->ctime_ns = in_ns(there.st_ctim);
    return SIDE_OK;
}

side_status ck_file_check(const struct ck_file *file, const char *call, const char *when, const char *then)
{
    struct stat there;

    if (fstat(file->fd, &there) != 0)
        return error_set_errno(SIDE_IO, call, errno, "cannot look at %s", ck_shown(file->path));
    if ((uint64_t)there.st_size != file->bytes)
        return error_set(SIDE_IO, call, "%s was changed %s, from %llu bytes to %llu: %s", ck_shown(file->path), when,
                         (unsigned long long)file->bytes, (unsigned long long)there.st_size, then);
    if (in_ns(there.st_mtim) != file->mtime_ns)
        return error_set(SIDE_IO, call, "%s was changed %s, by its time of change: %s", ck_shown(file->path), when,
                         then);
    return SIDE_OK;
}

static side_status is_as_opened(const struct ck_file *file, const char *call)
{
    return ck_file_check(file, call, "since it was opened", "once nobody writes to it any more, open it again");
}

/* An error of os_pread_all, with the file. */
static side_status read_failed(const struct ck_file *file, side_status s, size_t bytes, uint64_t offset)
{
    side_error e;

    error_copy(&e);
    return error_set_errno(s, where, e.os_errno, "cannot read %zu bytes at offset %llu of %s", bytes,
                           (unsigned long long)offset, ck_shown(file->path));
}

side_status ck_read_text(struct ck_file *file, uint64_t offset, size_t bytes, size_t more)
{
    size_t done = 0;
    side_status s;

    file->text = mem_zalloc(1, bytes + more + CK_TEXT_SPARE);
    if (file->text == NULL)
        return SIDE_NO_MEMORY;
    file->text_bytes = bytes;
    s = os_pread_all(file->fd, file->text, bytes, offset, &done);
    if (s != SIDE_OK)
        return read_failed(file, s, bytes, offset);
    return done == bytes ? SIDE_OK
                         : error_set(SIDE_IO, where, "%s ends at offset %llu; it was changed while it was read",
                                     ck_shown(file->path), (unsigned long long)(offset + done));
}

side_status ck_read_head(struct ck_file *file, unsigned char *head, size_t bytes, size_t *done)
{
    const side_status s = os_pread_all(file->fd, head, bytes, 0, done);

    return s == SIDE_OK ? s : read_failed(file, s, bytes, 0);
}

/* What a file is whose first bytes are no length, and what to do with it. NULL: nobody knows. */
static const char *looks_like(const char *path, const unsigned char *head)
{
    if (memcmp(head, "\x93NUMPY", 6) == 0)
        return ck_ends(path, ".npy") ? "it is a .npy file, and is to be read as safetensors"
                                     : "it looks like a .npy file: name it so, or ask for that format";
    if (memcmp(head, "PK\3\4", 4) == 0)
        return "it looks like a zip file, as torch.save writes: save it as safetensors";
    if (memcmp(head, "\x80\2\x8a\x0a", 4) == 0)
        return "it looks like a pickle, as old versions of torch.save write: save it as safetensors";
    return memcmp(head, "GGUF", 4) == 0 ? "it looks like a GGUF file" : NULL;
}

static side_status read_header(struct ck_file *file)
{
    unsigned char head[8];
    const char *other;
    uint64_t n = 0;
    size_t done = 0;
    const side_status s = ck_read_head(file, head, sizeof(head), &done);

    if (s != SIDE_OK)
        return s;
    if (done < sizeof(head))
        return error_set(SIDE_INVALID, where, "%s, offset 0: the file has %zu bytes; a safetensors file has at least 8",
                         ck_shown(file->path), done);
    for (int i = 7; i >= 0; i--)
        n = n << 8 | head[i];
    other = looks_like(file->path, head);
    if ((n > CK_HEADER_MOST || n > file->bytes - 8) && other != NULL)
        return error_set(SIDE_INVALID, where, "%s is no safetensors file; %s", ck_shown(file->path), other);
    if (n > CK_HEADER_MOST)
        return error_set(SIDE_INVALID, where,
                         "%s, offset 0: a header of %llu bytes, and %u are possible; it is no safetensors file",
                         ck_shown(file->path), (unsigned long long)n, CK_HEADER_MOST);
    if (n > file->bytes - 8)
        return error_set(
            SIDE_INVALID, where,
            "%s, offset 0: a header of %llu bytes, but the file ends %llu bytes behind its length; it was cut off",
            ck_shown(file->path), (unsigned long long)n, (unsigned long long)file->bytes - 8);
    file->data = 8 + n;
    return ck_read_text(file, 8, (size_t)n, 0);
}

side_status ck_row_add(side_checkpoint *ck, const struct ck_file *file, struct ck_row row)
{
    void *rows = ck->rows;
    const side_status s = ck_reserve(&rows, &ck->row_most, ck->row_count, 1, sizeof(*ck->rows));

    ck->rows = rows;
    if (s != SIDE_OK)
        return s;
    if (ck->row_count == UINT32_MAX - 1 || ck->dim_count > UINT32_MAX)
        return error_set(SIDE_TOO_LARGE, where, "%s: over 4e9 tensors or dimensions", ck_shown(file->path));
    row.file = (uint16_t)(file - ck->files);
    ck->rows[ck->row_count++] = row;
    return SIDE_OK;
}

side_status ck_dim_add(side_checkpoint *ck, uint64_t dim)
{
    void *dims = ck->dims;
    const side_status s = ck_reserve(&dims, &ck->dim_most, ck->dim_count, 1, sizeof(*ck->dims));

    ck->dims = dims;
    if (s == SIDE_OK)
        ck->dims[ck->dim_count++] = dim;
    return s;
}

/* The file's name without folders and, where it ends so, without `ending`: of the one tensor of files without names. */
static side_status lone_name(struct ck_file *file, const char *ending, uint32_t *name)
{
    const char *slash = strrchr(file->path, '/'), *base = slash != NULL ? slash + 1 : file->path;
    size_t n = strlen(base);

    if (ck_ends(base, ending))
        n -= strlen(ending);
    *name = (uint32_t)file->text_bytes + 1;
    memcpy(file->text + *name, base, n);
    file->text[*name + n] = '\0';
    return SIDE_OK;
}

static side_status read_npy(side_checkpoint *ck, struct ck_file *file)
{
    struct ck_row row = {0};
    side_status s = npy_parse(ck, file, &row);

    if (s == SIDE_OK)
        s = lone_name(file, ".npy", &row.name);
    return s == SIDE_OK ? ck_row_add(ck, file, row) : s;
}

static side_status read_raw(side_checkpoint *ck, struct ck_file *file)
{
    struct ck_row row = {.dims = (uint32_t)ck->dim_count, .type = SIDE_DTYPE_U8, .rank = 1};
    side_status s = ck_read_text(file, 0, 0, strlen(file->path) + 1);

    if (s == SIDE_OK)
        s = ck_dim_add(ck, file->bytes);
    if (s == SIDE_OK)
        s = lone_name(file, "", &row.name);
    return s == SIDE_OK ? ck_row_add(ck, file, row) : s;
}

side_status ck_add_file(side_checkpoint *ck, const char *path, side_checkpoint_format format)
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
    s = ck_file_open(file);
    if (s == SIDE_OK && format == SIDE_FORMAT_NPY)
        s = read_npy(ck, file);
    else if (s == SIDE_OK && format == SIDE_FORMAT_RAW)
        s = read_raw(ck, file);
    else if (s == SIDE_OK) {
        s = read_header(file);
        s = s == SIDE_OK ? st_parse(ck, file) : s;
    }
    if (s == SIDE_OK)
        s = ck_file_finish(ck, file);
    return s == SIDE_OK ? is_as_opened(file, where) : s;
}

/* ---------------------------------------------------------------- open and close */

bool ck_ends(const char *text, const char *with)
{
    const size_t n = strlen(text), m = strlen(with);

    return n >= m && memcmp(text + n - m, with, m) == 0;
}

static side_status add(side_checkpoint *ck, const char *path, side_checkpoint_format format)
{
    struct stat there;

    if (format == SIDE_FORMAT_AUTO && stat(path, &there) == 0 && S_ISDIR(there.st_mode))
        return ck_add_folder(ck, path);
    if (format == SIDE_FORMAT_AUTO)
        format = ck_ends(path, ".json")  ? SIDE_FORMAT_INDEX
                 : ck_ends(path, ".npy") ? SIDE_FORMAT_NPY
                 : ck_ends(path, ".raw") ? SIDE_FORMAT_RAW
                                         : SIDE_FORMAT_SAFETENSORS;
    return format == SIDE_FORMAT_INDEX ? ck_add_index(ck, path) : ck_add_file(ck, path, format);
}

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
    if ((unsigned)o.format > SIDE_FORMAT_RAW)
        return error_set(SIDE_INVALID, where, "format %u is unknown", (unsigned)o.format);
    ck = mem_zalloc(1, sizeof(*ck));
    if (ck == NULL)
        return SIDE_NO_MEMORY;
    ck->flags = o.flags;
    ck->seed = (uintptr_t)ck * UINT64_C(0x9e3779b97f4a7c15) ^ os_now_ns();
    s = add(ck, path, o.format);
    if (s == SIDE_OK)
        s = ck_trim(ck);
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
    mem_free(checkpoint->index);
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
    tensor->dims = ck_dims(checkpoint, row->dims);
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
        s = is_as_opened(&checkpoint->files[i], call);
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
