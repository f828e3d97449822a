/* SPDX-License-Identifier: MIT */
#include "output.h"
#include "cli.h"
#include "signals.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

/* Says so and returns EXIT_FAILED. */
static int refuse(const char *name, const char *what)
{
    say("output '%s' %s", name, what);
    return EXIT_FAILED;
}

/* mode: that of the file to be replaced; 0: there is none. */
static int open_temporary(struct output *o, mode_t mode)
{
    static const char letters[] = "0123456789abcdefghijklmnopqrstuv";

    for (int attempt = 0; attempt < 100; attempt++) {
        unsigned char random[6];
        char suffix[7] = "";

        if (getrandom(random, sizeof(random), 0) != (ssize_t)sizeof(random))
            return EXIT_FAILED;
        for (size_t i = 0; i < sizeof(random); i++)
            suffix[i] = letters[random[i] % 32];
        snprintf(o->temporary, sizeof(o->temporary), "%s.sidestream-%s", o->final, suffix);
        o->place = signals_unlink_add(o->temporary); /* before it is there, so that no signal can fall between */
        o->fd = open(o->temporary, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, mode != 0 ? 0600 : 0666);
        if (o->fd >= 0) {
            if (mode != 0 && fchmod(o->fd, mode) != 0)
                say("warning: output '%s' loses its permissions: %s", o->name, strerror(errno));
            return EXIT_DONE;
        }
        signals_unlink_drop(o->place);
        o->place = -1;
        if (errno != EEXIST)
            break;
    }
    return EXIT_FAILED;
}

int output_open(struct output *o, const char *name, const struct stat *input)
{
    struct stat there;
    mode_t mode = 0;

    o->fd = o->place = -1;
    o->direct = false;
    o->write_errno = 0;
    o->name = name;
    if (strlen(name) >= sizeof(o->final))
        return refuse(name, "has too long a name");
    strcpy(o->final, name);
    if (stat(name, &there) == 0) {
        if (input != NULL && there.st_dev == input->st_dev && there.st_ino == input->st_ino) {
            refuse(name, "is the input itself; give it another name");
            return EXIT_USAGE;
        }
        if (S_ISDIR(there.st_mode))
            return refuse(name, "is a directory; name a file in it");
        if (!S_ISREG(there.st_mode) && !S_ISCHR(there.st_mode))
            return refuse(name, "is not a regular file");
        o->direct = S_ISCHR(there.st_mode);
        mode = there.st_mode & 0777;
        if (!o->direct && access(name, W_OK) != 0)
            return refuse(name, "exists and is write-protected");
        if (!o->direct && realpath(name, o->final) == NULL)
            return refuse(name, strerror(errno));
    }
    if (o->direct)
        o->fd = open(name, O_RDWR | O_CLOEXEC);
    else if (open_temporary(o, mode) == EXIT_DONE)
        return EXIT_DONE;
    if (o->fd < 0) {
        say("cannot write output '%s': %s", name, strerror(errno));
        return EXIT_FAILED;
    }
    return EXIT_DONE;
}

int output_apart(const struct output *a, const struct output *b)
{
    if (a->place < 0 || b->place < 0 || strcmp(a->final, b->final) != 0)
        return EXIT_DONE;
    refuse(b->name, "is named for two things; give each a name of its own");
    return EXIT_USAGE;
}

int output_commit(struct output *o)
{
    int failed = 0;

    if (fsync(o->fd) != 0 && errno != EINVAL && errno != ENOTSUP)
        failed = errno;
    if (close(o->fd) != 0 && failed == 0)
        failed = errno;
    o->fd = -1;
    if (failed == 0 && !o->direct && rename(o->temporary, o->final) != 0)
        failed = errno;
    if (failed != 0) {
        output_abort(o);
        say("writing output '%s': %s", o->name, strerror(failed));
        return EXIT_FAILED;
    }
    signals_unlink_drop(o->place);
    o->place = -1;
    return EXIT_DONE;
}

void output_abort(struct output *o)
{
    if (o->fd >= 0)
        close(o->fd);
    o->fd = -1;
    if (o->place >= 0) {
        unlink(o->temporary);
        signals_unlink_drop(o->place);
    }
    o->place = -1;
}

int output_failed(struct output *o, side_status status)
{
    int code = EXIT_FAILED;

    if (o->write_errno != 0)
        say("writing output '%s': %s", o->name, strerror(o->write_errno));
    else
        code = say_status(status, "writing output '%s'", o->name);
    output_abort(o);
    return code;
}

int output_write(void *user, const char *text, size_t bytes)
{
    struct output *o = user;

    while (bytes > 0) {
        ssize_t n = write(o->fd, text, bytes);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            o->write_errno = n < 0 ? errno : ENOSPC;
            return 1;
        }
        text += n;
        bytes -= (size_t)n;
    }
    return 0;
}
