"""Batches as trees: takes the tensors out of nested containers, and puts others into containers of the same types.

    leaves, node = flatten({"x": images, "meta": ["a.jpg", 3]})      # leaves: [images]
    unflatten(node, [moved])                                         # {"x": moved, "meta": ["a.jpg", 3]}

Walked: dict, list, tuple, their subclasses (namedtuples, OrderedDict, defaultdict ...), UserDict and what derives from it, other
Mappings, dataclasses, and types that are registered with torch.utils._pytree. A leaf is a tensor, or an object whose class has a
method `to` (PackedSequence, PyG's Data ...): that class knows better how to move itself. Everything else passes through, and so
do containers without leaves: the same object comes out. """
from __future__ import annotations

import collections
import collections.abc
import copy
import dataclasses
from typing import Any, Callable

import torch

try:
    from torch.utils._pytree import SUPPORTED_NODES as _REGISTERED
except ImportError:  # a private name: without it such types pass through
    _REGISTERED = {}

__all__ = ["flatten", "unflatten"]

# (make, children): `make` builds the container of a list of values. A child is the number of a leaf or a node; a slice for all is
# a run of leaves. (None, value): passes through.
Node = tuple[Callable[[list], Any] | None, Any]
Make = Callable[[list], Any]
Walker = Callable[[Any, list[Any]], "Node | int"]

_TENSOR = torch.Tensor


def flatten(batch: Any) -> tuple[list[Any], Node | int]:
    """Returns (leaves, node): the tensors (and objects with a `to`) in order, and what unflatten needs. `batch` stays as it is.

    TypeError: a container that cannot be rebuilt, with its type and the cure."""
    leaves: list[Any] = []
    node = _walk(batch, leaves)
    return leaves, node


def unflatten(node: Node | int, leaves: list[Any]) -> Any:
    """The batch with `leaves` in place of its own. Once a node: it owns the copies that are filled in."""
    if isinstance(node, int):
        return leaves[node]
    make, children = node
    if make is None:
        return children
    if children.__class__ is slice:
        return make(leaves[children])
    return make([leaves[c] if c.__class__ is int else unflatten(c, leaves) for c in children])


def _walk(x: Any, leaves: list[Any]) -> Node | int:
    cls = x.__class__
    if cls is _TENSOR:
        leaves.append(x)
        return len(leaves) - 1
    take = _EXACT.get(cls)
    if take is None:
        if cls in _REGISTERED:
            take = _registered
        else:
            take = _KINDS.get(cls)
            if take is None:
                take = _KINDS[cls] = _kind(cls)
    return take(x, leaves)


def _children(values: Any, leaves: list[Any]) -> Any:
    """Of a container with these values: a slice where all are tensors, a list where there is any leaf, else None."""
    first = len(leaves)
    children: list[Any] = []
    direct = 0
    for value in values:
        if value.__class__ is _TENSOR:
            children.append(len(leaves))
            leaves.append(value)
            direct += 1
        else:
            children.append(_walk(value, leaves))
    if direct == len(children):
        return slice(first, first + direct) if direct else None
    return children if len(leaves) > first else None


def _same(x: Any, leaves: list[Any]) -> Node:
    return None, x


def _leaf(x: Any, leaves: list[Any]) -> int:
    leaves.append(x)
    return len(leaves) - 1


def _as_is(values: list) -> list:
    return values


def _dict(x: dict, leaves: list[Any]) -> Node:
    children = _children(x.values(), leaves)
    if children is None:
        return None, x
    keys = list(x)
    return (lambda values: dict(zip(keys, values))), children


def _list(x: list, leaves: list[Any]) -> Node:
    children = _children(x, leaves)
    return (None, x) if children is None else (_as_is, children)


def _tuple(x: tuple, leaves: list[Any]) -> Node:
    children = _children(x, leaves)
    return (None, x) if children is None else (tuple, children)


def _namedtuple(x: Any, leaves: list[Any]) -> Node:
    children = _children(x, leaves)
    return (None, x) if children is None else (_make_tuple(x), children)


def _make_tuple(x: tuple) -> Make:
    # Not through __new__ of the subclass, which may take anything.
    cls, attributes = x.__class__, getattr(x, "__dict__", None)

    def make(values: list) -> Any:
        new = tuple.__new__(cls, values)
        if attributes:
            new.__dict__.update(attributes)
        return new

    return make


def _list_subclass(x: list, leaves: list[Any]) -> Node:
    children = _children(x, leaves)
    if children is None:
        return None, x
    new = copy.copy(x)

    def make(values: list) -> Any:
        new[:] = values
        return new

    return make, children


def _items(x: Any, leaves: list[Any]) -> Node:
    """Dict subclasses and UserDict: a shallow copy has items of its own, and keeps what else the type knows (a default factory, attributes)."""
    keys = list(x)
    children = _children([x[key] for key in keys], leaves)
    if children is None:
        return None, x
    new = copy.copy(x)
    if getattr(x, "__dict__", None) is x:  # the idiom of attributes that are the items
        new.__dict__ = new

    def make(values: list) -> Any:
        for key, value in zip(keys, values):
            new[key] = value
        return new

    return make, children


def _mapping(x: Any, leaves: list[Any]) -> Node:
    keys = list(x)
    children = _children([x[key] for key in keys], leaves)
    if children is None:
        return None, x
    cls = x.__class__

    def make(values: list) -> Any:
        try:
            return cls(dict(zip(keys, values)))
        except TypeError as error:
            raise TypeError(f"a batch holds a {cls.__qualname__}, which cannot be made from a dict ({error}); "
                            "register it with torch.utils._pytree.register_pytree_node, or give it a method to(device)") from error

    return make, children


def _dataclass(x: Any, leaves: list[Any]) -> Node:
    names = [field.name for field in dataclasses.fields(x) if hasattr(x, field.name)]
    children = _children([getattr(x, name) for name in names], leaves)
    if children is None:
        return None, x
    new = copy.copy(x)  # no __init__ and no __post_init__: they have run

    def make(values: list) -> Any:
        for name, value in zip(names, values):
            object.__setattr__(new, name, value)  # frozen ones too
        return new

    return make, children


def _registered(x: Any, leaves: list[Any]) -> Node:
    definition = _REGISTERED[x.__class__]
    values, context = definition.flatten_fn(x)
    children = _children(values, leaves)
    if children is None:
        return None, x
    return (lambda moved: definition.unflatten_fn(moved, context)), children


def _kind(cls: type) -> Walker:
    if issubclass(cls, _TENSOR):
        return _leaf
    if issubclass(cls, (dict, collections.UserDict)):
        return _items
    if callable(getattr(cls, "to", None)):
        return _leaf
    if issubclass(cls, tuple):
        return _namedtuple
    if issubclass(cls, list):
        return _list_subclass
    if dataclasses.is_dataclass(cls):
        return _dataclass
    if issubclass(cls, collections.abc.Mapping):
        return _mapping
    return _same


_EXACT: dict[type, Walker] = {dict: _dict, list: _list, tuple: _tuple, str: _same, int: _same, float: _same, type(None): _same}
_KINDS: dict[type, Walker] = {}
