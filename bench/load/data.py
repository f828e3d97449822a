"""Makes the checkpoints of the load benchmarks, and says whether tensors hold what was made.

    data.py DIR [--sets D1 D2 D3] [--shard-mib 4096] [--many-mib 4096] [--odd-mib 2048] [--pt]

D1: 4 shards and an index, bfloat16 tensors of 64 MiB.   D2: one file of 18,867 tensors of some 220 KiB, as many as a large mixture of experts has.
D3: a header that is not padded and element sizes that ascend, so that nearly no tensor is aligned.   --pt: D1 as files of PyTorch's own too.

The bytes are one random block again and again, with a number at the head of each page; so each page of a set is another, and what a tensor must
hold can be made again on the GPU, to compare every byte.
"""
from __future__ import annotations

import argparse
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

MIB = 1 << 20
BLOCK = 64 * MIB
PAGE_WORDS = 512  # of 8 bytes
SEED = 20261130
MANY = 18867

# Name: (safetensors' name, torch's dtype), for what D3 mixes.
_ODD = [("U8", torch.uint8), ("F8_E4M3", torch.float8_e4m3fn), ("F16", torch.float16), ("BF16", torch.bfloat16), ("F32", torch.float32),
        ("I32", torch.int32), ("F64", torch.float64), ("I64", torch.int64)]
_SIZES = {"U8": 1, "F8_E4M3": 1, "F16": 2, "BF16": 2, "F32": 4, "I32": 4, "F64": 8, "I64": 8}

Layout = dict[str, tuple[str, list[int], int, int]]  # name: (dtype, shape, begin, end)


def block(device: str | torch.device = "cpu") -> torch.Tensor:
    """The random block, as int64. The same in every process."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(-(1 << 63), (1 << 63) - 1, (BLOCK // 8,), dtype=torch.int64, generator=generator).to(device)


def expected(words: torch.Tensor, shard: int, begin: int, end: int) -> torch.Tensor:
    """Bytes [begin, end) of the data of shard `shard`, where `words` is block()."""
    parts = []
    first = begin // 8 // PAGE_WORDS * PAGE_WORDS
    last = (end + 7) // 8
    at = first
    while at < last:
        inside = at % words.numel()
        count = min(last - at, words.numel() - inside)
        part = words[inside:inside + count].clone()
        marks = torch.arange(at, at + count, PAGE_WORDS, device=words.device)
        part[::PAGE_WORDS] = (marks | (shard << 48)) ^ 0x5DEECE66D5DEECE6
        parts.append(part)
        at += count
    whole = torch.cat(parts) if len(parts) > 1 else parts[0] if parts else words[:0]
    return whole.view(torch.uint8)[begin - first * 8:end - first * 8]


def layout_of(name: str, nbytes: int, shard: int = 0) -> Layout:
    """What the file holds, of `nbytes` of data or little less."""
    table: Layout = {}
    if name == "D1":
        step = min(64 * MIB, nbytes)
        for i in range(nbytes // step):
            table[f"model.layers.{shard * (nbytes // step) + i}.weight"] = ("BF16", [step // 2 // 1024, 1024], i * step, (i + 1) * step)
    elif name == "D2":
        at = 0
        for i in range(MANY):
            size = nbytes // MANY * (75 + 5 * (i % 11)) // 100 // 32 * 32  # 0.75 to 1.25 of the mean
            expert, part = divmod(i, 3)
            label = f"model.layers.{expert // 128}.mlp.experts.{expert % 128}.{('down', 'gate', 'up')[part]}_proj.weight"
            table[label] = ("BF16", [size // 32, 16], at, at + size)
            at += size
    else:
        at, each = 0, nbytes // 64
        for i in range(64):
            dtype = _ODD[i // 8][0]
            count = each // _SIZES[dtype] - (1 if i < 8 else 0)
            table[f"layer.{i}.{dtype.lower()}"] = (dtype, [count], at, at + count * _SIZES[dtype])
            at += count * _SIZES[dtype]
    return table


def header_of(table: Layout, odd: bool) -> bytes:
    """The first bytes of the file. odd: the data begins at an address that is 3 more than a multiple of 8."""
    header = json.dumps({"__metadata__": {"format": "pt"}} | {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]} for name, (dtype, shape, begin, end) in table.items()
    }, separators=(",", ":")).encode()
    header += b" " * ((3 if odd else 0) - len(header) & 7)
    return len(header).to_bytes(8, "little") + header


def write_file(path: pathlib.Path, words: torch.Tensor, table: Layout, shard: int, odd: bool = False) -> None:
    end = max(last for _, _, _, last in table.values())
    own = words.clone()
    with open(path, "wb", buffering=0) as file:
        file.write(header_of(table, odd))
        for at in range(0, end, BLOCK):
            own[::PAGE_WORDS] = (torch.arange(at // 8, (at + BLOCK) // 8, PAGE_WORDS) | (shard << 48)) ^ 0x5DEECE66D5DEECE6
            view = memoryview(own.numpy()).cast("B")[:min(BLOCK, end - at)]
            while view:
                view = view[file.write(view):]


def write_pt(path: pathlib.Path, words: torch.Tensor, table: Layout, shard: int) -> None:
    torch.serialization.set_crc32_options(False)
    torch.save({name: expected(words, shard, begin, end).view(torch.bfloat16).view(shape) for name, (_, shape, begin, end) in table.items()}, path)


def make_floats(folder: pathlib.Path, nbytes: int, shards: int = 2) -> None:
    """A checkpoint of float32 for casts, nbytes a shard: finite numbers, from a random block with a number at the head of each page."""
    folder.mkdir(parents=True, exist_ok=True)
    words = torch.randn(BLOCK // 4, generator=torch.Generator().manual_seed(SEED))
    step = min(64 * MIB, nbytes)
    for shard, name in enumerate(shard_names(shards)):
        table: Layout = {f"model.{shard}.{i}.weight": ("F32", [step // 4096, 1024], i * step, (i + 1) * step) for i in range(nbytes // step)}
        with open(folder / name, "wb", buffering=0) as file:
            file.write(header_of(table, odd=False))
            for i in range(nbytes // step):
                words[::1024] = torch.arange(i * 16384, i * 16384 + len(words[::1024])) * 1e-3 + shard
                file.write(memoryview(words.numpy()).cast("B")[:step])


def shard_names(count: int) -> list[str]:
    return [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]


def make_set(folder: pathlib.Path, name: str, nbytes: int, shards: int = 4, pt: bool = False) -> None:
    """One set in folder/NAME; nbytes: a file."""
    here = folder / name
    here.mkdir(parents=True, exist_ok=True)
    words = block()
    if name != "D1":
        write_file(here / "model.safetensors", words, layout_of(name, nbytes), 0, odd=name == "D3")
        return
    names = shard_names(shards)
    tables = [layout_of(name, nbytes, shard) for shard in range(shards)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: write_file(here / names[i], words, tables[i], i), range(shards)))
        if pt:
            list(pool.map(lambda i: write_pt(here / names[i].replace("safetensors", "pt"), words, tables[i], i), range(shards)))
    index = {"metadata": {"total_size": nbytes * shards}, "weight_map": {label: names[i] for i, table in enumerate(tables) for label in table}}
    (here / "model.safetensors.index.json").write_text(json.dumps(index))


def tables_of(folder: pathlib.Path) -> Iterator[tuple[pathlib.Path, int, Layout]]:
    """(path, shard, layout) of each file of a set, from the headers themselves."""
    for shard, path in enumerate(sorted(folder.glob("*.safetensors"))):
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        yield path, shard, {name: (one["dtype"], one["shape"], *one["data_offsets"]) for name, one in header.items()}


def verifier(folder: pathlib.Path, device: str | torch.device) -> Callable[[dict[str, torch.Tensor]], str]:
    """A function that says what is wrong with the set's tensors, as loaded; "": every byte is right. Made before, it costs the loaders nothing."""
    tables = list(tables_of(folder))

    def verify(tensors: dict[str, torch.Tensor]) -> str:
        words = block(device)
        seen = 0
        for _, shard, table in tables:
            for name, (_, shape, begin, end) in table.items():
                tensor = tensors.get(name)
                if tensor is None:
                    return f"{name} is missing"
                if list(tensor.shape) != shape or not tensor.is_contiguous():
                    return f"{name} has the shape {list(tensor.shape)}, not {shape}"
                if not torch.equal(tensor.reshape(-1).view(torch.uint8), expected(words, shard, begin, end)):
                    return f"{name} has other bytes than the file"
                seen += 1
        return "" if seen == len(tensors) else f"{len(tensors)} tensors, not {seen}"

    return verify


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--sets", nargs="+", choices=("D1", "D2", "D3"), default=["D1", "D2", "D3"])
    parser.add_argument("--shard-mib", type=int, default=4096)
    parser.add_argument("--many-mib", type=int, default=4096)
    parser.add_argument("--odd-mib", type=int, default=2048)
    parser.add_argument("--pt", action="store_true")
    options = parser.parse_args()
    sizes = {"D1": options.shard_mib, "D2": options.many_mib, "D3": options.odd_mib}
    for name in options.sets:
        began = time.monotonic()
        make_set(options.folder, name, sizes[name] * MIB, pt=options.pt and name == "D1")
        nbytes = sum(os.path.getsize(path) for path in (options.folder / name).iterdir())
        print(f"{name}: {nbytes / 1e9:.2f} GB in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
