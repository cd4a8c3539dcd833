"""Check whether a schedule waits for the optimizer, and for updates that the script's GradScaler skipped."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from mezzo.observe.lint.gradients import Gradients, GradientState
from mezzo.observe.lint.misuse_log import ENOUGH, MisuseLog
from mezzo.observe.source_lines import running_line


class LearningRates:
    """The steps of schedulers and of their optimizers."""

    def __init__(self, gradients: Gradients, log: MisuseLog) -> None:
        self._gradients, self._log = gradients, log
        self._first: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        """The line of a scheduler's first step if its optimizer had not stepped yet; empty once that was judged."""
        self._early: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def scheduler_stepped(self, scheduler: Any) -> None:
        """Record that the script steps a scheduler."""
        optimizer = getattr(scheduler, "optimizer", None)
        if not isinstance(optimizer, Optimizer):
            return
        state = self._gradients.of(optimizer)
        self._check_first(scheduler, optimizer, state)
        if state.passes:
            state.early = running_line()
        if state.skipped and not state.made:
            name = type(scheduler).__name__
            self._log.add("A610", f"{name}.step() after an update that the GradScaler skipped")
        state.made = state.skipped = 0

    def optimizer_steps(self, optimizer: Optimizer, state: GradientState, *, step: int) -> None:
        """Record that an optimizer is about to step."""
        if not state.early:
            return
        self._early[optimizer] = count = self._early.get(optimizer, 0) + 1
        if count >= ENOUGH:
            self._report(optimizer, state.early, step=step - 1 if count == ENOUGH else step)

    def _check_first(self, scheduler: Any, optimizer: Optimizer, state: GradientState) -> None:
        """Compare the lines of a scheduler's first two steps: a resumed loop advances its schedule in another line first."""
        stepped = bool(state.num_steps) or getattr(optimizer, "_opt_called", False)
        if scheduler not in self._first:
            self._first[scheduler] = "" if stepped or state.passes else running_line()
        elif self._first[scheduler]:
            first, self._first[scheduler] = self._first[scheduler], ""
            if state.num_steps and first == running_line():
                self._report(optimizer, first, step=1)

    def _report(self, optimizer: Optimizer, line: str, *, step: int) -> None:
        detail = f"the scheduler of {type(optimizer).__name__} steps before it in each iteration"
        self._log.add("A611", detail, line=line, step=step)
