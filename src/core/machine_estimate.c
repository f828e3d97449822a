/* SPDX-License-Identifier: MIT
 *
 * What is said of hardware that was not measured, and what a table of paths says. Pure.
 *
 * "H200" below: measured on one (PCIe 5.0 x16, driver 580, 16 cores), in bench/results/2026-11-30-h200-591c466 where no other source is named.
 */
#include "machine.h"

#include <math.h>
#include <string.h>

/* Share of the theoretical rate that large pinned copies reach. Generation 5: 55.3 of 63.0 GB/s on the H200. Earlier ones, whose packets cost more
 * of it: published bandwidth tests, 12.3 to 13.1 of 15.8 GB/s (V100, T4) and 25 to 26.5 of 31.5 (A100, RTX 4090). */
#define PCIE5_SHARE 0.88
#define PCIE4_SHARE 0.80
/* Where the link does not tell: PCIe 4 x16, neither the slowest nor the fastest that is around. */
#define UNKNOWN_PEAK_GBPS 31.5
/* NVLink-C2C of a GH200: 419 and 371 of 450 GB/s in published benchmarks. */
#define C2C_H2D_GBPS 419.0
#define C2C_D2H_GBPS 371.0
/* Integrated GPUs copy within one memory, each byte read and written: an assumption, half of what two channels of DDR5 give. */
#define INTEGRATED_GBPS 40.0

/* Both directions at once over the sum of each alone: 101 of 110.6 GB/s on the H200. */
#define BOTH_SHARE 0.91
/* Of the engine's time, of a copy that is queued behind another: demo's copies alone take 2.5 to 3.0 us more than their bytes at 55.3 GB/s, from 4
 * to 64 MiB. A single copy that the host waits for takes some 8 us; that is queueing and waking up. */
#define COPY_LATENCY_S 3.0e-6
/* Plain copies of pageable memory on the H200: 6.4 to 13.7 GB/s in, 10 to 16 out. On C2C the driver's staging is as slow: an assumption. */
#define PAGEABLE_H2D_GBPS 10.0
#define PAGEABLE_D2H_GBPS 12.0
/* Staged by threads: 50.0 of 55.2 GB/s with 8 threads on the H200. A faster link does not help, since it is the host's memory that is read and written. */
#define STAGE_SHARE     0.90
#define STAGE_MOST_GBPS 50.0
/* 18.8 GiB/s for 4 GiB (README). */
#define PIN_S_PER_GIB (1 / 18.8)
/* 10.6 to 11.0 us an item. */
#define QUEUE_S 10.8e-6
/* The demo's textbook schedule is serial but for 2n-1 hand-overs: these take 1.5 to 5.2 us each, 4 in the runs of 100 items. */
#define HANDOVER_S 4.0e-6
/* Runs of 10 items at depth 2 take 13 to 20 us over their bound (1024 and 2048), a hand-over or two among them. */
#define START_S 12.0e-6

static double least(double a, double b)
{
    return a < b ? a : b;
}

void machine_estimate(const side_device_props *props, const side_link *link, side_machine *m)
{
    double in, out;

    if (strcmp(link->kind, "NVLink-C2C") == 0) {
        in = C2C_H2D_GBPS;
        out = C2C_D2H_GBPS;
    } else if (props->integrated) {
        in = out = INTEGRATED_GBPS;
    } else {
        const double peak = link->peak_gbps > 0 ? link->peak_gbps : UNKNOWN_PEAK_GBPS;
        in = out = peak * (link->max_generation >= 5 ? PCIE5_SHARE : PCIE4_SHARE);
    }
    m->from = SIDE_MACHINE_ESTIMATED;
    m->taken[0] = '\0';
    m->copy_engines = props->copy_engines > 1 ? 2 : 1;
    m->h2d = (side_rate){COPY_LATENCY_S, in};
    m->d2h = (side_rate){COPY_LATENCY_S, out};
    m->both_gbps = m->copy_engines > 1 ? BOTH_SHARE * (in + out) : 2 * in * out / (in + out);
    m->pageable_h2d = (side_rate){COPY_LATENCY_S, least(PAGEABLE_H2D_GBPS, in)};
    m->pageable_d2h = (side_rate){COPY_LATENCY_S, least(PAGEABLE_D2H_GBPS, out)};
    m->stage_gbps = least(STAGE_SHARE * in, STAGE_MOST_GBPS);
    m->pin_s_per_gib = PIN_S_PER_GIB;
    m->queue_s = QUEUE_S;
    m->handover_s = HANDOVER_S;
    m->start_s = START_S;
    m->path_count = 0;
}

/* ---------------------------------------------------------------- paths */

#define BESIDE_SLACK 1.05

/* Of two sizes, 0 for equal ones. */
static double distance(double a, double b)
{
    return fabs(log2(a) - log2(b));
}

static const side_path_rate *nearest(const side_machine *m, uint32_t rows, side_copy_kind kind, double block,
                                     double count)
{
    const side_path_rate *best = NULL;
    double best_block = 0, best_count = 0;

    for (uint32_t i = 0; i < rows; i++) {
        const side_path_rate *p = &m->paths[i];
        if (p->kind != kind || p->block_bytes == 0 || p->count == 0)
            continue;
        const double d = distance(p->block_bytes, block), e = distance(p->count, count);
        if (best == NULL || d < best_block || (d <= best_block && e < best_count)) {
            best = p;
            best_block = d;
            best_count = e;
        }
    }
    return best;
}

side_path side_machine_path_for(const side_machine *m, side_copy_kind kind, size_t block_bytes, size_t count)
{
    const uint32_t rows = m == NULL ? 0 : m->path_count < SIDE_MACHINE_PATHS ? m->path_count : SIDE_MACHINE_PATHS;
    const side_path_rate *at = nearest(m, rows, kind, block_bytes > 0 ? (double)block_bytes : 1,
                                       count > 0 ? (double)count : 1),
                         *best = NULL;
    double calm = 0; /* the least slow-down; 0: none was measured */

    if (at == NULL)
        return SIDE_PATH_BATCH;
#define SAME_SIZE(p) ((p)->kind == kind && (p)->block_bytes == at->block_bytes && (p)->count == at->count)
    for (const side_path_rate *p = m->paths; p < m->paths + rows; p++)
        if (SAME_SIZE(p) && p->beside > 0 && (calm <= 0 || p->beside < calm))
            calm = p->beside;
    for (const side_path_rate *p = m->paths; p < m->paths + rows; p++) {
        const bool fits = calm <= 0 || (p->beside > 0 && p->beside <= calm * BESIDE_SLACK);
        if (SAME_SIZE(p) && fits && (best == NULL || p->gbps > best->gbps))
            best = p;
    }
#undef SAME_SIZE
    return best != NULL && best->path > SIDE_PATH_AUTO && best->path < SIDE_PATH_COUNT ? best->path : SIDE_PATH_BATCH;
}
