"""One process of the load benchmarks: imports, brings the device up, loads once, verifies; the same again, where the first load was no longer than
SLOW_S and LOADS says 2. Between them the tensors are dropped; PyTorch's allocator keeps
their memory, as in any program, and the next load takes it. For compare.py, which times it.

    child.py METHOD FOLDER DEVICE LOADS

Prints one JSON object a line: {"event": ..., "at": seconds of CLOCK_MONOTONIC, ...}. Events: imported, context, loading, loaded, verified (these
three for each load), done; or failed, with the reason.
"""
from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import pathlib
import sys
import time

SLOW_S = 2.0
# Memory that a loader gave back to the driver is cleared on the engine that copies, 2.3 ms a GiB on an H200: not in the next load's time.
SETTLE_S = 0.5


def say(event: str, **more: object) -> None:
    print(json.dumps({"event": event, "at": time.monotonic()} | more), flush=True)


def versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "numpy", "sidestream", "safetensors", "fastsafetensors", "runai-model-streamer", "instanttensor"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def context_up(device: str) -> None:
    import torch
    if device.startswith("cuda"):
        torch.empty(1, device=device)
        torch.cuda.synchronize()


def wait(device: str) -> None:
    import torch
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def own_report(name: str) -> dict[str, object]:
    """What our loader says of its last load."""
    if not name.startswith("sidestream"):
        return {}
    from sidestream.torch import last_load
    report = last_load()
    return {"report": report} if report is not None else {}


def main() -> None:
    name, folder, device, loads = sys.argv[1:5]
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    import torch

    import data
    import methods
    package = methods.PACKAGES.get(name.split()[0])
    if package is not None:
        importlib.import_module(package)
    say("imported")
    device = "cuda:0" if device == "cuda" else device  # some want the number
    context_up(device)
    say("context")
    where = device if device.startswith("cuda") else "cpu"
    verify = data.verifier(pathlib.Path(folder), where)
    for _ in range(int(loads)):
        say("loading")
        began = time.monotonic()
        tensors = methods.METHODS[name](folder, device)
        wait(device)
        seconds = time.monotonic() - began
        say("loaded", bytes=sum(tensor.nbytes for tensor in tensors.values()), **own_report(name))
        wrong = verify(tensors)
        say("verified", wrong=wrong)
        del tensors
        if device.startswith("cuda"):
            torch.cuda.synchronize()
            time.sleep(SETTLE_S)
        if wrong or seconds > SLOW_S:
            break
    say("done", versions=versions())


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        say("failed", reason=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300])
        sys.stdout.flush()
        os._exit(1)
