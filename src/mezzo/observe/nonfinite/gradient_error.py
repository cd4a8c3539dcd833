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
from mezzo.observe.nonfinite.shadows import RangeEnd, Twins
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
    """Number of operations recorded before."""
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


def weigh(index: int, weights: Iterable[Tensor], twins: Mapping[RangeEnd, Twins[Source]]) -> GradientErrors:
    """Return the errors of the gradients of ``weights``; waits for the device."""
    unique = {id(p): p for p in weights}.values()
    return weigh_gradients(index, [(p, p.grad.detach()) for p in unique if p.grad is not None], twins)


def weigh_gradients(
    index: int, gradients: Sequence[tuple[Tensor, Tensor]], twins: Mapping[RangeEnd, Twins[Source]]
) -> GradientErrors:
    """Return the errors of ``gradients``, each with its parameter; waits for the device."""
    known = [(p, g) for p, g in gradients if g.layout is torch.strided and g.numel() and is_finite(g)]
    above, _, _ = _off(known, twins[RangeEnd.ABOVE])
    below, zeros, true_norm = _off(known, twins[RangeEnd.BELOW])
    size = sum(g.numel() for _, g in known)
    lost = [off for off in below if off.error > LOST_BELOW]
    enough = sum(off.parameter.numel() for off in lost) > SHARE_BELOW * size
    off = {RangeEnd.ABOVE: tuple(above), RangeEnd.BELOW: tuple(lost) if enough else ()}
    return GradientErrors(index, off, len(known), zeros, true_norm)


def _off(known: list[tuple[Tensor, Tensor]], twins: Twins[Source]) -> tuple[list[WrongGradient], float, float]:
    """Return the gradients that differ from the true ones, the share of the elements that became 0, and the norm of the true ones."""
    if not twins:
        return [], 0.0, 0.0
    found: list[tuple[WrongGradient, float]] = []
    densities, zeros, others, norms = [0.0], 0, 0, [0.0]
    for parameter, gradient in known:
        truth = twins.read(gradient)
        true = gradient if truth is None else truth[0]
        whole = norm(true)
        norms.append(whole)
        densities.append(whole / math.sqrt(true.numel()))
        others += int((true != 0).sum())
        if truth is None:
            continue
        zeros += int(((gradient == 0) & (true != 0)).sum())
        apart = difference(gradient, true)
        if whole > 0 and apart > tolerance(truth[1]) * whole:
            found.append((WrongGradient(parameter, apart / whole, truth[1]), apart / math.sqrt(true.numel())))
    noise = FP16.eps * max(densities)
    kept = [off for off, density in found if density > noise or twins.end is RangeEnd.BELOW]
    return kept, zeros / others if others else 0.0, math.hypot(*norms)


def tolerance(sources: Iterable[Source]) -> float:
    """Return the largest relative error of a gradient that is no more than rounding."""
    return max((ROUNDOFFS * FORMATS[s.format].eps / 2 for s in sources if s.format in FORMATS), default=0.0)
