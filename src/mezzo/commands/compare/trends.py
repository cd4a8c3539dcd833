"""Whether a run diverged or stopped learning, by its own loss and by what the baseline's losses did.

That a loss ends higher than it began shows little: without learning, it does so in half of all runs. So a run is judged against the fall
of the baseline's loss, if that is beyond doubt, and in units of it:

``diverged``          the loss ended above its start by more than a tenth of the baseline's fall, or it first fell and then rose again,
                      each by more than half of the baseline's fall.
``stopped learning``  the loss fell by less than a fifth of the baseline's fall, over the whole training or over its second
                      half, and ended far above it; or the run ended in skipped updates only.

The baseline's fall is beyond doubt if it is many times the spread of its levels in the second half of training, or if a t-test over
its seeds shows it at 0.1%: seeds are independent even if successive losses are not. If the baseline shows no such fall
(fine-tuning, a GAN, reinforcement learning), only a loss that rises above every level of the baseline, by ten times its spread and half
of its size, counts as diverged. ``python -m benchmarks verdicts`` simulates all of it.

A loss that is not finite at the end counts as diverged whatever the baseline did.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from scipy import special

from mezzo.commands.compare.pairing import Pair, final, last_metric, losses_of, mean, num_in_tenth, short
from mezzo.commands.compare.quantities import (
    Absolute,
    DifferenceScale,
    Margin,
    Quantity,
    Ratio,
    grid_of,
    scale_of_metric,
    spread_of,
)
from mezzo.records import Metric, RunRecord

_RISE, _GIVEN_BACK, _LEARNED = 0.1, 0.5, 0.2
_TYPICAL = 0.5
"""The share of the baseline's typical fall from which one of its own runs counts as having learned."""
_CHANCE = 0.001
_TIMES_SPREAD, _TIMES_SPREAD_ABOUT_TREND = 25.0, 60.0
"""For one run; less for the mean of several. Noise with a correlation of 99.9% from step to step passes in one case of a thousand."""
_TIMES_SPREAD_BEYOND = 10.0
_LEAST_FALL = 1e-4
"""As a share of the loss: a smaller fall can be rounding."""
_BLOCKS = 10

TrendPart = Literal["whole", "second half"]
FaultKind = Literal["diverged", "stopped_learning"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """How a run went wrong."""

    verdict: FaultKind
    text: str


class LossTrend:
    """The levels of one run's loss: means over tenths of its steps."""

    def __init__(self, losses: Sequence[float]) -> None:
        num, half = num_in_tenth(losses), len(losses) // 2
        at = max(0, half - num // 2)
        self.losses = losses
        self.start, self.middle, self.end = mean(losses[:num]), mean(losses[at : at + num]), final(losses)
        blocks = min(_BLOCKS, len(losses))
        edges = [round(i * len(losses) / max(blocks, 1)) for i in range(blocks + 1)]
        self.blocks = [level for a, b in pairwise(edges) if math.isfinite(level := mean(losses[a:b]))]
        starts = range(half, len(losses) - num + 1, num)
        self.late = [level for a in starts if math.isfinite(level := mean(losses[a : a + num]))]
        """The levels of the second half."""

    def fall(self, window: TrendPart = "whole") -> float:
        """Return the fall of the loss."""
        return (self.start if window == "whole" else self.middle) - self.end

    @property
    def lowest(self) -> float:
        """The lowest level."""
        return min(self.blocks, default=math.nan)


class Learning:
    """How far the runs of the baseline lowered their loss."""

    def __init__(self, trends: Sequence[LossTrend]) -> None:
        self.trends = [trend for trend in trends if math.isfinite(trend.fall())]
        windows: tuple[TrendPart, ...] = ("whole", "second half")
        self._falls = {window: self._fall(window) for window in windows}

    @property
    def typical(self) -> LossTrend:
        """The run whose fall is the median."""
        return sorted(self.trends, key=LossTrend.fall)[len(self.trends) // 2]

    def fall(self, window: TrendPart = "whole") -> float | None:
        """Return the mean fall of the loss; None if it is not beyond doubt."""
        return self._falls[window]

    def lower_bound(self) -> float | None:
        """Return the lower end of the fall's 90% interval over seeds; None if no fall is beyond doubt."""
        fall, falls = self.fall(), [trend.fall() for trend in self.trends]
        if fall is None or len(falls) < 2:
            return fall
        error = statistics.stdev(falls) / math.sqrt(len(falls))
        return max(fall - float(special.stdtrit(len(falls) - 1, 0.95)) * error, 0.0)

    def _fall(self, window: TrendPart) -> float | None:
        falls = [fall for trend in self.trends if math.isfinite(fall := trend.fall(window))]
        if not falls:
            return None
        fall = statistics.fmean(falls)
        if not fall > _LEAST_FALL * max(abs(trend.start) for trend in self.trends):
            return None
        shown = self._is_shown_by_seeds(falls) or fall > self._needed_by_spread()
        return fall if shown else None

    def _is_shown_by_seeds(self, falls: Sequence[float]) -> bool:
        if len(falls) < 2:
            return False
        t = float(special.stdtrit(len(falls) - 1, 1.0 - _CHANCE))
        return statistics.fmean(falls) > t * statistics.stdev(falls) / math.sqrt(len(falls))

    def _needed_by_spread(self) -> float:
        """Return the fall that cannot come from the spread of levels in each run's second half, about their mean or their own trend."""
        spreads = [spreads_of(trend.late) for trend in self.trends if len(trend.late) > 2]
        if not spreads:
            return math.inf
        about_mean, about_trend = (math.sqrt(mean(s**2 for s in column)) for column in zip(*spreads, strict=True))
        num = len(spreads)
        needed: float = min(_TIMES_SPREAD / num**0.8 * about_mean, _TIMES_SPREAD_ABOUT_TREND / num * about_trend)
        return needed

    def is_exceeded_by(self, trend: LossTrend) -> bool:
        """Return whether a loss rose above every level of the baseline, by ten times its spread and half of its size."""
        levels = [level for known in self.trends for level in known.blocks]
        if len(levels) < 2:
            return False
        top = max(levels)
        far = _TIMES_SPREAD_BEYOND * statistics.stdev(levels) + 0.5 * abs(top)
        return trend.end > top + far and trend.end - trend.start > far


def spreads_of(levels: Sequence[float]) -> tuple[float, float]:
    """Return the standard deviation of three or more levels about their mean, and about a straight line."""
    values, positions = np.asarray(levels), np.arange(len(levels)) - (len(levels) - 1) / 2.0
    centred = values - values.mean()
    rest = centred - positions * (positions @ centred) / (positions @ positions)
    return float(np.std(centred, ddof=1)), float(np.sqrt(rest @ rest / (len(levels) - 2)))


def not_finite(losses: Sequence[float], *, name: str) -> str | None:
    """Return how a loss ends in non-finite values; None if it does not, or if it recovers from them."""
    tail = losses[-num_in_tenth(losses) :]
    bad = [loss for loss in tail if not math.isfinite(loss)]
    if not bad or (math.isfinite(tail[-1]) and len(bad) < len(tail) / 2):
        return None
    which = f"{len(bad)} of the last {len(tail)} values" if len(tail) > 1 else "the last value"
    return f"{which} of the {name} {'are' if len(bad) > 1 else 'is'} {'NaN' if math.isnan(bad[-1]) else 'infinite'}"


def fault_of(trend: LossTrend, partner: LossTrend, learning: Learning, *, name: str, baseline: str) -> Fault | None:
    """Return how a run went wrong compared with the baseline's run ``partner``; None if nothing shows it.

    Args:
        trend: the run's loss.
        partner: the same of the baseline's run with the same seed.
        learning: the same of all the baseline's runs.
        name: the name of the loss.
        baseline: the baseline's policy.
    """
    fall = learning.fall()
    if not math.isfinite(trend.fall()) or not math.isfinite(partner.fall()):
        return None
    theirs = f"where {baseline}'s fell from {short(partner.start)} to {short(partner.end)}"
    if learning.is_exceeded_by(trend):
        return Fault(verdict="diverged", text=f"the {name} ended at {short(trend.end)}, far above all of {baseline}'s")
    if fall is None or partner.fall() < _TYPICAL * fall:
        return None
    rise, ends = trend.end - trend.start, f"from {short(trend.start)} to {short(trend.end)} {theirs}"
    if rise > _RISE * fall:
        return Fault(verdict="diverged", text=f"the {name} rose {ends}")
    given_back = trend.end - trend.lowest
    if min(given_back, trend.start - trend.lowest) > _GIVEN_BACK * fall:
        fell = f"fell from {short(trend.start)} to {short(trend.lowest)} and rose again to {short(trend.end)}"
        return Fault(verdict="diverged", text=f"the {name} {fell} {theirs}")
    # Measured from the partner's start, the second follows from the first. A baseline run may begin low, and end low without a fall.
    if -rise < _LEARNED * fall and trend.end - partner.end > (_TYPICAL - _LEARNED) * fall:
        return Fault(verdict="stopped_learning", text=f"the {name} went {ends}")
    return _stop_half_way(trend, partner, learning, name=name, baseline=baseline)


def _stop_half_way(
    trend: LossTrend, partner: LossTrend, learning: Learning, *, name: str, baseline: str
) -> Fault | None:
    fall, late = learning.fall(), learning.fall("second half")
    if fall is None or late is None or late < _LEARNED * fall or partner.fall("second half") < 0.5 * late:
        return None
    if trend.fall("second half") > _LEARNED * late or trend.end - partner.end < 0.5 * late:
        return None
    stopped = f"the {name} stopped falling half-way, at {short(trend.middle)}, and ended at {short(trend.end)}"
    return Fault(verdict="stopped_learning", text=f"{stopped} where {baseline}'s went on to {short(partner.end)}")


_FP32_RESOLUTION = 2.0**-23
LARGEST_SHARE_OF_FALL = 5.0
"""As a multiple of the requested margin: 10% of the fall in training against 2% of the final loss."""


def loss_quantity(pairs: Sequence[Pair], name: str, *, learning: Learning, margin: float) -> Quantity | None:
    """Return a final loss over the pairs in which it is finite; None if there are none."""
    values = [(losses_of(p.run).get(name, []), losses_of(p.baseline).get(name, [])) for p in pairs]
    known = _finite([(final(ours), final(theirs)) for ours, theirs in values])
    if not known:
        return None
    scale: DifferenceScale = Ratio() if all(value > 0 for pair in known for value in pair) else Absolute()
    baselines = scale.to_scale([theirs for _, theirs in known])
    share, why = _share_of_loss(scale, float(np.mean(baselines)), learning=learning, margin=margin)
    return Quantity(
        name=name, pairs=known, scale=scale, margin=Margin(share=share, why=why, spread=spread_of(baselines))
    )


def _share_of_loss(scale: DifferenceScale, position: float, *, learning: Learning, margin: float) -> tuple[float, str]:
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
    scale: DifferenceScale
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
