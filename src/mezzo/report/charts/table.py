"""The numbers of a chart as a table, for readers who cannot see it or want to copy them."""

from __future__ import annotations

import math

from mezzo.report.charts import series
from mezzo.report.charts.canvas import tick_text
from mezzo.report.charts.data import AxisKind, Bars, Boxes, Chart, Drawn
from mezzo.report.formatting import MISSING, number_text
from mezzo.report.sections import Grid

_MOST_ROWS = 12


def numbers_of(drawn: Drawn) -> Grid:
    """Return the numbers of a chart; of lines over steps, a few evenly spaced rows."""
    if isinstance(drawn, Chart):
        return _chart_numbers(drawn)
    if isinstance(drawn, Bars):
        names = [part.name for part in drawn.legend]
        rows = [
            (row.name, *({p.name: p.text for p in row.parts}.get(name, MISSING) for name in names), row.text)
            for row in drawn.rows
        ]
        return Grid(heads=("", *names, "total"), rows=rows, sortable=False, numbers=tuple(range(1, len(names) + 2)))
    if isinstance(drawn, Boxes):
        heads = ("", "5%", "25%", "median", "75%", "95%")
        rows = [(row.name, *row.numbers) if row.numbers else (row.name, row.text, "", "", "", "") for row in drawn.rows]
        return Grid(heads=heads, rows=rows, sortable=False, numbers=(1, 2, 3, 4, 5))
    return Grid(heads=(), rows=[])


def _chart_numbers(chart: Chart) -> Grid:
    shown = series.thinned(range(len(chart.x)), limit=_MOST_ROWS)
    rows = []
    for place in shown:
        cells = [tick_text(chart.x[place], chart.x_axis.kind)]
        for line in chart.lines:
            value = _text(line.y[place], chart.y_axis.kind)
            if line.low and line.low[place] < line.high[place]:
                value += (
                    f" ({_text(line.low[place], chart.y_axis.kind)} to {_text(line.high[place], chart.y_axis.kind)})"
                )
            cells.append(value)
        rows.append(tuple(cells))
    heads = (chart.x_axis.title, *(line.name for line in chart.lines))
    return Grid(heads=heads, rows=rows, sortable=False, numbers=tuple(range(len(heads))))


def _text(value: float, kind: AxisKind) -> str:
    if not math.isfinite(value):
        return MISSING
    return number_text(value) if kind in ("number", "log", "ms") else tick_text(value, kind)
