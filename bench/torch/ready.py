#!/usr/bin/env python3
"""Training on ready, pageable host batches: ViT-tiny, batch 256, bf16. The step against compute alone (the same step on a batch that is there)."""
from __future__ import annotations

import torch

from harness import DEVICE, Results, arguments, cycle, free_memory, step_time, table
from models import Trainer
from peers import PEERS

WARM, COUNT = 8, 40


def main() -> None:
    options = arguments(__doc__, model={"default": "vit_tiny_patch16_224"}, batch={"type": int, "default": 256})
    results = Results(options, "torch-ready")
    pageable = [torch.randn(options.batch, 3, 224, 224) for _ in range(4)]
    pinned = [batch.pin_memory() for batch in pageable]
    trainer = Trainer(options.model, options.batch)
    resident = pageable[0].to(DEVICE)
    samples: dict[str, list[float]] = {}
    for _ in range(options.repeats):
        for name, batches in (("compute alone", None), ("blocking .to(), pageable", pageable), (".to(non_blocking), pinned", pinned),
                              ("pinned ring, pinned", pinned), ("sidestream, pageable", pageable), ("sidestream, pinned", pinned)):
            source = cycle([resident] if batches is None else batches, WARM + COUNT + 1)
            moved = iter(source) if batches is None else PEERS[name.split(",")[0]](source, DEVICE)
            samples.setdefault(name, []).append(step_time(moved, trainer.step, WARM, COUNT))
            free_memory()
    middle = {name: results.row(name, "s", value, model=options.model) for name, value in samples.items()}
    table([["method", "ms/step", "/ compute"]] + [
        [name, f"{value * 1e3:.2f}", f"{value / middle['compute alone']:.3f}"] for name, value in middle.items()])


if __name__ == "__main__":
    main()
