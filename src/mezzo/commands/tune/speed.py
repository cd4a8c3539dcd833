"""The speed of a run, and how much faster one configuration is than another over repeats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from mezzo.records import RunRecord

_WARM_UP = 3
"""First steps that are not timed: allocations, autotuning, compilation."""
FEWEST_TIMED = 5
_ERROR = 0.05


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The speed of a run after its first steps."""

    step_ms: float
    """Median: an evaluation between two steps, or a step that waited for a disk, does not count."""
    input_elements: float | None = None
    """The input of a step, in elements of the model's first input."""

    def over(self, other: Speed, *, alike: bool) -> float | None:
        """Return how many times as much this one trains in a second.

        Args:
            other: the speed to compare with.
            alike: whether the steps of both do the same work; if not, they are compared by their inputs.

        Returns:
            The ratio; None if the inputs of steps are not known.
        """
        times = other.step_ms / self.step_ms
        if alike:
            return times
        if not self.input_elements or not other.input_elements:
            return None
        return times * self.input_elements / other.input_elements


def speed_of(run: RunRecord) -> Speed | None:
    """Return the speed of a run; None if it has too few steps after the first ones."""
    first = max(_WARM_UP, (run.effective.counted_on_step or 0) + 1)
    times = [ms for ms in run.steps.time_ms[first:] if math.isfinite(ms) and ms > 0]
    if len(times) < FEWEST_TIMED:
        return None
    return Speed(step_ms=statistics.median(times), input_elements=run.input_elements)


@dataclass(frozen=True, kw_only=True)
class SpeedUp:
    """A speed-up over paired repeats."""

    times: float
    """Geometric mean."""
    low: float
    """Ends of the confidence interval: 95% for all compared configurations together. NaN with a single repeat."""
    high: float

    @property
    def faster(self) -> bool:
        """Whether it is faster beyond the noise of the repeats."""
        return self.low > 1.0


def speed_up(ratios: Sequence[float], *, num_compared: int) -> SpeedUp:
    """Return the speed-up that ``ratios`` of paired repeats show: Student's t on their logarithms, Bonferroni's correction.

    Args:
        ratios: one for each repeat.
        num_compared: how many configurations are compared with the same reference.
    """
    logs = np.log(np.asarray(ratios, dtype=np.float64))
    middle = float(logs.mean())
    if len(logs) < 2:
        return SpeedUp(times=math.exp(middle), low=math.nan, high=math.nan)
    quantile = float(special.stdtrit(len(logs) - 1, 1 - _ERROR / (2 * num_compared)))
    half = quantile * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    return SpeedUp(times=math.exp(middle), low=math.exp(middle - half), high=math.exp(middle + half))
