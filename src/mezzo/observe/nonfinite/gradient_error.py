"""Weigh what a format's range did to the gradients of a step: the one measure of whether a lost value matters.

A gradient is compared with its true values (``mezzo.observe.nonfinite.shadows``), tensor by tensor: over all together, one that is lost
would not show. A gradient that is nothing but rounding noise (a bias before a norm) is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mezzo.formats import FORMATS, FP16
from mezzo.observe.limits import FADED, LOST_BELOW, ROUNDOFFS, SHARE_BELOW
from mezzo.observe.nonfinite.shadows import End, Twins
from mezzo.observe.nonfinite.sources import Source
from mezzo.observe.tensors import difference, is_finite, norm


@dataclass(frozen=True)
class Off:
    """One parameter whose gradient is wrong."""

    parameter: Tensor
    error: float
    """The norm of the difference over the true gradient's."""
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Weighed:
    """What was found after a backward pass."""

    index: int
    """How many operations had been seen."""
    off: Mapping[End, tuple[Off, ...]]
    num_gradients: int
    zeros: float
    """Which part of the elements that are not 0 in truth is 0."""
    norm: float
    """Of the true gradients, the loss scale included."""

    @property
    def nothing(self) -> bool:
        """Whether no gradient is off."""
        return not any(self.off.values())


def weigh(index: int, weights: Iterable[Tensor], twins: Mapping[End, Twins[Source]]) -> Weighed:
    """Return which gradients of ``weights`` the range made wrong; waits for the device."""
    held = {id(p): (p, p.grad) for p in weights}.values()
    return weigh_gradients(index, [(p, g.detach()) for p, g in held if g is not None], twins)


def weigh_gradients(
    index: int, gradients: Sequence[tuple[Tensor, Tensor]], twins: Mapping[End, Twins[Source]]
) -> Weighed:
    """Return which of ``gradients``, each with its parameter, the range made wrong; waits for the device."""
    known = [(p, g) for p, g in gradients if g.layout is torch.strided and g.numel() and is_finite(g)]
    above, _, _ = _off(known, twins[End.ABOVE])
    below, zeros, true_norm = _off(known, twins[End.BELOW])
    size = sum(g.numel() for _, g in known)
    lost = [off for off in below if off.error > LOST_BELOW]
    enough = sum(off.parameter.numel() for off in lost) > SHARE_BELOW * size
    off = {End.ABOVE: tuple(above), End.BELOW: tuple(lost) if enough else ()}
    return Weighed(index, off, len(known), zeros, true_norm)


def faded(norm: float, largest_before: float) -> bool:
    """Return whether a gradient's norm is next to nothing beside those of the steps before."""
    return norm < FADED * largest_before


def _off(known: list[tuple[Tensor, Tensor]], twins: Twins[Source]) -> tuple[list[Off], float, float]:
    """Return the gradients that differ from the true ones, the part of the elements that became 0, and the norm of the true ones."""
    if not twins:
        return [], 0.0, 0.0
    found: list[tuple[Off, float]] = []
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
            found.append((Off(parameter, apart / whole, truth[1]), apart / math.sqrt(true.numel())))
    noise = FP16.eps * max(densities)
    kept = [off for off, density in found if density > noise or twins.end is End.BELOW]
    return kept, zeros / others if others else 0.0, math.hypot(*norms)


def tolerance(sources: Iterable[Source]) -> float:
    """Return the largest relative error of a gradient that is no more than rounding."""
    return max((ROUNDOFFS * FORMATS[s.format].eps / 2 for s in sources if s.format in FORMATS), default=0.0)
