"""Whether the number of seeds that an undecided comparison promises really decides.

The first few pairs are judged. If they are undecided, the promise is computed from them, and as many pairs are drawn as it
says. Settings differ in the true difference and in the spread of the differences, both in units of the margin.
"""

from __future__ import annotations

import itertools

import numpy as np

from benchmarks.verdicts.rates import Rate
from mezzo.commands.compare.judge import DECIDED_SHARE, seeds_needed
from mezzo.commands.compare.quantities import Absolute, Margin, Quantity

DIFFERENCES = (0.0, 0.3, 0.5, 1.5, 2.0)
DEVIATIONS = (0.5, 1.0, 2.0, 4.0)
SEEN = (2, 3, 5)


def rates(effort: float) -> list[Rate]:
    """Return how often promises are kept, by number of seeds seen."""
    num, found = max(5, int(40 * effort)), []
    for num_seen in SEEN:
        kept = made = 0
        for place, (difference, deviation) in enumerate(itertools.product(DIFFERENCES, DEVIATIONS)):
            rng = np.random.default_rng(1000 * num_seen + place)
            for _ in range(num):
                outcome = promise(difference, deviation, num_seen=num_seen, rng=rng)
                made, kept = made + (outcome is not None), kept + bool(outcome)
        what = f"as many seeds as promised decide, promised after {num_seen}"
        found.append(Rate(what=what, share=kept / max(made, 1), num=max(made, 1), least=DECIDED_SHARE))
    return found


def promise(difference: float, deviation: float, *, num_seen: int, rng: np.random.Generator) -> bool | None:
    """Return whether a promise is kept; None where ``num_seen`` seeds decide, or no number is promised."""
    drawn = rng.normal(difference, deviation, num_seen)
    first = _quantity(drawn)
    if first.is_inside() or first.is_beyond(num_quantities=1):
        return None
    needed = seeds_needed([first])
    if needed is None:
        return None
    later = _quantity(np.concatenate([drawn, rng.normal(difference, deviation, needed - num_seen)]))
    return later.is_inside() or later.is_beyond(num_quantities=1)


def _quantity(differences: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Quantity:
    pairs = tuple((float(d), 0.0) for d in differences)
    return Quantity(name="loss", pairs=pairs, scale=Absolute(), margin=Margin(share=1.0, why=""))
