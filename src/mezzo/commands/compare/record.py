"""Policies compared on one script: a row each, and the runs behind it."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal, TypeAlias

from mezzo.commands.predict.record import RealGpus
from mezzo.records.run import Memory, RunRecord
from mezzo.records.values import Environment, NamedByPolicy, Value, WholeRecord

Verdict: TypeAlias = Literal[
    "baseline", "equivalent", "different", "diverged", "stopped_learning", "undecided", "failed"
]
FAILING: tuple[Verdict, ...] = ("different", "diverged", "stopped_learning", "undecided", "failed")
"""Verdicts other than equivalent, on a policy that is not the baseline."""
NOT_EQUIVALENT = "not_equivalent"
"""All of ``FAILING``, as ``--fail-on`` names them together."""
ScaleName: TypeAlias = Literal["absolute", "ratio", "proportion"]


class Difference(Value):
    """A quantity compared with the baseline's over paired seeds."""

    value: float
    """Mean over seeds, on the scale of the comparison; the geometric mean if that is a ratio."""
    baseline: float
    scale: ScaleName = "absolute"
    """``ratio``: differences are shares of the baseline's value. ``proportion`` (arcsine scale) and ``absolute``: in its unit."""
    difference: float
    low: float
    """Lower end of the 95% confidence interval of the difference; NaN with a single seed."""
    high: float
    margin: float
    """Largest difference that still counts as equivalent."""


class SharedFile(Value):
    """A file that makes a run depend on an earlier one."""

    path: str
    written_by: str
    """Policy and seed of the run during which it was written, after that run's first update."""
    read_by: str


class Row(Value, NamedByPolicy):
    """One policy of a comparison, over the seeds that trained under both it and the baseline."""

    policy: str
    policy_typed: str = ""
    """The policy as typed, if that was another name for it."""
    checkpoint: str = ""
    """The plan of activation checkpointing, or its budget; empty without one."""
    num_runs: int
    num_failed: int = 0
    emulated: bool = False
    step_ms: float | None = None
    """Median wall time of a step over all runs, without their first steps; None where no run recorded one."""
    speedup: float | None = None
    """The baseline's ``step_ms`` over this one; None for emulated rows, which claim no speed."""
    speedup_low: float | None = None
    speedup_high: float | None = None
    memory: Memory = Memory()
    memory_ratio: float | None = None
    """Bytes of the four kinds over the baseline's."""
    share_by_format: dict[str, float] = {}
    loss: Difference | None = None
    """None where no seed can be compared, and where the script has several losses."""
    losses: dict[str, Difference] = {}
    """By name, where the script has several losses."""
    metric: Difference | None = None
    num_skipped: float = 0.0
    """Mean over runs."""
    final_scale: float | None = None
    verdict: Verdict
    reason: str
    evidence: str | None = None
    """The reason without notes on time and memory, which the row has as numbers; None in records of older versions."""
    seeds_cannot_decide: bool = False
    """Whether no number of seeds decides an undecided row: its values come in too coarse steps, or over 1000 are needed."""
    seeds_needed: int | None = None
    """For an undecided row: how many seeds would decide it with a probability of 80%; None if more than 1000."""


class CompareRecord(WholeRecord):
    """A comparison of policies on one script, with every run behind it."""

    kind: Literal["compare"] = "compare"
    command: list[str]
    baseline: str
    margin: float
    """The requested margin, as a share of the baseline's value; ``Difference.margin`` is the one applied."""
    rows: list[Row]
    shared_files: list[SharedFile] = []
    """Files that make runs depend on each other: if there are any, no verdict holds."""
    runs: list[RunRecord]
    real_gpus: RealGpus | None = None
    """Predictions for GPUs that this machine does not have; None if none were requested."""
    environment: Environment
    identity: dict[str, str] = {}
    """What has to be the same where its baseline is used again; empty in records of older versions."""

    @property
    def summary(self) -> str:
        """The script and each policy's verdict, in one line."""
        script = PurePath(self.runs[0].script).name if self.runs else "nothing"
        judged = [
            f"{row.compared_as} {row.verdict.replace('_', ' ')}"
            for row in self.rows
            if row.compared_as != self.baseline
        ]
        return f"{script}: {', '.join(judged) or 'no other policy'}, compared with {self.baseline}"

    @property
    def baseline_shown(self) -> str:
        """The baseline's name for people: as they typed it."""
        return next((row.policy_shown for row in self.rows if row.compared_as == self.baseline), self.baseline)
