"""The Chinese pages say what the English ones say: the same commands, figures and links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs_pages import user_pages
from paths import ROOT

PAIRS = [
    (ROOT / "README.zh-CN.md", ROOT / "README.md"),
    *(
        (ROOT / "docs/zh-CN" / name, ROOT / "docs" / name)
        for name in ("choosing-a-policy.md", "troubleshooting.md", "troubleshooting-speed.md")
    ),
    (ROOT / "docs/zh-CN/start.md", ROOT / "docs/tutorial.md"),
    *(
        (ROOT / "docs/zh-CN" / f"{chinese}.md", ROOT / "docs" / f"{english}.md")
        for chinese, english in (
            *(("run", "scripts"), ("compare", "compare"), ("nan", "diagnose"), ("memory", "checkpointing")),
            *(("predict", "predict"), ("watch", "watch"), ("distributed", "distributed"), ("paddle", "paddle")),
            *(
                ("check", "check"),
                ("audit", "audit"),
                ("loss-scale", "ranges"),
                ("fallback", "fallback"),
                ("diff", "diff"),
                ("gate", "gate"),
                ("expect", "expect"),
            ),
            *(("install", "install"), ("tune", "tune"), ("guardrails", "guardrails"), ("patch", "patch")),
            *(("keras", "keras"), ("trainers", "lightning")),
        )
    ),
]
RESUME = {"resume-check": "resume", "snapshots": "resume"}
"""Two pages whose Chinese is one page."""
TUNING = {"tuning": "loss-scale", "ranges": "loss-scale", "accelerate": "trainers", "transformers": "trainers"}
NOT_IN_THE_TUTORIAL = {"mezzo check examples/digits.py"}


def commands(page: Path) -> list[str]:
    """Return the lines of a page that are typed into a shell, without their comments."""
    text = page.read_text(encoding="utf-8")
    typed = re.findall(r"^(?:    |\$ )((?:mezzo|make|pip|git|source|python) ?.*)$", text, re.M)
    return [re.sub(r"\s+#.*", "", line).strip() for line in typed]


@pytest.mark.parametrize(("chinese", "english"), PAIRS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_are_those_of_the_english_page(chinese: Path, english: Path) -> None:
    assert commands(chinese) != []
    assert set(commands(chinese)) - set(commands(english)) <= NOT_IN_THE_TUTORIAL


def test_the_page_on_resuming_has_the_commands_and_output_of_two() -> None:
    chinese, (one, other) = ROOT / "docs/zh-CN/resume.md", (ROOT / "docs" / f"{name}.md" for name in RESUME)
    assert set(commands(chinese)) <= {*commands(one), *commands(other)}
    shown = re.findall(r"^```\n(.*?)^```", chinese.read_text(encoding="utf-8"), re.S | re.M)
    english = {line.strip() for page in (one, other) for line in page.read_text(encoding="utf-8").splitlines()}
    assert len(shown) == 2
    assert [line for block in shown for line in block.splitlines() if line.strip() not in english] == []


@pytest.mark.parametrize("name", user_pages())
def test_every_page_for_users_has_a_chinese_one(name: str) -> None:
    twins = {english.stem: chinese.stem for chinese, english in PAIRS} | RESUME | TUNING | {"session": "session"}
    assert (ROOT / "docs/zh-CN" / f"{twins[name]}.md").is_file()


@pytest.mark.parametrize(("chinese", "english"), PAIRS[:4], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_command_of_the_english_page_is_missing(chinese: Path, english: Path) -> None:
    assert set(commands(english)) - set(commands(chinese)) == set()


@pytest.mark.parametrize(("chinese", "english"), PAIRS[:4], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_has_the_sections_and_commands_in_tables_of_the_english_page(chinese: Path, english: Path) -> None:
    counts = [
        (
            len(re.findall(r"^## ", text, re.M)),
            re.findall(r"`(mezzo [^`]+)`", "\n".join(re.findall(r"^\|.*", text, re.M))),
        )
        for text in (page.read_text(encoding="utf-8") for page in (chinese, english))
    ]
    if english.name.startswith("troubleshooting"):  # its table of contents has no commands, and Chinese needs none
        counts = [(sections, []) for sections, _ in counts]
    assert counts[0] == counts[1]


SEARCHED = ("O1", "O2", "梯度累积", "重计算", "loss scale", "OOM", "nvidia-smi", "NCCL", "GLOG", "65536")
PASTED = ("expected scalar type Half", "CUDA out of memory")


@pytest.mark.parametrize("word", [*SEARCHED, *PASTED])
def test_what_readers_search_for_is_on_a_chinese_page(word: str) -> None:
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs/zh-CN").glob("*.md")]
    assert sum(word in page for page in pages) >= 1


def test_every_term_of_the_chinese_glossary_is_in_the_english_one() -> None:
    english = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    rows = (ROOT / "docs/zh-CN/glossary.md").read_text(encoding="utf-8").split("|---|---|---|\n")[1].splitlines()
    terms = [row.split("|")[1].strip() for row in rows]
    assert [term for term in terms if f"| {term.removeprefix('FP8 ')} |" not in english] == []
