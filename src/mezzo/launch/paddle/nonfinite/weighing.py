"""Which gradients of a Paddle step a format's range made wrong, from replays of the step.

The limits are those of PyTorch's diagnosis (``mezzo.observe.nonfinite.gradient_error``): a gradient is judged tensor by tensor, and one
that only contains rounding noise (a bias before a norm) is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mezzo.formats import FP16, Format
from mezzo.launch.paddle.layer_names import LayerNames
from mezzo.launch.paddle.nonfinite.replay import KEPT, NO_UPPER, NONE, Limits, NotRepeated, ReplayedPass, gradients
from mezzo.launch.paddle.tape import TapedOperation
from mezzo.observe.limits import FADED, LOST_BELOW, ROUNDOFFS, SHARE_BELOW
from mezzo.observe.nonfinite.evidence import WrongGradients


@dataclass(frozen=True)
class WrongGradient:
    """One parameter whose gradient is wrong."""

    parameter: Any
    error: float
    """The norm of the difference over the true gradient's."""


@dataclass(frozen=True)
class GradientErrors:
    """The gradients of a step that a format's range made wrong."""

    above: tuple[WrongGradient, ...]
    """Those that are wrong because values became too large."""
    below: tuple[WrongGradient, ...]
    """The same because they became too small."""
    num_gradients: int
    zeros: float
    """The share of elements that are 0 but should not be."""
    norm: float
    """The norm of the true gradients, the loss scale included."""

    def faded(self, largest_before: float) -> bool:
        """Return whether the gradients' norm is next to nothing beside those of the steps before."""
        return self.norm < FADED * largest_before

    def wrong(self, off: Sequence[WrongGradient], names: LayerNames, zeros: float = 0.0) -> WrongGradients:
        """Return the record of gradients that are wrong."""
        worst = max(off, key=lambda one: one.error)
        return WrongGradients(
            parameter=names.parameter(worst.parameter),
            error=worst.error,
            count=len(off),
            total=self.num_gradients,
            zeros=zeros,
        )


def weigh(
    operations: Sequence[TapedOperation], passes: Sequence[ReplayedPass], weights: Sequence[Any], fmt: Format
) -> GradientErrors | None:
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
    by_id = {id(weight): weight for weight in weights}
    below, zeros, norm = _off(actual, true, by_id, fmt)
    above = _off(actual, computed(NO_UPPER), by_id, fmt)[0] if below else []
    most = FP16.eps * max((_density(g) for g in true.values()), default=0.0)
    above = [off for off in above if off.error * _density(true[id(off.parameter)]) > most]
    lost = [off for off in below if off.error > LOST_BELOW]
    size = sum(g.size for g in actual.values())
    enough = sum(true[id(off.parameter)].size for off in lost) > SHARE_BELOW * size
    return GradientErrors(tuple(above), tuple(lost) if enough else (), len(actual), zeros, norm)


def _off(
    actual: dict[int, Any], true: dict[int, Any], weights: dict[int, Any], fmt: Format
) -> tuple[list[WrongGradient], float, float]:
    """Return the gradients that differ, the share of elements that became 0, and the norm of the true gradients."""
    found, zeros, others, norms = [], 0, 0, [0.0]
    for key, gradient in actual.items():
        whole, nonzero = _norm(true[key]), true[key] != 0
        norms.append(whole)
        others += int(nonzero.sum())
        zeros += int(((gradient == 0) & nonzero).sum())
        apart = _norm(gradient.astype(np.float64) - true[key])
        if whole > 0 and apart > ROUNDOFFS * fmt.eps / 2 * whole:
            found.append(WrongGradient(weights[key], apart / whole))
    return found, zeros / others if others else 0.0, math.hypot(*norms)


def _density(gradient: Any) -> float:
    return _norm(gradient) / math.sqrt(gradient.size) if gradient.size else 0.0


def _norm(values: Any) -> float:
    return float(np.linalg.norm(values.astype(np.float64).ravel()))
