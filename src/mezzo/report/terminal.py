"""Sheets in the terminal: tables that are readable at 100 columns, in a pipe and without colour."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mezzo.report.colours import policy_style
from mezzo.report.index.sheet import IndexSheet
from mezzo.report.next_steps import NextStep
from mezzo.report.sheets.compare import Compared, CompareSheet, VerdictLine
from mezzo.report.sheets.shared import Fact, Grid
from mezzo.report.sheets.together import TogetherSheet

STYLES = {
    "good": "bold green",
    "warn": "bold yellow",
    "bad": "bold red",
    "open": "bold cyan",
    "quiet": "dim",
    "": "",
}
_BORDERS = {"good": "green", "quiet": "white", "open": "cyan", "bad": "red"}
_HEADING = "bold"
FAINT = "dim"
_INDEX_ROWS = 40


def print_framed(
    sheet: Any,
    answer: Callable[[Any, Console], None],
    details: Callable[[Any, Console], None],
    console: Console,
    *,
    files: str = "",
    steps: Sequence[NextStep] = (),
    verbose: bool = True,
) -> None:
    """Print a record: its answer and what to do next; if ``verbose`` the details, the environment and the command; the line ``files``."""
    print_line(console, sheet.headline, style=_HEADING)
    answer(sheet, console)
    _next(console, steps if verbose else steps[:1])
    if verbose:
        details(sheet, console)
        section(console, "Environment", fact_table(sheet.environment))
        _command(console, sheet.command)
    _files(console, files)


def print_ending(console: Console, *, files: str = "", steps: Sequence[NextStep] = ()) -> None:
    """Print what to do next, and where the files are."""
    _next(console, steps)
    _files(console, files)


def print_together(sheet: TogetherSheet, console: Console) -> None:
    """Print several comparisons as one table."""
    console.print()
    print_line(console, sheet.headline, style=_HEADING)
    compared = ("step\nspeed-up", "memory\nratio", "final loss\ndifference", "metric\ndifference", "skips")
    table = plain_table("policy", "verdict", *compared, "ran in", numbers=range(2, 7))
    table.columns[1].no_wrap = True
    for group in sheet.groups:
        table.add_row(Text(f"{group.framework}", style=_HEADING, overflow="fold"))
        for row in group.lines:
            line = row.line
            table.add_row(
                policy_cell(line.policy, indent=" "),
                Text(line.verdict, style=STYLES[line.tone]),
                _stack(line.step, line.speedup),
                _stack(line.memory, line.memory_ratio),
                _stack(*(part for loss in line.losses for part in (loss.value, loss.difference))),
                _stack(line.metric.value, line.metric.difference),
                Text(line.skipped),
                Text(row.formats),
            )
    console.print()
    console.print(table)
    for group in sheet.groups:
        reasons = [(row.line.policy, text) for row in group.lines for text in row.left_alone]
        facts = [Fact(what=policy, value=text) for policy, text in dict.fromkeys(reasons)]
        section(console, f"Left alone in {group.framework}", fact_table(facts))
    console.print()
    print_note(console, sheet.method)


def print_index(sheet: IndexSheet, console: Console) -> None:
    """Print an index of records, the newest first."""
    print_line(console, sheet.headline, style=_HEADING)
    table = plain_table("date", "script", "command", "policies", "answer", "folder")
    table.columns[0].no_wrap = True
    for entry in sheet.entries[:_INDEX_ROWS]:
        answer = Text(entry.word, style=STYLES[entry.tone])
        table.add_row(entry.date, Text(entry.script), entry.kind, Text(entry.policies), answer, Text(entry.place))
    console.print()
    console.print(table)
    more = len(sheet.entries) + sheet.left_out - _INDEX_ROWS
    if more > 0:
        print_note(console, f"and {more} older records")


def verdict_table(sheet: CompareSheet) -> Table:
    """Return the table of verdicts, one row per policy."""
    table = plain_table("policy", "verdict", "step\nspeed-up", "memory\nratio", numbers=(2, 3))
    heads = [*sheet.loss_heads, *([sheet.metric_name] if sheet.metric_name else [])]
    if len(heads) > 1:
        table.padding = (0, 0)  # a second interval would not fit into 100 columns otherwise
    for head in heads:
        table.add_column(Text(f"{head}\ndifference\n95% interval"), justify="right", overflow="fold")
    table.add_column("skips", justify="right")
    table.add_column("final\nscale", justify="right")
    for line in sheet.lines:
        compared = [*line.losses, *([line.metric] if sheet.metric_name else [])]
        table.add_row(*_verdict_cells(line, compared))
    table.caption, table.caption_justify = Text(sheet.columns, style=FAINT), "left"
    return table


def _verdict_cells(line: VerdictLine, compared: Sequence[Compared]) -> list[Text]:
    return [
        policy_cell(line.policy),
        Text(line.verdict, style=STYLES[line.tone]),
        _stack(line.step, line.speedup, line.spread),
        _stack(line.memory, line.memory_ratio),
        *(_stack(c.value, c.difference, c.interval) for c in compared),
        Text(line.skipped),
        Text(line.final_scale),
    ]


def policy_cell(name: str, *, indent: str = "") -> Text:
    """Return a policy's name in the colour that its format has on every page."""
    return Text(f"{indent}{name}", style=policy_style(name).terminal)


def _stack(first: str, *below: str) -> Text:
    text = Text(first)
    for part in below:
        text.append(f"\n{part}" if part else "", style=FAINT)
    return text


def fact_table(facts: Sequence[Fact], *, heads: Sequence[str] = ()) -> Table | None:
    """Return facts as a table; None if there are none."""
    if not facts:
        return None
    columns = heads or ("", "", "")[: 3 if any(f.reason for f in facts) else 2]
    table = plain_table(*columns, heads=bool(heads))
    for fact in facts:
        cells = [
            Text(fact.what, style="" if heads else FAINT),
            Text(fact.value, style=STYLES[fact.tone]),
        ]
        table.add_row(*cells, *([Text(fact.reason)] if len(columns) == 3 else []))
    return table


def grid_table(grid: Grid, *, shown: int = 1000) -> Table | None:
    """Return the first rows of a table, with a note if there are more; None if it has no rows."""
    if not grid.rows:
        return None
    table = plain_table(*grid.heads, numbers=grid.numbers)
    for row in grid.rows[:shown]:
        table.add_row(*map(Text, row))
    if len(grid.rows) > shown:
        table.caption = Text(f"and {len(grid.rows) - shown} more: see the report", style=FAINT)
        table.caption_justify = "left"
    return table


def plain_table(*columns: str, heads: bool = True, numbers: Collection[int] = ()) -> Table:
    """Return a table without lines between its rows; ``numbers`` are the right-aligned columns."""
    table = Table(
        box=box.SIMPLE_HEAD if heads else None,
        show_header=heads,
        header_style=FAINT,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1) if heads else (0, 2, 0, 0),
        collapse_padding=True,
    )
    for place, column in enumerate(columns):
        table.add_column(Text(column), overflow="fold", justify="right" if place in numbers else "left")
    return table


def answer_box(console: Console, rows: Iterable[Fact], *, headline: str, tone: str) -> None:
    """Print ``rows``, without their reasons, in a box with a headline; the tone ``command`` is bold."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(Text(row.what), Text(row.value, style="bold" if row.tone == "command" else ""))
    title = Text(headline, style="bold")
    console.print(Panel(grid, title=title, title_align="left", box=box.ROUNDED, border_style=_BORDERS[tone]))


def section(console: Console, title: str, body: Table | None) -> None:
    """Print a heading and a table; nothing if there is no table."""
    if body is None:
        return
    console.print()
    print_line(console, title, style=_HEADING)
    console.print(indented(body))


def indented(body: Table | None) -> RenderableType:
    """Return a table two columns further right."""
    return Padding(body or "", (0, 0, 0, 2), expand=False)


def _command(console: Console, command: str) -> None:
    if command:
        console.print()
        print_line(console, "Reproduce", style=_HEADING)
        console.print(Text(f"  {command}"), soft_wrap=True)  # a wrapped command cannot be pasted


def _files(console: Console, files: str) -> None:
    if files:
        console.print()
        console.print(Text(files), soft_wrap=True)


def _next(console: Console, steps: Sequence[NextStep]) -> None:
    for number, step in enumerate(steps):
        console.print()
        console.print(Text.assemble(("Or: " if number else "Next: ", _HEADING), step.why))
        console.print(Text(f"  {step.command}"), soft_wrap=True)


def print_note(console: Console, text: str) -> None:
    """Print a remark; nothing if it is empty."""
    if text:
        print_line(console, text, style=FAINT)


def print_error(console: Console, text: str) -> None:
    """Print an error, and what to do about it; nothing if there is none."""
    if text:
        print_line(console, f"error: {text}", style=STYLES["bad"])


def print_line(console: Console, text: str, *, style: str = "") -> None:
    """Print a line literally, without reading it as markup."""
    console.print(Text(text, style=style))
