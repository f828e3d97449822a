/* SPDX-License-Identifier: MIT */
#include "os.h"

#include "error.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#include <unistd.h>

uint64_t os_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void os_sleep_ns(uint64_t ns)
{
    struct timespec t = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
    while (nanosleep(&t, &t) != 0 && errno == EINTR)
        ;
}

side_status os_deadline(double wait_s, const char *where, uint64_t *deadline_ns)
{
    if (!(wait_s >= 0))
        return error_set(SIDE_INVALID, where, "wait_s is %g; it takes seconds, 0 and more", wait_s);
    *deadline_ns = wait_s < 1e9 ? os_now_ns() + (uint64_t)(wait_s * 1e9) : UINT64_MAX;
    return SIDE_OK;
}

void os_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

unsigned os_cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0)
        return CPU_COUNT(&set) > 0 ? (unsigned)CPU_COUNT(&set) : 1;
    long n = sysconf(_SC_NPROCESSORS_ONLN); /* more than CPU_SETSIZE processors */
    return n > 0 ? (unsigned)n : 1;
}

unsigned os_local_world(void)
{
    const char *s = getenv("LOCAL_WORLD_SIZE");
    char *end;
    long n = s != NULL ? strtol(s, &end, 10) : 0;
    return s != NULL && *s != '\0' && *end == '\0' && n >= 1 && n <= 4096 ? (unsigned)n : 1;
}

bool os_env_flag(const char *name)
{
    const char *s = getenv(name);
    return s != NULL &&
           (strcmp(s, "1") == 0 || strcasecmp(s, "yes") == 0 || strcasecmp(s, "true") == 0 || strcasecmp(s, "on") == 0);
}

static atomic_uint fork_generation;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

static void in_child(void)
{
    atomic_fetch_add(&fork_generation, 1);
    error_in_child();
}

static void fork_install(void)
{
    pthread_atfork(NULL, NULL, in_child);
}

unsigned os_fork_generation(void)
{
    pthread_once(&fork_once, fork_install);
    return atomic_load_explicit(&fork_generation, memory_order_relaxed);
}

side_status os_fork_check(unsigned generation, const char *where)
{
    if (os_fork_generation() == generation)
        return SIDE_OK;
    return error_set(SIDE_FORKED, where,
                     "the object was made before fork(); fork first, then open the device in the child");
}

side_status os_thread_create(pthread_t *thread, const char *name, void *(*fn)(void *), void *arg)
{
    sigset_t all, old;
    pthread_t made;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int e = pthread_create(&made, NULL, fn, arg);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (e != 0)
        return error_set_errno(SIDE_SYSTEM, "pthread_create", e, "cannot start thread %s", name);
    pthread_setname_np(made, name);
    *thread = made;
    return SIDE_OK;
}

void os_cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t a;
    pthread_condattr_init(&a);
    pthread_condattr_setclock(&a, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &a);
    pthread_condattr_destroy(&a);
}

bool os_cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *mutex, uint64_t deadline_ns)
{
    struct timespec t = {.tv_sec = (time_t)(deadline_ns / 1000000000u), .tv_nsec = (long)(deadline_ns % 1000000000u)};
    return pthread_cond_timedwait(cond, mutex, &t) != ETIMEDOUT;
}

#ifdef SIDE_TESTING
ssize_t (*os_test_pread)(int fd, void *data, size_t bytes, off_t offset);
ssize_t (*os_test_pwrite)(int fd, const void *data, size_t bytes, off_t offset);
#define OS_PREAD(...)  (os_test_pread != NULL ? os_test_pread(__VA_ARGS__) : pread(__VA_ARGS__))
#define OS_PWRITE(...) (os_test_pwrite != NULL ? os_test_pwrite(__VA_ARGS__) : pwrite(__VA_ARGS__))
#else
#define OS_PREAD(...)  pread(__VA_ARGS__)
#define OS_PWRITE(...) pwrite(__VA_ARGS__)
#endif

side_status os_pread_all(int fd, void *data, size_t bytes, uint64_t offset, size_t *done)
{
    size_t n = 0;

    while (n < bytes) {
        ssize_t r = OS_PREAD(fd, (char *)data + n, bytes - n, (off_t)(offset + n));
        if (r > 0)
            n += (size_t)r;
        else if (r == 0)
            break;
        else if (errno != EINTR) {
            *done = n;
            return error_set_errno(SIDE_IO, "pread", errno, "reading %zu bytes at offset %llu failed", bytes - n,
                                   (unsigned long long)(offset + n));
        }
    }
    *done = n;
    return SIDE_OK;
}

side_status os_pwrite_all(int fd, const void *data, size_t bytes, uint64_t offset, size_t *done)
{
    size_t n = 0;

    while (n < bytes) {
        ssize_t r = OS_PWRITE(fd, (const char *)data + n, bytes - n, (off_t)(offset + n));
        if (r > 0)
            n += (size_t)r;
        else if (r == 0 || errno != EINTR) {
            int e = r == 0 ? ENOSPC : errno;
            *done = n;
            return error_set_errno(SIDE_IO, "pwrite", e, "writing %zu bytes at offset %llu failed", bytes - n,
                                   (unsigned long long)(offset + n));
        }
    }
    *done = n;
    return SIDE_OK;
}

void os_sync_folder(const char *folder)
{
    const int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    if (fd >= 0) {
        (void)fsync(fd);
        close(fd);
    }
}

void os_sync_parent(const char *path)
{
    char folder[PATH_MAX];
    const char *slash = strrchr(path, '/');
    const size_t n = slash == NULL || slash == path ? 1 : (size_t)(slash - path);

    snprintf(folder, sizeof(folder), "%.*s", (int)n, slash != NULL ? path : ".");
    os_sync_folder(folder);
}

void *os_library_open(const char *name, char *why, size_t why_bytes)
{
    void *h = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (h == NULL && why_bytes > 0) {
        const char *e = dlerror();
        snprintf(why, why_bytes, "%s", e != NULL ? e : "unknown");
    }
    return h;
}

void *os_library_symbol(void *library, const char *name)
{
    return dlsym(library, name);
}
