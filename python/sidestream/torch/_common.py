"""What the modules of sidestream.torch share: native devices, current streams, and tensors over the library's memory."""
from __future__ import annotations

import functools
import math
import os
from typing import Any, Callable, TypeVar

import torch

from .. import _native
from .target import is_capturing

T = TypeVar("T")

BYTES = (1, 8)  # DLPack: unsigned, 8 bits. rebuild() gives bytes their dtype, so that types which DLPack does not know work too


def per_process(make: Callable[[str], T]) -> Callable[[str], T]:
    """Caches make(spec) for the process: a forked child makes its own and never touches its parent's."""
    made: dict[tuple[int, str], T] = {}

    @functools.wraps(make)
    def get(spec: str) -> T:
        key = (os.getpid(), spec)
        return made[key] if key in made else made.setdefault(key, make(spec))

    return get


@per_process
def open_device(spec: str) -> _native.Device:
    """The native device, opened once. spec: "cuda:1", "sim", "sim:t4"."""
    return _native.Device(spec)


def refuse_capture(what: str, index: int) -> None:
    """RuntimeError while the current stream of CUDA device `index` is being captured into a graph."""
    with torch.cuda.device(index):
        capturing = is_capturing()
    if capturing:
        raise RuntimeError(f"{what}: the current stream is being captured into a CUDA graph; call it outside of the capture")


def check_seconds(what: str, timeout: Any) -> None:
    """TypeError, ValueError: neither a number nor None."""
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float))):
        raise TypeError(f"{what}: timeout is {timeout!r}; give seconds, as a number, or None to wait for ever")
    if timeout is not None and math.isnan(timeout):
        raise ValueError(f"{what}: timeout is {timeout}; give seconds, or None to wait for ever")


def native_stream(what: str, stream: Any) -> int:
    """The CUstream of a torch.cuda.Stream, or the one that a number is."""
    native = getattr(stream, "cuda_stream", stream)
    if isinstance(native, bool) or not isinstance(native, int):
        raise TypeError(f"{what}: stream is {stream!r}; give a torch.cuda.Stream, or a CUstream as an int")
    return native


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a copy of its bytes is a copy of it: no subclass with a mind of its own, strided, not quantized."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided and not tensor.is_quantized


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, detached, with its elements next to each other in memory: itself, or a copy made on its device's current stream."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor
    return tensor.clone()


def rebuild(raw: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor, and no view, over raw's storage (bytes), with the dtype, shape and strides of `like`, which is dense."""
    return torch.empty(0, dtype=like.dtype, device=raw.device).set_(raw.untyped_storage(), 0, like.shape, like.stride())
