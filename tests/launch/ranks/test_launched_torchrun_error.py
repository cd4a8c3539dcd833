"""The reason that a command leaves for torchrun, read by torchrun's own code."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from mezzo import cli
from mezzo.launch.ranks.launched import REASON, report_failure


@pytest.fixture(autouse=True)
def _no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(REASON, "text", "")
    monkeypatch.setattr(REASON, "rank", None)


def variables(folder: Path, rank: int = 0) -> dict[str, str]:
    return {"TORCHELASTIC_ERROR_FILE": str(folder / f"{rank}.json")}


def failure(folder: Path, rank: int) -> ProcessFailure:
    return ProcessFailure(rank, 10 + rank, 1, str(folder / f"{rank}.json"))


def test_torchrun_names_the_process_to_blame_and_its_reason(tmp_path: Path) -> None:
    REASON.text, REASON.rank = "rank 1: ValueError: bad label", 1
    for rank in (0, 1):
        report_failure(1, "run", own_rank=rank, variables=variables(tmp_path, rank))
    error = ChildFailedError("mezzo", {rank: failure(tmp_path, rank) for rank in (0, 1)})
    rank, first = error.get_first_failure()
    assert rank == 1
    assert first.message["message"] == "mezzo run: rank 1: ValueError: bad label"  # type: ignore[index]
    assert str(error).count("traceback : mezzo run: rank 1: ValueError: bad label\n") == 2


def test_a_verdict_is_no_crash(tmp_path: Path) -> None:
    report_failure(4, "compare", own_rank=0, variables=variables(tmp_path))
    expected = "mezzo compare: exit code 4, which is an answer, not a crash: see the report above"
    assert failure(tmp_path, 0).message["message"] == expected  # type: ignore[index]


@pytest.mark.parametrize("exit_code", [0, 1])
def test_nothing_is_left_after_success_or_over_the_scripts_own_reason(exit_code: int, tmp_path: Path) -> None:
    if exit_code:
        (tmp_path / "0.json").write_text("the script's", encoding="utf-8")
    report_failure(exit_code, "run", variables=variables(tmp_path))
    left = [path.read_text(encoding="utf-8") for path in tmp_path.iterdir()]
    assert left == (["the script's"] if exit_code else [])
    report_failure(1, "run", variables={})


def test_a_command_that_is_refused_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0.json"))
    assert cli.main(["run", "nowhere.py"]) == 2
    said = capfd.readouterr().err.removeprefix("mezzo: ").strip()
    assert failure(tmp_path, 0).message["message"] == f"mezzo run: {said}"  # type: ignore[index]
