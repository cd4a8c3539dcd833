"""How many seeds would decide a comparison, and with what probability.

The observed pairs only estimate the true mean and spread: with three seeds, the true spread may well be twice the estimate. So
true values that fit the observed pairs are drawn (mean and variance from their posterior under Jeffreys' prior, the baseline's
spread likewise), future pairs are drawn for each, and the tests run on all pairs together. The result is the smallest number of pairs
that decides 85% of the cases. If the spread was underestimated by chance, that number is too small, so the true rate of decided
cases is lower: four of five or more, as ``python -m benchmarks verdicts`` shows. The draws are the same each time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy import special

from mezzo.measure.compare.margins import spread_errors
from mezzo.measure.compare.quantities import PairStatistics, Quantity

MAX_SEEDS = 1000
"""The largest number of seeds that is considered."""
DECIDED_SHARE = 0.8
"""The smallest share of cases that the returned number decides."""
_ESTIMATED_SHARE = 0.85
"""The share that is asked of the estimate, which may be too optimistic."""
_DRAWS = 2000


def seeds_needed(quantities: Sequence[Quantity]) -> int | None:
    """Return the smallest larger number of pairs that decides; None if above ``MAX_SEEDS``, or for a single pair."""
    if min(map(len, quantities)) < 2:
        return None
    rng = np.random.default_rng(0)
    futures = [Future(quantity, rng) for quantity in quantities]
    counts = range(max(map(len, quantities)) + 1, MAX_SEEDS + 1)
    found = bisect_left(
        counts, True, key=lambda n: _chance(futures, n) >= _ESTIMATED_SHARE
    )  # more seeds decide more cases
    return counts[found] if found < len(counts) else None


def _chance(futures: Sequence[Future], num_pairs: int) -> float:
    inside, beyond = np.ones(_DRAWS, dtype=bool), np.zeros(_DRAWS, dtype=bool)
    for future in futures:
        seen = future.seen(num_pairs)
        inside &= future.quantity.inside(seen, num_pairs)
        beyond |= future.quantity.beyond(seen, num_pairs, num_quantities=len(futures))
    return float(np.mean(inside | beyond))


class Future:
    """Samples of what further pairs of a quantity may show."""

    def __init__(self, quantity: Quantity, rng: np.random.Generator) -> None:
        self.quantity, self._num = quantity, len(quantity)
        # The absolute mean, because the sign of a difference must not matter.
        self._observed = replace(quantity.seen, mean=np.abs(quantity.seen.mean))
        freedom = self._num - 1
        self._deviation = self._observed.deviation * np.sqrt(
            freedom / (2 * special.gammaincinv(freedom / 2, rng.random(_DRAWS)))
        )
        self._mean = self._observed.mean + self._deviation / math.sqrt(self._num) * rng.standard_normal(_DRAWS)
        self._spread = self._observed.spread / spread_errors(rng.random(_DRAWS), self._num)
        self._draws = rng.standard_normal(_DRAWS), rng.random(_DRAWS), rng.random(_DRAWS)

    def seen(self, num_pairs: int) -> PairStatistics:
        """Return the statistics of ``num_pairs`` pairs, including those already seen."""
        more = num_pairs - self._num
        normal, uniform, spread_uniform = self._draws
        mean = self._mean + self._deviation / math.sqrt(more) * normal
        squares = (
            self._deviation**2 * 2 * special.gammaincinv((more - 1) / 2, uniform) if more > 1 else np.zeros(_DRAWS)
        )
        between = self._num * more / num_pairs * (mean - self._observed.mean) ** 2
        total = (self._num - 1) * self._observed.deviation**2 + squares + between
        deviation = np.maximum(np.sqrt(total / (num_pairs - 1)), self.quantity.step / 2.0)
        return PairStatistics(
            mean=(self._num * self._observed.mean + more * mean) / num_pairs,
            deviation=deviation,
            spread=self._spread * spread_errors(spread_uniform, num_pairs),
            rounding=self._observed.rounding,
        )
