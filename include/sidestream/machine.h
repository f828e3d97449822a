/* SPDX-License-Identifier: MIT
 *
 * The machine profile: what link, driver and memory of this machine do, as numbers. `sidestream bench --save` measures and keeps it; without one
 * it is estimated from the device's properties, and says so. Plans (plan.h), pipelines of depth 0 and side_copy_blocks read it.
 *
 *     side_machine machine = SIDE_MACHINE_INIT;
 *     side_machine_get(dev, &machine);                 // measured, or estimated; never fails for want of a profile
 *     if (machine.from == SIDE_MACHINE_ESTIMATED) ...  // "run sidestream bench --save for better figures"
 */
#include "../sidestream.h" /* before the guard: it includes this file, in the order the areas need */

#ifndef SIDESTREAM_MACHINE_H
#define SIDESTREAM_MACHINE_H

#ifdef __cplusplus
extern "C" {
#endif

/* A copy of b bytes takes latency_s + b / (gbps * 1e9) of its engine's time. gbps 0: not known. */
typedef struct side_rate {
    double latency_s;
    double gbps;
} side_rate;

typedef enum side_machine_from {
    SIDE_MACHINE_ESTIMATED = 0, /* from generation and width of the link, and a table of what such links and drivers give */
    SIDE_MACHINE_MEASURED = 1,
    SIDE_MACHINE_SIMULATED = 2 /* the software device's own model: exact for it, and says nothing of hardware */
} side_machine_from;

/* One way to copy scattered blocks, measured at one block size. */
typedef struct side_path_rate {
    side_copy_kind kind;
    side_path path;
    uint32_t block_bytes, count; /* of equal blocks in one call */
    double gbps;                 /* of the whole call */
    double beside; /* time of a GEMM that fills the GPU, beside this, over its time beside one plain copy of the same direction; 0: not measured */
} side_path_rate;
#define SIDE_MACHINE_PATHS 256

typedef struct side_machine {
    size_t size;
    side_machine_from from;
    /* What it is of. A profile is for a machine, a GPU and a driver: another one of either does not read it. */
    char machine[64]; /* "id-" and a hash of /etc/machine-id, which is confidential; else the host's name */
    char gpu[96];     /* its name */
    char uuid[48];    /* "GPU-...", the spec on a software device */
    int driver_version;
    char taken[32]; /* "2026-11-30T08:15:00Z"; "" unless measured */

    int copy_engines;                     /* 1: H2D and D2H take turns */
    side_rate h2d, d2h;                   /* pinned, one direction at a time */
    double both_gbps;                     /* pinned, both directions together, in total */
    double both_h2d_gbps;                 /* of it H2D's, which is not half where D2H goes first; 0: not known */
    side_rate pageable_h2d, pageable_d2h; /* a plain copy of pageable memory */
    double stage_gbps;                    /* pageable memory to the device by staging threads, default number */
    double pin_s_per_gib;                 /* to get pinned memory from the pool */
    double queue_s;                       /* of the host, to queue one item's copy, events, waits and compute */
    double handover_s; /* from the end of work on one stream to the begin of work on another that waits for it */
    double start_s;    /* a run's fixed cost: from the call to the first copy, and from the last work to the return */

    uint32_t path_count;
    side_path_rate paths[SIDE_MACHINE_PATHS];
} side_machine;
/* clang-format off */
#define SIDE_MACHINE_INIT { .size = sizeof(side_machine) }
/* clang-format on */

/* The saved profile of this machine, GPU and driver; an estimate where there is none or where it is stale, damaged or of something else: then a
 * warning in the log says which and why. Software devices give their model. The file is read once a device, at the first call. machine->size must be
 * set, here and below. */
SIDE_API side_status side_machine_get(side_device *device, side_machine *machine);
/* The file that side_machine_get reads and `bench --save` writes: SIDESTREAM_MACHINE, else $XDG_CACHE_HOME/sidestream/machine-UUID.json, else the same
 * below $HOME/.cache. SIDE_NOT_FOUND: neither variable is an absolute path. SIDE_INVALID: path_bytes are too few; the error says how many it takes. */
SIDE_API side_status side_machine_path(side_device *device, char *path, size_t path_bytes);
/* Strict: versioned, every number in its range, the checksum right where there is one. SIDE_NOT_FOUND: no such file. SIDE_INVALID: damaged or another
 * version; the error names file and offset. SIDE_IO: it cannot be read. Says nothing about whose profile it is. */
SIDE_API side_status side_machine_load(const char *path, side_machine *machine);
/* Written beside, synced and renamed: there is the old file or the new one. Folders are made, for the user alone. SIDE_INVALID: a number is out of its
 * range; the error names it. */
SIDE_API side_status side_machine_save(const char *path, const side_machine *machine);

/* The path that the table gives for `count` blocks of block_bytes on average: the fastest whose slow-down of a GEMM beside it is within 5 % of the least;
 * the nearest block size is looked at, then the nearest count, on a logarithmic scale. SIDE_PATH_BATCH where the table has nothing of this kind. Pure. */
SIDE_API side_path side_machine_path_for(const side_machine *machine, side_copy_kind kind, size_t block_bytes,
                                         size_t count);

#ifdef __cplusplus
}
#endif
#endif
