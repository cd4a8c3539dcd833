"""What a script did when its golden file was accepted, and what a gate found against it."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal, TypeAlias

from mezzo.records.run import RunRecord
from mezzo.records.values import Environment, Finding, Note, Value, WholeRecord

GateVerdict: TypeAlias = Literal["passed", "regressed", "accepted"]
GateStatus: TypeAlias = Literal["same", "inside", "better", "failed", "not compared"]
GateUnit: TypeAlias = Literal["", "bytes", "ms", "reference"]
"""Of a check's numbers: ``reference`` is the CPU time of a step over the CPU time of a fixed workload that ran beside it."""
ModuleFormats: TypeAlias = dict[str, dict[str, list[str]]]
"""The formats in which a module's operations computed, by module, then by phase."""


class GoldenRun(Value):
    """What counts of one run."""

    seed: int
    num_steps: int
    losses: dict[str, float]
    """The mean of the finite losses in the last tenth of the steps, by name."""
    metric: float | None = None
    memory_bytes: int | None = None
    step_time: float | None = None
    """In the golden's ``timed_in``; None where it was not measured."""


class Golden(Value):
    """What a script did when somebody accepted it: small, sorted, and made to be reviewed and committed."""

    golden_version: int
    script: str
    arguments: list[str] = []
    policy: str
    metric: str = ""
    """The pattern of the metric; empty without one."""
    script_sha256: str
    """Of the script and of its own modules."""
    machine: dict[str, str]
    """Versions, CPU, threads and GPU."""
    timed_in: GateUnit
    runs: list[GoldenRun]
    audited_step: int | None = None
    """The step whose formats and findings are here; None where they could not be recorded."""
    formats: ModuleFormats = {}
    varying: list[str] = []
    """Modules whose formats differed between two runs, which are not compared."""
    findings: dict[str, list[str]] = {}
    """The modules of each finding, by code."""


class GateCheck(Value):
    """One thing that a gate compares with the golden."""

    name: str
    status: GateStatus
    golden: float | None = None
    now: float | None = None
    margin: float | None = None
    """The largest move that passes, in the unit of both numbers."""
    error: float | None = None
    """The probability that noise alone moves the number so far; None where no noise is involved."""
    unit: GateUnit = ""
    reason: str = ""


class FormatChange(Value):
    """A module that computes in other formats than in the golden."""

    module: str
    phase: str
    golden: list[str]
    now: list[str]


class GateRecord(WholeRecord):
    """A script against its golden file: each check, the formats that changed, the findings, and the runs behind them."""

    kind: Literal["gate"] = "gate"
    command: list[str]
    script: str
    golden_file: str
    """As typed."""
    verdict: GateVerdict
    policy: str
    against: Golden | None
    """What it was compared with; None if the first golden was accepted."""
    checks: list[GateCheck]
    """Empty if the first golden was accepted."""
    format_changes: list[FormatChange] = []
    findings: list[Finding] = []
    """All findings of this gate's audit."""
    new_findings: list[str] = []
    """Codes that the golden does not have."""
    gone_findings: list[str] = []
    notes: list[Note] = []
    """What differs besides, such as the machine, and what was not compared."""
    runs: list[RunRecord]
    environment: Environment
    duration_s: float = 0.0

    @property
    def failed(self) -> list[GateCheck]:
        """The checks that failed."""
        return [check for check in self.checks if check.status == "failed"]

    @property
    def summary(self) -> str:
        """The script, the verdict and what failed, in one line."""
        names = ", ".join(check.name for check in self.failed)
        return f"{PurePath(self.script).name}: {self.verdict}" + (f"; {names}" if names else "")
