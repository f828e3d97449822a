"""Device memory: shapes, views, and when it goes."""
import gc
import logging
import sys

import pytest
import sidestream
from sim import device, floats, pinned, zeros


def test_alloc() -> None:
    d = device()
    b = d.alloc(100)
    assert (b.nbytes, b.shape, b.dtype, b.kind, b.device) == (100, (100,), "uint8", "device", d) and b.data % 256 == 0 and len(b) == 100
    with pytest.raises(TypeError, match="nbytes"):
        d.alloc((2, 3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shape"):
        d.alloc(-1)


@pytest.mark.parametrize(("dtype", "name", "bytes_each"), [
    ("float32", "float32", 4), ("f16", "float16", 2), ("bf16", "bfloat16", 2), ("bool", "bool", 1), ("int64", "int64", 8), (None, "uint8", 1),
    ("torch.float64", "float64", 8), (float, "float64", 8), (int, "int64", 8), (bool, "bool", 1), ("complex64", "complex64", 8)])
def test_dtypes(dtype: object, name: str, bytes_each: int) -> None:
    b = device().empty((2, 3), dtype)
    assert (b.dtype, b.shape, b.nbytes) == (name, (2, 3), 6 * bytes_each) and name in repr(b)


def test_dtype_that_is_none() -> None:
    for wrong in ("float7", object(), 3):
        with pytest.raises(ValueError, match="float32"):
            device().empty(3, wrong)


def test_shapes() -> None:
    d = device()
    assert d.empty((), "f32").nbytes == 4 and d.empty((0, 5)).nbytes == 0 and d.empty(7).shape == (7,) and d.empty([2, 2]).shape == (2, 2)
    with pytest.raises(TypeError):
        len(d.empty(()))
    for wrong in ((1 << 40, 1 << 40), (-1,), (1,) * 17):
        with pytest.raises(ValueError, match="shape"):
            d.empty(wrong)
    with pytest.raises(TypeError):
        d.empty("12")
    with pytest.raises(TypeError):
        d.empty((1.5,))  # type: ignore[arg-type]


def test_views_share() -> None:
    d = device()
    b = d.empty((4, 8), "float32")
    v = b.view("int16", (2, 2), offset=8)
    assert (v.data, v.nbytes, v.shape, v.dtype) == (b.data + 8, 8, (2, 2), "int16")
    assert b.view(offset=64).shape == (16,) and b.view("u8").shape == (128,) and v.view(offset=4).data == b.data + 12
    memoryview(b).cast("B")[8:16] = bytes(range(8))
    assert memoryview(v).tobytes() == bytes(range(8))
    for wrong in ({"offset": -1}, {"offset": 129}, {"offset": 2}, {"shape": 33}, {"shape": (4, 8), "offset": 4},
                  {"dtype": "complex128", "offset": 8}):
        with pytest.raises(ValueError, match="offset|shape"):
            b.view(**wrong)


def test_buffer_protocol() -> None:
    d = device()
    b = d.empty((2, 3), "float32")
    with memoryview(b) as m:
        assert (m.format, m.shape, m.strides, m.itemsize, m.readonly, m.c_contiguous) == ("f", (2, 3), (12, 4), 4, False, True)
    with pytest.raises(BufferError, match="uint16"):
        memoryview(d.empty(3, "bfloat16"))
    assert memoryview(d.empty(3, "bfloat16").view("uint16")).format == "H"


def test_out_of_memory() -> None:
    d = device(memory="1M")
    kept = d.alloc(1 << 19)
    with pytest.raises(sidestream.OutOfDeviceMemory, match="free"):
        d.alloc(1 << 20)
    assert d.memory()[0] <= 1 << 19
    del kept
    d.alloc(1 << 20)


def test_views_and_exports_keep_memory() -> None:
    d = device()
    free = d.memory()[0]
    b = d.alloc(1 << 20)
    m, v = memoryview(b), b.view(offset=8)
    del b
    m[0] = 1
    del m
    assert d.memory()[0] < free
    memoryview(v)[0] = 3
    del v
    assert d.memory()[0] == free


def test_memory_goes_after_the_work_on_it(caplog: pytest.LogCaptureFixture) -> None:
    """check=1 tells of frees under queued work."""
    d = device()
    s, source, out = sidestream.Stream(d), pinned(d, floats(1000)), pinned(d, zeros(1000))
    b = d.empty(1000, "f32")
    s.spin(1)
    s.copy(b, source)
    s.copy(out, b)
    del b
    gc.collect()
    s.synchronize()
    d.memory()
    assert memoryview(out).tolist() == list(floats(1000))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_memory_of_a_stuck_device_is_kept() -> None:
    d = device(hang=1, seed=3)
    s = sidestream.Stream(d)
    s.spin(1)
    b = d.alloc(1 << 20)
    free = d.memory()[0]
    s.copy(b, bytearray(1 << 20))
    del b  # waits for virtual seconds, and keeps the memory
    assert d.memory()[0] == free


def test_used_on_another_stream() -> None:
    d = device()
    s = sidestream.Stream(d)
    b = d.alloc(8)
    s.spin(5)
    b.used_on(s)
    before = d.now_ns()
    del b  # is freed after what is queued there
    assert d.now_ns() - before >= 5e9
    with pytest.raises(TypeError, match="Stream"):
        d.alloc(8).used_on(3)  # type: ignore[arg-type]


def test_flat_over_many() -> None:
    d = device()
    s = sidestream.Stream(d)
    free, count = d.memory()[0], sys.getrefcount(sidestream.Buffer)
    for _ in range(200):
        b = d.empty((16, 16), "f32")
        s.copy(b.view(offset=0), bytes(1024))
        memoryview(b).release()
        b.__dlpack__()
    del b
    assert (d.memory()[0], sys.getrefcount(sidestream.Buffer)) == (free, count)
