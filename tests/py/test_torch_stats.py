"""The report names what bounds a loop and what there is to gain; it goes to `logging`, and nothing is printed."""
from __future__ import annotations

import logging
import time
from typing import Any, Callable

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import sidestream.torch as st  # noqa: E402
from torch_help import Indexed, fake, feeder  # noqa: E402, F401


def of_gpu(compute: float, needs: float, copy: float, **lost: float) -> st.Stats:
    """100 batches; milliseconds a batch. needs: the loader's."""
    times = {f"lost_{name}_s": value / 10 for name, value in lost.items()}
    return st.Stats(batches=101, timed=100, reads=100, device="cuda:0", slots=4, bytes=100 << 20, copies=100, compute_s=compute / 10,
                    loader_s=needs / 10, copy_s=copy / 10, **times)


@pytest.mark.parametrize("made,bound,gain,said", [
    (of_gpu(31, 88, 2, loader=57), "loader", 0, "nothing more to gain: the loader needs 88 ms a batch, the GPU 31"),
    (of_gpu(31, 20, 2, loader=0.2, link=0.1), "compute", 0, "nothing more to gain: the GPU computes 99 % of the time, 31 ms a batch"),
    (of_gpu(30, 25, 2, loader=10), "loader", 0.25, "25 % to gain: the loader needs 25 ms a batch, the GPU 30, but it is late at times, 10 ms"),
    (of_gpu(3, 1, 12, link=9), "link", 0, "nothing more to gain: the copy takes 12 ms a batch, the GPU 3; fewer bytes"),
    (of_gpu(12, 1, 12, link=4), "link", 0.25, "25 % to gain: the copy takes 12 ms a batch, the GPU 12, and 4 are lost; a larger depth"),
    (of_gpu(10, 1, 3, staging=10, loader=1), "staging", 11 / 21, "copying pageable batches into pinned memory is what bounds it: 10 ms"),
    (of_gpu(10, 1, 3, slots=10), "slots", 0.5, "50 % to gain: 10 ms a batch are lost waiting for slots"),
    (of_gpu(10, 1, 3, other=10), "other", 0.5, "50 % to gain: 10 ms a batch are lost in next() itself"),
    (st.Stats(device="cuda:0"), "unknown", 0, "nothing was timed yet"),
])
def test_verdicts(made: st.Stats, bound: str, gain: float, said: str) -> None:
    assert made.bound == bound and made.gain == pytest.approx(gain, abs=0.01)
    assert made.verdict.startswith(said) and str(made).endswith(made.verdict)


@pytest.mark.parametrize("timed,each_s,judged", [(1, 2e-5, False), (99, 9e-4, False), (100, 2e-5, True), (1, 1e-3, True), (5, 0.02, True)])
def test_few_batches_of_microseconds_are_not_judged(timed: int, each_s: float, judged: bool) -> None:
    seen = st.Stats(batches=timed, timed=timed, reads=timed, device="sim", compute_s=0.9 * each_s * timed, lost_other_s=0.1 * each_s * timed)
    assert (seen.bound != "unknown") == judged and (seen.gain > 0) == judged
    assert seen.verdict.startswith("too short to judge") == (not judged)
    if not judged:
        assert f"{timed} batches of {1e3 * each_s:g} ms were timed; it takes 100, or batches of 1 ms and more" in str(seen)


def test_a_difference_is_what_lies_between() -> None:
    between = of_gpu(31, 88, 2, loader=57) - of_gpu(11, 28, 1, loader=7)
    assert between.compute_s == pytest.approx(2.0) and between.loader_s == pytest.approx(6.0) and between.lost_loader_s == pytest.approx(5.0)
    assert between.batches == 0 and between.device == "cuda:0" and between.slots == 4


def some_step(verdict: Callable[[st.Stats], bool], loader_s: float, body_s: float) -> bool:
    """Whether the report on one batch is that verdict, at one of several lengths, each tried twice. On a busy machine next() is a hiccup of some ms,
    now and then and the less the longer all else takes; a report that takes one part for another is wrong on each batch at each length."""
    return any(verdict(step) for scale in 2 * (1, 2, 4, 8, 16) for step in timed_steps(Indexed(8, delay_s=loader_s * scale), body_s * scale))


def timed_steps(loader: Indexed, body_s: float) -> list[st.Stats]:
    """Of the batches behind the third. Checked here: what no machine can turn. A sleep is never shorter, and no part is longer than the whole."""
    prefetcher = st.Prefetcher(loader, device="sim")
    began, seen = time.perf_counter(), [st.Stats()]
    for batch in prefetcher:
        seen.append(prefetcher.stats())
        time.sleep(body_s)
    whole, took_s = prefetcher.stats(), time.perf_counter() - began
    assert whole.batches == whole.reads == whole.timed == loader.count
    assert whole.compute_ms >= 1e3 * body_s and whole.loader_ms >= 1e3 * loader.delay_s
    assert whole.compute_s + whole.lost_s <= took_s and whole.loader_s <= took_s
    return [later - earlier for earlier, later in zip(seen[3:], seen[4:])]


def test_a_slow_loader_is_named(feeder: Any) -> None:
    assert some_step(lambda seen: seen.bound == "loader" and seen.lost_loader_s > 0.01 and "the loader needs" in seen.verdict, 0.02, 0.002)


def test_a_slow_loop_is_named(feeder: Any) -> None:
    assert some_step(lambda seen: seen.bound == "compute" and "nothing more to gain: the loop computes" in seen.verdict, 0.001, 0.06)


def test_the_report_counts_and_says_simulated(feeder: Any) -> None:
    prefetcher = st.Prefetcher([{"a": torch.zeros(1024), "b": torch.zeros(256), "c": torch.eye(2).to_sparse()}] * 10, device="sim", depth=3)
    for batch in prefetcher:
        del batch
    seen = prefetcher.stats()
    assert (seen.batches, seen.bytes, seen.copies, seen.other_tensors, seen.slots, seen.simulated) == (10, 51200, 10, 10, 5, True)
    assert "simulated" in str(seen) and "50 KiB in 10 copies" in str(seen) and "not packed  10 tensors" in str(seen)
    with pytest.raises(AttributeError):
        seen.batches = 3


def test_sums_go_on_over_epochs_new_slots_and_close(feeder: Any) -> None:
    sizes = [100, 100, 5000, 100, 20000, 100]
    prefetcher = st.Prefetcher(Indexed(6, lambda n: torch.zeros(sizes[n])), device="sim")
    for epoch in range(3):
        for batch in prefetcher:
            del batch
        assert prefetcher.stats().bytes == 4 * sum(sizes) * (epoch + 1)
        assert prefetcher.stats().reads == prefetcher.stats().batches == 6 * (epoch + 1)
        if epoch == 1:
            prefetcher.close()


def test_an_epochs_line_goes_to_the_log_and_nothing_to_the_streams(feeder: Any, caplog: Any, capfd: Any) -> None:
    prefetcher = st.Prefetcher(Indexed(5), device="sim")
    with caplog.at_level(logging.INFO, "sidestream.torch"):
        for _ in range(2):
            for batch in prefetcher:
                del batch
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert len(lines) == 2 and all(line.startswith("epoch: 5 batches, 640 B in 5 copies, simulated: ") for line in lines)
    assert capfd.readouterr() == ("", "")
