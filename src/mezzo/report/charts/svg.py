"""A chart as SVG with the values that the page's script shows at a step, or as a table of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup, escape

from mezzo.report import formatting as fmt
from mezzo.report.charts import data
from mezzo.report.charts.canvas import LAYOUTS, TOP, TRACK, WIDE_LAYOUT, Geometry, geometry_of, is_labelled, tick_text
from mezzo.report.charts.data import AxisKind, Bars, Boxes, Chart, Drawn, Line, Mark, Span
from mezzo.report.formatting import MISSING, number_text
from mezzo.report.sections import Grid

_LABEL_SPACE = 16
_MARKS = {"cross": "M-4-4L4 4M-4 4L4-4", "triangle": "M-4.5-5h9L0 3z"}


def svg(chart: Chart) -> Markup:
    """Return ``chart`` in both layouts; the page's style sheet shows one of them."""
    return Markup("\n").join(_svg(chart, geometry_of(chart, layout)) for layout in LAYOUTS)


def hover_data(chart: Chart) -> dict[str, Any]:
    """Return the numbers behind ``chart`` for the page's script, with None for a number that is not finite."""
    lines = [
        {
            "name": line.name,
            "group": group_of(line),
            "style": line.style.name,
            "y": _numbers(line.y),
            **({"low": _numbers(line.low), "high": _numbers(line.high)} if line.low else {}),
            **({"marks": [[_number(mark.x), mark.text] for mark in line.marks]} if line.marks else {}),
        }
        for line in chart.lines
    ]
    axes = {
        "kind": chart.y_axis.kind,
        "xKind": chart.x_axis.kind,
        "noun": chart.point_noun,
        "lastX": _number(chart.last_x),
    }
    return {"x": _numbers(chart.x), **axes, "lines": lines}


def group_of(line: Line) -> str:
    """Return the name under which the line is hidden."""
    return line.group or line.name


def _number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.4g}") if abs(value) < 1e5 and value != round(value) else value
    return int(short) if short == round(short) and abs(short) < 1e15 else float(f"{short:.5g}")


def _numbers(values: Sequence[float]) -> list[float | int | None]:
    return [_number(v) for v in values]


def _svg(chart: Chart, geometry: Geometry) -> Markup:
    left, top, right, bottom = geometry.frame
    name, layout = f"{chart.name}-{geometry.layout.name}", geometry.layout.name
    x0, x1 = geometry.ends
    head = Markup(
        '<svg class="{}" viewBox="0 0 {} {}" role="img" aria-labelledby="title-{} about-{}" data-frame="{} {} {} {}" data-ends="{} {}">'
    ).format(layout, geometry.layout.width, geometry.height, chart.name, chart.name, left, top, right, bottom, x0, x1)
    inside = Markup('<clipPath id="clip-{}"><rect x="{}" y="{}" width="{}" height="{}"/></clipPath>').format(
        name, left, top, right - left, bottom - top
    )
    shown = Markup('<g clip-path="url(#clip-{})"><g class="moves">{}</g></g>').format(
        name, Markup("").join([*(_span(span, geometry) for span in chart.spans), *_lines(chart, geometry)])
    )
    below = _tracks(chart, geometry, name)
    return (
        head
        + inside
        + _axes(chart, geometry)
        + shown
        + below
        + _marks(chart, geometry)
        + _labels(chart, geometry)
        + Markup("</svg>")
    )


def _axes(chart: Chart, geometry: Geometry) -> Markup:
    left, _, right, bottom = geometry.frame
    out = [
        Markup(
            '<path class="grid" d="M{} {:.1f}H{}"/><text class="tick" x="{}" y="{:.1f}" text-anchor="end">{}</text>'
        ).format(left, tick.place - 4, right, left - 8, tick.place, tick.text)
        for tick in geometry.y_ticks
    ]
    if chart.zero:
        out.append(Markup('<path class="zero" d="M{} {:.1f}H{}"/>').format(left, geometry.place(0, 0)[1], right))
    ticks = [
        Markup('<text class="tick" x="{:.1f}" y="{}" text-anchor="middle">{}</text>').format(
            tick.place, bottom + 18, tick.text
        )
        for tick in geometry.x_ticks
    ]
    out.append(Markup('<path class="axis" d="M{} {}H{}"/>').format(left, bottom, right))
    out.append(Markup('<g class="x-ticks">{}</g>').format(Markup("").join(ticks)))
    out.append(Markup('<text class="head" x="{}" y="{}">{}</text>').format(2, TOP - 13, chart.y_axis.title))
    title = '<text class="head" x="{}" y="{}" text-anchor="end">{}</text>'
    out.append(Markup(title).format(right, bottom + 35, chart.x_axis.title))
    return Markup("").join(out)


def _span(span: Span, geometry: Geometry) -> Markup:
    left, top, right, bottom = geometry.frame
    if span.axis == "y":
        bottom, top = (geometry.place(geometry.ends[0], v)[1] for v in (span.low, span.high))
    else:
        ends = [min(max(v, geometry.ends[0]), geometry.ends[1]) for v in (span.low, span.high)]
        left, right = (geometry.place(v, 1.0)[0] for v in ends)
    shape = '<rect class="span" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>'
    return Markup(shape).format(left, top, right - left, bottom - top)


def _lines(chart: Chart, geometry: Geometry) -> list[Markup]:
    bands = [
        Markup('<path class="band s-{}" data-group="{}" d="{}"/>').format(line.style.name, group_of(line), path)
        for line, path in zip(chart.lines, geometry.bands, strict=True)
        if path
    ]
    lines = [
        Markup('<path class="line s-{} d{}" data-group="{}" stroke-width="{}" d="{}"/>').format(
            line.style.name, line.style.dashes, group_of(line), width, path
        )
        for line, path, width in zip(chart.lines, geometry.lines, _widths(chart, geometry), strict=True)
        if path
    ]
    return bands + lines


def _widths(chart: Chart, geometry: Geometry) -> list[float]:
    """Return the width of each line in pixels: where lines coincide, an earlier one shows on both sides of a later one."""
    if not chart.layered or len(chart.lines) == 1:
        return [2.0] * len(chart.lines)
    step = 1.3 if geometry.layout is WIDE_LAYOUT else 0.9
    return [round(1.4 + step * max(0, min(len(chart.lines), 4) - 1 - k), 1) for k in range(len(chart.lines))]


def _tracks(chart: Chart, geometry: Geometry, name: str) -> Markup:
    if not chart.tracks:
        return Markup("")
    left, _, right, bottom = geometry.frame
    names, bars = [], []
    for number, track in enumerate(chart.tracks):
        y = bottom + 56 + TRACK * number
        ends = [
            geometry.place(min(max(v, geometry.ends[0]), geometry.ends[1]), 0)[0]
            for v in (track.low, track.middle, track.high)
        ]
        shape = '<rect class="track-part{} s-{}" x="{:.1f}" y="{}" width="{:.1f}" height="10"/>'
        bars += [
            Markup(shape).format(" pale", track.style.name, ends[0], y - 9, ends[1] - ends[0]),
            Markup(shape).format("", track.style.name, ends[1], y - 9, ends[2] - ends[1]),
        ]
        names.append(
            Markup('<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>').format(left - 8, y, track.name)
        )
    clip = Markup('<clipPath id="below-{}"><rect x="{}" y="{}" width="{}" height="{}"/></clipPath>').format(
        name, left, bottom, right - left, geometry.height - bottom
    )
    moved = Markup('<g clip-path="url(#below-{})"><g class="moves">{}</g></g>').format(name, Markup("").join(bars))
    return clip + Markup("").join(names) + moved


def _marks(chart: Chart, geometry: Geometry) -> Markup:
    return Markup("").join(_mark(mark, line, geometry) for line in chart.lines for mark in line.marks)


def _mark(mark: Mark, line: Line, geometry: Geometry) -> Markup:
    x, y = geometry.place(mark.x, mark.y)
    shape = '<path class="{} s-{}" data-group="{}" data-x="{:.1f}" data-y="{:.1f}" transform="translate({:.1f} {:.1f})" d="{}"/>'
    return Markup(shape).format(mark.shape, line.style.name, group_of(line), x, y, x, y, Markup(_MARKS[mark.shape]))


def _labels(chart: Chart, geometry: Geometry) -> Markup:
    if not is_labelled(chart):
        return Markup("")
    ends = [(line, _end(chart, line, geometry)) for line in chart.lines if not line.unnamed]
    known = [(line, end) for line, end in ends if end is not None]
    places = apart([y for _, y in known], low=geometry.frame[1] + 4, high=geometry.frame[3], space=_LABEL_SPACE)
    x = geometry.frame[2] + 8
    label = '<text class="end s-{}" data-group="{}" x="{}" y="{:.1f}">{}</text>'
    labels = [
        Markup(label).format(
            line.style.name,
            group_of(line),
            x,
            y + 4,
            escape(fmt.shortened(line.name, length=geometry.layout.label_length)),
        )
        for (line, _), y in zip(known, places, strict=True)
    ]
    return Markup('<g class="ends">{}</g>').format(Markup("").join(labels))


def _end(chart: Chart, line: Line, geometry: Geometry) -> float | None:
    """Return the height of the line's end in pixels."""
    last = next(((x, y) for x, y in zip(reversed(chart.x), reversed(line.y), strict=False) if math.isfinite(y)), None)
    if last is None:
        last = (line.marks[0].x, line.marks[0].y) if line.marks else None
    return None if last is None else geometry.place(*last)[1]


def apart(places: Sequence[float], *, low: float, high: float, space: float) -> list[float]:
    """Return ``places`` in their order, moved as little as needed to be ``space`` apart and between ``low`` and ``high``."""
    order = sorted(range(len(places)), key=places.__getitem__)
    groups: list[tuple[float, int]] = []  # labels that touch move together: their middle, and their number
    for index in order:
        middle, count = _inside(places[index], 1, low, high, space), 1
        while groups and middle - groups[-1][0] < space * (count + groups[-1][1]) / 2:
            other, more = groups.pop()
            middle, count = (middle * count + other * more) / (count + more), count + more
            middle = _inside(middle, count, low, high, space)
        groups.append((middle, count))
    moved = [middle + space * (k - (count - 1) / 2) for middle, count in groups for k in range(count)]
    return [moved[order.index(index)] for index in range(len(places))]


def _inside(middle: float, count: int, low: float, high: float, space: float) -> float:
    half = space * (count - 1) / 2
    return max(low + half, min(high - half, middle))


# --- The same as a table ---------------------------------------------------------------------------------------------------------

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
    shown = data.thinned(range(len(chart.x)), limit=_MOST_ROWS)
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
