"""load_model of modules that load by rules of their own: as load_state_dict, and as safetensors' load_model where that is installed."""
import os
import warnings

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import checkpoints  # noqa: E402
import sidestream  # noqa: E402
import sidestream.torch as st  # noqa: E402
from sidestream.torch import load_into  # noqa: E402
from torch import nn  # noqa: E402

try:
    from safetensors.torch import load_model as reference
except ImportError:
    reference = None

said = []  # by hooks
DTYPES = {torch.float32: "F32", torch.int64: "I64", torch.float16: "F16"}


def write(path, state):
    return checkpoints.write(path, {name: (DTYPES[value.dtype], tuple(value.shape), value.detach().contiguous().numpy().tobytes())
                                    for name, value in state.items()})


def numbers(*shape, first=1.0):
    count = torch.Size(shape).numel()
    return torch.arange(first, first + count).reshape(shape)


def random_state(make, skip=(), **more):
    """Of such a module, with other values than a new one has."""
    state = {name: numbers(*value.shape, first=at + 2).to(value.dtype) for at, (name, value) in enumerate(make().state_dict().items())}
    return {name: value for name, value in state.items() if name not in skip} | more


# ---------------------------------------------------------------- models

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)


class Scalar(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.one, self.row = nn.Parameter(torch.zeros((), dtype=dtype)), nn.Parameter(torch.zeros(1))


class Extra(nn.Module):
    """A state that resets one child and makes another."""

    def __init__(self):
        super().__init__()
        self.weight, self.child, self.state = nn.Parameter(torch.zeros(2)), nn.Linear(2, 2), torch.zeros(1)

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        said.append((state.tolist(), self.weight.tolist(), state.device.type))
        self.state, self.made = state, nn.Linear(1, 1)
        nn.init.ones_(self.child.weight)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_parameter("none", None)


class Overridden(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.child = nn.Parameter(torch.zeros(2)), nn.Linear(2, 2)

    def _load_from_state_dict(self, state, prefix, *more):
        said.append((prefix, sorted(state)))
        state[prefix + "weight"] = state[prefix + "weight"] * 3
        state[prefix + "child.weight"] = state[prefix + "child.weight"].t()
        super()._load_from_state_dict(state, prefix, *more)


class Above(nn.Module):
    def __init__(self):
        super().__init__()
        self.mine, self.plain = Overridden(), nn.Linear(2, 2)


class OwnLoad(Net):
    def load_state_dict(self, state, strict=True, assign=False):
        return super().load_state_dict({name.removeprefix("old."): value for name, value in state.items()}, strict)


class Scaled(nn.Parameter):
    """A parameter that is not what its bytes are."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_:
            said.append("copied")
        return super().__torch_function__(function, types, args, kwargs or {})


def of_a_class():
    module = nn.Linear(2, 2)
    module.weight = Scaled(torch.zeros(2, 2))
    return module


class Tied(nn.Module):
    def __init__(self, tie="parameter"):
        super().__init__()
        self.emb, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        if tie == "parameter":
            self.head.weight = self.emb.weight
        elif tie == "memory":
            self.head.weight = nn.Parameter(self.emb.weight.data)
        else:
            self.register_buffer("row", self.emb.weight.data[1:2])


def two_layers():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def with_pre_hook():
    def hook(module, state, prefix, *_):
        said.append((prefix, sorted(state)))
        if prefix + "old" in state:
            state[prefix + "weight"] = state.pop(prefix + "old").t()

    module = two_layers()
    module[1].register_load_state_dict_pre_hook(hook)
    return module


def with_root_hook():
    def hook(module, state, prefix, *_):
        for name in [name for name in state if name.startswith("model.")]:
            state[name.removeprefix("model.")] = state.pop(name)

    module = two_layers()
    module.register_load_state_dict_pre_hook(hook)
    return module


def with_post_hook(forgive):
    def hook(module, keys):
        said.append((sorted(keys.missing_keys), sorted(keys.unexpected_keys), module.weight.tolist()))
        if forgive:
            keys.missing_keys.clear()

    module = two_layers()
    module[1].register_load_state_dict_post_hook(hook)
    return module


def tied_with_hook():
    def hook(module, state, prefix, *_):
        if prefix + "weight" in state:
            state[prefix + "weight"] = state[prefix + "weight"] * 10

    module = Tied()
    module.head.register_load_state_dict_pre_hook(hook)
    return module


def shared():
    module = nn.Linear(2, 2)
    return nn.ModuleDict({"a": module, "b": module})


def parametrized():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.Linear(2, 2), nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))


def normed(**options):
    return lambda: nn.Sequential(nn.InstanceNorm1d(3, affine=True, **options), nn.Linear(2, 2))


def not_contiguous():
    module = Net()
    module.first.weight = nn.Parameter(torch.zeros(4, 4).t())
    return module


def without(*keys, make=two_layers):
    """A model with children that are None: those, which were there, and one of the first."""
    def made():
        model = make()
        for key in keys:
            setattr(model, key, None)
        model[0].register_module("unset", None)
        return model

    return made


def extra(*skip):
    state = {"weight": numbers(2), "child.weight": numbers(2, 2, first=5), "child.bias": numbers(2), "_extra_state": torch.tensor([7.0]),
             "made.weight": numbers(1, 1, first=9), "made.bias": numbers(1)}
    return {name: value for name, value in state.items() if name.split(".")[0] not in skip}


OVER = {"mine.weight": numbers(2), "mine.child.weight": numbers(2, 2), "mine.child.bias": numbers(2), "plain.weight": numbers(2, 2, first=5),
        "plain.bias": numbers(2)}
HOOK = {"0.weight": numbers(2, 2), "0.bias": numbers(2), "1.old": numbers(2, 2, first=4), "1.bias": numbers(2)}
NORM = {"0.weight": numbers(3), "0.bias": numbers(3), "1.weight": numbers(2, 2), "1.bias": numbers(2)}
WEIGHT_NORM = {"0.weight": numbers(2, 2), "0.bias": numbers(2), "1.weight_g": numbers(3, 1), "1.weight_v": numbers(3, 3), "1.bias": numbers(3)}
EMB = {"emb.weight": numbers(5, 3)}
HEAD = {"head.weight": numbers(5, 3, first=50)}
ROW = {"row": numbers(1, 3, first=90)}

CASES = {  # name: (model, file)
    "plain": (Net, random_state(Net)),
    "batch norm of old": (Net, random_state(Net, ["norm.num_batches_tracked"])),
    "batch norm alone": (lambda: nn.BatchNorm1d(4), random_state(lambda: nn.BatchNorm1d(4), ["num_batches_tracked"])),
    "batch norm that does not track": (lambda: nn.BatchNorm1d(4, track_running_stats=False), random_state(lambda: nn.BatchNorm1d(4))),
    "names that do not fit": (Net, random_state(Net, ["first.bias", "norm.weight"], **dict.fromkeys(["x", "first.y", "norm.a.b"], numbers(2)))),
    "a shape": (Net, random_state(Net, **{"first.bias": numbers(3)})),
    "instance norm": (normed(), NORM),
    "instance norm with averages": (normed(), NORM | {"0.running_mean": numbers(3)}),
    "instance norm that tracks": (normed(track_running_stats=True), NORM | {"0.running_mean": numbers(3), "0.running_var": numbers(3)}),
    "weight norm of old": (parametrized, WEIGHT_NORM),
    "scalar": (Scalar, {"one": numbers(1), "row": numbers(1)}),
    "scalar converted": (lambda: Scalar(torch.float16), {"one": numbers(1), "row": numbers(1)}),
    "scalar for a row": (Scalar, {"one": numbers(), "row": numbers()}),
    "scalar of rank 2": (Scalar, {"one": numbers(1, 1), "row": numbers(1)}),
    "extra": (Extra, extra()),
    "extra makes nothing": (Extra, extra("made")),
    "extra that is not there": (Extra, extra("_extra_state", "made")),
    "extra twice": (lambda: nn.Sequential(Extra(), Extra()), {f"{at}.{name}": value + at for at in (0, 1) for name, value in extra().items()}),
    "extra that nobody takes": (Plain, {"weight": numbers(2), "kept": numbers(2), "_extra_state": numbers(1)}),
    "buffers": (Plain, {"weight": numbers(2), "kept": numbers(2)}),
    "buffers that do not persist": (Plain, {"weight": numbers(2), "kept": numbers(2), "scratch": numbers(2), "none": numbers(1)}),
    "overridden": (Above, OVER),
    "overridden, and names": (Above, {name: value for name, value in OVER.items() if name != "plain.bias"} |
                              {"plain.x": numbers(1), "mine.y": numbers(1)}),
    "load_state_dict": (OwnLoad, {f"old.{name}": value for name, value in random_state(Net).items()}),
    "pre-hook": (with_pre_hook, HOOK),
    "pre-hook, and names": (with_pre_hook, {name: value for name, value in HOOK.items() if name != "0.bias"} | {"z": numbers(1)}),
    "pre-hook of the model": (with_root_hook, {f"model.{name}": value for name, value in random_state(two_layers).items()}),
    "post-hook": (lambda: with_post_hook(False), HOOK),
    "post-hook that forgives": (lambda: with_post_hook(True), HOOK),
    "a class of its own": (of_a_class, random_state(lambda: nn.Linear(2, 2))),
    "tied": (Tied, EMB),
    "tied, by the other name": (Tied, HEAD),
    "tied, both": (Tied, EMB | HEAD),
    "tied, both in another order": (Tied, HEAD | EMB),
    "tied, none": (Tied, {}),
    "tied memory": (lambda: Tied("memory"), EMB),
    "tied memory, both": (lambda: Tied("memory"), EMB | HEAD),
    "a view": (lambda: Tied("view"), EMB | HEAD),
    "a view, both": (lambda: Tied("view"), ROW | EMB | HEAD),
    "tied with a hook": (tied_with_hook, EMB),
    "tied with a hook, by the other name": (tied_with_hook, HEAD),
    "tied with a hook, both": (tied_with_hook, EMB | HEAD),
    "shared": (shared, {"a.weight": numbers(2, 2), "a.bias": numbers(2)}),
    "shared, both": (shared, {f"{key}.{name}": value for key in "ba" for name, value in random_state(lambda: nn.Linear(2, 2)).items()}),
    "half": (lambda: Net().half(), random_state(Net)),
    "not contiguous": (not_contiguous, random_state(Net)),
    "script": (lambda: torch.jit.script(two_layers()), random_state(two_layers)),
    "parallel": (lambda: nn.DataParallel(Net()), {f"module.{name}": value for name, value in random_state(Net).items()}),
    "no child": (without("1"), random_state(two_layers, **{"0.unset.a.b": numbers(2)})),
    "no child, and names": (without("1"), random_state(two_layers, ["0.bias"], **dict.fromkeys(["1", "10.weight", "0.unset", "0.x.y"], numbers(2)))),
    "no child's extra state": (without("1"), random_state(two_layers, **{"1._extra_state": numbers(1), "0._extra_state": numbers(1)})),
    "no child, with a pre-hook": (without(make=with_pre_hook), HOOK | {"0.unset.weight": numbers(2)}),
    "no child below a pre-hook": (without(make=with_root_hook), {f"model.{name}": value for name, value in random_state(two_layers).items()} |
                                  {"model.0.unset.a": numbers(1)}),
    "LSTM": (lambda: nn.LSTM(2, 3), random_state(lambda: nn.LSTM(2, 3))),
}


def outcome(load, make, *arguments):
    """What it returns or raises, what the model is then, and what hooks heard."""
    torch.manual_seed(7)
    model = make()
    said.clear()
    try:
        missing, unexpected = load(model, *arguments)
        result = (set(missing), sorted(unexpected))
    except RuntimeError:
        result = RuntimeError
    return result, {name: value.tolist() for name, value in model.state_dict().items()}, list(said)


def by_torch(model, path, strict):
    """Without safetensors' rule for tied names."""
    return model.load_state_dict({name: tensor.clone() for name, tensor in st.load_file(path).items()}, strict)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_it_is_what_load_state_dict_makes(tmp_path, case, strict):
    make, state = CASES[case]
    path = write(tmp_path / "a.safetensors", state)
    ours = outcome(st.load_model, make, path, strict)
    if not any(word in case for word in ("tied", "shared", "view")):
        result, model, heard = outcome(by_torch, make, path, strict)
        assert ours[0] == result
        assert result is RuntimeError or ours[1:] == (model, heard)
    if reference is not None:
        result, model, heard = outcome(reference, make, path, strict)
        assert ours[0] == result
        assert result is RuntimeError or ours[1:] == (model, heard)


TIES = {  # without safetensors, what it gives: missing, unexpected, and the rows that come first of what is read
    "tied": (set(), [], {"emb.weight": 1}), "tied, by the other name": (set(), [], {"emb.weight": 50}),
    "tied, both": (set(), ["head.weight"], {"emb.weight": 50}), "tied, both in another order": (set(), ["head.weight"], {"emb.weight": 50}),
    "tied, none": ({"emb.weight"}, [], {}), "tied memory": (set(), [], {"emb.weight": 1, "head.weight": 1}),
    "tied memory, both": (set(), ["head.weight"], {"emb.weight": 50, "head.weight": 50}),
    "a view": (set(), [], {"emb.weight": 1, "head.weight": 50, "row": 4}), "a view, both": (set(), ["row"], {"emb.weight": 1, "row": 4}),
    "tied with a hook": (set(), [], {"emb.weight": 1}), "tied with a hook, by the other name": (set(), [], {"emb.weight": 500}),
    "tied with a hook, both": (set(), ["head.weight"], {"emb.weight": 500}), "shared": (set(), [], {"a.weight": 1}),
    "shared, both": (set(), ["b.bias", "b.weight"], {"a.weight": 2}),
}


@pytest.mark.parametrize("case", TIES)
def test_tied_names_count_once(tmp_path, case):
    make, state = CASES[case]
    path = write(tmp_path / "a.safetensors", state)
    missing, unexpected, firsts = TIES[case]
    model = make()
    found = st.load_model(model, path, strict=False)
    assert (found[0], sorted(found[1])) == (missing, unexpected) and (type(found[0]), type(found[1])) == (set, list)
    assert {name: model.state_dict()[name].flatten()[0].item() for name in firsts} == firsts
    if missing or unexpected:
        with pytest.raises(RuntimeError, match=", ".join(sorted(missing or unexpected))):
            st.load_model(make(), path)
    else:
        assert st.load_model(make(), path) == (set(), [])


def test_a_tied_name_that_a_hook_makes(tmp_path):
    """The last that is loaded counts, whether from the file or from a hook. A name that a hook made is not unexpected."""
    def hook(module, state, prefix, *_):
        state[prefix + "weight"] = state.pop(prefix + "old")

    def make(head_first):
        model, head = nn.Module(), nn.Linear(3, 5, bias=False)
        head.register_load_state_dict_pre_hook(hook)
        for name, module in [("head", head), ("emb", nn.Embedding(5, 3))][::1 if head_first else -1]:
            model.add_module(name, module)
        head.weight = model.emb.weight
        return model

    path = write(tmp_path / "a.safetensors", EMB | {"head.old": numbers(5, 3, first=50)})
    for head_first in True, False:
        model = make(head_first)
        assert st.load_model(model, path) == (set(), [])
        assert torch.equal(model.emb.weight, numbers(5, 3, first=1 if head_first else 50))
        assert outcome(by_torch, lambda: make(head_first), path, True)[1] == {name: value.tolist() for name, value in model.state_dict().items()}


def test_a_shared_batch_norm(tmp_path):
    """One name is enough for it, too; safetensors calls the second count, which no file has, unexpected."""
    norm = nn.BatchNorm1d(4)
    state = {f"a.{name}": value for name, value in random_state(lambda: nn.BatchNorm1d(4)).items()}
    model = nn.ModuleDict({"a": norm, "b": norm})
    assert st.load_model(model, write(tmp_path / "a.safetensors", state)) == (set(), [])
    assert all(torch.equal(value, state[f"a.{name}"]) for name, value in norm.state_dict().items())


# ---------------------------------------------------------------- memory

class Seen:
    """The state dict that load_state_dict was called with."""

    def __init__(self, monkeypatch):
        self.state, true = None, nn.Module.load_state_dict

        def spy(module, state, strict=True, assign=False):
            self.state = dict(state)
            return true(module, state, strict, assign)

        monkeypatch.setattr(nn.Module, "load_state_dict", spy)


@pytest.mark.parametrize("case, by_rules", [
    ("batch norm of old", None), ("instance norm", None), ("scalar", None), ("extra that is not there", None), ("tied", None), ("half", None),
    ("overridden", ["mine.child.bias", "mine.child.weight", "mine.weight"]), ("pre-hook", ["1.bias", "1.old"]), ("post-hook", ["1.old"]),
    ("weight norm of old", ["1.bias", "1.weight_g", "1.weight_v"]), ("extra makes nothing", ["_extra_state", "child.bias", "child.weight"]),
    ("tied, both", ["emb.weight", "head.weight"]), ("a class of its own", ["weight"]), ("pre-hook of the model", None),
])
def test_no_copy_of_what_is_plain(tmp_path, monkeypatch, case, by_rules):
    """What goes through load_state_dict is below the modules that have rules, in memory of its own; the rest is the parameters themselves."""
    make, state = CASES[case]
    model, seen = make(), Seen(monkeypatch)
    st.load_model(model, write(tmp_path / "a.safetensors", state), strict=False)
    if case == "pre-hook of the model":
        by_rules = sorted(state)
    if by_rules is None:
        assert seen.state is None
        return
    targets = dict(model.named_parameters()) | dict(model.named_buffers())
    assert list(seen.state) == list(st.load_file(tmp_path / "a.safetensors"))
    copies = {name: tensor for name, tensor in seen.state.items() if tensor is not targets.get(name)}
    assert sorted(copies) == by_rules
    for tensor in copies.values():
        assert tensor.is_meta or tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("device", ["cpu", "sim", *(["cuda", 0] if torch.cuda.is_available() else [])])
def test_the_device_of_what_rules_are_for(tmp_path, device):
    path = write(tmp_path / "a.safetensors", extra())
    said.clear()
    st.load_model(Extra(), path, True, device)
    assert said == [([7.0], [1.0, 2.0], "cuda" if device in ("cuda", 0) else "cpu")]
    with pytest.raises(ValueError, match="load_model: device is 'nowhere'"):
        st.load_model(Extra(), path, device="nowhere")


# ---------------------------------------------------------------- refusals

def test_names_are_checked_before_anything_is_written(tmp_path):
    """With BatchNorm, too; not where hooks have a say, and then the error says so."""
    for case, untouched in [("names that do not fit", True), ("tied, both", True), ("extra that is not there", True), ("pre-hook, and names", False)]:
        make, state = CASES[case]
        model = make()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(RuntimeError, match="and the checkpoint do not fit") as error:
            st.load_model(model, write(tmp_path / "a.safetensors", state))
        assert untouched == all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), case
        assert untouched == ("What fits was written" not in str(error.value)), case


def test_meta_and_lazy(tmp_path):
    path = write(tmp_path / "a.safetensors", random_state(Net))
    with torch.device("meta"):
        model = Net()
    with pytest.raises(RuntimeError, match=r"first.bias is on the meta device.*to_empty\(device=...\)"):
        st.load_model(model, path)
    model.to_empty(device="cpu")
    assert st.load_model(model, path) == (set(), [])
    assert all(torch.equal(value, st.load_file(path)[name]) for name, value in model.state_dict().items())
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    state = random_state(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    assert st.load_model(lazy, write(tmp_path / "b.safetensors", state)) == (set(), [])
    assert all(torch.equal(value, state[name]) for name, value in lazy.state_dict().items())


def test_a_model_that_is_none(tmp_path):
    with pytest.raises(TypeError, match="load_model: model is dict; it takes a torch.nn.Module"):
        st.load_model({}, tmp_path / "a.safetensors")


def test_a_file_that_changes_is_an_error_and_can_be_loaded_again(tmp_path, monkeypatch):
    """The model was written to by then."""
    path = write(tmp_path / "a.safetensors", random_state(Net))
    true, model = load_into.Running.join, Net()

    def join(self):
        os.utime(path, ns=(1, 1))
        true(self)

    with monkeypatch.context() as patch:
        patch.setattr(load_into.Running, "join", join)
        with pytest.raises(sidestream.IOFailed, match="a.safetensors"):
            st.load_model(model, path)
    assert st.load_model(model, path) == (set(), [])
    assert all(torch.equal(value, st.load_file(path)[name]) for name, value in model.state_dict().items())


def test_a_hook_that_raises(tmp_path):
    def hook(*_):
        raise KeyError("mine")

    model = two_layers()
    model[1].register_load_state_dict_pre_hook(hook)
    with pytest.raises(KeyError, match="mine"):
        st.load_model(model, write(tmp_path / "a.safetensors", random_state(two_layers)))
