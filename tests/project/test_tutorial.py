"""What the tutorial shows is what its commands print: line by line and in order, numbers aside."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forked_processes import in_fork
from paths import ROOT

BLOCKS = re.findall(r"^```\n(.*?)^```", (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"), re.S | re.M)
SHOWN = [part for block in BLOCKS for part in re.split(r"^\$ ", block, flags=re.M) if part.startswith("mezzo ")]
"""Each command with the output that the page shows."""
LONG = ("mezzo compare",)
"""Nine trainings, whose table is tested with comparisons."""
OF_THE_MACHINE = ("mezzo doctor",)


def masked(line: str) -> str:
    """Return a line without its numbers, and with single spaces: another processor rounds and measures differently."""
    return " ".join(re.sub(r"\d[\d.]*", "0", line).split())


@pytest.mark.slow
@pytest.mark.parametrize("shown", [part for part in SHOWN if not part.startswith((*LONG, *OF_THE_MACHINE))])
def test_a_command_of_the_tutorial_prints_what_the_page_shows(
    shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, *lines = shown.rstrip().splitlines()
    words = command.split()[1:]
    words[1:1] = ["--out", str(tmp_path / "out")]
    monkeypatch.setenv("COLUMNS", "110")
    ended = in_fork(words, folder=ROOT)
    printed = iter([masked(line) for line in ended.printed.splitlines()])
    missing = [line for line in map(masked, lines) if line not in ("", "...") and line not in printed]
    assert missing[:1] == [], f"exit code {ended.code}:\n{ended.printed}"


def test_the_tutorial_shows_what_commands_print() -> None:
    assert {part.split()[1] for part in SHOWN} == {"doctor", "run", "compare", "audit", "diagnose", "ranges"}
