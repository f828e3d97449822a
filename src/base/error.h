/* SPDX-License-Identifier: MIT
 * The calling thread's error detail, and the log callback. One place where a status meets its cause. */
#ifndef BASE_ERROR_H
#define BASE_ERROR_H

#include "sidestream.h"

/* Records the cause on this thread and returns `status`. `where` must be static storage. Use as: return error_set(...). */
side_status error_set(side_status status, const char *where, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* The same with an errno or a driver's code; the message is completed with ": <strerror>" for errno. */
side_status error_set_errno(side_status status, const char *where, int os_errno, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
side_status error_set_device(side_status status, const char *where, int device_code, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* Before a callback of the caller's, so that what is set after it is the callback's. */
void error_clear(void);
/* Carries an error from the thread that saw it to the thread that returns it. */
void error_copy(side_error *to);
side_status error_restore(const side_error *from); /* returns from->status */

/* In a forked child, before anything else: another thread may have held the lock of the log callback at the fork. */
void error_in_child(void);

/* Formats only where a callback wants the level. */
void log_message(side_level level, const char *component, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* dst: full struct of dst_bytes, size field first, preset by its initialiser. Takes a caller's options whatever header it was built with: what it
 * lacks stays zero, what we do not know must be zero. min_bytes: the struct as first released. src NULL: defaults. */
side_status options_copy(void *dst, size_t dst_bytes, const void *src, size_t min_bytes, const char *where);

#endif
