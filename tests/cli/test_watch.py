"""The command: the script's own precision, what holds it back at the end, the record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mezzo import cli
from paths import SCRIPTS


def test_a_sleeping_script_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = str(SCRIPTS / "bottlenecks" / "planted.py")
    assert cli.main(["watch", "--out", str(tmp_path / "out"), script, "sleep", "0.6"]) == 0
    printed = capfd.readouterr().out
    assert "What holds this run back" in printed
    record = json.loads((tmp_path / "out" / "record.json").read_text(encoding="utf-8"))
    assert (record["policy"], record["bottleneck"]["limit"]) == ("as-is", "waiting")
    assert record["bottleneck"]["line"].startswith("planted.py:")
    assert record["bottleneck"]["line"] in printed
