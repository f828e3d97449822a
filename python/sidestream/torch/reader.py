"""One epoch's reading ahead: a thread that takes batches from the loader, lays them out and submits them, in order.

    reader:    token -> next(loader) -> flatten, plan -> submit -> items
    consumer:  items -> take from the feeder -> token

Tokens bound how far the reader is ahead. It never waits for a slot: a feeder's queue holds as many batches as there are tokens,
so stopping a run is a flag and a token. What needs PyTorch's allocator or may meet a capture (making a feeder) is the consumer's:
the reader hands the batch over unsent and waits. """
from __future__ import annotations

import atexit
import contextvars
import copy
import functools
import itertools
import logging
import os
import queue
import threading
import time
import weakref
from typing import Any, Callable, Iterator

import torch

from .. import _native
from .layout import Plan, plan_of
from .tree import flatten

__all__ = ["EXIT", "Item", "Run"]

_log = logging.getLogger("sidestream.torch")
_EXIT_SECONDS = 5.0  # the longest that the process's exit waits for a loader that is in its next()


class Exit:
    """The process's exit. An object, since modules lose their names before the last __del__ has run."""

    begun = False

    def __init__(self) -> None:
        self.lanes: weakref.WeakSet[Any] = weakref.WeakSet()  # whose native threads are to end before the driver does


EXIT = Exit()
_runs: weakref.WeakSet[Run] = weakref.WeakSet()


class Item:
    """What the reader found: a batch, the loader's exception, or its end (both None)."""

    __slots__ = ("node", "plan", "leaves", "ring", "number", "sources", "unsent", "error", "state", "event")

    def __init__(self) -> None:
        self.node: Any = None
        self.plan: Plan | None = None
        self.leaves = 0
        self.ring: Any = None       # that the packed part was submitted to; None: it goes with .to()
        self.number = -1            # in its feeder
        self.sources: Any = None    # a weak reference: dead once the copy is done
        self.unsent = False         # the consumer is to submit it, and then to let the reader go on
        self.error: BaseException | None = None
        self.state: Any = None      # the loader's state_dict right after this batch
        self.event: Any = None      # on the reader's stream, where the loader made tensors on a GPU itself


class Run:
    """submit(item) -> bool: queues the packed part; False: the consumer has to make a feeder that fits."""

    def __init__(self, iterator: Iterator[Any], ahead: int, submit: Callable[[Item], bool], snapshot: Callable[[], Any] | None,
                 passing: bool = False) -> None:
        self.iterator: Iterator[Any] | None = iterator
        self.submit = submit
        self.snapshot = snapshot
        self.passing = passing
        self.items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.resume: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self.pending: Item | None = None  # taken from items, not handed out yet
        self.stopped = False
        self.done = False      # the end was handed out
        self.ended = False     # before its end
        self.loader_s = 0.0    # in the loader's next(); seconds of the reader
        self.reads = 0
        self.ahead = ahead
        self._lock = threading.RLock()  # a __del__ may come in between
        self._at_end: Callable[[], None] | None = None
        _at_exit()

    def read(self) -> Item:
        """The loader's next, whatever it is. On the caller's thread for the first of an epoch: samplers draw their seeds there."""
        item = Item()
        assert self.iterator is not None
        began = time.perf_counter()
        try:
            try:
                batch = next(self.iterator)
            finally:
                self.loader_s += time.perf_counter() - began
            self.reads += 1
            if self.snapshot is not None:
                item.state = copy.deepcopy(self.snapshot())
            leaves, item.node = ([], (None, batch)) if self.passing else flatten(batch)
            item.leaves = len(leaves)
            item.plan = plan_of(leaves)
            if item.plan.on_device and torch.cuda.is_initialized():
                item.event = torch.cuda.Event()
                item.event.record()
        except StopIteration:
            if self.snapshot is not None:
                item.state = copy.deepcopy(self.snapshot())
        except BaseException as error:
            trace = error.__traceback__
            item.error = error.with_traceback(trace.tb_next if trace and trace.tb_next else trace)
            item.plan = None
        return item

    def skip(self, count: int) -> None:
        """Reads and drops that many batches."""
        assert self.iterator is not None
        for _ in itertools.islice(self.iterator, count):
            pass

    def start(self) -> None:
        """Reads ahead in a thread of its own from here on, with the caller's context, device, stream and grad mode."""
        for _ in range(self.ahead):
            self.tokens.put(None)
        context = contextvars.copy_context()
        modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        thread = threading.Thread(target=context.run, args=(self._main, modes, stream), name="sidestream-reader", daemon=True)
        _runs.add(self)
        thread.start()
        self.thread = thread

    def _main(self, modes: tuple[bool, bool], stream: Any) -> None:
        try:
            if stream is not None:
                torch.cuda.set_stream(stream)
            with torch.inference_mode(modes[1]), torch.set_grad_enabled(modes[0]):
                self._loop()
        except BaseException as error:  # of ours, such as a failed submit
            item = Item()
            item.error = error
            self.items.put(item)
        finally:
            self._end()

    def _loop(self) -> None:
        while True:
            self.tokens.get()
            if self.stopped:
                return
            item = self.read()
            last = item.plan is None
            item.unsent = not last and not self.submit(item)
            unsent = item.unsent
            self.items.put(item)
            del item
            if last:
                return
            if unsent:
                self.resume.get()

    def stop(self) -> None:
        """The reader ends when the loader's next() returns. Does not wait."""
        self.stopped = True
        self.tokens.put(None)
        self.resume.put(None)

    def join(self, timeout: float | None = None) -> None:
        thread = self.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def rest(self) -> None:
        """The reader has met an exception or the end: lets it go. start() may follow."""
        self.join()
        self.thread = None
        self.tokens = queue.SimpleQueue()
        self._at_end = None

    def at_end(self, call: Callable[[], None]) -> None:
        """Calls it once the reader has ended: now, where it has, else in its thread."""
        with self._lock:
            if self.thread is not None and self._at_end is not _ENDED:
                self._at_end = call
                return
        if not EXIT.begun:
            _quietly(call)

    def _end(self) -> None:
        if self.stopped:
            self.iterator = None  # a loader's workers end with its iterator
        with self._lock:
            call, self._at_end = self._at_end, _ENDED
        if call is not None and not EXIT.begun:
            _quietly(call)


def _quietly(call: Callable[[], None]) -> None:
    """Where nobody could catch it. Who asks the device next hears of it again."""
    try:
        call()
    except _native.Error as error:
        _log.debug("at the end of an iteration: %s", error)


def _ENDED() -> None:
    """In place of what at_end would call."""


@functools.cache
def _at_exit() -> None:
    atexit.register(_stop_all)  # at first use: what PyTorch registered at its import runs later


def _stop_all() -> None:
    """Threads that come back from the loader into an interpreter that is gone would abort the process, so they end before, and so do the
    threads of feeders. From here on the library refuses calls, and what is left dies with the process."""
    EXIT.begun = True
    runs = list(_runs)
    for run in runs:
        run.stop()
    end = time.monotonic() + _EXIT_SECONDS
    for run in runs:
        run.join(max(end - time.monotonic(), 0))
    for lane in list(EXIT.lanes):
        if lane.pid == os.getpid():
            lane.close()
