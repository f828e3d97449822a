"""Loaders and a feeder in Python for the tests of sidestream.torch.

FakeFeeder is the native one's behaviour in a page, and what it cannot be made to do on demand: slots that die in a capture
(`capturing`), and the lifetime rule broken on purpose (`careless`), so that the tests of lifetimes can be seen to fail. """
from __future__ import annotations

import atexit
import json
import select
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from typing import Any, Callable, Iterator

import numpy as np
import pytest
import torch

from sidestream import _native

SHAPE = (4, 8)


class Indexed:
    """`count` batches that hold their number everywhere; make(number) builds another kind of batch. `read` counts what was asked of it."""

    def __init__(self, count: int, make: Callable[[int], Any] | None = None, fail_at: int | None = None, delay_s: float = 0.0) -> None:
        self.count, self.fail_at, self.delay_s = count, fail_at, delay_s
        self.make = make or (lambda number: torch.full(SHAPE, float(number)))
        self.read = 0
        self.threads: list[threading.Thread] = []

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.count):
            self.read += 1
            self.threads.append(threading.current_thread())
            if number == self.fail_at:
                broken_sample(number)
            if self.delay_s:
                time.sleep(self.delay_s)
            yield self.make(number)


def broken_sample(number: int) -> None:
    raise KeyError(f"sample {number}")


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, with what it says."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)


# Reads programs, runs each in a fork of itself that then ends as Python does, and tells how that ended. Nothing of ours is imported before.
TEMPLATE = """
import json, os, sys, warnings
import numpy, torch, torch.utils.data
def next_program():
    for line in sys.stdin:
        program, out, err = json.loads(line)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pid = os.fork()
        if pid == 0:
            for name, fd in (os.devnull, 0), (out, 1), (err, 2):
                opened = os.open(name, os.O_RDWR)
                os.dup2(opened, fd)
                os.close(opened)
            return program
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    os._exit(0)
assert not [name for name in sys.modules if name.startswith("sidestream")]
exec(next_program())
"""
template: subprocess.Popen[str] | None = None


def end(process: subprocess.Popen[str]) -> None:
    """With its pipes, so that Python has nothing to warn of."""
    with process:
        process.kill()


def run_torch(program: str) -> subprocess.CompletedProcess[str]:
    """The same for a program that imports PyTorch: most of its time goes there, so one process does that for all. Its module is __main__."""
    global template
    if template is None or template.poll() is not None:
        template = subprocess.Popen([sys.executable, "-c", TEMPLATE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        atexit.register(end, template)
    assert template.stdin is not None and template.stdout is not None
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        print(json.dumps([program, out.name, err.name]), file=template.stdin, flush=True)
        if not select.select([template.stdout], [], [], 120)[0]:
            template.kill()
            raise TimeoutError(f"not done within 120 s: {out.read()}{err.read()}")
        return subprocess.CompletedProcess([], int(template.stdout.readline()), out.read(), err.read())


def wrong(batch: torch.Tensor, number: float) -> int:
    """Elements that are not `number`."""
    return int((batch != number).sum())


class FakeLoan:
    def __init__(self, feeder: "FakeFeeder", slot: int, number: int, nbytes: int) -> None:
        self.feeder, self.index, self.number, self.nbytes = feeder, slot, number, nbytes
        self.data = feeder.memory.ctypes.data + slot * feeder.slot_bytes
        self.uses = 1
        self.used: list[Any] = []

    @property
    def alive(self) -> bool:
        return self.uses > 0

    def use(self, stream: Any) -> None:
        assert self.alive
        self.used.append(stream)

    def drop(self) -> None:
        with self.feeder.lock:
            self.uses -= 1
            if self.uses == 0:
                self.feeder.loans.remove(self)
                if self.feeder.capturing:
                    self.feeder.lost += 1
                else:
                    self.feeder.give_back(self.index)


class FakeFeeder:
    """Copies a batch when it has a slot; next() waits for that."""

    made: list["FakeFeeder"] = []
    careless = False
    capturing = False
    limit = 1 << 60  # bytes of "device" memory

    def __init__(self, device: Any, *, slots: int, slot_bytes: int, queue: int = 0, **options: Any) -> None:
        if slots * slot_bytes > self.limit:
            raise _native.OutOfDeviceMemory("the fake is full")
        self.slots, self.slot_bytes, self.queue, self.options = slots, slot_bytes, queue or 2, options
        self.memory = np.zeros(slots * slot_bytes, np.uint8)
        self.lock = threading.Condition(threading.RLock())
        self.free = list(range(slots))
        self.waiting: list[tuple[int, Any, Any]] = []  # number, pieces, keep
        self.ready: list[tuple[int, int, int]] = []    # number, slot, bytes
        self.loans: list[FakeLoan] = []
        self.number = self.lost = self.bytes = self.past = 0
        self.closed = False
        FakeFeeder.made.append(self)

    def give_back(self, slot: int) -> None:
        self.free.append(slot)
        self._copy()
        self.lock.notify_all()

    def _copy(self) -> None:
        while self.free and self.waiting:
            number, pieces, _ = self.waiting.pop(0)
            slot = self.free.pop(0)
            for address, nbytes, offset in pieces:
                source = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * nbytes).from_address(address))
                begin = slot * self.slot_bytes + offset
                self.memory[begin:begin + nbytes] = source
                self.bytes += nbytes
            self.ready.append((number, slot, max(p[1] + p[2] for p in pieces)))
            self.lock.notify_all()

    def submit(self, pieces: list[tuple[int, int, int]], keep: object) -> int:
        assert all(offset + nbytes <= self.slot_bytes and offset % 64 == 0 for _, nbytes, offset in pieces)
        with self.lock:
            assert not self.closed and len(self.waiting) <= self.queue, "submit would block: the reader is further ahead than agreed"
            self.waiting.append((self.number, pieces, keep))
            self.number += 1
            self._copy()
            return self.number - 1

    def next(self, stream: int, leaves: list[Any] | None, convert: Callable[[Any], torch.Tensor]) -> tuple[FakeLoan, list[torch.Tensor]]:
        with self.lock:
            assert self.lock.wait_for(lambda: bool(self.ready), 5), "next() waits for ever"
            number, slot, nbytes = self.ready.pop(0)
            self.past = number + 1
            loan = FakeLoan(self, slot, number, nbytes)
            self.loans.append(loan)
        tensors = [convert(self._capsule(loan, *leaf)) for leaf in leaves or []]
        loan.drop()
        if self.careless and loan in self.loans:
            with self.lock:
                self.give_back(slot)
        return loan, tensors

    def _capsule(self, loan: FakeLoan, offset: int, code: int, bits: int, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> Any:
        from sidestream.torch.static import _dtype
        begin = loan.index * self.slot_bytes + offset
        size = bits // 8
        count = 1 + sum((n - 1) * s for n, s in zip(shape, strides)) if strides else int(np.prod(shape))
        base = self.memory[begin:begin + count * size]
        loan.uses += 1
        weakref.finalize(base, loan.drop)  # the array that the tensor's storage keeps
        dtype = _dtype((0, code, bits, shape, strides))
        flat = torch.from_numpy(base).view(dtype)
        return torch.utils.dlpack.to_dlpack(flat.as_strided(shape, strides) if strides else flat.view(shape))

    def taken(self) -> int:
        return self.past

    def held(self) -> int:
        return len(self.loans)

    def retired(self) -> int:
        return self.lost

    def watch(self, stream: int) -> None:
        pass

    def sweep(self) -> None:
        pass

    def wait_given_back(self, below: int, timeout: float) -> bool:
        with self.lock:
            return self.lock.wait_for(lambda: len(self.loans) < below, timeout)

    def discard(self) -> None:
        with self.lock:
            self.waiting.clear()
            for _, slot, _ in self.ready:
                self.free.append(slot)
            self.ready.clear()

    def stats(self) -> dict[str, float]:
        return {"bytes": self.bytes, "copies": self.number, "slots": self.slots, "copy_s": 0.0}

    def close(self) -> None:
        self.discard()
        self.closed = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeFeeder]:
    """The fake in place of the native feeder."""
    monkeypatch.setattr(_native, "Feeder", FakeFeeder, raising=False)
    FakeFeeder.made.clear()
    return FakeFeeder


@pytest.fixture(params=["fake", "native"])
def feeder(request: pytest.FixtureRequest) -> str:
    """Both: the fake holds everybody to what was agreed, the native one is what ships."""
    if request.param == "fake":
        request.getfixturevalue("fake")
    return request.param
