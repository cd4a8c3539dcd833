"""How far a policy may lie from the baseline and still count as equivalent.

The margin of a quantity is the larger of two:

* a share (``--margin``, 2%) of the baseline's final value: of a loss by ratio, of a proportion as Cohen's h. A loss's share is
  at most five times that share of what the baseline's training took off (10%): where training has hardly begun, 2% of
  the loss could be more than all that it learned. A proportion that counts examples has a sampling error of its own, ``1 / sqrt(examples)``
  on the arcsine scale wherever it lies: nobody can ask for less. A loss of zero leaves no share; there it is what FP32 resolves of
  the loss that training began with;
* the baseline's own spread: the median distance between two of its runs with different seeds. Nobody can ask a policy
  to be nearer to FP32 than FP32 is to itself.

The spread is an estimate from few seeds, and so is used with its error: from below, by a 99% confidence bound, where a difference is to
lie inside the margin, and from above where it is to lie beyond. The median of all pairs' distances (Bickel and Lehmann, Annals of
Statistics 7, 1979; Shamos 1976) is taken in place of the standard deviation because one odd seed would stretch that at will.

Its distribution has no closed form; both descriptions are fitted to a million samples each. Under normal noise it is
``b * sqrt(chi2 / nu)`` times the true one with ``nu`` degrees of freedom (quantiles from 0.5% to 2.5% are right to within 2%). The bound
from below is that of Student's t with 3 degrees of freedom, so that it holds for seeds with outliers too: of two or three seeds
it leaves a seventh.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

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
"""By which factor the spread is overestimated in one case of a hundred, by the number of seeds."""


@dataclass(frozen=True, kw_only=True)
class Margin:
    """The margin of one quantity on its scale."""

    share: float
    """The part that is known."""
    why: str
    """Where that comes from, in words."""
    spread: float = 0.0
    """The median distance between two of the baseline's runs, as estimated."""
    step: float = 0.0
    """The step in which values come: what it may have added to the spread, or hidden of it."""

    def surely(self, num_seeds: int, spread: Array | None = None) -> Array:
        """Return the margin that holds with confidence, inside which differences are equivalent; of other spreads where given."""
        known = np.maximum(np.asarray(self.spread if spread is None else spread) - self.step, 0.0)
        otherwise = 1.0 + 2.2 / math.sqrt(num_seeds) + 5.4 / num_seeds
        return np.maximum(self.share, known / _OVERESTIMATED.get(num_seeds, otherwise))

    def at_most(self, num_seeds: int, spread: Array | None = None, *, error: float) -> Array:
        """Return the largest margin that the spread leaves possible but for ``error``, beyond which differences are different."""
        possible = np.asarray(self.spread if spread is None else spread) + self.step
        return np.maximum(self.share, possible / spread_errors(np.asarray(error), num_seeds))


def spread_of(places: Array) -> float:
    """Return the median distance between two of ``places``; 0 for a single one."""
    first, second = np.triu_indices(len(places), 1)
    return float(np.median(np.abs(places[first] - places[second]))) if len(places) > 1 else 0.0


def spread_errors(quantiles: Array, num_seeds: int) -> Array:
    """Return by which factor the spread of ``num_seeds`` normal runs exceeds the true one, at quantiles of its distribution."""
    freedom, bias = _FITTED.get(num_seeds, (0.86 * num_seeds - 1.5, 1.0 + 0.85 / num_seeds))
    errors: Array = bias * np.sqrt(stats.chi2.ppf(quantiles, freedom) / freedom)
    return errors
