"""A prefetcher's device side: the feeder, the slab that its slots are cut from, and the loans that are out.

One feeder lives as long as batches fit its slots; a larger batch, or a slot lost to a graph capture, brings a new one. The old
one and its slab die with the last batch that was cut from them. All calls but `submit` are the consumer's.
"""
from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from typing import Any

import torch

from .. import _native
from .reader import EXIT, Item
from .target import HOST, Target, from_dlpack

__all__ = ["LOANS", "Lane"]

_log = logging.getLogger("sidestream.torch")

SLOT_ALIGNMENT = 512
GROWTH = 1.25  # a larger batch gets slots this much larger than the last at least: varying shapes settle soon

# The loans by the address of their slot, for used_on: a slot has one at a time, and its next one takes the place.
LOANS: dict[int, Any] = {}


class Ring:
    """A feeder with its slots."""

    __slots__ = ("feeder", "slots", "slot_bytes", "watched")

    def __init__(self, feeder: Any, slots: int, slot_bytes: int) -> None:
        self.feeder, self.slots, self.slot_bytes = feeder, slots, slot_bytes
        self.watched: Any = None  # the capture stream that it knows


class Lane:
    """budget: bytes of device memory for slots, None: no limit. extra: bytes of device memory, in slots, that the caller adds to the slab."""

    def __init__(self, target: Target, depth: int, budget: int | None, timeout: float, extra: int = 0) -> None:
        self.target, self.depth, self.budget, self.timeout, self.extra = target, depth, budget, timeout, extra
        self.pid = os.getpid()
        EXIT.lanes.add(self)
        self.ring: Ring | None = None
        self.old: list[Ring] = []  # with batches to hand out yet
        self.refused = 0  # the smallest slot that did not fit the budget or the device; 0: none
        self.others = self.other_bytes = 0  # tensors that went with .to()
        self.past: dict[str, float] = {}  # sums of the feeders that were closed

    # ---------------------------------------------------------------- the way in

    def submit(self, item: Item) -> bool:
        """Queues the item's packed part. False: no feeder fits it yet (make_fit). Reader's or consumer's thread, one at a time."""
        plan = item.plan
        assert plan is not None
        if plan.nbytes == 0 or self._too_large(plan.nbytes):
            return True
        ring = self.ring
        if ring is None or plan.nbytes > ring.slot_bytes or ring.feeder.retired():
            return False
        item.sources = weakref.ref(plan.sources)
        item.number = ring.feeder.submit(plan.pieces, plan.sources)
        item.ring = ring
        plan.sources = None  # from here on the feeder keeps them, as long as it reads them
        plan.pieces = None
        return True

    def _too_large(self, nbytes: int) -> bool:
        if self.target.native is None:
            return True
        if not self.refused or _slot_bytes(nbytes) < self.refused:
            return False
        return self.ring is None or nbytes > self.ring.slot_bytes

    def make_fit(self, item: Item) -> None:
        """Makes a feeder that the item fits, or notes that none may be, and submits the item. The reader waits meanwhile."""
        assert item.plan is not None
        if not self.submit(item):
            self._renew(item.plan.nbytes)
            self.submit(item)

    def _renew(self, nbytes: int) -> None:
        need = _slot_bytes(nbytes)
        for size in self._sizes(need):
            for slots in range(self.depth + 2, 2, -1):
                if self.budget is not None and (slots + self.extra) * size > self.budget:
                    continue
                try:
                    slab = self.target.slab(slots * size)
                    feeder = self._feeder(slots, size, slab)
                except (torch.cuda.OutOfMemoryError, _native.OutOfDeviceMemory):
                    continue
                self._replace(Ring(feeder, slots, size))
                return
        self.refused = min(self.refused or need, need)
        _log.warning("batches of %d bytes go with plain copies: %d slots of them are more than %s", nbytes, 3 + self.extra,
                     f"the budget of {self.budget} bytes" if self.budget is not None else "the device has free")

    def _sizes(self, need: int) -> list[int]:
        """Sizes of a slot to try, best first."""
        if self.ring is None:
            return [need]
        now = self.ring.slot_bytes
        if need <= now:  # it was lost to a capture
            return [now]
        return [max(need, _slot_bytes(int(now * GROWTH))), need]

    def _feeder(self, slots: int, size: int, slab: torch.Tensor | None) -> Any:
        memory = 0 if slab is None else slab.data_ptr()
        return _native.Feeder(self.target.native, slots=slots, slot_bytes=size, memory=memory, owner=slab,
                              memory_stream=self.target.stream() if memory else HOST, queue=self.depth + 2, timeout=self.timeout)

    def _replace(self, ring: Ring) -> None:
        if ring.slots < self.depth + 2:
            _log.warning("depth %d instead of %d: device memory for %d slots of %d bytes",
                         ring.slots - 2, self.depth, ring.slots, ring.slot_bytes)
        if self.ring is not None:
            self.old.append(self.ring)
        self.ring = ring
        _log.debug("%d slots of %d bytes on %s", ring.slots, ring.slot_bytes, self.target.device)

    # ---------------------------------------------------------------- the way out

    def held(self) -> int:
        """Batches that are alive, of feeders that are not closed."""
        held = self.ring.feeder.held() if self.ring is not None else 0
        for ring in self.old:
            held += ring.feeder.held()
        return held

    def wait_given_back(self, below: int, timeout: float) -> bool:
        """Until fewer than `below` batches are alive; seconds."""
        if self.old:
            end = time.monotonic() + timeout
            while self.held() >= below:
                if time.monotonic() > end:
                    return False
                time.sleep(0.001)
            return True
        return self.ring is None or self.ring.feeder.wait_given_back(below, timeout)

    def take(self, item: Item, specs: list[Any]) -> tuple[Any, list[torch.Tensor]]:
        """Hands out the item's slot: (loan, tensors cut by specs), ready on the current stream. (None, the host's tensors): the
        slots that its turn needs are lost to captures or held, so it has to go another way."""
        ring, stream = item.ring, self.target.stream()
        feeder = ring.feeder
        if self.old and ring is self.ring:
            self._retire_old()
        self._watch(ring)
        lost = feeder.retired()
        sources = item.sources() if lost and lost + feeder.held() >= ring.slots else None
        if sources is not None:
            return None, sources.tensors
        loan, tensors = feeder.next(stream, specs, from_dlpack)
        while loan.number < item.number:  # it went another way, or was lost in an error
            del tensors
            loan, tensors = feeder.next(stream, specs, from_dlpack)
        LOANS[loan.data] = loan
        return loan, tensors

    def _watch(self, ring: Ring) -> None:
        """Captures on PyTorch's own capture stream retire what dies meanwhile, as do those on the streams that read."""
        if self.target.index < 0:
            return
        stream = self.target.capture_stream()
        if stream is not None and stream is not ring.watched:
            ring.feeder.watch(stream.cuda_stream)
            ring.watched = stream

    def _retire_old(self) -> None:
        """The first batch of a newer feeder is here: the older ones have no more to hand out."""
        old, self.old = self.old, []
        self._close(old)

    def _close(self, rings: list[Ring]) -> None:
        for ring in rings:
            for name, value in ring.feeder.stats().items():
                self.past[name] = self.past.get(name, 0) + value
            ring.feeder.close()
        for address, loan in list(LOANS.items()):
            if not loan.alive:
                LOANS.pop(address, None)

    def to(self, leaf: Any) -> Any:
        """An object or tensor that is not packed, on the device: ready on the current stream."""
        if isinstance(leaf, torch.Tensor):
            if not leaf.is_cpu:
                return leaf
            self.others += leaf.numel() > 0
            self.other_bytes += leaf.numel() * leaf.element_size()
        else:
            self.others += 1
        return leaf.to(self.target.device)

    # ---------------------------------------------------------------- the end

    def discard(self) -> None:
        """Drops what was submitted and not taken; no reader runs. The prefetcher may end in another thread meanwhile, which drops it too."""
        ring = self.ring
        if self.old:
            self._retire_old()
        if ring is not None:
            with contextlib.suppress(_native.Cancelled):
                ring.feeder.discard()

    def close(self) -> None:
        """Batches that are held live on. Nobody submits or takes any more."""
        rings = [*self.old, *([self.ring] if self.ring is not None else [])]
        self.old, self.ring = [], None
        self._close(rings)

    def sums(self) -> dict[str, float]:
        """Of all feeders so far; names as in side_feeder_stats."""
        sums = dict(self.past)
        for ring in (*self.old, self.ring):
            if ring is not None:
                for name, value in ring.feeder.stats().items():
                    sums[name] = sums.get(name, 0) + value
        return sums


def _slot_bytes(nbytes: int) -> int:
    return (nbytes + SLOT_ALIGNMENT - 1) // SLOT_ALIGNMENT * SLOT_ALIGNMENT
