"""Records in MLflow, in a store of files, read back by MLflow's own client."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

import record_builders as build
from mezzo import cli
from mezzo.records import Metric, RunRecord, Steps, write_record
from mezzo.report.tracking import mlflow

pytest.importorskip("mlflow")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of a store of files: MLflow's databases need libraries that mlflow-skinny leaves out."""
    from mlflow import MlflowClient

    uri = (tmp_path / "store").as_uri()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    monkeypatch.chdir(tmp_path)
    return MlflowClient(uri)


def log(record: Any, folder: str, *, to: str = "mlflow") -> int:
    write_record(record, Path(folder) / "record.json")
    return cli.main(["report", f"{folder}/record.json", "--log-to", to])


def runs(client: Any, experiment: str = "train") -> dict[str, Any]:
    found = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return {run.info.run_name: run for run in found}


def curve(client: Any, run: Any, name: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]


def test_a_comparison_is_a_run_with_runs_nested_in_it(store: Any, capsys: pytest.CaptureFixture[str]) -> None:
    record = build.compare_record(num_seeds=1, num_steps=4)
    assert log(record, "runs/first") == 0
    assert "mezzo: logged to mlflow: experiment train, run first" in capsys.readouterr().err
    found = runs(store)
    assert set(found) == {"first", *(f"{row.policy}-seed0" for row in record.rows)}
    whole = found["first"]
    assert whole.data.tags["mezzo.kind"] == "compare"
    assert whole.data.tags["mezzo.verdict bf16"] == "equivalent"
    assert whole.data.params["baseline"] == "fp32"
    assert whole.data.metrics["speedup/bf16"] == record.rows[1].speedup
    files = {file.path: file for file in store.list_artifacts(whole.info.run_id)}
    assert set(files) == {"record.json", "report.html", "verdicts.json"}
    table = json.loads(Path(store.download_artifacts(whole.info.run_id, "verdicts.json")).read_text())
    assert [row[:2] for row in table["data"]] == [[row.policy, row.verdict] for row in record.rows]
    run = found["bf16-seed0"]
    assert run.data.tags["mlflow.parentRunId"] == whole.info.run_id
    assert run.data.params["policy"] == "bf16"
    own = next(r for r in record.runs if r.policy == "bf16")
    assert curve(store, run, "step/loss") == list(enumerate(own.steps.loss, start=1))


def test_long_curves_hostile_names_and_numbers_that_are_not_finite(store: Any) -> None:
    losses = [math.nan, math.inf, *map(float, range(1500))]
    metric = Metric(name='acc%="x"', pattern="", steps=[3], values=[0.5])
    run: RunRecord = build.run_record("fp16", num_steps=3, metric=metric, error="ValueError: x").model_copy(
        update={"steps": Steps(loss=losses)}
    )
    assert log(run, "runs/first") == 0
    (found,) = runs(store).values()
    assert found.info.status == "FAILED"
    assert curve(store, found, "metric/acc___x_") == [(3, 0.5)]
    steps, values = zip(*curve(store, found, "step/loss"), strict=True)
    assert steps == tuple(range(1, 1503))
    assert (math.isnan(values[0]), values[1:]) == (True, tuple(losses[1:]))


def test_two_commands_stay_apart_and_the_environment_is_honoured(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert log(build.doctor_record(), "runs/one") == 0
    assert log(build.doctor_record(), "runs/two") == 0
    assert set(runs(store, "mezzo")) == {"one", "two"}
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "ours")
    other = Path("other").resolve().as_uri()
    assert log(build.run_record(num_steps=3), "runs/three", to=f"mlflow:{other}") == 0
    from mlflow import MlflowClient

    assert set(runs(MlflowClient(other), "ours")) == {"three"}


@pytest.mark.parametrize(
    ("uri", "skinny", "why", "hint"),
    [
        (
            "sqlite:///mlflow.db",
            True,
            "mlflow-skinny has no database\n",
            "set MLFLOW_ALLOW_FILE_STORE=true and name a folder, as in --log-to mlflow:runs/mlflow, or type pip install mlflow",
        ),
        ("./mlruns", True, "", "set MLFLOW_ALLOW_FILE_STORE=true for a store of files, or type pip install mlflow for"),
        (
            "./mlruns",
            False,
            "",
            "set MLFLOW_ALLOW_FILE_STORE=true for a store of files, or name a database: --log-to mlflow:",
        ),
        ("sqlite:///no/such/folder/mlflow.db", False, "", "check the address of the database, or name another store"),
    ],
)
def test_a_store_that_cannot_be_used_is_refused_before_the_script(
    uri: str,
    skinny: bool,
    why: str,
    hint: str,
    store: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(mlflow, "find_spec", lambda _: None if skinny else object())
    if skinny:
        monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "false")
    Path("train.py").write_text("open('ran', 'w')\n")
    assert cli.main(["run", "--log-to", f"mlflow:{uri}", "train.py"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"mezzo: --log-to mlflow cannot use the store {uri}: {why}")
    assert f"hint: {hint}" in said
    assert not Path("ran").exists()
