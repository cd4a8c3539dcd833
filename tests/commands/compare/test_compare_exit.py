"""The exit code of a comparison, and the table of all exit codes against the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args
from unittest import mock

import pytest
from typer.main import get_command

import record_builders as build
from mezzo import cli, errors
from mezzo.cli.parser import app
from mezzo.commands.compare import judge as measure_compare
from mezzo.errors import MezzoError
from mezzo.records import FAILING, RunRecord, Verdict
from paths import ROOT, SCRIPTS

VERDICTS = [verdict for verdict in get_args(Verdict) if verdict != "baseline"]
PAGE = (ROOT / "docs" / "exit-codes.md").read_text(encoding="utf-8")
DEFAULT = ("diverged", "stopped_learning", "failed")


def ended_with(verdicts: list[Verdict], *options: str, folder: Path) -> int:
    """Return the exit code of a comparison whose rows have ``verdicts``; no script runs."""
    rows = [build.row("fp32", "baseline"), *(build.row("bf16", verdict) for verdict in verdicts)]
    record = build.compare_record(rows=rows, num_seeds=1, num_steps=2)
    runs: list[RunRecord] = [build.run_record("fp32", num_steps=2)]
    with (
        mock.patch("mezzo.commands.compare.command.run_all", return_value=runs),
        mock.patch.object(measure_compare, "compare", return_value=record),
        mock.patch("mezzo.cli.results.finish"),
    ):
        words = ["compare", "--policies", "fp32,bf16", "--seeds", "1", "--out", str(folder), *options]
        return cli.main([*words, str(SCRIPTS / "plain.py")])


@pytest.mark.parametrize("verdict", VERDICTS)
def test_by_default_a_policy_that_does_not_train_is_exit_code_1(verdict: Verdict, tmp_path: Path) -> None:
    assert ended_with([verdict], folder=tmp_path) == (1 if verdict in DEFAULT else 0)


CASES: list[tuple[str, list[Verdict], int]] = [
    ("none", ["diverged", "failed"], 0),
    ("different", ["diverged", "equivalent"], 0),
    ("different", ["different"], 1),
    ("different, undecided", ["equivalent", "undecided"], 1),
    ("stopped-learning", ["stopped_learning"], 1),
    ("stopped learning", ["stopped_learning"], 1),
    ("diverged,undecided", ["undecided"], 1),
    *(("not_equivalent", [verdict], 1) for verdict in FAILING),
    ("not-equivalent", ["different"], 1),
    ("not_equivalent", ["equivalent"], 0),
]


@pytest.mark.parametrize(("asked", "verdicts", "code"), CASES)
def test_the_verdicts_that_were_asked_for(asked: str, verdicts: list[Verdict], code: int, tmp_path: Path) -> None:
    assert ended_with(verdicts, "--fail-on", asked, folder=tmp_path) == code


def test_the_rows_are_named_on_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended_with(["stopped_learning"], "--json", folder=tmp_path)
    printed = capsys.readouterr()
    assert "exit code 1, because of --fail-on diverged,stopped_learning,failed: bf16 stopped learning\n" in printed.err
    assert "exit code" not in printed.out


@pytest.mark.parametrize("asked", ["", "divreged", "none,failed", "diverged,,failed", "baseline", "equivalent"])
def test_other_words_are_refused_before_anything_runs(
    asked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended_with(["failed"], "--fail-on", asked, folder=tmp_path) == 2
    said = capsys.readouterr().err
    assert f"--fail-on {asked!r}" in said
    assert "hint: type: mezzo compare " in said
    assert not list(tmp_path.iterdir())


# --- the page ----------------------------------------------------------------------------------------------------------------------


def rows(start: str) -> dict[str, str]:
    """Return the rows of the page's table whose head begins with ``start``: first cell to the rest."""
    lines = PAGE[PAGE.index(f"| {start} |") :].split("\n\n")[0].splitlines()[2:]
    return {line.split("|")[1].strip(): line.split("|", 2)[2] for line in lines}


def classes(cls: type[MezzoError] = MezzoError) -> list[type[MezzoError]]:
    return [cls, *(below for child in cls.__subclasses__() for below in classes(child))]


def test_every_error_with_a_code_has_its_row() -> None:
    own = {
        str(cls.exit_code): cls.__name__
        for cls in classes()
        if "exit_code" in vars(cls) and cls.__module__ == errors.__name__
    }
    shown = {code: name for code, rest in rows("code").items() for name in re.findall(r"^ `(\w+)`", rest)}
    assert shown == own


def test_every_command_has_its_row() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert {name.strip("`") for name in rows("command")} == set(commands)


def test_the_defaults_are_those_of_the_option() -> None:
    parameters = get_command(app).commands["compare"].params  # type: ignore[attr-defined]
    assert next(p.default for p in parameters if p.name == "fail_on") == ",".join(DEFAULT)
