"""Every Python block of the README and the docs runs; every link, option, file and test that they name exists."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from mezzo.cli.parser import app
from paths import ROOT

PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M))
]

_KEPT: list[dict[str, object]] = []
"""The names of blocks that have run."""


def test_pages_exist() -> None:
    assert PAGES[0].is_file()
    assert len(BLOCKS) >= 4


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    # Kept alive: a gloo thread that lets go of the last all-reduce's tensors waits for the GIL, and a DDP model that is deleted
    # meanwhile joins that thread with the GIL held (torch 2.13).
    _KEPT.append({"__name__": "__main__"})
    exec(compile(block, "<docs>", "exec"), _KEPT[-1])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
    missing = [t for t in targets if not t.startswith("http") and not (page.parent / t).exists()]
    # A wheel's tests run without the source tree beside them: links into it are checked where it is.
    assert [t for t in missing if "src/" not in t or (ROOT / "src").is_dir()] == []


def anchors(page: Path) -> set[str]:
    """Return what a link can name after ``#``: headings in lower case, without punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_name_headings_that_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]*)#([^)]+)\)", page.read_text(encoding="utf-8"))
    here = [(page.parent / to if to else page, anchor) for to, anchor in links if not to.startswith("http")]
    assert [anchor for to, anchor in here if anchor not in anchors(to)] == []


def test_every_page_is_on_the_map() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    named = {(ROOT / "docs" / target).resolve() for target in re.findall(r"\]\(([^)#]+)", text)}
    assert [
        p.name
        for p in PAGES[2:]
        if p.parent.name in ("docs", "design", "details", "evidence")
        and p.name != "index.md"
        and p.resolve() not in named
    ] == []


@functools.cache
def options() -> dict[str, set[str]]:
    """Return the options of each command."""
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    return {name: {o for p in command.params for o in p.opts} for name, command in commands.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_options_exist(page: Path) -> None:
    known_options = options()
    for command, rest in re.findall(r"^\s*(?:\$ )?mezzo (\w[\w-]*)(.*)$", page.read_text(encoding="utf-8"), re.M):
        assert command in known_options, f"{page.name} names mezzo {command}"
        before_script = re.split(r"\s\S+\.py\b|(?<=-m) \S+", rest)[0]
        assert set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", before_script)) <= known_options[command], (
            f"{page.name}: mezzo {command}{rest}"
        )


OTHERS = ROOT / "docs" / "public-scripts.md"  # it names other people's files


def options_after_the_script(text: str) -> list[str]:
    """Return the commands whose own options stand where the script's belong."""
    found = []
    for line in re.findall(r"mezzo [a-z]+ [^`\n]*", text):
        name, script, after = line.split()[1], *line.partition(".py ")[1:]
        if script and name in options():
            found += [line for word in after.split() if word.partition("=")[0] in options()[name]]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_options_of_a_command_stand_before_the_script(page: Path) -> None:
    assert options_after_the_script(page.read_text(encoding="utf-8")) == []


def test_an_option_after_the_script_is_found() -> None:
    assert options_after_the_script("`mezzo predict train.py --gpus t4`") == ["mezzo predict train.py --gpus t4"]
    assert options_after_the_script("`mezzo predict --gpus t4 train.py --lr 0.1`") == []


def test_the_page_for_agents_has_a_line_of_every_command() -> None:
    """Each with the kind of its record, and what 0 and 1 mean."""
    text = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `mezzo ([\w-]+)[^`]*` \| ([^|]+) \| ([^|]+) \| ?([^|]*)\|$", text, re.M)
    assert {command for command, *_ in rows} == set(options())
    own = "`run`, with `bottleneck`", "the record's own"
    kinds = {command: kind.strip() for command, kind, *_ in rows if kind.strip() not in own}
    assert kinds == {command: f"`{command.replace('-', '_')}`" for command in kinds}


NAMING = [p for p in PAGES if p.parent.name in ("docs", "design", "details", "evidence", ROOT.name) and p != OTHERS] + [
    ROOT / "CHANGELOG.md"
]
YOURS = {
    "train.py",
    "policy.toml",
    "precision.toml",
    "record.json",
    "report.html",
    "script.py",
    "runs",
    "mezzo.pt",
    "float8/config.py",
}
"""Files of a reader's own, and of torchao."""


def strangers(text: str, files: set[str], functions: set[str]) -> list[str]:
    """Return the files, folders and tests that a page names in backticks and that the project does not have."""
    found = []
    for word in re.findall(r"`([\w./*-]+)`", text):
        name = word.rstrip("/")
        if word.endswith((".py", ".sh", ".toml", ".md", "/")) and "*" not in word and name not in YOURS:
            known = any(f"/{path}".endswith(f"/{name}") or f"/{name}/" in f"/{path}" for path in files)
            found += [] if known else [word]
        if (
            re.fullmatch(r"test_\w+", word)
            and word not in functions
            and not any(f"/{word}.py" in path for path in files)
        ):
            found.append(word)
    return found


@pytest.mark.skipif(not (ROOT / "src").is_dir(), reason="the source tree is not beside these tests")
@pytest.mark.parametrize("page", NAMING, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_tests_that_are_named_exist(page: Path) -> None:
    assert strangers(page.read_text(encoding="utf-8"), *files_and_tests()) == []


@functools.cache
def files_and_tests() -> tuple[set[str], set[str]]:
    """Return the paths of all files, and the names of all tests."""
    folders = ("src", "tests", "docs", "benchmarks", "examples")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    files = {path.relative_to(ROOT).as_posix() for path in [*paths, *ROOT.glob("*.*")]}
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    return files, set(re.findall(r"def (test_\w+)", tests))


def test_a_file_that_moved_is_found() -> None:
    files, functions = {"src/mezzo/observe/lint/observer.py", "tests/engine/test_policy.py"}, {"test_it"}
    there, gone = (
        "`observe/lint/`, `observer.py`, `test_policy`, `test_it`",
        "`diagnosis/lint/`, `ready.py`, `test_gone`",
    )
    text = f"{there}, `train.py`; {gone}, `tests/test_policy.py`"
    assert strangers(text, files, functions) == ["diagnosis/lint/", "ready.py", "test_gone", "tests/test_policy.py"]


def test_the_glossary_is_in_order_and_names_each_term_once() -> None:
    rows = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").split("|---|---|\n")[1].splitlines()
    terms = [row.split("|")[1].strip().casefold() for row in rows]
    assert terms == sorted(set(terms))
