"""``mezzo check``: which precision a script should train in, with one answer."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from mezzo.children.signals import Stopped, stoppable
from mezzo.cli import options, values
from mezzo.cli.machines import Machine, how_placed, machine_of, name_of
from mezzo.cli.options import Jobs, On, engine_of
from mezzo.cli.progress import shown
from mezzo.cli.results import write
from mezzo.cli.script import Script, finished_before
from mezzo.cli.shown_help import HelpPage
from mezzo.cli.values import Budget, clock, seconds_of
from mezzo.cli.words import with_value
from mezzo.commands.predict.traced import predicted_for
from mezzo.errors import PolicyError, UsageError

if TYPE_CHECKING:
    from mezzo.commands.check.answer import Case
    from mezzo.commands.check.plan import Offered
    from mezzo.commands.check.runs import Check, CheckSettings
    from mezzo.devices import Device
    from mezzo.gpus import Gpu
    from mezzo.policy import Policy
    from mezzo.records import Answer, CheckRecord, Note
    from mezzo.studies.loop import Finished
    from mezzo.studies.side_by_side import Engine


HELP = HelpPage(
    group="start",
    says="say which precision to train in: one answer",
    example="mezzo check --budget 5m train.py --epochs 3",
    shown=("--budget", "--gpu", "--policies", "--metric", "--write-patch", "--out", "--resume", "-m"),
)


_DEFAULT_SEEDS = 3
_TAIL = 12
"""Lines of a failed script's output that are shown."""


CheckGpu: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="GPU",
        callback=values.gpu,
        help="The GPU to answer for, such as a100-80gb. [default: this machine's device]",
    ),
]
CheckPolicies: TypeAlias = Annotated[
    str | None,
    options.policies_option(
        f"Policies to try in addition to fp32, separated by commas. Presets: {options.PRESETS_HELP} "
        "[default: those that the device offers]"
    ),
]
CheckSeeds: TypeAlias = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Runs per policy, each with its own seed. [default: 3, fewer if time is short]"
    ),
]
CheckWritePatch: TypeAlias = Annotated[
    bool, typer.Option("--write-patch", help="Also write the change to the script as a diff, after trying it.")
]


def check(
    script: Script,
    budget: options.BudgetOption = "10m",
    gpu: CheckGpu = None,
    policies: CheckPolicies = None,
    seeds: CheckSeeds = None,
    write_patch: CheckWritePatch = False,
    metric: options.MetricOption = None,
    jobs: Jobs = None,
    on: On = None,
) -> None:
    """Find out which precision a training script should use, what that gains, and what to type next.

    Runs the script, unedited, in FP32 and in the lower precisions that the device (or --gpu) offers. Where one fails, it finds the
    cause and repairs what can be repaired. It ends with one answer.

    A script that takes too long for the budget is stopped after its first steps, the same number in every run. Ctrl-C keeps what is
    finished: the same command with the same --out continues from there. Exit code 0: there is an answer (staying in FP32 is
    one); 1: it is undecided, or FP32 itself does not train. A script that fails by itself keeps its own exit code.
    """
    from mezzo.gpus import gpu_named

    options.check_metric(metric)
    named = {} if policies is None else _named(policies)
    opts = CheckOptions(
        script=script,
        budget=Budget(seconds_of(budget, option="--budget", example="10m")),
        gpu=None if gpu is None else gpu_named(gpu),
        policies=None if policies is None else list(named),
        seeds=seeds or _DEFAULT_SEEDS,
        metric=metric,
    )
    opts.script.check(*named.values())
    engine = engine_of(jobs, on)
    if write_patch and on is not None:
        raise UsageError(
            f"--write-patch with --on {on}; allowed: one of them, because a patch is tried on this machine",
            hint="leave out --write-patch, and type mezzo check --write-patch on a machine like the workers",
        )
    folder = opts.script.folder("check")
    with stoppable() as stop, shown() as progress:
        opts = replace(opts, budget=replace(opts.budget, console=progress.console))
        try:
            with engine.opened(folder):
                record, code = _checked(opts, folder, engine)
        except Stopped as stopped:
            script.say_stopped(f"stopped by {stop.name}; what is finished is kept", folder)
            raise typer.Exit(stopped.exit_code) from None
        if write_patch:
            left_s = opts.budget.seconds - opts.budget.spent_s
            from mezzo.commands.check.patches import with_patch  # NumPy

            record = with_patch(opts.script, record, folder, left_s=left_s, say=opts.budget.say)
        opts.script.finish(record, folder)
    raise typer.Exit(stop.exit_code or code)


def _named(policies: str) -> dict[str, Policy | None]:
    """Return the policies of ``--policies`` by the text that records have for them.

    Raises:
        PolicyError: one is unknown, or there is none other than FP32.
    """
    from mezzo.launch.request import policy_text

    named = [values.parse_policy(text) for text in values.names_in(policies)]
    by_text = {policy_text(policy): policy for policy in named}
    if not set(by_text) - {"fp32"}:
        raise PolicyError(
            f"--policies {policies!r} names nothing to compare with fp32",
            hint=f"type: {with_value('--policies', 'bf16,fp16')}",
        )
    return by_text


def _checked(opts: CheckOptions, folder: Path, engine: Engine) -> tuple[CheckRecord, int]:
    """Run what is needed; return the record and the exit code.

    Raises:
        Stopped: a signal has stopped the command.
    """
    budget = opts.budget
    budget.say(f"{Path(opts.script.target).name}: finding out what {name_of(engine)} can do")
    from mezzo.commands.check.runs import Check
    from mezzo.gpus import find_gpu
    from mezzo.launch.runner import import_ahead
    from mezzo.studies.loop import Study

    import_ahead(opts.script.request(None, folder=folder))
    machine = machine_of(engine, folder)
    if opts.gpu is not None and find_gpu(machine.device.name) is opts.gpu:
        opts = replace(opts, gpu=None, beside=opts.gpu)  # the machine has it: measuring is better than bounding
    offers = _offers(opts, machine)
    _say_offers(budget, opts, machine, offers)
    settings = _settings(opts, offers, budget_s=time_for_runs_s(opts, machine))
    finished = _finished(opts, folder)
    checking = Check(settings=settings, folder=folder, study=Study(engine, finished), say=budget.say, keep=write)
    checking.run()
    record = check_record(opts, checking, offers, machine, engine)
    finished.forget()
    first = checking.known.runs[0] if checking.known.runs else None
    if first is not None and first.error is not None:
        _show_output(checking)
    if first is not None and first.exit_code and not checking.too_slow:
        return record, first.exit_code
    return record, 0 if record.answer.decision in ("use", "stay") else 1


def _offers(opts: CheckOptions, machine: Machine) -> list[Offered]:
    from mezzo.children.script_text import own_sources
    from mezzo.commands.check.plan import BASELINE, THE_BASELINE, Offered, offered, own_amp

    if opts.policies is None:
        sources = own_sources(opts.script.target, kind=opts.script.kind)
        return offered(machine.device, target=None if opts.gpu is None else opts.gpu.device, own_amp=own_amp(sources))
    why = "--policies names it"
    return [THE_BASELINE, *(Offered(text, True, why) for text in opts.policies if text != BASELINE)]


def _say_offers(budget: Budget, opts: CheckOptions, machine: Machine, offers: list[Offered]) -> None:
    here = machine.device
    budget.say(f"{machine.name} trains on {here.kind}, {here.name}; {formats_of(here)}")
    if opts.gpu is not None:
        budget.say(
            f"the answer is for {opts.gpu.label}; gains from hardware that {machine.name} lacks are bounded, not measured"
        )
    for offer in offers:
        budget.say(f"{offer.note.what} {offer.note.value}: {offer.reason}")


def _settings(opts: CheckOptions, offers: list[Offered], *, budget_s: float) -> CheckSettings:
    from mezzo.commands.check.plan import tried
    from mezzo.commands.check.runs import CheckSettings

    script = opts.script
    return CheckSettings(
        policies=tuple(tried(offers)),
        seeds=opts.seeds,
        budget_s=budget_s,
        metric=opts.metric,
        make_request=script.request,
        arguments=tuple(script.arguments or ()),
        framework=script.framework,
    )


def _finished(opts: CheckOptions, folder: Path) -> Finished:
    """Return what an interrupted check of the same script left in the folder."""
    finished = finished_before(opts.script, folder, "check", say=opts.budget.say, metric=opts.metric or "")
    if len(finished):
        opts.budget.say(f"{len(finished)} finished parts of the interrupted check are reused")
    finished.write()
    return finished


def _show_output(checking: Check) -> None:
    """Print the end of what a failed script printed."""
    output = Path(checking.stages[0].folder) / "output.log"
    try:
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines[-_TAIL:]:
        print(f"  | {line}", file=sys.stderr)


# --- The record of a check: its answer, what limits it, and the commands on the same script -------------------------------------

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
    beside: Gpu | None = None
    """This machine's GPU, if ``--gpu`` names it: its prediction is shown beside what is measured."""


def formats_of(here: Device) -> str:
    """Return which formats a device computes in, and how."""
    from mezzo.formats import BF16, E4M3, FP16, TF32

    levels: dict[str, list[str]] = {}
    for name, fmt in {"BF16": BF16, "FP16": FP16, "TF32": TF32, "FP8": E4M3}.items():
        levels.setdefault(here.support(fmt).level, []).append(name)
    return "; ".join(f"{level}: {', '.join(names)}" for level, names in levels.items())


def predicted_gpu(opts: CheckOptions, machine: Machine) -> Gpu | None:
    """Return the GPU for which the answer predicts gains; None if this machine's are measured."""
    from mezzo.gpus import GPUS

    return opts.gpu or (GPUS[_REFERENCE] if machine.device.kind == "cpu" else None)


def time_for_runs_s(opts: CheckOptions, machine: Machine) -> float:
    """Return how long the runs of a check may take from now on, so that the command ends within its budget."""
    predicted = bool(predicted_gpu(opts, machine) or opts.beside) and opts.script.framework == "torch"
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
    card = gpu or opts.beside
    if card is not None and not checking.too_slow:
        limit_s = max(_LEAST_S, opts.budget.seconds - opts.budget.spent_s - _WRITING_S)
        predicted = predicted_for(opts.script, known.runs, [card], opts.budget.say, limit_s=limit_s)
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
