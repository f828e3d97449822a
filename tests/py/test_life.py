"""Fork and exit with batches, copies and blocked threads about: nothing crashes, nothing hangs, nothing is said."""
import subprocess
import sys
import textwrap

import pytest

np = pytest.importorskip("numpy")

BEGIN = """
import ctypes, gc, os, sys, threading, time
import numpy as np
from sidestream import _native

class Capsule:
    def __init__(self, capsule): self.capsule = capsule
    def __dlpack__(self, **_): return self.capsule
    def __dlpack_device__(self): return (1, 0)

def to_numpy(capsule): return np.from_dlpack(Capsule(capsule))

device = _native.Device("sim")
block = np.full(1 << 20, 7, np.uint8)
LEAVES = [(0, 1, 8, (4096,), None), (4096, 1, 8, (4096,), None)]

def feeder(slots=2, **options): return _native.Feeder(device, slots=slots, slot_bytes=1 << 20, **options)
def submit(f): return f.submit([(block.ctypes.data, block.nbytes, 0)], block)
"""


def run(code: str, exit_code: int = 0) -> str:
    """What the program printed. It ends by itself, and says nothing on stderr but Python's own advice on forks."""
    options = ["-X", "faulthandler", "-W", "ignore:This process:DeprecationWarning"]
    done = subprocess.run([sys.executable, *options, "-c", BEGIN + textwrap.dedent(code)], text=True, capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (exit_code, ""), f"exit code {done.returncode}\n{done.stderr}"
    return done.stdout


EXITS = {
    "batches alive": """
        f = feeder()
        submit(f); submit(f)
        loan, tensors = f.next(-1, LEAVES, to_numpy)
        other, more = f.next(-1, LEAVES, to_numpy)
        """,
    "batches alive, feeder gone": """
        f = feeder()
        submit(f)
        loan, tensors = f.next(-1, LEAVES, to_numpy)
        del f
        """,
    "in a reference cycle": """
        f = feeder()
        submit(f)
        class Ring: pass
        ring = Ring()
        ring.ring, ring.batch, ring.feeder = ring, f.next(-1, LEAVES, to_numpy), f
        del f, ring
        """,
    "copies in flight": """
        f = feeder(slots=8, queue=8)
        for _ in range(8): submit(f)
        """,
    "copies to the host in flight": """
        f, stream = feeder(), _native.Stream(device)
        submit(f)
        loan, _ = f.next(stream, None, None)
        buffer = _native.HostBuffer(device, 1 << 20)
        event = _native.copy_d2h(device, stream, -1, buffer, loan.data, 1 << 20)
        kept = buffer.capsule(1, 8, (1 << 20,))
        """,
    "a thread in submit": """
        f = feeder(slots=1, queue=1)
        def fill():
            try:
                while True: submit(f)
            except _native.Cancelled: pass
        threading.Thread(target=fill, daemon=True).start()
        while f.stats()["submitted"] < 1: time.sleep(0.001)
        """,
    "a thread in next": """
        f = feeder()
        def drain():
            try: f.next(-1, None, None)
            except _native.Cancelled: pass
        threading.Thread(target=drain, daemon=True).start()
        time.sleep(0.05)
        """,
    "a thread in wait_given_back": """
        f = feeder()
        submit(f)
        batch = f.next(-1, LEAVES, to_numpy)
        threading.Thread(target=f.wait_given_back, args=(1, 1e6), daemon=True).start()
        time.sleep(0.05)
        """,
    "threads that submit, take and let go": """
        f = feeder(slots=4)
        def submitting():
            try:
                while True: submit(f)
            except _native.Cancelled: pass
        held = []
        def taking():
            try:
                while True: held.append(f.next(-1, LEAVES, to_numpy))
            except _native.Cancelled: pass
        def dropping():
            while True:
                if held: held.pop(0)
                else: time.sleep(0)
        for target in (submitting, taking, dropping): threading.Thread(target=target, daemon=True).start()
        time.sleep(0.2)
        """,
    "the last batch dies while modules are torn down": """
        f = feeder()
        submit(f)
        sys.modules["sys"].kept = f.next(-1, LEAVES, to_numpy) + (f,)
        """,
}


@pytest.mark.parametrize("what", list(EXITS))
def test_exit(what: str) -> None:
    assert run(EXITS[what] + '\n        print("end")\n') == "end\n"


def test_exit_by_exception() -> None:
    done = subprocess.run([sys.executable, "-c", BEGIN + textwrap.dedent(EXITS["batches alive"]) + "\nsys.exit(3)"], capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (3, b"")


def test_hooks_that_run_later_are_refused_not_hung() -> None:
    """atexit runs last in, first out: a hook from before the import comes after ours, which ends our threads."""
    code = """
import atexit, sys, time
def late():
    for call in (lambda: f.next(-1, None, None), lambda: f.submit([(block.ctypes.data, 16, 0)], block)):
        try: call()
        except RuntimeError as e: print(type(e).__name__)
    for _ in range(500):  # a thread that was joined is listed for a moment more
        left = sum(name(task).startswith("side-") for task in os.listdir("/proc/self/task"))
        if left == 0: break
        time.sleep(0.01)
    print(left)
def name(task):
    try: return open(f"/proc/self/task/{task}/comm").read()
    except OSError: return ""
atexit.register(late)
""" + BEGIN + """
f = feeder()
submit(f)
"""
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.split()) == 3 and done.stdout.endswith("\n0\n")  # our threads have ended


def test_fork_with_batches() -> None:
    """A child drops what it inherited, and makes its own; the parent's batches stay as they are."""
    code = """
        f = feeder()
        submit(f); submit(f)
        loan, tensors = f.next(-1, LEAVES, to_numpy)
        pid = os.fork()
        if pid == 0:
            tensors.clear()
            for call in (lambda: submit(f), lambda: f.next(-1, None, None), lambda: loan.use(-1), f.held, f.close):
                try: call()
                except _native.Forked: pass
                else: os._exit(1)
            del loan, f
            gc.collect()
            if "tsan" in os.environ.get("LD_PRELOAD", ""): os._exit(0)  # it stops where a child of many threads starts one
            device = _native.Device("sim")
            g = feeder()
            submit(g)
            own, more = g.next(-1, LEAVES, to_numpy)
            ok = (more[1] == 7).all()
            del more
            os._exit(0 if ok and g.held() == 0 else 2)
        assert os.waitpid(pid, 0)[1] == 0
        assert f.held() == 1 and loan.alive and (tensors[0] == 7).all()
        tensors.clear()
        assert f.held() == 0
        again, _ = f.next(-1, None, None)
        assert again.number == 1
        print("end")
        """
    assert run(code) == "end\n"


def test_forked_child_that_exits_as_python_does() -> None:
    code = """
        f = feeder(slots=4)
        def submitting():
            try:
                while True: submit(f)
            except _native.Cancelled: pass
        threading.Thread(target=submitting, daemon=True).start()
        for _ in range(5):
            batch = f.next(-1, LEAVES, to_numpy)
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0: sys.exit(0)
            assert os.waitpid(pid, 0)[1] == 0
        print("end")
        """
    assert run(code) == "end\n"


def test_multiprocessing_workers() -> None:
    """As a DataLoader's workers: forked while batches are held."""
    code = """
        import multiprocessing
        f = feeder()
        submit(f)
        batch = f.next(-1, LEAVES, to_numpy)
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(abs, range(-9, 0)) == list(range(9, 0, -1))
        assert f.held() == 1
        print("end")
        """
    assert run(code) == "end\n"


def test_torch_lets_go_in_its_own_threads() -> None:
    pytest.importorskip("torch")
    code = """
        import torch
        f = feeder()
        w = torch.ones(1024, requires_grad=True)
        for n in range(20):
            submit(f)
            loan, (x,) = f.next(-1, [(0, 2, 32, (1024,), None)], torch._C._from_dlpack)
            loss = (w * x).sum()
            del x
            threads = [threading.Thread(target=loss.backward)]
            del loss
            for t in threads: t.start()
            for t in threads: t.join()
            del threads, t
            assert not loan.alive, n
        print("end")
        """
    assert run(code) == "end\n"
