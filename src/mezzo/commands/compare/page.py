"""What a comparison says: the headline, the verdict table and the evidence."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Literal

from mezzo.commands.predict import page as predict
from mezzo.commands.run import page as run_page
from mezzo.records import AS_IS, CompareRecord, Difference, Row, RunRecord
from mezzo.report import formatting as fmt
from mezzo.report import pages
from mezzo.report.charts import steps
from mezzo.report.charts.data import Drawn
from mezzo.report.charts.steps import StepTimes
from mezzo.report.colours import Style, styles_of
from mezzo.report.commands import (
    ScriptCommands,
    best_first,
    explained,
    preset_of,
    row_options,
    skips_many,
    typed_policy,
)
from mezzo.report.log_entries import LogEntry, Table, machine, stem
from mezzo.report.log_entries import TableValue as Entry
from mezzo.report.pages import difference_facts
from mezzo.report.sections import (
    Block,
    Cell,
    Charts,
    Fact,
    FactTable,
    Formats,
    FormatShares,
    Grid,
    Headline,
    JudgedCase,
    NextStep,
    Page,
    Paragraph,
    Section,
    facts_section,
)

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


COLUMNS = (
    "Step: median after the first ones. Speed-up: ratio of two steps. Final loss: mean of the last tenth of the steps."
)


def page(record: CompareRecord) -> Page:
    """Return what ``record`` says."""
    script = record.runs[0].script if record.runs else ""
    policies = fmt.listed([fmt.clean(row.policy_shown) for row in record.rows] or ["no policy"])
    formats: list[Block] = [
        Formats(policies=effective_formats(record)),
        Paragraph(text=pages.shares_note(*record.runs), faint=True),
    ]
    return Page(
        title=f"{fmt.clean(PurePath(script).name) or 'comparison'}: {policies}",
        script=fmt.clean(script),
        answer=_answer(record),
        sections=[
            Section(
                title="Policy by policy",
                blocks=[verdict_grid(record), Paragraph(text=f"{COLUMNS} {method(record)}", faint=True)],
            ),
            *predict.real_gpus_sections(record.real_gpus, record.rows),
            Charts(draw=lambda _: charts(record)),
            Section(title="Effective formats", blocks=formats),
            facts_section("Differences between ranks", difference_facts(*record.runs), details=True),
            pages.memory_section([(row.policy_shown, row.memory) for row in record.rows]),
            *(
                Section(title=f"What {policy} does", blocks=[FactTable(rows=facts)], shown_in="page", folded=True)
                for policy, facts in _explanations(record).items()
            ),
            Section(title="Every run", blocks=[_runs(record.runs)], shown_in="page", folded=True),
        ],
        cases=[_case(row) for row in record.rows if row.verdict != "baseline"],
        steps=best_first(_next(record)),
        environment=pages.environment_facts(record.environment, framework=framework_of(record)),
        command=pages.command_text(record.command, record.environment),
    )


def _case(row: Row) -> JudgedCase:
    good: dict[str, Literal["passed", "skipped"]] = {"equivalent": "passed", "undecided": "skipped"}
    message = fmt.clean(f"{row.verdict.replace('_', ' ')}: {row.reason}")
    return JudgedCase(name=fmt.clean(row.policy_shown), outcome=good.get(row.verdict, "failed"), message=message)


def _answer(record: CompareRecord) -> Headline:
    """Return the evidence for the best policy that trains like the baseline."""
    sentence, detail = _headline(record)
    others = [row for row in record.rows if row.verdict != "baseline"]
    equal = [row for row in others if row.verdict == "equivalent"]
    words, facts = {row.verdict for row in others}, []
    if not others or record.shared_files:
        tone, word = "bad" if others else "open", "no verdict"
    elif equal:
        tone, word, facts = "good", "equivalent", evidence(best_of(equal), metric=metric_name(record))
    elif "undecided" in words:
        tone, word = "open", "undecided"
        needed = [row.seeds_needed for row in others if row.verdict == "undecided" and row.seeds_needed]
        seeds = str(max(needed, default=0))
        if needed:
            facts = [Fact(what="seeds that would decide", value=seeds, reason="in 80% of cases or more")]
    else:
        tone = "warn" if words == {"different"} else "bad"
        word = verdict_text(others[0].verdict) if len(words) == 1 else "not equivalent"
    error = pages.first_error_and_hint(record.runs)
    return Headline(tone=tone, word=word, sentence=sentence, detail=detail, error=error, facts=facts)


def evidence(row: Row, *, metric: str) -> list[Fact]:
    """Return how a policy compares with the baseline: loss, metric, memory and speed."""
    name = fmt.clean(row.policy_shown)
    facts = []
    loss = row.loss or next(iter(row.losses.values()), None)
    for what, compared in (("final loss", loss), (metric, row.metric)):
        if compared is not None:
            show = fmt.share_change_text if compared.scale == "ratio" else fmt.signed_text
            interval = fmt.interval_text(compared.low, compared.high, show=show)
            facts.append(Fact(what=f"{what}, {name}", value=show(compared.difference), reason=interval))
    if row.memory_ratio is not None:
        change = fmt.share_change_text(row.memory_ratio - 1.0)
        facts.append(Fact(what=f"memory, {name}", value=change, reason=fmt.bytes_text(row.memory.total_bytes)))
    if row.emulated:
        facts.append(Fact(what=f"speed, {name}", value="not measured", reason="emulated here; measure it on a GPU"))
    elif row.speedup is not None:
        spread = fmt.spread_text(row.speedup_low, row.speedup_high)
        facts.append(Fact(what=f"speed, {name}", value=fmt.ratio_text(row.speedup), reason=spread))
    return facts


def charts(record: CompareRecord) -> list[Drawn]:
    """Return the charts of a comparison."""
    styles = styles_of([*record.rows, *record.runs])
    trained = [run for run in record.runs if run.error is None]
    timed = [
        StepTimes(
            policy=row.policy_shown,
            style=styles[row.policy_shown],
            times_ms=[ms for run in trained if run.compared_as == row.compared_as for ms in run.steps.warm_ms],
            emulated=row.emulated,
        )
        for row in record.rows
    ]
    return [
        *steps.loss_charts(record.runs, styles=styles),
        *steps.difference_charts(record, styles=styles),
        steps.scale_chart(record.runs, styles=styles),
        pages.memory_bars({row.policy_shown: row.memory for row in record.rows}, styles=styles),
        steps.time_boxes(timed),
    ]


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


def method(record: CompareRecord) -> str:
    """Return how the policies were compared."""
    num_seeds = max((row.num_runs for row in record.rows), default=0)
    baseline = fmt.clean(record.baseline_shown)
    percent = fmt.number_text(100 * record.margin)
    first = pages.first_steps_text(*record.runs)
    stopped = f" Every run was {first}: the verdicts are on these steps only." if first else ""
    return (
        "Equivalent means that two one-sided tests (5% overall) show the difference to be within the margin. "
        f"The margin is {percent}% of {baseline}'s final loss (h = {fmt.number_text(record.margin)} for a proportion), or "
        f"{baseline}'s own seed-to-seed spread where that is wider. {fmt.plural(num_seeds, 'seed')} per policy, paired with {baseline}."
        f"{_stand_for(record)}{stopped}"
    )


def _stand_for(record: CompareRecord) -> str:
    """Return what the typed names of policies stand for."""
    names = [
        f"{fmt.clean(row.policy_typed)} stands for {fmt.clean(row.policy)}" for row in record.rows if row.policy_typed
    ]
    return f" {fmt.listed(names)}." if names else ""


def metric_name(record: CompareRecord) -> str:
    """Return the name of the metric; empty without one."""
    if all(row.metric is None for row in record.rows):
        return ""
    names = [run.metric.name for run in record.runs if run.metric is not None]
    return fmt.clean(names[0]) if names else "metric"


def verdict_grid(record: CompareRecord) -> Grid:
    """Return the table of verdicts, one row per policy."""
    names = list(dict.fromkeys(name for row in record.rows for name in row.losses))
    compared = [f"final {fmt.loss_title(name)}" for name in names] or ["final loss"]
    metric = metric_name(record)
    heads = [f"{head}\ndifference\n95% interval" for head in [*compared, *([metric] if metric else [])]]
    styles = styles_of(record.rows)
    return Grid(
        heads=("policy", "verdict", "step\nspeed-up", "memory\nratio", *heads, "skips", "final scale"),
        rows=[_verdict_row(row, names, style=styles[row.policy_shown], metric=bool(metric)) for row in record.rows],
        numbers=range(2, 6 + len(heads)),
        reasons=[fmt.clean(row.reason).rstrip(".") for row in record.rows],
        wide=True,
        sortable=False,
    )


def _verdict_row(row: Row, names: Sequence[str], *, style: Style, metric: bool) -> tuple[str | Cell, ...]:
    is_baseline = row.verdict == "baseline"
    losses = [row.losses.get(name) for name in names] if names else [row.loss]
    speedup = EMULATED if row.emulated else fmt.ratio_text(row.speedup)
    spread = "" if row.emulated or is_baseline else fmt.spread_text(row.speedup_low, row.speedup_high)
    ratio = EMULATED if row.memory.of_emulation else fmt.ratio_text(row.memory_ratio)
    return (
        pages.policy_cell(row.policy_shown, style),
        Cell(text=verdict_text(row.verdict), tone=VERDICT_TONES[row.verdict]),
        Cell(text=fmt.ms_text(row.step_ms), below=(speedup, spread)),
        Cell(text=fmt.bytes_text(row.memory.total_bytes), below=(ratio,)),
        *(_compared(one, alone=is_baseline) for one in [*losses, *([row.metric] if metric else [])]),
        fmt.mean_text(row.num_skipped),
        fmt.scale_text(row.final_scale),
    )


def _compared(difference: Difference | None, *, alone: bool) -> Cell:
    if difference is None:
        return Cell(text=fmt.MISSING)
    value = fmt.number_text(difference.value)
    if alone or not math.isfinite(difference.difference):
        return Cell(text=value)
    show = fmt.share_change_text if difference.scale == "ratio" else fmt.signed_text
    interval = fmt.interval_text(difference.low, difference.high, show=show)
    return Cell(text=value, below=(show(difference.difference), interval))


def effective_formats(record: CompareRecord) -> list[FormatShares]:
    """Return the formats that really ran under each policy."""
    return [
        FormatShares(
            policy=fmt.clean(row.policy_shown),
            emulated=row.emulated,
            shares=pages.shares(row.share_by_format),
            left_alone=_left_alone([run for run in record.runs if run.compared_as == row.compared_as]),
        )
        for row in record.rows
    ]


def _runs(runs: Sequence[RunRecord]) -> Grid:
    rows = [
        (
            fmt.clean(run.policy_shown),
            fmt.MISSING if run.seed is None else str(run.seed),
            str(len(run.steps)),
            pages.final_loss_text(run),
            str(run.steps.num_skipped),
            fmt.scale_text(run.final_scale),
            fmt.duration_text(run.duration_s),
            pages.error_text(run) or pages.first_steps_text(run) or "ended by itself",
        )
        for run in runs
    ]
    heads = ("policy", "seed", "steps", "final loss", "skipped", "final scale", "duration", "outcome")
    return Grid(heads=heads, rows=rows, numbers=range(1, 7))


def _left_alone(runs: Sequence[RunRecord]) -> list[Fact]:
    found = [fact for run in runs for fact in pages.facts(run.effective.left_alone)]
    return list(dict.fromkeys(found))  # the same for every seed


def _explanations(record: CompareRecord) -> dict[str, list[Fact]]:
    first = {run.policy_shown: run for run in reversed(record.runs) if run.explanation}
    return {fmt.clean(policy): pages.explained(run) for policy, run in reversed(first.items())}


_EMULATED_PROCESSES = re.compile(r":(world|reduce_order)=\w+")
"""The fields of a policy that emulate several processes; real ones do not need them."""


def _next(record: CompareRecord) -> Iterator[NextStep]:
    if record.shared_files or not record.runs:
        return  # the headline says what to write
    trained = next((run for run in record.runs if len(run.steps)), record.runs[0])
    commands = ScriptCommands(trained, record.command)
    baseline = next((row for row in record.rows if row.compared_as == record.baseline), None)
    if baseline is None:
        return
    if baseline.num_failed == baseline.num_runs:
        yield from commands.alone("no run of the baseline succeeded; see whether the script succeeds without Mezzo")
        return
    equal = [row for row in record.rows if row.verdict == "equivalent"]
    if equal:
        row = best_of(equal)
        real = row_options(row) | {"policy": _EMULATED_PROCESSES.sub("", typed_policy(row))}
        where = "" if real["policy"] == typed_policy(row) else " in several processes"
        slower = row.speedup_high is not None and row.speedup_high < 1 and not row.emulated
        though = ", which is slower here, for its memory" if slower else ""
        shown = _EMULATED_PROCESSES.sub("", row.policy_shown)
        yield from commands.step(f"train with {shown}{where}{though}", "run", **real)
    for row in record.rows:
        if row is baseline:
            continue
        yield from _after_row(row, record, commands)
    yield from _more_seeds(record, baseline, commands)
    skipping = [row for row in equal if skips_many(row.num_skipped, len(trained.steps))]
    for row in skipping[:1]:
        yield from commands.step(
            f"{row.policy_shown} skips many updates; see why", "diagnose", policy=typed_policy(row)
        )


def _after_row(row: Row, record: CompareRecord, commands: ScriptCommands) -> Iterator[NextStep]:
    if row.checkpoint:
        # The policy without checkpointing has a row of its own, and no command inspects a checkpointed training.
        if row.verdict == "failed":
            yield from commands.step(f"{row.policy_shown} failed; see its output", "run", **row_options(row))
        return
    policy = typed_policy(row)
    if row.verdict == "diverged":
        where = _first_not_finite(record, row.compared_as)
        yield from commands.step(f"{policy} diverged{where}; find the first bad value", "diagnose", policy=policy)
    elif row.verdict == "stopped_learning":
        if preset_of(row.policy).startswith("bf16") and not _first_not_finite(record, row.compared_as):
            # Its range is FP32's, so no value left it: what it loses are digits.
            why = f"{policy} stopped learning; find the modules or operations that lose digits"
            yield from commands.step(why, "fallback", policy=policy)
        else:
            yield from commands.step(f"{policy} stopped learning; find out why", "diagnose", policy=policy)
    elif row.verdict == "failed" and (known := explained(_errors(record, row.compared_as), policy)):
        yield from commands.step(*known, policy=policy)
    elif row.verdict == "failed":
        yield from commands.step(f"{policy} failed; see its output", "run", policy=policy)
    elif row.verdict == "different" and row.policy == AS_IS:
        yield from commands.step(f"{policy} trains to a different result", "audit", policy=policy)
    elif row.verdict == "different":
        yield from commands.step(
            f"{policy} trains to a different result; find the modules to keep in FP32", "fallback", policy=policy
        )


def _errors(record: CompareRecord, policy: str) -> list[str]:
    return [run.error for run in record.runs if run.compared_as == policy and run.error]


def _first_not_finite(record: CompareRecord, policy: str) -> str:
    losses = [run.steps.loss for run in record.runs if run.compared_as == policy]
    firsts = [next((n for n, loss in enumerate(column, 1) if not math.isfinite(loss)), None) for column in losses]
    known = [first for first in firsts if first is not None]
    return f" at step {min(known)}" if known else ""


def _more_seeds(record: CompareRecord, baseline: Row, commands: ScriptCommands) -> Iterator[NextStep]:
    undecided, idle = [], {run.compared_as: run.no_effect for run in record.runs if run.no_effect}
    for row in (row for row in record.rows if row.verdict == "undecided"):
        if no_effect := idle.get(row.compared_as):
            yield from commands.step(f"{row.policy_shown} {no_effect}; see why", "audit", policy=typed_policy(row))
        else:
            undecided.append(row)
    single = all(run.seed in (0, None) for run in record.runs)
    needed = {row.policy_shown: 3 if single else row.seeds_needed for row in undecided if single or row.seeds_needed}
    if not needed:
        return
    most = max(count for count in needed.values() if count)
    names = f"{fmt.listed([*needed])} {'is' if len(needed) == 1 else 'are'}"
    rows = [baseline, *(row for row in undecided if row.policy_shown in needed)]
    policies = ",".join(dict.fromkeys(map(typed_policy, rows)))
    means_s = [_mean([run.duration_s for run in record.runs if run.compared_as == row.compared_as]) for row in rows]
    takes = f" in about {fmt.about_text(most * sum(means_s))}" if all(means_s) else ""
    why = f"{names} undecided; {most} seeds {'may' if single else 'would'} decide{takes}"
    yield from commands.step(why, "compare", policies=policies, seeds=str(most))


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0


def log_entry(record: CompareRecord) -> LogEntry:
    """Return what is logged of a comparison: its table, and an entry for each run behind it."""
    first = record.runs[0] if record.runs else None
    return LogEntry(
        record=record,
        script=stem(first.script) if first else "",
        settings={
            "command": shlex.join(record.command),
            "baseline": record.baseline,
            "policies": ",".join(row.policy_shown for row in record.rows),
            "margin": f"{record.margin:g}",
            **machine(record.environment),
        },
        tags={"kind": record.kind, **{f"verdict {row.policy_shown}": row.verdict for row in record.rows}},
        numbers=dict(number for row in record.rows for number in _numbers(row)),
        tables=[_verdict_table(record.rows)],
        runs=[run_page.log_entry(run, name=name_of_run(run)) for run in record.runs],
    )


def name_of_run(run: RunRecord) -> str:
    """Return the name of a run in its comparison, which is also a valid name for a folder."""
    policy = run.policy_shown.replace(":", "_").replace("*", "_")
    return policy if run.seed is None else f"{policy}-seed{run.seed}"


def _numbers(row: Row) -> Iterator[tuple[str, float]]:
    numbers = {
        "speedup": None if row.emulated else row.speedup,  # no speed is claimed for emulated formats
        "memory_ratio": row.memory_ratio,
        "loss_difference": None if row.loss is None else row.loss.difference,
        "metric_difference": None if row.metric is None else row.metric.difference,
    }
    yield from ((f"{name}/{row.policy_shown}", value) for name, value in numbers.items() if value is not None)


def _verdict_table(rows: Sequence[Row]) -> Table:
    columns = ["policy", "verdict", "speedup", "memory_ratio", "final_loss", "loss_difference", "low", "high", "reason"]
    lines: list[list[Entry]] = []
    for row in rows:
        loss = row.loss
        known = (loss.value, loss.difference, loss.low, loss.high) if loss is not None else (None,) * 4
        speedup = None if row.emulated else row.speedup
        lines.append([row.policy_shown, row.verdict, speedup, row.memory_ratio, *known, row.reason])
    return Table(name="verdicts", columns=columns, rows=lines)


# --- Several comparisons side by side: scripts in several frameworks, or one script on several machines ----------------------------


def page_together(records: Sequence[CompareRecord]) -> Page:
    """Return what ``records`` say; each is judged against its own baseline."""
    frameworks = fmt.listed(list(dict.fromkeys(fmt.clean(framework_of(record)) for record in records)))
    method = (
        f"{frameworks}. Each policy is compared with the baseline of its own table; times of different tables come from "
        "separate runs."
    )
    return Page(
        title=f"{fmt.plural(len(records), 'comparison')} together",
        answer=Headline(tone="quiet", word="together", sentence=_counts(records), detail=method),
        sections=list(map(_table_of, records)),
        environment=pages.environment_facts(records[-1].environment),
    )


def _table_of(record: CompareRecord) -> Section:
    script = record.runs[0].script if record.runs else ""
    device = record.environment.gpu or record.environment.device
    names = (framework_of(record), PurePath(script).name, device)
    table = verdict_grid(record)
    ran = effective_formats(record)
    reasons = [f"{reason}; {_formats_that_ran(formats)}" for reason, formats in zip(table.reasons, ran, strict=True)]
    return Section(
        title=", ".join(fmt.clean(name) for name in names if name),
        blocks=[replace(table, reasons=reasons), Paragraph(text=COLUMNS, faint=True)],
    )


def _formats_that_ran(formats: FormatShares) -> str:
    """Return the formats that really ran, and what could not be switched."""
    shares = ", ".join(f"{part.text} {part.format}" for part in formats.shares) or "formats that were not counted"
    return "; ".join([f"ran in {shares}", *(f"{one.what} {one.value}: {one.reason}" for one in formats.left_alone)])


def _counts(records: Sequence[CompareRecord]) -> str:
    judged = [row.verdict for record in records for row in record.rows if row.verdict != "baseline"]
    counts = [(verdict, judged.count(verdict)) for verdict in VERDICT_TONES if verdict in judged]
    words = [f"{count} {verdict_text(verdict)}" for verdict, count in counts]
    rows = fmt.plural(len(judged), "row")
    return f"{rows} compared with {fmt.plural(len(records), 'baseline')}: {fmt.listed(words or ['nothing to judge'])}."
