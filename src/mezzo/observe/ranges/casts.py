"""The effect of casts on counted values: losses by format and scale, the scale window, the initial loss scale.

A loss scale S suits a format if S times the largest gradient does not overflow and few gradients are so small
that S times them becomes zero. Both limits follow from one histogram (``mezzo.engine.kernels.exponent_bins``): multiplying by a
power of two changes only exponents, so the effect of a cast at scale 2**k is read with the format's limits shifted by -k.

Limits: the counts describe rounding a value once. They do not cover sums inside a matrix product in the format, nor products of two
rounded values. Counts from some steps say nothing about gradients that shrink later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from mezzo.engine.kernels.exponent_bins import (
    BINS,
    CELLS,
    FIRST_EXPONENT,
    ROWS,
    bin_of,
    first_normal,
    first_overflow,
)
from mezzo.formats import Format
from mezzo.observe.limits import HEADROOM
from mezzo.records import Casts, Histogram

SCALES = range(-24, 41)
"""Exponents of the scales that a record lists."""
LITTLE = 0.01
"""Share of the non-zero gradient values that may become zero inside the window."""
MAX_SUGGESTED = 24
"""Exponent of the largest scale suggested: the ceiling of ``DynamicScale``."""
_SEARCHED = range(-400, 401)  # outside it no FP32 value can be scaled into any format


@dataclass(frozen=True)
class Counts:
    """A table of ``exponent_bins`` for the values of one tensor, or of several together."""

    table: Sequence[int]

    @classmethod
    def merged(cls, parts: Iterable[Counts]) -> Counts:
        """Return the counts of all parts as one."""
        tables = [part.table for part in parts]
        return cls([int(n) for n in np.sum(np.array(tables, dtype=np.int64), axis=0)] if tables else [0] * BINS)

    @cached_property
    def _below(self) -> list[int]:
        """For every bin, how many finite non-zero values lie in the bins before it."""
        finite = self.table[CELLS : (ROWS - 1) * CELLS]
        return [0] * CELLS + list(accumulate(finite, initial=0))

    @property
    def nonzero(self) -> int:
        """How many values are finite and not zero."""
        return self._below[-1]

    def zeroed(self, target: Format, scale: int) -> int:
        """Return how many non-zero values times ``2**scale`` become zero in ``target``; half the smallest subnormal number does, too."""
        half_smallest = -target.bias - target.mantissa_bits
        return self._below[bin_of(half_smallest - scale, 1)]

    def subnormal(self, target: Format, scale: int) -> int:
        """Return how many non-zero values times ``2**scale`` become a subnormal number other than zero."""
        exponent, mantissa = first_normal(target)
        return self._below[bin_of(exponent - scale, mantissa)] - self.zeroed(target, scale)

    def overflowed(self, target: Format, scale: int) -> int:
        """Return how many finite values times ``2**scale`` overflow in ``target``."""
        exponent, mantissa = first_overflow(target)
        return self.nonzero - self._below[bin_of(exponent - scale, mantissa)]

    def lost(self, target: Format, scale: int) -> float:
        """Return the share of non-zero values that become zero."""
        return self.zeroed(target, scale) / self.nonzero if self.nonzero else 0.0

    def highest(self, target: Format) -> int | None:
        """Return the exponent of the largest scale at which nothing overflows; None if all values are zero."""
        if not self.nonzero:
            return None
        return _last(_SEARCHED, lambda scale: self.overflowed(target, scale) == 0)

    def lowest(self, target: Format) -> int | None:
        """Return the exponent of the smallest scale at which at most the share ``LITTLE`` becomes zero."""
        if not self.nonzero:
            return None
        return -_last(_SEARCHED, lambda scale: self.lost(target, -scale) <= LITTLE)

    def casts(self, target: Format) -> Casts:
        """Return the effect of casts to ``target`` at each of ``SCALES``."""
        return Casts(
            format=target.name,
            zeroed=[self.zeroed(target, s) for s in SCALES],
            subnormal=[self.subnormal(target, s) for s in SCALES],
            overflowed=[self.overflowed(target, s) for s in SCALES],
        )

    def histogram(self) -> Histogram:
        """Return the counts by whole exponents, from the smallest value's to the largest's."""
        rows = [sum(self.table[row * CELLS : (row + 1) * CELLS]) for row in range(1, ROWS - 1)]
        used = [i for i, n in enumerate(rows) if n]
        top = (ROWS - 1) * CELLS
        return Histogram(
            first_exponent=FIRST_EXPONENT + used[0] if used else 0,
            counts=rows[used[0] : used[-1] + 1] if used else [],
            zeros=self.table[0],
            infinite=self.table[top],
            nan=sum(self.table[top + 1 :]),
        )


def _last(candidates: range, condition: Callable[[int], bool]) -> int:
    """Return the last candidate for which ``condition`` is true; it is true up to some candidate and false after that."""
    low, high = candidates.start, candidates.stop - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if condition(middle) else (low, middle - 1)
    return low


def suggested(counts: Counts, target: Format) -> tuple[int | None, str]:
    """Return the exponent of the initial loss scale for gradients with these counts, and why; None if none fits."""
    highest, lowest = counts.highest(target), counts.lowest(target)
    if highest is None or lowest is None:
        return None, "every gradient is zero"
    if lowest > highest:
        lost = counts.lost(target, highest)
        return (
            None,
            f"at 2^{highest}, the largest scale without overflow, {lost:.1%} of the non-zero values become zero",
        )
    if highest >= 0 and not counts.zeroed(target, 0) and counts.subnormal(target, 0) <= LITTLE * counts.nonzero:
        return 0, "nothing becomes zero and hardly anything subnormal without a loss scale"
    chosen = max(lowest, min(highest - HEADROOM, MAX_SUGGESTED))
    room = highest - chosen
    return chosen, f"{room} doublings below the first overflow; fewer values become zero the larger the scale is"
