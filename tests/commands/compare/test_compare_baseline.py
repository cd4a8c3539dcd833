"""``mezzo compare --baseline``: kept runs take the place of new ones, or are refused with what differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers_launch import children_in_this_process
from helpers_values import record_at
from mezzo.cli import main
from mezzo.records import CompareRecord

TRAIN = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(12):
    inputs = torch.randn(16, 8)
    loss = torch.nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def compare(folder: Path, *words: str) -> int:
    with children_in_this_process():
        return main(["compare", "--gpus", "none", "--fail-on", "none", "--out", str(folder), *words])


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    (folder / "train.py").write_text(TRAIN)
    assert compare(folder / "out", "--policies", "fp32,bf16", "--seeds", "2", str(folder / "train.py")) == 0
    return folder


def test_kept_runs_take_the_place_of_new_ones(kept: Path, tmp_path: Path) -> None:
    before = record_at(kept / "out" / "record.json", CompareRecord)
    moved = tmp_path / "train.py"
    moved.write_text(TRAIN)  # the same script in another folder
    baseline = str(kept / "out" / "record.json")
    words = ["--baseline", baseline, "--policies", "bf16", "--seeds", "2", str(moved)]
    assert compare(tmp_path / "out", *words) == 0
    after = record_at(tmp_path / "out" / "record.json", CompareRecord)
    assert [(row.policy, row.verdict == "baseline") for row in after.rows] == [("fp32", True), ("bf16", False)]
    old = [run for run in before.runs if run.policy == "fp32"]
    new = [run for run in after.runs if run.policy == "fp32"]
    assert [run.model_copy(update={"kept": True}) for run in old] == new
    assert [run.kept for run in after.runs] == [True, True, False, False]
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith("fp32")]
    row = after.rows[1]
    assert (row.loss, row.memory_ratio) == (before.rows[1].loss, before.rows[1].memory_ratio)
    assert row.speedup is None
    assert "times are not compared, because the baseline's runs are of an earlier comparison" in row.reason


def _older(data: dict[str, Any]) -> None:
    data["identity"] = {}


def _other_cpu(data: dict[str, Any]) -> None:
    data["environment"]["cpu"] = "Other"


def _other_torch(data: dict[str, Any]) -> None:
    data["identity"]["torch"] = "1.0"


def _failed(data: dict[str, Any]) -> None:
    for run in data["runs"]:
        run["error"] = "it broke" if run["seed"] == 1 else None


def _nothing(data: dict[str, Any]) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "words", "why"),
    [
        (_older, [], "it was written by an older Mezzo, which did not keep what its runs depend on"),
        (_other_cpu, [], "its CPU changed: Other then, "),
        (_other_torch, [], "torch changed: 1.0 then, "),
        (_failed, [], "it has no good run of fp32 with seed 1"),
        (_nothing, ["--seeds", "3"], "it has no good run of fp32 with seed 2"),
        (_nothing, ["--metric", "acc=(.*)"], "--metric changed: none then, acc=(.*) now"),
        (_nothing, ["--epochs"], "its arguments changed: none then, --epochs now"),
    ],
)
def test_what_does_not_fit_is_refused(
    kept: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Any]], None],
    words: list[str],
    why: str,
) -> None:
    data = json.loads((kept / "out" / "record.json").read_text())
    change(data)
    path = tmp_path / "record.json"
    path.write_text(json.dumps(data))
    own = [word for word in words if word == "--epochs"]
    options = [word for word in words if word not in own]
    seeds = [] if "--seeds" in options else ["--seeds", "2"]
    line = ["--baseline", str(path), "--policies", "bf16", *seeds, *options, str(kept / "train.py"), *own]
    assert compare(tmp_path / "out", *line) == 2
    assert f"--baseline {str(path)!r} cannot be used: {why}" in capsys.readouterr().err


def test_another_script_and_another_record_are_refused(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "train.py"
    other.write_text(TRAIN.replace("lr=0.1", "lr=0.2"))
    baseline = str(kept / "out" / "record.json")
    assert compare(tmp_path / "out", "--baseline", baseline, "--policies", "bf16", "--seeds", "2", str(other)) == 2
    assert "the script's text changed: " in capsys.readouterr().err
    run = next((kept / "out").glob("fp32-seed0/record.json"))
    assert compare(tmp_path / "out", "--baseline", str(run), "--policies", "bf16", str(other)) == 2
    assert "is a record of mezzo run; allowed: of mezzo compare" in capsys.readouterr().err
