"""pin: in place, counted, undone by its handle, and loud about forks."""
import sys

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from sidestream.torch import pin  # noqa: E402
from torch_help import run_torch  # noqa: E402

module = sys.modules["sidestream.torch.pinning"]


class Recorder:
    """Stands before the native calls: which addresses are pinned, how often."""

    def __init__(self, monkeypatch):
        self.pinned = {}
        native = module._native
        real_pin, real_unpin = native.pin, native.unpin

        def pin(device, address, nbytes):
            real_pin(device, address, nbytes)
            self.pinned.setdefault(address, []).append(nbytes)

        def unpin(device, address):
            real_unpin(device, address)
            self.pinned[address].pop()
            if not self.pinned[address]:
                del self.pinned[address]

        monkeypatch.setattr(native, "pin", pin)
        monkeypatch.setattr(native, "unpin", unpin)


@pytest.fixture
def recorder(monkeypatch):
    return Recorder(monkeypatch)


def test_tensor(recorder):
    x = torch.arange(1000.0)
    with pin(x, device="sim") as handle:
        assert recorder.pinned == {x.data_ptr(): [4000]} and handle.nbytes == 4000
        assert torch.equal(x, torch.arange(1000.0))
    assert recorder.pinned == {} and handle.nbytes == 0
    handle.unpin()  # again does nothing
    assert recorder.pinned == {}


def test_twice_is_counted(recorder):
    x = torch.ones(5000)
    first, second = pin(x, device="sim"), pin(x, device="sim")
    first.unpin()
    assert recorder.pinned == {x.data_ptr(): [20000]}
    second.unpin()
    assert recorder.pinned == {}


def test_views_pin_their_storage_once(recorder):
    x = torch.ones(100, 100)
    with pin([x[10:20], x.t(), x[0], {"x": x}], device="sim") as handle:
        assert recorder.pinned == {x.data_ptr(): [40000]} and handle.nbytes == 40000


def test_module_with_tied_weights_and_buffers(recorder):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(10, 8)
            self.head = torch.nn.Linear(8, 10, bias=False)
            self.head.weight = self.embed.weight
            self.again = torch.nn.Parameter(self.embed.weight.detach()[2:4])
            self.norm = torch.nn.BatchNorm1d(8)
            self.register_buffer("nothing", torch.empty(0))

    net = Tied()
    handle = pin(net, device="sim")
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in [*net.parameters(), *net.buffers()] if t.numel()}
    assert {address: [n] for address, n in storages.items()} == recorder.pinned
    assert handle.nbytes == sum(storages.values())
    assert str(len(storages)) in repr(handle)
    handle.unpin()
    assert recorder.pinned == {}


def test_memory_stays_while_pinned(recorder):
    x = torch.full((1 << 16,), 3.0)
    address = x.data_ptr()
    handle = pin(x, device="sim")
    del x
    others = [torch.zeros(1 << 16) for _ in range(8)]
    assert address not in [t.data_ptr() for t in others]
    handle.unpin()
    assert recorder.pinned == {}


def test_a_dropped_handle_stays_pinned(recorder):
    x = torch.ones(100)
    books = len(module._books.handles)
    pin(x, device="sim")
    assert recorder.pinned == {x.data_ptr(): [400]} and len(module._books.handles) == books + 1
    for handle in list(module._books.handles):
        handle.unpin()
    assert recorder.pinned == {}


def test_unpins_when_the_block_fails(recorder):
    with pytest.raises(KeyError):
        with pin(torch.ones(3), device="sim"):
            raise KeyError
    assert recorder.pinned == {}


@pytest.mark.parametrize("value, name", [
    ({"w": [torch.ones(2), torch.empty(3, device="meta")]}, r"\['w'\]\[1\] \(float32 \(3,\)\) is on meta"),
    (torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(2, 3, device="meta")), r"1\.weight \(float32 \(3, 2\)\) is on meta"),
    (torch.eye(2).to_sparse(), r"the tensor \(float32 \(2, 2\)\) is torch.sparse_coo"),
])
def test_what_cannot_be_pinned_is_named(recorder, value, name):
    with pytest.raises(ValueError, match=name):
        pin(value, device="sim")
    assert recorder.pinned == {}


@pytest.mark.parametrize("value", [3, "text", [], {"a": None}])
def test_no_tensor(value):
    with pytest.raises(TypeError, match="holds no tensor"):
        pin(value, device="sim")


def test_no_cuda_device():
    with pytest.raises(ValueError, match="'cpu' is no CUDA device"):
        pin(torch.ones(1), device="cpu")


def test_refusal_names_the_tensor_and_undoes_the_rest(recorder, monkeypatch):
    recorded = module._native.pin
    big = torch.ones(1000)

    def refuse(device, address, nbytes):
        if address == big.data_ptr():
            raise module._native.OverBudget("4000 bytes are over the budget of 100")
        recorded(device, address, nbytes)

    monkeypatch.setattr(module._native, "pin", refuse)
    with pytest.raises(module._native.OverBudget, match=r"pin: \['b'\] \(float32 \(1000,\)\): 4000 bytes are over the budget of 100"):
        pin({"a": torch.ones(3), "b": big}, device="sim")
    assert recorder.pinned == {} and not module._books.handles


def run(code):
    return run_torch("import warnings; warnings.simplefilter('always')\n" + code)


def test_fork_while_pinned_warns_once():
    done = run("""if 1:
        import os, torch
        from sidestream.torch import pin
        x = torch.ones(1000)
        def fork():
            child = os.fork()
            if child == 0:
                handle.unpin()      # leaves the parent's pins alone
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        handle = pin(x, device="sim")
        handle.unpin()
        fork()
        print("none yet", flush=True)
        with pin(x, device="sim") as handle:
            fork()
            fork()
        fork()
        print("done")""")
    assert (done.returncode, done.stdout) == (0, "none yet\ndone\n")
    assert done.stderr.count("while tensors are pinned in place") == 1 and "RuntimeWarning" in done.stderr
    assert "the software device does not mind" in done.stderr and "while the GPU goes on" not in done.stderr


def test_dataloader_workers_by_fork_warn():
    done = run("""if 1:
        import torch
        from sidestream.torch import pin
        weight = torch.ones(1000)
        loader = torch.utils.data.DataLoader(list(range(4)), num_workers=1, multiprocessing_context="fork")
        with pin(weight, device="sim"):
            print([int(b) for b in loader])""")
    assert (done.returncode, done.stdout) == (0, "[0, 1, 2, 3]\n"), done.stderr
    assert "while tensors are pinned in place" in done.stderr


def test_a_child_pins_for_itself():
    done = run("""if 1:
        import os, torch, warnings
        warnings.simplefilter("ignore")
        from sidestream.torch import pin
        kept = pin(torch.ones(1000), device="sim")
        child = os.fork()
        if child == 0:
            x = torch.ones(10)
            with pin(x, device="sim") as handle:
                assert handle.nbytes == 40
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        kept.unpin()""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_exit_while_pinned():
    done = run("import torch; from sidestream.torch import pin; pin(torch.ones(1000), device='sim')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pytorch_sees_it_on_cuda():
    x, already = torch.ones(1000), torch.ones(10).pin_memory()
    handle = pin([x, already])
    assert x.is_pinned() and handle.nbytes == 4000
    with pin(x):
        handle.unpin()
        assert x.is_pinned()
    assert not x.is_pinned() and already.is_pinned()
    assert torch.equal(x.cuda().cpu(), x)


