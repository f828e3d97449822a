/* SPDX-License-Identifier: MIT
 *
 * The journal of an unfinished output: text, a line each
 *
 *     sidestream cast journal 2
 *     to BF16                                  options that shape the pieces
 *     piece 8388608
 *     tensors HASH                             what becomes of each
 *     index BYTES HASH NAME                    of the index file
 *     file BYTES MTIME HASH NAME               of each input, and of its header
 *     begin HASH                               of all lines above
 *     done FIRST END HASH                      pieces whose bytes are synced; of this line and `begin`
 *     moving INODE HASH                        the last: what is about to get OUT's name at once
 *
 * A line that was cut off, or whose hash is not its own, ends it. Locked while a cast is at it. */
#include "cast_private.h"

#include "alloc.h"
#include "error.h"
#include "os.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LINE = 96, MOST = 1 << 30, WHY = 200 };

static const char where[] = "side_cast_create";

/* ---------------------------------------------------------------- identity */

static side_status header_hash(const struct ck_file *file, uint64_t *hash)
{
    enum { STEP = 1 << 16 };
    unsigned char *buffer = mem_zalloc(1, STEP);
    side_status s = buffer != NULL ? SIDE_OK : SIDE_NO_MEMORY;

    *hash = CAST_HASH;
    for (uint64_t at = 0; s == SIDE_OK && at < file->data; at += STEP) {
        const size_t want = file->data - at < STEP ? (size_t)(file->data - at) : STEP;
        size_t done = 0;
        s = os_pread_all(file->fd, buffer, want, at, &done);
        if (s != SIDE_OK || done != want) {
            s = error_set(SIDE_IO, where, "%s: its header cannot be read again", ck_shown(file->path));
            break;
        }
        *hash = cast_hash(*hash, buffer, want);
    }
    mem_free(buffer);
    return s;
}

static void put(char **text, size_t *bytes, size_t *room, const char *format, ...) __attribute__((format(printf, 4, 5)));
static void put(char **text, size_t *bytes, size_t *room, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    const int n = vsnprintf(*text, *room, format, arguments);
    va_end(arguments);
    *text += n;
    *room -= (size_t)n;
    *bytes += (size_t)n;
}

/* Names of shards, from an index file, that the journal or an output folder cannot hold. */
static side_status check_name(const char *name)
{
    char shown[CK_NAME_SHOWN];
    const size_t n = strcspn(name, "/");
    const bool taken = (n == 10 && memcmp(name, ".cast-part", n) == 0) ||
                       (n == 13 && memcmp(name, ".cast-journal", n) == 0);

    if (strchr(name, '\n') == NULL && !taken)
        return SIDE_OK;
    return error_set(SIDE_INVALID, where,
                     "a shard is named \"%s\", which a cast cannot write: rename it, in the index file too",
                     ck_escaped(name, strlen(name), shown));
}

static side_status make_identity(side_cast *cast)
{
    const side_checkpoint *ck = cast->checkpoint;
    size_t room = 512, bytes = 0;
    side_status s = SIDE_OK;
    char *text;

    room += cast->index_name != NULL ? strlen(cast->index_name) : 0;
    for (size_t i = 0; i < ck->file_count; i++)
        room += strlen(cast->plan.files[i].name) + LINE;
    text = cast->identity = mem_zalloc(1, room);
    if (text == NULL)
        return SIDE_NO_MEMORY;
    put(&text, &bytes, &room, "sidestream cast journal 2\nto %s\npiece %zu\ntensors %016llx\n",
        side_dtype_name(cast->options.to), cast->options.piece_bytes, (unsigned long long)cast->plan.choice);
    if (ck->index != NULL)
        put(&text, &bytes, &room, "index %zu %016llx %s\n", cast->index_bytes, (unsigned long long)cast->index_hash,
            cast->index_name);
    for (size_t i = 0; s == SIDE_OK && i < ck->file_count; i++) {
        const struct ck_file *file = &ck->files[i];
        uint64_t hash = 0;
        s = check_name(cast->plan.files[i].name);
        if (s == SIDE_OK)
            s = header_hash(file, &hash);
        put(&text, &bytes, &room, "file %llu %llu %016llx %s\n", (unsigned long long)file->bytes,
            (unsigned long long)file->mtime_ns, (unsigned long long)hash, cast->plan.files[i].name);
    }
    cast->identity_hash = cast_hash(CAST_HASH, cast->identity, bytes);
    put(&text, &bytes, &room, "begin %016llx\n", (unsigned long long)cast->identity_hash);
    cast->identity_bytes = bytes;
    return s;
}

/* ---------------------------------------------------------------- reading */

/* Of two lines "file BYTES MTIME HASH NAME": which file, and how it differs. */
static void say_file(char why[WHY], const char *was, const char *is)
{
    unsigned long long bytes[2], time[2], hash[2];
    int at[2] = {0, 0};

    if (sscanf(was, "file %llu %llu %llx %n", &bytes[0], &time[0], &hash[0], &at[0]) != 3 || at[0] == 0 ||
        sscanf(is, "file %llu %llu %llx %n", &bytes[1], &time[1], &hash[1], &at[1]) != 3 || at[1] == 0)
        snprintf(why, WHY, "from another input");
    else if (strcmp(was + at[0], is + at[1]) != 0)
        snprintf(why, WHY, "from another input, with a file %.60s and not %.60s", was + at[0], is + at[1]);
    else if (bytes[0] != bytes[1])
        snprintf(why, WHY, "when %.80s had %llu bytes, not %llu", is + at[1], bytes[0], bytes[1]);
    else
        snprintf(why, WHY, "before %.80s was changed: %s", is + at[1],
                 hash[0] != hash[1] ? "its header is another" : "its time of change is another");
}

/* Why a journal that was begun is not ours, by the first line that differs. */
static side_status of_another(const side_cast *cast, const char *text)
{
    const char *theirs = text, *ours = cast->identity;
    char was[LINE + NAME_MAX], is[LINE + NAME_MAX], why[WHY];
    bool others = false;

    for (;;) {
        const char *end = strchr(theirs, '\n'), *own = strchr(ours, '\n');
        const bool same = end != NULL && own != NULL && end - theirs == own - ours &&
                          memcmp(theirs, ours, (size_t)(end - theirs)) == 0;
        const bool both = strncmp(theirs, "tensors ", 8) == 0 && strncmp(ours, "tensors ", 8) == 0;
        if (!same && !both)
            break;
        others |= !same; /* by a file that was changed, if there is one */
        theirs = end + 1;
        ours = own + 1;
    }
    snprintf(was, sizeof(was), "%.*s", (int)strcspn(theirs, "\n"), theirs);
    snprintf(is, sizeof(is), "%.*s", (int)strcspn(ours, "\n"), ours);
    if (strncmp(was, "to ", 3) == 0)
        snprintf(why, sizeof(why), "to %.20s, not %s", was + 3, side_dtype_name(cast->options.to));
    else if (strncmp(was, "piece ", 6) == 0)
        snprintf(why, sizeof(why), "in pieces of %.20s bytes, not %zu", was + 6, cast->options.piece_bytes);
    else if (others && strncmp(is, "begin ", 6) == 0)
        snprintf(why, sizeof(why), "with other tensors selected");
    else if (strncmp(was, "sidestream ", 11) == 0)
        snprintf(why, sizeof(why), "by another version");
    else if (strncmp(was, "index ", 6) == 0 && strncmp(is, "index ", 6) == 0)
        snprintf(why, sizeof(why), "from another index file, or %.80s was changed since", cast->index_name);
    else
        say_file(why, was, is);
    return error_set(SIDE_STATE, where, "%s was begun %s: go on as it was begun, or begin anew (--restart)",
                     ck_shown(cast->part), why);
}

/* True where it was begun: it has all lines to `begin`, and that one is right. */
static bool was_begun(const char *text)
{
    const char *begin = strncmp(text, "begin ", 6) == 0 ? text : strstr(text, "\nbegin ");
    uint64_t hash;

    if (begin == NULL)
        return false;
    begin += *begin == '\n';
    hash = cast_hash(CAST_HASH, text, (size_t)(begin - text));
    return strtoull(begin + 6, NULL, 16) == hash && strchr(begin, '\n') != NULL;
}

/* Ends a line of n bytes with the hash of `begin` and itself; returns its length. */
static size_t line_end(char line[LINE], uint64_t begin, int n)
{
    const uint64_t hash = cast_hash(cast_hash(CAST_HASH, &begin, sizeof(begin)), line, (size_t)n);

    return (size_t)n + (size_t)snprintf(line + n, LINE - (size_t)n, "%016llx\n", (unsigned long long)hash);
}

static size_t done_line(char line[LINE], uint64_t begin, size_t first, size_t end)
{
    return line_end(line, begin, snprintf(line, LINE, "done %zu %zu ", first, end));
}

static size_t moving_line(char line[LINE], uint64_t begin, uint64_t inode)
{
    return line_end(line, begin, snprintf(line, LINE, "moving %llu ", (unsigned long long)inode));
}

static void read_done(side_cast *cast, const char *text)
{
    const char *line = text + cast->identity_bytes;

    for (;;) {
        size_t first = 0, end = 0;
        char same[LINE];
        size_t n;
        if (sscanf(line, "done %zu %zu ", &first, &end) != 2 || first >= end || end > cast->plan.piece_count)
            break;
        n = done_line(same, cast->identity_hash, first, end);
        if (strncmp(line, same, n) != 0)
            break;
        memset(cast->synced + first, 1, end - first);
        line += n;
    }
    cast->journal_end = (uint64_t)(line - text);

    unsigned long long inode = 0;
    char same[LINE];
    if (sscanf(line, "moving %llu ", &inode) == 1 &&
        strncmp(line, same, moving_line(same, cast->identity_hash, inode)) == 0)
        cast->moving = inode;
}

side_status cast_journal_begin(side_cast *cast)
{
    size_t done = 0;
    side_status s = SIDE_OK;
    bool any = false;

    if (ftruncate(cast->journal_fd, 0) != 0)
        s = error_set_errno(SIDE_IO, where, errno, "cannot empty %s", ck_shown(cast->journal));
    if (s == SIDE_OK)
        s = os_pwrite_all(cast->journal_fd, cast->identity, cast->identity_bytes, 0, &done);
    if (s != SIDE_OK)
        return error_set_errno(SIDE_IO, where, side_last_error()->os_errno, "cannot write %s", ck_shown(cast->journal));
    cast->journal_end = cast->identity_bytes;
    /* What is still so is noted again. */
    for (size_t i = 0; i < cast->plan.piece_count; i++)
        any |= cast->synced[i] != 0;
    if (!any)
        return SIDE_OK;
    memset(cast->synced, 0, cast->plan.piece_count);
    return cast_journal_note(cast, cast->done);
}

/* Never begun: empty, cut off within its lines before that, or lost with the power. Anything else of that name is no journal. */
static bool was_cut_off(const char *text, size_t bytes)
{
    static const char first[] = "sidestream cast journal ";
    const size_t n = sizeof(first) - 1;
    size_t zeros = 0;

    while (zeros < bytes && text[zeros] == '\0')
        zeros++;
    return zeros == bytes || memcmp(text, first, bytes < n ? bytes : n) == 0;
}

static side_status read_journal(side_cast *cast, size_t bytes, char **text)
{
    size_t done = 0;

    *text = mem_zalloc(1, bytes + 1);
    if (*text == NULL)
        return SIDE_NO_MEMORY;
    if (os_pread_all(cast->journal_fd, *text, bytes, 0, &done) != SIDE_OK)
        return error_set_errno(SIDE_IO, where, side_last_error()->os_errno, "cannot read %s", ck_shown(cast->journal));
    if (was_begun(*text) || was_cut_off(*text, done))
        return SIDE_OK;
    return error_set(SIDE_STATE, where, "%s is no journal of a cast; move it away", ck_shown(cast->journal));
}

/* Nothing is taken away for a cast that cannot be: what is in the way is said first. */
static side_status restart(side_cast *cast, char *text)
{
    side_status s = SIDE_OK;

    if (cast->in_the_way || *cast->other != '\0')
        s = cast_in_the_way(cast, cast->other);
    if (s == SIDE_OK)
        s = cast_part_remove(cast, was_begun(text) ? text : NULL);
    if (s == SIDE_OK && ftruncate(cast->journal_fd, 0) != 0)
        s = error_set_errno(SIDE_IO, where, errno, "cannot empty %s", ck_shown(cast->journal));
    *text = '\0';
    return s;
}

static side_status begin_new(side_cast *cast)
{
    if (cast_part_exists(cast))
        return error_set(SIDE_STATE, where, "%s is there without a journal; take it away, or begin anew (--restart)",
                         ck_shown(cast->part));
    if (cast->fill && *cast->other != '\0')
        return cast_in_the_way(cast, cast->other);
    cast->ours = true;
    return cast_journal_begin(cast);
}

static side_status go_on(side_cast *cast, const char *text)
{
    struct stat out;
    size_t left = 0;

    cast->ours = true;
    read_done(cast, text);
    memcpy(cast->done, cast->synced, cast->plan.piece_count);
    for (size_t i = 0; i < cast->plan.piece_count; i++)
        left += cast->synced[i] == 0;
    /* What had the name before may look like the new one, by its size and header. */
    const bool ours = cast->fill || (stat(cast->out, &out) == 0 && out.st_ino == cast->moving);
    cast->finished = left == 0 && cast->there && ours && cast_find_moved(cast) && !cast_part_exists(cast);
    return SIDE_OK;
}

/* Locked, and still of that name: whoever had the lock before may have taken it away. */
static side_status open_locked(side_cast *cast, struct stat *ours)
{
    struct stat named;

    for (;;) {
        cast->journal_fd = open(cast->journal, O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | O_NOFOLLOW, 0600);
        if (cast->journal_fd < 0 || fstat(cast->journal_fd, ours) != 0)
            return error_set_errno(SIDE_IO, where, errno, "cannot write %s", ck_shown(cast->journal));
        if (!S_ISREG(ours->st_mode))
            return error_set(SIDE_INVALID, where, "%s is no regular file", ck_shown(cast->journal));
        if (flock(cast->journal_fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
            close(cast->journal_fd);
            cast->journal_fd = -1;
            return error_set(SIDE_STATE, where, "%s is being written by another process; wait for it",
                             ck_shown(cast->out));
        }
        if (lstat(cast->journal, &named) == 0 && named.st_dev == ours->st_dev && named.st_ino == ours->st_ino)
            return fstat(cast->journal_fd, ours) == 0 ? SIDE_OK : SIDE_IO;
        close(cast->journal_fd);
    }
}

side_status cast_journal_open(side_cast *cast)
{
    struct stat ours = {0};
    char *text = NULL;
    side_status s = make_identity(cast);

    if (s == SIDE_OK)
        s = open_locked(cast, &ours);
    if (s == SIDE_OK && ours.st_size > MOST)
        s = error_set(SIDE_STATE, where, "%s is no journal of a cast; move it away", ck_shown(cast->journal));
    if (s == SIDE_OK)
        s = read_journal(cast, (size_t)ours.st_size, &text);
    if (s == SIDE_OK && (cast->options.flags & SIDE_CAST_RESTART) != 0)
        s = restart(cast, text);
    if (s == SIDE_OK && !was_begun(text))
        s = begin_new(cast);
    else if (s == SIDE_OK && strncmp(text, cast->identity, cast->identity_bytes) != 0)
        s = of_another(cast, text);
    else if (s == SIDE_OK)
        s = go_on(cast, text);
    mem_free(text);
    return s;
}

/* ---------------------------------------------------------------- noting */

/* Before a piece may stand in the journal. */
static side_status sync_files(const side_cast *cast, const unsigned char *done)
{
    for (size_t i = 0; i < cast->plan.file_count; i++) {
        const struct cast_file *file = &cast->plan.files[i];
        bool any = false;
        for (size_t k = file->first; k < file->first + file->count; k++)
            any |= done[k] && !cast->synced[k];
        if (any && !file->moved && fdatasync(file->fd) != 0 && errno != EINVAL && errno != ENOTSUP)
            return error_set_errno(SIDE_IO, "side_cast_run", errno, "cannot sync %s", ck_shown(cast->part));
    }
    return SIDE_OK;
}

static side_status append(const side_cast *cast, const char *line, size_t bytes)
{
    size_t written = 0;

    if (os_pwrite_all(cast->journal_fd, line, bytes, cast->journal_end, &written) == SIDE_OK)
        return SIDE_OK;
    return error_set_errno(SIDE_IO, "side_cast_run", side_last_error()->os_errno, "cannot write %s",
                           ck_shown(cast->journal));
}

static side_status sync_journal(const side_cast *cast)
{
    if (fdatasync(cast->journal_fd) == 0 || errno == EINVAL || errno == ENOTSUP)
        return SIDE_OK;
    return error_set_errno(SIDE_IO, "side_cast_run", errno, "cannot sync %s", ck_shown(cast->journal));
}

side_status cast_journal_note(side_cast *cast, const unsigned char *done)
{
    side_status s = sync_files(cast, done);
    const size_t count = cast->plan.piece_count;

    for (size_t i = 0; s == SIDE_OK && i < count; i++) {
        size_t first = i;
        char line[LINE];
        while (i < count && done[i] && !cast->synced[i])
            i++;
        if (i == first)
            continue;
        const size_t n = done_line(line, cast->identity_hash, first, i);
        s = append(cast, line, n);
        if (s != SIDE_OK)
            return s;
        cast->journal_end += n;
        memset(cast->synced + first, 1, i - first);
    }
    return s == SIDE_OK ? sync_journal(cast) : s;
}

side_status cast_journal_moving(side_cast *cast)
{
    struct stat part;
    char line[LINE];

    if (lstat(cast->part, &part) != 0)
        return error_set_errno(SIDE_IO, "side_cast_run", errno, "cannot look at %s", ck_shown(cast->part));
    const side_status s = append(cast, line, moving_line(line, cast->identity_hash, part.st_ino));
    return s == SIDE_OK ? sync_journal(cast) : s;
}
