"""``--log-to`` during a run: what a run reports is in the tracker before the run has ended, and stays there if it is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import pytest

from mezzo.cli.progress import LiveLog, numbers_of
from mezzo.launch.progress import followed, reports_to, shown_on
from mezzo.launch.request import Request
from mezzo.measure.live import Latest
from mezzo.report import tracking
from mezzo.report.tracking import LiveRun, Tracker

pytest.importorskip("tensorboard")
pytestmark = [  # protobuf's and tensorboard's own code
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:tensorboard"),
]
LATEST = Latest(3, 0.5, 1, "input 43%", 65536.0, 1.25, {"input": 0.43, "thread asleep": 0.1, "GPU power, W": 300.0})


def request(folder: Path) -> Request:
    path = str(folder / "first" / "record.json")
    return Request(
        target="train.py", kind="script", policy=None, record_path=path, command=("mezzo", "run", "train.py")
    )


def test_what_the_host_knows_is_logged() -> None:
    assert numbers_of(LATEST) == {
        "live/loss": 0.5,
        "live/loss_scale": 65536.0,
        "live/grad_norm": 1.25,
        "live/skipped_updates": 1.0,
        "live/input": 0.43,
        "live/thread_asleep": 0.1,
        "live/GPU_power_W": 300.0,
    }
    assert numbers_of(Latest(3)) == {}


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Return a curve as TensorBoard reads it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_a_step_is_on_disk_before_the_run_has_ended(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    live = LiveLog([f"tensorboard:{tmp_path / 'events'}"], every_s=0.05)
    folder = tmp_path / "events" / "first-live"
    with shown_on(live), followed(request(tmp_path), passes_output=True) as asked:
        reports_to(asked.progress_file)(LATEST)
        end = time.monotonic() + 60
        while not (folder.exists() and "live/input" in _tags(folder)) and time.monotonic() < end:
            time.sleep(0.05)
        assert scalars(folder, "live/loss_scale") == [(3, 65536.0)]
        reports_to(asked.progress_file)(LATEST._replace(step=9, loss=0.25))
    assert scalars(folder, "live/loss") == [(3, 0.5), (9, 0.25)]


def _tags(folder: Path) -> list[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    tags: list[str] = events.Tags()["scalars"]
    return tags


class Failing:
    """A tracker whose server goes away after the first step."""

    where = "nowhere"

    def __init__(self, run: LiveRun, place: str) -> None:
        self.logged: list[tuple[int, Mapping[str, float]]] = []

    def log(self, values: Mapping[str, float], step: int) -> None:
        raise ConnectionError("the server is gone")

    def close(self) -> None:
        raise AssertionError("it was left out before")


def test_a_tracker_that_fails_is_noted_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "first").mkdir()
    made = Tracker(package="json", install="", check=str, send=mock.Mock(), live_writer=Failing)
    with (
        mock.patch.dict(tracking.TRACKERS, {"tensorboard": made}),
        shown_on(LiveLog(["tensorboard"], every_s=0.01)),
        followed(request(tmp_path), passes_output=True) as asked,
    ):
        reports_to(asked.progress_file)(LATEST)
    said = "--log-to tensorboard failed during the run (ConnectionError: the server is gone)"
    assert said in capsys.readouterr().err


SCRIPT = """
import time
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(600):
    model(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.1)
"""


@pytest.mark.slow
def test_a_killed_command_keeps_what_was_logged(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    words = [
        sys.executable,
        "-m",
        "mezzo",
        "run",
        "--policy",
        "fp16",
        "--out",
        "out",
        "--log-to",
        "tensorboard:events",
        "train.py",
    ]
    process = subprocess.Popen(words, cwd=tmp_path)
    folder, end = tmp_path / "events" / "out-live", time.monotonic() + 90
    try:
        while not (folder.exists() and "live/input" in _tags(folder)) and time.monotonic() < end:
            time.sleep(0.5)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    ((step, scale), *_) = scalars(folder, "live/loss_scale")
    assert step >= 1
    assert scale == 65536.0 / 2 ** scalars(folder, "live/skipped_updates")[0][1]  # the first gradient may overflow
    assert {"live/loss", "live/grad_norm", "live/skipped_updates", "live/input"} <= set(_tags(folder))
