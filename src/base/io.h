/* SPDX-License-Identifier: MIT
 * System calls that read files, as they are: one call, one try, the result or a negative errno. Tests script each of them. */
#ifndef BASE_IO_H
#define BASE_IO_H

#include "sidestream.h"

#include <sys/stat.h>
#include <sys/types.h>

enum io_call {
    IO_OPEN,        /* by path; bytes: 0 */
    IO_OPEN_DIRECT, /* bytes: 0 */
    IO_STAT,        /* bytes: 0 */
    IO_PREAD,
    IO_PREAD_NOWAIT,
    IO_PREAD_DIRECT,
    IO_CACHED,
    IO_RING_SETUP,    /* bytes: entries */
    IO_RING_REGISTER, /* offset: what */
    IO_RING_ENTER,    /* bytes: submissions */
    IO_RING_READ,     /* a completion: bytes are what it has read */
    IO_RING_WAKE,     /* a completion of the eventfd's read; only failures count */
    IO_CALLS
};

#define IO_READ_MOST ((size_t)1 << 30) /* Linux reads 0x7ffff000 bytes a call at most */

/* O_RDONLY | O_CLOEXEC, and O_NONBLOCK, so that opening a FIFO returns. */
int io_open(const char *path);
/* The file of fd once more, with O_DIRECT, whatever its name is now. */
int io_open_direct(int fd);
int io_stat(int fd, struct stat *out);
/* Page cache and disk. */
ssize_t io_pread(int fd, void *data, size_t bytes, uint64_t offset);
/* Page cache alone: -EAGAIN where its first page is not there (and then the kernel may start reading ahead), -EOPNOTSUPP where the file system cannot tell. */
ssize_t io_pread_nowait(int fd, void *data, size_t bytes, uint64_t offset);
/* fd from io_open_direct; all three aligned. */
ssize_t io_pread_direct(int fd, void *data, size_t bytes, uint64_t offset);
/* Bytes of the extent that are in the page cache, in whole pages: a hint, as of a moment ago; kernels before 6.5 and files of others have none: < 0. Reads nothing. */
int64_t io_cached(int fd, uint64_t offset, uint64_t bytes);
/* True where the file system keeps its files in memory alone. */
bool io_in_memory(int fd);
/* What direct reads of the file must be aligned to: memory and offset; 0 where they are refused. False: the kernel does not say (before 6.1). */
bool io_direct_align(int fd, uint32_t *memory, uint32_t *offset);

/* The three calls of io_uring. */
int io_ring_setup(uint32_t entries, void *params);
int io_ring_register(int ring, uint32_t what, const void *data, uint32_t count);
int io_ring_enter(int ring, uint32_t submit, uint32_t wait, uint32_t flags);

#ifdef SIDE_TESTING
/* Called before each call, from any thread. Returns 0: the call is made, with *bytes, which may have been made less; else a negative errno: it is not made, and
 * this is its result. IO_PREAD_DIRECT is made whole and its result cut to *bytes; IO_CACHED answers a changed *bytes; IO_RING_READ comes after the read, and changes its result. */
extern int (*io_test)(enum io_call call, int fd, uint64_t offset, size_t *bytes);
#endif
/* 0, or the result that a test wants instead of the call's. */
int io_script(enum io_call call, int fd, uint64_t offset, size_t *bytes);

#endif
