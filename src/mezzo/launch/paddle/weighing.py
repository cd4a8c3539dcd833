"""Weigh what a format's range did to the gradients of a Paddle step, from replays of it.

The limits are those of PyTorch's diagnosis (``mezzo.observe.nonfinite.gradient_error``): a gradient is judged tensor by tensor, and one
that is nothing but rounding noise (a bias before a norm) is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mezzo.formats import FP16, Format
from mezzo.launch.paddle.layer_names import LayerNames
from mezzo.launch.paddle.replay import KEPT, NO_UPPER, NONE, Limits, NotRepeated, Pass, gradients
from mezzo.launch.paddle.tape import TapedOperation
from mezzo.observe.limits import FADED, LOST_BELOW, ROUNDOFFS, SHARE_BELOW
from mezzo.observe.nonfinite.evidence import WrongGradients


@dataclass(frozen=True)
class Off:
    """One parameter whose gradient is wrong."""

    parameter: Any
    error: float
    """The norm of the difference over the true gradient's."""


@dataclass(frozen=True)
class Weighed:
    """What a format's range did to the gradients of a step."""

    above: tuple[Off, ...]
    """The gradients that are wrong because values became too large."""
    below: tuple[Off, ...]
    """The same because they became too small."""
    num_gradients: int
    zeros: float
    """Which part of the elements that are not 0 in truth is 0."""
    norm: float
    """Of the true gradients, the loss scale included."""

    def faded(self, largest_before: float) -> bool:
        """Return whether the gradients' norm is next to nothing beside those of the steps before."""
        return self.norm < FADED * largest_before

    def wrong(self, off: Sequence[Off], names: LayerNames, zeros: float = 0.0) -> WrongGradients:
        """Return what became of gradients that are wrong."""
        worst = max(off, key=lambda one: one.error)
        return WrongGradients(
            parameter=names.parameter(worst.parameter),
            error=worst.error,
            count=len(off),
            total=self.num_gradients,
            zeros=zeros,
        )


def weigh(
    operations: Sequence[TapedOperation], passes: Sequence[Pass], weights: Sequence[Any], fmt: Format
) -> Weighed | None:
    """Return which gradients of ``weights`` the range of ``fmt`` made wrong; None if the step has none.

    Raises:
        NotRepeated: the step cannot be computed again.
    """

    def computed(limits: Limits) -> dict[int, Any]:
        return gradients(operations, passes, weights, fmt, limits)

    actual = {key: g for key, g in computed(KEPT).items() if np.isfinite(g).all()}
    if not actual:
        return None
    true = computed(NONE)
    if not all(np.isfinite(true[key]).all() for key in actual):
        raise NotRepeated("without the format's limits its gradients are beyond FP32")
    held = {id(weight): weight for weight in weights}
    below, zeros, norm = _off(actual, true, held, fmt)
    above = _off(actual, computed(NO_UPPER), held, fmt)[0] if below else []
    most = FP16.eps * max((_density(g) for g in true.values()), default=0.0)
    above = [off for off in above if off.error * _density(true[id(off.parameter)]) > most]
    lost = [off for off in below if off.error > LOST_BELOW]
    size = sum(g.size for g in actual.values())
    enough = sum(true[id(off.parameter)].size for off in lost) > SHARE_BELOW * size
    return Weighed(tuple(above), tuple(lost) if enough else (), len(actual), zeros, norm)


def _off(
    actual: dict[int, Any], true: dict[int, Any], weights: dict[int, Any], fmt: Format
) -> tuple[list[Off], float, float]:
    """Return the gradients that differ, the part of the elements that became 0, and the norm of the true ones."""
    found, zeros, others, norms = [], 0, 0, [0.0]
    for key, gradient in actual.items():
        whole = _norm(true[key])
        norms.append(whole)
        others += int((true[key] != 0).sum())
        zeros += int(((gradient == 0) & (true[key] != 0)).sum())
        apart = _norm(gradient.astype(np.float64) - true[key])
        if whole > 0 and apart > ROUNDOFFS * fmt.eps / 2 * whole:
            found.append(Off(weights[key], apart / whole))
    return found, zeros / others if others else 0.0, math.hypot(*norms)


def _density(gradient: Any) -> float:
    return _norm(gradient) / math.sqrt(gradient.size) if gradient.size else 0.0


def _norm(values: Any) -> float:
    return float(np.linalg.norm(values.astype(np.float64).ravel()))
