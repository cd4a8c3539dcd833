"""What the README shows is made by ``make readme``: its table, from results that name their commands, and its pictures."""

from __future__ import annotations

import html
import json
import re
import sys

import pytest

from paths import ROOT

if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not beside these tests", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from benchmarks import format_pictures, readme, recording
from benchmarks.harness import RESULTS, chosen
from benchmarks.readme import LINES, PICTURE, results, table, unfair, written

import record_builders as build

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
THROUGHPUT = "docs/images/predicted_throughput.svg"
PREDICTIONS = (ROOT / "docs/predict.md").read_text(encoding="utf-8")


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


def test_every_picture_is_made_by_a_command() -> None:
    assert re.findall(r"!\[[^]]*\]\(([^)]+)\)", TEXT) == [recording.PICTURE, PICTURE]
    taken = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs/images").iterdir()}
    drawn = {format_pictures.REACH, format_pictures.UPDATES, format_pictures.GRADIENT_VALUES}
    assert taken == {recording.PICTURE, PICTURE, THROUGHPUT, *drawn}
    assert f"predict_accuracy.py --rows FILE --hold-out gpu-family --plot {THROUGHPUT}`" in PREDICTIONS
    assert re.search(r"^readme: .*\n\t.*python -m benchmarks\.readme$", (ROOT / "Makefile").read_text(), re.M)


def test_the_recorded_session_shows_its_commands_and_asks_for_nothing() -> None:
    picture = (ROOT / recording.PICTURE).read_text(encoding="utf-8")
    words = html.unescape(re.sub(r"<[^>]+>", "", picture)).replace("\xa0", " ")
    assert [shown.command for shown in recording.SESSION if shown.command not in words] == []
    assert all(ending not in words for ending in ("Traceback", "hint:", "error:"))
    assert len(picture.encode()) <= recording.LARGEST_BYTES
    assert re.findall(r"@import|@font-face|url\((?!#)|(?:href|src)=", picture) == []


OUTPUT = "1.5\n\n\x1b[1mtrain.py under fp16: bad\x1b[0m\n\nWhere\n  x\n\n\x1b[1mHow\x1b[0m\n  y"


def test_a_part_of_an_output_marks_what_it_leaves_out() -> None:
    shown = recording.Shown("mezzo diagnose", begins="under fp16", until="How")
    kept = recording.part(OUTPUT, shown)
    assert kept == ["...", "\x1b[1mtrain.py under fp16: bad\x1b[0m", "", "Where", "  x", "..."]
    picture = recording.drawn([(shown.command, kept)])
    assert "font-face" not in picture
    assert "train.py" in picture
    with pytest.raises(SystemExit, match="printed no part"):
        recording.part(OUTPUT, shown._replace(until="Missing"))


def test_a_changed_figure_is_put_right() -> None:
    line = next(line for line in table().splitlines() if "bytes a parameter" in line)
    assert written(TEXT.replace(line, line.replace("16 in FP16", "12 in FP16"))) == TEXT


def test_times_of_emulated_policies_do_not_stand_beside_measured_ones() -> None:
    assert unfair(build.compare_record()) == [row.policy for row in build.compare_rows() if row.emulated]
    assert unfair(build.emulated_record()) != []


def test_a_readme_without_a_place_for_the_table_is_refused() -> None:
    with pytest.raises(SystemExit, match="made by make readme"):
        written("# Mezzo\n")
