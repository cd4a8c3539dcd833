"""Findings as display strings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from types import MappingProxyType

from mezzo.records import Finding
from mezzo.report import formatting as fmt

_TONES = {"error": "bad", "warning": "warn", "info": "open", "": "warn"}


@dataclass(frozen=True, kw_only=True)
class FindingLine:
    """One finding."""

    code: str
    title: str
    weight: str
    """The share of the step that it affects, or its severity and first step."""
    tone: str
    rows: list[tuple[str, str]]
    """A label and a text each."""
    lines: list[str]
    """The lines of code, as ``file:line``."""


def finding_line(finding: Finding, lines: Mapping[str, str] = MappingProxyType({})) -> FindingLine:
    """Return ``finding`` as display strings; ``lines`` maps modules to the lines of code that call them."""
    rows = [
        ("where", ", ".join(_place(module, lines.get(module, "")) for module in finding.modules)),
        ("what", finding.detail),
    ]
    rows += [("harm" if finding.severity else "gain", finding.gain), ("fix", finding.fix)]
    rows += [("lines", ", ".join(PurePath(line).name for line in finding.lines))]
    rows += [("page", f"docs/findings/{finding.code}.md")]
    return FindingLine(
        code=finding.code,
        title=fmt.clean(finding.title),
        weight=_weight(finding),
        tone=_TONES[finding.severity],
        rows=[(word, fmt.clean(text)) for word, text in rows if text],
        lines=list(finding.lines),
    )


def _place(module: str, line: str) -> str:
    """Return a module's name, with its line if the name alone says little: a bare index, or the class of a whole model."""
    bare = module.isdecimal() or ("." not in module and module[:1].isupper())
    return f"{module} ({PurePath(line).name})" if line and bare else module


def _weight(finding: Finding) -> str:
    if not finding.severity:
        return f"{fmt.share_text(finding.share)} of {'FLOPs' if finding.flops else 'bytes'}"
    times = f", {finding.count} times" if finding.count > 1 else ""
    return f"{finding.severity}, first in step {finding.step}{times}"
