"""The prefetcher is its loader: same batches, same types, same order, same exceptions, same state; bad arguments are told."""
from __future__ import annotations

import collections
import collections.abc
import dataclasses
import gc
import logging
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from typing import Any, Iterator

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
np = pytest.importorskip("numpy", reason="NumPy is not installed")

import sidestream.torch as st  # noqa: E402
from torch_help import SHAPE, FakeFeeder, Indexed, fake, feeder, wrong  # noqa: E402, F401


def numbers(batches: Any) -> list[float]:
    """The number that each batch holds everywhere."""
    got = []
    for batch in batches:
        number = float(batch.flatten()[0])
        assert wrong(batch, number) == 0
        got.append(number)
    return got


# ---------------------------------------------------------------- batches


def test_batches_are_the_loaders_in_order(feeder: Any) -> None:
    loader = Indexed(30)
    prefetcher = st.Prefetcher(loader, device="sim")
    assert numbers(prefetcher) == list(range(30)) and len(prefetcher) == 30
    assert loader.read == 30


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_it_reads_depth_and_one_ahead(feeder: Any, depth: int) -> None:
    loader = Indexed(50)
    batches = iter(st.Prefetcher(loader, device="sim", depth=depth))
    assert loader.read == 0
    for number in range(10):
        batch = next(batches)
        assert wrong(batch, number) == 0
        expected = number + 1 + depth + 1
        end = time.monotonic() + 5
        while loader.read < expected and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.01)
        assert loader.read == expected


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Sample:
    image: Any
    name: str


def test_nesting_and_types_are_kept(feeder: Any) -> None:
    def make(number: int) -> Any:
        point = Point(torch.full((), float(number)), [torch.full((5,), number, dtype=torch.uint8), "text", None])
        return {"x": torch.full((3, 2), number), "p": point, "s": Sample(torch.full((2, 2), number).bool(), "name"), "n": np.float32(number)}

    for number, batch in enumerate(st.Prefetcher(Indexed(6, make), device="sim")):
        assert type(batch) is dict and list(batch) == ["x", "p", "s", "n"]
        assert batch["x"].dtype == torch.int64 and wrong(batch["x"], number) == 0
        assert type(batch["p"]) is Point and batch["p"].x.shape == () and float(batch["p"].x) == number
        assert batch["p"].y[0].dtype == torch.uint8 and wrong(batch["p"].y[0], number) == 0 and batch["p"].y[1:] == ["text", None]
        assert type(batch["s"]) is Sample and batch["s"].name == "name" and wrong(batch["s"].image, bool(number)) == 0
        assert type(batch["n"]) is np.float32


DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
          torch.complex64, torch.complex128, torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]


def test_every_dtype_and_layout(feeder: Any) -> None:
    originals = [torch.arange(24).view(2, 3, 4).to(dtype) for dtype in DTYPES]
    originals += [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(5, 7).t(), torch.randn(6, 8)[:, ::2],
                  torch.randn(3).expand(4, 3), torch.randn(9)[2:7], torch.zeros(0, 3)]
    prefetcher = st.Prefetcher([originals] * 3, device="sim")
    for batch in prefetcher:
        for got, original in zip(batch, originals):
            assert got.dtype == original.dtype and got.shape == original.shape and type(got) is torch.Tensor
            raw = (torch.uint8,) if original.element_size() == 1 else ()
            assert torch.equal(got.view(*raw) if raw else got, original.view(*raw) if raw else original)
            if original.is_contiguous(memory_format=torch.channels_last) and original.dim() == 4:
                assert got.stride() == original.stride()
    assert prefetcher.stats().other_tensors == 0


class Sub(torch.Tensor):
    pass


def test_what_is_not_packed_goes_with_to(feeder: Any) -> None:
    grad = torch.randn(3, requires_grad=True)
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    batch = {"a": torch.ones(2), "g": grad * 2, "sub": torch.ones(3).as_subclass(Sub), "sparse": torch.eye(3).to_sparse(), "p": packed,
             "b": torch.zeros(2)}
    prefetcher = st.Prefetcher([batch, batch], device="sim")
    for got in prefetcher:
        assert list(got) == list(batch) and torch.equal(got["a"], batch["a"]) and torch.equal(got["b"], batch["b"])
        assert type(got["sub"]) is Sub and got["sparse"].is_sparse and type(got["p"]) is type(packed)
        got["g"].sum().backward(retain_graph=True)
    assert torch.equal(grad.grad, torch.full((3,), 4.0))
    assert prefetcher.stats().other_tensors == 8


def test_batches_without_tensors(feeder: Any) -> None:
    items = [1, "a", None, {"k": [1, 2]}, torch.ones(2), ()]
    got = list(st.Prefetcher(items, device="sim"))
    assert got[:4] == items[:4] and torch.equal(got[4], items[4]) and got[5] == ()
    assert got[3] is items[3]


def test_shapes_that_vary_and_a_short_last_batch(feeder: Any) -> None:
    sizes = [4, 4, 9, 3, 100, 101, 7, 100, 1000, 1]
    prefetcher = st.Prefetcher(Indexed(len(sizes), lambda n: torch.full((sizes[n], 64), float(n))), device="sim")
    for _ in range(3):
        got = [(tuple(batch.shape), float(batch[0, 0]), wrong(batch, float(batch[0, 0]))) for batch in prefetcher]
        assert got == [((size, 64), float(n), 0) for n, size in enumerate(sizes)]


def test_the_loaders_batch_is_left_as_it_is(feeder: Any) -> None:
    batch = {"x": torch.ones(3), "l": [torch.zeros(2)]}
    inner, x = batch["l"], batch["x"]
    for got in st.Prefetcher([batch], device="sim"):
        got["x"].add_(5)
        assert got is not batch and got["l"] is not inner
    assert batch["x"] is x and batch["l"] is inner and wrong(x, 1) == 0


def test_torch_save_of_one_tensor_holds_only_that(feeder: Any, tmp_path: Any) -> None:
    batch = next(iter(st.Prefetcher([{"small": torch.ones(4), "large": torch.ones(1 << 20)}], device="sim")))
    assert batch["small"].untyped_storage().nbytes() == 16


# ---------------------------------------------------------------- the loader's face


class Rich(Indexed):
    batch_size = 7
    dataset = ["data"]

    def __init__(self) -> None:
        super().__init__(4)
        self.sampler = Sampler()


class Sampler:
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_attributes_are_the_loaders() -> None:
    loader = Rich()
    prefetcher = st.Prefetcher(loader, device="sim")
    assert prefetcher.batch_size == 7 and prefetcher.dataset is Rich.dataset
    assert prefetcher.sampler is loader.sampler and prefetcher.loader is loader
    prefetcher.set_epoch(3)
    assert loader.sampler.epoch == 3
    with pytest.raises(AttributeError, match="Rich.*no_such"):
        prefetcher.no_such
    assert not hasattr(prefetcher, "__array__")


def test_len_of_what_has_none() -> None:
    with pytest.raises(TypeError, match="len"):
        len(st.Prefetcher((i for i in range(3)), device="sim"))


# ---------------------------------------------------------------- exceptions, breaks, epochs


def test_an_exception_comes_in_its_place_with_its_traceback(feeder: Any) -> None:
    got: list[float] = []
    with pytest.raises(KeyError, match="sample 5") as caught:
        for batch in st.Prefetcher(Indexed(20, fail_at=5), device="sim"):
            got += numbers([batch])
    assert got == [0, 1, 2, 3, 4]
    assert [frame.name for frame in traceback.extract_tb(caught.tb)][-2:] == ["__iter__", "broken_sample"]


def test_an_exception_of_the_first_batch_and_of_iter(feeder: Any) -> None:
    with pytest.raises(KeyError, match="sample 0"):
        next(iter(st.Prefetcher(Indexed(3, fail_at=0), device="sim")))

    class NoIter:
        def __iter__(self) -> Any:
            raise OSError("no data")

    with pytest.raises(OSError, match="no data"):
        iter(st.Prefetcher(NoIter(), device="sim"))


class Stumbling:
    """An iterator that goes on after an exception, as DataLoader's does."""

    def __init__(self) -> None:
        self.number = -1

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.number += 1
        if self.number == 12:
            raise StopIteration
        if self.number % 4 == 2:
            raise ValueError(f"bad {self.number}")
        return torch.full(SHAPE, float(self.number))


def test_a_loader_that_goes_on_after_exceptions(feeder: Any) -> None:
    batches, got = iter(st.Prefetcher(Stumbling(), device="sim")), []
    while True:
        try:
            got += numbers([next(batches)])
        except ValueError as error:
            got.append(str(error))
        except StopIteration:
            break
    assert got == [0, 1, "bad 2", 3, 4, 5, "bad 6", 7, 8, 9, "bad 10", 11]
    with pytest.raises(StopIteration):
        next(batches)


def test_a_batch_that_cannot_be_walked_is_an_exception_in_its_place(feeder: Any) -> None:
    loop: list[Any] = []
    loop.append(loop)
    batches = iter(st.Prefetcher([torch.ones(2), loop], device="sim"))
    next(batches)
    with pytest.raises(RecursionError):
        next(batches)


def test_early_breaks_and_many_epochs(feeder: Any) -> None:
    loader = Indexed(12)
    prefetcher = st.Prefetcher(loader, device="sim")
    for epoch in range(30):
        seen = []
        for batch in prefetcher:
            seen += numbers([batch])
            if len(seen) == epoch % 13:
                break
        assert seen == list(range(min(epoch % 13, 12) or 12))
    assert threading.active_count() < 10


def test_the_reader_ends_with_the_iteration(feeder: Any) -> None:
    loader = Indexed(1000)
    batches = iter(st.Prefetcher(loader, device="sim"))
    next(batches)
    del batches
    end = time.monotonic() + 5
    while any(t.name == "sidestream-reader" for t in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.001)
    assert not any(t.name == "sidestream-reader" for t in threading.enumerate())
    assert loader.read < 10


@pytest.mark.filterwarnings("ignore:.*are held")
def test_a_new_iteration_ends_the_one_before(feeder: Any) -> None:
    prefetcher = st.Prefetcher(Indexed(10), device="sim")
    first = iter(prefetcher)
    kept = next(first)
    second = iter(prefetcher)
    assert numbers(second) == list(range(10))
    with pytest.raises(RuntimeError, match="iterated anew"):
        next(first)
    assert wrong(kept, 0) == 0


@pytest.mark.filterwarnings("ignore:.*are held")
def test_iter_and_the_first_next_are_the_callers(feeder: Any) -> None:
    loader = Indexed(5)
    list(st.Prefetcher(loader, device="sim"))
    assert loader.threads[0] is threading.current_thread()
    assert all(thread.name == "sidestream-reader" for thread in loader.threads[1:])


@pytest.mark.filterwarnings("ignore:.*are held")
def test_the_reader_has_the_callers_modes(feeder: Any) -> None:
    import contextvars
    color = contextvars.ContextVar("color", default="none")
    seen: list[Any] = []

    def make(number: int) -> Any:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), color.get()))
        return torch.ones(2)

    color.set("red")
    with torch.no_grad():
        list(st.Prefetcher(Indexed(3, make), device="sim"))
    with torch.inference_mode():
        list(st.Prefetcher(Indexed(3, make), device="sim"))
    assert seen == [(False, False, "red")] * 3 + [(False, True, "red")] * 3


def test_close_and_again(feeder: Any) -> None:
    prefetcher = st.Prefetcher(Indexed(10), device="sim")
    batches = iter(prefetcher)
    kept = next(batches)
    prefetcher.close()
    assert wrong(kept, 0) == 0
    with pytest.raises(RuntimeError, match="closed"):
        next(batches)
    assert numbers(prefetcher) == list(range(10)) and wrong(kept, 0) == 0


def test_a_dropped_prefetcher_leaves_nothing(feeder: Any) -> None:
    prefetcher = st.Prefetcher(Indexed(1000), device="sim")
    batch = next(iter(prefetcher))
    gone = weakref.ref(prefetcher)
    gc.disable()
    try:
        del prefetcher
        assert gone() is None, "a reference cycle keeps the slab"
    finally:
        gc.enable()
    assert wrong(batch, 0) == 0


def test_an_iteration_shared_by_threads(feeder: Any) -> None:
    batches = iter(st.Prefetcher(Indexed(200), device="sim"))
    got: list[float] = []

    def run() -> None:
        for batch in batches:
            got.extend(numbers([batch]))
            del batch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert sorted(got) == list(range(200))


# ---------------------------------------------------------------- memory


def test_host_tensors_live_until_they_are_copied_and_no_longer(feeder: Any) -> None:
    alive: list[weakref.ref] = []

    def make(number: int) -> Any:
        batch = torch.full(SHAPE, float(number))
        alive.append(weakref.ref(batch))
        return batch

    for number, batch in enumerate(st.Prefetcher(Indexed(40, make), device="sim")):
        assert wrong(batch, number) == 0
        assert sum(ref() is not None for ref in alive) <= 5
    gc.collect()
    assert not any(ref() is not None for ref in alive)


def test_a_budget_makes_depth_smaller_and_then_goes_without(feeder: Any, caplog: Any) -> None:
    make = lambda n: torch.full((1024,), float(n))  # noqa: E731: 4096 bytes, 4 slots of it are 16 KiB
    with caplog.at_level(logging.WARNING, "sidestream.torch"):
        prefetcher = st.Prefetcher(Indexed(10, make), device="sim", budget="14 KiB")
        assert numbers(prefetcher) == list(range(10))
        assert prefetcher.stats().slots == 3 and "depth 1 instead of 2" in caplog.text
        caplog.clear()
        prefetcher = st.Prefetcher(Indexed(10, make), device="sim", budget=8192)
        assert numbers(prefetcher) == list(range(10)) and numbers(prefetcher) == list(range(10))
        assert prefetcher.stats().other_tensors == 20 and prefetcher.stats().slots == 0
        assert caplog.text.count("plain copies") == 1
        mixed = st.Prefetcher(Indexed(12, lambda n: torch.full((64 if n % 3 else 4096,), float(n))), device="sim", budget=8192)
        assert numbers(mixed) == list(range(12))
        assert mixed.stats().other_tensors == 4 and mixed.stats().batches == 12


def test_device_memory_that_is_short(fake: Any, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(FakeFeeder, "limit", 3 * 512)
    assert numbers(st.Prefetcher(Indexed(10), device="sim", depth=5)) == list(range(10))
    assert "depth 1 instead of 5" in caplog.text
    monkeypatch.setattr(FakeFeeder, "limit", 512)
    prefetcher = st.Prefetcher(Indexed(10), device="sim")
    assert numbers(prefetcher) == list(range(10)) and prefetcher.stats().other_tensors == 10


# ---------------------------------------------------------------- devices and arguments


def test_cpu_passes_through() -> None:
    items = [torch.ones(2), {"x": torch.zeros(3)}]
    prefetcher = st.Prefetcher(items, device="cpu")
    for _ in range(2):
        assert all(got is item for got, item in zip(prefetcher, items))
    assert prefetcher.stats().batches == 4 and "cpu" in str(prefetcher.stats())
    assert prefetcher.stats().plain and prefetcher.stats().gain == 0 and "depth" not in prefetcher.stats().verdict


def test_disabled_passes_through(monkeypatch: Any) -> None:
    monkeypatch.setenv("SIDESTREAM_DISABLE", "1")
    loader = Indexed(5)
    assert numbers(st.Prefetcher(loader, device="sim")) == [0, 1, 2, 3, 4]
    assert all(thread is threading.current_thread() for thread in loader.threads)


@pytest.mark.parametrize("options,error,said", [
    ({"depth": 0}, ValueError, "depth=0"),
    ({"depth": "2"}, TypeError, "depth='2'"),
    ({"depth": True}, TypeError, "depth=True"),
    ({"timeout": "30"}, TypeError, "timeout='30'"),
    ({"on_hold": "keep"}, ValueError, "'copy', 'raise', 'wait'"),
    ({"budget": "lots"}, ValueError, "'2GiB'"),
    ({"budget": 1.5}, TypeError, "budget=1.5"),
    ({"budget": -1}, ValueError, "negative"),
    ({"timeout": 0}, ValueError, "timeout=0"),
    ({"device": "tpu9"}, ValueError, "device='tpu9'"),
    ({"device": "meta"}, ValueError, "'sim'"),
    ({"device": "sim:nothing"}, ValueError, "nothing"),
    ({"loader": 3}, TypeError, "not iterable"),
])
def test_bad_arguments(options: dict, error: type, said: str) -> None:
    arguments: dict[str, Any] = {"loader": [], "device": "sim"} | options
    with pytest.raises(error, match=said):
        st.Prefetcher(**arguments)


def test_sizes_of_a_budget() -> None:
    from sidestream.torch.target import bytes_of
    assert [bytes_of(text) for text in ("2GiB", "1.5 MB", "7", "3k", " 4 kib ", 12)] == [2 << 30, 1500000, 7, 3000, 4096, 12]
    assert bytes_of(None) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="device='cpu'.*device='sim'"):
        st.Prefetcher([])


def test_pickled_it_is_made_anew(feeder: Any) -> None:
    import pickle
    assert numbers(pickle.loads(pickle.dumps(st.Prefetcher([torch.ones(2)], device="sim", depth=3)))) == [1]


# ---------------------------------------------------------------- slots that captures take


def test_a_slot_lost_to_a_capture_brings_new_ones(fake: Any, monkeypatch: Any) -> None:
    batches = iter(st.Prefetcher(Indexed(40), device="sim"))
    for number in range(5):
        batch = next(batches)
    first = FakeFeeder.made[-1]
    monkeypatch.setattr(FakeFeeder, "capturing", True)
    address = batch.data_ptr()
    del batch
    monkeypatch.setattr(FakeFeeder, "capturing", False)
    assert first.retired() == 1
    for number, batch in enumerate(batches, 5):
        assert wrong(batch, number) == 0 and batch.data_ptr() != address
    assert number == 39 and first.closed and FakeFeeder.made[-1] is not first


def test_slots_all_lost_to_captures(fake: Any, monkeypatch: Any) -> None:
    """The batches that were queued for them go another way, in order."""
    batches = iter(st.Prefetcher(Indexed(40), device="sim", depth=1))
    time.sleep(0.05)
    seen = 0
    for _ in range(3):
        batch = next(batches)
        assert wrong(batch, seen) == 0
        seen += 1
        monkeypatch.setattr(FakeFeeder, "capturing", True)
        del batch
        monkeypatch.setattr(FakeFeeder, "capturing", False)
        time.sleep(0.05)
    for batch in batches:
        assert wrong(batch, seen) == 0
        seen += 1
    assert seen == 40


def test_a_batch_that_cannot_be_rebuilt_is_one_batch_lost(feeder: Any) -> None:
    class Odd(collections.abc.Mapping):
        def __getitem__(self, key: str) -> Any:
            return torch.ones(2)

        def __iter__(self) -> Iterator[str]:
            return iter(["x"])

        def __len__(self) -> int:
            return 1

    batches = iter(st.Prefetcher(Indexed(6, lambda n: Odd() if n == 2 else torch.full((3,), float(n))), device="sim"))
    assert numbers([next(batches)]) + numbers([next(batches)]) == [0, 1]
    with pytest.raises(TypeError, match="Odd"):
        next(batches)
    assert numbers(batches) == [3, 4, 5]


def test_a_device_that_dies_under_a_dropped_iteration_prints_nothing() -> None:
    """What nobody could catch is not told by the interpreter either ("Exception ignored in ...")."""
    program = """
import gc, torch, sidestream, sidestream.torch as st
told = 0
for n in range(20, 60, 6):
    try:
        for batch in st.Prefetcher([torch.full((1000,), float(i)) for i in range(6)], device=f"sim:h200,lose={n}", timeout=5):
            pass
    except sidestream.Error:
        told += 1
    batch = None
    gc.collect()
print(told > 3)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_a_ctrl_c_while_it_waits_loses_no_batch(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C before the batch was taken; one behind that loses it, as in any iterator, and the next is not taken for it."""
    prefetcher = st.Prefetcher(Indexed(6), device="sim")
    batches = iter(prefetcher)
    taking = fake.next
    got = [float(next(batches)[0, 0])]

    def interrupted(self: Any, *args: Any) -> Any:
        raise KeyboardInterrupt

    def interrupted_late(self: Any, *args: Any) -> Any:
        taking(self, *args)
        raise KeyboardInterrupt

    for call in (interrupted, interrupted_late):
        monkeypatch.setattr(fake, "next", call)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        monkeypatch.setattr(fake, "next", taking)
        got.append(float(next(batches)[0, 0]))
    assert got + [float(batch[0, 0]) for batch in batches] == [0, 1, 3, 4, 5]


def test_it_says_what_it_is(feeder: str) -> None:
    prefetcher = st.Prefetcher(Indexed(3), device="sim", depth=4)
    assert repr(prefetcher) == "<Prefetcher of Indexed to sim, depth 4, 0 batches handed out>"
    assert sum(1 for _ in prefetcher) == 3 and repr(prefetcher).endswith(", 3 batches handed out>")
