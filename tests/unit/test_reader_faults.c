/* SPDX-License-Identifier: MIT
 * The reader when system calls fail: each kind of call, each kind of failure, at each call in turn. What can be got around is, with the right bytes and
 * the reason; what cannot fails that piece alone, with file, offset and errno. Nothing is lost, and nothing is called twice. */
#include "reader_help.h"

#include "alloc.h"

#define FILE_BYTES  (3 * 65536u + 777)
#define PIECE_BYTES 40000u
#define PIECES      ((FILE_BYTES + PIECE_BYTES - 1) / PIECE_BYTES)

enum fault { SHORT = 10001, TINY, END }; /* else an errno */

static struct {
    pthread_mutex_t mutex;
    enum io_call call;
    unsigned long at; /* fails the nth of these calls; 0: all of them */
    int fault;
    unsigned long calls, fired;
    bool cold; /* the page cache is said to hold nothing */
} script = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static int scripted(enum io_call call, int fd, uint64_t offset, size_t *bytes)
{
    int result = 0;
    (void)fd, (void)offset;

    pthread_mutex_lock(&script.mutex);
    if (call == IO_CACHED && script.cold)
        *bytes = 0;
    if (call == script.call) {
        script.calls++;
        if (script.at == 0 || script.calls == script.at) {
            script.fired++;
            if (script.fault == SHORT)
                *bytes = (*bytes + 1) / 2;
            else if (script.fault == TINY)
                *bytes = 1;
            else if (script.fault == END)
                *bytes = 0;
            else
                result = -script.fault;
        }
    }
    pthread_mutex_unlock(&script.mutex);
    return result;
}

/* What a fault does: nothing that is seen, fails the piece, refuses the reader or file. */
enum outcome { HEALED, FAILS, REFUSED };

struct row {
    const char *backend;
    bool cold;
    enum io_call call;
    int fault;
    enum outcome outcome;
    bool all; /* all calls fail, not one after the other */
};

/* clang-format off */
static const struct row rows[] = {
    {"pread", false, IO_PREAD, SHORT, HEALED, false},
    {"pread", false, IO_PREAD, SHORT, HEALED, true},
    {"pread", false, IO_PREAD, EINTR, HEALED, false},
    {"pread", false, IO_PREAD, EAGAIN, HEALED, false},
    {"pread", false, IO_PREAD, EAGAIN, FAILS, true},
    {"pread", false, IO_PREAD, EIO, FAILS, false},
    {"pread", false, IO_PREAD, EIO, FAILS, true},
    {"pread", false, IO_PREAD, END, FAILS, false},
    {"cache", false, IO_PREAD_NOWAIT, SHORT, HEALED, false},
    {"cache", false, IO_PREAD_NOWAIT, EINTR, HEALED, false},
    {"cache", false, IO_PREAD_NOWAIT, EAGAIN, HEALED, false},
    {"cache", false, IO_PREAD_NOWAIT, EIO, HEALED, false},
    {"cache", false, IO_PREAD_NOWAIT, EOPNOTSUPP, HEALED, false},
    {"cache", false, IO_PREAD_NOWAIT, END, HEALED, true},
    {"auto", false, IO_PREAD_NOWAIT, TINY, HEALED, false},
    {"auto", false, IO_PREAD_NOWAIT, EAGAIN, HEALED, false},
    {"auto", false, IO_PREAD_NOWAIT, EAGAIN, HEALED, true},
    {"auto", false, IO_PREAD_NOWAIT, ENOSYS, HEALED, true},
    {"auto", false, IO_CACHED, ENOSYS, HEALED, true},
    {"auto", false, IO_CACHED, EPERM, HEALED, false},
    {"direct", true, IO_PREAD_DIRECT, SHORT, HEALED, false},
    {"direct", true, IO_PREAD_DIRECT, SHORT, HEALED, true},
    {"direct", true, IO_PREAD_DIRECT, TINY, HEALED, true},
    {"direct", true, IO_PREAD_DIRECT, END, HEALED, false},
    {"direct", true, IO_PREAD_DIRECT, EINTR, HEALED, false},
    {"direct", true, IO_PREAD_DIRECT, EAGAIN, HEALED, false},
    {"direct", true, IO_PREAD_DIRECT, EAGAIN, FAILS, true},
    {"direct", true, IO_PREAD_DIRECT, EINVAL, HEALED, false},
    {"direct", true, IO_PREAD_DIRECT, EIO, FAILS, false},
    {"direct", true, IO_OPEN_DIRECT, EINVAL, REFUSED, true},
    {"auto", true, IO_OPEN_DIRECT, EINVAL, HEALED, true},
    {"auto", true, IO_OPEN_DIRECT, ENOENT, HEALED, true},
    {"uring", true, IO_RING_READ, SHORT, HEALED, false},
    {"uring", true, IO_RING_READ, SHORT, HEALED, true},
    {"uring", true, IO_RING_READ, TINY, HEALED, true},
    {"uring", true, IO_RING_READ, END, HEALED, false},
    {"uring", true, IO_RING_READ, EINTR, HEALED, false},
    {"uring", true, IO_RING_READ, EAGAIN, HEALED, false},
    {"uring", true, IO_RING_READ, EAGAIN, HEALED, true},
    {"uring", true, IO_RING_READ, EINVAL, HEALED, false},
    {"uring", true, IO_RING_READ, EOPNOTSUPP, HEALED, true},
    {"uring", true, IO_RING_READ, EIO, FAILS, false},
    {"uring", true, IO_RING_READ, EIO, FAILS, true},
    {"uring", true, IO_RING_SETUP, EPERM, REFUSED, true},
    {"uring", true, IO_RING_SETUP, ENOSYS, REFUSED, true},
    {"uring", true, IO_RING_ENTER, EPERM, REFUSED, true},
    {"auto", true, IO_RING_SETUP, EPERM, HEALED, true},
    {"auto", true, IO_RING_SETUP, ENOMEM, HEALED, true},
    {"auto", true, IO_RING_REGISTER, EINVAL, HEALED, false}, /* the first is the probe */
    {"auto", true, IO_RING_REGISTER, ENOMEM, HEALED, true},
    {"auto", true, IO_RING_ENTER, EPERM, HEALED, false},
    {"auto", true, IO_RING_ENTER, EINTR, HEALED, false},
    {"auto", true, IO_RING_ENTER, EAGAIN, HEALED, false},
    {"auto", true, IO_RING_ENTER, EBUSY, HEALED, false},
    {"auto", true, IO_RING_ENTER, END, HEALED, false}, /* nothing is submitted this time */
    {"auto", true, IO_RING_WAKE, EINTR, HEALED, false},
    {"auto", true, IO_RING_WAKE, EINVAL, HEALED, true},
    {"uring", true, IO_RING_WAKE, EIO, HEALED, true},
    {"pread", false, IO_OPEN, EACCES, REFUSED, true},
    {"pread", false, IO_STAT, EIO, REFUSED, true},
};
/* clang-format on */

/* One load of the file under the script. Returns how many pieces failed, or -1: refused. */
static int run(const struct row *row, const char *path, struct gallery *g)
{
    struct reader_options o = {.done = shot_done, .owner = g, .threads = 2, .depth = 3};
    reader *r = NULL;
    uint32_t file = 0;
    side_status s;

    T_OK(reader_backend_parse(row->backend, &o.backend));
    atomic_store(&g->failed, 0);
    io_test = scripted;
    s = reader_create(&o, &r);
    if (s == SIDE_OK)
        reader_region(r, g->memory, g->count * g->bytes / 2); /* the rest later */
    if (s == SIDE_OK)
        s = reader_file(r, -1, path, FILE_BYTES, &file);
    for (size_t i = 0; s == SIDE_OK && i < PIECES; i++) {
        size_t left = FILE_BYTES - i * PIECE_BYTES;
        atomic_store(&g->shots[i].calls, 0);
        T_OK(shoot(r, g, i, file, i * PIECE_BYTES, left < PIECE_BYTES ? left : PIECE_BYTES));
    }
    if (s != SIDE_OK) {
        assert_true(row->outcome == REFUSED);
        assert_true(s == SIDE_UNSUPPORTED || s == SIDE_IO);
        assert_true(script.fired > 0);
        T_OK(reader_destroy(r, 30));
        io_test = NULL;
        return -1;
    }
    reader_region(r, g->memory + g->count * g->bytes / 2, g->count * g->bytes - g->count * g->bytes / 2);
    T_OK(reader_drain(r, UINT64_MAX));

    struct reader_stats stats;
    reader_get_stats(r, &stats);
    assert_int_equal(stats.done, PIECES);
    assert_int_equal(stats.failed, atomic_load(&g->failed));
    T_OK(reader_destroy(r, 30));
    io_test = NULL;
    return atomic_load(&g->failed);
}

/* Failed pieces say what and where; all others have their bytes. */
static void run_check(const struct row *row, const struct gallery *g)
{
    for (size_t i = 0; i < PIECES; i++) {
        const struct shot *shot = &g->shots[i];
        if (shot->piece.status == SIDE_OK) {
            shot_check(shot);
            continue;
        }
        char offset[32];
        snprintf(offset, sizeof(offset), "%s %zu", row->fault == END ? "byte" : "offset", i * PIECE_BYTES);
        assert_int_equal(shot->piece.status, SIDE_IO);
        assert_int_equal(shot->error.os_errno, row->fault == END ? 0 : row->fault);
        assert_non_null(strstr(shot->error.message, "side-faults"));
        assert_non_null(strstr(shot->error.message, offset));
        assert_null(shot->piece.data);
        assert_int_equal(atomic_load(&shot->calls), 1);
    }
}

T_TEST(faults)
{
    struct gallery g;
    char *path = file_make(NULL, "side-faults", FILE_BYTES);
    unsigned fired = 0;
    bool forced_goes = true;

    gallery_make(&g, PIECES, reader_room(PIECE_BYTES));
    for (size_t k = 0; k < sizeof(rows) / sizeof(rows[0]); k++) {
        const struct row *row = &rows[k];
        for (unsigned long n = 1; n <= 100; n++) {
            script.call = row->call;
            script.fault = row->fault;
            script.at = row->all ? 0 : n;
            script.cold = row->cold;
            script.calls = script.fired = 0;
            int failed = run(row, path, &g);
            if (failed < 0 && row->outcome != REFUSED) {
                forced_goes = false; /* not on this file system or kernel */
                break;
            }
            if (failed >= 0)
                run_check(row, &g);
            fired += script.fired > 0;
            if (script.fired == 0 || row->all)
                break;
            if (row->outcome == FAILS ? failed != 1 : row->outcome == HEALED ? failed != 0 : failed >= 0)
                T_FAIL("row %zu (%s), call %lu: %d pieces failed", k, row->backend, n, failed);
        }
        if (row->all && row->outcome == FAILS && script.fired > 0)
            assert_true(atomic_load(&g.failed) > 0);
        if (row->all && row->outcome == HEALED)
            assert_int_equal(atomic_load(&g.failed), 0);
    }
    assert_true(!forced_goes || fired > 150);
    gallery_free(&g);
    unlink(path);
    free(path);
}

/* ---------------------------------------------------------------- choices */

static const struct {
    bool cold;
    enum io_call call; /* that fails, always, with `fault`; fault 0: none */
    int fault;
    enum reader_backend backend;
    enum reader_why why;
    bool unaligned;
} choices[] = {
    {true, IO_CALLS, 0, READER_URING, READER_WHY_COLD, false},
    {true, IO_RING_SETUP, EPERM, READER_DIRECT, READER_WHY_NO_URING, false},
    {true, IO_RING_ENTER, EPERM, READER_DIRECT, READER_WHY_NO_URING, false},
    {true, IO_RING_REGISTER, ENOMEM, READER_DIRECT, READER_WHY_NO_URING, false},
    {true, IO_RING_READ, EINVAL, READER_PREAD, READER_WHY_NO_DIRECT, false},
    {true, IO_RING_READ, END, READER_PREAD, READER_WHY_REST, false},
    {false, IO_CALLS, 0, READER_CACHE, READER_WHY_CACHED, false},
    {false, IO_CALLS, 0, READER_CACHE, READER_WHY_CACHED, true},
    {false, IO_CACHED, ENOSYS, READER_CACHE, READER_WHY_CACHED, false},
    {false, IO_PREAD_NOWAIT, EOPNOTSUPP, READER_PREAD, READER_WHY_NO_NOWAIT, false},
    {false, IO_PREAD_NOWAIT, EAGAIN, READER_URING, READER_WHY_COLD, false},
    {false, IO_PREAD_NOWAIT, EAGAIN, READER_PREAD, READER_WHY_NO_ROOM, true},
    {false, IO_OPEN_DIRECT, EINVAL, READER_CACHE, READER_WHY_CACHED, false},
};

T_TEST(choices)
{
    struct gallery g;
    char *path = file_make(NULL, "side-choices", FILE_BYTES);
    struct reader_file_info info;
    struct reader_stats stats;

    gallery_make(&g, 1, reader_room(PIECE_BYTES));
    void *buffer = g.shots[0].piece.buffer;
    for (size_t k = 0; k < sizeof(choices) / sizeof(choices[0]); k++) {
        struct reader_options o = {.done = shot_done, .owner = &g, .threads = 1};
        reader *r;
        uint32_t file;

        script.call = choices[k].call;
        script.fault = choices[k].fault;
        script.at = 0;
        script.cold = choices[k].cold;
        io_test = scripted;
        T_OK(reader_create(&o, &r));
        T_OK(reader_file(r, -1, path, READER_ANY_SIZE, &file));
        T_OK(reader_file_info(r, file, &info));
        if (!info.direct && choices[k].call != IO_OPEN_DIRECT)
            T_SKIP("no direct reads in TMPDIR: %s", info.why);
        g.shots[0].piece.buffer = (char *)buffer + (choices[k].unaligned ? 8 : 0);
        g.shots[0].piece.buffer_bytes = g.bytes - 8;
        atomic_store(&g.shots[0].calls, 0);
        T_OK(shoot(r, &g, 0, file, 4000, PIECE_BYTES - 4096));
        T_OK(reader_drain(r, UINT64_MAX));
        reader_get_stats(r, &stats);
        T_OK(reader_destroy(r, 30));
        io_test = NULL;
        shot_check(&g.shots[0]);

        const struct reader_piece *p = &g.shots[0].piece;
        bool ring_lacks = choices[k].backend == READER_URING && p->why == READER_WHY_NO_URING;
        if (!ring_lacks && (p->backend != choices[k].backend || p->why != choices[k].why))
            T_FAIL("choice %zu: %s, since %s; io_uring: %s", k, reader_backend_name(p->backend),
                   reader_why_text(p->why), stats.uring);
        assert_int_equal(stats.why[p->why].pieces, 1);
        assert_int_equal(stats.backend[p->backend].pieces, 1);
        if (choices[k].call == IO_RING_SETUP)
            assert_non_null(strstr(stats.uring, "refused: io_uring_setup: Operation not permitted"));
    }
    gallery_free(&g);
    free(path);
}

/* A file of which the page cache has the first half, and nothing scripted: the halves are read by different ways. */
T_TEST(halves)
{
    enum { HALF = 4 << 20, SHOT = 512 << 10, SHOTS = 2 * HALF / SHOT };
    struct gallery g;
    struct reader_file_info info;
    struct reader_stats stats;
    char *path = file_make(NULL, "side-halves", 2 * HALF);
    uint32_t file;
    reader *r;

    gallery_make(&g, SHOTS, SHOT);
    struct reader_options o = {.done = shot_done, .owner = &g, .threads = 1};
    T_OK(reader_create(&o, &r));
    T_OK(reader_file(r, -1, path, 2 * HALF, &file));
    T_OK(reader_file_info(r, file, &info));
    int fd = open(path, O_RDONLY);
    posix_fadvise(fd, HALF, HALF, POSIX_FADV_DONTNEED);
    if (!info.direct || io_cached(fd, 0, HALF) != HALF || io_cached(fd, HALF, HALF) != 0)
        T_SKIP("no direct reads, no cachestat, or the page cache keeps what it likes");
    for (size_t i = 0; i < SHOTS; i++)
        T_OK(shoot(r, &g, i, file, i * SHOT, SHOT));
    T_OK(reader_drain(r, UINT64_MAX));
    if (io_cached(fd, 0, HALF) != HALF)
        T_SKIP("the page cache gave it up meanwhile: memory is short");
    for (size_t i = 0; i < SHOTS; i++) {
        shot_check(&g.shots[i]);
        bool cached = g.shots[i].piece.why == READER_WHY_CACHED;
        if (cached != (i < SHOTS / 2))
            T_FAIL("piece %zu of %d: %s", i, SHOTS, reader_why_text(g.shots[i].piece.why));
    }
    assert_int_equal(io_cached(fd, HALF, HALF), 0); /* nothing was read ahead, or twice */
    reader_get_stats(r, &stats);
    assert_int_equal(stats.backend[READER_CACHE].bytes, HALF);
    assert_int_equal(stats.backend[READER_URING].bytes + stats.backend[READER_DIRECT].bytes, HALF);
    T_OK(reader_destroy(r, 30));
    close(fd);
    gallery_free(&g);
    free(path);
}

/* ---------------------------------------------------------------- memory */

T_TEST(no_memory)
{
    char *path = file_make(NULL, "side-memory", FILE_BYTES);
    struct gallery g;
    long live = mem_live();
    unsigned healed = 0;

    gallery_make(&g, 1, reader_room(PIECE_BYTES));
    script.call = IO_CALLS;
    script.cold = true;
    for (unsigned long n = 1; n < 50; n++) {
        struct reader_options o = {.done = shot_done, .owner = &g, .threads = 1};
        reader *r = NULL;
        uint32_t file = 0;

        io_test = scripted;
        mem_fail_at(n);
        side_status s = reader_create(&o, &r);
        if (s == SIDE_OK)
            s = reader_file(r, -1, path, FILE_BYTES, &file);
        atomic_store(&g.shots[0].calls, 0);
        if (s == SIDE_OK) {
            T_OK(shoot(r, &g, 0, file, 0, PIECE_BYTES));
            T_OK(reader_drain(r, UINT64_MAX));
            shot_check(&g.shots[0]);
            healed++;
        } else
            assert_int_equal(s, SIDE_NO_MEMORY);
        T_OK(reader_destroy(r, 30));
        io_test = NULL;
        assert_int_equal(mem_live(), live);
        if (mem_fail_at(0) < n)
            break;
    }
    assert_true(healed >= 1);
    gallery_free(&g);
    free(path);
}

T_MAIN(T_LONG(faults, 60), T(choices), T(halves), T(no_memory))
