"""The pages of findings say how the code finds them, and show what it prints."""

from __future__ import annotations

import pytest

from mezzo.observe.audit.findings import RULES
from mezzo.observe.lint.misuse_log import MISUSES
from oracles.finding_pages import HOW, PAGES, planted, sections
from paths import ROOT


def test_every_finding_says_how_it_is_found() -> None:
    assert list(HOW) == [*(rule.code for rule in RULES), *(misuse.code for misuse in MISUSES)]


@pytest.mark.parametrize("code", [pytest.param(code, marks=[] if code == "A601" else pytest.mark.slow) for code in HOW])
def test_a_page_shows_what_mezzo_prints_of_the_planted_script(code: str) -> None:
    page = (PAGES / f"{code}.md").read_text(encoding="utf-8")
    told = f"docs/findings/{code}.md is old: PYTHONPATH=tests python tests/oracles/finding_pages.py in {ROOT} writes it"
    assert sections(planted(code)) in page, told
