"""Gradients of many parameters taken together: their norm, and setting them aside."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mezzo.formats import FP32


def total_norm(gradients: list[Tensor]) -> Tensor:
    """Return the norm of all gradients together: FP32 (FP64 where a gradient is), on the first one's device.

    16-bit gradients are squared in FP32: their squares leave FP16's range from 256 on.
    """
    widest = None if gradients[0].element_size() > 2 else FP32.dtype
    norms = list(torch._foreach_norm(gradients, dtype=widest))
    if len({n.device for n in norms}) > 1:
        norms = [n.to(norms[0].device) for n in norms]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def not_finite(norm: Tensor) -> Tensor:
    """Return 1 where ``norm`` is not finite, else 0, in FP32 and without waiting for the device."""
    return (norm - norm).ne(0).float()  # NaN there; isfinite would be four operations for this one


def any_not_finite(gradients: list[Tensor]) -> Tensor:
    """Return 1 where an element of a gradient is not finite, else 0, in FP32 and without waiting for the device."""
    largest = torch._foreach_norm(gradients, ord=math.inf)  # of magnitudes: no square that leaves FP32's range
    return (~torch.stack([n.to(largest[0].device) for n in largest]).isfinite()).any().float()


def all_finite(gradients: Iterable[Tensor]) -> bool:
    """Return whether every element of every gradient is finite; waits for the device."""
    return all(bool(g.isfinite().all()) for g in gradients)


def set_aside(parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
    """Take the gradients off ``parameters`` and return them, so that a backward pass leaves fresh ones."""
    aside = [(p, p.grad) for p in parameters if p.grad is not None]
    for parameter, _ in aside:
        parameter.grad = None
    return aside


def put_back(aside: list[tuple[nn.Parameter, Tensor]]) -> None:
    """Add what ``set_aside`` took to the fresh gradients."""
    for parameter, gradient in aside:
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def worst(named: Iterable[tuple[str, Tensor | None]]) -> str:
    """Name up to five gradients with the largest share of elements that are not finite; waits for the device."""
    shares = [(float((~g.isfinite()).float().mean()), name) for name, g in named if g is not None]
    found = sorted((s for s in shares if s[0] > 0), reverse=True)[:5]
    return ", ".join(f"{name} ({share:.0%})" for share, name in found) or "parameters outside the models"
