"""Where two runs part, what began it, and what helps."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal, TypeAlias

from mezzo.records.run import RunRecord
from mezzo.records.values import Environment, Note, Value, WholeRecord

DiffVerdict: TypeAlias = Literal[
    "identical", "rounding", "beyond rounding", "different data", "different weights", "not repeatable", "failed"
]
"""``rounding``: nothing is further apart than rounding explains. ``failed``: a run has no values to compare."""
DifferentBy: TypeAlias = Literal["settings", "operations", "format", "part", "random numbers", "start", "values"]
"""What is different where a difference begins; ``values``: the same operation on the same values gives another result."""


class ValuePlace(Value):
    """Where a value is made."""

    op: str
    module: str
    phase: str
    step: int
    line: str = ""
    """The script's line (``file:line``); empty where there is none."""
    format: str = ""


class ValuePair(Value):
    """A value of both runs."""

    a: ValuePlace
    b: ValuePlace
    distance: float
    """Relative: the norm of the difference over the larger norm."""
    allowed: float
    """The largest distance that rounding explains."""
    error_a: float | None = None
    """The relative distance of the first run's result from FP64 on its own operands; None if it was not computed."""
    error_b: float | None = None


class DiffBeginning(ValuePair):
    """Where a difference beyond rounding begins: what it is computed from agrees."""

    by: DifferentBy
    settings: list[tuple[str, str]] = []
    """Settings that differ, in the first run and in the second."""
    only_a: list[ValuePlace] = []
    """Operations before it that only the first run has."""
    only_b: list[ValuePlace] = []
    num_alike: int = 0
    """How many others begin in the same way, such as further parameters of one optimizer."""
    explains: float | None = None
    """The share of the final difference, as squares, in what is computed from it; other beginnings may share that. None if unknown."""


class DiffOutcome(Value):
    """How far apart the runs are where it matters."""

    what: str
    """``loss``, ``gradients``, ``updates``, ``statistics``, or the name of a compare point."""
    step: int
    distance: float
    allowed: float


class PointDifference(Value):
    """Two tensors of a compare point."""

    name: str
    against: str
    """Which two: the runs, or the first and a later value of one run."""
    distance: float
    is_log_probabilities: bool = False
    """Whether every row sums to 1 in probability."""
    kl: float | None = None
    """KL divergence of the second from the first, in nats: exact for rows of log-probabilities, else the estimate of Schulman
    (``mean(exp(d) - 1 - d)``, "Approximating KL divergence", 2020) where only chosen tokens have one."""
    outside: float | None = None
    """The share of values whose ratio of probabilities leaves ``band``."""
    band: float = 0.2


class ModuleGrowth(Value):
    """How many bits agree where a module returns."""

    module: str
    phase: str
    step: int
    bits: float
    explained_bits: float
    """How many bits rounding leaves at least."""


class DiffTrial(Value):
    """A policy that could help, tried."""

    policy: str
    what: str
    distance: float
    """The distance of what matters from the first run."""
    share: float
    """The share of the second run's distance that it removes; below 0 if it adds to it."""
    flops_in_fp32: float = 0.0
    """The share of the products' FLOPs that it raises to FP32."""
    more_bytes: int = 0
    """Bytes of results that it keeps in FP32 for the backward pass, beyond the policy's."""


class DiffRecord(WholeRecord):
    """Two runs, value by value."""

    kind: Literal["diff"] = "diff"
    command: list[str]
    script: str
    mode: Literal["policies", "checkout", "compile", "ranks", "vary", "scripts", "records"]
    name_a: str
    name_b: str
    verdict: DiffVerdict
    why: str = ""
    """Why there is no verdict; empty with one."""
    run: RunRecord
    """The first run."""
    other: RunRecord
    """The second run."""
    steps: list[int] = []
    """Numbers of the compared steps."""
    num_values: int = 0
    """Values of the first run."""
    num_paired: int = 0
    """Those with a counterpart."""
    num_identical: int = 0
    """Those with equal bits."""
    has_control: bool = False
    """Whether what rounding explains was measured, by a run with mirrored rounding errors."""
    first: ValuePair | None = None
    """The first value that is not identical."""
    beginnings: list[DiffBeginning] = []
    outcomes: list[DiffOutcome] = []
    points: list[PointDifference] = []
    growth: list[ModuleGrowth] = []
    trials: list[DiffTrial] = []
    compiled_alone: list[str] = []
    """The smallest modules found whose compilation alone begins the difference."""
    unstable: list[ValuePlace] = []
    """Where the first run does not repeat itself."""
    notes: list[Note] = []
    environment: Environment
    duration_s: float

    @property
    def summary(self) -> str:
        """The runs and the verdict, in one line."""
        name = f"{PurePath(self.script).name}, {self.name_a} and {self.name_b}: {self.verdict}"
        if not self.beginnings:
            return name
        begins = self.beginnings[0].b
        return f"{name} from {begins.op} in {begins.module} on ({begins.phase}, step {begins.step})"
