"""Updates that a script leaves out by itself because a gradient is not finite.

A loop may check its gradients and continue without a step: ``if not torch.isfinite(norm): continue``. If the loss scale caused the
overflow, no optimizer would ever tell the scale, and every later pass would overflow as well. So gradients are checked after each pass
until one update has been finite at the present scale, and after that only if the script has dropped gradients before. A pass that
overflowed, whose gradients were dropped, and that the script repeats before an optimizer has stepped on these leaves, was an
update: it is recorded as a skipped one, and the scale backs off.

The same check tells of a script that replaces what is not finite (``torch.nan_to_num_``): its update is skipped, as under GradScaler.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor

from mezzo.engine.gradients import all_finite, not_finite, total_norm, trained_leaves
from mezzo.observe.skips import Update

if TYPE_CHECKING:
    from mezzo.launch.torch.state import Run

Leaf = Callable[[], Tensor | None]
Leaves = dict[int, Leaf]
"""Leaves by identity."""
Place = tuple[tuple[int, int], ...]
"""Where the script makes a pass: the code and the instruction of every frame."""


class LeftOutUpdates:
    """The passes whose gradients overflowed, until an optimizer steps on their leaves."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._scale: float | None = None
        self._proven = False
        """Whether an update was finite at this scale."""
        self._drops = False
        """Whether the script has dropped gradients without a step."""
        self._sample: tuple[Leaf, int, int] | None = None
        """A leaf of the last pass, with the address and the version of its gradient."""
        self._place: Place = ()
        """Where the last pass was made, if its gradients were to be checked."""
        self._lost: dict[Place, Leaves] = {}
        """The leaves whose gradients overflowed and on which no optimizer has stepped since, by the place of the pass."""
        self._dropped: dict[Place, Leaves] = {}
        """The same of passes whose gradients the script has dropped since."""

    def forget(self) -> None:
        """Forget all passes: they were no steps of the script's training."""
        self._sample, self._lost, self._dropped = None, {}, {}

    def pass_ended(self, leaves: Iterable[Tensor]) -> None:
        """Note a backward pass that was made with the loss scale; read one flag from the device if that is due."""
        run = self._run
        if run.in_closure:
            return
        held = [leaf for leaf in leaves if type(leaf.grad) is Tensor]
        plain = next((leaf for leaf in held if leaf.grad is not None and leaf.grad.layout is torch.strided), None)
        self._sample = None
        if plain is not None and plain.grad is not None:
            self._sample = ref(plain), plain.grad.data_ptr(), plain.grad._version
        if not held or (self._proven and not self._drops):
            return
        if not bool(not_finite(total_norm([_gradient(leaf) for leaf in held]))):
            return
        lost = [leaf for leaf in held if not all_finite([_gradient(leaf)])] or held
        self._lost.setdefault(self._place, {}).update({id(leaf): ref(leaf) for leaf in lost})

    def lost(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a gradient of an optimizer that is about to step has overflowed since its last step, whatever its value is now."""
        if not self._lost and not self._dropped:
            return False
        held = set(map(id, trained_leaves(optimizer)))
        others = {place: leaves for place, leaves in self._lost.items() if held.isdisjoint(leaves)}
        found = len(others) < len(self._lost)
        self._lost = others
        self._dropped = {place: leaves for place, leaves in self._dropped.items() if held.isdisjoint(leaves)}
        return found

    def closed(self, *, skipped: bool | None, scale: float) -> None:
        """Note the end of an update; ``skipped`` is None if its gradients were not checked."""
        self._sample = None
        # What no optimizer holds, as the 16-bit copies of a script's own master weights, is known to one update only.
        owned = self._run.owners.reached
        self._lost = {place: leaves for place, leaves in self._lost.items() if owned(_living(leaves))}
        self._proven = scale == self._scale and (self._proven or skipped is False)
        self._scale = scale

    def pass_begins(self) -> None:
        """Record the update of an earlier pass as skipped if the script left it out because of an overflow and now repeats the pass."""
        run = self._run
        if not run.scale.checks or run.in_closure:
            return
        self._note_dropped()
        if self._proven and not self._drops:
            return
        self._place = _place()
        leaves = self._dropped.pop(self._place, None)
        if leaves is None:
            return
        run.stepped = run.found = run.open_skipped = True
        run.made_by |= run.owners.reached(_living(leaves))
        if run.observer is not None:
            holders = [o for o in run.optimizers if any(id(p) in leaves for p in trained_leaves(o))]
            run.updates += [Update(scaler=0, optimizer=id(o), skipped=True) for o in holders]
        run.close_update()

    def _note_dropped(self) -> None:
        if self._sample is not None:
            find, address, version = self._sample
            leaf = find()
            gradient = None if leaf is None else leaf.grad
            self._drops |= gradient is None or (gradient.data_ptr(), gradient._version) != (address, version)
        elif (optimizer := self._run.steady.optimizer()) is not None:  # after a pass that was not noted
            self._drops |= any(p.grad is None for p in trained_leaves(optimizer))
        for place, leaves in tuple(self._lost.items()):
            there = _living(leaves)
            if there and all(leaf.grad is None or all_finite([_gradient(leaf)]) for leaf in there):
                self._dropped[place] = self._lost.pop(place)
                self._drops = True


def _gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    values: Tensor = leaf.grad._values() if leaf.grad.is_sparse else leaf.grad
    return values


def _living(leaves: Leaves) -> list[Tensor]:
    return [leaf for find in leaves.values() if (leaf := find()) is not None]


def _place() -> Place:
    """Return where the script is, without the frames of this package."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
    own = (frame for frame in frames if not frame.f_globals.get("__name__", "").startswith("mezzo."))
    return tuple((id(frame.f_code), frame.f_lasti) for frame in own)
