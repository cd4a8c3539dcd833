"""The series of a run: its losses by name, the level of a loss at a time, the last value of its metric."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from mezzo.records import RunRecord

LOSS = "loss"
"""Name of the loss of a script with a single one."""


def losses_of(run: RunRecord) -> dict[str, list[float]]:
    """Return a run's losses by name: one value per step, or several losses with values in the steps that have them."""
    if run.steps.losses:
        return {loss.name: loss.values for loss in run.steps.losses}
    return {LOSS: run.steps.loss}


def names_of(runs: Iterable[RunRecord]) -> list[str]:
    """Return the names of all losses of ``runs``, in order of first appearance."""
    return list(dict.fromkeys(name for run in runs for name in losses_of(run)))


def title_of(name: str) -> str:
    """Return a loss's name as used in a sentence: ``loss``, ``loss of netG``, ``loss 2``."""
    return name if name.split()[0] == LOSS else f"{LOSS} of {name}"


def num_in_tenth(values: Sequence[float]) -> int:
    """Return the number of values in a tenth of ``values``, at least one."""
    return max(1, len(values) // 10)


def final(values: Sequence[float]) -> float:
    """Return the mean of the finite values in the last tenth; NaN if none is finite."""
    return mean(values[-num_in_tenth(values) :])


def mean(values: Iterable[float]) -> float:
    """Return the mean of the finite values; NaN if none is finite."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan


def last_metric(run: RunRecord) -> float | None:
    """Return the metric's last value; None if the script printed none, or text in its place."""
    metric = run.metric
    return metric.values[-1] if metric and metric.values and metric.text is None else None
