#!/usr/bin/env python3
"""Step time over compute:copy ratios, one tensor of 154 MB a batch, against the same copies and kernels without any fence, and against
what others use.

The reference queues the copies on one stream and the kernels on another, in the same numbers, with no order between them: no prefetcher can
be faster.
"""
from __future__ import annotations

import torch

from harness import DEVICE, Chain, Results, arguments, cycle, free_memory, step_time, table
from peers import PEERS

SHAPE = (256, 3, 224, 224)
WARM, COUNT = 8, 40
PAGEABLE_PEERS = ["sidestream", "blocking .to()", "pinned ring"]


def unfenced(pinned: list[torch.Tensor], chain: Chain, products: int) -> float:
    """Seconds a step of the slower of two streams that know nothing of each other."""
    side = torch.cuda.Stream(DEVICE)
    ring = [torch.empty(SHAPE, device=DEVICE) for _ in range(4)]
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(2)]
    torch.cuda.synchronize()
    for number in range(WARM + COUNT + 1):
        for stream, (begin, end) in zip((side, torch.cuda.current_stream()), marks):
            if number == WARM:
                begin.record(stream)
            if number == WARM + COUNT:
                end.record(stream)
        with torch.cuda.stream(side):
            ring[number % 4].copy_(pinned[number % len(pinned)], non_blocking=True)
        chain.step(ring[number % 4], products)
    torch.cuda.synchronize()
    return max(begin.elapsed_time(end) for begin, end in marks) * 1e-3 / COUNT


def copy_alone(pinned: list[torch.Tensor]) -> float:
    target = torch.empty(SHAPE, device=DEVICE)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        begin.record()
        for number in range(20):
            target.copy_(pinned[number % len(pinned)], non_blocking=True)
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) * 1e-3 / 20


def main() -> None:
    options = arguments(__doc__, ratios={"type": float, "nargs": "*", "default": [0.25, 0.5, 1, 2, 4]},
                        depth={"type": int, "default": 2})
    results = Results(options, "torch-sweep")
    pageable = [torch.randn(SHAPE) for _ in range(4)]
    pinned = [batch.pin_memory() for batch in pageable]
    chain = Chain()
    copy_s = copy_alone(pinned)
    print(f"copy alone {copy_s * 1e3:.3f} ms = {pinned[0].nbytes / copy_s / 1e9:.1f} GB/s; one product {chain.one_s * 1e6:.0f} us")
    rows = [["source", "ratio", "method", "ms/step", "/unfenced", "/max(copy,compute)"]]
    for ratio in options.ratios:
        products = chain.count_for(ratio * copy_s)
        compute_s = chain.measure(products) * products
        samples: dict[tuple[str, str], list[float]] = {}
        runs = [("pinned", "unfenced"), *(("pinned", name) for name in PEERS), *(("pageable", name) for name in PAGEABLE_PEERS)]
        for repeat in range(options.repeats):
            turn = repeat * len(runs) // options.repeats  # nobody always comes first
            for source, name in runs[turn:] + runs[:turn]:
                if name == "unfenced":
                    seconds = unfenced(pinned, chain, products)
                else:
                    more = {"depth": options.depth} if name in ("sidestream", "pinned ring") else {}
                    loader = cycle(pinned if source == "pinned" else pageable, WARM + COUNT + 1)
                    seconds = step_time(PEERS[name](loader, DEVICE, **more), lambda batch: chain.step(batch, products), WARM, COUNT)
                samples.setdefault((source, name), []).append(seconds)
                free_memory()
        middle = {key: results.row(f"{key[0]} {key[1]}", "s", value, ratio=ratio, copy_s=copy_s, compute_s=compute_s)
                  for key, value in samples.items()}
        for (source, name), value in sorted(middle.items(), key=lambda row: (row[0][0] == "pageable", row[0][1] != "unfenced")):
            rows.append([source, f"{ratio:g}", name, f"{value * 1e3:.3f}", f"{value / middle['pinned', 'unfenced']:.3f}",
                         f"{value / max(copy_s, compute_s):.3f}"])
        print(f"ratio {ratio:g}: pageable / pinned {middle['pageable', 'sidestream'] / middle['pinned', 'sidestream']:.3f}", flush=True)
    table(rows)


if __name__ == "__main__":
    main()
