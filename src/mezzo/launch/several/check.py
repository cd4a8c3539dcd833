"""Run a script as often as it takes to know which precision it should train in. Imports no torch.

What to do next follows from what is known (``plan``); each finished part is listed on disk (``resuming``), so that an interrupted
check continues where it stopped. A script that takes too long for the budget is stopped after the same step in every run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mezzo.errors import MezzoError
from mezzo.launch.process.command_signals import Stop, stoppable
from mezzo.launch.request import Request
from mezzo.launch.runner import AT_LIMIT
from mezzo.launch.several.compared_runs import GRACE_S, folder_name, named_arguments, run_name
from mezzo.launch.several.fallback import fallback_of_script
from mezzo.launch.several.passes import diagnose_script
from mezzo.launch.several.plan import CheckState, NextStage, expected_runs, first_run_limit_s, next_asked
from mezzo.launch.several.resuming import Finished, finished_run
from mezzo.launch.several.waves import Waves
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
    is_inspected,
    write_record,
)

_FOR_FIRST = 0.5
"""Share of the budget after which a first run without a step is killed: there would be no time for the others."""
_RANGES_STEPS, _INSPECTED = 20, 200


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """What a check was asked for."""

    policies: tuple[str, ...]
    """The baseline first."""
    seeds: int
    budget_s: float
    metric: str | None
    make_request: Callable[..., Request]
    """Returns a request for a policy (None: the script's own precision), given ``folder`` and more fields of the request."""
    arguments: Sequence[str]
    """The script's own."""
    framework: str


@dataclass
class Check:
    """A check in progress: what is known, and what was done."""

    settings: CheckSettings
    folder: Path
    finished: Finished
    waves: Waves
    """Makes the runs."""
    say: Callable[[str], None]
    """Prints what begins, and why."""
    keep: Callable[[AnyRecord, Path], None] = lambda record, folder: write_record(record, folder / "record.json")
    """Writes a record into a folder."""
    stages: list[CheckStage] = field(default_factory=list)
    first_steps: int | None = None
    """The number of steps of every run, if the whole script does not fit the budget."""
    too_slow: bool = False
    """Whether the first run took half of the budget without a step."""

    def __post_init__(self) -> None:
        asked, self._end_s = self.settings, time.monotonic() + self.settings.budget_s
        self._metric = asked.metric
        self._said: set[str] = set()  # a reason is said once
        self._refused = ""
        at_once = self.waves.at_once
        self.known = CheckState(policies=asked.policies, seeds=asked.seeds, left_s=asked.budget_s, at_once=at_once)

    def run(self) -> CheckState:
        """Do what the plan asks for until the answer is known or the time is over.

        Raises:
            Stopped: a signal has stopped the command.
        """
        with stoppable() as stop:
            while (asked := next_asked(self.known)) is not None:
                self._do(asked, stop)
                self.known = replace(self.known, left_s=self._end_s - time.monotonic())
        return self.known

    def _do(self, asked: NextStage, stop: Stop) -> None:
        name, began = _name(asked), time.monotonic()
        place = self.folder / name
        found = self.finished.record(name)
        resumed = found is not None
        if found is None:
            stop.check()
            self.say(_title(asked) + ("" if asked.why in self._said else f": {asked.why}"))
            self._said.add(asked.why)
            found = _ACTIONS[asked.stage](self, asked, place)
            stop.check()
            # With more at once, it ran beside others, or before it was asked for.
            if asked.stage == "run" and self.known.at_once == 1:
                took = {(asked.policy, asked.seed): time.monotonic() - began}
                self.known = replace(self.known, took_s={**self.known.took_s, **took})
        outcome = self._learn(asked, found)
        if found is not None and not resumed:
            if asked.stage != "run":
                self.keep(found, place)
            if (asked.policy, asked.seed) not in self.known.lost:
                self.finished.add(name, place / "record.json")
        resumed = resumed or name in self.waves.reused
        self.say(f"{_title(asked)}: {outcome}" + (" (from the interrupted check)" if resumed else ""))
        self.stages.append(
            CheckStage(
                name=asked.stage,
                what=_title(asked),
                why=asked.why,
                outcome=outcome,
                folder=str(place) if found is not None else "",
                duration_s=time.monotonic() - began,
                resumed=resumed,
            )
        )

    # --- what each stage runs --------------------------------------------------------------------------------------------------

    def _request(
        self, asked: NextStage, place: Path, *, seed: int | None, policy: Policy | None, **more: Any
    ) -> Request:
        arguments = named_arguments(self.settings.arguments, place.name)
        return self.settings.make_request(policy, folder=place, arguments=arguments, seed=seed, **more)

    def _left_s(self) -> float:
        return max(self._end_s - time.monotonic(), 0.0) + GRACE_S

    def run_script(self, asked: NextStage, place: Path) -> RunRecord:
        """Run the script under one policy with one seed, the first time with a limit for its steps."""
        first = not self.known.runs
        limit_s = _FOR_FIRST * self.settings.budget_s if first else self._left_s()
        run = self.waves.record(
            self._training(asked),
            limit_s=limit_s,
            ahead=lambda: map(self._training, expected_runs(self.known)),
            reuse=finished_run,
        )
        assert isinstance(run, RunRecord)
        if first and (run.error or "").startswith(AT_LIMIT):
            self.too_slow = True
            error = f"it did not end, and made no training step, within {limit_s:.0f} s"
            return run.model_copy(update={"error": error})
        return run

    def _training(self, asked: NextStage) -> Request:
        """Return the request of a training under one policy with one seed."""
        settings = self.settings
        limits: dict[str, Any] = {"stop_after_steps": self.first_steps}
        if not self.known.runs and settings.framework == "torch":
            num, at_once = len(settings.policies), self.known.at_once
            limit_s = first_run_limit_s(settings.budget_s, num_policies=num, seeds=settings.seeds, at_once=at_once)
            limits = {"stop_after_s": limit_s}
        return self._request(
            asked,
            self.folder / _name(asked),
            seed=asked.seed,
            policy=_policy(asked.policy),
            metric=self._metric,
            compared_since_s=self.finished.since_s,
            **limits,
        )

    def diagnose(self, asked: NextStage, place: Path) -> DiagnoseRecord | RunRecord:
        """Find the cause of a policy's fault, with the seed with which it appeared."""
        seen = self.known.run(asked.policy, asked.seed)
        steps = max(_INSPECTED, 0 if seen is None else len(seen.steps))
        request = self._request(asked, place, seed=asked.seed, policy=_policy(asked.policy))
        return diagnose_script(request, steps=steps, child=self._observed)

    def _observed(self, request: Request, *, output: Path | None) -> RunRecord:
        """Run a pass of a diagnosis."""
        run = self.waves.record(request, limit_s=self._left_s())
        assert isinstance(run, RunRecord)
        return run

    def ranges(self, asked: NextStage, place: Path) -> AnyRecord:
        """Count a policy's values by exponent, in FP32."""
        settings = RangesSettings(steps=tuple(range(1, _RANGES_STEPS + 1)), policy=Policy.parse(asked.policy))
        request = self._request(asked, place, seed=0, policy=Policy.parse(self.known.baseline), observe=settings)
        return self.waves.record(request, limit_s=self._left_s())

    def fallback(self, asked: NextStage, place: Path) -> FallbackRecord | None:
        """Search for modules to keep in FP32; None if the search is refused."""
        request = self._request(asked, place, seed=0, policy=Policy.parse(asked.policy))
        try:
            return fallback_of_script(request, folder=place, waves=self.waves)
        except MezzoError as error:
            self._refused = error.message
            return None

    # --- what follows from each record -----------------------------------------------------------------------------------------

    def _learn(self, asked: NextStage, record: AnyRecord | None) -> str:
        """Add a record to what is known; return its outcome in a few words."""
        known, policy = self.known, asked.policy
        if asked.stage == "run" and isinstance(record, RunRecord):
            return self._learn_run(asked, record)
        if asked.stage == "diagnose":
            found = record if isinstance(record, DiagnoseRecord) else None
            self.known = replace(known, diagnosed={**known.diagnosed, policy: found})
            if found is not None:
                return _diagnosed(found)
            why = record.error if isinstance(record, RunRecord) else None  # why it was refused
            return f"no diagnosis: {why}" if why else "no diagnosis"
        if asked.stage == "ranges":
            values = record if isinstance(record, RangesRecord) else None
            self.known = replace(known, ranged={**known.ranged, policy: values})
            return "not recorded" if values is None else _ranged(values)
        search = record if isinstance(record, FallbackRecord) else None
        self.known = replace(known, searched={**known.searched, policy: search})
        return f"no result: {self._refused}" if search is None else f"{search.verdict}: {search.reason}"

    def _learn_run(self, asked: NextStage, run: RunRecord) -> str:
        if run.error is not None and self.known.runs and time.monotonic() > self._end_s:
            self.known = replace(self.known, lost=self.known.lost | {(asked.policy, asked.seed)})
            return "stopped, because the budget is over; it counts for nothing"
        if not self.known.runs:
            # Only the run knows which backend the script chooses for Keras.
            self.known = replace(self.known, observable=is_inspected(run.framework))
            self.first_steps = run.first_steps
            if run.first_steps is not None and (run.metric is None or not run.metric.values):
                self._metric = None
                run = run.model_copy(update={"metric": None})
        self.known = replace(self.known, runs=(*self.known.runs, run))
        return run.error or _ran(run)


_ACTIONS: dict[str, Callable[[Check, NextStage, Path], AnyRecord | None]] = {
    "run": Check.run_script,
    "diagnose": Check.diagnose,
    "ranges": Check.ranges,
    "fallback": Check.fallback,
}


def _policy(text: str) -> Policy | None:
    return None if text == AS_IS else Policy.parse(text)


def _name(asked: NextStage) -> str:
    if asked.stage == "run":
        return run_name(asked.policy, asked.seed)
    return f"{asked.stage}-{folder_name(asked.policy)}"


def _title(asked: NextStage) -> str:
    return f"{asked.policy}, seed {asked.seed}" if asked.stage == "run" else f"{asked.stage} {asked.policy}"


def _ran(run: RunRecord) -> str:
    steps, skipped = len(run.steps), run.steps.num_skipped
    made = f"{steps} step{'s' * (steps != 1)}"
    if run.first_steps is not None:
        made = f"stopped after the first {made if steps != 1 else 'step'}"
    parts = [f"{made} in {run.duration_s:.1f} s"]
    if run.steps.loss:
        parts.append(f"last loss {run.steps.loss[-1]:.4g}")
    if skipped:
        parts.append(f"{skipped} skipped")
    return ", ".join(parts)


def _diagnosed(record: DiagnoseRecord) -> str:
    words = record.verdict.replace("_", " ")
    where = f" in step {record.step}, {record.phase} pass of {record.module}" if record.located else ""
    return f"{words}{where}" + (f"; fix: {record.fix}" if record.fix else "")


def _ranged(record: RangesRecord) -> str:
    window = next((w for w in record.windows if w.format == record.format), None)
    return "no gradient was seen" if window is None else window.reason
