"""Rates of ``diverged`` and ``stopped learning``, on losses whose course is known.

False alarms: a policy's runs and the baseline's are noise around a constant level, white or autocorrelated, normal or heavy-tailed, with
independent seeds; or both learn alike, with seeds that differ in level and speed. Then the faults that
are found: one run of three goes wrong, or all three.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.verdicts.rates import Array, Rate, drawn, run_of, worst
from mezzo.commands.compare.baseline import Baseline
from mezzo.commands.compare.pairing import grouped
from mezzo.records import Steps

LENGTHS = {5: 400, 20: 400, 100: 200, 500: 60, 2000: 30}
"""Steps of a run, and comparisons a setting in the search for the worst."""
AUTOCORRELATIONS = (0.0, 0.5, 0.9, 0.99)
NOISE = (0.02, 0.1, 0.3)
"""Standard deviation of a single loss, as a share of its fall in training."""


@dataclass(frozen=True)
class Setting:
    """The assumptions of a simulation of noise."""

    num_steps: int
    autocorrelation: float
    num_seeds: int
    noise: str
    level: float
    """In standard deviations of the noise."""


def rates(effort: float) -> list[Rate]:
    """Return false alarms by length, and the shares of faults that are found."""
    found = []
    for num_steps, searched in LENGTHS.items():
        what = f"diverged or stopped learning, noise around one level, {num_steps} steps"
        num = max(10, int(searched * effort))
        found.append(worst(what, _settings(num_steps), false_alarms, num=num, most=0.01))
    num = max(20, int(250 * effort))
    for noise in NOISE:
        share = share_found(healthy, noise, num=5 * num, num_wrong=3)
        what = f"diverged or stopped learning, healthy runs that learn, noise of {100 * noise:g}% of the fall"
        found.append(Rate(what=what, share=share, num=5 * num, most=0.01))
    for (what, fault), num_wrong, noise in itertools.product(FAULTS.items(), (1, 3), NOISE):
        share = share_found(fault, noise, num=num, num_wrong=num_wrong)
        which = "one run of three" if num_wrong == 1 else "three runs of three"
        least = 0.85 if noise <= 0.1 else None
        found.append(Rate(what=f"found: {which} {what}, noise of {100 * noise:g}%", share=share, num=num, least=least))
    return found


def _settings(num_steps: int) -> Iterator[Setting]:
    for place in itertools.product(AUTOCORRELATIONS, (2, 3, 10), ("normal", "heavy"), (0.0, 10.0)):
        yield Setting(num_steps, *place)


def false_alarms(setting: Setting, *, num: int, seed: int) -> float:
    """Return the share of rows in which a run wrongly counts as diverged or stopped learning: there is no trend."""
    rng = np.random.default_rng(seed)
    shape = (num, 2 * setting.num_seeds, setting.num_steps)
    losses = setting.level + correlated(drawn(setting.noise, shape, rng), setting.autocorrelation)
    return sum(went_wrong(*np.split(rows, 2)) is not None for rows in losses) / num


def correlated(noise: Array, autocorrelation: float) -> Array:
    """Return autocorrelated noise: each value keeps that share of the previous one, and the variance stays 1."""
    found = noise.copy()
    for step in range(1, noise.shape[-1]):
        own = math.sqrt(1.0 - autocorrelation**2) * noise[..., step]
        found[..., step] = autocorrelation * found[..., step - 1] + own
    return found


def went_wrong(baseline: Array, policy: Array) -> str | None:
    """Return ``diverged`` or ``stopped_learning`` if a run of the policy is found to have; each row is a run's losses, by seed."""
    runs = [
        run_of(name, seed=seed, steps=Steps(loss=losses.tolist(), skipped=[False] * len(losses)))
        for name, rows in (("baseline", baseline), ("policy", policy))
        for seed, losses in enumerate(rows)
    ]
    groups = grouped(runs)
    base = Baseline.of(groups["baseline"], runs=runs, margin=0.02)
    faults = base.faults_of(groups["policy"])
    if not faults or base.explains(len(faults), len(policy)):
        return None
    return next((way.verdict for way in faults.values() if way.verdict == "diverged"), "stopped_learning")


# --- runs that learn, and runs that go wrong: a loss falls from 2.3 to 0.1 in 200 steps ---------------------------------------------

_NUM_STEPS, _START, _END = 200, 2.3, 0.1
_TIME = np.linspace(0.0, 1.0, _NUM_STEPS)


def _course(rng: np.random.Generator) -> Array:
    """Return a loss that falls, at this seed's speed and to its level."""
    speed, end = rng.uniform(4.0, 8.0), _END * math.exp(0.3 * rng.standard_normal())
    found: Array = end + (_START - end) * np.exp(-speed * _TIME)
    return found


def healthy(course: Array, rng: np.random.Generator) -> Array:
    """Return a loss that learns as well, at another seed's speed and to its level."""
    return _course(rng)


def _rises(course: Array, rng: np.random.Generator) -> Array:
    return np.where(_TIME > 0.6, course * np.exp(12.0 * (_TIME - 0.6)), course)


def _collapses(course: Array, rng: np.random.Generator) -> Array:
    return np.where(_TIME > 0.7, _START, course)


def _becomes_nan(course: Array, rng: np.random.Generator) -> Array:
    return np.where(rng.uniform(0.2, 0.9) < _TIME, math.nan, course)


def _never_learns(course: Array, rng: np.random.Generator) -> Array:
    return np.full_like(course, _START)


def _nearly_frozen(course: Array, rng: np.random.Generator) -> Array:
    return _START - 0.1 * (_START - course)


def _stops_early(course: Array, rng: np.random.Generator) -> Array:
    slow = _END + (_START - _END) * (1.0 - _TIME)  # a baseline that learns to the end
    return np.maximum(slow, slow[_NUM_STEPS // 3])


FAULTS: dict[str, Callable[[Array, np.random.Generator], Array]] = {
    "rise to twice where they began": _rises,
    "fall back to where they began": _collapses,
    "turn to NaN": _becomes_nan,
    "never learn": _never_learns,
    "are nearly frozen": _nearly_frozen,
    "stop learning after a third": _stops_early,
}


def share_found(
    fault: Callable[[Array, np.random.Generator], Array], noise: float, *, num: int, num_wrong: int
) -> float:
    """Return the share of comparisons with three seeds in which the fault is found."""
    rng, found = np.random.default_rng(0), 0
    for _ in range(num):
        courses = np.stack([_course(rng) for _ in range(3)])
        if fault is _stops_early:
            courses = np.stack([_END + (_START - _END) * (1.0 - _TIME)] * 3)
        policy = np.stack([fault(course, rng) if i < num_wrong else course for i, course in enumerate(courses)])
        spread = noise * (_START - _END)
        sides = [side + spread * rng.standard_normal(side.shape) for side in (courses, policy)]
        found += went_wrong(*sides) is not None
    return found / num
