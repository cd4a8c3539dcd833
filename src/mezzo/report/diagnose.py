"""Where a value stopped being finite, as display strings: verdict, place, cause and fix stand first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import PurePath

from mezzo.records import DiagnoseRecord, Operand, Pass, TrendStep
from mezzo.report import formatting as fmt
from mezzo.report import sheets
from mezzo.report.findings import FindingLine, finding_line
from mezzo.report.sheets import Fact

TITLES = {
    "healthy": "healthy",
    "scale_overflow": "scale overflow",
    "range_overflow": "range overflow",
    "invalid_operation": "invalid operation",
    "silent_saturation": "silent saturation",
}
_MEANINGS = {
    "scale_overflow": "finite at a lower loss scale",
    "range_overflow": "a value beyond what the format holds, at any loss scale",
    "invalid_operation": "not finite in FP32 either",
    "silent_saturation": "an infinity that never leaves its module: the loss looks right, gradients are wrong",
}
_NORMAL = "A few skipped updates at the start are normal: a dynamic loss scale begins too high and halves until gradients fit."


@dataclass(frozen=True, kw_only=True)
class StepLine:
    """Hold one step in a row."""

    step: str
    loss: str
    norm: str
    scale: str
    note: str
    tone: str


@dataclass(frozen=True, kw_only=True)
class DiagnoseSheet:
    """Hold what a view says of a diagnosis."""

    title: str
    script: str
    headline: str
    verdict: str
    tone: str
    meaning: str
    detail: str
    error: str
    place: list[Fact]
    fix: str
    fix_line: str
    operands: list[Fact]
    trend: list[StepLine]
    passes: list[Fact]
    notes: list[Fact]
    normal: str
    """What is no fault, of a run that skipped updates."""
    findings: list[FindingLine]
    environment: list[Fact]
    command: str


def diagnose_sheet(record: DiagnoseRecord) -> DiagnoseSheet:
    """Return what a view says of ``record``."""
    script = fmt.clean(PurePath(record.run.script).name)
    title = TITLES[record.verdict]
    healthy = record.verdict == "healthy"
    return DiagnoseSheet(
        title=f"{script}: {title}",
        script=fmt.clean(record.run.script),
        headline=_headline(record, script),
        verdict=title,
        tone="good" if healthy else "bad",
        meaning=_MEANINGS.get(record.verdict, ""),
        detail=fmt.clean(record.detail),
        error=sheets.error_text(record.run) if record.run.error else "",
        place=_place(record),
        fix=fmt.clean(record.fix),
        fix_line=fmt.clean(record.fix_line),
        operands=[_operand(number, operand) for number, operand in enumerate(record.operands, 1)],
        trend=[_step(step, bad=step.step in record.bad_steps) for step in record.trend],
        passes=[_pass(number, seen) for number, seen in enumerate(record.passes, 1)],
        notes=[*_skips(record), *sheets.facts(record.notes)],
        normal=_NORMAL,
        findings=[finding_line(finding) for finding in record.run.findings],
        environment=sheets.environment_facts(record.run.environment),
        command=sheets.command_text(record.run.command),
    )


def _headline(record: DiagnoseRecord, script: str) -> str:
    policy = fmt.clean(record.run.policy)
    if record.verdict == "healthy":
        count = fmt.plural(len(record.run.steps), "step")
        found = fmt.plural(len(record.run.findings), "finding")
        if record.run.findings:
            return f"{script} under {policy}: every value is finite in {count}; {found} on the script's mixed precision"
        return f"{script} under {policy}: nothing wrong in {count}"
    where = f"step {record.step}"
    if record.located:
        where += f", {record.phase} pass of {fmt.clean(record.module)}"
    return f"{script} under {policy}: {TITLES[record.verdict]} in {where}"


def _place(record: DiagnoseRecord) -> list[Fact]:
    if record.verdict == "healthy":
        return []
    facts = [Fact(what="step", value=str(record.step)), Fact(what="phase", value=record.phase)]
    if record.located:
        facts = [
            Fact(what="module", value=fmt.clean(record.module)),
            Fact(what="operation", value=fmt.clean(record.op), reason=f"result in {fmt.clean(record.format)}"),
            Fact(what="line", value=fmt.clean(record.line)),
            *facts,
        ]
    if record.loss_scale != 1.0:
        facts.append(Fact(what="loss scale", value=fmt.scale_text(record.loss_scale)))
    if record.swallowed_by:
        facts.append(Fact(what="swallowed by", value=fmt.clean(record.swallowed_by)))
    return facts


def _skips(record: DiagnoseRecord) -> list[Fact]:
    if not record.num_skipped:
        return []
    count = f"{record.num_skipped} of {len(record.run.steps)}"
    return [
        Fact(
            what="skipped", value=f"{count} updates", reason="" if record.verdict != "healthy" else "normal: see below"
        )
    ]


def _operand(number: int, operand: Operand) -> Fact:
    shape = " x ".join(map(str, operand.shape)) or "one number"
    span = f"{fmt.number_text(operand.smallest)} to {fmt.number_text(operand.largest)}"
    infinite = f"{operand.num_not_finite} not finite" if operand.num_not_finite else ""
    return Fact(what=f"operand {number}", value=span, reason=", ".join(filter(None, [operand.format, shape, infinite])))


def _step(step: TrendStep, *, bad: bool) -> StepLine:
    note = "skipped" if step.skipped else "not finite" if bad else ""
    return StepLine(
        step=str(step.step),
        loss=fmt.number_text(step.loss),
        norm=fmt.number_text(step.grad_norm),
        scale="" if math.isnan(step.loss_scale) else fmt.scale_text(step.loss_scale),
        note=note,
        tone="warn" if note else "",
    )


def _pass(number: int, seen: Pass) -> Fact:
    watched = f"operations looked at in {fmt.plural(len(seen.watched), 'step')}"
    value = f"{fmt.clean(seen.policy)}, {fmt.plural(seen.num_steps, 'step')}"
    return Fact(
        what=f"run {number}",
        value=value,
        reason=fmt.clean("; ".join(filter(None, [seen.reason, watched, seen.outcome]))),
    )
