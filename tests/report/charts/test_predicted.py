"""The charts of a prediction, point by point."""

from __future__ import annotations

import math

import pytest

import record_builders as build
from mezzo.records import LoaderRate
from mezzo.report.charts.data import Chart, Nothing, TreeChart
from mezzo.report.charts.predicted import batch_chart, predict_charts, time_tree, timeline_chart


def test_a_record_without_detail_has_no_charts() -> None:
    assert predict_charts(build.predict_record()) == []


def test_a_chart_without_other_batches_says_why() -> None:
    detail = build.prediction_detail().model_copy(update={"curves": []})
    record = build.predict_record(detail=detail, no_other_batch="nothing sets the size; write {batch}")
    drawn = batch_chart(record, detail)
    assert isinstance(drawn, Nothing)
    assert (
        drawn.description == "Other batch sizes cannot be derived from this one: nothing sets the size; write {batch}."
    )


def test_a_line_ends_at_the_largest_batch_that_fits() -> None:
    record = build.predict_record(detail=build.prediction_detail())
    assert record.detail is not None
    chart = batch_chart(record, record.detail)
    assert isinstance(chart, Chart)
    assert list(chart.x) == [0.0, 1.0, math.log2(3), 2.0]  # batches 1, 2, 3 and 4
    fp32, bf16 = chart.lines
    assert fp32.y[:3] == [10.0, 15.0, 18.0]
    assert math.isnan(fp32.y[3])
    assert [(mark.x, mark.y) for mark in fp32.marks] == [(math.log2(3), 18.0)]
    assert bf16.y[2] == pytest.approx(20 + 10 * math.log2(1.5))  # 3 lies between 2 and 4
    assert chart.description == "The largest batch that fits: fp32 3 with 18.0 images/s; bf16 4 with 30.0 images/s."


def test_the_loader_of_this_machine_is_a_line_for_all_gpus_of_a_job() -> None:
    detail = build.prediction_detail()
    record = build.predict_record(detail=detail, loader=LoaderRate(samples_per_s=12.0, batches=9), gpus_per_job=2)
    chart = batch_chart(record, detail)
    assert isinstance(chart, Chart)
    assert (chart.lines[-1].name, list(chart.lines[-1].y)) == ("loader here", [24.0] * 4)
    assert chart.note.endswith("The script's loader delivers 24.0 images/s on this machine.")


def test_what_ends_the_largest_batches_is_said() -> None:
    detail = build.prediction_detail()
    rows = [one.model_copy(update={"largest_limit": "data set"}) for one in build.predict_record().predictions]
    chart = batch_chart(build.predict_record(detail=detail, predictions=rows), detail)
    assert isinstance(chart, Chart)
    assert chart.description.startswith("The largest batch that the data set has: fp32 3")


def test_without_other_batches_nothing_is_drawn() -> None:
    record = build.predict_record(detail=build.prediction_detail().model_copy(update={"curves": []}))
    assert record.detail is not None
    assert isinstance(batch_chart(record, record.detail), Nothing)


def test_memory_over_the_step() -> None:
    record = build.predict_record(detail=build.prediction_detail())
    assert record.detail is not None
    chart = timeline_chart(record, record.detail)
    assert isinstance(chart, Chart)
    assert chart.y_axis.title == "GiB"
    lines = {line.name: list(line.y) for line in chart.lines}
    assert lines == {"all": [1.0, 3.0, 2.0], "parameters": [1.0, 1.0, 1.0], "activations": [0.0, 2.0, 1.0]}
    assert "3.00 GiB in the forward pass: activations 2.00 GiB, parameters 1.00 GiB" in chart.description
    assert [(span.low, span.high) for span in chart.spans] == [(2, 3)]


def test_the_tree_adds_up_and_says_what_bounds_each_module() -> None:
    record = build.predict_record(detail=build.prediction_detail())
    assert record.detail is not None
    tree = time_tree(record, record.detail)
    assert isinstance(tree, TreeChart)
    body, head = tree.roots
    assert (body.path, body.numbers) == ("body", ("8.00 ms", "80.0%", "bandwidth"))
    assert [child.path for child in body.children] == ["body.0", "body.1"]
    assert [(part.name, round(part.share, 3)) for part in body.bars] == [("arithmetic", 0.375), ("bandwidth", 0.625)]
    assert head.numbers == ("2.00 ms", "20.0%", "launch")
