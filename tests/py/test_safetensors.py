"""The C reader and writer of safetensors files beside the reference implementation: what it takes, and what it reads; to the byte what it writes.

Where ours differs it is on purpose, and `ON_PURPOSE` says so. Both get the fuzzer's kept corpus, and what random changes make of it."""
from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import pathlib
import random
import struct
from collections.abc import Iterator

import pytest

reference = pytest.importorskip("safetensors", reason="the package safetensors is not installed")
if not hasattr(reference, "TensorSpec"):
    pytest.skip("safetensors is older than 0.8", allow_module_level=True)

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CORPUS = ROOT / "tests/fuzz/corpus/safetensors"
LENIENT, STRICT_SPEC = 1, 2
DTYPES = ["BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16", "U16", "F16",
          "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64"]
# What the reference takes and we do not, even leniently, by our words for it.
ON_PURPOSE = ["more than 64 dimensions", "more than 64 levels within each other", "\\u0000 in a text", "a number of over 255 characters"]
# What the reference takes and we take leniently alone.
LENIENT_ALONE = ["stands twice", "unknown field", "not an object with dtype", "dtype is not a text", "__metadata__ is not an object"]


class Tensor(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("name_bytes", ctypes.c_size_t), ("type", ctypes.c_int), ("rank", ctypes.c_uint32),
                ("dims", ctypes.POINTER(ctypes.c_uint64)), ("elements", ctypes.c_uint64), ("bytes", ctypes.c_uint64),
                ("file", ctypes.c_size_t), ("offset", ctypes.c_uint64)]


class OpenOptions(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("format", ctypes.c_int), ("flags", ctypes.c_uint32)]


class WriterOptions(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("metadata", ctypes.POINTER(ctypes.c_char_p)), ("metadata_count", ctypes.c_size_t),
                ("flags", ctypes.c_uint32)]


class Error(ctypes.Structure):
    _fields_ = [("status", ctypes.c_int), ("os_errno", ctypes.c_int), ("device_code", ctypes.c_int), ("where", ctypes.c_char_p),
                ("message", ctypes.c_char * 320)]


@pytest.fixture(scope="module")
def lib() -> ctypes.CDLL:
    """The shared library that was built with the package."""
    import sidestream

    built = pathlib.Path(sidestream.__file__).parent.parent.parent / "src/libsidestream.so"
    if not built.exists():
        pytest.skip(f"{built} is not there: the package was not built by tools/build")
    loaded = ctypes.CDLL(str(built))
    loaded.side_last_error.restype = ctypes.POINTER(Error)
    loaded.side_checkpoint_count.restype = loaded.side_checkpoint_metadata_count.restype = ctypes.c_size_t
    return loaded


def why(lib: ctypes.CDLL) -> str:
    return lib.side_last_error().contents.message.decode()


Read = tuple[dict[str, tuple[str, list[int], bytes]], dict[str, str]]


def read_ours(lib: ctypes.CDLL, path: pathlib.Path, flags: int) -> Read | str:
    """Tensors and metadata, or why not."""
    ck, t, key, value = ctypes.c_void_p(), Tensor(), ctypes.c_char_p(), ctypes.c_char_p()
    options = OpenOptions(ctypes.sizeof(OpenOptions), 1, flags)
    if lib.side_checkpoint_open(os.fsencode(path), ctypes.byref(options), ctypes.byref(ck)) != 0:
        return why(lib)
    data = path.read_bytes()
    tensors: dict[str, tuple[str, list[int], bytes]] = {}
    for i in range(lib.side_checkpoint_count(ck)):
        assert lib.side_checkpoint_tensor(ck, ctypes.c_size_t(i), ctypes.byref(t)) == 0
        tensors[t.name.decode()] = DTYPES[t.type], t.dims[:t.rank] if t.rank else [], data[t.offset:t.offset + t.bytes]
    metadata = {}
    for i in range(lib.side_checkpoint_metadata_count(ck, ctypes.c_size_t(0))):
        assert lib.side_checkpoint_metadata(ck, ctypes.c_size_t(0), ctypes.c_size_t(i), ctypes.byref(key), ctypes.byref(value)) == 0
        metadata[(key.value or b"").decode()] = (value.value or b"").decode()
    lib.side_checkpoint_close(ck)
    return tensors, metadata


def read_reference(path: pathlib.Path) -> Read | str:
    data = path.read_bytes()
    try:
        tensors = {name: (t["dtype"], list(t["shape"]), bytes(t["data"])) for name, t in reference.deserialize(data)}
        with reference.safe_open(path, framework="np") as opened:
            return tensors, opened.metadata() or {}
    except (reference.SafetensorError, OverflowError) as error:
        return f"{type(error).__name__}: {error}"


def bits(dtype: str) -> int:
    return {"BOOL": 8, "BF16": 16, "C64": 64}.get(dtype) or int(dtype[1:].split("_")[0].rstrip("EMFNUZ"))


def escaped(rng: random.Random, name: str) -> str:
    return '"' + "".join(rng.choice([f"\\u{ord(c):04x}", c, c]) for c in name) + '"'


def entry(rng: random.Random, at: int, tensors: int) -> tuple[str, int]:
    """A tensor at `at`, nearly always right, and where it ends."""
    odd = rng.randrange(4 * tensors + 24)
    dtype = rng.choice(DTYPES)
    shape = [rng.randrange(3), 4]
    end = at + shape[0] * 4 * bits(dtype) // 8
    fields = [f'{escaped(rng, "dtype")}:{escaped(rng, dtype)}', f'"shape":{shape}', f'"data_offsets":[{at + (odd == 1)},{end + (odd == 2)}]']
    rng.shuffle(fields)
    if odd == 3:
        fields.append(rng.choice(fields[:1] + ['"more":{"a":[1,{}]}', '"more":1,"more":2']))
    text = f'[{escaped(rng, dtype)}, {shape}, [{at},{end}]]' if odd == 4 else "{" + ", ".join(fields) + "}"
    if odd == 5:
        text = text.replace(f'{escaped(rng, dtype)}', '{"%s":null}' % dtype)
    # Few names, so that some stand twice; those of tensors without bytes then leave no hole.
    name = rng.choice(["a", "b"]) if odd == 6 or shape[0] == 0 and rng.random() < 0.2 else f"t{at}{rng.choice('abcdefgh')}"
    return f"{rng.choice(['', ' '])}{escaped(rng, name)}:{text}", end


def generated(rng: random.Random) -> bytes:
    count, at, parts = rng.randrange(5), 0, []
    for _ in range(count):
        part, at = entry(rng, at, count)
        parts.append(part)
    if rng.random() < 0.5:
        parts.append('"__metadata__":' + rng.choice(["{}", '{"a":"b"}', '{"a":"1","\\u0061":"2"}', '{"a":"\\ud83d\\ude00"}', "null", '{"a":null}']))
    rng.shuffle(parts)
    text = (rng.choice(["", "", " \n"]) + "{" + ",".join(parts) + "}" + rng.choice(["", "   ", "\r\n"])).encode()
    return struct.pack("<Q", len(text)) + text + rng.randbytes(at + rng.choice([0] * 20 + [1]))


def inputs() -> Iterator[bytes]:
    kept = [path.read_bytes() for path in sorted(CORPUS.iterdir())]
    assert len(kept) > 50
    for one in kept:
        yield struct.pack("<Q", len(one) - 1) + one[1:] + bytes(range(one[0]))
    rng = random.Random(5)
    for _ in range(500):
        yield generated(rng)
    for _ in range(500):
        at, other = bytearray(rng.choice(kept)), rng.choice(kept)
        cut, place = rng.randrange(len(other) + 1), rng.randrange(len(at) + 1)
        at[place:place + rng.randrange(3)] = rng.choice([bytes([rng.choice(b'0123456789,:{}[]"\\ anu')]), other[cut:cut + rng.randrange(12)]])
        if at:
            yield struct.pack("<Q", len(at) - 1) + bytes(at[1:]) + bytes(range(at[0]))


def test_reads_what_the_reference_reads(lib: ctypes.CDLL, tmp_path: pathlib.Path) -> None:
    path, counts = tmp_path / "m.safetensors", {"both": 0, "lenient": 0, "neither": 0, "reference": 0}
    for data in inputs():
        path.write_bytes(data)
        theirs, plain, lenient = read_reference(path), read_ours(lib, path, 0), read_ours(lib, path, LENIENT)
        if isinstance(theirs, str):
            assert isinstance(plain, str) and isinstance(lenient, str), (data, theirs, plain, lenient)
            counts["neither"] += 1
        elif isinstance(lenient, str):
            assert any(word in lenient for word in ON_PURPOSE), (data, lenient)
            counts["reference"] += 1
        else:
            assert lenient == theirs, data
            if isinstance(plain, str):
                assert any(word in plain for word in LENIENT_ALONE), (data, plain)
                counts["lenient"] += 1
            else:
                assert plain == theirs, data
                counts["both"] += 1
    assert counts["both"] > 200 and counts["lenient"] > 40 and counts["neither"] > 300, counts


def write_ours(lib: ctypes.CDLL, path: pathlib.Path, tensors: dict[str, tuple[str, list[int], bytes]], metadata: dict[str, str] | None) -> None:
    made = (Tensor * len(tensors))()
    for t, (name, (dtype, shape, _)) in zip(made, tensors.items()):
        t.name, t.name_bytes, t.type, t.rank = name.encode(), len(name.encode()), DTYPES.index(dtype), len(shape)
        t.dims = (ctypes.c_uint64 * len(shape))(*shape)
    options = WriterOptions(ctypes.sizeof(WriterOptions))
    if metadata is not None:
        flat = [text.encode() for pair in metadata.items() for text in pair]
        options.metadata, options.metadata_count = (ctypes.c_char_p * (len(flat) + 1))(*flat), len(metadata)
    writer = ctypes.c_void_p()
    assert lib.side_writer_create(os.fsencode(path), made, ctypes.c_size_t(len(tensors)), ctypes.byref(options), ctypes.byref(writer)) == 0, why(lib)
    for i, (_, _, data) in enumerate(tensors.values()):
        assert lib.side_writer_write(writer, ctypes.c_size_t(i), ctypes.c_uint64(0), data, ctypes.c_size_t(len(data))) == 0, why(lib)
    assert lib.side_writer_finish(writer) == 0, why(lib)
    lib.side_writer_destroy(writer)


def some_tensors(rng: random.Random, dtypes: list[str]) -> dict[str, tuple[str, list[int], bytes]]:
    letters = 'ab."\\/\x01\x08\t\n\x0c\r\x1f\x7f\u00e4\u2028\U0001f600'
    names = {"".join(rng.choices(letters, k=rng.randrange(5))) for _ in range(rng.randrange(30))}
    tensors = {}
    for name in sorted(names, key=lambda _: rng.random()):
        dtype = rng.choice(dtypes)
        shape = [rng.randrange(4) for _ in range(rng.randrange(4))] if bits(dtype) % 8 == 0 else [rng.randrange(3), 4]
        count = 1
        for dim in shape:
            count *= dim
        tensors[name] = dtype, shape, rng.randbytes(count * bits(dtype) // 8)
    return tensors


TORCH_NAMES = {"BOOL": "bool", "F4": "float4_e2m1fn_x2", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu",
               "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "BF16": "bfloat16", "C64": "complex64"}


def torch_name(dtype: str) -> str:
    return TORCH_NAMES.get(dtype) or {"I": "int", "U": "uint", "F": "float"}[dtype[0]] + dtype[1:]


def test_writes_what_the_reference_writes(lib: ctypes.CDLL, tmp_path: pathlib.Path) -> None:
    rng = random.Random(6)
    for i in range(100):
        tensors = some_tensors(rng, [dtype for dtype in DTYPES if not dtype.startswith("F6")])
        metadata = rng.choice([None, {}, {"f\u00e4\n\x02": 'pt"\\'}])
        kept, specs = [], {}
        for name, (dtype, shape, data) in tensors.items():
            kept.append(ctypes.create_string_buffer(data, max(len(data), 1)))
            # F4's shape is that of storage, two elements a byte.
            stored = [*shape[:-1], shape[-1] // 2] if dtype == "F4" else shape
            specs[name] = reference.TensorSpec(dtype=torch_name(dtype), shape=stored, data_ptr=ctypes.addressof(kept[-1]), data_len=len(data))
        theirs = reference.serialize(specs, metadata=metadata)
        write_ours(lib, tmp_path / "m.safetensors", tensors, metadata)
        assert (tmp_path / "m.safetensors").read_bytes() == theirs, (i, tensors, metadata)


def test_reference_reads_what_we_write(lib: ctypes.CDLL, tmp_path: pathlib.Path) -> None:
    rng, path = random.Random(7), tmp_path / "m.safetensors"
    for _ in range(50):
        tensors, metadata = some_tensors(rng, DTYPES), {"a": "1", "b\n": "\u00e4", "": ""}
        write_ours(lib, path, tensors, metadata)
        assert read_reference(path) == (tensors, metadata) == read_ours(lib, path, STRICT_SPEC)


def test_a_real_model(lib: ctypes.CDLL) -> None:
    """One that a package on PyPI ships."""
    found = importlib.util.find_spec("silero_vad")
    if found is None or found.origin is None:
        pytest.skip("silero-vad, which ships a model, is not installed")
    models = sorted(pathlib.Path(found.origin).parent.rglob("*.safetensors"))
    if not models:
        pytest.skip("this silero-vad ships no safetensors file")
    for path in models:
        ours = read_ours(lib, path, 0)
        assert ours == read_reference(path) and not isinstance(ours, str)
        header = path.read_bytes()[8:8 + int.from_bytes(path.read_bytes()[:8], "little")]
        assert sorted(ours[0]) == sorted(name for name in json.loads(header) if name != "__metadata__") and len(ours[0]) > 5
