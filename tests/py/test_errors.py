"""Exceptions: one class a status, with the library's detail."""
import pathlib
import pickle
import re

import pytest
import sidestream
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
