"""What one run of a script showed of values that left their format: facts, and no verdict. Imports no torch.

The process that runs the script writes them beside the run's record; ``mezzo.observe.nonfinite.verdict`` judges those of all runs together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from mezzo.formats import FORMATS
from mezzo.records import Operand, Value
from mezzo.records.files import write_whole

Kind: TypeAlias = Literal["made", "entered", "constant", "refused", "vanished"]
"""``made`` of finite values; ``entered`` the step from outside; a ``constant`` of the script; ``refused``: a number
that the format does not hold, which torch raises an error for; ``vanished``: too small for the format, so 0."""


class LostValues(Value):
    """One operation at which values stopped being finite, or became zero."""

    kind: Kind
    op: str
    module: str
    pattern: str = ""
    """The module's name for ``fp32_modules``; empty where it has none."""
    line: str = ""
    backward: bool = False
    format: str
    """The format that the result is kept in."""
    largest: float | None = None
    """The largest magnitude that the result has in FP32, or that vanished; None where it is not finite there either."""
    loss_scale: float = 1.0
    operands: list[Operand] = []
    parameter: bool = False
    """Whether what entered is a weight."""
    swallowed_by: list[str] = []
    """Operations that made wrong finite numbers of it."""


class WrongGradients(Value):
    """Gradients that are wrong although they are finite."""

    parameter: str
    """The one whose gradient is furthest off."""
    error: float
    """The norm of what is wrong with that gradient over its true norm."""
    count: int
    total: int
    """How many gradients were compared."""
    zeros: float = 0.0
    """Where values vanished: which part of all elements is 0 and would not be."""


class Located(Value):
    """The place to blame for one step, and what came of it."""

    step: int
    source: LostValues
    vanished: LostValues | None = None
    """What became 0 before; without that, the operation would have a finite result."""
    symptom: LostValues | None = None
    """The operation that failed on what came from there, where that is another one."""
    gradients: WrongGradients | None = None
    arrived: bool = False
    """Whether it may have come from another process, with the gradients of all."""

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
    largest: float
    absorbed_by: list[str]
    """Operations that give the same for it as for the true value."""


class Evidence(Value):
    """What one run of a script showed."""

    located: Located | None = None
    """The place to blame, in this process or where it began; None where none was seen."""
    found_by_rank: int | None = None
    """The rank of the process where it began, where that is another one."""
    watched: list[int] = []
    """The steps whose operations were inspected."""
    missed_start: bool = False
    """Whether step 1 was not inspected because the script called no module in it."""
    bad_steps: list[int] = []
    """Steps whose loss or gradients were not finite."""
    faulty_steps: list[int] = []
    """Those of them that are no normal skips."""
    unexplained_skips: list[int] = []
    """Normal skips, that is few enough, that neither the search for a loss scale nor its growth explains."""
    lost_step: int | None = None
    """The last step whose loss was not finite."""
    own_scaler: bool = False
    """Whether the script's own GradScaler is in use."""
    session_policy: str = ""
    """The policy of the script's own ``mezzo.Session``."""
    scaled: bool = False
    """Whether any loss scale is."""
    forced_eager: bool = False
    """Whether compiled code ran eagerly in inspected steps."""
    problems: dict[str, str] = {}
    """Operations that could not be inspected, and why."""
    harmless: list[Harmless] = []


def write_evidence(evidence: Evidence, path: str) -> None:
    """Write what a run showed to ``path``, whole or not at all."""
    write_whole(evidence.model_dump_json(), Path(path))


def read_evidence(path: Path) -> Evidence | None:
    """Return what a run showed; None where its process died before it could write it."""
    return Evidence.model_validate_json(path.read_text(encoding="utf-8")) if path.is_file() else None


def of_all(by_rank: Sequence[Evidence | None]) -> Evidence | None:
    """Return the evidence of all processes of a run as one; None where no process left any.

    The place to blame is rank 0's, or that of the first rank that has one. Every process has what was agreed on while the script ran; one
    that failed alone has the rest.
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
            "bad_steps": sorted({step for one in everyone for step in one.bad_steps}),
            "faulty_steps": sorted({step for one in everyone for step in one.faulty_steps}),
            "problems": {name: why for one in reversed(everyone) for name, why in one.problems.items()},
            "harmless": list({one.line: one for evidence in everyone for one in evidence.harmless}.values()),
        }
    )
