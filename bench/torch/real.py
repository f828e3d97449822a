#!/usr/bin/env python3
"""A real loop: a folder of JPEGs through torchvision's ImageFolder and a DataLoader with workers, training a timm model; before and after
the one changed line."""
from __future__ import annotations

import os
import pathlib
import tempfile
import time

import torch

from harness import DEVICE, Results, arguments, free_memory, table
from models import Trainer


def make_folder(root: pathlib.Path, count: int) -> None:
    """`count` JPEGs of 256 x 256 with content that does not compress away."""
    import io

    import numpy
    from PIL import Image

    rng = numpy.random.default_rng(0)
    blobs = []
    for _ in range(32):
        coarse = Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=numpy.uint8)).resize((256, 256), Image.BICUBIC)
        noise = rng.integers(-12, 12, (256, 256, 3))
        image = Image.fromarray(numpy.clip(numpy.asarray(coarse, dtype=numpy.int16) + noise, 0, 255).astype(numpy.uint8))
        blob = io.BytesIO()
        image.save(blob, "JPEG", quality=85)
        blobs.append(blob.getvalue())
    for number in range(count):
        folder = root / f"class{number % 10}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number:06d}.jpg").write_bytes(blobs[number % len(blobs)])


def loader_of(root: pathlib.Path, dtype: str, workers: int, batch: int, pin: bool) -> torch.utils.data.DataLoader:
    from torchvision import datasets, transforms

    steps = [transforms.RandomResizedCrop(224, scale=(0.5, 1.0)), transforms.RandomHorizontalFlip()]
    steps.append(transforms.PILToTensor() if dtype == "uint8" else transforms.ToTensor())
    return torch.utils.data.DataLoader(datasets.ImageFolder(root, transforms.Compose(steps)), batch_size=batch, shuffle=True,
                                       num_workers=workers, pin_memory=pin, drop_last=True, persistent_workers=True)


def epoch(batches, trainer: Trainer) -> tuple[float, int]:
    images, began = 0, None
    for number, (data, target) in enumerate(batches):
        if number == 2:
            torch.cuda.synchronize()
            began, images = time.perf_counter(), 0
        data, target = data.to(DEVICE, non_blocking=True), target.to(DEVICE, non_blocking=True)
        trainer.step(data)
        images += len(data)
    torch.cuda.synchronize()
    return time.perf_counter() - began, images


def compute_alone(trainer: Trainer, dtype: str, batch: int) -> float:
    data = torch.randint(0, 255, (batch, 3, 224, 224), dtype=torch.uint8, device=DEVICE)
    data = data if dtype == "uint8" else data.float()
    for _ in range(3):
        trainer.step(data)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        trainer.step(data)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / 10


def main() -> None:
    options = arguments(__doc__, images={"type": int, "default": 8192}, batch={"type": int, "default": 256},
                        workers={"type": int, "default": len(os.sched_getaffinity(0)) - 1},
                        models={"nargs": "*", "default": ["vit_tiny_patch16_224", "resnet18"]})
    from sidestream.torch import Prefetcher

    results = Results(options, "torch-real")
    rows = [["model", "dtype", "method", "images/s", "compute busy", "epoch s"]]
    verdicts = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        root = pathlib.Path(name)
        make_folder(root, options.images)
        for model in options.models:
            trainer = Trainer(model, options.batch)
            for dtype in ("uint8", "float32"):
                step_s = compute_alone(trainer, dtype, options.batch)
                for method in ("pageable .to()", "pin_memory, .to(non_blocking)", "sidestream", "pin_memory, sidestream"):
                    loader = loader_of(root, dtype, options.workers, options.batch, "pin_memory" in method)
                    ours = Prefetcher(loader, device=DEVICE) if "sidestream" in method else loader
                    samples = []
                    for _ in range(options.repeats):
                        seconds, images = epoch(ours, trainer)
                        samples.append(seconds)
                    if ours is not loader:
                        verdicts.append(f"{model} {dtype} {method}: {ours.stats().verdict}")
                    middle = results.row(f"{model} {dtype} {method}", "s", samples, images=images, batch=options.batch, step_s=step_s)
                    rows.append([model, dtype, method, f"{images / middle:.0f}",
                                 f"{images / options.batch * step_s / middle * 100:.0f} %", f"{middle:.2f}"])
                    del loader, ours
                    free_memory()
    table(rows)
    print("\n".join(verdicts))


if __name__ == "__main__":
    main()
