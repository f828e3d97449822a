#!/usr/bin/env python3
"""overlap_transfer_and_compute against the pinned serial loop, the textbook and the reordered textbook: 10 x 4096^2 float32, one x @ w each;
host wall time with everything finished."""
from __future__ import annotations

import time

import torch

from harness import DEVICE, Results, arguments, table


def serial(items: list, compute, transfer, fn) -> list:
    return [fn(item.to(DEVICE, non_blocking=True)) for item in items]


def textbook(items: list, compute, transfer, fn, reordered: bool) -> list:
    """Two buffers and stream-tail waits. As printed, copy i + 1 is queued after compute i; reordered, before it."""
    buffers: list[torch.Tensor | None] = [None, None]
    out = []

    def load(i: int) -> None:
        with torch.cuda.stream(transfer):
            transfer.wait_stream(compute)
            if buffers[i % 2] is None:
                buffers[i % 2] = torch.empty_like(items[i], device=DEVICE)
            buffers[i % 2].copy_(items[i], non_blocking=True)

    load(0)
    for i in range(len(items)):
        compute.wait_stream(transfer)
        if reordered and i + 1 < len(items):
            load(i + 1)
        with torch.cuda.stream(compute):
            out.append(fn(buffers[i % 2]))
        if not reordered and i + 1 < len(items):
            load(i + 1)
    compute.synchronize()
    transfer.synchronize()
    return out


def ours(items: list, compute, transfer, fn) -> list:
    from sidestream.torch import overlap_transfer_and_compute

    return overlap_transfer_and_compute(items, compute, transfer, fn)


METHODS = {
    "pinned serial": serial,
    "textbook": lambda *a: textbook(*a, reordered=False),
    "textbook, reordered": lambda *a: textbook(*a, reordered=True),
    "sidestream": ours,
}


def main() -> None:
    options = arguments(__doc__, dim={"type": int, "default": 4096}, items={"type": int, "default": 10})
    results = Results(options, "torch-classic")
    items = [torch.randn(options.dim, options.dim).pin_memory() for _ in range(options.items)]
    pageable = [item.clone() for item in items]
    for tf32 in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        w = torch.randn(options.dim, options.dim, device=DEVICE)
        compute, transfer = torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()
        samples: dict[str, list[float]] = {}
        expected = None
        for number in range(options.repeats * 3 + 1):
            for name, method in METHODS.items():
                torch.cuda.synchronize()
                began = time.perf_counter()
                out = method(items, compute, transfer, lambda x: x @ w)
                torch.cuda.synchronize()
                if number > 0:
                    samples.setdefault(name, []).append(time.perf_counter() - began)
                sums = [float(o.double().sum()) for o in out]
                expected = expected or sums
                assert sums == expected, f"{name}: wrong results"
                del out
        began = time.perf_counter()
        ours(pageable, compute, transfer, lambda x: x @ w)
        torch.cuda.synchronize()
        samples["sidestream, pageable"] = [time.perf_counter() - began]
        math = "tf32" if tf32 else "fp32"
        middle = {name: results.row(f"{math} {name}", "s", value, dim=options.dim) for name, value in samples.items()}
        table([["math", "method", "ms", "serial / it", "reordered / it"]] + [
            [math, name, f"{value * 1e3:.3f}", f"{middle['pinned serial'] / value:.3f}",
             f"{middle['textbook, reordered'] / value:.3f}"] for name, value in middle.items()])


if __name__ == "__main__":
    main()
