"""Whether a script's own checkpoints resume the run that was stopped, and which state they lack."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal, TypeAlias

from mezzo.records.run import RunRecord
from mezzo.records.values import Environment, Note, Value, WholeRecord

ResumeVerdict: TypeAlias = Literal["exact", "differs", "does_not_resume", "no_checkpoint", "undecided"]
"""``exact``: the same losses and weights in every step. ``differs``: the differences are named. ``undecided``: two runs already differ."""
StateKind: TypeAlias = Literal[
    "weights",
    "buffers",
    "optimizer",
    "learning rate",
    "scheduler",
    "GradScaler",
    "random generators",
    "data position",
    "data order",
    "step counter",
    "copy of the weights",
    "unknown",
]
"""What a training continues from."""


class MissingState(Value):
    """A part of the state that was not restored in the resumed run."""

    state: StateKind
    name: str
    """The variable or class."""
    undisturbed: str
    """Its value in the undisturbed run at the same step."""
    resumed: str
    evidence: str
    """What shows it, and what it leads to."""
    fix: str


class ResumeCheckRecord(WholeRecord):
    """A run that was stopped and resumed, compared with the same run undisturbed."""

    kind: Literal["resume_check"] = "resume_check"
    command: list[str]
    script: str
    resume_with: list[str] = []
    """Arguments that the resumed run had in addition to the script's own."""
    verdict: ResumeVerdict
    why: str
    num_steps: int
    """Steps of the undisturbed run."""
    stopped_after: int | None = None
    """The step after which the run was stopped; None if it never was."""
    stopped_by: str = ""
    resumed_at: int | None = None
    """The step of the undisturbed run whose state the resumed run began with; None if there is none."""
    resumed_steps: int = 0
    first_difference: int | None = None
    """The first step whose loss or weights differ; None if none does."""
    missing: list[MissingState] = []
    """The parts that were not restored; the first are most often the cause of the others."""
    without_effect: list[Note] = []
    """Differences that had no effect in this run."""
    checkpoints: list[str] = []
    """Files, or folders of them, that the stopped run wrote and the resumed one read, or could have read."""
    folder: str = ""
    """Where the script ran."""
    whole: RunRecord
    """The undisturbed run."""
    resumed: RunRecord | None = None
    environment: Environment
    duration_s: float = 0.0

    @property
    def summary(self) -> str:
        """The script, the verdict and what is missing, in one line."""
        missing = ", ".join(dict.fromkeys(part.state for part in self.missing))
        verdict = self.verdict.replace("_", " ")
        return f"{PurePath(self.script).name}: {verdict}" + (f"; not restored: {missing}" if missing else "")
