"""Inference with both ways under the compute: batches come in through a Prefetcher, results go back through to_host.

    python3 infer.py [--batches 12] [--batch 32] [--device cuda:0]

The loop never waits for the GPU. It looks at the results of a batch two batches later, when they have long arrived.
"""
import argparse
import collections
import time

import torch
from torch import nn

from sidestream.torch import Prefetcher, to_host

parser = argparse.ArgumentParser()
parser.add_argument("--batches", type=int, default=12)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "sim", help="cuda, cuda:N, or sim: the software device, on the CPU")
args = parser.parse_args()

torch.manual_seed(1)
device = "cpu" if args.device.startswith("sim") else args.device  # of the model
batches = [{"id": i, "image": torch.rand(args.batch, 3, 64, 64)} for i in range(args.batches)]
model = nn.Sequential(nn.Conv2d(3, 32, 3, stride=2), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 100))
model = model.to(device).eval()


@torch.inference_mode()
def serial() -> dict[int, torch.Tensor]:
    return {batch["id"]: model(batch["image"].to(device)).cpu() for batch in batches}


@torch.inference_mode()
def overlapped() -> dict[int, torch.Tensor]:
    found = {}
    under_way = collections.deque()
    for batch in Prefetcher(batches, device=args.device):
        under_way.append(to_host({"id": batch["id"], "logits": model(batch["image"])}))
        if len(under_way) > 2:
            done = under_way.popleft().get()
            found[done["id"]] = done["logits"]
    for copy in under_way:
        done = copy.get()
        found[done["id"]] = done["logits"]
    return found


for way in serial, overlapped, serial, overlapped:  # the first of each warms up
    begin = time.perf_counter()
    results = way()
    print(f"{way.__name__:10} {args.batches * args.batch / (time.perf_counter() - begin):8.0f} images/s")
    if way is serial:
        expected = results
assert all(torch.equal(results[i], expected[i]) for i in expected)
print("results are equal")
if device == "cpu":
    print("on no GPU: times mean nothing")
