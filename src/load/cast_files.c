/* SPDX-License-Identifier: MIT
 *
 * The unfinished output beside its name, and its renaming. A file is OUT.cast-part, a folder of shards is the folder OUT.cast-part; so one rename makes all of it
 * appear at once. */
#include "cast_private.h"

#include "alloc.h"
#include "error.h"
#include "io.h"
#include "json.h"
#include "os.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

static const char where[] = "side_cast_create";

/* ---------------------------------------------------------------- what is there */

static bool is_empty(const char *folder)
{
    DIR *dir = opendir(folder);
    const struct dirent *entry;
    bool empty = dir != NULL;

    while (empty && (entry = readdir(dir)) != NULL)
        empty = strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0;
    if (dir != NULL)
        closedir(dir);
    return empty;
}

static side_status is_no_input(const side_cast *cast, const struct stat *there)
{
    side_checkpoint_file_info info;

    for (size_t i = 0; i < side_checkpoint_files(cast->checkpoint); i++)
        if (side_checkpoint_file(cast->checkpoint, i, &info) == SIDE_OK && info.device == there->st_dev &&
            info.inode == there->st_ino)
            return error_set(SIDE_INVALID, where, "output %s is the input itself; give it another name",
                             ck_shown(cast->out));
    return SIDE_OK;
}

static side_status look_at_output(side_cast *cast, const char *in)
{
    struct stat there, from;

    if (stat(cast->out, &there) != 0)
        return SIDE_OK;
    if (stat(in, &from) == 0 && from.st_dev == there.st_dev && from.st_ino == there.st_ino)
        return error_set(SIDE_INVALID, where, "output %s is the input itself; give it another name",
                         ck_shown(cast->out));
    if (S_ISDIR(there.st_mode) != 0 && !cast->folder)
        return error_set(SIDE_INVALID, where, "output %s is a folder, and the input one file; name a file in it",
                         ck_shown(cast->out));
    if (S_ISREG(there.st_mode) != 0 && cast->folder)
        return error_set(SIDE_INVALID, where, "output %s is a file, and the input a folder of shards; name a folder",
                         ck_shown(cast->out));
    if (!S_ISDIR(there.st_mode) && !S_ISREG(there.st_mode))
        return error_set(SIDE_INVALID, where, "output %s is no regular file", ck_shown(cast->out));
    cast->there = true;
    cast->in_the_way = cast->folder ? !is_empty(cast->out) : (cast->options.flags & SIDE_CAST_REPLACE) == 0;
    cast->mode = cast->folder ? 0 : there.st_mode & 07777;
    return is_no_input(cast, &there);
}

side_status cast_paths(side_cast *cast, const char *in, const char *out)
{
    size_t bytes = strlen(out);
    struct stat there;
    side_status s;

    while (bytes > 1 && out[bytes - 1] == '/')
        bytes--;
    if (bytes >= PATH_MAX)
        return error_set(SIDE_INVALID, where, "output: the path has %zu bytes; %d are possible", bytes, PATH_MAX - 1);
    memcpy(cast->out, out, bytes);
    cast->folder = cast->checkpoint->index != NULL || (stat(in, &there) == 0 && S_ISDIR(there.st_mode));
    if (stat(cast->out, &there) == 0) {
        char final[PATH_MAX];
        if (realpath(cast->out, final) == NULL)
            return error_set_errno(SIDE_IO, where, errno, "output %s cannot be followed", ck_shown(cast->out));
        strcpy(cast->out, final);
    }
    s = look_at_output(cast, in);
    snprintf(cast->part, sizeof(cast->part), "%s.cast-part", cast->out);
    snprintf(cast->journal, sizeof(cast->journal), "%s.cast-journal", cast->out);
    return s;
}

const char *cast_file_name(const side_cast *cast, size_t file)
{
    const char *path = cast->checkpoint->files[file].path, *index = cast->checkpoint->index;
    const char *slash = strrchr(index != NULL ? index : path, '/');

    return slash == NULL ? path : path + (slash + 1 - (index != NULL ? index : path));
}

/* ---------------------------------------------------------------- index */

/* Where the number of metadata.total_size stands; *end 0: nowhere. */
static side_status find_total(const struct ck_file *file, size_t *at, size_t *end)
{
    jread_token token = JREAD_ERROR;
    side_status s;
    jread r;

    *at = *end = 0;
    jread_begin(&r, file->path, file->text, file->text_bytes, NULL, 0);
    s = jread_expect(&r, JREAD_OBJECT);
    while (s == SIDE_OK && (token = jread_next(&r)) == JREAD_KEY) {
        if (!jread_is(&r, "metadata")) {
            s = jread_skip(&r);
            continue;
        }
        token = jread_next(&r);
        while (s == SIDE_OK && token == JREAD_OBJECT && jread_next(&r) == JREAD_KEY) {
            const bool total = jread_is(&r, "total_size");
            if (!total) {
                s = jread_skip(&r);
                continue;
            }
            s = jread_expect(&r, JREAD_NUMBER_VALUE);
            *at = r.at;
            *end = r.end;
        }
        if (s == SIDE_OK && token != JREAD_OBJECT)
            return jread_fail(&r, "metadata is no object");
    }
    return s;
}

static side_status make_index(side_cast *cast, const struct ck_file *file)
{
    char total[24];
    size_t at = 0, end = 0;
    side_status s = find_total(file, &at, &end);

    if (s != SIDE_OK)
        return s;
    cast->index_hash = cast_hash(CAST_HASH, file->text, file->text_bytes);
    const size_t n = (size_t)snprintf(total, sizeof(total), "%llu", (unsigned long long)cast->plan.data_bytes);
    cast->index_bytes = end == 0 ? file->text_bytes : file->text_bytes - (end - at) + n;
    cast->index = mem_zalloc(1, cast->index_bytes + 1);
    if (cast->index == NULL)
        return SIDE_NO_MEMORY;
    memcpy(cast->index, file->text, at);
    if (end != 0)
        memcpy(cast->index + at, total, n);
    memcpy(cast->index + at + (end != 0 ? n : 0), file->text + end, file->text_bytes - end);
    return SIDE_OK;
}

side_status cast_index(side_cast *cast)
{
    struct ck_file file = {.path = cast->checkpoint->index, .fd = -1};
    side_status s;

    if (file.path == NULL)
        return SIDE_OK;
    s = ck_file_open(&file);
    if (s == SIDE_OK && file.bytes > CK_HEADER_MOST)
        s = error_set(SIDE_INVALID, where, "%s was changed meanwhile", ck_shown(file.path));
    if (s == SIDE_OK)
        s = ck_read_text(&file, 0, (size_t)file.bytes, 0);
    if (s == SIDE_OK)
        s = make_index(cast, &file);
    if (file.fd >= 0)
        close(file.fd);
    mem_free(file.text);
    return s;
}

/* ---------------------------------------------------------------- files */

bool cast_part_exists(const side_cast *cast)
{
    struct stat there;

    return lstat(cast->part, &there) == 0;
}

/* Of a name in the unfinished output. */
static side_status part_path(const side_cast *cast, const char *name, char path[CAST_PATH])
{
    const int n = cast->folder ? snprintf(path, CAST_PATH, "%s/%s", cast->part, name)
                               : snprintf(path, CAST_PATH, "%s", cast->part);

    return n > 0 && (size_t)n < CAST_PATH ? SIDE_OK : error_set(SIDE_INVALID, where, "a path too long: %.100s", name);
}

/* The folders that a shard's name goes through. */
static side_status make_folders(const side_cast *cast, char path[CAST_PATH])
{
    for (char *slash = path + strlen(cast->part); cast->folder && slash != NULL; slash = strchr(slash + 1, '/')) {
        int r;
        *slash = '\0';
        r = mkdir(path, 0777);
        if (r != 0 && errno != EEXIST)
            return error_set_errno(SIDE_IO, where, errno, "cannot make the folder %s", ck_shown(path));
        *slash = '/';
    }
    return SIDE_OK;
}

static side_status write_failed(const char *path)
{
    side_error e;

    error_copy(&e);
    return error_set_errno(SIDE_IO, where, e.os_errno, "cannot write %s", ck_shown(path));
}

static side_status open_file(side_cast *cast, struct cast_file *file, uint64_t *taken)
{
    char path[CAST_PATH];
    struct stat there;
    size_t done = 0;
    side_status s = part_path(cast, file->name, path);

    if (s == SIDE_OK)
        s = make_folders(cast, path);
    if (s != SIDE_OK)
        return s;
    file->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NONBLOCK | O_NOFOLLOW, 0666);
    if (file->fd < 0 || fstat(file->fd, &there) != 0)
        return error_set_errno(SIDE_IO, where, errno,
                               errno == EMFILE ? "cannot write %s; raise the limit of open files (ulimit -n)"
                                               : "cannot write %s",
                               ck_shown(path));
    if (!S_ISREG(there.st_mode))
        return error_set(SIDE_INVALID, where, "%s is no regular file", ck_shown(path));
    file->memory = io_in_memory(file->fd);
    file->fresh = (uint64_t)there.st_size != file->bytes;
    *taken += file->fresh ? 0 : (uint64_t)there.st_blocks * 512;
    if (file->fresh && (ftruncate(file->fd, 0) != 0 || ftruncate(file->fd, (off_t)file->bytes) != 0))
        return error_set_errno(SIDE_IO, where, errno, "cannot make %s %llu bytes long", ck_shown(path),
                               (unsigned long long)file->bytes);
    if (file->layout.header != NULL)
        s = os_pwrite_all(file->fd, file->layout.header, file->layout.header_bytes, 0, &done);
    if (s == SIDE_OK && cast->mode != 0)
        (void)fchmod(file->fd, cast->mode);
    return s == SIDE_OK ? s : write_failed(path);
}

/* Said now rather than after an hour. */
static side_status check_space(const side_cast *cast, uint64_t taken)
{
    uint64_t bytes = cast->index_bytes;
    struct statvfs fs;

    for (size_t i = 0; i < cast->plan.file_count; i++)
        bytes += cast->plan.files[i].bytes;
    bytes = bytes > taken ? bytes - taken : 0;
    if (cast->plan.file_count == 0 || fstatvfs(cast->plan.files[0].fd, &fs) != 0 || fs.f_blocks == 0 ||
        (uint64_t)fs.f_bavail >= bytes / fs.f_frsize)
        return SIDE_OK;
    return error_set_errno(SIDE_IO, where, ENOSPC, "%s takes %llu bytes more, and %llu are free there",
                           ck_shown(cast->out), (unsigned long long)bytes,
                           (unsigned long long)fs.f_bavail * fs.f_frsize);
}

static side_status in_the_way(const side_cast *cast)
{
    if (cast->folder)
        return error_set(SIDE_STATE, where, "output %s is there and not empty; name a new folder, or empty it",
                         ck_shown(cast->out));
    return error_set(SIDE_STATE, where, "output %s is there; name another file, or ask that it be replaced (--force)",
                     ck_shown(cast->out));
}

side_status cast_files_open(side_cast *cast)
{
    side_status s = SIDE_OK;
    uint64_t taken = 0;
    bool fresh = false;

    if (cast->finished)
        return SIDE_OK;
    if (cast->in_the_way)
        return in_the_way(cast);
    if (cast->folder && mkdir(cast->part, 0777) != 0 && errno != EEXIST)
        return error_set_errno(SIDE_IO, where, errno, "cannot make the folder %s", ck_shown(cast->part));
    for (size_t i = 0; s == SIDE_OK && i < cast->plan.file_count; i++) {
        struct cast_file *file = &cast->plan.files[i];
        s = open_file(cast, file, &taken);
        for (size_t k = file->first; s == SIDE_OK && file->fresh && k < file->first + file->count; k++) {
            fresh |= cast->synced[k] != 0;
            cast->synced[k] = cast->done[k] = 0;
        }
    }
    if (s == SIDE_OK && fresh) /* what it says of them is not so any more */
        s = cast_journal_begin(cast);
    return s == SIDE_OK ? check_space(cast, taken) : s;
}

void cast_files_close(side_cast *cast)
{
    for (size_t i = 0; cast->plan.files != NULL && i < cast->plan.file_count; i++) {
        if (cast->plan.files[i].fd >= 0)
            close(cast->plan.files[i].fd);
        cast->plan.files[i].fd = -1;
    }
}

static int remove_one(const char *path, const struct stat *there, int kind, struct FTW *at)
{
    (void)there;
    (void)kind;
    (void)at;
    return remove(path);
}

void cast_files_remove(side_cast *cast)
{
    cast_files_close(cast);
    (void)nftw(cast->part, remove_one, 16, FTW_DEPTH | FTW_PHYS | FTW_MOUNT);
}

/* ---------------------------------------------------------------- the end */

/* A rename is on the disk once the folder is. Best effort: not all file systems sync folders. */
static void sync_folder(const char *folder)
{
    const int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    if (fd >= 0) {
        (void)fsync(fd);
        close(fd);
    }
}

static void sync_parent(const char *path)
{
    char folder[PATH_MAX];
    const char *slash = strrchr(path, '/');
    const size_t n = slash == NULL || slash == path ? 1 : (size_t)(slash - path);

    memcpy(folder, slash != NULL ? path : ".", n);
    folder[n] = '\0';
    sync_folder(folder);
}

static side_status write_index(const side_cast *cast)
{
    char path[CAST_PATH];
    const char *slash = strrchr(cast->checkpoint->index, '/');
    side_status s = part_path(cast, slash != NULL ? slash + 1 : cast->checkpoint->index, path);
    size_t done = 0;
    int fd;

    if (s != SIDE_OK)
        return s;
    fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (fd < 0)
        return error_set_errno(SIDE_IO, "side_cast_run", errno, "cannot write %s", ck_shown(path));
    s = os_pwrite_all(fd, cast->index, cast->index_bytes, 0, &done);
    if (s == SIDE_OK && fsync(fd) != 0 && errno != EINVAL && errno != ENOTSUP)
        s = error_set_errno(SIDE_IO, "side_cast_run", errno, "cannot sync %s", ck_shown(path));
    else if (s != SIDE_OK)
        s = write_failed(path);
    close(fd);
    return s;
}

side_status cast_files_commit(side_cast *cast)
{
    static const char call[] = "side_cast_run";
    side_status s = SIDE_OK;

    for (size_t i = 0; i < cast->plan.file_count; i++)
        if (fsync(cast->plan.files[i].fd) != 0 && errno != EINVAL && errno != ENOTSUP)
            return error_set_errno(SIDE_IO, call, errno, "cannot sync %s", ck_shown(cast->part));
    if (cast->index != NULL)
        s = write_index(cast);
    if (s != SIDE_OK)
        return s;
    if (cast->folder)
        sync_folder(cast->part);
    if (rename(cast->part, cast->out) != 0)
        return error_set_errno(SIDE_IO, call, errno, "cannot rename %s to %s", ck_shown(cast->part), "its name");
    sync_parent(cast->out);
    cast_files_close(cast);
    return SIDE_OK;
}
