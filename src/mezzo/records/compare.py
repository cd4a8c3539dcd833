"""What a comparison of policies showed."""

from __future__ import annotations

from typing import Literal, TypeAlias

from mezzo.records.run import Memory, RunRecord
from mezzo.records.values import SCHEMA_VERSION, Environment, Value

Verdict: TypeAlias = Literal["baseline", "equivalent", "different", "diverged", "undecided", "failed"]


class Difference(Value):
    """Compare a quantity with the baseline's over paired seeds."""

    value: float
    baseline: float
    difference: float
    low: float
    """Lower end of the 95% confidence interval of the difference; NaN with a single seed."""
    high: float
    margin: float
    """The difference, in the same unit, up to which the two count as equivalent."""


class Row(Value):
    """Hold what a comparison says of one policy."""

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
    metric: Difference | None = None
    num_skipped: float = 0.0
    """Mean over runs."""
    final_scale: float | None = None
    verdict: Verdict
    reason: str
    seeds_needed: int | None = None
    """For an undecided row: the number of seeds that would decide at the spread seen."""


class CompareRecord(Value):
    """Hold a comparison of policies on one script, with every run it rests on."""

    kind: Literal["compare"] = "compare"
    schema_version: int = SCHEMA_VERSION
    command: list[str]
    baseline: str
    margin: float
    """Equivalence margin: share of the loss that training took off, share of the baseline's metric."""
    rows: list[Row]
    runs: list[RunRecord]
    environment: Environment
