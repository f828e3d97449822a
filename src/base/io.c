/* SPDX-License-Identifier: MIT */
#include "io.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

/* What the headers of older systems lack. */
#define SYS_RING_SETUP    425 /* the same on all architectures */
#define SYS_RING_ENTER    426
#define SYS_RING_REGISTER 427
#define SYS_CACHESTAT     451
#define MAGIC_TMPFS       0x01021994
#define MAGIC_RAMFS       0x858458f6
#define MAGIC_HUGETLBFS   0x958458f6
#define WANT_DIOALIGN     0x2000u
#define NOWAIT_FLAG       0x8

#ifdef SIDE_TESTING
int (*io_test)(enum io_call call, int fd, uint64_t offset, size_t *bytes);

int io_script(enum io_call call, int fd, uint64_t offset, size_t *bytes)
{
    return io_test != NULL ? io_test(call, fd, offset, bytes) : 0;
}
#else
int io_script(enum io_call call, int fd, uint64_t offset, size_t *bytes)
{
    (void)call, (void)fd, (void)offset, (void)bytes;
    return 0;
}
#endif

static size_t at_most(size_t bytes)
{
    return bytes < IO_READ_MOST ? bytes : IO_READ_MOST;
}

int io_open(const char *path)
{
    size_t none = 0;
    int r = io_script(IO_OPEN, -1, 0, &none);
    if (r != 0)
        return r;
    r = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    return r >= 0 ? r : -errno;
}

int io_open_direct(int fd)
{
    char name[32];
    size_t none = 0;
    int r = io_script(IO_OPEN_DIRECT, fd, 0, &none);
    if (r != 0)
        return r;
    snprintf(name, sizeof(name), "/proc/self/fd/%d", fd);
    r = open(name, O_RDONLY | O_CLOEXEC | O_DIRECT);
    return r >= 0 ? r : -errno;
}

int io_stat(int fd, struct stat *out)
{
    size_t none = 0;
    int r = io_script(IO_STAT, fd, 0, &none);
    if (r != 0)
        return r;
    return fstat(fd, out) == 0 ? 0 : -errno;
}

ssize_t io_pread(int fd, void *data, size_t bytes, uint64_t offset)
{
    int scripted = io_script(IO_PREAD, fd, offset, &bytes);
    if (scripted != 0)
        return scripted;
    ssize_t r = pread(fd, data, at_most(bytes), (off_t)offset);
    return r >= 0 ? r : -errno;
}

ssize_t io_pread_nowait(int fd, void *data, size_t bytes, uint64_t offset)
{
    int scripted = io_script(IO_PREAD_NOWAIT, fd, offset, &bytes);
    if (scripted != 0)
        return scripted;
    struct iovec v = {.iov_base = data, .iov_len = at_most(bytes)};
    ssize_t r = preadv2(fd, &v, 1, (off_t)offset, NOWAIT_FLAG);
    return r >= 0 ? r : -errno;
}

ssize_t io_pread_direct(int fd, void *data, size_t bytes, uint64_t offset)
{
    size_t told = bytes;
    int scripted = io_script(IO_PREAD_DIRECT, fd, offset, &told);
    if (scripted != 0)
        return scripted;
    ssize_t r = pread(fd, data, at_most(bytes), (off_t)offset);
    if (r < 0)
        return -errno;
    return (size_t)r < told ? r : (ssize_t)told; /* the call itself must stay aligned */
}

int64_t io_cached(int fd, uint64_t offset, uint64_t bytes)
{
    struct {
        uint64_t offset, bytes;
    } range = {offset, bytes};
    struct {
        uint64_t cached, dirty, writeback, evicted, recently_evicted;
    } pages;
    size_t asked = (size_t)bytes;
    int scripted = io_script(IO_CACHED, fd, offset, &asked);
    if (scripted != 0)
        return scripted;
    if (asked != bytes)
        return (int64_t)asked;
    if (syscall(SYS_CACHESTAT, fd, &range, &pages, 0) != 0)
        return -errno;
    return (int64_t)(pages.cached * (uint64_t)sysconf(_SC_PAGESIZE));
}

bool io_in_memory(int fd)
{
    struct statfs fs;
    if (fstatfs(fd, &fs) != 0)
        return false;
    uint32_t type = (uint32_t)fs.f_type;
    return type == MAGIC_TMPFS || type == MAGIC_RAMFS || type == MAGIC_HUGETLBFS;
}

bool io_direct_align(int fd, uint32_t *memory, uint32_t *offset)
{
    /* The kernel's struct statx, of which the C library's may lack the end. */
    union {
        struct {
            uint32_t mask;
            uint8_t before[0x94];
            uint32_t memory_align, offset_align;
        };
        uint8_t all[256];
    } x = {.mask = 0};
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, WANT_DIOALIGN, &x) != 0 || (x.mask & WANT_DIOALIGN) == 0)
        return false;
    *memory = x.memory_align;
    *offset = x.offset_align;
    return true;
}

int io_ring_setup(uint32_t entries, void *params)
{
    size_t bytes = entries;
    int scripted = io_script(IO_RING_SETUP, -1, 0, &bytes);
    if (scripted != 0)
        return scripted;
    long r = syscall(SYS_RING_SETUP, entries, params);
    return r >= 0 ? (int)r : -errno;
}

int io_ring_register(int ring, uint32_t what, const void *data, uint32_t count)
{
    size_t bytes = count;
    int scripted = io_script(IO_RING_REGISTER, ring, what, &bytes);
    if (scripted != 0)
        return scripted;
    long r = syscall(SYS_RING_REGISTER, ring, what, data, count);
    return r >= 0 ? (int)r : -errno;
}

int io_ring_enter(int ring, uint32_t submit, uint32_t wait, uint32_t flags)
{
    size_t bytes = submit;
    int scripted = io_script(IO_RING_ENTER, ring, 0, &bytes);
    if (scripted != 0)
        return scripted;
    if (bytes != submit)
        wait = 0; /* as the kernel does where it could not take all */
    long r = syscall(SYS_RING_ENTER, ring, (uint32_t)bytes, wait, flags, NULL, (size_t)0);
    return r >= 0 ? (int)r : -errno;
}
