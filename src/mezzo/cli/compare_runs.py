"""The runs of a comparison: those that an earlier command finished, and those of this command."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mezzo.cli import results
from mezzo.cli.progress import shown
from mezzo.cli.resumed import finished_before
from mezzo.cli.script import Script
from mezzo.launch.process.command_signals import Stopped, stoppable
from mezzo.report import formatting as fmt

if TYPE_CHECKING:
    from mezzo.launch.request import Request
    from mezzo.launch.several.resuming import Finished
    from mezzo.launch.several.side_by_side import Engine
    from mezzo.records import RunRecord

_TIMES_LONGER, _LEAST_LIMIT_S = 20.0, 600.0


def begin_or_continue(script: Script, folder: Path, *, metric: str | None, **settings: str) -> Finished:
    """Begin a comparison in the folder, or continue an interrupted one; note which options have changed.

    Raises:
        UsageError: ``--resume`` was typed, and there is nothing to continue.
    """
    finished = finished_before(script, folder, "comparison", say=results.note, metric=metric or "")
    restart = not finished.found or (finished.over and not script.resume)
    if not restart:
        for name, now in settings.items():
            then = finished.options.get(name, "")
            if then != now:
                results.note(f"--{name} was {then} and is now {now}; runs that belong to both are reused")
    finished.begin(settings, restart=restart)
    return finished


def left_to_run(requests: Sequence[Request]) -> tuple[list[RunRecord], list[Request]]:
    """Return the records of runs that are finished, and the requests of those that are not."""
    from mezzo.launch.several.resuming import finished_run

    pairs = [(request, finished_run(request)) for request in requests]
    runs = [record for _, record in pairs if record is not None]
    left = [request for request, record in pairs if record is None]
    if runs:
        rest = f"{fmt.plural(len(left), 'run')} left" if left else "none left to run"
        results.note(f"{fmt.plural(len(runs), 'finished run')} reused, {rest}")
    return runs, left


def limit_s(runs: Sequence[RunRecord]) -> float | None:
    """Return the time limit of the next run; None until a run has ended, since nothing is known about the script before that."""
    ended = [run.duration_s for run in runs if run.error is None]
    return max(_TIMES_LONGER * max(ended), _LEAST_LIMIT_S) if ended else None


def run_all(
    requests: Sequence[Request], *, timeout_s: float | None, engine: Engine, before: Sequence[RunRecord] = ()
) -> list[RunRecord]:
    """Return the records of all runs: those finished ``before``, and those of ``requests`` that end before a signal arrives."""
    from mezzo.records import RunRecord

    runs = list(before)
    with stoppable(), suppress(Stopped), shown(requests) as progress:
        for request, record in engine(requests, lambda: timeout_s or limit_s(runs)):
            assert isinstance(record, RunRecord)
            runs.append(record)
            progress.say_ended(request, record)
    return runs
