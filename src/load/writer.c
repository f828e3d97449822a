/* SPDX-License-Identifier: MIT
 *
 * A safetensors file that is whole or not there: written beside its path, synced, then renamed over it. */
#include "checkpoint.h"

#include "alloc.h"
#include "error.h"
#include "os.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

static const char where[] = "side_writer_create";

struct side_writer {
    struct st_layout layout;
    size_t count;
    int fd; /* -1: finished, or not open yet */
    bool resume, resumed;
    mode_t mode;          /* of the file that is replaced, with its S_IFREG; 0 none */
    char final[PATH_MAX]; /* links followed */
    char beside[PATH_MAX + 24];
};

/* A link is followed, since renaming would replace it; what is no file is left alone. */
static side_status final_name(side_writer *w, const char *path)
{
    struct stat there;

    if (strlen(path) >= PATH_MAX)
        return error_set(SIDE_INVALID, where, "the path has %zu bytes; %d are possible", strlen(path), PATH_MAX - 1);
    strcpy(w->final, path);
    if (stat(path, &there) != 0)
        return SIDE_OK;
    if (!S_ISREG(there.st_mode))
        return error_set(SIDE_INVALID, where, "%s is no regular file", ck_shown(path));
    w->mode = there.st_mode & (S_IFREG | 07777);
    if (realpath(path, w->final) == NULL)
        return error_set_errno(SIDE_IO, where, errno, "%s cannot be followed", ck_shown(path));
    return SIDE_OK;
}

/* ---------------------------------------------------------------- the file beside */

/* Where it replaces one, nobody else may look at it before it has that one's mode. */
static mode_t first_mode(const side_writer *w)
{
    return w->mode != 0 ? 0600 : 0666;
}

static side_status open_new(side_writer *w)
{
    static atomic_uint made;

    for (unsigned tries = 0; tries < 1000; tries++) {
        const uint64_t number = os_now_ns() * 1000 + atomic_fetch_add(&made, 1);
        snprintf(w->beside, sizeof(w->beside), "%s.%08x-part", w->final,
                 (unsigned)(number ^ number >> 32) ^ (unsigned)getpid());
        w->fd = open(w->beside, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOCTTY, first_mode(w));
        if (w->fd >= 0 || errno != EEXIST)
            break;
    }
    return w->fd >= 0 ? SIDE_OK : error_set_errno(SIDE_IO, where, errno, "cannot write beside %s", ck_shown(w->final));
}

/* Under its lock, and still of that name: whoever had the lock before may have renamed it. */
static side_status open_part(side_writer *w)
{
    struct stat ours, named;

    snprintf(w->beside, sizeof(w->beside), "%s.part", w->final);
    for (;;) {
        w->fd = open(w->beside, O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | O_NOFOLLOW, first_mode(w));
        if (w->fd < 0 || fstat(w->fd, &ours) != 0)
            return error_set_errno(SIDE_IO, where, errno, "cannot write %s", ck_shown(w->beside));
        if (!S_ISREG(ours.st_mode))
            return error_set(SIDE_INVALID, where, "%s is no regular file", ck_shown(w->beside));
        if (flock(w->fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
            return error_set(SIDE_STATE, where, "%s is being written by another; wait for it", ck_shown(w->beside));
        if (lstat(w->beside, &named) == 0 && named.st_dev == ours.st_dev && named.st_ino == ours.st_ino)
            return SIDE_OK;
        close(w->fd);
    }
}

/* Whether the file has our size and header. */
static side_status look_at_part(side_writer *w)
{
    const size_t bytes = w->layout.header_bytes;
    struct stat there;
    size_t done = 0;
    side_status s = SIDE_OK;
    char *header;

    if (fstat(w->fd, &there) != 0 || (uint64_t)there.st_size != w->layout.file_bytes)
        return SIDE_OK;
    header = mem_zalloc(1, bytes);
    if (header == NULL)
        return SIDE_NO_MEMORY;
    s = os_pread_all(w->fd, header, bytes, 0, &done);
    w->resumed = s == SIDE_OK && done == bytes && memcmp(header, w->layout.header, bytes) == 0;
    mem_free(header);
    return s;
}

/* Said now rather than after an hour. Holes of a file that is gone on with count as taken. */
static side_status check_space(const side_writer *w)
{
    struct statvfs fs;

    if (fstatvfs(w->fd, &fs) == 0 && fs.f_blocks != 0 && (uint64_t)fs.f_bavail < w->layout.file_bytes / fs.f_frsize)
        return error_set_errno(SIDE_IO, where, ENOSPC, "%s takes %llu bytes, and %llu are free there",
                               ck_shown(w->final), (unsigned long long)w->layout.file_bytes,
                               (unsigned long long)fs.f_bavail * fs.f_frsize);
    return SIDE_OK;
}

/* The length comes last: a file that has it has the header too. */
static side_status write_header(side_writer *w)
{
    size_t done = 0;
    side_status s = check_space(w);

    if (s == SIDE_OK && ftruncate(w->fd, 0) != 0)
        s = error_set_errno(SIDE_IO, where, errno, "cannot empty %s", ck_shown(w->beside));
    if (s == SIDE_OK)
        s = os_pwrite_all(w->fd, w->layout.header, w->layout.header_bytes, 0, &done);
    if (s == SIDE_OK && ftruncate(w->fd, (off_t)w->layout.file_bytes) != 0)
        s = error_set_errno(SIDE_IO, where, errno, "cannot make %s %llu bytes long", ck_shown(w->beside),
                            (unsigned long long)w->layout.file_bytes);
    if (s == SIDE_OK && w->mode != 0 && fchmod(w->fd, w->mode & 07777) != 0)
        s = error_set_errno(SIDE_IO, where, errno, "cannot give %s the mode of %s", ck_shown(w->beside),
                            "what it replaces");
    return s;
}

side_status side_writer_create(const char *path, const side_tensor *tensors, size_t count,
                               const side_writer_options *options, side_writer **writer)
{
    side_writer_options o = SIDE_WRITER_OPTIONS_INIT;
    side_status s = options_copy(&o, sizeof(o), options, sizeof(o), where);
    side_writer *w;

    if (s != SIDE_OK)
        return s;
    if (path == NULL || *path == '\0' || (tensors == NULL && count != 0) || writer == NULL)
        return error_set(SIDE_INVALID, where, "%s",
                         writer == NULL                  ? "writer is NULL"
                         : tensors == NULL && count != 0 ? "tensors is NULL"
                                                         : "path is NULL or empty");
    if ((o.flags & ~SIDE_WRITER_RESUME) != 0)
        return error_set(SIDE_INVALID, where, "flags 0x%x: unknown ones", o.flags);
    w = mem_zalloc(1, sizeof(*w));
    if (w == NULL)
        return SIDE_NO_MEMORY;
    w->fd = -1;
    w->count = count;
    s = final_name(w, path);
    if (s == SIDE_OK)
        s = st_layout_make(&w->layout, path, tensors, count, &o);
    if (s == SIDE_OK)
        s = (o.flags & SIDE_WRITER_RESUME) != 0 ? open_part(w) : open_new(w);
    if (s == SIDE_OK && (o.flags & SIDE_WRITER_RESUME) != 0)
        s = look_at_part(w);
    if (s == SIDE_OK && !w->resumed)
        s = write_header(w);
    w->resume = s == SIDE_OK && (o.flags & SIDE_WRITER_RESUME) != 0;
    if (s != SIDE_OK) {
        side_error kept;
        error_copy(&kept);
        if ((o.flags & SIDE_WRITER_RESUME) != 0 && w->fd >= 0) {
            close(w->fd); /* another's, or of no header: either is there to be looked at */
            w->fd = -1;
        }
        side_writer_destroy(w);
        return error_restore(&kept);
    }
    *writer = w;
    return SIDE_OK;
}

void side_writer_destroy(side_writer *writer)
{
    if (writer == NULL)
        return;
    if (writer->fd >= 0) {
        if (!writer->resume)
            unlink(writer->beside);
        close(writer->fd);
    }
    st_layout_free(&writer->layout);
    mem_free(writer);
}

/* ---------------------------------------------------------------- data */

bool side_writer_resumed(const side_writer *writer)
{
    return writer != NULL && writer->resumed;
}

static side_status writer_check(const side_writer *writer, size_t index, const char *call)
{
    if (writer == NULL)
        return error_set(SIDE_INVALID, call, "writer is NULL");
    if (writer->fd < 0)
        return error_set(SIDE_STATE, call, "%s is finished", ck_shown(writer->final));
    if (index >= writer->count)
        return error_set(SIDE_INVALID, call, "tensor %zu is out of range; there are %zu, from 0 on", index,
                         writer->count);
    return SIDE_OK;
}

side_status side_writer_place(const side_writer *writer, size_t index, uint64_t *offset, uint64_t *bytes, int *fd)
{
    const side_status s = writer_check(writer, index, "side_writer_place");

    if (s != SIDE_OK)
        return s;
    if (offset != NULL)
        *offset = writer->layout.begin[index];
    if (bytes != NULL)
        *bytes = writer->layout.bytes[index];
    if (fd != NULL)
        *fd = writer->fd;
    return SIDE_OK;
}

side_status side_writer_write(side_writer *writer, size_t index, uint64_t begin, const void *data, size_t bytes)
{
    static const char call[] = "side_writer_write";
    size_t done = 0;
    side_status s = writer_check(writer, index, call);

    if (s != SIDE_OK)
        return s;
    if (data == NULL && bytes != 0)
        return error_set(SIDE_INVALID, call, "data is NULL");
    const uint64_t all = writer->layout.bytes[index];
    if (begin > all || bytes > all - begin)
        return error_set(SIDE_INVALID, call, "tensor %zu has %llu bytes; %zu from byte %llu on do not fit", index,
                         (unsigned long long)all, bytes, (unsigned long long)begin);
    s = os_pwrite_all(writer->fd, data, bytes, writer->layout.begin[index] + begin, &done);
    if (s != SIDE_OK) {
        side_error e;
        error_copy(&e);
        return error_set_errno(s, call, e.os_errno, "cannot write %zu bytes at offset %llu of %s", bytes,
                               (unsigned long long)(writer->layout.begin[index] + begin), ck_shown(writer->beside));
    }
    return SIDE_OK;
}

side_status side_writer_finish(side_writer *writer)
{
    static const char call[] = "side_writer_finish";

    if (writer == NULL)
        return error_set(SIDE_INVALID, call, "writer is NULL");
    if (writer->fd < 0)
        return error_set(SIDE_STATE, call, "%s is finished", ck_shown(writer->final));
    if (fsync(writer->fd) != 0 && errno != EINVAL && errno != ENOTSUP)
        return error_set_errno(SIDE_IO, call, errno, "cannot sync %s", ck_shown(writer->beside));
    if (rename(writer->beside, writer->final) != 0)
        return error_set_errno(SIDE_IO, call, errno, "cannot rename to %s", ck_shown(writer->final));
    close(writer->fd); /* with it goes the lock */
    writer->fd = -1;
    os_sync_parent(writer->final);
    return SIDE_OK;
}
