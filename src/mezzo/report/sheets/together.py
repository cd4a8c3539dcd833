"""Several comparisons in one table: scripts in several frameworks, or one script on several machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from mezzo.records import CompareRecord
from mezzo.report import formatting as fmt
from mezzo.report.sheets import compare, shared
from mezzo.report.sheets.compare import VerdictLine
from mezzo.report.sheets.shared import Sheet


@dataclass(frozen=True, kw_only=True)
class TogetherLine:
    """One policy of one comparison."""

    line: VerdictLine
    formats: str
    """The formats that really ran."""
    left_alone: list[str]
    """What could not be switched, in sentences."""


@dataclass(frozen=True, kw_only=True)
class ComparedScript:
    """One comparison."""

    script: str
    framework: str
    device: str
    metric_name: str
    lines: list[TogetherLine]


@dataclass(frozen=True, kw_only=True)
class TogetherSheet(Sheet):
    """The words and tables of several comparisons, ready for any view."""

    method: str
    groups: list[ComparedScript]


def together_sheet(records: Sequence[CompareRecord]) -> TogetherSheet:
    """Return ``records`` side by side; each is judged against its own baseline."""
    groups = [_group(record) for record in records]
    frameworks = list(dict.fromkeys(group.framework for group in groups))
    return TogetherSheet(
        title=f"{fmt.plural(len(groups), 'comparison')} together",
        headline=_headline(groups),
        method=(
            f"{fmt.listed(frameworks)}. Each policy is compared with the baseline of its own group; times of different "
            "groups come from separate runs."
        ),
        groups=groups,
        environment=shared.environment_facts(records[-1].environment),
    )


def _group(record: CompareRecord) -> ComparedScript:
    sheet = compare.compare_sheet(record)
    gpu = record.environment.gpu
    return ComparedScript(
        script=fmt.clean(PurePath(sheet.script).name),
        framework=fmt.clean(compare.framework_of(record)),
        device=fmt.clean(gpu or record.environment.device),
        metric_name=sheet.metric_name,
        lines=[
            TogetherLine(
                line=line,
                formats=", ".join(f"{part.text} {part.format}" for part in effective.shares)
                + (f" ({compare.EMULATED})" if effective.emulated else ""),
                left_alone=[f"{fact.what} {fact.value}: {fact.reason}" for fact in effective.left_alone],
            )
            for line, effective in zip(sheet.lines, sheet.effective, strict=True)
        ],
    )


def _headline(groups: Sequence[ComparedScript]) -> str:
    judged = [line.line.verdict for group in groups for line in group.lines if line.line.verdict != "baseline"]
    known = [compare.verdict_text(verdict) for verdict in compare.VERDICT_TONES]
    counts = [(verdict, judged.count(verdict)) for verdict in known if verdict in judged]
    words = [f"{count} {verdict}" for verdict, count in counts]
    rows = fmt.plural(len(judged), "row")
    return f"{rows} compared with {fmt.plural(len(groups), 'baseline')}: {fmt.listed(words or ['nothing to judge'])}."
