#!/usr/bin/env python3
"""What the model of plans says of measured demos: its times beside theirs.

    bench/plan_published.py build/bench/bench_plan FOLDER... [-- --latency-us 3 ...]

FOLDER holds the demo-*.json of a run (bench/results). The machine is the one that bench/plan.c names; what an item's compute takes
alone is each run's own figure.
"""
import json
import pathlib
import subprocess
import sys


def line(path: pathlib.Path) -> str | None:
    """One line of bench_plan's input; None where the run was not measured on a device."""
    run = json.loads(path.read_text())
    if run["simulated"]:
        return None
    depths = [(s["depth"], s["time_s"]) for s in run["schedules"] if s["depth"] is not None and s["streams"] == 1]
    pinned = next(s["time_s"] for s in run["schedules"] if s["name"] == "pinned")
    times = " ".join(f"{depth} {seconds}" for depth, seconds in depths)
    result = run["result_bytes"] if run["results"] else 0
    return f"{run['items']} {run['item_bytes']} {result} {run['compute_s']} {pinned} {len(depths)} {times} {path.stem}"


def main() -> int:
    """Runs bench_plan over all demos of the folders."""
    args = sys.argv[1:]
    more = args[args.index("--") + 1:] if "--" in args else []
    args = args[:args.index("--")] if "--" in args else args
    if len(args) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    paths = [path for folder in args[1:] for path in sorted(pathlib.Path(folder).glob("demo-*.json"))]
    lines = [text for path in paths if (text := line(path)) is not None]
    return subprocess.run([args[0], *more], input="\n".join(lines), text=True, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
