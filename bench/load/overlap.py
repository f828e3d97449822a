"""A load beside compute: what each costs the other, and how soon the first layer is there.

    overlap.py FOLDER [--out results.jsonl] [--repeats 5]

FOLDER: a set that data.py made, in page cache or tmpfs. bf16 matrix products run on a stream of their own while sidestream.torch.stream brings the
set; the same with InstantTensor where it is installed. Each is also timed alone. "first layer": the first 1/64 of the bytes, usable on the GPU.
"""
from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import data  # noqa: E402
import machine  # noqa: E402
import methods  # noqa: E402

DIM = 4096


class Products:
    """bf16 products, one after another, on a stream of their own, until told to stop: never more than a few ahead."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.a, self.b = (torch.randn(DIM, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.c = torch.empty_like(self.a)

    def run(self, stop: threading.Event, least_s: float = 0.0) -> float:
        """Seconds a product, by the GPU's clock, from here until `stop` is set."""
        begin, end, count = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True), 0
        last: list[torch.cuda.Event] = []
        began = time.monotonic()
        with torch.cuda.stream(self.stream):
            begin.record()
            while not (stop.is_set() and time.monotonic() - began >= least_s):
                for _ in range(8):
                    torch.mm(self.a, self.b, out=self.c)
                count += 8
                mark = torch.cuda.Event()
                mark.record()
                last.append(mark)
                if len(last) > 4:
                    last.pop(0).synchronize()
            end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / count


def ours(folder: str) -> Iterator[torch.Tensor]:
    from sidestream.torch import stream
    return (tensor for _, tensor in stream(folder, device="cuda"))


def theirs(folder: str) -> Iterator[torch.Tensor]:
    from instanttensor import safe_open
    with safe_open(methods._files(folder), framework="pt", device=0) as opened:
        for _, tensor in opened.tensors():
            yield tensor


def load(make: Callable[[str], Iterator[torch.Tensor]], folder: str, nbytes: int) -> tuple[float, float]:
    """(until the first 1/64 is usable, until all is), by the host's clock, from the call on."""
    began = time.monotonic()
    first, seen, kept = 0.0, 0, []
    for tensor in make(folder):
        kept.append(tensor)
        seen += tensor.nbytes
        if not first and seen >= nbytes // 64:
            torch.cuda.current_stream().synchronize()
            first = time.monotonic() - began
    torch.cuda.synchronize()
    return first, time.monotonic() - began


def beside(make: Callable[[str], Iterator[torch.Tensor]], folder: str, nbytes: int, products: Products) -> tuple[float, float]:
    """(seconds of the load, seconds a product), at the same time. The host waits for the load's stream alone."""
    stop, result = threading.Event(), []
    thread = threading.Thread(target=lambda: result.append(products.run(stop)))
    began = time.monotonic()
    thread.start()
    try:
        kept = list(make(folder))
        torch.cuda.current_stream().synchronize()
        seconds = time.monotonic() - began
    finally:
        stop.set()
        thread.join()
    del kept
    return seconds, result[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skip: no GPU")
        sys.exit(77)
    nbytes = sum(end - begin for _, _, table in data.tables_of(options.folder) for _, _, begin, end in table.values())
    products, folder = Products(), str(options.folder)
    rows = []
    for name, make in (("sidestream", ours), ("instanttensor", theirs)):
        alone, first, both, product, quiet = [], [], [], [], []
        try:
            load(make, folder, nbytes)  # pins, kernels
            for _ in range(options.repeats):
                stop = threading.Event()
                stop.set()
                quiet.append(products.run(stop, least_s=0.5))
                early, whole = load(make, folder, nbytes)
                first.append(early)
                alone.append(whole)
                seconds, one = beside(make, folder, nbytes, products)
                both.append(seconds)
                product.append(one)
        except Exception as error:
            print(f"{name:14} failed: {type(error).__name__}: {str(error).splitlines()[0]}")
            rows.append({"method": name, "failed": str(error)})
            continue
        rows.append({"method": name, "bytes": nbytes, "alone_s": alone, "first_layer_s": first, "both_s": both, "product_alone_s": quiet,
                     "product_both_s": product})
        a, f, b, q, p = map(statistics.median, (alone, first, both, quiet, product))
        print(f"{name:14} load {a:.3f} s alone, {b:.3f} s beside products ({b / a:.3f}x); product {q * 1e6:.0f} us alone, {p * 1e6:.0f} us beside "
              f"the load ({p / q:.3f}x); first layer {f * 1e3:.1f} ms, {100 * f / a:.1f} % of the load")
    if options.out is not None:
        with options.out.open("a") as out:
            for row in rows:
                out.write(json.dumps({"bench": "load overlap", "commit": options.commit, "date": options.date, "machine": machine.describe()} | row)
                          + "\n")


if __name__ == "__main__":
    main()
