"""A chart's geometry: the only file that imports matplotlib, and only when a page is written.

matplotlib chooses the ticks, and clips and simplifies lines. Its figures, and so most of its imports, are not needed: text, colours and
interaction are the page's own.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

from mezzo.report.charts.data import Axis, AxisKind, Chart, Line

_SIMPLIFIED_FROM, _SIMPLIFY_BELOW = 128, 0.3
"""Lines of as many points lose those that move them by less than a share of a pixel."""
_BASELINE = 3.798828
"""Pixels from the middle of a tick label to its baseline."""
_LARGEST = 1e100
"""Values are clipped to this, so that their differences and ratios stay finite."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The size of a drawing in pixels, and how many ticks and characters fit."""

    name: str
    width: int
    right: int
    num_x_ticks: int
    label_length: int


WIDE_LAYOUT = Layout(name="wide", width=900, right=150, num_x_ticks=8, label_length=17)
NARROW_LAYOUT = Layout(name="narrow", width=420, right=104, num_x_ticks=4, label_length=12)
LAYOUTS = (WIDE_LAYOUT, NARROW_LAYOUT)
TOP, BOTTOM = 26, 40
_MIN_LEFT = 36
_DIGIT_WIDTH = 7.8  # pixels, of a wide digit at the page's font size
TRACK = 22
"""Height of a track below the axis."""


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A tick's position in pixels, and its label."""

    place: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """A chart in pixels, from the top left."""

    layout: Layout
    height: int
    left: float
    """Space for the labels of the vertical axis."""
    right: int
    """Free space on the right."""
    bottom: int
    """Free space below the frame."""
    ends: tuple[float, float]
    """The values at both ends of the horizontal axis."""
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    lines: list[str]
    """SVG path data by line."""
    bands: list[str]
    place: Callable[[float, float], tuple[float, float]]
    """Maps values to pixels inside the frame."""

    @property
    def frame(self) -> tuple[float, float, float, float]:
        """Left, top, right and bottom of the frame."""
        return self.left, TOP, self.layout.width - self.right, self.height - self.bottom


@dataclass(frozen=True, kw_only=True)
class _Scales:
    """Where values lie in a drawing."""

    x: tuple[float, float]
    """The values at the ends of the frame."""
    y: tuple[float, float]
    is_log: bool
    """Whether the vertical axis is logarithmic."""
    across_by: tuple[float, float] = (1.0, 0.0)
    """The factor and the offset from values to pixels."""
    down_by: tuple[float, float] = (1.0, 0.0)

    def in_frame(self, chart: Chart, layout: Layout, left: float) -> _Scales:
        """Return the scales of a frame with that much space on its left."""
        height, bottom = chart.height, _bottom(chart)
        low, high = (_log10(end) for end in self.y) if self.is_log else self.y
        across = _factor_and_offset(self.x, layout.width, left, layout.width - _right(chart, layout) - left)
        up, offset = _factor_and_offset((low, high), height, bottom, height - TOP - bottom)
        return replace(self, across_by=across, down_by=(-up, height - offset))

    def across(self, value: float) -> float:
        """Return the place of a value on the horizontal axis."""
        return value * self.across_by[0] + self.across_by[1]

    def down(self, value: float) -> float:
        """Return the place of a value on the vertical axis."""
        return (_log10(value) if self.is_log else value) * self.down_by[0] + self.down_by[1]

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Return the place of two values, inside the frame."""
        return self.across(x), self.down(min(max(y, self.y[0]), self.y[1]))

    def clamp(self, value: float) -> float:
        """Limit a value to one frame height beyond the frame: points farther out are invisible, and only add digits."""
        low, high = self.y
        height = high / low if self.is_log else high - low
        ends = (max(low / height, 1e-300), min(high * height, 1e300)) if self.is_log else (low - height, high + height)
        return value if math.isnan(value) else min(max(value, ends[0]), ends[1])


def _log10(value: float) -> float:
    """Return the logarithm, to the last bit as matplotlib computes it."""
    import numpy as np

    return float(np.log10(value))


def _factor_and_offset(ends: tuple[float, float], whole: float, start: float, length: float) -> tuple[float, float]:
    """Return what turns values into pixels from ``start``, rounded as matplotlib does it: in shares of the whole drawing."""
    low, high = start / whole * whole, (start / whole + length / whole) * whole
    per_value = 1.0 / (ends[1] - ends[0])
    return (high - low) * per_value, (high - low) * (-ends[0] * per_value) + low


def geometry_of(chart: Chart, layout: Layout) -> Geometry:
    """Return ``chart`` as it lies in ``layout``."""
    chart = _clipped(chart)
    across, up = _limits(chart)
    scales = _Scales(x=across, y=up, is_log=chart.y_axis.kind == "log")
    x_values, y_values = _ticks(chart, layout, scales)
    names = [tick_text(v, chart.y_axis.kind) for v in y_values] + [track.name for track in chart.tracks]
    left = max(_MIN_LEFT, 14 + _DIGIT_WIDTH * max(map(len, names), default=0))
    scales = scales.in_frame(chart, layout, left)
    return Geometry(
        layout=layout,
        height=chart.height,
        left=left,
        right=_right(chart, layout),
        bottom=_bottom(chart),
        ends=across,
        x_ticks=[Tick(place=round(scales.across(v), 6), text=tick_text(v, chart.x_axis.kind)) for v in x_values],
        y_ticks=[
            Tick(place=round(scales.down(v) + _BASELINE, 6), text=tick_text(v, chart.y_axis.kind)) for v in y_values
        ],
        lines=[_line(chart, line, scales, layout) for line in chart.lines],
        bands=[_band(chart, line, scales) for line in chart.lines],
        place=scales.place,
    )


def _clipped(chart: Chart) -> Chart:
    """Return ``chart`` with values whose differences and ratios stay finite: a loss may be 1e308."""
    low, high = (1 / _LARGEST if chart.y_axis.kind == "log" else -_LARGEST), _LARGEST

    def clip(value: float) -> float:
        return value if math.isnan(value) else min(max(value, low), high)

    def clip_end(value: float | None) -> float | None:
        return None if value is None or math.isnan(value) else clip(value)

    lines = [
        replace(
            line,
            y=[clip(v) for v in line.y],
            low=[clip(v) for v in line.low],
            high=[clip(v) for v in line.high],
            marks=[replace(mark, y=clip(mark.y)) for mark in line.marks],
        )
        for line in chart.lines
    ]
    spans = [
        replace(span, low=clip(span.low), high=clip(span.high)) if span.axis == "y" else span for span in chart.spans
    ]
    axis = replace(chart.y_axis, low=clip_end(chart.y_axis.low), high=clip_end(chart.y_axis.high))
    return replace(chart, lines=lines, spans=spans, y_axis=axis)


def is_labelled(chart: Chart) -> bool:
    """Return whether lines are labelled at their ends; a single line needs no label."""
    return chart.layered and len(chart.lines) > 1


def _right(chart: Chart, layout: Layout) -> int:
    return layout.right if is_labelled(chart) else 14


def _bottom(chart: Chart) -> int:
    return BOTTOM + (10 + TRACK * len(chart.tracks) if chart.tracks else 0)


@cache
def _matplotlib() -> Any:
    # If the home folder is read-only, matplotlib warns about its cache, which does not concern a report's reader.
    logger = logging.getLogger("matplotlib")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        import matplotlib
        import matplotlib.path
        import matplotlib.ticker
    finally:
        logger.setLevel(before)
    return matplotlib


def _limits(chart: Chart) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the values at the ends of both axes."""
    values = [v for line in chart.lines for part in (line.y, line.low, line.high) for v in part if math.isfinite(v)]
    values += [mark.y for line in chart.lines for mark in line.marks if math.isfinite(mark.y)]
    values += [0.0] if chart.zero else []
    across = _ends(chart.x_axis, chart.x, margin=0.012)
    if chart.y_axis.kind != "log":
        return across, _ends(chart.y_axis, values, margin=0.06)
    low, high = _ends(chart.y_axis, [math.log10(v) for v in values if v > 0], margin=0.06)
    return across, (10**low, 10**high)


def _ends(axis: Axis, values: Sequence[float], *, margin: float) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    if axis.kind == "log":
        low = low if axis.low is None else math.log10(axis.low)
        high = high if axis.high is None else math.log10(axis.high)
    else:
        low, high = low if axis.low is None else axis.low, high if axis.high is None else axis.high
    padding = margin * (high - low) or abs(low) * margin or 1.0
    return low - (padding if axis.low is None else 0), high + (padding if axis.high is None else 0)


def _line(chart: Chart, line: Line, scales: _Scales, layout: Layout) -> str:
    """Return a line's path data."""
    points = [(scales.across(x), scales.down(scales.clamp(y))) for x, y in zip(chart.x, line.y, strict=True)]
    if not points:
        return ""
    kinds = _matplotlib().path.Path
    path = kinds(_stairs(points, chart.staircase))
    path.should_simplify, path.simplify_threshold = len(path.vertices) >= _SIMPLIFIED_FROM, _SIMPLIFY_BELOW
    canvas = (0, 0, layout.width, chart.height)
    drawn = path.cleaned(remove_nans=True, clip=canvas, simplify=path.should_simplify)
    commands = {kinds.MOVETO: "M", kinds.LINETO: "L"}
    steps = zip(drawn.codes, drawn.vertices, strict=True)
    return _path([(commands[code], x, y) for code, (x, y) in steps if code in commands])


def _band(chart: Chart, line: Line, scales: _Scales) -> str:
    """Return the path data of the area around a line."""
    steps: list[tuple[str, float, float]] = []
    for piece in _stretches(line) if line.low else []:
        low, high = (
            _stairs([(scales.across(chart.x[i]), scales.down(scales.clamp(ends[i]))) for i in piece], chart.staircase)
            for ends in (line.low, line.high)
        )
        corners = [*low, *reversed(high)]
        steps += [("L" if number else "M", x, y) for number, (x, y) in enumerate(corners)]
        steps.append(("z", *corners[0]))
    return _path(steps)


def _stairs(points: list[tuple[float, float]], staircase: bool) -> list[tuple[float, float]]:
    if not staircase:
        return points
    corners = [((x, before), (x, y)) for (_, before), (x, y) in pairwise(points)]
    return [points[0], *(corner for pair in corners for corner in pair)]


def _stretches(line: Line) -> list[list[int]]:
    """Return the indices of each stretch of finite values; a stretch of one point is left out, because its band would have no area."""
    pieces: list[list[int]] = [[]]
    for index, (low, high) in enumerate(zip(line.low, line.high, strict=True)):
        if math.isfinite(low) and math.isfinite(high):
            pieces[-1].append(index)
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if len(piece) > 1]


def _ticks(chart: Chart, layout: Layout, scales: _Scales) -> tuple[list[float], list[float]]:
    """Return the values that both axes are labelled with."""
    ticker = _matplotlib().ticker
    across = ticker.MaxNLocator(nbins=layout.num_x_ticks, integer=True, steps=[1, 2, 4, 5, 10])
    low, high = scales.y
    if scales.is_log:
        up = ticker.LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 1000 else (1.0,), numticks=6)
    else:
        up = ticker.MaxNLocator(nbins=5, integer=chart.y_axis.kind == "power", steps=[1, 2, 2.5, 5, 10])
    x_values, y_values = (
        [float(v) for v in locator.tick_values(low, high) if low <= v <= high]
        for locator, (low, high) in ((across, scales.x), (up, scales.y))
    )
    return x_values, y_values


def tick_text(value: float, kind: AxisKind) -> str:
    """Return a value as an axis of ``kind`` shows it."""
    if kind == "power":
        return f"2^{value:g}"
    if kind == "doubling":
        return f"{2**value:.0f}"
    if kind in ("percent", "change"):
        return f"{100 * value:{'+' if kind == 'change' and value else ''}.3g}%"
    if kind == "signed":
        return f"{value:+.3g}" if value else "0"
    return f"{value:g}"


def _path(steps: Sequence[tuple[str, float, float]]) -> str:
    """Return path data in relative steps of tenths of a pixel: a third of the size."""
    out: list[str] = []
    before = (0, 0)
    for command, x, y in steps:
        if command == "z":
            out.append("z")
            continue
        at = (round(10 * round(x, 6)), round(10 * round(y, 6)))
        if command == "M":
            out.append(f"M{_tenths(at[0])} {_tenths(at[1])}l")
        elif at != before:
            out.append(f"{_tenths(at[0] - before[0])} {_tenths(at[1] - before[1])} ")
        before = at
    path = "".join(out).replace(" -", "-").replace(" z", "z").replace(" M", "M").strip()
    return path.replace("lM", "h0M").removesuffix("l") + ("h0" if path.endswith("l") else "")  # a lone point is a dot


def _tenths(value: int) -> str:
    whole = f"{value / 10:.1f}".removesuffix(".0")
    return whole.replace("0.", ".", 1) if whole.startswith(("0.", "-0.")) else whole
