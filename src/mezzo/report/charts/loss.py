"""The loss over steps by policy, as mean and band over seeds, and its difference from the baseline below."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mezzo.records import CompareRecord, Difference, RunRecord
from mezzo.report import formatting as fmt
from mezzo.report.charts import series
from mezzo.report.charts.data import Axis, Chart, Drawn, Line, Mark, Nothing, Span
from mezzo.report.colours import Style

_MOST_CROSSES = 40
_SHOWN_SHARE = 0.98  # share of the differences inside the frame; single steps may leave it


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
    steps: Sequence[int]
    """The steps of the longest run."""
    places: Sequence[range]

    @property
    def title(self) -> str:
        """The loss as a title."""
        return fmt.loss_title(self.name) if self.name else "loss"


def curves(runs: Sequence[RunRecord], policies: Sequence[str]) -> list[Curves]:
    """Return the loss of ``runs``, or each of several losses; policies in the given order."""
    names = list(dict.fromkeys(loss.name for run in runs for loss in run.steps.losses)) or [""]
    found = []
    for name in names:
        by_policy = {p: [c for run in runs if run.policy_shown == p for c in _curves_of(run, name)] for p in policies}
        known = {policy: own for policy, own in by_policy.items() if own}
        steps: Sequence[int] = max((c.steps for own in known.values() for c in own), key=len, default=[])
        most = series.points_for(2 * len(known) * len(names))
        found.append(Curves(name=name, by_policy=known, steps=steps, places=series.positions(len(steps), most=most)))
    return [one for one in found if one.steps]


def _curves_of(run: RunRecord, name: str) -> list[LossCurve]:
    if not name:
        whole = run.steps.loss
        return [LossCurve(seed=run.seed, steps=range(1, len(whole) + 1), values=whole)] if whole else []
    return [
        LossCurve(seed=run.seed, steps=own.steps, values=own.values) for own in run.steps.losses if own.name == name
    ]


def loss_charts(runs: Sequence[RunRecord], *, styles: Mapping[str, Style]) -> list[Drawn]:
    """Return a chart of the loss, or one of each loss if a script has several."""
    found = curves(runs, list(styles))
    if not found:
        return [Nothing(name="loss", title="Loss", words="No run recorded a loss.")]
    return [loss_chart(one, name=f"loss{n}" if one.name else "loss", styles=styles) for n, one in enumerate(found, 1)]


def loss_chart(found: Curves, *, name: str, styles: Mapping[str, Style]) -> Chart:
    """Return the chart of one loss."""
    axis, top = _loss_axis([c.values for own in found.by_policy.values() for c in own])
    lines = []
    for policy, own in found.by_policy.items():
        band = series.band([c.values for c in own], found.places)
        lines.append(series.banded_line(fmt.clean(policy), styles[policy], band, marks=_crosses(own, top=top)))
    return Chart(
        name=name,
        title=f"L{found.title[1:]}",
        words=_loss_words(found),
        note=_note(found, lines, clipped=axis.high is not None),
        x=[found.steps[place.start] for place in found.places],
        last_x=found.steps[-1],
        x_axis=Axis(title="step"),
        y_axis=Axis(title=found.title, kind=axis.kind, low=axis.low, high=axis.high),
        lines=lines,
        layered=True,
        height=360,
    )


def _loss_words(found: Curves) -> str:
    parts = []
    for policy, own in found.by_policy.items():
        ends = [c.values[-1] for c in own if c.values and math.isfinite(c.values[-1])]
        broken = [s for c in own for s in series.broken_stretches(c.values)[:1]]
        name = fmt.clean(policy)
        if ends:
            first = fmt.number_text(_mean([c.values[0] for c in own if math.isfinite(c.values[0])]), digits=3)
            parts.append(f"{name} goes from {first} to {fmt.number_text(_mean(ends), digits=4)}")
        if broken:
            first_step = min(found.steps[s.start] for s in broken)
            parts.append(
                f"{name} is not finite from step {first_step}, in {len(broken)} of {fmt.plural(len(own), 'run')}"
            )
    seeds = max(len(own) for own in found.by_policy.values())
    how = f", mean of {seeds} seeds" if seeds > 1 else ""
    return f"The {found.title} over {fmt.plural(len(found.steps), 'step')}{how}: {'; '.join(parts)}."


def _mean(values: Sequence[float]) -> float | None:
    return sum(v / len(values) for v in values) if values else None


def _note(found: Curves, lines: Sequence[Line], *, clipped: bool) -> str:
    parts = []
    size = len(found.places[0])
    several = any(len(own) > 1 for own in found.by_policy.values())
    if several or size > 1:
        of = "seeds" if several else "values"
        merged = f" of the {size} steps behind each point" if size > 1 else ""
        parts.append(f"Line: mean of the {of}{merged}. Band: their lowest and highest value.")
    if any(line.marks for line in lines):
        parts.append(
            "A cross marks where a run's loss stops being finite; the mean continues over the runs that are finite."
        )
    if clipped:
        parts.append("The frame fits the policies that stay finite.")
    return " ".join(parts)


def _crosses(own: Sequence[LossCurve], *, top: float) -> list[Mark]:
    marks = []
    for curve in own:
        for stretch in series.broken_stretches(curve.values)[: max(1, _MOST_CROSSES // len(own))]:
            height = top if stretch.before is None else min(top, stretch.before)
            words = _stretch_text(curve, stretch)
            marks.append(Mark(x=curve.steps[stretch.start], y=height, shape="cross", text=words))
    return marks


def _stretch_text(curve: LossCurve, stretch: series.Stretch) -> str:
    value = fmt.number_text(curve.values[stretch.start])
    first, last = curve.steps[stretch.start], curve.steps[stretch.stop - 1]
    seed = "" if curve.seed is None else f"seed {curve.seed}: "
    return (
        f"{seed}{value} at step {first}"
        if first == last
        else f"{seed}not finite in steps {first} to {last}, first {value}"
    )


def _loss_axis(values: Sequence[Sequence[float]]) -> tuple[Axis, float]:
    """Return the axis of the losses and the highest place of a cross.

    A run that diverges would flatten all others, so the frame fits the runs that stay finite, and the lines of the others leave it.
    """
    whole = [own for own in values if all(map(math.isfinite, own))]
    framed = [v for own in whole or values for v in own if math.isfinite(v)]
    if not framed:
        return Axis(title="", low=0.0, high=1.0), 0.5
    low, high = min(framed), max(framed)
    highest = max(v for own in values for v in own if math.isfinite(v))
    kind = series.axis_kind(framed)
    if highest <= 2 * high or high <= 0:
        return Axis(title="", kind=kind), highest
    if kind == "log":
        ratio = high / low
        return Axis(title="", kind=kind, low=low / ratio**0.05, high=high * ratio**0.12), high * ratio**0.07
    room = (high - low) or abs(high) or 1.0
    return Axis(title="", kind=kind, low=low - 0.05 * room, high=high + 0.15 * room), high + 0.09 * room


# --- the difference from the baseline ----------------------------------------------------------------


def difference_charts(record: CompareRecord, *, styles: Mapping[str, Style]) -> list[Drawn]:
    """Return a chart for each loss of how the policies differ from the baseline; none if no seeds can be paired."""
    found = curves(record.runs, list(styles))
    charts = [
        difference_chart(one, record, name=f"difference{n}" if one.name else "difference", styles=styles)
        for n, one in enumerate(found, 1)
    ]
    return [chart for chart in charts if chart is not None]


def difference_chart(found: Curves, record: CompareRecord, *, name: str, styles: Mapping[str, Style]) -> Chart | None:
    """Return the difference of one loss from the baseline's, paired by seed."""
    judged = _judged(record, found.name)
    is_ratio = bool(judged) and judged[0].scale == "ratio"
    base = {curve.seed: curve.values for curve in found.by_policy.get(record.baseline_shown, [])}
    lines, pairs = [], 0
    for policy, own in found.by_policy.items():
        paired = [_differences(c.values, base[c.seed], is_ratio=is_ratio) for c in own if c.seed in base]
        if policy == record.baseline_shown or not paired:
            continue
        band = series.band_of_means(paired, found.places)
        pairs = max(pairs, len(paired))
        lines.append(series.banded_line(fmt.clean(policy), styles[policy], band))
    if not any(math.isfinite(v) for line in lines for v in line.y):
        return None
    margins = [d.margin for d in judged if math.isfinite(d.margin)]
    margin = min(margins, default=None)
    low, high = _difference_frame(lines, margin or 0.0)
    return Chart(
        name=name,
        title=f"Difference of the {found.title} from {fmt.clean(record.baseline_shown)}",
        words=_difference_words(found, lines, record, is_ratio=is_ratio, margin=margin),
        note=_difference_note(margin, pairs, size=len(found.places[0])),
        x=[found.steps[place.start] for place in found.places],
        last_x=found.steps[-1],
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
        return [v / b - 1 if b else series.NAN for v, b in pairs]
    return [v - b for v, b in pairs]


def _difference_frame(lines: Sequence[Line], margin: float) -> tuple[float, float]:
    """Return a frame that contains the margin and nearly all values: the noise of single steps must not flatten the rest."""
    whole = [line for line in lines if math.isfinite(line.y[-1])]  # one that diverged would flatten the others
    values = sorted(
        v for line in whole or lines for part in (line.y, line.low, line.high) for v in part if math.isfinite(v)
    )
    rest = (1 - _SHOWN_SHARE) / 2
    low, high = series.quantile(values, rest), series.quantile(values, 1 - rest)
    low, high = min(low, -1.4 * margin, 0.0), max(high, 1.4 * margin, 0.0)
    room = 0.06 * (high - low) or 1.0
    return low - room, high + room


def _difference_words(
    found: Curves, lines: Sequence[Line], record: CompareRecord, *, is_ratio: bool, margin: float | None
) -> str:
    show = fmt.share_change_text if is_ratio else fmt.signed_text
    ends = [
        f"{line.name} {show(line.y[-1])}" if math.isfinite(line.y[-1]) else f"{line.name} not finite" for line in lines
    ]
    words = f"The difference of the {found.title} from that of {fmt.clean(record.baseline_shown)}; at the end: {', '.join(ends)}."
    if margin is None:
        return words
    size = f"{fmt.number_text(100 * margin, digits=2)}%" if is_ratio else fmt.number_text(margin, digits=2)
    return f"{words} The margin is {size} to either side."


def _difference_note(margin: float | None, pairs: int, *, size: int) -> str:
    parts = (
        [f"Paired by seed: mean of {fmt.plural(pairs, 'pair')}, and a band from the lowest to the highest."]
        if pairs > 1
        else []
    )
    if size > 1:
        parts.append(f"Each point is the mean of {size} steps.")
    if margin is not None:
        parts.append("Shaded: the margin, within which a final result counts as equivalent.")
    return " ".join([*parts, "Single points may leave the frame."])
