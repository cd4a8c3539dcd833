"""Runs of a script's first steps: the same steps as in the whole run, a clean stop, and a record that says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers_launch import run_in_child
from mezzo.launch import training
from mezzo.launch.training import StepLimit
from mezzo.observe.settings import StopScript
from mezzo.records import RunRecord
from paths import SCRIPTS


def ran(folder: Path, *arguments: str, script: str = "plain", policy: str = "fp32", **limits: Any) -> RunRecord:
    return run_in_child(folder, str(SCRIPTS / f"{script}.py"), *arguments, policy=policy, **limits)


# 130: the steady state, in which little is recorded
@pytest.mark.parametrize(("policy", "steps"), [("fp32", 1), ("bf16", 5), ("as-is", 1), ("as-is", 130), ("fp16", 130)])
def test_the_first_steps_are_those_of_the_whole_run(tmp_path: Path, policy: str, steps: int) -> None:
    whole = ran(tmp_path, "140", policy=policy)
    first = ran(tmp_path, "140", policy=policy, stop_after_steps=steps)
    assert (first.exit_code, first.error, first.first_steps) == (0, None, steps)
    assert len(first.steps) == len(first.steps.time_ms) == steps
    assert first.steps.loss == whole.steps.loss[:steps]
    assert whole.first_steps is None


@pytest.mark.parametrize("steps", [12, 13])
def test_a_run_that_ends_by_itself_was_not_stopped(tmp_path: Path, steps: int) -> None:
    record = ran(tmp_path, "12", stop_after_steps=steps)
    assert (record.first_steps, len(record.steps), record.error) == (None, 12, None)


def test_several_optimizers_stop_after_whole_steps(tmp_path: Path) -> None:
    whole, first = ran(tmp_path, script="gan"), ran(tmp_path, script="gan", stop_after_steps=3)
    assert first.first_steps == len(first.steps) == 3
    assert first.steps.loss == whole.steps.loss[:3]


def test_time_ends_a_run_after_the_open_step(tmp_path: Path) -> None:
    record = ran(tmp_path, "100000", stop_after_s=0.5)
    assert record.first_steps == len(record.steps)
    assert 0 < len(record.steps) < 100_000
    assert record.error is None


@pytest.mark.parametrize(
    ("ends", "stopped_at"),
    [
        ([102.0, 104.9, 105.0], 3),
        ([104.9, 105.0, 105.39, 105.41], 4),
        ([130.0, 130.01, 130.49, 130.5], 4),
        ([130.0, 160.0], 2),
    ],
    ids=["steps alike", "a first step up to the limit", "a first step that compiles", "long steps"],
)
def test_a_limit_counts_from_when_it_was_made(
    monkeypatch: pytest.MonkeyPatch, ends: list[float], stopped_at: int
) -> None:
    now = iter([100.0, *ends])
    monkeypatch.setattr(training.time, "monotonic", lambda: next(now))
    limit = StepLimit(steps=None, seconds=5.0)
    for step in range(1, stopped_at):
        limit.check(step)
        assert not limit.stopped
    with pytest.raises(StopScript):
        limit.check(stopped_at)
    assert limit.stopped


def test_a_script_that_fails_before_its_limit_fails(tmp_path: Path) -> None:
    record = ran(tmp_path, "not-a-number", stop_after_steps=5)
    assert (record.exit_code, record.first_steps, len(record.steps)) == (1, None, 0)
    assert record.error == "ValueError: invalid literal for int() with base 10: 'not-a-number'"
