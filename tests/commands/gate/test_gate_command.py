"""``mezzo gate`` from outside: a golden is accepted, holds, and finds each planted change; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers_launch import Children, children_in_this_process
from helpers_values import record_at
from mezzo.cli import main
from mezzo.records import GateRecord

TRAIN = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, inputs):
        return self.last(torch.relu(self.first(inputs)))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(12):
    inputs = torch.randn(16, 8)
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"acc={1 - loss.item() / 4:.3f}")
"""
CHANGES = {
    "nothing": ("", ""),
    "loss": ("argmax(1))", "argmax(1)) + 1.0"),
    "memory": ("nn.Linear(16, 4)\n", "nn.Linear(16, 4)\n        self.extra = nn.Parameter(torch.zeros(40))\n"),
    "formats": (
        "        return self.last(torch.relu(self.first(inputs)))",
        "        with torch.autocast('cpu', enabled=False):\n            hidden = self.first(inputs)\n"
        "        return self.last(torch.relu(hidden))",
    ),
    "steps": ("range(12)", "range(11)"),
    "runs": ("print(", "1 / 0; print("),
}


def write(folder: Path, change: str = "nothing") -> str:
    """Write the script with a change; return its path."""
    old, new = CHANGES[change]
    assert old in TRAIN
    path = folder / "train.py"
    path.write_text(TRAIN.replace(old, new, 1) if old else TRAIN)
    return str(path)


def gate(folder: Path, *words: str) -> int:
    with children_in_this_process():
        return main(["gate", "--golden", str(folder / "golden.json"), *words])


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("accepted")
    script = write(folder)
    words = ["--accept", "--metric", "acc=([0-9.]+)", "--out", str(folder / "out"), script, "--lr", "1"]
    assert gate(folder, *words) == 0
    return folder


@pytest.fixture
def golden(accepted: Path, tmp_path: Path) -> Path:
    (tmp_path / "golden.json").write_bytes((accepted / "golden.json").read_bytes())
    return tmp_path


def test_a_golden_is_small_sorted_and_names_no_folder(accepted: Path) -> None:
    text = (accepted / "golden.json").read_text()
    data = json.loads(text)
    assert str(accepted) not in text
    assert (data["script"], data["arguments"], data["policy"]) == ("train.py", ["--lr", "1"], "as-is")
    assert list(data) == sorted(data)
    assert [run["seed"] for run in data["runs"]] == [*range(10)]
    assert all(run["num_steps"] == 12 and 0 < run["metric"] < 1 for run in data["runs"])
    assert data["formats"]["first"]["forward"] == ["bf16"]
    assert data["audited_step"] == 3
    record = record_at(accepted / "out" / "record.json", GateRecord)
    assert (record.verdict, record.checks, len(record.runs)) == ("accepted", [], 10)


@pytest.mark.parametrize("change", CHANGES)
def test_each_planted_change_is_found(golden: Path, change: str) -> None:
    script = write(golden, change)
    code = gate(golden, "--out", str(golden / "out"), script, "--lr", "1")
    record = record_at(golden / "out" / "record.json", GateRecord)
    failed = {check.name for check in record.failed} - {
        "speed"
    }  # of twelve steps of 0.2 ms, on a machine with other work
    expected = {"loss": {"loss", "metric"}, "nothing": set(), "formats": {"formats", "findings"}}
    assert failed >= expected.get(change, {change})
    assert failed == set() if change == "nothing" else code == 1
    notes = {note.what: note.value for note in record.notes}
    assert notes == ({} if change in ("nothing", "runs") else {"script": "changed"})
    if change == "nothing":
        same = {check.name: check.status for check in record.checks if check.name != "speed"}
        assert same == dict.fromkeys(("steps", "loss", "metric", "memory", "formats", "findings"), "same")
    if change == "formats":
        assert {(one.module, one.phase) for one in record.format_changes} >= {("first", "forward")}
        assert record.new_findings != []


def test_accepting_again_says_what_changed(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = write(golden, "loss")
    assert gate(golden, "--accept", "--json", "--out", str(golden / "out"), script, "--lr", "1") == 0
    record = json.loads(capsys.readouterr().out)  # nothing else is on standard output
    assert record["verdict"] == "accepted"
    assert {check["name"]: check["status"] for check in record["checks"]}["loss"] == "failed"
    assert json.loads((golden / "golden.json").read_text())["metric"] == "acc=([0-9.]+)"
    code = gate(golden, "--out", str(golden / "again"), script, "--lr", "1")
    again = record_at(golden / "again" / "record.json", GateRecord)
    assert code == int(bool(again.failed))
    assert {check.name for check in again.failed} <= {"speed"}


Refused = tuple[list[str], Any, str, str]
REFUSED: list[Refused] = [
    (
        ["--lr", "2"],
        None,
        "arguments '--lr 2', and the golden file was accepted with '--lr 1'",
        "gate --accept --golden",
    ),
    (["--lr", "1"], "{", "is not a golden file", "take it from version control again"),
    (["--lr", "1"], "[]", "is not a golden file", "take it from version control again"),
    (["--lr", "1"], '{"golden_version": 2}', "has version 2; this Mezzo reads up to 1", "update Mezzo"),
    (["--lr", "1"], "", "is not a golden file", "make a new one"),
]


@pytest.mark.parametrize(("words", "text", "message", "hint"), REFUSED)
def test_what_does_not_fit_is_refused(
    golden: Path, capsys: pytest.CaptureFixture[str], words: list[str], text: str | None, message: str, hint: str
) -> None:
    if text is not None:
        (golden / "golden.json").write_text(text)
    assert gate(golden, write(golden), *words) == 2
    said = capsys.readouterr().err
    assert message in said
    assert hint in said


@pytest.mark.parametrize(("option", "value"), [("--policy", "bf16"), ("--metric", "loss=(.*)")])
def test_another_policy_or_metric_needs_a_new_golden(
    golden: Path, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    assert gate(golden, option, value, write(golden), "--lr", "1") == 2
    assert f"{option} {value!r}, and the golden file was accepted with" in capsys.readouterr().err


def test_a_missing_golden_is_no_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gate(tmp_path, write(tmp_path)) == 2
    said = capsys.readouterr().err
    assert "cannot read the golden file" in said
    assert "to make one, type: mezzo gate --accept --golden" in said


def test_a_gate_that_is_stopped_has_no_verdict(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = write(golden)
    with children_in_this_process(before_each=Children(interrupt_at=3)):
        code = main(
            ["gate", "--golden", str(golden / "golden.json"), "--out", str(golden / "out"), script, "--lr", "1"]
        )
    assert code == 130
    assert "and no verdict" in capsys.readouterr().err
    assert not (golden / "out" / "record.json").exists()


def test_no_golden_is_made_of_runs_that_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gate(tmp_path, "--accept", "--out", str(tmp_path / "out"), write(tmp_path, "runs")) == 7
    assert "no golden was written: the run with seed 0 failed: ZeroDivisionError" in capsys.readouterr().err
    assert not (tmp_path / "golden.json").exists()
