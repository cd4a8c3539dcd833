"""``--log-to``: what is refused before a script runs, and what happens when a tracker fails after it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from typer.main import get_command

import record_builders as build
from mezzo import cli
from mezzo.cli.parser import app
from mezzo.policy import PRESETS
from mezzo.records import write_record
from mezzo.report import tracking
from mezzo.report.tracking import TRACKERS, Tracker


@pytest.mark.parametrize(
    ("command", "option"), [("run", "policy"), ("compare", "policies"), ("check", "policies"), ("predict", "policies")]
)
def test_help_names_the_presets_and_which_have_master_weights(command: str, option: str) -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    said = next(p.help for p in commands[command].params if p.name == option)
    for name, policy in PRESETS.items():
        assert re.search(rf"\b{name}\b(?!-)", said), name
        clause = next(part for part in re.split("[;,.] ", said) if re.search(rf"\b{name}\b(?!-)", part))
        if policy.casting == "model":
            assert ("have none" if not policy.master_weights else "keep FP32 master weights") in clause


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_library_is_named_before_the_script_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = TRACKERS[name].package
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *rest: None if n == package else real(n, *rest))
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("open('ran', 'w')\n")
    assert cli.main(["run", "--log-to", name, "train.py"]) == 2
    install = {"tensorboard": "tensorboardX"}.get(name, name)
    assert capsys.readouterr().err == (
        f"mezzo: --log-to {name}: {package} is not installed\n  hint: pip install {install}, or leave the option out\n"
    )
    assert not Path("ran").exists()


def test_several_trackers_and_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> str:
        raise ConnectionError("no route\nto host")

    pytest.importorskip("tensorboardX")
    broken = Tracker(package="json", install="json", check=lambda place: None, send=fails, live_writer=fails)
    monkeypatch.setitem(tracking.TRACKERS, "wandb", broken)
    path = tmp_path / "a b" / "record.json"
    write_record(build.doctor_record(), path)
    code = cli.main(["report", str(path), "--log-to", "wandb", "--log-to", f"tensorboard:{tmp_path / 'events'}"])
    assert code == 0
    assert capsys.readouterr().err.splitlines() == [
        f"mezzo: --log-to wandb failed (ConnectionError: no route); to log the record again, type: "
        f"mezzo report '{path}' --log-to wandb",
        f"mezzo: logged to tensorboard: {tmp_path}/events/a b; to see it: tensorboard --logdir {tmp_path}/events",
    ]
