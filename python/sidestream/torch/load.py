"""Checkpoints to the GPU, read and copied at once: load_file, stream, and what safe_open and load_model share with them.

A load runs on threads of the library's, without the GIL. Meanwhile the tensors are made, over one block of memory a file: no allocation and no copy
for each of them.
"""
from __future__ import annotations

import errno
import gc
import mmap
import os
import threading
from collections.abc import Generator, Iterable
from types import GeneratorType, TracebackType
from typing import Any, Self, cast

import torch

from .. import _native
from ._common import open_device, refuse_capture
from .target import raw_stream

__all__ = ["FileMissing", "TensorStream", "last_load", "load_file", "stream"]

Path = str | os.PathLike[str]
Part = tuple[int, int, int, int]  # tensor, first byte, bytes (0: all), address (0: in an arena)

# By the number that the library has for a dtype: PyTorch's name for it. "": it has none, and the tensor comes as bytes.
_NAMES = ("bool", "float4_e2m1fn_x2", "", "", "uint8", "int8", "float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu", "float8_e4m3fnuz",
          "float8_e5m2fnuz", "int16", "uint16", "float16", "bfloat16", "int32", "uint32", "float32", "complex64", "float64", "int64", "uint64")
DTYPES: list[torch.dtype] = [getattr(torch, name, torch.uint8) if name else torch.uint8 for name in _NAMES]

_BACKENDS = ("auto", "pread", "direct", "uring")
_MAPPED = 1 << 20  # bytes from which host memory is mapped, and so lies on pages of its own, huge ones where there are such
_SLICE_S = 0.05    # between two looks at signals

_last = threading.local()


class FileMissing(_native.NotFound, FileNotFoundError):
    """There is no such checkpoint, or one of its files is not there. A sidestream.NotFound and a FileNotFoundError. filename: what was asked for;
    str() says what is missing."""

    def __init__(self, number: int, text: str, filename: str | bytes | None = None) -> None:
        super().__init__(number, text)
        self.errno, self.strerror, self.filename = number, text, filename

    def __str__(self) -> str:
        return str(self.strerror)


FileMissing.__module__ = "sidestream.torch"  # where it is found by name


def last_load() -> dict[str, Any] | None:
    """How the last load of this thread went, None before the first: bytes, time_s, gbps, bottleneck, copying_s, wait_read_s, routes (what read how
    much, and why that), moved_bytes (placed anew for their alignment), pinned_bytes, ..."""
    return getattr(_last, "stats", None)


def note(stats: dict[str, Any]) -> None:
    _last.stats = stats


class Where:
    """Where tensors go. device: theirs.   native: the library's device that copies.   host: it reads straight to host memory.   move: they are
    loaded to the CPU, and PyTorch takes them to their device, which the library does not know."""

    def __init__(self, what: str, spec: str | int | torch.device) -> None:
        text = f"cuda:{spec}" if isinstance(spec, int) and not isinstance(spec, bool) else str(spec)
        self.index, self.host, self.move, self.simulated = -1, False, False, False
        if text == "sim" or text.startswith("sim:"):
            self.device, self.simulated = torch.device("cpu"), True
            self.native = open_device(text)
            return
        try:
            self.device = torch.device(text)
        except RuntimeError:
            raise ValueError(f"{what}: device is {spec!r}; it takes 'cpu', 'cuda', 'cuda:N' or another device of PyTorch's, or 'sim'") from None
        if self.device.type == "cuda":
            self.index = torch.cuda.current_device() if self.device.index is None else self.device.index
            self.device = torch.device("cuda", self.index)
            refuse_capture(what, self.index)
            self.native = open_device(f"cuda:{self.index}")
            return
        self.host, self.move = True, self.device.type != "cpu"
        self.native = open_device("sim")  # no data passes through it

    def stream(self) -> _native.Stream | None:
        """The stream that is current where the tensors are; None: the host uses them."""
        return _native.Stream.wrap(self.native, raw_stream(self.index)) if self.index >= 0 else None

    def memory(self, nbytes: int) -> tuple[torch.Tensor, int, Any]:
        """A block of bytes, its address, and what keeps it."""
        if self.simulated:
            buffer = self.native.alloc(nbytes)
            return torch.from_dlpack(buffer), buffer.data, buffer
        if self.host and nbytes >= _MAPPED:
            pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            try:
                pages.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without them
            block = torch.frombuffer(pages, dtype=torch.uint8)
        else:
            block = torch.empty(nbytes, dtype=torch.uint8, device="cpu" if self.host else self.device)
        return block, block.data_ptr(), block


def open_checkpoint(path: Path, lenient: bool) -> _native.Checkpoint:
    """FileMissing; InvalidArgument for what is malformed."""
    try:
        return _native.Checkpoint(path, lenient=lenient)
    except _native.NotFound as error:
        missing = FileMissing(errno.ENOENT, str(error), os.fspath(path))
        vars(missing).update(vars(error))  # status, where, ...
        raise missing from None


def backend_name(what: str, backend: str) -> str:
    """"mmap" is the reference's default, and means ours."""
    if backend == "mmap":
        return "auto"
    if backend not in _BACKENDS:
        raise ValueError(f"{what}: backend is {backend!r}; it takes 'auto' or one of {', '.join(_BACKENDS[1:])}")
    return backend


class Running:
    """A load under way, and the blocks that it fills."""

    def __init__(self, where: Where, checkpoint: _native.Checkpoint, parts: list[Part] | None = None, **more: Any) -> None:
        self.where = where
        self.load = _native.Load(where.native, checkpoint, parts=parts, where="host" if where.host else "device", given=True, **more)
        self.storages: list[torch.UntypedStorage] = []
        try:
            stream = where.stream()
            for number, (nbytes, _) in enumerate(self.load.arenas()):
                block, address, owner = where.memory(nbytes)
                self.load.give(number, address, owner, stream)
                self.storages.append(block.untyped_storage())
        except BaseException:
            self.load.close()
            raise

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that lies in the blocks, by name: each is no view of another, so that writing to one does not count as writing to the others."""
        enabled = gc.isenabled()
        try:
            gc.disable()  # many objects are made, which all stay: a look for garbage may be one at every object of the process
            return self._make()
        finally:
            if enabled:
                gc.enable()

    def _make(self) -> dict[str, torch.Tensor]:
        names, groups = self.load.columns()
        result: dict[str | None, torch.Tensor] = dict.fromkeys(names)  # type: ignore[arg-type]  # in this order; groups come as they are
        device = torch.device("cpu") if self.where.host else self.where.device
        for arena, dtype, first, keys, elements, shapes, strides in groups:
            empty = torch.empty(0, dtype=DTYPES[dtype], device=device)
            if arena < 0:
                result.update(zip(keys, map(empty.new_empty, shapes)))
                continue
            line = empty.set_(self.storages[arena], first, (sum(elements),), (1,))
            # Of all that makes many tensors in one call, this makes them no views.
            result.update(zip(keys, map(torch.Tensor.as_strided_, torch.unsafe_split_with_sizes(line, elements), shapes, strides)))
        result.pop(None, None)  # what lies between tensors
        return cast(dict[str, torch.Tensor], result)

    def join(self) -> None:
        note(self.load.join())


def load_all(what: str, checkpoint: _native.Checkpoint, where: Where, backend: str) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, there for every stream."""
    if len(checkpoint) == 0:
        return {}
    running = Running(where, checkpoint, backend=backend_name(what, backend))
    try:
        result = running.tensors()
        running.join()
    finally:
        running.load.close()
    return {name: tensor.to(where.device) for name, tensor in result.items()} if where.move else result


def load_file(filename: Path, device: str | int | torch.device = "cpu", *, backend: str = "auto",
              lenient: bool = False) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by name: as safetensors.torch.load_file, but read and copied at once.

        weights = sidestream.torch.load_file("model.safetensors", device="cuda")

    filename: a safetensors file; the index file or the folder of a sharded model; a .npy or .raw file. Malformed files are refused, with the place.
    device: "cpu", "cuda", "cuda:1", 1, ...; "sim" is the software device, for tests: CPU tensors. backend: how files are read: "pread", "direct",
    "uring"; "auto" chooses piece by piece. lenient: takes what safetensors takes although its format forbids it: names that stand twice (the last
    counts), unknown fields, metadata that is null, tensors in shards that the index does not list.

    Blocks until all is there, for every stream, and no file was changed meanwhile. The tensors of a file share one block of memory, which lives
    as long as any of them: clone() what you keep of much, and what torch.save is to write where the types differ, which it refuses in one block.
    Types that PyTorch does not have come as bytes.

    Raises FileMissing (a FileNotFoundError), sidestream.InvalidArgument (malformed), sidestream.IOFailed, torch.OutOfMemoryError. Ctrl-C ends it."""
    where = Where("load_file", device)
    checkpoint = open_checkpoint(filename, lenient)
    try:
        return load_all("load_file", checkpoint, where, backend)
    finally:
        checkpoint.close()


class _Flow:
    """Where a stream is. It knows nothing of the TensorStream, which ends, and the load with it, when nobody has it any more."""

    def __init__(self, where: Where, checkpoint: _native.Checkpoint, parts: list[Part] | None, backend: str) -> None:
        self.where = where
        self.at = 0
        self.count = len(checkpoint) if parts is None else len(parts)
        self.running = Running(where, checkpoint, parts, in_order=parts is not None, backend=backend) if self.count > 0 else None
        self._home = raw_stream(where.index) if where.index >= 0 else 0
        self._raw = -1
        self._stream: _native.Stream | None = None

    def walk(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """As a generator, it lets one thread in at a time, and no interrupt can leave it locked. It keeps neither tensors nor the load meanwhile."""
        while not self._ended():
            yield self._take()

    def _ended(self) -> bool:
        running = self.running
        if running is not None and self.at == self.count:
            running.join()
            self.close()
        return self.running is None

    def _take(self) -> tuple[str, torch.Tensor]:
        running, at, where = self.running, self.at, self.where
        if running is None:
            raise _native.WrongState("next: another thread has closed this stream")
        load = running.load
        while not load.ready(at + 1, _SLICE_S):
            pass  # signals are looked at
        load.wait(at, self._current())
        spec = load.spec(at)
        assert spec is not None  # no part has an address
        name, dtype, shape, strides, offset, arena = spec
        self.at += 1
        tensor = torch.empty(0, dtype=DTYPES[dtype], device="cpu" if where.host else where.device)
        if arena < 0:
            return name, tensor.new_empty(shape)
        tensor.set_(running.storages[arena], offset, shape, strides)
        if where.index >= 0 and self._raw != self._home:
            tensor.record_stream(torch.cuda.current_stream(where.index))
        return name, tensor.to(where.device) if where.move else tensor

    def _current(self) -> _native.Stream | None:
        if self.where.index >= 0:
            raw = raw_stream(self.where.index)
            if raw != self._raw:
                self._raw, self._stream = raw, self.where.stream()
        return self._stream

    def close(self) -> None:
        """WrongState while another thread is in a call of the load's: then nothing has changed."""
        running = self.running
        if running is not None:
            running.load.close()
        self.running = None
        self.at = self.count


def _is_of_this_frame(error: BaseException) -> bool:
    """Whether what the caller caught is a ValueError of next() itself, for a generator that is in use, and none of the generator's."""
    trace = error.__traceback__
    return isinstance(error, ValueError) and trace is not None and trace.tb_next is None


class TensorStream:
    """What stream() returns: an iterator of (name, tensor), for one thread at a time."""

    def __init__(self, filename: Path, device: str | int | torch.device, order: Iterable[str] | None, backend: str,
                 lenient: bool) -> None:
        backend = backend_name("stream", backend)
        where = Where("stream", device)
        checkpoint = open_checkpoint(filename, lenient)
        try:
            parts = None if order is None else [(find(checkpoint, "stream", name), 0, 0, 0) for name in order]
            self._flow = _Flow(where, checkpoint, parts, backend)
            self._items = cast("GeneratorType[tuple[str, torch.Tensor], None, None]", self._flow.walk())
        finally:
            checkpoint.close()

    def __iter__(self) -> Self:
        return self

    def __len__(self) -> int:
        """Tensors that are left."""
        return self._flow.count - self._flow.at

    def __next__(self) -> tuple[str, torch.Tensor]:
        try:
            return next(self._items)
        except StopIteration:
            raise
        except BaseException as error:
            if _is_of_this_frame(error):
                raise _native.WrongState("next: another thread is in next() of this stream; give each thread a stream of its own, "
                                         "or lock around next()") from None
            if not self._items.gi_running:
                self.close()
            raise

    def close(self) -> None:
        """Ends the load; the tensors that were handed out stay. WrongState while another thread is in next(): close again when that has returned."""
        if self._items.gi_running:
            raise _native.WrongState("close: another thread is in next() of this stream; close it when that has returned")
        self._flow.close()

    def stats(self) -> dict[str, Any] | None:
        """How it goes: as last_load(), so far; None once it has ended."""
        running = self._flow.running
        return None if running is None else running.load.stats()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def find(checkpoint: _native.Checkpoint, what: str, name: str) -> int:
    number = checkpoint.find(name)
    if number < 0:
        raise KeyError(f"{what}: the checkpoint has no tensor {name!r}")
    return number


def stream(filename: Path, device: str | int | torch.device = "cpu", *, order: Iterable[str] | None = None, backend: str = "auto",
           lenient: bool = False) -> TensorStream:
    """Iterates over (name, tensor) while the rest is still on its way: the first layers can work before the last are read.

        for name, tensor in sidestream.torch.stream("model/", device="cuda", order=names_by_layer): ...

    Each tensor is ready on the stream that is current when it is handed out: work that is queued there comes after its copy, and the host does not
    wait for it. order: the names that are wanted, in their order; None: all, as they lie in the files. filename, device, backend, lenient: as in
    load_file.

    The end of the iteration says that no file was changed meanwhile; until then a tensor may be of a file that somebody writes to. close(), or the
    end of a `with`, ends the load early. Threads that share a stream lock around next(): one that comes while another is in it gets a WrongState.

    Raises what load_file does, and KeyError for a name in `order` that is not there."""
    return TensorStream(filename, device, order, backend, lenient)
