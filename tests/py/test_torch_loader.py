"""With a real DataLoader: the same batches and the same random state as without, whatever its workers."""
from __future__ import annotations

import random
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
np = pytest.importorskip("numpy", reason="NumPy is not installed")

import sidestream.torch as st  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset  # noqa: E402
from torch_help import fake, feeder  # noqa: E402, F401

pytestmark = [pytest.mark.filterwarnings("ignore:.*are held"), pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
              pytest.mark.filterwarnings("ignore:.*use of fork.*"), pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*")]


class Squares(torch.utils.data.Dataset):
    def __init__(self, count: int = 53, bad: int = -1) -> None:
        self.count, self.bad = count, bad

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        if i == self.bad:
            raise OSError(f"sample {i} is broken")
        return {"x": torch.full((3, 4), float(i)), "i": i, "name": f"n{i}", "y": np.float64(i * i)}


class Counting(IterableDataset):
    def __iter__(self) -> Any:
        return iter(torch.arange(20.0))


def seed() -> None:
    torch.manual_seed(11)
    np.random.seed(12)
    random.seed(13)


def run(loader: Any, epochs: int = 1) -> tuple[list[Any], list[Any]]:
    """Batches of the epochs; the random states before each next() of the loop, and after."""
    batches, states = [], []
    for epoch in range(epochs):
        for batch in loader:
            batches.append(batch)
            states.append((torch.get_rng_state(), np.random.get_state()[1].tolist(), np.random.get_state()[2], random.getstate()))
            torch.rand(2), np.random.rand(), random.random()  # the loop's own draws
    states.append((torch.get_rng_state(), np.random.get_state()[1].tolist(), np.random.get_state()[2], random.getstate()))
    return batches, states


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return a == b


WORKERS = [{"num_workers": 0}, {"num_workers": 2, "multiprocessing_context": "fork"}, {"num_workers": 2, "multiprocessing_context": "spawn"},
           {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True}]


@pytest.mark.parametrize("options", WORKERS, ids=lambda o: "-".join(map(str, o.values())))
def test_batches_and_random_states_are_those_of_the_loader(feeder: Any, options: dict) -> None:
    spawn = options.get("multiprocessing_context") == "spawn"
    if spawn and feeder == "fake":
        pytest.skip("spawned workers are slow to start, and do not know of the feeder")
    make = lambda: DataLoader(Squares(), batch_size=8, shuffle=True, **options)  # noqa: E731
    epochs = 1 if spawn else 2
    seed()
    expected, expected_states = run(make(), epochs)
    seed()
    got, states = run(st.Prefetcher(make(), device="sim"), epochs)
    assert len(got) == 7 * epochs and all(same(a, b) for a, b in zip(got, expected))
    for number, (a, b) in enumerate(zip(states, expected_states)):
        assert torch.equal(a[0], b[0]) and a[1:] == b[1:], f"random state before step {number}"
    assert len(states) == len(expected_states)


def test_an_early_break_leaves_the_next_epoch_as_it_would_be(feeder: Any) -> None:
    def epochs(loader: Any) -> list[Any]:
        out = []
        for stop in (3, 1, 100):
            for number, batch in enumerate(loader):
                out.append(batch["i"].tolist())
                if number == stop:
                    break
        return out

    seed()
    expected = epochs(DataLoader(Squares(), batch_size=8, shuffle=True))
    seed()
    assert epochs(st.Prefetcher(DataLoader(Squares(), batch_size=8, shuffle=True), device="sim")) == expected


def test_two_runs_are_equal(feeder: Any) -> None:
    runs = []
    for _ in range(2):
        seed()
        runs.append(run(st.Prefetcher(DataLoader(Squares(), batch_size=8, shuffle=True, num_workers=2), device="sim", depth=4))[0])
    assert all(same(a, b) for a, b in zip(*runs))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_sample_comes_in_its_place(feeder: Any, workers: int) -> None:
    loader = DataLoader(Squares(40, bad=25), batch_size=8, num_workers=workers)
    got = []
    with pytest.raises(OSError, match="sample 25 is broken"):
        for batch in st.Prefetcher(loader, device="sim"):
            got.append(batch["i"].tolist())
    assert got == [list(range(i, i + 8)) for i in (0, 8, 16)]


def test_an_iterable_dataset(feeder: Any) -> None:
    got = torch.cat(list(st.Prefetcher(DataLoader(Counting(), batch_size=3), device="sim")))
    assert torch.equal(got, torch.arange(20.0))


def test_pin_memory_where_there_is_nothing_to_pin_for(feeder: Any) -> None:
    loader = DataLoader(Squares(), batch_size=8, pin_memory=True, num_workers=2)
    assert [batch["i"].tolist() for batch in st.Prefetcher(loader, device="sim")] == [batch["i"].tolist() for batch in loader]


def test_distributed_sampler_and_set_epoch(feeder: Any) -> None:
    data = Squares()
    make = lambda: DataLoader(data, batch_size=4, sampler=DistributedSampler(data, num_replicas=2, rank=1, shuffle=True, seed=4))  # noqa: E731
    plain, prefetcher = make(), st.Prefetcher(make(), device="sim")
    seen = []
    for epoch in range(3):
        plain.sampler.set_epoch(epoch)
        prefetcher.set_epoch(epoch)
        seen.append([batch["i"].tolist() for batch in prefetcher])
        assert seen[-1] == [batch["i"].tolist() for batch in plain]
    assert seen[0] != seen[1] and prefetcher.dataset is data and prefetcher.batch_size == 4 and len(prefetcher) == len(plain)


def test_breaks_leave_no_thread_and_no_worker(feeder: Any) -> None:
    import multiprocessing
    import time
    before = threading.active_count()
    for _ in range(3):
        for batch in st.Prefetcher(DataLoader(Squares(), batch_size=4, num_workers=2), device="sim"):
            break
    del batch
    end = time.monotonic() + 20
    while (threading.active_count() > before or multiprocessing.active_children()) and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() <= before and not multiprocessing.active_children()
