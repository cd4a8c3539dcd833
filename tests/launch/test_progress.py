"""The file between a run and the command that waits for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helpers_launch import Display, children_in_this_process, request_for
from mezzo.errors import ScriptError
from mezzo.launch.progress import followed, read_latest, reports_to, shown_on
from mezzo.launch.request import Request
from mezzo.launch.runner import run_child
from mezzo.measure.live import Latest
from paths import SCRIPTS

NAN = float("nan")


def request(tmp_path: Path) -> Request:
    return request_for(tmp_path, str(SCRIPTS / "plain.py"), policy="bf16")


@pytest.mark.parametrize(
    "latest", [Latest(3, 0.5, 1), Latest(1, None, None), Latest(2, NAN, 0), Latest(9, float("inf"), 2)]
)
def test_a_report_comes_through(tmp_path: Path, latest: Latest) -> None:
    reports_to(tmp_path / "x.progress")(latest)
    assert repr(read_latest(tmp_path / "x.progress")) == repr(latest)


@pytest.mark.parametrize("text", ["", "[1, 0.5", "{}", "[1]", "\x00"])
def test_half_a_report_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.progress").write_text(text)
    assert read_latest(tmp_path / "x.progress") is None


def test_there_is_no_report_before_the_first(tmp_path: Path) -> None:
    assert read_latest(tmp_path / "x.progress") is None


def test_a_training_does_not_end_because_its_folder_is_gone(tmp_path: Path) -> None:
    reports_to(tmp_path / "gone" / "x.progress")(Latest(1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_process_that_the_script_forks_reports_nothing(tmp_path: Path) -> None:
    report = reports_to(tmp_path / "x.progress")
    child = os.fork()
    if child == 0:
        report(Latest(1))
        os._exit(0)
    os.waitpid(child, 0)
    assert not (tmp_path / "x.progress").exists()


def test_without_a_display_nothing_is_reported(tmp_path: Path) -> None:
    with children_in_this_process():
        run_child(request(tmp_path), output=tmp_path / "log")
    with followed(request(tmp_path), passes_output=True) as same:
        assert not same.reports_progress
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "record.json"]


@pytest.mark.parametrize("to_file", [True, False])
def test_a_run_reports_and_leaves_no_file(tmp_path: Path, to_file: bool) -> None:
    display = Display()
    with children_in_this_process(), shown_on(display):
        record = run_child(request(tmp_path), output=tmp_path / "log" if to_file else None)
    ((policy, passes_output, latest),) = display.seen
    assert (policy, passes_output) == ("bf16", not to_file)
    assert latest is not None
    assert latest.step in range(1, len(record.steps) + 1)
    assert latest.loss == pytest.approx(record.steps.loss[latest.step - 1])
    assert not list(tmp_path.glob("*.progress"))


def test_a_display_inside_another_shows_the_same_runs(tmp_path: Path) -> None:
    outer, inner = Display(), Display()
    with shown_on(outer), shown_on(inner), followed(request(tmp_path), passes_output=True) as asked:
        reports_to(asked.progress_file)(Latest(1))
    assert outer.seen == inner.seen == [("bf16", True, Latest(1))]
    with shown_on(outer), followed(request(tmp_path), passes_output=False):
        pass
    assert (len(outer.seen), len(inner.seen)) == (2, 1)


def test_an_error_in_the_parent_leaves_no_file(tmp_path: Path) -> None:
    def failing() -> None:
        with shown_on(Display()), followed(request(tmp_path), passes_output=False) as asked:
            reports_to(asked.progress_file)(Latest(1))
            raise ScriptError("no", hint="no")

    with pytest.raises(ScriptError):
        failing()
    assert not list(tmp_path.iterdir())
