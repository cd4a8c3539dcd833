"""Wrong command lines get the line to type, with the user's own words in it, and torch is not imported for it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import test_usage
from typer.main import get_command
from wrong_lines import FILES, WRONG

from mezzo.cli.parser import app
from mezzo.cli.words import TYPED_WORDS

ALL_IN_ONE_PROCESS = """
import contextlib, io, json, shlex, sys
from mezzo import cli
for line in json.load(sys.stdin):
    said, printed = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
        code = cli.main(shlex.split(line))
    print(json.dumps([code, said.getvalue(), printed.getvalue(), "torch" in sys.modules]), flush=True)
"""
COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, tuple[int, str, str, bool]]:
    """What each line is answered with: exit code, standard error, standard output, and whether torch was imported by then."""
    lines = [line for line, _ in WRONG]
    program = [sys.executable, "-c", ALL_IN_ONE_PROCESS]
    done = subprocess.run(program, input=json.dumps(lines), cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(lines, (tuple(json.loads(one)) for one in done.stdout.splitlines()), strict=True))


def test_there_are_enough_of_them() -> None:
    lines = [line for line, _ in WRONG]
    assert len(set(lines)) == len(lines) >= 120
    assert not {*lines} & {typed for typed, _, _ in test_usage.WRONG}


@pytest.mark.parametrize(("line", "instead"), WRONG, ids=[line for line, _ in WRONG])
def test_a_wrong_line_gets_the_line_to_type(
    said: dict[str, tuple[int, str, str, bool]], line: str, instead: str
) -> None:
    code, error, printed, has_torch = said[line]
    assert (code, printed, has_torch) == (2, "", False)
    first, hint = error.removesuffix("\n").split("\n  hint: ")
    assert first.startswith("mezzo: ")
    assert "Traceback" not in error
    typed, rest = hint.removeprefix("type: "), ("", ", or", "; by GPU", ", with the", " and", ": mezzo")
    assert typed.startswith(instead)
    assert typed.removeprefix(instead).startswith(rest)
    assert hint.startswith("type: ") or not instead.startswith("mezzo")


def test_what_is_said_to_type_is_not_refused_for_its_options(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    refused = []
    for line in dict.fromkeys(instead for _, instead in WRONG if instead.startswith("mezzo ")):
        name, *rest = shlex.split(line)[1:]
        if name not in COMMANDS or rest[-1:] == ["--help"] or "{" in line:
            continue
        token = TYPED_WORDS.set((name, *rest))
        try:
            COMMANDS[name].make_context(name, rest)
        except Exception as error:
            refused.append((line, str(error)))
        finally:
            TYPED_WORDS.reset(token)
    assert refused == []
