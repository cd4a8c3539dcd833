"""What a chart shows, as plain values: the only input of the canvas, which tests check point by point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

from mezzo.report.colours import Style

AxisKind: TypeAlias = Literal["number", "log", "percent", "power", "doubling", "ms", "signed", "change"]
"""``power``: exponents of two; ``doubling``: the same, shown as powers; ``percent``: shares; ``signed`` and ``change``: differences,
in a unit and in percent."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One event on a line: a cross where values stop being finite, a triangle at skipped steps."""

    x: float
    y: float
    shape: Literal["cross", "triangle"]
    text: str


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line over the chart's ``x``, with a band around it; NaN leaves a gap."""

    name: str
    style: Style
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    marks: Sequence[Mark] = ()
    group: str = ""
    """Lines of one group are hidden together, in every chart of a page; if empty, the line's name is its group."""
    unnamed: bool = False
    """Whether the line has no entry in the legend and no label at its end."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A shaded part of the frame."""

    axis: Literal["x", "y"]
    low: float
    high: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Track:
    """A range below the horizontal axis, such as a number format's; its first part is pale."""

    name: str
    style: Style
    low: float
    middle: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis; an end that is None follows from the values."""

    title: str
    kind: AxisKind = "number"
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What all drawings of a page have in common."""

    name: str
    title: str
    description: str
    """What the figure shows, with its numbers: read aloud by a screen reader, and shown below the title."""
    note: str = ""
    """How to read it."""


@dataclass(frozen=True, kw_only=True)
class Chart(Figure):
    """Lines over one axis."""

    form: ClassVar[str] = "chart"

    x: Sequence[float]
    """The position of each entry of a line's values."""
    last_x: float
    """The last step that the last position covers."""
    x_axis: Axis
    y_axis: Axis
    lines: Sequence[Line]
    spans: Sequence[Span] = ()
    tracks: Sequence[Track] = ()
    staircase: bool = False
    zero: bool = False
    """Whether a line marks zero."""
    layered: bool = False
    """Whether lines may overlap: earlier ones are then wider, and each is labelled at its end."""
    height: int = 320
    point_noun: str = "step"
    """What a position is called in the tooltip: a step, a batch, a power of two."""


@dataclass(frozen=True, kw_only=True)
class BarPart:
    """A part of a bar."""

    name: str
    share: float
    """Of the longest bar of the chart, from 0 to 1."""
    text: str
    style: str
    """Name of its colour."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One row of a bar chart."""

    name: str
    parts: Sequence[BarPart]
    text: str
    style: Style | None = None
    """The policy's style, if the row is a policy."""
    mark: float | None = None
    """Position of a mark across the bar, as a share of the longest bar."""


@dataclass(frozen=True, kw_only=True)
class Bars(Figure):
    """Horizontal bars, each divided into the same kinds of parts."""

    form: ClassVar[str] = "bars"

    rows: Sequence[Bar]
    legend: Sequence[BarPart] = ()
    mark_text: str = ""


@dataclass(frozen=True, kw_only=True)
class Box:
    """The spread of one policy's values, as shares of the axis from 0 to 1."""

    name: str
    style: Style
    text: str
    ends: Sequence[float] | None
    """The 5%, 25%, 50%, 75% and 95% quantiles; None if ``text`` says why there are none."""
    numbers: Sequence[str] = ()
    """The same quantiles as text."""


@dataclass(frozen=True, kw_only=True)
class Boxes(Figure):
    """Spreads over one axis that begins at zero, one row each."""

    form: ClassVar[str] = "boxes"

    rows: Sequence[Box]
    ticks: Sequence[tuple[float, str]]


@dataclass(frozen=True, kw_only=True)
class TreeNode:
    """One module of a tree."""

    name: str
    path: str
    bars: Sequence[BarPart]
    text: str
    numbers: Sequence[str] = ()
    """One for each of the tree's column heads."""
    children: Sequence[TreeNode] = ()
    tone: str = ""
    badges: Sequence[str] = ()
    place: str = ""
    """Anchor of the source line that it links to; empty without one."""
    open: bool = False


@dataclass(frozen=True, kw_only=True)
class TreeChart(Figure):
    """Modules, each indented below its parent."""

    form: ClassVar[str] = "tree"

    heads: Sequence[str] = ()
    roots: Sequence[TreeNode]
    legend: Sequence[BarPart] = ()


@dataclass(frozen=True, kw_only=True)
class Nothing(Figure):
    """A chart with nothing to show, and the reason."""

    form: ClassVar[str] = "nothing"

    note: str = field(default="", init=False)


Drawn: TypeAlias = Chart | Bars | Boxes | TreeChart | Nothing
"""Anything that a page draws."""


# --- Bands, and fewer points without hiding extremes -----------------------------------------------------------------------------

NAN = math.nan
MOST_POINTS = 300
"""Positions in one chart: one every 3 pixels at full width."""
_FEWEST_POINTS = 60
_WIDE_RATIO = 50
_PAGE_POINTS = 3600
"""Points of all lines and charts of a page: about 45 bytes each with both layouts, band and tooltip, so 160 kB."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """The mean of several series at each position, and their lowest and highest value."""

    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A run of steps whose values are not finite; ``start`` and ``stop`` are indices, ``stop`` is excluded."""

    start: int
    stop: int
    before: float | None
    """The last finite value before it."""


def points_for(num_lines: int) -> int:
    """Return how many positions each of ``num_lines`` lines of a page may have."""
    return max(_FEWEST_POINTS, min(MOST_POINTS, _PAGE_POINTS // max(1, num_lines)))


def positions(num_steps: int, *, most: int = MOST_POINTS) -> list[range]:
    """Return the indices behind each position of a chart: one each, or several, equally many, if there are more than ``most``."""
    size = max(1, math.ceil(num_steps / most))
    return [range(start, min(start + size, num_steps)) for start in range(0, num_steps, size)]


def band_of(series: Sequence[Sequence[float]], places: Sequence[range]) -> Band:
    """Return the mean, lowest and highest finite value of all series at each of ``places``; NaN where there is none.

    A mean alone would hide the spikes that matter.
    """
    mean, low, high = [], [], []
    for place in places:
        known = [v for values in series for v in values[place.start : place.stop] if math.isfinite(v)]
        mean.append(sum(v / len(known) for v in known) if known else NAN)  # a sum of the values could overflow
        low.append(min(known, default=NAN))
        high.append(max(known, default=NAN))
    return Band(mean=mean, low=low, high=high)


def band_of_means(series: Sequence[Sequence[float]], places: Sequence[range]) -> Band:
    """Return the band of each series' means at each position: systematic differences, without the noise of single steps."""
    means = [band_of([values], places).mean for values in series]
    return band_of(means, positions(len(places), most=max(1, len(places))))


def banded_line(name: str, style: Style, band: Band, *, marks: Sequence[Mark] = ()) -> Line:
    """Return the line of a band's mean, with the band unless it has no width anywhere."""
    wide = any(low < high for low, high in zip(band.low, band.high, strict=True))
    low, high = (band.low, band.high) if wide else ((), ())
    return Line(name=name, style=style, y=band.mean, low=low, high=high, marks=marks)


def axis_kind(values: Sequence[float]) -> AxisKind:
    """Return ``log`` for positive values whose span is so wide that a linear axis would hide the small ones."""
    return "log" if min(values) > 0 and max(values) / min(values) > _WIDE_RATIO else "number"


def broken_stretches(values: Sequence[float]) -> list[Stretch]:
    """Return the stretches of ``values`` that are not finite."""
    stretches: list[Stretch] = []
    before: float | None = None
    start: int | None = None
    for index, value in enumerate(values):
        if math.isfinite(value):
            if start is not None:
                stretches.append(Stretch(start=start, stop=index, before=before))
                start = None
            before = value
        elif start is None:
            start = index
    if start is not None:
        stretches.append(Stretch(start=start, stop=len(values), before=before))
    return stretches


def thinned(indices: Sequence[int], *, limit: int = MOST_POINTS) -> list[int]:
    """Return at most ``limit`` of ``indices``, evenly spaced, including both ends."""
    if len(indices) <= limit:
        return list(indices)
    return [indices[k * (len(indices) - 1) // (limit - 1)] for k in range(limit)]


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of the sorted, non-empty ``ordered`` is, interpolated."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median_ms(times_ms: Sequence[float]) -> float | None:
    """Return the median time; None if there is none."""
    ordered = sorted(times_ms)
    return quantile(ordered, 0.5) if ordered else None
