"""The training loop of train_before.py, fed: one line is changed, one imports it, and one prints where the time went.

    python3 train_after.py [--steps 20] [--batch 64] [--device cuda:0]
"""
import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from sidestream.torch import Prefetcher

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20, help="batches an epoch")
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "sim", help="cuda, cuda:N, or sim: the software device, on the CPU")
args = parser.parse_args()


class Noise(Dataset):
    """Images that depend on their index alone, so that every run sees the same."""

    def __len__(self) -> int:
        return args.steps * args.batch

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(i)), i % 10


torch.manual_seed(1)
device = "cpu" if args.device.startswith("sim") else args.device  # of the model
loader = Prefetcher(DataLoader(Noise(), args.batch, shuffle=True, pin_memory=device != "cpu"), device=args.device)
model = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 15 * 15, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

for epoch in range(2):
    begin, losses = time.perf_counter(), []
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    mean = torch.stack(losses).mean().item()  # once an epoch: .item() waits for the GPU
    print(f"epoch {epoch}: loss {mean!r}", flush=True)
    print(f"  {len(losses) * args.batch / (time.perf_counter() - begin):.0f} images/s")
print(loader.stats())
