/* SPDX-License-Identifier: MIT
 *
 * What lies in an unfinished output, and whose it is. Only what a cast made is ever taken away: what its journal names, or what looks as this one would make it. */
#include "cast_private.h"

#include "error.h"
#include "os.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char where[] = "side_cast_create";

bool cast_part_exists(const side_cast *cast)
{
    return cast_exists(cast->part);
}

/* A file of `bytes` that begins with `head`. */
static bool begins_with(const char *path, uint64_t bytes, const char *head, size_t head_bytes)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK | O_NOFOLLOW);
    char text[4096];
    struct stat there;
    bool same = fd >= 0 && fstat(fd, &there) == 0 && S_ISREG(there.st_mode) && (uint64_t)there.st_size == bytes;

    for (size_t at = 0; same && at < head_bytes; at += sizeof(text)) {
        const size_t n = head_bytes - at < sizeof(text) ? head_bytes - at : sizeof(text);
        size_t done = 0;
        same = os_pread_all(fd, text, n, at, &done) == SIDE_OK && done == n && memcmp(text, head + at, n) == 0;
    }
    if (fd >= 0)
        close(fd);
    return same;
}

bool cast_file_is(const struct cast_file *file, const char *path)
{
    return begins_with(path, file->bytes, file->layout.header, file->layout.header_bytes);
}

/* ---------------------------------------------------------------- moved */

static bool is_moved(const side_cast *cast, const char *name, const struct cast_file *file)
{
    char part[CAST_PATH], out[CAST_PATH];

    if (cast_path(cast, cast->part, name, part) != SIDE_OK || cast_path(cast, cast->out, name, out) != SIDE_OK ||
        cast_exists(part))
        return false;
    return file != NULL ? cast_file_is(file, out) : begins_with(out, cast->index_bytes, cast->index, cast->index_bytes);
}

bool cast_find_moved(side_cast *cast)
{
    bool all = true;

    for (size_t i = 0; i < cast->plan.file_count; i++) {
        struct cast_file *file = &cast->plan.files[i];
        file->moved = is_moved(cast, file->name, file);
        all &= file->moved;
    }
    cast->index_moved = cast->index_name != NULL && is_moved(cast, cast->index_name, NULL);
    all &= cast->index_name == NULL || cast->index_moved;
    for (size_t i = 0; !all && !cast->fill && i < cast->plan.file_count; i++) /* there one rename moves all */
        cast->plan.files[i].moved = false;
    cast->index_moved &= all || cast->fill;
    return all;
}

/* ---------------------------------------------------------------- whose it is */

struct walk {
    side_cast *cast;
    const char *journal; /* NULL: none */
    bool remove;
    size_t root; /* bytes of the path that is the unfinished output */
    char path[CAST_PATH];
    char stranger[CAST_PATH]; /* the first; "": none */
};

/* Of that name, or a folder that it goes through. */
static bool is_named(const char *known, size_t known_bytes, const char *name, bool folder)
{
    const size_t n = strlen(name);

    return folder ? n < known_bytes && memcmp(known, name, n) == 0 && known[n] == '/'
                  : n == known_bytes && memcmp(known, name, n) == 0;
}

/* Lines "file BYTES MTIME HASH NAME" and "index BYTES HASH NAME". */
static bool in_journal(const char *line, const char *name, bool folder)
{
    while (strncmp(line, "begin ", 6) != 0) {
        const size_t n = strcspn(line, "\n");
        int skip = strncmp(line, "file ", 5) == 0 ? 4 : strncmp(line, "index ", 6) == 0 ? 3 : 0;
        const char *known = line;
        for (; skip > 0 && known < line + n; skip--)
            known += strcspn(known, " \n") + 1;
        if (known > line && known < line + n && is_named(known, (size_t)(line + n - known), name, folder))
            return true;
        if (line[n] == '\0')
            return false;
        line += n + 1;
    }
    return false;
}

/* By name, and as this cast makes it: whole, or nothing yet. */
static bool as_we_make(const side_cast *cast, const char *path, const char *name, const struct stat *there)
{
    const bool folder = S_ISDIR(there->st_mode);

    for (size_t i = 0; i < cast->plan.file_count; i++) {
        const struct cast_file *file = &cast->plan.files[i];
        if ((!cast->folder && !folder) || is_named(file->name, strlen(file->name), name, folder))
            return folder || there->st_size == 0 || cast_file_is(file, path);
    }
    return !folder && cast->index_name != NULL && strcmp(cast->index_name, name) == 0 &&
           (there->st_size == 0 || begins_with(path, cast->index_bytes, cast->index, cast->index_bytes));
}

/* False: the walk ends. */
static bool visit(struct walk *w, const struct stat *there)
{
    const char *name = w->path + w->root + (w->path[w->root] == '/');
    const bool folder = S_ISDIR(there->st_mode);
    bool ours = folder || S_ISREG(there->st_mode);

    if (*name == '\0') /* the unfinished output itself: of a folder all that is in it was looked at */
        ours = folder || (ours && (w->journal != NULL || (!w->cast->folder && as_we_make(w->cast, w->path, "", there))));
    else
        ours = ours && (w->journal != NULL ? in_journal(w->journal, name, folder)
                                           : w->cast->folder && as_we_make(w->cast, w->path, name, there));
    if (w->remove && ours)
        (void)remove(w->path);
    if (w->remove || ours)
        return true;
    strcpy(w->stranger, w->path);
    return false;
}

/* What is in the folder before the folder itself. A folder that cannot be listed cannot be removed either. */
static bool walk(struct walk *w)
{
    const size_t end = strlen(w->path);
    const struct dirent *entry;
    struct stat there;
    bool on = true;
    DIR *dir;

    if (lstat(w->path, &there) != 0)
        return true;
    dir = S_ISDIR(there.st_mode) ? opendir(w->path) : NULL;
    while (on && dir != NULL && (entry = readdir(dir)) != NULL) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        if (end + 1 + strlen(entry->d_name) >= sizeof(w->path))
            continue; /* none of ours has such a path */
        w->path[end] = '/';
        strcpy(w->path + end + 1, entry->d_name);
        on = walk(w);
        w->path[end] = '\0';
    }
    if (dir != NULL)
        closedir(dir);
    return on && visit(w, &there);
}

static void walk_from_root(struct walk *w, side_cast *cast, const char *journal, bool remove)
{
    w->cast = cast;
    w->journal = journal;
    w->remove = remove;
    w->root = strlen(cast->part);
    strcpy(w->path, cast->part);
    *w->stranger = '\0';
    (void)walk(w);
}

side_status cast_part_remove(side_cast *cast, const char *journal)
{
    struct walk w;

    walk_from_root(&w, cast, journal, false);
    if (*w.stranger != '\0')
        return error_set(SIDE_STATE, where, "%s is of no cast that is known here: move it away; nothing was removed",
                         ck_shown(w.stranger));
    walk_from_root(&w, cast, journal, true);
    if (cast_part_exists(cast))
        return error_set(SIDE_IO, where, "%s cannot be taken away", ck_shown(cast->part));
    return SIDE_OK;
}

void cast_part_clear(side_cast *cast)
{
    struct walk w;

    cast_files_close(cast);
    if (cast->identity != NULL)
        walk_from_root(&w, cast, cast->identity, true);
}
