"""The loss scale, the gradient norm and the times over the steps of a run."""

from __future__ import annotations

import math

import record_builders as build
from mezzo.records import Steps
from mezzo.report.charts.data import Chart, Nothing
from mezzo.report.charts.steps import norm_chart, scale_chart, time_chart
from mezzo.report.charts.svg import numbers_of, svg
from mezzo.report.colours import Style, policy_styles

STYLE = Style(family="fp16")
NAN, INF = math.nan, math.inf


def test_the_scale_is_a_staircase_in_powers_of_two_with_skips() -> None:
    chart = scale_chart([build.run_record()], styles=policy_styles(["fp16"]))
    assert isinstance(chart, Chart)
    (line,) = chart.lines
    assert [line.y[step - 1] for step in (1, 2, 100, 101, 200)] == [15.0, 14.0, 14.0, 13.0, 13.0]
    assert [(mark.x, mark.y, mark.text) for mark in line.marks] == [
        (1, 15.0, "step 1 skipped"),
        (2, 14.0, "step 2 skipped"),
        (101, 13.0, "step 101 skipped"),
    ]
    assert (chart.y_axis.low, chart.y_axis.high, chart.staircase) == (12, 16, True)
    assert chart.description == "The loss scale: fp16 starts at 32768 and ends at 8192, 3 skipped."
    assert svg(chart).count('class="triangle s-fp16-0"') == 2 * 3


def test_seeds_that_skip_apart_share_a_line_and_a_band() -> None:
    runs = [build.run_record(seed=seed) for seed in range(2)]
    chart = scale_chart(runs, styles=policy_styles(["fp16"]))
    assert isinstance(chart, Chart)
    (line,) = chart.lines
    assert [(line.y[i], line.low[i], line.high[i]) for i in (99, 100, 101)] == [
        (14, 14, 14),
        (13.5, 13, 14),
        (13, 13, 13),
    ]
    assert [mark.text for mark in line.marks] == [
        "step 1 skipped in seed 0 and 1",
        "step 2 skipped in seed 0 and 1",
        "step 101 skipped in seed 0",
        "step 102 skipped in seed 1",
    ]


def test_the_numbers_have_ends_only_where_seeds_differ() -> None:
    ends = (512.0, 1024.0)
    runs = [
        build.run_record(seed=n, steps=Steps(loss=[1.0] * 2, loss_scale=[256.0, end])) for n, end in enumerate(ends)
    ]
    table = numbers_of(scale_chart(runs, styles=policy_styles(["fp16"])))
    assert table.rows == [("1", "2^8"), ("2", "2^9.5 (2^9 to 2^10)")]


def test_the_scales_at_the_end_are_ordered_by_size() -> None:
    ends = (512.0, 65536.0, 1024.0)  # as text, 1024 comes first
    runs = [build.run_record(seed=n, steps=Steps(loss=[1.0], loss_scale=[end])) for n, end in enumerate(ends)]
    chart = scale_chart(runs, styles=policy_styles(["fp16"]))
    assert chart.description == "The loss scale: fp16 starts at 512 and ends at 512 to 65536, 0 skipped a run."


def test_the_norm_is_drawn_at_the_steps_that_measured_it() -> None:
    run = build.run_record(steps=Steps(loss=[1.0] * 5, grad_norm=[2.0, NAN, INF, 0.5, 1.0]))
    chart = norm_chart(run, style=STYLE)
    assert isinstance(chart, Chart)
    assert (chart.x, list(chart.lines[0].y)) == ([1, 4, 5], [2.0, 0.5, 1.0])
    assert chart.description == "The gradient norm at the update, in 3 steps: from 2 to 1; the largest is 2."


def test_the_timeline_names_the_slowest_step() -> None:
    run = build.run_record(steps=Steps(loss=[1.0] * 3, time_ms=[900.0, 10.0, 12.0]))
    chart = time_chart(run, style=STYLE)
    assert isinstance(chart, Chart)
    assert chart.description == "The time of 3 steps: 12.0 ms in the median; the slowest is step 1 with 900 ms."
    assert chart.y_axis.kind == "log"


def test_nothing_to_draw_says_so() -> None:
    empty = build.run_record(steps=Steps())
    found = [
        scale_chart([empty], styles=policy_styles(["fp16"])),
        norm_chart(empty, style=STYLE),
        time_chart(empty, style=STYLE),
    ]
    assert all(isinstance(chart, Nothing) for chart in found)
    assert [chart.description for chart in found] == [
        "No loss scale was used.",
        "No gradient norm was measured.",
        "No step was timed.",
    ]
