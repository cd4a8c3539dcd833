"""Which runs belong together: the runs of one policy, and the pairs with the same seed under the policy and the baseline.

Everything that a comparison says about a policy is computed over the same seeds for the policy and for the baseline: a mean
over three seeds against one over two would partly measure the third seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mezzo.commands.compare.quantities import BEYOND_ERROR, INSIDE_ERROR, Proportion, Quantity, Ratio
from mezzo.records import RunRecord, varied


class RunKey(NamedTuple):
    """The key of a run within a policy: its seed, and the number of earlier runs with the same seed (or with none)."""

    seed: int | None
    number: int

    def __str__(self) -> str:
        return f"run {self.number + 1}" if self.seed is None else f"seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A run of a policy and the baseline's run with the same seed."""

    key: RunKey
    run: RunRecord
    baseline: RunRecord


@dataclass(frozen=True, kw_only=True)
class Group:
    """The runs of one policy: those that trained to the end, and why the others failed."""

    policy: str
    name: str
    """The policy's name for people: as they typed it, and how its runs are checkpointed."""
    typed: str = ""
    """The policy as typed, if that was another name for it."""
    checkpoint: str = ""
    """The plan of activation checkpointing, or its budget; empty without one."""
    trained: dict[RunKey, RunRecord] = field(default_factory=dict)
    failed: dict[RunKey, str] = field(default_factory=dict)

    @property
    def compared_as(self) -> str:
        """The key that distinguishes its runs from others: their policy, and how they are checkpointed."""
        return varied(self.policy, self.checkpoint)

    @property
    def num_runs(self) -> int:
        """The number of runs."""
        return len(self.trained) + len(self.failed)

    def add(self, run: RunRecord) -> None:
        """Add a run under the next key of its seed."""
        number = sum(key.seed == run.seed for key in (*self.trained, *self.failed))
        key = RunKey(run.seed, number)
        if run.error is None and len(run.steps) > 0:
            self.trained[key] = run
        else:
            self.failed[key] = run.error or "the run ended without a training step"

    def pairs(self, others: dict[RunKey, RunRecord]) -> list[Pair]:
        """Return the runs that trained and have a run in ``others`` under the same key, each with that run."""
        return [Pair(key=k, run=run, baseline=others[k]) for k, run in self.trained.items() if k in others]


def grouped(runs: Sequence[RunRecord]) -> dict[str, Group]:
    """Return the runs of each policy, in order of first appearance."""
    groups: dict[str, Group] = {}
    for run in runs:
        groups.setdefault(
            run.compared_as,
            Group(policy=run.policy, name=run.policy_shown, typed=run.policy_typed, checkpoint=run.checkpoint),
        ).add(run)
    return groups


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


def short(value: float) -> str:
    """Return a value with four digits."""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def percent(share: float) -> str:
    """Return a share as percent with two digits, three from 100 on."""
    return f"{_two_digits(100.0 * share)}%"


def _two_digits(value: float, *, sign: str = "") -> str:
    return f"{value:{sign}.0f}" if 10 <= abs(value) < 1e9 else f"{value:{sign}.2g}"


def listed(parts: Sequence[str]) -> str:
    """Return parts joined as in a sentence: ``a, b and c``."""
    *head, last = parts
    return f"{', '.join(head)} and {last}" if head else last


def size(quantity: Quantity, change: float, *, signed: bool = False) -> str:
    """Return a change in the units in which people state it: ``+3.1%``, ``2.4 times``, ``-0.28 points``, ``+12``."""
    sign = "+" if signed and change else ""
    if isinstance(quantity.scale, Ratio):
        return f"{_two_digits(100.0 * change, sign=sign)}%" if -0.5 < change < 1.0 else f"{1.0 + change:.3g} times"
    if isinstance(quantity.scale, Proportion):
        return f"{_two_digits(100.0 * change / quantity.scale.unit, sign=sign)} points"
    return f"{change:{sign}.0f}" if 1e2 <= abs(change) < 1e9 else f"{change:{sign}.2g}"


def sentence(quantity: Quantity, *, num_quantities: int, baseline: str) -> str:
    """Return the means, their difference, its interval, and the interval's position relative to the margin."""
    d = quantity.record()
    name = quantity.name if quantity.is_metric else title_of(quantity.name)
    text = f"{name} {short(d.value)} against {short(d.baseline)}"
    margin = f"{size(quantity, d.margin)}{_reason(quantity, baseline=baseline)}"
    if len(quantity) < 2:
        return f"{text} ({size(quantity, d.difference, signed=True)}), to be judged by a margin of {margin}"
    text += f" ({size(quantity, d.difference, signed=True)}, 95% CI {_interval(quantity, d.low, d.high)})"
    if quantity.is_inside():
        narrower = f", by the {1 - 2 * INSIDE_ERROR:.0%} CI" if max(-d.low, d.high) > d.margin else ""
        return f"{text}, inside the margin of {margin}{narrower}"
    nearest = max(d.low, -d.high)
    if quantity.is_beyond(num_quantities=num_quantities):
        return f"{text}, beyond the margin of {margin}"
    if nearest > d.margin and quantity.margin.spread:
        error = BEYOND_ERROR / num_quantities
        most = quantity.natural_margin(float(quantity.margin.upper_bound(len(quantity), error=error)))
        return f"{text}, beyond {margin}, but {baseline}'s own seeds may lie {size(quantity, most)} apart"
    return f"{text}, partly beyond the margin of {margin}"


def _interval(quantity: Quantity, low: float, high: float) -> str:
    ends = [size(quantity, end, signed=True) for end in (low, high)]
    units = [end.partition(" ")[2] for end in ends]
    return f"{ends[0].partition(' ')[0] if units[0] == units[1] else ends[0]} to {ends[1]}"


def _reason(quantity: Quantity, *, baseline: str) -> str:
    margin = quantity.margin
    if len(quantity) > 1 and margin.lower_bound(len(quantity)) > margin.share:
        return f" ({baseline}'s own seed-to-seed spread)"
    return f" ({margin.why})" if margin.why else ""
