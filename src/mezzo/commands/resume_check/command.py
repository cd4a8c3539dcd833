"""``mezzo resume-check``: whether a script's own checkpoints resume the run that was stopped, and which state they lack."""

from __future__ import annotations

import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mezzo.children.signals import stoppable
from mezzo.cli import values
from mezzo.cli.progress import shown
from mezzo.cli.results import note
from mezzo.cli.script import Script
from mezzo.cli.shown_help import HelpPage
from mezzo.cli.values import seconds_of
from mezzo.cli.words import typed
from mezzo.secrets import hidden

if TYPE_CHECKING:
    from mezzo.commands.resume_check.judgement import Judgement
    from mezzo.commands.resume_check.runs import ResumeCheck
    from mezzo.records import ResumeCheckRecord

HELP = HelpPage(
    group="keep",
    says="say whether the script's own checkpoints resume the run that was stopped",
    example="mezzo resume-check --resume-with '--resume last.pt' train.py",
    shown=("--resume-with", "--stop-after", "--notice", "--out", "--json", "-m"),
)


def resume_check(
    script: Script,
    resume_with: Annotated[
        str,
        typer.Option(
            metavar="ARGUMENTS", help="Arguments to add when the script is started again, such as '--resume last.pt'."
        ),
    ] = "",
    stop_after: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="STEP",
            help="Stop after this step. [default: in the middle, half-way between two checkpoints]",
        ),
    ] = None,
    notice: Annotated[
        str,
        typer.Option(
            metavar="DURATION",
            callback=values.duration,
            help="Time between SIGTERM and SIGKILL, for a script that handles SIGTERM.",
        ),
    ] = "10s",
) -> None:
    """Find out whether a training script's own checkpoints resume a run that was stopped, and which state they lack.

    Runs the script, unedited, to its end. Runs it again, stops it in the middle, as a scheduler would, and starts it again, so that
    it resumes from its own checkpoint. Losses, weights and state are compared with the undisturbed run. Each run works in a copy of
    this folder, so your own checkpoints are safe; with {run} in the script's arguments, nothing is copied.

    Exit code 0: it resumes bit for bit; 1: it does not. A script that fails by itself keeps its own exit code.
    """
    from mezzo.launch.runner import shared_imports

    script = _with_relative_path(script)
    began_s, extra_arguments = time.monotonic(), shlex.split(resume_with)
    notice_s = seconds_of(notice, option="--notice", example="10s")
    script.check(None)
    folder = script.folder("resume-check", leaves=("whole", "stopped", "resumed"))
    with stoppable() as stop, shown():
        check = _check(script, folder, extra_arguments, stop_after=stop_after, notice_s=notice_s)
        with shared_imports():
            judgement = check.run()
        record = _record(script, check, judgement, extra_arguments, duration_s=time.monotonic() - began_s)
        script.finish(record, folder)
    if stop.stopped:
        raise typer.Exit(stop.exit_code)
    if judgement is None:
        raise typer.Exit(record.whole.exit_code)
    raise typer.Exit(0 if record.verdict == "exact" else 1)


def _with_relative_path(script: Script) -> Script:
    """Return the script with a relative path if it is inside this folder, so that each run executes the script in its own copy."""
    path = Path(script.target)
    if script.as_module or not path.is_absolute() or not path.resolve().is_relative_to(Path.cwd().resolve()):
        return script
    return replace(script, target=str(path.resolve().relative_to(Path.cwd().resolve())))


def _check(
    script: Script, folder: Path, resume_with: list[str], *, stop_after: int | None, notice_s: float
) -> ResumeCheck:
    from mezzo.commands.resume_check.runs import ResumeCheck

    return ResumeCheck(
        folder=folder,
        target=script.target,
        arguments=tuple(script.arguments or ()),
        resume_with=resume_with,
        make_request=script.request,
        say=note,
        stop_after=stop_after,
        notice_s=notice_s,
    )


def _record(
    script: Script, check: ResumeCheck, judgement: Judgement | None, resume_with: list[str], *, duration_s: float
) -> ResumeCheckRecord:
    from mezzo.commands.resume_check.judgement import Judgement
    from mezzo.commands.resume_check.runs import RESUMED, WHOLE
    from mezzo.records import ResumeCheckRecord

    whole, resumed = check.records[WHOLE], check.records.get(RESUMED)
    if judgement is None:
        judgement = Judgement(
            verdict="undecided", why=f"undisturbed, the script fails: {whole.error or whole.exit_code}"
        )
    return ResumeCheckRecord(
        command=list(typed()),
        script=script.target,
        resume_with=list(hidden(resume_with)),
        num_steps=len(whole.steps),
        stopped_after=check.stopped_after,
        stopped_by=check.stopped_by,
        resumed_steps=0 if resumed is None else len(resumed.steps),
        checkpoints=check.checkpoints,
        folder=str(check.folder),
        whole=whole,
        resumed=resumed,
        environment=whole.environment,
        duration_s=duration_s,
        **vars(judgement),
    )
