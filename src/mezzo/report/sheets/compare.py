"""A comparison as display strings: the headline, the verdict table and the evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from mezzo.records import CompareRecord, Difference, RealGpus, Row, RunRecord
from mezzo.report import formatting as fmt
from mezzo.report.colours import Style, styles_of
from mezzo.report.sheets import shared
from mezzo.report.sheets.ranks import difference_facts
from mezzo.report.sheets.shared import Fact, MemoryLine, RunLine, ScriptSheet, Share

EMULATED = "emulated"
VERDICT_TONES = {
    "baseline": "quiet",
    "equivalent": "good",
    "different": "warn",
    "diverged": "bad",
    "stopped_learning": "bad",
    "undecided": "open",
    "failed": "bad",
}


_COLUMNS = (
    "Step: median after the first ones. Speed-up: ratio of two steps. Final loss: mean of the last tenth of the steps."
)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A quantity of one policy, compared with the baseline's."""

    value: str
    difference: str = ""
    interval: str = ""


@dataclass(frozen=True, kw_only=True)
class VerdictLine:
    """One row of the verdict table."""

    policy: str
    style: Style
    """The policy's colour in charts and tables."""
    verdict: str
    tone: str
    step: str
    speedup: str
    spread: str
    memory: str
    memory_ratio: str
    losses: list[Compared]
    """One for each of the sheet's ``loss_heads``."""
    metric: Compared
    skipped: str
    final_scale: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class EffectiveLine:
    """The formats that really ran under one policy."""

    policy: str
    emulated: bool
    shares: list[Share]
    left_alone: list[Fact]


@dataclass(frozen=True, kw_only=True)
class CompareSheet(ScriptSheet):
    """The words and tables of a comparison, ready for any view."""

    details: str
    error: str
    """The error of a run, and what to do about it; empty if no run has a hint."""
    method: str
    columns: str
    """How the columns' numbers follow from the runs."""
    loss_heads: list[str]
    metric_name: str
    lines: list[VerdictLine]
    memory: list[MemoryLine]
    effective: list[EffectiveLine]
    effective_note: str
    between_ranks: list[Fact]
    """What should be the same in all processes of a run and is not."""
    runs: list[RunLine]
    explanations: dict[str, list[Fact]]
    """Each policy in sentences."""
    real_gpus: RealGpus | None
    """Predictions; ``sheets.real_gpus`` puts them into words."""


def compare_sheet(record: CompareRecord) -> CompareSheet:
    """Return the sheet of ``record``."""
    script = record.runs[0].script if record.runs else ""
    policies = fmt.listed([fmt.clean(row.policy_shown) for row in record.rows] or ["no policy"])
    headline, details = _headline(record)
    names = list(dict.fromkeys(name for row in record.rows for name in row.losses))
    styles = styles_of(record.rows)
    return CompareSheet(
        title=f"{fmt.clean(PurePath(script).name) or 'comparison'}: {policies}",
        script=fmt.clean(script),
        headline=headline,
        details=details,
        error=shared.first_error_and_hint(record.runs),
        method=_method(record),
        columns=_COLUMNS,
        loss_heads=[f"final {fmt.loss_title(name)}" for name in names] or ["final loss"],
        metric_name=_metric_name(record),
        lines=[_verdict_line(row, names, style=styles[row.policy_shown]) for row in record.rows],
        memory=shared.memory_lines([(row.policy_shown, row.memory) for row in record.rows]),
        effective=_effective(record),
        effective_note=shared.shares_note(*record.runs),
        between_ranks=difference_facts(*record.runs),
        runs=[shared.run_line(run) for run in record.runs],
        explanations=_explanations(record),
        real_gpus=record.real_gpus,
        environment=shared.environment_facts(record.environment, framework=framework_of(record)),
        command=shared.command_text(record.command, record.environment),
    )


def framework_of(record: CompareRecord) -> str:
    """Return the script's framework, from the runs that trained: these know its versions."""
    frameworks = [run.framework for run in record.runs if len(run.steps)] or [run.framework for run in record.runs]
    return next(iter(frameworks), "")


def verdict_text(verdict: str) -> str:
    """Return a verdict as words."""
    return verdict.replace("_", " ")


def best_of(equal: Sequence[Row]) -> Row:
    """Return the best of policies that train alike: the fastest if any is measurably faster, else the one with the least memory."""

    def merit(row: Row) -> tuple[float, float]:
        faster = row.speedup if row.speedup_low is not None and row.speedup_low > 1 and not row.emulated else None
        return -(faster or 1.0), row.memory_ratio or 1.0

    return min(equal, key=merit)


def _headline(record: CompareRecord) -> tuple[str, str]:
    others = [row for row in record.rows if row.verdict != "baseline"]
    if not others:
        return "Only the baseline ran, so there is nothing to compare.", ""
    if record.shared_files:
        shared = record.shared_files[0]
        return (
            "The runs are not independent, so no verdict holds.",
            f"The run of {fmt.clean(shared.read_by)} read {fmt.clean(shared.path)}, which the run of "
            f"{fmt.clean(shared.written_by)} had written. Give each run a path of its own: {{run}} in the script's arguments "
            "becomes the run's name, as in --output_dir out/{run}.",
        )
    baseline = fmt.clean(record.baseline_shown)
    equal = [row for row in others if row.verdict == "equivalent"]
    lead = _equal_sentence(equal, baseline) if equal else f"No policy was shown to train like {baseline}."
    rest = [
        _named(others, "different", f"to a different result than {baseline}", singular="trains", plural="train"),
        _named(others, "diverged", "", singular="diverged", plural="diverged"),
        _named(others, "stopped_learning", "", singular="stopped learning", plural="stopped learning"),
        *(f"{fmt.clean(row.policy_shown)} failed{_in_how_many(row)}." for row in others if row.verdict == "failed"),
        _named(others, "undecided", "", singular="is undecided", plural="are undecided"),
    ]
    return lead, " ".join(sentence for sentence in rest if sentence)


def _named(rows: Sequence[Row], verdict: str, tail: str, *, singular: str, plural: str) -> str:
    names = [fmt.clean(row.policy_shown) for row in rows if row.verdict == verdict]
    if not names:
        return ""
    return f"{fmt.listed(names)} {singular if len(names) == 1 else plural} {tail}".strip() + "."


def _in_how_many(row: Row) -> str:
    return f" in {row.num_failed} of {fmt.plural(row.num_runs, 'run')}" if row.num_failed < row.num_runs else ""


def _equal_sentence(rows: Sequence[Row], baseline: str) -> str:
    names = fmt.listed([fmt.clean(row.policy_shown) for row in rows])
    verb = "trains" if len(rows) == 1 else "train"
    return f"{names} {verb} like {baseline}{_speed_clause(rows)}."


def _speed_clause(rows: Sequence[Row]) -> str:
    timed = [row for row in rows if not row.emulated and row.speedup is not None]
    if not timed:
        return "; emulated, so no speed is claimed" if any(r.emulated for r in rows) else ""
    faster = [row for row in timed if row.speedup_low is not None and row.speedup_low > 1]
    slower = [row for row in timed if row.speedup_high is not None and row.speedup_high < 1]
    if faster:
        best = max(faster, key=lambda row: row.speedup or 0.0)
        return f", {_speed(best)}" if len(rows) == 1 else f"; {fmt.clean(best.policy_shown)} is fastest, {_speed(best)}"
    rest = "; no speed is claimed for emulated formats" if any(row.emulated for row in rows) else ""
    if len(slower) == len(timed):
        worst = min(slower, key=lambda row: row.speedup or 0.0)
        if rest:
            return f"; {fmt.clean(worst.policy_shown)} is slower, {_speed(worst)}{rest}"
        return ", but slower, " + ("" if len(rows) == 1 else f"{fmt.clean(worst.policy_shown)} most: ") + _speed(worst)
    if rest:
        measured = fmt.listed([fmt.clean(row.policy_shown) for row in timed])
        verb = "is" if len(timed) == 1 else "are"
        return f"; {measured} {verb} not measurably faster{rest}"
    return ", but not measurably faster"


def _speed(row: Row) -> str:
    return f"{fmt.ratio_text(row.speedup)} as fast ({fmt.spread_text(row.speedup_low, row.speedup_high)})"


def _method(record: CompareRecord) -> str:
    num_seeds = max((row.num_runs for row in record.rows), default=0)
    baseline = fmt.clean(record.baseline_shown)
    percent = fmt.number_text(100 * record.margin)
    first = shared.first_steps_text(*record.runs)
    stopped = f" Every run was {first}: the verdicts are on these steps only." if first else ""
    return (
        "Equivalent means that two one-sided tests (5% overall) show the difference to be within a margin: "
        f"{percent}% of {baseline}'s final loss, h = {fmt.number_text(record.margin)} for a proportion, or {baseline}'s own "
        f"seed-to-seed spread where that is wider. {fmt.plural(num_seeds, 'seed')} per policy, paired with {baseline}."
        f"{_stand_for(record)}{stopped}"
    )


def _stand_for(record: CompareRecord) -> str:
    """Return what the typed names of policies stand for."""
    names = [
        f"{fmt.clean(row.policy_typed)} stands for {fmt.clean(row.policy)}" for row in record.rows if row.policy_typed
    ]
    return f" {fmt.listed(names)}." if names else ""


def _metric_name(record: CompareRecord) -> str:
    if all(row.metric is None for row in record.rows):
        return ""
    names = [run.metric.name for run in record.runs if run.metric is not None]
    return fmt.clean(names[0]) if names else "metric"


def _verdict_line(row: Row, names: Sequence[str], *, style: Style) -> VerdictLine:
    is_baseline = row.verdict == "baseline"
    losses = [row.losses.get(name) for name in names] if names else [row.loss]
    return VerdictLine(
        policy=fmt.clean(row.policy_shown),
        style=style,
        verdict=verdict_text(row.verdict),
        tone=VERDICT_TONES[row.verdict],
        step=fmt.ms_text(row.step_ms),
        speedup=EMULATED if row.emulated else fmt.ratio_text(row.speedup),
        spread="" if row.emulated or is_baseline else fmt.spread_text(row.speedup_low, row.speedup_high),
        memory=fmt.bytes_text(row.memory.total_bytes),
        memory_ratio=EMULATED if row.memory.of_emulation else fmt.ratio_text(row.memory_ratio),
        losses=[_compared(loss, alone=is_baseline) for loss in losses],
        metric=_compared(row.metric, alone=is_baseline),
        skipped=fmt.mean_text(row.num_skipped),
        final_scale=fmt.scale_text(row.final_scale),
        reason=fmt.clean(row.reason).rstrip("."),
    )


def _compared(difference: Difference | None, *, alone: bool) -> Compared:
    if difference is None:
        return Compared(value=fmt.MISSING)
    value = fmt.number_text(difference.value)
    if alone or not math.isfinite(difference.difference):
        return Compared(value=value)
    show = fmt.share_change_text if difference.scale == "ratio" else fmt.signed_text
    return Compared(
        value=value,
        difference=show(difference.difference),
        interval=fmt.interval_text(difference.low, difference.high, show=show),
    )


def _effective(record: CompareRecord) -> list[EffectiveLine]:
    return [
        EffectiveLine(
            policy=fmt.clean(row.policy_shown),
            emulated=row.emulated,
            shares=shared.shares(row.share_by_format),
            left_alone=_left_alone([run for run in record.runs if run.compared_as == row.compared_as]),
        )
        for row in record.rows
    ]


def _left_alone(runs: Sequence[RunRecord]) -> list[Fact]:
    found = [fact for run in runs for fact in shared.facts(run.effective.left_alone)]
    return list(dict.fromkeys(found))  # the same for every seed


def _explanations(record: CompareRecord) -> dict[str, list[Fact]]:
    first = {run.policy_shown: run for run in reversed(record.runs) if run.explanation}
    return {fmt.clean(policy): shared.explained(run) for policy, run in reversed(first.items())}
