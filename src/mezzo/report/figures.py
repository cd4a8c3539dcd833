"""The charts of each kind of record, in reading order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mezzo.records import CompareRecord, DiagnoseRecord, RunRecord
from mezzo.report.charts import loss, memory, modules, predicted, ranges, steps, times
from mezzo.report.charts.data import Drawn
from mezzo.report.charts.times import StepTimes
from mezzo.report.colours import Style, styles_of


def compare_charts(record: CompareRecord) -> list[Drawn]:
    """Return the charts of a comparison in reading order."""
    styles = compare_styles(record)
    trained = [run for run in record.runs if run.error is None]
    timed = [
        StepTimes(
            policy=row.policy_shown,
            style=styles[row.policy_shown],
            times_ms=[ms for run in trained if run.compared_as == row.compared_as for ms in run.steps.warm_ms],
            emulated=row.emulated,
        )
        for row in record.rows
    ]
    return [
        *loss.loss_charts(record.runs, styles=styles),
        *loss.difference_charts(record, styles=styles),
        steps.scale_chart(record.runs, styles=styles),
        memory.memory_bars({row.policy_shown: row.memory for row in record.rows}, styles=styles),
        times.time_boxes(timed),
    ]


def compare_styles(record: CompareRecord) -> dict[str, Style]:
    """Return the style of each policy of a comparison, in the order of its rows."""
    return styles_of([*record.rows, *record.runs])


def run_charts(record: RunRecord) -> list[Drawn]:
    """Return the charts of one run."""
    styles = styles_of([record])
    style = styles[record.policy_shown]
    return [
        *loss.loss_charts([record], styles=styles),
        steps.scale_chart([record], styles=styles),
        steps.norm_chart(record, style=style),
        steps.time_chart(record, style=style),
        memory.memory_bars({record.policy_shown: record.memory}, styles=styles),
    ]


def diagnose_charts(record: DiagnoseRecord) -> list[Drawn]:
    """Return the steps of the run that was diagnosed."""
    styles = styles_of([record.run])
    charts = [*loss.loss_charts([record.run], styles=styles), steps.scale_chart([record.run], styles=styles)]
    return [chart for chart in charts if chart.form != "nothing"]


def charts_of(record: Any, *, places: Mapping[str, str]) -> list[Drawn]:
    """Return the charts of a record of any kind; ``places`` maps modules to the anchors of their source lines."""
    if record.kind == "audit":
        return [modules.phase_bars(record), modules.module_tree(record, places)]
    makers: dict[str, Callable[[Any], list[Drawn]]] = {
        "compare": compare_charts,
        "check": lambda check: compare_charts(check.comparison) if check.comparison else [],
        "run": run_charts,
        "diagnose": diagnose_charts,
        "ranges": lambda found: [ranges.exponents_chart(found), ranges.scales_chart(found)],
        "fallback": lambda search: [modules.error_tree(search)],
        "predict": predicted.predict_charts,
    }
    maker = makers.get(record.kind)
    return maker(record) if maker else []
