/* SPDX-License-Identifier: MIT */
#include "cast_private.h"

#include "alloc.h"
#include "error.h"
#include "os.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char where[] = "side_cast_create";

/* ---------------------------------------------------------------- create */

static side_status check_options(side_cast_options *o)
{
    const size_t piece = o->piece_bytes != 0 ? o->piece_bytes : CAST_PIECE;
    const unsigned cores = os_cores();

    if (o->to != SIDE_DTYPE_F32 && o->to != SIDE_DTYPE_F16 && o->to != SIDE_DTYPE_BF16 && o->to != SIDE_DTYPE_F8_E4M3 &&
        o->to != SIDE_DTYPE_F8_E5M2)
        return error_set(SIDE_INVALID, where, "to is %s; one can cast to F32, F16, BF16, F8_E4M3 and F8_E5M2",
                         side_dtype_name(o->to));
    if ((o->flags & ~(SIDE_CAST_REPLACE | SIDE_CAST_RESTART)) != 0)
        return error_set(SIDE_INVALID, where, "flags 0x%x: unknown ones", o->flags);
    if ((piece & (piece - 1)) != 0 || piece < 4096 || piece > (size_t)64 << 20)
        return error_set(SIDE_INVALID, where, "piece_bytes is %zu; want a power of two from 4096 to 64 MiB", piece);
    if (o->threads > CAST_THREADS_MOST || o->writers > CAST_THREADS_MOST)
        return error_set(SIDE_INVALID, where, "%s is %u; at most %u",
                         o->threads > CAST_THREADS_MOST ? "threads" : "writers",
                         o->threads > CAST_THREADS_MOST ? o->threads : o->writers, CAST_THREADS_MOST);
    if (!(o->timeout_s >= 0))
        return error_set(SIDE_INVALID, where, "timeout_s is %g; want seconds, or 0 for 30", o->timeout_s);
    o->piece_bytes = piece;
    o->pinned_bytes = o->pinned_bytes != 0 ? o->pinned_bytes : CAST_PINNED;
    o->sync_bytes = o->sync_bytes != 0 ? o->sync_bytes : CAST_SYNC;
    o->writers = o->writers != 0 ? o->writers : cores < 2 ? 2 : cores > 8 ? 8 : cores;
    o->timeout_s = o->timeout_s > 0 ? o->timeout_s : 30;
    return SIDE_OK;
}

/* What the name says it is, or its first bytes. */
static bool is_npy(const char *path)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    char head[6];
    const bool npy = fd >= 0 && read(fd, head, sizeof(head)) == sizeof(head) && memcmp(head, "\x93NUMPY", 6) == 0;

    if (fd >= 0)
        close(fd);
    return npy;
}

static side_status open_input(side_cast *cast, const char *in)
{
    side_checkpoint_options o = SIDE_CHECKPOINT_OPTIONS_INIT;
    side_status s;

    o.flags = cast->options.open;
    o.format = SIDE_FORMAT_AUTO;
    if (ck_ends(in, ".npy") || ck_ends(in, ".raw")) /* by their names no safetensors; a folder may have any name */
        o.format = SIDE_FORMAT_SAFETENSORS;
    s = side_checkpoint_open(in, &o, &cast->checkpoint);
    if (s == SIDE_INVALID && is_npy(in))
        return error_set(SIDE_INVALID, where, "%s is a .npy file; cast takes safetensors files and folders of them",
                         ck_shown(in));
    return s;
}

static void fill_stats(side_cast *cast)
{
    const struct cast_plan *plan = &cast->plan;
    side_cast_stats *t = &cast->stats;

    t->files = plan->file_count;
    t->tensors = plan->tensors;
    t->cast_tensors = plan->cast_tensors;
    t->pieces = plan->piece_count;
    t->bytes_in = plan->bytes_in;
    t->bytes_out = plan->bytes_out;
    t->cast_bytes_in = plan->cast_bytes_in;
    t->piece_bytes = cast->options.piece_bytes;
    t->writers = cast->options.writers;
    t->pieces_done = 0;
    for (size_t i = 0; i < plan->piece_count; i++)
        t->pieces_done += cast->done[i];
}

static side_status prepare(side_cast *cast, const char *in, const char *out)
{
    side_status s = open_input(cast, in);

    if (s == SIDE_OK)
        s = cast_paths(cast, in, out);
    if (s == SIDE_OK)
        s = cast_plan_make(cast);
    if (s == SIDE_OK)
        s = cast_index(cast);
    if (s == SIDE_OK) {
        cast->done = mem_zalloc(cast->plan.piece_count, 1);
        cast->synced = mem_zalloc(cast->plan.piece_count, 1);
        s = cast->done != NULL && cast->synced != NULL ? SIDE_OK : SIDE_NO_MEMORY;
    }
    if (s == SIDE_OK)
        s = cast_journal_open(cast);
    if (s == SIDE_OK)
        s = cast_files_open(cast);
    if (s != SIDE_OK)
        return s;
    fill_stats(cast);
    for (size_t i = 0; i < cast->plan.piece_count; i++)
        cast->stats.resumed_bytes += cast->done[i] ? cast->plan.pieces[i].in_bytes : 0;
    return SIDE_OK;
}

side_status side_cast_create(const char *in, const char *out, const side_cast_options *options, side_cast **cast)
{
    side_cast_options o = SIDE_CAST_OPTIONS_INIT;
    side_status s = options_copy(&o, sizeof(o), options, sizeof(o), where);
    side_error kept;
    side_cast *c;

    if (s != SIDE_OK)
        return s;
    if (in == NULL || *in == '\0' || out == NULL || *out == '\0' || cast == NULL)
        return error_set(SIDE_INVALID, where, "%s",
                         cast == NULL                ? "cast is NULL"
                         : in == NULL || *in == '\0' ? "in is NULL or empty"
                                                     : "out is NULL or empty");
    s = check_options(&o);
    if (s != SIDE_OK)
        return s;
    c = mem_zalloc(1, sizeof(*c));
    if (c == NULL)
        return SIDE_NO_MEMORY;
    c->options = o;
    c->journal_fd = -1;
    c->fork_generation = os_fork_generation();
    s = prepare(c, in, out);
    if (s != SIDE_OK) {
        error_copy(&kept);
        side_cast_destroy(c);
        return error_restore(&kept);
    }
    *cast = c;
    return SIDE_OK;
}

/* ---------------------------------------------------------------- run */

/* In a cast's words: side_checkpoint_check and the reader say to load again. */
static side_status check_inputs(const side_cast *cast)
{
    side_status s = SIDE_OK;

    for (size_t i = 0; s == SIDE_OK && i < cast->checkpoint->file_count; i++)
        s = ck_file_check(&cast->checkpoint->files[i], "side_cast_run", "while it was cast",
                          "what is done is of the old one; once it stays as it is, begin anew (--restart)");
    return s;
}

static side_status run_all(side_cast *cast, side_device *device)
{
    side_status s = SIDE_OK;
    side_error kept;

    if (!cast->finished && !atomic_load(&cast->cancelled))
        s = cast_move(cast, device);
    if (s == SIDE_OK && atomic_load(&cast->cancelled))
        s = error_set(SIDE_CANCELLED, "side_cast_run", "cancelled");
    if (s == SIDE_IO) { /* a file that was cut short is one that was changed */
        error_copy(&kept);
        if (check_inputs(cast) == SIDE_OK)
            return error_restore(&kept);
        return SIDE_IO;
    }
    if (s == SIDE_OK)
        s = check_inputs(cast);
    if (s == SIDE_OK && !cast->finished)
        s = cast_commit(cast);
    if (s != SIDE_OK)
        return s;
    cast->finished = true;
    unlink(cast->journal);
    return SIDE_OK;
}

side_status side_cast_run(side_cast *cast, side_device *device, side_cast_stats *stats)
{
    static const char call[] = "side_cast_run";
    const uint64_t begin = os_now_ns();
    side_status s;

    if (cast == NULL || device == NULL)
        return error_set(SIDE_INVALID, call, "%s is NULL", cast == NULL ? "cast" : "device");
    s = os_fork_check(cast->fork_generation, call);
    if (s != SIDE_OK)
        return s;
    if (cast->ran)
        return error_set(SIDE_STATE, call, "it has run already; create it again to go on");
    cast->ran = true;
    s = run_all(cast, device);
    cast->stats.time_s = (double)(os_now_ns() - begin) * 1e-9;
    cast->stuck = s == SIDE_STUCK;
    fill_stats(cast);
    if (stats != NULL)
        *stats = cast->stats;
    return s;
}

side_status side_cast_get_stats(const side_cast *cast, side_cast_stats *stats)
{
    if (cast == NULL || stats == NULL)
        return error_set(SIDE_INVALID, "side_cast_get_stats", "%s is NULL", cast == NULL ? "cast" : "stats");
    *stats = cast->stats;
    return SIDE_OK;
}

void side_cast_cancel(side_cast *cast)
{
    atomic_store(&cast->cancelled, true);
}

void side_cast_destroy(side_cast *cast)
{
    struct stat there;
    bool any = false;

    if (cast == NULL || cast->stuck || os_fork_check(cast->fork_generation, "side_cast_destroy") != SIDE_OK)
        return;
    for (size_t i = 0; cast->synced != NULL && i < cast->plan.piece_count; i++)
        any |= cast->synced[i] != 0;
    for (size_t i = 0; cast->plan.files != NULL && i < cast->plan.file_count; i++)
        any |= cast->plan.files[i].moved;
    if (cast->ours && !cast->finished && !any) {
        cast_part_clear(cast);
        unlink(cast->journal);
    } else if (!cast->ours && cast->journal_fd >= 0 && fstat(cast->journal_fd, &there) == 0 && there.st_size == 0) {
        unlink(cast->journal); /* it was made for the lock */
    }
    cast_files_close(cast);
    if (cast->journal_fd >= 0)
        close(cast->journal_fd); /* with it goes the lock */
    cast_plan_free(&cast->plan);
    side_checkpoint_close(cast->checkpoint);
    mem_free(cast->index);
    mem_free(cast->identity);
    mem_free(cast->done);
    mem_free(cast->synced);
    mem_free(cast);
}
