"""The pages that the site makes from the code: every command with all its options, every public name with its docstring."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.main import get_command

import mezzo
from mezzo.cli.parser import app
from paths import ROOT

DOCS = ROOT / "docs"
COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_pages", DOCS / "reference_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = loaded()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_commands_page_has_its_options_guide_and_exit_codes(name: str) -> None:
    page = PAGES.command_page(name, COMMANDS[name], DOCS)
    options = [option for p in COMMANDS[name].params if p.param_type_name == "option" for option in p.opts]
    assert [option for option in options if f"`{option}" not in page] == []
    assert page.startswith(f"# `mezzo {name}`\n\n{COMMANDS[name].help.splitlines()[0]}")
    assert "\n- **0**: " in page
    assert "Guide: [" in page
    targets = re.findall(r"\]\(\.\./([\w./-]+)", page)
    assert len(targets) >= 2
    assert [target for target in targets if not (DOCS / target).is_file()] == []


def test_usage_and_help_are_shown_as_they_are() -> None:
    assert "    mezzo predict [OPTIONS] [SCRIPT] [ARGUMENTS]\n" in PAGES.command_page(
        "predict", COMMANDS["predict"], DOCS
    )
    assert "    mezzo run [OPTIONS] SCRIPT [ARGUMENTS]\n" in PAGES.command_page("run", COMMANDS["run"], DOCS)
    assert PAGES.escaped("a*b [default: 1; x>=1] 'acc=([0-9.]+)'") == r"a\*b \[default: 1; x\>=1\] 'acc=(\[0-9.\]+)'"


def test_the_page_of_a_module_has_every_public_name() -> None:
    page = PAGES.module_page("mezzo", [])
    found = re.findall(r"^\.\. auto(class|function):: mezzo\.(\w+)$", page, re.M)
    assert [name for _, name in found] == dir(mezzo)
    assert ("class", "Session") in found
    assert ("function", "audit") in found


def test_the_pages_of_the_table_are_those_of_the_code() -> None:
    table = (DOCS / "commands.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `mezzo ([\w-]+)` \|", table, re.M)) == sorted(COMMANDS)
    modules = re.findall(r"^\| `([\w.]+)` \|", (DOCS / "library.md").read_text(encoding="utf-8"), re.M)
    assert {name for name in modules if not any(page.startswith(name) for page in PAGES.MODULES)} == set()


def test_a_command_without_a_row_is_refused(tmp_path: Path) -> None:
    (tmp_path / "commands.md").write_text("# Commands\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"docs/commands\.md has no row for mezzo run"):
        PAGES.command_page("run", COMMANDS["run"], tmp_path)


def test_what_was_written_is_removed(tmp_path: Path) -> None:
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "command-run.md").write_text("", encoding="utf-8")
    assert PAGES.pages("command", tmp_path) == ["reference/command-run"]
    PAGES.remove(tmp_path)
    assert PAGES.pages("command", tmp_path) == []
