"""Which gradients of a Paddle step a format's range made wrong, from replays of the step.

The thresholds are those of PyTorch's diagnosis (``mezzo.observe.nonfinite.shadows``): gradients are judged tensor by tensor, and
one that contains only rounding noise (a bias before a norm) is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mezzo.formats import FP16, Format
from mezzo.launch.paddle.nonfinite.replay import KEPT, NO_UPPER, NONE, Limits, NotRepeated, ReplayedPass, gradients
from mezzo.launch.paddle.tape import TapedOperation
from mezzo.observe.limits import LOST_BELOW, ROUNDOFFS, SHARE_BELOW
from mezzo.observe.nonfinite.evidence import GradientErrors, Source, WrongGradient


def gradient_errors(
    operations: Sequence[TapedOperation],
    passes: Sequence[ReplayedPass],
    weights: Sequence[Any],
    fmt: Format,
    sources: tuple[Source, ...],
) -> GradientErrors | None:
    """Return which gradients of ``weights`` the range of ``fmt`` made wrong; None if the step has no finite gradients.

    Args:
        operations: the operations of the step.
        passes: its backward passes.
        weights: its trained parameters.
        fmt: the format that the policy rounds to.
        sources: where the step lost values; a replay of the whole step does not show which of them a gradient depends on.

    Raises:
        NotRepeated: the step cannot be computed again.
    """

    def replayed(limits: Limits) -> dict[int, Any]:
        return gradients(operations, passes, weights, fmt, limits)

    actual = {key: g for key, g in replayed(KEPT).items() if np.isfinite(g).all()}
    if not actual:
        return None
    true = replayed(NONE)
    if not all(np.isfinite(true[key]).all() for key in actual):
        raise NotRepeated("without the format's limits its gradients are beyond FP32")
    by_id = {id(weight): weight for weight in weights}
    below, zeros, norm = _compared(actual, true, by_id, fmt, sources)
    above = _compared(actual, replayed(NO_UPPER), by_id, fmt, sources)[0] if below else []
    noise = FP16.eps * max((_root_mean_square(g) for g in true.values()), default=0.0)
    above = [wrong for wrong in above if wrong.error * _root_mean_square(true[id(wrong.parameter)]) > noise]
    lost = [wrong for wrong in below if wrong.error > LOST_BELOW]
    size = sum(g.size for g in actual.values())
    enough = sum(true[id(wrong.parameter)].size for wrong in lost) > SHARE_BELOW * size
    return GradientErrors(tuple(above), tuple(lost) if enough else (), len(actual), zeros, norm)


def _compared(
    actual: dict[int, Any], true: dict[int, Any], weights: dict[int, Any], fmt: Format, sources: tuple[Source, ...]
) -> tuple[list[WrongGradient], float, float]:
    """Return the gradients that are wrong, the share of elements that became 0, and the norm of the true gradients."""
    wrong, num_zeros, num_nonzero, norms = [], 0, 0, [0.0]
    for key, gradient in actual.items():
        norm, nonzero = _norm(true[key]), true[key] != 0
        norms.append(norm)
        num_nonzero += int(nonzero.sum())
        num_zeros += int(((gradient == 0) & nonzero).sum())
        difference = _norm(gradient.astype(np.float64) - true[key])
        if norm > 0 and difference > ROUNDOFFS * fmt.eps / 2 * norm:
            wrong.append(WrongGradient(weights[key], difference / norm, sources))
    return wrong, num_zeros / num_nonzero if num_nonzero else 0.0, math.hypot(*norms)


def _root_mean_square(gradient: Any) -> float:
    return _norm(gradient) / math.sqrt(gradient.size) if gradient.size else 0.0


def _norm(values: Any) -> float:
    return float(np.linalg.norm(values.astype(np.float64).ravel()))
