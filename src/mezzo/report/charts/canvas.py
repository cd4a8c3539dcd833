"""A chart's geometry, drawn by matplotlib: the only file that imports it, and only when a page is written.

matplotlib places axes, ticks, lines and bands; text, colours and interaction are the page's own. Of matplotlib's SVG, only the paths and
tick labels with a ``gid`` that this file set are read; none of its markup reaches the page.
"""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

from mezzo.report.charts.data import Axis, AxisKind, Chart, Line

_OWN_SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mezzo",  # otherwise ids, and so the file, would change from run to run
    "path.simplify": True,
    "path.simplify_threshold": 0.3,  # pixels
    "text.parse_math": False,
    "text.usetex": False,
}
_SETTINGS = ("axes", "figure", "font", "grid", "lines", "patch", "path", "savefig", "svg", "text", "xtick", "ytick")
_LARGEST = 1e100
"""Values are clipped to this, so that their differences and ratios stay finite."""
_SVG = "{http://www.w3.org/2000/svg}"


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


def geometry_of(chart: Chart, layout: Layout) -> Geometry:
    """Return ``chart`` as matplotlib places it in ``layout``."""
    chart = _clipped(chart)
    with _settings():
        figure, axes = _figure(chart, layout)
        _limits(axes, chart)
        ends, frame = axes.get_xlim(), axes.get_ylim()
        is_log = chart.y_axis.kind == "log"
        for number, line in enumerate(chart.lines):
            _plot(axes, chart, line, number, _clamp(frame, is_log=is_log))
        left = _ticks(axes, chart, layout)
        axes.set_position(_rectangle(chart, layout, left))
        elements = _elements(figure)
        transform = axes.transData.frozen()

    def place(x: float, y: float) -> tuple[float, float]:
        within = min(max(y, min(frame)), max(frame))
        across, up = transform.transform((x, within))
        return float(across), chart.height - float(up)

    return Geometry(
        layout=layout,
        height=chart.height,
        left=left,
        right=_right(chart, layout),
        bottom=_bottom(chart),
        ends=(float(ends[0]), float(ends[1])),
        x_ticks=[Tick(place=float(t.get("x", 0)), text=t.text or "") for t in elements.get("x-tick", [])],
        y_ticks=[Tick(place=float(t.get("y", 0)), text=t.text or "") for t in elements.get("y-tick", [])],
        lines=[_path(elements.get(f"line-{number}", [])) for number in range(len(chart.lines))],
        bands=[_path(elements.get(f"band-{number}", [])) for number in range(len(chart.lines))],
        place=place,
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
    # If the home folder is read-only, matplotlib warns about its font cache, which does not concern a report's reader.
    logger = logging.getLogger("matplotlib")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        import matplotlib
        import matplotlib.backends.backend_svg
        import matplotlib.figure
        import matplotlib.patches
        import matplotlib.path
        import matplotlib.ticker
    finally:
        logger.setLevel(before)
    return matplotlib


@contextmanager
def _settings() -> Iterator[None]:
    """Draw with matplotlib's defaults, whatever style the user or their script has set."""
    mpl = _matplotlib()
    defaults = {k: v for k, v in mpl.rcParamsDefault.items() if k.split(".")[0] in _SETTINGS}
    with mpl.rc_context({**defaults, **_OWN_SETTINGS}):
        yield


def _figure(chart: Chart, layout: Layout) -> tuple[Any, Any]:
    mpl = _matplotlib()
    # The SVG backend has 72 pixels an inch.
    figure = mpl.figure.Figure(figsize=(layout.width / 72, chart.height / 72), dpi=72)
    mpl.backends.backend_svg.FigureCanvasSVG(figure)
    return figure, figure.add_axes(_rectangle(chart, layout, _MIN_LEFT))


def _rectangle(chart: Chart, layout: Layout, left: float) -> tuple[float, float, float, float]:
    """Return the axes' position as shares of the figure: left, bottom, width and height."""
    width, height, right, bottom = layout.width, chart.height, _right(chart, layout), _bottom(chart)
    return left / width, bottom / height, (width - right - left) / width, (height - TOP - bottom) / height


def _limits(axes: Any, chart: Chart) -> None:
    low, high = _ends(chart.x_axis, chart.x, margin=0.012)
    axes.set_xlim(low, high)
    if chart.y_axis.kind == "log":
        axes.set_yscale("log", nonpositive="mask")
    values = [v for line in chart.lines for part in (line.y, line.low, line.high) for v in part if math.isfinite(v)]
    values += [mark.y for line in chart.lines for mark in line.marks if math.isfinite(mark.y)]
    values += [0.0] if chart.zero else []
    if chart.y_axis.kind == "log":
        low, high = _ends(chart.y_axis, [math.log10(v) for v in values if v > 0], margin=0.06)
        axes.set_ylim(10**low, 10**high)
    else:
        axes.set_ylim(*_ends(chart.y_axis, values, margin=0.06))


def _ends(axis: Axis, values: Sequence[float], *, margin: float) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    if axis.kind == "log":
        low = low if axis.low is None else math.log10(axis.low)
        high = high if axis.high is None else math.log10(axis.high)
    else:
        low, high = low if axis.low is None else axis.low, high if axis.high is None else axis.high
    padding = margin * (high - low) or abs(low) * margin or 1.0
    return low - (padding if axis.low is None else 0), high + (padding if axis.high is None else 0)


def _clamp(frame: tuple[float, float], *, is_log: bool) -> Callable[[float], float]:
    """Return a function that limits values to one frame height beyond the frame: points farther out are invisible, and only add digits."""
    bottom, top = float(min(frame)), float(max(frame))
    height = top / bottom if is_log else top - bottom
    low, high = (max(bottom / height, 1e-300), min(top * height, 1e300)) if is_log else (bottom - height, top + height)
    return lambda value: value if math.isnan(value) else min(max(value, low), high)


def _plot(axes: Any, chart: Chart, line: Line, number: int, clamp: Callable[[float], float]) -> None:
    mpl = _matplotlib()
    x, y = list(chart.x), [clamp(v) for v in line.y]
    (artist,) = axes.plot(x, y, drawstyle="steps-post" if chart.staircase else "default", scalex=False, scaley=False)
    artist.set_gid(f"line-{number}")
    if not line.low:
        return
    corners: list[tuple[float, float]] = []
    codes: list[int] = []
    kinds = mpl.path.Path
    for piece in _stretches(line):
        low = _stairs([(x[i], clamp(line.low[i])) for i in piece], chart.staircase)
        high = _stairs([(x[i], clamp(line.high[i])) for i in piece], chart.staircase)
        outline = [*low, *reversed(high)]
        corners += [*outline, outline[0]]
        codes += [kinds.MOVETO, *[kinds.LINETO] * (len(outline) - 1), kinds.CLOSEPOLY]
    if corners:
        patch = mpl.patches.PathPatch(kinds(corners, codes), transform=axes.transData)
        patch.set_gid(f"band-{number}")
        axes.add_artist(patch)


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


def _ticks(axes: Any, chart: Chart, layout: Layout) -> float:
    """Place the ticks of both axes, and return the space that the labels of the vertical one need."""
    ticker = _matplotlib().ticker
    across = ticker.MaxNLocator(nbins=layout.num_x_ticks, integer=True, steps=[1, 2, 4, 5, 10])
    if chart.y_axis.kind == "log":
        low, high = axes.get_ylim()
        subs = (1.0, 2.0, 5.0) if high / low < 1000 else (1.0,)
        up = ticker.LogLocator(subs=subs, numticks=6)
    else:
        up = ticker.MaxNLocator(nbins=5, integer=chart.y_axis.kind == "power", steps=[1, 2, 2.5, 5, 10])
    for axis, locator, kind, gid in (
        (axes.xaxis, across, chart.x_axis.kind, "x-tick"),
        (axes.yaxis, up, chart.y_axis.kind, "y-tick"),
    ):
        low, high = sorted(axis.get_view_interval())
        values = [v for v in locator.tick_values(low, high) if low <= v <= high]
        axis.set_ticks(values, labels=[tick_text(v, kind) for v in values])
        axis.set_minor_locator(ticker.NullLocator())
        for tick in axis.get_major_ticks():
            tick.label1.set_gid(gid)
    names = [label.get_text() for label in axes.get_yticklabels()] + [track.name for track in chart.tracks]
    return max(_MIN_LEFT, 14 + _DIGIT_WIDTH * max(map(len, names), default=0))


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


def _elements(figure: Any) -> dict[str, list[ElementTree.Element]]:
    """Return the paths and texts of the figure's SVG by the gid that they were drawn under."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    found: dict[str, list[ElementTree.Element]] = {}
    for group in ElementTree.fromstring(text.getvalue()).iter(f"{_SVG}g"):
        gid = group.get("id", "")
        if gid.startswith(("line-", "band-", "x-tick", "y-tick")):
            found.setdefault(gid, []).extend([*group.iter(f"{_SVG}path"), *group.iter(f"{_SVG}text")])
    return found


def _path(elements: Sequence[ElementTree.Element]) -> str:
    """Return path data in relative steps of tenths of a pixel: a third of the size."""
    words = " ".join(element.get("d", "") for element in elements).split()
    out: list[str] = []
    at = before = (0, 0)
    place = 0
    while place < len(words):
        command = words[place]
        if command == "z":
            out.append("z")
            place += 1
            continue
        at = (round(10 * float(words[place + 1])), round(10 * float(words[place + 2])))
        place += 3
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
