/* SPDX-License-Identifier: MIT
 *
 * What is built for CUDA: does it agree with the driver? Within one major version any toolkit runs on any driver of that major; a newer driver
 * runs older majors; an older driver does not run newer ones ("minor version compatibility", "backward compatibility" in NVIDIA's words). */
#include "doctor.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool cuda_unknown(const struct doctor *d, struct finding *f)
{
    if (d->cuda == 0)
        found(f, DOCTOR_SKIP, "no driver to compare with");
    return d->cuda == 0;
}

static bool too_new(const struct doctor *d, int major)
{
    return major > d->cuda / 1000 && !d->cuda_new;
}

/* "12.4.1" -> 12, 4 */
static bool version_of(const char *text, int *major, int *minor)
{
    return sscanf(text, "%4d.%4d", major, minor) == 2 && *major > 0 && *minor >= 0;
}

/* ---------------------------------------------------------------- PyTorch */

struct torch {
    char path[PATH_MAX];
    char version[48], cuda[16]; /* cuda "": built without */
    int major, minor;           /* of cuda */
    bool hip;
};

/* The value in quotes of a line "name = 'value'" or "name: Optional[str] = 'value'". */
static bool assigned(const char *text, const char *name, char *value, size_t bytes)
{
    char line[256];
    const char *quote;
    size_t n;

    if (!doctor_value(text, name, line, sizeof(line)) || strpbrk(line, ":= ") != line ||
        (quote = strchr(line, '=')) == NULL || (quote = strpbrk(quote, "'\"")) == NULL)
        return false;
    n = strcspn(quote + 1, "'\"");
    n = n < bytes ? n : bytes - 1;
    memcpy(value, quote + 1, n);
    value[n] = '\0';
    return true;
}

static bool torch_find(struct doctor *d, struct torch *t)
{
    char hip[32];
    const char *text;

    memset(t, 0, sizeof(*t));
    if (!doctor_find_site(d, "torch/version.py", t->path) || (text = doctor_text(d, t->path)) == NULL)
        return false;
    if (!assigned(text, "__version__", t->version, sizeof(t->version)))
        strcpy(t->version, "of unknown version");
    t->hip = assigned(text, "hip", hip, sizeof(hip));
    if (!assigned(text, "cuda", t->cuda, sizeof(t->cuda)) || !version_of(t->cuda, &t->major, &t->minor))
        t->cuda[0] = '\0';
    t->path[strlen(t->path) - strlen("/torch/version.py")] = '\0';
    return true;
}

static void look_pytorch(struct doctor *d, struct finding *f)
{
    struct torch *t = malloc(sizeof(*t));
    int major, minor;

    if (doctor_without_gpu(d, f)) {
        /* says so */
    } else if (t == NULL || !torch_find(d, t))
        found(f, DOCTOR_SKIP,
              "none in PYTHONPATH, beside the python3 in PATH, in VIRTUAL_ENV, CONDA_PREFIX or the usual folders");
    else if (t->cuda[0] == '\0') {
        found(f, DOCTOR_WARN, "PyTorch %s in %.200s is built %s", t->version, t->path,
              t->hip ? "for ROCm" : "without CUDA");
        fix(f, "pip uninstall torch && pip install torch   # with the index for CUDA %d that pytorch.org names",
            d->cuda != 0 ? d->cuda / 1000 : 13);
    } else if (d->cuda != 0 && too_new(d, t->major)) {
        found(f, DOCTOR_FAIL, "PyTorch %s in %.200s is built for CUDA %s; the driver can no more than %d.%d",
              t->version, t->path, t->cuda, d->cuda / 1000, d->cuda % 1000 / 10);
        fix(f, "install driver 580 or newer (nvidia.com/drivers), or the PyTorch for CUDA %d: pytorch.org, 'previous versions'",
            d->cuda / 1000);
    } else if (version_of(t->version, &major, &minor) && (major < 2 || (major == 2 && minor < 9))) {
        found(f, DOCTOR_WARN, "PyTorch %s in %.200s; sidestream.torch needs 2.9", t->version, t->path);
        fix(f, "pip install --upgrade 'torch>=2.9'");
    } else
        found(f, DOCTOR_OK, "PyTorch %s for CUDA %s in %.200s", t->version, t->cuda, t->path);
    free(t);
}

/* ---------------------------------------------------------------- toolkit */

/* {"cuda": {"version": "12.4.1"}, ...} */
static bool version_json(const char *text, char version[32])
{
    json_t *root = json_loads(text, 0, NULL), *cuda = json_object_get(root, "cuda");
    const char *said = json_string_value(json_object_get(cuda, "version"));

    if (said != NULL)
        snprintf(version, 32, "%s", said);
    json_decref(root);
    return said != NULL;
}

/* Distributions' own packages have no version.json. "#define CUDA_VERSION 12040" */
static bool version_header(const char *text, char version[32])
{
    const char *at = strstr(text, "#define CUDA_VERSION ");
    int number = at != NULL ? atoi(at + strlen("#define CUDA_VERSION ")) : 0;

    if (number < 1000 || number > 99990)
        return false;
    snprintf(version, 32, "%d.%d", number / 1000, number % 1000 / 10);
    return true;
}

static bool toolkit_in(struct doctor *d, const char *folder, char version[32])
{
    char path[PATH_MAX];
    const char *text;

    if (doctor_join(path, folder, "version.json", NULL) && (text = doctor_text(d, path)) != NULL)
        return version_json(text, version);
    return doctor_join(path, folder, "include/cuda.h", NULL) && (text = doctor_text(d, path)) != NULL &&
           version_header(text, version);
}

static bool toolkit_find(struct doctor *d, char folder[PATH_MAX], char version[32])
{
    char(*folders)[PATH_MAX] = malloc(DOCTOR_TOOLKITS * sizeof(*folders));
    size_t count = folders != NULL ? doctor_toolkits(d, true, folders) : 0;
    bool there = false;

    for (size_t i = 0; i < count && !there; i++) {
        there = toolkit_in(d, folders[i], version);
        if (there)
            strcpy(folder, folders[i]);
    }
    free(folders);
    return there;
}

static void look_toolkit(struct doctor *d, struct finding *f)
{
    struct torch *t = malloc(sizeof(*t));
    char folder[PATH_MAX], version[32];
    int major, minor;

    if (doctor_without_gpu(d, f) || cuda_unknown(d, f)) {
        /* says so */
    } else if (!toolkit_find(d, folder, version) || !version_of(version, &major, &minor))
        found(f, DOCTOR_SKIP,
              "none in CUDA_HOME, CUDA_PATH, beside the nvcc in PATH, or in /usr/local/cuda; none is needed");
    else if (too_new(d, major)) {
        found(f, DOCTOR_WARN, "CUDA %s in %.200s; the driver can no more than %d.%d", version, folder, d->cuda / 1000,
              d->cuda % 1000 / 10);
        fix(f, "install driver 580 or newer (nvidia.com/drivers), or set CUDA_HOME to a toolkit of CUDA %d",
            d->cuda / 1000);
    } else if (t != NULL && torch_find(d, t) && t->cuda[0] != '\0' && t->major != major && !too_new(d, t->major)) {
        found(f, DOCTOR_WARN, "CUDA %s in %.200s, but PyTorch is built for CUDA %s", version, folder, t->cuda);
        fix(f, "set CUDA_HOME to a toolkit of CUDA %d before building extensions of PyTorch", t->major);
    } else
        found(f, DOCTOR_OK, "CUDA %s in %.200s%s", version, folder,
              major == d->cuda / 1000 && minor > d->cuda % 1000 / 10
                  ? ": newer than the driver, of the same major, so it runs"
                  : "");
    free(t);
}

/* ---------------------------------------------------------------- libraries */

struct library {
    const char *stem, *wheel;
    const char *lack; /* what does not work without it */
};

/* Majors from the driver's down: a library of a newer one does not run. */
static bool library_find(struct doctor *d, const char *stem, char path[PATH_MAX])
{
    char name[64];

    for (int major = d->cuda / 1000 + (d->cuda_new ? 1 : 0); major >= 11; major--) {
        snprintf(name, sizeof(name), "%s.so.%d", stem, major);
        if (doctor_find_loader(d, name, path) || doctor_find_toolkit(d, name, path) || doctor_find_wheel(d, name, path))
            return true;
    }
    return false;
}

/* Beside a PyTorch that the library does not look beside: the one whose python3 is first in PATH, or in PYTHONPATH. */
static bool library_elsewhere(struct doctor *d, const char *stem, char folder[PATH_MAX])
{
    static const char *const packages[] = {"cuda_nvrtc", "cublas", "cuda_cupti", "cu13"};
    char name[128];

    for (int major = d->cuda / 1000; major >= 12; major--)
        for (size_t i = 0; i < sizeof(packages) / sizeof(packages[0]); i++) {
            snprintf(name, sizeof(name), "nvidia/%s/lib/%s.so.%d", packages[i], stem, major);
            if (doctor_find_site(d, name, folder)) {
                *strrchr(folder, '/') = '\0';
                return true;
            }
        }
    return false;
}

static void look_library(struct doctor *d, struct finding *f, const struct library *l)
{
    char path[PATH_MAX];
    int major = d->cuda / 1000;

    if (doctor_without_gpu(d, f) || cuda_unknown(d, f))
        return;
    if (library_find(d, l->stem, path)) {
        found(f, DOCTOR_OK, "%.300s", path);
        return;
    }
    found(f, DOCTOR_WARN, "no %s.so.%d or older where the loader looks, in a toolkit or beside PyTorch: %s", l->stem,
          major, l->lack);
    if (library_elsewhere(d, l->stem, path))
        fix(f, "export LD_LIBRARY_PATH=%.300s", path);
    else if (major >= 13)
        fix(f, "pip install '%s>=13,<14'   # in the environment that VIRTUAL_ENV names, or the toolkit of CUDA 13",
            l->wheel);
    else
        fix(f, "pip install %s-cu%d   # in the environment that VIRTUAL_ENV names, or the toolkit of CUDA %d", l->wheel,
            major, major);
}

static void look_nvrtc(struct doctor *d, struct finding *f)
{
    static const struct library nvrtc = {"libnvrtc", "nvidia-cuda-nvrtc",
                                         "no named operations, unless they are built in"};

    if (doctor_live_gpu(d) && d->props.kernels && strcmp(d->props.kernels_from, "fatbin") == 0)
        found(f, DOCTOR_OK, "not needed: the kernels are built in");
    else
        look_library(d, f, &nvrtc);
}

static void look_cublas(struct doctor *d, struct finding *f)
{
    static const struct library cublas = {"libcublas", "nvidia-cublas", "no matrix products"};

    look_library(d, f, &cublas);
}

static void look_cupti(struct doctor *d, struct finding *f)
{
    static const struct library cupti = {"libcupti", "nvidia-cuda-cupti", "profilers see no kernels and copies"};

    look_library(d, f, &cupti);
}

/* Since CUDA 10.2 only counters are restricted; records of what ran when are not. */
static void look_profiling(struct doctor *d, struct finding *f)
{
    const char *text;
    char value[32];

    if (doctor_without_gpu(d, f))
        return;
    text = doctor_text(d, "/proc/driver/nvidia/params");
    if (text == NULL || !doctor_value(text, "RmProfilingAdminOnly:", value, sizeof(value)))
        found(f, DOCTOR_SKIP, "/proc/driver/nvidia/params does not say");
    else if (strcmp(value, "0") == 0)
        found(f, DOCTOR_OK, "allowed to every user");
    else if (doctor_cap(d, DOCTOR_CAP_SYS_ADMIN))
        found(f, DOCTOR_OK, "for administrators alone, and this process is one");
    else {
        found(f, DOCTOR_WARN, "hardware counters are for administrators alone; this process lacks CAP_SYS_ADMIN");
        fix(f, d->container
                   ? "docker run --cap-add SYS_ADMIN ..., or on the host as below: echo 'options nvidia "
                     "NVreg_RestrictProfilingToAdminUsers=0' | sudo tee /etc/modprobe.d/nvidia-profiling.conf, reboot"
                   : "echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' | sudo tee "
                     "/etc/modprobe.d/nvidia-profiling.conf; sudo update-initramfs -u; sudo reboot");
    }
}

const struct check doctor_libs_checks[] = {
    {"toolkit",
     "a program runs where the driver's CUDA has the major version of its toolkit or a later one; extensions of "
     "PyTorch need a toolkit of PyTorch's major",
     look_toolkit},
    {"pytorch", "a PyTorch for a newer major of CUDA than the driver's finds no GPU, one without CUDA never does",
     look_pytorch},
    {"nvrtc", "NVRTC compiles the kernels of named operations (cast, affine, checksum) at first use", look_nvrtc},
    {"cublas", "cuBLAS does the matrix products of the demo, of bench and of SIDE_OP_MATMUL", look_cublas},
    {"cupti", "profilers, that of PyTorch among them, record kernels and copies through CUPTI", look_cupti},
    {"profiling", "counters (Nsight Compute, metrics through CUPTI) end in ERR_NVGPUCTRPERM; timelines work all the same",
     look_profiling},
    {NULL, NULL, NULL},
};
