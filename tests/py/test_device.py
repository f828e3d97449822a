"""Devices: what they tell, how long they live."""
import gc
import os
import sys
import weakref

import pytest
import sidestream
from sim import device, floats, run_python, said, zeros


def test_list_ends_with_sim() -> None:
    listed = sidestream.list_devices()
    assert listed[-1] == "sim" and all(spec.startswith("cuda:") for spec in listed[:-1])


def test_attributes() -> None:
    d = sidestream.Device("sim:t4")
    assert (d.spec, d.simulated, d.ordinal) == ("sim:t4", True, 0) and d.name.startswith("simulated")
    assert d.props["spec"] == d.spec and d.props["copy_engines"] >= 1 and len(d.props["compute_capability"]) == 2
    assert d.link["kind"] == "PCIe" and d.link["peak_gbps"] > 0
    free, total = d.memory()
    assert free == total == d.props["memory_bytes"]
    assert "sim:t4" in repr(d)


def test_auto_is_what_the_environment_says() -> None:
    done = run_python("import sidestream; print(sidestream.Device().spec)", SIDESTREAM_DEVICE="sim:gh200")
    assert said(done) == (0, "sim:gh200\n")


def test_spec_that_does_not_parse() -> None:
    with pytest.raises(sidestream.InvalidArgument, match="nonsense") as told:
        sidestream.Device("sim:nonsense")
    assert isinstance(told.value, ValueError)
    with pytest.raises(TypeError):
        sidestream.Device(3)  # type: ignore[arg-type]


def test_no_such_gpu() -> None:
    with pytest.raises(sidestream.NoDevice):
        sidestream.Device("cuda:99")


def test_close_ends_the_use_of_the_object_alone() -> None:
    with device() as d:
        stream, buffer = sidestream.Stream(d), d.empty(8, "float32")
    assert d.closed
    for use in (lambda: sidestream.Stream(d), d.memory, lambda: d.alloc(1), lambda: d.pool, lambda: d.spec, lambda: d.__enter__()):
        with pytest.raises(sidestream.WrongState, match="closed"):
            use()
    d.close()
    out = zeros(8)
    stream.copy(buffer, floats(8))
    stream.copy(out, buffer)
    stream.synchronize()
    assert out == floats(8)


def test_objects_keep_the_device_alive() -> None:
    d = device()
    gone = weakref.ref(d)
    stream = sidestream.Stream(d)
    del d
    assert gone() is not None and stream.device is gone()
    del stream
    assert gone() is None


def test_nothing_is_left_of_many() -> None:
    """Instances hold their class: its count is theirs."""
    def once() -> None:
        d = device()
        s = sidestream.Stream(d)
        b, p = d.empty(64, "float32"), d.pool.empty(64, "float32")
        s.copy(b, p)
        s.record().wait()

    kinds = (sidestream.Device, sidestream.Stream, sidestream.Event, sidestream.Buffer, sidestream.PinnedPool)
    once()
    gc.collect()
    before = [sys.getrefcount(kind) for kind in kinds]
    threads = len(os.listdir("/proc/self/task"))
    for _ in range(50):
        once()
    gc.collect()
    assert [sys.getrefcount(kind) for kind in kinds] == before
    assert len(os.listdir("/proc/self/task")) == threads


def test_every_call_may_fail_at_opening() -> None:
    """What was made before the failing call goes again; nothing hangs, nothing is half-made."""
    failed = 0
    for n in range(1, 30):
        try:
            d = device(fail=n)
            d.memory()
            assert d.link
        except sidestream.DeviceError as error:
            assert error.status_name == "SIDE_DEVICE_ERROR"
            failed += 1
    assert failed > 1


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_fork() -> None:
    d = device()
    s, b, e, pool = sidestream.Stream(d), d.empty(8, "float32"), sidestream.Event(d), d.pool
    p = pool.empty(8, "float32")
    log, slots = sidestream.Log(d), sidestream.Slots(d, count=2, slot_bytes=64)
    line = sidestream.Pipeline(d, [floats(8)])
    child = os.fork()
    if child == 0:
        uses = [d.memory, s.synchronize, s.record, lambda: s.copy(b, floats(8)), e.query, lambda: memoryview(p), lambda: b.data,
                lambda: pool.empty(8), log.spans, slots.acquire, line.run, lambda: line.pull(s), lambda: sidestream.Stream(d)]
        wrong = 0
        for use in uses:
            try:
                use()
                wrong += 1
            except sidestream.Forked:
                pass
        del uses, use, d, s, b, e, p, pool, log, slots, line  # nothing of it reaches the parent's device
        gc.collect()
        try:
            again = device()  # a device of its own works
            out, stream = zeros(4), sidestream.Stream(again)
            buffer = again.empty(4, "float32")
            stream.copy(buffer, floats(4))
            stream.copy(out, buffer)
            stream.synchronize()
            wrong += out != floats(4)
        finally:
            os._exit(wrong)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    s.copy(b, floats(8, 5))
    out = zeros(8)
    s.copy(out, b)
    s.synchronize()
    assert out == floats(8, 5) and [item.number for item in line.pull(s)] == [0]


BUSY = """
import sidestream, threading, time
d = sidestream.Device("sim:h200,check=1")
s = sidestream.Stream(d)
b, p = d.alloc(1 << 20), d.pool.alloc(1 << 20)
slots = sidestream.Slots(d, count=2, slot_bytes=64)
held = slots.acquire(s)
for _ in range(20):
    s.copy(b, bytearray(1 << 20))
    s.copy(p, b)
log = sidestream.Log(d)
"""


def test_exit_with_work_in_flight() -> None:
    assert said(run_python(BUSY)) == (0, "")


def test_exit_with_a_cycle_that_holds_all() -> None:
    assert said(run_python(BUSY + "class C: pass\nc = C(); c.all = [globals(), c, d, s, b, p, slots, held]\n")) == (0, "")


def test_use_while_the_interpreter_ends() -> None:
    """__del__ of a global runs after the exit hook: calls raise, nothing crashes."""
    code = BUSY + """
class Late:
    def __del__(self, s=s, b=b, Device=sidestream.Device, print=print):
        for use in (s.record, lambda: s.copy(b, b"x"), lambda: Device("sim")):
            try:
                use()
            except RuntimeError as e:
                print("exiting" in str(e))
late = Late()
late.self = late
"""
    assert said(run_python(code)) == (0, "True\nTrue\nTrue\n")
