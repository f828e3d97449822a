/* SPDX-License-Identifier: MIT
 * What several checks need, gathered once. */
#include "doctor.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* ---------------------------------------------------------------- versions */

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* Three digits, a point, digits, perhaps a point and digits once more: no other word of the driver's banner looks so. */
void doctor_driver_version(const char *text, char version[32])
{
    version[0] = '\0';
    for (const char *at = text; *at != '\0'; at++) {
        size_t n = strspn(at, "0123456789.");

        if (n == 0)
            continue;
        if (n >= 5 && n < 32 && strspn(at, "0123456789") == 3 && at[3] == '.' && is_digit(at[4]) &&
            (at == text || at[-1] == ' ' || at[-1] == '\t')) {
            memcpy(version, at, n);
            version[n] = '\0';
            return;
        }
        at += n - 1;
    }
}

int doctor_cuda_of(const char *driver_version, bool *newer)
{
    /* The first branch of each version of CUDA; NVIDIA's release notes of the toolkit have the table. */
    static const struct {
        int branch, cuda;
    } table[] = {
        {450, 11000}, {455, 11010}, {460, 11020}, {465, 11030}, {470, 11040}, {495, 11050}, {510, 11060},
        {515, 11070}, {520, 11080}, {525, 12000}, {530, 12010}, {535, 12020}, {545, 12030}, {550, 12040},
        {555, 12050}, {560, 12060}, {565, 12070}, {570, 12080}, {575, 12090}, {580, 13000}, {590, 13010},
    };
    int branch = atoi(driver_version), cuda = 0;

    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++)
        if (branch >= table[i].branch)
            cuda = table[i].cuda;
    *newer = branch >= 595;
    return cuda;
}

/* ---------------------------------------------------------------- GPUs */

/* The last part of a path. */
static const char *base_of(const char *path)
{
    const char *slash = strrchr(path, '/');

    return slash != NULL ? slash + 1 : path;
}

/* A display controller (class 0x03....) of NVIDIA (0x10de). */
static bool is_gpu(const struct doctor *d, const char *pci, long long *device)
{
    char path[PATH_MAX];
    long long class_code, vendor;

    *device = 0;
    if (!doctor_join(path, "/sys/bus/pci/devices", pci, "vendor", NULL) || !doctor_number(d, path, &vendor) ||
        vendor != 0x10de || !doctor_join(path, "/sys/bus/pci/devices", pci, "class", NULL) ||
        !doctor_number(d, path, &class_code) || class_code >> 16 != 3)
        return false;
    if (doctor_join(path, "/sys/bus/pci/devices", pci, "device", NULL))
        doctor_number(d, path, device);
    return true;
}

static void add_gpu(struct doctor *d, const char *pci, long long device)
{
    struct doctor_gpu *gpu = &d->gpus[d->gpu_count++];
    char path[PATH_MAX], text[4096] = "", value[64], target[PATH_MAX] = "";

    snprintf(gpu->pci, sizeof(gpu->pci), "%s", pci);
    snprintf(gpu->name, sizeof(gpu->name), "device 0x%04llx", (unsigned long long)device & 0xffff);
    gpu->minor = -1;
    if (doctor_join(path, "/sys/bus/pci/devices", pci, NULL) &&
        doctor_readlink(d, path, "driver", target, sizeof(target)))
        snprintf(gpu->bound, sizeof(gpu->bound), "%.31s", base_of(target));
    if (!doctor_join(path, "/proc/driver/nvidia/gpus", pci, "information", NULL) ||
        doctor_read(d, path, text, sizeof(text)) <= 0) {
        gpu->visible = strcmp(gpu->bound, "nvidia") == 0;
        return;
    }
    if (doctor_value(text, "Model:", value, sizeof(value)) && *value != '\0')
        snprintf(gpu->name, sizeof(gpu->name), "%s", value);
    /* Question marks until the GPU was first used. */
    if (doctor_value(text, "GPU UUID:", value, sizeof(value)) && strlen(value) < sizeof(gpu->uuid) &&
        strspn(value, "GPU-0123456789abcdef") == strlen(value))
        strcpy(gpu->uuid, value);
    if (doctor_value(text, "Device Minor:", value, sizeof(value)) && is_digit(*value) && strlen(value) <= 4)
        gpu->minor = atoi(value);
    snprintf(path, sizeof(path), "/dev/nvidia%d", gpu->minor);
    gpu->visible = gpu->minor >= 0 && doctor_exists(d, path);
}

static void gpus(struct doctor *d)
{
    struct doctor_names names = doctor_list(d, "/sys/bus/pci/devices", "");
    long long device;

    for (size_t i = 0; i < names.count && d->gpu_count < DOCTOR_GPUS; i++)
        if (strlen(names.name[i]) < sizeof(d->gpus[0].pci) && is_gpu(d, names.name[i], &device))
            add_gpu(d, names.name[i], device);
    doctor_names_free(&names);
    names = doctor_list(d, "/dev", "nvidia");
    for (size_t i = 0; i < names.count; i++)
        d->nodes = d->nodes || is_digit(names.name[i][strlen("nvidia")]);
    doctor_names_free(&names);
}

void doctor_choose(struct doctor *d)
{
    long n = 0, want = d->ordinal > 0 ? d->ordinal : 0;

    d->gpu = NULL;
    if (d->sim_asked)
        return;
    for (size_t i = 0; i < d->gpu_count; i++) {
        if (doctor_live_gpu(d) ? strcasecmp(d->gpus[i].pci, d->props.pci) == 0 : d->gpus[i].visible && n++ == want)
            d->gpu = &d->gpus[i];
    }
    if (d->gpu == NULL && !doctor_live_gpu(d) && n == 0 && d->gpu_count > (size_t)want)
        d->gpu = &d->gpus[want]; /* none is visible: that is another check's to tell */
}

/* ---------------------------------------------------------------- the rest */

/* The first MiB of it; what is cut off goes. Without /proc it is what this process was given. */
static void environment(struct doctor *d)
{
    extern char **environ;
    size_t used = 0;
    ssize_t n = doctor_read(d, "/proc/self/environ", d->text, DOCTOR_TEXT);

    for (char *at = d->text; n > 0 && at < d->text + n; at += strlen(at) + 1) {
        size_t bytes = strlen(at) + 1;

        if (bytes == 1)
            continue;
        memmove(d->environment + used, at, bytes);
        used += bytes;
    }
    for (char **at = environ; n < 0 && !d->rooted && *at != NULL; at++) {
        size_t bytes = strlen(*at) + 1;

        if (bytes == 1 || used + bytes >= DOCTOR_TEXT)
            continue;
        memcpy(d->environment + used, *at, bytes);
        used += bytes;
    }
    d->environment[used] = '\0';
}

static bool is_container(struct doctor *d)
{
    static const char *const words[] = {"docker", "kubepods", "containerd", "libpod", "/lxc"};
    const char *text;

    if (doctor_exists(d, "/.dockerenv") || doctor_exists(d, "/run/.containerenv") ||
        doctor_env(d, "KUBERNETES_SERVICE_HOST") != NULL || doctor_env(d, "container") != NULL)
        return true;
    text = doctor_text(d, "/proc/1/cgroup");
    for (size_t i = 0; text != NULL && i < sizeof(words) / sizeof(words[0]); i++)
        if (strstr(text, words[i]) != NULL)
            return true;
    return false;
}

static void libcuda(struct doctor *d)
{
    char path[PATH_MAX], real[PATH_MAX];

    if (!doctor_find_loader(d, "libcuda.so.1", path) || !doctor_path_inside(d, path, real))
        return;
    strcpy(d->libcuda, path);
    if (strncmp(base_of(real), "libcuda.so.", strlen("libcuda.so.")) == 0)
        doctor_driver_version(base_of(real) + strlen("libcuda.so."), d->libcuda_version);
}

bool doctor_cap(const struct doctor *d, int bit)
{
    return (d->caps >> bit & 1) != 0;
}

void doctor_facts(struct doctor *d)
{
    char value[160];
    const char *text;

    environment(d);
    gpus(d);
    d->container = is_container(d);
    d->dxg = doctor_exists(d, "/dev/dxg");
    text = doctor_text(d, "/proc/version");
    d->wsl = text != NULL && (strcasestr(text, "microsoft") != NULL || strcasestr(text, "wsl") != NULL);
    text = doctor_text(d, "/proc/driver/nvidia/version");
    if (text != NULL && doctor_value(text, "NVRM version:", value, sizeof(value)))
        doctor_driver_version(value, d->module);
    if (text != NULL && d->module[0] == '\0')
        doctor_driver_version(text, d->module);
    text = doctor_text(d, "/proc/self/status");
    if (text != NULL && doctor_value(text, "CapEff:", value, sizeof(value)))
        d->caps = strtoull(value, NULL, 16);
    libcuda(d);
    d->cuda = doctor_cuda_of(d->libcuda_version[0] != '\0' ? d->libcuda_version : d->module, &d->cuda_new);
}
