"""A forked child and a process that ends leave everything alone, in whatever state the prefetcher is."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from typing import Any, Callable

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import sidestream.torch as st  # noqa: E402
from torch_help import Indexed, fake, feeder, run_python, run_torch, wrong  # noqa: E402, F401


def in_child(check: Callable[[], None]) -> None:
    """Runs it in a forked child, which then ends as multiprocessing's do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking a process with threads: the point here
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(20)
            check()
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_child_is_told_and_the_parent_goes_on(feeder: Any) -> None:
    prefetcher = st.Prefetcher(Indexed(30), device="sim")
    batches = iter(prefetcher)
    batch = next(batches)

    def child() -> None:
        for call in (lambda: next(batches), lambda: iter(prefetcher), prefetcher.close):
            with pytest.raises(RuntimeError, match="before a fork"):
                call()

    in_child(child)
    assert wrong(batch, 0) == 0
    for number, batch in enumerate(batches, 1):
        assert wrong(batch, number) == 0
    assert number == 29


def test_what_dies_in_a_child_changes_nothing_in_the_parent(feeder: Any) -> None:
    things: dict[str, Any] = {"prefetcher": st.Prefetcher(Indexed(30), device="sim")}
    things["batches"] = iter(things["prefetcher"])
    things["batch"] = next(things["batches"])
    in_child(things.clear)
    batch = things["batch"]
    assert wrong(batch, 0) == 0
    for number, batch in enumerate(things["batches"], 1):
        assert wrong(batch, number) == 0
        things.pop("batch", None)
    assert number == 29


def test_a_child_makes_its_own(feeder: Any) -> None:
    batches = iter(st.Prefetcher(Indexed(30), device="sim"))
    next(batches)

    def child() -> None:
        got = [wrong(batch, number) for number, batch in enumerate(st.Prefetcher(Indexed(10), device="sim"))]
        assert got == [0] * 10

    in_child(child)


START = """
import sys, threading, time, warnings
import torch
import sidestream.torch as st
warnings.simplefilter("ignore")
class Slow:
    def __iter__(self):
        for i in range(100):
            yield torch.full((1 << 16,), float(i))
            time.sleep(0.002)
p = st.Prefetcher(Slow(), device="sim")
"""
EXITS = {
    "batch alive": "b = next(iter(p))",
    "iteration alive": "it = iter(p); b = next(it)",
    "batches held": "it = iter(p); kept = [next(it) for _ in range(5)]",
    "in a cycle": "it = iter(p); loop = [p, it, next(it)]; loop.append(loop)",
    "in a thread": "threading.Thread(target=lambda: [x for x in p], daemon=True).start(); time.sleep(0.05)",
    "in a thread that ends": "t = threading.Thread(target=lambda: [x for x in p]); t.start()",
    "exit in the loop": "for b in p: sys.exit(0)",
    "in the reader": "import atexit; it = iter(p); next(it); atexit.register(lambda: time.sleep(0.05))",
    "a name in a module": "sys.modules['torch'].kept = (p, iter(p))",
    "workers": "from torch.utils.data import DataLoader\nit = iter(st.Prefetcher(DataLoader(torch.zeros(400, 8), batch_size=4, num_workers=2),"
               " device='sim')); b = next(it)",
    "eight of them": "its = [iter(st.Prefetcher(Slow(), device='sim')) for _ in range(8)]; bs = [next(i) for i in its]",
    "forked": "import os; it = iter(p); b = next(it); pid = os.fork()\nif pid: os.waitpid(pid, 0)",
}


@pytest.mark.parametrize("state", EXITS)
def test_exit(state: str) -> None:
    done = run_torch(START + EXITS[state])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_exception_ends_the_process_as_usual() -> None:
    done = run_python(START + "for b in p: raise ValueError('mine')")
    assert done.returncode == 1 and done.stderr.rstrip().endswith("ValueError: mine")


def test_interrupted_while_it_waits_for_the_loader() -> None:
    code = START + """
class Stalled:
    def __iter__(self):
        yield torch.zeros(3)
        time.sleep(3)
        yield torch.zeros(3)
it = iter(st.Prefetcher(Stalled(), device="sim"))
next(it)
print("ready", flush=True)
next(it)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode in (1, -signal.SIGINT, 130) and said.rstrip().endswith("KeyboardInterrupt")
