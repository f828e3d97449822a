/* SPDX-License-Identifier: MIT
 * Memory pages of the operating system, and how many of them this process may use. */
#ifndef BASE_PAGES_H
#define BASE_PAGES_H

#include "sidestream.h"

#define PAGES_BYTES      ((size_t)4096) /* x86-64 */
#define PAGES_HUGE_BYTES ((size_t)2 << 20)

/* Where /proc and /sys are looked up, "/" but in tests, which present machines of their own. */
extern const char *pages_root;

struct pages_how {
    int numa_node;    /* preferred; -1: wherever */
    unsigned threads; /* that touch; 0: pages_threads() */
    bool huge;        /* ask for huge pages */
};

struct pages {
    void *data; /* aligned to PAGES_HUGE_BYTES */
    size_t bytes;
    bool huge; /* (nearly) all of it that could be on huge pages is */
};

/* min(cores / processes on this machine, 16), at least 1. */
unsigned pages_threads(void);

/* Anonymous zeroed memory, absent in forked children, present in full on return. `bytes` is a multiple of PAGES_BYTES. Blocks while the
 * pages are touched. Refused huge pages, node or threads are no failure; SIDE_NO_MEMORY: the system refuses the address space. Memory that is
 * not there when touched is the kernel's to punish (the OOM killer): ask pages_available first. */
side_status pages_map(size_t bytes, const struct pages_how *how, struct pages *pages);
void pages_unmap(const struct pages *pages);

/* Bytes that this process could still fill: the least of MemAvailable and, for each visible memory cgroup above it (v1, v2), the limit less
 * what cannot be reclaimed (anonymous and unevictable). `why` (may be NULL) names the one that decides. 0: nothing left. */
uint64_t pages_available(char *why, size_t why_bytes);

/* NUMA nodes online, at least 1. */
unsigned pages_numa_nodes(void);

#endif
