"""Check whether a schedule waits for the optimizer, and for updates that the script's GradScaler skipped.

A fused optimizer skips by itself, and only the device knows whether it did: these flags are read once, at the end, up to ``MAX_FLAGS``.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from mezzo.observe.lint.gradients import MAX_FLAGS, Gradients, GradientState
from mezzo.observe.lint.misuse_log import ENOUGH, MisuseLog
from mezzo.observe.source_lines import running_line


def _after_skip(scheduler: str) -> str:
    return f"{scheduler}.step() after an update that the GradScaler skipped"


class LearningRates:
    """The steps of schedulers and of their optimizers."""

    def __init__(self, gradients: Gradients, log: MisuseLog) -> None:
        self._gradients, self._log = gradients, log
        self._first: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        """The line of a scheduler's first step if its optimizer had not stepped yet; empty once that was judged."""
        self._flagged: list[tuple[Tensor, str, str, int]] = []
        """Steps of schedulers after an update that may have been skipped: its flag, the scheduler's class, the line, the step."""
        self._early: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def scheduler_stepped(self, scheduler: Any, *, step: int) -> None:
        """Record that the script steps a scheduler during ``step``."""
        optimizer = getattr(scheduler, "optimizer", None)
        if not isinstance(optimizer, Optimizer):
            return
        state = self._gradients.of(optimizer)
        self._check_first(scheduler, optimizer, state)
        if state.passes:
            state.early = running_line()
        name = type(scheduler).__name__
        if state.skipped and not state.made:
            self._log.add("A610", _after_skip(name))
        elif state.flag is not None and state.made == 1 and len(self._flagged) < MAX_FLAGS:
            self._flagged.append((state.flag, name, running_line(), step))
        state.made, state.skipped, state.flag = 0, 0, None

    def read_flags(self) -> None:
        """Report the steps of schedulers after updates that fused optimizers have skipped."""
        flagged, self._flagged = self._flagged, []
        for flag, name, line, step in flagged:
            if flag.item():
                self._log.add("A610", _after_skip(name), line=line, step=step)

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
