"""Rates for a metric that is a count over a test set, or has few printed digits, with the true difference at the margin.

A latent accuracy is moved by the margin on the arcsine scale and then rounded to the step, or drawn from a binomial, as in a
new test set. Settings differ in the accuracy and its place within a step, in the spread of seeds that both runs
of a pair share, and in the spread that each run has alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.verdicts.rates import SEEDS, Array, Rate, worst
from mezzo.commands.compare.quantities import Margin, MetricGrid, Proportion, Quantity, spread_of

ACCURACIES = (0.5, 0.9, 0.97, 0.99)
SHARED, OWN = (0.0, 0.02, 0.1), (0.0001, 0.005, 0.02, 0.05)
"""Standard deviations on the arcsine scale."""
MARGIN = 0.02
_SCALE = Proportion(1.0)


@dataclass(frozen=True)
class Setting:
    """The assumptions of a simulation."""

    num_examples: int
    counted: bool
    """Whether the values are known to be counts over examples; otherwise the step is the printed digits'."""
    num_seeds: int
    accuracy: float
    shared: float
    own: float
    drawn: bool
    """Whether counts are drawn from a binomial."""

    @property
    def share(self) -> float:
        return max(MARGIN, self.num_examples**-0.5) if self.counted else MARGIN


def rates(effort: float) -> list[Rate]:
    """Return the worst rates by the metric's step and the number of seeds."""
    num, found = max(20, int(120 * effort)), []
    steps = ((100, False), (1000, False), (10_000, False), (360, True))
    for (num_examples, counted), num_seeds in itertools.product(steps, SEEDS):
        form = f"counts of {num_examples} examples" if counted else f"steps of 1/{num_examples}"
        for verdict in ("equivalent", "different"):
            what = f"{verdict} at the margin, {num_seeds} seeds, accuracy in {form}"
            settings, share = _settings(num_examples, counted, num_seeds), partial(share_of, verdict=verdict)
            # Times 100: a standard error of 0.2% at a bound of 5%.
            found.append(worst(what, settings, share, num=num, times=100, most=0.05))
    return found


def _settings(num_examples: int, counted: bool, num_seeds: int) -> Iterator[Setting]:
    for number, (accuracy, shared, own, is_drawn) in enumerate(
        itertools.product(ACCURACIES, SHARED, OWN, (False, True))
    ):
        place = accuracy + (number % 7 - 3) / 7 / num_examples
        yield Setting(num_examples, counted, num_seeds, place, shared, own, is_drawn)


def share_of(setting: Setting, verdict: str, *, num: int, seed: int) -> float:
    """Return the share of ``num`` comparisons that end in ``verdict``."""
    rng = np.random.default_rng(seed)
    shape, ours = (num, setting.num_seeds), float(_SCALE.to_scale([setting.accuracy])[0])
    sampling = setting.num_examples**-0.5 if setting.drawn else 0.0
    spread = 0.9539 * math.hypot(setting.shared, setting.own, sampling)  # median distance of two normal values
    baseline = ours + setting.shared * rng.standard_normal(shape)
    policy = baseline - max(setting.share, spread) + setting.own * rng.standard_normal(shape)
    baseline = baseline + setting.own * rng.standard_normal(shape)
    sides = [_in_steps(side, setting, rng) for side in (policy, baseline)]
    grid = MetricGrid(step=1 / setting.num_examples, num_examples=setting.num_examples if setting.counted else None)
    return sum(_is(verdict, *values, setting=setting, grid=grid) for values in zip(*sides, strict=True)) / num


def _in_steps(places: Array, setting: Setting, rng: np.random.Generator) -> Array:
    accuracies = np.sin(np.clip(places, 0.0, math.pi) / 2) ** 2
    counts = (
        rng.binomial(setting.num_examples, accuracies) if setting.drawn else np.round(accuracies * setting.num_examples)
    )
    found: Array = counts / setting.num_examples
    return found


def _is(verdict: str, ours: Array, theirs: Array, *, setting: Setting, grid: MetricGrid) -> bool:
    spread, step = spread_of(_SCALE.to_scale(theirs.tolist())), grid.step_on(_SCALE, theirs.tolist())
    quantity = Quantity(
        name="accuracy",
        pairs=tuple(zip(ours.tolist(), theirs.tolist(), strict=True)),
        scale=_SCALE,
        margin=Margin(share=setting.share, why="", spread=spread, step=step),
        grid=grid,
    )
    return quantity.is_inside() if verdict == "equivalent" else quantity.is_beyond(num_quantities=1)
