/* SPDX-License-Identifier: MIT */
#include "cu_load.h"

#include "error.h"
#include "os.h"

#include <pthread.h>
#include <string.h>

static const struct {
    const char *name;
    size_t offset;
    int version;
    bool needed;
} symbols[] = {
#define SYMBOL(needed, name, version, arguments) {#name, offsetof(struct cu_api, name), version, needed},
    CU_FUNCTIONS(SYMBOL)
#undef SYMBOL
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards what follows */
static struct cu_api loaded;
static bool ready; /* `loaded` is complete and constant from here on */
static const struct cu_api *testing;

side_status cu_resolve(cu_get_proc_address *get, struct cu_api *api)
{
    struct cu_api found;

    memset(&found, 0, sizeof(found));
    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        void *function = NULL;
        CUdriverProcAddressQueryResult how;
        /* Answers success and NULL for what it does not have, an error for a version newer than itself. */
        CUresult r = get(symbols[i].name, &function, symbols[i].version, CU_GET_PROC_ADDRESS_LEGACY_STREAM, &how);
        if (r != CUDA_SUCCESS)
            function = NULL;
        if (function == NULL && symbols[i].needed)
            return error_set_device(SIDE_DRIVER_TOO_OLD, "cuGetProcAddress", r,
                                    "the CUDA driver lacks %s; driver 535 (CUDA 12.2) or newer is needed",
                                    symbols[i].name);
        memcpy((char *)&found + symbols[i].offset, &function, sizeof(function));
    }
    *api = found;
    return SIDE_OK;
}

static const char *start_advice(CUresult r)
{
    switch (r) {
    case CUDA_ERROR_NO_DEVICE:
        return "the driver sees no GPU (is one visible? CUDA_VISIBLE_DEVICES, container options)";
    case CUDA_ERROR_STUB_LIBRARY:
        return "libcuda.so.1 is the toolkit's stub, not the driver; take its folder off LD_LIBRARY_PATH";
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
        return "the kernel module and libcuda are of different versions; reload the module or reboot";
    case CUDA_ERROR_SYSTEM_NOT_READY:
        return "the system is not ready; is the fabric manager (nvidia-fabricmanager) running?";
    case CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE:
        return "this GPU does not take the forward-compatibility libcuda; use the one of the installed driver";
    case CUDA_ERROR_UNKNOWN: return "the kernel module may not be loaded, or /dev/nvidia* may not be accessible";
    default: return "the driver does not start";
    }
}

static side_status too_old(int version)
{
    return error_set(SIDE_DRIVER_TOO_OLD, "cuDriverGetVersion",
                     "the driver is for CUDA %d.%d; CUDA %d.%d (driver 535) or newer is needed", version / 1000,
                     version % 1000 / 10, CU_DRIVER_LEAST / 1000, CU_DRIVER_LEAST % 1000 / 10);
}

side_status cu_start(const struct cu_api *api)
{
    int version = 0;
    CUresult r = api->cuDriverGetVersion(&version);
    const char *name = NULL;

    if (r == CUDA_SUCCESS && version < CU_DRIVER_LEAST)
        return too_old(version);
    r = api->cuInit(0);
    if (r == CUDA_SUCCESS)
        return SIDE_OK;
    if (api->cuGetErrorName(r, &name) != CUDA_SUCCESS || name == NULL)
        name = "unknown error";
    return error_set_device(SIDE_NO_DEVICE, "cuInit", r, "%s (%s)", start_advice(r), name);
}

/* A symbol by its plain name, for what must be known before cuGetProcAddress can be trusted. */
static void symbol_get(void *library, const char *name, void *function)
{
    void *p = os_library_symbol(library, name);
    memcpy(function, &p, sizeof(p));
}

static side_status load(struct cu_api *api)
{
    char why[160];
    int version = 0;
    CUresult (*version_get)(int *) = NULL;
    cu_get_proc_address *get = NULL;
    void *library = os_library_open("libcuda.so.1", why, sizeof(why)); /* never closed */

    if (library == NULL)
        return error_set(SIDE_NO_DEVICE, "dlopen", "no CUDA driver: %s", why);
    /* An old driver may lack what follows, so its version comes first. It needs no cuInit. */
    symbol_get(library, "cuDriverGetVersion", &version_get);
    symbol_get(library, "cuGetProcAddress_v2", &get);
    if (version_get != NULL && version_get(&version) == CUDA_SUCCESS && version < CU_DRIVER_LEAST)
        return too_old(version);
    if (get == NULL)
        return error_set(SIDE_DRIVER_TOO_OLD, "dlsym",
                         "libcuda.so.1 has no cuGetProcAddress_v2; driver 535 (CUDA 12.2) or newer is needed");
    side_status status = cu_resolve(get, api);
    return status == SIDE_OK ? cu_start(api) : status;
}

side_status cu_load(const struct cu_api **api)
{
    side_status status = SIDE_OK;

    pthread_mutex_lock(&mutex);
    if (testing != NULL) {
        status = cu_start(testing);
        if (status == SIDE_OK)
            *api = testing;
    } else {
        if (!ready) {
            status = load(&loaded);
            ready = status == SIDE_OK;
        }
        if (ready)
            *api = &loaded;
    }
    pthread_mutex_unlock(&mutex);
    return status;
}

#ifdef SIDE_TESTING
void cu_test_api(const struct cu_api *api)
{
    pthread_mutex_lock(&mutex);
    testing = api;
    pthread_mutex_unlock(&mutex);
}
#endif
