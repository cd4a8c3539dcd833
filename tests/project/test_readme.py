"""What the README shows is made by ``make readme``: its table, from results that name their commands, and its pictures."""

from __future__ import annotations

import html
import json
import re
import sys
from pathlib import Path

import pytest

from paths import ROOT

if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not beside these tests", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from benchmarks import format_pictures, readme, recording
from benchmarks.harness import RESULTS, chosen, with_table
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


@pytest.mark.parametrize("page", ["", "(begin)\n", "(end)", "(end)\n(begin)\n", "(begin)\n(end) (begin)\n(end)"])
def test_a_page_without_its_markers_is_an_error(page: str) -> None:
    with pytest.raises(SystemExit, match=r"needs the line '\(begin\)'"):
        with_table(page, "(begin)\n", "(end)", "new\n")


def test_a_table_replaces_what_is_between_its_markers() -> None:
    assert with_table("a\n(begin)\nold\n(end)\nb", "(begin)\n", "(end)", "new\n") == "a\n(begin)\nnew\n(end)\nb"


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json*")), ids=lambda path: path.name)
def test_results_name_no_path_of_a_machine(path: Path) -> None:
    assert re.findall(r"/(?:tmp|home|root|work|Users)/\S*", path.read_text(encoding="utf-8")) == []


def test_error_rates_on_the_page_of_compare_are_those_of_the_results() -> None:
    rates: dict[str, float] = json.loads((RESULTS / "verdicts.json").read_text(encoding="utf-8"))["rates"]
    page = (ROOT / "docs/compare.md").read_text(encoding="utf-8")

    def of(pattern: str) -> list[float]:
        return [rate for what, rate in rates.items() if re.search(pattern, what)]

    worst = [
        of("^equivalent at the margin.*(normal|heavy)"),
        of("^different at the margin.*(normal|heavy)"),
        of("^equivalent at the margin.*accuracy"),
        of("^different at the margin.*accuracy"),
        of("noise around one level"),
        of("healthy runs that learn"),
    ]
    expected = [f"{max(found):.1%}" for found in worst] + [f"{int(100 * min(of('as promised decide')))}% or more"]
    table = page.partition("| what is simulated |")[2].partition("\n\n")[0]
    assert [row.split("|")[3].strip() for row in table.splitlines()[2:]] == expected
    late, early = "found: one run of three stop.*", "found: one run of three (?!stop).*"
    for text, figure in (
        ("or less. With noise of 30% it is {:.0%} to 100%", min(of(f"{early} 30%"))),
        ("100% of cases with noise of 2%, in {:.0%} with 10%", min(of(f"{late} 10%"))),
        ("with 10%, and in {:.0%} with 30%", min(of(f"{late} 30%"))),
    ):
        assert text.format(figure) in page
    assert min(of(f"{early} (2|10)%")) >= 0.99


def test_every_benchmark_that_a_page_names_exists() -> None:
    pages = [path.read_text(encoding="utf-8") for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))]
    commands = [words for page in pages for words in re.findall(r"python -m benchmarks((?: [a-z]\w*)+)", page)]
    named = {name for words in commands for name in words.split()} | set(chosen([]))
    assert len(named) >= 20
    folder = ROOT / "benchmarks"
    assert [
        name for name in sorted(named) if not any((folder / p).is_file() for p in (f"{name}.py", f"{name}/__init__.py"))
    ] == []
