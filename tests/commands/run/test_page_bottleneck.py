"""What holds a run back, as lines of a table, in the terminal and on the page."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

import record_builders as build
from mezzo.commands.run.page import LIMITS, bottleneck_facts
from mezzo.records import Bottleneck, GpuUse, Limit, Note
from mezzo.report.html import render_html
from mezzo.report.pages import page_of
from mezzo.report.terminal import render

FOUND = Bottleneck(
    limit="host",
    sentence="60% of the time is Python",
    change=["a larger batch", "torch.compile"],
    shares={"host": 0.6, "waiting": 0.0},
    operations=700,
    operation_us=6.2,
    gpu=GpuUse(name="H100", num_samples=3, utilization=0.4, power_w=350, power_limit_w=700, throttled={"heat": 0.25}),
    not_measured=[Note(what="input", value="not measured", reason="no DataLoader")],
)


def test_lines_say_what_and_how_much_and_what_to_change() -> None:
    lines = {(fact.what, fact.value): fact.reason for fact in bottleneck_facts(FOUND)}
    assert lines["held back by", "the host"] == "60% of the time is Python"
    assert (lines["change", "1"], lines["change", "2"]) == ("a larger batch", "torch.compile")
    assert "waiting" not in {what for what, _ in lines}  # 0%
    assert lines["host", "60.0%"] == "Python, and launching operations"
    assert lines["operations per step", "700"] == "6 us on average on the host"
    assert lines["utilization", "40.0%"] == "usually above 90% if the GPU is busy"
    assert lines["power", "350 of 700 W"] == "usually above 60% of the limit if the GPU is busy"
    assert ("throttled by", "heat in 25% of the samples") in lines
    assert lines["input", "not measured"] == "no DataLoader"
    assert bottleneck_facts(None) == []


def test_the_section_is_in_both_views() -> None:
    record = build.run_record(bottleneck=FOUND)
    screen = io.StringIO()
    render(record, Console(file=screen, width=110))
    for text in (screen.getvalue(), render_html(record)):
        assert "What holds it back" in text
        assert "a larger batch" in text
    screen = io.StringIO()
    render(build.run_record(), Console(file=screen, width=110))
    assert "What holds it back" not in screen.getvalue()


@pytest.mark.parametrize(
    ("limit", "sentence", "headline"),
    [
        ("input", "61% of the time is spent waiting for the data loader", "train.py is held back by the input: 61% of"),
        ("unknown", "too short to tell, 4 steps", "What holds train.py back is not known: too short to tell, 4 steps"),
    ],
)
def test_a_watched_run_begins_with_what_holds_it_back(limit: Limit, sentence: str, headline: str) -> None:
    record = build.run_record(watched=True, bottleneck=Bottleneck(limit=limit, sentence=sentence))
    screen = io.StringIO()
    render(record, Console(file=screen, width=110), verbose=False)
    assert screen.getvalue().startswith(headline)
    assert page_of(record).answer.word == LIMITS[limit]
    assert 'class="kind">watch<' in render_html(record)
