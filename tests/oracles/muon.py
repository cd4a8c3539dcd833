"""Muon's update as its author's reference computes it: github.com/KellerJordan/Muon, commit 00ba60d3a0d188993831f86e4d62597bb0e9b21c.

Written from its arithmetic, in any format: float64 says what is true, BF16 how far rounding takes the reference from it.
"""

from __future__ import annotations

import torch
from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315


def straightened(matrix: Tensor, *, steps: int = 5) -> Tensor:
    """Iterate in the matrix's own format, with a rounding after each of the reference's operations."""
    wide = matrix if matrix.size(0) <= matrix.size(1) else matrix.mT
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(steps):
        gram = wide @ wide.mT
        wide = A * wide + (B * gram + (C * gram) @ gram) @ wide
    return wide if matrix.size(0) <= matrix.size(1) else wide.mT


def direction(gradient: Tensor, momentum: Tensor, *, beta: float, form: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the step of a matrix before the learning rate, and the new momentum: Nesterov's."""
    momentum = momentum.lerp(gradient, 1 - beta)
    ahead = gradient.lerp(momentum, beta).to(form)
    return straightened(ahead) * max(1, gradient.size(0) / gradient.size(1)) ** 0.5, momentum


def updated(
    weight: Tensor,
    gradient: Tensor,
    momentum: Tensor,
    *,
    lr: float,
    weight_decay: float,
    beta: float,
    form: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the new weight and the new momentum."""
    step, momentum = direction(gradient, momentum, beta=beta, form=form)
    return weight * (1 - lr * weight_decay) - lr * step.to(weight.dtype), momentum
