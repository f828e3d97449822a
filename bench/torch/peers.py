"""What people use today to get batches onto a GPU, behind one interface: an iterable of device batches over an iterable of host batches.

Re-written from the public descriptions of each; timm's and accelerate's are the installed packages themselves.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch


def blocking(loader: Iterable, device: torch.device) -> Iterator:
    """`batch.cuda()`: the copy blocks the host and is ordered after all earlier kernels."""
    for batch in loader:
        yield batch.to(device)


def non_blocking(loader: Iterable, device: torch.device) -> Iterator:
    """What tutorials say: pinned source, non_blocking=True, on the compute stream: the copy waits for the kernels before it."""
    for batch in loader:
        yield batch.to(device, non_blocking=True)


def apex_style(loader: Iterable, device: torch.device) -> Iterator:
    """One batch ahead on a side stream; the allocator is told by record_stream."""
    side = torch.cuda.Stream(device)

    def load(batch: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(side):
            return batch.to(device, non_blocking=True)

    source = iter(loader)
    ahead = next(source, None)
    ahead = load(ahead) if ahead is not None else None
    while ahead is not None:
        current = torch.cuda.current_stream(device)
        current.wait_stream(side)
        batch = ahead
        batch.record_stream(current)
        host = next(source, None)
        ahead = load(host) if host is not None else None
        yield batch


def pinned_ring(loader: Iterable, device: torch.device, depth: int = 2) -> Iterator:
    """The 20 lines of an expert: pinned host ring, device ring, an event each way. Batches of one shape, valid until the next one."""
    side = torch.cuda.Stream(device)
    host: list[torch.Tensor] = []
    ring: list[torch.Tensor] = []
    filled = [torch.cuda.Event() for _ in range(depth)]
    drained = [torch.cuda.Event() for _ in range(depth)]
    source = iter(loader)

    def load(slot: int) -> bool:
        batch = next(source, None)
        if batch is None:
            return False
        if len(ring) <= slot:
            ring.append(torch.empty_like(batch, device=device))
            host.append(torch.empty_like(batch, pin_memory=True))
        if not batch.is_pinned():
            filled[slot].synchronize()
            host[slot].copy_(batch)
            batch = host[slot]
        with torch.cuda.stream(side):
            side.wait_event(drained[slot])
            ring[slot].copy_(batch, non_blocking=True)
            filled[slot].record(side)
        return True

    more = [load(slot) for slot in range(depth)]
    at = 0
    while more[at]:
        current = torch.cuda.current_stream(device)
        current.wait_event(filled[at])
        yield ring[at]
        drained[at].record(torch.cuda.current_stream(device))
        more[at] = load(at)
        at = (at + 1) % depth


def timm_loader(loader: Iterable, device: torch.device = torch.device("cuda", 0)) -> Iterable:
    """timm's PrefetchLoader as installed; it wants (input, target), and normalizes."""
    from timm.data.loader import PrefetchLoader

    class Pairs:
        target = torch.zeros(1, dtype=torch.long)

        def __iter__(self) -> Iterator:
            return ((batch, self.target) for batch in loader)

    return PrefetchLoader(Pairs(), device=device, channels=3)


def timm_prefetch(loader: Iterable, device: torch.device) -> Iterator:
    return (batch for batch, _ in timm_loader(loader, device))


def accelerate_loader(loader: Iterable, device: torch.device) -> Iterator:
    """accelerate's prepared DataLoader, non_blocking=True: copies on the current stream."""
    from accelerate.data_loader import DataLoaderShard

    class Items(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator:
            return iter(loader)

    yield from DataLoaderShard(Items(), device=device, batch_size=None, _non_blocking=True)


def ours(loader: Iterable, device: torch.device, depth: int = 2) -> Iterator:
    from sidestream.torch import Prefetcher

    yield from Prefetcher(loader, device=device, depth=depth)


PEERS: dict[str, Callable[..., Iterator]] = {
    "sidestream": ours,
    "blocking .to()": blocking,
    ".to(non_blocking)": non_blocking,
    "pinned ring": pinned_ring,
    "apex style": apex_style,
    "timm": timm_prefetch,
    "accelerate": accelerate_loader,
}
