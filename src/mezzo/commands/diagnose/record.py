"""Where the first value that is not finite came from."""

from __future__ import annotations

from typing import Literal, TypeAlias

from mezzo.records.run import RunRecord
from mezzo.records.values import Note, Value, WholeRecord

Diagnosed: TypeAlias = Literal[
    "healthy", "scale_overflow", "range_overflow", "invalid_operation", "silent_saturation", "undecided", "unfinished"
]
"""``undecided``: a step is not finite, and the run that would tell the cause was not made or contradicts it; ``unfinished``: the run
raised, was interrupted or trained no step, and no value that left its format explains it."""
Origin: TypeAlias = Literal["", "made", "entered", "constant", "refused", "vanished", "norm", "raised"]
"""``made`` from finite values; ``entered`` the step from outside; a ``constant`` in the script; ``refused``: a number in the
script that torch does not convert to the format; ``vanished``: too small for the format, so 0; ``norm``: every gradient is finite, and
the square of their norm is beyond FP32; ``raised``: no value, but an operation that raised an error."""
StepPhase: TypeAlias = Literal["", "forward", "backward", "update"]
"""``update``: between a backward pass and the next forward pass, such as clipping, unscaling and the optimizer's step."""


class Operand(Value):
    """An operand of the operation."""

    format: str
    shape: list[int]
    largest: float
    """The largest finite magnitude."""
    smallest: float
    """The smallest magnitude."""
    num_not_finite: int = 0


class TrendStep(Value):
    """One of the steps up to the fault."""

    step: int
    loss: float
    grad_norm: float
    loss_scale: float
    skipped: bool = False


class Pass(Value):
    """One run of the script."""

    policy: str
    reason: str
    num_steps: int = 0
    watched: list[int] = []
    """Steps whose operations were all inspected."""
    outcome: str = ""
    tries_fix: bool = False
    """Whether it ran to try a fix."""


class DiagnoseRecord(WholeRecord):
    """The first value that is not finite: where it came from, why, and what fixes it."""

    kind: Literal["diagnose"] = "diagnose"
    run: RunRecord
    verdict: Diagnosed
    perhaps: Diagnosed | Literal[""] = ""
    """What the operation alone suggests if the verdict is ``undecided``."""
    module: str = ""
    pattern: str = ""
    """The module's name for ``fp32_modules``; empty where it has none: a model itself, or code outside any module."""
    op: str = ""
    """The operation's name in torch; in a backward pass, the operation whose gradient was computed."""
    origin: Origin = ""
    """Where the value came from."""
    parameter: bool = False
    """Whether the value that entered the step is a weight."""
    phase: StepPhase = ""
    step: int = 0
    """The step of the first such value; 0 if there is none."""
    line: str = ""
    """Where the script, or a library outside torch, calls the forward operation: ``file:line``."""
    fix: str = ""
    fix_line: str = ""
    """The line to write."""
    fix_policy: str = ""
    """The policy that the line writes; empty if the fix is none."""
    fix_where: str = ""
    """Where it is written: on the command line, in which call, or at which line."""
    fix_tried: bool = False
    """Whether the script ran again with the fix and was healthy."""
    fix_note: str = ""
    """How the fix was tried, or why it was not."""
    located: bool = False
    """Whether the operation was found."""
    detail: str = ""
    """What happened there, in a sentence."""
    format: str = ""
    """The format of the operation's result."""
    largest: float | None = None
    """The largest magnitude of the result in FP32; None if that is not finite either."""
    loss_scale: float = 1.0
    """The loss scale of that step."""
    zero_eps: float | None = None
    """The optimizer's eps, if it is 0 in the weight's format and the update divides by it."""
    settled_scale: float | None = None
    """The loss scale at which the run settled, if skipped updates have lowered it so far that small gradients are lost."""
    steps_needed: int | None = None
    """How many training steps decide whether it settled that low; None if the run had enough of them."""
    static_scale: bool = False
    """Whether the loss scale is a number by which the script itself multiplies its loss and divides its gradients."""
    own_scaler: bool = False
    """Whether it is the loss scale of the script's own GradScaler."""
    session_policy: str = ""
    """The policy of the script's own ``mezzo.Session``, which ``as-is`` leaves alone; empty where there is none."""
    gradient: str = ""
    """The parameter with the largest gradient error, if values leave the format and gradients stay finite."""
    gradient_error: float | None = None
    """Norm of that gradient's error over its true norm."""
    loss_error: float | None = None
    """The error of a finite loss over its true value, if values that left the format made it wrong."""
    operands: list[Operand] = []
    own_cast: str = ""
    """The format that the script itself casts to, so that the step leaves it under FP32 as well; empty where no run showed that."""
    fails_in_fp32: bool = False
    """Whether the training fails in FP32, too."""
    swallowed_by: str = ""
    """The operations that turned infinities into wrong finite numbers."""
    num_skipped: int = 0
    bad_steps: list[int] = []
    """Steps whose loss or gradients were not finite."""
    faulty_steps: list[int] = []
    """The bad steps that are not normal skips while the loss scale settles."""
    trend: list[TrendStep] = []
    passes: list[Pass] = []
    forced_eager: bool = False
    notes: list[Note] = []

    @property
    def has_place(self) -> bool:
        """Whether it names an operation: its value left its format, or it raised an error."""
        return self.located or self.origin == "raised"

    @property
    def during(self) -> str:
        """The phase in words."""
        return self.phase if self.phase in ("", "update") else f"{self.phase} pass"

    @property
    def summary(self) -> str:
        """The script, the verdict and its place, in one line."""
        place = [f"step {self.step}"] if self.step else []
        place += [f"{self.during} of {self.module or 'the script'}", self.line] if self.has_place else []
        return ", ".join([f"{self.run.where}: {self.verdict.replace('_', ' ')}", *filter(None, place)])
