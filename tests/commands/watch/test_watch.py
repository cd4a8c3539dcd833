"""The command: the script's own precision, what holds it back at the end, the record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mezzo import cli
from paths import SCRIPTS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:tensorboard")  # of TensorBoard itself
def test_a_sleeping_script_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = str(SCRIPTS / "bottlenecks" / "planted.py")
    places = ("--out", str(tmp_path / "out"), "--log-to", f"tensorboard:{tmp_path / 'events'}")
    assert cli.main(["watch", *places, script, "sleep", "0.6"]) == 0
    printed = capfd.readouterr().out
    assert "What holds it back" in printed
    record = json.loads((tmp_path / "out" / "record.json").read_text(encoding="utf-8"))
    assert (record["policy"], record["bottleneck"]["limit"]) == ("as-is", "waiting")
    assert record["bottleneck"]["line"].startswith("planted.py:")
    assert record["bottleneck"]["line"] in printed
    (live,) = (tmp_path / "events").glob(
        "*-live"
    )  # logged while the script ran, in addition to the line on standard error
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(live))
    events.Reload()
    assert {"live/loss", "live/thread_asleep"} <= {*events.Tags()["scalars"]}
