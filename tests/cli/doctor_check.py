"""Runs `sidestream doctor --root` on a healthy machine, on the same with one sickness each, and on hostile ones. Prints "ok NAME" or
"FAIL NAME: why".

    SIDESTREAM=build/sidestream python3 doctor_check.py [WORD]     those whose name contains WORD

A healthy machine gives neither warning nor failure. A sickness changes the checks that it names to what it says, and no other.
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from doctor_root import PROGRAM, GPU, SLOT, CARD, INFORMATION, VENV, LIBS, UUID, PROFILE, SKIPS, Root, by_id, doctor, healthy, profile

# ---------------------------------------------------------------- sicknesses

SICK: list[tuple[str, dict[str, str], str, Callable[[Root], None]]] = []


def sick(name: str, words: str = "", **changed: str) -> Callable[[Callable[[Root], None]], Callable[[Root], None]]:
    """A machine that is healthy but for what the function does. changed: the checks that change, _ for -. words: of the first one."""
    def add(function: Callable[[Root], None]) -> Callable[[Root], None]:
        SICK.append((name, {check.replace("_", "-"): status for check, status in changed.items()}, words, function))
        return function
    return add


def simple(name: str, words: str, function: Callable[[Root], object], **changed: str) -> None:
    sick(name, words, **changed)(lambda root: (function(root), None)[1])


GPU_CHECKS = ("driver", "nodes", "libcuda", "mig", "toolkit", "pytorch", "nvrtc", "cublas", "cupti", "profiling", "link", "numa", "others", "xid",
              "cuda_environment", "profile")
# Without a loaded module nodes are not to be expected, and what it tells in /proc is not there.
UNLOADED = dict.fromkeys(("nodes", "profiling", "profile"), "skip")
NEED_CUDA = dict.fromkeys(("toolkit", "nvrtc", "cublas", "cupti"), "skip")


@sick("no-gpu", "the software device serves", gpu="warn", **dict.fromkeys(GPU_CHECKS, "skip"))
def no_gpu(root: Root) -> None:
    root.remove(f"sys/bus/pci/devices/{GPU}", "proc/driver/nvidia", "dev/nvidia0", "dev/nvidiactl", "dev/nvidia-uvm")


def no_driver(root: Root) -> None:
    root.remove("proc/driver/nvidia", "dev/nvidia0", "dev/nvidiactl", "dev/nvidia-uvm", f"{CARD}/driver")


@sick("device-sim", "the software device", **dict.fromkeys(("gpu", *GPU_CHECKS), "skip"))
def device_sim(root: Root) -> None:
    root.options = ["--device=sim:t4"]


@sick("device-too-high", "no cuda:3", gpu="fail", link="skip", profile="skip")
def device_too_high(root: Root) -> None:
    root.options = ["--device=cuda:3"]


@sick("driver-missing", "sudo modprobe nvidia", driver="fail", **UNLOADED)
def driver_missing(root: Root) -> None:
    no_driver(root)


@sick("driver-missing-on-host", "on the host: ", driver="fail", **UNLOADED)
def driver_missing_on_host(root: Root) -> None:
    no_driver(root)
    root.container()


@sick("driver-nouveau", "blacklist nouveau", driver="fail", **UNLOADED)
def driver_nouveau(root: Root) -> None:
    no_driver(root)
    root.link(f"{CARD}/driver", "../../../../bus/pci/drivers/nouveau")


@sick("driver-vfio", "sudo tee /sys/bus/pci/drivers/vfio-pci/unbind", driver="fail", **UNLOADED)
def driver_vfio(root: Root) -> None:
    no_driver(root)
    root.link(f"{CARD}/driver", "../../../../bus/pci/drivers/vfio-pci")


# A driver of CUDA 12.1: what is built for CUDA 13 does not run on it either.
@sick("driver-old", "530.30.02 is older than 535", driver="fail", toolkit="warn", pytorch="fail", nvrtc="warn", cublas="warn", cupti="warn",
      profile="warn")
def driver_old(root: Root) -> None:
    root.replace("proc/driver/nvidia/version", "580.159.03", "530.30.02")
    root.write(f"{LIBS}/libcuda.so.530.30.02", "")
    root.link(f"{LIBS}/libcuda.so.1", "libcuda.so.530.30.02")


@sick("driver-version-hidden", "", driver="skip", profiling="skip", profile="skip")
def driver_version_hidden(root: Root) -> None:
    root.remove("proc/driver/nvidia")


@sick("nodes-missing", "sudo nvidia-modprobe -u -c 0", nodes="fail")
def nodes_missing(root: Root) -> None:
    root.remove("dev/nvidia0", "dev/nvidiactl", "dev/nvidia-uvm")


@sick("container-without-gpus", "docker run --gpus all", nodes="fail")
def container_without_gpus(root: Root) -> None:
    nodes_missing(root)
    root.container()


simple("nodes-no-uvm", "/dev/nvidia-uvm is missing", lambda r: r.remove("dev/nvidia-uvm"), nodes="fail")
simple("nodes-no-ctl", "/dev/nvidiactl is missing", lambda r: r.remove("dev/nvidiactl"), nodes="fail")


@sick("nodes-no-uvm-in-container", "on the host: ", nodes="fail")
def nodes_no_uvm_in_container(root: Root) -> None:
    root.remove("dev/nvidia-uvm")
    root.write("proc/1/cgroup", "0::/kubepods/pod1\n")


simple("libcuda-missing", "libnvidia-compute-580", lambda r: r.remove(f"{LIBS}/libcuda.so.1"), libcuda="fail")


@sick("libcuda-missing-in-container", "NVIDIA_DRIVER_CAPABILITIES=compute,utility", libcuda="fail")
def libcuda_missing_in_container(root: Root) -> None:
    root.remove(f"{LIBS}/libcuda.so.1")
    root.environment(container="podman")


@sick("libcuda-and-driver-missing", "comes with the driver", libcuda="fail", driver="fail", **UNLOADED, **NEED_CUDA)
def libcuda_and_driver_missing(root: Root) -> None:
    no_driver(root)
    root.remove(f"{LIBS}/libcuda.so.1")


@sick("libcuda-of-another-driver", "sudo reboot", libcuda="fail")
def libcuda_of_another_driver(root: Root) -> None:
    root.write(f"{LIBS}/libcuda.so.580.126.09", "")
    root.link(f"{LIBS}/libcuda.so.1", "libcuda.so.580.126.09")


@sick("libcuda-of-another-driver-in-container", "start the container again", libcuda="fail")
def libcuda_of_another_driver_in_container(root: Root) -> None:
    libcuda_of_another_driver(root)
    root.container()


@sick("libcuda-compat")
def libcuda_compat(root: Root) -> None:
    root.replace("proc/driver/nvidia/version", "580.159.03", "550.54.15")
    root.write("usr/local/cuda-13.0/compat/libcuda.so.580.159.03", "")
    root.link("usr/local/cuda-13.0/compat/libcuda.so.1", "libcuda.so.580.159.03")
    root.write("etc/ld.so.conf.d/000_cuda.conf", "/usr/local/cuda/compat\n")


@sick("mig", "nvidia-smi -mig 0", mig="warn")
def mig(root: Root) -> None:
    root.write("proc/driver/nvidia/capabilities/gpu0/mig/gi1/access", "DeviceFileMinor: 12\n")


def wsl(root: Root) -> None:
    no_gpu(root)
    root.write("proc/version", "Linux version 5.15.153.1-microsoft-standard-WSL2 (root@host)\n")
    root.remove(f"{LIBS}/libcuda.so.1")
    root.write("usr/lib/wsl/lib/libcuda.so.1", "")
    root.write("etc/ld.so.conf.d/ld.wsl.conf", "/usr/lib/wsl/lib\n")


@sick("wsl", "this is Linux under Windows", wsl="warn", driver="skip", link="skip", profiling="skip", profile="skip", **NEED_CUDA)
def wsl_whole(root: Root) -> None:
    wsl(root)
    root.write("dev/dxg", "")


@sick("wsl-without-libcuda", "", wsl="warn", libcuda="fail", driver="skip", link="skip", profiling="skip", profile="skip", **NEED_CUDA)
def wsl_without_libcuda(root: Root) -> None:
    wsl_whole(root)
    root.remove("usr/lib/wsl/lib/libcuda.so.1")


@sick("wsl-without-dxg", "wsl --update", nodes="fail", wsl="warn", driver="skip", profiling="skip", profile="skip")
def wsl_without_dxg(root: Root) -> None:
    root.write("proc/version", "Linux version 5.15.153.1-microsoft-standard-WSL2 (root@host)\n")
    root.remove("proc/driver/nvidia")


@sick("toolkit-too-new", "driver can no more than 13.0", toolkit="warn")
def toolkit_too_new(root: Root) -> None:
    root.replace("usr/local/cuda-13.0/version.json", "13.0.2", "14.0.1")


simple("toolkit-newer-minor", "", lambda r: r.replace("usr/local/cuda-13.0/version.json", "13.0.2", "13.5.0"))


@sick("toolkit-not-pytorchs", "PyTorch is built for CUDA 12.8", toolkit="warn")
def toolkit_not_pytorchs(root: Root) -> None:
    root.torch("2.10.0+cu128", "'12.8'")


@sick("toolkit-of-a-distribution", "but PyTorch is built for CUDA 13.0", toolkit="warn")
def toolkit_of_a_distribution(root: Root) -> None:
    root.environment(CUDA_HOME="/usr/lib/cuda")
    root.write("usr/lib/cuda/include/cuda.h", "#ifndef __cuda_cuda_h__\n#define CUDA_VERSION 12040\n")


@sick("toolkit-of-nvcc-in-path", "CUDA 12.2.0 in /opt/cuda-12.2", toolkit="warn")
def toolkit_of_nvcc_in_path(root: Root) -> None:
    root.write("proc/100/environ", "PATH=/usr/bin:/home/u/venv/bin\0VIRTUAL_ENV=/home/u/venv\0HOME=/home/u\0")
    root.write("opt/cuda-12.2/bin/nvcc", "")
    root.link("usr/bin/nvcc", "/opt/cuda-12.2/bin/nvcc")
    root.write("opt/cuda-12.2/version.json", '{"cuda": {"version": "12.2.0"}}')


@sick("toolkit-none", "", toolkit="skip", nvrtc="warn", cublas="warn", cupti="warn")
def toolkit_none(root: Root) -> None:
    root.remove("usr/local/cuda")


simple("pytorch-none", "", lambda r: r.remove(f"{VENV}/torch/version.py"), pytorch="skip")
simple("pytorch-cpu", "is built without CUDA", lambda r: r.torch("2.11.0+cpu", "None"), pytorch="warn")
simple("pytorch-rocm", "is built for ROCm", lambda r: r.torch("2.11.0+rocm6.4", "None", "'6.4.43482'"), pytorch="warn")
simple("pytorch-old", "sidestream.torch needs 2.9", lambda r: r.torch("2.8.0+cu130", "'13.0'"), pytorch="warn")
simple("pytorch-too-new", "is built for CUDA 14.0; the driver can no more than 13.0", lambda r: r.torch("3.1.0+cu140", "'14.0'"),
       pytorch="fail")


@sick("driver-newer-than-known")
def driver_newer_than_known(root: Root) -> None:
    root.replace("proc/driver/nvidia/version", "580.159.03", "650.10.01")
    root.write(f"{LIBS}/libcuda.so.650.10.01", "")
    root.link(f"{LIBS}/libcuda.so.1", "libcuda.so.650.10.01")
    root.torch("3.1.0+cu140", "'14.0'")
    root.replace("usr/local/cuda-13.0/version.json", "13.0.2", "14.0.1")


for _check, _lib, _wheel in (("nvrtc", "libnvrtc", "nvidia-cuda-nvrtc"), ("cublas", "libcublas", "nvidia-cublas")):
    simple(f"{_check}-missing", f"pip install '{_wheel}>=13,<14'", lambda r, lib=_lib: r.remove(f"usr/local/cuda-13.0/lib64/{lib}.so.13"),
           **{_check: "warn"})
CUPTI = "usr/local/cuda-13.0/extras/CUPTI/lib64/libcupti.so.13"
simple("cupti-missing", "pip install 'nvidia-cuda-cupti>=13,<14'", lambda r: r.remove(CUPTI), cupti="warn")


@sick("nvrtc-beside-pytorch")
def nvrtc_beside_pytorch(root: Root) -> None:
    root.remove("usr/local/cuda-13.0/lib64/libnvrtc.so.13")
    root.write(f"{VENV}/nvidia/cu13/lib/libnvrtc.so.13", "")


@sick("nvrtc-beside-another-pytorch", "export LD_LIBRARY_PATH=/opt/py/lib/python3.12/site-packages/nvidia/cu13/lib", nvrtc="warn")
def nvrtc_beside_another_pytorch(root: Root) -> None:
    root.remove("usr/local/cuda-13.0/lib64/libnvrtc.so.13")
    root.environment(PATH="/opt/py/bin:/usr/bin")
    root.write("opt/py/bin/python3", "")
    root.write("opt/py/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13", "")


@sick("nvrtc-missing-cuda-12", "pip install nvidia-cuda-nvrtc-cu12", nvrtc="warn")
def nvrtc_missing_cuda_12(root: Root) -> None:
    root.replace("proc/driver/nvidia/version", "580.159.03", "550.54.15")
    root.write(f"{LIBS}/libcuda.so.550.54.15", "")
    root.link(f"{LIBS}/libcuda.so.1", "libcuda.so.550.54.15")
    root.torch("2.10.0+cu126", "'12.6'")
    root.replace("usr/local/cuda-13.0/version.json", "13.0.2", "12.8.1")
    root.environment(LD_LIBRARY_PATH="relative:/opt/libs")
    root.write(PROFILE, json.dumps(profile(driver_version=12040)))
    for name in ("libcublas", "libcupti"):
        root.write(f"opt/libs/{name}.so.12", "")


def profiling_refused(root: Root) -> None:
    root.replace("proc/driver/nvidia/params", "RmProfilingAdminOnly: 0", "RmProfilingAdminOnly: 1")


simple("profiling-refused", "NVreg_RestrictProfilingToAdminUsers=0", profiling_refused, profiling="warn")


@sick("profiling-refused-in-container", "docker run --cap-add SYS_ADMIN", profiling="warn")
def profiling_refused_in_container(root: Root) -> None:
    profiling_refused(root)
    root.container()


@sick("profiling-of-an-administrator")
def profiling_of_an_administrator(root: Root) -> None:
    profiling_refused(root)
    root.replace("proc/100/status", "CapEff:\t0000000000000000", "CapEff:\t0000000000200000")


@sick("link-narrow", "runs x8 of x16", link="warn")
def link_narrow(root: Root) -> None:
    root.end(CARD, "32.0", 8, "32.0", 16)
    root.end(SLOT, "32.0", 8, "32.0", 16)


@sick("link-idle")
def link_idle(root: Root) -> None:
    root.end(CARD, "2.5", 16, "32.0", 16)
    root.end(SLOT, "2.5", 16, "32.0", 16)


@sick("link-slow-under-load", "runs at generation 3 of 5", link="warn")
def link_slow_under_load(root: Root) -> None:
    root.options = ["--loaded"]
    root.end(CARD, "8.0", 16, "32.0", 16)
    root.end(SLOT, "8.0", 16, "32.0", 16)


simple("link-full-under-load", "", lambda r: r.options.append("--loaded"))


@sick("link-slot-older", "its slot no more than generation 4 x8", link="warn")
def link_slot_older(root: Root) -> None:
    root.end(CARD, "16.0", 8, "32.0", 16)
    root.end(SLOT, "16.0", 8, "16.0", 8)


@sick("link-slot-emulated")
def link_slot_emulated(root: Root) -> None:
    root.end(SLOT, "2.5", 1, "2.5", 1)


simple("link-slot-silent", "", lambda r: r.remove(f"{SLOT}/max_link_width"))
simple("link-silent", "", lambda r: r.write(f"{CARD}/current_link_speed", "Unknown\n"), link="skip")
simple("link-gone", "", lambda r: r.write(f"{CARD}/current_link_width", "255\n"), link="skip")


@sick("link-narrow-above-a-switch", "0000:01:00.0 runs x4 of x16", link="warn")
def link_narrow_above_a_switch(root: Root) -> None:
    switch = f"{SLOT}/0000:01:00.0"
    root.end(SLOT, "32.0", 4, "32.0", 16)
    root.end(switch, "32.0", 4, "32.0", 16)
    root.end(f"{switch}/0000:02:00.0", "32.0", 16, "32.0", 16)
    shutil.move(root.path / CARD, root.path / f"{switch}/0000:02:00.0/{GPU}")
    root.link(f"sys/bus/pci/devices/{GPU}", f"../../../devices/pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/{GPU}")


@sick("numa-cpus", "numactl --cpunodebind=1 --membind=1", numa="warn")
def numa_cpus(root: Root) -> None:
    root.replace("proc/100/status", "Cpus_allowed_list:\t0-31", "Cpus_allowed_list:\t0-3,8,12-15")


simple("numa-memory", "numactl --membind=1", lambda r: r.replace("proc/100/status", "Mems_allowed_list:\t0-1", "Mems_allowed_list:\t0"),
       numa="warn")
simple("numa-some-cpus", "", lambda r: r.replace("proc/100/status", "Cpus_allowed_list:\t0-31", "Cpus_allowed_list:\t0-16"))
simple("numa-unknown", "", lambda r: r.write(f"{CARD}/numa_node", "-1\n"))
THP = "sys/kernel/mm/transparent_hugepage"
simple("huge-pages-never", "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
       lambda r: r.write(f"{THP}/enabled", "always madvise [never]\n"), huge_pages="warn")
simple("huge-pages-no-defrag", "/sys/kernel/mm/transparent_hugepage/defrag",
       lambda r: r.write(f"{THP}/defrag", "always defer defer+madvise madvise [never]\n"), huge_pages="warn")
simple("huge-pages-off-for-process", "PR_SET_THP_DISABLE", lambda r: r.replace("proc/100/status", "THP_enabled:\t1", "THP_enabled:\t0"),
       huge_pages="warn")
simple("huge-pages-old-kernel", "", lambda r: r.replace("proc/100/status", "THP_enabled:\t1\n", ""))
simple("huge-pages-silent", "", lambda r: r.remove(f"{THP}/enabled"), huge_pages="skip")
GROUP = "sys/fs/cgroup/user.slice"
simple("memory-limit", "limit of 2 GiB", lambda r: r.write(f"{GROUP}/session-1.scope/memory.max", f"{2 << 30}\n"), memory_limit="warn")
simple("memory-limit-above", "/sys/fs/cgroup/user.slice)", lambda r: r.write(f"{GROUP}/memory.max", f"{3 << 30}\n"), memory_limit="warn")
simple("memory-limit-ample", "", lambda r: r.write(f"{GROUP}/memory.max", f"{64 << 30}\n"))


@sick("memory-limit-filled", "docker run --memory=16g", memory_limit="warn")
def memory_limit_filled(root: Root) -> None:
    root.container()
    root.write(f"{GROUP}/memory.max", f"{64 << 30}\n")
    root.write(f"{GROUP}/memory.stat", f"anon {62 << 30}\nunevictable 0\n")


@sick("memory-limit-v1", "limit of 1.5 GiB", memory_limit="warn")
def memory_limit_v1(root: Root) -> None:
    root.write("proc/100/cgroup", "12:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n")
    root.write("proc/100/mountinfo", "40 30 0:30 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n")
    root.write("sys/fs/cgroup/memory/memory.limit_in_bytes", f"{3 << 29}\n")
    root.write("sys/fs/cgroup/memory/memory.stat", "rss 5\ntotal_rss 1048576\ntotal_unevictable 0\n")


@sick("memory-unlimited-v1")
def memory_unlimited_v1(root: Root) -> None:
    memory_limit_v1(root)
    root.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")


simple("budget-little-memory", "ps aux --sort -rss", lambda r: r.replace("proc/meminfo", "MemAvailable:   250000000", "MemAvailable:   2000000"),
       pin_budget="warn")
simple("budget-many-processes", "for 512 processes", lambda r: r.environment(LOCAL_WORLD_SIZE="512"), pin_budget="warn")


@sick("budget-many-processes-under-a-limit", "the limit leaves", pin_budget="warn")
def budget_many_processes_under_a_limit(root: Root) -> None:
    root.write(f"{GROUP}/memory.max", f"{16 << 30}\n")
    root.environment(LOCAL_WORLD_SIZE="8")


simple("budget-silent", "", lambda r: r.remove("proc/meminfo"), memory_limit="skip", pin_budget="skip")
LOCKED = "134217728            134217728"
simple("memlock-small", "/etc/security/limits.d/memlock.conf", lambda r: r.replace("proc/100/limits", LOCKED, "8388608              8388608"),
       memlock="warn")


@sick("memlock-small-in-container", "docker run --ulimit memlock=-1", memlock="warn")
def memlock_small_in_container(root: Root) -> None:
    root.replace("proc/100/limits", LOCKED, "65536                65536")
    root.container()


@sick("memlock-small-but-capable")
def memlock_small_but_capable(root: Root) -> None:
    root.replace("proc/100/limits", LOCKED, "65536                65536")
    root.replace("proc/100/status", "CapEff:\t0000000000000000", "CapEff:\t0000000000004000")


simple("memlock-unlimited", "", lambda r: r.replace("proc/100/limits", LOCKED, "unlimited            unlimited"))
simple("memlock-silent", "", lambda r: r.remove("proc/100/limits"), memlock="skip")
URING = "proc/sys/kernel/io_uring_disabled"
simple("uring-old-kernel", "5.6 has", lambda r: r.write("proc/sys/kernel/osrelease", "5.4.0-150-generic\n"), io_uring="warn")
simple("uring-disabled", "sudo sysctl kernel.io_uring_disabled=0", lambda r: r.write(URING, "2\n"), io_uring="warn")
simple("uring-for-some", "kernel.io_uring_group=", lambda r: r.write(URING, "1\n"), io_uring="warn")
simple("uring-seccomp", "seccomp=unconfined", lambda r: r.replace("proc/100/status", "Seccomp:\t0", "Seccomp:\t2"), io_uring="warn")


@sick("uring-for-our-group")
def uring_for_our_group(root: Root) -> None:
    root.write(URING, "1\n")
    root.write("proc/sys/kernel/io_uring_group", "27\n")


@sick("uring-for-administrators")
def uring_for_administrators(root: Root) -> None:
    root.write(URING, "1\n")
    root.replace("proc/100/status", "CapEff:\t0000000000000000", "CapEff:\t0000000000200000")


simple("shm-small", "remount,size=8G /dev/shm", lambda r: r.replace("proc/100/mounts", "size=131928364k", "size=512m"), shm="warn")


@sick("shm-small-in-container", "docker run --shm-size=8g", shm="warn")
def shm_small_in_container(root: Root) -> None:
    root.replace("proc/100/mounts", "size=131928364k", "size=65536k")
    root.container()


simple("shm-none", "mount -t tmpfs", lambda r: r.write("proc/100/mounts", "proc /proc proc rw 0 0\n"), shm="warn")
simple("shm-default-size", "", lambda r: r.replace("proc/100/mounts", ",size=131928364k", ""))
simple("shm-share", "", lambda r: r.replace("proc/100/mounts", "size=131928364k", "size=25%"))
simple("shm-silent", "", lambda r: r.remove("proc/mounts"), shm="skip")


@sick("others", "2 use it: python3 (300), ?[31mtrain (301)", others="warn")
def others(root: Root) -> None:
    root.process(300, "python3", "/dev/null", "/dev/nvidiactl", "/dev/nvidia0")
    root.process(301, "\x1b[31mtrain", "/dev/nvidia0")


@sick("others-many", "11 use it: ", others="warn")
def others_many(root: Root) -> None:
    for pid in range(300, 311):
        root.process(pid, "python3", "/dev/nvidia0")


simple("others-idle", "", lambda r: r.process(300, "nvidia-persiste", "/dev/nvidia0"))
simple("others-on-another-gpu", "", lambda r: r.process(300, "python3", "/dev/nvidia1", "/dev/nvidia-uvm"))
LOG = "[  100.0] NVRM: Xid (PCI:0000:0a:00): %d, pid=1234, name=python3, more\n"
simple("xid-hardware", "the last of them Xid 79", lambda r: r.write("var/log/dmesg", LOG % 79 + LOG % 13 + LOG % 63), xid="fail")
simple("xid-other", "2 errors of driver or GPU, the last of them Xid 62", lambda r: r.write("var/log/dmesg", LOG % 63 + LOG % 62 + LOG % 31),
       xid="warn")
simple("xid-of-programs", "", lambda r: r.write("var/log/dmesg", LOG % 13 + LOG % 31))
simple("xid-of-another-gpu", "", lambda r: r.write("var/log/dmesg", (LOG % 79).replace("0a:00", "0b:00")))
simple("xid-silent", "", lambda r: r.remove("var/log/dmesg"), xid="skip")
simple("env-disable", "unset SIDESTREAM_DISABLE", lambda r: r.environment(SIDESTREAM_DISABLE="1"), environment="warn")
simple("env-disable-odd", "it does nothing", lambda r: r.environment(SIDESTREAM_DISABLE="2"), environment="warn")
simple("env-validate", "unset SIDESTREAM_VALIDATE", lambda r: r.environment(SIDESTREAM_VALIDATE="true"), environment="warn")
simple("env-device-sim", "though there is a GPU", lambda r: r.environment(SIDESTREAM_DEVICE="sim:t4"), environment="warn")
simple("env-unknown", "unset SIDESTREAM_DISABEL", lambda r: r.environment(SIDESTREAM_DISABEL="1"), environment="warn")
simple("env-harmless", "", lambda r: r.environment(SIDESTREAM_DISABLE="0", SIDESTREAM_VALIDATE="", SIDESTREAM_DEVICE="cuda:0",
                                                   SIDESTREAM_SIM_SEED="3"))
simple("cuda-blocking", "unset CUDA_LAUNCH_BLOCKING", lambda r: r.environment(CUDA_LAUNCH_BLOCKING="1"), cuda_environment="warn")
simple("cuda-one-queue", "unset CUDA_DEVICE_MAX_CONNECTIONS", lambda r: r.environment(CUDA_DEVICE_MAX_CONNECTIONS="1"), cuda_environment="warn")
simple("cuda-injected", "unset CUDA_INJECTION64_PATH", lambda r: r.environment(CUDA_INJECTION64_PATH="/opt/tool.so"), cuda_environment="warn")
simple("cuda-hidden", "hides all GPUs", lambda r: r.environment(CUDA_VISIBLE_DEVICES=""), cuda_environment="fail")
simple("cuda-harmless", "", lambda r: r.environment(CUDA_LAUNCH_BLOCKING="0", CUDA_DEVICE_MAX_CONNECTIONS="8", CUDA_VISIBLE_DEVICES="0"))


simple("profile-none", "sidestream bench --save", lambda r: r.remove(PROFILE), profile="warn")
simple("profile-damaged", "not read: ", lambda r: r.write(PROFILE, '{"sidestream_machine": 1, "from": '), profile="warn")
simple("profile-loop", "Too many levels of symbolic links", lambda r: r.link(PROFILE, f"machine-{UUID}.json"), profile="warn")
simple("profile-of-another-gpu", "that of another GPU, GPU-1", lambda r: r.write(PROFILE, json.dumps(profile(uuid="GPU-1"))), profile="warn")
simple("profile-of-another-driver", "CUDA 12.8", lambda r: r.write(PROFILE, json.dumps(profile(driver_version=12080))), profile="warn")
simple("profile-estimated", "saved, but not measured", lambda r: r.write(PROFILE, json.dumps(profile(**{"from": "estimated", "taken": ""}))),
       profile="warn")
simple("profile-old", "days ago", lambda r: r.write(PROFILE, json.dumps(profile(taken="2020-02-29T08:15:00Z"))), profile="warn")
simple("profile-gpu-not-yet-used", "", lambda r: r.replace(INFORMATION, UUID, "GPU-????????-????-????-????-????????????"), profile="skip")


@sick("profile-elsewhere")
def profile_elsewhere(root: Root) -> None:
    root.remove(PROFILE)
    root.write(f"cache/sidestream/machine-{UUID}.json", json.dumps(profile()))
    root.environment(XDG_CACHE_HOME="/cache")


@sick("profile-by-name")
def profile_by_name(root: Root) -> None:
    root.remove(PROFILE)
    root.write("opt/mine.json", json.dumps(profile()))
    root.environment(SIDESTREAM_MACHINE="/opt/mine.json")


# One of two GPUs is given to this container: the other is on the bus, and is not looked at.
@sick("one-of-two-gpus")
def one_of_two_gpus(root: Root) -> None:
    other = "sys/devices/pci0000:00/0000:00:01.0/0000:09:00.0"
    shutil.copytree(root.path / CARD, root.path / other, symlinks=True)
    root.end(other, "2.5", 1, "32.0", 16)
    root.link("sys/bus/pci/devices/0000:09:00.0", "../../../devices/pci0000:00/0000:00:01.0/0000:09:00.0")
    root.write("proc/driver/nvidia/gpus/0000:09:00.0/information", "Model: \t\t NVIDIA H200\nDevice Minor: \t 1\n")


@sick("second-of-two-gpus", "0000:0b:00.0 runs x1 of x16", link="warn")
def second_of_two_gpus(root: Root) -> None:
    other = "sys/devices/pci0000:00/0000:00:01.0/0000:0b:00.0"
    shutil.copytree(root.path / CARD, root.path / other, symlinks=True)
    root.end(other, "32.0", 1, "32.0", 16)
    root.link("sys/bus/pci/devices/0000:0b:00.0", "../../../devices/pci0000:00/0000:00:01.0/0000:0b:00.0")
    root.write("proc/driver/nvidia/gpus/0000:0b:00.0/information", "Model: \t\t NVIDIA H200\nDevice Minor: \t 1\nGPU UUID: \t GPU-0b\n")
    root.write(PROFILE.replace(UUID, "GPU-0b"), json.dumps(profile(uuid="GPU-0b")))
    root.write("dev/nvidia1", "")
    root.options = ["--device=cuda:1"]


def check_sick(name: str, changed: dict[str, str], words: str, function: Callable[[Root], None], base: dict[str, str], work: pathlib.Path) -> None:
    root = healthy(work / name)
    function(root)
    now = by_id(doctor(root))
    assert list(now) == list(base), "other checks"
    got = {check: now[check]["status"] for check in base if now[check]["status"] != base[check]}
    assert got == changed, {check: now[check] for check in set(got) ^ set(changed) or got}
    first = now[next(iter(changed), "gpu")]
    assert words in first["found"] + (first["fix"] or ""), first


# ---------------------------------------------------------------- hostile roots

def as_folder(path: pathlib.Path) -> None:
    path.mkdir()


def as_pipe(path: pathlib.Path) -> None:
    os.mkfifo(path)


def as_endless(path: pathlib.Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def as_one_line(path: pathlib.Path) -> None:
    path.write_bytes(b"9" * (3 << 20))


def as_binary(path: pathlib.Path) -> None:
    path.write_bytes(bytes(range(256)) * 64)


def as_nothing(path: pathlib.Path) -> None:
    path.write_bytes(b"")


def as_loop(path: pathlib.Path) -> None:
    path.symlink_to(path.name)


def as_long_link(path: pathlib.Path) -> None:
    path.symlink_to("x/../" * 800 + "y")


def as_way_out(path: pathlib.Path) -> None:
    path.symlink_to("../" * 40 + "proc/self/status")


HOSTILE = (as_folder, as_pipe, as_endless, as_one_line, as_binary, as_nothing, as_loop, as_long_link, as_way_out)


def check_hostile(form: Callable[[pathlib.Path], None], work: pathlib.Path) -> None:
    """Each file of the healthy machine in turn, cut short too, and then all of them: an answer, in time."""
    root = healthy(work / form.__name__)
    names = [path for path in sorted(root.path.rglob("*")) if path.is_file() or path.is_symlink()]
    for path in names:
        kept = work / "kept"
        path.rename(kept)
        form(path)
        began = time.monotonic()
        try:
            doctor(root)
        except (AssertionError, ValueError, subprocess.TimeoutExpired) as error:
            raise AssertionError(f"{path.relative_to(root.path)}: {error}") from error
        assert time.monotonic() - began < 30, path
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        kept.rename(path)
    for path in names:
        if not path.is_symlink():
            path.unlink()
            form(path)
    doctor(root)


def check_cut(work: pathlib.Path) -> None:
    """Each file without its last line's end, then without its second half."""
    root = healthy(work / "cut")
    base = {check: one["status"] for check, one in by_id(doctor(root)).items()}
    for path in sorted(root.path.rglob("*")):
        if path.is_symlink() or not path.is_file() or not path.stat().st_size:
            continue
        whole = path.read_bytes()
        path.write_bytes(whole.rstrip(b"\n"))
        assert {check: one["status"] for check, one in by_id(doctor(root)).items()} == base, path
        path.write_bytes(whole[: len(whole) // 2])
        doctor(root)
        path.write_bytes(whole)


def check_way_out(work: pathlib.Path) -> None:
    """Links lead where they would on that machine, not to files of this one."""
    root = healthy(work / "way-out")
    outside = work / "outside"
    outside.write_text("Linux version microsoft WSL\n")
    root.link("proc/version", str(outside))
    assert by_id(doctor(root))["wsl"]["status"] == "ok"
    root.link("proc/version", "../../outside")
    assert by_id(doctor(root))["wsl"]["status"] == "ok"
    root.link("proc/version", "/elsewhere/version")
    root.write("elsewhere/version", "Linux version microsoft WSL\n")
    assert by_id(doctor(root))["wsl"]["status"] == "warn"


def check_crowd(work: pathlib.Path) -> None:
    """Thousands of processes, of packages, of cgroup lines and of variables."""
    root = healthy(work / "crowd")
    for pid in range(1000, 4000):
        root.write(f"proc/{pid}/comm", "sleep\n")
    for number in range(2000):
        (root.path / f"{VENV}/nvidia/p{number}").mkdir(parents=True)
    root.write("proc/100/cgroup", "".join(f"{n}:name{n}:/{'x' * 200}\n" for n in range(5000)))
    root.environment(**{f"V{n}": "x" * 500 for n in range(3000)})
    root.write("var/log/dmesg", LOG % 79 * 40000)
    now = by_id(doctor(root))
    assert now["others"]["found"].endswith("3000 processes not readable by this user"), now["others"]
    assert now["xid"]["status"] == "fail"


def check_unreadable(work: pathlib.Path) -> None:
    """Another user, who may read nothing but folders; and GPU nodes that are not his."""
    root = healthy(work / "unreadable")
    how = {}
    if os.geteuid() == 0:
        if subprocess.run([PROGRAM, "--version"], user=65534, capture_output=True, check=False).returncode != 0:
            raise LookupError("the user nobody may not run the program")
        how = {"user": 65534, "group": 65534, "extra_groups": []}
    for path in [work, *work.parents]:
        if os.access(path, os.W_OK) and path.stat().st_uid == os.geteuid() and path.name.startswith("tmp"):
            path.chmod(0o755)
    bad = {check: one for check, one in by_id(doctor(root, **how)).items() if one["status"] not in ("ok", "skip")}
    assert not bad, bad
    (root.path / "dev/nvidia0").chmod(0)
    now = by_id(doctor(root, **how))["nodes"]
    assert now["status"] == "fail" and "usermod -aG" in now["fix"], now
    (root.path / "proc/200/fd").chmod(0)
    now = by_id(doctor(root, **how))["others"]
    assert now["status"] == "ok" and "1 process not readable" in now["found"], now
    for path in root.path.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(0)
    doctor(root, **how)
    for path in sorted(root.path.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0)
    doctor(root, **how)
    for path in sorted(root.path.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)


# ---------------------------------------------------------------- running

def report(name: str, function: Callable[..., None], *arguments: object) -> bool:
    try:
        function(*arguments)
    except LookupError as why:
        print(f"skip doctor/{name} # {why}", flush=True)
    except Exception as error:  # whatever it is, it is one test's
        print(f"FAIL doctor/{name}: {type(error).__name__} {str(error)[:1500]}", flush=True)
        return False
    else:
        print(f"ok doctor/{name}", flush=True)
    return True


def check_healthy(root: Root) -> None:
    now = by_id(doctor(root))
    bad = {check: one for check, one in now.items() if one["status"] != SKIPS.get(check, "ok")}
    assert not bad, bad


def main() -> None:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        root = healthy(work / "healthy")
        report("healthy", check_healthy, root)
        base = {check: one["status"] for check, one in by_id(doctor(root)).items()}
        for name, changed, words, function in SICK:
            if word in name:
                report(name, check_sick, name, changed, words, function, base, work)
        for form in HOSTILE:
            if word in form.__name__:
                report(form.__name__.replace("_", "-"), check_hostile, form, work)
        for function in (check_cut, check_way_out, check_crowd, check_unreadable):
            if word in function.__name__:
                report(function.__name__.removeprefix("check_").replace("_", "-"), function, work)


if __name__ == "__main__":
    main()
