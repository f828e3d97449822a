/* SPDX-License-Identifier: MIT
 * What we ask of the operating system besides memory pages (pages.h). */
#ifndef BASE_OS_H
#define BASE_OS_H

#include "sidestream.h"

#include <pthread.h>
#include <sys/types.h>

uint64_t os_now_ns(void); /* CLOCK_MONOTONIC */
void os_sleep_ns(uint64_t ns);
/* In os_now_ns terms, wait_s seconds from now; UINT64_MAX for more than a few decades. SIDE_INVALID: below zero or no number. */
side_status os_deadline(double wait_s, const char *where, uint64_t *deadline_ns);
void os_relax(void); /* one turn of a spin loop: tells the processor */

/* Cores this process may run on (affinity), at least 1. */
unsigned os_cores(void);
/* LOCAL_WORLD_SIZE, at least 1; 1 where unset or not a number. */
unsigned os_local_world(void);
/* True for NAME=1, yes, true, on. */
bool os_env_flag(const char *name);

/* Number of forks between the process that loaded the library and this one. An object notes it at birth; a different value later means a forked child. */
unsigned os_fork_generation(void);
/* SIDE_OK, or SIDE_FORKED with the detail set. */
side_status os_fork_check(unsigned generation, const char *where);

/* A named thread with all signals blocked: signals are the caller's. Returns SIDE_SYSTEM on failure. */
side_status os_thread_create(pthread_t *thread, const char *name, void *(*fn)(void *), void *arg);
/* Condition variable on CLOCK_MONOTONIC. */
void os_cond_init(pthread_cond_t *cond);
/* deadline_ns in os_now_ns terms; false on time-out. The mutex is held again on return either way. */
bool os_cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *mutex, uint64_t deadline_ns);

/* All of it: continues after short transfers and EINTR. *done: bytes moved, also on failure; on os_pread_all SIDE_OK with *done < bytes means end of file. */
side_status os_pread_all(int fd, void *data, size_t bytes, uint64_t offset, size_t *done);
side_status os_pwrite_all(int fd, const void *data, size_t bytes, uint64_t offset, size_t *done);

#ifdef SIDE_TESTING
/* Scripted I/O: called instead of pread/pwrite where set; return as those do. */
extern ssize_t (*os_test_pread)(int fd, void *data, size_t bytes, off_t offset);
extern ssize_t (*os_test_pwrite)(int fd, const void *data, size_t bytes, off_t offset);
#endif

/* What was renamed or made in a folder is on the disk once the folder is. Best effort: not all file systems sync folders. */
void os_sync_folder(const char *folder);
/* The one that `path` lies in. */
void os_sync_parent(const char *path);

/* dlopen with RTLD_NOW | RTLD_LOCAL; NULL and, in why, dlerror's text. */
void *os_library_open(const char *name, char *why, size_t why_bytes);
void *os_library_symbol(void *library, const char *name);

#endif
