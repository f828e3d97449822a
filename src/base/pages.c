/* SPDX-License-Identifier: MIT */
#include "pages.h"

#include "error.h"
#include "os.h"

#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { THREADS_MOST = 16, NODES_MOST = 1024 };

/* What one thread takes at a time, and the least that is worth a thread. */
#define TOUCH_STEP ((size_t)4 << 20)

const char *pages_root = "/";

unsigned pages_threads(void)
{
    unsigned n = os_cores() / os_local_world();
    return n < 1 ? 1 : n > THREADS_MOST ? THREADS_MOST : n;
}

/* First line of a file below pages_root; false where there is none. */
static bool read_line(const char *path, char *line, size_t bytes)
{
    char full[PATH_MAX];
    FILE *f;
    bool ok;

    snprintf(full, sizeof(full), "%s/%s", pages_root, path);
    f = fopen(full, "re");
    if (f == NULL)
        return false;
    ok = fgets(line, (int)bytes, f) != NULL;
    fclose(f);
    return ok;
}

/* The list reads "0-3,8-11". */
unsigned pages_numa_nodes(void)
{
    char line[256];
    unsigned nodes = 0;

    if (!read_line("sys/devices/system/node/online", line, sizeof(line)))
        return 1;
    for (char *p = line, *save, *item; (item = strtok_r(p, ",\n", &save)) != NULL; p = NULL) {
        unsigned first, last;
        int n = sscanf(item, "%u-%u", &first, &last);
        if (n == 1)
            nodes++;
        else if (n == 2 && last >= first && last < NODES_MOST)
            nodes += last - first + 1;
    }
    return nodes > 0 ? nodes : 1;
}

static bool huge_pages_never(void)
{
    char line[128];
    return read_line("sys/kernel/mm/transparent_hugepage/enabled", line, sizeof(line)) &&
           strstr(line, "[never]") != NULL;
}

/* Prefers, does not insist: a full node must not make pinning fail. By raw system call, so that libnuma is not needed. */
static void bind_to_node(void *data, size_t bytes, int node)
{
    enum { PREFERRED = 1, BITS = sizeof(unsigned long) * CHAR_BIT }; /* MPOL_PREFERRED of linux/mempolicy.h */
    unsigned long mask[NODES_MOST / BITS] = {0};

    if (node < 0 || node >= NODES_MOST || pages_numa_nodes() < 2)
        return;
    mask[node / BITS] = 1ul << (node % BITS);
    if (syscall(SYS_mbind, data, bytes, PREFERRED, mask, (unsigned long)NODES_MOST, 0) != 0)
        log_message(SIDE_LEVEL_INFO, "pages", "memory is not bound to NUMA node %d: %s", node, strerror(errno));
}

/* ---------------------------------------------------------------- first touch */

struct touch {
    char *data;
    size_t bytes;
    atomic_size_t next;   /* the first byte that no thread took */
    atomic_ullong faults; /* tell how large the pages were */
};

static void *touch_pages(void *arg)
{
    struct touch *t = arg;
    struct rusage before, after;
    size_t at;

    getrusage(RUSAGE_THREAD, &before);
    while ((at = atomic_fetch_add(&t->next, TOUCH_STEP)) < t->bytes) {
        size_t end = at + TOUCH_STEP < t->bytes ? at + TOUCH_STEP : t->bytes;
        for (; at < end; at += PAGES_BYTES)
            *(volatile char *)(t->data + at) = 0;
    }
    getrusage(RUSAGE_THREAD, &after);
    atomic_fetch_add(&t->faults, (unsigned long long)(after.ru_minflt - before.ru_minflt));
    return NULL;
}

/* Returns how many page faults it took. */
static unsigned long long touch_all(char *data, size_t bytes, unsigned threads)
{
    struct touch t = {.data = data, .bytes = bytes};
    pthread_t others[THREADS_MOST * 4];
    size_t steps = (bytes + TOUCH_STEP - 1) / TOUCH_STEP;
    unsigned n = 0, most = sizeof(others) / sizeof(others[0]);

    if (threads > steps)
        threads = (unsigned)steps;
    /* This thread works too; one that cannot be started is not missed. */
    while (n + 1 < threads && n < most && os_thread_create(&others[n], "side-touch", touch_pages, &t) == SIDE_OK)
        n++;
    touch_pages(&t);
    while (n > 0)
        pthread_join(others[--n], NULL);
    return atomic_load(&t.faults);
}

/* One fault a huge page, 512 without; 64 KiB pages (32 faults) do not count as huge. */
static bool faults_say_huge(size_t bytes, unsigned long long faults)
{
    size_t whole = bytes / PAGES_HUGE_BYTES, rest = bytes % PAGES_HUGE_BYTES / PAGES_BYTES;
    return whole > 0 && faults > 0 && faults <= rest + whole * 16;
}

/* ---------------------------------------------------------------- mapping */

side_status pages_map(size_t bytes, const struct pages_how *how, struct pages *pages)
{
    bool huge = how->huge && bytes >= PAGES_HUGE_BYTES && !huge_pages_never();
    size_t reserve = bytes + PAGES_HUGE_BYTES, front;
    char *base, *data;

    if (bytes == 0 || bytes % PAGES_BYTES != 0 || reserve < bytes)
        return error_set(SIDE_INVALID, "pages_map", "%zu bytes is not a whole number of pages", bytes);
    base = mmap(NULL, reserve, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        return error_set_errno(SIDE_NO_MEMORY, "mmap", errno, "cannot map %zu bytes", bytes);
    front = (size_t)(-(uintptr_t)base % PAGES_HUGE_BYTES);
    data = base + front;
    if (front > 0)
        munmap(base, front);
    munmap(data + bytes, reserve - front - bytes);

    /* A child that wrote to a pinned page would take the page away from the device's mapping (copy on write). */
    if (madvise(data, bytes, MADV_DONTFORK) != 0) {
        int e = errno;
        munmap(data, bytes);
        return error_set_errno(SIDE_SYSTEM, "madvise", e, "MADV_DONTFORK is refused");
    }
    if (huge)
        huge = madvise(data, bytes, MADV_HUGEPAGE) == 0;
    else
        madvise(data, bytes, MADV_NOHUGEPAGE);
    bind_to_node(data, bytes, how->numa_node);
    unsigned long long faults = touch_all(data, bytes, how->threads != 0 ? how->threads : pages_threads());

    pages->data = data;
    pages->bytes = bytes;
    pages->huge = huge && faults_say_huge(bytes, faults);
    return SIDE_OK;
}

void pages_unmap(const struct pages *pages)
{
    munmap(pages->data, pages->bytes);
}
