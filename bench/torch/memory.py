#!/usr/bin/env python3
"""Device memory over 40 epochs, as PyTorch reports it and as the driver does, with a new iterator each epoch."""
from __future__ import annotations

import torch

from harness import DEVICE, Results, arguments, cycle, free_memory, table
from peers import PEERS, timm_loader


def main() -> None:
    options = arguments(__doc__, epochs={"type": int, "default": 40})
    from sidestream.torch import Prefetcher

    results = Results(options, "torch-memory")
    batches = [torch.randn(64, 3, 224, 224) for _ in range(4)]
    rows = [["method", "reserved after 1, 2, half, all (MiB)", "driver, used"]]
    loader = cycle(batches, 12)
    ours, theirs = Prefetcher(loader, device=DEVICE), timm_loader(loader)
    methods = {
        "sidestream, one prefetcher": lambda: iter(ours),
        "sidestream, a new one each epoch": lambda: PEERS["sidestream"](loader, DEVICE),
        "timm, one loader": lambda: (batch for batch, _ in theirs),
        "apex style": lambda: PEERS["apex style"](loader, DEVICE),
    }
    for name, epoch in methods.items():
        free_memory()
        reserved, used = [], []
        for _ in range(options.epochs):
            for batch in epoch():
                (batch * 2).sum()
                del batch
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            reserved.append(torch.cuda.memory_reserved() >> 20)
            used.append((total - free) >> 20)
        results.write({"label": name, "reserved_mib": reserved, "used_mib": used})
        picks = [0, 1, len(used) // 2, -1]
        rows.append([name, " ".join(str(reserved[i]) for i in picks), " ".join(str(used[i]) for i in picks)])
    table(rows)


if __name__ == "__main__":
    main()
