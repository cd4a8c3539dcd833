"""Updates of a script without an optimizer object: it updates its weights itself, and every backward pass counts as an update.

A script may also run passes before it creates its optimizer, to try out its model. If these changed no weight, they were no updates:
when the optimizer is created, the record starts over and says so. So does an observer, which does not end the script while the passes
so far may turn out to be such trials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import ref

import torch
from torch import Tensor

from mezzo.launch.torch.listeners import Listeners
from mezzo.launch.torch.notes import RunNotes
from mezzo.launch.torch.script_objects import ScriptObjects
from mezzo.launch.torch.updates.open_update import OpenUpdate
from mezzo.observe.settings import StopScript

_BY_HAND = "update by hand"
_MAX_TRIALS = 100
"""Passes without an optimizer after which they count as steps, so that an observer that has seen enough ends the script."""
Leaf = tuple[Callable[[], Tensor | None], int, int]
"""A leaf of a pass, its version, and the address of its values."""


class UpdatesByHand:
    """The backward passes of a script that has created no optimizer."""

    def __init__(self, update: OpenUpdate, objects: ScriptObjects, notes: RunNotes, listeners: Listeners) -> None:
        self._update, self._objects, self._notes, self._listeners = update, objects, notes, listeners
        self._num = 0
        self._leaves: dict[int, Leaf] = {}
        """The leaves that passes have reached, by identity, as they were at the first of these passes."""
        self._sample: tuple[Callable[[], Tensor | None], Tensor] | None = None
        """The smallest leaf of the first pass, and its values then: a change through ``.data`` does not change its version."""
        self._wants_stop = False
        """Whether the observer has seen enough, if these passes are steps."""

    def reached(self, leaves: Sequence[Tensor]) -> None:
        """Record the leaves of a pass before the script may change them."""
        for leaf in leaves:
            known = self._leaves.get(id(leaf))
            if known is None or known[0]() is not leaf:
                self._leaves[id(leaf)] = ref(leaf), leaf._version, leaf.data_ptr()
        if self._sample is None and leaves:
            smallest = min(leaves, key=Tensor.numel)
            self._sample = ref(smallest), smallest.detach().clone()

    def count_pass(self) -> None:
        """Count a pass as an update."""
        self._num += 1
        self._notes.note_left_alone("update", "by hand", "no optimizer object: every backward pass counts as an update")

    def step_closed(self) -> None:
        """Notify the run's listeners that a step is over; raise ``StopScript`` if that was the last one requested."""
        for listener in tuple(self._listeners.all):
            try:
                listener.step_closed(self._update.recorder.num_closed)
            except StopScript:
                if not self._may_be_trials():
                    raise
                self._wants_stop = True
        if self._wants_stop and not self._may_be_trials():
            raise StopScript

    def _may_be_trials(self) -> bool:
        """Return whether the steps so far may turn out to be trials once an optimizer is created."""
        observed = self._listeners.observer is not None
        return observed and 0 < self._num <= _MAX_TRIALS and not self._objects.optimizers and not self._changed()

    def were_trials(self) -> bool:
        """Return whether the passes so far changed no weight, now that the script builds an optimizer: then it begins to train here."""
        num, self._num, self._wants_stop = self._num, 0, False
        observer = self._listeners.observer
        if self._objects.optimizers or (observer is not None and not observer.can_switch_modes()):
            return False
        if not num:
            if observer is not None:
                observer.optimizer_created()
            return False
        if self._changed():
            return False
        self._notes.forget(_BY_HAND)
        why = "they changed no weight and the script had no optimizer yet, so they are no steps of its training"
        self._notes.note_left_alone("backward passes", f"{num} before the optimizer", why)
        return True

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
