"""What the guard of a run noticed, and what occupied the memory when it ran out, as display strings."""

from __future__ import annotations

from mezzo.records import Guardrails, OutOfMemory
from mezzo.report import formatting as fmt
from mezzo.report.sheets.shared import Fact, facts


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
