/* SPDX-License-Identifier: MIT */
#include "error.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define OPTIONS_TAIL_MOST 4096u /* a newer header's struct is not larger than ours by more: the size is garbage */

static _Thread_local side_error last_error = {.where = ""};

static struct {
    /* Guards the fields below; held for reading while fn runs: threads do not wait for each other's callbacks (one that needs a lock of the caller's, an
     * interpreter's say, would hang those that hold it), yet a replaced callback is out of use on return. */
    pthread_rwlock_t lock;
    side_log_fn *fn;
    void *user;
    side_level most;
} sink = {.lock = PTHREAD_RWLOCK_INITIALIZER};

static const struct {
    side_status status;
    const char *name, *text;
} status_table[] = {{SIDE_OK, "SIDE_OK", "success"},
#define X(name, value, text) {name, #name, text},
                    SIDE_STATUS_MAP(X)
#undef X
};

const char *side_status_name(side_status status)
{
    for (size_t i = 0; i < sizeof(status_table) / sizeof(status_table[0]); i++)
        if (status_table[i].status == status)
            return status_table[i].name;
    return "SIDE_UNKNOWN";
}

const char *side_status_text(side_status status)
{
    for (size_t i = 0; i < sizeof(status_table) / sizeof(status_table[0]); i++)
        if (status_table[i].status == status)
            return status_table[i].text;
    return "unknown status";
}

const side_error *side_last_error(void)
{
    return &last_error;
}

__attribute__((format(printf, 5, 0))) static side_status set(side_status status, const char *where, int os_errno,
                                                             int code, const char *format, va_list args)
{
    side_error e = {.status = status, .os_errno = os_errno, .device_code = code, .where = where};
    int n = vsnprintf(e.message, sizeof(e.message), format, args);

    if (os_errno != 0 && n >= 0 && (size_t)n < sizeof(e.message) - 3) {
        char text[96];
        /* the GNU strerror_r: returns the text, which may or may not be in the buffer */
        snprintf(e.message + n, sizeof(e.message) - (size_t)n, ": %s", strerror_r(os_errno, text, sizeof(text)));
    }
    last_error = e;
    return status;
}

side_status error_set(side_status status, const char *where, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    set(status, where, 0, 0, format, args);
    va_end(args);
    return status;
}

side_status error_set_errno(side_status status, const char *where, int os_errno, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    set(status, where, os_errno, 0, format, args);
    va_end(args);
    return status;
}

side_status error_set_device(side_status status, const char *where, int device_code, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    set(status, where, 0, device_code, format, args);
    va_end(args);
    return status;
}

void error_clear(void)
{
    last_error = (side_error){.where = ""};
}

void error_copy(side_error *to)
{
    *to = last_error;
}

side_status error_restore(const side_error *from)
{
    last_error = *from;
    return from->status;
}

void side_log_callback(side_log_fn *fn, void *user, side_level most)
{
    pthread_rwlock_wrlock(&sink.lock);
    sink.fn = fn;
    sink.user = user;
    sink.most = most;
    pthread_rwlock_unlock(&sink.lock);
}

void error_in_child(void)
{
    pthread_rwlock_init(&sink.lock, NULL);
}

void log_message(side_level level, const char *component, const char *format, ...)
{
    char text[512];
    va_list args;

    pthread_rwlock_rdlock(&sink.lock);
    if (sink.fn != NULL && level <= sink.most) {
        va_start(args, format);
        vsnprintf(text, sizeof(text), format, args);
        va_end(args);
        sink.fn(sink.user, level, component, text);
    }
    pthread_rwlock_unlock(&sink.lock);
}

side_status options_copy(void *dst, size_t dst_bytes, const void *src, size_t min_bytes, const char *where)
{
    size_t n;

    if (src == NULL)
        return SIDE_OK;
    memcpy(&n, src, sizeof(n));
    if (n < min_bytes)
        return error_set(SIDE_INVALID, where, "options.size is %zu; fill the struct with its _INIT macro (%zu)", n,
                         dst_bytes);
    if (n > dst_bytes + OPTIONS_TAIL_MOST)
        return error_set(SIDE_INVALID, where, "options.size is %zu; fill the struct with its _INIT macro (%zu)", n,
                         dst_bytes);
    for (size_t i = dst_bytes; i < n; i++)
        if (((const unsigned char *)src)[i] != 0)
            return error_set(SIDE_UNSUPPORTED, where, "options byte %zu is set, which this version (%s) does not know",
                             i, side_version());
    memcpy(dst, src, n < dst_bytes ? n : dst_bytes);
    memcpy(dst, &dst_bytes, sizeof(dst_bytes));
    return SIDE_OK;
}
