"""One quantity under a policy and under the baseline, seed by seed, and what the pairs show about their difference.

With the same initial weights and batches, most of the spread over seeds cancels in a pair's difference ``d = policy - baseline``
on the quantity's scale. From n differences with mean m and standard deviation s:

* The 95% confidence interval of the mean is ``m -+ t * s / sqrt(n)``, where t is the 97.5% point of Student's t with n - 1 degrees
  of freedom (Student, Biometrika 6, 1908).
* A test that finds no difference does not show equality: few or noisy runs find none either. Two one-sided tests show equality up to a
  margin (TOST; Schuirmann, J. Pharmacokinet. Biopharm. 15, 1987). Each test has a 4%
  error, the margin 1%: together at most 5% of the policies at the margin or beyond are called equivalent.
* A policy is different if the interval lies wholly beyond the margin on one side. Here the quantities share a risk of 5%, and
  each splits its share between the interval and the margin's bound.

Values that come in steps are known only to half a step. If all seeds of a side fall into one step, the rounding is the same each time
and no number of seeds averages it out (``unaveraged``): the interval is that much wider. If all differences are
equal, their standard deviation is taken as half a step: a count that differs by 1 in every second seed has that deviation.

Limits: differences are assumed to be independent and roughly normal. Rows are judged one by one: of many policies that are off by the
margin, one in twenty still passes.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import special

from mezzo.records import Difference, Metric, ScaleName

BoolArray = NDArray[np.bool_]

CONFIDENCE = 0.95
INSIDE_ERROR = 0.04
"""Error level of each of the two one-sided tests for equivalence."""
BEYOND_ERROR = 0.025
"""Error level of the interval and of the margin's bound in one test for a difference; divided by the number of quantities."""


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One quantity in pairs of policy and baseline, all finite, with its scale and its margin."""

    name: str
    pairs: tuple[tuple[float, float], ...]
    scale: DifferenceScale
    margin: Margin
    grid: MetricGrid | None = None
    is_metric: bool = False

    def __len__(self) -> int:
        return len(self.pairs)

    @cached_property
    def scaled(self) -> tuple[Array, Array]:
        """The policy's and the baseline's values on the scale."""
        ours, theirs = zip(*self.pairs, strict=True)
        return self.scale.to_scale(ours), self.scale.to_scale(theirs)

    @cached_property
    def differences(self) -> Array:
        """Policy minus baseline of each pair, on the scale."""
        ours, theirs = self.scaled
        return ours - theirs

    @cached_property
    def step(self) -> float:
        """The step of the values on the scale."""
        return (
            0.0
            if self.grid is None
            else self.grid.step_on(self.scale, [value for pair in self.pairs for value in pair])
        )

    @cached_property
    def deviation(self) -> float:
        """The standard deviation of the differences, never below half a step; NaN for a single pair."""
        return math.nan if len(self) < 2 else max(float(np.std(self.differences, ddof=1)), self.step / 2.0)

    @cached_property
    def rounding(self) -> float:
        """The largest shift of the mean difference by rounding, on the scale."""
        if self.grid is None or len(self) < 2:
            return 0.0
        sides = np.std(np.array(self.pairs), axis=0, ddof=1)
        return self.step * float(unaveraged(sides / self.grid.step).sum())

    @cached_property
    def seen(self) -> PairStatistics:
        """The statistics that the tests need."""
        return PairStatistics(
            mean=np.asarray(np.mean(self.differences)),
            deviation=np.asarray(self.deviation),
            spread=np.asarray(self.margin.spread),
            rounding=np.asarray(self.rounding),
        )

    def is_inside(self) -> bool:
        """Return whether two one-sided tests show that the difference lies within the margin."""
        return bool(self.inside(self.seen, len(self)))

    def is_beyond(self, *, num_quantities: int) -> bool:
        """Return whether the difference is shown to lie beyond the margin on one side."""
        return bool(self.beyond(self.seen, len(self), num_quantities=num_quantities))

    def inside(self, seen: PairStatistics, num_pairs: int) -> BoolArray:
        """Return ``is_inside`` for other samples of ``num_pairs`` pairs."""
        margin = self.margin.lower_bound(num_pairs, seen.spread)
        shown: BoolArray = np.abs(seen.mean) + self._half(seen, num_pairs, error=INSIDE_ERROR) <= margin
        return shown

    def beyond(self, seen: PairStatistics, num_pairs: int, *, num_quantities: int) -> BoolArray:
        """Return ``is_beyond`` for other samples of ``num_pairs`` pairs."""
        error = BEYOND_ERROR / num_quantities
        margin = self.margin.upper_bound(num_pairs, seen.spread, error=error)
        shown: BoolArray = np.abs(seen.mean) - self._half(seen, num_pairs, error=error) > margin
        return shown

    def _half(self, seen: PairStatistics, num_pairs: int, *, error: float) -> Array:
        if num_pairs < 2:
            return np.full_like(seen.mean, math.nan)
        t = float(special.stdtrit(num_pairs - 1, 1.0 - error))
        return seen.rounding + t * seen.deviation / math.sqrt(num_pairs)

    def interval(self) -> tuple[float, float]:
        """Return the 95% confidence interval of the mean difference on the scale; NaN for a single pair."""
        half = float(self._half(self.seen, len(self), error=(1.0 - CONFIDENCE) / 2.0))
        mean = float(self.seen.mean)
        return mean - half, mean + half

    def natural(self, difference: float) -> float:
        """Return a difference on the scale, from the baseline's mean, in the units in which people state it."""
        at = float(np.mean(self.scaled[1]))
        return difference if math.isnan(difference) else self.scale.change(difference, at=at)

    def natural_margin(self, margin: float) -> float:
        """Return a margin in the units in which people state it: the nearer of its two sides."""
        sides = [abs(self.natural(side)) for side in (margin, -margin)]
        return self.natural(margin) if self.scale.name == "ratio" else min(sides)

    def record(self) -> Difference:
        """Return the quantity as part of a record."""
        ours, theirs = self.scaled
        low, high = self.interval()
        return Difference(
            value=self.scale.from_scale(float(np.mean(ours))),
            baseline=self.scale.from_scale(float(np.mean(theirs))),
            scale=self.scale.name,
            difference=self.natural(float(self.seen.mean)),
            low=self.natural(low),
            high=self.natural(high),
            margin=self.natural_margin(
                float(self.margin.lower_bound(len(self))) if len(self) > 1 else self.margin.share
            ),
        )


@dataclass(frozen=True, kw_only=True)
class PairStatistics:
    """Statistics of samples of pairs: of one sample, or of many at once."""

    mean: Array
    deviation: Array
    spread: Array
    """The median distance between two of the baseline's values."""
    rounding: Array
    """The largest shift of the mean by rounding."""


def unaveraged(deviation: Array) -> Array:
    """Return how far rounding may shift the mean of values with this standard deviation: a part of a step, at most half of one.

    Normal noise of standard deviation ``sigma`` averages the rounding error down to ``exp(-2 pi**2 sigma**2)`` of what it was (Widrow and
    Kollar, Quantization Noise, 2008). Rounding alone causes a deviation of up to half a step, which is subtracted.
    """
    error: Array = 0.5 * np.exp(-2.0 * math.pi**2 * np.maximum(deviation**2 - 0.25, 0.0))
    return error


# The margin of a quantity is the larger of two:
#
# * a share (``--margin``, 2%) of the baseline's final value: of a loss by ratio, of a proportion as Cohen's h. For a loss, it is
#   at most five times that share (10%) of the fall in the baseline's training: early in training, 2% of
#   the loss could be more than everything learned. A proportion that counts examples has a sampling error, ``1 / sqrt(examples)``
#   on the arcsine scale at any value, below which the margin cannot go. A loss of zero has no share; its margin is the FP32 resolution
#   of the loss at the start of training;
# * the baseline's own spread: the median distance between two of its runs with different seeds. A policy cannot be asked
#   to be closer to FP32 than FP32 is to itself.
#
# The spread is estimated from few seeds, so its error is taken into account: a 99% confidence bound from below is used to show that a
# difference lies inside the margin, and one from above to show that it lies beyond. It is the median of all pairwise distances (Bickel and
# Lehmann, Annals of Statistics 7, 1979; Shamos 1976), not the standard deviation, which a single outlier can stretch at will.
# Its distribution has no closed form; both approximations are fitted to a million samples each. Under normal noise the estimate is
# ``b * sqrt(chi2 / nu)`` times the true spread, with ``nu`` degrees of freedom (quantiles from 0.5% to 2.5% are right to within 2%). The
# lower bound is taken from Student's t with 3 degrees of freedom, so that it also holds for seeds with outliers: with two or three seeds
# it leaves a seventh of the estimate.

_FITTED = {
    2: (1.00, 1.483),
    3: (1.93, 1.53),
    4: (2.89, 1.289),
    5: (3.03, 1.210),
    6: (3.87, 1.20),
    7: (4.73, 1.141),
    8: (5.42, 1.119),
    9: (6.30, 1.107),
}
"""``nu`` and ``b`` by the number of seeds."""
_OVERESTIMATED = {2: 6.55, 3: 6.71, 4: 4.59, 5: 3.23, 6: 3.08, 7: 2.77, 8: 2.47, 9: 2.36}
"""Factor by which the spread is overestimated in one case of a hundred, by the number of seeds."""


@dataclass(frozen=True, kw_only=True)
class Margin:
    """The margin of one quantity on its scale."""

    share: float
    """The part that is not estimated."""
    why: str
    """The source of that part, in words."""
    spread: float = 0.0
    """The median distance between two of the baseline's runs, as estimated."""
    step: float = 0.0
    """The step of the values, by which the spread may be too large or too small."""

    def lower_bound(self, num_seeds: int, spread: Array | None = None) -> Array:
        """Return the lower confidence bound of the margin, inside which differences are equivalent; for other spreads if given."""
        known = np.maximum(np.asarray(self.spread if spread is None else spread) - self.step, 0.0)
        otherwise = 1.0 + 2.2 / math.sqrt(num_seeds) + 5.4 / num_seeds
        return np.maximum(self.share, known / _OVERESTIMATED.get(num_seeds, otherwise))

    def upper_bound(self, num_seeds: int, spread: Array | None = None, *, error: float) -> Array:
        """Return the upper bound of the margin at error level ``error``, beyond which differences are real; for other spreads if given."""
        possible = np.asarray(self.spread if spread is None else spread) + self.step
        return np.maximum(self.share, possible / spread_errors(np.asarray(error), num_seeds))


def spread_of(values: Array) -> float:
    """Return the median distance between two of ``values``; 0 for a single one."""
    first, second = np.triu_indices(len(values), 1)
    return float(np.median(np.abs(values[first] - values[second]))) if len(values) > 1 else 0.0


def spread_errors(quantiles: Array, num_seeds: int) -> Array:
    """Return the ratio of the estimated to the true spread of ``num_seeds`` normal runs, at quantiles of its distribution."""
    freedom, bias = _FITTED.get(num_seeds, (0.86 * num_seeds - 1.5, 1.0 + 0.85 / num_seeds))
    errors: Array = bias * np.sqrt(2 * special.gammaincinv(freedom / 2, quantiles) / freedom)
    return errors


# The kind follows from the words of the metric's pattern and from its values. If both leave it open, the stricter scale is
# used: a metric of unknown meaning between 0 and 1 is compared as a proportion above 0.5 and by ratio below.
#
# Values come in steps: in printed digits (0.95), or in counts over the examples of a test set (343 of 360). Two values that
# are equal only because the steps are coarse do not show agreement.

_PROPORTIONS = {
    *("acc", "accuracy", "precision", "prec", "recall", "sensitivity", "specificity", "correct", "match", "em", "rate"),
    *("f1", "f2", "fscore", "dice", "iou", "miou", "jaccard", "auc", "auroc", "auprc", "roc", "ap", "map", "mrr"),
    *("ndcg", "hit", "hits", "top", "top1", "top3", "top5", "top10", "purity", "percent"),
}
_ERRORS = {"err", "error", "errors", "misclassified", "wrong", "wer", "cer", "eer"}
_VALUE_ERRORS = {
    *("mse", "mae", "rmse", "rms", "squared", "square", "absolute", "abs", "relative", "rel", "l1", "l2", "huber"),
}
"""Words next to which "error" means the error of a predicted value, not a share of wrong answers."""
_LOSSES = {"loss", "losses", "nll", "ppl", "perplexity", "bpc", "bpb", "entropy"}
_REWARDS = {"reward", "rewards", "return", "returns", "elbo", "likelihood"}

_MOST_EXAMPLES = 20_000
_PLAUSIBLE = 1e-3
"""The largest probability of an accidental fit at which values are still taken for counts."""
_ENOUGH_VALUES = 50
_FLOAT32 = 2e-7
"""Relative error of a share computed in FP32."""


def scale_of_metric(metric: Metric, values: Sequence[float]) -> DifferenceScale:
    """Return the scale of a metric from its words and from ``values``, all finite values that any run printed."""
    words = _words_of(metric)
    positive = all(value > 0 for value in values)
    otherwise: DifferenceScale = Ratio() if positive and not words & _REWARDS else Absolute()
    if not values or words & _LOSSES:
        return otherwise
    in_one, in_hundred = (all(0 <= value <= top for value in values) for top in (1, 100))
    is_error = bool(words & _ERRORS) and not words & _VALUE_ERRORS
    if metric.percent and in_hundred:
        return Proportion(100.0)
    if words & _PROPORTIONS or is_error:
        if in_one:
            return Proportion(1.0)
        return Proportion(100.0) if in_hundred and words & _PROPORTIONS else otherwise
    known = words & (_VALUE_ERRORS | _REWARDS)
    unknown_share = in_one and not known and (not positive or statistics.fmean(values) > 0.5)
    return Proportion(1.0) if unknown_share else otherwise


def worse_direction(metric: Metric) -> int:
    """Return 1 if a larger value of a metric is worse, -1 if a smaller one is, 0 if its name does not say."""
    words = _words_of(metric)
    if words & (_LOSSES | _VALUE_ERRORS) or words & _ERRORS:
        return 1
    return -1 if words & (_PROPORTIONS | _REWARDS) - {"rate", "percent"} else 0


def _words_of(metric: Metric) -> set[str]:
    return set(re.findall(r"[a-z]+\d*", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", metric.name).lower()))


@dataclass(frozen=True, kw_only=True)
class MetricGrid:
    """The step of a metric's values."""

    step: float
    num_examples: int | None = None
    """Number of examples counted; None if the printed digits make the step."""

    def step_on(self, scale: DifferenceScale, values: Sequence[float]) -> float:
        """Return the step on ``scale``, the mean over ``values``."""
        centres, above, below = (scale.to_scale([v + d for v in values]) for d in (0.0, self.step, -self.step))
        return float(np.mean(np.maximum(np.abs(above - centres), np.abs(centres - below))))


def grid_of(values: Sequence[float], scale: DifferenceScale) -> MetricGrid:
    """Return the step of ``values``, all finite values that any run printed."""
    digits = 10.0 ** min((_exponent(value) for value in values), default=0)
    if isinstance(scale, Proportion):
        num_examples = _num_counted(values, whole=scale.unit, digits=digits)
        if num_examples is not None:
            return MetricGrid(step=scale.unit / num_examples, num_examples=num_examples)
    return MetricGrid(step=digits)


def _exponent(value: float) -> int:
    return int(Decimal(repr(value)).normalize().as_tuple().exponent)


def _num_counted(values: Sequence[float], *, whole: float, digits: float) -> int | None:
    """Return the smallest number of examples of which all ``values`` are shares, unless they fit by chance."""
    shares = np.array(sorted({value / whole for value in values} - {0.0, 1.0}))
    if not len(shares):
        return None
    shares = shares[:: 1 + len(shares) // _ENOUGH_VALUES]
    counts = np.arange(2, _MOST_EXAMPLES + 1)
    products = counts[:, None] * shares
    allowed = counts[:, None] * np.maximum(0.5 * digits / whole * (1 + 1e-9), _FLOAT32 * shares)
    fits = np.all(np.abs(products - np.round(products)) <= allowed, axis=1)
    if not fits.any():
        return None
    smallest = int(np.argmax(fits))
    chance = float(np.prod(np.minimum(2.0 * allowed[smallest], 1.0))) * counts[smallest]
    is_decimal = math.log10(counts[smallest]).is_integer()
    return int(counts[smallest]) if chance < _PLAUSIBLE and not is_decimal else None


# ``Ratio``      positive quantities (a loss, a perplexity): the logarithm. 0.02 against 0.01 is twice as much, as 2 against 1.
# ``Proportion`` shares of a whole (an accuracy, an error rate, F1, IoU, AUC): ``2 arcsin sqrt(p)``, whose differences are
#                Cohen's h (Cohen, Statistical Power Analysis, 1988). One percentage point is little at 50% and much at 99%, and
#                an accuracy and its error rate differ by the same h.
# ``Absolute``   everything that may be zero or negative (a reward, a log-likelihood): as it is.

Array = NDArray[np.float64]


class DifferenceScale(Protocol):
    """A scale on which the differences of values are compared."""

    @property
    def name(self) -> ScaleName:
        """The name of the scale in records."""

    def to_scale(self, values: Sequence[float]) -> Array:
        """Return ``values`` on the scale."""

    def from_scale(self, position: float) -> float:
        """Return the value at a position on the scale."""

    def change(self, difference: float, *, at: float) -> float:
        """Return a difference on the scale, taken from the position ``at``, in the units in which people state it."""

    def margin_for(self, share: float, *, at: float) -> float:
        """Return the margin on the scale for a share of the value at the position ``at``."""


@dataclass(frozen=True)
class Ratio:
    """The scale of ratios; a change is a share of the baseline's value."""

    name: ScaleName = "ratio"

    def to_scale(self, values: Sequence[float]) -> Array:
        """Return logarithms."""
        return np.log(np.asarray(values, dtype=np.float64))

    def from_scale(self, position: float) -> float:
        """Return the value at a position on the scale."""
        return math.exp(position)

    def change(self, difference: float, *, at: float) -> float:
        """Return the ratio less one."""
        return math.expm1(difference)

    def margin_for(self, share: float, *, at: float) -> float:
        """Return the logarithm of 1 + ``share``."""
        return math.log1p(share)


@dataclass(frozen=True)
class Proportion:
    """The scale of shares of a whole; a change is in the unit of the values, as 0.01 or as one percentage point."""

    unit: float
    """The whole: 1, or 100 for percent."""
    name: ScaleName = "proportion"

    def to_scale(self, values: Sequence[float]) -> Array:
        """Return angles from 0 to pi."""
        shares = np.clip(np.asarray(values, dtype=np.float64) / self.unit, 0.0, 1.0)
        angles: Array = 2.0 * np.arcsin(np.sqrt(shares))
        return angles

    def from_scale(self, position: float) -> float:
        """Return the value at a position on the scale."""
        return self.unit * math.sin(min(max(position, 0.0), math.pi) / 2.0) ** 2

    def change(self, difference: float, *, at: float) -> float:
        """Return the change of the value."""
        return self.from_scale(at + difference) - self.from_scale(at)

    def margin_for(self, share: float, *, at: float) -> float:
        """Return ``share`` as Cohen's h: the geometric mean of that share of the value and that share of its complement."""
        return share


@dataclass(frozen=True)
class Absolute:
    """The scale of plain differences."""

    name: ScaleName = "absolute"

    def to_scale(self, values: Sequence[float]) -> Array:
        """Return the values."""
        return np.asarray(values, dtype=np.float64)

    def from_scale(self, position: float) -> float:
        """Return the value."""
        return position

    def change(self, difference: float, *, at: float) -> float:
        """Return the difference."""
        return difference

    def margin_for(self, share: float, *, at: float) -> float:
        """Return that share of the value's magnitude."""
        return share * abs(at)
