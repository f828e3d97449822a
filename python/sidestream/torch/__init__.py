"""Feeds PyTorch loops: copies run on a side stream while the GPU computes. And loads checkpoints, reading and copying at once.

    loader = sidestream.torch.Prefetcher(loader)      # the one changed line
    for batch in loader: ...                          # batches are on the GPU, in order, safe to keep

    weights = sidestream.torch.load_file("model.safetensors", device="cuda")

Needs PyTorch 2.9 or newer: pip install '.[torch]' brings it. Names are loaded when they are first used; importing this package imports nothing of
PyTorch.
"""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .host import HostCopy, to_host
    from .load import FileMissing, TensorStream, last_load, load_file, stream
    from .load_into import load_model
    from .load_slices import Slice, safe_open
    from .overlap import overlap_transfer_and_compute
    from .pinning import Pinned, pin
    from .prefetcher import Prefetcher, used_on
    from .stats import Stats

# Name: the module that has it.
_WHERE = {
    "FileMissing": "load",
    "HostCopy": "host",
    "Pinned": "pinning",
    "Prefetcher": "prefetcher",
    "Slice": "load_slices",
    "Stats": "stats",
    "TensorStream": "load",
    "last_load": "load",
    "load_file": "load",
    "load_model": "load_into",
    "overlap_transfer_and_compute": "overlap",
    "pin": "pinning",
    "safe_open": "load_slices",
    "stream": "load",
    "to_host": "host",
    "used_on": "prefetcher",
}

__all__ = [
    "FileMissing", "HostCopy", "Pinned", "Prefetcher", "Slice", "Stats", "TensorStream", "last_load", "load_file", "load_model",
    "overlap_transfer_and_compute", "pin", "safe_open", "stream", "to_host", "used_on",
]


def __getattr__(name: str) -> Any:
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{where}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError("sidestream.torch needs PyTorch 2.9 or newer, and this Python has none: pip install 'torch>=2.9', as the extra [torch] "
                          "of the package does", name="torch") from None
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_WHERE))
