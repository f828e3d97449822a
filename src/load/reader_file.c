/* SPDX-License-Identifier: MIT
 * The reader's files: what they are, what they allow, whether they changed. */
#include "reader_private.h"

#include "alloc.h"
#include "error.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char *kind(mode_t mode)
{
    return S_ISDIR(mode)    ? "a directory"
           : S_ISFIFO(mode) ? "a FIFO"
           : S_ISBLK(mode)  ? "a block device"
           : S_ISCHR(mode)  ? "a character device"
           : S_ISSOCK(mode) ? "a socket"
                            : "no regular file";
}

void reader_entry_free(struct reader_entry *e)
{
    if (e == NULL)
        return;
    if (e->direct_fd >= 0)
        close(e->direct_fd);
    if (e->fd_is_ours && e->fd >= 0)
        close(e->fd);
    mem_free(e->path);
    mem_free(e);
}

/* Why not is written into e->why. */
static bool direct_open(struct reader_entry *e)
{
    uint32_t memory, offset;
    struct stat st;

    if (io_direct_align(e->fd, &memory, &offset)) {
        if (memory == 0 || offset == 0) {
            snprintf(e->why, sizeof(e->why), "the file system has no direct reads for it");
            return false;
        }
        if (READER_ALIGN % memory != 0 || READER_ALIGN % offset != 0) {
            snprintf(e->why, sizeof(e->why), "direct reads need an alignment of %u bytes in memory and %u in the file",
                     memory, offset);
            return false;
        }
    }
    int fd = io_open_direct(e->fd);
    if (fd < 0) {
        snprintf(e->why, sizeof(e->why), "O_DIRECT: %s", strerror(-fd));
        return false;
    }
    int r = io_stat(fd, &st);
    if (r != 0 || st.st_dev != e->device || st.st_ino != e->inode) {
        close(fd);
        snprintf(e->why, sizeof(e->why), "/proc/self/fd does not lead to the file");
        return false;
    }
    e->direct_fd = fd;
    return true;
}

/* What does not fit e->size: truncated, or not the file that the caller knows. */
static side_status entry_look(struct reader_entry *e, uint64_t size)
{
    static const char where[] = "reader_file";
    struct stat st;
    int r = io_stat(e->fd, &st);

    if (r != 0)
        return error_set_errno(SIDE_IO, where, -r, "'%.200s' cannot be looked at", e->path);
    if (!S_ISREG(st.st_mode))
        return error_set(SIDE_INVALID, where, "'%.200s' is %s; name a regular file", e->path, kind(st.st_mode));
    e->size = (uint64_t)st.st_size;
    e->device = st.st_dev;
    e->inode = st.st_ino;
    e->modified = st.st_mtim;
    if (size != READER_ANY_SIZE && size != e->size)
        return error_set(SIDE_IO, where, "'%.160s' has %llu bytes now, and had %llu: it was changed; load it again",
                         e->path, (unsigned long long)e->size, (unsigned long long)size);
    return SIDE_OK;
}

static side_status entry_open(struct reader_entry *e, int fd, const char *path, uint64_t size,
                              enum reader_backend backend)
{
    side_status s;

    e->fd = fd;
    e->direct_fd = -1;
    e->path = mem_zalloc(strlen(path) + 1, 1);
    if (e->path == NULL)
        return SIDE_NO_MEMORY;
    strcpy(e->path, path);
    if (fd < 0) {
        e->fd_is_ours = true;
        e->fd = io_open(path);
        if (e->fd < 0)
            return error_set_errno(SIDE_IO, "open", -e->fd, "'%.200s' cannot be opened", path);
    }
    s = entry_look(e, size);
    if (s != SIDE_OK)
        return s;
    bool forced = backend == READER_DIRECT || backend == READER_URING;
    e->memory = io_in_memory(e->fd);
    atomic_init(&e->nowait, true);
    atomic_init(&e->hot, false);
    if (backend == READER_CACHE || backend == READER_PREAD)
        snprintf(e->why, sizeof(e->why), "reads through the page cache are asked for");
    else if (e->memory && !forced)
        snprintf(e->why, sizeof(e->why), "the file system is in memory");
    else
        atomic_init(&e->direct, direct_open(e));
    if (forced && !atomic_load(&e->direct))
        return error_set(SIDE_UNSUPPORTED, "reader_file", "'%.120s' cannot be read by '%s': %s; take 'auto'", path,
                         reader_backend_name(backend), e->why);
    return SIDE_OK;
}

/* Under the lock. */
static side_status entries_grow(reader *r)
{
    uint32_t room = r->entry_room > 0 ? 2 * r->entry_room : 8;
    struct reader_entry **more;

    if (r->entry_count < r->entry_room)
        return SIDE_OK;
    more = mem_zalloc(room, sizeof(struct reader_entry *));
    if (more == NULL)
        return SIDE_NO_MEMORY;
    if (r->entry_count > 0)
        memcpy(more, r->entries, r->entry_count * sizeof(struct reader_entry *));
    mem_free(r->entries);
    r->entries = more;
    r->entry_room = room;
    return SIDE_OK;
}

side_status reader_file(reader *r, int fd, const char *path, uint64_t size, uint32_t *number)
{
    side_status s = os_fork_check(r->fork_generation, "reader_file");
    struct reader_entry *e = s == SIDE_OK ? mem_zalloc(1, sizeof(*e)) : NULL;

    if (e == NULL)
        return s != SIDE_OK ? s : SIDE_NO_MEMORY;
    s = entry_open(e, fd, path, size, r->options.backend);
    if (s == SIDE_OK) {
        pthread_mutex_lock(&r->mutex);
        s = entries_grow(r);
        if (s == SIDE_OK) {
            *number = r->entry_count;
            r->entries[r->entry_count++] = e;
        }
        pthread_mutex_unlock(&r->mutex);
    }
    if (s != SIDE_OK)
        reader_entry_free(e);
    return s;
}

static side_status entry_of(reader *r, uint32_t number, const char *where, struct reader_entry **e)
{
    pthread_mutex_lock(&r->mutex);
    *e = number < r->entry_count ? r->entries[number] : NULL;
    pthread_mutex_unlock(&r->mutex);
    return *e != NULL ? SIDE_OK : error_set(SIDE_NOT_FOUND, where, "no file %u; reader_file gives the numbers", number);
}

static bool same_time(struct timespec a, struct timespec b)
{
    return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

side_status reader_file_check(reader *r, uint32_t number)
{
    static const char where[] = "reader_file_check";
    struct reader_entry *e;
    struct stat st;
    side_status s = entry_of(r, number, where, &e);

    if (s != SIDE_OK)
        return s;
    int code = io_stat(e->fd, &st);
    if (code != 0)
        return error_set_errno(SIDE_IO, where, -code, "'%.200s' cannot be looked at", e->path);
    if ((uint64_t)st.st_size != e->size)
        return error_set(SIDE_IO, where, "'%.160s' has %llu bytes now, and had %llu: it was changed while it was read",
                         e->path, (unsigned long long)st.st_size, (unsigned long long)e->size);
    if (st.st_dev != e->device || st.st_ino != e->inode)
        return error_set(SIDE_IO, where, "'%.160s': its descriptor was closed and leads to another file now", e->path);
    if (!same_time(st.st_mtim, e->modified))
        return error_set(SIDE_IO, where, "'%.160s' was written to while it was read; load it again", e->path);
    return SIDE_OK;
}

side_status reader_file_info(reader *r, uint32_t number, struct reader_file_info *info)
{
    struct reader_entry *e;
    side_status s = entry_of(r, number, "reader_file_info", &e);

    if (s != SIDE_OK)
        return s;
    *info = (struct reader_file_info){.path = e->path, .size = e->size, .memory = e->memory};
    info->direct = atomic_load(&e->direct);
    memcpy(info->why, e->why, sizeof(info->why));
    return SIDE_OK;
}
