/* SPDX-License-Identifier: MIT
 * The extent reader: every way of reading gives the file's bytes, and what cannot be read is said. */
#include "reader_help.h"

/* Sizes and offsets around pages, the end of the file, the first byte. */
static const size_t sizes[] = {1, 511, 4095, 4096, 4097, 65536, 200001};

static reader *reader_open(enum reader_backend backend, struct gallery *g)
{
    struct reader_options o = {.done = shot_done, .owner = g, .backend = backend, .threads = 4, .depth = 8};
    reader *r = NULL;
    side_status s = reader_create(&o, &r);

    if (s == SIDE_UNSUPPORTED)
        T_SKIP("%s", side_last_error()->message);
    T_OK(s);
    return r;
}

/* Every size of file, by every offset and length around its edges, all in flight together. */
static void read_everything(enum reader_backend backend, const char *folder)
{
    struct gallery g;
    reader *r;
    uint32_t file;
    size_t n = 0;

    gallery_make(&g, 7 * 28, reader_room(200001)); /* pairs of marks, in order */
    r = reader_open(backend, &g);
    for (size_t f = 0; f < sizeof(sizes) / sizeof(sizes[0]); f++) {
        char name[64];
        snprintf(name, sizeof(name), "side-reader-%d-%zu", (int)getpid(), f);
        char *path = file_make(folder, name, sizes[f]);
        if (f % 2 == 0)
            file_make_cold(path);
        side_status s = reader_file(r, -1, path, sizes[f], &file);
        unlink(path);
        if (s == SIDE_UNSUPPORTED)
            T_SKIP("%s", side_last_error()->message);
        T_OK(s);
        const uint64_t marks[] = {0, 1, 511, 4095, 4096, sizes[f] / 2, sizes[f]};
        for (size_t a = 0; a < 7; a++)
            for (size_t b = 0; b < 7; b++)
                if (marks[a] <= marks[b] && marks[b] <= sizes[f])
                    T_OK(shoot(r, &g, n++, file, marks[a], (size_t)(marks[b] - marks[a])));
        free(path);
    }
    T_OK(reader_drain(r, UINT64_MAX));
    for (size_t i = 0; i < n; i++)
        shot_check(&g.shots[i]);

    struct reader_stats stats;
    reader_get_stats(r, &stats);
    assert_int_equal(stats.submitted, n);
    assert_int_equal(stats.done, n);
    uint64_t pieces = 0;
    for (int i = 0; i < READER_BACKENDS; i++)
        pieces += stats.backend[i].pieces;
    assert_int_equal(pieces, n);
    T_OK(reader_destroy(r, 30));
    gallery_free(&g);
}

T_TEST(reads)
{
    enum reader_backend backend;
    T_OK(reader_backend_parse(t_arg(), &backend));
    read_everything(backend, NULL);
}

T_TEST(reads_in_memory)
{
    enum reader_backend backend;
    if (access("/dev/shm", W_OK) != 0)
        T_SKIP("no /dev/shm");
    T_OK(reader_backend_parse(t_arg(), &backend));
    read_everything(backend, "/dev/shm");
}

T_MAIN(T_ARG(reads, "auto"), T_ARG(reads, "cache"), T_ARG(reads, "pread"), T_ARG(reads, "direct"),
       T_ARG(reads, "uring"), T_ARG(reads_in_memory, "auto"), T_ARG(reads_in_memory, "cache"),
       T_ARG(reads_in_memory, "pread"), T_ARG(reads_in_memory, "direct"), T_ARG(reads_in_memory, "uring"))
