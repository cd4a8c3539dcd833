"""Rates of ``equivalent`` and ``different`` where the true difference is exactly the margin.

The margin is the larger of a known share and the baseline's spread, the median distance between two of its runs. Settings differ in
which of the two is larger (the share is 0 to 5 times the spread), in how closely seeds pair (the differences of pairs have 1% to 100% of
the baseline's standard deviation, or the policy's runs are independent of the baseline's), and in the sign.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from benchmarks.verdicts.rates import SEEDS, Array, Rate, drawn, worst
from mezzo.commands.compare.quantities import Absolute, BoolArray, Margin, PairStatistics, Quantity

SHARES = (0.0, 0.3, 0.6, 0.9, 1.0, 1.2, 2.0, 5.0)
CLOSENESS = (0.01, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, math.inf)
UNPAIRED = math.inf


@dataclass(frozen=True)
class Setting:
    """The assumptions of a simulation."""

    noise: str
    num_seeds: int
    share: float
    """The known part of the margin, in units of the spread."""
    closeness: float
    """Standard deviation of the pairs' differences, relative to the baseline's runs; ``UNPAIRED`` for independent runs."""
    sign: int
    at: float = 1.0
    """The true difference, in units of the margin."""


def rates(effort: float) -> list[Rate]:
    """Return the worst rates by number of seeds and noise, and how often a policy without a difference is found equivalent."""
    num, found = max(200, int(10_000 * effort)), []
    for noise, num_seeds in itertools.product(("normal", "heavy", "skewed"), SEEDS):
        for verdict in ("equivalent", "different"):
            what = f"{verdict} at the margin, {num_seeds} seeds, {noise} noise"
            most = None if noise == "skewed" else 0.05
            ends = partial(share_of, verdict=verdict)
            found.append(worst(what, _settings(noise, num_seeds), ends, num=num, most=most))
    for num_seeds in SEEDS:
        setting = Setting("normal", num_seeds, 5.0, 1.0, 1, at=0.0)
        share = share_of(setting, "equivalent", num=10 * num, seed=0)
        what = f"equivalent without a difference, {num_seeds} seeds, margin of five times the differences' deviation"
        found.append(Rate(what=what, share=share, num=10 * num))
    return found


def _settings(noise: str, num_seeds: int) -> Iterator[Setting]:
    for share, closeness, sign in itertools.product(SHARES, CLOSENESS, (1, -1)):
        yield Setting(noise, num_seeds, share, closeness, sign)


def share_of(setting: Setting, verdict: str, *, num: int, seed: int) -> float:
    """Return the share of ``num`` comparisons that end in ``verdict``."""
    rng = np.random.default_rng(seed)
    shape = (num, setting.num_seeds)
    spread = true_spread(setting.noise)
    margin = max(setting.share, 1.0) * spread
    baseline, own = drawn(setting.noise, shape, rng), drawn(setting.noise, shape, rng)
    noise = own - baseline if setting.closeness == UNPAIRED else setting.closeness * own
    differences = setting.sign * setting.at * margin + noise
    return float(_are(verdict, differences, baseline, share=setting.share * spread).mean())


def judged(differences: Array, baseline: Array, *, share: float) -> str | None:
    """Return ``equivalent`` or ``different`` for one sample of pairs, None for undecided."""
    verdicts = ("equivalent", "different")
    return next((v for v in verdicts if _are(v, differences[None], baseline[None], share=share).all()), None)


def _are(verdict: str, differences: Array, baseline: Array, *, share: float) -> BoolArray:
    """Return which rows of samples end in ``verdict``, by the functions that judge runs."""
    num_seeds = differences.shape[1]
    quantity = Quantity(
        name="loss", pairs=((1.0, 1.0),) * num_seeds, scale=Absolute(), margin=Margin(share=share, why="")
    )
    seen = PairStatistics(
        mean=differences.mean(axis=1),
        deviation=differences.std(axis=1, ddof=1),
        spread=spreads(baseline),
        rounding=np.zeros(len(differences)),
    )
    if verdict == "equivalent":
        return quantity.inside(seen, num_seeds)
    return quantity.beyond(seen, num_seeds, num_quantities=1)


def spreads(places: Array) -> Array:
    first, second = np.triu_indices(places.shape[1], 1)
    found: Array = np.median(np.abs(places[:, first] - places[:, second]), axis=1)
    return found


@cache
def true_spread(noise: str) -> float:
    """Return the median distance between two values of the noise."""
    pairs = drawn(noise, (2_000_000, 2), np.random.default_rng(0))
    return float(np.median(np.abs(pairs[:, 0] - pairs[:, 1])))
