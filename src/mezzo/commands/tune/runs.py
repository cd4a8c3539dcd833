"""Run a script in many configurations, first for a few steps, to find the fastest one on this machine. Imports no torch.

What to run next follows from what is known (``mezzo.commands.tune.plan``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mezzo.commands.tune.plan import (
    FINAL,
    SearchKnowledge,
    Trial,
    expected_trials,
    fault,
    next_trial,
    speed_of,
    steps_of,
)
from mezzo.launch.request import ModelChanges, Request
from mezzo.policy import Policy
from mezzo.records import AS_IS, RunRecord, TuneTrial
from mezzo.studies.loop import (
    BUDGET_GRACE_S,
    Done,
    Study,
    Wanted,
    carry_out,
    finished_run,
    folder_name,
    named_arguments,
)

_TIMES_LONGER, _LEAST_LIMIT_S = 20.0, 120.0
"""A run may take this many times as long as the first one, because compilation takes minutes; and at least this long."""


@dataclass
class Tune:
    """A search in progress: what it knows, and what it has run."""

    known: SearchKnowledge
    budget_s: float
    folder: Path
    study: Study
    """Executes the runs."""
    make_request: Callable[..., Request]
    """Returns a request for a policy (None: the script's own precision), given ``folder`` and more fields of the request."""
    arguments: Sequence[str]
    """The script's arguments."""
    say: Callable[[str], None]
    trials: list[TuneTrial] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._end_s = time.monotonic() + self.budget_s
        self._first_s = 0.0

    def run(self) -> SearchKnowledge:
        """Run what the plan wants next until nothing is left to run or the time is over.

        Raises:
            Stopped: a signal has stopped the command.
        """
        carry_out(self._next, study=self.study, say=self.say)
        return self.known

    def _next(self) -> Wanted | None:
        if self.trials:
            self.known = replace(self.known, left_share=(self._end_s - time.monotonic()) / self.budget_s)
        trial = next_trial(self.known)
        if trial is None:
            return None
        title = _title(trial)
        return Wanted(
            name=_folder(trial),
            title=title,
            says=f"{title}: {steps_of(self.known, trial.round)} steps",
            do=lambda: self._run(trial),
            learn=lambda done: self._done(trial, done),
        )

    def _done(self, trial: Trial, done: Done) -> str:
        run = done.record
        assert isinstance(run, RunRecord)
        took = done.took_s if self.study.at_once == 1 else run.duration_s
        self._first_s = self._first_s or max(took, run.duration_s)  # an earlier command's run took no time now
        self.known = replace(self.known, runs={**self.known.runs, trial: run})
        outcome = fault(self.known, trial) or self._outcome(trial)
        self.trials.append(
            TuneTrial(
                name=trial.configuration.name,
                round="final" if trial.round == FINAL else str(trial.round + 1),
                seed=trial.repeat,
                outcome=outcome,
                folder=str(self.folder / _folder(trial)),
                duration_s=took,
                placement=run.placement,
                resumed=done.resumed,
            )
        )
        return outcome

    def _run(self, trial: Trial) -> RunRecord:
        limit_s = max(self._end_s - time.monotonic(), 0.0) + BUDGET_GRACE_S
        if self._first_s:
            limit_s = min(limit_s, max(_TIMES_LONGER * self._first_s, _LEAST_LIMIT_S))
        run = self.study.record(
            self._request(trial),
            limit_s=lambda: limit_s,
            ahead=lambda: map(self._request, expected_trials(self.known)),
            reuse=finished_run,
        )
        assert isinstance(run, RunRecord)
        return run

    def _request(self, trial: Trial) -> Request:
        configuration, folder = trial.configuration, self.folder / _folder(trial)
        return self.make_request(
            None if configuration.policy == AS_IS else Policy.parse(configuration.policy),
            folder=folder,
            arguments=named_arguments(configuration.arguments(self.arguments), folder.name),
            seed=trial.repeat,
            stop_after_steps=steps_of(self.known, trial.round),
            compared_since_s=self.study.finished.since_s,
            models=ModelChanges(
                channels_last=configuration.channels_last,
                compiles=configuration.compiles,
                checkpoint=configuration.checkpoint,
                counts_inputs=True,
            ),
        )

    def _outcome(self, trial: Trial) -> str:
        speed = speed_of(self.known.runs[trial])
        assert speed is not None
        times = None if trial.configuration == self.known.now else self.known.over_now(trial)
        over = "" if times is None else f", {times:.3g}x as fast as the script now"
        return f"{speed.step_ms:.3g} ms a step{over}"


def _folder(trial: Trial) -> str:
    number = f"final-seed{trial.repeat}" if trial.round == FINAL else f"round{trial.round + 1}"
    name = trial.configuration.name.replace(", ", ",").replace(" ", "=").replace("/", "_")
    return f"{number}-{folder_name(name)}"


def _title(trial: Trial) -> str:
    number = f"final, seed {trial.repeat}" if trial.round == FINAL else f"round {trial.round + 1}"
    return f"{trial.configuration.name} ({number})"
