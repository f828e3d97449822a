/* SPDX-License-Identifier: MIT
 *
 * Which devices exist, and opening them. The only file of core that names a device. */
#include "device.h"
#include "machine.h"
#include "pool.h"

#include "alloc.h"
#include "error.h"
#include "os.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern const struct side_device_ops cuda_device_ops;
extern const struct side_device_ops sim_device_ops;

/* In order of preference: "auto" takes the first that has a device. */
static const struct side_device_ops *const registry[] = {&cuda_device_ops, &sim_device_ops};
#define REGISTRY_COUNT (sizeof(registry) / sizeof(registry[0]))

/* "kind" or "kind:args" of this device? Then args, else NULL. */
static const char *spec_args(const char *spec, const char *kind)
{
    size_t n = strlen(kind);
    if (strncmp(spec, kind, n) != 0)
        return NULL;
    return spec[n] == '\0' ? spec + n : spec[n] == ':' ? spec + n + 1 : NULL;
}

static side_status open_with(const struct side_device_ops *ops, const char *args, side_device **device)
{
    side_device *d = mem_zalloc(1, sizeof(*d));
    side_status s;

    if (d == NULL)
        return SIDE_NO_MEMORY;
    s = ops->open(args, &d->context);
    if (s != SIDE_OK)
        goto free_device;
    d->ops = ops;
    d->fork_generation = os_fork_generation();
    pthread_mutex_init(&d->mutex, NULL);
    pthread_mutex_init(&d->machine_mutex, NULL);
    s = ops->props(d->context, &d->props);
    if (s != SIDE_OK)
        goto close_context;
    log_message(SIDE_LEVEL_INFO, "device", "opened %s: %s", d->props.spec, d->props.name);
    *device = d;
    return SIDE_OK;

close_context:
    pthread_mutex_destroy(&d->machine_mutex);
    pthread_mutex_destroy(&d->mutex);
    ops->close(d->context);
free_device:
    mem_free(d);
    return s;
}

static side_status open_auto(side_device **device)
{
    char why[256] = "";

    for (size_t i = 0; i < REGISTRY_COUNT; i++)
        if (registry[i]->count(why, sizeof(why)) > 0)
            return open_with(registry[i], "", device);
        else
            log_message(SIDE_LEVEL_INFO, "device", "no %s device: %s", registry[i]->kind, why);
    return error_set(SIDE_NO_DEVICE, "side_device_open", "no device: %s", why);
}

side_status side_device_open(const char *spec, side_device **device)
{
    if (device == NULL)
        return error_set(SIDE_INVALID, "side_device_open", "device is NULL");
    if (spec == NULL || strcmp(spec, "auto") == 0) {
        const char *env = getenv("SIDESTREAM_DEVICE");
        spec = env != NULL && *env != '\0' ? env : "auto";
    }
    if (strcmp(spec, "auto") == 0)
        return open_auto(device);
    for (size_t i = 0; i < REGISTRY_COUNT; i++) {
        const char *args = spec_args(spec, registry[i]->kind);
        if (args != NULL)
            return open_with(registry[i], args, device);
    }
    return error_set(SIDE_INVALID, "side_device_open",
                     "unknown device \"%s\"; expected auto, cuda, cuda:N, sim or sim:PROFILE[,key=value...]", spec);
}

void side_device_close(side_device *device)
{
    if (device == NULL || os_fork_generation() != device->fork_generation)
        return;
    pool_device_finish(device);
    device->ops->close(device->context);
    machine_device_finish(device);
    pthread_mutex_destroy(&device->machine_mutex);
    pthread_mutex_destroy(&device->mutex);
    mem_free(device);
}

side_status side_device_list(char (*specs)[64], size_t *count, char *why, size_t why_bytes)
{
    char reason[256] = "";
    size_t n = 0;

    if (count == NULL || (specs == NULL && *count != 0))
        return error_set(SIDE_INVALID, "side_device_list", "count or specs is NULL");
    for (size_t i = 0; i < REGISTRY_COUNT; i++) {
        char text[256] = "";
        unsigned have = registry[i]->count(text, sizeof(text));
        if (have == 0 && reason[0] == '\0')
            snprintf(reason, sizeof(reason), "%s", text);
        for (unsigned k = 0; k < have; k++, n++)
            if (n < *count) {
                if (strcmp(registry[i]->kind, "sim") == 0)
                    snprintf(specs[n], sizeof(specs[n]), "sim");
                else
                    snprintf(specs[n], sizeof(specs[n]), "%s:%u", registry[i]->kind, k);
            }
    }
    if (why != NULL && why_bytes > 0)
        snprintf(why, why_bytes, "%s", reason);
    *count = n;
    return SIDE_OK;
}
