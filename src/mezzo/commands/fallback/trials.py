"""Predict the runs that a search may request next: replay it with the known measurements, and with guesses of the others.

Imports no torch.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from mezzo.commands.fallback.search import Names
from mezzo.observe.fallback.evidence import Measured, StepErrors
from mezzo.observe.settings import FallbackSettings
from mezzo.policy import Policy
from mezzo.records import RunRecord

_MAX_LENGTH = 60


class SearchRun(NamedTuple):
    """A run of a search."""

    policy: Policy
    settings: FallbackSettings


Ahead = Callable[[], Iterable[SearchRun]]
"""Yields the runs that may be requested after the current one, the nearest first."""


class Measure(Protocol):
    """A function that runs a few training steps under a policy."""

    def __call__(self, policy: Policy, settings: FallbackSettings, ahead: Ahead) -> tuple[Measured, RunRecord]:
        """Return the measurements and the record of the run; the runs ``ahead`` may run at the same time."""
        ...


def name_of(kept: Names, operations: Names, *, all_steps: bool) -> str:
    """Return a name for a run from what it keeps in FP32: the same run has the same name whatever course the search takes."""
    parts = ["kept", *kept] if kept else ["operations", *operations] if operations else ["kept", "nothing"]
    text = "+".join(parts).replace("+", "-", 1).replace("/", "_")
    if len(text) > _MAX_LENGTH:
        count = len(kept or operations)
        text = f"{parts[0]}-{count}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return f"{text}-all-steps" if all_steps else text


def expected(
    search: Callable[[Measure], object], known: Sequence[Measured], run: RunRecord, guesses: Sequence[Measured]
) -> Iterator[SearchRun]:
    """Yield the runs that a search may request after the current one.

    Args:
        search: requests runs and depends only on their measurements: repeated with the same ones, it requests the same runs.
        known: the measurements of all runs before the current one.
        run: used as the record of every run.
        guesses: possible measurements of a run, the likeliest first.
    """
    waiting: deque[list[Measured]] = deque([[]])
    while waiting:
        assumed = waiting.popleft()
        for guess in guesses:
            trial = _requested_after(search, [*known, *assumed, guess], run)
            if trial is not None:
                yield trial
                waiting.append([*assumed, guess])


def guesses_for(reference: Measured) -> tuple[Measured, Measured]:
    """Return the measurements of a run that fails in every gradient, and of one that passes."""
    names = [name for step in reference.steps for name in step.errors]
    failed, passed = (
        Measured(steps=[StepErrors(step=step.step, errors=dict.fromkeys(names, error)) for step in reference.steps])
        for error in (1.0, 0.0)
    )
    return failed, passed


class _RunRequested(Exception):
    def __init__(self, trial: SearchRun) -> None:
        super().__init__()
        self.trial = trial


def _requested_after(
    search: Callable[[Measure], object], known: Sequence[Measured], run: RunRecord
) -> SearchRun | None:
    """Return the run that a search requests after those with known measurements; None if it requests no more."""
    answers = iter(known)

    def measure(policy: Policy, settings: FallbackSettings, ahead: Ahead) -> tuple[Measured, RunRecord]:
        found = next(answers, None)
        if found is None:
            raise _RunRequested(SearchRun(policy, settings))
        return found, run

    try:
        search(measure)
    except _RunRequested as request:
        return request.trial
    return None
