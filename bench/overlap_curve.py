#!/usr/bin/env python3
"""The measured curve of overlap: what `sidestream bench overlap --json` found, as a drawing and a table.

    overlap_curve.py bench-overlap.json [CURVE.svg]

Prints, for each ratio of compute to copy, speed-up over one after the other (n x (copy + compute), both measured alone in the same run) at each
depth, and the most that any schedule gives. Draws them over the share of transfer in the serial time: a line for the bound, a dot for each run."""
from __future__ import annotations

import json
import sys

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 440, 64, 732, 70, 390
COLOURS = {1: "#6b7078", 2: "#2b64c8", 3: "#3f9f68", 4: "#c96f1f"}
MOST = 2.1  # speed-up at the top; there are no results, so 2 is the most


def points(path: str) -> tuple[list[dict], str]:
    with open(path) as file:
        bench = json.load(file)
    rows = []
    for row in bench["suites"]["overlap"]["rows"]:
        if row["streams"] != 1:
            continue
        serial = row["items"] * (row["copy_s"] + row["compute_s"])
        rows.append({"compute": row["compute"], "depth": row["depth"], "share": row["copy_s"] / (row["copy_s"] + row["compute_s"]),
                     "ratio": row["compute_s"] / row["copy_s"], "speedup": serial / row["time_s"]["median"], "most": serial / row["bound_s"]})
    return rows, bench["name"] + (", simulated" if bench["simulated"] else "")


def print_table(rows: list[dict]) -> None:
    print("| compute | compute / copy | transfer share | bound | 1 buffer | 2 | 3 | 4 |\n|---|---|---|---|---|---|---|---|")
    for compute in ("spin", "products"):
        here = [row for row in rows if row["compute"] == compute]
        for share in sorted({row["share"] for row in here}, reverse=True):
            group = {row["depth"]: row for row in here if row["share"] == share}
            first = group[min(group)]
            print(f"| {compute} | {first['ratio']:.2f} | {share * 100:.0f} % | {first['most']:.2f}x | "
                  + " | ".join(f"{group[depth]['speedup']:.2f}x" for depth in sorted(group)) + " |")


def draw(rows: list[dict], name: str) -> str:
    def x(share: float) -> float:
        return LEFT + share * (RIGHT - LEFT)

    def y(speedup: float) -> float:
        return BOTTOM - (speedup - 0.9) / (MOST - 0.9) * (BOTTOM - TOP)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
           'font-family="system-ui,sans-serif" font-size="12" fill="#16181d">',
           f"<title>Measured: speed-up against transfer share, {name}</title>",
           f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="6" fill="#ffffff" stroke="#c9cdd3"/>',
           f'<text x="16" y="29" font-size="15" font-weight="600">Measured: speed-up against transfer share, {name}</text>']
    for tick in (1.0, 1.25, 1.5, 1.75, 2.0):
        out += [f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#dcdfe4"/>',
                f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end" fill="#4a4f57">{tick:.2f}x</text>']
    for percent in range(0, 101, 20):
        out.append(f'<text x="{x(percent / 100):.1f}" y="{BOTTOM + 20}" text-anchor="middle" fill="#4a4f57">{percent} %</text>')
    out.append(f'<text x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle" fill="#4a4f57">copy in, as a share of the serial time</text>')
    bound = sorted({(row["share"], row["most"]) for row in rows if row["compute"] == "spin"})
    line = " ".join(f"{x(share):.1f},{y(most):.1f}" for share, most in bound)
    out.append(f'<polyline points="{line}" fill="none" stroke="#c9cdd3" stroke-width="6"/>')
    for depth, colour in COLOURS.items():
        here = sorted((row for row in rows if row["depth"] == depth), key=lambda row: row["share"])
        at = LEFT + 130 * depth
        label = "1 buffer" if depth == 1 else f"{depth} buffers"
        out += [f'<circle cx="{at - 10}" cy="50" r="4" fill="{colour}"/>', f'<text x="{at}" y="54">{label}</text>']
        out += [f'<circle cx="{x(row["share"]):.1f}" cy="{y(row["speedup"]):.1f}" r="{6 - depth}" fill="{colour}"/>' for row in here]
    out += [f'<line x1="{LEFT}" x2="{LEFT + 20}" y1="50" y2="50" stroke="#c9cdd3" stroke-width="6"/>',
            f'<text x="{LEFT + 26}" y="54">bound</text>', "</svg>", ""]
    return "\n".join(out)


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    rows, name = points(sys.argv[1])
    print_table(rows)
    if len(sys.argv) == 3:
        with open(sys.argv[2], "w") as file:
            file.write(draw(rows, name))


if __name__ == "__main__":
    main()
