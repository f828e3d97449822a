"""Pinned memory: budget, reuse, and when a block may be handed out again."""
import gc
import sys

import pytest
import sidestream
from sim import SEEDS, device, floats, zeros


def pool_of(d: sidestream.Device, **options: int) -> sidestream.PinnedPool:
    return sidestream.PinnedPool(d, **{"huge_pages": False, "budget_bytes": 8 << 20, "region_bytes": 1 << 20, "threads": 1} | options)


def test_block() -> None:
    d = device()
    pool = pool_of(d)
    p = pool.empty((4, 5), "float32")
    assert (p.kind, p.shape, p.dtype, p.device) == ("pinned", (4, 5), "float32", d) and p.data % 64 == 0 and pool.device is d
    assert pool.stats()["asked_bytes"] == 80 and pool.stats()["blocks"] == 1 and pool.stats()["registered"] is True
    del p
    assert pool.stats()["blocks"] == 0 and pool.stats()["granted_bytes"] == 0


def test_budget() -> None:
    pool = pool_of(device(), budget_bytes=2 << 20)
    kept = [pool.alloc(900 << 10) for _ in range(2)]
    with pytest.raises(sidestream.OverBudget, match=str(2 << 20)):
        pool.alloc(900 << 10)
    assert pool.stats()["budget_bytes"] == 2 << 20 >= pool.stats()["peak_pinned_bytes"]
    kept.pop()
    pool.alloc(900 << 10)
    with pytest.raises(ValueError, match="budget_bytes"):
        sidestream.PinnedPool(device(), budget_bytes=-1)
    with pytest.raises(TypeError, match="nbytes"):
        pool.alloc(())  # type: ignore[arg-type]


def test_copies_to_and_from() -> None:
    for seed in SEEDS:
        d = device(seed)
        s, pool, b = sidestream.Stream(d), pool_of(d), d.empty(100, "f32")
        source, out = pool.empty(100, "f32"), pool.empty(100, "f32")
        memoryview(source)[:] = floats(100)
        s.copy(b, source)
        s.copy(out, b)
        assert memoryview(out).tolist() == list(floats(100))  # looking waits for the copy


def test_an_export_before_the_copy_does_not_wait() -> None:
    """What the documentation says: an export waits for what was queued before it, not after."""
    d = device(1)
    s, b, out, source = sidestream.Stream(d), d.alloc(8), d.pool.alloc(8), d.pool.alloc(8)
    memoryview(source)[:] = b"12345678"
    early = memoryview(out)
    early[:] = b"-" * 8
    s.spin(1)
    s.copy(b, source)
    s.copy(out, b)
    before = d.now_ns()
    early.tobytes()
    assert d.now_ns() == before
    memoryview(out)
    assert d.now_ns() - before >= 1e9 and early.tobytes() == b"12345678"


def test_a_block_in_flight_is_not_handed_out() -> None:
    for seed in SEEDS:
        d = device(seed)
        s, pool, b, out = sidestream.Stream(d), pool_of(d), d.empty(100, "f32"), zeros(100)
        p = pool.empty(100, "f32")
        memoryview(p)[:] = floats(100)
        s.spin(1)
        s.copy(b, p)
        at = p.data
        del p  # nothing blocks
        assert pool.stats()["pending_bytes"] > 0
        other = pool.empty(100, "f32")
        assert other.data != at
        memoryview(other)[:] = floats(100, 7)
        s.copy(out, b)
        s.synchronize()
        assert out == floats(100)
        del other
        again = [pool.empty(100, "f32") for _ in range(3)]
        assert pool.stats()["pending_bytes"] == 0 and at in [a.data for a in again]


def test_used_on_names_streams() -> None:
    d = device()
    s, pool = sidestream.Stream(d), pool_of(d)
    p = pool.alloc(64)
    s.spin(1)
    p.used_on(s)
    del p
    assert pool.stats()["pending_bytes"] > 0
    s.synchronize()
    pool.alloc(64)
    assert pool.stats()["pending_bytes"] == 0


def test_exports_keep_the_block_and_blocks_the_pool() -> None:
    d = device()
    pool = pool_of(d)
    m = memoryview(pool.alloc(64))
    del pool, d
    gc.collect()
    m[:] = bytes(64)
    assert m.nbytes == 64


def test_trim() -> None:
    pool = pool_of(device())
    p = pool.alloc(64)
    assert pool.trim() == 0
    del p
    assert pool.trim() > 0 and pool.stats()["pinned_bytes"] == 0


def test_own_pool_is_one() -> None:
    d = device()
    p = d.pool.alloc(64)
    assert d.pool.stats()["blocks"] == 1 and p.nbytes == 64


def test_no_pinned_memory_at_all() -> None:
    with pytest.raises(sidestream.OutOfHostMemory) as told:
        pool_of(device(refuse_pinning=1)).alloc(64)
    assert isinstance(told.value, MemoryError)
    assert pool_of(device(refuse_register=1)).alloc(64).nbytes == 64


def test_flat() -> None:
    d = device()
    pool, s, b = pool_of(d), sidestream.Stream(d), d.alloc(4096)

    def once() -> None:
        p = pool.alloc(4096)
        s.copy(b, p)
        memoryview(p)[0] = 1

    for _ in range(10):
        once()
    s.synchronize()
    before = pool.stats()["pinned_bytes"], sys.getrefcount(sidestream.Buffer), sys.getrefcount(s), sys.getrefcount(pool)
    for _ in range(300):
        once()
        s.synchronize()
    assert (pool.stats()["pinned_bytes"], sys.getrefcount(sidestream.Buffer), sys.getrefcount(s), sys.getrefcount(pool)) == before
    assert pool.stats()["granted_bytes"] == 0
