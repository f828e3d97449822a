/* SPDX-License-Identifier: MIT
 *
 * How much memory this process may still fill. Containers are told by cgroups, of which a process sees its own and, where no namespace hides
 * them, those above: each may be the tightest. Page cache counts as usage in a cgroup but can be reclaimed, so only anonymous and unevictable
 * memory is held against the limit. */
#include "pages.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define UNLIMITED ((uint64_t)1 << 60) /* v1 says 2^63 less a page */

struct least {
    uint64_t bytes;
    char why[160];
};

/* One kind of cgroup: v2 where `v1` is false. */
struct hierarchy {
    bool v1;
    char mount[1024]; /* where it is mounted; "" not seen */
    char root[1024];  /* what of it is mounted there */
    char group[1024]; /* ours */
};

static FILE *open_below(const char *path)
{
    char full[PATH_MAX];
    int n = snprintf(full, sizeof(full), "%s/%s", pages_root, path);
    return n > 0 && (size_t)n < sizeof(full) ? fopen(full, "re") : NULL;
}

/* "max" and unreadable files count as unlimited. */
static uint64_t read_limit(const char *dir, const char *name)
{
    char path[PATH_MAX];
    uint64_t value = UINT64_MAX;
    int n = snprintf(path, sizeof(path), "%s/%s", dir, name);
    FILE *f = n > 0 && (size_t)n < sizeof(path) ? open_below(path) : NULL;

    if (f == NULL)
        return UINT64_MAX;
    if (fscanf(f, "%" SCNu64, &value) != 1)
        value = UINT64_MAX;
    fclose(f);
    return value;
}

/* The value after `key` in a file of "key value" lines; false where it is not there. */
static bool read_key(const char *path, const char *key, uint64_t *value)
{
    FILE *f = open_below(path);
    char line[256];
    size_t n = strlen(key);
    bool found = false;

    if (f == NULL)
        return false;
    while (!found && fgets(line, sizeof(line), f) != NULL)
        found = strncmp(line, key, n) == 0 && sscanf(line + n, " %" SCNu64, value) == 1;
    fclose(f);
    return found;
}

/* v1's own lines leave out the groups below; "total_" includes them. */
static uint64_t unreclaimable(const char *dir, bool v1)
{
    char path[PATH_MAX];
    uint64_t anon = 0, unevictable = 0;
    int n = snprintf(path, sizeof(path), "%s/memory.stat", dir);

    if (n < 0 || (size_t)n >= sizeof(path))
        return 0;
    if (v1) {
        if (!read_key(path, "total_rss ", &anon))
            read_key(path, "rss ", &anon);
        if (!read_key(path, "total_unevictable ", &unevictable))
            read_key(path, "unevictable ", &unevictable);
    } else {
        read_key(path, "anon ", &anon);
        read_key(path, "unevictable ", &unevictable);
    }
    return anon < UINT64_MAX - unevictable ? anon + unevictable : UINT64_MAX;
}

static void consider_group(struct least *least, const char *dir, bool v1)
{
    uint64_t limit = read_limit(dir, v1 ? "memory.limit_in_bytes" : "memory.max"), used;

    if (limit >= UNLIMITED)
        return;
    used = unreclaimable(dir, v1);
    limit = used < limit ? limit - used : 0;
    if (limit < least->bytes) {
        least->bytes = limit;
        snprintf(least->why, sizeof(least->why), "cgroup %.140s", dir);
    }
}

/* From our group up to the top that is visible. */
static void consider_hierarchy(struct least *least, const struct hierarchy *h)
{
    char dir[2 * sizeof(h->mount) + 1];
    const char *group = h->group;
    size_t root = strlen(h->root);

    if (h->mount[0] == '\0')
        return;
    if (strcmp(h->root, "/") != 0) {
        /* A part of the tree is mounted. Where ours does not lie in it, the top of what we see is all there is. */
        bool below = strncmp(group, h->root, root) == 0 && (group[root] == '/' || group[root] == '\0');
        group = below ? group + root : "";
    }
    if (strstr(group, "..") != NULL)
        group = ""; /* ours lies outside the namespace */
    snprintf(dir, sizeof(dir), "%s%s", h->mount, group);
    for (size_t n = strlen(dir); n >= strlen(h->mount); n--) {
        if (dir[n] != '/' && dir[n] != '\0')
            continue;
        dir[n] = '\0';
        consider_group(least, dir, h->v1);
    }
}

static bool has_word(const char *list, const char *word)
{
    size_t n = strlen(word);
    for (const char *p = list; (p = strstr(p, word)) != NULL; p += n)
        if ((p == list || p[-1] == ',') && (p[n] == ',' || p[n] == '\0' || p[n] == '\n'))
            return true;
    return false;
}

/* "36 35 98:0 ROOT MOUNT options [tags] - TYPE source options" */
static void find_mounts(struct hierarchy *v1, struct hierarchy *v2)
{
    char line[4096], root[1024], mount[1024], type[32], options[256];
    FILE *f = open_below("proc/self/mountinfo");

    if (f == NULL)
        return;
    while (fgets(line, sizeof(line), f) != NULL) {
        const char *rest = strstr(line, " - ");
        struct hierarchy *h = NULL;
        if (rest == NULL || sscanf(line, "%*s %*s %*s %1023s %1023s", root, mount) != 2 ||
            sscanf(rest, " - %31s %*s %255s", type, options) != 2)
            continue;
        if (strcmp(type, "cgroup2") == 0)
            h = v2;
        else if (strcmp(type, "cgroup") == 0 && has_word(options, "memory"))
            h = v1;
        if (h != NULL && h->mount[0] == '\0') {
            snprintf(h->mount, sizeof(h->mount), "%s", mount);
            snprintf(h->root, sizeof(h->root), "%s", root);
        }
    }
    fclose(f);
}

/* "4:memory:/group" (v1), "0::/group" (v2) */
static void find_groups(struct hierarchy *v1, struct hierarchy *v2)
{
    char line[4096];
    FILE *f = open_below("proc/self/cgroup");

    if (f == NULL)
        return;
    while (fgets(line, sizeof(line), f) != NULL) {
        char *names = strchr(line, ':'), *group = names != NULL ? strchr(names + 1, ':') : NULL;
        struct hierarchy *h = NULL;
        if (group == NULL)
            continue;
        *group++ = '\0';
        group[strcspn(group, "\n")] = '\0';
        if (strcmp(line, "0:") == 0)
            h = v2;
        else if (has_word(names + 1, "memory"))
            h = v1;
        if (h != NULL)
            snprintf(h->group, sizeof(h->group), "%.1023s", strcmp(group, "/") == 0 ? "" : group);
    }
    fclose(f);
}

static uint64_t memory_available(void)
{
    uint64_t kib;
    long pages = sysconf(_SC_AVPHYS_PAGES);

    if (read_key("proc/meminfo", "MemAvailable:", &kib) || read_key("proc/meminfo", "MemFree:", &kib))
        return kib < UNLIMITED / 1024 ? kib * 1024 : UNLIMITED;
    return pages > 0 ? (uint64_t)pages * (uint64_t)sysconf(_SC_PAGESIZE) : 0;
}

uint64_t pages_available(char *why, size_t why_bytes)
{
    struct hierarchy v1 = {.v1 = true}, v2 = {.v1 = false};
    struct least least = {.bytes = memory_available(), .why = "MemAvailable"};

    find_mounts(&v1, &v2);
    find_groups(&v1, &v2);
    consider_hierarchy(&least, &v1);
    consider_hierarchy(&least, &v2);
    if (why != NULL && why_bytes > 0)
        snprintf(why, why_bytes, "%s", least.why);
    return least.bytes;
}
