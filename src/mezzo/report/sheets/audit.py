"""An audit as display strings: the findings first, then the tables behind them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from mezzo.records import AS_IS, AuditRecord, CastTotal, RoundTrip, WideProduct
from mezzo.records.run import WIDE
from mezzo.report import formatting as fmt
from mezzo.report.sheets import shared
from mezzo.report.sheets.findings import FindingLine, finding_line
from mezzo.report.sheets.shared import Fact, Grid, ScriptSheet

_TINY = 0.01
"""Below this share of the FLOPs, mixed precision is practically unused."""
_UNDER_AUTOCAST = ("excluded", "list", "no rule")
"""Causes of wide products that occur only under autocast."""
PHASES = ("forward", "recompute", "dgrad", "wgrad", "optimizer")


@dataclass(frozen=True, kw_only=True)
class AuditSheet(ScriptSheet):
    """The words and tables of an audit, ready for any view."""

    error: str
    findings: list[FindingLine]
    tables: dict[str, Grid]
    """By title, the answers first."""
    operations: Grid
    notes: list[Fact]


def audit_sheet(record: AuditRecord) -> AuditSheet:
    """Return the sheet of ``record``."""
    script = fmt.clean(PurePath(record.run.script).name)
    return AuditSheet(
        title=f"Audit of {script}",
        script=fmt.clean(record.run.script),
        headline=_headline(record, script),
        error=shared.error_and_hint(record.run) if record.run.error else "",
        findings=[finding_line(finding, dict(reversed(lines_of_modules(record)))) for finding in record.findings],
        tables={
            "Product FLOPs by phase and format": _phases(record),
            "Products in FP32 or wider": _wide(record),
            "Casts": _casts(record),
            "Round-trip casts": _trips(record),
            "Shapes that do not suit Tensor Cores": _problems(record),
            "Kernels of products": _kernels(record),
        },
        operations=_operations(record),
        notes=[
            *shared.name_meant(record.run),
            *_lowered(record),
            *shared.facts(record.run.effective.left_alone),
            *shared.facts(record.notes),
        ],
        environment=shared.environment_facts(record.run.environment),
        command=shared.command_text(record.run.command, record.run.environment),
    )


def lines_of_modules(record: AuditRecord) -> list[tuple[str, str]]:
    """Return modules with the lines of code that call them; for a module with several, the first line counts."""
    named: list[WideProduct | RoundTrip | CastTotal] = [*record.wide_products, *record.round_trips, *record.casts]
    return [(one.module, one.line) for one in named if one.line]


def _headline(record: AuditRecord, script: str) -> str:
    if not record.steps:
        return f"No step of {script} was audited"
    which = f"{'step' if len(record.steps) == 1 else 'steps'} {fmt.listed([str(step) for step in record.steps])}"
    total = sum(record.flops_by_format.values())
    shares = sorted(record.flops_by_format.items(), key=lambda item: -item[1])
    words = [f"{fmt.share_text(flops / total)} {fmt.clean(form)}" for form, flops in shares] or ["no matrix product"]
    policy, found = fmt.clean(record.run.policy_shown), fmt.plural(len(record.findings), "finding")
    nothing = f"; {policy} {record.run.no_effect}" if record.run.changed_nothing else ""
    summary = f"{which[0].upper()}{which[1:]} of {script} under {policy}: {', '.join(words)}{nothing}; {found}"
    return f"{_hardly_used(record)}{summary}"


def _hardly_used(record: AuditRecord) -> str:
    """Return a sentence if the script's own mixed precision is off or affects next to nothing; empty otherwise."""
    total = sum(record.flops_by_format.values())
    narrow = sum(flops for form, flops in record.flops_by_format.items() if form not in WIDE)
    is_on = narrow > 0 or any(product.cause in _UNDER_AUTOCAST for product in record.wide_products)
    if record.run.policy != AS_IS or not total or narrow >= _TINY * total:
        return ""
    if not is_on:
        return "" if record.run.effective.num_lowered else "Mixed precision is off. "
    share = f"only {fmt.share_text(narrow / total)}" if narrow else "none"
    return f"Mixed precision is on, but {share} of the FLOPs use it. "


def _lowered(record: AuditRecord) -> list[Fact]:
    """Return how many operations ran below 32 bits, whether matrix products or not; empty if they were not counted."""
    count = record.run.effective.num_lowered
    if count is None or not record.steps:
        return []
    why = f"operations of the audited {'step' if len(record.steps) == 1 else 'steps'} that read or wrote such numbers"
    return [Fact(what="below 32 bits", value=fmt.plural(count, "operation") if count else "no operation", reason=why)]


def _phases(record: AuditRecord) -> Grid:
    formats = list(record.flops_by_format)
    whole = sum(record.flops_by_format.values())
    rows = []
    for phase in PHASES:
        flops = record.flops_by_phase.get(phase)
        if flops:
            share = fmt.share_text(sum(flops.values()) / whole)
            rows.append((phase, *(fmt.flops_text(flops.get(form, 0)) for form in formats), share))
    heads = ("phase", *map(fmt.clean, formats), "share")
    return Grid(heads=heads, rows=rows, numbers=tuple(range(1, len(heads))))


def _wide(record: AuditRecord) -> Grid:
    rows = [
        (fmt.clean(p.module), p.op, p.format, p.cause, fmt.clean(p.reason), fmt.flops_text(p.flops))
        for p in record.wide_products
    ]
    return Grid(heads=("module", "operation", "format", "cause", "reason", "FLOPs"), rows=rows, numbers=(5,))


def _casts(record: AuditRecord) -> Grid:
    rows = [
        (fmt.clean(c.module), c.phase, c.of, f"{c.source} > {c.target}", str(c.count), fmt.bytes_text(c.bytes))
        for c in record.casts
    ]
    return Grid(heads=("module", "phase", "of", "formats", "count", "bytes"), rows=rows, numbers=(4, 5))


def _trips(record: AuditRecord) -> Grid:
    rows = [
        (
            fmt.clean(t.module),
            t.phase,
            t.formats,
            "needless" if t.needless else "needed, or due to the policy",
            str(t.count),
            fmt.bytes_text(t.bytes),
        )
        for t in record.round_trips
    ]
    return Grid(heads=("module", "phase", "formats", "", "count", "bytes"), rows=rows, numbers=(4, 5))


def _problems(record: AuditRecord) -> Grid:
    rows = [
        (
            fmt.clean(p.module),
            p.phase,
            p.op,
            p.format,
            f"{f'{p.batch} x ' if p.batch > 1 else ''}{p.m} x {p.n} x {p.k}",
            "; ".join(p.problems) or f"ran {', '.join(map(fmt.clean, p.kernels))}",
            fmt.flops_text(p.flops),
        )
        for p in record.products
        if not p.eligible or p.on_tensor_cores is False
    ]
    return Grid(
        heads=("module", "phase", "operation", "format", "m x n x k", "problem", "FLOPs"), rows=rows, numbers=(6,)
    )


def _kernels(record: AuditRecord) -> Grid:
    rows = [
        (fmt.clean(k.name), "Tensor Cores" if k.tensor_cores else "none", str(k.count), fmt.ms_text(k.time_ms))
        for k in record.kernels
    ]
    return Grid(heads=("kernel", "Tensor Cores", "count", "time"), rows=rows, numbers=(2, 3))


def _operations(record: AuditRecord) -> Grid:
    rows = [
        (
            fmt.clean(o.module),
            o.phase,
            fmt.clean(o.op),
            ", ".join(o.inputs),
            ", ".join(o.outputs),
            str(o.count),
            fmt.flops_text(o.flops) if o.flops else "",
            fmt.bytes_text(o.bytes),
        )
        for o in record.operations
    ]
    heads = ("module", "phase", "operation", "in", "out", "count", "FLOPs", "bytes")
    return Grid(heads=heads, rows=rows, numbers=(5, 6, 7))
