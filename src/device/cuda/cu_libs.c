/* SPDX-License-Identifier: MIT */
#include "cu_libs.h"

#include "error.h"
#include "os.h"

#include <dlfcn.h>
#include <glob.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct symbol {
    const char *name;
    size_t offset;
    bool needed;
};
#define NVRTC_SYMBOL(needed, name, arguments)  {#name, offsetof(struct nvrtc_api, name), needed},
#define CUBLAS_SYMBOL(needed, name, arguments) {#name, offsetof(struct cublas_api, name), needed},
#define NVML_SYMBOL(needed, name, arguments)   {#name, offsetof(struct nvml_api, name), needed},
static const struct symbol nvrtc_symbols[] = {NVRTC_FUNCTIONS(NVRTC_SYMBOL)};
static const struct symbol cublas_symbols[] = {CUBLAS_FUNCTIONS(CUBLAS_SYMBOL)};
static const struct symbol nvml_symbols[] = {NVML_FUNCTIONS(NVML_SYMBOL)};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards the tables, and loading */
static struct nvrtc_api nvrtc;
static struct cublas_api cublas;
static struct nvml_api nvml;
static bool nvrtc_ready, cublas_ready, nvml_ready;
#ifdef SIDE_TESTING
static struct cu_libs_test testing;
#endif

/* ---------------------------------------------------------------- where libraries lie */

/* A library needs its major's driver: one of CUDA 13 does not run on a driver for 12. The other way round works. */
#define MAJORS 6
static int majors(int driver_version, int list[MAJORS])
{
    int n = 0;
    for (int major = driver_version / 1000; major >= 11 && n < MAJORS; major--)
        list[n++] = major;
    return n;
}

static void *open_in(const char *folder, const char *name)
{
    char path[1024], why[8];

    if ((size_t)snprintf(path, sizeof(path), "%s/%s", folder, name) >= sizeof(path))
        return NULL;
    return os_library_open(path, why, sizeof(why));
}

static void *open_glob(const char *pattern)
{
    void *library = NULL;
    char why[8];
    glob_t found;

    if (glob(pattern, 0, NULL, &found) == 0) {
        for (size_t i = 0; i < found.gl_pathc && library == NULL; i++)
            library = os_library_open(found.gl_pathv[i], why, sizeof(why));
        globfree(&found);
    }
    return library;
}

/* <site>/nvidia/<package>/lib/<name>: what pip lays beside PyTorch. */
static void *open_in_site(const char *site, const char *name)
{
    char pattern[1024];

    if ((size_t)snprintf(pattern, sizeof(pattern), "%s/nvidia/*/lib/%s", site, name) >= sizeof(pattern))
        return NULL;
    return open_glob(pattern);
}

static void *open_in_prefix(const char *prefix, const char *name)
{
    char site[512];
    void *library = NULL;
    static const char *const places[] = {"lib/python3*/site-packages", "lib/python3*/dist-packages",
                                         "lib/python3/dist-packages"};

    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]) && library == NULL; i++)
        if ((size_t)snprintf(site, sizeof(site), "%s/%s", prefix, places[i]) < sizeof(site))
            library = open_in_site(site, name);
    return library;
}

/* Cuts the last part off a path, in place. */
static void path_up(char *path)
{
    char *slash = strrchr(path, '/');
    if (slash != NULL)
        *slash = '\0';
}

/* Inside a Python package the site folder is above us. Elsewhere this finds nothing. */
static void *open_beside_us(const char *name)
{
    static const char here;
    Dl_info info;
    char path[512];
    void *library = NULL;

    if (dladdr(&here, &info) == 0 || info.dli_fname == NULL ||
        (size_t)snprintf(path, sizeof(path), "%s", info.dli_fname) >= sizeof(path))
        return NULL;
    for (int up = 0; up < 3 && library == NULL; up++) {
        path_up(path);
        library = open_in_site(path, name);
    }
    return library;
}

static void *open_in_python(const char *name)
{
    const char *home = getenv("HOME"), *environment;
    char local[512];
    void *library = open_beside_us(name);
    static const char *const prefixes[] = {"/usr/local", "/usr", "/opt/conda"};

    for (int i = 0; i < 2 && library == NULL; i++)
        if ((environment = getenv(i == 0 ? "VIRTUAL_ENV" : "CONDA_PREFIX")) != NULL)
            library = open_in_prefix(environment, name);
    if (library == NULL && home != NULL && (size_t)snprintf(local, sizeof(local), "%s/.local", home) < sizeof(local))
        library = open_in_prefix(local, name);
    for (size_t i = 0; i < sizeof(prefixes) / sizeof(prefixes[0]) && library == NULL; i++)
        library = open_in_prefix(prefixes[i], name);
    return library;
}

static void *open_in_toolkit(const char *name)
{
    static const char *const below[] = {"lib64", "lib", "targets/x86_64-linux/lib"};
    const char *roots[3] = {getenv("CUDA_HOME"), getenv("CUDA_PATH"), "/usr/local/cuda"};
    char folder[512];
    void *library = NULL;

    for (size_t r = 0; r < 3; r++)
        for (size_t i = 0; i < 3 && library == NULL; i++)
            if (roots[r] != NULL &&
                (size_t)snprintf(folder, sizeof(folder), "%s/%s", roots[r], below[i]) < sizeof(folder))
                library = open_in(folder, name);
    return library;
}

/* stem: "libcublas" */
static void *library_find(const char *stem, int driver_version)
{
    char name[64], why[8];
    int list[MAJORS], count = majors(driver_version, list);
    void *library = NULL;

    for (int i = 0; i < count && library == NULL; i++) {
        snprintf(name, sizeof(name), "%s.so.%d", stem, list[i]);
        library = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    }
    for (int i = 0; i < count && library == NULL; i++) {
        snprintf(name, sizeof(name), "%s.so.%d", stem, list[i]);
        library = os_library_open(name, why, sizeof(why));
        if (library == NULL)
            library = open_in_toolkit(name);
        if (library == NULL)
            library = open_in_python(name);
    }
    if (library != NULL) {
        Dl_info info;
        void *any = dlsym(library, strcmp(stem, "libcublas") == 0 ? "cublasCreate_v2" : "nvrtcVersion");
        if (any != NULL && dladdr(any, &info) != 0)
            log_message(SIDE_LEVEL_INFO, "cuda", "using %s", info.dli_fname);
    }
    return library;
}

/* ---------------------------------------------------------------- tables */

static side_status resolve(void *library, const char *what, const struct symbol *symbols, size_t count, void *table)
{
    for (size_t i = 0; i < count; i++) {
        void *function = os_library_symbol(library, symbols[i].name);
        if (function == NULL && symbols[i].needed)
            return error_set(SIDE_NO_LIBRARY, "dlsym", "this %s is too old: it has no %s", what, symbols[i].name);
        memcpy((char *)table + symbols[i].offset, &function, sizeof(function));
    }
    return SIDE_OK;
}

static side_status missing(const char *what, const char *package)
{
    return error_set(
        SIDE_NO_LIBRARY, "dlopen",
        "%s was not found on the loader's path, in CUDA_HOME or beside PyTorch; install the CUDA toolkit or %s, "
        "or set LD_LIBRARY_PATH",
        what, package);
}

#ifdef SIDE_TESTING
/* True where a test decides; *status and *table then say how. */
static bool tested(const void *given, const void **table, side_status *status, const char *what)
{
    if (given == NULL && !testing.only)
        return false;
    if (given != NULL)
        *table = given;
    *status = given != NULL ? SIDE_OK : missing(what, "it");
    return true;
}

void cu_libs_test(const struct cu_libs_test *tables)
{
    static const struct cu_libs_test none;
    pthread_mutex_lock(&mutex);
    testing = tables != NULL ? *tables : none;
    pthread_mutex_unlock(&mutex);
}
#define TESTED(member, table, status, what) tested(testing.member, table, status, what)
#else
#define TESTED(member, table, status, what) ((void)(table), (void)(status), false)
#endif

side_status cu_nvrtc(int driver_version, const struct nvrtc_api **api)
{
    side_status status = SIDE_OK;
    const void *table = &nvrtc;

    pthread_mutex_lock(&mutex);
    if (!TESTED(nvrtc, &table, &status, "NVRTC") && !nvrtc_ready) {
        void *library = library_find("libnvrtc", driver_version);
        status = library == NULL ? missing("NVRTC (libnvrtc)", "the wheel nvidia-cuda-nvrtc")
                                 : resolve(library, "NVRTC", nvrtc_symbols,
                                           sizeof(nvrtc_symbols) / sizeof(nvrtc_symbols[0]), &nvrtc);
        nvrtc_ready = status == SIDE_OK;
    }
    pthread_mutex_unlock(&mutex);
    if (status == SIDE_OK)
        *api = table;
    return status;
}

side_status cu_cublas(int driver_version, const struct cublas_api **api)
{
    side_status status = SIDE_OK;
    const void *table = &cublas;

    pthread_mutex_lock(&mutex);
    if (!TESTED(cublas, &table, &status, "cuBLAS") && !cublas_ready) {
        void *library = library_find("libcublas", driver_version);
        status = library == NULL ? missing("cuBLAS (libcublas)", "the wheel nvidia-cublas")
                                 : resolve(library, "cuBLAS", cublas_symbols,
                                           sizeof(cublas_symbols) / sizeof(cublas_symbols[0]), &cublas);
        cublas_ready = status == SIDE_OK;
    }
    pthread_mutex_unlock(&mutex);
    if (status == SIDE_OK)
        *api = table;
    return status;
}

side_status cu_nvml(const struct nvml_api **api)
{
    side_status status = SIDE_OK;
    const void *table = &nvml;
    char why[160];

    pthread_mutex_lock(&mutex);
    if (!TESTED(nvml, &table, &status, "NVML") && !nvml_ready) {
        void *library = os_library_open("libnvidia-ml.so.1", why, sizeof(why));
        status = library == NULL
                     ? error_set(SIDE_NO_LIBRARY, "dlopen", "no NVML: %s", why)
                     : resolve(library, "NVML", nvml_symbols, sizeof(nvml_symbols) / sizeof(nvml_symbols[0]), &nvml);
        nvml_ready = status == SIDE_OK;
    }
    pthread_mutex_unlock(&mutex);
    if (status == SIDE_OK)
        *api = table;
    return status;
}
