"""Products of every kind for an audit: ``python attribution_script.py DEVICE VARIANT``.

``reentrant`` and ``checkpoint`` recompute a block; ``compiled`` compiles the model; ``plain`` does neither.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

STEPS = 4
VARIANTS = ("plain", "checkpoint", "reentrant", "compiled")


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inputs(x).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.outputs(mixed.transpose(1, 2).reshape(x.shape))


class Net(nn.Module):
    def __init__(self, variant: str) -> None:
        super().__init__()
        self.variant = variant
        self.stem = nn.Conv2d(8, 128, 3, padding=1)
        self.attention = Attention(128)
        self.block = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
        self.last = nn.Linear(128, 16)

    def forward(self, images: Tensor) -> Tensor:
        x = self.attention(self.stem(images).flatten(2).transpose(1, 2))
        if self.variant in ("checkpoint", "reentrant"):
            x = x + checkpoint(self.block, x, use_reentrant=self.variant == "reentrant")
        else:
            x = x + self.block(x)
        return self.last(x.mean(1))


def main(device: str, variant: str) -> None:
    torch.manual_seed(0)
    plain = Net(variant).to(device)
    model: Any = torch.compile(plain) if variant == "compiled" else plain
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    images, labels = torch.randn(8, 8, 16, 16).to(device), torch.randint(16, (8,)).to(device)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
