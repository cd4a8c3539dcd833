"""Records in the terminal: tables that read well at 100 columns, in a pipe and without colour."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mezzo.records import CompareRecord, DoctorRecord, RunRecord
from mezzo.report import sheets, verdicts
from mezzo.report.sheets import Fact, MemoryLine, Share
from mezzo.report.verdicts import Compared, CompareSheet, VerdictLine

_STYLES = {
    "good": "bold green",
    "warn": "bold yellow",
    "bad": "bold red",
    "open": "bold cyan",
    "quiet": "dim",
    "": "",
}
_HEADING = "bold"
_FAINT = "dim"


def render(record: RunRecord | CompareRecord | DoctorRecord, console: Console) -> None:
    """Print ``record`` to ``console``."""
    if isinstance(record, RunRecord):
        _render_run(record, console)
    elif isinstance(record, CompareRecord):
        _render_compare(record, console)
    else:
        _render_doctor(record, console)


def _render_run(record: RunRecord, console: Console) -> None:
    sheet = sheets.run_sheet(record)
    _line(console, sheet.headline, style=_HEADING)
    if sheet.error:
        _line(console, f"error: {sheet.error}", style=_STYLES["bad"])
    _section(console, "Result", _fact_table(sheet.facts))
    _section(console, "Policy", _fact_table(sheet.explanation))
    _section(console, "Memory of a step", _memory_table(sheet.memory))
    _section(console, "Effective formats", _share_lines([(sheet.policy, sheet.shares)]))
    _note(console, sheet.shares_note)
    _section(console, "Left alone", _fact_table(sheet.left_alone))
    _section(console, "Environment", _fact_table(sheet.environment))
    _command(console, sheet.command)


def _render_compare(record: CompareRecord, console: Console) -> None:
    sheet = verdicts.compare_sheet(record)
    _line(console, sheet.headline, style=_HEADING)
    if sheet.details:
        _line(console, sheet.details)
    for body in (_verdict_table(sheet), _reason_table(sheet.lines)):
        console.print()
        console.print(body)
    console.print()
    _note(console, sheet.method)
    _section(console, "Memory of a step", _memory_table(sheet.memory))
    shares = [(line.policy, line.shares) for line in sheet.effective]
    _section(console, "Effective formats", _share_lines(shares))
    _note(console, sheet.effective_note)
    _section(console, "Environment", _fact_table(sheet.environment))
    _command(console, sheet.command)


def _render_doctor(record: DoctorRecord, console: Console) -> None:
    sheet = sheets.doctor_sheet(record)
    _line(console, sheet.headline, style=_HEADING)
    for device in sheet.devices:
        table = _fact_table(device.formats, heads=("format", "level", "reason"))
        _section(console, f"{device.name} ({device.details})", table)
    _section(console, "TF32", _fact_table(sheet.tf32))
    _section(console, "Advice", _fact_table(sheet.advice))
    _section(console, "Versions", _fact_table(sheet.environment))


def _verdict_table(sheet: CompareSheet) -> Table:
    table = _table("policy", "verdict", "step\nspeed-up", "memory\nratio")
    if sheet.metric_name:
        table.padding = (0, 0)  # a second interval fits into 100 columns only so
    table.columns[1].no_wrap = True
    heads = ["final loss", sheet.metric_name] if sheet.metric_name else ["final loss"]
    for head in heads:
        table.add_column(Text(f"{head}\ndifference\n95% interval"), justify="right", overflow="fold")
    table.add_column("skips", justify="right")
    table.add_column("final\nscale", justify="right")
    for column in table.columns[2:4]:
        column.justify = "right"
    for line in sheet.lines:
        compared = [line.loss, line.metric] if sheet.metric_name else [line.loss]
        table.add_row(*_verdict_cells(line, compared))
    return table


def _verdict_cells(line: VerdictLine, compared: Sequence[Compared]) -> list[Text]:
    return [
        Text(line.policy),
        Text(line.verdict, style=_STYLES[line.tone]),
        _stack(line.step, line.speedup, line.spread),
        _stack(line.memory, line.memory_ratio),
        *(_stack(c.value, c.difference, c.interval) for c in compared),
        Text(line.skipped),
        Text(line.final_scale),
    ]


def _stack(first: str, *below: str) -> Text:
    text = Text(first)
    for part in below:
        text.append(f"\n{part}" if part else "", style=_FAINT)
    return text


def _reason_table(lines: Sequence[VerdictLine]) -> Table:
    table = _table("", "", heads=False)
    for line in lines:
        table.add_row(Text(line.policy, style=_STYLES[line.tone]), Text(line.reason))
    return table


def _fact_table(facts: Sequence[Fact], *, heads: Sequence[str] = ()) -> Table | None:
    if not facts:
        return None
    columns = heads or ("", "", "")[: 3 if any(f.reason for f in facts) else 2]
    table = _table(*columns, heads=bool(heads))
    for fact in facts:
        cells = [
            Text(fact.what, style="" if heads else _FAINT),
            Text(fact.value, style=_STYLES[fact.tone]),
        ]
        table.add_row(*cells, *([Text(fact.reason)] if len(columns) == 3 else []))
    return table


def _memory_table(lines: Sequence[MemoryLine]) -> Table | None:
    if not lines:
        return None
    heads = [kind.what.replace(" ", "\n") for kind in lines[0].kinds]
    table = _table("policy", *heads, "total of\nthe four")
    for column in table.columns[1:]:
        column.justify = "right"
    for line in lines:
        table.add_row(Text(line.policy), *(kind.value for kind in line.kinds), line.total)
    return table


def _share_lines(shares: Iterable[tuple[str, Sequence[Share]]]) -> Table | None:
    known = [(policy, parts) for policy, parts in shares if parts]
    if not known:
        return None
    table = _table("", "", heads=False)
    for policy, parts in known:
        words = ", ".join(f"{part.text} {part.format}" for part in parts)
        table.add_row(Text(policy), Text(words))
    return table


def _table(*columns: str, heads: bool = True) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD if heads else None,
        show_header=heads,
        header_style=_FAINT,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1) if heads else (0, 2, 0, 0),
        collapse_padding=True,
    )
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    return table


def _section(console: Console, title: str, body: Table | None) -> None:
    if body is None:
        return
    console.print()
    _line(console, title, style=_HEADING)
    console.print(Padding(body, (0, 0, 0, 2), expand=False))


def _command(console: Console, command: str) -> None:
    if command:
        console.print()
        _line(console, "Reproduce", style=_HEADING)
        console.print(Text(f"  {command}"), soft_wrap=True)  # a wrapped command cannot be pasted


def _note(console: Console, text: str) -> None:
    if text:
        _line(console, text, style=_FAINT)


def _line(console: Console, text: str, *, style: str = "") -> None:
    console.print(Text(text, style=style))
