"""static=True: one set of tensors at fixed addresses, as CUDA graphs want their inputs, refilled for each batch."""
from __future__ import annotations

import sys
from typing import Any

import torch

from .layout import ALIGNMENT, Plan

__all__ = ["StaticSet"]


class StaticSet:
    """The set is cut from one flat buffer, in the layout of the packed copy, so one copy on the consumer's stream fills it.

    Autograd counts that copy as a change in place: what it saved of an earlier batch raises in backward instead of giving wrong
    gradients."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        """plan: of the first batch."""
        self.specs = plan.specs
        self.dtypes = plan.dtypes
        self.whole = [(0, 1, 8, (plan.nbytes,), None)]  # the specs of the packed part as one tensor of bytes
        with torch.inference_mode(False):  # else it could not be refilled outside of that mode
            self.flat = torch.empty(max(plan.nbytes, ALIGNMENT), dtype=torch.uint8, device=device)
            self.packed = [self._cut(i) for i in range(len(plan.specs))]
        self.places = plan.others.keys()
        self.others: dict[int, torch.Tensor] = {}
        self.streams: list[Any] = []  # that read the batch besides the consumer's own (used_on)

    def _cut(self, i: int) -> torch.Tensor:
        offset, _, bits, shape, strides = self.specs[i]
        dtype = self.dtypes.get(i) or _dtype(self.specs[i])
        numel = 1
        for size in shape:
            numel *= size
        part = self.flat[offset:offset + numel * bits // 8].view(dtype)
        return part.view(shape) if strides is None else part.as_strided(shape, strides)

    def check(self, plan: Plan) -> None:
        if plan.specs != self.specs or plan.dtypes != self.dtypes or plan.others.keys() != self.places:
            for spec, fixed in zip(plan.specs, self.specs):
                if spec != fixed:
                    raise ValueError(f"static=True: a tensor of shape {tuple(fixed[3])} and {_dtype(fixed)} is now {tuple(spec[3])} and "
                                     f"{_dtype(spec)} (or its strides or place changed). A fixed set takes batches of one layout: "
                                     "drop_last=True leaves out a short last batch")
            raise ValueError(f"static=True: the first batch had {len(self.specs) + len(self.places)} tensors, this one has "
                             f"{len(plan.specs) + len(plan.others)}, or others of them are packed. A fixed set takes batches of one layout")

    def references(self) -> int:
        """How often the caller holds a tensor of the set, of the first few."""
        some = [*self.packed[:4], *list(self.others.values())[:4]]
        return max((sys.getrefcount(some[i]) - 3 for i in range(len(some))), default=0)  # without the set's, the list's and the call's

    def wait(self) -> None:
        """The refill comes after what the streams of used_on have queued so far."""
        for stream in self.streams:
            torch.cuda.current_stream(self.flat.device).wait_stream(stream)
        self.streams.clear()

    def holds(self, t: torch.Tensor) -> bool:
        start, begin = t.untyped_storage().data_ptr(), self.flat.data_ptr()
        return begin <= start < begin + self.flat.numel() or any(start == other.data_ptr() for other in self.others.values())

    def refill_others(self, moved: dict[int, Any]) -> dict[int, torch.Tensor]:
        """moved: the leaves that are not packed, on the device."""
        for i, leaf in moved.items():
            fixed = self.others.get(i)
            if fixed is None:
                fixed = self.others[i] = _fixed(leaf)
            if not isinstance(leaf, torch.Tensor) or leaf.shape != fixed.shape or leaf.dtype != fixed.dtype or leaf.layout is not torch.strided:
                raise ValueError(f"static=True: {_said(fixed)} came back as {_said(leaf)}. A fixed set takes batches of one layout")
            fixed.copy_(leaf)
        return self.others


def _fixed(leaf: Any) -> torch.Tensor:
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.requires_grad:
        raise TypeError(f"static=True: a batch holds {_said(leaf)}, which cannot be refilled in place; "
                        "only strided tensors without gradient can")
    with torch.inference_mode(False):
        return torch.empty_like(leaf)


def _said(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return f"an object of type {type(leaf).__qualname__}"
    return f"a tensor of shape {tuple(leaf.shape)}, {leaf.dtype}, {leaf.layout}{', with gradient' if leaf.requires_grad else ''}"


def _dtype(spec: tuple) -> torch.dtype:
    return _NAMES[spec[1:3]]


_NAMES = {(6, 8): torch.bool, (4, 16): torch.bfloat16}
for _code, _name, _sizes in ((0, "int", (8, 16, 32, 64)), (1, "uint", (8, 16, 32, 64)), (2, "float", (16, 32, 64)), (5, "complex", (64, 128))):
    _NAMES |= {(_code, bits): getattr(torch, f"{_name}{bits}") for bits in _sizes}
