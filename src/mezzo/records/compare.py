"""What a comparison of policies showed."""

from __future__ import annotations

from typing import Literal, TypeAlias

from mezzo.records.run import Memory, RunRecord
from mezzo.records.values import SCHEMA_VERSION, Environment, Value

Verdict: TypeAlias = Literal[
    "baseline", "equivalent", "different", "diverged", "stopped_learning", "undecided", "failed"
]
ScaleName: TypeAlias = Literal["absolute", "ratio", "proportion"]


class Difference(Value):
    """Compare a quantity with the baseline's over paired seeds."""

    value: float
    """Mean over seeds, on the scale that the two are compared on: the geometric mean where that is their ratio."""
    baseline: float
    scale: ScaleName = "absolute"
    """``ratio``: differences are shares of the baseline's value. ``proportion`` (arcsine scale) and ``absolute``: in its unit."""
    difference: float
    low: float
    """Lower end of the 95% confidence interval of the difference; NaN with a single seed."""
    high: float
    margin: float
    """The difference up to which the two count as equivalent."""


class SharedFile(Value):
    """Name a file through which a run depends on an earlier one."""

    path: str
    written_by: str
    """Policy and seed of the run during which it was written, after that run's first update."""
    read_by: str


class Row(Value):
    """Hold what a comparison says of one policy, over the seeds that trained under it and under the baseline."""

    policy: str
    num_runs: int
    num_failed: int = 0
    emulated: bool = False
    step_ms: float | None = None
    """Median wall time of a step over all runs; None where no run recorded one."""
    speedup: float | None = None
    """Median over seeds of the baseline's time over this policy's; None for emulated rows, which claim no speed."""
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
    seeds_needed: int | None = None
    """For an undecided row: the number of seeds that would decide, in four cases of five or more; None where it is above 1000."""


class CompareRecord(Value):
    """Hold a comparison of policies on one script, with every run it rests on."""

    kind: Literal["compare"] = "compare"
    schema_version: int = SCHEMA_VERSION
    command: list[str]
    baseline: str
    margin: float
    """What was asked for, as a share of the baseline's value; ``Difference.margin`` is what became of it."""
    rows: list[Row]
    shared_files: list[SharedFile] = []
    """Files that make runs depend on each other: no verdict holds then."""
    runs: list[RunRecord]
    environment: Environment
