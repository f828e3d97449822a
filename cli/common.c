/* SPDX-License-Identifier: MIT */
#include "cli.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

static const struct argp_option common_options[] = {
    {"device", 'd', "SPEC", 0, "auto (default), cuda, cuda:N, sim or sim:PROFILE,key=value,...", 10},
    {"json", 'j', NULL, 0, "Print one JSON object instead of text", 10},
    {0},
};

static error_t parse_common(int key, char *arg, struct argp_state *state)
{
    struct common *common = state->input;

    switch (key) {
    case 'd':
        if (*arg == '\0' || strlen(arg) > 255)
            argp_error(state, "--device '%.40s': want auto, cuda, cuda:N, sim or sim:PROFILE", arg);
        common->device = arg;
        return 0;
    case 'j': common->json = true; return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

const struct argp common_argp = {common_options, parse_common, NULL, NULL, NULL, NULL, NULL};

int open_device(const struct common *common, side_device **device)
{
    const char *spec = common->device != NULL ? common->device : "auto";
    side_status status = side_device_open(spec, device);

    if (status == SIDE_OK)
        return EXIT_DONE;
    (void)say_status(status, "cannot open device '%s'", spec);
    if (status == SIDE_NO_DEVICE || status == SIDE_DRIVER_TOO_OLD)
        say("'sidestream devices' lists what there is; --device=sim needs no GPU");
    return exit_for(status);
}

int finish_stdout(void)
{
    if (fflush(stdout) == 0 && !ferror(stdout))
        return EXIT_DONE;
    if (errno != EPIPE) /* the reader has seen enough */
        say("writing to stdout: %s", strerror(errno));
    return EXIT_FAILED;
}

int print_json(json_t *root)
{
    int failed;

    if (root == NULL) {
        say("out of host memory");
        return EXIT_MEMORY;
    }
    failed = json_dumpf(root, stdout, JSON_INDENT(2) | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(9));
    json_decref(root);
    if (failed != 0) {
        say("writing to stdout failed");
        return EXIT_FAILED;
    }
    putchar('\n');
    return finish_stdout();
}

json_t *json_number(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

const char *bytes_text(uint64_t bytes, char text[32])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = (double)bytes;
    size_t unit = 0;

    while (unit < 4 && value >= 1024) {
        value /= 1024;
        unit++;
    }
    snprintf(text, 32, value == floor(value) || unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
    return text;
}

const char *link_text(const side_link *link, char text[96])
{
    if (link->generation <= 0 && link->max_generation <= 0)
        snprintf(text, 96, "%s", link->kind);
    else if (link->generation < link->max_generation || link->width < link->max_width)
        snprintf(text, 96, "%s gen %d x%d now, can do gen %d x%d", link->kind, link->generation, link->width,
                 link->max_generation, link->max_width);
    else
        snprintf(text, 96, "%s gen %d x%d", link->kind, link->generation, link->width);
    return text;
}

uint32_t stdout_columns(void)
{
    struct winsize size;

    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col < 40)
        return 80;
    return size.ws_col < 160 ? size.ws_col : 160;
}

/* Without a locale (containers) terminals still are UTF-8; ASCII is for those that say that they are something else. */
bool stdout_ascii(void)
{
    static const char *const names[] = {"LC_ALL", "LC_CTYPE", "LANG"};
    const char *term = getenv("TERM");

    if (term != NULL && strcmp(term, "dumb") == 0 && isatty(STDOUT_FILENO))
        return true;
    for (size_t i = 0; i < 3; i++) {
        const char *value = getenv(names[i]);

        if (value == NULL || *value == '\0')
            continue;
        return strcmp(value, "C") != 0 && strcmp(value, "POSIX") != 0 && strcasestr(value, "utf-8") == NULL &&
               strcasestr(value, "utf8") == NULL;
    }
    return false;
}

double clock_s(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}
