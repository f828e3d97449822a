"""Streams and events: order, waits, what queued work holds, threads, Ctrl-C."""
import _thread
import array
import gc
import sys
import threading
import time
import weakref

import pytest
import sidestream
from sim import SEEDS, device, floats, pinned, run_python, said, zeros


class Held(array.array):
    """Can be referred to weakly."""


def test_round_trip() -> None:
    for seed in SEEDS:
        d = device(seed)
        s, b, out = sidestream.Stream(d), d.empty(1000, "float32"), zeros(1000)
        s.copy(b, floats(1000))
        s.affine(b, b, 2, 1)
        s.copy(out, b)
        s.synchronize()
        assert out == floats(1000, 1, 2)


def crossing(seed: int, wait: bool) -> bool:
    """Two streams hand a buffer over; right or not."""
    d = device(seed)
    one, two = sidestream.Stream(d), sidestream.Stream(d)
    b, source, out = d.empty(100, "float32"), pinned(d, floats(100)), pinned(d, zeros(100))
    one.copy(b, source)
    if wait:
        two.wait(one.record())
    two.copy(out, b)
    two.synchronize()
    one.synchronize()
    return memoryview(out).tolist() == list(floats(100))


def test_wait_orders_streams() -> None:
    assert all(crossing(seed, True) for seed in range(40))


def test_a_missing_wait_shows() -> None:
    assert not all(crossing(seed, False) for seed in range(40))


def test_wait_for_a_stream_takes_its_tail() -> None:
    for seed in SEEDS:
        d = device(seed)
        one, two = sidestream.Stream(d), sidestream.Stream(d)
        b, out = d.empty(10, "float32"), zeros(10)
        one.copy(b, floats(10))
        two.wait(one)
        two.copy(out, b)
        two.synchronize()
        assert out == floats(10)


def test_events() -> None:
    d = device()
    s = sidestream.Stream(d)
    begin, end = s.record(timing=True), sidestream.Event(d, timing=True)
    assert end.query() and end.timing and not s.record().timing
    s.spin(0.25)
    assert end.record(s) is end
    assert not end.query()
    end.wait(1)
    assert end.query() and begin.elapsed(end) == pytest.approx(0.25, rel=0.01)
    with pytest.raises(sidestream.WrongState):
        s.record().elapsed(end)
    with pytest.raises(ValueError, match="timeout"):
        end.wait(-1)


def test_arguments() -> None:
    d, other = device(), device()
    s = sidestream.Stream(d)
    with pytest.raises(TypeError, match="Event"):
        s.wait(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Device"):
        sidestream.Stream(s)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="another opening"):
        s.copy(other.alloc(8), b"12345678")
    with pytest.raises(sidestream.InvalidArgument):
        sidestream.Stream.wrap(d, 12345)
    assert sidestream.Stream.wrap(d).wrapped and not s.wrapped and s.native == 0 and s.device is d


def test_stuck() -> None:
    d = device(hang=1)
    s, b = sidestream.Stream(d), d.alloc(8)
    source = Held("f", [1, 2])
    gone = weakref.ref(source)
    s.copy(b, source)
    with pytest.raises(sidestream.Stuck):
        s.synchronize(0.2)
    del source
    gc.collect()
    assert gone() is not None  # the device may still read it


def test_objects_are_held_until_the_copy_is_done() -> None:
    d = device()
    s, b = sidestream.Stream(d), d.alloc(4000)
    source, out = Held("f", [1] * 1000), Held("f", [0] * 1000)
    gone = [weakref.ref(source), weakref.ref(out)]
    s.spin(1)
    s.copy(b, source)
    s.copy(out, b)
    del source, out
    gc.collect()
    assert all(ref() is not None for ref in gone)
    s.synchronize()
    assert all(ref() is None for ref in gone)


def test_a_dropped_stream_lets_go_too() -> None:
    d = device()
    s, b = sidestream.Stream(d), d.alloc(4000)
    source = Held("f", [1] * 1000)
    gone = weakref.ref(source)
    s.copy(b, source)
    del source, s
    assert gone() is not None
    for _ in range(20):
        other = sidestream.Stream(d)
        other.copy(b, bytearray(8))
        other.synchronize()
        d.alloc(8)  # looks at what is done
    assert gone() is None


def test_memory_cannot_move_in_flight() -> None:
    d = device()
    s, b, source = sidestream.Stream(d), d.alloc(64), bytearray(64)
    s.spin(1)
    s.copy(b, source)
    with pytest.raises(BufferError):
        source.append(1)
    s.synchronize()
    source.append(1)


def test_objects_held_stay_few() -> None:
    """A loop that never synchronises, but whose work is done, does not pile up what it copied."""
    d = device()
    s, b, most = sidestream.Stream(d), d.alloc(4000), 0
    alive: list[weakref.ref] = []
    for _ in range(300):
        source = Held("f", [1] * 1000)
        alive = [ref for ref in alive if ref() is not None] + [weakref.ref(source)]
        s.copy(b, source)
        del source
        s.record().wait()
        most = max(most, len(alive))
    assert most <= 64


def test_fill_and_copy_ranges() -> None:
    d = device()
    s, b, out = sidestream.Stream(d), d.alloc(16), bytearray(16)
    s.fill(b, 7)
    s.copy(b, b"abcdef", nbytes=3, dst_offset=4, src_offset=2)
    s.copy(out, b)
    s.synchronize()
    assert out == b"\7" * 4 + b"cde" + b"\7" * 9
    c = d.alloc(16)
    s.copy(c, b)
    s.copy(out, c, 4, 0, 4)
    s.synchronize()
    assert out[:4] == b"cde\7"
    s.copy(b, b"")
    for wrong, match in (((b, bytes(17)), "dst has 16"), ((b, b"12", 3), "src has 2"), ((b, b"12", 1, 16), "dst"), ((b, b"12", 1, 0, -1), "src")):
        with pytest.raises(sidestream.TooLarge, match=match):
            s.copy(*wrong)
    with pytest.raises(ValueError, match="neither"):
        s.copy(out, bytearray(2))
    with pytest.raises(ValueError, match="writable"):
        s.copy(bytes(16), b)
    with pytest.raises(ValueError, match="contiguous"):
        s.copy(b, memoryview(bytes(16))[::2])
    with pytest.raises(ValueError, match="nbytes"):
        s.copy(b, b"12", -1)
    with pytest.raises(TypeError, match="src"):
        s.copy(b, "text")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="byte"):
        s.fill(b, 256)
    with pytest.raises(ValueError, match="device memory"):
        s.fill(bytearray(3))


def test_named_operations() -> None:
    d = device()
    s = sidestream.Stream(d)
    a, b, c = d.empty((2, 3), "f32"), d.empty((3, 2), "f32"), d.empty((2, 2), "f32")
    s.copy(a, floats(6))
    s.copy(b, floats(6))
    s.matmul(c, a, b, math="fp32")
    half, back, out = d.empty((2, 2), "float16"), d.empty(4, "float32"), zeros(4)
    s.cast(half, c)
    s.cast(back, half)
    s.copy(out, back)
    s.synchronize()
    assert list(out) == [10, 13, 28, 40]
    with pytest.raises(ValueError, match="shapes"):
        s.matmul(c, b, b)
    with pytest.raises(ValueError, match="math"):
        s.matmul(c, a, b, math="int4")
    with pytest.raises(ValueError, match="float32"):
        s.affine(half, half)
    with pytest.raises(sidestream.TooLarge, match="out has 4 bytes"):
        s.affine(d.empty(1, "f32"), a)
    with pytest.raises(ValueError, match="device memory"):
        s.affine(a, floats(6))
    with pytest.raises(sidestream.InvalidArgument, match="int32"):
        s.cast(a, d.empty(6, "int32"))
    with pytest.raises(ValueError, match="seconds"):
        s.spin(-1)


@pytest.mark.parametrize(("total", "wanted"), [
    (0, 0x2D06800538D394C2), (1, 0xC44BDFF4074EECDB), (200, 0xD12016B53C9565BA), (1024, 0xF22EF3DC84FF47EA), (1025, 0x43F869A83769A435),
    (5000, 0xCE29A19460EE1BFC), (65536, 0xDB485BF0653067E1)])
def test_xxh3(total: int, wanted: int) -> None:
    """What xxHash itself says of these bytes."""
    data = bytes((7 * i) % 251 for i in range(total))
    d = device()
    s = sidestream.Stream(d)
    blocks = (total - 1) // 1024 if total >= 241 else 0
    sums = bytearray(64 * blocks)
    if blocks:
        b, out = d.alloc(1024 * blocks), d.alloc(64 * blocks)
        s.copy(b, data, 1024 * blocks)
        s.xxh3_blocks(out, b)
        s.copy(sums, out)
        s.synchronize()
    assert sidestream.xxh3_digest(sums, data[-min(total, 1088):] if total else b"", total) == wanted
    if blocks:
        assert sidestream.xxh3_digest(memoryview(b"-" + sums)[1:], data[-1088:], total) == wanted  # at any address
        with pytest.raises(ValueError, match="64 bytes a block"):
            sidestream.xxh3_digest(sums[1:], data[-1088:], total)
        sums[3] ^= 1
        assert sidestream.xxh3_digest(sums, data[-1088:], total) != wanted
        with pytest.raises(sidestream.WrongState):
            sidestream.xxh3_digest(sums[64:], data[-1088:], total)


def scenario(n: int) -> None:
    d = device(fail=n)
    s, two = sidestream.Stream(d), sidestream.Stream(d)
    b, p, out = d.empty(64, "f32"), d.pool.empty(64, "f32"), d.pool.empty(64, "f32")
    memoryview(p)[:] = floats(64)
    s.copy(b, p)
    s.affine(b, b, 2)
    two.wait(s)
    event = two.record()
    two.copy(out, b)
    event.wait(1)
    two.synchronize(1)
    assert memoryview(out).tolist() == list(floats(64, 0, 2))


def test_every_call_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    """The N-th call on the device fails: an exception, or, where a wait can stand in for it, the right result. What was queued is safe either way."""
    failed = 0
    for n in range(1, 80):
        try:
            scenario(n)
        except sidestream.Error as error:
            assert error.status_name in ("SIDE_DEVICE_ERROR", "SIDE_NO_MEMORY", "SIDE_NO_DEVICE_MEMORY"), n
            failed += 1
    assert failed > 15
    assert not [record.message for record in caplog.records if "queued" in record.message]


def test_lost_device() -> None:
    for n in range(1, 25):
        with pytest.raises(sidestream.DeviceLost):
            d = device(lose=n)
            s, b = sidestream.Stream(d), d.alloc(64)
            for _ in range(10):
                s.copy(b, bytearray(64))
                s.synchronize(1)


def test_threads_use_one_device() -> None:
    d = device()
    wrong: list[object] = []
    shared = sidestream.Stream(d)

    def work(k: int) -> None:
        try:
            s = sidestream.Stream(d)
            for i in range(60):
                b, out = d.empty(100, "f32"), zeros(100)
                p = d.pool.empty(100, "f32")
                memoryview(p)[:] = floats(100, k + i)
                s.copy(b, p)
                shared.spin(1e-6)
                shared.wait(s)
                shared.copy(out, b)
                shared.record().wait(10)
                if out != floats(100, k + i):
                    wrong.append((k, i))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(1000 * k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_gil_is_free_while_it_waits() -> None:
    """Another thread finishes the host-side half that this one waits for."""
    d = device()
    slots = sidestream.Slots(d, count=1, slot_bytes=64)
    ran = []

    def publish() -> None:
        time.sleep(0.1)
        ran.append(1)
        slots.acquire().publish()

    thread = threading.Thread(target=publish)
    thread.start()
    slots.take(0).release()
    assert ran
    thread.join()


def test_ctrl_c_ends_a_wait() -> None:
    d = device(hang=1)
    s = sidestream.Stream(d)
    s.spin(0.001)
    threading.Timer(0.2, _thread.interrupt_main).start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        s.synchronize()
    assert time.monotonic() - begin < 2


def test_exit_while_a_daemon_waits() -> None:
    code = """
import sidestream, threading, time
d = sidestream.Device("sim:h200,hang=1")
s = sidestream.Stream(d)
s.copy(d.alloc(8), b"12345678")
threading.Thread(target=s.synchronize, daemon=True).start()
time.sleep(0.2)
"""
    begin = time.monotonic()
    assert said(run_python(code)) == (0, "")
    assert time.monotonic() - begin < 30


def test_counts_are_flat() -> None:
    d = device()
    s, b, source, out = sidestream.Stream(d), d.alloc(4000), floats(1000), zeros(1000)
    objects = (d, s, b, source, out)

    def once() -> None:
        for _ in range(40):
            s.copy(b, source)
            s.copy(out, b)
        s.synchronize()

    once()
    before = [sys.getrefcount(o) for o in objects]
    for _ in range(20):
        once()
    assert [sys.getrefcount(o) for o in objects] == before
