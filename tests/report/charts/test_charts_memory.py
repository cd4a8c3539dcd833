"""Bars of memory and boxes of times."""

from __future__ import annotations

import pytest

import record_builders as build
from mezzo.commands.compare import page as compare
from mezzo.records import Memory, Steps
from mezzo.report import pages
from mezzo.report.charts.data import Bars, Boxes, Nothing
from mezzo.report.charts.steps import StepTimes, time_boxes
from mezzo.report.charts.svg import numbers_of
from mezzo.report.colours import policy_style, policy_styles
from mezzo.report.pages import memory_bars, memory_kinds
from mezzo.report.sections import Grid

GIB = 1024**3


def test_bars_share_a_scale_and_show_the_allocator_peak() -> None:
    memory = Memory(
        parameters_bytes=GIB,
        gradients_bytes=0,
        optimizer_bytes=0,
        activations_bytes=GIB // 2,
        cuda_allocated_bytes=2 * GIB,
    )
    small = Memory(parameters_bytes=GIB // 4)
    bars = memory_bars({"fp32": memory, "bf16": small}, styles=policy_styles(["fp32", "bf16"]))
    assert isinstance(bars, Bars)
    assert [part.name for part in bars.legend] == [*memory_kinds(memory)]
    assert [[(p.name, p.share) for p in row.parts] for row in bars.rows] == [
        [("parameters", 0.5), ("activations", 0.25)],
        [("parameters", 0.125)],
    ]
    assert [(row.text, row.mark) for row in bars.rows] == [("1.50 GiB, peak 2.00 GiB", 1.0), ("unknown", None)]
    table = numbers_of(bars)
    assert table.rows[0] == ("fp32", "1.00 GiB", "-", "-", "512 MiB", "1.50 GiB, peak 2.00 GiB")


def test_the_bytes_of_an_emulation_have_no_bar() -> None:
    memory = Memory(parameters_bytes=4, gradients_bytes=4, optimizer_bytes=8, activations_bytes=2)
    emulated = memory.model_copy(update={"of_emulation": True})
    bars = memory_bars({"fp32": memory, "fp16": emulated}, styles=policy_styles(["fp32", "fp16"]))
    assert isinstance(bars, Bars)
    assert len(bars.rows) == 1
    alone = memory_bars({"fp16": emulated}, styles=policy_styles(["fp16"]))
    assert isinstance(alone, Nothing)
    assert alone.description == "Not drawn; emulated: says nothing about a GPU."
    (grid,) = pages.memory_section([("fp32", memory), ("fp16", emulated)]).blocks
    assert isinstance(grid, Grid)
    assert [row[-1] for row in grid.rows] == [
        "18 B",
        "18 B (emulated)",
    ]


def test_a_box_holds_the_quantiles_on_a_round_axis() -> None:
    timed = [
        StepTimes(policy="fp32", style=policy_style("fp32"), times_ms=[float(v) for v in range(1, 102)], emulated=False)
    ]
    boxes = time_boxes(timed)
    assert isinstance(boxes, Boxes)
    (row,) = boxes.rows
    assert row.numbers == ["6.00 ms", "26.0 ms", "51.0 ms", "76.0 ms", "96.0 ms"]
    assert row.ends == pytest.approx((0.06, 0.26, 0.51, 0.76, 0.96))
    assert boxes.ticks == [
        (0.0, "0 ms"),
        (0.2, "20.0 ms"),
        (0.4, "40.0 ms"),
        (0.6, "60.0 ms"),
        (0.8, "80.0 ms"),
        (1.0, "100 ms"),
    ]


def test_emulated_policies_get_words_in_place_of_a_box() -> None:
    boxes = next(chart for chart in compare.charts(build.emulated_record()) if chart.name == "times")
    assert isinstance(boxes, Boxes)
    assert [(row.name, row.ends is None) for row in boxes.rows] == [
        ("fp32", False),
        ("bf16", True),
        ("fp16", True),
        ("fp16-pure", True),
    ]
    assert {row.text for row in boxes.rows[1:]} == {"emulated: says nothing about a GPU"}


def test_a_checkpointed_policy_has_the_times_of_its_own_runs() -> None:
    plans = {"": 10.0, "full": 40.0}
    rows = [build.row("fp32", "equivalent" if plan else "baseline", checkpoint=plan) for plan in plans]
    runs = [build.run_record("fp32", checkpoint=p, steps=Steps(loss=[1.0], time_ms=[ms])) for p, ms in plans.items()]
    boxes = next(c for c in compare.charts(build.compare_record(rows=rows, runs=runs)) if c.name == "times")
    assert isinstance(boxes, Boxes)
    assert [(row.name, row.text) for row in boxes.rows] == [("fp32", "10.0 ms"), ("fp32, checkpointed full", "40.0 ms")]


def test_a_peak_of_zero_bytes_is_drawn() -> None:
    bars = memory_bars({"fp16": Memory(cuda_allocated_bytes=0)}, styles={})
    assert isinstance(bars, Bars)
    assert [row.mark for row in bars.rows] == [0.0]


def test_nothing_measured() -> None:
    nothing = [memory_bars({"fp16": Memory()}, styles={}), time_boxes([])]
    assert all(isinstance(chart, Nothing) for chart in nothing)
    assert [chart.description for chart in nothing] == ["Memory was not measured.", "No step was timed."]
