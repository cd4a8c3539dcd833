"""A law over all commands: each option has one spelling, one meaning, a word for its value, and help that fits a screen."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from mezzo import cli
from mezzo.cli import values
from mezzo.cli.parser import app
from mezzo.cli.shown_help import GROUPS, MOST_SHOWN, PAGES, QUESTIONS
from mezzo.cli.vocabulary import COMMANDS as OTHER_COMMANDS
from mezzo.cli.vocabulary import EXAMPLES, OTHER_NAMES
from mezzo.cli.words import TYPED_WORDS
from mezzo.measure.predict import named
from mezzo.policy import PRESETS, Policy

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
OPTIONS = [
    (command, option.opts[0], option)
    for command, found in COMMANDS.items()
    for option in found.params
    if option.param_type_name == "option"
]
CHECKED = ("POLICY", "POLICIES", "GPU", "GPUS", "DURATION", "SIZE", "PLAN", "PLANS", "LIBRARY:NAME")
"""Values of these kinds are checked by the one parser of their kind."""
METAVARS = {
    # what an option's value is called wherever the option exists
    "--policies": "POLICIES",
    "--policy": "POLICY",
    "--gpus": "GPUS",
    "--gpu": "GPU",
    "--resume": "FOLDER",
    "--out": "FOLDER",
    "--budget": "DURATION",
    "--timeout": "DURATION",
    "--snapshot": "DURATION",
    "--notice": "DURATION",
    "--memory": "SIZE",
    "--seeds": "N",
    "--jobs": "N",
}


@pytest.mark.parametrize(("command", "name", "option"), OPTIONS, ids=[f"{c} {n}" for c, n, _ in OPTIONS])
def test_a_value_is_a_word_and_the_same_in_every_command(command: str, name: str, option: Any) -> None:
    if option.is_flag:
        assert option.metavar is None
        assert name not in METAVARS
        return
    assert option.metavar in EXAMPLES
    assert option.metavar == METAVARS.get(name, option.metavar)
    if option.metavar in CHECKED:
        assert option.callback is not None, f"{command} {name}: its value is not checked while the line is read"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example_then_at_most_eight_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    page = PAGES[command]
    assert shown.index(page.example) < shown.index("Options:")
    own = {name: option for own, name, option in OPTIONS if own == command}
    listed = re.findall(r"^  (-[-\w]+)", shown, re.MULTILINE)
    assert listed == list(page.shown)
    assert len(listed) <= MOST_SHOWN
    assert not re.search(r"<\w+|\]\.\.\.|\{SCRIPT", shown)
    assert cli.main([command, "--help-all"]) == 0
    assert set(re.findall(r"^  (-[-\w]+)", capsys.readouterr().out, re.MULTILINE)) == {*own}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_example_of_a_command_is_not_refused(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("parser.add_argument('--epochs')\n")
    lines = [PAGES[command].example, *(line for _, *asked in QUESTIONS for line in asked if line.split()[1] == command)]
    for line in lines:
        words = shlex.split(line)
        assert words[:2] == ["mezzo", command]
        token = TYPED_WORDS.set(tuple(words[1:]))
        COMMANDS[command].make_context(command, words[2:])
        TYPED_WORDS.reset(token)


def test_mezzo_alone_shows_the_questions_and_all_commands_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    places = [shown.index(f"\n{question}\n    {command}\n") for question, command, *_ in QUESTIONS]
    places += [shown.index(f"\n{group.capitalize()}\n") for group in GROUPS]
    assert places == sorted(places)
    assert len(QUESTIONS) == 5
    assert set(re.findall(r"^  ([a-z-]+) ", shown, re.MULTILINE)) == set(COMMANDS) == set(PAGES)
    assert {page.group for page in PAGES.values()} == set(GROUPS)


LINES_TO_TYPE = [
    ("compare", "--gpu t4,l4", "--gpus t4,l4"),
    ("tune", "--repeats 3", "--seeds 3"),
    *(
        (command, "--resume --out runs/mine", "--resume runs/mine")
        for command in ("check", "compare", "fallback", "tune")
    ),
    ("compare", "--timeout 600", "--timeout 600s"),
    ("check", "--budget 600", "--budget 600s"),
    ("tune", "--budget 600", "--budget 600s"),
    ("run", "--snapshot 300", "--snapshot 300s"),
    ("resume-check", "--notice 10", "--notice 10s"),
    ("audit", "--steps 3,10", "--at 3,10"),
]


@pytest.mark.parametrize(("command", "typed", "meant"), LINES_TO_TYPE)
def test_an_option_that_is_almost_right_gets_the_line_to_type(
    command: str,
    typed: str,
    meant: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import torch\n")
    assert cli.main([command, *typed.split(), "train.py"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"  hint: type: mezzo {command} {meant} train.py"


def test_the_tables_name_commands_and_options_that_exist() -> None:
    options = {name for _, name, _ in OPTIONS}
    assert {one[0] for meant in OTHER_NAMES.values() for one in meant} <= options
    assert not {*OTHER_NAMES} & options
    assert {command.split()[0] for command in OTHER_COMMANDS.values()} <= {*COMMANDS}
    assert not {*OTHER_COMMANDS} & {*COMMANDS}
    assert named.OPTIMIZERS.keys() == {*values.OPTIMIZER_NAMES}


@pytest.mark.parametrize(
    ("typed", "preset"),
    [
        *(("FP16", "fp16"), ("Bf16-Master", "bf16-master"), (" o1 ", "fp16"), ("float16", "fp16"), ("half", "fp16")),
        *(("amp", "fp16"), ("AMP", "fp16"), ("bfloat16", "bf16"), ("BFloat16", "bf16"), ("float32", "fp32")),
    ],
)
def test_case_does_not_matter_and_other_names_are_known(typed: str, preset: str) -> None:
    assert Policy.parse(typed) == PRESETS[preset]


@pytest.mark.parametrize("typed", ["as-is", "AS-IS", "As-Is"])
def test_the_scripts_own_precision_in_any_case(typed: str) -> None:
    from mezzo.cli.options import typed_name
    from mezzo.cli.values import parse_policy

    assert parse_policy(typed) is None
    assert typed_name(typed, None) == ""


def test_ctrl_c_is_quiet_from_the_first_moment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    early = "import sys, mezzo.cli; sys.exit('typer' in sys.modules or 'mezzo.policy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", early], check=False).returncode == 0

    def interrupted(words: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_main", interrupted)  # as if it came during the imports
    assert cli.main(["run", "train.py"]) == 130
    assert capsys.readouterr() == ("", "")


def test_doctor_answers_where_nothing_can_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir("/proc")
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr()
    assert "Environment" in printed.out
    assert re.match(r"mezzo: no record was written: .*; --out FOLDER names another folder\n$", printed.err)
