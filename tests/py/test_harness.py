"""The sanitizers' run sees what it is for."""
import os
import pathlib
import subprocess
import sys

import pytest

LEAKS = "SIDESTREAM_TEST_LEAKS"
LEAKING = """
import ctypes
from sidestream import _native

def test_leak() -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_native.Stream(_native.Device("sim"))))
"""


@pytest.mark.skipif(LEAKS not in os.environ, reason="only in the variant py-asan")
@pytest.mark.parametrize("leaking", [True, False])
def test_leak_is_told(tmp_path: pathlib.Path, leaking: bool) -> None:
    program = tmp_path / "test_leaking.py"
    program.write_text(LEAKING if leaking else LEAKING.replace("ctypes.pythonapi.Py_IncRef", "id"))
    env = os.environ | {"PYTHONPATH": f"{pathlib.Path(__file__).parent}:{os.environ['PYTHONPATH']}"}
    done = subprocess.run([sys.executable, "-m", "pytest", "-c", os.devnull, "-p", "conftest", "-p", "no:cacheprovider", str(program)],
                          env=env, text=True, capture_output=True)
    assert done.returncode == leaking, done.stdout + done.stderr
    assert ("native/stream.c" in done.stdout) == leaking


@pytest.mark.skipif(LEAKS not in os.environ, reason="only in the variant py-asan")
def test_use_after_free_is_told() -> None:
    done = subprocess.run([sys.executable, "-c", """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
at = libc.malloc(64)
libc.free(ctypes.c_void_p(at))
ctypes.memmove(ctypes.create_string_buffer(64), at, 64)
"""], text=True, capture_output=True)
    assert done.returncode != 0 and "heap-use-after-free" in done.stderr


@pytest.mark.skipif("TSAN_OPTIONS" not in os.environ, reason="only in the variant py-tsan")
def test_race_is_told() -> None:
    done = subprocess.run([sys.executable, "-c", """
import ctypes, threading
data, other = ctypes.create_string_buffer(1 << 20), ctypes.create_string_buffer(1 << 20)
copy = ctypes.CDLL(None).memmove  # lets go of the GIL
def run():
    for _ in range(200):
        copy(data, other, len(data))
threads = [threading.Thread(target=run) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""], text=True, capture_output=True, env=os.environ | {"TSAN_OPTIONS": "halt_on_error=1"})
    assert done.returncode == 66 and "data race" in done.stderr
