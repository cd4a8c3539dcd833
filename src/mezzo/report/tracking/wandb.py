"""Weights & Biases: one run for each record; a comparison's runs form one group."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from mezzo.errors import UsageError
from mezzo.report.log_entries import SUFFIX, LiveRun, LogEntry, TrackedRecord

PACKAGE = INSTALL = "wandb"
_NO_SERVER = ("offline", "dryrun", "disabled")
"""Values of WANDB_MODE under which nothing is sent."""
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


def send(entry: LogEntry, tracked: TrackedRecord, place: str) -> str:
    """Log to the project ``place``, else WANDB_PROJECT, else one named after the script; return where."""
    project = place or os.environ.get("WANDB_PROJECT") or entry.script or "mezzo"
    where = _send_one(entry, tracked, project=project, name=tracked.name, group=tracked.name, files=True)
    for run in entry.runs:
        _send_one(run, tracked, project=project, name=f"{tracked.name}/{run.name}", group=tracked.name, files=False)
    return where


class LiveWriter:
    """A run of Weights & Biases that is written while a script runs."""

    def __init__(self, run: LiveRun, place: str) -> None:
        """Begin a run in the group of the command."""
        import wandb

        self._run = wandb.init(
            project=place or os.environ.get("WANDB_PROJECT") or run.script or "mezzo",
            name=f"{run.name}{SUFFIX}",
            group=run.name,
            job_type="live",
            config=dict(run.settings),
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
    """Return settings that keep wandb from collecting data itself: it would describe this process, not the script's."""
    import wandb

    return wandb.Settings(silent=True, console="off", save_code=False, x_disable_stats=True, x_disable_meta=True)


def _send_one(entry: LogEntry, tracked: TrackedRecord, *, project: str, name: str, group: str, files: bool) -> str:
    import wandb

    with wandb.init(
        project=project,
        name=name,
        group=group,
        job_type=entry.record.kind,
        config=entry.settings,
        tags=[f"{key}:{value}"[:_LONGEST_TAG] for key, value in entry.tags.items()],
        reinit="create_new",
        settings=_settings(),
    ) as run:
        for step, values in _by_step(entry):
            run.log(values, step=step)
        run.summary.update({**entry.numbers, **entry.tags})
        shown: dict[str, Any] = {
            table.name: wandb.Table(columns=table.columns, data=table.rows) for table in entry.tables
        }
        for title, histogram in entry.histograms.items():
            edges = list(range(histogram.first_exponent, histogram.last_exponent + 2))
            shown[title] = wandb.Histogram(np_histogram=(histogram.counts, edges))
        if files:
            shown["report"] = wandb.Html(str(tracked.page), inject=False)
            artifact = wandb.Artifact(f"{project}-{entry.record.kind}", type="mezzo-record")
            for path in (tracked.record, tracked.page):
                artifact.add_file(str(path))
            run.log_artifact(artifact)
        if shown:
            run.log(shown)
        folder = os.path.dirname(run.dir)
        return f"{folder}; to upload it: wandb sync {folder}" if run.offline else str(run.url)


def _by_step(entry: LogEntry) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the values of all curves step by step: wandb accepts steps only in order."""
    rows: dict[int, dict[str, float]] = {}
    for curve in entry.curves:
        for step, value in zip(curve.steps, curve.values, strict=True):
            rows.setdefault(step, {})[curve.name] = value
    yield from sorted(rows.items())
