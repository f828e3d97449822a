#!/usr/bin/env python3
"""Does a prefetcher overwrite a batch that is still being read? Batches are filled with their index; the GPU sleeps before it reads while the host
runs ahead; wrong values are counted on the GPU. A control without the wait for the readers must corrupt."""
from __future__ import annotations

import torch

from harness import DEVICE, Results, arguments, table
from peers import PEERS

SHAPE = (8, 3, 224, 224)


class Indexed:
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        for number in range(self.count):
            yield torch.full(SHAPE, float(number)).pin_memory()


def unfenced_ring(loader, device, depth: int = 2):
    """The control: a ring whose copies do not wait for the readers."""
    side = torch.cuda.Stream(device)
    ring = [torch.empty(SHAPE, device=device) for _ in range(depth)]
    for number, batch in enumerate(loader):
        with torch.cuda.stream(side):
            ring[number % depth].copy_(batch, non_blocking=True)
        torch.cuda.current_stream(device).wait_stream(side)
        yield ring[number % depth]


def wrong_batches(batches, normalized: bool) -> tuple[int, int]:
    """Batches with at least one wrong value, and how many there were."""
    wrong = torch.zeros((), dtype=torch.long, device=DEVICE)
    count = 0
    mean = torch.tensor([0.485, 0.456, 0.406], device=DEVICE).view(1, 3, 1, 1) * 255
    std = torch.tensor([0.229, 0.224, 0.225], device=DEVICE).view(1, 3, 1, 1) * 255
    for number, batch in enumerate(batches):
        torch.cuda._sleep(2_000_000)  # about 1 ms: the host is many batches ahead
        expected = torch.full((1, 3, 1, 1), float(number), device=DEVICE)
        if normalized:
            expected = (expected - mean) / std
        wrong += ((batch - expected).abs() > 1e-3).any()
        count += 1
        del batch
    torch.cuda.synchronize()
    return int(wrong), count


def main() -> None:
    options = arguments(__doc__, batches={"type": int, "default": 1000})
    results = Results(options, "torch-race")
    rows = [["method", "wrong", "of"]]
    methods = {"control: no wait for readers": unfenced_ring} | {
        name: PEERS[name] for name in ("sidestream", "timm", "apex style", "pinned ring")}
    for name, method in methods.items():
        wrong, count = wrong_batches(method(Indexed(options.batches), DEVICE), name == "timm")
        results.write({"label": name, "wrong": wrong, "batches": count})
        rows.append([name, str(wrong), str(count)])
    table(rows)


if __name__ == "__main__":
    main()
