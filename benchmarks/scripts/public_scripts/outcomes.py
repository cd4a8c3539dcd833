"""Summarise a record in the few words of a table's cell."""

from __future__ import annotations

import re
from collections import Counter

from mezzo.records import (
    AuditRecord,
    CheckRecord,
    CompareRecord,
    DiagnoseRecord,
    FallbackRecord,
    RangesRecord,
    RunRecord,
)

Record = RunRecord | CompareRecord | AuditRecord | DiagnoseRecord | CheckRecord | RangesRecord | FallbackRecord


def cell(record: Record) -> str:
    if isinstance(record, CompareRecord):
        rows = [row for row in record.rows if row.verdict != "baseline"]
        return "; ".join(f"{row.policy} {row.verdict.replace('_', ' ')}: {_shortened(row.reason)}" for row in rows)
    if isinstance(record, AuditRecord):
        codes = Counter(finding.code for finding in record.findings)
        return f"{_shares(record.flops_by_format)}; {' '.join(sorted(codes)) or 'no findings'}"
    if isinstance(record, CheckRecord):
        return f"{record.answer.decision} {record.answer.policy}: {record.answer.why}"
    if isinstance(record, FallbackRecord):
        return f"{record.verdict.replace('_', ' ')}: {record.reason}"
    if isinstance(record, RangesRecord):
        return f"{len(record.run.steps)} steps"
    if isinstance(record, DiagnoseRecord):
        if record.verdict == "healthy":
            return f"healthy, {len(record.run.steps)} steps"
        where = f"{record.module} {record.op} {record.phase} step {record.step} {record.line}".strip()
        return f"{record.verdict}: {where}; {record.detail}"
    return _of_run(record)


def _of_run(record: RunRecord) -> str:
    """Return the steps, the first and last loss, the share of each format, skips, and how the run ended."""
    steps = record.steps
    said = ["1 step" if len(steps) == 1 else f"{len(steps)} steps"]
    if steps.loss:
        said.append(f"loss {steps.loss[0]:.3g} to {steps.loss[-1]:.3g}")
    said.append(_shares(record.effective.flops_by_format))
    if steps.num_skipped:
        said.append(f"{steps.num_skipped} skipped")
    said += [f"left alone: {reason.what}" for reason in record.effective.left_alone]
    return "; ".join([*said, record.error] if record.error else said)


def _shares(flops: dict[str, int]) -> str:
    total = sum(flops.values())
    parts = sorted(flops.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {n / total:.0%}" for name, n in parts if n) if total else "no products counted"


def _shortened(reason: str) -> str:
    """Return a verdict's reason without intervals and without the sentence that every emulated row has."""
    parts = [part for part in reason.split("; ") if not part.startswith("its formats are emulated")]
    return "; ".join(re.sub(r", 95% CI [^)]*", "", part) for part in parts)
