"""safe_open: a checkpoint whose tensors are read one by one, or in slices, as the class of that name in safetensors does."""
from __future__ import annotations

import math
import numbers
from types import TracebackType
from typing import Any, Self

import torch

from .. import _native
from .load import DTYPES, Path, Running, Where, backend_name, find, load_all, open_checkpoint

__all__ = ["Slice", "safe_open"]

_FRAMEWORKS = ("pt", "torch", "pytorch")
_SMALL = 1 << 20  # bytes up to which one read in this thread is quicker than a load

Info = tuple[str, str, int, tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int, int]


class safe_open:
    """A checkpoint, read as asked.

        with sidestream.torch.safe_open("model.safetensors", framework="pt", device="cuda") as file:
            for name in file.keys():
                tensor = file.get_tensor(name)

    filename: as in load_file; a sharded model is one checkpoint. framework: "pt". device, backend, lenient: as in load_file. Each call blocks until
    its tensor is there. Where all are wanted, get_tensors() is much quicker than one after the other. Raises what load_file does; get_tensor and
    get_slice raise KeyError for a name that is not there. A file that was changed since it was opened is refused."""

    def __init__(self, filename: Path, framework: str = "pt", device: str | int | torch.device = "cpu", *, backend: str = "auto",
                 lenient: bool = False) -> None:
        if framework not in _FRAMEWORKS:
            raise ValueError(f"safe_open: framework is {framework!r}; this one makes tensors of PyTorch's: 'pt'")
        self._backend = backend_name("safe_open", backend)
        self._where = Where("safe_open", device)
        self._checkpoint = open_checkpoint(filename, lenient)

    def keys(self) -> list[str]:
        """The tensors' names, sorted."""
        return sorted(self._checkpoint.names())

    def offset_keys(self) -> list[str]:
        """The tensors' names, as they lie in the files."""
        return self._checkpoint.names()

    def __len__(self) -> int:
        return len(self._checkpoint)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._checkpoint.find(name) >= 0

    def metadata(self) -> dict[str, str] | None:
        """The header's free texts; None where there are none. Of shards, the first that says something to a key counts."""
        merged: dict[str, str] = {}
        for number in range(len(self._checkpoint.files())):
            for key, value in self._checkpoint.metadata(number).items():
                merged.setdefault(key, value)
        return merged or None

    def get_tensor(self, name: str) -> torch.Tensor:
        number = find(self._checkpoint, "get_tensor", name)
        info = self._checkpoint.info(number)
        return self._read(number, info, 0, info[6], info[4])

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """All of them, as load_file."""
        return load_all("get_tensors", self._checkpoint, self._where, self._backend)

    def get_slice(self, name: str) -> Slice:
        """Nothing is read yet: get_slice(name)[2:5, :8] reads the rows that it needs."""
        number = find(self._checkpoint, "get_slice", name)
        return Slice(self, number, self._checkpoint.info(number))

    def _read(self, number: int, info: Info, begin: int, nbytes: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Bytes of a tensor, as one of that shape."""
        dtype, where = DTYPES[info[2]], self._where
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype, device=where.device)
        storage, offset = self._bytes(number, begin, nbytes)
        strides = [math.prod(max(n, 1) for n in shape[at + 1:]) for at in range(len(shape))]
        tensor = torch.empty(0, dtype=dtype, device=storage.device)
        tensor.set_(storage, offset // tensor.element_size(), shape, strides)
        return tensor.to(where.device) if where.move else tensor

    def _bytes(self, number: int, begin: int, nbytes: int) -> tuple[torch.UntypedStorage, int]:
        """Memory that holds them, and where in it they begin, aligned for every type."""
        where = self._where
        if nbytes <= _SMALL and not where.simulated:
            raw = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            self._checkpoint.read(number, begin, nbytes, raw.data_ptr())
            return (raw if where.host else raw.to(where.device)).untyped_storage(), 0
        running = Running(where, self._checkpoint, [(number, begin, nbytes, 0)], backend=self._backend)
        try:
            [offset] = running.load.offsets()
            running.join()
        finally:
            running.load.close()
        return running.storages[0], offset

    def close(self) -> None:
        """Tensors stay; calls after it raise WrongState."""
        self._checkpoint.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Slice:
    """A tensor that is read where it is indexed: the rows alone that the index asks for."""

    def __init__(self, file: safe_open, number: int, info: Info) -> None:
        self._file, self._number, self._info = file, number, info

    def get_shape(self) -> list[int]:
        """As in the header: of types with two elements a byte it counts elements."""
        return list(self._info[3])

    def get_dtype(self) -> str:
        """As in the header: "BF16"."""
        return self._info[1]

    def __getitem__(self, key: Any) -> torch.Tensor:
        """As the whole tensor's [key], errors too, in memory of its own, C order. What is read is one range: a row, or rows one after the other, of
        the dimension that the first index leaves, or the next one where that is a number, and so on. The rest is cut in the tensor's memory."""
        _, _, _, _, shape, _, nbytes, _, _ = self._info
        items = key if isinstance(key, tuple) else (key,)
        if all(_is_basic(item) for item in items):
            torch.empty((), dtype=torch.uint8, device="cpu").expand(shape)[key]  # raises what the whole would
        begin, read, rest = _narrow(shape, items)
        element = nbytes // math.prod(shape) if nbytes else 0
        whole = self._file._read(self._number, self._info, begin * element, math.prod(read) * element, read)
        part = whole[rest if isinstance(key, tuple) else rest[0]]
        return part.contiguous() if part.numel() == whole.numel() else part.clone(memory_format=torch.contiguous_format)


def _is_number(item: object) -> bool:
    return isinstance(item, numbers.Integral) and not isinstance(item, bool)


def _is_basic(item: object) -> bool:
    return item is None or item is ... or isinstance(item, slice) or _is_number(item)


def _narrow(shape: tuple[int, ...], items: tuple[Any, ...]) -> tuple[int, tuple[int, ...], tuple[Any, ...]]:
    """The first element of the range that holds shape's [items], the shape of that range, and what [items] are in it. What is not understood, or
    wrong, stays as it is."""
    begin, read, rest = 0, list(shape), list(items)
    at = 0  # of dimensions
    for i, item in enumerate(items):
        if item is None:
            continue
        if at == len(shape):
            break
        size, stride = shape[at], math.prod(shape[at + 1:])
        if _is_number(item) and -size <= item < size:
            first, count, rest[i] = int(item) % size, 1, 0
        elif isinstance(item, slice) and (item.step is None or item.step > 0):
            first, end, step = item.indices(size)
            count = max(end - first, 0)
            rest[i] = slice(None, None, step)
        else:
            break
        begin += first * stride
        read[at] = count
        at += 1
        if count != 1:
            break
    return (begin if math.prod(read) else 0), tuple(read), tuple(rest)
