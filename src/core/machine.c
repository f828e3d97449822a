/* SPDX-License-Identifier: MIT
 *
 * Whose profile it is, where it lies, and the device's own copy of it, made at the first call. What cannot be read, or is another machine's, is an
 * estimate and a warning: no plan and no copy fails for want of a profile. */
#include "machine.h"

#include "alloc.h"
#include "error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef SIDE_TESTING
const char *machine_test_etc;
#define ETC (machine_test_etc != NULL ? machine_test_etc : "/etc")
#else
#define ETC "/etc"
#endif

#define MEASURE "run \"sidestream bench --save\""

/* ---------------------------------------------------------------- whose */

/* The system's id may not leave the machine as it is (machine-id(5)), and profiles do. Containers have none, or an empty one. */
static bool machine_id(char *text, size_t bytes)
{
    char path[512], id[64] = "";
    size_t n;

    if ((size_t)snprintf(path, sizeof(path), "%s/machine-id", ETC) >= sizeof(path))
        return false;
    FILE *f = fopen(path, "re");
    if (f == NULL)
        return false;
    n = fread(id, 1, sizeof(id) - 1, f);
    fclose(f);
    n = strspn(id, "0123456789abcdef");
    if (n != 32)
        return false;
    snprintf(text, bytes, "id-%016llx", (unsigned long long)machine_hash(id, n));
    return true;
}

/* What could upset a terminal, or our own reader, becomes '?'. */
static void plain_copy(char *to, size_t bytes, const char *from)
{
    size_t n = strnlen(from, bytes - 1);

    for (size_t i = 0; i < n; i++)
        to[i] = from[i] >= 0x20 && from[i] <= 0x7e ? from[i] : '?';
    to[n] = '\0';
}

static void identify(const side_device *device, side_machine *m)
{
    char host[64] = "";

    m->size = sizeof(*m);
    if (!machine_id(m->machine, sizeof(m->machine))) {
        if (gethostname(host, sizeof(host) - 1) != 0)
            strcpy(host, "unknown");
        plain_copy(m->machine, sizeof(m->machine), host);
    }
    plain_copy(m->gpu, sizeof(m->gpu), device->props.name);
    plain_copy(m->uuid, sizeof(m->uuid), device->props.simulated ? device->props.spec : device->props.uuid);
    m->driver_version = device->props.driver_version;
}

/* ---------------------------------------------------------------- where */

side_status side_machine_path(side_device *device, char *path, size_t path_bytes)
{
    static const char where[] = "side_machine_path";
    side_status s = device_check(device, where);
    const char *file = getenv("SIDESTREAM_MACHINE"), *base, *below = "";
    char name[64];
    int n;

    if (s != SIDE_OK)
        return s;
    if (path == NULL)
        return error_set(SIDE_INVALID, where, "path is NULL");
    if (file != NULL && *file != '\0') {
        n = snprintf(path, path_bytes, "%s", file);
    } else {
        base = getenv("XDG_CACHE_HOME");
        if (base == NULL || *base != '/') { /* relative ones count for nothing, says its standard */
            base = getenv("HOME");
            below = "/.cache";
        }
        if (base == NULL || *base != '/')
            return error_set(SIDE_NOT_FOUND, where,
                             "no folder for machine profiles: neither XDG_CACHE_HOME nor HOME is an absolute path; set "
                             "one, or SIDESTREAM_MACHINE to a file");
        plain_copy(name, sizeof(name), device->props.simulated ? device->props.spec : device->props.uuid);
        for (char *c = name; *c != '\0'; c++)
            if (strchr("/:,=? ", *c) != NULL)
                *c = '_';
        n = snprintf(path, path_bytes, "%s%s/sidestream/machine-%s.json", base, below, *name != '\0' ? name : "gpu");
    }
    if ((size_t)n >= path_bytes) {
        if (path_bytes > 0)
            path[0] = '\0';
        return error_set(SIDE_INVALID, where, "path_bytes is %zu; this path takes %d", path_bytes, n + 1);
    }
    return SIDE_OK;
}

/* ---------------------------------------------------------------- the device's own */

/* What a profile and this device differ in; NULL: nothing. */
static const char *stranger(const side_machine *ours, const side_machine *file)
{
    if (strcmp(ours->machine, file->machine) != 0)
        return "it is another machine's";
    if (strcmp(ours->uuid, file->uuid) != 0)
        return "it is another GPU's";
    return ours->driver_version != file->driver_version ? "it is of another driver version" : NULL;
}

/* True: *m is the file's. `m` has been identified. SIDE_NO_MEMORY is all that fails. */
static side_status from_file(side_device *device, side_machine *m, bool *got)
{
    char path[4096];
    side_machine *file;
    const char *why;
    side_status s = side_machine_path(device, path, sizeof(path));

    *got = false;
    if (s != SIDE_OK) {
        log_message(SIDE_LEVEL_WARN, "machine", "%s; using an estimate", side_last_error()->message);
        return SIDE_OK;
    }
    file = mem_zalloc(1, sizeof(*file));
    if (file == NULL)
        return SIDE_NO_MEMORY;
    file->size = sizeof(*file);
    s = side_machine_load(path, file);
    why = s == SIDE_OK ? stranger(m, file) : NULL;
    *got = s == SIDE_OK && why == NULL;
    if (*got)
        *m = *file;
    else if (s == SIDE_OK)
        log_message(SIDE_LEVEL_WARN, "machine", "profile %s is not read: %s; " MEASURE " here", machine_shown(path),
                    why);
    else if (s == SIDE_NOT_FOUND && getenv("SIDESTREAM_MACHINE") == NULL)
        log_message(SIDE_LEVEL_INFO, "machine", "%s: using an estimate; " MEASURE, side_last_error()->message);
    else if (s != SIDE_NO_MEMORY)
        log_message(SIDE_LEVEL_WARN, "machine", "profile not read: %s; using an estimate; " MEASURE,
                    side_last_error()->message);
    mem_free(file);
    return s == SIDE_NO_MEMORY ? s : SIDE_OK;
}

static side_status make(side_device *device, side_machine *m)
{
    side_error kept; /* of an earlier call: what is met here is the log's, not the caller's */
    side_link link = {.kind = ""};
    side_status s;
    bool got = false;

    error_copy(&kept);
    identify(device, m);
    s = device->ops->model(device->context, m);
    if (s == SIDE_OK) {
        m->from = SIDE_MACHINE_SIMULATED;
        return SIDE_OK;
    }
    if (s != SIDE_UNSUPPORTED)
        return s;
    s = from_file(device, m, &got);
    if (s != SIDE_OK)
        return s;
    if (!got) {
        if (device->ops->link(device->context, &link) != SIDE_OK)
            log_message(SIDE_LEVEL_WARN, "machine", "the link is not known: %s", side_last_error()->message);
        machine_estimate(&device->props, &link, m);
    }
    error_restore(&kept);
    return SIDE_OK;
}

const side_machine *machine_of(side_device *device)
{
    side_machine *m = atomic_load_explicit(&device->machine, memory_order_acquire);

    if (m != NULL)
        return m;
    pthread_mutex_lock(&device->machine_mutex);
    m = atomic_load_explicit(&device->machine, memory_order_relaxed);
    if (m == NULL) {
        m = mem_zalloc(1, sizeof(*m));
        if (m != NULL && make(device, m) != SIDE_OK) {
            mem_free(m);
            m = NULL;
        }
        atomic_store_explicit(&device->machine, m, memory_order_release);
    }
    pthread_mutex_unlock(&device->machine_mutex);
    return m;
}

void machine_device_finish(side_device *device)
{
    mem_free(atomic_load(&device->machine));
}

side_status side_machine_get(side_device *device, side_machine *machine)
{
    static const char where[] = "side_machine_get";
    side_status s = device_check(device, where);
    const side_machine *m;

    if (s != SIDE_OK)
        return s;
    if (machine == NULL)
        return error_set(SIDE_INVALID, where, "machine is NULL");
    if (machine->size != sizeof(*machine))
        return error_set(SIDE_INVALID, where, "machine.size is %zu; fill the struct with SIDE_MACHINE_INIT (%zu)",
                         machine->size, sizeof(*machine));
    m = machine_of(device);
    if (m == NULL)
        return side_last_error()->status;
    *machine = *m;
    return SIDE_OK;
}
