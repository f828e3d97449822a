"""Pipelines: every kind of source and sink, push and pull, and every way to end one."""
import array
import gc
import os
import pathlib
import sys
import threading
import time
import traceback
import weakref

import pytest
import sidestream
from sim import SEEDS, device, floats, pinned, run_python, said, zeros

N, ITEMS = 500, 10
BYTES = 4 * N


def double(stream: sidestream.Stream, item: sidestream.Item) -> None:
    stream.affine(item.result, item.data.view("float32"), 2, 1)


def inputs(n: int = ITEMS) -> list[array.array]:
    return [floats(N, i) for i in range(n)]


def wanted(i: int) -> array.array:
    return floats(N, 2 * i + 1, 2)


def test_lists() -> None:
    for seed in SEEDS:
        outs = [zeros(N) for _ in range(ITEMS)]
        stats = sidestream.Pipeline(device(seed), inputs(), double, outs).run()
        assert outs == [wanted(i) for i in range(ITEMS)]
        assert (stats["items"], stats["bytes_in"], stats["bytes_out"]) == (ITEMS, ITEMS * BYTES, ITEMS * BYTES) and stats["time_s"] > 0


def test_pinned_both_ends_and_streams() -> None:
    for seed in SEEDS:
        d = device(seed)
        outs = [pinned(d, zeros(N)) for _ in range(ITEMS)]
        streams = [sidestream.Stream(d) for _ in range(2)]
        seen = []

        def compute(stream: sidestream.Stream, item: sidestream.Item) -> None:
            seen.append(streams.index(stream))
            double(stream, item)

        line = sidestream.Pipeline(d, [pinned(d, x) for x in inputs()], compute, outs, compute_streams=streams, depth=2)
        assert line.run()["pinned_bytes"] == 0 and seen == [0, 1] * (ITEMS // 2)
        assert [memoryview(out).tolist() for out in outs] == [list(wanted(i)) for i in range(ITEMS)]


def test_items_of_several_arrays_are_packed() -> None:
    outs = [zeros(N) for _ in range(3)]
    parts = [(x[:100], x[100:101], x[101:]) for x in inputs(3)]
    sidestream.Pipeline(device(), parts, double, outs).run()
    assert outs == [wanted(i) for i in range(3)]


def test_runs_again() -> None:
    outs = [zeros(N) for _ in range(3)]
    line = sidestream.Pipeline(device(), inputs(3), double, outs)
    line.run()
    outs[1][:] = zeros(N)
    assert line.run()["items"] == 3 and outs[1] == wanted(1)
    assert line.stats()["items"] == 3


def test_callables() -> None:
    main, threads, got = threading.get_ident(), set(), []

    def source(number: int, view: memoryview) -> int | None:
        threads.add(threading.get_ident())
        if number == ITEMS:
            return None
        assert not view.readonly and view.nbytes == BYTES
        view[:] = floats(N, number).tobytes()
        return BYTES

    def sink(number: int, view: memoryview) -> None:
        threads.add(threading.get_ident())
        assert view.readonly
        got.append((number, view.tobytes()))

    done: list[tuple[int, int, int]] = []
    stats = sidestream.Pipeline(device(), source, double, sink, item_bytes=BYTES, result_bytes=BYTES, streams=2,
                                progress=lambda *counts: done.append(counts)).run()
    assert got == [(i, wanted(i).tobytes()) for i in range(ITEMS)] and stats["items"] == ITEMS and main not in threads
    assert done and done == sorted(done) and done[-1][0] <= ITEMS


def test_short_items_and_results() -> None:
    got = []

    def compute(stream: sidestream.Stream, item: sidestream.Item) -> None:
        assert item.result.nbytes == 64 and item.lane == 0
        stream.copy(item.result, item.data)
        with pytest.raises(ValueError, match="result_nbytes"):
            item.result_nbytes = 65
        item.result_nbytes = item.nbytes if item.number != 2 else 0
        assert item.result.nbytes == 64

    source = [bytes([i] * (i + 1)) for i in range(4)]
    sidestream.Pipeline(device(), source, compute, lambda i, view: got.append(view.tobytes()), result_bytes=64).run()
    assert [one for one in got if one] == [b"\0", b"\1\1", b"\3\3\3\3"]


def test_files(tmp_path: pathlib.Path) -> None:
    data = bytes(range(256)) * 41
    (tmp_path / "in").write_bytes(data)

    def compute(stream: sidestream.Stream, item: sidestream.Item) -> None:
        stream.copy(item.result, item.data)
        item.result_nbytes = item.nbytes

    with open(tmp_path / "in", "rb") as source, open(tmp_path / "out", "w+b") as sink:
        assert sidestream.Pipeline(device(), source, compute, sink, item_bytes=1000, result_bytes=1000).run()["bytes_out"] == len(data)
        sink.seek(0)
        assert sink.read() == data
        sidestream.Pipeline(device(), (source, 100, 2000), compute, (sink.fileno(), 5), item_bytes=300, result_bytes=300).run()
        sink.seek(0)
        assert sink.read() == data[:5] + data[100:2100] + data[2005:]


def test_arguments() -> None:
    d = device()
    for wrong, match in (({"source": lambda n, v: None}, "item_bytes"), ({"source": [b"1"], "sink": print}, "result_bytes"),
                         ({"source": [b"1"], "depth": 65}, "depth"), ({"source": [b"1"], "depth": -1}, "depth is -1"),
                         ({"source": [b"1"], "item_bytes": -1}, "item_bytes"),
                         ({"source": [b"1"], "compute_s": -1.0}, "compute_s is -1"),
                         ({"source": [b"1"], "compute": print, "streams": 17}, "streams"), ({"source": [d.alloc(8)]}, "host memory")):
        with pytest.raises(ValueError, match=match):
            sidestream.Pipeline(d, **wrong)
    for wrong, match in (({"source": 3.5}, "source"), ({"source": [b"1"], "compute": 3}, "compute"), ({"source": ["text"]}, "source"),
                         ({"source": [b"1"], "log": 3}, "Log"), ({"source": [b"1"], "sink": 3.5}, "sink"),
                         ({"source": [b"1"], "compute": print, "compute_streams": [3]}, "compute_streams")):
        with pytest.raises(TypeError, match=match):
            sidestream.Pipeline(d, **wrong)
    with pytest.raises(ValueError, match="writable"):
        sidestream.Pipeline(d, [b"1"], double, [b"1"])
    with pytest.raises(sidestream.OutOfDeviceMemory):
        sidestream.Pipeline(device(memory="1M"), [b"1"], item_bytes=8 << 20)
    with pytest.raises(sidestream.WrongState):
        sidestream.Pipeline(d, [b"1"]).run()


def test_depth_is_chosen() -> None:
    d = device()
    many = [bytes(65536)] * 50
    depths = [sidestream.Pipeline(d, many, lambda stream, item: None, compute_s=seconds).stats()["depth"] for seconds in (0.0, 1e-5, 1.0)]
    assert 2 <= min(depths) and depths[0] == max(depths) <= 8 and depths[2] == 2
    assert sidestream.Pipeline(d, many).stats()["depth"] >= 3


def test_empty() -> None:
    d = device()
    assert sidestream.Pipeline(d, [], double).run()["items"] == 0
    assert list(sidestream.Pipeline(d, []).pull(sidestream.Stream(d))) == []


# ---------------------------------------------------------------- pull

def test_pull() -> None:
    for seed in SEEDS:
        d = device(seed)
        s = sidestream.Stream(d)
        line = sidestream.Pipeline(d, inputs(), depth=2)
        for _ in range(2):
            outs = []
            for item in line.pull(s):
                outs.append(d.pool.empty(N, "f32"))
                s.copy(outs[-1], item.data)
            assert [memoryview(out).tolist() for out in outs] == [list(x) for x in inputs()]


def test_pull_with_results() -> None:
    d = device()
    s, outs = sidestream.Stream(d), [zeros(N) for _ in range(ITEMS)]
    line = sidestream.Pipeline(d, inputs(), sink=outs)
    for item in line.pull(s):
        double(s, item)
    line.rewind()
    assert outs == [wanted(i) for i in range(ITEMS)]


def test_pull_stopped_goes_on_and_rewinds() -> None:
    d = device()
    s = sidestream.Stream(d)
    line = sidestream.Pipeline(d, inputs())
    for item in line.pull(s):
        if item.number == 2:
            break
    del item
    assert next(line.pull(s)).number == 3
    line.rewind()
    assert [item.number for item in line.pull(s)] == list(range(ITEMS))


def test_next_and_done() -> None:
    d = device()
    s = sidestream.Stream(d)
    line = sidestream.Pipeline(d, inputs(4), depth=2)
    held = [line.next(s), line.next(s)]
    assert [item.number for item in held] == [0, 1]
    with pytest.raises(sidestream.WouldDeadlock):
        line.next(s)
    data = held[1].data
    line.done(held[1], s)
    with pytest.raises(sidestream.WrongState, match="done already"):
        line.done(held[1], s)
    with pytest.raises(sidestream.WrongState):
        memoryview(data)
    line.done(held[0], s)
    with pytest.raises(TypeError, match="Item"):
        line.done(3, s)  # type: ignore[arg-type]
    rest = []
    while (item := line.next(s)) is not None:
        rest.append(item.number)
        line.done(item, s)
    assert rest == [2, 3]


def test_memory_of_an_item_ends_with_it() -> None:
    d = device()
    kept = []

    def compute(stream: sidestream.Stream, item: sidestream.Item) -> None:
        kept.append((item, item.data, item.data.view("f32")))

    sidestream.Pipeline(d, inputs(3), compute).run()
    for item, data, view in kept:
        for use in (lambda: memoryview(data), lambda: view.data, view.__dlpack__, lambda: sidestream.Stream(d).copy(view, b"1")):
            with pytest.raises(sidestream.WrongState, match="went back"):
                use()
        assert item.number >= 0


# ---------------------------------------------------------------- ends

def raising(where: str) -> sidestream.Pipeline:
    def boom(*args: object) -> int:
        raise ZeroDivisionError(where)

    ends = {"source": lambda n, v: BYTES if n < 5 else None, "compute": double, "sink": lambda n, v: None, "progress": lambda *a: None}
    ends[where] = boom
    return sidestream.Pipeline(device(), item_bytes=BYTES, result_bytes=BYTES, **ends)


@pytest.mark.parametrize("where", ["source", "compute", "sink", "progress"])
def test_exception_in_a_callback(where: str) -> None:
    line = raising(where)
    with pytest.raises(ZeroDivisionError, match=where) as told:
        line.run()
    assert "boom" in [frame.name for frame in traceback.extract_tb(told.value.__traceback__)]
    with pytest.raises(sidestream.Error):  # the pipeline is done for
        line.run()


def test_exception_in_the_source_of_a_pull() -> None:
    d = device()

    def source(number: int, view: memoryview) -> int:
        if number == 3:
            raise ZeroDivisionError
        return 8

    s, seen = sidestream.Stream(d), []
    with pytest.raises(ZeroDivisionError):
        for item in sidestream.Pipeline(d, source, item_bytes=8).pull(s):
            seen.append(item.number)
    assert seen == list(range(len(seen))) and len(seen) <= 3


@pytest.mark.parametrize("value", ["x", 3.5, -1, BYTES + 1, 1 << 70])
def test_source_that_returns_nonsense(value: object) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        sidestream.Pipeline(device(), lambda n, v: value, double, item_bytes=BYTES).run()  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("where", ["source", "sink"])
def test_a_view_must_not_be_kept(where: str) -> None:
    kept: list[memoryview] = []
    ends = {"source": lambda n, v: BYTES if n < 5 else None, "sink": lambda n, v: None}
    ends[where] = lambda n, v: kept.append(v[1:]) or BYTES
    with pytest.raises(BufferError, match="kept"):
        sidestream.Pipeline(device(), ends["source"], double, ends["sink"], item_bytes=BYTES, result_bytes=BYTES).run()
    assert len(bytes(kept[0])) == BYTES - 1  # still memory


def test_cancel_from_another_thread() -> None:
    line: sidestream.Pipeline

    def source(number: int, view: memoryview) -> int:
        time.sleep(0.01)
        if number == 5:
            threading.Thread(target=line.cancel).start()
        return 8

    line = sidestream.Pipeline(device(), source, lambda s, i: None, item_bytes=8)
    with pytest.raises(sidestream.Cancelled):
        line.run()


def test_only_cancel_from_a_callback() -> None:
    told = []

    def compute(stream: sidestream.Stream, item: sidestream.Item) -> None:
        for use in (line.run, line.close, line.rewind):
            with pytest.raises(sidestream.WrongState) as one:
                use()
            told.append(one.value)
        line.cancel()

    line = sidestream.Pipeline(device(), inputs(), compute)
    with pytest.raises(sidestream.Cancelled):
        line.run()
    assert len(told) % 3 == 0 and told


def test_close() -> None:
    d = device()
    source = inputs()
    with sidestream.Pipeline(d, source, double, [zeros(N) for _ in range(ITEMS)]) as line:
        line.run()
    line.close()
    for use in (line.run, line.stats, line.rewind, lambda: line.pull(sidestream.Stream(d))):
        with pytest.raises(sidestream.WrongState, match="closed"):
            use()
    with pytest.raises(KeyError), sidestream.Pipeline(d, source) as line:
        next(line.pull(sidestream.Stream(d)))
        raise KeyError


def test_stuck() -> None:
    d = device(hang=3)
    line = sidestream.Pipeline(d, inputs(), double, [zeros(N) for _ in range(ITEMS)], timeout=0.5)
    with pytest.raises(sidestream.Stuck):
        line.run()


def test_sources_are_held_and_let_go() -> None:
    class Array(array.array):
        pass

    d = device()
    source = [Array("f", [1, 2, 3]) for _ in range(3)]
    gone = [weakref.ref(x) for x in source]
    line = sidestream.Pipeline(d, source, lambda s, i: None)
    del source
    gc.collect()
    assert all(ref() is not None for ref in gone)
    line.run()
    line.close()
    del line
    assert all(ref() is None for ref in gone)


def test_cycle_is_collected() -> None:
    class Model:
        def __init__(self, d: sidestream.Device) -> None:
            self.line = sidestream.Pipeline(d, inputs(), self.compute, [zeros(N) for _ in range(ITEMS)])

        def compute(self, stream: sidestream.Stream, item: sidestream.Item) -> None:
            double(stream, item)

    d = device()
    free = d.memory()[0]
    model = Model(d)
    model.line.run()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and d.memory()[0] == free


def test_dropped_in_the_middle_of_a_pull() -> None:
    d = device()
    s, free = sidestream.Stream(d), d.memory()[0]
    started = threading.Event()

    def source(number: int, view: memoryview) -> int:
        started.set()
        time.sleep(0.02)
        return 8

    item = sidestream.Pipeline(d, source, item_bytes=8).next(s)
    assert started.is_set() and item is not None
    del item
    gc.collect()
    assert d.memory()[0] == free


def test_every_call_may_fail() -> None:
    failed = 0
    for n in range(1, 120):
        outs = [zeros(N) for _ in range(3)]
        d = None
        try:
            d = device(fail=n)
            sidestream.Pipeline(d, inputs(3), double, outs).run()
            assert outs == [wanted(i) for i in range(3)], n
        except sidestream.Error as error:
            assert error.status_name in ("SIDE_DEVICE_ERROR", "SIDE_NO_MEMORY", "SIDE_CALLBACK"), n
            failed += 1
    assert failed > 25


def test_two_pipelines_in_two_threads() -> None:
    d, wrong = device(), []

    def work() -> None:
        try:
            for _ in range(5):
                outs = [zeros(N) for _ in range(ITEMS)]
                sidestream.Pipeline(d, lambda n, v: v.cast("f").__setitem__(slice(None), floats(N, n)) or BYTES if n < ITEMS else None, double, outs,
                                    item_bytes=BYTES).run()
                if outs != [wanted(i) for i in range(ITEMS)]:
                    wrong.append(outs)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_flat() -> None:
    d = device()

    def once() -> None:
        outs = [zeros(N) for _ in range(3)]
        line = sidestream.Pipeline(d, inputs(3), double, outs, log=sidestream.Log(d))
        line.run()
        try:
            raising("compute").run()
        except ZeroDivisionError:
            pass

    def counts() -> tuple[int, ...]:
        gc.collect()
        return (d.memory()[0], d.pool.stats()["granted_bytes"], sys.getrefcount(d), len(os.listdir("/proc/self/task")),
                *(sys.getrefcount(kind) for kind in (sidestream.Pipeline, sidestream.Item, sidestream.Stream, sidestream.Buffer)))

    once()
    before = counts()
    for _ in range(30):
        once()
    assert counts() == before


def test_a_number_alone_is_no_file() -> None:
    d = device()
    for bad in (5, 0, True):
        with pytest.raises(TypeError, match=rf"source is {bad}; a file descriptor is given as \({bad}, offset, length\)"):
            sidestream.Pipeline(d, bad, item_bytes=8)
        with pytest.raises(TypeError, match=rf"sink is {bad}; a file descriptor is given as \({bad}, offset\)"):
            sidestream.Pipeline(d, [b"1"], lambda s, i: None, bad, result_bytes=8)


# ---------------------------------------------------------------- Ctrl-C, exit

SLOW = """
import _thread, os, signal, sidestream, sys, threading, time
d = sidestream.Device("sim")
def source(n, v):
    time.sleep(0.05)
    return 8
"""


def interrupted(call: str) -> tuple[float, str]:
    code = SLOW + f"""
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
handler = signal.getsignal(signal.SIGINT)
begin = time.monotonic()
try:
    {call}
except KeyboardInterrupt:
    print("KeyboardInterrupt", time.monotonic() - begin < 20)
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
except KeyboardInterrupt:
    print("again")
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("call", [
    "sidestream.Pipeline(d, source, lambda s, i: None, item_bytes=8).run()",
    "sidestream.Pipeline(d, lambda n, v: source(n, v) if n < 2 else time.sleep(0.7), lambda s, i: None, item_bytes=8).run()",
    "[None for item in sidestream.Pipeline(d, source, item_bytes=8).pull(sidestream.Stream(d))]",
    "sidestream.Pipeline(d, [b'1'] * 10000, lambda s, i: time.sleep(0.01)).run()"])
def test_ctrl_c(call: str) -> None:
    assert interrupted(call) == "KeyboardInterrupt True\nagain\n"


def test_a_handler_of_the_programs_own_is_not_a_stop() -> None:
    code = SLOW + """
got = []
signal.signal(signal.SIGINT, lambda *args: got.append(1))
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
print(sidestream.Pipeline(d, lambda n, v: source(n, v) if n < 10 else None, lambda s, i: None, item_bytes=8).run()["items"], got)
"""
    assert said(run_python(code)) == (0, "10 [1]\n")


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise SystemExit(3)"])
def test_exit_while_a_daemon_runs(end: str) -> None:
    code = SLOW + f"""
def run():
    try:
        sidestream.Pipeline(d, source, lambda s, i: None, lambda n, v: None, item_bytes=8, result_bytes=8).run()
    except sidestream.Cancelled:
        pass
threading.Thread(target=run, daemon=True).start()
time.sleep(0.3)
{end}
"""
    assert said(run_python(code)) == (3 if end else 0, "")


def test_exit_in_the_middle_of_a_pull() -> None:
    code = SLOW + "line = sidestream.Pipeline(d, source, item_bytes=8)\ns = sidestream.Stream(d)\nitem = line.next(s)\n"
    assert said(run_python(code)) == (0, "")
