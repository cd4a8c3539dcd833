"""The evidence of one run about values that left their format: facts, no verdict. Imports no torch.

While the script runs, every place where a step lost values is a ``FaultSource``, which knows modules and earlier sources. What is
written names them: a ``LostValues`` for the source to blame. The process that runs the script writes its evidence next to the run's
record; ``mezzo.commands.diagnose.verdict`` judges the evidence of all runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from mezzo.formats import FORMATS
from mezzo.observe.settings import FADED
from mezzo.records import Operand, Value
from mezzo.records.files import write_whole

SourceKind: TypeAlias = Literal["made", "entered", "constant", "refused", "vanished", "raised"]
"""``made`` from finite values; ``entered`` the step from outside; a ``constant`` of the script; ``refused``: a number too large for
the format, for which torch raises an error; ``vanished``: too small for the format, so 0; ``raised``: no value, but an error."""
_MAX_SOURCES = 6
"""Most sources at the lower end of the range that a tensor keeps; at the upper end twice as many."""


class LostValues(Value):
    """One operation at which values stopped being finite, or became zero."""

    kind: SourceKind
    op: str
    module: str
    pattern: str = ""
    """The module's name for ``fp32_modules``; empty if it has none."""
    line: str = ""
    backward: bool = False
    in_update: bool = False
    """Whether it ran between a backward pass and the next forward pass."""
    zero_eps: float | None = None
    """The optimizer's eps, if it is 0 in the format of the weight."""
    format: str
    """The format of the result."""
    largest: float | None = None
    """The largest magnitude of the result in FP32, or of what vanished; None if it is not finite in FP32 either."""
    in_fp64: float | None = None
    """The largest magnitude of the result in FP64, if it is finite there and not in FP32."""
    loss_scale: float = 1.0
    static_scale: bool = False
    """Whether that is a number by which the script itself multiplies its loss and divides its gradients."""
    operands: list[Operand] = []
    parameter: bool = False
    """Whether it entered as a weight."""
    swallowed_by: list[str] = []
    """Operations that turned it into wrong finite numbers."""


class WrongGradients(Value):
    """Gradients, or a loss, that are wrong although they are finite."""

    parameter: str = ""
    """The one with the largest error; empty if only the loss is wrong."""
    error: float = 0.0
    """The norm of that gradient's error over its true norm."""
    count: int = 0
    total: int
    """How many gradients were compared."""
    loss_error: float | None = None
    """The error of the loss over its true value; None if that is right."""
    zeros: float = 0.0
    """If values vanished, the share of all elements that are 0 for that reason."""


class Located(Value):
    """The place to blame for one step's fault, and its consequences."""

    step: int
    source: LostValues
    vanished: LostValues | None = None
    """The operation at which an operand had become 0; otherwise the result would be finite."""
    symptom: LostValues | None = None
    """The later operation that failed on the result, if any."""
    gradients: WrongGradients | None = None
    arrived: bool = False
    """Whether the fault may have come from another process, in a reduction of gradients."""

    @property
    def fits_fp32(self) -> bool:
        """Whether the values would be finite in FP32."""
        return self.vanished is not None or self.source.kind == "refused" or self._overflows

    @property
    def fits_unscaled(self) -> bool:
        """Whether the values would fit their format at a loss scale of 1, in which a backward pass is linear."""
        source = self.source
        if self.symptom is not None or self.vanished is not None or not self._overflows or not source.backward:
            return False
        limit = FORMATS[source.format].max if source.format in FORMATS else math.inf
        return source.loss_scale > 1 and (source.largest or 0.0) / source.loss_scale <= limit

    @property
    def _overflows(self) -> bool:
        return self.source.kind == "made" and self.source.largest is not None and math.isfinite(self.source.largest)


class Harmless(Value):
    """A value that left its format and made no difference."""

    op: str
    line: str
    format: str
    largest: float | None
    """None if it is not finite in FP32 either."""
    absorbed_by: list[str]
    """Operations whose result is the same as for the true value."""
    swallowed_by: list[str] = []
    """Operations that turned it into other finite numbers, which no gradient shows; both are empty if nothing depends on it."""


class Evidence(Value):
    """The evidence of one run of a script."""

    located: Located | None = None
    """The place to blame, in this process or in the one where the fault began; None if none was found."""
    found_by_rank: int | None = None
    """The rank of the process where the fault began, if it was another one."""
    watched: list[int] = []
    """The steps whose operations were inspected."""
    missed_start: bool = False
    """Whether step 1 was not inspected because the script called no module in it."""
    bad_steps: list[int] = []
    """Steps whose loss or gradients were not finite."""
    faulty_steps: list[int] = []
    """The bad steps that are not normal skips."""
    settled_scale: float | None = None
    """The dynamic loss scale at which the run settled, if skipped updates have lowered it below ``LEAST_SCALE``."""
    may_settle_higher: bool = False
    """Whether that scale alone is the fault, and the run too short to tell that it stays so low."""
    zeros: float = 0.0
    """The share of all gradient elements that are 0 only because of the format, in the last healthy step that was inspected."""
    unexplained_skips: list[int] = []
    """Normal skips (few enough) that neither the search for a loss scale nor its growth explains."""
    lost_step: int | None = None
    """The last step whose loss was not finite."""
    own_scaler: bool = False
    """Whether the script's own GradScaler is in use."""
    session_policy: str = ""
    """The policy of the script's own ``mezzo.Session``."""
    scaled: bool = False
    """Whether any loss scale is in use."""
    narrow: bool = True
    """Whether an inspected operation read or returned 16-bit values; True if that is unknown."""
    forced_eager: bool = False
    """Whether compiled code ran eagerly in inspected steps."""
    problems: dict[str, str] = {}
    """Operations that could not be inspected, and why."""
    harmless: list[Harmless] = []
    raised: LostValues | None = None
    """The operation that raised an error, of kind ``raised``, if that ended the run."""


class ModelNames(Protocol):
    """The names that a script's modules, or layers, and their parameters have in their model."""

    def of(self, module: Any) -> str:
        """Return the name to show."""

    def pattern(self, module: Any) -> str:
        """Return the name for ``fp32_modules``; empty if it has none."""

    def parameter(self, parameter: Any) -> str:
        """Return the name of a parameter."""


@dataclass(eq=False)
class FaultSource:
    """One place where values stopped being finite, or became zero."""

    index: int
    """Number of the operation within its step."""
    kind: SourceKind
    op: str
    module: Any
    """The module or layer that was called; None for code outside all of them."""
    line: str
    backward: bool
    format: str
    operands: list[Operand]
    wide: float | None
    """The largest magnitude of the result in FP32, or of what vanished; None if it is not finite in FP32 either."""
    scale: float
    in_fp64: float | None = None
    """The largest magnitude of the result in FP64, if it is finite there and not in FP32."""
    """The loss scale."""
    static_scale: bool = False
    """Whether that is a number by which the script itself multiplies its loss and divides its gradients."""
    parameter: bool = False
    """Whether it entered as a weight."""
    in_update: bool = False
    """Whether it ran between a backward pass and the next forward pass."""
    zero_eps: float | None = None
    """The optimizer's eps, if it is 0 in the format of the weight."""
    share: float = 0.0
    """Share of the result's norm that vanished."""
    because: tuple[FaultSource, ...] = ()
    """Earlier sources without which the operation would have a finite result."""
    swallowed: dict[str, None] = field(default_factory=dict)
    """Operations that turned it into wrong finite numbers."""
    absorbed: dict[str, None] = field(default_factory=dict)
    """Operations that return the same for it as for the true value."""


def recorded(source: FaultSource, names: ModelNames) -> LostValues:
    """Return a place as it is recorded."""
    return LostValues(
        kind=source.kind,
        op=source.op,
        module=names.of(source.module),
        pattern=names.pattern(source.module),
        line=source.line,
        backward=source.backward,
        in_update=source.in_update,
        zero_eps=source.zero_eps,
        format=source.format,
        largest=source.wide,
        in_fp64=source.in_fp64,
        loss_scale=source.scale,
        static_scale=source.static_scale,
        operands=source.operands,
        parameter=source.parameter,
        swallowed_by=list(source.swallowed),
    )


@dataclass
class NonFiniteResult:
    """One operation whose result was not finite."""

    index: int
    backward: bool
    in_update: bool
    sources: tuple[FaultSource, ...]


def merge_sources(sources: Iterable[FaultSource]) -> tuple[FaultSource, ...]:
    """Return ``sources``, each once: the first few of those that are not finite, and those that lost the largest shares."""
    unique = sorted(dict.fromkeys(sources), key=lambda s: s.index)
    vanished = [s for s in unique if s.kind == "vanished"]
    if len(vanished) > _MAX_SOURCES:
        vanished = sorted(sorted(vanished, key=lambda s: -s.share)[:_MAX_SOURCES], key=lambda s: s.index)
    return (*[s for s in unique if s.kind != "vanished"][: 2 * _MAX_SOURCES], *vanished)


@dataclass(frozen=True)
class WrongGradient:
    """One parameter whose gradient is wrong, or a loss that is."""

    parameter: Any
    """The loss itself if that is wrong."""
    error: float
    """The norm of the difference over the true gradient's."""
    sources: tuple[FaultSource, ...]


@dataclass(frozen=True)
class GradientErrors:
    """The gradients of a step that a format's range made wrong."""

    above: tuple[WrongGradient, ...]
    """Those that are wrong because values became too large."""
    below: tuple[WrongGradient, ...]
    """Those that are wrong because values became too small."""
    num_gradients: int
    zeros: float
    """Share of the truly non-zero elements that are 0."""
    norm: float
    """The norm of the true gradients, with the loss scale."""
    index: int = 0
    """Number of operations recorded before the comparison."""
    losses: tuple[WrongGradient, ...] = ()
    """The losses that are wrong because values became too large."""

    @property
    def nothing(self) -> bool:
        """Whether no gradient is wrong."""
        return not (self.above or self.below)

    def faded(self, largest_before: float) -> bool:
        """Return whether the gradients are negligible compared with earlier steps': the training has converged."""
        return self.norm < FADED * largest_before

    def as_record(self, names: ModelNames, *, below: bool) -> WrongGradients:
        """Return what is wrong at one end of the range as it is recorded."""
        wrong, losses = (self.below, ()) if below else (self.above, self.losses)
        worst = max(wrong, key=lambda gradient: gradient.error, default=None)
        return WrongGradients(
            parameter="" if worst is None else names.parameter(worst.parameter),
            error=0.0 if worst is None else worst.error,
            count=len(wrong),
            total=self.num_gradients,
            loss_error=max((loss.error for loss in losses), default=None),
            zeros=self.zeros if below else 0.0,
        )


def write_evidence(evidence: Evidence, path: str) -> None:
    """Write the evidence to ``path``, whole or not at all."""
    write_whole(evidence.model_dump_json(), Path(path))


def read_evidence(path: Path) -> Evidence | None:
    """Return the evidence of a run; None if its process died before it could write it."""
    return Evidence.model_validate_json(path.read_text(encoding="utf-8")) if path.is_file() else None


def of_all(by_rank: Sequence[Evidence | None]) -> Evidence | None:
    """Return the evidence of all processes of a run as one; None if no process left any.

    Blame the place that the lowest rank found.
    """
    found = [(rank, evidence) for rank, evidence in enumerate(by_rank) if evidence is not None]
    if not found:
        return None
    longest = max(found, key=lambda pair: len(pair[1].watched))
    rank, first = next(((r, e) for r, e in found if e.located is not None), longest)
    elsewhere = first.located is not None and first.found_by_rank is None and rank > 0
    everyone = [evidence for _, evidence in found]
    return first.model_copy(
        update={
            "found_by_rank": rank if elsewhere else first.found_by_rank,
            "bad_steps": sorted({step for evidence in everyone for step in evidence.bad_steps}),
            "faulty_steps": sorted({step for evidence in everyone for step in evidence.faulty_steps}),
            "raised": next((evidence.raised for evidence in everyone if evidence.raised is not None), None),
            "narrow": any(evidence.narrow for evidence in everyone),
            "problems": {op: why for evidence in reversed(everyone) for op, why in evidence.problems.items()},
            "harmless": list({value.line: value for evidence in everyone for value in evidence.harmless}.values()),
        }
    )
