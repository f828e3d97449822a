/* SPDX-License-Identifier: MIT
 * Files of known bytes, and pieces of them that are read and compared. */
#ifndef TESTS_READER_HELP_H
#define TESTS_READER_HELP_H

#include "io.h"
#include "os.h"
#include "reader.h"
#include "t.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

/* Byte `at` of every file: each 8 bytes are their own number, mixed. */
static inline uint8_t byte_at(uint64_t at)
{
    uint64_t x = (at / 8 + 1) * 0x9e3779b97f4a7c15u;
    return (uint8_t)(x >> (at % 8 * 8));
}

static inline void bytes_make(uint8_t *data, uint64_t from, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        data[i] = byte_at(from + i);
}

/* folder NULL: the test's own. */
static inline char *file_make(const char *folder, const char *name, size_t bytes)
{
    char *path = malloc(4096);
    uint8_t *data = malloc(bytes + 1);
    size_t done = 0;

    snprintf(path, 4096, "%s/%s", folder != NULL ? folder : t_tmpdir(), name);
    int fd = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0600);
    assert_true(fd >= 0);
    bytes_make(data, 0, bytes);
    T_OK(os_pwrite_all(fd, data, bytes, 0, &done));
    fsync(fd); /* else it cannot leave the page cache */
    close(fd);
    free(data);
    return path;
}

static inline void file_make_cold(const char *path)
{
    int fd = open(path, O_RDONLY);
    assert_true(fd >= 0);
    assert_int_equal(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    close(fd);
}

/* A piece and what became of it. */
struct shot {
    struct reader_piece piece;
    struct gallery *gallery;
    side_error error;
    atomic_int calls; /* of done */
};

struct gallery {
    struct shot *shots;
    size_t count;
    uint8_t *memory; /* one aligned buffer a shot */
    size_t bytes;    /* each */
    atomic_int failed;
};

static inline void shot_done(void *owner, struct reader_piece *piece)
{
    struct gallery *g = owner;
    struct shot *shot = piece->user;

    if (piece->status != SIDE_OK) {
        shot->error = *side_last_error();
        atomic_fetch_add(&g->failed, 1);
    }
    atomic_fetch_add(&shot->calls, 1);
}

static inline void gallery_make(struct gallery *g, size_t count, size_t bytes)
{
    bytes = (bytes + READER_ALIGN - 1) / READER_ALIGN * READER_ALIGN;
    *g = (struct gallery){.count = count, .bytes = bytes};
    g->shots = calloc(count, sizeof(*g->shots));
    g->memory = aligned_alloc(READER_ALIGN, count * bytes);
    assert_true(g->shots != NULL && g->memory != NULL);
    memset(g->memory, 0xEE, count * bytes);
    for (size_t i = 0; i < count; i++) {
        g->shots[i].gallery = g;
        g->shots[i].piece.buffer = g->memory + i * bytes;
        g->shots[i].piece.buffer_bytes = bytes;
        g->shots[i].piece.user = &g->shots[i];
    }
}

static inline void gallery_free(struct gallery *g)
{
    free(g->shots);
    free(g->memory);
}

static inline side_status shoot(reader *r, struct gallery *g, size_t i, uint32_t file, uint64_t offset, size_t bytes)
{
    g->shots[i].piece.file = file;
    g->shots[i].piece.offset = offset;
    g->shots[i].piece.bytes = bytes;
    return reader_submit(r, &g->shots[i].piece);
}

/* Read to the end, once, with the file's bytes, inside its buffer. */
static inline void shot_check(const struct shot *shot)
{
    const struct reader_piece *p = &shot->piece;
    const uint8_t *data = p->data;

    if (p->status != SIDE_OK)
        T_FAIL("offset %llu, %zu bytes: %s", (unsigned long long)p->offset, p->bytes, shot->error.message);
    assert_int_equal(atomic_load(&shot->calls), 1);
    assert_true(data >= (uint8_t *)p->buffer && data + p->bytes <= (uint8_t *)p->buffer + p->buffer_bytes);
    for (size_t k = 0; k < p->bytes; k++)
        if (data[k] != byte_at(p->offset + k))
            T_FAIL("offset %llu of %zu bytes, %s: byte %zu is %#x, not %#x", (unsigned long long)p->offset, p->bytes,
                   reader_backend_name(p->backend), k, data[k], byte_at(p->offset + k));
}

#endif
