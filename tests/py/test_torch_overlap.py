"""overlap_transfer_and_compute: results, their order, what they keep, and what is left when something fails."""
import contextlib
import gc
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from sidestream import _native  # noqa: E402
from sidestream.torch import overlap_transfer_and_compute, pin  # noqa: E402

overlap = sys.modules["sidestream.torch.overlap"]


def run(tensors, compute_func, **options):
    return overlap_transfer_and_compute(tensors, None, None, compute_func, device="sim", **options)


@pytest.fixture
def feeders(monkeypatch):
    """Every feeder that calls make."""
    made, real = [], overlap._Software.feeder

    def feeder(self, slots, slot_bytes):
        made.append(real(self, slots, slot_bytes))
        return made[-1]

    monkeypatch.setattr(overlap._Software, "feeder", feeder)
    return made


@pytest.mark.parametrize("buffers", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_results_in_order_and_bit_for_bit(feeders, count, buffers):
    tensors = [torch.randn(32, 32) for _ in range(count)]
    weight = torch.randn(32, 32)
    results = run(tensors, lambda x: x @ weight, buffers=buffers)
    assert len(results) == count and all(torch.equal(y, x @ weight) for x, y in zip(tensors, results))
    assert len(feeders) == 1 and feeders[0].held() == 0


def test_nothing():
    assert run([], None) == [] and overlap_transfer_and_compute([], None, None, None) == []


def test_shapes_dtypes_and_strides_as_they_come():
    x = torch.randn(6, 8)
    tensors = [x, x.t(), x[:, ::2], x[2], torch.tensor(3), torch.empty(0, 5), x.to(torch.bfloat16), x > 0, torch.randn(1 << 20), x.to_sparse(),
               torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(3, requires_grad=True),
               torch.randn(2, dtype=torch.complex64).conj(), torch.ones(4).to(torch.float8_e4m3fn)]
    shapes = []
    results = run(tensors, lambda y: shapes.append(tuple(y.shape)) or (y.clone() if y.layout == torch.strided else y.to_dense()))
    assert shapes == [tuple(t.shape) for t in tensors]
    for before, after in zip(tensors, results):
        before = before.detach() if before.layout == torch.strided else before.to_dense()
        assert after.dtype == before.dtype and not after.requires_grad
        if before.dtype == torch.float8_e4m3fn:  # equal() does not know it
            before, after = before.float(), after.float()
        assert torch.equal(after, before)


def test_inputs_are_not_the_callers_memory():
    tensors = [torch.ones(4) for _ in range(5)]
    run(tensors, lambda x: x.mul_(0))
    assert all(torch.equal(t, torch.ones(4)) for t in tensors)


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_results_that_are_their_slots_keep_them(feeders, buffers):
    tensors = [torch.full((50,), float(i)) for i in range(7)]
    results = run(tensors, lambda x: x, buffers=buffers)
    assert all(torch.equal(x, y) for x, y in zip(tensors, results))
    assert sum(feeder.held() for feeder in feeders) == 7
    more = run([torch.full((50,), -1.0)] * 7, lambda x: x[1:], buffers=buffers)
    assert all(torch.equal(x, y) for x, y in zip(tensors, results)) and all(torch.all(y == -1) for y in more)
    first = feeders[:]
    del results, more
    gc.collect()
    assert sum(feeder.held() for feeder in first) == 0


def test_some_results_keep_their_slots(feeders):
    tensors = [torch.full((50,), float(i)) for i in range(20)]
    results = run(tensors, lambda x: x if x[0] % 3 == 0 else x + 0)
    assert all(torch.equal(x, y) for x, y in zip(tensors, results))
    assert sum(feeder.held() for feeder in feeders) == 7 and len(feeders) <= 8


def test_autograd_keeps_what_it_saved():
    tensors = [torch.randn(4, 3) for _ in range(6)]
    weight = torch.randn(3, 2, requires_grad=True)
    losses = run(tensors, lambda x: (x @ weight).square().sum())
    torch.stack(losses).sum().backward()
    expected = torch.zeros_like(weight)
    for x in tensors:
        expected += x.t() @ (2 * (x @ weight.detach()))
    torch.testing.assert_close(weight.grad, expected)


def test_results_of_any_kind():
    assert run([torch.ones(2), torch.ones(3)], lambda x: {"n": x.numel(), "x": None}) == [{"n": 2, "x": None}, {"n": 3, "x": None}]
    assert run([torch.ones(2)], lambda x: None) == [None]


class Streams(overlap._Software):
    """The software device with streams as readers, as on a GPU: computing is queued, and takes virtual time."""

    def __init__(self, spec, count=1):
        super().__init__(spec)
        self.transfer = _native.Stream(self.native)
        self.streams = [_native.Stream(self.native) for _ in range(count)]

    def feeder(self, slots, slot_bytes):
        return _native.Feeder(self.native, slots=slots, slot_bytes=slot_bytes, queue=slots, timing=False, copy_stream=self.transfer)

    def reader(self, i):
        return self.streams[i % len(self.streams)]

    def finish(self):
        for stream in self.streams:
            stream.synchronize()


def test_copies_run_under_computes():
    """The order of issue: in exact virtual time, one buffer is the serial loop and two reach the bound."""
    count, compute_s = 10, 120e-6
    tensors = [torch.full((1 << 20,), float(i)) for i in range(count)]
    taken = {}
    with pin(tensors, device="sim:h200"):
        for buffers in (1, 2, 3):
            side = Streams("sim:h200")
            begin = side.native.now_ns()
            run_of = overlap._Run(side, list(tensors), buffers)
            run_of.results(lambda x: side.streams[0].spin(compute_s))
            side.finish()
            taken[buffers] = (side.native.now_ns() - begin) / 1e9
            overlap._end(side.native, run_of.feeders)
    copy_s = taken[1] / count - compute_s
    assert copy_s > 0.5 * compute_s
    for buffers in (2, 3):
        assert taken[buffers] < 1.01 * (copy_s + count * compute_s)


@pytest.mark.parametrize("buffers, streams", [(1, 1), (2, 1), (2, 2), (3, 2)])
def test_no_slot_is_rewritten_while_it_is_read(buffers, streams):
    """Reads that are queued and late, with the argument long dropped, in any order that the waits allow."""
    tensors = [torch.full((4096,), float(i)) for i in range(8)]
    for seed in range(20):
        side = Streams(f"sim:h200,seed={seed}", streams)
        read = []

        def compute(x):
            stream = side.streams[len(read) % streams]
            stream.spin(50e-6)
            read.append(_native.HostBuffer(side.native, 16384))
            _native.copy_d2h(side.native, stream, -1, read[-1], x.data_ptr(), 16384)

        with pin(tensors, device=side.native.spec) if seed % 2 else contextlib.nullcontext():
            run_of = overlap._Run(side, list(tensors), buffers)
            run_of.results(compute)
            side.finish()
        got = [torch.from_dlpack(block.capsule(2, 32, (4096,))) for block in read]
        assert all(torch.equal(x, y) for x, y in zip(tensors, got)), seed
        overlap._end(side.native, run_of.feeders)


@pytest.mark.parametrize("at", [0, 1, 4, 9])
def test_an_exception_ends_it_with_nothing_in_flight(feeders, at):
    tensors = [torch.full((1000,), float(i)) for i in range(10)]
    seen = []

    def compute(x):
        if x[0] == at:
            raise ZeroDivisionError(f"item {at}")
        seen.append(int(x[0]))

    with pytest.raises(ZeroDivisionError, match=f"item {at}"):
        run(tensors, compute)
    gc.collect()
    assert seen == list(range(at)) and [feeder.held() for feeder in feeders] == [0]
    for tensor in tensors:  # nobody reads them any more
        tensor.fill_(-1)
    assert run(tensors, lambda x: float(x.sum())) == [-1000.0] * 10


def test_wait_false():
    tensors = [torch.full((100,), float(i)) for i in range(5)]
    results = run(tensors, lambda x: x * 2, wait=False)
    assert all(torch.equal(y, x * 2) for x, y in zip(tensors, results))


def test_disabled(monkeypatch, feeders):
    monkeypatch.setenv("SIDESTREAM_DISABLE", "1")
    tensors = [torch.full((100,), float(i)) for i in range(5)]
    results = run(tensors, lambda x: x.mul_(2))
    assert all(torch.equal(y, x * 2) for x, y in zip(tensors, results)) and not feeders


def test_iterables_and_tuples():
    assert run((torch.ones(i) for i in (1, 2)), lambda x: int(x.sum())) == [1, 2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without GPU")
def test_without_gpu_no_device_need_be_named():
    assert overlap_transfer_and_compute([torch.ones(3)], None, None, lambda x: int(x.sum())) == [3]
    with pytest.raises(RuntimeError, match="no CUDA device"):
        overlap_transfer_and_compute([torch.ones(3)], None, None, lambda x: x, device="cuda")


def test_streams_of_the_cpu():
    stream = torch.Stream(device="cpu")
    assert overlap_transfer_and_compute([torch.ones(3)], [stream, stream], stream, lambda x: int(x.sum())) == [3]


@pytest.mark.parametrize("arguments, kind, says", [
    (([3], None, None, None), TypeError, r"cpu_tensors\[0\] is a int"),
    (([torch.ones(1)], None, None, None, 0), ValueError, "buffers is 0"),
    (([torch.ones(1)], None, None, None, True), ValueError, "buffers is True"),
    (([torch.ones(1)], None, None, None, 2.0), ValueError, "buffers is 2.0"),
    (([torch.ones(1)], [], None, None), ValueError, "compute_stream is an empty list"),
    (([torch.ones(1)], 1, None, None), TypeError, "1 is no stream"),
    (([torch.ones(1)], None, "side", None), TypeError, "'side' is no stream"),
    (([torch.ones(1)], None, None, None), TypeError, "compute_func is None"),
])
def test_bad_arguments(arguments, kind, says):
    with pytest.raises(kind, match=says):
        overlap_transfer_and_compute(*arguments)


def test_exit_with_results_held():
    code = """if 1:
        import torch
        from sidestream.torch import overlap_transfer_and_compute
        kept = overlap_transfer_and_compute([torch.ones(1000)] * 5, None, None, lambda x: x, wait=False)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@cuda
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("pinned", [True, False])
def test_on_cuda(pinned, streams, wait):
    tensors = [torch.randn(512, 512) for _ in range(12)]
    weight = torch.randn(512, 512, device="cuda")
    expected = [x.cuda() @ weight for x in tensors]
    if pinned:
        tensors = [x.pin_memory() for x in tensors]
    computes, transfer = [torch.cuda.Stream() for _ in range(streams)], torch.cuda.Stream()

    def compute(x):
        torch.cuda._sleep(2_000_000)
        return x @ weight

    for _ in range(5):
        results = overlap_transfer_and_compute(tensors, computes if streams > 1 else computes[0], transfer, compute, wait=wait)
        if wait:
            assert all(stream.query() for stream in computes)
        assert all(torch.equal(a, b) for a, b in zip(results, expected))


@cuda
def test_slots_kept_on_cuda():
    tensors = [torch.full((1 << 20,), float(i)).pin_memory() for i in range(9)]
    results = overlap_transfer_and_compute(tensors, torch.cuda.Stream(), torch.cuda.Stream(), lambda x: x, wait=False)
    assert [float(y.mean()) for y in results] == [float(i) for i in range(9)]


@cuda
def test_memory_is_given_back_on_cuda():
    tensors = [torch.ones(1 << 20).pin_memory() for _ in range(6)]
    compute, transfer = torch.cuda.Stream(), torch.cuda.Stream()
    overlap_transfer_and_compute(tensors, compute, transfer, lambda x: None, wait=False)
    torch.cuda.synchronize()
    overlap_transfer_and_compute(tensors, compute, transfer, lambda x: None)  # ends what the one before left
    before = torch.cuda.memory_allocated()
    for wait in (True, False, True):
        overlap_transfer_and_compute(tensors, compute, transfer, lambda x: None, wait=wait)
        torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


@cuda
def test_an_exception_on_cuda_leaves_nothing_in_flight():
    compute = torch.cuda.Stream()

    def fail(x):
        torch.cuda._sleep(50_000_000)
        if len(seen) == 3:
            raise ZeroDivisionError
        seen.append(x * 1)

    seen = []
    with pytest.raises(ZeroDivisionError):
        overlap_transfer_and_compute([torch.ones(1000, 1000).pin_memory() for _ in range(8)], compute, torch.cuda.Stream(), fail, wait=False)
    assert compute.query()


@cuda
def test_captures_are_refused_on_cuda():
    with pytest.raises(RuntimeError, match="captured"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            overlap_transfer_and_compute([torch.ones(3)], None, None, lambda x: x)
