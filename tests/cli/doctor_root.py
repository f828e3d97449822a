"""What doctor_check.py is made of: a folder that looks like the root of a healthy machine, and a run of `sidestream doctor` on it."""
import json
import os
import pathlib
import shutil
import subprocess
import time

PROGRAM = os.environ["SIDESTREAM"]
GPU = "0000:0a:00.0"
SLOT = "sys/devices/pci0000:00/0000:00:01.0"
CARD = f"{SLOT}/{GPU}"
INFORMATION = f"proc/driver/nvidia/gpus/{GPU}/information"
VENV = "home/u/venv/lib/python3.12/site-packages"
LIBS = "usr/lib/x86_64-linux-gnu"
UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"
PROFILE = f"home/u/.cache/sidestream/machine-{UUID}.json"
ENVIRONMENT = {"PATH": "/home/u/venv/bin:/usr/bin", "VIRTUAL_ENV": "/home/u/venv", "HOME": "/home/u", "CUDA_HOME": "/usr/local/cuda"}
SKIPS = {"open": "skip", "copy-engines": "skip"}  # what a root cannot tell
STATUS = """Name:\tsidestream
Groups:\t4 27 1000
CapEff:\t0000000000000000
Seccomp:\t0
THP_enabled:\t1
Cpus_allowed_list:\t0-31
Mems_allowed_list:\t0-1
"""


class Root:
    """A folder that looks like the root of a machine."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.options: list[str] = []

    def write(self, name: str, text: str) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def link(self, name: str, target: str) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    def remove(self, *names: str) -> None:
        for name in names:
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def replace(self, name: str, old: str, new: str) -> None:
        text = (self.path / name).read_text()
        assert old in text, (name, old)
        self.write(name, text.replace(old, new))

    def environment(self, **changes: str) -> None:
        self.write("proc/100/environ", "".join(f"{name}={value}\0" for name, value in (ENVIRONMENT | changes).items()))

    def container(self) -> None:
        self.write(".dockerenv", "")

    def process(self, pid: int, name: str, *opened: str) -> None:
        self.write(f"proc/{pid}/comm", f"{name}\n")
        (self.path / f"proc/{pid}/fd").mkdir()
        for number, target in enumerate(opened):
            self.link(f"proc/{pid}/fd/{number}", target)

    def end(self, folder: str, speed: str, width: int, most: str, most_width: int) -> None:
        """One end of a PCIe link."""
        self.write(f"{folder}/current_link_speed", f"{speed} GT/s PCIe\n")
        self.write(f"{folder}/max_link_speed", f"{most} GT/s PCIe\n")
        self.write(f"{folder}/current_link_width", f"{width}\n")
        self.write(f"{folder}/max_link_width", f"{most_width}\n")

    def torch(self, version: str, cuda: str, hip: str = "None") -> None:
        self.write(f"{VENV}/torch/version.py", f"from typing import Optional\n\n__all__ = ['__version__', 'debug', 'cuda']\n"
                   f"__version__ = '{version}'\ndebug = False\ncuda: Optional[str] = {cuda}\ngit_version = 'abc'\n"
                   f"hip: Optional[str] = {hip}\n")


def kernel(root: Root) -> None:
    root.write("proc/version", "Linux version 6.8.0-45-generic (build@host) (gcc 13.2.0) #45-Ubuntu SMP\n")
    root.write("proc/sys/kernel/osrelease", "6.8.0-45-generic\n")
    root.write("proc/sys/kernel/io_uring_disabled", "0\n")
    root.write("proc/sys/kernel/io_uring_group", "-1\n")
    root.write("proc/meminfo", "MemTotal:       263856732 kB\nMemFree:        11111111 kB\nMemAvailable:   250000000 kB\n")
    root.write("proc/1/cgroup", "0::/init.scope\n")
    root.write("proc/100/status", STATUS)
    root.write("proc/100/limits", "Limit                     Soft Limit           Hard Limit           Units     \n"
               "Max cpu time              unlimited            unlimited            seconds   \n"
               "Max locked memory         134217728            134217728            bytes     \n")
    root.write("proc/100/cgroup", "0::/user.slice/session-1.scope\n")
    root.write("proc/100/mountinfo", "24 30 0:22 / /proc rw,nosuid - proc proc rw\n"
               "31 30 0:27 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n")
    root.write("proc/100/mounts", "proc /proc proc rw 0 0\ntmpfs /dev/shm tmpfs rw,nosuid,nodev,size=131928364k 0 0\n")
    root.link("proc/self", "100")
    root.link("proc/mounts", "self/mounts")
    root.process(100, "sidestream", "/dev/pts/0", "/dev/nvidia0")
    root.process(1, "systemd", "/dev/null")
    root.process(200, "bash", "/dev/pts/1", "/dev/null")
    for group in ("user.slice", "user.slice/session-1.scope"):
        root.write(f"sys/fs/cgroup/{group}/memory.max", "max\n")
        root.write(f"sys/fs/cgroup/{group}/memory.stat", "anon 1048576\nfile 99999999999\nunevictable 0\n")
    root.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    root.write("sys/kernel/mm/transparent_hugepage/defrag", "always defer defer+madvise [madvise] never\n")
    root.write("sys/devices/system/node/node0/cpulist", "0-15\n")
    root.write("sys/devices/system/node/node1/cpulist", "16-31\n")
    root.write("var/log/dmesg", "[    1.0] Linux version 6.8.0-45-generic\n[    5.0] NVRM: loading NVIDIA UNIX Open Kernel Module\n")
    root.environment()


def driver(root: Root) -> None:
    for name, value in (("vendor", "0x10de"), ("class", "0x030200"), ("device", "0x2335"), ("numa_node", "1")):
        root.write(f"{CARD}/{name}", f"{value}\n")
    root.end(CARD, "32.0", 16, "32.0", 16)
    root.end(SLOT, "32.0", 16, "32.0", 16)
    root.link(f"{CARD}/driver", "../../../../bus/pci/drivers/nvidia")
    root.link(f"sys/bus/pci/devices/{GPU}", f"../../../devices/pci0000:00/0000:00:01.0/{GPU}")
    root.write("sys/devices/pci0000:00/0000:00:02.0/vendor", "0x8086\n")
    root.write("sys/devices/pci0000:00/0000:00:02.0/class", "0x030000\n")
    root.link("sys/bus/pci/devices/0000:00:02.0", "../../../devices/pci0000:00/0000:00:02.0")
    (root.path / "sys/bus/pci/drivers/nvidia").mkdir(parents=True)
    root.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build  (dvs-builder)"
               "\nGCC version:  gcc version 13.2.0\n")
    root.write("proc/driver/nvidia/params", "ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: 0\n")
    root.write(INFORMATION, f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 16\nGPU UUID: \t {UUID}\nDevice Minor: \t 0\n")
    root.write("proc/driver/nvidia/capabilities/mig/config", "DeviceFileMinor: 1\n")
    for node in ("nvidia0", "nvidiactl", "nvidia-uvm"):
        root.write(f"dev/{node}", "")
        (root.path / f"dev/{node}").chmod(0o666)
    root.write(f"{LIBS}/libcuda.so.580.159.03", "")
    root.link(f"{LIBS}/libcuda.so.1", "libcuda.so.580.159.03")


def software(root: Root) -> None:
    root.write("usr/local/cuda-13.0/version.json", '{"cuda": {"name": "CUDA SDK", "version": "13.0.2"}}\n')
    root.link("usr/local/cuda", "/etc/alternatives/cuda")
    root.link("etc/alternatives/cuda", "/usr/local/cuda-13.0")
    for name in ("libnvrtc", "libcublas"):
        root.write(f"usr/local/cuda-13.0/targets/x86_64-linux/lib/{name}.so.13.0.88", "")
        root.link(f"usr/local/cuda-13.0/targets/x86_64-linux/lib/{name}.so.13", f"{name}.so.13.0.88")
    root.link("usr/local/cuda-13.0/lib64", "targets/x86_64-linux/lib")
    root.write("usr/local/cuda-13.0/extras/CUPTI/lib64/libcupti.so.13", "")
    root.write("usr/bin/python3", "")
    root.link("home/u/venv/bin/python3", "/usr/bin/python3")
    root.torch("2.11.0+cu130", "'13.0'")
    root.write(PROFILE, json.dumps(profile()))
    root.write("etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n")
    root.write("etc/ld.so.conf.d/x86_64-linux-gnu.conf", "# Multiarch support\n/usr/local/lib/x86_64-linux-gnu\n")


def profile(**changes: object) -> dict:
    """What `sidestream bench --save` leaves; without a checksum, as after a change by hand."""
    rate = {"latency_s": 1e-6, "gbps": 55.0}
    taken = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 3 * 86400))
    return {"sidestream_machine": 1, "from": "measured", "machine": "host", "gpu": "NVIDIA H200", "uuid": UUID, "driver_version": 13000,
            "taken": taken, "copy_engines": 2, "h2d": rate, "d2h": rate, "both_gbps": 100.0, "both_h2d_gbps": 50.0,
            "pageable_h2d": rate, "pageable_d2h": rate,
            "stage_gbps": 50.0, "pin_s_per_gib": 0.1, "queue_s": 1e-5, "handover_s": 1e-6, "start_s": 1e-4, "paths": []} | changes


def healthy(path: pathlib.Path) -> Root:
    root = Root(path)
    kernel(root)
    driver(root)
    software(root)
    return root


def doctor(root: Root, **how: object) -> dict:
    """Runs it; checks what holds for any machine, and returns its report."""
    done = subprocess.run([PROGRAM, "doctor", "--json", "--root", root.path, *root.options], capture_output=True, timeout=60,
                          stdin=subprocess.DEVNULL, **how)
    assert done.returncode in (0, 1, 2) and not done.stderr, f"exit code {done.returncode}, {done.stderr!r}"
    report = json.loads(done.stdout.decode("ascii"))
    assert set(report) == {"checks", "worst", "device", "simulated", "root"}, report
    assert report["worst"] == ("ok", "warn", "fail")[done.returncode] and not report["simulated"] and report["device"] is None, report
    for check in report["checks"]:
        assert set(check) == {"id", "status", "found", "why", "fix"} and check["found"] and check["why"], check
        bad = check["status"] in ("warn", "fail")
        assert bad == bool(check["fix"]) and bad == (check["fix"] is not None), check
        assert all(" " <= c <= "~" for c in check["found"] + (check["fix"] or "")), check
    assert len({check["id"] for check in report["checks"]}) == len(report["checks"])
    statuses = [check["status"] for check in report["checks"]]
    assert report["worst"] == next((s for s in ("fail", "warn") if s in statuses), "ok")
    return report


def by_id(report: dict) -> dict[str, dict]:
    return {check["id"]: check for check in report["checks"]}
