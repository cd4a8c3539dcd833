"""What an experiment tracker logs of a record: one description, which each tracker writes in its own terms.

Numbers by step are curves. Trackers find, sort and compare runs by settings, verdicts and numbers that were counted once.
A comparison is one entry for its table and one for each run behind it.
"""

from __future__ import annotations

import io
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, TypeAlias

from rich.console import Console

from mezzo.records import (
    AnyRecord,
    AuditRecord,
    CheckRecord,
    CompareRecord,
    DiagnoseRecord,
    Environment,
    FallbackRecord,
    Finding,
    Histogram,
    RangesRecord,
    Row,
    RunRecord,
)
from mezzo.report.charts.memory import memory_kinds
from mezzo.report.terminal import render

Cell: TypeAlias = str | float | int | None
SingleRunRecord: TypeAlias = AuditRecord | DiagnoseRecord | RangesRecord | FallbackRecord

_STEP_COLUMNS = ("loss", "loss_scale", "skipped", "grad_norm", "time_ms", "cpu_ms")
_TEXT_WIDTH = 110


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A number by training step, counted from 1."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of numbers and words."""

    name: str
    columns: list[str]
    rows: list[list[Cell]]


@dataclass(frozen=True, kw_only=True)
class LogEntry:
    """What is logged of one record."""

    kind: str
    script: str = ""
    """The script's name without its suffix; empty for ``doctor``."""
    name: str = ""
    """For a run in a comparison: its policy and seed."""
    failed: bool = False
    settings: dict[str, str | int]
    """What was requested, and where it ran."""
    tags: dict[str, str] = field(default_factory=dict)
    """Kind, verdicts and codes of findings."""
    curves: list[Curve] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    """Numbers that were counted or compared once."""
    tables: list[Table] = field(default_factory=list)
    histograms: dict[str, Histogram] = field(default_factory=dict)
    text: str = ""
    """The record as the terminal shows it."""
    runs: list[LogEntry] = field(default_factory=list)
    """The runs behind a comparison."""


def log_entry(record: AnyRecord) -> LogEntry:
    """Return what is logged of ``record``."""
    if isinstance(record, CompareRecord):
        return _comparison(record)
    if isinstance(record, CheckRecord):
        return _check(record)
    if isinstance(record, RunRecord):
        return _run(record)
    return _single_run(record) if isinstance(record, SingleRunRecord) else _plain(record)


def _plain(record: AnyRecord) -> LogEntry:
    """Return what every kind of record has: the machine, and the script and verdict if it has them."""
    tags = {"kind": record.kind} | ({"verdict": str(record.verdict)} if hasattr(record, "verdict") else {})
    environment = getattr(record, "environment", None)
    return LogEntry(
        kind=record.kind,
        script=_stem(getattr(record, "script", "")),
        settings=_machine(environment) if isinstance(environment, Environment) else {},
        tags=tags,
        text=_text(record),
    )


def _single_run(record: SingleRunRecord) -> LogEntry:
    run = record.run
    return LogEntry(
        kind=record.kind,
        script=_stem(run.script),
        failed=bool(run.error),
        settings=_settings(run) | {"policy": getattr(record, "policy", run.policy)},
        tags={"kind": record.kind, **_verdict(record)},
        text=_text(record),
        **_figures(record),
    )


def _run(record: RunRecord, *, name: str = "") -> LogEntry:
    return LogEntry(
        kind=record.kind,
        script=_stem(record.script),
        name=name,
        failed=bool(record.error),
        settings=_settings(record),
        tags={"kind": record.kind, **_codes(record.findings)},
        curves=list(_curves(record)),
        numbers=dict(_counted(record)),
        text=_text(record),
    )


def _check(record: CheckRecord) -> LogEntry:
    entry = _plain(record) if record.comparison is None else _comparison(record.comparison)
    tags = {**entry.tags, "kind": record.kind, "decision": record.answer.decision, "use": record.answer.policy}
    return replace(entry, kind=record.kind, tags=tags, text=_text(record))


def _comparison(record: CompareRecord) -> LogEntry:
    first = record.runs[0] if record.runs else None
    return LogEntry(
        kind=record.kind,
        script=_stem(first.script) if first else "",
        settings={
            "command": shlex.join(record.command),
            "baseline": record.baseline,
            "policies": ",".join(row.policy_shown for row in record.rows),
            "margin": f"{record.margin:g}",
            **_machine(record.environment),
        },
        tags={"kind": record.kind, **{f"verdict {row.policy_shown}": row.verdict for row in record.rows}},
        numbers=dict(number for row in record.rows for number in _compared(row)),
        tables=[_verdicts(record.rows)],
        text=_text(record),
        runs=[_run(run, name=name_of_run(run)) for run in record.runs],
    )


def name_of_run(run: RunRecord) -> str:
    """Return the name of a run in its comparison, which is also a valid name for a folder."""
    policy = run.policy_shown.replace(":", "_").replace("*", "_")
    return policy if run.seed is None else f"{policy}-seed{run.seed}"


def _verdict(record: SingleRunRecord) -> dict[str, str]:
    if isinstance(record, AuditRecord):
        return _codes(record.findings)
    if isinstance(record, RangesRecord):
        return {}
    return {"verdict": record.verdict, **_codes(record.run.findings)}


def _codes(findings: Sequence[Finding]) -> dict[str, str]:
    codes = dict.fromkeys(finding.code for finding in findings)
    return {"findings": " ".join(codes)} if codes else {}


def _figures(record: SingleRunRecord) -> dict[str, Any]:
    """Return the curves, numbers, tables and histograms of a record about one run."""
    if isinstance(record, DiagnoseRecord):
        return {"curves": list(_trend(record))}
    if isinstance(record, RangesRecord):
        kinds = {f"exponents/{kind.kind}": kind.histogram for kind in record.kinds}
        tensors = {f"exponents of {tensor.kind}/{tensor.name}": tensor.histogram for tensor in record.tensors}
        rows: list[list[Cell]] = [
            [w.format, w.lowest, w.highest, w.suggested, w.lost, w.reason] for w in record.windows
        ]
        columns = ["format", "lowest_exponent", "highest_exponent", "suggested_exponent", "lost", "reason"]
        counted = {name: histogram for name, histogram in (kinds | tensors).items() if histogram.counts}
        return {"histograms": counted, "tables": [Table(name="scale windows", columns=columns, rows=rows)]}
    if isinstance(record, FallbackRecord):
        errors = {"error_before": record.error_before, "error_after": record.error_after}
        lines: list[list[Cell]] = [[m.module, m.type, m.output, m.dgrad, m.wgrad, int(m.kept)] for m in record.modules]
        table = Table(name="modules", columns=["module", "type", "output", "dgrad", "wgrad", "kept_fp32"], rows=lines)
        return {"numbers": {name: error for name, error in errors.items() if error is not None}, "tables": [table]}
    findings: list[list[Cell]] = [[f.code, f.title, f.share, " ".join(f.modules), f.fix] for f in record.findings]
    shares = {f"share_of_flops/{name}": flops for name, flops in record.flops_by_format.items()}
    total = sum(shares.values()) or 1
    return {
        "numbers": {name: flops / total for name, flops in shares.items()},
        "tables": [Table(name="findings", columns=["code", "title", "share", "modules", "fix"], rows=findings)],
    }


def _curves(record: RunRecord) -> Iterator[Curve]:
    for column in _STEP_COLUMNS:
        values = list(enumerate(getattr(record.steps, column), start=1))
        if column == "grad_norm":  # NaN in a step that was not skipped: not measured
            skipped = {n for n, one in enumerate(record.steps.skipped, start=1) if one}
            values = [(n, v) for n, v in values if not math.isnan(v) or n in skipped]
        if values:
            yield Curve(name=f"step/{column}", steps=[n for n, _ in values], values=[float(v) for _, v in values])
    if record.metric is not None and record.metric.values:
        yield Curve(name=f"metric/{record.metric.name}", steps=record.metric.steps, values=record.metric.values)
    for loss in record.steps.losses:
        yield Curve(name=f"loss/{loss.name}", steps=loss.steps, values=loss.values)


def _trend(record: DiagnoseRecord) -> Iterator[Curve]:
    for column in ("loss", "grad_norm", "loss_scale", "skipped"):
        values = [float(getattr(step, column)) for step in record.trend]
        if values:
            yield Curve(name=f"step/{column}", steps=[step.step for step in record.trend], values=values)


def _counted(record: RunRecord) -> Iterator[tuple[str, float]]:
    for kind, size in memory_kinds(record.memory).items():
        if size is not None:
            yield f"memory/{kind}_bytes", float(size)
    for name, share in record.effective.share_by_format.items():
        yield f"share_of_flops/{name}", share
    yield "skipped_updates", float(record.steps.num_skipped)
    yield "duration_s", record.duration_s


def _compared(row: Row) -> Iterator[tuple[str, float]]:
    numbers = {
        "speedup": None if row.emulated else row.speedup,  # no speed is claimed for emulated formats
        "memory_ratio": row.memory_ratio,
        "loss_difference": None if row.loss is None else row.loss.difference,
        "metric_difference": None if row.metric is None else row.metric.difference,
    }
    yield from ((f"{name}/{row.policy_shown}", value) for name, value in numbers.items() if value is not None)


def _verdicts(rows: Sequence[Row]) -> Table:
    columns = ["policy", "verdict", "speedup", "memory_ratio", "final_loss", "loss_difference", "low", "high", "reason"]
    lines: list[list[Cell]] = []
    for row in rows:
        loss = row.loss
        known = (loss.value, loss.difference, loss.low, loss.high) if loss is not None else (None,) * 4
        speedup = None if row.emulated else row.speedup
        lines.append([row.policy_shown, row.verdict, speedup, row.memory_ratio, *known, row.reason])
    return Table(name="verdicts", columns=columns, rows=lines)


def _settings(run: RunRecord) -> dict[str, str | int]:
    settings: dict[str, str | int] = {
        "command": shlex.join(run.command),
        "script": run.script,
        "framework": run.framework,
        "policy": run.policy,
    }
    return settings | ({} if run.seed is None else {"seed": run.seed}) | _machine(run.environment)


def _machine(environment: Environment) -> dict[str, str | int]:
    return {
        "device": environment.gpu or environment.cpu,
        "torch": environment.torch,
        "mezzo": environment.mezzo,
        "date": environment.date,
    }


def _stem(script: str) -> str:
    return PurePath(script).name.removesuffix(".py")  # a module has no suffix: pkg.train


def _text(record: AnyRecord) -> str:
    printed = io.StringIO()
    render(record, Console(file=printed, width=_TEXT_WIDTH, highlight=False))
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


# --- The files of a record that is logged, and the name that a tracker shows for it ---------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrackedRecord:
    """A record on disk and its page."""

    record: Path
    page: Path

    @property
    def folder(self) -> Path:
        """The folder of the record."""
        return self.record.parent

    @property
    def name(self) -> str:
        """The name of the record's folder, which is unique to a command; a rank's folder is prefixed with rank 0's."""
        folder = self.folder.resolve()
        name = f"{folder.parent.name}-{folder.name}" if re.fullmatch(r"rank\d+", folder.name) else folder.name
        return name if self.record.name == "record.json" else f"{name}-{self.record.stem}"
