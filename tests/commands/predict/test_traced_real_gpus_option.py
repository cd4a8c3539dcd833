"""When ``compare`` predicts for GPUs that this machine does not have, and what the page and the terminal then show."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import record_builders as build
from mezzo import cli
from mezzo.cli.script import Script
from mezzo.commands.predict import traced as module
from mezzo.commands.predict.observed import observed_plan
from mezzo.commands.predict.traced import named_gpus, predicted_for
from mezzo.errors import UsageError
from mezzo.measure.predict.calibrate import Calibration
from mezzo.measure.predict.script import plan as measured
from mezzo.records import CompareRecord, RealGpus, RunRecord, read_record
from mezzo.report.html import render_html
from mezzo.report.terminal import render
from paths import SCRIPTS

SCRIPT = Script(
    target="train.py", arguments=["--out", "x/{run}"], as_module=False, out=None, log_to=None, as_json=False
)


def _runs(**environment: Any) -> list[RunRecord]:
    return [build.run_record("fp32", environment=build.environment(**environment))]


def printed(record: CompareRecord) -> str:
    """Return what the terminal shows."""
    out = io.StringIO()
    render(record, Console(file=out, width=200))
    return out.getvalue()


CPU: dict[str, Any] = {"device": "cpu", "gpu": None, "driver": None, "cuda": None}


def test_names() -> None:
    assert named_gpus(None) is None
    assert named_gpus("none") == []
    assert [gpu.name for gpu in named_gpus("a100, H100,a100-80gb") or []] == ["a100-80gb", "h100-sxm"]
    with pytest.raises(UsageError, match="'h101' is not a GPU"):
        named_gpus("h101")


@pytest.mark.parametrize(
    ("option", "environment", "asked"),
    [
        (None, CPU, ["t4", "a100-80gb", "h100-sxm", "rtx-4090"]),
        ("l4", CPU, ["l4"]),
        ("none", CPU, None),
        (None, {"device": "cuda"}, None),
        ("l4", {"device": "cuda"}, ["l4"]),
    ],
    ids=["the usual ones", "a named one", "none", "measured on a GPU", "another GPU than the one here"],
)
def test_for_which_gpus(
    option: str | None, environment: dict[str, Any], asked: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def real_gpus(
        script: str, arguments: list[str], policies: Any, gpus: Any, *, as_module: bool, limit_s: float | None, **_: Any
    ) -> RealGpus:
        assert (script, arguments, policies) == ("train.py", ["--out", "x/predict"], {"fp32": "fp32"})
        assert (as_module, limit_s) == (False, 9.0)
        return RealGpus(gpus=[gpu.name for gpu in gpus])

    monkeypatch.setattr(measured, "real_gpus", real_gpus)
    found = predicted_for(SCRIPT, _runs(**environment), named_gpus(option), limit_s=9.0)
    assert (None if found is None else found.gpus) == asked


@pytest.mark.parametrize(
    ("environment", "own"),
    [
        ({"device": "cuda", "gpu": "NVIDIA L4"}, "l4"),
        ({"device": "cuda", "gpu": "NVIDIA H100 80GB HBM3"}, ""),
        ({"device": "cuda", "gpu": "a card that nobody knows"}, ""),
        (CPU, ""),
    ],
)
def test_the_gpu_of_the_runs_is_known_by_the_name_that_torch_has_for_it(
    environment: dict[str, Any], own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "real_gpus", lambda *_, **__: RealGpus(gpus=["l4", "t4"]))
    found = predicted_for(SCRIPT, _runs(**environment), named_gpus("l4,t4"))
    assert found is not None
    assert found.own_gpu == own


def test_a_calibrated_cpu_is_predicted_beside_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def real_gpus(*_: Any, calibration: Any, **__: Any) -> RealGpus:
        given.append(calibration)
        return RealGpus(gpus=["l4"])

    monkeypatch.setattr(measured, "real_gpus", real_gpus)
    runs = _runs(**CPU)
    threads = runs[0].environment.threads
    for own in (threads, threads + 1):
        calibration = Calibration(device="a CPU", threads=own, date="", torch="", rates={}, low=0.9, high=1.1)
        monkeypatch.setattr("mezzo.measure.predict.calibrate.saved_calibration", lambda _, known=calibration: known)
        predicted_for(SCRIPT, runs, named_gpus("l4"))
        assert given.pop() == (calibration if own == threads else None)
    predicted_for(SCRIPT, _runs(device="cuda"), named_gpus("l4"))
    assert given == [None]


def test_other_frameworks_are_predicted_from_a_real_step(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def real_gpus(*_: Any, **settings: Any) -> RealGpus:
        given.append(settings["plan_of"])
        return RealGpus(gpus=["t4"])

    monkeypatch.setattr(measured, "real_gpus", real_gpus)
    keras = [run.model_copy(update={"framework": "keras 3.15.1 on tensorflow 2.21.0"}) for run in _runs(**CPU)]
    assert predicted_for(SCRIPT, keras, None) == RealGpus(gpus=["t4"], observed=True)
    assert given == [observed_plan]


def test_a_step_of_several_processes_is_not_run_again_in_one() -> None:
    """The process would wait for the others."""
    two = [run.model_copy(update={"framework": "paddle 3.2.2", "ranks": ["0", "1"]}) for run in _runs(**CPU)]
    found = predicted_for(SCRIPT, two, named_gpus("t4"))
    assert found is not None
    assert (found.gpus, found.predictions) == (["t4"], [])
    assert found.reason == "a step in paddle is observed in one process, and this job has 2"


def test_runs_without_steps_or_that_failed_are_not_predicted() -> None:
    empty = [run.model_copy(update={"steps": run.steps.model_copy(update={"loss": []})}) for run in _runs(**CPU)]
    assert module.NONE == "none"
    failed = [run.model_copy(update={"error": "KeyError: 'x'"}) for run in _runs(**CPU)]
    assert predicted_for(SCRIPT, [*empty, *failed], None) is None


def test_a_comparison_is_given_the_predictions_of_its_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[Any] = []

    def predicted(script: Script, runs: list[RunRecord], gpus: Any) -> RealGpus:
        given.append((script.target, [run.policy for run in runs], [gpu.name for gpu in gpus]))
        return build.real_gpus()

    monkeypatch.setattr("mezzo.commands.predict.traced.predicted_for", predicted)
    monkeypatch.setattr("mezzo.commands.compare.command.run_all", lambda *_, **__: _runs(**CPU))
    script = str(SCRIPTS / "plain.py")
    assert cli.main(["compare", "--policies", "fp32,bf16", "--gpus", "l4", "--out", str(tmp_path), script]) == 0
    assert given == [(script, ["fp32"], ["l4"])]
    record = read_record(tmp_path / "record.json")
    assert isinstance(record, CompareRecord)
    assert record.real_gpus == build.real_gpus()


def test_page_and_terminal_label_it_as_predicted() -> None:
    record = build.compare_record(real_gpus=build.real_gpus())
    page, text = render_html(record), printed(record)
    for shown in (page, text):
        assert "On a real GPU: predicted, not measured" in shown
        assert "2470" in shown
        assert "1980 to 2900" in shown
    assert "T4 has no units for BF16." in page
    failed = build.compare_record(real_gpus=RealGpus(gpus=["t4"], reason="train.py never trains"))
    for shown in (render_html(failed), printed(failed)):
        assert "Not predicted: train.py never trains." in shown
    assert "On a real GPU" not in render_html(build.compare_record())
