"""What a diagnosis says: verdict, place, cause and fix come first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import PurePath

from mezzo.records import AS_IS, DiagnoseRecord, Operand, Pass, TrendStep
from mezzo.records.run import WIDE_POLICIES
from mezzo.report import formatting as fmt
from mezzo.report import pages
from mezzo.report.charts import steps
from mezzo.report.charts.data import Drawn
from mezzo.report.colours import styles_of
from mezzo.report.commands import ScriptCommands, after_failure, best_first, preset_of, typed_policy, with_fp32
from mezzo.report.log_entries import Curve, LogEntry, codes_of, run_entry
from mezzo.report.pages import finding_section, lines_of
from mezzo.report.sections import (
    Block,
    Cell,
    Charts,
    Fact,
    FactTable,
    Grid,
    Headline,
    NextStep,
    Page,
    Paragraph,
    Section,
    SourceCode,
    facts_section,
)

VERDICT_TITLES = {
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


def page(record: DiagnoseRecord) -> Page:
    """Return what ``record`` says."""
    script, place = fmt.clean(PurePath(record.run.script).name), _place(record)
    detail = "" if record.verdict == "unfinished" else fmt.clean(record.detail)
    fix = [
        Fact(what="do", value=fmt.clean(record.fix)),
        Fact(what="write", value=fmt.clean(record.fix_line), is_code=True),
        Fact(what="where", value=fmt.clean(record.fix_where)),
        Fact(what="", value=fmt.clean(record.fix_note)),
    ]
    notes = [*_skips(record), *_ran_in(record), *pages.facts(record.notes)]
    found: list[Block] = [
        FactTable(rows=[_pass(number, run, record) for number, run in enumerate(record.passes, 1)]),
        FactTable(rows=notes),
        Paragraph(text=_NORMAL if record.num_skipped else "", faint=True),
    ]
    return Page(
        title=f"{script}: {VERDICT_TITLES[record.verdict]}",
        script=fmt.clean(record.run.script),
        answer=_answer(record, script),
        sections=[
            Section(title="Where" if place else "", blocks=[Paragraph(text=detail), FactTable(rows=place)]),
            facts_section("Fix", [fact for fact in fix if fact.value]),
            SourceCode(run=record.run, lines=_lines(record)),
            *map(finding_section, record.run.findings),
            facts_section(
                "Magnitudes of the operands",
                [_operand(n, one) for n, one in enumerate(record.operands, 1)],
                details=True,
            ),
            Charts(draw=lambda _: _charts(record)),
            Section(title="Steps up to the last that was not finite", blocks=[_trend(record)], details=True),
            Section(title="How it was found", blocks=found, details=True),
        ],
        steps=best_first(_next(record)),
        environment=pages.environment_facts(record.run.environment),
        command=pages.command_text(record.run.command, record.run.environment),
    )


def _answer(record: DiagnoseRecord, script: str) -> Headline:
    facts = _place(record, in_short=True)
    if not facts:
        skipped = f"{record.num_skipped} of {len(record.run.steps)}"
        facts = [Fact(what="steps", value=str(len(record.run.steps))), Fact(what="skipped updates", value=skipped)]
    nothing_tried = record.verdict == "healthy" and record.run.changed_nothing
    return Headline(
        tone="open" if nothing_tried else _TONES.get(record.verdict, "bad"),
        word=VERDICT_TITLES[record.verdict],
        sentence=_headline(record, script),
        detail=_meaning(record),
        detail_follows_word=True,
        error=pages.error_and_hint(record.run) if record.run.error and record.verdict != "unfinished" else "",
        facts=facts,
    )


def _charts(record: DiagnoseRecord) -> list[Drawn]:
    styles = styles_of([record.run])
    charts = [*steps.loss_charts([record.run], styles=styles), steps.scale_chart([record.run], styles=styles)]
    return [chart for chart in charts if chart.form != "nothing"]


def _meaning(record: DiagnoseRecord) -> str:
    """Return what the verdict means, in a sentence that is true for every fault of its kind."""
    name = fmt.clean(record.format).upper() or "the format"
    if record.verdict == "silent_saturation" and record.origin == "vanished":
        return f"values too small for {name} become 0: loss and gradients stay finite, but the gradients are wrong"
    # A scale below 1 may help gradients; it changes no forward value, and none that rounding made 0.
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
    return f"but this says nothing about {policy}, which {record.run.no_effect}: {pages.ran_text(record.run)}"


def _ran_in(record: DiagnoseRecord) -> list[Fact]:
    """Return the formats that were counted, and what the policy could not switch."""
    effective = record.run.effective
    why = "share of the FLOPs of matrix products and convolutions, in the steps whose operations were inspected"
    shares = [f"{share:.0%} {fmt.clean(name)}" for name, share in effective.share_by_format.items()]
    ran = [Fact(what="ran in", value=fmt.listed(shares), reason=why)] if shares else []
    return [*ran, *pages.facts(effective.left_alone)]


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
    return f"{script} under {policy}: {VERDICT_TITLES[record.verdict]} in {where}"


def _place(record: DiagnoseRecord, *, in_short: bool = False) -> list[Fact]:
    """Return where the value was lost; ``in_short`` names the line without its folder and leaves out what the sections say."""
    if record.verdict in ("healthy", "unfinished") and not record.has_place:
        return []
    facts = []
    if record.has_place:
        result = "raised the error" if record.origin == "raised" else f"result in {fmt.clean(record.format)}"
        line = PurePath(record.line).name if in_short else record.line
        facts = [
            Fact(what="module", value=fmt.clean(record.module)),
            Fact(what="operation", value=fmt.clean(record.op), reason=result),
            Fact(what="line", value=fmt.clean(line)),
        ]
    facts.append(Fact(what="step", value=str(record.step)))
    if not in_short:
        facts.append(Fact(what="phase", value=record.phase))
    if record.loss_scale != 1.0:
        facts.append(Fact(what="loss scale", value=fmt.scale_text(record.loss_scale)))
    if record.swallowed_by and not in_short:
        facts.append(Fact(what="swallowed by", value=fmt.clean(record.swallowed_by)))
    return facts


def _lines(record: DiagnoseRecord) -> list[tuple[str, str]]:
    """Return the lines of code that the diagnosis names."""
    return [
        *lines_of(record.run.findings),
        (record.line, f"{record.verdict.replace('_', ' ')}: {fmt.clean(record.op)}"),
        (record.swallowed_by, "here the infinity becomes a finite number"),
    ]


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


def _trend(record: DiagnoseRecord) -> Grid:
    heads = ("step", "loss", "gradient norm", "loss scale after it", "")
    rows = [_step(step, bad=step.step in record.bad_steps) for step in record.trend]
    return Grid(heads=heads, rows=rows, numbers=range(4), sortable=False)


def _step(step: TrendStep, *, bad: bool) -> tuple[str | Cell, ...]:
    note = "skipped" if step.skipped else "not finite" if bad else ""
    scale = "" if math.isnan(step.loss_scale) else fmt.scale_text(step.loss_scale)
    numbers = (str(step.step), fmt.number_text(step.loss), fmt.number_text(step.grad_norm), scale)
    return (*numbers, Cell(text=note, tone="warn" if note else ""))


def _pass(number: int, run: Pass, record: DiagnoseRecord) -> Fact:
    typed = record.run.policy_typed if run.policy == record.run.policy else ""
    watched = f"operations inspected in {fmt.plural(len(run.watched), 'step')}"
    value = f"{fmt.policy_text(run.policy, typed)}, {fmt.plural(run.num_steps, 'step')}"
    return Fact(
        what=f"run {number}",
        value=value,
        reason=fmt.clean("; ".join(filter(None, [run.reason, watched, run.outcome]))),
    )


def _next(record: DiagnoseRecord) -> Iterator[NextStep]:
    commands, policy = ScriptCommands(record.run), typed_policy(record.run)
    if record.verdict == "unfinished" and not record.fix_tried:
        yield from after_failure(record.run, commands, policy)
    elif record.verdict == "healthy" and record.run.changed_nothing:
        yield from commands.step(f"{policy} {record.run.no_effect}; see why", "audit", policy=policy)
    elif record.verdict == "healthy":
        if record.run.findings:
            yield from commands.again(f"after fixing {record.run.findings[0].code}, see whether anything is left")
        yield from commands.step(f"see whether {policy} trains like fp32", "compare", policies=with_fp32(policy))
        if record.run.policy != AS_IS and commands.script and preset_of(record.run.policy) not in WIDE_POLICIES:
            why = "if it does not, find the modules or operations that lose digits"
            yield from commands.step(why, "fallback", policy=policy)
        if record.run.policy != AS_IS and commands.script:
            why = "if the loss is NaN in the script's own precision, diagnose that"
            yield from commands.step(why, "diagnose", policy=AS_IS)
    elif record.perhaps == "scale_overflow" and record.steps_needed is not None:
        steps = str(record.steps_needed)
        why = f"see where the loss scale settles, in a training of {steps} steps or more"
        yield from commands.step(why, "diagnose", policy=policy, steps=steps)
    elif record.verdict == "undecided" and not record.fix_tried and commands.script:
        if preset_of(record.run.policy) not in WIDE_POLICIES:
            yield from commands.step("see whether the same step is finite in FP32", "diagnose", policy="fp32")
        yield from commands.again("if the script draws from generators of its own, after setting their seeds")
    elif record.fix_policy and (record.fix_tried or record.located):
        fixed = record.fix_policy
        yield from commands.step("train with the fix", "run", policy=fixed)
        yield from commands.step("see whether it trains like fp32", "compare", policies=with_fp32(fixed))
        if not commands.script:
            yield from commands.step("see whether the fix helps", "diagnose", policy=fixed)
    elif record.fix and not record.fix_line and not record.fix_tried and _may_need_several_modules(record):
        why = "no single fix is enough; search for a set of modules to keep in FP32"
        yield from commands.step(why, "fallback", policy=policy)
    elif record.fix:
        why = "after changing the script, see whether anything is left"
        yield from commands.again(why) if commands.script else commands.step(why, "diagnose", policy=policy)
    else:
        yield from commands.again("after setting the script's seeds, so that the step can be inspected")


def _may_need_several_modules(record: DiagnoseRecord) -> bool:
    tried = any(one.tries_fix for one in record.passes)
    return tried and record.run.policy != AS_IS and not (record.own_cast or record.fails_in_fp32)


def log_entry(record: DiagnoseRecord) -> LogEntry:
    """Return what is logged of a diagnosis."""
    tags = {"verdict": record.verdict, **codes_of(record.run.findings)}
    return run_entry(record.run, record, tags=tags, curves=list(_curves(record)))


def _curves(record: DiagnoseRecord) -> Iterator[Curve]:
    for column in ("loss", "grad_norm", "loss_scale", "skipped"):
        values = [float(getattr(step, column)) for step in record.trend]
        if values:
            yield Curve(name=f"step/{column}", steps=[step.step for step in record.trend], values=values)
