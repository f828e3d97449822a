/* SPDX-License-Identifier: MIT
 *
 * What the tests of machine profiles share: an empty home, a profile with a bit of everything, and what the log says. */
#ifndef MACHINE_HELP_H
#define MACHINE_HELP_H

#include "t.h"

#include "machine.h"

#include <pthread.h>

/* What the log said last at level WARN, and how often. */
static struct {
    pthread_mutex_t mutex;
    char text[512];
    int count;
} said = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static inline void note(void *user, side_level level, const char *component, const char *message)
{
    (void)user;
    if (level != SIDE_LEVEL_WARN || strcmp(component, "machine") != 0)
        return;
    pthread_mutex_lock(&said.mutex);
    snprintf(said.text, sizeof(said.text), "%s", message);
    said.count++;
    pthread_mutex_unlock(&said.mutex);
}

/* An empty home; returns its path. */
static inline const char *home(void)
{
    const char *folder = t_tmpdir();

    setenv("HOME", folder, 1);
    unsetenv("XDG_CACHE_HOME");
    unsetenv("SIDESTREAM_MACHINE");
    side_log_callback(note, NULL, SIDE_LEVEL_DEBUG);
    return folder;
}

static inline void write_text(const char *path, const char *text, size_t bytes)
{
    FILE *f = fopen(path, "w");

    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, bytes, f), bytes);
    assert_int_equal(fclose(f), 0);
}

static inline side_machine example(void)
{
    side_machine m = SIDE_MACHINE_INIT;

    m.from = SIDE_MACHINE_MEASURED;
    strcpy(m.machine, "id-0123456789abcdef");
    strcpy(m.gpu, "NVIDIA \"H200\" \\ 141 GB");
    strcpy(m.uuid, "GPU-01234567-89ab-cdef-0123-456789abcdef");
    m.driver_version = 13000;
    strcpy(m.taken, "2026-11-30T08:15:00Z");
    m.copy_engines = 2;
    m.h2d = (side_rate){2.9e-6, 55.31234567890123};
    m.d2h = (side_rate){1.0 / 3, 55.4};
    m.both_gbps = 101;
    m.both_h2d_gbps = 49.5;
    m.pageable_h2d = (side_rate){3e-6, 0};
    m.pageable_d2h = (side_rate){0, 12.5};
    m.stage_gbps = 50.1;
    m.pin_s_per_gib = 0.0532;
    m.queue_s = 1.08e-5;
    m.handover_s = 4e-6;
    m.start_s = 1.2e-5;
    m.path_count = 2;
    m.paths[0] = (side_path_rate){SIDE_COPY_H2D, SIDE_PATH_GATHER, 4096, 1000, 51.3, 1.09};
    m.paths[1] = (side_path_rate){SIDE_COPY_D2H, SIDE_PATH_PACK, UINT32_MAX, 1, 50.2, 0};
    return m;
}

/* Field by field: padding is not compared. */
static inline bool same_rate(side_rate a, side_rate b)
{
    return a.latency_s == b.latency_s && a.gbps == b.gbps;
}

static inline bool same(const side_machine *a, const side_machine *b)
{
    bool is = a->size == b->size && a->from == b->from && strcmp(a->machine, b->machine) == 0 &&
              strcmp(a->gpu, b->gpu) == 0 && strcmp(a->uuid, b->uuid) == 0 && a->driver_version == b->driver_version &&
              strcmp(a->taken, b->taken) == 0 && a->copy_engines == b->copy_engines && same_rate(a->h2d, b->h2d) &&
              same_rate(a->d2h, b->d2h) && a->both_gbps == b->both_gbps && a->both_h2d_gbps == b->both_h2d_gbps &&
              same_rate(a->pageable_h2d, b->pageable_h2d) && same_rate(a->pageable_d2h, b->pageable_d2h) &&
              a->stage_gbps == b->stage_gbps && a->pin_s_per_gib == b->pin_s_per_gib && a->queue_s == b->queue_s &&
              a->handover_s == b->handover_s && a->start_s == b->start_s && a->path_count == b->path_count;

    for (uint32_t i = 0; is && i < a->path_count; i++) {
        const side_path_rate *p = &a->paths[i], *q = &b->paths[i];
        is = p->kind == q->kind && p->path == q->path && p->block_bytes == q->block_bytes && p->count == q->count &&
             p->gbps == q->gbps && p->beside == q->beside;
    }
    return is;
}

#endif
