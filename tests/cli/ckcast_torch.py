"""cast against PyTorch on the CPU: every 16-bit value of bf16 and f16, random bits of f32 and f64; the whole file as the reference lays it out.

python ckcast_torch.py make IN          a checkpoint
python ckcast_torch.py check IN OUT TO  what `sidestream cast IN OUT --to TO` made of it
"""
import json
import pathlib
import struct
import sys

import torch

NAMES = {torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fn: "F8_E4M3", torch.float16: "F16",
         torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}
TO = {"bf16": torch.bfloat16, "f16": torch.float16, "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2, "f32": torch.float32}


def tensors() -> dict[str, torch.Tensor]:
    bits = torch.arange(65536).to(torch.int16)
    rng = torch.Generator().manual_seed(1)
    words = torch.randint(-(2**63), 2**63 - 1, (400_001,), generator=rng)
    near = torch.randn(100_000, generator=rng, dtype=torch.float64) * torch.exp(torch.randn(100_000, generator=rng, dtype=torch.float64) * 8)
    bytes_ = torch.arange(256).to(torch.uint8)
    return {
        "h": bits.view(torch.float16), "b": bits.view(torch.bfloat16), "f": words.view(torch.float32),
        "d": torch.cat([near, words.view(torch.float64)[:1001]]),
        "g": near.float(), "e4": bytes_.view(torch.float8_e4m3fn), "e5": bytes_.view(torch.float8_e5m2), "i": words[:7],
        "one": torch.tensor(-0.0), "none": torch.zeros(0, 2),
    }


def save(path: str, ts: dict[str, torch.Tensor]) -> None:
    order = list(NAMES.values())
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name in sorted(ts, key=lambda n: (-order.index(NAMES[ts[n].dtype]), n)):
        t = ts[name]
        raw = t.reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""
        header[name] = {"dtype": NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


def load(path: str) -> tuple[bytes, dict[str, torch.Tensor]]:
    data = pathlib.Path(path).read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    header.pop("__metadata__")
    types = {name: dtype for dtype, name in NAMES.items()}
    found = {}
    for name, v in header.items():
        begin, stop = v["data_offsets"]
        raw = bytearray(data[end + begin : end + stop] or b"\0" * 8)
        found[name] = torch.frombuffer(raw, dtype=types[v["dtype"]])[: t_count(v["shape"])]
    return data[:end], found


def t_count(shape: list[int]) -> int:
    count = 1
    for dim in shape:
        count *= dim
    return count


def check(out: str, to: str) -> None:
    want = {name: t.to(TO[to]) if t.is_floating_point() else t for name, t in tensors().items()}
    save("torch.ref", want)
    expected, ours = load("torch.ref")[0], load(out)
    assert ours[0] == expected, f"headers: {ours[0]!r}, not {expected!r}"
    for name, t in want.items():
        a, b = ours[1][name], t.reshape(-1)
        same = (a.view(torch.uint8).reshape(len(b), -1) == b.view(torch.uint8).reshape(len(b), -1)).all(1) if len(b) else torch.tensor([True])
        if to[:2] != "f8":  # which NaN it is depends on PyTorch's vector code
            same |= a.isnan() & b.isnan() if t.is_floating_point() and len(b) else False
        at = (~same).nonzero().reshape(-1)
        assert len(at) == 0, f"{name} to {to}: {len(at)} differ, first {at[0]}: {a[at[0]].item()}, not {b[at[0]].item()}"


if __name__ == "__main__":
    if sys.argv[1] == "make":
        save(sys.argv[2], tensors())
    else:
        check(sys.argv[3], sys.argv[4])
