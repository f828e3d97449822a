"""Moves data between host memory and a GPU on a side stream while the GPU computes.

    device = sidestream.Device()                        # the first GPU, else the software device
    def compute(stream, item):                          # queues work, and returns
        stream.affine(item.result, item.data.view("float32"), 2, 1)
    outputs = [numpy.empty_like(x) for x in inputs]
    stats = sidestream.Pipeline(device, inputs, compute, outputs).run()

Needs nothing but the standard library; arrays come and go through the buffer protocol and DLPack, so NumPy, PyTorch, CuPy and others work
without being imported here. For PyTorch loops see sidestream.torch.

What there is; help(sidestream.Pipeline) and so on has the details

    Device        a GPU ("cuda:0") or the software device ("sim"); list_devices() names them
    Pipeline      source -> copy in -> compute -> copy out -> sink, all at the same time, in bounded memory; Item is what compute gets
    Stream        a queue of copies and operations; Event marks a place in it; Stream.wrap(device, number) takes one of yours
    Buffer        device or pinned memory, from device.empty(shape, dtype) and device.pool.empty(shape, dtype)
    PinnedPool    page-locked host memory within a budget of bytes: device.pool
    Slots, Slot   memory that is written and read again and again, with a fence for each writer and reader: rings, lists, tables
    Log           what ran when: account(), drawings, trace(); bound() is the time that no schedule can beat
    xxh3_digest   folds the sums of Stream.xxh3_blocks into the hash that `xxhsum -H3` prints

The same copies by hand

    copies, kernels = sidestream.Stream(device), sidestream.Stream(device)
    there = device.empty(array.shape, array.dtype)
    copies.copy(there, array)                           # returns at once where `array` is pinned: device.pool.empty(...)
    kernels.wait(copies)                                # what is queued on `kernels` from here on comes after the copy
    kernels.affine(there, there, 2, 1)
    kernels.synchronize()                               # the host waits; Ctrl-C ends it

Rules

    Sizes are bytes, times are seconds unless a name ends in _ns. 0 as a depth, size or time limit is the default.
    Queued work keeps the objects that it uses. Memory of items and slots ends with them; used later, it raises WrongState.
    Calls that may block let other threads run, and Ctrl-C ends them. Objects may be shared by threads.
    Objects from before a fork raise Forked: open devices in the process that uses them.
    Nothing is printed; what the library has to say goes to logging.getLogger("sidestream").

Exceptions, each a sidestream.Error, which is a RuntimeError with `status`, `where`, `os_errno` and `device_code`; the message says what to do

    InvalidArgument, TooLarge                          an argument is at fault (ValueErrors too)
    WrongState, WouldDeadlock, Stale, Forked           the call does not fit what the object or the thread is in
    OutOfDeviceMemory, OutOfHostMemory, OverBudget     memory; OverBudget: the pinned pool's
    NoDevice, DriverTooOld, NoLibrary, Unsupported     what this machine does not have
    DeviceError, DeviceLost, Stuck                     the driver failed; the process must be restarted; the device is not done in time
    IOFailed, SystemFailed, CallbackFailed             reading or writing a file, the system, a callback
    Cancelled, NoMoreItems, NotReady, NotFound         somebody cancelled; there is no more; not yet; no such key (a LookupError)
"""
from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from sidestream import _native
from sidestream._native import Buffer, Device, Error, Event, Item, PinnedPool, Pipeline, Slot, Slots, Stream, bound, list_devices, xxh3_digest

# Exceptions by their names alone, and not in __all__, where help() would spread out what each inherits; "as" says that they are ours to give.
from sidestream._native import CallbackFailed as CallbackFailed
from sidestream._native import Cancelled as Cancelled
from sidestream._native import DeviceError as DeviceError
from sidestream._native import DeviceLost as DeviceLost
from sidestream._native import DriverTooOld as DriverTooOld
from sidestream._native import Forked as Forked
from sidestream._native import InvalidArgument as InvalidArgument
from sidestream._native import IOFailed as IOFailed
from sidestream._native import NoDevice as NoDevice
from sidestream._native import NoLibrary as NoLibrary
from sidestream._native import NoMoreItems as NoMoreItems
from sidestream._native import NotFound as NotFound
from sidestream._native import NotReady as NotReady
from sidestream._native import OutOfDeviceMemory as OutOfDeviceMemory
from sidestream._native import OutOfHostMemory as OutOfHostMemory
from sidestream._native import OverBudget as OverBudget
from sidestream._native import Stale as Stale
from sidestream._native import Stuck as Stuck
from sidestream._native import SystemFailed as SystemFailed
from sidestream._native import TooLarge as TooLarge
from sidestream._native import Unsupported as Unsupported
from sidestream._native import WouldDeadlock as WouldDeadlock
from sidestream._native import WrongState as WrongState

__all__ = [
    "Buffer", "Device", "Error", "Event", "Item", "Log", "PinnedPool", "Pipeline", "Slot", "Slots", "Stream", "__version__", "bound",
    "list_devices", "xxh3_digest",
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
