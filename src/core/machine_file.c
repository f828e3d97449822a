/* SPDX-License-Identifier: MIT
 *
 * Profiles as files: whole or not there, and for the user alone. */
#include "machine.h"

#include "alloc.h"
#include "error.h"
#include "os.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char load_where[] = "side_machine_load", save_where[] = "side_machine_save";

const char *machine_shown(const char *path)
{
    const size_t n = strlen(path), most = 160;

    return path + (n > most ? n - most : 0);
}

static side_status struct_check(const side_machine *machine, const char *where)
{
    if (machine == NULL)
        return error_set(SIDE_INVALID, where, "machine is NULL");
    if (machine->size != sizeof(*machine))
        return error_set(SIDE_INVALID, where, "machine.size is %zu; fill the struct with SIDE_MACHINE_INIT (%zu)",
                         machine->size, sizeof(*machine));
    return SIDE_OK;
}

/* ---------------------------------------------------------------- load */

/* Not blocking, or a FIFO of that name would hold up whoever opens a device. */
static side_status open_regular(const char *path, int *fd, size_t *bytes)
{
    struct stat there;
    side_status s = SIDE_OK;
    const int made = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);

    if (made < 0 && (errno == ENOENT || errno == ENOTDIR))
        return error_set_errno(SIDE_NOT_FOUND, load_where, errno, "no machine profile %s", machine_shown(path));
    if (made < 0)
        return error_set_errno(SIDE_IO, load_where, errno, "cannot open the machine profile %s", machine_shown(path));
    if (fstat(made, &there) != 0)
        s = error_set_errno(SIDE_IO, load_where, errno, "cannot read the machine profile %s", machine_shown(path));
    else if (!S_ISREG(there.st_mode))
        s = error_set(SIDE_INVALID, load_where, "%s is not a regular file", machine_shown(path));
    else if (there.st_size >= (off_t)MACHINE_TEXT_BYTES)
        s = error_set(SIDE_INVALID, load_where, "%s has %lld bytes; a machine profile has under %zu",
                      machine_shown(path), (long long)there.st_size, MACHINE_TEXT_BYTES);
    if (s != SIDE_OK) {
        close(made);
        return s;
    }
    *fd = made;
    *bytes = (size_t)there.st_size;
    return SIDE_OK;
}

side_status side_machine_load(const char *path, side_machine *machine)
{
    side_status s = struct_check(machine, load_where);
    side_machine *made;
    char *text;
    size_t bytes = 0;
    int fd = -1;

    if (s == SIDE_OK && (path == NULL || *path == '\0'))
        s = error_set(SIDE_INVALID, load_where, "path is NULL or empty");
    if (s == SIDE_OK)
        s = open_regular(path, &fd, &bytes);
    if (s != SIDE_OK)
        return s;
    made = mem_zalloc(1, sizeof(*made) + bytes); /* too large for small stacks */
    s = made != NULL ? SIDE_OK : SIDE_NO_MEMORY;
    if (s == SIDE_OK) {
        text = (char *)(made + 1);
        made->size = sizeof(*made);
        s = os_pread_all(fd, text, bytes, 0, &bytes);
        if (s == SIDE_OK)
            s = machine_read(path, text, bytes, made);
    }
    if (s == SIDE_OK)
        *machine = *made;
    mem_free(made);
    close(fd);
    return s;
}

/* ---------------------------------------------------------------- save */

/* Folders above the file that are not there. */
static side_status make_folders(const char *path)
{
    char folder[PATH_MAX];
    struct stat there;
    const char *slash = path;

    while ((slash = strchr(slash + 1, '/')) != NULL) {
        size_t n = (size_t)(slash - path);
        memcpy(folder, path, n);
        folder[n] = '\0';
        if (stat(folder, &there) != 0 && mkdir(folder, 0700) != 0 && errno != EEXIST)
            return error_set_errno(SIDE_IO, save_where, errno, "cannot make the folder %s", machine_shown(folder));
    }
    return SIDE_OK;
}

/* A link is followed, since renaming would replace it; what is no file is left alone. */
static side_status final_name(const char *path, char final[PATH_MAX])
{
    struct stat there;

    if (path == NULL || *path == '\0')
        return error_set(SIDE_INVALID, save_where, "path is NULL or empty");
    if (strlen(path) >= PATH_MAX - sizeof(".XXXXXX"))
        return error_set(SIDE_INVALID, save_where, "the path has %zu bytes; %zu are possible", strlen(path),
                         PATH_MAX - sizeof(".XXXXXX") - 1);
    strcpy(final, path);
    if (stat(path, &there) != 0)
        return SIDE_OK;
    if (!S_ISREG(there.st_mode))
        return error_set(SIDE_INVALID, save_where, "%s is not a regular file", machine_shown(path));
    if (realpath(path, final) == NULL || strlen(final) >= PATH_MAX - sizeof(".XXXXXX"))
        return error_set(SIDE_INVALID, save_where, "%s cannot be followed", machine_shown(path));
    return SIDE_OK;
}

static side_status write_file(const char *final, const char *text, size_t bytes)
{
    char beside[PATH_MAX + 16];
    side_status s;
    size_t done = 0;

    snprintf(beside, sizeof(beside), "%s.XXXXXX", final);
    const int fd = mkostemp(beside, O_CLOEXEC); /* 0600 */
    if (fd < 0)
        return error_set_errno(SIDE_IO, save_where, errno, "cannot write beside %s", machine_shown(final));
    s = os_pwrite_all(fd, text, bytes, 0, &done);
    if (s == SIDE_OK && fsync(fd) != 0 && errno != EINVAL && errno != ENOTSUP)
        s = error_set_errno(SIDE_IO, save_where, errno, "cannot sync %s", machine_shown(beside));
    if (close(fd) != 0 && s == SIDE_OK)
        s = error_set_errno(SIDE_IO, save_where, errno, "cannot write %s", machine_shown(beside));
    if (s == SIDE_OK && rename(beside, final) != 0)
        s = error_set_errno(SIDE_IO, save_where, errno, "cannot rename to %s", machine_shown(final));
    if (s != SIDE_OK) {
        side_error kept;
        error_copy(&kept);
        unlink(beside);
        return error_set_errno(s, kept.where, kept.os_errno, "the machine profile %s was not written",
                               machine_shown(final));
    }
    os_sync_parent(final);
    return SIDE_OK;
}

side_status side_machine_save(const char *path, const side_machine *machine)
{
    char final[PATH_MAX], *text;
    side_status s = struct_check(machine, save_where);

    if (s == SIDE_OK)
        s = machine_check(machine, save_where);
    if (s == SIDE_OK)
        s = final_name(path, final);
    if (s != SIDE_OK)
        return s;
    text = mem_zalloc(1, MACHINE_TEXT_BYTES);
    if (text == NULL)
        return SIDE_NO_MEMORY;
    const size_t bytes = machine_write(machine, text);
    s = make_folders(final);
    if (s == SIDE_OK)
        s = write_file(final, text, bytes);
    mem_free(text);
    return s;
}
