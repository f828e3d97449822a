#!/usr/bin/env python3
"""A loader that is late every tenth time: its mean is 0.8 of the compute, every tenth batch takes five times as long as the others. Rate against the
same loader without jitter."""
from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from harness import DEVICE, Chain, Results, arguments, free_memory, step_time, table
from peers import PEERS

COMPUTE_S = 10e-3
WARM, COUNT = 10, 60
NAMES = ["sidestream", ".to(non_blocking)", "pinned ring", "apex style", "timm"]


class Sleeper:
    """Batches that are ready after a pause: `mean` seconds each, or every tenth five times the others."""

    def __init__(self, batches: list[torch.Tensor], mean: float, jitter: bool) -> None:
        self.batches, self.mean, self.jitter = batches, mean, jitter

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(WARM + COUNT + 1):
            short = self.mean / 1.4 if self.jitter else self.mean
            time.sleep(short * (5 if self.jitter and number % 10 == 9 else 1))
            yield self.batches[number % len(self.batches)]


def main() -> None:
    options = arguments(__doc__, depth={"type": int, "default": 4})
    results = Results(options, "torch-jitter")
    pinned = [torch.randn(32, 3, 224, 224).pin_memory() for _ in range(4)]
    chain = Chain()
    products = chain.count_for(COMPUTE_S)
    rows = [["method", "steady ms/step", "with jitter", "rate kept"]]
    samples: dict[tuple[str, bool], list[float]] = {}
    for _ in range(options.repeats):
        for name in NAMES:
            for jitter in (False, True):
                more = {"depth": options.depth} if name in ("sidestream", "pinned ring") else {}
                loader = Sleeper(pinned, 0.8 * COMPUTE_S, jitter)
                seconds = step_time(PEERS[name](loader, DEVICE, **more), lambda batch: chain.step(batch, products), WARM, COUNT)
                samples.setdefault((name, jitter), []).append(seconds)
                free_memory()
    for name in NAMES:
        steady, late = (results.row(f"{name} {'jitter' if jitter else 'steady'}", "s", samples[name, jitter])
                        for jitter in (False, True))
        rows.append([name, f"{steady * 1e3:.3f}", f"{late * 1e3:.3f}", f"{steady / late:.3f}"])
    table(rows)


if __name__ == "__main__":
    main()
