"""What a search for the fastest configuration says: the answer first, then every configuration, then every run."""

from __future__ import annotations

import math
from pathlib import PurePath

from mezzo.records import TuneRecord, TuneRow, TuneTrial
from mezzo.report import formatting as fmt
from mezzo.report import pages
from mezzo.report.log_entries import LogEntry, plain_entry
from mezzo.report.sections import Cell, Fact, Grid, Headline, NextStep, Page, Paragraph, Section

_TONES = {"use": "good", "keep": "quiet", "undecided": "open", "failed": "bad"}
_STATE_TONES = {"faster": "good", "barred": "bad", "failed": "bad"}


_METHOD = (
    "Speed is the model's input per second, from the median step after the first ones; inputs per step are a multiple of the "
    "present configuration's. The 95% intervals hold for all finalists together."
)


def page(record: TuneRecord) -> Page:
    """Return what ``record`` says."""
    script = fmt.clean(PurePath(record.script).name)
    headline = _headline(record, script)
    configurations = Grid(
        heads=("configuration", "state", "time per step", "as fast as now", "inputs per step", "memory"),
        rows=[_row(row) for row in record.rows],
        numbers=range(2, 6),
        reasons=["", *(fmt.clean(row.reason) for row in record.rows[1:])][: len(record.rows)],
        wide=True,
        sortable=False,
    )
    trials = Grid(
        heads=("run", "round", "outcome", "time"), rows=list(map(_trial, record.trials)), numbers=(3,), sortable=False
    )
    return Page(
        title=f"{script}: {headline}",
        script=fmt.clean(record.script),
        answer=_answer(record, headline),
        sections=[
            Section(title="The configurations", blocks=[configurations, Paragraph(text=_METHOD, faint=True)]),
            Section(title="How it was found", blocks=[trials], shown_in="page"),
        ],
        steps=[NextStep(why=fmt.clean(record.next_why), command=fmt.clean(record.next_command))],
        environment=pages.environment_facts(record.environment),
        command=pages.command_text(record.command, record.environment),
    )


def _answer(record: TuneRecord, headline: str) -> Headline:
    """Return the decision, and the figures of the configuration to use."""
    row = next((row for row in record.rows if row.name == record.chosen), None)
    facts = []
    if row is not None and row.step_ms is not None:
        facts.append(Fact(what="time per step", value=fmt.ms_text(row.step_ms), reason="median after the first steps"))
        if record.decision == "use" and row.speedup is not None:
            value = fmt.ratio_text(row.speedup)
            facts.append(Fact(what="as fast as now", value=value, reason=_interval(row)))
        if row.memory_bytes is not None:
            facts.append(Fact(what="memory", value=fmt.bytes_text(row.memory_bytes)))
    notes = [Fact(what=note.what, value=f"{note.value}: {note.reason}.") for note in pages.facts(record.notes)]
    why = fmt.clean(record.why).rstrip(".") + "."
    return Headline(
        tone=_TONES[record.decision],
        word=record.decision,
        sentence=headline,
        facts=facts,
        boxed=[Fact(what="why", value=why), *notes],
    )


def _headline(record: TuneRecord, script: str) -> str:
    if record.decision == "use":
        row = next((row for row in record.rows if row.name == record.chosen), None)
        return f"Use {fmt.clean(record.chosen)}: {fmt.ratio_text(row.speedup if row is not None else None)} as fast"
    if record.decision == "keep":
        return f"Keep {script} as it is"
    return "Undecided" if record.decision == "undecided" else f"No answer: {script} cannot be timed"


def _row(row: TuneRow) -> tuple[str | Cell, ...]:
    interval = _interval(row)
    return (
        fmt.clean(row.name),
        Cell(text=row.state, tone=_STATE_TONES.get(row.state, "quiet")),
        fmt.ms_text(row.step_ms),
        Cell(text=fmt.ratio_text(row.speedup), below=(interval,) if interval else ()),
        fmt.ratio_text(row.inputs),
        fmt.bytes_text(row.memory_bytes),
    )


def _trial(trial: TuneTrial) -> tuple[str, ...]:
    which = f"final, seed {trial.seed}" if trial.round == "final" else trial.round
    again = " (from the interrupted search)" if trial.resumed else ""
    return fmt.clean(trial.name), which, fmt.clean(trial.outcome) + again, fmt.duration_text(trial.duration_s)


def _interval(row: TuneRow) -> str:
    if row.speedup_low is None or row.speedup_high is None or math.isnan(row.speedup_low):
        return ""
    return f"95% CI {fmt.ratio_text(row.speedup_low)} to {fmt.ratio_text(row.speedup_high)}"


def log_entry(record: TuneRecord) -> LogEntry:
    """Return what is logged of the record."""
    return plain_entry(record)
