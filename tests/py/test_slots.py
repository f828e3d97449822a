"""Slots: rings, lists and tables; no read before filled, no write before drained; nothing is lost when a slot is dropped."""
import os
import signal
import sys
import threading

import pytest
import sidestream
from sim import SEEDS, device, floats, pinned, run_python, said


def read(d: sidestream.Device, stream: sidestream.Stream, buffer: sidestream.Buffer) -> list[float]:
    out = d.pool.empty(buffer.nbytes // 4, "float32")
    stream.copy(out, buffer)
    return memoryview(out).tolist()


def test_attributes() -> None:
    d = device()
    slots = sidestream.Slots(d, "list", count=3, slot_bytes=64, where="pinned")
    assert (slots.policy, slots.where, slots.count, slots.slot_bytes, slots.device) == ("list", "pinned", 3, 64, d)
    slot = slots.acquire()
    assert slot.buffer.kind == "pinned" and slot.buffer.nbytes == 64 and 0 <= slot.index < 3 and slot.generation >= 1
    for wrong in ({"policy": "heap"}, {"where": "disk"}, {"count": 0}, {"slot_bytes": 0}, {"readers": 17}, {"timeout": -1}):
        with pytest.raises(ValueError):
            sidestream.Slots(d, **{"count": 1, "slot_bytes": 8} | wrong)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_ring_has_no_race(depth: int) -> None:
    """The host runs ahead: 12 items go through before anything is waited for."""
    for seed in SEEDS:
        d = device(seed)
        copy, compute = sidestream.Stream(d), sidestream.Stream(d)
        ring = sidestream.Slots(d, count=depth, slot_bytes=400)
        sources = [pinned(d, floats(100, i)) for i in range(12)]
        outs = [d.pool.empty(100, "float32") for _ in range(12)]
        for i in range(12):
            with ring.acquire(copy) as slot:
                copy.copy(slot.buffer, sources[i])
            with ring.take(i, compute) as slot:
                assert slot.key == i
                compute.copy(outs[i], slot.buffer)
        for i in range(12):
            assert memoryview(outs[i]).tolist() == list(floats(100, i)), (seed, i)


def test_host_reads_and_writes() -> None:
    d = device()
    ring = sidestream.Slots(d, count=2, slot_bytes=8, where="pinned")
    for i in range(6):
        with ring.acquire() as slot:
            memoryview(slot.buffer)[:] = bytes([i]) * 8
        with ring.take(i) as slot:
            assert memoryview(slot.buffer) == bytes([i]) * 8


def test_several_readers() -> None:
    d = device()
    ring = sidestream.Slots(d, count=1, slot_bytes=8, readers=2, where="pageable")
    ring.acquire().publish()
    one, two = ring.take(0), ring.take(0)
    one.release()
    assert ring.acquire(block=False) is None
    two.release()
    assert ring.acquire(block=False) is not None


def test_list_is_given_back() -> None:
    d = device()
    s = sidestream.Stream(d)
    slots = sidestream.Slots(d, "list", count=2, slot_bytes=400)
    held = []
    for i in range(2):
        slot = slots.acquire(s)
        s.copy(slot.buffer, floats(100, i))
        slot.publish()
        held.append(slot)
    assert slots.acquire(s, block=False) is None
    with slots.take(held[1].key, s) as slot:
        assert read(d, s, slot.buffer) == list(floats(100, 1))
        with pytest.raises(sidestream.WrongState):
            held[1].give_back()
    held[1].give_back()
    with pytest.raises(sidestream.WrongState, match="already"):
        held[1].give_back()
    again = slots.acquire(s, block=False)
    assert again is not None and again.index == held[1].index and again.generation > held[1].generation


def test_table() -> None:
    d = device()
    table = sidestream.Slots(d, "table", count=2, slot_bytes=8, where="pinned")
    for key in (70, 80):
        with table.acquire(key=key) as slot:
            memoryview(slot.buffer)[:] = bytes([key]) * 8
    with table.take(70) as slot:
        assert bytes(memoryview(slot.buffer)) == b"F" * 8
    with pytest.raises(sidestream.NotFound) as told:
        table.take(3)
    assert isinstance(told.value, LookupError)
    with pytest.raises(sidestream.InvalidArgument):
        table.acquire(key=70)


def test_states() -> None:
    d = device()
    ring = sidestream.Slots(d, count=2, slot_bytes=8)
    slot = ring.acquire()
    with pytest.raises(sidestream.WrongState, match="written"):
        slot.release()
    buffer, view = slot.buffer, slot.view("float32")
    slot.publish()
    for use in (slot.publish, slot.abandon, lambda: memoryview(buffer), lambda: view.data, lambda: slot.view(), slot.__dlpack__):
        with pytest.raises(sidestream.WrongState):
            use()
    with ring.take(0) as slot:
        with pytest.raises(sidestream.WrongState, match="read"):
            slot.publish()
        slot.release()  # by hand; the end of the block leaves it
    with pytest.raises(TypeError, match="stream"):
        ring.acquire().publish(3)  # type: ignore[arg-type]


def test_exception_abandons() -> None:
    d = device()
    ring = sidestream.Slots(d, count=2, slot_bytes=8)
    with pytest.raises(KeyError), ring.acquire():
        raise KeyError
    with pytest.raises(sidestream.Cancelled):
        ring.take(0)
    with ring.acquire():
        pass
    ring.take(1).release()


def test_dropped_slots_go_back() -> None:
    d = device()
    s = sidestream.Stream(d)
    slots = sidestream.Slots(d, "list", count=1, slot_bytes=8)
    for _ in range(5):
        slots.acquire(s)
    slot = slots.acquire(s)
    slot.publish()
    for _ in range(5):
        slots.take(slot.key, s)
    slot.give_back()


def test_one_thread_that_waits_for_itself() -> None:
    ring = sidestream.Slots(device(), count=1, slot_bytes=8)
    slot = ring.acquire()
    slot.publish()
    taken = ring.take(0)
    with pytest.raises(sidestream.WouldDeadlock):
        ring.acquire()
    taken.release()


def test_cancel_wakes_others() -> None:
    ring = sidestream.Slots(device(), count=1, slot_bytes=8)
    told: list[BaseException] = []

    def wait() -> None:
        try:
            ring.take(0)
        except sidestream.Error as error:
            told.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    ring.cancel()
    thread.join(20)
    assert [type(error) for error in told] == [sidestream.Cancelled]
    with pytest.raises(sidestream.Cancelled):
        ring.acquire()


def test_stuck() -> None:
    """In a program of its own: what a stuck device may touch is kept for ever, as it should be."""
    code = """
import sidestream
d = sidestream.Device("sim:hang=1")
s = sidestream.Stream(d)
ring = sidestream.Slots(d, count=1, slot_bytes=8, timeout=0.5)
with ring.acquire(s):
    s.spin(1)
try:
    ring.drain(0.5)
except sidestream.Stuck as error:
    print(error.status_name)
"""
    assert said(run_python(code)) == (0, "SIDE_STUCK\n")


def test_drain() -> None:
    d = device()
    ring = sidestream.Slots(d, count=1, slot_bytes=8)
    s = sidestream.Stream(d)
    with ring.acquire(s):
        s.spin(1)
    before = d.now_ns()
    ring.drain()
    assert d.now_ns() - before >= 1e9


def test_exports_outlive_slots() -> None:
    d = device()
    slot = sidestream.Slots(d, count=1, slot_bytes=8, where="pinned").acquire()
    m = memoryview(slot.buffer)
    slot.publish()
    del slot, d
    m[:] = b"12345678"
    assert m.tobytes() == b"12345678"


def test_two_threads_share_a_ring() -> None:
    d = device(5)
    ring, n, wrong = sidestream.Slots(d, count=2, slot_bytes=400), 60, []
    copy, compute = sidestream.Stream(d), sidestream.Stream(d)

    def produce() -> None:
        for i in range(n):
            with ring.acquire(copy) as slot:
                copy.copy(slot.buffer, pinned(d, floats(100, i)))

    thread = threading.Thread(target=produce)
    thread.start()
    for i in range(n):
        with ring.take(i, compute) as slot:
            if read(d, compute, slot.buffer) != list(floats(100, i)):
                wrong.append(i)
    thread.join()
    assert wrong == []


def test_flat() -> None:
    d = device()
    s = sidestream.Stream(d)

    def once() -> None:
        slots = sidestream.Slots(d, "list", count=2, slot_bytes=4096, where="pinned")
        slot = slots.acquire(s)
        slot.view("f32").__dlpack__()
        slot.publish()
        slots.take(slot.key, s)

    def counts() -> tuple[int, ...]:
        return (d.pool.stats()["granted_bytes"], d.memory()[0], sys.getrefcount(s), sys.getrefcount(d),
                *(sys.getrefcount(kind) for kind in (sidestream.Slot, sidestream.Slots, sidestream.Buffer)))

    once()
    before = counts()
    for _ in range(100):
        once()
    assert counts() == before


BLOCKED = {
    "acquire": "slots = sidestream.Slots(d, count=1, slot_bytes=8)\nslots.acquire().publish()\ncall = slots.acquire",
    "take": "slots = sidestream.Slots(d, count=1, slot_bytes=8)\ncall = lambda: slots.take(0)",
    "next": "f = _native.Feeder(d, slots=1, slot_bytes=8)\ncall = lambda: f.next(-1, None, None)",
}


@pytest.mark.parametrize("call", BLOCKED)
def test_ctrl_c_ends_a_blocked_call(call: str) -> None:
    """Nobody else would: a program that does not hear it runs into the time limit."""
    done = run_python("import os, sidestream, signal, threading\nfrom sidestream import _native\nd = sidestream.Device('sim')\n" + BLOCKED[call] +
                      "\nthreading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()\ncall()")
    assert done.returncode == -2 and done.stderr.splitlines()[-1] == "KeyboardInterrupt" and done.stderr.count("Traceback") == 1


def test_what_was_interrupted_is_as_it_was() -> None:
    d = device()
    slots = sidestream.Slots(d, count=1, slot_bytes=8)
    for call, undo in ((lambda: slots.take(0), lambda: slots.acquire().publish()), (slots.acquire, lambda: slots.take(0).release())):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            call()
        undo()
    with slots.acquire(block=False) as slot:
        assert slot.key == 1


def test_a_handler_of_the_programs_own_does_not_end_a_wait() -> None:
    slots = sidestream.Slots(device(), count=1, slot_bytes=8)
    got: list[int] = []

    def handler(*_: object) -> None:
        got.append(1)
        threading.Timer(0.1, lambda: slots.acquire().publish()).start()

    before = signal.signal(signal.SIGINT, handler)
    try:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert slots.take(0).key == 0 and got == [1]
    finally:
        signal.signal(signal.SIGINT, before)
