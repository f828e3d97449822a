"""Batches that are kept: never overwritten, whatever the policy says about handing out more."""
from __future__ import annotations

import gc
import threading
import time
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import sidestream.torch as st  # noqa: E402
from torch_help import Indexed, fake, feeder, wrong  # noqa: E402, F401

HELD = "are held while the next is asked for"


def check(batches: list[Any]) -> None:
    assert [wrong(batch, number) for number, batch in enumerate(batches)] == [0] * len(batches)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_copy_keeps_every_batch_and_warns_once(feeder: Any, depth: int) -> None:
    prefetcher = st.Prefetcher(Indexed(30), device="sim", depth=depth)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kept = list(prefetcher)
        again = list(prefetcher)
    check(kept)
    check(again)
    assert len(caught) == 1 and HELD in str(caught[0].message) and caught[0].filename == __file__
    assert prefetcher.stats().held_copies >= 56


def test_copy_stops_when_the_batches_are_let_go(feeder: Any) -> None:
    prefetcher = st.Prefetcher(Indexed(40), device="sim")
    batches = iter(prefetcher)
    with pytest.warns(UserWarning, match=HELD):
        kept = [next(batches) for _ in range(6)]
    assert prefetcher.stats().held_copies == 4
    check(kept)
    kept.clear()
    for number, batch in enumerate(batches, 6):
        assert wrong(batch, number) == 0
    assert number == 39 and prefetcher.stats().held_copies == 4


def test_the_usual_loop_copies_nothing(feeder: Any) -> None:
    prefetcher = st.Prefetcher(Indexed(200), device="sim")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, batch in enumerate(prefetcher):
            assert wrong(batch, number) == 0
    assert prefetcher.stats().held_copies == 0


def test_views_hold_as_well(feeder: Any) -> None:
    batches = iter(st.Prefetcher(Indexed(20), device="sim", on_hold="raise"))
    views = [next(batches)[1:, ::2], next(batches).view(-1)[3]]
    with pytest.raises(RuntimeError, match=HELD):
        next(batches)
    assert wrong(views[0], 0) == 0 and float(views[1]) == 1


def test_raise_names_the_fault_and_loses_no_batch(feeder: Any) -> None:
    batches = iter(st.Prefetcher(Indexed(10), device="sim", on_hold="raise"))
    kept = [next(batches), next(batches)]
    for _ in range(3):
        with pytest.raises(RuntimeError, match=HELD):
            next(batches)
    check(kept)
    kept.clear()
    for number, batch in enumerate(batches, 2):
        assert wrong(batch, number) == 0
    assert number == 9


def test_wait_says_at_once_that_it_would_be_for_ever(feeder: Any) -> None:
    batches = iter(st.Prefetcher(Indexed(10), device="sim", on_hold="wait", timeout=60))
    kept = [next(batches), next(batches)]
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="for ever"):
        next(batches)
    assert time.monotonic() - began < 5
    del kept[0]
    assert wrong(next(batches), 2) == 0


def test_wait_collects_what_only_cycles_hold(feeder: Any) -> None:
    class Knot:
        pass

    batches = iter(st.Prefetcher(Indexed(20), device="sim", on_hold="wait"))
    gc.disable()
    try:
        for number, batch in enumerate(batches):
            assert wrong(batch, number) == 0
            knot = Knot()
            knot.itself, knot.batch = knot, batch  # type: ignore[attr-defined]
    finally:
        gc.enable()
    assert number == 19


def test_wait_goes_on_when_another_thread_lets_go(feeder: Any) -> None:
    batches = iter(st.Prefetcher(Indexed(10), device="sim", on_hold="wait", timeout=30))
    kept = [next(batches), next(batches)]

    def let_go() -> None:
        time.sleep(0.1)
        kept.clear()

    thread = threading.Thread(target=let_go)
    thread.start()
    assert wrong(next(batches), 2) == 0
    thread.join()


def test_wait_ends_at_its_time_limit(feeder: Any) -> None:
    batches = iter(st.Prefetcher(Indexed(10), device="sim", on_hold="wait", timeout=0.2))
    kept = [next(batches), next(batches)]
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match=r"in 0\.2 s \(timeout=\)"):
            next(batches)
    finally:
        done.set()
        thread.join()
    check(kept)


@pytest.mark.filterwarnings("ignore:.*are held")
@pytest.mark.parametrize("policy", ["copy", "raise", "wait"])
def test_held_over_the_end_of_the_prefetcher(feeder: Any, policy: str) -> None:
    prefetcher = st.Prefetcher(Indexed(10), device="sim", on_hold=policy)
    batches = iter(prefetcher)
    kept = [next(batches), next(batches)]
    del prefetcher, batches
    gc.collect()
    list(st.Prefetcher(Indexed(10, lambda n: torch.full((4, 8), 77.0)), device="sim"))
    check(kept)
