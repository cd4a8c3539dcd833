"""Updates that a script itself leaves out because a gradient is not finite.

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
from collections.abc import Callable, Iterable
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mezzo.engine.gradients import all_finite, finite_each, not_finite, total_norm, trained_leaves
from mezzo.launch.torch.listeners import Listeners
from mezzo.launch.torch.precision import ScriptPrecision
from mezzo.launch.torch.script_objects import ScriptObjects
from mezzo.launch.torch.steady_state import Steady
from mezzo.launch.torch.updates.open_update import OpenUpdate
from mezzo.observe.observer import Update

Leaf = Callable[[], Tensor | None]
Leaves = dict[int, Leaf]
"""Leaves by identity."""
Place = tuple[tuple[int, int], ...]
"""Where the script runs a pass: the code and the instruction of every frame."""


class LeftOutUpdates:
    """The passes whose gradients overflowed, until an optimizer steps on their leaves."""

    def __init__(
        self,
        precision: ScriptPrecision,
        update: OpenUpdate,
        objects: ScriptObjects,
        listeners: Listeners,
        steady: Steady,
    ) -> None:
        self._precision, self._update, self._objects = precision, update, objects
        self._listeners, self._steady = listeners, steady
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

        Then that update is open, as one that was skipped.
        """
        if not self._precision.scale.checks or self._update.in_closure:
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
        self._update.left_out(self._objects.numbers.reached(_living(leaves)), parts)
        return True

    def _note_dropped(self) -> None:
        if self._sample is not None:
            find, address, version = self._sample
            leaf = find()
            gradient = None if leaf is None else leaf.grad
            self.drops |= gradient is None or (gradient.data_ptr(), gradient._version) != (address, version)
        elif (optimizer := self._steady.optimizer()) is not None:  # after a pass that was not noted
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
