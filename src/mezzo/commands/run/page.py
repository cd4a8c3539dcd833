"""What a run says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from mezzo.errors import ScriptError
from mezzo.records import (
    AS_IS,
    Bottleneck,
    GpuUse,
    Guardrails,
    Limit,
    OutOfMemory,
    RunRecord,
    SnapshotProof,
    SnapshotsTaken,
)
from mezzo.report import formatting as fmt
from mezzo.report import pages
from mezzo.report.charts import data, steps
from mezzo.report.charts.data import Drawn
from mezzo.report.colours import styles_of
from mezzo.report.commands import (
    ScriptCommands,
    after_failure,
    best_first,
    preset_of,
    skips_many,
    typed_policy,
    with_fp32,
)
from mezzo.report.log_entries import Curve, LogEntry, codes_of, settings_of, stem
from mezzo.report.pages import facts, finding_section, lines_of
from mezzo.report.sections import (
    Charts,
    Fact,
    FactTable,
    Formats,
    FormatShares,
    Headline,
    NextStep,
    Page,
    Paragraph,
    Section,
    SourceCode,
    facts_section,
)

_FOUR = "of the weights, gradients, optimizer state and activations"


def page(record: RunRecord) -> Page:
    """Return what ``record`` says."""
    script, policy = fmt.clean(PurePath(record.script).name), fmt.clean(record.policy_shown)
    results, bottleneck = run_facts(record), bottleneck_facts(record.bottleneck)
    held_back = facts_section("What holds it back", bottleneck, details=not record.watched)
    title, left_alone = "Result" if record.watched else "", pages.facts(record.effective.left_alone)
    ran = FormatShares(policy=policy, shares=pages.shares(record.effective.share_by_format))
    return Page(
        title=f"{script} under {policy}",
        script=fmt.clean(record.script),
        answer=_answer(record, _headline(record, script=script, policy=policy), results, bottleneck),
        sections=[
            *([held_back] if record.watched else []),
            Section(title=title, blocks=[FactTable(rows=results)], shown_in="terminal", details=record.watched),
            facts_section("Guardrails", guard_facts(record.guardrails)),
            facts_section("Out of memory", memory_facts(record.out_of_memory)),
            facts_section("Ranks", pages.rank_facts(record)),
            facts_section("Differences between ranks", pages.difference_facts(record)),
            *map(finding_section, record.findings),
            SourceCode(run=record, lines=lines_of(record.findings)),
            Charts(draw=lambda _: _charts(record)),
            *([] if record.watched else [held_back]),
            facts_section("Policy", pages.explained(record), details=True),
            pages.memory_section([(record.policy_shown, record.memory)]),
            Section(
                title="Effective formats",
                blocks=[Formats(policies=[ran]), Paragraph(text=pages.shares_note(record), faint=True)],
                details=True,
            ),
            Section(title="Left alone", blocks=[FactTable(rows=left_alone)], details=True, folded=True),
        ],
        steps=best_first(_next(record)),
        environment=pages.environment_facts(record.environment, framework=record.framework),
        command=pages.command_text(record.command, record.environment),
    )


def _answer(record: RunRecord, sentence: str, results: Sequence[Fact], bottleneck: Sequence[Fact]) -> Headline:
    """Return whether a run trained, and its results."""
    broken = any(fact.tone == "bad" for fact in results)
    shown = results
    if pages.error_text(record):
        tone, word = "bad", "failed"
    elif record.changed_nothing:
        tone, word = "warn", "nothing changed"
    elif record.watched and record.bottleneck is not None:
        tone = "open" if record.bottleneck.limit == "unknown" else "quiet"
        word = LIMITS[record.bottleneck.limit]
        change = [Fact(what="to change", value=fmt.clean(text)) for text in record.bottleneck.change[:1]]
        shown = [*change, *(fact for fact in bottleneck if fact.what in record.bottleneck.shares)][:5]
    else:
        tone, word = ("bad", "not finite") if broken else ("good", "trained")
    return Headline(tone=tone, word=word, sentence=sentence, error=pages.error_and_hint(record), facts=shown)


def _charts(record: RunRecord) -> list[Drawn]:
    styles = styles_of([record])
    style = styles[record.policy_shown]
    return [
        *steps.loss_charts([record], styles=styles),
        steps.scale_chart([record], styles=styles),
        steps.norm_chart(record, style=style),
        steps.time_chart(record, style=style),
        pages.memory_bars({record.policy_shown: record.memory}, styles=styles),
    ]


def _headline(record: RunRecord, *, script: str, policy: str) -> str:
    steps = fmt.plural(len(record.steps), "step")
    missing = f"; {record.replays} of a CUDA graph are not recorded" if record.replays else ""
    if record.first_steps is not None:
        steps = f"its first {steps}"
    if record.exit_code == ScriptError.exit_code and not len(record.steps):
        return f"{script} ended under {policy}; no training step was seen{missing}"  # it did not fail by itself
    if pages.error_text(record):
        return f"{script} failed under {policy} after {steps}{missing}"
    if not record.steps.loss:
        return f"{script} ran under {policy}; no training step was seen{missing}"
    if record.watched and record.bottleneck is not None:
        why = fmt.clean(record.bottleneck.sentence)
        if record.bottleneck.limit == "unknown":
            return f"What holds {script} back is not known: {why}{missing}"
        return f"{script} is held back by {LIMITS[record.bottleneck.limit]}: {why}{missing}"
    loss = pages.final_loss_text(record)
    if record.changed_nothing:
        ran = pages.ran_text(record)
        return f"{script} trained {steps}; {policy} {record.no_effect}: {ran}, to a loss of {loss}{missing}"
    return f"{script} trained {steps} under {policy}, to a loss of {loss}{missing}"


def _snapshots(taken: SnapshotsTaken) -> Fact:
    """Return how many snapshots were saved, where, and what they lack."""
    value = f"{taken.saved} saved in {taken.folder}"
    if taken.resumed_from is not None:
        value += f"; resumed after {fmt.plural(taken.resumed_updates or 0, 'update')}"
    proof = taken.proof
    value += "" if proof is None else f"; {proof.verdict}"
    reasons = [*([] if proof is None else [proof_text(proof)]), *(one.reason for one in taken.problems)]
    return Fact(
        what="snapshots",
        value=fmt.clean(value),
        reason=fmt.clean("; ".join(reasons)),
        tone="bad" if proof is not None and proof.verdict == "disproven" else "warn" if taken.problems else "",
    )


def proof_text(proof: SnapshotProof) -> str:
    """Return what proves or disproves a run's snapshots."""
    after, names = fmt.plural(proof.updates, "update"), ", ".join(proof.names)
    if proof.verdict == "proven":
        took = fmt.duration_text(proof.took_s)
        return f"a second process resumed the first one: {proof.values:,} values the same after {after} (took {took})"
    if proof.verdict == "unrepeatable":
        return f"resumed twice, the script did not repeat itself: {names}"
    return proof.reason or f"a second process that resumed the first one differed after {after}: {names}"


def run_facts(record: RunRecord) -> list[Fact]:
    """Return the results of a run, one line each."""
    steps, final_loss = record.steps, pages.final_loss_text(record)
    broken = any(word in final_loss.split() for word in ("NaN", "Infinity", "-Infinity"))
    emulated = fmt.NOT_FOR_GPU if record.effective.emulated else ""
    of_emulation = fmt.NOT_FOR_GPU if record.memory.of_emulation else ""
    counted = record.effective.share_by_format
    scale = "" if record.final_scale is None else f"the loss scale ended at {fmt.scale_text(record.final_scale)}"
    duration = f"{fmt.duration_text(record.duration_s)} in all"
    rows = [
        Fact(
            what="formats",
            value=pages.formats_text(record),
            reason="of the FLOPs of matrix products" if counted else "",
        ),
        Fact(
            what="final loss",
            value=final_loss,
            reason=f"after {fmt.plural(len(steps), 'step')}" if steps.loss else "",
            tone="bad" if broken else "",
        ),
        Fact(
            what="skipped steps", value=str(steps.num_skipped), reason=scale, tone="warn" if steps.num_skipped else ""
        ),
        Fact(
            what="time per step",
            value=fmt.ms_text(data.median_ms(steps.warm_ms)),
            reason="; ".join(filter(None, [emulated, duration])),
        ),
        Fact(
            what="memory",
            value=fmt.bytes_text(record.memory.total_bytes),
            reason=of_emulation or (_FOUR if record.memory.total_bytes is not None else ""),
        ),
    ]
    if record.snapshots is not None:
        rows.append(_snapshots(record.snapshots))
    if record.metric is not None and record.metric.values:
        value = fmt.number_text(record.metric.values[-1])
        rows.insert(2, Fact(what=fmt.clean(record.metric.name), value=value))
    return rows


def guard_facts(guardrails: Guardrails | None) -> list[Fact]:
    """Return a line for each alarm, for each return to a snapshot, and for the end; empty if nothing went wrong."""
    if guardrails is None:
        return []
    rows = [
        Fact(what=alarm.kind, value=f"step {alarm.step}", reason=_alarm_text(alarm.evidence, alarm.command), tone="bad")
        for alarm in guardrails.alarms
    ]
    for rewind in guardrails.rewinds:
        changes = "; ".join(f"{one.what} {one.value}: {one.reason}" for one in rewind.changes)
        value = f"step {rewind.step}, to {rewind.snapshot} after {fmt.plural(rewind.updates, 'update')}"
        rows.append(Fact(what="returned", value=fmt.clean(value), reason=fmt.clean(changes), tone="warn"))
    if guardrails.only_noted:
        rows.append(Fact(what="only noted", value="yes", reason=fmt.clean(guardrails.only_noted), tone="warn"))
    if guardrails.stopped:
        rows.append(Fact(what="stopped by the guard", value="yes", reason=fmt.clean(guardrails.stopped), tone="bad"))
    return rows


def _alarm_text(evidence: str, command: str) -> str:
    return fmt.clean(f"{evidence}; next: {command}" if command else evidence)


def memory_facts(oom: OutOfMemory | None) -> list[Fact]:
    """Return what occupied the memory, by kind and module, what is not known, and the settings that would help."""
    if oom is None:
        return []
    failed = "" if oom.asked_bytes is None else f"an allocation of {fmt.bytes_text(oom.asked_bytes)} failed"
    rows = [Fact(what="ran out in", value=f"step {oom.step}", reason=failed, tone="bad")]
    rows += [Fact(what=kind, value=fmt.bytes_text(size)) for kind, size in oom.held_bytes.items()]
    why = "parameters, gradients and optimizer state"
    rows += [
        Fact(what="module", value=fmt.clean(one.name), reason=f"{fmt.bytes_text(one.bytes)} of {why}")
        for one in oom.modules
    ]
    rows += facts(oom.not_known)
    return [*rows, *facts(oom.settings)]


def _next(record: RunRecord) -> Iterator[NextStep]:
    commands, policy = ScriptCommands(record), typed_policy(record)
    for alarm in record.guardrails.alarms if record.guardrails is not None else []:
        yield NextStep(why=f"{alarm.kind} in step {alarm.step}; see why", command=fmt.clean(alarm.command))
    if record.error is not None or record.exit_code:
        yield from after_failure(record, commands, policy)
    elif record.changed_nothing:
        yield from commands.step(f"{policy} {record.no_effect}; see why", "audit", policy=policy)
    elif record.steps.loss and not math.isfinite(record.steps.loss[-1]):
        yield from commands.step("the loss is not finite; find where that begins", "diagnose", policy=policy)
        yield from commands.step("see which policies keep it finite", "compare", policies=with_fp32(policy))
    elif record.findings:
        yield from commands.again(f"after fixing {record.findings[0].code}, see whether anything is left")
    elif record.watched and (first := _first_change(record.bottleneck)):
        yield from commands.again(f"change this, then see what holds it back: {first}")
    else:
        yield from _after_training(record, commands, policy)


def _first_change(bottleneck: Bottleneck | None) -> str:
    """Return what to change first; empty where 16 bits are the change, which a comparison tries."""
    if bottleneck is None or bottleneck.limit in ("bandwidth", "arithmetic", "power") or not bottleneck.change:
        return ""
    return bottleneck.change[0]


def _after_training(record: RunRecord, commands: ScriptCommands, policy: str) -> Iterator[NextStep]:
    if skips_many(record.steps.num_skipped, len(record.steps)):
        share = fmt.share_text(record.steps.num_skipped / len(record.steps))
        yield from commands.step(f"{policy} skipped {share} of its updates; see why", "diagnose", policy=policy)
    lowers = record.policy != AS_IS or record.effective.counted_on_step is None or record.effective.lowered
    if preset_of(record.policy) in ("fp32", "tf32") or not lowers:
        yield from commands.step(
            "see whether 16 bits train as well, and what they save", "compare", policies="fp32,bf16,fp16"
        )
        return
    yield from commands.step(f"see whether {policy} trains like fp32", "compare", policies=with_fp32(policy))
    yield from commands.step("see which operation ran in which format", "audit", policy=policy)


BUSY = "usually above 90% if the GPU is busy"
FULL = "usually above 80% if the batch fills the GPU"
POWERED = "usually above 60% of the limit if the GPU is busy"
LIMITS: dict[Limit, str] = {
    "input": "the input",
    "waiting": "waiting",
    "communication": "communication",
    "host": "the host",
    "power": "the power limit",
    "bandwidth": "memory bandwidth",
    "arithmetic": "arithmetic",
    "unknown": "not known",
}
"""What limits a run, as a reader is told."""
_SHOWN = 0.005
"""A smaller share of the time is not shown."""
_SHARES = {
    "input": "waiting for the data loader",
    "communication": "waiting in torch.distributed",
    "waiting": "asleep: a lock, a sleep, a file, a socket",
    "preempted": "of the whole time: other threads or processes had the cores",
    "host": "Python, and launching operations",
    "bandwidth": "operations that mostly move memory",
    "arithmetic": "products",
}


def bottleneck_facts(bottleneck: Bottleneck | None) -> list[Fact]:
    """Return what holds a run back, what to change, and the measurements; empty if nothing was measured."""
    if bottleneck is None:
        return []
    rows = [held_back_by(bottleneck)]
    rows += [
        Fact(what="change", value=str(n), reason=fmt.clean(text)) for n, text in enumerate(bottleneck.change, start=1)
    ]
    rows += [
        Fact(what=name, value=fmt.share_text(bottleneck.shares[name]), reason=meaning)
        for name, meaning in _SHARES.items()
        if bottleneck.shares.get(name, 0.0) >= _SHOWN
    ]
    if bottleneck.operations is not None and bottleneck.operation_us is not None:
        mean = f"{bottleneck.operation_us:.0f} us on average on the host"
        rows.append(Fact(what="operations per step", value=str(bottleneck.operations), reason=mean))
    return [*rows, *([] if bottleneck.gpu is None else _gpu(bottleneck.gpu)), *facts(bottleneck.not_measured)]


def held_back_by(bottleneck: Bottleneck) -> Fact:
    """Return what holds a run back, and why."""
    return Fact(what="held back by", value=LIMITS[bottleneck.limit], reason=fmt.clean(bottleneck.sentence))


def _gpu(gpu: GpuUse) -> list[Fact]:
    rows = [Fact(what="GPU", value=fmt.clean(gpu.name), reason=f"{gpu.num_samples} samples, one a second")]
    if gpu.utilization is not None:
        rows.append(Fact(what="utilization", value=fmt.share_text(gpu.utilization), reason=BUSY))
    if gpu.memory_share is not None:
        rows.append(Fact(what="GPU memory", value=fmt.share_text(gpu.memory_share), reason=FULL))
    if gpu.power_w is not None:
        limit = "" if gpu.power_limit_w is None else f" of {gpu.power_limit_w:.0f}"
        rows.append(Fact(what="power", value=f"{gpu.power_w:.0f}{limit} W", reason=POWERED))
    if gpu.temperature_c is not None:
        rows.append(Fact(what="temperature", value=f"{gpu.temperature_c:.0f} C", reason="the highest"))
    if gpu.clock_mhz is not None:
        limit = "" if gpu.clock_limit_mhz is None else f" of {gpu.clock_limit_mhz:.0f}"
        rows.append(Fact(what="clock", value=f"{gpu.clock_mhz:.0f}{limit} MHz"))
    causes = ", ".join(f"{fmt.clean(reason)} in {share:.0%} of the samples" for reason, share in gpu.throttled.items())
    return [*rows, Fact(what="throttled by", value=causes or "nothing")]


_STEP_COLUMNS = ("loss", "loss_scale", "skipped", "grad_norm", "time_ms", "cpu_ms")


def log_entry(record: RunRecord, *, name: str = "") -> LogEntry:
    """Return what is logged of a run; ``name`` is its name in a comparison."""
    return LogEntry(
        record=record,
        script=stem(record.script),
        name=name,
        failed=bool(record.error),
        settings=settings_of(record),
        tags={"kind": record.kind, **codes_of(record.findings)},
        curves=list(_curves(record)),
        numbers=dict(_counted(record)),
    )


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
    for one in record.steps.losses:
        yield Curve(name=f"loss/{one.name}", steps=one.steps, values=one.values)


def _counted(record: RunRecord) -> Iterator[tuple[str, float]]:
    for kind, size in pages.memory_kinds(record.memory).items():
        if size is not None:
            yield f"memory/{kind}_bytes", float(size)
    for name, share in record.effective.share_by_format.items():
        yield f"share_of_flops/{name}", share
    yield "skipped_updates", float(record.steps.num_skipped)
    yield "duration_s", record.duration_s
