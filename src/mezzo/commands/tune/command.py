"""``mezzo tune``: the fastest configuration of a script on this machine, measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from mezzo.children.signals import Stopped, stoppable
from mezzo.cli import options, values
from mezzo.cli.machines import check_times, how_placed, machine_of
from mezzo.cli.options import Jobs, On, engine_of
from mezzo.cli.progress import shown
from mezzo.cli.script import Script, finished_before
from mezzo.cli.shown_help import HelpPage
from mezzo.cli.values import Budget, clock, seconds_of
from mezzo.cli.words import typed, value_after, with_value
from mezzo.commands.tune.ruled_out import RuledOut, gpu_of, rule_out
from mezzo.errors import ScriptError, UsageError, nearest

if TYPE_CHECKING:
    from mezzo.commands.tune.answer import BestTrial
    from mezzo.commands.tune.plan import Changes, SearchKnowledge
    from mezzo.commands.tune.runs import Tune
    from mezzo.devices import Device
    from mezzo.gpus import Gpu
    from mezzo.policy import Policy
    from mezzo.records import Note, RunRecord, TuneRecord
    from mezzo.studies.side_by_side import Engine

HELP = HelpPage(
    group="measure",
    says="find the fastest way to run the script here",
    example="mezzo tune --vary batch-size=32,64 train.py",
    shown=("--vary", "--policies", "--changes", "--memory", "--budget", "--out", "--resume", "-m"),
)

_CHANGES = "channels-last,compile"
_VARY = "batch-size=32,64,128"
_KERAS_TIMES = "the time of Keras scripts is not predicted"


TuneVary: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUES",
        help="Values to try for an option of the script, such as batch-size=32,64,128. May be repeated.",
    ),
]
TunePolicies: TypeAlias = Annotated[
    str | None,
    options.policies_option(
        "Policies to try, separated by commas. [default: those that this device computes natively]"
    ),
]
TuneChanges: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="CHANGES",
        help="Changes to the models to try: channels-last, compile, channels-last+compile, separated by commas; or none.",
    ),
]
TuneCheckpoint: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="PLANS",
        callback=values.plans,
        help="Activation checkpointing to try: full, every-2, selective, or the memory to keep for the backward pass, such as 12GiB, "
        "separated by commas.",
    ),
]
TuneMemory: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", callback=values.size, help="The most memory that a configuration may use, such as 12GiB."
    ),
]
TuneGpu: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="GPU",
        callback=values.gpu_or_none,
        help="The GPU to train on later, or none: configurations predicted not to fit there, or to be much slower, are not run. "
        "[default: this machine's]",
    ),
]
TuneSteps: TypeAlias = Annotated[
    int,
    typer.Option(metavar="N", min=10, help="Steps of each run of the first round; finalists run four times as many."),
]


def tune(
    script: Script,
    vary: TuneVary = None,
    policies: TunePolicies = None,
    changes: TuneChanges = _CHANGES,
    checkpoint: TuneCheckpoint = None,
    memory: TuneMemory = None,
    gpu: TuneGpu = None,
    budget: options.BudgetOption = "10m",
    steps: TuneSteps = 20,
    seeds: Annotated[int, typer.Option(metavar="N", min=2, help="Runs of each finalist, each with its own seed.")] = 3,
    jobs: Jobs = None,
    on: On = None,
) -> None:
    """Find the fastest way to run a training script on this machine, and the command for it.

    Runs the script, unedited, for a few steps in every combination of precision policy, values of its own options (--vary), memory
    layout, torch.compile and activation checkpointing (--checkpoint). The fastest run again, longer and with several seeds, next to the
    script as it is now, and must train like FP32.

    Ctrl-C keeps what is finished: the same command with the same --out continues from there. Exit code 0: there is an answer (keeping
    the script as it is counts as one); 1: there was no time for one. A script that fails by itself keeps its own exit code.
    """
    from mezzo.commands.tune.plan import SearchKnowledge, grid
    from mezzo.measure.checkpointing.wanted import bytes_of_text

    time_left = Budget(seconds_of(budget, option="--budget", example="10m"))
    varied, target_gpu = _varied(vary or []), _target(gpu)
    limit_bytes, plans = None if memory is None else bytes_of_text(memory, option="--memory"), _plans(checkpoint)
    named = None if policies is None else [values.parse_policy(name) for name in values.names_in(policies)]
    script.check(*(named or []))
    unchanged = _in_keras(script, changes, checkpoint, memory) if script.framework == "keras" else []
    changed = [] if unchanged else _changes(changes)
    engine = engine_of(jobs, on)
    check_times(engine)
    folder = script.folder("tune")
    with stoppable() as stop, shown() as progress:
        time_left = replace(time_left, console=progress.console)
        try:
            with engine.opened(folder):
                here = machine_of(engine, folder).device
                notes, chosen = _policies(here, named)
                configurations = grid(chosen, varied, changed, script.arguments or [], checkpoints=plans)
                target = _KERAS_TIMES if unchanged else gpu_of(target_gpu, here)
                ruled_out = rule_out(script, configurations, target, limit_bytes, time_left)
                known = SearchKnowledge(
                    configurations=tuple(configurations),
                    steps=steps,
                    repeats=seeds,
                    memory_bytes=limit_bytes,
                    ruled_out=ruled_out.reasons,
                )
                tuning = _tuning(script, folder, time_left, known, engine)
                notes += [*unchanged, *ruled_out.notes, *how_placed(engine)]
                record, code = _tuned(script, tuning, time_left, notes)
                record = _with_predictions(record, ruled_out)
        except Stopped as stopped:
            script.say_stopped(f"stopped by {stop.name}; what is finished is kept", folder)
            raise typer.Exit(stopped.exit_code) from None
        script.finish(record, folder)
    raise typer.Exit(stop.exit_code or code)


def _vary_joined(text: str) -> str:
    """Return the command with ``--vary NAME VALUES`` as one word, or with an example."""
    following = value_after(text, typed()) or ""
    if "=" in text or not following or following.startswith("-") or following.endswith(".py"):
        return with_value("--vary", _VARY)
    return with_value("--vary", f"{text}={following}", skipped=(following,))


def _varied(texts: list[str]) -> dict[str, list[str]]:
    varied: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name, listed = name.strip().lstrip("-"), [value.strip() for value in values.split(",")]
        if not (name and equals and all(listed)):
            raise UsageError(
                f"--vary {text!r}; allowed: an option of the script and its values",
                hint=f"type: {_vary_joined(text)}",
            )
        varied.setdefault(name, []).extend(listed)
    return varied


def _changes(text: str) -> list[Changes]:
    from mezzo.commands.tune.plan import CHANGES

    names = [name.strip() for name in text.split(",")]
    if names == ["none"]:
        return []
    for name in names:
        if name not in CHANGES:
            raise UsageError(
                f"--changes {text!r} names {name!r}; {nearest(name, [*CHANGES, 'none'])}",
                hint=f"type: {with_value('--changes', _CHANGES)}",
            )
    return [CHANGES[name] for name in names]


def _in_keras(script: Script, changes: str, checkpoint: str | None, memory: str | None) -> list[Note]:
    """Return why a Keras script's models stay as they are: policies and values of its own options are tried.

    Raises:
        ScriptError: an option asks for what Mezzo cannot change or measure in Keras.
    """
    from mezzo.records import Note

    if checkpoint is not None:
        script.check_supported("--checkpoint")
    if changes not in (_CHANGES, "none"):
        script.check_supported("--compile" if "compile" in changes else "--channels-last")
    if memory is not None:
        raise ScriptError(
            f"--memory {memory} was given for a Keras script, whose peak memory is not measured; allowed: PyTorch scripts",
            hint="leave --memory out",
        )
    why = "the script itself decides on them: jit_compile of its compile, data_format of its layers"
    return [Note(what="not tried", value="changes to the models", reason=why)]


def _target(gpu: str | None) -> Gpu | str | None:
    from mezzo.gpus import gpu_named

    return gpu if gpu is None or gpu.lower() == values.NONE else gpu_named(gpu)


def _plans(text: str | None) -> list[str]:
    from mezzo.measure.checkpointing.wanted import check_wanted

    return [] if text is None else [check_wanted(one) for one in values.names_in(text)]


def _policies(here: Device, named: list[Policy | None] | None) -> tuple[list[Note], list[str]]:
    """Return what is left out, with reasons, and the policies to try in addition to the script's own precision."""
    from mezzo.formats import BF16, E4M3, FP16, TF32
    from mezzo.launch.request import policy_text
    from mezzo.records import Note

    if named is not None:
        return [], [policy_text(policy) for policy in named]
    left_out, native = [], []
    for name, fmt in {"tf32": TF32, "bf16": BF16, "fp16": FP16, "fp8": E4M3}.items():
        support = here.support(fmt)
        if support.level == "native":
            native.append(name)
            continue
        slow = "; emulated, it is never faster" if support.level == "emulated" else ""
        left_out.append(Note(what=name, value="left out", reason=f"{here.name}: {support.reason}{slow}"))
    return left_out, native


def _tuning(
    script: Script,
    folder: Path,
    budget: Budget,
    known: SearchKnowledge,
    engine: Engine,
) -> Tune:
    from mezzo.commands.tune.runs import Tune
    from mezzo.studies.loop import Study

    finished = finished_before(script, folder, "search", say=budget.say, steps=str(known.steps))
    if len(finished):
        budget.say(f"{len(finished)} finished runs of the interrupted search are reused")
    finished.write()
    budget.say(f"{len(known.configurations)} configurations, including the script as it is")
    return Tune(
        known=known,
        budget_s=max(budget.seconds - budget.spent_s, 1.0),
        folder=folder,
        study=Study(engine, finished),
        make_request=script.request,
        arguments=tuple(script.arguments or ()),
        say=budget.say,
    )


def _tuned(script: Script, tuning: Tune, budget: Budget, left_out: list[Note]) -> tuple[TuneRecord, int]:
    """Run what is needed; return the record and the exit code."""
    from mezzo.commands.tune.answer import answered
    from mezzo.commands.tune.plan import Trial
    from mezzo.records import TuneRecord

    known = tuning.run()
    best = answered(known)
    tuning.study.finished.forget()
    errors = [run.error for run in known.runs.values() if run.error is not None]
    command, why = _next(script, best, budget, errors)
    first = known.runs.get(Trial(known.now, 0))
    assert first is not None
    record = TuneRecord(
        command=list(script.command),
        script=script.target,
        decision=best.decision,
        chosen=best.chosen.name,
        why=best.why,
        next_command=command,
        next_why=why,
        rows=best.rows,
        trials=tuning.trials,
        memory_limit_bytes=known.memory_bytes,
        budget_s=budget.seconds,
        steps=known.steps,
        repeats=known.repeats,
        notes=[*_hints(known.runs.values()), *left_out, *_limits(known.steps)],
        environment=first.environment,
        duration_s=budget.spent_s,
    )
    if best.decision == "failed":
        return record, first.exit_code or 1
    return record, 0 if best.decision in ("use", "keep") else 1


def _with_predictions(record: TuneRecord, ruled_out: RuledOut) -> TuneRecord:
    """Return the record with each prediction beside its measurement, if both are of the same GPU."""
    from mezzo.gpus import find_gpu

    here = find_gpu(record.environment.gpu or "")
    if here is None or here.name != ruled_out.gpu:
        return record
    from mezzo.commands.tune.forecast import beside

    return record.model_copy(update={"notes": [*record.notes, *beside(ruled_out.found, record.rows)]})


def _hints(runs: Iterable[RunRecord]) -> list[Note]:
    """Return what to do about the errors of runs."""
    from mezzo.records import Note

    errors = {run.hint: str(run.error).splitlines()[0] for run in runs if run.hint}
    return [Note(what="to fix it", value=hint, reason=error) for hint, error in errors.items()]


def _limits(steps: int) -> list[Note]:
    from mezzo.commands.tune.plan import TIMES_LONGER
    from mezzo.records import Note

    judged = f"the first {TIMES_LONGER * steps} steps of each seed"
    return [
        Note(what="judged by", value=judged, reason="mezzo compare judges whole runs"),
        Note(
            what="not tried",
            value="CUDA graphs of whole steps",
            reason="a captured step needs its batch at fixed addresses and must not read a number on the host, so only the script can "
            "capture it: session.capture",
        ),
    ]


def _next(script: Script, best: BestTrial, budget: Budget, errors: Sequence[str]) -> tuple[str, str]:
    """Return the command to type next, and what it does."""
    from mezzo.error_texts import asks_for_a_gpu
    from mezzo.records import AS_IS

    typed = script.retyped
    if best.decision == "undecided":
        more = f"{-(-int(3 * budget.seconds) // 60)}m"
        return typed.under("tune", budget=more), f"has more time than {clock(budget.seconds)}"
    chosen = best.chosen
    typed = replace(typed, arguments=tuple(chosen.arguments(script.arguments or [])))
    if best.decision == "use":
        changes = ({"channels-last": ""} if chosen.channels_last else {}) | ({"compile": ""} if chosen.compiles else {})
        changes |= {"checkpoint": chosen.checkpoint} if chosen.checkpoint else {}
        if chosen.policy == AS_IS and not changes:
            return typed.alone(), "trains this way, without Mezzo"
        return typed.under("run", policy=chosen.policy, **changes), "trains this way, with the script unedited"
    if best.decision == "keep":
        return typed.alone(), "runs the script as it is"
    if any(map(asks_for_a_gpu, errors)):
        return typed.under("predict"), "predicts how fast it would be on other GPUs"
    return typed.alone(), "shows what fails, without Mezzo"
