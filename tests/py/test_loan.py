"""Feeder and Loan on the software device: a slot comes back with the last tensor of its batch and not before, whoever lets go of it."""
import gc
import itertools
import mmap
import os
import random
import resource
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sidestream import _native

np = pytest.importorskip("numpy")

UINT, FLOAT = 1, 2  # DLPack's codes


class Capsule:
    """What numpy.from_dlpack takes."""

    def __init__(self, capsule: object) -> None:
        self.capsule = capsule

    def __dlpack__(self, **_: object) -> object:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def to_numpy(capsule: object) -> Any:
    return np.from_dlpack(Capsule(capsule))


def torch_from_dlpack() -> Callable[[object], Any]:
    torch = pytest.importorskip("torch")
    return torch._C._from_dlpack


class Source:
    """A batch's memory; dies when nobody holds it."""

    def __init__(self, data: Any) -> None:
        self.data = np.ascontiguousarray(data)

    def piece(self, offset: int = 0) -> tuple[int, int, int]:
        return (self.data.ctypes.data, self.data.nbytes, offset)


@pytest.fixture
def device() -> Iterator[_native.Device]:
    yield _native.Device("sim")
    gc.collect()


def feeder(device: _native.Device, slots: int = 2, slot_bytes: int = 4096, **options: Any) -> _native.Feeder:
    return _native.Feeder(device, slots=slots, slot_bytes=slot_bytes, **options)


def submit(f: _native.Feeder, value: int, nbytes: int = 256) -> int:
    source = Source(np.full(nbytes, value, np.uint8))
    return f.submit([source.piece()], source)


LEAVES = [(0, UINT, 8, (64,), None), (64, UINT, 8, (8, 8), (8, 1)), (128, FLOAT, 32, (2, 4), (1, 2))]


def test_batches_in_order(device: _native.Device) -> None:
    f = feeder(device)
    for n in range(20):
        assert submit(f, n + 1) == n
        loan, tensors = f.next(-1, LEAVES, to_numpy)
        assert (loan.number, loan.nbytes, loan.alive) == (n, 256, True)
        assert [t.shape for t in tensors] == [(64,), (8, 8), (2, 4)]
        assert tensors[2].strides == (4, 8) and tensors[2].dtype == np.float32
        assert all((t.view(np.uint8) == n + 1).all() for t in (tensors[0], tensors[1]))
        assert tensors[1].ctypes.data == loan.data + 64
        assert f.held() == 1
        del tensors
        assert (f.held(), loan.alive) == (0, False)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_slot_comes_back_with_the_last(device: _native.Device, order: tuple[int, ...]) -> None:
    f = feeder(device, slots=1)
    submit(f, 1)
    loan, tensors = f.next(-1, LEAVES, to_numpy)
    submit(f, 2)
    for i in order:
        assert f.held() == 1 and loan.alive
        assert (tensors[0] == 1).all() if tensors[0] is not None else True
        tensors[i] = None
    assert f.held() == 0
    again, tensors = f.next(-1, LEAVES, to_numpy)
    assert (again.index, again.number, (tensors[0] == 2).all()) == (loan.index, 1, True)


def test_views_keep_the_slot(device: _native.Device) -> None:
    f = feeder(device, slots=1)
    submit(f, 7)
    loan, tensors = f.next(-1, LEAVES, to_numpy)
    view = tensors[1][2:, ::2].T
    del tensors
    assert loan.alive and (view == 7).all()
    submit(f, 8)
    time.sleep(0.02)
    assert (view == 7).all() and f.held() == 1
    del view
    assert not loan.alive
    f.next(-1, None, None)


def test_torch_views_and_autograd(device: _native.Device) -> None:
    from_dlpack = torch_from_dlpack()
    import torch
    f = feeder(device, slots=1)
    source = torch.arange(64, dtype=torch.float32)
    f.submit([(source.data_ptr(), 256, 0)], source)
    loan, (x, y) = f.next(-1, [(0, FLOAT, 32, (32,), None), (128, FLOAT, 32, (4, 8), None)], from_dlpack)
    assert x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr() and y[0, 1] == 33
    w = torch.ones(32, requires_grad=True)
    loss = (w * x).sum()
    del x, y
    assert loan.alive  # saved for backward
    loss.backward()
    del loss
    assert not loan.alive and (w.grad == torch.arange(32)).all()


def test_any_thread_may_let_go(device: _native.Device) -> None:
    f = feeder(device, slots=4, queue=4)
    for round in range(10):
        loans = []
        for n in range(4):
            submit(f, n)
            loans.append(f.next(-1, LEAVES * 10, to_numpy))
        tensors = [t for _, batch in loans for t in batch]
        random.Random(round).shuffle(tensors)
        shares = [tensors[i::8] for i in range(8)]
        loans = [loan for loan, _ in loans]
        del tensors
        threads = [threading.Thread(target=share.clear) for share in shares]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert f.held() == 0 and not any(loan.alive for loan in loans)


def test_a_thread_waits_for_a_loan(device: _native.Device) -> None:
    f = feeder(device)
    submit(f, 1)
    _, tensors = f.next(-1, LEAVES, to_numpy)
    assert f.wait_given_back(2, 0.0) and not f.wait_given_back(1, 0.03)
    threading.Timer(0.05, tensors.clear).start()
    began = time.monotonic()
    assert f.wait_given_back(1, 30.0) and time.monotonic() - began < 20
    with pytest.raises(ValueError, match="held_below"):
        f.wait_given_back(0, 1.0)


def test_without_leaves_the_loan_is_the_object(device: _native.Device) -> None:
    f = feeder(device, slots=1)
    for leaves in (None, []):
        submit(f, 1)
        loan, tensors = f.next(-1, leaves, None)
        assert tensors == [] and loan.alive and f.held() == 1
        del loan
        assert f.held() == 0


def test_a_second_stream(device: _native.Device) -> None:
    f = feeder(device)
    first, second = _native.Stream(device), _native.Stream(device)
    submit(f, 1)
    loan, tensors = f.next(first, LEAVES, to_numpy)
    loan.use(second)
    loan.use(second)
    loan.use(-1)
    with pytest.raises(TypeError, match="stream"):
        loan.use("second")
    del tensors
    with pytest.raises(RuntimeError, match="ended"):
        loan.use(second)
    assert f.held() == 0 and f.stats()["failed"] == 0


def test_a_feeder_keeps_the_streams(device: _native.Device) -> None:
    f = feeder(device, slots=1)
    submit(f, 1)
    _, tensors = f.next(_native.Stream(device), LEAVES, to_numpy)
    gc.collect()
    del tensors
    submit(f, 2)
    f.next(-1, None, None)


def test_convert_that_raises(device: _native.Device) -> None:
    f = feeder(device, slots=1)
    kept: list[object] = []

    def convert(capsule: object) -> object:
        if len(kept) == 2:
            raise LookupError("enough")
        kept.append(to_numpy(capsule) if not kept else capsule)  # one consumed, one not
        return kept[-1]

    submit(f, 1)
    with pytest.raises(LookupError):
        f.next(-1, LEAVES, convert)
    assert f.held() == 1
    kept.pop(0)
    assert f.held() == 1
    kept.clear()
    assert f.held() == 0
    submit(f, 2)
    assert f.next(-1, None, None)[0].number == 1


def test_leaves_are_checked_before_a_batch_is_taken(device: _native.Device) -> None:
    f = feeder(device)
    submit(f, 1)
    bad: list[tuple[Any, type[Exception], str]] = [
        ((), TypeError, "list"),
        ([(0, UINT, 8, (4,))], TypeError, r"leaves\[0\]"),
        ([LEAVES[0], (0, UINT, 8, [4], None)], TypeError, r"leaves\[1\]"),
        ([(0, UINT, 8, (4,), (1, 1))], TypeError, "strides"),
        ([(0, UINT, 8, (-1,), None)], ValueError, "0 or more"),
        ([(0, UINT, 8, (4097,), None)], ValueError, "past"),
        ([(4095, UINT, 8, (2,), None)], ValueError, "past"),
        ([(5000, UINT, 8, (0,), None)], ValueError, "past"),
        ([(0, UINT, 8, (2, 2), (1, 4095))], ValueError, "past"),
        ([(0, UINT, 8, (2**62, 2**62), (2**62, 4))], ValueError, "past"),
        ([(2**64 - 1, UINT, 8, (4,), None)], ValueError, "past"),
        ([(0, 256, 8, (4,), None)], ValueError, "dtype"),
        ([(0, UINT, 0, (4,), None)], ValueError, "dtype"),
        ([("0", UINT, 8, (4,), None)], TypeError, "int"),
        ([(0, UINT, 8, ("4",), None)], TypeError, "int"),
    ]
    for leaves, kind, match in bad:
        with pytest.raises(kind, match=match):
            f.next(-1, leaves, to_numpy)
    loan, tensors = f.next(-1, [(4096, UINT, 8, (0, 5), None), (4095, UINT, 8, (), None)], to_numpy)
    assert loan.number == 0 and [t.shape for t in tensors] == [(0, 5), ()]


def test_pieces_are_checked(device: _native.Device) -> None:
    f = feeder(device)
    source = Source(np.zeros(16, np.uint8))
    bad: list[tuple[Any, type[Exception]]] = [
        ((source.piece(),), TypeError), ([source.piece()[:2]], TypeError), ([list(source.piece())], TypeError),
        ([("a", 1, 0)], TypeError), ([(source.data.ctypes.data, -1, 0)], OverflowError), ([], ValueError),
        ([(source.data.ctypes.data, 16, 4090)], ValueError)]
    for pieces, kind in bad:
        with pytest.raises(kind):
            f.submit(pieces, source)
    assert f.submit([source.piece()], source) == 0


def test_options_are_checked(device: _native.Device) -> None:
    for bad in ({"slots": 0}, {"slots": 4097}, {"slot_bytes": 0}, {"queue": -1}, {"timeout": -1.0}, {"timeout": float("nan")},
                {"memory": 4096, "stride": 100}, {"memory": 4100, "stride": 4096}, {"threads": 5000}):
        with pytest.raises(ValueError):
            feeder(device, **bad)
    with pytest.raises(TypeError, match="device"):
        _native.Feeder("sim", slots=1, slot_bytes=1)
    with pytest.raises(TypeError):
        _native.Loan()


def test_sources_are_held_until_copied(device: _native.Device) -> None:
    f = feeder(device, slots=1)
    sources = [Source(np.full(64, n, np.uint8)) for n in range(3)]
    alive = [weakref.ref(s) for s in sources]
    for s in sources[:2]:
        f.submit([s.piece()], s)
    _, tensors = f.next(-1, LEAVES, to_numpy)
    f.submit([sources[2].piece()], sources[2])
    sources.clear()
    del s
    deadline = time.monotonic() + 30
    while f.copied() < 1:
        assert time.monotonic() < deadline
    assert alive[0]() is None
    f.discard()
    assert f.copied() == 3 and all(a() is None for a in alive)
    assert f.stats()["sources_held"] == 0
    assert (tensors[0] == 0).all()


def test_pinned_sources_are_held_until_the_device_has_read_them(device: _native.Device) -> None:
    nbytes = 256 << 10
    f = feeder(device, slots=1, slot_bytes=nbytes)
    block = np.frombuffer(mmap.mmap(-1, 2 * nbytes), np.uint8)  # pages of its own
    _native.pin(device, block.ctypes.data, block.nbytes)
    sources = [Source(block[:nbytes]), Source(block[nbytes:])]
    alive = [weakref.ref(s) for s in sources]
    f.submit([sources[0].piece()], sources.pop(0))
    loan, _ = f.next(-1, None, None)
    f.submit([sources[0].piece()], sources.pop(0))  # has no slot yet
    for _ in range(5):
        assert f.copied() == 1
        time.sleep(0.002)
    assert (alive[0](), alive[1]() is None) == (None, False)
    del loan
    loan, _ = f.next(-1, None, None)
    assert f.copied() == 2 and alive[1]() is None
    assert f.stats()["direct_bytes"] == 2 * nbytes


def test_owner_and_memory_live_as_long_as_loans(device: _native.Device) -> None:
    class Owner:
        pass

    other = feeder(device, slots=1, slot_bytes=2 * 4096)  # its slot is device memory that is not of f
    submit(other, 1)
    slab, _ = other.next(-1, None, None)
    start = slab.data
    owner = Owner()
    dead = weakref.ref(owner)
    f = feeder(device, memory=start, stride=4096, owner=owner)
    del owner
    submit(f, 5)
    loan, tensors = f.next(-1, LEAVES, to_numpy)
    assert loan.data in (start, start + 4096)
    last = tensors[1]
    del f, tensors
    gc.collect()
    assert dead() is not None and (last == 5).all()
    del last
    del loan  # an entry point: sweeps
    assert dead() is None


def test_closed_and_cancelled(device: _native.Device) -> None:
    f = feeder(device, slots=1)
    source = Source(np.full(64, 3, np.uint8))
    gone = weakref.ref(source)
    f.submit([source.piece()], source)
    _, tensors = f.next(-1, LEAVES[:1], to_numpy)
    f.submit([source.piece()], source)
    del source
    f.close()
    f.close()
    assert gone() is None and (tensors[0] == 3).all() and f.held() == 1
    for call in (lambda: submit(f, 1), lambda: f.next(-1, None, None), f.discard):
        with pytest.raises(_native.Cancelled, match="closed"):
            call()
    del tensors
    assert f.held() == 0
    g = feeder(device)
    g.cancel()
    with pytest.raises(_native.Cancelled):
        submit(g, 1)
    with pytest.raises(_native.Cancelled):
        g.next(-1, None, None)


@pytest.mark.parametrize("what", ["submit", "next"])
def test_a_blocked_thread_is_woken_and_only_one_may_be(device: _native.Device, what: str) -> None:
    f = feeder(device, slots=1, queue=1)
    caught: list[BaseException] = []

    def block() -> None:
        try:
            while True:
                submit(f, 1) if what == "submit" else f.next(-1, None, None)
        except BaseException as e:
            caught.append(e)

    thread = threading.Thread(target=block)
    thread.start()
    deadline = time.monotonic() + 30
    while not caught and time.monotonic() < deadline:
        try:
            if what == "next":
                f.next(-1, None, None)
            elif f.stats()["submitted"] >= 2:
                time.sleep(0.05)
                submit(f, 1)
        except _native.WrongState as e:
            assert "another thread" in str(e)
            break
        except _native.Cancelled:
            pytest.fail("cancelled by nobody")
    f.close()
    thread.join(30)
    assert not thread.is_alive() and isinstance(caught[0], _native.Cancelled)


def test_capture_retires_the_slot(device: _native.Device) -> None:
    f = feeder(device, slots=2)
    stream = _native.Stream(device)
    submit(f, 1)
    loan, tensors = f.next(stream, LEAVES, to_numpy)
    _native._test_capturing(True)
    try:
        with pytest.raises(_native.WrongState, match="captured"):
            loan.use(_native.Stream(device))
        del tensors
    finally:
        _native._test_capturing(False)
    assert (f.held(), f.retired(), loan.alive) == (0, 1, False)
    for n in range(5):
        submit(f, n)
        again, tensors = f.next(stream, LEAVES, to_numpy)
        assert again.index != loan.index
        del tensors
    assert f.retired() == 1


def test_watched_stream(device: _native.Device) -> None:
    f = feeder(device)
    f.watch(_native.Stream(device))
    submit(f, 1)
    _, tensors = f.next(-1, LEAVES, to_numpy)
    _native._test_capturing(True)
    del tensors
    _native._test_capturing(False)
    assert f.retired() == 1


def test_reader_streams_by_seed() -> None:
    """The consumer only queues its reads; slots are rewritten behind them. (What this notices is proved in tests/unit/test_loan.c.)"""
    for seed in range(30):
        device = _native.Device(f"sim:h200,seed={seed}")
        f, stream = feeder(device, slots=2), _native.Stream(device)
        results = []
        for n in range(12):
            submit(f, n + 1)
            loan, tensors = f.next(stream, LEAVES, lambda capsule: capsule)
            result = _native.HostBuffer(device, 256)
            _native.copy_d2h(device, stream, -1, result, loan.data, 256)
            results.append(result)
            del tensors, loan
        stream.synchronize()
        for n, result in enumerate(results):
            assert (to_numpy(result.capsule(UINT, 8, (256,))) == n + 1).all()


def rss_kib() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() // 1024


def test_ten_thousand_batches_are_flat(device: _native.Device) -> None:
    f = feeder(device, slots=3, slot_bytes=64 << 10)
    source = Source(np.arange(16 << 10, dtype=np.uint32))
    leaves = LEAVES * 20
    held = None
    for n in range(10_000):
        if n == 1_000:
            before, pinned = rss_kib(), f.stats()["pinned_bytes"]
        f.submit([source.piece()], source)
        loan, tensors = f.next(-1, leaves, to_numpy)
        if n % 3 == 0:
            held = tensors[n % len(tensors)]
    if "san.so" not in os.environ.get("LD_PRELOAD", ""):  # sanitizers keep what was freed
        assert rss_kib() - before < 2_000
    assert held is not None and f.held() <= 2
    stats = f.stats()
    assert (stats["taken"], stats["bytes"], stats["failed"], stats["retired"]) == (10_000, 10_000 * (64 << 10), 0, 0)
    assert stats["device_bytes"] <= 3 * (68 << 10) and stats["pinned_bytes"] == pinned > 0


def test_what_it_costs(device: _native.Device, capsys: pytest.CaptureFixture[str]) -> None:
    """No limit on time; the numbers are for who looks (pytest -s)."""
    convert = to_numpy
    try:
        convert = torch_from_dlpack()
    except pytest.skip.Exception:
        pass
    many = [(64 * i, UINT, 8, (16,), None) for i in range(500)]
    f = feeder(device, slots=3, slot_bytes=1 << 16, queue=4)
    block = np.zeros(1 << 16, np.uint8)
    pieces = [(block.ctypes.data + 64 * i, 16, 64 * i) for i in range(500)]
    spent: dict[str, list[float]] = {"submit of 500": [], "next, 1 leaf": [], "next, 500 leaves": [], "500 tensors die": []}
    for n in range(200):
        one = n % 2 == 0
        began = time.perf_counter()
        f.submit(pieces, block)
        spent["submit of 500"].append(time.perf_counter() - began)
        while f.copied() <= n:
            pass
        began = time.perf_counter()
        loan, tensors = f.next(-1, many[:1] if one else many, convert)
        spent["next, 1 leaf" if one else "next, 500 leaves"].append(time.perf_counter() - began)
        assert len(tensors) == (1 if one else 500)
        began = time.perf_counter()
        del tensors
        if not one:
            spent["500 tensors die"].append(time.perf_counter() - began)
        assert not loan.alive
    with capsys.disabled():
        print("\n" + "".join(f"    {what}: median {sorted(s)[len(s) // 2] * 1e6:.1f} us\n" for what, s in spent.items()), end="")
