"""Files to the GPU: every method in a fresh process, in turns, verified; raw results and one table.

    compare.py --out results.jsonl [--device cuda] [--disk DIR] [--tmpfs /dev/shm] [--seconds 400] [--repeats 5]

A row is a set of files (data.py) in a state: "cache" (a disk's files, all in page cache), "tmpfs", "cold" (out of page cache, as mincore says). Of
each run: wall time from the start of the process to the model ready, imports and context included; the first load and the second; peaks of memory;
whether every byte was right, looked at after. Methods take turns, and the order turns too. One that takes four times as long as the fastest runs
again only where time is left; n says how often each ran. "cold" has no second load. What fails is a row with its reason.

--small makes and runs all of it in seconds, to see that it works: --device cpu or sim compares nothing of interest.
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

import machine

HERE = pathlib.Path(__file__).parent
MIB = 1 << 20

_PEERS = ["safetensors mmap", "safetensors pread", "safetensors threads", "safetensors pinned", "fastsafetensors", "fastsafetensors 16 MiB", "runai"]
# (set, state, part of the time, methods)
PLAN = [
    ("D1", "cache", 0.36, ["sidestream", "instanttensor", "instanttensor buffered", *_PEERS]),
    ("D1", "tmpfs", 0.20, ["sidestream", "instanttensor", "safetensors mmap", "fastsafetensors 16 MiB", "torch.load mmap"]),
    ("D1", "cold", 0.24, ["sidestream", "instanttensor", "safetensors mmap", "fastsafetensors 16 MiB", "runai"]),
    ("D2", "cache", 0.15, ["sidestream", "sidestream stream", "instanttensor", "instanttensor buffered", "safetensors mmap", "fastsafetensors 16 MiB",
                           "runai"]),
    ("D3", "cache", 0.05, ["sidestream", "instanttensor", "safetensors mmap", "fastsafetensors", "runai"]),
]


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.link: list[float] = []
        self.rows: list[dict] = []

    def write(self, record: dict) -> None:
        self.options.out.parent.mkdir(parents=True, exist_ok=True)
        with self.options.out.open("a") as file:
            file.write(json.dumps({"bench": "load", "commit": self.options.commit, "date": self.options.date} | record) + "\n")

    # ------------------------------------------------------------ data

    def make(self) -> dict[str, pathlib.Path]:
        """Where each set lies: "cache" and "cold" on the disk, "tmpfs" in memory."""
        sizes = ["--shard-mib", "8", "--many-mib", "16", "--odd-mib", "4"] if self.options.small else []
        disk, memory = self.options.disk / "sidestream-load", self.options.tmpfs / "sidestream-load"
        sets = sorted({name for name, state, _, _ in self.plan() if state != "tmpfs"})
        began = time.monotonic()
        for folder, names, more in ((disk, sets, []), (memory, ["D1"], ["--pt"])):
            shutil.rmtree(folder, ignore_errors=True)
            if not names or (folder == memory and not any(state == "tmpfs" for _, state, _, _ in self.plan())):
                continue
            subprocess.run([self.options.python, HERE / "data.py", folder, "--sets", *names, *sizes, *more], check=True, stdout=subprocess.DEVNULL)
        for path in disk.rglob("*.safetensors"):  # what is still written back would disturb
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        self.write({"made_s": time.monotonic() - began})
        return {"cache": disk, "cold": disk, "tmpfs": memory}

    def plan(self) -> list[tuple[str, str, float, list[str]]]:
        return [row for row in PLAN if not self.options.only or f"{row[0]}-{row[1]}" in self.options.only]

    # ------------------------------------------------------------ one run

    def prepare(self, folder: pathlib.Path, state: str) -> dict:
        paths = sorted(folder.glob("*.safetensors"))
        how = ""
        if state == "cold":
            how = machine.cool(paths)
        elif machine.resident(paths) < 1:
            machine.warm(paths)
        return {"resident": machine.resident(paths), "how": how}

    def run(self, method: str, folder: pathlib.Path, loads: int) -> dict:
        """Times and peaks of one process, or the reason why there are none."""
        began = time.monotonic()
        process = subprocess.Popen([self.options.python, HERE / "child.py", method, folder, self.options.device, str(loads)],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        watch = machine.Watch(process.pid)
        try:
            out, errors = process.communicate(timeout=self.options.most)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return {"failed": f"not done after {self.options.most} s"}
        finally:
            watch.stop()
        events = [json.loads(line) for line in out.splitlines() if line.startswith('{"event"')]
        if not events or events[-1]["event"] != "done":
            last = errors.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
            reason = events[-1]["reason"] if events and events[-1]["event"] == "failed" else last[0][:300]
            return {"failed": reason}
        return self.summary(began, events, watch)

    def summary(self, began: float, events: list[dict], watch: machine.Watch) -> dict:
        def all_of(event: str) -> list[dict]:
            return [one for one in events if one["event"] == event]

        loading, loaded, verified = all_of("loading"), all_of("loaded"), all_of("verified")
        wrong = [one["wrong"] for one in verified if one["wrong"]]
        if wrong:
            return {"failed": f"WRONG BYTES: {wrong[0]}"}
        seconds = [end["at"] - begin["at"] for begin, end in zip(loading, loaded)]
        context = all_of("context")[0]
        peaks = watch.peaks(loading[0]["at"], loaded[0]["at"])
        if "device_more" in peaks and not self.options.device.startswith("sim"):
            peaks["device_extra"] = peaks.pop("device_more") - loaded[0]["bytes"]  # what loaders need beside the tensors
        imported = all_of("imported")[0]["at"]
        return {"bytes": loaded[0]["bytes"], "wall_s": loaded[0]["at"] - began, "import_s": imported - began, "context_s": context["at"] - imported,
                "first_s": seconds[0], "second_s": seconds[1] if len(seconds) > 1 else None, "peaks": peaks,
                "reports": [one["report"] for one in loaded if "report" in one], "versions": events[-1]["versions"]}

    # ------------------------------------------------------------ a row of the plan

    def row(self, name: str, state: str, methods: list[str], folder: pathlib.Path, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        runs: dict[str, list[dict]] = {method: [] for method in methods}
        failed: set[str] = set()

        def turn(number: int, slow_too: bool) -> None:
            fastest = min((self.middle(done, "first_s") for done in runs.values() if done), default=0.0)
            for i in range(len(methods)):
                method = methods[(i + number) % len(methods)]
                slow = bool(runs[method]) and self.middle(runs[method], "first_s") > 4 * fastest > 0
                if method in failed or len(runs[method]) > number or (slow and not slow_too) or (time.monotonic() > deadline and number > 0):
                    continue
                before = self.prepare(folder, state)
                result = self.run(method, folder, loads=1 if state == "cold" else 2)
                self.write({"set": name, "state": state, "method": method, "turn": number} | before | result)
                if "failed" in result:
                    failed.add(method)
                    self.rows.append({"set": name, "state": state, "method": method, "failed": result["failed"]})
                else:
                    runs[method].append(result)

        for slow_too in (False, True):
            for number in range(self.options.repeats):
                turn(number, slow_too)
        self.rows += [{"set": name, "state": state, "method": method, "runs": done} for method, done in runs.items() if done]

    @staticmethod
    def middle(runs: list[dict], key: str) -> float:
        return statistics.median(run[key] for run in runs if run[key] is not None)

    def raw_disk(self, folder: pathlib.Path) -> float:
        """The best rate of O_DIRECT reads from the disk, over a few depths."""
        paths = sorted(folder.glob("*.safetensors"))
        most, best = (4 * MIB if self.options.small else 2048 * MIB), 0.0
        for number, (threads, piece) in enumerate(((8, 4 * MIB), (32, 4 * MIB), (64, 1 * MIB), (16, 16 * MIB))):
            machine.cool(paths)
            try:
                rate = machine.direct_rate(paths[number % len(paths)], threads, min(piece, most), most)
            except OSError as error:
                self.write({"direct": {"threads": threads, "piece": piece}, "failed": str(error)})
                continue
            self.write({"direct": {"threads": threads, "piece": piece}, "gbps": rate})
            best = max(best, rate)
        return best

    def measure_link(self) -> None:
        rate = machine.link_rate(self.options.python, self.options.device)
        self.link.append(rate)
        self.write({"link_gbps": rate})

    def all(self) -> None:
        began = time.monotonic()
        self.write({"machine": machine.describe(), "device": self.options.device})
        self.measure_link()
        folders = self.make()
        plan = self.plan()
        disk = 0.0
        for at, (name, state, part, methods) in enumerate(plan):
            left = self.options.seconds - (time.monotonic() - began)
            if state == "cold":
                disk = self.raw_disk(folders[state] / name)
            methods = [method for method in methods if not self.options.methods or method in self.options.methods]
            self.row(name, state, methods, folders[state] / name, left * part / sum(row[2] for row in plan[at:]))
            self.measure_link()
        self.table(disk)
        if not self.options.keep:
            for folder in set(folders.values()):
                shutil.rmtree(folder, ignore_errors=True)

    # ------------------------------------------------------------ the table

    def table(self, disk: float) -> None:
        link = statistics.median(self.link)
        self.write({"link": link, "links": self.link, "disk": disk})
        unit = "link" if self.options.device.startswith("cuda") else "memory copy"
        deep = f"; disk {disk:.2f} GB/s, O_DIRECT at the best depth" if disk else ""
        print(f"{unit} {link:.1f} GB/s ({min(self.link):.1f} to {max(self.link):.1f}){deep}")
        print(f"{'set state method':44} {'n':>2} {'wall s':>14} {'first s':>14} {'second s':>14} {'GB/s':>6} {'/link':>6} {'2nd':>6}  "
              "host, device MiB")
        places = [row[:2] for row in PLAN]
        self.rows.sort(key=lambda row: (places.index((row["set"], row["state"])), "failed" in row, 0 if "failed" in row
                                        else self.middle(row["runs"], "first_s")))
        for row in self.rows:
            head = f"{row['set']} {row['state']:5} {row['method']}"
            if "failed" in row:
                print(f"{head:44} failed: {row['failed']}")
                continue
            runs, nbytes = row["runs"], row["runs"][0]["bytes"]
            memory = [max((r["peaks"].get(key, 0) for r in runs), default=0) // MIB for key in ("host_taken", "device_extra")]
            rates = [nbytes / self.middle(runs, key) / 1e9 if has(runs, key) else 0.0 for key in ("first_s", "second_s")]
            again = f"{rates[1] / link:6.3f}" if rates[1] else f"{'':6}"
            print(f"{head:44} {len(runs):2} {spread(runs, 'wall_s'):>14} {spread(runs, 'first_s'):>14} {spread(runs, 'second_s'):>14} "
                  f"{rates[0]:6.2f} {rates[0] / link:6.3f} {again}  {memory[0]}, {memory[1]}")


def has(runs: list[dict], key: str) -> bool:
    return any(run[key] is not None for run in runs)


def spread(runs: list[dict], key: str) -> str:
    """Median, and half of what lies between the least and the most."""
    values = [run[key] for run in runs if run[key] is not None]
    if not values:
        return ""
    return f"{statistics.median(values):.3f} ±{(max(values) - min(values)) / 2:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--python", default=sys.executable, help="one that has torch, sidestream and the peers")
    parser.add_argument("--disk", type=pathlib.Path, default=pathlib.Path("/tmp"), help="a folder on the disk: 22 GiB")
    parser.add_argument("--tmpfs", type=pathlib.Path, default=pathlib.Path("/dev/shm"), help="a folder in memory: 32 GiB")
    parser.add_argument("--seconds", type=float, default=400, help="for all of it, the making of the files included")
    parser.add_argument("--most", type=float, default=90, help="seconds of one process")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", help="rows, such as D1-cache D1-tmpfs D1-cold D2-cache D3-cache")
    parser.add_argument("--methods", nargs="+", help="these alone")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--keep", action="store_true", help="leaves the files where they are")
    Bench(parser.parse_args()).all()


if __name__ == "__main__":
    main()
