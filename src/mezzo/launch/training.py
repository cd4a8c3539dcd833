"""The interface of a framework's training to the process that runs the script. Imports neither torch nor any other framework."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mezzo.observe.settings import StopScript

if TYPE_CHECKING:
    from mezzo.errors import MezzoError
    from mezzo.launch.patches import Patches
    from mezzo.launch.request import GuardRequest, ModelChanges, ScriptFile, SnapshotRequest, TraceRequest
    from mezzo.measure.live import Report
    from mezzo.observe.settings import AnySettings
    from mezzo.policy import Policy
    from mezzo.records import (
        AnyRecord,
        Bottleneck,
        Effective,
        Environment,
        Finding,
        Guardrails,
        Memory,
        Note,
        OutOfMemory,
        RunRecord,
        SnapshotsTaken,
        Steps,
    )


def training_in(framework: str) -> Switch:
    """Return the context that trains in ``framework``; imports that framework."""
    switch: Switch = importlib.import_module(f"mezzo.launch.{framework}").training
    return switch


class Watching(Protocol):
    """The part of an observer's interface that the process running the script uses."""

    @property
    def compiles(self) -> bool:
        """Whether the script compiles code, whose operations cannot be seen one by one."""

    def too_short(self) -> bool:
        """Return whether the script ended before anything was observed."""

    def failed(self, error: BaseException) -> None:
        """Note the error that ended the script."""

    def record(self, run: RunRecord) -> AnyRecord:
        """Return the observer's record, which includes the whole run's."""


class Training(Protocol):
    """A running training, recorded step by step."""

    @property
    def framework(self) -> str:
        """The framework and its version, with the backend if it has several: ``keras 3.15.1 on tensorflow 2.21.0``."""

    @property
    def num_updates(self) -> int:
        """The number of updates, including skipped ones and the open one."""

    @property
    def has_any_loss(self) -> bool:
        """Whether a loss was seen, even if no update followed."""

    @property
    def observer(self) -> Watching | None:
        """The observer of the training; None if only its steps are recorded."""

    def report_to(self, report: Report, *, every_s: float) -> None:
        """Pass the latest numbers that the host knows to ``report`` at the end of steps, at most every ``every_s`` seconds."""

    def stop_after(self, limit: StepLimit) -> None:
        """Stop the script at ``limit``.

        Raises:
            ScriptError: scripts of this framework cannot be stopped after a step.
        """

    follows_processes: bool
    """Whether processes that the script starts record their training as well."""

    not_resumed: MezzoError | None
    """Why a run that was to be resumed was not; known after ``end_snapshots``."""

    def begin_stand_in(self) -> None:
        """Let the CPU stand in for CUDA from now on, if this machine has no CUDA device; only of PyTorch scripts."""

    run_file: Callable[[ScriptFile], dict[str, Any]] | None
    """Runs the script's file instead of Python and returns its global variables; None lets Python run it."""

    def begin_snapshots(self, request: SnapshotRequest | None, script: ScriptFile) -> None:
        """Save the state of a script's file from now on as requested, or restore a saved one; None for neither.

        Raises:
            ScriptError: scripts of this framework cannot be saved.
            SnapshotError: the folder cannot be used, or has nothing to resume.
        """

    def begin_trace(self, request: TraceRequest | None) -> None:
        """Trace the state of the training from now on, as requested; None for no trace.

        Raises:
            ScriptError: scripts of this framework cannot be traced.
        """

    def begin_tape(self, path: Path) -> None:
        """Record the operations of one step from now on, for a prediction, and write them to ``path`` at the end."""

    def end_snapshots(self) -> SnapshotsTaken | None:
        """Wait for the last snapshot, and return which were taken; None if none were requested."""

    def begin_guard(self, request: GuardRequest) -> None:
        """Watch the recorded numbers for alarms from now on.

        Raises:
            ScriptError: scripts of this framework are not watched.
        """

    def guardrails(self) -> Guardrails | None:
        """Return what the guard noticed in all steps; None without one."""

    @property
    def stopped_by_guard(self) -> MezzoError | None:
        """Why a guard ended the script; known after ``guardrails``."""

    def out_of_memory(self, error: BaseException | None) -> OutOfMemory | None:
        """Return what filled the memory if ``error`` is an out-of-memory error; None otherwise."""

    def change_models(self, changes: ModelChanges) -> Callable[[], float | None]:
        """Change every model at its first call; return a function that returns the number of input elements of a step.

        Raises:
            ScriptError: models of this framework cannot be changed.
        """

    def close_update(self) -> None:
        """Close the update that is still open at the end of the script."""

    def steps(self) -> Steps:
        """Return the record of every step."""

    def memory(self) -> Memory:
        """Return the memory that a step uses."""

    def effective(self) -> Effective:
        """Return which operations actually ran in which format, and what the policy left alone."""

    def bottleneck(self) -> Bottleneck | None:
        """Return what limits the script's speed; None if that is not measured in this framework."""

    def findings(self) -> list[Finding]:
        """Return misuse of the script's own mixed precision; empty if it is not checked in this framework."""

    def explanation(self) -> list[Note]:
        """Return what the policy does in this framework on this device, with reasons; empty for ``as-is``."""

    def environment(self) -> Environment:
        """Return the machine and the versions."""

    def keep_weights(self, patches: Patches) -> None:
        """Let ``weights`` return a digest even after the script has dropped its model, until ``patches`` are undone."""

    def weights(self) -> str:
        """Return a digest of the weights, for comparison with other processes; empty unless ``keep_weights`` was called."""


class Switch(Protocol):
    """A context that runs the code inside under a policy (None: its own precision) and records every training step."""

    def __call__(
        self, policy: Policy | None, *, seed: int | None, observe: AnySettings | None
    ) -> AbstractContextManager[Training]:
        """Return the context."""


_AFTER_FIRST = 0.1
"""Share of the limit granted after the first step, however long that took: it may be mostly compilation, with short steps to follow."""


class StepLimit:
    """The number of steps, or the time, after which a script is stopped; an open step is finished first."""

    def __init__(self, *, steps: int | None, seconds: float | None) -> None:
        self._steps, self._seconds = steps, seconds
        self._began_s = time.monotonic()
        self._least_end_s: float | None = None
        self.stopped = False
        """Whether the limit has stopped the script."""

    def check(self, num_closed: int) -> None:
        """Stop the script if it has made enough steps, or used up its time.

        Raises:
            StopScript: the limit is reached.
        """
        enough = self._steps is not None and num_closed >= self._steps
        if enough or (self._seconds is not None and self._is_over(self._seconds)):
            self.stopped = True
            raise StopScript

    def _is_over(self, seconds: float) -> bool:
        now = time.monotonic()
        if self._least_end_s is None:
            self._least_end_s = now + _AFTER_FIRST * seconds
        return now >= max(self._began_s + seconds, self._least_end_s)
