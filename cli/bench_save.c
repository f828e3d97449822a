/* SPDX-License-Identifier: MIT
 *
 * The machine profile: begun from what is known already, overwritten by what the suites measure, saved at the end and only whole. What no suite measured stays as
 * it was, and that is said. */
#include "bench.h"
#include "signals.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

/* Whose names a cache folder lacks are made by the library when it saves. */
static bool has_folder(const char *path)
{
    char folder[PATH_MAX];
    const char *slash = strrchr(path, '/');
    struct stat st;

    if (slash == NULL || slash == path)
        return true;
    snprintf(folder, sizeof(folder), "%.*s", (int)(slash - path), path);
    return stat(folder, &st) == 0 || errno != ENOENT;
}

/* A name that cannot be written shows before the work is done. */
static int try_to_write(const char *path)
{
    struct output output = {.fd = -1, .place = -1};
    struct stat st;
    int code;

    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode)) {
        say("--save: '%s' is there already and is not a file", path);
        return EXIT_USAGE;
    }
    if (!has_folder(path))
        return EXIT_DONE;
    code = output_open(&output, path, NULL);
    output_abort(&output);
    return code;
}

/* So that suites may be measured one after the other into one file. Of another machine, or damaged: it is written anew. */
static bool begin_from_file(struct bench *b)
{
    side_machine there = SIDE_MACHINE_INIT;
    const side_machine *m = &b->machine;

    if (b->args.save_file == NULL || side_machine_load(b->save_path, &there) != SIDE_OK ||
        strcmp(there.machine, m->machine) != 0 || strcmp(there.uuid, m->uuid) != 0 || strcmp(there.gpu, m->gpu) != 0 ||
        there.driver_version != m->driver_version)
        return false;
    b->machine = there;
    return true;
}

int bench_machine_begin(struct bench *b)
{
    side_status status;
    int code;

    b->machine = (side_machine)SIDE_MACHINE_INIT;
    status = side_machine_get(b->device, &b->machine);
    if (status != SIDE_OK)
        return bench_failed(b, status, "cannot read the machine profile");
    b->machine_was = b->machine.from;
    if (!b->args.save)
        return EXIT_DONE;
    if (b->args.save_file != NULL) {
        if (strlen(b->args.save_file) >= sizeof(b->save_path)) {
            say("--save: the name is longer than %zu characters", sizeof(b->save_path) - 1);
            return EXIT_USAGE;
        }
        strcpy(b->save_path, b->args.save_file);
    } else {
        status = side_machine_path(b->device, b->save_path, sizeof(b->save_path));
        if (status != SIDE_OK)
            return bench_failed(b, status, "--save without a file");
    }
    code = try_to_write(b->save_path);
    if (code == EXIT_DONE)
        b->begun_from_file = begin_from_file(b);
    if (b->begun_from_file)
        b->machine_was = b->machine.from;
    return code;
}

/* Rates are what plans rest on: a profile without them is an estimate still. */
static void set_origin(struct bench *b, bool link_measured)
{
    time_t now = time(NULL);
    struct tm utc;

    if (b->props.simulated)
        return;
    if (link_measured)
        b->machine.from = SIDE_MACHINE_MEASURED;
    if (gmtime_r(&now, &utc) != NULL)
        strftime(b->machine.taken, sizeof(b->machine.taken), "%Y-%m-%dT%H:%M:%SZ", &utc);
}

int bench_machine_save(struct bench *b, bool link_measured, const char *not_measured)
{
    static const char *const origins[] = {"an estimate", "the profile that was there", "the software device's model"};
    side_machine back = SIDE_MACHINE_INIT;
    side_status status;

    if (signals_interrupted())
        return bench_failed(b, SIDE_CANCELLED, "");
    set_origin(b, link_measured);
    status = side_machine_save(b->save_path, &b->machine);
    if (status == SIDE_OK) /* what plans will do */
        status = side_machine_load(b->save_path, &back);
    if (status != SIDE_OK)
        return bench_failed(b, status, "cannot save the profile");
    b->saved = true;
    say("the %sprofile is saved in '%s'", b->props.simulated ? "simulated " : "", b->save_path);
    if (*not_measured != '\0')
        say("not measured, so kept from %s: %s",
            b->begun_from_file ? origins[SIDE_MACHINE_MEASURED] : origins[b->machine_was], not_measured);
    if (b->machine.from == SIDE_MACHINE_ESTIMATED)
        say("the link was not measured: the profile counts as an estimate until it is");
    return EXIT_DONE;
}
