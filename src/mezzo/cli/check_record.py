"""The record of a check: its answer, what limits it, and the commands on the same script."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mezzo.cli.budget import Budget, clock
from mezzo.cli.machines import Machine, how_placed
from mezzo.cli.predictions.real_gpus import predicted_for
from mezzo.cli.script import Script

if TYPE_CHECKING:
    from mezzo.devices import Device
    from mezzo.gpus import Gpu
    from mezzo.launch.several.check import Check
    from mezzo.launch.several.side_by_side import Engine
    from mezzo.measure.check.answer import Case
    from mezzo.records import Answer, CheckRecord, Reason

_REFERENCE = "a100-80gb"
"""The GPU that gains are bounded for if none is named and this machine has none."""
_LEAST_PREDICTION_S = 30.0
"""Least time for a prediction, even if the runs took the whole budget: most scripts are traced in a third of it."""
_TIMES_MORE = 6
"""If the budget is too short, the suggested one is longer by this factor."""


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """The options of a check, as read."""

    script: Script
    budget: Budget
    gpu: Gpu | None
    policies: list[str] | None
    """The values of ``--policies``, under the names that records use."""
    seeds: int
    metric: str | None


def formats_of(here: Device) -> str:
    """Return which formats a device computes in, and how."""
    from mezzo.formats import BF16, E4M3, FP16, TF32

    levels: dict[str, list[str]] = {}
    for name, fmt in {"BF16": BF16, "FP16": FP16, "TF32": TF32, "FP8": E4M3}.items():
        levels.setdefault(here.support(fmt).level, []).append(name)
    return "; ".join(f"{level}: {', '.join(names)}" for level, names in levels.items())


def check_record(
    asked: CheckOptions, checking: Check, offers: list[Reason], machine: Machine, engine: Engine
) -> CheckRecord:
    """Return the record of a check that is over."""
    from mezzo.gpus import GPUS
    from mezzo.launch.several.plan import MARGIN, repairs, undone
    from mezzo.measure.check.answer import Case, answered
    from mezzo.measure.compare import compare as judge
    from mezzo.measure.doctor import device_report
    from mezzo.records import CheckRecord, CheckStage

    known, here = checking.known, machine.device
    comparison = judge(list(known.runs), baseline=known.baseline, margin=MARGIN, command=list(asked.script.command))
    gpu = asked.gpu or (GPUS[_REFERENCE] if here.kind == "cpu" else None)
    if gpu is not None and not checking.too_slow:
        limit_s = max(_LEAST_PREDICTION_S, asked.budget.seconds - asked.budget.spent_s)
        found_there = predicted_for(asked.script, known.runs, [gpu], asked.budget.say, limit_s=limit_s)
        comparison = comparison.model_copy(update={"real_gpus": found_there})
    case = Case(
        comparison=comparison,
        device=here.name,
        command=_commands(asked),
        gpu=gpu,
        for_gpu=asked.gpu is not None,
        diagnosed={policy: one for policy, one in known.diagnosed.items() if one is not None},
        repairs=repairs(known),
        undone=undone(known),
        more_time=f"{math.ceil(_TIMES_MORE * asked.budget.seconds / 60)}m",
        too_slow=checking.too_slow,
    )
    answer = answered(case)
    doctor = CheckStage(
        name="doctor",
        what=machine.name,
        why="which policies can be tried",
        outcome=f"{here.name}; {formats_of(here)}",
    )
    return CheckRecord(
        command=list(asked.script.command),
        script=asked.script.target,
        answer=answer,
        device=device_report(here, facts=machine.facts),
        gpu="" if gpu is None else gpu.label,
        offered=offers,
        budget_s=asked.budget.seconds,
        seeds=asked.seeds,
        first_steps=checking.first_steps,
        stages=[doctor, *checking.stages],
        comparison=comparison,
        notes=[] if answer.decision == "failed" else [*_notes(asked, checking, case, answer), *how_placed(engine)],
        environment=comparison.environment,
        duration_s=asked.budget.spent_s,
    )


def _notes(asked: CheckOptions, checking: Check, case: Case, answer: Answer) -> list[Reason]:
    from mezzo.records import Reason

    notes: list[Reason] = []
    if checking.first_steps is not None:
        why = f"the whole script does not fit the budget with {asked.seeds} seeds; what happens later is not judged"
        notes.append(Reason(what="steps", value=f"each run's first {checking.first_steps} only", reason=why))
    if asked.metric is None:
        why = "name what counts for you, as --metric 'acc=([0-9.]+)', and it is judged as well"
        notes.append(Reason(what="judged by", value="the training loss", reason=why))
    elif all(run.metric is None for run in checking.known.runs):
        why = f"the script printed nothing that --metric {asked.metric!r} matches in its first steps"
        notes.append(Reason(what="judged by", value="the training loss", reason=why))
    if case.undone:
        why = f"the budget of {clock(asked.budget.seconds)} is too short for it"
        notes.append(Reason(what="left out", value=case.undone, reason=why))
    if not checking.known.observable:
        why = f"mezzo diagnose, ranges and fallback do not inspect {checking.known.runs[0].framework}"
        notes.append(Reason(what="left out", value="diagnosis, ranges and fallback", reason=why))
    there = next((gain for gain in answer.gains if gain.kind != "measured"), None)
    if asked.gpu is None and there is not None:
        notes.append(Reason(what="speed", value="on another GPU", reason="add --gpu NAME to this command"))
    failed = case.comparison.real_gpus
    if failed is not None and failed.reason and there is not None:
        notes.append(Reason(what="speed", value="a ceiling instead of a prediction", reason=failed.reason))
    return notes


def _commands(asked: CheckOptions) -> Callable[..., str]:
    """Return the function that writes a command on the same script, given the command's name and its options with their values."""
    typed = asked.script.retyped

    def command(kind: str, *given: str) -> str:
        if kind == "python":
            return typed.alone()
        options = zip(given[::2], given[1::2], strict=True)
        return typed.under(kind, **{name.removeprefix("--"): value for name, value in options})

    return command
