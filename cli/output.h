/* SPDX-License-Identifier: MIT
 *
 * An output file that is whole or not there: written beside its final name (OUTPUT.sidestream-XXXXXX), synced, then renamed over it. A
 * character device (/dev/null) is written directly.
 */
#ifndef CLI_OUTPUT_H
#define CLI_OUTPUT_H

#include <sidestream.h>

#include <limits.h>
#include <sys/stat.h>

struct output {
    int fd;    /* -1: not open */
    int place; /* with signals.h */
    bool direct;
    int write_errno;      /* of output_write; 0: it did not fail */
    const char *name;     /* as the user wrote it */
    char final[PATH_MAX]; /* symbolic links followed */
    char temporary[PATH_MAX + 24];
};

/* input: must not be the same file; NULL: none. Returns an exit code, having said what is wrong. */
int output_open(struct output *output, const char *name, const struct stat *input);
/* Refuses two outputs under one name: the second would replace the first. Ones that are not open are fine. Returns an exit code. */
int output_apart(const struct output *a, const struct output *b);
/* Returns an exit code; on failure nothing is left behind. */
int output_commit(struct output *output);
/* Takes the unfinished file away. Fine on one that is not open. */
void output_abort(struct output *output);

/* Says why a drawing to the file failed with `status` and takes the file away. Returns an exit code. */
int output_failed(struct output *output, side_status status);

/* A side_write_fn for drawings; user is the struct output. */
int output_write(void *user, const char *text, size_t bytes);

#endif
