/* SPDX-License-Identifier: MIT
 *
 * What the reader (src/load/reader.h) gives beside bare loops of system calls: a file in the page cache, by threads; then past the cache, by reads in flight. All of them
 * read pieces into one ring of buffers, round and round, as a load does. No device is needed.
 *
 *     bench_read [--dir .] [--mib 4096] [--piece-kib 4096] [--slots 64] [--repeats 3] [--direct-mib 1024] [--most-threads N] [--out FILE]
 *
 * Kinds are interleaved, medians are printed, and one line of JSON with all samples is appended to FILE. The disk of a virtual machine may answer direct reads from its
 * host's cache: compare rows of one run with each other, not with a data sheet.
 */
#include "bench.h"
#include "os.h"
#include "reader.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST_STEPS = 10, MOST_RING = 1024 };

/* How the file is read: the reader, forced or not, or threads with nothing but pread. */
enum kind { BARE, READER, KINDS };

struct run {
    size_t piece_bytes, pieces;
    char *ring; /* slots x piece_bytes */
    size_t slots;
    int fd;
    const uint64_t *firsts; /* the first word of each piece */
    atomic_size_t next;     /* piece */
    reader *reader;
    uint32_t file;
    struct reader_piece slot[MOST_RING];
};

struct read_bench {
    struct bench b;
    struct run run;
    char path[4096];
    size_t bytes, direct_bytes;
};

static void check_first(const struct run *r, size_t piece, const void *data)
{
    uint64_t word;

    memcpy(&word, data, sizeof(word));
    if (word != r->firsts[piece])
        bench_wrong("piece %zu begins with %#llx, not %#llx", piece, (unsigned long long)word,
                    (unsigned long long)r->firsts[piece]);
}

/* ---------------------------------------------------------------- bare */

struct bare {
    struct run *run;
    size_t number, threads;
};

/* Each thread goes round in slots of its own. */
static void *bare_main(void *arg)
{
    const struct bare *bare = arg;
    struct run *r = bare->run;
    const size_t own = r->slots / bare->threads;

    for (size_t turn = 0;; turn++) {
        size_t piece = atomic_fetch_add(&r->next, 1), done = 0;
        if (piece >= r->pieces)
            return NULL;
        char *to = r->ring + (bare->number + turn % own * bare->threads) * r->piece_bytes;
        OK(os_pread_all(r->fd, to, r->piece_bytes, piece * r->piece_bytes, &done));
        check_first(r, piece, to);
    }
}

/* threads <= slots */
static double bare_s(struct run *r, size_t threads)
{
    pthread_t made[READER_MOST_THREADS];
    struct bare bares[READER_MOST_THREADS];
    double began = host_s();

    atomic_store(&r->next, 0);
    for (size_t i = 0; i < threads; i++) {
        bares[i] = (struct bare){r, i, threads};
        OK(os_thread_create(&made[i], "bare", bare_main, &bares[i]));
    }
    for (size_t i = 0; i < threads; i++)
        pthread_join(made[i], NULL);
    return host_s() - began;
}

/* ---------------------------------------------------------------- the reader */

static void slot_next(struct run *r, struct reader_piece *slot)
{
    size_t piece = atomic_fetch_add(&r->next, 1);

    if (piece >= r->pieces)
        return;
    slot->file = r->file;
    slot->offset = piece * r->piece_bytes;
    slot->bytes = r->piece_bytes;
    OK(reader_submit(r->reader, slot));
}

static void slot_done(void *owner, struct reader_piece *slot)
{
    struct run *r = owner;

    OK(slot->status);
    check_first(r, slot->offset / r->piece_bytes, slot->data);
    slot_next(r, slot);
}

/* From create to destroy: what a load pays. */
static double reader_s(struct run *r, const char *path, const struct reader_options *options, struct reader_stats *stats)
{
    struct reader_options o = *options;
    double began = host_s();

    o.done = slot_done;
    o.owner = r;
    atomic_store(&r->next, 0);
    OK(reader_create(&o, &r->reader));
    reader_region(r->reader, r->ring, r->slots * r->piece_bytes);
    OK(reader_file(r->reader, -1, path, READER_ANY_SIZE, &r->file));
    for (size_t i = 0; i < r->slots; i++) {
        r->slot[i].buffer = r->ring + i * r->piece_bytes;
        r->slot[i].buffer_bytes = r->piece_bytes;
        slot_next(r, &r->slot[i]);
    }
    OK(reader_drain(r->reader, UINT64_MAX));
    reader_get_stats(r->reader, stats);
    OK(reader_destroy(r->reader, 60));
    return host_s() - began;
}

/* ---------------------------------------------------------------- the file and the ring */

static void file_make(struct read_bench *t)
{
    struct run *r = &t->run;
    uint64_t *firsts = host_block(r->pieces * sizeof(*firsts));
    char *block = host_block(r->piece_bytes);
    size_t done;
    int fd = open(t->path, O_CREAT | O_TRUNC | O_WRONLY, 0600);

    if (fd < 0) {
        fprintf(stderr, "bench_read: cannot write %s\n", t->path);
        exit(2);
    }
    random_fill(block, r->piece_bytes, 1);
    for (size_t i = 0; i < r->pieces; i++) { /* one block, told apart by its ends */
        random_fill(block, 64, i + 2);
        memcpy(&firsts[i], block, sizeof(firsts[i]));
        OK(os_pwrite_all(fd, block, r->piece_bytes, i * r->piece_bytes, &done));
    }
    fsync(fd);
    close(fd);
    free(block);
    r->firsts = firsts;
}

static void ring_make(struct run *r)
{
    size_t bytes = r->slots * r->piece_bytes;

    r->ring = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (r->ring == MAP_FAILED) {
        fprintf(stderr, "bench_read: no memory for the ring of %zu bytes\n", bytes);
        exit(1);
    }
    madvise(r->ring, bytes, MADV_HUGEPAGE);
    memset(r->ring, 1, bytes);
}

static int reopen(struct read_bench *t, int flags)
{
    int fd = open(t->path, O_RDONLY | O_CLOEXEC | flags);

    if (t->run.fd >= 0)
        close(t->run.fd);
    t->run.fd = fd;
    return fd;
}

static void whole_or_part(struct read_bench *t, bool part)
{
    t->run.pieces = (part ? t->direct_bytes : t->bytes) / t->run.piece_bytes;
}

/* Before each cold run, so that the page cache has nothing. */
static void drop(struct read_bench *t)
{
    posix_fadvise(t->run.fd, 0, 0, POSIX_FADV_DONTNEED);
}

static double rate(const struct run *r, double seconds)
{
    return (double)r->pieces * (double)r->piece_bytes / seconds * 1e-9;
}

static void samples(struct read_bench *t, const char *what, size_t step, const double *values)
{
    char key[64];

    snprintf(key, sizeof(key), "%s_%zu", what, step);
    json_samples(&t->b, key, values, t->b.repeats);
}

/* ---------------------------------------------------------------- page cache */

static void cached_table(struct read_bench *t, size_t most)
{
    static const size_t steps[MOST_STEPS] = {1, 2, 4, 6, 8, 12, 16, 24, 32, 48};
    struct run *r = &t->run;
    double *got[KINDS];
    struct reader_stats stats = {.submitted = 0};

    for (int k = 0; k < KINDS; k++)
        got[k] = host_block(t->b.repeats * sizeof(double));
    whole_or_part(t, false);
    reopen(t, 0);
    bare_s(r, 1); /* into the cache */
    printf("\nin the page cache, GB/s\n%8s %10s %10s %10s   %s\n", "threads", "bare pread", "reader", "reader/bare",
           "pieces found cached");
    for (size_t s = 0; s < MOST_STEPS && steps[s] <= most && steps[s] <= r->slots; s++) {
        struct reader_options o = {.threads = (uint32_t)steps[s]};
        for (size_t i = 0; i < t->b.repeats; i++) {
            got[BARE][i] = rate(r, bare_s(r, steps[s]));
            got[READER][i] = rate(r, reader_s(r, t->path, &o, &stats));
        }
        double bare = quantile(got[BARE], t->b.repeats, 0.5), ours = quantile(got[READER], t->b.repeats, 0.5);
        printf("%8zu %10.2f %10.2f %10.3f   %llu of %zu\n", steps[s], bare, ours, ours / bare,
               (unsigned long long)(stats.why[READER_WHY_CACHED].pieces + stats.why[READER_WHY_MEMORY].pieces),
               r->pieces);
        samples(t, "cached_bare", steps[s], got[BARE]);
        samples(t, "cached_reader", steps[s], got[READER]);
    }
    for (int k = 0; k < KINDS; k++)
        free(got[k]);
}

/* ---------------------------------------------------------------- past the cache */

enum { COLD_BARE, COLD_THREADS, COLD_RING, COLD_AUTO, COLDS };
static const char *const colds[COLDS] = {"bare threads", "reader threads", "reader io_uring", "reader auto"};
static const char *const cold_keys[COLDS] = {"direct_bare", "direct_threads", "direct_uring", "cold_auto"};

static double cold_s(struct read_bench *t, int kind, size_t depth, struct reader_stats *stats)
{
    static const enum reader_backend backends[COLDS] = {
        [COLD_THREADS] = READER_DIRECT, [COLD_RING] = READER_URING, [COLD_AUTO] = READER_AUTO};
    struct reader_options o = {
        .backend = backends[kind], .depth = (uint32_t)depth, .threads = kind == COLD_THREADS ? (uint32_t)depth : 0};

    drop(t);
    return kind == COLD_BARE ? bare_s(&t->run, depth) : reader_s(&t->run, t->path, &o, stats);
}

/* Which of them can be had here, for this file. */
static void cold_probe(struct read_bench *t, bool *goes)
{
    for (int kind = COLD_THREADS; kind < COLDS; kind++) {
        struct reader_options o = {.done = slot_done, .backend = kind == COLD_RING ? READER_URING : READER_DIRECT};
        reader *r;
        uint32_t file;
        goes[kind] = reader_create(&o, &r) == SIDE_OK;
        if (goes[kind]) {
            goes[kind] = reader_file(r, -1, t->path, READER_ANY_SIZE, &file) == SIDE_OK;
            OK(reader_destroy(r, 60));
        }
        if (!goes[kind])
            printf("%s: %s\n", colds[kind], side_last_error()->message);
    }
    goes[COLD_BARE] = goes[COLD_THREADS];
}

static void cold_table(struct read_bench *t)
{
    static const size_t steps[] = {1, 2, 4, 8, 16, 32, 64};
    struct reader_stats stats = {.submitted = 0};
    struct run *r = &t->run;
    bool goes[COLDS];
    double *got[COLDS], best = 0;

    for (int k = 0; k < COLDS; k++)
        got[k] = host_block(t->b.repeats * sizeof(double));
    whole_or_part(t, true);
    cold_probe(t, goes);
    if (reopen(t, O_DIRECT) < 0 || !goes[COLD_BARE]) {
        printf("\nno direct reads in this folder: name another one by --dir\n");
        return;
    }
    printf("\npast the page cache, GB/s\n%8s", "reads");
    for (int k = 0; k < COLDS; k++)
        printf(" %15s", colds[k]);
    printf("   auto: by io_uring; pieces in reads at one time\n");
    for (size_t s = 0; s < sizeof(steps) / sizeof(steps[0]) && steps[s] <= r->slots; s++) {
        for (size_t i = 0; i < t->b.repeats; i++)
            for (int k = 0; k < COLDS; k++)
                got[k][i] = goes[k] ? rate(r, cold_s(t, k, steps[s], &stats)) : 0;
        printf("%8zu", steps[s]);
        for (int k = 0; k < COLDS; k++) {
            double median = quantile(got[k], t->b.repeats, 0.5);
            if (k == COLD_BARE && median > best)
                best = median;
            printf(" %15.3f", median);
            samples(t, cold_keys[k], steps[s], got[k]);
        }
        printf("   %llu of %zu, %u\n", (unsigned long long)stats.backend[READER_URING].pieces, r->pieces,
               stats.most_in_flight);
    }
    printf("best of bare threads %.3f GB/s; io_uring %s\n", best, stats.uring);
    json_number(&t->b, "direct_bare_best", best);
    json_text(&t->b, "uring", stats.uring);
    for (int k = 0; k < COLDS; k++)
        free(got[k]);
}

/* ---------------------------------------------------------------- main */

int main(int argc, char **argv)
{
    static struct read_bench t;
    struct run *r = &t.run;

    t.b = (struct bench){.name = "read", .argc = argc, .argv = argv};
    t.b.repeats = bench_number(&t.b, "--repeats", 3);
    r->piece_bytes = bench_number(&t.b, "--piece-kib", 4096) << 10;
    r->slots = bench_number(&t.b, "--slots", 64);
    size_t mib = bench_number(&t.b, "--mib", 4096), direct_mib = bench_number(&t.b, "--direct-mib", 1024);
    size_t most = bench_number(&t.b, "--most-threads", 2 * os_cores());
    if (t.b.repeats < 1 || t.b.repeats > 1000 || r->piece_bytes < READER_ALIGN || r->piece_bytes % READER_ALIGN != 0 ||
        r->slots < 1 || r->slots > MOST_RING || mib > (1u << 24) || mib * MIB < r->piece_bytes) {
        fprintf(stderr, "bench_read: an option is out of range; see the head of bench/read.c\n");
        return 2;
    }
    t.bytes = mib * MIB;
    t.direct_bytes = (direct_mib < mib ? direct_mib : mib) * MIB;
    if (t.direct_bytes < r->piece_bytes)
        t.direct_bytes = r->piece_bytes;
    r->fd = -1;
    snprintf(t.path, sizeof(t.path), "%s/sidestream-bench-read.%d", bench_text(&t.b, "--dir", "."), (int)getpid());
    t.b.json = fopen(bench_text(&t.b, "--out", "/dev/null"), "a");
    if (t.b.json == NULL) {
        fprintf(stderr, "bench_read: cannot write %s\n", bench_text(&t.b, "--out", ""));
        return 2;
    }
    fprintf(t.b.json, "{\"bench\": \"read\"");
    json_text(&t.b, "version", side_version());
    json_text(&t.b, "commit", bench_text(&t.b, "--commit", ""));
    json_text(&t.b, "date", bench_text(&t.b, "--date", ""));
    json_number(&t.b, "mib", (double)mib);
    json_number(&t.b, "piece_bytes", (double)r->piece_bytes);
    json_number(&t.b, "slots", (double)r->slots);
    json_number(&t.b, "cores", os_cores());
    printf("%zu MiB in pieces of %zu KiB, %zu buffers, %u cores\n", mib, r->piece_bytes >> 10, r->slots, os_cores());
    whole_or_part(&t, false);
    ring_make(r);
    file_make(&t);
    cached_table(&t, most < READER_MOST_THREADS ? most : READER_MOST_THREADS);
    cold_table(&t);
    close(r->fd);
    unlink(t.path);
    fprintf(t.b.json, "}\n");
    fclose(t.b.json);
    return 0;
}
