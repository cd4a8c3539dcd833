"""What the README shows is made by ``make readme``: its table, from results that name their commands, and its pictures."""

from __future__ import annotations

import json
import re
import sys

import pytest

from paths import ROOT

if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not beside these tests", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from benchmarks import readme
from benchmarks.harness import RESULTS, chosen
from benchmarks.readme import LINES, PICTURE, results, table, unfair, written

import record_builders as build

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_is_what_the_results_say() -> None:
    assert written(TEXT) == TEXT


def test_no_figure_of_the_table_stands_outside_what_is_made() -> None:
    section = TEXT.split("## Measured\n")[1].split("\n## ")[0]
    by_hand = section.replace(table(), "")
    assert "|" not in by_hand
    assert re.findall(r"\d+(?:\.\d+)?", by_hand.replace("AVX2", "")) == []


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.benchmark}: {line.what[:40]}")
def test_every_figure_was_printed_by_the_benchmark_that_it_names(line: readme.Line) -> None:
    record = json.loads((RESULTS / f"{line.benchmark}.json").read_text(encoding="utf-8"))
    assert record["command"] == f"python -m benchmarks {line.benchmark}"
    assert line.benchmark in chosen([])
    assert line.figures(results(line.benchmark)) in table()


def test_every_picture_is_one_that_the_command_takes() -> None:
    assert re.findall(r"!\[[^]]*\]\(([^)]+)\)", TEXT) == [PICTURE]
    assert [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs/images").iterdir()] == [PICTURE]
    assert re.search(r"^readme: .*\n\t.*python -m benchmarks\.readme$", (ROOT / "Makefile").read_text(), re.M)


def test_a_changed_figure_is_put_right() -> None:
    line = next(line for line in table().splitlines() if "bytes a parameter" in line)
    assert written(TEXT.replace(line, line.replace("16 in FP16", "12 in FP16"))) == TEXT


def test_times_of_emulated_policies_do_not_stand_beside_measured_ones() -> None:
    assert unfair(build.compare_record()) == [row.policy for row in build.compare_rows() if row.emulated]
    assert unfair(build.emulated_record()) != []


def test_a_readme_without_a_place_for_the_table_is_refused() -> None:
    with pytest.raises(SystemExit, match="made by make readme"):
        written("# Mezzo\n")
