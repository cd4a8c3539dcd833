"""What a check says: the answer first, then the comparison behind it, then how it was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath

from mezzo.commands.compare import page as compare
from mezzo.commands.predict.page import beside
from mezzo.records import AS_IS, Answer, CheckRecord, CheckStage, CompareRecord, Gain, Row
from mezzo.report import formatting as fmt
from mezzo.report import pages
from mezzo.report.log_entries import LogEntry, plain_entry
from mezzo.report.sections import Charts, Code, Fact, Grid, Headline, NextStep, Page, Paragraph, Section, facts_section

_TONES = {"use": "good", "stay": "quiet", "undecided": "open", "failed": "bad"}
_LINES = ("why", "to fix it", "accuracy", "memory", "speed", "changed")
"""The first lines of the box, in order."""
_SAME = 0.005
"""A smaller share of the memory counts as no saving."""


def page(record: CheckRecord) -> Page:
    """Return what ``record`` says."""
    script = fmt.clean(PurePath(record.script).name)
    answer, headline = record.answer, _headline(record, script)
    first = record.first_steps
    judged = "" if first is None else f" (judged by the {fmt.first(first, 'step')} only)"
    compared = record.comparison if record.comparison and len(record.comparison.rows) > 1 else None
    stages = Grid(
        heads=("what", "why", "outcome", "time"), rows=list(map(_stage, record.stages)), numbers=(3,), sortable=False
    )
    offered = facts_section("The policies that were considered", pages.facts(record.offered))
    method = Paragraph(text="" if compared is None else compare.method(compared), faint=True)
    change = Code(text=fmt.clean(record.patch, keep_lines=True), copies="Copy the change")
    return Page(
        title=f"{script}: {headline}",
        script=fmt.clean(record.script),
        answer=_answer(record, headline + judged, compared),
        sections=[
            Section(title="The change to the script", blocks=[change]),
            *([] if compared is None else _comparison(compared)),
            Section(title="How it was found", blocks=[stages, method], shown_in="page"),
            replace(offered, shown_in="page"),
        ],
        steps=[NextStep(why=fmt.clean(answer.next_why), command=fmt.clean(answer.next_command))],
        environment=pages.environment_facts(record.environment),
        command=pages.command_text(record.command, record.environment),
    )


def _comparison(compared: CompareRecord) -> list[Section | Charts]:
    found = compare.page(compared)
    said = Paragraph(text=f"{found.answer.sentence} {found.answer.detail}".strip())
    table = replace(found.grid("Policy by policy"), reasons=())
    columns = Paragraph(text=compare.COLUMNS, faint=True)
    return [
        Section(title="The comparison", blocks=[said, table, columns]),
        Charts(draw=lambda _: compare.charts(compared)),
    ]


def _answer(record: CheckRecord, sentence: str, compared: CompareRecord | None) -> Headline:
    """Return the decision, and the figures of the policy to use."""
    row = _row(record)
    metric = "" if compared is None else compare.metric_name(compared)
    facts = [] if row is None else compare.evidence(row, metric=metric)
    facts += [_speed_elsewhere(gain) for gain in record.answer.gains if gain.kind != "measured"]
    others = [replace(one, value=f"{one.value}: {one.reason}", reason="") for one in _others(record.answer)]
    return Headline(
        tone=_TONES[record.answer.decision],
        word=record.answer.decision,
        sentence=sentence,
        facts=facts,
        boxed=[*_lines(record), *others],
    )


def _speed_elsewhere(gain: Gain) -> Fact:
    """Return a gain on another GPU, over the same baseline as the answer's sentence."""
    times, over = gain.over_what_is_free
    most, trust = (
        ("at most ", "a ceiling, not a prediction") if gain.kind == "bound" else ("", "predicted, not measured")
    )
    return Fact(
        what=f"speed on {fmt.clean(gain.device)}",
        value=f"{most}{fmt.ratio_text(times)}",
        reason=f"over {over}: {trust}",
    )


def _at_most(gain: Gain) -> str:
    """Return a ceiling over TF32, which takes one line in a script, and over strict FP32."""
    over_fp32 = fmt.ratio_text(gain.times)
    if gain.times_over_tf32 is None:
        return f"at most {over_fp32} over FP32"
    return f"at most {fmt.ratio_text(gain.times_over_tf32)} over TF32, {over_fp32} over strict FP32"


def policy_title(policy: str) -> str:
    """Return a policy as a headline names it: ``BF16``, or the whole text of one with fields."""
    name = fmt.clean(policy)
    return name if ":" in name or "-" in name else name.upper()


def _headline(record: CheckRecord, script: str) -> str:
    answer = record.answer
    if answer.decision == "failed" and not any(
        len(run.steps) for run in (record.comparison.runs if record.comparison else [])
    ):
        return f"No answer: {script} did not train"
    name = policy_title(answer.policy)
    if answer.decision == "use":
        return f"Keep {script}'s own mixed precision" if answer.policy == AS_IS else f"Use {name}"
    own_formats = " and ".join(map(policy_title, answer.own_formats))
    if answer.decision == "stay":
        stay = f"Keep the script's own precision ({own_formats})" if own_formats else f"Stay in {name}"
        return stay + _where(record)
    if answer.decision == "undecided":
        return "Undecided"
    where = f"its own precision ({own_formats})" if own_formats else f"{name} itself"
    return f"No answer: {script} goes wrong in {where}"


def _where(record: CheckRecord) -> str:
    """Return what is predicted for a GPU where a CPU ran the script; empty where the answer was measured on a GPU."""
    elsewhere = next((gain for gain in record.answer.gains if gain.kind == "predicted"), None)
    if record.device.kind != "cpu" or elsewhere is None:
        return ""
    times, over = elsewhere.over_what_is_free
    return f": {fmt.ratio_text(times)} {over}'s speed predicted on {fmt.clean(elsewhere.device)}"


def _lines(record: CheckRecord) -> list[Fact]:
    """Return the lines of the box: why, what it costs in accuracy, what it gains, what was changed."""
    answer, row = record.answer, _row(record)
    lines = [Fact(what="why", value=_sentence(answer.why))]
    if answer.evidence:
        rows = [] if record.comparison is None else record.comparison.rows
        is_open = any(one.verdict == "undecided" and one.policy == answer.evidence_of for one in rows)
        kept = "not decided" if is_open else "kept"
        lines.append(Fact(what="accuracy", value=f"{kept}: {fmt.clean(answer.evidence)}{_seeds(row, rows)}."))
    if row is not None and (memory := _memory(record, row)):
        lines.append(Fact(what="memory", value=memory))
    lines += [Fact(what="speed", value=_gain(gain)) for gain in answer.gains]
    lines += _beside(record)
    if (answer.decision == "use" and answer.policy != AS_IS) or answer.changed:
        changed = [f"{fmt.clean(one.reason)}: {fmt.clean(one.value)}" for one in answer.changed]
        lines.append(Fact(what="changed", value="; ".join(changed) or "nothing but the precision"))
    hint = next((run.hint for run in (record.comparison.runs if record.comparison else []) if run.hint), "")
    lines += [Fact(what="to fix it", value=_sentence(hint))] if hint else []
    notes = [(fmt.clean(note.what), f"{fmt.clean(note.value)}: {fmt.clean(note.reason)}.") for note in record.notes]
    lines += [Fact(what=what, value=value) for what, value in notes]
    return sorted(lines, key=lambda line: _LINES.index(line.what) if line.what in _LINES else len(_LINES))


def _beside(record: CheckRecord) -> list[Fact]:
    """Return each prediction for the GPU of the runs beside what was measured on it."""
    compared = record.comparison
    notes = [] if compared is None else beside(compared.real_gpus, compared.rows)
    return [Fact(what="prediction", value=f"{one.what}: {one.value}.") for one in pages.facts(notes)]


def _row(record: CheckRecord) -> Row | None:
    """Return the row with the answer's numbers: the policy to use, or the best of those that gain nothing."""
    rows = [] if record.comparison is None else record.comparison.rows
    if record.answer.memory_saved is None:
        return None
    if record.answer.decision == "use":
        return next((row for row in rows if row.policy == record.answer.policy), None)
    listed = {other.what for other in record.answer.others}
    named = [row for row in rows if row.verdict != "baseline"]
    of_evidence = (row for row in named if row.policy == record.answer.evidence_of)
    return next(of_evidence, None) or next((row for row in named if row.policy not in listed), None)


def _seeds(row: Row | None, rows: Sequence[Row]) -> str:
    """Return how many seeds the row and the baseline have in common: one of them may be a seed ahead when time is up."""
    if row is None:
        return ""
    paired = min([row.num_runs, *(one.num_runs for one in rows if one.verdict == "baseline")])
    return f"; {fmt.plural(paired, 'seed')}"


def _memory(record: CheckRecord, row: Row) -> str:
    saved = record.answer.memory_saved
    baseline = None if record.comparison is None else next(r for r in record.comparison.rows if r.verdict == "baseline")
    if saved is None or baseline is None:
        return ""
    amount = (
        f"{abs(saved):.0%} {'less' if saved >= 0 else 'more'} per step" if abs(saved) >= _SAME else "the same per step"
    )
    peaks = row.memory.cuda_allocated_bytes, baseline.memory.cuda_allocated_bytes
    if all(peaks):
        amount += f": {fmt.bytes_text(peaks[0])} allocated at the peak instead of {fmt.bytes_text(peaks[1])}"
    elif row.memory.total_bytes is not None and baseline.memory.total_bytes is not None:
        amount += f": {fmt.bytes_text(row.memory.total_bytes)} instead of {fmt.bytes_text(baseline.memory.total_bytes)}"
        kept = [fmt.bytes_text(m.activations_bytes) for m in (row.memory, baseline.memory)]
        amount += f" (activations {kept[0]} instead of {kept[1]})"
    return amount + ("; emulated here, with the bytes that a GPU would keep" if row.emulated else "")


def _gain(gain: Gain) -> str:
    device, note = fmt.clean(gain.device), fmt.clean(gain.note)
    if gain.kind == "bound":
        return f"{_at_most(gain)} on {device}, by counted FLOPs and bytes (a ceiling, not a prediction): {note}."
    times, spread = fmt.ratio_text(gain.times), fmt.spread_text(gain.low, gain.high)
    if gain.kind == "predicted":
        over = f"{times} FP32's speed"
        if gain.times_over_tf32 is not None:
            over = f"{fmt.ratio_text(gain.times_over_tf32)} TF32's speed ({times} FP32's)"
        return f"{over} on {device}, predicted: {note}."
    if gain.low is not None and gain.high is not None and gain.low <= 1.0 <= gain.high:
        return f"not measurably faster or slower on {device} ({spread}; {note})."
    return f"{times} as fast, measured on {device} ({'; '.join(filter(None, [spread, note]))})."


def _others(answer: Answer) -> list[Fact]:
    return [
        Fact(
            what=fmt.clean(other.what),
            value=compare.verdict_text(other.value),
            reason=fmt.clean(other.reason),
            tone=compare.VERDICT_TONES.get(other.value, ""),
        )
        for other in answer.others
    ]


def _sentence(text: str) -> str:
    return fmt.clean(text).rstrip(".") + "."


def _stage(stage: CheckStage) -> tuple[str, ...]:
    again = " (from the interrupted check)" if stage.resumed else ""
    words = map(fmt.clean, (stage.what, stage.why, stage.outcome + again))
    return (*words, fmt.duration_text(stage.duration_s))


def log_entry(record: CheckRecord) -> LogEntry:
    """Return what is logged of a check: its comparison, with the answer."""
    entry = plain_entry(record) if record.comparison is None else compare.log_entry(record.comparison)
    tags = {**entry.tags, "kind": record.kind, "decision": record.answer.decision, "use": record.answer.policy}
    return replace(entry, record=record, tags=tags)
