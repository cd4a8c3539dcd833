"""The margin: how far a policy may be from the baseline and still count as equivalent.

The margin of a quantity is the larger of two:

* a share (``--margin``, 2%) of the baseline's final value: of a loss by ratio, of a proportion as Cohen's h. For a loss, it is
  at most five times that share (10%) of the fall in the baseline's training: early in training, 2% of
  the loss could be more than everything learned. A proportion that counts examples has a sampling error, ``1 / sqrt(examples)``
  on the arcsine scale at any value, below which the margin cannot go. A loss of zero has no share; its margin is the FP32 resolution
  of the loss at the start of training;
* the baseline's own spread: the median distance between two of its runs with different seeds. A policy cannot be asked
  to be closer to FP32 than FP32 is to itself.

The spread is estimated from few seeds, so its error is taken into account: a 99% confidence bound from below is used to show that a
difference lies inside the margin, and one from above to show that it lies beyond. It is the median of all pairwise distances (Bickel and
Lehmann, Annals of Statistics 7, 1979; Shamos 1976), not the standard deviation, which a single outlier can stretch at will.
Its distribution has no closed form; both approximations are fitted to a million samples each. Under normal noise the estimate is
``b * sqrt(chi2 / nu)`` times the true spread, with ``nu`` degrees of freedom (quantiles from 0.5% to 2.5% are right to within 2%). The
lower bound is that of Student's t with 3 degrees of freedom, so that it also holds for seeds with outliers: with two or three seeds
it leaves a seventh of the estimate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from mezzo.measure.compare.scales import Array

_FITTED = {
    2: (1.00, 1.483),
    3: (1.93, 1.53),
    4: (2.89, 1.289),
    5: (3.03, 1.210),
    6: (3.87, 1.20),
    7: (4.73, 1.141),
    8: (5.42, 1.119),
    9: (6.30, 1.107),
}
"""``nu`` and ``b`` by the number of seeds."""
_OVERESTIMATED = {2: 6.55, 3: 6.71, 4: 4.59, 5: 3.23, 6: 3.08, 7: 2.77, 8: 2.47, 9: 2.36}
"""Factor by which the spread is overestimated in one case of a hundred, by the number of seeds."""


@dataclass(frozen=True, kw_only=True)
class Margin:
    """The margin of one quantity on its scale."""

    share: float
    """The part that is not estimated."""
    why: str
    """The source of that part, in words."""
    spread: float = 0.0
    """The median distance between two of the baseline's runs, as estimated."""
    step: float = 0.0
    """The step of the values, by which the spread may be too large or too small."""

    def lower_bound(self, num_seeds: int, spread: Array | None = None) -> Array:
        """Return the lower confidence bound of the margin, inside which differences are equivalent; for other spreads if given."""
        known = np.maximum(np.asarray(self.spread if spread is None else spread) - self.step, 0.0)
        otherwise = 1.0 + 2.2 / math.sqrt(num_seeds) + 5.4 / num_seeds
        return np.maximum(self.share, known / _OVERESTIMATED.get(num_seeds, otherwise))

    def upper_bound(self, num_seeds: int, spread: Array | None = None, *, error: float) -> Array:
        """Return the upper bound of the margin at error level ``error``, beyond which differences are real; for other spreads if given."""
        possible = np.asarray(self.spread if spread is None else spread) + self.step
        return np.maximum(self.share, possible / spread_errors(np.asarray(error), num_seeds))


def spread_of(values: Array) -> float:
    """Return the median distance between two of ``values``; 0 for a single one."""
    first, second = np.triu_indices(len(values), 1)
    return float(np.median(np.abs(values[first] - values[second]))) if len(values) > 1 else 0.0


def spread_errors(quantiles: Array, num_seeds: int) -> Array:
    """Return the ratio of the estimated to the true spread of ``num_seeds`` normal runs, at quantiles of its distribution."""
    freedom, bias = _FITTED.get(num_seeds, (0.86 * num_seeds - 1.5, 1.0 + 0.85 / num_seeds))
    errors: Array = bias * np.sqrt(2 * special.gammaincinv(freedom / 2, quantiles) / freedom)
    return errors
