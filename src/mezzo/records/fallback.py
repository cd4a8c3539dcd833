"""Which modules of a training script have to stay in FP32 under a policy, and what shows it."""

from __future__ import annotations

from typing import Literal, TypeAlias

from mezzo.records.run import RunRecord
from mezzo.records.values import SCHEMA_VERSION, Reason, Value

FallbackVerdict: TypeAlias = Literal["found", "not needed", "elsewhere", "not repeatable", "fp32 fails"]


class ModuleError(Value):
    """Hold the error that one module makes by itself: run on its own FP32 inputs, in FP32 and in the lower precision.

    A container's error is that of what it computes itself, its children in FP32.
    """

    module: str
    type: str
    unnamed: bool = False
    """Whether ``fp32_modules`` cannot name it, because the script calls it itself: it is the model, not a part."""
    output: float | None = None
    """Relative error of its outputs; None where it could not be run by itself."""
    dgrad: float | None = None
    """The same of the gradients of its inputs; None where none flow."""
    wgrad: float | None = None
    """The same of the gradients of its weights, all together."""
    rounded: float = 0.0
    """The largest of the three where its inputs, and its children's outputs, are in the lower precision as well."""
    flops: int = 0
    """Of its matrix products and convolutions, forward and backward, with all that lies inside."""
    kept: bool = False
    reason: str = ""
    """Why it could not be run by itself."""


class Verification(Value):
    """Hold one training run with a set of modules, or of operations, kept in FP32, compared with FP32."""

    kept: list[str]
    operations: list[str] = []
    """Operations, or families of them, in FP32 wherever they run."""
    error: float
    """The largest relative error of a parameter's gradient."""
    tensor: str = ""
    """That parameter."""
    init_scale: float = 1.0
    steps: list[int] = []
    """The batches that were compared, by number of the step."""
    passed: bool = False


class FallbackRecord(Value):
    """Hold the modules to keep in FP32, the local errors that rank them and the runs that verified them."""

    kind: Literal["fallback"] = "fallback"
    schema_version: int = SCHEMA_VERSION
    run: RunRecord
    """The run in FP32 that all others are compared with."""
    policy: str
    """The policy that is judged."""
    tolerance: float
    verdict: FallbackVerdict
    reason: str
    kept: list[str] = []
    """The modules to keep in FP32, beyond those that the policy keeps."""
    operations: list[str] = []
    """Where no set of modules helps: operations, or families of them, to keep in FP32 wherever they run; empty where that does not help."""
    suggested: str = ""
    """The policy with them."""
    next_steps: list[Reason] = []
    """What to do where no set of modules was found: what to type in ``value``."""
    policy_file: str = ""
    fp32_share: float = 0.0
    """Share of the model's product FLOPs that lies in them."""
    error_before: float | None = None
    error_after: float | None = None
    """The largest error of a gradient with the set kept, fresh batches included."""
    steps: list[int] = []
    """Batches that the final set was checked on; the first is the one it was searched with."""
    modules: list[ModuleError] = []
    """The most suspect first."""
    verifications: list[Verification] = []
    noise: float | None = None
    """The largest error of a judged gradient when FP32 itself is rounded in another way."""
    ignored: list[Reason] = []
    """Parameters that are not judged, and why."""
    notes: list[Reason] = []
