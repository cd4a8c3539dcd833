"""The runs of a gate: trainings with their seeds, a reference workload beside them, and an audit. Imports no torch."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mezzo.children.signals import stoppable
from mezzo.cli.script import Script
from mezzo.commands.compare.command import run_all
from mezzo.commands.gate.golden import formats_of, run_summary
from mezzo.launch import runner
from mezzo.launch.request import Request
from mezzo.launch.support import refusal, stage_of
from mezzo.observe.settings import AuditSettings
from mezzo.policy import Policy
from mezzo.records import AuditRecord, Finding, GateUnit, GoldenRun, ModuleFormats, RunRecord
from mezzo.studies.loop import Study, named_arguments

_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""How the threads of a run wait: asleep. Threads that spin while another process has their core would multiply the CPU time."""
_QUIET = 0.05
"""The quantile of steps and of reference workloads that counts: what disturbs them makes them longer, so the shortest are undisturbed."""
_AUDITED_STEP = 3

# --- the reference workload --------------------------------------------------------------------------------------------------------

_EVERY_S = 0.05
_SIZE, _PRODUCTS, _ADDITIONS = 48, 60, 200


def reference_ms() -> float:
    """Run a fixed workload, small products and a loop in Python, and return its CPU time in this thread: about half a millisecond."""
    matrix, total, began_s = np.full((_SIZE, _SIZE), 0.01, np.float32), 0, time.thread_time()
    for _ in range(_PRODUCTS):
        matrix = matrix @ matrix
        for number in range(_ADDITIONS):
            total += number
    return (time.thread_time() - began_s) * 1e3


class ReferenceClock:
    """A thread that runs the reference workload twenty times a second while the script's runs take place."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, float]] = []
        """Unix time and CPU milliseconds of each workload."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True)

    def _measure(self) -> None:
        while not self._over.wait(_EVERY_S):
            self._marks.append((time.time(), reference_ms()))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the workloads inside."""
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()

    def during(self, runs: Sequence[RunRecord]) -> float | None:
        """Return the milliseconds of an undisturbed workload beside some runs; None without one."""
        spans = [(run.started_at_s, run.started_at_s + run.duration_s) for run in runs if run.started_at_s is not None]
        return quiet([ms for at_s, ms in self._marks if any(begin <= at_s <= end for begin, end in spans)])


def quiet(times: Sequence[float]) -> float | None:
    """Return the time of an undisturbed repetition; None of none."""
    known = [one for one in times if math.isfinite(one) and one > 0]
    return float(np.quantile(known, _QUIET)) if known else None


class StepAudit(NamedTuple):
    """What an audit of one step showed."""

    formats: ModuleFormats
    findings: list[Finding]
    why_not: str = ""
    """Why there is nothing; empty if there is something."""


# --- the runs ------------------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class GateRuns:
    """The runs of a script under one policy."""

    script: Script
    policy: Policy | None
    policy_typed: str
    metric: str | None
    folder: Path
    study: Study
    clock: ReferenceClock = field(default_factory=ReferenceClock)
    records: list[RunRecord] = field(default_factory=list)
    audited_step: int = _AUDITED_STEP

    @property
    def script_sha256(self) -> str:
        """A digest of the script and its own modules."""
        return self.script.identity()["the script's text"]

    @contextmanager
    def opened(self, variables: Mapping[str, str]) -> Iterator[None]:
        """Let the runs inside share their imports, with threads that wait asleep unless ``variables`` say how; measure beside them."""
        waiting = {name: value for name, value in _WAITING.items() if name not in variables}
        with runner.shared_imports(variables=waiting), self.clock.running():
            yield

    def train(self, seeds: Sequence[int]) -> None:
        """Run the script once with each seed, and keep what counts.

        Raises:
            Stopped: a signal has stopped the command.
        """
        with stoppable() as stop:
            self.records += run_all([self._request(seed) for seed in seeds], timeout_s=None, study=self.study)
            stop.check()
        self.audited_step = min([_AUDITED_STEP, *(len(run.steps) for run in self.good)])

    @property
    def good(self) -> list[RunRecord]:
        """The runs that trained to their end."""
        return [run for run in self.records if run.error is None and len(run.steps)]

    @property
    def timed_in(self) -> GateUnit:
        """The unit of a step's time."""
        return "ms" if any(run.environment.device == "cuda" for run in self.good) else "reference"

    @property
    def summaries(self) -> list[GoldenRun]:
        """What counts of the good runs. The time of a step is GPU time, or CPU time over the reference workload's beside all runs."""
        if self.timed_in == "ms":
            return [run_summary(run, step_time=quiet(run.steps.warm_ms)) for run in self.good]
        beside = self.clock.during(self.good)
        own = [quiet(run.steps.warm_cpu_ms) for run in self.good]
        return [
            run_summary(run, step_time=ms / beside if ms and beside else None)
            for run, ms in zip(self.good, own, strict=True)
        ]

    def audit(self, seed: int) -> StepAudit:
        """Return the formats of the modules in one step and the findings; empty, with the reason, if they cannot be recorded."""
        kind = self.script.kind
        refused = refusal("mezzo audit", stage_of(self.script.target, kind=kind), target=self.script.target)
        if refused is not None:
            return StepAudit({}, [], refused.message)
        settings = AuditSettings(steps=(self.audited_step,))
        record = self.study.record(self._request(seed, observe=settings, name=f"audit-seed{seed}"))
        if not isinstance(record, AuditRecord) or not record.steps:
            run = record if isinstance(record, RunRecord) else getattr(record, "run", None)
            why = f": {run.error}" if run is not None and run.error else ""
            return StepAudit({}, [], f"the audit recorded no step{why}")
        return StepAudit(formats_of(record), record.located_findings)

    def _request(self, seed: int, *, observe: AuditSettings | None = None, name: str = "") -> Request:
        name = name or f"seed{seed}"
        return self.script.request(
            self.policy,
            policy_typed=self.policy_typed,
            folder=self.folder / name,
            arguments=named_arguments(self.script.arguments or (), name),
            seed=seed,
            metric=None if observe else self.metric,
            observe=observe,
        )
