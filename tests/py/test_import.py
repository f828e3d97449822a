"""The package imports by itself, quietly, and is the version that the build is."""
import pathlib
import re
import subprocess
import sys

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
