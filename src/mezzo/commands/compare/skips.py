"""Describe the skipped updates of a policy that skipped many: how many, when, and which setting to try."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile

from mezzo.commands.compare.words import percent
from mezzo.policy import Policy
from mezzo.records import AS_IS, RunRecord

WORTH_SAYING = 0.05
"""The share of skipped updates from which they are mentioned."""
MIN_AT_END = 3
"""A dynamic loss scale skips an update now and then; this many in a row at the end are a failure."""


def skipped_at_the_end(run: RunRecord) -> int:
    """Return the number of updates skipped at the end, if these are all of the last tenth and at least three; else 0."""
    at_end = sum(1 for _ in takewhile(bool, reversed(run.steps.skipped)))
    needed = max(MIN_AT_END, len(run.steps) // 10)
    return at_end if at_end >= min(needed, len(run.steps)) > 0 else 0


def skip_note(runs: Sequence[RunRecord], *, policy: str) -> str | None:
    """Return a note on the skipped updates of a policy's ``runs``; None if they are few."""
    steps, skipped = sum(len(run.steps) for run in runs), sum(run.steps.num_skipped for run in runs)
    if not steps or skipped < WORTH_SAYING * steps:
        return None
    text = f"skipped {percent(skipped / steps)} of its updates"
    settled = _settled_scale(runs, skipped)
    at_the_start = f"{text}, most at the start until its loss scale was found"
    if policy == AS_IS:
        return text if settled is None else f"{at_the_start}: try GradScaler(init_scale={settled:g})"
    parsed = Policy.parse(policy)
    if parsed.loss_scale == "static":
        return f"{text}: try a loss scale that adapts, {parsed.replace(loss_scale='dynamic')}"
    if settled is not None:
        return f"{at_the_start}: try {parsed.replace(init_scale=settled)}"
    return f"{text}: try bf16, which has FP32's range"


def _skipped_at_the_start(skipped: Sequence[bool]) -> int:
    first_pair_made = (i for i, pair in enumerate(pairwise(skipped)) if not any(pair))
    return sum(skipped[: next(first_pair_made, len(skipped))])


def _settled_scale(runs: Sequence[RunRecord], num_skipped: int) -> float | None:
    """Return the loss scale that runs ended with, if most of their skips came before two updates in a row; else None."""
    at_start = sum(_skipped_at_the_start(run.steps.skipped) for run in runs)
    if 2 * at_start <= num_skipped or any(map(skipped_at_the_end, runs)):
        return None
    return next((run.final_scale for run in runs if run.final_scale is not None), None)
