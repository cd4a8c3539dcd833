"""Which of several policies that train alike an expert would choose: the fastest, and of equally fast ones the simplest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mezzo.measure.compare.skips import WORTH_SAYING
from mezzo.records import AS_IS, Gain

_ALIKE = 0.05
"""Bounds this close are alike."""
_ORDER = (AS_IS, "bf16", "fp16", "tf32", "fp8")
"""Of equally fast policies, what is simpler to use first: the script as it is, then no loss scale."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A policy that trains like the baseline."""

    policy: str
    measured: Gain | None = None
    bound: Gain | None = None
    skipped: float = 0.0
    """Share of its updates that were skipped."""


def preferred(candidates: Sequence[Candidate], *, by_bound: bool) -> Candidate | None:
    """Return the policy to use; None without candidates.

    Args:
        candidates: policies that train like the baseline.
        by_bound: whether the answer is for another device than the runs', so that measured times say nothing.
    """
    if not candidates:
        return None
    timed = [] if by_bound else [one for one in candidates if one.measured is not None]
    if timed:
        fastest = max(timed, key=lambda one: _times(one.measured))
        alike = [one for one in timed if _overlap(one.measured, fastest.measured)]
    else:  # a bound of FP8 leaves out its scaling, which is not free
        known = [one for one in candidates if _name(one) != "fp8"] or list(candidates)
        most = max(_times(one.bound) for one in known)
        alike = [one for one in known if _times(one.bound) >= most * (1.0 - _ALIKE)]
    return min(alike, key=_simplicity)


def order_of_trust(policies: Sequence[str]) -> list[str]:
    """Return policies in the order in which a person would want them to work."""
    return sorted(policies, key=lambda policy: _place(policy.split(":")[0]))


def _simplicity(one: Candidate) -> tuple[bool, int, int]:
    return one.skipped >= WORTH_SAYING, _place(_name(one)), one.policy.count(":")


def _place(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


def _name(one: Candidate) -> str:
    return one.policy.split(":")[0]


def _times(gain: Gain | None) -> float:
    return 1.0 if gain is None else gain.times


def _overlap(one: Gain | None, other: Gain | None) -> bool:
    """Return whether the spreads of two measured gains overlap."""
    if one is None or other is None:
        return False
    return (one.high or one.times) >= (other.low or other.times)
