/* SPDX-License-Identifier: MIT
 *
 * The end of a cast: the new files get what the input's rights allow, are synced, and appear under their names. At once, by one rename; in a folder that was
 * there, one after another, the index file last. Whoever is stopped in between goes on there: which are moved is seen from where they lie. */
#include "cast_private.h"

#include "error.h"
#include "os.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

static const char where[] = "side_cast_run";

/* ---------------------------------------------------------------- rights */

/* The process's umask, which can be asked for only by setting it, for all threads. */
static mode_t read_umask(void)
{
    FILE *f = fopen("/proc/thread-self/status", "re");
    unsigned mask = S_IWGRP | S_IWOTH; /* where nobody tells */
    char line[128];

    while (f != NULL && fgets(line, sizeof(line), f) != NULL)
        if (sscanf(line, "Umask: %o", &mask) == 1)
            break;
    if (f != NULL)
        fclose(f);
    return (mode_t)mask & 0777;
}

struct cast_rights cast_rights_of(int fd, mode_t replaced)
{
    struct cast_rights r = {.bits = 0600};
    struct stat there;

    if (fstat(fd, &there) != 0)
        return r;
    r.bits = there.st_mode & 0777 & (replaced != 0 ? replaced : ~read_umask());
    r.group = there.st_gid;
    r.everybody = (there.st_mode & S_IROTH) != 0;
    r.listed = fgetxattr(fd, "system.posix_acl_access", NULL, 0) > 0;
    return r;
}

/* Of another group there may be people who must not read the input. */
static mode_t bits_for(const struct cast_rights *r, gid_t group)
{
    return r->everybody || (r->group == group && !r->listed) ? r->bits : r->bits & ~(mode_t)S_IRWXG;
}

/* Best effort: some file systems have no rights. */
static void give_rights(int fd, const struct cast_rights *r)
{
    struct stat made;

    if (fstat(fd, &made) == 0)
        (void)fchmod(fd, bits_for(r, made.st_gid));
}

/* A new folder's, of the one that the input's file lies in; what its parent gave it stays, such as setgid. */
static void give_folder_rights(const char *made, const char *from)
{
    const int fd = open(made, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    const int in = open(*from != '\0' ? from : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct stat there;

    if (fd >= 0 && in >= 0 && fstat(fd, &there) == 0) {
        const struct cast_rights r = cast_rights_of(in, 0);
        (void)fchmod(fd, (there.st_mode & 07000) | 0700 | bits_for(&r, there.st_gid));
    }
    if (fd >= 0)
        close(fd);
    if (in >= 0)
        close(in);
}

/* ---------------------------------------------------------------- syncing */

/* The folders between `under` and the file: their rights are of those that the input's file lies in. `make`: also those that are not there, and only those are changed. */
static side_status finish_folders(const side_cast *cast, const char *under, size_t number, bool make)
{
    const char *from = cast->checkpoint->files[number].path, *name = cast->plan.files[number].name;
    const size_t lead = strlen(from) - strlen(name);
    char made[CAST_PATH], in[CAST_PATH];
    side_status s = cast_path(cast, under, name, made);

    snprintf(in, sizeof(in), "%s", from);
    for (char *slash = strchr(name, '/'); s == SIDE_OK && slash != NULL; slash = strchr(slash + 1, '/')) {
        char *end = made + strlen(under) + 1 + (slash - name);
        int r = 0;
        *end = '\0';
        in[lead + (size_t)(slash - name)] = '\0';
        if (make)
            r = mkdir(made, 0700);
        if (r == 0)
            give_folder_rights(made, in);
        else if (errno != EEXIST)
            s = error_set_errno(SIDE_IO, where, errno, "cannot make the folder %s", ck_shown(made));
        os_sync_folder(made);
        os_sync_parent(made);
        *end = '/';
        in[lead + (size_t)(slash - name)] = '/';
    }
    return s;
}

static side_status write_index(const side_cast *cast)
{
    char path[CAST_PATH];
    side_status s = cast_path(cast, cast->part, cast->index_name, path);
    size_t done = 0;
    int fd;

    if (s != SIDE_OK)
        return s;
    (void)unlink(path); /* one that had its rights already may be one that nobody may write to */
    fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return error_set_errno(SIDE_IO, where, errno, "cannot write %s", ck_shown(path));
    s = os_pwrite_all(fd, cast->index, cast->index_bytes, 0, &done);
    if (s != SIDE_OK)
        s = error_set_errno(SIDE_IO, where, side_last_error()->os_errno, "cannot write %s", ck_shown(path));
    if (s == SIDE_OK)
        give_rights(fd, &cast->index_rights);
    if (s == SIDE_OK && fsync(fd) != 0 && errno != EINVAL && errno != ENOTSUP)
        s = error_set_errno(SIDE_IO, where, errno, "cannot sync %s", ck_shown(path));
    close(fd);
    return s;
}

static side_status finish_files(const side_cast *cast)
{
    for (size_t i = 0; i < cast->plan.file_count; i++) {
        const struct cast_file *file = &cast->plan.files[i];
        if (file->moved)
            continue;
        give_rights(file->fd, &file->rights);
        if (fsync(file->fd) != 0 && errno != EINVAL && errno != ENOTSUP)
            return error_set_errno(SIDE_IO, where, errno, "cannot sync %s", ck_shown(cast->part));
    }
    return cast->index_name != NULL && !cast->index_moved ? write_index(cast) : SIDE_OK;
}

/* ---------------------------------------------------------------- renaming */

/* What came to lie there meanwhile is not replaced. */
static side_status rename_new(const char *from, const char *to)
{
    int r = renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE);

    if (r != 0 && (errno == EINVAL || errno == ENOSYS)) { /* not every file system can */
        errno = EEXIST;
        r = cast_exists(to) ? -1 : rename(from, to);
    }
    if (r == 0)
        return SIDE_OK;
    if (errno == EEXIST)
        return error_set_errno(
            SIDE_IO, where, errno,
            "cannot rename to %s, which was made meanwhile: move it away, and cast again, which takes "
            "but the renaming",
            ck_shown(to));
    return error_set_errno(SIDE_IO, where, errno, "cannot rename to %s", ck_shown(to));
}

static void give_input_folder_rights(const side_cast *cast)
{
    const side_checkpoint *ck = cast->checkpoint;
    const char *from = ck->index != NULL ? ck->index : ck->files[0].path;
    const char *name = ck->index != NULL ? cast->index_name : cast->plan.files[0].name;
    char in[CAST_PATH];

    snprintf(in, sizeof(in), "%.*s", (int)(strlen(from) - strlen(name)), from);
    give_folder_rights(cast->part, in);
}

static side_status rename_all(side_cast *cast)
{
    side_status s = SIDE_OK;

    for (size_t i = 0; s == SIDE_OK && cast->folder && i < cast->plan.file_count; i++)
        s = finish_folders(cast, cast->part, i, false);
    if (s == SIDE_OK && cast->folder) {
        give_input_folder_rights(cast);
        os_sync_folder(cast->part);
    }
    if (s == SIDE_OK)
        s = cast_journal_moving(cast);
    if (s == SIDE_OK && cast->mode != 0 && rename(cast->part, cast->out) != 0)
        s = error_set_errno(SIDE_IO, where, errno, "cannot rename to %s", ck_shown(cast->out));
    else if (s == SIDE_OK && cast->mode == 0)
        s = rename_new(cast->part, cast->out);
    os_sync_parent(cast->out);
    return s;
}

/* The folders are on the disk before the index is in them. */
static side_status move_in(side_cast *cast)
{
    char from[CAST_PATH], to[CAST_PATH];
    side_status s = SIDE_OK;

    for (size_t i = 0; s == SIDE_OK && i < cast->plan.file_count; i++) {
        struct cast_file *file = &cast->plan.files[i];
        if (file->moved)
            continue;
        s = finish_folders(cast, cast->out, i, true);
        if (s == SIDE_OK)
            s = cast_path(cast, cast->part, file->name, from);
        if (s == SIDE_OK)
            s = cast_path(cast, cast->out, file->name, to);
        if (s == SIDE_OK)
            s = rename_new(from, to);
        if (s == SIDE_OK && strchr(file->name, '/') != NULL)
            os_sync_parent(to);
        file->moved = s == SIDE_OK;
    }
    os_sync_folder(cast->out);
    if (s == SIDE_OK && cast->index_name != NULL && !cast->index_moved) {
        s = cast_path(cast, cast->part, cast->index_name, from);
        if (s == SIDE_OK)
            s = cast_path(cast, cast->out, cast->index_name, to);
        if (s == SIDE_OK)
            s = rename_new(from, to);
        os_sync_folder(cast->out);
    }
    if (s == SIDE_OK)
        cast_part_clear(cast);
    return s;
}

side_status cast_commit(side_cast *cast)
{
    side_status s = finish_files(cast);

    if (s == SIDE_OK)
        s = cast->fill ? move_in(cast) : rename_all(cast);
    if (s == SIDE_OK)
        cast_files_close(cast);
    return s;
}
