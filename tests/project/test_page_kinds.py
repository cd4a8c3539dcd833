"""Pages for users are short, show what a command prints, and leave tests and benchmarks to the pages of evidence."""

from __future__ import annotations

import csv
import re
from collections import Counter

import pytest

from docs_pages import DOCS, contents, num_words, user_pages
from paths import ROOT

if not (ROOT / "docs/conf.py").is_file():
    pytest.skip("the docs are not beside these tests", allow_module_level=True)

MOST_WORDS = 800
MOST_WORDS_OF_OTHERS = 2400
CONTENTS, USER_PAGES = contents(), user_pages()


def outputs(page: str) -> list[str]:
    """Return the blocks of a page that have no language: what commands print."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", page, re.S | re.M)
    return [block for language, block in fenced if not language]


@pytest.mark.parametrize("name", USER_PAGES)
def test_a_page_for_users_is_short_and_shows_output(name: str) -> None:
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    assert num_words(page) <= MOST_WORDS
    assert outputs(page) != []


@pytest.mark.parametrize("name", USER_PAGES)
def test_a_page_for_users_names_no_test_and_no_benchmark(name: str) -> None:
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    assert re.findall(r"tests/(?!scripts/)\S*|python -m benchmarks\S*|benchmarks/\S+", page) == []


@pytest.mark.parametrize("name", [name for pages in CONTENTS.values() for name in pages])
def test_no_page_is_a_wall(name: str) -> None:
    assert num_words((DOCS / f"{name}.md").read_text(encoding="utf-8")) <= MOST_WORDS_OF_OTHERS


def test_words_are_counted_without_code_and_addresses() -> None:
    page = "# A title\n\nOne [two](https://three.example/four).\n\n    mezzo run\n\n```\noutput here\n```\n\n| a | b |\n|---|---|\n"
    assert num_words(page) == 6
    assert outputs(page) == ["output here\n"]


def test_every_page_is_of_one_kind() -> None:
    listed = [name for pages in CONTENTS.values() for name in pages]
    assert len(listed) == len(set(listed))
    written = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    own = {name for name in written if not name.startswith(("design/", "findings/A", "reference/")) and name != "index"}
    assert set(listed) == own


def told(cells: list[str]) -> str:
    """Return how often each outcome is in the first words of cells, without the policy that some begin with."""
    counted = Counter(re.split(r"[:;,(]", cell)[0].removeprefix("fp16 ").strip() for cell in cells)
    return ", ".join(f"{number} {outcome}" for outcome, number in counted.most_common())


def test_the_outcomes_of_public_scripts_are_counted_from_their_rows() -> None:
    page = (DOCS / "public-scripts.md").read_text(encoding="utf-8")
    with (DOCS / "public-scripts.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert f"{len({row['repository'] for row in rows})} public repositories" in page
    assert f"{len(rows)} command lines" in page
    shown = [re.split(r" \| ", line.strip("| \n")) for line in page.splitlines() if re.match(r"\| \[.*\]\(#", line)]
    groups = [[row for row in rows if row["group"] == group] for group in dict.fromkeys(row["group"] for row in rows)]
    for (_, number, compared, diagnosed, audited), group in zip(shown, groups, strict=True):
        assert number.split()[0] == str(len(group))
        assert number.split()[2] == str(len({row["repository"] for row in group}))
        if group[0]["group"] != "by hand":
            assert sorted(compared.split(", ")) == sorted(told([row["compare"] for row in group]).split(", "))
            assert sorted(diagnosed.split(", ")) == sorted(told([row["diagnose"] for row in group]).split(", "))
            assert sorted(audited.split(", ")) == sorted(told([row["audit"] for row in group]).split(", "))
