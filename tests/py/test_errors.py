"""Exceptions: one class a status, with the library's detail."""
import pathlib
import pickle
import re
from collections.abc import Callable

import pytest
import sidestream
from sidestream import _native
from sim import device

HEADER = pathlib.Path(__file__).resolve().parent.parent.parent / "include/sidestream.h"
CLASSES = {name: kind for name, kind in vars(sidestream).items() if isinstance(kind, type) and issubclass(kind, sidestream.Error)}
STATUSES = dict(re.findall(r"X\((SIDE_\w+), (-?\d+),", HEADER.read_text()))

NAMED = {"INVALID": "InvalidArgument", "NO_MEMORY": "OutOfHostMemory", "NO_DEVICE_MEMORY": "OutOfDeviceMemory", "OVER_BUDGET": "OverBudget",
         "NO_DEVICE": "NoDevice", "DRIVER_TOO_OLD": "DriverTooOld", "UNSUPPORTED": "Unsupported", "NO_LIBRARY": "NoLibrary",
         "DEVICE_ERROR": "DeviceError", "STUCK": "Stuck", "CANCELLED": "Cancelled", "WOULD_DEADLOCK": "WouldDeadlock", "FORKED": "Forked",
         "IO": "IOFailed", "CALLBACK": "CallbackFailed", "STALE": "Stale", "NOT_FOUND": "NotFound", "STATE": "WrongState", "TOO_LARGE": "TooLarge",
         "SYSTEM": "SystemFailed", "DEVICE_LOST": "DeviceLost"}


def test_every_status_has_a_class() -> None:
    assert {f"SIDE_{name}" for name in NAMED} | {"SIDE_AGAIN", "SIDE_END"} == set(STATUSES)
    assert set(NAMED.values()) | {"Error", "NotReady", "NoMoreItems"} == set(CLASSES)


@pytest.mark.parametrize("name", sorted(set(NAMED) - {"DEVICE_LOST"}))
def test_class_by_status(name: str) -> None:
    with pytest.raises(sidestream.Error) as told:
        device(fail=2, fail_status=name.lower()).alloc(8)
        device(fail=1, fail_status=name.lower())
    error = told.value
    assert type(error) is CLASSES[NAMED[name]]
    assert (error.status, error.status_name, error.os_errno, error.device_code) == (int(STATUSES[f"SIDE_{name}"]), f"SIDE_{name}", 0, 0)
    assert error.where.startswith("sim.") and str(error)


def test_bases() -> None:
    for kind in CLASSES.values():
        assert issubclass(kind, RuntimeError) and kind.__doc__ and kind.__module__ == "sidestream"
    for kind, also in ((sidestream.InvalidArgument, ValueError), (sidestream.TooLarge, ValueError), (sidestream.NotFound, LookupError),
                       (sidestream.OutOfHostMemory, MemoryError), (sidestream.DriverTooOld, sidestream.NoDevice),
                       (sidestream.DeviceLost, sidestream.DeviceError)):
        assert issubclass(kind, also)
    assert not issubclass(sidestream.Stuck, ValueError)


def test_made_by_hand() -> None:
    error = sidestream.Stuck("by hand")
    assert (error.status, error.status_name, error.where, error.os_errno, error.device_code) == (0, "", "", 0, 0) and str(error) == "by hand"


def test_pickles() -> None:
    with pytest.raises(sidestream.Error) as told:
        sidestream.Device("sim:nothing")
    again = pickle.loads(pickle.dumps(told.value))
    assert type(again) is sidestream.InvalidArgument and str(again) == str(told.value) and again.status == -1 and again.where == told.value.where


def test_errno() -> None:
    with pytest.raises(sidestream.IOFailed, match="descriptor") as told:
        sidestream.Pipeline(device(), (9999, 0, 100), lambda s, i: None, item_bytes=10).run()
    assert told.value.os_errno == 9


# ---------------------------------------------------------------- arguments

D = sidestream.Device("sim")
S = sidestream.Stream(D)
B = D.alloc(8)


@pytest.mark.parametrize("call,error,said", [
    (lambda: S.synchronize("30"), TypeError, "timeout is '30'; it takes a number"),
    (lambda: S.synchronize(timeout=None), TypeError, "timeout is None; it takes a number"),
    (lambda: S.record().wait("3"), TypeError, "timeout is '3'; it takes a number"),
    (lambda: S.copy(B, b"12", nbytes="3"), TypeError, "nbytes is '3'; it takes a whole number, or None"),
    (lambda: S.copy(B, b"12", dst_offset=1.5), TypeError, "dst_offset is 1.5; it takes a whole number"),
    (lambda: S.affine(B, B, scale="2"), TypeError, "scale is '2'; it takes a number"),
    (lambda: S.matmul(B, B, B, 3), TypeError, "math is 3; it takes text"),
    (lambda: sidestream.Device(5), TypeError, "spec is 5; it takes text"),
    (lambda: sidestream.Stream.wrap(D, "5"), TypeError, "native is '5'; it takes a whole number"),
    (lambda: D.empty("8"), TypeError, "shape has '8' in it; it takes a whole number"),
    (lambda: D.empty((2, 1.5)), TypeError, "shape has 1.5 in it; it takes a whole number"),
    (lambda: B.view(offset="3"), TypeError, "offset is '3'; it takes a whole number"),
    (lambda: sidestream.Slots(D, count="2", slot_bytes=8), TypeError, "count is '2'; it takes a whole number"),
    (lambda: sidestream.Slots(D, count=-2, slot_bytes=8), ValueError, "count is -2; it takes 0 and more"),
    (lambda: sidestream.Slots(D, count=1 << 40, slot_bytes=8), ValueError, "count is 1099511627776; it takes 0 and more, at most 4294967295"),
    (lambda: sidestream.Slots(D, count=2, slot_bytes=8).take(-1), ValueError, "key is -1; it takes 0 and more"),
    (lambda: sidestream.Pipeline(D, [b"1"], depth="3"), TypeError, "depth is '3'; it takes a whole number"),
    (lambda: sidestream.Pipeline(D, [b"1"], timeout="3"), TypeError, "timeout is '3'; it takes a number"),
    (lambda: sidestream.PinnedPool(D, budget_bytes="2GiB"), TypeError, "budget_bytes is '2GiB'; it takes a whole number"),
    (lambda: sidestream.bound("1", 2, 3), TypeError, "n is '1'; it takes a whole number"),
])
def test_arguments_of_a_wrong_type_are_named(call: Callable[[], object], error: type[Exception], said: str) -> None:
    with pytest.raises(error) as told:
        call()
    assert said in str(told.value)


# ---------------------------------------------------------------- Python's words

def calls() -> list[str]:
    """The library's, that the module uses."""
    folder = HEADER.parent.parent / "python/native"
    used = re.findall(r"\bside_\w+(?=\()", "".join(path.read_text() for path in sorted(folder.glob("*.c"))))
    areas = ("side_pipeline", "side_slots", "side_stream", "side_event", "side_pool", "side_memory")
    return sorted(name for name in set(used) if name.startswith(areas))


@pytest.mark.parametrize("name", calls())
def test_no_call_keeps_its_name_in_c(name: str) -> None:
    words = _native._test_words(f"call {name} first").split(" ")
    assert words[0] == "call" and words[2] == "first" and "side_" not in words[1]


@pytest.mark.parametrize("text,said", [
    ("call side_pipeline_done for it first", "call Pipeline.done for it first"),
    ("options.compute is NULL: this pipeline is for side_pipeline_next", "compute is None: this pipeline is for Pipeline.next"),
    ("side_slots_acquire_for, side_slots_try_take; side_slots_release", "Slots.acquire, Slots.take; Slot.release"),
    ("timeout_s is -1; SIDE_STUCK after it, SIDE_POOL_DRIVER is none", "timeout is -1; Stuck after it, SIDE_POOL_DRIVER is none"),
    ('"sim:NULL,options.x": NULLs (NULL)', '"sim:NULL,options.x": NULLs (None)'),
    ("pass NULL for a new one", "pass 0 for a new one"),
    ("side_device_open: inside_pool_x, outside", "Device: inside_pool_x, outside"),
    ("", ""),
])
def test_words(text: str, said: str) -> None:
    assert _native._test_words(text) == said
    assert len(_native._test_words(text * 50)) == min(399, len(said) * 50)


def test_errors_speak_python() -> None:
    d = device()
    line = sidestream.Pipeline(d, [b"12345678"] * 9)
    stream = sidestream.Stream(d)
    held = [line.next(stream), line.next(stream)]
    with pytest.raises(sidestream.WouldDeadlock, match=r"call Pipeline\.done for it first") as told:
        while len(held) < 9:
            held.append(line.next(stream))
    assert told.value.where == "Pipeline.next"
    with pytest.raises(sidestream.WrongState, match="compute is None: this pipeline is for Pipeline.next"):
        sidestream.Pipeline(d, [b"1"]).run()
    with pytest.raises(sidestream.InvalidArgument, match="pass 0 for a new one"):
        sidestream.Stream.wrap(d, 5)
