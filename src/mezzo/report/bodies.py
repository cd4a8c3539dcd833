"""What the terminal prints for each kind of record: the answer and its findings, then, after the next step, the details."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mezzo.report.sheets.audit import AuditSheet
from mezzo.report.sheets.compare import CompareSheet, VerdictLine
from mezzo.report.sheets.diagnose import DiagnoseSheet
from mezzo.report.sheets.doctor import DoctorSheet
from mezzo.report.sheets.fallback import FallbackSheet
from mezzo.report.sheets.findings import FindingLine
from mezzo.report.sheets.ranges import RangesSheet
from mezzo.report.sheets.run import RunSheet
from mezzo.report.sheets.shared import Fact, MemoryLine, Share
from mezzo.report.terminal import (
    STYLES,
    fact_table,
    grid_table,
    indented,
    plain_table,
    policy_cell,
    print_error,
    print_line,
    print_note,
    section,
    verdict_table,
)

_SHOWN_ROWS = 8


def print_run(sheet: RunSheet, console: Console) -> None:
    """Print the answer of a run."""
    print_error(console, sheet.error)
    if sheet.watched:
        section(console, "What holds it back", fact_table(sheet.bottleneck))
    else:
        console.print()
        console.print(indented(fact_table(sheet.facts)))
    shown = {"Guardrails": sheet.guardrails, "Out of memory": sheet.out_of_memory}
    for title, rows in (shown | {"Ranks": [*sheet.ranks, *sheet.between_ranks]}).items():
        section(console, title, fact_table(rows))
    _findings(sheet.findings, console)


def run_details(sheet: RunSheet, console: Console) -> None:
    """Print the details of a run."""
    if sheet.watched:
        section(console, "Result", fact_table(sheet.facts))
    else:
        section(console, "What holds it back", fact_table(sheet.bottleneck))
    section(console, "Policy", fact_table(sheet.explanation))
    section(console, "Memory of a step", _memory_table(sheet.memory))
    section(console, "Effective formats", _share_lines([(sheet.policy, sheet.shares)]))
    print_note(console, sheet.shares_note)
    section(console, "Left alone", fact_table(sheet.left_alone))


def print_compare(sheet: CompareSheet, console: Console) -> None:
    """Print the answer of a comparison."""
    if sheet.details:
        print_line(console, sheet.details)
    print_error(console, sheet.error)
    for body in (verdict_table(sheet), _reason_table(sheet.lines)):
        console.print()
        console.print(body)
    console.print()
    print_note(console, sheet.method)
    shares = [(line.policy, line.shares) for line in sheet.effective]
    section(console, "Effective formats", _share_lines(shares))


def compare_details(sheet: CompareSheet, console: Console) -> None:
    """Print the details of a comparison."""
    section(console, "Differences between ranks", fact_table(sheet.between_ranks))
    section(console, "Memory of a step", _memory_table(sheet.memory))
    print_note(console, sheet.effective_note)


def print_audit(sheet: AuditSheet, console: Console) -> None:
    """Print the answer of an audit."""
    print_error(console, sheet.error)
    _findings(sheet.findings, console)


def audit_details(sheet: AuditSheet, console: Console) -> None:
    """Print the details of an audit."""
    for title, table in sheet.tables.items():
        section(console, title, grid_table(table, shown=_SHOWN_ROWS))
    section(console, "Notes", fact_table(sheet.notes))


def _findings(findings: Sequence[FindingLine], console: Console) -> None:
    for finding in findings:
        console.print()
        print_line(console, f"{finding.code}  {finding.title}  ({finding.weight})", style=STYLES[finding.tone])
        rows = [Fact(what=w, value=v) for w, v in finding.rows]
        console.print(indented(fact_table(rows)))


def print_diagnose(sheet: DiagnoseSheet, console: Console) -> None:
    """Print the answer of a diagnosis."""
    print_line(console, ": ".join(filter(None, [sheet.verdict, sheet.meaning])), style=STYLES[sheet.tone])
    if sheet.detail:
        print_line(console, sheet.detail)
    print_error(console, sheet.error)
    section(console, "Where", fact_table(sheet.place))
    lines = ("do", sheet.fix), ("write", sheet.fix_line), ("where", sheet.fix_where), ("", sheet.fix_note)
    fix = [Fact(what=what, value=value) for what, value in lines]
    section(console, "Fix", fact_table([fact for fact in fix if fact.value]))
    _findings(sheet.findings, console)


def diagnose_details(sheet: DiagnoseSheet, console: Console) -> None:
    """Print the details of a diagnosis."""
    section(console, "Magnitudes of the operands", fact_table(sheet.operands))
    if sheet.trend:
        trend = plain_table("step", "loss", "gradient norm", "loss scale after it", "")
        for line in sheet.trend:
            trend.add_row(line.step, line.loss, line.norm, line.scale, Text(line.note, style=STYLES[line.tone]))
        section(console, "Steps up to the last one that was not finite", trend)
    section(console, "How it was found", fact_table([*sheet.passes, *sheet.notes]))
    if sheet.normal:
        print_note(console, sheet.normal)


def print_fallback(sheet: FallbackSheet, console: Console) -> None:
    """Print the answer of a fallback search."""
    print_line(console, f"{sheet.verdict}: {sheet.reason}", style=STYLES[sheet.tone])
    print_error(console, sheet.error)
    section(console, "Result", fact_table(sheet.facts))


def fallback_details(sheet: FallbackSheet, console: Console) -> None:
    """Print the details of a fallback search."""
    section(console, "Modules on their own, most suspect first", grid_table(sheet.modules, shown=_SHOWN_ROWS))
    section(console, "Verifications", grid_table(sheet.verifications))
    section(console, "Not judged", fact_table(sheet.ignored[:_SHOWN_ROWS]))
    section(console, "Notes", fact_table(sheet.notes))


def print_ranges(sheet: RangesSheet, console: Console) -> None:
    """Print the answer of a ranges record."""
    if sheet.details:
        print_line(console, sheet.details)
    print_error(console, sheet.error)
    windows = plain_table("format", "scale window", "begin with", "zero\nunscaled", "zero\nscaled", "why")
    for line in sheet.windows:
        window = Text(line.window, style=STYLES[line.tone])
        windows.add_row(Text(line.format), window, line.begin, line.unscaled, line.lost, Text(line.reason))
    section(console, "Loss scale by format", windows)
    print_note(console, sheet.method)
    section(console, "Consequences", fact_table(sheet.notes))


def ranges_details(sheet: RangesSheet, console: Console) -> None:
    """Print the details of a ranges record."""
    section(console, f"The tensors at both ends of the {sheet.format} window", fact_table(sheet.ends))
    section(console, "Distribution of values", grid_table(sheet.kinds))
    section(console, "Gradients that need the largest scale", grid_table(sheet.tightest))
    section(console, "Weight updates without master weights", fact_table(sheet.updates))


def print_doctor(sheet: DoctorSheet, console: Console) -> None:
    """Print the answer of a doctor record."""
    for device in sheet.devices:
        table = fact_table(device.formats, heads=("format", "level", "reason"))
        section(console, f"{device.name} ({device.details})", table)
    section(console, "TF32", fact_table(sheet.tf32))
    section(console, "Advice", fact_table(sheet.advice))


def _reason_table(lines: Sequence[VerdictLine]) -> Table:
    table = plain_table("", "", heads=False)
    for line in lines:
        table.add_row(policy_cell(line.policy), Text(line.reason))
    return table


def _memory_table(lines: Sequence[MemoryLine]) -> Table | None:
    if not lines:
        return None
    heads = [kind.what.replace(" ", "\n") for kind in lines[0].kinds]
    table = plain_table("policy", *heads, "total", numbers=range(1, len(heads) + 2))
    for line in lines:
        table.add_row(policy_cell(line.policy), *(kind.value for kind in line.kinds), line.total)
    return table


def _share_lines(shares: Iterable[tuple[str, Sequence[Share]]]) -> Table | None:
    known = [(policy, parts) for policy, parts in shares if parts]
    if not known:
        return None
    table = plain_table("", "", heads=False)
    for policy, parts in known:
        words = ", ".join(f"{part.text} {part.format}" for part in parts)
        table.add_row(policy_cell(policy), Text(words))
    return table
