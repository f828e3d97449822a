/* SPDX-License-Identifier: MIT
 * How the machine is used: who else is on the GPU, what the kernel logged, what the environment asks for. */
#include "doctor.h"

#include <ctype.h>
#include <dirent.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/klog.h>
#include <unistd.h>

#define UNSEEN ((size_t)2 << 30) /* of device memory: more than this process's own context takes */

/* Adds to a text what fits. */
static void __attribute__((format(printf, 3, 4))) append(char *text, size_t bytes, const char *format, ...)
{
    size_t used = strlen(text);
    va_list args;

    va_start(args, format);
    vsnprintf(text + used, bytes - used, format, args);
    va_end(args);
}

/* ---------------------------------------------------------------- other processes */

struct others {
    size_t busy, idle, unreadable;
    char names[320], idle_names[160];
};

/* Those hold a GPU open and do little with it: daemons of the driver's, monitors, and the desktop. */
static bool is_idle(const char *name)
{
    static const char *const known[] = {
        "nvidia-persiste", "nvidia-powerd", "nv-hostengine", "nv-fabricmanage", "nvidia-device-p", "nvidia-smi",
        "dcgm-exporter",   "nvtop",         "Xorg",          "Xwayland",        "gnome-shell",     "kwin_wayland",
        "kwin_x11",        "plasmashell",   "sddm-greeter",  "weston",
    };

    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
        if (strcmp(name, known[i]) == 0)
            return true;
    return false;
}

static bool is_our_node(const struct doctor *d, const char *target)
{
    char own[32];
    size_t n = strlen("/dev/nvidia");

    if (d->gpu != NULL && d->gpu->minor >= 0) {
        snprintf(own, sizeof(own), "/dev/nvidia%d", d->gpu->minor);
        return strcmp(target, own) == 0;
    }
    return strncmp(target, "/dev/nvidia", n) == 0 && isdigit((unsigned char)target[n]);
}

/* -1: its descriptors cannot be read. */
static int holds(const struct doctor *d, const char *pid)
{
    char path[PATH_MAX], real[PATH_MAX], target[64];
    struct dirent *entry;
    int held = 0;
    DIR *folder;

    if (!doctor_join(path, "/proc", pid, "fd", NULL) || !doctor_path(d, path, real) || (folder = opendir(real)) == NULL)
        return -1;
    while (held == 0 && (entry = readdir(folder)) != NULL) {
        ssize_t n = readlinkat(dirfd(folder), entry->d_name, target, sizeof(target) - 1);

        target[n > 0 ? n : 0] = '\0';
        held = is_our_node(d, target);
    }
    closedir(folder);
    return held;
}

static void consider_process(const struct doctor *d, const char *pid, struct others *o)
{
    char path[PATH_MAX], name[32] = "?";
    int held = holds(d, pid);

    o->unreadable += held < 0 && doctor_join(path, "/proc", pid, NULL) && doctor_exists(d, path);
    if (held <= 0)
        return;
    if (doctor_join(path, "/proc", pid, "comm", NULL))
        doctor_line(d, path, name, sizeof(name));
    if (is_idle(name)) {
        append(o->idle_names, sizeof(o->idle_names), "%s%s", o->idle++ > 0 ? ", " : "", name);
    } else if (o->busy++ < 8)
        append(o->names, sizeof(o->names), "%s%s (%s)", o->busy > 1 ? ", " : "", name, pid);
}

static void judge_others(struct doctor *d, const struct others *o, struct finding *f)
{
    size_t left, total;
    char unreadable[64] = "", used[32];

    if (o->unreadable > 0)
        snprintf(unreadable, sizeof(unreadable), "; %zu process%s not readable by this user", o->unreadable,
                 o->unreadable == 1 ? "" : "es");
    if (o->busy > 0) {
        found(f, DOCTOR_WARN, "%zu use it: %s%s%s", o->busy, o->names, o->busy > 8 ? ", ..." : "", unreadable);
        fix(f, "end them or wait for them: nvidia-smi; or take another GPU: CUDA_VISIBLE_DEVICES=N");
    } else if (doctor_live_gpu(d) && side_device_get_memory(d->device, &left, &total) == SIDE_OK &&
               total - left > UNSEEN) {
        found(f, DOCTOR_WARN, "%s of its memory is taken, by processes that are not seen from here%s",
              bytes_text((total - left) >> 20 << 20, used), unreadable);
        fix(f, "look on the host, as root: nvidia-smi");
    } else
        found(f, DOCTOR_OK, "none%s%s%s%s", o->idle > 0 ? " but " : " seen", o->idle_names,
              o->idle > 0 ? " (idle ones)" : "", unreadable);
}

static void look_others(struct doctor *d, struct finding *f)
{
    struct doctor_names names;
    struct others o = {0};
    char self[32] = "";

    if (doctor_without_gpu(d, f))
        return;
    doctor_readlink(d, "/proc", "self", self, sizeof(self));
    names = doctor_list(d, "/proc", "");
    for (size_t i = 0; i < names.count; i++)
        if (strspn(names.name[i], "0123456789") == strlen(names.name[i]) && strcmp(names.name[i], self) != 0)
            consider_process(d, names.name[i], &o);
    doctor_names_free(&names);
    judge_others(d, &o, f);
}

/* ---------------------------------------------------------------- the kernel log */

/* What NVIDIA's list of Xids lays to the application. */
static bool xid_of_program(int xid)
{
    static const int known[] = {13, 31, 43, 45, 69};

    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
        if (xid == known[i])
            return true;
    return false;
}

/* Uncorrectable memory errors, a row that could not be replaced, off the bus, the GPU's own processor gone. */
static bool xid_of_hardware(int xid)
{
    static const int known[] = {48, 64, 79, 95, 119, 120};

    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
        if (xid == known[i])
            return true;
    return false;
}

/* The log of a copy is a file; the kernel's own is asked for. */
static const char *kernel_log(struct doctor *d)
{
    int n;

    if (d->rooted)
        return doctor_text(d, "/var/log/dmesg");
    n = klogctl(3 /* read all */, d->text, DOCTOR_TEXT - 1);
    if (n < 0)
        return NULL;
    d->text[n] = '\0';
    return d->text;
}

static void look_xid(struct doctor *d, struct finding *f)
{
    int program = 0, hardware = 0, other = 0, last = 0;
    const char *at;

    if (doctor_without_gpu(d, f))
        return;
    at = kernel_log(d);
    if (at == NULL) {
        found(f, DOCTOR_SKIP, "the kernel log is not readable; sudo dmesg | grep NVRM shows it");
        return;
    }
    /* "NVRM: Xid (PCI:0000:0a:00): 79, pid=..." */
    while ((at = strstr(at, "NVRM: Xid (PCI:")) != NULL) {
        char pci[16];
        int xid;

        at += strlen("NVRM: Xid (PCI:");
        if (sscanf(at, "%15[0-9a-fA-F:]): %5d", pci, &xid) != 2 ||
            (d->gpu != NULL && strncasecmp(d->gpu->pci, pci, strlen(pci)) != 0))
            continue;
        program += xid_of_program(xid);
        hardware += xid_of_hardware(xid);
        other += !xid_of_program(xid) && !xid_of_hardware(xid);
        if (!xid_of_program(xid) && (hardware == 0 || xid_of_hardware(xid)))
            last = xid;
    }
    if (hardware > 0) {
        found(f, DOCTOR_FAIL, "%d errors of the GPU itself, the last of them Xid %d", hardware, last);
        fix(f, "sudo nvidia-smi --gpu-reset, or reboot; where it comes back: dcgmi diag -r 3, and the GPU's vendor");
    } else if (other > 0) {
        found(f, DOCTOR_WARN, "%d errors of driver or GPU, the last of them Xid %d", other, last);
        fix(f, "look it up: docs.nvidia.com/deploy/xid-errors; sudo nvidia-smi --gpu-reset, or reboot, clears what can "
               "be cleared");
    } else if (program > 0)
        found(f, DOCTOR_OK, "no error of the GPU; %d of programs on it", program);
    else
        found(f, DOCTOR_OK, "no Xid");
}

/* ---------------------------------------------------------------- environment */

struct said {
    char found[480], names[160];
};

static void __attribute__((format(printf, 3, 4))) note(struct said *s, const char *name, const char *format, ...)
{
    char text[160];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    append(s->found, sizeof(s->found), "%s%.40s %s", s->found[0] != '\0' ? "; " : "", name, text);
    append(s->names, sizeof(s->names), " %.40s", name);
}

static bool is_on(const char *value)
{
    return strcmp(value, "1") == 0 || strcasecmp(value, "yes") == 0 || strcasecmp(value, "true") == 0 ||
           strcasecmp(value, "on") == 0;
}

static bool is_off(const char *value)
{
    return *value == '\0' || strcmp(value, "0") == 0 || strcasecmp(value, "no") == 0 ||
           strcasecmp(value, "false") == 0 || strcasecmp(value, "off") == 0;
}

static void note_flag(struct said *s, const char *name, const char *value, const char *effect)
{
    if (is_on(value))
        note(s, name, "is %.8s: %s", value, effect);
    else if (!is_off(value))
        note(s, name, "is '%.16s', which is none of 1, yes, true, on: it does nothing", value);
}

static void note_own(const struct doctor *d, struct said *s, const char *name, const char *value)
{
    if (strcmp(name, "SIDESTREAM_DISABLE") == 0)
        note_flag(s, name, value, "nothing overlaps");
    else if (strcmp(name, "SIDESTREAM_VALIDATE") == 0)
        note_flag(s, name, value, "recycled memory is poisoned, which costs time");
    else if (strcmp(name, "SIDESTREAM_DEVICE") == 0) {
        if (strncmp(value, "sim", 3) == 0 && d->gpu != NULL)
            note(s, name, "is '%.40s': auto means the software device, though there is a GPU", value);
    } else if (strcmp(name, "SIDESTREAM_NO_FATBIN") == 0)
        note_flag(s, name, value, "kernels are compiled at first use");
    else if (strcmp(name, "SIDESTREAM_SIM_SEED") != 0 && strcmp(name, "SIDESTREAM_MACHINE") != 0)
        note(s, name, "is no variable that is known: it does nothing");
}

static void look_own(struct doctor *d, struct finding *f)
{
    const char *device = doctor_env(d, "SIDESTREAM_DEVICE");
    struct said s = {"", ""};

    for (const char *at = d->environment; *at != '\0'; at += strlen(at) + 1) {
        size_t n = strcspn(at, "=");
        char name[64];

        if (strncmp(at, "SIDESTREAM_", strlen("SIDESTREAM_")) != 0 || at[n] != '=')
            continue;
        snprintf(name, sizeof(name), "%.*s", n < sizeof(name) ? (int)n : (int)sizeof(name) - 1, at);
        note_own(d, &s, name, at + n + 1);
    }
    if (s.found[0] != '\0') {
        found(f, DOCTOR_WARN, "%s", s.found);
        fix(f, "unset%s", s.names);
    } else if (device != NULL && *device != '\0')
        found(f, DOCTOR_OK, "SIDESTREAM_DEVICE is '%.64s'", device);
    else
        found(f, DOCTOR_OK, "no SIDESTREAM_ variable changes anything");
}

static void look_cuda(struct doctor *d, struct finding *f)
{
    const char *blocking = doctor_env(d, "CUDA_LAUNCH_BLOCKING"), *queues = doctor_env(d, "CUDA_DEVICE_MAX_CONNECTIONS"),
               *visible = doctor_env(d, "CUDA_VISIBLE_DEVICES"), *injected = doctor_env(d, "CUDA_INJECTION64_PATH");
    struct said s = {"", ""};

    if (doctor_without_gpu(d, f))
        return;
    if (blocking != NULL && !is_off(blocking))
        note(&s, "CUDA_LAUNCH_BLOCKING", "is %.8s: each launch is waited for, nothing overlaps", blocking);
    if (queues != NULL && strcmp(queues, "1") == 0)
        note(&s, "CUDA_DEVICE_MAX_CONNECTIONS",
             "is 1: all streams share one queue, and wait for each other where they need not");
    if (injected != NULL && *injected != '\0')
        note(&s, "CUDA_INJECTION64_PATH", "is set: a tool is loaded into each CUDA program, which may slow it");
    if (visible != NULL && (*visible == '\0' || strcmp(visible, "-1") == 0))
        note(&s, "CUDA_VISIBLE_DEVICES", "is '%.8s': it hides all GPUs", visible);
    if (s.found[0] == '\0') {
        found(f, DOCTOR_OK, "no CUDA_ variable hinders");
        return;
    }
    found(f, strstr(s.names, "VISIBLE") != NULL ? DOCTOR_FAIL : DOCTOR_WARN, "%s", s.found);
    fix(f, "unset%s", s.names);
}

const struct check doctor_use_checks[] = {
    {"others", "who shares the GPU shares its memory, link and compute: times vary, and memory may not be enough",
     look_others},
    {"xid", "errors that the driver logged: those of the hardware end programs and spoil results", look_xid},
    {"environment", "SIDESTREAM_ variables change what every program with the library does", look_own},
    {"cuda-environment", "CUDA_ variables change what the driver does for every program", look_cuda},
    {NULL, NULL, NULL},
};
