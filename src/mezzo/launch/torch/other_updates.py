"""Updates that no optimizer makes: the script leaves one out because a gradient is not finite, or updates its weights itself.

A loop may check its gradients and continue without a step: ``if not torch.isfinite(norm): continue``. If the loss scale caused the
overflow, no optimizer step would report that to the scale, and every later pass would overflow as well. So gradients are checked after
each pass until one update has been finite at the present scale, and after that only if the script has dropped gradients before. If a
pass overflowed, its gradients were dropped, and the script repeats it before an optimizer has stepped on these leaves, then the pass was
an update: it is recorded as a skipped one, and the scale backs off.

The same check detects a script that replaces non-finite gradients (``torch.nan_to_num_``): its update is skipped, as under GradScaler.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mezzo.engine.gradients import all_finite, finite_each, not_finite, total_norm, trained_leaves
from mezzo.launch.torch.notes import Listeners, RunNotes
from mezzo.launch.torch.open_update import OpenUpdate
from mezzo.launch.torch.precision import ScriptPrecision
from mezzo.launch.torch.script_objects import ScriptObjects
from mezzo.launch.torch.steady_state import SteadyState
from mezzo.observe.observer import Update
from mezzo.observe.settings import StopScript

Leaf = Callable[[], Tensor | None]
Leaves = dict[int, Leaf]
"""Leaves by identity."""
Place = tuple[tuple[int, int], ...]
"""Where the script runs a pass: the code and the instruction of every frame."""


class DroppedUpdates:
    """The passes whose gradients overflowed, until an optimizer steps on their leaves."""

    def __init__(
        self,
        precision: ScriptPrecision,
        update: OpenUpdate,
        objects: ScriptObjects,
        listeners: Listeners,
        steady_state: SteadyState,
    ) -> None:
        self._precision, self._update, self._objects = precision, update, objects
        self._listeners, self._steady_state = listeners, steady_state
        self._scale: float | None = None
        self._proven = False
        """Whether an update was finite at the present scale."""
        self.drops = False
        """Whether the script has dropped gradients without a step."""
        self._sample: tuple[Leaf, int, int] | None = None
        """A leaf of the last pass, with the address and the version of its gradient."""
        self._place: Place = ()
        """Where the last pass ran, if its gradients were to be checked."""
        self._overflowed: dict[Place, Leaves] = {}
        """By the place of the pass, the leaves whose gradients overflowed and on which no optimizer has stepped since."""
        self._dropped: dict[Place, Leaves] = {}
        """The same for passes whose gradients the script has dropped since."""

    def resume(self, *, drops: bool) -> None:
        """Continue a run whose script had, or had not, dropped gradients without a step."""
        self.drops = drops

    @property
    def waits(self) -> bool:
        """Whether the gradients of a pass overflowed, and no update has followed yet."""
        return bool(self._overflowed or self._dropped)

    def forget(self) -> None:
        """Forget all passes: they were no training steps."""
        self._sample, self._overflowed, self._dropped = None, {}, {}

    def pass_ended(self, leaves: Iterable[Tensor]) -> None:
        """Note a backward pass that ran with the loss scale; read one flag from the device if its gradients are to be checked."""
        if self._update.in_closure:
            return
        if torch._C._len_torch_dispatch_stack():  # observers: nothing of the training is computed from these numbers
            with _disable_current_modes():
                self.pass_ended(leaves)
            return
        reached = [leaf for leaf in leaves if type(leaf.grad) is Tensor]
        plain = next((leaf for leaf in reached if leaf.grad is not None and leaf.grad.layout is torch.strided), None)
        self._sample = None
        if plain is not None and plain.grad is not None:
            self._sample = ref(plain), plain.grad.data_ptr(), plain.grad._version
        if not reached or (self._proven and not self.drops):
            return
        gradients = [_gradient(leaf) for leaf in reached]
        if not bool(not_finite(total_norm(gradients))):
            return
        finite = finite_each(gradients).tolist()
        overflowed = [leaf for leaf, is_finite in zip(reached, finite, strict=True) if not is_finite] or reached
        self._overflowed.setdefault(self._place, {}).update({id(leaf): ref(leaf) for leaf in overflowed})

    def overflowed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a gradient of an optimizer that is about to step has overflowed since its last step, whatever its value is now."""
        if not self._overflowed and not self._dropped:
            return False
        trained = set(map(id, trained_leaves(optimizer)))
        others = {place: leaves for place, leaves in self._overflowed.items() if trained.isdisjoint(leaves)}
        found = len(others) < len(self._overflowed)
        self._overflowed = others
        self._dropped = {place: leaves for place, leaves in self._dropped.items() if trained.isdisjoint(leaves)}
        return found

    def closed(self, *, skipped: bool | None, scale: float) -> None:
        """Note the end of an update; ``skipped`` is None if its gradients were not checked."""
        self._sample = None
        # Leaves that no optimizer trains, such as the 16-bit copies of a script's own master weights, are kept for one update only.
        owned = self._objects.numbers.reached
        self._overflowed = {place: leaves for place, leaves in self._overflowed.items() if owned(_living(leaves))}
        self._proven = scale == self._scale and (self._proven or skipped is False)
        self._scale = scale

    def pass_begins(self) -> bool:
        """Return whether the pass is an earlier one again, whose update the script left out because of an overflow.

        Then that update is open, as a skipped one.
        """
        if not self._precision.scale.skips_overflows or self._update.in_closure:
            return False
        self._note_dropped()
        if self._proven and not self.drops:
            return False
        self._place = _place()
        leaves = self._dropped.pop(self._place, None)
        if leaves is None:
            return False
        parts: list[Update] = []
        if self._listeners.observer is not None:
            owners = [o for o in self._objects.optimizers if any(id(p) in leaves for p in trained_leaves(o))]
            parts = [Update(scaler=0, optimizer=id(o), skipped=True) for o in owners]
        self._update.drop(self._objects.numbers.reached(_living(leaves)), parts)
        return True

    def _note_dropped(self) -> None:
        if self._sample is not None:
            find, address, version = self._sample
            leaf = find()
            gradient = None if leaf is None else leaf.grad
            self.drops |= gradient is None or (gradient.data_ptr(), gradient._version) != (address, version)
        elif (optimizer := self._steady_state.optimizer()) is not None:  # after a pass that was not noted
            self.drops |= any(p.grad is None for p in trained_leaves(optimizer))
        for place, leaves in tuple(self._overflowed.items()):
            living = _living(leaves)
            if living and all(leaf.grad is None or all_finite([_gradient(leaf)]) for leaf in living):
                self._dropped[place] = self._overflowed.pop(place)
                self.drops = True


def _gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    values: Tensor = leaf.grad._values() if leaf.grad.is_sparse else leaf.grad
    return values


def _living(leaves: Leaves) -> list[Tensor]:
    return [leaf for find in leaves.values() if (leaf := find()) is not None]


def _place() -> Place:
    """Return the place where the script is running, without Mezzo's frames."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
    outside = (frame for frame in frames if not frame.f_globals.get("__name__", "").startswith("mezzo."))
    return tuple((id(frame.f_code), frame.f_lasti) for frame in outside)


# A script may also run passes before it creates its optimizer, to try out its model. If these changed no weight, they were no updates:
# when the optimizer is created, the record starts over and says so. So does an observer, which does not end the script while the passes
# so far may turn out to be such trials.

_BY_HAND = "update by hand"
_MAX_TRIALS = 100
"""Passes without an optimizer after which they count as steps, so that an observer that has seen enough ends the script."""


class UpdatesByHand:
    """The backward passes of a script that has created no optimizer."""

    def __init__(self, update: OpenUpdate, objects: ScriptObjects, notes: RunNotes, listeners: Listeners) -> None:
        self._update, self._objects, self._notes, self._listeners = update, objects, notes, listeners
        self._num = 0
        self._leaves: dict[int, tuple[Callable[[], Tensor | None], int, int]] = {}
        """The leaves that passes have reached, by identity, with their versions and the addresses of their values at the first pass."""
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
        if not self._may_be_trials():
            if self._wants_stop:
                raise StopScript
            self._listeners.retire()

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
