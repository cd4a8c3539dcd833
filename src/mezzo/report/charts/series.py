"""Values of several runs as one line and a band, thinned out for a small page without hiding extremes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mezzo.report.charts.data import AxisKind, Line, Mark
from mezzo.report.colours import Style

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
