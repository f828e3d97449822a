"""One training step of a timm model in bf16."""
from __future__ import annotations

import torch

from harness import DEVICE


class Trainer:
    """Takes float32 batches (N, 3, 224, 224), or uint8 ones, which it normalizes on the GPU."""

    def __init__(self, name: str, batch: int) -> None:
        import timm

        torch.manual_seed(0)
        self.model = timm.create_model(name, num_classes=1000).to(DEVICE)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.target = torch.randint(0, 1000, (batch,), device=DEVICE)

    def step(self, images: torch.Tensor) -> None:
        if images.dtype == torch.uint8:
            images = images.float().sub_(127.5).div_(64.0)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(self.model(images), self.target[:len(images)])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
