"""Which runs belong together: those of one policy, and among them those that share a seed with a run of the baseline.

Everything that a comparison says about a policy is computed over the same seeds for the policy and for the baseline: a mean
over three seeds against one over two would partly measure the third seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mezzo.records import RunRecord, varied


class Key(NamedTuple):
    """The key of a run within a policy: its seed, and the number of earlier runs with the same seed (or with none)."""

    seed: int | None
    number: int

    def __str__(self) -> str:
        return f"run {self.number + 1}" if self.seed is None else f"seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A run of a policy and the baseline's run with the same seed."""

    key: Key
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
    trained: dict[Key, RunRecord] = field(default_factory=dict)
    failed: dict[Key, str] = field(default_factory=dict)

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
        key = Key(run.seed, number)
        if run.error is None and len(run.steps) > 0:
            self.trained[key] = run
        else:
            self.failed[key] = run.error or "the run ended without a training step"

    def pairs(self, others: dict[Key, RunRecord]) -> list[Pair]:
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


# --- The series of a run: its losses by name, the level of a loss at a time, the last value of its metric -----------------------

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
