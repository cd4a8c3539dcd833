"""Check whether a schedule waits for the optimizer, and for updates that the script's GradScaler skipped."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from mezzo.observe.lint.gradients import Gradients, Held
from mezzo.observe.lint.noticed import ENOUGH, Noticed
from mezzo.observe.source_lines import running_line


class LearningRates:
    """The steps of schedulers and of their optimizers."""

    def __init__(self, gradients: Gradients, noticed: Noticed) -> None:
        self._gradients, self._noticed = gradients, noticed
        self._first: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        """The line of a scheduler's first step if its optimizer had made none; empty once that was judged."""
        self._early: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def moved(self, scheduler: Any) -> None:
        """Record that the script steps a scheduler."""
        optimizer = getattr(scheduler, "optimizer", None)
        if not isinstance(optimizer, Optimizer):
            return
        held = self._gradients.of(optimizer)
        self._check_first(scheduler, optimizer, held)
        if held.passes:
            held.early = running_line()
        if held.skipped and not held.made:
            name = type(scheduler).__name__
            self._noticed.add("A610", f"{name}.step() after an update that the GradScaler skipped")
        held.made = held.skipped = 0

    def stepping(self, optimizer: Optimizer, held: Held, *, step: int) -> None:
        """Record that an optimizer is about to step."""
        if not held.early:
            return
        self._early[optimizer] = seen = self._early.get(optimizer, 0) + 1
        if seen >= ENOUGH:
            self._report(optimizer, held.early, step=step - 1 if seen == ENOUGH else step)

    def _check_first(self, scheduler: Any, optimizer: Optimizer, held: Held) -> None:
        """Compare the lines of a scheduler's first two steps: a resumed loop advances the schedule at a separate line."""
        stepped = bool(held.num_steps) or getattr(optimizer, "_opt_called", False)
        if scheduler not in self._first:
            self._first[scheduler] = "" if stepped or held.passes else running_line()
        elif self._first[scheduler]:
            first, self._first[scheduler] = self._first[scheduler], ""
            if held.num_steps and first == running_line():
                self._report(optimizer, first, step=1)

    def _report(self, optimizer: Optimizer, line: str, *, step: int) -> None:
        detail = f"the scheduler of {type(optimizer).__name__} steps before it in each iteration"
        self._noticed.add("A611", detail, line=line, step=step)
