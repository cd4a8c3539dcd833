"""The loss scale with its skipped steps, the gradient norm and the time of each step of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mezzo.records import RunRecord
from mezzo.report import formatting as fmt
from mezzo.report.charts import series
from mezzo.report.charts.data import Axis, Box, Boxes, Chart, Drawn, Mark, Nothing
from mezzo.report.charts.series import quantile
from mezzo.report.colours import Style

_MOST_SKIPS = 60


def scale_chart(runs: Sequence[RunRecord], *, styles: Mapping[str, Style]) -> Drawn:
    """Return the loss scale over steps in powers of two, with a mark at each skipped step."""
    scaled = {p: [r for r in runs if r.policy_shown == p and any(map(_is_scale, r.steps.loss_scale))] for p in styles}
    scaled = {policy: policy_runs for policy, policy_runs in scaled.items() if policy_runs}
    if not scaled:
        return Nothing(name="scale", title="Loss scale", description="No loss scale was used.")
    num_steps = max(len(run.steps.loss_scale) for policy_runs in scaled.values() for run in policy_runs)
    places = series.positions(num_steps, most=series.points_for(2 * len(scaled)))
    lines = []
    for policy, policy_runs in scaled.items():
        powers = [[_power(s) for s in run.steps.loss_scale] for run in policy_runs]
        band = series.band_of(powers, places)
        marks = _skips(policy_runs, band, size=len(places[0]))
        lines.append(series.banded_line(fmt.clean(policy), styles[policy], band, marks=marks))
    values = [v for line in lines for part in (line.y, line.low, line.high) for v in part if math.isfinite(v)]
    return Chart(
        name="scale",
        title="Loss scale and skipped steps",
        description=_scale_description(scaled),
        note="A triangle marks a skipped step: its gradients were not finite, so the weights were not updated.",
        x=[place.start + 1 for place in places],
        last_x=num_steps,
        x_axis=Axis(title="step"),
        y_axis=Axis(title="loss scale", kind="power", low=math.floor(min(values)) - 1, high=math.ceil(max(values)) + 1),
        lines=lines,
        staircase=True,
        layered=True,
        height=250,
    )


def _is_scale(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _power(scale: float) -> float:
    return math.log2(scale) if _is_scale(scale) else series.NAN


def _skips(policy_runs: Sequence[RunRecord], band: series.Band, *, size: int) -> list[Mark]:
    seeds: dict[int, list[str]] = {}
    for run in policy_runs:
        for index, skipped in enumerate(run.steps.skipped[: len(run.steps.loss_scale)]):
            if skipped:
                seeds.setdefault(index, []).append("" if run.seed is None else str(run.seed))
    marks = []
    for index in series.thinned(sorted(seeds), limit=_MOST_SKIPS):
        height = band.mean[index // size]
        named = [seed for seed in seeds[index] if seed]
        who = f" in seed {fmt.listed(named)}" if named and len(policy_runs) > 1 else ""
        if math.isfinite(height):
            marks.append(Mark(x=index + 1, y=height, shape="triangle", text=f"step {index + 1} skipped{who}"))
    return marks


def _scale_description(scaled: Mapping[str, Sequence[RunRecord]]) -> str:
    parts = []
    for policy, policy_runs in scaled.items():
        firsts = [next(s for s in run.steps.loss_scale if _is_scale(s)) for run in policy_runs]
        ends = [fmt.scale_text(s) for s in sorted({run.final_scale for run in policy_runs}, key=lambda s: s or 0.0)]
        skips = fmt.mean_text(sum(run.steps.num_skipped for run in policy_runs) / len(policy_runs))
        per = " a run" if len(policy_runs) > 1 else ""
        ending = ends[0] if len(ends) == 1 else f"{ends[0]} to {ends[-1]}"
        parts.append(
            f"{fmt.clean(policy)} starts at {fmt.scale_text(firsts[0])} and ends at {ending}, {skips} skipped{per}"
        )
    return f"The loss scale: {'; '.join(parts)}."


def norm_chart(run: RunRecord, *, style: Style) -> Drawn:
    """Return the gradient norm over the steps in which it was measured."""
    known = [(step, v) for step, v in enumerate(run.steps.grad_norm, 1) if math.isfinite(v)]
    if not known:
        return Nothing(name="norm", title="Gradient norm", description="No gradient norm was measured.")
    values = [v for _, v in known]
    description = (
        f"The gradient norm at the update, in {fmt.plural(len(known), 'step')}: from {fmt.number_text(values[0], digits=3)} to "
        f"{fmt.number_text(values[-1], digits=3)}; the largest is {fmt.number_text(max(values), digits=3)}."
    )
    return _one_line(
        run, known, style=style, name="norm", title="Gradient norm", unit="gradient norm", description=description
    )


def time_chart(run: RunRecord, *, style: Style) -> Drawn:
    """Return the wall time of each step."""
    known = [(step, v) for step, v in enumerate(run.steps.time_ms, 1) if math.isfinite(v)]
    if not known:
        return Nothing(name="timeline", title="Time of each step", description="No step was timed.")
    ordered = sorted(v for _, v in known)
    description = (
        f"The time of {fmt.plural(len(known), 'step')}: {fmt.ms_text(series.median_ms(run.steps.warm_ms))} in the median; the slowest is "
        f"step {max(known, key=lambda timed: timed[1])[0]} with {fmt.ms_text(ordered[-1])}."
    )
    return _one_line(
        run, known, style=style, name="timeline", title="Time of each step", unit="ms", description=description
    )


def _one_line(
    run: RunRecord,
    known: Sequence[tuple[int, float]],
    *,
    style: Style,
    name: str,
    title: str,
    unit: str,
    description: str,
) -> Chart:
    values = [v for _, v in known]
    places = series.positions(len(known))
    band = series.band_of([values], places)
    kind = series.axis_kind(values)
    merged = len(places[0])
    note = f"Each point is the mean of {merged} steps; the band contains all of them." if merged > 1 else ""
    return Chart(
        name=name,
        title=title,
        description=description,
        note=note,
        x=[known[place.start][0] for place in places],
        last_x=known[-1][0],
        x_axis=Axis(title="step"),
        y_axis=Axis(title=unit, kind=kind, low=None if kind == "log" else min(0.0, min(values))),
        lines=[series.banded_line(fmt.clean(run.policy_shown), style, band)],
        height=230,
    )


# --- The spread of the step times, one row for each policy ----------------------------------------------------------------------

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
        description = f"Not drawn; {fmt.NOT_FOR_GPU}." if emulated else "No step was timed."
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
        return Box(name=name, style=timed.style, text=fmt.NOT_FOR_GPU, ends=None)
    numbers = [fmt.ms_text(end) for end in ends]
    return Box(name=name, style=timed.style, text=numbers[2], ends=[end / top for end in ends], numbers=numbers)


def _axis(largest: float) -> tuple[float, float]:
    """Return the step between ticks, 1, 2 or 5 times a power of ten, and the end of the axis."""
    if largest <= 0:
        return 1.0, 1.0
    power = 10.0 ** math.floor(math.log10(largest / 4))
    step = next(power * size for size in (1, 2, 5, 10) if largest / (power * size) <= 5)
    return step, step * math.ceil(largest / step)
