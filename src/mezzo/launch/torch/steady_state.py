"""Know when nothing of a run is left to record but losses, times and now and then a norm, and record only that.

The first hundred updates of a script are watched for what can go wrong in them. After that, without a loss scale and with one
optimizer, most of what stands before and after each step and backward pass finds nothing to do, and finding that out takes a
tenth of a small model's step. Whatever is new in a script (an optimizer, a GradScaler, compiled code, a session) ends it until
the next update has been looked at as a whole again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

if TYPE_CHECKING:
    from mezzo.launch.torch.state import Run


def nothing() -> None:
    """Stand for a weak reference to nothing."""


class Steady:
    """Whether a run is steady, and the record of its steps while it is."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.optimizer: Callable[[], torch.optim.Optimizer | None] = nothing
        """Returns the script's one optimizer while the run is steady; None otherwise."""
        self._made_by: frozenset[int] = frozenset()
        self._last: Callable[[], torch.optim.Optimizer | None] = nothing
        """Returns the optimizer that stepped last: one that has only been made is not known yet."""

    def update_made(self, optimizer: torch.optim.Optimizer) -> None:
        """Count an update that was recorded in full."""
        self._last = ref(optimizer)

    def begin(self) -> None:
        """Become steady if nothing more can come of what is watched in the first hundred updates."""
        run = self._run
        scaled = run.scale.checks or run.scaled_by_script or run.script_scaler is not None
        if scaled or run.observer is not None or run.compiles or not run.lint.over or len(run.optimizers) != 1:
            return
        optimizer = self._last()
        if optimizer is None or optimizer not in run.optimizers:
            return
        number, casting = run.owners.number(optimizer), run.main_casting
        if number is None or (casting is not None and casting.table is not None):
            return  # with a cast table, a backward pass has a region of its own
        if all(watcher.done(optimizer) for watcher in run.watchers):
            self.optimizer, self._made_by = ref(optimizer), frozenset((number,))

    def end(self) -> None:
        """Record everything again."""
        self.optimizer = self._last = nothing

    def turns(self, loss: Any) -> bool:
        """Close the update that is open and record the loss of the backward pass that begins; return False where more is to be done."""
        run = self._run
        if self.optimizer() is None or not run.stepped or run.in_backward or run.in_closure:
            return False
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return False
        run.stepped = False
        if run.made_by:
            run.made_by.clear()
        run.recorder.turn(loss, made_by=self._made_by)
        return True

    def close(self) -> bool:
        """Close the open update; return False where more is to be done."""
        if self.optimizer() is None:
            return False
        self._run.recorder.close(skipped=False, scale=None, made_by=self._made_by)
        return True
