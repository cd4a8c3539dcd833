"""The runs that a search may ask for next: it is replayed with what is known, and with guesses of what is not.

Imports no torch.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from mezzo.observe.fallback.evidence import Measured, StepErrors
from mezzo.observe.fallback.search import Names
from mezzo.observe.settings import FallbackSettings
from mezzo.policy import Policy
from mezzo.records import RunRecord

_LONGEST = 60


class Trial(NamedTuple):
    """A run of a search."""

    policy: Policy
    settings: FallbackSettings


Ahead = Callable[[], Iterable[Trial]]
"""Yields the runs that may be asked for after the present one, the nearest first."""


class Measure(Protocol):
    """A function that runs a few training steps under a policy."""

    def __call__(self, policy: Policy, settings: FallbackSettings, ahead: Ahead) -> tuple[Measured, RunRecord]:
        """Return the measurements and the record of the run; those ``ahead`` may be run beside it."""
        ...


def name_of(kept: Names, operations: Names, *, all_steps: bool) -> str:
    """Return the name of a run by what it keeps in FP32, so that the same run has the same name in every course of a search."""
    parts = ["kept", *kept] if kept else ["operations", *operations] if operations else ["kept", "nothing"]
    text = "+".join(parts).replace("+", "-", 1).replace("/", "_")
    if len(text) > _LONGEST:
        count = len(kept or operations)
        text = f"{parts[0]}-{count}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return f"{text}-all-steps" if all_steps else text


def expected(
    search: Callable[[Measure], object], known: Sequence[Measured], run: RunRecord, guesses: Sequence[Measured]
) -> Iterator[Trial]:
    """Yield what a search may ask for after the run that it asks for now.

    Args:
        search: asks for runs and uses nothing but their measurements: repeated with the same ones, it asks for the same runs.
        known: the measurements of all runs before the present one.
        run: stands for the record of every run.
        guesses: how a run may end, the likeliest first.
    """
    waiting: deque[list[Measured]] = deque([[]])
    while waiting:
        assumed = waiting.popleft()
        for guess in guesses:
            trial = _asked_after(search, [*known, *assumed, guess], run)
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


class _Asked(Exception):
    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.trial = trial


def _asked_after(search: Callable[[Measure], object], known: Sequence[Measured], run: RunRecord) -> Trial | None:
    """Return the run that a search asks for after those with measurements; None if it asks for no more."""
    answers = iter(known)

    def measure(policy: Policy, settings: FallbackSettings, ahead: Ahead) -> tuple[Measured, RunRecord]:
        found = next(answers, None)
        if found is None:
            raise _Asked(Trial(policy, settings))
        return found, run

    try:
        search(measure)
    except _Asked as asked:
        return asked.trial
    return None
