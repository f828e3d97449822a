"""What the PyTorch benchmarks share: calibrated compute, steady-state step times, results as JSON lines."""
from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import torch

DEVICE = torch.device("cuda", 0)


def arguments(description: str, anywhere: bool = False, **more) -> argparse.Namespace:
    """anywhere: --device sim runs it without a GPU, to see that it works."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=pathlib.Path, help="append results to this file, one JSON object a line")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--repeats", type=int, default=3)
    if anywhere:
        parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    for name, options in more.items():
        parser.add_argument("--" + name, **options)
    options = parser.parse_args()
    if not torch.cuda.is_available() and getattr(options, "device", "cuda") != "sim":
        print("skip: no GPU; times of the software device prove nothing")
        sys.exit(77)
    return options


def environment() -> dict:
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    for name in ("timm", "accelerate", "numpy", "sidestream"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "simulated"
    return {"gpu": gpu, "driver": torch.cuda.driver_version() if hasattr(torch.cuda, "driver_version") else None,
            "cores": len(os.sched_getaffinity(0)), "versions": versions}


class Results:
    """Keeps every sample; prints medians."""

    def __init__(self, options: argparse.Namespace, bench: str) -> None:
        self.path, self.bench, self.commit = options.out, bench, options.commit
        self.write({"environment": environment()})

    def write(self, record: dict) -> None:
        if self.path is not None:
            with self.path.open("a") as out:
                out.write(json.dumps({"bench": self.bench, "commit": self.commit,
                                      "date": time.strftime("%Y-%m-%d")} | record) + "\n")

    def row(self, label: str, unit: str, samples: list[float], **more) -> float:
        middle = statistics.median(samples)
        self.write({"label": label, "unit": unit, "samples": samples, "median": middle} | more)
        return middle


class Chain:
    """Compute of a set length: bf16 products of `dim`, as many as it takes. Reads the batch, so that it needs it."""

    def __init__(self, dim: int = 4096) -> None:
        self.a = torch.randn(dim, dim, device=DEVICE, dtype=torch.bfloat16)
        self.b = torch.randn(dim, dim, device=DEVICE, dtype=torch.bfloat16)
        self.c = torch.empty_like(self.a)
        self.sums = torch.zeros(1, device=DEVICE)
        self.one_s = self.measure(50)

    def products(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self.a, self.b, out=self.c)

    def measure(self, count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(2):  # the first warms up
            begin.record()
            self.products(count)
            end.record()
            end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / count

    def count_for(self, seconds: float) -> int:
        return max(1, round(seconds / self.one_s))

    def step(self, batch: torch.Tensor, count: int) -> None:
        self.sums += batch.view(-1)[:4096].float().sum()
        self.products(count)


def step_time(batches: Iterator, step: Callable[[torch.Tensor], None], warm: int, count: int) -> float:
    """Seconds a step between batch number `warm` and `warm + count` on the consumer's stream: what it costs to start does not count."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number, batch in enumerate(batches):
        if number == warm:
            begin.record()
        if number == warm + count:
            end.record()
        step(batch)
        del batch
    end.synchronize()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e-3 / count


def cycle(batches: list[torch.Tensor], count: int) -> Iterable:
    """`count` batches, in turns. A list-like: a loader."""

    class Loader:
        def __len__(self) -> int:
            return count

        def __iter__(self) -> Iterator[torch.Tensor]:
            return (batches[number % len(batches)] for number in range(count))

    return Loader()


def free_memory() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def table(rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip(), flush=True)
