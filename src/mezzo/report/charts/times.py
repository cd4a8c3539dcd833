"""The spread of the step times, one row for each policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mezzo.report import formatting as fmt
from mezzo.report.charts.data import Box, Boxes, Drawn, Nothing
from mezzo.report.charts.series import quantile
from mezzo.report.colours import Style
from mezzo.report.sheets import shared

_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """The step times of one policy."""

    policy: str
    style: Style
    times_ms: Sequence[float]
    emulated: bool


def time_boxes(timed: Sequence[StepTimes]) -> Drawn:
    """Return the spread of the step times; an emulated policy has a note instead, because its times say nothing about a GPU."""
    title = "Time per step"
    known = {t.policy: sorted(v for v in t.times_ms if math.isfinite(v)) for t in timed}
    if not any(known[t.policy] for t in timed if not t.emulated):
        emulated = any(t.emulated for t in timed)
        description = f"Not drawn; {shared.NOT_FOR_GPU}." if emulated else "No step was timed."
        return Nothing(name="times", title=title, description=description)
    shown = [t for t in timed if not t.emulated and known[t.policy]]
    ends = {t.policy: [quantile(known[t.policy], share) for share in _QUANTILES] for t in shown}
    step, top = _axis(max(quantiles[-1] for quantiles in ends.values()))
    rows = [_row(t, ends.get(t.policy), top=top) for t in timed if t.emulated or t.policy in ends]
    medians = [f"{fmt.clean(policy)} {fmt.ms_text(quantiles[2])}" for policy, quantiles in ends.items()]
    return Boxes(
        name="times",
        title=title,
        description=f"The median time of a step: {', '.join(medians)}.",
        note="A box spans the middle half of all steps after the first ones, its line is the median, and the whiskers span 5% to 95%.",
        rows=rows,
        ticks=[(place * step / top, fmt.ms_text(place * step)) for place in range(1 + round(top / step))],
    )


def _row(timed: StepTimes, ends: Sequence[float] | None, *, top: float) -> Box:
    name = fmt.clean(timed.policy)
    if ends is None:
        return Box(name=name, style=timed.style, text=shared.NOT_FOR_GPU, ends=None)
    numbers = [fmt.ms_text(end) for end in ends]
    return Box(name=name, style=timed.style, text=numbers[2], ends=[end / top for end in ends], numbers=numbers)


def _axis(largest: float) -> tuple[float, float]:
    """Return the step between ticks, 1, 2 or 5 times a power of ten, and the end of the axis."""
    if largest <= 0:
        return 1.0, 1.0
    power = 10.0 ** math.floor(math.log10(largest / 4))
    step = next(power * size for size in (1, 2, 5, 10) if largest / (power * size) <= 5)
    return step, step * math.ceil(largest / step)
