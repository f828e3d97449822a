"""Pinned buffers for results, copies into them, pinning in place."""
import ctypes
import gc
import mmap
import os
import threading
from typing import Any

import pytest

from sidestream import _native

np = pytest.importorskip("numpy")
test_loan = pytest.importorskip("test_loan")
to_numpy, feeder, submit = test_loan.to_numpy, test_loan.feeder, test_loan.submit

UINT, FLOAT = 1, 2


def device(keys: str = "") -> _native.Device:
    return _native.Device("sim:h200" + keys)


def test_round_trip() -> None:
    dev = device()
    f, stream = feeder(dev), _native.Stream(dev)
    submit(f, 9)
    loan, tensors = f.next(stream, test_loan.LEAVES, to_numpy)
    buffer = _native.HostBuffer(dev, 200)
    assert buffer.nbytes == 200 and buffer.data % 64 == 0
    event = _native.copy_d2h(dev, stream, -1, buffer, loan.data, 200)
    event.wait(10)
    assert event.query()
    array = to_numpy(buffer.capsule(UINT, 8, (10, 20)))
    assert array.ctypes.data == buffer.data and array.shape == (10, 20) and (array == 9).all()
    assert to_numpy(buffer.capsule(FLOAT, 32, (50,))).dtype == np.float32
    assert tensors is not None


def test_memory_goes_back_when_all_are_gone() -> None:
    dev = device()
    buffer = _native.HostBuffer(dev, 1000)
    at = buffer.data
    array = to_numpy(buffer.capsule(UINT, 8, (1000,)))
    capsule = buffer.capsule(UINT, 8, (4,))
    del buffer
    ctypes.memset(array.ctypes.data, 5, 1000)
    other = _native.HostBuffer(dev, 1000)
    assert other.data != at
    del array
    assert _native.HostBuffer(dev, 1000).data != at
    done = threading.Thread(target=lambda box: box.clear(), args=([capsule],))
    del capsule
    done.start()
    done.join()
    del done
    gc.collect()
    assert _native.HostBuffer(dev, 1000).data == at


def test_buffers_outlive_the_device_object() -> None:
    dev = device()
    array = to_numpy(_native.HostBuffer(dev, 64).capsule(UINT, 8, (64,)))
    del dev
    gc.collect()
    ctypes.memset(array.ctypes.data, 3, 64)
    assert (array == 3).all()


def test_a_buffer_that_dies_before_its_copy_is_done_is_not_reused_early() -> None:
    for seed in range(20):
        dev = device(f",seed={seed}")
        f, stream = feeder(dev), _native.Stream(dev)
        submit(f, 200)
        loan, _ = f.next(stream, None, None)
        dying = _native.HostBuffer(dev, 256)
        at = dying.data
        _native.copy_d2h(dev, stream, -1, dying, loan.data, 256)
        del dying
        fresh = _native.HostBuffer(dev, 256)
        array = to_numpy(fresh.capsule(UINT, 8, (256,)))
        ctypes.memset(fresh.data, 1, 256)
        stream.synchronize()
        assert (array == 1).all(), (seed, fresh.data == at)


def test_pools_do_not_grow() -> None:
    dev = device()
    stream = _native.Stream(dev)
    f = feeder(dev, slots=1)
    submit(f, 1)
    loan, _ = f.next(-1, None, None)
    seen = set()
    for _ in range(2000):
        buffer = _native.HostBuffer(dev, 5000)
        seen.add(buffer.data)
        _native.copy_d2h(dev, stream, -1, buffer, loan.data, 256).wait(10)
    assert len(seen) <= 4


def test_arguments_are_checked() -> None:
    dev, other = device(), device()
    stream, buffer = _native.Stream(dev), _native.HostBuffer(dev, 64)
    for code, bits, shape in ((UINT, 8, (65,)), (FLOAT, 64, (9,)), (UINT, 8, (-1,)), (UINT, 8, (2**62, 2**62)), (300, 8, (1,)), (UINT, 0, (1,))):
        with pytest.raises(ValueError):
            buffer.capsule(code, bits, shape)
    with pytest.raises(TypeError):
        buffer.capsule(UINT, 8, [4])
    for nbytes in (0, -1):
        with pytest.raises(ValueError, match="nbytes"):
            _native.HostBuffer(dev, nbytes)
    f = feeder(dev)
    submit(f, 1)
    loan, _ = f.next(-1, None, None)
    for nbytes in (0, 65):
        with pytest.raises(ValueError, match="nbytes"):
            _native.copy_d2h(dev, stream, -1, buffer, loan.data, nbytes)
    with pytest.raises(ValueError, match="another device"):
        _native.copy_d2h(other, stream, -1, buffer, loan.data, 64)
    with pytest.raises(ValueError, match="another device"):
        _native.copy_d2h(other, _native.Stream(other), -1, buffer, loan.data, 64)
    with pytest.raises(TypeError):
        _native.copy_d2h(dev, 0, -1, buffer, loan.data, 64)


def test_after_stream() -> None:
    """On the software device the handle 0 is a stream of its own, on which nothing is queued: the copy waits for it and is done."""
    dev = device()
    f, stream = feeder(dev), _native.Stream(dev)
    submit(f, 4)
    loan, _ = f.next(-1, None, None)
    buffer = _native.HostBuffer(dev, 64)
    _native.copy_d2h(dev, stream, 0, buffer, loan.data, 64).wait(10)
    assert (to_numpy(buffer.capsule(UINT, 8, (64,))) == 4).all()
    _native._test_capturing(True)
    try:
        with pytest.raises(_native.WrongState, match="capturing"):
            _native.copy_d2h(dev, stream, 0, buffer, loan.data, 64)
    finally:
        _native._test_capturing(False)


def test_over_budget() -> None:
    dev = device()
    with pytest.raises(_native.OverBudget):
        _native.HostBuffer(dev, 1 << 45)


def test_pins() -> None:
    dev = device()
    block: Any = np.frombuffer(mmap.mmap(-1, 1 << 16), np.uint8)  # pages of its own
    _native.pin(dev, block.ctypes.data, block.nbytes)
    _native.pin(dev, block.ctypes.data + 8, 100)
    _native.unpin(dev, block.ctypes.data)
    _native.unpin(dev, block.ctypes.data + 8)
    with pytest.raises(_native.Error):
        _native.unpin(dev, block.ctypes.data)
    with pytest.raises(ValueError, match="nbytes"):
        _native.pin(dev, block.ctypes.data, 0)


def test_forks_are_counted() -> None:
    before = _native.fork_count()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if _native.fork_count() == before + 1 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert _native.fork_count() == before + 1
