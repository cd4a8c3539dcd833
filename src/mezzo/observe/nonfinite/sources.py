"""The places where values became infinite, NaN or zero in a step. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from mezzo.observe.nonfinite.evidence import Kind, LostValues
from mezzo.records import Operand

_MAX_SOURCES = 6
"""Most sources at the lower end of the range that a tensor keeps; at the upper end twice as many."""


class ModuleNames(Protocol):
    """The names that a script's modules or layers have in their model."""

    def of(self, module: Any) -> str:
        """Return the name to show."""

    def pattern(self, module: Any) -> str:
        """Return the name for ``fp32_modules``; empty if it has none."""


@dataclass(eq=False)
class Source:
    """One place where values stopped being finite, or became zero."""

    index: int
    """Number of the operation within its step."""
    kind: Kind
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
    """The loss scale."""
    parameter: bool = False
    """Whether it entered as a weight."""
    share: float = 0.0
    """Share of the result's norm that vanished."""
    because: tuple[Source, ...] = ()
    """Earlier sources without which the operation would have a finite result."""
    swallowed: dict[str, None] = field(default_factory=dict)
    """Operations that turned it into wrong finite numbers."""
    absorbed: dict[str, None] = field(default_factory=dict)
    """Operations that return the same for it as for the true value."""

    def as_record(self, names: ModuleNames) -> LostValues:
        """Return the place as it is recorded."""
        return LostValues(
            kind=self.kind,
            op=self.op,
            module=names.of(self.module),
            pattern=names.pattern(self.module),
            line=self.line,
            backward=self.backward,
            format=self.format,
            largest=self.wide,
            loss_scale=self.scale,
            operands=self.operands,
            parameter=self.parameter,
            swallowed_by=list(self.swallowed),
        )


@dataclass
class NonFiniteResult:
    """One operation whose result was not finite."""

    index: int
    backward: bool
    sources: tuple[Source, ...]


def merge_sources(sources: Iterable[Source]) -> tuple[Source, ...]:
    """Return ``sources``, each once: the first few of those that are not finite, and those that lost the largest shares."""
    unique = sorted(dict.fromkeys(sources), key=lambda s: s.index)
    vanished = [s for s in unique if s.kind == "vanished"]
    if len(vanished) > _MAX_SOURCES:
        vanished = sorted(sorted(vanished, key=lambda s: -s.share)[:_MAX_SOURCES], key=lambda s: s.index)
    return (*[s for s in unique if s.kind != "vanished"][: 2 * _MAX_SOURCES], *vanished)
