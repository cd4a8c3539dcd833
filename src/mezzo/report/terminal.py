"""Records in the terminal: tables that are readable at 100 columns, in a pipe and without colour."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mezzo.records import AnyRecord
from mezzo.report.colours import policy_style
from mezzo.report.index import IndexSheet
from mezzo.report.pages import page_of
from mezzo.report.sections import (
    Block,
    Cell,
    Code,
    Fact,
    FactTable,
    Formats,
    Grid,
    Headline,
    NextStep,
    Page,
    Paragraph,
    Section,
    has_content,
)

_STYLES = {
    "good": "bold green",
    "warn": "bold yellow",
    "bad": "bold red",
    "open": "bold cyan",
    "quiet": "dim",
    "": "",
}
_BORDERS = {"good": "green", "quiet": "white", "open": "cyan", "bad": "red"}
_HEADING, _FAINT = "bold", "dim"
_EDGES = 20
"""Columns of the box that a command cannot use."""
_INDEX_ROWS = 40
_TEXT_WIDTH = 110
_MANY_COLUMNS = 7
"""A wide table with more columns has no space between them, or it would not fit into 100."""


def render(record: AnyRecord, console: Console, *, files: str = "", verbose: bool = True) -> None:
    """Print ``record`` to ``console``: its answer, then what to do next, and at the end the line ``files`` about its files.

    Without ``verbose``, the tables behind the answer are left to the page.
    """
    render_page(page_of(record), console, files=files, verbose=verbose)


def text_of(record: AnyRecord) -> str:
    """Return a record as the terminal shows it, without colours."""
    printed = io.StringIO()
    render(record, Console(file=printed, width=_TEXT_WIDTH, highlight=False))
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


def render_page(page: Page, console: Console, *, files: str = "", verbose: bool = True) -> None:
    """Print the answer, what to do next, the details and the environment if ``verbose``, and the line ``files``.

    A boxed answer has the next step in its box, and no details.
    """
    verbose = verbose and not page.answer.boxed
    sections = [one for one in page.sections if isinstance(one, Section) and one.shown_in != "page"]
    if page.answer.boxed:
        _box(console, page.answer, page.steps)
    else:
        _answer(console, page.answer)
    for one in sections:
        if not one.details:
            _section(console, one)
    if not page.answer.boxed:
        _next(console, page.steps if verbose else page.steps[:1])
    if verbose:
        for one in sections:
            if one.details:
                _section(console, one)
        _section(console, Section(title="Environment", blocks=[FactTable(rows=page.environment)]))
        if page.command:
            _section(console, Section(title="Reproduce", blocks=[Code(text=page.command)]))
    if files:
        console.print()
        console.print(Text(files), soft_wrap=True)


def print_index(sheet: IndexSheet, console: Console) -> None:
    """Print an index of records, the newest first."""
    _line(console, sheet.answer.sentence, style=_HEADING)
    rows = [
        (one.date, one.script, one.kind, one.policies, Cell(text=one.word, tone=one.tone), one.place)
        for one in sheet.entries[:_INDEX_ROWS]
    ]
    heads = ("date", "script", "command", "policies", "answer", "folder")
    console.print()
    console.print(_table(Grid(heads=heads, rows=rows, whole=(0,))))
    more = len(sheet.entries) + sheet.num_older - _INDEX_ROWS
    if more > 0:
        _line(console, f"and {more} older records", style=_FAINT)


# --- The answer ------------------------------------------------------------------------------------------------------------------


def _answer(console: Console, answer: Headline) -> None:
    _line(console, answer.sentence, style=_HEADING)
    if answer.detail_follows_word:
        detail = ": ".join(filter(None, [answer.word, answer.detail]))
        _line(console, detail, style=_STYLES[answer.tone])
    elif answer.detail:
        _line(console, answer.detail)
    if answer.error:
        _line(console, f"error: {answer.error}", style=_STYLES["bad"])


def _box(console: Console, answer: Headline, steps: Sequence[NextStep]) -> None:
    """Print an answer in a box with its next step; a command that would wrap is printed below it, where it can be copied."""
    fit = [len(step.command) + _EDGES <= console.width for step in steps]
    rows = list(answer.boxed)
    for step, fits in zip(steps, fit, strict=True):
        rows += [Fact(what="next", value=step.command, tone="command")] if fits else []
        rows.append(Fact(what="next", value=f"{'' if fits else 'the command below '}{step.why}."))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style=_FAINT, no_wrap=True)
    grid.add_column(overflow="fold")
    for before, row in pairwise([Fact(what="", value=""), *rows]):
        what = "" if before.what == row.what else row.what
        grid.add_row(Text(what), Text(row.value, style=_HEADING if row.tone == "command" else ""))
    title = Text(answer.sentence, style=_HEADING)
    console.print(Panel(grid, title=title, title_align="left", box=box.ROUNDED, border_style=_BORDERS[answer.tone]))
    for step, fits in zip(steps, fit, strict=True):
        if not fits:
            console.print(Text(f"  {step.command}", style=_HEADING), soft_wrap=True)


def _next(console: Console, steps: Sequence[NextStep]) -> None:
    for number, step in enumerate(steps):
        console.print()
        console.print(Text.assemble(("Or: " if number else "Next: ", _HEADING), step.why))
        console.print(Text(f"  {step.command}"), soft_wrap=True)


# --- Sections --------------------------------------------------------------------------------------------------------------------


def _section(console: Console, section: Section) -> None:
    blocks = [block for block in section.blocks if has_content(block)]
    if not blocks:
        return
    console.print()
    if section.code:
        _line(console, f"{section.code}  {section.title}  ({section.weight})", style=_STYLES[section.tone])
    elif section.title:
        _line(console, section.title, style=_HEADING)
    for block in blocks:
        for shown in _rendered(block):
            console.print(shown, soft_wrap=isinstance(block, Code))  # wrapped code cannot be pasted


def _rendered(block: Block) -> Iterator[RenderableType]:
    if isinstance(block, Paragraph):
        yield Text(block.text, style=_FAINT) if block.faint else _indented(Text(block.text))
    elif isinstance(block, FactTable):
        yield _indented(_fact_table(block))
    elif isinstance(block, Code):
        text = block.text.rstrip("\n")
        yield Text(text if "\n" in text else f"  {text}")  # an indented patch cannot be applied
    elif isinstance(block, Formats):
        yield _indented(_formats_table(block))
    else:
        table = _table(block)
        yield table if block.wide else _indented(table)
        if any(block.reasons):
            yield ""
            reasons = _indented(_reasons_table(block))
            yield _reasons_table(block) if block.wide else reasons


def _indented(body: RenderableType) -> RenderableType:
    return Padding(body, (0, 0, 0, 2), expand=False)


def _table(grid: Grid) -> Table:
    table = _plain_table(has_heads=True)
    if grid.wide and len(grid.heads) > _MANY_COLUMNS:
        table.padding = (0, 0)
    for place, head in enumerate(grid.heads):
        is_number, is_whole = place in grid.numbers, place in grid.whole
        table.add_column(Text(head), overflow="fold", no_wrap=is_whole, justify="right" if is_number else "left")
    before = ""
    for row in grid.rows[: grid.shown]:
        cells = [_cell(one) for one in row]
        first = row[0]
        name = first if isinstance(first, str) else first.text
        if grid.grouped and name == before:
            cells[0] = Text("")
        before = name
        table.add_row(*cells)
    if len(grid.rows) > grid.shown:
        table.caption = Text(f"and {len(grid.rows) - grid.shown} more: see the report", style=_FAINT)
        table.caption_justify = "left"
    return table


def _cell(cell: str | Cell) -> Text:
    if isinstance(cell, str):
        return Text(cell)
    text = Text(cell.text, style="" if cell.style is None else cell.style.terminal)
    text.stylize(_STYLES[cell.tone])
    for line in cell.below:
        text.append(f"\n{line}" if line else "", style=_FAINT)
    return text


def _reasons_table(grid: Grid) -> Table:
    table = _plain_table(has_heads=False, columns=2)
    for row, reason in zip(grid.rows, grid.reasons, strict=True):
        first = row[0]
        if reason:
            table.add_row(_cell(first if isinstance(first, str) else replace(first, below=())), Text(reason))
    return table


def _fact_table(facts: FactTable) -> Table:
    num_columns = len(facts.heads) or (3 if any(fact.reason for fact in facts.rows) else 2)
    table = _plain_table(has_heads=bool(facts.heads), columns=0 if facts.heads else num_columns)
    for head in facts.heads:
        table.add_column(Text(head), overflow="fold")
    for fact in facts.rows:
        cells = [Text(fact.what, style="" if facts.heads else _FAINT), Text(fact.value, style=_STYLES[fact.tone])]
        table.add_row(*cells, *([Text(fact.reason)] if num_columns == 3 else []))
    return table


def _formats_table(formats: Formats) -> Table:
    table = _plain_table(has_heads=False, columns=2)
    for one in formats.policies:
        if one.shares:
            words = ", ".join(f"{part.text} {part.format}" for part in one.shares)
            table.add_row(Text(one.policy, style=policy_style(one.policy).terminal), Text(words))
    return table


def _plain_table(*, has_heads: bool, columns: int = 0) -> Table:
    """Return a table without lines between its rows."""
    table = Table(
        box=box.SIMPLE_HEAD if has_heads else None,
        show_header=has_heads,
        header_style=_FAINT,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1) if has_heads else (0, 2, 0, 0),
        collapse_padding=True,
    )
    for _ in range(columns):
        table.add_column(overflow="fold")
    return table


def _line(console: Console, text: str, *, style: str = "") -> None:
    """Print a line literally, without reading it as markup."""
    console.print(Text(text, style=style))
