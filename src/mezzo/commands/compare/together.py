"""Several comparisons side by side: scripts in several frameworks, or one script on several machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath

from mezzo.commands.compare import page as compare
from mezzo.records import CompareRecord
from mezzo.report import formatting as fmt
from mezzo.report import pages
from mezzo.report.sections import FormatShares, Headline, Page, Paragraph, Section


def page(records: Sequence[CompareRecord]) -> Page:
    """Return what ``records`` say; each is judged against its own baseline."""
    frameworks = fmt.listed(list(dict.fromkeys(fmt.clean(compare.framework_of(record)) for record in records)))
    method = (
        f"{frameworks}. Each policy is compared with the baseline of its own table; times of different tables come from "
        "separate runs."
    )
    return Page(
        title=f"{fmt.plural(len(records), 'comparison')} together",
        answer=Headline(tone="quiet", word="together", sentence=_headline(records), detail=method),
        sections=list(map(_section, records)),
        environment=pages.environment_facts(records[-1].environment),
    )


def _section(record: CompareRecord) -> Section:
    script = record.runs[0].script if record.runs else ""
    device = record.environment.gpu or record.environment.device
    names = (compare.framework_of(record), PurePath(script).name, device)
    table = compare.verdict_grid(record)
    ran = compare.effective_formats(record)
    reasons = [f"{reason}; {_ran_in(formats)}" for reason, formats in zip(table.reasons, ran, strict=True)]
    return Section(
        title=", ".join(fmt.clean(name) for name in names if name),
        blocks=[replace(table, reasons=reasons), Paragraph(text=compare.COLUMNS, faint=True)],
    )


def _ran_in(formats: FormatShares) -> str:
    """Return the formats that really ran, and what could not be switched."""
    shares = ", ".join(f"{part.text} {part.format}" for part in formats.shares) or "formats that were not counted"
    return "; ".join([f"ran in {shares}", *(f"{one.what} {one.value}: {one.reason}" for one in formats.left_alone)])


def _headline(records: Sequence[CompareRecord]) -> str:
    judged = [row.verdict for record in records for row in record.rows if row.verdict != "baseline"]
    counts = [(verdict, judged.count(verdict)) for verdict in compare.VERDICT_TONES if verdict in judged]
    words = [f"{count} {compare.verdict_text(verdict)}" for verdict, count in counts]
    rows = fmt.plural(len(judged), "row")
    return f"{rows} compared with {fmt.plural(len(records), 'baseline')}: {fmt.listed(words or ['nothing to judge'])}."
