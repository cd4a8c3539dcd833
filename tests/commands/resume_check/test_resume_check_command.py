"""The command: its exit codes, its record, and what it refuses."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from unittest import mock

import pytest

from helpers_launch import children_in_this_process
from mezzo import cli
from mezzo.children.signals import EndedBySignal
from mezzo.launch.torch.traced import StateTrace
from mezzo.records import ResumeCheckRecord, read_record
from paths import SCRIPTS


def killed(trace: StateTrace) -> None:
    raise EndedBySignal(signal.SIGKILL)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    script = (SCRIPTS / "resume_faults.py").read_text(encoding="utf-8")
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    return tmp_path


def checked(folder: Path, *words: str) -> int:
    with (
        children_in_this_process(before_each=lambda: os.chdir(folder)),
        mock.patch.object(StateTrace, "_stop", killed),
        mock.patch.dict(os.environ),
    ):
        code = cli.main(["resume-check", "--out", str(folder / "out"), *words])
        os.chdir(folder)
        return code


def record(folder: Path) -> ResumeCheckRecord:
    found = read_record(folder / "out" / "record.json")
    assert isinstance(found, ResumeCheckRecord)
    return found


def test_exit_code_0_is_exact_and_1_is_not(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(folder, str(folder / "train.py")) == 0  # an absolute path runs in the copies, too
    found = record(folder)
    assert (found.verdict, found.num_steps, found.stopped_after, found.resumed_at) == ("exact", 24, 12, 10)
    assert "train.py resumes exactly" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == ["out", "train.py"]


def test_the_resume_argument_may_be_given_after_the_stop(folder: Path) -> None:
    words = ("--resume-with", "--resume last.pt", "--stop-after", "7", "train.py", "--without", "optimizer")
    assert checked(folder, *words) == 1
    found = record(folder)
    assert (found.stopped_after, found.resumed_at, found.resume_with) == (7, 5, ["--resume", "last.pt"])
    assert found.summary == "train.py: differs; not restored: optimizer"


def test_a_script_that_fails_keeps_its_code(folder: Path) -> None:
    assert checked(folder, "train.py", "--no-such-option") == 2
    assert record(folder).why.startswith("undisturbed, the script fails")


def test_what_cannot_be_checked_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "other.py").write_text("import keras\n", encoding="utf-8")
    assert cli.main(["resume-check", "other.py"]) == 7
    assert (
        "mezzo resume-check was given for a Keras on tensorflow script, and it traces the state of torch.optim and of torch's DataLoader; "
        "allowed: PyTorch scripts" in capsys.readouterr().err
    )
