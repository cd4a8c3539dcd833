"""Weights & Biases: one run for each record, those of a comparison in one group."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from mezzo.errors import UsageError
from mezzo.report.tracking.inflight import SUFFIX, Flight
from mezzo.report.tracking.job import TrackedRecord
from mezzo.report.tracking.logged import Logged

PACKAGE = INSTALL = "wandb"
_NO_SERVER = ("offline", "dryrun", "disabled")
"""Values of WANDB_MODE with which nothing is sent."""
_LONGEST_TAG = 64


def check(place: str) -> None:
    """Refuse to start without a login, which wandb would ask for after the script has run.

    Raises:
        UsageError: there is no login, and WANDB_MODE is not offline.
    """
    if os.environ.get("WANDB_MODE") in _NO_SERVER:
        return
    import wandb

    if not wandb.login(prompt=False, verify=False):
        raise UsageError(
            "--log-to wandb: wandb has no login on this machine",
            hint="type: wandb login, or set WANDB_MODE=offline and upload later with wandb sync",
        )


def send(what: Logged, job: TrackedRecord, place: str) -> str:
    """Log to the project ``place``, or WANDB_PROJECT, or the one of the script's name; return where."""
    project = place or os.environ.get("WANDB_PROJECT") or what.script or "mezzo"
    where = _send_one(what, job, project=project, name=job.name, group=job.name, files=True)
    for run in what.runs:
        _send_one(run, job, project=project, name=f"{job.name}/{run.name}", group=job.name, files=False)
    return where


class InFlight:
    """A run of Weights & Biases that is written while a script runs."""

    def __init__(self, flight: Flight, place: str) -> None:
        """Begin a run in the group of the command."""
        import wandb

        self._run = wandb.init(
            project=place or os.environ.get("WANDB_PROJECT") or flight.script or "mezzo",
            name=f"{flight.name}{SUFFIX}",
            group=flight.name,
            job_type="live",
            config=dict(flight.settings),
            reinit="create_new",
            settings=_settings(),
        )
        self.where = os.path.dirname(self._run.dir) if self._run.offline else str(self._run.url)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log values of a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """End the run."""
        self._run.finish()


def _settings() -> Any:
    """Return settings without the data that wandb would collect itself, which would describe this process, not the script's."""
    import wandb

    return wandb.Settings(silent=True, console="off", save_code=False, x_disable_stats=True, x_disable_meta=True)


def _send_one(what: Logged, job: TrackedRecord, *, project: str, name: str, group: str, files: bool) -> str:
    import wandb

    with wandb.init(
        project=project,
        name=name,
        group=group,
        job_type=what.kind,
        config=what.settings,
        tags=[f"{key}:{value}"[:_LONGEST_TAG] for key, value in what.tags.items()],
        reinit="create_new",
        settings=_settings(),
    ) as run:
        for step, values in _by_step(what):
            run.log(values, step=step)
        run.summary.update({**what.numbers, **what.tags})
        shown: dict[str, Any] = {
            table.name: wandb.Table(columns=table.columns, data=table.rows) for table in what.tables
        }
        for title, histogram in what.histograms.items():
            edges = list(range(histogram.first_exponent, histogram.last_exponent + 2))
            shown[title] = wandb.Histogram(np_histogram=(histogram.counts, edges))
        if files:
            shown["report"] = wandb.Html(str(job.page), inject=False)
            artifact = wandb.Artifact(f"{project}-{what.kind}", type="mezzo-record")
            for path in (job.record, job.page):
                artifact.add_file(str(path))
            run.log_artifact(artifact)
        if shown:
            run.log(shown)
        folder = os.path.dirname(run.dir)
        return f"{folder}; to upload it: wandb sync {folder}" if run.offline else str(run.url)


def _by_step(what: Logged) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the values of all curves, step by step: wandb takes steps in order."""
    rows: dict[int, dict[str, float]] = {}
    for curve in what.curves:
        for step, value in zip(curve.steps, curve.values, strict=True):
            rows.setdefault(step, {})[curve.name] = value
    yield from sorted(rows.items())
