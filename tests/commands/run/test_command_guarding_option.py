"""``--guard``: what is refused before a script runs, and the command that each alarm suggests."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from helpers_launch import children_in_this_process
from mezzo import cli
from mezzo.cli.script import Script
from mezzo.cli.words import TYPED_WORDS
from mezzo.commands.run.command import guard_request
from paths import SCRIPTS

REFUSED = [
    (["--guard", "always"], "mezzo: --guard 'always'; allowed: note, stop, rewind, and rewind:TIMES with 1 to 99\n"),
    (
        ["--guard", "rewind:0"],
        "mezzo: --guard 'rewind:0'; allowed: note, stop, rewind, and rewind:TIMES with 1 to 99\n",
    ),
    (["--guard", "rewind"], "mezzo: --guard rewind without --snapshot; allowed: --guard rewind --snapshot DURATION\n"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_what_cannot_be_used_is_refused_before_the_script_runs(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch\nopen('ran', 'w')\n")

    assert cli.main(["run", *words, "train.py"]) == 2

    assert capsys.readouterr().err.startswith(message)
    assert not Path("ran").exists()


COMMANDS = [
    ("fp16", "loss not finite", "mezzo diagnose --policy fp16 train.py --lr 1"),
    ("fp16", "loss spike", "mezzo compare --policies fp32,fp16 train.py --lr 1"),
    ("fp16", "gradients zero", "mezzo ranges --policy fp16 train.py --lr 1"),
    ("as-is", "skip storm", "mezzo diagnose --policy as-is train.py --lr 1"),
    ("as-is", "loss spike", "mezzo run --policy as-is --snapshot 1m --guard rewind train.py --lr 1"),
    ("fp32", "stuck updates", "mezzo ranges --policy fp16 train.py --lr 1"),
]


@pytest.mark.parametrize(("policy", "kind", "command"), COMMANDS)
def test_each_alarm_says_what_to_type(
    policy: str, kind: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "lib")  # without it, the script may be another one
    Path("train.py").write_text("import torch\n")
    script = Script(target="train.py", arguments=["--lr", "1"], as_module=False, out=None, log_to=None, as_json=False)
    token = TYPED_WORDS.set(("run", "--policy", policy, "train.py", "--lr", "1"))
    try:
        asked = guard_request(script, None, policy=policy)
    finally:
        TYPED_WORDS.reset(token)
    assert asked is not None
    assert (asked.action, {**asked.commands}[kind]) == ("note", f"PYTHONPATH=lib {command}")  # type: ignore[index]


def test_the_record_and_the_terminal_say_what_went_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    script = str(SCRIPTS / "going_wrong.py")
    with children_in_this_process():
        code = cli.main(["run", "--guard", "stop", "--policy", "fp32", "--out", "o", script, "nan"])
    assert code == 10
    said, record = capsys.readouterr(), json.loads(Path("o/record.json").read_text())
    assert record["guardrails"]["alarms"][0]["command"] == f"mezzo diagnose --policy fp32 {shlex.quote(script)} nan"
    assert f"mezzo: guard: next, type: mezzo diagnose --policy fp32 {shlex.quote(script)} nan" in said.err
    assert "loss not finite" in said.out
    assert "stopped by the guard" in said.out
    assert "Next: loss not finite in step 60; see why" in said.out
    assert "Guardrails" in Path("o/report.html").read_text()
