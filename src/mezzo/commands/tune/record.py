"""The fastest configuration of a script on this machine, as measured by short runs."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal, TypeAlias

from mezzo.commands.compare.record import Verdict
from mezzo.records.run import Placement
from mezzo.records.values import Environment, Note, Value, WholeRecord

TuneDecision: TypeAlias = Literal["use", "keep", "undecided", "failed"]
"""``use``: a configuration is faster. ``keep``: none is, beyond noise. ``undecided``: no time. ``failed``: the script itself fails."""
RowStatus: TypeAlias = Literal["now", "faster", "not faster", "barred", "dropped", "failed", "not run"]
"""``barred``: it may not be the answer. ``dropped``: others were faster in its last round. ``now``: the script as it is."""


class TuneRow(Value):
    """One configuration, in the last round that it ran in."""

    name: str
    policy: str
    settings: dict[str, str] = {}
    """Options of the script, by name."""
    channels_last: bool = False
    compiles: bool = False
    checkpoint: str = ""
    """The plan of activation checkpointing, or its budget; empty for none."""
    state: RowStatus
    reason: str
    out_of_time: bool = False
    """Whether it was not run because the budget ran out."""
    steps: int = 0
    """Steps of each of its runs in that round."""
    step_ms: float | None = None
    """Median after the first steps; over repeats, the median of medians."""
    inputs: float | None = None
    """Input of a step, as a multiple of the present configuration's; None if it was not counted."""
    speedup: float | None = None
    """Over the script as it is: geometric mean over repeats, or of the one run."""
    speedup_low: float | None = None
    """Lower end of the 95% interval, simultaneous for all finalists; None without repeats."""
    speedup_high: float | None = None
    memory_bytes: int | None = None
    """The allocator's peak on a GPU, else the bytes of a step."""
    verdict: Verdict | None = None
    """Verdict on a finalist's losses against FP32's on the same batches; None for the others."""


class TuneTrial(Value):
    """One run."""

    name: str
    round: str
    """``1``, ``2`` and so on, or ``final``."""
    seed: int
    outcome: str
    folder: str
    duration_s: float = 0.0
    placement: Placement | None = None
    """Where it ran, and how many others ran at the same time; None if it had the machine to itself."""
    resumed: bool = False
    """Whether its record is from an earlier, interrupted search."""


class TuneRecord(WholeRecord):
    """The fastest configuration that trains like FP32, and every run behind it."""

    kind: Literal["tune"] = "tune"
    command: list[str]
    script: str
    decision: TuneDecision
    chosen: str
    """The name of the configuration to use; the present one's if the answer is to keep it."""
    why: str
    next_command: str
    next_why: str
    rows: list[TuneRow]
    """The present configuration first, then the finalists, then the others."""
    trials: list[TuneTrial] = []
    memory_limit_bytes: int | None = None
    budget_s: float
    steps: int
    """Steps of each run in the first round."""
    repeats: int
    notes: list[Note] = []
    """What was left out, and what limits the answer."""
    environment: Environment
    duration_s: float = 0.0

    @property
    def summary(self) -> str:
        """The script, the decision and the speed-up, in one line."""
        row = next((row for row in self.rows if row.name == self.chosen), None)
        times = "" if row is None or row.speedup is None or self.decision != "use" else f", {row.speedup:.3g}x as fast"
        return f"{PurePath(self.script).name}: {self.decision} {self.chosen}{times}"
