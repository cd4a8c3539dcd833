"""Updates of a script without an optimizer object: it updates its weights itself, and every backward pass counts as an update.

A script may also run passes before it creates its optimizer, to try out its model. If these changed no weight, they were no updates:
when the optimizer is created, the record starts over and says so. So does an observer, which does not end the script while the passes
so far may turn out to be such trials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor

from mezzo.engine.gradients import total_norm
from mezzo.engine.scaling import scale_for
from mezzo.observe.stopping import StopScript

if TYPE_CHECKING:
    from mezzo.launch.torch.state import Run

_BY_HAND = "update by hand"
_MAX_TRIALS = 100
"""Passes without an optimizer after which they count as steps, so that an observer that has seen enough ends the script."""
Leaf = tuple[Callable[[], Tensor | None], int, int]
"""A leaf of a pass, its version, and the address of its values."""


class UpdatesByHand:
    """The backward passes of a script that has created no optimizer."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._num = 0
        self._leaves: dict[int, Leaf] = {}
        """The leaves that passes have reached, by identity, as they were at the first of these passes."""
        self._sample: tuple[Callable[[], Tensor | None], Tensor] | None = None
        """The smallest leaf of the first pass, and its values then: a change through ``.data`` does not change its version."""
        self._wants_stop = False
        """Whether the observer has seen enough, if these passes are steps."""
        self.restart_observer: Callable[[], None] | None = None
        """Replaces the observer with a new one; None without an observer."""

    def reached(self, leaves: Sequence[Tensor]) -> None:
        """Record the leaves of a pass before the script may change them."""
        for leaf in leaves:
            known = self._leaves.get(id(leaf))
            if known is None or known[0]() is not leaf:
                self._leaves[id(leaf)] = ref(leaf), leaf._version, leaf.data_ptr()
        if self._sample is None and leaves:
            smallest = min(leaves, key=Tensor.numel)
            self._sample = ref(smallest), smallest.detach().clone()

    def record_update(self, gradients: list[Tensor]) -> None:
        """Record a pass as an update."""
        run = self._run
        self._num += 1
        run.note_left_alone("update", "by hand", "no optimizer object: every backward pass counts as an update")
        if gradients and run.updated(total_norm(gradients)):
            torch._foreach_zero_(gradients)  # so that the script's own update changes nothing
        run.update_made(None)

    def step_closed(self) -> None:
        """Notify the run's watchers that a step is over; raise ``StopScript`` if that was the last one requested."""
        run = self._run
        for watcher in tuple(run.watchers):
            try:
                watcher.step_closed(run.recorder.num_closed)
            except StopScript:
                if not self._may_be_trials():
                    raise
                self._wants_stop = True
        if self._wants_stop and not self._may_be_trials():
            raise StopScript

    def _may_be_trials(self) -> bool:
        """Return whether the steps so far may turn out to be trials once an optimizer is created."""
        run = self._run
        return run.observer is not None and 0 < self._num <= _MAX_TRIALS and not run.optimizers and not self._changed()

    def optimizer_created(self) -> None:
        """Forget all passes so far if they changed no weight: the training begins with the script's first optimizer."""
        run, num, self._num, self._wants_stop = self._run, self._num, 0, False
        if run.optimizers or (run.observer is not None and not run.observer.can_switch_modes()):
            return
        if not num:
            if run.observer is not None:
                run.observer.optimizer_created()
            return
        if self._changed():
            return
        run.left_alone.pop(_BY_HAND, None)
        why = "they changed no weight and the script had no optimizer yet, so they are no steps of its training"
        run.note_left_alone("backward passes", f"{num} before the optimizer", why)
        run.stepped, run.overflowed, run.open_skipped = False, None, False
        run.left_out.forget()
        run.losses.forget()
        run.recorder = run.recorder.replacement()
        if run.applied is not None and run.recorder.clock.device is not None:
            run.scale = scale_for(run.applied, run.recorder.clock.device, known=True)
        if self.restart_observer is not None:
            self.restart_observer()
        for watcher in run.watchers:
            watcher.steps_discarded()
        if run.guard is not None:
            run.guard.restart()

    def _changed(self) -> bool:
        """Return whether a leaf that still exists has changed since its first pass; reads the values of a small one."""
        for find, version, address in self._leaves.values():
            leaf = find()
            if leaf is not None and (leaf._version != version or leaf.data_ptr() != address):
                return True
        if self._sample is None:
            return False
        leaf, before = self._sample[0](), self._sample[1]
        return leaf is not None and not torch.equal(leaf.detach(), before)
