"""to_host: what arrives is what was there, nobody sees it before, and sources live as long as they are read."""
import collections
import gc
import logging
import subprocess
import sys
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import sidestream.torch as st  # noqa: E402
from sidestream.torch import host, overlap, overlap_transfer_and_compute, to_host  # noqa: E402

Pair = collections.namedtuple("Pair", "first second")


def on_sim(tensor):
    """The tensor in memory of the software device, where a copy to the host takes its (virtual) time."""
    [there] = overlap_transfer_and_compute([tensor], None, None, lambda x: x, device="sim")
    return there


def sample(dtype, shape):
    count = int(torch.tensor(shape).prod())
    raw = torch.arange(count * torch.empty(0, dtype=dtype).element_size(), dtype=torch.int64) % 7 % 2
    return raw.to(torch.uint8).view(dtype).reshape(shape)


DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
          torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_every_dtype(dtype):
    x = sample(dtype, (5, 3))
    y = to_host(on_sim(x), device="sim").get()
    assert y.dtype == dtype and y.shape == x.shape
    assert torch.equal(y.view(torch.uint8), x.view(torch.uint8))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1), (300, 7), (1 << 20,)])
def test_values_of_every_shape(shape):
    x = torch.randn(shape)
    assert torch.equal(to_host(on_sim(x), device="sim").get(), x)


@pytest.mark.parametrize("view", [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[2:5], lambda x: x[:1].expand(4, -1), lambda x: x.flip(0),
                                  lambda x: x[3]])
def test_views(view):
    x = torch.randn(8, 6)
    y = to_host(view(on_sim(x)), device="sim").get()
    assert torch.equal(y, view(x))
    assert y.stride() == view(x).clone().stride()


def test_dense_strides_are_kept():
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    y = to_host(on_sim(x), device="sim").get()
    assert torch.equal(y, x) and y.is_contiguous(memory_format=torch.channels_last)


def test_conjugates_and_negatives_are_resolved():
    x = torch.randn(4, dtype=torch.complex64)
    assert torch.equal(to_host(on_sim(x).conj(), device="sim").get(), x.conj().resolve_conj())
    assert torch.equal(to_host(on_sim(x).conj().imag, device="sim").get(), -x.imag)


def test_nothing_in_it():
    y = to_host(torch.empty(0, 4, dtype=torch.int32), device="sim")
    assert y.ready() and y.get().shape == (0, 4) and y.get().dtype == torch.int32


def test_autograd_ends_here():
    x = torch.randn(3, requires_grad=True)
    y = to_host(x * 2, device="sim").get()
    assert not y.requires_grad and torch.equal(y, x.detach() * 2)
    assert not to_host(torch.nn.Parameter(torch.ones(2)), device="sim").get().requires_grad


def test_nested_values_keep_their_types():
    x = torch.arange(4.0)
    value = {"a": x, "b": [x + 1, (x + 2, "text")], "c": Pair(x + 3, 7), "n": None}
    got = to_host(value, device="sim").get()
    assert list(got) == list(value) and isinstance(got["c"], Pair) and got["c"].second == 7 and got["b"][1][1] == "text" and got["n"] is None
    assert torch.equal(got["a"], x) and torch.equal(got["b"][0], x + 1) and torch.equal(got["b"][1][0], x + 2) and torch.equal(got["c"].first, x + 3)
    assert got["a"] is not x
    assert to_host([]).get() == [] and to_host("text").get() == "text"


def test_cpu_tensors_pass():
    x = torch.randn(3)
    copy = to_host(x)
    assert copy.ready() and copy.wait(0) and copy.get().data_ptr() == x.data_ptr()


def test_other_layouts_go_at_once():
    x = torch.eye(3).to_sparse()
    copy = to_host({"s": x}, device="sim")
    assert copy.ready() and torch.equal(copy.get()["s"].to_dense(), torch.eye(3))


def test_modules_are_refused():
    with pytest.raises(TypeError, match="Linear.*state_dict"):
        to_host(torch.nn.Linear(1, 1))


def test_get_is_the_same_each_time():
    copy = to_host(on_sim(torch.ones(4)), device="sim")
    assert copy.get() is copy.get() and copy.ready() and copy.wait(0)


def hold_back(monkeypatch):
    """Copies stay under way until the event is set that this returns."""
    arrived = threading.Event()
    real_query, real_wait = host._Flight.query, host._Flight.wait

    def query(self):
        return arrived.is_set() and real_query(self)

    def wait(self, timeout):
        return arrived.wait(timeout) and real_wait(self, None)

    monkeypatch.setattr(host._Flight, "query", query)
    monkeypatch.setattr(host._Flight, "wait", wait)
    return arrived


def test_nothing_is_handed_out_before_it_arrived(monkeypatch):
    x = torch.randn(100)
    arrived = hold_back(monkeypatch)
    copy = to_host(on_sim(x), device="sim")
    assert not copy.ready() and not copy.wait(0.01) and "under way" in repr(copy)
    with pytest.raises(TimeoutError, match="0.01 s"):
        copy.get(0.01)
    threading.Timer(0.1, arrived.set).start()
    assert torch.equal(copy.get(), x) and copy.ready() and "ready" in repr(copy)


def test_sources_and_blocks_outlive_a_dropped_handle(monkeypatch):
    feeders, real = [], overlap._Software.feeder
    monkeypatch.setattr(overlap._Software, "feeder", lambda *arguments: feeders.append(real(*arguments)) or feeders[-1])
    arrived, lane = hold_back(monkeypatch), host._lane("sim")
    source = on_sim(torch.ones(1000))
    copy = to_host(source, device="sim")
    del source, copy
    gc.collect()
    [held] = [flight.held for flight in lane.flights if feeders[0].held()]
    assert held[0].numel() == 1000 and held[1].nbytes == 4000
    del held
    arrived.set()
    assert lane.finish(5)
    lane.sweep()
    assert not lane.flights and feeders[0].held() == 0


def test_handles_dropped_early_do_no_harm():
    kept = []
    for i in range(300):
        copy = to_host([on_sim(torch.full((257,), float(i))), on_sim(torch.full((3,), i))], device="sim")
        if i % 3 == 0:
            kept.append((i, copy))
        del copy
    for i, copy in kept:
        a, b = copy.get()
        assert torch.all(a == i) and torch.all(b == i)
    host._lane("sim").finish(5)
    host._lane("sim").sweep()
    assert not host._lane("sim").flights


def test_results_outlive_everything_else():
    y = to_host(on_sim(torch.arange(5000)), device="sim").get()
    others = [to_host(on_sim(torch.zeros(5000, dtype=torch.int64)), device="sim") for _ in range(8)]
    assert all(torch.all(o.get() == 0) for o in others) and torch.equal(y, torch.arange(5000))


def test_short_of_pinned_memory_blocks_and_says_so_once(monkeypatch, caplog):
    def refuse(*_):
        raise host._native.OverBudget("the budget is 1 byte")

    monkeypatch.setattr(host._native, "HostBuffer", refuse)
    monkeypatch.setattr(host, "_short_was_said", False)
    x = on_sim(torch.randn(9))
    with caplog.at_level(logging.WARNING, "sidestream.torch"):
        first, second = to_host(x, device="sim"), to_host([x], device="sim")
    assert first.ready() and torch.equal(first.get(), x) and torch.equal(second.get()[0], x)
    assert len(caplog.records) == 1 and "1 byte" in caplog.text


def test_a_copy_that_fails_half_way_holds_what_is_under_way(monkeypatch):
    real, calls = host._native.copy_d2h, []

    def fail_second(*args):
        calls.append(args)
        if len(calls) == 2:
            raise host._native.Stuck("as asked")
        return real(*args)

    lane = host._lane("sim")
    lane.finish(5)
    lane.sweep()
    a, b = on_sim(torch.ones(10)), on_sim(torch.ones(20))
    monkeypatch.setattr(host._native, "copy_d2h", fail_second)
    with pytest.raises(host._native.Stuck, match="as asked"):
        to_host([a, b], device="sim")
    [flight] = lane.flights
    assert a.data_ptr() in [t.data_ptr() for t in flight.held if isinstance(t, torch.Tensor)]
    assert flight.wait(5)


def test_threads():
    wrong = []

    def work(seed):
        for i in range(50):
            x = torch.full((64 + seed,), float(seed * 1000 + i))
            if not torch.equal(to_host(on_sim(x), device="sim").get(), x):
                wrong.append((seed, i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_exit_waits_for_copies_under_way():
    code = """if 1:
        import atexit
        import torch
        from sidestream.torch import host, overlap_transfer_and_compute, to_host
        flights = []
        atexit.register(lambda: print([flight.done for flight in flights]))      # after the hook of to_host
        x = overlap_transfer_and_compute([torch.ones(1 << 20)], None, None, lambda x: x, device="sim")
        kept = to_host(x, device="sim")
        to_host(x, device="sim")
        flights += host._lane("sim").flights
        print([flight.done for flight in flights], flush=True)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[False, False]\n[True, True]\n", "")


def test_before_overwrite():
    x = torch.randn(1000)
    source = on_sim(x)
    copy = to_host(source, device="sim")
    copy.before_overwrite()
    source.zero_()
    assert torch.equal(copy.get(), x)
    to_host(torch.ones(1)).before_overwrite()  # nothing to wait for


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
LONG = 50_000_000  # cycles


@cuda
def test_on_cuda_nothing_is_seen_early():
    x = torch.randn(1 << 20, device="cuda")
    expected = (x * 2).cpu()
    for _ in range(20):
        torch.cuda._sleep(LONG // 10)
        copy = to_host({"y": x * 2, "t": (x[:1000] * 2).view(10, 100).t()})
        garbage = [torch.zeros(1 << 20, device="cuda") for _ in range(3)]  # would take the memory of x * 2, were it free
        got = copy.get()
        assert torch.equal(got["y"], expected) and torch.equal(got["t"], expected[:1000].view(10, 100).t())
        assert got["y"].is_pinned()
        del garbage


@cuda
def test_on_cuda_to_host_does_not_block():
    x = torch.ones(1000, device="cuda")
    to_host(x).get()
    torch.cuda._sleep(10 * LONG)
    copy = to_host(x)
    assert not copy.ready() and not copy.wait(0.001)
    assert torch.equal(copy.get(), torch.ones(1000))


@cuda
def test_on_cuda_before_overwrite():
    x = torch.ones(1 << 24, device="cuda")
    for i in range(20):
        x.fill_(i)
        copy = to_host(x)
        copy.before_overwrite()
        x.fill_(-1)
        assert torch.all(copy.get() == i)


@cuda
def test_on_cuda_memory_is_given_back():
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        to_host(torch.ones(1 << 20, device="cuda"))
    to_host(torch.ones(1, device="cuda")).get()
    host._lane("cuda:0").sweep()
    assert torch.cuda.memory_allocated() == before


@cuda
def test_on_cuda_captures_are_refused():
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="to_host: the current stream is being captured"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            to_host(x)


@pytest.mark.parametrize("call,error,said", [
    (lambda copy: copy.get(timeout="30"), TypeError, "get: timeout is '30'; give seconds, as a number, or None"),
    (lambda copy: copy.wait(timeout="30"), TypeError, "wait: timeout is '30'; give seconds"),
    (lambda copy: copy.wait(True), TypeError, "wait: timeout is True; give seconds"),
    (lambda copy: copy.get(float("nan")), ValueError, "get: timeout is nan; give seconds"),
    (lambda copy: copy.before_overwrite("s"), TypeError, "before_overwrite: stream is 's'; give a torch.cuda.Stream"),
    (lambda copy: st.to_host(torch.zeros(1), device=5), TypeError, "to_host: device is 5; leave it out"),
    (lambda copy: st.to_host(torch.zeros(1), device="gpu"), ValueError, "to_host: device is 'gpu'; leave it out"),
    (lambda copy: st.pin(torch.zeros(1), device=1.5), TypeError, "pin: device is 1.5; name the one"),
    (lambda copy: st.pin(torch.zeros(1), device="gpu"), ValueError, "pin: device 'gpu' is no CUDA device; name the one"),
    (lambda copy: st.used_on(torch.zeros(1), "s"), TypeError, "used_on: stream is 's'; give a torch.cuda.Stream"),
    (lambda copy: st.overlap_transfer_and_compute(5, None, None, abs), TypeError, "cpu_tensors is 5; give a list of tensors"),
    (lambda copy: st.overlap_transfer_and_compute([torch.zeros(1)], None, None, abs, device="gpu"), ValueError, "device is 'gpu'; give 'cuda'"),
    (lambda copy: st.overlap_transfer_and_compute([torch.zeros(1)], None, None, abs, device=3), TypeError, "device is 3; give 'cuda'"),
])
def test_arguments_that_are_none_are_named(call: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as told:
        call(st.to_host(torch.zeros(1), device="sim"))
    assert said in str(told.value)
