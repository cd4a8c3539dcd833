"""What the parent asks of the child process that runs a script: one value, passed as JSON."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from mezzo.diagnosis.settings import AnySettings
from mezzo.launch.frameworks import Framework
from mezzo.records import AS_IS as AS_IS


class Request(BaseModel):
    """Say which script to run, how, and where to write its record."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    """Path of a script, or the name of a module."""
    kind: Literal["script", "module"]
    arguments: tuple[str, ...] = ()
    framework: Framework = "torch"
    policy: str
    """A policy text, or ``as-is``."""
    seed: int | None = None
    """Added to every seed that the script sets; None leaves seeds alone."""
    metric: str | None = None
    """Regular expression whose first group is a number in the script's output."""
    record_path: str
    command: tuple[str, ...]
    """What the person typed, for the record."""
    diagnosis: AnySettings | None = None
    """What to watch for; the record is then of that kind. None: train and take down the steps."""
    compared_since_s: float | None = None
    """Unix time at which the comparison began that the run is part of, to note what it reads of other runs; None: it is part of none."""
    output_to_stderr: bool = False
    """Whether the script's standard output goes to standard error, because ours is JSON."""
