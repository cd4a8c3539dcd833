"""The README fits one screen and quotes what other pages show; the table of figures is made by ``make readme`` from results."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from docs_pages import num_words
from paths import ROOT

if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not beside these tests", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from benchmarks.__main__ import BENCH, benchmarks, main
from benchmarks.pages import format_pictures, readme
from benchmarks.pages.readme import LINES, figures, results, written
from benchmarks.shared import RESULTS
from benchmarks.shared.harness import with_table

TEXT = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
THROUGHPUT = "docs/images/predicted_throughput.svg"
PREDICTIONS = (ROOT / "docs/evidence/predictions.md").read_text(encoding="utf-8")


def test_the_table_is_what_the_results_say() -> None:
    assert written(TEXT) == TEXT


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_readme_is_one_screen(name: str) -> None:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 90
    assert any("fp16 100%" in line for line in lines[:30])


TASKS = {
    "on, with proof": ("$ mezzo run", None, ""),
    "why NaN": ("Why is the loss NaN", None, ""),
    "memory and speed on a 4090": ("Which GPU, how much", "predict", "rtx-4090   fp32"),
    "accumulation with checkpointing": ("recomputes activations", "checkpointing", "--accumulate 4"),
    "Paddle O2": ("O2 (`fp16-master`)", "paddle", "mezzo run --policy fp16-master"),
}
"""What readers come for: the row of the README, and the page with the line to type, if that is another."""


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_found_within_three_minutes_of_reading(task: str) -> None:
    row, page, line = TASKS[task]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    words = num_words(text[: text.index("\n", text.index(row))])
    if page is not None:
        assert f"docs/{page}.md" in text
        text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
        words += num_words(text[: text.index("\n", text.index(line))])
    assert words <= 600


def spaced(line: str) -> str:
    """Return a line with single spaces and without the dots that stand for what is left out."""
    return " ".join(line.removesuffix("...").split())


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_output_in_the_readme_is_that_of_pages_with_whole_outputs(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    block = re.findall(r"^```\n(.*?)^```", text, re.S | re.M)[0]
    shown = [spaced(line) for line in block.splitlines() if spaced(line)]
    quoted = [
        spaced(line)
        for row in re.findall(r"^\| .*[?\uff1f].*", text, re.M)
        for line in re.findall(r"`([^`]{40,})`", row)
    ]
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    whole = "\n".join(spaced(line) for page in pages for line in page.splitlines())
    assert len(shown) >= 10
    assert [line for line in [*shown, *quoted] if line not in whole] == []


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_times_of_the_readme_are_those_of_the_page_of_the_gpu(name: str) -> None:
    page = (ROOT / "docs/h100.md").read_text(encoding="utf-8").split("## Captured steps")[1].split("\n## ")[0]
    times = re.findall(r"\d+\.\d+ ms", (ROOT / name).read_text(encoding="utf-8"))
    assert len(times) >= 6
    assert [time for time in times if time not in page] == []


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.benchmark}: {line.what[:40]}")
def test_every_figure_was_printed_by_the_benchmark_that_it_names(line: readme.Line) -> None:
    record = json.loads((RESULTS / f"{line.benchmark}.json").read_text(encoding="utf-8"))
    assert record["command"] == f"python -m benchmarks {line.benchmark}"
    assert line.benchmark in BENCH
    assert line.figures(results(line.benchmark)) in figures()


def test_every_picture_is_made_by_a_command() -> None:
    taken = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs/images").iterdir()}
    pictures = format_pictures
    drawn = {pictures.REACH, pictures.UPDATES, pictures.GRADIENT_VALUES, pictures.BLOCK_VALUES}
    assert taken == {THROUGHPUT, *drawn}
    assert f"predict_throughput --rows FILE --hold-out gpu-family --plot {THROUGHPUT}`" in PREDICTIONS
    assert re.search(r"^readme: .*\n\t.*python -m benchmarks readme$", (ROOT / "Makefile").read_text(), re.M)


def test_a_changed_figure_is_put_right() -> None:
    line = next(line for line in figures().splitlines() if "bytes per parameter" in line)
    assert written(TEXT.replace(line, line.replace("16 in FP16", "12 in FP16"))) == TEXT


def test_a_page_without_a_place_for_the_table_is_refused() -> None:
    with pytest.raises(SystemExit, match="generated by make readme"):
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


def test_error_rates_on_the_page_of_verdicts_are_those_of_the_results() -> None:
    rates: dict[str, float] = json.loads((RESULTS / "verdicts.json").read_text(encoding="utf-8"))["rates"]
    page = (ROOT / "docs/evidence/verdicts.md").read_text(encoding="utf-8")

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
    for wrong in ("2^8: too low", "2^5: fits"):
        found = of(f"a loss scale around {re.escape(wrong)}")
        assert max(found) <= 0.05
        assert f"| {', '.join(f'{rate:.1%}' for rate in found)} | 5% |" in page


STORED = {path.stem: path for path in RESULTS.glob("predict_*.json")}
OTHERS = {"predict_trace", "predict_memory_pairs"}
"""A benchmark of time, and a table with one row more than the 106 of the page."""


@pytest.mark.parametrize("path", [STORED[name] for name in sorted(STORED.keys() - OTHERS)], ids=lambda path: path.stem)
def test_errors_on_the_page_of_predictions_are_those_of_the_results(path: Path) -> None:
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    total = next(row["measured"] for row in rows if row["what"] in ("all", "throughput"))
    errors = re.findall(r"(?:mean|median|p90) [\d.]+%", total)
    assert ", ".join(errors) in PREDICTIONS


def test_every_benchmark_that_a_page_names_exists() -> None:
    pages = [path.read_text(encoding="utf-8") for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))]
    commands = [
        words.split() for page in pages for words in re.findall(r"python -m\s+benchmarks((?: [a-z]\w*)+)", page)
    ]
    known = set(benchmarks())
    assert len({words[0] for words in commands}) >= 30
    assert [words for words in commands if words[0] not in known] == []
    assert known >= {*BENCH, *(name for words in commands if len(words) > 1 and words[1] in known for name in words)}


def test_every_benchmark_is_found_by_its_question(capsys: pytest.CaptureFixture[str]) -> None:
    found = benchmarks()
    assert len(found) >= 35
    for name, one in found.items():
        module = importlib.import_module(one.module.removesuffix(".__main__"))
        assert (module.__doc__ or "").splitlines()[0] == one.question
        assert callable(importlib.import_module(one.module).main), name
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert [name for name, one in found.items() if f"  {name:18} {one.question}\n" not in listed] == []
    assert main(["no_such_benchmark"]) == 2


def test_programs_of_benchmarks_lie_where_their_names_say() -> None:
    """A file with a ``main`` that asks no question would not be listed."""
    asked = {one.module for one in benchmarks().values()}
    parts = {"benchmarks.gpu.first_gpu.pytest_results", "benchmarks.prediction.paddle_zoo"}  # started by another
    for path in (ROOT / "benchmarks").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if re.search(r"^def main\(", path.read_text(encoding="utf-8"), re.M) and module != "benchmarks.__main__":
            assert module in asked | parts
