"""Run a script as often as needed to find out which precision it should train in. Imports no torch.

What to do next follows from what is known (``plan``). If the whole script takes too long for the budget, every run is stopped after the
same step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mezzo.children.signals import stoppable
from mezzo.commands.check.plan import CheckState, NextStage, expected_runs, first_run_limit_s, next_stage
from mezzo.commands.diagnose.plan import diagnose_script
from mezzo.commands.fallback.runs import fallback_of_script
from mezzo.errors import MezzoError
from mezzo.launch.request import Request
from mezzo.observe.settings import RangesSettings
from mezzo.policy import Policy
from mezzo.records import (
    AS_IS,
    AnyRecord,
    CheckStage,
    DiagnoseRecord,
    FallbackRecord,
    RangesRecord,
    RunRecord,
    inspecting,
    write_record,
)
from mezzo.studies.loop import (
    BUDGET_GRACE_S,
    Done,
    Study,
    Wanted,
    carry_out,
    finished_run,
    folder_name,
    named_arguments,
    run_name,
)

_GRACE = 0.1
"""Share of the budget that the last run may take beyond it, up to ``BUDGET_GRACE_S``."""
_FOR_FIRST = 0.5
"""Share of the budget after which a first run without a step is killed: there would be no time for the others."""
_RANGES_STEPS, _DIAGNOSED_STEPS = 20, 200


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """The options of a check."""

    policies: tuple[str, ...]
    """The baseline first."""
    seeds: int
    budget_s: float
    """Time for all runs."""
    metric: str | None
    make_request: Callable[..., Request]
    """Returns a request for a policy (None: the script's own precision), given ``folder`` and more fields of the request."""
    arguments: Sequence[str]
    """The script's arguments."""
    framework: str


@dataclass
class Check:
    """A check in progress: what it knows, and what it has done."""

    settings: CheckSettings
    folder: Path
    study: Study
    """Executes the runs."""
    say: Callable[[str], None]
    """Prints which stage begins, and why."""
    keep: Callable[[AnyRecord, Path], object] = lambda record, folder: write_record(record, folder / "record.json")
    """Writes a record into a folder."""
    stages: list[CheckStage] = field(default_factory=list)
    first_steps: int | None = None
    """The number of steps of every run, if the whole script does not fit the budget."""
    too_slow: bool = False
    """Whether the first run took half of the budget without a step."""

    def __post_init__(self) -> None:
        settings, self._end_s = self.settings, time.monotonic() + self.settings.budget_s
        self._metric = settings.metric
        self._said: set[str] = set()  # each reason is printed once
        self._refused = ""
        at_once = self.study.at_once
        self.known = CheckState(
            policies=settings.policies, seeds=settings.seeds, left_s=settings.budget_s, at_once=at_once
        )

    def run(self) -> CheckState:
        """Do what the plan wants next until the answer is known or the time is over.

        Raises:
            Stopped: a signal has stopped the command.
        """
        carry_out(self._next, study=self.study, say=self.say)
        return self.known

    def _next(self) -> Wanted | None:
        if self.stages:
            self.known = replace(self.known, left_s=self._end_s - time.monotonic())
        stage = next_stage(self.known)
        if stage is None:
            return None
        why, name = "" if stage.why in self._said else f": {stage.why}", _name(stage)
        return Wanted(
            name=name,
            title=_title(stage),
            says=_title(stage) + why,
            do=lambda: self._do(stage, self.folder / name),
            learn=lambda done: self._done(stage, self.folder / name, done),
        )

    def _do(self, stage: NextStage, folder: Path) -> AnyRecord | None:
        self._said.add(stage.why)
        record = _ACTIONS[stage.kind](self, stage, folder)
        with stoppable() as stop:
            stop.check()
        if stage.kind != "run" and record is not None:
            self.keep(record, folder)
        return record

    def _done(self, stage: NextStage, folder: Path, done: Done) -> str:
        # If several run at once, this one ran next to others, or before the plan wanted it.
        if stage.kind == "run" and self.known.at_once == 1 and not done.resumed:
            took = {(stage.policy, stage.seed): done.took_s}
            self.known = replace(self.known, took_s={**self.known.took_s, **took})
        outcome = self._learn(stage, done.record)
        self.stages.append(
            CheckStage(
                name=stage.kind,
                what=_title(stage),
                why=stage.why,
                outcome=outcome,
                folder="" if done.record is None and stage.kind != "run" else str(folder),
                duration_s=done.took_s,
                resumed=done.resumed,
            )
        )
        return outcome

    def _request(self, folder: Path, *, seed: int | None, policy: Policy | None, **fields: Any) -> Request:
        arguments = named_arguments(self.settings.arguments, folder.name)
        return self.settings.make_request(policy, folder=folder, arguments=arguments, seed=seed, **fields)

    def _left_s(self) -> float:
        return max(self._end_s - time.monotonic(), 0.0) + min(BUDGET_GRACE_S, _GRACE * self.settings.budget_s)

    def run_script(self, stage: NextStage, folder: Path) -> RunRecord | None:
        """Run the script under one policy with one seed; None if the budget ended the run. The first may be limited to some steps."""
        first = not self.known.runs
        limit_s = _FOR_FIRST * self.settings.budget_s if first else self._left_s()
        run = self.study.record(
            self._training(stage),
            limit_s=lambda: limit_s,
            ahead=lambda: map(self._training, expected_runs(self.known)),
            reuse=finished_run,
        )
        assert isinstance(run, RunRecord)
        if first and run.stopped_at_limit:
            self.too_slow = True
            error = f"it did not end, and made no training step, within {limit_s:.0f} s"
            return run.model_copy(update={"error": error})
        late = run.error is not None and not first and time.monotonic() > self._end_s
        return None if late else run

    def _training(self, stage: NextStage) -> Request:
        """Return the request to train under one policy with one seed."""
        settings = self.settings
        limits: dict[str, Any] = {"stop_after_steps": self.first_steps}
        if not self.known.runs and settings.framework == "torch":
            num, at_once = len(settings.policies), self.known.at_once
            limit_s = first_run_limit_s(settings.budget_s, num_policies=num, seeds=settings.seeds, at_once=at_once)
            limits = {"stop_after_s": limit_s}
        return self._request(
            self.folder / _name(stage),
            seed=stage.seed,
            policy=_policy(stage.policy),
            metric=self._metric,
            compared_since_s=self.study.finished.since_s,
            **limits,
        )

    def diagnose(self, stage: NextStage, folder: Path) -> DiagnoseRecord | RunRecord:
        """Find out why a policy went wrong, with the seed with which it did."""
        run = self.known.run(stage.policy, stage.seed)
        steps = max(_DIAGNOSED_STEPS, 0 if run is None else len(run.steps))
        request = self._request(folder, seed=stage.seed, policy=_policy(stage.policy))
        return diagnose_script(request, steps=steps, child=self._run_pass)

    def _run_pass(self, request: Request, *, output: Path | None) -> RunRecord:
        """Run one pass of a diagnosis."""
        run = self.study.record(request, limit_s=self._left_s)
        assert isinstance(run, RunRecord)
        return run

    def ranges(self, stage: NextStage, folder: Path) -> AnyRecord:
        """Count the values of a run in FP32 by exponent, to judge a policy's format."""
        settings = RangesSettings(steps=tuple(range(1, _RANGES_STEPS + 1)), policy=Policy.parse(stage.policy))
        request = self._request(folder, seed=0, policy=Policy.parse(self.known.baseline), observe=settings)
        return self.study.record(request, limit_s=self._left_s)

    def fallback(self, stage: NextStage, folder: Path) -> FallbackRecord | None:
        """Search for modules to keep in FP32; None if the search is refused."""
        request = self._request(folder, seed=0, policy=Policy.parse(stage.policy))
        try:
            return fallback_of_script(request, folder=folder, study=self.study)
        except MezzoError as error:
            self._refused = error.message
            return None

    def _learn(self, stage: NextStage, record: AnyRecord | None) -> str:
        """Add a record to what is known; return the stage's outcome in a few words."""
        known, policy = self.known, stage.policy
        if stage.kind == "run":
            return self._learn_run(stage, record)
        if stage.kind == "diagnose":
            diagnosis = record if isinstance(record, DiagnoseRecord) else None
            self.known = replace(known, diagnosed={**known.diagnosed, policy: diagnosis})
            if diagnosis is not None:
                return _diagnosis_outcome(diagnosis)
            why = record.error if isinstance(record, RunRecord) else None  # why it was refused
            return f"no diagnosis: {why}" if why else "no diagnosis"
        if stage.kind == "ranges":
            ranges = record if isinstance(record, RangesRecord) else None
            self.known = replace(known, ranged={**known.ranged, policy: ranges})
            return "not recorded" if ranges is None else _ranges_outcome(ranges)
        search = record if isinstance(record, FallbackRecord) else None
        self.known = replace(known, searched={**known.searched, policy: search})
        return f"no result: {self._refused}" if search is None else f"{search.verdict}: {search.reason}"

    def _learn_run(self, stage: NextStage, run: AnyRecord | None) -> str:
        if not isinstance(run, RunRecord):
            self.known = replace(self.known, lost=self.known.lost | {(stage.policy, stage.seed)})
            return "stopped, because the budget is used up; it does not count"
        if not self.known.runs:
            # Only a run shows which backend the script chooses for Keras.
            self.known = replace(self.known, inspecting=inspecting(run.framework))
            self.first_steps = run.first_steps
            if run.first_steps is not None and (run.metric is None or not run.metric.values):
                self._metric = None
                run = run.model_copy(update={"metric": None})
        self.known = replace(self.known, runs=(*self.known.runs, run))
        return run.error or _run_outcome(run)


_ACTIONS: dict[str, Callable[[Check, NextStage, Path], AnyRecord | None]] = {
    "run": Check.run_script,
    "diagnose": Check.diagnose,
    "ranges": Check.ranges,
    "fallback": Check.fallback,
}


def _policy(text: str) -> Policy | None:
    return None if text == AS_IS else Policy.parse(text)


def _name(stage: NextStage) -> str:
    if stage.kind == "run":
        return run_name(stage.policy, stage.seed)
    return f"{stage.kind}-{folder_name(stage.policy)}"


def _title(stage: NextStage) -> str:
    return f"{stage.policy}, seed {stage.seed}" if stage.kind == "run" else f"{stage.kind} {stage.policy}"


def _run_outcome(run: RunRecord) -> str:
    steps, skipped = len(run.steps), run.steps.num_skipped
    length = f"{steps} step{'s' * (steps != 1)}"
    if run.first_steps is not None:
        length = f"stopped after the first {length if steps != 1 else 'step'}"
    parts = [f"{length} in {run.duration_s:.1f} s"]
    if run.steps.loss:
        parts.append(f"last loss {run.steps.loss[-1]:.4g}")
    if skipped:
        parts.append(f"{skipped} skipped")
    return ", ".join(parts)


def _diagnosis_outcome(record: DiagnoseRecord) -> str:
    words = record.verdict.replace("_", " ")
    where = f" in step {record.step}, {record.phase} pass of {record.module}" if record.located else ""
    return f"{words}{where}" + (f"; fix: {record.fix}" if record.fix else "")


def _ranges_outcome(record: RangesRecord) -> str:
    window = next((w for w in record.windows if w.format == record.format), None)
    return "no gradient was seen" if window is None else window.reason
