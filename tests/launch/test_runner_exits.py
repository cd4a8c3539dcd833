"""Exit codes of runs that were stopped and left no record: those of a shell, whatever the process itself returned."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from helpers_launch import request_for
from mezzo.launch import runner
from mezzo.records import RunRecord


class Process:
    """Runs until it is stopped, then returns a given code."""

    def __init__(self, returned: int) -> None:
        self._returned, self._stopped = returned, False

    def wait(self, timeout: float | None = None) -> int:
        if not self._stopped:
            raise subprocess.TimeoutExpired("a run", timeout or 0.0)
        return self._returned

    def pass_on(self, number: int, *, kill_after_s: float = 0.0) -> None:
        self._stopped = True

    def kill(self) -> None:
        self._stopped = True


@pytest.mark.parametrize(
    ("returned", "limit_s", "exit_code"),
    [
        # stopped because another process of the job has failed
        (-15, None, 143),
        (143, None, 143),  # it handled the signal
        (0, None, 1),
        # stopped at its limit
        (-9, 5.0, 137),
        (3, 5.0, 3),  # it ended by itself in the same moment
    ],
)
def test_a_stopped_run_has_a_shells_exit_code(
    returned: int, limit_s: float | None, exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_start", lambda request, sink: Process(returned))
    request = request_for(tmp_path, "train.py", policy=None)
    interrupted = (lambda: True) if limit_s is None else None
    record = runner.run_alone(request, output=tmp_path / "output.log", limit_s=limit_s, interrupted=interrupted)
    assert isinstance(record, RunRecord)
    assert record.exit_code == exit_code
