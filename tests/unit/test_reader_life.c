/* SPDX-License-Identifier: MIT
 * The reader's life: what it refuses, files that change under it, slots that go round, cancel, drain, destroy, fork. */
#include "reader_help.h"

#include "alloc.h"

#include <dirent.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#define ONE_BYTES 100000u

static reader *start(struct gallery *g, enum reader_backend backend, uint32_t threads)
{
    struct reader_options o = {.done = shot_done, .owner = g, .backend = backend, .threads = threads, .depth = 4};
    reader *r = NULL;
    side_status s = reader_create(&o, &r);

    if (s == SIDE_UNSUPPORTED)
        T_SKIP("%s", side_last_error()->message);
    T_OK(s);
    return r;
}

static void says(const char *word)
{
    if (strstr(side_last_error()->message, word) == NULL)
        T_FAIL("'%s' does not say '%s'", side_last_error()->message, word);
}

static unsigned open_files(void)
{
    unsigned n = 0;
    DIR *d = opendir("/proc/self/fd");
    if (d == NULL)
        T_SKIP("no /proc/self/fd");
    while (readdir(d) != NULL)
        n++;
    closedir(d);
    return n;
}

static void refuses_file(reader *r, const char *path, side_status expected, const char *word)
{
    uint32_t file = 77;
    T_STATUS(reader_file(r, -1, path, READER_ANY_SIZE, &file), expected);
    assert_int_equal(file, 77);
    says(path);
    says(word);
}

T_TEST(refuses)
{
    struct gallery g;
    char *path = file_make(NULL, "side-plain", ONE_BYTES), other[4096];
    uint32_t file;
    reader *r;
    struct sockaddr_un name = {.sun_family = AF_UNIX};

    struct reader_options bad[] = {{.done = NULL},
                                   {.done = shot_done, .threads = READER_MOST_THREADS + 1},
                                   {.done = shot_done, .depth = READER_MOST_DEPTH + 1},
                                   {.done = shot_done, .backend = READER_BACKENDS}};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        T_STATUS(reader_create(&bad[i], &r), SIDE_INVALID);
    enum reader_backend backend;
    T_STATUS(reader_backend_parse("mmap", &backend), SIDE_INVALID);
    says("uring");
    T_OK(reader_destroy(NULL, 0));

    gallery_make(&g, 1, 8192);
    unsigned fds = open_files();
    r = start(&g, READER_AUTO, 1);
    refuses_file(r, t_tmpdir(), SIDE_INVALID, "directory");
    refuses_file(r, "/dev/null", SIDE_INVALID, "character device");
    snprintf(other, sizeof(other), "%s/fifo", t_tmpdir());
    assert_int_equal(mkfifo(other, 0600), 0);
    refuses_file(r, other, SIDE_INVALID, "FIFO"); /* and does not wait for a writer */
    snprintf(other, sizeof(other), "%s/nothing", t_tmpdir());
    refuses_file(r, other, SIDE_IO, "No such file");
    int sock = socket(AF_UNIX, SOCK_STREAM, 0);
    snprintf(name.sun_path, sizeof(name.sun_path), "%s/sock", t_tmpdir());
    assert_int_equal(bind(sock, (struct sockaddr *)&name, sizeof(name)), 0);
    T_STATUS(reader_file(r, sock, "a socket", READER_ANY_SIZE, &file), SIDE_INVALID);
    close(sock);
    T_STATUS(reader_file(r, -1, path, ONE_BYTES + 1, &file), SIDE_IO);
    says("100001");

    snprintf(other, sizeof(other), "%s/link", t_tmpdir());
    assert_int_equal(symlink(path, other), 0);
    T_OK(reader_file(r, -1, other, ONE_BYTES, &file));
    T_STATUS(shoot(r, &g, 0, file + 1, 0, 1), SIDE_NOT_FOUND);
    T_STATUS(shoot(r, &g, 0, file, ONE_BYTES, 1), SIDE_INVALID);
    T_STATUS(shoot(r, &g, 0, file, UINT64_MAX, 1), SIDE_INVALID);
    T_STATUS(shoot(r, &g, 0, file, 0, 8193), SIDE_TOO_LARGE);
    T_STATUS(reader_file_check(r, file + 1), SIDE_NOT_FOUND);
    assert_int_equal(atomic_load(&g.shots[0].calls), 0);
    T_OK(shoot(r, &g, 0, file, ONE_BYTES - 7, 7));
    T_OK(reader_drain(r, UINT64_MAX));
    shot_check(&g.shots[0]);
    T_OK(reader_destroy(r, 30));
    assert_int_equal(open_files(), fds);
    gallery_free(&g);
    free(path);
}

/* A file that shrinks after it was opened: an error that says so, by each way of reading. One that is replaced by rename reads on. */
T_TEST(changes)
{
    static const enum reader_backend ways[] = {READER_AUTO, READER_CACHE, READER_PREAD, READER_DIRECT, READER_URING};
    struct gallery g;

    gallery_make(&g, 3, reader_room(ONE_BYTES));
    for (size_t k = 0; k < sizeof(ways) / sizeof(ways[0]); k++) {
        struct reader_options o = {.done = shot_done, .owner = &g, .backend = ways[k], .threads = 2};
        char *path = file_make(NULL, "side-changes", ONE_BYTES), *next = file_make(NULL, "side-next", 10);
        uint32_t file;
        reader *r;
        if (reader_create(&o, &r) != SIDE_OK)
            continue;
        if (reader_file(r, -1, path, ONE_BYTES, &file) != SIDE_OK) {
            T_OK(reader_destroy(r, 30));
            continue;
        }
        for (size_t i = 0; i < 3; i++)
            atomic_store(&g.shots[i].calls, 0);
        T_OK(shoot(r, &g, 0, file, 1000, 30000));
        T_OK(reader_drain(r, UINT64_MAX));
        T_OK(reader_file_check(r, file));
        assert_int_equal(truncate(path, 50001), 0);
        T_OK(shoot(r, &g, 1, file, 3000, 90000)); /* over the new end */
        T_OK(shoot(r, &g, 2, file, 60000, 100));  /* behind it */
        T_OK(reader_drain(r, UINT64_MAX));
        shot_check(&g.shots[0]);
        for (size_t i = 1; i < 3; i++) {
            assert_int_equal(g.shots[i].piece.status, SIDE_IO);
            assert_non_null(strstr(g.shots[i].error.message, "truncated"));
        }
        assert_non_null(strstr(g.shots[1].error.message, "ends at byte 50001"));
        T_STATUS(reader_file_check(r, file), SIDE_IO);
        says("50001");
        T_OK(reader_destroy(r, 30));

        /* The same size, but written to; then replaced. */
        r = start(&g, ways[k], 1);
        T_OK(reader_file(r, -1, path, 50001, &file));
        struct timespec times[2] = {{1, 0}, {1, 0}};
        assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
        T_STATUS(reader_file_check(r, file), SIDE_IO);
        says("written to");
        T_OK(reader_file(r, -1, path, 50001, &file));
        assert_int_equal(rename(next, path), 0);
        atomic_store(&g.shots[0].calls, 0);
        T_OK(shoot(r, &g, 0, file, 100, 49901));
        T_OK(reader_drain(r, UINT64_MAX));
        shot_check(&g.shots[0]);
        T_OK(reader_file_check(r, file));
        T_OK(reader_destroy(r, 30));
        unlink(path);
        free(path);
        free(next);
    }
    gallery_free(&g);
}

/* Holes are zeros, and offsets have more than 32 bits. */
T_TEST(sparse)
{
    const uint64_t far = ((uint64_t)5 << 30) + 12345;
    struct gallery g;
    char *path = file_make(NULL, "side-sparse", 0);
    uint8_t data[5000];
    size_t done;
    uint32_t file;

    int fd = open(path, O_RDWR);
    bytes_make(data, far, sizeof(data));
    if (os_pwrite_all(fd, data, sizeof(data), far, &done) != SIDE_OK)
        T_SKIP("no files of 5 GiB in TMPDIR");
    fsync(fd);
    gallery_make(&g, 2, reader_room(sizeof(data)));
    static const enum reader_backend ways[] = {READER_AUTO, READER_PREAD, READER_DIRECT, READER_URING};
    for (size_t k = 0; k < sizeof(ways) / sizeof(ways[0]); k++) {
        struct reader_options o = {.done = shot_done, .owner = &g, .backend = ways[k], .threads = 1};
        reader *r;
        if (reader_create(&o, &r) != SIDE_OK)
            continue;
        if (reader_file(r, fd, path, far + sizeof(data), &file) == SIDE_OK) {
            atomic_store(&g.shots[0].calls, 0);
            T_OK(shoot(r, &g, 0, file, far, sizeof(data)));
            T_OK(shoot(r, &g, 1, file, far / 2, sizeof(data)));
            T_OK(reader_drain(r, UINT64_MAX));
            shot_check(&g.shots[0]);
            T_OK(g.shots[1].piece.status);
            for (size_t i = 0; i < sizeof(data); i++)
                assert_int_equal(((uint8_t *)g.shots[1].piece.data)[i], 0);
        }
        T_OK(reader_destroy(r, 30));
    }
    close(fd);
    gallery_free(&g);
    unlink(path);
    free(path);
}

/* ---------------------------------------------------------------- slots that go round */

#define ROUND_FILES 40u
#define ROUND_SLOTS 6u
#define ROUND_PIECE 5000u

struct round {
    reader *reader;
    struct gallery g;
    uint32_t files[ROUND_FILES];
    size_t sizes[ROUND_FILES];
    pthread_mutex_t mutex;
    uint32_t file; /* the next piece */
    uint64_t offset;
    uint64_t bytes; /* checked */
};

/* Under no lock of the reader's: submits the slot again from its own end. */
static void round_next(struct round *w, struct shot *shot)
{
    pthread_mutex_lock(&w->mutex);
    while (w->file < ROUND_FILES && w->offset == w->sizes[w->file]) {
        w->file++;
        w->offset = 0;
    }
    if (w->file < ROUND_FILES) {
        size_t left = w->sizes[w->file] - (size_t)w->offset;
        shot->piece.file = w->files[w->file];
        shot->piece.offset = w->offset;
        shot->piece.bytes = left < ROUND_PIECE ? left : ROUND_PIECE;
        w->offset += shot->piece.bytes;
        atomic_store(&shot->calls, 0);
        T_OK(reader_submit(w->reader, &shot->piece));
    }
    pthread_mutex_unlock(&w->mutex);
}

static void round_done(void *owner, struct reader_piece *piece)
{
    struct round *w = owner;
    struct shot *shot = piece->user;

    shot_done(&w->g, piece);
    shot_check(shot);
    pthread_mutex_lock(&w->mutex);
    w->bytes += piece->bytes;
    pthread_mutex_unlock(&w->mutex);
    round_next(w, shot);
}

T_TEST(round)
{
    static struct round w = {.mutex = PTHREAD_MUTEX_INITIALIZER};
    struct reader_options o = {.done = round_done, .owner = &w, .threads = 5, .depth = 3};
    uint64_t total = 0;
    long live = mem_live();

    gallery_make(&w.g, ROUND_SLOTS, reader_room(ROUND_PIECE));
    T_OK(reader_backend_parse(t_arg(), &o.backend));
    side_status s = reader_create(&o, &w.reader);
    if (s == SIDE_UNSUPPORTED)
        T_SKIP("%s", side_last_error()->message);
    T_OK(s);
    for (uint32_t i = 0; i < ROUND_FILES; i++) {
        char name[32];
        snprintf(name, sizeof(name), "side-round-%u", i);
        w.sizes[i] = i * 611;
        total += w.sizes[i];
        char *path = file_make(NULL, name, w.sizes[i]);
        if (i % 3 == 0)
            file_make_cold(path);
        s = reader_file(w.reader, -1, path, w.sizes[i], &w.files[i]);
        if (s == SIDE_UNSUPPORTED)
            T_SKIP("%s", side_last_error()->message);
        T_OK(s);
        free(path);
    }
    for (uint32_t i = 0; i < ROUND_SLOTS; i++)
        round_next(&w, &w.g.shots[i]);
    T_OK(reader_drain(w.reader, UINT64_MAX));
    assert_int_equal(w.bytes, total);
    struct reader_stats stats;
    reader_get_stats(w.reader, &stats);
    assert_true(stats.most_in_flight >= 1 && stats.most_in_flight <= ROUND_SLOTS);
    T_OK(reader_destroy(w.reader, 30));
    assert_int_equal(mem_live(), live);
    gallery_free(&w.g);
}

/* ---------------------------------------------------------------- cancel, drain, destroy */

static struct {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    enum io_call call;
    int inside;
    bool open;
} gate = {.mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

/* A file system that does not answer until the gate is opened. */
static int gated(enum io_call call, int fd, uint64_t offset, size_t *bytes)
{
    (void)fd, (void)offset, (void)bytes;
    if (call != gate.call)
        return 0;
    pthread_mutex_lock(&gate.mutex);
    gate.inside++;
    pthread_cond_broadcast(&gate.changed);
    while (!gate.open)
        pthread_cond_wait(&gate.changed, &gate.mutex);
    pthread_mutex_unlock(&gate.mutex);
    return 0;
}

T_TEST(cancel)
{
    struct gallery g;
    char *path = file_make(NULL, "side-cancel", ONE_BYTES);
    enum reader_backend backend;
    uint32_t file;

    T_OK(reader_backend_parse(t_arg(), &backend));
    gate.call = backend == READER_URING ? IO_RING_READ : backend == READER_DIRECT ? IO_PREAD_DIRECT : IO_PREAD;
    gallery_make(&g, 20, reader_room(1000));
    io_test = gated;
    reader *r = start(&g, backend, 1);
    side_status s = reader_file(r, -1, path, ONE_BYTES, &file);
    if (s == SIDE_UNSUPPORTED)
        T_SKIP("%s", side_last_error()->message);
    T_OK(s);
    for (size_t i = 0; i < 19; i++)
        T_OK(shoot(r, &g, i, file, i * 1000, 1000));
    pthread_mutex_lock(&gate.mutex);
    while (gate.inside == 0)
        pthread_cond_wait(&gate.changed, &gate.mutex);
    pthread_mutex_unlock(&gate.mutex);

    /* One read hangs: nothing is given up behind its back. */
    T_STATUS(reader_drain(r, os_now_ns()), SIDE_STUCK);
    T_STATUS(reader_destroy(r, -1), SIDE_INVALID);
    T_STATUS(reader_destroy(r, 0), SIDE_STUCK);
    assert_int_equal(atomic_load(&g.shots[0].calls), 0);
    T_OK(shoot(r, &g, 19, file, 0, 1000)); /* destroy has cancelled */
    pthread_mutex_lock(&gate.mutex);
    gate.open = true;
    pthread_cond_broadcast(&gate.changed);
    pthread_mutex_unlock(&gate.mutex);
    T_OK(reader_drain(r, UINT64_MAX));

    size_t whole = 0;
    for (size_t i = 0; i < 20; i++) {
        assert_int_equal(atomic_load(&g.shots[i].calls), 1);
        if (g.shots[i].piece.status == SIDE_OK) {
            shot_check(&g.shots[i]);
            whole++;
        } else {
            assert_int_equal(g.shots[i].piece.status, SIDE_CANCELLED);
            assert_null(g.shots[i].piece.data);
        }
    }
    assert_int_equal(g.shots[0].piece.status, SIDE_OK); /* its system call went to the end */
    assert_int_equal(g.shots[19].piece.status, SIDE_CANCELLED);
    struct reader_stats stats;
    reader_get_stats(r, &stats);
    assert_int_equal(stats.cancelled, 20 - whole);
    T_OK(reader_destroy(r, 30));
    io_test = NULL;
    gallery_free(&g);
    free(path);
}

/* Memory is known to the ring whether it came before or behind it; what the kernel has no room for is read into without. */
T_TEST(registered)
{
    const struct reader_options o = {.done = shot_done, .backend = READER_URING};
    static char page[3][4096] __attribute__((aligned(4096)));
    reader *r = NULL;

    if (reader_create(&o, &r) != SIDE_OK)
        T_SKIP("%s", side_last_error()->message);
    for (int i = 0; i < 3; i++) {
        struct reader_stats stats;
        char text[64];
        reader_region(r, page[i], sizeof(page[i]));
        reader_get_stats(r, &stats);
        snprintf(text, sizeof(text), "ready, %d buffer%s registered", i + 1, i == 0 ? "" : "s");
        if (strcmp(stats.uring, text) != 0) {
            T_OK(reader_destroy(r, 30));
            if (strstr(stats.uring, " of ") != NULL)
                T_SKIP("%s", stats.uring);
            T_FAIL("'%s', not '%s'", stats.uring, text);
        }
    }
    T_OK(reader_destroy(r, 30));
}

T_TEST(fork_child)
{
    struct gallery g;
    char *path = file_make(NULL, "side-fork", ONE_BYTES);
    uint32_t file;
    int status;

    if (T_TSAN)
        T_SKIP("ThreadSanitizer does not follow forks of processes with threads");
    gallery_make(&g, 2, reader_room(ONE_BYTES));
    reader *r = start(&g, READER_AUTO, 2);
    T_OK(reader_file(r, -1, path, ONE_BYTES, &file));
    pid_t child = fork();
    if (child == 0) {
        bool right = shoot(r, &g, 1, file, 0, 1) == SIDE_FORKED && reader_drain(r, UINT64_MAX) == SIDE_FORKED &&
                     reader_destroy(r, 30) == SIDE_OK;
        _exit(right ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    T_OK(shoot(r, &g, 0, file, 0, ONE_BYTES));
    T_OK(reader_drain(r, UINT64_MAX));
    shot_check(&g.shots[0]);
    T_OK(reader_destroy(r, 30));
    gallery_free(&g);
    free(path);
}

T_MAIN(T(refuses), T(changes), T(sparse), T_ARG(round, "auto"), T_ARG(round, "direct"), T_ARG(round, "uring"),
       T_ARG(cancel, "pread"), T_ARG(cancel, "direct"), T_ARG(cancel, "uring"), T(registered), T(fork_child))
