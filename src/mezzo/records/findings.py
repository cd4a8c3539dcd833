"""What is worth changing in a script: one code a kind, each with a page in ``docs/findings``."""

from __future__ import annotations

from typing import Literal, TypeAlias

from mezzo.records.values import Value

Severity: TypeAlias = Literal["", "error", "warning", "info"]


class Finding(Value):
    """Hold one thing to change, with what it would gain."""

    code: str
    title: str
    modules: list[str]
    detail: str
    gain: str
    fix: str
    share: float = 0.0
    """Share of the step's product FLOPs (of its bytes, of findings about casts) that it concerns."""
    flops: int = 0
    bytes: int = 0
    lines: list[str] = []
    severity: Severity = ""
    """How wrong the script's own mixed precision is; empty for what costs speed or accuracy and is not misuse."""
    step: int | None = None
    """The first step in which it was seen."""
    count: int = 1
    """How often it was seen in the steps that were watched for it."""
