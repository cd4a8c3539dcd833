"""One answer about a script: which policy to use, what it gains, what it costs, and how that was found."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal, TypeAlias

from mezzo.commands.compare.record import CompareRecord
from mezzo.commands.doctor.record import DeviceReport
from mezzo.records.values import Environment, Note, Value, WholeRecord

Decision: TypeAlias = Literal["use", "stay", "undecided", "failed"]
"""``use``: a policy trains like the baseline. ``stay``: none does, or it gains nothing. ``failed``: the baseline itself does not train."""
StageName: TypeAlias = Literal["doctor", "run", "diagnose", "ranges", "fallback", "patch"]


class Gain(Value):
    """What a policy gains in speed on one device."""

    kind: Literal["measured", "predicted", "bound"]
    """``predicted``: for another GPU. ``bound``: a ceiling from counted FLOPs and bytes, where no prediction is possible."""
    times: float
    """How many times as fast as the baseline; for a bound, at most."""
    times_over_tf32: float | None = None
    """For a prediction or a bound: the same over TF32; None if the GPU has no TF32, or if the policy or the baseline is TF32."""
    low: float | None = None
    """The smallest measured ratio over seeds."""
    high: float | None = None
    device: str
    note: str
    """Where the figure comes from, and what it assumes."""

    @property
    def over_what_is_free(self) -> tuple[float, str]:
        """The gain over TF32, which takes one line in a script, if it is known, else over FP32; and the name of that format."""
        return (self.times, "FP32") if self.times_over_tf32 is None else (self.times_over_tf32, "TF32")


class Answer(Value):
    """The answer: what to use, why, what it gains, and what to type next."""

    decision: Decision
    policy: str
    """The policy to use; the baseline if the answer is to stay, or undecided; ``as-is`` to keep the precision of the script's own casts."""
    own_formats: list[str] = []
    """The formats that the script's own casts leave the baseline's passes in; empty where these ran in FP32 or TF32."""
    why: str
    evidence_of: str = ""
    """The policy whose row of the comparison the evidence is from; empty without evidence."""
    evidence: str = ""
    """How the policy's accuracy compares with the baseline's: the reason of its row in the comparison."""
    gains: list[Gain] = []
    memory_saved: float | None = None
    """Share of the baseline's bytes, by the four kinds or the allocator's peak; negative where more is needed; None if not measured."""
    changed: list[Note] = []
    """What was changed to get there, beyond switching the policy on."""
    others: list[Note] = []
    """The other policies: ``value`` is the verdict, ``reason`` why it is not the answer."""
    next_command: str
    next_why: str


class CheckStage(Value):
    """One stage on the way to the answer."""

    name: StageName
    what: str
    why: str
    outcome: str
    folder: str = ""
    """The folder of its record; empty if it has none."""
    duration_s: float = 0.0
    resumed: bool = False
    """Whether its record is from an earlier, interrupted check."""


class CheckRecord(WholeRecord):
    """The answer to whether a script should train in lower precision, and everything that it follows from."""

    kind: Literal["check"] = "check"
    command: list[str]
    script: str
    answer: Answer
    device: DeviceReport
    """The device that the runs were on."""
    gpu: str = ""
    """The GPU that the answer or a bound is for, if that is not the device of the runs."""
    offered: list[Note] = []
    """The policies that were considered: ``value`` is ``tried`` or ``left out``."""
    budget_s: float
    seeds: int
    """How many seeds each policy was to run with."""
    first_steps: int | None = None
    """The number of steps after which every run was stopped: the verdicts are on these steps only; None for whole runs."""
    stages: list[CheckStage] = []
    comparison: CompareRecord | None = None
    """None where the baseline's first run failed."""
    patch: str = ""
    """The change to the script, as a unified diff, if one was requested and passed its trial."""
    notes: list[Note] = []
    """What limits the answer."""
    environment: Environment
    duration_s: float = 0.0

    @property
    def summary(self) -> str:
        """The script and the decision, in one line."""
        return f"{PurePath(self.script).name}: {self.answer.decision} {self.answer.policy}"
