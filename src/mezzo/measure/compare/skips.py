"""Say of a policy that skipped many updates how many, when, and which setting to try."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from mezzo.measure.compare.words import percent
from mezzo.policy import Policy
from mezzo.records import RunRecord

WORTH_SAYING = 0.05
"""The share of skipped updates from which it is said."""
MIN_AT_END = 3
"""A dynamic loss scale skips an update now and then: so many in a row at the end are more."""


def skipped_at_the_end(run: RunRecord) -> int:
    """Return how many updates were skipped at the end, where all of its last tenth were, and at least three; else 0."""
    at_end = sum(1 for _ in takewhile(bool, reversed(run.steps.skipped)))
    needed = max(MIN_AT_END, len(run.steps) // 10)
    return at_end if at_end >= min(needed, len(run.steps)) > 0 else 0


def skip_note(runs: Sequence[RunRecord], *, policy: str) -> str | None:
    """Return what is to be said of the skipped updates of a policy's ``runs``; None where they are few."""
    steps, skipped = sum(len(run.steps) for run in runs), sum(run.steps.num_skipped for run in runs)
    if not steps or skipped < WORTH_SAYING * steps:
        return None
    text = f"skipped {percent(skipped / steps)} of its updates"
    at_start = sum(_num_settling(run) for run in runs)
    scale = next((run.final_scale for run in runs if run.final_scale is not None), None)
    if 2 * at_start > skipped and scale is not None and not any(map(skipped_at_the_end, runs)):
        return f"{text}, most at the start until its loss scale was found: try {_starting_at(policy, scale)}"
    if policy == "as-is":
        return f"{text}: mezzo diagnose shows where its gradients overflow"
    return (
        f"{text}: try bf16, which has FP32's range; mezzo diagnose --policy {policy} shows where the gradients overflow"
    )


def _num_settling(run: RunRecord) -> int:
    return sum(1 for _ in takewhile(bool, run.steps.skipped))


def _starting_at(policy: str, scale: float) -> str:
    if policy == "as-is":
        return f"GradScaler(init_scale={scale:g})"
    return str(Policy.parse(policy).replace(init_scale=scale))
