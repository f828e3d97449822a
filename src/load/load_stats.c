/* SPDX-License-Identifier: MIT
 *
 * A load's sums, and what limited it. */
#include "load_private.h"

#include "error.h"
#include "machine.h"
#include "os.h"

#include <stdio.h>
#include <string.h>

#define TOLD_BYTES ((uint64_t)64 << 20)
#define TOLD_NS    UINT64_C(10000000)

void load_spent(side_load *l, enum load_spent what)
{
    const uint64_t now = os_now_ns();

    l->spent_ns[what] += now - l->stamp_ns;
    l->stamp_ns = now;
}

/* Largest first, as many as there is room for. Locked. */
static void routes_fill(const side_load *l, side_load_stats *s)
{
    const uint32_t most = sizeof(s->routes) / sizeof(s->routes[0]);

    for (uint32_t b = 0; b < READER_BACKENDS; b++)
        for (uint32_t w = 0; w < READER_WHYS; w++) {
            const struct load_route *route = &l->routes[b][w];
            uint32_t at = s->route_count;
            if (route->pieces == 0)
                continue;
            while (at > 0 && s->routes[at - 1].bytes < route->bytes) {
                if (at < most)
                    s->routes[at] = s->routes[at - 1];
                at--;
            }
            if (at == most)
                continue;
            s->route_count += s->route_count < most;
            s->routes[at] = (side_load_route){.pieces = route->pieces, .bytes = route->bytes};
            snprintf(s->routes[at].name, sizeof(s->routes[at].name), "%s",
                     l->checkpoint == NULL ? "source" : reader_backend_name((enum reader_backend)b));
            snprintf(s->routes[at].why, sizeof(s->routes[at].why), "%s",
                     l->checkpoint == NULL ? "it is a callback" : reader_why_text((enum reader_why)w));
        }
}

/* Whence most bytes came. Locked. */
static const char *reading_name(const side_load *l)
{
    uint64_t cached = 0, rest = 0, unknown = 0; /* a forced pread does not tell */

    if (l->checkpoint == NULL)
        return "source";
    for (uint32_t b = 0; b < READER_BACKENDS; b++)
        for (uint32_t w = 0; w < READER_WHYS; w++) {
            if (w == READER_WHY_CACHED || w == READER_WHY_MEMORY)
                cached += l->routes[b][w].bytes;
            else if (w == READER_WHY_FORCED && b == READER_PREAD)
                unknown += l->routes[b][w].bytes;
            else
                rest += l->routes[b][w].bytes;
        }
    if (unknown > cached + rest)
        return "reading";
    return cached >= rest ? "page cache" : "disk";
}

/* The link, where most copies found another one before them. Else what it waited for. *spent: nanoseconds that went to it. Locked. */
static const char *limit_find(const side_load *l, uint64_t *spent)
{
    const uint64_t *ns = l->spent_ns, read = ns[SPENT_READ];

    *spent = ns[SPENT_MEMORY];
    if (ns[SPENT_MEMORY] > read && ns[SPENT_MEMORY] > ns[SPENT_PINS] && ns[SPENT_MEMORY] > ns[SPENT_COPYING])
        return "memory";
    *spent = ns[SPENT_PINS];
    if (ns[SPENT_PINS] > read && ns[SPENT_PINS] > ns[SPENT_COPYING])
        return "pins";
    *spent = read;
    if (l->to_host || l->starved > l->plan.piece_count / 2 || read > ns[SPENT_COPYING])
        return reading_name(l);
    *spent = ns[SPENT_COPYING];
    return "link";
}

/* What happens once a load, and chance, decide what a short one waits for. A small one is told only what took most of its time, and has nothing to do with
 * how much there is to move. Locked. */
static const char *bottleneck(const side_load *l, uint64_t time_ns)
{
    uint64_t spent = 0;
    const char *limit;

    if (l->plan.piece_count == 0)
        return "";
    limit = limit_find(l, &spent);
    const bool slow = strcmp(limit, "link") != 0 && strcmp(limit, "page cache") != 0 && spent >= time_ns / 2;
    return time_ns >= TOLD_NS && (l->plan.bytes >= TOLD_BYTES || slow) ? limit : "too small";
}

/* Locked. */
static void sums_fill(const side_load *l, side_load_stats *s)
{
    const bool over = l->done_pieces == l->plan.piece_count;
    const uint64_t time_ns = (over && l->end_ns != 0 ? l->end_ns : os_now_ns()) - l->begin_ns;

    s->bytes = l->plan.bytes;
    s->read_bytes = l->read_bytes;
    s->copied_bytes = l->copied_bytes;
    s->moved_bytes = l->plan.moved_bytes;
    s->parts = l->plan.part_count;
    s->ready = l->ready;
    s->pieces = l->plan.piece_count;
    s->copies = l->copies;
    s->arena_bytes = (l->options.flags & SIDE_LOAD_GIVEN) == 0 ? l->plan.arena_bytes : 0;
    s->slots = l->slot_count;
    s->piece_bytes = l->slot_bytes;
    s->pinned_bytes = l->to_host ? 0 : l->slot_count * l->slot_bytes;
    s->time_s = (double)time_ns * 1e-9;
    s->plan_s = (double)l->plan_ns * 1e-9;
    s->first_s = l->first_ns != 0 ? (double)(l->first_ns - l->begin_ns) * 1e-9 : 0;
    s->pins_s = l->pins_ns != 0 ? (double)(l->pins_ns - l->begin_ns) * 1e-9 : 0;
    s->copying_s = (double)l->spent_ns[SPENT_COPYING] * 1e-9;
    s->wait_read_s = (double)l->spent_ns[SPENT_READ] * 1e-9;
    s->wait_memory_s = (double)l->spent_ns[SPENT_MEMORY] * 1e-9;
    s->wait_pins_s = (double)l->spent_ns[SPENT_PINS] * 1e-9;
    s->gbps = s->time_s > 0 ? (double)l->copied_bytes / s->time_s * 1e-9 : 0;
    routes_fill(l, s);
    if (over && !atomic_load(&l->stop))
        snprintf(s->bottleneck, sizeof(s->bottleneck), "%s", bottleneck(l, time_ns));
}

/* Locked, so that the reader does not go meanwhile. */
static void readers_fill(const side_load *l, side_load_stats *s)
{
    struct reader_stats r = l->reader_end;
    uint64_t busy_ns = 0;

    if (l->reader != NULL)
        reader_get_stats(l->reader, &r);
    if (l->sources != NULL)
        load_sources_stats(l, &r.threads, &r.backend[READER_AUTO].busy_ns);
    for (int i = 0; i < READER_BACKENDS; i++)
        busy_ns += r.backend[i].busy_ns;
    s->read_busy_s = (double)busy_ns * 1e-9;
    s->threads = r.threads;
}

side_status side_load_get_stats(side_load *load, side_load_stats *stats)
{
    side_status r = load_enter(load, "side_load_get_stats");
    const side_machine *machine;
    side_error kept;

    if (r == SIDE_OK && stats == NULL)
        return error_set(SIDE_INVALID, "side_load_get_stats", "stats is NULL");
    if (r != SIDE_OK)
        return r;
    memset(stats, 0, sizeof(*stats));
    error_copy(&kept);
    machine = load->to_host ? NULL : machine_of(load->device);
    if (machine != NULL)
        stats->link_gbps = machine->h2d.gbps;
    error_restore(&kept);
    pthread_mutex_lock(&load->mutex);
    sums_fill(load, stats);
    readers_fill(load, stats);
    pthread_mutex_unlock(&load->mutex);
    return SIDE_OK;
}
