"""A check as display strings: the answer first, then the comparison behind it, then how it was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import PurePath

from rich.console import Console
from rich.text import Text

from mezzo.records import AS_IS, Answer, CheckRecord, CheckStage, Gain, Row
from mezzo.report import formatting as fmt
from mezzo.report import terminal
from mezzo.report.sheets import answers, compare, shared
from mezzo.report.sheets.answers import Headline as PageAnswer
from mezzo.report.sheets.compare import CompareSheet
from mezzo.report.sheets.shared import Fact, Grid, ScriptSheet

_TONES = {"use": "good", "stay": "quiet", "undecided": "open", "failed": "bad"}
_LINES = ("why", "to fix it", "accuracy", "memory", "speed", "changed")
"""The first lines of the box, in order."""
_SAME = 0.005
"""A smaller share of the memory counts as no saving."""
_EDGES = 20
"""Columns of the box that a command cannot use."""


@dataclass(frozen=True, kw_only=True)
class CheckSheet(ScriptSheet):
    """The words and tables of a check, ready for any view."""

    tone: str
    answer: list[Fact]
    """The lines of the answer box: a label and a text each."""
    next_command: str
    next_why: str
    others: list[Fact]
    comparison: CompareSheet | None
    stages: Grid
    """What was done to find the answer."""
    offered: list[Fact]
    patch: str


def check_sheet(record: CheckRecord) -> CheckSheet:
    """Return the sheet of ``record``."""
    script = fmt.clean(PurePath(record.script).name)
    answer, headline = record.answer, _headline(record, script)
    first = record.first_steps
    judged = "" if first is None else f" (judged by the {fmt.first(first, 'step')} only)"
    comparison = record.comparison if record.comparison and len(record.comparison.rows) > 1 else None
    return CheckSheet(
        title=f"{script}: {headline}",
        script=fmt.clean(record.script),
        headline=headline + judged,
        tone=_TONES[answer.decision],
        answer=_answer(record),
        next_command=fmt.clean(answer.next_command),
        next_why=fmt.clean(answer.next_why),
        others=_others(answer),
        comparison=None if comparison is None else compare.compare_sheet(comparison),
        stages=Grid(heads=("what", "why", "outcome", "time"), rows=[_stage(s) for s in record.stages], numbers=(3,)),
        offered=shared.facts(record.offered),
        patch=fmt.clean(record.patch, keep_lines=True),
        environment=shared.environment_facts(record.environment),
        command=shared.command_text(record.command, record.environment),
    )


def check_answer(record: CheckRecord, sheet: CheckSheet) -> PageAnswer:
    """Return the answer at the top of the page: the decision, and the figures of the policy to use."""
    row, facts = _row(record), []
    if row is not None:
        metric = "" if sheet.comparison is None else sheet.comparison.metric_name
        facts = answers.evidence(row, metric=metric)
    facts += [_speed_elsewhere(gain) for gain in record.answer.gains if gain.kind != "measured"]
    return PageAnswer(tone=sheet.tone, word=record.answer.decision, facts=facts)


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


# --- the answer ----------------------------------------------------------------------------------------------------------------


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


def _answer(record: CheckRecord) -> list[Fact]:
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
    if (answer.decision == "use" and answer.policy != AS_IS) or answer.changed:
        changed = [f"{fmt.clean(one.reason)}: {fmt.clean(one.value)}" for one in answer.changed]
        lines.append(Fact(what="changed", value="; ".join(changed) or "nothing but the precision"))
    hint = next((run.hint for run in (record.comparison.runs if record.comparison else []) if run.hint), "")
    lines += [Fact(what="to fix it", value=_sentence(hint))] if hint else []
    notes = [(fmt.clean(note.what), f"{fmt.clean(note.value)}: {fmt.clean(note.reason)}.") for note in record.notes]
    lines += [Fact(what=what, value=value) for what, value in notes]
    return sorted(lines, key=lambda line: _LINES.index(line.what) if line.what in _LINES else len(_LINES))


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


# --- the terminal --------------------------------------------------------------------------------------------------------------


def print_check(sheet: CheckSheet, console: Console) -> None:
    """Print the answer in a box, the command, the patch, and the comparison behind them."""
    fits = len(sheet.next_command) + _EDGES <= console.width
    commands = [Fact(what="next", value=sheet.next_command, tone="command")] if fits else []
    others = [Fact(what=other.what, value=f"{other.value}: {other.reason}") for other in sheet.others]
    why = Fact(what="next", value=f"{'' if fits else 'the command below '}{sheet.next_why}.")
    rows = [*sheet.answer, *others, *commands, why]
    labelled_once = [row if before.what != row.what else replace(row, what="") for before, row in pairwise(rows)]
    terminal.answer_box(console, [rows[0], *labelled_once], headline=sheet.headline, tone=sheet.tone)
    if not fits:
        console.print(Text(f"  {sheet.next_command}"), soft_wrap=True)  # a wrapped command cannot be pasted
    if sheet.patch:
        console.print(Text(sheet.patch.rstrip("\n")), soft_wrap=True)
    if sheet.comparison is not None:
        console.print()
        console.print(terminal.verdict_table(sheet.comparison))
