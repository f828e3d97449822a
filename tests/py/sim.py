"""What the tests of the package share: software devices, arrays of the standard library, programs of their own."""
import array
import os
import subprocess
import sys

import sidestream

SEEDS = range(12)


def device(seed: int = 0, **keys: object) -> sidestream.Device:
    """check=1: frees under queued work are logged."""
    words = ",".join(f"{name}={value}" for name, value in ({"seed": seed, "check": 1} | keys).items())
    return sidestream.Device(f"sim:h200,{words}")


def floats(n: int, first: float = 0.0, step: float = 1.0) -> array.array:
    return array.array("f", [first + step * i for i in range(n)])


def pinned(d: sidestream.Device, values: array.array) -> sidestream.Buffer:
    """A copy in pinned memory: copies from pageable memory are done when they are queued, these are not."""
    buffer = d.pool.empty(len(values), "float32")
    memoryview(buffer)[:] = values
    return buffer


def zeros(n: int) -> array.array:
    return array.array("f", bytes(4 * n))


def run_python(code: str, timeout: float = 60, **env: str) -> subprocess.CompletedProcess[str]:
    """Output and code of a program; no check."""
    return subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=timeout, env=os.environ | env)


def said(done: subprocess.CompletedProcess[str]) -> tuple[int, str]:
    """Code and both outputs, for one assert."""
    return done.returncode, done.stdout + done.stderr
