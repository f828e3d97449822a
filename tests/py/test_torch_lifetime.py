"""A slot is rewritten when nothing refers to it any more, and not before: views, autograd, threads, forty epochs."""
from __future__ import annotations

import gc
import os
import random
import threading
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import sidestream.torch as st  # noqa: E402
from torch_help import FakeFeeder, Indexed, fake, feeder, run_torch, wrong  # noqa: E402, F401

pytestmark = pytest.mark.filterwarnings("ignore:.*are held")


def corrupted(batches: int, depth: int) -> int:
    """Batches that changed while references of many kinds were held."""
    bad = 0
    chance = random.Random(5)
    kept: list[tuple[int, Any]] = []
    for number, batch in enumerate(st.Prefetcher(Indexed(batches), device="sim", depth=depth)):
        kind = chance.randrange(4)
        if kind == 0:
            kept.append((number, batch))
        elif kind == 1:
            kept.append((number, batch[2:, 1]))
        elif kind == 2:
            kept.append((number, batch.view(-1).detach()))
        del batch
        chance.shuffle(kept)
        while len(kept) > 3 or (kept and chance.random() < 0.3):
            expected, tensor = kept.pop()
            bad += wrong(tensor, expected) > 0
    return bad


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_held_batches_do_not_change(feeder: Any, depth: int) -> None:
    assert corrupted(1000, depth) == 0


def test_the_test_sees_a_broken_lifetime_rule(fake: Any, monkeypatch: Any) -> None:
    """The control: a feeder that takes the slot back as soon as it has handed it out."""
    monkeypatch.setattr(FakeFeeder, "careless", True)
    assert corrupted(1000, 2) > 100


# ---------------------------------------------------------------- autograd


def gradients(loader: Any, every: int) -> list[torch.Tensor]:
    """Backward once in `every` batches, over the sum of their losses: what autograd saved of the inputs must live until then."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    losses, seen = [], []
    for number, (x, y) in enumerate(loader):
        losses.append(torch.nn.functional.mse_loss(model(x) * x[:, :4], y))
        del x, y
        if number % every == every - 1:
            torch.stack(losses).sum().backward()
            losses.clear()
            seen += [p.grad.clone() for p in model.parameters()]
    return seen


@pytest.mark.parametrize("every", [1, 2, 5])
def test_gradients_are_those_of_the_unwrapped_loader(feeder: Any, every: int) -> None:
    torch.manual_seed(1)
    batches = [(torch.randn(16, 8), torch.randn(16, 4)) for _ in range(20)]
    expected = gradients(batches, every)
    got = gradients(st.Prefetcher(batches, device="sim"), every)
    assert len(got) == len(expected) and all(torch.equal(a, b) for a, b in zip(got, expected))


class Release(torch.autograd.Function):
    """Saves its input, and notes the thread that frees it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (x * w).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, grad * ctx.saved_tensors[0]


def test_the_last_reference_may_die_in_another_thread(feeder: Any) -> None:
    """backward() in a thread of its own frees what it saved there."""
    w = torch.ones(4, 8, requires_grad=True)
    for number, batch in enumerate(st.Prefetcher(Indexed(200), device="sim")):
        losses = [Release.apply(batch, w)]
        del batch
        thread = threading.Thread(target=lambda: losses.pop().backward())
        thread.start()
        thread.join()
    assert wrong(w.grad, sum(range(200))) == 0


def test_many_threads_let_go(feeder: Any) -> None:
    import queue
    bad, work = [], queue.Queue(maxsize=2)

    def run() -> None:
        while (item := work.get()) is not None:
            number, batch = item
            if wrong(batch, number):
                bad.append(number)
            del batch, item

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number, batch in enumerate(st.Prefetcher(Indexed(500), device="sim", depth=3)):
        work.put((number, batch))
        del batch
    for _ in threads:
        work.put(None)
    for thread in threads:
        thread.join(60)
    assert not bad and not any(thread.is_alive() for thread in threads)


def test_numpy_shares_and_holds(feeder: Any) -> None:
    batches = iter(st.Prefetcher(Indexed(20), device="sim"))
    array = next(batches).numpy()
    for number, batch in enumerate(batches, 1):
        assert wrong(batch, number) == 0
        del batch
    assert (array == 0).all()


# ---------------------------------------------------------------- used_on


def test_used_on_finds_the_loan_of_parts_and_views(fake: Any) -> None:
    def make(number: int) -> Any:
        return {"x": torch.full((4,), float(number)), "y": [torch.full((6,), number)], "n": 3}

    batches = iter(st.Prefetcher(Indexed(10, make), device="sim"))
    batch = next(batches)
    feeder = FakeFeeder.made[-1]
    st.used_on(batch, 11)
    st.used_on(batch["y"][0][2:], 12)
    st.used_on({"other": torch.ones(3), "x": batch["x"]}, 13)
    st.used_on(torch.ones(5), 14)
    assert [loan.used for loan in feeder.loans] == [[11, 12, 13]]
    second = next(batches)
    st.used_on(second["x"], 15)
    assert [loan.used for loan in feeder.loans] == [[11, 12, 13], [15]]
    del batch, second
    st.used_on(next(batches)["x"], 16)


def test_used_on_of_what_is_gone_is_nothing(feeder: Any) -> None:
    prefetcher = st.Prefetcher(Indexed(5), device="sim")
    batch = next(iter(prefetcher))
    copy = batch.clone()
    del batch
    prefetcher.used_on(copy, 1)


# ---------------------------------------------------------------- memory


SANITIZED = bool(os.environ.get("SIDESTREAM_TEST_SANITIZER"))
# What is resident says nothing there, and each new page costs: the counts are looked at all the same.
EPOCHS, FLOATS = (12, 1 << 13) if SANITIZED else (40, 1 << 18)


def resident_bytes() -> int:
    """0 under sanitizers, which keep what is freed for a while and books of all memory that was used."""
    if SANITIZED:
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_is_flat_over_40_epochs(feeder: Any) -> None:
    prefetcher = st.Prefetcher(Indexed(8, lambda n: torch.full((FLOATS,), float(n))), device="sim")
    seen, device, addresses = [], [], set()
    for epoch in range(EPOCHS):
        for number, batch in enumerate(prefetcher):
            assert wrong(batch[::4096], number) == 0
            addresses.add(batch.data_ptr())
            if epoch % 3 == 0 and number == 4:
                break
        del batch
        gc.collect()
        device.append(prefetcher._target.native.memory())
        seen.append(resident_bytes())
    assert len(addresses) <= 4, "more slots than were agreed"
    assert device[0] == device[-1]
    assert seen[-1] - seen[8] < 16 << 20  # a batch an epoch would be 31 MiB


def test_the_prefetcher_ends_while_its_reader_lets_go(feeder: Any) -> None:
    """The reader of an epoch that was left drops what nobody takes; the prefetcher may die in the middle of that."""
    prefetcher = st.Prefetcher(Indexed(8, lambda n: torch.full((4,), float(n))), device="sim")
    iterator = iter(prefetcher)
    next(iterator)
    iterator._run.stop()
    iterator._run.join()
    prefetcher._lane.ring.feeder.close()
    prefetcher._lane.discard()


def test_memory_is_flat_with_a_new_prefetcher_each_epoch(feeder: Any) -> None:
    seen = []
    for _ in range(EPOCHS):
        for number, batch in enumerate(st.Prefetcher(Indexed(4, lambda n: torch.full((FLOATS,), float(n))), device="sim")):
            assert wrong(batch[::4096], number) == 0
        del batch
        FakeFeeder.made.clear()
        gc.collect()
        seen.append(resident_bytes())
    assert seen[-1] - seen[10] < 16 << 20


def test_two_prefetchers_in_two_threads(feeder: Any) -> None:
    bad: list[int] = []

    def run() -> None:
        with warnings.catch_warnings():
            bad.append(sum(wrong(batch, number) for number, batch in enumerate(st.Prefetcher(Indexed(300), device="sim"))))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert bad == [0, 0, 0]


CAPTURE = """
import torch
import sidestream.torch as st
from sidestream import _native
prefetcher = st.Prefetcher([torch.full((4, 8), float(i)) for i in range(60)], device="sim")
batches = iter(prefetcher)
taken = next(batches)
st.used_on(taken, _native.Stream(prefetcher._target.native))
address = taken.data_ptr()
_native._test_capturing(True)
del taken
_native._test_capturing(False)
for number, batch in enumerate(batches, 1):
    assert (batch == number).all() and batch.data_ptr() != address
assert number == 59
"""


def test_a_batch_that_dies_in_a_capture_keeps_its_memory() -> None:
    """The native feeder's own rule, with every stream taken for one that captures; in a process of its own, since the slab stays for good."""
    done = run_torch(CAPTURE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
