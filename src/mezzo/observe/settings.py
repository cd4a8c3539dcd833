"""What observers are told, as JSON for the process that runs the script. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, PlainValidator

from mezzo.formats import BF16, FP16, FP32, FP64, TF32
from mezzo.observe.contracts.contract import Contract
from mezzo.policy import Policy


def step_text(steps: Sequence[int]) -> str:
    """Return ascending numbers in the usual notation, short enough for a command: ``1-100000``, ``3, 10-12``."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def _step_numbers(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    ends = [part.partition("-") for part in value.split(", ") if part]
    return tuple(step for first, _, last in ends for step in range(int(first), int(last or first) + 1))


StepNumbers: TypeAlias = Annotated[
    tuple[int, ...], BeforeValidator(_step_numbers), PlainSerializer(step_text, return_type=str, when_used="json")
]
"""Numbers of steps, from 1, in ascending order."""


def read_policy(value: Policy | str) -> Policy:
    """Return the policy, parsed if it is a string, as it is in JSON."""
    return Policy.parse(value) if isinstance(value, str) else value


JudgedPolicy: TypeAlias = Annotated[Policy, PlainValidator(read_policy), PlainSerializer(str)]
"""A policy, which is a string in JSON."""


class ObserverSettings(BaseModel):
    """Settings of one kind of observer."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class AuditSettings(ObserverSettings):
    """Settings of an audit: which operation of chosen steps ran in which format."""

    kind: Literal["audit"] = "audit"
    steps: StepNumbers = (3,)
    """Numbers of the steps to observe, from 1, in ascending order."""
    contract: Contract | None = None
    """The formats to check until the script ends, without lines to list them only; None ends the script after the steps."""


class RangesSettings(ObserverSettings):
    """Settings of ranges: where the values of chosen steps lie, for one policy's formats."""

    kind: Literal["ranges"] = "ranges"
    steps: StepNumbers = (1,)
    """Numbers of the steps to observe, from 1, in ascending order."""
    policy: JudgedPolicy = Policy.parse("fp16")
    """The policy to judge; the script runs in FP32."""
    counts_path: str = ""
    """Where to write the counts, for one of several processes; empty for the only one."""


class TrialChanges(BaseModel):
    """What a run of a diagnosis changes about the script's own precision, to decide on a cause or to try a fix."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    loss_scale: float | None = None
    """The loss scale from the first inspected step on; None leaves it alone."""
    fp32_modules: tuple[str, ...] = ()
    """Name patterns of the modules to keep in FP32 under the script's own precision."""
    fp32_line: str = ""
    """The line of the script (``file:line``) whose operations get their 16-bit operands in FP32, outside autocast; empty for none."""
    own_format: Literal["", "fp32", "bf16"] = ""
    """The format in place of every 16-bit format that the script names: autocast, weights, casts; its GradScaler is then off."""
    own_scale: tuple[float, float] | None = None
    """A number by which the script multiplies its loss and divides its gradients, and the one in its place."""
    eps: float | None = None
    """The eps of every optimizer; None leaves it alone."""

    def __bool__(self) -> bool:
        return self != TrialChanges()


class DiagnoseSettings(ObserverSettings):
    """Settings of a diagnosis: where the first non-finite value comes from."""

    kind: Literal["diagnose"] = "diagnose"
    steps: StepNumbers = (1,)
    """Numbers of the steps whose operations are inspected, in ascending order; the script ends after the last."""
    suspects: StepNumbers = ()
    """Steps that were not finite in an earlier run; if one is finite now, all later steps are inspected."""
    changes: TrialChanges = TrialChanges()
    """What the run changes about the script's own precision."""
    from_start: bool = False
    """Whether step 1 begins with the script's first line (no module is called); else at the first call of a module."""
    evidence_path: str = ""
    """Where to write the evidence; empty if the caller reads it in the same process."""


class FallbackSettings(ObserverSettings):
    """Settings of a fallback run: the gradients of the first steps, to compare between precisions."""

    kind: Literal["fallback"] = "fallback"
    role: Literal["reference", "noise", "rounding", "check"] = "reference"
    steps: StepNumbers = (1, 2, 3)
    """Numbers of the steps to compare, from 1 without a gap."""
    all_steps: bool = True
    """Whether a check continues after the first step with finite gradients."""
    policy: JudgedPolicy = Policy.parse("fp16")
    """The policy under judgement: the reference runs each module on its own under it, and ``rounding`` rounds as coarsely."""
    folder: str = "."
    """The folder of the reference's gradients and of the measurements."""
    name: str = "reference"
    """Prefix of the name of the file with the measurements."""
    ignored: tuple[str, ...] = ()
    """Parameters that are left out of the comparison."""


class ValuesSettings(ObserverSettings):
    """Settings of fingerprints: every value of a run's first steps."""

    kind: Literal["values"] = "values"
    steps: StepNumbers = (1, 2, 3)
    """Numbers of the steps to record, from 1 without a gap."""
    path: str = ""
    """The file to write; empty if the caller reads the log in the same process."""
    in_fp64: bool = False
    """Whether each operation is computed again in FP64, for the error of its result."""
    mirrored: bool = False
    """Whether every result gets the opposite rounding error at random elements."""
    seed: int | None = None
    """Seed of the global generators before the script sets its own; None leaves them as they are."""
    deterministic: bool = False
    """Whether torch uses deterministic kernels where it has them."""
    outcomes_only: bool = False
    """Whether only losses, gradients, updates and compare points are recorded: compiled code then stays compiled."""
    ends_script: bool = True
    """Whether the script ends after the last step."""


AnySettings: TypeAlias = Annotated[
    AuditSettings | RangesSettings | DiagnoseSettings | FallbackSettings | ValuesSettings, Field(discriminator="kind")
]


MOST_LISTED = 12
"""The largest number of modules or lines in a finding."""
SCALE_HEADROOM = 2
"""Doublings between a suggested loss scale and the largest possible: gradients vary by about that much between batches."""
ROUNDOFFS = 40
"""Tolerated error of a gradient, in unit roundoffs: a hundred healthy layers in a row stay below it."""
LOST_BELOW = 0.1
"""Relative error from which a gradient is wrong because values became too small."""
SHARE_BELOW = 0.25
"""Share of all gradient elements that must be wrong: an attention key's bias, or a rare word, has almost no gradient anyway."""
FADED = 2.0**-10
"""Share of the largest gradient norm so far below which the training has converged, so that small gradients do not matter."""
WEIGHTY = 0.1
"""Share of a result's norm that must vanish for the operation to be to blame: less is rounding."""
LEAST_SCALE = 2.0**7
"""The loss scale below which so many small gradients are lost that the operation which forces it is at fault."""
SURELY_LOW = 2.0**6
"""A scale that settles below this is too low in a run of any length."""
STEPS_THAT_SETTLE = 200
"""Steps of a run from which on a scale between ``SURELY_LOW`` and ``LEAST_SCALE`` is known to have settled there."""
HARMLESS_LISTED = 3
"""The largest number of harmless values in a diagnosis."""
TENSOR_CORE_MULTIPLE = 8
"""16-bit elements that a Tensor Core kernel loads at once: 16 bytes."""
IMAGE_CHANNELS = 4
"""Number of input channels up to which they count as an image's: cuDNN has kernels for so few, and pads them itself."""
FORMATS_OF_16_BITS = (FP16.name, BF16.name)
"""The 16-bit formats."""
WIDE_FORMATS = (FP32.name, TF32.name, FP64.name)
"""Formats of products outside mixed precision."""
FITTING = 0.9
"""Share of modules whose gradients fit at the loss scale that is chosen for modules on their own: an outlier then still overflows."""


class StopScript(SystemExit):
    """The end of a script after its last observed or requested step: exit code 0, and silent in a thread."""
