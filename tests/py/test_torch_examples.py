"""The examples run, and say the same with and without; what the docs page shows compiles, and its recipes run where their libraries are."""
import difflib
import pathlib
import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples/python"
PAGE = ROOT / "docs/feed-a-pytorch-loop.md"


def run_example(name, *options):
    done = subprocess.run([sys.executable, EXAMPLES / name, *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


def test_one_line_is_changed():
    before, after = ((EXAMPLES / name).read_text().partition('"""\n')[2].splitlines() for name in ("train_before.py", "train_after.py"))
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-" and line[2:].strip()]
    assert [line[0] for line in changed] == ["+", "-", "+", "+"], changed
    assert changed[0] == "+ from sidestream.torch import Prefetcher" and changed[3] == "+ print(loader.stats())"
    assert changed[1].startswith("- loader = DataLoader(") and changed[2].startswith("+ loader = Prefetcher(DataLoader(")


def test_training_is_the_same_before_and_after():
    before, after = (run_example(name, "--steps=5", "--batch=16") for name in ("train_before.py", "train_after.py"))
    losses = re.findall(r"epoch \d: loss .*", before)
    assert len(losses) == 2 and losses == re.findall(r"epoch \d: loss .*", after)
    assert "10 batches on" in after and "verdict" in after


def test_inference():
    assert "results are equal\n" in run_example("infer.py", "--batches=6", "--batch=4")


def test_classic():
    assert "4 matrices of 64 x 64: results are equal" in run_example("classic.py", "--dim=64", "--items=4")


def test_each_takes_a_device(tmp_path):
    assert "4 matrices of 64 x 64: results are equal" in run_example("classic.py", "--dim=64", "--items=4", "--device=sim:t4")
    assert "results are equal\n" in run_example("infer.py", "--batches=6", "--batch=4", "--device=cpu")
    assert "on sim:t4" in run_example("train_after.py", "--steps=3", "--batch=4", "--device=sim:t4")
    run_example("train_before.py", "--steps=3", "--batch=4", "--device=sim:t4")


def test_timelines_say_where_they_went(tmp_path):
    said = run_example("timelines.py", "--device=sim", f"--out={tmp_path}/new")
    drawn = re.findall(r"drawn in (.*)", said)
    assert drawn == [f"{tmp_path}/new/timeline-{name}.svg" for name in ("one-by-one", "overlapped")]
    assert all(pathlib.Path(path).read_text().startswith("<svg") for path in drawn)
    busy = [int(percent) for percent in re.findall(r"compute busy (\d+) %", said)]
    assert busy[1] > 1.5 * busy[0]


BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0][:40])
def test_what_the_page_shows_compiles(block):
    compile(block, "docs page", "exec")


def recipe(name):
    """The recipe's code, with a software device in place of a GPU."""
    [block] = re.findall(rf"\*\*{name}\.\*\*.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return re.sub(r"device=[\w.]+(?=\)\n)", 'device="sim"', block)


@pytest.fixture
def one_process(monkeypatch, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.full((3,), float(i)), i % 2


def common_names(**more):
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    from sidestream.torch import Prefetcher

    model = torch.nn.Linear(3, 2)
    names = dict(DataLoader=DataLoader, DistributedSampler=DistributedSampler, DistributedDataParallel=DistributedDataParallel,
                 Prefetcher=Prefetcher, torch=torch, dataset=Data(), batch_size=4, epochs=2, model=model,
                 optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_of=torch.nn.functional.cross_entropy)
    return names | more


@pytest.mark.filterwarnings("ignore")  # of the libraries
def test_recipe_ddp(one_process):
    code = recipe("DDP").replace("torch.cuda.set_device(local_rank)\n", "").replace("num_workers=8))", 'num_workers=0), device="sim")')
    code = code.replace("model.cuda(), device_ids=[local_rank]", "model")
    assert "cuda" not in code
    seen = []

    def train_step(model, images, labels):
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        seen.append(images[:, 0].tolist())

    exec(code, common_names(train_step=train_step))
    epochs = [sum(seen[:3], []), sum(seen[3:], [])]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs) and epochs[0] != epochs[1]


@pytest.mark.filterwarnings("ignore")
def test_recipe_accelerate(monkeypatch):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    names = common_names(accelerator=accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3))
    before = names["model"].weight.detach().clone()
    exec(recipe("accelerate").replace("num_workers=8", "num_workers=0"), names)
    assert not torch.equal(before, names["model"].weight)


@pytest.mark.filterwarnings("ignore")
def test_recipe_lightning(tmp_path):
    lightning = pytest.importorskip("pytorch_lightning", reason="Lightning is not installed")
    names = common_names(LightningDataModule=lightning.LightningDataModule)
    exec(recipe("Lightning").replace("num_workers=8", "num_workers=0"), names)
    seen, loaders = [], set()

    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = names["model"]

        def training_step(self, batch, index):
            seen.append(batch[0][:, 0].tolist())
            loaders.add(self.trainer.train_dataloader)
            return torch.nn.functional.cross_entropy(self.inner(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = names["Data"]()
    data.train = Data()
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                                enable_model_summary=False, default_root_dir=tmp_path)
    trainer.fit(Net(), data)
    assert sorted(sum(seen, [])) == sorted(2 * list(range(12)))
    assert [loader.stats().held_copies for loader in loaders] == [0]
