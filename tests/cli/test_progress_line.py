"""What the progress line says, where it is printed, and that a time left is never invented."""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from rich.live import Live

from mezzo.cli import progress as module
from mezzo.cli.progress import ProgressDisplay, shown
from mezzo.launch.progress import reports_to
from mezzo.launch.request import Request
from mezzo.measure.live import Latest
from mezzo.observe.settings import AuditSettings, DiagnoseSettings
from record_builders import run_record

LONGEST = 10_000  # waits of 0.01 s; one is enough unless the machine has other work


class Clock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def request(tmp_path: Path, policy: str = "fp32", seed: int | None = 0, **fields: object) -> Request:
    path = tmp_path / f"{policy}-{seed}" / "record.json"
    path.parent.mkdir(exist_ok=True)
    known = {
        "target": "t.py",
        "kind": "script",
        "policy": policy,
        "record_path": str(path),
        "command": (),
        "seed": seed,
    }
    return Request.model_validate({**known, **fields})


def display(*planned: Request) -> tuple[ProgressDisplay, io.StringIO]:
    file = io.StringIO()
    return ProgressDisplay(Console(file=file, width=200), planned), file


def parts(progress: ProgressDisplay) -> str:
    current = progress._current
    assert current is not None
    current.read_report()
    return ", ".join(progress._parts(current))


def test_a_comparison_from_its_first_run_to_its_last(tmp_path: Path, clock: Clock) -> None:
    runs = [request(tmp_path, policy, seed) for policy, seed in (("fp32", 0), ("fp16", 0), ("fp16", 1), ("fp32", 1))]
    progress, printed = display(*runs)
    with progress.following(runs[0], passes_output=False):
        assert parts(progress) == "fp32, seed 0 (1 of 4), running, 0 s"
        clock.now_s += 4
        report = reports_to(runs[0].progress_file)
        report(Latest(1, 0.5, 0))
        assert parts(progress) == "fp32, seed 0 (1 of 4), step 1, loss 0.5, 4 s"  # nothing is known of the script yet
        clock.now_s += 6
    progress.say_ended(runs[0], run_record("fp32", num_steps=60))
    with progress.following(runs[1], passes_output=False):
        assert parts(progress) == "fp16, seed 0 (2 of 4), running, about 30 s left"  # three runs as long as the first
        report = reports_to(runs[1].progress_file)
        report(Latest(10, 0.25, 2))
        assert parts(progress) == "fp16, seed 0 (2 of 4), step 10 of 60, loss 0.25, 2 skipped, about 30 s left"
        clock.now_s += 4
        report(Latest(20, 0.25, 2))
        assert (
            parts(progress) == "fp16, seed 0 (2 of 4), step 20 of 60, loss 0.25, 2 skipped, about 35 s left"
        )  # 16 + 10 + 10
        clock.now_s += 16
    progress.say_ended(runs[1], run_record("fp16", num_steps=60))
    assert printed.getvalue() == (
        "fp32, seed 0: 60 steps; about 30 s left\nfp16, seed 0: 60 steps; about 30 s left\n"  # 20 + 10
    )
    with progress.following(runs[2], passes_output=False):
        assert parts(progress) == "fp16, seed 1 (3 of 4), running, about 30 s left"
    with progress.following(runs[3], passes_output=False):
        clock.now_s += 60
        assert parts(progress) == "fp32, seed 1 (4 of 4), running, about 1 s left"  # later than expected


def test_steps_beyond_those_of_earlier_runs_have_no_total(tmp_path: Path, clock: Clock) -> None:
    runs = [request(tmp_path, "fp32", seed) for seed in (0, 1)]
    progress, _ = display(*runs)
    with progress.following(runs[0], passes_output=False):
        clock.now_s += 10
    progress.say_ended(runs[0], run_record("fp32", num_steps=5))
    with progress.following(runs[1], passes_output=False):
        reports_to(runs[1].progress_file)(Latest(7, None, None))
        assert parts(progress) == "fp32, seed 1 (2 of 2), step 7, about 10 s left"


def test_recorded_steps_are_a_total_and_inspected_ones_are_not(tmp_path: Path, clock: Clock) -> None:
    for settings, expected in (
        (AuditSettings(steps=(3, 100)), "bf16, step 30 of 100, loss 1, about 35 s left"),
        (DiagnoseSettings(steps=(1, 200)), "bf16, step 30, loss 1, 10 s"),  # the script may end before step 200
    ):
        one = request(tmp_path, "bf16", None, observe=settings)
        progress, _ = display()
        with progress.following(one, passes_output=True):
            reports_to(one.progress_file)(Latest(10, 1.0, 0))
            parts(progress)
            clock.now_s += 10
            reports_to(one.progress_file)(Latest(30, 1.0, 0))
            assert parts(progress) == expected
        one.progress_file.unlink()


def test_a_failed_run_is_named(tmp_path: Path, clock: Clock) -> None:
    one = request(tmp_path)
    progress, printed = display(one)
    with progress.following(one, passes_output=False):
        clock.now_s += 1
    progress.say_ended(one, run_record("fp32", error="ValueError: [bold]no"))
    assert printed.getvalue() == "fp32, seed 0: ValueError: [bold]no\n"


TIMES = [(0, "1 s"), (4.4, "4 s"), (23, "25 s"), (61, "1 min"), (89, "1 min"), (3700, "62 min")]


@pytest.mark.parametrize(("seconds", "text"), TIMES)
def test_a_time_left_is_round(seconds: float, text: str) -> None:
    assert module._left_text(seconds) == f"about {text} left"


def test_a_long_policy_and_a_hostile_one_stay_one_line(tmp_path: Path) -> None:
    names = "+".join(f"block{n}" for n in range(30))
    name = module.run_name(request(tmp_path).model_copy(update={"policy": f"fp16:fp32_modules={names}"}))
    assert len(name) <= 60
    assert "\n" not in name


def test_waits_are_shown_only_while_a_script_is_watched(tmp_path: Path, clock: Clock) -> None:
    for watches, shown_waits in ((True, ", input 43%"), (False, "")):
        one = request(tmp_path, "as-is", None, watches=watches)
        progress, _ = display()
        with progress.following(one, passes_output=True):
            reports_to(one.progress_file)(Latest(4, 0.5, 1, "input 43%"))
            assert f"step 4, loss 0.5, 1 skipped{shown_waits}, " in parts(progress)


def test_plain_lines_come_seldom_and_only_while_something_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr("mezzo.launch.progress.REPORT_EVERY_S", 0.01)
    with shown() as progress:
        assert shown().__enter__() is progress  # a command inside another one uses the same display
        one = request(tmp_path, "bf16", None)
        reports_to(one.progress_file)(Latest(4, 0.5, 1))
        with progress.following(one, passes_output=True):
            clock.now_s += 10.0
            for _ in range(LONGEST):
                time.sleep(0.01)
                if progress._last_line_s == clock.now_s:
                    break
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "mezzo: bf16, step 4, loss 0.5, 1 skipped, 10 s\n"


@pytest.mark.parametrize("passes_output", [False, True])
def test_a_line_moves_only_while_the_script_does_not_print_to_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, passes_output: bool
) -> None:
    monkeypatch.setattr("mezzo.launch.progress.REPORT_EVERY_S", 0.01)
    file = io.StringIO()
    progress = ProgressDisplay(Console(file=file, width=60, force_terminal=True, color_system=None))
    live = Live(console=progress.console, auto_refresh=False, transient=True)
    one = request(tmp_path, "bf16", None)
    reports_to(one.progress_file)(Latest(4, 0.5, 1))
    drawing = threading.Thread(target=progress.draw, args=(live,))
    with progress.following(one, passes_output=passes_output):
        drawing.start()
        for _ in range(LONGEST if not passes_output else 20):
            time.sleep(0.01)
            if "skipped" in file.getvalue():
                break
        moved = live.is_started
    progress.stop()
    drawing.join()
    live.stop()
    assert moved == (not passes_output)
    assert ("bf16, step 4, loss 0.5, 1 skipped, 0 s" in file.getvalue()) == (not passes_output)


def test_runs_beside_each_other_both_leave_their_number_of_steps(tmp_path: Path, clock: Clock) -> None:
    first, second, third = (request(tmp_path, "fp32", seed) for seed in range(3))
    progress, _ = display(first, second, third)
    with progress.following(first, passes_output=False), progress.following(second, passes_output=False):
        clock.now_s += 10
    progress.say_ended(first, run_record("fp32", num_steps=60))
    progress.say_ended(second, run_record("fp32", num_steps=90))
    with progress.following(third, passes_output=False):
        reports_to(third.progress_file)(Latest(10, 0.25, 0))
        assert "step 10, loss" in parts(progress)  # they differ, so the steps of a third one are unknown
