#!/usr/bin/env python3
"""Host costs: a batch of 500 small tensors, and next() for a batch of one tensor."""
from __future__ import annotations

import statistics
import time

import torch

from harness import DEVICE, Results, arguments, cycle, table

COUNT = 500


def median_us(fn, repeats: int = 50) -> float:
    samples = []
    for _ in range(repeats):
        began = time.perf_counter()
        fn()
        samples.append((time.perf_counter() - began) * 1e6)
    return statistics.median(samples)


def next_us(prefetcher, pause: float) -> list[float]:
    """Host time of each next() on a batch that is ready. Between them the host is busy, as it is where it launches kernels."""
    samples = []
    batches = iter(prefetcher)
    for number in range(len(prefetcher)):
        until = time.perf_counter() + pause
        while time.perf_counter() < until:
            torch.cuda.current_stream().query()
        began = time.perf_counter()
        batch = next(batches)
        if number >= 8:
            samples.append((time.perf_counter() - began) * 1e6)
        del batch
    for _ in batches:
        pass
    return samples


def native_submit_us(tensors: list[torch.Tensor]) -> list[float]:
    """What the native module takes to accept a batch; its threads pack it meanwhile."""
    import sidestream
    from sidestream import _native

    feeder = _native.Feeder(sidestream.Device("cuda:0"), slots=4, slot_bytes=COUNT * 4096)
    pieces = [(t.data_ptr(), t.nbytes, i * 4096) for i, t in enumerate(tensors)]
    samples = []
    for _ in range(40):
        began = time.perf_counter()
        feeder.submit(pieces, tensors)
        samples.append((time.perf_counter() - began) * 1e6)
        feeder.next(0, None, None)
        torch.cuda.synchronize()
    feeder.close()
    return samples[5:]


def main() -> None:
    options = arguments(__doc__)
    from sidestream.torch import Prefetcher

    results = Results(options, "torch-small")
    rows = [["what", "measured"]]
    flat = torch.empty(1 << 22, dtype=torch.uint8, device=DEVICE)

    def views() -> list:
        return [flat[i * 8192:i * 8192 + 4096].view(torch.float32).view(32, 32) for i in range(COUNT)]

    views_us = median_us(views)
    results.row("creating 500 views", "us", [views_us])
    rows.append(["creating 500 views (slice, dtype, shape)", f"{views_us:.0f} us"])
    slices_us = median_us(lambda: [flat[i * 8192:i * 8192 + 4096] for i in range(COUNT)])
    rows.append(["creating 500 slices", f"{slices_us:.0f} us"])
    results.row("creating 500 slices", "us", [slices_us])

    many = {f"t{i}": torch.randn(32, 32) for i in range(COUNT)}
    prefetcher = Prefetcher(cycle([many], 60), device=DEVICE)
    took = next_us(prefetcher, 0.02)
    stats = prefetcher.stats()
    middle = results.row("next() of 500 tensors", "us", took, copies_a_batch=stats.copies / max(1, stats.batches))
    rows.append(["next() of 500 tensors, all of it", f"{middle:.0f} us = {middle / views_us:.2f} x views"])
    rows.append(["copies a batch", f"{stats.copies / max(1, stats.batches):.2f}"])

    submit_us = native_submit_us(list(many.values()))
    middle = results.row("native submit of 500 pieces", "us", submit_us)
    rows.append(["native part: submit of 500 pieces", f"{middle:.0f} us"])

    began = time.perf_counter()
    for _ in range(20):
        moved = {name: tensor.to(DEVICE, non_blocking=True) for name, tensor in many.items()}
    torch.cuda.synchronize()
    naive = (time.perf_counter() - began) / 20 * 1e6
    results.row(".to() of 500 tensors", "us", [naive])
    rows.append([".to(non_blocking) of 500 pageable tensors", f"{naive:.0f} us"])
    del moved

    one = torch.randn(64, 3, 224, 224).pin_memory()
    for label, source in (("pinned", one), ("pageable", torch.randn(64, 3, 224, 224))):
        prefetcher = Prefetcher(cycle([source], 200), device=DEVICE)
        took = next_us(prefetcher, 0.01)
        middle = results.row(f"next() of one {label} tensor", "us", took)
        rows.append([f"next() of one {label} tensor", f"{middle:.1f} us"])
    table(rows)
    print(prefetcher.stats())


if __name__ == "__main__":
    main()
