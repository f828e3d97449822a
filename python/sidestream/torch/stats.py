"""Where the time of a loop went, and what prefetching can still give."""
from __future__ import annotations

import dataclasses

__all__ = ["Stats"]

_SMALL = 0.03  # of a batch's time: less than this lost is nothing to gain
_SHORT_S, _FEW = 1e-3, 100  # batches that are shorter are noise until there are so many: clock, scheduler and Python take tens of microseconds
_KEPT = ("slots", "device", "simulated", "plain")  # of a difference: as they are now


@dataclasses.dataclass(frozen=True)
class Stats:
    """Sums of a prefetcher; `later - earlier` is what lies between. Seconds and bytes.

    On a GPU the times are the GPU's, measured on the stream that reads the batches: compute_s from a batch being ready to the end
    of what was queued on it, the lost times from there until the next batch was ready. They are of the `timed` batches: those
    whose work was done when the figures were taken. On the software device, and with device="cpu", they are the host's: in the
    loop's body, and in next()."""

    batches: int = 0          # handed out
    bytes: int = 0            # copied, packed
    copies: int = 0           # copy operations that were queued for them
    timed: int = 0
    compute_s: float = 0.0
    lost_loader_s: float = 0.0   # waited for the loader,
    lost_staging_s: float = 0.0  # for native threads that fill pinned memory,
    lost_link_s: float = 0.0     # for the copy itself,
    lost_slots_s: float = 0.0    # for a slot that some batch still occupied,
    lost_other_s: float = 0.0    # and what none of these explains
    reads: int = 0            # batches that the loader gave
    loader_s: float = 0.0     # in the loader's next()
    copy_s: float = 0.0       # device: of the copies
    other_tensors: int = 0    # that were not packed: moved by .to()
    other_bytes: int = 0
    held_copies: int = 0      # batches handed out as copies, since earlier ones were held
    slots: int = 0
    device: str = ""
    simulated: bool = False
    plain: bool = False       # nothing is read or copied ahead: device="cpu", SIDESTREAM_DISABLE=1

    def __sub__(self, earlier: "Stats") -> "Stats":
        if not isinstance(earlier, Stats):
            return NotImplemented
        sums = {f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in dataclasses.fields(self) if f.name not in _KEPT}
        return dataclasses.replace(self, **sums)

    @property
    def lost_s(self) -> float:
        return self.lost_loader_s + self.lost_staging_s + self.lost_link_s + self.lost_slots_s + self.lost_other_s

    @property
    def bound(self) -> str:
        """What the loop waits for most: "compute", "loader", "staging", "link", "slots", "other". "unknown" where nothing was timed, or fewer than
        100 batches of less than a millisecond were: too short to judge."""
        if self.timed == 0 or self.compute_s + self.lost_s <= 0 or self._too_short:
            return "unknown"
        if self.lost_s < _SMALL * (self.compute_s + self.lost_s):
            return "compute"
        lost = self._lost()
        return max(lost, key=lambda name: lost[name])

    @property
    def gain(self) -> float:
        """The part of a batch's time, 0 to 1, that prefetching could still hide: down to the slowest of compute, loader and link."""
        if self.bound == "unknown" or self.plain:
            return 0.0
        now = (self.compute_s + self.lost_s) / self.timed
        return max(0.0, 1 - max(self.compute_ms, self.loader_ms, self.copy_ms) / 1e3 / now)

    @property
    def compute_ms(self) -> float:
        """Milliseconds a batch, as are the next two."""
        return 1e3 * self.compute_s / self.timed if self.timed else 0.0

    @property
    def loader_ms(self) -> float:
        return 1e3 * self.loader_s / self.reads if self.reads else 0.0

    @property
    def copy_ms(self) -> float:
        return 1e3 * self.copy_s / self.timed if self.timed else 0.0

    @property
    def _too_short(self) -> bool:
        return 0 < self.timed < _FEW and self.compute_s + self.lost_s < _SHORT_S * self.timed

    def _lost(self) -> dict[str, float]:
        return {"loader": self.lost_loader_s, "staging": self.lost_staging_s, "link": self.lost_link_s, "slots": self.lost_slots_s,
                "other": self.lost_other_s}

    @property
    def verdict(self) -> str:
        """One sentence: what bounds the loop, and what there is to do."""
        bound = self.bound
        if self._too_short:
            each = _ms(1e3 * (self.compute_s + self.lost_s) / self.timed)
            return f"too short to judge: {self.timed} batches of {each} ms were timed; it takes {_FEW}, or batches of {1e3 * _SHORT_S:g} ms and more"
        if bound == "unknown":
            return "nothing was timed yet: no batch was handed out and worked on"
        who, compute = "GPU" if self.device.startswith("cuda") else "loop", _ms(self.compute_ms)
        if bound == "compute":
            busy = 100 * self.compute_s / (self.compute_s + self.lost_s)
            return f"nothing more to gain: the {who} computes {busy:.0f} % of the time, {compute} ms a batch"
        more = "nothing more to gain" if self.gain < _SMALL else f"{100 * self.gain:.0f} % to gain"
        lost = _ms(1e3 * self._lost()[bound] / self.timed)
        if self.plain:
            return (f"nothing is read or copied ahead (device='cpu', or SIDESTREAM_DISABLE=1): {_ms(1e3 * self.lost_s / self.timed)} ms a batch "
                    f"are lost in next(), the loop needs {compute}")
        if bound == "loader":
            needs = f"{more}: the loader needs {_ms(self.loader_ms)} ms a batch, the {who} {compute}"
            return needs + ("; more workers or cheaper samples would help" if self.gain < _SMALL else
                            f", but it is late at times, {lost} ms on average; a larger depth, or more workers, would take that up")
        if bound == "link":
            cure = "; fewer bytes (uint8, bfloat16) would help" if self.gain < _SMALL else f", and {lost} are lost; a larger depth would help"
            return f"{more}: the copy takes {_ms(self.copy_ms)} ms a batch, the {who} {compute}{cure}"
        if bound == "staging":
            return (f"copying pageable batches into pinned memory is what bounds it: {lost} ms a batch are lost to that, the {who} needs {compute}; "
                    "pin_memory=True in the loader, or more cores, would help")
        if bound == "slots":
            return (f"{more}: {lost} ms a batch are lost waiting for slots, the {who} needs {compute}; letting go of batches earlier, "
                    "or a larger depth, would help")
        return f"{more}: {lost} ms a batch are lost in next() itself, the {who} needs {compute}"

    def line(self) -> str:
        """All of it in one line, for the log."""
        return f"{self.batches} batches, {_bytes(self.bytes)} in {self.copies} copies{', simulated' if self.simulated else ''}: {self.verdict}"

    def __str__(self) -> str:
        where = f"{self.device}{', simulated: times are of this host and no GPU' if self.simulated else ''}"
        rows = [f"{self.batches} batches on {where}: {_bytes(self.bytes)} in {self.copies} copies, {self.slots} slots"]
        if self.timed:
            rows.append(f"a batch     compute {_ms(self.compute_ms)} ms, loader {_ms(self.loader_ms)} ms, copy {_ms(self.copy_ms)} ms")
            lost = ", ".join(f"{name} {_ms(1e3 * value / self.timed)}" for name, value in self._lost().items())
            rows.append(f"lost        {_ms(1e3 * self.lost_s / self.timed)} ms a batch, waiting for: {lost}")
        if self.other_tensors:
            rows.append(f"not packed  {self.other_tensors} tensors, {_bytes(self.other_bytes)}, moved by .to()")
        if self.held_copies:
            rows.append(f"held        {self.held_copies} batches handed out as copies, since earlier ones were held")
        return "\n".join([*rows, f"verdict     {self.verdict}"])


def _ms(value: float) -> str:
    """Three digits: 0.0312, 3.12, 31.2, 312."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.4g} {unit}"
