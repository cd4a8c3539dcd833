"""A diagnosis as display strings: verdict, place, cause and fix come first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import PurePath

from mezzo.records import DiagnoseRecord, Operand, Pass, TrendStep
from mezzo.report import formatting as fmt
from mezzo.report.sheets import shared
from mezzo.report.sheets.findings import FindingLine, finding_line
from mezzo.report.sheets.shared import Fact, ScriptSheet

TITLES = {
    "healthy": "healthy",
    "scale_overflow": "scale overflow",
    "range_overflow": "range overflow",
    "invalid_operation": "invalid operation",
    "silent_saturation": "silent saturation",
    "undecided": "undecided",
    "unfinished": "no verdict",
}
_TONES = {"healthy": "good", "undecided": "open", "unfinished": "open"}
_NORMAL = (
    "Skipped updates are normal at the start, one after another until a loss scale fits, and later once in a growth interval, "
    "when a larger scale is tried."
)
_MANY_SKIPS = 4


@dataclass(frozen=True, kw_only=True)
class StepLine:
    """One step, as a row of a table."""

    step: str
    loss: str
    norm: str
    scale: str
    note: str
    tone: str


@dataclass(frozen=True, kw_only=True)
class DiagnoseSheet(ScriptSheet):
    """The words and tables of a diagnosis, ready for any view."""

    verdict: str
    tone: str
    meaning: str
    detail: str
    error: str
    place: list[Fact]
    fix: str
    fix_line: str
    fix_where: str
    fix_note: str
    operands: list[Fact]
    trend: list[StepLine]
    passes: list[Fact]
    notes: list[Fact]
    normal: str
    """Which skipped updates are normal; empty if none were skipped."""
    findings: list[FindingLine]


def diagnose_sheet(record: DiagnoseRecord) -> DiagnoseSheet:
    """Return the sheet of ``record``."""
    script = fmt.clean(PurePath(record.run.script).name)
    title = TITLES[record.verdict]
    return DiagnoseSheet(
        title=f"{script}: {title}",
        script=fmt.clean(record.run.script),
        headline=_headline(record, script),
        verdict=title,
        tone="open"
        if record.verdict == "healthy" and record.run.changed_nothing
        else _TONES.get(record.verdict, "bad"),
        meaning=_meaning(record),
        detail="" if record.verdict == "unfinished" else fmt.clean(record.detail),
        error=shared.error_and_hint(record.run) if record.run.error and record.verdict != "unfinished" else "",
        place=_place(record),
        fix=fmt.clean(record.fix),
        fix_line=fmt.clean(record.fix_line),
        fix_where=fmt.clean(record.fix_where),
        fix_note=fmt.clean(record.fix_note),
        operands=[_operand(number, operand) for number, operand in enumerate(record.operands, 1)],
        trend=[_step(step, bad=step.step in record.bad_steps) for step in record.trend],
        passes=[_pass(number, run, record) for number, run in enumerate(record.passes, 1)],
        notes=[*_skips(record), *_ran_in(record), *shared.facts(record.notes)],
        normal=_NORMAL if record.num_skipped else "",
        findings=[finding_line(finding) for finding in record.run.findings],
        environment=shared.environment_facts(record.run.environment),
        command=shared.command_text(record.run.command, record.run.environment),
    )


def _meaning(record: DiagnoseRecord) -> str:
    """Return what the verdict means, in a sentence that is true for every fault of its kind."""
    name = fmt.clean(record.format).upper() or "the format"
    if record.verdict == "silent_saturation" and record.origin == "vanished":
        return f"values too small for {name} become 0: loss and gradients stay finite, but the gradients are wrong"
    # A scale below 1 may help gradients; it changes neither a forward value nor one that rounding made 0.
    of_gradients = record.phase == "backward" and record.origin != "vanished"
    scales = "at a loss scale of 1 or more" if of_gradients else "at any loss scale"
    wrong = "gradients are wrong" if record.gradient_error is not None else "loss is wrong"
    return {
        "scale_overflow": "gradients overflow because of the loss scale, and are finite at a lower one",
        "range_overflow": f"a value that {name} cannot represent, {scales}",
        "invalid_operation": "not finite in FP32 either",
        "undecided": _open_question(record),
        "silent_saturation": f"values too large for {name} become finite again: nothing shows it, but the {wrong}",
        "unfinished": ". To fix it: ".join(fmt.clean(text) for text in (record.detail, record.run.hint) if text),
        "healthy": _untried(record),
    }[record.verdict]


def _open_question(record: DiagnoseRecord) -> str:
    if record.perhaps == "scale_overflow" and record.steps_needed is not None:
        return "the loss scale may settle so low that small gradients are lost, but the run is too short to tell"
    return "a step is not finite, and no run shows why: the notes say which one is missing"


def _untried(record: DiagnoseRecord) -> str:
    """Return a note if nothing is wrong under a policy only because the policy had no effect."""
    if not record.run.changed_nothing:
        return ""
    policy = fmt.clean(record.run.policy_shown)
    return f"but this says nothing about {policy}, which {record.run.no_effect}: {shared.ran_text(record.run)}"


def _ran_in(record: DiagnoseRecord) -> list[Fact]:
    """Return the formats that were counted, and what the policy could not switch."""
    effective = record.run.effective
    why = "share of the FLOPs of matrix products and convolutions, in the steps whose operations were inspected"
    shares = [f"{share:.0%} {fmt.clean(name)}" for name, share in effective.share_by_format.items()]
    ran = [Fact(what="ran in", value=fmt.listed(shares), reason=why)] if shares else []
    return [*ran, *shared.facts(effective.left_alone)]


def _headline(record: DiagnoseRecord, script: str) -> str:
    policy = fmt.clean(record.run.policy_shown)
    count = fmt.plural(len(record.run.steps), "step")
    if record.verdict == "healthy" and record.run.changed_nothing:
        return f"{script} under {policy}: every loss and gradient is finite in {count}, but {policy} {record.run.no_effect}"
    if record.verdict == "healthy":
        found = fmt.plural(len(record.run.findings), "finding")
        if record.run.findings:
            return f"{script} under {policy}: every loss and gradient is finite in {count}; {found} on the script's mixed precision"
        return f"{script} under {policy}: nothing wrong in {count}"
    if record.verdict == "unfinished":
        return f"{script} under {policy}: no verdict, the run ended after {count} with exit code {record.run.exit_code}"
    where = f"step {record.step}"
    if record.located:
        where += f", {record.during} of {fmt.clean(record.module)}"
    return f"{script} under {policy}: {TITLES[record.verdict]} in {where}"


def _place(record: DiagnoseRecord) -> list[Fact]:
    if record.verdict in ("healthy", "unfinished") and not record.has_place:
        return []
    facts = [Fact(what="step", value=str(record.step)), Fact(what="phase", value=record.phase)]
    if record.has_place:
        result = "raised the error" if record.origin == "raised" else f"result in {fmt.clean(record.format)}"
        facts = [
            Fact(what="module", value=fmt.clean(record.module)),
            Fact(what="operation", value=fmt.clean(record.op), reason=result),
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
    steps = record.run.steps
    reason = "" if record.faulty_steps else "normal: see below"
    first_update = next((n for n, skipped in enumerate(steps.skipped) if not skipped), None)
    if not record.faulty_steps and first_update is not None and first_update >= _MANY_SKIPS and steps.loss_scale:
        scale = fmt.scale_text(steps.loss_scale[first_update])
        reason += f"; an initial loss scale of {scale} avoids {first_update} of them"
    return [Fact(what="skipped", value=f"{record.num_skipped} of {len(steps)} updates", reason=reason)]


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


def _pass(number: int, run: Pass, record: DiagnoseRecord) -> Fact:
    typed = record.run.policy_typed if run.policy == record.run.policy else ""
    watched = f"operations inspected in {fmt.plural(len(run.watched), 'step')}"
    value = f"{fmt.policy_text(run.policy, typed)}, {fmt.plural(run.num_steps, 'step')}"
    return Fact(
        what=f"run {number}",
        value=value,
        reason=fmt.clean("; ".join(filter(None, [run.reason, watched, run.outcome]))),
    )
