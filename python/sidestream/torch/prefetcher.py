"""The prefetcher: wraps a loader, and is one whose batches are on the device before the loop asks for them."""
from __future__ import annotations

import gc
import logging
import os
import queue
import threading
import time
import warnings
import weakref
from typing import Any, Generic, Iterable, Iterator, NoReturn, TypeVar

import torch

from .. import _native
from ._common import native_stream
from .lane import LOANS, Lane
from .layout import Plan
from .reader import EXIT, Exit, Item, Run
from .static import StaticSet
from .stats import Stats
from .target import Target, bytes_of
from .tree import flatten, unflatten

__all__ = ["Prefetcher", "used_on"]

Batch = TypeVar("Batch")
_log = logging.getLogger("sidestream.torch")
_POLICIES = ("copy", "raise", "wait")
_KEPT_ALL = 6  # batches of a fixed set, from which on to hold it as often is taken for a mistake
_GRACE_SECONDS = 0.002  # autograd's threads drop what they saved a little after backward() has returned


class Prefetcher(Generic[Batch]):
    """Wraps `loader` and is a loader: batches are copied to `device` on a side stream, up to `depth` ahead of the one in use,
    while the GPU computes.

        loader = Prefetcher(DataLoader(...))
        for batch in loader:                     # on the GPU, ready on the current stream

    A batch keeps its nesting and types; all its tensors travel as one packed copy into a slot, and are handed out as ordinary
    tensors (same shapes, strides, dtypes) over that slot's memory. Tensor subclasses, sparse and quantized ones and those with
    gradient go with .to(), as do objects that have one; what is on a device already and what is no tensor passes through.

    Lifetime: a slot is in use until the last reference to its tensors is gone, views and what autograd saved included, and is
    rewritten only after the work that the stream which was current in next() had queued by then. So batches may be kept for as
    long as you like. If further streams read a batch, say so with used_on(batch, stream): Tensor.record_stream has no effect on
    memory that is not PyTorch's. A batch that dies while its stream, or the one that torch.cuda.graph captures on, is captured
    keeps its memory for good, since the graph reads it; captures on other streams need used_on before.

    depth: batches ready beyond the one in use. The slots, depth + 2 of the size of the first batch, are cut from one tensor, so
        PyTorch's memory statistics know them. A larger batch later brings new slots.
    budget: device memory for slots, bytes or text such as "2GiB": makes depth smaller if need be; batches of which 3 do not fit
        go with .to().
    on_hold: what next() does if more than the one batch before is still held: "copy" hands out a copy of its own (and warns
        once), "raise" raises RuntimeError, "wait" waits up to `timeout` seconds, and raises at once where nobody else could let
        go.
    static: hands out the same tensors, at the same addresses, each time, refilled by one copy on the current stream: what CUDA
        graphs need. Then a batch that is kept is overwritten by next(): list(prefetcher) is one batch many times (a warning says
        so once). All batches must have one layout (drop_last=True).
    timeout: seconds to wait for the device, or for a held batch, before an error.

    The loader must not write to tensors that it has already given out; they are kept until they are copied. iter(loader) and the
    first next() of an epoch are called here, all others in a thread that reads ahead. So batches and random state are those of the
    unwrapped loader wherever it draws at the start of an epoch, as DataLoader does for its sampler and workers; samples that draw
    from the global generators in this process (num_workers=0) come earlier than without, in between the loop's own draws.

    device="cpu" passes batches through; "sim" runs on the software device, on any machine; SIDESTREAM_DISABLE=1 in the
    environment moves batches with plain .to(). Use from the process that made it, one iteration at a time: a new iter() ends the
    one before."""

    def __init__(self, loader: Iterable[Batch], device: str | int | torch.device | None = "cuda", depth: int = 2,
                 budget: int | str | None = None, on_hold: str = "copy", static: bool = False, timeout: float = 30.0) -> None:
        """ValueError, TypeError: an argument that makes no sense. RuntimeError: there is no such device; the message says why."""
        if not hasattr(type(loader), "__iter__") and not hasattr(type(loader), "__getitem__"):
            raise TypeError(f"loader={loader!r}: not iterable; give a DataLoader, or anything else that yields batches")
        if isinstance(depth, bool) or not isinstance(depth, int):
            raise TypeError(f"depth={depth!r}: give the number of batches to be ready ahead, 1 or more")
        if not 1 <= depth <= 1024:
            raise ValueError(f"depth={depth}: give the number of batches to be ready ahead, 1 to 1024")
        if on_hold not in _POLICIES:
            raise ValueError(f"on_hold={on_hold!r}: give one of {', '.join(map(repr, _POLICIES))}")
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
            raise TypeError(f"timeout={timeout!r}: give seconds, as a number")
        if not timeout > 0:
            raise ValueError(f"timeout={timeout!r}: give seconds, more than 0")
        self._init = (loader, device, depth, budget, on_hold, static, timeout)
        self._pid = os.getpid()
        self.loader = loader
        self._depth, self._on_hold, self._static, self._timeout = depth, on_hold, static, float(timeout)
        limit = bytes_of(budget)
        self._target = Target(device)
        self._lane = Lane(self._target, depth, limit, self._timeout, extra=1 if static else 0)
        self._passing = self._target.native is None and self._target.device.type == "cpu"
        self._lock = threading.Lock()  # held in next(); an iteration may be shared by threads
        self._run: Run | None = None
        self._set: StaticSet | None = None
        self._delivered = 0      # batches of this epoch
        self._skip = 0           # batches that the next epoch leaves out (load_state_dict)
        self._state: Any = None  # of a loader that has one, as of the last batch handed out
        self._has_state = False
        self._copying = self._warned = False
        # For stats: sums; loader's of the epochs before; seconds of the host in next(), of that waiting for the loader, and in
        # the loop's body.
        self._batches = self._held_copies = self._steps = self._reads = 0
        self._loader_s = self._inside_s = self._starved_s = self._outside_s = 0.0
        self._left = 0.0         # when next() last returned
        self._before = Stats()   # at the start of the epoch

    # ---------------------------------------------------------------- the loader's face

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return (f"<{type(self).__name__} of {type(self.loader).__name__} to {self._target.name}, depth {self._depth}"
                f"{', static' if self._static else ''}, {self._batches} batches handed out>")

    def __getattr__(self, name: str) -> Any:
        """dataset, sampler, batch_size, set_epoch ...: the loader's."""
        if name.startswith("__") or name in ("loader", "_init"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(self.loader, name)
        except AttributeError:
            raise AttributeError(f"neither Prefetcher nor its loader ({type(self.loader).__qualname__}) has an attribute {name!r}") from None

    def __reduce__(self) -> Any:
        return type(self), self._init

    def set_epoch(self, epoch: int) -> None:
        """The loader's own, else that of its sampler (DistributedSampler) or dataset; none: nothing to do."""
        batches = getattr(self.loader, "batch_sampler", None)
        for owner in (self.loader, getattr(self.loader, "sampler", None), batches, getattr(batches, "sampler", None),
                      getattr(self.loader, "dataset", None)):
            call = getattr(owner, "set_epoch", None)
            if callable(call):
                call(epoch)
                return

    def __iter__(self) -> Iterator[Batch]:
        """A new epoch: ends the one before, and calls iter(loader), here and now."""
        self._check_process()
        self._end_run()
        snapshot = getattr(self.loader, "state_dict", None)
        run = Run(iter(self.loader), self._depth + 1, self._lane.submit, snapshot if callable(snapshot) else None, self._passing)
        self._run = run
        self._delivered, skip, self._skip = self._skip, self._skip, 0
        self._state, self._has_state = None, False
        self._left = 0.0
        if _log.isEnabledFor(logging.INFO):
            self._before = self.stats()
        return _Epoch(self, run, skip)

    def state_dict(self) -> dict[str, Any]:
        """Counts what was handed out, not what was read ahead: the loader's own state as of the last batch, or where it has none
        {"delivered": batches of this epoch}."""
        if callable(getattr(self.loader, "state_dict", None)):
            if self._has_state:
                return self._state
            return self.loader.state_dict()  # type: ignore[attr-defined]
        return {"delivered": self._delivered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Where the loader has a state, it gets this one; else the next epoch begins behind the batches that were delivered.

        ValueError: not such a state."""
        self._end_run()
        self._state, self._has_state = None, False
        load = getattr(self.loader, "load_state_dict", None)
        if callable(load):
            load(state)
            return
        delivered = state.get("delivered") if isinstance(state, dict) else None
        if not isinstance(delivered, int) or delivered < 0:
            raise ValueError(f"state={state!r}: {type(self.loader).__qualname__} keeps no state of its own, so give what state_dict() "
                             "returned: {'delivered': n}")
        self._delivered = self._skip = delivered

    def used_on(self, batch: Any, stream: Any) -> None:
        """As the function sidestream.torch.used_on."""
        used_on(batch, stream)

    def stats(self) -> Stats:
        """Sums since the prefetcher was made; the difference of two is what lies between. See Stats."""
        run, lane, target = self._run, self._lane, self._target
        sums = lane.sums()
        common: dict[str, Any] = dict(
            batches=self._batches, bytes=int(sums.get("bytes", 0)), copies=int(sums.get("copies", 0)), copy_s=sums.get("copy_s", 0.0),
            reads=self._reads + (run.reads if run else 0), loader_s=self._loader_s + (run.loader_s if run else 0.0),
            other_tensors=lane.others, other_bytes=lane.other_bytes, held_copies=self._held_copies,
            slots=lane.ring.slots if lane.ring else 0, device=target.name, simulated=target.simulated, plain=target.native is None)
        if target.index >= 0 and sums:
            loader, staging, link, slots = (sums[f"lost_{name}_s"] for name in ("source", "stage", "link", "slot"))
            rest = max(0.0, sums["stall_s"] - loader - staging - link - slots)
            return Stats(timed=int(sums["timed"]), compute_s=sums["compute_s"], lost_loader_s=loader, lost_staging_s=staging,
                         lost_link_s=link, lost_slots_s=slots, lost_other_s=rest, **common)
        return Stats(timed=self._steps, compute_s=self._outside_s, lost_loader_s=self._starved_s,
                     lost_other_s=max(0.0, self._inside_s - self._starved_s), **common)

    def close(self) -> None:
        """Ends the epoch and gives the slots back, as the last reference to the prefetcher does. Batches that are held stay valid;
        the next iter() begins anew."""
        self._check_process()
        with self._lock:
            self._end_run()
            self._set = None
            self._lane.close()

    def __del__(self, exit: Exit = EXIT) -> None:
        if exit.begun or "_before" not in self.__dict__ or self._pid != os.getpid():
            return
        if self._run is None:
            self._lane.close()
        else:
            self._run.stop()
            self._run.at_end(self._lane.close)

    # ---------------------------------------------------------------- an epoch

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError("this Prefetcher was made before a fork, in the parent process: make one in this process")

    def _end_run(self) -> None:
        """Ends the epoch, wherever it is; what is handed out stays. Waits for the loader, if it is in its next()."""
        run = self._run
        if run is None:
            return
        run.ended = True
        run.stop()
        run.join()
        self._run = None
        run.iterator = run.pending = None
        self._reads += run.reads
        self._loader_s += run.loader_s
        self._lane.discard()

    def _next(self, run: Run, skip: int) -> Any:
        entered = time.perf_counter()
        first = run.thread is None
        if run.done:
            raise StopIteration
        if run.ended:
            raise RuntimeError("this iteration has ended: the Prefetcher was iterated anew, was closed, or was given a state. "
                               "Batches that it handed out stay valid")
        self._check_process()
        self._target.check_capture()
        if self._left:
            self._outside_s += entered - self._left
            self._steps += 1
            self._left = 0.0
        item = run.pending
        if item is None:
            item = run.pending = self._item(run, skip)
        if item.plan is None:
            self._finish(run, item)
        copying = item.ring is not None and not self._static and self._must_copy()
        if self._set is not None and self._delivered >= _KEPT_ALL and not self._warned:
            self._check_kept(self._set)
        run.pending = None
        try:
            batch = unflatten(item.node, self._leaves(item, item.plan, copying))
        except KeyboardInterrupt:  # it comes with the next call, unless its slot was handed out already
            if item.ring is None or item.number >= item.ring.feeder.taken():
                run.pending = item
            raise
        self._delivered += 1
        self._batches += 1
        if run.snapshot is not None:
            self._state, self._has_state = item.state, True
        self._left = time.perf_counter()
        if not first:  # the first makes what is needed, once
            self._inside_s += self._left - entered
        return batch

    def _item(self, run: Run, skip: int) -> Item:
        if run.thread is None:
            return self._first_item(run, skip)
        item: Item | None
        try:
            item = run.items.get_nowait()
        except queue.Empty:
            item = None
        if item is None:  # not in the handler: a Ctrl-C here would be told "during handling of queue.Empty"
            began = time.perf_counter()
            item = run.items.get()
            self._starved_s += time.perf_counter() - began
        run.tokens.put(None)
        if item.unsent:
            try:
                self._lane.make_fit(item)
            except BaseException:
                self._end_run()
                raise
            item.unsent = False
            run.resume.put(None)
        return item

    def _first_item(self, run: Run, skip: int) -> Item:
        """On this thread: the epoch's first batch, and the one after an exception of the loader's, which may go on. Then a reader takes over."""
        began = time.perf_counter()
        if skip and not run.reads:
            run.skip(skip)
        item = run.read()
        waited = time.perf_counter() - began
        self._starved_s += waited
        self._inside_s += waited
        if item.plan is not None and self._target.native is not None:
            self._lane.make_fit(item)
            run.start()
        return item

    def _finish(self, run: Run, item: Item) -> NoReturn:
        run.pending = None
        run.rest()
        error = item.error
        if error is not None:
            try:
                raise error
            finally:
                del error, item
        run.done = True
        run.iterator = None
        if run.snapshot is not None:
            self._state, self._has_state = item.state, True
        self._delivered = 0
        if _log.isEnabledFor(logging.INFO):
            _log.info("epoch: %s", (self.stats() - self._before).line())
        raise StopIteration

    # ---------------------------------------------------------------- a batch

    def _leaves(self, item: Item, plan: Plan, copying: bool) -> list[Any]:
        """The batch's leaves on the device, ready on the current stream."""
        if item.event is not None:
            torch.cuda.current_stream(self._target.index if self._target.index >= 0 else None).wait_event(item.event)
        packed = self._refill(item, plan) if self._static and not self._passing else self._hand_out(item, plan, copying)
        if not plan.others:
            return packed
        others = {i: self._lane.to(leaf) for i, leaf in plan.others.items()}
        if item.event is not None:
            for leaf in others.values():
                if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                    leaf.record_stream(torch.cuda.current_stream(leaf.device))
        if self._static and not self._passing:
            assert self._set is not None
            others = self._set.refill_others(others)
        rest = iter(packed)
        return [others[i] if i in others else next(rest) for i in range(item.leaves)]

    def _hand_out(self, item: Item, plan: Plan, copying: bool) -> list[torch.Tensor]:
        if item.ring is None:
            return [self._lane.to(t) for t in plan.sources.tensors]
        loan, tensors = self._lane.take(item, plan.specs)
        if loan is None:
            return [self._lane.to(t) for t in tensors]
        if copying:
            self._held_copies += 1
            tensors = [t.clone() for t in tensors]
        for i, dtype in plan.dtypes.items():
            tensors[i] = tensors[i].view(dtype)
        return tensors

    def _must_copy(self) -> bool:
        """Whether the loop holds more than the batch before, so that its slots would run out; by on_hold, does what is to be done about it."""
        held = self._lane.held()
        if held <= 1:
            self._copying = False
            return False
        if self._copying:
            return True
        if self._lane.wait_given_back(2, _GRACE_SECONDS):
            return False
        if self._on_hold == "copy":
            self._copying = True
            if not self._warned:
                self._warned = True
                warnings.warn(f"{held} batches of a Prefetcher are held while the next is asked for, so that one is handed out as a copy, as are "
                              "those to come until they are let go. To keep many, keep batch.clone() or results; on_hold='raise' finds the place",
                              stacklevel=4)  # the line of the loop
            return True
        said = f"{held} batches are held while the next is asked for; the loop may hold one"
        if self._on_hold == "raise":
            raise RuntimeError(f"on_hold='raise': {said}. Let go of earlier ones (results that are views of one count), or keep clones")
        gc.collect()
        if self._lane.held() > 1:
            if not _others_run():
                raise RuntimeError(f"on_hold='wait' would wait for ever: {said}, and no other thread runs that could let go of them")
            if not self._lane.wait_given_back(2, self._timeout):
                raise RuntimeError(f"on_hold='wait': {said}, and none was let go of in {self._timeout:g} s (timeout=)")
        return False

    def _check_kept(self, fixed: StaticSet) -> None:
        """Warns where all batches of the epoch are still held: a loop that means to keep the one set has it a few times, a list of all once for
        each."""
        held = fixed.references()
        if held >= self._delivered:
            self._warned = True
            warnings.warn(f"static=True hands out the same tensors each time, refilled, and this loop keeps them {held} times: all that it keeps "
                          "becomes the next batch. Keep batch.clone(), or leave static out", stacklevel=4)  # the line of the loop

    def _refill(self, item: Item, plan: Plan) -> list[torch.Tensor]:
        """static=True: the set, with this batch's packed part in it."""
        fixed = self._set
        if fixed is None:
            fixed = self._set = StaticSet(plan, self._target.device)
            _sets.add(fixed)
        fixed.check(plan)
        fixed.wait()
        tensors: Any = None
        if item.ring is None:
            tensors = plan.sources.tensors
        else:
            loan, tensors = self._lane.take(item, fixed.whole)
            if loan is not None:
                fixed.flat[:plan.nbytes].copy_(tensors[0])
                return fixed.packed
        for slot, t in zip(fixed.packed, tensors):
            slot.copy_(t)
        return fixed.packed


class _Epoch(Iterator[Any]):
    """One iteration. Dropping it early ends the reading ahead."""

    def __init__(self, prefetcher: Prefetcher[Any], run: Run, skip: int) -> None:
        self._prefetcher, self._run, self._skip = prefetcher, run, skip

    def __iter__(self) -> "_Epoch":
        return self

    def __next__(self) -> Any:
        prefetcher = self._prefetcher
        with prefetcher._lock:
            try:
                return prefetcher._next(self._run, self._skip)
            except RuntimeError:
                # The library refuses calls from the process's exit on. A daemon's loop ends without a word, as the thread itself is about to.
                if EXIT.begun and threading.current_thread().daemon:
                    raise SystemExit from None
                raise

    def __len__(self) -> int:
        return len(self._prefetcher)

    def __del__(self, exit: Exit = EXIT) -> None:
        if exit.begun:
            return
        run = self._run
        if not run.done and not run.ended and self._prefetcher._pid == os.getpid():
            run.ended = True
            run.stop()
            run.at_end(self._prefetcher._lane.discard)


def used_on(batch: Any, stream: Any) -> None:
    """Says that work already queued, or to be queued while the batch is alive, on `stream` reads `batch` (or a part of it): its
    memory is not rewritten before that is done, and that stream waits until the batch is there.

    batch: as a Prefetcher handed it out. stream: torch.cuda.Stream, or a CUstream as an int; the stream that was current in
        next() need not be named. What lies in PyTorch's own memory (copies of held batches, what went by .to()) gets
        Tensor.record_stream; on slots that call does nothing, so it is no substitute. CPU tensors: nothing to do."""
    native = stream if isinstance(stream, _native.Stream) else native_stream("used_on", stream)
    loans = [(address, address + loan.nbytes, loan) for address, loan in list(LOANS.items()) if loan.alive]
    used = {}
    for leaf in flatten(batch)[0]:
        if not isinstance(leaf, torch.Tensor):
            if callable(getattr(leaf, "record_stream", None)):
                leaf.record_stream(stream)
            continue
        start = leaf.untyped_storage().data_ptr() if leaf.layout is torch.strided else 0
        loan = next((loan for begin, end, loan in loans if begin <= start < end), None)
        if loan is not None:
            used[id(loan)] = loan
        elif leaf.is_cuda:
            for fixed in list(_sets):
                if fixed.holds(leaf):
                    fixed.streams.append(stream)
            leaf.record_stream(stream)
    for loan in used.values():
        loan.use(native)


_sets: weakref.WeakSet[StaticSet] = weakref.WeakSet()


def _others_run() -> bool:
    """Whether another thread could drop a batch: daemons do not count, such as the loader's own and ours."""
    return any(thread is not threading.current_thread() and not thread.daemon and thread.is_alive() for thread in threading.enumerate())
