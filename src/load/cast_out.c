/* SPDX-License-Identifier: MIT
 *
 * The output's name, before anything is read: what is there already, where the unfinished output lies, and what is refused.
 *
 *     OUT is not there, or a file     OUT.cast-part, OUT.cast-journal          one rename makes all of it appear
 *     OUT is a folder                 OUT/.cast-part/, OUT/.cast-journal       it may be a mount point, or somebody's working folder: it stays itself,
 *                                                                              and files are moved to their names in it */
#include "cast_private.h"

#include "error.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef STATX_ATTR_MOUNT_ROOT
#define STATX_ATTR_MOUNT_ROOT 0x2000
#endif

static const char where[] = "side_cast_create";

bool cast_exists(const char *path)
{
    struct stat there;

    return lstat(path, &there) == 0;
}

side_status cast_in_the_way(const side_cast *cast, const char *what)
{
    if (cast->folder)
        return error_set(SIDE_STATE, where, "output %s is there and not empty%s%.60s%s; name a new folder, or empty it",
                         ck_shown(cast->out), *what != '\0' ? " (" : "", what, *what != '\0' ? ")" : "");
    return error_set(SIDE_STATE, where, "output %s is there; name another file, or ask that it be replaced (--force)",
                     ck_shown(cast->out));
}

/* ---------------------------------------------------------------- what is not there */

/* A link to nothing, or a name that says folder of what would be a file. */
static side_status check_absent(const side_cast *cast, const char *given, int why)
{
    char target[128];
    const ssize_t n = readlink(cast->out, target, sizeof(target) - 1);

    if (n > 0 && why == ENOENT) {
        target[n] = '\0';
        return error_set(SIDE_INVALID, where,
                         "output %s is a link to %s, which is not there; remove the link, or give another name",
                         ck_shown(cast->out), target);
    }
    if (why != ENOENT)
        return error_set_errno(SIDE_IO, where, why, "output %s cannot be looked at", ck_shown(given));
    if (!cast->folder && ck_ends(given, "/"))
        return error_set(SIDE_INVALID, where, "output %s is not there, and the input one file; name a file in a folder",
                         ck_shown(given));
    return SIDE_OK;
}

/* ---------------------------------------------------------------- what is there */

static bool is_input(const side_cast *cast, const struct stat *there)
{
    const side_checkpoint *ck = cast->checkpoint;

    for (size_t i = 0; i < ck->file_count; i++)
        if (ck->files[i].device == there->st_dev && ck->files[i].inode == there->st_ino)
            return true;
    return false;
}

static side_status the_input_itself(const side_cast *cast)
{
    return error_set(SIDE_INVALID, where, "output %s is the input itself; give it another name", ck_shown(cast->out));
}

/* Nothing is renamed over a mount point. Kernels before 5.8 do not tell: then by the device, which misses a file bound over another of its own. */
static bool is_mount_point(const char *path, const struct stat *there)
{
    char parent[PATH_MAX];
    struct stat above;
    struct statx x;
    char *slash;

    if (statx(AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, STATX_TYPE, &x) == 0 &&
        (x.stx_attributes_mask & STATX_ATTR_MOUNT_ROOT) != 0)
        return (x.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0;
    snprintf(parent, sizeof(parent), "%s", path); /* of the root, since links were followed */
    slash = strrchr(parent, '/');
    if (slash == NULL)
        return false;
    slash[slash == parent] = '\0';
    return stat(parent, &above) == 0 && above.st_dev != there->st_dev;
}

/* What is unfinished is begun anew, and taken away at the end. `from`: a folder may be the input, NULL: none is. */
static side_status is_no_unfinished_input(const side_cast *cast, const struct stat *from, const char *path)
{
    struct stat there;

    if (stat(path, &there) != 0)
        return SIDE_OK;
    if (!is_input(cast, &there) && (from == NULL || from->st_dev != there.st_dev || from->st_ino != there.st_ino))
        return SIDE_OK;
    return error_set(SIDE_INVALID, where,
                     "the input is %s, which is the unfinished one of output %s; give another output", ck_shown(path),
                     cast->out);
}

static side_status look_at_file(side_cast *cast, const struct stat *there)
{
    if (S_ISDIR(there->st_mode))
        return error_set(SIDE_INVALID, where, "output %s is a folder, and the input one file; name a file in it",
                         ck_shown(cast->out));
    if (!S_ISREG(there->st_mode))
        return error_set(SIDE_INVALID, where, "output %s is no regular file", ck_shown(cast->out));
    cast->in_the_way = (cast->options.flags & SIDE_CAST_REPLACE) == 0;
    cast->mode = there->st_mode & (S_IFREG | 07777);
    if (!cast->in_the_way && is_mount_point(cast->out, there))
        return error_set(SIDE_INVALID, where,
                         "output %s is a mount point, which no other file can replace; name another file",
                         ck_shown(cast->out));
    return is_input(cast, there) ? the_input_itself(cast) : SIDE_OK;
}

/* An entry of the folder that is not of a cast into it. */
static side_status list_folder(side_cast *cast)
{
    DIR *dir = opendir(cast->out);
    const struct dirent *entry;

    if (dir == NULL)
        return error_set_errno(SIDE_IO, where, errno, "cannot list the folder %s", ck_shown(cast->out));
    while (*cast->other == '\0' && (entry = readdir(dir)) != NULL)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0 &&
            strcmp(entry->d_name, ".cast-part") != 0 && strcmp(entry->d_name, ".cast-journal") != 0)
            snprintf(cast->other, sizeof(cast->other), "%s", entry->d_name);
    closedir(dir);
    return SIDE_OK;
}

static side_status look_at_folder(side_cast *cast, const struct stat *there)
{
    const bool begun = cast_exists(cast->part) || cast_exists(cast->journal);
    side_status s;

    if (S_ISREG(there->st_mode))
        return error_set(SIDE_INVALID, where, "output %s is a file, and the input a folder of shards; name a folder",
                         ck_shown(cast->out));
    if (!S_ISDIR(there->st_mode))
        return error_set(SIDE_INVALID, where, "output %s is no folder", ck_shown(cast->out));
    s = list_folder(cast);
    if (s != SIDE_OK)
        return s;
    if (begun && *cast->other == '\0')
        return error_set(
            SIDE_STATE, where,
            "output %s is an empty folder, and what was begun before it was there lies beside it: remove the "
            "folder to go on, or else that .cast-part and .cast-journal",
            ck_shown(cast->out));
    cast->fill = !begun;
    cast->in_the_way = begun;
    if (begun)
        return SIDE_OK;
    snprintf(cast->part, sizeof(cast->part), "%s/.cast-part", cast->out);
    snprintf(cast->journal, sizeof(cast->journal), "%s/.cast-journal", cast->out);
    cast->in_the_way = *cast->other != '\0' && !cast_exists(cast->journal);
    return cast->in_the_way ? cast_in_the_way(cast, cast->other) : SIDE_OK;
}

side_status cast_paths(side_cast *cast, const char *in, const char *out)
{
    size_t bytes = strlen(out);
    struct stat there, from;
    const bool found = stat(in, &from) == 0;
    side_status s = SIDE_OK;

    while (bytes > 1 && out[bytes - 1] == '/')
        bytes--;
    if (bytes >= PATH_MAX)
        return error_set(SIDE_INVALID, where, "output: the path has %zu bytes; %d are possible", bytes, PATH_MAX - 1);
    memcpy(cast->out, out, bytes);
    cast->folder = cast->checkpoint->index != NULL || (found && S_ISDIR(from.st_mode));
    cast->there = stat(cast->out, &there) == 0;
    if (!cast->there)
        s = check_absent(cast, out, errno);
    if (cast->there) {
        char final[PATH_MAX];
        if (realpath(cast->out, final) == NULL)
            return error_set_errno(SIDE_IO, where, errno, "output %s cannot be followed", ck_shown(cast->out));
        strcpy(cast->out, final);
    }
    snprintf(cast->part, sizeof(cast->part), "%s.cast-part", cast->out);
    snprintf(cast->journal, sizeof(cast->journal), "%s.cast-journal", cast->out);
    if (s == SIDE_OK)
        s = is_no_unfinished_input(cast, found ? &from : NULL, cast->part);
    if (s == SIDE_OK)
        s = is_no_unfinished_input(cast, found ? &from : NULL, cast->journal);
    if (s != SIDE_OK || !cast->there)
        return s;
    if (found && from.st_dev == there.st_dev && from.st_ino == there.st_ino)
        return the_input_itself(cast);
    return cast->folder ? look_at_folder(cast, &there) : look_at_file(cast, &there);
}
