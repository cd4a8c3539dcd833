"""MLflow: one run for each record; a comparison's runs are nested in it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from mezzo.errors import UsageError
from mezzo.report.log_entries import SUFFIX, LiveRun, LogEntry, TrackedRecord
from mezzo.report.terminal import text_of

if TYPE_CHECKING:
    from mlflow import MlflowClient

PACKAGE = INSTALL = "mlflow"
_MAX_METRICS = 1000
"""How many metrics MLflow accepts in one call."""
_SKINNY = "mlflow-skinny has no database"
_FOLDER = "set MLFLOW_ALLOW_FILE_STORE=true and name a folder, as in --log-to mlflow:runs/mlflow"
_DATABASE = "check the address of the database, or name another store in MLFLOW_TRACKING_URI"
_FILES = "set MLFLOW_ALLOW_FILE_STORE=true for a store of files, or name a database: --log-to mlflow:sqlite:///runs/mlflow.db"
_FILES_ALONE = "set MLFLOW_ALLOW_FILE_STORE=true for a store of files, or type pip install mlflow for a database"
_LONGEST_VALUE = 500
"""The most characters of a parameter that every kind of store accepts."""


def check(place: str) -> None:
    """Refuse a store on this machine that MLflow cannot open; a server is not contacted until there is something to log.

    Raises:
        UsageError: MLflow cannot open the store.
    """
    import mlflow

    uri = place or mlflow.get_tracking_uri()
    if urlsplit(uri).scheme.startswith(("http", "databricks")):
        return
    try:
        _client(place).search_experiments(max_results=1)
    except Exception as error:  # from MLflow, or from the database's library
        is_folder, skinny = urlsplit(uri).scheme in ("", "file"), find_spec("sqlalchemy") is None
        why = str(error).strip().partition("\n")[0] if is_folder or not skinny else _SKINNY
        hint = _FILES_ALONE if skinny else _FILES
        if not is_folder:
            hint = f"{_FOLDER}, or type pip install mlflow" if skinny else _DATABASE
        raise UsageError(f"--log-to mlflow cannot use the store {uri}: {why}", hint=hint) from None


def send(entry: LogEntry, tracked: TrackedRecord, place: str) -> str:
    """Log to the store ``place``, else to MLFLOW_TRACKING_URI, else to MLflow's default; return the experiment and the run."""
    client = _client(place)
    title = os.environ.get("MLFLOW_EXPERIMENT_NAME") or entry.script or "mezzo"
    experiment = _experiment(client, title)
    run_id = _send_one(client, experiment, entry, name=tracked.name)
    for path in (tracked.record, tracked.page):
        client.log_artifact(run_id, str(path))
    for run in entry.runs:
        _send_one(client, experiment, run, name=run.name, parent=run_id)
    return f"experiment {title}, run {tracked.name} ({run_id}) in {client.tracking_uri}"


class LiveWriter:
    """A run of MLflow that is written while a script runs."""

    def __init__(self, run: LiveRun, place: str) -> None:
        """Create a run in the experiment of the script."""
        self._client, title = _client(place), os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.script or "mezzo"
        name = f"{run.name}{SUFFIX}"
        created = self._client.create_run(_experiment(self._client, title), run_name=name, tags={"mezzo.kind": "live"})
        self._run_id: str = created.info.run_id
        self.where = f"experiment {title}, run {name}"
        for key, value in run.settings.items():
            self._client.log_param(self._run_id, _key(key), value[:_LONGEST_VALUE])

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log values of a step."""
        for name, value in values.items():
            self._client.log_metric(self._run_id, _key(name), value, step=step)

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run_id)


def _experiment(client: MlflowClient, title: str) -> str:
    """Return the id of an experiment, which is created if it does not exist."""
    known = client.get_experiment_by_name(title)
    experiment: str = client.create_experiment(title) if known is None else known.experiment_id
    return experiment


def _client(place: str) -> MlflowClient:
    from mlflow import MlflowClient

    return MlflowClient(place or None)


def _send_one(client: MlflowClient, experiment: str, entry: LogEntry, *, name: str, parent: str = "") -> str:
    from mlflow.entities import Metric, Param, RunTag

    tags = {f"mezzo.{_key(key)}": value for key, value in entry.tags.items()}
    run = client.create_run(experiment, run_name=name, tags=tags | ({"mlflow.parentRunId": parent} if parent else {}))
    run_id: str = run.info.run_id
    params = [Param(_key(key), str(value)[:_LONGEST_VALUE]) for key, value in entry.settings.items()]
    client.log_batch(run_id, params=params, tags=[RunTag("mlflow.note.content", f"```\n{text_of(entry.record)}\n```")])
    now = run.info.start_time
    metrics = [
        Metric(_key(curve.name), value, now, step)
        for curve in entry.curves
        for step, value in zip(curve.steps, curve.values, strict=True)
    ]
    metrics += [Metric(_key(key), value, now, 0) for key, value in entry.numbers.items()]
    for start in range(0, len(metrics), _MAX_METRICS):
        client.log_batch(run_id, metrics=metrics[start : start + _MAX_METRICS])
    for table in entry.tables:  # as mlflow.log_table writes them, which needs pandas
        client.log_dict(run_id, {"columns": table.columns, "data": table.rows}, f"{table.name.replace(' ', '_')}.json")
    client.set_terminated(run_id, status="FAILED" if entry.failed else "FINISHED")
    return run_id


def _key(name: str) -> str:
    """Return a name with the characters that MLflow allows."""
    return re.sub(r"[^\w\-. /]", "_", name)
