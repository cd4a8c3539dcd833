"""The scales on which values of a quantity are compared, so that a difference has its usual meaning.

``Ratio``      positive quantities (a loss, a perplexity): the logarithm. 0.02 against 0.01 is twice as much, as 2 against 1.
``Proportion`` shares of a whole (an accuracy, an error rate, F1, IoU, AUC): ``2 arcsin sqrt(p)``, whose differences are
               Cohen's h (Cohen, Statistical Power Analysis, 1988). One percentage point is little at 50% and much at 99%, and
               an accuracy and its error rate differ by the same h.
``Absolute``   everything that may be zero or negative (a reward, a log-likelihood): as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mezzo.records import ScaleName

Array = NDArray[np.float64]


class Scale(Protocol):
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
