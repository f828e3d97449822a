"""Results on their way back to the host: a side stream copies them into pinned memory, and nobody reads them before they have arrived.

    copy = to_host(model(x))        # returns at once; the GPU goes on
    ...                             # the next step
    logits = copy.get()             # waits for this copy alone
"""
from __future__ import annotations

import atexit
import collections
import logging
import threading
import time
from typing import Any

import torch

from .. import _native
from ._common import BYTES, check_seconds, dense, is_plain, native_stream, open_device, per_process, rebuild, refuse_capture
from .target import from_dlpack, raw_stream
from .tree import flatten, unflatten

__all__ = ["HostCopy", "to_host"]

_log = logging.getLogger("sidestream.torch")
_EXIT_SECONDS = 30.0  # the longest that the end of the process waits for copies


class _Flight:
    """Copies of one call on one device. `held` (sources, pinned blocks) must outlive what `event` covers; whoever sees it done lets go of them."""

    __slots__ = ("lane", "event", "held", "done")

    def __init__(self, lane: _Lane, event: _native.Event, held: list[Any]) -> None:
        self.lane, self.event, self.held = lane, event, held
        self.done = False

    def query(self) -> bool:
        if not self.done and self.event.query():
            self._land()
        return self.done

    def wait(self, timeout: float | None) -> bool:
        """timeout: seconds, None for ever; False where it ran out."""
        if self.done or (timeout is not None and timeout <= 0):
            return self.query()
        try:
            self.event.wait(timeout or 0.0)
        except _native.Stuck:
            if timeout is None:
                raise
            return False
        self._land()
        return True

    def _land(self) -> None:
        self.done = True
        self.held = []


class _Lane:
    """The side stream of one device, for the life of the process: one made for each call would cost a creation each.

    `flights` are the copies whose handles may be gone: their sources and pinned blocks stay until the device is done with them."""

    def __init__(self, spec: str) -> None:
        self.device = open_device(spec)
        self.stream = _native.Stream(self.device)
        self.flights: collections.deque[_Flight] = collections.deque()
        self.lock = threading.RLock()  # of flights. Held over queries, never over waits; re-entrant, since a collection may run anything

    def send(self, sources: list[torch.Tensor], after: int) -> tuple[list[torch.Tensor], _Flight] | None:
        """Queues copies behind what the native stream `after` has queued so far. None, and nothing queued, where the pinned budget is short.

        sources: dense, on this device, an element or more each. Returns CPU tensors of the same shapes, strides and dtypes that hold nothing yet."""
        self.sweep()
        try:
            blocks = [_native.HostBuffer(self.device, t.numel() * t.element_size()) for t in sources]
        except (_native.OverBudget, _native.OutOfHostMemory) as error:
            _warn_short(error)
            return None
        held: list[Any] = []
        event = flight = None
        try:
            for source, block in zip(sources, blocks):
                held += (source, block)
                event = self.copy(held, block, source, after)
        finally:  # also where the second of three failed: the first is under way
            if event is not None:
                flight = _Flight(self, event, held)
                with self.lock:
                    self.flights.append(flight)
        assert flight is not None
        return [rebuild(from_dlpack(block.capsule(*BYTES, (block.nbytes,))), t) for t, block in zip(sources, blocks)], flight

    def copy(self, held: list[Any], block: _native.HostBuffer, source: torch.Tensor, after: int) -> _native.Event:
        return _native.copy_d2h(self.device, self.stream, after, block, source.data_ptr(), source.numel() * source.element_size())

    def let_wait(self, flight: _Flight, stream: int | None) -> None:
        raw = raw_stream(self.device.ordinal) if stream is None else stream
        _native.Stream.wrap(self.device, raw).wait(flight.event)

    def sweep(self) -> None:
        """Lets go of what has landed. One stream, so the oldest lands first."""
        landed = []  # dropped outside of the lock: the last reference to a source may run anything
        with self.lock:
            while self.flights:
                flight = self.flights.popleft()
                if not flight.event.query():
                    self.flights.appendleft(flight)
                    break
                landed.append(flight)
        for flight in landed:
            flight.query()

    def finish(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        return all(flight.wait(max(end - time.monotonic(), 0.001)) for flight in list(self.flights))


class _SoftwareLane(_Lane):
    """For tests: CPU tensors stand for tensors of the software device. What does not lie in its memory is brought there first."""

    def copy(self, held: list[Any], block: _native.HostBuffer, source: torch.Tensor, after: int) -> _native.Event:
        try:
            return super().copy(held, block, source, after)
        except _native.InvalidArgument:
            from .overlap import overlap_transfer_and_compute
            [there] = overlap_transfer_and_compute([source], None, None, lambda x: x, device="sim")
            held.append(there)
            return super().copy(held, block, there, after)

    def let_wait(self, flight: _Flight, stream: int | None) -> None:
        flight.event.wait()


@per_process
def _lane(spec: str) -> _Lane:
    lane = (_SoftwareLane if spec.startswith("sim") else _Lane)(spec)
    _at_exit(lane)
    return lane


def _at_exit(lane: _Lane) -> None:
    def finish() -> None:
        if not lane.finish(_EXIT_SECONDS):
            _log.warning("to_host: copies were still under way after %g s; their memory is kept", _EXIT_SECONDS)

    atexit.register(finish)


_short_was_said = False


def _warn_short(error: Exception) -> None:
    global _short_was_said
    if not _short_was_said:
        _short_was_said = True
        _log.warning("to_host: no pinned memory, so this and further copies that find none block as .cpu() does: %s", error)


class HostCopy:
    """A copy to the host that is under way: what `to_host` returns.

    Dropping it early is fine: source and destination live until the device is done with them."""

    __slots__ = ("_value", "_flights", "__weakref__")

    def __init__(self, value: Any, flights: list[_Flight]) -> None:
        self._value, self._flights = value, flights

    def ready(self) -> bool:
        """Whether everything has arrived. Does not block."""
        return all([flight.query() for flight in self._flights])

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks, without the GIL, until everything has arrived. timeout: seconds, None for ever; False where it ran out."""
        check_seconds("wait", timeout)
        end = None if timeout is None else time.monotonic() + timeout
        return all(flight.wait(None if end is None else end - time.monotonic()) for flight in self._flights)

    def get(self, timeout: float | None = None) -> Any:
        """What `to_host` was given, on the CPU: waits until it has arrived. The same objects at each call. TimeoutError after `timeout` seconds.

        The tensors lie in pinned memory, which is limited: clone() those that you keep for long."""
        check_seconds("get", timeout)
        if not self.wait(timeout):
            raise TimeoutError(f"to_host: the copy has not arrived after {timeout:g} s")
        return self._value

    def before_overwrite(self, stream: torch.cuda.Stream | None = None) -> None:
        """Makes what `stream` (None: the current one) is given from now on come after the copy, without blocking the host: for a source that is
        written to again in place, such as the output of a CUDA graph before its next replay."""
        native = None if stream is None else native_stream("before_overwrite", stream)
        for flight in self._flights:
            flight.lane.let_wait(flight, native)

    def __repr__(self) -> str:
        return f"<HostCopy of a {type(self._value).__name__}, {'ready' if self.ready() else 'under way'}>"


def to_host(tensor: Any, *, device: str | None = None) -> HostCopy:
    """Starts copying a tensor, or every tensor in a nested batch, to pinned host memory, on a side stream. Does not block; the GPU goes on.

    The copy comes after what the current stream of the tensor's device has queued so far. Values, shapes, dtypes and (dense) strides are those of
    `.detach().cpu()`: the result takes no part in autograd. The source is held until it has been read, also when the handle is dropped. As
    with any asynchronous read, do not write to it in place before `ready()`, or say `before_overwrite()`; rebinding or freeing it is fine.

    Copied at once, as by `.detach().cpu()`: tensors of other devices and layouts (sparse, quantized), subclasses, and all where pinned memory is
    short (logged once). CPU tensors and what is no tensor are passed on as they are; objects with a method `to` move themselves.

    tensor: tensor, or dict, list, tuple, dataclass, ... of such. device: "sim" takes CPU tensors for tensors of the software device, for tests.
    RuntimeError while the current stream is being captured: a graph cannot contain the wait of the host."""
    if device is not None and not (isinstance(device, str) and (device == "sim" or device.startswith("sim:"))):
        raise (ValueError if isinstance(device, str) else TypeError)(
            f"to_host: device is {device!r}; leave it out (tensors know where they are), or give 'sim' for the software device")
    leaves, node = flatten(tensor)
    groups: dict[str, list[int]] = {}
    for i, leaf in enumerate(leaves):
        where = _spec_of(leaf, device) if isinstance(leaf, torch.Tensor) else None
        if where is not None:
            groups.setdefault(where, []).append(i)
        elif isinstance(leaf, torch.nn.Module):
            raise TypeError(f"to_host: {type(leaf).__name__} is a module, which .cpu() would move, not copy; pass its state_dict()")
        else:
            leaves[i] = leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf.to("cpu")
    flights = []
    for where, indices in groups.items():
        sources = [dense(leaves[i]) for i in indices]
        sent = _lane(where).send(sources, _stream_before(where))
        if sent is None:
            results = [t.cpu() for t in sources]
        else:
            results, flight = sent
            flights.append(flight)
        for i, result in zip(indices, results):
            leaves[i] = result
    return HostCopy(unflatten(node, leaves), flights)


def _spec_of(tensor: torch.Tensor, device: str | None) -> str | None:
    """The device that copies it; None: nobody, it goes by .cpu()."""
    if not is_plain(tensor) or tensor.numel() == 0:
        return None
    if tensor.is_cuda:
        return f"cuda:{tensor.device.index}"
    return device if tensor.device.type == "cpu" else None


def _stream_before(spec: str) -> int:
    """The native stream that the copy comes after."""
    if not spec.startswith("cuda"):
        return -1
    index = int(spec.partition(":")[2])
    refuse_capture("to_host", index)
    return raw_stream(index)
