"""load_file, stream, safe_open and load_model: every byte where it belongs, as safetensors has it where that is installed."""
import copy
import errno
import gc
import os
import pathlib
import pickle
import random
import re
import sys
import threading
import weakref

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import checkpoints  # noqa: E402
import sidestream  # noqa: E402
import sidestream.torch as st  # noqa: E402
from sidestream.torch import load  # noqa: E402
from torch_help import run_torch  # noqa: E402

GPU = ["cuda"] if torch.cuda.is_available() else []
DEVICES = ["cpu", "sim", *GPU]
ALL = checkpoints.of(**{f"all.{name}": (name, (4, 8)) for name in checkpoints.DTYPES}, scalar=("F32", ()), none=("I64", (3, 0, 2)),
                     row=("BF16", (1, 5)), odd=("F4", (2, 3)), big=("F32", (700, 500)))


@pytest.fixture
def file(tmp_path):
    """Everything, not aligned."""
    return checkpoints.write(tmp_path / "a.safetensors", ALL, {"format": "pt"}, pad=5)


def shards():
    return [checkpoints.of(a=("F32", (6, 4)), b=("I8", (3,))), checkpoints.of(c=("BF16", (8, 2)), d=("U8", ())), checkpoints.of(e=("I64", (5,)))]


def raw(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy().tobytes() if tensor.numel() else b""


def check(tensors, expected, order=False):
    assert (list if order else set)(tensors) == (list if order else set)(expected)
    for name, tensor in tensors.items():
        dtype, shape, data = expected[name]
        bits, known = checkpoints.DTYPES[dtype]
        assert raw(tensor) == data and tensor.is_contiguous() and not tensor.requires_grad, name
        if bits >= 8:
            assert (tensor.dtype, tuple(tensor.shape)) == (getattr(torch, known), shape), name
        elif shape[-1] * bits % 8 == 0:
            assert tensor.dtype == getattr(torch, known or "uint8", torch.uint8) and tuple(tensor.shape) == (*shape[:-1], shape[-1] * bits // 8), name
        else:
            assert (tensor.dtype, tuple(tensor.shape)) == (torch.uint8, (len(data),)), name


# ---------------------------------------------------------------- load_file

@pytest.mark.parametrize("device", DEVICES)
def test_load_file(file, device):
    tensors = st.load_file(file, device=device)
    check(tensors, ALL)
    assert {t.device.type for t in tensors.values()} == {"cpu" if device == "sim" else device}
    stats = st.last_load()
    assert stats["bytes"] == sum(len(data) for _, _, data in ALL.values()) and stats["ready"] == len(ALL)
    assert stats["moved_bytes"] > 0 and stats["routes"]  # pad=5: most of it could not stay where it was in the file
    assert all(t.data_ptr() % t.element_size() == 0 for t in tensors.values())


def test_one_block_a_file_and_no_views(file):
    """Written to by itself, a tensor does not count as changed because its neighbour was."""
    tensors = st.load_file(file)
    assert len({t.untyped_storage().data_ptr() for t in tensors.values() if t.numel()}) == 1
    a, b = torch.nn.Parameter(tensors["big"]), torch.nn.Parameter(tensors["row"])
    assert not tensors["big"]._is_view()
    before = b._version
    with torch.no_grad():
        a.add_(1)
    assert b._version == before and a._version > 0
    assert raw(tensors["row"]) == ALL["row"][2]


@pytest.mark.parametrize("device", DEVICES)
def test_sharded(tmp_path, device):
    index = checkpoints.write_shards(tmp_path, shards(), {"format": "pt"})
    together = {name: one for part in shards() for name, one in part.items()}
    for path in index, tmp_path, os.fspath(index):
        check(st.load_file(path, device=device), together)
    with st.safe_open(tmp_path, framework="pt", device=device) as opened:
        assert opened.keys() == sorted(together) and opened.metadata() == {"format": "pt"} and "c" in opened and "x" not in opened
        check({name: opened.get_tensor(name) for name in opened.keys()}, together)
        check(opened.get_tensors(), together)
    check(dict(st.stream(index, device, order=["e", "a"])), {"e": together["e"], "a": together["a"]}, order=True)


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_are_as_if_made_one_by_one(tmp_path, device):
    """Of mixed types with gaps between them: names in the files' order, versions and gradients of their own; saved, the block is written once."""
    kinds = [("F32", (3,)), ("U8", (5,)), ("BF16", ()), ("I64", (2, 0)), ("F8_E4M3", (3, 3)), ("BF16", (2, 1, 3)), ("F64", (1,)), ("U8", ())]
    mixed = checkpoints.of(**{f"t{i}": kinds[i * 5 % 8] for i in range(80)})
    path = checkpoints.write(tmp_path / "a.safetensors", mixed, pad=3)
    tensors = st.load_file(path, device)
    with st.safe_open(path, "pt", device) as opened:
        assert list(tensors) == opened.offset_keys()
    check(tensors, mixed)
    for tensor in tensors.values():
        before = [other._version for other in tensors.values() if other is not tensor]
        tensor.zero_()
        assert [other._version for other in tensors.values() if other is not tensor] == before
        assert tensor.is_leaf and not tensor._is_view() and tensor.grad_fn is None and tensor._base is None
    weight = tensors["t0"].requires_grad_()
    (weight * 2).sum().backward()
    assert torch.equal(weight.grad, torch.full_like(weight, 2)) and not any(t.requires_grad for name, t in tensors.items() if name != "t0")
    tensors = st.load_file(path, device)
    halves = {name: tensor for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16}  # it refuses types that share a block
    torch.save(halves, tmp_path / "a.pt")
    check(torch.load(tmp_path / "a.pt"), {name: mixed[name] for name in halves}, order=True)
    assert os.path.getsize(tmp_path / "a.pt") < len(halves) * 500 + tensors["t0"].untyped_storage().nbytes()


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_looked_for_as_before(file, monkeypatch, enabled):
    def fails(*_):
        assert not gc.isenabled()
        raise MemoryError

    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        st.load_file(file)
        assert gc.isenabled() == enabled
        monkeypatch.setattr(torch, "unsafe_split_with_sizes", fails)
        with pytest.raises(MemoryError):
            st.load_file(file)
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()


def test_garbage_is_looked_for_after_an_interrupt(file, monkeypatch):
    """Ctrl-C where Python looks for it first: when the call that stops the looks has returned."""
    class Interrupted:
        isenabled, enable = staticmethod(gc.isenabled), staticmethod(gc.enable)

        @staticmethod
        def disable():
            gc.disable()
            raise KeyboardInterrupt

    was = gc.isenabled()
    gc.enable()
    try:
        monkeypatch.setattr(load, "gc", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            st.load_file(file)
        assert gc.isenabled()
    finally:
        (gc.enable if was else gc.disable)()


@pytest.fixture(params=["default", "with"])
def elsewhere(request):
    """New tensors go to a device that has no memory, unless told."""
    if request.param == "with":
        with torch.device("meta"):
            yield
        return
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_another_default_device(tmp_path, device, elsewhere):
    """Nothing goes there. Below 1 MiB a file, and above, where memory is mapped."""
    for count in 10, 400000:
        tensors = ALL | checkpoints.of(rows=("F32", (count, 2)))
        path = checkpoints.write(tmp_path / "a.safetensors", tensors, pad=5)
        check(st.load_file(path, device), tensors)
        check(dict(st.stream(path, device)), tensors)
        with st.safe_open(path, "pt", device) as opened:
            check(opened.get_tensors(), tensors)
            check({name: opened.get_tensor(name) for name in opened.keys()}, tensors)
            check({name: opened.get_slice(name)[...] for name in opened.keys()}, tensors)
            rows = opened.get_tensor("rows")
            for key in slice(2, 5), (slice(None, 9, 2), 1), [1, 0], (slice(3), None):
                part = opened.get_slice("rows")[key]
                assert part.device.type == "cpu" and raw(part) == raw(rows[key].contiguous())
            with pytest.raises(IndexError):
                opened.get_slice("rows")[count]


def test_tensors_outlive_the_file(file):
    big = st.load_file(file)["big"]
    file.unlink()
    gc.collect()
    assert raw(big) == ALL["big"][2]


def test_memory_ends_with_the_last_tensor(file):
    tensors = st.load_file(file)
    last = weakref.ref(tensors["big"].untyped_storage())
    kept = tensors["row"]
    del tensors
    gc.collect()
    assert raw(kept) == ALL["row"][2]
    del kept
    gc.collect()
    assert last() is None


def test_empty_files(tmp_path):
    assert st.load_file(checkpoints.write(tmp_path / "a.safetensors", {})) == {}
    assert list(st.stream(tmp_path / "a.safetensors", "sim")) == []
    hollow = checkpoints.of(x=("F32", (0, 4)), y=("U8", (0,)))
    for device in DEVICES:
        check(st.load_file(checkpoints.write(tmp_path / "b.safetensors", hollow), device), hollow)
        check(dict(st.stream(tmp_path / "b.safetensors", device)), hollow)


def test_eighteen_thousand_small_ones(tmp_path):
    """A block of memory, not one for each."""
    many = checkpoints.of(**{f"layer.{i}.weight": ("BF16", (1 + i % 3, 4)) for i in range(18867)})
    tensors = st.load_file(checkpoints.write(tmp_path / "a.safetensors", many), "sim")
    assert len(tensors) == 18867 and len({t.untyped_storage().data_ptr() for t in tensors.values()}) == 1
    check({name: tensors[name] for name in list(many)[::501]}, {name: many[name] for name in list(many)[::501]})


@pytest.mark.parametrize("call", [st.load_file, lambda path, device: list(st.stream(path, device)),
                                  lambda path, device: st.safe_open(path, "pt", device)], ids=["load_file", "stream", "safe_open"])
def test_what_is_refused(tmp_path, file, call):
    bad = checkpoints.write(tmp_path / "bad.safetensors", {"x": ("F32", (2,), b"short")})
    (tmp_path / "empty").mkdir()
    for path, device, error, match in [
        (bad, "cpu", sidestream.InvalidArgument, "bad.safetensors"),
        (tmp_path / "none.safetensors", "cpu", FileNotFoundError, "none.safetensors"),
        (tmp_path / "none.safetensors", "cpu", sidestream.NotFound, "none.safetensors"),
        (tmp_path / "none.safetensors", "cpu", st.FileMissing, "^cannot open .*none.safetensors"),
        (tmp_path / "empty", "cpu", FileNotFoundError, "empty"),
        (file, "nowhere", ValueError, "device is 'nowhere'"),
    ]:
        with pytest.raises(error, match=match):
            call(path, device)


def test_what_file_missing_says(tmp_path):
    """What a FileNotFoundError of Python's has, and what an error of the library's has; it travels between processes."""
    path = tmp_path / "none.safetensors"
    for asked in path, os.fspath(path), os.fsencode(path):
        with pytest.raises(st.FileMissing) as caught:
            st.load_file(asked)
        error = caught.value
        for same in error, pickle.loads(pickle.dumps(error)), copy.copy(error):
            assert (type(same), same.errno, same.filename) == (st.FileMissing, errno.ENOENT, os.fspath(asked))
            assert str(same) == same.strerror and str(same).startswith("cannot open ") and str(same).endswith(os.strerror(errno.ENOENT))
            assert (same.status_name, same.os_errno) == ("SIDE_NOT_FOUND", errno.ENOENT)
        assert repr(error).startswith("FileMissing(2, 'cannot open")
    assert (st.FileMissing.__module__, st.FileMissing.__qualname__) == ("sidestream.torch", "FileMissing")


@pytest.mark.parametrize("call", [st.load_file, lambda path, **more: dict(st.stream(path, **more)),
                                  lambda path, **more: st.safe_open(path, "pt", **more).get_tensors()], ids=["load_file", "stream", "safe_open"])
def test_lenient(tmp_path, call):
    """What the format forbids and safetensors takes: here a field that nobody knows, and a shard's tensor that the index does not list."""
    header = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"more":1}}'
    path, folder = tmp_path / "a.safetensors", tmp_path / "model"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"hi")
    folder.mkdir()
    index = checkpoints.write_shards(folder, [checkpoints.of(a=("U8", (2,)), b=("U8", (3,)))])
    index.write_text(re.sub(r', "b": "[^"]*"', "", index.read_text()))
    for file, names in (path, ["a"]), (folder, ["a", "b"]):
        with pytest.raises(sidestream.InvalidArgument, match="lenient"):
            call(file)
        with pytest.raises(sidestream.InvalidArgument, match="lenient"):
            call(file, lenient=False)
        assert sorted(call(file, lenient=True)) == names
    assert bytes(call(path, lenient=True)["a"]) == b"hi"
    module = torch.nn.Module()
    module.register_buffer("a", torch.zeros(2, dtype=torch.uint8))
    with pytest.raises(sidestream.InvalidArgument, match="lenient"):
        st.load_model(module, path)
    assert st.load_model(module, path, lenient=True) == (set(), []) and bytes(module.a) == b"hi"


def test_all_go_to_the_cpu_unless_told(file):
    with st.stream(file) as tensors:
        assert next(tensors)[1].device.type == "cpu"
    assert st.load_file(file)["big"].device.type == "cpu" and st.safe_open(file).get_tensor("big").device.type == "cpu"


def test_arguments_that_are_refused(file):
    with pytest.raises(ValueError, match="load_file: backend is 'tape'"):
        st.load_file(file, backend="tape")
    with pytest.raises(ValueError, match="framework is 'tf'"):
        st.safe_open(file, framework="tf")
    with pytest.raises(KeyError, match="no tensor 'x'"):
        st.stream(file, "cpu", order=["big", "x"])


def test_a_file_that_shrinks(tmp_path):
    tensors = checkpoints.of(**{f"t{i}": ("U8", (1 << 16,)) for i in range(8)})
    path = checkpoints.write(tmp_path / "a.safetensors", tensors)
    with st.safe_open(path, "pt", "sim") as opened:
        os.truncate(path, 1 << 17)
        with pytest.raises(sidestream.IOFailed, match="a.safetensors"):
            opened.get_tensors()
        with pytest.raises(sidestream.IOFailed, match="a.safetensors"):
            opened.get_tensor("t0")


@pytest.mark.parametrize("device", DEVICES)
def test_no_memory_for_it(file, monkeypatch, device):
    """What PyTorch says of it comes through, and the load that was under way ends."""
    def none(self, nbytes):
        raise torch.OutOfMemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(load.Where, "memory", none)
        for call in st.load_file, st.stream:
            with pytest.raises(torch.OutOfMemoryError, match="none left"):
                call(file, device)
    check(st.load_file(file, device), ALL)


# ---------------------------------------------------------------- stream

@pytest.mark.parametrize("device", DEVICES)
def test_stream_in_the_order_asked_for(file, device):
    names = list(ALL)[::-1] + ["big"]
    with st.stream(file, device, order=iter(names)) as tensors:
        assert len(tensors) == len(names) and tensors.stats()["parts"] == len(names)
        seen = [(name, raw(tensor)) for name, tensor in tensors]
        assert tensors.stats() is None and len(tensors) == 0 and list(tensors) == []
    assert seen == [(name, ALL[name][2]) for name in names]
    check(dict(st.stream(file, device)), ALL)


@pytest.mark.parametrize("device", DEVICES)
def test_a_stream_that_is_left(file, device):
    """What was handed out stays; the rest does not come."""
    tensors = st.stream(file, device, order=["big", "row"])
    _, big = next(tensors)
    tensors.close()
    tensors.close()
    with pytest.raises(StopIteration):
        next(tensors)
    assert raw(big) == ALL["big"][2]
    next(st.stream(file, device))  # and nobody closes it


def test_a_stream_whose_file_changes_says_so_at_the_end(file):
    tensors = st.stream(file, "sim")
    got = [next(tensors) for _ in ALL]
    os.utime(file, ns=(1, 1))
    with pytest.raises(sidestream.IOFailed, match="a.safetensors"):
        next(tensors)
    with pytest.raises(StopIteration):
        next(tensors)
    assert len(got) == len(ALL)


def test_loads_of_several_threads(file):
    wrong = []

    def load_often(device):
        for _ in range(5):
            if raw(st.load_file(file, device)["big"]) != ALL["big"][2]:
                wrong.append(device)

    threads = [threading.Thread(target=load_often, args=(device,)) for device in DEVICES * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.fixture
def held(monkeypatch):
    """Loads whose ready() waits until it may: (it came, it may go on)."""
    came, go = threading.Event(), threading.Event()
    native = load._native.Load

    class Held:
        def __init__(self, *arguments, **more):
            self.native = native(*arguments, **more)

        def __getattr__(self, name):
            return getattr(self.native, name)

        def ready(self, *arguments):
            came.set()
            assert go.wait(60)
            return self.native.ready(*arguments)

    monkeypatch.setattr(load._native, "Load", Held)
    return came, go


@pytest.mark.parametrize("device", DEVICES)
def test_a_stream_lets_one_thread_in(file, device, held):
    came, go = held
    tensors, got = st.stream(file, device), []
    thread = threading.Thread(target=lambda: got.append(next(tensors)))
    thread.start()
    assert came.wait(60)
    try:
        for _ in range(2):
            with pytest.raises(sidestream.WrongState, match="another thread is in next.*lock around next"):
                next(tensors)
            with pytest.raises(sidestream.WrongState, match="another thread is in next.*close it when"):
                tensors.close()
        assert len(tensors) == len(ALL) and tensors.stats()["parts"] == len(ALL)
    finally:
        go.set()
        thread.join()
    got.append(next(tensors))
    assert len({name for name, _ in got}) == 2 and len(tensors) == len(ALL) - 2 and all(raw(tensor) == ALL[name][2] for name, tensor in got)
    tensors.close()
    assert tensors.stats() is None and list(tensors) == []


@pytest.mark.parametrize("locked", [False, True])
def test_threads_that_share_a_stream(tmp_path, locked):
    """Each tensor comes once, whether they lock or come again."""
    many = checkpoints.of(**{f"t{i}": ("U8", (3,)) for i in range(2000)})
    tensors, lock, got, wrong = st.stream(checkpoints.write(tmp_path / "a.safetensors", many)), threading.Lock(), [], []

    def take():
        while True:
            try:
                if locked:
                    with lock:
                        got.append(next(tensors))
                else:
                    got.append(next(tensors))
            except StopIteration:
                return
            except sidestream.WrongState:
                assert not locked
            except BaseException as error:
                wrong.append(error)
                return

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong and len(got) == len(many) and tensors.stats() is None
    check(dict(got), many)


@pytest.mark.parametrize("taken", [0, 1])
def test_a_stream_that_nobody_has_ends_at_once(file, monkeypatch, taken):
    ended = []
    monkeypatch.setattr(load.Running, "__del__", lambda _: ended.append(1), raising=False)
    tensors = st.stream(file)
    for _ in range(taken):
        next(tensors)
    assert not ended
    del tensors
    assert ended == [1]


# ---------------------------------------------------------------- safe_open

INDICES = [slice(2, 5), slice(None), slice(-3, None, 2), slice(5, 2), (slice(1, 6, 3), slice(2, 3)), 3, -1, (2, slice(None, None, 2)),
           (slice(None), 1), ..., (..., 0), (slice(0, 2), None)]


@pytest.mark.parametrize("device", DEVICES)
def test_slices(tmp_path, device):
    tensors = checkpoints.of(a=("F32", (7, 5)), b=("I64", ()), c=("F4", (6, 8)), d=("BF16", (700, 1000)), e=("U8", (0, 3)))
    path = checkpoints.write(tmp_path / "a.safetensors", tensors)
    with st.safe_open(path, "pt", device) as opened:
        for name in "acd":
            whole, part = opened.get_tensor(name), opened.get_slice(name)
            assert (part.get_shape(), part.get_dtype()) == (list(tensors[name][1]), tensors[name][0])
            for index in INDICES:
                got, wanted = part[index], whole.view(torch.uint8 if name == "c" else whole.dtype)[index]
                assert got.shape == wanted.shape and raw(got) == raw(wanted.contiguous()) and got.is_contiguous(), (name, index)
                assert got.untyped_storage().nbytes() <= got.nbytes + 8192  # nothing that is not in it
        assert raw(opened.get_slice("b")[...]) == tensors["b"][2] and opened.get_slice("e")[:].shape == (0, 3)
        for index, error in [(7, IndexError), (-8, IndexError), (slice(None, None, -1), ValueError)]:
            with pytest.raises(error):
                opened.get_slice("a")[index]
        for call in opened.get_tensor, opened.get_slice:
            with pytest.raises(KeyError, match="no tensor 'x'"):
                call("x")
    with pytest.raises(sidestream.WrongState, match="closed"):
        opened.keys()


def random_key(random):
    def one():
        ends = [random.choice([None, random.randint(-8, 8)]) for _ in range(2)]
        return random.choice([random.randint(-3, 3), random.randint(-8, 8), slice(*ends), slice(*ends), slice(*ends, random.choice([1, 2, 3, 0, -1])),
                              slice(None), slice(1, 2), None, ..., True, [0, 1], [0, -9], torch.tensor([0, 0]), torch.tensor(1), 1.5, 1 << 70])

    return one() if random.random() < 0.2 else tuple(one() for _ in range(random.randint(0, 4)))


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_slices_by_chance(tmp_path, device):
    """As the whole tensor's, and as safetensors' where that is installed: values, and what is said of wrong ones."""
    def outcome(tensor, key):
        try:
            part = tensor[key]
        except Exception as error:  # noqa: BLE001
            return type(error), str(error)
        return part.shape, part.dtype, raw(part.contiguous())

    chance = random.Random(4)
    tensors = checkpoints.of(a=("I32", (7, 5, 3)), b=("U8", (4,)), c=("F16", ()), d=("I64", (0, 3)), e=("BF16", (1, 3, 1, 2)), f=("I8", (3, 0, 2)))
    path = checkpoints.write(tmp_path / "a.safetensors", tensors, pad=1)
    aligned = checkpoints.write(tmp_path / "b.safetensors", tensors)
    try:
        import safetensors
        reference = safetensors.safe_open(aligned, framework="pt")
    except ImportError:
        reference = None
    good = 0
    with st.safe_open(path, "pt", device) as opened:
        whole = opened.get_tensors()
        for _ in range(600):
            name, key = chance.choice("aaabcdef"), random_key(chance)
            got, wanted = outcome(opened.get_slice(name), key), outcome(whole[name], key)
            assert got == wanted, (name, key)
            assert reference is None or outcome(reference.get_slice(name), key) == wanted, (name, key)
            good += isinstance(got[0], torch.Size)
    assert 150 < good < 550


def test_a_slice_reads_its_rows_alone(tmp_path):
    """Of the dimension that is left by numbers and slices of one; never more than that."""
    path = checkpoints.write(tmp_path / "a.safetensors", checkpoints.of(a=("F32", (6, 8, 10))))
    with st.safe_open(path, "pt", "sim") as opened:
        part = opened.get_slice("a")
        for key, elements in [
            (slice(1, 4), 3 * 80), (2, 80), (-1, 80), ((slice(1, 3), slice(0, 1)), 2 * 80), ((2, slice(3, 5)), 2 * 10), ((2, 3), 10),
            ((2, -1, slice(4, 7)), 3), ((1, 2, 3), 1), ((slice(2, 3), slice(1, 4), 0), 3 * 10), ((None, 1, None, slice(6, None)), 2 * 10),
            ((1, ...), 80), ((..., 0), 480), ((slice(1, 6, 2), [0, 1]), 5 * 80), ((3, [0, 1]), 80), ([0, 1], 480),
        ]:
            part[key]
            assert st.last_load()["bytes"] == 4 * elements, key


@pytest.mark.parametrize("device", DEVICES)
def test_a_large_slice_reads_its_rows_alone(tmp_path, device):
    path = checkpoints.write(tmp_path / "a.safetensors", checkpoints.of(a=("F32", (4096, 1024))))
    with st.safe_open(path, "pt", device) as opened:
        part = opened.get_slice("a")[100:1124]
        assert part.shape == (1024, 1024) and st.last_load()["bytes"] == part.nbytes


def test_as_safetensors_has_it(tmp_path):
    """The same calls, the same answers."""
    safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed")
    reference = pytest.importorskip("safetensors.torch")
    torch.manual_seed(1)
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.uint16]
    tensors = {f"model.{i}.{str(dtype)[6:]}": torch.randint(0, 2, (3 + i, 4, 2)).to(dtype) for i, dtype in enumerate(dtypes)}
    tensors |= {"z.scalar": torch.tensor(3.5), "a.empty": torch.zeros(0, 3)}
    path = tmp_path / "a.safetensors"
    reference.save_file(tensors, path, metadata={"format": "pt", "a": "b"})

    def same(got, wanted):
        assert (got.dtype, got.shape, got.stride(), raw(got)) == (wanted.dtype, wanted.shape, wanted.stride(), raw(wanted))

    for ours, theirs in [(st.load_file(path), reference.load_file(path)), (dict(st.stream(path, "sim")), tensors)]:
        assert set(ours) == set(theirs)
        for name in ours:
            same(ours[name], theirs[name])
    with st.safe_open(path, framework="pt", device="sim") as ours, safetensors.safe_open(path, framework="pt", device="cpu") as theirs:
        assert sorted(ours.keys()) == sorted(theirs.keys()) and ours.metadata() == theirs.metadata()
        assert [n for n in ours.offset_keys() if tensors[n].numel()] == [n for n in theirs.offset_keys() if tensors[n].numel()]
        for name in ours.keys():
            same(ours.get_tensor(name), theirs.get_tensor(name))
            a, b = ours.get_slice(name), theirs.get_slice(name)
            assert (a.get_shape(), a.get_dtype()) == (b.get_shape(), b.get_dtype())
            for index in [slice(1, 3), (slice(None), slice(1, 2)), 0] if tensors[name].dim() == 3 else []:
                same(a[index], b[index].contiguous())  # theirs are views, and keep the whole
    reference.save_file(st.load_file(path), tmp_path / "b.safetensors")  # what we load can be saved, and is the same again
    for name, tensor in reference.load_file(tmp_path / "b.safetensors").items():
        same(tensor, tensors[name])


# ---------------------------------------------------------------- load_model

class Net(torch.nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 6, dtype=dtype), torch.nn.Linear(6, 4, bias=False, dtype=dtype)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def net_file(path, **more):
    return checkpoints.write(path, checkpoints.of(**{"first.weight": ("F32", (6, 4)), "first.bias": ("F32", (6,)), "second.weight": ("F32", (4, 6)),
                                                     "count": ("I64", ())} | more))


@pytest.mark.parametrize("device", ["cpu", *GPU])
def test_load_model_fills_what_is_there(tmp_path, device):
    path, net = net_file(tmp_path / "a.safetensors"), Net().to(device)
    net.second.cpu()  # a device each
    before = {name: value.data_ptr() for name, value in net.state_dict().items()}
    version = net.first.weight._version
    assert st.load_model(net, path) == (set(), [])
    assert {name: value.data_ptr() for name, value in net.state_dict().items()} == before
    wanted = st.load_file(path)
    assert all(raw(value) == raw(wanted[name]) for name, value in net.state_dict().items())
    assert net.first.weight._version > version and net.first.weight.requires_grad


def test_load_model_under_another_default_device(tmp_path):
    """Straight, converted, and by rules."""
    path, wanted = net_file(tmp_path / "a.safetensors"), Net()
    st.load_model(wanted, path)
    for dtype in torch.float32, torch.bfloat16:
        for hook in False, True:
            net = Net(dtype)
            if hook:
                net.second.register_load_state_dict_pre_hook(lambda *_: None)
            with torch.device("meta"):
                assert st.load_model(net, path) == (set(), [])
            for name, value in net.state_dict().items():
                assert value.device.type == "cpu" and raw(value) == raw(wanted.state_dict()[name].to(value.dtype)), name


@pytest.mark.parametrize("device", ["cpu", *GPU])
def test_load_model_converts_what_is_of_another_kind(tmp_path, device):
    path, net = net_file(tmp_path / "a.safetensors"), Net(torch.bfloat16).to(device)
    net.second.weight = torch.nn.Parameter(torch.zeros(6, 4, device=device).t())  # not contiguous
    st.load_model(net, path)
    wanted = st.load_file(path, device)
    assert torch.equal(net.second.weight.nan_to_num(), wanted["second.weight"].nan_to_num())
    assert torch.equal(net.first.weight.nan_to_num(), wanted["first.weight"].bfloat16().nan_to_num()) and net.first.weight.dtype == torch.bfloat16


def test_load_model_says_what_does_not_fit_before_it_writes(tmp_path):
    net = Net()
    kept = {name: value.clone() for name, value in net.state_dict().items()}
    more = net_file(tmp_path / "more.safetensors", extra=("F32", (1,)))
    other = net_file(tmp_path / "other.safetensors", **{"first.bias": ("F32", (5,))})
    less = checkpoints.write(tmp_path / "less.safetensors", checkpoints.of(count=("I64", ())))
    for path, match in [(more, "unexpected in the file: extra"), (other, r"first.bias is \(6,\) in the module and \(5,\)"),
                        (less, "missing in the file: first.bias, first.weight, second.weight")]:
        with pytest.raises(RuntimeError, match=match):
            st.load_model(net, path)
    assert all(torch.equal(value, kept[name]) for name, value in net.state_dict().items())
    assert st.load_model(net, less, strict=False) == ({"first.weight", "first.bias", "second.weight"}, [])
    assert st.load_model(net, more, strict=False) == (set(), ["extra"])
    with pytest.raises(RuntimeError, match="meta device.*to_empty"):
        with torch.device("meta"):
            st.load_model(Net(), more, strict=False)


def test_load_model_of_tied_parameters(tmp_path):
    net = Net()
    net.again = net.first
    assert st.load_model(net, net_file(tmp_path / "a.safetensors")) == (set(), [])
    both = net_file(tmp_path / "b.safetensors", **{"again.weight": ("F32", (6, 4))})
    with pytest.raises(RuntimeError, match="unexpected in the file: first.weight"):
        st.load_model(net, both)


# ---------------------------------------------------------------- the page

def test_the_page_runs(tmp_path):
    """Every block of docs/load-in-pytorch.md, one after the other, on the software device."""
    net_file(tmp_path / "model.safetensors")
    os.mkdir(tmp_path / "model")
    net_file(tmp_path / "model/model.safetensors")
    text = (pathlib.Path(__file__).parent.parent.parent / "docs/load-in-pytorch.md").read_text()
    placed = {}
    names = {"model": Net(), "names": ["second.weight", "count"], "place": placed.__setitem__}
    for program in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        program = program.replace('device="cuda"', 'device="sim"').replace('"model', f'"{tmp_path}/model')
        exec(compile(program, "load-in-pytorch.md", "exec"), names)
    assert list(placed) == ["second.weight", "count"] and (names["missing"], names["unexpected"]) == (set(), [])
    assert raw(names["rows"]) == raw(names["whole"][2:5]) and names["texts"] is None and len(names["names"]) == 4
    assert raw(names["model"].first.bias) == raw(names["weights"]["first.bias"])


# ---------------------------------------------------------------- processes

def test_a_load_that_is_interrupted(tmp_path):
    """Ctrl-C while it waits: here for memory that comes late."""
    path = checkpoints.write(tmp_path / "a.safetensors", checkpoints.of(a=("U8", (1 << 20,))))
    done = run_torch(f"""
import os, signal, threading
import sidestream.torch
from sidestream import _native
load = _native.Load(_native.Device("sim"), _native.Checkpoint({os.fspath(path)!r}), given=True)
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started this may ignore it
main = threading.main_thread().ident
def interrupt():
    while not waiting:
        pass
    signal.pthread_kill(main, signal.SIGINT)
waiting = []
thread = threading.Thread(target=interrupt)
thread.start()
try:
    waiting.append(1)
    load.join()
except KeyboardInterrupt:
    print("ended")
thread.join()
print(len(sidestream.torch.load_file({os.fspath(path)!r})))
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n1\n", "")


def test_workers_load_too(file):
    """A forked child loads by itself, whatever its parent loaded before."""
    done = run_torch(f"""
import os
import sidestream.torch as st
for device in "cpu", "sim":
    st.load_file({os.fspath(file)!r}, device)
pid = os.fork()
if pid == 0:
    os._exit(0 if all(len(st.load_file({os.fspath(file)!r}, device)) == {len(ALL)} for device in ("cpu", "sim")) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
