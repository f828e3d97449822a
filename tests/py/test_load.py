"""Checkpoint and Load of the extension module, without PyTorch: what is in files, and bytes that arrive where they should."""
import ctypes
import os
import threading

import pytest

import checkpoints
import sim
import sidestream
from sidestream import _native

ODD = checkpoints.of(scalar=("F32", ()), empty=("I64", (3, 0)), bytes=("U8", (5,)), half=("BF16", (4, 3)), wide=("F64", (2, 2, 2)))


@pytest.fixture
def file(tmp_path):
    return checkpoints.write(tmp_path / "a.safetensors", ODD, {"format": "pt", "who": "wir ä"}, pad=3)


def buffer_of(nbytes):
    buffer = (ctypes.c_ubyte * max(nbytes, 1))()
    return buffer, ctypes.addressof(buffer)


def test_what_is_in_a_file(file):
    ck = _native.Checkpoint(file)
    assert len(ck) == 5 and sorted(ck.names()) == sorted(ODD)
    assert ck.metadata(0) == {"format": "pt", "who": "wir ä"}
    raw = file.read_bytes()
    for number, name in enumerate(ck.names()):
        dtype, shape, data = ODD[name]
        said, said_dtype, _, said_shape, as_torch, strides, nbytes, where, offset = ck.info(number)
        assert (said, said_dtype, said_shape, as_torch, nbytes, where) == (name, dtype, shape, shape, len(data), 0)
        assert raw[offset:offset + nbytes] == data and ck.find(name) == number
        assert len(strides) == len(shape) and (not shape or strides[-1] == 1)
    [(path, size, first, count)] = ck.files()
    assert (os.fspath(path), size, first, count) == (os.fspath(file), len(raw), 0, 5)
    assert ck.find("none") == -1
    with pytest.raises(IndexError, match="tensor 5: the checkpoint has 5"):
        ck.info(5)


def test_shapes_of_less_than_a_byte(tmp_path):
    tensors = checkpoints.of(a=("F4", (3, 8)), b=("F4", (2, 3)), c=("F6_E2M3", (2, 4)), d=("F6_E3M2", (4, 2)))
    ck = _native.Checkpoint(checkpoints.write(tmp_path / "a.safetensors", tensors))
    shapes = {info[0]: (info[2], info[3], info[4], info[5]) for info in map(ck.info, range(4))}
    assert shapes == {"a": (1, (3, 8), (3, 4), (4, 1)), "b": (4, (2, 3), (3,), (1,)), "c": (2, (2, 4), (2, 3), (3, 1)),
                      "d": (4, (4, 2), (6,), (1,))}


def test_what_is_refused(tmp_path, file):
    for make, error, match in [
        (lambda: _native.Checkpoint(tmp_path / "none.safetensors"), sidestream.NotFound, "none.safetensors"),
        (lambda: _native.Checkpoint(checkpoints.write(tmp_path / "b.safetensors", {"x": ("F32", (2,), b"short")})), sidestream.InvalidArgument, "x"),
        (lambda: _native.Checkpoint(), TypeError, "path"),
        (lambda: _native.Checkpoint(7), TypeError, "7|path|int"),
    ]:
        with pytest.raises(error, match=match):
            make()
    d, ck = sim.device(), _native.Checkpoint(file)
    for more, error, match in [
        ({"parts": [(5, 0, 0, 0)]}, IndexError, "part 0: tensor 5"),
        ({"parts": [(0, 0)]}, TypeError, "part|argument"),
        ({"parts": (1,)}, TypeError, "parts must be a list"),
        ({"parts": []}, sidestream.InvalidArgument, "parts"),
        ({"parts": [(ck.find("wide"), 60, 8, 0)]}, sidestream.InvalidArgument, "wide|part"),
        ({"where": "moon"}, ValueError, "where is 'moon'"),
        ({"backend": "tape"}, ValueError, "backend is 'tape'"),
        ({"threads": 65}, sidestream.InvalidArgument, "threads"),
        ({"pinned_bytes": -1}, ValueError, "pinned_bytes"),
    ]:
        with pytest.raises(error, match=match):
            _native.Load(d, ck, **more)
    ck.close()
    ck.close()
    with pytest.raises(sidestream.WrongState, match="closed"):
        ck.names()
    with pytest.raises(sidestream.WrongState, match="closed"):
        _native.Load(d, ck)


def test_small_reads(file):
    ck = _native.Checkpoint(file)
    number = ck.find("half")
    buffer, address = buffer_of(8)
    ck.read(number, 4, 8, address)
    assert bytes(buffer) == ODD["half"][2][4:12]
    with pytest.raises(sidestream.InvalidArgument, match="has 24"):
        ck.read(number, 20, 8, address)
    os.utime(file, ns=(1, 1))
    with pytest.raises(sidestream.IOFailed, match="changed since"):
        ck.read(number, 0, 8, address)


@pytest.mark.parametrize("where", ["device", "host"])
def test_bytes_go_where_they_should(file, where):
    """Whole tensors, a part of one, and an arena, in one load."""
    d, ck = sim.device(), _native.Checkpoint(file)
    memory = d.alloc(4096) if where == "device" else (ctypes.c_ubyte * 4096)()
    base = memory.data if where == "device" else ctypes.addressof(memory)
    wide, half = ck.find("wide"), ck.find("half")
    load = _native.Load(d, ck, parts=[(wide, 0, 0, base), (half, 6, 12, base + 512), (ck.find("bytes"), 0, 0, 0)], keep=memory, where=where,
                        given=True)
    [(nbytes, number)] = load.arenas()
    assert number == 0 and nbytes >= 5
    load.give(0, base + 1024, memory)
    assert [load.spec(0), load.spec(1)] == [None, None] and load.spec(2)[:4] == ("bytes", 4, (5,), (1,))
    with pytest.raises(IndexError, match="part 3: the load has 3"):
        load.spec(3)
    first = load.spec(2)[4]
    assert load.columns() == (["bytes"], [(0, 4, first, ["bytes"], [5], [(5,)], [(1,)])])
    stats = load.join()
    assert load.ready(3) and stats["ready"] == 3 and stats["bytes"] == 64 + 12 + 5 and sum(route["pieces"] for route in stats["routes"]) > 0
    got = bytes(memoryview(memory).cast("B"))
    assert got[:64] == ODD["wide"][2] and got[512:524] == ODD["half"][2][6:18]
    at = 1024 + first
    assert got[at:at + 5] == ODD["bytes"][2]
    load.close()
    load.close()
    with pytest.raises(sidestream.WrongState, match="closed"):
        load.stats()


def test_columns_say_what_spec_does(tmp_path):
    """Of more shapes than are kept, types that take turns and gaps; an order that is not the file's begins groups anew."""
    kinds = ["U8", "BF16", "F64", "F4", "C64"]
    tensors = checkpoints.of(**{f"t{i}": (kinds[i % 5], (i % 7, 1 + i % 29, 2)) for i in range(300)})
    d, ck = sim.device(), _native.Checkpoint(checkpoints.write(tmp_path / "a.safetensors", tensors, pad=1))
    for order in range(300), range(299, -1, -1), range(0, 300, 3):
        load = _native.Load(d, ck, parts=[(i, 0, 0, 0) for i in order], given=True)
        specs = [load.spec(i) for i in range(len(order))]
        names, groups = load.columns()
        assert names == [spec[0] for spec in specs] and (order.step < 0 or len(groups) <= 3 * len(kinds))
        found = {}
        for arena, dtype, first, keys, elements, shapes, strides in groups:
            for key, count, shape, steps in zip(keys, elements, shapes, strides, strict=True):
                if key is None:
                    assert count > 0 and (shape, steps) == ((), ())
                else:
                    found[key] = (key, dtype, shape, steps, first if arena >= 0 else 0, arena)
                first += count
        assert [found[name] for name in names] == [(*spec[:4], spec[4] if spec[5] >= 0 else 0, spec[5]) for spec in specs]
        load.close()


def test_a_load_that_is_cancelled_says_so(file):
    d, ck = sim.device(), _native.Checkpoint(file)
    load = _native.Load(d, ck, given=True)  # never gets its memory
    waiting = threading.Thread(target=lambda: pytest.raises(sidestream.Cancelled, load.join))
    waiting.start()
    assert not load.ready(5)
    load.cancel()
    waiting.join()
    with pytest.raises(sidestream.Cancelled):
        load.wait(0)
    del load, ck  # and one that nobody joins
    _native.Load(d, _native.Checkpoint(file), given=True)


def test_a_file_that_changes_is_no_whole(file):
    d, ck = sim.device(), _native.Checkpoint(file)
    memory = d.alloc(4096)
    load = _native.Load(d, ck, given=True)
    os.utime(file, ns=(1, 1))
    load.give(0, memory.data, memory)
    with pytest.raises(sidestream.IOFailed, match="a.safetensors"):
        load.join()


def test_loads_that_run_at_exit(file):
    """Their threads end before the memory that they write to."""
    done = sim.run_python(f"""
import sidestream
from sidestream import _native
d = sidestream.Device("sim")
loads = [_native.Load(d, _native.Checkpoint({os.fspath(file)!r}), given=given) for given in (True, False)]
""")
    assert sim.said(done) == (0, "")


def test_a_forked_child_is_told(file):
    done = sim.run_python(f"""
import os, sidestream
from sidestream import _native
d, ck = sidestream.Device("sim"), _native.Checkpoint({os.fspath(file)!r})
load = _native.Load(d, ck, given=True)
pid = os.fork()
if pid == 0:
    try:
        load.join()
    except sidestream.Forked as error:
        os._exit(0 if "fork" in str(error) and len(ck.names()) == 5 else 1)
    os._exit(2)
load.cancel()
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
""")
    assert sim.said(done) == (0, "")
