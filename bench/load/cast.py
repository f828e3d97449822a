"""A checkpoint cast from float32 to bfloat16, files to files: `sidestream cast` beside PyTorch doing the same, with safetensors on both ends.

    cast.py --program build/sidestream [--device cuda] [--mib 4096] [--disk DIR] [--tmpfs /dev/shm] [--repeats 3] [--out results.jsonl]

Two shards of --mib each. "bare" is PyTorch's program without any file: imports and context, which of its time is not the
cast. Results are compared with torch's own conversion, byte by byte, after.
"""
from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import data  # noqa: E402
import machine  # noqa: E402

# What a careful user writes: a shard at a time, each tensor through the GPU, saved by the reference implementation.
PYTORCH = """
import glob, os, sys, torch
from safetensors import safe_open
from safetensors.torch import save_file
source, out, device = sys.argv[1:]
os.makedirs(out)
for path in sorted(glob.glob(os.path.join(source, "*.safetensors"))):
    with safe_open(path, framework="pt", device=device) as file:
        save_file({name: file.get_tensor(name).to(torch.bfloat16).cpu() for name in file.keys()}, os.path.join(out, os.path.basename(path)))
"""
BARE = """
import sys, torch
from safetensors.torch import save_file
torch.empty(1, device=sys.argv[3])
"""


def mapped(path: pathlib.Path) -> torch.Tensor:
    """The data of a file, behind its header."""
    whole = torch.from_file(str(path), shared=False, size=os.path.getsize(path), dtype=torch.uint8)
    return whole[8 + int.from_bytes(bytes(whole[:8].tolist()), "little"):]


def wrong(source: pathlib.Path, out: pathlib.Path) -> str:
    """What is not as torch would convert it; "": nothing."""
    for path, _, table in data.tables_of(source):
        converted = {name: one for other, _, found in data.tables_of(out) if other.name == path.name for name, one in found.items()}
        before, after = mapped(path), mapped(out / path.name)
        for name, (_, shape, begin, end) in table.items():
            if name not in converted or converted[name][0] != "BF16" or converted[name][1] != shape:
                return f"{name}: {converted.get(name)}"
            expected = before[begin:end].clone().view(torch.float32).to(torch.bfloat16)
            if not torch.equal(expected.view(torch.uint8), after[slice(*converted[name][2:])]):
                return f"{name}: other values"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--mib", type=int, default=4096)
    parser.add_argument("--disk", type=pathlib.Path, default=pathlib.Path("/tmp"))
    parser.add_argument("--tmpfs", type=pathlib.Path, default=pathlib.Path("/dev/shm"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    options = parser.parse_args()
    where = "cpu" if options.device.startswith("sim") else options.device
    commands = {"sidestream cast": lambda a, b: [options.program, "cast", a, b, "--to", "bf16", "--device", options.device],
                "pytorch": lambda a, b: [options.python, "-c", PYTORCH, a, b, where],
                "bare": lambda a, b: [options.python, "-c", BARE, a, b, where]}
    for state, root in (("tmpfs", options.tmpfs), ("disk", options.disk)):
        source, out = root / "sidestream-cast", root / "sidestream-cast-out"
        shutil.rmtree(source, ignore_errors=True)
        data.make_floats(source, options.mib << 20)
        times: dict[str, list[float]] = {name: [] for name in commands}
        failed: dict[str, str] = {}
        for turn in range(options.repeats):
            for name, command in commands.items():
                shutil.rmtree(out, ignore_errors=True)
                if name in failed:
                    continue
                if state == "disk":
                    os.sync()
                    machine.cool(sorted(source.iterdir()))
                began = time.monotonic()
                done = subprocess.run(command(source, out), capture_output=True, text=True)
                seconds = time.monotonic() - began
                bad = f"exit code {done.returncode}: {done.stderr.strip()[-200:]}" if done.returncode else ""
                if not bad and turn == 0 and name != "bare":
                    bad = wrong(source, out)
                if bad:
                    failed[name] = bad
                else:
                    times[name].append(seconds)
        for name, found in times.items():
            record = {"state": state, "method": name, "bytes": 2 * options.mib << 20, "seconds": found, "failed": failed.get(name)}
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps({"bench": "load cast", "commit": options.commit, "date": options.date} | record) + "\n")
            print(f"{state:6} {name:16} " + (f"failed: {failed[name]}" if name in failed else f"{statistics.median(found):.2f} s, n {len(found)}"))
        for folder in (source, out):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
