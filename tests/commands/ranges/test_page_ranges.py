"""What the terminal and the page say about a record of ranges, and the points that its plots draw."""

from __future__ import annotations

import io
import json
import re

import pytest
import torch
from rich.console import Console

import record_builders as build
from mezzo.engine.kernels import exponents
from mezzo.observe.ranges.table import Counts, ObservedValues, ranges_record
from mezzo.policy import Policy
from mezzo.records import RangesRecord
from mezzo.report import terminal
from mezzo.report.charts.data import Chart
from mezzo.report.charts.ranges import exponents_chart, scales_chart
from mezzo.report.html import render_html
from mezzo.report.pages import page_of
from mezzo.report.sections import Cell

LOUD, QUIET = 2.0**12, 2.0**-30


def counts(values: list[float]) -> Counts:
    table = exponents.tables(1)[0]
    exponents.reference([torch.tensor(values)], [table])
    return Counts(table.tolist())


def record(gradients: list[float], *, policy: str = "fp16", name: str = "head.weight", **run: object) -> RangesRecord:
    seen = ObservedValues(
        counts={
            ("weight gradients", f"Net.{name}"): counts(gradients),
            ("activations", "Net.head"): counts([1.0, 2.0, 0.0, 1e5]),
            ("weights", f"Net.{name}"): counts([0.5, 0.25]),
        },
        swallowed={f"Net.{name}": [4, 1, 3]},
        lowered={("weight gradients", f"Net.{name}"), ("activations", "Net.head")},
        blocks={},
        steps=[1, 2],
        forced_eager=True,
        updates_seen=True,
        models=["Net"],
    )
    fields: dict[str, object] = {"script": "examples/train.py", "command": ["mezzo", "ranges", "train.py"], **run}
    return ranges_record(build.run_record("fp32", num_steps=2, **fields), seen, policy=Policy.parse(policy))


def shown(own: RangesRecord, *, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    terminal.render(own, console)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]


HEADLINES = [
    ([0.5, 0.25], "fp16", "The gradients of train.py need no loss scale in fp16"),
    ([2.0**-20, 2.0**-26], "fp16", "Begin with a loss scale of 2^24 for the fp16 gradients of train.py"),
    ([2.0**-5, 2.0**-26], "fp16", "Begin with a loss scale of 2^18 for the fp16 gradients of train.py"),
    ([LOUD, QUIET], "fp16", "No loss scale fits the fp16 gradients of train.py"),
    ([LOUD, QUIET], "bf16", "The gradients of train.py need no loss scale in bf16"),
    ([LOUD, QUIET], "fp8", "No loss scale fits the e5m2 gradients of train.py"),
    ([0.0], "fp16", "Every gradient of train.py is zero"),
]


@pytest.mark.parametrize(("gradients", "policy", "headline"), HEADLINES)
def test_headline(gradients: list[float], policy: str, headline: str) -> None:
    own = record(gradients, policy=policy)
    assert page_of(own).answer.sentence == headline
    assert shown(own).splitlines()[0] == headline
    assert headline in render_html(own)


def test_an_empty_window_names_both_ends() -> None:
    page = page_of(record([LOUD, QUIET, 1.0]))
    assert page.answer.detail == "Small gradients need 2^6 or more, large ones 2^3 or less: bf16 has FP32's range."
    assert [(fact.what, fact.value) for fact in page.facts("The tensors at both ends of the fp16 window")] == [
        ("largest", "head.weight (weight gradients)"),
        ("smallest", "head.weight (weight gradients)"),
    ]
    form, window, begin, _, lost, _ = page.grid("Loss scale by format").rows[0]
    assert (form, window, begin, lost) == ("fp16", Cell(text="empty", tone="bad"), "none fits", "33.3%")


def test_the_terminal_says_it_all() -> None:
    words = re.sub(r"\s+", " ", shown(record([2.0**-5, 2.0**-26]), width=240))
    for said in (
        "The scale window is 2^2 to 2^20; unscaled, 50.0% of the non-zero gradient values would become zero.",
        "fp16 2^2 to 2^20 2^18 50.0% 0%",
        "bf16 2^-107 to 2^132 no scale needed 0% 0%",
        "Counted in FP32 on 2 steps (1 to 2), judged for fp16.",
        "forward overflow head (up to 2^17) beyond fp16's 65504",
        "torch.compile compiled code ran eagerly in the observed steps",
        "1 tensor activations 4 25.0% 2^0 to 2^17",
        "fp16 25.0% of 4 swallowed most in head.weight 25.0%",
        "bf16 75.0% of 4 swallowed",
        "Reproduce mezzo ranges train.py",
    ):
        assert said in words, words


def test_the_page_holds_every_tensor_and_scale() -> None:
    own = record([2.0**-5, 2.0**-26])
    page = render_html(own)
    scales = page.split("<summary>Every scale")[1].split("</table>")[0]
    assert len(re.findall(r"<tr><th scope=\"row\">2\^-?\d+</th>", scales)) == 65
    row = re.search(r"<tr><th scope=\"row\">2\^1</th>(.*?)</tr>", scales)
    assert row is not None
    # At 2 the smaller one is exactly half of FP16's smallest subnormal: a tie, which goes to zero.
    assert row.group(1).startswith("<td>50.0% / 0%</td><td>0% / 0%</td>")
    charts = json.loads(re.search(r'id="chart-data">(.*?)</script>', page, re.S).group(1))  # type: ignore[union-attr]
    assert list(charts) == ["exponents", "scales"]


def test_the_histogram_stands_over_the_limits_of_the_formats() -> None:
    chart = exponents_chart(record([0.5, 0.75, 2.0**-5, 0.0]))
    assert isinstance(chart, Chart)
    gradients = next(line for line in chart.lines if line.name == "weight gradients")
    heights = dict(zip(chart.x, gradients.y, strict=True))
    # A step from k to k + 1 contains the magnitudes from 2^k up to the next power; zeros have no place on the axis.
    assert {x: y for x, y in heights.items() if y} == {-1: pytest.approx(2 / 3), -5: pytest.approx(1 / 3)}
    tracks = {track.name: (track.low, track.middle, track.high) for track in chart.tracks}
    assert tracks["fp16"] == (-24, -14, 16)
    assert tracks["bf16"] == (-133, -126, 128)
    assert [(span.low, span.high) for span in chart.spans] == [(-14, 16)]
    assert "weight gradients from 2^-5 to 2^0, most at 2^-1" in chart.description


def test_the_curves_hold_the_shares_of_the_record() -> None:
    chart = scales_chart(record([2.0**-5, 2.0**-26, 0.0, 0.0]))
    assert isinstance(chart, Chart)
    zeroed, over = (line for line in chart.lines if (line.group or line.name) == "fp16")
    at = dict(zip(chart.x, zeroed.y, strict=True))
    assert [at[1], at[2]] == [0.25, 0.0]
    rising = dict(zip(chart.x, over.y, strict=True))
    assert [rising[20], rising[21]] == [0.0, 0.25]
    assert [(span.axis, span.low, span.high) for span in chart.spans] == [("x", 2, 20)]
    assert "fp16 loses little from 2^2 to 2^20" in chart.description


def test_names_are_text_and_a_failed_run_says_why() -> None:
    page = render_html(record([0.5], name="<b>\x1b[31mx</b>"))
    assert "&lt;b&gt;\ufffd[31mx&lt;/b&gt;" in page
    assert "<b>\x1b" not in page
    failed = RangesRecord(
        run=build.run_record("fp32", num_steps=0, script="train.py", exit_code=1, error="KeyError: 'x'"),
        policy="fp16",
        format="fp16",
        first_scale=-24,
        little=0.01,
    )
    assert shown(failed).splitlines()[0] == "train.py failed before a step could be recorded"
    assert "error: KeyError: 'x'" in shown(failed)
    assert "KeyError: &#39;x&#39;" in render_html(failed)


def test_a_policy_in_blocks_is_answered_by_its_errors() -> None:
    rows = {
        ("Net.up", "forward", "activation", "mxfp4"): [100.0, 5.0, 0.0, 0.0, 0.01, 1.0],
        ("Net.up", "forward", "weight", "mxfp4"): [50.0, 0.0, 0.0, 0.0, 0.0016, 1.0],
        ("Net.up", "dgrad", "gradient", "mxfp4"): [100.0, 20.0, 3.0, 2.0, 0.0625, 1.0],
        ("Net.up", "dgrad", "gradient", "mxfp8"): [100.0, 1.0, 0.0, 0.0, 0.0004, 1.0],
    }
    seen = ObservedValues(
        counts={("weight gradients", "Net.up.weight"): counts([0.5])},
        swallowed={},
        blocks=rows,  # type: ignore[arg-type]
        lowered=set(),
        steps=[1],
        forced_eager=False,
        updates_seen=True,
        models=["Net"],
    )
    run = build.run_record("fp32", num_steps=1, script="examples/train.py", command=["mezzo", "ranges", "train.py"])
    own = ranges_record(run, seen, policy=Policy.parse("mxfp4"))
    text = " ".join(shown(own).split())
    assert (
        "mxfp4 would round activations by 10.0%, weights by 4.0% and gradients by 25.0% in the linear layers of train.py"
        in text
    )
    assert "The most in up.dgrad: 25.0%. In other formats and by other rules: below." in text
    row = next(line for line in shown(own, width=160).splitlines() if line.split()[:2] == ["mxfp4", "10.0%"])
    assert row.split() == ["mxfp4", "10.0%", "4.0%", "25.0%", "20.0%", "1.2%", "0.8%", "up.dgrad", "(25.0%)"]
    answer = page_of(own).answer
    assert (answer.tone, answer.word, answer.facts) == ("quiet", "counted", [])
    page = render_html(own)
    assert "Products in mxfp4" in page
    assert "Loss scale by format" in page
