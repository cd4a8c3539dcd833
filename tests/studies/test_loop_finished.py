"""What an interrupted command has finished: read again for the same command, dropped with a reason for another one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mezzo.records import write_record
from mezzo.studies.loop import LEDGER, Finished
from record_builders import run_record

SAME = {"script": "train.py", "the script's text": "abc", "its arguments": "--lr 0.1"}


def filled(folder: Path) -> Finished:
    finished = Finished(folder, SAME)
    write_record(run_record("fp32", num_steps=3), folder / "fp32-seed0" / "record.json")
    finished.add("fp32-seed0")
    return finished


def test_the_same_command_finds_its_parts(tmp_path: Path) -> None:
    first = filled(tmp_path)
    again = Finished(tmp_path, SAME)
    assert (len(again), again.why_restart, again.since_s) == (1, "", first.since_s)
    found = again.record("fp32-seed0")
    assert found is not None
    assert found.kind == "run"
    assert again.record("bf16-seed0") is None


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"its arguments": "--lr 0.2"}, "its arguments changed since: --lr 0.1 then, --lr 0.2 now"),
        ({"the script's text": "d" * 64}, "the script's text changed since: abc then, dddddddddddd... now"),
        ({"torch": "2.13.0"}, "torch changed since: nothing then, 2.13.0 now"),
    ],
)
def test_another_command_starts_anew(tmp_path: Path, changed: dict[str, str], why: str) -> None:
    filled(tmp_path)
    again = Finished(tmp_path, SAME | changed)
    assert (len(again), again.why_restart) == (0, why)
    assert again.record("fp32-seed0") is None


def test_a_part_whose_record_is_gone_or_damaged_is_missing(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "fp32-seed0" / "record.json").write_text("{", encoding="utf-8")
    assert Finished(tmp_path, SAME).record("fp32-seed0") is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"parts": {}}'])
def test_a_damaged_list_is_no_list(tmp_path: Path, text: str) -> None:
    (tmp_path / LEDGER).write_text(text, encoding="utf-8")
    assert len(Finished(tmp_path, SAME)) == 0


def test_a_finished_command_leaves_no_list(tmp_path: Path) -> None:
    filled(tmp_path).forget()
    assert not (tmp_path / LEDGER).exists()
    assert len(Finished(tmp_path, SAME)) == 0


def test_the_list_is_plain(tmp_path: Path) -> None:
    filled(tmp_path)
    assert json.loads((tmp_path / LEDGER).read_text(encoding="utf-8"))["parts"] == {
        "fp32-seed0": "fp32-seed0/record.json"
    }
