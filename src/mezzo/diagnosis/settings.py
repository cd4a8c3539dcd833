"""What a diagnosis is asked for: one value a kind, passed to the process that runs the script as JSON. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """Be the settings of one kind of diagnosis."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class AuditSettings(Settings):
    """Ask which operation of chosen steps ran in which format."""

    kind: Literal["audit"] = "audit"
    steps: tuple[int, ...] = (3,)
    """Numbers of the steps to watch, from 1, in ascending order."""


class RangesSettings(Settings):
    """Ask where the values of chosen steps lie, for one policy's formats."""

    kind: Literal["ranges"] = "ranges"
    steps: tuple[int, ...] = (1,)
    """Numbers of the steps to watch, from 1, in ascending order."""
    policy: str = "fp16"
    """The policy that is judged; the script runs in FP32."""


class DiagnoseSettings(Settings):
    """Ask where the first value that is not finite comes from."""

    kind: Literal["diagnose"] = "diagnose"
    steps: tuple[int, ...] = (1,)
    """Numbers of the steps whose operations are inspected, in ascending order; the script is ended after the last."""
    suspects: tuple[int, ...] = ()
    """Steps that were not finite when the script ran before; where they are finite now, all that follows is inspected."""
    loss_scale: float | None = None
    """The loss scale from the first step on that is inspected; None leaves it alone."""
    fp32_modules: tuple[str, ...] = ()
    """Name patterns of modules to keep in FP32 under the script's own precision."""


class FallbackSettings(Settings):
    """Ask for the gradients of the first steps, to compare them between precisions."""

    kind: Literal["fallback"] = "fallback"
    role: Literal["reference", "noise", "check"] = "reference"
    steps: tuple[int, ...] = (1, 2, 3)
    """Numbers of the steps that are compared, from 1 without a gap."""
    all_steps: bool = True
    """Whether a check goes on after the first step whose gradients are finite."""
    policy: str = "fp16"
    """The policy that modules are run under by themselves, in the reference."""
    folder: str = "."
    """Where the reference's gradients lie, and what is measured is written."""
    name: str = "reference"
    """What the file with what is measured begins with."""
    ignored: tuple[str, ...] = ()
    """Parameters that are not judged."""


AnySettings: TypeAlias = Annotated[
    AuditSettings | RangesSettings | DiagnoseSettings | FallbackSettings, Field(discriminator="kind")
]
