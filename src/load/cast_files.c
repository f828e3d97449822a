/* SPDX-License-Identifier: MIT
 *
 * The unfinished output: its files, and its index. Until it is whole it is the user's alone, whatever the input's rights are. */
#include "cast_private.h"

#include "alloc.h"
#include "error.h"
#include "io.h"
#include "json.h"
#include "os.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

static const char where[] = "side_cast_create";

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
    if (s == SIDE_OK) {
        const char *slash = strrchr(file.path, '/');
        cast->index_name = slash != NULL ? slash + 1 : file.path;
        cast->index_rights = cast_rights_of(file.fd, 0);
    }
    if (file.fd >= 0)
        close(file.fd);
    mem_free(file.text);
    return s;
}

/* ---------------------------------------------------------------- files */

side_status cast_path(const side_cast *cast, const char *folder, const char *name, char path[CAST_PATH])
{
    const int n = cast->folder ? snprintf(path, CAST_PATH, "%s/%s", folder, name)
                               : snprintf(path, CAST_PATH, "%s", folder);

    return n > 0 && (size_t)n < CAST_PATH ? SIDE_OK : error_set(SIDE_INVALID, where, "a path too long: %.100s", name);
}

/* A folder of what is unfinished, for nobody else's eyes. What is no folder, such as a link to one, is somebody else's. */
static side_status make_folder(const char *path)
{
    struct stat there;

    if (mkdir(path, 0700) == 0)
        return SIDE_OK;
    if (errno != EEXIST || lstat(path, &there) != 0)
        return error_set_errno(SIDE_IO, where, errno, "cannot make the folder %s", ck_shown(path));
    if (!S_ISDIR(there.st_mode))
        return error_set(SIDE_STATE, where, "%s is there and no folder; move it away", ck_shown(path));
    if ((there.st_mode & 0777) != 0700)
        (void)chmod(path, (there.st_mode & 07000) | 0700);
    return SIDE_OK;
}

/* The folders that a shard's name goes through. */
static side_status make_folders(const side_cast *cast, char path[CAST_PATH])
{
    side_status s = SIDE_OK;

    for (char *slash = path + strlen(cast->part); cast->folder && s == SIDE_OK && slash != NULL;
         slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        s = make_folder(path);
        *slash = '/';
    }
    return s;
}

static side_status write_failed(const char *path)
{
    side_error e;

    error_copy(&e);
    return error_set_errno(SIDE_IO, where, e.os_errno, "cannot write %s", ck_shown(path));
}

/* Written by the user alone until it is whole. One that had its rights already, when it was stopped, may be one that nobody may write to. */
static int open_own(const char *path)
{
    const int flags = O_RDWR | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NONBLOCK | O_NOFOLLOW;
    int fd = open(path, flags, 0600);

    if (fd < 0 && errno == EACCES && fchmodat(AT_FDCWD, path, 0600, AT_SYMLINK_NOFOLLOW) == 0)
        fd = open(path, flags, 0600);
    return fd;
}

static side_status open_file(side_cast *cast, struct cast_file *file, uint64_t *taken)
{
    char path[CAST_PATH];
    struct stat there;
    size_t done = 0;
    side_status s = cast_path(cast, cast->part, file->name, path);

    if (s == SIDE_OK)
        s = make_folders(cast, path);
    if (s != SIDE_OK)
        return s;
    file->fd = open_own(path);
    if (file->fd < 0 || fstat(file->fd, &there) != 0)
        return error_set_errno(SIDE_IO, where, errno,
                               errno == EMFILE ? "cannot write %s; raise the limit of open files (ulimit -n)"
                                               : "cannot write %s",
                               ck_shown(path));
    if (!S_ISREG(there.st_mode))
        return error_set(SIDE_INVALID, where, "%s is no regular file", ck_shown(path));
    if ((there.st_mode & 07777) != 0600)
        (void)fchmod(file->fd, 0600);
    file->memory = io_in_memory(file->fd);
    file->fresh = (uint64_t)there.st_size != file->bytes;
    *taken += file->fresh ? 0 : (uint64_t)there.st_blocks * 512;
    if (file->fresh && (ftruncate(file->fd, 0) != 0 || ftruncate(file->fd, (off_t)file->bytes) != 0))
        return error_set_errno(SIDE_IO, where, errno, "cannot make %s %llu bytes long", ck_shown(path),
                               (unsigned long long)file->bytes);
    if (file->layout.header != NULL)
        s = os_pwrite_all(file->fd, file->layout.header, file->layout.header_bytes, 0, &done);
    return s == SIDE_OK ? s : write_failed(path);
}

/* Said now rather than after an hour. */
static side_status check_space(const side_cast *cast, uint64_t taken)
{
    uint64_t bytes = cast->index_bytes;
    struct statvfs fs;

    int fd = -1;

    for (size_t i = 0; i < cast->plan.file_count; i++) {
        const struct cast_file *file = &cast->plan.files[i];
        bytes += file->moved ? 0 : file->bytes;
        fd = file->fd >= 0 ? file->fd : fd;
    }
    bytes = bytes > taken ? bytes - taken : 0;
    if (fd < 0 || fstatvfs(fd, &fs) != 0 || fs.f_blocks == 0 || (uint64_t)fs.f_bavail >= bytes / fs.f_frsize)
        return SIDE_OK;
    return error_set_errno(SIDE_IO, where, ENOSPC, "%s takes %llu bytes more, and %llu are free there",
                           ck_shown(cast->out), (unsigned long long)bytes,
                           (unsigned long long)fs.f_bavail * fs.f_frsize);
}

/* Names of ours in a folder that is there, which another put there. */
static side_status check_names(const side_cast *cast)
{
    char path[CAST_PATH];

    for (size_t i = 0; i <= cast->plan.file_count; i++) {
        const bool index = i == cast->plan.file_count;
        const char *name = index ? cast->index_name : cast->plan.files[i].name;
        if (name == NULL || (index ? cast->index_moved : cast->plan.files[i].moved))
            continue;
        const side_status s = cast_path(cast, cast->out, name, path);
        if (s != SIDE_OK || cast_exists(path))
            return s != SIDE_OK ? s : cast_in_the_way(cast, name);
    }
    return SIDE_OK;
}

side_status cast_files_open(side_cast *cast)
{
    side_status s = SIDE_OK;
    uint64_t taken = 0;
    bool fresh = false;

    for (size_t i = 0; i < cast->plan.file_count; i++)
        cast->plan.files[i].rights = cast_rights_of(cast->checkpoint->files[i].fd, cast->mode);
    if (cast->finished)
        return SIDE_OK;
    if (cast->in_the_way)
        return cast_in_the_way(cast, cast->other);
    if (cast->fill)
        s = check_names(cast);
    if (s == SIDE_OK && cast->folder)
        s = make_folder(cast->part);
    for (size_t i = 0; s == SIDE_OK && i < cast->plan.file_count; i++) {
        struct cast_file *file = &cast->plan.files[i];
        if (file->moved)
            continue;
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
