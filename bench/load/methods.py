"""How tensors get from files to a GPU: ours, and what others offer, each in as few lines as its own documentation takes.

A method is a function (folder, device) -> {name: tensor}. It returns when the host may go on; the caller waits for the device. What cannot run
raises, and the table says why. PACKAGES: what each imports, which counts as wall time, and not as time of the first load.
"""
from __future__ import annotations

import glob
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

Tensors = dict[str, torch.Tensor]
Method = Callable[[str, str], Tensors]


def _files(folder: str, kind: str = "safetensors") -> list[str]:
    found = sorted(glob.glob(os.path.join(folder, f"*.{kind}")))
    if not found:
        raise FileNotFoundError(f"no .{kind} files of this set")
    return found


def ours(folder: str, device: str) -> Tensors:
    from sidestream.torch import load_file
    return load_file(folder, device=device)


def ours_stream(folder: str, device: str) -> Tensors:
    from sidestream.torch import stream
    return dict(stream(folder, device=device))


def _safetensors(folder: str, device: str, backend: str) -> Tensors:
    from safetensors.torch import load_file
    return {name: tensor for file in _files(folder) for name, tensor in load_file(file, device=device, backend=backend).items()}


def safetensors_mmap(folder: str, device: str) -> Tensors:
    return _safetensors(folder, device, "mmap")


def safetensors_pread(folder: str, device: str) -> Tensors:
    return _safetensors(folder, device, "pread")


def safetensors_threads(folder: str, device: str) -> Tensors:
    """A thread a shard."""
    from safetensors.torch import load_file
    files = _files(folder)
    with ThreadPoolExecutor(len(files)) as pool:
        return {name: tensor for part in pool.map(lambda file: load_file(file, device=device), files) for name, tensor in part.items()}


def safetensors_pinned(folder: str, device: str) -> Tensors:
    """What its issue tracker recommends: to the CPU, pinned, then without blocking."""
    from safetensors import safe_open
    result, held = {}, []
    for file in _files(folder):
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():
                tensor = opened.get_tensor(name)
                if device != "cpu":
                    tensor = tensor.pin_memory()
                    held.append(tensor)
                result[name] = tensor.to(device, non_blocking=True)
    if held:
        torch.cuda.synchronize()
    return result


def torch_mmap(folder: str, device: str) -> Tensors:
    return {name: tensor.to(device) for file in _files(folder, "pt") for name, tensor in torch.load(file, mmap=True).items()}


def torch_map_location(folder: str, device: str) -> Tensors:
    return {name: tensor for file in _files(folder, "pt") for name, tensor in torch.load(file, mmap=True, map_location=device).items()}


def _fastsafetensors(folder: str, device: str, **more: int) -> Tensors:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup
    loader = SafeTensorsFileLoader(SingleGroup(), device, nogds=True)
    loader.add_filenames({0: _files(folder)})
    buffers = loader.copy_files_to_device(**more)
    result = {name: buffers.get_tensor(name) for name in loader.get_keys()}
    loader.close()
    return result


def fastsafetensors(folder: str, device: str) -> Tensors:
    return _fastsafetensors(folder, device)


def fastsafetensors_blocks(folder: str, device: str) -> Tensors:
    """Blocks of 16 MiB: by its default a thread reads a whole file."""
    return _fastsafetensors(folder, device, max_copy_block_size=16 << 20)


def runai(folder: str, device: str) -> Tensors:
    from runai_model_streamer import SafetensorsStreamer
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(_files(folder), device=device)
        return {name: tensor.to(device, non_blocking=True) for name, tensor in streamer.get_tensors()}


def _instanttensor(folder: str, device: str, **more: object) -> Tensors:
    from instanttensor import safe_open
    with safe_open(_files(folder), framework="pt", device=device, **more) as opened:
        return dict(opened.tensors())


def instanttensor(folder: str, device: str) -> Tensors:
    return _instanttensor(folder, device)


def instanttensor_buffered(folder: str, device: str) -> Tensors:
    """Its choice for files in page cache; direct reads, its default, do not use it."""
    from instanttensor import BackendPolicy
    return _instanttensor(folder, device, backend=BackendPolicy.BUFFERED)


PACKAGES = {"sidestream": "sidestream.torch.load", "safetensors": "safetensors.torch", "fastsafetensors": "fastsafetensors",
            "runai": "runai_model_streamer", "instanttensor": "instanttensor"}  # by a method's first word

METHODS: dict[str, Method] = {
    "sidestream": ours,
    "sidestream stream": ours_stream,
    "safetensors mmap": safetensors_mmap,
    "safetensors pread": safetensors_pread,
    "safetensors threads": safetensors_threads,
    "safetensors pinned": safetensors_pinned,
    "torch.load mmap": torch_mmap,
    "torch.load map_location": torch_map_location,
    "fastsafetensors": fastsafetensors,
    "fastsafetensors 16 MiB": fastsafetensors_blocks,
    "runai": runai,
    "instanttensor": instanttensor,
    "instanttensor buffered": instanttensor_buffered,
}
