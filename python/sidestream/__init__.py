"""Moves data between host memory and a GPU on a side stream while the GPU computes.

    device = sidestream.Device()                        # the first GPU, else the software device
    def compute(stream, item):                          # queues work, and returns
        stream.affine(item.result, item.data.view("float32"), 2, 1)
    outputs = [numpy.empty_like(x) for x in inputs]
    stats = sidestream.Pipeline(device, inputs, compute, outputs).run()

Needs nothing but the standard library; arrays come and go through the buffer protocol and DLPack, so NumPy, PyTorch, CuPy and others work
without being imported here. For PyTorch loops see sidestream.torch. What the library has to say goes to logging.getLogger("sidestream").

Sizes are bytes, times are seconds unless a name ends in _ns. Calls that may block let other threads run. Objects from before a fork raise Forked.
"""
from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from sidestream import _native
from sidestream._native import (
    Buffer,
    CallbackFailed,
    Cancelled,
    Device,
    DeviceError,
    DeviceLost,
    DriverTooOld,
    Error,
    Event,
    Forked,
    InvalidArgument,
    IOFailed,
    Item,
    NoDevice,
    NoLibrary,
    NoMoreItems,
    NotFound,
    NotReady,
    OutOfDeviceMemory,
    OutOfHostMemory,
    OverBudget,
    PinnedPool,
    Pipeline,
    Slot,
    Slots,
    Stale,
    Stream,
    Stuck,
    SystemFailed,
    TooLarge,
    Unsupported,
    WouldDeadlock,
    WrongState,
    bound,
    list_devices,
    xxh3_digest,
)

__all__ = [
    "Buffer", "CallbackFailed", "Cancelled", "Device", "DeviceError", "DeviceLost", "DriverTooOld", "Error", "Event", "Forked", "IOFailed",
    "InvalidArgument", "Item", "Log", "NoDevice", "NoLibrary", "NoMoreItems", "NotFound", "NotReady", "OutOfDeviceMemory", "OutOfHostMemory",
    "OverBudget", "PinnedPool", "Pipeline", "Slot", "Slots", "Stale", "Stream", "Stuck", "SystemFailed", "TooLarge", "Unsupported", "WouldDeadlock",
    "WrongState", "__version__", "bound", "list_devices", "xxh3_digest",
]

__version__: str = _native.version()


class Log(_native.Log):
    """What ran when on the device, and what overlapped.

    Pipelines fill it (log=...); work of your own is put into span(). spans(), account() and the drawings wait for the logged work.
    """

    @contextlib.contextmanager
    def span(self, stream: Stream, lane: str = "compute", name: str = "compute", item: int | None = None, nbytes: int = 0) -> Iterator[None]:
        """What is queued on `stream` in the block is one span. lane: "H2D", "compute" or "D2H"; name: 23 bytes at most."""
        number = self.begin(stream, lane, name, item, nbytes)
        try:
            yield
        finally:
            self.end(stream, number)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Writes Chrome trace JSON, for chrome://tracing and Perfetto. The file is whole or not there: it is written beside `path` and renamed.

        Raises OSError.
        """
        beside = f"{os.fspath(path)}.{os.getpid()}.part"
        try:
            with open(beside, "w", encoding="utf-8") as file:
                file.write(self.trace_text())
            os.replace(beside, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside)
            raise
