/* SPDX-License-Identifier: MIT
 * How the GPU hangs on the host: NVML where it is there, else what the kernel tells of the PCI device. */
#include "cuda_impl.h"

#include "error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef SIDE_TESTING
const char *cuda_test_sysfs;
#define SYSFS (cuda_test_sysfs != NULL ? cuda_test_sysfs : "/sys")
#else
#define SYSFS "/sys"
#endif

/* One line of an attribute of a PCI device; false where there is none. */
static bool pci_read(const char *pci, const char *attribute, char *text, size_t bytes)
{
    char path[512];
    bool got = false;

    if (pci[0] == '\0' ||
        (size_t)snprintf(path, sizeof(path), "%s/bus/pci/devices/%s/%s", SYSFS, pci, attribute) >= sizeof(path))
        return false;
    FILE *f = fopen(path, "re");
    if (f != NULL) {
        got = fgets(text, (int)bytes, f) != NULL;
        fclose(f);
    }
    return got;
}

int cuda_numa_node(const char *pci)
{
    char text[32], *end;

    if (!pci_read(pci, "numa_node", text, sizeof(text)))
        return -1;
    const long node = strtol(text, &end, 10);
    return end != text && node >= 0 && node < 65536 ? (int)node : -1;
}

/* "16.0 GT/s PCIe" */
static int sysfs_generation(const char *pci, const char *attribute)
{
    static const double speeds[] = {2.5, 5.0, 8.0, 16.0, 32.0, 64.0};
    char text[64];

    if (!pci_read(pci, attribute, text, sizeof(text)))
        return 0;
    const double speed = strtod(text, NULL);
    for (size_t i = 0; i < sizeof(speeds) / sizeof(speeds[0]); i++)
        if (speed > speeds[i] - 0.1 && speed < speeds[i] + 0.1)
            return (int)i + 1;
    return 0;
}

static int sysfs_width(const char *pci, const char *attribute)
{
    char text[32];
    const long width = pci_read(pci, attribute, text, sizeof(text)) ? strtol(text, NULL, 10) : 0;
    return width > 0 && width <= 32 ? (int)width : 0;
}

static void link_from_sysfs(const char *pci, side_link *link)
{
    link->generation = sysfs_generation(pci, "current_link_speed");
    link->width = sysfs_width(pci, "current_link_width");
    link->max_generation = sysfs_generation(pci, "max_link_speed");
    link->max_width = sysfs_width(pci, "max_link_width");
}

/* False where NVML does not know; *c2c: the host hangs on NVLink-C2C. */
static bool link_from_nvml(const char *pci, side_link *link, bool *c2c)
{
    const struct nvml_api *nvml;
    unsigned generation = 0, width = 0, max_generation = 0, max_width = 0, enabled = 0;
    void *device = NULL;
    bool got = false;

    if (pci[0] == '\0' || cu_nvml(&nvml) != SIDE_OK || nvml->nvmlInit_v2() != 0)
        return false;
    if (nvml->nvmlDeviceGetHandleByPciBusId_v2(pci, &device) == 0) {
        *c2c = nvml->nvmlDeviceGetC2cModeInfoV != NULL && nvml->nvmlDeviceGetC2cModeInfoV(device, &enabled) == 0 &&
               enabled != 0;
        got = nvml->nvmlDeviceGetCurrPcieLinkGeneration(device, &generation) == 0 &&
              nvml->nvmlDeviceGetCurrPcieLinkWidth(device, &width) == 0 &&
              nvml->nvmlDeviceGetMaxPcieLinkGeneration(device, &max_generation) == 0 &&
              nvml->nvmlDeviceGetMaxPcieLinkWidth(device, &max_width) == 0;
    }
    nvml->nvmlShutdown();
    if (got) {
        link->generation = (int)generation;
        link->width = (int)width;
        link->max_generation = (int)max_generation;
        link->max_width = (int)max_width;
    }
    return got;
}

/* One lane, one direction, in GB/s: transfers/s and line code (8b/10b, 128b/130b, 242 of 256 bytes of a flit). */
static double lane_gbps(int generation)
{
    static const double rate[] = {
        0, 0.25, 0.5, 8.0 / 8 * 128 / 130, 16.0 / 8 * 128 / 130, 32.0 / 8 * 128 / 130, 64.0 / 8 * 242 / 256};
    return generation >= 1 && generation <= 6 ? rate[generation] : 0;
}

side_status cuda_link(dev_context *context, side_link *link)
{
    side_link l = {.kind = "PCIe"};
    const char *name = context->props.name;
    bool c2c = false;

    if (!link_from_nvml(context->props.pci, &l, &c2c))
        link_from_sysfs(context->props.pci, &l);
    if (!c2c) /* an older NVML does not tell */
        c2c = context->coherent &&
              (strstr(name, "GH200") != NULL || strstr(name, "GB200") != NULL || strstr(name, "GB300") != NULL);
    if (c2c) {
        /* the PCIe port that such a GPU may have besides is not the way to host memory */
        l = (side_link){.kind = "NVLink-C2C", .peak_gbps = strstr(name, "GH200") != NULL ? 450 : 0};
    } else if (context->props.integrated) {
        l = (side_link){.kind = "none"};
    } else {
        l.peak_gbps = lane_gbps(l.max_generation) * l.max_width;
    }
    *link = l;
    return SIDE_OK;
}
