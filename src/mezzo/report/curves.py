"""Plots over steps: the loss, and the loss scale with its skipped steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mezzo.records import RunRecord
from mezzo.report import formatting as fmt
from mezzo.report import sampling
from mezzo.report.plotting import Figure, base_layout, json_number, label

_WIDE_RATIO = 50  # ratio of highest to lowest loss above which a linear axis hides the end of training


@dataclass(frozen=True, kw_only=True)
class _Curve:
    """A loss of one run, and the step of each value."""

    run: RunRecord
    steps: Sequence[int]
    losses: Sequence[float]


def loss_figure(runs: Sequence[RunRecord], *, colours: Mapping[str, str], name: str | None = None) -> Figure | None:
    """Return the loss over steps: a thin line per run, a cross where it stops being finite; None without steps.

    Args:
        runs: the runs to draw.
        colours: the colour of each policy.
        name: which of several losses; None for the one that every step has.
    """
    drawn = [curve for run in runs for curve in _curves(run, name)]
    if not drawn:
        return None
    axis, top = _loss_axis([curve.losses for curve in drawn])
    limit = sampling.series_limit(len(drawn))
    named: set[str] = set()
    traces = []
    for curve in drawn:
        policy = curve.run.policy_shown
        first = policy not in named
        named.add(policy)
        traces.append(_loss_line(curve, colour=colours[policy], limit=limit, first=first))
        traces += _loss_crosses(curve, colour=colours[policy], top=top, first=first)
    axis |= {"title": {"text": "loss" if name is None else label(fmt.loss_title(name))}}
    return {"data": traces, "layout": _layout([curve.run for curve in drawn], height=400, yaxis=axis)}


def _curves(run: RunRecord, name: str | None) -> list[_Curve]:
    if name is None:
        whole = run.steps.loss
        return [_Curve(run=run, steps=range(1, len(whole) + 1), losses=whole)] if whole else []
    return [_Curve(run=run, steps=loss.steps, losses=loss.values) for loss in run.steps.losses if loss.name == name]


def _loss_line(curve: _Curve, *, colour: str, limit: int, first: bool) -> Figure:
    kept = sampling.kept_indices(curve.losses, limit=limit)
    return {
        "type": "scatter",
        "mode": "lines",
        **_group(curve.run, first=first),
        "x": [curve.steps[i] for i in kept],
        "y": [json_number(curve.losses[i]) for i in kept],
        "connectgaps": False,
        "line": {"width": 1.4, "color": colour},
        "opacity": 0.85,
        "hovertemplate": f"step %{{x}}<br>loss %{{y}}<extra>{_run_label(curve.run)}</extra>",
    }


def _loss_crosses(curve: _Curve, *, colour: str, top: float, first: bool) -> list[Figure]:
    losses = curve.losses
    stretches = sampling.broken_stretches(losses)[: sampling.SERIES_LIMIT]
    if not stretches:
        return []
    words = [_stretch_text(curve, s) for s in stretches]
    heights = [min(top, top if s.before is None else s.before) for s in stretches]
    labels = [fmt.number_text(losses[stretches[0].start])] if first else []
    return [
        {
            "type": "scatter",
            "mode": "markers+text",
            **_group(curve.run, first=False),
            "x": [curve.steps[s.start] for s in stretches],
            "y": [json_number(height) for height in heights],
            "text": labels + [""] * (len(stretches) - len(labels)),
            "textposition": "top center",
            "marker": {"symbol": "x", "size": 10, "color": colour},
            "cliponaxis": False,
            "hovertext": words,
            "hovertemplate": f"%{{hovertext}}<extra>{_run_label(curve.run)}</extra>",
        }
    ]


def _stretch_text(curve: _Curve, stretch: sampling.Stretch) -> str:
    value, first, last = (
        fmt.number_text(curve.losses[stretch.start]),
        curve.steps[stretch.start],
        curve.steps[stretch.stop - 1],
    )
    if first == last:
        return f"loss is {value} at step {first}"
    return f"loss is not finite at steps {first} to {last}, first {value}"


def _loss_axis(series: Sequence[Sequence[float]]) -> tuple[Figure, float]:
    """Return the axis of the losses and the highest position of a cross.

    A run that diverges would press all others flat: the frame is made for those that stay finite, and the lines of the rest
    leave it.
    """
    whole = [losses for losses in series if all(map(math.isfinite, losses))]
    framed = [v for losses in whole or series for v in losses if math.isfinite(v)]
    if not framed:
        return {"type": "linear"}, 0.0
    low, high = min(framed), max(framed)
    highest = max(v for losses in series for v in losses if math.isfinite(v))
    is_log = low > 0 and high / low > _WIDE_RATIO
    axis: Figure = {"type": "log" if is_log else "linear"}
    if highest <= 2 * high:
        return axis, highest
    if is_log:
        ends = _frame(math.log10(low), math.log10(high))
        return axis | {"range": ends}, 10 ** _cross_place(ends)
    ends = _frame(low, high)
    return axis | {"range": ends}, _cross_place(ends)


def _frame(low: float, high: float) -> list[float]:
    height = (high - low) or 1.0
    return [low - 0.05 * height, high + 0.2 * height]


def _cross_place(ends: Sequence[float]) -> float:
    return ends[1] - 0.08 * (ends[1] - ends[0])  # leaves room for the word above the cross


def scale_figure(runs: Sequence[RunRecord], *, colours: Mapping[str, str]) -> Figure | None:
    """Return the loss scale over steps in powers of two, with a mark at each skipped step; None if no run has a scale."""
    scaled = [run for run in runs if any(_is_scale(s) for s in run.steps.loss_scale)]
    if not scaled:
        return None
    limit = sampling.series_limit(2 * len(scaled))
    named: set[str] = set()
    traces = []
    for run in scaled:
        first = run.policy_shown not in named
        named.add(run.policy_shown)
        traces.append(_scale_line(run, colour=colours[run.policy_shown], limit=limit, first=first))
        traces += _skip_marks(run, colour=colours[run.policy_shown], limit=limit)
    axis = {"title": {"text": "loss scale"}, "tickprefix": "2<sup>", "ticksuffix": "</sup>"}
    axis |= _scale_range(scaled)
    return {"data": traces, "layout": _layout(runs, height=320, yaxis=axis)}


def _scale_range(runs: Sequence[RunRecord]) -> Figure:
    powers = [math.log2(s) for run in runs for s in run.steps.loss_scale if _is_scale(s)]
    low, high = math.floor(min(powers)) - 1, math.ceil(max(powers)) + 1
    return {"range": [low, high], "dtick": max(1, round((high - low) / 6))}


def _scale_line(run: RunRecord, *, colour: str, limit: int, first: bool) -> Figure:
    scales = run.steps.loss_scale
    kept = sampling.thinned(sampling.changes(scales), limit=limit)
    return {
        "type": "scatter",
        "mode": "lines",
        **_group(run, first=first),
        "x": [i + 1 for i in kept],
        "y": [_power(scales[i]) for i in kept],
        "line": {"width": 1.6, "color": colour, "shape": "hv"},
        "opacity": 0.85,
        "hovertemplate": f"step %{{x}}<br>scale 2^%{{y:.4~g}}<extra>{_run_label(run)}</extra>",
    }


def _skip_marks(run: RunRecord, *, colour: str, limit: int) -> list[Figure]:
    scales = run.steps.loss_scale
    skipped = [i for i, skip in enumerate(run.steps.skipped[: len(scales)]) if skip]
    if not skipped:
        return []
    kept = sampling.thinned(skipped, limit=limit)
    return [
        {
            "type": "scatter",
            "mode": "markers",
            **_group(run, first=False),
            "x": [i + 1 for i in kept],
            "y": [_power(scales[i]) for i in kept],
            "marker": {"symbol": "triangle-down", "size": 9, "color": colour},
            "hovertemplate": f"step %{{x}} skipped<extra>{_run_label(run)}</extra>",
        }
    ]


def _layout(runs: Sequence[RunRecord], *, height: int, yaxis: Figure) -> Figure:
    num_steps = max(max(len(run.steps), len(run.steps.loss_scale)) for run in runs)
    margin = max(0.5, 0.015 * num_steps)
    xaxis = {"title": {"text": "step"}, "range": [1 - margin, num_steps + margin]}
    layout = base_layout(height=height, xaxis=xaxis, yaxis=yaxis)
    return layout | {"showlegend": len({run.policy_shown for run in runs}) > 1}


def _group(run: RunRecord, *, first: bool) -> Figure:
    # One legend entry per policy; a click on it toggles the lines of all its seeds.
    return {"name": label(run.policy_shown), "legendgroup": run.policy_shown, "showlegend": first}


def _run_label(run: RunRecord) -> str:
    seed = "" if run.seed is None else f", seed {run.seed}"
    return f"{label(run.policy_shown)}{seed}".replace("%{", "% {")  # plotly would fill in %{...}


def _is_scale(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _power(scale: float) -> float | None:
    return json_number(math.log2(scale)) if _is_scale(scale) else None
