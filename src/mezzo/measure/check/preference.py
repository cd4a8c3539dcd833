"""Choose among policies that train alike as an expert would: the fastest, and of equally fast ones the simplest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mezzo.measure.compare.skips import WORTH_SAYING
from mezzo.records import AS_IS, Gain

_ALIKE = 0.05
"""Bounds within this share of the highest count as equal."""
_ORDER = (AS_IS, "bf16", "fp16", "tf32", "fp8")
"""Policies from simple to use to less simple: the script unchanged, then no loss scale."""


@dataclass(frozen=True, kw_only=True)
class EligiblePolicy:
    """A policy that trains like the baseline."""

    policy: str
    measured: Gain | None = None
    bound: Gain | None = None
    skipped: float = 0.0
    """The share of updates that were skipped."""


def preferred(candidates: Sequence[EligiblePolicy], *, by_bound: bool) -> EligiblePolicy | None:
    """Return the policy to use; None without candidates.

    Args:
        candidates: policies that train like the baseline.
        by_bound: whether the answer is for a device other than the runs', so that measured times do not apply.
    """
    if not candidates:
        return None
    timed = [] if by_bound else [(one, one.measured) for one in candidates if one.measured is not None]
    if timed:
        _, fastest = max(timed, key=lambda pair: pair[1].times)
        least = fastest.low or fastest.times
        alike = [one for one, gain in timed if (gain.high or gain.times) >= least]  # the spreads overlap
    else:  # FP8's bound leaves out its scaling, which is not free
        known = [one for one in candidates if one.policy.split(":")[0] != "fp8"] or list(candidates)
        most = max(_times(one.bound) for one in known)
        alike = [one for one in known if _times(one.bound) >= most * (1.0 - _ALIKE)]
    return min(alike, key=_simplicity)


def simplest_first(policies: Sequence[str]) -> list[str]:
    """Return policies in the order in which a person would want them to work: the simplest to use first."""
    return sorted(policies, key=_place)


def _simplicity(candidate: EligiblePolicy) -> tuple[bool, int, int]:
    return candidate.skipped >= WORTH_SAYING, _place(candidate.policy), candidate.policy.count(":")


def _place(policy: str) -> int:
    name = policy.split(":")[0]
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


def _times(gain: Gain | None) -> float:
    return 1.0 if gain is None else gain.times
