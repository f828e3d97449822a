"""DLPack and NumPy: the same memory on both sides, alive while either has it. Arrays of PyTorch where it is installed."""
import gc
import threading
import weakref

import pytest
import sidestream
from sim import SEEDS, device, floats

np = pytest.importorskip("numpy", reason="no NumPy")


def test_pinned_is_an_array() -> None:
    d = device()
    p = d.pool.empty((3, 4), "float32")
    for array in (np.from_dlpack(p), np.asarray(p), np.array(p, copy=False)):
        assert (array.shape, array.dtype, array.strides, array.ctypes.data) == ((3, 4), np.float32, (16, 4), p.data) and array.flags.writeable
        array[1, 2] += 1
    assert p.__dlpack_device__() == (1, 0)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64",
                                   "complex64", "complex128"])
def test_dtypes(dtype: str) -> None:
    d = device()
    b, s = d.empty((2, 5), np.dtype(dtype)), sidestream.Stream(d)
    source, out = (np.arange(10).reshape(2, 5) * 3 % 7).astype(dtype), np.zeros((2, 5), dtype)
    assert b.dtype == dtype and d.empty(1, getattr(np, dtype.replace("bool", "bool_"))).dtype == dtype
    s.copy(b, source)
    s.copy(out, b)
    s.synchronize()
    assert (out == source).all() and (np.from_dlpack(b) == source).all() and np.asarray(b).dtype == source.dtype


def test_shapes() -> None:
    d = device()
    for shape in ((), (0,), (0, 3), (1,), (2, 3, 4), (1,) * 16):
        assert np.from_dlpack(d.empty(shape, "int16")).shape == np.asarray(d.empty(shape, "int16")).shape == shape


def test_export_waits_for_the_copy() -> None:
    for seed in SEEDS:
        d = device(seed)
        s, b = sidestream.Stream(d), d.empty(100, "float32")
        source, out = d.pool.empty(100, "float32"), d.pool.empty(100, "float32")
        np.asarray(source)[:] = np.arange(100)
        s.spin(0.1)
        s.copy(b, source)
        s.affine(b, b, 2)
        s.copy(out, b)
        assert (np.from_dlpack(out) == 2 * np.arange(100)).all()


def test_array_keeps_the_memory() -> None:
    d = device()
    free = d.memory()[0]
    kept = [np.from_dlpack(d.empty(1 << 18, "float32")), np.asarray(d.empty(1 << 18, "float32"))]
    gone = weakref.ref(d)
    assert d.memory()[0] < free
    pool = d.pool
    kept.append(np.from_dlpack(pool.empty(10)))
    assert pool.stats()["blocks"] == 1
    kept[2][:] = 1
    for array in kept:
        array[0] = 1
    del kept, array
    assert pool.stats()["blocks"] == 0 and d.memory()[0] == free
    late = np.from_dlpack(d.empty(10, "float32"))
    del d, pool
    gc.collect()
    assert gone() is None
    late[:] = 3  # the last of the device
    assert late.sum() == 30


def test_capsules() -> None:
    d = device()
    free = d.memory()[0]
    b = d.alloc(1 << 20)
    assert '"dltensor"' in repr(b.__dlpack__()) and '"dltensor_versioned"' in repr(b.__dlpack__(max_version=(1, 0)))
    assert '"dltensor"' in repr(b.__dlpack__(max_version=(0, 8), dl_device=(1, 0), copy=False))
    capsule = b.__dlpack__()
    del b
    assert d.memory()[0] < free
    del capsule  # that nobody took
    assert d.memory()[0] == free
    b = d.alloc(8)
    with pytest.raises(BufferError, match="copy"):
        b.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="dl_device"):
        b.__dlpack__(dl_device=(2, 0))
    with pytest.raises(ValueError, match="stream"):
        b.__dlpack__(stream=1)
    for wrong in ({"max_version": 3}, {"dl_device": "cpu"}, {"stream": "x"}):
        with pytest.raises(TypeError):
            b.__dlpack__(**wrong)


def test_copies_take_arrays() -> None:
    d = device()
    s, b = sidestream.Stream(d), d.empty((4, 6), "float64")
    source = np.random.default_rng(0).random((4, 6))
    out = np.zeros((4, 6))
    s.copy(b, source)
    s.copy(out, b)
    s.synchronize()
    assert (out == source).all()
    with pytest.raises(ValueError, match="contiguous"):
        s.copy(b, source.T)
    source.flags.writeable = False
    s.copy(b, source)
    with pytest.raises(ValueError, match="writable"):
        s.copy(source, b)


def test_slots_and_items() -> None:
    d = device()
    with sidestream.Slots(d, count=1, slot_bytes=40, where="pinned").acquire() as slot:
        np.from_dlpack(slot.view("float32"))[:] = np.arange(10)
        assert np.from_dlpack(slot).shape == (40,)

    def compute(stream: sidestream.Stream, item: sidestream.Item) -> None:
        stream.synchronize()
        np.asarray(item.result.view("float32"))[:] = np.asarray(item.data.view("float32")) + 1

    outs = [np.zeros(10, "f4") for _ in range(5)]
    sidestream.Pipeline(d, [np.full(10, i, "f4") for i in range(5)], compute, outs).run()
    assert [out[3] for out in outs] == [1, 2, 3, 4, 5]


def test_arrays_in_threads() -> None:
    """Arrays die in other threads than those that made them."""
    d = device()
    free = d.memory()[0]
    made: list[object] = []

    def make() -> None:
        for _ in range(200):
            made.append(np.from_dlpack(d.empty(16, "float32")))

    def drop() -> None:
        for _ in range(200):
            while not made:
                pass
            made.pop()

    threads = [threading.Thread(target=fn) for fn in (make, drop, make, drop)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [] and d.memory()[0] == free


def test_source_that_keeps_an_array() -> None:
    kept = []

    def source(number: int, view: memoryview) -> int | None:
        kept.append(np.frombuffer(view, "u1"))
        return 8

    with pytest.raises(BufferError, match="kept"):
        sidestream.Pipeline(device(), source, lambda s, i: None, item_bytes=4096).run()
    gc.collect()
    assert len(kept[0].tobytes()) == 4096  # still memory


def test_source_that_raises_with_an_array() -> None:
    def source(number: int, view: memoryview) -> int | None:
        array = np.frombuffer(view, "u1")
        raise ValueError(array.size)

    d = device()
    blocks = d.pool.stats()["blocks"]
    try:
        sidestream.Pipeline(d, source, lambda s, i: None, item_bytes=4096).run()
    except ValueError as error:
        assert error.__traceback__ is not None
        last = error.__traceback__
        while last.tb_next is not None:
            last = last.tb_next
        gc.collect()
        assert len(last.tb_frame.f_locals["array"].tobytes()) == 4096
        del last
    gc.collect()
    assert d.pool.stats()["blocks"] == blocks


# ---------------------------------------------------------------- PyTorch

def test_torch() -> None:
    torch = pytest.importorskip("torch", reason="no PyTorch")
    d = device()
    s, free = sidestream.Stream(d), d.memory()[0]
    b = d.empty((10, 10), torch.float32)
    source, out = torch.arange(100.0).reshape(10, 10), torch.zeros(10, 10)
    s.copy(b, source)
    s.copy(out, b)
    s.synchronize()
    assert torch.equal(out, source)
    p = d.pool.empty(100, torch.bfloat16)
    t = torch.from_dlpack(p)
    assert t.dtype == torch.bfloat16 and t.data_ptr() == p.data
    t[:] = 3
    view = torch.from_dlpack(b)[2:4]
    assert torch.equal(view, source[2:4])
    s.copy(view, torch.ones(2, 10))
    s.copy(out, b)
    s.synchronize()
    assert out[3].eq(1).all() and out[4].eq(source[4]).all()
    with pytest.raises(ValueError, match="contiguous"):
        s.copy(b, source.T)
    del view, b
    gc.collect()
    assert d.memory()[0] == free
    outs = [torch.zeros(8) for _ in range(3)]
    sidestream.Pipeline(d, [torch.full((8,), float(i)) for i in range(3)], lambda s, i: s.affine(i.result, i.data.view("f32"), 2), outs).run()
    assert [float(o[0]) for o in outs] == [0, 2, 4]


def test_autograd_thread_frees() -> None:
    """A tensor that only the graph holds dies in the engine's thread, with no GIL to be had."""
    torch = pytest.importorskip("torch", reason="no PyTorch")
    d = device()
    free = d.memory()[0]
    for _ in range(20):
        b = d.empty(1000, "float32")
        memoryview(b)[:] = floats(1000)
        x = torch.from_dlpack(b)
        w = torch.ones(1000, requires_grad=True)
        loss = (w * x).exp().mul(x).sum()
        del b, x
        loss.backward()
        del loss
    gc.collect()
    assert d.memory()[0] == free
