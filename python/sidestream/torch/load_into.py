"""load_model: from files straight into the parameters that a module has."""
from __future__ import annotations

from typing import Any

import torch

from .. import _native
from ._common import is_plain
from .load import DTYPES, Part, Path, Running, Where, backend_name, open_checkpoint

__all__ = ["load_model"]


class _Plan:
    """Which tensor of a checkpoint goes to which of a module."""

    def __init__(self, module: torch.nn.Module, checkpoint: _native.Checkpoint) -> None:
        self.pairs: list[tuple[int, torch.Tensor]] = []
        self.unexpected: list[str] = []
        self.problems: list[str] = []
        state = {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}
        filled: set[int] = set()
        for number, name in enumerate(checkpoint.names()):
            target = state.get(name)
            if target is None or id(target) in filled:  # tied parameters are in a file once
                self.unexpected.append(name)
                continue
            filled.add(id(target))
            shape = checkpoint.info(number)[4]
            if tuple(target.shape) != shape:
                self.problems.append(f"{name} is {tuple(target.shape)} in the module and {shape} in the file")
            elif target.is_meta:
                self.problems.append(f"{name} is on the meta device: give the module memory first, with to_empty(device=...)")
            else:
                self.pairs.append((number, target))
        self.missing = [name for name, value in state.items() if id(value) not in filled]


def _goes_straight(target: torch.Tensor, dtype: torch.dtype) -> bool:
    return is_plain(target) and target.dtype == dtype and target.is_contiguous() and not target.is_conj() and not target.is_neg()


class _Lane:
    """The load to one device: some tensors straight into the module's memory, others to be converted after."""

    def __init__(self, device: torch.device, checkpoint: _native.Checkpoint, pairs: list[tuple[int, torch.Tensor]], backend: str) -> None:
        where = Where("load_model", device)
        parts: list[Part] = []
        self.straight: list[torch.Tensor] = []
        self.converted: dict[str, torch.Tensor] = {}
        for number, target in pairs:
            info = checkpoint.info(number)
            if not where.move and _goes_straight(target, DTYPES[info[2]]):
                if info[6] > 0:
                    parts.append((number, 0, 0, target.data_ptr()))
                    self.straight.append(target)
            else:
                parts.append((number, 0, 0, 0))
                self.converted[info[0]] = target
        self.running = Running(where, checkpoint, parts, keep=self.straight, memory_stream=where.stream(), backend=backend) if parts else None
        self.tensors = self.running.tensors() if self.running and self.converted else {}

    def finish(self) -> None:
        if self.running is None:
            return
        self.running.join()
        with torch.no_grad():
            for name, target in self.converted.items():
                target.copy_(self.tensors[name])
        if self.straight:
            torch.autograd.graph.increment_version(self.straight)

    def close(self) -> None:
        if self.running is not None:
            self.running.load.close()


def load_model(model: torch.nn.Module, filename: Path, strict: bool = True, device: Any = None, *,
               backend: str = "auto") -> tuple[list[str], list[str]]:
    """Fills a module's parameters and persistent buffers from a checkpoint, where they are: as safetensors.torch.load_model, without a second copy of
    the model in memory.

        missing, unexpected = sidestream.torch.load_model(model, "model.safetensors")

    Tensors of the same dtype that are contiguous are written to straight from the files, on whatever devices they are; others are converted as
    load_state_dict does. Returns the names that the file lacks and those that the module lacks; strict: RuntimeError for any, before anything is
    written. Names of one tied parameter count once: a second one in the file is unexpected.

    filename, backend: as in load_file. device: not used; parameters stay where they are. Modules' own _load_from_state_dict and hooks are not called.
    RuntimeError where a shape differs or a parameter is on the meta device. An error after that leaves parameters partly filled: load again."""
    backend = backend_name("load_model", backend)
    checkpoint = open_checkpoint(filename, lenient=False)
    lanes: list[_Lane] = []
    try:
        plan = _Plan(model, checkpoint)
        problems = list(plan.problems)
        if strict and plan.missing:
            problems.append("missing in the file: " + ", ".join(plan.missing))
        if strict and plan.unexpected:
            problems.append("unexpected in the file: " + ", ".join(plan.unexpected))
        if problems:
            raise RuntimeError(f"load_model: {type(model).__name__} and the checkpoint do not fit:\n    " + "\n    ".join(problems))
        for where in dict.fromkeys(target.device for _, target in plan.pairs):
            lanes.append(_Lane(where, checkpoint, [pair for pair in plan.pairs if pair[1].device == where], backend))
        for lane in lanes:
            lane.finish()
        return plan.missing, plan.unexpected
    finally:
        for lane in lanes:
            lane.close()
        checkpoint.close()
