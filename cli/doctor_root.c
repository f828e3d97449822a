/* SPDX-License-Identifier: MIT
 *
 * Reading files of the machine that is looked at: a live one, a copy that somebody sent, or one that a test made. Such a copy may hold
 * anything: links in a circle or out of the root, pipes, folders where files should be, files without end. */
#include "doctor.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LINKS = 40, NAMES = 65536 };

/* ---------------------------------------------------------------- paths */

/* Takes the last part off; the root itself stays. */
static void go_up(char *real, size_t root)
{
    char *slash = strrchr(real + root, '/');

    if (slash != NULL)
        *slash = '\0';
}

/* The rest of the way with a link's target before it; from the root again where the target is absolute. */
static bool follow(char *real, size_t root, const char *target, const char *rest, char todo[PATH_MAX])
{
    char joined[PATH_MAX];
    int n = snprintf(joined, sizeof(joined), "%s/%s", target, rest);

    if (n < 0 || (size_t)n >= sizeof(joined)) {
        errno = ENAMETOOLONG;
        return false;
    }
    memcpy(todo, joined, (size_t)n + 1);
    if (*target == '/')
        real[root] = '\0';
    else
        go_up(real, root);
    return true;
}

/* Appends one part, and follows it where it is a link and `links` is not used up. */
static bool step(char *real, size_t root, const char *part, size_t part_bytes, const char *rest, char todo[PATH_MAX],
                 int *links)
{
    char target[PATH_MAX];
    size_t n = strlen(real);
    ssize_t got;

    if (n + 1 + part_bytes >= PATH_MAX) {
        errno = ENAMETOOLONG;
        return false;
    }
    real[n] = '/';
    memcpy(real + n + 1, part, part_bytes);
    real[n + 1 + part_bytes] = '\0';
    got = readlink(real, target, sizeof(target) - 1);
    if (got < 0) {
        memmove(todo, rest, strlen(rest) + 1);
        return errno == EINVAL; /* there, and no link */
    }
    target[got] = '\0';
    if (++*links > LINKS) {
        errno = ELOOP;
        return false;
    }
    return follow(real, root, target, rest, todo);
}

bool doctor_path(const struct doctor *d, const char *path, char real[PATH_MAX])
{
    char todo[PATH_MAX];
    size_t root = strlen(d->root);
    int links = 0;

    if (strlen(path) >= sizeof(todo)) {
        errno = ENAMETOOLONG;
        return false;
    }
    strcpy(todo, path);
    strcpy(real, d->root);
    for (;;) {
        const char *part = todo + strspn(todo, "/");
        size_t n = strcspn(part, "/");

        if (n == 0)
            break;
        if (part[0] == '.' && (n == 1 || (n == 2 && part[1] == '.'))) {
            if (n == 2)
                go_up(real, root);
            memmove(todo, part + n, strlen(part + n) + 1);
        } else if (!step(real, root, part, n, part + n, todo, &links)) {
            return false;
        }
    }
    if (*real == '\0')
        strcpy(real, "/");
    return true;
}

bool doctor_path_inside(const struct doctor *d, const char *path, char inside[PATH_MAX])
{
    size_t root = strlen(d->root);

    if (!doctor_path(d, path, inside))
        return false;
    memmove(inside, inside + root, strlen(inside + root) + 1);
    return true;
}

bool doctor_exists(const struct doctor *d, const char *path)
{
    char real[PATH_MAX];

    return doctor_path(d, path, real);
}

bool doctor_readlink(const struct doctor *d, const char *folder, const char *name, char *target, size_t bytes)
{
    char real[PATH_MAX], path[PATH_MAX];
    ssize_t n;

    if (!doctor_path(d, folder, real) || !doctor_join(path, real, name, NULL))
        return false;
    n = readlink(path, target, bytes - 1);
    if (n < 0)
        return false;
    target[n] = '\0';
    return true;
}

bool doctor_join(char path[PATH_MAX], const char *first, ...)
{
    size_t used = strlen(first);
    const char *part;
    bool fits = used < PATH_MAX;
    va_list parts;

    if (fits)
        memcpy(path, first, used + 1);
    va_start(parts, first);
    while (fits && (part = va_arg(parts, const char *)) != NULL) {
        size_t n = strlen(part);

        fits = used + 1 + n < PATH_MAX;
        if (!fits)
            break;
        path[used] = '/';
        memcpy(path + used + 1, part, n + 1);
        used += 1 + n;
    }
    va_end(parts);
    if (!fits)
        errno = ENAMETOOLONG;
    return fits;
}

/* ---------------------------------------------------------------- files */

/* Looks before it opens: opening a device may do things, opening a pipe may block. */
static int open_plain(const char *real)
{
    struct stat before;
    int fd;

    if (lstat(real, &before) != 0)
        return -1;
    if (!S_ISREG(before.st_mode)) {
        errno = S_ISDIR(before.st_mode) ? EISDIR : EINVAL;
        return -1;
    }
    fd = open(real, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd >= 0 && (fstat(fd, &before) != 0 || !S_ISREG(before.st_mode))) {
        close(fd);
        errno = EINVAL;
        return -1;
    }
    return fd;
}

ssize_t doctor_read(const struct doctor *d, const char *path, char *text, size_t bytes)
{
    char real[PATH_MAX];
    size_t used = 0;
    ssize_t n = 0;
    int fd, kept;

    text[0] = '\0';
    if (!doctor_path(d, path, real) || (fd = open_plain(real)) < 0)
        return -1;
    while (used < bytes - 1 && ((n = read(fd, text + used, bytes - 1 - used)) > 0 || (n < 0 && errno == EINTR)))
        used += n > 0 ? (size_t)n : 0;
    kept = errno;
    close(fd);
    text[used] = '\0';
    errno = kept;
    return n < 0 && used == 0 ? -1 : (ssize_t)used;
}

/* Copies what stands up to the end of the line, without blanks around it. */
static void trimmed(const char *from, char *to, size_t bytes)
{
    size_t n;

    from += strspn(from, " \t");
    n = strcspn(from, "\r\n");
    n = n < bytes ? n : bytes - 1;
    while (n > 0 && isspace((unsigned char)from[n - 1]))
        n--;
    memcpy(to, from, n);
    to[n] = '\0';
}

bool doctor_line(const struct doctor *d, const char *path, char *line, size_t bytes)
{
    char text[4096];

    line[0] = '\0';
    if (doctor_read(d, path, text, sizeof(text)) < 0)
        return false;
    trimmed(text, line, bytes);
    return true;
}

bool doctor_number(const struct doctor *d, const char *path, long long *number)
{
    char line[32], *end;
    long long value;

    if (!doctor_line(d, path, line, sizeof(line)) || *line == '\0')
        return false;
    errno = 0;
    value = strtoll(line, &end, 0);
    if (*end != '\0' || errno != 0)
        return false;
    *number = value;
    return true;
}

const char *doctor_text(struct doctor *d, const char *path)
{
    return doctor_read(d, path, d->text, DOCTOR_TEXT) < 0 ? NULL : d->text;
}

bool doctor_value(const char *text, const char *key, char *value, size_t bytes)
{
    size_t n = strlen(key);

    value[0] = '\0';
    for (const char *line = text; line != NULL; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, key, n) != 0)
            continue;
        trimmed(line + n, value, bytes);
        return true;
    }
    return false;
}

const char *doctor_env(const struct doctor *d, const char *name)
{
    size_t n = strlen(name);

    for (const char *at = d->environment; *at != '\0'; at += strlen(at) + 1)
        if (strncmp(at, name, n) == 0 && at[n] == '=')
            return at + n + 1;
    return NULL;
}

/* ---------------------------------------------------------------- folders */

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

struct doctor_names doctor_list(const struct doctor *d, const char *path, const char *prefix)
{
    struct doctor_names names = {NULL, 0};
    char real[PATH_MAX];
    struct dirent *entry;
    size_t room = 0;
    DIR *folder;

    if (!doctor_path(d, path, real) || (folder = opendir(real)) == NULL)
        return names;
    while (names.count < NAMES && (entry = readdir(folder)) != NULL) {
        if (strncmp(entry->d_name, prefix, strlen(prefix)) != 0 || strcmp(entry->d_name, ".") == 0 ||
            strcmp(entry->d_name, "..") == 0)
            continue;
        if (names.count == room) {
            char **more = realloc(names.name, (room = room * 2 + 16) * sizeof(*more));

            if (more == NULL)
                break;
            names.name = more;
        }
        if ((names.name[names.count] = strdup(entry->d_name)) == NULL)
            break;
        names.count++;
    }
    closedir(folder);
    if (names.count > 0)
        qsort(names.name, names.count, sizeof(*names.name), by_name);
    return names;
}

void doctor_names_free(struct doctor_names *names)
{
    for (size_t i = 0; i < names->count; i++)
        free(names->name[i]);
    free(names->name);
    names->name = NULL;
    names->count = 0;
}
