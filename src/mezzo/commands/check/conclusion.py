"""The record of a check: its answer, what limits it, and the commands on the same script."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mezzo.cli.machines import Machine, how_placed
from mezzo.cli.script import Script
from mezzo.cli.values import Budget, clock
from mezzo.commands.predict.traced import predicted_for

if TYPE_CHECKING:
    from mezzo.commands.check.answer import Case
    from mezzo.commands.check.plan import Offered
    from mezzo.commands.check.runs import Check
    from mezzo.devices import Device
    from mezzo.gpus import Gpu
    from mezzo.records import Answer, CheckRecord, Note
    from mezzo.studies.side_by_side import Engine


_REFERENCE = "a100-80gb"
"""The GPU for which gains are bounded if none is named and this machine has none."""
_FOR_PREDICTION, _MOST_FOR_PREDICTION_S = 0.25, 30.0
"""Share of the budget that is kept for a prediction, and the most: most scripts are traced in a third of that."""
_WRITING_S = 2.0
"""Time for the answer and its page."""
_LEAST_S = 1.0
_LONGER_BUDGET = 6
"""If the budget is too short, the suggested one is this many times as long."""


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """The parsed options of a check."""

    script: Script
    budget: Budget
    gpu: Gpu | None
    policies: list[str] | None
    """The values of ``--policies``, by the names that records use."""
    seeds: int
    metric: str | None


def formats_of(here: Device) -> str:
    """Return which formats a device computes in, and how."""
    from mezzo.formats import BF16, E4M3, FP16, TF32

    levels: dict[str, list[str]] = {}
    for name, fmt in {"BF16": BF16, "FP16": FP16, "TF32": TF32, "FP8": E4M3}.items():
        levels.setdefault(here.support(fmt).level, []).append(name)
    return "; ".join(f"{level}: {', '.join(names)}" for level, names in levels.items())


def predicted_gpu(opts: CheckOptions, machine: Machine) -> Gpu | None:
    """Return the GPU whose gains are predicted; None if this machine's are measured."""
    from mezzo.gpus import GPUS

    return opts.gpu or (GPUS[_REFERENCE] if machine.device.kind == "cpu" else None)


def time_for_runs_s(opts: CheckOptions, machine: Machine) -> float:
    """Return how long the runs of a check may take from now on, so that the command ends within its budget."""
    predicted = predicted_gpu(opts, machine) is not None and opts.script.framework == "torch"
    kept_s = min(_FOR_PREDICTION * opts.budget.seconds, _MOST_FOR_PREDICTION_S) if predicted else _WRITING_S
    return max(opts.budget.seconds - opts.budget.spent_s - kept_s, _LEAST_S)


def check_record(
    opts: CheckOptions, checking: Check, offers: list[Offered], machine: Machine, engine: Engine
) -> CheckRecord:
    """Return the record of a finished check."""
    from mezzo.commands.check.answer import Case, answered
    from mezzo.commands.check.plan import MARGIN, repairs, undone
    from mezzo.commands.compare.judge import compare as judge
    from mezzo.measure.doctor import device_report
    from mezzo.records import CheckRecord, CheckStage

    known, here, gpu = checking.known, machine.device, predicted_gpu(opts, machine)
    comparison = judge(list(known.runs), baseline=known.baseline, margin=MARGIN, command=list(opts.script.command))
    if gpu is not None and not checking.too_slow:
        limit_s = max(_LEAST_S, opts.budget.seconds - opts.budget.spent_s - _WRITING_S)
        predicted = predicted_for(opts.script, known.runs, [gpu], opts.budget.say, limit_s=limit_s)
        comparison = comparison.model_copy(update={"real_gpus": predicted})
    case = Case(
        comparison=comparison,
        device=here.name,
        command=_commands(opts),
        gpu=gpu,
        for_gpu=opts.gpu is not None,
        diagnosed={policy: diagnosis for policy, diagnosis in known.diagnosed.items() if diagnosis is not None},
        repairs=repairs(known),
        undone=undone(known),
        more_time=f"{math.ceil(_LONGER_BUDGET * opts.budget.seconds / 60)}m",
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
        command=list(opts.script.command),
        script=opts.script.target,
        answer=answer,
        device=device_report(here, facts=machine.facts),
        gpu="" if gpu is None else gpu.label,
        offered=[offer.note for offer in offers],
        budget_s=opts.budget.seconds,
        seeds=opts.seeds,
        first_steps=checking.first_steps,
        stages=[doctor, *checking.stages],
        comparison=comparison,
        notes=[] if answer.decision == "failed" else [*_notes(opts, checking, case, answer), *how_placed(engine)],
        environment=comparison.environment,
        duration_s=opts.budget.spent_s,
    )


def _notes(opts: CheckOptions, checking: Check, case: Case, answer: Answer) -> list[Note]:
    from mezzo.records import Note

    notes: list[Note] = []
    if checking.first_steps is not None:
        why = f"the whole script does not fit the budget with {opts.seeds} seeds; what happens later is not judged"
        notes.append(Note(what="steps", value=f"only the first {checking.first_steps} of each run", reason=why))
    if opts.metric is None:
        why = "to have a metric judged as well, name it, as in --metric 'acc=([0-9.]+)'"
        notes.append(Note(what="judged by", value="the training loss", reason=why))
    elif all(run.metric is None for run in checking.known.runs):
        why = f"the script printed nothing that --metric {opts.metric!r} matches in its first steps"
        notes.append(Note(what="judged by", value="the training loss", reason=why))
    if case.undone:
        why = f"the budget of {clock(opts.budget.seconds)} is too short for it"
        notes.append(Note(what="left out", value=case.undone, reason=why))
    left_out = [name for name in ("diagnose", "ranges", "fallback") if name not in checking.known.inspecting]
    if left_out:
        names = ", ".join(left_out[:-1]) + f" and {left_out[-1]}"
        why = f"mezzo {names} do not inspect {checking.known.runs[0].framework}"
        notes.append(Note(what="left out", value=names.replace("diagnose", "diagnosis"), reason=why))
    not_measured = any(gain.kind != "measured" for gain in answer.gains)
    if opts.gpu is None and not_measured:
        notes.append(Note(what="speed", value="on another GPU", reason="add --gpu NAME to this command"))
    predicted = case.comparison.real_gpus
    if predicted is not None and predicted.reason and not_measured:
        notes.append(Note(what="speed", value="a ceiling instead of a prediction", reason=predicted.reason))
    return notes


def _commands(opts: CheckOptions) -> Callable[..., str]:
    """Return a function that writes a command on the same script, given the command's name and its options with their values."""
    typed = opts.script.retyped

    def command(kind: str, *given: str) -> str:
        if kind == "python":
            return typed.alone()
        options = zip(given[::2], given[1::2], strict=True)
        return typed.under(kind, **{name.removeprefix("--"): value for name, value in options})

    return command
