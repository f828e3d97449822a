/* SPDX-License-Identifier: MIT */
#include "cli.h"
#include "progress.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static void __attribute__((format(printf, 1, 0))) say_list(const char *format, va_list args)
{
    progress_clear();
    fputs("sidestream: ", stderr);
    vfprintf(stderr, format, args);
}

void say(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    say_list(format, args);
    va_end(args);
    fputc('\n', stderr);
}

static const char *cause_of(side_status status)
{
    const side_error *error = side_last_error();

    return error->status == status && error->message[0] != '\0' ? error->message : side_status_text(status);
}

int say_status(side_status status, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    say_list(format, args);
    va_end(args);
    fprintf(stderr, ": %s\n", cause_of(status));
    return exit_for(status);
}

/* As a word of its own; what follows it may lie in that folder. */
static bool names(const char *message, const char *path)
{
    const size_t bytes = strlen(path);

    for (const char *at = message; bytes > 0 && (at = strstr(at, path)) != NULL; at++)
        if ((at == message || at[-1] == ' ' || at[-1] == '\'') && strchr(" :,/'", at[bytes]) != NULL)
            return true;
    return false;
}

int say_file(side_status status, const char *what, const char *path)
{
    const char *cause = cause_of(status);

    if (names(cause, path))
        say("%s", cause);
    else
        say("%s '%s': %s", what, path, cause);
    return exit_for(status);
}

int say_kept(const side_error *kept, side_status status, const char *format, ...)
{
    bool use = status == SIDE_CALLBACK && kept->status != SIDE_OK;
    va_list args;

    va_start(args, format);
    say_list(format, args);
    va_end(args);
    fprintf(stderr, ": %s\n", use ? kept->message : cause_of(status));
    return exit_for(use ? kept->status : status);
}

int exit_for(side_status status)
{
    switch (status) {
    case SIDE_OK: return EXIT_DONE;
    case SIDE_INVALID:
    case SIDE_TOO_LARGE: return EXIT_USAGE;
    case SIDE_NO_DEVICE:
    case SIDE_DRIVER_TOO_OLD:
    case SIDE_UNSUPPORTED:
    case SIDE_NO_LIBRARY: return EXIT_NO_DEVICE;
    case SIDE_NO_MEMORY:
    case SIDE_NO_DEVICE_MEMORY:
    case SIDE_OVER_BUDGET: return EXIT_MEMORY;
    case SIDE_STUCK: return EXIT_STUCK;
    case SIDE_CANCELLED: return EXIT_INTERRUPTED;
    default: return EXIT_FAILED;
    }
}

static void warn(void *user, side_level level, const char *component, const char *message)
{
    (void)user;
    (void)level;
    fprintf(stderr, "sidestream: %s: %s\n", component, message);
}

void say_warnings(void)
{
    side_log_callback(warn, NULL, SIDE_LEVEL_WARN);
}
