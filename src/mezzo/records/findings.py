"""What is worth changing in a script: one code per kind of finding, each with a page in ``docs/findings``."""

from __future__ import annotations

from typing import Literal, TypeAlias

from mezzo.records.values import Value

Severity: TypeAlias = Literal["", "error", "warning", "info"]


class Finding(Value):
    """One thing to change, and what changing it gains."""

    code: str
    title: str
    modules: list[str]
    detail: str
    gain: str
    fix: str
    share: float = 0.0
    """Share of the step's product FLOPs that it affects; for casts, of the step's bytes."""
    flops: int = 0
    bytes: int = 0
    lines: list[str] = []
    severity: Severity = ""
    """Severity of a misuse of the script's own mixed precision; empty for findings on speed or accuracy."""
    step: int | None = None
    """The first step in which it occurred."""
    count: int = 1
    """How often it occurred in the inspected steps."""
