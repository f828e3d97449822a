"""The classic exercise: matrices from the host, one product each, copied one by one or under the product before.

    python3 classic.py [--dim 4096] [--items 10] [--device cuda:0]

Without a GPU it runs on the software device (--device sim), which shows that the results are equal and says nothing of time.
"""
import argparse
import time

import torch

from sidestream.torch import overlap_transfer_and_compute

parser = argparse.ArgumentParser()
parser.add_argument("--dim", type=int, help="default: 4096, and 128 without a GPU")
parser.add_argument("--items", type=int, default=10)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "sim", help="cuda, cuda:N, or sim: the software device, on the CPU")
args = parser.parse_args()

torch.manual_seed(1)
gpu = args.device.startswith("cuda")
device = args.device if gpu else "cpu"
dim = args.dim or (4096 if gpu else 128)
tensors = [torch.randn(dim, dim) for _ in range(args.items)]
weight = torch.randn(dim, dim, device=device)
compute, transfer = (torch.cuda.Stream(device), torch.cuda.Stream(device)) if gpu else (None, None)
if gpu:
    tensors = [tensor.pin_memory() for tensor in tensors]


def serial() -> list[torch.Tensor]:
    results = [tensor.to(device, non_blocking=True) @ weight for tensor in tensors]
    if gpu:
        torch.cuda.synchronize(device)
    return results


def overlapped() -> list[torch.Tensor]:
    return overlap_transfer_and_compute(tensors, compute, transfer, lambda x: x @ weight, device=args.device)


def milliseconds(way) -> float:
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        way()
        times.append((time.perf_counter() - begin) * 1e3)
    return sorted(times[1:])[2]  # the first one warms up


assert all(torch.equal(a, b) for a, b in zip(serial(), overlapped()))
print(f"{args.items} matrices of {dim} x {dim}: results are equal")
if gpu:
    before, after = milliseconds(serial), milliseconds(overlapped)
    print(f"serial {before:.2f} ms, overlapped {after:.2f} ms: {before / after:.2f}x")
else:
    print("on the software device, whose time means nothing")
