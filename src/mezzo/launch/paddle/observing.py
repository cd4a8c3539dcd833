"""The base of all observers of Paddle scripts: which steps they observe, when a step begins and ends, and what they refuse.

A step's operations are those between the previous update and its own. So an observer starts right after an update, and judges its records
before the weights change. The script is ended at the first backward pass after the last observed step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NoReturn

import paddle

from mezzo.errors import ScriptError
from mezzo.launch.paddle.state import PaddleRun, RunListener
from mezzo.launch.patches import Patches
from mezzo.observe.settings import StopScript
from mezzo.records import AnyRecord, RunRecord


class StepObserver(RunListener, ABC):
    """An observer of chosen steps of a Paddle run; the run calls it at each event."""

    kind = "audit"
    """The name of the command."""
    compiles = False
    """Always False: static graphs are refused."""

    def __init__(self, run: PaddleRun, *, steps: Sequence[int]) -> None:
        self.run = run
        self.watched: list[int] = []
        """Numbers of the steps that were observed to their end."""
        self._waiting = sorted(set(steps))
        self._judged = False
        """Whether the first update of the open step has begun."""

    # --- implemented by each observer ----------------------------------------------------------------------------------------------

    @abstractmethod
    def install(self, patches: Patches) -> None:
        """Patch Paddle until ``patches`` are undone."""

    @abstractmethod
    def record(self, run: RunRecord) -> AnyRecord:
        """Return the observer's record, which includes that of the whole run."""

    def begin(self) -> None:
        """Begin to record."""

    def judge(self, norm: Any | None) -> None:
        """Judge what was recorded of the open step, whose gradients have this norm; the weights are still those of the step."""

    def end(self) -> None:
        """Stop recording, and discard what was recorded since ``judge``."""

    def close(self) -> None:
        """Stop observing, wherever the script ended."""
        self.end()

    # --- called by the run ---------------------------------------------------------------------------------------------------------

    @property
    def open_step(self) -> int:
        """The number of the step that is open."""
        return self.run.steps.num_closed + 1

    @property
    def observing(self) -> bool:
        """Whether the open step is to be observed."""
        return self._waiting[:1] == [self.open_step]

    def start(self) -> None:
        """Begin before the script's first line, if the first step is observed."""
        if self.observing:
            self.begin()

    def update_begins(self, norm: Any | None) -> None:
        """Judge the step at its first update."""
        if self.observing and not self._judged:
            self._judged = True
            self.judge(norm)
        self.end()

    def update_ended(self, optimizer: Any) -> None:
        """Begin to record the next step, if it is observed."""
        follows = self.open_step + 1 in self._waiting[:2]
        if self.observing or follows:
            self.end()
        if follows:
            self.begin()

    def step_closed(self, num_steps: int, *, loss_finite: bool, gradients_finite: bool, skipped: bool) -> None:
        """Record that a step is over; end the script after the last observed one."""
        self._judged = False
        if self._waiting[:1] == [num_steps]:
            self._waiting.pop(0)
            self.watched.append(num_steps)
        self.decide(num_steps, loss_finite=loss_finite, gradients_finite=gradients_finite, skipped=skipped)
        if not self._waiting:
            raise StopScript

    def decide(self, step: int, *, loss_finite: bool, gradients_finite: bool, skipped: bool) -> None:
        """Draw conclusions from a step that is over."""

    def static_graph(self, what: str) -> NoReturn:
        """Refuse a static graph.

        Raises:
            ScriptError: always.
        """
        raise ScriptError(
            f"the script uses {what}, and mezzo {self.kind} observes the operations of Paddle's dynamic graph only",
            hint="leave it out; or pass a policy, such as --policy fp32, under which code given to to_static runs eagerly",
        )

    def failed(self, error: BaseException) -> None:
        """Do nothing: what raised an error is named in PyTorch only."""

    def too_short(self) -> bool:
        """Return whether the script ended before any observed step."""
        return not self.watched


def refuse_static_graphs(observer: StepObserver, patches: Patches) -> None:
    """Refuse ``paddle.enable_static`` until ``patches`` are undone."""
    patches.replace(paddle, "enable_static", lambda *args, **kwargs: observer.static_graph("paddle.enable_static()"))
