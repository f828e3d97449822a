"""What only a GPU can show: races, streams, graphs, the driver's memory. Skips, saying so, where there is none."""
from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
if not torch.cuda.is_available():
    pytest.skip("no GPU that PyTorch sees", allow_module_level=True)

import sidestream.torch as st  # noqa: E402

DEVICE = torch.device("cuda", 0)
SLEEP = 2_000_000  # cycles, about 1 ms


class Indexed:
    """Batches that hold their number everywhere."""

    def __init__(self, count: int, shape: tuple[int, ...] = (8, 3, 64, 64), pinned: bool = False) -> None:
        self.count, self.shape, self.pinned = count, shape, pinned

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        for number in range(self.count):
            batch = torch.full(self.shape, float(number))
            yield batch.pin_memory() if self.pinned else batch


def wrong(batch: torch.Tensor, number: float) -> torch.Tensor:
    return (batch != number).any().long()


def unfenced_ring(loader, depth: int = 2):
    side = torch.cuda.Stream()
    ring = [torch.empty(loader.shape, device=DEVICE) for _ in range(depth)]
    for number, batch in enumerate(loader):
        with torch.cuda.stream(side):
            ring[number % depth].copy_(batch, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
        yield ring[number % depth]


def count_wrong(batches, sleep: int = SLEEP) -> int:
    """Batches with a wrong value. Waits for its own stream alone: another thread may be capturing."""
    bad = torch.zeros((), dtype=torch.long, device=DEVICE)
    for number, batch in enumerate(batches):
        torch.cuda._sleep(sleep)
        bad += wrong(batch, number)
        del batch
    torch.cuda.current_stream().synchronize()
    return int(bad)


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_no_batch_is_overwritten_while_it_is_read(pinned, depth):
    assert count_wrong(st.Prefetcher(Indexed(200, pinned=pinned), depth=depth)) == 0


def test_the_control_without_the_wait_corrupts():
    assert count_wrong(unfenced_ring(Indexed(200, pinned=True))) > 100


@pytest.mark.parametrize("size", [1, 1000, 1 << 20, 5 << 20])
def test_values_of_nested_batches(size):
    loader = [{"x": torch.randn(size), "y": (torch.arange(size % 1000 + 1), torch.rand(3, 5).bfloat16()), "name": str(i),
               "mask": torch.rand(7) > 0.5, "many": [torch.full((i + 1,), i, dtype=torch.int16) for i in range(20)]} for i in range(12)]
    for got, want in zip(st.Prefetcher(loader), loader):
        assert got["name"] == want["name"]
        for a, b in ((got["x"], want["x"]), (got["y"][0], want["y"][0]), (got["y"][1], want["y"][1]), (got["mask"], want["mask"])):
            assert a.is_cuda and a.dtype == b.dtype and torch.equal(a.cpu(), b)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got["many"], want["many"]))


def test_channels_last_keeps_its_strides():
    batch = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    (got,) = st.Prefetcher([batch])
    assert got.stride() == batch.stride() and torch.equal(got.cpu(), batch)


def test_held_batches_keep_their_values():
    with pytest.warns(UserWarning):
        kept = list(st.Prefetcher(Indexed(30)))
    assert all(int(wrong(batch, number)) == 0 for number, batch in enumerate(kept))


def test_views_hold_their_slot():
    kept = []
    with pytest.warns(UserWarning):
        for batch in st.Prefetcher(Indexed(20)):
            torch.cuda._sleep(SLEEP)
            kept.append(batch[0, 0])
    assert all(int(wrong(view, number)) == 0 for number, view in enumerate(kept))


def test_used_on_another_stream():
    other = torch.cuda.Stream()
    bad = torch.zeros((), dtype=torch.long, device=DEVICE)
    torch.cuda.synchronize()
    for number, batch in enumerate(st.Prefetcher(Indexed(200), depth=1)):
        st.used_on(batch, other)
        with torch.cuda.stream(other):
            torch.cuda._sleep(SLEEP)
            bad += wrong(batch, number)
        del batch
    torch.cuda.synchronize()
    assert int(bad) == 0


def test_consumer_on_a_side_stream():
    with torch.cuda.stream(torch.cuda.Stream()):
        assert count_wrong(st.Prefetcher(Indexed(100))) == 0


def test_delayed_backward_uses_the_batches_own_values():
    weight = torch.ones(8, 3, 64, 64, device=DEVICE, requires_grad=True)
    losses = []
    with pytest.warns(UserWarning):
        for batch in st.Prefetcher(Indexed(12)):
            losses.append((weight * batch).sum())
            torch.cuda._sleep(SLEEP)
            del batch
    sum(losses).backward()
    assert torch.all(weight.grad == sum(range(12)))


def test_release_in_the_autograd_thread():
    """The last reference is autograd's, and dies in its thread."""
    weight = torch.ones(8, 3, 64, 64, device=DEVICE, requires_grad=True)
    for _ in range(3):
        weight.grad = None
        for batch in st.Prefetcher(Indexed(60)):
            loss = (weight * batch).sum()
            del batch
            loss.backward()
        assert torch.all(weight.grad == sum(range(60)))


def test_memory_is_flat_over_40_epochs():
    prefetcher = st.Prefetcher(Indexed(6))
    seen = []
    for _ in range(40):
        for batch in prefetcher:
            (batch * 2).sum()
            del batch
        torch.cuda.synchronize()
        seen.append((torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]))
    assert seen[5] == seen[-1]


def test_memory_is_flat_with_a_new_prefetcher_each_epoch():
    seen = []
    for _ in range(40):
        for batch in st.Prefetcher(Indexed(6)):
            (batch * 2).sum()
            del batch
        torch.cuda.synchronize()
        gc.collect()
        seen.append((torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]))
    assert seen[10][0] == seen[-1][0]
    assert seen[10][1] - seen[-1][1] <= 4 << 20


def test_slab_is_in_torchs_statistics():
    before = torch.cuda.memory_allocated()
    batches = iter(st.Prefetcher(Indexed(10, shape=(1 << 20,)), depth=2))
    first = next(batches)
    assert torch.cuda.memory_allocated() - before >= 4 * (4 << 20)
    del first, batches
    gc.collect()
    st.Prefetcher([torch.zeros(1)])  # any call sweeps
    torch.cuda.synchronize()


def test_an_exception_of_the_loader_comes_in_its_place():
    def loader():
        for number in range(5):
            yield torch.full((1000,), float(number))
        raise KeyError("broken sample")

    class Loader:
        def __iter__(self):
            return loader()

    got = []
    with pytest.raises(KeyError, match="broken sample"):
        for batch in st.Prefetcher(Loader()):
            got.append(float(batch[0]))
    assert got == [0, 1, 2, 3, 4]


def test_early_break_and_again():
    prefetcher = st.Prefetcher(Indexed(50))
    for _ in range(10):
        for number, batch in enumerate(prefetcher):
            assert int(wrong(batch, number)) == 0
            if number == 3:
                break
    assert count_wrong(prefetcher, 1000) == 0


def test_two_prefetchers_in_two_threads():
    results = []

    def run():
        with torch.cuda.stream(torch.cuda.Stream()):
            results.append(count_wrong(st.Prefetcher(Indexed(100))))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == [0, 0]


def test_static_feeds_a_graph():
    total = torch.zeros((), device=DEVICE)
    prefetcher = st.Prefetcher(Indexed(60), static=True)
    graph = None
    for number, batch in enumerate(prefetcher):
        if graph is None:
            address = batch.data_ptr()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                batch.sum()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                total += batch.double().sum().float()
        assert batch.data_ptr() == address
        graph.replay()
    torch.cuda.synchronize()
    assert float(total) == sum(number * 8 * 3 * 64 * 64 for number in range(60))


def test_capture_elsewhere_is_left_intact():
    """A capture in one thread while the prefetcher of another copies."""
    stop = threading.Event()
    seen = []

    def run():
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                seen.append(count_wrong(st.Prefetcher(Indexed(20)), 1000))

    thread = threading.Thread(target=run)
    thread.start()
    x = torch.ones(1000, device=DEVICE)
    try:
        for _ in range(20):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                y = x * 2
            graph.replay()
            torch.cuda.current_stream().synchronize()
            assert float(y.sum()) == 2000
    finally:
        stop.set()
        thread.join(120)
    assert seen and not any(seen)


def test_a_batch_that_dies_in_a_capture_is_not_rewritten():
    prefetcher = st.Prefetcher(Indexed(40, shape=(1000,)))
    batches = iter(prefetcher)
    out = torch.zeros((), device=DEVICE)
    first = next(batches)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(first.sum())
        del first
    for number, batch in enumerate(batches, 1):
        assert int(wrong(batch, number)) == 0
        del batch
    graph.replay()
    torch.cuda.synchronize()
    assert float(out) == 0


def test_next_in_a_capture_says_so():
    batches = iter(st.Prefetcher(Indexed(10)))
    next(batches)
    with pytest.raises(RuntimeError, match="captur"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            next(batches)
    torch.cuda.synchronize()


def test_budget_falls_back():
    assert count_wrong(st.Prefetcher(Indexed(20, shape=(1 << 20,)), budget=1 << 20), 1000) == 0


def test_disabled(monkeypatch):
    monkeypatch.setenv("SIDESTREAM_DISABLE", "1")
    assert count_wrong(st.Prefetcher(Indexed(20)), 1000) == 0


@pytest.mark.parametrize("workers,start", [(2, "fork"), (2, "spawn")])
def test_dataloader_with_workers(workers, start):
    data = torch.utils.data.TensorDataset(torch.arange(4096, dtype=torch.float32).view(1024, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=100, num_workers=workers, multiprocessing_context=start, pin_memory=True)
    prefetcher = st.Prefetcher(loader)
    for _ in range(2):
        got = torch.cat([batch[0].cpu() for batch in prefetcher])
        assert torch.equal(got, data.tensors[0])


EXITS = {
    "batch alive": "b = next(iter(p))",
    "iterator alive": "it = iter(p); b = next(it); torch.cuda._sleep(10**8)",
    # By then it is in next(), in the loader, or between them. In PyTorch's own code without the GIL no daemon may be: it aborts.
    "in a thread": ("import itertools, threading, time\n"
                    "p = st.Prefetcher(torch.full((1000,), 1.0) for i in itertools.count() if not time.sleep(0.01))\n"
                    "threading.Thread(target=lambda: [None for x in p], daemon=True).start()\ntime.sleep(3)"),
    "exception": "it = iter(p); next(it); raise SystemExit(0)",
}


@pytest.mark.parametrize("name", EXITS)
def test_exit(name):
    program = ("import torch, sidestream.torch as st, warnings\nwarnings.simplefilter('ignore')\n"
               "p = st.Prefetcher([torch.full((1 << 20,), float(i)) for i in range(40)])\n" + EXITS[name])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Fatal" not in done.stderr, done.stderr


# ---------------------------------------------------------------- to_host, pin, overlap


def test_to_host_waits_for_the_tensor():
    handles = []
    for number in range(50):
        x = torch.empty(1 << 18, device=DEVICE)
        torch.cuda._sleep(SLEEP)
        x.fill_(number)
        handles.append(st.to_host(x))
        del x  # the source is held until the copy is done
    for number, handle in enumerate(handles):
        got = handle.get()
        assert got.device.type == "cpu" and torch.all(got == number)


def test_to_host_dropped_early_leaves_memory_alone():
    for number in range(100):
        x = torch.full((1 << 18,), float(number), device=DEVICE)
        torch.cuda._sleep(SLEEP // 10)
        st.to_host(x)
        y = torch.zeros(1 << 18, device=DEVICE)
        assert float(y.sum()) == 0
    torch.cuda.synchronize()


def test_pin_in_place():
    x = torch.randn(3 << 20)
    address = x.data_ptr()
    with st.pin(x):
        assert x.is_pinned() and x.data_ptr() == address
        assert torch.equal(x.to(DEVICE, non_blocking=True).cpu(), x)
    assert not x.is_pinned()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    model[1].weight = model[0].weight
    handle = st.pin(model)
    assert all(p.is_pinned() for p in model.parameters())
    handle.unpin()
    assert not any(p.is_pinned() for p in model.parameters())


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_classic(pinned, streams, buffers):
    items = [torch.randn(256, 256 + i) for i in range(12)]
    items = [item.pin_memory() for item in items] if pinned else items
    w = torch.randn(256, 256, device=DEVICE)
    compute = [torch.cuda.Stream() for _ in range(streams)]
    transfer = torch.cuda.Stream()

    def step(x):
        torch.cuda._sleep(SLEEP // 4)
        return w @ x

    got = st.overlap_transfer_and_compute(items, compute if streams > 1 else compute[0], transfer, step, buffers=buffers)
    for a, item in zip(got, items):
        assert torch.equal(a, w @ item.to(DEVICE))


def test_classic_results_that_alias_their_slot():
    items = [torch.full((1 << 16,), float(i)).pin_memory() for i in range(10)]
    got = st.overlap_transfer_and_compute(items, torch.cuda.Stream(), torch.cuda.Stream(), lambda x: x[: 1 << 15])
    assert all(torch.all(x == i) for i, x in enumerate(got))


def test_classic_without_waiting():
    items = [torch.full((1 << 20,), float(i)).pin_memory() for i in range(10)]

    def step(x):
        torch.cuda._sleep(SLEEP)
        return x + 1

    got = st.overlap_transfer_and_compute(items, torch.cuda.Stream(), torch.cuda.Stream(), step, wait=False)
    assert all(bool(torch.all(x == i + 1)) for i, x in enumerate(got))
    assert st.overlap_transfer_and_compute([], torch.cuda.Stream(), torch.cuda.Stream(), step) == []
