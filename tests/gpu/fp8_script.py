"""A small transformer's MLP blocks for runs under FP8: ``python fp8_script.py DEVICE WIDTH STEPS``.

Prints its losses, and the products and kernels of one late step, as torch's profiler saw them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ROWS, CLASSES = 256, 16


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def model_of(device: str, width: int) -> nn.Module:
    """Return two blocks; each has two linear layers that FP8 suits if ``width`` is 2048."""
    torch.manual_seed(0)
    return nn.Sequential(Block(width), Block(width), nn.LayerNorm(width), nn.Linear(width, CLASSES)).to(device)


def batch(device: str, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, width, generator=generator)
    labels = (x @ torch.randn(width, CLASSES, generator=generator)).argmax(-1)
    return x.to(device), labels.to(device)


def rate(width: int) -> float:
    """Return a learning rate at which ``width`` learns in 30 steps."""
    return 0.06 / width


def profile_of(step: Callable[[], object], device: str) -> dict[str, Any]:
    """Return how often the step called FP8's product, and which kernels that ran."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    called = [event for event in profile.events() if event.name == "aten::_scaled_mm"]
    return {"fp8_products": len(called), "fp8_kernels": sorted({k.name for e in called for k in e.kernels})}


def main(device: str, width: int, steps: int) -> None:
    model, (x, y) = model_of(device, width), batch(device, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate(width))
    losses = []

    def step() -> None:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    for _ in range(steps):
        step()
    print(json.dumps({"losses": torch.stack(losses).tolist()}), flush=True)
    print(json.dumps(profile_of(step, device)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
