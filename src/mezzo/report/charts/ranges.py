"""The values of a script by power of two, above the range of each format; and what each loss scale would lose."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

from mezzo.records import GRADIENTS, Casts, KindRange, RangeKind, RangesRecord, ScaleWindow
from mezzo.report import formatting as fmt
from mezzo.report.charts.data import Axis, Chart, Drawn, Line, Nothing, Span, Track
from mezzo.report.colours import Style, format_style, kind_style

_KINDS = get_args(RangeKind)
_LOWEST, _HIGHEST = -60, 48


def exponents_chart(record: RangesRecord) -> Drawn:
    """Return the share of the non-zero values of each kind by power of two."""
    kinds = [kind for kind in record.kinds if kind.histogram.nonzero]
    title = "Values by power of two"
    if not kinds:
        return Nothing(name="exponents", title=title, description="No value other than zero was recorded.")
    low, high = _ends(record)
    grid = range(low, high + 1)
    judged = next((limits for limits in record.limits if limits.format == record.format), None)
    spans = [] if judged is None else [Span(axis="x", low=judged.normal, high=judged.largest + 1, text=record.format)]
    form = fmt.clean(record.format)
    shaded = f" Shaded: the normal numbers of {form}." if spans else ""
    return Chart(
        name="exponents",
        title=title,
        description=f"Share of the non-zero values by power of two: {'; '.join(_kind_text(kind) for kind in kinds)}.",
        note=f"A loss scale of 2^k shifts both kinds of gradients k places to the right.{shaded} Bars below: the range of each format. "
        "In the pale part, numbers have fewer bits (they are subnormal).",
        x=list(grid),
        last_x=high,
        x_axis=Axis(title="magnitude", kind="power", low=low, high=high),
        y_axis=Axis(title="share of the values", kind="percent", low=0.0),
        lines=[_kind_line(kind, grid) for kind in kinds],
        spans=spans,
        tracks=[
            Track(
                name=fmt.clean(f.format),
                style=format_style(f.format),
                low=f.smallest,
                middle=f.normal,
                high=f.largest + 1,
            )
            for f in record.limits
        ],
        staircase=True,
        height=330 + 22 * len(record.limits),
        point_noun="magnitude",
    )


def _ends(record: RangesRecord) -> tuple[int, int]:
    histograms = [kind.histogram for kind in record.kinds if kind.histogram.nonzero]
    low = max(_LOWEST, min(h.first_exponent for h in histograms) - 2)
    return low, max(low + 1, min(_HIGHEST, max([h.last_exponent for h in histograms] + [16]) + 3))


def _kind_line(kind: KindRange, grid: range) -> Line:
    histogram = kind.histogram
    counted = {histogram.first_exponent + place: count for place, count in enumerate(histogram.counts)}
    return Line(
        name=kind.kind,
        style=kind_style(_KINDS.index(kind.kind)),
        y=[counted.get(e, 0) / histogram.nonzero for e in grid],
    )


def _kind_text(kind: KindRange) -> str:
    histogram = kind.histogram
    peak = histogram.first_exponent + max(range(len(histogram.counts)), key=histogram.counts.__getitem__)
    return f"{kind.kind} from {power(histogram.first_exponent)} to {power(histogram.last_exponent + 1)}, most at {power(peak)}"


def scales_chart(record: RangesRecord) -> Drawn:
    """Return the shares of all gradient values that become zero and that overflow, by loss scale."""
    title = "What each loss scale loses"
    if not any(kind.kind in GRADIENTS for kind in record.kinds) or not record.windows:
        return Nothing(name="scales", title=title, description="No gradient was recorded.")
    lines: list[Line] = []
    length = 0
    for window in record.windows:
        zeroed, over = lost_shares(record, window.format)
        length = max(length, len(zeroed))
        name, style = fmt.clean(window.format), format_style(window.format)
        same_family = sum(line.style.family == style.family for line in lines) // 2
        style = Style(family=style.family, shade=same_family % 3)
        lines.append(Line(name=name, style=style, y=zeroed))
        dotted = Style(family=style.family, shade=style.shade, dashes=2)
        lines.append(Line(name=f"{name} overflow", group=name, unnamed=True, style=dotted, y=over))
    judged = judged_window(record)
    spans = []
    if judged is not None and judged.lowest is not None and judged.highest is not None and not judged.empty:
        spans.append(Span(axis="x", low=judged.lowest, high=judged.highest, text="scale window"))
    return Chart(
        name="scales",
        title=title,
        description=f"{_window_text(record)}.",
        note="Solid lines: the share of all gradient values that become zero in a cast to the format. Dotted: the share that overflows."
        + (f" Shaded: the scale window of {fmt.clean(record.format)}." if spans else ""),
        x=[record.first_scale + k for k in range(length)],
        last_x=record.first_scale + length - 1,
        x_axis=Axis(title="loss scale", kind="power"),
        y_axis=Axis(title="share of the gradients", kind="percent", low=0.0),
        lines=[replace(line, y=[*line.y, *[math.nan] * (length - len(line.y))]) for line in lines],
        spans=spans,
        height=300,
        point_noun="scale",
    )


def _window_text(record: RangesRecord) -> str:
    parts = []
    for window in record.windows:
        name = fmt.clean(window.format)
        if window.lowest is None or window.highest is None:
            parts.append(f"{name} has no gradient to scale")
        elif window.empty:
            parts.append(f"no scale fits {name}")
        else:
            parts.append(f"{name} loses little from {power(window.lowest)} to {power(window.highest)}")
    return "; ".join(parts)


def power(exponent: int | None) -> str:
    """Return a power of two as text."""
    return fmt.MISSING if exponent is None else f"2^{exponent}"


def judged_window(record: RangesRecord) -> ScaleWindow | None:
    """Return the scale window of the format of the policy's gradients."""
    return next((w for w in record.windows if w.format == record.format), None)


def lost_shares(record: RangesRecord, form: str) -> tuple[list[float], list[float]]:
    """Return the shares of all gradient values that become zero and that overflow, for each scale."""
    kinds = [k for k in record.kinds if k.kind in GRADIENTS]
    casts: list[Casts] = [c for k in kinds for c in k.casts if c.format == form]
    total = sum(k.histogram.total for k in kinds) or 1
    zeroed = [sum(column) / total for column in zip(*(c.zeroed for c in casts), strict=True)]
    over = [sum(column) / total for column in zip(*(c.overflowed for c in casts), strict=True)]
    return zeroed, over
