#!/usr/bin/env python3
"""Makes the table of what run_all.sh left in a folder: collect.py DIR. Exits 1 where a target is missed or a row is not there."""
from __future__ import annotations

import json
import pathlib
import sys


def main() -> int:
    folder = pathlib.Path(sys.argv[1])
    records = [json.loads(line) for line in (folder / "torch.jsonl").read_text().splitlines()]
    values = {(r["bench"].removeprefix("torch-"), r["label"], r.get("ratio")): r for r in records if "label" in r}
    rows: list[tuple[str, str, str, bool | None]] = []

    def median(bench: str, label: str, ratio: float | None = None) -> float:
        return values[bench, label, ratio]["median"]

    def row(what: str, target: str, measure) -> None:
        try:
            text, ok = measure()
        except KeyError as missing:
            text, ok = f"not run ({missing})", False
        rows.append((what, target, text, ok))

    ratios = sorted({ratio for bench, _, ratio in values if bench == "sweep" and ratio is not None})

    def over_ratios(label: str, against: str, limit: float):
        found = [median("sweep", label, r) / median("sweep", against, r) for r in ratios]
        return ", ".join(f"{r:g}: {v:.3f}" for r, v in zip(ratios, found)), bool(found) and max(found) <= limit

    row("sweep, pinned: step / two streams without fences", "<= 1.02", lambda: over_ratios("pinned sidestream", "pinned unfenced", 1.02))
    row("sweep: pageable / pinned", "<= 1.08", lambda: over_ratios("pageable sidestream", "pinned sidestream", 1.08))
    for peer in ("blocking .to()", ".to(non_blocking)", "pinned ring", "apex style", "timm", "accelerate"):
        row(f"sweep, pinned: {peer} / without fences", "shown", lambda: (over_ratios(f"pinned {peer}", "pinned unfenced", 0)[0], None))
    for peer in ("blocking .to()", "pinned ring"):
        row(f"sweep, pageable: {peer} / without fences", "shown", lambda: (over_ratios(f"pageable {peer}", "pinned unfenced", 0)[0], None))

    def kept(name: str) -> float:
        return median("jitter", f"{name} steady") / median("jitter", f"{name} jitter")

    row("jitter: rate kept, depth 4", ">= 0.95", lambda: (f"{kept('sidestream'):.3f}", kept("sidestream") >= 0.95))
    for peer in (".to(non_blocking)", "pinned ring", "apex style", "timm"):
        row(f"jitter: {peer}", "shown", lambda: (f"{kept(peer):.3f}", None))

    def ready(name: str) -> float:
        return median("ready", name) / median("ready", "compute alone")

    row("ready pageable batches, ViT-tiny: step / compute", "<= 1.02", lambda: (
        f"{ready('sidestream, pageable'):.3f} of {median('ready', 'compute alone') * 1e3:.1f} ms",
        ready("sidestream, pageable") <= 1.02))
    for peer in ("blocking .to(), pageable", ".to(non_blocking), pinned", "pinned ring, pinned", "sidestream, pinned"):
        row(f"ready: {peer}", "shown", lambda: (f"{ready(peer):.3f}", None))
    def copies() -> float:
        return values["small", "next() of 500 tensors", None]["copies_a_batch"]

    row("500 small tensors: copies a batch", "1", lambda: (f"{copies():.2f}", copies() == 1))
    row("500 small tensors: next() / creating 500 views", "<= 1.2", lambda: (
        f"{median('small', 'next() of 500 tensors') / median('small', 'creating 500 views'):.2f}",
        median("small", "next() of 500 tensors") <= 1.2 * median("small", "creating 500 views")))
    row("500 small tensors: native submit", "<= 200 us", lambda: (
        f"{median('small', 'native submit of 500 pieces'):.0f} us", median("small", "native submit of 500 pieces") <= 200))
    for kind in ("pinned", "pageable"):
        label = f"next() of one {kind} tensor"
        row(f"host time of {label}", "<= 40 us", lambda: (f"{median('small', label):.1f} us", median("small", label) <= 40))

    def classic(name: str, math: str) -> float:
        return median("classic", f"{math} {name}") / median("classic", f"{math} sidestream")

    row("classic, 10 x 4096 fp32: serial / ours", ">= 1.36",
        lambda: (f"{classic('pinned serial', 'fp32'):.3f}", classic("pinned serial", "fp32") >= 1.36))
    row("classic: reordered textbook / ours", ">= 0.99",
        lambda: (f"{classic('textbook, reordered', 'fp32'):.3f}", classic("textbook, reordered", "fp32") >= 0.99))
    row("classic, tf32: serial / ours, reordered / ours", "shown",
        lambda: (f"{classic('pinned serial', 'tf32'):.3f}, {classic('textbook, reordered', 'tf32'):.3f}", None))
    for name in ("control: no wait for readers", "sidestream", "timm", "apex style", "pinned ring"):
        def wrong(name: str = name):
            r = values["race", name, None]
            ok = r["wrong"] == 0 if name == "sidestream" else r["wrong"] > 0 if "control" in name else None
            return f"{r['wrong']} of {r['batches']}", ok
        row(f"race, wrong batches: {name}", {"sidestream": "0", "control: no wait for readers": "> 0"}.get(name, "shown"), wrong)
    for name in ("sidestream, one prefetcher", "sidestream, a new one each epoch"):
        def flat(name: str = name):
            r = values["memory", name, None]
            half = len(r["used_mib"]) // 2
            return (f"reserved {r['reserved_mib'][half]} -> {r['reserved_mib'][-1]}, driver {r['used_mib'][half]} -> {r['used_mib'][-1]} MiB",
                    r["reserved_mib"][half] == r["reserved_mib"][-1] and r["used_mib"][half] == r["used_mib"][-1])
        row(f"memory over 40 epochs: {name}", "flat", flat)
    for (bench, label, _), r in values.items():
        if bench == "real":
            rows.append((f"real: {label}", "shown", f"{r['images'] / r['median']:.0f} images/s, compute busy "
                         f"{r['images'] / r['batch'] * r['step_s'] / r['median'] * 100:.0f} %, {r['median']:.2f} s", None))

    words = {True: "pass", False: "MISSED", None: ""}
    widths = [max(len(r[i]) for r in rows) for i in range(3)]
    lines = ["  ".join((*(cell.ljust(width) for cell, width in zip(r, widths)), words[r[3]])).rstrip() for r in rows]
    text = "\n".join(lines) + "\n"
    (folder / "table.txt").write_text(text)
    print(text, end="")
    return int(any(ok is False for *_, ok in rows))


if __name__ == "__main__":
    sys.exit(main())
