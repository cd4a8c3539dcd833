"""One run as display strings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from mezzo.errors import ScriptError
from mezzo.records import Guardrails, OutOfMemory, RunRecord, SnapshotProof, SnapshotsTaken
from mezzo.report import formatting as fmt
from mezzo.report.sheets import ranks, shared
from mezzo.report.sheets.bottleneck import LIMITS, bottleneck_facts
from mezzo.report.sheets.findings import FindingLine, finding_line
from mezzo.report.sheets.shared import Fact, MemoryLine, ScriptSheet, Share, facts

_FOUR = "of the weights, gradients, optimizer state and activations"


@dataclass(frozen=True, kw_only=True)
class RunSheet(ScriptSheet):
    """The words and tables of one run, ready for any view."""

    policy: str
    error: str
    facts: list[Fact]
    ranks: list[Fact]
    """A line for each process of a run in several."""
    between_ranks: list[Fact]
    explanation: list[Fact]
    memory: list[MemoryLine]
    shares: list[Share]
    shares_note: str
    left_alone: list[Fact]
    guardrails: list[Fact]
    """What went wrong while it ran, and what the guard did."""
    out_of_memory: list[Fact]
    """What occupied the memory of a run that ran out of it, and the settings that would help."""
    findings: list[FindingLine]
    bottleneck: list[Fact]
    watched: bool


def run_sheet(record: RunRecord) -> RunSheet:
    """Return the sheet of ``record``."""
    script = fmt.clean(PurePath(record.script).name)
    policy = fmt.clean(record.policy_shown)
    return RunSheet(
        title=f"{script} under {policy}",
        script=fmt.clean(record.script),
        policy=policy,
        headline=_run_headline(record, script=script, policy=policy),
        error=shared.error_and_hint(record),
        facts=run_facts(record),
        ranks=ranks.rank_facts(record),
        between_ranks=ranks.difference_facts(record),
        explanation=shared.explained(record),
        memory=shared.memory_lines([(record.policy_shown, record.memory)]),
        shares=shared.shares(record.effective.share_by_format),
        shares_note=shared.shares_note(record),
        left_alone=shared.facts(record.effective.left_alone),
        guardrails=guard_facts(record.guardrails),
        out_of_memory=memory_facts(record.out_of_memory),
        findings=[finding_line(finding) for finding in record.findings],
        bottleneck=bottleneck_facts(record.bottleneck),
        watched=record.watched,
        environment=shared.environment_facts(record.environment, framework=record.framework),
        command=shared.command_text(record.command, record.environment),
    )


def _run_headline(record: RunRecord, *, script: str, policy: str) -> str:
    steps = fmt.plural(len(record.steps), "step")
    missing = f"; {record.replays} of a CUDA graph are not recorded" if record.replays else ""
    if record.first_steps is not None:
        steps = f"its first {steps}"
    if record.exit_code == ScriptError.exit_code and not len(record.steps):
        return f"{script} ended under {policy}; no training step was seen{missing}"  # it did not fail by itself
    if shared.error_text(record):
        return f"{script} failed under {policy} after {steps}{missing}"
    if not record.steps.loss:
        return f"{script} ran under {policy}; no training step was seen{missing}"
    if record.watched and record.bottleneck is not None:
        why = fmt.clean(record.bottleneck.sentence)
        if record.bottleneck.limit == "unknown":
            return f"What holds {script} back is not known: {why}{missing}"
        return f"{script} is held back by {LIMITS[record.bottleneck.limit]}: {why}{missing}"
    loss = shared.final_loss_text(record)
    if record.changed_nothing:
        ran = shared.ran_text(record)
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
    line, steps = shared.run_line(record), record.steps
    broken = any(word in line.final_loss.split() for word in ("NaN", "Infinity", "-Infinity"))
    emulated = shared.NOT_FOR_GPU if record.effective.emulated else ""
    of_emulation = shared.NOT_FOR_GPU if record.memory.of_emulation else ""
    counted = record.effective.share_by_format
    scale = "" if record.final_scale is None else f"the loss scale ended at {line.final_scale}"
    duration = f"{line.duration} in all"
    rows = [
        Fact(
            what="formats",
            value=shared.formats_text(record),
            reason="of the FLOPs of matrix products" if counted else "",
        ),
        Fact(
            what="final loss",
            value=line.final_loss,
            reason=f"after {fmt.plural(len(steps), 'step')}" if steps.loss else "",
            tone="bad" if broken else "",
        ),
        Fact(what="skipped steps", value=line.skipped, reason=scale, tone="warn" if steps.num_skipped else ""),
        Fact(
            what="time per step",
            value=fmt.ms_text(shared.median_ms(steps.warm_ms)),
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


# --- What the guard of a run noticed, and what occupied the memory when it ran out, as display strings --------------------------


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
