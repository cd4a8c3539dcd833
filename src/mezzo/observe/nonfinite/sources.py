"""Where values left the range of numbers, or of a format: what is remembered of each place. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from mezzo.observe.nonfinite.evidence import Kind, LostValues
from mezzo.records import Operand

_MOST = 6
"""Sources of one kind that a tensor keeps: the first ones."""


class ModuleNames(Protocol):
    """The names that a script's modules or layers have in their model."""

    def of(self, module: Any) -> str:
        """Return the name to show."""

    def pattern(self, module: Any) -> str:
        """Return the name for ``fp32_modules``; empty where it has none."""


@dataclass(eq=False)
class Source:
    """One place where values stopped being finite, or became zero."""

    index: int
    """Number of the operation in its step."""
    kind: Kind
    op: str
    module: Any
    """The module or layer that was called; None for code outside all of them."""
    line: str
    backward: bool
    format: str
    operands: list[Operand]
    wide: float | None
    """The largest magnitude that the result has in FP32, or that vanished; None where it is not finite there either."""
    scale: float
    """The loss scale."""
    parameter: bool = False
    """Whether what entered is a weight."""
    share: float = 0.0
    """Which part of the result's norm vanished."""
    because: tuple[Source, ...] = ()
    """What was lost before, without which the operation would have given a finite result."""
    swallowed: dict[str, None] = field(default_factory=dict)
    """Operations that made wrong finite numbers of it."""
    absorbed: dict[str, None] = field(default_factory=dict)
    """Operations that give the same for it as for the true value."""

    def as_record(self, names: ModuleNames) -> LostValues:
        """Return what is written of this place."""
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
class Spoiled:
    """One operation whose result was not finite."""

    index: int
    backward: bool
    sources: tuple[Source, ...]


def together(sources: Iterable[Source]) -> tuple[Source, ...]:
    """Return ``sources``, each once; of what vanished and of the rest the first few, with all that weighs."""
    unique = sorted(dict.fromkeys(sources), key=lambda s: s.index)
    vanished = [s for s in unique if s.kind == "vanished"]
    if len(vanished) > _MOST:
        vanished = sorted(sorted(vanished, key=lambda s: -s.share)[:_MOST], key=lambda s: s.index)
    return (*[s for s in unique if s.kind != "vanished"][: 2 * _MOST], *vanished)
