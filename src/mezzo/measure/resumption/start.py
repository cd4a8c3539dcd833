"""Where a resumed run began: the update of the undisturbed run whose state it has."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from mezzo.measure.resumption.trace import Point, RunTrace


@dataclass(frozen=True, kw_only=True)
class ResumedStart:
    """Where a resumed run began."""

    updates: int
    """Updates of the undisturbed run that its first state corresponds to."""
    other_weights: tuple[str, ...] = ()
    """Parameters that are not what they were then."""


def start_of(whole: RunTrace, first: Point, *, latest: int) -> ResumedStart | None:
    """Return where a run began whose first state is ``first``; None if its weights match no step.

    Args:
        whole: the undisturbed run.
        first: the first state of the resumed run.
        latest: the update that the run was stopped after, which no checkpoint can be far beyond.
    """
    if not whole.points:
        return None
    beginning = whole.points[min(whole.points)]

    def rank(point: Point) -> tuple[int, int, int]:
        near = -abs(latest - point.updates)
        return _weights_alike(point, first, beginning), _others_alike(point, first), near

    best = max(whole.points.values(), key=rank)
    pairs = zip_longest(best.names, best.weights, first.weights)
    other = tuple(name for name, then, now in pairs if then is not None and then != now)
    if other and not _weights_alike(best, first, beginning):
        return None
    return ResumedStart(updates=best.updates, other_weights=other)


def _weights_alike(point: Point, first: Point, beginning: Point) -> int:
    """Return how many parameters are alike; of those that training had not changed by then, only if all are alike."""
    if point.weights == first.weights:
        return len(point.weights) + 1
    return sum(
        now == then and then != before
        for now, then, before in zip(first.weights, point.weights, beginning.weights, strict=False)
    )


def _others_alike(point: Point, first: Point) -> int:
    """Return how many other parts of the state are alike: a learning rate of 0 leaves weights as they are for many steps."""
    parts = ("optimizers", "schedulers", "scalers", "buffers", "copies", "samples", "inputs")
    return sum(getattr(point, part) == getattr(first, part) for part in parts)
