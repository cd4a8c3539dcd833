"""The loss and its difference from the baseline: every point, mark and frame, as data and in the SVG."""

from __future__ import annotations

import math

import pytest

import record_builders as build
from mezzo.commands.compare import page as compare
from mezzo.records import CompareRecord, RunRecord, Steps
from mezzo.report.charts.data import Chart, Nothing
from mezzo.report.charts.steps import difference_charts, loss_charts
from mezzo.report.charts.svg import svg
from mezzo.report.colours import policy_styles, styles_of

NAN, INF = math.nan, math.inf


def run(policy: str, loss: list[float], *, seed: int = 0) -> RunRecord:
    return build.run_record(policy, seed=seed, steps=Steps(loss=loss))


def chart_of(*runs: RunRecord) -> Chart:
    (chart,) = loss_charts(runs, styles=policy_styles([run.policy for run in runs]))
    assert isinstance(chart, Chart)
    return chart


def difference_of(record: CompareRecord) -> Chart:
    (chart,) = difference_charts(record, styles=styles_of([*record.rows, *record.runs]))
    assert isinstance(chart, Chart)
    return chart


def test_a_policy_is_one_line_with_the_mean_and_the_ends_of_its_seeds() -> None:
    chart = chart_of(run("fp32", [4.0, 2.0]), run("fp16", [4.0, 1.0]), run("fp16", [6.0, 3.0], seed=1))
    assert [(line.name, line.y, list(line.low), list(line.high)) for line in chart.lines] == [
        ("fp32", [4.0, 2.0], [], []),
        ("fp16", [5.0, 2.0], [4.0, 1.0], [6.0, 3.0]),
    ]
    assert (chart.x, chart.last_x) == ([1, 2], 2)
    assert chart.description == "The loss over 2 steps, mean of 2 seeds: fp32 goes from 4 to 2; fp16 goes from 5 to 2."
    assert chart.note.startswith("Line: mean of the seeds. Band: their lowest and highest value.")


def test_the_colours_are_those_of_the_formats_whatever_else_is_shown() -> None:
    for policies in (("fp32", "fp16"), ("fp16", "bf16", "fp32")):
        chart = chart_of(*(run(policy, [1.0, 0.5]) for policy in policies))
        assert {line.name: line.style.name for line in chart.lines} == {p: f"{p}-0" for p in policies}


def test_losses_that_are_not_finite_are_crossed_inside_the_frame() -> None:
    chart = next(c for c in compare.charts(build.compare_record()) if c.name == "loss")
    assert isinstance(chart, Chart)
    marks = {line.name: line.marks for line in chart.lines}
    assert {name: [mark.x for mark in own] for name, own in marks.items() if own} == {"fp16-pure": [121, 126, 131]}
    assert marks["fp16-pure"][0].text == "seed 0: not finite in steps 121 to 200, first NaN"
    assert chart.y_axis.high is not None
    assert all(mark.y < chart.y_axis.high for mark in marks["fp16-pure"])
    assert "A cross marks where a run's loss stops being finite" in chart.note
    assert "The axis is scaled to the policies that stay finite." in chart.note
    assert "fp16-pure is not finite from step 121, in 3 of 3 runs" in chart.description
    drawing = svg(chart)
    assert drawing.count('class="cross s-fp16-2"') == 2 * 3


def test_a_loss_that_was_never_finite_is_crossed() -> None:
    chart = chart_of(run("fp16", [NAN, NAN, INF]))
    assert all(map(math.isnan, chart.lines[0].y))
    assert [mark.x for mark in chart.lines[0].marks] == [1]
    assert "<svg" in svg(chart)


def test_wide_losses_get_a_logarithmic_axis() -> None:
    assert chart_of(run("fp16", [100.0, 10.0, 0.01])).y_axis.kind == "log"
    assert chart_of(run("fp16", [100.0, 10.0, -0.01])).y_axis.kind == "number"
    assert chart_of(run("fp16", [100.0, 90.0])).y_axis.kind == "number"


def test_without_a_loss_there_is_nothing() -> None:
    assert loss_charts([build.run_record(steps=Steps())], styles=policy_styles(["fp16"])) == [
        Nothing(name="loss", title="Loss", description="No run recorded a loss.")
    ]


@pytest.mark.parametrize("scale", ["absolute", "ratio"])
def test_the_difference_is_paired_by_seed(scale: str) -> None:
    losses = {("fp32", 0): [4.0, 2.0], ("fp32", 1): [8.0, 4.0], ("bf16", 0): [4.0, 2.5], ("bf16", 1): [8.0, 3.5]}
    loss = build.difference(3.0, 3.0, spread=0.5, margin=0.1).model_copy(update={"scale": scale})
    record = build.compare_record(
        rows=[build.row("fp32", "baseline", loss=loss), build.row("bf16", "equivalent", loss=loss)],
        runs=[run(policy, own, seed=seed) for (policy, seed), own in losses.items()],
    )
    chart = difference_of(record)
    (line,) = chart.lines
    expected = (
        ([0.0, 0.0], [0.0, -0.5], [0.0, 0.5]) if scale == "absolute" else ([0.0, 0.0625], [0.0, -0.125], [0.0, 0.25])
    )
    assert (line.name, (list(line.y), list(line.low), list(line.high))) == ("bf16", expected)
    assert [(span.axis, span.low, span.high) for span in chart.spans] == [("y", -0.1, 0.1)]
    assert chart.y_axis.kind == ("signed" if scale == "absolute" else "change")
    assert chart.zero
    last = "0" if scale == "absolute" else "+6.2%"
    margin = "0.1" if scale == "absolute" else "10%"
    assert chart.description == (
        f"The loss minus fp32's; at the end: bf16 {last}. The margin is {margin} on either side."
    )
    drawing = svg(chart)
    assert drawing.count('class="span"') == drawing.count('class="zero"') == 2  # in both layouts


def test_a_seed_without_a_partner_is_left_out() -> None:
    record = build.compare_record(
        rows=build.compare_rows()[:2], runs=[run("fp32", [1.0]), run("bf16", [3.0], seed=5), run("bf16", [2.0])]
    )
    assert list(difference_of(record).lines[0].y) == [1.0]
    alone = record.model_copy(update={"runs": record.runs[:2]})
    assert difference_charts(alone, styles=styles_of([*alone.rows, *alone.runs])) == []


def test_the_svg_holds_each_point() -> None:
    chart = chart_of(run("fp32", [1.0, 3.0, 2.0]))
    drawing = str(svg(chart)).split("</svg>")[0]
    left, top, right, bottom = map(float, drawing.split('data-frame="')[1].split('"')[0].split())
    first, last = map(float, drawing.split('data-ends="')[1].split('"')[0].split())
    path = drawing.split('class="line s-fp32-0 d0"')[1].split(' d="M')[1].split('"')[0]
    start, steps = path.split("l")
    x, y = map(float, start.split())
    moves = [float(v) for v in steps.replace("-", " -").split()]
    points = [(x, y), (x + moves[0], y + moves[1]), (x + moves[0] + moves[2], y + moves[1] + moves[3])]
    low, high = 1.0 - 0.12, 3.0 + 0.12  # a margin of 6% of the range
    for step, loss, (across, down) in zip((1, 2, 3), (1.0, 3.0, 2.0), points, strict=True):
        assert across == pytest.approx(left + (step - first) / (last - first) * (right - left), abs=0.2)
        assert down == pytest.approx(bottom - (loss - low) / (high - low) * (bottom - top), abs=0.2)


def test_a_policy_that_diverges_does_not_press_the_difference_of_the_others_flat() -> None:
    chart = next(c for c in compare.charts(build.compare_record()) if c.name == "difference")
    assert isinstance(chart, Chart)
    assert chart.y_axis.high is not None
    assert chart.y_axis.high < 0.5
    assert "fp16-pure not finite" in chart.description
