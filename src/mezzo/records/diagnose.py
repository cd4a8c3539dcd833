"""Where the first value that is not finite came from."""

from __future__ import annotations

from typing import Literal, TypeAlias

from mezzo.records.run import RunRecord
from mezzo.records.values import SCHEMA_VERSION, Reason, Value

Diagnosed: TypeAlias = Literal[
    "healthy", "scale_overflow", "range_overflow", "invalid_operation", "silent_saturation", "unfinished"
]
"""``unfinished``: the run raised, was interrupted or trained no step, and no value that left its format explains it."""
Origin: TypeAlias = Literal["", "made", "entered", "constant", "refused", "vanished"]
"""``made`` of finite values; ``entered`` the step from outside; a ``constant`` of the script; ``refused``: a number of the
script that torch does not write into the format; ``vanished``: too small for the format, so 0."""
Direction: TypeAlias = Literal["", "forward", "backward"]


class Operand(Value):
    """Hold what an operation read."""

    format: str
    shape: list[int]
    largest: float
    """The largest finite magnitude."""
    smallest: float
    """The smallest magnitude."""
    num_not_finite: int = 0


class TrendStep(Value):
    """Hold one step before the fault, and the step itself."""

    step: int
    loss: float
    grad_norm: float
    loss_scale: float
    skipped: bool = False


class Pass(Value):
    """Hold one time that the script was run."""

    policy: str
    reason: str
    num_steps: int = 0
    watched: list[int] = []
    """The steps whose operations were all inspected."""
    outcome: str = ""


class DiagnoseRecord(Value):
    """Hold what looking for the first value that is not finite showed."""

    kind: Literal["diagnose"] = "diagnose"
    schema_version: int = SCHEMA_VERSION
    run: RunRecord
    verdict: Diagnosed
    module: str = ""
    pattern: str = ""
    """The module's name for ``fp32_modules``; empty where it has none: a model itself, or code outside any module."""
    op: str = ""
    """The operation by its name in torch; of a backward pass, the one whose gradient was being computed."""
    origin: Origin = ""
    """What happened to the value there."""
    parameter: bool = False
    """Whether what entered the step is a weight."""
    phase: Direction = ""
    step: int = 0
    """The step of the first such value; 0 where there was none."""
    line: str = ""
    """Where the script, or a library outside torch, calls the forward operation: ``file:line``."""
    fix: str = ""
    fix_line: str = ""
    """What to write."""
    fix_tried: bool = False
    """Whether the script ran again with the fix and was healthy."""
    fix_note: str = ""
    """How the fix was tried, or why it was not."""
    located: bool = False
    """Whether the operation was seen."""
    detail: str = ""
    """What happened there, in a sentence."""
    format: str = ""
    """The format that the operation's result is kept in."""
    largest: float | None = None
    """The largest magnitude that the result would have in FP32; None where that is not finite either."""
    loss_scale: float = 1.0
    """The loss scale of that step."""
    own_scaler: bool = False
    """Whether it is that of a GradScaler of the script's own."""
    gradient: str = ""
    """The parameter whose gradient is furthest off, where values leave the format and gradients stay finite."""
    gradient_error: float | None = None
    """The norm of what is wrong with it over its true norm."""
    operands: list[Operand] = []
    swallowed_by: str = ""
    """The operations that made wrong finite numbers of what was infinite."""
    num_skipped: int = 0
    bad_steps: list[int] = []
    """Steps whose loss or gradients were not finite."""
    faulty_steps: list[int] = []
    """Those of them that are no normal skips of a loss scale that is being found."""
    trend: list[TrendStep] = []
    passes: list[Pass] = []
    forced_eager: bool = False
    notes: list[Reason] = []
