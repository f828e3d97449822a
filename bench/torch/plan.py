#!/usr/bin/env python3
"""Does the plan hold for a training loop? The step is timed alone, on a batch that is there; `sidestream plan` says, of that and of the batch's size,
how long a loop of so many steps takes; then the loop runs, fed by a Prefetcher from ready pinned batches.

The machine profile is the one that the library reads (SIDESTREAM_MACHINE names another file): it was measured by another process."""
from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator

import torch

from harness import Results, arguments, cycle, free_memory, table

SIDE = 224
SLOTS = 4


def network(name: str) -> torch.nn.Module:
    """vit: timm's ViT-tiny, long steps. cnn, mlp: less compute than copy."""
    if name == "vit":
        import timm

        return timm.create_model("vit_tiny_patch16_224", num_classes=1000)
    if name == "cnn":
        return torch.nn.Sequential(torch.nn.Conv2d(3, 64, 8, stride=4), torch.nn.GELU(), torch.nn.Conv2d(64, 128, 3, stride=2), torch.nn.GELU(),
                                   torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(128, 1000))
    return torch.nn.Sequential(torch.nn.AvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(3 * (SIDE // 4) ** 2, 1024), torch.nn.GELU(),
                               torch.nn.Linear(1024, 1000))


class Training:
    """One step: forward, backward, SGD; bf16 on a GPU."""

    def __init__(self, name: str, batch: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = network(name).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.target = torch.randint(0, 1000, (batch,), device=device)

    def step(self, images: torch.Tensor) -> None:
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(self.model(images), self.target)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def loop_s(batches: Iterator[torch.Tensor], step: Callable[[torch.Tensor], None], device: torch.device) -> float:
    """Seconds from asking for the first batch until the last step is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for batch in batches:
        step(batch)
        del batch
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def steps_of(step_s: float, copy_s: float, simulated: bool) -> int:
    """About a second's worth."""
    return 3 if simulated else max(20, min(1000, round(1 / max(step_s, copy_s))))


def predict(options, steps: int, batch_bytes: int, compute_s: float) -> dict:
    """What `sidestream plan` says. A Prefetcher of depth 2 has four slots: two that are ready, one that is read, one that was read last."""
    command = [options.sidestream, "plan", "--json", f"--device={options.device}", f"--items={steps}", f"--bytes={batch_bytes}B",
               f"--compute={compute_s * 1e9:.0f}ns", f"--depth={SLOTS}"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def one(options, name: str, batch: int, device: torch.device) -> tuple[dict, list[float], int]:
    """The plan, the measured loops, and of how many steps."""
    from sidestream.torch import Prefetcher

    simulated = options.device == "sim"
    training = Training(name, batch, device)
    batches = [torch.randn(batch, 3, SIDE, SIDE) for _ in range(4)]
    if not simulated:
        batches = [images.pin_memory() for images in batches]
    resident = batches[0].to(device)
    warm = 1 if simulated else 10
    loop_s(iter([resident] * warm), training.step, device)
    about = loop_s(iter([resident] * warm), training.step, device) / warm
    steps = steps_of(about, batches[0].nbytes / 55e9, simulated)
    prefetcher = Prefetcher(cycle(batches, steps), device=options.device)
    loop_s(iter(prefetcher), training.step, device)  # warms up: its slots are made
    alone, loops = [], []
    for _ in range(options.repeats):  # by turns: short steps are bound by Python, whose speed drifts
        alone.append(loop_s(itertools.repeat(resident, steps), training.step, device) / steps)
        loops.append(loop_s(iter(prefetcher), training.step, device))
    plan = predict(options, steps, batches[0].nbytes, statistics.median(alone))
    plan["compute_alone_s"] = alone
    return plan, loops, steps


def has_timm() -> bool:
    try:
        import timm  # noqa: F401
    except ImportError:
        return False
    return True


def main() -> None:
    options = arguments(__doc__, anywhere=True, sidestream={"default": "sidestream", "help": "the program"},
                        batches={"type": int, "nargs": "*"}, models={"nargs": "*"})
    simulated = options.device == "sim"
    device = torch.device("cpu") if simulated else torch.device("cuda", 0)
    results = Results(options, "torch-plan")
    models = options.models or ["mlp", "cnn"] + (["vit"] if has_timm() and not simulated else [])
    rows = [["step", "batch", "MB", "steps", "alone ms", "predicted ms", "measured ms", "error", "bound by"]]
    errors = []
    for name in models:
        for batch in options.batches or ([2] if simulated else [32, 128, 256]):
            plan, samples, steps = one(options, name, batch, device)
            measured = results.row(f"{name} {batch}", "s", samples, simulated=simulated, steps=steps, plan=plan)
            errors.append(plan["overlapped_s"] / measured - 1)
            rows.append([name, str(batch), f"{batch * 3 * SIDE * SIDE * 4 / 1e6:.1f}", str(steps),
                         f"{statistics.median(plan['compute_alone_s']) * 1e3:.3f}",
                         f"{plan['overlapped_s'] * 1e3:.2f}", f"{measured * 1e3:.2f}", f"{errors[-1] * 100:+.2f} %", plan["bound"]])
            if not simulated:
                free_memory()
    table(rows)
    if simulated:
        print("simulated: the plan is a model's, the loop this host's; they have nothing to do with each other")
    else:
        worst = max(errors, key=abs)
        print(f"{len(errors)} training loops: median {statistics.median(map(abs, errors)) * 100:.2f} %, worst {worst * 100:+.2f} %")
        results.write({"errors": errors})


if __name__ == "__main__":
    main()
