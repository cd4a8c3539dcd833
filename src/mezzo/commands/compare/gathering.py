"""Gather the quantities to compare from pairs of runs: every loss, and the metric with its missing values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mezzo.commands.compare.pairing import Pair, final, last_metric, losses_of
from mezzo.commands.compare.quantities import Margin, Quantity, grid_of, scale_of_metric, spread_of
from mezzo.commands.compare.scales import Absolute, Ratio, Scale
from mezzo.commands.compare.trends import Learning
from mezzo.records import Metric, RunRecord

_FP32_RESOLUTION = 2.0**-23
LARGEST_SHARE_OF_FALL = 5.0
"""As a multiple of the requested margin: 10% of the fall in training against 2% of the final loss."""


def loss_quantity(pairs: Sequence[Pair], name: str, *, learning: Learning, margin: float) -> Quantity | None:
    """Return a final loss over the pairs in which it is finite; None if there are none."""
    values = [(losses_of(p.run).get(name, []), losses_of(p.baseline).get(name, [])) for p in pairs]
    known = _finite([(final(ours), final(theirs)) for ours, theirs in values])
    if not known:
        return None
    scale: Scale = Ratio() if all(value > 0 for pair in known for value in pair) else Absolute()
    baselines = scale.to_scale([theirs for _, theirs in known])
    share, why = _share_of_loss(scale, float(np.mean(baselines)), learning=learning, margin=margin)
    return Quantity(
        name=name, pairs=known, scale=scale, margin=Margin(share=share, why=why, spread=spread_of(baselines))
    )


def _share_of_loss(scale: Scale, position: float, *, learning: Learning, margin: float) -> tuple[float, str]:
    """Return the margin as a share of the final loss, or of the fall in training if that is less, and why."""
    share, fall, value = scale.margin_for(margin, at=position), learning.lower_bound(), abs(scale.from_scale(position))
    if isinstance(scale, Absolute) and learning.trends:
        resolved = _FP32_RESOLUTION * abs(learning.typical.start)
        if share < resolved:
            return resolved, "what FP32 resolves of the loss at the start"
    if fall is None:
        return share, ""
    most = LARGEST_SHARE_OF_FALL * margin
    if most * fall >= margin * value:
        return share, ""
    why = f"{100 * most:.2g}% of what training took off"
    return scale.margin_for(most * fall / value, at=position), why


@dataclass(frozen=True, kw_only=True)
class MetricKind:
    """The kind of a comparison's metric, from everything that its runs printed."""

    name: str
    scale: Scale
    values: list[float]

    @classmethod
    def of(cls, runs: Sequence[RunRecord]) -> MetricKind | None:
        """Return the metric of ``runs``; None if none was requested."""
        metrics = [run.metric for run in runs if run.metric is not None]
        if not metrics:
            return None
        values = [value for metric in metrics for value in metric.values if math.isfinite(value)]
        percent = any(metric.percent for metric in metrics)
        scale = scale_of_metric(metrics[0].model_copy(update={"percent": percent}), values)
        return cls(name=metrics[0].name, scale=scale, values=values)

    def quantity(self, pairs: Sequence[Pair], *, margin: float) -> Quantity | None:
        """Return the last metric over the pairs in which it is finite; None if there are none."""
        pairs_of_values = [(last_metric(pair.run), last_metric(pair.baseline)) for pair in pairs]
        known = _finite([(ours, theirs) for ours, theirs in pairs_of_values if ours is not None and theirs is not None])
        if not known:
            return None
        baselines = self.scale.to_scale([theirs for _, theirs in known])
        grid = grid_of(self.values, self.scale)
        share, why = self.scale.margin_for(margin, at=float(np.mean(baselines))), ""
        if grid.num_examples is not None and grid.num_examples**-0.5 > share:
            share, why = grid.num_examples**-0.5, f"the sampling error of {grid.num_examples} examples"
        step = grid.step_on(self.scale, [theirs for _, theirs in known])
        return Quantity(
            name=self.name,
            pairs=known,
            scale=self.scale,
            margin=Margin(share=share, why=why, spread=spread_of(baselines), step=step),
            grid=grid,
            is_metric=True,
        )

    def gap(self, pairs: Sequence[Pair], *, policy: str, baseline: str) -> str | None:
        """Describe a run whose metric is missing, text or not finite, so that its pair is not compared; None if all are compared."""
        for pair in pairs:
            for run, of in ((pair.run, policy), (pair.baseline, baseline)):
                if (what := _describe_lack(run.metric)) is not None:
                    return f"{self.name} {what} under {of} with {pair.key}"
        return None


def _describe_lack(metric: Metric | None) -> str | None:
    if metric is not None and metric.text is not None:
        return f"came out as {metric.text!r}, which is not a number,"
    if metric is None or not metric.values:
        return "was not printed"
    return None if math.isfinite(metric.values[-1]) else f"came out as {metric.values[-1]}"


def _finite(pairs: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    return tuple(pair for pair in pairs if all(map(math.isfinite, pair)))
