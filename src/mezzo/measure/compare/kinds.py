"""The kind of quantity that a metric is, and the step of its values.

The kind follows from the words of the metric's pattern and from its values. If both leave it open, the stricter scale is
used: a metric of unknown meaning between 0 and 1 is compared as a proportion above 0.5 and by ratio below.

Values come in steps: in printed digits (0.95), or in counts over the examples of a test set (343 of 360). Two values that
are equal only because the steps are coarse do not show agreement.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np

from mezzo.measure.compare.scales import Absolute, Proportion, Ratio, Scale
from mezzo.records import Metric

_PROPORTIONS = {
    *("acc", "accuracy", "precision", "prec", "recall", "sensitivity", "specificity", "correct", "match", "em", "rate"),
    *("f1", "f2", "fscore", "dice", "iou", "miou", "jaccard", "auc", "auroc", "auprc", "roc", "ap", "map", "mrr"),
    *("ndcg", "hit", "hits", "top", "top1", "top3", "top5", "top10", "purity", "percent"),
}
_ERRORS = {"err", "error", "errors", "misclassified", "wrong", "wer", "cer", "eer"}
_VALUE_ERRORS = {
    *("mse", "mae", "rmse", "rms", "squared", "square", "absolute", "abs", "relative", "rel", "l1", "l2", "huber"),
}
"""Words next to which "error" means that of a predicted value, not a share of wrong answers."""
_LOSSES = {"loss", "losses", "nll", "ppl", "perplexity", "bpc", "bpb", "entropy"}
_REWARDS = {"reward", "rewards", "return", "returns", "elbo", "likelihood"}

_MOST_EXAMPLES = 20_000
_PLAUSIBLE = 1e-3
"""The largest probability of an accidental fit at which values are still taken for counts."""
_ENOUGH_VALUES = 50
_FLOAT32 = 2e-7
"""Relative error of a share computed in FP32."""


def scale_of_metric(metric: Metric, values: Sequence[float]) -> Scale:
    """Return the scale of a metric from its words and from ``values``, all finite values that any run printed."""
    words = set(re.findall(r"[a-z]+\d*", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", metric.name).lower()))
    positive = all(value > 0 for value in values)
    otherwise: Scale = Ratio() if positive and not words & _REWARDS else Absolute()
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


@dataclass(frozen=True, kw_only=True)
class MetricGrid:
    """The step of a metric's values."""

    step: float
    num_examples: int | None = None
    """Number of examples counted; None if the step is that of the printed digits."""

    def step_on(self, scale: Scale, values: Sequence[float]) -> float:
        """Return the step on ``scale``, the mean over ``values``."""
        centres, above, below = (scale.to_scale([v + d for v in values]) for d in (0.0, self.step, -self.step))
        return float(np.mean(np.maximum(np.abs(above - centres), np.abs(centres - below))))


def grid_of(values: Sequence[float], scale: Scale) -> MetricGrid:
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
