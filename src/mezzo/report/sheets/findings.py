"""Findings as display strings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from mezzo.records import Finding
from mezzo.report import formatting as fmt

_TONES = {"error": "bad", "warning": "warn", "info": "open", "": "warn"}


@dataclass(frozen=True, kw_only=True)
class FindingLine:
    """One finding."""

    code: str
    title: str
    weight: str
    """Its weight: the share of the step that it affects, or its severity."""
    tone: str
    rows: list[tuple[str, str]]
    """A label and a text each."""
    lines: list[str]
    """The lines of code, as ``file:line``."""


def finding_line(finding: Finding) -> FindingLine:
    """Return ``finding`` as display strings."""
    rows = [("where", ", ".join(finding.modules)), ("what", finding.detail)]
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


def _weight(finding: Finding) -> str:
    if not finding.severity:
        return f"{fmt.share_text(finding.share)} of {'FLOPs' if finding.flops else 'bytes'}"
    times = f", {finding.count} times" if finding.count > 1 else ""
    return f"{finding.severity}, first in step {finding.step}{times}"
