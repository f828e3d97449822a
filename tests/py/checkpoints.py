"""Checkpoints for the tests: safetensors files written by hand, so that nothing is compared with what read it."""
from __future__ import annotations

import json
import pathlib
import random

# Name: (bits, what PyTorch calls it; "": it has none).
DTYPES = {"BOOL": (8, "bool"), "F4": (4, "float4_e2m1fn_x2"), "F6_E2M3": (6, ""), "F6_E3M2": (6, ""), "U8": (8, "uint8"), "I8": (8, "int8"),
          "F8_E5M2": (8, "float8_e5m2"), "F8_E4M3": (8, "float8_e4m3fn"), "F8_E8M0": (8, "float8_e8m0fnu"),
          "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"), "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"), "I16": (16, "int16"), "U16": (16, "uint16"),
          "F16": (16, "float16"), "BF16": (16, "bfloat16"), "I32": (32, "int32"), "U32": (32, "uint32"), "F32": (32, "float32"),
          "C64": (64, "complex64"), "F64": (64, "float64"), "I64": (64, "int64"), "U64": (64, "uint64")}

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]  # name: (dtype, shape, data), in the order of the file


def data_of(seed: int, dtype: str, shape: tuple[int, ...]) -> bytes:
    count = 1
    for n in shape:
        count *= n
    raw = random.Random(seed).randbytes(count * DTYPES[dtype][0] // 8)
    return bytes(byte & 1 for byte in raw) if dtype == "BOOL" else raw


def of(**kinds: tuple[str, tuple[int, ...]]) -> Tensors:
    return {name: (dtype, shape, data_of(at, dtype, shape)) for at, (name, (dtype, shape)) in enumerate(kinds.items())}


def write(path: pathlib.Path, tensors: Tensors, metadata: dict[str, str] | None = None, pad: int = 0) -> pathlib.Path:
    """pad: what the header's length is modulo 8; all but 0 leave the data unaligned."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * ((pad - len(text)) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))
    return path


def write_shards(folder: pathlib.Path, shards: list[Tensors], metadata: dict[str, str] | None = None) -> pathlib.Path:
    """The path of the index file."""
    names = [f"model-{at + 1:05}-of-{len(shards):05}.safetensors" for at in range(len(shards))]
    for name, tensors in zip(names, shards):
        write(folder / name, tensors, metadata)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {one: name for name, tensors in zip(names, shards) for one in tensors}}))
    return index
