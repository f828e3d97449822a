"""Where batches go: a GPU through PyTorch's own streams and allocator, the software device, or nowhere."""
from __future__ import annotations

import os
import re
from typing import Any

import torch

from .. import _native

__all__ = ["Target", "bytes_of", "from_dlpack", "is_capturing", "raw_stream"]

# Private names are quicker (a tenth); what is public does the same.
from_dlpack = getattr(torch._C, "_from_dlpack", None) or torch.utils.dlpack.from_dlpack
is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None) or torch.cuda.is_current_stream_capturing
_quick_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

HOST = -1  # instead of a stream: the host reads
_UNITS = {"": 1, "b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def raw_stream(index: int) -> int:
    """The CUstream that is current on CUDA device `index`."""
    return _quick_raw_stream(index) if _quick_raw_stream else torch.cuda.current_stream(index).cuda_stream


def bytes_of(value: int | str | None) -> int | None:
    """2147483648, "2GiB" and "2.1 GB" in bytes; None stays None."""
    if value is None:
        return None
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", value, re.IGNORECASE)
        if match is None:
            raise ValueError(f"budget={value!r} is no size: give bytes as an int, or text such as '2GiB' or '500MB'")
        return int(float(match[1]) * _UNITS[match[2].lower()])
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"budget={value!r}: give bytes as an int, text such as '2GiB', or None for no limit")
    if value < 0:
        raise ValueError(f"budget={value}: bytes cannot be negative")
    return value


_ACCEPTED = "batches go to 'cuda', 'cuda:N', 'cpu' (passed through) or 'sim' (the software device)"


class Target:
    """device: of the tensors that are handed out. native: the library's device; None: batches pass through, by .to() where the
    device is a GPU.

    index: of the CUDA device; -1: none."""

    def __init__(self, spec: str | int | torch.device | None) -> None:
        self.native: Any = None
        self.index = -1
        self.simulated = False
        text = "cuda" if spec is None else str(spec)
        if isinstance(spec, int):
            text = f"cuda:{spec}"
        disabled = os.environ.get("SIDESTREAM_DISABLE", "") not in ("", "0")
        if text == "sim" or text.startswith("sim:"):
            self.device = torch.device("cpu")
            self.simulated = True
            self.name = text
            if not disabled:
                self.native = _native.Device(text)
            return
        try:
            device = torch.device(text)
        except RuntimeError:
            raise ValueError(f"device={spec!r}: {_ACCEPTED}") from None
        if device.type == "cpu":
            self.device, self.name = device, "cpu"
            return
        if device.type != "cuda":
            raise ValueError(f"device={spec!r}: {_ACCEPTED}")
        self.index = _cuda_index(device)
        self.device = torch.device("cuda", self.index)
        self.name = str(self.device)
        if not disabled:
            self.native = _native.Device(f"cuda:{self.index}")

    def stream(self) -> int:
        """The native stream that reads what is handed out now; HOST on the software device."""
        return raw_stream(self.index) if self.index >= 0 else HOST

    def check_capture(self) -> None:
        if self.index >= 0 and is_capturing():
            raise RuntimeError("next() of a Prefetcher during the capture of a CUDA graph: batches would be recorded once and replayed for ever. "
                               "Take the batch before the capture; with static=True its addresses stay the same")

    def capture_stream(self) -> Any:
        """The stream on which torch.cuda.graph captures, None where it is not known yet. Made early, as torch.cuda.graph would, so that the first
        capture is known before it begins; not on a device that is not current: the stream is the process's, and belongs where graphs are made."""
        graph = torch.cuda.graph
        stream = getattr(graph, "default_capture_stream", None)
        if stream is None and torch.cuda.current_device() == self.index:
            graph(torch.cuda.CUDAGraph())
            stream = getattr(graph, "default_capture_stream", None)
        return stream

    def slab(self, nbytes: int) -> torch.Tensor | None:
        """Device memory of PyTorch's allocator, on the current stream; None: the library makes it (software device)."""
        if self.index < 0:
            return None
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)


def _cuda_index(device: torch.device) -> int:
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            why = "this PyTorch is built without CUDA"
        else:
            why = f"this PyTorch (CUDA {torch.version.cuda}) finds no usable GPU or driver"
            try:
                torch.cuda.init()
            except Exception as error:  # the cause, in PyTorch's words
                why += f" ({str(error).splitlines()[0]})"
        raise RuntimeError(f"device='{device}': {why}. device='cpu' passes batches through, device='sim' runs everything on the software device")
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"device='{device}': there are {torch.cuda.device_count()} GPUs, counted from 0")
    return index
