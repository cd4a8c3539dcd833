"""What changes from step to step: the loss scale with its skipped steps, the gradient norm, the time and the loss of each policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mezzo.records import CompareRecord, Difference, RunRecord
from mezzo.report import formatting as fmt
from mezzo.report.charts import data
from mezzo.report.charts.data import Axis, Box, Boxes, Chart, Drawn, Line, Mark, Nothing, Span, quantile
from mezzo.report.colours import Style

_MOST_SKIPS = 60


def scale_chart(runs: Sequence[RunRecord], *, styles: Mapping[str, Style]) -> Drawn:
    """Return the loss scale over steps in powers of two, with a mark at each skipped step."""
    scaled = {p: [r for r in runs if r.policy_shown == p and any(map(_is_scale, r.steps.loss_scale))] for p in styles}
    scaled = {policy: policy_runs for policy, policy_runs in scaled.items() if policy_runs}
    if not scaled:
        return Nothing(name="scale", title="Loss scale", description="No loss scale was used.")
    num_steps = max(len(run.steps.loss_scale) for policy_runs in scaled.values() for run in policy_runs)
    places = data.positions(num_steps, most=data.points_for(2 * len(scaled)))
    lines = []
    for policy, policy_runs in scaled.items():
        powers = [[_power(s) for s in run.steps.loss_scale] for run in policy_runs]
        band = data.band_of(powers, places)
        marks = _skips(policy_runs, band, size=len(places[0]))
        lines.append(data.banded_line(fmt.clean(policy), styles[policy], band, marks=marks))
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
    return math.log2(scale) if _is_scale(scale) else data.NAN


def _skips(policy_runs: Sequence[RunRecord], band: data.Band, *, size: int) -> list[Mark]:
    seeds: dict[int, list[str]] = {}
    for run in policy_runs:
        for index, skipped in enumerate(run.steps.skipped[: len(run.steps.loss_scale)]):
            if skipped:
                seeds.setdefault(index, []).append("" if run.seed is None else str(run.seed))
    marks = []
    for index in data.thinned(sorted(seeds), limit=_MOST_SKIPS):
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
        f"The time of {fmt.plural(len(known), 'step')}: {fmt.ms_text(data.median_ms(run.steps.warm_ms))} in the median; the slowest is "
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
    places = data.positions(len(known))
    band = data.band_of([values], places)
    kind = data.axis_kind(values)
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
        lines=[data.banded_line(fmt.clean(run.policy_shown), style, band)],
        height=230,
    )


# --- Step times ------------------------------------------------------------------------------------------------------------------

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


# --- The loss --------------------------------------------------------------------------------------------------------------------

_MOST_CROSSES = 40
_SHOWN_SHARE = 0.98  # share of the differences inside the frame; single steps may be outside


@dataclass(frozen=True, kw_only=True)
class LossCurve:
    """One loss of one run, and the step of each value."""

    seed: int | None
    steps: Sequence[int]
    values: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Curves:
    """One loss of all runs, by policy."""

    name: str
    """Empty for the only loss of a script."""
    by_policy: Mapping[str, Sequence[LossCurve]]
    """One curve for each run."""
    steps: Sequence[int]
    """The steps of the longest run."""
    places: Sequence[range]
    """The indices behind each position of the chart."""

    @property
    def title(self) -> str:
        """The loss as a title."""
        return fmt.loss_title(self.name) if self.name else "loss"


def curves_of(runs: Sequence[RunRecord], policies: Sequence[str]) -> list[Curves]:
    """Return the loss of ``runs``, or each of several losses; policies in the given order."""
    names = list(dict.fromkeys(loss.name for run in runs for loss in run.steps.losses)) or [""]
    all_curves = []
    for name in names:
        by_policy = {
            p: [c for run in runs if run.policy_shown == p for c in _curves_of_run(run, name)] for p in policies
        }
        known = {policy: curves for policy, curves in by_policy.items() if curves}
        steps: Sequence[int] = max((c.steps for curves in known.values() for c in curves), key=len, default=[])
        most = data.points_for(2 * len(known) * len(names))
        places = data.positions(len(steps), most=most)
        all_curves.append(Curves(name=name, by_policy=known, steps=steps, places=places))
    return [curves for curves in all_curves if curves.steps]


def _curves_of_run(run: RunRecord, name: str) -> list[LossCurve]:
    if not name:
        values = run.steps.loss
        return [LossCurve(seed=run.seed, steps=range(1, len(values) + 1), values=values)] if values else []
    return [
        LossCurve(seed=run.seed, steps=loss.steps, values=loss.values) for loss in run.steps.losses if loss.name == name
    ]


def loss_charts(runs: Sequence[RunRecord], *, styles: Mapping[str, Style]) -> list[Drawn]:
    """Return a chart of the loss, or one of each loss if a script has several."""
    losses = curves_of(runs, list(styles))
    if not losses:
        return [Nothing(name="loss", title="Loss", description="No run recorded a loss.")]
    return [
        loss_chart(loss, name=f"loss{n}" if loss.name else "loss", styles=styles) for n, loss in enumerate(losses, 1)
    ]


def loss_chart(loss: Curves, *, name: str, styles: Mapping[str, Style]) -> Chart:
    """Return the chart of one loss."""
    axis, top = _loss_axis([c.values for curves in loss.by_policy.values() for c in curves])
    lines = []
    for policy, curves in loss.by_policy.items():
        band = data.band_of([c.values for c in curves], loss.places)
        lines.append(data.banded_line(fmt.clean(policy), styles[policy], band, marks=_crosses(curves, top=top)))
    return Chart(
        name=name,
        title=f"L{loss.title[1:]}",
        description=_loss_description(loss),
        note=_note(loss, lines, clipped=axis.high is not None),
        x=[loss.steps[place.start] for place in loss.places],
        last_x=loss.steps[-1],
        x_axis=Axis(title="step"),
        y_axis=Axis(title=loss.title, kind=axis.kind, low=axis.low, high=axis.high),
        lines=lines,
        layered=True,
        height=360,
    )


def _loss_description(loss: Curves) -> str:
    parts = []
    for policy, curves in loss.by_policy.items():
        ends = [c.values[-1] for c in curves if c.values and math.isfinite(c.values[-1])]
        broken = [s for c in curves for s in data.broken_stretches(c.values)[:1]]
        name = fmt.clean(policy)
        if ends:
            first = fmt.number_text(_mean([c.values[0] for c in curves if math.isfinite(c.values[0])]), digits=3)
            parts.append(f"{name} goes from {first} to {fmt.number_text(_mean(ends), digits=4)}")
        if broken:
            first_step = min(loss.steps[s.start] for s in broken)
            parts.append(
                f"{name} is not finite from step {first_step}, in {len(broken)} of {fmt.plural(len(curves), 'run')}"
            )
    seeds = max(len(curves) for curves in loss.by_policy.values())
    how = f", mean of {seeds} seeds" if seeds > 1 else ""
    return f"The {loss.title} over {fmt.plural(len(loss.steps), 'step')}{how}: {'; '.join(parts)}."


def _mean(values: Sequence[float]) -> float | None:
    return sum(v / len(values) for v in values) if values else None


def _note(loss: Curves, lines: Sequence[Line], *, clipped: bool) -> str:
    parts = []
    size = len(loss.places[0])
    several = any(len(curves) > 1 for curves in loss.by_policy.values())
    if several or size > 1:
        of = "seeds" if several else "values"
        merged = f" of the {size} steps behind each point" if size > 1 else ""
        parts.append(f"Line: mean of the {of}{merged}. Band: their lowest and highest value.")
    if any(line.marks for line in lines):
        parts.append(
            "A cross marks where a run's loss stops being finite; from there, the mean covers only the runs that are still finite."
        )
    if clipped:
        parts.append("The axis is scaled to the policies that stay finite.")
    return " ".join(parts)


def _crosses(curves: Sequence[LossCurve], *, top: float) -> list[Mark]:
    marks = []
    for curve in curves:
        for stretch in data.broken_stretches(curve.values)[: max(1, _MOST_CROSSES // len(curves))]:
            height = top if stretch.before is None else min(top, stretch.before)
            text = _stretch_text(curve, stretch)
            marks.append(Mark(x=curve.steps[stretch.start], y=height, shape="cross", text=text))
    return marks


def _stretch_text(curve: LossCurve, stretch: data.Stretch) -> str:
    value = fmt.number_text(curve.values[stretch.start])
    first, last = curve.steps[stretch.start], curve.steps[stretch.stop - 1]
    seed = "" if curve.seed is None else f"seed {curve.seed}: "
    return (
        f"{seed}{value} at step {first}"
        if first == last
        else f"{seed}not finite in steps {first} to {last}, first {value}"
    )


def _loss_axis(values: Sequence[Sequence[float]]) -> tuple[Axis, float]:
    """Return the axis of the losses and the highest position of a cross.

    A diverging run would flatten all others, so the axis is scaled to the runs that stay finite; the lines of the others leave the frame.
    """
    finite = [run for run in values if all(map(math.isfinite, run))]
    framed = [v for run in finite or values for v in run if math.isfinite(v)]
    if not framed:
        return Axis(title="", low=0.0, high=1.0), 0.5
    low, high = min(framed), max(framed)
    highest = max(v for run in values for v in run if math.isfinite(v))
    kind = data.axis_kind(framed)
    if highest <= 2 * high or high <= 0:
        return Axis(title="", kind=kind), highest
    if kind == "log":
        ratio = high / low
        return Axis(title="", kind=kind, low=low / ratio**0.05, high=high * ratio**0.12), high * ratio**0.07
    span = (high - low) or abs(high) or 1.0
    return Axis(title="", kind=kind, low=low - 0.05 * span, high=high + 0.15 * span), high + 0.09 * span


# --- The difference from the baseline --------------------------------------------------------------------------------------------


def difference_charts(record: CompareRecord, *, styles: Mapping[str, Style]) -> list[Drawn]:
    """Return a chart for each loss of how the policies differ from the baseline; none if no seeds can be paired."""
    charts = [
        difference_chart(loss, record, name=f"difference{n}" if loss.name else "difference", styles=styles)
        for n, loss in enumerate(curves_of(record.runs, list(styles)), 1)
    ]
    return [chart for chart in charts if chart is not None]


def difference_chart(loss: Curves, record: CompareRecord, *, name: str, styles: Mapping[str, Style]) -> Chart | None:
    """Return the difference of one loss from the baseline's, paired by seed."""
    judged = _judged(record, loss.name)
    is_ratio = bool(judged) and judged[0].scale == "ratio"
    base = {curve.seed: curve.values for curve in loss.by_policy.get(record.baseline_shown, [])}
    lines, pairs = [], 0
    for policy, curves in loss.by_policy.items():
        paired = [_differences(c.values, base[c.seed], is_ratio=is_ratio) for c in curves if c.seed in base]
        if policy == record.baseline_shown or not paired:
            continue
        band = data.band_of_means(paired, loss.places)
        pairs = max(pairs, len(paired))
        lines.append(data.banded_line(fmt.clean(policy), styles[policy], band))
    if not any(math.isfinite(v) for line in lines for v in line.y):
        return None
    margins = [d.margin for d in judged if math.isfinite(d.margin)]
    margin = min(margins, default=None)
    low, high = _difference_frame(lines, margin or 0.0)
    return Chart(
        name=name,
        title=f"Difference of the {loss.title} from {fmt.clean(record.baseline_shown)}",
        description=_difference_description(loss, lines, record, is_ratio=is_ratio, margin=margin),
        note=_difference_note(margin, pairs, size=len(loss.places[0])),
        x=[loss.steps[place.start] for place in loss.places],
        last_x=loss.steps[-1],
        x_axis=Axis(title="step"),
        y_axis=Axis(
            title=f"difference from {fmt.clean(record.baseline_shown)}",
            kind="change" if is_ratio else "signed",
            low=low,
            high=high,
        ),
        lines=lines,
        spans=[] if margin is None else [Span(axis="y", low=-margin, high=margin, text="margin")],
        zero=True,
        layered=True,
        height=270,
    )


def _judged(record: CompareRecord, name: str) -> list[Difference]:
    rows = [row for row in record.rows if row.verdict != "baseline"]
    return [d for row in rows if (d := row.losses.get(name) if name else row.loss) is not None]


def _differences(values: Sequence[float], baseline: Sequence[float], *, is_ratio: bool) -> list[float]:
    pairs = zip(values, baseline, strict=False)
    if is_ratio:
        return [v / b - 1 if b else data.NAN for v, b in pairs]
    return [v - b for v, b in pairs]


def _difference_frame(lines: Sequence[Line], margin: float) -> tuple[float, float]:
    """Return a frame that contains the margin and nearly all values: the noise of single steps must not flatten the rest."""
    finite = [line for line in lines if math.isfinite(line.y[-1])]  # a diverged run would flatten the others
    values = sorted(
        v for line in finite or lines for part in (line.y, line.low, line.high) for v in part if math.isfinite(v)
    )
    tail = (1 - _SHOWN_SHARE) / 2
    low, high = data.quantile(values, tail), data.quantile(values, 1 - tail)
    low, high = min(low, -1.4 * margin, 0.0), max(high, 1.4 * margin, 0.0)
    padding = 0.06 * (high - low) or 1.0
    return low - padding, high + padding


def _difference_description(
    loss: Curves, lines: Sequence[Line], record: CompareRecord, *, is_ratio: bool, margin: float | None
) -> str:
    show = fmt.share_change_text if is_ratio else fmt.signed_text
    ends = [
        f"{line.name} {show(line.y[-1])}" if math.isfinite(line.y[-1]) else f"{line.name} not finite" for line in lines
    ]
    text = f"The {loss.title} minus {fmt.clean(record.baseline_shown)}'s; at the end: {', '.join(ends)}."
    if margin is None:
        return text
    size = f"{fmt.number_text(100 * margin, digits=2)}%" if is_ratio else fmt.number_text(margin, digits=2)
    return f"{text} The margin is {size} on either side."


def _difference_note(margin: float | None, pairs: int, *, size: int) -> str:
    parts = (
        [f"Paired by seed. Line: mean of {fmt.plural(pairs, 'pair')}. Band: from the lowest to the highest pair."]
        if pairs > 1
        else []
    )
    if size > 1:
        parts.append(f"Each point is the mean of {size} steps.")
    if margin is not None:
        parts.append("Shaded: the margin, within which a final result counts as equivalent.")
    return " ".join([*parts, "Single points may lie outside the frame."])
