/* SPDX-License-Identifier: MIT
 * The machine profile: was this machine measured, is what was measured still true. */
#include "doctor.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { FRESH_DAYS = 180 };

#define MEASURE "sidestream bench --save"

/* "2026-11-30T08:15:00Z" -> days since then; -1: it does not say. */
static long days_since(const char *taken)
{
    struct tm tm = {.tm_isdst = 0};
    char end;
    time_t then;

    if (sscanf(taken, "%4d-%2d-%2dT%2d:%2d:%2d%c", &tm.tm_year, &tm.tm_mon, &tm.tm_mday, &tm.tm_hour, &tm.tm_min,
               &tm.tm_sec, &end) != 7 ||
        end != 'Z')
        return -1;
    tm.tm_year -= 1900;
    tm.tm_mon--;
    then = timegm(&tm);
    return then != (time_t)-1 ? (long)(difftime(time(NULL), then) / 86400) : -1;
}

static void judge_age(struct finding *f, const char *path, const side_machine *m)
{
    long days = days_since(m->taken);

    if (days > FRESH_DAYS) {
        found(f, DOCTOR_WARN, "measured %ld days ago (%.200s)", days, path);
        fix(f, MEASURE);
    } else
        found(f, DOCTOR_OK, "measured %s (%.200s)", m->taken, path);
}

/* The file that the library would read, as that machine calls it. False where it has no place for one, or the GPU's number is not known. */
static bool path_below_root(const struct doctor *d, char path[PATH_MAX])
{
    const char *file = doctor_env(d, "SIDESTREAM_MACHINE"), *cache = doctor_env(d, "XDG_CACHE_HOME"),
               *home = doctor_env(d, "HOME");
    char name[80], below[PATH_MAX];

    if (file != NULL && *file != '\0')
        return strlen(file) < PATH_MAX && strcpy(path, file) != NULL;
    if (d->gpu == NULL || d->gpu->uuid[0] == '\0')
        return false;
    snprintf(name, sizeof(name), "machine-%s.json", d->gpu->uuid);
    if (cache == NULL || *cache != '/') {
        if (home == NULL || *home != '/' || !doctor_join(below, home, ".cache", NULL))
            return false;
        cache = below;
    }
    return doctor_join(path, cache, "sidestream", name, NULL);
}

static void judge_root(struct doctor *d, struct finding *f, side_machine *m)
{
    char path[PATH_MAX], real[PATH_MAX];

    if (!path_below_root(d, path)) {
        found(f, DOCTOR_SKIP, "no folder for it, or the GPU's number is not known");
        return;
    }
    if (!doctor_path(d, path, real)) {
        if (errno == ENOENT || errno == ENOTDIR)
            found(f, DOCTOR_WARN, "none: no %.300s", path);
        else
            found(f, DOCTOR_WARN, "not read: %.300s: %s", path, strerror(errno));
        fix(f, MEASURE);
    } else if (side_machine_load(real, m) != SIDE_OK) {
        found(f, DOCTOR_WARN, "not read: %s", side_last_error()->message);
        fix(f, MEASURE);
    } else if (d->gpu != NULL && strcmp(m->uuid, d->gpu->uuid) != 0) {
        found(f, DOCTOR_WARN, "that of another GPU, %s (%.200s)", m->uuid, path);
        fix(f, MEASURE);
    } else if (d->cuda != 0 && !d->cuda_new && m->driver_version / 10 != d->cuda / 10) {
        found(f, DOCTOR_WARN, "taken with a driver for CUDA %d.%d (%.200s)", m->driver_version / 1000,
              m->driver_version % 1000 / 10, path);
        fix(f, MEASURE);
    } else if (m->from != SIDE_MACHINE_MEASURED) {
        found(f, DOCTOR_WARN, "saved, but not measured (%.200s)", path);
        fix(f, MEASURE);
    } else
        judge_age(f, path, m);
}

/* Why the library took an estimate: it says so in its log alone. */
static void why_estimated(struct finding *f, const char *path, side_machine *m)
{
    side_status status = *path != '\0' ? side_machine_load(path, m) : SIDE_NOT_FOUND;

    if (status == SIDE_NOT_FOUND)
        found(f, DOCTOR_WARN, "none%s%.300s", *path != '\0' ? ": no " : "", path);
    else if (status != SIDE_OK)
        found(f, DOCTOR_WARN, "not read: %s", side_last_error()->message);
    else if (m->from == SIDE_MACHINE_ESTIMATED)
        found(f, DOCTOR_WARN, "saved, but not measured (%.300s)", path);
    else
        found(f, DOCTOR_WARN, "that of another machine, GPU or driver (%.300s)", path);
    fix(f, MEASURE);
}

static void judge_live(struct doctor *d, struct finding *f, side_machine *m)
{
    char path[PATH_MAX] = "";

    if (side_machine_get(d->device, m) != SIDE_OK) {
        found(f, DOCTOR_SKIP, "%s", side_last_error()->message);
        return;
    }
    if (side_machine_path(d->device, path, sizeof(path)) != SIDE_OK)
        path[0] = '\0';
    if (m->from == SIDE_MACHINE_SIMULATED)
        found(f, DOCTOR_SKIP, "%s has a model of its own", d->props.spec);
    else if (m->from == SIDE_MACHINE_MEASURED)
        judge_age(f, path, m);
    else
        why_estimated(f, path, m);
}

static void look_profile(struct doctor *d, struct finding *f)
{
    side_machine *m;

    if (d->device == NULL && doctor_without_gpu(d, f))
        return;
    m = calloc(1, sizeof(*m)); /* too large for small stacks */
    if (m == NULL) {
        found(f, DOCTOR_SKIP, "out of host memory");
        return;
    }
    m->size = sizeof(*m);
    if (d->rooted)
        judge_root(d, f, m);
    else if (d->device != NULL)
        judge_live(d, f, m);
    else
        found(f, DOCTOR_SKIP, "no device is open");
    free(m);
}

const struct check doctor_profile_checks[] = {
    {"profile",
     "plans, pipelines of depth 0 and scattered copies choose by the machine's figures; without them, by estimates",
     look_profile},
    {NULL, NULL, NULL},
};
