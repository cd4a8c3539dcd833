"""Whether a script resumes, as display strings: the answer, what is missing, and the losses of both runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from rich.console import Console
from rich.text import Text

from mezzo.records import MissingState, ResumeCheckRecord
from mezzo.report import formatting as fmt
from mezzo.report import terminal
from mezzo.report.sheets import shared
from mezzo.report.sheets.answers import Headline
from mezzo.report.sheets.shared import Fact, Grid, ScriptSheet

_TONES = {
    "exact": "good",
    "differs": "warn",
    "does_not_resume": "bad",
    "no_checkpoint": "bad",
    "undecided": "open",
}
_MOST_STEPS = 6


@dataclass(frozen=True, kw_only=True)
class ResumeCheckSheet(ScriptSheet):
    """The words and tables of a check, ready for any view."""

    tone: str
    why: str
    error: str
    """The error of a run, and what to do about it; empty if no run has a hint."""
    facts: list[Fact]
    missing: list[MissingState]
    losses: Grid
    """The losses of the first steps after the resume, in both runs."""
    without_effect: list[Fact]


def resume_check_sheet(record: ResumeCheckRecord) -> ResumeCheckSheet:
    """Return the sheet of ``record``."""
    script = fmt.clean(PurePath(record.script).name)
    headline = _headline(record, script)
    return ResumeCheckSheet(
        title=headline,
        script=fmt.clean(record.script),
        headline=headline,
        tone=_TONES[record.verdict],
        why=fmt.clean(record.why).rstrip(".") + ".",
        error=shared.first_error_and_hint([record.whole, *([record.resumed] if record.resumed else [])]),
        facts=_facts(record),
        missing=[one.model_copy(update={name: fmt.clean(text) for name, text in one}) for one in record.missing],
        losses=Grid(heads=("step", "undisturbed", "resumed"), rows=_losses(record), numbers=(1, 2)),
        without_effect=shared.facts(record.without_effect),
        environment=shared.environment_facts(record.environment),
        command=shared.command_text(record.command, record.environment),
    )


def resume_check_answer(record: ResumeCheckRecord, sheet: ResumeCheckSheet) -> Headline:
    """Return the answer at the top of the page: the verdict, and where the run was stopped and resumed."""
    return Headline(tone=sheet.tone, word=record.verdict.replace("_", " "), facts=sheet.facts)


def _headline(record: ResumeCheckRecord, script: str) -> str:
    states = ", ".join(dict.fromkeys(one.state for one in record.missing))
    return {
        "exact": f"{script} resumes exactly",
        "differs": f"{script} resumes with differences: {states}",
        "does_not_resume": f"{script} does not resume",
        "no_checkpoint": f"{script} writes no checkpoint",
        "undecided": f"No verdict on {script}",
    }[record.verdict]


def _facts(record: ResumeCheckRecord) -> list[Fact]:
    rows = [Fact(what="steps", value=str(record.num_steps), reason="undisturbed")]
    if record.stopped_after is not None:
        rows.append(Fact(what="stopped after step", value=str(record.stopped_after), reason=f"by {record.stopped_by}"))
    if record.resumed_at is not None:
        steps = fmt.plural(record.resumed_steps, "step")
        repeated = (record.stopped_after or 0) - record.resumed_at
        reason = f"{steps} more" + (f", {repeated} of them repeated" if repeated > 0 else "")
        rows.append(Fact(what="resumed after step", value=str(record.resumed_at), reason=reason))
    if record.first_difference is not None:
        rows.append(Fact(what="first difference", value=f"step {record.first_difference}", tone="warn"))
    files = [fmt.clean(PurePath(path).name) for path in record.checkpoints]
    rows.append(Fact(what="checkpoints", value=str(len(files)), reason=", ".join(files[:3])))
    return rows


def _losses(record: ResumeCheckRecord) -> list[tuple[str, ...]]:
    if record.resumed_at is None or record.resumed is None:
        return []
    at, whole, resumed = record.resumed_at, record.whole.steps.loss, record.resumed.steps.loss
    begins = 0 if record.first_difference is None else max(record.first_difference - at - 2, 0)
    return [
        (str(at + n + 1), repr(whole[at + n]), repr(resumed[n]))
        for n in range(begins, min(begins + _MOST_STEPS, len(resumed), len(whole) - at))
    ]


# --- the terminal --------------------------------------------------------------------------------------------------------------


def print_resume_check(sheet: ResumeCheckSheet, console: Console) -> None:
    """Print the evidence for the verdict, then each missing part of the state with its evidence and fix."""
    console.print(Text(sheet.why))
    terminal.print_error(console, sheet.error)
    console.print(terminal.fact_table(sheet.facts))
    if sheet.missing:
        table = terminal.plain_table("not restored", "what", "undisturbed", "resumed")
        for line in sheet.missing:
            table.add_row(line.state, Text(line.name), Text(line.undisturbed), Text(line.resumed))
        terminal.section(console, "What is missing", table)
        for line in sheet.missing:
            console.print(Text(f"  {line.state}: {line.evidence}. To fix it: {line.fix}."))
    terminal.section(console, "Losses", terminal.grid_table(sheet.losses))
    terminal.section(console, "Not restored, but without effect in this run", terminal.fact_table(sheet.without_effect))
