#!/usr/bin/env python3
"""Makes the table of what the benchmarks left in a folder.

    collect.py DIR [--commit TEXT] [--date TEXT]

Reads demo-*.json, run-*.json, bench.json and results.jsonl; prints one row a target and writes table.txt and table.json beside them.
Exits 1 where a target is missed or a result is wrong.
"""
import argparse
import json
import pathlib
import re
import statistics
import sys


class Table:
    def __init__(self) -> None:
        self.rows: list[dict] = []

    def add(self, what: str, target: str, measured: str, ok: bool | None, **more) -> None:
        """ok None: a figure without a target."""
        self.rows.append({"what": what, "target": target, "measured": measured, "ok": ok} | more)

    def text(self) -> str:
        words = {True: "pass", False: "FAIL", None: ""}
        lines = [("what", "target", "measured", "")]
        lines += [(row["what"], row["target"], row["measured"], words[row["ok"]]) for row in self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(3)]
        return "\n".join("  ".join(part.ljust(width) for part, width in zip(line, (*widths, 4))).rstrip()
                         for line in lines) + "\n"


def read(path: pathlib.Path) -> dict | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def worst(found: list[tuple[float, str]], limit: float) -> tuple[str, bool]:
    """The largest of (value, label), how many are over the limit, and whether none is."""
    value, label = max(found)
    over = [f"{name} {v:.3f}" for v, name in sorted(found, reverse=True) if v > limit]
    text = f"{value:.3f} worst of {len(found)} ({label}), median {statistics.median(v for v, _ in found):.3f}"
    return (text + (f"; over: {', '.join(over[:4])}" + (" ..." if len(over) > 4 else "") if over else ""), not over)


def add_demo(table: Table, folder: pathlib.Path) -> None:
    groups: dict[str, list[tuple[float, str]]] = {"1024": [], "large": [], "results": [], "reordered": []}
    wrong = []
    for path in sorted(folder.glob("demo-*.json")):
        match = re.fullmatch(r"demo-(\d+)-(\w+)-(\d+)(-results)?\.json", path.name)
        run = read(path)
        if match is None:
            continue
        label = path.stem.removeprefix("demo-")
        if run is None or run["errors"] or len({s["checksum"] for s in run["schedules"]}) != 1:
            wrong.append(label)
            continue
        by_name = {s["name"]: s for s in run["schedules"]}
        for schedule in run["schedules"]:
            if schedule["name"].startswith("sidestream-"):
                group = "results" if match[4] else "1024" if match[1] == "1024" else "large"
                groups[group].append((schedule["bound_ratio"], f"{label} depth {schedule['depth']}"))
        if not match[4] and "sidestream-2" in by_name and "textbook-reordered" in by_name:
            ratio = by_name["sidestream-2"]["time_s"] / by_name["textbook-reordered"]["time_s"]
            groups["reordered"].append((ratio, label))
    for group, what, limit in (("large", "demo: time / bound, dim 2048 and up", 1.02), ("1024", "demo: time / bound, dim 1024", 1.08),
                               ("results", "demo --results: time / bound", 1.03),
                               ("reordered", "demo: depth 2 / reordered textbook", 1.01)):
        if groups[group]:
            text, ok = worst(groups[group], limit)
            table.add(what, f"<= {limit}", text, ok, values={label: v for v, label in groups[group]})
        else:
            table.add(what, f"<= {limit}", "not run", False)
    if wrong:
        table.add("demo: runs that reported an error (left out above)", "none", ", ".join(wrong), False)


def add_run(table: Table, folder: pathlib.Path) -> None:
    for kind, target in (("checksum", 0.90), ("cast", None)):
        runs = [run for run in map(read, sorted(folder.glob(f"run-{kind}-*.json"))) if run]
        what = f"run {'checksum' if kind == 'checksum' else 'cast:f32:bf16'}: GB/s / link"
        limit = f">= {target:.2f}" if target else ""
        if not runs or any(not run.get("link_gbps") for run in runs):
            table.add(what, limit, "not run", False if target else None)
            continue
        share = statistics.median(run["link_share"] for run in runs)
        rates = sorted(run["gbps"] for run in runs)
        text = (f"{share:.3f} median of {len(runs)} ({statistics.median(rates):.1f} GB/s, {rates[0]:.1f} to {rates[-1]:.1f}; "
                f"link {statistics.median(run['link_gbps'] for run in runs):.1f})")
        table.add(what, limit, text, share >= target if target else None, shares=[run["link_share"] for run in runs])


def add_stage(table: Table, bench: dict | None) -> None:
    if bench is None:
        table.add("stage: pageable / pinned link, default threads", ">= 0.93", "not run", False)
        return
    stage = bench["suites"]["stage"]
    default = next(row for row in stage["rows"] if row["default"])
    table.add("stage: pageable / pinned link, default threads", ">= 0.93",
              f"{default['of_link']:.3f} ({default['path_gbps']['median']:.1f} of {stage['link_gbps']['median']:.1f} GB/s, "
              f"{default['threads']} threads)", default["of_link"] >= 0.93)
    table.add("stage: by threads", "", ", ".join(f"{row['threads']}: {row['of_link']:.2f}" for row in stage["rows"]
                                                 if not row["default"]), None)


def add_queue(table: Table, result: dict | None) -> None:
    if result is None:
        table.add("queue: host us an item, log off", "<= 10", "not run", False)
        return
    for kind, target in (("log off", 10), ("log on", None), ("log off, device free", None), ("by hand, log off", None)):
        rows = [row for row in result["rows"] if row["kind"] == kind]
        if not rows:
            continue
        most = max(row["mean_us"] for row in rows)
        text = ", ".join(f"{row['bytes'] // 1024} KiB {row['mean_us']:.2f} (p99 {row['p99_us']:.1f})" for row in rows)
        held = all(row["held_back"] == result["repeats"] for row in rows)
        if target and not held and not result["simulated"]:
            text += "; the device was not held back in every pass"
        table.add(f"queue: host us an item, {kind}", f"<= {target}" if target else "", text,
                  most <= target if target else None)


def add_feed(table: Table, result: dict | None) -> None:
    if result is None:
        table.add("feeder: native us a batch of 500 x 4 KiB", "<= 200", "not run", None)
        return
    for row in result["rows"]:
        small = row["piece_bytes"] == 4096 and row["gap_bytes"] == 0
        table.add(f"feeder: native us a batch of {int(row['pieces'])} x {int(row['piece_bytes']) // 1024} KiB, "
                  f"{'pinned' if row['pinned'] else 'pageable'}{', gaps' if row['gap_bytes'] else ''}",
                  "<= 200" if small else "",
                  f"{row['native_us']:.1f}, {row['of_memcpy']:.2f} of a memcpy; {row['stream_us']:.1f} in a row",
                  row["native_us"] <= 200 if small else None)


def add_alloc(table: Table, result: dict | None) -> None:
    if result is None:
        table.add("alloc: us an item", "", "not run", None)
        return
    for size in sorted({row["bytes"] for row in result["rows"]}):
        rows = [row for row in result["rows"] if row["bytes"] == size]
        text = ", ".join(f"{row['kind']} {row['mean_us']:.0f} (p99 {row['p99_us']:.0f})" for row in rows)
        table.add(f"alloc: us an item of {size // 1024} KiB", "", text, None)


def add_plan(table: Table, result: dict | None) -> None:
    if result is None:
        return
    cases = int(result["cases"])
    left = f"; {int(result['groups_not_run'])} groups not run" if result["groups_not_run"] else ""
    for name, limit in (("median", 0.05), ("worst", 0.10)):
        error = result[f"{name}_error"]
        table.add(f"plan: |predicted - measured| / measured, {name} of {cases}{left}", f"<= {limit * 100:.0f} %", f"{error * 100:.2f} %",
                  error <= limit and not left)
    table.add("plan: chosen depths within 2 % of the best of 1..4", "all", f"{int(result['choices_good'])} of {int(result['choices'])}, "
              f"at worst {(result['worst_choice'] - 1) * 100:.2f} % over", result["choices_good"] == result["choices"])


def add_pin(table: Table, bench: dict | None) -> None:
    if bench is None:
        table.add("pin: GiB/s", ">= 15", "not run", False)
        return
    pin = bench["suites"]["pin"]
    rates = {row["way"]: 1 / row["pin_s_per_gib"]["median"] for row in pin["rows"] if "pin_s_per_gib" in row}
    size = f"pin: GiB/s, {pin['bytes'] >> 20} MiB at a time"
    table.add(size, ">= 15", f"{rates['pool']:.1f}", rates["pool"] >= 15)
    table.add("pin: pool / the driver's allocator", ">= 7", f"{rates['pool'] / rates['driver']:.1f} ({rates['driver']:.2f} GiB/s)",
              rates["pool"] >= 7 * rates["driver"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--date", default="")
    options = parser.parse_args()
    last: dict[str, dict] = {}
    results = options.folder / "results.jsonl"
    for line in results.read_text().splitlines() if results.exists() else []:
        try:
            result = json.loads(line)
        except ValueError:
            continue
        last[result["bench"]] = result

    bench = read(options.folder / "bench.json")
    table = Table()
    add_demo(table, options.folder)
    add_run(table, options.folder)
    add_stage(table, bench)
    add_queue(table, last.get("queue"))
    add_feed(table, last.get("feed"))
    add_pin(table, bench)
    add_alloc(table, last.get("alloc"))
    add_plan(table, last.get("plan_accuracy"))

    first = next((result for result in last.values() if "device_name" in result), {})
    simulated = any(result["simulated"] for result in [*last.values(), bench or {"simulated": False}])
    head = (f"{first.get('device_name', '?')}, driver {int(first.get('driver', 0))}, kernels {first.get('kernels', '?')}, "
            f"commit {options.commit or first.get('commit', '?')}, {options.date or first.get('date', '?')}"
            f"{' -- SIMULATED, not measured' if simulated else ''}\n")
    text = head + table.text()
    print(text, end="")
    (options.folder / "table.txt").write_text(text)
    (options.folder / "table.json").write_text(json.dumps({"head": head.strip(), "rows": table.rows}, indent=1) + "\n")
    return 1 if any(row["ok"] is False for row in table.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
