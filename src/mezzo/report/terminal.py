"""Sheets in the terminal: tables that read well at 100 columns, in a pipe and without colour."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mezzo.report.colours import policy_style
from mezzo.report.index.sheet import IndexSheet
from mezzo.report.next_steps import NextStep
from mezzo.report.sheets.audit import AuditSheet, Grid
from mezzo.report.sheets.compare import Compared, CompareSheet, VerdictLine
from mezzo.report.sheets.diagnose import DiagnoseSheet
from mezzo.report.sheets.doctor import DoctorSheet
from mezzo.report.sheets.fallback import FallbackSheet
from mezzo.report.sheets.findings import FindingLine
from mezzo.report.sheets.ranges import RangesSheet, TensorLine
from mezzo.report.sheets.run import RunSheet
from mezzo.report.sheets.shared import Fact, MemoryLine, Share
from mezzo.report.sheets.together import TogetherSheet

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
_SHOWN_ROWS = 8
_INDEX_ROWS = 40


def print_framed(
    sheet: Any,
    body: Callable[[Any, Console], None],
    console: Console,
    *,
    files: str = "",
    steps: Sequence[NextStep] = (),
) -> None:
    """Print the frame that every kind of record shares around the ``body`` of its own kind; ``files`` says where they are."""
    _line(console, sheet.headline, style=_HEADING)
    body(sheet, console)
    section(console, "Environment", fact_table(sheet.environment))
    _command(console, sheet.command)
    print_ending(console, files=files, steps=steps)


def print_ending(console: Console, *, files: str = "", steps: Sequence[NextStep] = ()) -> None:
    """Print where the files are, and what to do next."""
    if files:
        console.print(Text(files), soft_wrap=True)
    _next(console, steps)


def print_together(sheet: TogetherSheet, console: Console) -> None:
    """Print several comparisons as one table."""
    console.print()
    _line(console, sheet.headline, style=_HEADING)
    table = plain_table(
        "policy", "verdict", "step\nspeed-up", "memory\nratio", "final loss\ndifference", "metric\ndifference", "skips"
    )
    table.columns[1].no_wrap = True
    for column in table.columns[2:]:
        column.justify = "right"
    table.add_column("ran in")
    for group in sheet.groups:
        table.add_row(Text(f"{group.framework}", style=_HEADING, overflow="fold"))
        for row in group.lines:
            line = row.line
            table.add_row(
                _policy(line.policy, indent=" "),
                Text(line.verdict, style=_STYLES[line.tone]),
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
    _note(console, sheet.method)


def print_index(sheet: IndexSheet, console: Console) -> None:
    """Print an index of records, the newest first."""
    _line(console, sheet.headline, style=_HEADING)
    table = plain_table("date", "script", "command", "policies", "answer", "folder")
    table.columns[0].no_wrap = True
    for one in sheet.entries[:_INDEX_ROWS]:
        answer = Text(one.word, style=_STYLES[one.tone])
        table.add_row(one.date, Text(one.script), one.kind, Text(one.policies), answer, Text(one.place))
    console.print()
    console.print(table)
    more = len(sheet.entries) + sheet.left_out - _INDEX_ROWS
    if more > 0:
        _note(console, f"and {more} older records")


def print_run(sheet: RunSheet, console: Console) -> None:
    """Print the body of a run."""
    _error(console, sheet.error)
    shown = {"Result": sheet.facts, "Guardrails": sheet.guardrails, "Out of memory": sheet.out_of_memory}
    shown |= {"Ranks": [*sheet.ranks, *sheet.between_ranks], "What holds this run back": sheet.bottleneck}
    for title, rows in shown.items():
        section(console, title, fact_table(rows))
    _findings(sheet.findings, console)
    section(console, "Policy", fact_table(sheet.explanation))
    section(console, "Memory of a step", _memory_table(sheet.memory))
    section(console, "Effective formats", _share_lines([(sheet.policy, sheet.shares)]))
    _note(console, sheet.shares_note)
    section(console, "Left alone", fact_table(sheet.left_alone))


def print_compare(sheet: CompareSheet, console: Console) -> None:
    """Print the body of a comparison."""
    if sheet.details:
        _line(console, sheet.details)
    for body in (verdict_table(sheet), _reason_table(sheet.lines)):
        console.print()
        console.print(body)
    console.print()
    _note(console, sheet.method)
    section(console, "Differences between ranks", fact_table(sheet.between_ranks))
    section(console, "Memory of a step", _memory_table(sheet.memory))
    shares = [(line.policy, line.shares) for line in sheet.effective]
    section(console, "Effective formats", _share_lines(shares))
    _note(console, sheet.effective_note)


def print_audit(sheet: AuditSheet, console: Console) -> None:
    """Print the body of an audit."""
    _error(console, sheet.error)
    _findings(sheet.findings, console)
    section(console, "Product FLOPs by phase and format", _grid(sheet.phases))
    section(console, "Products in FP32 or wider", _grid(sheet.wide, shown=_SHOWN_ROWS))
    section(console, "Casts", _grid(sheet.casts, shown=_SHOWN_ROWS))
    section(console, "Round-trip casts", _grid(sheet.trips, shown=_SHOWN_ROWS))
    section(console, "Shapes that miss Tensor Cores", _grid(sheet.problems, shown=_SHOWN_ROWS))
    section(console, "Kernels of products", _grid(sheet.kernels, shown=_SHOWN_ROWS))
    section(console, "Notes", fact_table(sheet.notes))


def _findings(findings: Sequence[FindingLine], console: Console) -> None:
    for finding in findings:
        console.print()
        _line(console, f"{finding.code}  {finding.title}  ({finding.weight})", style=_STYLES[finding.tone])
        rows = [Fact(what=w, value=v) for w, v in finding.rows]
        console.print(Padding(fact_table(rows) or "", (0, 0, 0, 2)))


def _grid(grid: Grid, *, shown: int = 1000) -> Table | None:
    if not grid.rows:
        return None
    table = plain_table(*grid.heads)
    for place in grid.numbers:
        table.columns[place].justify = "right"
    for row in grid.rows[:shown]:
        table.add_row(*map(Text, row))
    if len(grid.rows) > shown:
        table.caption = Text(f"and {len(grid.rows) - shown} more: see the report", style=_FAINT)
        table.caption_justify = "left"
    return table


def print_diagnose(sheet: DiagnoseSheet, console: Console) -> None:
    """Print the body of a diagnosis."""
    _line(console, ": ".join(filter(None, [sheet.verdict, sheet.meaning])), style=_STYLES[sheet.tone])
    if sheet.detail:
        _line(console, sheet.detail)
    _error(console, sheet.error)
    section(console, "Where", fact_table(sheet.place))
    lines = ("do", sheet.fix), ("write", sheet.fix_line), ("", sheet.fix_note)
    fix = [Fact(what=what, value=value) for what, value in lines]
    section(console, "Fix", fact_table([fact for fact in fix if fact.value]))
    _findings(sheet.findings, console)
    section(console, "What the operation read", fact_table(sheet.operands))
    if sheet.trend:
        trend = plain_table("step", "loss", "gradient norm", "loss scale after it", "")
        for line in sheet.trend:
            trend.add_row(line.step, line.loss, line.norm, line.scale, Text(line.note, style=_STYLES[line.tone]))
        section(console, "Steps up to the last one that was not finite", trend)
    section(console, "How it was found", fact_table([*sheet.passes, *sheet.notes]))
    if sheet.normal:
        _note(console, sheet.normal)


def print_fallback(sheet: FallbackSheet, console: Console) -> None:
    """Print the body of a fallback search."""
    _line(console, f"{sheet.verdict}: {sheet.reason}", style=_STYLES[sheet.tone])
    _error(console, sheet.error)
    section(console, "Result", fact_table(sheet.facts))
    section(console, "Modules on their own, most suspect first", _grid(sheet.modules, shown=_SHOWN_ROWS))
    section(console, "Verifications", _grid(sheet.verifications))
    section(console, "Not judged", fact_table(sheet.ignored[:_SHOWN_ROWS]))
    section(console, "Notes", fact_table(sheet.notes))


def print_ranges(sheet: RangesSheet, console: Console) -> None:
    """Print the body of a ranges record."""
    if sheet.details:
        _line(console, sheet.details)
    _error(console, sheet.error)
    windows = plain_table("format", "scale window", "begin with", "zero at\nscale 1", "zero\nthere", "why")
    for line in sheet.windows:
        window = Text(line.window, style=_STYLES[line.tone])
        windows.add_row(Text(line.format), window, line.begin, line.unscaled, line.lost, Text(line.reason))
    section(console, "Loss scale by format", windows)
    _note(console, sheet.method)
    section(console, "Consequences", fact_table(sheet.notes))
    section(console, f"The tensors at both ends of the {sheet.format} window", fact_table(sheet.ends))
    section(console, "Distribution of values", _range_table(sheet.kinds, sheet.format, windows=False))
    section(console, "Gradients that need the largest scale", _range_table(sheet.tightest, sheet.format))
    section(console, "Weight updates without master weights", fact_table(sheet.updates))


def _range_table(lines: Sequence[TensorLine], form: str, *, windows: bool = True) -> Table | None:
    if not lines:
        return None
    heads = ["tensor", "kind", "values", "zeros", "magnitudes", *([f"window in {form}"] if windows else []), ""]
    table = plain_table(*heads)
    for column in table.columns[2:4]:
        column.justify = "right"
    for line in lines:
        cells = [
            line.name,
            line.kind,
            line.values,
            line.zeros,
            line.span,
            *([line.window] if windows else []),
            line.note,
        ]
        table.add_row(*map(Text, cells))
    return table


def print_doctor(sheet: DoctorSheet, console: Console) -> None:
    """Print the body of a doctor record."""
    for device in sheet.devices:
        table = fact_table(device.formats, heads=("format", "level", "reason"))
        section(console, f"{device.name} ({device.details})", table)
    section(console, "TF32", fact_table(sheet.tf32))
    section(console, "Advice", fact_table(sheet.advice))


def verdict_table(sheet: CompareSheet) -> Table:
    """Return the table of verdicts, one row a policy."""
    table = plain_table("policy", "verdict", "step\nspeed-up", "memory\nratio")
    heads = [*sheet.loss_heads, *([sheet.metric_name] if sheet.metric_name else [])]
    if len(heads) > 1:
        table.padding = (0, 0)  # otherwise a second interval does not fit into 100 columns
    for head in heads:
        table.add_column(Text(f"{head}\ndifference\n95% interval"), justify="right", overflow="fold")
    table.add_column("skips", justify="right")
    table.add_column("final\nscale", justify="right")
    for column in table.columns[2:4]:
        column.justify = "right"
    for line in sheet.lines:
        compared = [*line.losses, *([line.metric] if sheet.metric_name else [])]
        table.add_row(*_verdict_cells(line, compared))
    table.caption, table.caption_justify = Text(sheet.columns, style=_FAINT), "left"
    return table


def _verdict_cells(line: VerdictLine, compared: Sequence[Compared]) -> list[Text]:
    return [
        _policy(line.policy),
        Text(line.verdict, style=_STYLES[line.tone]),
        _stack(line.step, line.speedup, line.spread),
        _stack(line.memory, line.memory_ratio),
        *(_stack(c.value, c.difference, c.interval) for c in compared),
        Text(line.skipped),
        Text(line.final_scale),
    ]


def _policy(name: str, *, indent: str = "") -> Text:
    """Return a policy's name in the colour that its format has on every page."""
    return Text(f"{indent}{name}", style=policy_style(name).terminal)


def _stack(first: str, *below: str) -> Text:
    text = Text(first)
    for part in below:
        text.append(f"\n{part}" if part else "", style=_FAINT)
    return text


def _reason_table(lines: Sequence[VerdictLine]) -> Table:
    table = plain_table("", "", heads=False)
    for line in lines:
        table.add_row(_policy(line.policy), Text(line.reason))
    return table


def fact_table(facts: Sequence[Fact], *, heads: Sequence[str] = ()) -> Table | None:
    """Return facts as a table; None without any."""
    if not facts:
        return None
    columns = heads or ("", "", "")[: 3 if any(f.reason for f in facts) else 2]
    table = plain_table(*columns, heads=bool(heads))
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
    table = plain_table("policy", *heads, "total of\nthe four")
    for column in table.columns[1:]:
        column.justify = "right"
    for line in lines:
        table.add_row(_policy(line.policy), *(kind.value for kind in line.kinds), line.total)
    return table


def _share_lines(shares: Iterable[tuple[str, Sequence[Share]]]) -> Table | None:
    known = [(policy, parts) for policy, parts in shares if parts]
    if not known:
        return None
    table = plain_table("", "", heads=False)
    for policy, parts in known:
        words = ", ".join(f"{part.text} {part.format}" for part in parts)
        table.add_row(_policy(policy), Text(words))
    return table


def plain_table(*columns: str, heads: bool = True) -> Table:
    """Return a table without lines between its rows."""
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


def section(console: Console, title: str, body: Table | None) -> None:
    """Print a heading and a table; nothing if there is no table."""
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


def _next(console: Console, steps: Sequence[NextStep]) -> None:
    for number, step in enumerate(steps):
        console.print()
        console.print(Text.assemble(("Or: " if number else "Next: ", _HEADING), step.why))
        console.print(Text(f"  {step.command}"), soft_wrap=True)


def _error(console: Console, text: str) -> None:
    if text:
        _line(console, f"error: {text}", style=_STYLES["bad"])


def _note(console: Console, text: str) -> None:
    if text:
        _line(console, text, style=_FAINT)


def _line(console: Console, text: str, *, style: str = "") -> None:
    console.print(Text(text, style=style))
