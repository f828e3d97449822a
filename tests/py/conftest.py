"""Run: `tools/build py` (again after changing C), then `PYTHONPATH=build/test-py/python python3 -m pytest tests/py/test_import.py`.

All of them: `tools/run-tests --variant py --variant py-asan --variant py-tsan`. With another Python: SIDESTREAM_TEST_PYTHON=PROGRAM.
"""
import ctypes
import gc
import os
import re
import tempfile

import pytest

# A leak that LeakSanitizer tells (indirect: a lost Python object has it), by the function that asked for the memory: one of the module or
# of the library in it.
LEAK = re.compile(r"^(?:Direct|Indirect) leak of .*\n +#0 .*\n"
                  r" +#1 .*/(?:python/native|src/(?:base|core|load|device/\w+))/.*\n(?: +#.*\n)*", re.MULTILINE)


def leak_report() -> str:
    """What LeakSanitizer tells now; it writes to the descriptor 2."""
    with tempfile.TemporaryFile() as told:
        kept = os.dup(2)
        os.dup2(told.fileno(), 2)
        try:
            ctypes.CDLL(None).__lsan_do_recoverable_leak_check()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        told.seek(0)
        return told.read().decode(errors="replace")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under a sanitizer, tests that put a feeder in Python in the native one's place would look at nothing that it sees."""
    if not os.environ.get("SIDESTREAM_TEST_SANITIZER"):
        return
    blind = [item for item in items if "fake" in getattr(item, "fixturenames", ())
             or getattr(getattr(item, "callspec", None), "params", {}).get("feeder") == "fake"]
    config.hook.pytest_deselected(items=blind)
    items[:] = [item for item in items if item not in blind]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Under LeakSanitizer: the tests have let go of all memory, but for what something points at. Asked here and not at exit, when
    nothing that ends gives memory back any more."""
    if not os.environ.get("SIDESTREAM_TEST_LEAKS"):
        return
    gc.collect()
    leaks = LEAK.findall(leak_report())
    if leaks:
        print("\n\n" + "\n".join(leaks))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
