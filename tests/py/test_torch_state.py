"""state_dict counts what was handed out, whatever was read ahead."""
from __future__ import annotations

from typing import Any, Iterator

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import sidestream.torch as st  # noqa: E402
from torch_help import Indexed, fake, feeder  # noqa: E402, F401

pytestmark = pytest.mark.filterwarnings("ignore:.*are held")


class Stateful:
    """A loader that goes on where it was, as torchdata's StatefulDataLoader; its state is one list that it changes in place."""

    def __init__(self, count: int = 12) -> None:
        self.count, self.at, self.resumed = count, [0], False

    def __iter__(self) -> Iterator[Any]:
        if not self.resumed:
            self.at[0] = 0
        self.resumed = False
        while self.at[0] < self.count:
            self.at[0] += 1
            yield torch.full((4,), float(self.at[0] - 1))
        self.at[0] = 0

    def state_dict(self) -> dict:
        return {"at": self.at}

    def load_state_dict(self, state: dict) -> None:
        self.at, self.resumed = list(state["at"]), True


def row(number: int) -> Any:
    return torch.full((4,), float(number))


def take(batches: Any, count: int) -> list[float]:
    return [float(next(batches)[0]) for _ in range(count)]


@pytest.mark.parametrize("make", [lambda: Indexed(12, row), Stateful], ids=["plain", "stateful"])
@pytest.mark.parametrize("stop", [0, 1, 5, 11, 12])
def test_goes_on_where_the_loop_was(feeder: Any, make: Any, stop: int) -> None:
    prefetcher = st.Prefetcher(make(), device="sim", depth=3)
    batches = iter(prefetcher)
    assert take(batches, stop) == list(range(stop))
    state = prefetcher.state_dict()
    resumed = st.Prefetcher(make(), device="sim")
    resumed.load_state_dict(state)
    assert [float(batch[0]) for batch in resumed] == list(range(stop, 12))
    assert [float(batch[0]) for batch in resumed] == list(range(12)), "the epoch after is a whole one"


def test_states_are_the_loaders_own(feeder: Any) -> None:
    prefetcher = st.Prefetcher(Stateful(), device="sim")
    batches = iter(prefetcher)
    take(batches, 5)
    state = prefetcher.state_dict()
    assert state == {"at": [5]}
    take(batches, 2)
    assert state == {"at": [5]} and prefetcher.state_dict() == {"at": [7]}
    loader = Stateful()
    loader.load_state_dict(state)
    assert [float(batch[0]) for batch in loader] == list(range(5, 12))


def test_counts_go_on_after_resuming(feeder: Any) -> None:
    prefetcher = st.Prefetcher(Indexed(12, row), device="sim")
    prefetcher.load_state_dict({"delivered": 4})
    assert prefetcher.state_dict() == {"delivered": 4}
    batches = iter(prefetcher)
    assert take(batches, 3) == [4, 5, 6] and prefetcher.state_dict() == {"delivered": 7}


def test_after_the_last_batch_a_new_epoch_begins(feeder: Any) -> None:
    for prefetcher in (st.Prefetcher(Indexed(3, row), device="sim"), st.Prefetcher(Stateful(3), device="sim")):
        assert len(list(prefetcher)) == 3
        prefetcher.load_state_dict(prefetcher.state_dict())
        assert len(list(prefetcher)) == 3


def test_loading_ends_the_iteration(feeder: Any) -> None:
    prefetcher = st.Prefetcher(Indexed(12, row), device="sim")
    batches = iter(prefetcher)
    take(batches, 2)
    prefetcher.load_state_dict({"delivered": 6})
    with pytest.raises(RuntimeError, match="given a state"):
        next(batches)
    assert [float(batch[0]) for batch in prefetcher] == list(range(6, 12))


def test_passing_through_counts_as_well() -> None:
    prefetcher = st.Prefetcher(Indexed(5, row), device="cpu")
    batches = iter(prefetcher)
    take(batches, 2)
    assert prefetcher.state_dict() == {"delivered": 2}


@pytest.mark.parametrize("state", [{}, {"delivered": -1}, {"delivered": "3"}, None, {"at": 3}])
def test_states_that_are_none(state: Any) -> None:
    with pytest.raises(ValueError, match="delivered"):
        st.Prefetcher(Indexed(3, row), device="sim").load_state_dict(state)
