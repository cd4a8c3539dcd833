"""The order of what the terminal prints: the answer, what to do next, then everything else."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from every_page import audit, diagnosis, fallback, ranges
from rich.console import Console

from mezzo.records import AnyRecord
from mezzo.report.pages import page_of
from mezzo.report.sections import NextStep, Section
from mezzo.report.terminal import render
from record_builders import compare_record, run_record

RECORDS: dict[str, tuple[Callable[[Path], AnyRecord], str]] = {
    "run": (lambda _: run_record("bf16"), "skipped steps"),
    "compare": (lambda _: compare_record(), "verdict"),
    "audit": (audit, "A1"),
    "diagnose": (diagnosis, "Fix"),
    "fallback": (lambda _: fallback(), "Result"),
    "ranges": (lambda _: ranges(), "Loss scale by format"),
}


@pytest.mark.parametrize("kind", RECORDS)
def test_the_next_step_follows_the_answer_and_nothing_of_its_details_comes_before_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [NextStep(why="do it", command="mezzo audit")]
    monkeypatch.setattr("mezzo.report.terminal.page_of", lambda record: replace(page_of(record), steps=steps))
    make, answer = RECORDS[kind]
    record, stream = make(tmp_path), io.StringIO()
    render(record, Console(file=stream, width=110, highlight=False), files="the files")
    text = stream.getvalue()
    following = text.index("Next: ")
    assert text.index(answer) < following
    sections = [one for one in page_of(record).sections if isinstance(one, Section) and one.title]
    heads = [f"\n{one.title}\n" for one in sections if one.details and one.shown_in != "page" and not one.is_empty]
    assert all(text.index(head) > following for head in [*heads, "\nEnvironment\n", "\nReproduce\n"] if head in text)
    assert "\nEnvironment\n" in text
    assert text.rstrip().endswith("the files")


def test_a_run_is_twelve_lines_and_the_rest_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [NextStep(why="do it", command="mezzo audit"), NextStep(why="or that", command="mezzo compare")]
    monkeypatch.setattr("mezzo.report.terminal.page_of", lambda record: replace(page_of(record), steps=steps))
    shown = {}
    for verbose in (False, True):
        stream = io.StringIO()
        record = run_record("bf16", metric=None, findings=[], guardrails=None)
        render(record, Console(file=stream, width=110, highlight=False), files="the files", verbose=verbose)
        shown[verbose] = stream.getvalue()
    assert len(shown[False].splitlines()) == 12
    assert "Environment" not in shown[False]
    rest = ("Policy", "Memory of a step", "Effective formats", "Environment", "Reproduce")
    assert all(f"\n{head}\n" in shown[True] for head in rest)
