"""A section for each finding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePath
from types import MappingProxyType

from mezzo.records import Finding
from mezzo.report import formatting as fmt
from mezzo.report.sections import Fact, FactTable, Section

_TONES = {"error": "bad", "warning": "warn", "info": "open", "": "warn"}


def finding_section(finding: Finding, lines: Mapping[str, str] = MappingProxyType({})) -> Section:
    """Return what a finding says; ``lines`` maps modules to the lines of code that call them."""
    rows = [
        ("where", ", ".join(_place(module, lines.get(module, "")) for module in finding.modules)),
        ("what", finding.detail),
        ("harm" if finding.severity else "gain", finding.gain),
        ("fix", finding.fix),
        ("lines", ", ".join(PurePath(line).name for line in finding.lines)),
        ("page", f"docs/findings/{finding.code}.md"),
    ]
    facts = [
        Fact(what=word, value=fmt.clean(text), lines=tuple(finding.lines) if word == "lines" else ())
        for word, text in rows
        if text
    ]
    return Section(
        title=fmt.clean(finding.title),
        blocks=[FactTable(rows=facts)],
        code=finding.code,
        weight=_weight(finding),
        tone=_TONES[finding.severity],
    )


def lines_of(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    """Return the lines of code that findings name, each with the finding."""
    return [(line, f"{one.code}: {fmt.clean(one.title)}") for one in findings for line in one.lines]


def _place(module: str, line: str) -> str:
    """Return a module's name, with its line if the name alone says little: a bare index, or the class of a whole model."""
    bare = module.isdecimal() or ("." not in module and module[:1].isupper())
    return f"{module} ({PurePath(line).name})" if line and bare else module


def _weight(finding: Finding) -> str:
    if not finding.severity:
        return f"{fmt.share_text(finding.share)} of {'FLOPs' if finding.flops else 'bytes'}"
    times = f", {finding.count} times" if finding.count > 1 else ""
    return f"{finding.severity}, first in step {finding.step}{times}"
