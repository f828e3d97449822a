"""The function that the field teaches, done right: copy i+1 runs while i is computed on, results may be kept, and any host memory will do.

    results = overlap_transfer_and_compute(tensors, compute_stream, transfer_stream, lambda x: x @ weight)
"""
from __future__ import annotations

import atexit
import collections
import contextlib
import os
import threading
from typing import Any, Callable, ContextManager, Iterable, Sequence

import torch

from .. import _native
from ._common import BYTES, dense, is_plain, open_device, rebuild, refuse_capture
from .target import from_dlpack
from .tree import flatten

__all__ = ["overlap_transfer_and_compute"]

_ALIGN = 512  # bytes between slots: what PyTorch's own blocks are aligned to


class _Software:
    """Where there is no GPU: the software device, whose memory the CPU computes on. The host itself is the reader."""

    torch_device = torch.device("cpu")

    def __init__(self, spec: str) -> None:
        self.native = open_device(spec)

    def feeder(self, slots: int, slot_bytes: int) -> _native.Feeder:
        return _native.Feeder(self.native, slots=slots, slot_bytes=slot_bytes, queue=slots, timing=False)

    def reader(self, i: int) -> int:
        return -1

    def computing(self, i: int) -> ContextManager[Any]:
        return contextlib.nullcontext()

    def hand_over(self, results: list[Any], loans: list[_native.Loan]) -> None:
        pass

    def finish(self) -> None:
        pass

    def end_later(self, feeders: list[_native.Feeder]) -> None:
        _end(self.native, feeders)


class _Cuda:
    """A CUDA device: item i is computed on stream i % n; the caller's current stream comes before all of it, and after."""

    def __init__(self, computes: list[torch.cuda.Stream], transfer: torch.cuda.Stream | None) -> None:
        self.torch_device = computes[0].device
        index = self.torch_device.index
        refuse_capture("overlap_transfer_and_compute", index)
        self.native = open_device(f"cuda:{index}")
        self.transfer = None if transfer is None else _native.Stream.wrap(self.native, transfer.cuda_stream)
        self.current = torch.cuda.current_stream(self.torch_device)
        self.computes = computes
        self.raw = [stream.cuda_stream for stream in computes]
        self.others = [stream for stream in dict.fromkeys(computes) if stream != self.current]
        for stream in self.others:  # weights may have been made on the current stream a line ago
            stream.wait_stream(self.current)

    def feeder(self, slots: int, slot_bytes: int) -> _native.Feeder:
        stride = -(-slot_bytes // _ALIGN) * _ALIGN
        slab = torch.empty(slots * stride, dtype=torch.uint8, device=self.torch_device)
        return _native.Feeder(self.native, slots=slots, slot_bytes=slot_bytes, queue=slots, timing=False, memory=slab.data_ptr(), stride=stride,
                              memory_stream=self.current.cuda_stream, owner=slab, copy_stream=self.transfer)

    def reader(self, i: int) -> int:
        return self.raw[i % len(self.raw)]

    def computing(self, i: int) -> ContextManager[Any]:
        return torch.cuda.stream(self.computes[i % len(self.computes)])

    def hand_over(self, results: list[Any], loans: list[_native.Loan]) -> None:
        """What the current stream does from here on comes after the results, and their memory is not reused under it."""
        for stream in self.others:
            self.current.wait_stream(stream)
        if self.others:
            for leaf in flatten(results)[0]:
                if isinstance(leaf, torch.Tensor) and leaf.is_cuda and leaf.layout == torch.strided:
                    leaf.record_stream(self.current)
        for loan in loans:  # record_stream does not reach these
            if loan.alive:
                loan.use(self.current.cuda_stream)

    def finish(self) -> None:
        for stream in dict.fromkeys(self.computes):
            stream.synchronize()

    def end_later(self, feeders: list[_native.Feeder]) -> None:
        """To end a feeder is to wait for the readers of its slots: at the next call after they are done, or at exit."""
        done = torch.cuda.Event()
        done.record(self.current)
        with _lock:
            _ending.append((done, self.native, feeders))


_ending: collections.deque[tuple[torch.cuda.Event, _native.Device, list[_native.Feeder]]] = collections.deque()
_lock = threading.Lock()  # of _ending; nobody waits for the device while he holds it


def _end(device: _native.Device, feeders: list[_native.Feeder]) -> None:
    """Lets go of the feeders, whose work is done, and of their memory; where results keep slots, with the last of them."""
    for feeder in feeders:
        feeder.close()
    feeders.clear()
    device.now_ns()  # as every call into the library does, it buries what has ended


def _end_done(all_of_them: bool = False) -> None:
    while True:
        with _lock:
            if not _ending or not (all_of_them or _ending[0][0].query()):
                return
            done, device, feeders = _ending.popleft()
        done.synchronize()
        _end(device, feeders)


class _Run:
    """One call. `ahead` are the items whose copies are queued and that nobody has taken: at most `buffers`.

    A slot comes back when its item's tensor dies. Where that lives on in a result, further slots come from a further feeder, so that `buffers`
    slots go round however many results keep theirs."""

    def __init__(self, side: _Software | _Cuda, tensors: list[torch.Tensor], buffers: int) -> None:
        self.side, self.buffers = side, buffers
        self.tensors = tensors
        self.feeders: list[_native.Feeder] = []
        self.ahead: collections.deque[_native.Feeder | None] = collections.deque()
        self.submitted = 0
        self.kept: list[_native.Loan] = []  # of results

    def results(self, compute_func: Callable[[torch.Tensor], Any]) -> list[Any]:
        results = []
        for i in range(len(self.tensors)):
            while len(self.ahead) < self.buffers and self.submitted < len(self.tensors):
                self._submit(self.submitted)
            loan, x = self._take(i)
            with self.side.computing(i):
                results.append(compute_func(x))
            del x
            if loan is not None and loan.alive:
                self.kept.append(loan)
        return results

    def _submit(self, i: int) -> None:
        tensor = self.tensors[i]
        feeder = None
        if tensor.device.type == "cpu" and is_plain(tensor) and tensor.numel() > 0:
            tensor = self.tensors[i] = dense(tensor)
            feeder = self._feeder_with_room(i)
            feeder.submit([(tensor.data_ptr(), tensor.numel() * tensor.element_size(), 0)], tensor)
        self.ahead.append(feeder)
        self.submitted += 1

    def _feeder_with_room(self, i: int) -> _native.Feeder:
        if self.feeders:
            feeder = self.feeders[-1]
            if sum(1 for f in self.ahead if f is feeder) + feeder.held() < self.buffers:
                return feeder
        largest = max(t.numel() * t.element_size() for t in self.tensors[i:])
        self.feeders.append(self.side.feeder(min(self.buffers, len(self.tensors) - i), largest))
        return self.feeders[-1]

    def _take(self, i: int) -> tuple[_native.Loan | None, torch.Tensor]:
        feeder, tensor = self.ahead.popleft(), self.tensors[i]
        if feeder is None:  # empty, of another layout or device: nothing to overlap
            with self.side.computing(i):
                return None, tensor.detach().to(self.side.torch_device)
        nbytes = tensor.numel() * tensor.element_size()
        loan, [raw] = feeder.next(self.side.reader(i), [(0, *BYTES, (nbytes,), None)], from_dlpack)
        return loan, rebuild(raw, tensor)

    def discard(self) -> None:
        for feeder in self.feeders:
            feeder.discard()


def overlap_transfer_and_compute(cpu_tensors: Sequence[torch.Tensor],
                                 compute_stream: torch.cuda.Stream | Sequence[torch.cuda.Stream] | None,
                                 transfer_stream: torch.cuda.Stream | None,
                                 compute_func: Callable[[torch.Tensor], Any],
                                 buffers: int = 2, wait: bool = True, *, device: str | torch.device | None = None) -> list[Any]:
    """Copies each tensor to the GPU on `transfer_stream` while the one before is computed on, and returns what compute_func returned, in order.

    cpu_tensors: any shapes, strides and dtypes, mixed as they come. Pinned ones are copied from where they lie, pageable ones by way of pinned
        staging. They must not be changed before their copy is done, which wait=True makes sure of. Gradients do not reach them.
    compute_stream: compute_func is called with this stream current. A list: item i goes to stream i % n, which pays where one item leaves the GPU
        partly empty. None: the current stream. All of it comes after what the current stream has queued so far.
    transfer_stream: None: one of our own.
    compute_func: gets a tensor on the GPU. It must not block the host (`.item()`, printing), or nothing overlaps. A result that shares memory
        with its argument keeps that memory.
    buffers: device buffers that go round. 1 cannot overlap, 2 is the rule, more pay where times vary.
    wait: block until all is computed. False: return once it is queued; the results may be used on the current stream as if computed there. So the
        next call, too, comes after them: two calls do not overlap one another; give one call all the tensors.
    device: "sim" runs it on the software device, with tensors of the CPU; so does a machine without GPU, and a compute_stream of the CPU.

    An exception in compute_func ends the call: nothing is in flight when it comes out. ValueError, TypeError: the message names the argument."""
    if not isinstance(cpu_tensors, Iterable):
        raise TypeError(f"overlap_transfer_and_compute: cpu_tensors is {cpu_tensors!r}; give a list of tensors")
    tensors = list(cpu_tensors)
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"overlap_transfer_and_compute: cpu_tensors[{i}] is a {type(tensor).__name__}, not a tensor")
    if isinstance(buffers, bool) or not isinstance(buffers, int) or buffers < 1:
        raise ValueError(f"overlap_transfer_and_compute: buffers is {buffers!r}; it is a number of device buffers, 1 or more")
    if not tensors:
        return []
    _end_done()
    side = _side(compute_stream, transfer_stream, device)
    if not callable(compute_func):
        raise TypeError(f"overlap_transfer_and_compute: compute_func is {compute_func!r}; it is called with each tensor")
    if os.environ.get("SIDESTREAM_DISABLE", "") not in ("", "0"):
        return _plain(side, tensors, compute_func, wait)
    run = _Run(side, tensors, buffers)
    try:
        results = run.results(compute_func)
        side.hand_over(results, run.kept)
        if wait:
            for feeder in run.feeders:  # all is copied, or about to be; while the last item is computed
                feeder.close()
            side.finish()
            _end(side.native, run.feeders)
        else:
            side.end_later(run.feeders)
    except BaseException:
        run.discard()
        side.finish()
        _end(side.native, run.feeders)
        raise
    return results


def _side(compute: Any, transfer: Any, device: Any) -> _Software | _Cuda:
    computes = list(compute) if isinstance(compute, (list, tuple)) else [compute]
    if not computes:
        raise ValueError("overlap_transfer_and_compute: compute_stream is an empty list; give one stream or more, or None")
    for stream in [*computes, transfer]:
        if stream is not None and not isinstance(stream, torch.Stream):
            raise TypeError(f"overlap_transfer_and_compute: {stream!r} is no stream; give a torch.cuda.Stream, or None")
    spec = "" if device is None else str(device)
    if device is not None and not (isinstance(device, (str, torch.device)) and spec.partition(":")[0] in ("sim", "cpu", "cuda")):
        raise (ValueError if isinstance(device, str) else TypeError)(
            f"overlap_transfer_and_compute: device is {device!r}; give 'cuda', 'cuda:N' or 'sim', or leave it out")
    on_host = [s for s in computes if s is not None and s.device.type == "cpu"]
    if spec.startswith(("sim", "cpu")) or on_host or not torch.cuda.is_available():
        if spec.startswith("cuda"):
            raise RuntimeError(f"overlap_transfer_and_compute: device is {spec!r}, but PyTorch has no CUDA device")
        return _Software(spec if spec.startswith("sim") else "sim")
    where = torch.device(device) if device is not None else next((s.device for s in computes if s is not None), torch.device("cuda"))
    computes = [torch.cuda.current_stream(where) if s is None else s for s in computes]
    for stream in computes + ([] if transfer is None else [transfer]):
        if stream.device != computes[0].device:
            raise ValueError(f"overlap_transfer_and_compute: streams of {computes[0].device} and {stream.device}; all must be of one device")
    return _Cuda(computes, transfer)


def _plain(side: _Software | _Cuda, tensors: list[torch.Tensor], compute_func: Callable[[torch.Tensor], Any], wait: bool) -> list[Any]:
    """SIDESTREAM_DISABLE=1: copy, compute, copy, compute, on the compute stream."""
    results = []
    for i, tensor in enumerate(tensors):
        with side.computing(i):
            x = tensor.detach()
            results.append(compute_func(x.to(side.torch_device, copy=True)))
    side.hand_over(results, [])
    if wait:
        side.finish()
    return results


atexit.register(_end_done, True)
