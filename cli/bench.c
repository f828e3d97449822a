/* SPDX-License-Identifier: MIT
 * sidestream bench: arguments, memory within the share, and the suites one after the other. */
#include "bench.h"
#include "progress.h"
#include "signals.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { KEY_QUICK = 256, KEY_SAVE, KEY_SHARE, KEY_SAMPLES, KEY_STREAMS };
enum { TIMEOUT_S = 60, HUGE_PAGE = 2 << 20, REGION = 4 << 20 };

struct suite {
    int (*run)(struct bench *bench);
    const char *name;
    bool in_profile; /* it measures something of the profile */
};

/* In the order that they run: one that needs what another measures comes behind it. */
static const struct suite suites[] = {
    {bench_link, "link", true},     {bench_pin, "pin", true},       {bench_stage, "stage", true},
    {bench_blocks, "blocks", true}, {bench_launch, "launch", true}, {bench_overlap, "overlap", false},
};

enum { SUITES = sizeof(suites) / sizeof(suites[0]) };

static const struct argp_option options[] = {
    {"quick", KEY_QUICK, NULL, 0, "Fewer sizes and samples", 1},
    {"samples", KEY_SAMPLES, "N", 0,
     "Samples of each figure, 1 to 100 (9; 3 with --quick; 1 on sim, where times are exact)", 1},
    {"share", KEY_SHARE, "PERCENT", 0,
     "Most that may be taken of free device memory, and of the host memory that this process may use: 1 to 90 (25)", 1},
    {"streams", KEY_STREAMS, "LIST", 0, "Also overlap with these numbers of compute streams, 1 to 8 each", 1},
    {"save", KEY_SAVE, "FILE", OPTION_ARG_OPTIONAL,
     "Keep the figures as this machine's profile, which plans and pipelines read; in FILE: for others to look at", 2},
    {0},
};

static void want_count(struct argp_state *state, const char *name, const char *text, uint64_t most, uint64_t *value)
{
    char why[PARSE_WHY];

    if (!parse_count(text, 1, most, value, why))
        argp_error(state, "--%s: %s", name, why);
}

static void want_suite(struct argp_state *state, const char *name, uint32_t *set)
{
    char names[128] = "";

    if (strcmp(name, "all") == 0)
        *set |= (1u << SUITES) - 1;
    for (size_t i = 0; i < SUITES; i++) {
        if (strcmp(name, suites[i].name) == 0)
            *set |= 1u << i;
        strcat(strcat(names, suites[i].name), ", ");
    }
    if (*set == 0)
        argp_error(state, "'%.40s' is nothing to measure; want %sor all", name, names);
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    struct bench_args *a = state->input;
    char why[PARSE_WHY];
    uint32_t set = 0;

    switch (key) {
    case ARGP_KEY_INIT: state->child_inputs[0] = &a->common; return 0;
    case KEY_QUICK: a->quick = true; return 0;
    case KEY_SAMPLES: want_count(state, "samples", arg, BENCH_SAMPLES, &a->samples); return 0;
    case KEY_SHARE: want_count(state, "share", arg, 90, &a->share); return 0;
    case KEY_STREAMS:
        if (!parse_list(arg, 1, 8, a->streams, &a->stream_counts, why))
            argp_error(state, "--streams: %s", why);
        return 0;
    case KEY_SAVE:
        if (arg != NULL && *arg == '\0')
            argp_error(state, "--save: the name is empty; want a file to write, or --save alone");
        a->save = true;
        a->save_file = arg;
        return 0;
    case ARGP_KEY_ARG:
        want_suite(state, arg, &set);
        a->suites |= set;
        return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

/* ---------------------------------------------------------------- memory within the share */

/* What the pool has pinned, slack included, and all else. */
static size_t host_used(const struct bench *b)
{
    side_pool_stats stats;

    memset(&stats, 0, sizeof(stats));
    if (b->pool != NULL)
        (void)side_pool_get_stats(b->pool, &stats);
    return stats.pinned_bytes + b->host_taken;
}

static size_t room(size_t limit, size_t used)
{
    return used < limit ? limit - used : 0;
}

size_t bench_device_room(const struct bench *b)
{
    return room(b->device_limit, b->device_taken);
}

size_t bench_host_room(const struct bench *b)
{
    return room(b->host_limit, host_used(b));
}

static void keep_peak(struct bench *b)
{
    size_t used = host_used(b);

    b->host_peak = used > b->host_peak ? used : b->host_peak;
    b->device_peak = b->device_taken > b->device_peak ? b->device_taken : b->device_peak;
}

static side_status too_much(struct bench *b, const char *what, size_t bytes, size_t left, side_status status)
{
    char a[32], c[32];

    say("%s of %s memory is more than the %s that --share=%llu leaves", bytes_text(bytes, a), what, bytes_text(left, c),
        (unsigned long long)b->args.share);
    b->said = true;
    return status;
}

bool bench_device_count(struct bench *b, size_t bytes)
{
    if (bytes > bench_device_room(b)) {
        (void)too_much(b, "device", bytes, bench_device_room(b), SIDE_NO_DEVICE_MEMORY);
        return false;
    }
    b->device_taken += bytes;
    keep_peak(b);
    return true;
}

void bench_device_uncount(struct bench *b, size_t bytes)
{
    b->device_taken -= bytes;
}

side_status bench_device_take(struct bench *b, size_t bytes, void **data)
{
    side_status status;

    if (!bench_device_count(b, bytes))
        return SIDE_NO_DEVICE_MEMORY;
    status = side_device_alloc(b->device, bytes, data);
    if (status != SIDE_OK)
        bench_device_uncount(b, bytes);
    return status;
}

void bench_device_free(struct bench *b, void *data, size_t bytes)
{
    if (data == NULL)
        return;
    side_device_free(b->device, data);
    b->device_taken -= bytes;
}

side_status bench_pinned_take(struct bench *b, size_t bytes, void **data)
{
    side_status status;

    if (bytes > bench_host_room(b))
        return too_much(b, "host", bytes, bench_host_room(b), SIDE_OVER_BUDGET);
    status = side_pool_alloc(b->pool, bytes, data);
    if (status == SIDE_OK)
        keep_peak(b);
    return status;
}

void bench_pinned_free(struct bench *b, void *data, size_t bytes)
{
    (void)bytes;
    if (data == NULL)
        return;
    side_pool_free(b->pool, data, NULL, 0);
    side_pool_trim(b->pool);
}

bool bench_host_count(struct bench *b, size_t bytes)
{
    if (bytes > bench_host_room(b)) {
        (void)too_much(b, "host", bytes, bench_host_room(b), SIDE_OVER_BUDGET);
        return false;
    }
    b->host_taken += bytes;
    keep_peak(b);
    return true;
}

void bench_host_uncount(struct bench *b, size_t bytes)
{
    b->host_taken -= bytes;
}

static size_t whole_pages(size_t bytes)
{
    size_t unit = bytes >= HUGE_PAGE ? HUGE_PAGE : 4096;

    return (bytes + unit - 1) / unit * unit;
}

side_status bench_pageable_take(struct bench *b, size_t bytes, void **data)
{
    size_t whole = whole_pages(bytes);
    void *memory;

    if (!bench_host_count(b, whole))
        return SIDE_OVER_BUDGET;
    memory = aligned_alloc(whole >= HUGE_PAGE ? HUGE_PAGE : 4096, whole);
    if (memory == NULL) {
        bench_host_uncount(b, whole);
        say("out of host memory");
        b->said = true;
        return SIDE_NO_MEMORY;
    }
    if (whole >= HUGE_PAGE)
        (void)madvise(memory, whole, MADV_HUGEPAGE);
    memset(memory, BENCH_POISON, whole); /* touched: page faults are no part of what is measured */
    *data = memory;
    return SIDE_OK;
}

void bench_pageable_free(struct bench *b, void *data, size_t bytes)
{
    if (data == NULL)
        return;
    free(data);
    bench_host_uncount(b, whole_pages(bytes));
}

/* The device's own pool takes a quarter of what this process may use; it is asked, and pins nothing. */
static side_status set_limits(struct bench *b)
{
    side_pool_options wanted = SIDE_POOL_OPTIONS_INIT;
    side_pool_stats stats;
    side_pool *pool;
    size_t free_bytes, total_bytes;
    side_status status = side_device_pool(b->device, &pool);

    if (status == SIDE_OK)
        status = side_pool_get_stats(pool, &stats);
    if (status == SIDE_OK)
        status = side_device_get_memory(b->device, &free_bytes, &total_bytes);
    if (status != SIDE_OK)
        return status;
    b->host_limit = stats.budget_bytes / 25 * b->args.share;
    b->device_limit = free_bytes / 100 * b->args.share;
    wanted.budget_bytes = b->host_limit;
    wanted.region_bytes = REGION;
    return side_pool_create(b->device, &wanted, &b->pool);
}

/* ---------------------------------------------------------------- the course of events */

static void to_stdout(struct bench *b)
{
    char link[96], host[32], device[32];

    bench_print(b, "%s, %s%s\n", b->props.name, link_text(&b->link, link),
                b->props.simulated ? "; simulated: times are of a model, not of hardware" : "");
    bench_print(b, "At most %s of host and %s of device memory (--share=%llu); %zu %s of each figure, timed by %s.\n",
                bytes_text(b->host_limit, host), bytes_text(b->device_limit, device), (unsigned long long)b->args.share,
                b->samples, b->samples == 1 ? "sample" : "samples", bench_clock(b));
}

static int prepare(struct bench *b)
{
    long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
    side_status status = side_device_get_props(b->device, &b->props);
    int code;

    if (status == SIDE_OK)
        status = side_device_get_link(b->device, &b->link);
    if (status != SIDE_OK)
        return say_status(status, "cannot ask the device what it is");
    b->cache_bytes = cache > 0 ? (size_t)cache : 0;
    b->timeout_s = TIMEOUT_S;
    b->samples = b->args.samples;
    if (b->samples == 0)
        b->samples = b->props.simulated ? 1 : b->args.quick ? 3 : 9;
    status = set_limits(b);
    if (status == SIDE_OK)
        status = bench_time_begin(b);
    if (status != SIDE_OK)
        return bench_failed(b, status, "preparing the device");
    code = bench_machine_begin(b);
    if (code == EXIT_DONE)
        to_stdout(b);
    return code;
}

static int run_suites(struct bench *b)
{
    for (size_t i = 0; i < SUITES; i++) {
        int code;

        if ((b->args.suites >> i & 1) == 0)
            continue;
        code = suites[i].run(b);
        progress_end();
        if (code != EXIT_DONE)
            return code;
        b->measured[i] = true;
        fflush(stdout);
    }
    return bench_check(b) == SIDE_OK ? EXIT_DONE : bench_failed(b, SIDE_CANCELLED, "");
}

static int report(struct bench *b)
{
    char host[32], device[32];

    bench_print(b, "\nTaken at most: %s of host memory, %s of device memory.\n", bytes_text(b->host_peak, host),
                bytes_text(b->device_peak, device));
    return b->args.common.json ? print_json(bench_root(b)) : finish_stdout();
}

static void clean_up(struct bench *b)
{
    bench_time_end(b);
    side_pool_destroy(b->pool);
    side_device_close(b->device);
    json_decref(b->suites);
    json_decref(b->errors);
    free(b);
}

/* Figures with a measuring error are shown, and not kept. */
static int save(struct bench *b)
{
    char missing[128] = "";
    bool link_measured = false;

    if (b->code != EXIT_DONE) {
        say("nothing is saved");
        return EXIT_DONE;
    }
    for (size_t i = 0; i < SUITES; i++) {
        link_measured = link_measured || (b->measured[i] && suites[i].run == bench_link);
        if (!b->measured[i] && suites[i].in_profile)
            strcat(strcat(missing, *missing != '\0' ? ", " : ""), suites[i].name);
    }
    return bench_machine_save(b, link_measured, missing);
}

static int bench(struct bench *b)
{
    int code = prepare(b), saved = EXIT_DONE;

    if (code == EXIT_DONE)
        code = run_suites(b);
    if (code == EXIT_DONE && b->args.save)
        saved = save(b);
    if (code == EXIT_DONE && saved != EXIT_INTERRUPTED)
        code = report(b);
    return code != EXIT_DONE ? code : saved != EXIT_DONE ? saved : b->code;
}

int command_bench(int argc, char **argv)
{
    static const struct argp_child children[] = {{&common_argp, 0, NULL, 0}, {0}};
    static const struct argp argp = {
        options,
        parse,
        "[SUITE...]",
        "Measures what this machine can do: link (copies of all sizes), pin (ways to get pinned memory), stage "
        "(threads that fill it), "
        "blocks (scattered copies), launch (what calls cost), overlap (pipelines against their bound); all of them "
        "without an argument. "
        "Every byte that is copied is checked.\v" EXIT_HELP,
        children,
        NULL,
        NULL,
    };
    struct bench *b = calloc(1, sizeof(*b));
    int code;

    if (b == NULL) {
        say("out of host memory");
        return EXIT_MEMORY;
    }
    b->args.share = 25;
    argp_parse(&argp, argc, argv, 0, NULL, &b->args);
    if (b->args.suites == 0)
        b->args.suites = (1u << SUITES) - 1;
    if (b->args.common.json) {
        b->suites = json_object();
        b->errors = json_array();
    }
    code = open_device(&b->args.common, &b->device);
    if (code != EXIT_DONE) {
        free(b);
        return code;
    }
    code = bench(b);
    if (code != EXIT_STUCK && !b->stuck) /* nothing is freed under a device that does not answer */
        clean_up(b);
    return code;
}
