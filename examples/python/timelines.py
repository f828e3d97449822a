"""What ran when, for overlap.ipynb: on a GPU as PyTorch's profiler measured it, elsewhere on the software device, which simulates one.

    python3 timelines.py [--device sim] [--out FOLDER]     # without a notebook: two of its timelines as SVG files

Both benches have the same parts: `n` matrices in pageable and in pinned memory, two buffers on the device, two streams (`transfer`, `compute`), and
    to_device(i)   x = pageable[i].cuda()                                             on the compute stream
    copy(i)        buffers[i % 2].copy_(pinned[i], non_blocking=True)                 on the transfer stream, or the one that is given
    multiply(i)    results[i] = buffers[i % 2] @ weight                               on the compute stream
"""
from __future__ import annotations

import argparse
import pathlib
from typing import Any, Callable, NamedTuple

import numpy as np
import torch

import sidestream


class Span(NamedTuple):
    lane: str  # "H2D" or "compute"
    item: int
    begin: float  # milliseconds
    end: float


class Bench:
    n = 8
    name = ""
    scale = 0.0  # milliseconds that a drawing is wide: of the first that was kept

    def trace(self, schedule: Callable[[Any], None]) -> list[Span]:
        raise NotImplementedError

    def show(self, title: str, schedule: Callable[[Any], None], keep_scale: bool = True) -> None:
        """In a notebook: runs schedule(self), checks its results, draws it and says how long it took."""
        from IPython.display import SVG, display

        said, svg = self.drawing(title, schedule, keep_scale)
        print(said)
        display(SVG(svg))

    def drawing(self, title: str, schedule: Callable[[Any], None], keep_scale: bool = True) -> tuple[str, str]:
        """The same as (line, SVG)."""
        spans = self.trace(schedule)
        first, last = min(s.begin for s in spans), max(s.end for s in spans)
        spans = [s._replace(begin=s.begin - first, end=s.end - first) for s in spans]
        if keep_scale and not self.scale:
            self.scale = last - first
        busy = sum(s.end - s.begin for s in spans if s.lane == "compute") / (last - first)
        said = f"{title}: {last - first:.3f} ms, compute busy {100 * busy:.0f} %"
        return said, draw(f"{title}, {self.name}", spans, max(self.scale if keep_scale else 0, last - first))


class Gpu(Bench):
    def __init__(self, dim: int = 4096) -> None:
        self.name = f"measured on {torch.cuda.get_device_name()}"
        self.pageable = [torch.randn(dim, dim) for _ in range(self.n)]
        self.pinned = [x.pin_memory() for x in self.pageable]
        self.weight = torch.randn(dim, dim, device="cuda")
        self.buffers = [torch.empty(dim, dim, device="cuda") for _ in range(2)]
        self.results: list[Any] = [None] * self.n
        self.expected = [x.cuda() @ self.weight for x in self.pageable]
        self.transfer, self.compute = torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()

    def to_device(self, i: int) -> None:
        with torch.cuda.stream(self.compute):
            self.buffers[i % 2] = self.pageable[i].cuda()

    def copy(self, i: int, stream: Any = None) -> None:
        with torch.cuda.stream(stream or self.transfer):
            self.buffers[i % 2].copy_(self.pinned[i], non_blocking=True)

    def multiply(self, i: int) -> None:
        with torch.cuda.stream(self.compute):
            self.results[i] = self.buffers[i % 2] @ self.weight

    def trace(self, schedule: Callable[[Any], None]) -> list[Span]:
        schedule(self)  # warms up
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as profile:
            schedule(self)
            torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(self.results, self.expected)), "wrong results: a race"
        ran = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        ran.sort(key=lambda e: e.time_range.start)
        spans = []
        copies, kernels = [e for e in ran if "HtoD" in e.name], [e for e in ran if "Memcpy" not in e.name and "Memset" not in e.name]
        for lane, events in (("H2D", copies), ("compute", kernels)):
            a_turn = max(len(events) // self.n, 1)  # a product may be several kernels
            spans += [Span(lane, i // a_turn, e.time_range.start / 1e3, e.time_range.end / 1e3) for i, e in enumerate(events)]
        return spans


class Lane:
    """A stream of the software device, with the one method of torch.cuda.Stream that is used here."""

    def __init__(self, device: sidestream.Device) -> None:
        self.stream = sidestream.Stream(device)

    def wait_stream(self, other: Lane) -> None:
        self.stream.wait(other.stream)


class Simulated(Bench):
    seconds = 170e-6  # of a product

    def __init__(self, elements: int = 1 << 20) -> None:
        self.device = sidestream.Device("sim:h200")
        self.name = f"simulated: no GPU here, times are of a model ({self.device.spec})"
        self.pageable = [np.full(elements, i, np.float32) for i in range(self.n)]
        pool = sidestream.PinnedPool(self.device)
        self.pinned = [pool.empty(elements, "float32") for _ in range(self.n)]
        for pinned, array in zip(self.pinned, self.pageable):
            np.copyto(np.asarray(pinned), array)
        self.buffers = [self.device.empty(elements, "float32") for _ in range(2)]
        self.results = [self.device.empty(elements, "float32") for _ in range(self.n)]
        self.transfer, self.compute = Lane(self.device), Lane(self.device)
        self.marks: list[tuple[str, int, sidestream.Event, sidestream.Event]] = []

    def _run(self, lane: str, i: int, stream: sidestream.Stream, *work: Callable[[], None]) -> None:
        begin = stream.record(timing=True)
        for queue in work:
            queue()
        self.marks.append((lane, i, begin, stream.record(timing=True)))

    def to_device(self, i: int) -> None:
        stream = self.compute.stream
        self._run("H2D", i, stream, lambda: stream.copy(self.buffers[i % 2], self.pageable[i]))

    def copy(self, i: int, stream: Lane | None = None) -> None:
        on = (stream or self.transfer).stream
        self._run("H2D", i, on, lambda: on.copy(self.buffers[i % 2], self.pinned[i]))

    def multiply(self, i: int) -> None:
        stream = self.compute.stream
        self._run("compute", i, stream, lambda: stream.spin(self.seconds), lambda: stream.affine(self.results[i], self.buffers[i % 2], 2.0, 1.0))

    def trace(self, schedule: Callable[[Any], None]) -> list[Span]:
        self.marks = []
        for result in self.results:
            self.compute.stream.fill(result)
        self.transfer.wait_stream(self.compute)
        origin = self.compute.stream.record(timing=True)
        schedule(self)
        self.transfer.stream.synchronize()
        self.compute.stream.synchronize()
        out = np.empty_like(self.pageable[0])
        for i, result in enumerate(self.results):
            self.compute.stream.copy(out, result)
            self.compute.stream.synchronize()
            assert np.all(out == 2 * i + 1), "wrong results: a race"
        return [Span(lane, i, origin.elapsed(begin) * 1e3, origin.elapsed(end) * 1e3) for lane, i, begin, end in self.marks]


def bench(device: str = "") -> Bench:
    """device: "cuda" or "sim"; left out: a GPU where there is one."""
    return Gpu() if (device or ("cuda" if torch.cuda.is_available() else "sim")).startswith("cuda") else Simulated()


def draw(title: str, spans: list[Span], scale: float) -> str:
    """An SVG of two lanes; `scale` milliseconds are its width."""
    left, width, height = 70, 800, 26
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 20}" height="110" font-family="sans-serif" font-size="12">',
             f'<text x="{left}" y="16">{title}</text>']
    for row, lane in enumerate(("H2D", "compute")):
        y = 28 + row * (height + 4)
        parts.append(f'<text x="4" y="{y + 17}">{lane}</text>')
        for s in (s for s in spans if s.lane == lane):
            x, w = left + s.begin / scale * width, max((s.end - s.begin) / scale * width, 1)
            color = ("#4477aa", "#88bbdd")[s.item % 2] if lane == "H2D" else ("#228833", "#88cc88")[s.item % 2]
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="{height}" fill="{color}">'
                         f"<title>{lane} {s.item}: {s.begin:.3f} to {s.end:.3f} ms</title></rect>")
            if w > 12:
                parts.append(f'<text x="{x + w / 2:.1f}" y="{y + 17}" text-anchor="middle" fill="white">{s.item}</text>')
    end = max(s.end for s in spans)
    parts.append(f'<text x="{left + end / scale * width:.1f}" y="102" text-anchor="end">{end:.3f} ms</text></svg>')
    return "".join(parts)


def one_by_one(b: Any) -> None:
    for i in range(b.n):
        b.to_device(i)
        b.multiply(i)


def overlapped(b: Any) -> None:
    """Copy i+1 is queued before product i: its wait for the compute stream covers product i-1 alone."""
    b.copy(0)
    for i in range(b.n):
        b.compute.wait_stream(b.transfer)
        if i + 1 < b.n:
            b.transfer.wait_stream(b.compute)
            b.copy(i + 1)
        b.multiply(i)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="", choices=["cuda", "sim"], help="default: cuda where there is a GPU, else sim, the software device")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(), metavar="FOLDER", help="default: the current one")
    args = parser.parse_args()
    b = bench(args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    for title, schedule in (("one by one", one_by_one), ("overlapped", overlapped)):
        said, svg = b.drawing(title, schedule)
        path = (args.out / f"timeline-{title.replace(' ', '-')}.svg").resolve()
        path.write_text(svg)
        print(f"{said}, {b.name}\n  drawn in {path}")


if __name__ == "__main__":
    main()
