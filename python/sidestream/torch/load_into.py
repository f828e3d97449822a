"""load_model: from files straight into the parameters that a module has; what has rules of its own is loaded by these."""
from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from .. import _native
from ._common import is_plain
from .load import DTYPES, Part, Path, Running, Where, backend_name, open_checkpoint

__all__ = ["load_model"]

_NORMS = (_NormBase._load_from_state_dict, _InstanceNorm._load_from_state_dict)
_EXTRA = "_extra_state"


class _Tree:
    """What a module expects of a checkpoint, by the names that load_state_dict goes by, and where it loads by rules of its own."""

    def __init__(self, model: Module, names: dict[str, int]) -> None:
        self.names = names
        self.targets: dict[str, torch.Tensor] = {}
        self.extra: set[str] = set()     # states that are no tensors, and have no target
        self.optional: set[str] = set()  # not missed
        self.own: set[str] = set()       # targets that load by rules
        self.ruled: tuple[str, ...] = ()  # prefixes: names that begin so do
        self.spared: set[str] = set()    # but not these
        self.nobody: tuple[str, ...] = ()  # prefixes of children that are None: PyTorch takes what is there for them, and drops it
        self.hooked = False              # somebody is to be called, and may change what fits
        whole = getattr(model.load_state_dict, "__func__", None) is not Module.load_state_dict
        if whole:
            self._rule("")
        self._visit(model, "", whole)

    def _rule(self, prefix: str) -> None:
        self.ruled += (prefix,)
        self.hooked = True

    def _visit(self, module: Module, prefix: str, own: bool) -> None:
        if not own and self._has_rules(module, prefix):
            own = True
            self._rule(prefix)
        self.hooked = self.hooked or bool(module._load_state_dict_post_hooks)
        buffers = ((name, value) for name, value in module._buffers.items() if name not in module._non_persistent_buffers_set)
        targets = {prefix + name: value for name, value in itertools.chain(module._parameters.items(), buffers) if value is not None}
        self.targets.update(targets)
        self.own.update(name for name, value in targets.items() if own or not is_plain(value))
        if getattr(type(module), "set_extra_state", Module.set_extra_state) is not Module.set_extra_state:
            self.extra.add(prefix + _EXTRA)
            if not own and prefix + _EXTRA in self.names:
                # It is called when this module's tensors are there and its children's are not: it may make or reset children.
                own = True
                self._rule(prefix)
                self.spared.update(targets)
        for name, child in module._modules.items():
            if child is not None:
                self._visit(child, f"{prefix}{name}.", own)
            else:
                self.nobody += (f"{prefix}{name}.",)

    def _has_rules(self, module: Module, prefix: str) -> bool:
        if module._load_state_dict_pre_hooks:
            return True
        loader = getattr(module._load_from_state_dict, "__func__", None)
        if loader not in _NORMS:
            return loader is not Module._load_from_state_dict
        # The rules of these two are known: a count that old files lack stays as it is, and averages that the module does not keep are an error.
        if not module.track_running_stats:
            return prefix + "running_mean" in self.names or prefix + "running_var" in self.names
        name = "num_batches_tracked"
        count = module._buffers.get(name)
        if count is None or count.is_meta or name in module._non_persistent_buffers_set:
            return True
        self.optional.add(prefix + name)
        return False

    def is_ruled(self, name: str) -> bool:
        return name in self.own or name.startswith(self.ruled) and name not in self.spared


def _span(tensor: torch.Tensor) -> int:
    """Bytes from its first element to its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    return (1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))) * tensor.element_size()


def _ties(targets: dict[str, torch.Tensor]) -> list[tuple[list[str], list[str]]]:
    """Names whose tensors share memory, and those of them that are all of it."""
    places: dict[Any, list[tuple[int, int, bool, str]]] = {}
    for name, tensor in targets.items():
        if is_plain(tensor) and not tensor.is_meta and tensor.numel() > 0:
            begin, span = tensor.data_ptr(), _span(tensor)
            places.setdefault(tensor.device, []).append((begin, begin + span, span == tensor.nbytes, name))
        else:
            places.setdefault(id(tensor), []).append((0, 1, True, name))
    ties = []
    for line in places.values():
        line.sort()
        first, end = 0, line[0][1]
        for at in range(1, len(line) + 1):
            if at < len(line) and line[at][0] < end:
                end = max(end, line[at][1])
                continue
            if at - first > 1:
                group = line[first:at]
                ties.append(([one[3] for one in group], [one[3] for one in group if one[2] and one[:2] == (group[0][0], end)]))
            if at < len(line):
                first, end = at, line[at][1]
    return ties


class _Plan:
    """Which tensor of a checkpoint goes to which of a module. pairs: there and then. ruled: through load_state_dict."""

    def __init__(self, model: Module, checkpoint: _native.Checkpoint) -> None:
        self.names = {name: number for number, name in enumerate(checkpoint.names())}
        self.tree = tree = _Tree(model, self.names)
        self.dropped: list[str] = []  # of tied ones: all names but one
        for group, whole in _ties(tree.targets):
            there = [name for name in group if name in self.names]
            kept = min([name for name in whole if name in self.names], default=min(whole, default=None))
            if kept is not None:
                self.dropped += [name for name in group if name != kept]
            if len(there) > 1 or any(map(tree.is_ruled, group)):  # the order in which they are written counts
                tree.own.update(there)
        self.pairs: list[tuple[int, torch.Tensor]] = []
        self.ruled: list[int] = []
        self.problems: list[str] = []
        for name, number in self.names.items():
            if tree.is_ruled(name):
                self.ruled.append(number)
            elif name in tree.targets:
                self._pair(name, number, tree.targets[name], checkpoint.info(number)[4])
        self.by_rules = tree.hooked or bool(self.ruled)

    def _pair(self, name: str, number: int, target: torch.Tensor, shape: tuple[int, ...]) -> None:
        wanted = tuple(target.shape)
        if shape != wanted and (shape, wanted) != ((1,), ()):
            self.problems.append(f"{name} is {wanted} in the module and {shape} in the file")
        elif target.is_meta:
            self.problems.append(f"{name} is on the meta device: give the module memory first, with to_empty(device=...)")
        else:
            self.pairs.append((number, target))

    def foresee(self) -> tuple[list[str], list[str]]:
        """Names that are missing, and unexpected ones, if nobody has rules."""
        tree = self.tree
        return ([name for name in (*tree.targets, *tree.extra) if name not in self.names and name not in tree.optional],
                [name for name in self.names if name not in tree.targets and name not in tree.extra and not name.startswith(tree.nobody)])

    def untie(self, missing: list[str], unexpected: list[str]) -> tuple[set[str], list[str]]:
        """As safetensors counts tied names: one is enough, and others are unexpected."""
        return set(missing).difference(self.dropped), unexpected + [name for name in self.dropped if name in self.names and name not in missing]

    def state(self, checkpoint: _native.Checkpoint, ruled: dict[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        """For load_state_dict. What was filled is its own source, and copied nowhere; of what nobody takes it has the name alone."""
        state = {}
        for name, number in self.names.items():
            tensor = ruled[number] if number in ruled else self.tree.targets.get(name)
            if tensor is None:
                info = checkpoint.info(number)
                tensor = torch.empty(info[4], dtype=DTYPES[info[2]], device="meta")
            state[name] = tensor
        return state


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
                target.copy_(self.tensors[name].reshape(target.shape))
        if self.straight:
            torch.autograd.graph.increment_version(self.straight)

    def close(self) -> None:
        if self.running is not None:
            self.running.load.close()


def _refuse(model: Module, problems: list[str], missing: Collection[str], unexpected: Collection[str], more: str = "") -> None:
    """RuntimeError, if there is anything to say."""
    if missing:
        problems = [*problems, "missing in the file: " + ", ".join(sorted(missing))]
    if unexpected:
        problems = [*problems, "unexpected in the file: " + ", ".join(sorted(unexpected))]
    if problems:
        raise RuntimeError(f"load_model: {type(model).__name__} and the checkpoint do not fit:\n    " + "\n    ".join(problems) + more)


def _fill(plan: _Plan, checkpoint: _native.Checkpoint, home: torch.device, backend: str) -> dict[int, torch.Tensor]:
    """Loads everything; returns what goes through load_state_dict, each in memory of its own."""
    ruled = {}
    for number in plan.ruled:
        info = checkpoint.info(number)
        ruled[number] = torch.empty(info[4], dtype=DTYPES[info[2]], device=home)
    pairs = [*plan.pairs, *ruled.items()]
    lanes: list[_Lane] = []
    try:
        for where in dict.fromkeys(target.device for _, target in pairs):
            lanes.append(_Lane(where, checkpoint, [pair for pair in pairs if pair[1].device == where], backend))
        for lane in lanes:
            lane.finish()
    finally:
        for lane in lanes:
            lane.close()
    return ruled


def load_model(model: Module, filename: Path, strict: bool = True, device: str | int | torch.device = "cpu", *, backend: str = "auto",
               lenient: bool = False) -> tuple[set[str], list[str]]:
    """Fills a module's parameters and persistent buffers from a checkpoint, where they are: as safetensors.torch.load_model, without a second copy of
    the model in memory.

        missing, unexpected = sidestream.torch.load_model(model, "model.safetensors")

    Tensors of the same dtype that are contiguous are written to straight from the files, on whatever devices they are; others are converted as
    load_state_dict does. Returns the names that the file lacks, a set, and those that the module lacks, a list; strict: RuntimeError for any. Names
    of one tied parameter count once: a second one in the file is unexpected.

    What has rules of its own is loaded by them: modules whose _load_from_state_dict is not PyTorch's plain one or that have load_state_dict
    pre-hooks, children of one whose set_extra_state the file has something for, a model with its own load_state_dict, parameters of a class of
    their own. Everything below such a module, and nothing beside it, is loaded to `device` first, and model.load_state_dict() takes it from there.
    It calls post-hooks, too.

    filename, backend, lenient: as in load_file. device: where those tensors are loaded to, "cpu" as in safetensors; parameters stay where they are.
    RuntimeError where a shape differs or a parameter is on the meta device, before anything is written; so too for names, but where rules or hooks
    have a say in them: then they are checked at the end. Any later error (IOFailed, Ctrl-C, a hook's) leaves the model partly filled, and of no use
    until it was loaded again."""
    if not isinstance(model, Module):
        raise TypeError(f"load_model: model is {type(model).__name__}; it takes a torch.nn.Module. For a dict of tensors there is load_file")
    backend = backend_name("load_model", backend)
    home = Where("load_model", device).device
    checkpoint = open_checkpoint(filename, lenient)
    try:
        plan = _Plan(model, checkpoint)
        missing, unexpected = plan.untie(*plan.foresee())
        if strict and not plan.tree.hooked:
            _refuse(model, plan.problems, missing, unexpected)
        else:
            _refuse(model, plan.problems, (), ())
        ruled = _fill(plan, checkpoint, home, backend)
        if plan.by_rules:
            found = model.load_state_dict(plan.state(checkpoint, ruled), strict=False)
            missing, unexpected = plan.untie(*found)
            if strict:
                _refuse(model, [], missing, unexpected, "\nWhat fits was written: with rules or hooks of a module's own the rest is known only then.")
        return missing, unexpected
    finally:
        checkpoint.close()
