"""Pinning in place: the memory that tensors already have, without a second copy of it.

    with pin(model):                      # or: handle = pin(model) ... handle.unpin()
        weight.to("cuda", non_blocking=True)

Whole storages are pinned, not the part that a view shows: a driver refuses copies that begin in pinned memory and end outside.
"""
from __future__ import annotations

import os
import warnings
from typing import Any, Iterator

import torch

from .. import _native
from ._common import open_device
from .tree import flatten

__all__ = ["Pinned", "pin"]


class _Books:
    """What this process has pinned in place. A dropped handle stays here: memory freed while pinned would be handed out again, still wired to its
    old pages."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.handles: set[Pinned] = set()
        self.watched = False  # os.register_at_fork was called: there is no way back from it, hence once a process
        self.warned = False


_books = _Books()


def _before_fork() -> None:
    if _books.handles and _books.pid == os.getpid() and not _books.warned:
        _books.warned = True
        if any(handle._is_cuda for handle in _books.handles):
            why = ("parent and child now share the pages, and the first of them to write to one gets another page, while the GPU goes on with the "
                   "old one")
        else:
            why = "the software device does not mind, but on a GPU the first of parent and child to write to a page would part it from the GPU"
        warnings.warn(f"fork() while tensors are pinned in place: {why}. Fork first: start DataLoader workers before pin(), or start them with "
                      "multiprocessing_context='spawn' or 'forkserver'.", RuntimeWarning, stacklevel=3)


class Pinned:
    """What `pin` returns: undoes it, by unpin() or at the end of a `with` block. Keeps the tensors' memory alive until then."""

    def __init__(self, device: _native.Device, is_cuda: bool) -> None:
        self._device, self._is_cuda = device, is_cuda
        self._storages: list[torch.UntypedStorage] = []
        self._pid = os.getpid()
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes that this handle keeps pinned; 0 after unpin(). Storages that were pinned before by someone else (pin_memory()) do not count."""
        return self._nbytes

    def unpin(self) -> None:
        """Undoes it; again does nothing. Waits until the devices are done with all that is queued, since a copy in flight must not lose its pages.

        Memory that another handle pins as well stays pinned. Forked children leave their parent's pins alone."""
        if self._storages and self._pid == os.getpid() and self._is_cuda:
            _wait_for_devices()
        self._undo()

    def _undo(self) -> None:
        while self._storages:  # one that cannot be undone, and those before, stay in the books
            storage = self._storages[-1]
            if self._pid == os.getpid():
                _native.unpin(self._device, storage.data_ptr())
            self._nbytes -= storage.nbytes()
            self._storages.pop()
        _books.handles.discard(self)

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        try:
            _native.pin(self._device, storage.data_ptr(), storage.nbytes())
        except _native.Error as error:
            error.args = (f"pin: {name} ({_describe(tensor)}): {error}",)
            raise
        self._storages.append(storage)
        self._nbytes += storage.nbytes()

    def __enter__(self) -> Pinned:
        return self

    def __exit__(self, *_: object) -> None:
        self.unpin()

    def __repr__(self) -> str:
        return f"<Pinned: {len(self._storages)} storages, {self._nbytes} bytes>"


def pin(value: Any, *, device: str | torch.device | int | None = None) -> Pinned:
    """Pins the memory of a CPU tensor, of a module's parameters and buffers, or of all tensors and modules in a nested value, where it lies.

    Afterwards `is_pinned()` is true and `.to("cuda", non_blocking=True)` is asynchronous. Storages that several tensors share are pinned once, and
    pages that several handles share stay pinned until the last is undone. What is in memory that is pinned already is left to who pinned it.

    Fork first: workers that are started with fork while memory is pinned part it from the GPU at the next write; a RuntimeWarning says so, once.
    A handle that is dropped without unpin() stays pinned, and its tensors alive, until the process ends. A parameter that is replaced later
    (`module.half()`) is not pinned; the handle still holds the old one.

    value: tensor, module, or dict, list, tuple, ... of them. device: where copies go; None: the current CUDA device, or the software device where
    there is no GPU (there it changes nothing that PyTorch sees). ValueError: a tensor that is not in CPU memory; TypeError: no tensor at all;
    `sidestream.OverBudget`, `OutOfHostMemory`: more than may be pinned; each names the tensor, and nothing of `value` stays pinned."""
    spec = _spec(device)
    handle = Pinned(open_device(spec), spec.startswith("cuda"))
    seen: set[int] = set()
    ours = {storage.data_ptr() for other in _books.handles for storage in other._storages}
    try:
        for name, tensor in _tensors(value):
            _check(name, tensor)
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0 or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            if not handle._is_cuda or storage.data_ptr() in ours or not tensor.is_pinned():  # else somebody else pinned it, and nobody counts
                handle._add(name, tensor)
    except BaseException:
        handle._undo()  # nothing can be in flight on it yet
        raise
    if handle._storages:
        _remember(handle)
    return handle


def _remember(handle: Pinned) -> None:
    global _books
    if _books.pid != os.getpid():  # forked: what is in the books is the parent's
        watched, _books = _books.watched, _Books()
        _books.watched = watched
    _books.handles.add(handle)
    if not _books.watched:
        _books.watched = True
        os.register_at_fork(before=_before_fork)


def _spec(device: str | torch.device | int | None) -> str:
    if device is None:
        return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "sim"
    if isinstance(device, str) and device.startswith("sim"):
        return device
    if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
        raise TypeError(f"pin: device is {device!r}; name the one that the copies go to, as 'cuda:0'")
    try:
        named = torch.device(device) if not isinstance(device, int) else torch.device("cuda", device)
    except RuntimeError:
        named = None
    if named is None or named.type != "cuda":
        raise ValueError(f"pin: device {device!r} is no CUDA device; name the one that the copies go to, as 'cuda:0'")
    return f"cuda:{torch.cuda.current_device() if named.index is None else named.index}"


def _tensors(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if not isinstance(value, (torch.Tensor, torch.nn.Module)) and not flatten(value)[0]:
        raise TypeError(f"pin: {type(value).__name__} holds no tensor; pass a tensor, a module, or a nest of them")
    return _walk(value, "")


def _walk(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name or "the tensor", value
    elif isinstance(value, torch.nn.Module):
        for kind in (value.named_parameters, value.named_buffers):
            yield from ((f"{name}.{inner}" if name else inner, t) for inner, t in kind())
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _walk(item, f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _walk(item, f"{name}[{i}]")
    else:
        for i, leaf in enumerate(flatten(value)[0]):
            if leaf is not value:
                yield from _walk(leaf, f"{name}<{type(value).__name__} {i}>")


def _check(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided:
        raise ValueError(f"pin: {name} ({_describe(tensor)}) is {tensor.layout}; pin its parts, as indices() and values()")
    if tensor.device.type != "cpu":
        raise ValueError(f"pin: {name} ({_describe(tensor)}) is on {tensor.device}; only CPU memory can be pinned")


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _wait_for_devices() -> None:
    """For every CUDA device that this process uses: pinned memory is pinned for all of them."""
    for index in range(torch.cuda.device_count()):
        if torch._C._cuda_hasPrimaryContext(index):
            torch.cuda.synchronize(index)
