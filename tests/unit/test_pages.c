/* SPDX-License-Identifier: MIT
 *
 * Pages, and what machines of all kinds say about memory: each is presented as a folder with the files of /proc and /sys that are read. */
#include "t.h"

#include "os.h"
#include "pages.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB ((uint64_t)1 << 20)

/* Writes a file of the presented machine, and its folders. */
static void present(const char *path, const char *text)
{
    char full[1024];
    FILE *f;

    snprintf(full, sizeof(full), "%s/%s", t_tmpdir(), path);
    for (char *p = full + strlen(t_tmpdir()) + 1; (p = strchr(p, '/')) != NULL; p++) {
        *p = '\0';
        mkdir(full, 0700);
        *p = '/';
    }
    f = fopen(full, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
    pages_root = t_tmpdir();
}

static void present_available(unsigned mib)
{
    char text[128];
    snprintf(text, sizeof(text), "MemTotal:       99999999 kB\nMemFree:  1 kB\nMemAvailable:   %u kB\n", mib * 1024);
    present("proc/meminfo", text);
}

#define V2_MOUNT "35 31 0:32 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
#define V1_MOUNT                                                          \
    "34 31 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n" \
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"

static void expect(uint64_t mib, const char *who)
{
    char why[160];
    uint64_t got = pages_available(why, sizeof(why));

    if (got != mib * MIB)
        T_FAIL("%llu available by %s, not %llu MiB", (unsigned long long)got, why, (unsigned long long)mib);
    assert_non_null(strstr(why, who));
}

T_TEST(no_cgroup)
{
    present_available(3000);
    expect(3000, "MemAvailable");
}

T_TEST(old_kernel_without_available)
{
    present("proc/meminfo", "MemTotal: 4096000 kB\nMemFree: 1024 kB\n");
    expect(1, "MemAvailable");
}

T_TEST(nothing_to_read_is_not_nothing)
{
    present("empty", "");
    assert_true(pages_available(NULL, 0) > 0);
}

T_TEST(v2_own_limit)
{
    present_available(3000);
    present("proc/self/mountinfo", V2_MOUNT);
    present("proc/self/cgroup", "0::/a/b\n");
    present("sys/fs/cgroup/a/b/memory.max", "1048576000\n"); /* 1000 MiB */
    present("sys/fs/cgroup/a/b/memory.stat", "file 524288000\nanon 104857600\nanon_thp 1\nunevictable 52428800\n");
    expect(850, "/sys/fs/cgroup/a/b"); /* page cache does not count */
}

T_TEST(v2_an_ancestor_is_tighter)
{
    present_available(3000);
    present("proc/self/mountinfo", V2_MOUNT);
    present("proc/self/cgroup", "0::/a/b\n");
    present("sys/fs/cgroup/a/b/memory.max", "1048576000\n");
    present("sys/fs/cgroup/a/memory.max", "1048576000\n");
    present("sys/fs/cgroup/a/memory.stat", "anon 943718400\n");
    present("sys/fs/cgroup/a/b/memory.stat", "anon 0\n");
    expect(100, "/sys/fs/cgroup/a");
}

T_TEST(v2_max_is_no_limit)
{
    present_available(3000);
    present("proc/self/mountinfo", V2_MOUNT);
    present("proc/self/cgroup", "0::/a\n");
    present("sys/fs/cgroup/a/memory.max", "max\n");
    present("sys/fs/cgroup/a/memory.stat", "anon 943718400\n");
    expect(3000, "MemAvailable");
}

T_TEST(v2_over_the_limit)
{
    present_available(3000);
    present("proc/self/mountinfo", V2_MOUNT);
    present("proc/self/cgroup", "0::/a\n");
    present("sys/fs/cgroup/a/memory.max", "1048576\n");
    present("sys/fs/cgroup/a/memory.stat", "anon 943718400\n");
    expect(0, "/sys/fs/cgroup/a");
}

/* As Docker does it without a cgroup namespace: the path is the host's, the mount is the container's. */
T_TEST(v1_container_sees_only_its_own)
{
    present_available(3000);
    present("proc/self/mountinfo", "35 31 0:32 /docker/123 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n");
    present("proc/self/cgroup", "7:cpu,cpuacct:/docker/123\n4:memory:/docker/123\n0::/\n");
    present("sys/fs/cgroup/memory/memory.limit_in_bytes", "1048576000\n");
    present("sys/fs/cgroup/memory/memory.stat", "rss 1\ntotal_rss 104857600\ntotal_unevictable 0\n");
    expect(900, "/sys/fs/cgroup/memory");
    /* A group of ours below what is mounted. */
    present("proc/self/cgroup", "4:memory:/docker/123/sub\n");
    present("sys/fs/cgroup/memory/sub/memory.limit_in_bytes", "104857600\n");
    expect(100, "/sys/fs/cgroup/memory/sub");
    present("proc/self/cgroup", "4:memory:/docker/1234/sub\n"); /* somebody else's */
    expect(900, "/sys/fs/cgroup/memory");
}

T_TEST(v1_huge_is_no_limit)
{
    present_available(3000);
    present("proc/self/mountinfo", V1_MOUNT);
    present("proc/self/cgroup", "4:memory:/a\n");
    present("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "9223372036854771712\n");
    present("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    expect(3000, "MemAvailable");
}

T_TEST(v1_beside_v2)
{
    present_available(3000);
    present("proc/self/mountinfo", V1_MOUNT "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
    present("proc/self/cgroup", "4:memory:/a\n0::/u\n");
    present("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "524288000\n");
    expect(500, "/sys/fs/cgroup/memory/a");
}

T_TEST(group_outside_the_namespace)
{
    present_available(3000);
    present("proc/self/mountinfo", V2_MOUNT);
    present("proc/self/cgroup", "0::/../other\n");
    present("sys/fs/cgroup/memory.max", "104857600\n");
    present("sys/fs/other/memory.max", "1\n"); /* no cgroup */
    expect(100, "/sys/fs/cgroup");
}

T_TEST(sick_files)
{
    char line[6000];

    present_available(3000);
    memset(line, 'x', sizeof(line));
    line[sizeof(line) - 1] = '\0';
    present("proc/self/mountinfo", line);
    present("proc/self/cgroup", "\n::\n:\n0::\nmemory\n9999999:memory");
    expect(3000, "MemAvailable");
    present("proc/self/mountinfo", "- - - - - -\n35 31 0:32 /\n - cgroup2\n" V2_MOUNT);
    present("proc/self/cgroup", line);
    present("sys/fs/cgroup/memory.max", "-5\n");
    present("sys/fs/cgroup/memory.stat", "anon\nanon x\n");
    expect(3000, "MemAvailable");
}

T_TEST(numa_nodes)
{
    present("sys/devices/system/node/online", "0\n");
    assert_int_equal(pages_numa_nodes(), 1);
    present("sys/devices/system/node/online", "0-1,4,6-7\n");
    assert_int_equal(pages_numa_nodes(), 5);
    present("sys/devices/system/node/online", "rubbish\n");
    assert_int_equal(pages_numa_nodes(), 1);
}

/* ---------------------------------------------------------------- mapping */

static void map_one(size_t bytes, const struct pages_how *how)
{
    struct pages p;

    T_OK(pages_map(bytes, how, &p));
    assert_int_equal(p.bytes, bytes);
    assert_int_equal((uintptr_t)p.data % PAGES_HUGE_BYTES, 0);
    for (size_t at = 0; at < bytes; at += 64) {
        assert_int_equal(((char *)p.data)[at], 0);
        ((char *)p.data)[at] = 1;
    }
    pages_unmap(&p);
    assert_int_equal(msync(p.data, bytes, MS_ASYNC), -1);
}

T_TEST(maps)
{
    static const size_t sizes[] = {4096, 8192, 2 << 20, (2 << 20) + 4096, 12 << 20, (33 << 20) - 4096};

    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
        for (unsigned threads = 0; threads < 4; threads++)
            map_one(sizes[i], &(struct pages_how){.numa_node = -1, .threads = threads, .huge = threads % 2 == 0});
    map_one(64 << 20, &(struct pages_how){.numa_node = -1, .threads = 1000});
}

/* A node that does not exist: the kernel refuses, the memory is there all the same. */
T_TEST(maps_on_a_node)
{
    present("sys/devices/system/node/online", "0-3\n");
    map_one(4 << 20, &(struct pages_how){.numa_node = 0, .huge = true});
    map_one(4 << 20, &(struct pages_how){.numa_node = 1000, .huge = true});
    map_one(4 << 20, &(struct pages_how){.numa_node = 100000, .huge = true});
}

T_TEST(huge_pages_are_noted)
{
    struct pages p;
    struct pages_how how = {.numa_node = -1, .huge = false};

    T_OK(pages_map(8 << 20, &how, &p));
    assert_false(p.huge);
    pages_unmap(&p);
    how.huge = true;
    present("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
    T_OK(pages_map(8 << 20, &how, &p));
    assert_false(p.huge);
    pages_unmap(&p);
    pages_root = "/";
    /* Asked for, and not refused, yet not given. */
    assert_int_equal(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0), 0);
    T_OK(pages_map(8 << 20, &how, &p));
    assert_false(p.huge);
    pages_unmap(&p);
    assert_int_equal(prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0), 0);
    FILE *f = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "re");
    char line[64] = "";
    if (f == NULL || fgets(line, sizeof(line), f) == NULL || strstr(line, "[never]") != NULL || T_SANITIZED)
        T_SKIP("no huge pages on this machine");
    T_OK(pages_map(8 << 20, &how, &p));
    if (!p.huge)
        T_SKIP("this machine gave no huge pages");
    pages_unmap(&p);
}

T_TEST(refusals)
{
    struct pages p = {.data = NULL};
    struct pages_how how = {.numa_node = -1};

    T_STATUS(pages_map((size_t)1 << 60, &how, &p), SIDE_NO_MEMORY);
    assert_int_equal(side_last_error()->os_errno, ENOMEM);
    T_STATUS(pages_map(0, &how, &p), SIDE_INVALID);
    T_STATUS(pages_map(100, &how, &p), SIDE_INVALID);
    T_STATUS(pages_map(SIZE_MAX / 4096 * 4096, &how, &p), SIDE_INVALID);
    assert_null(p.data);
}

T_TEST(absent_in_a_child)
{
    struct pages p;
    int status;

    if (T_TSAN)
        T_SKIP("TSan maps memory of its own in the child, in the gap");
    T_OK(pages_map(2 << 20, &(struct pages_how){.numa_node = -1, .huge = true}, &p));
    pid_t child = fork();
    if (child == 0)
        _exit(msync(p.data, p.bytes, MS_ASYNC) == -1 && errno == ENOMEM ? 0 : 1);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    pages_unmap(&p);
}

T_TEST(default_threads)
{
    unsetenv("LOCAL_WORLD_SIZE");
    unsigned alone = pages_threads();
    assert_true(alone >= 1 && alone <= 16);
    setenv("LOCAL_WORLD_SIZE", "4000", 1);
    assert_int_equal(pages_threads(), 1);
}

T_MAIN(T(no_cgroup), T(old_kernel_without_available), T(nothing_to_read_is_not_nothing), T(v2_own_limit),
       T(v2_an_ancestor_is_tighter), T(v2_max_is_no_limit), T(v2_over_the_limit), T(v1_container_sees_only_its_own),
       T(v1_huge_is_no_limit), T(v1_beside_v2), T(group_outside_the_namespace), T(sick_files), T(numa_nodes), T(maps),
       T(maps_on_a_node), T(huge_pages_are_noted), T(refusals), T(absent_in_a_child), T(default_threads))
