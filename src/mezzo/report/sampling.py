"""The points of a series that a plot needs, so that a page of long runs stays small and hides nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SERIES_LIMIT = 2000
"""Number of points above which a series is thinned."""
_FIGURE_LIMIT = 25_000  # keeps the page under 6 MB with many runs: about 16 bytes a point, several figures
_SMALLEST_LIMIT = 120


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A run of steps whose values are not finite; ``start`` and ``stop`` are indices, ``stop`` is excluded."""

    start: int
    stop: int
    before: float | None
    """The last finite value before it."""


def series_limit(num_series: int) -> int:
    """Return how many points each of ``num_series`` series of one figure may have."""
    return max(_SMALLEST_LIMIT, min(SERIES_LIMIT, _FIGURE_LIMIT // max(1, num_series)))


def kept_indices(values: Sequence[float], *, limit: int = SERIES_LIMIT) -> list[int]:
    """Return at most ``limit`` indices of ``values`` in order: of each bucket the lowest, highest and first non-finite value.

    A mean would hide the spikes that matter.
    """
    if len(values) <= limit:
        return list(range(len(values)))
    num_buckets = max(1, (limit - 2) // 3)
    kept = {0, len(values) - 1}
    for bucket in range(num_buckets):
        start = bucket * len(values) // num_buckets
        stop = (bucket + 1) * len(values) // num_buckets
        kept.update(_telling(values, range(start, stop)))
    return sorted(kept)


def _telling(values: Sequence[float], bucket: range) -> list[int]:
    finite = [i for i in bucket if math.isfinite(values[i])]
    broken = next((i for i in bucket if not math.isfinite(values[i])), None)
    kept = [] if broken is None else [broken]
    if finite:
        kept += [min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)]
    return kept


def changes(values: Sequence[float]) -> list[int]:
    """Return the indices where ``values`` changes, and both ends: the points of a staircase."""
    last = len(values) - 1
    return [i for i, v in enumerate(values) if i in (0, last) or v != values[i - 1]]


def thinned(indices: Sequence[int], *, limit: int = SERIES_LIMIT) -> list[int]:
    """Return at most ``limit`` of ``indices``, evenly spaced, both ends among them."""
    if len(indices) <= limit:
        return list(indices)
    return [indices[k * (len(indices) - 1) // (limit - 1)] for k in range(limit)]


def broken_stretches(values: Sequence[float]) -> list[Stretch]:
    """Return the stretches of ``values`` that are not finite."""
    stretches: list[Stretch] = []
    before: float | None = None
    start: int | None = None
    for index, value in enumerate(values):
        if math.isfinite(value):
            if start is not None:
                stretches.append(Stretch(start=start, stop=index, before=before))
                start = None
            before = value
        elif start is None:
            start = index
    if start is not None:
        stretches.append(Stretch(start=start, stop=len(values), before=before))
    return stretches


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of the sorted, non-empty ``ordered`` lies, interpolated."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
