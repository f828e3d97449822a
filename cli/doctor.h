/* SPDX-License-Identifier: MIT
 *
 * sidestream doctor. A check is a `struct check`: it looks at files below a root, at what the device says, or at both, and leaves a finding.
 *
 *     doctor.c        arguments, order, text, JSON
 *     doctor_root.c   reading files of the machine that is looked at; everything hostile ends there
 *     doctor_find.c   where libraries are looked for
 *     doctor_facts.c  what several checks need, gathered once
 *     doctor_gpu.c    GPU, driver, nodes, libcuda      doctor_libs.c  toolkit, PyTorch, libraries
 *     doctor_link.c   link, NUMA, copy engines         doctor_host.c  memory and its limits
 *     doctor_use.c    who else, kernel log, environment
 *     doctor_profile.c  the machine profile
 *
 * Files are read the same way with --root and without, so tests of a made root test what runs on a real one. What opens the device runs
 * without --root alone.
 */
#ifndef CLI_DOCTOR_H
#define CLI_DOCTOR_H

#include "cli.h"

#include <limits.h>

/* Its exit codes are its own: the worst finding, as doctor's users expect. So a bad argument cannot be 2. */
enum { DOCTOR_EXIT_WARN = 1, DOCTOR_EXIT_FAIL = 2, DOCTOR_EXIT_USAGE = 64, DOCTOR_EXIT_OUTPUT = 74 };

enum doctor_status { DOCTOR_OK, DOCTOR_SKIP, DOCTOR_WARN, DOCTOR_FAIL }; /* from good to bad */

struct finding {
    enum doctor_status status;
    char found[640]; /* printable ASCII: names of files and processes are anybody's */
    char fix[480];   /* "" with ok and skip */
    const char *why; /* the check's, unless it has a better one */
};

enum { DOCTOR_GPUS = 64, DOCTOR_TEXT = 1 << 20 };

struct doctor_gpu {
    char pci[20];   /* "0000:0a:00.0" */
    char name[64];  /* what the driver calls it, else "device 0x2335" */
    char bound[32]; /* kernel driver: "nvidia", "nouveau", "vfio-pci", "" */
    int minor;      /* of /dev/nvidia<minor>; -1 not known */
    char uuid[48];  /* "GPU-..."; "" not known */
    bool visible;   /* to this process, which in a container may be one of several */
};

struct doctor {
    const char *spec;    /* of --device, else "auto" */
    bool rooted;         /* --root: files alone */
    bool loaded;         /* --loaded: links were read while copies ran */
    char root[PATH_MAX]; /* without a slash at its end; "" is / */
    char *text;          /* what doctor_text read last */
    char *environment;   /* of this process below the root: name=value, each ended by a 0; then one more 0 */

    bool sim_asked;      /* --device=sim...: nothing of the GPU matters */
    long ordinal;        /* of --device=cuda:N; -1: not given */
    side_device *device; /* NULL: none is open */
    side_device_props props;
    char open_why[320]; /* why no GPU opened; "" one did */

    struct doctor_gpu gpus[DOCTOR_GPUS];
    size_t gpu_count;
    const struct doctor_gpu *gpu; /* the one that is looked at; NULL: none is on the bus, or no N-th */
    bool nodes;                   /* some /dev/nvidia<N> */
    bool wsl, dxg, container;
    char module[32]; /* version of the kernel module; "" none is loaded */
    char libcuda[PATH_MAX], libcuda_version[32];
    int cuda;      /* 12020: what the driver can; 0 not known */
    bool cuda_new; /* a driver newer than what is known here: at least that */
    uint64_t caps; /* effective ones, of /proc/self/status */
};

struct check {
    const char *id, *why;
    void (*look)(struct doctor *d, struct finding *f);
};

extern const struct check doctor_gpu_checks[], doctor_libs_checks[], doctor_link_checks[], doctor_host_checks[],
    doctor_use_checks[], doctor_profile_checks[]; /* each ends with {NULL} */

/* ---- findings (doctor.c) */

void found(struct finding *f, enum doctor_status status, const char *format, ...) __attribute__((format(printf, 3, 4)));
void fix(struct finding *f, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* No GPU, or it is not what was asked about: a skip that says so. */
bool doctor_without_gpu(const struct doctor *d, struct finding *f);
/* The device is open and a GPU. */
bool doctor_live_gpu(const struct doctor *d);

/* ---- facts (doctor_facts.c) */

/* What files tell. */
void doctor_facts(struct doctor *d);
/* Which GPU is looked at: the open one, else that of --device, else the first that this process sees. */
void doctor_choose(struct doctor *d);
/* "580.159.03" or the like in the text; "" where there is none. */
void doctor_driver_version(const char *text, char version[32]);
/* What a driver can, as 12020; *newer: it is newer than the table. 0: older than the table. */
int doctor_cuda_of(const char *driver_version, bool *newer);
bool doctor_cap(const struct doctor *d, int bit);
#define DOCTOR_CAP_IPC_LOCK  14
#define DOCTOR_CAP_SYS_ADMIN 21

/* ---- where libraries are looked for (doctor_find.c), in the order in which the library itself does. Paths are that machine's. */

bool doctor_find_loader(struct doctor *d, const char *name, char path[PATH_MAX]);
/* CUDA_HOME, CUDA_PATH, /usr/local/cuda; CUPTI has a folder of its own there. */
bool doctor_find_toolkit(struct doctor *d, const char *name, char path[PATH_MAX]);
/* nvidia/<package>/lib in the site folders: what pip lays beside PyTorch. */
bool doctor_find_wheel(struct doctor *d, const char *name, char path[PATH_MAX]);
/* The file `name`, such as "torch/version.py", in a site folder: also of the Python that is first in PATH. */
bool doctor_find_site(struct doctor *d, const char *name, char path[PATH_MAX]);
/* Folders that may be the toolkit's, best first; of_nvcc: also the one that the first nvcc in PATH belongs to. Returns how many. */
enum { DOCTOR_TOOLKITS = 4 };
size_t doctor_toolkits(struct doctor *d, bool of_nvcc, char (*folders)[PATH_MAX]);

/* ---- files of the machine that is looked at (doctor_root.c). Paths are absolute ones of that machine: links are followed as it would follow
 * them, so none leads out of the root. Nothing but plain files is opened. On failure errno says why. */

bool doctor_path(const struct doctor *d, const char *path, char real[PATH_MAX]);
/* The same, as that machine calls it: without the root. */
bool doctor_path_inside(const struct doctor *d, const char *path, char inside[PATH_MAX]);
bool doctor_exists(const struct doctor *d, const char *path);
/* At most bytes - 1 of it, and a 0. Returns how many; -1 where it cannot be read. */
ssize_t doctor_read(const struct doctor *d, const char *path, char *text, size_t bytes);
/* Its first line, without blanks around it. */
bool doctor_line(const struct doctor *d, const char *path, char *line, size_t bytes);
/* A whole number on its first line, in any base that C knows. */
bool doctor_number(const struct doctor *d, const char *path, long long *number);
/* The first MiB; valid until the next call. NULL where it cannot be read. */
const char *doctor_text(struct doctor *d, const char *path);
/* Where the symbolic link `name` in a folder points, as it is written. */
bool doctor_readlink(const struct doctor *d, const char *folder, const char *name, char *target, size_t bytes);

struct doctor_names {
    char **name; /* sorted */
    size_t count;
};
/* Names in a folder that begin with `prefix`; no more than 65536. None where it cannot be read. */
struct doctor_names doctor_list(const struct doctor *d, const char *path, const char *prefix);
void doctor_names_free(struct doctor_names *names);

/* Of the environment that this process has below the root; NULL: not set. */
const char *doctor_env(const struct doctor *d, const char *name);
/* The rest of the line that begins with key, without blanks around it. */
bool doctor_value(const char *text, const char *key, char *value, size_t bytes);
/* Joins the parts up to a NULL with slashes; false where that is too long. */
bool doctor_join(char path[PATH_MAX], const char *first, ...) __attribute__((sentinel));

#endif
