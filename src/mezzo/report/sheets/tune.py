"""A search for the fastest configuration as display strings: the answer first, then every configuration, then every run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import PurePath

from rich.console import Console
from rich.text import Text

from mezzo.records import TuneRecord, TuneRow, TuneTrial
from mezzo.report import formatting as fmt
from mezzo.report import terminal
from mezzo.report.sheets import shared
from mezzo.report.sheets.answers import Headline
from mezzo.report.sheets.shared import Fact, Grid, ScriptSheet

_TONES = {"use": "good", "keep": "quiet", "undecided": "open", "failed": "bad"}
_STATE_TONES = {"faster": "good", "barred": "bad", "failed": "bad"}


@dataclass(frozen=True, kw_only=True)
class TuneLine:
    """One configuration."""

    name: str
    state: str
    tone: str
    step: str
    speedup: str
    interval: str
    inputs: str
    memory: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class TuneSheet(ScriptSheet):
    """The words and tables of a search, ready for any view."""

    tone: str
    why: str
    lines: list[TuneLine]
    trials: Grid
    """One row per run."""
    notes: list[Fact]
    next_command: str
    next_why: str


def tune_sheet(record: TuneRecord) -> TuneSheet:
    """Return the sheet of ``record``."""
    script = fmt.clean(PurePath(record.script).name)
    headline = _headline(record, script)
    return TuneSheet(
        title=f"{script}: {headline}",
        script=fmt.clean(record.script),
        headline=headline,
        tone=_TONES[record.decision],
        why=fmt.clean(record.why).rstrip(".") + ".",
        lines=[_line(row) for row in record.rows],
        trials=Grid(
            heads=("run", "round", "outcome", "time"), rows=[_trial(one) for one in record.trials], numbers=(3,)
        ),
        notes=shared.facts(record.notes),
        next_command=fmt.clean(record.next_command),
        next_why=fmt.clean(record.next_why),
        environment=shared.environment_facts(record.environment),
        command=shared.command_text(record.command, record.environment),
    )


def tune_answer(record: TuneRecord, sheet: TuneSheet) -> Headline:
    """Return the answer at the top of the page: the decision, and the figures of the configuration to use."""
    row = next((row for row in record.rows if row.name == record.chosen), None)
    facts = []
    if row is not None and row.step_ms is not None:
        facts.append(Fact(what="time per step", value=fmt.ms_text(row.step_ms), reason="median after the first steps"))
        if record.decision == "use" and row.speedup is not None:
            value = fmt.ratio_text(row.speedup)
            facts.append(Fact(what="as fast as now", value=value, reason=_interval(row)))
        if row.memory_bytes is not None:
            facts.append(Fact(what="memory", value=fmt.bytes_text(row.memory_bytes)))
    return Headline(tone=sheet.tone, word=record.decision, facts=facts)


def _headline(record: TuneRecord, script: str) -> str:
    if record.decision == "use":
        row = next((row for row in record.rows if row.name == record.chosen), None)
        return f"Use {fmt.clean(record.chosen)}: {fmt.ratio_text(row.speedup if row is not None else None)} as fast"
    if record.decision == "keep":
        return f"Keep {script} as it is"
    return "Undecided" if record.decision == "undecided" else f"No answer: {script} cannot be timed"


def _line(row: TuneRow) -> TuneLine:
    return TuneLine(
        name=fmt.clean(row.name),
        state=row.state,
        tone=_STATE_TONES.get(row.state, "quiet"),
        step=fmt.ms_text(row.step_ms),
        speedup=fmt.ratio_text(row.speedup),
        interval=_interval(row),
        inputs=fmt.ratio_text(row.inputs),
        memory=fmt.bytes_text(row.memory_bytes),
        reason=fmt.clean(row.reason),
    )


def _trial(trial: TuneTrial) -> tuple[str, ...]:
    which = f"final, seed {trial.seed}" if trial.round == "final" else trial.round
    again = " (from the interrupted search)" if trial.resumed else ""
    return fmt.clean(trial.name), which, fmt.clean(trial.outcome) + again, fmt.duration_text(trial.duration_s)


def _interval(row: TuneRow) -> str:
    if row.speedup_low is None or row.speedup_high is None or math.isnan(row.speedup_low):
        return ""
    return f"95% CI {fmt.ratio_text(row.speedup_low)} to {fmt.ratio_text(row.speedup_high)}"


# --- the terminal --------------------------------------------------------------------------------------------------------------


def print_tune(sheet: TuneSheet, console: Console) -> None:
    """Print the answer in a box, the command, unwrapped so that it can be pasted, and every configuration."""
    notes = [Fact(what=note.what, value=f"{note.value}: {note.reason}.") for note in sheet.notes]
    rows = [Fact(what="why", value=sheet.why), *notes, Fact(what="next", value=f"the command below {sheet.next_why}.")]
    terminal.answer_box(console, rows, headline=sheet.headline, tone=sheet.tone)
    console.print(Text(f"  {sheet.next_command}", style="bold"), soft_wrap=True)
    table = terminal.plain_table(
        "configuration", "state", "time per step", "as fast as now", "inputs per step", "memory"
    )
    for line in sheet.lines:
        speed = f"{line.speedup}\n{line.interval}" if line.interval else line.speedup
        table.add_row(Text(line.name), line.state, line.step, Text(speed), line.inputs, line.memory)
    console.print()
    console.print(table)
    reasons = [Fact(what=line.name, value=line.state, reason=line.reason) for line in sheet.lines[1:]]
    terminal.section(console, "Why", terminal.fact_table(reasons))
