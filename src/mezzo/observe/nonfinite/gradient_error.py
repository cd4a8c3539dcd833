"""Measure the error that a format's range caused in each gradient of a step: it alone decides whether a lost value matters.

A gradient is compared with its true values (``mezzo.observe.nonfinite.shadows``), tensor by tensor: in a norm over all of them, a single
lost gradient would not show. A gradient that is only rounding noise (a bias before a norm) is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mezzo.formats import FORMATS, FP16
from mezzo.observe.limits import LOST_BELOW, ROUNDOFFS, SHARE_BELOW
from mezzo.observe.nonfinite.shadows import RangeEnd, Shadows
from mezzo.observe.nonfinite.sources import Source
from mezzo.observe.tensors import difference, is_finite, norm


@dataclass(frozen=True)
class WrongGradient:
    """One parameter whose gradient is wrong."""

    parameter: Tensor
    error: float
    """The norm of the difference over the true gradient's."""
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class GradientErrors:
    """The errors of the gradients after a backward pass."""

    index: int
    """Number of operations recorded before the comparison."""
    off: Mapping[RangeEnd, tuple[WrongGradient, ...]]
    num_gradients: int
    zeros: float
    """Share of the truly non-zero elements that are 0."""
    norm: float
    """The norm of the true gradients, with the loss scale."""

    @property
    def nothing(self) -> bool:
        """Whether no gradient is off."""
        return not any(self.off.values())


def measure_errors(
    index: int, weights: Iterable[Tensor], shadows: Mapping[RangeEnd, Shadows[Source]]
) -> GradientErrors:
    """Return the errors of the gradients of ``weights``; waits for the device."""
    unique = {id(p): p for p in weights}.values()
    return measure_gradients(index, [(p, p.grad.detach()) for p in unique if p.grad is not None], shadows)


def measure_gradients(
    index: int, gradients: Sequence[tuple[Tensor, Tensor]], shadows: Mapping[RangeEnd, Shadows[Source]]
) -> GradientErrors:
    """Return the errors of ``gradients``, each with its parameter; waits for the device."""
    comparable = [(p, g) for p, g in gradients if g.layout is torch.strided and g.numel() and is_finite(g)]
    above, _, _ = _off(comparable, shadows[RangeEnd.ABOVE])
    below, zeros, true_norm = _off(comparable, shadows[RangeEnd.BELOW])
    size = sum(g.numel() for _, g in comparable)
    lost = [off for off in below if off.error > LOST_BELOW]
    enough = sum(off.parameter.numel() for off in lost) > SHARE_BELOW * size
    off = {RangeEnd.ABOVE: tuple(above), RangeEnd.BELOW: tuple(lost) if enough else ()}
    return GradientErrors(index, off, len(comparable), zeros, true_norm)


def _off(gradients: list[tuple[Tensor, Tensor]], shadows: Shadows[Source]) -> tuple[list[WrongGradient], float, float]:
    """Return the gradients that differ from the true ones, the share of elements that became 0, and the norm of the true gradients."""
    if not shadows:
        return [], 0.0, 0.0
    found: list[tuple[WrongGradient, float]] = []
    densities, zeros, others, norms = [0.0], 0, 0, [0.0]
    for parameter, gradient in gradients:
        truth = shadows.read(gradient)
        true = gradient if truth is None else truth[0]
        whole = norm(true)
        norms.append(whole)
        densities.append(whole / math.sqrt(true.numel()))
        others += int((true != 0).sum())
        if truth is None:
            continue
        zeros += int(((gradient == 0) & (true != 0)).sum())
        error = difference(gradient, true)
        if whole > 0 and error > tolerance(truth[1]) * whole:
            found.append((WrongGradient(parameter, error / whole, truth[1]), error / math.sqrt(true.numel())))
    noise = FP16.eps * max(densities)
    kept = [off for off, density in found if density > noise or shadows.end is RangeEnd.BELOW]
    return kept, zeros / others if others else 0.0, math.hypot(*norms)


def tolerance(sources: Iterable[Source]) -> float:
    """Return the largest relative error of a gradient that rounding alone explains."""
    return max((ROUNDOFFS * FORMATS[s.format].eps / 2 for s in sources if s.format in FORMATS), default=0.0)
