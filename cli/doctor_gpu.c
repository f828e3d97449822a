/* SPDX-License-Identifier: MIT
 * Is there a GPU, and does the way to it stand: kernel driver, device nodes, libcuda. */
#include "doctor.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LEAST_BRANCH = 535 }; /* CUDA 12.2: below, the library opens no GPU */

#define INSTALL                                                                                                 \
    "install driver 580 or newer: 'sudo apt-get install nvidia-driver-580-server' (Ubuntu), 'sudo dnf install " \
    "nvidia-driver' (NVIDIA's repository), or the installer of nvidia.com/drivers; then reboot"

static void look_gpu(struct doctor *d, struct finding *f)
{
    size_t visible = 0;

    for (size_t i = 0; i < d->gpu_count; i++)
        visible += d->gpus[i].visible;
    if (d->sim_asked)
        found(f, DOCTOR_SKIP, "--device=%s is the software device: GPUs are not looked at", d->spec);
    else if (d->gpu == NULL && d->ordinal >= 0 && d->gpu_count > 0 && !doctor_live_gpu(d)) {
        found(f, DOCTOR_FAIL, "no cuda:%ld: %zu on the bus, %zu visible to this process", d->ordinal, d->gpu_count,
              visible);
        fix(f, "sidestream devices   # lists what there is; in a container: docker run --gpus all ...");
    } else if (d->gpu != NULL && d->gpu_count > 1)
        found(f, DOCTOR_OK,
              "%s at %s; one of %zu on the bus, %zu visible to this process (--device=cuda:N looks at another)",
              d->gpu->name, d->gpu->pci, d->gpu_count, visible);
    else if (d->gpu != NULL)
        found(f, DOCTOR_OK, "%s at %s", d->gpu->name, d->gpu->pci);
    else if (doctor_live_gpu(d))
        found(f, DOCTOR_OK, "%s; /sys does not show the bus", d->props.name);
    else if (d->wsl && d->dxg)
        found(f, DOCTOR_OK, "through WSL: /dev/dxg");
    else if (d->nodes)
        found(f, DOCTOR_OK, "/dev/nvidia* is there; /sys does not show the bus");
    else {
        found(f, DOCTOR_WARN, "no NVIDIA GPU on the PCI bus: the software device serves, and its times are simulated");
        fix(f, "use a machine with a GPU of compute capability 7.5 or higher; in a virtual machine, pass one through");
    }
}

static void driver_missing(struct doctor *d, struct finding *f)
{
    const char *bound = d->gpu != NULL ? d->gpu->bound : "";

    if (strcmp(bound, "nouveau") == 0) {
        found(f, DOCTOR_FAIL, "the GPU is held by nouveau, which does not do CUDA");
        fix(f, "echo 'blacklist nouveau' | sudo tee /etc/modprobe.d/nouveau.conf; " INSTALL);
    } else if (strncmp(bound, "vfio", 4) == 0) {
        found(f, DOCTOR_FAIL, "the GPU is held by %s: it is passed on to a virtual machine", bound);
        fix(f,
            "run in that machine, or give the GPU back: echo %s | sudo tee /sys/bus/pci/drivers/%s/unbind, then "
            "sudo modprobe nvidia",
            d->gpu->pci, bound);
    } else if (d->container) {
        found(f, DOCTOR_FAIL, "no NVIDIA driver is loaded on the host of this container");
        fix(f, "on the host: " INSTALL);
    } else {
        found(f, DOCTOR_FAIL, "no NVIDIA driver is loaded");
        fix(f, "sudo modprobe nvidia; if there is no such module: " INSTALL);
    }
}

static const char *cuda_text(const struct doctor *d, char text[32])
{
    snprintf(text, 32, "CUDA %d.%d%s", d->cuda / 1000, d->cuda % 1000 / 10, d->cuda_new ? " or newer" : "");
    return text;
}

static void look_driver(struct doctor *d, struct finding *f)
{
    char cuda[32];

    if (doctor_without_gpu(d, f))
        return;
    if (d->wsl)
        found(f, DOCTOR_SKIP, "WSL: the driver is that of Windows");
    else if (d->module[0] == '\0' && doctor_live_gpu(d))
        found(f, DOCTOR_OK, "%s; its version is not shown here", cuda_text(d, cuda));
    else if (d->module[0] == '\0' && d->nodes)
        found(f, DOCTOR_SKIP, "/proc/driver/nvidia/version is not shown here");
    else if (d->module[0] == '\0')
        driver_missing(d, f);
    else if (atoi(d->module) < LEAST_BRANCH) {
        found(f, DOCTOR_FAIL, "driver %s is older than %d, the least that works", d->module, LEAST_BRANCH);
        fix(f, "%s" INSTALL, d->container ? "on the host: " : "");
    } else
        found(f, DOCTOR_OK, "%s, up to %s", d->module, cuda_text(d, cuda));
}

/* ---------------------------------------------------------------- nodes */

static void no_nodes(const struct doctor *d, struct finding *f)
{
    if (d->container) {
        found(f, DOCTOR_FAIL, "a GPU and its driver, but no /dev/nvidia* in this container");
        fix(f, "docker run --gpus all ...; podman run --device nvidia.com/gpu=all ...; in Kubernetes: resources.limits "
               "nvidia.com/gpu: 1");
    } else {
        found(f, DOCTOR_FAIL, "a GPU and its driver, but no /dev/nvidia*");
        fix(f, "sudo nvidia-modprobe -u -c 0");
    }
}

static void look_nodes(struct doctor *d, struct finding *f)
{
    const char *needed[] = {"/dev/nvidiactl", "/dev/nvidia-uvm", NULL};
    char real[PATH_MAX], own[32];

    if (doctor_without_gpu(d, f))
        return;
    if (d->wsl) {
        found(f, d->dxg ? DOCTOR_OK : DOCTOR_FAIL, d->dxg ? "/dev/dxg" : "WSL without /dev/dxg");
        if (!d->dxg)
            fix(f, "install NVIDIA's driver in Windows, then there: wsl --update && wsl --shutdown");
        return;
    }
    if (d->module[0] == '\0' && !d->nodes) {
        found(f, DOCTOR_SKIP, "no driver is loaded");
        return;
    }
    if (!d->nodes) {
        no_nodes(d, f);
        return;
    }
    if (d->gpu != NULL && d->gpu->minor >= 0) {
        snprintf(own, sizeof(own), "/dev/nvidia%d", d->gpu->minor);
        needed[2] = own;
    }
    for (size_t i = 0; i < 3 && needed[i] != NULL; i++) {
        if (!doctor_path(d, needed[i], real)) {
            found(f, DOCTOR_FAIL, "%s is missing", needed[i]);
            fix(f, "%ssudo nvidia-modprobe -u -c 0%s", d->container ? "on the host: " : "",
                d->container ? "; then start the container again, with --gpus all" : "");
            return;
        }
        if (access(real, R_OK | W_OK) != 0) {
            found(f, DOCTOR_FAIL, "%s is not this user's to open", needed[i]);
            fix(f, "sudo usermod -aG \"$(stat -c %%G %s)\" \"$USER\", then log in again", needed[i]);
            return;
        }
    }
    found(f, DOCTOR_OK, "nvidiactl, nvidia-uvm%s%s", needed[2] != NULL ? " and " : "",
          needed[2] != NULL ? own + strlen("/dev/") : "");
}

/* ---------------------------------------------------------------- libcuda */

static void libcuda_missing(const struct doctor *d, struct finding *f)
{
    found(f, DOCTOR_FAIL, "no libcuda.so.1 where the loader looks");
    if (d->container)
        fix(f, "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility ...");
    else if (d->wsl)
        fix(f, "export LD_LIBRARY_PATH=/usr/lib/wsl/lib   # if it is empty: install NVIDIA's driver in Windows");
    else if (d->module[0] != '\0')
        fix(f,
            "sudo apt-get install libnvidia-compute-%d (Ubuntu) or libcuda1 (Debian); where it lies elsewhere: "
            "export LD_LIBRARY_PATH=its folder",
            atoi(d->module));
    else
        fix(f, "it comes with the driver: " INSTALL);
}

static void look_libcuda(struct doctor *d, struct finding *f)
{
    const char *lib = d->libcuda_version;

    if (doctor_without_gpu(d, f))
        return;
    if (d->libcuda[0] == '\0' && doctor_live_gpu(d))
        found(f, DOCTOR_OK, "loaded, from a place of the loader's own");
    else if (d->libcuda[0] == '\0')
        libcuda_missing(d, f);
    else if (*lib == '\0' || d->module[0] == '\0' || d->wsl)
        found(f, DOCTOR_OK, "%.200s", d->libcuda);
    else if (strcmp(lib, d->module) == 0)
        found(f, DOCTOR_OK, "%.200s: %s, as the kernel module", d->libcuda, lib);
    else if (strstr(d->libcuda, "/compat/") != NULL && atoi(lib) > atoi(d->module))
        found(f, DOCTOR_OK, "%.200s: %s by forward compatibility, on kernel module %s", d->libcuda, lib, d->module);
    else {
        found(f, DOCTOR_FAIL, "%.200s is of driver %s, the kernel module of %s", d->libcuda, lib, d->module);
        fix(f, d->container
                   ? "start the container again: it was given the library of another driver. An image must not "
                     "bring a libcuda of its own"
                   : "sudo reboot; or, with nothing on the GPU: sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset "
                     "nvidia && sudo modprobe nvidia");
    }
}

/* ---------------------------------------------------------------- open, MIG, WSL */

static void look_open(struct doctor *d, struct finding *f)
{
    const char *pinned = doctor_env(d, "SIDESTREAM_DEVICE");

    if (d->rooted)
        found(f, DOCTOR_SKIP, "--root: nothing is opened");
    else if (d->device == NULL) {
        found(f, DOCTOR_FAIL, "'%.64s' does not open: %s", d->spec, d->open_why);
        fix(f, "what fails or warns besides this says what to do; 'sidestream devices' lists what opens");
    } else if (d->props.simulated && d->gpu != NULL && (pinned == NULL || *pinned == '\0')) {
        found(f, DOCTOR_FAIL, "there is a GPU, but %s opens: %s", d->props.spec, d->open_why);
        fix(f, "what fails or warns besides this says what to do");
    } else
        found(f, DOCTOR_OK, "%s: %s", d->props.spec, d->props.name);
}

static void look_mig(struct doctor *d, struct finding *f)
{
    char path[64] = "/proc/driver/nvidia/capabilities";
    struct doctor_names instances = {NULL, 0};

    if (doctor_without_gpu(d, f))
        return;
    if (d->gpu != NULL && d->gpu->minor >= 0) {
        snprintf(path, sizeof(path), "/proc/driver/nvidia/capabilities/gpu%d/mig", d->gpu->minor);
        instances = doctor_list(d, path, "gi");
    }
    if (instances.count > 0 || (doctor_live_gpu(d) && strstr(d->props.name, " MIG ") != NULL)) {
        found(f, DOCTOR_WARN, "the GPU is cut into instances%s%s", doctor_live_gpu(d) ? ": this is " : "",
              doctor_live_gpu(d) ? d->props.name : "");
        fix(f, "for the whole GPU: sudo nvidia-smi -mig 0   # ends what runs on its instances");
    } else
        found(f, DOCTOR_OK, "off");
    doctor_names_free(&instances);
}

static void look_wsl(struct doctor *d, struct finding *f)
{
    if (!d->wsl)
        found(f, DOCTOR_OK, "no");
    else {
        found(f, DOCTOR_WARN, "this is Linux under Windows");
        fix(f, "keep pinned memory small (budget_bytes of a pool), give WSL more memory in "
               "%%UserProfile%%\\.wslconfig, or "
               "run Linux itself");
    }
}

const struct check doctor_gpu_checks[] = {
    {"gpu", "without a GPU everything runs on the software device, and times are a model's", look_gpu},
    {"driver", "the library needs driver 535 (CUDA 12.2) or newer", look_driver},
    {"nodes", "the driver is reached through /dev/nvidia*; without them CUDA says that there is no device", look_nodes},
    {"libcuda", "libcuda.so.1 and the kernel module must be of one driver, else each CUDA call fails", look_libcuda},
    {"open", "what the other checks are about: that the device opens", look_open},
    {"mig", "an instance has a share of memory, multiprocessors and copy engines; with one engine, copies in and out take turns",
     look_mig},
    {"wsl", "Windows gives the GPU little pinned memory, and copies pass through its scheduler: overlap is worse",
     look_wsl},
    {NULL, NULL, NULL},
};
