"""Batches of every nesting come out with their types, and only what is a tensor changes."""
from __future__ import annotations

import collections
import dataclasses
import time
import types
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
np = pytest.importorskip("numpy", reason="NumPy is not installed")

from sidestream.torch.layout import ALIGNMENT, plan_of  # noqa: E402
from sidestream.torch.tree import flatten, unflatten  # noqa: E402

A, B = torch.arange(6.0).view(2, 3), torch.arange(4)


class Pair(NamedTuple):
    x: Any
    y: Any


class Labelled(Pair):
    pass


class Tagged(tuple):
    pass


class Rows(list):
    pass


class Needy(dict):
    def __init__(self, required: str, *args: Any) -> None:
        super().__init__(*args)
        self.required = required


class Dotted(dict):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.__dict__ = self


class Encoding(collections.UserDict):
    """As transformers.BatchEncoding: a UserDict whose attributes are its items, and that has a `to`."""

    def __init__(self, data: dict, n_sequences: int = 1) -> None:
        super().__init__(data)
        self.n_sequences = n_sequences

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device: Any) -> "Encoding":
        raise AssertionError("not needed")


@dataclasses.dataclass
class Sample:
    x: Any
    name: str = "n"
    made: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        self.made += 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    y: Any = None


class Registered:
    def __init__(self, x: Any, tag: str) -> None:
        self.x, self.tag = x, tag


class Movable:
    def __init__(self, x: Any) -> None:
        self.x = x

    def to(self, device: Any) -> "Movable":
        return Movable(self.x.to(device))


torch.utils._pytree.register_pytree_node(Registered, lambda r: ([r.x], r.tag), lambda values, tag: Registered(*values, tag))


def moved(batch: Any) -> Any:
    """The batch with each leaf tensor negated: what is equal to the original was not taken."""
    leaves, node = flatten(batch)
    return unflatten(node, [-leaf if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])


def same(tensor: Any, expected: torch.Tensor) -> bool:
    return isinstance(tensor, torch.Tensor) and torch.equal(tensor, expected)


def tagged(cls: type, *args: Any) -> Any:
    new = cls(*args)
    new.tag = "kept"
    return new


CASES: dict[str, tuple[Any, Any]] = {
    "tensor": (A, lambda b: same(b, -A)),
    "dict": ({"x": A, "n": 3, "y": [B]}, lambda b: list(b) == ["x", "n", "y"] and same(b["x"], -A) and b["n"] == 3 and same(b["y"][0], -B)),
    "dict of tensors": ({"x": A, "y": B}, lambda b: same(b["x"], -A) and same(b["y"], -B)),
    "list": ([A, "s", None], lambda b: same(b[0], -A) and b[1:] == ["s", None]),
    "tuple": ((A, B), lambda b: same(b[0], -A) and same(b[1], -B)),
    "nested": ([(A, {"k": (B, [A])})], lambda b: same(b[0][0], -A) and same(b[0][1]["k"][0], -B) and same(b[0][1]["k"][1][0], -A)),
    "OrderedDict": (collections.OrderedDict([("b", A), ("a", B)]), lambda b: list(b) == ["b", "a"] and same(b["a"], -B)),
    "defaultdict": (collections.defaultdict(list, {"x": A}), lambda b: same(b["x"], -A) and b["new"] == []),
    "deque": (collections.deque([A, B], maxlen=5), lambda b: same(b[1], -B) and b.maxlen == 5),
    "namedtuple": (Pair(A, "y"), lambda b: same(b.x, -A) and b.y == "y"),
    "subclass of a namedtuple": (tagged(Labelled, A, B), lambda b: same(b.x, -A) and b.tag == "kept"),
    "subclass of tuple": (tagged(Tagged, (A, 1)), lambda b: same(b[0], -A) and b.tag == "kept"),
    "subclass of list": (tagged(Rows, [A, 1]), lambda b: same(b[0], -A) and b[1] == 1 and b.tag == "kept"),
    "subclass of dict": (Needy("r", {"x": A}), lambda b: same(b["x"], -A) and b.required == "r"),
    "dict that is its attributes": (Dotted({"x": A, "n": 1}), lambda b: same(b["x"], -A) and same(b.x, -A) and b.n == 1),
    "UserDict": (Encoding({"input_ids": A, "n": 2}, 7), lambda b: same(b.input_ids, -A) and b["n"] == 2 and b.n_sequences == 7),
    "read-only mapping": (types.MappingProxyType({"x": A}), lambda b: same(b["x"], -A)),
    "dataclass": (Sample(A), lambda b: same(b.x, -A) and b.name == "n" and b.made == 1),
    "frozen dataclass": (Frozen(A, [B]), lambda b: same(b.x, -A) and same(b.y[0], -B)),
    "frozen dataclass with slots": (Slotted(A, B), lambda b: same(b.x, -A) and same(b.y, -B)),
    "registered with pytree": (Registered({"k": A}, "tag"), lambda b: same(b.x["k"], -A) and b.tag == "tag"),
    "structseq of torch": (torch.max(A, 1), lambda b: same(b.values, -torch.max(A, 1).values)),
    "parameter": ([torch.nn.Parameter(A)], lambda b: same(b[0], -A)),
}


@pytest.mark.parametrize("name", CASES)
def test_types_are_kept(name: str) -> None:
    batch, good = CASES[name]
    before = flatten(batch)[0]
    out = moved(batch)
    assert type(out) is type(batch) and good(out)
    after = flatten(batch)[0]
    assert before and len(after) == len(before) and all(x is y for x, y in zip(before, after)), "the original was changed"


@pytest.mark.parametrize("value", [None, 3, "text", np.float32(2.5), np.arange(3), {1, 2}, ["a", ("b", {"c": 1})], torch.Size([2, 3]),
                                   Sample("x"), Pair(1, 2), object(), int, torch.float32, torch.device("cpu"), [], {}, ()])
def test_what_holds_no_tensor_is_the_same_object(value: Any) -> None:
    assert moved(value) is value
    out = moved([A, value])
    assert out[1] is value


def test_objects_with_a_to_are_leaves() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    leaves, node = flatten({"p": packed, "m": Movable(A), "x": A})
    assert leaves[0] is packed and isinstance(leaves[1], Movable) and leaves[2] is A
    assert unflatten(node, leaves)["p"] is packed


def test_a_mapping_that_cannot_be_made_says_what_to_do() -> None:
    class Odd(collections.abc.Mapping):
        def __init__(self) -> None:
            pass

        def __getitem__(self, key: str) -> Any:
            return A

        def __iter__(self) -> Any:
            return iter(["x"])

        def __len__(self) -> int:
            return 1

    with pytest.raises(TypeError, match="Odd.*register_pytree_node"):
        moved(Odd())


def test_500_tensors_are_walked_in_half_a_millisecond() -> None:
    batch = {f"k{i}": torch.zeros(16) for i in range(500)}
    best = 1.0
    for _ in range(20):
        began = time.perf_counter()
        leaves, node = flatten(batch)
        out = unflatten(node, leaves)
        best = min(best, time.perf_counter() - began)
    assert list(out) == list(batch) and best < 0.5e-3


# ---------------------------------------------------------------- layout


def test_pieces_are_aligned_and_apart() -> None:
    plan = plan_of([torch.zeros(3, dtype=torch.uint8), torch.zeros(5, 7), torch.zeros((), dtype=torch.bool)])
    assert [offset % ALIGNMENT for _, _, offset in plan.pieces] == [0, 0, 0]
    assert [nbytes for _, nbytes, _ in plan.pieces] == [3, 140, 1]
    ends = [offset + nbytes for _, nbytes, offset in plan.pieces]
    assert all(end <= piece[2] for end, piece in zip(ends, plan.pieces[1:])) and plan.nbytes == ends[-1]
    assert [address for address, _, _ in plan.pieces] == [t.data_ptr() for t in plan.sources.tensors]
    assert [spec[1:4] for spec in plan.specs] == [(1, 8, (3,)), (2, 32, (5, 7)), (6, 8, ())]


def test_strides_of_dense_tensors_are_kept() -> None:
    last = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    plan = plan_of([last, torch.zeros(4, 6).t(), torch.zeros(4, 6)[:, ::2], torch.zeros(3).expand(2, 3), torch.zeros(8)[3:]])
    assert [spec[4] for spec in plan.specs] == [last.stride(), (1, 6), None, None, None]
    assert [nbytes for _, nbytes, _ in plan.pieces] == [480, 96, 48, 24, 20]


class Sub(torch.Tensor):
    pass


@pytest.mark.parametrize("leaf", [
    A.clone().requires_grad_(), torch.zeros(0, 3), A.to_sparse(), A.as_subclass(Sub), torch.zeros(2, dtype=torch.complex64).conj(),
    torch.zeros(2, dtype=torch.complex64).conj().imag, torch.zeros(2, device="meta"), Movable(A), torch.nn.Parameter(A.clone()),
], ids=lambda leaf: type(leaf).__name__)
def test_others_are_not_packed(leaf: Any) -> None:
    plan = plan_of([A, leaf, B])
    assert list(plan.others) == [1] and plan.others[1] is leaf and len(plan.pieces) == 2


def test_float8_goes_as_bytes() -> None:
    plan = plan_of([A, torch.zeros(5, dtype=torch.float8_e4m3fn)])
    assert plan.specs[1][1:3] == (1, 8) and plan.dtypes == {1: torch.float8_e4m3fn}


def test_nothing_is_packed_where_that_is_asked() -> None:
    plan = plan_of([A, B], pack=False)
    assert plan.nbytes == 0 and list(plan.others) == [0, 1]
