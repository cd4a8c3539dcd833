"""The answer of a search: a row for each configuration, and whether one is faster than what the script does now."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mezzo.commands.check.answer import FEWEST_STEPS
from mezzo.commands.compare.judge import compare
from mezzo.commands.tune.plan import (
    FINAL,
    Configuration,
    SearchKnowledge,
    Trial,
    fault,
    finalists,
    memory_of,
    pruned,
    speed_of,
    speed_up,
    steps_of,
)
from mezzo.formats import FP32
from mezzo.records import AS_IS, Row, RunRecord, TuneDecision, TuneRow

_BARRING = ("different", "diverged", "stopped_learning", "failed")
_NO_TIME = "the budget ran out"
_SEEMS = 1.05
"""A speed-up from which an open answer is worth more repeats."""


@dataclass(frozen=True, kw_only=True)
class BestTrial:
    """The answer."""

    decision: TuneDecision
    chosen: Configuration
    why: str
    rows: list[TuneRow]


def answered(known: SearchKnowledge) -> BestTrial:
    """Return the answer that follows from all runs so far."""
    first = Trial(known.now, 0)
    if why_not := fault(known, first) if first in known.runs else "it was not run":
        why = f"the script as it is cannot be timed: {why_not}"
        row = _row(known, known.now, state="failed", reason=why_not)
        return BestTrial(decision="failed", chosen=known.now, why=why, rows=[row])
    chosen = finalists(known)
    finals = {one: _final_row(known, one, num_compared=len(chosen)) for one in chosen}
    others = [one for one in known.configurations[1:] if one not in finals]
    rows = [_row(known, known.now), *finals.values(), *(_other_row(known, one) for one in others)]
    faster = [one for one in finals if finals[one].state == "faster"]
    if faster:
        best = max(faster, key=lambda one: finals[one].speedup or 0)
        return BestTrial(decision="use", chosen=best, why=_why(finals[best]) + _unrun(rows), rows=rows)
    if chosen and not any(len(_repeats(known, one)) > 1 for one in chosen):
        why = "the budget ran out before the fastest configurations were repeated"
        return BestTrial(decision="undecided", chosen=known.now, why=why, rows=rows)
    if not chosen and _unrun(rows):
        why = "the budget ran out before anything was found"
        return BestTrial(decision="undecided", chosen=known.now, why=why, rows=rows)
    return BestTrial(decision="keep", chosen=known.now, why=_why_keep(list(finals.values())) + _unrun(rows), rows=rows)


def _unrun(rows: Sequence[TuneRow]) -> str:
    """Return how many configurations were not run because the budget ran out; empty if all were."""
    count = sum(row.out_of_time for row in rows)
    left_out = f"; {count} of {len(rows)} configurations were not run: {_NO_TIME}, and a longer --budget runs them"
    return left_out if count else ""


def _why(row: TuneRow) -> str:
    by = "inputs a second" if row.settings else "steps a second"
    why = f"{row.speedup:.3g} times the {by} of the script now, beyond the noise of its repeats; {row.reason}"
    if any("batch" in name for name in row.settings):
        why += "; another batch is another training: its learning rate may have to change"
    return why


def _why_keep(finals: Sequence[TuneRow]) -> str:
    barred = [row for row in finals if row.state == "barred" and row.speedup_low is not None and row.speedup_low > 1]
    if barred:
        return f"no configuration is faster beyond noise and trains like FP32 ({barred[0].name} is faster, but {barred[0].reason})"
    why = "no configuration is faster than what the script does now, beyond the noise of its repeats"
    open_rows = [row for row in finals if row.state == "not faster" and row.speedup_low and (row.speedup or 0) > _SEEMS]
    if not open_rows:
        return why
    best = max(open_rows, key=lambda row: row.speedup or 0)
    return (
        f"{why}; {best.name} seems {best.speedup:.3g} times as fast, with a 95% interval from {best.speedup_low:.3g} to "
        f"{best.speedup_high:.3g}: more --seeds or an idle machine would narrow it"
    )


def _row(known: SearchKnowledge, configuration: Configuration, **more: Any) -> TuneRow:
    """Return a row with what the latest round of a configuration measured."""
    last = max((trial.round for trial in known.runs if trial.configuration == configuration), default=0)
    trials = [trial for trial in known.runs if trial.configuration == configuration and trial.round == last]
    runs = [known.runs[trial] for trial in trials]
    speeds = [speed for run in runs if (speed := speed_of(run)) is not None]
    ratios = [ratio for trial in trials if (ratio := known.over_now(trial)) is not None]
    facts: dict[str, Any] = {
        "name": configuration.name,
        "policy": configuration.policy,
        "settings": dict(configuration.settings),
        "channels_last": configuration.channels_last,
        "compiles": configuration.compiles,
        "checkpoint": configuration.checkpoint,
        "state": "now",
        "reason": "what the script does now",
        "steps": steps_of(known, last) if runs else 0,
        "step_ms": statistics.median(speed.step_ms for speed in speeds) if speeds else None,
        "inputs": _inputs(known, runs),
        "speedup": None if configuration == known.now or not ratios else speed_up(ratios, num_compared=1).times,
        "memory_bytes": max((n for run in runs if (n := memory_of(run)) is not None), default=None),
    }
    return TuneRow.model_validate(facts | more)


def _inputs(known: SearchKnowledge, runs: Sequence[RunRecord]) -> float | None:
    now = known.runs[Trial(known.now, 0)].input_elements
    mine = next((run.input_elements for run in runs if run.input_elements), None)
    return mine / now if mine and now else None


def _other_row(known: SearchKnowledge, configuration: Configuration) -> TuneRow:
    """Return the row of a configuration that is not a finalist."""
    trials = [trial for trial in known.runs if trial.configuration == configuration]
    if not trials:
        why = pruned(known, configuration)
        return _row(known, configuration, state="not run", reason=why or _NO_TIME, out_of_time=not why)
    last = max(trials, key=lambda trial: trial.round)
    run = known.runs[last]
    if wrong := fault(known, last):
        failed = run.error is not None or bool(run.exit_code)
        return _row(known, configuration, state="failed" if failed else "barred", reason=wrong)
    if known.over_now(last) is None:
        why = "the inputs of its steps were not seen, so they cannot be compared with the present ones"
        return _row(known, configuration, state="barred", reason=why)
    return _row(known, configuration, state="dropped", reason=f"others were faster in round {last.round + 1}")


def _repeats(known: SearchKnowledge, configuration: Configuration) -> list[float]:
    trials = [Trial(configuration, FINAL, repeat) for repeat in range(known.repeats)]
    return [ratio for trial in trials if trial in known.runs and (ratio := known.over_now(trial)) is not None]


def _final_row(known: SearchKnowledge, configuration: Configuration, *, num_compared: int) -> TuneRow:
    """Return the row of a finalist: its speed over repeats, and how it trains."""
    ratios = _repeats(known, configuration)
    wrong = next((w for t in _final_trials(known, configuration) if (w := fault(known, t))), "")
    if len(ratios) < 2:
        why = wrong or "the budget ran out before it was repeated"
        return _row(known, configuration, state="failed" if wrong else "not faster", reason=why)
    gain = speed_up(ratios, num_compared=num_compared)
    interval = {"speedup": gain.times, "speedup_low": gain.low, "speedup_high": gain.high}
    verdict, how = _judged(known, configuration)
    if wrong or verdict in _BARRING:
        return _row(known, configuration, state="barred", reason=wrong or how, verdict=verdict, **interval)
    state = "faster" if gain.faster else "not faster"
    return _row(known, configuration, state=state, reason=how, verdict=verdict, **interval)


def _final_trials(known: SearchKnowledge, configuration: Configuration) -> list[Trial]:
    return [trial for trial in known.runs if trial.configuration == configuration and trial.round == FINAL]


def _judged(known: SearchKnowledge, configuration: Configuration) -> tuple[str | None, str]:
    """Return how a finalist trains compared with FP32 on the same batches: a verdict, and its reason."""
    baseline = Configuration(policy=FP32.name, settings=configuration.settings)
    theirs = [known.runs[trial] for trial in _final_trials(known, baseline)]
    if not theirs:
        return None, "the budget ran out before FP32 was run on the same batches: how it trains is not judged"
    mine = [_relabelled(known.runs[trial], configuration.name) for trial in _final_trials(known, configuration)]
    steps = min(len(run.steps) for run in [*mine, *theirs])
    if steps < FEWEST_STEPS:
        return "undecided", f"{steps} steps are too few to judge how it trains: {FEWEST_STEPS} are needed"
    record = compare([*theirs, *mine], baseline=FP32.name, margin=known.margin, command=[])
    if record.shared_files:
        read = record.shared_files[0].path
        return "undecided", f"its runs read what an earlier one wrote ({read}): how it trains is not judged"
    row: Row = next(row for row in record.rows if row.policy != FP32.name)
    words = row.verdict.replace("_", " ")
    return row.verdict, f"{words}, compared with fp32 over the first {steps} steps: {row.reason}"


def _relabelled(run: RunRecord, name: str) -> RunRecord:
    """Return a finalist's run under a name that distinguishes it from the FP32 runs that it is compared with."""
    policy = AS_IS if run.policy == FP32.name else run.policy
    return run.model_copy(update={"policy": policy, "policy_typed": name, "checkpoint": ""})
