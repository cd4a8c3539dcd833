"""Detect when only losses, times and an occasional norm are left to record, and record only those.

The first hundred updates of a script are checked for everything that can go wrong. After that, with one optimizer, most hooks around
each step and backward pass have nothing to do, and finding that out takes a tenth of a small model's step. Anything new in the script
(an optimizer, a GradScaler, compiled code, a session) ends the steady state until another update has been recorded in full. With a loss
scale, a pass that cannot be unscaled in one call (``batched_unscaling``) and an update that is skipped or changes the scale are recorded
in full, too. Calls of the script's own GradScaler are handled in ``steady_scaler``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import ref

import torch

from mezzo.launch.torch.gradients.batched_unscaling import BatchedUnscaling
from mezzo.launch.torch.script_amp.steady_scaler import SteadyScaler

if TYPE_CHECKING:
    from mezzo.launch.torch.state import Run

EVERY_NORM = 100
"""First steps whose gradient norms are all computed, even if no loss scale needs them."""


def _nothing() -> None:
    """Return None, as a weak reference to an object that is gone does."""


class Steady:
    """The steady state of a run, and the recording of its steps during it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.made_by: frozenset[int] = frozenset()
        """The number of ``optimizer``, whose updates are not recorded one by one."""
        self.batched = BatchedUnscaling(run)
        self.scaler_calls = SteadyScaler(run)
        """The calls of the script's own GradScaler."""
        self.optimizer: Callable[[], torch.optim.Optimizer | None] = _nothing
        """Returns the script's only optimizer while the run is steady; None otherwise."""
        self._last: Callable[[], torch.optim.Optimizer | None] = _nothing
        """Returns the optimizer that stepped last; None until one has."""

    def update_made(self, optimizer: torch.optim.Optimizer) -> None:
        """Count an update that was recorded in full."""
        self._last = ref(optimizer)

    def begin(self) -> None:
        """Begin the steady state if the checks of the first hundred updates can find nothing more."""
        run = self._run
        if run.observer is not None or run.compiles or not run.lint.over or len(run.optimizers) != 1:
            return
        if run.losses.may_be_several:
            return
        if run.applied is not None and run.applied.world > 1:
            return  # every backward pass has a reduction to emulate
        optimizer = self._last()
        if optimizer is None or optimizer not in run.optimizers:
            return
        number, casting = run.owners.number(optimizer), run.main_casting
        if number is None or (casting is not None and casting.table is not None):
            return  # with a cast table, a backward pass has a region of its own
        if not all(watcher.done(optimizer) for watcher in run.watchers):
            return
        also = 0 if run.script_scaler is None else self.scaler_calls.begin(run.script_scaler, optimizer)
        if also is not None:
            self.optimizer = ref(optimizer)
            self.made_by = frozenset((number,))
            scale = run.scale.value() if run.scale.checks else None
            run.recorder.prepare_advance(self.made_by, scale=scale, num_extras=also)

    def end(self) -> None:
        """Record everything again."""
        if self._run.stepped:
            self._run.made_by |= self.made_by
        self.optimizer = self._last = _nothing
        self.made_by = frozenset()
        self.scaler_calls.end()

    def close(self) -> bool:
        """Close the open update; return False if the full path is needed."""
        if self.optimizer() is None or self._run.scale.checks or self.scaler_calls.scaler is not None:
            return False
        self._run.recorder.close(skipped=False, scale=None, made_by=self.made_by)
        return True
