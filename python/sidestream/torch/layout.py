"""Where each tensor of a batch lies in the one packed copy, and which of them go another way."""
from __future__ import annotations

from typing import Any

import torch

__all__ = ["ALIGNMENT", "Plan", "plan_of"]

ALIGNMENT = 64  # bytes: of each tensor in a slot

_TENSOR = torch.Tensor
# (offset in bytes, DLPack type code, bits, shape, strides in elements or None): as _native.Feeder.next takes them.
Spec = tuple[int, int, int, tuple[int, ...], "tuple[int, ...] | None"]


def _dtypes() -> dict[torch.dtype, tuple[int, int, int, bool]]:
    """dtype: (DLPack code, bits, bytes an element, whether the tensor comes as uint8 and is then viewed as dtype)."""
    known = {"uint8": (1, 8), "uint16": (1, 16), "uint32": (1, 32), "uint64": (1, 64),
             "int8": (0, 8), "int16": (0, 16), "int32": (0, 32), "int64": (0, 64),
             "float16": (2, 16), "float32": (2, 32), "float64": (2, 64), "bfloat16": (4, 16),
             "complex64": (5, 64), "complex128": (5, 128), "bool": (6, 8)}
    carried = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2")
    table = {getattr(torch, name): (code, bits, bits // 8, False) for name, (code, bits) in known.items() if hasattr(torch, name)}
    return table | {getattr(torch, name): (1, 8, 1, True) for name in carried if hasattr(torch, name)}


_DTYPES = _dtypes()
_STRIDED = torch.strided
_PARAMETER = torch.nn.Parameter


class Sources:
    """The host tensors of a batch. The feeder holds it until they have been read for good, and the reader no longer than that."""

    __slots__ = ("tensors", "__weakref__")

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors


class Plan:
    """A batch's layout.

    pieces: (address, bytes, offset) of each packed tensor; None once they are submitted, as are the sources.
    specs: the same tensors as they will be in the slot.
    dtypes: {position among the packed: dtype} of those that come as uint8.
    others: {position among the leaves: leaf} of what is not packed: moved with .to(), or already on a device.
    nbytes: of the slot that is needed; 0: nothing is packed.   sources: keeps the host tensors."""

    __slots__ = ("pieces", "specs", "dtypes", "others", "nbytes", "sources", "on_device")

    def __init__(self) -> None:
        self.pieces: Any = []
        self.specs: list[Spec] = []
        self.dtypes: dict[int, torch.dtype] = {}
        self.others: dict[int, Any] = {}
        self.nbytes = 0
        self.sources: Any = Sources([])
        self.on_device = False


def plan_of(leaves: list[Any], pack: bool = True) -> Plan:
    """Lays out `leaves` (of tree.flatten). pack False: everything goes with .to()."""
    plan = Plan()
    pieces, specs, tensors = plan.pieces, plan.specs, plan.sources.tensors
    offset = end = 0
    for i, t in enumerate(leaves):
        known = _DTYPES.get(t.dtype) if pack and _plain(t) else None
        if known is None:
            plan.others[i] = t
            if isinstance(t, _TENSOR) and not t.is_cpu:
                plan.on_device = True
            continue
        code, bits, size, carried = known
        strides = None
        if not t.is_contiguous():
            if _dense(t):
                strides = t.stride()
            else:
                t = t.contiguous()
        nbytes = t.numel() * size
        pieces.append((t.data_ptr(), nbytes, offset))
        if carried:
            plan.dtypes[len(specs)] = t.dtype
        specs.append((offset, code, bits, t.shape, strides))
        tensors.append(t)
        end = offset + nbytes
        offset = (end + ALIGNMENT - 1) & -ALIGNMENT
    plan.nbytes = end
    return plan


def _plain(t: Any) -> bool:
    """Memory of the host that holds exactly the tensor's values, and nothing of autograd's."""
    cls = t.__class__
    return ((cls is _TENSOR or cls is _PARAMETER) and t.is_cpu and t.layout is _STRIDED and not t.requires_grad and t.numel() > 0
            and not t.is_conj() and not t.is_neg())


def _dense(t: torch.Tensor) -> bool:
    """Each element once, without gaps: some order of the dimensions is contiguous."""
    expected = 1
    for stride, size in sorted(zip(t.stride(), t.shape)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
