/* SPDX-License-Identifier: MIT
 * Memory of the host and what limits it: huge pages, cgroups, locked memory, /dev/shm, io_uring. */
#include "doctor.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#define GIB ((uint64_t)1 << 30)
enum { LOCKED_MIB = 64 }; /* what eight staging buffers of 8 MiB would lock */

/* ---------------------------------------------------------------- huge pages */

/* The word in brackets of "always [madvise] never". */
static bool chosen(const struct doctor *d, const char *path, char word[32])
{
    char line[128], *open, *close;

    if (!doctor_line(d, path, line, sizeof(line)) || (open = strchr(line, '[')) == NULL ||
        (close = strchr(open, ']')) == NULL || close - open > 31)
        return false;
    *close = '\0';
    strcpy(word, open + 1);
    return true;
}

static void look_huge(struct doctor *d, struct finding *f)
{
    char enabled[32], defrag[32] = "not told", own[32] = "1";
    const char *status = doctor_text(d, "/proc/self/status");

    if (status != NULL && !doctor_value(status, "THP_enabled:", own, sizeof(own)))
        strcpy(own, "1"); /* before Linux 5.0 it does not say */
    if (!chosen(d, "/sys/kernel/mm/transparent_hugepage/enabled", enabled)) {
        found(f, DOCTOR_SKIP, "/sys/kernel/mm/transparent_hugepage/enabled does not tell");
        return;
    }
    chosen(d, "/sys/kernel/mm/transparent_hugepage/defrag", defrag);
    if (strcmp(enabled, "never") == 0) {
        found(f, DOCTOR_WARN, "transparent huge pages are off");
        fix(f, "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled");
    } else if (strcmp(own, "0") == 0) {
        found(f, DOCTOR_WARN, "transparent huge pages are off for this process (prctl PR_SET_THP_DISABLE, inherited)");
        fix(f, "start it from a process that did not switch them off");
    } else if (strcmp(defrag, "never") == 0) {
        found(f, DOCTOR_WARN, "transparent huge pages: %s, but defrag is never: none are made once memory is in pieces",
              enabled);
        fix(f, "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/defrag");
    } else
        found(f, DOCTOR_OK, "transparent huge pages: %s, defrag %s", enabled, defrag);
}

/* ---------------------------------------------------------------- how much memory, and whose limit it is */

struct group {
    char mount[PATH_MAX]; /* where its hierarchy is mounted */
    char root[PATH_MAX];  /* what of it is mounted there */
    char own[PATH_MAX];   /* our group in it; "" not seen */
};

struct room {
    uint64_t available; /* MemAvailable */
    uint64_t group;     /* limit less what cannot be reclaimed, of the tightest group; UINT64_MAX: no limit */
    uint64_t limit;     /* that group's */
    char path[PATH_MAX];
};

static uint64_t number_after(const char *text, const char *key, uint64_t otherwise)
{
    char value[32];

    return doctor_value(text, key, value, sizeof(value)) && *value >= '0' && *value <= '9' ? strtoull(value, NULL, 10)
                                                                                           : otherwise;
}

static void consider_group(struct doctor *d, const char *folder, bool v1, struct room *room)
{
    char path[PATH_MAX], line[32];
    uint64_t limit, used = 0;
    const char *text;

    if (!doctor_join(path, folder, v1 ? "memory.limit_in_bytes" : "memory.max", NULL) ||
        !doctor_line(d, path, line, sizeof(line)) || *line < '0' || *line > '9')
        return;
    limit = strtoull(line, NULL, 10);
    if (limit >= (uint64_t)1 << 60) /* v1's word for none */
        return;
    if (doctor_join(path, folder, "memory.stat", NULL) && (text = doctor_text(d, path)) != NULL)
        used = v1 ? number_after(text, "total_rss ", 0) + number_after(text, "total_unevictable ", 0)
                  : number_after(text, "anon ", 0) + number_after(text, "unevictable ", 0);
    used = used < limit ? limit - used : 0;
    if (used >= room->group)
        return;
    room->group = used;
    room->limit = limit;
    strcpy(room->path, folder);
}

/* From ours up to the top that is mounted: each may be the tightest. */
static void consider_groups(struct doctor *d, const struct group *g, bool v1, struct room *room)
{
    char folder[PATH_MAX];
    const char *own = g->own;
    size_t n = strlen(g->root), top = strlen(g->mount);

    if (top == 0)
        return;
    if (strcmp(g->root, "/") != 0)
        own = strncmp(own, g->root, n) == 0 && (own[n] == '/' || own[n] == '\0') ? own + n : "";
    if (strstr(own, "..") != NULL || strcmp(own, "/") == 0)
        own = "";
    if (strlen(own) + top >= sizeof(folder))
        return;
    strcat(strcpy(folder, g->mount), own);
    for (;;) {
        consider_group(d, folder, v1, room);
        if (strlen(folder) <= top)
            break;
        *strrchr(folder, '/') = '\0';
    }
}

/* Of a list of words between commas. */
static bool has_word(const char *list, const char *word)
{
    size_t n = strlen(word);

    for (const char *at = list; (at = strstr(at, word)) != NULL; at += n)
        if ((at == list || at[-1] == ',') && (at[n] == ',' || at[n] == '\0'))
            return true;
    return false;
}

/* Cuts the next line off; NULL at the end. */
static char *next_line(char **text)
{
    char *line = *text, *end = strchr(line, '\n');

    if (*line == '\0')
        return NULL;
    *text = end != NULL ? end + 1 : line + strlen(line);
    if (end != NULL)
        *end = '\0';
    return line;
}

/* "36 35 98:0 ROOT MOUNT options - TYPE source options" */
static void find_mounts(struct doctor *d, struct group *v1, struct group *v2)
{
    char *text = doctor_text(d, "/proc/self/mountinfo") != NULL ? d->text : NULL, *line;

    while (text != NULL && (line = next_line(&text)) != NULL) {
        char root[1024], mount[1024], type[32], options[256], *rest = strstr(line, " - ");
        struct group *g = NULL;

        if (rest == NULL || sscanf(line, "%*s %*s %*s %1023s %1023s", root, mount) != 2 ||
            sscanf(rest, " - %31s %*s %255s", type, options) != 2)
            continue;
        if (strcmp(type, "cgroup2") == 0)
            g = v2;
        else if (strcmp(type, "cgroup") == 0 && has_word(options, "memory"))
            g = v1;
        if (g == NULL || g->mount[0] != '\0')
            continue;
        strcpy(g->mount, mount);
        strcpy(g->root, root);
    }
}

/* "4:memory:/group" (v1), "0::/group" (v2) */
static void find_own(struct doctor *d, struct group *v1, struct group *v2)
{
    char *text = doctor_text(d, "/proc/self/cgroup") != NULL ? d->text : NULL, *line;

    while (text != NULL && (line = next_line(&text)) != NULL) {
        char *names = strchr(line, ':'), *own = names != NULL ? strchr(names + 1, ':') : NULL;
        struct group *g = NULL;

        if (own == NULL || strlen(own) > 1024)
            continue;
        *own++ = '\0';
        if (strncmp(line, "0:", 2) == 0 && names[1] == '\0')
            g = v2;
        else if (has_word(names + 1, "memory"))
            g = v1;
        if (g != NULL)
            strcpy(g->own, own);
    }
}

/* As the library's own look at it (pages_available), which says no more than the least. */
static bool room_find(struct doctor *d, struct room *room)
{
    struct group *v1 = calloc(1, sizeof(*v1)), *v2 = calloc(1, sizeof(*v2));
    const char *text;

    memset(room, 0, sizeof(*room));
    room->group = UINT64_MAX;
    if (v1 != NULL && v2 != NULL) {
        find_mounts(d, v1, v2);
        find_own(d, v1, v2);
        consider_groups(d, v1, true, room);
        consider_groups(d, v2, false, room);
    }
    free(v1);
    free(v2);
    text = doctor_text(d, "/proc/meminfo");
    room->available = text != NULL ? number_after(text, "MemAvailable:", 0) : 0;
    room->available = room->available < UINT64_MAX / 1024 ? room->available * 1024 : 0;
    return room->available > 0;
}

static unsigned local_world(const struct doctor *d)
{
    const char *text = doctor_env(d, "LOCAL_WORLD_SIZE");
    char *end;
    long n = text != NULL ? strtol(text, &end, 10) : 1;

    return text == NULL || (*text != '\0' && *end == '\0' && n >= 1 && n <= 4096) ? (unsigned)n : 1;
}

static void look_group(struct doctor *d, struct finding *f)
{
    struct room room;
    char limit[32], left[32];

    if (!room_find(d, &room)) {
        found(f, DOCTOR_SKIP, "/proc/meminfo does not tell");
        return;
    }
    if (room.group == UINT64_MAX) {
        found(f, DOCTOR_OK, "no memory limit");
        return;
    }
    bytes_text(room.limit, limit);
    bytes_text(room.group / (1 << 20) << 20, left);
    if (room.group / 4 >= GIB || room.group >= room.available)
        found(f, DOCTOR_OK, "limit of %s, %s of it left (%.200s)", limit, left, room.path);
    else {
        found(f, DOCTOR_WARN, "limit of %s, %s of it left (%.200s): a quarter of that is less than 1 GiB", limit, left,
              room.path);
        fix(f, d->container ? "docker run --memory=16g ...; in Kubernetes: resources.limits.memory: 16Gi"
                            : "systemd-run --scope -p MemoryMax=16G COMMAND; of a batch system: ask for more memory");
    }
}

/* The library's own word, where a device is open. */
static uint64_t pool_budget(const struct doctor *d, uint64_t otherwise)
{
    side_pool_stats stats;
    side_pool *pool;

    return d->device != NULL && side_device_pool(d->device, &pool) == SIDE_OK &&
                   side_pool_get_stats(pool, &stats) == SIDE_OK
               ? stats.budget_bytes
               : otherwise;
}

static void look_budget(struct doctor *d, struct finding *f)
{
    unsigned processes = local_world(d);
    struct room room;
    uint64_t least, budget;
    char text[32], from[32];
    bool limited;

    if (!room_find(d, &room)) {
        found(f, DOCTOR_SKIP, "/proc/meminfo does not tell");
        return;
    }
    limited = room.group < room.available;
    least = limited ? room.group : room.available;
    budget = pool_budget(d, least / 4 / processes);
    bytes_text(budget / (1 << 20) << 20, text);
    bytes_text(least / (1 << 20) << 20, from);
    found(f, DOCTOR_OK, "%s: a quarter of the %s that %s, for %u process%s", text, from,
          limited ? "the limit leaves" : "are available", processes, processes == 1 ? "" : "es");
    if (budget >= GIB || (limited && least / 4 < GIB)) /* then memory-limit warns */
        return;
    f->status = DOCTOR_WARN;
    fix(f, processes > 1
               ? "budget_bytes of a pool of your own, or fewer processes on this machine (LOCAL_WORLD_SIZE)"
               : "end what takes the memory (ps aux --sort -rss | head), or set budget_bytes of a pool of your own");
}

/* ---------------------------------------------------------------- io_uring and what it locks */

static void look_memlock(struct doctor *d, struct finding *f)
{
    const char *text = doctor_text(d, "/proc/self/limits");
    char value[96], limit[32];
    uint64_t bytes;

    if (text == NULL || !doctor_value(text, "Max locked memory", value, sizeof(value)) || *value == '\0') {
        found(f, DOCTOR_SKIP, "/proc/self/limits does not tell");
        return;
    }
    bytes = *value >= '0' && *value <= '9' ? strtoull(value, NULL, 10) : UINT64_MAX;
    if (bytes == UINT64_MAX)
        found(f, DOCTOR_OK, "unlimited");
    else if (doctor_cap(d, DOCTOR_CAP_IPC_LOCK))
        found(f, DOCTOR_OK, "%s, which does not bind this process (CAP_IPC_LOCK)", bytes_text(bytes, limit));
    else if (bytes >= (uint64_t)LOCKED_MIB << 20)
        found(f, DOCTOR_OK, "%s", bytes_text(bytes, limit));
    else {
        found(f, DOCTOR_WARN, "%s; less than %d MiB", bytes_text(bytes, limit), LOCKED_MIB);
        fix(f, d->container
                   ? "docker run --ulimit memlock=-1 ..."
                   : "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/memlock.conf, then log in again; "
                     "of a service: LimitMEMLOCK=infinity");
    }
}

static bool in_group(struct doctor *d, long long group)
{
    const char *text = doctor_text(d, "/proc/self/status");
    char list[1024], *at = list, *end;

    if (text == NULL || !doctor_value(text, "Groups:", list, sizeof(list)))
        return false;
    for (long long one; (one = strtoll(at, &end, 10), end != at); at = end)
        if (one == group)
            return true;
    return false;
}

/* 0: allowed; else the errno. */
static int try_uring(void)
{
    uint64_t parameters[16] = {0}; /* struct io_uring_params is 120 bytes */
    long fd = syscall(SYS_io_uring_setup, 1, parameters);

    if (fd < 0)
        return errno;
    close((int)fd);
    return 0;
}

/* What files tell; false where they have no objection. */
static bool uring_refused(struct doctor *d, struct finding *f)
{
    char line[128], value[32];
    const char *text;
    long long disabled = 0, group = -1;
    int major, minor;

    if (doctor_line(d, "/proc/sys/kernel/osrelease", line, sizeof(line)) &&
        sscanf(line, "%4d.%4d", &major, &minor) == 2 && (major < 5 || (major == 5 && minor < 6))) {
        found(f, DOCTOR_WARN, "Linux %.60s has no io_uring that reads files; 5.6 has", line);
        fix(f, "a newer kernel");
        return true;
    }
    doctor_number(d, "/proc/sys/kernel/io_uring_disabled", &disabled);
    if (disabled == 2 || (disabled == 1 && !doctor_cap(d, DOCTOR_CAP_SYS_ADMIN) &&
                          !(doctor_number(d, "/proc/sys/kernel/io_uring_group", &group) && in_group(d, group)))) {
        found(f, DOCTOR_WARN, "kernel.io_uring_disabled is %lld: %s", disabled,
              disabled == 2 ? "nobody may use it" : "only CAP_SYS_ADMIN and the group kernel.io_uring_group may");
        fix(f, disabled == 2 ? "sudo sysctl kernel.io_uring_disabled=0"
                             : "sudo sysctl kernel.io_uring_group=\"$(id -g)\"   # or kernel.io_uring_disabled=0");
        return true;
    }
    text = doctor_text(d, "/proc/self/status");
    if (d->rooted && text != NULL && doctor_value(text, "Seccomp:", value, sizeof(value)) && strcmp(value, "2") == 0) {
        found(f, DOCTOR_WARN,
              "a seccomp filter is on, as in containers; those of Docker and containerd refuse io_uring");
        fix(f, "docker run --security-opt seccomp=unconfined ..., or a profile that allows io_uring_setup, "
               "io_uring_enter and "
               "io_uring_register");
        return true;
    }
    return false;
}

static void look_uring(struct doctor *d, struct finding *f)
{
    int error;

    if (uring_refused(d, f))
        return;
    error = d->rooted ? 0 : try_uring();
    if (error == 0) {
        found(f, DOCTOR_OK, d->rooted ? "nothing forbids it" : "allowed");
        return;
    }
    found(f, DOCTOR_WARN, "io_uring_setup is refused: %s", strerror(error));
    fix(f, d->container ? "docker run --security-opt seccomp=unconfined ..., or a profile that allows io_uring_setup, "
                          "io_uring_enter and io_uring_register"
                        : "look for a seccomp filter, or a kernel without CONFIG_IO_URING");
}

/* ---------------------------------------------------------------- /dev/shm */

/* size=65536k and the like in the options of a mount; 0: not there, or a share of the memory */
static uint64_t size_option(const char *options)
{
    char *end;
    uint64_t size;

    for (const char *at = options; at != NULL; at = strchr(at, ',')) {
        at += *at == ',';
        if (strncmp(at, "size=", 5) != 0)
            continue;
        size = strtoull(at + 5, &end, 10);
        return *end == 'g' ? size << 30 : *end == 'm' ? size << 20 : *end == 'k' ? size << 10 : *end == '%' ? 0 : size;
    }
    return 0;
}

/* The last line about it counts: it lies on top. *size 0: not known. */
static bool shm_size(struct doctor *d, uint64_t *size)
{
    char *text = doctor_text(d, "/proc/mounts") != NULL ? d->text : NULL, *line;
    const char *memory;
    struct statvfs real;
    bool there = false;

    while (text != NULL && (line = next_line(&text)) != NULL) {
        char options[512];

        if (sscanf(line, "%*s /dev/shm %*s %511s", options) != 1)
            continue;
        there = true;
        *size = size_option(options);
    }
    if (there && !d->rooted && statvfs("/dev/shm", &real) == 0)
        *size = (uint64_t)real.f_blocks * real.f_frsize;
    /* Without a size it is half of the memory. */
    if (there && *size == 0 && (memory = doctor_text(d, "/proc/meminfo")) != NULL)
        *size = number_after(memory, "MemTotal:", 0) * 1024 / 2;
    return there;
}

static void look_shm(struct doctor *d, struct finding *f)
{
    uint64_t size = 0;
    char text[32];

    if (!doctor_exists(d, "/proc/mounts"))
        found(f, DOCTOR_SKIP, "/proc/mounts does not tell");
    else if (!shm_size(d, &size)) {
        found(f, DOCTOR_WARN, "nothing is mounted on /dev/shm");
        fix(f, "sudo mkdir -p /dev/shm; sudo mount -t tmpfs -o size=8G tmpfs /dev/shm");
    } else if (size == 0)
        found(f, DOCTOR_SKIP, "/proc/mounts does not tell its size");
    else if (size >= GIB)
        found(f, DOCTOR_OK, "%s", bytes_text(size / (1 << 20) << 20, text));
    else {
        found(f, DOCTOR_WARN, "%s; less than 1 GiB", bytes_text(size, text));
        fix(f, d->container
                   ? "docker run --shm-size=8g ... (or --ipc=host); in Kubernetes: an emptyDir with medium: Memory "
                     "mounted on /dev/shm"
                   : "sudo mount -o remount,size=8G /dev/shm");
    }
}

const struct check doctor_host_checks[] = {
    {"huge-pages", "memory on huge pages is pinned several times as fast", look_huge},
    {"memory-limit", "pinned memory cannot be reclaimed: past the limit the kernel ends the process", look_group},
    {"pin-budget", "the pool pins no more than this; pipelines then take fewer and smaller buffers", look_budget},
    {"memlock", "io_uring locks the buffers that are registered with it; pinning for the GPU is not counted here",
     look_memlock},
    {"io-uring", "reading files past the page cache straight into pinned memory wants io_uring; threads serve without it",
     look_uring},
    {"shm", "DataLoader workers hand batches over in /dev/shm; where it is full they die with a bus error", look_shm},
    {NULL, NULL, NULL},
};
