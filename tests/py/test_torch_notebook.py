"""The notebook runs from top to bottom, and shows what it says: serial, serial, overlapped."""
import json
import pathlib
import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("numpy", reason="NumPy is not installed")

HERE = pathlib.Path(__file__).resolve().parent
NOTEBOOK = HERE.parent.parent / "examples/python/overlap.ipynb"


@pytest.fixture(scope="module")
def shown():
    done = subprocess.run([sys.executable, HERE / "notebook.py", NOTEBOOK], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


def test_format():
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4 and len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert not any(output["output_type"] == "error" for cell in notebook["cells"] for output in cell.get("outputs", []))


def test_the_cure_overlaps(shown):
    times = {name: float(ms) for name, ms in re.findall(r"^(.+): ([\d.]+) ms, compute busy", shown, re.MULTILINE)}
    assert list(times)[:4] == [".cuda()", "pinned, one stream", "textbook", "textbook, reordered"]
    assert times["textbook"] > 0.95 * times["pinned, one stream"]
    assert times["textbook, reordered"] < 0.85 * times["textbook"]
    assert times[".cuda()"] > times["pinned, one stream"]
    assert "equal: True" in shown and "verdict" in shown


def test_drawings(shown):
    drawings = re.findall(r"<svg .*</svg>", shown)
    assert len(drawings) >= 4
    if not torch.cuda.is_available():
        assert all("simulated" in drawing for drawing in drawings)
    for drawing in drawings:
        assert len(re.findall(r"<rect ", drawing)) >= 16


def test_a_race_is_found():
    """The check behind `show`: without the waits, results are wrong for some seed of the software device."""
    code = """if 1:
        import sys
        sys.path[:0] = sys.argv[1:]
        import notebook
        notebook.stand_in_for_ipython([])
        import sidestream, timelines
        def careless(b):
            for i in range(b.n):
                b.copy(i)
                b.multiply(i)
        real, wrong = sidestream.Device, 0
        for seed in range(20):
            sidestream.Device = lambda spec: real(f"{spec},seed={seed}")
            try:
                timelines.Simulated(64).trace(careless)
            except AssertionError:
                wrong += 1
        print(wrong)"""
    done = subprocess.run([sys.executable, "-c", code, HERE, NOTEBOOK.parent], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and int(done.stdout) > 0, done.stderr
