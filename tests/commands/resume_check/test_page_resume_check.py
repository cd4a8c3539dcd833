"""A check of resuming in the terminal and on the page: the verdict first, then each missing part with its fix."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

import record_builders as build
from mezzo.report.html import render_html
from mezzo.report.pages import page_of
from mezzo.report.terminal import render

SNAPSHOT = "mezzo run --policy as-is --snapshot 5m train.py"


def shown(**fields: object) -> str:
    printed = io.StringIO()
    render(build.resume_check_record(**fields), Console(file=printed, width=110))
    return printed.getvalue()


def test_both_views_name_what_is_missing_and_how_to_mend_it() -> None:
    page, text = render_html(build.resume_check_record()).replace("<wbr>", ""), shown()
    for words in ("train.py resumes with differences: optimizer", "none: it starts over", "optimizer.state_dict()"):
        assert words in page
        assert words in text


@pytest.mark.parametrize(
    ("verdict", "headline", "commands"),
    [
        ("exact", "train.py resumes exactly", []),
        ("does_not_resume", "train.py does not resume", ["mezzo resume-check train.py", SNAPSHOT]),
        ("no_checkpoint", "train.py writes no checkpoint", [SNAPSHOT]),
        ("undecided", "No verdict on train.py", ["mezzo resume-check train.py"]),
        ("differs", "train.py resumes with differences: optimizer", ["mezzo resume-check train.py", SNAPSHOT]),
    ],
)  # fmt: skip
def test_every_verdict_has_a_headline_and_its_next_steps(verdict: str, headline: str, commands: list[str]) -> None:
    missing = build.resume_check_record().missing if verdict == "differs" else []
    record = build.resume_check_record(verdict=verdict, missing=missing)
    assert page_of(record).answer.sentence == headline
    assert [step.command for step in page_of(record).steps] == commands


def test_the_losses_begin_before_the_first_difference() -> None:
    lines = page_of(build.resume_check_record(first_difference=12)).grid("Losses")
    assert [step for step, *_ in lines.rows] == ["11", "12", "13", "14", "15", "16"]
