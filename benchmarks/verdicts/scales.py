"""Rates of the loss scales that ``mezzo diagnose`` finds too low: ``scale_overflow`` where a dynamic scale settles below 2^7.

The largest gradient of each step is drawn: its logarithm is noise around a constant, white or autocorrelated, normal or exponential, so
that the gradient has a power-law tail. A dynamic loss scale halves where it overflows and doubles after a growth interval, from 2^16.
The truth is its mean exponent over the second half of many runs of the same training. At 8, a diagnosis that names the scale is a
false alarm; at 5, one that finds nothing is a miss: powers of two below 2^7 end at 6, so both are one and a half doublings from the limit.
``Faults`` itself judges. A scale that follows slow noise has not settled in a short run, so there it may also be undecided.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, TypeAlias

import numpy as np

from benchmarks.verdicts.courses import correlated
from benchmarks.verdicts.rates import Array, Rate, drawn, run_of, worst
from mezzo.observe.nonfinite.evidence import ModelNames
from mezzo.observe.nonfinite.faults import Faults, SkipRule
from mezzo.observe.settings import LEAST_SCALE
from mezzo.records import Steps

LENGTHS = (24, 50, 100, 199, 200, 1000)
"""Steps of a run."""
MOST_WRONG = 0.05
Answer: TypeAlias = Literal["too low", "undecided", "fits"]
SPREADS = (0.25, 0.5, 1.0)
"""Standard deviations of the largest gradient, in doublings."""
AUTOCORRELATIONS = (0.0, 0.9)
INTERVALS = (200, 2000)
_INIT, _MANY = 16.0, 2000


@dataclass(frozen=True)
class Setting:
    """The assumptions of a simulation."""

    num_steps: int
    spread: float
    autocorrelation: float
    noise: str
    interval: int
    """Successful updates after which the scale doubles."""
    mean: float
    """The mean exponent of the scale, over the second half of many runs."""


def rates(effort: float) -> list[Rate]:
    """Return false alarms, misses and undecided answers by the length of the run."""
    num, found, limit = max(20, int(200 * effort)), [], math.log2(LEAST_SCALE)
    wrong: list[tuple[float, Answer]] = [(limit + 1, "too low"), (limit - 2, "fits")]
    undecided: list[tuple[float, Answer]] = [(mean, "undecided") for mean, _ in wrong]
    for num_steps, (mean, answer) in itertools.product(LENGTHS, wrong + undecided):
        what = f"a loss scale around 2^{mean:g}: {answer}, {num_steps} steps"
        most = None if answer == "undecided" else MOST_WRONG
        found.append(worst(what, _settings(num_steps, mean), partial(share_of, answer=answer), num=num, most=most))
    return found


def share_of(setting: Setting, answer: Answer, *, num: int, seed: int) -> float:
    """Return the share of runs whose scale gets this answer."""
    return float((answers(setting, num=num, seed=seed) == answer).mean())


def _settings(num_steps: int, mean: float) -> Iterator[Setting]:
    for place in itertools.product(SPREADS, AUTOCORRELATIONS, ("normal", "skewed"), INTERVALS):
        yield Setting(num_steps, *place, mean)


def answers(setting: Setting, *, num: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.str_]]:
    """Return the diagnosis's answer on the scale of each of ``num`` runs."""
    rng = np.random.default_rng(seed)
    fits = _fitting(setting, num, rng) + _shift(setting)
    scales, skipped = _scaled(fits, setting.interval)
    return np.array([_answer(*run) for run in zip(scales, skipped, strict=True)])


def _fitting(setting: Setting, num: int, rng: np.random.Generator) -> Array:
    """Return the exponent of the largest scale that fits, by run and step: around 0, anywhere between two powers of two."""
    noise = correlated(drawn(setting.noise, (num, setting.num_steps), rng), setting.autocorrelation)
    found: Array = rng.uniform(size=(num, 1)) - setting.spread * noise
    return found


def _scaled(fits: Array, interval: int) -> tuple[Array, np.ndarray[tuple[int, int], np.dtype[np.bool_]]]:
    """Return the exponent of the loss scale in each step of each run, and which steps it skipped; ``fits`` is the largest that fits."""
    scales, skipped = np.empty_like(fits), np.zeros(fits.shape, dtype=bool)
    scale, good = np.full(len(fits), _INIT), np.zeros(len(fits))
    for step in range(fits.shape[1]):
        skipped[:, step] = scale > fits[:, step]
        good = np.where(skipped[:, step], 0, good + 1)
        grows = good >= interval
        scale, good = scale - skipped[:, step] + grows, np.where(grows, 0, good)
        scales[:, step] = scale  # as a record has it: after the update
    return scales, skipped


@cache
def _shift(setting: Setting) -> float:
    """Return how much larger all scales must be that fit, so that the mean exponent is the setting's."""
    fits = _fitting(setting, _MANY, np.random.default_rng(0)) + setting.mean
    scales, _ = _scaled(fits, setting.interval)
    return 2.0 * setting.mean - float(np.mean(scales[:, setting.num_steps // 2 :]))


class _Facts:
    """A training under a dynamic loss scale."""

    def names(self) -> ModelNames:
        raise NotImplementedError

    def skip_rule(self) -> SkipRule:
        return SkipRule(dynamic=True)

    def loss_scale(self) -> float:
        return 1.0

    def largest_norm(self) -> float:
        return 1.0


def _answer(scales: Array, skipped: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Answer:
    steps = Steps(loss=[1.0] * len(scales), skipped=skipped.tolist(), loss_scale=np.exp2(scales).tolist())
    evidence = Faults(_Facts(), ()).evidence(run_of("fp16", steps=steps), watched=(), unfinished=None)
    if evidence.settled_scale is None:
        return "fits"
    return "undecided" if evidence.may_settle_higher else "too low"
