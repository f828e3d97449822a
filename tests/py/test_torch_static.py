"""static=True: the same tensors each time, refilled; what has another layout is told."""
from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import sidestream.torch as st  # noqa: E402
from torch_help import Indexed, fake, feeder, wrong  # noqa: E402, F401


def make(number: int) -> Any:
    return {"x": torch.full((4, 6), float(number)), "y": [torch.full((3,), number, dtype=torch.uint8), number],
            "last": torch.full((2, 3, 4, 5), float(number)).to(memory_format=torch.channels_last), "small": torch.full((), number).bool(),
            "f8": torch.full((5,), float(number)).to(torch.float8_e4m3fn)}


def tensors(batch: Any) -> list[Any]:
    return [batch["x"], batch["y"][0], batch["last"], batch["small"], batch["f8"]]


def test_the_same_tensors_each_time(feeder: Any) -> None:
    prefetcher = st.Prefetcher(Indexed(8, make), device="sim", static=True)
    first = None
    for _ in range(3):
        for number, batch in enumerate(prefetcher):
            first = first or [(t, t.data_ptr()) for t in tensors(batch)]
            assert all(t is before and t.data_ptr() == address for t, (before, address) in zip(tensors(batch), first))
            assert wrong(batch["x"], number) == 0 and wrong(batch["y"][0], number) == 0 and batch["y"][1] == number
            assert wrong(batch["last"], number) == 0 and batch["last"].is_contiguous(memory_format=torch.channels_last)
            assert bool(batch["small"]) == bool(number) and wrong(batch["f8"].float(), number) == 0
    assert prefetcher.stats().held_copies == 0 and prefetcher.stats().batches == 24


def test_keeping_it_is_overwriting_it(feeder: Any) -> None:
    kept = [batch for batch in st.Prefetcher(Indexed(5), device="sim", static=True)]
    assert all(wrong(batch, 4) == 0 for batch in kept)


@pytest.mark.parametrize("make_batch", [lambda n: torch.full((2,), float(n)), make], ids=["tensor", "nest"])
def test_a_list_of_all_is_warned_of_once(feeder: Any, make_batch: Any) -> None:
    prefetcher = st.Prefetcher(Indexed(20, make_batch), device="sim", static=True)
    with pytest.warns(UserWarning, match="static=True hands out the same tensors each time.*Keep batch.clone()") as told:
        for _ in range(2):
            list(prefetcher)
    assert len(told) == 1 and told[0].filename == __file__


@pytest.mark.filterwarnings("error")
def test_a_loop_that_means_it_is_not_warned(feeder: Any) -> None:
    prefetcher = st.Prefetcher(Indexed(30, make), device="sim", static=True)
    for _ in range(2):
        batches = iter(prefetcher)
        captured = next(batches)
        x, inputs = captured["x"], tensors(captured)
        for batch in batches:
            again = batch["x"]
            assert again is x and inputs[0] is x


def test_autograd_notices_a_refill(feeder: Any) -> None:
    w = torch.ones(4, 8, requires_grad=True)
    batches = iter(st.Prefetcher(Indexed(5), device="sim", static=True))
    loss = (w * next(batches)).sum()
    next(batches)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_tensors_that_are_not_packed_are_fixed_too(feeder: Any) -> None:
    class Sub(torch.Tensor):
        pass

    def mixed(number: int) -> Any:
        return [torch.full((3,), float(number)), torch.full((2,), float(number)).as_subclass(Sub)]

    first = None
    for number, batch in enumerate(st.Prefetcher(Indexed(5, mixed), device="sim", static=True)):
        first = first or list(batch)
        assert all(t is before for t, before in zip(batch, first)) and wrong(batch[1].as_subclass(torch.Tensor), number) == 0


@pytest.mark.parametrize("second,said", [
    (torch.zeros(3, 6), r"\(4, 6\).*\(3, 6\).*drop_last=True"),
    (torch.zeros(4, 6, dtype=torch.float64), "float32.*float64"),
    ([torch.zeros(4, 6), torch.zeros(2)], "had 1 tensors, this one has 2"),
    (torch.zeros(6, 4).t(), "strides"),
    (torch.zeros(100, 100), r"\(100, 100\)"),
    (torch.zeros(4, 6, requires_grad=True), "packed"),
])
def test_another_layout_is_told(feeder: Any, second: Any, said: str) -> None:
    batches = iter(st.Prefetcher([torch.ones(4, 6), second], device="sim", static=True))
    first = next(batches)
    with pytest.raises(ValueError, match=said):
        next(batches)
    assert wrong(first, 1) == 0


def test_what_cannot_be_refilled_is_told(feeder: Any) -> None:
    for leaf in (torch.ones(3, requires_grad=True), torch.eye(2).to_sparse(), torch.nn.utils.rnn.pack_sequence([torch.ones(2)])):
        with pytest.raises(TypeError, match="cannot be refilled"):
            next(iter(st.Prefetcher([[torch.ones(2), leaf]], device="sim", static=True)))


def test_made_in_inference_mode_it_goes_on_outside(feeder: Any) -> None:
    prefetcher = st.Prefetcher(Indexed(3), device="sim", static=True)
    with torch.inference_mode():
        for batch in prefetcher:
            pass
    for number, batch in enumerate(prefetcher):
        assert wrong(batch, number) == 0


def test_a_budget_counts_the_set(feeder: Any) -> None:
    prefetcher = st.Prefetcher(Indexed(6, lambda n: torch.full((1024,), float(n))), device="sim", static=True, budget=4 * 4096)
    for number, batch in enumerate(prefetcher):
        assert wrong(batch, number) == 0
    assert prefetcher.stats().slots == 3
    prefetcher = st.Prefetcher(Indexed(6, lambda n: torch.full((1024,), float(n))), device="sim", static=True, budget=3 * 4096)
    addresses = {batch.data_ptr() for number, batch in enumerate(prefetcher) if wrong(batch, number) == 0}
    assert len(addresses) == 1 and prefetcher.stats().slots == 0 and prefetcher.stats().batches == 6
