"""The table of docs/frameworks.md: complete and without defects, and cells of it that cover every command, framework and policy."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from benchmarks.scripts.frameworks import BEGIN, COMMANDS, END, FRAMEWORKS, PAGE, cell, stored_cells, table

CELLS = [
    ("pytorch", ("tune", "--changes", "none"), "works"),
    ("accelerate", ("diff", "--policies", "fp16,bf16"), "works"),
    ("lightning", ("compare", "--policies", "fp32,tf32,fp16-pure", "--gpus", "none"), "works"),
    ("fabric", ("audit", "--policy", "fp8"), "works"),
    ("trainer", ("watch",), "works"),
    ("accelerate", ("run", "--policy", "as-is"), "works"),
    ("keras-torch", ("ranges",), "works"),
    ("keras-tensorflow", ("run", "--policy", "bf16-pure"), "works"),
    ("keras-tensorflow", ("audit", "--policy", "fp16"), "works"),
    ("keras-tensorflow", ("diagnose", "--policy", "fp16"), "works"),
    ("keras-tensorflow", ("check", "--policies", "bf16", "--seeds", "2"), "works"),
    ("keras-jax", ("diagnose", "--policy", "fp16"), "refused"),
    ("paddle", ("check", "--policies", "bf16"), "works"),
    ("paddle", ("fallback", "--policy", "fp16-master"), "works"),
    ("paddle", ("audit", "--policy", "bf16-master"), "works"),
    ("paddle", ("predict", "--gpus", "H100"), "works"),
    ("paddle", ("resume-check",), "refused"),
    ("paddle", ("run", "--policy", "bf16"), "works"),
]
"""Not those of the environment that only the table needs."""


def _is_here(name: str) -> bool:
    package = FRAMEWORKS[name].environment.strip("-")
    others = [other for other in ("keras", "paddle") if importlib.util.find_spec(other)]
    return package in others or (not package and not others)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "words", "outcome"), [row for row in CELLS if _is_here(row[0])])
def test_a_cell(name: str, words: tuple[str, ...], outcome: str) -> None:
    command = "as-is" if "as-is" in words else words[0]
    found = cell(FRAMEWORKS[name], command, words, python=Path(sys.executable))
    assert found.outcome == outcome, found


def test_the_cells_cover_all_commands_and_policies() -> None:
    words = {part for _, typed, _ in CELLS for word in typed for part in word.split(",")}
    policies = ["as-is", "fp32", "tf32", "fp16", "bf16", "fp16-master", "bf16-master", "fp16-pure", "bf16-pure", "fp8"]
    assert words >= {*policies, *(typed[0] for typed in COMMANDS.values())}
    assert {name for name, _, _ in CELLS} == {n for n, one in FRAMEWORKS.items() if one.environment != "-trainers"}


def test_the_page_has_the_stored_cells_and_none_is_a_defect() -> None:
    cells = stored_cells()
    for name, framework in FRAMEWORKS.items():
        assert framework.environment == "-trainers" or list(cells[name]) == list(COMMANDS), name
    assert [(name, c) for name, row in cells.items() for c, found in row.items() if found.outcome == "defect"] == []
    _, begun, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    assert begun
    assert rest.partition(END)[0] == table(cells)
