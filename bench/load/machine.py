"""What the load benchmarks ask of the machine: files in page cache or out of it, the link, the disk, and who takes how much memory."""
from __future__ import annotations

import ctypes
import mmap
import os
import pathlib
import platform
import subprocess
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

MIB = 1 << 20


# ---------------------------------------------------------------- page cache

def resident(paths: Iterable[pathlib.Path]) -> float:
    """The part of the files' pages that is in page cache, 0 to 1, as mincore says. For files of our own."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = here = 0
    for path in paths:
        size = os.path.getsize(path)
        if size == 0:
            continue
        with open(path, "rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
            count = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
            vector = (ctypes.c_ubyte * count)()
            first = ctypes.c_char.from_buffer(mapped)
            if libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), vector) != 0:
                raise OSError(ctypes.get_errno(), f"mincore: {path}")
            del first
            pages += count
            here += sum(byte & 1 for byte in bytes(vector)) if count < 4096 else bytes(vector).translate(bytes(i & 1 for i in range(256))).count(1)
    return here / pages if pages else 1.0


def warm(paths: Iterable[pathlib.Path]) -> None:
    """Reads the files, so that they are in page cache."""
    pieces = [(path, at) for path in paths for at in range(0, os.path.getsize(path), 256 * MIB)]

    def read(piece: tuple[pathlib.Path, int]) -> None:
        buffer = bytearray(8 * MIB)
        with open(piece[0], "rb", buffering=0) as file:
            for at in range(piece[1], piece[1] + 256 * MIB, len(buffer)):
                if os.preadv(file.fileno(), [buffer], at) == 0:
                    break

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(read, pieces))


def cool(paths: list[pathlib.Path]) -> str:
    """Puts the files out of page cache; how it was done. All caches are dropped only where that did not do: programs would be read anew, too."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident(paths) < 0.001:
        return "fadvise"
    try:
        with open("/proc/sys/vm/drop_caches", "w") as file:
            file.write("3")
        return "fadvise, drop_caches"
    except OSError as error:
        return f"fadvise (drop_caches: {error.strerror})"


# ---------------------------------------------------------------- rates

def direct_rate(path: pathlib.Path, threads: int, piece: int, most: int) -> float:
    """GB/s of O_DIRECT reads: `threads` at a time, `piece` bytes each, over the first `most` bytes."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        offsets = iter(range(0, min(os.path.getsize(path), most) // piece * piece, piece))
        lock, done = threading.Lock(), []

        def read() -> None:
            with mmap.mmap(-1, piece) as buffer:
                while True:
                    with lock:
                        at = next(offsets, None)
                    if at is None:
                        return
                    done.append(os.preadv(fd, [buffer], at))

        began = time.monotonic()
        with ThreadPoolExecutor(threads) as pool:
            for future in [pool.submit(read) for _ in range(threads)]:
                future.result()
        return sum(done) / (time.monotonic() - began) / 1e9
    finally:
        os.close(fd)


LINK = """
import torch
n = 256 << 20
host, there = torch.empty(n, dtype=torch.uint8).pin_memory(), torch.empty(n, dtype=torch.uint8, device="cuda")
host.random_(1, 255)
best = 0
for _ in range(5):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(8):
        there.copy_(host, non_blocking=True)
    end.record()
    end.synchronize()
    best = max(best, 8 * n / begin.elapsed_time(end) * 1e-6)
print(best)
"""


def link_rate(python: str, device: str) -> float:
    """GB/s of pinned memory to the device, in blocks of 256 MiB; without a GPU that of a copy in memory."""
    program = LINK if device.startswith("cuda") else LINK_ON_HOST
    return float(subprocess.run([python, "-c", program], check=True, capture_output=True, text=True, timeout=120).stdout.split()[-1])


LINK_ON_HOST = """
import time, torch
host, there = torch.ones(64 << 20, dtype=torch.uint8), torch.ones(64 << 20, dtype=torch.uint8)
best = 0
for _ in range(5):
    began = time.monotonic()
    there.copy_(host)
    best = max(best, host.nbytes / (time.monotonic() - began) * 1e-9)
print(best)
"""


# ---------------------------------------------------------------- memory

def _fields(path: str) -> dict[str, int]:
    """Bytes, of a file of /proc with lines `Name: N kB`."""
    found = {}
    with open(path) as file:
        for line in file:
            name, _, rest = line.partition(":")
            if rest.endswith("kB\n"):
                found[name] = int(rest.split()[0]) * 1024
    return found


class _Nvml:
    """The memory in use on GPU 0, whoever uses it."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libnvidia-ml.so.1")
        self.handle = ctypes.c_void_p()
        if self.library.nvmlInit_v2() != 0 or self.library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.handle)) != 0:
            raise OSError("NVML does not start")

    def used(self) -> int:
        memory = (ctypes.c_ulonglong * 3)()  # total, free, used
        return int(memory[1]) and int(memory[0] - memory[1]) if self.library.nvmlDeviceGetMemoryInfo(self.handle, memory) == 0 else 0


class Watch:
    """Samples a process's memory and the machine's while it runs. samples: (CLOCK_MONOTONIC, available, RSS without files, pinned, device)."""

    def __init__(self, pid: int, every: float = 0.01) -> None:
        self.pid, self.every = pid, every
        self.samples: list[tuple[float, int, int, int, int]] = []
        self.stopped = threading.Event()
        try:
            self.nvml: _Nvml | None = _Nvml()
        except OSError:
            self.nvml = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.stopped.wait(self.every):
            try:
                status = _fields(f"/proc/{self.pid}/status")
            except OSError:
                return
            available = _fields("/proc/meminfo")["MemAvailable"]
            self.samples.append((time.monotonic(), available, status.get("RssAnon", 0) + status.get("RssShmem", 0), status.get("VmPin", 0),
                                 self.nvml.used() if self.nvml else 0))

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join()

    def peaks(self, begin: float, end: float) -> dict[str, int]:
        """Between two times, in bytes: what the machine had less than at first, what the process had more, what was in use more on the GPU."""
        during = [sample for sample in self.samples if begin <= sample[0] <= end]
        before = [sample for sample in self.samples if sample[0] < begin][-1:] or during[:1]
        if not during or not before:
            return {}
        peaks = {"host_taken": before[0][1] - min(s[1] for s in during), "rss_more": max(s[2] for s in during) - before[0][2],
                 "vm_pin": max(s[3] for s in during)}
        if self.nvml:
            peaks["device_more"] = max(s[4] for s in during) - before[0][4]
        return peaks


def describe() -> dict[str, object]:
    """The machine, in the words of its own tools; no names of hosts."""
    memory = _fields("/proc/meminfo")
    found: dict[str, object] = {"kernel": platform.release(), "cores": len(os.sched_getaffinity(0)), "memory": memory["MemTotal"]}
    try:
        ask = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current", "--format=csv,noheader"],
                             capture_output=True, text=True, timeout=30)
        found["gpu"] = ask.stdout.strip().splitlines()[0] if ask.returncode == 0 else None
    except (OSError, IndexError, subprocess.TimeoutExpired):
        found["gpu"] = None
    return found
