"""The package imports by itself, quietly, and is the version that the build is."""
import pathlib
import pydoc
import re
import subprocess
import sys

import pytest
import sidestream

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)


def test_version() -> None:
    build = re.search(r"^    version: '(.*)'", (ROOT / "meson.build").read_text(), re.MULTILINE)
    assert build is not None and sidestream.__version__ == build[1]


def test_import_is_quiet_and_light() -> None:
    done = run_python("import sys, sidestream; print(sorted({'numpy', 'torch'} & set(sys.modules)))")
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_import_starts_no_thread() -> None:
    done = run_python("import os, sidestream; print(len(os.listdir('/proc/self/task')))")
    assert done.stdout == "1\n"


def test_objects_say_what_they_are() -> None:
    d = sidestream.Device("sim")
    stream, log = sidestream.Stream(d), sidestream.Log(d)
    slots = sidestream.Slots(d, count=2, slot_bytes=8)
    slot = slots.acquire(stream)
    line = sidestream.Pipeline(d, [b"1234"])
    item = line.next(stream)
    assert list(map(repr, (stream, stream.record(True), log, d.pool, slots, slot, line, item))) == [
        "<sidestream.Stream of sim:h200>", "<sidestream.Event of sim:h200, timing>", "<sidestream.Log of sim:h200>",
        "<sidestream.PinnedPool of sim:h200>", "<sidestream.Slots: ring of 2 x 8 bytes, device memory of sim:h200>",
        "<sidestream.Slot 0: key 0, 8 bytes, being written>", "<sidestream.Pipeline on sim:h200>", "<sidestream.Item 0: 4 bytes>"]
    slot.publish()
    line.done(item, stream)
    line.close()
    d.close()
    assert list(map(repr, (slot, slots.take(0, stream), item, line))) == [
        "<sidestream.Slot 0: key 0, 8 bytes, done>", "<sidestream.Slot 0: key 0, 8 bytes, being read>", "<sidestream.Item 0: 4 bytes, done>",
        "<sidestream.Pipeline on sim:h200, closed>"]


def test_every_public_object_has_a_text_of_its_own() -> None:
    kinds = [kind for kind in map(vars(sidestream).get, sidestream.__all__) if isinstance(kind, type) and not issubclass(kind, Exception)]
    assert len(kinds) >= 10 and [kind for kind in kinds if kind.__repr__ is object.__repr__] == []


def test_help_is_a_page_and_the_classes() -> None:
    """The head names all that there is: each class, function and exception."""
    text = pydoc.render_doc(sidestream, renderer=pydoc.plaintext)
    assert len(text.splitlines()) < 800
    head = sidestream.__doc__ or ""
    public = [name for name, what in vars(sidestream).items() if getattr(what, "__module__", "").startswith("sidestream") and name != "annotations"]
    assert len(head.splitlines()) < 70 and max(map(len, head.splitlines())) <= 145
    assert len(public) > 35 and [name for name in public if not re.search(rf"\b{name}\b", head)] == []
    assert text.count("inherited from builtins.BaseException") <= 3
    assert [line for line in text.splitlines() if len(line) > 155 and " |  Pipeline(device, source" not in line] == []


@pytest.mark.parametrize("use", ["from sidestream.torch import Prefetcher", "sidestream.torch.pin"])
def test_without_pytorch_it_says_what_to_install(use: str) -> None:
    """The package itself imports without; its names do not."""
    done = run_python("import sys\nsys.modules['torch'] = None\nimport sidestream.torch\n"
                      f"try:\n    {use}\nexcept ImportError as error:\n    print(error, error.name, error.__cause__)")
    said = "sidestream.torch needs PyTorch 2.9 or newer, and this Python has none: pip install 'torch>=2.9', as the extra [torch] of the package does"
    assert done.stdout == f"{said} torch None\n"
