"""The modules of a training script that must stay in FP32 under a policy, or the products in BF16, with the evidence."""

from __future__ import annotations

import math
from pathlib import PurePath
from typing import Literal, TypeAlias

from mezzo.records.run import RunRecord
from mezzo.records.values import Note, Value, WholeRecord

FallbackVerdict: TypeAlias = Literal[
    "found", "does not pay", "not needed", "elsewhere", "undecided", "not repeatable", "fp32 fails"
]
Searched: TypeAlias = Literal["modules", "products"]
"""What a search is for; a product is one of a linear layer in blocks."""
FORMAT_KEPT: dict[Searched, str] = {"modules": "fp32", "products": "bf16"}
"""The format in which they stay."""
_TIMES_CLEAR, _MOST_CLEAR = 5, 0.8


def clear_error(tolerance: float) -> float:
    """Return the relative error from which a gradient is clearly wrong: five tolerances, but below 1, the error of a gradient of zeros."""
    return min(_TIMES_CLEAR * tolerance, _MOST_CLEAR)


class ModuleError(Value):
    """The error of one module that runs alone, on its FP32 inputs: the lower precision compared with FP32.

    A container's error comes from its own operations, with its children in FP32. A product's is the one of its result.
    """

    module: str
    """Its name; of a product, its layer's, a dot and ``forward``, ``dgrad`` or ``wgrad``."""
    type: str
    unnamed: bool = False
    """Whether ``fp32_modules`` cannot name it, because it is the model that the script calls."""
    output: float | None = None
    """Relative error of its outputs; None if it could not be run alone."""
    dgrad: float | None = None
    """The same for the gradients of its inputs; None if none flow."""
    wgrad: float | None = None
    """The same for the gradients of its weights, taken together."""
    rounded: float = 0.0
    """The largest of the three if its inputs, and its children's outputs, are in the lower precision as well."""
    flops: int = 0
    """FLOPs of its matrix products and convolutions, forward and backward, submodules included."""
    kept: bool = False
    reason: str = ""
    """Why it could not be run alone."""


class Verification(Value):
    """One training run with a set of modules or operations in FP32, or of products in BF16, compared with FP32."""

    kept: list[str]
    operations: list[str] = []
    """Operations, or families of them, in FP32 wherever they run."""
    error: float
    """The relative error of the gradient that is furthest beyond what is allowed."""
    tensor: str = ""
    """That gradient's parameter."""
    allowed: float | None = None
    """The largest error that passes for it: the tolerance, or what rounding alone does to it; None in records of earlier versions."""
    init_scale: float = 1.0
    steps: list[int] = []
    """The batches that were compared, as step numbers."""
    passed: bool = False

    @property
    def excess(self) -> float:
        """The error as a multiple of what is allowed; infinite for NaN."""
        return math.inf if math.isnan(self.error) or not self.allowed else self.error / self.allowed


class FallbackRecord(WholeRecord):
    """The modules to keep in FP32, or products in BF16, the local errors that rank them and the runs that verified them."""

    kind: Literal["fallback"] = "fallback"
    run: RunRecord
    """The run in FP32 that all others are compared with."""
    policy: str
    """The policy under judgement."""
    policy_typed: str = ""
    """The policy as typed, if that was another name for it."""
    tolerance: float
    verdict: FallbackVerdict
    reason: str
    searched: Searched = "modules"
    kept: list[str] = []
    """The modules to keep in FP32, or products in BF16, beyond those that the policy keeps."""
    operations: list[str] = []
    """Operations, or families of them, to keep in FP32 wherever they run, if no set of modules helps; empty if these do not help either."""
    suggested: str = ""
    """The policy with them."""
    instead: str = ""
    """If the set does not pay, the policy to use instead: ``bf16`` if it passed on the same batches, else ``fp32``."""
    policy_file: str = ""
    fp32_share: float = 0.0
    """Share of the model's product FLOPs in the modules to keep."""
    bf16_share: float | None = None
    """The same of the products to keep; None if modules were searched for."""
    error_before: float | None = None
    """The error with nothing kept, fresh batches included: of the gradient that is furthest beyond what is allowed."""
    error_after: float | None = None
    """The same with the set kept, on the same batches."""
    steps: list[int] = []
    """Batches on which the final set was checked; the search used the first."""
    modules: list[ModuleError] = []
    """Modules, or products, by themselves, the most suspect first."""
    verifications: list[Verification] = []
    noise: float | None = None
    """The largest error of a judged gradient when FP32 itself rounds differently."""
    rounding: float | None = None
    """The largest error of a judged gradient when FP32 rounds as coarsely as the policy; None in records of earlier versions."""
    ignored: list[Note] = []
    """Parameters that are not judged, and why."""
    notes: list[Note] = []

    @property
    def summary(self) -> str:
        """The script, the verdict and what to keep, in one line."""
        kept = ", ".join([*self.kept, *self.operations]) if self.helps else ""
        return f"{PurePath(self.run.script).name} under {self.policy}: {self.verdict}" + (
            f", {kept} in {self.format_kept}" if kept else ""
        )

    @property
    def format_kept(self) -> str:
        """The format in which modules or products stay."""
        return FORMAT_KEPT[self.searched]

    @property
    def kept_share(self) -> float:
        """Share of the model's product FLOPs that stay there."""
        return self.fp32_share if self.bf16_share is None else self.bf16_share

    @property
    def helps(self) -> bool:
        """Whether the suggested policy is worth training with."""
        return self.verdict == "found" or bool(self.operations)

    @property
    def policy_shown(self) -> str:
        """The policy's name for people: as they typed it."""
        return self.policy_typed or self.policy
