"""A model and a loss for GPUs that compute nothing: the loss is a number of the host's, since one that is 0 ends a run."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

calls = ctypes.CDLL(None)
"""What ``null_gpu.c`` counted."""
answers = torch.library.Library("aten", "IMPL")
"""To what the host asks about a loss: no kernel answers."""
answers.impl("isfinite", lambda x: torch.ones(x.shape, dtype=torch.bool).to(x.device), "CUDA")
answers.impl("all", lambda x: torch.tensor(True).to(x.device), "CUDA")


class NoProfile:
    """Stand for torch's profiler: without CUPTI it has no kernels."""

    def __init__(self, **settings: Any) -> None: ...

    def __enter__(self) -> NoProfile:
        return self

    def __exit__(self, *error: object) -> None: ...

    def events(self) -> list[Any]:
        return []

    key_averages = events


torch.profiler.profile = NoProfile  # type: ignore[assignment, misc]


class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(outputs)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.zeros_like(ctx.saved_tensors[0]), None


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(size, 2 * size), nn.Linear(2 * size, size), nn.LayerNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.plain, self.again, self.last = nn.Linear(8, 16), Block(16), Block(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        kept = {"preserve_rng_state": False}  # a capture cannot read the generator's state
        return self.last(checkpoint(self.again, self.plain(self.first(x)), use_reentrant=False, **kept))
